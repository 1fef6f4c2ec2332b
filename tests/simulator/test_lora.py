"""LoRA adapters in the simulator: steps by hand, and every number against the plain simulators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combined_cases import compare_adapters
from engine_cases import with_engine
from lora_reference import AsyncLoraReference, LoraReference
from simulations import LLM, compare, make_latency, make_pool, make_trace, mixed, random_case

from planner.domain import Limit
from planner.errors import InputError
from planner.fleet import Disturbance, Fleet, Network, Policies
from planner.models.engine import Engine, HostTime
from planner.models.lora import Lora, LoraCost, LoraSlots
from planner.reports.output import requests_csv
from planner.simulator.replay import simulate
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

STEP = make_latency()  # every step takes a second
FREE = LoraCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
ENGINES = {"sync": Engine("vllm", "0.11.1", async_scheduling=False, host=HostTime(0.01))}
ENGINES["async"] = replace(ENGINES["sync"], async_scheduling=True, front_end_s=0.01)


def with_lora(fleet: Fleet, lora: Lora, cost: LoraCost = FREE, **changes: Any) -> Fleet:
    """Every worker with these slots."""
    slots = LoraSlots(lora, cost)
    return replace(
        fleet,
        pools=tuple(replace(pool, type=replace(pool.type, lora=slots, **changes)) for pool in fleet.pools),
    )


def asking(trace: Trace, adapters: list[int], names: str = "abcdefghij") -> Trace:
    """The same trace whose requests name an adapter, -1 none."""
    return replace(trace, adapter=np.array(adapters), adapters=tuple(names))


def test_who_finds_no_slot_is_passed_over() -> None:
    """One slot, all at once: the adapters are a, b, a and none. b waits until both of a are done."""
    fleet = with_lora(mixed(STEP), Lora(1, 8, ("a", "b"), 2))
    found = simulate(fleet, asking(make_trace([0] * 4, [4] * 4, [3] * 4), [0, 1, 0, -1], "ab"))
    assert found.ttft_s.tolist() == [1.0, 4.0, 1.0, 1.0]
    assert found.e2e_s.tolist() == [3.0, 6.0, 3.0, 3.0]


def test_who_comes_later_overtakes_who_finds_no_slot() -> None:
    """b waits from 0 on; a's second request comes in the middle of a run of steps, and is in the next one."""
    fleet = with_lora(mixed(STEP), Lora(1, 8, ("a", "b"), 2))
    found = simulate(fleet, asking(make_trace([0, 0, 2.5], [4] * 3, [10, 1, 1]), [0, 1, 0], "ab"))
    assert found.ttft_s.tolist() == [1.0, 11.0, 1.5]


@pytest.mark.parametrize(("engine", "end_s"), [(None, 7.25), ("sync", 8.5), ("async", 7.5)])
def test_a_hand_off_without_a_slot_is_not_pulled(engine: str | None, end_s: float) -> None:
    """One slot; a decodes from 2.25 to 6.25 s. b is handed over at 2.5 s, its KV crosses in 1.25 s: at once,
    or with the first step that vLLM forms without a, at 6.25 s or as a's last step begins. c, of a's adapter,
    overtakes b: it is handed over at 3.5 s, pulled with the next step, and decodes at 6.25 s.
    """
    pools = (make_pool(STEP, role="prefill", name="p"), make_pool(STEP, role="decode", name="d"))
    network = Network(256.0, 0.25, "serialised")
    fleet = with_lora(Fleet(LLM, pools, network=network), Lora(1, 8, ("a", "b"), 2))
    if engine is not None:
        fleet = with_engine(fleet, replace(ENGINES[engine], host=HostTime(), front_end_s=0.0))
    two, three = make_trace([0, 1.5], [4, 4], [5, 2]), make_trace([0, 1.5, 2.5], [4] * 3, [5, 2, 2])
    found = simulate(fleet, asking(two, [0, 1], "ab"))
    assert (found.arrival_s + found.e2e_s).tolist() == [6.25, end_s]
    found = simulate(fleet, asking(three, [0, 1, 0], "ab"))
    assert found.arrival_s[2] + found.e2e_s[2] <= 7.25 <= found.arrival_s[1] + found.e2e_s[1]


@pytest.mark.parametrize("seed", [10, 22, 31, 41, 58])
def test_slots_are_those_of_the_step_that_pulls(seed: int) -> None:
    compare_adapters(seed)


def test_adapters_cost_what_they_say() -> None:
    """Kernels 0.5 s and, for each adapter of a step, 0.25 s; 2^-6 s per token that has one. Of two slots and
    three adapters b and c are loaded at first; loading a takes 4 s more.
    """
    cost = LoraCost(0.0, 0.5, 0.25, 0.0, 0.0, 2.0**-6, 4.0, 100.0)
    fleet = with_lora(mixed(STEP), Lora(2, 8, 3, 3), cost)
    times = make_trace([0, 100, 200, 300], [4, 8, 4, 4], [2, 1, 1, 1])
    found = simulate(fleet, asking(times, [0, 1, 2, -1], "abc"))
    first_s = 1 + 4 + 0.5 + 0.25 + 4 * 2.0**-6
    assert found.ttft_s[0] == first_s
    assert found.e2e_s[0] == first_s + 1 + 0.5 + 0.25 + 2.0**-6
    assert found.ttft_s[1] == 1 + 4 + 0.5 + 0.25 + 8 * 2.0**-6  # b has made way for a, as the lowest unused
    assert found.ttft_s[2] == 1 + 0.5 + 0.25 + 4 * 2.0**-6 + 4  # and c for b
    assert found.ttft_s[3] == 1.0


def test_what_the_host_does_not_keep_comes_from_disk() -> None:
    """One slot, two adapters in the host's memory, b and c at first. a replaces b, which is then on disk."""
    cost = LoraCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 8.0)
    fleet = with_lora(mixed(STEP), Lora(1, 8, 3, 2), cost)
    times = make_trace(np.arange(4) * 100.0, [4] * 4, [1] * 4)
    found = simulate(fleet, asking(times, [2, 0, 2, 1], "abc"))
    assert found.ttft_s.tolist() == [1.0, 10.0, 2.0, 10.0]


def test_experts_are_read_as_far_as_tokens_visit_them() -> None:
    """Experts take 8 s an adapter to read, a token visits a quarter: 2 tokens read half of them, 12 all."""
    cost = LoraCost(0.0, 0.0, 0.0, 8.0, 0.25, 0.0, 0.0, 0.0)
    fleet = with_lora(mixed(STEP), Lora(1, 8, 1, 1), cost)
    found = simulate(fleet, asking(make_trace([0, 100], [2, 12], [1, 1]), [0, 0], "a"))
    assert found.ttft_s.tolist() == [5.0, 9.0]


def test_a_worker_that_comes_back_has_the_adapters_it_started_with() -> None:
    cost = LoraCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 0.0)
    fleet = with_lora(mixed(STEP), Lora(1, 8, 2, 2), cost)
    trace = asking(make_trace([0, 100, 200], [4] * 3, [1] * 3), [0, 0, 0], "ab")
    assert simulate(fleet, trace).ttft_s.tolist() == [5.0, 1.0, 1.0]
    twice = replace(fleet, disturbances=(Disturbance(50.0, "down"), Disturbance(60.0, "up")))
    assert simulate(twice, trace).ttft_s.tolist() == [5.0, 5.0, 1.0]


def random_lora(
    fleet: Fleet, trace: Trace, seed: int, *, dyadic: bool, **changes: Any
) -> tuple[Fleet, Trace]:
    """Few slots and a few more adapters; the trace names them, or they are drawn."""
    rng = np.random.default_rng([seed, 31])
    count, max_loras = int(rng.integers(1, 9)), int(rng.integers(1, 5))

    def seconds(most: float) -> float:
        value = rng.uniform(0, most) * (rng.uniform() < 0.7)
        return round(value * 1024) / 1024 if dyadic else value

    kernels_s, read_s, experts_s = (seconds(most) for most in (0.05, 0.05, 0.1))
    token_s, load_s, disk_s = (seconds(most) for most in (0.01, 0.2, 0.5))
    visited_frac = float(rng.choice([0.0, 0.125, 1.0]))
    cost = LoraCost(0.0, kernels_s, read_s, experts_s, visited_frac, token_s, load_s, disk_s)
    lora = Lora(max_loras, 8, count, max_loras + int(rng.integers(0, 4)))
    if rng.uniform() < 0.7:
        adapter = rng.integers(-1, count, len(trace))
        trace = replace(trace, adapter=adapter, adapters=tuple("abcdefghij"[:count]))
    return with_lora(fleet, lora, cost, **changes), trace


def as_far_as_plain(fleet: Fleet) -> Fleet:
    """Engines as tests/simulator/test_engine.py compares asynchronous ones, and for its reasons."""
    roomy = tuple(
        replace(pool, type=replace(pool.type, kv_tokens=16_000)) if pool.role == "decode" else pool
        for pool in fleet.pools
    )
    is_short = any(pool.type.kv_tokens < 16_000 for pool in roomy)
    routing = "least-outstanding" if is_short and fleet.policies.routing == "jsq" else fleet.policies.routing
    return replace(fleet, pools=roomy, policies=replace(fleet.policies, routing=routing))


@pytest.mark.long
@pytest.mark.parametrize(
    ("dyadic", "engine"), [(True, None), (False, None), (False, "sync"), (False, "async")]
)
def test_every_number_is_the_plain_simulators(dyadic: bool, engine: str | None) -> None:
    """Mixed and disaggregated fleets, with prompts in chunks, that run out of KV blocks now and then."""
    preemptions = passed_over = loads = reads = 0
    for seed in range(60):
        fleet, trace, limits, closed_loop = random_case(seed, dyadic=dyadic)
        changes = {"engine": ENGINES[engine]} if engine else {}
        fleet = as_far_as_plain(fleet) if engine else fleet
        fleet, trace = random_lora(fleet, trace, seed, dyadic=dyadic, **changes)
        kind = AsyncLoraReference if engine == "async" else LoraReference
        fast, slow = compare(fleet, trace, limits, closed_loop, reference=kind)
        assert isinstance(slow, LoraReference)
        preemptions += int(fast.preemptions.sum())
        passed_over, loads, reads = passed_over + slow.passed_over, loads + slow.loads, reads + slow.reads
    assert min(preemptions, passed_over, loads, reads) > 30, (preemptions, passed_over, loads, reads)


def test_decodes_that_wait_for_a_step_of_prompts_cost_it_nothing() -> None:
    """SGLang computes prompts apart. A step takes 1 s, and 0.25 s for each token of an adapter. While the
    first request decodes, from 2 s on, a prompt of no adapter comes at 2.5 s; its step ends at 4.25 s.
    """
    engine = replace(ENGINES["sync"], host=HostTime(), mixed_steps=False)
    cost = replace(FREE, token_s=0.25)
    fleet = with_lora(mixed(STEP), Lora(1, 8, 1, 1), cost, engine=engine)
    found = simulate(fleet, asking(make_trace([0, 2.5], [4, 4], [4, 1]), [0, -1], "a"))
    assert found.ttft_s.tolist() == [2.0, 1.75]
    assert found.e2e_s.tolist() == [2.0 + 1.25 + 1.0 + 2 * 1.25, 1.75]


def test_slots_for_all_that_cost_nothing_change_nothing() -> None:
    for seed in range(20):
        fleet, trace, limits, closed_loop = random_case(seed, dyadic=True)  # sums are exact
        plain, found = (
            simulate(each, trace, limits=limits, closed_loop=closed_loop)
            for each in (fleet, with_lora(fleet, Lora(9, 8, 9, 9)))
        )
        for what in ("ttft_s", "tpot_s", "tbt_max_s", "e2e_s", "worker_busy_s"):
            np.testing.assert_array_equal(getattr(plain, what), getattr(found, what), err_msg=what)


def test_more_traffic_than_it_can_serve_ends_all_the_same() -> None:
    """5,000 requests for 300 adapters on two slots, all at once: nobody looks at them one by one."""
    n = 5000
    fleet = with_lora(Fleet(mixed(STEP).llm, (make_pool(STEP, seats=256),)), Lora(2, 8, 300, 300))
    found = simulate(fleet, make_trace([0.0] * n, [4] * n, [3] * n), limits=(Limit("ttft", 0.9, 1.0),))
    assert found.complete and (found.status == 0).all()


@pytest.mark.parametrize("adapters", [9, tuple("abcdefghi")])
def test_drawn_adapters_are_written_and_read_again(adapters: int | tuple[str, ...], tmp_path: Path) -> None:
    """Nothing named them; only the seed drew them again. Numbers keep the slots of the first step, too."""
    n = 40
    cost = replace(FREE, load_s=1.0)
    fleet = with_lora(Fleet(mixed(STEP).llm, (make_pool(STEP, seats=4),)), Lora(2, 8, adapters, 9), cost)
    found = simulate(fleet, make_trace(list(range(n)), [4] * n, [3] * n))
    (tmp_path / "requests.csv").write_text(requests_csv(found))
    again = simulate(
        replace(fleet, policies=replace(fleet.policies, seed=5)), read_trace(tmp_path / "requests.csv")
    )
    assert len({*found.adapter.tolist()}) > 2
    assert [again.adapters[a] for a in again.adapter] == [found.adapters[a] for a in found.adapter]
    np.testing.assert_allclose(again.ttft_s, found.ttft_s, rtol=1e-9)


def test_adapters_and_trace_must_agree() -> None:
    times = make_trace([0, 0], [4, 4], [1, 1])
    with pytest.raises(InputError, match="names 2 adapters, and no lora is configured"):
        simulate(mixed(STEP), asking(times, [0, 1], "ab"))
    with pytest.raises(InputError, match="adapters is 1, and made names 2"):
        simulate(with_lora(mixed(STEP), Lora(1, 8, 1, 1)), asking(times, [0, 1], "ab"))
    with pytest.raises(InputError, match="adapter 'b' is none of lora: adapters"):
        simulate(with_lora(mixed(STEP), Lora(1, 8, ("a", "c"), 2)), asking(times, [0, 1], "ab"))


@pytest.mark.parametrize(
    ("changes", "policies", "message"),
    [
        ({}, Policies(batching="sarathi"), "needs batching vllm-v1"),
        ({"pp": 2}, Policies(), "must be pp 1"),
        ({}, Policies(admission="reserve-static"), "needs admission greedy"),
    ],
)
def test_what_is_not_simulated_is_refused(changes: dict[str, int], policies: Policies, message: str) -> None:
    fleet = replace(with_lora(mixed(STEP), Lora(1, 8, 1, 1), FREE, **changes), policies=policies)
    with pytest.raises(InputError, match=message):
        simulate(fleet, make_trace([0], [4], [1]))
