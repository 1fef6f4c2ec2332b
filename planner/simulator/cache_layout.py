"""What prefix caches add to the kernel's state, and how a fleet and a trace make it.

A node is a block of NODE_TOKENS tokens after all blocks before it: two prompts share it if they agree up to
its end. That is a multiple of the KV block, so a node is NODE_BLOCKS KV blocks. Every copy of a node that a
worker keeps is an entry; entries of all workers lie in one array with one index, which knows the first copy
of each. What a request has left behind besides nodes, its output above all, is an entry too. Routing e2
counts how many recent requests share a node on a worker: its entries outlive eviction while one does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.fleet import Fleet, Policies, WorkerType
from planner.policies import ROUTING
from planner.simulator.layout import NONE, nothing
from planner.traffic.prefixes import Blocks, block_uses
from planner.traffic.trace import Trace

ENTRY = np.dtype(
    [
        ("node", "i4"),  # -2 - r: blocks that request r alone has had
        ("worker", "i4"),
        ("refs", "i4"),  # running requests that use it; without any it is in the worker's list
        ("blocks", "i4"),
        ("twin", "i4"),  # the next copy of the node on this worker
        ("is_cached", "i4"),
        ("is_on_disk", "i4"),  # Of a node in CPU memory: it has left that for the disk behind.
        ("older", "i4"),  # in the list, by last use
        ("newer", "i4"),  # ... or the next free entry
        ("shares", "i4"),  # requests of e2's window that were routed to the worker and begin with it
    ]
)
PROMPT = np.dtype(
    [
        ("start", "i8"),  # its nodes are path[start : start + depth]
        ("depth", "i8"),
        ("shared_nodes", "i8"),  # of its worker's cache that it uses, from the first on
        ("shown_nodes", "i8"),  # of those, that the router has heard of
        (
            "own_blocks",
            "i8",
        ),  # that it has besides although they are of these nodes: the last one of a prompt
        ("left", "i8"),  # entry of what else it has left behind, NONE: nothing that is still there
        ("expected_tokens", "i8"),  # what the router believed to be cached, left out of the pending ones
        ("hit_tokens", "i8"),  # found cached when it was first admitted, NONE before
        ("tenant", "i8"),
        ("group", "i8"),  # preble: its priority when it was last looked at
        ("place", "f8"),  # dlpm-turns: its number, smallest first
        # e2's window: a list by time of routing
        ("next", "i8"),
        ("worker", "i8"),  # NONE: not in it
        ("routed_s", "f8"),
        ("prefill_s", "f8"),
        ("output_tokens", "i8"),  # NONE until it has finished
        ("prefix", "i8"),  # last node of its key portion, NONE: it shares none
        ("queue_s", "f8"),  # until it was first admitted, -1.0 before
        ("is_late", "i8"),  # routed in the later half of the window
    ]
)
CACHE = np.dtype(
    [
        ("oldest", "i8"),  # the list of entries without refs
        ("newest", "i8"),
        ("idle_blocks", "i8"),  # of theirs
        ("known_nodes", "i8"),  # that it has, as far as the router knows
        ("last_waiting", "i8"),  # of the prompts
        ("served_tenant", "i8"),  # of the prompt admitted last, NONE before
        ("turn", "f8"),  # dlpm-turns: the latest of which a prompt was admitted
        # e2's window
        ("routed", "i8"),  # requests
        ("finished", "i8"),  # ... of which so many
        ("output_tokens", "i8"),  # of those
        ("prefill_s", "f8"),
        ("decode_s", "f8"),  # as expected when the last request was routed
        ("token_s", "f8"),  # to prefill one token
        ("output_s", "f8"),  # to decode one
        ("split_s", "f8"),  # scratch: of a subtree that is being split
    ]
)
PREFIX = np.dtype(
    [
        # waits of those who share it, routed in the first and the second half of e2's window: sum and number
        ("wait_s", "f8", 2),
        ("wait_count", "i8", 2),
        ("replicated_s", "f8"),  # -inf: never
        ("home", "i8"),  # where its prompts go since what it follows was replicated, NONE: nowhere
        ("load_s", "f8"),  # scratch: of a subtree that is being split
    ]
)
TENANT = np.dtype(  # vtc's counter, dlpm's deficit, dlpm-turns: what was sent and what came of outputs
    [("waiting", "i8"), ("served", "f8"), ("credit", "f8"), ("sent", "f8")]
)
NOTICE = np.dtype([("time_s", "f8"), ("worker", "i8"), ("node", "i8")])

# numbers: tokens and KV blocks of a node, first free entry, e2's window and where its later half begins,
# notices under way, entries that may still be made of other blocks than nodes
NODE_TOKENS, NODE_BLOCKS, FREE, FIRST_ROUTED, FIRST_LATE, LAST_ROUTED, FIRST_NOTICE, NOTICES, OTHERS = range(
    9
)
NUMBERS = 9
# settings
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
    """W workers, n requests, N nodes, U tenants, P priority groups; K words of 64 workers."""

    path: npt.NDArray[np.int32]  # (m,) nodes of all prompts
    used: npt.NDArray[np.int32]  # (m,) entries of those that their requests use
    prompts: npt.NDArray[np.void]  # (n,) PROMPT
    entries: npt.NDArray[np.void]  # (C,) ENTRY
    places: npt.NDArray[np.int32]  # (2^k,) open addressing: entry of (node, worker)
    holders: npt.NDArray[np.uint64]  # (N, K) workers that have a node, as far as the router knows
    pinned: npt.NDArray[np.uint64]  # (N, K) workers where a node is pinned; empty where none is
    alive: npt.NDArray[np.uint64]  # (K,) scratch
    match: npt.NDArray[np.int64]  # (W,) nodes of the request being routed that each worker has
    workers: npt.NDArray[np.void]  # (W,) CACHE, (2 W,) with CPU memory behind them
    tenants: npt.NDArray[np.void]  # (W, U) TENANT
    weights: npt.NDArray[np.float64]  # (U,) of tenants
    prefixes: npt.NDArray[np.void]  # (N,) PREFIX by node, empty without e2
    deficits: npt.NDArray[np.float64]  # (U, W) d2lpm
    tenant_turns: npt.NDArray[np.int64]  # (U,) requests of a tenant that tenant-round-robin has routed
    charged: npt.NDArray[np.int64]  # (L,) steps of a lane's run whose tokens are charged to tenants
    group_turns: npt.NDArray[np.int64]  # (W, P) preble: prompts of a group that may still go in this round
    firsts: npt.NDArray[np.int64]  # (P,) scratch
    notices: npt.NDArray[np.void]  # (M,) NOTICE, a ring
    numbers: npt.NDArray[np.int64]  # (NUMBERS,)
    settings: npt.NDArray[np.float64]  # see above


NO_CACHES = Caches(
    path=nothing("i4"),
    used=nothing("i4"),
    prompts=nothing(PROMPT),
    entries=nothing(ENTRY),
    places=nothing("i4"),
    holders=nothing("u8", 2),
    pinned=nothing("u8", 2),
    alive=nothing("u8"),
    match=nothing("i8"),
    workers=nothing(CACHE),
    tenants=nothing(TENANT, 2),
    weights=nothing("f8"),
    prefixes=nothing(PREFIX),
    deficits=nothing("f8", 2),
    tenant_turns=nothing("i8"),
    charged=nothing("i8"),
    group_turns=nothing("i8", 2),
    firsts=nothing("i8"),
    notices=nothing(NOTICE),
    numbers=nothing("i8"),
    settings=nothing("f8"),
)


def tenant_weights(policies: Policies, trace: Trace) -> npt.NDArray[np.float64]:
    """The weight of each tenant of the trace, 1 unless the policies say otherwise."""
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
    kinds: npt.NDArray[np.int64],
    worker_types: list[WorkerType],
    *,
    in_memory: int = 0,
) -> Caches:
    """Empty caches of the workers, `kinds` (W,) of `worker_types`; the trace must have prefixes. With room
    for so many nodes `in_memory`, CPU memory of the workers has lists of its own behind theirs.
    """
    policies, workers = fleet.policies, len(kinds)
    block = trace.prefix_block_tokens
    if block % KV_BLOCK_TOKENS:
        raise InputError(
            f"{trace.name}: blocks of {block} tokens, must be a multiple of {KV_BLOCK_TOKENS} to be cached"
        )
    uses = block_uses(trace)
    prompts = _prompts(trace, uses)
    caches = np.zeros(2 * workers if in_memory else workers, dtype=CACHE)
    for name in ("oldest", "newest", "last_waiting", "served_tenant"):
        caches[name] = NONE
    caches["token_s"][:workers] = np.array([prefill_token_s(kind) for kind in worker_types])[kinds]
    context = float((trace.input_tokens + trace.output_tokens / 2).mean())
    batch = policies.decode_batch
    output_s = [output_token_s(kind, context, batch) for kind in worker_types]
    caches["output_s"][:workers] = np.array(output_s)[kinds]

    room = int(sum(worker_types[kind].kv_tokens // block for kind in kinds))
    notices = room if policies.eviction_notice_s > 0 else 0
    others = int(sum(worker_types[kind].kv_tokens // KV_BLOCK_TOKENS for kind in kinds))
    others = min(len(trace), others)
    room += others + min(in_memory, len(uses.node))  # every use brings one node to one worker
    if ROUTING[policies.routing].has_window:
        room += _most_uses(trace, prompts["depth"], policies.share_window_s)
    entries = np.zeros(room, dtype=ENTRY)
    entries["newer"] = np.append(np.arange(1, room), NONE)[:room]
    places = np.full(1 << max(2 * room, 1).bit_length(), NONE, dtype=np.int32)

    weights = tenant_weights(policies, trace)
    numbers = np.zeros(NUMBERS, dtype=np.int64)
    numbers[[NODE_TOKENS, NODE_BLOCKS]] = block, block // KV_BLOCK_TOKENS
    numbers[[FIRST_ROUTED, FIRST_LATE, LAST_ROUTED]] = NONE
    numbers[FREE] = 0 if room else NONE
    numbers[OTHERS] = others
    words = -(-workers // 64)
    prefixes = np.zeros(len(uses.parent) if ROUTING[policies.routing].has_window else 0, dtype=PREFIX)
    prefixes["replicated_s"], prefixes["home"] = -np.inf, NONE
    return Caches(
        path=uses.node,
        used=np.zeros(len(uses.node), dtype=np.int32),
        prompts=prompts,
        entries=entries,
        places=places,
        holders=np.zeros((len(uses.parent), words), dtype=np.uint64),
        pinned=np.zeros((len(uses.parent) if ROUTING[policies.routing].pins else 0, words), dtype=np.uint64),
        alive=np.zeros(words, dtype=np.uint64),
        match=np.zeros(workers, dtype=np.int64),
        workers=caches,
        tenants=np.zeros((workers, len(weights)), dtype=TENANT),
        weights=weights,
        prefixes=prefixes,
        deficits=np.zeros((len(weights), workers)),
        tenant_turns=np.zeros(len(weights), dtype=np.int64),
        charged=np.zeros(sum(worker_types[kind].pp for kind in kinds), dtype=np.int64),
        group_turns=np.zeros((workers, policies.priority_groups), dtype=np.int64),
        firsts=np.zeros(policies.priority_groups, dtype=np.int64),
        notices=np.zeros(notices, dtype=NOTICE),
        numbers=numbers,
        settings=_settings(policies, trace),
    )


def _prompts(trace: Trace, uses: Blocks) -> npt.NDArray[np.void]:
    prompts = np.zeros(len(trace), dtype=PROMPT)
    prompts["start"] = uses.offsets[:-1]
    prompts["depth"] = np.minimum(np.diff(uses.offsets), trace.input_tokens // trace.prefix_block_tokens)
    for name in ("left", "hit_tokens", "next", "worker", "prefix", "queue_s"):
        prompts[name] = NONE
    prompts["tenant"] = trace.tenant
    return prompts


def _settings(policies: Policies, trace: Trace) -> npt.NDArray[np.float64]:
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
    """Seconds that one token of a prompt takes, in a step of the whole budget."""
    budget = worker_type.max_num_batched_tokens
    return float(worker_type.latency.step_s(budget, pairs=budget * (budget + 1) / 2)) / budget


def output_token_s(worker_type: WorkerType, context_tokens: float, batch: int = 0) -> float:
    """Seconds of a worker that one output token takes in a batch of so many decodes; 0: of all its seats."""
    seats, latency = batch or worker_type.max_num_seqs, worker_type.latency
    return float(latency.step_s(seats, decodes=seats, kv_tokens=seats * context_tokens)) / seats


def _most_uses(trace: Trace, depth: npt.NDArray[np.int64], window_s: float) -> int:
    """The most blocks that the arrivals of one window use."""
    total = np.concatenate(([0], np.cumsum(depth)))
    first = np.searchsorted(trace.arrival_s, trace.arrival_s - window_s)
    return int((total[1:] - total[first]).max())


def with_entries(caches: Caches, more: int) -> Caches:
    """With so many entries more that are free: what requests have left behind besides nodes."""
    first = len(caches.entries)
    entries = np.zeros(first + more, dtype=ENTRY)
    entries[:first] = caches.entries
    entries["newer"][first:] = np.append(np.arange(first + 1, first + more), caches.numbers[FREE])[:more]
    caches.numbers[FREE] = first if more else caches.numbers[FREE]
    caches.numbers[OTHERS] += more
    return caches._replace(entries=entries)
