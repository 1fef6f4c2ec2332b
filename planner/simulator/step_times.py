"""Seconds of a step, in each form of step times that the simulator knows.

Symbols are those of planner/models/latency.py. A step has N tokens. D of them are decodes, which read K
tokens of KV. The others belong to P chunks of prompts. A chunk has n new tokens after c cached ones; all
chunks together have A_p pairs of a query and a key, and C cached tokens. a, b, d, e, m and h are fitted
numbers, of which h is the host's time; f, p, q, u, v and w are tables, g and r fitted functions, and o and o'
overheads. [P > 1] is 1 if P > 1, else 0.

FIVE_NUMBERS      t = f(N) + a A_p + b D + d (K + C) + e P, + m K if P > 0, with h in f
                  for a data-parallel rank only its own part: joint_steps.py adds what all ranks share
SPLITWISE_LOOKUP  prompts p(tokens); decodes q(D) + b D + d K; both m p(tokens) + b D + d K
VIDUR_TABLES      u(ceil(N / 8)) + v(C, sqrt(sum n^2)) (1 + o [P > 1])
                  + w(D, ceil(floor(K / D) / 64)) (1 + o' [D > 1])
DISTSERVE_FIT     a + b sum n + c sum n^2, or a' + b' K + c' D; the first stage o + o' context tokens more
CORRECTED         g(step) exp(r(step)) + h  (planner.models.correction)
SPECULATIVE       FIVE_NUMBERS of all tokens that are checked, and a drafter's passes
                  (planner.models.speculation)

In VIDUR_TABLES C is the sum over the prompts of ceil(c / 64). In SPLITWISE_LOOKUP a setting says whether the
tokens of p include those of decodes. A step beyond the tables takes infinitely long; then
`read_results.read_simulation` raises an error. planner/models/foreign_forms.py makes the tables and the
numbers (`kind.numbers`, here k), and says what each of these is.

`lane` is the step that was formed (layout.py): `kv_sum` are the KV tokens of its decodes, `pairs` A_p,
`cached` C, `squares` the sum of n^2, `prefills` P. `is_decoding` is 0 in a step whose decodes wait. `kind` is
the record of the worker's type.
"""

from __future__ import annotations

import numpy as np

from planner.models.foreign_forms import CORRECTED, DISTSERVE_FIT, FIVE_NUMBERS, SPECULATIVE, SPLITWISE_LOOKUP
from planner.simulator.numba_compile import kernel_jit, small_jit, where_rare

UNBOUNDED = np.int64(2**62)  # More steps than any run has.
# Where step times fall from step to step, a run is cut so that they fall by no more than this share. Set by
# hand.
LONGEST_FALL_FRAC = 0.001


@kernel_jit
def engine_seconds(state, kind, lane, more_s):
    """`step_seconds` with `more_s` further seconds of the GPUs, and with the engine's host.

    With GPU seconds g and host seconds h a step takes g + h. If the host works while the GPUs do
    (`overlaps`), a step takes max(g, h) + r, where r is the host's work that must wait for the GPUs. No step
    takes less than the API server needs for its tokens. In a pipeline the first stage waits for the host.
    """
    stage_s, extra_s, send_s, growth_s, steps = step_seconds(state, kind, lane)
    return with_host(kind, lane, stage_s, extra_s + more_s, send_s, growth_s, steps)


@small_jit
def with_host(kind, lane, stage_s, extra_s, send_s, growth_s, steps):
    """The result of `step_seconds` with the engine's host, as in `engine_seconds`."""
    # In a step whose decodes wait (`is_decoding` 0) there are prompts alone.
    sequences = lane.decodes * lane.is_decoding + lane.prefills
    host_s = kind.host_s[0] + kind.host_s[1] * sequences
    if lane.prefills > 0:
        host_s += kind.launch_s
    least_s, added_s = kind.token_s * sequences, host_s  # A step takes max(g + added_s, least_s).
    if kind.overlaps > 0:
        added_s = kind.rest_s[0] + kind.rest_s[1] * sequences
        least_s = max(least_s, host_s + added_s)
    short_s = least_s - (stage_s + extra_s + added_s)
    if short_s > 0.0:  # Steps all take least_s until g has grown beyond that.
        if growth_s > 0.0:
            steps = min(steps, int(short_s / growth_s) + 1)
        return stage_s, extra_s + added_s + short_s, send_s, 0.0, steps
    return stage_s, extra_s + added_s, send_s, growth_s, steps


@kernel_jit
def step_seconds(state, kind, lane):
    """(stage_s, extra_s, send_s, growth_s, steps) of the step formed on a lane of a worker of type `kind`.

    Each of the pp stages takes `stage_s`, the first `extra_s` more, and all but the last `send_s` more. A
    step of decodes alone may be followed by the same ones: `steps` in all, each `growth_s` longer.
    """
    if kind.form != FIVE_NUMBERS:
        return _other_seconds(state, kind, lane)
    k, decodes, kv_tokens = kind.numbers, lane.decodes * lane.is_decoding, lane.kv_sum * lane.is_decoding
    a, b, d, e, m = k[0], k[1], k[2], k[3], k[4]
    t = (
        state.tables[kind.table_at[0] + decodes + lane.prefill_tokens]
        + a * lane.pairs
        + b * decodes
        + d * (kv_tokens + lane.cached)
        + e * lane.prefills
    )
    if lane.prefills > 0:
        t += m * kv_tokens
    return t / kind.pp, 0.0, 0.0, d * decodes, UNBOUNDED


@where_rare(lambda state, kind, lane: (np.inf, 0.0, 0.0, 0.0, UNBOUNDED))
def _other_seconds(state, kind, lane):
    """`step_seconds` in another form than FIVE_NUMBERS."""
    decodes, kv_tokens = lane.decodes * lane.is_decoding, lane.kv_sum * lane.is_decoding
    if kind.form == SPECULATIVE:
        return _speculative_s(state.tables, kind, lane, decodes, kv_tokens), 0.0, 0.0, 0.0, UNBOUNDED
    if kind.form == SPLITWISE_LOOKUP:
        return _splitwise_seconds(state.tables, kind, lane, decodes, kv_tokens)
    if kind.form == DISTSERVE_FIT:
        return _distserve_seconds(kind, lane, decodes, kv_tokens)
    if kind.form == CORRECTED:
        return _corrected_seconds(state.tables, kind, lane, decodes, kv_tokens)
    return _vidur_seconds(state.tables, kind, lane, decodes, kv_tokens)


@kernel_jit
def _splitwise_seconds(tables, kind, lane, decodes, kv_tokens):
    """`step_seconds` in the form SPLITWISE_LOOKUP."""
    k, at, prefill = kind.numbers, kind.table_at, lane.prefill_tokens
    mixed_factor, b, d, counts_decodes = k[0], k[1], k[2], k[3] > 0.0
    kv_s = b * decodes + d * kv_tokens
    if prefill == 0:
        return (tables[at[1] + decodes] + kv_s) / kind.pp, 0.0, 0.0, d * decodes, UNBOUNDED
    t = tables[at[0] + prefill + (decodes if counts_decodes else 0)]
    if decodes > 0:
        t *= mixed_factor
    return (t + kv_s) / kind.pp, 0.0, 0.0, 0.0, UNBOUNDED


@kernel_jit
def _distserve_seconds(kind, lane, decodes, kv_tokens):
    """`step_seconds` in the form DISTSERVE_FIT."""
    k, prefill = kind.numbers, lane.prefill_tokens
    per_rank_s, overhead_s, overhead_token_s = k[9], k[10], k[11]
    # Context tokens are those before this step: `kv_tokens` has one new token of each decode besides.
    extra_s = overhead_s + overhead_token_s * (prefill + kv_tokens - decodes)
    if prefill > 0:
        t = k[0] + k[1] * prefill + k[2] * lane.squares
        return t / kind.pp + per_rank_s * kind.pp, extra_s, 0.0, 0.0, UNBOUNDED
    # a', b' and c' of small batches, or of large ones from table_width[0] decodes on.
    i = 3 if decodes < kind.table_width[0] else 6
    t = k[i] + k[i + 1] * kv_tokens + k[i + 2] * decodes
    growth_s = k[i + 1] * decodes / kind.pp + overhead_token_s * decodes
    return t / kind.pp, extra_s, 0.0, growth_s, UNBOUNDED


@kernel_jit
def _corrected_seconds(tables, kind, lane, decodes, kv_tokens):
    """`step_seconds` in the form CORRECTED."""
    # The fit rounds the mean context up to a multiple of this many tokens (`context_step`; 1: no rounding),
    # so `more` steps after this one take the same time.
    context_step, more = kind.table_width[3], UNBOUNDED
    if context_step > 1 and decodes > 0:
        context = int(kv_tokens) // decodes
        more = -context % context_step
        kv_tokens = decodes * (context + more)
    if lane.prefill_tokens == 0:
        first_s, growth_s, steps = _corrected_decodes_s(tables, kind, decodes, kv_tokens)
        if context_step > 1:
            growth_s, steps = 0.0, more + 1
        return first_s / kind.pp, 0.0, 0.0, growth_s / kind.pp, steps
    t = _corrected_prefills_s(
        tables, kind, decodes, kv_tokens, lane.prefill_tokens, lane.pairs, lane.prefills
    )
    return t / kind.pp, 0.0, 0.0, 0.0, UNBOUNDED


@kernel_jit
def _vidur_seconds(tables, kind, lane, decodes, kv_tokens):
    """`step_seconds` in the form VIDUR_TABLES."""
    k, at, width, steps = kind.numbers, kind.table_at, kind.table_width, UNBOUNDED
    prefill_over_frac, decode_over_frac, send_token_s, send_s = k[0], k[1], k[2], k[3]
    tokens = lane.prefill_tokens + decodes
    eights = (tokens + 7) // 8  # Tokens are rounded up to multiples of 8.
    if eights >= width[0]:
        return np.inf, 0.0, 0.0, 0.0, steps
    t = tables[at[0] + eights]
    if lane.prefills > 0:
        edge = int(np.rint(np.sqrt(lane.squares)))  # The length of one prompt with as many squares.
        if lane.cached_64 >= width[1] or edge >= width[2]:
            return np.inf, 0.0, 0.0, 0.0, steps
        over_frac = prefill_over_frac if lane.prefills > 1 else 0.0
        t += tables[at[1] + int(lane.cached_64) * width[2] + edge] * (1.0 + over_frac)
    if decodes > 0:
        context = int(kv_tokens) // decodes
        column = (context + 63) // 64
        if column >= width[3] or decodes >= width[4]:
            return np.inf, 0.0, 0.0, 0.0, steps
        over_frac = decode_over_frac if decodes > 1 else 0.0
        t += tables[at[2] + decodes * width[3] + column] * (1.0 + over_frac)
        steps = column * 64 - context + 1  # Until then the context rounds up to the same multiple of 64.
    return t / kind.pp, 0.0, send_token_s * tokens + send_s, 0.0, steps


@kernel_jit
def _speculative_s(tables, kind, lane, decodes, kv_tokens):
    """Seconds of a step in which every decode checks its drafts, and of passes that draft the next: the
    formulas of planner/models/speculation.py, with its letters.
    """
    k, f = kind.numbers, kind.table_at[0]
    a, b, d, e, m, h = k[0], k[1], k[2], k[3], k[4], k[5]
    drafts, q, draft_s = k[6], k[7], k[8]
    chunks, rows = lane.prefills, decodes + lane.prefills
    read = d * (kv_tokens + drafts * decodes)
    beside = e * chunks + read + d * lane.cached
    if chunks > 0:
        beside += m * (kv_tokens + drafts * decodes)
    wide = tables[f + lane.prefill_tokens + decodes * lane.width]  # Each decode has its drafts as tokens too.
    more = drafts * kv_tokens + 0.5 * drafts * (drafts + 1.0) * decodes  # Pairs of drafts with all before.
    own_s = wide + a * (lane.pairs + more) + b * (1.0 + drafts) * decodes + beside
    first_s = wide - h + a * lane.pairs + b * decodes + beside  # The first pass, over all tokens of the step.
    again_s = tables[f + rows] - h + b * rows + read  # Each further pass has one token per sequence.
    return own_s + q * (first_s + (drafts - 1.0) * again_s) + draft_s * drafts


@kernel_jit
def _corrected_decodes_s(tables, kind, decodes, kv_tokens):
    """(first, growth, steps) of steps of decodes alone, until their mean context comes to the next knot.

    Between knots the correction is linear in the context. So t is nearly linear there; the line used here is
    exact at both ends. The simulator's runs cannot get shorter from step to step (growth >= 0). Where t
    falls, all steps of the run take its mean, and the run ends before t has fallen by LONGEST_FALL_FRAC.
    """
    k, at, knots = kind.numbers, kind.table_at, kind.table_width[1]
    s, c, b, d, h = k[0], k[2], k[4], k[5], k[11]
    # Without prefills correction.py's exponent p is 2, with prefills 3.
    floor_s = np.sqrt(s * s + (c * decodes) ** 2) + b * decodes
    context = 1.0 + kv_tokens / decodes
    i = min(int(kind.table_width[2] * np.log2(context)), knots - 2)  # table_width[2] knots per doubling.
    left, right = tables[at[3] + i], tables[at[3] + i + 1]
    cell = at[2] + decodes * knots + i
    slope = (tables[cell + 1] - tables[cell]) / (right - left)
    more = max(int(right - context), 0)  # How many steps follow the first one before the knot.
    first = (floor_s + d * kv_tokens) * (tables[cell] + slope * (context - left))
    last = (floor_s + d * (kv_tokens + more * decodes)) * (tables[cell] + slope * (context + more - left))
    if last > first:
        return first + h, (last - first) / more, more + 1
    fall = (first - last) / max(more, 1)  # By how much a step is shorter than the one before.
    if fall * more > LONGEST_FALL_FRAC * first:
        more = int(LONGEST_FALL_FRAC * first / fall)
    return first - 0.5 * fall * more + h, 0.0, more + 1


@kernel_jit
def _corrected_prefills_s(tables, kind, decodes, kv_tokens, prefill, pairs, chunks):
    """Seconds of a step with prefills.

    The loop sums r, with the covariance of correction.py. k[6:11] are the scales of the coordinates z. In the
    table of measured steps a row has the five scaled coordinates, then the weights for steps of prefills
    alone and for steps with decodes (`correction.CorrectedFormula.compile_for_kernel`).
    """
    k, at = kind.numbers, kind.table_at
    s, s_p, c, a, b, d, h = k[0], k[1], k[2], k[3], k[4], k[5], k[11]
    tokens = prefill + decodes
    eights = (tokens + 7) // 8
    z0, z1 = k[6] * np.log2(8.0 * eights), k[7] * np.log2(1.0 + decodes)
    z2 = k[8] * np.log2(1.0 + kv_tokens / max(decodes, 1))
    z3, z4 = k[9] * np.log2(1.0 + chunks), k[10] * np.log2(1.0 + pairs / prefill)
    r = tables[at[0] + eights]
    for j in range(at[1], at[1] + 7 * kind.table_width[0], 7):
        x3, x4 = abs(z3 - tables[j + 3]), abs(z4 - tables[j + 4])
        exponent, product = abs(z0 - tables[j]) + x3 + x4, (1.0 + x3) * (1.0 + x4)
        if decodes > 0:
            x1, x2 = abs(z1 - tables[j + 1]), abs(z2 - tables[j + 2])
            r += tables[j + 6] * product * (1.0 + x1) * (1.0 + x2) * np.exp(-(exponent + x1 + x2))
        else:
            r += tables[j + 5] * product * np.exp(-exponent)
    dense_s = np.cbrt((s + s_p) ** 3 + (c * tokens) ** 3)
    return (dense_s + a * pairs + b * decodes + d * kv_tokens) * np.exp(r) + h
