"""Rows of catalogs/acceptance.yaml: the measured number of tokens that a step with drafts yields, by the
number of drafted tokens.
"""

from dataclasses import dataclass

from planner.errors import InputError
from planner.files.document_values import Section, check_one_of, refused_value
from planner.models.speculation import METHODS, MOST_DRAFTS

ROW_KEYS = ("method", "of", "lengths")


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """`lengths`: mean tokens that a step yields, the LLM's own included, with 1, 2, ... drafted tokens.
    `source` begins with the LLM and its prompts.
    """

    method: str
    lengths: tuple[float, ...]
    source: str


def parse_row(row: Section) -> AcceptanceRow:
    """Read a row of catalogs/acceptance.yaml. Raises InputError for lengths that no drafting can have."""
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
    return AcceptanceRow(method, lengths, f"{row.plain_text('of')}, {row.plain_text('source')}")
