"""The compiled kernel against a plain simulator, arithmetic by hand, and queueing theory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from shares import some
from simulations import LLM, ROUTING, compare, make_latency, make_pool, make_trace, mixed, random_case
from simulator_reference import Reference, Request, Worker

from planner.domain import Limit, Slo, allowed_above
from planner.errors import InputError
from planner.fleet import Fleet, Network, Policies, Role
from planner.models.latency import StepLatency
from planner.simulator.layout import GROUP
from planner.simulator.replay import RequestRecords, simulate, simulate_if_kept
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import judge_slo
from planner.traffic.trace import Trace

# ------------------------------------------------------------------------------- against the plain simulator


@pytest.mark.parametrize("seed", some(range(120), 40))
def test_kernel_equals_the_plain_simulator(seed: int) -> None:
    """Every request's times, worker, preemptions; every gap; violations; busy time, steps and tokens."""
    compare(*random_case(seed, dyadic=False))


@pytest.mark.parametrize("seed", some([399, 756, 906, *range(80)], 30))
def test_kernel_equals_the_plain_simulator_where_events_coincide(seed: int) -> None:
    """Times are multiples of 2^-10 s, so that sums are exact and many events fall on the same instant."""
    compare(*random_case(seed, dyadic=True))


@pytest.mark.parametrize("roles", [("mixed", "mixed"), ("prefill", "decode"), ("mixed", "prefill", "decode")])
@pytest.mark.parametrize("routing", ["jsq", "least-outstanding"])
def test_kernel_equals_the_plain_simulator_with_many_workers(roles: tuple[Role, ...], routing: str) -> None:
    """Pools of three groups of workers, every third pool too small for the long requests; equal workers in a
    pool, so that scores tie.
    """
    rng = np.random.default_rng(len(roles))
    pools = tuple(
        make_pool(
            make_latency((0.5, 0.5 + i / 8), b=1 / 64, d=1 / 1024),
            role=role,
            count=2 * GROUP + 3 + i,
            kv_tokens=16 * (5 if i % 3 == 0 else 20),
            seats=3,
            budget=64,
            name=f"w{i}",
        )
        for i, role in enumerate(roles)
    )
    n = 400
    trace = make_trace(np.cumsum(rng.integers(0, 4, n)) / 64, rng.integers(1, 90, n), rng.integers(1, 30, n))
    fast, _ = compare(Fleet(LLM, pools, Policies(routing=routing, decode_routing=routing)), trace, (), 0)
    assert len(set(fast.prefill_worker.tolist())) > GROUP


@pytest.mark.parametrize(
    ("policies", "waits"),
    [
        (Policies(), False),
        (Policies(), True),
        (Policies(prediction_accuracy_frac=0.5, queue="srpt"), False),
        (Policies(batching="sarathi", vidur_restarts=True), False),
        (Policies(routing="best-fit"), False),
        (Policies(batching="distserve"), False),
        (Policies(batching="splitwise"), False),
    ],
    ids=["plain", "waits", "predicted", "restarts", "best-fit", "distserve", "splitwise"],
)
def test_requests_that_served_one_fleet_are_fresh_for_the_next(policies: Policies, waits: bool) -> None:
    """To the byte, whether the first was refuted early or simulated to its end; and with the same answer."""
    rng = np.random.default_rng(0)
    trace = make_trace(np.arange(60) / 4, rng.integers(1, 90, 60), rng.integers(2, 40, 60))
    if waits:
        child = np.arange(30, 60)
        trace = replace(trace, after=np.column_stack((child, child - 30)), think_s=np.full(60, 0.5))
    kv_tokens = 16 * (100 if policies.batching == "splitwise" else 12)  # it rejects what would block it
    requests = RequestRecords(trace)
    kept = []
    for count, limit_s in ((1, 0.1), (4, 1e9), (1, 2.0)):
        fleet = Fleet(LLM, (make_pool(make_latency((0.5, 1.0)), count=count, kv_tokens=kv_tokens),), policies)
        limits = (Limit("ttft", 0.9, limit_s),)
        found = simulate_if_kept(fleet, trace, limits, requests)
        whole = simulate(fleet, trace, limits=limits)
        kept.append(found is not None)
        assert kept[-1] == (whole.violations[0] <= allowed_above(0.9, int(whole.counted[0])))
        if found is not None:
            assert found.e2e_s.tobytes() == whole.e2e_s.tobytes()
        lent = requests.take()
        assert lent.tobytes() == RequestRecords(trace).take().tobytes()
        requests.give_back(lent, 0)
    assert kept[:2] == [False, True]


class Watched(Reference):
    """Counts what happens."""

    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        super().__init__(fleet, trace, closed_loop=closed_loop)
        self.seen: Counter[str] = Counter({"closed loop": int(closed_loop > 0)})

    def preempt(self, worker: Worker) -> Request:
        victim = worker.running[-1]
        self.seen[f"preempted on a {worker.role} worker"] += 1
        self.seen["preempted in prefill"] += not victim.is_prefilled
        self.seen["preempted before its first decode"] += victim.is_prefilled and not victim.gaps
        return super().preempt(worker)

    def hand_off(self, worker: Worker, request: Request, now: float) -> None:
        super().hand_off(worker, request, now)
        self.seen[f"handed off, {self.fleet.network.transfer}"] += 1
        self.seen["waits for blocks"] += request.decode_worker >= 0 and request not in self.link

    def reject(self, request: Request) -> None:
        super().reject(request)
        self.seen["rejected"] += 1


def test_random_cases_reach_the_corners() -> None:
    """The cases above are worth something only if they hold what is hard."""
    seen: Counter[str] = Counter()
    for seed in range(120):
        fleet, trace, _, closed_loop = random_case(seed, dyadic=False)
        seen += Watched(fleet, trace, closed_loop=closed_loop).run().seen
    assert min(seen.values()) >= 5, seen
    assert len(seen) == 9


# ---------------------------------------------------------------------------------------------------- by hand


def times(simulation: Simulation) -> list[tuple[float, float]]:
    """(ttft, e2e) of every request."""
    return list(zip(simulation.ttft_s.tolist(), simulation.e2e_s.tolist(), strict=True))


def pair(
    latency: StepLatency,
    network: Network,
    *,
    prefill_kv_tokens: int = 16000,
    decode_kv_tokens: int = 16000,
    decode_seats: int = 8,
    decode_latency: StepLatency | None = None,
) -> Fleet:
    """One prefill and one decode worker."""
    prefill = make_pool(latency, role="prefill", kv_tokens=prefill_kv_tokens)
    decode = make_pool(
        decode_latency or latency, role="decode", kv_tokens=decode_kv_tokens, seats=decode_seats
    )
    return Fleet(LLM, (prefill, decode), network=network)


def test_lone_request() -> None:
    """Prompt 3: 1 + 6 pairs / 8 + 1/2 + 1/2 = 2.75 s. Then K = 4: 1 + 1/4 + 4/16 + 1/2 = 2 s; K = 5: 2.0625
    s."""
    latency = make_latency(a=1 / 8, b=1 / 4, d=1 / 16, e=1 / 2, h=1 / 2)
    result = simulate(mixed(latency), make_trace([10.0], [3], [3]), record=True)
    assert times(result) == [(2.75, 2.75 + 2.0 + 2.0625)]
    assert result.tbt_max_s[0] == 2.0625
    assert result.tpot_s[0] == 4.0625 / 2
    assert result.queue_s[0] == 0
    assert result.worker_busy_s[0] == 6.8125
    assert result.worker_steps[0] == 3
    assert result.worker_tokens[0] == 3 + 2


def test_two_requests_share_a_step() -> None:
    """A step of N tokens lasts N/4 s. A (4 in, 3 out) prefills in [0, 1]. B (2 in, 2 out) comes at 0.5 and
    joins A's first decode: 3 tokens, [1, 1.75]. Then both decode, [1.75, 2.25], and both are done."""
    result = simulate(mixed(make_latency((0.25, 256.0))), make_trace([0.0, 0.5], [4, 2], [3, 2]))
    assert times(result) == [(1.0, 2.25), (1.25, 1.75)]
    assert result.tbt_max_s.tolist() == [0.75, 0.5]
    assert result.queue_s.tolist() == [0.0, 0.5]


def test_long_prompt_is_cut_into_chunks() -> None:
    """10 tokens, 4 per step: 3 steps of 1 s, and 10 * 11 / 2 = 55 pairs at 1/8 s, however they are cut."""
    result = simulate(mixed(make_latency(a=1 / 8), budget=4, seats=4), make_trace([0.0], [10], [1]))
    assert times(result) == [(3 + 55 / 8, 3 + 55 / 8)]
    assert result.worker_steps[0] == 3


def test_decodes_come_first_in_the_token_budget() -> None:
    """4 tokens per 1 s step. A (1 in, 4 out) prefills in [0, 1] and decodes in the next three. B (6 in, 1
    out) comes at 0.5, gets 3 tokens in [1, 2] and 3 in [2, 3]."""
    result = simulate(mixed(make_latency(), budget=4, seats=4), make_trace([0.0, 0.5], [1, 6], [4, 1]))
    assert times(result) == [(1.0, 4.0), (2.5, 2.5)]


def test_one_seat_serves_one_after_the_other() -> None:
    """1 s steps, 1 seat: A (2 out) in [0, 2], B (1 out) in [2, 3]."""
    result = simulate(mixed(make_latency(), seats=1), make_trace([0.0, 0.0], [5, 5], [2, 1]))
    assert times(result) == [(1.0, 2.0), (3.0, 3.0)]


def test_preemption_recomputes_the_request_admitted_last() -> None:
    """2 KV blocks, 1 s steps. A (8 in, 12 out) prefills in [0, 1], B (8 in, 10 out) comes at 0.5 and prefills
    in [1, 2]. At 9 A has 16 tokens cached and needs B's block: B, with 8 tokens out, gives way until A ends
    at 12. B's 8 + 8 tokens are prefilled in [12, 13], and the last of its 10 leaves at 14."""
    result = simulate(mixed(make_latency(), kv_tokens=32), make_trace([0.0, 0.5], [8, 8], [12, 10]))
    assert times(result) == [(1.0, 12.0), (1.5, 13.5)]
    assert result.preemptions.tolist() == [0, 1]
    assert result.tbt_max_s.tolist() == [1.0, 4.0]
    assert result.worker_tokens[0] == (8 + 11) + (8 + 7) + 16 + 1


@pytest.mark.parametrize(
    ("transfer", "first_gap_s"), [("serialised", 0.5 + 0.125 + 1.0), ("layerwise", 0.125 + 0.125 + 1.0)]
)
def test_hand_off(transfer: Literal["serialised", "layerwise"], first_gap_s: float) -> None:
    """2 blocks of 256 bytes at 1024 bytes/s: 0.5 s, and 0.125 s of latency. Layerwise, 3 of the 4 layers
    cross during the prefill step of 1 s, and 0.5 / 4 s remain. The first gap also holds the first decode step
    of 1 s."""
    fleet = pair(make_latency(), Network(1024.0, 0.125, transfer))
    result = simulate(fleet, make_trace([0.0], [20], [3]))
    assert times(result) == [(1.0, 1.0 + first_gap_s + 1.0)]
    assert result.tbt_max_s[0] == first_gap_s
    assert (result.prefill_worker[0], result.decode_worker[0]) == (0, 1)


def test_transfers_share_the_link_and_hold_the_prefill_workers_blocks() -> None:
    """1 s steps, 0.5 s per transfer of 2 blocks. While something else runs in [0, 1], A and B (20 in, 2 out)
    come at 0.5. With 2 blocks on the prefill worker: A prefills in [1, 2], crosses in [2, 2.5], decodes in
    [2.5, 3.5]; only then B has blocks: [2.5, 3.5], [3.5, 4], [4, 5]. With room for both they prefill in [1,
    2], B crosses after A in [2.5, 3] and joins when A's step ends: [3.5, 4.5]."""
    trace = make_trace([0.0, 0.5, 0.5], [1, 20, 20], [1, 2, 2])
    network = Network(1024.0, transfer="serialised")
    tight = simulate(pair(make_latency(), network, prefill_kv_tokens=32), trace)
    assert times(tight) == [(1.0, 1.0), (1.5, 3.0), (3.0, 4.5)]
    roomy = simulate(pair(make_latency(), network), trace)
    assert times(roomy) == [(1.0, 1.0), (1.5, 3.0), (1.5, 4.0)]


def test_hand_off_waits_for_blocks() -> None:
    """A tick (2^-10 s) per prefill and per transfer, 1 s per decode step, 2 blocks on the decode worker. A
    (17 in, 4 out) has both of them until it ends at 3 s + 2 ticks. B's transfer starts then, and its one
    decode step a tick later."""
    tick = 2.0**-10
    fleet = pair(
        make_latency((tick, tick)),
        Network(512 / tick, transfer="serialised"),
        decode_kv_tokens=32,
        decode_latency=make_latency(),
    )
    result = simulate(fleet, make_trace([0.0, 0.5], [17, 17], [4, 2]))
    assert result.e2e_s[0] == 3 + 2 * tick
    assert result.arrival_s[1] + result.e2e_s[1] == 4 + 3 * tick


def test_preempted_seat_goes_to_whoever_waits_for_it() -> None:
    """One seat and 2 blocks on the decode worker, 1 s steps, a tick (2^-10 s) per transfer. A (8 in, 20 out)
    decodes from 1 s + 1 tick. B (8 in, 4 out) comes at 0.5 s, has its first token at 2 s, is there at 2 s + 1
    tick and holds a block. When A has 16 tokens cached it finds none, at 9 s + 1 tick. B takes its seat and
    ends 3 s later. Then A recomputes 8 + 9 tokens, which gives it its tenth, and needs 10 steps more:
    12 + 1 + 10 s."""
    tick = 2.0**-10
    network = Network(256 / tick, transfer="serialised")
    fleet = pair(make_latency(), network, decode_kv_tokens=32, decode_seats=1)
    result = simulate(fleet, make_trace([0.0, 0.5], [8, 8], [20, 4]))
    assert times(result) == [(1.0, 23 + tick), (1.5, 11.5 + tick)]
    assert result.preemptions.tolist() == [1, 0]


def test_transfer_that_ends_with_a_step_joins_the_step_after_the_next() -> None:
    """At equal times workers come before the link. A decodes in steps of 1 s from 1.25; B's KV arrives at
    3.25, when A's next step has begun, and B's first decode is [4.25, 5.25], 2.25 s after its first token at
    3."""
    fleet = pair(make_latency(), Network(1024.0, transfer="serialised"))
    result = simulate(fleet, make_trace([0.0, 2.0], [1, 1], [9, 2]))
    assert times(result) == [(1.0, 1.25 + 8), (1.0, 3.25)]


def test_arrival_at_the_end_of_a_step_joins_the_next_one() -> None:
    """At equal times arrivals come first: B arrives at 2 when A's step ends, and is prefilled in [2, 3]."""
    result = simulate(mixed(make_latency()), make_trace([0.0, 2.0], [1, 1], [9, 1]))
    assert times(result) == [(1.0, 9.0), (1.0, 1.0)]


def test_no_longest_gap_is_lost_when_gaps_shrink_many_times_in_a_row() -> None:
    """One of 160 decodes ends in every step, so the gaps shrink 160 times in a row, more often than the
    kernel's stack is deep. The requests that come meanwhile see one gap each: it is at least the step's
    constant 1 s."""
    old, new = 160, 150
    trace = make_trace(
        np.concatenate([np.zeros(old), np.arange(2.0, 2.0 + new)]),
        np.ones(old + new, dtype=int),
        np.concatenate([2 + np.arange(old), np.full(new, 2)]),
    )
    fleet = mixed(make_latency(b=2.0**-10), budget=1024, seats=1024, kv_tokens=16 * 4000)
    fast, _ = compare(fleet, trace, (), 0)
    assert fast.tbt_max_s.min() >= 1.0


def test_closed_loop_keeps_so_many_in_flight() -> None:
    """Two at a time, 1 s steps. A (2 out) runs in [0, 2], B (4 out), which comes when A's step has begun, in
    [1, 5]. When A ends, C (2 out) comes, as the next step has begun, and runs in [3, 5]; then D (1 out) in
    [5, 6]."""
    trace = make_trace([7.0, 7.0, 7.0, 7.0], [1, 1, 1, 1], [2, 4, 2, 1])
    result = simulate(mixed(make_latency()), trace, closed_loop=2)
    assert result.arrival_s.tolist() == [0.0, 0.0, 2.0, 5.0]
    assert times(result) == [(1.0, 2.0), (2.0, 5.0), (2.0, 3.0), (1.0, 1.0)]


def test_closed_loop_goes_on_after_a_rejection() -> None:
    """40 tokens never fit into 2 blocks. Their place is taken at once: the others run in [0, 1] and [1,
    2]."""
    trace = make_trace(np.zeros(4), [40, 8, 40, 8], [1, 1, 1, 1])
    result = simulate(mixed(make_latency(), kv_tokens=32), trace, closed_loop=1)
    assert result.status.tolist() == [1, 0, 1, 0]
    assert result.arrival_s.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert result.end_s == 2.0


@pytest.mark.parametrize(
    ("routing", "workers"),
    [("round-robin", [0, 1, 0, 1]), ("least-outstanding", [0, 1, 1, 0]), ("jsq", [0, 1, 1, 1])],
)
def test_routing(routing: str, workers: list[int]) -> None:
    """1 s per token (f = N). Prompts 100, 1, 1, 1 at 0, 0, 1.5, 3.25 with 1, 1, 3, 1 tokens out: at 1.5
    worker 1 is idle; at 3.25 each has one request, so least-outstanding takes the first; jsq sees 100 tokens
    to prefill there."""
    fleet = Fleet(LLM, (make_pool(make_latency((1.0, 1024.0)), count=2),), Policies(routing=routing))
    result = simulate(fleet, make_trace([0.0, 0.0, 1.5, 3.25], [100, 1, 1, 1], [1, 1, 3, 1]))
    assert result.prefill_worker.tolist() == workers


def test_unknown_policies_are_refused() -> None:
    trace, pool = make_trace([0.0], [1], [1]), make_pool(make_latency())
    for policies in (Policies(batching="v0"), Policies(routing="best"), Policies(decode_routing="")):
        with pytest.raises(InputError, match="must be one of"):
            simulate(Fleet(LLM, (pool,), policies), trace)


# ----------------------------------------------------------------------------------------------------- theory


@pytest.mark.parametrize("load_frac", [0.3, 0.6, 0.8])
def test_mean_wait_of_a_single_server(load_frac: float) -> None:
    """M/D/1: one seat, one token out, 1 s of service. Mean wait = rho / (2 (1 - rho)) s (Pollaczek-
    Khinchine)."""
    rng = np.random.default_rng(7)
    n = 400_000
    trace = make_trace(np.cumsum(rng.exponential(1 / load_frac, n)), np.ones(n, int), np.ones(n, int))
    result = simulate(mixed(make_latency(), seats=1), trace)
    assert result.queue_s.mean() == pytest.approx(load_frac / (2 * (1 - load_frac)), rel=0.02)
    np.testing.assert_allclose(result.e2e_s, result.queue_s + 1.0)


# a 70B-like engine: 22 ms floor, 0.07 ms per prefill token, 20 ns per KV token
SERVING = make_latency(
    (0.02, 0.022, 0.03, 0.17), knots=(1, 64, 256, 2048), a=1e-9, b=1e-5, d=2e-8, e=1e-4, h=2e-3
)


def serving_trace(rng: np.random.Generator, rate_rps: float, n: int = 2000) -> Trace:
    """Poisson arrivals, log-normal lengths like a conversation's."""
    return make_trace(
        np.cumsum(rng.exponential(1 / rate_rps, n)),
        np.minimum(np.ceil(rng.lognormal(6.5, 1.0, n)), 8000).astype(np.int64),
        np.minimum(np.ceil(rng.lognormal(4.8, 0.9, n)), 1000).astype(np.int64),
    )


def serving_fleet(workers: int, *, kv_tokens: int = 16 * 20000, routing: str = "jsq") -> Fleet:
    pool = make_pool(SERVING, count=workers, kv_tokens=kv_tokens, budget=2048, seats=256)
    return Fleet(LLM, (pool,), Policies(routing=routing))


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost(seed: int) -> None:
    """Requests in = requests out; every prompt token and every output token but the first, which the prefill
    makes, goes through the layers once; no worker is busy for longer than the run; and Little's law for the
    running decodes: their number integrated over time, from the recorded runs, is the sum of their stays."""
    rng = np.random.default_rng(seed)
    trace = serving_trace(rng, rng.uniform(5, 40))
    result = simulate(serving_fleet(3, kv_tokens=16 * 22000), trace, record=True)
    assert (result.status == 0).all()
    assert (result.preemptions == 0).all()
    assert result.worker_tokens.sum() == (trace.input_tokens + trace.output_tokens - 1).sum()
    assert (result.worker_busy_s <= result.end_s - trace.arrival_s[0]).all()
    runs = result.runs
    assert (runs["blocks"] <= 22000).all()
    gaps = float((runs["steps"] * runs["sequences"]).sum())
    assert gaps == (trace.output_tokens - 1).sum()
    steps = runs["steps"]
    run_s = runs["first_s"] * steps + runs["growth_s"] * steps * (steps - 1) / 2
    assert (run_s * runs["sequences"]).sum() == pytest.approx((result.e2e_s - result.ttft_s).sum())
    assert run_s.sum() == pytest.approx(result.worker_busy_s.sum())


def test_same_input_gives_the_same_bytes() -> None:
    fleet, trace = serving_fleet(3, kv_tokens=16 * 800), serving_trace(np.random.default_rng(1), 30.0)
    first, second = (simulate(fleet, trace, record=True) for _ in range(2))
    assert first.preemptions.sum() > 0
    for name in ("ttft_s", "tpot_s", "tbt_max_s", "e2e_s", "prefill_worker", "worker_busy_s", "runs"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()


@pytest.mark.parametrize("routing", ROUTING)
@pytest.mark.parametrize("kv_tokens", [16 * 20000, 16 * 800])
def test_one_more_worker_never_breaks_a_promise(routing: str, kv_tokens: int) -> None:
    """What a certificate assumes, on Poisson traffic from idle to saturated, 2 to 6 workers, roomy and tight
    KV: a fleet that keeps its SLO still does with one worker more.

    It is no theorem: routing changes, and a request may meet a longer queue. Measured on 2026-11-20 with 60
    seeds, 1440 pairs of fleets: no verdict ever turned, of this SLO or of three on gaps alone. The attainment
    fell in 9 pairs (never with jsq), all of fleets that attained less than 0.02, at worst from 0.0127 to
    0.0016. The share that keeps one limit alone fell in 391 pairs, by up to 0.025.
    """
    for seed in range(15):
        rng = np.random.default_rng(seed)
        trace = serving_trace(rng, rng.uniform(8, 60))
        limits = (
            Limit("ttft", 0.9, float(rng.choice([0.3, 1.0, 2.0, 5.0]))),
            Limit("tbt", 0.99, float(rng.choice([0.05, 0.1, 0.2]))),
            Limit("e2e", 0.9, float(rng.choice([5.0, 10.0, 30.0]))),
        )
        slo = Slo(limits, attainment_frac=0.9)
        fleets = [serving_fleet(workers, kv_tokens=kv_tokens, routing=routing) for workers in range(2, 7)]
        verdicts = [judge_slo(simulate(fleet, trace, limits=limits), slo) for fleet in fleets]
        holds = [verdict.holds for verdict in verdicts]
        assert holds == sorted(holds)
        attained = np.array([verdict.attainment_frac for verdict in verdicts])
        assert (np.diff(attained)[attained[:-1] > 0.1] >= -0.001).all()
