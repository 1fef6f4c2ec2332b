"""warm-up.json with prompts: what each worker computes before it takes traffic, and then keeps.

    [{"worker": "mixed-0", "prompt": [101, 7, ...]}, {"worker": "mixed-1", "prompt": "You are ..."}]

A plan's warm-up.json names blocks of the trace; a trace has no words, so `prompt` (token ids, or text) is
added to its rows by whoever knows what the blocks stand for.
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
    """A prompt for one worker, counted over all running pools."""

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
            few = ", ".join(names[:5])
            raise InputError(f"{path}: row {number}: worker is {row.get('worker')!r}, the plan has {few}")
        prompt = row.get("prompt")
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (is_ids or isinstance(prompt, str)):
            raise InputError(
                f"{path}: row {number}: has no prompt; add the text or the token ids of its blocks, as "
                "requests will send them"
            )
        prompts.append(WarmPrompt(names.index(row["worker"]), tuple(prompt) if is_ids else prompt))
    return tuple(prompts)
