"""The plan's fleet under the routers of deployment targets, and plans for one target's router."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from plans import CATALOG, a_plan, mixed, pairs
from questions import DOCUMENT, question, traffic
from typer.testing import CliRunner

from planner.cli import app
from planner.documents.facts import NotDeployable, RoutersMiss
from planner.documents.task import parse_task
from planner.domain import Limit, Slo
from planner.errors import InputError
from planner.face.planning import planned
from planner.face.results import PlanResult
from planner.policies import deployed
from planner.reports.facts import sentence
from planner.reports.output import render, to_json
from planner.search.plan import Plan
from planner.search.written_plan import read_plan
from planner.simulator import judge, simulate
from planner.studies.routers import under_routers
from planner.studies.whatif import Study

FLEET = {"gpus": ["h100-80g"], "max_num_batched_tokens": 2048}
SLO = Slo((Limit("ttft", 0.9, 1.0),))


@cache
def found(target: str | None = None) -> Plan:
    deploy = {} if target is None else {"deploy": {"target": target}}
    return planned(Study(traffic(rate_rps=30.0), CATALOG), question(fleet=FLEET, **deploy))


@cache
def made() -> Plan:
    """Six workers of 8 A100 at 30 requests/s: TTFT p90 is 0.68 s by jsq."""
    fleet, trace = mixed("a100-80g", 8, 6), traffic(rate_rps=30.0)
    simulation = simulate(fleet, trace, limits=SLO.limits, record=True)
    plan = a_plan(fleet)
    longest = int((trace.input_tokens + trace.output_tokens).max())
    return under_routers(
        replace(
            plan,
            slo=SLO,
            trace=trace,
            simulation=simulation,
            verdict=judge(simulation, SLO),
            max_model_len=longest,
        )
    )


def test_a_fleet_that_holds_as_simulated_and_misses_as_deployed_is_said_so() -> None:
    """The figure is that of a simulation of its own, with the routing that stands for the router."""
    plan = made()
    assert plan.verdict.holds
    routers = {each.target: each for each in plan.certificate.routers}
    at = routers["kubernetes"]
    assert (at.router, at.told, at.simulated) == (
        "vllm-router",
        ("power_of_two",),
        ("power-of-two-requests",),
    )
    policies = replace(plan.fleet.policies, routing="power-of-two-requests")
    again = judge(
        simulate(replace(plan.fleet, policies=policies), plan.trace, limits=plan.slo.limits), plan.slo
    )
    assert not again.holds and not at.holds and at.decides is not None
    assert at.decides.limit == Limit("ttft", 0.9, 1.0)
    assert at.decides.value_s == again.lines[0].value_s > 1.0
    (warned,) = [each for each in plan.warnings if isinstance(each, RoutersMiss)]
    assert at in warned.missed and all(not each.holds for each in warned.missed)
    said = sentence(warned)
    assert said.startswith(
        "the SLO is not kept under the router of vllm, compose, kubernetes, lws (vllm-router"
    )
    assert re.search(r"by power_of_two\): ttft p90 1\.\d\d s, limit 1\.00 s", said)


def test_routers_that_keep_the_slo_are_said_too_and_equal_ones_share_a_simulation() -> None:
    routers = {each.target: each for each in made().certificate.routers}
    assert routers["llm-d"].holds and "not kept" not in sentence(routers["llm-d"])
    assert routers["compose"].decides == routers["kubernetes"].decides == routers["ray-serve"].decides
    assert "disaggregatedset" not in routers  # it cannot run mixed pools


def test_the_files_say_it(tmp_path: Path) -> None:
    plan = made()
    files = render(plan)
    row = (
        r"\| kubernetes \| vllm-router by power_of_two \| power-of-two-requests \| ttft p90 .* s: not kept \|"
    )
    assert re.search(row, files["manifests/README.md"])
    written = yaml.safe_load(files["plan.yaml"])
    assert {each["target"] for each in written["routers"]} == {
        each.target for each in plan.certificate.routers
    }
    rows = json.loads(files["certificate.json"])["certificate"]["routers"]
    assert rows == to_json(plan)["certificate"]["routers"]
    assert [each["target"] for each in rows if each["outcome"]["missed"]]
    assert "Under the routers of deployment targets" in files["report.html"]
    PlanResult(plan).save(tmp_path)
    again, _ = read_plan(tmp_path, CATALOG)
    assert json.loads(render(again)["certificate.json"])["certificate"]["routers"] == rows
    out = tmp_path / "again"
    told = CliRunner().invoke(app, ["manifests", str(tmp_path / "plan.yaml"), "-o", str(out)])
    assert told.exit_code == 0, told.output
    assert re.search(row, (out / "README.md").read_text())


def test_a_plan_for_a_target_holds_under_its_router() -> None:
    """And costs more here, where taking turns does worse than counting work. The target deploys mixed workers
    or pairs, not both.
    """
    target = "production-stack"
    plan, free = found(target), found()
    assert plan.value > free.value
    is_pair = any(pool.role == "prefill" for pool in plan.fleet.pools)
    assert not (is_pair and any(pool.role == "mixed" for pool in plan.fleet.pools))
    routed = deployed(plan.fleet.policies, target, is_pair=is_pair)
    assert routed.policies == plan.fleet.policies
    (under,) = plan.certificate.routers
    assert under.target == target == plan.certificate.deploy and under.holds and plan.verdict.holds
    assert not [each for each in plan.warnings if isinstance(each, RoutersMiss | NotDeployable)]
    assert yaml.safe_load(render(plan)["plan.yaml"])["deploy"] == {"target": target}


def test_without_deploy_the_policies_stay_as_they_were() -> None:
    assert [each.routing for each in question().policies()] == ["jsq"]
    assert question().policies_of_pairs(question().policies()[0]) is None


def test_the_routers_of_mixed_workers_and_of_pairs_may_differ() -> None:
    task = question(deploy={"target": "kubernetes"})
    (mixed_workers,) = task.policies()
    assert mixed_workers.routing == "power-of-two-requests"
    of_pairs = task.policies_of_pairs(mixed_workers)
    assert of_pairs is not None
    assert (of_pairs.routing, of_pairs.decode_routing) == ("round-robin", "round-robin")


def test_a_target_that_does_not_exist_and_a_routing_it_lacks_are_one_line_each() -> None:
    def refused(**keys: object) -> str:
        with pytest.raises(InputError) as error:
            parse_task(DOCUMENT | keys, CATALOG)
        assert "\n" not in str(error.value)
        return str(error.value)

    said = refused(deploy={"target": "kubernets"})
    assert "deploy: target" in said and "did you mean 'kubernetes'?" in said
    assert "unknown key 'to'" in refused(deploy={"to": "kserve"})
    said = refused(deploy={"target": "production-stack"}, policies={"routing": "least-outstanding"})
    assert "production-stack (deploy) cannot route by least-outstanding, it has round-robin" in said
    task = question(deploy={"target": "dynamo"}, policies={"routing": ["round-robin", "least-outstanding"]})
    assert [each.routing for each in task.policies()] == ["round-robin", "least-outstanding"]


def test_a_target_that_cannot_run_the_plan_is_a_warning() -> None:
    plan = under_routers(a_plan(mixed()), "disaggregatedset")
    (warned,) = [each for each in plan.warnings if isinstance(each, NotDeployable)]
    assert sentence(warned).startswith("deploy: disaggregatedset cannot run this plan: ")
    assert plan.certificate.routers == ()


def test_one_worker_in_each_role_leaves_no_choice() -> None:
    fleet = pairs()
    alone = replace(fleet, pools=tuple(replace(pool, count=1) for pool in fleet.pools))
    plan = under_routers(a_plan(alone))
    assert len({each.decides for each in plan.certificate.routers}) == 1
    assert {each.outcome.holds for each in plan.certificate.routers} == {plan.verdict.holds}
