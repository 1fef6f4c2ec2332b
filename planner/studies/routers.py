"""The plan's fleet under the router of every target that can run it, on its traffic as it is written.

`policies.deployed` says what routes there and what the simulator runs in its place. Targets with the same
routing share a simulation. Where the target's routing is the plan's own, or each role has one worker and so
no choice, the plan's simulation counts.
"""

from __future__ import annotations

import math
import time
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
from planner.documents.together import Question
from planner.errors import InfeasibleError, InputError
from planner.fleet import Fleet, Policies
from planner.policies import ONE_KIND, ONLY_PAIRS, ROUTERS_OF, ROUTING, Deployed, deployed
from planner.search.bill import bought
from planner.search.findings import at, outcome_of
from planner.search.plan import Plan
from planner.search.together import SharedPlan
from planner.simulator.metrics import Verdict, judge
from planner.simulator.replay import simulate


def under_routers(plan: Plan, target: str | None = None, deadline: float = math.inf) -> Plan:
    """The plan with what its fleet does under each router, and a warning of the routers that do not keep the
    SLO: on the traffic as it is written, and in the scenarios in which the plan passed its test.

    With `target` only that target is simulated, and a warning says where it cannot run the plan. Simulations
    that would begin after `deadline`, on time.monotonic's clock, are left out, and a warning says so.
    """
    refused = manifests.refused(plan.fleet, plan.max_model_len)
    warnings: list[Warned] = []
    if target is not None and target in refused:
        warnings.append(NotDeployable(target, refused[target]))
    names = [name for name in manifests.TARGETS if name not in refused and target in (None, name)]
    production = plan.certificate.answer("production")
    own = None if plan.trial is None or production is None else production.kept_in
    known: dict[Policies, Judged | None] = {
        _matters(plan.fleet, plan.fleet.policies): Judged(plan.verdict, own, passes=True)
    }
    rows, late = list[UnderRouter](), list[str]()
    for name in names:
        if (services := manifests.services_apart(plan.fleet, name)) > 1:
            warnings.append(ServicesApart(name, services))
    for name in names:
        routed = deployed(plan.fleet.policies, name, is_pair=plan.fleet.is_disaggregated)
        key = _matters(plan.fleet, routed.policies)
        if key not in known:
            known[key] = _judged(plan, routed.policies, deadline)
        if (judged := known[key]) is None:
            late.append(name)
        else:
            rows.append(_under(name, routed, judged, plan))
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


def each_under_routers(shared: SharedPlan, question: Question) -> SharedPlan:
    """The plans of several LLMs, each with what its fleet does under the routers."""
    plans = {part.name: under_routers(shared.plans[part.name], part.task.deploy) for part in question.parts}
    new = [
        OfLlm(name, warning)
        for name, plan in plans.items()
        for warning in plan.warnings[len(shared.plans[name].warnings) :]
    ]
    return replace(shared, plans=plans, warnings=(*shared.warnings, *new))


def with_each_target(plan: Plan, planned_for: Callable[[str], Plan]) -> Plan:
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
    rows = tuple(_for_targets(names, planned_for) for names in alike.values())
    return replace(plan, certificate=replace(plan.certificate, for_targets=rows))


def _for_targets(names: Sequence[str], planned_for: Callable[[str], Plan]) -> ForTargets:
    try:
        plan = planned_for(names[0])
    except InfeasibleError:
        return ForTargets(tuple(names), "infeasible", (), None)
    except InputError:  # `policies: routing` names no routing that the target has.
        return ForTargets(tuple(names), "not possible", (), None)
    refused = manifests.refused(plan.fleet, plan.max_model_len)
    able = tuple(name for name in names if name not in refused)
    usd_per_h = plan.bill.usd_per_h if able else None
    return ForTargets(able or tuple(names), plan.status, bought(plan.fleet), usd_per_h)


def _matters(fleet: Fleet, policies: Policies) -> Policies:
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
class Judged:
    """A fleet's verdict on the written traffic and, where the plan passed a test, in its scenarios."""

    verdict: Verdict
    kept_in: KeptIn | None
    passes: bool


def _judged(plan: Plan, policies: Policies, deadline: float) -> Judged | None:
    """The verdict on the plan's fleet under other policies; None where the time was over."""
    if time.monotonic() > deadline:
        return None
    # Only a router that pins prefixes keeps them on workers; other caches keep what is used.
    pinned = plan.fleet.pinned if ROUTING[policies.routing].pins else ()
    fleet, slo = replace(plan.fleet, policies=policies, pinned=pinned), plan.slo
    has_gaps = slo.every_s is not None or any(limit.metric == "tbt" for limit in slo.limits)
    verdict = judge(simulate(fleet, plan.trace, limits=slo.limits, record=has_gaps), slo)
    if plan.trial is None or not verdict.holds:
        return Judged(verdict, None, passes=True)
    kept_in, passes = plan.trial.kept_under(policies, fleet)
    if plan.trial.test.out_of_time():
        return None
    return Judged(verdict, kept_in, passes)


def _under(target: str, routed: Deployed, judged: Judged, plan: Plan) -> UnderRouter:
    policies = routed.policies
    simulated = (policies.routing, policies.decode_routing) if len(routed.told) > 1 else (policies.routing,)
    return UnderRouter(
        target,
        routed.router,
        routed.told,
        simulated,
        routed.differs,
        _decides(judged.verdict),
        outcome_of(judged.verdict, plan.slo),
        judged.kept_in,
        judged.passes,
    )


def _decides(verdict: Verdict) -> At | None:
    """The limit with the worst ratio of value to limit; None where no line has a value."""
    lines = [at(line) for line in verdict.lines]
    lines = [line for line in lines if not math.isnan(line.value_s)]
    return max(lines, key=lambda line: line.value_s / line.limit.limit_s, default=None)
