"""Lists fleets of a few worker types to which no worker can be added within a price and the limits.

Many combinations of options are filled with workers at once, in arrays (R, k). A row stands for a fleet of k
of the J options: `chosen` holds the numbers of these, `counts` their workers. A fleet of fewer options has
the filler option, number J, in its first columns, with 0 workers.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from typing import get_args

import numpy as np
import numpy.typing as npt

from planner.domain import COST, ROUNDING
from planner.fleet import Role
from planner.search.oracle.fleet_counts import TIE_BREAK_FRAC, drafter_with_cache, objective_of
from planner.solvers.master import FleetLimits, Floats, Option, largest_of_each
from planner.solvers.whole_nodes import PricedNode, fewest_nodes, node_of

# The first four numbers bound time and memory, and are set by hand.
MOST_CANDIDATES = 4_000  # At most this many fleets are listed.
BATCH_COMBINATIONS = 2_000  # This many combinations of options are filled at once.
MOST_SUBSETS = 20_000  # One array has at most this many combinations: a few MB.
MOST_COUNTS = 12  # At most this many counts of an option are combined with counts of other options.
NONE = -1  # Stands for the role, the drafts and the kind of the filler option, which has none.

Ints = npt.NDArray[np.int64]
CountArray = npt.NDArray[np.int32]


def list_filled_fleets(
    options: Sequence[Option],
    limits: FleetLimits,
    value: float,
    most_types: int,
    kinds: Sequence[Hashable] | None = None,
) -> CountArray:
    """C fleets of up to `most_types` options that cost less than `value`, and to which no worker can be
    added, as workers per option (C, J). With `kinds`, one for each option, no fleet has two options of one
    kind. If there are more than MOST_CANDIDATES, only those of the first options are listed.
    """
    fleets: list[CountArray] = []
    count, table = 0, _OptionArrays(options, limits, value, kinds)
    possible = [j for j, option in enumerate(options) if objective_of([(option, 1)]) < value]
    combinations = map(table.select_open, _combinations(possible, most_types, len(options)))
    for chosen in _in_batches(combinations):
        combination_of, chosen, counts = table.fill(chosen)
        # The combination with which MOST_CANDIDATES is exceeded is the last one, and all its fleets are
        # listed.
        remaining = MOST_CANDIDATES - count
        if len(combination_of) <= remaining:
            end = len(combination_of)
        else:
            end = int(np.searchsorted(combination_of, combination_of[remaining], side="right"))
        vectors = np.zeros((end, len(options) + 1), np.int32)
        np.put_along_axis(vectors, chosen[:end], counts[:end].astype(np.int32), axis=1)
        fleets.append(vectors[:, :-1])
        count += end
        if count > MOST_CANDIDATES:
            break
    return np.concatenate(fleets) if fleets else np.zeros((0, len(options)), np.int32)


def _combinations(possible: Sequence[int], most_types: int, filler: int) -> Iterator[Ints]:
    """Every set of up to `most_types` of the options once, as arrays (n, most_types) of their numbers, filler
    options in front. Sets are in the order of their last option, so those of the first options alone come
    first.
    """
    numbers = np.array(possible, dtype=np.int64)
    for before_last, last in enumerate(possible):
        for size in range(most_types):
            for others in _subsets(before_last, size):
                chosen = np.full((len(others), most_types), filler)
                chosen[:, most_types - 1 - size : -1] = numbers[others]
                chosen[:, -1] = last
                yield chosen


def _subsets(n: int, size: int) -> Iterator[Ints]:
    """All sets of `size` of the numbers below n in the order of `itertools.combinations`, as arrays of at
    most MOST_SUBSETS rows.
    """
    if math.comb(n, size) > MOST_SUBSETS:
        for first in range(n):
            for others in _subsets(n - first - 1, size - 1):
                yield np.column_stack([np.full(len(others), first), others + first + 1])
        return
    sets = np.zeros((1, 0), dtype=np.int64)
    for width in range(size):
        # Each number below n is put before those sets of `width` numbers whose first one is larger.
        least = sets[:, 0] if width else np.full(1, n)
        begin = np.searchsorted(least, np.arange(n), side="right")
        repeats = len(sets) - begin  # (n,): how many sets follow each number.
        # For each number in turn, the rows of `sets` from its `begin` to the end.
        row = np.arange(repeats.sum()) + np.repeat(len(sets) - np.cumsum(repeats), repeats)
        sets = np.column_stack([np.repeat(np.arange(n), repeats), sets[row]])
    yield sets


def _in_batches(arrays: Iterable[Ints]) -> Iterator[Ints]:
    """The rows of the arrays in their order, BATCH_COMBINATIONS at a time."""
    waiting: list[Ints] = []
    rows = 0
    for array in arrays:
        waiting.append(array)
        rows += len(array)
        if rows >= BATCH_COMBINATIONS:
            together = np.concatenate(waiting)
            whole = rows - rows % BATCH_COMBINATIONS
            yield from np.split(together[:whole], whole // BATCH_COMBINATIONS)
            waiting, rows = [together[whole:]], rows - whole
    if rows:
        yield np.concatenate(waiting)


class _OptionArrays:
    """Figures of one worker of each option as arrays (J + 1,): role, objective, use of each limit and more.
    The last entry is that of the filler option.
    """

    def __init__(
        self,
        options: Sequence[Option],
        limits: FleetLimits,
        value: float,
        kinds: Sequence[Hashable] | None = None,
    ) -> None:
        self.limits, self.value = limits, value
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds or ()))}
        self.kinds = None if kinds is None else np.array([*(numbers[kind] for kind in kinds), NONE])
        self.objective = np.array([*(option.objective for option in options), 0.0])
        self.gpus = np.array([*(float(option.type.gpus) for option in options), 0.0])
        self.roles = np.array([*(get_args(Role).index(option.role) for option in options), NONE])
        drafts = [drafter_with_cache(option.type) for option in options]
        distinct = [*dict.fromkeys(drafts)]
        self.drafts = np.array([*(distinct.index(drafter) for drafter in drafts), NONE])
        self.rows = [
            (
                amount * (1 + ROUNDING),
                np.array([*(limits.use_per_worker(row, option.type) for option in options), 0.0]),
            )
            for row, amount in limits.rows()
        ]
        # Idle GPUs of `objective_nodes` count in the objective, those of `billed_nodes` in the limits on
        # money and stock.
        self.objective_nodes = _Nodes([*(option.node for option in options), None], self.gpus)
        self.billed_nodes = _Nodes([*(node_of(option.type.gpu) for option in options), None], self.gpus)

    def select_open(self, chosen: Ints) -> Ints:
        """The combinations of `chosen` (C, k) that can serve, and that with one worker of each option cost
        less than the value; with `kinds`, without any that has two options of one kind.
        """
        chosen = chosen[self._can_serve(chosen)]
        if self.kinds is not None:
            chosen = chosen[~_has_equals(self.kinds[chosen])]
        ones = (chosen < len(self.objective) - 1).astype(float)
        return chosen[self._objectives(chosen, ones) < self.value]

    def fill(self, chosen: Ints) -> tuple[Ints, Ints, Floats]:
        """Fleets of the combinations `chosen` (C, k). Returns the combination of each fleet (R,), its options
        and its counts (R, k).

        Options are filled from left to right. Every option but the last takes several counts in turn, each in
        a row of its own; the last one takes as many workers as the price and the limits allow.
        """
        filler = len(self.objective) - 1
        combination_of = np.arange(len(chosen))
        counts, spent = np.zeros((len(chosen), 0)), np.zeros(len(chosen))
        unused = [np.full(len(chosen), amount) for amount, _ in self.rows]  # What is left of each limit.
        for k in range(chosen.shape[1]):
            option = chosen[:, k]
            most = np.where(option < filler, self._most_workers(option, spent, unused), 0.0)
            can_take_one = ((most >= 1) & np.isfinite(most)) | (option == filler)
            combination_of, chosen, counts, spent, option, most = (
                rows[can_take_one] for rows in (combination_of, chosen, counts, spent, option, most)
            )
            unused = [amounts[can_take_one] for amounts in unused]
            if k == chosen.shape[1] - 1:
                counts = np.column_stack([counts, most])
                break
            # Row r is repeated once for each of its counts n.
            ranges = [_spread_counts(int(n)) for n in most.tolist()]
            repeats = np.array([len(row_counts) for row_counts in ranges], dtype=np.int64)
            n = np.array([*itertools.chain.from_iterable(ranges)], dtype=float)
            combination_of, chosen, counts, spent, option = (
                np.repeat(rows, repeats, axis=0) for rows in (combination_of, chosen, counts, spent, option)
            )
            counts, spent = np.column_stack([counts, n]), spent + n * self.objective[option]
            unused = [
                np.repeat(amounts, repeats) - n * use[option]
                for amounts, (_, use) in zip(unused, self.rows, strict=True)
            ]
        return self._on_whole_nodes(combination_of, chosen, counts)

    def _most_workers(self, option: Ints, spent: Floats, unused: Sequence[Floats]) -> Floats:
        """The most workers (R,) of an `option` (R,) with which fleets stay below the value and within what is
        `unused` of every limit. `spent` (R,) is the value of their other workers.
        """
        worker_value = self.objective[option]
        with np.errstate(divide="ignore", invalid="ignore"):
            # A fleet must stay below the value, so a count that just reaches it is one too many.
            most = np.ceil((self.value * (1 - ROUNDING) - spent) / worker_value) - 1
        # Free workers add nothing to the value, so any number fits unless the fleet has reached it already.
        most = np.where(worker_value > 0, most, np.where(spent < self.value, math.inf, -1.0))
        for amount, (_, uses) in zip(unused, self.rows, strict=True):
            use = uses[option]
            is_used = use > 0
            most[is_used] = np.minimum(most[is_used], amount[is_used] // use[is_used])
        return most

    def _on_whole_nodes(
        self, combination_of: Ints, chosen: Ints, counts: Floats
    ) -> tuple[Ints, Ints, Floats]:
        """The same fleets, made smaller where nodes are sold whole.

        A fleet that takes too much gets fewer workers of its last option, and is left out if it takes too
        much even with one such worker.
        """
        is_below = self._node_test(chosen, counts)
        if is_below is not None and len(counts):
            counts[:, -1] = largest_of_each(1, counts[:, -1], is_below)
            fits = counts[:, -1] > 0
            combination_of, chosen, counts = combination_of[fits], chosen[fits], counts[fits]
        return combination_of, chosen, counts

    def _node_test(self, chosen: Ints, counts: Floats) -> Callable[[Floats], npt.NDArray[np.bool_]] | None:
        """A test whether fleets are cheap enough, and within the limits, with n (R,) workers of their last
        option; None where no nodes are sold whole. Without idle GPUs the counts are within all limits.
        """
        rows = zip(self.limits.rows(), self.rows, strict=True)
        node_rows = [(limit, *row) for (limit, _), row in rows if self.limits.counts_nodes(limit)]
        if not self.objective_nodes.is_any and not (node_rows and self.billed_nodes.is_any):
            return None

        def fits(n: Floats) -> npt.NDArray[np.bool_]:
            with_n = np.column_stack([counts[:, :-1], n])
            is_within = self._objectives(chosen, with_n) < self.value * (1 - ROUNDING)
            for limit, amount, uses in node_rows:
                in_use, on_nodes = (uses[chosen] * with_n).sum(axis=1), self.billed_nodes
                if limit == COST:
                    idle = on_nodes.idle_usd_per_h(chosen, with_n)
                else:
                    idle = on_nodes.idle_gpus(chosen, np.where(uses[chosen] > 0, with_n, 0.0))
                is_within &= in_use + idle <= amount
            return is_within

        return fits

    def _objectives(self, chosen: Ints, counts: Floats) -> Floats:
        """What `fleet_counts.objective_of` gives for the fleet of each row (R,)."""
        by_gpu = (self.objective[chosen] * counts).sum(axis=1)
        if not self.objective_nodes.is_any:
            return np.asarray(by_gpu)
        has_nodes = (self.objective_nodes.number_of_option[chosen] >= 0).any(axis=1)
        idle = self.objective_nodes.idle_usd_per_h(chosen, counts)
        return np.asarray(np.where(has_nodes, by_gpu * (1 + TIE_BREAK_FRAC) + idle, by_gpu))

    def _can_serve(self, chosen: Ints) -> npt.NDArray[np.bool_]:
        """Whether each combination can serve: it has prefill and decode workers or neither, and all of these
        have the same drafts (`fleet_counts.may_hand_over`).
        """
        prefill, decode = (get_args(Role).index(role) for role in ("prefill", "decode"))
        roles = self.roles[chosen]
        has_prefill, has_decode = (roles == prefill).any(axis=1), (roles == decode).any(axis=1)
        hands_over = (roles == prefill) | (roles == decode)
        drafts = self.drafts[chosen]
        # Drafts are the same if their largest and smallest numbers are. Mixed pools hand nothing over.
        largest = np.where(hands_over, drafts, -1).max(axis=1)
        smallest = np.where(hands_over, drafts, len(self.drafts)).min(axis=1)
        return np.asarray((has_prefill == has_decode) & (~hands_over.any(axis=1) | (largest == smallest)))


class _Nodes:
    """The nodes on which options run. `number_of_option` (J + 1,) is the number of each option's node, -1 if
    its GPUs are sold singly, and `gpus` (J + 1,) the GPUs of a worker. The other arrays are by the number of
    a node; their last entry, at -1, is for no node.
    """

    def __init__(self, nodes: Sequence[PricedNode | None], gpus: Floats) -> None:
        self.gpus = gpus
        sold_nodes = [*dict.fromkeys(node for node in nodes if node is not None)]
        numbers = [-1 if node is None else sold_nodes.index(node) for node in nodes]
        self.number_of_option = np.array(numbers, dtype=np.int64)
        self.is_any = bool(sold_nodes)
        kinds = [*dict.fromkeys(node.kind for node in sold_nodes)]
        self.kind = np.array([*(kinds.index(node.kind) for node in sold_nodes), -1], dtype=np.int64)
        self.size = np.array([*(float(node.gpus) for node in sold_nodes), 1.0])
        self.worker_sizes = sorted({int(size) for size in gpus if size})
        self.gpu_usd_per_h = np.array([*(node.gpu_usd_per_h for node in sold_nodes), 0.0])
        self.gpu_idle_usd_per_h = np.array([*(node.idle_usd_per_h for node in sold_nodes), 0.0])

    def idle_usd_per_h(self, chosen: Ints, counts: Floats) -> Floats:
        """`whole_nodes.idle_usd_per_h` of each row (R,): `counts` (R, k) of the options `chosen` (R, k)."""
        node, gpus_of_worker = self.number_of_option[chosen], self.gpus[chosen]
        prices, total = self.gpu_usd_per_h[node], np.zeros(len(chosen))
        for is_alike, idle_gpus in self._idle_by_kind(chosen, counts):
            dearest_row = np.argmax(np.where(is_alike, prices, -np.inf), axis=1)[:, None]
            dearest = np.take_along_axis(node, dearest_row, axis=1)[:, 0]
            price = self.gpu_usd_per_h[dearest]
            used_gpus = np.where(is_alike, counts * gpus_of_worker, 0.0)
            # GPUs on nodes of one kind all cost as much as the dearest of them.
            surcharge = (used_gpus * np.where(is_alike, price[:, None] - prices, 0.0)).sum(axis=1)
            idle = idle_gpus * self.gpu_idle_usd_per_h[dearest]
            total += np.where(is_alike.any(axis=1), idle + surcharge, 0.0)
        return total

    def idle_gpus(self, chosen: Ints, counts: Floats) -> Floats:
        """`whole_nodes.idle_gpus` of each row (R,), for the same arguments."""
        return sum((idle for _, idle in self._idle_by_kind(chosen, counts)), np.zeros(len(chosen)))

    def _idle_by_kind(self, chosen: Ints, counts: Floats) -> Iterator[tuple[npt.NDArray[np.bool_], Floats]]:
        """For each kind of node which options (R, k) are on it, and how many GPUs idle in each row (R,)."""
        node, gpus_of_worker = self.number_of_option[chosen], self.gpus[chosen]
        kinds = self.kind[node]
        for kind in np.unique(kinds[kinds >= 0]):
            is_alike = kinds == kind
            alike = np.where(is_alike, counts, 0.0)
            size = int(self.size[node[is_alike]].max())  # Nodes of one kind have equally many GPUs.
            workers = list(zip(gpus_of_worker.T.astype(int), alike.T, strict=True))
            nodes = np.asarray(fewest_nodes(size, workers, self.worker_sizes))
            yield is_alike, nodes * size - (alike * gpus_of_worker).sum(axis=1)


def _has_equals(kinds: Ints) -> npt.NDArray[np.bool_]:
    """Whether two options of each row (C, k) are of one kind (of option, not of node); fillers have none."""
    in_order = np.sort(kinds, axis=1)
    is_equal = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != NONE)
    return np.asarray(is_equal.any(axis=1))


@cache
def _spread_counts(largest: int) -> list[int]:
    """The counts 1 to `largest`, or MOST_COUNTS of them evenly spread; 0 alone if `largest` is 0."""
    if largest == 0:
        return [0]
    return sorted({round(n) for n in np.linspace(1, largest, min(largest, MOST_COUNTS))})
