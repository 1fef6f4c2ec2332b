"""Rows of catalogs/acceptance.yaml: how many tokens a step with drafts yields, as measured, by the number of
drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import InputError
from planner.files.document_values import Section, check_one_of, refused_value
from planner.models.speculation import METHODS, MOST_DRAFTS

ROW_KEYS = ("method", "of", "lengths")


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """`lengths` are the mean tokens of a step with 1, 2, ... drafts, the LLM's own token included. `of` names
    the LLM and the prompts that were measured.
    """

    method: str
    of: str
    lengths: tuple[float, ...]
    source: str


def parse_row(row: Section) -> AcceptanceRow:
    lengths = row.numbers("lengths")
    where = row.path_of("lengths")
    if not 1 <= len(lengths) <= MOST_DRAFTS:
        raise refused_value(where, f"expected 1 to {MOST_DRAFTS} numbers", list(lengths))
    for drafts, length in enumerate(lengths, 1):
        if not 1 <= length <= 1 + drafts:
            raise InputError(
                f"{where}: with {drafts} drafts a step yields 1 to {1 + drafts}, found {length:g}"
            )
    method = check_one_of(row.get_required("method"), METHODS, row.path_of("method"))
    return AcceptanceRow(
        method, row.plain_text("of"), lengths, f"{row.plain_text('of')}, {row.plain_text('source')}"
    )
