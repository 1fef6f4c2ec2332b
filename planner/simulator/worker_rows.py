"""The worker types, workers and lanes of a fleet as rows of the kernel's arrays (layout.py).

Letters of array shapes: W the kernel's workers (each data-parallel rank is one), P running pools.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.policies import (
    ADMISSION,
    BATCHING,
    FASTER_TRANSFORMER,
    OF_SPLITWISE,
    QUEUE,
    ROUTING,
    STEPWISE,
    TIES_BY,
    VLLM_V1,
)
from planner.simulator import layout
from planner.simulator.simulation import Floats, Ints
from planner.traffic.trace import Trace

ROLES = {"mixed": layout.MIXED, "prefill": layout.PREFILL, "decode": layout.DECODE}
# Steps until a worker knows of KV that has arrived, by whether its engine schedules asynchronously: such an
# engine sends a step to the workers when the step before begins, so it learns of KV later.
KV_DELAY_STEPS = {False: 1, True: 3}
# Between simulations the tables of step times of this many worker types are kept, if their steps have up to
# REMEMBERED_TOKENS tokens: at most 160 kB each, 160 MB in all. Set by hand.
REMEMBERED_TYPES, REMEMBERED_TOKENS = 1024, 20_000
# If scores are equal, a router takes the worker whose type has the smallest of these keys (`_tie_key`).
TieKey = tuple[tuple[tuple[float, ...], ...], tuple[int, int], bytes, tuple[float, ...]]


def type_rows(
    pools: Sequence[Pool], fleet: Fleet, trace: Trace
) -> tuple[npt.NDArray[np.void], Floats, list[TieKey]]:
    """A layout.TYPE for each pool, all tables of step times as one array, and each type's `TieKey`."""
    types = np.empty(len(pools), dtype=layout.TYPE)
    tables: list[Floats] = []
    tie_keys: list[TieKey] = []
    policies, longest_tokens, offset = fleet.policies, int(trace.input_tokens.max()), 0
    for i, pool in enumerate(pools):
        worker_type = pool.type
        most_tokens = _most_tokens(worker_type, policies.batching, trace)
        # A step may hold a whole prompt budget and a token of each decode.
        most_tokens += worker_type.max_num_seqs * worker_type.step_tokens
        is_remembered = most_tokens <= REMEMBERED_TOKENS and isinstance(worker_type.form, Hashable)
        make_row = _remembered_type_row if is_remembered else _type_row
        types[i : i + 1], type_tables, tie_key = make_row(
            worker_type, policies, fleet.llm.name, longest_tokens, most_tokens
        )
        for j, table in enumerate(type_tables):
            types[i]["table_at"][j] = offset
            offset += len(table)
            tables.append(table)
        tie_keys.append(tie_key)
    return types, np.concatenate(tables), tie_keys


def _type_row(
    worker_type: WorkerType, policies: Policies, llm: str, longest_tokens: int, most_tokens: int
) -> tuple[npt.NDArray[np.void], tuple[Floats, ...], TieKey]:
    """A layout.TYPE (1,) without the offsets of its tables, the tables of its step times, and its key."""
    row = np.zeros(1, dtype=layout.TYPE)
    _fill_type(row, worker_type, policies, llm, longest_tokens)
    # Step times as numbers and tables (Compiled, planner/models/foreign_forms.py).
    compiled = worker_type.step_times.compile_for_kernel(most_tokens, worker_type.max_num_seqs)
    row["form"] = compiled.code
    row["numbers"][0, : len(compiled.numbers)] = compiled.numbers
    row["table_width"][0, : len(compiled.widths)] = compiled.widths
    return row, compiled.tables, _tie_key(worker_type, row, compiled.tables)


_remembered_type_row = lru_cache(maxsize=REMEMBERED_TYPES)(_type_row)


def _goes_by_priority(policies: Policies) -> bool:
    """Whether requests are preempted by priority, as in a vLLM that takes prompts by priority. They are not
    if prompts are sorted in scheduling batches, which no priority can express.
    """
    row = QUEUE[policies.queue]
    is_batched = policies.queue_batch > 0 and not row.by_deadline
    return row.is_by_priority and BATCHING[policies.batching].code == VLLM_V1 and not is_batched


def _fill_type(
    row: npt.NDArray[np.void], worker_type: WorkerType, policies: Policies, llm: str, longest_tokens: int
) -> None:
    """Fill a layout.TYPE (1,), without the step times."""
    batching = BATCHING[policies.batching]
    blocks = worker_type.kv_tokens // KV_BLOCK_TOKENS
    reserves = batching.is_reserving and policies.reserve_tokens > 0
    reserved_blocks = -(-policies.reserve_tokens // KV_BLOCK_TOKENS) if reserves else 0  # Rounded up.
    if batching.simulator == OF_SPLITWISE:
        reserved_blocks = 1  # 1 only marks that KV is reserved: Splitwise's engine counts how much itself.
    watermark_blocks = int(policies.watermark_frac * blocks) if batching.is_watermarked else 0
    if batching.simulator != STEPWISE and worker_type.extra_kv.is_any:
        raise InputError(
            f"batching {policies.batching}: counts KV by tokens alone, and {llm} has layers with "
            "windows or states; choose vllm-v1"
        )
    # A request may have this many blocks; if all requests reserve more than there are, none fits.
    longest_blocks = blocks - watermark_blocks
    if reserves:
        longest_blocks = reserved_blocks if reserved_blocks <= blocks else 0
    for name, value in (
        ("batching", batching.code),
        ("queue_order", QUEUE[policies.queue].code),
        ("queue_window_s", policies.queue_window_s),
        ("queue_longest_tokens", float(longest_tokens)),
        ("queue_batch", policies.queue_batch),
        ("by_priority", _goes_by_priority(policies)),
        ("admission", ADMISSION[policies.admission].code),
        ("token_budget", worker_type.max_num_batched_tokens),
        ("long_prefill_tokens", policies.long_prefill_token_threshold),
        ("seats", worker_type.max_num_seqs),
        ("kv_blocks", blocks),
        ("kv_capacity_tokens", worker_type.kv_tokens),
        ("longest_blocks", longest_blocks),
        ("constant_blocks", worker_type.extra_kv.constant_blocks),
        ("window_ratio", worker_type.extra_kv.window_ratio),
        ("window_blocks", worker_type.extra_kv.window_blocks),
        ("taken_blocks_per_token", worker_type.taken_blocks_per_token),
        ("watermark_blocks", watermark_blocks),
        ("decode_batch_tokens", policies.decode_batch_tokens or worker_type.kv_tokens),
        ("reserved_blocks", reserved_blocks),
        ("patience_steps", policies.patience_steps),
        ("vidur_restarts", int(policies.vidur_restarts)),
        ("pp", worker_type.pp),
        ("lanes", worker_type.pp),
    ):
        row[name] = value
    if (engine := worker_type.engine) is not None:
        row["overlaps"], row["token_s"] = engine.async_scheduling, 1 / engine.tokens_per_s
        row["prompt_token_s"], row["hand_off_s"] = engine.prompt_token_s, engine.hand_off_s
        row["first_hand_off_s"] = engine.first_hand_off_s
        row["discards_token"] = engine.first_token == "decode"
        row["prompts_first"] = not engine.mixed_steps
        row["launch_s"] = engine.latent_launch_s * worker_type.launched_layers / worker_type.pp
        if worker_type.pp == 1:  # A pipeline always has several steps in flight, so neither applies to it.
            row["is_async"], row["poll_steps"] = engine.async_scheduling, engine.poll_steps
            row["kv_delay_steps"] = KV_DELAY_STEPS[engine.async_scheduling]
            row["pulls_kv"] = engine.pulls_kv
        row["host_s"][0], row["rest_s"][0] = (part.per_step_s(worker_type.tp) for part in worker_type.host)
    if (speculation := worker_type.speculation) is not None:
        row["accepted"][0, : speculation.tokens] = speculation.accepted_fracs
        row["lookahead_tokens"] = speculation.lookahead_tokens
        is_vllm = engine is None or engine.name == "vllm"
        row["dropped_blocks"] = is_vllm and speculation.reads_hidden_states
        row["draw_seed"] = policies.seed
    row["routing_weight"][0, layout.ARRIVAL_POOL] = ROUTING[policies.routing].weights(worker_type, False)
    row["routing_weight"][0, layout.HAND_OFF_POOL] = ROUTING[policies.decode_routing].weights(
        worker_type, True
    )


def _most_tokens(worker_type: WorkerType, batching: str, trace: Trace) -> int:
    """Prefill tokens of the largest step, for the length of step-time tables.

    Without chunks a prompt is computed as a whole, and after a preemption with its output so far;
    FasterTransformer computes a whole group of prompts in one step. The result is at least the token budget,
    because best-fit routing looks up the step time of a full budget.
    """
    if BATCHING[batching].is_chunked:
        return worker_type.max_num_batched_tokens
    largest = int((trace.input_tokens + trace.output_tokens).max())
    if BATCHING[batching].code == FASTER_TRANSFORMER:
        total = int((trace.input_tokens + trace.output_tokens).sum())
        largest = min(largest * worker_type.max_num_seqs, total)
    return max(worker_type.max_num_batched_tokens, largest)


def _tie_key(worker_type: WorkerType, row: npt.NDArray[np.void], tables: Sequence[Floats]) -> TieKey:
    """The key by which types of equal score are sorted: first by the seconds that a request adds in routing
    jsq, as a prefill and as a decode worker; then by KV blocks and max_num_seqs, the most first; then by all
    other numbers of the type, so that no two types are equal.
    """
    added_s = tuple(TIES_BY.weights(worker_type, decodes) for decodes in (False, True))
    size = -int(row["kv_blocks"][0]), -int(row["seats"][0])
    return added_s, size, row.tobytes(), tuple(float(table.sum()) for table in tables)


def routing_order(
    pools: Sequence[Pool], tie_keys: Sequence[TieKey], type_indices: Ints
) -> npt.NDArray[np.int64]:
    """The kernel's workers (W,) in the order in which routers take those of equal score: by the `tie_keys`
    (P,) of their types, which have the indices of their pools (`type_indices`, (W,)). Only workers of one
    type keep their order in the fleet, so neither names nor the order of pools matter.
    """
    decodes = [pool.role == "decode" for pool in pools]
    # A key has two times, of prefill and of decode; the one of the pool's own phase counts.
    keys = [(is_back, key[0][is_back], *key[1:]) for is_back, key in zip(decodes, tie_keys, strict=True)]
    position = np.empty(len(pools), np.int64)
    position[sorted(range(len(pools)), key=keys.__getitem__)] = np.arange(len(pools))
    return np.argsort(position[type_indices], kind="stable")


def worker_and_lane_rows(
    pools: Sequence[Pool], types: npt.NDArray[np.void], type_indices: Ints
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """The workers, whose types are the `type_indices` (W,) of `types`, and their lanes."""
    lane_count = types["lanes"][type_indices]
    workers = np.zeros(len(type_indices), dtype=layout.WORKER)
    workers["type"] = type_indices
    workers["role"] = [ROLES[pools[index].role] for index in type_indices]
    workers["status"], workers["slow_factor"] = layout.IN_SERVICE, 1.0
    workers["formed_s"] = layout.NEVER
    workers["least_saved_s"] = np.inf
    workers["first_lane"] = np.cumsum(lane_count) - lane_count
    workers["head"] = workers["tail"] = workers["first_waiting"] = layout.NONE
    lanes = np.zeros(int(lane_count.sum()), dtype=layout.LANE)
    lanes["worker"] = np.repeat(np.arange(len(type_indices)), lane_count)
    lanes["width"] = np.repeat([pools[index].type.step_tokens for index in type_indices], lane_count)
    return workers, lanes


def rank_rows(pools: Sequence[Pool]) -> npt.NDArray[np.void] | None:
    """For each of the kernel's workers (W,), which are data-parallel ranks, the first rank of its worker and
    how many there are; None if all workers have one rank.
    """
    if all(pool.type.dp == 1 for pool in pools):
        return None
    counts = np.repeat([pool.type.dp for pool in pools], [pool.count for pool in pools])
    ranks = np.zeros(int(counts.sum()), dtype=layout.DP_RANK)
    ranks["first"] = np.repeat(np.cumsum(counts) - counts, counts)
    ranks["count"] = np.repeat(counts, counts)
    return ranks
