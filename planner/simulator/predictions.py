"""Predicted output lengths: new predictions for outputs that are longer, and the errors of both.

Aladdin (Nie et al. 2024, arXiv:2405.06856, section 4.3 and Algorithm 2): an output that is longer than
predicted is predicted to be the mean of all such outputs, and its worker has one sequence and that many
tokens more than was planned. If an output ends early, its worker has one sequence less, and the missing
tokens less. These sums are the errors b^e (sequences) and l^e (tokens) of a heartbeat, by which
best-fit-rebalanced moves requests (routing.py). Letters: w is a worker, r a request.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.layout import GAMMA, HEARTBEAT_S, HEAVY_TOKENS, NEXT_BEAT_S, ONE, ZERO
from planner.simulator.numba_compile import kernel_jit, small_jit, where_has


@kernel_jit
def _mean_longer(table, input_tokens, generated):
    """The mean of the outputs longer than `generated` tokens, in whole tokens
    (`OutputTable.expected_tokens`).

    The mean is over prompts of about this length, or over all prompts if none of these had a longer output.
    """
    # Binary search for the bucket of this prompt length.
    first, last = ZERO, len(table.edges)
    while first < last:
        middle = (first + last) // 2
        if table.edges[middle] < input_tokens:
            first = middle + ONE
        else:
            last = middle
    any_prompt = len(table.start) - 2  # The last bucket is that of all prompts.
    for attempt in range(2):
        bucket = first if attempt == 0 else any_prompt
        low, high = table.start[bucket], table.start[bucket + 1]
        # Binary search for the first longer output.
        end = high
        while low < high:
            middle = (low + high) // 2
            if table.outputs[middle] > generated:
                high = middle
            else:
                low = middle + 1
        if low < end:
            return int(table.sums[low] / (end - low))
    return generated + ONE  # No output was longer: one token more.


@where_has("outputs", lambda state, r: state.requests[r].output_tokens)
def predicted_at_first(state, r):
    """The predicted output of a request at its arrival; `output_tokens` is the most that it may have."""
    request = state.requests[r]
    if len(state.outputs.outputs) == 0:  # Nothing is known: a perfect prediction.
        return request.output_tokens
    return min(_mean_longer(state.outputs, request.input_tokens, ZERO), request.output_tokens)


@where_has(
    "outputs", lambda state, r, generated: max(state.requests[r].predicted_later_tokens, generated + 1)
)
def _new_prediction(state, r, generated):
    """A prediction above `generated` tokens: the mean of longer outputs, renewed while it is too short.
    Without a table of outputs the prediction was made before the simulation (`predicted_later_tokens`).
    """
    request = state.requests[r]
    later = request.predicted_tokens
    while later <= generated:
        later = _mean_longer(state.outputs, request.input_tokens, later)
    return later


@kernel_jit
def renew_prediction(state, w, r, generated):
    """Give request r on worker w, which is longer than predicted, a new prediction, by which w counts it from
    now on; add to the worker's errors.
    """
    worker, request = state.workers[w], state.requests[r]
    later = _new_prediction(state, r, generated)
    worker.future_tokens += state.policy[GAMMA] * (later - request.predicted_tokens)
    heavy_tokens = state.policy[HEAVY_TOKENS]
    worker.heavy += np.int64(later > heavy_tokens) - np.int64(request.predicted_tokens > heavy_tokens)
    worker.error_tokens += later
    worker.error_sequences += 1.0
    request.predicted_tokens = later


@where_has("outputs", lambda state, w, r, generated: None)
def renew_if_outlived(state, w, r, generated):
    """Renew the prediction of request r if it has as many tokens as predicted.

    Only outputs that are predicted from those of other requests can be longer, so elsewhere this is not
    compiled.
    """
    if generated >= state.requests[r].predicted_tokens:
        renew_prediction(state, w, r, generated)


@small_jit
def note_end(state, w, r, tokens):
    """Count the error of the prediction for request r, which leaves worker w with `tokens` tokens of output.

    A live router gives 0 for a request that will come back; then there is no error.
    """
    worker, request = state.workers[w], state.requests[r]
    if 0 < tokens < request.predicted_tokens:
        worker.error_tokens += tokens - request.predicted_tokens
        worker.error_sequences -= 1.0


@small_jit
def forget_errors(worker):
    """Set both prediction errors of a worker to 0."""
    worker.error_tokens, worker.error_sequences = 0.0, 0.0


@kernel_jit
def begin_heartbeat(state, time_s):
    """Set all errors to zero if a new heartbeat has begun. Called whenever errors are about to be used."""
    if time_s >= state.policy[NEXT_BEAT_S]:
        for worker in state.workers:
            forget_errors(worker)
        beats = np.floor(time_s / state.policy[HEARTBEAT_S]) + 1.0
        state.policy[NEXT_BEAT_S] = beats * state.policy[HEARTBEAT_S]
