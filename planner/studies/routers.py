"""The plan's fleet under the router of every target that can run it, on its traffic as it is written.

`policies.deployed` says what routes there and what the simulator runs in its place. Targets with the same
routing share a simulation. Where the target's routing is the plan's own, or each role has one worker and so
no choice, the plan's simulation counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner import manifests
from planner.documents.facts import (
    At,
    ForTargets,
    KeptIn,
    NotDeployable,
    NotSimulated,
    OfLlm,
    RoutersMiss,
    ServicesApart,
    UnderRouter,
    Warned,
)
from planner.documents.several_llms_question import SeveralLlmsQuestion
from planner.errors import InfeasibleError, InputError
from planner.fleet import Fleet, Policies
from planner.policies import ONE_KIND, ONLY_PAIRS, QUEUE, ROUTERS_OF, ROUTING, Deployed, find_deployed_routing
from planner.search.evidence.findings import limit_fact, outcome_of
from planner.search.evidence.plan import Plan
from planner.search.oracle.work_clock import is_over
from planner.search.problem.bill import bought_pools
from planner.search.several.shared_plan import SharedPlan
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import Verdict, judge


def simulate_routers(
    plan: Plan, target: str | None = None, deadline: float = math.inf, *, bring_priority: bool = True
) -> Plan:
    """The plan with what its fleet does under each router, and a warning of the routers that do not keep the
    SLO: on the traffic as it is written, and in the scenarios in which the plan passed its test.

    With `target` only that target is simulated, and a warning says where it cannot run the plan. Simulations
    that would begin after `deadline`, on the search's clock, are left out, and a warning says so. Unless
    requests `bring_priority`, targets serve them as they arrive, whatever order `plan serve` would give them.
    """
    refused = manifests.find_refused_targets(plan.fleet, plan.max_model_len)
    warnings: list[Warned] = []
    if target is not None and target in refused:
        warnings.append(NotDeployable(target, refused[target]))
    names = [name for name in manifests.TARGETS if name not in refused and target in (None, name)]
    production = plan.certificate.find_answer("production")
    own = None if plan.trial is None or production is None else production.kept_in
    known: dict[Policies, RouterVerdict | None] = {
        _effective_policies(plan.fleet, plan.fleet.policies): RouterVerdict(plan.verdict, own, passes=True)
    }
    rows, late = list[UnderRouter](), list[str]()
    for name in names:
        if (services := manifests.services_apart(plan.fleet, name)) > 1:
            warnings.append(ServicesApart(name, services))
    for name in names:
        routed = find_deployed_routing(plan.fleet.policies, name, is_pair=plan.fleet.is_disaggregated)
        if not bring_priority:
            routed = without_priority(routed)
        key = _effective_policies(plan.fleet, routed.policies)
        if key not in known:
            known[key] = _judge_policies(plan, routed.policies, deadline)
        if (judged := known[key]) is None:
            late.append(name)
        else:
            rows.append(_under_router_fact(name, routed, judged, plan))
    if missed := tuple(each for each in rows if not each.keeps):
        warnings.append(RoutersMiss(missed))
    if late:
        warnings.append(NotSimulated(("routers",)))
    return replace(
        plan,
        certificate=replace(plan.certificate, deploy=target, routers=tuple(rows)),
        warnings=(*plan.warnings, *warnings),
        trial=None,
    )


def without_priority(routed: Deployed) -> Deployed:
    """The same where no request brings the priority that the order of prompts goes by: vLLM then serves them
    as they arrive.
    """
    if not QUEUE[routed.policies.queue].has_rank:
        return routed
    usual = Policies()
    policies = replace(routed.policies, queue=usual.queue, due=usual.due, queue_window_s=usual.queue_window_s)
    differs = f"prompts go {usual.queue}, as no request brings a priority for {routed.policies.queue}"
    return replace(routed, policies=policies, differs=(*routed.differs, differs))


def simulate_routers_of_each(shared: SharedPlan, question: SeveralLlmsQuestion) -> SharedPlan:
    """The plans of several LLMs, each with what its fleet does under the routers."""
    plans = {
        part.name: simulate_routers(
            shared.plans[part.name], part.task.deploy, bring_priority=not part.task.policies.is_queue_assumed
        )
        for part in question.parts
    }
    new = [
        OfLlm(name, warning)
        for name, plan in plans.items()
        for warning in plan.warnings[len(shared.plans[name].warnings) :]
    ]
    return replace(shared, plans=plans, warnings=(*shared.warnings, *new))


def plan_each_target(plan: Plan, planned_for: Callable[[str], Plan]) -> Plan:
    """The plan with a fleet for each target that does not keep it, planned once for targets whose routers are
    alike.

    `planned_for` answers the same question for the router of one target.
    """
    kept = {each.target for each in plan.certificate.routers if each.keeps}
    alike: dict[object, list[str]] = {}
    for name in manifests.TARGETS:
        if name not in kept:
            kind = ROUTERS_OF[name], name in ONE_KIND, name in ONLY_PAIRS
            alike.setdefault(kind, []).append(name)
    rows = tuple(_plan_for_targets(names, planned_for) for names in alike.values())
    return replace(plan, certificate=replace(plan.certificate, for_targets=rows))


def _plan_for_targets(names: Sequence[str], planned_for: Callable[[str], Plan]) -> ForTargets:
    try:
        plan = planned_for(names[0])
    except InfeasibleError:
        return ForTargets(tuple(names), "infeasible", (), None)
    except InputError:  # `policies: routing` names no routing that the target has.
        return ForTargets(tuple(names), "not possible", (), None)
    refused = manifests.find_refused_targets(plan.fleet, plan.max_model_len)
    able = tuple(name for name in names if name not in refused)
    usd_per_h = plan.bill.usd_per_h if able else None
    return ForTargets(able or tuple(names), plan.status, bought_pools(plan.fleet), usd_per_h)


def _effective_policies(fleet: Fleet, policies: Policies) -> Policies:
    """The policies with the usual routing for roles of one worker, which have no choice."""
    front = sum(pool.count for pool in fleet.pools if pool.role != "decode")
    back = sum(pool.count for pool in fleet.pools if pool.role == "decode")
    usual = Policies()
    if front < 2:
        policies = replace(policies, routing=usual.routing)
    if back < 2:
        policies = replace(policies, decode_routing=usual.decode_routing)
    return policies


@dataclass(frozen=True, slots=True)
class RouterVerdict:
    """A fleet's verdict on the written traffic and, where the plan passed a test, in its scenarios."""

    verdict: Verdict
    kept_in: KeptIn | None
    passes: bool


def _judge_policies(plan: Plan, policies: Policies, deadline: float) -> RouterVerdict | None:
    """The verdict on the plan's fleet under other policies; None where the time was over."""
    if is_over(deadline):
        return None
    # Only a router that pins prefixes keeps them on workers; other caches keep what is used.
    pinned = plan.fleet.pinned if ROUTING[policies.routing].pins else ()
    fleet, slo = replace(plan.fleet, policies=policies, pinned=pinned), plan.slo
    has_gaps = slo.every_s is not None or any(limit.row.is_of_gaps for limit in slo.limits)
    verdict = judge(simulate(fleet, plan.trace, limits=slo.limits, record=has_gaps), slo)
    if plan.trial is None or not verdict.holds:
        return RouterVerdict(verdict, None, passes=True)
    kept_in, passes = plan.trial.kept_with_policies(policies, fleet)
    if plan.trial.test.out_of_time():
        return None
    return RouterVerdict(verdict, kept_in, passes)


def _under_router_fact(target: str, routed: Deployed, judged: RouterVerdict, plan: Plan) -> UnderRouter:
    policies = routed.policies
    simulated = (
        (policies.routing, policies.decode_routing) if len(routed.rule_names) > 1 else (policies.routing,)
    )
    return UnderRouter(
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


def _tightest_limit(verdict: Verdict) -> At | None:
    """The limit with the worst ratio of value to limit; None where no line has a value."""
    lines = [limit_fact(line) for line in verdict.lines]
    lines = [line for line in lines if not math.isnan(line.value_s)]
    return max(lines, key=lambda line: line.value_s / line.limit.limit_s, default=None)
