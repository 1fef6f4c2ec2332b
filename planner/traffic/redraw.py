"""Draws another day of the same traffic from a trace, by a local block bootstrap.

The trace is cut into blocks of equal time. Each block is replaced by a stretch of the trace that is as long
and begins at a random time near it, within REACH_FRAC of the trace to either side (Paparoditis and Politis,
Local block bootstrap, Comptes Rendus Mathematique 335, 2002, 959-962). This preserves bursts shorter than a
block, and the course of the rate over much longer times; the number of arrivals varies.

A session belongs to the block of its first request, and is moved as a whole, with its waits. A session that
is drawn twice becomes the sessions of two users, whose prompts share only the prefixes that other sessions
share too (`scaling.combine_parts`).

A recording begins while sessions are under way, so more sessions seem to begin in its first moments than
later. If much later blocks replaced the first ones, there would be too few sessions: redraws of the sample of
chats had 13 % fewer requests per second than the trace. So with sessions the replacement begins at most one
block away. The sessions of the first block are drawn from among themselves, with replacement, and stay at
their times. The same is done with all sessions if they begin together.
"""

from dataclasses import replace

import numpy as np

from planner.traffic.scaling import combine_parts
from planner.traffic.sessions import begin_together, first_rows, session_numbers
from planner.traffic.trace import FloatArray, IntArray, Trace

# All values below were set by hand.
BLOCKS = 60  # A trace is cut into this many blocks, unless their length is out of the bounds below.
LEAST_S, MOST_S = 20.0, 600.0  # Bounds of a block's length, which is also at most a quarter of the trace.
# If as many draws in a row are empty or have all arrivals at once, the trace is used unchanged.
MOST_DRAWS = 100
REACH_FRAC = 0.125  # A replacement begins at most this share of the trace before or after its block.


def block_s(trace: Trace) -> float:
    """The length of the blocks [s]: at most a quarter of the trace, so that there are at least four."""
    return min(float(np.clip(trace.duration_s / BLOCKS, LEAST_S, MOST_S)), trace.duration_s / 4)


def redraw_trace(trace: Trace, rng: np.random.Generator) -> Trace:
    """Other requests of the same kind, over about the time of the trace.

    If requests come in few bursts, the blocks may miss all of them: then all blocks are drawn again, up to
    MOST_DRAWS times.
    """
    for _ in range(MOST_DRAWS):
        new_trace = _redraw_once(trace, rng)
        if new_trace is not None and new_trace.duration_s > 0:
            return new_trace
    return trace


def _redraw_once(trace: Trace, rng: np.random.Generator) -> Trace | None:
    """One draw of all blocks; None if no block has a request."""
    length_s, duration_s = block_s(trace), trace.duration_s
    if length_s == 0:
        return trace  # All requests arrive at once, so there are no blocks.
    has_sessions = trace.after.size > 0
    session = session_numbers(trace) if has_sessions else np.arange(len(trace))
    begin_s = trace.arrival_s[first_rows(session)] - trace.arrival_s[0]  # When each session begins.
    order = np.argsort(begin_s, kind="stable")  # The sessions in the order in which they begin.
    begin_s = begin_s[order]
    rows: list[IntArray] = []  # The rows of the trace that each part of the redrawn trace has.
    arrival_s: list[FloatArray] = []  # When the requests of each part arrive.
    is_together = has_sessions and begin_together(trace)
    # Blocks from `first_s` on are replaced by stretches that begin at most `reach_s` away.
    if is_together:
        first_s, reach_s = duration_s, length_s
    elif has_sessions:
        first_s, reach_s = length_s, length_s
    else:
        first_s, reach_s = 0.0, REACH_FRAC * duration_s
    if has_sessions:  # Sessions before `first_s` stay at their times.
        staying = order if is_together else order[: np.searchsorted(begin_s, first_s)]
        rows = _with_replacement(session, staying, rng)
        arrival_s = [trace.arrival_s[part_rows] for part_rows in rows]
    for place_s in np.arange(first_s, duration_s, length_s):  # Where each block begins.
        # The replacement must lie within the trace, so near the trace's edges the reach is one-sided.
        earliest_s = max(place_s - reach_s, first_s)
        latest_s = max(min(place_s + reach_s, duration_s - length_s), earliest_s)
        from_s = rng.uniform(earliest_s, latest_s)
        until_s = from_s + min(length_s, duration_s - place_s)
        drawn = order[np.searchsorted(begin_s, from_s) : np.searchsorted(begin_s, until_s)]
        block_rows = np.flatnonzero(np.isin(session, drawn)) if has_sessions else np.sort(drawn)
        rows.append(block_rows)
        arrival_s.append(trace.arrival_s[block_rows] - from_s + place_s)
    if not any(map(len, rows)):
        return None
    new_trace = combine_parts(trace, rows, arrival_s)
    note = f"redrawn from blocks of {length_s:.4g} s, each from within {reach_s:.4g} s of its place"
    if is_together:
        note = f"{len(order)} sessions drawn from those of the trace, with replacement"
    return replace(
        new_trace, arrival_s=new_trace.arrival_s - new_trace.arrival_s[0], notes=(*trace.notes, note)
    )


def _with_replacement(session: IntArray, candidates: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Sessions drawn from the candidates, as many as there are of these: the rows of the trace in parts. A
    part has every session at most once, so a session that is drawn three times is in three parts.
    """
    drawn = rng.integers(len(candidates), size=len(candidates))
    times = np.zeros(session.max() + 1, np.int64)  # How often each session is drawn.
    np.add.at(times, candidates[drawn], 1)
    return [np.flatnonzero(times[session] >= part) for part in range(1, int(times.max()) + 1)]
