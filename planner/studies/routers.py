"""Simulates the plan's fleet with the router of every target that can run it, on the traffic as written.

`policies.find_deployed_routing` says how a target routes and which policies the simulator runs in its place.
Targets with the same routing share a simulation. The plan's own simulation is used if the target routes as
the plan does, or if each role has one worker, so that a router has no choice.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner import manifests
from planner.documents import facts
from planner.documents.several_llms_question import SeveralLlmsQuestion
from planner.errors import InfeasibleError, InputError, OutOfTimeError
from planner.fleet import Fleet, Policies
from planner.policies import (
    BY_FIELD,
    ONE_KIND,
    ONE_POOL,
    ONLY_PAIRS,
    QUEUE,
    ROUTERS_OF,
    ROUTING,
    Deployed,
    find_deployed_routing,
    is_deployed,
)
from planner.search.evidence.findings import limit_fact, outcome_of
from planner.search.evidence.plan import Plan
from planner.search.oracle.work_clock import is_over
from planner.search.problem.bill import bought_pools
from planner.search.several.shared_plan import SharedPlan
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import Verdict, judge_slo


def simulate_routers(
    plan: Plan, target: str | None = None, deadline: float = math.inf, *, bring_priority: bool = True
) -> Plan:
    """The plan with the verdict on its fleet under each router, and with a warning that names the routers
    which miss the SLO. The fleet is judged on the traffic as written, and in the scenarios in which the plan
    passed its test.

    With `target` only that target is simulated, and a warning says if it cannot run the plan. Simulations
    that would begin after `deadline`, on the search's clock, are left out, and a warning says so. Policies
    that a target lacks are replaced by the usual ones. Unless requests `bring_priority`, targets serve them
    in the order of arrival, also where `plan serve` would order them otherwise.
    """
    refused = manifests.find_refused_targets(plan.fleet, plan.max_model_len)
    warnings: list[facts.Warned] = []
    if target is not None and target in refused:
        warnings.append(facts.NotDeployable(target, refused[target]))
    names = [name for name in manifests.TARGETS if name not in refused and target in (None, name)]
    # The verdicts by policies, so that equal policies are judged once; None if no time was left.
    plan_verdict = RouterVerdict(plan.verdict, None if plan.trial is None else plan.kept_in, passes=True)
    verdicts: dict[Policies, RouterVerdict | None] = {
        _effective_policies(plan.fleet, plan.fleet.policies): plan_verdict
    }
    rows: list[facts.UnderRouter] = []
    not_simulated: list[str] = []
    for name in names:
        if (services := manifests.services_apart(plan.fleet, name)) > 1:
            warnings.append(facts.ServicesApart(name, services))
    for name in names:
        # `routed` has the target's router, the policies in its place, and what differs between the two.
        routed = find_deployed_routing(plan.fleet.policies, name, is_pair=plan.fleet.is_disaggregated)
        routed = _without_lacking(routed, name, bring_priority=bring_priority)
        key = _effective_policies(plan.fleet, routed.policies)
        if key not in verdicts:
            verdicts[key] = _judge_policies(plan, routed.policies, deadline)
        if (judged := verdicts[key]) is None:
            not_simulated.append(name)
        else:
            rows.append(_under_router_fact(name, routed, judged, plan))
    if missed := tuple(row for row in rows if not row.keeps):
        warnings.append(facts.RoutersMiss(missed))
    if not_simulated:
        warnings.append(facts.NotSimulated(("routers",)))
    return replace(
        plan,
        certificate=replace(plan.certificate, deploy=target, routers=tuple(rows)),
        warnings=(*plan.warnings, *warnings),
        # `trial`, the test of production, holds many simulations, and nothing after this function needs it.
        trial=None,
    )


def _without_lacking(routed: Deployed, target: str, *, bring_priority: bool) -> Deployed:
    """The routing `routed` with the usual policies in place of those that the engines and routers of `target`
    lack; `differs` says so. Unless requests `bring_priority`, vLLM serves them as they arrive.
    """
    usual, policies, differs = Policies(), routed.policies, list(routed.differs)
    queue = QUEUE[policies.queue]
    lacks_queue = not is_deployed(queue, target)
    if lacks_queue or (queue.has_rank and not bring_priority):
        why = f"nothing there gives the order {queue.name}"
        why = why if lacks_queue else f"no request brings a priority for {queue.name}"
        differs.append(f"serves prompts by {usual.queue}, as {why}")
        policies = replace(
            policies, queue=usual.queue, due=usual.due, queue_window_s=usual.queue_window_s, queue_batch=0
        )
    for axis in ("batching", "admission", "pools"):
        planned, default = getattr(policies, axis), getattr(usual, axis)
        if not is_deployed(BY_FIELD[axis][planned], target):
            differs.append(f"has {axis} {default}, as {planned} is of simulations alone")
            policies = replace(policies, **{axis: default}, reserve_tokens=usual.reserve_tokens)
    return replace(routed, policies=policies, differs=tuple(differs))


def simulate_routers_of_each(shared_plan: SharedPlan, question: SeveralLlmsQuestion) -> SharedPlan:
    """The shared plan with the result of `simulate_routers` for each LLM. New warnings of an LLM's plan
    become warnings of the shared plan, with the LLM's name.
    """
    plans = {
        entry.name: simulate_routers(
            shared_plan.plans[entry.name],
            entry.task.deploy,
            bring_priority=not entry.task.policies.is_queue_assumed,
        )
        for entry in question.entries
    }
    new_warnings = [
        facts.OfLlm(name, warning)
        for name, plan in plans.items()
        for warning in plan.warnings[len(shared_plan.plans[name].warnings) :]
    ]
    return replace(shared_plan, plans=plans, warnings=(*shared_plan.warnings, *new_warnings))


def plan_each_target(plan: Plan, planned_for: Callable[[str], Plan]) -> Plan:
    """The plan with another fleet for each target whose router misses the SLO with the plan's own fleet.

    `planned_for` answers the same question for the router of one target; it is called once for targets whose
    routers and possible fleets are alike.
    """
    keeping = {row.target for row in plan.certificate.routers if row.keeps}
    # Targets are alike if they have the same routers and the same restrictions: only workers of one kind
    # (ONE_KIND), only pairs of prefill and decode workers (ONLY_PAIRS), only one pool (ONE_POOL).
    alike: dict[object, list[str]] = {}
    for name in manifests.TARGETS:
        if name not in keeping:
            key = ROUTERS_OF[name], *(name in names for names in (ONE_KIND, ONLY_PAIRS, ONE_POOL))
            alike.setdefault(key, []).append(name)
    rows = tuple(_plan_for_targets(names, planned_for) for names in alike.values())
    return replace(plan, certificate=replace(plan.certificate, for_targets=rows))


def _plan_for_targets(names: Sequence[str], planned_for: Callable[[str], Plan]) -> facts.ForTargets:
    """The fact on the plan for targets that are alike: its fleet and price, or why there is none."""
    try:
        plan = planned_for(names[0])
    except InfeasibleError as error:
        status = "infeasible" if error.is_proved else "not found"
        return facts.ForTargets(tuple(names), status, (), None)
    except OutOfTimeError:
        return facts.ForTargets(tuple(names), "not found", (), None)
    except InputError:  # `policies: routing` names no routing that the target has.
        return facts.ForTargets(tuple(names), "not possible", (), None)
    refused = manifests.find_refused_targets(plan.fleet, plan.max_model_len)
    able = tuple(name for name in names if name not in refused)
    # If no target can run the fleet, the row names them all and has no price.
    usd_per_h = plan.bill.usd_per_h if able else None
    return facts.ForTargets(able or tuple(names), plan.status, bought_pools(plan.fleet), usd_per_h)


def _effective_policies(fleet: Fleet, policies: Policies) -> Policies:
    """The policies, with the default in place of each routing that has only one worker to choose: policies
    that differ only in such a routing have the same effect, and share a simulation.
    """
    arrival_workers = sum(pool.count for pool in fleet.pools if pool.role != "decode")
    decode_workers = sum(pool.count for pool in fleet.pools if pool.role == "decode")
    usual = Policies()
    if arrival_workers < 2:
        policies = replace(policies, routing=usual.routing)
    if decode_workers < 2:
        policies = replace(policies, decode_routing=usual.decode_routing)
    return policies


@dataclass(frozen=True, slots=True)
class RouterVerdict:
    """A fleet's verdict on the traffic as written; and, if the plan passed a test, in how many of its
    scenarios the fleet was kept and whether that passes. Without a test `kept_in` is None and `passes` true.
    """

    verdict: Verdict
    kept_in: facts.KeptIn | None
    passes: bool


def _judge_policies(plan: Plan, policies: Policies, deadline: float) -> RouterVerdict | None:
    """The verdict on the plan's fleet under other policies; None if the time ended before."""
    if is_over(deadline):
        return None
    # Only a router that pins prefixes to workers needs the plan's assignment of prefixes.
    pinned = plan.fleet.pinned if ROUTING[policies.routing].pins else ()
    fleet, slo = replace(plan.fleet, policies=policies, pinned=pinned), plan.slo
    # An SLO with windows, or with limits on gaps between tokens, is judged by the records of single steps.
    needs_records = slo.every_s is not None or any(limit.metric_row.is_of_gaps for limit in slo.limits)
    verdict = judge_slo(simulate(fleet, plan.trace, limits=slo.limits, record=needs_records), slo)
    if plan.trial is None or not verdict.holds:
        # There is no test, or none is needed since the fleet already misses the SLO on the written traffic.
        return RouterVerdict(verdict, None, passes=True)
    kept_in, passes = plan.trial.kept_with_policies(policies, fleet)
    if plan.trial.test.out_of_time():
        return None
    return RouterVerdict(verdict, kept_in, passes)


def _under_router_fact(target: str, routed: Deployed, judged: RouterVerdict, plan: Plan) -> facts.UnderRouter:
    """The verdict on the plan's fleet under a target's router, as a fact."""
    policies = routed.policies
    simulated: tuple[str, ...] = (policies.routing,)
    if len(routed.rule_names) > 1:  # The router has a rule of its own for hand-offs.
        simulated = (policies.routing, policies.decode_routing)
    return facts.UnderRouter(
        target,
        routed.router,
        routed.rule_names,
        simulated,
        routed.differs,
        _tightest_limit(judged.verdict),
        outcome_of(judged.verdict, plan.slo),
        judged.kept_in,
        judged.passes,
        needs_priority=QUEUE[policies.queue].has_rank,
    )


def _tightest_limit(verdict: Verdict) -> facts.At | None:
    """The limit of the SLO whose simulated value is its largest multiple; None if no limit has a value."""
    lines = [limit_fact(line) for line in verdict.lines]
    lines = [line for line in lines if not math.isnan(line.value_s)]
    return max(lines, key=lambda line: line.value_s / line.limit.limit_s, default=None)
