"""Runs tasks in parallel, with results that depend neither on the number of worker processes nor on which
task ends first.

A wave is a fixed set of tasks. The effort of simulations is counted by one meter per question. What a task
sees as spent (`effort_spent`) is what was spent when its wave began, and AT_ONCE times what it has spent
itself, whatever the other tasks of the wave do. When all tasks have ended, the answers that they remembered
are put into the order of the tasks.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from planner.parallel.executors import parallel_width

Item = TypeVar("Item")
Result = TypeVar("Result")

# A task counts its own effort so often, as if so many tasks of its wave ran beside each other; fixed, so that
# what a limit allows does not depend on the number of cores.
AT_ONCE = 2


@dataclass(slots=True)
class Wave:
    """What all tasks of a wave share: the cost of each query, whichever task ran it first."""

    tasks: int
    before: int  # The effort that was spent when the wave began.
    cost: dict[object, int] = field(default_factory=dict)
    # Each (id of a dict, key) that this wave has added.
    fresh: set[tuple[int, object]] = field(default_factory=set)


@dataclass(slots=True)
class WaveTask:
    """A task of a wave: its effort, and the answers that it remembered, as (dict, key)."""

    wave: Wave
    spent: int = 0
    answers: list[tuple[dict[Any, bool], Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Meter:
    """Counts the effort of one question: simulated requests, weighed by what one costs."""

    spent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, effort: int) -> None:
        with self._lock:
            self.spent += effort


_task: ContextVar[WaveTask | None] = ContextVar("task", default=None)
_meter: ContextVar[Meter | None] = ContextVar("meter", default=None)
_outer_meter = Meter()  # It counts simulations outside of any question.


def has_meter() -> bool:
    """Whether a question is under way here."""
    return _meter.get() is not None


def use_meter(meter: Meter) -> Token[Meter | None]:
    """Count with this one from here on."""
    return _meter.set(meter)


def _current_meter() -> Meter:
    return _meter.get() or _outer_meter


def current_task() -> WaveTask | None:
    """The task that is under way here."""
    return _task.get()


def charge_effort(question: object, cost: int | None) -> None:
    """Charge a query's cost to the meter and the current task; `cost` is None where the answer was known.

    A task pays for an answer that another task of its wave found first, so its effort does not depend on
    which of them was faster.
    """
    if cost is not None:
        _current_meter().add(cost)
    if (own := current_task()) is None:
        return
    if cost is not None:
        own.wave.cost[question] = cost
    own.spent += own.wave.cost.get(question, 0)


def remember_answer(answers: dict[Any, bool], key: Any, answer: bool) -> None:
    """Set `answers[key]`; the order of new keys is mended when the wave ends (`_merge_in_order`)."""
    if (own := current_task()) is not None:
        entry = id(answers), key
        if key not in answers:
            own.wave.fresh.add(entry)
        if entry in own.wave.fresh:
            own.answers.append((answers, key))
    answers[key] = answer


def effort_spent() -> int:
    """The effort that limits of a search are compared with, in simulated requests."""
    if (own := current_task()) is None:
        return _current_meter().spent
    return own.wave.before + min(AT_ONCE, own.wave.tasks) * own.spent


def side_by_side(tasks: Sequence[Callable[[], None]]) -> None:
    """Run closures in parallel, up to `parallel_width` at a time; raises the first exception in order."""
    if len(tasks) < 2:
        for todo in tasks:
            todo()
        return
    outer = current_task()
    wave = Wave(len(tasks), effort_spent(), {} if outer is None else outer.wave.cost)
    at_once = min(parallel_width(), len(tasks))
    each = [WaveTask(wave) for _ in tasks]
    contexts = [contextvars.copy_context() for _ in tasks]
    for context, own in zip(contexts, each, strict=True):
        context.run(_task.set, own)
    try:
        _run(list(zip(contexts, tasks, strict=True)), at_once)
    finally:
        _merge_in_order(each)


def run_each(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """[function(item) for item in items], side by side."""
    todo = list(items)
    results: dict[int, Result] = {}

    def look(k: int) -> None:
        results[k] = function(todo[k])

    side_by_side([partial(look, k) for k in range(len(todo))])
    return [results[k] for k in range(len(todo))]


def _run(tasks: Sequence[tuple[contextvars.Context, Callable[[], None]]], at_once: int) -> None:
    if at_once == 1:
        error: BaseException | None = None
        for context, todo in tasks:
            try:
                context.run(todo)
            except Exception as raised:  # The other tasks go on, as they do in parallel.
                error = error or raised
        if error is not None:
            raise error
        return
    pool = ThreadPoolExecutor(max_workers=at_once)
    try:
        pending = [pool.submit(context.run, todo) for context, todo in tasks]
        for future in pending:
            future.result()
    except (
        KeyboardInterrupt
    ):  # A simulation under way cannot be stopped and may take long: do not wait for it.
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    except BaseException:
        pool.shutdown()
        raise
    pool.shutdown()


def _merge_in_order(tasks: Sequence[WaveTask]) -> None:
    """Reorder the answers of a wave's tasks as if these had run one after the other, and hand the answers and
    the effort to the task that started the wave.
    """
    outer = current_task()
    for own in tasks:
        for answers, key in own.answers:
            answers[key] = answers.pop(key)  # This moves the key to the end.
            if outer is not None:
                outer.answers.append((answers, key))
        if outer is not None:
            outer.spent += own.spent
