"""How often what a search of level 0 may assume is false, measured on random questions.

    A1  one mixed pool that holds with n workers holds with n + 1
    A2  a pair that holds with d decode workers holds with d + 1, beside the same p prefill workers
    A3  a prefill pool that misses TTFT when every request leaves with its first token
        (oracle.prefill_meets_ttft_alone) fails beside any decode pool;  A3o: the same if every request is
    handed to decodes that take no time A4  a prefill pool that leads with p workers leads with p + 1;  A4o:
    likewise A5  a pair that holds with p prefill workers holds with p + 1, beside the same d
    A6  a pair that fails on nothing but gaps (tbt, tpot) with p fails with p + 1 and the same d
    A7  a decode pool whose backlog grows with instant prefill (oracle.decode_keeps_up_alone) fails behind any
    prefill pool

`Tally.tested` counts the neighbours of which the premise is true, `failed` those of which the conclusion is
false. An assumption changes the optimum of a question if the cheapest fleet that holds would be taken for one
that fails by it, from some other count of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from random_questions import Question

from planner.domain import Slo
from planner.fleet import Fleet, Pool, WorkerType
from planner.search.oracle.fleet_oracle import INSTANT, NO_LINK
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import decode_options, mixed_options, prefill_options
from planner.search.problem.plan_problem import Problem, with_policies
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import Verdict, judge_slo
from planner.solvers.master import Option
from planner.traffic.trace import Trace

NAMES = ("A1", "A2", "A3", "A3o", "A4", "A4o", "A5", "A6", "A7")
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Tally:
    tested: int = 0
    failed: int = 0
    questions: int = 0
    changed: int = 0
    dearer_frac: list[float] = field(default_factory=list)

    def count(self, premise: Bools, conclusion: Bools) -> None:
        self.tested += int(premise.sum())
        self.failed += int((premise & ~conclusion).sum())

    def add(self, other: Tally) -> None:
        self.tested += other.tested
        self.failed += other.failed
        self.questions += other.questions
        self.changed += other.changed
        self.dearer_frac += other.dearer_frac


def measure(question: Question, most: int, rng: np.random.Generator) -> dict[str, Tally]:
    """Every count up to `most` of the drawn fleet's pools, and of others picked by `rng`."""
    task = question.task
    problem = with_policies(build_problem(task, question.trace, question.catalog), task.policy_choices()[-1])
    tallies = {name: Tally(questions=1) for name in NAMES}
    mixed, pairs = _picked(question, problem, rng)
    cheapest = {name: np.inf for name in ("all", *NAMES)}

    def offer(name: str, prices: npt.NDArray[np.float64], holds: Bools) -> None:
        cheapest[name] = min(cheapest[name], float(prices[holds].min(initial=np.inf)))

    for option in mixed:
        holds = np.array([_verdict(problem, ((option, n),)).holds for n in range(1, most + 1)])
        prices = option.objective * np.arange(1.0, most + 1)
        tallies["A1"].count(holds[:-1], holds[1:])
        for name in ("all", *NAMES):
            offer(name, prices, holds & _none_beyond(holds) if name == "A1" else holds)
    for front, back in pairs:
        found = _grid(problem, front, back, most)
        holds, gaps_alone = found.holds, found.gaps_alone
        counts = np.arange(1, most + 1)
        prices = front.objective * counts[:, None] + back.objective * counts.astype(float)
        tallies["A2"].count(holds[:, :-1], holds[:, 1:])
        tallies["A5"].count(holds[:-1], holds[1:])
        tallies["A6"].count(gaps_alone[:-1], ~holds[1:])
        kept = {name: holds for name in ("all", *NAMES)}
        kept["A2"] = holds & _none_beyond(holds.T).T
        kept["A5"] = holds & _none_beyond(holds)
        kept["A6"] = holds & ~_any_before(gaps_alone)
        if any(limit.metric == "ttft" for limit in problem.slo.limits):
            for suffix, outputs in (("", False), ("o", True)):
                leads = np.array([_leads(problem, front, p, outputs=outputs) for p in range(1, most + 1)])
                tallies["A3" + suffix].count(np.repeat(~leads[:, None], most, axis=1), ~holds)
                tallies["A4" + suffix].count(leads[:-1], leads[1:])
                kept["A3" + suffix] = holds & leads[:, None]
                kept["A4" + suffix] = holds & (_none_beyond(leads) | ~leads)[:, None]
        alone = replace(problem.oracle, spare_workers=0, spare_nodes=0, spot={})
        follows = np.array([alone.decode_keeps_up_alone(((back, d),)) for d in range(1, most + 1)])
        tallies["A7"].count(np.repeat(~follows[None, :], most, axis=0), ~holds)
        kept["A7"] = holds & follows[None, :]
        for name in ("all", *NAMES):
            offer(name, prices, kept[name])
    for name in NAMES:
        if cheapest[name] > cheapest["all"] * (1 + 1e-9):
            tallies[name].changed = 1
            tallies[name].dearer_frac.append(cheapest[name] / cheapest["all"] - 1)
    return tallies


@dataclass(frozen=True, slots=True)
class _Grid:
    """Of (p, d): does it hold, does it fail on gaps alone, are its limits on TTFT kept?"""

    holds: Bools
    gaps_alone: Bools
    ttft_kept: Bools


def _grid(problem: Problem, front: Option, back: Option, most: int) -> _Grid:
    shape = (most, most)
    holds, gaps_alone, ttft_kept = (np.zeros(shape, bool) for _ in range(3))
    for p in range(1, most + 1):
        for d in range(1, most + 1):
            verdict = _verdict(problem, ((front, p), (back, d)))
            kept = {line.limit.metric: True for line in verdict.lines}
            for line in verdict.lines:
                kept[line.limit.metric] &= line.holds
            gaps = kept.get("tbt", True) and kept.get("tpot", True)
            holds[p - 1, d - 1] = verdict.holds
            ttft_kept[p - 1, d - 1] = kept.get("ttft", True)
            gaps_alone[p - 1, d - 1] = not gaps and kept.get("ttft", True) and kept.get("e2e", True)
    return _Grid(holds, gaps_alone, ttft_kept)


def _none_beyond(holds: Bools) -> Bools:
    """Where nothing fails at a larger count (along the first axis)."""
    fails_later = np.flip(np.logical_or.accumulate(np.flip(~holds, 0), axis=0), 0)
    beyond = np.zeros_like(holds)
    beyond[:-1] = fails_later[1:]
    return ~beyond


def _any_before(cells: Bools) -> Bools:
    """Where there is one at a smaller count (along the first axis)."""
    before = np.zeros_like(cells)
    before[1:] = np.logical_or.accumulate(cells, axis=0)[:-1]
    return before


def _picked(
    question: Question, problem: Problem, rng: np.random.Generator
) -> tuple[list[Option], list[tuple[Option, Option]]]:
    objective = problem.task.objective
    mixed = mixed_options(problem.types, objective)
    fronts, backs = prefill_options(problem.types, objective), decode_options(problem.types, objective)
    drawn = {f"{option.role} {option.type.name}" for option, _ in question.drawn}

    def one(options: list[Option]) -> Option:
        return options[int(rng.integers(len(options)))]

    def like_drawn(options: list[Option]) -> Option:
        return next((option for option in options if option.name in drawn), one(options))

    pairs = {(like_drawn(fronts), like_drawn(backs)), (one(fronts), one(backs))}
    chosen = {like_drawn(mixed), one(mixed)}
    order = {option.name: i for i, option in enumerate((*mixed, *fronts, *backs))}
    return (
        sorted(chosen, key=lambda option: order[option.name]),
        sorted(pairs, key=lambda pair: (order[pair[0].name], order[pair[1].name])),
    )


def _verdict(problem: Problem, counts: tuple[tuple[Option, int], ...]) -> Verdict:
    simulation = simulate(problem.oracle.fleet(counts), problem.trace, limits=problem.slo.limits)
    return judge_slo(simulation, problem.slo, with_percentiles=False)


def _leads(problem: Problem, option: Option, count: int, *, outputs: bool) -> bool:
    """Whether a prefill pool keeps the limits on TTFT if each request leaves with its first token, one of one
    token; with `outputs` it is handed to decodes that take no time.
    """
    slo = Slo(tuple(limit for limit in problem.slo.limits if limit.metric == "ttft"))
    trace = problem.trace
    decode = Pool("dec", "decode", instant(option.type, trace), 1)
    pools: tuple[Pool, ...] = (Pool("pre", "prefill", option.type, count), decode)
    if not outputs:
        trace = replace(trace, output_tokens=np.ones_like(trace.output_tokens))
        pools = (Pool("pre", "mixed", option.type, count),)
    fleet = Fleet(problem.llm, pools, problem.oracle.policies, NO_LINK)
    return judge_slo(simulate(fleet, trace, limits=slo.limits), slo, with_percentiles=False).holds


def instant(worker: WorkerType, trace: Trace) -> WorkerType:
    """A worker that takes no time, with room for everything."""
    all_tokens = int((trace.input_tokens + trace.output_tokens + 32).sum())
    return WorkerType(worker.gpu, 1, INSTANT, 16 * all_tokens, 8192, 256)
