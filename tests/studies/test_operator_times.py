"""The operators of simulated steps: by hand, one coefficient at a time, and on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from planner.api.simulating import simulate as api_simulate
from planner.cli import app
from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.models.speculation import Speculation
from planner.simulator import simulate
from planner.studies.operator_times import operator_times
from planner.traffic.trace import Trace

ROOT = Path(__file__).parents[2]
CATALOG = read_catalog()
LLM, GPU = CATALOG.llm("meta-llama/Llama-3.1-8B"), CATALOG.gpu("h100-80g")
RANDOM = StepLatency((1.0, 4096.0), (0.005, 0.08), 1e-8, 1e-5, 2e-7, 1e-4, 0.0, "random")
KIND = WorkerType(GPU, 1, RANDOM, 16_000, 2048, 64)


def at_once(inputs: list[int], outputs: list[int]) -> Trace:
    return Trace("at once", np.zeros(len(inputs)), np.array(inputs), np.array(outputs))


def operators_of(latency: StepLatency, trace: Trace) -> dict[str, tuple[float, float]]:
    """Seconds and mean input of each operator of one worker with these step times."""
    worker = replace(KIND, latency=latency)
    fleet = Fleet(LLM, (Pool("m", "mixed", worker, 1),))
    times = operator_times(fleet, simulate(fleet, trace, record_parts=True))
    return {time.operator: (time.seconds, time.mean_input) for time in times}


def test_operators_by_hand() -> None:
    """Prompts of 100 and 300 in one step, 11 tokens out of each: 10 steps of 2 decodes after it. Pairs are
    100 x 101 / 2 + 300 x 301 / 2 = 50,200. Prompts fill blocks of 16 up to 4 of 7 and of 19; a step reads
    101 + 301 tokens and then 2 more each time, 411 in the mean, and half a block of each is at most
    16 off. The dense layers take 1 ms a step and 10 us a token, 420 of them."""
    latency = StepLatency((0.0, 4096.0), (0.001, 0.04196), 1e-7, 1e-5, 1e-6, 1e-4, 0.0, "by hand")
    operators = operators_of(latency, at_once([100, 300], [11, 11]))
    assert operators["dense layers"][0] == pytest.approx(11 * 0.001 + 420 * 1e-5)
    assert operators["dense layers"][1] == pytest.approx(420 / 11)
    assert operators["prefill attention"] == pytest.approx((50_200e-7 + 2e-4, 50_200))
    seconds, kv_tokens = operators["decode attention"]
    assert kv_tokens == pytest.approx(411, abs=16)
    assert seconds == pytest.approx(20 * 1e-5 + 10 * kv_tokens * 1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_operators_add_up_to_the_steps(seed: int) -> None:
    """Without a host the operators take the whole of the steps, but for what blocks do not tell of contexts;
    with one, the rest is the host's.
    """
    rng = np.random.default_rng(seed)
    trace = at_once(rng.integers(10, 900, 40).tolist(), rng.integers(2, 80, 40).tolist())
    trace = replace(trace, arrival_s=np.sort(rng.uniform(0, 3, 40)))
    seconds = {name: time_s for name, (time_s, _) in operators_of(RANDOM, trace).items()}
    assert abs(seconds.pop("host and waits", 0.0)) < 0.01 * sum(seconds.values())
    slower = operators_of(replace(RANDOM, h_s=0.02), trace)
    assert slower["host and waits"][0] > slower["decode attention"][0]


def test_pools_run_their_own_operators() -> None:
    """Prefill workers run no decode attention, decode workers no prefill attention."""
    pools = (Pool("p", "prefill", KIND, 1), Pool("d", "decode", KIND, 1))
    fleet = Fleet(LLM, pools, Policies(), Network(1e12))
    simulation = simulate(fleet, at_once([300] * 20, [30] * 20), record_parts=True)
    of_pools = {(time.pool, time.operator) for time in operator_times(fleet, simulation)}
    assert ("p", "prefill attention") in of_pools and ("d", "decode attention") in of_pools
    assert ("p", "decode attention") not in of_pools and ("d", "prefill attention") not in of_pools


def test_bad_questions_are_one_line() -> None:
    drafting = replace(KIND, speculation=Speculation("ngram", (0.5,)))
    fleet = Fleet(LLM, (Pool("m", "mixed", drafting, 1),))
    with pytest.raises(InputError, match="pool m has drafts"):
        operator_times(fleet, simulate(fleet, at_once([10], [4]), record=True))
    for options in (["--seeds", "2"], ["--autoscale", "hpa"]):
        result = CliRunner().invoke(app, ["simulate", "--fleet", "nowhere.yaml", "--operators", *options])
        assert isinstance(result.exception, InputError) and f"drop {options[0]}" in str(result.exception)


def test_python_gives_a_frame_of_operators() -> None:
    fleet, trace = ROOT / "examples/fleet.yaml", at_once([200] * 9, [20] * 9)
    frame = api_simulate(str(fleet), trace).operators()
    assert list(frame.columns) == ["pool", "operator", "seconds", "share_frac", "mean_input", "unit"]
    assert frame.groupby("pool").share_frac.sum().to_numpy() == pytest.approx(1.0)
