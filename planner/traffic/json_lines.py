"""Writing a trace: JSONL that `read_trace` gives back with its prefixes, tenants and waits."""

from __future__ import annotations

import json
from typing import Any

from planner.traffic.trace import Trace


def to_jsonl(trace: Trace, *, with_llm: bool = False) -> str:
    """One JSON object per request, in order of arrival. Columns that the trace does not have are left out.
    With `with_llm` each says which LLM it asked for.
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
