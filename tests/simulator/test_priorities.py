"""vLLM's scheduling by priority where KV is short, by hand; tests/data/vllm_steps.json has what vLLM does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulations import LLM, make_latency, make_pool, make_trace, mixed

from planner.fleet import Fleet, Network, Policies
from planner.simulator import simulate


def four_blocks(queue: str, **policies: object) -> Fleet:
    """A worker with room for 64 tokens whose every step takes 1 s."""
    fleet = mixed(make_latency(), kv_tokens=64)
    return replace(fleet, policies=replace(fleet.policies, queue=queue, **policies))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("queue", "preempted", "e2e_s"),
    [("fcfs", [0, 1], [5.0, 6.5]), ("sjf", [1, 0], [7.0, 4.5]), ("ljf", [0, 1], [5.0, 6.5])],
)
def test_the_running_request_of_largest_priority_makes_room(
    queue: str, preempted: list[int], e2e_s: list[float]
) -> None:
    """A: 31 tokens and 5 of output, at 0 s. B: 15 and 4, at 0.5 s. From 3 s on A has 3 blocks, B needs its
    second, of four. By sjf A goes, which was admitted first, and comes back when B has ended at 5 s: its
    tokens leave at 1, 2, 3, 6 and 7 s. Else B goes, and comes back when A has ended at 5 s: its
    tokens leave at 2, 3, 6 and 7 s.
    """
    found = simulate(four_blocks(queue), make_trace([0.0, 0.5], [31, 15], [5, 4]))
    assert found.preemptions.tolist() == preempted
    assert found.e2e_s.tolist() == e2e_s


@pytest.mark.parametrize(("queue", "second"), [("fcfs", 1), ("sjf", 2), ("ljf", 1)])
def test_hand_offs_wait_for_blocks_by_priority(queue: str, second: int) -> None:
    """Three prompts of 20, 19 and 17 tokens, handed over at 1, 2 and 3 s, and a decode worker with room for
    one. When the first has ended the shortest is next by sjf, else the one that came before it.
    """
    step = make_latency()
    decode = make_pool(step, role="decode", kv_tokens=48, name="d")
    pools = (make_pool(step, role="prefill", name="p"), decode)
    fleet = Fleet(LLM, pools, Policies(queue=queue), Network(1e6, 0.25, "serialised"))
    found = simulate(fleet, make_trace([0.0, 0.5, 1.5], [20, 19, 17], [9, 9, 9]))
    order = (found.arrival_s + found.e2e_s).argsort().tolist()
    assert order == [0, second, 3 - second]
