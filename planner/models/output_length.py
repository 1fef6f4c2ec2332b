"""What is known of a request's output before it is complete: buckets of lengths, and predictors of them.

TetriInfer (arXiv 2401.11181, 3.3.2) predicts a range of `bucket_tokens` tokens, not a length: bucket k holds
outputs of k w + 1 ... (k + 1) w tokens. Its classifier reads the prompt and is right for 58.9, 74.9 and 85 %
of ShareGPT requests at w = 100, 200, 400. A trace has no prompts, so a predictor fitted to it
(`planner/models/output_length_fit.py`) sees lengths, times and prefixes only; `synthetic_buckets` stands in
for a predictor of any accuracy, to ask what it would be worth.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.errors import InputError
from planner.traffic.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BUCKET_TOKENS = 200
FEATURES = ("input_tokens", "day_s", "tenant", "first_block", "seen_tokens")
DAY_S = 86400.0


def bucket_of(output_tokens: npt.ArrayLike, bucket_tokens: int = BUCKET_TOKENS) -> Ints:
    """Index of the bucket of each output length (>= 1)."""
    if bucket_tokens < 1:
        raise InputError(f"bucket_tokens is {bucket_tokens}, must be >= 1")
    return (np.asarray(output_tokens, dtype=np.int64) - 1) // bucket_tokens


def bucket_range(bucket: npt.ArrayLike, bucket_tokens: int = BUCKET_TOKENS) -> tuple[Ints, Ints]:
    """Shortest and longest output of each bucket; schedulers reserve for the longest."""
    k = np.asarray(bucket, dtype=np.int64)
    return k * bucket_tokens + 1, (k + 1) * bucket_tokens


def synthetic_buckets(
    output_tokens: npt.ArrayLike,
    accuracy_frac: float,
    rng: np.random.Generator,
    bucket_tokens: int = BUCKET_TOKENS,
) -> Ints:
    """Predicted buckets of which this share, to the nearest request, is right.

    Who is wrong is drawn evenly. A wrong bucket is drawn as often as the others occur among these outputs, so
    mistakes look like the traffic; where all outputs share one bucket it is the next one up.
    """
    if not 0 <= accuracy_frac <= 1:
        raise InputError(f"accuracy is {accuracy_frac}, must be a share in [0, 1]")
    truth = bucket_of(output_tokens, bucket_tokens)
    predicted = truth.copy()
    wrong = rng.permutation(len(truth))[round(accuracy_frac * len(truth)) :]
    buckets, counts = np.unique(truth, return_counts=True)
    if len(buckets) == 1:
        predicted[wrong] += 1
        return predicted
    for bucket in buckets:
        mistaken = wrong[truth[wrong] == bucket]
        others = buckets != bucket
        share = counts[others] / counts[others].sum()
        predicted[mistaken] = rng.choice(buckets[others], size=len(mistaken), p=share)
    return predicted


def features(trace: Trace) -> Floats:
    """What a trace says of each request when it arrives, (n, 5) in the order of FEATURES.

    `first_block` is the id of its prompt's first block and `seen_tokens` how much of the prompt earlier
    requests began with as well; -1 and 0 in a trace without prefixes.
    """
    n = len(trace)
    blocks = np.diff(trace.prefix_offsets)
    first = np.full(n, -1.0)
    first[blocks > 0] = trace.prefix_ids[trace.prefix_offsets[:-1][blocks > 0]]
    return np.column_stack(
        [trace.input_tokens, trace.arrival_s % DAY_S, trace.tenant, first, _seen_tokens(trace)]
    ).astype(float)


def _seen_tokens(trace: Trace) -> Floats:
    """Tokens of the longest prefix that an earlier request had too, at most the prompt."""
    children: dict[tuple[int, int], int] = {}  # (node, block id) -> node; 0 is the root
    ids, offsets = trace.prefix_ids.tolist(), trace.prefix_offsets.tolist()
    seen_blocks = np.zeros(len(trace))
    for i in range(len(trace)):
        node, depth = 0, 0
        for block in ids[offsets[i] : offsets[i + 1]]:
            known = children.get((node, block))
            depth += known is not None
            node = children.setdefault((node, block), len(children) + 1) if known is None else known
        seen_blocks[i] = depth
    return np.minimum(seen_blocks * trace.prefix_block_tokens, trace.input_tokens)
