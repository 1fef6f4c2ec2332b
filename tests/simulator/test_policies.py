"""What holds under every policy: nothing is lost, time runs forward, no engine idles with work at hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats
from shares import some
from simulations import GPU, LLM, make_latency, make_pool, make_trace

from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import read_fleet
from planner.errors import InputError
from planner.fleet import Disturbance, Fleet, Network, Policies, Pool, Role, WorkerType
from planner.policies import ADMISSION, BATCHING, BY_FIELD, PLANNED_ROUTINGS, POOLS, QUEUE, ROUTING, STEPWISE
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

FORMULATIONS = Path(__file__).parents[2] / "docs" / "formulations.md"

SHAPES: dict[str, tuple[Role, ...]] = {
    "mixed": ("mixed", "mixed"),
    "split": ("prefill", "decode", "decode"),
    "both": ("mixed", "prefill", "decode"),
}
WHOLE_LIFE = [name for name, row in BATCHING.items() if row.is_whole_life]
CASES = [
    (batching, shape)
    for batching in BATCHING
    for shape in SHAPES
    if shape == "mixed" or batching not in WHOLE_LIFE
]
STEPWISE_CASES = [case for case in CASES if BATCHING[case[0]].simulator == STEPWISE]
LONGEST_TOKENS = 210  # more than 12 blocks, less than 20


def choices(batching: str) -> Iterator[Policies]:
    """Every queue x admission x routing x pools that goes with a batching; hand-offs by the same routing. Of
    pools that drain a worker, which no queue nor admission sees, those by default.
    """
    engine = BATCHING[batching].simulator
    for rows in itertools.product(QUEUE.values(), ADMISSION.values(), ROUTING.values(), POOLS.values()):
        if any(row.reads_cache_state for row in rows):
            continue  # tests/simulator/test_prefix_kernel.py
        if any(engine not in row.simulators for row in rows):
            continue
        queue, admission, routing, pools = (row.name for row in rows)
        if pools == "repurpose" and (queue, admission) != (Policies().queue, Policies().admission):
            continue
        named: dict[str, Any] = {"queue": queue, "admission": admission, "routing": routing, "pools": pools}
        yield Policies(batching=batching, decode_routing=routing, **named)


def parts(batching: str) -> int:
    """Of how many parts these combinations are: `make test` takes the first, `make test-weekly` the rest."""
    return 4 if BATCHING[batching].simulator == STEPWISE else 1


def part_of_choices(batching: str, part: int) -> list[tuple[int, Policies]]:
    """One of those parts, by lot, each combination with its number."""
    found = list(enumerate(choices(batching)))
    return [found[i] for i in np.random.default_rng(1).permutation(len(found))[part :: parts(batching)]]


def in_parts(cases: list[tuple[str, str]]) -> list[Any]:
    return [
        case
        for batching, shape in cases
        for case in some([(batching, shape, part) for part in range(parts(batching))], 1)
    ]


def test_every_row_of_the_table_is_simulated() -> None:
    """Here, in the first part, or, where it looks at caches or tenants, in
    tests/simulator/test_prefix_kernel.py.
    """
    found = {
        (name, getattr(policies, name))
        for batching in BATCHING
        for _, policies in part_of_choices(batching, 0)
        for name in BY_FIELD
    }
    rows = {
        (name, row.name)
        for name, rows in BY_FIELD.items()
        for row in rows.values()
        if not row.reads_cache_state
    }
    assert found == rows


def random_fleet(
    rng: np.random.Generator, policies: Policies, shape: str, *, is_roomy: bool = False
) -> Fleet:
    """A few workers, some of several stages, often short of seats and KV; an instant network if roomy."""
    stages = [1] if BATCHING[policies.batching].is_one_stage else [1, 1, 2, 3]
    pools = []
    for i, role in enumerate(SHAPES[shape]):
        latency = make_latency(
            (0.5, 0.5, 1.5),
            knots=(1, 16, 128),
            a=1e-4,
            b=0.01,
            d=0.0 if shape == "mixed" and rng.random() < 0.5 else rng.uniform(0.5e-3, 1.5e-3),
            e=0.05,
            h=0.1,
        )
        blocks = int(rng.choice([12, 20, 60]))
        if policies.pools in ("flip", "repurpose"):  # roles change: workers of both pools hold the same
            blocks = 1000 if is_roomy else 20
        elif is_roomy and (role != "decode" or policies.batching == "splitwise"):
            blocks = 1000
        seats = int(rng.choice([1, 3, 8]))
        worker = WorkerType(
            GPU,
            1,
            latency,
            16 * blocks,
            int(rng.choice([8, 32, 256])),
            seats,
            1 if is_roomy else int(rng.choice(stages)),
        )
        pools.append(Pool(f"w{i}", role, worker, int(rng.integers(1, 4))))
    transfer: Literal["serialised", "layerwise"] = "layerwise" if rng.random() < 0.5 else "serialised"
    network = Network(
        1e30 if is_roomy else 10 ** rng.uniform(2, 5),
        0.0 if is_roomy else 0.05,
        transfer,
        int(rng.choice([0, 30])),
        bool(rng.random() < 0.5),
    )
    accuracy = (
        float(rng.choice([0.0, 0.7])) if policies.batching != "splitwise" and rng.random() < 0.5 else None
    )
    policies = replace(
        policies,
        prediction_accuracy_frac=accuracy,
        queue_batch=int(rng.choice([0, 4])),
        queue_window_s=float(rng.choice([5.0, np.inf])),
        flip_after_s=float(rng.choice([0.5, 5.0])),
        repurpose_after_s=2.0 if policies.pools in ("repurpose", "splitwise") else np.inf,
        reserve_tokens=LONGEST_TOKENS * (rng.random() < 0.5 or policies.batching == "faster-transformer"),
        ttft_s=float(rng.choice([2.0, np.inf])),
        tbt_s=float(rng.choice([1.0, np.inf])),
        patience_steps=3,
        watermark_frac=float(rng.choice([0.01, 0.1])),
        seed=int(rng.integers(9)),
    )
    return Fleet(LLM, tuple(pools), policies, network)


def random_trace(rng: np.random.Generator, n: int = 25) -> Trace:
    """Lengths such that a few requests fit on no worker of 12 blocks."""
    inputs = rng.integers(1, rng.choice([50, 150]), n)
    gap_s = float(rng.choice([0.2, 1.0, 5.0]))
    return make_trace(
        np.cumsum(rng.exponential(gap_s, n)),
        inputs,
        np.minimum(rng.integers(1, 60, n), LONGEST_TOKENS - inputs),
    )


def random_disturbances(rng: np.random.Generator, fleet: Fleet, until_s: float) -> tuple[Disturbance, ...]:
    """Workers die and most come back, some run slower, the link too."""
    events: list[Disturbance] = []
    for w in range(fleet.workers):
        if rng.random() < 0.6:
            down_s = rng.uniform(0, until_s)
            events.append(Disturbance(down_s, "down", w))
            if rng.random() < 0.8:
                events.append(Disturbance(down_s + rng.uniform(0, until_s), "up", w))
        if rng.random() < 0.4:
            events.append(Disturbance(rng.uniform(0, until_s), "slow", w, float(rng.choice([0.5, 3.0]))))
    events.append(Disturbance(rng.uniform(0, until_s), "link", factor=float(rng.choice([0.2, 10.0]))))
    return tuple(sorted(events, key=lambda event: event.time_s))


def run_seconds(runs: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    steps = runs["steps"]
    seconds: npt.NDArray[np.float64] = runs["first_s"] * steps + runs["growth_s"] * (steps * (steps - 1) / 2)
    return seconds


def check_nothing_is_lost(fleet: Fleet, trace: Trace, result: Simulation) -> None:
    """Requests and tokens in = out; what is not finished fits nowhere, or nobody who could is up."""
    down = set()
    for event in fleet.disturbances:
        if event.kind == "down":
            down.add(event.worker)
        elif event.kind == "up":
            down.discard(event.worker)
    pools = [pool for pool in fleet.pools for _ in range(pool.count)]
    need = -(-(trace.input_tokens + trace.output_tokens) // 16)
    policies = fleet.policies

    def room(pool: Pool) -> int:
        """Blocks of the longest request that an idle worker accepts."""
        blocks = pool.type.kv_tokens // 16
        if policies.batching in ("orca", "faster-transformer") and policies.reserve_tokens:
            reserved = -(-policies.reserve_tokens // 16)
            return reserved if reserved <= blocks else 0
        return blocks - (
            int(policies.watermark_frac * blocks) if BATCHING[policies.batching].is_watermarked else 0
        )

    def somewhere(is_decode: bool, without: set[int]) -> npt.NDArray[np.bool_]:
        rooms = [
            room(pool)
            for w, pool in enumerate(pools)
            if (pool.role == "decode") == is_decode and w not in without
        ]
        return need <= max(rooms, default=0)

    is_split = any(pool.role == "decode" for pool in pools)
    fits = somewhere(False, set())
    assert (result.status[~fits] != 0).all() or policies.batching == "splitwise"  # prefill holds prompts only
    if not fleet.disturbances:
        assert (result.status != 2).all()
        rejected = result.status == 1
        may_be = ~fits | (~somewhere(True, set()) if is_split else False)
        if fleet.policies.batching != "splitwise":  # which rejects what would wait for ever
            assert not (rejected & ~may_be).any()
    elif fleet.policies.pools == "static":
        # else KV that nobody can fetch may fill a prefill worker for ever
        if (somewhere(False, down) >= fits).all() and (somewhere(True, down) >= somewhere(True, set())).all():
            assert (result.status != 2).all()
    finished = result.status == 0
    assert (result.queue_s[finished] >= 0).all()
    assert (result.ttft_s[finished] >= result.queue_s[finished]).all()
    assert (result.e2e_s[finished] >= result.ttft_s[finished]).all()
    assert np.isfinite(result.e2e_s[finished]).all()
    assert np.isnan(result.e2e_s[~finished]).all()
    several = finished & (result.output_tokens > 1)
    assert (result.tbt_max_s[several] >= result.tpot_s[several] * (1 - 1e-12)).all()
    gaps = int((result.runs["steps"] * result.runs["sequences"]).sum())
    if finished.all():
        assert gaps == (trace.output_tokens - 1).sum()
        decoding_s = float((run_seconds(result.runs) * result.runs["sequences"]).sum())
        assert decoding_s == pytest.approx((result.e2e_s - result.ttft_s).sum(), rel=1e-9)
        layers = (trace.input_tokens + trace.output_tokens - 1).sum()
        if (result.preemptions == 0).all() and not fleet.disturbances:
            assert result.worker_tokens.sum() == layers
        elif not fleet.disturbances:
            assert result.worker_tokens.sum() > layers - result.preemptions.sum()
    else:
        assert gaps >= (trace.output_tokens - 1)[finished].sum()


def check_engines(fleet: Fleet, trace: Trace, result: Simulation) -> None:
    """KV blocks stay within the cache, no engine is busy for longer than there was time."""
    steps = result.runs[result.runs["prefill_tokens"] >= 0]
    blocks = np.array([pool.type.kv_tokens // 16 for pool in fleet.pools for _ in range(pool.count)])
    if (
        fleet.policies.batching == "lightllm"
    ):  # counts KV in tokens: the last block of a request may be shared
        blocks += np.array([pool.type.max_num_seqs for pool in fleet.pools for _ in range(pool.count)])
    assert (steps["blocks"] >= 0).all()
    assert (steps["blocks"] <= blocks[steps["worker"]]).all()
    ends_s = result.runs["start_s"] + run_seconds(result.runs)
    elapsed_s = max(float(ends_s.max(initial=0)), trace.arrival_s[-1]) - trace.arrival_s[0]
    assert (result.worker_busy_s <= elapsed_s * (1 + 1e-9)).all()


def check_no_engine_idles_with_work(fleet: Fleet, result: Simulation) -> None:
    """Work conservation, where KV reaches decode workers at once: an engine is busy exactly while a request
    is with it, from arrival to first token, or from there to the last, or all along.
    """
    handed_off = (result.prefill_worker != result.decode_worker) | (result.status == 1)
    arrival_s = result.arrival_s
    first_s, last_s = arrival_s + result.ttft_s, arrival_s + result.e2e_s
    for w, busy_s in enumerate(result.worker_busy_s):
        stays = []
        for here, begin_s, end_s in (
            ((result.prefill_worker == w) & ~handed_off, arrival_s, last_s),
            ((result.prefill_worker == w) & handed_off, arrival_s, first_s),
            ((result.decode_worker == w) & handed_off, first_s, last_s),
        ):
            here = here & np.isfinite(end_s)
            stays += list(zip(begin_s[here].tolist(), end_s[here].tolist(), strict=True))
        total_s, until_s = 0.0, -np.inf
        for begin, end in sorted(stays):
            total_s += max(end - max(begin, until_s), 0.0)
            until_s = max(until_s, end)
        assert busy_s == pytest.approx(total_s, rel=1e-9, abs=1e-9), w


@pytest.mark.long
@pytest.mark.parametrize(("batching", "shape", "part"), in_parts(CASES))
def test_nothing_is_lost_under_any_policy(batching: str, shape: str, part: int) -> None:
    """Every queue x admission x routing x pools, on random fleets and traces."""
    for i, policies in part_of_choices(batching, part):
        rng = np.random.default_rng([i, list(BATCHING).index(batching), list(SHAPES).index(shape)])
        fleet, trace = random_fleet(rng, policies, shape), random_trace(rng)
        result = simulate(fleet, trace, record=True)
        check_nothing_is_lost(fleet, trace, result)
        check_engines(fleet, trace, result)


@pytest.mark.long
@pytest.mark.parametrize(("batching", "shape", "part"), in_parts(STEPWISE_CASES))
def test_nothing_is_lost_under_failures(batching: str, shape: str, part: int) -> None:
    """The same where workers die, most of them to return, or slow down, and the link does."""
    for i, policies in part_of_choices(batching, part):
        rng = np.random.default_rng([i, list(BATCHING).index(batching), list(SHAPES).index(shape), 7])
        fleet, trace = random_fleet(rng, policies, shape), random_trace(rng)
        fleet = replace(fleet, disturbances=random_disturbances(rng, fleet, float(trace.arrival_s[-1])))
        result = simulate(fleet, trace, record=True)
        check_nothing_is_lost(fleet, trace, result)
        check_engines(fleet, trace, result)


@pytest.mark.long
@pytest.mark.parametrize(("batching", "shape", "part"), in_parts(CASES))
def test_no_engine_idles_with_work(batching: str, shape: str, part: int) -> None:
    """Every queue x admission x routing x pools, one stage, room enough where KV waits to be fetched. What a
    router holds back is with nobody: there who came first may wait for the one worker it fits on."""
    for i, policies in part_of_choices(batching, part):
        if ROUTING[policies.routing].holds_back:
            continue
        rng = np.random.default_rng([i, list(BATCHING).index(batching), list(SHAPES).index(shape), 9])
        fleet, trace = random_fleet(rng, policies, shape, is_roomy=True), random_trace(rng)
        result = simulate(fleet, trace, record=True)
        check_no_engine_idles_with_work(fleet, result)


def step_by_step(fleet: Fleet, result: Simulation) -> Fleet:
    """The fleet with an event in the midst of every step of a run that `result` recorded, which sets the
    worker to the speed it has: it changes nothing, but nobody knows that, and every run ends there.
    """
    slow = [event for event in fleet.disturbances if event.kind == "slow"]
    runs = result.runs[(result.runs["prefill_tokens"] >= 0) & (result.runs["steps"] > 1)]
    events = []
    for run in runs:
        j = np.arange(run["steps"])
        middle_s = run["start_s"] + run["first_s"] * (j + 0.5) + run["growth_s"] * (j * (j - 1) / 2 + j / 2)
        for time_s in middle_s.tolist():
            before = [e.factor for e in slow if e.worker == run["worker"] and e.time_s <= time_s]
            events.append(Disturbance(time_s, "slow", int(run["worker"]), before[-1] if before else 1.0))
    both = (*fleet.disturbances, *events)
    return replace(fleet, disturbances=tuple(sorted(both, key=lambda event: event.time_s)))


@pytest.mark.long
@pytest.mark.parametrize(("batching", "shape", "part"), in_parts(STEPWISE_CASES))
def test_runs_of_steps_equal_steps_one_at_a_time(batching: str, shape: str, part: int) -> None:
    """Closed form against step by step: same workers and preemptions, times to 1e-9, with failures too."""
    taken_at_once = 0
    for i, policies in part_of_choices(batching, part):
        rng = np.random.default_rng([i, list(BATCHING).index(batching), list(SHAPES).index(shape), 11])
        fleet, trace = random_fleet(rng, policies, shape), random_trace(rng)
        if rng.random() < 0.5:
            fleet = replace(fleet, disturbances=random_disturbances(rng, fleet, float(trace.arrival_s[-1])))
        fast = simulate(fleet, trace, record=True)
        slow = simulate(step_by_step(fleet, fast), trace, record=True)
        taken_at_once += int((fast.runs["steps"] > 1).sum())
        assert slow.runs["steps"].max(initial=1) == 1
        for name in ("status", "prefill_worker", "decode_worker", "preemptions", "worker_steps"):
            np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name), err_msg=name)
        for name in ("queue_s", "ttft_s", "tpot_s", "tbt_max_s", "e2e_s", "worker_busy_s"):
            np.testing.assert_allclose(
                getattr(fast, name), getattr(slow, name), rtol=1e-9, atol=1e-9, err_msg=name
            )
    assert taken_at_once > 50


# ---------------------------------------------------------------------------------------------------- by hand


def times(result: Simulation) -> list[tuple[float, float]]:
    """(ttft, e2e) of every request."""
    return list(zip(result.ttft_s.tolist(), result.e2e_s.tolist(), strict=True))


def one_at_a_time(**policies: Any) -> Fleet:
    """A worker with one seat and steps of 1 s."""
    return Fleet(LLM, (make_pool(make_latency(), seats=1),), Policies(**policies))


@pytest.mark.parametrize(
    ("queue", "first_token_s"),
    [("fcfs", [2, 3, 28]), ("sjf", [28, 2, 27]), ("ljf", [2, 4, 3]), ("srpt", [3, 4, 2])],
)
def test_queue_orders(queue: str, first_token_s: list[float]) -> None:
    """While something runs in [0, 1] prompts of 30, 10, 20 tokens come, with 1, 25, 1 tokens out, so that the
    second takes 25 steps. Prompt and output are 31, 35, 21: by those the last comes first."""
    trace = make_trace([0.0, 0.5, 0.5, 0.5], [1, 30, 10, 20], [1, 1, 25, 1])
    result = simulate(one_at_a_time(queue=queue), trace)
    assert (result.arrival_s + result.ttft_s)[1:].tolist() == first_token_s


def test_nobody_is_overtaken_by_what_comes_longer_than_the_longest_wait_after() -> None:
    """Longest wait 8 s, longest prompt 40 tokens: the prompt of 40 that came at 0.5 ranks as 8.5. One of 10
    ranks 2 s after it came: at 6.25 (8.25) it overtakes, at 7 (9) no more. The seat is free at 9."""
    trace = make_trace([0.0, 0.5, 6.25, 7.0], [1, 40, 10, 10], [9, 1, 1, 1])
    result = simulate(one_at_a_time(queue="sjf", queue_window_s=8.0), trace)
    assert (result.arrival_s + result.ttft_s)[1:].tolist() == [11.0, 10.0, 12.0]


def test_prompts_overtake_only_inside_their_scheduling_batch() -> None:
    """Batches of two, shortest first: 30 and 10, then 20 and 5: 10, 30, 5, 20, where without batches it were
    5, 10, 20, 30 (TetriInfer section 3.3)."""
    trace = make_trace([0.0, *[0.5] * 4], [1, 30, 10, 20, 5], [1] * 5)
    batches = simulate(one_at_a_time(queue="sjf", queue_batch=2), trace)
    assert (batches.arrival_s + batches.ttft_s)[1:].tolist() == [3.0, 2.0, 5.0, 4.0]
    free = simulate(one_at_a_time(queue="sjf"), trace)
    assert (free.arrival_s + free.ttft_s)[1:].tolist() == [5.0, 3.0, 4.0, 2.0]


def admitting(admission: str, blocks: int, **policies: Any) -> Fleet:
    pool = make_pool(make_latency(), kv_tokens=16 * blocks)
    return Fleet(LLM, (pool,), Policies(admission=admission, **policies))


@pytest.mark.parametrize(
    ("admission", "ttft_s", "preempted"), [("greedy", 1.5, 1), ("reserve-static", 30.5, 0)]
)
def test_reserve_static_admits_what_fits_as_predicted(admission: str, ttft_s: float, preempted: int) -> None:
    """3 blocks, 1 s steps. A (16 in, 30 out) has 1 when B (16 in, 30 out) comes at 0.5. B is predicted to
    need 46 tokens, 3 blocks: no room beside A, which ends at 30. Greedily it enters at once, and is
    preempted when both want a third one.
    """
    result = simulate(admitting(admission, 3), make_trace([0.0, 0.5], [16, 16], [30, 30]))
    assert result.ttft_s.tolist() == [1.0, ttft_s]
    assert result.preemptions.sum() == preempted


def test_reserve_dynamic_admits_what_fits_when_the_first_decode_ends() -> None:
    """5 blocks, 1 s steps. A (16 in, 20 out) will hold 3 blocks at its end. B (16 in, 48 out), there at 0.5,
    will have made as many tokens then as A has left: 19 - k after k steps, in ceil((35 - k) / 16) blocks.
    They are 2 from k = 3 on: B's prompt runs in [4, 5]. reserve-static counts A's one block at 1 s, and 4
    for all of B: [1, 2].
    """
    trace = make_trace([0.0, 0.5], [16, 16], [20, 48])
    dynamic = simulate(admitting("reserve-dynamic", 5), trace)
    assert dynamic.ttft_s.tolist() == [1.0, 4.5]
    static = simulate(admitting("reserve-static", 5), trace)
    assert static.ttft_s.tolist() == [1.0, 1.5]


def test_wrong_predictions_hold_requests_back_but_never_for_ever() -> None:
    """16 blocks. Four outputs of 30 tokens, taken for the next bucket, of 201 at least: 217 tokens, 14
    blocks. Beside the prompts of two others there is room for that, beside three not. Known, a request needs
    3 blocks: all run at once. One that is believed to need more than there is runs alone.
    """
    trace = make_trace(np.zeros(4), [16] * 4, [30] * 4)
    wrong = simulate(admitting("reserve-static", 16, prediction_accuracy_frac=0.0), trace)
    assert wrong.e2e_s.tolist() == [30.0, 30.0, 30.0, 60.0]
    assert simulate(admitting("reserve-static", 16), trace).e2e_s.tolist() == [30.0] * 4
    alone = simulate(admitting("reserve-static", 10, prediction_accuracy_frac=0.0), trace)
    assert alone.e2e_s.tolist() == [30.0, 60.0, 90.0, 120.0]


def test_power_of_two_balances_better_than_one_draw() -> None:
    """20 servers of 1 s each at 0.85 of their load. One random server each: M/D/1, a mean wait of 0.85 / 0.3
    = 2.8 s. The better of two random ones: below a third of that. Equal seeds choose equally, others do not.
    """
    rng = np.random.default_rng(3)
    n = 20_000
    trace = make_trace(np.cumsum(rng.exponential(1 / 17, n)), np.ones(n, int), np.ones(n, int))

    def run(routing: str, seed: int = 1) -> Simulation:
        pool = make_pool(make_latency(), seats=1, count=20)
        return simulate(Fleet(LLM, (pool,), Policies(routing=routing, seed=seed)), trace)

    one, two = run("random"), run("power-of-two")
    assert one.queue_s.mean() == pytest.approx(0.85 / 0.3, rel=0.15)
    assert two.queue_s.mean() < one.queue_s.mean() / 3
    assert (np.bincount(one.prefill_worker, minlength=20) > n / 20 * 0.85).all()
    assert run("power-of-two").prefill_worker.tobytes() == two.prefill_worker.tobytes()
    assert run("power-of-two", seed=2).prefill_worker.tobytes() != two.prefill_worker.tobytes()


def test_heavy_outputs_are_spread_whatever_is_shorter() -> None:
    """Two workers, so both are drawn, and ten heavy outputs (above 128) and ten light ones in turn. Each
    worker gets half of either; jsq, which counts prompts and requests, puts every second one on the same.
    """
    outputs = [400, 20] * 10
    pool = make_pool(make_latency(), count=2)
    trace = make_trace(np.arange(20) * 1e-3, [16] * 20, outputs)

    def heavy_each(policies: Policies) -> tuple[int, int]:
        sent = simulate(Fleet(LLM, (pool,), policies), trace).prefill_worker
        assert np.bincount(sent, minlength=2).tolist() == [10, 10]
        heavy = sent[np.array(outputs) > 128]
        return int((heavy == 0).sum()), int((heavy == 1).sum())

    assert heavy_each(Policies(routing="jsq")) == (10, 0)
    for seed in range(5):
        assert heavy_each(Policies(routing="heavy-light", seed=seed)) == (5, 5)


def test_loads_are_heard_no_more_often_than_said() -> None:
    """100 heavy outputs of 200 s, one a second, two workers: heard every time they differ by one request at
    most. Heard every 10 s, of what came in between nothing is known, and one worker gets the next ten.
    """
    pool = make_pool(make_latency(), count=2)
    trace = make_trace(np.arange(100.0), [16] * 100, [200] * 100)
    runs = {}
    for period_s in (0.0, 10.0):
        policies = Policies(routing="heavy-light", load_period_s=period_s)
        sent = simulate(Fleet(LLM, (pool,), policies), trace).prefill_worker
        runs[period_s] = np.abs(np.cumsum(2 * sent - 1)).max()
    assert runs[0.0] == 1 and 5 <= runs[10.0] <= 15


def test_heavy_light_asks_for_room_for_all_of_the_output() -> None:
    """Worker 1 has 4 blocks, worker 0 has 20: 16 + 200 tokens have room on worker 0 alone, so it gets two of
    them, though then it has all the heavy ones; where none has room any fits does."""
    pools = tuple(make_pool(make_latency(), kv_tokens=16 * blocks, count=1) for blocks in (30, 14))
    fleet = Fleet(LLM, pools, Policies(routing="heavy-light"))
    trace = make_trace([0.0, 0.001, 0.002], [16] * 3, [200] * 3)
    sent = simulate(fleet, trace).prefill_worker.tolist()
    assert sorted(sent[:2]) == [0, 1] and sent[2] == 0


def test_a_predictor_slows_prefill_workers_alone() -> None:
    """1 s steps, 10 % longer where lengths are predicted: first token after 1.1 s, then 1 s each."""
    trace = make_trace([0.0], [8], [4])
    plain, slow = simulate(split(1, 1), trace), simulate(split(1, 1, predictor_slowdown_frac=0.1), trace)
    assert slow.ttft_s[0] == pytest.approx(1.1 * plain.ttft_s[0])
    assert slow.e2e_s[0] - slow.ttft_s[0] == pytest.approx(plain.e2e_s[0] - plain.ttft_s[0])


def test_the_fewer_requests_of_two_drawn() -> None:
    """Of two workers it is always the one with fewer: four at once go two and two. Idle ones are drawn
    evenly: of 20 each gets a twentieth, within four standard deviations.
    """
    policies = Policies(routing="power-of-two-requests")
    two = Fleet(LLM, (make_pool(make_latency(), count=2),), policies)
    sent = simulate(two, make_trace(np.arange(4) * 0.01, [16] * 4, [50] * 4)).prefill_worker
    assert sorted(sent[:2].tolist()) == sorted(sent[2:].tolist()) == [0, 1]
    n = 8000
    idle = Fleet(LLM, (make_pool(make_latency(), count=20),), policies)
    sent = simulate(idle, make_trace(np.arange(n) * 10.0, [1] * n, [1] * n)).prefill_worker
    assert abs(np.bincount(sent, minlength=20) - n / 20).max() < 4 * np.sqrt(n / 20)


def test_the_fewest_pending_tokens_and_by_lot_among_equals() -> None:
    """1 s per token. A prompt of 30 on one of three workers; while it is computed others go elsewhere, to
    whichever of the two has less; idle workers are drawn evenly, whatever they decode.
    """
    policies = Policies(routing="pending-tokens")
    pool = make_pool(make_latency((1.0, 1024.0)), count=3)
    trace = make_trace([0.0, 0.1, 0.2, 0.3, 0.4], [30, 20, 5, 5, 5], [2] * 5)
    sent = simulate(Fleet(LLM, (pool,), policies), trace).prefill_worker.tolist()
    assert len(set(sent[:3])) == 3 and sent[3] == sent[4] == sent[2]
    n = 9000
    sent = simulate(
        Fleet(LLM, (make_pool(make_latency(), count=3),), policies),
        make_trace(np.arange(n) * 10.0, [1] * n, [1] * n),
    ).prefill_worker
    assert abs(np.bincount(sent, minlength=3) - n / 3).max() < 4 * np.sqrt(n / 3)


def test_best_fit_fills_the_fullest_worker_that_keeps_the_limits() -> None:
    """A step of D decodes takes 1 + D / 10 s: within 1.25 s go two. Five long requests: 0, 0, 1, 1, 2, where
    the shortest queue says 0, 1, 2, 0, 1. Without any room the emptiest: 2, 2 (to be full), then 0, 1, 2."""
    pool = make_pool(make_latency(b=0.1), count=3)
    trace = make_trace(np.arange(9) * 0.01, [16] * 9, [50] * 9)
    fleet = Fleet(LLM, (pool,), Policies(routing="best-fit", tbt_s=1.25))
    assert simulate(fleet, trace).prefill_worker.tolist() == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    shortest = Fleet(LLM, (pool,), Policies(routing="least-outstanding"))
    assert simulate(shortest, trace).prefill_worker.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_best_fit_keeps_the_limit_on_the_first_token() -> None:
    """1 s per token. Prompts of 10 within 25 s: two on a worker, then the next one."""
    pool = make_pool(make_latency((1.0, 1024.0)), count=3)
    fleet = Fleet(LLM, (pool,), Policies(routing="best-fit", ttft_s=25.0))
    trace = make_trace(np.arange(5) * 0.01, [10] * 5, [2] * 5)
    assert simulate(fleet, trace).prefill_worker.tolist() == [0, 0, 1, 1, 2]


def split(
    prefill: int = 1,
    decode: int = 1,
    *,
    network: Network | None = None,
    decode_kv_tokens: int = 16000,
    **policies: Any,
) -> Fleet:
    """Workers with steps of 1 s and an instant network."""
    pools = (
        make_pool(make_latency(), role="prefill", count=prefill, name="p"),
        make_pool(make_latency(), role="decode", count=decode, kv_tokens=decode_kv_tokens, name="d"),
    )
    return Fleet(LLM, pools, Policies(**policies), network or Network(1e30, transfer="serialised"))


def test_an_instance_flips_after_a_minute_idle_where_the_other_pool_has_work() -> None:
    """Workers 0 prefills, 1 and 2 decode. At 30 s two prompts come: both decode workers are idle for only
    half a minute. At 100 s worker 1 is idle for 70 s or, decoding until 31 + 9 = 40 s, for 60 s: when the
    second prompt finds worker 0 at work, worker 1 becomes a prefill worker."""
    trace = make_trace([30.0, 30.5, 100.0, 100.5], [8] * 4, [1] * 4)
    assert simulate(split(1, 2, pools="flip"), trace).prefill_worker.tolist() == [0, 0, 0, 1]
    assert simulate(split(1, 2), trace).prefill_worker.tolist() == [0, 0, 0, 0]
    longer = simulate(split(1, 2, pools="flip", flip_after_s=120.0), trace)
    assert longer.prefill_worker.tolist() == [0, 0, 0, 0]
    assert simulate(split(1, 1, pools="flip"), trace).prefill_worker.tolist() == [0, 0, 0, 0]


def test_the_pool_that_is_short_gets_a_worker_that_drains_first() -> None:
    """Steps of 1 s, one seat per worker. Both decode workers soon have a request of thirty tokens, so they
    are short at the hand-offs that follow, a second apart: nobody can be spared of one prefill worker, but
    one of two, which decodes from then on."""
    trace = make_trace([0.0, 1.0, 2.0, 3.0, 4.0], [8] * 5, [30] * 5)

    def used(prefill: int) -> set[int]:
        fleet = split(prefill, 2, pools="repurpose", repurpose_after_s=1.0)
        pools = tuple(replace(pool, type=replace(pool.type, max_num_seqs=1)) for pool in fleet.pools)
        return set(simulate(replace(fleet, pools=pools), trace).decode_worker.tolist())

    assert used(1) == {1, 2}
    assert used(2) == {0, 2, 3}


def down(time_s: float, worker: int) -> Disturbance:
    return Disturbance(time_s, "down", worker)


def up(time_s: float, worker: int) -> Disturbance:
    return Disturbance(time_s, "up", worker)


def test_a_request_whose_worker_dies_recomputes_all_its_tokens_elsewhere() -> None:
    """1 s steps. A (8 in, 10 out) has made 4 tokens when worker 0 dies at 4.5. Worker 1 recomputes 8 + 4 in
    [4.5, 5.5], which makes the fifth, 1.5 s after the fourth, and the tenth leaves at 10.5. The step that was
    lost does not count as one."""
    pool = make_pool(make_latency(), count=2)
    fleet = Fleet(LLM, (pool,), disturbances=(down(4.5, 0),))
    result = simulate(fleet, make_trace([0.0], [8], [10]))
    assert times(result) == [(1.0, 10.5)]
    assert result.tbt_max_s.tolist() == [1.5]
    assert result.preemptions.tolist() == [1]
    assert result.worker_tokens.tolist() == [8 + 3, 12 + 5]
    assert result.worker_steps.tolist() == [4, 6]


def test_all_workers_down_then_up() -> None:
    """A (8 in, 5 out) has made 2 tokens at 2.5, when its only worker dies until 10: then 10 tokens are
    recomputed in [10, 11], in one step with B's prompt, which came at 5. C comes when all is over."""
    pool = make_pool(make_latency())
    fleet = Fleet(LLM, (pool,), disturbances=(down(2.5, 0), up(10.0, 0)))
    result = simulate(fleet, make_trace([0.0, 5.0, 20.0], [8, 4, 4], [5, 2, 1]))
    assert times(result) == [(1.0, 13.0), (6.0, 7.0), (1.0, 1.0)]
    assert result.tbt_max_s[0] == 9.0
    assert result.worker_tokens[0] == 8 + 1 + (10 + 4) + (2 + 1) + 4
    never = simulate(replace(fleet, disturbances=(down(2.5, 0),)), make_trace([0.0, 5.0], [8, 4], [5, 2]))
    assert never.status.tolist() == [2, 2]


@pytest.mark.parametrize("restart_s", [0.0, 5.0])
def test_who_waits_for_a_worker_gets_one_that_changes_its_role(restart_s: float) -> None:
    """The only prefill worker dies at 10. At 20 no decode worker has been idle for a minute, at 100 worker 1
    has: it prefills both prompts then, or after its restart, which no other event follows.
    """
    fleet = split(1, 2, pools="flip", flip_restart_s=restart_s)
    fleet = replace(fleet, disturbances=(down(10.0, 0),))
    result = simulate(fleet, make_trace([20.0, 100.0], [8, 8], [1, 1]))
    assert times(result) == [(81.0 + restart_s,) * 2, (1.0 + restart_s,) * 2]


def test_who_waits_gets_a_worker_that_is_spared() -> None:
    """The same where a worker is spared once its pool has been short for a second; at 30 s it changes."""
    fleet = split(1, 2, pools="repurpose", repurpose_after_s=1.0)
    fleet = replace(fleet, disturbances=(down(10.0, 0),))
    result = simulate(fleet, make_trace([20.0, 22.0, 30.0], [8, 8, 8], [1, 1, 1]))
    assert not result.status.any()


def test_a_prefill_worker_dies_while_kv_waits_there() -> None:
    """2 blocks on the decode worker, held by A (17 in, 9 out) until 9. B (17 in, 3 out) was prefilled on
    worker 0 in [1, 2] and waits there. At 5.5 that dies: worker 1 recomputes 18 tokens in [5.5, 6.5], which
    makes B's second token. The third is decoded in [9, 10]."""
    fleet = split(2, decode_kv_tokens=32, routing="round-robin")
    trace = make_trace([0.0, 0.5, 1.0], [17, 1, 17], [9, 1, 3])
    assert simulate(fleet, trace).prefill_worker.tolist() == [0, 1, 0]
    result = simulate(replace(fleet, disturbances=(down(5.5, 0),)), trace)
    assert result.prefill_worker.tolist() == [0, 1, 1]
    assert times(result) == [(1.0, 9.0), (1.0, 1.0), (1.0, 9.0)]
    assert result.tbt_max_s[2] == 4.5
    assert result.worker_tokens.tolist() == [17 + 17, 1 + 18, 8 + 1]


def test_a_prefill_worker_dies_while_its_kv_is_on_the_link() -> None:
    """A block takes 4 s to cross. A (8 in, 3 out) leaves worker 0 at 1, which dies at 2: at 5 that shows.
    Worker 1 recomputes 9 tokens in [5, 6], they cross until 10, and the third token is decoded in [10, 11].
    """
    fleet = split(2, network=Network(64.0, transfer="serialised"))
    result = simulate(replace(fleet, disturbances=(down(2.0, 0),)), make_trace([0.0], [8], [3]))
    assert times(result) == [(1.0, 11.0)]
    assert result.preemptions.tolist() == [1]
    assert result.tbt_max_s.tolist() == [5.0]


def test_a_decode_worker_dies_while_kv_comes_to_it() -> None:
    """A block takes 4 s to cross. A (8 in, 2 out) is on its way to decode worker 1 from 1 to 5; that dies at
    2. Its KV lies on worker 0 still, and crosses to worker 2 in [5, 9]: decoded in [9, 10], not recomputed.
    """
    fleet = split(1, 2, network=Network(64.0, transfer="serialised"))
    result = simulate(replace(fleet, disturbances=(down(2.0, 1),)), make_trace([0.0], [8], [2]))
    assert times(result) == [(1.0, 10.0)]
    assert result.decode_worker.tolist() == [2]
    assert result.preemptions.tolist() == [0]
    assert result.worker_tokens.tolist() == [8, 0, 1]


def test_a_straggler_takes_longer_from_its_next_step_on() -> None:
    """1 s steps, of 3 s from 2.5 on, which the step in [2, 3] is not yet, and of 1 s again from 7 on, within
    the step in [6, 9]: tokens at 1, 2, 3, 6, 9, 10."""
    slower = (Disturbance(2.5, "slow", 0, 3.0), Disturbance(7.0, "slow", 0, 1.0))
    fleet = Fleet(LLM, (make_pool(make_latency()),), disturbances=slower)
    result = simulate(fleet, make_trace([0.0], [8], [6]))
    assert times(result) == [(1.0, 10.0)]
    assert result.tbt_max_s.tolist() == [3.0]


def test_a_slow_link_delays_what_is_sent_from_then_on() -> None:
    """A block takes 1 s to cross, 5 s from 1.5 on: A, sent at 1, is there at 2; B, sent at 11, at 16."""
    fleet = split(network=Network(256.0, transfer="serialised"))
    fleet = replace(fleet, disturbances=(Disturbance(1.5, "link", factor=5.0),))
    result = simulate(fleet, make_trace([0.0, 10.0], [8, 8], [2, 2]))
    assert times(result) == [(1.0, 3.0), (1.0, 7.0)]


@pytest.mark.parametrize(("layerwise_tokens", "e2e_s"), [(20, 2.125), (21, 2.5)])
def test_short_prompts_are_not_sent_layer_by_layer(layerwise_tokens: int, e2e_s: float) -> None:
    """2 blocks take 0.5 s to cross after a prefill in [0, 1]; layer by layer 3 of 4 layers do before its end,
    which a prompt of 20 tokens is not worth from a threshold of 21 on."""
    fleet = split(network=Network(1024.0, transfer="layerwise", layerwise_tokens=layerwise_tokens))
    assert simulate(fleet, make_trace([0.0], [20], [2])).e2e_s.tolist() == [e2e_s]


@pytest.mark.parametrize(("is_shared", "e2e_s"), [(True, [3.0, 4.0]), (False, [3.0, 3.0])])
def test_transfers_share_a_link_or_do_not(is_shared: bool, e2e_s: list[float]) -> None:
    """A and B leave prefill together at 1, a block each takes 1 s: together at 2, or one at 2 and one at 3.
    Each has a decode worker of its own."""
    network = Network(256.0, transfer="serialised", is_shared=is_shared)
    fleet = split(1, 2, network=network, decode_routing="round-robin")
    assert simulate(fleet, make_trace([0.0, 0.0], [8, 8], [2, 2])).e2e_s.tolist() == e2e_s


def test_what_no_worker_can_hold_is_rejected_though_one_is_down() -> None:
    """40 tokens never fit 2 blocks. 20 do, on the worker that is down: they wait for it."""
    pools = (
        make_pool(make_latency(), kv_tokens=16, name="a"),
        make_pool(make_latency(), kv_tokens=32, name="b"),
    )
    fleet = Fleet(LLM, pools, disturbances=(down(0.5, 1), up(5.0, 1)))
    result = simulate(fleet, make_trace([0.0, 1.0, 1.0], [8, 40, 19], [1, 1, 1]))
    assert result.status.tolist() == [0, 1, 0]
    assert result.ttft_s[2] == 5.0


def test_a_request_that_its_watermark_would_never_admit_is_rejected() -> None:
    """20 blocks, a tenth left free: 18 admit a prompt. 300 tokens need 19."""
    fleet = Fleet(
        LLM, (make_pool(make_latency(), kv_tokens=320),), Policies(batching="vllm-v0", watermark_frac=0.1)
    )
    result = simulate(fleet, make_trace([0.0, 0.0], [298, 280], [2, 2]))
    assert result.status.tolist() == [1, 0]


@pytest.mark.parametrize("batching", WHOLE_LIFE)
def test_batching_that_keeps_a_request_to_its_end_wants_mixed_workers(batching: str) -> None:
    with pytest.raises(InputError, match="role mixed"):
        simulate(split(batching=batching, reserve_tokens=64), make_trace([0.0], [8], [2]))


def test_events_of_a_fleet_file(tmp_path: Path) -> None:
    """Workers by their names in the results, in order over all pools; slow: link is the network."""
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "llm: meta-llama/Llama-3.1-8B\n"
        "workers:\n"
        "  - {name: pre, role: prefill, gpu: h100-80g, count: 2}\n"
        "  - {name: dec, role: decode, gpu: h100-80g}\n"
        "events: [{at: 1 min, down: dec-0}, {at: 90 s, up: dec-0}, {at: 5 s, slow: pre-1, factor: 1.5},\n"
        "         {at: 7 s, slow: link, factor: 4}]\n"
    )
    assert read_fleet(path, read_catalog()).disturbances == (
        down(60.0, 2),
        up(90.0, 2),
        Disturbance(5.0, "slow", 1, 1.5),
        Disturbance(7.0, "link", 0, 4.0),
    )


# ----------------------------------------------------------------------------------------------------- theory


def means_of(seeds: int, run: Callable[[np.random.Generator], float]) -> tuple[float, float]:
    """Mean over seeds, and the half-width of its 99.9 % interval."""
    values = np.array([run(np.random.default_rng(seed)) for seed in range(seeds)])
    return float(values.mean()), float(stats.t.ppf(0.9995, seeds - 1) * values.std(ddof=1) / np.sqrt(seeds))


@pytest.mark.parametrize("load_frac", [0.5, 0.8])
def test_mean_wait_of_a_single_server_of_constant_service(load_frac: float) -> None:
    """M/D/1: rho / (2 (1 - rho)) service times lies within the confidence interval over seeds."""

    def run(rng: np.random.Generator) -> float:
        n = 40_000
        trace = make_trace(np.cumsum(rng.exponential(1 / load_frac, n)), np.ones(n, int), np.ones(n, int))
        return float(simulate(one_at_a_time(), trace).queue_s[n // 20 :].mean())

    mean, half = means_of(20, run)
    assert abs(mean - load_frac / (2 * (1 - load_frac))) < half < 0.1 * mean


@pytest.mark.parametrize("load_frac", [0.5, 0.8])
def test_mean_wait_of_a_single_server_of_exponential_service(load_frac: float) -> None:
    """M/M/1: as many 1 ms steps as an exponential variable of mean 1 s says, rounded up. Mean wait rho S / (1
    - rho); the steps make S 0.5 ms longer, which is far within the interval."""

    def run(rng: np.random.Generator) -> float:
        n = 40_000
        steps = np.ceil(1000 * rng.exponential(1.0, n)).astype(int)
        trace = make_trace(np.cumsum(rng.exponential(1 / load_frac, n)), np.ones(n, int), steps)
        pool = make_pool(make_latency((1e-3, 1e-3)), seats=1, kv_tokens=16 * 2000)
        return float(simulate(Fleet(LLM, (pool,)), trace).queue_s[n // 20 :].mean())

    mean, half = means_of(20, run)
    assert abs(mean - load_frac / (1 - load_frac)) < half < 0.1 * mean


@pytest.mark.parametrize("batching", BATCHING)
def test_littles_law(batching: str) -> None:
    """Over a long steady run the mean number of requests in the system, looked at at random times, is rate x
    mean time, under every batching."""
    rng = np.random.default_rng(5)
    n = 4000
    outputs = np.ceil(rng.exponential(20, n)).astype(int)
    trace = make_trace(np.cumsum(rng.exponential(0.5, n)), rng.integers(1, 60, n), outputs)
    reserve = int((trace.input_tokens + outputs).max())
    latency = make_latency((0.05, 0.4), knots=(1, 64), b=1e-3, d=1e-5)
    pool = make_pool(latency, count=2, kv_tokens=16 * 500, seats=16)
    result = simulate(Fleet(LLM, (pool,), Policies(batching=batching, reserve_tokens=reserve)), trace)
    arrival_s, leaves_s = trace.arrival_s, np.sort(trace.arrival_s + result.e2e_s)
    begin_s, end_s = arrival_s[n // 10], arrival_s[-n // 10]
    at_s = rng.uniform(begin_s, end_s, 20_000)
    came, left = (np.searchsorted(times_s, at_s, side="right") for times_s in (arrival_s, leaves_s))
    counted = (arrival_s >= begin_s) & (arrival_s < end_s)
    rate_rps = counted.sum() / (end_s - begin_s)
    assert (came - left).mean() == pytest.approx(rate_rps * result.e2e_s[counted].mean(), rel=0.02)


@pytest.mark.parametrize("batching", BATCHING)
def test_same_input_gives_the_same_bytes(batching: str) -> None:
    """Twice the same fleet, policies that draw included."""
    for i, policies in enumerate(choices(batching)):
        if i % 7:
            continue
        rng = np.random.default_rng(i)
        fleet, trace = random_fleet(rng, policies, "mixed"), random_trace(rng)
        first, second = (simulate(fleet, trace, record=True) for _ in range(2))
        for name in ("queue_s", "ttft_s", "e2e_s", "tbt_max_s", "prefill_worker", "worker_busy_s", "runs"):
            assert getattr(first, name).tobytes() == getattr(second, name).tobytes()


def test_the_weights_of_jsq_are_those_of_the_docs() -> None:
    """B = 8: f(8) + a 36 + h, over 8. Seats = 4: (f(4) - f(1)) / 4 + b + 1e-12. Neither has e."""
    latency = make_latency((1.0, 1.5), knots=(1, 9), a=1 / 8, b=1 / 4, d=1 / 16, e=1 / 2, h=1 / 2)
    worker = WorkerType(GPU, 1, latency, 1600, 8, 4)
    token_s = (1.4375 + 36 / 8 + 0.5) / 8
    assert ROUTING["jsq"].weights(worker, False) == pytest.approx((token_s, token_s, 0, 0))
    sequence_s = (0.5 / 8 * 3) / 4 + 1 / 4 + 1e-12
    assert ROUTING["jsq"].weights(worker, True) == pytest.approx((0, sequence_s, 1 / 16, 0))
    (row,) = (line for line in FORMULATIONS.read_text().splitlines() if line.startswith("| `jsq` |"))
    assert "s_tok = (f(B) + a B (B + 1) / 2 + h) / B" in row
    assert "s_seq = (f(seats) - f(1)) / seats + b + 1e-12 s" in row


def test_every_routing_of_a_slo_file_can_be_planned_with() -> None:
    """`least-waiting` was among them, and no fleet could be simulated with it."""
    fleet = Fleet(LLM, (make_pool(make_latency(), count=2),))
    trace = make_trace(np.arange(4.0), np.full(4, 20), np.full(4, 3))
    for routing in PLANNED_ROUTINGS:
        found = simulate(replace(fleet, policies=Policies(routing=routing)), trace)
        assert (found.status == 0).all()
