"""Rows of catalogs/acceptance.yaml: accepted lengths by how many tokens are drafted, as measured."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import InputError
from planner.io.values import Section, one_of, refused
from planner.models.speculation import METHODS, MOST_DRAFTS

ROW_KEYS = ("method", "of", "lengths")


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """Mean tokens that a step yields, the LLM's own included, with 1, 2, ... drafts; `of` an LLM and how it
    was asked.
    """

    method: str
    of: str
    lengths: tuple[float, ...]
    source: str


def parse_row(row: Section) -> AcceptanceRow:
    lengths = row.numbers("lengths")
    where = row.at("lengths")
    if not 1 <= len(lengths) <= MOST_DRAFTS:
        raise refused(where, f"expected 1 to {MOST_DRAFTS} numbers", list(lengths))
    for drafts, length in enumerate(lengths, 1):
        if not 1 <= length <= 1 + drafts:
            raise InputError(
                f"{where}: with {drafts} drafts a step yields 1 to {1 + drafts}, found {length:g}"
            )
    method = one_of(row.required("method"), METHODS, row.at("method"))
    return AcceptanceRow(method, row.written("of"), lengths, f"{row.written('of')}, {row.written('source')}")
