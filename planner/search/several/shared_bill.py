"""Plans several LLMs by the bill for all of them together: the cost of their nodes, which are paid whole.

The LLMs share nodes, so the search that plans them together counts only the price of GPUs in use (`by_gpu`).
But if one cheap GPU is in use, the seven other GPUs of its node may idle, and are paid too. So other choices
of GPU kinds are planned too:

    1. Plan by GPU prices, on all of the stock. If paid GPUs idle, find the nodes of the least bill of fleets
       with one worker type per pool (`SharedPlan.fewer_gpus`), in production where an LLM requires safety,
       and plan again on these.
    2. Take the plan with the least bill among those in which paid GPUs idle. Plan again without each kind of
       GPU that it uses; with each kind alone that it or its fleets with a loss use, if these are several; and
       without all kinds that idled in any plan.
    3. Repeat step 2 with the next such plan, as long as there is one whose GPUs in use cost less than the
       least bill found.
    4. If paid GPUs idle in the plan with the least bill, plan each LLM on whole nodes of its own.
    5. The answer "with a loss" is that of the plan in which it has the least bill.

Not every choice of kinds is planned, so a smaller bill may exist. An answer whose bill is above its
`level0_bound` is therefore not called exact. `limits: {cost}` limits the bill.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from planner.documents.facts import (
    Answered,
    Binding,
    Finding,
    MoreSaves,
    MoreSavesNothing,
    NodesFilled,
    OthersLeave,
    ProductionShared,
    Remainder,
)
from planner.documents.several_llms_question import LlmQuestion, SeveralLlmsQuestion
from planner.documents.task import PlanQuestion
from planner.domain import COST, OWNED, FleetLimit, payment_suffix
from planner.errors import Change, InfeasibleError
from planner.search.problem.plan_problem import Progress
from planner.search.several.joint_limits import CHEAPER_FRAC
from planner.search.several.shared_paper import gives_way_facts
from planner.search.several.shared_plan import AnswerTotal, LimitUse, SharedPlan
from planner.solvers.master import FleetLimits
from planner.units import count_text, in_unit

# Steps 2 and 3 make at most this many plans, each of which takes as long as the first. With three kinds of
# GPUs there are six ways to leave out one or two of them.
MOST_PLANS = 6
# How weak the status of a plan is; 0 for statuses that are not listed. A plan with a smaller bill but a
# weaker status is no better.
_STATUS_RANK = {"best found": 1, "not for production": 2}
CENT_TOLERANCE = 1e-6  # A bill above whole cents by no more than this share of a cent is not rounded up.


class PlanTogether(Protocol):
    """Plans a question by the prices of GPUs in use. With `own_nodes` each LLM is planned by the prices of
    whole nodes, and no two LLMs share a node. With `fills_nodes` the plan has its `fewer_gpus`.

    Raises InfeasibleError; with `own_nodes` also if no fleets planned so fit the stock together.
    """

    def __call__(
        self, question: SeveralLlmsQuestion, *, own_nodes: bool = False, fills_nodes: bool = False
    ) -> SharedPlan: ...


def plan_by_bill(
    plan: PlanTogether, question: SeveralLlmsQuestion, out_of_time: Callable[[], bool], progress: Progress
) -> SharedPlan:
    """The plan with the least bill found for all LLMs, within `limits: {cost}`.

    Raises InfeasibleError as `plan` does. If the limit on cost is too small, the error names the least bill
    that was found without it.
    """
    task = question.entries[0].task
    limit = task.cost_limit_usd_per_h
    # The search for a single LLM counts whole nodes itself.
    if len(question.entries) < 2 or (task.objective != "cost" and limit is None):
        return plan(question)
    if limit is None:
        return _least_bill_plan(plan, question, out_of_time, progress)
    if task.objective != "cost":
        return _plan_within_budget(plan, question, limit, out_of_time, progress)
    cost_error = None
    try:
        shared = _least_bill_plan(plan, question, out_of_time, progress)
        if _is_within_budget(shared, limit):
            return shared
    except InfeasibleError as failed:
        if COST.name not in failed.constraints:
            raise
        cost_error = failed
    progress("the least bill without the limit on cost")
    # A search without the limit may find another plan whose bill is within the limit; if the bill is not, the
    # error names it.
    unlimited = question.with_tasks(lambda task: replace(task, cost_limit_usd_per_h=None))
    without_limit = _least_bill_plan(plan, unlimited, out_of_time, progress)
    if _is_within_budget(without_limit, limit):
        cost_use = LimitUse(COST, limit, without_limit.bill.usd_per_h)
        shared = replace(without_limit, limits=(*without_limit.limits, cost_use))
        # The fleets with a loss must be within the limit too.
        is_over = limit * (1 + CHEAPER_FRAC) < _loss_usd_per_h(shared) < math.inf
        return _without_loss(shared) if is_over else shared
    raise _budget_error(without_limit, limit, is_proved=cost_error is not None and cost_error.is_proved)


def _is_within_budget(shared: SharedPlan, limit_usd_per_h: float) -> bool:
    """Whether the plan's bill is within the limit on cost."""
    return shared.bill.usd_per_h <= limit_usd_per_h * (1 + CHEAPER_FRAC)


def _budget_error(shared: SharedPlan, limit: float, *, is_proved: bool) -> InfeasibleError:
    """The error that no fleets were found within the limit on cost, but those of `shared` above it."""
    whole_cents = math.ceil(shared.bill.usd_per_h * 100 - CENT_TOLERANCE)
    change = Change(COST.name, limit, whole_cents / 100, COST.unit)
    text = f"capacity: no fleets of all LLMs were found for {in_unit(limit, COST.unit)}. Raise {change}"
    if shared.bill.nodes:
        sold_as = ", ".join(f"{nodes.gpu}: gpu" for nodes in shared.bill.nodes)
        text += f"; or, where you rent GPUs singly, say fleet: {{sold_as: {{{sold_as}}}}}"
    return InfeasibleError(text, kind="capacity", constraint=COST.name, ways=[[change]], is_proved=is_proved)


def _plan_within_budget(
    plan: PlanTogether,
    question: SeveralLlmsQuestion,
    limit_usd_per_h: float,
    out_of_time: Callable[[], bool],
    progress: Progress,
) -> SharedPlan:
    """The plan of least power, or fewest GPUs, whose bill is within the limit on cost.

    If the bill of the best plan is not, all LLMs are planned again on the nodes that the plan of the least
    bill pays for. Raises InfeasibleError as `plan_by_bill` does.
    """
    by_cost = question.with_tasks(lambda task: replace(task, objective="cost"))
    try:
        first = plan(question)
    except InfeasibleError as failed:
        if COST.name in failed.constraints:
            plan_by_bill(plan, by_cost, out_of_time, progress)  # Raises the error that names a bill.
        raise
    if _is_within_budget(first, limit_usd_per_h):
        return first
    progress(f"whole nodes cost {first.bill.usd_per_h:.2f} USD/h, more than the limit: the least bill")
    workers = plan_by_bill(plan, by_cost, out_of_time, progress).as_one_fleet.running_pools
    limits = FleetLimits(question.entries[0].task.stock_and_owned)
    paid = [(pool.type, pool.count) for pool in workers]
    stock = {gpu: int(limits.used(FleetLimit("stock", gpu), paid)) for gpu in limits.stock}
    best = plan(question.with_tasks(partial(_with_fewer, gpus=stock)))
    if not _is_within_budget(best, limit_usd_per_h):  # For example on demand, where the other plan has spot.
        raise _budget_error(best, limit_usd_per_h, is_proved=False)
    return _as_answer_for_all_stock(best, first, question.entries, stock)


def _least_bill_plan(
    plan: PlanTogether, question: SeveralLlmsQuestion, out_of_time: Callable[[], bool], progress: Progress
) -> SharedPlan:
    """The plan with the least bill found by the steps of the module's docstring. The limit on cost of the
    tasks holds for the price of GPUs in use; the caller compares the bill with it.
    """
    first = best = plan(question, fills_nodes=True)
    all_plans = [first]
    # The GPUs of each stock that the best plan could use, where these are fewer than in the question.
    reduced_stock: Mapping[str, int] = {}
    if first.fewer_gpus is not None and not out_of_time():
        progress(
            f"{count_text(first.bill.idle_gpus, 'idle paid GPU')}: all LLMs on the nodes of the least bill"
        )
        with contextlib.suppress(InfeasibleError):
            shared = plan(question.with_tasks(partial(_with_fewer, gpus=first.fewer_gpus)))
            all_plans.append(shared)
            if _is_better(shared, best):
                best, reduced_stock = shared, first.fewer_gpus
    # The plans by the kinds of GPUs that they leave out; None if planning without these kinds failed.
    plans: dict[frozenset[str], SharedPlan | None] = {frozenset(): first}
    expanded: set[frozenset[str]] = set()  # The keys of the plans for which step 2 was done.
    kinds = frozenset(_kind_of_gpu(gpu) for gpu in question.entries[0].task.stock)
    while len(plans) <= MOST_PLANS and not out_of_time():
        # With fewer kinds the price of GPUs in use only rises, and no bill is below that price. So a plan
        # whose price is not below the best bill leads to no better one.
        to_beat_usd_per_h = best.bill.usd_per_h * (1 - CHEAPER_FRAC)
        feasible = {key: shared for key, shared in plans.items() if shared is not None}
        parents = [
            (key, shared)
            for key, shared in feasible.items()
            if shared.bill.idle_gpus and shared.value < to_beat_usd_per_h and key not in expanded
        ]
        if not parents:
            break
        parent, parent_plan = min(
            parents, key=lambda pair: (pair[1].bill.usd_per_h, _loss_usd_per_h(pair[1]))
        )
        expanded.add(parent)
        used_kinds = _kinds_used(parent_plan)
        without_one = [parent | {kind} for kind in used_kinds]
        loss_kinds = sorted({*used_kinds, *_kinds_with_a_loss(parent_plan)})
        with_one_alone = [kinds - {kind} for kind in loss_kinds] if len(loss_kinds) > 1 else []
        without_idle = parent.union(
            _kind_of_gpu(nodes.gpu)
            for shared in feasible.values()
            for nodes in shared.bill.nodes
            if nodes.idle_gpus
        )
        for without in (*without_one, *with_one_alone, without_idle):
            if without in plans or not kinds - without:
                continue
            if len(plans) > MOST_PLANS or out_of_time():
                break
            idle_text = count_text(parent_plan.bill.idle_gpus, "idle paid GPU")
            progress(f"{idle_text}: all LLMs without {', '.join(sorted(without))}")
            try:
                shared = plan(question.with_tasks(partial(_without_kinds, kinds=without)))
            except InfeasibleError:
                plans[without] = None
                continue
            plans[without] = shared
            all_plans.append(shared)
            if _is_better(shared, best):
                best, reduced_stock = shared, dict.fromkeys(without, 0)
    if best.bill.idle_gpus and not out_of_time():
        progress(f"{count_text(best.bill.idle_gpus, 'idle paid GPU')}: each LLM on nodes of its own")
        with contextlib.suppress(InfeasibleError):
            shared = plan(question, own_nodes=True)
            all_plans.append(shared)
            if _is_better(shared, best):
                return _on_own_nodes(_with_least_loss(shared, all_plans), first)
    best = _with_least_loss(best, all_plans)
    answer = best if best is first else _as_answer_for_all_stock(best, first, question.entries, reduced_stock)
    # The search compares all fleets by the price of their GPUs in use, but only some by their bill. No bill
    # is below the price of the GPUs in use, so an answer whose bill is the bound has the least bill.
    is_least_bill = answer.bill.usd_per_h <= answer.level0_bound * (1 + CHEAPER_FRAC)
    return answer if answer.in_production or is_least_bill else replace(answer, is_exact=False)


def _on_own_nodes(best: SharedPlan, first: SharedPlan) -> SharedPlan:
    """The plan `best`, in which each LLM has nodes of its own, as the answer. The bounds are those of the
    `first` plan, because GPUs in use cost no more than whole nodes. The answer is not exact: fleets that
    share nodes may cost less, and not all of them were planned.
    """
    filled = _nodes_filled_fact(best, first, reduced_stock={})
    return replace(
        best,
        bound=first.bound,
        level0_bound=min(first.level0_bound, best.level0_bound),
        is_exact=False,
        binding=best.binding if best.in_production else (filled, *best.binding),
        in_production=(filled, *best.in_production) if best.in_production else (),
        simulations=first.simulations + best.simulations,
    )


def _with_least_loss(best: SharedPlan, all_plans: Iterable[SharedPlan]) -> SharedPlan:
    """The plan `best`, with the answer "with a loss" of that plan in which it has the least bill."""
    least = min(all_plans, key=_loss_usd_per_h)
    if _loss_usd_per_h(least) >= _loss_usd_per_h(best) * (1 - CHEAPER_FRAC):
        return best
    answers = {name: plan.certificate.find_answer("with-a-loss") for name, plan in least.plans.items()}
    total = next(total for total in least.answers if total.name == "with-a-loss")
    return _with_loss(best, total, answers)


def _without_loss(shared: SharedPlan) -> SharedPlan:
    """The plan without fleets with a loss."""
    none = Answered("with-a-loss", workers=(), value=None, usd_per_h=None, kept_in=None)
    total = AnswerTotal("with-a-loss", None, None, lacks=tuple(shared.plans))
    return _with_loss(shared, total, dict.fromkeys(shared.plans, none))


def _with_loss(shared: SharedPlan, total: AnswerTotal, answers: Mapping[str, Answered | None]) -> SharedPlan:
    """The plan with this total as its answer "with a loss", and with these `answers` of its LLMs."""
    plans = {}
    for name, plan in shared.plans.items():
        kept = [answer for answer in plan.certificate.answers if answer.name != total.name]
        kept += [answer for answer in (answers[name],) if answer is not None]
        robustness = plan.certificate.robustness
        if robustness is not None:
            # Prices at which the former fleet with a loss would be cheaper are left out.
            prices = tuple(price for price in robustness.prices if price.instead != "with a loss")
            robustness = replace(robustness, prices=prices)
        certificate = replace(plan.certificate, answers=tuple(kept), robustness=robustness)
        plans[name] = replace(plan, certificate=certificate)
    totals = [other for other in shared.answers if other.name != total.name]
    return replace(shared, plans=plans, answers=(*totals, total))


def _is_better(shared_plan: SharedPlan, best: SharedPlan) -> bool:
    """Whether a plan beats the `best` so far: its status is no weaker, and its bill is smaller."""
    is_weaker = _STATUS_RANK.get(shared_plan.status, 0) > _STATUS_RANK.get(best.status, 0)
    return not is_weaker and shared_plan.bill.usd_per_h < best.bill.usd_per_h * (1 - CHEAPER_FRAC)


def _loss_usd_per_h(shared_plan: SharedPlan) -> float:
    """The bill for the plan's fleets "with a loss" (glossary). It is infinite if no such fleets are known:
    none were found, or there was no time to search for them.
    """
    with_loss = (total.paid_usd_per_h for total in shared_plan.answers if total.name == "with-a-loss")
    known_usd_per_h = next(with_loss, None)
    return math.inf if known_usd_per_h is None else known_usd_per_h


def _nodes_filled_fact(
    best: SharedPlan, first: SharedPlan, *, reduced_stock: Mapping[str, int]
) -> NodesFilled:
    """The fact with both bills of `best`, which was planned within `reduced_stock`, and those of `first`."""
    remainders = _remainders(reduced_stock)
    return NodesFilled(
        without=tuple(remainder.limit.gpu for remainder in remainders if not remainder.amount),
        usd_per_h=best.bill.usd_per_h,
        with_loss_usd_per_h=_finite_or_none(_loss_usd_per_h(best)),
        was_usd_per_h=first.bill.usd_per_h,
        was_with_loss_usd_per_h=_finite_or_none(_loss_usd_per_h(first)),
        on=tuple(remainder for remainder in remainders if remainder.amount),
    )


def _remainders(stock: Mapping[str, int]) -> tuple[Remainder, ...]:
    """The stock as facts, in the order of the GPUs' names."""
    return tuple(Remainder(FleetLimit("stock", gpu), float(stock[gpu])) for gpu in sorted(stock))


def _finite_or_none(bill_usd_per_h: float) -> float | None:
    """The bill; None for an infinite one."""
    return bill_usd_per_h if bill_usd_per_h < math.inf else None


def _as_answer_for_all_stock(
    best: SharedPlan, first: SharedPlan, entries: Iterable[LlmQuestion], reduced_stock: Mapping[str, int]
) -> SharedPlan:
    """The plan `best`, which was planned within `reduced_stock`, as the answer for all stock.

    Its bounds, the limits, and the fleets that each LLM would have alone are those of the `first` plan, which
    had all stock. A fact says what the answer saves against the `first` plan. Facts of `best` that hold only
    within the reduced stock are left out: its findings, that every LLM has the fleet that it would have
    alone, and what more GPUs would save, if only the number of these GPUs was reduced.
    """
    entries = list(entries)
    filled = _nodes_filled_fact(best, first, reduced_stock=reduced_stock)
    names = [entry.name for entry in entries]
    gives_way = gives_way_facts(
        entries, [first.alone[name] for name in names], [best.plans[name].value for name in names], best.unit
    )
    others_leave = OthersLeave(_remainders(reduced_stock))
    only_numbers_reduced = bool(filled.on)
    left_out = (Finding, MoreSaves, MoreSavesNothing) if only_numbers_reduced else (Finding,)
    used = {use.limit: use.used for use in best.limits}
    plans = {}
    for name, plan in best.plans.items():
        assumptions = (others_leave, *plan.certificate.assumptions)
        plans[name] = replace(plan, certificate=replace(plan.certificate, assumptions=assumptions))
    kept_facts: tuple[Binding, ...] = tuple(
        fact
        for fact in best.in_production or best.binding
        if not isinstance(fact, left_out) and not (isinstance(fact, ProductionShared) and fact.is_each)
    )
    facts: tuple[Binding, ...] = (
        filled,
        *kept_facts,
        *(fact for fact in gives_way if fact not in kept_facts),
    )
    on_paper = tuple(fact for fact in best.binding if not isinstance(fact, left_out))
    # Both searches are exact by the price of GPUs in use, each over its own stock. The fleets of `best` are
    # the cheapest over all stock only if they cost no more than those of `first`.
    is_as_cheap = best.value_on_paper <= first.value_on_paper * (1 + CHEAPER_FRAC)
    return replace(
        best,
        plans=plans,
        alone=first.alone,
        bound=first.bound,
        level0_bound=min(first.level0_bound, best.level0_bound),
        is_exact=first.is_exact and best.is_exact and is_as_cheap,
        limits=tuple(replace(use, used=used.get(use.limit, 0.0)) for use in first.limits),
        # The facts belong to the fleets that are to be run: those of production, or else those on paper.
        binding=on_paper if best.in_production else facts,
        in_production=facts if best.in_production else (),
        simulations=first.simulations + best.simulations,
    )


def _kinds_used(shared_plan: SharedPlan) -> list[str]:
    """The kinds of GPUs that the plan rents, in the order of their names."""
    return sorted(_rented_kinds(pool.type.gpu.name for pool in shared_plan.as_one_fleet.running_pools))


def _kinds_with_a_loss(shared_plan: SharedPlan) -> set[str]:
    """The kinds of GPUs that the fleets with a loss rent; none if there are no such fleets."""
    answers = [plan.certificate.find_answer("with-a-loss") for plan in shared_plan.plans.values()]
    return _rented_kinds(workers.gpu for answer in answers if answer for workers in answer.workers)


def _rented_kinds(gpus: Iterable[str]) -> set[str]:
    """The kinds of these GPUs without those that are owned, because `_without_kinds` leaves these in the
    stock.
    """
    return {_kind_of_gpu(gpu) for gpu in gpus if payment_suffix(gpu) != OWNED}


def _kind_of_gpu(gpu: str) -> str:
    """The kind of a GPU by its name in the catalog: without its power cap, @spot and @owned."""
    return gpu.partition("@")[0]


def _with_fewer(task: PlanQuestion, gpus: Mapping[str, int]) -> PlanQuestion:
    """The task with the stock of these `gpus` lowered to the given numbers. Owned GPUs stay."""
    stock = {
        gpu: gpus[gpu] + task.owned.get(gpu, 0) if gpu in gpus else count for gpu, count in task.stock.items()
    }
    return replace(task, stock={gpu: count for gpu, count in stock.items() if count != 0})


def _without_kinds(task: PlanQuestion, kinds: frozenset[str]) -> PlanQuestion:
    """The task in which no GPUs of these kinds can be rented. Owned GPUs stay."""
    stock = {
        gpu: task.owned[gpu] if _kind_of_gpu(gpu) in kinds else count
        for gpu, count in task.stock.items()
        if _kind_of_gpu(gpu) not in kinds or gpu in task.owned
    }
    return replace(task, stock=stock)
