"""Simulates every fleet of level 0 that is cheaper than the best one found. If this comes to its end, the
answer is exact.

The search leaves fleets out by its pruning rules (pruning_rules.py). If the cheaper fleets are few enough,
they are all simulated here, and the answer rests on no rule any more. The exception is the link rule: pairs
that it left out are not simulated here either, so the answer is not exact then. Apart from these pairs only
counts below `BoundedOption.least` are left out, with which no policy can do the work that the SLO requires.

`every_mix` lists the fleets of any mix for the search beyond level 0 (mixed/mixed_fleets.py).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import get_args

import numpy as np

from planner.domain import ROUNDING
from planner.fleet import Role
from planner.search.level0 import pruning_rules
from planner.search.level0.one_pool import BoundedOption, Holds, Level0Search
from planner.search.oracle import fleet_counts
from planner.search.oracle.deterministic_parallel import run_wave
from planner.solvers.master import FleetLimits, Floats, Option, largest_of_each
from planner.solvers.whole_nodes import node_of

# `every_mix` may list this many vectors of counts for each fleet that it may return. Some vectors are no
# fleets, because they have prefill workers and no decode workers, and some cost too much with idle GPUs of
# nodes. The number is set by hand; it bounds memory.
VECTORS_PER_FLEET = 4
SAMPLE = 8  # This many fleets are simulated first, to judge how long all would take.
WAVE_SIZE = 32  # Fleets simulated in parallel; fixed, so that answers do not depend on the number of cores.


def count_cheaper(
    mixed: Sequence[BoundedOption],
    pairs: Sequence[tuple[BoundedOption, BoundedOption]],
    search: Level0Search,
    value: float,
) -> float:
    """How many fleets within the limits, from the least counts on, cost less than `value`."""
    total = 0.0
    for bounded in mixed:
        most = min(bounded.most, fleet_counts.largest_below(bounded.option, value))
        total += max(most - bounded.least + 1, 0)
    for prefill, decode in pairs:
        total += float(_decode_counts(prefill, decode, search, value)[1].sum())
    return total


def _decode_counts(
    prefill: BoundedOption, decode: BoundedOption, search: Level0Search, value: float
) -> tuple[Floats, Floats]:
    """The possible prefill counts (P,) of a pair, and how many decode counts (P,) go with each: those from
    the least one on that are within the limits and below `value`. If prefill counts have no end, the result
    is the least one with infinitely many decode counts.
    """
    empty = np.zeros(0)
    # The most prefill workers that cost less than `value` together with the fewest decode workers.
    most_p = min(
        prefill.most,
        fleet_counts.count_below(prefill.option.objective, value, decode.least * decode.option.objective),
    )
    if most_p < prefill.least or decode.least > decode.most:
        return empty, empty
    if not np.isfinite(most_p):  # Nothing limits the prefill workers.
        return np.array([float(prefill.least)]), np.array([np.inf])
    n_p = np.arange(prefill.least, int(most_p) + 1, dtype=float)
    # The most decode workers beside each prefill count; -1 where not even 0 of them are within a limit.
    most_d = np.full(len(n_p), decode.most)
    if np.isfinite(value):
        left_for_decode = value * (1 - ROUNDING) - n_p * prefill.option.objective
        if decode.option.objective > 0:
            fitting = np.ceil(left_for_decode / decode.option.objective) - 1  # Strictly below the value.
            most_d = np.minimum(most_d, fitting)
        else:  # Decode workers are free, but the prefill pool alone may cost too much.
            most_d[left_for_decode <= 0] = -1
    for limit, amount in search.limits.rows():
        left_for_decode = amount * (1 + ROUNDING) - n_p * search.limits.use_per_worker(
            limit, prefill.option.type
        )
        if (use := search.limits.use_per_worker(limit, decode.option.type)) > 0:
            most_d = np.minimum(most_d, np.floor(left_for_decode / use))
        else:
            most_d[left_for_decode < 0] = -1
    # Idle GPUs of whole nodes are paid too, so fewer decode workers may cost less than `value`.
    if np.isfinite(value) and (prefill.option.node or decode.option.node):
        below = value * (1 - ROUNDING)
        most_d = largest_of_each(
            decode.least,
            most_d,
            lambda n: fleet_counts.objectives_of_pairs(prefill.option, decode.option, n_p, n) < below,
        )
    if search.limits.node_rows() and (node_of(prefill.option.type.gpu) or node_of(decode.option.type.gpu)):
        most_d = largest_of_each(
            decode.least,
            most_d,
            lambda n: search.limits.fit_on_nodes([(prefill.option.type, n_p), (decode.option.type, n)]),
        )
    return n_p, np.maximum(most_d - decode.least + 1, 0)


def cheaper_fleets(
    mixed: Sequence[BoundedOption],
    pairs: Sequence[tuple[BoundedOption, BoundedOption]],
    search: Level0Search,
    value: float,
) -> Iterator[fleet_counts.Counts]:
    """The fleets that `count_cheaper` counts."""
    for bounded in mixed:
        most = int(min(bounded.most, fleet_counts.largest_below(bounded.option, value)))
        for n in range(bounded.least, most + 1):
            yield ((bounded.option, n),)
    for prefill, decode in pairs:
        for n_p, count in zip(*_decode_counts(prefill, decode, search, value), strict=True):
            for n_d in range(decode.least, decode.least + int(count)):
                yield ((prefill.option, int(n_p)), (decode.option, n_d))


def walk(
    mixed: Sequence[BoundedOption],
    pairs: Sequence[tuple[BoundedOption, BoundedOption]],
    holds: Holds,
    verdicts: fleet_counts.Verdicts,
    search: Level0Search,
    may_go_on: Callable[[int, int], bool],
) -> None:
    """Simulate all cheaper fleets as long as `may_go_on(done, left)` allows it; updates `search`.

    A sample of all fleets comes first, then the other fleets from the dearest on: cheap fleets are likelier
    to be too small, so an interrupted walk has simulated those that are likeliest to hold. Fleets that are
    known to fail (`verdicts`) are skipped. A fleet that holds becomes the best, and from then on only cheaper
    fleets are simulated. `search.is_exact` is set if no cheaper fleet remains.
    """
    cheaper_left = count_cheaper(mixed, pairs, search, search.value)
    search.counted_below = search.value, cheaper_left  # `note_cheaper` need not count again.
    if not np.isfinite(cheaper_left) or not may_go_on(0, int(cheaper_left)):
        return
    fleets = [
        counts
        for counts in cheaper_fleets(mixed, pairs, search, search.value)
        if verdicts.get(fleet_counts.names_of(counts)) is not False
    ]
    fleets.sort(key=lambda counts: -fleet_counts.objective_of(counts))
    stride = max(len(fleets) // SAMPLE, 1)  # The sample is spread evenly over the prices.
    fleets = [*fleets[::stride], *(counts for k, counts in enumerate(fleets) if k % stride)]
    simulated = 0
    while simulated < len(fleets):
        if not may_go_on(simulated, len(fleets) - simulated):
            return
        value_to_beat = search.value * (1 - ROUNDING)
        size = WAVE_SIZE if simulated else SAMPLE
        wave = [
            counts
            for counts in fleets[simulated : simulated + size]
            if fleet_counts.objective_of(counts) < value_to_beat
        ]
        simulated += size
        holding: list[fleet_counts.Counts] = []

        # `holding` is bound now, because the next wave has a list of its own. Simulations of a wave may end
        # in any order, so the fleets that hold are sorted before they are offered.
        def simulate(counts: fleet_counts.Counts, holding: list[fleet_counts.Counts] = holding) -> None:
            if holds(counts):
                holding.append(counts)

        run_wave([partial(simulate, counts) for counts in wave])
        for counts in sorted(
            holding, key=lambda counts: (fleet_counts.objective_of(counts), fleet_counts.names_of(counts))
        ):
            search.offer(counts)
    # The walk relied on no rule but the link rule: pairs that the link rule left out are not in `pairs`.
    search.assumed &= {pruning_rules.LINK}
    search.is_exact = not search.assumed


def note_cheaper(
    mixed: Sequence[BoundedOption],
    pairs: Sequence[tuple[BoundedOption, BoundedOption]],
    verdicts: fleet_counts.Verdicts,
    search: Level0Search,
) -> None:
    """Record in `search` how many fleets are cheaper than the best, and how many of these were simulated."""
    if search.counted_below is not None and search.counted_below[0] == search.value:
        count = search.counted_below[1]  # The walk has counted them already.
    else:
        count = count_cheaper(mixed, pairs, search, search.value)
    search.cheaper = int(count) if np.isfinite(count) else None
    options = {bounded.option.name: bounded.option for bounded in (*mixed, *itertools.chain(*pairs))}
    search.cheaper_simulated = 0
    for fleet in verdicts:
        roles = [name.split()[0] for name, _ in fleet]  # An option's name begins with its role.
        if len(fleet) != 1 and roles != ["prefill", "decode"]:
            continue  # A mixed fleet is not of level 0.
        if all(name in options and n > 0 for name, n in fleet):
            value = fleet_counts.objective_of((options[name], n) for name, n in fleet)
            search.cheaper_simulated += value < search.value * (1 - ROUNDING)


def every_mix(
    options: Sequence[Option], limits: FleetLimits, value: float, *, most: int
) -> list[fleet_counts.Counts] | None:
    """All fleets of these options, of any mix, within the limits and below `value`.

    None if there are more than `most`.
    """
    amounts = [amount * (1 + ROUNDING) for _, amount in limits.rows()]
    uses = [[limits.use_per_worker(limit, option.type) for option in options] for limit, _ in limits.rows()]
    if np.isfinite(value):
        amounts.append(value * (1 - ROUNDING))
        uses.append([option.objective for option in options])
    is_limited = (np.array(uses) > 0).any(axis=0) if uses else np.zeros(len(options), bool)
    if not is_limited.all():
        return None  # Nothing limits one of the options, so there is no end to the fleets.
    vectors = np.zeros((1, 0), dtype=np.int64)
    remaining = np.maximum([amounts], 0.0)
    for j in range(len(options)):
        # A vector has counts of the options before j. It is continued by all counts of option j that fit into
        # what the vector leaves of each amount.
        use = np.array([row_uses[j] for row_uses in uses])  # How much of each amount one worker takes.
        is_used = use > 0
        # How many counts, 0 included, may follow each vector.
        choices = np.floor(np.min(remaining[:, is_used] / use[is_used], axis=1)) + 1
        if choices.sum() > VECTORS_PER_FLEET * most:
            return None
        choices = choices.astype(np.int64)
        # 0, 1, ..., choices[k] - 1 for each vector k, one vector after the other.
        new_counts = np.arange(choices.sum()) - np.repeat(np.cumsum(choices) - choices, choices)
        vectors = np.column_stack([np.repeat(vectors, choices, axis=0), new_counts])
        remaining = np.repeat(remaining, choices, axis=0) - new_counts[:, None] * use
    roles = np.array([option.role for option in options], dtype=str)
    has_role = {role: vectors[:, roles == role].any(axis=1) for role in get_args(Role)}
    # A fleet has prefill and decode workers, or neither, and some worker.
    vectors = vectors[(has_role["prefill"] == has_role["decode"]) & (has_role["mixed"] | has_role["prefill"])]
    has_nodes = any(option.node is not None for option in options)
    limits_nodes = bool(limits.node_rows()) and any(node_of(option.type.gpu) for option in options)
    if len(vectors) > most * (VECTORS_PER_FLEET if has_nodes or limits_nodes else 1):
        return None
    fleets = [
        tuple((option, count) for option, count in zip(options, vector, strict=True) if count)
        for vector in vectors.tolist()
    ]
    if has_nodes:
        fleets = [counts for counts in fleets if fleet_counts.objective_of(counts) < value * (1 - ROUNDING)]
    if limits_nodes:
        fleets = [counts for counts in fleets if fleet_counts.is_within(limits, counts)]
    return None if len(fleets) > most else fleets
