"""What LoRA adds to the kernel's state, and how a fleet and a trace make it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.errors import InputError
from planner.files.document_values import show_value
from planner.fleet import Fleet, WorkerType
from planner.models.lora import Lora
from planner.simulator.layout import NONE, nothing
from planner.traffic.trace import IntArray, Trace

COSTS = ("kernels_s", "read_s", "experts_s", "visited_frac", "token_s", "load_s", "disk_s")
SETTING = np.dtype(  # of a worker type
    [
        ("max_loras", "i8"),
        ("max_cpu_loras", "i8"),
        *((name, "f8") for name in COSTS),  # planner.models.lora.LoraCost
    ]
)
ASIDE = np.dtype([("head", "i8", (1,)), ("tail", "i8", (1,))])  # a list of requests
# numbers: stamp of the latest step that was looked at, how many adapters are in it, and how many it loads
STAMP, IN_STEP, LOADING = 0, 1, 2
NUMBERS = 3


class AdapterState(NamedTuple):
    """W workers, n requests, T worker types; A adapters, from 1 on: 0 is the LLM alone. A worker has up to S
    slots and keeps up to C adapters in the host's memory (no column where it keeps all).
    """

    of: npt.NDArray[np.int64]  # (n,) the adapter of each request
    settings: npt.NDArray[np.void]  # (T,) SETTING
    waiting: npt.NDArray[np.int32]  # (W, A + 1) requests that wait for their prompt, by adapter
    slots: npt.NDArray[np.int32]  # (W, S) the adapter in each slot, 0: none
    slot_at: npt.NDArray[np.int32]  # (W, A + 1) the slot of each adapter, NONE: it has none
    slot_uses: npt.NDArray[np.int64]  # (W, S) stamp of the step that used the slot last
    kept: npt.NDArray[np.int32]  # (W, C), and so on, of the host's memory
    kept_at: npt.NDArray[np.int32]
    kept_uses: npt.NDArray[np.int64]
    stamps: npt.NDArray[np.int64]  # (A + 1,) of the last step that had the adapter
    step: npt.NDArray[np.int64]  # (A + 1,) adapters of the step that is being formed
    aside: npt.NDArray[np.void]  # (1,) ASIDE: requests that found no slot while it is
    loads: npt.NDArray[np.int64]  # (W,) adapters put into a slot
    numbers: npt.NDArray[np.int64]  # (NUMBERS,)


NO_ADAPTERS = AdapterState(
    of=nothing("i8"),
    settings=nothing(SETTING),
    waiting=nothing("i4", 2),
    slots=nothing("i4", 2),
    slot_at=nothing("i4", 2),
    slot_uses=nothing("i8", 2),
    kept=nothing("i4", 2),
    kept_at=nothing("i4", 2),
    kept_uses=nothing("i8", 2),
    stamps=nothing("i8"),
    step=nothing("i8"),
    aside=nothing(ASIDE),
    loads=nothing("i8"),
    numbers=nothing("i8"),
)


def check_adapters(lora: Lora | None, trace: Trace, *, prefix_cache: bool = False) -> None:
    """Raise InputError where the adapters that the trace names are not those that are served."""
    if lora is None:
        if trace.adapters:
            raise InputError(
                f"{trace.name}: column adapter names {len(trace.adapters)} adapters, and no lora is asked "
                "for; add lora: {max_loras: ..., max_rank: ..., adapters: ...}, or drop the column"
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
    """(n,) the adapter of each request: as the trace says, else each as likely as the next."""
    check_adapters(lora, trace)
    if not trace.adapters:
        return np.random.default_rng([seed, lora.adapter_count]).integers(
            1, lora.adapter_count + 1, len(trace)
        )
    names = list(range(1, len(trace.adapters) + 1))
    if not isinstance(lora.adapters, int):
        names = [lora.adapters.index(name) + 1 for name in trace.adapters]
    return np.append(np.array(names, np.int64), 0)[trace.adapter]  # -1 is the last: the LLM alone


def start_with(
    places: npt.NDArray[np.int32], at: npt.NDArray[np.int32], uses: npt.NDArray[np.int64], own: int
) -> None:
    """Of one worker: as vLLM starts, which loads all adapters one after the other, the last ones stay."""
    count = len(at) - 1
    at[:], uses[:], places[:] = NONE, 0, 0
    for i in range(own):
        a = count - own + 1 + i
        places[i], at[a] = a, i


def _places(
    workers: int, most: int, count: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(adapter in each place, place of each adapter, stamps of the steps that used a place last)"""
    columns = count + 1 if most else 0
    return (
        np.zeros((workers, most), np.int32),
        np.full((workers, columns), NONE, np.int32),
        np.zeros((workers, most), np.int64),
    )


def make_adapters(
    fleet: Fleet, trace: Trace, kinds: IntArray, types: Sequence[WorkerType]
) -> AdapterState | None:
    """None for a fleet without LoRA. `kinds` (W,) are the workers' types."""
    lora = fleet.lora
    if lora is None:
        return None
    of, count, workers = adapter_numbers(lora, trace, fleet.policies.seed), lora.adapter_count, len(kinds)
    settings = np.zeros(len(types), SETTING)
    for i, kind in enumerate(types):
        if kind.lora is None:
            settings[i]["max_loras"] = settings[i]["max_cpu_loras"] = count
            continue
        settings[i]["max_loras"], settings[i]["max_cpu_loras"] = (
            min(most, count) for most in (kind.lora.lora.max_loras, kind.lora.lora.max_cpu_loras)
        )
        for name in COSTS:
            settings[i][name] = getattr(kind.lora.cost, name)
    most_slots, most_kept = int(settings["max_loras"].max()), int(settings["max_cpu_loras"].max())
    if (settings["max_cpu_loras"] == count).all():
        most_kept = 0
    aside = np.zeros(1, ASIDE)
    aside["head"] = NONE
    slots, slot_at, slot_uses = _places(workers, most_slots, count)
    kept, kept_at, kept_uses = _places(workers, most_kept, count)
    for w in range(workers):
        own = settings[kinds[w]]
        start_with(slots[w], slot_at[w], slot_uses[w], own["max_loras"])
        if most_kept:
            start_with(kept[w], kept_at[w], kept_uses[w], own["max_cpu_loras"])
    return AdapterState(
        of=of,
        settings=settings,
        waiting=np.zeros((workers, count + 1), np.int32),
        slots=slots,
        slot_at=slot_at,
        slot_uses=slot_uses,
        kept=kept,
        kept_at=kept_at,
        kept_uses=kept_uses,
        stamps=np.zeros(count + 1, np.int64),
        step=np.zeros(count + 1, np.int64),
        aside=aside,
        loads=np.zeros(workers, np.int64),
        numbers=np.zeros(NUMBERS, np.int64),
    )
