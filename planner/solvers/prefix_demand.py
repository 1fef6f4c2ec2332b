"""The inputs of prefix placement: a prefix tree with its traffic, and the work that sessions save.

The letters in comments beside fields are those of the program in prefix_replication.py.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SAME_FRAC = 1e-6  # Values that differ by no more than this share are equal but for rounding errors.


@dataclass(frozen=True, slots=True, eq=False)
class PrefixDemand:
    """A prefix tree with its traffic, as arrays (V,). Parents come before their children; the parent of a
    root is -1.

    A request ends at the last node of its stable prefix (planner/search/prefixes/prefix_placing.py); at some
    nodes none ends, and `rate_rps` is 0. Requests without a stable prefix end at a root of 0 tokens and 0 s.
    """

    parent: Ints
    tokens: Ints  # l: KV tokens of the node alone.
    prefill_s: Floats  # w: seconds to prefill the node alone, at its place in the prompt.
    rate_rps: Floats  # a: requests per second that end at the node.
    work_s: Floats  # W: seconds of prefill and decode of one such request if nothing is cached.

    def __post_init__(self) -> None:
        nodes = len(self.parent)
        if not nodes or not all(
            len(column) == nodes for column in (self.tokens, self.prefill_s, self.rate_rps, self.work_s)
        ):
            raise InputError(f"prefix tree: {nodes} nodes, but other columns have another length")
        if (self.parent >= np.arange(nodes)).any() or (self.parent < -1).any():
            raise InputError("prefix tree: every parent must stand before its children, roots have -1")
        if min(self.tokens.min(), self.prefill_s.min(), self.rate_rps.min()) < 0:
            raise InputError("prefix tree: tokens, prefill_s and rate_rps must be >= 0")
        is_used = self.rate_rps > 0
        if (self.work_s < self.path_sum(self.prefill_s) * (1 - SAME_FRAC))[is_used].any():
            raise InputError("prefix tree: a request's work_s must hold the prefill of its own prefix")

    def __len__(self) -> int:
        return len(self.parent)

    def path_sum(self, values: Floats | Ints) -> Floats:
        """For every node the sum of `values` (V,) over the nodes from its root down to it."""
        total = np.array(values, dtype=float)
        for v in range(len(self)):
            if self.parent[v] >= 0:
                total[v] += total[self.parent[v]]
        return total

    def subtree_sum(self, values: Floats | Ints) -> Floats:
        """For every node the sum of `values`, (V,) or (V, R), over the node and all below it."""
        total = np.array(values, dtype=float)
        for v in range(len(self) - 1, -1, -1):
            if self.parent[v] >= 0:
                total[self.parent[v]] += total[v]
        return total

    def path(self, v: int) -> list[int]:
        """The nodes from the root down to v."""
        nodes = []
        while v >= 0:
            nodes.append(v)
            v = int(self.parent[v])
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class SessionReuse:
    """The curve G: seconds of work per second that sessions save, by tokens of cache over all workers.

    `cache_tokens` and `saved_s_per_s` are the corners of a concave, piecewise linear curve from (0, 0).
    Beyond its last corner the curve is flat.
    """

    cache_tokens: tuple[float, ...] = (0.0,)
    saved_s_per_s: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        tokens, saved = np.array(self.cache_tokens), np.array(self.saved_s_per_s)
        if len(tokens) != len(saved) or not len(tokens) or tokens[0] or saved[0]:
            raise InputError("session reuse: expected corners (tokens, seconds saved) from (0, 0)")
        tokens_rise = bool((np.diff(tokens) > 0).all())
        # Only tokens that rise give slopes; others are refused below.
        slopes = np.diff(saved) / np.diff(tokens) if tokens_rise else np.zeros(0)
        # Slopes must not rise. The appended 0 is the slope beyond the last corner, so no slope is negative.
        if not tokens_rise or (np.diff(slopes, append=0.0) > SAME_FRAC * max(slopes, default=0)).any():
            raise InputError("session reuse: cache_tokens must rise, and the savings must be concave")

    @property
    def corners(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The two coordinates of all corners: tokens of cache, and seconds saved per second."""
        return self.cache_tokens, self.saved_s_per_s

    def pieces(self) -> list[tuple[float, float]]:
        """(slope, value at 0 tokens) of the line through every piece; the last piece is flat."""
        slopes = [*(np.diff(self.saved_s_per_s) / np.diff(self.cache_tokens)).tolist(), 0.0]
        return [
            (slope, saved - slope * tokens)
            for slope, tokens, saved in zip(slopes, *self.corners, strict=True)
        ]

    def at(self, tokens: Floats | Ints) -> Floats:
        """Seconds of work per second that sessions save with these tokens of cache."""
        return np.asarray(np.interp(tokens, *self.corners))
