"""The page of a validation."""

from __future__ import annotations

from planner.runtime import validation_files


def test_a_pool_without_a_correction_stands_beside_one_that_has_it() -> None:
    page = validation_files._table_html(
        [{"pool": "pre"}, {"pool": "dec", "correction": "x1.1"}], "Errors step by step"
    )
    assert ">-</td>" in page and ">x1.1</td>" in page
