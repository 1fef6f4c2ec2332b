"""Several LLMs on one stock, planned together: the loop around planner/solvers/shared.py.

    alone    each LLM with all of the fleet for itself; where all fit together, that is the answer
    share    else one master over all of them, whose proposals the simulator judges LLM by LLM
    plans    each LLM within what the others leave, from the fleet it was given: its plan, its certificate
    prices   the least more of each limit that saves something, and what it saves

What one stage simulates the next ones know. The sum of the best fleets alone bounds every choice, so an LLM
that gives way to others does so at a stated price.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner import evidence
from planner.catalog import Catalog
from planner.domain import Fleet, Pool
from planner.errors import InfeasibleError, PlannerError
from planner.options import OBJECTIVE_UNITS
from planner.oracle import Answers, side_by_side
from planner.plan import Plan
from planner.planning import certified
from planner.searching import (
    Found,
    Problem,
    Progress,
    best_of,
    lower_bound,
    pose,
    search_level0,
    search_policies,
    silent,
)
from planner.shared_slo import Part, Question
from planner.slo import Task
from planner.solvers.level0 import Counts
from planner.solvers.master import Limits
from planner.solvers.placement import Placement
from planner.solvers.shared import Row, Shape, Shared, rows_of, share

Searched = list[tuple[Problem, Found]]
CHEAPER_FRAC = 1e-6  # a saving of less is none
LEVEL0 = "with one worker type per pool"


@dataclass(frozen=True, slots=True)
class Used:
    """A shared limit, and what all fleets take of it."""

    name: str
    amount: float
    used: float


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlan:
    """A plan for every LLM, within limits that they share.

    `alone` is the objective of each with all of the fleet for itself. `level0` is the best value with one
    worker type per pool, and no such fleets have less than `level0_bound`: the same where `is_exact`. No
    fleets whatever have less than `bound`.
    """

    plans: Mapping[str, Plan]
    alone: Mapping[str, float]
    objective: str
    unit: str
    level0: float
    level0_bound: float
    bound: float
    is_exact: bool
    limits: tuple[Used, ...]
    binding: tuple[str, ...]
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    rounds: int
    simulations: int
    seed: int
    placement: Placement | None

    @property
    def value(self) -> float:
        return sum(plan.certificate.value for plan in self.plans.values())

    @property
    def status(self) -> str:
        return "certified" if self.is_exact else "best found"

    @property
    def gap_frac(self) -> float:
        return (self.value - self.bound) / self.value if self.value else 0.0

    @property
    def level0_gap_frac(self) -> float:
        """Between the best known and the bound over fleets with one worker type per pool."""
        return (self.level0 - self.level0_bound) / self.level0 if self.level0 else 0.0

    @property
    def fleets(self) -> tuple[Fleet, ...]:
        return tuple(plan.fleet for plan in self.plans.values())


def plan_together(
    question: Question,
    catalog: Catalog,
    *,
    seed: int = 0,
    time_limit_s: float = 120.0,
    progress: Progress = silent,
) -> SharedPlan:
    """The cheapest fleets that keep the SLO of every LLM within the limits that they share.

    Raises InputError for what cannot be planned, and InfeasibleError if one LLM cannot be served even alone
    or all of them not together; the message then names the limits and the least more of each that would do.
    After `time_limit_s` the best known is returned with its bound.
    """
    deadline = time.monotonic() + time_limit_s
    parts, answers = question.parts, Answers()
    task = parts[0].task
    limits = Limits(task.stock, task.power_limit_w, task.cost_limit_usd_per_h, task.gpu_limit)
    unit = OBJECTIVE_UNITS[task.objective]

    alone: list[Searched] = []
    for k, part in enumerate(parts):
        progress(f"{part.name}, with all of the fleet for itself")
        until = _slice(deadline, len(parts) - k)
        alone.append(_searched(part, part.task, catalog, answers, seed, until, progress))
    best = [best_of(searched)[1] for searched in alone]
    is_exhausted = all(found.level0.search.is_exhausted for each in alone for _, found in each)
    together = [(option.type, count) for found in best for option, count in found.best]

    if limits.broken(together) is None:
        plans = [
            certified(searched, part.trace, catalog, seed=seed)
            for part, searched in zip(parts, alone, strict=True)
        ]
        level0 = sum(found.level0.search.value for found in best)
        shared = Shared(None, level0, level0 if is_exhausted else 0.0, is_exhausted, 0)
        binding: tuple[str, ...] = ("no shared limit binds: every LLM has the fleet it would have alone",)
        simulations = 0
    else:
        until = _slice(deadline, 1)
        _one_after_another(alone, limits, _slice(until, 1), progress)
        llms = [_shapes(searched) for searched in alone]
        shared = share(
            llms, rows_of(limits), run=side_by_side, out_of_time=lambda: time.monotonic() > until,
            progress=progress,
        )  # fmt: skip
        if shared.best is None:
            raise _infeasible(llms, limits, shared, deadline, progress)
        plans = _plans(parts, alone, shared, catalog, answers, seed, deadline, progress)
        simulations = sum(plan.certificate.simulations for plan in plans)
        value = sum(plan.certificate.value for plan in plans)
        binding = (
            *_price_of_sharing(parts, best, plans, unit),
            *_prices(llms, limits, value, unit, deadline, progress),
        )
    progress("placing all workers on nodes")
    counts = [(pool.type, pool.count) for plan in plans for pool in plan.fleet.pools]
    lower = [searched[0][0].lower or 0.0 for searched in alone]
    value = sum(plan.certificate.value for plan in plans)
    return SharedPlan(
        plans={part.name: plan for part, plan in zip(parts, plans, strict=True)},
        alone={part.name: found.value for part, found in zip(parts, best, strict=True)},
        objective=task.objective,
        unit=unit,
        level0=shared.value,
        level0_bound=shared.bound,
        bound=min(sum(lower), value),
        is_exact=shared.is_exact,
        limits=tuple(
            Used(name, amount, sum(limits.use(name, worker) * count for worker, count in counts))
            for name, amount in limits.rows()
        ),
        binding=binding,
        assumptions=(
            "no worker serves two LLMs, and the fleets do not disturb each other",
            "level 0: every LLM has one worker type, or one prefill and one decode type; its own "
            "certificate.json has the options, and what else is assumed",
            "bound: the sum of the LLMs' bounds, each with all of the fleet for itself",
        ),
        warnings=(
            *question.notes,
            *(
                f"{part.name}: {line}"
                for part, plan in zip(parts, plans, strict=True)
                for line in plan.warnings
            ),
        ),
        rounds=shared.rounds,
        simulations=simulations + sum(problem.oracle.simulations for each in alone for problem, _ in each),
        seed=seed,
        placement=_placement(parts, plans),
    )  # fmt: skip


def _slice(deadline: float, shares: int) -> float:
    """The end of the first of so many equal shares of the time that is left, when one more is kept back."""
    now = time.monotonic()
    return now + max(deadline - now, 0.0) / (shares + 1)


def _searched(
    part: Part,
    task: Task,
    catalog: Catalog,
    answers: Answers,
    seed: int,
    until: float,
    progress: Progress,
    *,
    known: Problem | None = None,
    start: Sequence[Fleet] = (),
) -> Searched:
    """The search for one LLM; `known` has its traffic, scaled before."""
    asked = None if known is None else (known.trace, known.traffic_note)
    try:
        problem = pose(
            task, part.trace, catalog, seed=seed, deadline=until, answers=answers, asked=asked,
            progress=lambda message: progress(f"{part.name}: {message}"),
        )  # fmt: skip
        return search_policies(replace(problem, lower=lower_bound(problem)), start)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{part.name}, even with all of the fleet for itself: {error}",
            kind=error.kind, constraint=error.constraint, relaxation=error.relaxation,
        ) from None  # fmt: skip
    except PlannerError as error:
        raise type(error)(f"{part.name}: {error}") from None


def _shapes(searched: Searched) -> list[Shape]:
    """Every shape of level 0 under every choice of policies, with what the searches learned of it."""
    shapes: list[Shape] = []
    for problem, found in searched:
        oracle, bounded = problem.oracle, found.level0.bounded

        def holds(counts: Counts, oracle_holds: Callable[..., list[bool]] = oracle.holds) -> bool:
            return oracle_holds([counts])[0]

        def leads(counts: Counts, oracle_leads: Callable[..., list[bool]] = oracle.leads) -> bool:
            return oracle_leads([counts])[0]

        by_role = {
            role: [bounded[option.name] for option in found.level0.options if option.role == role]
            for role in ("mixed", "prefill", "decode")
        }
        mine: dict[tuple[str, ...], Shape] = {
            (item.option.name,): Shape((item,), holds, kind=problem) for item in by_role["mixed"]
        }
        for prefill in by_role["prefill"]:
            lead = Shape((prefill,), leads)
            if missed := found.level0.search.beyond.get(prefill.option.name):
                lead.learn((missed,), holds=False)
            for decode in by_role["decode"]:
                names = (prefill.option.name, decode.option.name)
                mine[names] = Shape((prefill, decode), holds, lead, kind=problem)
        for fleet, answer in oracle.told.items():
            shape = mine.get(tuple(name for name, _ in fleet))
            if shape is not None and all(count > 0 for _, count in fleet):
                shape.learn(tuple(count for _, count in fleet), holds=answer)
        shapes += mine.values()
    return shapes


def _one_after_another(alone: Sequence[Searched], limits: Limits, until: float, progress: Progress) -> None:
    """Serve the LLMs in turn from what is left, beginning with each of them, until all are served once.

    The fleets are not returned: what was simulated on the way, the oracles know.
    """
    for first in range(len(alone)):
        left = limits
        for searched in (*alone[first:], *alone[:first]):
            found: list[tuple[float, Counts]] = []
            for problem, _ in searched:
                if time.monotonic() > until:
                    return
                progress("LLMs one after another on what is left")
                search = search_level0(replace(problem, limits=left, deadline=until)).search
                if search.best is not None:
                    found.append((search.value, search.best))
            if not found:
                break
            left = _less(left, min(found, key=lambda each: each[0])[1])
        else:
            return


def _less(limits: Limits, counts: Counts) -> Limits:
    """What a fleet leaves of limits; a hair more where they are not whole numbers."""
    left = {
        name: amount * (1 + 1e-9) - sum(limits.use(name, option.type) * count for option, count in counts)
        for name, amount in limits.rows()
    }
    stock = {
        gpu: None if count is None else max(int(left[f"stock of {gpu}"]), 0)
        for gpu, count in limits.stock.items()
    }
    gpus = None if limits.gpus is None else max(int(left["GPUs"]), 0)
    return Limits(stock, left.get("power"), left.get("cost"), gpus)


def _plans(
    parts: Sequence[Part],
    alone: Sequence[Searched],
    shared: Shared,
    catalog: Catalog,
    answers: Answers,
    seed: int,
    deadline: float,
    progress: Progress,
) -> list[Plan]:
    """Plan each LLM within what the others leave, from its fleet in the best choice on."""
    assert shared.best is not None
    chosen = [shape.counts(vector) for shape, vector in shared.best]
    plans = []
    for k, (part, searched) in enumerate(zip(parts, alone, strict=True)):
        shape, _ = shared.best[k]
        assert isinstance(shape.kind, Problem)
        problem = shape.kind
        others = [each for other, counts in enumerate(chosen) if other != k for each in counts]
        left = _less(problem.limits, tuple(others))
        task = replace(
            part.task, stock=left.stock, power_limit_w=left.power_w,
            cost_limit_usd_per_h=left.cost_usd_per_h, gpu_limit=left.gpus,
        )  # fmt: skip
        again = _searched(
            part, task, catalog, answers, seed, _slice(deadline, len(parts) - k), progress,
            known=searched[0][0], start=[problem.oracle.fleet(chosen[k])],
        )  # fmt: skip
        chosen[k] = best_of(again)[1].best
        plan = certified(again, part.trace, catalog, seed=seed)
        amounts = ", ".join(f"{amount:.6g} of {name}" for name, amount in left.rows())
        within = f"the other LLMs have their fleets, which leave {amounts}"
        certificate = replace(plan.certificate, assumptions=(within, *plan.certificate.assumptions))
        plans.append(replace(plan, certificate=certificate))
    return plans


def _price_of_sharing(
    parts: Sequence[Part], alone: Sequence[Found], plans: Sequence[Plan], unit: str
) -> tuple[str, ...]:
    """What each LLM pays for not having all of the fleet to itself."""
    sentences = []
    for part, found, plan in zip(parts, alone, plans, strict=True):
        more = plan.certificate.value - found.value
        if more > CHEAPER_FRAC * found.value:
            sentences.append(
                f"{part.name} gives way: {plan.certificate.value:.6g} {unit}, which is {more:.4g} more than "
                "with all of the fleet for itself"
            )
    return tuple(sentences)


def _prices(
    llms: Sequence[Sequence[Shape]],
    limits: Limits,
    value: float,
    unit: str,
    deadline: float,
    progress: Progress,
) -> tuple[str, ...]:
    """Of each limit, the least more (of it alone) that makes the plan cheaper, and what that saves."""

    def ask(rows: Sequence[Row], **how: object) -> Shared:
        return share(
            llms, rows, run=side_by_side, out_of_time=lambda: time.monotonic() > deadline,
            progress=progress, **how,  # type: ignore[arg-type]
        )  # fmt: skip

    sentences = []
    rows = rows_of(limits)
    for row in rows:
        progress(f"what more of {row.name} would save")
        others = [other for other in rows if other is not row]
        lifted = ask(others, below=value * (1 - CHEAPER_FRAC))
        if lifted.best is None:
            if lifted.is_exact:
                sentences.append(f"{LEVEL0}, more of {row.name} alone saves nothing")
            else:
                sentences.append(f"what more of {row.name} would save was not found within the time limit")
            continue
        cheaper = Row("value", value * (1 - CHEAPER_FRAC), lambda option: option.objective)
        least = ask([*others, cheaper], weigh=row.use)
        amount = least.value if least.best is not None else _use(row, lifted)
        then = ask([*others, replace(row, amount=amount)], below=value * (1 - CHEAPER_FRAC))
        saved = value - (then.value if then.best is not None else value)
        if saved > 0:
            less = "less saves nothing" if least.is_exact else "less was not tried in time"
            sentences.append(
                f"{LEVEL0}, {_more(row, amount)} would save {saved:.4g} {unit}; {less}, and any amount "
                f"{value - lifted.value:.4g} {unit}"
            )
    return tuple(sentences)


def _more(row: Row, amount: float) -> str:
    """ "4 more of stock of h100-80g (16 instead of 12)"."""
    unit = {"power": " W", "cost": " USD/h"}.get(row.name, "")
    what = row.name.removeprefix("stock of ")
    return f"{amount - row.amount:.6g}{unit} more {what} ({amount:.6g} instead of {row.amount:.6g})"


def _use(row: Row, shared: Shared) -> float:
    assert shared.best is not None
    return sum(row.use(option) * n for shape, vector in shared.best for option, n in shape.counts(vector))


def _infeasible(
    llms: Sequence[Sequence[Shape]], limits: Limits, shared: Shared, deadline: float, progress: Progress
) -> PlannerError:
    """Name the limits that bind, and the least more of each alone that would do."""
    rows = rows_of(limits)
    names = ", ".join(row.name for row in rows)
    if not shared.is_exact:
        return PlannerError(
            f"no fleets of all LLMs within the limits they share ({names}) were found within the time limit; "
            "raise --time-limit"
        )
    ways: dict[str, str] = {}
    is_exact = True

    def late() -> bool:
        return time.monotonic() > deadline

    for row in rows:
        progress(f"infeasible; looking for the least {row.name} that would do")
        found = share(
            llms, [other for other in rows if other is not row], weigh=row.use, run=side_by_side,
            out_of_time=late, progress=progress,
        )  # fmt: skip
        is_exact &= found.is_exact
        if found.best is not None:
            ways[row.name] = _raised(row, found.value)
    if not ways and is_exact:
        free = share(llms, (), run=side_by_side, out_of_time=late, progress=progress)
        exceeded = [row for row in rows if _use(row, free) > row.amount * (1 + CHEAPER_FRAC)]
        ways = {
            ", ".join(row.name for row in exceeded): " and ".join(
                _raised(row, _use(row, free)) for row in exceeded
            )
        }
    if not ways:
        return InfeasibleError(
            f"capacity: the LLMs do not fit together within the limits they share ({names}), and the time "
            "limit left no room to find out what would do; raise --time-limit",
            kind="capacity", constraint=names, relaxation="unknown: raise --time-limit",
        )  # fmt: skip
    relaxation = ", or ".join(ways.values())
    return InfeasibleError(
        "capacity: each LLM can be served alone, but not all of them within the limits they share. Raise "
        f"{relaxation}",
        kind="capacity", constraint=", ".join(ways), relaxation=relaxation,
    )  # fmt: skip


def _raised(row: Row, amount: float) -> str:
    unit = {"power": " W", "cost": " USD/h"}.get(row.name, "")
    return f"{row.name} from {row.amount:g} to {amount:g}{unit}"


def _placement(parts: Sequence[Part], plans: Sequence[Plan]) -> Placement | None:
    """All workers on the fewest nodes, which LLMs may share; a pair's KV between nodes is not minimised."""
    pools = tuple(
        Pool(f"{part.name}-{pool.name}", "mixed", pool.type, pool.count)
        for part, plan in zip(parts, plans, strict=True)
        for pool in plan.fleet.pools
    )
    return evidence.placement(Fleet(plans[0].fleet.llm, pools))
