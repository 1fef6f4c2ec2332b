"""Things that are asked side by side, so that what comes of them depends neither on how many workers there
are nor on who is done first.

A wave is a fixed set of tasks. Effort is counted by one meter per question. A task reckons with what had been
spent when its wave began, and with what it has spent itself, AT_ONCE times: as if so many were under way.
What is remembered in order (`told`) is put into the order of the tasks when all are done.
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

AT_ONCE = 2


@dataclass(slots=True)
class Wave:
    """What all tasks of a wave share: what each question of it has cost, whoever had asked it first."""

    tasks: int
    before: int  # the effort that was spent when it began
    cost: dict[object, int] = field(default_factory=dict)
    fresh: set[tuple[int, object]] = field(default_factory=set)  # entries that were not told before


@dataclass(slots=True)
class WaveTask:
    """One of a wave: what it has spent, and what it has told, to whom."""

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
_of_all = Meter()  # of what is asked outside of any question


def has_meter() -> bool:
    """Whether a question is under way here."""
    return _meter.get() is not None


def use_meter(meter: Meter) -> Token[Meter | None]:
    """Count with this one from here on."""
    return _meter.set(meter)


def _current_meter() -> Meter:
    return _meter.get() or _of_all


def current_task() -> WaveTask | None:
    """The task that is under way here."""
    return _task.get()


def charge_effort(question: object, cost: int | None) -> None:
    """What a question has cost, None where the answer was known: to the task that is under way what it cost
    whoever asked first.
    """
    if cost is not None:
        _current_meter().add(cost)
    if (own := current_task()) is None:
        return
    if cost is not None:
        own.wave.cost[question] = cost
    own.spent += own.wave.cost.get(question, 0)


def remember_answer(answers: dict[Any, bool], key: Any, answer: bool) -> None:
    """Remember an answer."""
    if (own := current_task()) is not None:
        entry = id(answers), key
        if key not in answers:
            own.wave.fresh.add(entry)
        if entry in own.wave.fresh:
            own.answers.append((answers, key))
    answers[key] = answer


def effort_spent() -> int:
    """The effort that a search reckons with."""
    if (own := current_task()) is None:
        return _current_meter().spent
    return own.wave.before + min(AT_ONCE, own.wave.tasks) * own.spent


def side_by_side(tasks: Sequence[Callable[[], None]]) -> None:
    """Run closures, as many at a time as there are workers; the first exception, in their order, is raised
    here.
    """
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
        _in_order(each)


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
            except Exception as raised:  # as where they run side by side the others go on
                error = error or raised
        if error is not None:
            raise error
        return
    pool = ThreadPoolExecutor(max_workers=at_once)
    try:
        pending = [pool.submit(context.run, todo) for context, todo in tasks]
        for future in pending:
            future.result()
    except KeyboardInterrupt:  # a simulation under way cannot be stopped, and may take long
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    except BaseException:
        pool.shutdown()
        raise
    pool.shutdown()


def _in_order(tasks: Sequence[WaveTask]) -> None:
    """What tasks have told stands as if they had been asked one after the other."""
    outer = current_task()
    for own in tasks:
        for answers, key in own.answers:
            answers[key] = answers.pop(key)
            if outer is not None:
                outer.answers.append((answers, key))
        if outer is not None:
            outer.spent += own.spent
