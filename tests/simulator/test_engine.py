"""Engines: what their host adds to a step, and who is in the step that was formed while another one ran."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import compare_engine_case, random_engine, with_engine
from shares import some
from simulations import LLM, compare, make_latency, make_pool, make_trace, mixed, random_case

from planner.domain import Limit
from planner.errors import InputError
from planner.fleet import Disturbance, Fleet, Network, Policies
from planner.models.engine import Engine, HostTime
from planner.simulator import kernel, layout, replay
from planner.simulator.layout import State
from planner.simulator.replay import simulate

STEP = make_latency()  # every step takes a second
SYNC = Engine("vllm", "0.11.1", async_scheduling=False)
ASYNC = Engine("vllm", "0.15.1", async_scheduling=True)


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


def test_an_api_server_makes_tokens_of_one_prompt_after_the_other() -> None:
    """A second for each prompt of 4 tokens: they queue at 1, 2 and 3 s, for steps of a second. Two workers
    have an API server each.
    """
    engine = replace(SYNC, prompt_token_s=0.25)
    trace = make_trace([0] * 3, [4] * 3, [1] * 3)
    assert simulate(with_engine(mixed(STEP), engine), trace).ttft_s.tolist() == [2.0, 3.0, 4.0]
    pool = replace(mixed(STEP).pools[0], count=2)
    two = with_engine(replace(mixed(STEP), pools=(pool,)), engine)
    assert sorted(simulate(two, trace).ttft_s.tolist()) == [2.0, 2.0, 3.0]


def test_a_worker_that_goes_down_loses_the_prompts_its_api_server_has() -> None:
    """The only worker is down from 0.5 to 3 s: the prompt is read from 3 to 4 s and computed till 5."""
    fleet = with_engine(mixed(STEP), replace(SYNC, prompt_token_s=0.25))
    fleet = replace(fleet, disturbances=(Disturbance(0.5, "down", 0), Disturbance(3.0, "up", 0)))
    assert simulate(fleet, make_trace([0], [4], [1])).ttft_s.tolist() == [5.0]


def test_an_api_server_that_starts_anew_has_nothing_to_read() -> None:
    """It reads 40 tokens until 10 s, but is down from 1 to 2 s: 4 tokens at 3 s are read at 4, done at 5."""
    fleet = with_engine(mixed(STEP), replace(SYNC, prompt_token_s=0.25))
    fleet = replace(fleet, disturbances=(Disturbance(1.0, "down", 0), Disturbance(2.0, "up", 0)))
    assert simulate(fleet, make_trace([0, 3], [40, 4], [1, 1])).ttft_s.tolist() == [21.0, 2.0]


@pytest.mark.parametrize("engine", [SYNC, ASYNC])
@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_are_read_first_are_served_as_if_they_came_when_read(engine: Engine, seed: int) -> None:
    """On one worker, where the order of arrival is that of the queue."""
    rng = np.random.default_rng(seed)
    arrivals_s, lengths = np.sort(rng.uniform(0, 20, 40)), rng.integers(1, 60, 40)
    read_s, read = np.zeros(40), 0.0
    for k in range(40):
        read = max(read, arrivals_s[k]) + 0.01 * lengths[k]
        read_s[k] = read
    fleet, outputs = mixed(make_latency(d=0.001)), rng.integers(1, 9, 40).tolist()
    found = simulate(
        with_engine(fleet, replace(engine, prompt_token_s=0.01)),
        make_trace(arrivals_s.tolist(), lengths.tolist(), outputs),
    )
    later = simulate(with_engine(fleet, engine), make_trace(read_s.tolist(), lengths.tolist(), outputs))
    assert found.arrival_s + found.e2e_s == pytest.approx(later.arrival_s + later.e2e_s, abs=1e-9)
    assert found.arrival_s + found.ttft_s == pytest.approx(later.arrival_s + later.ttft_s, abs=1e-9)


def apart(*, prefill: int, decode: int, hand_off_s: float, routing: str = "jsq") -> Fleet:
    """Steps of a second, KV that crosses at once, 0.2 s to make a token of text."""
    pools = (make_pool(STEP, role="prefill", count=prefill), make_pool(STEP, role="decode", count=decode))
    fleet = Fleet(LLM, pools, Policies(routing=routing), network=Network(1e15))
    return with_engine(fleet, replace(SYNC, prompt_token_s=0.2, hand_off_s=hand_off_s))


def test_a_decode_worker_makes_tokens_of_the_prompt_once_more() -> None:
    """Both prompts are read at 0.8, done at 1.8 and handed on at 2.3 s; the decode worker has read them at
    3.1 and 3.9, so they decode till 4.1 and 5.1. Without a hand-off they decode from 1.8 and 2.8 s on.
    """
    trace = make_trace([0, 0], [4, 4], [2, 2])
    found = simulate(apart(prefill=2, decode=1, hand_off_s=0.5), trace)
    assert found.ttft_s == pytest.approx([1.8, 1.8])
    assert found.e2e_s == pytest.approx([4.1, 5.1])
    assert simulate(apart(prefill=2, decode=1, hand_off_s=0.0), trace).e2e_s == pytest.approx([2.8, 3.8])


@pytest.mark.parametrize(("output", "gaps_s"), [(1, []), (3, [1.0, 1.0])])
def test_the_client_sees_the_first_token_of_the_decode_worker(output: int, gaps_s: list[float]) -> None:
    """Computed till 1.8 s, read again till 3.1: the decode worker's first step ends at 4.1 and makes the
    first token, one more step than if the prefill worker's were seen. A limit on gaps sees no hand-off.
    """
    fleet = apart(prefill=1, decode=1, hand_off_s=0.5)
    fleet = fleet.with_engines(lambda engine: replace(engine, first_token="decode"))
    found = simulate(fleet, make_trace([0], [4], [output]), record=True)
    assert found.ttft_s == pytest.approx([4.1])
    assert found.e2e_s == pytest.approx([4.1 + sum(gaps_s)])
    if gaps_s:
        assert found.tbt_max_s == pytest.approx([max(gaps_s)])


def test_two_workers_shake_hands_in_the_warm_up() -> None:
    """The first hand-off asks for KV at 3.1 s, knows the prefill worker at 5.1 and ends at 6.1; one that is
    read at 5.3 is no later. Without a warm-up, as in a trace of one moment, they know each other.
    """
    fleet = apart(prefill=1, decode=1, hand_off_s=0.5)
    fleet = fleet.with_engines(lambda engine: replace(engine, first_hand_off_s=2.0))
    trace = make_trace([0, 2.2, 200], [4, 4, 4], [2, 2, 2])
    assert simulate(fleet, trace).e2e_s == pytest.approx([6.1, 3.1 + 1.8, 4.1])
    assert simulate(fleet, make_trace([0], [4], [2])).e2e_s == pytest.approx([4.1])


@pytest.mark.parametrize(("down", "e2e_s"), [(0, 7.2), (1, 6.4)])
def test_what_goes_down_while_a_hand_off_is_read_is_seen_when_it_was(down: int, e2e_s: float) -> None:
    """The hand-off is read from 2.3 to 3.1 s. Without its KV the other prefill worker reads the prompt till
    3.9 and computes it till 4.9, with the second token, and the decode worker has it at 6.2; a decode worker
    that is down is replaced by the other one, from 3.1 on.
    """
    fleet = apart(prefill=2, decode=2, hand_off_s=0.5)
    first = simulate(fleet, make_trace([0], [4], [3]))
    worker = int((first.prefill_worker, first.decode_worker)[down][0])
    fleet = replace(fleet, disturbances=(Disturbance(2.5, "down", worker),))
    assert simulate(fleet, make_trace([0], [4], [3])).e2e_s == pytest.approx([e2e_s])
    # Without the prefill worker's tokens all three are the decode worker's.
    fleet = fleet.with_engines(lambda engine: replace(engine, first_token="decode"))
    assert simulate(fleet, make_trace([0], [4], [3])).e2e_s == pytest.approx([e2e_s + (2, 1)[down]])


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


SGLANG = replace(ASYNC, name="sglang", version="0.5.9")


@pytest.mark.parametrize(
    ("engine", "pull_s", "steps"), [(None, 3.5, 1), (SYNC, 4.25, 2), (ASYNC, 4.25, 4), (SGLANG, 3.5, 4)]
)
def test_a_busy_engine_pulls_and_hears_of_kv_late(engine: Engine | None, pull_s: float, steps: int) -> None:
    """Decodes of a second each, the first since 2.25 s. The second is handed over at 3.5 s, in the second
    step. vLLM pulls its KV with the third, SGLang is sent it; it crosses in 1.25 s. Who takes what is there
    has it in the next step. A synchronous engine's worker sees it as that begins and says so at its end; an
    asynchronous one gets the next step as one begins, and says so when that ends.
    """
    pools = (make_pool(STEP, role="prefill", name="p"), make_pool(STEP, role="decode", name="d"))
    fleet = Fleet(LLM, pools, network=Network(256.0, 0.25, "serialised"))
    if engine is not None:
        fleet = with_engine(fleet, engine)
    found = simulate(fleet, make_trace([0, 2.5], [4, 4], [20, 2]))
    assert found.ttft_s.tolist() == [1.0, 1.0]
    start_s, arrived_s = 1.0 + 1.25, pull_s + 1.25
    first = np.ceil(arrived_s - start_s) + start_s  # of the steps that begin later
    assert found.arrival_s[1] + found.e2e_s[1] == first + steps - 1 + 1


@pytest.mark.parametrize(("engine", "pull_s"), [(None, 3.5), (SYNC, 6.25), (ASYNC, 6.25), (SGLANG, 3.5)])
def test_an_engine_without_a_free_seat_pulls_no_kv(engine: Engine | None, pull_s: float) -> None:
    """One seat, taken by decodes of a second each from 2.25 to 6.25 s. The second request, handed over at
    3.5 s, decodes 1.25 s after its pull, but not before 6.25 s.
    """
    pools = (make_pool(STEP, role="prefill", name="p"), make_pool(STEP, role="decode", name="d", seats=1))
    fleet = Fleet(LLM, pools, network=Network(256.0, 0.25, "serialised"))
    if engine is not None:
        fleet = with_engine(fleet, engine)
    found = simulate(fleet, make_trace([0, 2.5], [4, 4], [5, 2]))
    assert found.e2e_s.tolist() == [6.25, max(6.25, pull_s + 1.25) + 1.0 - 2.5]


@pytest.mark.parametrize("seed", [78, 91])
def test_an_asynchronous_step_without_a_token_left_pulls_no_kv(seed: int) -> None:
    """Prompts that are computed anew after a preemption take the whole budget of a decode worker's step."""
    compare_engine_case(seed)


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


@pytest.mark.parametrize(
    ("poll_steps", "outputs", "ttft_s"), [(1, 9, 2.5), (3, 9, 3.5), (9, 9, 8.5), (1500, 2, 1.5)]
)
def test_an_engine_that_polls_hears_of_requests_every_few_steps(
    poll_steps: int, outputs: int, ttft_s: float
) -> None:
    """Steps of a second: the prompt till 1 s, then decodes. A step is formed as the one before begins: the
    engine polls for that of 1 s, and with 3 for those of 4 and 7 s. The second request comes at 1.5 s. With 9
    it is heard of as the first ends at 9 s, with 1500 as the engine idles at 2 s.
    """
    fleet = with_engine(mixed(STEP), replace(ASYNC, poll_steps=poll_steps))
    found = simulate(fleet, make_trace([0, 1.5], [4, 4], [outputs, 1]))
    assert found.ttft_s.tolist() == [1.0, ttft_s]


@pytest.mark.parametrize(("poll_steps", "ttft_s"), [(1500, 2.5), (2500, 6.5)])
def test_a_step_with_prompts_weighs_a_thousand_decodes(poll_steps: int, ttft_s: float) -> None:
    """A prompt of two steps weighs 2000 as the step of 2 s is formed, at 1 s: the request of 0.5 s is heard
    of then, or as the first ends at 6 s.
    """
    fleet = with_engine(mixed(STEP, budget=8), replace(ASYNC, poll_steps=poll_steps))
    found = simulate(fleet, make_trace([0, 0.5], [16, 2], [5, 1]))
    assert found.ttft_s.tolist() == [2.0, ttft_s]


def test_polling_is_not_simulated_in_pipelines_or_with_ranks() -> None:
    fleet = with_engine(mixed(STEP), replace(ASYNC, poll_steps=10))
    fleet = replace(fleet, pools=(replace(fleet.pools[0], type=replace(fleet.pools[0].type, pp=2)),))
    with pytest.raises(InputError, match="engine: poll_steps 10: is not simulated in pipelines"):
        simulate(fleet, make_trace([0], [4], [1]))
    with pytest.raises(InputError, match="poll_steps is 10, must be 1, or more with"):
        replace(SYNC, poll_steps=10)


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


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(150), 1929])
def test_random_fleets_agree_with_the_plain_simulators(seed: int) -> None:
    """All engines, orders of prompts and routings, mixed or prefill and decode, tight caches: engine_cases.py
    draws them. benchmarks/references.py compares as many as one likes.
    """
    compare_engine_case(seed)


def decode_pair(engine: Engine, kv_tokens: int) -> Fleet:
    """A prefill and a decode worker, steps of a second, a link that takes no time."""
    pools = (
        make_pool(STEP, role="prefill", name="p"),
        make_pool(STEP, role="decode", name="d", kv_tokens=kv_tokens),
    )
    return with_engine(Fleet(LLM, pools, network=Network(1e30, 0.0, "serialised")), engine)


@pytest.mark.parametrize(("engine", "second_s"), [(SYNC, 2.0), (ASYNC, 3.0)])
def test_a_prompt_under_way_counts_where_chunks_are_limited(engine: Engine, second_s: float) -> None:
    """Prompts of 8 and 40 tokens, chunks of 8 unless one is alone. An asynchronous engine forms the second
    step while the first prompt's only chunk runs: 8, 8, 24 tokens of the second one. A synchronous one forms
    it when the first prompt has left: 8, 32.
    """
    fleet = decode_pair(engine, 16 * 1000)
    fleet = replace(fleet, policies=replace(fleet.policies, long_prefill_token_threshold=8))
    assert simulate(fleet, make_trace([0, 0], [8, 40], [2, 2])).ttft_s.tolist() == [1.0, second_s]


def test_an_idle_decode_worker_takes_the_hand_off_that_waited() -> None:
    """One block of KV on the decode worker. Prompts end together at 1 s; the first decodes from 1 to 3 s, the
    second, which had no room, from 3 to 5 s. Before, nobody looked again: it was never finished.
    """
    found = simulate(decode_pair(ASYNC, kv_tokens=16), make_trace([0, 0], [4, 4], [3, 3]))
    assert found.e2e_s.tolist() == [3.0, 5.0]
    assert found.status.tolist() == [0, 0]


def test_a_hand_off_takes_the_blocks_of_who_left_as_the_next_step_begins() -> None:
    """Two blocks. The first decodes from 1 to 3 s. The KV of the second comes just after that has begun, and
    an idle engine hears of it, at 3 s: eleven tokens more until 14 s. The third has the first one's block at
    3 s, as the second's first step begins; it is heard of three steps after that and decodes from 7 to 8 s.
    """
    found = simulate(decode_pair(ASYNC, kv_tokens=32), make_trace([0, 0, 0], [4, 4, 4], [3, 12, 2]))
    assert found.e2e_s.tolist() == [3.0, 14.0, 8.0]


def test_a_prefill_worker_gets_its_kv_back_through_an_idle_decode_worker() -> None:
    """40 times two requests at once, of which only one at a time has room where it decodes, and two have
    where their prompts are computed: all finish, the second of two 3 s after the first.
    """
    arrival_s = np.repeat(np.arange(40) * 30.0, 2)
    found = simulate(
        decode_pair(ASYNC, kv_tokens=16), make_trace(arrival_s, [4] * 80, [3, 3] * 40), limits=()
    )
    assert (found.status == 0).all()
    assert found.e2e_s[1::2].tolist() == [5.0] * 40


@pytest.mark.parametrize("load_frac", [0.3, 0.8])
def test_mean_waits_are_those_of_md1_on_an_asynchronous_engine(load_frac: float) -> None:
    """One seat, one token, steps of max(1, 0.5) + 0.25 s: nothing can be prepared, so S = 1.25 s and the mean
    wait is rho S / (2 (1 - rho)) (Pollaczek-Khinchine). The front end of 0.1 s is waited out before.
    """
    engine = replace(ASYNC, host=HostTime(0.5), rest=HostTime(0.25), front_end_s=0.1)
    rng, n = np.random.default_rng(7), 200_000
    trace = make_trace(np.cumsum(rng.exponential(1.25 / load_frac, n)), [1] * n, [1] * n)
    found = simulate(with_engine(mixed(STEP, seats=1), engine), trace)
    wait_s = 1.25 * load_frac / (2 * (1 - load_frac))
    assert found.queue_s.mean() - 0.1 == pytest.approx(wait_s, rel=0.03)
    np.testing.assert_allclose(found.e2e_s, found.queue_s + 1.25)


def test_littles_law_on_asynchronous_prefill_and_decode_workers() -> None:
    """L = lambda W: requests in flight, on average over the run, are arrivals per second times mean seconds
    from arrival to end. Both sides are counted by themselves: L from arrivals and ends in order.
    """
    rng, n = np.random.default_rng(3), 3000
    trace = make_trace(np.cumsum(rng.exponential(4.0, n)), rng.integers(1, 30, n), rng.integers(1, 20, n))
    found = simulate(decode_pair(replace(ASYNC, host=HostTime(0.2)), kv_tokens=16 * 12), trace)
    assert (found.status == 0).all()
    times_s = np.concatenate([found.arrival_s, found.arrival_s + found.e2e_s])
    order = np.argsort(times_s, kind="stable")
    in_flight = np.cumsum(np.repeat([1, -1], n)[order])
    assert in_flight[-1] == 0 and in_flight.min() >= 0
    span_s = np.diff(times_s[order])
    average = (in_flight[:-1] * span_s).sum() / span_s.sum()
    assert average == pytest.approx(n / span_s.sum() * found.e2e_s.mean(), rel=1e-9)
    assert average > 1.5


def test_requests_that_are_left_with_nothing_to_do_are_a_mistake_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that never starts anything leaves both: that is no SLO missed."""

    def nothing(state: State, closed_loop: int, stop_early: bool) -> None:
        state.counters[layout.ENTERED] = 2

    monkeypatch.setattr(kernel, "simulate_events", nothing)
    with pytest.raises(replay.LostRequests, match="2 of 2 requests are neither finished nor rejected"):
        simulate(mixed(STEP), make_trace([0, 0], [4, 4], [1, 1]))


def test_requests_that_fit_on_a_lost_worker_alone_are_unfinished_and_no_mistake() -> None:
    fleet = replace(mixed(STEP), disturbances=(Disturbance(0.5, "down", 0),))
    assert simulate(fleet, make_trace([0], [4], [3])).status.tolist() == [2]


def test_a_worker_that_comes_back_has_all_of_its_blocks() -> None:
    """Prefill workers of 6 blocks. The first prompt's 2 blocks cross the link from 1 to 1.5 s, while the
    third is computed: too late for the step that is formed already. At 1.75 s the worker goes down, before
    that step, and the third prompt goes to the other worker. It is back at 3 s with all of its blocks.
    """
    pools = (
        make_pool(STEP, role="prefill", name="p", kv_tokens=96, count=2),
        make_pool(STEP, role="decode", name="d"),
    )
    policies = Policies(routing="round-robin")
    fleet = with_engine(Fleet(LLM, pools, policies, Network(1024.0, 0.0, "serialised")), ASYNC)
    fleet = replace(fleet, disturbances=(Disturbance(1.75, "down", 0), Disturbance(3.0, "up", 0)))
    found = simulate(fleet, make_trace([0, 0.1, 0.5, 10, 10], [32, 16, 32, 90, 90], [2] * 5))
    assert found.status.tolist() == [0] * 5 and found.prefill_worker.tolist() == [0, 1, 1, 0, 1]
    assert found.ttft_s.tolist() == [1.0, 1.0, 2.25, 1.0, 1.0]


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
