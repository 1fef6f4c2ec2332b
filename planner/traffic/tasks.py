"""Tasks of agents: requests that stand for one piece of work, and the times that all of it takes.

A task is what a user waits for: its turns, the sub-agents that work for it, and the tools between. In a trace
that names no tasks, each session is a task. A request waits for several others where their results come
together, so the requests of a task form a directed acyclic graph. Of each task t with requests i, arrivals
a_i and end-to-end times e_i,

    total time   = max_i (a_i + e_i) - min_i a_i
    served time  = longest path over the requests of t, each as long as e_i, without pauses and tools

Both are values of one request of the task, the last of its requests in the trace; other requests have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from planner.traffic.sessions import session_numbers
from planner.traffic.trace import FloatArray, IntArray, Trace

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Tasks:
    """`number` (n,) counts the tasks of a trace from 0 on; `after` (e, 2) has the rows (request, parent) of
    waits inside tasks; `tools_s` (n,) are pauses inside tasks, which tools take. Rows of `after` are sorted
    by the depth of the request: the number of waits on its longest path from the beginning of the task.
    """

    number: IntArray
    after: IntArray
    depth_ends: IntArray  # Where in `after` the rows of each depth end.
    tools_s: FloatArray

    @cached_property
    def last(self) -> IntArray:
        """(T,): the request of each task that stands last in the trace."""
        last = np.zeros(int(self.number.max()) + 1, np.int64)
        last[self.number] = np.arange(len(self.number))
        return last

    @property
    def is_last(self) -> BoolArray:
        """(n,): which requests carry the times of their task."""
        marks = np.zeros(len(self.number), dtype=bool)
        marks[self.last] = True
        return marks

    def turn_s(self, e2e_s: FloatArray) -> FloatArray:
        """(n,): seconds of each request and of the tools before it, from the end of what it waited for."""
        return e2e_s + self.tools_s

    def total_s(self, arrival_s: FloatArray, e2e_s: FloatArray) -> FloatArray:
        """(n,): seconds from the task's first arrival to its last end, at its last request; NaN at other
        requests and where a request of the task never ended.
        """
        ends_s = np.full(len(self.last), -np.inf)
        # A request that never ended makes its task infinite, and `_at_last` writes NaN for it.
        np.maximum.at(ends_s, self.number, np.nan_to_num(arrival_s + e2e_s, nan=np.inf))
        begins_s = np.full(len(self.last), np.inf)
        np.minimum.at(begins_s, self.number, arrival_s)
        return self._at_last(ends_s - begins_s)

    def served_s(self, e2e_s: FloatArray) -> FloatArray:
        """(n,): the longest path of each task, in seconds of its requests, at the request where `total_s` has
        its value.
        """
        own_s = np.nan_to_num(e2e_s, nan=np.inf)
        path_s, start = own_s.copy(), 0  # The longest path that ends with each request.
        for end in self.depth_ends.tolist():  # Parents have a smaller depth, so theirs are final.
            child, parent = self.after[start:end].T
            np.maximum.at(path_s, child, path_s[parent] + own_s[child])
            start = end
        longest_s = np.zeros(len(self.last))
        np.maximum.at(longest_s, self.number, path_s)
        return self._at_last(longest_s)

    def _at_last(self, values_s: FloatArray) -> FloatArray:
        """Values of tasks at the last request of each, NaN at all others and where a value is infinite."""
        at_last_s = np.full(len(self.number), np.nan)
        at_last_s[self.last] = np.where(np.isfinite(values_s), values_s, np.nan)
        return at_last_s


_KNOWN: WeakKeyDictionary[Trace, Tasks] = WeakKeyDictionary()  # Each metric of tasks asks again.


def tasks_of(trace: Trace) -> Tasks | None:
    """The tasks of a trace; None where no request waits for another and no task is named."""
    if not trace.after.size and not trace.task.size:
        return None
    if trace not in _KNOWN:
        _KNOWN[trace] = _find_tasks(trace)
    return _KNOWN[trace]


def _find_tasks(trace: Trace) -> Tasks:
    given = trace.task if trace.task.size else session_numbers(trace)
    number = np.unique(given, return_inverse=True)[1].astype(np.int64)
    child, parent = trace.after.T
    is_within_task = number[child] == number[parent]  # Other waits are between tasks.
    after = trace.after[is_within_task]
    depths = [0] * len(trace)
    # A request stands after all that it waits for, so their depths are known before its own.
    for request, waited_for in after[np.argsort(after[:, 0], kind="stable")].tolist():
        depths[request] = max(depths[request], depths[waited_for] + 1)
    child_depths = np.array(depths, np.int64)[after[:, 0]]
    order = np.argsort(child_depths, kind="stable")
    depth_ends = np.cumsum(np.bincount(child_depths)) if len(after) else np.zeros(0, np.int64)
    tools_s = np.zeros(len(trace))
    tools_s[after[:, 0]] = trace.think_s[after[:, 0]]
    return Tasks(number, after[order], depth_ends.astype(np.int64), tools_s)
