"""warm-up.json with prompts, which each worker computes before it takes traffic and then keeps in its cache.

    [{"worker": "mixed-0", "prompt": [101, 7, ...]}, {"worker": "mixed-1", "prompt": "You are ..."}]

A plan's warm-up.json names blocks of the trace. A trace has no texts, so users who know the texts of these
blocks add a `prompt` (token ids, or text) to each row. A prompt is sent again if no request has begun with it
for `keep_alive_s`, so that it stays in the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import InputError
from planner.files.checked_files import open_input
from planner.files.document_values import list_first
from planner.files.jsontext import parse_json
from planner.fleet import Fleet

LEAST_KEEP_S = 0.1  # A prompt that is sent more often would be most of a worker's work.
MOST_KEEP_S = 1e9  # 32 years: longer than any worker runs, but finite.
MOST_NAMED = 5  # The most workers that an error names.


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """A prompt that a worker computes first, and again `keep_alive_s` after its last use.

    `worker` is the worker's number, counted over all running pools.
    """

    worker: int
    prompt: tuple[int, ...] | str
    keep_alive_s: float | None = None


def read_warm_up(path: Path, fleet: Fleet) -> tuple[WarmPrompt, ...]:
    """The prompts of a file. Raises InputError for a row without a prompt, or with an unknown worker."""
    names = fleet.worker_names
    with open_input(path) as stream:
        try:
            rows = parse_json(stream.read())
        except ValueError as error:
            raise InputError(f"{path}: is no JSON ({error}); give a warm-up.json with prompts") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: expected a list of {{worker, prompt}}; give a warm-up.json with prompts")
    return tuple(_read_row(row, f"{path}: row {number}", names) for number, row in enumerate(rows))


def _read_row(row: Mapping[str, Any], where: str, names: Sequence[str]) -> WarmPrompt:
    """The prompt of a row of the file; rows are counted from 0. `names` are the workers of the plan."""
    if row.get("worker") not in names:
        raise InputError(
            f"{where}: worker is {row.get('worker')!r}, the plan has {list_first(names, MOST_NAMED)}"
        )
    prompt = row.get("prompt")
    # A bool is an int for isinstance, but no token id.
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (is_ids or isinstance(prompt, str)):
        raise InputError(
            f"{where}: has no prompt; add the text or the token ids of its blocks, as requests will send them"
        )
    keep_alive_s = row.get("keep_alive_s")
    if keep_alive_s is not None:
        is_number = type(keep_alive_s) in (int, float)
        if not is_number or not LEAST_KEEP_S <= keep_alive_s < MOST_KEEP_S:
            raise InputError(
                f"{where}: keep_alive_s is {keep_alive_s!r}, must be seconds, >= {LEAST_KEEP_S:g}"
            )
    return WarmPrompt(names.index(row["worker"]), tuple(prompt) if is_ids else prompt, keep_alive_s)
