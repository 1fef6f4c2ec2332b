"""Prompts that arrive computed, against an engine that computes them in no time."""

import numpy as np
import pytest
from hand_made import GPU, LATENCY
from simulations import LLM

from planner.domain import Limit
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.search.level0.level0_search import FEW_FRAC
from planner.search.oracle.fleet_oracle import INSTANT, NO_LINK
from planner.simulator.replay import RequestRecords, simulate_if_kept
from planner.solvers.master import Option, fewest_decode_workers
from planner.traffic.trace import Trace
from planner.traffic.workload import distinct_lengths

PATIENT = Limit("ttft", 0.0, 2.0)


def a_trace(rng: np.random.Generator, requests: int) -> Trace:
    return Trace(
        "drawn",
        np.sort(rng.uniform(0, requests / 20, requests)),
        rng.integers(1, 3000, requests),
        np.maximum(rng.geometric(1 / 120, requests), 1),
    )


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kv_tokens", [9_000, 200_000])
@pytest.mark.parametrize("routing", ["jsq", "round-robin"])
def test_prompts_that_arrive_computed_are_decoded_as_behind_an_instant_engine(
    pp: int, kv_tokens: int, routing: str
) -> None:
    """The same answer at every count, and the same times but for the picoseconds of that engine."""
    said: set[bool] = set()
    for seed in range(3):
        trace = a_trace(np.random.default_rng(seed), 600)
        requests = RequestRecords(trace)
        for count in (1, 2, 3, 5, 8, 14):
            back = WorkerType(GPU, 1, LATENCY, kv_tokens, 1000, 8, pp=pp)
            instant = WorkerType(GPU, 1, INSTANT, 10**12, 8192, 256)
            pools = (Pool("pre", "prefill", instant, 1), Pool("dec", "decode", back, count))
            fleet = Fleet(LLM, pools, Policies(routing="jsq", decode_routing=routing), NO_LINK)

            direct, behind = (
                simulate_if_kept(
                    fleet, trace, (PATIENT,), requests, patience_s=2.0, is_prefilled=is_prefilled
                )
                for is_prefilled in (True, False)
            )
            assert (direct is None) == (behind is None)
            said.add(direct is not None)
            if direct is not None and behind is not None:
                for name in ("ttft_s", "e2e_s", "tbt_max_s"):
                    assert getattr(direct, name) == pytest.approx(
                        getattr(behind, name), abs=1e-6, nan_ok=True
                    )
    assert said == {True, False}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kv_tokens, seats", [(9_000, 2), (9_000, 64), (200_000, 2), (200_000, 8)])
def test_no_pool_keeps_up_with_far_fewer_workers_than_make_the_tokens(
    kv_tokens: int, seats: int, pp: int, seed: int
) -> None:
    """What large questions take for granted (shortcuts.SEATS)."""
    trace = a_trace(np.random.default_rng(seed), 2_000)
    requests, lengths = RequestRecords(trace), distinct_lengths(trace)
    worker = WorkerType(GPU, 1, LATENCY, kv_tokens, 1000, seats, pp=pp)
    instant = WorkerType(GPU, 1, INSTANT, 10**12, 8192, 256)

    def keeps_up(count: int) -> bool:
        pools = (Pool("pre", "prefill", instant, 1), Pool("dec", "decode", worker, count))
        fleet = Fleet(LLM, pools, Policies(routing="jsq"), NO_LINK)
        return (
            simulate_if_kept(fleet, trace, (PATIENT,), requests, patience_s=2.0, is_prefilled=True)
            is not None
        )

    seconds = 0.95 * trace.duration_s + PATIENT.limit_s
    fewest = 0.95 * fewest_decode_workers(Option("decode", worker, 1.0), lengths, seconds)
    least = next(count for count in range(1, 40) if keeps_up(count))
    assert fewest > 2 and FEW_FRAC * fewest < least < 1.5 * fewest
