"""Lists the options of a fleet: every GPU in stock x TP x PP x data-parallel ranks x engine settings x role.

build_problem.py takes the worker types from here; the searches make options of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from planner.documents import facts
from planner.documents.catalog import Catalog
from planner.documents.facts import Reason
from planner.documents.speculative import engine_with_drafts, find_drafter
from planner.documents.task import TOKEN_BUDGETS, PlanQuestion
from planner.domain import OWNED, ROUNDING, Gpu, Slo
from planner.errors import InputError
from planner.fleet import MAX_NUM_SEQS, Role, WorkerType, slowed_by_spread
from planner.models.all2all import (
    HIGH_THROUGHPUT,
    LOW_LATENCY,
    MEASURED_LINK_BYTES_PER_S,
    MOST_LOW_LATENCY_TOKENS,
    All2All,
    Exchange,
    all2all_of,
    nodes_of_ranks,
)
from planner.models.engine import Engine
from planner.models.kv_offload import is_common
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.models.lora import Lora, lora_slots
from planner.models.memory import MemorySettings, worker_memory
from planner.models.older_kernels import captured_tokens, correct_for_version
from planner.models.parallelism import add_pipeline
from planner.models.speculation import SAMPLED_ROWS, Drafter, Speculation
from planner.models.spread import INTERVAL_SIGMAS
from planner.search.oracle.fleet_counts import drafter_with_cache
from planner.solvers.master import Option
from planner.solvers.whole_nodes import PricedNode, node_of

Hardware = tuple[str, int, int, int]
"""GPU, TP, PP and data-parallel ranks: a worker type without its engine settings."""


def hardware_of(option: Option) -> Hardware:
    """The hardware of an option's workers."""
    return option.type.gpu.name, option.type.tp, option.type.pp, option.type.dp


def by_hardware(options: Iterable[Option]) -> dict[tuple[str, Hardware], list[Option]]:
    """The options grouped by role and hardware: those of a group differ in engine settings alone."""
    groups: dict[tuple[str, Hardware], list[Option]] = {}
    for option in options:
        groups.setdefault((option.role, hardware_of(option)), []).append(option)
    return groups


# In the search a GPU that is owned, or rented for nothing, costs at least this. It is above 0, so that
# solvers take no more such GPUs than needed, and too small to be shown.
FREE_USD_PER_H = 1e-5
# A full step that takes more than this share of a limit on gaps is assumed to break the limit, because other
# steps come in between. The share is set by hand: searches then prefer other options, but no bound and no
# proof rests on it.
FULL_STEP_FRAC = 0.9
# Decode workers have the token budget nearest to this, vLLM's default. The budget hardly matters for them.
DECODE_BUDGET_TOKENS = 2048
# With the objectives "gpus" and "power" the dearest GPU counts this much more [GPUs, W], and other GPUs in
# proportion to their prices, so that prices decide between fleets with equally many GPUs or Watts. The
# additions reach a whole GPU in fleets of more than 10,000 GPUs, a whole Watt in those of more than 1,000.
PRICE_TIES = {"gpus": 1e-4, "power": 1e-3}
OBJECTIVE_UNITS = {"cost": "USD/h", "power": "W", "gpus": "GPUs"}


@dataclass(frozen=True, slots=True)
class OptionLeftOut:
    """A split of the LLM over a worker's GPUs, or a token budget of such workers, that cannot serve all of
    this traffic, and why. `name` is for instance "h100-80g tp4 ep", or with a budget "h100-80g tp4 ep 2048".

    `workers` are the split's worker types that hold the weights but not the longest request. They can serve
    shorter requests.
    """

    name: str
    because: Reason
    workers: tuple[WorkerType, ...] = ()


class BatchSettings(NamedTuple):
    """Engine settings of a worker: max_num_batched_tokens, max_num_seqs and drafts."""

    budget_tokens: int
    seats: int
    speculation: Speculation | None


@dataclass(frozen=True, slots=True)
class EngineChoices:
    """The engine settings to choose from, and how the time of a step is made.

    `budgets`: token budgets, the most tokens of a step.
    `seats`: numbers of seats, the most sequences of a step; vLLM allows no more seats than tokens.
    `ranks`: numbers of data-parallel ranks.
    `stages`: depths of pipelines.
    `speculations`: the drafts of a step; None: no drafts.
    `lora`: the adapters that workers serve; None: no adapters.
    `node_bytes_per_s`: the link between the nodes of a worker that has more GPUs than a node.
    `host_overhead_s`: a time that the question adds to each step, in simulations and in lower bounds.
    `engine`: adds host times in simulations only. Bounds on a step leave them out, which only lowers bounds.
    `at_spread`: step times are taken at the upper end of their spread.
    `longer_frac`: step times are longer by this share.
    `is_piped`: False for questions with LoRA or KV offload, which are not simulated in pipelines.
    `is_stored`: the KV blocks of all workers are in one store.
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
    def of(cls, task: PlanQuestion) -> EngineChoices:
        """The choices that a question leaves open."""
        return cls(
            budgets=task.max_num_batched_tokens,
            seats=task.max_num_seqs,
            stages=task.stages,
            ranks=task.ranks,
            node_bytes_per_s=task.network.bandwidth_bytes_per_s,
            host_overhead_s=task.host_overhead_s,
            engine=task.engine,
            speculations=tuple(
                drafts and drafts.with_longer_drafts(task.robust.step_times_frac)
                for drafts in task.speculations
            ),
            lora=task.lora and replace(task.lora, longer_frac=task.robust.step_times_frac),
            longer_frac=task.robust.step_times_frac,
            at_spread=task.robust.spread,
            is_piped=task.lora is None and task.policies.kv_offload is None,
            is_stored=task.policies.kv_offload is not None and task.policies.kv_offload.is_shared,
        )

    @property
    def simulated_engine(self) -> Engine | None:
        """The engine as it is simulated. With `longer_frac` its host time is longer too."""
        return None if self.engine is None else self.engine.with_longer_host(self.longer_frac)

    def settings(self, stages: int, ranks: int = 1) -> list[BatchSettings]:
        """The combinations of engine settings. A step checks all drafts of all its sequences, so
        there are no more seats than the budget allows. Neither pipelines nor data-parallel ranks draft.
        """
        combinations = []
        for drafts, budget, seats in itertools.product(self.speculations, self.budgets, self.seats):
            step_tokens = 1 if drafts is None else drafts.most_tokens  # Tokens of one sequence in a step.
            if drafts is None or (stages == ranks == 1 and budget >= step_tokens):
                combinations.append(BatchSettings(budget, min(seats, budget // step_tokens), drafts))
        return list(dict.fromkeys(combinations))


def _at_spread(worker: WorkerType, name: str) -> WorkerType:
    """The worker type with all its times at the upper end of their spread (`slowed_by_spread`); the result
    has no spread. Raises InputError, which names the worker by `name`, if its step times have no spread.
    """
    latency = worker.latency
    if latency.spread is None:
        raise InputError(
            f"robust: spread: nobody knows how far step times of {name} may be from the truth "
            f"({latency.basis}); leave this GPU out, or give step_times: 30 %"
        )
    basis = f"{latency.basis}; taken at the upper end of their spread (robust)"
    slowed = slowed_by_spread(worker, INTERVAL_SIGMAS, INTERVAL_SIGMAS)
    return replace(slowed, latency=replace(slowed.latency, basis=basis, spread=None))


def worker_types(
    llm: Llm,
    gpus: Iterable[Gpu],
    catalog: Catalog,
    longest_tokens: int,
    engines: EngineChoices = EngineChoices(),
) -> tuple[tuple[WorkerType, ...], tuple[OptionLeftOut, ...]]:
    """Every worker type that holds the weights and the longest request, and what was left out.

    A plan rejects no request, so it is made of these worker types alone. A lower bound over all fleets must
    also count types that hold the weights but not the longest request (`OptionLeftOut.workers`).
    """
    types: list[WorkerType] = []
    left_out: list[OptionLeftOut] = []
    stages = engines.stages if engines.is_piped else (1,)
    drafters = {speculation: find_drafter(speculation, llm, catalog) for speculation in engines.speculations}
    for gpu, pp in itertools.product(gpus, stages):
        for tp in range(1, gpu.gpus_per_node + 1):
            name = f"{gpu.name} tp{tp}" + (f" pp{pp}" if pp > 1 else "")
            if not llm.splits_over(tp):
                is_power_of_two = tp & (tp - 1) == 0
                if is_power_of_two:  # Nobody expects other TP degrees, so the certificate does not name them.
                    left_out.append(OptionLeftOut(name, facts.HeadsNotShared(llm.heads, tp)))
            # Workers that share a store must be able to read each other's KV blocks, whatever their TP.
            elif engines.is_stored and not is_common(llm, (1, tp)):
                left_out.append(OptionLeftOut(name, facts.KvHeadsNotStored(llm.kv_heads, tp)))
            elif pp > llm.layers:
                left_out.append(OptionLeftOut(name, facts.LayersNotCut(llm.layers, pp)))
            else:
                for split in _splits(name, llm, (gpu, tp, pp), catalog, engines):
                    if not (settings := split.settings(engines)):
                        continue  # No token budget leads to this kind of all-to-all.
                    split_types = _types_of_split(split, llm, drafters, catalog, engines)
                    types += [worker for worker in split_types if worker.has_room_for(longest_tokens)]
                    left_out += _left_out_of_split(split.name, llm, split_types, settings, longest_tokens)
                left_out += _not_on_nodes(name, llm, (gpu, tp, pp), engines)
    return tuple(types), tuple(left_out)


def _splits(
    name: str, llm: Llm, gpu_tp_pp: tuple[Gpu, int, int], catalog: Catalog, engines: EngineChoices
) -> Iterator[_Split]:
    """The ways to split an LLM over workers with this GPU, TP and PP: experts sliced or whole, and each
    number of data-parallel ranks.

    Ranks have no pipelines. They are on one node, unless there are more of them than a node has GPUs: then
    they are on several nodes, and each kind of all-to-all between nodes is a split of its own.
    """
    gpu, tp, pp = gpu_tp_pp
    if 1 in engines.ranks:
        for ep in catalog.expert_splits(llm, gpu, tp):
            yield _Split(name + (" ep" if ep else ""), gpu, tp, pp, ep=ep)
    measured_dp = catalog.rank_counts(llm, gpu, tp)  # None: there are step times for any number of ranks.
    for dp in engines.ranks:
        if dp > 1 and pp == 1 and tp * dp <= gpu.gpus_per_node and (measured_dp is None or dp in measured_dp):
            yield _Split(f"{name} dp{dp} ep", gpu, tp, pp, ep=True, dp=dp)
        # The rule compares dp, not tp * dp (docs/tables/keys.md, `fleet: dp`): 4 ranks of TP 4 are not put on
        # two nodes of 8 GPUs, although a fleet.yaml may have such workers.
        elif dp > gpu.gpus_per_node and pp == 1 and not _why_not_on_nodes(llm, gpu, tp, dp):
            for all2all in (LOW_LATENCY, HIGH_THROUGHPUT):
                yield _Split(f"{name} dp{dp} ep", gpu, tp, pp, ep=True, dp=dp, all2all=all2all)


def _why_not_on_nodes(llm: Llm, gpu: Gpu, tp: int, dp: int) -> str:
    """Why `dp` ranks cannot be put on nodes, as a sentence; empty if they can."""
    try:
        nodes_of_ranks(llm, gpu, tp, dp)
    except InputError as error:
        return str(error)
    return ""


def _not_on_nodes(
    name: str, llm: Llm, gpu_tp_pp: tuple[Gpu, int, int], engines: EngineChoices
) -> Iterator[OptionLeftOut]:
    """What is left out because `nodes_of_ranks` refuses the ranks that would be on several nodes."""
    gpu, tp, pp = gpu_tp_pp
    for dp in engines.ranks:
        if dp > gpu.gpus_per_node and pp == 1 and (why := _why_not_on_nodes(llm, gpu, tp, dp)):
            yield OptionLeftOut(f"{name} dp{dp} ep", facts.RanksNotOnNodes(why))


@dataclass(frozen=True, slots=True)
class _Split:
    """How an LLM is split over the GPUs of one worker: TP, PP, whether experts are whole (`ep`),
    data-parallel ranks, and the kind of all-to-all between nodes (empty on one node).
    """

    name: str
    gpu: Gpu
    tp: int
    pp: int
    ep: bool
    dp: int = 1
    all2all: All2All = ""

    def settings(self, engines: EngineChoices) -> list[BatchSettings]:
        """Combinations of engine settings.

        On several nodes the budget decides the kind of all-to-all, so only budgets that lead to the split's
        kind remain. If the question names no budgets, the largest one of the kind "low latency" is added,
        because all default budgets are larger.
        """
        budgets = engines.budgets
        if self.all2all and budgets == TOKEN_BUDGETS:
            budgets = (MOST_LOW_LATENCY_TOKENS, *budgets)
        if self.all2all:
            all2all = partial(all2all_of, self.tp * self.dp, self.gpu.gpus_per_node)
            budgets = tuple(budget for budget in budgets if all2all(budget) == self.all2all)
        return replace(engines, budgets=budgets).settings(self.pp, self.dp)

    def latency(self, llm: Llm, catalog: Catalog, engines: EngineChoices, captured: int) -> StepLatency:
        """Step times of this split, with what the engines and a robust question add to them. The largest
        CUDA graph has `captured` tokens.
        """
        is_over_nodes = self.tp * self.pp > self.gpu.gpus_per_node
        stages_bytes_per_s = engines.node_bytes_per_s if is_over_nodes else None  # Between pipeline stages.
        link_bytes_per_s = engines.node_bytes_per_s or MEASURED_LINK_BYTES_PER_S
        exchange = Exchange(self.all2all, link_bytes_per_s)
        engine = "vllm" if engines.engine is None else engines.engine.name
        fit = catalog.step_latency(
            llm, self.gpu, self.tp, ep=self.ep, dp=self.dp, exchange=exchange, engine=engine
        )
        fit = correct_for_version(fit, llm, self.gpu, engines.engine, captured)
        latency = add_pipeline(fit, llm, self.gpu, self.tp, self.pp, link_bytes_per_s=stages_bytes_per_s)
        latency = replace(latency, h_s=latency.h_s + engines.host_overhead_s)
        if engines.longer_frac:
            basis = f"{latency.basis}; taken {100 * engines.longer_frac:g} % longer (robust)"
            latency = replace(latency.with_longer_steps(engines.longer_frac), basis=basis)
        return latency


def _types_of_split(
    split: _Split,
    llm: Llm,
    drafters: Mapping[Speculation | None, Drafter],
    catalog: Catalog,
    engines: EngineChoices,
) -> list[WorkerType]:
    """The worker types of one split that hold the weights and some KV blocks, one per engine setting."""
    gpu, tp, pp = split.gpu, split.tp, split.pp
    slots = None if engines.lora is None else lora_slots(engines.lora, llm, gpu, tp, ep=split.ep)
    latencies: dict[int, StepLatency] = {}  # By the tokens of the largest CUDA graph; settings share them.
    types = []
    for budget, seats, drafts in split.settings(engines):
        # The sampler needs memory for one row of each sequence, and with drafts for SAMPLED_ROWS.
        sampled_rows = seats if drafts is None else SAMPLED_ROWS * seats
        memory = worker_memory(
            llm,
            gpu,
            tp,
            pp,
            max_num_batched_tokens=budget,
            max_num_seqs=sampled_rows,
            dp=split.dp,
            settings=MemorySettings.of_engine(engines.engine),
        )
        memory = drafters[drafts].add_to_memory(memory, llm, tp)
        kv_tokens = (memory if slots is None else slots.add_to_memory(memory)).kv_tokens
        if kv_tokens == 0:
            continue
        captured = captured_tokens(seats, 1 if drafts is None else drafts.most_tokens)
        if captured not in latencies:
            latencies[captured] = split.latency(llm, catalog, engines, captured)
        worker = WorkerType(
            gpu,
            tp,
            latencies[captured],
            kv_tokens,
            budget,
            seats,
            pp,
            engine=engine_with_drafts(engines.simulated_engine, drafts),
            speculation=drafts,
            ep=split.ep,
            dp=split.dp,
            lora=slots,
        ).with_llm(llm)
        types.append(_at_spread(worker, split.name) if engines.at_spread else worker)
    return types


def _left_out_of_split(
    name: str, llm: Llm, types: Sequence[WorkerType], settings: Sequence[BatchSettings], longest_tokens: int
) -> Iterator[OptionLeftOut]:
    """The engine settings of one split that are left out of plans, and why. `types` are the split's worker
    types that hold KV blocks beside the weights.
    """
    settings_with_room = {
        (worker.max_num_batched_tokens, worker.max_num_seqs, worker.speculation) for worker in types
    }
    # The budgets of the settings without room for KV blocks.
    no_room = [setting.budget_tokens for setting in settings if setting not in settings_with_room]
    if not types:
        yield OptionLeftOut(name, facts.WeightsTooLarge(llm.weight_bytes))
    elif no_room:
        # The smallest budget stands for all: larger ones leave even less memory.
        yield OptionLeftOut(f"{name} {min(no_room)}", facts.NoRoomForKv())
    if too_small := tuple(worker for worker in types if not worker.has_room_for(longest_tokens)):
        largest = max(too_small, key=lambda worker: worker.kv_tokens)
        because = facts.RequestTooLong(largest.kv_tokens, longest_tokens)
        yield OptionLeftOut(f"{name} {largest.max_num_batched_tokens}", because, too_small)


def objective_of_worker(worker: WorkerType, objective: str) -> float:
    """What one worker's GPUs add to the objective: FREE_USD_PER_H for a GPU that costs nothing."""
    if objective == "power":
        return worker.power_w
    if objective == "gpus":
        return float(worker.gpus)
    return worker.price_usd_per_h + free_usd_per_h(worker.gpu) * worker.gpus


def free_usd_per_h(gpu: Gpu) -> float:
    """What the search adds to the price of a GPU [USD/h]: 0 for a GPU that is paid."""
    may_be_free = gpu.name.endswith(OWNED) or gpu.usd_per_h == 0
    return max(FREE_USD_PER_H - gpu.usd_per_h, 0.0) if may_be_free else 0.0


def option_of(role: Role, worker: WorkerType, objective: str) -> Option:
    """A worker type in a role. With the objective "cost" the option has its node, so that idle GPUs of whole
    nodes are paid. With "cost-by-gpu", the objective of several LLMs that share nodes
    (`Problem.option_objective`), they cost nothing.
    """
    node = node_of(worker.gpu) if objective == "cost" else None
    return Option(role, worker, objective_of_worker(worker, objective), node)


def with_price_tie(option: Option, objective: str, dearest_usd_per_h: float) -> Option:
    """An option for the objective "gpus" or "power"; with another objective the option itself. Its price,
    with that of idle GPUs of whole nodes, decides between fleets of equally many GPUs or Watts (PRICE_TIES).
    `dearest_usd_per_h` is the price of the dearest GPU of the question.
    """
    if objective not in PRICE_TIES or dearest_usd_per_h <= 0:
        return option
    value_per_usd_h = PRICE_TIES[objective] / dearest_usd_per_h
    gpu, node = option.type.gpu, node_of(option.type.gpu)
    # `fleet_counts.objective_of` adds TIE_BREAK_FRAC to fleets that have a node. A GPU that is sold singly is
    # a node of one GPU here, so that all fleets have the tie-break and stay comparable.
    node = node or PricedNode(gpu.name, 1, gpu.price_usd_per_h, 0.0)
    return replace(
        option,
        objective=option.objective + value_per_usd_h * option.type.price_usd_per_h,
        node=replace(
            node,
            gpu_usd_per_h=value_per_usd_h * node.gpu_usd_per_h,
            idle_electricity_usd_per_h=value_per_usd_h * node.idle_electricity_usd_per_h,
        ),
    )


def without_price_tie(value: float, objective: str) -> float:
    """The whole GPUs or Watts of a fleet of this value, without the share of its price that `with_price_tie`
    adds. With another objective the value itself.
    """
    if objective not in PRICE_TIES or not math.isfinite(value):
        return value
    return float(math.floor(value * (1 + ROUNDING)))


def mixed_options(types: Iterable[WorkerType], objective: str) -> list[Option]:
    """Every worker type as a mixed worker, without those with high-throughput all-to-all. Only prefill pools
    use this all-to-all, because vLLM runs it without CUDA graphs (models/all2all.py).
    """
    return [option_of("mixed", worker, objective) for worker in types if worker.all2all != HIGH_THROUGHPUT]


def split_of(worker: WorkerType) -> tuple[str, int, int, bool, int]:
    """How the LLM is split over a worker's GPUs: name of the GPU, TP, PP, EP and data-parallel ranks."""
    return worker.gpu.name, worker.tp, worker.pp, worker.ep, worker.dp


def prefill_options(types: Iterable[WorkerType], objective: str) -> list[Option]:
    """One option per hardware, token budget and drafter, with the most seats.

    Requests leave a prefill worker at once, so its token budget binds and not its seats. Drafts without a
    model of their own (n-gram look-up) make no difference to prefill. Workers that cannot hand off are left
    out.
    """
    with_most_seats: dict[tuple[object, ...], WorkerType] = {}
    for worker in types:
        if not worker.can_hand_off:
            continue
        key = (*split_of(worker), worker.max_num_batched_tokens, drafter_with_cache(worker))
        if key not in with_most_seats or worker.max_num_seqs > with_most_seats[key].max_num_seqs:
            with_most_seats[key] = worker
    return [option_of("prefill", worker, objective) for worker in with_most_seats.values()]


def decode_options(types: Iterable[WorkerType], objective: str) -> list[Option]:
    """One option per hardware, seats and drafts, with the token budget nearest to DECODE_BUDGET_TOKENS.

    A decode worker prefills only preempted requests, so its budget hardly matters. Workers that cannot hand
    off are left out.
    """

    def distance_tokens(worker: WorkerType) -> int:
        """How far the worker's budget is from DECODE_BUDGET_TOKENS."""
        return abs(worker.max_num_batched_tokens - DECODE_BUDGET_TOKENS)

    nearest: dict[tuple[object, ...], WorkerType] = {}
    for worker in types:
        if worker.all2all == HIGH_THROUGHPUT or not worker.can_hand_off:  # See `mixed_options`.
            continue
        key = (*split_of(worker), worker.max_num_seqs, worker.speculation)
        if key not in nearest or distance_tokens(worker) < distance_tokens(nearest[key]):
            nearest[key] = worker
    return [option_of("decode", worker, objective) for worker in nearest.values()]


def breaks_gaps(worker: WorkerType, slo: Slo, *, mean: bool = False) -> bool:
    """Whether a full step takes more than FULL_STEP_FRAC times the tightest limit on gaps between tokens.
    With `mean`, limits on the mean gap of a request count too.
    """
    gaps_s = [
        limit.limit_s
        for limit in slo.limits
        if (limit.metric_row.is_pace if mean else limit.metric_row.is_of_gaps)
    ]
    full_step_s = float(worker.latency.step_s(worker.max_num_batched_tokens))
    return full_step_s > FULL_STEP_FRAC * min(gaps_s, default=math.inf)
