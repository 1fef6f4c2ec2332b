"""Which workers may be lost with nodes. A search does not know which workers share a node. So a loss is any
set of workers that fits on the nodes, and that is part of no larger set that fits.
"""

import itertools
import operator
from collections.abc import Sequence

from planner.search.oracle.fleet_counts import Counts


def node_losses(counts: Counts, nodes: int) -> list[tuple[int, ...]]:
    """How many workers of each pool the loss of this many nodes may take, one tuple for each loss."""
    bases = list(dict.fromkeys(option.type.gpu.base for option, _ in counts))
    largest_losses: list[tuple[int, ...]] = []
    for nodes_by_base in splits(nodes, [nodes] * len(bases)):
        by_base = [
            _losses_of_base(counts, base, base_nodes)
            for base, base_nodes in zip(bases, nodes_by_base, strict=True)
            if base_nodes
        ]
        largest_losses += [
            tuple(map(sum, zip(*losses, strict=True))) for losses in itertools.product(*by_base)
        ]
    return largest_losses


def splits(total: int, most: Sequence[int]) -> list[tuple[int, ...]]:
    """All ways to split `total` into parts of at most `most[0]`, `most[1]` and so on. Splits with a large
    first part come first.
    """
    ranges = (range(min(most_of_part, total), -1, -1) for most_of_part in most)
    return [parts for parts in itertools.product(*ranges) if sum(parts) == total]


def _losses_of_base(counts: Counts, base: str, nodes: int) -> list[tuple[int, ...]]:
    """The largest sets of workers of each pool that fit on this many nodes of this GPU."""
    is_of_base = [option.type.gpu.base == base for option, _ in counts]
    node_gpus = max(option.type.gpu.gpus_per_node for option, _ in itertools.compress(counts, is_of_base))
    lost_gpus = nodes * node_gpus
    # A worker that spans several nodes is lost with any of them, so it counts as one that fills a node.
    gpus = [min(option.type.gpus, node_gpus) for option, _ in counts]
    ranges = [
        range(min(count, lost_gpus // worker_gpus) + 1 if of_base else 1)
        for (_, count), worker_gpus, of_base in zip(counts, gpus, is_of_base, strict=True)
    ]
    losses = [lost for lost in itertools.product(*ranges) if sum(map(operator.mul, gpus, lost)) <= lost_gpus]
    return [lost for lost in losses if not any(_is_part_of(lost, other) for other in losses)]


def _is_part_of(lost: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether `other` is a larger loss that takes all workers of `lost` too."""
    return lost != other and all(map(operator.le, lost, other))
