"""Engines: what their host adds to a step, and who is in the step that was formed while another one ran."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from async_reference import AsyncReference
from shares import some
from simulations import LLM, beside, compare, make_latency, make_pool, make_trace, mixed, random_case

from planner.domain import Limit
from planner.errors import InputError
from planner.fleet import Fleet, Network, Policies
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
    ceiling = float(rng.choice([math.inf, 20.0]))
    return Engine("vllm", "0", async_scheduling, host, rest, front_end_s, tokens_per_s=ceiling)


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


def test_decodes_beside_prefills_read_their_kv_longer() -> None:
    """Steps of 1 s and 0.25 s per token of context, 0.5 s more beside a prefill. The second prompt comes
    during the first step; in the second one the first request decodes at 5 tokens, then alone at 6.
    """
    latency = make_latency(d=0.25, m=0.5)
    found = simulate(mixed(latency), make_trace([0, 0.5], [4, 4], [3, 1]))
    beside, alone = 1 + 0.75 * 5, 1 + 0.25 * 6
    assert found.ttft_s.tolist() == [1.0, 0.5 + beside]
    assert found.e2e_s.tolist() == [1.0 + beside + alone, 0.5 + beside]


@pytest.mark.parametrize("engine", [SYNC, ASYNC])
def test_no_step_is_shorter_than_its_api_server_takes_for_the_tokens(engine: Engine) -> None:
    """Two tokens a second: steps of two take a second each; of four two seconds."""
    fleet = with_engine(mixed(STEP), replace(engine, tokens_per_s=2.0))
    assert simulate(fleet, make_trace([0] * 2, [4] * 2, [3] * 2)).e2e_s.tolist() == [3.0] * 2
    assert simulate(fleet, make_trace([0] * 4, [4] * 4, [3] * 4)).e2e_s.tolist() == [6.0] * 4


def test_steps_that_were_measured_have_their_host_already() -> None:
    engine = replace(SYNC, host=HostTime(0.25, 0.125), front_end_s=0.5)
    fleet = with_engine(mixed(make_latency(h=0.25)), engine)
    assert simulate(fleet, make_trace([0], [4], [1])).ttft_s.tolist() == [1.75]


def test_a_roofline_goes_without_the_rest() -> None:
    engine = replace(ASYNC, host=HostTime(1.5), rest=HostTime(0.5))
    fleet = with_engine(mixed(replace(STEP, kind="roofline")), engine)
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


@pytest.mark.parametrize(("engine", "steps"), [(None, 1), (SYNC, 2), (ASYNC, 4)])
def test_a_busy_engine_hears_of_kv_late(engine: Engine | None, steps: int) -> None:
    """Decodes of a second each, the first since 2.25 s. The KV of the second comes at 4.75, in the third: who
    takes what is there has it in the next one. A synchronous engine's worker sees it as that begins and says
    so at its end; an asynchronous one gets the fourth with the third, and says so when the fifth ends.
    """
    pools = (make_pool(STEP, role="prefill", name="p"), make_pool(STEP, role="decode", name="d"))
    fleet = Fleet(LLM, pools, network=Network(256.0, 0.25, "serialised"))
    if engine is not None:
        fleet = with_engine(fleet, engine)
    found = simulate(fleet, make_trace([0, 2.5], [4, 4], [20, 2]))
    assert found.ttft_s.tolist() == [1.0, 1.0]
    start_s, arrived_s = 1.0 + 1.25, 3.5 + 1.25
    first = np.ceil(arrived_s - start_s) + start_s  # of the steps that begin later
    assert found.arrival_s[1] + found.e2e_s[1] == first + steps - 1 + 1


def test_an_idle_engine_hears_of_kv_at_once() -> None:
    pools = (make_pool(STEP, role="prefill", name="p"), make_pool(STEP, role="decode", name="d"))
    fleet = with_engine(Fleet(LLM, pools, network=Network(256.0, 0.25, "serialised")), ASYNC)
    assert simulate(fleet, make_trace([0], [4], [2])).e2e_s.tolist() == [1.0 + 1.25 + 1.0]


def test_chunks_are_limited_unless_a_request_is_alone() -> None:
    """Prompts of 100 tokens, 40 of one at a time: both are computed in the same three steps."""
    fleet = replace(mixed(STEP), policies=Policies(long_prefill_token_threshold=40))
    assert simulate(fleet, make_trace([0], [100], [1])).ttft_s.tolist() == [1.0]
    assert simulate(fleet, make_trace([0, 0], [100, 100], [1, 1])).ttft_s.tolist() == [3.0, 3.0]


def test_a_decode_admitted_after_a_long_prompt_waits_for_its_tokens() -> None:
    """A budget of 40: the long prompt takes 32 in the first step, the short one the 8 left. From then on the
    long one, admitted before, takes 32 and leaves 8; where it may take 40, it leaves nothing.
    """
    for threshold, e2e_s in ((32, [4.0, 3.0]), (40, [3.0, 5.0])):
        fleet = replace(mixed(STEP, budget=40), policies=Policies(long_prefill_token_threshold=threshold))
        trace = make_trace([0, 0], [100, 8], [1, 3])
        assert simulate(fleet, trace).e2e_s.tolist() == e2e_s


def test_a_limit_on_chunks_is_vllms() -> None:
    fleet = replace(mixed(STEP), policies=Policies(batching="sarathi", long_prefill_token_threshold=40))
    with pytest.raises(InputError, match="long_prefill_token_threshold is vLLM's"):
        simulate(fleet, make_trace([0], [4], [1]))


def test_latencies_count_from_the_arrival() -> None:
    fleet = with_engine(mixed(STEP), replace(ASYNC, front_end_s=0.5))
    found = simulate(fleet, make_trace([0, 3], [4, 4], [1, 2]), limits=(Limit("ttft", 0.5, 1.4),))
    assert found.arrival_s.tolist() == [0.0, 3.0]
    assert found.ttft_s.tolist() == [1.5, 1.5]
    assert found.e2e_s.tolist() == [1.5, 2.5]


@pytest.mark.parametrize("seed", some(range(60), 20))
def test_synchronous_engines_agree_with_the_plain_simulator(seed: int) -> None:
    fleet, trace, limits, closed_loop = random_case(seed, dyadic=False)
    compare(with_engine(fleet, random_engine(seed, async_scheduling=False)), trace, limits, closed_loop)


@pytest.mark.parametrize("seed", some(range(150), 50))
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
    if seed % 3 == 0 and routing != "jsq":
        compare(beside(fleet, seed), trace, limits, closed_loop, AsyncReference)


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
