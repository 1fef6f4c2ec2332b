"""Engines: what their host adds to a step, and who is in the step that was formed while another one ran."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from async_reference import AsyncReference
from simulations import compare, make_latency, make_trace, mixed, random_case

from planner.domain import Limit
from planner.errors import InputError
from planner.fleet import Fleet, Policies
from planner.models.engine import Engine, HostTime
from planner.simulator.replay import simulate

STEP = make_latency()  # every step takes a second
SYNC = Engine("vllm", "0.11.1", async_scheduling=False)
ASYNC = Engine("vllm", "0.15.1", async_scheduling=True)


def with_engine(fleet: Fleet, engine: Engine) -> Fleet:
    return replace(
        fleet, pools=tuple(replace(pool, type=replace(pool.type, engine=engine)) for pool in fleet.pools)
    )


def random_engine(seed: int, *, async_scheduling: bool) -> Engine:
    rng = np.random.default_rng([seed, 77])
    host, rest = (HostTime(rng.uniform(0, 0.2), rng.uniform(0, 0.01), 0.1) for _ in range(2))
    front_end_s = float(rng.uniform(0.001, 0.3))
    return Engine("vllm", "0", async_scheduling, host, rest, front_end_s)


def test_the_host_of_a_synchronous_engine_adds_to_every_step() -> None:
    engine = replace(SYNC, host=HostTime(0.25, 0.125))
    fleet = with_engine(mixed(STEP), engine)
    found = simulate(fleet, make_trace([0, 0], [4, 4], [3, 1]))
    assert found.ttft_s.tolist() == [1.5, 1.5]  # 1 + 0.25 + 2 x 0.125
    assert found.e2e_s.tolist() == [1.5 + 2 * 1.375, 1.5]


def test_log2_of_the_gpus_adds_too() -> None:
    engine = replace(SYNC, host=HostTime(log2_tp_s=0.5))
    fleet = with_engine(mixed(STEP), engine)
    fleet = replace(fleet, pools=(replace(fleet.pools[0], type=replace(fleet.pools[0].type, tp=4)),))
    assert simulate(fleet, make_trace([0], [4], [1])).ttft_s.tolist() == [2.0]


def test_an_asynchronous_step_hides_its_host_but_for_the_rest() -> None:
    latency = make_latency(d=0.25)  # steps of decodes alone: 1 s and 0.25 s per token of context
    engine = replace(ASYNC, host=HostTime(2.6), rest=HostTime(0.125))
    found = simulate(with_engine(mixed(latency), engine), make_trace([0], [4], [5]), record=True)
    # the prompt 1 s, decodes at 5, 6, 7, 8 tokens 2.25, 2.5, 2.75, 3 s
    steps = [2.6, 2.6, 2.6, 2.75, 3.0]
    assert found.ttft_s[0] == pytest.approx(2.725)
    assert found.e2e_s[0] == pytest.approx(sum(steps) + 5 * 0.125)
    assert found.tbt_max_s[0] == pytest.approx(3.125)


def test_steps_that_were_measured_have_their_host_already() -> None:
    engine = replace(SYNC, host=HostTime(0.25, 0.125), front_end_s=0.5)
    fleet = with_engine(mixed(make_latency(h=0.25)), engine)
    assert simulate(fleet, make_trace([0], [4], [1])).ttft_s.tolist() == [1.75]


def test_a_roofline_goes_without_the_rest() -> None:
    engine = replace(ASYNC, host=HostTime(1.5), rest=HostTime(0.5))
    fleet = with_engine(mixed(replace(STEP, basis="roofline of figures")), engine)
    assert simulate(fleet, make_trace([0], [4], [1])).ttft_s.tolist() == [1.5]


def test_who_comes_during_a_step_misses_the_one_that_is_prepared() -> None:
    fleet = with_engine(mixed(STEP), ASYNC)
    found = simulate(fleet, make_trace([0, 2.5], [4, 4], [20, 2]))
    # the third step ends at 3, the fourth was formed at 2: the fifth takes it in
    assert found.ttft_s.tolist() == [1.0, 2.5]
    assert found.queue_s.tolist() == [0.0, 1.5]
    synchronous = simulate(with_engine(mixed(STEP), SYNC), make_trace([0, 2.5], [4, 4], [20, 2]))
    assert synchronous.ttft_s.tolist() == [1.0, 1.5]


def test_who_comes_while_nothing_is_prepared_is_in_the_next_step() -> None:
    fleet = with_engine(mixed(STEP), ASYNC)
    found = simulate(fleet, make_trace([0, 0.5, 10], [4, 4, 4], [1, 1, 1]))
    assert found.ttft_s.tolist() == [1.0, 1.5, 1.0]


def test_a_seat_given_back_is_free_one_step_later() -> None:
    fleet = with_engine(mixed(STEP, seats=2), ASYNC)
    found = simulate(fleet, make_trace([0, 0, 0], [4, 4, 4], [2, 9, 1]))
    assert found.queue_s.tolist() == [
        0.0,
        0.0,
        3.0,
    ]  # the first one's seat is free at 2, the step at 2 formed


def test_latencies_count_from_the_arrival() -> None:
    fleet = with_engine(mixed(STEP), replace(ASYNC, front_end_s=0.5))
    found = simulate(fleet, make_trace([0, 3], [4, 4], [1, 2]), limits=(Limit("ttft", 0.5, 1.4),))
    assert found.arrival_s.tolist() == [0.0, 3.0]
    assert found.ttft_s.tolist() == [1.5, 1.5]
    assert found.e2e_s.tolist() == [1.5, 2.5]


@pytest.mark.parametrize("seed", range(60))
def test_synchronous_engines_agree_with_the_plain_simulator(seed: int) -> None:
    fleet, trace, limits, closed_loop = random_case(seed, dyadic=False)
    compare(with_engine(fleet, random_engine(seed, async_scheduling=False)), trace, limits, closed_loop)


@pytest.mark.parametrize("seed", range(150))
def test_asynchronous_engines_agree_with_the_plain_simulator(seed: int) -> None:
    fleet, trace, limits, closed_loop = random_case(seed, dyadic=False)
    roomy = tuple(
        replace(pool, type=replace(pool.type, kv_tokens=16_000)) if pool.role == "decode" else pool
        for pool in fleet.pools
    )  # hand-offs reserve blocks between steps: see planner/simulator/transfer.py
    routing = fleet.policies.routing
    if routing == "jsq" and any(pool.type.kv_tokens < 16_000 for pool in roomy):
        routing = "least-outstanding"  # the plain simulator knows sooner what will be computed once more
    fleet = replace(fleet, pools=roomy, policies=replace(fleet.policies, routing=routing))
    fleet = with_engine(fleet, random_engine(seed, async_scheduling=True))
    compare(fleet, trace, limits, closed_loop, AsyncReference)


@pytest.mark.parametrize("batching", ["sarathi", "vllm-v0", "orca", "lightllm"])
def test_other_batching_is_refused(batching: str) -> None:
    fleet = replace(with_engine(mixed(STEP), ASYNC), policies=Policies(batching=batching))
    with pytest.raises(InputError, match="engine: vllm forms its steps as vllm-v1 does"):
        simulate(fleet, make_trace([0], [4], [1]))


@pytest.mark.parametrize(
    ("key", "value"), [("step_s", -1e-3), ("sequence_s", float("inf")), ("log2_tp_s", float("nan"))]
)
def test_constants_below_zero_or_no_number_are_refused(key: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{key.removesuffix('_s')} is"):
        HostTime(**{key: value})
