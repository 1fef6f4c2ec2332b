"""Makes a Simulation, the results of every request and worker, from the kernel's arrays (layout.py) after a
simulation has run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from planner.domain import Limit, selectors_of
from planner.errors import InputError
from planner.fleet import Fleet
from planner.simulator import cache_layout, layout
from planner.simulator.adapter_layout import adapter_names
from planner.simulator.layout import State
from planner.simulator.simulation import Ints, Simulation
from planner.traffic.classes import class_numbers
from planner.traffic.tasks import tasks_of
from planner.traffic.trace import Trace


def columns_of(requests: npt.NDArray[np.void], output_tokens: Ints) -> dict[str, npt.NDArray[Any]]:
    """The results of requests, as columns (n,) by name, from their records (REQUEST in layout.py) after a
    simulation. Times are in seconds; those of tokens are NaN where no token came.

    The column `last_finish_s` (1,) is the end of the last request, NaN if none finished.
    """
    arrival_s, scheduled_s, first_token_s, finish_s, gap_max_s = (
        requests[name].copy()  # Each column is copied once, because its values are far apart in memory.
        for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "gap_max_s")
    )
    status = requests["status"].copy()
    is_finished = status == layout.FINISHED
    has_gaps = is_finished & (output_tokens > 1)
    return {
        "arrival_s": arrival_s,
        # `scheduled_s` is -1 for a request that was never admitted.
        "queue_s": np.where(scheduled_s >= 0, scheduled_s - arrival_s, np.nan),
        "ttft_s": first_token_s - arrival_s,
        "tpot_s": np.where(has_gaps, (finish_s - first_token_s) / np.maximum(output_tokens - 1, 1), np.nan),
        "tbt_max_s": np.where(has_gaps, gap_max_s, np.nan),
        "e2e_s": finish_s - arrival_s,
        "prefill_worker": requests["prefill_worker"].copy(),
        "decode_worker": requests["decode_worker"].copy(),
        "preemptions": requests["preemptions"].copy(),
        "status": status,
        "last_finish_s": np.array([np.nanmax(finish_s) if is_finished.any() else np.nan]),
    }


def read_simulation(
    state: State,
    fleet: Fleet,
    trace: Trace,
    limits: tuple[Limit, ...],
    columns: dict[str, npt.NDArray[Any]] | None = None,
) -> Simulation:
    """The results of a simulation of `fleet` on `trace`, from the kernel's arrays afterwards.

    `columns` are those of the requests (`columns_of`), if they were read already. Raises InputError if a step
    was larger than the tables of step times.
    """
    _refuse_steps_beyond_tables(state)
    workers, runs = state.workers, state.runs[: state.counters[layout.RUNS]]
    if columns is None:
        columns = columns_of(state.requests, trace.output_tokens)
    arrival_s, status = columns["arrival_s"], columns["status"]
    prefilled_on, decoded_on = columns["prefill_worker"], columns["decode_worker"]  # NONE: on no worker.
    if state.dp_ranks is not None:
        workers, worker_of = _merge_ranks(state)
        prefilled_on, decoded_on, runs = worker_of[prefilled_on], worker_of[decoded_on], runs.copy()
        runs["worker"] = worker_of[runs["worker"]]
    finish_s = float(columns["last_finish_s"][0])
    end_s = float(arrival_s[-1] if np.isnan(finish_s) else finish_s)
    selectors = selectors_of(limits)
    # In sessions the arrivals depend on the simulation; those of the trace are nominal.
    has_sessions = bool(trace.after.size)
    adapter, adapters = trace.adapter, trace.adapters
    if state.adapters is not None and fleet.lora is not None and not adapters:  # They were drawn.
        adapter, adapters = state.adapters.adapter_of - 1, adapter_names(fleet.lora)
    has_caches = state.caches is not None and fleet.policies.prefix_cache
    loads = None if state.offload is None else state.offload.loads
    return Simulation(
        arrival_s=arrival_s,
        input_tokens=trace.input_tokens,
        output_tokens=trace.output_tokens,
        queue_s=columns["queue_s"],
        ttft_s=columns["ttft_s"],
        tpot_s=columns["tpot_s"],
        tbt_max_s=columns["tbt_max_s"],
        e2e_s=columns["e2e_s"],
        prefill_worker=prefilled_on,
        # A request without a hand-off decodes where its prompt ran.
        decode_worker=np.where(decoded_on >= 0, decoded_on, prefilled_on),
        preemptions=columns["preemptions"],
        status=status,
        worker_names=fleet.worker_names,
        worker_busy_s=workers["busy_s"],
        worker_steps=workers["steps"],
        worker_tokens=workers["dense_tokens"],
        window_s=(float(state.window[0]), end_s if np.isinf(state.window[1]) else float(state.window[1])),
        end_s=end_s,
        limits=limits,
        violations=state.limits["violations"],
        counted=state.limits["counted"],
        complete=bool(state.counters[layout.DONE] == len(status)),
        runs=runs,
        parts=state.parts[: state.counters[layout.PARTS]],
        # In this and the next field, NONE (-1) tokens of a request that was never admitted become 0.
        cached_tokens=np.maximum(state.caches.prompts["hit_tokens"], 0) if has_caches else None,
        reloaded_tokens=None if loads is None else np.maximum(loads["loaded_tokens"], 0),
        disk_tokens=None if loads is None else loads["disk_tokens"],
        reload_s=np.zeros(0) if loads is None else loads["waited_s"],
        tenant=trace.tenant,
        tenants=trace.tenants,
        adapter=adapter,
        adapters=adapters,
        tenant_weights=cache_layout.tenant_weights(fleet.policies, trace),
        nominal_end_s=float(trace.arrival_s[-1]) if has_sessions else np.inf,
        token_weights=(fleet.policies.extend_weight, fleet.policies.output_weight),
        image_tokens=trace.image_tokens,
        nominal_s=trace.arrival_s if has_sessions else arrival_s,
        edges_s=state.edges_s,
        counted_in=state.in_windows["counted"],
        violations_in=state.in_windows["violations"],
        tasks=tasks_of(trace),
        of_class=class_numbers(selectors, trace) if selectors else layout.empty_field("i8"),
    )


def _refuse_steps_beyond_tables(state: State) -> None:
    """Raise InputError if a step was larger than the tables of step times. Such a step takes infinitely long:
    its lane (layout.py) is busy, but no end of a step is due there.
    """
    is_due = state.due_s[: len(state.lanes)] < layout.NEVER
    if state.dp_ranks is not None:  # Only the first rank of a worker has events.
        is_due |= state.dp_ranks["first"][state.lanes["worker"]] != state.lanes["worker"]
    if ((state.lanes["run_steps"] > 0) & ~is_due).any():
        raise InputError("a step is larger than the tables of its step times; give larger tables")


def _merge_ranks(state: State) -> tuple[npt.NDArray[np.void], Ints]:
    """The records of the fleet's workers, and for each data-parallel rank the number of its worker. For the
    kernel each rank is a worker.

    All ranks of a worker are busy in the same steps, so a worker has the record of its first rank, with the
    tokens of all ranks. The second array has one entry more, NONE at its end: with NONE (-1) as the index, of
    a request without a worker, it gives NONE.
    """
    assert state.dp_ranks is not None
    firsts, worker_of = np.unique(state.dp_ranks["first"], return_inverse=True)
    workers = state.workers[firsts]
    workers["dense_tokens"] = np.add.reduceat(state.workers["dense_tokens"], firsts)
    return workers, np.append(worker_of, layout.NONE)
