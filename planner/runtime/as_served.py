"""The trace that an endpoint really served: the requests that were sent, with the lengths that it counted.

A prompt of text may have more or fewer tokens than in the trace, and an answer ends where the LLM ends it.
The counted lengths are simulated, so that a difference in length is no error of the prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.runtime.live_replay import Journal
from planner.traffic.trace import Trace

# If more than this share of gaps lies within chunks, the p90 of gaps is not the engine's, and a note says so.
MOST_CLUMPED_FRAC = 0.1
AT_ONCE_S = 1e-4  # Tokens nearer than this came in one chunk: no engine's step is so short.


@dataclass(frozen=True, slots=True)
class ServedLengths:
    """Tokens requested and received, over the requests that finished.

    `prompt_error_frac` has the median and largest relative error of a prompt's length; None if the endpoint
    does not count prompt tokens. `clumped_frac` is the share of gaps between two tokens of one chunk.
    """

    requested_output_tokens: int
    output_tokens: int
    prompt_error_frac: tuple[float, float] | None
    clumped_frac: float

    def as_dict(self) -> dict[str, Any]:
        """The lengths as plain values, under the keys of validation.json."""
        error = self.prompt_error_frac
        return {
            "asked_output_tokens": self.requested_output_tokens,
            "output_tokens": self.output_tokens,
            "prompt_error_frac": None if error is None else {"median": error[0], "largest": error[1]},
            "tokens_with_the_one_before_frac": self.clumped_frac,
        }


def as_served(trace: Trace, journal: Journal) -> tuple[Trace, Journal]:
    """The requests that were sent or given up: as a trace with the served lengths, and as a journal.

    The returned journal has the requests' numbers in the new trace. Both are returned unchanged if no request
    was sent. A request that did not finish keeps its length of `trace`, as no other was counted.
    """
    requests = sorted(
        {request for part in journal.parts for request in part.requests} | set(journal.outcomes)
    )
    if not requests:
        return trace, journal
    new_number = {request: k for k, request in enumerate(requests)}
    inputs, outputs = trace.input_tokens[requests].copy(), trace.output_tokens[requests].copy()
    for request, outcome in journal.outcomes.items():
        if outcome.status == "finished":
            # An endpoint that counts no prompt tokens sends 0; then the trace's length stays.
            inputs[new_number[request]] = outcome.input_tokens or inputs[new_number[request]]
            outputs[new_number[request]] = len(outcome.token_s)
    served_trace = trace.select(requests)
    # Image tokens are part of the prompt, which may be shorter now.
    if served_trace.image_tokens is not None:
        served_trace = replace(served_trace, image_tokens=np.minimum(served_trace.image_tokens, inputs))
    parts = tuple(
        replace(part, requests=tuple(new_number[request] for request in part.requests))
        for part in journal.parts
    )
    renumbered = {
        new_number[request]: replace(outcome, request=new_number[request])
        for request, outcome in journal.outcomes.items()
    }
    return replace(served_trace, input_tokens=inputs, output_tokens=outputs), Journal(parts, renumbered)


def measure_lengths(trace: Trace, journal: Journal) -> ServedLengths:
    """Compare the token counts of the answered requests with those of the planned `trace`."""
    finished = [outcome for outcome in journal.outcomes.values() if outcome.status == "finished"]
    counted = [outcome for outcome in finished if outcome.input_tokens]
    median_and_largest = None
    if counted:
        errors = np.abs(
            [outcome.input_tokens / trace.input_tokens[outcome.request] - 1 for outcome in counted]
        )
        median_and_largest = float(np.median(errors)), float(errors.max())
    gaps_s = np.concatenate([np.diff(outcome.token_s) for outcome in finished]) if finished else np.zeros(0)
    return ServedLengths(
        requested_output_tokens=int(sum(trace.output_tokens[outcome.request] for outcome in finished)),
        output_tokens=sum(len(outcome.token_s) for outcome in finished),
        prompt_error_frac=median_and_largest,
        clumped_frac=float((gaps_s < AT_ONCE_S).mean()) if len(gaps_s) else 0.0,
    )


def client_clock_notes(
    lengths: ServedLengths, records: Sequence[dict[str, Any]], *, planned_requests: int, sent: int
) -> tuple[str, ...]:
    """What a reader of a measurement by the client's clock must know, in sentences.

    `records` are what each part of the run wrote at its end (live_replay.JournalFile; the keys are those of
    remote_validation.py), `sent` the requests that were sent of `planned_requests`.
    """
    sentences = [note for record in records for note in record.get("endpoint", {}).get("notes", ())]
    if sent < planned_requests:
        sentences.append(f"The budget ended the run: {sent} of {planned_requests} requests were sent.")
    if lengths.output_tokens != lengths.requested_output_tokens:
        sentences.append(
            f"Answers had {lengths.output_tokens:,} tokens, and {lengths.requested_output_tokens:,} "
            "were requested; the prediction is for the answers that came."
        )
    if (error := lengths.prompt_error_frac) is not None and error[1] > 0:
        sentences.append(
            f"Prompts were off the traffic's length by {100 * error[0]:.1f} % at the median and "
            f"{100 * error[1]:.1f} % at most; the prediction is for the prompts that were sent."
        )
    if lengths.clumped_frac > MOST_CLUMPED_FRAC:
        sentences.append(
            f"{100 * lengths.clumped_frac:.0f} % of tokens came together with the one before: gaps between "
            "tokens (tbt) are those of chunks."
        )
    if any(record.get("endpoint", {}).get("answers_without_exact_tokens") for record in records):
        sentences.append("The endpoint does not count each chunk's tokens: they are spread over the chunks.")
    for record in records:
        clock = record.get("engine_clock") or {}
        if "trouble" in clock:
            sentences.append(f"The engines' clock is missing: {clock['trouble']}")
    trips = list(filter(None, (record.get("endpoint", {}).get("round_trip_s") for record in records)))
    if trips:
        sentences.append(
            f"A small answer took {1e3 * min(trips):.3g} ms from the endpoint to this client, which the "
            "measured times hold and the predicted ones do not."
        )
    return tuple(dict.fromkeys(sentences))  # Several parts of a run may say the same.
