"""KV blocks in CPU memory behind prefix caches, in the kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from offload_cases import (
    ENGINES,
    PER_TOKEN,
    TOKEN_S,
    check_same,
    compare_tiers,
    fleet_with,
    memory_of,
    random_case,
    with_disk,
)
from offload_reference import AsyncOffloadReference, OffloadReference
from shares import some
from simulations import LLM, make_pool, prefix_trace

from planner.errors import InputError
from planner.fleet import Disturbance, Fleet, Network, Policies
from planner.models.engine import Engine
from planner.models.kv_offload import KvOffload
from planner.simulator import Simulation, simulate


def test_percentiles_of_ttft_and_tasks_are_those_of_plain_simulators() -> None:
    """27 of the random cases of benchmarks/references.py, of all three engines and all kinds of memory."""
    rows = [row for seed in range(27) if (row := compare_tiers(seed)) is not None]
    assert max(row.percentile_frac for row in rows) < 1e-9 and max(max(row.points) for row in rows) < 1e-9
    assert len(rows) > 20 and sum(row.tasks for row in rows) > 200


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_kernel_and_plain_simulator_agree_on_a_shared_store(engine: str) -> None:
    """40 random cases per engine, of two to four workers: they load more than with as much memory of their
    own. Of asynchronous engines those without preemptions, as below.
    """
    alone, together, compared, counted = 0, 0, 0, np.zeros(3, int)
    for seed in range(40):
        fleet, trace = random_case(seed, engine=ENGINES[engine], is_shared=True)
        found = simulate(fleet, trace)
        if engine == "async" and found.preemptions.any():
            continue
        plain = (AsyncOffloadReference if engine == "async" else OffloadReference)(fleet, trace).run()
        check_same(found, plain, f"seed {seed}")
        apart, _ = random_case(seed, engine=ENGINES[engine])
        apart = replace(fleet, policies=replace(fleet.policies, kv_offload=apart.policies.kv_offload))
        alone += sum(reloaded(simulate(apart, trace)))
        together += sum(reloaded(found))
        counted += plain.loads, plain.refused, plain.left_memory
        compared += 1
    assert together > alone and compared > 20 and counted.min() > 20, (alone, together, compared, counted)


@pytest.mark.long
@pytest.mark.parametrize("engine", some(ENGINES, 1))
def test_kernel_and_plain_simulator_agree_on_a_disk(engine: str) -> None:
    """40 random cases per engine, the times of all requests and the tokens from each tier among them."""
    compared, from_disk, from_memory, waits = 0, 0, 0, 0
    for seed in range(40):
        fleet, trace = random_case(seed, engine=ENGINES[engine])
        fleet = with_disk(fleet, seed)
        found = simulate(fleet, trace)
        if engine == "async" and found.preemptions.any():
            continue
        plain = (AsyncOffloadReference if engine == "async" else OffloadReference)(fleet, trace).run()
        check_same(found, plain, f"seed {seed}")
        assert found.disk_tokens is not None and found.disk_tokens.tolist() == plain.disk_tokens, seed
        from_disk += sum(plain.disk_tokens)
        from_memory += sum(map(int, found.reloaded_tokens)) - sum(plain.disk_tokens)  # type: ignore[arg-type]
        waits += sum(each > 0 for each in plain.disk_free_s)
        compared += 1
    assert compared > 20 and min(from_disk, from_memory) > 1000 and waits > 5, (from_disk, from_memory)


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_kernel_and_plain_simulator_agree(engine: str) -> None:
    """40 random cases per engine: memory that never fills, that forgets, and that has no room for a prompt.
    Of asynchronous engines those without preemptions, whose blocks the plain one does not follow that far.
    """
    totals, compared = np.zeros(6, int), 0
    for seed in range(40):
        fleet, trace = random_case(seed, engine=ENGINES[engine])
        found = simulate(fleet, trace)
        if engine == "async" and found.preemptions.any():
            continue
        plain = (AsyncOffloadReference if engine == "async" else OffloadReference)(fleet, trace).run()
        check_same(found, plain, f"seed {seed}")
        hits = sum(plain.first_hit)
        counted = (plain.loads, plain.passed_over, plain.refused, plain.left_memory, hits)
        totals += (*counted, found.preemptions.sum())
        compared += 1
    assert compared > 20 and totals[:-1].min() > 10 and (totals[-1] > 25 or engine == "async"), totals


@pytest.mark.parametrize("seed", [*range(4), 36, 70])
def test_a_loaded_prompt_takes_the_room_that_a_hand_off_gives_back(seed: int) -> None:
    """Prefill workers hold blocks until they have crossed a slow link. Of seeds 36 and 70 a prompt whose load
    had ended waited for them on a worker that had nothing else to do, and was never taken up.
    """
    fleet, trace = random_case(seed, engine=ENGINES["async"])
    pool = fleet.pools[0]
    prefill = replace(pool, name="pre", role="prefill")
    decode = replace(pool, name="dec", role="decode", count=1)
    found = simulate(replace(fleet, pools=(prefill, decode), network=Network(2e4, 0.0)), trace)
    assert (found.status == 0).all()


# ------------------------------------------------------------------------------------------------- by hand

A, B, C = [1, 2, 3], [4, 5, 6], [7, 8, 9]


def test_a_worker_loads_what_another_has_stored() -> None:
    """In turns: a, b on the first and second worker, then a on the second again. With a memory each it is
    computed anew; of a shared store 48 tokens come in 48 / 8 token times.
    """
    trace = prefix_trace([0, 10, 20, 30], [B, A, A, B])
    own = simulate(fleet_with(memory_of(1000), 2, routing="round-robin"), trace)
    assert reloaded(own) == [0, 0, 0, 0] and own.ttft_s.tolist() == [48 * TOKEN_S] * 4
    shared = simulate(fleet_with(memory_of(1000, is_shared=True), 2, routing="round-robin"), trace)
    assert reloaded(shared) == [0, 0, 47, 47]
    assert shared.ttft_s[2:].tolist() == [7 * TOKEN_S] * 2


def test_loads_of_two_workers_share_the_link_of_a_shared_store() -> None:
    """Both want 3 blocks at once: the second has waited 12 token times where the first has waited 6."""
    trace = prefix_trace([0, 10, 20, 20], [A, B, B, A])
    shared = simulate(fleet_with(memory_of(1000, is_shared=True), 2, routing="round-robin"), trace)
    assert reloaded(shared) == [0, 0, 47, 47]
    assert shared.reload_s.tolist() == [0, 0, 6 * TOKEN_S, 12 * TOKEN_S]


def test_a_shared_store_outlives_a_worker() -> None:
    """The first worker goes down after it has stored a; the second loads it."""
    trace = prefix_trace([0, 10], [A, A])
    fleet = fleet_with(memory_of(1000, is_shared=True), 2, routing="round-robin")
    found = simulate(replace(fleet, disturbances=(Disturbance(5.0, "down", 0),)), trace)
    assert reloaded(found) == [0, 47]


def test_degrees_that_kv_heads_do_not_split_over_share_no_store() -> None:
    """Two KV heads: blocks of TP 1 and 2 are cut alike in a store, those of TP 4 are not."""
    fleet = fleet_with(memory_of(1000, is_shared=True))
    kind = fleet.pools[0].type
    for tp, is_refused in ((2, False), (4, True)):
        other = replace(fleet.pools[0], name="other", type=replace(kind, tp=tp))
        several = replace(fleet, llm=replace(LLM, heads=4, kv_heads=2), pools=(*fleet.pools, other))
        if is_refused:
            with pytest.raises(InputError, match="workers with tp 1 are no use to those with tp 4"):
                simulate(several, prefix_trace([0], [A]))
        else:
            simulate(several, prefix_trace([0], [A]))


def test_nodes_are_in_a_shared_store_when_their_step_has_ended() -> None:
    """a is computed on the first worker from 0 to 48 token times; who begins on the second in between finds
    nothing, who begins after it loads.
    """
    early, late = 40 * TOKEN_S, 49 * TOKEN_S
    for begun_s, tokens in ((early, 0), (late, 47)):
        trace = prefix_trace([0, begun_s], [A, A])
        found = simulate(fleet_with(memory_of(1000, is_shared=True), 2, routing="round-robin"), trace)
        assert reloaded(found) == [0, tokens]


def reloaded(found: Simulation) -> list[int]:
    assert found.reloaded_tokens is not None
    return [int(tokens) for tokens in found.reloaded_tokens]


def test_what_comes_from_cpu_memory_takes_its_bytes_over_the_bandwidth() -> None:
    """6 blocks on the GPU, prompts of 3: c drives a out, which comes back in 48 / 8 token times, and its last
    token is computed. Computed anew it takes 48.
    """
    trace = prefix_trace([0, 10, 20, 30], [A, B, C, A])
    found = simulate(fleet_with(memory_of(1000)), trace)
    assert reloaded(found) == [0, 0, 0, 47] and found.reload_s.tolist() == [0, 0, 0, 6 * TOKEN_S]
    assert found.ttft_s[3] == 7 * TOKEN_S == 6 * TOKEN_S + found.queue_s[3] - found.reload_s[3] + TOKEN_S
    assert simulate(fleet_with(None), trace).ttft_s[3] == 48 * TOKEN_S
    assert found.token_reload_frac == 47 / (4 * 48) and found.token_hit_frac == 0


def test_an_engine_hears_of_a_load_a_step_later() -> None:
    """d decodes in steps of a token time as a's 6 pass. The load ends with the sixth of these steps, and the
    seventh computes a's last token beside one of d. An engine sees it in that and does so in the eighth.
    """
    trace = prefix_trace(
        [0, 10, 20, 30, 30 + 48 * TOKEN_S], [A, B, C, [10, 11, 12], A], outputs=[1, 1, 1, 20, 1]
    )
    sync = Engine("vllm", "0.11.1", async_scheduling=False)
    for engine, steps in ((None, 6), (sync, 7)):
        found = simulate(fleet_with(memory_of(1000), kv_tokens=128, engine=engine), trace)
        assert reloaded(found)[-1] == 47
        np.testing.assert_allclose(found.ttft_s[-1], (steps + 2) * TOKEN_S)


def test_one_load_after_the_other_and_whoever_shares_one_waits_for_it() -> None:
    """9 blocks on the GPU, which two other prompts fill. a and b come back at once: 6 and 12 token times. Who
    begins with a, too, finds it on the GPU when it has come; the one behind that does not wait.
    """
    prompts = [A, B, list(range(20, 28)), [30], A, B, [*A, 10], [11]]
    trace = prefix_trace([0, 10, 20, 30, 40, 40, 40, 40], prompts)
    found = simulate(fleet_with(memory_of(1000), kv_tokens=144, budget=16), trace)
    assert reloaded(found)[4:] == [47, 47, 0, 0] and found.cached_tokens is not None
    assert found.reload_s[4:6].tolist() == [6 * TOKEN_S, 12 * TOKEN_S]
    assert found.cached_tokens[4:].tolist() == [0, 0, 48, 0]
    assert found.queue_s[4:].tolist() == [16 * TOKEN_S] * 3 + [0]  # the last one's step takes 16


def test_memory_forgets_what_was_used_longest_ago_and_a_prompt_from_its_end() -> None:
    """Room for 7 nodes: a, b fill 6, c takes two of a's. What is left is a's root."""
    trace = prefix_trace([0, 10, 20, 30], [A, B, C, A])
    found = simulate(fleet_with(memory_of(16 * 7)), trace)
    assert reloaded(found) == [0, 0, 0, 16]
    # 4 blocks on the GPU: a's root stays there, its rest is used once more, and b's end leaves for c
    again = prefix_trace([0, 10, 20, 30, 40], [A, B, A, C, A])
    assert reloaded(simulate(fleet_with(memory_of(16 * 7), kv_tokens=64), again)) == [0, 0, 31, 0, 31]
    small = simulate(fleet_with(memory_of(16 * 2)), trace)  # no prompt has room
    assert reloaded(small) == [0] * 4


def test_a_worker_that_goes_down_loses_its_memory() -> None:
    trace = prefix_trace([0, 10, 20, 30], [A, B, C, A])
    fleet = fleet_with(memory_of(1000))
    down = (Disturbance(25.0, "down"), Disturbance(26.0, "up"))
    assert reloaded(simulate(replace(fleet, disturbances=down), trace)) == [0] * 4
    while_loading = (Disturbance(30 + 3 * TOKEN_S, "down"), Disturbance(31.0, "up"))
    found = simulate(replace(fleet, disturbances=while_loading), trace)
    assert (found.status == 0).all() and found.ttft_s[3] == 1.0 + 48 * TOKEN_S


def test_decode_workers_compute_what_was_preempted_there() -> None:
    """Two requests of 48 tokens and 40 of output come to a decode worker of 7 blocks with 3 each, and both
    need a fourth: one is preempted. Its prompt is in the store that all share, but a worker that decodes
    alone loads nothing: it computes 49 tokens, and the last of them makes the next one.
    """
    pools = (
        make_pool(PER_TOKEN, role="prefill", name="prefill", kv_tokens=960),
        make_pool(PER_TOKEN, role="decode", name="decode", kv_tokens=112),
    )
    policies = Policies(prefix_cache=True, kv_offload=memory_of(1000, is_shared=True))
    found = simulate(Fleet(LLM, pools, policies), prefix_trace([0, 0], [A, B], outputs=[40] * 2))
    assert found.preemptions.tolist() == [1, 0] and found.worker_tokens.tolist() == [96, 78 + 48]


def test_prefill_workers_have_such_memory_when_decode_workers_go_on() -> None:
    pools = tuple(make_pool(PER_TOKEN, role=role, name=role, kv_tokens=96) for role in ("prefill", "decode"))
    fleet = Fleet(LLM, pools, Policies(prefix_cache=True, kv_offload=memory_of(1000)))
    found = simulate(fleet, prefix_trace([0, 10, 20, 30], [A, B, C, A], outputs=[3] * 4))
    assert reloaded(found) == [0, 0, 0, 47] and found.ttft_s[3] == 7 * TOKEN_S


@pytest.mark.parametrize("engine", ENGINES)
def test_endless_memory_that_takes_no_time_is_an_endless_cache(engine: str) -> None:
    """One request at a time, prompts that end within a block: the same tokens are computed."""
    rng = np.random.default_rng(3)
    paths = [rng.integers(3, size=rng.integers(1, 9)).tolist() for _ in range(40)]
    tokens = [16 * len(ids) - int(rng.integers(1, 16)) for ids in paths]
    trace = prefix_trace([10.0 * i for i in range(40)], paths, tokens=tokens, outputs=[3] * 40)
    endless = simulate(fleet_with(None, kv_tokens=16 * 4000, engine=ENGINES[engine]), trace)
    small = fleet_with(memory_of(1e9, 0.0), kv_tokens=16 * 9, engine=ENGINES[engine])
    found = simulate(small, trace)
    assert endless.cached_tokens is not None and found.cached_tokens is not None
    assert found.reloaded_tokens is not None
    assert found.cached_tokens.sum() < endless.cached_tokens.sum()
    assert (found.cached_tokens + found.reloaded_tokens).tolist() == endless.cached_tokens.tolist()
    np.testing.assert_array_equal(found.ttft_s, endless.ttft_s)
    np.testing.assert_array_equal(found.e2e_s, endless.e2e_s)


def test_no_memory_changes_nothing() -> None:
    for seed in range(10):
        fleet, trace = random_case(seed, engine=None)
        without = replace(fleet, policies=replace(fleet.policies, kv_offload=None))
        empty = replace(fleet, policies=replace(fleet.policies, kv_offload=memory_of(0)))
        plain, found = simulate(without, trace), simulate(empty, trace)
        for what in ("ttft_s", "tpot_s", "tbt_max_s", "e2e_s", "worker_busy_s", "cached_tokens"):
            np.testing.assert_array_equal(getattr(plain, what), getattr(found, what), err_msg=what)
        assert found.reloaded_tokens is None


def test_what_it_holds_and_how_fast_it_comes_back() -> None:
    """16 bytes per token, its one KV head copied to two GPUs; each has 1600 bytes and 160 B/s."""
    of_each = KvOffload(1600.0, 160.0)
    assert (of_each.kv_tokens(LLM, 1), of_each.token_s(LLM, 1)) == (100, 0.1)
    assert (of_each.kv_tokens(LLM, 2), of_each.token_s(LLM, 2)) == (100, 0.1)
    split = replace(LLM, kv_heads=2)  # 32 bytes per token, a half on each of two GPUs
    assert (of_each.kv_tokens(split, 1), of_each.token_s(split, 1)) == (50, 0.2)
    assert (of_each.kv_tokens(split, 2), of_each.token_s(split, 2)) == (100, 0.1)
    with pytest.raises(InputError, match="bandwidth is 0 B/s"):
        KvOffload(1.0, 0.0)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"prefix_cache": False}, "needs prefix_cache: true"),
        ({"queue": "lpm"}, "not simulated with queue 'lpm'"),
        ({"admission": "reserve-static"}, "admission"),
    ],
)
def test_what_is_not_simulated_is_refused(policies: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(fleet_with(memory_of(100), **policies), prefix_trace([0], [A]))  # type: ignore[arg-type]


def test_pipelines_are_refused() -> None:
    fleet = fleet_with(memory_of(100))
    deep = fleet.with_types(lambda kind: replace(kind, pp=2))
    with pytest.raises(InputError, match="must be pp 1, found 2"):
        simulate(deep, prefix_trace([0], [A]))
