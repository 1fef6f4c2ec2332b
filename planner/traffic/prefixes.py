"""What the prompts of a trace share: its prefix tree, the tokens that hit a prefix cache of any size, and the
time between uses of a block.

A node of the tree is a series of blocks that the same requests use; after it these requests go on with
different blocks, or some of them end. Nodes are numbered by first use, so a parent has a lower number than
its children.

Hit ratios are those of one LRU cache of blocks, which has the blocks of a request as soon as the request
arrives. A block hits only if all blocks before it in its prompt hit. A request uses its last block first and
its first block last, as engines do when they free blocks. So a parent was never used longer ago than its
child, and LRU evicts leaves. Such a cache is a stack: a block hits in every cache larger than its stack
distance, the number of distinct blocks used since its last use (Mattson et al. 1970), so one pass gives the
curve for all sizes. Blocks of a path that were last used by the same request lie together in the stack. So a
Fenwick tree over requests, which are fewer than blocks, is enough to find the distances.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.errors import InputError, TraceError
from planner.files.code_cache import cached_jit
from planner.traffic.trace import MOST_MEAN_IDS, FloatArray, IntArray, Trace, index_ranges
from planner.traffic.workload import PrefixSharing

Int32Array = npt.NDArray[np.int32]
compiled = cached_jit(nogil=True)  # Numba machine code, kept on disk; it runs without the interpreter's lock.

GAP_PERCENTILES = (10, 50, 90, 99)  # PrefixSummary has these percentiles of the time between uses of a block.
WINDOW_S = 180.0  # The working set is counted in windows of this length.
# `alike_tokens_frac` reads at most this many block ids, which takes a second and is enough for a share.
MOST_IDS_READ = 5_000_000
MOST_CACHED_IDS = 100_000_000  # The nodes of this many block ids are cached in memory, which takes 0.4 GB.
ROUND_ROBIN_WORKERS = (4, 8, 16)  # The numbers of workers for which hits under blind routing are shown.
# The sizes of caches, in tokens, at which the curve of hits is shown.
CACHE_TOKENS = tuple(digit * 10**power for power in (5, 6, 7) for digit in (1, 2, 3, 5))


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """The tree as arrays (V,), one entry per node, parents first; n is the number of requests.

    `parent` is -1 for roots. A node has `blocks` blocks with `tokens` tokens together, which come after the
    `start_tokens` of its ancestors; `requests` prompts contain it. `end` (n,) is the deepest node of each
    request, -1 if it has none; `first_request` (V,) is the request that used the node first.
    """

    parent: IntArray
    start_tokens: IntArray
    tokens: IntArray
    blocks: IntArray
    requests: IntArray
    first_request: IntArray
    end: IntArray

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def depth(self) -> IntArray:
        """(V,): the number of nodes from the root to each node; 1 for a root."""
        # In each round all nodes go up by one parent, until no node has a parent left.
        depth = np.ones(len(self), np.int64)
        above = self.parent
        while (has_parent := above >= 0).any():
            depth += has_parent
            above = np.where(has_parent, self.parent[above], -1)
        return depth

    def key_nodes(self) -> IntArray:
        """(V,): for each node the deepest node on its path, which may be itself, that has more tokens than
        all nodes before it together (Preble's key portion); the root of the path if there is none.
        """
        is_key = self.tokens > self.start_tokens
        nearest = np.where(is_key | (self.parent < 0), np.arange(len(self)), self.parent)
        # Each round doubles the number of ancestors among which every node has searched.
        while ((further := nearest[nearest]) != nearest).any():
            nearest = further
        return nearest


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The uses of blocks in a trace: arrays (m,) like `Trace.prefix_ids`, cut into requests by `offsets`
    (n + 1,).

    A block is identified by the block before it and its own id. Here each of the V distinct blocks is a node,
    numbered by first use; `prefix_tree` merges them. `node` (m,) is that of each use, `parent` (V,) the block
    before each, -1 for a first block. `tokens` (m,) are a block's, fewer if the prompt ends within it.
    """

    offsets: IntArray
    node: Int32Array
    parent: Int32Array
    tokens: Int32Array

    @property
    def owner(self) -> Int32Array:
        """(m,): the request of every use."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int32), np.diff(self.offsets))


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """For every use of a block (m,): `previous` is the last request that used it before, and `distance` how
    many other blocks were used in between. Both are -1 at the first use of a block.
    """

    previous: Int32Array
    distance: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class HitCurve:
    """`hit_tokens` (D,): tokens that hit in LRU caches of 0, 1, ..., D - 1 blocks; more blocks add none."""

    block_tokens: int
    input_tokens: int
    hit_tokens: FloatArray

    def at(self, cache_tokens: npt.ArrayLike) -> FloatArray:
        """Share of input tokens that hit with a cache of this many tokens, in whole blocks."""
        cache_blocks = np.asarray(cache_tokens, dtype=float) // self.block_tokens
        index = np.minimum(cache_blocks, len(self.hit_tokens) - 1).astype(np.int64)
        return np.asarray(self.hit_tokens[index] / self.input_tokens)

    @property
    def infinite_frac(self) -> float:
        """The share of hits with a cache that evicts nothing."""
        return float(self.hit_tokens[-1] / self.input_tokens)

    def concave(self) -> tuple[FloatArray, FloatArray]:
        """Corners (cache tokens, hit tokens) of the least concave curve above, for prefix_replication.py."""
        size, hits = [0], [0.0]
        for blocks in _hull(self.hit_tokens).tolist():
            size.append(blocks * self.block_tokens)
            hits.append(float(self.hit_tokens[blocks]))
        return np.array(size, float), np.array(hits)


def block_uses(trace: Trace) -> Blocks:
    """Give every block of every prompt its node; raises TraceError without block ids."""
    if not trace.has_prefixes:
        raise TraceError(
            f"{trace.name}: has no block ids; needs a column hash_ids or prefix_ids, as in Mooncake"
        )
    node, parent = _nodes_of(trace)
    tokens = np.full(len(node), trace.prefix_block_tokens, np.int32)
    blocks = np.diff(trace.prefix_offsets)
    last_use = trace.prefix_offsets[1:][blocks > 0] - 1
    tokens_in_last = trace.input_tokens - (blocks - 1) * trace.prefix_block_tokens
    tokens[last_use] = np.minimum(tokens_in_last[blocks > 0], trace.prefix_block_tokens)
    return Blocks(trace.prefix_offsets, node, parent, tokens)


def no_block_uses(requests: int) -> Blocks:
    """No uses of blocks, for a trace of this many requests that has no block ids."""
    empty = np.zeros(0, np.int32)
    return Blocks(np.zeros(requests + 1, np.int64), empty, empty, empty)


# Every simulation with prefix caches needs the nodes of its traffic, so the nodes of the latest traces are
# cached, up to MOST_CACHED_IDS, as long as the traces are in memory.
_cached_nodes: weakref.WeakKeyDictionary[Trace, tuple[Int32Array, Int32Array]] = weakref.WeakKeyDictionary()
_cache_lock = threading.Lock()


def _nodes_of(trace: Trace) -> tuple[Int32Array, Int32Array]:
    """The node of every use of a block, and each node's parent. Callers must not write into these arrays."""
    with _cache_lock:
        nodes = _cached_nodes.get(trace)
    if nodes is None:
        nodes = _nodes(trace.prefix_offsets, trace.prefix_ids)
        with _cache_lock:
            _cached_nodes[trace] = nodes
            cached_ids = sum(len(node) for node, _ in _cached_nodes.values())
            for oldest in list(_cached_nodes):
                if cached_ids <= MOST_CACHED_IDS:
                    break
                cached_ids -= len(_cached_nodes.pop(oldest)[0])
    return nodes


def with_larger_blocks(trace: Trace) -> Trace:
    """The trace with 2, 4, 8, ... blocks joined into one if prompts have more than MOST_MEAN_IDS blocks on
    average; else the trace itself. Blocks at the end of a prompt that do not fill a joined block lose their
    ids.
    """
    joined = 1
    while len(trace.prefix_ids) > joined * MOST_MEAN_IDS * len(trace):
        joined *= 2
    if joined == 1:
        return trace
    blocks = block_uses(trace)
    counts = np.diff(blocks.offsets) // joined
    offsets = np.concatenate(([0], np.cumsum(counts)))
    number = index_ranges(np.zeros_like(counts), counts)  # The index of each joined block in its prompt.
    # The node of a block stands for it and all blocks before it, so the node of the last block is the id.
    last = np.repeat(blocks.offsets[:-1], counts) + joined * (number + 1) - 1
    tokens = joined * trace.prefix_block_tokens
    return replace(
        trace,
        prefix_offsets=offsets,
        prefix_ids=blocks.node[last].astype(np.int64),
        prefix_block_tokens=tokens,
        notes=(
            *trace.notes,
            f"prefixes are in blocks of {tokens} tokens ({trace.prefix_block_tokens} in the file), because "
            f"prompts have {len(trace.prefix_ids) / len(trace):,.0f} blocks in the mean",
        ),
    )


def alike_tokens_frac(trace: Trace) -> float:
    """The share of input tokens that hit one prefix cache that evicts nothing. Only the first
    requests of a long trace count, up to MOST_IDS_READ block ids.
    """
    requests_read = int(np.searchsorted(trace.prefix_offsets, MOST_IDS_READ, "right")) - 1
    if requests_read < len(trace):
        trace = trace.select(np.arange(max(requests_read, 1)))
    blocks = block_uses(trace)
    first_uses = np.unique(blocks.node, return_index=True)[1]
    hit_tokens = blocks.tokens.sum() - blocks.tokens[first_uses].sum()
    return float(hit_tokens / trace.input_tokens.sum())


def with_longer_prompts(trace: Trace, more_frac: float) -> Trace:
    """The same requests with prompts longer by this share. Their blocks with ids grow in number likewise, so
    two prompts share as large a part as before. Answers keep their lengths.

    Some blocks are repeated to fill the longer prompt; each repetition gets an id of its own.
    """
    factor = 1 + more_frac
    longer_prompts = np.ceil(trace.input_tokens * factor).astype(np.int64)
    if not trace.has_prefixes:
        return replace(trace, input_tokens=longer_prompts)
    blocks = np.diff(trace.prefix_offsets)
    most_blocks = -(-longer_prompts // trace.prefix_block_tokens)  # Rounded up: the last may be partial.
    longer_blocks = np.minimum((blocks * factor).astype(np.int64), most_blocks)
    offsets = np.concatenate(([0], np.cumsum(longer_blocks)))
    # The place of each new block in its prompt, and the place of the old block that it repeats.
    place = index_ranges(np.zeros_like(longer_blocks), longer_blocks)
    old_place = (np.arange(longer_blocks.max(initial=0)) / factor).astype(np.int64)
    repetition = np.arange(len(old_place)) - np.searchsorted(old_place, old_place)
    old_ids = trace.prefix_ids[np.repeat(trace.prefix_offsets[:-1], longer_blocks) + old_place[place]]
    ids = old_ids * (repetition.max(initial=0) + 1) + repetition[place]
    return replace(trace, input_tokens=longer_prompts, prefix_offsets=offsets, prefix_ids=ids)


def prefix_tree(blocks: Blocks) -> PrefixTree:
    """Merge blocks that the same requests use into nodes."""
    node, parent = blocks.node, blocks.parent
    requests = np.bincount(node, minlength=len(parent))
    is_head = (parent < 0) | (requests != requests[parent])
    # A head is the first block of a node of the tree. Any other block was first used right after its parent,
    # so its number is its parent's plus one, and the number of heads up to a block gives its node in the
    # tree.
    merged = np.cumsum(is_head) - 1
    heads = np.flatnonzero(is_head)
    tokens = np.zeros(len(parent), np.int32)
    # A use has fewer tokens if its prompt ends within the block, so a block has the most tokens of any use.
    np.maximum.at(tokens, node, blocks.tokens)
    owner = blocks.owner
    depth, first_request = np.zeros(len(parent), np.int64), np.zeros(len(parent), np.int64)
    depth[node] = np.arange(len(node)) - blocks.offsets[owner]
    # Uses are written from the last to the first, so that the first use of a block is written over the
    # others.
    backwards = slice(None, None, -1)
    first_request[node[backwards]] = owner[backwards]
    block_tokens = int(tokens.max(initial=0))
    counts = np.diff(blocks.offsets)
    end = np.full(len(counts), -1, np.int64)
    end[counts > 0] = merged[node[blocks.offsets[1:][counts > 0] - 1]]
    return PrefixTree(
        parent=np.where(parent[heads] >= 0, merged[parent[heads]], -1),
        start_tokens=depth[heads] * block_tokens,
        tokens=np.bincount(merged, weights=tokens).astype(np.int64),
        blocks=np.bincount(merged),
        requests=requests[heads],
        first_request=first_request[heads],
        end=end,
    )


def stack_distances(offsets: IntArray, node: Int32Array, nodes: int) -> Reuse:
    """Previous users and stack distances of block uses; each request's nodes must be a path from a root."""
    previous, distance = _reuse(offsets, node, nodes)
    return Reuse(previous, distance)


def hit_curve(trace: Trace, tokens: npt.NDArray[Any], reuse: Reuse) -> HitCurve:
    """Hits by cache size for one LRU cache that all requests share. `tokens` (m,) is what a hit counts at
    each use of a block: its tokens, or another weight.
    """
    return HitCurve(trace.prefix_block_tokens, int(trace.input_tokens.sum()), _hit_tokens(tokens, reuse))


def round_robin_curve(trace: Trace, replicas: int) -> HitCurve:
    """Hits by cache size for `replicas` LRU caches of that size each, to which requests go in turn."""
    if replicas < 1:
        raise InputError(f"replicas: expected at least 1, found {replicas}")
    by_replica = []
    for r in range(min(replicas, len(trace))):  # More replicas than requests get none.
        blocks = block_uses(trace.select(np.arange(r, len(trace), replicas)))
        reuse = stack_distances(blocks.offsets, blocks.node, len(blocks.parent))
        by_replica.append(_hit_tokens(blocks.tokens, reuse))
    hits = np.zeros(max(map(len, by_replica)))
    for curve in by_replica:
        # Caches larger than the end of the curve have as many hits as at its end.
        hits += np.pad(curve, (0, len(hits) - len(curve)), mode="edge")
    return HitCurve(trace.prefix_block_tokens, int(trace.input_tokens.sum()), hits)


def _hit_tokens(tokens: npt.NDArray[Any], reuse: Reuse) -> FloatArray:
    """(D,): the tokens that hit in caches of 0, 1, ... blocks. A hit at distance d needs d + 1 blocks."""
    is_hit = reuse.distance >= 0
    tokens_by_blocks = np.bincount(reuse.distance[is_hit] + 1, weights=tokens[is_hit], minlength=1)
    return np.asarray(np.cumsum(tokens_by_blocks), dtype=np.float64)


def working_set_tokens(trace: Trace, blocks: Blocks, reuse: Reuse, window_s: float) -> FloatArray:
    """Distinct tokens used in each whole window from the first arrival on; (windows,), at least one."""
    if not window_s > 0:
        raise InputError(f"window: expected more than 0 s, found {window_s}")
    window_of = ((trace.arrival_s - trace.arrival_s[0]) // window_s).astype(np.int64)
    window = window_of[blocks.owner]
    is_first = (reuse.previous < 0) | (window_of[reuse.previous] != window)
    tokens = np.bincount(window[is_first], weights=blocks.tokens[is_first], minlength=int(window_of[-1]) + 1)
    # The last window is left out if the trace ends within it.
    return np.asarray(tokens[: max(int(trace.duration_s // window_s), 1)], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class MeanAndDeviation:
    """Mean and standard deviation; None for no values."""

    mean: float | None
    sd: float | None

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> MeanAndDeviation:
        """Mean and standard deviation of the values; None for both without values."""
        return cls(float(values.mean()), float(values.std())) if len(values) else cls(None, None)


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """What `plan prefixes` says of a trace.

    `sharing` has the ratios of Mooncake (blocks that hit) and Preble (tokens that another request has too),
    over all tokens. `shared_frac` and `key_frac` are Preble's Table 1: per request, the shared part of the
    prompt and its key portion (`PrefixTree.key_nodes`). `key_requests` counts the requests of every key
    portion that has more than one. `reuse_gap_s` are percentiles of the time since a block's last use, over
    block hits. `hit_frac` maps the size [tokens] of one cache for all requests to the share of input tokens
    that hit; `round_robin_hit_frac` maps a number of workers, each with an endless cache, to the share that
    hits if requests go to them in turn.
    """

    name: str
    requests: int
    sharing: PrefixSharing
    nodes: int
    roots: int
    largest_branching: int
    largest_depth: int
    shared_nodes: int
    shared_node_tokens: int
    distinct_tokens: int
    hottest_node_requests: int
    shared_frac: MeanAndDeviation
    key_frac: MeanAndDeviation
    key_requests: MeanAndDeviation
    reuse_gap_s: dict[int, float]
    window_s: float
    working_set_tokens: MeanAndDeviation
    largest_working_set_tokens: float
    hit_frac: dict[int, float]
    infinite_hit_frac: float
    round_robin_hit_frac: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers as keys become text."""
        plain = asdict(self)
        for name in ("reuse_gap_s", "hit_frac", "round_robin_hit_frac"):
            plain[name] = {str(key): value for key, value in plain[name].items()}
        return plain


def summarise_prefixes(trace: Trace) -> PrefixSummary:
    """Summarise what the prompts of a trace share; raises TraceError without block ids."""
    blocks = block_uses(trace)
    tree = prefix_tree(blocks)
    reuse = stack_distances(blocks.offsets, blocks.node, len(blocks.parent))
    curve = hit_curve(trace, blocks.tokens, reuse)
    is_hit = reuse.previous >= 0
    gap_s = trace.arrival_s[blocks.owner[is_hit]] - trace.arrival_s[reuse.previous[is_hit]]
    sets = working_set_tokens(trace, blocks, reuse, WINDOW_S)
    has_blocks = tree.end >= 0
    key_nodes = tree.key_nodes()[tree.end[has_blocks]]
    key_frac = np.zeros(len(trace))
    key_frac[has_blocks] = tree.tokens[key_nodes] / trace.input_tokens[has_blocks]
    distinct_keys = np.unique(key_nodes)
    shared_keys = distinct_keys[tree.requests[distinct_keys] > 1]
    owner, n = blocks.owner, len(trace)
    hit_tokens = np.bincount(owner, weights=blocks.tokens * is_hit, minlength=n)
    is_shared_use = np.bincount(blocks.node)[blocks.node] > 1
    shared_tokens = np.bincount(owner, weights=blocks.tokens * is_shared_use, minlength=n)
    is_shared = tree.requests > 1
    children = np.bincount(tree.parent[tree.parent >= 0], minlength=1)
    percentiles = np.percentile(gap_s, GAP_PERCENTILES).tolist() if len(gap_s) else []
    return PrefixSummary(
        name=trace.name,
        requests=len(trace),
        sharing=PrefixSharing(
            block_tokens=trace.prefix_block_tokens,
            blocks=len(blocks.node),
            distinct_blocks=len(blocks.parent),
            block_hit_frac=float(is_hit.mean()),
            token_hit_frac=curve.infinite_frac,
            request_hit_frac=float((hit_tokens / trace.input_tokens).mean()),
            shared_token_frac=float(shared_tokens.sum() / trace.input_tokens.sum()),
        ),
        nodes=len(tree),
        roots=int((tree.parent < 0).sum()),
        largest_branching=int(children.max()),
        largest_depth=int(tree.depth.max()),
        shared_nodes=int(is_shared.sum()),
        shared_node_tokens=int(tree.tokens[is_shared].sum()),
        distinct_tokens=int(tree.tokens.sum()),
        hottest_node_requests=int(tree.requests.max()),
        shared_frac=MeanAndDeviation.of(shared_tokens / trace.input_tokens),
        key_frac=MeanAndDeviation.of(key_frac),
        key_requests=MeanAndDeviation.of(tree.requests[shared_keys]),
        reuse_gap_s=dict(zip(GAP_PERCENTILES, percentiles, strict=False)),  # Without hits there are none.
        window_s=WINDOW_S,
        working_set_tokens=MeanAndDeviation.of(sets),
        largest_working_set_tokens=float(sets.max()),
        hit_frac={size: float(curve.at(size)) for size in CACHE_TOKENS},
        infinite_hit_frac=curve.infinite_frac,
        round_robin_hit_frac={
            count: round_robin_curve(trace, count).infinite_frac for count in ROUND_ROBIN_WORKERS
        },
    )


@compiled
def _nodes(offsets: IntArray, ids: IntArray) -> tuple[Int32Array, Int32Array]:
    """The arrays `node` and `parent` of `Blocks`: the number of the pair (parent, id) of every use.

    A hash table with open addressing finds the pairs; a slot holds a number, -1 if it is free. Turns of a
    session repeat all that was said before. So where a pair is found, the blocks after it are first compared
    with those of the last prompt that had the pair, and the table is needed again only where they differ.
    """
    node = np.empty(len(ids), np.int32)
    room = 1 << 16  # Pairs that fit at first; doubled when full.
    table = np.full(2 * room, -1, np.int32)
    # `user` is the last request that used the pair.
    parent, block, user = np.empty(room, np.int32), np.empty(room, np.int64), np.empty(room, np.int32)
    count = 0
    for i in range(len(offsets) - 1):
        above, k, end = -1, offsets[i], offsets[i + 1]
        while k < end:
            place = _hash(above, ids[k]) & (len(table) - 1)  # The table's length is a power of 2.
            while table[place] >= 0 and (parent[table[place]] != above or block[table[place]] != ids[k]):
                place = (place + 1) & (len(table) - 1)
            if table[place] < 0:
                if count == room:
                    room *= 2
                    parent = np.concatenate((parent, np.empty(count, np.int32)))
                    block = np.concatenate((block, np.empty(count, np.int64)))
                    user = np.concatenate((user, np.empty(count, np.int32)))
                    table = np.full(2 * room, -1, np.int32)
                    for v in range(count):
                        place = _hash(parent[v], block[v]) & (len(table) - 1)
                        while table[place] >= 0:
                            place = (place + 1) & (len(table) - 1)
                        table[place] = v
                    place = _hash(above, ids[k]) & (len(table) - 1)
                    while table[place] >= 0:
                        place = (place + 1) & (len(table) - 1)
                table[place] = count
                parent[count], block[count], user[count] = above, ids[k], i
                count += 1
            above = table[place]
            node[k], other = above, user[above]
            user[above] = i
            k += 1
            if other == i:
                continue
            # Both prompts have the same blocks so far, so this use is at the same place in both.
            at, other_end = offsets[other] + k - offsets[i], offsets[other + 1]
            while k < end and at < other_end and ids[k] == ids[at]:
                above = node[at]
                node[k], user[above] = above, i
                k, at = k + 1, at + 1
    return node, parent[:count].copy()


@compiled
def _hash(above: int, block: int) -> np.int64:
    """A hash of the pair. Both numbers are multiplied by odd constants (2^64 / golden ratio, a prime), and
    the high bits, which are mixed best, are folded down; the shifts are set by hand.
    """
    mixed = np.uint64(block) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(above + 1) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64((mixed ^ (mixed >> np.uint64(29))) >> np.uint64(3))


@compiled
def _reuse(offsets: IntArray, node: Int32Array, nodes: int) -> tuple[Int32Array, Int32Array]:
    """The arrays of `Reuse`. `count`, a Fenwick tree, says how many blocks each request used last."""
    requests = len(offsets) - 1
    last = np.full(nodes, -1, np.int32)
    count = np.zeros(requests + 1, np.int64)
    previous, distance = np.full(len(node), -1, np.int32), np.full(len(node), -1, np.int32)
    used = 0  # Distinct blocks so far.
    for i in range(requests):
        at, end = offsets[i], offsets[i + 1]
        # Blocks of a prompt that were used before come before its new ones. Old blocks that the same
        # request used last lie together in the stack, and are handled together.
        while at < end and last[node[at]] >= 0:
            user = last[node[at]]
            older, k = 0, user + 1  # `older`: blocks last used by `user` or an earlier request.
            while k > 0:
                older += count[k]
                k -= k & -k
            first = at
            while at < end and last[node[at]] == user:
                previous[at], distance[at] = user, used - older + (at - first)
                at += 1
            k = user + 1  # `user` is no longer the last to have used these blocks.
            while k <= requests:
                count[k] -= at - first
                k += k & -k
        used += end - at
        k = i + 1  # Request i has used all blocks of its prompt last.
        while k <= requests:
            count[k] += end - offsets[i]
            k += k & -k
        for position in range(offsets[i], end):
            last[node[position]] = i
    return previous, distance


@compiled
def _hull(values: FloatArray) -> IntArray:
    """The indices above 0 of the corners of the upper hull of the points (i, values[i]); values rise from 0.
    A corner is removed if it lies below the line from the corner before it to a later point.
    """
    corners = np.zeros(len(values), np.int64)
    count = 1
    for i in range(1, len(values)):
        while count > 1:
            a, b = corners[count - 2], corners[count - 1]
            if (values[b] - values[a]) * (i - a) > (values[i] - values[a]) * (b - a):
                break
            count -= 1
        if values[i] > values[corners[count - 1]]:
            corners[count] = i
            count += 1
    return corners[1:count]
