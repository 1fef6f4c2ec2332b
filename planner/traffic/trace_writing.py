"""Writing a trace as a file that `read_trace` gives back: JSONL with prefixes, tenants and waits, or CSV for
traces of any length.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from planner.errors import InputError
from planner.traffic.trace import Trace

_ROWS = 200_000  # Rows of CSV that are written at a time, so that a long trace does not double in memory.


def to_jsonl(trace: Trace, *, with_llm: bool = False) -> str:
    """One JSON object per request, in order of arrival. Columns that the trace lacks are left out.

    `with_llm` writes the column `model`. A plan leaves it out of its traffic, which is for one LLM, unless
    classes of the SLO select LLMs.
    """
    parents: list[list[int]] = [[] for _ in range(len(trace))]
    for child, parent in trace.after.tolist():
        parents[child].append(parent)
    lines, images = [], trace.image_tokens
    for i in range(len(trace)):
        row: dict[str, Any] = {
            "arrival_s": float(trace.arrival_s[i]),
            "input_tokens": int(trace.input_tokens[i]) - (0 if images is None else int(images[i])),
            "output_tokens": int(trace.output_tokens[i]),
        }
        if images is not None:
            row["image_tokens"] = int(images[i])
        if trace.adapters:
            row["adapter"] = trace.adapters[trace.adapter[i]] if trace.adapter[i] >= 0 else ""
        if trace.tenants:
            row["tenant"] = trace.tenants[trace.tenant[i]]
        if with_llm and trace.llms:
            row["model"] = trace.llms[trace.llm[i]]
        if trace.has_prefixes:
            ids = trace.prefix_ids[trace.prefix_offsets[i] : trace.prefix_offsets[i + 1]]
            row |= {"prefix_block_tokens": trace.prefix_block_tokens, "prefix_ids": ids.tolist()}
        if trace.after.size:
            row |= {"request_id": i, "after": parents[i], "think_s": float(trace.think_s[i])}
        if trace.task.size:
            row["agent_task"] = int(trace.task[i])
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


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
            # Requests without an adapter have the index -1, which finds "", the last name.
            columns["adapter"] = np.array((*trace.adapters, ""), dtype=object)[trace.adapter[part]]
        if trace.task.size:
            columns["agent_task"] = trace.task[part]
        yield pd.DataFrame(columns).to_csv(index=False, header=start == 0, lineterminator="\n")
