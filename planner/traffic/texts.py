"""Cuts prompts into blocks with shared prefixes, for traces in which a prompt is a list of texts (RAGPulse).

The trace has the number of each text; the lengths of the texts are in other files beside the trace.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import TraceError
from planner.files.checked_files import open_text
from planner.files.document_values import show_value
from planner.files.jsontext import TwiceError, parse_json
from planner.traffic.trace import MAX_TOKENS, IntArray


def cut_texts(
    path: Path,
    column: str,
    inputs: IntArray,
    texts: npt.NDArray[Any],
    counts: IntArray,
    length: dict[int, int],
) -> tuple[IntArray, IntArray]:
    """Offsets (n + 1,) and ids (m,) of blocks of KV_BLOCK_TOKENS tokens, as `Trace` has them. Two prompts
    share a block if all texts up to its end are the same.

    `inputs` (n,) are the tokens of the prompts. Request i has the next `counts[i]` of the `texts`, which are
    numbers of texts; `length` has the tokens of each text. Tokens of a prompt beyond its texts count as part
    of the last text. Raises TraceError, which names `path` and `column`, for a text without a length.
    """
    # A chain is a sequence of texts with which a prompt begins. Its key is the number of the chain that is
    # shorter by one text (-1 for the empty chain), and its last text.
    chains: dict[tuple[int, int], int] = {}
    ids, start = [], 0
    for number, (tokens, count) in enumerate(zip(inputs.tolist(), counts.tolist(), strict=True)):
        # The chain up to each text of this prompt, and where each text ends [tokens].
        chain, ends, chain_of_text = -1, [0], []
        for text in texts[start : start + count].tolist():
            if text not in length:
                raise TraceError(
                    f"{path}, request {number + 1}, column {column}: expected texts whose tokens stand in a "
                    f"file beside it, found text {text}"
                )
            chain = chains.setdefault((chain, text), len(chains))
            chain_of_text.append(chain)
            ends.append(ends[-1] + length[text])
        start += count
        # A prompt without texts has no ids. The last block may be filled in part, so it counts as one.
        blocks = np.arange(-(-tokens // KV_BLOCK_TOKENS) if chain_of_text else 0)
        last_token = np.minimum((blocks + 1) * KV_BLOCK_TOKENS, tokens) - 1
        text_of_block = np.searchsorted(ends[1:], last_token, side="right")
        text_of_block = np.minimum(text_of_block, len(chain_of_text) - 1)
        # No prompt has MAX_TOKENS blocks, so each pair of a chain and a block's index has its own id.
        ids.append(np.array(chain_of_text, np.int64)[text_of_block] * MAX_TOKENS + blocks)
    offsets = np.concatenate(([0], np.cumsum([len(prompt_ids) for prompt_ids in ids])))
    return offsets, np.concatenate(ids)


def text_lengths(trace: Path) -> dict[int, int]:
    """The tokens of every text by its number, from the other .jsonl files in the trace's folder.

    Each line of such a file is an object of two whole numbers: the text's number, and its tokens. A file
    whose first line is of another kind is left out. Raises TraceError for any other line of another kind.
    """
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
                    break  # A file of another kind, such as another trace.
                else:
                    raise TraceError(f"{path}, line {number}: expected a text's number and its tokens")
    return length


def json_object(path: Path, line: int, text: bytes) -> dict[str, Any]:
    """The JSON object in `text`, which is line number `line` of the file. Raises TraceError for anything
    else. The object may have NaN, and whole numbers of any length, which its reader checks (jsontext.py).
    """
    try:
        values = parse_json(text, has_nan=True, counts_digits=False)
    except TwiceError as twice:
        raise TraceError(
            f"{path}, line {line}: column {show_value(twice.key)} is given twice; keep one"
        ) from None
    except ValueError as error:
        raise TraceError(
            f"{path}, line {line}: is not JSON ({error}); expected one object per line"
        ) from None
    if not isinstance(values, dict):
        raise TraceError(f"{path}, line {line}: expected a JSON object, found {show_value(values)}")
    return values
