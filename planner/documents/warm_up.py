"""warm-up.json with prompts: what each worker computes before it takes traffic, and then keeps.

    [{"worker": "mixed-0", "prompt": [101, 7, ...]}, {"worker": "mixed-1", "prompt": "You are ..."}]

A plan's warm-up.json names blocks of the trace. A trace has no words, so users who know what the blocks
stand for add a `prompt` (token ids, or text) to each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError
from planner.files.checked_files import open_input
from planner.files.jsontext import parse_json
from planner.fleet import Fleet


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """A prompt that `worker` computes first: the worker's number, counted over all running pools."""

    worker: int
    prompt: tuple[int, ...] | str


def read_warm_up(path: Path, fleet: Fleet) -> tuple[WarmPrompt, ...]:
    """Raises InputError for a row without a prompt, or of a worker that the fleet does not have."""
    names = fleet.worker_names
    with open_input(path) as stream:
        try:
            rows = parse_json(stream.read())
        except ValueError as error:
            raise InputError(f"{path}: is no JSON ({error}); give a warm-up.json with prompts") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: expected a list of {{worker, prompt}}; give a warm-up.json with prompts")
    prompts = []
    for number, row in enumerate(rows):
        if row.get("worker") not in names:
            first_names = ", ".join(names[:5])
            raise InputError(
                f"{path}: row {number}: worker is {row.get('worker')!r}, the plan has {first_names}"
            )
        prompt = row.get("prompt")
        # A bool is an int for isinstance, but no token id.
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (is_ids or isinstance(prompt, str)):
            raise InputError(
                f"{path}: row {number}: has no prompt; add the text or the token ids of its blocks, as "
                "requests will send them"
            )
        prompts.append(WarmPrompt(names.index(row["worker"]), tuple(prompt) if is_ids else prompt))
    return tuple(prompts)
