"""kubernetes-validate, which reads 1 MB of JSON for every object: here each file once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest


@cache
def kubernetes_schemas() -> Any:
    """The module, or the test that asks for it is skipped."""
    utils = pytest.importorskip("kubernetes_validate.utils")
    utils.schema_contents = cache(utils.schema_contents)
    return pytest.importorskip("kubernetes_validate")
