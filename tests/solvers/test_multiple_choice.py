"""One fleet of each LLM at the least weight, nodes included, against every combination."""

import itertools
import math

import numpy as np
import pytest

from planner.solvers.multiple_choice import GroupChoice, NodesOfKind, NodeStock, choose_within_limits


@pytest.mark.parametrize("seed", range(20))
def test_shared_nodes_are_weighed_whole(seed: int) -> None:
    """Three LLMs with four fleets each, on GPUs of two kinds in nodes of 4, which weigh their GPUs. The
    second kind has a stock.
    """
    rng = np.random.default_rng(seed)
    groups = [
        [GroupChoice(float(rng.uniform(0, 2)), (0.0, *map(float, rng.integers(0, 6, 2)))) for _ in range(4)]
        for _ in range(3)
    ]
    prices, amounts = rng.uniform(0.5, 2, 2), (math.inf, float(rng.integers(3, 13)))
    stocks = [
        NodeStock(amount, 0, (NodesOfKind(4, ((k + 1, 4),), 4 * float(prices[k])),))
        for k, amount in enumerate(amounts)
    ]

    def weigh(indices: tuple[int, ...]) -> float:
        chosen = [group[i] for group, i in zip(groups, indices, strict=True)]
        gpus = [4 * math.ceil(sum(choice.uses[k + 1] for choice in chosen) / 4) for k in range(2)]
        if gpus[1] > amounts[1]:
            return math.inf
        return sum(choice.weight for choice in chosen) + float(prices @ gpus)

    least = min(map(weigh, itertools.product(range(4), repeat=3)))
    indices, bound = choose_within_limits(groups, [math.inf] * 3, stocks)
    assert (indices is None) == math.isinf(least)
    if indices is not None:
        assert weigh(tuple(indices)) == pytest.approx(least) == pytest.approx(bound)
