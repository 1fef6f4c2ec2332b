"""A run against an endpoint as the comparison takes it: the requests that were sent, as long as they were.

A prompt of text may come out longer or shorter than the trace has it, and an answer ends where the LLM ends
it. The simulation is asked for what the endpoint counted, so that lengths are no error of the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.runtime.live_replay import Journal
from planner.traffic.trace import Trace

MOST_CLUMPED_FRAC = 0.1  # If more of the gaps between tokens are 0, tokens came in chunks.
AT_ONCE_S = 1e-4


@dataclass(frozen=True, slots=True)
class ServedLengths:
    """Tokens that were asked for and that came, over the requests that finished. `prompt_error_frac` are the
    median and the largest relative error of a prompt's length, None where the endpoint does not count."""

    requested_output_tokens: int
    output_tokens: int
    prompt_error_frac: tuple[float, float] | None
    clumped_frac: float

    def as_dict(self) -> dict[str, Any]:
        error = self.prompt_error_frac
        return {
            "asked_output_tokens": self.requested_output_tokens,
            "output_tokens": self.output_tokens,
            "prompt_error_frac": None if error is None else {"median": error[0], "largest": error[1]},
            "tokens_with_the_one_before_frac": self.clumped_frac,
        }


def as_served(trace: Trace, journal: Journal) -> tuple[Trace, Journal]:
    """The trace of the requests that were sent or given up, with the lengths that came, and the journal with
    their numbers in it. The same where there are none."""
    touched = {request for part in journal.parts for request in part.requests} | set(journal.sent)
    kept = sorted(touched)
    if not kept:
        return trace, journal
    number = {request: k for k, request in enumerate(kept)}
    inputs, outputs = trace.input_tokens[kept].copy(), trace.output_tokens[kept].copy()
    for request, sent in journal.sent.items():
        if sent.status == "finished":
            inputs[number[request]] = sent.input_tokens or inputs[number[request]]
            outputs[number[request]] = len(sent.token_s)
    chosen = trace.select(kept)
    if chosen.image_tokens is not None:
        chosen = replace(chosen, image_tokens=np.minimum(chosen.image_tokens, inputs))
    parts = tuple(
        replace(part, requests=tuple(number[request] for request in part.requests)) for part in journal.parts
    )
    moved = {number[request]: replace(one, request=number[request]) for request, one in journal.sent.items()}
    return replace(chosen, input_tokens=inputs, output_tokens=outputs), Journal(parts, moved)


def measure_lengths(trace: Trace, journal: Journal) -> ServedLengths:
    """`trace` is what was to be sent."""
    finished = [one for one in journal.sent.values() if one.status == "finished"]
    counted = [one for one in finished if one.input_tokens]
    error = None
    if counted:
        errors = np.abs([one.input_tokens / trace.input_tokens[one.request] - 1 for one in counted])
        error = float(np.median(errors)), float(errors.max())
    gaps = np.concatenate([np.diff(one.token_s) for one in finished]) if finished else np.zeros(0)
    return ServedLengths(
        int(sum(trace.output_tokens[one.request] for one in finished)),
        sum(len(one.token_s) for one in finished),
        error,
        float((gaps < AT_ONCE_S).mean()) if len(gaps) else 0.0,
    )


def client_clock_notes(
    answered: ServedLengths, records: Sequence[dict[str, Any]], *, planned_requests: int, sent: int
) -> tuple[str, ...]:
    """What a reader must know of a measurement by the client's clock."""
    sentences = [note for record in records for note in record.get("endpoint", {}).get("notes", ())]
    if sent < planned_requests:
        sentences.append(f"The budget ended the run: {sent} of {planned_requests} requests were sent.")
    if answered.output_tokens != answered.requested_output_tokens:
        sentences.append(
            f"Answers had {answered.output_tokens:,} tokens, and {answered.requested_output_tokens:,} "
            "were asked "
            "for; the prediction is for the answers that came."
        )
    if (error := answered.prompt_error_frac) is not None and error[1] > 0:
        sentences.append(
            f"Prompts were off the traffic's length by {100 * error[0]:.1f} % at the median and "
            f"{100 * error[1]:.1f} % at most; the prediction is for the prompts that were sent."
        )
    if answered.clumped_frac > MOST_CLUMPED_FRAC:
        sentences.append(
            f"{100 * answered.clumped_frac:.0f} % of tokens came together with the one before: gaps between "
            "tokens (tbt) are those of chunks."
        )
    if any(record.get("endpoint", {}).get("answers_without_exact_tokens") for record in records):
        sentences.append("The endpoint does not count each chunk's tokens: they are spread over the chunks.")
    sentences += [
        f"The engines' clock is missing: {clock['trouble']}"
        for record in records
        if (clock := record.get("engine_clock")) and "trouble" in clock
    ]
    trips = [trip for record in records if (trip := record.get("endpoint", {}).get("round_trip_s"))]
    if trips:
        sentences.append(
            f"A small answer took {1e3 * min(trips):.3g} ms from the endpoint to this client, which the "
            "measured times hold and the predicted ones do not."
        )
    return tuple(dict.fromkeys(sentences))
