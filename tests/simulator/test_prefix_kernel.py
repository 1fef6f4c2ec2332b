"""Prefix caches, the queues and routers that look at them, and fairness between tenants, in the kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from async_prefix_reference import AsyncPrefixReference
from engine_cases import with_engines
from prefix_cases import compare_prefix_case, looking, random_parameters
from prefix_reference import PrefixReference
from shares import some
from simulations import LLM, beside, make_latency, make_pool, make_trace, prefix_trace, random_prompts

from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import fleet_document, read_fleet
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Disturbance, Fleet, Network, PinnedPrefix, Policies
from planner.models.engine import Engine, HostTime
from planner.policies import QUEUE, ROUTING
from planner.simulator import Simulation, simulate
from planner.simulator.tenant_service import jain_index, tenant_service
from planner.traffic.trace import Trace

TOKEN_S = 1 / 1024  # a step takes as many as it has tokens
PER_TOKEN = make_latency((TOKEN_S, 1.0))


def cached_fleet(
    count: int = 1, *, kv_tokens: int = 16 * 1000, seats: int = 8, budget: int = 64, **policies: object
) -> Fleet:
    pool = make_pool(PER_TOKEN, count=count, kv_tokens=kv_tokens, seats=seats, budget=budget)
    return Fleet(LLM, (pool,), Policies(**{"prefix_cache": True, "routing": "round-robin", **policies}))  # type: ignore[arg-type]


def random_case(seed: int, kind: str) -> tuple[Fleet, Trace]:
    """Trees of blocks, three tenants, one request in three waits for another. "short": one token of output;
    "roomy": memory for everything; "tight": neither. Times and seconds are multiples of 2^-10, so sums are
    exact and events coincide.
    """
    rng = np.random.default_rng(seed)
    n, block = 60, int(rng.choice([16, 32]))
    blocks, tokens = random_prompts(rng, n, block)
    trace = prefix_trace(
        np.sort(rng.integers(0, int(rng.choice([256, 4096])), n) / 1024).tolist(),
        blocks,
        tokens=tokens,
        outputs=[1] * n if kind == "short" else rng.integers(1, 40, n).tolist(),
        tenant=rng.integers(0, 3, n).tolist(),
        block=block,
    )
    if rng.integers(2):
        children = 1 + np.flatnonzero(rng.integers(3, size=n - 1) == 0)
        edges = np.array([(child, int(rng.integers(child))) for child in children.tolist()])
        think_s = rng.integers(0, 64, n) * rng.integers(2, size=n) / 1024
        trace = replace(trace, after=edges[np.argsort(edges[:, 1], kind="stable")], think_s=think_s)
    routing = ("round-robin", "least-outstanding", *looking(ROUTING))
    queue = ("fcfs", *looking(QUEUE))
    return cached_fleet(
        int(rng.integers(1, 5)),
        kv_tokens=16 * (4000 if kind == "roomy" else int(rng.integers(20, 60))),
        seats=int(rng.choice([2, 8, 32])),
        routing=str(rng.choice(routing)),
        queue=str(rng.choice(queue)),
        **random_parameters(rng),
    ), trace


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tight", "short", "roomy", "windows"])
@pytest.mark.parametrize("part", some(range(4), 1))
def test_kernel_and_plain_simulator_agree(part: int, kind: str) -> None:
    """Hits, times, workers, preemptions of 30 random cases each; the plain one also checks after every step
    that each KV block is counted once and that no child outlives its parent in a cache.
    """
    for seed in range(30 * part, 30 * (part + 1)):
        fleet, trace = random_case(seed, kind.replace("windows", "tight"))
        fleet = beside(fleet, seed) if kind == "windows" else fleet
        plain, found = PrefixReference(fleet, trace).run(), simulate(fleet, trace)
        said = f"seed {seed}, {fleet.policies.routing}, {fleet.policies.queue}"
        assert found.cached_tokens is not None
        status = [found.status[i] == 0 for i in range(len(trace))]
        assert status == [request.status == "finished" for request in plain.requests], said
        workers = [request.prefill_worker for request in plain.requests]
        assert found.prefill_worker.tolist() == workers, said
        assert found.cached_tokens.tolist() == [max(hit, 0) for hit in plain.first_hit], said
        np.testing.assert_allclose(found.ttft_s, [request.ttft_s for request in plain.requests], err_msg=said)
        np.testing.assert_allclose(found.e2e_s, [request.e2e_s for request in plain.requests], err_msg=said)
        np.testing.assert_allclose(found.arrival_s, [request.arrival_s for request in plain.requests])
        assert found.preemptions.tolist() == [request.preemptions for request in plain.requests], said


@pytest.mark.long
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["tight", "short", "roomy"])
def test_kernel_and_plain_simulator_agree_on_engines(kind: str, is_async: bool) -> None:
    """Every order and routing, on engines with time on the host, of vLLM and of SGLang, with decodes beside
    prompts or apart.
    """
    for seed in (*range(15), 296):  # Of 296, e2 took a node for lost of which another copy stayed.
        fleet, trace = random_case(seed, kind)
        fleet = with_engines(fleet, seed, async_scheduling=is_async, front_end_s=0.1 / (1 + seed))
        reference = AsyncPrefixReference if is_async else PrefixReference
        plain, found = reference(fleet, trace).run(), simulate(fleet, trace)
        said = f"seed {seed}, {fleet.policies.queue}, {fleet.policies.routing}"
        assert found.cached_tokens is not None
        assert found.prefill_worker.tolist() == [request.prefill_worker for request in plain.requests], said
        assert found.cached_tokens.tolist() == [max(hit, 0) for hit in plain.first_hit], said
        assert found.preemptions.tolist() == [request.preemptions for request in plain.requests], said
        for what in ("arrival_s", "ttft_s", "e2e_s"):
            theirs = [getattr(request, what) for request in plain.requests]
            np.testing.assert_allclose(getattr(found, what), theirs, rtol=1e-9, atol=1e-9, err_msg=said)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_kernel_and_plain_simulator_agree_on_prefill_and_decode_workers(part: int) -> None:
    """16 random cases each without engine, on a synchronous one and twice on an asynchronous one: every order
    and routing, also those that look at no cache, tight caches, notices of evictions that come late. One case
    in four has mixed workers alone. benchmarks/references.py has as many as one likes.
    """
    for seed in range(part, 64, 4):
        compare_prefix_case(seed)


@pytest.mark.parametrize("seed", [517, 663, 2112])
def test_pending_tokens_are_those_of_prompts_whose_caches_runs_have_evicted(seed: int) -> None:
    """token-jsq counted a prompt as cached whose blocks a run of decode steps had taken by then."""
    compare_prefix_case(seed)


def test_places_of_dlpm_turns_count_what_runs_have_evicted() -> None:
    """A routing that looks at no cache left the evictions of a run for later, and a prompt got a better place
    than its tenant had earned.
    """
    compare_prefix_case(701972)


def test_a_notice_is_read_before_its_node_is_cached_again() -> None:
    """The router took a node for present that was evicted, and computed once more after the notice came."""
    compare_prefix_case(701009)


def pinned_case(seed: int) -> tuple[Fleet, Trace]:
    """A random case with memory for everything, six beginnings of its prompts pinned on some workers."""
    fleet, trace = random_case(seed, "roomy")
    rng = np.random.default_rng(seed)
    pins = []
    for r in rng.integers(0, len(trace), 6).tolist():
        ids = trace.prefix_ids[trace.prefix_offsets[r] : trace.prefix_offsets[r + 1]].tolist()
        workers = rng.choice(fleet.workers, rng.integers(1, fleet.workers + 1), replace=False).tolist()
        if ids:
            length = int(rng.integers(1, len(ids) + 1))
            pins.append(PinnedPrefix(tuple(ids[:length]), trace.prefix_block_tokens, tuple(sorted(workers))))
    policies = replace(fleet.policies, routing="pinned-prefix")
    return replace(fleet, policies=policies, pinned=tuple(pins)), trace


@pytest.mark.long
def test_kernel_and_plain_simulator_agree_on_what_is_pinned() -> None:
    """Hits, times and workers of 15 random cases, and more hits than without pins in all."""
    more = 0
    for seed in range(15):
        fleet, trace = pinned_case(seed)
        plain, found = PrefixReference(fleet, trace).run(), simulate(fleet, trace)
        assert found.cached_tokens is not None
        workers = [request.prefill_worker for request in plain.requests]
        assert found.prefill_worker.tolist() == workers, seed
        assert found.cached_tokens.tolist() == [max(hit, 0) for hit in plain.first_hit], seed
        np.testing.assert_allclose(found.e2e_s, [request.e2e_s for request in plain.requests])
        without = simulate(replace(fleet, pinned=()), trace).cached_tokens
        assert without is not None
        more += int(found.cached_tokens.sum() - without.sum())
    assert more > 0


def test_random_cases_hit_evict_and_preempt() -> None:
    """Else the test above would show little."""
    found = [simulate(*random_case(seed, "tight")) for seed in range(100)]
    assert sum(one.preemptions.sum() for one in found) > 100
    hits = [one.token_hit_frac for one in found]
    assert 0.1 < float(np.mean(np.array(hits, float))) < 0.9


# ------------------------------------------------------------------------------------------------- by hand


def hits(fleet: Fleet, trace: Trace) -> list[int]:
    found = simulate(fleet, trace).cached_tokens
    assert found is not None
    return [int(tokens) for tokens in found]


def test_the_last_token_of_a_prompt_is_computed_always() -> None:
    """Blocks 1 2 twice: of 32 tokens 16 hit. With a 33rd token both blocks do."""
    trace = prefix_trace([0, 10, 20], [[1, 2], [1, 2], [1, 2, 3]], tokens=[32, 32, 33])
    assert hits(cached_fleet(), trace) == [0, 16, 32]


def test_requests_of_one_step_find_the_blocks_of_each_other() -> None:
    """A fan-out of 8 with three blocks in common, all admitted at once: seven find them."""
    trace = prefix_trace([0] * 8, [[1, 2, 3, 10 + i] for i in range(8)])
    assert hits(cached_fleet(budget=512), trace) == [0] + [48] * 7


def test_of_a_large_block_only_the_last_16_tokens_are_computed_again() -> None:
    trace = prefix_trace([0, 10, 20], [[1, 2], [1, 2], [1, 2, 3]], block=64)
    assert hits(cached_fleet(), trace) == [0, 112, 128]


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """6 blocks, two prompts of 32 tokens and 20 of output. At 48 tokens of each all blocks are taken, and the
    second, preempted, loses one to the first: back again it computes but what follows its first two blocks.
    """
    trace = prefix_trace([0, 0], [[1, 2], [3, 4]], outputs=[20, 20])
    found = simulate(cached_fleet(kv_tokens=96), trace, record_parts=True)
    assert found.preemptions.tolist() == [0, 1]
    parts = found.parts[["request", "tokens", "cached_tokens"]].tolist()
    assert parts == [(0, 32, 0), (1, 32, 0), (1, 0, 0), (1, 17, 32)]


def test_output_takes_room_until_it_is_the_oldest() -> None:
    """6 blocks. After a prompt of 2 with 17 tokens of output, 3 are cached; a second one of 2 blocks, and a
    third of 2 take the output's and the first one's last block.
    """
    trace = prefix_trace([0, 10, 20, 30], [[1, 2], [3, 4], [5, 6], [1, 2, 9]], outputs=[17, 1, 1, 1])
    assert hits(cached_fleet(kv_tokens=96), trace)[3] == 32
    trace = prefix_trace([0, 10, 20, 30], [[1, 2], [3, 4], [5, 6, 7], [1, 2, 9]], outputs=[17, 1, 1, 1])
    assert hits(cached_fleet(kv_tokens=96), trace)[3] == 16


def test_what_is_pinned_hits_at_once_stays_and_draws_its_requests() -> None:
    """Two workers of 20 blocks, 1 2 3 pinned on the second. The first prompt hits 48 tokens there. Prompts of
    16 blocks without it (one on each worker, then two more) evict all that is idle: the fifth still hits."""
    pins = (PinnedPrefix((1, 2, 3), 16, (1,)),)
    fleet = cached_fleet(2, kv_tokens=16 * 20, budget=512, routing="pinned-prefix")
    other = [list(range(100 * k, 100 * k + 16)) for k in range(1, 5)]
    trace = prefix_trace([0, 10, 10, 20, 20, 30], [[1, 2, 3, 9], *other, [1, 2, 3, 8]])
    found = simulate(replace(fleet, pinned=pins), trace)
    assert found.cached_tokens is not None and found.cached_tokens.tolist() == [48, 0, 0, 0, 0, 48]
    assert found.prefill_worker[0] == found.prefill_worker[5] == 1
    assert hits(fleet, trace)[5] == 0


def test_a_worker_that_went_down_has_lost_its_pins() -> None:
    pins = (PinnedPrefix((1, 2), 16, (0,)),)
    fleet = replace(cached_fleet(routing="pinned-prefix"), pinned=pins)
    trace = prefix_trace([0, 10], [[1, 2, 3], [1, 2, 4]])
    assert hits(fleet, trace) == [32, 32]
    gone = (Disturbance(5.0, "down", 0), Disturbance(6.0, "up", 0))
    trace = prefix_trace([0, 10, 20], [[1, 2, 3], [1, 2, 4], [1, 2, 5]])
    assert hits(replace(fleet, disturbances=gone), trace) == [32, 0, 32]


@pytest.mark.parametrize(
    ("pin", "routing", "said"),
    [
        (PinnedPrefix((1, 2), 16, (0,)), "min-ttft", "does not go by what is pinned; take routing"),
        (PinnedPrefix((1, 2), 32, (0,)), "pinned-prefix", "blocks of 32 tokens, those of made have 16"),
        (PinnedPrefix((1, 2), 16, (7,)), "pinned-prefix", "worker 7, the fleet has 0 to 0"),
        (PinnedPrefix(tuple(range(1, 9)), 16, (0,)), "pinned-prefix", "no room beside 128 that are pinned"),
    ],
)
def test_pins_that_cannot_be_are_one_line(pin: PinnedPrefix, routing: str, said: str) -> None:
    fleet = replace(cached_fleet(kv_tokens=16 * 12, routing=routing), pinned=(pin,))
    with pytest.raises(InputError, match=said):
        simulate(fleet, prefix_trace([0.0], [list(range(1, 9))]))


def test_a_prefix_that_no_prompt_has_takes_no_memory() -> None:
    """Of 1 2 9 nobody has block 9 there, so 32 tokens are pinned."""
    fleet = replace(cached_fleet(routing="pinned-prefix"), pinned=(PinnedPrefix((1, 2, 9), 16, (0,)),))
    assert hits(fleet, prefix_trace([0.0], [[1, 2, 3]])) == [32]


def test_an_id_under_another_parent_is_another_block() -> None:
    assert hits(cached_fleet(), prefix_trace([0, 10], [[1, 2, 3], [4, 2, 3]])) == [0, 0]


def test_least_recently_used_leaves_first_and_children_before_parents() -> None:
    """Room for 6 nodes, prompts of 3: a, b fill it; a again, then c takes the room of b, b that of a. A short
    c leaves all of a; a short d takes only a's last two nodes where b is younger.
    """
    a, b, c, d = [1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]
    trace = prefix_trace([0, 10, 20, 30, 40, 50], [a, b, a, c, b, a])
    assert hits(cached_fleet(kv_tokens=96), trace) == [0, 0, 32, 0, 0, 0]
    trace = prefix_trace([0, 10, 20, 30, 40], [a, b, a, [*c[:2]], a])
    assert hits(cached_fleet(kv_tokens=96), trace) == [0, 0, 32, 0, 32]
    trace = prefix_trace([0, 10, 20, 30], [a, b, d[:2], a])  # two of a's leave: the third and second
    assert hits(cached_fleet(kv_tokens=96), trace) == [0, 0, 0, 16]


def test_what_two_requests_share_takes_memory_once() -> None:
    """6 blocks of memory. Of the 4 that the second prompt needs the first, still decoding, holds 3."""
    trace = prefix_trace([0, 0.5], [[1, 2, 3], [1, 2, 3, 4]], outputs=[14, 2])
    together = simulate(cached_fleet(kv_tokens=96), trace)
    apart = simulate(cached_fleet(kv_tokens=96), prefix_trace([0, 0.5], [[1, 2, 3], [5, 6, 7, 4]]))
    assert together.cached_tokens is not None and together.cached_tokens.tolist() == [0, 48]
    assert together.ttft_s[1] < apart.ttft_s[1]


def test_a_worker_that_goes_down_has_an_empty_cache() -> None:
    fleet = cached_fleet()
    trace = prefix_trace([0, 10, 20], [[1, 2, 3]] * 3)
    down = (Disturbance(12.0, "down"), Disturbance(13.0, "up"))
    assert hits(fleet, trace) == [0, 32, 32]
    assert hits(replace(fleet, disturbances=down), trace) == [0, 32, 0]


def test_prefill_workers_keep_prefixes_when_decode_workers_go_on() -> None:
    pools = tuple(make_pool(PER_TOKEN, role=role, name=role) for role in ("prefill", "decode"))
    fleet = Fleet(LLM, pools, Policies(prefix_cache=True))
    assert hits(fleet, prefix_trace([0, 30], [[1, 2, 3], [1, 2, 4]], outputs=[3, 3])) == [0, 32]


def test_a_request_preempted_on_its_decode_worker_finds_its_own_blocks() -> None:
    """As on a mixed worker: 6 blocks there, of which the first request has 3 at 48 tokens. The second, whose
    KV came a step later, is preempted at 47, and computes the 16 tokens that follow its first two blocks.
    """
    pools = (
        make_pool(PER_TOKEN, role="prefill", name="prefill"),
        make_pool(PER_TOKEN, role="decode", kv_tokens=96, name="decode"),
    )
    fleet = Fleet(LLM, pools, Policies(prefix_cache=True))
    found = simulate(fleet, prefix_trace([0, 0], [[1, 2], [3, 4]], outputs=[20, 20]), record_parts=True)
    assert found.preemptions.tolist() == [0, 1]
    again = found.parts[found.parts["cached_tokens"] > 0]
    assert again[["request", "tokens", "cached_tokens"]].tolist() == [(1, 16, 32)]


def test_blocks_of_a_hand_off_that_come_too_late_for_a_step_evict_nothing() -> None:
    """6 blocks of a prefill worker that schedules asynchronously, 16 tokens per step of 1/64 s. `x` leaves
    one. `a` takes three; its KV has crossed the link at 1.41 s, in the first of two steps of `b` from 1.4 s
    on. The second was formed at 1.4 s, when `x`, `a` and `b` had 6 blocks: nothing is evicted, and `x` hits
    again. Its new block takes the place of the last one of `a`, which would be computed again anyway.
    """
    no_time = HostTime(0.0, 0.0, 0.0)
    engine = Engine("vllm", "0", True, no_time, no_time, front_end_s=0.0)
    prefill = make_pool(PER_TOKEN, role="prefill", kv_tokens=96, budget=16, name="prefill")
    decode = make_pool(PER_TOKEN, role="decode", name="decode")
    pools = tuple(replace(pool, type=replace(pool.type, engine=engine)) for pool in (prefill, decode))
    latency_s = 1.41 - (1 + 3 / 64)
    fleet = Fleet(LLM, pools, Policies(prefix_cache=True), Network(1e12, latency_s, "serialised"))
    x, a, b = [7], [1, 2, 3], [4, 5]
    trace = prefix_trace([0, 1, 1.4, 3, 4], [x, a, b, [*x, 8], a], outputs=[1, 2, 1, 1, 1])
    assert hits(fleet, trace) == [0, 0, 0, 16, 32]


def test_the_router_hears_of_evictions_late() -> None:
    """Two workers with room for one prompt: `b` drives `a` out of worker 0. While the router does not know it
    sends `a` there again, though worker 0 is at work; when it knows, `a` goes to worker 1.
    """
    a, b = [1, 2, 3], [4, 5, 6]
    busy = prefix_trace([0, 10, 19.99, 20], [a, b, b, a], tokens=[47] * 4)
    seen = {
        late_s: simulate(
            cached_fleet(2, kv_tokens=48, routing="prefix-affinity", eviction_notice_s=late_s), busy
        ).prefill_worker.tolist()
        for late_s in (0.0, 60.0)
    }
    assert seen == {0.0: [0, 0, 0, 1], 60.0: [0, 0, 0, 0]}


@pytest.mark.parametrize("routing", ["prefix-affinity", "min-ttft"])
def test_the_router_hears_of_evictions_in_the_middle_of_a_run(routing: str) -> None:
    """Two workers of 12 blocks. On the first `a` leaves 4 behind, and `b`, of 2 blocks and 160 tokens, has
    taken all 12 in its 145th step of decodes, at 10.17 s. `a` comes again at 10.12 s, when worker 0 has some
    of it, or at 10.18 s, in the same run, when it has nothing.
    """
    a, b = [1, 2, 3, 4], [5, 6]
    went = []
    for again_s in (10.12, 10.18):
        trace = prefix_trace([0, 10, again_s], [a, b, [*a, 9]], outputs=[1, 160, 1])
        found = simulate(cached_fleet(2, kv_tokens=16 * 12, routing=routing), trace)
        went.append(found.prefill_worker.tolist())
    assert went == [[0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(("notice_s", "worker"), [(0.005, 1), (0.02, 0)])
def test_notices_of_evictions_in_a_run_are_as_of_the_step_that_evicts(notice_s: float, worker: int) -> None:
    """The two workers of the test above: at 10.17 s nothing is left of `a` on worker 0. A router that hears
    of it 5 ms later knows at 10.18 s; one that hears of it 20 ms later does not.
    """
    a, b = [1, 2, 3, 4], [5, 6]
    trace = prefix_trace([0, 10, 10.18], [a, b, [*a, 9]], outputs=[1, 160, 1])
    fleet = cached_fleet(2, kv_tokens=16 * 12, routing="prefix-affinity", eviction_notice_s=notice_s)
    assert simulate(fleet, trace).prefill_worker.tolist() == [0, 0, worker]


@pytest.mark.parametrize(
    ("routing", "workers"),
    [
        ("prefix-affinity", [0, 0]),
        ("cache-aware", [0, 0]),
        ("e2", [0, 0]),
        ("d2lpm", [0, 0]),
        ("min-ttft", [0, 1]),
    ],
)
def test_what_is_sent_counts_as_cached_but_for_who_asks_the_workers(routing: str, workers: list[int]) -> None:
    """A prompt of 2.5 s, once more after 0.1 s: computed nowhere, and another worker idle."""
    trace = prefix_trace([0, 0.1], [list(range(160))] * 2)
    fleet = cached_fleet(2, routing=routing, balance_ratio=np.inf)
    assert simulate(fleet, trace).prefill_worker.tolist() == workers


def test_cache_aware_never_hears_of_evictions() -> None:
    """Two workers with room for one prompt. Both got as much, so `c` goes to worker 0 and drives `a` out; the
    router sends `a` there again, where nothing is left of it.
    """
    blocks = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3]]
    trace = prefix_trace([0, 10, 20, 30], blocks, tokens=[47] * 4)
    found = simulate(cached_fleet(2, kv_tokens=48, routing="cache-aware"), trace)
    assert found.prefill_worker.tolist() == [0, 1, 0, 0]
    assert found.cached_tokens is not None and found.cached_tokens.tolist() == [0, 0, 0, 0]


def test_routers_forget_a_worker_that_went_down() -> None:
    """Worker 0 was sent 3 blocks, worker 1 two: a new prompt goes to worker 1, unless worker 0 was down."""
    trace = prefix_trace([0, 10, 20], [[1, 2, 3], [4, 5], [6, 7]])
    fleet = cached_fleet(2, routing="cache-aware")
    down = (Disturbance(12.0, "down"), Disturbance(13.0, "up"))
    assert simulate(fleet, trace).prefill_worker.tolist() == [0, 1, 1]
    assert simulate(replace(fleet, disturbances=down), trace).prefill_worker.tolist() == [0, 1, 0]


def test_everybody_shares_a_block_so_affinity_sends_all_to_who_had_it_first() -> None:
    """The collapse: 200 prompts with one common block, 10 s of work, one of 8 workers does it all."""
    trace = prefix_trace(np.arange(200.0).tolist(), [[0, i + 1, i + 1, i + 1] for i in range(200)])
    found = simulate(cached_fleet(8, routing="prefix-affinity"), trace)
    assert (found.prefill_worker == 0).all()
    even = simulate(cached_fleet(8, routing="round-robin"), trace)
    assert np.bincount(even.prefill_worker).tolist() == [25] * 8


# ------------------------------------------------------------------------------------------------------ e2


def busiest_frac(found: Simulation, since_s: float = 0.0) -> float:
    """Share of the requests from then on that the busiest worker got."""
    workers = found.prefill_worker[found.arrival_s >= since_s]
    return float(np.bincount(workers).max() / len(workers))


def hot_prefix(arrival_s: list[float]) -> Trace:
    """Requests of 512 shared and 128 own tokens: 1/8 s of work each where the prefix is cached."""
    return prefix_trace(
        arrival_s, [[*range(32), *range(1000 + 8 * i, 1008 + 8 * i)] for i in range(len(arrival_s))]
    )


def test_e2_sends_on_what_its_heaviest_worker_would_get() -> None:
    """Ten of these a second are 1.25 s of work per second: without rebalancing one of two workers gets all,
    and its queue grows; with Th_bal = 1.5 the other gets at least its 1 / (1 + 1.5) of the load.
    """
    trace = hot_prefix(np.arange(0, 40, 0.1).tolist())
    found = {
        ratio: simulate(cached_fleet(2, routing="e2", balance_ratio=ratio, replicate_ratio=np.inf), trace)
        for ratio in (1.5, np.inf)
    }
    assert busiest_frac(found[np.inf]) == 1.0 and found[np.inf].ttft_s[-1] > 9
    assert busiest_frac(found[1.5]) < 0.61 and found[1.5].ttft_s.max() < 2


def test_e2_replicates_a_prefix_whose_requests_wait_ever_longer() -> None:
    """For 60 s one request a second, then eight at once, each second: a second's work. The mean wait of the
    late half of the window of 60 s is more than twice that of the early half, so the prefix goes to the
    second worker too, and from then on either serves it. Without that the first has it all.
    """
    trace = hot_prefix([float(s) for s in range(60)] + [60.0 + s for s in range(60) for _ in range(8)])
    found = {
        ratio: simulate(
            cached_fleet(2, routing="e2", balance_ratio=np.inf, replicate_ratio=ratio, share_window_s=60.0),
            trace,
        )
        for ratio in (2.0, np.inf)
    }
    assert busiest_frac(found[np.inf]) == 1.0
    assert found[2.0].prefill_worker[:60].tolist() == [0] * 60
    assert busiest_frac(found[2.0], since_s=90.0) < 0.75
    late = trace.arrival_s >= 90
    assert found[2.0].ttft_s[late].mean() < 0.7 * found[np.inf].ttft_s[late].mean()


def test_e2_replicates_no_more_than_once_in_a_window() -> None:
    """Four workers, the prefix of the test above, and twice as much of it: at the end of the window in which
    the waits grew two workers have it, one more a window later.
    """
    trace = hot_prefix([float(s) for s in range(60)] + [60.0 + s for s in range(60) for _ in range(16)])
    fleet = cached_fleet(4, routing="e2", balance_ratio=np.inf, share_window_s=60.0)
    workers = simulate(fleet, trace).prefill_worker
    assert len(set(workers[trace.arrival_s < 110].tolist())) == 2


def test_e2_splits_what_follows_a_replicated_prefix_by_load() -> None:
    """The prefix of the tests above, followed by one of four tools of 64 tokens in turn, then 64 of its own:
    (64 + 1) / 1024 s of work each, so the tools are a quarter of the load each. Once the prefix is replicated
    two of them live on each worker, though every request could go to either; a fifth tool, of which nobody
    knew then, goes to whoever has less to do.
    """
    arrival_s = [float(s) for s in range(60)] + [60.0 + s for s in range(60) for _ in range(12)]
    tools = [i % 4 if s < 110 else i % 5 for i, s in enumerate(arrival_s)]
    blocks = [
        [*range(32), *range(100 + 4 * tool, 104 + 4 * tool), *range(1000 + 4 * i, 1004 + 4 * i)]
        for i, tool in enumerate(tools)
    ]
    fleet = cached_fleet(2, routing="e2", balance_ratio=np.inf, share_window_s=60.0)
    found = simulate(fleet, prefix_trace(arrival_s, blocks))
    workers = found.prefill_worker
    split_s = found.arrival_s[np.flatnonzero(workers != workers[0])[0]]
    late, tool = found.arrival_s > split_s, np.array(tools)
    homes = [set(workers[late & (tool == k)].tolist()) for k in range(5)]
    assert 60.0 < split_s < 110.0
    assert sorted(map(sorted, homes[:4])) == [[0], [0], [1], [1]] and homes[4] == {0, 1}


def test_e2_expects_outputs_as_long_as_those_that_finished() -> None:
    """Two workers, decode steps of a token's time. A prompt of 64 tokens with 1,000 of output goes to worker
    0; until it has ended at 1.04 s nobody knows of its output, so the next prompts of 32 tokens, which find
    less to do on worker 1, go there until it has had 64 tokens too. Then that output counts, and all go to
    worker 1 until its own, of 1 token each, weigh as much.
    """
    own = iter(range(0, 4000, 10))
    arrival_s = [0.0, 0.1, 0.2, 0.3, *(2.0 + 0.1 * i for i in range(20))]
    blocks = [
        [start + k for k in range(4 if i == 0 else 2)] for i, start in zip(range(24), own, strict=False)
    ]
    trace = prefix_trace(arrival_s, blocks, outputs=[1000] + [1] * 23)
    found = simulate(cached_fleet(2, routing="e2", decode_batch=1), trace)
    assert found.prefill_worker.tolist() == [0, 1, 1, 0, *[1] * 20]


def test_the_less_there_is_to_do_the_more_e2_dynamic_explores() -> None:
    """640 of 672 tokens of a prompt are cached on worker 0, that is .95. One of these every 10 s, 32/1024 s
    of work, is next to nothing: more than .99 would have to be cached, so the other worker gets them too.
    Every 1/30 s one is .94 s of work per s on one worker, half of what two could do: .75 is enough.
    """
    for gap_s, fewest, most in ((10.0, 0.4, 0.6), (1 / 30, 0.0, 0.2)):
        arrival_s = [gap_s * i for i in range(200)]
        blocks = [[*range(40), 1000 + 2 * i, 1001 + 2 * i] for i in range(200)]
        trace = prefix_trace(arrival_s, blocks)
        fleet = cached_fleet(2, routing="e2-dynamic", balance_ratio=np.inf, replicate_ratio=np.inf)
        workers = simulate(fleet, trace).prefill_worker
        assert fewest <= (workers != workers[100]).mean() <= most, gap_s


def test_a_request_that_e2_routes_again_after_its_window_has_not_waited_yet() -> None:
    """Of two long outputs on worker 0 the second shares a prefix in the window, and its wait is counted; the
    window of 2 s is long past when the worker dies at 4 s. Worker 1 has to compute both prompts again.
    At 21.9 s the prefix's requests have waited 0 s in the early half (20.2 s) and 0.4 s in the late half
    (21.4 s, behind another prompt of 0.5 s), so it is replicated to worker 0, up again since 21.6 s. Were the
    first wait still counted off when the second window forgets it, nobody would have waited of late.
    """
    shared = list(range(32))
    own = iter(range(1000, 2000))
    arrival_s = [0.0, 0.5, 20.0, 20.2, 21.3, 21.4, 21.9]
    blocks = [
        [*(shared if s != 21.3 else []), *(next(own) for _ in range(8 if s != 21.3 else 32))]
        for s in arrival_s
    ]
    trace = prefix_trace(arrival_s, blocks, outputs=[3000, 3000, 1, 1, 1, 1, 1])
    fleet = replace(
        cached_fleet(2, routing="e2", balance_ratio=np.inf, share_window_s=2.0),
        disturbances=(Disturbance(4.0, "down"), Disturbance(21.6, "up")),
    )
    found = simulate(fleet, trace)
    assert found.prefill_worker.tolist() == [1, 1, 1, 1, 1, 1, 0]
    assert found.queue_s[3] == 0.0 and found.queue_s[5] == pytest.approx(0.4, abs=0.01)


def test_e2_explores_on_the_worker_that_decodes() -> None:
    """Worker 0 has a prompt of 5/8 s, worker 1 one of 1/32 s and 2,000 tokens of output, 2 s of decodes.
    Prompts of 5/8 s go to worker 0 until it has more than 2 s. Where decodes may be half of a load, the first
    four go to worker 1: 2 / (2 + 1/32 + 3 * 5/8) is still more than that, with 4 it is less.
    """
    own = [[100 + 40 * i + k for k in range(40)] for i in range(7)]
    trace = prefix_trace([0.0, 1.0, *range(10, 16)], [own[0], [1, 2], *own[1:]], outputs=[1, 2000, *[1] * 6])
    went = {
        frac: simulate(cached_fleet(2, routing="e2", explore_decode_frac=frac), trace).prefill_worker.tolist()
        for frac in (0.5, 1.0)
    }
    assert went == {1.0: [0, 1, 0, 0, 0, 1, 0, 1], 0.5: [0, 1, 1, 1, 1, 1, 0, 0]}


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"routing": "e2", "prefix_cache": False}, "routing is 'e2', which needs prefix_cache: true"),
        ({"queue": "lpm", "prefix_cache": False}, "queue is 'lpm', which needs prefix_cache: true"),
        ({"decode_routing": "e2"}, "decode_routing is 'e2', must not look at prefixes"),
        ({"batching": "orca"}, "batching is 'orca', must be vllm-v1 or sarathi with prefix_cache"),
        ({"pools": "flip"}, "pools is 'flip', must be static with prefix_cache"),
        ({"tenant_weights": (("nobody", 2.0),)}, "tenant_weights names 'nobody', must be tenants of the"),
    ],
)
def test_policies_that_do_not_go_together_are_one_line(policies: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        simulate(cached_fleet(**policies), prefix_trace([0], [[1]]))  # type: ignore[arg-type]


def test_blocks_that_are_no_multiple_of_the_kv_block_are_refused() -> None:
    with pytest.raises(InputError, match="blocks of 24 tokens, must be a multiple of 16"):
        simulate(cached_fleet(), prefix_trace([0], [[1]], block=24))


# ------------------------------------------------------------------------------------------------- fairness


def adversary(seed: int, *, tenants: int = 3, longest: int = 16) -> Trace:
    """Everything is asked at once. Each tenant has its own lengths, from many short to few long prompts."""
    rng = np.random.default_rng(seed)
    rows = []
    for u in range(tenants):
        most = int(rng.integers(1, longest + 1))
        for _ in range(800 // most):
            depth = int(rng.integers(1, most + 1))
            shared = int(rng.integers(depth))
            own = rng.integers(1000, 10**6, depth - shared).tolist()
            rows.append((u, [10 * u + 1] * shared + own, int(rng.integers(1, 8))))
    order = rng.permutation(len(rows)).tolist()
    return prefix_trace(
        [0.0] * len(rows),
        [rows[i][1] for i in order],
        outputs=[rows[i][2] for i in order],
        tenant=[rows[i][0] for i in order],
    )


def largest_gap(fleet: Fleet, trace: Trace) -> float:
    """Of the services of two tenants (over weight), between any two moments at which all wait. They come from
    the plain simulator, which sees every token and must agree with the kernel.
    """
    plain, found = PrefixReference(fleet, trace).run(), simulate(fleet, trace)
    np.testing.assert_allclose(found.e2e_s, [request.e2e_s for request in plain.requests])
    end_s = min(
        max(request.scheduled_s for request in plain.requests if plain.tenant[request.index] == u)
        for u in range(len(trace.tenants))
    )
    services = np.zeros((len(plain.events_of_service), len(trace.tenants)))
    for k, (time_s, u, service) in enumerate(plain.events_of_service):
        if time_s < end_s:
            services[k, u] = service / plain.weights[u]
    total = services.cumsum(axis=0)
    gaps = [
        np.ptp(total[:, f] - total[:, g]) for f in range(total.shape[1]) for g in range(f)
    ]  # between any two moments: highest less lowest difference so far, in either order
    return float(max(gaps))


@pytest.mark.parametrize("quantum", [16, 256, 2048])
def test_dlpm_keeps_backlogged_tenants_within_twice_u_and_the_quantum(quantum: int) -> None:
    """|W_f - W_g| <= 2 (U + Q_u), U = w_e L_input + w_q M: the longest prompt, tokens that a step may add (8
    seats, one token each).
    """
    for seed in range(3):
        fleet = cached_fleet(queue="dlpm", quantum_tokens=quantum, kv_tokens=16 * 64)
        trace = adversary(seed)
        bound = 2 * (trace.input_tokens.max() + 2.0 * 8 + quantum)
        assert largest_gap(fleet, trace) <= bound


@pytest.mark.parametrize("quantum", [16, 256, 2048])
def test_dlpm_by_numbers_keeps_them_within_four_times_that(quantum: int) -> None:
    """Numbered when sent, all at once, prompts that share nothing, outputs free: a turn of a tenant is up to
    Q_u + L_input of prompts, and nobody is more than a turn ahead. What is cached by the time a prompt is
    computed its number does not know, so where prompts share, service is less than was charged.
    """
    for seed in range(3):
        fleet = cached_fleet(queue="dlpm-turns", quantum_tokens=quantum, kv_tokens=16 * 64, output_weight=0.0)
        trace = adversary(seed)
        trace = replace(trace, prefix_ids=np.arange(len(trace.prefix_ids)))
        assert (
            largest_gap(fleet, trace) <= 2 * (trace.input_tokens.max() + quantum) + trace.input_tokens.max()
        )


def latency_case(seed: int) -> Trace:
    """A tenant with a short prompt every 4 s, and two who always ask for more than there is: 1,200 short and
    120 long prompts at once.
    """
    rng = np.random.default_rng(seed)
    rows = [(0.0, 1, [11] * 3 + rng.integers(1000, 10**6, rng.integers(1, 3)).tolist()) for _ in range(1200)]
    rows += [(0.0, 2, [21] * 3 + rng.integers(1000, 10**6, 13).tolist()) for _ in range(120)]
    rows += [(4.0 * k + rng.uniform(0, 2), 0, rng.integers(1000, 10**6, 2).tolist()) for k in range(8)]
    order = sorted(range(len(rows)), key=lambda i: (rows[i][0], rng.random()))
    return prefix_trace(
        [rows[i][0] for i in order],
        [rows[i][2] for i in order],
        outputs=rng.integers(1, 8, len(rows)).tolist(),
        tenant=[rows[i][1] for i in order],
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_with_dlpm_who_asks_for_little_waits_no_longer_than_the_bound(workers: int) -> None:
    """Theorems A.2 and A.4: a request of a tenant that neither waits nor runs is admitted within
    2 (n - 1) (U + Q_u) / a, on N workers N times that, U = w_e L_input + w_q M; a worker gives at least a =
    1,024 of service per second, one per token. With lpm it waits longer than that: others' prefixes are
    cached, its own never.
    """
    longest = 0.0
    for seed in range(4):
        trace = latency_case(seed)
        fleet = cached_fleet(
            workers, routing="d2lpm", queue="dlpm", quantum_tokens=64, worker_quantum_tokens=512, seats=4
        )
        bound_s = workers * 2 * 2 * (trace.input_tokens.max() + 2.0 * 8 * 4 + 64) / 1024
        found = simulate(fleet, trace)
        alone = [
            i
            for i in np.flatnonzero(trace.tenant == 0).tolist()
            if not ((trace.tenant[:i] == 0) & (found.arrival_s + found.e2e_s > trace.arrival_s[i])[:i]).any()
        ]
        assert len(alone) >= 6
        longest = max(longest, float(found.queue_s[alone].max() / bound_s))
        if workers == 1:
            lpm = simulate(replace(fleet, policies=replace(fleet.policies, queue="lpm")), trace)
            assert lpm.queue_s[trace.tenant == 0].max() > bound_s
    assert 0.02 < longest <= 1.0


def test_vtc_keeps_backlogged_tenants_within_twice_u() -> None:
    for seed in range(3):
        trace = adversary(seed)
        fleet = cached_fleet(queue="vtc", kv_tokens=16 * 64, tenant_weights=(("t1", 2.0),))
        assert largest_gap(fleet, trace) <= 2 * (trace.input_tokens.max() + 2.0 * 8)


def test_lpm_knows_no_such_bound() -> None:
    """Else the tests above would show little: whoever's prefixes are cached goes first."""
    trace = adversary(0)
    assert largest_gap(cached_fleet(queue="lpm", kv_tokens=16 * 64), trace) > 2 * (256 + 16 + 16)


def test_d2lpm_with_dlpm_keeps_them_within_n_times_that() -> None:
    """N workers: 2 N (U + Q_u)."""
    for seed in range(3):
        fleet = cached_fleet(
            3, routing="d2lpm", queue="dlpm", quantum_tokens=256, worker_quantum_tokens=512, kv_tokens=16 * 64
        )
        trace = adversary(seed)
        assert largest_gap(fleet, trace) <= 2 * 3 * (trace.input_tokens.max() + 2.0 * 8 + 256)


def test_debt_survives_rejoining() -> None:
    """t0 always waits with prompts of 160 tokens, t1 comes back with one of 640 once it is served. Were its
    debt forgotten at Q_u = 160, it would get four times the service; kept, it gets what t0 does, less the
    credit it loses each time it has nothing to ask.
    """
    n = 160
    trace = prefix_trace(
        [0.0] * n + [0.0] * 25,
        [[i + 1000] * 10 for i in range(n)] + [[i + 9000] * 40 for i in range(25)],
        tenant=[0] * n + [1] * 25,
    )
    # t1's k-th prompt comes just after its (k - 1)-th was served: one seat, times from the run before
    fleet = cached_fleet(queue="dlpm", quantum_tokens=160, seats=1)
    arrival_s = np.array(trace.arrival_s)
    for k in range(1, 25):
        order = np.argsort(arrival_s, kind="stable")
        found = simulate(fleet, trace.select(order, arrival_s=arrival_s[order]))
        done_s = np.empty(len(order))
        done_s[order] = found.arrival_s + found.e2e_s
        arrival_s[n + k] = done_s[n + k - 1] + 0.01
        arrival_s[n + k + 1 :] = 1e4
    end_s = done_s[n + 23]
    served = trace.input_tokens * (done_s <= end_s)
    assert 0.75 < served[n:].sum() / served[:n].sum() < 1.05


def test_service_of_tenants_and_jains_index() -> None:
    """Two tenants, weights 1 and 2, prompts of 32 and 64 tokens every second, one token each, which weighs 2:
    34 and 66 per second; by weight 34 and 33.
    """
    arrival_s = np.repeat(np.arange(20.0), 2)
    blocks = [ids for i in range(20) for ids in ([2 * i, 1], [2 * i + 1, 1, 1, 1])]
    trace = prefix_trace(arrival_s.tolist(), blocks, tenant=[0, 1] * 20)
    fleet = cached_fleet(tenant_weights=(("t1", 2.0),))
    service = tenant_service(simulate(fleet, trace))
    assert service.tokens_per_s[1] / service.tokens_per_s[0] == pytest.approx(66 / 34, rel=0.06)
    assert service.jain_index == pytest.approx(1.0, abs=0.01)
    assert jain_index(np.array([1.0, 0.0, 0.0, 0.0])) == 0.25


@pytest.mark.parametrize(("output_weight", "second"), [(1.0, 41), (2.0, 66), (0.0, 16)])
def test_service_weighs_tokens_as_the_policies_do(output_weight: float, second: float) -> None:
    """Every second a prompt of 64 tokens with 1 of output, and one of 16 with 25: 64 + w and 16 + 25 w."""
    first = 64 + output_weight
    arrival_s = np.repeat(np.arange(60.0), 2)
    blocks = [ids for i in range(60) for ids in ([4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3], [4 * i + 1000])]
    trace = prefix_trace(arrival_s.tolist(), blocks, outputs=[1, 25] * 60, tenant=[0, 1] * 60)
    service = tenant_service(simulate(cached_fleet(output_weight=output_weight), trace))
    assert service.tokens_per_s == pytest.approx([first, second], rel=0.05)
    assert service.jain_index == pytest.approx(jain_index(np.array([first, second])), abs=0.03)


def test_policies_come_back_from_the_file_they_are_written_to(tmp_path: Path) -> None:
    read = tmp_path / "fleet.yaml"
    read.write_text(
        "llm: meta-llama/Llama-3.1-70B\n"
        "workers: [{gpu: h100-80g, tp: 8}]\n"
        "policies: {prefix_cache: true, routing: e2, queue: dlpm, share_window: 60 s, quantum_tokens: 5000,\n"
        "  worker_quantum_tokens: 7, priority_groups: 4, balance_ratio: 3, balance_requests: 8,\n"
        "  replicate_ratio: 4, eviction_notice: 2 s, explore_decode: 0.7, cache_threshold: 0.5,\n"
        "  decode_batch: 1,\n"
        "  extend_weight: 2, output_weight: 3,\n"
        "  tenant_weights: {a: 2, b: 0.5}}\n"
    )
    first = read_fleet(read, read_catalog())
    written = tmp_path / "again.yaml"
    written.write_text(to_yaml(fleet_document(first)))
    assert first.policies.replicate_ratio == 4.0
    assert first.policies.tenant_weights == (("a", 2.0), ("b", 0.5))
    assert read_fleet(written, read_catalog()).policies == first.policies


def test_a_trace_without_block_ids_is_refused() -> None:
    fleet = Fleet(LLM, (make_pool(make_latency()),), Policies(prefix_cache=True))
    with pytest.raises(InputError, match="has no block ids"):
        simulate(fleet, make_trace([0.0], [8], [2]))
