"""Requests that wait, in a heap by key or in a list, first in, first out: linked by their own fields."""

from __future__ import annotations

from planner.simulator.layout import NONE
from planner.simulator.numba_compile import kernel_jit, small_jit


@kernel_jit
def meld(requests, a, b):
    """The root of two skew heaps made one: smallest key first, among equals the smallest index."""
    if a == NONE:
        return b
    if b == NONE:
        return a
    if requests[b].key < requests[a].key or (requests[b].key == requests[a].key and b < a):
        a, b = b, a
    root = a
    while True:
        right = requests[a].right
        requests[a].right = requests[a].left
        if right == NONE:
            requests[a].left = b
            return root
        if requests[b].key < requests[right].key or (requests[b].key == requests[right].key and b < right):
            right, b = b, right
        requests[a].left = right
        a = right


@kernel_jit
def put(requests, root, r, key):
    """The root of a heap with request r in it."""
    requests[r].key = key
    requests[r].left = NONE
    requests[r].right = NONE
    return meld(requests, root, r)


@small_jit
def without_root(requests, root):
    return meld(requests, requests[root].left, requests[root].right)


@kernel_jit
def append(requests, owner, which, r):
    """Put request r at the end of a list of `owner`, a worker or a rank."""
    requests[r].next = NONE
    if owner.head[which] == NONE:
        owner.head[which] = r
    else:
        requests[owner.tail[which]].next = r
    owner.tail[which] = r


@small_jit
def pop(requests, owner, which):
    r = owner.head[which]
    owner.head[which] = requests[r].next
    return r


@kernel_jit
def drop(requests, owner, which, r):
    """Take request r out of a list of `owner`, in which it is."""
    before, at = NONE, owner.head[which]
    while at != r:
        before, at = at, requests[at].next
    if before == NONE:
        owner.head[which] = requests[r].next
    else:
        requests[before].next = requests[r].next
    if owner.tail[which] == r:
        owner.tail[which] = before
