"""What is asked of prefix caches: a prefix tree with its traffic, and what sessions save besides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SAME_FRAC = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class PrefixDemand:
    """A prefix tree with its traffic; arrays (V,), parents before their children, -1 the parent of a root.

    Every node is also the class of requests that end there (`rate_rps` may be 0). Requests without any stable
    prefix end at a root of 0 tokens and 0 s.
    """

    parent: Ints
    tokens: Ints  # l
    prefill_s: Floats  # w
    rate_rps: Floats  # a
    work_s: Floats  # W

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

    def path_sum(self, each: Floats | Ints) -> Floats:
        """Sum over the nodes from the root down to each node."""
        total = np.array(each, dtype=float)
        for v in range(len(self)):
            if self.parent[v] >= 0:
                total[v] += total[self.parent[v]]
        return total

    def subtree_sum(self, each: Floats | Ints) -> Floats:
        """Sum over the subtree of each node; (V,) or (V, R)."""
        total = np.array(each, dtype=float)
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
    """G: seconds of work per second that sessions save with so many tokens of cache over all replicas.

    Corners of a concave, piecewise linear curve from (0, 0); beyond the last it is flat.
    """

    cache_tokens: tuple[float, ...] = (0.0,)
    saved_s: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        tokens, saved = np.array(self.cache_tokens), np.array(self.saved_s)
        if len(tokens) != len(saved) or not len(tokens) or tokens[0] or saved[0]:
            raise InputError("session reuse: expected corners (tokens, seconds saved) from (0, 0)")
        slopes = np.diff(saved) / np.diff(tokens)
        if (
            not (np.diff(tokens) > 0).all()
            or (np.diff(slopes, append=0.0) > SAME_FRAC * max(slopes, default=0)).any()
        ):
            raise InputError("session reuse: cache_tokens must rise, and the savings must be concave")

    @property
    def corners(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.cache_tokens, self.saved_s

    def pieces(self) -> list[tuple[float, float]]:
        """(slope, seconds saved at 0 tokens) of every piece, the last one flat."""
        slopes = [*(np.diff(self.saved_s) / np.diff(self.cache_tokens)).tolist(), 0.0]
        return [(k, y - k * x) for k, x, y in zip(slopes, self.cache_tokens, self.saved_s, strict=True)]

    def at(self, tokens: Floats | Ints) -> Floats:
        return np.asarray(np.interp(tokens, self.cache_tokens, self.saved_s))
