"""Finds how much memory behind the KV caches is worth buying: CPU memory, a disk behind it, or one store for
all workers.

These kinds of memory are called tiers. A choice gives each tier a size: memory and disk per GPU, the store as
a whole. The memory that comes with a node is free; the cost of more memory is added to the price of every
GPU, so that the search weighs it against GPUs. For each choice, the cheapest fleet on paper is searched. The
study begins with the CPU memory that comes with a node, and no disk. In turns it sets memory and disk to the
best of all their sizes, as long as GPUs and tiers together become cheaper: where one size saves nothing, a
larger one may save a whole GPU. The choice without any tier is always searched too, so the answer never costs
more than without tiers. If choices are equally cheap, the one with the least memory is taken.

The break-even of a tier is the shortest prefix that a worker loads from the tier sooner than it computes the
prefix:

    L tokens * seconds to load a token <= prefill(u + L) - prefill(u after L cached)

for a prompt of L cached tokens and u = 16 further tokens, which is one KV block.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.kv_offload_settings import check_can_offload
from planner.documents.kv_tiers import KvTier
from planner.documents.task import PlanQuestion
from planner.domain import KV_BLOCK_TOKENS, ROUNDING
from planner.errors import InfeasibleError, InputError
from planner.fleet import Fleet, WorkerType
from planner.models.kv_offload import KvOffload, is_common
from planner.models.llm import Llm
from planner.search.evidence.plan import AgentFigures, agent_figures
from planner.search.oracle.work_clock import time_limit
from planner.search.problem.bill import bill_fleet
from planner.search.problem.idle_limits import idle_prefill_s
from planner.search.problem.owned_first import objective_paid
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.solvers.master import paid_usd_per_h
from planner.studies.what_if import Study

# The sizes of a store that are tried: each size from 0.5 to 32 TB is within a factor of two of one of these.
STORE_SIZES_BYTES = (1e12, 4e12, 16e12)
# The sizes that are tried, as multiples of the size that comes with a node. For a tier that comes with none,
# they are multiples of the largest size that the catalog allows.
MEMORY_STEPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
DISK_STEPS = (0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class TierSizes:
    """The size of each tier [bytes]: memory and disk are for one GPU, the store is one for all."""

    memory_bytes: float = 0.0
    disk_bytes: float = 0.0
    store_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Bytes of all tiers together."""
        return self.memory_bytes + self.disk_bytes + self.store_bytes


@dataclass(frozen=True, slots=True, eq=False)
class TierChoice:
    """The cheapest fleet found with tiers of these sizes; None if none keeps the SLO.

    `usd_per_h` is the cost of GPUs and tiers, infinite without a fleet, and `tiers_usd_per_h` that of the
    tiers alone; both include the `idle_gpus` of whole nodes, which are paid with their memory. The
    `hit_frac`s are the shares of prompt tokens that are found on GPUs, in memory or the store, and on disk.
    `is_exhausted` is False if the search was cut short.
    """

    sizes: TierSizes
    usd_per_h: float
    tiers_usd_per_h: float
    fleet: Fleet | None = None
    idle_gpus: int = 0
    gpu_hit_frac: float = 0.0
    memory_hit_frac: float = 0.0
    disk_hit_frac: float = 0.0
    agents: AgentFigures | None = None
    is_exhausted: bool = True

    @property
    def holds(self) -> bool:
        """Whether a fleet with these tiers was found; without one `usd_per_h` is infinite."""
        return math.isfinite(self.usd_per_h)


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The shortest prefix [tokens] that this worker type loads from a tier sooner than it computes it.

    It is None if computing is always sooner.
    """

    tier: str
    worker: str
    prefix_tokens: int | None


@dataclass(frozen=True, slots=True, eq=False)
class TierStudy:
    """The answer of every choice in the order of their searches, the best answer, and the break-even of each
    tier.
    """

    choices: tuple[TierChoice, ...]
    best: TierChoice
    break_even: tuple[BreakEven, ...]

    @property
    def without(self) -> TierChoice:
        """The answer without KV tiers, which is the first that `search_sizes` computes."""
        return self.choices[0]


def to_offload(sizes: TierSizes, tiers: Mapping[str, KvTier]) -> KvOffload | None:
    """The KV offload of a fleet with these tiers; None if all sizes are 0. A store is used alone."""
    tier_of_kind = {tier.kind: tier for tier in tiers.values()}
    if sizes.store_bytes:
        return KvOffload(sizes.store_bytes, tier_of_kind["store"].bandwidth_bytes_per_s, is_shared=True)
    if not sizes.total_bytes:
        return None
    offload = KvOffload(sizes.memory_bytes, tier_of_kind["memory"].bandwidth_bytes_per_s)
    if not sizes.disk_bytes:
        return offload
    bandwidth_bytes_per_s = tier_of_kind["disk"].bandwidth_bytes_per_s
    return replace(offload, disk_bytes=sizes.disk_bytes, disk_bandwidth_bytes_per_s=bandwidth_bytes_per_s)


def gpu_usd_per_h(sizes: TierSizes, tiers: Mapping[str, KvTier]) -> float:
    """The cost [USD/h] of one GPU's memory and disk, as far as they do not come with its node."""
    size_of: dict[str, float] = {"memory": sizes.memory_bytes, "disk": sizes.disk_bytes}
    return sum(tier.usd_per_h(size_of.get(tier.kind, 0.0)) for tier in tiers.values())


def store_usd_per_h(sizes: TierSizes, tiers: Mapping[str, KvTier]) -> float:
    """The cost [USD/h] of the store, which does not depend on the fleet; 0 without a store."""
    tier_of_kind = {tier.kind: tier for tier in tiers.values()}
    return tier_of_kind["store"].usd_per_h(sizes.store_bytes) if sizes.store_bytes else 0.0


def with_tiers(task: PlanQuestion, sizes: TierSizes, tiers: Mapping[str, KvTier]) -> PlanQuestion:
    """The question with these tiers for every GPU, and with their cost in the price of a GPU."""
    offload = to_offload(sizes, tiers)
    # A search may not leave the tiers out: the choice without tiers has an answer of its own
    # (TierStudy.without).
    policies = replace(task.policies, prefix_cache=True, kv_offload=offload, may_leave_offload=False)
    return replace(task, policies=policies, kv_usd_per_gpu_h=gpu_usd_per_h(sizes, tiers))


def choose_tiers(study: Study, task: PlanQuestion, tiers: Mapping[str, KvTier]) -> TierStudy:
    """Find the best sizes of the tiers; each search has an equal part of the work that the study may take.

    Raises InputError for a question without prefix caches, with another objective than cost, or with a
    setting that is not simulated beside tiers. Raises InfeasibleError if no fleet keeps the SLO with any
    choice.
    """
    if not task.policies.prefix_cache:
        raise InputError("policies: prefix_cache: tiers keep what leaves prefix caches; write true")
    if task.objective != "cost":
        raise InputError(f"objective: {task.objective}: tiers are weighed by cost; write cost")
    llm = study.catalog.served_llm(task.llm)
    _refuse_beside_tiers(task, llm)
    # TP 1 and 2 are the smallest degrees: if their workers share no KV blocks, no two degrees do.
    grid = tier_grid(tiers, may_share=is_common(llm, (1, 2)))
    work_s = study.work_limit_s / max(grid.most_choices, 1)
    choices: dict[TierSizes, TierChoice] = {}

    def answer(sizes: TierSizes) -> TierChoice:
        """The answer with tiers of these sizes, which is searched for only once."""
        if sizes not in choices:
            study.progress(f"KV tiers: {show_sizes(sizes)}")
            choices[sizes] = _choose_with_tiers(study, task, sizes, tiers, work_s)
        return choices[sizes]

    with time_limit(study.left_s):
        best = search_sizes(grid, answer)
    if best.fleet is None:
        is_proved = all(row.is_exhausted for row in choices.values())
        raise InfeasibleError(
            "no fleet keeps the SLO with any of the KV tiers; `plan` says which limit binds"
            if is_proved
            else "no fleet that keeps the SLO was found with any of the KV tiers: searches were cut short; "
            "raise --time-limit",
            kind="capacity",
            constraint="KV tiers",
            is_proved=is_proved,
        )
    types = [pool.type for pool in best.fleet.running_pools if pool.role != "decode"]
    return TierStudy(tuple(choices.values()), best, tuple(_break_evens(llm, types, tiers)))


def _refuse_beside_tiers(task: PlanQuestion, llm: Llm) -> None:
    """Raise InputError if the question has a setting that is not simulated with KV offload."""
    check_can_offload(llm, "KV tiers")
    for where, is_set in (
        ("fleet: pp", any(stages > 1 for stages in task.stages)),
        ("engine: speculative", any(drafts is not None for drafts in task.speculations)),
        ("lora", task.lora is not None),
    ):
        if is_set:
            raise InputError(f"{where}: is not simulated with KV tiers; leave it out")


@dataclass(frozen=True, slots=True)
class TierGrid:
    """The sizes that may be chosen, in rising order. `memory_start` is the index of the memory that comes
    with a node.
    """

    memory_bytes: tuple[float, ...]
    disk_bytes: tuple[float, ...]
    store_bytes: tuple[float, ...]
    memory_start: int

    @property
    def most_choices(self) -> int:
        """About how many choices `search_sizes` searches: each size of each tier once."""
        return len(self.memory_bytes) + len(self.disk_bytes) + len(self.store_bytes)


def tier_grid(tiers: Mapping[str, KvTier], *, may_share: bool) -> TierGrid:
    """The sizes that may be chosen of each kind of tier that the catalog has."""
    tier_of_kind: dict[str, KvTier] = {tier.kind: tier for tier in tiers.values()}

    def sizes(kind: str, steps: Sequence[float]) -> tuple[float, ...]:
        """The sizes to try of a tier [bytes]: 0, and the multiples of its base size that fit."""
        tier = tier_of_kind.get(kind)
        if tier is None:
            return (0.0,)
        base = tier.free_bytes or tier.most_bytes  # MEMORY_STEPS and DISK_STEPS are multiples of this size.
        return (0.0, *sorted({step * base for step in steps if step * base <= tier.most_bytes}))

    memory = sizes("memory", MEMORY_STEPS)
    free_bytes = tier_of_kind["memory"].free_bytes if "memory" in tier_of_kind else 0.0
    memory_start = max((i for i, size in enumerate(memory) if size <= free_bytes), default=0)
    store = tier_of_kind.get("store")
    stores = (
        tuple(size for size in STORE_SIZES_BYTES if size <= store.most_bytes) if store and may_share else ()
    )
    return TierGrid(memory, sizes("disk", DISK_STEPS), stores, memory_start)


def search_sizes(grid: TierGrid, answer: Callable[[TierSizes], TierChoice]) -> TierChoice:
    """The best answer of the choices that are searched.

    The choice without tiers comes first, then memory as it comes with a node. From there memory is set to its
    best size first, and then once more from there disk first, because each may make the other needless.
    Stores come last; where no fleet was found before them, so do all other sizes of memory with disk.
    """
    best = answer(TierSizes())
    start = answer(TierSizes(grid.memory_bytes[grid.memory_start]))
    axes = ("memory_bytes", grid.memory_bytes), ("disk_bytes", grid.disk_bytes)
    for in_order in (axes, axes[::-1]):
        choice = _best_in_turns(start, in_order, answer)
        best = choice if _is_better(choice, best) else best
    others = [TierSizes(store_bytes=size) for size in grid.store_bytes]
    if not best.holds:  # Only then all memory and disks together: the best of each was not found.
        others += itertools.starmap(TierSizes, itertools.product(grid.memory_bytes, grid.disk_bytes))
    for sizes in others:
        candidate = answer(sizes)
        best = candidate if _is_better(candidate, best) else best
    return best


def _best_in_turns(
    choice: TierChoice, axes: Sequence[tuple[str, Sequence[float]]], answer: Callable[[TierSizes], TierChoice]
) -> TierChoice:
    """From a choice on, one tier after the other set to the best of all its sizes, until none is better."""
    previous = None
    while choice.sizes != previous:
        previous = choice.sizes
        for name, sizes in axes:
            for size in sizes:
                change: dict[str, float] = {name: size}
                candidate = answer(replace(choice.sizes, **change))
                choice = candidate if _is_better(candidate, choice) else choice
    return choice


def _is_better(one: TierChoice, other: TierChoice) -> bool:
    """Whether `one` is cheaper, or as cheap with less memory."""
    if not one.holds and not other.holds:
        return False
    if math.isclose(one.usd_per_h, other.usd_per_h, rel_tol=ROUNDING):  # Never if one has no fleet.
        return one.sizes.total_bytes < other.sizes.total_bytes
    return one.usd_per_h < other.usd_per_h


def _choose_with_tiers(
    study: Study, task: PlanQuestion, sizes: TierSizes, tiers: Mapping[str, KvTier], work_s: float
) -> TierChoice:
    """The cheapest fleet on paper with these tiers. The search for it may take `work_s` on its own clock.

    A limit on cost is of GPUs and tiers together.
    """
    task, store_cost_usd_per_h = with_tiers(task, sizes, tiers), store_usd_per_h(sizes, tiers)
    if (limit_usd_per_h := task.cost_limit_usd_per_h) is not None:
        if limit_usd_per_h <= store_cost_usd_per_h:
            return TierChoice(sizes, usd_per_h=math.inf, tiers_usd_per_h=0.0)
        task = replace(task, cost_limit_usd_per_h=limit_usd_per_h - store_cost_usd_per_h)
    try:
        problem, fleet_search = study.find_paper_fleet(task, work_s)
    except InfeasibleError as error:
        return TierChoice(sizes, usd_per_h=math.inf, tiers_usd_per_h=0.0, is_exhausted=error.is_proved)
    fleet = problem.oracle.fleet(fleet_search.best)
    simulation = simulate(fleet, problem.trace)
    usd_per_h = objective_paid(problem, fleet_search.best) + store_cost_usd_per_h
    # What is paid for the GPUs alone. Idle GPUs of nodes sold whole pay for memory and disk too.
    bare_usd_per_h = paid_usd_per_h(
        (_without_tiers(pool.type, gpu_usd_per_h(sizes, tiers)), pool.count) for pool in fleet.running_pools
    )
    gpu_hit_frac, memory_hit_frac, disk_hit_frac = hit_fracs(simulation)
    return TierChoice(
        sizes=sizes,
        usd_per_h=usd_per_h,
        tiers_usd_per_h=usd_per_h - bare_usd_per_h,
        fleet=fleet,
        gpu_hit_frac=gpu_hit_frac,
        memory_hit_frac=memory_hit_frac,
        disk_hit_frac=disk_hit_frac,
        agents=agent_figures(problem.trace, simulation, usd_per_h),
        is_exhausted=fleet_search.level0.search.is_exhausted,
        idle_gpus=bill_fleet(fleet).idle_gpus,
    )


def _without_tiers(worker: WorkerType, tiers_usd_per_gpu_h: float) -> WorkerType:
    """The worker type at the price of its GPUs without the memory and disk behind them."""
    price_usd_per_h = max(worker.gpu.price_usd_per_h - tiers_usd_per_gpu_h, 0.0)
    return replace(worker, gpu=replace(worker.gpu, price_usd_per_h=price_usd_per_h))


def hit_fracs(simulation: Simulation) -> tuple[float, float, float]:
    """Shares of all prompt tokens that were found on GPUs, in memory or a store, and on disk."""
    # `token_reload_frac` includes what was on disk.
    reloaded, on_disk = simulation.token_reload_frac or 0.0, simulation.token_disk_frac or 0.0
    return simulation.token_hit_frac or 0.0, reloaded - on_disk, on_disk


def break_even_tokens(worker: WorkerType, token_s: float, most_tokens: int) -> int | None:
    """The shortest prefix in whole KV blocks that takes no longer to load than to compute; None if there is
    none.

    Loading takes `token_s` per token. The prompt has KV_BLOCK_TOKENS more tokens than the prefix, and at most
    `most_tokens`.
    """
    prefix = np.arange(KV_BLOCK_TOKENS, most_tokens - KV_BLOCK_TOKENS, KV_BLOCK_TOKENS, dtype=float)
    prompt = prefix + KV_BLOCK_TOKENS
    saved_s = idle_prefill_s(worker, prompt) - idle_prefill_s(worker, prompt, prefix)
    sooner = np.flatnonzero(prefix * token_s <= saved_s)
    return int(prefix[sooner[0]]) if len(sooner) else None


def _break_evens(llm: Llm, types: Sequence[WorkerType], tiers: Mapping[str, KvTier]) -> list[BreakEven]:
    """For each tier and worker type, from how many tokens on a prefix loads sooner than it computes."""
    rows = []
    memory = next((tier for tier in tiers.values() if tier.kind == "memory"), None)
    for tier in tiers.values():
        for worker in dict.fromkeys(types):
            # The time to load a token does not depend on the tier's size, so any size will do here: 1 byte.
            offload = KvOffload(1.0, tier.bandwidth_bytes_per_s, is_shared=tier.kind == "store")
            token_s = offload.token_s(llm, worker.tp)
            if tier.kind == "disk" and memory is not None:
                # Blocks from disk go through memory. Both copies run at once, so the slower one counts.
                memory_to_gpu = KvOffload(1.0, memory.bandwidth_bytes_per_s)
                token_s = max(token_s, memory_to_gpu.token_s(llm, worker.tp))
            rows.append(
                BreakEven(tier.name, worker.name, break_even_tokens(worker, token_s, llm.context_tokens))
            )
    return rows


def show_sizes(sizes: TierSizes) -> str:
    """The sizes in words, for instance "128 GB of memory and 3,840 GB of disk per GPU"."""
    if sizes.store_bytes:
        return f"a store of {sizes.store_bytes / 1e9:,.0f} GB"
    parts = [
        f"{size / 1e9:,.0f} GB of {name}"
        for name, size in (("memory", sizes.memory_bytes), ("disk", sizes.disk_bytes))
        if size
    ]
    return f"{' and '.join(parts)} per GPU" if parts else "none"
