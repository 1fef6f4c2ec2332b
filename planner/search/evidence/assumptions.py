"""Lists the assumptions of a plan, as facts that its report and certificate show.

reports/fact_sentences.py has the sentence of each fact, also of each `Assumption` by its name.
"""

import math

from planner.documents.facts import (
    Adapters,
    Assuming,
    Assumption,
    Drafts,
    ElectricityCounted,
    EngineModelled,
    EngineSettings,
    GpusConsidered,
    GpusTooSmall,
    HostOverheads,
    KvLink,
    NoRoomForKv,
    NotOffered,
    ObligedWork,
    Offloaded,
    RequestTooLong,
    SmallCaches,
    SmallWorker,
    StepSpread,
    StepTimes,
    UncheckedEngine,
    UncheckedLeftOut,
    WeightsTooLarge,
)
from planner.domain import row_of
from planner.fleet import Fleet
from planner.search.evidence.findings import window_of
from planner.search.problem.plan_problem import Problem
from planner.simulator.simulation import Simulation


def find_gpus_too_small(problem: Problem) -> tuple[SmallWorker, ...]:
    """For each GPU of the question on which no worker has enough memory, its largest worker."""
    in_search = {worker.gpu.name for worker in problem.types}
    largest: dict[str, SmallWorker] = {}
    for gpu in problem.gpus:
        if gpu.name in in_search:
            continue
        # Options stand in the order of their degrees of TP, so the last one of a GPU is its largest worker. A
        # label begins with the GPU and the degree ("h100-80g tp4"), see `OptionLeftOut`.
        for option in problem.left_out:
            if not option.name.startswith(f"{gpu.name} tp"):
                continue
            if isinstance(option.because, RequestTooLong):
                largest[gpu.name] = SmallWorker(option.name, option.because.kv_tokens)
            elif isinstance(option.because, WeightsTooLarge | NoRoomForKv):
                largest[gpu.name] = SmallWorker(option.name, 0)  # No room for KV blocks.
    return tuple(largest.values())


def list_assumptions(problem: Problem, fleet: Fleet, simulation: Simulation) -> tuple[Assuming, ...]:
    """All assumptions of the plan, of its bound, and of its simulation."""
    task, policies = problem.task, fleet.policies
    # The bound and the search use the step times of all worker types, not only of those in the fleet.
    latencies = [worker.latency for worker in problem.types]
    facts: list[Assuming] = [
        Assumption("monotonicity"),
        StepTimes(tuple(sorted({latency.basis for latency in latencies}))),
        HostOverheads(tuple(sorted({latency.h_s for latency in latencies}))),
        EngineSettings(
            max_num_seqs=tuple(task.max_num_seqs),
            prefix_cache=policies.prefix_cache,
            queue=policies.queue,
            queue_window_s=policies.queue_window_s if policies.queue_window_s < math.inf else None,
            routing=policies.routing,
        ),
        _first_token(problem),
        *_link_facts(problem, fleet),
        Assumption("steady-state"),
        window_of(simulation),
        *_bound_facts(problem),
        Assumption("one-budget-per-role"),
        Assumption("board-power"),
    ]
    facts += [
        StepSpread(
            worker=pool.type.name,
            prefill=(spread.prefill.low, spread.prefill.high),
            decode=(spread.decode.low, spread.decode.high),
            source=spread.source,
            is_own=spread.is_own,
        )
        for pool in fleet.running_pools
        if (spread := pool.type.latency.spread) is not None
    ]
    if task.considers_all_gpus:
        measured = {row_of(worker.gpu.name) for worker in problem.types if worker.latency.is_measured}
        gpu_rows = dict.fromkeys(row_of(worker.gpu.name) for worker in problem.types)  # Each once, in order.
        facts.append(
            GpusConsidered(
                tuple(name for name in gpu_rows if name in measured),
                tuple(name for name in gpu_rows if name not in measured),
            )
        )
        if too_small := find_gpus_too_small(problem):
            facts.append(GpusTooSmall(problem.llm.weight_bytes, problem.longest_tokens, too_small))
    if task.unchecked_left_out:
        facts.append(UncheckedLeftOut(task.unchecked_left_out))
    if task.gpus_not_offered:
        facts.append(NotOffered(task.gpus_not_offered))
    if (electricity := task.electricity) is not None:
        # `electricity.of`: the GPUs whose electricity the cost counts, "owned" or "all".
        facts.append(ElectricityCounted(electricity.usd_per_kwh, electricity.pue, electricity.of))
    if task.engine is not None:
        facts.append(EngineModelled(task.engine.title, task.engine.basis))
        if not task.engine.is_checked:
            facts.append(UncheckedEngine(task.engine.title))
    facts += [
        Drafts(
            worker=pool.type.name,
            method=speculation.method,
            tokens=speculation.tokens,
            mean_tokens=speculation.mean_tokens,
            draft_frac=speculation.draft_frac,
            draft_s=speculation.draft_s,
            basis=speculation.basis,
        )
        for pool in fleet.running_pools
        if (speculation := pool.type.speculation) is not None and pool.role != "prefill"
    ]
    # Where the trace does not say which adapter a request is for, it is drawn.
    facts += _adapters_facts(fleet, drawn=not problem.trace.adapters)
    facts += _offload_facts(fleet, simulation)
    facts += _cache_facts(problem, fleet)
    has_sessions = problem.trace.after.size > 0
    if has_sessions:
        facts += [Assumption("sessions-wait"), Assumption("sessions-given-up")]
    if problem.slo_reference is not None:
        facts.append(problem.slo_reference)
    return tuple(facts)


def _link_facts(problem: Problem, fleet: Fleet) -> list[Assuming]:
    """The link that carries KV blocks, and whether its figures are the planner's own."""
    task = problem.task
    link = KvLink(task.network.bandwidth_bytes_per_s, task.network.transfer)
    is_default = fleet.is_disaggregated and not task.is_network_stated
    return [link, Assumption("default-link")] if is_default else [link]


def _first_token(problem: Problem) -> Assumption:
    """The assumption about which event is the first token, where TTFT ends."""
    engines = [worker.engine for worker in problem.types]
    if any(engine is not None and engine.first_token == "decode" for engine in engines):
        return Assumption("first-token-of-decode")
    return Assumption("ttft-ends-with-prefill")


def _cache_facts(problem: Problem, fleet: Fleet) -> list[Assuming]:
    """The assumptions about prefix caches. The search may have used caches even if the plan does not."""
    facts: list[Assuming] = []
    if problem.hits is not None:
        facts.append(
            Assumption("own-blocks-alone" if problem.task.policies.may_pin else "first-use-of-blocks")
        )
    if fleet.policies.prefix_cache:
        facts.append(Assumption("cold-caches"))
    if fleet.pinned:
        facts.append(Assumption("pins-placed-quickly"))
    return facts


def _adapters_facts(fleet: Fleet, *, drawn: bool) -> list[Assuming]:
    """The assumptions about LoRA adapters, one fact per pool that serves them."""
    return [
        Adapters(
            worker=pool.type.name,
            adapters=lora_slots.lora.adapter_count,
            max_loras=lora_slots.lora.max_loras,
            max_rank=lora_slots.lora.max_rank,
            max_cpu_loras=lora_slots.lora.max_cpu_loras,
            slot_bytes=lora_slots.cost.slot_bytes,
            step_s=lora_slots.cost.one_token_s,
            load_s=lora_slots.cost.load_s,
            disk_s=lora_slots.cost.disk_s,
            drawn=drawn,
        )
        for pool in fleet.running_pools
        if (lora_slots := pool.type.lora) is not None
    ]


def _offload_facts(fleet: Fleet, simulation: Simulation) -> list[Assuming]:
    """The assumptions about KV blocks in the host's memory, one fact per pool that prefills.

    Where workers share one store, the facts have its whole memory and bandwidth; otherwise the share of one
    GPU. Hit rates and the time of loads are those of the whole fleet.
    """
    offload = fleet.policies.kv_offload
    hit_frac, reload_frac = simulation.token_hit_frac, simulation.token_reload_frac
    if offload is None or hit_frac is None or reload_frac is None:  # Without caches nothing is loaded.
        return []
    return [
        Offloaded(
            worker=pool.type.name,
            memory_tokens=offload.kv_tokens(fleet.llm, pool.type.tp),
            kv_tokens=pool.type.kv_tokens,
            gpu_bytes=offload.size_bytes,
            gpu_bytes_per_s=offload.bandwidth_bytes_per_s,
            thousand_tokens_s=1000 * offload.token_s(fleet.llm, pool.type.tp),
            hit_frac=hit_frac,
            reload_frac=reload_frac,
            computed_frac=1.0 - hit_frac - reload_frac,
            reload_s=float(simulation.reload_s.sum()),
            is_shared=offload.is_shared,
            disk_bytes=offload.disk_bytes,
            disk_frac=simulation.token_disk_frac or 0.0,
        )
        for pool in fleet.running_pools
        if pool.role != "decode"
    ]


def _bound_facts(problem: Problem) -> list[Assuming]:
    """The assumptions about what the lower bound counts, and for which fleets it is valid."""
    work, trace = problem.slo_work, problem.trace
    facts: list[Assuming] = [
        ObligedWork(
            whole_frac=work.whole_frac,  # Share of the requests whose whole work must be done.
            # `whole_s` counts from the first arrival (required_work.py), this fact from the last one.
            whole_after_s=work.whole_s - trace.duration_s if work.whole_frac > 0 else 0.0,
            prefill_frac=work.prefill_frac,
            # The bound also counts the last tenth of arrivals, because of the backlog test; but not with
            # sessions, where arrivals depend on how fast the fleet answers.
            tail=not trace.after.size,
        )
    ]
    # An option that is left out names its workers only if their KV cache is too small.
    if small := [worker for item in problem.left_out for worker in item.workers]:
        names = sorted({f"{worker.gpu.name} tp{worker.tp}" for worker in small})
        facts.append(SmallCaches(tuple(names), problem.longest_tokens))
    return facts
