"""Experts on several nodes out of AIConfigurator's tables."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.importers.silicon_nodes import NODES, on_nodes_ms, why_not_on_nodes
from planner.models.all2all import HIGH_THROUGHPUT, LOW_LATENCY, Exchange

needs_tables = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed (extra silicon)"
)
CATALOG = read_catalog()
DEEPSEEK, H100 = CATALOG.llm("deepseek-v3"), CATALOG.gpu("h100-80g")


def test_other_shapes_gpus_and_nodes_are_not_in_the_tables() -> None:
    assert not why_not_on_nodes(DEEPSEEK, H100, 2)
    for llm, gpu, nodes in (
        (DEEPSEEK, H100, 3),
        (DEEPSEEK, CATALOG.gpu("b200-180g"), 2),
        (CATALOG.llm("qwen3-30b-a3b"), H100, 2),
        (replace(DEEPSEEK, experts_per_token=4), H100, 2),
    ):
        assert why_not_on_nodes(llm, gpu, nodes)
        with pytest.raises(InputError, match="of H100 and H200, and only for experts of DeepSeek-V3's shape"):
            on_nodes_ms(llm, gpu, 8 * nodes, LOW_LATENCY)


@needs_tables
def test_the_sum_is_the_tables_by_hand() -> None:
    """16 H100, 1,024 tokens, 64 of each GPU: low latency there and back 0.16024 ms, experts 0.278000 ms
    (uniform; 0.286163 by the power law, which counts beyond 512 tokens), 58 layers.
    """
    of_all_ms = on_nodes_ms(DEEPSEEK, H100, 16, LOW_LATENCY)
    assert of_all_ms(1024) == pytest.approx(58 * (0.16024 + 0.286163), rel=1e-4)
    high_ms = on_nodes_ms(DEEPSEEK, H100, 16, HIGH_THROUGHPUT)
    assert high_ms(16384) == pytest.approx(58 * (0.96246 + 1.656379), rel=1e-4)


@needs_tables
@pytest.mark.parametrize("nodes", NODES)
def test_more_tokens_take_no_less(nodes: int) -> None:
    tokens = np.unique(np.geomspace(1, 65536, 60).astype(int)).tolist()
    for kind in (LOW_LATENCY, HIGH_THROUGHPUT):
        of_all_ms = on_nodes_ms(DEEPSEEK, H100, 8 * nodes, kind)
        found = np.array([of_all_ms(n) for n in tokens])
        assert (np.diff(found) >= -0.02 * found[1:]).all()


@needs_tables
@pytest.mark.parametrize("kind", [LOW_LATENCY, HIGH_THROUGHPUT])
def test_the_shipped_fit_has_these_times(kind: str) -> None:
    """At the knots of its experts' part, to the digits of the file."""
    of = LOW_LATENCY if kind == LOW_LATENCY else HIGH_THROUGHPUT
    shipped = CATALOG.step_latency(DEEPSEEK, H100, 1, dp=32, exchange=Exchange(of))
    of_all_ms = on_nodes_ms(DEEPSEEK, H100, 32, of)
    for tokens in (1, 64, 1024, 4096):
        assert float(shipped.joint_experts_s(tokens)) == pytest.approx(of_all_ms(tokens) / 1e3, rel=1e-3)
