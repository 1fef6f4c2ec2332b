"""Runs tasks in parallel, with results that depend neither on the number of worker processes nor on which
task ends first.

A wave is a fixed set of tasks. One meter per question counts the effort of simulations. A task must not see
what the other tasks of its wave have spent so far, because that depends on how many run at once. So
`effort_spent` tells it what was spent when its wave began, plus AT_ONCE times its own effort since. When all
tasks have ended, the verdicts that they added are put into the order of the tasks.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from planner.parallel.executors import parallel_width

Item = TypeVar("Item")
Result = TypeVar("Result")

# A task multiplies its own effort by this, as if this many tasks of its wave ran at once and each spent as
# much. The number is fixed, so that what a limit on effort allows does not depend on the number of cores.
AT_ONCE = 2


@dataclass(slots=True)
class Wave:
    """What all tasks of a wave share: the number of `tasks`, the effort that was spent when the wave began,
    and the cost of each query, whichever task ran it first.
    """

    tasks: int
    spent_before: int
    cost: dict[object, int] = field(default_factory=dict)
    # The keys of verdicts that this wave added, as (id of the dict, key).
    added: set[tuple[int, object]] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class WaveTask:
    """A task of a wave: the task that started the wave, if any, the effort it has spent, and the verdicts
    that it added, as (dict, key). `is_merged`: the wave has ended.
    """

    wave: Wave
    outer: WaveTask | None
    is_merged: bool = False
    spent: int = 0
    verdicts: list[tuple[dict[Any, bool], Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Meter:
    """Counts the effort of one question: simulated requests, weighed by what one costs."""

    spent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, effort: int) -> None:
        """Add effort, from any thread."""
        with self._lock:
            self.spent += effort


_task: ContextVar[WaveTask | None] = ContextVar("task", default=None)
_meter: ContextVar[Meter | None] = ContextVar("meter", default=None)
_outer_meter = Meter()  # Counts simulations outside of any question, in tests for instance.


@contextmanager
def own_meter() -> Iterator[None]:
    """Count the effort of the `with` block with a meter of its own. A block within another such block shares
    the meter of the outer one.
    """
    if _meter.get() is not None:
        yield
        return
    token = _meter.set(Meter())
    try:
        yield
    finally:
        _meter.reset(token)


def _current_meter() -> Meter:
    """The meter of the question that this context belongs to."""
    return _meter.get() or _outer_meter


def current_task() -> WaveTask | None:
    """The task of a wave that runs in this context; None outside of waves."""
    return _task.get()


def is_known_here(by: WaveTask | None) -> bool:
    """Whether the current task may use what the task `by` has learned (None: learned outside of waves).

    It may if it would know this in any order of the tasks in its wave: if `by` is the task itself, a task
    that started its wave, or a task of a wave that has ended.
    """
    while by is not None and by.is_merged:
        by = by.outer  # What a task of an ended wave learned counts as learned by the task that started it.
    task = current_task()
    while task is not None and task is not by:
        task = task.outer
    return task is by


def charge_effort(cost: int) -> None:
    """Charge work whose result no other task asks for, so that each time it is done counts."""
    charge_query(object(), cost)  # A new object is a key that nobody else has.


def charge_query(query: object, cost: int | None) -> None:
    """Charge the cost of a query to the meter and the current task; `cost` is None for a cached answer.

    The meter counts each simulation once. A task pays at every use of an answer that its wave computed, no
    matter by which task, so that its effort does not depend on which of them was first.
    """
    if cost is not None:
        _current_meter().add(cost)
    if (task := current_task()) is None:
        return
    if cost is not None:
        task.wave.cost[query] = cost
    task.spent += task.wave.cost.get(query, 0)


def remember_verdict(verdicts: dict[Any, bool], key: Any, verdict: bool) -> None:
    """Set `verdicts[key]`. New keys are put into the order of the tasks when the wave ends
    (`_merge_in_order`).
    """
    if (task := current_task()) is not None:
        entry = id(verdicts), key
        if key not in verdicts:
            task.wave.added.add(entry)
        if entry in task.wave.added:
            task.verdicts.append((verdicts, key))
    verdicts[key] = verdict


def effort_spent() -> int:
    """The effort that counts against the limits of a search, in simulated requests."""
    if (task := current_task()) is None:
        return _current_meter().spent
    return task.wave.spent_before + min(AT_ONCE, task.wave.tasks) * task.spent


def run_wave(tasks: Sequence[Callable[[], None]]) -> None:
    """Run the tasks as a wave, up to `parallel_width` at a time. If several raise, the exception of the first
    in order is raised.
    """
    if len(tasks) < 2:  # Nothing runs beside a single task, so it needs no wave.
        for task in tasks:
            task()
        return
    outer = current_task()
    # Within a task of another wave, queries that the outer wave has paid for keep their cost.
    wave = Wave(len(tasks), effort_spent(), {} if outer is None else outer.wave.cost)
    at_once = min(parallel_width(), len(tasks))
    wave_tasks = [WaveTask(wave, outer) for _ in tasks]
    contexts = [contextvars.copy_context() for _ in tasks]
    for context, wave_task in zip(contexts, wave_tasks, strict=True):
        context.run(_task.set, wave_task)
    try:
        _run_in_threads(list(zip(contexts, tasks, strict=True)), at_once)
    finally:
        _merge_in_order(wave_tasks)


def run_each(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """[function(item) for item in items], run as a wave."""
    arguments = list(items)
    results: dict[int, Result] = {}

    def call(k: int) -> None:
        results[k] = function(arguments[k])

    run_wave([partial(call, k) for k in range(len(arguments))])
    return [results[k] for k in range(len(arguments))]


def _run_in_threads(tasks: Sequence[tuple[contextvars.Context, Callable[[], None]]], at_once: int) -> None:
    """Run each task in its context, `at_once` at a time; raises the first exception in order."""
    errors: dict[int, BaseException] = {}
    numbers = iter(range(len(tasks)))  # All threads take the number of their next task from it.

    def run_tasks() -> None:
        for k in numbers:
            context, task = tasks[k]
            try:
                context.run(task)
            except Exception as error:  # The other tasks still run.
                errors[k] = error

    if at_once == 1:
        run_tasks()
    else:
        # A future for each thread: with one for each task, this thread would wake at the end of every task.
        pool = ThreadPoolExecutor(max_workers=at_once)
        try:
            for future in [pool.submit(run_tasks) for _ in range(at_once)]:
                future.result()
        except BaseException:
            # An interrupt. A simulation that has begun cannot be stopped and may take long, so we do not wait
            # for it. All numbers are taken, so that no further task begins.
            list(numbers)
            raise
        finally:
            pool.shutdown(wait=False)
    if errors:
        raise errors[min(errors)]


def _merge_in_order(tasks: Sequence[WaveTask]) -> None:
    """Reorder the verdicts of a wave's tasks as if these had run one after the other. The task that started
    the wave, if any, gets their verdicts and their effort.
    """
    outer = current_task()
    for task in tasks:
        for verdicts, key in task.verdicts:
            verdicts[key] = verdicts.pop(key)  # This moves the key to the end.
            if outer is not None:
                outer.verdicts.append((verdicts, key))
        if outer is not None:
            outer.spent += task.spent
        task.is_merged = True
