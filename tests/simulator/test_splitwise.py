"""Splitwise's machines and pools, compiled: against the plain ones, by hand, and what must hold for any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from reference_splitwise import Cluster, Fit, Limits, Lookup, Machine
from reference_splitwise import Request as Plain
from reference_splitwise import Steps as PlainSteps
from shares import some

from benchmarks.peers import splitwise as peer
from benchmarks.peers.compare import BARE_GPU, NO_STEPS, bare_llm, compare
from planner.domain import Limit
from planner.errors import InputError
from planner.fleet import Disturbance, Fleet, Network, Policies, Pool, WorkerType
from planner.models.foreign_forms import SplitwiseLookup, interpolate_linearly
from planner.simulator.recorded_gaps import gaps_s
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "splitwise"
KNOTS = (1.0, 20.0, 200.0)
ROUTING = {"token_jsq": "token-jsq", "mixed_pool": "token-jsq", "kv_token_jsq": "kv-token-jsq"}
Rows = list[tuple[float, int, int]]
KINDS: tuple[Literal["down", "slow", "link"], ...] = ("down", "down", "down", "slow", "link")


def trace_of(rows: Rows) -> Trace:
    arrival_s, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return Trace("made", arrival_s.astype(float), inputs.astype(np.int64), outputs.astype(np.int64))


def fleet_of(
    steps: SplitwiseLookup,
    roles: Sequence[str] = ("",),
    policy: str = "token_jsq",
    *,
    kv_tokens: int = 10**6,
    tasks: int = 512,
    tokens: int = 2048,
    bytes_per_s: float = math.inf,
) -> Fleet:
    worker = WorkerType(BARE_GPU, 1, NO_STEPS, kv_tokens, tokens, tasks, form=steps)
    pools = tuple(Pool(f"m{i}", peer.ROLES[role], worker, 1) for i, role in enumerate(roles))
    policies = Policies(
        batching="splitwise",
        routing=ROUTING[policy],
        decode_routing=ROUTING[policy],
        pools="splitwise" if policy == "mixed_pool" else "static",
    )
    return Fleet(bare_llm(1.0), pools, policies, Network(bytes_per_s, transfer="serialised", is_shared=False))


def plain_steps(steps: SplitwiseLookup) -> PlainSteps:
    def prompt_s(tokens: float) -> float:
        return float(interpolate_linearly(np.array([tokens]), steps.knots_tokens, steps.prompt_s)[0])

    def token_s(tokens: float) -> float:
        return float(interpolate_linearly(np.array([tokens]), steps.knots_tokens, steps.token_s)[0])

    if len(steps.token_s) == 1:
        return Fit(prompt_s, steps.token_s[0], steps.b_s, steps.d_s)
    return Lookup(prompt_s, token_s)


def plainly(fleet: Fleet, roles: Sequence[str], policy: str, rows: Rows) -> Cluster | None:
    """The same cluster in the plain simulator, with memory for a little more than whole tokens; None where
    transfers wait for ever."""
    worker = fleet.pools[0].type
    limits = Limits(4 * worker.kv_tokens + 1, 0, 4, worker.max_num_seqs, worker.max_num_batched_tokens)
    assert isinstance(worker.form, SplitwiseLookup)
    machines = [Machine(i, plain_steps(worker.form), limits, role) for i, role in enumerate(roles)]
    requests = [Plain(*row) for row in rows]
    try:
        cluster = Cluster(
            machines,
            policy,
            4 * fleet.network.bandwidth_bytes_per_s,
            requests,
            repurpose_after_s=fleet.policies.repurpose_after_s,
            events=[
                (each.time_s, each.kind, max(each.worker, 0), each.factor) for each in fleet.disturbances
            ],
        ).run()
    except ValueError:
        return None
    return cluster


def random_case(seed: int) -> tuple[Fleet, tuple[str, ...], str, Rows]:
    """Small, so that prompts evict decodes, memory is short, transfers wait and pools change."""
    rng = np.random.default_rng(seed)
    policy = str(rng.choice(["token_jsq", "mixed_pool", "mixed_pool", "kv_token_jsq"]))
    roles = ("",) * int(rng.integers(1, 4))
    if policy != "token_jsq":
        roles = ("prompt",) * int(rng.integers(1, 4)) + ("token",) * int(rng.integers(1, 4))
    honest = bool(rng.integers(2))
    steps = SplitwiseLookup(
        KNOTS,
        tuple(np.cumsum(rng.uniform(0.05, 1.0, 3)).tolist()),
        (float(rng.uniform(0.1, 0.3)),) if honest else tuple(rng.uniform(0.1, 0.4, 3).tolist()),
        b_s=float(rng.uniform(0, 0.02)) if honest else 0.0,
        d_s=float(rng.uniform(0, 0.002)) if honest else 0.0,
    )
    n = int(rng.integers(1, 60))
    arrival_s = np.cumsum(rng.exponential(rng.choice([0.05, 0.3, 2.0]), n))
    inputs, outputs = rng.integers(1, int(rng.choice([20, 60])), n), rng.integers(2, 30, n)
    fleet = fleet_of(
        steps,
        roles,
        policy,
        kv_tokens=int(rng.choice([90, 150, 400, 10**6])),
        tasks=int(rng.choice([1, 3, 8, 30])),
        tokens=int(rng.choice([30, 40, 100])),
        bytes_per_s=float(rng.choice([50.0, 1000.0])),
    )
    rows = [(float(t), int(i), int(o)) for t, i, o in zip(arrival_s, inputs, outputs, strict=True)]
    return fleet, roles, policy, rows


def stamps(simulation: Simulation) -> npt.NDArray[np.float64]:
    """(3, n): when the prompt started, when it ended, when the request was done."""
    return np.stack([simulation.queue_s, simulation.ttft_s, simulation.e2e_s]) + simulation.arrival_s


def must_agree(fleet: Fleet, roles: Sequence[str], policy: str, rows: Rows) -> Cluster | None:
    """Every stamp of every request, to 1e-9 s, and its machines. What the plain one leaves undone is
    rejected, and where it never ends the kernel does."""
    cluster = plainly(fleet, roles, policy, rows)
    simulation = simulate(fleet, trace_of(rows))
    if cluster is None:
        assert simulation.complete
        return None
    plain = cluster.requests
    done = np.array([request.is_over for request in plain])
    assert simulation.complete and np.array_equal(simulation.status == 0, done)
    expected = np.array([[r.prompt_start_s, r.first_token_s, r.finish_s] for r in plain]).T
    assert stamps(simulation)[:, done] == pytest.approx(expected[:, done], rel=1e-12, abs=1e-9)
    machines = np.array([[r.prompt_machine, r.token_machine] for r in plain]).T
    assert np.array_equal(
        np.stack([simulation.prefill_worker, simulation.decode_worker])[:, done], machines[:, done]
    )
    return cluster


@pytest.mark.parametrize("seed", some(range(200), 67))
def test_the_kernel_equals_the_plain_machines(seed: int) -> None:
    must_agree(*random_case(seed))


def events_of(seed: int, machines: int, end_s: float) -> tuple[Disturbance, ...]:
    """Machines that go down and come up, slow ones and slow links, at any time."""
    rng = np.random.default_rng([seed, 1])
    events = []
    for _ in range(int(rng.integers(1, 7))):
        w, at_s = int(rng.integers(machines)), float(rng.uniform(0.0, end_s))
        kind = KINDS[int(rng.integers(len(KINDS)))]
        factor = float(rng.uniform(0.5, 3.0)) if kind != "down" else 1.0
        events.append(Disturbance(at_s, kind, 0 if kind == "link" else w, factor))
        if kind == "down" and rng.integers(4):
            events.append(Disturbance(at_s + float(rng.exponential(3.0)), "up", w))
    return tuple(sorted(events, key=lambda event: event.time_s))


@pytest.mark.parametrize("block", range(10))
def test_the_kernel_equals_the_plain_machines_where_they_fail_and_change_sides(block: int) -> None:
    """Thirty random cases each, with up to six failures; in half of those with pools machines change sides
    after 0 to 5 s. Requests start over, and machines change sides, in most blocks."""
    started_over = repurposed = 0
    for seed in range(30 * block, 30 * block + 30):
        fleet, roles, policy, rows = random_case(seed)
        rng = np.random.default_rng([seed, 2])
        policies = fleet.policies
        if policy == "mixed_pool" and rng.integers(2):
            policies = replace(policies, repurpose_after_s=float(rng.choice([0.0, 1.0, 5.0])))
        events = events_of(seed, len(roles), 1.3 * rows[-1][0] + 1.0)
        fleet = replace(fleet, policies=policies, disturbances=events)
        if cluster := must_agree(fleet, roles, policy, rows):
            started_over += cluster.started_over
            repurposed += cluster.repurposed
    assert started_over > 30


@pytest.mark.shared
@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no shared data beside the checkout")
@pytest.mark.parametrize("path", sorted(REFERENCE.glob("*.json")), ids=lambda path: path.stem)
def test_every_request_ends_when_splitwise_sim_says(path: Path) -> None:
    """Pools too, to what nine digits of the arrivals allow: 1e-6 s, and on the same machines."""
    case = peer.read_case(path)
    comparison = compare(peer.simulate_case(case), case.peer, peer.METRICS)
    assert max(comparison.largest.values()) <= 1e-6
    assert comparison.largest["prompt_runner"] == comparison.largest["token_runner"] == 0


# --- by hand: a prompt takes 1 ms a token, a step of decodes 100 ms, one with both 1.1 times a prompt of all

BY_HAND = SplitwiseLookup((0.0, 1000.0), (0.0, 1.0), (0.1, 0.1))


def test_an_arrival_cuts_decodes_at_the_end_of_the_step() -> None:
    """A decodes from 0.1; B (200, at 0.15) joins at 0.2 for 1.1 * 201 ms: 0.4211. Both 0.5211, which ends B
    (two tokens); A's fifth 0.6211. A's longest gap is the step with B's prompt."""
    simulation = simulate(fleet_of(BY_HAND), trace_of([(0, 100, 5), (0.15, 200, 2)]))
    assert stamps(simulation)[1:] == pytest.approx(np.array([[0.1, 0.4211], [0.6211, 0.5211]]))
    assert simulation.tbt_max_s == pytest.approx([0.2211, 0.1])


def test_a_prompt_over_the_limit_evicts_every_decode() -> None:
    """A decodes from 0.1. B (3000, at 0.15) runs alone 0.2-3.2. Then both: A has tokens of 0.2, 3.3, 3.4; its
    gaps are 0.1, 3.1, 0.1 and B's 0.1."""
    simulation = simulate(fleet_of(BY_HAND), trace_of([(0, 100, 4), (0.15, 3000, 2)]), record=True)
    assert stamps(simulation)[1:] == pytest.approx(np.array([[0.1, 3.2], [3.4, 3.3]]))
    assert simulation.tbt_max_s == pytest.approx([3.1, 0.1])
    assert simulation.preemptions.tolist() == [1, 0]
    whole = replace(simulation, window_s=(0.0, 4.0))
    values, times = gaps_s(whole)
    assert sorted(np.repeat(values, times.astype(int))) == pytest.approx([0.1, 0.1, 0.1, 3.1])


def test_kv_crosses_the_link_between_two_machines() -> None:
    """100 tokens: 0.1 s; at 1 byte a token and 1000 bytes/s 0.1 s on the link; two tokens: 0.4 s."""
    fleet = fleet_of(BY_HAND, ("prompt", "token"), "mixed_pool", bytes_per_s=1000.0)
    assert simulate(fleet, trace_of([(0, 100, 3)])).e2e_s == pytest.approx([0.4])


def test_a_transfer_without_room_asks_again_every_second() -> None:
    """150 tokens of KV. A (100) is prefilled at 0.1, moves and reserves 112; its 11 decodes end at 1.2. B
    (50, at 0.3) is prefilled at 0.35 and finds 38 of 51 free; it asks again at 1.35 and ends 1.1 later."""
    fleet = fleet_of(BY_HAND, ("prompt", "token"), "kv_token_jsq", kv_tokens=150)
    simulation = simulate(fleet, trace_of([(0, 100, 12), (0.3, 50, 12)]))
    assert stamps(simulation)[1] == pytest.approx([0.1, 0.35])
    assert stamps(simulation)[2] == pytest.approx([1.2, 2.45])


def test_kv_token_jsq_gives_one_machine_everything_and_token_jsq_does_not() -> None:
    """The missing add: a machine that was used once has the smallest load for ever."""
    rows = [(10.0 * i, 100, 2) for i in range(6)]
    roles = ("prompt", "prompt", "token", "token")
    habit = fleet_of(BY_HAND, roles, "kv_token_jsq")
    honest = replace(habit, policies=replace(habit.policies, routing="token-jsq", decode_routing="token-jsq"))
    assert simulate(habit, trace_of(rows)).prefill_worker.tolist() == [0] * 6
    busy = [(0.001 * i, 100, 2) for i in range(6)]
    assert simulate(habit, trace_of(busy)).prefill_worker.tolist() == [0] * 6
    assert simulate(honest, trace_of(busy)).prefill_worker.tolist() == [0, 1] * 3


def test_what_can_never_go_on_is_rejected() -> None:
    """60 tokens: two prompts of 29 reserve 30 each and leave no room for the 10 tokens to come of either."""
    simulation = simulate(fleet_of(BY_HAND, kv_tokens=60), trace_of([(0, 29, 11), (0, 29, 11)]))
    assert simulation.status.tolist() == [1, 1] and simulation.complete
    assert simulate(fleet_of(BY_HAND, kv_tokens=60), trace_of([(0, 50, 11)])).status.tolist() == [1]


def test_a_machine_that_stays_mixed_changes_sides() -> None:
    """Two prompts of 9 s each on both prompt machines, so one of 100 tokens each half second goes to a token
    machine, 2, which is mixed as long as it has something. After 2 s it is a prompt machine, and takes the
    third of three prompts at 60 s; the other token machine is the last one and stays."""
    rows: Rows = [(0.0, 9000, 2), (0.0, 9000, 2), (0.1, 9000, 2), (0.1, 9000, 2)]
    rows += [(0.5 + 0.5 * i, 100, 30) for i in range(14)] + [(60.0, 100, 2)] * 3
    fleet = fleet_of(BY_HAND, ("prompt", "prompt", "token", "token"), "mixed_pool", tokens=10_000)
    longer = replace(fleet, policies=replace(fleet.policies, repurpose_after_s=2.0))
    cluster = plainly(longer, ("prompt", "prompt", "token", "token"), "mixed_pool", rows)
    assert cluster is not None and cluster.repurposed == 1
    assert [machine.role for machine in cluster.machines].count("prompt") == 3
    before, after = simulate(fleet, trace_of(rows)), simulate(longer, trace_of(rows))
    assert before.prefill_worker[-3:].tolist() == [0, 1, 0]
    assert after.prefill_worker[-3:].tolist() == [0, 1, 2]
    must_agree(longer, ("prompt", "prompt", "token", "token"), "mixed_pool", rows)


def test_a_request_starts_over_with_the_tokens_that_have_left() -> None:
    """Alone: 100 tokens by 0.1, then one each 0.1 s. At 0.35 the machine dies with three tokens out; it is
    back at 1.0: a prompt of 103 makes the fourth at 1.103, the last one is there at 1.203."""
    fleet = replace(fleet_of(BY_HAND), disturbances=(Disturbance(0.35, "down", 0), Disturbance(1.0, "up", 0)))
    found = simulate(fleet, trace_of([(0, 100, 5)]))
    assert stamps(found)[:, 0] == pytest.approx([0.0, 0.1, 1.203])
    assert found.tbt_max_s == pytest.approx([0.803]) and found.preemptions.tolist() == [1]


def test_tokens_whose_machine_dies_go_to_another_and_the_prompt_is_kept() -> None:
    """1 byte a token at 1000 bytes/s: A's prompt is done at 0.1 and on its way to machine 1, which dies at
    0.15. Its KV is sent once more, to machine 2, by 0.25; two more tokens by 0.45. Nothing is computed
    twice."""
    fleet = fleet_of(BY_HAND, ("prompt", "token", "token"), "mixed_pool", bytes_per_s=1000.0)
    fleet = replace(fleet, disturbances=(Disturbance(0.15, "down", 1),))
    found = simulate(fleet, trace_of([(0, 100, 3)]))
    assert found.e2e_s == pytest.approx([0.45]) and found.decode_worker.tolist() == [2]
    assert found.worker_tokens.tolist() == [100, 0, 2] and found.preemptions.tolist() == [0]


def test_slow_machines_and_links_take_longer() -> None:
    """Twice from 0.15 on: the step under way ends at 0.2, the last two at 0.4 and 0.6. A link at half its
    speed: 0.1 s become 0.2."""
    slow = replace(fleet_of(BY_HAND), disturbances=(Disturbance(0.15, "slow", 0, 2.0),))
    assert simulate(slow, trace_of([(0, 100, 4)])).e2e_s == pytest.approx([0.6])
    pair = fleet_of(BY_HAND, ("prompt", "token"), "mixed_pool", bytes_per_s=1000.0)
    pair = replace(pair, disturbances=(Disturbance(0.05, "link", 0, 2.0),))
    assert simulate(pair, trace_of([(0, 100, 3)])).e2e_s == pytest.approx([0.5])


def test_who_finds_no_machine_waits_for_one() -> None:
    """Both are down when the prompt comes, and one is back at 2.0; where none comes back it is rejected."""
    down = (Disturbance(0.0, "down", 0), Disturbance(0.0, "down", 1))
    fleet = fleet_of(BY_HAND, ("", ""))
    back = replace(fleet, disturbances=(*down, Disturbance(2.0, "up", 1)))
    assert simulate(back, trace_of([(1.0, 100, 2)])).e2e_s == pytest.approx([1.2])
    assert simulate(replace(fleet, disturbances=down), trace_of([(1.0, 100, 2)])).status.tolist() == [1]


# --- what must hold for any


@pytest.mark.parametrize("seed", some(range(40), 14))
def test_requests_and_tokens_in_are_requests_and_tokens_out(seed: int) -> None:
    """All finish or are rejected; the gaps recorded are output - 1 of each that finishes, when all do; and
    they sum to the time from first to last token. Limits count the same with and without a record, and in a
    closed loop no more than asked are in flight."""
    fleet, _, _, rows = random_case(seed)
    trace, limits = trace_of(rows), (Limit("ttft", 0.9, 1.0), Limit("tbt", 0.9, 0.5), Limit("e2e", 0.9, 5.0))
    simulation = simulate(fleet, trace, limits=limits, record=True)
    assert set(simulation.status.tolist()) <= {0, 1}
    assert simulate(fleet, trace, limits=limits).violations.tolist() == simulation.violations.tolist()
    if (simulation.status == 0).all():
        gaps, times = gaps_s(replace(simulation, window_s=(-1.0, math.inf)))
        assert times.sum() == (trace.output_tokens - 1).sum()
        assert gaps @ times == pytest.approx((simulation.e2e_s - simulation.ttft_s).sum())
        assert simulation.worker_tokens.sum() == trace.input_tokens.sum() + (trace.output_tokens - 1).sum()
    closed = simulate(fleet, trace, closed_loop=2)
    start, end = closed.arrival_s, closed.arrival_s + np.nan_to_num(closed.e2e_s)
    assert all(((start <= t) & (end > t + 1e-9)).sum() <= 2 for t in start)


def test_a_run_that_must_fail_stops_early() -> None:
    """Every request takes 2 s, one a second comes. The first that counts (warm-up: 0.45 s) came at 1 and is
    done at 3, while the next one runs on the other machine."""
    rows = [(float(i), 100, 20) for i in range(10)]
    limits = (Limit("e2e", 1.0, 1.0),)
    simulation = simulate(fleet_of(BY_HAND, ("", "")), trace_of(rows), limits=limits, stop_early=True)
    assert simulation.violations.tolist() == [1] and not simulation.complete
    assert simulation.status.tolist() == [0, 0] + [2] * 8


def test_a_queue_longer_than_expected_is_made_longer() -> None:
    """300 prompts at once on a machine of one task, whose queue begins with 66 places: each waits for all
    before it."""
    steps = SplitwiseLookup((0.0, 1000.0), (0.0, 1.0), (0.1, 0.1))
    simulation = simulate(fleet_of(steps, tasks=1), trace_of([(0, 10, 1)] * 300))
    assert simulation.ttft_s == pytest.approx(0.01 * np.arange(1, 301))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batching": "vllm-v1"}, "policies.pools is 'splitwise', which needs batching 'splitwise'"),
        ({"routing": "random"}, "policies.routing is 'random', must be one of"),
        ({"admission": "reserve-static"}, "policies.admission is 'reserve-static', must be one of greedy"),
        ({"queue": "sjf"}, "policies.queue is 'sjf', must be one of fcfs with batching 'splitwise'"),
    ],
)
def test_what_the_machines_do_not_know_is_refused(changes: dict[str, Any], message: str) -> None:
    fleet = fleet_of(BY_HAND, ("prompt", "token"), "mixed_pool")
    with pytest.raises(InputError, match=message):
        simulate(replace(fleet, policies=replace(fleet.policies, **changes)), trace_of([(0, 1, 1)]))


def test_without_a_mixed_pool_nobody_leaves_it() -> None:
    fleet = fleet_of(BY_HAND, ("prompt", "token"), "kv_token_jsq")
    fleet = replace(fleet, policies=replace(fleet.policies, repurpose_after_s=60.0))
    with pytest.raises(InputError, match="repurpose_after is of pools splitwise and repurpose"):
        simulate(fleet, trace_of([(0, 1, 1)]))
