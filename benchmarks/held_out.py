"""Simulates plans in scenarios that no search or test has seen, and on the half of a trace that they were not
planned from.

    python benchmarks/held_out.py scenarios [--only NAME ...] [--count 200] [--hindsight] [--loss]
    python benchmarks/held_out.py halves [--only NAME ...]
    python benchmarks/held_out.py small [--only SEED ...] [--count 200]
    all: [--traces DIR]

scenarios Plans with the defaults (safety: {kept_in: 0.9}) and without a time limit, so that answers do not
          depend on the machine. Counts in how many new scenarios (planner/search/oracle/scenarios.py) the
          fleet on paper and that of production keep the SLO; with --loss also the fleet with a loss, after
          the loss. --hindsight looks for the cheapest fleet of level 0 that keeps the SLO in 90 % of these
          same scenarios, and in 88 % if production keeps it in more than 97 %.
halves    Plans from each half of a trace, at the rate of the other half, and simulates the fleets on paper
          and of production on that other half, with step times as predicted.
small     Small questions: simulates every fleet of level 0 that is over 2 % cheaper than production in new
          scenarios.

Prints a table in Markdown, each row as soon as it is known. DIR holds AzureLLMInferenceTrace_{conv,code}.csv,
mooncake_{conversation,synthetic}_trace.jsonl.gz and servegen/m-large-day9-1in20.csv.gz; default:
../shared/data/traces beside the clone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.generated_traffic import lognormal, synthesise
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.facts import Answered
from planner.documents.task import PlanQuestion, parse_task
from planner.search.evidence.certify import search_llm
from planner.search.mixed.best_fleet import FleetSearch, best_of
from planner.search.oracle.deterministic_parallel import run_wave
from planner.search.oracle.fleet_counts import Counts, may_hand_over, objective_of
from planner.search.oracle.scenarios import Scenarios, drawn_by
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.plan_problem import Problem, with_scenarios
from planner.search.production.cheapest_kept import find_cheaper_kept, grow_until_kept
from planner.search.production.three_answers import Production, plan_production
from planner.simulator.slo_verdict import in_windows, windows_s
from planner.solvers.master import Option
from planner.traffic.trace import Trace, spread_stamps
from planner.traffic.trace_reading import read_trace

DEFAULT_TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
# The kind of these scenarios, which sets them apart from those of a search (1) and of its test (2); any seed.
HELD_OUT, SEED = 3, 2718
AT_ONCE = 4  # So many scenarios are simulated at once; more would need more memory.
# With hindsight: the shares of scenarios in which a fleet must keep the SLO. FEWER is tried too if production
# keeps it in more than MOST_KEPT.
KEPT_IN, FEWER, MOST_KEPT = 0.9, 0.88, 0.97
CHEAPER = 0.02  # A fleet counts as cheaper than production if it costs less by at least this share.
MOST, MOST_ALONE = 12, 40  # Workers of a pool in a small question: of one of two pools, and of the only one.
EVERY_S = 300.0  # Length of the windows in which a half is judged.
USUAL: dict[str, object] = {"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}}
CONV, CODE = "AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv"
MOONCAKE, TOOLS = "mooncake_conversation_trace.jsonl.gz", "mooncake_synthetic_trace.jsonl.gz"
SERVEGEN = "servegen/m-large-day9-1in20.csv.gz"


@dataclass(frozen=True)
class PlanCase:
    """A question: a trace, and the keys of slo.yaml, of which `more` has those without a field here. `hours`
    are the part of the trace that is taken (from, until), None the whole. `rate_rps` None is the trace's own
    rate.
    """

    trace: str
    rate_rps: float | None = None
    slo: dict[str, object] = field(default_factory=lambda: USUAL)
    llm: str = "llama-3.1-70b"
    more: dict[str, object] = field(default_factory=dict)
    hours: tuple[float, float] | None = None
    window: str = "whole"

    def task(self, catalog: Catalog, rate_rps: float | None = None) -> PlanQuestion:
        """The question, at `rate_rps` requests/s where that is given."""
        fleet = {"gpus": ["a100-80g", "h100-80g"]}
        document = {"llm": self.llm, "slo": self.slo, "fleet": fleet, **self.more}
        if (rate_rps := rate_rps or self.rate_rps) is not None:
            document["traffic"] = {"rate": rate_rps, "window": self.window}
        return parse_task(document, catalog)

    def read(self, folder: Path) -> Trace:
        """The requests of the trace in this folder."""
        trace = read_trace(folder / self.trace, seed=None)
        return trace if self.hours is None else between(trace, *(3600 * hour for hour in self.hours))


def between(trace: Trace, from_s: float, until_s: float) -> Trace:
    """The requests that arrive from `from_s` to before `until_s` after the first."""
    at_s = trace.arrival_s - trace.arrival_s[0]
    part = trace.select((at_s >= from_s) & (at_s < until_s))
    return replace(part, arrival_s=part.arrival_s - part.arrival_s[0])


PLANS = {
    f"{name} {'own' if rate is None else f'{rate:g}'}": PlanCase(
        file, rate, window={70.0: "first 10 min", 200.0: "first 3 min"}.get(rate or 0.0, "whole")
    )
    for name, file in (("conv", CONV), ("code", CODE))
    for rate in (None, 20.0, 70.0, 200.0)
} | {
    "conv 20, TTFT p90 1 s, TBT p99 100 ms": PlanCase(
        CONV, 20.0, {"ttft": {"p90": "1 s"}, "tbt": {"p99": "100 ms"}}
    ),
    "conv 20, TTFT p99 2 s": PlanCase(CONV, 20.0, {"ttft": {"p99": "2 s"}, "tbt": {"p99": "200 ms"}}),
    "conv own, TPOT p90 40 ms, E2E p90 30 s": PlanCase(
        CONV, None, {"ttft": {"p90": "2 s"}, "tpot": {"p90": "40 ms"}, "e2e": {"p90": "30 s"}}
    ),
    "code own, TTFT p90 500 ms": PlanCase(CODE, None, {"ttft": {"p90": "500 ms"}, "tbt": {"p99": "100 ms"}}),
    "code 20, TTFT p99 4 s, 8B": PlanCase(
        CODE, 20.0, {"ttft": {"p99": "4 s"}, "tbt": {"p99": "100 ms"}}, "llama-3.1-8b"
    ),
    "mooncake own, TTFT p90 5 s": PlanCase(
        MOONCAKE, None, {"ttft": {"p90": "5 s"}, "tbt": {"p99": "200 ms"}}
    ),
    "mooncake own, prefix caches": PlanCase(
        MOONCAKE,
        None,
        {"ttft": {"p90": "5 s"}, "tbt": {"p99": "200 ms"}},
        more={"policies": {"prefix_cache": True}},
        hours=(0.0, 0.25),
    ),
    "mooncake synthetic, 30B-A3B": PlanCase(
        TOOLS, None, {"ttft": {"p90": "5 s"}, "tbt": {"p99": "100 ms"}}, "Qwen/Qwen3-30B-A3B-Instruct-2507"
    ),
    "servegen 13 h to 17 h": PlanCase(SERVEGEN, hours=(13.0, 17.0)),
    "servegen 13 h to 17 h, every 30 min": PlanCase(
        SERVEGEN, None, USUAL | {"every": "30 min"}, hours=(13.0, 17.0)
    ),
}


def interval(kept: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share."""
    share, scale = kept / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2)) / scale
    return max(middle - half, 0.0), min(middle + half, 1.0)


def answered(
    question: PlanQuestion, trace: Trace, catalog: Catalog
) -> tuple[Problem, FleetSearch, Production]:
    """The problem, the search for the fleet on paper, and that for production."""
    problem, on_paper = best_of(search_llm(SearchInputs(question, trace, catalog)))
    production = plan_production(problem, on_paper)
    assert production is not None  # It is None only if time runs out, and there is no time limit.
    return problem, on_paper, production


def counts_of(answer: Answered, options: Sequence[Option]) -> Counts:
    """The fleet of an answer as options with their counts; options are recognised by role, GPU, parallelism
    and token budget.
    """
    option_by_key: dict[tuple[str, str, int, int, int], Option] = {
        (option.role, option.type.gpu.name, option.type.tp, option.type.pp, budget): option
        for option in options
        for budget in [option.type.max_num_batched_tokens]
    }
    return tuple(
        (option_by_key[row.role, row.gpu, row.tp, row.pp, row.max_num_batched_tokens], row.count)
        for row in answer.workers
    )


def shown(counts: Counts) -> str:
    """The fleet as text, such as "2 mixed h100-80g tp4 (2048)", with the token budget in brackets."""
    return " + ".join(
        f"{count} {option.role} {worker.gpu.name} tp{worker.tp} ({worker.max_num_batched_tokens})"
        for option, count in counts
        for worker in [option.type]
    )


def share_text(kept: int, count: int) -> str:
    """A share in percent with its interval, such as "91.5 % (87-95)"."""
    low, high = interval(kept, count)
    return f"{100 * kept / count:.1f} % ({100 * low:.0f}-{100 * high:.0f})"


def table(head: Sequence[str]) -> None:
    """Print the head of a table in Markdown."""
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)


def row(cells: Sequence[object]) -> None:
    """Print a row of the table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def kept_in(
    problem: Problem, scenarios: Scenarios, numbers: Sequence[int], fleets: Sequence[Counts]
) -> list[list[bool]]:
    """Whether each of these fleets keeps the SLO in each of these scenarios."""
    kept = [[False] * len(numbers) for _ in fleets]

    def simulate_scenario(index: int) -> None:
        oracle = problem.oracle.in_scenario(scenarios[numbers[index]])
        for i, counts in enumerate(fleets):
            kept[i][index] = oracle.holds(counts)

    for first in range(0, len(numbers), AT_ONCE):
        batch = range(first, min(first + AT_ONCE, len(numbers)))
        run_wave([partial(simulate_scenario, index) for index in batch])
    return kept


def with_hindsight(
    problem: Problem, on_paper: FleetSearch, production: Counts, scenarios: Scenarios, count: int
) -> Iterator[str]:
    """A text on the cheapest fleet that keeps the SLO in KEPT_IN of the first `count` scenarios, and if
    production keeps it in more than MOST_KEPT, one on the cheapest for FEWER. It says in how many scenarios
    the fleet keeps the SLO, and in how many of the next `count`.
    """
    ordered = with_scenarios(problem, [scenarios[number] for number in range(count)], count)
    is_too_good = count - ordered.oracle.missed_count(production, count) > MOST_KEPT * count
    for share in (KEPT_IN, FEWER) if is_too_good else (KEPT_IN,):
        may_miss = int((1 - share) * count + 1e-9)
        ordered, grown = grow_until_kept(
            with_scenarios(problem, ordered.oracle.scenarios, may_miss), on_paper.best
        )
        best = find_cheaper_kept(
            ordered,
            on_paper,
            grown,
            [problem.oracle.fleet(production)],
            any_mix=False,
            most_requests=math.inf,
        )
        if best is None or objective_of(best) >= objective_of(production) * (1 - CHEAPER):
            yield f"{100 * share:.0f} %: none"
            continue
        kept = count - ordered.oracle.missed_count(best, count)
        others = kept_in(problem, scenarios, range(count, 2 * count), [best])[0]
        yield (
            f"{100 * share:.0f} %: {shown(best)}, {objective_of(best):.2f}, {share_text(kept, count)}, of "
            f"{count} others {share_text(sum(others), count)}"
        )


def of_scenarios(plans: dict[str, PlanCase], arguments: argparse.Namespace) -> None:
    """Print for each plan in how many held-out scenarios its fleets keep the SLO, and one worker fewer."""
    catalog, count = read_catalog(), arguments.count
    table(
        (
            "plan",
            "requests, drawn by",
            "on paper",
            "USD/h",
            f"kept in {count}",
            "production",
            "USD/h",
            "its test",
            f"kept in {count}",
            "a worker fewer",
            "with a loss, USD/h",
            "kept after it",
            *([f"more than {100 * CHEAPER:g} % cheaper, with hindsight"] if arguments.hindsight else []),
            "CPU s: plan, all",
        )
    )
    for name, case in plans.items():
        began_s = time.process_time()
        trace, task = case.read(arguments.traces), case.task(catalog)
        problem, on_paper, production = answered(task, trace, catalog)
        plan_s = time.process_time() - began_s
        held_out, numbers = Scenarios(task, trace, SEED, HELD_OUT), range(count)
        fleets = [on_paper.best, production.best, *one_fewer(production.best)]
        kept = [sum(of_fleet) for of_fleet in kept_in(problem, held_out, numbers, fleets)]
        with_loss = next(answer for answer in production.answers if answer.name == "with-a-loss")
        after_loss = "-"
        if arguments.loss and with_loss.value is not None:
            lossy = replace(problem, oracle=replace(problem.oracle, spare_workers=1))
            standing = kept_in(lossy, held_out, numbers, [counts_of(with_loss, on_paper.level0.options)])
            after_loss = share_text(sum(standing[0]), count)
        hindsight = list[str]()
        if arguments.hindsight:
            hindsight = ["; ".join(with_hindsight(problem, on_paper, production.best, held_out, count))]
        test = next(answer.kept_in for answer in production.answers if answer.name == "production")
        assert test is not None
        value = objective_of(production.best)
        row(
            (
                name,
                f"{len(problem.trace)}, {drawn_by(task, trace)}",
                shown(on_paper.best),
                f"{on_paper.value:.2f}",
                share_text(kept[0], count),
                shown(production.best),
                f"{value:.2f} ({100 * (value / on_paper.value - 1):+.0f} %)",
                f"{test.kept} of {test.scenario_count}" + ("" if production.is_passed else ", not passed"),
                share_text(kept[1], count),
                ", ".join(f"{100 * n / count:.1f} %" for n in kept[2:]) or "-",
                "-" if with_loss.value is None else f"{with_loss.value:.2f}",
                after_loss,
                *hindsight,
                f"{plan_s:.0f}, {time.process_time() - began_s:.0f}",
            )
        )


def one_fewer(counts: Counts) -> list[Counts]:
    """The fleets with a worker less in one of the pools."""
    return [
        tuple((option, count - (k == pool)) for k, (option, count) in enumerate(counts))
        for pool in range(len(counts))
        if counts[pool][1] > 1
    ]


def halves(plans: dict[str, PlanCase], arguments: argparse.Namespace) -> None:
    """Print how fleets that were planned from one half of a trace keep the SLO on the other half."""
    catalog = read_catalog()
    table(
        (
            *(
                "plan",
                "planned from",
                "answer",
                "fleet",
                "USD/h",
                "SLO on the other half",
                "beyond each limit",
            ),
            *("requests beyond any", f"windows of {EVERY_S / 60:g} min that miss it"),
        )
    )
    for name, case in plans.items():
        whole = case.read(arguments.traces)
        middle_s = whole.duration_s / 2
        first, second = between(whole, 0.0, middle_s), between(whole, middle_s, math.inf)
        for planned_from, other, label in ((first, second, "first half"), (second, first, "second half")):
            task = case.task(catalog, case.rate_rps or spread_stamps(other, seed=0).rate_rps)
            problem, on_paper, production = answered(task, planned_from, catalog)
            traffic = requested_traffic(other, task, seed=0)[0]
            for answer, counts in (("on paper", on_paper.best), ("production", production.best)):
                cells = (name, label, answer, shown(counts), f"{objective_of(counts):.2f}")
                row((*cells, *_on(problem, traffic, counts)))


def _on(problem: Problem, trace: Trace, counts: Counts) -> Iterator[str]:
    """The last cells of a row of `halves`: how a fleet fares on this traffic."""
    oracle = replace(problem.oracle, trace=trace)
    simulation, verdict = oracle.simulate_and_judge(oracle.fleet(counts), record=True)
    edges_s = windows_s(simulation, EVERY_S)
    of_limits = [in_windows(simulation, k, edges_s) for k in range(len(verdict.lines))]
    missed = sum(not all(window.holds for window in limits) for limits in zip(*of_limits, strict=True))
    yield "kept" if verdict.holds else "missed" + ("" if verdict.is_steady else ", queue grows")
    yield ", ".join(f"{line.limit.name} {100 * (1 - line.kept_frac):.2f} %" for line in verdict.lines)
    yield f"{100 * (1 - verdict.attainment_frac):.2f} %"
    yield f"{missed} of {len(edges_s) - 1}"


def small(seeds: Sequence[int], arguments: argparse.Namespace) -> None:
    """Print for drawn questions how many cheaper fleets of level 0 keep the SLO in held-out scenarios."""
    catalog, count = read_catalog(), arguments.count
    may_miss = int((1 - KEPT_IN) * count + 1e-9)
    table(
        (
            *("seed", "requests/s", "SLO", "on paper, USD/h", "production, USD/h", f"kept in {count}"),
            *(f"fleets more than {100 * CHEAPER:g} % cheaper", "hold as written", "the best: USD/h, kept"),
            f"if {100 * KEPT_IN:g} %: kept in {2 * count} others, and production",
        )
    )
    for seed in seeds:
        rate_rps, slo, trace = small_question(seed)
        fleet = {"gpus": ["a100-80g", "h100-80g"], "max_num_batched_tokens": 2048}
        task = parse_task({"llm": "llama-3.1-70b", "slo": slo, "fleet": fleet}, catalog)
        problem, on_paper, production = answered(task, trace, catalog)
        held_out = Scenarios(task, trace, SEED, HELD_OUT)
        with_held_out, _ = grow_until_kept(
            with_scenarios(problem, [held_out[i] for i in range(count)], may_miss), on_paper.best
        )
        fleets = list(every_cheaper(problem, on_paper, objective_of(production.best) * (1 - CHEAPER)))
        holding = [counts for counts in fleets if problem.oracle.holds(counts)]
        missed = {i: with_held_out.oracle.missed_count(counts, count) for i, counts in enumerate(holding)}
        best = min(missed, key=lambda i: (missed[i], objective_of(holding[i])), default=None)
        others = "-"
        if best is not None and missed[best] <= may_miss:
            numbers = range(count, 3 * count)
            again = kept_in(problem, held_out, numbers, [holding[best], production.best])
            others = ", ".join(share_text(sum(kept), len(numbers)) for kept in again)
        slo_text = ", ".join(
            f"{metric} {p} {limit}" for metric, limits in slo.items() for p, limit in limits.items()
        )
        row(
            (
                seed,
                f"{rate_rps:g}",
                slo_text,
                f"{on_paper.value:.2f}",
                f"{objective_of(production.best):.2f}",
                share_text(count - with_held_out.oracle.missed_count(production.best, count), count),
                len(fleets),
                len(holding),
                "-"
                if best is None
                else f"{objective_of(holding[best]):.2f}, {100 * (1 - missed[best] / count):.1f} %",
                others,
            )
        )


def small_question(seed: int) -> tuple[float, dict[str, dict[str, str]], Trace]:
    """A drawn question of 500 requests: its rate [requests/s], its limits and its trace."""
    rng = np.random.default_rng(seed)
    rate_rps = float(rng.choice([5.0, 10.0, 15.0, 25.0]))
    ttft, tbt = rng.choice(["500 ms", "1 s", "2 s"]), rng.choice(["60 ms", "80 ms", "150 ms"])
    prompts, answers = rng.choice([400, 1200, 3000]), rng.choice([30, 120, 300])
    trace = synthesise(
        500,
        rate_rps,
        input_tokens=lognormal(prompts, 1.0),
        output_tokens=lognormal(answers, 1.0),
        gap_cv=float(rng.choice([1.0, 1.5, 2.5])),
        rng=rng,
    )
    return rate_rps, {"ttft": {"p90": str(ttft)}, "tbt": {"p99": str(tbt)}}, trace


def every_cheaper(problem: Problem, on_paper: FleetSearch, below: float) -> Iterator[Counts]:
    """All fleets of level 0 within the question's limits that cost less than `below`, with up to MOST workers
    in each of two pools, or MOST_ALONE in a single one.
    """
    options = {
        role: [option for option in on_paper.level0.options if option.role == role]
        for role in ("mixed", "prefill", "decode")
    }
    numbers = range(1, MOST + 1)
    one = (((option, n),) for option in options["mixed"] for n in range(1, MOST_ALONE + 1))
    two = (
        ((prefill, n), (decode, m))
        for prefill, decode in itertools.product(options["prefill"], options["decode"])
        if may_hand_over((prefill.type, decode.type))
        for n, m in itertools.product(numbers, repeat=2)
    )
    for counts in itertools.chain(one, two):
        if objective_of(counts) < below and problem.allows(counts):
            yield counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("scenarios", "halves", "small"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these plans, or seeds of small questions")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, metavar="DIR")
    parser.add_argument("--count", type=int, default=200, help="how many scenarios")
    parser.add_argument("--hindsight", action="store_true", help="also look for cheaper fleets")
    parser.add_argument("--loss", action="store_true", help="also simulate the fleet with a loss, after it")
    arguments = parser.parse_args()
    if arguments.what == "small":
        small(range(12) if arguments.only is None else [int(seed) for seed in arguments.only], arguments)
        return
    unknown = [name for name in arguments.only or () if name not in PLANS]
    if unknown:
        raise SystemExit(f"--only: no plan {unknown[0]!r}; there are {'; '.join(PLANS)}")
    plans = {name: PLANS[name] for name in arguments.only or PLANS}
    {"scenarios": of_scenarios, "halves": halves}[arguments.what](plans, arguments)


if __name__ == "__main__":
    main()
