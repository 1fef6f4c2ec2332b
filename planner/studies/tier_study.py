"""How much memory behind the KV caches is worth buying: CPU memory, a disk behind it, or a store for all.

A choice is so much of each tier for every GPU. What comes with a node is free; what is more is added to the
price of every GPU, so that the search weighs it against GPUs. For each choice that is looked at, the cheapest
fleet is searched for on paper, as the plan's is. From what comes with a node the sizes are doubled and
halved, one tier at a time, as long as the whole becomes cheaper. The fleet without any tier is always among
them, so the answer is never dearer; of equally cheap choices the one with the least memory is taken.

The break-even of a tier is the shortest prefix that a worker loads from it sooner than it computes it:

    L tokens * seconds to load a token <= prefill(u + L) - prefill(u after L cached)        u = 16
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.kv_tiers import KvTier
from planner.documents.task import PlanQuestion
from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InfeasibleError, InputError
from planner.fleet import Fleet, WorkerType
from planner.models.kv_offload import KvOffload, is_common
from planner.models.llm import Llm
from planner.search.evidence.plan import AgentFigures, agent_figures
from planner.search.oracle.work_clock import time_limit
from planner.search.problem.options import idle_prefill_s
from planner.search.problem.owned_first import objective_paid
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.studies.what_if import Study

SAME_COST = 1e-9  # Costs nearer to each other than this share are equal but for rounding.
STORE_SIZES_BYTES = (1e12, 4e12, 16e12)
MEMORY_STEPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of what comes with a node
DISK_STEPS = (0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Bytes of each tier: of memory and disk for one GPU, of the store in all."""

    memory_bytes: float = 0.0
    disk_bytes: float = 0.0
    store_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return self.memory_bytes + self.disk_bytes + self.store_bytes


@dataclass(frozen=True, slots=True, eq=False)
class TierAnswer:
    """The cheapest fleet found with these tiers, None where none was; `usd_per_h` is of GPUs and tiers, of
    which `tiers_usd_per_h`. Shares are of prompt tokens: found on GPUs, in memory or the store, on disk. A
    search that is not exhausted was cut short.
    """

    sizes: TierSizes
    usd_per_h: float
    tiers_usd_per_h: float
    fleet: Fleet | None = None
    gpu_hit_frac: float = 0.0
    memory_hit_frac: float = 0.0
    disk_hit_frac: float = 0.0
    agents: AgentFigures | None = None
    is_exhausted: bool = True


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The shortest prefix [tokens] that this worker type loads from a tier sooner than it computes it; None
    where that is never so.
    """

    tier: str
    worker: str
    prefix_tokens: int | None


@dataclass(frozen=True, slots=True, eq=False)
class TierStudy:
    """Every choice that was looked at, in that order, the best one, and the break-even of each tier."""

    answers: tuple[TierAnswer, ...]
    best: TierAnswer
    break_even: tuple[BreakEven, ...]

    @property
    def without(self) -> TierAnswer:
        """The answer without any tier."""
        return self.answers[0]


def to_offload(sizes: TierSizes, tiers: Mapping[str, KvTier]) -> KvOffload | None:
    """The setting of a fleet with these tiers, None without any."""
    of_kind = {tier.kind: tier for tier in tiers.values()}
    if sizes.store_bytes:
        return KvOffload(sizes.store_bytes, of_kind["store"].bandwidth_bytes_per_s, is_shared=True)
    if not sizes.total_bytes:
        return None
    offload = KvOffload(sizes.memory_bytes, of_kind["memory"].bandwidth_bytes_per_s)
    if not sizes.disk_bytes:
        return offload
    bandwidth_bytes_per_s = of_kind["disk"].bandwidth_bytes_per_s
    return replace(offload, disk_bytes=sizes.disk_bytes, disk_bandwidth_bytes_per_s=bandwidth_bytes_per_s)


def gpu_usd_per_h(sizes: TierSizes, tiers: Mapping[str, KvTier]) -> float:
    """What memory and disk of one GPU cost, beyond what comes with its node."""
    size_of: dict[str, float] = {"memory": sizes.memory_bytes, "disk": sizes.disk_bytes}
    return sum(tier.usd_per_h(size_of.get(tier.kind, 0.0)) for tier in tiers.values())


def store_usd_per_h(sizes: TierSizes, tiers: Mapping[str, KvTier]) -> float:
    """What the store costs, whatever the fleet."""
    of_kind = {tier.kind: tier for tier in tiers.values()}
    return of_kind["store"].usd_per_h(sizes.store_bytes) if sizes.store_bytes else 0.0


def with_tiers(task: PlanQuestion, sizes: TierSizes, tiers: Mapping[str, KvTier]) -> PlanQuestion:
    """The question for a fleet whose GPUs have these tiers, and cost what they cost."""
    offload = to_offload(sizes, tiers)
    policies = replace(task.policies, prefix_cache=True, kv_offload=offload)
    return replace(task, policies=policies, kv_usd_per_gpu_h=gpu_usd_per_h(sizes, tiers))


def choose_tiers(study: Study, task: PlanQuestion, tiers: Mapping[str, KvTier]) -> TierStudy:
    """The best sizes of the tiers; each search has an equal part of the work that the study may take.

    Raises InputError for a question without prefix caches or whose objective is not cost, InfeasibleError
    where no fleet keeps the SLO with any choice.
    """
    if not task.policies.prefix_cache:
        raise InputError("policies: prefix_cache: tiers keep what leaves prefix caches; write true")
    if task.objective != "cost":
        raise InputError(f"objective: {task.objective}: tiers are weighed by cost; write cost")
    llm = study.catalog.served_llm(task.llm)
    grid = tier_grid(tiers, may_share=is_common(llm, (1, 2)))
    work_s = study.work_limit_s / max(grid.most_answers, 1)
    known: dict[TierSizes, TierAnswer] = {}

    def answer(sizes: TierSizes) -> TierAnswer:
        if sizes not in known:
            study.progress(f"KV tiers: {show_sizes(sizes)}")
            known[sizes] = _answer(study, task, sizes, tiers, work_s)
        return known[sizes]

    with time_limit(study.left_s):
        best = search_sizes(grid, answer)
    if best.fleet is None:
        is_proved = all(row.is_exhausted for row in known.values())
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
    return TierStudy(tuple(known.values()), best, tuple(_break_evens(llm, types, tiers)))


@dataclass(frozen=True, slots=True)
class TierGrid:
    """The sizes that may be chosen, rising; `memory_at` and `disk_at` are those that come with a node."""

    memory_bytes: tuple[float, ...]
    disk_bytes: tuple[float, ...]
    store_bytes: tuple[float, ...]
    memory_at: int

    @property
    def most_answers(self) -> int:
        """About how many choices `search_sizes` looks at."""
        return len(self.memory_bytes) // 2 + len(self.disk_bytes) + len(self.store_bytes)


def tier_grid(tiers: Mapping[str, KvTier], *, may_share: bool) -> TierGrid:
    """The sizes that may be chosen of each kind of tier that the catalog has."""
    of_kind: dict[str, KvTier] = {tier.kind: tier for tier in tiers.values()}

    def sizes(kind: str, steps: Sequence[float]) -> tuple[float, ...]:
        tier = of_kind.get(kind)
        if tier is None:
            return (0.0,)
        base = tier.free_bytes or tier.most_bytes
        return (0.0, *sorted({step * base for step in steps if step * base <= tier.most_bytes}))

    memory = sizes("memory", MEMORY_STEPS)
    free = of_kind["memory"].free_bytes if "memory" in of_kind else 0.0
    at = max((i for i, size in enumerate(memory) if size <= free), default=0)
    store = of_kind.get("store")
    stores = (
        tuple(size for size in STORE_SIZES_BYTES if size <= store.most_bytes) if store and may_share else ()
    )
    return TierGrid(memory, sizes("disk", DISK_STEPS), stores, at)


def search_sizes(grid: TierGrid, answer: Callable[[TierSizes], TierAnswer]) -> TierAnswer:
    """The best answer: none at all, then memory and disk in turns from what comes with a node, then stores.

    One tier at a time is moved to the next size as long as that is better, up first, then down.
    """
    best = answer(TierSizes())
    axes = grid.memory_bytes, grid.disk_bytes
    at = [grid.memory_at, 0]
    here = answer(TierSizes(axes[0][at[0]], axes[1][at[1]]))
    moved = True
    while moved:
        moved = False
        for axis, step in ((0, 1), (1, 1), (0, -1), (1, -1)):
            while 0 <= at[axis] + step < len(axes[axis]):
                tried = list(at)
                tried[axis] += step
                there = answer(TierSizes(axes[0][tried[0]], axes[1][tried[1]]))
                if not _is_better(there, here):
                    break
                at, here, moved = tried, there, True
    best = here if _is_better(here, best) else best
    for size in grid.store_bytes:
        there = answer(TierSizes(store_bytes=size))
        best = there if _is_better(there, best) else best
    return best


def _is_better(one: TierAnswer, other: TierAnswer) -> bool:
    """Cheaper, or as cheap with less memory."""
    if math.isinf(one.usd_per_h) and math.isinf(other.usd_per_h):
        return False
    if abs(one.usd_per_h - other.usd_per_h) <= SAME_COST * other.usd_per_h:
        return one.sizes.total_bytes < other.sizes.total_bytes
    return one.usd_per_h < other.usd_per_h


def _answer(
    study: Study, task: PlanQuestion, sizes: TierSizes, tiers: Mapping[str, KvTier], work_s: float
) -> TierAnswer:
    """The cheapest fleet on paper with these tiers, of a search that may take `work_s` of its clock."""
    try:
        problem, best = study.find_paper_fleet(with_tiers(task, sizes, tiers), work_s)
    except InfeasibleError as error:
        return TierAnswer(sizes, math.inf, 0.0, is_exhausted=error.is_proved)
    fleet = problem.oracle.fleet(best.best)
    simulation = simulate(fleet, problem.trace)
    store = store_usd_per_h(sizes, tiers)
    usd_per_h = objective_paid(problem, best.best) + store
    return TierAnswer(
        sizes,
        usd_per_h,
        store + fleet.gpus * gpu_usd_per_h(sizes, tiers),
        fleet,
        *hit_fracs(simulation),
        agent_figures(problem.trace, simulation, usd_per_h),
        best.level0.search.is_exhausted,
    )


def hit_fracs(simulation: Simulation) -> tuple[float, float, float]:
    """Shares of all prompt tokens found on GPUs, in memory or a store, on disk."""
    reloaded, on_disk = simulation.token_reload_frac or 0.0, simulation.token_disk_frac or 0.0
    return simulation.token_hit_frac or 0.0, reloaded - on_disk, on_disk


def break_even_tokens(worker: WorkerType, token_s: float, most_tokens: int) -> int | None:
    """The shortest prefix in whole KV blocks that takes no longer to load, at `token_s` a token, than to
    compute before KV_BLOCK_TOKENS more; None where none of up to `most_tokens` does.
    """
    prefix = np.arange(KV_BLOCK_TOKENS, most_tokens - KV_BLOCK_TOKENS, KV_BLOCK_TOKENS, dtype=float)
    whole = prefix + KV_BLOCK_TOKENS
    saved_s = idle_prefill_s(worker, whole) - idle_prefill_s(worker, whole, prefix)
    sooner = np.flatnonzero(prefix * token_s <= saved_s)
    return int(prefix[sooner[0]]) if len(sooner) else None


def _break_evens(llm: Llm, types: Sequence[WorkerType], tiers: Mapping[str, KvTier]) -> list[BreakEven]:
    rows = []
    memory = next((tier for tier in tiers.values() if tier.kind == "memory"), None)
    for tier in tiers.values():
        for worker in dict.fromkeys(types):
            offload = KvOffload(1.0, tier.bandwidth_bytes_per_s, is_shared=tier.kind == "store")
            token_s = offload.token_s(llm, worker.tp)
            if tier.kind == "disk" and memory is not None:  # It crosses both links at once.
                to_gpu = KvOffload(1.0, memory.bandwidth_bytes_per_s)
                token_s = max(token_s, to_gpu.token_s(llm, worker.tp))
            rows.append(
                BreakEven(tier.name, worker.name, break_even_tokens(worker, token_s, llm.context_tokens))
            )
    return rows


def show_sizes(sizes: TierSizes) -> str:
    """For instance "128 GB of memory and 3,840 GB of disk per GPU"."""
    if sizes.store_bytes:
        return f"a store of {sizes.store_bytes / 1e9:,.0f} GB"
    parts = [
        f"{size / 1e9:,.0f} GB of {name}"
        for name, size in (("memory", sizes.memory_bytes), ("disk", sizes.disk_bytes))
        if size
    ]
    return f"{' and '.join(parts)} per GPU" if parts else "none"
