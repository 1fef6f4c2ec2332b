"""Owned GPUs first: what a fleet takes of them, it need not rent.

An owned GPU and a rented one of its row are two worker types of one machine, so that every option has one
price. Any fleet that holds says by itself how it is bought cheapest: of alike workers as many are owned as
there are, and the simulation is the same.

Level 0 has one worker type per pool, and so a pool that is owned or one that is rented. `alone` finds those
that are both: the smallest fleet of one GPU type, whatever it costs, with what is owned taken off its price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.domain import OWNED, FleetLimit, Gpu, market_of, row_of
from planner.search.fleets import Counts
from planner.search.level0 import search_level0
from planner.search.options import weight
from planner.search.problem import Problem
from planner.solvers.master import Option

MANY = 2**31  # where a limit is looked away from


def owned_first(problem: Problem, counts: Counts) -> Counts:
    """The same machines, as many of them owned as there are, the largest workers first.

    Itself where that needs rented ones that are not to be had.
    """
    if not problem.task.owned:
        return counts
    gpus = {gpu.name: gpu for gpu in problem.gpus}
    left = {
        row_of(gpu): MANY if count is None else count
        for gpu, count in problem.limits.stock.items()
        if gpu.endswith(OWNED)
    }
    alike: dict[tuple[object, ...], list[tuple[Option, int]]] = {}
    for option, count in counts:
        alike.setdefault(_machine(option), []).append((option, count))
    bought: dict[tuple[object, ...], list[tuple[Option, int]]] = {}
    for machine, pools in sorted(alike.items(), key=lambda item: -item[1][0][0].type.gpus):
        option, total = pools[0][0], sum(count for _, count in pools)
        row = row_of(option.type.gpu.name)
        if row not in left or machine[-1]:
            bought[machine] = pools
            continue
        owned = min(total, left[row] // option.type.gpus)
        left[row] -= owned * option.type.gpus
        if owned < total and row not in gpus:
            return counts
        each = ((row + OWNED, owned), (row, total - owned))
        bought[machine] = [(_of(gpus[name], option, problem), count) for name, count in each if count]
    return tuple(pool for machine in alike for pool in bought[machine])


def workers_by_machine(counts: Counts) -> dict[tuple[object, ...], int]:
    """How many workers there are of each machine, owned and rented ones together."""
    found: dict[tuple[object, ...], int] = {}
    for option, count in counts:
        found[_machine(option)] = found.get(_machine(option), 0) + count
    return found


def _machine(option: Option) -> tuple[object, ...]:
    """Role and settings of a worker and its GPU's row; and whether it is on the spot market."""
    worker, gpu = option.type, option.type.gpu.name
    plain = replace(worker, gpu=replace(worker.gpu, name=row_of(gpu), price_usd_per_h=0.0))
    return option.role, plain.name, market_of(gpu) not in ("", OWNED)


def _of(gpu: Gpu, option: Option, problem: Problem) -> Option:
    worker = replace(option.type, gpu=gpu)
    return Option(option.role, worker, weight(worker, problem.task.objective))


def alone(problem: Problem) -> Iterator[Counts]:
    """The smallest fleet found of each GPU type of which some are owned and more may be rented.

    The smallest is the cheapest once what is owned is taken off, as all its GPUs have one price.
    """
    if problem.task.objective != "cost":
        return
    for row in problem.task.owned:
        types = tuple(worker for worker in problem.types if worker.gpu.name == row)
        if not types or problem.out_of_time():
            continue
        limits = problem.limits.without(FleetLimit("cost"))
        found = search_level0(replace(problem, types=types, limits=limits), walks=False).search
        if found.best is not None and math.isfinite(found.value):
            yield found.best
