"""Plans for traffic that asks for adapters: certified, and the same when simulated again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plans import CATALOG
from questions import question, traffic

from planner.documents.fleet_file import read_fleet
from planner.errors import InputError
from planner.fleet import Role
from planner.reports.fact_sentences import fact_sentences_of
from planner.reports.output import render
from planner.reports.report import simulate_command
from planner.search.evidence.certify import plan
from planner.search.problem.plan_problem import with_policies
from planner.search.problem.reasons import reason_text
from planner.simulator.policy_checks import check_policies
from planner.simulator.replay import simulate
from planner.studies.what_if import Study
from planner.traffic.trace_reading import read_trace

LORA = {"max_loras": 8, "max_rank": 16, "adapters": ["a", "b", "c"]}


@pytest.mark.long
def test_a_plan_with_adapters_is_certified_and_replayed(tmp_path: Path) -> None:
    """Slots for all adapters at once: steps and the KV cache alone make it dearer, or leave it as it is."""
    asked = traffic(requests=200)
    named = replace(asked, adapter=np.arange(len(asked)) % 4 - 1, adapters=("a", "b", "c"))
    found = plan(question(lora=LORA), named, CATALOG)
    plain = plan(question(), asked, CATALOG)
    assert found.status == plain.status == "on paper" and found.verdict.holds
    assert found.certificate.value >= plain.certificate.value
    (kind,) = {pool.type.lora for pool in found.fleet.running_pools}
    assert kind is not None and kind.lora.adapters == ("a", "b", "c")
    told = [line for line in fact_sentences_of(found.certificate.assumptions) if "LoRA adapters" in line]
    assert len(told) == len(found.fleet.running_pools) and "as the trace names them" in told[0]

    files = render(found)
    for name in ("plan.yaml", "traffic.jsonl", "requests.csv"):
        (tmp_path / name).write_text(files[name])
    fleet = read_fleet(tmp_path / "plan.yaml", CATALOG)
    for name in ("traffic.jsonl", "requests.csv"):
        again = simulate(fleet, read_trace(tmp_path / name))
        np.testing.assert_allclose(again.ttft_s, found.simulation.ttft_s, rtol=1e-9)
    command = "plan simulate --fleet plan.yaml --trace traffic.jsonl --window whole"
    assert f"# Check it:  {command} --slo" in files["plan.yaml"] and command in files["report.html"]
    other_seed = replace(found, certificate=replace(found.certificate, seed=3))
    assert simulate_command(other_seed) == f"{command} --seed 3"


def test_a_choice_of_policies_that_is_not_simulated_is_refused_before_the_search() -> None:
    """A search checks no query: orca wrote beyond its arrays ("malloc(): invalid next size")."""
    asked = question(lora=LORA, policies={"batching": ["vllm-v1", "orca"]})
    with pytest.raises(InputError, match="lora: needs batching vllm-v1, found 'orca'"):
        plan(asked, traffic(requests=20), CATALOG)


@pytest.mark.parametrize(
    ("changes", "left_out", "reason"),
    [
        (
            {
                "engine": {"speculative": {"method": "ngram", "tokens": [0, 2], "acceptance": 0.5}},
                "policies": {"admission": ["greedy", "reserve-static"]},
            },
            "4 mixed worker types and 4 decode worker types",
            "speculative: needs admission greedy, found 'reserve-static'",
        ),
        (
            {"policies": {"batching": "lightllm"}},
            "4 prefill worker types and 4 decode worker types",
            "policies.batching is 'lightllm', which keeps a request on one worker to its end",
        ),
    ],
)
def test_no_worker_type_is_searched_that_is_not_simulated_with_the_policies(
    changes: dict[str, object], left_out: str, reason: str
) -> None:
    """Types with drafts, or all pairs, are left out, and the certificate says why."""
    types = {"gpus": ["l40s-48g"], "max_num_batched_tokens": [2048]}
    asked = question(llm="meta-llama/Llama-3.1-8B", fleet=types, **changes)
    problem = Study(traffic(requests=20), CATALOG).problem_of(asked)
    problem = with_policies(problem, problem.task.policy_choices()[-1])
    for option in problem.options():
        roles: tuple[Role, ...] = ("mixed",) if option.role == "mixed" else ("prefill", "decode")
        check_policies(problem.oracle.fleet(tuple((replace(option, role=role), 1) for role in roles)))
    (item,) = problem.options_not_simulated()
    assert item.name == left_out
    assert reason_text(item.because).startswith(reason)


@pytest.mark.slow
def test_few_slots_for_many_adapters_take_more_workers() -> None:
    """One slot per worker and adapters drawn from 50: a worker serves one adapter at a time."""
    asked = traffic(requests=60)
    few = plan(question(lora={"max_loras": 1, "max_rank": 16, "adapters": 50}), asked, CATALOG)
    many = plan(question(lora={"max_loras": 50, "max_rank": 16, "adapters": 50}), asked, CATALOG)
    assert few.fleet.gpus > many.fleet.gpus
