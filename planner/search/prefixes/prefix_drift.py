"""Changes which prefixes of a trace are popular: each prefix passes some of its sessions on to another.

A random permutation maps each prefix to another one. A share of the sessions, drawn at random, is replaced.
If such a session begins with prefix p, its place is taken by a copy of a random session (the donor) that
begins with the prefix to which p is mapped. The copy starts when the old session did. In this way common
prefixes may become rare, and rare ones common. A request outside of sessions is a session by itself.

Only the longest stable prefixes (prefix_placing.py) take part, which no other stable prefix continues.
Requests that begin with a shorter stable prefix, or with none, are not replaced.
"""

from dataclasses import replace

import numpy as np

from planner.search.prefixes.prefix_placing import stable_nodes
from planner.traffic.prefixes import block_uses, prefix_tree
from planner.traffic.scaling import combine_parts, with_own_blocks
from planner.traffic.sessions import first_rows, session_numbers
from planner.traffic.trace import IntArray, Trace


def drift_popularity(trace: Trace, drift_frac: float, rng: np.random.Generator) -> Trace:
    """The trace with a share `drift_frac` of its sessions replaced; the trace itself if it has fewer than two
    prefixes that take part.
    """
    if not trace.duration_s > 0:  # Requests that all arrive at once have no stable prefixes.
        return trace
    # Without waits between requests (`after`) each request is a session by itself.
    session = session_numbers(trace) if trace.after.size else np.arange(len(trace))
    first_request = first_rows(session)
    prefix = begun_prefixes(trace)[first_request]  # The prefix of each session.
    prefixes = np.unique(prefix[prefix >= 0])
    if len(prefixes) < 2 or not drift_frac > 0:
        return trace
    circle = rng.permutation(prefixes)
    # Each prefix is mapped to the next one in a random circle, so never to itself.
    mapped_prefix = dict(zip(circle.tolist(), np.roll(circle, -1).tolist(), strict=True))
    sessions_of = {p: np.flatnonzero(prefix == p) for p in prefixes.tolist()}
    replaced = np.flatnonzero((prefix >= 0) & (rng.random(len(prefix)) < drift_frac))
    # `combine_parts` takes each session at most once per part. So the first part has the sessions that are
    # not replaced, and after it the k-th of `copy_parts` has the k-th copies: (donor, seconds by which it
    # moves).
    copies = np.zeros(len(prefix), np.int64)  # How many copies each session has so far.
    copy_parts: list[list[tuple[int, float]]] = []
    for old in replaced.tolist():
        donor = int(rng.choice(sessions_of[mapped_prefix[int(prefix[old])]]))
        if copies[donor] == len(copy_parts):
            copy_parts.append([])
        shift_s = float(trace.arrival_s[first_request[old]] - trace.arrival_s[first_request[donor]])
        copy_parts[copies[donor]].append((donor, shift_s))
        copies[donor] += 1
    stays = np.ones(len(prefix), bool)
    stays[replaced] = False
    part_rows = [np.flatnonzero(stays[session])]  # The requests of each part.
    arrival_s = [trace.arrival_s[part_rows[0]]]
    for part in copy_parts:
        shift_by_session = np.full(len(prefix), np.nan)
        for donor, shift_s in part:
            shift_by_session[donor] = shift_s
        copied_rows = np.flatnonzero(~np.isnan(shift_by_session[session]))
        part_rows.append(copied_rows)
        arrival_s.append(trace.arrival_s[copied_rows] + shift_by_session[session[copied_rows]])
    combined = combine_parts(trace, part_rows, arrival_s)
    if not trace.after.size:
        # A copy must share no more with its donor than any other request does. So the blocks that only the
        # donor has get new ids in the copy, and copies share prefixes only if their donors did. With waits
        # between requests `combine_parts` has done this already.
        part_number = np.repeat(np.arange(len(part_rows)), [len(rows) for rows in part_rows])
        by_arrival = np.argsort(np.concatenate(arrival_s), kind="stable")
        combined = replace(
            with_own_blocks(combined, trace, np.concatenate(part_rows)[by_arrival], part_number[by_arrival]),
            copies_share_prefixes=trace.copies_share_prefixes,
        )
    note = f"{100 * drift_frac:g} % of the popularity of {len(prefixes)} prefixes moved to others"
    start_s = combined.arrival_s[0]
    return replace(combined, arrival_s=combined.arrival_s - start_s, notes=(*trace.notes, note))


def may_drift(trace: Trace) -> bool:
    """Whether there are two prefixes that could change their popularity."""
    prefix = begun_prefixes(trace)
    return len(np.unique(prefix[prefix >= 0])) > 1


def begun_prefixes(trace: Trace) -> IntArray:
    """(n,): the longest stable prefix with which each request begins, as a node of the tree.

    -1 for requests that begin with no stable prefix, and where a longer stable prefix of other requests
    continues the one that was found.
    """
    tree = prefix_tree(block_uses(trace))
    stable = stable_nodes(trace, tree)
    # Whether a node is stable and no stable node continues it. The entry at the end is for the index -1, the
    # parent of the root.
    is_end = np.zeros(len(tree) + 1, bool)
    is_end[stable] = True
    is_end[tree.parent[stable]] = False
    # Begin at the node with which each prompt ends. Each round moves the requests that are at no node of
    # `is_end` one level up, at last to -1.
    node = tree.end.copy()
    while len(unfinished := np.flatnonzero((node >= 0) & ~is_end[node])):
        node[unfinished] = tree.parent[node[unfinished]]
    return node
