"""The router's decisions against the simulator's, whose code they are, and the books they go by."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from routed_traces import ARRIVES, FINISHES, IS_ADMITTED, IS_COMPUTED, events_of, prompts_trace
from runtime_fakes import LATENCY, LLM, fleet_of, worker_type

from planner.errors import InputError
from planner.fleet import Fleet, PinnedPrefix, Policies, Pool
from planner.models.lora import Lora, LoraCost, LoraSlots
from planner.policies import ROUTING
from planner.runtime import live_routing
from planner.runtime.events import FREE
from planner.runtime.live_routing import LiveFleet, priority_number
from planner.runtime.prompt_blocks import BlockNumbers, blocks_of
from planner.simulator import Simulation, simulate
from planner.simulator.cache_layout import WORKER_QUANTUM_TOKENS
from planner.traffic.trace import Trace

ELSEWHERE = ("kv-token-jsq", "least-waiting")  # of other batchings
BY_TOKENS = ("best-fit-rebalanced",)  # of running outputs: tests/runtime/test_runtime_predictions.py
LIVE = [name for name in ROUTING if name not in (*ELSEWHERE, *BY_TOKENS)]
WITHOUT_CACHES = [name for name in LIVE if not ROUTING[name].needs_caches]


def two_speeds(shape: str, policies: Policies, kv_tokens: int = 160_000) -> Fleet:
    """Workers of two speeds, five mixed ones or three that prefill and four that decode."""
    fast = replace(worker_type(kv_tokens=kv_tokens), max_num_batched_tokens=8192)
    slow = replace(fast, latency=LATENCY.with_longer_steps(0.7))
    if shape == "mixed":
        return Fleet(LLM, (Pool("a", "mixed", fast, 3), Pool("b", "mixed", slow, 2)), policies)
    front = Pool("p", "prefill", fast, 2), Pool("q", "prefill", slow, 1)
    return Fleet(LLM, (*front, Pool("d", "decode", fast, 2), Pool("e", "decode", slow, 2)), policies)


def driven(
    fleet: Fleet,
    trace: Trace,
    s: Simulation,
    *,
    admissions: bool = True,
    follows: bool = False,
    numbers: list[int] | None = None,
) -> tuple[LiveFleet, list[int], list[int]]:
    """A live fleet told what happened in a simulation; where it sent every request's prompt and decodes. What
    it numbers them by goes to `numbers`.

    With `follows` it is overruled wherever it would have chosen another worker, so that it has the same past.
    """
    live = LiveFleet(fleet, lengths=(float(trace.input_tokens.mean()), float(trace.output_tokens.mean())))
    for w in range(fleet.workers):
        live.note_up(w)
    for prefix in fleet.pinned:
        for w in prefix.workers:
            live.pin_prompt(w, prefix.block_ids)
    seats: dict[int, int] = {}
    front, back = [-1] * len(trace), [-1] * len(trace)
    for kind, time_s, i in events_of(s, admissions=admissions):
        outputs = int(trace.output_tokens[i])
        if kind == ARRIVES:
            names = trace.prefix_ids[trace.prefix_offsets[i] : trace.prefix_offsets[i + 1]].tolist()
            tenant = trace.tenants[trace.tenant[i]] if trace.tenants else ""
            seats[i] = live.take_seat(int(trace.input_tokens[i]), outputs, time_s, names=names, tenant=tenant)
            front[i] = back[i] = known(live.send_to_worker(seats[i], time_s))
            if numbers is not None:
                numbers.append(known(live.queue_number(seats[i])))
            if follows and front[i] != s.prefill_worker[i]:
                live.note_left(seats[i], time_s)
                live.send_to_worker(seats[i], time_s, set(range(fleet.workers)) - {int(s.prefill_worker[i])})
        elif kind == IS_ADMITTED:
            live.note_admitted(seats[i], time_s)
        elif kind == IS_COMPUTED:
            live.note_computed(seats[i], time_s)
            if live.roles[front[i]] == "prefill" and outputs > 1:
                live.note_left(seats[i], time_s)
                back[i] = known(live.hand_off(seats[i], time_s))
        if kind == FINISHES or (kind == IS_COMPUTED and outputs == 1):
            live.note_left(seats[i], time_s, outputs)
            live.release_seat(seats.pop(i))
    return live, front, back


def known(worker: int | None) -> int:
    assert worker is not None
    return worker


def is_idle(live: LiveFleet) -> bool:
    return not any(
        live.workers[name].any() for name in ("assigned", "pending_tokens", "assigned_tokens", "used_blocks")
    )


def a_live(
    policies: Policies | None = None, workers: int = 2, *, kv_tokens: int = 16_000, is_up: bool = True
) -> LiveFleet:
    pool = Pool("w", "mixed", worker_type(kv_tokens=kv_tokens), workers)
    live = LiveFleet(Fleet(LLM, (pool,), policies or Policies()))
    for w in range(workers if is_up else 0):
        live.note_up(w)
    return live


def prefix_policies(routing: str = "prefix-affinity", **more: Any) -> Policies:
    return Policies(routing=routing, prefix_cache=True, **more)


def served(live: LiveFleet, time_s: float, names: Sequence[int], outputs: int = 1, tenant: str = "") -> int:
    """A request, alone, from its arrival to its end; where it was."""
    seat = live.take_seat(16 * len(names) + 1, outputs, time_s, names=names, tenant=tenant)
    w = known(live.send_to_worker(seat, time_s))
    live.note_computed(seat, time_s)
    live.note_left(seat, time_s, outputs)
    live.release_seat(seat)
    return w


@pytest.mark.long
@pytest.mark.parametrize("shape", ["mixed", "pairs"])
@pytest.mark.parametrize("routing", LIVE)
def test_every_choice_is_the_simulators(routing: str, shape: str) -> None:
    """Two seeds of 400 prompts with shared beginnings on workers of two speeds, each with prefix caches
    and, where the policy does without, without. Told when a simulated run's requests arrive, are admitted,
    are computed and end, the live fleet sends each of them, prompt and decodes, where the simulation did.
    Memory is never short, and a prompt is computed in one step: of its chunks a router sees nothing."""
    plain = routing in WITHOUT_CACHES
    for seed, caches in itertools.product(range(2), (True, False) if plain else (True,)):
        policies = Policies(
            routing=routing,
            decode_routing="jsq" if ROUTING[routing].reads_cache_state else routing,
            prefix_cache=caches,
            seed=seed,
            ttft_s=1.0,
            tbt_s=0.0035,
            tenant_weights=(("b", 2.0),),
            worker_quantum_tokens=300,
            share_window_s=0.15,
            heavy_tokens=4,
            load_period_s=0.02,
        )
        fleet = two_speeds(shape, policies)
        trace = prompts_trace(400, 1200.0 if shape == "mixed" else 600.0, seed=seed)
        simulation = simulate(fleet, trace)
        assert not simulation.status.any() and not simulation.preemptions.any()
        live, front, back = driven(fleet, trace, simulation)
        assert front == simulation.prefill_worker.tolist()
        assert back == simulation.decode_worker.tolist()
        assert is_idle(live)
        if not ROUTING[routing].by_formula:  # those pack
            assert len(set(front)) == (5 if shape == "mixed" else 3)


def test_pinned_prefixes_draw_their_requests_as_in_the_simulator() -> None:
    """Two of the twelve documents pinned on one worker each, one on two: 400 prompts, every choice is the
    simulator's, and those of the documents are computed nowhere else."""
    pins = [
        PinnedPrefix((100 * k, 100 * k + 1, 100 * k + 2), 16, w) for k, w in enumerate([(4,), (1,), (0, 3)])
    ]
    fleet = replace(two_speeds("mixed", prefix_policies("pinned-prefix")), pinned=tuple(pins))
    trace = prompts_trace(400, 1200.0, seed=7)
    simulation = simulate(fleet, trace)
    live, front, _ = driven(fleet, trace, simulation)
    assert front == simulation.prefill_worker.tolist()
    first = trace.prefix_ids[trace.prefix_offsets[:-1]]
    for k, pin in enumerate(pins):
        assert set(np.array(front)[first == 100 * k]) == set(pin.workers)
    assert live.workers["used_blocks"].tolist() == [3, 3, 0, 3, 3]


@pytest.mark.parametrize(("routing", "caches"), [("jsq", True), ("d2lpm", True), ("jsq", False)])
def test_numbers_order_prompts_as_in_the_simulator(routing: str, caches: bool) -> None:
    """An engine by dlpm-turns in the simulator admits, whenever it does, that of the prompts that wait with
    the smallest number of the router, told what happens there. They do wait: 900 prompts at once, four seats.
    """
    policies = Policies(
        routing=routing,
        prefix_cache=caches,
        queue="dlpm-turns",
        quantum_tokens=150,
        worker_quantum_tokens=300,
        tenant_weights=(("b", 2.0),),
    )
    fleet = two_speeds("mixed", policies).with_types(lambda kind: replace(kind, max_num_seqs=4))
    trace = prompts_trace(900, 20_000.0, seed=3)
    found = simulate(fleet, trace)
    numbers: list[int] = []
    _, front, _ = driven(fleet, trace, found, numbers=numbers)
    assert front == found.prefill_worker.tolist() and not found.preemptions.any()
    worker, number = np.array(front), np.array(numbers)
    start_s, by_arrival = found.arrival_s + found.queue_s, 0
    for i in np.flatnonzero(found.queue_s > 0.0).tolist():
        waits = (worker == worker[i]) & (found.arrival_s < start_s[i]) & (start_s > start_s[i] + 1e-9)
        assert (number[waits] >= number[i]).all()
        by_arrival += bool((found.arrival_s[waits] < found.arrival_s[i]).any())
    assert by_arrival > 100


@pytest.mark.parametrize("routing", [*WITHOUT_CACHES, "cache-aware", "d2lpm"])
def test_without_hearing_of_admissions_these_choices_are_the_same(routing: str) -> None:
    """What the router itself is told: arrival, first byte, end. Not the same are then choices by what is left
    to compute of prompts of which others compute the same, and by e2's waits."""
    policies = Policies(
        routing=routing,
        prefix_cache=routing not in WITHOUT_CACHES,
        ttft_s=1.0,
        tbt_s=0.0035,
        worker_quantum_tokens=300,
    )
    fleet, trace = two_speeds("mixed", policies), prompts_trace(400, 1200.0, seed=4)
    simulation = simulate(fleet, trace)
    assert driven(fleet, trace, simulation, admissions=False)[1] == simulation.prefill_worker.tolist()


@pytest.mark.parametrize(
    ("routing", "most"), [("jsq", 60), ("least-outstanding", 0), ("min-ttft", 6), ("e2", 13), ("d2lpm", 24)]
)
def test_with_memory_short_few_choices_are_others(routing: str, most: int) -> None:
    """Caches of 150 blocks, of which engines run short, drop what they had, and preempt; admissions are not
    told. After the same past, of 400 requests at most so many would have gone elsewhere (over five seeds jsq
    7.3 %, d2lpm 3.5 %, min-ttft 0.6 %, e2 0.1 %, and none where only requests count). What is preempted a
    router does not hear, and this seed has most of it; of output, which stays cached, it hears at the end."""
    policies = Policies(routing=routing, prefix_cache=True, worker_quantum_tokens=300)
    fleet, trace = two_speeds("mixed", policies, 2400), prompts_trace(400, 1200.0, seed=4)
    simulation = simulate(fleet, trace)
    live, front, _ = driven(fleet, trace, simulation, admissions=False, follows=True)
    assert (np.array(front) != simulation.prefill_worker).sum() <= most
    assert is_idle(live)


def test_a_cache_is_known_to_the_block_while_numbers_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 prompts in turn on one worker of 40 blocks, of a tree with 4^5 leaves, against a list of blocks by
    last use kept by hand; there are 64 numbers for blocks to begin with, and never more than 256."""
    monkeypatch.setattr(live_routing, "NODES", 64)
    live, rng = a_live(prefix_policies(), 1, kv_tokens=640), np.random.default_rng(3)
    cached: OrderedDict[int, None] = OrderedDict()
    blocks_seen = set()
    for k in range(2000):
        turns = rng.integers(4, size=rng.integers(1, 6)).tolist()
        names = [hash(tuple(turns[: depth + 1])) for depth in range(len(turns))]
        blocks_seen.update(names)
        hits = next((depth for depth, name in enumerate(names) if name not in cached), len(names))
        seat = live.take_seat(16 * len(names) + 1, 1, float(k), names=names)
        live.send_to_worker(seat, float(k))
        assert live.caches.prompts["expected_tokens"][seat] == 16 * hits
        for name in names:
            cached.pop(name, None)
        while len(cached) + len(names) + 1 > 40:
            cached.popitem(last=False)
        cached.update(dict.fromkeys(reversed(names)))
        live.note_computed(seat, float(k))
        live.note_left(seat, float(k), 1)
        live.release_seat(seat)
        assert live.caches.workers["idle_blocks"][0] == len(cached)
    assert len(blocks_seen) > 600 and len(live.nodes) <= 256 and is_idle(live)


def test_seats_are_used_again_and_made_when_they_run_out() -> None:
    """5000 requests one after the other need no more seats than there are; 3000 at once need 4096."""
    live = a_live()
    for k in range(5000):
        served(live, float(k), ())
    assert len(live.state.requests) == 1024
    seats = [live.take_seat(10, 10, 5000.0) for _ in range(3000)]
    assert len(set(seats)) == 3000 and len(live.state.requests) == 4096


def test_the_window_of_e2_keeps_its_seats_until_it_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 requests/s and a window of 5 s: 500 are in it, so 1024 seats do. Where there may be no more than
    1024 a window without end is cut short."""
    live = a_live(prefix_policies("e2", share_window_s=5.0))
    for k in range(5000):
        served(live, k / 100, (k % 7, 100 + k % 50))
    assert len(live.state.requests) == 1024
    assert 500 <= live.caches.workers["routed"].sum() <= 501
    monkeypatch.setattr(live_routing, "WINDOW_SEATS", 1024)
    live = a_live(prefix_policies("e2", share_window_s=np.inf))
    for k in range(5000):
        served(live, k / 100, (k % 7, 100 + k % 50))
    assert len(live.state.requests) == 1024


def test_what_was_only_sent_is_forgotten_once_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """cache-aware hears of no eviction. Two caches of 100 blocks: what is believed of 8000 prompts of two
    blocks stays below 8 times what they hold, and the latest of them is still known."""
    monkeypatch.setattr(live_routing, "NODES", 64)
    live = a_live(prefix_policies("cache-aware"), kv_tokens=1600)
    for k in range(8000):
        w = served(live, float(k), (2 * k, 2 * k + 1))
    assert len(live.nodes) <= 1600 and len(live.caches.path) < 10_000
    assert live.caches.workers["known_tree_nodes"].sum() == np.bitwise_count(live.caches.holders).sum()
    assert served(live, 8000.0, (15_998, 15_999)) == w


def test_a_worker_that_was_down_is_asked_nothing_and_has_nothing() -> None:
    """Both know the prompt's worker; it goes down with a request on it, which its end, late, does not count
    twice. The prompt goes to the other worker, and stays there when the first is back."""
    live, names = a_live(prefix_policies()), (1, 2, 3)
    first = served(live, 0.0, names)
    seat = live.take_seat(49, 20, 1.0, names=names)
    assert live.send_to_worker(seat, 1.0) == first
    live.note_computed(seat, 1.1)
    live.note_down(first, 1.2)
    other = served(live, 1.3, names)
    assert other == 1 - first
    live.note_up(first)
    live.note_output(seat, 16, 1.4)
    live.note_left(seat, 1.4, 16)
    assert live.send_to_worker(seat, 1.5) == other
    live.note_left(seat, 1.6)
    live.release_seat(seat)
    assert is_idle(live) and served(live, 2.0, names) == other
    live.note_down(0, 3.0)
    live.note_down(1, 3.0)
    assert live.send_to_worker(live.take_seat(10, 1, 3.1), 3.1) is None


def test_a_worker_that_failed_a_request_is_left_out_for_it_alone() -> None:
    live = a_live(prefix_policies(), 3)
    first = served(live, 0.0, (1, 2))
    seat = live.take_seat(33, 1, 1.0, names=(1, 2))
    second = live.send_to_worker(seat, 1.0, {first})
    assert second not in (None, first)
    live.note_left(seat, 1.0)
    assert live.send_to_worker(seat, 1.0, {0, 1, 2}) is None
    assert served(live, 2.0, (1, 2)) == first


def test_d2lpm_charges_what_came_of_an_output() -> None:
    """One worker, a quantum of 1000. A prompt of 49 tokens costs 49; then 5 tokens, of 100 asked for, 2 each.
    The same prompt again: 48 are cached, so 1, and all 100 tokens. b weighs 3, so its quantum is 3000."""
    policies = prefix_policies("d2lpm", worker_quantum_tokens=1000, tenant_weights=(("b", 3.0),))
    live = a_live(policies, 1)
    for tokens, left in ((5, 1000 - 49 - 10), (100, 1000 - 49 - 10 - 1 - 200)):
        seat = live.take_seat(49, 100, 0.0, names=(1, 2, 3), tenant="a")
        live.send_to_worker(seat, 0.0)
        live.note_computed(seat, 0.0)
        live.note_left(seat, 0.0, tokens)
        assert live.caches.worker_credit[live.tenants["a"], 0] == left
    served(live, 1.0, (), outputs=50, tenant="b")
    assert live.caches.worker_credit[live.tenants["b"], 0] == 3000 - 1 - 100


def test_tenants_beyond_the_table_share_one_account() -> None:
    """1024 names and those with weights have one each. A name is nothing but a key, whatever stands in it."""
    live = a_live(prefix_policies("tenant-round-robin", tenant_weights=(("named", 2.0),)))
    for name in ("", "'; DROP TABLE tenants; --", "a\x00b", "😀" * 64, *map(str, range(2000)), "named"):
        served(live, 0.0, (), tenant=name)
    assert len(live.tenants) == 1025 and live.caches.tenant_turns.shape == (1026,)
    assert live.caches.tenant_turns[-1] == 2004 - 1024
    assert live.caches.tenant_turns[live.tenants["named"]] == 1


@pytest.mark.parametrize("policy", ["jsq", "min-ttft", "cache-aware", "e2", "d2lpm"])
def test_the_books_balance_whatever_happens(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """8000 random events on three workers whose 60 blocks are far too few: arrivals, first bytes, outputs
    that grow, ends, failures, retries, workers that go and come. When all are gone nothing is held, no cached
    block is in use, and every number is free or counts what has it."""
    monkeypatch.setattr(live_routing, "NODES", 64)
    live = a_live(prefix_policies(policy, share_window_s=20.0), 3, kv_tokens=960)
    rng, sent, time_s = np.random.default_rng(5), dict[int, int](), 0.0
    for _ in range(8000):
        time_s += rng.exponential(0.01)
        what = rng.integers(10)
        seat = int(rng.choice(list(sent))) if sent else -1
        if what < 3 and len(sent) < 200:
            document, depth = rng.integers(30), rng.integers(1, 12)
            seat = live.take_seat(
                16 * int(depth) + 5, 50, time_s, names=range(100 * document, 100 * document + depth)
            )
            sent[seat] = 0
            live.send_to_worker(seat, time_s)
        elif what == 9 and rng.random() < 0.1:
            w = int(rng.integers(3))
            live.note_down(w, time_s) if live.is_up[w] else live.note_up(w)
        elif what in (3, 4, 5) and sent:
            live.note_computed(seat, time_s)
        elif what == 6 and sent:
            sent[seat] += int(rng.integers(1, 40))
            live.note_output(seat, sent[seat], time_s)
        elif what == 7 and sent:
            live.note_left(seat, time_s)
            live.send_to_worker(seat, time_s, {int(rng.integers(3))})
            sent[seat] = 0
        elif what == 8 and sent:
            live.note_left(seat, time_s, sent.pop(seat))
            live.release_seat(seat)
    for seat, tokens in sent.items():
        live.note_left(seat, time_s, tokens)
        live.release_seat(seat)
    caches = live.caches
    assert is_idle(live) and not caches.entries["refs"].any()
    assert (caches.workers["idle_blocks"] <= 60).all()
    assert caches.workers["known_tree_nodes"].sum() == np.bitwise_count(caches.holders).sum()
    in_use = np.concatenate(
        [np.zeros(0, np.int32)]
        + [
            caches.path[one["start"] : one["start"] + one["depth"]]
            for one in caches.prompts[live.state.requests["status"] != FREE]
        ]
    )
    assert (np.maximum(live.users, 0) == np.bincount(in_use, minlength=len(live.users))).all()
    assert sorted(live.nodes.free) == np.flatnonzero(live.users < 0).tolist()


def test_means_are_learnt_from_the_requests() -> None:
    """After prompts of 100 and 300 tokens with outputs of 20 and 60 the quantum is twice 200 + 2 x 40."""
    live = a_live(prefix_policies("d2lpm"))
    for inputs, outputs in ((100, 20), (300, 60)):
        live.take_seat(inputs, outputs, 0.0)
    assert live.caches.settings[WORKER_QUANTUM_TOKENS] == 2 * (200 + 2 * 40)


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        (Policies(routing="astrology"), "must be one of jsq"),
        (Policies(routing="e2"), "needs prefix_cache"),
        (Policies(routing="least-waiting"), "needs batching"),
        (Policies(pools="splitwise"), "one role at a time"),
        (Policies(decode_routing="e2"), "decode workers keep none"),
    ],
)
def test_policies_that_no_real_engine_can_follow_are_refused(policies: Policies, said: str) -> None:
    with pytest.raises(InputError, match=said):
        LiveFleet(fleet_of(("w", "mixed", 1), policies=policies))


def test_blocks_are_named_by_all_that_stands_before_them() -> None:
    """48 tokens are 3 blocks, 47 are 2; another first token changes all names, another last one the last.
    Words count 4 characters per token: 64 a block; those of a chat are its messages. Nothing else has any."""
    ids = list(range(48))
    names = blocks_of(ids)
    assert len(names) == 3 and blocks_of(ids[:47]) == names[:2]
    assert not set(blocks_of([99, *ids[1:]])) & set(names)
    assert blocks_of([*ids[:47], 99])[:2] == names[:2] != blocks_of([*ids[:47], 99])[1:]
    assert len(blocks_of("x" * 128)) == 2
    chat = [{"role": "system", "content": "y" * 128}, {"role": "user", "content": "hello"}]
    assert blocks_of(chat)[:2] == blocks_of([chat[0], {"role": "user", "content": "bye"}])[:2]
    assert blocks_of(None) == blocks_of([[1, 2]]) == blocks_of([]) == []


def test_numbers_come_back_when_they_are_dropped() -> None:
    numbers = BlockNumbers(2)
    assert numbers.give([7, 8, 7]).tolist() == [0, 1, 0]
    numbers.drop([0])
    assert numbers.give([9]).tolist() == [0] and numbers.give([8]).tolist() == [1]
    numbers.grow(4)
    assert len(numbers) == 4 and numbers.give([10, 11]).tolist() == [2, 3]


def test_priority_orders_requests_as_the_plan_does() -> None:
    """sjf by the prompt; ljf the other way; srpt with the output; with a longest wait of 10 s half of the
    longest counts as if it had come 5 s later, in milliseconds."""
    plain = {queue: Policies(queue=queue) for queue in ("sjf", "ljf", "srpt")}
    assert priority_number(plain["sjf"], 30, 7, 1.0, 100) == 30
    assert priority_number(plain["ljf"], 30, 7, 1.0, 100) == 70
    assert priority_number(plain["srpt"], 30, 7, 1.0, 100) == 37
    assert priority_number(Policies(queue="sjf", queue_window_s=10.0), 50, 7, 2.0, 100) == 7000


def test_fleets_with_adapters_are_refused() -> None:
    """The router knows the LLM's name alone."""
    lora = LoraSlots(Lora(1, 8, 1, 1), LoraCost(*(0.0,) * 8))
    with pytest.raises(InputError, match="lora: our router takes requests to the LLM alone"):
        LiveFleet(Fleet(LLM, (Pool("w", "mixed", replace(worker_type(), lora=lora), 1),)))
