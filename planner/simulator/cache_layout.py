"""The arrays in which the simulator keeps prefix caches, made from a fleet and a trace; caches.py changes
them.

A node (of the prefix tree, not a machine) stands for a block of TREE_NODE_TOKENS tokens and all blocks before
it: two prompts share the node if they agree up to the block's end. The block is as large as TREE_NODE_BLOCKS
KV blocks. Every copy of a node on a worker is an entry. The entries of all workers are in one array, and a
hash index leads to the first copy of each node on each worker. When a request leaves, its blocks that belong
to no node, above all those of its output, become one entry too.

Routing e2 (of the paper on Preble) counts for each worker how many of the recent requests share a node. These
are the requests that were routed in the last WINDOW_S seconds, called e2's window. An entry remains in the
array while a request of the window shares it, even after its copy was evicted.

Policies that count tenants keep their counters here too. If such a policy is used without prefix caches, the
caches hold nothing: no prompt has a node, and no block stays when a request leaves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.fleet import Fleet, Policies, WorkerType
from planner.simulator.layout import NONE, empty_field
from planner.traffic.prefixes import Blocks, block_uses, no_block_uses
from planner.traffic.trace import Trace

ENTRY = np.dtype(
    [
        # Its node; -2 - r for the blocks that request r left behind and that belong to no node.
        ("node", "i4"),
        ("worker", "i4"),
        ("refs", "i4"),  # Running requests that use it; with 0 it is in the worker's list of idle entries.
        # Whether it is in the worker's list of late entries (CACHE). If so, `refs` counts the list as one
        # more.
        ("is_late", "i4"),
        ("blocks", "i4"),  # KV blocks that it takes.
        ("twin", "i4"),  # The next copy of the same node on this worker.
        ("is_cached", "i4"),  # 0 after its copy was evicted.
        ("is_on_disk", "i4"),  # Whether a node of CPU memory has left that for the disk behind it.
        # `CACHE.taken_blocks` of its worker when the attention window at the end of its node was used last.
        ("window_at", "f4"),
        ("older", "i4"),  # The idle, or late, entry that was used last before it.
        # The idle, or late, entry that was used next after it. A free entry, number e, has here the number of
        # the next free entry less e + 1. So an array of zeros is a list of free entries in order.
        ("newer", "i4"),
        ("window_uses", "i4"),  # Requests of e2's window on this worker whose prompt has the node.
    ]
)
PROMPT = np.dtype(
    [
        ("start", "i8"),  # Its nodes are path[start : start + depth].
        ("depth", "i8"),
        ("used_tree_nodes", "i8"),  # How many nodes of its worker's cache it uses, from the first on.
        ("shown_tree_nodes", "i8"),  # How many of these the router knows of.
        # KV blocks of these nodes of which it has copies of its own: the last ones, if computed again.
        ("own_blocks", "i8"),
        ("left", "i8"),  # The entry of the blocks that it left behind besides nodes; NONE if there is none.
        # Tokens that the router took to be cached, and so did not count among those that wait for a prefill.
        ("expected_tokens", "i8"),
        ("hit_tokens", "i8"),  # Tokens found cached when it was first admitted, NONE before.
        ("tenant", "i8"),
        ("group", "i8"),  # Queue preble: its priority group when the queue last looked at it.
        # Queues dlpm-turns and dlpm-held: its place in the engine's queue; the smallest goes first.
        ("place", "f8"),
        # Queue dlpm-held: the tokens that it adds to its worker's `sent_tokens`; 0 while it adds none.
        ("sent_tokens", "i8"),
        # Its entry in e2's window, which is a linked list in the order of routing.
        ("next", "i8"),  # The request that was routed after it.
        ("worker", "i8"),  # Its worker; NONE if it is not in the window.
        ("routed_s", "f8"),
        ("prefill_s", "f8"),
        ("output_tokens", "i8"),  # NONE until it has finished.
        # The last node of its key portion, as Preble calls what it shares with others; NONE if it shares
        # nothing.
        ("prefix", "i8"),
        ("queue_s", "f8"),  # Seconds from its arrival until it was first admitted, -1.0 before.
        ("is_in_later_half", "i8"),  # Whether it was routed in the later half of e2's window.
    ]
)
CACHE = np.dtype(
    [
        ("oldest", "i8"),  # The list of idle entries, which no running request uses.
        ("newest", "i8"),
        ("idle_blocks", "i8"),  # The KV blocks of idle entries.
        # The list of late entries. The last request that used such an entry left when an asynchronous engine
        # had already formed the next step, in which the entry counts as used. It is idle once that step
        # began.
        ("first_late", "i8"),
        ("last_late", "i8"),
        # KV blocks that tokens and their attention windows have taken since the start of the simulation.
        ("taken_blocks", "f8"),
        ("known_tree_nodes", "i8"),  # How many nodes the worker has, as far as the router knows.
        ("last_waiting", "i8"),  # The last of the prompts that wait at the worker, NONE without any.
        ("served_tenant", "i8"),  # The tenant of the prompt admitted last, NONE before.
        ("turn", "f8"),  # Queue dlpm-turns: the latest turn from which a prompt was admitted.
        # Queue dlpm-held: how many prompts were sent to the worker so far; those of them whose first token is
        # not out; and the tokens of these that the router took not to be cached when it sent them.
        ("ever_sent", "f8"),
        ("sent_prompts", "i8"),
        ("sent_tokens", "i8"),
        # The worker's requests in e2's window:
        ("routed", "i8"),  # How many there are.
        ("finished", "i8"),  # How many of them have finished.
        ("output_tokens", "i8"),  # The output tokens of those that have finished.
        ("prefill_s", "f8"),  # Seconds of the prefills of all of them.
        ("decode_s", "f8"),  # Seconds of their decodes, as expected when the last request was routed.
        ("token_s", "f8"),  # Seconds to prefill a token (`prefill_token_s`).
        ("output_s", "f8"),  # Seconds to decode a token (`output_token_s`).
        # Used only while prefix_routing.py divides subtrees: the load of those given to this worker so far.
        ("split_s", "f8"),
    ]
)
PREFIX = np.dtype(
    [
        # The sum and the number of the waits for admission of requests whose key portion it ends, in the
        # first and the second half of e2's window.
        ("wait_s", "f8", 2),
        ("wait_count", "i8", 2),
        ("replicated_s", "f8"),  # When it was replicated last, -inf for never.
        ("home", "i8"),  # The worker for its prompts since its parent was replicated, NONE if it was not.
        # Used only while prefix_routing.py divides subtrees: the load of the subtree that begins with the
        # node.
        ("load_s", "f8"),
    ]
)
TENANT = np.dtype(  # A tenant on one worker. queue_orders.py says what service, credit and turns are.
    [
        ("waiting", "i8"),  # Its prompts that wait.
        ("served", "f8"),  # Queue vtc: the service that counts as given to it, divided by its weight.
        ("credit", "f8"),  # Queues dlpm and dlpm-held: the service that it may still be given.
        ("sent", "f8"),  # Queue dlpm-turns: the service of what was sent, and of turns begun without it.
    ]
)
# A notice tells the router at `time_s` that a worker has evicted a node.
NOTICE = np.dtype([("time_s", "f8"), ("worker", "i8"), ("node", "i8")])

# Indices into `Caches.numbers`.
(
    TREE_NODE_TOKENS,  # Tokens of a node.
    TREE_NODE_BLOCKS,  # KV blocks of a node.
    FREE,  # The first free entry, NONE without any entries.
    FIRST_ROUTED,  # The first request in e2's window.
    FIRST_IN_LATER_HALF,  # The first request in the later half of e2's window.
    LAST_ROUTED,  # The last request in e2's window.
    FIRST_NOTICE,  # The first notice under way, as a place in `Caches.notices`.
    NOTICES,  # How many notices are under way.
    NODELESS,  # How many more entries may be made for blocks of no node, so that nodes find entries too.
) = range(9)
NUMBERS = 9
# Indices into `Caches.settings`. `_setting_values` says which parameter of `Policies` each is.
(
    EXTEND_WEIGHT,
    OUTPUT_WEIGHT,
    QUANTUM_TOKENS,
    WORKER_QUANTUM_TOKENS,
    WINDOW_S,
    BALANCE_RATIO,
    DECODE_FRAC,
    MATCH_FRAC,
    BALANCE_REQUESTS,
    NOTICE_S,
    REPLICATE_RATIO,
) = range(11)
SETTINGS = 11


class Caches(NamedTuple):
    """The caches of all workers, and what routers and queues keep of them.

    W workers, n requests, m nodes of all prompts together, N different nodes, C entries, U tenants, P
    priority groups, L lanes (layout.py), M notices. A set of workers is K words of 64 bits, one bit per
    worker. A field is empty if no policy of the fleet uses it.
    """

    path: npt.NDArray[np.int32]  # (m,) the nodes of all prompts, one prompt after the other
    used: npt.NDArray[np.int32]  # (m,) the entries of those nodes that their requests use
    prompts: npt.NDArray[np.void]  # (n,) PROMPT
    entries: npt.NDArray[np.void]  # (C,) ENTRY
    tree_node_index: npt.NDArray[np.int32]  # (2^k,) open addressing: 1 + entry of (node, worker), or 0
    holders: npt.NDArray[np.uint64]  # (N, K) workers that have a node, as far as the router knows
    pinned: npt.NDArray[np.uint64]  # (N, K) workers where a node is pinned; empty if no node is
    alive: npt.NDArray[np.uint64]  # (K,) only used within prefix_routing._match_nodes: workers it looks at
    match: npt.NDArray[np.int64]  # (W,) how many nodes of the request being routed each worker has
    workers: npt.NDArray[np.void]  # (W,) CACHE, (2 W,) if workers also keep nodes in CPU memory
    tenants: npt.NDArray[np.void]  # (W, U) TENANT
    weights: npt.NDArray[np.float64]  # (U,) the weight of each tenant
    prefixes: npt.NDArray[np.void]  # (N,) PREFIX by node, empty without e2
    worker_credit: npt.NDArray[np.float64]  # (U, W) d2lpm: a tenant's credit in tokens on each worker
    tenant_turns: npt.NDArray[np.int64]  # (U,) requests of a tenant that tenant-round-robin has routed
    charged: npt.NDArray[np.int64]  # (L,) steps of a lane's run whose tokens were charged to tenants already
    group_left: npt.NDArray[np.int64]  # (W, P) preble: prompts of a group that may still go in this round
    firsts: npt.NDArray[np.int64]  # (P,) the first prompt of each group; only used while queue preble chooses
    notices: npt.NDArray[np.void]  # (M,) NOTICE, a ring: those under way begin at FIRST_NOTICE
    numbers: npt.NDArray[np.int64]  # (NUMBERS,)
    settings: npt.NDArray[np.float64]  # (SETTINGS,)


NO_CACHES = Caches(
    path=empty_field("i4"),
    used=empty_field("i4"),
    prompts=empty_field(PROMPT),
    entries=empty_field(ENTRY),
    tree_node_index=empty_field("i4"),
    holders=empty_field("u8", 2),
    pinned=empty_field("u8", 2),
    alive=empty_field("u8"),
    match=empty_field("i8"),
    workers=empty_field(CACHE),
    tenants=empty_field(TENANT, 2),
    weights=empty_field("f8"),
    prefixes=empty_field(PREFIX),
    worker_credit=empty_field("f8", 2),
    tenant_turns=empty_field("i8"),
    charged=empty_field("i8"),
    group_left=empty_field("i8", 2),
    firsts=empty_field("i8"),
    notices=empty_field(NOTICE),
    numbers=empty_field("i8"),
    settings=empty_field("f8"),
)


def tenant_weights(policies: Policies, trace: Trace) -> npt.NDArray[np.float64]:
    """The weight of each tenant of the trace (U,), 1 unless `policies.tenant_weights` has another.

    Raises InputError for a tenant that the trace does not have.
    """
    weights = dict(policies.tenant_weights)
    if unknown := sorted(set(weights) - set(trace.tenants)):
        raise InputError(
            f"policies.tenant_weights names {unknown[0]!r}, must be tenants of the trace: "
            f"{', '.join(trace.tenants) or 'it has none'}"
        )
    return np.array([weights.get(name, 1.0) for name in trace.tenants or ("",)])


def make_caches(
    fleet: Fleet,
    trace: Trace,
    type_indices: npt.NDArray[np.int64],
    worker_types: list[WorkerType],
    *,
    has_window: bool,
    is_pinned: bool,
    memory_tree_nodes: int = 0,
) -> Caches:
    """Empty caches of the workers. `type_indices` (W,) are the places of their types in `worker_types`. With
    prefix caches the trace must have prefixes; without prefix caches nothing is ever kept.

    `has_window` makes room for e2's window, `is_pinned` for the workers on which a plan pins each node. If
    the workers' CPU memory has room for nodes (`memory_tree_nodes` of all workers together), each worker has
    a second CACHE for it, W places after its first. Raises InputError for a prefix block of the trace that is
    no multiple of a KV block, and as `tenant_weights` does.
    """
    policies, workers = fleet.policies, len(type_indices)
    block = trace.prefix_block_tokens if policies.prefix_cache else KV_BLOCK_TOKENS
    if block % KV_BLOCK_TOKENS:
        raise InputError(
            f"{trace.name}: blocks of {block} tokens, must be a multiple of {KV_BLOCK_TOKENS} to be cached"
        )
    # The nodes of all prompts, one after the other (`node`, from `offsets` on), and each node's `parent`.
    uses = block_uses(trace) if policies.prefix_cache else no_block_uses(len(trace))
    prompts = _prompt_table(trace, uses, block)
    caches = np.zeros(2 * workers if memory_tree_nodes else workers, dtype=CACHE)
    for name in ("oldest", "newest", "first_late", "last_late", "last_waiting", "served_tenant"):
        caches[name] = NONE
    token_s, output_s = _token_seconds(trace, worker_types, policies.decode_batch)
    caches["token_s"][:workers], caches["output_s"][:workers] = token_s[type_indices], output_s[type_indices]

    # One entry for each copy of a node that KV memory could hold. `prefix_cache` is a bool here: without it
    # workers keep 0 tokens.
    kept_tokens = [policies.prefix_cache * worker_types[index].kv_tokens for index in type_indices]
    most_entries = int(sum(tokens // block for tokens in kept_tokens))
    # Each copy that a request makes may be evicted, and has a notice then.
    most_notices = most_entries + len(uses.node) if policies.eviction_notice_s > 0 else 0
    # Blocks of no node: each request leaves at most one entry of them, of at least one block, on each of its
    # two workers (prefill and decode).
    kv_blocks = sum(tokens // KV_BLOCK_TOKENS for tokens in kept_tokens)
    nodeless = min(2 * len(trace), int(kv_blocks))
    # Each use of a node can put at most one copy into a worker's CPU memory.
    most_entries += nodeless + min(memory_tree_nodes, len(uses.node))
    if has_window:  # Entries of evicted copies remain while a request of the window shares them.
        most_entries += _most_uses(trace, prompts["depth"], policies.share_window_s)
    entries = np.zeros(most_entries, dtype=ENTRY)  # Zeros take neither time nor memory before they are used.
    # No free entry follows the last one (ENTRY.newer). A slice, because there may be no entries.
    entries["newer"][-1:] = NONE - most_entries
    # A power of two, and at most half full, so searches in the hash index are short.
    index_length = 1 << max(2 * most_entries, 1).bit_length()

    weights = tenant_weights(policies, trace)
    words = -(-workers // 64)  # Words of 64 bits in a set of workers.
    prefixes = np.zeros(len(uses.parent) if has_window else 0, dtype=PREFIX)
    prefixes["replicated_s"], prefixes["home"] = -np.inf, NONE
    return Caches(
        path=uses.node,
        used=np.zeros(len(uses.node), dtype=np.int32),
        prompts=prompts,
        entries=entries,
        tree_node_index=np.zeros(index_length, dtype=np.int32),
        holders=np.zeros((len(uses.parent), words), dtype=np.uint64),
        pinned=np.zeros((len(uses.parent) if is_pinned else 0, words), dtype=np.uint64),
        alive=np.zeros(words, dtype=np.uint64),
        match=np.zeros(workers, dtype=np.int64),
        workers=caches,
        tenants=np.zeros((workers, len(weights)), dtype=TENANT),
        weights=weights,
        prefixes=prefixes,
        worker_credit=np.zeros((len(weights), workers)),
        tenant_turns=np.zeros(len(weights), dtype=np.int64),
        charged=np.zeros(sum(worker_types[index].pp for index in type_indices), dtype=np.int64),
        group_left=np.zeros((workers, policies.priority_groups), dtype=np.int64),
        firsts=np.zeros(policies.priority_groups, dtype=np.int64),
        notices=np.zeros(most_notices, dtype=NOTICE),
        numbers=_first_numbers(block, nodeless, has_entries=most_entries > 0),
        settings=_setting_values(policies, trace),
    )


def _token_seconds(
    trace: Trace, worker_types: list[WorkerType], decode_batch: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Seconds of each worker type to prefill a token, and to decode one in a batch of `decode_batch`."""
    # While a request is decoded, its mean context is its prompt and half of its output.
    context_tokens = float((trace.input_tokens + trace.output_tokens / 2).mean())
    return (
        np.array([prefill_token_s(worker) for worker in worker_types]),
        np.array([output_token_s(worker, context_tokens, decode_batch) for worker in worker_types]),
    )


def _first_numbers(block_tokens: int, nodeless: int, *, has_entries: bool) -> npt.NDArray[np.int64]:
    """`Caches.numbers` before the first event."""
    numbers = np.zeros(NUMBERS, dtype=np.int64)
    numbers[[TREE_NODE_TOKENS, TREE_NODE_BLOCKS]] = block_tokens, block_tokens // KV_BLOCK_TOKENS
    numbers[[FIRST_ROUTED, FIRST_IN_LATER_HALF, LAST_ROUTED]] = NONE
    numbers[FREE] = 0 if has_entries else NONE
    numbers[NODELESS] = nodeless
    return numbers


def _prompt_table(trace: Trace, uses: Blocks, block_tokens: int) -> npt.NDArray[np.void]:
    """A PROMPT (n,) for each request, before any is routed. A prompt has a node for each block that it fills;
    the rest of its tokens are in no node.
    """
    prompts = np.zeros(len(trace), dtype=PROMPT)
    prompts["start"] = uses.offsets[:-1]
    prompts["depth"] = np.minimum(np.diff(uses.offsets), trace.input_tokens // block_tokens)
    for name in ("left", "hit_tokens", "next", "worker", "prefix", "queue_s"):
        prompts[name] = NONE
    prompts["tenant"] = trace.tenant
    return prompts


def _setting_values(policies: Policies, trace: Trace) -> npt.NDArray[np.float64]:
    """`Caches.settings`, the parameters of policies. Where the policies give no quantum of tokens, it is
    twice the mean weighted tokens of a request.
    """
    work = policies.extend_weight * trace.input_tokens + policies.output_weight * trace.output_tokens
    quantum_tokens = 2.0 * float(work.mean())
    settings = np.zeros(SETTINGS)
    for setting, value in (
        (EXTEND_WEIGHT, policies.extend_weight),
        (OUTPUT_WEIGHT, policies.output_weight),
        (QUANTUM_TOKENS, policies.quantum_tokens or quantum_tokens),
        (WORKER_QUANTUM_TOKENS, policies.worker_quantum_tokens or quantum_tokens),
        (WINDOW_S, policies.share_window_s),
        (BALANCE_RATIO, policies.balance_ratio),
        (DECODE_FRAC, policies.explore_decode_frac),
        (MATCH_FRAC, policies.cache_threshold_frac),
        (BALANCE_REQUESTS, policies.balance_requests),
        (NOTICE_S, policies.eviction_notice_s),
        (REPLICATE_RATIO, policies.replicate_ratio),
    ):
        settings[setting] = value
    return settings


def prefill_token_s(worker_type: WorkerType) -> float:
    """Seconds per token of a prompt that fills the token budget of a step alone."""
    budget = worker_type.max_num_batched_tokens
    pairs = budget * (budget + 1) / 2  # Each token attends to itself and to all before it.
    return float(worker_type.latency.step_s(budget, pairs=pairs)) / budget


def output_token_s(worker_type: WorkerType, context_tokens: float, batch: int = 0) -> float:
    """Seconds of a worker per output token in a batch of `batch` decodes, each with so many `context_tokens`.
    A `batch` of 0 stands for all seats of the worker (max_num_seqs).
    """
    seats, latency = batch or worker_type.max_num_seqs, worker_type.latency
    return float(latency.step_s(seats, decodes=seats, kv_tokens=seats * context_tokens)) / seats


def _most_uses(trace: Trace, depth: npt.NDArray[np.int64], window_s: float) -> int:
    """The most nodes of prompts that arrive within `window_s` of each other. `depth` (n,) is the number of
    nodes of each prompt.
    """
    nodes_before = np.concatenate(([0], np.cumsum(depth)))  # (n + 1,) nodes of all prompts before each.
    first_in_window = np.searchsorted(trace.arrival_s, trace.arrival_s - window_s)
    return int((nodes_before[1:] - nodes_before[first_in_window]).max())


def with_entries(caches: Caches, more: int) -> Caches:
    """The same caches with `more` free entries, for blocks of no node that requests leave behind. The
    `numbers` of `caches` itself are changed too, so it must not be used any more.
    """
    old_count = len(caches.entries)
    entries = np.zeros(old_count + more, dtype=ENTRY)
    entries[:old_count] = caches.entries
    # The new entries come first in the list of free ones, and the old list follows the last of them.
    if more:
        entries["newer"][-1] = caches.numbers[FREE] - len(entries)
        caches.numbers[FREE] = old_count
    caches.numbers[NODELESS] += more
    return caches._replace(entries=entries)
