"""Writing a trace: CSV that `read_trace` gives back, for traces of any length."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from planner.errors import InputError
from planner.traffic.trace import Trace

_ROWS = 200_000  # Rows that are written at a time, so that a long trace does not double in memory.


def to_csv(trace: Trace) -> Iterator[str]:
    """The file, some rows at a time. Raises InputError for prefixes and waits, which CSV cannot hold."""
    if trace.has_prefixes or trace.after.size:
        raise InputError(
            "a trace with prefixes or waits is written as JSON lines: name the file with -o NAME.jsonl"
        )
    for start in range(0, len(trace), _ROWS):
        part = slice(start, start + _ROWS)
        images = trace.image_tokens
        columns = {
            # repr keeps every digit.
            "arrival_s": [repr(time_s) for time_s in trace.arrival_s[part].tolist()],
            # In a file input_tokens are without those of images.
            "input_tokens": trace.input_tokens[part] - (0 if images is None else images[part]),
            "output_tokens": trace.output_tokens[part],
        }
        if images is not None:
            columns["image_tokens"] = images[part]
        if trace.tenants:
            columns["tenant"] = np.array(trace.tenants, dtype=object)[trace.tenant[part]]
        if trace.llms:
            columns["model"] = np.array(trace.llms, dtype=object)[trace.llm[part]]
        if trace.adapters:
            # Its index -1, no adapter, finds "".
            columns["adapter"] = np.array((*trace.adapters, ""), dtype=object)[trace.adapter[part]]
        yield pd.DataFrame(columns).to_csv(index=False, header=start == 0, lineterminator="\n")
