"""Finds the tasks of agents in a trace, and the times that whole tasks take.

A task is the requests of one piece of work, for all of which its user waits: its turns, and those of the
sub-agents that work for it, with the tools between them. In a trace that names no tasks, each session is a
task. A request that combines the results of several others waits for all of them, so the requests of a task
form a directed acyclic graph. For a task t with requests i, arrivals a_i and end-to-end times e_i,

    total time   = max_i (a_i + e_i) - min_i a_i
    served time  = longest path through the requests of t, each as long as e_i: no pauses, no tools

Arrays over requests hold a task's value at its last request in the trace, and NaN at its other requests.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from planner.traffic.sessions import session_numbers
from planner.traffic.trace import FloatArray, IntArray, Trace, kept_with_trace

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Tasks:
    """The tasks of a trace of n requests.

    `number` (n,) is the task of each request, counted from 0. `after` (e, 2) has rows (request, parent), the
    waits within tasks. They are sorted by the depth of the request, which is the number of waits on its
    longest path from the beginning of the task. `tools_s` (n,) [s] are the pauses before requests within
    tasks, in which tools run; in a trace without tasks also the pauses of a session's user.
    """

    number: IntArray
    after: IntArray
    depth_ends: IntArray  # Where in `after` the rows of each depth end. The first is 0: depth 0 has no rows.
    tools_s: FloatArray

    @cached_property
    def last(self) -> IntArray:
        """(T,): the request of each task that stands last in the trace."""
        last = np.zeros(int(self.number.max()) + 1, np.int64)
        last[self.number] = np.arange(len(self.number))
        return last

    @property
    def is_last(self) -> BoolArray:
        """(n,): which requests are the last of their task, where arrays hold its values."""
        marks = np.zeros(len(self.number), dtype=bool)
        marks[self.last] = True
        return marks

    def turn_s(self, e2e_s: FloatArray) -> FloatArray:
        """(n,): seconds from the end of what each request waited for to its own end, tools included."""
        return e2e_s + self.tools_s

    def total_s(self, arrival_s: FloatArray, e2e_s: FloatArray) -> FloatArray:
        """(n,): seconds from the task's first arrival to its last end, at its last request; NaN at other
        requests and where a request of the task never ended. `arrival_s` (n,) are the simulated arrivals.
        """
        ends_s = np.full(len(self.last), -np.inf)
        # A request that never ended makes its task infinite, and `_at_last` writes NaN for it.
        np.maximum.at(ends_s, self.number, np.nan_to_num(arrival_s + e2e_s, nan=np.inf))
        begins_s = np.full(len(self.last), np.inf)
        np.minimum.at(begins_s, self.number, arrival_s)
        return self._at_last(ends_s - begins_s)

    def served_s(self, e2e_s: FloatArray) -> FloatArray:
        """(n,): the longest path of each task, in seconds, at its last request, as in `total_s`."""
        request_s = np.nan_to_num(e2e_s, nan=np.inf)
        path_s, start = request_s.copy(), 0  # The longest path that ends with each request.
        for end in self.depth_ends.tolist():  # Parents have a smaller depth, so their paths are final.
            child, parent = self.after[start:end].T
            np.maximum.at(path_s, child, path_s[parent] + request_s[child])
            start = end
        longest_s = np.zeros(len(self.last))
        np.maximum.at(longest_s, self.number, path_s)
        return self._at_last(longest_s)

    def _at_last(self, values_s: FloatArray) -> FloatArray:
        """Values of tasks at the last request of each, NaN at all others and where a value is infinite."""
        at_last_s = np.full(len(self.number), np.nan)
        at_last_s[self.last] = np.where(np.isfinite(values_s), values_s, np.nan)
        return at_last_s


def tasks_of(trace: Trace) -> Tasks | None:
    """The tasks of a trace; None if no request waits for another and no task is named."""
    if not trace.after.size and not trace.task.size:
        return None
    return _find_tasks(trace)


@kept_with_trace  # Each metric of tasks needs the tasks.
def _find_tasks(trace: Trace) -> Tasks:
    """The tasks of a trace in which some request waits for another, or some task is named."""
    task_numbers = trace.task if trace.task.size else session_numbers(trace)
    number = np.unique(task_numbers, return_inverse=True)[1].astype(np.int64)
    child, parent = trace.after.T
    is_within_task = number[child] == number[parent]  # Other waits are between tasks.
    after = trace.after[is_within_task]
    depths = [0] * len(trace)
    # A trace has a request after all those that it waits for, so their depths are known before its own.
    for request, waited_for in after[np.argsort(after[:, 0], kind="stable")].tolist():
        depths[request] = max(depths[request], depths[waited_for] + 1)
    child_depths = np.array(depths, np.int64)[after[:, 0]]
    order = np.argsort(child_depths, kind="stable")
    depth_ends = np.cumsum(np.bincount(child_depths)) if len(after) else np.zeros(0, np.int64)
    tools_s = np.zeros(len(trace))
    tools_s[after[:, 0]] = trace.think_s[after[:, 0]]
    return Tasks(number, after[order], depth_ends.astype(np.int64), tools_s)
