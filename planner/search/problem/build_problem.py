"""Builds the problem of a task and a trace: worker types, limits, and the work that the SLO requires."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.documents.catalog import Catalog
from planner.documents.facts import SloInSeconds
from planner.documents.task import PlanQuestion
from planner.domain import SPOT, Gpu, Limit, Slo, row_of
from planner.errors import InfeasibleError, InputError
from planner.fleet import MAX_NUM_SEQS, Policies, WorkerType
from planner.models.llm import Llm
from planner.models.memory import worker_memory
from planner.policies import BY_FIELD
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.scenarios import scenarios_of
from planner.search.oracle.traffic_request import TrafficRequest
from planner.search.prefixes.prefix_drift import may_drift
from planner.search.problem.idle_limits import Floor, floor_s, requests_to_judge, unreachable_limits
from planner.search.problem.options import EngineChoices, OptionLeftOut, worker_types
from planner.search.problem.plan_problem import Conditions, Problem
from planner.search.problem.prefix_hits import PrefixHits
from planner.search.problem.reasons import also_left_out, reason_text
from planner.simulator.adapter_layout import check_adapters
from planner.simulator.cache_layout import tenant_weights
from planner.simulator.initial_state import check_images
from planner.solvers.master import FleetLimits
from planner.solvers.required_work import compute_slo_work
from planner.traffic.classes import check_judged_classes
from planner.traffic.described import Description
from planner.traffic.trace import Trace
from planner.traffic.workload import TraceLengths, distinct_lengths
from planner.units import show_beside

# --max-num-batched-tokens of the worker to which a relative SLO refers.
REFERENCE_BATCHED_TOKENS = 8192
# Described requests that are longer than the LLM accepts are cut. If more than this share are cut, the
# traffic is not what was described. Set by hand.
MOST_CUT_FRAC = 0.01
MORE_STAGES = (2, 4)  # Numbers of pipeline stages that are tried if the LLM fits on no worker of one stage.
MOST_REASONS = 4  # An error names at most this many reasons: the last ones, of workers with the most GPUs.


class OutOfReachError(InfeasibleError):
    """Limits that not even an idle worker keeps, with their `floors`.

    mixed.infeasible.with_relaxation searches how far they must be relaxed.
    """

    def __init__(self, problem: Problem, floors: Sequence[Floor]) -> None:
        self.problem, self.floors = problem, floors
        limit, least_s, name = floors[0]
        least, limit_text = show_beside(least_s, limit.limit_s)
        super().__init__(
            f"latency: {limit.label} <= {limit_text} is below what any worker can do even when "
            f"idle: the fastest ({name}) needs {least}",
            kind="latency",
            constraint=limit.name,
            relaxation=f"{limit.name} > {least_s:.6g} s, how much more is unknown",
        )


def _longest_tokens(name: str, traces: Sequence[Trace], llm: Llm) -> int:
    """Prompt and output of the longest request. Raises InputError where the LLM does not accept this many."""
    longest = max(int((trace.input_tokens + trace.output_tokens).max()) for trace in traces)
    if longest > llm.context_tokens:
        raise InputError(
            f"{name}: its longest request has {longest} tokens (prompt + output), {llm.name} accepts "
            f"{llm.context_tokens}; drop such requests or choose an LLM with a longer context"
        )
    return longest


def check_described_lengths(description: Description, requests: Trace, llm: Llm) -> None:
    """Raise InputError where too many described requests were cut to what the LLM accepts.

    The turns of agents are not looked at: a task of theirs begins anew before its context is full.
    """
    if description.agents is not None:
        return
    cut_frac = float((requests.input_tokens + requests.output_tokens >= llm.context_tokens).mean())
    if cut_frac > MOST_CUT_FRAC:
        raise InputError(
            f"{requests.name}: {100 * cut_frac:.3g} % of its requests have more than the "
            f"{llm.context_tokens} tokens (prompt + output) that {llm.name} accepts, and at most "
            f"{100 * MOST_CUT_FRAC:g} % may be cut to that; describe shorter ones, such as --input 1500 or "
            "traffic: input: {mean: 1500, p95: 5000, max: 20000}, or choose an LLM with a longer context"
        )


def build_problem(
    task: PlanQuestion,
    trace: Trace,
    catalog: Catalog,
    *,
    seed: int = 0,
    conditions: Conditions | None = None,
    request: TrafficRequest | None = None,
) -> Problem:
    """The problem of a question, from which a search starts.

    `request`, if given, is the result of `TrafficRequest.of` for an earlier question with the same traffic,
    so that it is not computed again. Raises InputError, and InfeasibleError if no fleet is large enough.
    """
    llm = catalog.served_llm(task.llm)
    check_images(llm, trace)  # This check and the next raise InputError.
    check_adapters(task.lora, trace, prefix_cache=task.policies.prefix_cache)
    conditions, request = conditions or Conditions(), request or TrafficRequest.of(trace, task, seed=seed)
    requests, draws = request.requests, request.further
    longest = _longest_tokens(trace.name, (requests, *draws), llm)
    if task.described is not None:
        check_described_lengths(task.described, requests, llm)
    gpus = _by_hardware(task.priced_gpus(catalog))
    types, left_out = _list_worker_types(task, llm, gpus, catalog, longest)
    _check_tenants(task, requests)
    hits = _prefix_hits(task, requests)
    lengths = distinct_lengths(requests)
    slo, slo_reference = _in_seconds(task, llm, lengths, catalog)
    out_of_reach = unreachable_limits(
        slo, types, requests_to_judge(slo, requests, hits.shared_tokens if hits else None)
    )
    limits = FleetLimits(
        stock=dict(sorted(task.stock_and_owned.items())),
        power_w=task.power_limit_w,
        cost_usd_per_h=task.cost_limit_usd_per_h,
        gpus=task.gpu_limit,
        by_gpu=conditions.by_gpu,
    )
    spot = {gpu.name: terms for gpu in gpus if gpu.name.endswith(SPOT) and (terms := task.spot_terms(gpu))}
    oracle = Oracle(
        llm=llm,
        trace=requests,
        slo=slo,
        network=task.network,
        policies=Policies(),
        spare_workers=task.spare_workers,
        spare_nodes=task.spare_nodes,
        spot=spot,
        least_off_spot=task.least_off_spot,
        cache=conditions.cache,
    )
    search_scenarios, test_scenarios = None, None
    if task.safety is not None:
        search_scenarios, test_scenarios = scenarios_of(task, trace, seed, len(requests))
    problem = Problem(
        task=task,
        llm=llm,
        slo=slo,
        slo_reference=slo_reference,
        trace=requests,
        traffic_note=request.note,
        longest_tokens=longest,
        lengths=lengths,
        hits=hits,
        gpus=gpus,
        types=types,
        left_out=left_out,
        limits=limits,
        oracle=oracle,
        slo_work=compute_slo_work(slo, requests),
        deadline=conditions.deadline,
        progress=conditions.progress,
        watch=conditions.watch,
        draws=draws,
        search_scenarios=search_scenarios,
        test_scenarios=test_scenarios,
    )
    if out_of_reach:  # With the problem `with_relaxation` finds how far the limits must be relaxed.
        raise OutOfReachError(problem, out_of_reach)
    return problem


@dataclass(frozen=True, slots=True)
class SearchInputs:
    """What a search begins with. The `trace` is as it was read; the task says how it is scaled or cut.
    `traffic_request` is as `request` in `build_problem`.
    """

    task: PlanQuestion
    trace: Trace
    catalog: Catalog
    seed: int = 0
    conditions: Conditions = field(default_factory=Conditions)
    traffic_request: TrafficRequest | None = None

    def with_deadline(self, deadline: float) -> SearchInputs:
        """The same inputs with this deadline on the search's clock (work_clock.py)."""
        return replace(self, conditions=replace(self.conditions, deadline=deadline))

    def problem(self) -> Problem:
        """The problem of these inputs; raises the errors of `build_problem`."""
        return build_problem(
            self.task,
            self.trace,
            self.catalog,
            seed=self.seed,
            conditions=self.conditions,
            request=self.traffic_request,
        )


def _by_hardware(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs, ordered by their hardware: searches that are not exact depend on the order of their options,
    which must depend neither on prices nor on the order of rows in a question. Owned, rented and spot rows of
    one GPU keep their order.
    """

    def row(gpu: Gpu) -> tuple[float | str, ...]:
        hardware = (gpu.memory_bytes, gpu.bandwidth_bytes_per_s, gpu.dense_flops_per_s, gpu.power_w)
        return *hardware, row_of(gpu.name)

    return tuple(sorted(gpus, key=row))


def _list_worker_types(
    task: PlanQuestion, llm: Llm, gpus: tuple[Gpu, ...], catalog: Catalog, longest_tokens: int
) -> tuple[tuple[WorkerType, ...], tuple[OptionLeftOut, ...]]:
    """The worker types that hold the longest request, and what was left out. If no type holds it, types with
    MORE_STAGES are listed. Raises InfeasibleError if none of these holds it either.
    """
    left_out: tuple[OptionLeftOut, ...] = ()
    is_default = task.stages == (1,)
    for stages in (task.stages, MORE_STAGES) if is_default else (task.stages,):
        engines = replace(EngineChoices.of(task), stages=stages)
        types, newly_left_out = worker_types(llm, gpus, catalog, longest_tokens, engines)
        left_out += newly_left_out
        if types:
            return types, left_out
    last_ones = left_out[-MOST_REASONS:]
    reasons = "; ".join(f"{item.name}: {reason_text(item.because)}" for item in last_ones)
    raise InfeasibleError(
        f"{llm.name} ({llm.weight_bytes / 1e9:.0f} GB of weights) fits on no worker in stock: {reasons}. "
        "Add a GPU with more memory or more GPUs per node, or allow more pipeline stages (fleet: pp)"
        f"{also_left_out(task.unchecked_left_out)}",
        kind="capacity",
        constraint="memory of one worker",
        relaxation="a GPU with more memory",
    )


def _check_tenants(task: PlanQuestion, trace: Trace) -> None:
    """Raise InputError for classes, policies and weights about requests or tenants that the trace lacks."""
    check_judged_classes(task.slo, trace)
    tenant_weights(task.policies.settings, trace)
    for axis, names in task.policies.axes.items():
        rows = [BY_FIELD[axis][name] for name in names if axis in BY_FIELD]
        # d2lpm also goes by caches, so it has a use without tenants.
        counting = [row.name for row in rows if row.counts_tenants and not row.needs_caches]
        if counting and not trace.tenants:
            raise InputError(
                f"policies: {axis}: {counting[0]} counts tenants, and {trace.name} names none; add a column "
                f"tenant (traffic: {{map: {{tenant: COLUMN}}}}), or drop {counting[0]}"
            )


def _prefix_hits(task: PlanQuestion, trace: Trace) -> PrefixHits | None:
    """The hits of prefix caches, if the question offers caches. Raises InputError for a trace on which they,
    or a drift of prefixes, mean nothing.
    """
    is_drifting = task.safety is not None and task.safety.prefix_drift_frac > 0
    if not task.policies.prefix_cache:
        if is_drifting:
            raise InputError(
                "safety: prefix_drift: nothing depends on it without policies: {prefix_cache: true}"
            )
        return None
    if not trace.has_prefixes:
        raise InputError(
            f"{trace.name}: has no block ids, which policies: prefix_cache needs; drop it from slo.yaml, or "
            "give a trace with hash_ids or prefix_ids, as Mooncake's"
        )
    if is_drifting and not may_drift(trace):
        raise InputError(
            f"safety: prefix_drift: {trace.name} has fewer than two prefixes that are used throughout, so no "
            "popularity can move; drop it from slo.yaml"
        )
    return PrefixHits.of(trace)


def _in_seconds(
    task: PlanQuestion, llm: Llm, lengths: TraceLengths, catalog: Catalog
) -> tuple[Slo, SloInSeconds | None]:
    """The SLO with limits in seconds, and the reference worker of a relative SLO.

    A slowdown is a factor on what a request takes on an idle reference worker. Here it becomes one limit for
    all requests: the factor times the same percentile of the reference's times. That is stricter for short
    requests and milder for long ones.
    """
    if task.slowdowns is None:
        return task.slo, None
    gpu = catalog.gpu(task.slowdowns.gpu)
    kv_tokens = worker_memory(llm, gpu, task.slowdowns.tp).kv_tokens
    if kv_tokens == 0:
        raise InputError(
            f"{llm.name} does not fit the SLO's reference worker, {gpu.name} tp{task.slowdowns.tp}"
        )
    reference = WorkerType(
        gpu=gpu,
        tp=task.slowdowns.tp,
        latency=catalog.step_latency(llm, gpu, task.slowdowns.tp),
        kv_tokens=kv_tokens,
        max_num_batched_tokens=REFERENCE_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
    ).with_llm(llm)
    limits = tuple(
        Limit(
            line.metric,
            line.percentile_frac,
            line.factor * floor_s(Limit(line.metric, line.percentile_frac, math.inf), reference, lengths),
        )
        for line in task.slowdowns.limits
    )
    return replace(task.slo, limits=limits), SloInSeconds(gpu.name, task.slowdowns.tp)
