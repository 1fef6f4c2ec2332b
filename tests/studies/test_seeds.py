"""Many seeds of one simulation: each run is what its seed gives alone, and the interval is Student's."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import mixed
from typer.testing import CliRunner

from planner.cli import app
from planner.domain import Limit, Slo
from planner.errors import InputError
from planner.fleet import Policies
from planner.parallel.executors import Executor
from planner.reports.output import requests_csv
from planner.reports.simulated_run import simulate_recorded
from planner.solvers.repeats import confidence_interval
from planner.studies.seeds import SAME_FOR_ALL, SeedsQuestion, over_seeds, seeds_document
from planner.traffic.scaling import RateRequest, rescale_trace
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

FLEET = "llm: meta-llama/Llama-3.1-70B\nworkers:\n  - {name: mixed, gpu: h100-80g, tp: 4, count: 1}\n"
SLO = "llm: meta-llama/Llama-3.1-70B\nslo: {ttft: {p90: 300 ms}, tbt: {p99: 200 ms}}\ntraffic: {rate: 5}\n"


def bursts(requests: int = 80) -> Trace:
    """Four at a time every two seconds, of many lengths."""
    i = np.arange(requests)
    return Trace("bursts.csv", i // 4 * 2.0 + i % 4 / 8, 200 + 379 * (i % 7), 5 + i % 23)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    trace = bursts()
    rows = zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True)
    lines = ["arrival_s,input_tokens,output_tokens", *(f"{a},{i},{o}" for a, i, o in rows)]
    (tmp_path / "trace.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "slo.yaml").write_text(SLO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def simulated(*more: str) -> Any:
    return CliRunner().invoke(app, ["simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", *more])


def test_each_run_is_what_its_seed_gives_alone() -> None:
    """Superposing to 5 requests/s shifts copies by the seed."""
    slo = Slo((Limit("ttft", 0.9, 0.3),))
    question = SeedsQuestion(mixed(count=1), bursts(), RateRequest(5.0), slo)
    runs = over_seeds(question, (3, 9))
    for run, seed in zip(runs, (3, 9), strict=True):
        requests = rescale_trace(bursts(), 5.0, rng=np.random.default_rng(seed))
        alone = simulate_recorded(mixed(count=1), requests, slo, seed=seed)
        assert (run.seed, run.summary) == (seed, alone.summary())
        assert run.requests_csv == (requests_csv(alone.simulation) if seed == 3 else "")
    assert runs[0].summary["ttft_s"] != runs[1].summary["ttft_s"]


def test_the_seed_spreads_the_stamps_of_a_coarse_clock(tmp_path: Path) -> None:
    """Ten requests to every 3 s stamp, as in Mooncake's trace: spread anew by each seed, read once."""
    path = tmp_path / "coarse.jsonl"
    rows = [
        {"timestamp": 3000 * (i // 10), "input_length": 900, "output_length": 9, "hash_ids": [i]}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    question = SeedsQuestion(mixed(count=1), read_trace(path, seed=None), RateRequest())
    runs = over_seeds(question, (0, 1))
    alone = [simulate_recorded(mixed(count=1), read_trace(path, seed=seed)).summary() for seed in (0, 1)]
    assert [run.summary for run in runs] == alone
    assert alone[0]["ttft_s"] != alone[1]["ttft_s"]
    assert seeds_document(runs)["notes"] == []


def test_the_seed_draws_for_the_policies() -> None:
    """Two of four workers are sampled for each request; the trace is the same for every seed."""
    fleet = replace(mixed(count=4), policies=Policies(routing="power-of-two", seed=5))
    runs = over_seeds(SeedsQuestion(fleet, bursts(), RateRequest()), (0, 1))
    assert runs[0].summary["ttft_s"] != runs[1].summary["ttft_s"]
    assert runs[0].summary == simulate_recorded(fleet, bursts()).summary()  # seed 0 keeps the fleet file's


def test_an_interval_by_hand() -> None:
    """1, 2, 3: mean 2, deviation 1, t(0.975; 2) = 4.302653, so +- 4.302653 / sqrt(3) = 2.484138."""
    found = confidence_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.least, found.most) == (2.0, 1.0, 3.0)
    assert found.half_width == pytest.approx(2.484138, abs=1e-6)


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    """Five of a normal distribution, 2000 times: 95 % +- 3 sqrt(0.95 0.05 / 2000) = 1.5 % hold the mean."""
    rng = np.random.default_rng(0)
    found = [confidence_interval(rng.normal(7.0, 2.0, 5).tolist()) for _ in range(2000)]
    covered = np.mean([abs(one.mean - 7.0) <= one.half_width for one in found])
    assert covered == pytest.approx(0.95, abs=0.015)


def test_a_figure_that_one_seed_never_reaches_has_no_mean() -> None:
    found = confidence_interval([1.0, None, 3.0])
    assert np.isnan([found.mean, found.half_width, found.least, found.most]).all()


def test_a_run_without_chance_says_so() -> None:
    answer = seeds_document(over_seeds(SeedsQuestion(mixed(count=1), bursts(), RateRequest()), (0, 1, 2)))
    assert answer["notes"] == [SAME_FOR_ALL]
    p90 = answer["ttft_s"]["p90"]
    assert p90["low"] == p90["mean"] == p90["high"] == p90["least"] == p90["most"]


def test_seeds_given_twice_are_refused() -> None:
    with pytest.raises(InputError, match="expected different ones"):
        over_seeds(SeedsQuestion(mixed(), bursts(), RateRequest()), (1, 1))


@pytest.mark.slow
def test_processes_and_a_cluster_give_what_this_process_gives() -> None:
    distributed = pytest.importorskip("distributed", reason="dask is not installed (extra `cluster`)")
    question = SeedsQuestion(mixed(count=1), bursts(), RateRequest(5.0), Slo((Limit("tbt", 0.99, 0.2),)))
    expected = seeds_document(over_seeds(question, range(4)))
    with distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=":0") as cluster:
        for executor in (Executor("processes"), Executor("dask", cluster.scheduler_address)):
            assert seeds_document(over_seeds(question, range(4), executor=executor)) == expected


def test_the_command_counts_the_seeds_that_keep_the_slo(here: Path) -> None:
    """Recounted from the runs it prints; the limit lies where some seeds keep it and some do not."""
    outcome = simulated("--slo", "slo.yaml", "--seeds", "6", "--executor", "serial", "--json")
    answer = json.loads(outcome.stdout)
    assert answer["seeds"] == list(range(6))
    holds = [run["slo"]["holds"] for run in answer["runs"]]
    assert 0 < answer["slo"]["kept_by"] == sum(holds) < 6
    p90_s = [run["ttft_s"]["p90"] for run in answer["runs"]]
    assert answer["ttft_s"]["p90"]["mean"] == pytest.approx(np.mean(p90_s))
    assert answer["slo"]["lines"][0]["kept_by"] == sum(value <= 0.3 for value in p90_s)
    said = simulated("--slo", "slo.yaml", "--seeds", "6", "--executor", "serial")
    assert f"SLO: kept by {sum(holds)} of 6 seeds" in said.stdout
    assert "±" in said.stdout


def test_out_holds_the_requests_of_the_first_seed(here: Path) -> None:
    line = ("--rate", "5", "--seed", "2")
    assert simulated(*line, "--seeds", "2", "--executor", "serial", "-o", "two.csv").exit_code == 0
    assert simulated(*line, "-o", "one.csv").exit_code == 0
    assert (here / "two.csv").read_bytes() == (here / "one.csv").read_bytes()
    assert len(list(csv.reader(io.StringIO((here / "one.csv").read_text())))) == 1 + round(5 * 38.375)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--executor", "processes"), "one seed is simulated here; ask for several with --seeds"),
        (("--seeds", "2", "--executor", "ray"), "--executor ray: needs the cluster's --address"),
        (("--seeds", "2", "--address", "host:1"), "--address host:1: is for ray and dask"),
        (("--seeds", "2", "--executor", "slurm"), "processes[:N], ray, dask, found 'slurm'"),
    ],
)
def test_executors_that_make_no_sense_are_refused(here: Path, more: tuple[str, ...], says: str) -> None:
    error = simulated(*more).exception
    assert isinstance(error, InputError) and says in str(error)
