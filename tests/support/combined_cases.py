"""Random fleets that combine what other random cases have one at a time, against the plain simulators.

The fleets are those of engine_cases.py and prefix_cases.py: engines, sessions, routings, mixed workers or
prefill and decode workers, small KV caches. A case adds one of KINDS to such a fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from async_prefix_reference import AsyncPrefixReference
from async_reference import AsyncReference
from engine_cases import random_engine_case
from lora_reference import AsyncLoraReference, AsyncPrefixLoraReference, LoraReference, PrefixLoraReference
from offload_cases import memory_of, with_disk
from offload_reference import AsyncOffloadReference, OffloadReference
from prefix_cases import compare_prefix_fleet, random_prefix_case
from prefix_reference import PLAIN_QUEUES
from simulations import compare
from simulator_reference import Reference

from planner.domain import Selector
from planner.fleet import Fleet, WorkerType
from planner.models.kv_layout import NO_EXTRA_KV
from planner.models.lora import Lora, LoraCost, LoraSlots
from planner.traffic.trace import Trace

LORA: dict[type[Reference], type[Reference]] = {
    Reference: LoraReference,
    AsyncReference: AsyncLoraReference,
    AsyncPrefixReference: AsyncPrefixLoraReference,
}


def with_policies(fleet: Fleet, **changes: object) -> Fleet:
    return replace(fleet, policies=replace(fleet.policies, **changes))  # type: ignore[arg-type]


def random_due(trace: Trace, rng: np.random.Generator) -> tuple[tuple[Selector, float], ...]:
    """One to three classes by tenant, or two by the length of the prompt, each due soon or late."""
    if not trace.tenants:
        cut = int(rng.integers(2, 40))
        selectors = [Selector("short", most_tokens=cut), Selector("long", least_tokens=cut + 1)]
    else:
        names = rng.permutation(trace.tenants)[: rng.integers(1, 4)].tolist()
        selectors = [Selector(name, tenants=(name,)) for name in names]
    return tuple((selector, float(rng.choice([0.05, 0.5, 5.0, 50.0]))) for selector in selectors)


def with_order(fleet: Fleet, trace: Trace, rng: np.random.Generator) -> Fleet:
    """The same fleet with edf, or, as prefix_cases.py has none, with a window or batches of an order."""
    order = rng.integers(4) if trace.prefix_block_tokens else 0
    if order < 2:
        return with_policies(fleet, queue="edf", due=random_due(trace, rng), queue_batch=0)
    queue = str(rng.choice(["sjf", "ljf", "srpt"]))
    if order == 2:
        return with_policies(fleet, queue=queue, queue_window_s=float(rng.choice([0.05, 0.5, 5.0])))
    return with_policies(fleet, queue=queue, queue_batch=int(rng.choice([2, 4])))


def with_some_order(fleet: Fleet, trace: Trace, rng: np.random.Generator) -> Fleet:
    """The same fleet with an order that looks at neither caches nor tenants: its own, or `with_order`."""
    if rng.integers(2):
        return with_order(fleet, trace, rng)
    return fleet if fleet.policies.queue in PLAIN_QUEUES else with_policies(fleet, queue="fcfs")


def with_adapters(fleet: Fleet, trace: Trace, rng: np.random.Generator) -> tuple[Fleet, Trace]:
    """One to eight adapters on one to three slots, each cost in half of the fleets. Only requests of one
    adapter have blocks in common.
    """
    max_loras, count = int(rng.integers(1, 4)), int(rng.integers(1, 9))
    most_s = np.array([0.1, 0.05, 0.05, 0.005, 0.2, 0.5])
    kernels_s, read_s, experts_s, token_s, load_s, disk_s = (
        rng.uniform(0, most_s) * rng.integers(2, size=6)
    ).tolist()
    visited_frac = float(rng.choice([0.0, 0.125, 1.0]))
    cost = LoraCost(0.0, kernels_s, read_s, experts_s, visited_frac, token_s, load_s, disk_s)
    slots = LoraSlots(Lora(max_loras, 8, count, max_loras + int(rng.integers(0, 4))), cost)
    if trace.prefix_block_tokens or rng.uniform() < 0.7:
        adapter = rng.integers(-1, count, len(trace))
        apart = 1000 * np.repeat(adapter + 1, np.diff(trace.prefix_offsets)) if len(trace.prefix_ids) else 0
        ids = trace.prefix_ids + apart
        trace = replace(trace, adapter=adapter, adapters=tuple("abcdefgh"[:count]), prefix_ids=ids)
    return fleet.with_types(lambda kind: replace(kind, lora=slots)), trace


def with_memory(fleet: Fleet, seed: int, *, is_shared: bool = False) -> Fleet:
    """The same fleet with memory behind its prefix caches: of each worker, with a disk or not, or shared.

    Of asynchronous engines it is shared only where that is asked for.
    """
    rng = np.random.default_rng([seed, 72])
    is_async = fleet.engine is not None and fleet.engine.async_scheduling
    kind = int(rng.integers(2 if is_async else 3))
    kind = 2 if is_shared else kind
    size = float(rng.choice([40, 100, 300, 1000, 30_000])) * (1 + rng.uniform())
    token_s = float(rng.choice([1e-6, 1e-4, 1e-3])) * (1 + rng.uniform())
    fleet = fleet.with_types(lambda each: replace(each, extra_kv=NO_EXTRA_KV))
    fleet = with_policies(fleet, kv_offload=memory_of(size, token_s, is_shared=kind == 2))
    return with_disk(fleet, seed) if kind == 1 else fleet


def at_the_edge(fleet: Fleet, trace: Trace, rng: np.random.Generator) -> tuple[Fleet, Trace]:
    """The same with one seat, steps of a few tokens, chunks of one, or memory for the longest request alone;
    in one case of two requests wait for up to four others.
    """
    longest = int((trace.input_tokens + trace.output_tokens).max())
    edge = int(rng.integers(5))

    def change(kind: WorkerType) -> WorkerType:
        kv_tokens = 16 * (-(-longest // 16) + kind.extra_kv.sequence_blocks(longest))
        if edge == 0:
            return replace(kind, max_num_seqs=int(rng.integers(1, 4)), max_num_batched_tokens=4)
        if edge == 1:
            return replace(kind, kv_tokens=kv_tokens, max_num_seqs=8, max_num_batched_tokens=9)
        return replace(kind, kv_tokens=kv_tokens) if edge == 2 else replace(kind, max_num_seqs=1)

    fleet = fleet.with_types(change)
    if edge != 2:
        fleet = with_policies(fleet, long_prefill_token_threshold=int(rng.choice([0, 1, 5])))
    if rng.integers(2):
        n = len(trace)
        children = np.repeat(np.arange(1, n), rng.choice([0, 1, 2, 4], n - 1))
        edges = np.unique(np.column_stack((rng.integers(children), children)), axis=0)[:, ::-1]
        trace = replace(trace, after=edges, think_s=rng.uniform(0, 0.3, n))
    return fleet, trace


def compare_at_the_edge(seed: int) -> None:
    fleet, trace, reference = random_prefix_case(seed)
    fleet, trace = at_the_edge(fleet, trace, np.random.default_rng([seed, 74]))
    compare_prefix_fleet(fleet, trace, reference, f"seed {seed}")


def compare_order(seed: int) -> None:
    (fleet, trace, limits, closed_loop), reference = random_engine_case(seed)
    rng = np.random.default_rng([seed, 70])
    compare(with_order(fleet, trace, rng), trace, limits, closed_loop, reference)


def compare_order_with_caches(seed: int) -> None:
    fleet, trace, reference = random_prefix_case(seed)
    rng = np.random.default_rng([seed, 70])
    compare_prefix_fleet(with_order(fleet, trace, rng), trace, reference, f"seed {seed}")


def compare_adapters(seed: int) -> None:
    (fleet, trace, limits, closed_loop), reference = random_engine_case(seed)
    rng = np.random.default_rng([seed, 71])
    if rng.integers(3) == 0:
        fleet = with_order(fleet, trace, rng)
    fleet, trace = with_adapters(fleet, trace, rng)
    compare(fleet, trace, limits, closed_loop, LORA[reference])


def compare_adapters_with_caches(seed: int) -> None:
    fleet, trace, reference = random_prefix_case(seed)
    rng = np.random.default_rng([seed, 71])
    fleet, trace = with_adapters(with_some_order(fleet, trace, rng), trace, rng)
    is_async = reference is AsyncPrefixReference
    compare_prefix_fleet(
        fleet, trace, AsyncPrefixLoraReference if is_async else PrefixLoraReference, f"seed {seed}"
    )


def compare_store(seed: int) -> None:
    """Two seeds in four have asynchronous engines."""
    compare_memory(seed, is_shared=True)


def compare_memory(seed: int, *, is_shared: bool = False) -> None:
    fleet, trace, reference = random_prefix_case(seed)
    fleet = with_some_order(fleet, trace, np.random.default_rng([seed, 73]))
    fleet = with_memory(fleet, seed, is_shared=is_shared)
    is_async = reference is AsyncPrefixReference
    plain, found = compare_prefix_fleet(
        fleet, trace, AsyncOffloadReference if is_async else OffloadReference, f"seed {seed}"
    )
    assert isinstance(plain, OffloadReference)
    if found.reloaded_tokens is not None and not plain.is_not_compared:
        theirs = [max(tokens, 0) for tokens in plain.loaded_tokens]
        np.testing.assert_array_equal(found.reloaded_tokens, theirs, err_msg=f"loaded, seed {seed}")


KINDS: dict[str, Callable[[int], None]] = {
    "order": compare_order,
    "order, caches": compare_order_with_caches,
    "adapters": compare_adapters,
    "adapters, caches": compare_adapters_with_caches,
    "memory": compare_memory,
    "store": compare_store,
    "edge": compare_at_the_edge,
}


def compare_combined_case(seed: int) -> None:
    """One of KINDS after the other. Raise AssertionError where a number differs by more than 1e-9."""
    list(KINDS.values())[seed % len(KINDS)](seed // len(KINDS))
