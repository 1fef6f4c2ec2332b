"""Speculative decoding: in a step a running decode gets one token, and those of its drafts that are accepted.

How many are accepted is drawn by request and by the tokens that it has, not by worker or time. So a request
has the same steps on every fleet, and simulations can be repeated.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.counting import count_together, count_together_of_class
from planner.simulator.layout import BLOCK, DECODE, ZERO
from planner.simulator.numba_compile import kernel_jit, where_rare
from planner.simulator.queue_orders import charge_token
from planner.simulator.slots import blocks_checked


@kernel_jit
def _random_unit(seed, r, tokens):
    """A random number in [0, 1) by seed, request and count of tokens (splitmix64, Steele et al. 2014)."""
    x = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(r)
    for i in range(2):
        x = x + np.uint64(0x9E3779B97F4A7C15) + (np.uint64(tokens) if i == 1 else np.uint64(0))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.float64(x >> np.uint64(11)) * 2.0**-53


@where_rare(lambda state, l, time_s: None)
def accept_drafts(state, l, time_s):
    """The decodes of lane l have got one token each: add the drafted tokens that are accepted.

    A decode that was handed over has no drafts in its first step, which vLLM fills up with blanks. A decode
    keeps the blocks of all tokens that the step checked. An asynchronous engine takes the blocks of the next
    step before it knows how many drafts were accepted, as if all of them were.
    """
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    kind = state.types[worker.type]
    drafts, together = lane.width - 1, ZERO
    lane.coming_blocks = 0
    lane.next_finish_step = np.iinfo(np.int64).max  # Above any step.
    for slot in range(lane.decodes):
        entry = state.slots[l, slot]
        r = entry.request
        left = entry.finish_step - lane.decode_step
        before = state.requests[r].output_tokens - left - 1  # Its tokens before this step.
        more = ZERO
        # A handed-over decode begins with one token, or with none where the prefill worker's is discarded.
        if worker.role != DECODE or before > 1 - kind.discards_token:
            draw = _random_unit(kind.draw_seed, r, before)
            # `accepted` are the chances P_1, P_2, ...: one draw decides how many drafts are accepted.
            while more < min(drafts, left) and draw < kind.accepted[more]:
                more += 1
        if more > 0:
            lane.residue[entry.context_offset % BLOCK] -= 1
            entry.context_offset += more
            lane.residue[entry.context_offset % BLOCK] += 1
            entry.finish_step -= more
            lane.kv_sum += more
            together += more
            count_together_of_class(state, lane.worker, r, more, time_s)
            for _ in range(more):
                charge_token(state, lane.worker, r)
        lane.next_finish_step = min(lane.next_finish_step, entry.finish_step)
        entry.held_blocks = entry.next_blocks
        c = entry.context_offset + lane.decode_step
        unknown = (drafts - more) * kind.is_async  # Rejected drafts that the engine still takes for accepted.
        needed = blocks_checked(kind, lane, state.requests[r], c + unknown)
        entry.next_blocks = max(needed, entry.held_blocks)
        lane.coming_blocks += entry.next_blocks - entry.held_blocks
    if together > 0:
        count_together(state, lane.worker, together, time_s)
