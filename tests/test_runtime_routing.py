"""The decisions of the router alone, and against the simulator's."""

from __future__ import annotations

import random

import numpy as np
import pytest
from runtime_fakes import fleet_of, random_trace, worker_type

from planner.domain import Fleet, Policies
from planner.models.latency import StepLatency
from planner.simulator import Simulation, simulate
from planner.traces import Trace
from runtime.prefixes import Sent, blocks_of
from runtime.replay import trace_prompt
from runtime.routing import (
    POLICIES,
    PREFIX_POLICIES,
    Dice,
    Load,
    Prompt,
    best_fit,
    fits,
    load_of,
    priority,
)


def a_load(
    name: str, *, pending: int = 0, requests: int = 0, prompts: int = 0, kv_tokens: int = 1600
) -> Load:
    """A token, and a request, of 1 ms."""
    return Load(name, "mixed", kv_tokens, 1e-3, 1e-3, 0.0, True, pending, requests, prompts)


def test_round_robin_takes_turns_and_skips_who_cannot_hold_the_request() -> None:
    """Blocks of 16: 1600 tokens are 100 blocks, 1616 need 101."""
    loads = [a_load("a"), a_load("b", kv_tokens=3200), a_load("c")]
    dice = Dice()
    assert [POLICIES["round-robin"](loads, 100, dice).name for _ in range(4)] == ["a", "b", "c", "a"]
    assert POLICIES["round-robin"](loads, 1601, dice).name == "b"
    assert fits(loads[0], 1600) and not fits(loads[0], 1601)


def test_least_outstanding_counts_requests_and_jsq_counts_tokens() -> None:
    """a: 3 requests and 10 pending tokens, 13 ms; b: 1 request and 50 tokens, 51 ms."""
    loads = [a_load("a", pending=10, requests=3), a_load("b", pending=50, requests=1)]
    assert POLICIES["least-outstanding"](loads, 10, Dice()).name == "b"
    assert POLICIES["jsq"](loads, 10, Dice()).name == "a"


def test_jsq_measures_a_queue_in_seconds_of_its_own_worker() -> None:
    """A worker of half the speed with 60 pending tokens waits longer than a whole one with 100."""
    slow = load_of("slow", "mixed", worker_type(_longer(2.0)))
    fast = load_of("fast", "mixed", worker_type(_longer(1.0)))
    slow.takes(60)
    fast.takes(100)
    assert POLICIES["jsq"]([slow, fast], 10, Dice()).name == "fast"


def test_power_of_two_is_the_better_of_two_and_uses_all_workers() -> None:
    """Of n workers with distinct queues the k-th shortest is chosen with probability 2 (n - k) / (n (n - 1)):
    for n = 3 that is 2/3, 1/3 and 0. 3000 draws lie within 4 standard deviations, 0.035."""
    loads = [a_load(name, requests=k) for k, name in enumerate("abc")]
    dice = Dice(rng=random.Random(7))
    drawn = [POLICIES["power-of-two"](loads, 10, dice).name for _ in range(3000)]
    assert drawn.count("c") == 0
    assert drawn.count("a") / 3000 == pytest.approx(2 / 3, abs=0.035)


def test_best_fit_fills_the_fullest_that_has_room() -> None:
    """1600 tokens each: b has 400 free, a 800, c 100. 300 tokens fit into b best; 900 into none: emptiest."""
    loads = [a_load("a", prompts=800), a_load("b", prompts=1200), a_load("c", prompts=1500)]
    assert best_fit(loads, 300, Dice()).name == "b"
    assert best_fit(loads, 900, Dice()).name == "a"


@pytest.mark.parametrize("routing", ["round-robin", "least-outstanding", "jsq"])
@pytest.mark.parametrize("seed", range(3))
def test_the_router_decides_as_the_simulator(routing: str, seed: int) -> None:
    """Arrivals, first tokens and ends of a simulated run, told to the router's loads in order of time: it
    sends every request where the simulator did. Prompts are prefilled in one step, so that pending tokens end
    with the first token on both sides."""
    fleet = fleet_of(("a", "mixed", 3), ("b", "mixed", 2), policies=Policies(routing=routing))
    trace = random_trace(300, 120.0, seed=seed, most=60)
    simulation = simulate(fleet, trace)
    assert _replayed(fleet, simulation, routing) == simulation.prefill_worker.tolist()
    assert len(set(simulation.prefill_worker.tolist())) == 5


@pytest.mark.parametrize("routing", ["round-robin", "least-outstanding", "jsq"])
def test_the_router_picks_decode_workers_as_the_simulator(routing: str) -> None:
    """The same for the second choice of a pair, made when the first token is out."""
    policies = Policies(routing="round-robin", decode_routing=routing)
    fleet = fleet_of(("pre", "prefill", 1), ("dec", "decode", 3), policies=policies)
    trace = random_trace(200, 60.0, most=60)
    simulation = simulate(fleet, trace)
    several = np.flatnonzero(simulation.output_tokens > 1).tolist()
    loads = [load_of(str(w), "decode", fleet.pools[1].type) for w in range(3)]
    dice = Dice()
    first_s = simulation.arrival_s + simulation.ttft_s
    end_s = simulation.arrival_s + simulation.e2e_s
    events = [(first_s[i], 1, i) for i in several]
    events += [(end_s[i], 0, i) for i in several]
    chosen: dict[int, int] = {}
    for _, kind, i in sorted(events):
        tokens = int(simulation.input_tokens[i])
        if kind:
            load = POLICIES[routing](loads, tokens + int(simulation.output_tokens[i]), dice)
            load.takes(tokens)
            chosen[i] = 1 + loads.index(load)
        else:
            loads[chosen[i] - 1].is_rid_of(tokens)
    assert chosen == {i: simulation.decode_worker[i] for i in several}


def test_prefix_affinity_decides_as_the_simulator() -> None:
    """300 prompts over 12 documents of 3 to 8 blocks on three workers with room for all: every choice of a
    worker is the simulator's, prompts pending less what is cached included."""
    rng = np.random.default_rng(1)
    documents = [np.arange(100 * k, 100 * k + rng.integers(3, 9)) for k in range(12)]
    chosen = [documents[k] for k in rng.integers(12, size=300)]
    trace = Trace(
        "documents", np.cumsum(rng.exponential(0.004, 300)),
        np.array([16 * len(ids) for ids in chosen]) + rng.integers(1, 60, 300), rng.integers(1, 20, 300),
        prefix_offsets=np.cumsum([0, *map(len, chosen)]), prefix_ids=np.concatenate(chosen),
        prefix_block_tokens=16,
    )  # fmt: skip
    policies = Policies(routing="prefix-affinity", prefix_cache=True)
    fleet = fleet_of(("w", "mixed", 3), policies=policies)
    simulation = simulate(fleet, trace)
    loads = [load_of(str(w), "mixed", worker_type()) for w in range(3)]
    events = []
    for i, arrival_s in enumerate(trace.arrival_s):
        events += [(arrival_s, 2, i), (arrival_s + simulation.ttft_s[i], 0, i)]
        events.append((arrival_s + simulation.e2e_s[i], 1, i))
    found: dict[int, tuple[Load, int]] = {}
    for _, kind, i in sorted(events):
        tokens = int(trace.input_tokens[i])
        if kind == 2:
            blocks = blocks_of(trace_prompt(trace, i, 0))
            prompt = Prompt(tokens + int(trace.output_tokens[i]), tokens, blocks)
            load = PREFIX_POLICIES["prefix-affinity"](loads, prompt, policies)
            found[i] = load, load.sent.tokens(blocks)
            load.takes(tokens, found[i][1])
            load.sent.add(blocks)
        elif kind == 0:
            found[i][0].has_prefilled(tokens, found[i][1])
        else:
            found[i][0].is_rid_of(tokens)
    assert [int(found[i][0].name) for i in range(300)] == simulation.prefill_worker.tolist()
    assert len(set(simulation.prefill_worker.tolist())) == 3


def test_min_ttft_weighs_what_is_missed_against_what_waits() -> None:
    """A prompt of 100 tokens, 1 ms each. a has 64 of them and 50 pending: 50 + 36 ms. b has none and 20
    pending: 120 ms; with nothing pending still 100. Once a has 80 pending it is 116 ms."""
    blocks = blocks_of(list(range(100)))
    a, b = a_load("a", pending=50), a_load("b", pending=20)
    a.sent, b.sent = Sent(1600), Sent(1600)
    a.sent.add(blocks[:4])
    prompt = Prompt(110, 100, blocks)
    assert PREFIX_POLICIES["min-ttft"]([a, b], prompt, Policies()).name == "a"
    a.pending_tokens, b.pending_tokens = 80, 0
    assert PREFIX_POLICIES["min-ttft"]([a, b], prompt, Policies()).name == "b"


def test_cache_aware_follows_matches_until_workers_are_too_far_apart() -> None:
    """4 of 6 blocks are 64 of 100 tokens, more than 0.3: to a. One block is not: to b, whose cache is
    smaller. At 70 requests against 1 (more than 64, and than 1.5 times as many) to b all the same."""
    blocks = blocks_of(list(range(100)))
    a, b = a_load("a"), a_load("b")
    a.sent, b.sent = Sent(1600), Sent(1600)
    a.sent.add(blocks[:4])
    b.sent.add(blocks_of(list(range(200, 233))))
    choose = PREFIX_POLICIES["cache-aware"]
    assert choose([a, b], Prompt(110, 100, blocks), Policies()).name == "a"
    short = blocks_of([*range(16), *range(900, 984)])
    assert choose([a, b], Prompt(110, 100, short), Policies()).name == "b"
    a.requests, b.requests = 70, 1
    assert choose([a, b], Prompt(110, 100, blocks), Policies()).name == "b"


def test_the_router_forgets_what_no_longer_fits_a_prompt_s_end_first() -> None:
    """Room for 4 blocks of 16: after a prompt of 3 whole blocks and another of 2 the first one has 2 left.
    The last token is never cached: 48 tokens are 2 whole blocks. Words count 4 characters per token."""
    sent, first, second = Sent(64), blocks_of(list(range(49))), blocks_of(list(range(500, 533)))
    assert (len(first), len(second), len(blocks_of(list(range(48))))) == (3, 2, 2)
    sent.add(first)
    assert sent.tokens(first) == 48
    sent.add(second)
    assert (sent.tokens(second), sent.tokens(first), len(sent)) == (32, 32, 4)
    assert len(blocks_of("x" * 129)) == 2 and blocks_of([{"content": "hello"}]) == blocks_of(None) == []


def _replayed(fleet: Fleet, s: Simulation, routing: str) -> list[int]:
    kinds = [pool.type for pool in fleet.pools for _ in range(pool.count)]
    loads = [load_of(str(w), "mixed", kind) for w, kind in enumerate(kinds)]
    dice, chosen = Dice(), [-1] * len(s.arrival_s)
    events = []
    for i in range(len(chosen)):
        arrival_s = s.arrival_s[i]
        events += [
            (arrival_s, 2, i),
            (arrival_s + s.ttft_s[i], 0, i),
            (arrival_s + s.e2e_s[i], 1, i),
        ]
    for _, kind, i in sorted(events):
        tokens = int(s.input_tokens[i])
        if kind == 2:
            whole = tokens + int(s.output_tokens[i])
            load = POLICIES[routing](loads, whole, dice)
            load.takes(tokens)
            chosen[i] = loads.index(load)
        elif kind == 0:
            loads[chosen[i]].has_prefilled(tokens)
        else:
            loads[chosen[i]].is_rid_of(tokens)
    return chosen


def _longer(factor: float) -> StepLatency:
    return worker_type().latency.longer(factor - 1)


def test_priority_orders_requests_as_the_plan_does() -> None:
    """sjf by the prompt; ljf the other way; srpt with the output; with a longest wait of 10 s half of the
    longest counts as if it had come 5 s later, in milliseconds."""
    plain = {queue: Policies(queue=queue) for queue in ("sjf", "ljf", "srpt")}
    assert priority(plain["sjf"], 30, 7, 1.0, 100) == 30
    assert priority(plain["ljf"], 30, 7, 1.0, 100) == 70
    assert priority(plain["srpt"], 30, 7, 1.0, 100) == 37
    assert priority(Policies(queue="sjf", queue_window_s=10.0), 50, 7, 2.0, 100) == 7000
