"""What other tests have one at a time, together: orders by deadline, adapters, memory behind caches."""

from __future__ import annotations

import pytest
from combined_cases import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_the_plain_simulators(kind: str) -> None:
    """30 random fleets of each kind; benchmarks/references.py compares more."""
    for seed in range(30):
        KINDS[kind](seed)
