"""Finds limits of an SLO that no fleet keeps, because requests miss them even on idle workers.

`unreachable_limits` finds such limits before the search. `floor_s` returns the value of a limit's percentile
if every request has an idle worker to itself, where mixed/infeasible.py begins its search for limits that a
fleet keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from planner.domain import ROUNDING, Limit, Selector, Slo
from planner.fleet import WorkerType
from planner.models.latency import StepLatency
from planner.models.speculation import Speculation, SpeculativeSteps, least_token_times
from planner.simulator.measured_values import percentile_s
from planner.solvers.master import Floats, attention_s
from planner.solvers.required_work import find_backlog_deadlines, find_deadlines
from planner.traffic.classes import select_requests
from planner.traffic.sessions import waits_for_others
from planner.traffic.tasks import BoolArray, Tasks, tasks_of
from planner.traffic.trace import IntArray, Trace
from planner.traffic.workload import TraceLengths


def idle_prefill_s(worker: WorkerType, input_tokens: Floats, shared_tokens: Floats | float = 0.0) -> Floats:
    """The TTFT (n,) [s] of prompts of `input_tokens` (n,), each alone on an idle worker.

    `shared_tokens` of a prompt are in other prompts too; they are assumed to be cached.
    """
    latency = worker.latency
    # The last token of a prompt is always computed, because its step yields the first output token.
    computed_tokens = np.maximum(input_tokens - shared_tokens, 1)
    cached_tokens = input_tokens - computed_tokens
    # Each computed token also attends to all cached ones, which `prefill_s` does not know of.
    prefill_s = latency.prefill_s(computed_tokens, worker.max_num_batched_tokens)
    ttft_s = prefill_s + latency.a_s * computed_tokens * cached_tokens
    # The chunks of a prompt keep all stages busy, so each stage takes 1 / PP of the prompt's time. The last
    # chunk then still runs through the other stages, which takes at least their share of a step of one token.
    if worker.pp > 1:
        ttft_s = ttft_s / worker.pp + (1 - 1 / worker.pp) * latency.step_s(1)
    return np.asarray(ttft_s)


def _least_ttft_s(worker: WorkerType, input_tokens: Floats, shared_tokens: Floats) -> Floats:
    """Like `idle_prefill_s`, plus the time of the engine's front end, which tokenizes the whole prompt even
    if its beginning is cached.
    """
    idle_s = idle_prefill_s(worker, input_tokens, shared_tokens)
    if (engine := worker.engine) is None:
        return idle_s
    return np.asarray(idle_s + engine.front_end_s + engine.prompt_token_s * input_tokens)


def floor_s(limit: Limit, worker: WorkerType, lengths: TraceLengths) -> float:
    """The limit's percentile [s] if every request had an idle worker of this type, without the engine's front
    end; 0 where it cannot be computed from the lengths.
    """
    if limit.metric_row.is_of_tasks:
        return 0.0  # `lengths` does not say which requests make up a task.
    inputs, requests = lengths.input_tokens, lengths.requests.astype(float)
    latency, percentile_frac = worker.latency, limit.percentile_frac
    ttft_s = idle_prefill_s(worker, inputs, lengths.shared_tokens)
    gaps = lengths.output_tokens - 1
    if worker.speculation is None:
        # Decode step j of a request has a context of inputs + j tokens; this is the mean over all its steps.
        mean_context_tokens = inputs + (gaps + 1) / 2
        decoding_s = gaps * latency.step_s(1, decodes=1) + latency.d_s * gaps * mean_context_tokens
    else:
        decoding_s = _drafted_s(worker, inputs, gaps)
    is_decoded = gaps > 0
    if not limit.metric_row.is_of_gaps:
        values_s = limit.metric_row.values_s(_idle_times(inputs, lengths.output_tokens, ttft_s, decoding_s))
        is_counted = is_decoded if limit.metric_row.is_of_decodes else np.ones(len(inputs), bool)
        return percentile_s(values_s[is_counted], percentile_frac, requests[is_counted])
    # All gaps of a request count as its first one, which has the shortest context.
    first_gap_s = latency.step_s(1, decodes=1, kv_tokens=inputs[is_decoded] + 1)
    if worker.speculation is not None:
        if percentile_frac <= 1 - 1 / worker.speculation.mean_tokens:
            return 0.0  # Tokens of one step leave together, so the gap of this percentile is 0.
        first_gap_s = _drafted_s(worker, inputs, np.ones_like(inputs))[is_decoded]
    return percentile_s(first_gap_s, percentile_frac, (gaps * requests)[is_decoded])


@dataclass(frozen=True, slots=True, eq=False)
class _IdleTimes:
    """The times (n,) of requests that are each alone on an idle worker, all arriving at 0 and of no task. The
    fields have the names that the rows of slo_metrics.py read.
    """

    arrival_s: Floats
    input_tokens: IntArray
    output_tokens: IntArray
    ttft_s: Floats
    tbt_max_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    tasks: None = None


def _idle_times(
    input_tokens: Floats, output_tokens: Floats, ttft_s: Floats, decoding_s: Floats
) -> _IdleTimes:
    """The times of requests from their TTFT and their decoding times. The longest gap is taken to be the mean
    gap, which is a lower bound on it.
    """
    mean_gap_s = decoding_s / np.maximum(output_tokens - 1, 1)
    lengths = input_tokens.astype(np.int64), output_tokens.astype(np.int64)
    return _IdleTimes(np.zeros(len(ttft_s)), *lengths, ttft_s, mean_gap_s, mean_gap_s, ttft_s + decoding_s)


def _drafted_s(worker: WorkerType, input_tokens: Floats, gaps: Floats) -> Floats:
    """The seconds (n,) that a single decode takes for `gaps` (n,) tokens, if each of its speculative steps
    yields the mean number of tokens.
    """
    assert worker.speculation is not None
    steps = SpeculativeSteps(worker.latency, worker.speculation)
    step_count = np.ceil(gaps / worker.speculation.mean_tokens)
    mean_context_tokens = input_tokens + 1 + gaps / 2
    step_s = [
        steps.step_s(prompt_tokens=0.0, pairs=0.0, decodes=1.0, kv_tokens=kv_tokens, prefills=0.0)
        for kv_tokens in mean_context_tokens.tolist()
    ]
    return np.asarray(step_count * np.array(step_s))


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The requests that are judged on every fleet: U distinct combinations of lengths (U,), and how many
    `requests` (U,) have each.

    If `is_cached`, the `shared_tokens` of a prompt are assumed to be cached; without prefix caches they are
    0.

    A request that waits for others arrives when those are done. If it nominally arrives in the warm-up, it
    arrives after the warm-up on some fleets, and is judged only on them. There are `judged_on_some` such
    requests, of which `decoded_on_some` have more than one output token; a floor (`unreachable_limits`)
    assumes that they take no time. `has_gaps` is True if at least one gap is judged on every fleet that
    passes the backlog test and rejects nothing.
    """

    input_tokens: Floats
    output_tokens: Floats
    shared_tokens: Floats
    requests: Floats
    is_cached: bool
    judged_on_some: int
    decoded_on_some: int
    has_gaps: bool
    of_tasks: JudgedTasks | None = None
    of_classes: Mapping[Selector, Judged] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class JudgedTasks:
    """The tasks of a trace, with the lengths (n,) of all of its requests.

    A task whose last request nominally arrives in the warm-up may be judged or not, so a floor assumes that
    it takes no time. `is_sure` (n,) marks the requests that do not nominally arrive in the warm-up.
    """

    tasks: Tasks
    input_tokens: Floats
    output_tokens: Floats
    shared_tokens: Floats
    is_sure: BoolArray


def requests_to_judge(slo: Slo, trace: Trace, shared_tokens: IntArray | None = None) -> Judged:
    """The judged requests of a trace. `shared_tokens` (n,) of each prompt are in other prompts too; None
    without prefix caches.
    """
    of_classes = {selector: _judged_of(slo, trace, shared_tokens, selector) for selector in slo.selectors}
    return replace(_judged_of(slo, trace, shared_tokens, None), of_classes=of_classes)


def _judged_of(slo: Slo, trace: Trace, shared_tokens: IntArray | None, selector: Selector | None) -> Judged:
    """The judged requests of one class of the SLO, or of all classes if `selector` is None.

    Whether gaps are judged follows from the backlog test, which is one test for all requests. So `has_gaps`
    is False for a single class.
    """
    measured = find_deadlines(slo, trace)
    is_measured, end_s = measured.arrives(trace), measured.window_s[1]
    is_decoded = trace.output_tokens > 1
    is_judged_on_some = waits_for_others(trace) & ~is_measured
    if selector is not None:
        of_class = select_requests(selector, trace)
        is_measured, is_judged_on_some = is_measured & of_class, is_judged_on_some & of_class
    has_gaps = bool((is_measured & is_decoded).any())
    if tested := find_backlog_deadlines(slo, trace):  # None for a trace with sessions.
        # A fleet that passes the backlog test serves half of the last tenth of requests in time. If more than
        # half of these have a gap that then ends in the window, at least one gap is judged.
        is_last = tested.arrives(trace)
        ends_in_window = trace.arrival_s + tested.prefill_s + tested.gap_s <= end_s
        has_gaps = int((is_last & is_decoded & ends_in_window).sum()) > int(is_last.sum()) // 2
    has_gaps = has_gaps and selector is None
    columns = [trace.input_tokens[is_measured], trace.output_tokens[is_measured]]
    if shared_tokens is None:
        # Both lengths are packed into one integer of 64 bits, whose distinct values are found several times
        # as fast as distinct rows.
        packed, requests = np.unique((columns[0] << 32) + columns[1], return_counts=True)
        inputs, outputs = packed >> 32, packed & (2**32 - 1)
        shared = np.zeros(len(packed))
    else:
        rows, requests = np.unique(
            np.stack([*columns, shared_tokens[is_measured]], axis=1), axis=0, return_counts=True
        )
        inputs, outputs, shared = rows.T
    return Judged(
        input_tokens=inputs.astype(float),
        output_tokens=outputs.astype(float),
        shared_tokens=shared.astype(float),
        requests=requests.astype(float),
        is_cached=shared_tokens is not None,
        judged_on_some=int(is_judged_on_some.sum()),
        decoded_on_some=int((is_judged_on_some & is_decoded).sum()),
        has_gaps=has_gaps,
        of_tasks=_judged_tasks(slo, trace, shared_tokens, is_measured),
    )


def _judged_tasks(
    slo: Slo, trace: Trace, shared_tokens: IntArray | None, is_measured: BoolArray
) -> JudgedTasks | None:
    """The tasks of a trace; None if no limit is on tasks, or the traffic has none."""
    tasks = tasks_of(trace)
    if tasks is None or not any(limit.metric_row.is_of_tasks for limit in slo.limits):
        return None
    shared = np.zeros(len(trace)) if shared_tokens is None else shared_tokens.astype(float)
    lengths = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    return JudgedTasks(tasks, *lengths, shared, is_measured)


def _least_of_tasks(limit: Limit, types: Sequence[WorkerType], judged_requests: Judged) -> float:
    """The limit's percentile [s] if every request of every task had each phase on its fastest idle worker."""
    judged_tasks = judged_requests.of_tasks
    if judged_tasks is None:
        return 0.0
    inputs, gaps = judged_tasks.input_tokens, judged_tasks.output_tokens - 1
    step_times = dict.fromkeys((worker.latency, worker.speculation) for worker in types)
    decoding_s = np.min(
        [_decoding_s(latency, drafts, inputs, gaps, judged_requests) for latency, drafts in step_times],
        axis=0,
    )
    ttft_s = np.min([_least_ttft_s(worker, inputs, judged_tasks.shared_tokens) for worker in types], axis=0)
    e2e_s = ttft_s + decoding_s
    tasks = judged_tasks.tasks
    # "task_served" has no seconds of tools; the other metrics of tasks include them (`turn_s`).
    path_s = e2e_s if limit.metric == "task_served" else tasks.turn_s(e2e_s)
    values_s = np.where(judged_tasks.is_sure, tasks.served_s(path_s), 0.0)[tasks.last]
    return percentile_s(values_s, limit.percentile_frac)


def _least_of(limit: Limit, types: Sequence[WorkerType], judged_requests: Judged) -> float:
    """The limit's judged percentile [s] if every request had each phase on its fastest idle worker."""
    if limit.selector is not None:
        judged_requests = judged_requests.of_classes[limit.selector]

    def percentile(values_s: Floats, requests: Floats, judged_on_some: int) -> float:
        """The percentile of these values and of the requests judged on some fleets, which take no time."""
        values_s, requests = np.append(values_s, 0.0), np.append(requests, float(judged_on_some))
        return percentile_s(values_s, limit.percentile_frac, requests) if requests.any() else 0.0

    inputs, gaps = judged_requests.input_tokens, judged_requests.output_tokens - 1
    step_times = dict.fromkeys((worker.latency, worker.speculation) for worker in types)

    def least_decoding_s(gaps: Floats) -> Floats:
        """The seconds (n,) that each request takes for its `gaps` (n,), with its fastest step times."""
        by_step_times_s = [
            _decoding_s(latency, drafts, inputs, gaps, judged_requests) for latency, drafts in step_times
        ]
        return np.asarray(np.min(by_step_times_s, axis=0))

    if limit.metric_row.is_of_gaps:  # The fleet decides which gaps are counted.
        if limit.percentile_frac <= 1 - 1 / max(worker.step_tokens for worker in types):
            return 0.0  # A step yields several tokens, so all gaps up to this percentile may be 0.
        first_gap = np.minimum(gaps, 1.0)  # 1 for each request that has a gap.
        first_s = least_decoding_s(first_gap)
        return float(first_s[gaps > 0].min()) if judged_requests.has_gaps and (gaps > 0).any() else 0.0
    if limit.metric_row.is_of_tasks:
        return _least_of_tasks(limit, types, judged_requests)
    decoding_s = least_decoding_s(gaps)
    ttft_s = np.min(
        [_least_ttft_s(worker, inputs, judged_requests.shared_tokens) for worker in types], axis=0
    )
    values_s = limit.metric_row.values_s(
        _idle_times(inputs, judged_requests.output_tokens, ttft_s, decoding_s)
    )
    if not limit.metric_row.is_of_decodes:
        return percentile(values_s, judged_requests.requests, judged_requests.judged_on_some)
    is_decoded = gaps > 0
    return percentile(
        values_s[is_decoded], judged_requests.requests[is_decoded], judged_requests.decoded_on_some
    )


def _decoding_s(
    latency: StepLatency,
    drafts: Speculation | None,
    input_tokens: Floats,
    gaps: Floats,
    judged_requests: Judged,
) -> Floats:
    """A lower bound (n,) [s] on the decoding time of `gaps` (n,) tokens: each request is alone on its worker,
    and all of its drafts are accepted.

    After a preemption, recomputing a short context also yields a token. If that is quicker than a decode, its
    time counts.
    """
    tokens_per_step = 1 if drafts is None else drafts.most_tokens
    latency = least_token_times(latency, drafts)
    own_attention_s = attention_s(latency, 0.0, input_tokens, gaps, is_cached=judged_requests.is_cached)
    steps = np.ceil(gaps / tokens_per_step)
    return np.asarray(steps * latency.step_s(1) + own_attention_s)


class Floor(NamedTuple):
    """A limit, its floor (the least value `least_s` of its percentile), and the name of the worker type that
    reaches the floor.
    """

    limit: Limit
    least_s: float
    worker_type: str

    @property
    def missed_s(self) -> float:
        """The largest value of the limit that is known to be missed: its floor, or the limit as it is."""
        return max(self.least_s, self.limit.limit_s)


def unreachable_limits(slo: Slo, types: Sequence[WorkerType], judged_requests: Judged) -> list[Floor]:
    """The limits that no fleet of these types keeps even when idle.

    A floor is a lower bound on the percentile that is judged (slo_verdict.judge_slo). For gaps it is the
    shortest gap, because it depends on the fleet which gaps end in the measured window.
    """
    broken = []
    ordered = _fastest_first(types)
    for limit in slo.limits:
        # Usually the first type keeps the limit, and its own floor is computed faster than that of all types.
        if any(
            _least_of(limit, [worker], judged_requests) <= limit.limit_s * (1 + ROUNDING)
            for worker in ordered
        ):
            continue
        least_s = _least_of(limit, types, judged_requests)  # Each phase of each request on its fastest type.
        if least_s > limit.limit_s * (1 + ROUNDING):
            alone_s = [_least_of(limit, [worker], judged_requests) for worker in types]
            broken.append(Floor(limit, least_s, types[int(np.argmin(alone_s))].name))
    return broken


def _fastest_first(types: Sequence[WorkerType]) -> list[WorkerType]:
    """The types in the order of the seconds per token of their fullest steps."""

    def token_s(worker: WorkerType) -> float:
        return float(worker.latency.step_s(worker.max_num_batched_tokens)) / worker.max_num_batched_tokens

    return sorted(types, key=token_s)
