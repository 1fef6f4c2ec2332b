"""What a plan writes: bytes that repeat, a fleet that reads back, a CSV that replays."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from plans import CATALOG, a_plan, a_simulation, a_trace, mixed, pairs

from planner.documents.certificate import Throughput
from planner.documents.engine_file import parse_engine
from planner.documents.fleet_file import max_model_len_of, read_fleet
from planner.documents.slo import parse_slo
from planner.files.checked_files import read_yaml, write_files
from planner.fleet import Fleet, Network
from planner.reports.output import plan_yaml, render, requests_csv, simulation_summary, to_json
from planner.simulator.replay import simulate
from planner.traffic.trace_reading import read_trace


def test_equal_plans_give_equal_bytes() -> None:
    assert render(a_plan()) == render(a_plan())


def test_the_directory_holds_plan_certificate_requests_report_and_manifests() -> None:
    files = render(a_plan())
    assert {
        "plan.yaml",
        "certificate.json",
        "requests.csv",
        "report.html",
        "manifests/README.md",
        "manifests/kubernetes.yaml",
    } <= set(files)


@pytest.mark.parametrize(
    "fleet",
    [
        pairs(),
        mixed(),
        mixed("mi300x-192g", 2, 1),
        replace(pairs(), network=Network(12.5e9 / 3, 0.0017, "serialised")),
    ],
    ids=["pairs", "mixed", "rocm", "odd network"],
)
def test_plan_yaml_reads_back_as_the_same_fleet(tmp_path: Path, fleet: Fleet) -> None:
    """Step times, prices and network to the last bit, so that a simulation of it repeats."""
    write_files(tmp_path, {"plan.yaml": plan_yaml(a_plan(fleet))})
    assert read_fleet(tmp_path / "plan.yaml", CATALOG) == fleet
    file = tmp_path / "plan.yaml"
    assert max_model_len_of(read_yaml(file), file) == 1300


def test_expected_power_stands_beside_the_provisioned() -> None:
    """In plan.yaml, certificate.json and --json alike, with its basis; null without recorded steps."""
    plan = a_plan()
    files = render(plan)
    for power in (
        yaml.safe_load(files["plan.yaml"])["power"],
        json.loads(files["certificate.json"])["power"],
        to_json(plan)["power"],
    ):
        assert power["provisioned_w"] == plan.fleet.power_w
        assert 0 < power["expected_idle_w"] < power["expected_w"] < power["provisioned_w"]
        assert power["thousand_output_tokens_j"] > power["request_j"] > 0
        assert "a model fitted to measurements on A100" in power["basis"]
    blind = replace(plan, simulation=replace(plan.simulation, runs=plan.simulation.runs[:0]))
    assert to_json(blind)["power"] is None
    assert yaml.safe_load(plan_yaml(blind))["power"] is None


def test_a_price_of_the_users_own_survives(tmp_path: Path) -> None:
    fleet = mixed()
    pool = fleet.pools[0]
    cheap = replace(pool.type, gpu=replace(pool.type.gpu, price_usd_per_h=1.2345678901234567))
    fleet = replace(fleet, pools=(replace(pool, type=cheap),))
    write_files(tmp_path, {"plan.yaml": plan_yaml(a_plan(fleet))})
    assert read_fleet(tmp_path / "plan.yaml", CATALOG).price_usd_per_h == fleet.price_usd_per_h


@pytest.mark.parametrize("version", ["0.11.1", "0.33"])
def test_the_engine_in_plan_yaml_reads_back(tmp_path: Path, version: str) -> None:
    engine = parse_engine({"version": version}, CATALOG.engines.values(), "here")
    fleet = pairs()
    fleet = replace(fleet, pools=tuple(replace(p, type=replace(p.type, engine=engine)) for p in fleet.pools))
    write_files(tmp_path, {"plan.yaml": plan_yaml(a_plan(fleet))})
    assert read_fleet(tmp_path / "plan.yaml", CATALOG) == fleet


def test_the_slo_in_plan_yaml_reads_back() -> None:
    plan = a_plan()
    assert parse_slo(yaml.safe_load(plan_yaml(plan))["slo"], where="plan.yaml: slo") == plan.slo


def test_requests_csv_replays_to_the_same_bytes(tmp_path: Path) -> None:
    """Simulate, write requests.csv and plan.yaml, read both, simulate again: the same requests.csv."""
    fleet, trace = pairs(), a_trace(60)
    trace = replace(trace, arrival_s=np.cumsum(np.random.default_rng(3).exponential(0.07, 60)))
    first = requests_csv(simulate(fleet, trace))
    write_files(tmp_path, {"requests.csv": first, "plan.yaml": plan_yaml(a_plan(fleet))})
    again = simulate(read_fleet(tmp_path / "plan.yaml", CATALOG), read_trace(tmp_path / "requests.csv"))
    assert requests_csv(again) == first


def test_requests_csv_names_workers_and_leaves_out_what_never_happened() -> None:
    """Request 4 of 200 waits 1 s, has 5 tokens in 50 ms steps; the last one was rejected."""
    rows = list(csv.DictReader(io.StringIO(requests_csv(a_plan().simulation))))
    assert len(rows) == 200
    assert rows[4] == {
        "request_id": "4",
        "arrival_s": repr(4 / 3.0),
        "input_tokens": "128",
        "output_tokens": "5",
        "cached_tokens": "0",
        "prefill_worker": "pre-0",
        "decode_worker": "dec-1",
        "queue_s": "1",
        "ttft_s": "1.25",
        "tpot_s": "0.05",
        "tbt_max_s": "0.05",
        "e2e_s": "1.45",
        "preemptions": "0",
        "status": "finished",
    }
    assert rows[0]["tpot_s"] == rows[0]["tbt_max_s"] == ""  # one token has no gap
    last = rows[-1]
    assert last["status"] == "rejected"
    assert {last[key] for key in ("prefill_worker", "decode_worker", "queue_s", "ttft_s", "e2e_s")} == {""}


def test_worker_names_with_commas_are_quoted() -> None:
    simulation = replace(a_plan().simulation, worker_names=tuple(f'a,"{k}"' for k in range(7)))
    row = next(csv.DictReader(io.StringIO(requests_csv(simulation))))
    assert row["prefill_worker"] == 'a,"0"'


def test_the_summary_holds_the_percentiles_by_nearest_rank() -> None:
    """Of 200 requests 39 waited 1 s, 160 did not, one was rejected: p50 0.25 s, p90 and p99 1.25 s.

    Mean of the 199 that got a token: 0.25 + 39 / 199. All gaps last 50 ms.
    """
    plan = a_plan()
    summary = simulation_summary(plan.simulation, plan.verdict)
    assert summary["ttft_s"] == {
        "mean": pytest.approx(0.25 + 39 / 199),
        "p50": 0.25,
        "p90": 1.25,
        "p99": 1.25,
    }
    assert summary["tbt_s"]["mean"] == summary["tbt_s"]["p99"] == 0.05
    assert (summary["finished"], summary["rejected"]) == (199, 1)
    assert summary["slo"]["holds"] is True
    assert summary["workers"][0]["busy_frac"] == pytest.approx(10 / (199 / 3 + 3))


def test_a_percentile_that_never_came_true_is_null() -> None:
    """Half of two requests were rejected: p90 of TTFT is infinite, which JSON writes as null."""
    summary = simulation_summary(a_simulation(pairs(), a_trace(2)))
    assert summary["ttft_s"]["p50"] == 0.25
    assert summary["ttft_s"]["p90"] is None


def test_json_holds_only_what_json_can() -> None:
    files = render(a_plan())

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    certificate = json.loads(files["certificate.json"], parse_constant=refuse)
    assert certificate["certificate"]["gap_frac"] == pytest.approx(0.2)
    assert certificate["alternatives"][2]["objective"] is None
    answer = json.loads(json.dumps(to_json(a_plan()), allow_nan=False))
    assert answer["gpus"] == 20
    assert answer["workers"][0]["name"] == "pre"


def test_plan_yaml_of_the_most_traffic_has_rates_as_its_objective() -> None:
    """The certificate is about the cost of the fleet at that rate; 12 requests/s were kept, 14 on paper."""
    plan = replace(a_plan(), throughput=Throughput(12.0, 12.5, 14.0, 14.5))
    assert yaml.safe_load(plan_yaml(plan))["objective"] == {
        "name": "throughput",
        "unit": "requests/s",
        "value": 12.0,
        "on_paper": 14.0,
        "bound": None,
    }
    assert yaml.safe_load(plan_yaml(a_plan()))["objective"]["name"] == "cost"
