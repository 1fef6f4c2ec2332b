"""The options of a fleet: every GPU in stock x TP x PP x data-parallel ranks x engine settings x role.

build_problem.py calls it. The second half finds limits that no option keeps even when idle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.documents import facts
from planner.documents.catalog import Catalog
from planner.documents.facts import Reason
from planner.documents.speculative import engine_with_drafts, find_drafter
from planner.documents.task import TOKEN_BUDGETS, PlanQuestion
from planner.domain import OWNED, ROUNDING, Gpu, Limit, Selector, Slo
from planner.errors import InputError
from planner.fleet import MAX_NUM_SEQS, Role, WorkerType
from planner.models.all2all import (
    HIGH_THROUGHPUT,
    LOW_LATENCY,
    MEASURED_LINK_BYTES_PER_S,
    MOST_LOW_LATENCY_TOKENS,
    All2All,
    Ranks,
    all2all_of,
    nodes_of_ranks,
)
from planner.models.engine import Engine, vllm_version_of
from planner.models.kv_offload import is_common
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.models.lora import Lora, lora_slots
from planner.models.memory import Served, worker_memory
from planner.models.older_kernels import on_version
from planner.models.parallelism import add_pipeline
from planner.models.speculation import SAMPLED_ROWS, Drafter, Speculation, SpeculativeSteps, least_token_times
from planner.models.spread import INTERVAL_SIGMAS
from planner.search.oracle.fleet_counts import own_drafts
from planner.simulator.slo_verdict import percentile_s
from planner.solvers.master import Floats, Option, attention_s
from planner.solvers.required_work import find_deadlines, steady_work
from planner.solvers.whole_nodes import PricedNode, node_of
from planner.traffic.classes import select_requests
from planner.traffic.sessions import waits_for_others
from planner.traffic.tasks import BoolArray, Tasks, tasks_of
from planner.traffic.trace import IntArray, Trace
from planner.traffic.workload import TraceLengths

Hardware = tuple[str, int, int, int]


def hardware(option: Option) -> Hardware:
    """GPU, TP, PP and data-parallel ranks: a worker type without its engine settings."""
    return option.type.gpu.name, option.type.tp, option.type.pp, option.type.dp


def by_hardware(options: Iterable[Option]) -> dict[tuple[str, Hardware], list[Option]]:
    """The options grouped by role and hardware: those of a group differ in engine settings alone."""
    groups: dict[tuple[str, Hardware], list[Option]] = {}
    for option in options:
        groups.setdefault((option.role, hardware(option)), []).append(option)
    return groups


OWNED_USD_PER_H = 1e-5  # An owned GPU's price in the search: solvers tell it from 0, no answer shows it.
NEARLY = 0.9  # Share of a limit on gaps that decode steps may take, as prefills come between them.
# Decode workers have the token budget nearest to this: it hardly matters there, and is vLLM's usual one.
DECODE_BUDGET_TOKENS = 2048
# The GPUs of a fleet count up to this share more, for their prices. It breaks ties between fleets of equally
# many GPUs; only fleets of more than 10,000 GPUs, its reciprocal, could gain a GPU by it.
PRICE_TIE_FRAC = 1e-4
OBJECTIVE_UNITS = {"cost": "USD/h", "power": "W", "gpus": "GPUs"}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A GPU and TP degree that cannot serve all of this traffic, and why.

    `workers` hold the weights, but not the longest request: they can serve the others.
    """

    name: str
    because: Reason
    workers: tuple[WorkerType, ...] = ()


@dataclass(frozen=True, slots=True)
class Engines:
    """The engine settings to choose from, and how the time of a step is made.

    `budgets` are tokens per step and `seats` sequences per step; vLLM allows no more seats than tokens.
    `ranks` are numbers of data-parallel ranks, `stages` depths of pipelines. Where a worker has more GPUs
    than a node, activations cross between nodes at `node_bytes_per_s`. `host_overhead_s` is added to each
    step, which then takes `longer_frac` longer, counted from the upper end of its spread if `at_spread`. The
    host time of `engine` is in simulations only; bounds on a step leave it out. `is_piped` is False for
    questions with LoRA or KV offload, which are not simulated in pipelines. `is_stored` says that the KV
    blocks of all workers are in one store.
    """

    budgets: tuple[int, ...] = TOKEN_BUDGETS
    seats: tuple[int, ...] = (MAX_NUM_SEQS,)
    stages: tuple[int, ...] = (1,)
    ranks: tuple[int, ...] = (1,)
    node_bytes_per_s: float | None = None
    host_overhead_s: float = 0.0
    engine: Engine | None = None
    speculations: tuple[Speculation | None, ...] = (None,)
    lora: Lora | None = None
    longer_frac: float = 0.0
    at_spread: bool = False
    is_piped: bool = True
    is_stored: bool = False

    @classmethod
    def of(cls, task: PlanQuestion) -> Engines:
        return cls(
            budgets=task.max_num_batched_tokens,
            seats=task.max_num_seqs,
            stages=task.stages,
            ranks=task.ranks,
            node_bytes_per_s=task.network.bandwidth_bytes_per_s,
            host_overhead_s=task.host_overhead_s,
            engine=task.engine,
            speculations=task.speculations,
            lora=task.lora and replace(task.lora, longer_frac=task.robust.step_times_frac),
            longer_frac=task.robust.step_times_frac,
            at_spread=task.robust.spread,
            is_piped=task.lora is None and task.kv_offload is None,
            is_stored=task.kv_offload is not None and task.kv_offload.is_shared,
        )

    @property
    def simulated(self) -> Engine | None:
        """The engine as simulations have it: its host time is longer too."""
        return self.engine and self.engine.with_longer_host(self.longer_frac)

    def settings(self, stages: int, ranks: int = 1) -> list[tuple[int, int, Speculation | None]]:
        """Combinations of budget, seats and drafts; a step checks all drafts of all its sequences.

        Neither pipelines nor data-parallel ranks draft.
        """
        return list(
            dict.fromkeys(
                (budget, min(n, budget // (each.most_tokens if each else 1)), each)
                for each in self.speculations
                for budget in self.budgets
                for n in self.seats
                if each is None or (stages == ranks == 1 and budget >= each.most_tokens)
            )
        )


def _at_spread(latency: StepLatency, name: str) -> StepLatency:
    """The fit at the upper end of its spread, with no spread left; InputError where it has none."""
    if latency.spread is None:
        raise InputError(
            f"robust: spread: nobody knows how far step times of {name} may be from the truth "
            f"({latency.basis}); leave this GPU out, or give step_times: 30 %"
        )
    basis = f"{latency.basis}; taken at the upper end of their spread (robust)"
    return replace(latency.at_spread(INTERVAL_SIGMAS, INTERVAL_SIGMAS), basis=basis, spread=None)


def worker_types(
    llm: Llm, gpus: Iterable[Gpu], catalog: Catalog, longest_tokens: int, engines: Engines = Engines()
) -> tuple[tuple[WorkerType, ...], tuple[LeftOut, ...]]:
    """Every worker type that holds the weights and the longest request, and what was left out.

    A plan rejects no request, so it is made of these worker types alone. A lower bound over all fleets must
    also count those that hold the weights but not the longest request (`LeftOut.workers`).
    """
    types: list[WorkerType] = []
    left: list[LeftOut] = []
    stages = engines.stages if engines.is_piped else (1,)
    drafters = {each: find_drafter(each, llm, catalog) for each in engines.speculations}
    for gpu, pp in itertools.product(gpus, stages):
        for tp in range(1, gpu.gpus_per_node + 1):
            name = f"{gpu.name} tp{tp}" + (f" pp{pp}" if pp > 1 else "")
            if not llm.splits_over(tp):
                is_power_of_two = tp & (tp - 1) == 0  # Nobody expects other TP degrees.
                if is_power_of_two:
                    left.append(LeftOut(name, facts.HeadsNotShared(llm.heads, tp)))
            # Workers of all degrees read each other's KV blocks from the store.
            elif engines.is_stored and not is_common(llm, (1, tp)):
                left.append(LeftOut(name, facts.KvHeadsNotStored(llm.kv_heads, tp)))
            elif pp > llm.layers:
                left.append(LeftOut(name, facts.LayersNotCut(llm.layers, pp)))
            else:
                for degree in _degrees(name, llm, (gpu, tp, pp), catalog, engines):
                    if not (settings := degree.settings(engines)):
                        continue  # None of the budgets belongs to this kind of all-to-all.
                    degree_types = _of_degree(degree, llm, drafters, catalog, engines)
                    types += [worker for worker in degree_types if worker.has_room_for(longest_tokens)]
                    left += _left_of(degree.name, llm, degree_types, settings, longest_tokens)
                left += _not_on_nodes(name, llm, (gpu, tp, pp), engines)
    return tuple(types), tuple(left)


def _degrees(
    name: str, llm: Llm, on: tuple[Gpu, int, int], catalog: Catalog, engines: Engines
) -> Iterator[Degree]:
    """The ways to split an LLM: experts sliced or whole, and each number of data-parallel ranks.

    Ranks have no pipelines. They are on one node, or on several if one node has too few GPUs; then each kind
    of all-to-all between nodes is a way of its own.
    """
    gpu, tp, pp = on
    if 1 in engines.ranks:
        for ep in catalog.expert_splits(llm, gpu, tp):
            yield Degree(name + (" ep" if ep else ""), gpu, tp, pp, ep)
    measured_dp = catalog.rank_counts(llm, gpu, tp)  # None: any number of ranks has step times.
    for dp in engines.ranks:
        if dp > 1 and pp == 1 and tp * dp <= gpu.gpus_per_node and (measured_dp is None or dp in measured_dp):
            yield Degree(f"{name} dp{dp} ep", gpu, tp, pp, True, dp)
        elif dp > gpu.gpus_per_node and pp == 1 and not _why_not_on_nodes(llm, gpu, tp, dp):
            for kind in (LOW_LATENCY, HIGH_THROUGHPUT):
                yield Degree(f"{name} dp{dp} ep", gpu, tp, pp, True, dp, kind)


def _why_not_on_nodes(llm: Llm, gpu: Gpu, tp: int, dp: int) -> str:
    """Why so many ranks cannot be put on nodes; empty where they can."""
    try:
        nodes_of_ranks(llm, gpu, tp, dp)
    except InputError as error:
        return str(error)
    return ""


def _not_on_nodes(name: str, llm: Llm, on: tuple[Gpu, int, int], engines: Engines) -> Iterator[LeftOut]:
    """The numbers of ranks that are left out because they do not divide over nodes."""
    gpu, tp, pp = on
    for dp in engines.ranks:
        if dp > gpu.gpus_per_node and pp == 1 and (why := _why_not_on_nodes(llm, gpu, tp, dp)):
            yield LeftOut(f"{name} dp{dp} ep", facts.RanksNotOnNodes(why))


@dataclass(frozen=True, slots=True)
class Degree:
    """How an LLM is split over the GPUs of one worker."""

    name: str
    gpu: Gpu
    tp: int
    pp: int
    ep: bool
    dp: int = 1
    all2all: All2All = ""

    def settings(self, engines: Engines) -> list[tuple[int, int, Speculation | None]]:
        """Combinations of budget, seats and drafts.

        On several nodes the budget decides the kind of all-to-all, so only budgets of this kind are kept. If
        the question leaves budgets open, the largest of low latency is added: all usual ones are larger.
        """
        budgets = engines.budgets
        if self.all2all and budgets == TOKEN_BUDGETS:
            budgets = (MOST_LOW_LATENCY_TOKENS, *budgets)
        if self.all2all:
            budgets = tuple(n for n in budgets if self.all2all == self._all2all_of(n))
        return replace(engines, budgets=budgets).settings(self.pp, self.dp)

    def _all2all_of(self, budget_tokens: int) -> All2All:
        return all2all_of(self.tp * self.dp, int(self.gpu.gpus_per_node), budget_tokens)

    def latency(self, llm: Llm, catalog: Catalog, engines: Engines) -> StepLatency:
        """Step times of this degree, with what the engines and a robust question add to them."""
        is_over_nodes = self.tp * self.pp > self.gpu.gpus_per_node
        between = engines.node_bytes_per_s if is_over_nodes else None
        link_bytes_per_s = engines.node_bytes_per_s or MEASURED_LINK_BYTES_PER_S
        ranks = Ranks(self.all2all, link_bytes_per_s)
        fit = catalog.step_latency(llm, self.gpu, self.tp, ep=self.ep, dp=self.dp, ranks=ranks)
        fit = on_version(fit, llm, self.gpu, engines.engine)
        latency = add_pipeline(fit, llm, self.gpu, self.tp, self.pp, link_bytes_per_s=between)
        latency = replace(latency, h_s=latency.h_s + engines.host_overhead_s)
        if engines.at_spread:
            latency = _at_spread(latency, self.name)
        if engines.longer_frac:
            basis = f"{latency.basis}; taken {100 * engines.longer_frac:g} % longer (robust)"
            latency = replace(latency.with_longer_steps(engines.longer_frac), basis=basis)
        return latency


def _of_degree(
    degree: Degree,
    llm: Llm,
    drafters: Mapping[Speculation | None, Drafter],
    catalog: Catalog,
    engines: Engines,
) -> list[WorkerType]:
    """The worker types of one degree that hold the weights, one per engine setting."""
    gpu, tp, pp = degree.gpu, degree.tp, degree.pp
    slots = None if engines.lora is None else lora_slots(engines.lora, llm, gpu, tp, ep=degree.ep)
    latency: StepLatency | None = None  # Found at the first setting with room, and the same for all.
    types = []
    for budget, most_seqs, drafts in degree.settings(engines):
        rows = most_seqs if drafts is None else SAMPLED_ROWS * most_seqs  # Memory of the sampler.
        use = worker_memory(
            llm,
            gpu,
            tp,
            pp,
            max_num_batched_tokens=budget,
            max_num_seqs=rows,
            dp=degree.dp,
            served=Served(vllm_version_of(engines.engine)),
        )
        use = drafters[drafts].add_to_memory(use, llm, tp)
        kv_tokens = (use if slots is None else slots.add_to_memory(use)).kv_tokens
        if kv_tokens == 0:
            continue
        latency = latency or degree.latency(llm, catalog, engines)
        types.append(
            WorkerType(
                gpu,
                tp,
                latency,
                kv_tokens,
                budget,
                most_seqs,
                pp,
                engine=engine_with_drafts(engines.simulated, drafts),
                speculation=drafts,
                ep=degree.ep,
                dp=degree.dp,
                lora=slots,
            ).with_llm(llm)
        )
    return types


def _left_of(
    name: str,
    llm: Llm,
    types: Sequence[WorkerType],
    settings: Sequence[tuple[int, int, Speculation | None]],
    longest_tokens: int,
) -> Iterator[LeftOut]:
    """What of one degree is left out of plans, and why; `types` are its workers with room for KV blocks."""
    with_room = {(worker.max_num_batched_tokens, worker.max_num_seqs, worker.speculation) for worker in types}
    no_room = [setting[0] for setting in settings if setting not in with_room]
    if not types:
        yield LeftOut(name, facts.WeightsTooLarge(llm.weight_bytes))
    elif no_room:
        # The smallest budget stands for all: larger ones leave even less memory.
        yield LeftOut(f"{name} {min(no_room)}", facts.NoRoomForKv())
    if small := tuple(worker for worker in types if not worker.has_room_for(longest_tokens)):
        most = max(small, key=lambda worker: worker.kv_tokens)
        because = facts.RequestTooLong(most.kv_tokens, longest_tokens)
        yield LeftOut(f"{name} {most.max_num_batched_tokens}", because, small)


def weight(worker: WorkerType, objective: str) -> float:
    """What the GPUs of one worker add to the objective.

    An owned GPU that costs nothing counts OWNED_USD_PER_H, so that a plan takes no more of them than needed.
    """
    if objective == "power":
        return worker.power_w
    if objective == "gpus":
        return float(worker.gpus)
    is_owned = worker.gpu.name.endswith(OWNED)
    return max(worker.price_usd_per_h, OWNED_USD_PER_H * worker.gpus if is_owned else 0.0)


def option_of(role: Role, worker: WorkerType, objective: str) -> Option:
    """A worker type in a role; `objective` "cost-by-gpu" ignores idle GPUs of nodes that are sold whole."""
    node = node_of(worker.gpu) if objective == "cost" else None
    return Option(role, worker, weight(worker, objective), node)


def gpus_then_price(option: Option, dearest_usd_per_h: float) -> Option:
    """An option of the objective "gpus" whose price breaks ties, idle GPUs of whole nodes included.

    `dearest_usd_per_h` is the price of the dearest GPU of the question.
    """
    if dearest_usd_per_h <= 0:
        return option
    gpus_per_usd_h = PRICE_TIE_FRAC / dearest_usd_per_h
    gpu, node = option.type.gpu, node_of(option.type.gpu)
    # A GPU that is sold singly is a node of one, so that `fleet_counts.FEWER_FRAC` weighs all options alike.
    node = node or PricedNode(gpu.name, 1, gpu.price_usd_per_h, 0.0)
    return replace(
        option,
        objective=option.objective + gpus_per_usd_h * option.type.price_usd_per_h,
        node=replace(
            node,
            gpu_usd_per_h=gpus_per_usd_h * node.gpu_usd_per_h,
            idle_electricity_usd_per_h=gpus_per_usd_h * node.idle_electricity_usd_per_h,
        ),
    )


def whole_gpus(value: float) -> float:
    """The GPUs of a fleet of this value, without what its price adds (`gpus_then_price`)."""
    return float(math.floor(value * (1 + ROUNDING))) if math.isfinite(value) else value


def mixed_options(types: Iterable[WorkerType], objective: str) -> list[Option]:
    """Every worker type as a mixed worker, but those whose all-to-all only prefill pools use."""
    return [option_of("mixed", worker, objective) for worker in types if worker.all2all != HIGH_THROUGHPUT]


def split(worker: WorkerType) -> tuple[str, int, int, bool, int]:
    """The GPU, and how the LLM is split over several of them."""
    return worker.gpu.name, worker.tp, worker.pp, worker.ep, worker.dp


def prefill_options(types: Iterable[WorkerType], objective: str) -> list[Option]:
    """One option per hardware, token budget and drafter, with the most seats.

    Prefilled requests leave at once, so the token budget binds and not the seats. Drafts without a model of
    their own (n-gram look-up) make no difference to prefill.
    """
    most: dict[tuple[object, ...], WorkerType] = {}
    for worker in types:
        key = (*split(worker), worker.max_num_batched_tokens, own_drafts(worker))
        if key not in most or worker.max_num_seqs > most[key].max_num_seqs:
            most[key] = worker
    return [option_of("prefill", worker, objective) for worker in most.values()]


def decode_options(types: Iterable[WorkerType], objective: str) -> list[Option]:
    """One option per hardware, seats and drafts, with the token budget nearest to DECODE_BUDGET_TOKENS.

    A decode worker prefills only preempted requests, so its budget hardly matters.
    """

    def distance_tokens(worker: WorkerType) -> int:
        return abs(worker.max_num_batched_tokens - DECODE_BUDGET_TOKENS)

    nearest: dict[tuple[object, ...], WorkerType] = {}
    for worker in types:
        if worker.all2all == HIGH_THROUGHPUT:  # Only prefill pools use it.
            continue
        key = (*split(worker), worker.max_num_seqs, worker.speculation)
        if key not in nearest or distance_tokens(worker) < distance_tokens(nearest[key]):
            nearest[key] = worker
    return [option_of("decode", worker, objective) for worker in nearest.values()]


def breaks_gaps(worker: WorkerType, slo: Slo, *, mean: bool = False) -> bool:
    """Whether a full step takes NEARLY as long as the tightest limit on gaps between tokens, or longer.

    With `mean` limits on the mean gap of a request count too.
    """
    gaps_s = [
        limit.limit_s
        for limit in slo.limits
        if (limit.metric_row.is_pace if mean else limit.metric_row.is_of_gaps)
    ]
    full_step_s = float(worker.latency.step_s(worker.max_num_batched_tokens))
    return full_step_s > NEARLY * min(gaps_s, default=math.inf)


def idle_prefill_s(worker: WorkerType, input_tokens: Floats, shared_tokens: Floats | float = 0.0) -> Floats:
    """TTFT (n,) in seconds of prompts (n,), each alone on an idle worker.

    `shared_tokens` of a prompt are in other prompts too; they are taken to be cached.
    """
    latency, n = worker.latency, input_tokens
    own = np.maximum(n - shared_tokens, 1)  # The last token is always computed: it gives the first output.
    # The last term: each token of its own also attends to the cached ones.
    ttft_s = latency.prefill_s(own, worker.max_num_batched_tokens) + latency.a_s * own * (n - own)
    if worker.pp > 1:  # Chunks follow each other through the stages; the last one passes them alone.
        ttft_s = ttft_s / worker.pp + (1 - 1 / worker.pp) * latency.step_s(1)
    return np.asarray(ttft_s)


def _least_ttft_s(worker: WorkerType, input_tokens: Floats, shared_tokens: Floats) -> Floats:
    """As `idle_prefill_s`, with the front end, which makes tokens of the whole prompt, cached or not."""
    idle_s = idle_prefill_s(worker, input_tokens, shared_tokens)
    if (engine := worker.engine) is None:
        return idle_s
    return np.asarray(idle_s + engine.front_end_s + engine.prompt_token_s * input_tokens)


def floor_s(limit: Limit, worker: WorkerType, lengths: TraceLengths) -> float:
    """The limit's percentile [s] if every request had an idle worker of its own, 0 if that is not known.
    infeasible.py looks for limits that can be kept from there on.
    """
    n, output, requests = lengths.input_tokens, lengths.output_tokens, lengths.requests.astype(float)
    latency, percentile_frac = worker.latency, limit.percentile_frac
    ttft_s = idle_prefill_s(worker, n, lengths.shared_tokens)
    gaps = output - 1
    decoding_s = gaps * latency.step_s(1, decodes=1) + latency.d_s * gaps * (n + (gaps + 1) / 2)
    if worker.speculation is not None:
        decoding_s = _drafted_s(worker, n, gaps)
    several = gaps > 0
    if limit.metric_row.is_of_tasks:
        return 0.0  # Which requests make a task is not among the lengths.
    if not limit.metric_row.is_of_gaps:
        values_s = limit.metric_row.values_s(_idle_times(n, output, ttft_s, decoding_s))
        counts = several if limit.metric_row.is_of_decodes else np.ones(len(n), bool)
        return percentile_s(values_s[counts], percentile_frac, requests[counts])
    first_gap_s = latency.step_s(1, decodes=1, kv_tokens=n[several] + 1)
    if worker.speculation is not None:
        if percentile_frac <= 1 - 1 / worker.speculation.mean_tokens:
            return 0.0  # Most gaps are 0, as tokens that were drafted together leave together.
        first_gap_s = _drafted_s(worker, n, np.ones_like(n))[several]
    return percentile_s(first_gap_s, percentile_frac, (gaps * requests)[several])


@dataclass(frozen=True, slots=True, eq=False)
class _IdleTimes:
    """Times (n,) of requests that are each alone on an idle worker; rows of SLO metrics read these fields.
    All arrive at 0 and belong to no task.
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
    """Times from TTFT and decoding times; the mean gap stands for the longest, which is no shorter."""
    mean_gap_s = decoding_s / np.maximum(output_tokens - 1, 1)
    lengths = input_tokens.astype(np.int64), output_tokens.astype(np.int64)
    return _IdleTimes(np.zeros(len(ttft_s)), *lengths, ttft_s, mean_gap_s, mean_gap_s, ttft_s + decoding_s)


def _drafted_s(worker: WorkerType, input_tokens: Floats, gaps: Floats) -> Floats:
    """Seconds (n,) that a decode alone takes for `gaps` (n,) tokens at the mean acceptance of its drafts."""
    assert worker.speculation is not None
    steps = SpeculativeSteps(worker.latency, worker.speculation)
    count = np.ceil(gaps / worker.speculation.mean_tokens)
    context = input_tokens + 1 + gaps / 2
    step_s = [steps.step_s(0.0, 0.0, 1.0, kv_tokens, 0.0) for kv_tokens in context.tolist()]
    return np.asarray(count * np.array(step_s))


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The requests that are judged on every fleet, as distinct lengths (U,) with their `requests` (U,).

    Requests that wait for others and nominally arrive in the warm-up are judged on some fleets only: there
    are `perhaps` of them, `perhaps_decoded` with more than one token, and a floor takes them to be in time.
    `has_gaps` says that some gap is counted on any fleet that passes the backlog test and rejects nothing.
    """

    input_tokens: Floats
    output_tokens: Floats
    shared_tokens: Floats
    requests: Floats
    is_cached: bool
    perhaps: int
    perhaps_decoded: int
    has_gaps: bool
    of_tasks: JudgedTasks | None = None
    of_classes: Mapping[Selector, Judged] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class JudgedTasks:
    """The tasks of a trace with the lengths (n,) of all its requests. A task whose last request is nominally
    of the warm-up may count or not, so it is taken to take no time: `is_sure` (n,) marks all other requests.
    """

    tasks: Tasks
    input_tokens: Floats
    output_tokens: Floats
    shared_tokens: Floats
    is_sure: BoolArray


def judged(slo: Slo, trace: Trace, shared_tokens: IntArray | None = None) -> Judged:
    """The judged requests of a trace; `shared_tokens` (n,) of each prompt are in other prompts too."""
    of_classes = {each: _judged_of(slo, trace, shared_tokens, each) for each in slo.selectors}
    return replace(_judged_of(slo, trace, shared_tokens, None), of_classes=of_classes)


def _judged_of(slo: Slo, trace: Trace, shared_tokens: IntArray | None, selector: Selector | None) -> Judged:
    """The judged requests of one class of the SLO, or of all classes for None. The backlog test is of all
    requests together, so of a class no gap is known to be counted.
    """
    measured = find_deadlines(slo, trace)
    is_measured, end_s = measured.arrives(trace), measured.window_s[1]
    decoded, perhaps = trace.output_tokens > 1, waits_for_others(trace) & ~is_measured
    if selector is not None:
        of_class = select_requests(selector, trace)
        is_measured, perhaps = is_measured & of_class, perhaps & of_class
    has_gaps = bool((is_measured & decoded).any())
    if tested := steady_work(slo, trace):  # The backlog test: half of the last tenth.
        last = tested.arrives(trace)
        in_time = trace.arrival_s + tested.prefill_s + tested.gap_s <= end_s
        has_gaps = int((last & decoded & in_time).sum()) > int(last.sum()) // 2
    has_gaps = has_gaps and selector is None
    columns = [trace.input_tokens[is_measured], trace.output_tokens[is_measured]]
    if shared_tokens is None:
        # Both lengths in one number of 64 bits: this is several times as fast as finding distinct rows.
        codes, requests = np.unique((columns[0] << 32) + columns[1], return_counts=True)
        n, output, shared = codes >> 32, codes & (2**32 - 1), np.zeros(len(codes))
    else:
        rows, requests = np.unique(
            np.stack([*columns, shared_tokens[is_measured]], axis=1), axis=0, return_counts=True
        )
        n, output, shared = rows.T
    return Judged(
        n.astype(float),
        output.astype(float),
        shared.astype(float),
        requests.astype(float),
        shared_tokens is not None,
        int(perhaps.sum()),
        int((perhaps & decoded).sum()),
        has_gaps,
        _judged_tasks(slo, trace, shared_tokens, is_measured),
    )


def _judged_tasks(
    slo: Slo, trace: Trace, shared_tokens: IntArray | None, is_measured: BoolArray
) -> JudgedTasks | None:
    """The tasks of a trace, if some limit is on tasks and the traffic has any."""
    tasks = tasks_of(trace)
    if tasks is None or not any(limit.metric_row.is_of_tasks for limit in slo.limits):
        return None
    shared = np.zeros(len(trace)) if shared_tokens is None else shared_tokens.astype(float)
    lengths = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    return JudgedTasks(tasks, *lengths, shared, is_measured)


def _least_of_tasks(limit: Limit, types: Sequence[WorkerType], of: Judged) -> float:
    """The limit's percentile if every request of every task had its fastest phases on idle workers."""
    if (each := of.of_tasks) is None:
        return 0.0
    n, gaps = each.input_tokens, each.output_tokens - 1
    latencies = dict.fromkeys((worker.latency, worker.speculation) for worker in types)
    decoding_s = np.min([_decoding_s(*latency, n, gaps, of) for latency in latencies], axis=0)
    ttft_s = np.min([_least_ttft_s(worker, n, each.shared_tokens) for worker in types], axis=0)
    e2e_s = ttft_s + decoding_s
    path_s = e2e_s if limit.metric == "task_served" else each.tasks.turn_s(e2e_s)
    values_s = np.where(each.is_sure, each.tasks.served_s(path_s), 0.0)[each.tasks.last]
    return percentile_s(values_s, limit.percentile_frac)


def _least_of(limit: Limit, types: Sequence[WorkerType], of: Judged) -> float:
    """The limit's judged percentile [s] if every request had each phase on its fastest idle worker."""
    of = of.of_classes[limit.selector] if limit.selector is not None else of

    def percentile(values_s: Floats, requests: Floats, others: int) -> float:
        """The percentile with `others` requests more that take no time."""
        values_s, requests = np.append(values_s, 0.0), np.append(requests, float(others))
        return percentile_s(values_s, limit.percentile_frac, requests) if requests.any() else 0.0

    n, gaps = of.input_tokens, of.output_tokens - 1
    latencies = list(dict.fromkeys((worker.latency, worker.speculation) for worker in types))
    if limit.metric_row.is_of_gaps:  # The fleet decides which gaps are counted.
        if limit.percentile_frac <= 1 - 1 / max(worker.step_tokens for worker in types):
            return 0.0  # A step yields several tokens, so this many gaps may be 0.
        one = np.minimum(gaps, 1.0)
        first_s = np.min([_decoding_s(*latency, n, one, of) for latency in latencies], axis=0)
        return float(first_s[gaps > 0].min()) if of.has_gaps and (gaps > 0).any() else 0.0
    if limit.metric_row.is_of_tasks:
        return _least_of_tasks(limit, types, of)
    decoding_s = np.min([_decoding_s(*latency, n, gaps, of) for latency in latencies], axis=0)
    ttft_s = np.min([_least_ttft_s(worker, n, of.shared_tokens) for worker in types], axis=0)
    values_s = limit.metric_row.values_s(_idle_times(n, of.output_tokens, ttft_s, decoding_s))
    if not limit.metric_row.is_of_decodes:
        return percentile(values_s, of.requests, of.perhaps)
    several = gaps > 0
    return percentile(values_s[several], of.requests[several], of.perhaps_decoded)


def _decoding_s(
    latency: StepLatency, drafts: Speculation | None, input_tokens: Floats, gaps: Floats, of: Judged
) -> Floats:
    """A lower bound (n,) [s] on the time of `gaps` (n,) tokens: the decode is alone, all drafts are accepted.

    Recomputing a short context also yields a token; it counts where that is quicker than a decode.
    """
    most, latency = 1 if drafts is None else drafts.most_tokens, least_token_times(latency, drafts)
    beside_s = attention_s(latency, 0.0, input_tokens, gaps, is_cached=of.is_cached)
    return np.asarray(np.ceil(gaps / most) * latency.step_s(1) + beside_s)


def unreachable(slo: Slo, types: Sequence[WorkerType], of: Judged) -> list[tuple[Limit, float, str]]:
    """Limits that no fleet of these types keeps even when idle: (limit, floor [s], the fastest type).

    A floor is the percentile that would be judged (slo_verdict.judge). For gaps it is the shortest one, as
    the fleet decides which of them end in the window.
    """
    broken = []
    ordered = _fastest_first(types)
    for limit in slo.limits:
        # Mostly the first type alone keeps the limit, which is quicker to see than the floor over all types.
        if any(_least_of(limit, [worker], of) <= limit.limit_s * (1 + ROUNDING) for worker in ordered):
            continue
        best_s = _least_of(limit, types, of)  # Over all types: each request is on its fastest.
        if best_s > limit.limit_s * (1 + ROUNDING):
            alone_s = [_least_of(limit, [worker], of) for worker in types]
            broken.append((limit, best_s, types[int(np.argmin(alone_s))].name))
    return broken


def _fastest_first(types: Sequence[WorkerType]) -> list[WorkerType]:
    """Types by what a token costs in their fullest steps: the first one usually answers."""

    def token_s(worker: WorkerType) -> float:
        return float(worker.latency.step_s(worker.max_num_batched_tokens)) / worker.max_num_batched_tokens

    return sorted(types, key=token_s)
