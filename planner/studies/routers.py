"""The plan's fleet under the router of every target that can run it, on its traffic as it is written.

`policies.deployed` says what routes there and what the simulator does in its place. Targets with the same
routing share a simulation; where the plan's own routing is the target's, or a role has one worker and so no
choice, it is the plan's.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from planner import manifests
from planner.documents.facts import (
    At,
    NotDeployable,
    NotSimulated,
    OfLlm,
    RoutersMiss,
    ServicesApart,
    UnderRouter,
    Warned,
)
from planner.documents.together import Question
from planner.fleet import Fleet, Policies
from planner.policies import ROUTING, Deployed, deployed
from planner.search.findings import at, outcome_of
from planner.search.plan import Plan
from planner.search.together import SharedPlan
from planner.simulator.metrics import Verdict, judge
from planner.simulator.replay import simulate


def under_routers(plan: Plan, target: str | None = None, deadline: float = math.inf) -> Plan:
    """The plan with what its fleet does under each router among its facts, and a warning of those that miss
    the SLO. With `target` only that one is looked at, and a warning says where it cannot run the plan. What
    would be simulated beyond `deadline`, on time.monotonic's clock, is left out, and said to be.
    """
    refused = manifests.refused(plan.fleet, plan.max_model_len)
    warnings: list[Warned] = []
    if target is not None and target in refused:
        warnings.append(NotDeployable(target, refused[target]))
    names = [name for name in manifests.TARGETS if name not in refused and target in (None, name)]
    for name in names:
        if (services := manifests.services_apart(plan.fleet, name)) > 1:
            warnings.append(ServicesApart(name, services))
    known: dict[Policies, Verdict] = {_matters(plan.fleet, plan.fleet.policies): plan.verdict}
    found, late = list[UnderRouter](), list[str]()
    for name in names:
        routed = deployed(plan.fleet.policies, name, is_pair=plan.fleet.is_disaggregated)
        key = _matters(plan.fleet, routed.policies)
        if key not in known and time.monotonic() > deadline:
            late.append(name)
            continue
        if key not in known:
            known[key] = _verdict(plan, routed.policies)
        found.append(_under(name, routed, known[key], plan))
    if missed := tuple(each for each in found if not each.holds):
        warnings.append(RoutersMiss(missed))
    if late:
        warnings.append(NotSimulated(("routers",)))
    return replace(
        plan,
        certificate=replace(plan.certificate, deploy=target, routers=tuple(found)),
        warnings=(*plan.warnings, *warnings),
    )


def each_under_routers(shared: SharedPlan, question: Question) -> SharedPlan:
    """The same of the plans of several LLMs."""
    plans = {part.name: under_routers(shared.plans[part.name], part.task.deploy) for part in question.parts}
    new = [
        OfLlm(name, warning)
        for name, plan in plans.items()
        for warning in plan.warnings[len(shared.plans[name].warnings) :]
    ]
    return replace(shared, plans=plans, warnings=(*shared.warnings, *new))


def _matters(fleet: Fleet, policies: Policies) -> Policies:
    """The policies, without the routing of those who have no choice."""
    front = sum(pool.count for pool in fleet.pools if pool.role != "decode")
    back = sum(pool.count for pool in fleet.pools if pool.role == "decode")
    usual = Policies()
    if front < 2:
        policies = replace(policies, routing=usual.routing)
    if back < 2:
        policies = replace(policies, decode_routing=usual.decode_routing)
    return policies


def _verdict(plan: Plan, policies: Policies) -> Verdict:
    pinned = plan.fleet.pinned if ROUTING[policies.routing].pins else ()  # others' caches keep what is used
    fleet, slo = replace(plan.fleet, policies=policies, pinned=pinned), plan.slo
    has_gaps = slo.every_s is not None or any(limit.metric == "tbt" for limit in slo.limits)
    return judge(simulate(fleet, plan.trace, limits=slo.limits, record=has_gaps), slo)


def _under(target: str, routed: Deployed, verdict: Verdict, plan: Plan) -> UnderRouter:
    policies = routed.policies
    simulated = (policies.routing, policies.decode_routing) if len(routed.told) > 1 else (policies.routing,)
    return UnderRouter(
        target,
        routed.router,
        routed.told,
        simulated,
        routed.differs,
        _decides(verdict),
        outcome_of(verdict, plan.slo),
    )


def _decides(verdict: Verdict) -> At | None:
    """The limit that is missed by most, or that has the least room."""
    lines = [at(line) for line in verdict.lines]
    lines = [line for line in lines if not math.isnan(line.value_s)]
    return max(lines, key=lambda line: line.value_s / line.limit.limit_s, default=None)
