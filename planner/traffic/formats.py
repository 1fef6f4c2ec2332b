"""The public formats of trace files, each recognised by the names of its columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NESTED = "hash_ids"  # In RAGPulse it holds an object, whose keys count as columns (hash_ids.user_input).


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A public trace format, recognised by its columns without regard to case.

    `clock` is the column of arrival times: dates, or numbers of which `ticks_per_s` make a second.
    `starts_at_zero`: time 0 is the first arrival; otherwise the clock's own zero is kept.
    `is_coarse`: the clock may give many requests one stamp, so arrivals may be spread between two stamps.
    `block_tokens` are the tokens of a prefix block; 0 if an id stands for a text of any length, which files
    beside the trace state (texts.py). `also` are other columns by which this format is recognised.
    """

    name: str
    clock: str
    input: str
    output: str
    ticks_per_s: float = 1.0
    starts_at_zero: bool = True
    is_coarse: bool = False
    block_tokens: int = 512
    also: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns by which the format is recognised, the clock first."""
        return (self.clock, self.input, self.output, *self.also)


FORMATS = (
    TraceFormat("requests", "arrival_s", "input_tokens", "output_tokens", starts_at_zero=False),
    TraceFormat("generic", "timestamp", "input_tokens", "output_tokens"),
    TraceFormat("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    TraceFormat("BurstGPT", "Timestamp", "Request tokens", "Response tokens", is_coarse=True),
    TraceFormat(
        "Qwen-Bailian", "timestamp", "input_length", "output_length", block_tokens=16, also=("chat_id",)
    ),
    TraceFormat(
        "RAGPulse",
        "timestamp",
        "input_length",
        "output_length",
        block_tokens=0,
        also=("hash_ids.user_input",),
    ),
    # The first format that fits is taken, so Mooncake comes after two formats that have its columns and more.
    TraceFormat("Mooncake", "timestamp", "input_length", "output_length", ticks_per_s=1000.0, is_coarse=True),
    TraceFormat("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens"),
)
PUBLISHED = tuple(each.name for each in FORMATS[2:])  # The first two formats are our own.


def is_known_format(names: Iterable[str]) -> bool:
    """Whether these names include all columns of one of FORMATS."""
    lower = {name.strip().lower() for name in names}
    return any(all(column.lower() in lower for column in each.columns) for each in FORMATS)


def accepted_columns() -> str:
    """The headers of all formats with their names, on one line, for an error."""
    return "; ".join(f"{','.join(each.columns)} ({each.name})" for each in FORMATS)
