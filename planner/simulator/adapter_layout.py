"""The arrays in which the simulator keeps LoRA adapters, made from a fleet and a trace.

The kernel (kernel.py) holds them with its own state; adapters.py reads and changes them while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.errors import InputError
from planner.files.document_values import show_value
from planner.fleet import Fleet, WorkerType
from planner.models.lora import Lora
from planner.simulator.layout import NONE, empty_field
from planner.traffic.trace import IntArray, Trace
from planner.units import count_text

# Fields of LoraCost (planner/models/lora.py, which gives their formulas): what adapters add to a step, and
# what it takes to load one.
COSTS = ("kernels_s", "read_s", "experts_s", "visited_frac", "token_s", "load_s", "disk_s")
# The record of a worker type: how many adapters its GPUs and its host's memory hold, and its COSTS.
SETTING = np.dtype([("max_loras", "i8"), ("max_cpu_loras", "i8"), *((name, "f8") for name in COSTS)])
# The first and the last request of a linked list.
ASIDE = np.dtype([("head", "i8", (1,)), ("tail", "i8", (1,))])
# Indices into `AdapterState.numbers`: the stamp of the latest step that was formed (steps are stamped 1, 2,
# ... in this order), how many adapters are in it, and how many of these it loads.
STAMP, IN_STEP, LOADING = 0, 1, 2
NUMBERS = 3


class AdapterState(NamedTuple):
    """The adapters of all workers, and the requests for them. NO_ADAPTERS stands for a fleet without LoRA.

    W workers, n requests, T worker types, A adapters. Adapters are numbered from 1 on; 0 is the LLM alone. A
    worker has up to S slots for adapters on its GPUs (vLLM's max_loras), and up to C in the host's memory
    (max_cpu_loras). C is 0 if the host's memory of every worker holds all adapters, since then no adapter
    leaves it.
    """

    adapter_of: npt.NDArray[np.int64]  # (n,) the adapter of each request
    settings: npt.NDArray[np.void]  # (T,) SETTING
    waiting: npt.NDArray[np.int32]  # (W, A + 1) how many requests wait for their prefill, by adapter
    slots: npt.NDArray[np.int32]  # (W, S) the adapter in each slot, 0: none
    slot_at: npt.NDArray[np.int32]  # (W, A + 1) the slot of each adapter, NONE: it is in no slot
    slot_uses: npt.NDArray[np.int64]  # (W, S) stamp of the step that used the slot last
    # The next three are as the three before, for the slots in the host's memory.
    cpu_slots: npt.NDArray[np.int32]  # (W, C)
    cpu_slot_at: npt.NDArray[np.int32]  # (W, A + 1), (W, 0) if C is 0
    cpu_slot_uses: npt.NDArray[np.int64]  # (W, C)
    stamps: npt.NDArray[np.int64]  # (A + 1,) stamp of the last step with the adapter
    step: npt.NDArray[np.int64]  # (A + 1,) the adapters of the step that is being formed, IN_STEP of them
    aside: npt.NDArray[np.void]  # (1,) ASIDE: requests that the step being formed has no slot for
    loads: npt.NDArray[np.int64]  # (W,) how many times an adapter was put into a slot
    numbers: npt.NDArray[np.int64]  # (NUMBERS,)


NO_ADAPTERS = AdapterState(
    adapter_of=empty_field("i8"),
    settings=empty_field(SETTING),
    waiting=empty_field("i4", 2),
    slots=empty_field("i4", 2),
    slot_at=empty_field("i4", 2),
    slot_uses=empty_field("i8", 2),
    cpu_slots=empty_field("i4", 2),
    cpu_slot_at=empty_field("i4", 2),
    cpu_slot_uses=empty_field("i8", 2),
    stamps=empty_field("i8"),
    step=empty_field("i8"),
    aside=empty_field(ASIDE),
    loads=empty_field("i8"),
    numbers=empty_field("i8"),
)


def check_adapters(lora: Lora | None, trace: Trace, *, prefix_cache: bool = False) -> None:
    """Raise InputError if the trace names adapters that are not served, or names none though prefix caches
    need to know them. A trace that names none is otherwise right: `adapter_numbers` draws them.
    """
    if lora is None:
        if trace.adapters:
            raise InputError(
                f"{trace.name}: column adapter names {count_text(len(trace.adapters), 'adapter')}, and no "
                "lora is configured; add lora: {max_loras: ..., max_rank: ..., adapters: ...}, or drop the "
                "column"
            )
        return
    if not trace.adapters:
        if prefix_cache:
            raise InputError(
                f"{trace.name}: has no column adapter, which lora with policies.prefix_cache needs: only "
                "requests of one adapter share a prefix; add the column, or drop prefix_cache"
            )
        return
    if isinstance(lora.adapters, int):
        if len(trace.adapters) > lora.adapters:
            raise InputError(
                f"lora: adapters is {lora.adapters}, and {trace.name} names {len(trace.adapters)}; raise it"
            )
    elif unknown := [name for name in trace.adapters if name not in lora.adapters]:
        raise InputError(f"{trace.name}: adapter {show_value(unknown[0])} is none of lora: adapters")


def adapter_numbers(lora: Lora, trace: Trace, seed: int) -> IntArray:
    """The number of each request's adapter (n,): as the trace says, or drawn with equal shares of all
    adapters if the trace names none. Raises InputError as `check_adapters` does.
    """
    check_adapters(lora, trace)
    if not trace.adapters:
        return np.random.default_rng([seed, lora.adapter_count]).integers(
            1, lora.adapter_count + 1, len(trace)
        )
    number_of = {name: number for number, name in enumerate(adapter_names(lora), 1)}
    if not number_of.keys() >= set(trace.adapters):  # With a count, the trace's own names are numbered.
        number_of = {name: number for number, name in enumerate(trace.adapters, 1)}
    numbers = [number_of[name] for name in trace.adapters]
    # `trace.adapter` is -1 for a request to the LLM alone, and -1 picks the 0 that is appended.
    return np.append(np.array(numbers, np.int64), 0)[trace.adapter]


def adapter_names(lora: Lora) -> tuple[str, ...]:
    """The names of all adapters in the order of their numbers; without names the numbers themselves."""
    if isinstance(lora.adapters, int):
        return tuple(map(str, range(1, lora.adapters + 1)))
    return lora.adapters


def fill_slots(
    slots: npt.NDArray[np.int32], slot_at: npt.NDArray[np.int32], uses: npt.NDArray[np.int64], count: int
) -> None:
    """Fill the first `count` slots of one worker as vLLM does when it starts, in place. The arrays are rows
    of AdapterState.

    vLLM loads all adapters one after the other, so the last `count` of them stay.
    """
    adapters = len(slot_at) - 1
    slot_at[:], uses[:], slots[:] = NONE, 0, 0
    for slot in range(count):
        adapter = adapters - count + 1 + slot
        slots[slot], slot_at[adapter] = adapter, slot


def _empty_slots(
    workers: int, slots: int, adapters: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """`slots` empty slots for each of the workers, as three arrays of AdapterState: the adapter in each slot,
    the slot of each adapter, and the stamp of the step that used each slot last. With 0 slots none has
    columns.
    """
    columns = adapters + 1 if slots else 0
    return (
        np.zeros((workers, slots), np.int32),
        np.full((workers, columns), NONE, np.int32),
        np.zeros((workers, slots), np.int64),
    )


def make_adapters(
    fleet: Fleet, trace: Trace, type_indices: IntArray, types: Sequence[WorkerType]
) -> AdapterState | None:
    """The adapters before the first step; None for a fleet without LoRA. `type_indices` (W,) are the places
    of the workers' types in `types`. Raises InputError as `check_adapters` does.
    """
    lora = fleet.lora
    if lora is None:
        return None
    adapter_of = adapter_numbers(lora, trace, fleet.policies.seed)
    count, workers = lora.adapter_count, len(type_indices)
    settings = np.zeros(len(types), SETTING)
    for i, worker_type in enumerate(types):
        setting, costs = settings[i], worker_type.lora
        # Without costs, adapters take no time on these workers; with a slot for each, no request waits.
        if costs is None:
            setting["max_loras"] = setting["max_cpu_loras"] = count
            continue
        setting["max_loras"] = min(costs.lora.max_loras, count)
        setting["max_cpu_loras"] = min(costs.lora.max_cpu_loras, count)
        for name in COSTS:
            setting[name] = getattr(costs.cost, name)
    most_slots, most_cpu_slots = int(settings["max_loras"].max()), int(settings["max_cpu_loras"].max())
    if (settings["max_cpu_loras"] == count).all():
        most_cpu_slots = 0  # The host's memory holds all adapters, so none leaves it (AdapterState).
    aside = np.zeros(1, ASIDE)
    aside["head"] = NONE
    slots, slot_at, slot_uses = _empty_slots(workers, most_slots, count)
    cpu_slots, cpu_slot_at, cpu_slot_uses = _empty_slots(workers, most_cpu_slots, count)
    for w in range(workers):
        setting = settings[type_indices[w]]
        fill_slots(slots[w], slot_at[w], slot_uses[w], setting["max_loras"])
        if most_cpu_slots:
            fill_slots(cpu_slots[w], cpu_slot_at[w], cpu_slot_uses[w], setting["max_cpu_loras"])
    return AdapterState(
        adapter_of=adapter_of,
        settings=settings,
        waiting=np.zeros((workers, count + 1), np.int32),
        slots=slots,
        slot_at=slot_at,
        slot_uses=slot_uses,
        cpu_slots=cpu_slots,
        cpu_slot_at=cpu_slot_at,
        cpu_slot_uses=cpu_slot_uses,
        stamps=np.zeros(count + 1, np.int64),
        step=np.zeros(count + 1, np.int64),
        aside=aside,
        loads=np.zeros(workers, np.int64),
        numbers=np.zeros(NUMBERS, np.int64),
    )
