"""Decodes that draft: steps by hand, against the plain simulator, and against theory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prefix_cases import compare_prefix_fleet, random_prefix_case
from simulations import LLM, compare, make_latency, make_pool, make_trace, mixed, prefix_trace, random_case
from speculative_reference import SpeculativePrefixReference, SpeculativeReference, accepted

from planner.domain import Limit
from planner.errors import InputError
from planner.fleet import Fleet, Network, Policies
from planner.models.engine import Engine
from planner.models.kv_layout import ExtraKv
from planner.models.latency import StepLatency
from planner.models.speculation import Speculation, SpeculativeSteps
from planner.simulator.measured_values import metric_percentile_s
from planner.simulator.recorded_gaps import gaps_s
from planner.simulator.replay import simulate

STEP = make_latency()  # every step takes a second
ALL_OF_TWO = Speculation("ngram", (1.0, 1.0))


def drafting(fleet: Fleet, speculation: Speculation | None) -> Fleet:
    return replace(
        fleet,
        pools=tuple(replace(pool, type=replace(pool.type, speculation=speculation)) for pool in fleet.pools),
    )


def test_tokens_of_a_step_leave_together_but_never_beyond_the_last() -> None:
    """The prompt's token after 1 s; six more are two steps of three, seven are three steps."""
    found = simulate(drafting(mixed(STEP), ALL_OF_TWO), make_trace([0, 0], [4, 4], [7, 8]))
    assert found.ttft_s.tolist() == [1.0, 1.0]
    assert found.e2e_s.tolist() == [3.0, 4.0]
    assert found.tpot_s.tolist() == [2 / 6, 3 / 7]
    assert found.tbt_max_s.tolist() == [1.0, 1.0]
    assert found.worker_steps.tolist() == [4]
    assert found.worker_tokens.tolist() == [4 + 4 + (2 + 2 + 1) * 3]


def test_gaps_are_counted_per_token_as_a_client_sees_them() -> None:
    """Of twelve tokens the first and 2, 5, 8, 11 begin a step: four gaps of a second, seven of nothing."""
    fleet = drafting(mixed(STEP), ALL_OF_TWO)
    limits = (Limit("tbt", 0.5, 0.5), Limit("tbt", 0.9, 0.5))
    trace = make_trace([0.0, 100.0, 200.0], [4] * 3, [1, 12, 1])  # those between count
    found = simulate(fleet, trace, limits=limits, record=True)
    assert found.e2e_s.tolist() == [1.0, 5.0, 1.0]
    values, weights = gaps_s(found)
    assert sorted(np.repeat(values, weights.astype(int)).tolist()) == [0.0] * 7 + [1.0] * 4
    assert found.counted.tolist() == [11, 11] and found.violations.tolist() == [4, 4]
    assert metric_percentile_s(found, "tbt", 0.5) == 0.0 and metric_percentile_s(found, "tbt", 0.9) == 1.0


def test_a_step_takes_what_the_formula_says() -> None:
    """Two requests of 8 prompt tokens at once; then steps of two decodes, all of which accept both drafts."""
    latency = make_latency((1.0, 11.0), knots=(0, 100), a=0.01, b=0.02, d=0.001, e=0.03, h=0.5)
    speculation = replace(ALL_OF_TWO, method="eagle", draft_frac=0.1, draft_s=0.25)
    found = simulate(drafting(mixed(latency), speculation), make_trace([0, 0], [8, 8], [7, 7]))
    steps = SpeculativeSteps(latency, speculation)
    prompts_s = steps.step_s(16, 2 * 36.0, 0, 0, 2)
    first_s, second_s = (steps.step_s(0, 0.0, 2, 2 * (context + 1), 0) for context in (8, 11))
    np.testing.assert_allclose(found.ttft_s, prompts_s, rtol=1e-12)
    np.testing.assert_allclose(found.e2e_s, prompts_s + first_s + second_s, rtol=1e-12)


def test_drafts_that_nobody_accepts_change_nothing_but_the_steps_width() -> None:
    """Of steps that take the same whatever their width nothing at all, to the last bit."""
    for seed in range(30):
        fleet, trace, limits, closed_loop = random_case(seed, dyadic=True)  # sums are exact
        flat = replace(
            fleet,
            pools=tuple(
                replace(
                    pool,
                    type=replace(
                        pool.type, latency=make_latency(h=i / 128), max_num_seqs=4, max_num_batched_tokens=512
                    ),
                )
                for i, pool in enumerate(fleet.pools)
            ),
        )
        plain, none = (
            simulate(each, trace, limits=limits, closed_loop=closed_loop)
            for each in (roomy(flat), roomy(drafting(flat, Speculation("ngram", (0.0, 1.0)))))
        )
        for what in ("ttft_s", "tpot_s", "tbt_max_s", "e2e_s", "violations", "counted", "worker_busy_s"):
            np.testing.assert_array_equal(getattr(plain, what), getattr(none, what), err_msg=what)


def roomy(fleet: Fleet) -> Fleet:
    """With KV blocks for all."""
    return replace(
        fleet,
        pools=tuple(replace(pool, type=replace(pool.type, kv_tokens=16 * 4000)) for pool in fleet.pools),
    )


def random_drafts(fleet: Fleet, seed: int) -> Fleet:
    """Drafts, of drafters with and without KV of their own, in a fleet whose steps have room for them."""
    rng = np.random.default_rng([seed, 17])
    k = int(rng.integers(1, 6))
    speculation = Speculation(
        str(rng.choice(["ngram", "mtp"])),
        tuple(rng.uniform(0, 1, k)),
        float(rng.choice([0.0, 0.05, 0.3])),
        float(rng.choice([0.0, 0.01])),
    )
    pools = []
    for pool in fleet.pools:
        budget = max(pool.type.max_num_batched_tokens, 1 + k)
        seats = min(pool.type.max_num_seqs, budget // (1 + k))
        kind = replace(pool.type, max_num_batched_tokens=budget, max_num_seqs=seats, speculation=speculation)
        pools.append(replace(pool, type=kind))
    policies = replace(fleet.policies, seed=int(rng.integers(100)))
    return replace(fleet, pools=tuple(pools), policies=policies)


@pytest.mark.long
@pytest.mark.parametrize("dyadic", [True, False])
def test_every_number_is_the_plain_simulators(dyadic: bool) -> None:
    """Mixed and disaggregated fleets that run out of KV blocks now and then."""
    preemptions = 0
    for seed in range(75):
        fleet, trace, limits, closed_loop = random_case(seed, dyadic=dyadic)
        fast, _ = compare(
            random_drafts(fleet, seed), trace, limits, closed_loop, reference=SpeculativeReference
        )
        preemptions += int(fast.preemptions.sum())
    assert preemptions > 50


@pytest.mark.long
@pytest.mark.parametrize("queue", ["sjf", "ljf", "srpt"])
def test_by_priority_too(queue: str) -> None:
    """A decode that a step leaves out keeps its blocks for drafts: of seed 51 others waited for them."""
    for seed in (*range(15), 51):
        fleet, trace, limits, closed_loop = random_case(seed, dyadic=True)
        fleet = random_drafts(replace(fleet, policies=replace(fleet.policies, queue=queue)), seed)
        compare(fleet, trace, limits, closed_loop, reference=SpeculativeReference)


@pytest.mark.long
@pytest.mark.parametrize("method", ["ngram", "mtp", "eagle3"])
def test_prefix_caches_are_those_of_the_plain_simulator(method: str) -> None:
    """Caches that evict, blocks of 16 and 32 tokens, preempted requests that find their own blocks."""
    preemptions = 0
    for seed in range(40):
        fleet, trace, _ = random_prefix_case(seed)
        fleet = random_drafts(fleet.with_types(lambda kind: replace(kind, engine=None)), seed)
        drafts = fleet.pools[0].type.speculation
        assert drafts is not None
        fleet = drafting(fleet, replace(drafts, method=method))
        case = f"seed {seed}, {method}"
        _, found = compare_prefix_fleet(fleet, trace, SpeculativePrefixReference, case)
        preemptions += int(found.preemptions.sum())
    assert preemptions > 100


@pytest.mark.parametrize(
    ("method", "engine", "hit_tokens"),
    [
        ("ngram", "vllm", 64),
        ("draft_model", "vllm", 64),
        ("mtp", "vllm", 48),
        ("eagle3", "vllm", 48),
        ("mtp", "sglang", 64),
    ],
)
@pytest.mark.parametrize("block", [16, 32, 64])
def test_vllm_computes_the_last_cached_block_again_for_drafts_of_hidden_states(
    method: str, engine: str, hit_tokens: int, block: int
) -> None:
    """A prompt of 70 tokens whose first 64 are cached, in blocks of the trace of 16, 32 or 64 tokens."""
    fleet = drafting(mixed(STEP), Speculation(method, (0.0,)))
    fleet = fleet.with_types(lambda kind: replace(kind, engine=Engine(engine, "0", False)))
    blocks = list(range(64 // block))
    trace = prefix_trace([0.0, 9.0], [[*blocks, 90], [*blocks, 91]], tokens=[70, 70], block=block)
    found = simulate(replace(fleet, policies=Policies(prefix_cache=True)), trace)
    assert found.cached_tokens is not None and found.cached_tokens.tolist() == [0, hit_tokens]


def test_a_step_yields_as_much_as_theory_says() -> None:
    """2,000 requests of 200 tokens, one at a time: the share of steps and of each count of drafts."""
    speculation = Speculation("ngram", (0.9, 0.6, 0.5))  # P = 0.9, 0.54, 0.27
    n, output = 2000, 200
    trace = make_trace(np.arange(n) * 1000.0, [4] * n, [output] * n)
    found = simulate(drafting(mixed(STEP), speculation), trace)
    steps = (found.worker_steps[0] - n) / n
    # the last step is cut short, which costs about a step in hundreds
    assert (output - 1) / steps == pytest.approx(speculation.mean_tokens, rel=0.01)
    drawn = np.array([accepted(speculation, 0, r, t) for r in range(300) for t in range(1, 100)])
    for i, share in enumerate(speculation.accepted_fracs, 1):
        deviation = (share * (1 - share) / len(drawn)) ** 0.5
        assert (drawn >= i).mean() == pytest.approx(share, abs=4 * deviation)


def test_what_a_request_accepts_depends_neither_on_the_fleet_nor_on_its_neighbours() -> None:
    rng = np.random.default_rng(5)
    n = 60
    trace = make_trace(np.sort(rng.uniform(0, 50, n)), rng.integers(1, 30, n), rng.integers(2, 60, n))
    speculation = Speculation("ngram", (0.7, 0.7, 0.7))
    slow, quick = (
        simulate(drafting(replace(mixed(each, kv_tokens=16 * 400)), speculation), trace, record=True)
        for each in (STEP, make_latency((0.01, 0.01)))
    )

    def per_request(output: int, index: int) -> int:
        steps, made = 0, 1
        while made < output:
            made += 1 + min(accepted(speculation, 0, index, made), output - made - 1)
            steps += 1
        return steps

    decoded = sum(per_request(int(output), i) for i, output in enumerate(trace.output_tokens))
    for found in (slow, quick):
        steps = found.runs[found.runs["prefill_tokens"] >= 0]
        assert int((steps["decodes"] * steps["steps"]).sum()) == decoded
    other = simulate(
        replace(drafting(mixed(STEP), speculation), policies=Policies(seed=1)), trace, record=True
    )
    assert other.e2e_s.tolist() != slow.e2e_s.tolist()


def test_kv_blocks_are_taken_for_what_is_checked_and_looked_ahead_for() -> None:
    """A prompt of 12 tokens and 16 of output: 12 + 1 + 3 fit one block, with three more slots ahead they do
    not. Another request that needs both blocks that are left waits until the first gives its own back.
    """
    for method in ("ngram", "mtp"):
        speculation = Speculation(method, (0.0, 0.0, 0.0))
        fleet = drafting(mixed(STEP, kv_tokens=16 * 3), speculation)
        found = simulate(fleet, make_trace([0, 0.5], [12, 32], [3, 1]), record=True)
        used = found.runs[found.runs["prefill_tokens"] >= 0]["blocks"].tolist()
        # as the steps begin: the prompt; a decode, with or without the other's two; the next decode
        if method == "ngram":
            assert found.queue_s.tolist() == [0.0, 0.5] and used[1] == 3
        else:
            assert found.queue_s[1] == 2.5 and used[2] == 2


def test_who_fits_alone_is_served_whatever_is_looked_ahead_for() -> None:
    """A prompt of 20 and 12 of output fill two blocks; beside them stands one for the sequence's state. The
    drafts that are looked ahead for would need more than there is.
    """
    fleet = drafting(mixed(STEP, kv_tokens=16 * 3), Speculation("mtp", (0.0,) * 5))
    kind = replace(fleet.pools[0].type, extra_kv=ExtraKv(constant_blocks=1))
    found = simulate(
        replace(fleet, pools=(replace(fleet.pools[0], type=kind),)), make_trace([0, 0], [20, 20], [12, 12])
    )
    assert found.preemptions.tolist() == [0, 0] and found.e2e_s.tolist() == [12.0, 24.0]


def test_an_asynchronous_engine_takes_blocks_before_it_knows_what_was_accepted() -> None:
    """A prompt of 10, one draft, no drafter: after the first decode there are 11 tokens and 2 are checked
    next, 13, in one block. While that step runs 12 are taken for computed: the next one would check 14, still
    one block; and so on until what is believed needs 17 tokens one step earlier than what is known.
    """
    speculation = Speculation("eagle", (0.0,))
    blocks = {}
    for is_async in (False, True):
        engine = Engine("vllm", "0.33", is_async)
        fleet = drafting(mixed(STEP), speculation)
        pool = replace(fleet.pools[0], type=replace(fleet.pools[0].type, engine=engine))
        found = simulate(replace(fleet, pools=(pool,)), make_trace([0], [10], [8]), record=True)
        blocks[is_async] = found.runs[found.runs["prefill_tokens"] >= 0]["blocks"].tolist()
    # each step computes 2 tokens and looks 1 ahead: c + 3 tokens, the asynchronous one believes in one more
    steps = range(6)  # recorded as the one after them begins
    assert blocks[False][2:] == [-(-(10 + i + 3) // 16) for i in steps]
    assert blocks[True][2:] == [-(-(10 + i + 3 + (i > 0)) // 16) for i in steps]


def test_who_was_handed_over_has_no_drafts_in_the_first_step() -> None:
    pools = (make_pool(STEP, role="prefill", name="p"), make_pool(STEP, role="decode", name="d"))
    fleet = Fleet(LLM, pools, network=Network(256.0, 0.25, "serialised"))
    found = simulate(drafting(fleet, ALL_OF_TWO), make_trace([0], [4], [8]))
    # the prompt 1 s, the transfer 1.25 s; seven tokens: 1, 3, 3
    assert found.e2e_s.tolist() == [1.0 + 1.25 + 3.0]


def test_drafts_count_against_the_token_budget() -> None:
    """Eight tokens: two decodes of three leave two for a prompt, which takes that many per step."""
    fleet = drafting(mixed(STEP, budget=8, seats=2 + 0), Speculation("ngram", (0.0, 0.0)))
    fleet = replace(
        fleet, pools=(replace(fleet.pools[0], type=replace(fleet.pools[0].type, max_num_seqs=2)),)
    )
    found = simulate(fleet, make_trace([0, 1.5], [4, 10], [20, 1]))
    # the second prompt joins at 2: 5, 5 beside one decode of three
    assert found.ttft_s.tolist() == [1.0, 2.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": Policies(batching="sarathi")}, "needs batching vllm-v1, found 'sarathi'"),
        (
            {"policies": Policies(admission="reserve-static")},
            "needs admission greedy, found 'reserve-static'",
        ),
        ({"pp": 2}, "is not simulated in pipelines, must be pp 1, found 2"),
        ({"max_num_seqs": 200}, "200 sequences of 3 tokens each .* found 512"),
        ({"form": StepLatency((1.0, 2.0), (1.0, 1.0), 0, 0, 0, 0, 0, "other")}, "have another form"),
    ],
)
def test_what_is_not_simulated_is_refused(change: dict[str, object], message: str) -> None:
    fleet = drafting(mixed(STEP), ALL_OF_TWO)
    policies = change.pop("policies", fleet.policies)
    pool = replace(fleet.pools[0], type=replace(fleet.pools[0].type, **change))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        simulate(replace(fleet, pools=(pool,), policies=policies), make_trace([0], [4], [4]))  # type: ignore[arg-type]


def test_a_pair_needs_one_drafter() -> None:
    pools = (make_pool(STEP, role="prefill", name="p"), make_pool(STEP, role="decode", name="d"))
    drafts = replace(pools[1], type=replace(pools[1].type, speculation=Speculation("mtp", (0.5,))))
    with pytest.raises(InputError, match="prefill and decode workers need the same drafter"):
        simulate(Fleet(LLM, (pools[0], drafts)), make_trace([0], [4], [4]))
    looked_up = replace(drafts, type=replace(drafts.type, speculation=Speculation("ngram", (0.5,))))
    assert simulate(Fleet(LLM, (pools[0], looked_up)), make_trace([0], [4], [4])).complete
