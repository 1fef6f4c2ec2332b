"""benchmarks/soak.py with a few hundred requests: faults, slow clients, and nothing lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.soak import a_fleet, soak


@pytest.mark.slow
def test_a_small_soak_loses_nothing(tmp_path: Path) -> None:
    """Every request has one of the ends that it may have, as many as were sent; the router counts as many."""
    ended = asyncio.run(soak(150, a_fleet(2, "e2"), 8, 0.5, 1, tmp_path))
    assert sum(ended.outcomes.values()) == 150 and not ended.outcomes["lost"], ended.examples
    assert ended.in_flight == 0 and ended.kills + ended.freezes >= 1 and ended.silent >= 50
    allowed = {"whole", "broken", "left", "refused 422", "refused 502", "refused 503"}
    assert set(ended.outcomes) <= allowed | {"lost"} and ended.outcomes["whole"] >= 100
    counted = ("answered", "client_gone", "broken", "refused_422", "refused_502", "refused_503")
    assert sum(ended.router[name] for name in counted) == 150
