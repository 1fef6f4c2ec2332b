"""Who waits for whom among the calls of a model that stand in trees of spans.

A span's parent says whose work it is, not what it waited for; the clock tells the rest. Of two children of
one span the later one waits for the earlier one if that had ended when it began. So a call waits for the
last calls before it of its agent and of all sub-agents that had come back, and the first call of a sub-agent
for what its caller had done before it sent it out. What it waited beyond that, for tools or for a person, is
its pause. Traces of one conversation are children of it in their turn; each is a task.

    [ agent                                                    ]
      [ call 1 ]   [ tool: sub-agent [ call a ] [ call b ] ]
                   [ tool ]                                  [ call 2 ]     2 waits for b, b for a, a for 1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from planner.traffic.trace import FloatArray, IntArray, Trace

SERIAL = "serial"  # the column that says which call of a SpanTree a row is
MOST_WAITS = 64  # of one call, those that ended last; 20,000 calls after 20,000 others are not 4e8 rows
_Path = tuple[str, ...]


@dataclass(slots=True)
class SpanTree:
    """Spans as they are read: `add` any span, `add_call` one that is a request, by whose number `with_waits`
    knows it again. Times are ns since the epoch.
    """

    _spans: dict[str, tuple[str, int, int]] = field(default_factory=dict)  # parent, start, end
    _calls: list[tuple[str, str, int, int]] = field(default_factory=list)  # span, trace, start, end
    _conversations: dict[str, str] = field(default_factory=dict)  # by trace

    def add(self, span: str, parent: str, trace: str, conversation: str, start: object, end: object) -> None:
        start_ns = _ns(start, 0)
        if span:
            self._spans[span] = (parent, start_ns, _ns(end, start_ns))
        if trace and conversation:
            self._conversations.setdefault(trace, conversation)

    def add_call(self, span: str, trace: str, start: object, end: object) -> int:
        """The number of a request; one without a trace waits for nobody."""
        start_ns = _ns(start, 0)
        self._calls.append((span, trace, start_ns, max(_ns(end, start_ns), start_ns)))
        return len(self._calls) - 1

    def with_waits(self, trace: Trace, serials: IntArray) -> Trace:
        """The trace whose request i is call `serials[i]`, with waits, pauses, tasks and nominal arrivals."""
        edges = self._edges(serials.tolist())
        if not edges:
            return trace
        start_ns, end_ns = np.array([self._calls[k][2:] for k in serials.tolist()]).T
        after = np.array(edges, np.int64)
        after = after[np.lexsort((after[:, 0], after[:, 1]))]
        ready_ns = np.zeros(len(trace), np.int64)
        np.maximum.at(ready_ns, after[:, 0], end_ns[after[:, 1]])
        waits = np.zeros(len(trace), dtype=bool)
        waits[after[:, 0]] = True
        think_s = np.where(waits, np.maximum(start_ns - ready_ns, 0) / 1e9, 0.0)
        names = [self._calls[k][1] or f"call {k}" for k in serials.tolist()]
        number: dict[str, int] = {}
        task = np.array([number.setdefault(name, len(number)) for name in names])
        arrival_s = _nominal_s(trace.arrival_s, after, think_s)
        order = np.lexsort((np.arange(len(trace)), arrival_s))
        note = (
            f"{int(waits.sum())} of {len(trace)} requests wait for others, by the parents and times of their "
            f"spans ({len(np.unique(task[waits]))} traces are tasks of agents); spans tell no shared prefixes"
        )
        linked = replace(trace, after=after, think_s=think_s, task=task, notes=(*trace.notes, note))
        return linked.select(order, arrival_s=arrival_s[order] - arrival_s[order[0]])

    def _path(self, span: str, trace: str) -> _Path:
        """What encloses a call, outermost first: conversation, trace, spans."""
        above: list[str] = []
        at = self._spans[span][0] if span in self._spans else ""
        while at and at not in above:
            above.append(at)
            at = self._spans[at][0] if at in self._spans else ""
        known = [each for each in above if each in self._spans]
        conversation = self._conversations.get(trace)
        return (f"conversation {conversation or trace}", f"trace {trace}", *reversed(known))

    def _edges(self, serials: Sequence[int]) -> list[tuple[int, int]]:
        """(request, the one it waits for), as places in `serials`."""
        children: dict[_Path, list[_Part]] = {}
        for place, serial in enumerate(serials):
            span, trace, start_ns, end_ns = self._calls[serial]
            if trace:
                path = self._path(span, trace)
                part = _Part(start_ns, end_ns, [place], [place])
                children.setdefault(path, []).append(part)
                for depth in range(1, len(path)):
                    children.setdefault(path[:depth], [])
        edges: list[tuple[int, int]] = []
        for path in sorted(children, key=len, reverse=True):
            whole = _joined(children[path], edges)
            if len(path) > 2 and path[-1] in self._spans:
                _, start_ns, end_ns = self._spans[path[-1]]
                whole.start_ns, whole.end_ns = min(start_ns, whole.start_ns), max(end_ns, whole.end_ns)
            if len(path) > 1:
                children[path[:-1]].append(whole)
        return [(child, parent) for child, parent in edges if parent < child]  # clocks that disagree


@dataclass(slots=True)
class _Part:
    """A call, or all calls within a span: its firsts wait for none of it, none of it waits for its lasts."""

    start_ns: int
    end_ns: int
    firsts: list[int]
    lasts: list[int]


def _joined(parts: list[_Part], edges: list[tuple[int, int]]) -> _Part:
    """Parts that are children of one span as one; `edges` gets who waits for whom among them."""
    parts.sort(key=lambda part: (part.start_ns, part.end_ns))
    by_end = sorted(range(len(parts)), key=lambda k: parts[k].end_ns)
    ends_ns = [parts[k].end_ns for k in by_end]
    latest = list(accumulate(by_end, max))  # of those that ended by each place, the one that began last
    firsts: list[int] = []
    is_waited_for = [False] * len(parts)
    for k, part in enumerate(parts):
        ended = bisect_right(ends_ns, part.start_ns)
        while ended and by_end[ended - 1] >= k:  # Spans of no length wait for those before them.
            ended -= 1
        if not ended:
            firsts += part.firsts
            continue
        newest = latest[ended - 1]
        since = bisect_right(ends_ns, parts[newest].start_ns, hi=ended)
        before = {newest, *by_end[max(since, ended - MOST_WAITS) : ended]}
        parents: list[int] = []
        for i in sorted(before, key=lambda i: -parts[i].end_ns):
            is_waited_for[i] = True
            parents += parts[i].lasts
        edges += [(child, parent) for child in part.firsts for parent in parents[:MOST_WAITS]]
    lasts = [
        last for part, waited in zip(parts, is_waited_for, strict=True) if not waited for last in part.lasts
    ]
    return _Part(parts[0].start_ns, max(part.end_ns for part in parts), firsts, lasts)


def _nominal_s(start_s: FloatArray, after: IntArray, think_s: FloatArray) -> FloatArray:
    """(n,): when calls would come if answers took no time."""
    at_s = start_s.tolist()
    pause_s = think_s.tolist()
    is_set = [False] * len(at_s)
    for child, parent in after[np.argsort(after[:, 0], kind="stable")].tolist():
        ready_s = at_s[parent] + pause_s[child]
        at_s[child] = max(at_s[child], ready_s) if is_set[child] else ready_s
        is_set[child] = True
    return np.array(at_s)


def _ns(value: object, missing: int) -> int:
    """A time of OTLP, which writes whole numbers as texts."""
    try:
        return int(value) if isinstance(value, int | float | str) else missing
    except (ValueError, OverflowError):
        return missing
