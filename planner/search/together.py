"""Several LLMs on one stock, planned together by the master problem of search/cheapest.py.

    alone       Each LLM is planned with all of the fleet for itself. Where all fit, that is the answer.
    share       Else one master covers all LLMs, and the simulator judges its proposals LLM by LLM.
    plans       Each LLM is searched within what the others leave, for its plan and certificate.
    prices      For each limit the least increase that saves something, and what it saves.
    production  Fleets keep each SLO in enough scenarios (shared_production.py), where safety is required.

All but the last are on paper (shared_paper.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from planner.documents.catalog import Catalog
from planner.documents.certificate import Status
from planner.documents.facts import (
    AnswerName,
    Assuming,
    Assumption,
    Binding,
    Cautioned,
    OfLlm,
    OfTraffic,
    OthersLeave,
)
from planner.documents.together import Part, Question
from planner.domain import FleetLimit
from planner.fleet import Fleet, Pool
from planner.search import findings
from planner.search.best_fleet import best_of
from planner.search.bill import Bill, bill
from planner.search.bounds import checked_bound
from planner.search.certify import certified, with_around
from planner.search.joint_limits import beside
from planner.search.options import OBJECTIVE_UNITS
from planner.search.owned import paid, paid_at_least
from planner.search.plan import Plan
from planner.search.problem import Progress, on_all_draws, silent
from planner.search.shared_paper import (
    Searched,
    SharedPaper,
    gives_way,
    others_leave,
    plan_on_paper,
    searched_within,
    value_of,
)
from planner.search.shared_production import OnPaper, SharedProduction, share_production
from planner.solvers.master import Limits
from planner.solvers.placement import Placement


@dataclass(frozen=True, slots=True)
class Used:
    """A shared limit, and how much of it all fleets together use."""

    limit: FleetLimit
    amount: float
    used: float


@dataclass(frozen=True, slots=True)
class Total:
    """One of the three answers for all LLMs: the sum of their fleets' objectives, and the bill on nodes that
    they share. The values are None where some LLM has no such fleet within the limits; `lacks` names these
    LLMs.
    """

    name: AnswerName
    value: float | None
    paid_usd_per_h: float | None
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlan:
    """A plan for every LLM, within limits that they share.

    `paper` is the objective of each LLM's fleet on paper, beside the others on paper; `alone` is the
    objective of its final fleet if the LLM had all of the fleet for itself. `answers` are the three answers
    for all LLMs, empty where not every LLM requires safety. `in_production` says how production was chosen,
    and which LLM gives way to others; `binding`, levels and bounds are about the fleets on paper.

    No fleets with one worker type per pool are worth less than `level0_bound`: by the search where it
    `is_exhausted`, by simulation of all such fleets where it `is_exact`. `level0` is the best such value
    found, None where it was not looked for because fleets of several types are worth less. No fleets at all
    are worth less than `bound`.
    """

    plans: Mapping[str, Plan]
    paper: Mapping[str, float]
    alone: Mapping[str, float]
    answers: tuple[Total, ...]
    objective: str
    unit: str
    level0: float | None
    level0_bound: float
    bound: float
    is_exhausted: bool
    is_exact: bool
    limits: tuple[Used, ...]
    binding: tuple[Binding, ...]
    in_production: tuple[Binding, ...]
    assumptions: tuple[Assuming, ...]
    warnings: tuple[Cautioned | OfTraffic | OfLlm, ...]
    rounds: int
    simulations: int
    seed: int
    placement: Placement | None

    @property
    def value(self) -> float:
        """The sum of the objectives of the fleets that are to be run."""
        return sum(plan.value for plan in self.plans.values())

    @property
    def value_on_paper(self) -> float:
        """The sum of the objectives of the fleets on paper."""
        return sum(self.paper.values())

    @property
    def status(self) -> Status:
        """The weakest status among the plans; "on paper" where no LLM requires safety."""
        found = {plan.status for plan in self.plans.values()}
        if not self.is_exhausted or "best found" in found:
            return "best found"
        return found.pop() if len(found) == 1 else "not certified"

    @property
    def gap_frac(self) -> float:
        return (self.value_on_paper - self.bound) / self.value_on_paper if self.value_on_paper else 0.0

    @property
    def bill(self) -> Bill:
        """What is paid for all fleets, on the nodes that they share."""
        return bill(self.workers, self.placement)

    @property
    def workers(self) -> Fleet:
        """All workers as one fleet, for the bill; the LLM of that fleet has no meaning."""
        return Fleet(self.fleets[0].llm, tuple(pool for fleet in self.fleets for pool in fleet.pools))

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
    around: bool = False,
) -> SharedPlan:
    """The cheapest fleets that keep the SLO of every LLM within the limits that they share. With `around`
    each plan has what holds around its fleet, as a plan for one LLM does.

    Raises InputError for what cannot be planned, and InfeasibleError if one LLM cannot be served even alone
    or all of them cannot be served together; the message names the limits and the least increase of each that
    would do. After `time_limit_s` the best fleets so far are returned with their bound.
    """
    deadline = time.monotonic() + time_limit_s
    parts, task = question.parts, question.parts[0].task
    is_safe = any(part.task.safety is not None for part in parts)
    limits = Limits(
        task.stock_and_owned,
        task.power_limit_w,
        task.cost_limit_usd_per_h,
        task.gpu_limit,
        by_gpu=len(parts) > 1,  # LLMs share nodes, so limits count GPUs.
    )
    alone, paper = plan_on_paper(
        parts, catalog, limits, seed=seed, deadline=deadline, progress=progress, keeps_half=is_safe
    )
    known = [
        _known(part, each, one, limits, deadline)
        for part, each, one in zip(parts, alone, paper.searched, strict=True)
    ]
    made = share_production(known, limits, deadline, progress) if is_safe else None
    searched, leave = _as_run(paper, made, parts, limits, deadline)
    oracles = [problem.oracle for each in alone for problem, _ in each] + [*paper.oracles]
    plans = _plans(parts, searched, leave, made, catalog, seed, deadline, around=around)
    level0 = paper.level0
    progress("placing all workers on nodes")
    counts = [(pool.type, pool.count) for plan in plans for pool in plan.fleet.pools]
    names = [part.name for part in parts]
    unit = OBJECTIVE_UNITS[task.objective]
    values = [value_of(each) for each in paper.searched]
    alone_values = [value_of(each) for each in alone]
    in_production: tuple[Binding, ...] = ()
    if made is not None:
        alone_values = [paid(one.problem, each) for one, each in zip(known, made.alone, strict=True)]
        run = [paid(one.problem, each) for one, each in zip(known, made.fleets, strict=True)]
        in_production = (made.how, *gives_way(parts, alone_values, run, unit))
    return SharedPlan(
        plans=dict(zip(names, plans, strict=True)),
        paper=dict(zip(names, values, strict=True)),
        alone=dict(zip(names, alone_values, strict=True)),
        answers=_totals(known, made),
        objective=task.objective,
        unit=unit,
        level0=level0.value if math.isfinite(level0.value) else None,
        level0_bound=level0.bound,
        bound=checked_bound(
            sum(paid_at_least(problem, problem.lower or 0.0) for (problem, _), *_ in alone), sum(values)
        ),
        is_exhausted=level0.is_exact,
        is_exact=level0.is_exact and paper.is_walked,
        limits=tuple(
            Used(limit, amount, sum(limits.use(limit, worker) * count for worker, count in counts))
            for limit, amount in limits.rows()
        ),
        binding=paper.binding,
        in_production=in_production,
        assumptions=(
            Assumption("no-shared-workers"),
            Assumption("level0-of-each"),
            Assumption("bounds-add-up"),
        ),
        warnings=(*map(OfTraffic, question.notes), *_warnings(parts, plans)),
        rounds=level0.rounds,
        simulations=sum({id(oracle): oracle.simulations for oracle in oracles}.values()),
        seed=seed,
        placement=_placement(parts, plans),
    )


def _known(part: Part, alone: Searched, paper: Searched, limits: Limits, deadline: float) -> OnPaper:
    """One LLM as the search for production needs it, under the policies of its fleet on paper."""
    problem, found = best_of(paper)
    by_itself = next(
        (each for other, each in alone if other.oracle.policies == problem.oracle.policies), found
    )
    problem = on_all_draws(replace(problem, task=part.task, limits=limits, deadline=deadline))
    return OnPaper(part.name, problem, by_itself, found)


def _as_run(
    paper: SharedPaper, made: SharedProduction | None, parts: Sequence[Part], limits: Limits, deadline: float
) -> tuple[list[Searched], list[OthersLeave | None]]:
    """The search that each LLM's certificate is about, and what the others leave it.

    That is the search on paper. Where an LLM requires no safety and the others use more of the limits in
    production, it is searched again within what they leave.
    """
    searched, leave = list(paper.searched), list(paper.within)
    if made is None or made.how.is_each:
        return searched, leave
    for k, part in enumerate(parts):
        if part.task.safety is None:
            left = beside(limits, made.fleets, k)
            problem = replace(best_of(searched[k])[0], task=part.task, deadline=deadline)
            searched[k] = searched_within(problem, left, made.fleets[k])
            leave[k] = others_leave(left)
    return searched, leave


def _plans(
    parts: Sequence[Part],
    searched: Sequence[Searched],
    leave: Sequence[OthersLeave | None],
    made: SharedProduction | None,
    catalog: Catalog,
    seed: int,
    deadline: float,
    *,
    around: bool,
) -> list[Plan]:
    """Certify the plan of each LLM, with a note of what the others leave it."""
    plans = []
    for k, (part, each) in enumerate(zip(parts, searched, strict=True)):
        until = [(replace(problem, deadline=deadline), found) for problem, found in each]
        own = None if made is None else made.made[k]
        plan = certified(until, part.trace, catalog, seed=seed, deadline=deadline, made=own)
        if around:
            plan = with_around(plan, best_of(until), own)
        if (left := leave[k]) is not None:
            certificate = replace(plan.certificate, assumptions=(left, *plan.certificate.assumptions))
            plan = replace(plan, certificate=certificate)
        plans.append(plan)
    return plans


def _totals(known: Sequence[OnPaper], made: SharedProduction | None) -> tuple[Total, ...]:
    """The three answers for all LLMs, where each of them has three; else none."""
    if made is None:
        return ()
    each = [(one, production) for one, production in zip(known, made.made, strict=True) if production]
    if len(each) < len(known):
        return ()
    found: list[Total] = []
    for name in get_args(AnswerName):
        if any(name not in [answer.name for answer in production.answers] for _, production in each):
            continue
        fleets = {
            one.name: {
                "on-paper": one.paper.best,
                "production": production.best,
                "with-a-loss": production.with_loss,
            }[name]
            for one, production in each
        }
        if lacks := tuple(llm for llm, counts in fleets.items() if counts is None):
            found.append(Total(name, None, None, lacks))
            continue
        all_counts = [(one, counts) for (one, _), counts in zip(each, fleets.values(), strict=True) if counts]
        value = sum(paid(one.problem, counts) for one, counts in all_counts)
        pools = tuple(pool for one, counts in all_counts for pool in one.problem.oracle.fleet(counts).pools)
        found.append(Total(name, value, bill(Fleet(known[0].problem.llm, pools)).usd_per_h))
    return tuple(found)


def _warnings(parts: Sequence[Part], plans: Sequence[Plan]) -> list[OfLlm]:
    return [
        OfLlm(part.name, warning)
        for part, plan in zip(parts, plans, strict=True)
        for warning in plan.warnings
    ]


def _placement(parts: Sequence[Part], plans: Sequence[Plan]) -> Placement | None:
    """All workers on the fewest nodes, which LLMs may share. KV traffic between nodes is not minimised."""
    pools = tuple(
        Pool(f"{part.name}-{pool.name}", "mixed", pool.type, pool.count)
        for part, plan in zip(parts, plans, strict=True)
        for pool in plan.fleet.pools
    )
    return findings.placement(Fleet(plans[0].fleet.llm, pools))
