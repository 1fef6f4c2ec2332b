"""What `make test` takes of the cases of a test that has many alike; `make test-slow` takes the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], quick: int) -> list[Any]:
    """The first so many of these cases for both, the rest marked slow. A tuple is a value for each name."""
    each = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if i < quick else pytest.mark.slow) for i, case in enumerate(each)]
