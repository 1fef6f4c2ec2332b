"""Queues of requests in the kernel: skew heaps by key, and linked lists, first in first out.

A request is an index into the array `requests` (REQUEST in layout.py), NONE for no request. Its fields `left`
and `right` are its children in a heap, `next` is its successor in a list; so it is in one heap and one list
at most. A heap is given by its root. A list is a pair of fields of its owner, a worker or a rank:
`head[list_number]`, its first request, and `tail[list_number]`, its last one.
"""

from __future__ import annotations

from planner.simulator.layout import NONE
from planner.simulator.numba_compile import kernel_jit, small_jit


@small_jit
def _precedes(requests, a, b):
    """Whether request a comes before b in a heap: by key, of equal ones by arrival, then by index."""
    if requests[a].key != requests[b].key:
        return requests[a].key < requests[b].key
    if requests[a].arrival_s != requests[b].arrival_s:
        return requests[a].arrival_s < requests[b].arrival_s
    return a < b


@kernel_jit
def meld_heaps(requests, a, b):
    """Merge the skew heaps with the roots a and b, and return the new root: the request with the smallest
    key, of equal ones the first to arrive, and of these the one with the smallest index.
    """
    if a == NONE:
        return b
    if b == NONE:
        return a
    if _precedes(requests, b, a):
        a, b = b, a
    root = a
    while True:
        right = requests[a].right
        requests[a].right = requests[a].left  # A skew heap swaps the children of each request that it passes.
        if right == NONE:
            requests[a].left = b
            return root
        if _precedes(requests, b, right):
            right, b = b, right
        requests[a].left = right
        a = right


@kernel_jit
def insert_in_heap(requests, root, r, key):
    """Insert request r with this key into a heap and return its new root."""
    requests[r].key = key
    requests[r].left = NONE
    requests[r].right = NONE
    return meld_heaps(requests, root, r)


@small_jit
def remove_root(requests, root):
    """Remove the root of a heap and return the new root."""
    return meld_heaps(requests, requests[root].left, requests[root].right)


@kernel_jit
def append_to_list(requests, owner, list_number, r):
    """Put request r at the end of list `list_number` of `owner`."""
    requests[r].next = NONE
    if owner.head[list_number] == NONE:
        owner.head[list_number] = r
    else:
        requests[owner.tail[list_number]].next = r
    owner.tail[list_number] = r


@small_jit
def pop_first(requests, owner, list_number):
    """Take the first request out of list `list_number` of `owner`, which is not empty, and return it."""
    r = owner.head[list_number]
    owner.head[list_number] = requests[r].next  # The tail of an empty list is not used, and may stay.
    return r


@kernel_jit
def remove_from_list(requests, owner, list_number, r):
    """Take request r out of list `list_number` of `owner`. It must be in that list."""
    previous, current = NONE, owner.head[list_number]
    while current != r:
        previous, current = current, requests[current].next
    if previous == NONE:
        owner.head[list_number] = requests[r].next
    else:
        requests[previous].next = requests[r].next
    if owner.tail[list_number] == r:
        owner.tail[list_number] = previous
