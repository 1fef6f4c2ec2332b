"""Predictions of a request's output length before the output is complete, as a mean or as a bucket of
lengths.

TetriInfer (arXiv 2401.11181, 3.3.2) predicts a range of w tokens (`bucket_tokens`), not a length: bucket k
holds outputs of k w + 1 ... (k + 1) w tokens. Its classifier reads the prompt and is right for 58.9, 74.9 and
85 % of ShareGPT requests at w = 100, 200, 400. A trace has no prompts, so a predictor fitted to it
(`planner/models/output_length_fit.py`) sees lengths, times and prefixes only. `synthetic_buckets` imitates a
predictor of a given accuracy, so that a plan shows what that accuracy would be worth.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.errors import InputError
from planner.traffic.trace import Trace
from planner.units import DAY_S

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BUCKET_TOKENS = 200  # TetriInfer's choice of w.
# What `length_features` gives for each request; `day_s` is the time of day.
FEATURES = ("input_tokens", "day_s", "tenant", "first_block", "seen_tokens")


class OutputTable(NamedTuple):
    """The outputs of n requests that ended, in G groups by the lengths of their prompts. All values are
    tokens.

    It gives E[output | input, output > generated] (Aladdin, arXiv:2405.06856, 2.3 and 4.3). Group g has the
    prompts up to `edges[g]`; their outputs are outputs[start[g] : start[g + 1]], shortest first. One more
    group, the last, has the outputs of all prompts. `sums[k]` is the sum of `outputs[k]` and of the outputs
    after it in its group.
    """

    edges: Floats  # (G - 1,)
    start: Ints  # (G + 2,)
    outputs: Floats  # (2 n,)
    sums: Floats  # (2 n,)

    def expected_tokens(self, input_tokens: npt.ArrayLike, generated_tokens: npt.ArrayLike) -> Floats:
        """The mean output of requests that have made this many tokens and go on.

        It is the mean of the longer outputs in the same group; if there are none, of the longer outputs of
        all prompts; if there are none either, one token more than were made.
        """
        generated = np.asarray(generated_tokens, float)
        group = np.searchsorted(self.edges, np.asarray(input_tokens, float), side="left")
        expected = generated + 1
        last = len(self.start) - 2  # The group of all prompts; `start` has one entry more than groups.
        # The group of all prompts comes first, and the request's own group replaces its value.
        for g in (last, *range(last)):
            outputs = self.outputs[self.start[g] : self.start[g + 1]]
            in_group = (group == g) | (g == last)
            longest = outputs[-1] if len(outputs) else 0.0
            rows = np.flatnonzero(in_group & (generated < longest))
            not_longer = np.searchsorted(outputs, generated[rows], side="right")
            expected[rows] = self.sums[self.start[g] + not_longer] / (len(outputs) - not_longer)
        return expected


# The kernel for all fleets (simulator/kernel_variants.py) gets this for a fleet without a table, and looks
# nothing up in it. It has no group, so `expected_tokens` would raise.
NO_OUTPUTS = OutputTable(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


def output_table(input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike, groups: int = 8) -> OutputTable:
    """The table of requests (n,) that ended, in `groups` equally large groups by prompt length."""
    inputs, outputs = np.asarray(input_tokens, float), np.asarray(output_tokens, float)
    if groups < 1:
        raise InputError(f"buckets of prompts: {groups}, must be >= 1")
    if not len(outputs) or not (outputs >= 1).all():
        least = f"has {outputs.min():g} tokens" if len(outputs) else "is missing"
        raise InputError(f"output length: an output {least}, must be >= 1")
    quantiles = np.linspace(0, 1, groups + 1)[1:-1]
    edges = np.unique(np.quantile(inputs, quantiles)) if len(quantiles) else np.zeros(0)
    group = np.searchsorted(edges, inputs, side="left")
    sorted_groups = [np.sort(outputs[group == g]) for g in range(len(edges) + 1)] + [np.sort(outputs)]
    return OutputTable(
        edges=edges,
        start=np.cumsum([0, *map(len, sorted_groups)]),
        outputs=np.concatenate(sorted_groups),
        sums=np.concatenate([np.cumsum(each[::-1])[::-1] for each in sorted_groups]),
    )


def bucket_of(output_tokens: npt.ArrayLike, bucket_tokens: int = BUCKET_TOKENS) -> Ints:
    """The index of the bucket of each output length (>= 1)."""
    if bucket_tokens < 1:
        raise InputError(f"bucket_tokens is {bucket_tokens}, must be >= 1")
    return (np.asarray(output_tokens, dtype=np.int64) - 1) // bucket_tokens


def bucket_range(bucket: npt.ArrayLike, bucket_tokens: int = BUCKET_TOKENS) -> tuple[Ints, Ints]:
    """The shortest and longest output of each bucket; schedulers reserve KV blocks for the longest."""
    k = np.asarray(bucket, dtype=np.int64)
    return k * bucket_tokens + 1, (k + 1) * bucket_tokens


def synthetic_buckets(output_tokens: npt.ArrayLike, accuracy_frac: float, rng: np.random.Generator) -> Ints:
    """Predicted buckets (n,), of which round(`accuracy_frac` n) are right.

    Every request is equally likely to be predicted wrong. A wrong bucket is drawn as often as it occurs among
    these outputs, so that mistakes look like the traffic. If all outputs share one bucket, a wrong prediction
    is the next one up.
    """
    if not 0 <= accuracy_frac <= 1:
        raise InputError(f"accuracy is {accuracy_frac}, must be a share in [0, 1]")
    truth = bucket_of(output_tokens)
    predicted = truth.copy()
    wrong = rng.permutation(len(truth))[round(accuracy_frac * len(truth)) :]
    buckets, counts = np.unique(truth, return_counts=True)
    if len(buckets) == 1:
        predicted[wrong] += 1  # No other bucket occurs.
        return predicted
    for bucket in buckets:
        wrong_here = wrong[truth[wrong] == bucket]
        others = buckets != bucket
        share = counts[others] / counts[others].sum()
        predicted[wrong_here] = rng.choice(buckets[others], size=len(wrong_here), p=share)
    return predicted


def length_features(trace: Trace) -> Floats:
    """What is known of each request when it arrives, (n, 5) in the order of FEATURES.

    `first_block` is the id of the prompt's first block, and `seen_tokens` the length of the longest prefix
    that an earlier request had too; they are -1 and 0 in a trace without prefixes.
    """
    n = len(trace)
    blocks = np.diff(trace.prefix_offsets)
    first = np.full(n, -1.0)
    first[blocks > 0] = trace.prefix_ids[trace.prefix_offsets[:-1][blocks > 0]]
    return np.column_stack(
        [trace.input_tokens, trace.arrival_s % DAY_S, trace.tenant, first, _seen_tokens(trace)]
    ).astype(float)


def _seen_tokens(trace: Trace) -> Floats:
    """The tokens of the longest prefix that an earlier request had too, at most the prompt's tokens."""
    # A tree of prefixes: (node, block id) -> child node. Node 0 is the root.
    children: dict[tuple[int, int], int] = {}
    ids, offsets = trace.prefix_ids.tolist(), trace.prefix_offsets.tolist()
    seen_blocks = np.zeros(len(trace))
    for i in range(len(trace)):
        node, depth = 0, 0
        for block in ids[offsets[i] : offsets[i + 1]]:
            child = children.get((node, block))
            depth += child is not None
            node = children.setdefault((node, block), len(children) + 1) if child is None else child
        seen_blocks[i] = depth
    return np.minimum(seen_blocks * trace.prefix_block_tokens, trace.input_tokens)
