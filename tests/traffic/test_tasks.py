"""Tasks of agents: their total and served times, by hand and by plain recursion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.traffic.scaling import combine_parts
from planner.traffic.tasks import tasks_of
from planner.traffic.trace import IntArray, Trace


def dag(edges: list[tuple[int, int]], think_s: list[float], task: IntArray | None = None) -> Trace:
    """Requests that arrive at 0; rows (request, parent)."""
    n = len(think_s)
    ones = np.ones(n, np.int64)
    after = np.array(sorted(edges, key=lambda edge: edge[1]), np.int64).reshape(-1, 2)
    trace = Trace("dag", np.zeros(n), ones, ones, after=after, think_s=np.array(think_s))
    return trace if task is None else replace(trace, task=task)


def test_a_fan_out_takes_as_long_as_its_longest_branch() -> None:
    """0 sends out 1 and 2, 3 waits for both: 2 s + 5 s + 1 s are served; a tool takes 4 s before 3."""
    tasks = tasks_of(dag([(1, 0), (2, 0), (3, 1), (3, 2)], [0.0, 0.0, 0.0, 4.0]))
    assert tasks is not None
    e2e_s = np.array([2.0, 3.0, 5.0, 1.0])
    arrival_s = np.array([10.0, 12.0, 12.0, 21.0])
    assert np.nan_to_num(tasks.served_s(e2e_s), nan=-1).tolist() == [-1, -1, -1, 8.0]
    assert tasks.total_s(arrival_s, e2e_s)[3] == 12.0
    assert tasks.turn_s(e2e_s).tolist() == [2.0, 3.0, 5.0, 5.0]
    assert tasks.is_last.tolist() == [False, False, False, True]


def test_two_tasks_of_one_agent_are_two() -> None:
    """The pause of the second task is nobody's turn; an unfinished request leaves its task without a time."""
    trace = dag([(1, 0), (2, 1), (3, 2)], [0.0, 1.0, 30.0, 2.0], task=np.array([0, 0, 1, 1]))
    tasks = tasks_of(trace)
    assert tasks is not None
    assert tasks.turn_s(np.ones(4)).tolist() == [1.0, 2.0, 1.0, 3.0]
    total_s = tasks.total_s(np.array([0.0, 2.0, 33.0, 36.0]), np.array([1.0, 1.0, 1.0, np.nan]))
    assert total_s[1] == 3.0 and np.isnan(total_s[3])


def test_traffic_without_waits_has_no_tasks() -> None:
    assert tasks_of(dag([], [0.0, 0.0])) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_path_is_that_of_a_plain_recursion(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    edges = [(i, int(parent)) for i in range(1, n) for parent in set(rng.integers(0, i, rng.integers(0, 3)))]
    trace = dag(edges, rng.uniform(0, 3, n).tolist(), task=rng.integers(0, 3, n))
    tasks, e2e_s = tasks_of(trace), rng.uniform(0.1, 5, n)
    assert tasks is not None
    task = trace.task.tolist()

    def path_s(i: int) -> float:
        parents = [parent for child, parent in edges if child == i and task[parent] == task[i]]
        return float(e2e_s[i]) + max(map(path_s, parents), default=0.0)

    served_s = tasks.served_s(e2e_s)
    for number in set(task):
        requests = [i for i in range(n) if task[i] == number]
        assert served_s[requests[-1]] == pytest.approx(max(map(path_s, requests)))


def test_copies_of_a_trace_have_tasks_of_their_own() -> None:
    trace = dag([(1, 0), (2, 1)], [0.0, 1.0, 2.0], task=np.array([0, 0, 1]))
    trace = replace(trace, arrival_s=np.array([0.0, 1.0, 2.0]))
    rows = [np.arange(3), np.arange(3)]
    both = combine_parts(trace, rows, [trace.arrival_s, trace.arrival_s + 0.5])
    tasks = tasks_of(both)
    assert tasks is not None and len(tasks.last) == 4
