"""Lists fleets of a few worker types to which no worker can be added within a price and the limits.

Many combinations of options are filled at once. Row r of the arrays (R, k) is a fleet of k options: their
numbers, and the count of workers of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import get_args

import numpy as np
import numpy.typing as npt

from planner.domain import COST, ROUNDING
from planner.fleet import Role
from planner.search.oracle.fleet_counts import FEWER_FRAC, objective, own_drafts
from planner.solvers.master import FleetLimits, Floats, Option, largest_of_each
from planner.solvers.whole_nodes import PricedNode, node_of

MOST_CANDIDATES = 4_000  # Fleets that are listed at most.
TOGETHER = 2_000  # Combinations of options that are filled in one turn.
MOST_COUNTS = 12  # Different counts of an option that are tried beside those of others.
NONE = -1  # Role and draft of the filler option, of which fleets of fewer than k options have 0 workers.

Ints = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.int32]


def filled(options: Sequence[Option], limits: FleetLimits, value: float, most_types: int) -> Vectors:
    """Fleets (C, J) of up to `most_types` options, below `value`, to which no worker can be added.

    Where there are more than MOST_CANDIDATES, only those of the first options are listed.
    """
    fleets: list[Vectors] = []
    count, table = 0, _Table(options, limits, value)
    possible = [j for j, option in enumerate(options) if objective([(option, 1)]) < value]
    # Every set of up to `most_types` options once, as numbers of options, filler options in front. Sets are
    # in the order of their last option, so those of the first options alone are listed first.
    combinations = (
        (*(len(options),) * (most_types - 1 - size), *others, last)
        for before_last, last in enumerate(possible)
        for size in range(most_types)
        for others in itertools.combinations(possible[:before_last], size)
    )
    while count <= MOST_CANDIDATES:
        chosen = np.array([*itertools.islice(combinations, TOGETHER)], dtype=np.int64)
        if not len(chosen):
            break
        combination_of, chosen, counts = table.fill(chosen)
        # The combination that exceeds MOST_CANDIDATES is listed whole, and is the last one.
        left = MOST_CANDIDATES - count
        if len(combination_of) <= left:
            end = len(combination_of)
        else:
            end = int(np.searchsorted(combination_of, combination_of[left], side="right"))
        vectors = np.zeros((end, len(options) + 1), np.int32)
        np.put_along_axis(vectors, chosen[:end], counts[:end].astype(np.int32), axis=1)
        fleets.append(vectors[:, :-1])
        count += end
    return np.concatenate(fleets) if fleets else np.zeros((0, len(options)), np.int32)


class _Table:
    """Role, objective and use of each limit of one worker of each option, as arrays (J + 1,).

    The last entry is the filler option; fleets of fewer than k options have 0 workers of it.
    """

    def __init__(self, options: Sequence[Option], limits: FleetLimits, value: float) -> None:
        self.limits, self.value = limits, value
        self.objective = np.array([*(option.objective for option in options), 0.0])
        self.gpus = np.array([*(float(option.type.gpus) for option in options), 0.0])
        self.price_usd_per_h = np.array([*(option.type.price_usd_per_h for option in options), 0.0])
        self.roles = np.array([*(get_args(Role).index(option.role) for option in options), NONE])
        drafts = [own_drafts(option.type) for option in options]
        distinct = [*dict.fromkeys(drafts)]
        self.drafts = np.array([*(distinct.index(each) for each in drafts), NONE])
        self.rows = [
            (amount * (1 + ROUNDING), np.array([*(limits.use(row, option.type) for option in options), 0.0]))
            for row, amount in limits.rows()
        ]
        # Nodes whose idle GPUs the objective counts, and nodes whose idle GPUs are billed.
        self.searched = _Nodes([*(option.node for option in options), None])
        self.paid = _Nodes([*(node_of(option.type.gpu) for option in options), None])

    def fill(self, chosen: Ints) -> tuple[Ints, Ints, Floats]:
        """Fleets of these combinations (C, k): the combination of each (R,), its options and counts (R, k).

        Options are filled from left to right. All but the last branch over several counts; the last one takes
        as many workers as the price and the limits leave room for.
        """
        none = len(self.objective) - 1  # The number of the filler option.
        ones = (chosen < none).astype(float)
        # Others cannot serve, or cost too much with one worker of each option.
        is_open = self._serve(chosen) & (self._objective(chosen, ones) < self.value)
        filled_of, chosen = np.flatnonzero(is_open), chosen[is_open]
        counts, spent = np.zeros((len(chosen), 0)), np.zeros(len(chosen))
        left = [np.full(len(chosen), amount) for amount, _ in self.rows]
        for k in range(chosen.shape[1]):
            option = chosen[:, k]
            most = np.where(option < none, self._most(option, spent, left), 0.0)
            has_room = ((most >= 1) & np.isfinite(most)) | (option == none)
            filled_of, chosen, counts, spent, option, most = (
                each[has_room] for each in (filled_of, chosen, counts, spent, option, most)
            )
            left = [each[has_room] for each in left]
            if k == chosen.shape[1] - 1:
                counts = np.column_stack([counts, most])
                break
            ranges = [_spread(int(n)) for n in most.tolist()]
            times = np.array([len(each) for each in ranges], dtype=np.int64)
            n = np.array([*itertools.chain.from_iterable(ranges)], dtype=float)
            filled_of, chosen, counts, spent, option = (
                np.repeat(each, times, axis=0) for each in (filled_of, chosen, counts, spent, option)
            )
            counts, spent = np.column_stack([counts, n]), spent + n * self.objective[option]
            left = [
                np.repeat(each, times) - n * use[option]
                for each, (_, use) in zip(left, self.rows, strict=True)
            ]
        return self._on_whole_nodes(filled_of, chosen, counts)

    def _most(self, option: Ints, spent: Floats, left: Sequence[Floats]) -> Floats:
        """Most workers (R,) of an option with which a fleet stays below the value, of which `spent` is used,
        and within what is `left` of every limit.
        """
        each = self.objective[option]
        with np.errstate(divide="ignore", invalid="ignore"):
            # Strictly below the value: a count that would just reach it is one too many.
            most = np.ceil((self.value * (1 - ROUNDING) - spent) / each) - 1
        most = np.where(each > 0, most, np.where(spent < self.value, math.inf, -1.0))
        for amount, (_, uses) in zip(left, self.rows, strict=True):
            use = uses[option]
            some = use > 0
            most[some] = np.minimum(most[some], amount[some] // use[some])
        return most

    def _on_whole_nodes(self, of: Ints, chosen: Ints, counts: Floats) -> tuple[Ints, Ints, Floats]:
        """The same fleets where whole nodes are paid: fewer of the last option if they would be too dear.

        Fleets of which even one worker of the last option is too many are left out.
        """
        is_below = self._below(chosen, counts)
        if is_below is not None and len(counts):
            counts[:, -1] = largest_of_each(1, counts[:, -1], is_below)
            some = counts[:, -1] > 0
            of, chosen, counts = of[some], chosen[some], counts[some]
        return of, chosen, counts

    def _below(self, chosen: Ints, counts: Floats) -> Callable[[Floats], npt.NDArray[np.bool_]] | None:
        """A test whether fleets are cheap enough with n of their last option; None where no nodes are paid.

        Whole nodes change only what is paid; all other limits were kept when the counts were made.
        """
        if not self.limits.pays_nodes and not self.searched.is_any:
            return None
        budget = next((amount for row, amount in self.limits.rows() if row == COST), 0.0) * (1 + ROUNDING)

        def fits(n: Floats) -> npt.NDArray[np.bool_]:
            each = np.column_stack([counts[:, :-1], n])
            is_better = self._objective(chosen, each) < self.value * (1 - ROUNDING)
            if self.limits.pays_nodes:
                paid = (self.price_usd_per_h[chosen] * each).sum(axis=1)
                is_better &= paid + self.paid.idle_usd_per_h(chosen, each * self.gpus[chosen]) <= budget
            return is_better

        return fits

    def _objective(self, chosen: Ints, counts: Floats) -> Floats:
        """`fleet_counts.objective` of each row."""
        total = (self.objective[chosen] * counts).sum(axis=1)
        if not self.searched.is_any:
            return np.asarray(total)
        whole = (self.searched.of[chosen] >= 0).any(axis=1)
        idle = self.searched.idle_usd_per_h(chosen, counts * self.gpus[chosen])
        return np.asarray(np.where(whole, total * (1 + FEWER_FRAC) + idle, total))

    def _serve(self, chosen: Ints) -> npt.NDArray[np.bool_]:
        """Whether a combination can serve: prefill and decode only together, and all of these draft alike
        (`fleet_counts.may_hand_over`).
        """
        prefill, decode = (get_args(Role).index(role) for role in ("prefill", "decode"))
        roles = self.roles[chosen]
        has_prefill, has_decode = (roles == prefill).any(axis=1), (roles == decode).any(axis=1)
        hands_over = (roles == prefill) | (roles == decode)
        drafts = self.drafts[chosen]
        # Drafts are alike where the largest number is the smallest; other pools count in neither.
        most = np.where(hands_over, drafts, -1).max(axis=1)
        least = np.where(hands_over, drafts, len(self.drafts)).min(axis=1)
        return np.asarray((has_prefill == has_decode) & (~hands_over.any(axis=1) | (most == least)))


class _Nodes:
    """The nodes of options: `of` (J,) numbers each option's node, -1 where its GPUs are sold singly."""

    def __init__(self, nodes: Sequence[PricedNode | None]) -> None:
        sold_nodes = [*dict.fromkeys(node for node in nodes if node is not None)]
        self.of = np.array([-1 if node is None else sold_nodes.index(node) for node in nodes], dtype=np.int64)
        self.is_any = bool(sold_nodes)
        kinds = [*dict.fromkeys(node.kind for node in sold_nodes)]
        self.kind = np.array([*(kinds.index(node.kind) for node in sold_nodes), -1], dtype=np.int64)
        self.size = np.array([*(float(node.gpus) for node in sold_nodes), 1.0])
        self.gpu_usd_per_h = np.array([*(node.gpu_usd_per_h for node in sold_nodes), 0.0])
        self.gpu_idle_usd_per_h = np.array([*(node.idle_usd_per_h for node in sold_nodes), 0.0])

    def idle_usd_per_h(self, chosen: Ints, gpus: Floats) -> Floats:
        """`whole_nodes.idle_usd_per_h` of each row."""
        node = self.of[chosen]
        kinds, prices = self.kind[node], self.gpu_usd_per_h[node]
        total = np.zeros(len(chosen))
        for kind in np.unique(kinds[kinds >= 0]):
            is_alike = kinds == kind
            dearest_row = np.argmax(np.where(is_alike, prices, -np.inf), axis=1)[:, None]
            dearest = np.take_along_axis(node, dearest_row, axis=1)[:, 0]
            price = self.gpu_usd_per_h[dearest]
            used = np.where(is_alike, gpus, 0.0)
            idle = (-used.sum(axis=1) % self.size[dearest]) * self.gpu_idle_usd_per_h[dearest]
            cheaper = (used * np.where(is_alike, price[:, None] - prices, 0.0)).sum(axis=1)
            total += np.where(is_alike.any(axis=1), idle + cheaper, 0.0)
        return total


@cache
def _spread(largest: int) -> list[int]:
    """The counts 1 to `largest`, or MOST_COUNTS evenly spread ones of these; 0 for the filler option."""
    return (
        [0]
        if largest == 0
        else sorted({round(n) for n in np.linspace(1, largest, min(largest, MOST_COUNTS))})
    )
