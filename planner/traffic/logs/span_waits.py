"""Finds which calls of a model waited for which others, from the spans that enclose them. otlp.py reads the
spans.

The parent of a span says whose work it is, not what it waited for. That follows from the times: of two
children of one span, the later one waits for the earlier one if that had ended when the later one began. So a
call waits for the last calls of its agent before it, and of all sub-agents that had returned. The first call
of a sub-agent waits for what its caller had done before. The pause of a call, which tools or a person took,
is the time from the end of the last call that it waits for to its own beginning. OpenTelemetry's traces of
one conversation count as children of one span; each trace is a task.

    [ agent                                                    ]
      [ call 1 ]   [ tool: sub-agent [ call a ] [ call b ] ]
                   [ tool ]                                  [ call 2 ]     2 waits for b, b for a, a for 1
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from planner.traffic.trace import FloatArray, IntArray, Trace, sort_waits

SERIAL = "serial"  # The column that says which call of a SpanTree a row is.
# A call waits for at most this many others, those that ended last. Without a limit 20,000 calls after 20,000
# others would be 4e8 pairs. Set by hand.
MOST_WAITS = 64
_Path = tuple[str, ...]  # Conversation, trace and spans that enclose a call, the outermost first.


@dataclass(slots=True)
class SpanTree:
    """The spans of all files. Every span is added with `add`; a span that is a request is also added with
    `add_call`, which numbers it. By these numbers `with_waits` finds the calls again. Times are ns since
    1970.
    """

    # Id of the parent, start and end of each span, by the span's id.
    _spans: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    # Ids of span and trace, start and end of each call, by its number.
    _calls: list[tuple[str, str, int, int]] = field(default_factory=list)
    _conversations: dict[str, str] = field(default_factory=dict)  # The conversation of each trace.

    def add(self, span: str, parent: str, trace: str, conversation: str, start: object, end: object) -> None:
        """Take a span: the ids of itself, of its parent, its trace and its conversation, and its times as the
        log has them. Any id may be empty.
        """
        start_ns = _parse_ns(start, 0)
        if span:
            self._spans[span] = (parent, start_ns, _parse_ns(end, start_ns))
        if trace and conversation:
            self._conversations.setdefault(trace, conversation)

    def add_call(self, span: str, trace: str, start: object, end: object) -> int:
        """Take a request; returns its number. A request without a trace waits for no other."""
        start_ns = _parse_ns(start, 0)
        # Where clocks disagree a call may seem to end before it began.
        self._calls.append((span, trace, start_ns, max(_parse_ns(end, start_ns), start_ns)))
        return len(self._calls) - 1

    def with_waits(self, trace: Trace, serials: IntArray) -> Trace:
        """The trace, whose request i is call number `serials[i]`, with waits, pauses, tasks and nominal
        arrivals (as if answers took no time). It is unchanged if no request waits for another.
        """
        edges = self._wait_edges(serials.tolist())
        if not edges:
            return trace
        start_ns, end_ns = np.array([self._calls[k][2:] for k in serials.tolist()]).T
        after = sort_waits(np.array(edges, np.int64))
        # For each request the latest end of those that it waits for; 0 without any.
        ready_ns = np.zeros(len(trace), np.int64)
        np.maximum.at(ready_ns, after[:, 0], end_ns[after[:, 1]])
        waits = np.zeros(len(trace), dtype=bool)
        waits[after[:, 0]] = True
        think_s = np.where(waits, np.maximum(start_ns - ready_ns, 0) / 1e9, 0.0)
        # A task is an OpenTelemetry trace; a call without one is a task of its own.
        task_names = [self._calls[k][1] or f"call {k}" for k in serials.tolist()]
        number_of_task: dict[str, int] = {}
        task = np.array([number_of_task.setdefault(name, len(number_of_task)) for name in task_names])
        arrival_s = _nominal_s(trace.arrival_s, after, think_s)
        order = np.lexsort((np.arange(len(trace)), arrival_s))
        note = (
            f"{int(waits.sum())} of {len(trace)} requests wait for others, by the parents and times of their "
            f"spans ({len(np.unique(task[waits]))} traces are tasks of agents); spans tell no shared prefixes"
        )
        linked = replace(trace, after=after, think_s=think_s, task=task, notes=(*trace.notes, note))
        return linked.select(order, arrival_s=arrival_s[order] - arrival_s[order[0]])

    def _path(self, span: str, trace: str) -> _Path:
        """What encloses a call: conversation, trace, spans. A trace without a conversation counts as one."""
        ancestors: list[str] = []
        parent = self._spans[span][0] if span in self._spans else ""
        while parent and parent not in ancestors:  # In a broken log a span may be its own ancestor.
            ancestors.append(parent)
            parent = self._spans[parent][0] if parent in self._spans else ""
        in_file = [ancestor for ancestor in ancestors if ancestor in self._spans]
        conversation = self._conversations.get(trace) or trace
        return (f"conversation {conversation}", f"trace {trace}", *reversed(in_file))

    def _wait_edges(self, serials: Sequence[int]) -> list[tuple[int, int]]:
        """Pairs of a request and one that it waits for, both as indices into `serials`. The innermost spans
        come first. The calls of each span become one group, which is a child of the span around it.
        """
        children: dict[_Path, list[_CallGroup]] = {}
        for i, serial in enumerate(serials):
            span, trace, start_ns, end_ns = self._calls[serial]
            if trace:
                path = self._path(span, trace)
                children.setdefault(path, []).append(_CallGroup(start_ns, end_ns, [i], [i]))
                # The spans around it need an entry too, as they may have no calls of their own.
                for depth in range(1, len(path)):
                    children.setdefault(path[:depth], [])
        edges: list[tuple[int, int]] = []
        for path in sorted(children, key=len, reverse=True):
            group = _join_groups(children[path], edges)
            # A path longer than conversation and trace ends in a span, which may begin before its first call
            # and end after its last one.
            if len(path) > 2 and path[-1] in self._spans:
                _, start_ns, end_ns = self._spans[path[-1]]
                group.start_ns, group.end_ns = min(start_ns, group.start_ns), max(end_ns, group.end_ns)
            if len(path) > 1:
                children[path[:-1]].append(group)
        # Where clocks disagree, a request may seem to wait for one that arrived later.
        return [(child, parent) for child, parent in edges if parent < child]


@dataclass(slots=True)
class _CallGroup:
    """One call, or all calls within a span. `firsts` are its calls that wait for no other call of the group,
    `lasts` those for which no other call of the group waits.
    """

    start_ns: int
    end_ns: int
    firsts: list[int]
    lasts: list[int]


def _join_groups(groups: list[_CallGroup], edges: list[tuple[int, int]]) -> _CallGroup:
    """The children of one span, joined into one group. Pairs (child, parent) of calls are added to `edges`:
    the child waits for the parent.
    """
    groups.sort(key=lambda group: (group.start_ns, group.end_ns))
    by_end = sorted(range(len(groups)), key=lambda k: groups[k].end_ns)
    ends_ns = [groups[k].end_ns for k in by_end]
    # latest[k]: of the first k + 1 groups to end, the one that began last. Groups are numbered by beginning.
    latest = list(accumulate(by_end, max))
    firsts: list[int] = []
    is_waited_for = [False] * len(groups)
    for k, group in enumerate(groups):
        ended = bisect_right(ends_ns, group.start_ns)  # This many groups had ended when this one began.
        # A span of no length ends as it begins, and must not wait for itself or for one that follows.
        while ended and by_end[ended - 1] >= k:
            ended -= 1
        if not ended:
            firsts += group.firsts
            continue
        # This group waits for `newest`, the ended group that began last, and for groups that ended after
        # `newest` began. It need not wait for earlier ones, because `newest` does.
        newest = latest[ended - 1]
        first_after = bisect_right(ends_ns, groups[newest].start_ns, hi=ended)
        waited_for = {newest, *by_end[max(first_after, ended - MOST_WAITS) : ended]}
        parents: list[int] = []
        # Groups that ended last come first, because MOST_WAITS cuts off the end of the list.
        for i in sorted(waited_for, key=lambda i: -groups[i].end_ns):
            is_waited_for[i] = True
            parents += groups[i].lasts
        edges += [(child, parent) for child in group.firsts for parent in parents[:MOST_WAITS]]
    lasts: list[int] = []
    for group, has_follower in zip(groups, is_waited_for, strict=True):
        if not has_follower:
            lasts += group.lasts
    return _CallGroup(groups[0].start_ns, max(group.end_ns for group in groups), firsts, lasts)


def _nominal_s(start_s: FloatArray, after: IntArray, think_s: FloatArray) -> FloatArray:
    """(n,): when calls would arrive if answers took no time. A call with parents arrives its own pause after
    the last of them; its start in the log does not count, since that includes the time of their answers.
    Parents have lower numbers than their children.
    """
    nominal_s = start_s.tolist()
    pause_s = think_s.tolist()
    has_parent = [False] * len(nominal_s)
    for child, parent in after[np.argsort(after[:, 0], kind="stable")].tolist():
        ready_s = nominal_s[parent] + pause_s[child]
        nominal_s[child] = max(nominal_s[child], ready_s) if has_parent[child] else ready_s
        has_parent[child] = True
    return np.array(nominal_s)


def _parse_ns(value: object, missing: int) -> int:
    """A time of OTLP [ns], which writes whole numbers as texts; `missing` where it is no whole number."""
    try:
        return int(value) if isinstance(value, int | float | str) else missing
    except (ValueError, OverflowError):
        return missing
