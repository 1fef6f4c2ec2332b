"""What `make test` takes of the cases of a test that has many alike; `make test-weekly` takes the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], quick: int) -> list[Any]:
    """The first so many of these cases for both, the rest marked slow. A tuple is a value for each name."""
    return _marked((case, i < quick) for i, case in enumerate(cases))


def every(n: int, cases: Iterable[Any]) -> list[Any]:
    """One in `n` of these cases for both, the rest marked slow: where neighbours are of one kind."""
    return _marked((case, i % n == 0) for i, case in enumerate(cases))


def _marked(cases: Iterable[tuple[Any, bool]]) -> list[Any]:
    marked = []
    for case, is_quick in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=() if is_quick else pytest.mark.slow))
    return marked
