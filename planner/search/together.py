"""Several LLMs on one stock, planned together: the master of search/cheapest.py over all of them.

    alone    each LLM with all of the fleet for itself; where all fit together, that is the answer
    share    else one master over all of them, whose proposals the simulator judges LLM by LLM
    plans    each LLM within what the others leave, from the fleet it was given: its plan, its certificate
    prices   the least more of each limit that saves something, and what it saves

What one stage simulates the next ones know. The sum of the best fleets alone bounds every choice, so an LLM
that gives way to others does so at a stated price.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.documents.catalog import Catalog
from planner.documents.facts import (
    Assuming,
    Assumption,
    Binding,
    Cautioned,
    Finding,
    GivesWay,
    OfLlm,
    OfTraffic,
    OthersLeave,
    Remainder,
)
from planner.documents.together import Part, Question
from planner.domain import COST, GPUS, OWNED, POWER, FleetLimit
from planner.errors import InfeasibleError, PlannerError
from planner.fleet import Fleet, Pool
from planner.search import findings
from planner.search.best_fleet import Found, best_of, search
from planner.search.bill import Bill, bill
from planner.search.bounds import checked_bound, lower_bound
from planner.search.certify import certified, search_llm
from planner.search.cheapest import Cheapest, cheapest, shared_limits
from planner.search.designs import Design, learn_from
from planner.search.fleets import Counts
from planner.search.joint_limits import CHEAPER_FRAC, Asking, infeasible, prices
from planner.search.level0 import WALK_EFFORT, designs_of, search_level0
from planner.search.one_pool import Search
from planner.search.options import OBJECTIVE_UNITS
from planner.search.oracle import LEAST_EFFORT, Answers, Oracle, side_by_side
from planner.search.owned import paid, paid_at_least
from planner.search.plan import Plan
from planner.search.problem import Conditions, Problem, Progress, on_all_draws, silent
from planner.search.walk import cheaper_fleets, count_cheaper
from planner.solvers.master import Limits
from planner.solvers.placement import Placement

Searched = list[tuple[Problem, Found]]


@dataclass(frozen=True, slots=True)
class Used:
    """A shared limit, and what all fleets take of it."""

    limit: FleetLimit
    amount: float
    used: float


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlan:
    """A plan for every LLM, within limits that they share.

    `alone` is the objective of each with all of the fleet for itself. No fleets with one worker type per pool
    have less than `level0_bound`, by the search where it `is_exhausted`, by simulation of all such fleets
    where it `is_exact`; `level0` is the best such value found, None where it was not looked for because
    fleets of several types have less. No fleets whatever have less than `bound`.
    """

    plans: Mapping[str, Plan]
    alone: Mapping[str, float]
    objective: str
    unit: str
    level0: float | None
    level0_bound: float
    bound: float
    is_exhausted: bool
    is_exact: bool
    limits: tuple[Used, ...]
    binding: tuple[Binding, ...]
    assumptions: tuple[Assuming, ...]
    warnings: tuple[Cautioned | OfTraffic | OfLlm, ...]
    rounds: int
    simulations: int
    seed: int
    placement: Placement | None

    @property
    def value(self) -> float:
        return sum(plan.certificate.value for plan in self.plans.values())

    @property
    def status(self) -> str:
        return "on paper" if self.is_exhausted else "best found"

    @property
    def gap_frac(self) -> float:
        return (self.value - self.bound) / self.value if self.value else 0.0

    @property
    def bill(self) -> Bill:
        """What is paid for all of them, on the nodes that they share."""
        pools = tuple(pool for fleet in self.fleets for pool in fleet.pools)
        return bill(Fleet(self.fleets[0].llm, pools), self.placement)

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
    limits = Limits(
        task.stock_and_owned,
        task.power_limit_w,
        task.cost_limit_usd_per_h,
        task.gpu_limit,
        by_gpu=len(parts) > 1,  # nodes are shared
    )
    alone: list[Searched] = []
    for k, part in enumerate(parts):
        progress(f"{part.name}, with all of the fleet for itself")
        until = _slice(deadline, len(parts) - k)
        told = Conditions(
            until,
            lambda message, name=part.name: progress(f"{name}: {message}"),  # type: ignore[misc]
            answers=answers,
            by_gpu=limits.by_gpu,
        )
        alone.append(_searched(part, catalog, seed, told))
    best = [best_of(searched)[1] for searched in alone]
    if _fit(limits, (found.best for found in best)):
        plans = [
            certified(each, part.trace, catalog, seed=seed, deadline=deadline)
            for part, each in zip(parts, alone, strict=True)
        ]
        is_walked = all(found.level0.search.is_exact for each in alone for _, found in each)
        answer = _Answered(plans, _all_fit(alone, limits), is_walked, (Finding("no-shared-limit"),), ())
    else:
        answer = _sharing(parts, alone, limits, catalog, seed, deadline, progress)
    plans, level0 = answer.plans, answer.level0
    progress("placing all workers on nodes")
    counts = [(pool.type, pool.count) for plan in plans for pool in plan.fleet.pools]
    oracles = [problem.oracle for each in alone for problem, _ in each] + [*answer.oracles]
    return SharedPlan(
        plans={part.name: plan for part, plan in zip(parts, plans, strict=True)},
        alone={part.name: _paid(searched) for part, searched in zip(parts, alone, strict=True)},
        objective=task.objective,
        unit=OBJECTIVE_UNITS[task.objective],
        level0=level0.value if math.isfinite(level0.value) else None,
        level0_bound=level0.bound,
        bound=checked_bound(
            sum(paid_at_least(problem, problem.lower or 0.0) for (problem, _), *_ in alone),
            sum(plan.certificate.value for plan in plans),
        ),
        is_exhausted=level0.is_exact,
        is_exact=level0.is_exact and answer.is_walked,
        limits=tuple(
            Used(limit, amount, sum(limits.use(limit, worker) * count for worker, count in counts))
            for limit, amount in limits.rows()
        ),
        binding=answer.binding,
        assumptions=(
            Assumption("no-shared-workers"),
            Assumption("level0-of-each"),
            Assumption("bounds-add-up"),
        ),
        warnings=(Cautioned("several-on-paper"), *map(OfTraffic, question.notes), *_warnings(parts, plans)),
        rounds=level0.rounds,
        simulations=sum({id(oracle): oracle.simulations for oracle in oracles}.values()),
        seed=seed,
        placement=_placement(parts, plans),
    )


@dataclass(frozen=True, slots=True)
class _Answered:
    """A plan for each LLM, what is known of level 0, what binds, and the oracles that were asked further."""

    plans: list[Plan]
    level0: Cheapest
    is_walked: bool
    binding: tuple[Binding, ...]
    oracles: Sequence[Oracle]


def _sharing(
    parts: Sequence[Part],
    alone: Sequence[Searched],
    limits: Limits,
    catalog: Catalog,
    seed: int,
    deadline: float,
    progress: Progress,
) -> _Answered:
    """The LLMs within limits that bind: the best choice for all, then each within what the others leave."""
    searched = [[(on_all_draws(problem), found) for problem, found in each] for each in alone]
    until, rows = _slice(deadline, 1), shared_limits(limits)
    _one_after_another(searched, limits, _slice(until, 1), progress)
    llms = [
        [design for problem, found in each for design in designs_of(problem, found.level0)]
        for each in searched
    ]
    ask = Asking(llms, lambda: time.monotonic() > deadline, progress)
    shared = cheapest(
        llms, rows, run=side_by_side, out_of_time=lambda: time.monotonic() > until, progress=progress
    )
    if shared.best is None:
        is_proved = _fewest_are_too_many(searched, limits)
        raise infeasible(ask, rows, is_exact=shared.is_exact, is_proved=is_proved)
    is_walked = shared.is_exact and _walk(searched, llms, shared, deadline)
    if is_walked:
        better = ask.cheapest(rows, below=shared.value)
        is_walked, shared = (True, shared) if better.best is None else (False, better)
    plans = _plans(parts, shared, catalog, seed, deadline)
    unit, best = OBJECTIVE_UNITS[parts[0].task.objective], [best_of(each)[1] for each in alone]
    binding = (*_gives_way(parts, best, plans, unit), *prices(ask, rows, shared.value, unit))
    # a smaller fleet that holds after all, where more workers have hurt
    if (least := sum(plan.certificate.level0 for plan in plans)) < shared.value * (1 - 1e-9):
        shared = replace(shared, value=least, bound=min(shared.bound, least), is_exact=False)
    oracles = [problem.oracle for each in searched for problem, _ in each]
    return _Answered(plans, shared, is_walked, binding, oracles)


def _paid(searched: Searched) -> float:
    problem, found = best_of(searched)
    return paid(problem, found.best)


def _fit(limits: Limits, fleets: Iterable[Counts | None]) -> bool:
    """Whether these fleets are within the limits together."""
    return limits.broken([(option.type, n) for counts in fleets for option, n in counts or ()]) is None


def _all_fit(alone: Sequence[Searched], limits: Limits) -> Cheapest:
    """What is known of level 0 where the best fleets of all LLMs fit together, of several types or not."""
    best = [best_of(searched)[1] for searched in alone]
    level0 = [min((f.level0.search for _, f in each), key=lambda search: search.value) for each in alone]
    least = sum(search.value for search in level0)
    is_exact = all(found.level0.search.is_exhausted for each in alone for _, found in each)
    has_draws = any(problem.draws for each in alone for problem, _ in each)  # which only the best must keep
    is_known = least <= sum(found.value for found in best) * (1 + 1e-9)
    is_known |= not has_draws and _fit(limits, (search.best for search in level0))
    return Cheapest(None, least if is_known else math.inf, least if is_exact else 0.0, is_exact, 0)


def _fewest_are_too_many(searched: Sequence[Searched], limits: Limits) -> bool:
    """Whether a limit is too little even for one worker of each LLM, the one that takes least of it."""
    return any(
        sum(min(limits.use(name, worker) for worker in each[0][0].types) for each in searched) > amount
        for name, amount in limits.rows()
    )


def _walk(
    searched: Sequence[Searched], llms: Sequence[Sequence[Design]], shared: Cheapest, deadline: float
) -> bool:
    """Simulate every fleet of level 0 that a better choice could have; the designs learn what holds.

    Beside the least that the other LLMs need alone, each of which must be exact, a fleet of an LLM may have
    no more than what is left of the value. Returns whether all were simulated.
    """
    alone = [min(found.level0.search.value for _, found in each) for each in searched]
    if any(not found.level0.search.is_exact or problem.draws for each in searched for problem, found in each):
        return False
    effort = 0
    for i, each in enumerate(searched):
        ceiling = shared.value - (sum(alone) - alone[i])
        for problem, found in each:
            of_role = {
                role: [found.level0.bounded[o.name] for o in found.level0.options if o.role == role]
                for role in ("mixed", "prefill", "decode")
            }
            pairs = list(itertools.product(of_role["prefill"], of_role["decode"]))
            search = Search(problem.limits)
            count = count_cheaper(of_role["mixed"], pairs, search, ceiling)
            if not math.isfinite(count) or effort + count * LEAST_EFFORT > WALK_EFFORT:
                return False
            before = problem.oracle.effort()
            for counts in cheaper_fleets(of_role["mixed"], pairs, search, ceiling):
                if time.monotonic() > deadline or effort + problem.oracle.effort() - before > WALK_EFFORT:
                    return False
                problem.oracle.holds([counts])
            held = {fleet: True for fleet, holds in problem.oracle.told.items() if holds}
            learn_from([design for design in llms[i] if design.asked_by is problem], held)
            effort += problem.oracle.effort() - before
    return True


def _slice(deadline: float, shares: int) -> float:
    """The end of the first of so many equal shares of the time that is left, when one more is kept back."""
    now = time.monotonic()
    return now + max(deadline - now, 0.0) / (shares + 1)


def _searched(part: Part, catalog: Catalog, seed: int, conditions: Conditions) -> Searched:
    """The search for one LLM with all of the fleet for itself."""
    try:
        return search_llm(part.task, part.trace, catalog, seed=seed, conditions=conditions)
    except InfeasibleError as error:
        raise error.of(f"{part.name}, even with all of the fleet for itself") from None
    except PlannerError as error:
        raise type(error)(f"{part.name}: {error}") from None


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
                level0 = search_level0(replace(problem, limits=left, deadline=until)).search
                if level0.best is not None:
                    found.append((level0.value, level0.best))
            if not found:
                break
            left = _less(left, min(found, key=lambda each: each[0])[1])
        else:
            return


def _less(limits: Limits, counts: Counts) -> Limits:
    """What a fleet leaves of limits; a hair more where they are not whole numbers."""
    left = {
        limit: amount * (1 + 1e-9) - sum(limits.use(limit, option.type) * count for option, count in counts)
        for limit, amount in limits.rows()
    }
    stock = {
        gpu: None if count is None else max(int(left[FleetLimit("stock", gpu)]), 0)
        for gpu, count in limits.stock.items()
    }
    gpus = None if limits.gpus is None else max(int(left[GPUS]), 0)
    return Limits(stock, left.get(POWER), left.get(COST), gpus, limits.by_gpu)


def _plans(
    parts: Sequence[Part], shared: Cheapest, catalog: Catalog, seed: int, deadline: float
) -> list[Plan]:
    """Plan each LLM within what the others leave, from its fleet in the best choice on."""
    assert shared.best is not None
    chosen = [design.counts(vector) for design, vector in shared.best]
    plans = []
    for k, (part, (design, _)) in enumerate(zip(parts, shared.best, strict=True)):
        problem = design.asked_by
        assert isinstance(problem, Problem)
        others = [each for other, counts in enumerate(chosen) if other != k for each in counts]
        left = _less(problem.limits, tuple(others))
        task = replace(
            part.task,
            stock={gpu: left.stock.get(gpu, left.stock.get(gpu + OWNED)) for gpu in part.task.stock},
            owned={gpu: left.stock[gpu + OWNED] or 0 for gpu in part.task.owned},
            power_limit_w=left.power_w,
            cost_limit_usd_per_h=left.cost_usd_per_h,
            gpu_limit=left.gpus,
        )
        problem = replace(problem, task=task, limits=left, deadline=_slice(deadline, len(parts) - k))
        problem = replace(problem, lower=lower_bound(problem))
        found = search(problem, [problem.oracle.fleet(chosen[k])])
        chosen[k] = found.best
        plan = certified([(problem, found)], part.trace, catalog, seed=seed, deadline=deadline)
        within = OthersLeave(tuple(Remainder(limit, amount) for limit, amount in left.rows()))
        certificate = replace(plan.certificate, assumptions=(within, *plan.certificate.assumptions))
        plans.append(replace(plan, certificate=certificate))
    return plans


def _gives_way(
    parts: Sequence[Part], alone: Sequence[Found], plans: Sequence[Plan], unit: str
) -> tuple[Binding, ...]:
    """What each LLM pays for not having all of the fleet to itself."""
    gives: list[Binding] = []
    for part, found, plan in zip(parts, alone, plans, strict=True):
        more = plan.certificate.value - found.value
        if more > CHEAPER_FRAC * found.value:
            gives.append(GivesWay(part.name, plan.certificate.value, more, unit))
    return tuple(gives)


def _warnings(parts: Sequence[Part], plans: Sequence[Plan]) -> list[OfLlm]:
    return [
        OfLlm(part.name, warning)
        for part, plan in zip(parts, plans, strict=True)
        for warning in plan.warnings
    ]


def _placement(parts: Sequence[Part], plans: Sequence[Plan]) -> Placement | None:
    """All workers on the fewest nodes, which LLMs may share; a pair's KV between nodes is not minimised."""
    pools = tuple(
        Pool(f"{part.name}-{pool.name}", "mixed", pool.type, pool.count)
        for part, plan in zip(parts, plans, strict=True)
        for pool in plan.fleet.pools
    )
    return findings.placement(Fleet(plans[0].fleet.llm, pools))
