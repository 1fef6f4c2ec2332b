"""Traffic in which other prefixes are popular than before.

A random permutation maps each prefix to another one. A share of the sessions, drawn at random, is replaced:
a session that begins with prefix p becomes a copy of a random session (the donor) that begins with the prefix
to which p is mapped, and starts when the old one did. So hot prefixes may become cold and cold ones hot. A
request outside of sessions is a session by itself.

Only the longest stable prefixes (prefix_placing.py) take part, those that no other stable one continues.
Requests that begin with a shorter stable prefix, or with none, stay.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.search.prefixes.prefix_placing import stable_nodes
from planner.traffic.prefixes import block_uses, prefix_tree
from planner.traffic.scaling import combine_parts, with_own_blocks
from planner.traffic.sessions import session_numbers
from planner.traffic.trace import IntArray, Trace


def drift_popularity(trace: Trace, drift_frac: float, rng: np.random.Generator) -> Trace:
    """The trace with this share of the popularity of its prefixes moved to others; the trace itself where it
    has fewer than two such prefixes.
    """
    if not trace.duration_s > 0:  # Requests that all arrive at once have no stable prefixes.
        return trace
    session = session_numbers(trace) if trace.after.size else np.arange(len(trace))
    first = np.full(session.max() + 1, len(trace))  # The first request of each session.
    np.minimum.at(first, session, np.arange(len(trace)))
    prefix = popular_prefixes(trace)[first]  # By session.
    prefixes = np.unique(prefix[prefix >= 0])
    if len(prefixes) < 2 or not drift_frac > 0:
        return trace
    order = rng.permutation(prefixes)
    # Each prefix is mapped to the next one in a random circle, so never to itself.
    next_of = dict(zip(order.tolist(), np.roll(order, -1).tolist(), strict=True))
    members = {p: np.flatnonzero(prefix == p) for p in prefixes.tolist()}
    moved = np.flatnonzero((prefix >= 0) & (rng.random(len(prefix)) < drift_frac))
    # `combine_parts` takes each session at most once per part: the k-th copy of a session is in part k, and
    # part 0 has the sessions that stay.
    copies = np.zeros(len(prefix), np.int64)
    parts: list[list[tuple[int, float]]] = []
    for place in moved.tolist():
        donor = int(rng.choice(members[next_of[int(prefix[place])]]))
        if copies[donor] == len(parts):
            parts.append([])
        shift_s = float(trace.arrival_s[first[place]] - trace.arrival_s[first[donor]])
        parts[copies[donor]].append((donor, shift_s))
        copies[donor] += 1
    stays = np.ones(len(prefix), bool)
    stays[moved] = False
    rows = [np.flatnonzero(stays[session])]
    arrival_s = [trace.arrival_s[rows[0]]]
    for part in parts:
        shift_of = np.full(len(prefix), np.nan)
        for donor, shift_s in part:
            shift_of[donor] = shift_s
        row = np.flatnonzero(~np.isnan(shift_of[session]))
        rows.append(row)
        arrival_s.append(trace.arrival_s[row] + shift_of[session[row]])
    combined = combine_parts(trace, rows, arrival_s)
    if not trace.after.size:
        # A copy shares with its donor no more than others do: blocks of the donor alone get new ids.
        copy = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        copy = copy[np.argsort(np.concatenate(arrival_s), kind="stable")]
        combined = replace(
            with_own_blocks(combined, trace, copy), copies_share_prefixes=trace.copies_share_prefixes
        )
    note = f"{100 * drift_frac:g} % of the popularity of {len(prefixes)} prefixes moved to others"
    start_s = combined.arrival_s[0]
    return replace(combined, arrival_s=combined.arrival_s - start_s, notes=(*trace.notes, note))


def may_drift(trace: Trace) -> bool:
    """Whether there are two prefixes that could change their popularity."""
    prefix = popular_prefixes(trace)
    return len(np.unique(prefix[prefix >= 0])) > 1


def popular_prefixes(trace: Trace) -> IntArray:
    """(n,): the longest stable prefix with which each request begins, as a node of the tree; -1 for requests
    without one, and where the longest one is continued by another stable prefix.
    """
    tree = prefix_tree(block_uses(trace))
    stable = stable_nodes(trace, tree)
    # By node: whether it is stable, and no stable one continues it. One more entry for the index -1 (no
    # parent).
    is_end = np.zeros(len(tree) + 1, bool)
    is_end[stable] = True
    is_end[tree.parent[stable]] = False
    # From each request's deepest node up to such a node, or to the root's parent, -1.
    node = tree.end.copy()
    while len(unfinished := np.flatnonzero((node >= 0) & ~is_end[node])):
        node[unfinished] = tree.parent[node[unfinished]]
    return node
