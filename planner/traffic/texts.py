"""Prompts made of texts of any length (RAGPulse), cut into blocks; the texts' lengths are in other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.errors import TraceError
from planner.files.checked_files import open_text
from planner.files.document_values import show_value
from planner.files.jsontext import TwiceError, parse_json
from planner.traffic.trace import MAX_TOKENS, IntArray

BLOCK_TOKENS = 16


def cut_texts(
    path: Path,
    column: str,
    inputs: IntArray,
    texts: npt.NDArray[Any],
    counts: IntArray,
    length: dict[int, int],
) -> tuple[IntArray, IntArray]:
    """Offsets (n + 1,) and ids (m,) of blocks of BLOCK_TOKENS: shared where all texts up to their end agree.

    Request i has `counts[i]` of the `texts`, whose tokens are in `length`; what its prompt has beyond them
    counts to the last. Raises TraceError for a text without a length.
    """
    chains: dict[tuple[int, int], int] = {}  # (chain before, text) -> chain
    ids, start = [], 0
    for number, (tokens, count) in enumerate(zip(inputs.tolist(), counts.tolist(), strict=True)):
        chain, ends, chosen = -1, [0], []
        for text in texts[start : start + count].tolist():
            if text not in length:
                raise TraceError(
                    f"{path}, request {number + 1}, column {column}: expected texts whose tokens stand in a "
                    f"file beside it, found text {text}"
                )
            chain = chains.setdefault((chain, text), len(chains))
            chosen.append(chain)
            ends.append(ends[-1] + length[text])
        start += count
        blocks = np.arange(-(-tokens // BLOCK_TOKENS) if chosen else 0)
        last_token = np.minimum((blocks + 1) * BLOCK_TOKENS, tokens) - 1
        holder = np.minimum(np.searchsorted(ends[1:], last_token, side="right"), len(chosen) - 1)
        ids.append(np.array(chosen, np.int64)[holder] * MAX_TOKENS + blocks)
    return np.concatenate(([0], np.cumsum([len(one) for one in ids]))), np.concatenate(ids)


def text_lengths(trace: Path) -> dict[int, int]:
    """Tokens of every text, from the other .jsonl files in the trace's folder: lines of two numbers."""
    length: dict[int, int] = {}
    for path in sorted({*trace.parent.glob("*.jsonl"), *trace.parent.glob("*.jsonl.gz")} - {trace}):
        with open_text(path) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                values = list(json_object(path, number, line).values())
                if len(values) == 2 and set(map(type, values)) == {int}:
                    length[values[0]] = values[1]
                elif number == 1:
                    break  # another kind of file
                else:
                    raise TraceError(f"{path}, line {number}: expected a text's number and its tokens")
    return length


def json_object(path: Path, line: int, text: bytes) -> dict[str, Any]:
    try:
        request = parse_json(text, has_nan=True, counts_digits=False)
    except TwiceError as twice:
        raise TraceError(
            f"{path}, line {line}: column {show_value(twice.key)} is given twice; keep one"
        ) from None
    except ValueError as error:
        raise TraceError(
            f"{path}, line {line}: is not JSON ({error}); expected one object per line"
        ) from None
    if not isinstance(request, dict):
        raise TraceError(f"{path}, line {line}: expected a JSON object, found {show_value(request)}")
    return request
