"""Values that describe a fleet: worker type, pool, network, policies, fleet. They are frozen, and the names
of fields end in units.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from planner.domain import KV_BLOCK_TOKENS, Gpu, Selector
from planner.errors import InputError
from planner.models.all2all import HIGH_THROUGHPUT, MOST_LOW_LATENCY_TOKENS, All2All, all2all_of
from planner.models.engine import BLACKWELL, BLACKWELL_LAUNCH_FRAC, Engine, HostTime, vllm_version_of
from planner.models.foreign_forms import StepForm
from planner.models.kv_layout import NO_EXTRA_KV, ExtraKv, kv_layout
from planner.models.kv_offload import KvOffload
from planner.models.latency import StepLatency, StepsOfRanks
from planner.models.llm import Llm
from planner.models.lora import Lora, LoraSlots
from planner.models.speculation import Speculation, SpeculativeSteps

Role = Literal["mixed", "prefill", "decode"]
# Versions of vLLM, as (major, minor).
# Since this one vLLM first reuses cache blocks that no prompt can find (vllm-project/vllm#43447).
FINDABLE_KEPT_SINCE = (0, 23)
# Since this one vLLM caches the KV of sliding windows and the states of recurrent layers only where a prompt
# ends and where prompts have diverged: the default of --prefix-cache-retention-interval became 0
# (vllm-project/vllm#52216, after 0.26).
ENDS_KEPT_SINCE = (0, 27)
# The default of vLLM's --max-num-seqs, the most sequences in a step. Names of worker types leave it out.
MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class WorkerType:
    """An engine that can be started: GPU, tensor parallelism, engine settings, and its fitted step times.

    One worker occupies `tp * pp * dp` GPUs. Its `dp` data-parallel ranks (vLLM's --data-parallel-size) each
    have a scheduler, a queue and a KV cache, make their steps together and share the experts; the other
    fields describe one rank. `extra_kv` and `launched_layers` count nothing before `with_llm`.
    """

    gpu: Gpu
    tp: int
    latency: StepLatency
    kv_tokens: int  # The size of the KV cache, a multiple of the block.
    max_num_batched_tokens: int
    max_num_seqs: int
    pp: int = 1
    form: StepForm | None = None  # Step times of another program, which the simulator takes for `latency`.
    engine: Engine | None = None  # Adds the host's time to each step; None adds nothing.
    extra_kv: ExtraKv = NO_EXTRA_KV  # The cache that a sequence takes beyond its tokens: windows and states.
    speculation: Speculation | None = None  # With it decodes draft tokens and verify them.
    ep: bool = False  # Whether every GPU has whole experts, and not a slice of each.
    dp: int = 1
    lora: LoraSlots | None = None  # The slots for adapters, whose bytes `kv_tokens` already excludes.
    launched_layers: float = 0.0  # The number of layers whose launches take long (models/engine.py).

    def __post_init__(self) -> None:
        if self.dp > 1:
            self._check_ranks()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"{self.name}: max_num_batched_tokens is {self.max_num_batched_tokens}, "
                f"must be at least max_num_seqs ({self.max_num_seqs}), as vLLM demands"
            )

    def with_llm(self, llm: Llm) -> WorkerType:
        """The same worker type with the fields that depend on the LLM, `extra_kv` and `launched_layers`."""
        drafts = 0 if self.speculation is None else self.speculation.tokens
        extra_kv = kv_layout(llm, self.tp, drafts=drafts).extra
        layers = llm.launched_layers * (BLACKWELL_LAUNCH_FRAC if self.gpu.base in BLACKWELL else 1.0)
        return replace(self, extra_kv=extra_kv, launched_layers=layers)

    @property
    def taken_blocks_per_token(self) -> float:
        """How many free KV blocks a computed token takes: a share of a block for itself, and blocks of
        sliding windows (`ExtraKv`). It is 0 if windows have no influence on what stays in the cache.

        Free blocks may still hold cached prompts, which are lost when the blocks are taken.
        """
        extra_kv = self.extra_kv
        version = self._vllm_version
        own_blocks = 1 / KV_BLOCK_TOKENS
        if extra_kv.window_ratio and version < ENDS_KEPT_SINCE:
            # Prompts can find every block of a window, so all of them stay.
            return own_blocks * (1 + extra_kv.window_ratio)
        if not extra_kv.passing_blocks:
            return 0.0
        if version < FINDABLE_KEPT_SINCE:
            return own_blocks + extra_kv.passing_blocks
        return own_blocks + extra_kv.findable_blocks

    @property
    def keeps_ends_alone(self) -> bool:
        """Whether there are windows or states, and the engine caches them only as since ENDS_KEPT_SINCE."""
        has_windows_or_states = self.extra_kv.is_any or self.extra_kv.passing_blocks > 0
        return has_windows_or_states and self._vllm_version >= ENDS_KEPT_SINCE

    @property
    def _vllm_version(self) -> tuple[int, ...]:
        """The (major, minor) version of vLLM: the engine's or, without an engine, the one assumed."""
        return tuple(map(int, re.findall(r"\d+", vllm_version_of(self.engine))[:2]))

    def _check_ranks(self) -> None:
        """Raise InputError for settings with which data-parallel ranks are not simulated."""
        where = f"{self.name}: dp {self.dp}"
        if self.pp > 1:
            raise InputError(f"{where}: is not simulated in pipelines, must be pp 1, found {self.pp}")
        if self.speculation is not None:
            raise InputError(f"{where}: is not simulated with speculative decoding; drop one of the two")
        if self.form is not None or not self.latency.joint_s:
            raise InputError(
                f"{where}: needs step times that say which part is of all ranks' tokens (joint_s beside "
                "f_s); leave latency out for the catalog's"
            )

    @property
    def name(self) -> str:
        """GPU, TP, then DP, EP and PP if they are used, and the token budget of a step: 'h100-80g tp4 2048'.
        If the most sequences of a step are not MAX_NUM_SEQS, they follow ('h100-80g tp4 2048 seqs64'), then
        the draft tokens of a decode ('... spec2').
        """
        stages = f" pp{self.pp}" if self.pp > 1 else ""
        sequences = "" if self.max_num_seqs == MAX_NUM_SEQS else f" seqs{self.max_num_seqs}"
        drafts = "" if self.speculation is None else f" spec{self.speculation.tokens}"
        experts = " ep" if self.ep else ""
        ranks = f" dp{self.dp}" if self.dp > 1 else ""
        split = f"tp{self.tp}{ranks}{experts}{stages}"
        return f"{self.gpu.name} {split} {self.max_num_batched_tokens}{sequences}{drafts}"

    @property
    def step_tokens(self) -> int:
        """The most output tokens of a decode in a step: 1, or with drafts 1 plus their number."""
        return 1 if self.speculation is None else self.speculation.most_tokens

    @property
    def step_times(self) -> StepForm:
        """The step times that the simulator uses: those with drafts, of data-parallel ranks, of another
        program, or `latency` itself.
        """
        if self.speculation is not None:
            return SpeculativeSteps(self.latency, self.speculation)
        if self.dp > 1:
            return StepsOfRanks(self.latency, self.dp)
        return self.form or self.latency

    def with_longer_steps(self, longer_frac: float) -> WorkerType:
        """The same worker type with all times of a step longer by this share: those of the GPUs, the host,
        drafts and adapters.
        """
        return replace(
            self,
            latency=self.latency.with_longer_steps(longer_frac),
            engine=self.engine and self.engine.with_longer_host(longer_frac),
            speculation=self.speculation and self.speculation.with_longer_drafts(longer_frac),
            lora=self.lora and self.lora.with_longer_times(longer_frac),
        )

    def has_room_for(self, tokens: int) -> bool:
        """Whether a request of this many tokens fits the KV cache."""
        return tokens + KV_BLOCK_TOKENS * self.extra_kv.sequence_blocks(tokens) <= self.kv_tokens

    @property
    def gpus(self) -> int:
        """How many GPUs one worker occupies."""
        return self.tp * self.pp * self.dp

    @property
    def can_hand_off(self) -> bool:
        """Whether such workers can send or receive KV. vLLM's NixlConnector cannot with pipelines; a worker
        without an engine (`engine: none`) always can.
        """
        return self.pp == 1 or self.engine is None or self.engine.name != "vllm"

    @property
    def all2all(self) -> All2All:
        """The kernels that send tokens to experts on other nodes (vLLM's --all2all-backend); "" for one rank,
        or if all are on one node.
        """
        if self.dp == 1:
            return ""
        return all2all_of(self.gpus, self.gpu.gpus_per_node, self.max_num_batched_tokens)

    @property
    def as_one(self) -> WorkerType:
        """A worker of one rank with the memory, tokens and sequences of all ranks, whose steps take no longer
        than theirs; lower bounds use it.
        """
        if self.dp == 1:
            return self
        return replace(
            self,
            latency=self.latency.bound_over_ranks(self.dp),
            kv_tokens=self.dp * self.kv_tokens,
            max_num_batched_tokens=self.dp * self.max_num_batched_tokens,
            max_num_seqs=self.dp * self.max_num_seqs,
            dp=1,
        )

    @property
    def price_usd_per_h(self) -> float:
        """Price of its GPUs per hour, including electricity if that is paid separately."""
        return self.gpus * self.gpu.usd_per_h

    @property
    def host(self) -> tuple[HostTime, HostTime]:
        """The time that the engine's CPU (its host) adds to each step, and the part of it that asynchronous
        scheduling does not hide, called the rest.

        The rest was fitted to the excess of measured steps over the sum of their kernel times. Roofline step
        times exceed this sum by more, so no rest is added to them.
        """
        if self.engine is None or self.latency.has_host:
            return HostTime(), HostTime()
        is_roofline = self.form is None and self.latency.kind == "roofline"
        return self.engine.host, HostTime() if is_roofline else self.engine.rest

    @property
    def power_w(self) -> float:
        """The power [W] to provision for the GPUs of one worker, by the limit or the cap of their boards."""
        return self.gpus * self.gpu.power_w


@dataclass(frozen=True, slots=True)
class Pool:
    """`count` identical workers in one role."""

    name: str
    role: Role
    type: WorkerType
    count: int

    def __post_init__(self) -> None:
        if self.role != "prefill" and self.type.all2all == HIGH_THROUGHPUT:
            raise InputError(
                f"{self.name}: {self.type.dp} ranks on several nodes, steps of "
                f"{self.type.max_num_batched_tokens} tokens: vLLM runs {HIGH_THROUGHPUT} without CUDA "
                "graphs, so it is modelled for prefill pools alone; give max_num_batched_tokens: "
                f"{MOST_LOW_LATENCY_TOKENS} (deepep_low_latency), or take ranks that fit a node"
            )

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Names of its workers in files and results: "NAME-0", "NAME-1" and so on, with the pool's name."""
        return tuple(f"{self.name}-{number}" for number in range(self.count))


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes and racks; the link between two workers depends on where they are (simulator/worker_places.py).

    On one node it is NVLink at `within_bytes_per_s`, by default the GPU row's link_bandwidth. Between two
    nodes it is the NIC of the sender, with the bandwidth of `Network`; between two racks of `nodes_per_rack`
    nodes (0: a single rack) it is at most the rack's uplink, `rack_bytes_per_s`.
    """

    within_bytes_per_s: float | None = None
    nodes_per_rack: int = 0
    rack_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Network:
    """The link over which KV blocks move from prefill to decode workers.

    `transfer` is "serialised" (it starts when prefill ends) or "layerwise" (it overlaps the last prefill
    step, and at least one layer's share remains afterwards); for prompts shorter than `layerwise_tokens` it
    is always serialised (Splitwise section IV-C). There is one link, or with a `topology` one per node. It
    carries one transfer after the other, or all at full speed if `is_shared` is False. A transfer begins once
    the decode worker has memory for the request (DistServe section 4.3).
    """

    bandwidth_bytes_per_s: float = 50e9
    latency_s: float = 0.0
    transfer: Literal["serialised", "layerwise"] = "layerwise"
    layerwise_tokens: int = 0
    is_shared: bool = True
    topology: Topology | None = None


@dataclass(frozen=True, slots=True)
class Policies:
    """Which policies a fleet uses, and their parameters; planner/policies.py describes each name. A comment
    that begins with names of policies is of a parameter that they alone use.
    """

    batching: str = "vllm-v1"
    routing: str = "jsq"
    decode_routing: str = "jsq"  # Routes hand-offs to decode workers.

    queue: str = "fcfs"  # The order of the waiting prompts.
    # Ageing: a prompt that arrives this much later than another does not overtake it.
    queue_window_s: float = math.inf
    # Prompts overtake each other only within scheduling batches of this size (TetriInfer); 0: without limit.
    queue_batch: int = 0
    # edf: the seconds from a request's arrival until it is due, by class. The longest hold for requests of no
    # class.
    due: tuple[tuple[Selector, float], ...] = ()
    admission: str = "greedy"  # Whether a sequence may join the decodes, by its predicted KV cache.

    # For this share of the requests, predictions of output lengths are right to a bucket of 200 tokens; None:
    # the lengths are known.
    prediction_accuracy_frac: float | None = None
    # With this many buckets of prompt lengths, a prediction is the mean output of the trace in the prompt's
    # bucket. Once an output is longer, it is the mean of the longer ones there. 0: predictions as above.
    prediction_buckets: int = 0
    predictor_slowdown_frac: float = 0.0  # Predictions make steps of prefill workers longer by this share.
    # heavy-light:
    heavy_tokens: int = 128  # A longer output is heavy.
    load_period_s: float = 0.0  # The router reads the workers' loads once in this time; 0: always.

    pools: str = "static"  # Whether workers change their role.
    # flip: after this idle time a worker changes its role and restarts, which takes `flip_restart_s`; only
    # one worker at a time.
    flip_after_s: float = 60.0
    flip_restart_s: float = 0.0
    # repurpose: after this time of too few workers a pool gets one of the other pool. splitwise: after this
    # time as mixed a worker moves to the other pool for good.
    repurpose_after_s: float = math.inf

    # best-fit, rebalanced or not:
    context_weight: float = 0.5  # An output token weighs as much as this many prompt tokens.
    headroom_frac: float = 1.0  # A worker is filled to this share of its capacity.
    ttft_s: float = math.inf  # No worker is filled beyond these two limits.
    tbt_s: float = math.inf
    heartbeat_s: float = 1.0  # Errors of predictions are counted over this time.

    # Batchings:
    reserve_tokens: int = 0  # faster-transformer, orca: KV tokens reserved per request; 0 (orca alone): none.
    patience_steps: int = 10  # lightllm: after this many decode steps, it tries to admit prompts again.
    # distserve: the most tokens of context in a batch of decodes; 0: as many as the KV cache holds.
    decode_batch_tokens: int = 0
    watermark_frac: float = 0.01  # Blocks that must stay free when a prompt is admitted (`is_watermarked`).
    # vllm-v1: the most tokens of one prompt in a step, unless the request is alone; 0: no limit.
    long_prefill_token_threshold: int = 0
    # If a partly computed prompt is preempted, its missing tokens are decoded, as in Vidur.
    vidur_restarts: bool = False

    # Workers that prefill cache the blocks of prompts, if the trace names blocks.
    prefix_cache: bool = False
    eviction_notice_s: float = 0.0  # The router learns of evictions with this delay.
    kv_offload: KvOffload | None = None  # The memory to which evicted blocks move.

    # Queues and routings by tenant: service is a weighted sum of computed prompt tokens and output tokens.
    tenant_weights: tuple[tuple[str, float], ...] = ()  # A tenant that is not named weighs 1.
    extend_weight: float = 1.0  # The weight of a computed prompt token.
    output_weight: float = 2.0  # The weight of an output token.
    # Service that a tenant gets at a time with dlpm and, on each worker, with d2lpm. 0: twice the cost of the
    # trace's mean request.
    quantum_tokens: int = 0
    worker_quantum_tokens: int = 0
    priority_groups: int = 10  # preble: the number of groups of prompts, by their cached share.

    # e2: the window, over the last requests.
    share_window_s: float = 180.0
    # e2: new prompts go to a worker that spent more than this share of the window on decodes; 1: never.
    explore_decode_frac: float = 1.0
    replicate_ratio: float = 2.0  # e2: a prefix whose mean wait grew by this factor in the window is copied.
    # e2: an output token costs its part of a step of this many decodes. 0: of a full step; Preble has 1.
    decode_batch: int = 0
    # e2, cache-aware: workers are rebalanced if their loads differ by more than this ratio ...
    balance_ratio: float = 1.5
    # cache-aware: ... and, besides, by more than this number of requests.
    balance_requests: int = 64
    # cache-aware: a request goes to the longest match if this is more than this share of its prompt.
    cache_threshold_frac: float = 0.3
    # Routings that draw at random:
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Disturbance:
    """An event at `time_s` in a simulation.

    Worker `worker` (its number, counted over all pools) goes "down" or comes "up", or from then on its steps
    take `factor` times as long ("slow"), or the transfers of the whole fleet do ("link").
    """

    time_s: float
    kind: Literal["down", "up", "slow", "link"]
    worker: int = 0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix of prompts that some workers have in their cache from the start; `workers` are numbers,
    counted over all running pools.

    `block_ids` are those of a trace with blocks of `block_tokens`. Pinned blocks are never evicted; a worker
    that goes down loses them.
    """

    block_ids: tuple[int, ...]
    block_tokens: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet, as a plan proposes it or `plan simulate` runs it, with the `disturbances` of a simulation."""

    llm: Llm
    pools: tuple[Pool, ...]
    policies: Policies = field(default_factory=Policies)
    network: Network = field(default_factory=Network)
    disturbances: tuple[Disturbance, ...] = ()
    pinned: tuple[PinnedPrefix, ...] = ()

    def __post_init__(self) -> None:
        roles = {pool.role for pool in self.pools if pool.count}
        if ("prefill" in roles) != ("decode" in roles):
            missing = "decode" if "prefill" in roles else "prefill"
            raise InputError(f"the fleet has no {missing} worker to pair with the others; add one")
        if not roles:
            raise InputError("the fleet has no workers; add at least one")

    @property
    def running_pools(self) -> tuple[Pool, ...]:
        """The pools that have workers."""
        return tuple(pool for pool in self.pools if pool.count)

    @property
    def workers_by_pool(self) -> tuple[tuple[Pool, range], ...]:
        """The running pools, each with the numbers of its workers, which are counted over all pools."""
        pools = self.running_pools
        ends = itertools.accumulate(pool.count for pool in pools)
        return tuple((pool, range(end - pool.count, end)) for pool, end in zip(pools, ends, strict=True))

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Names of its workers, in the simulator's order."""
        return tuple(name for pool in self.pools for name in pool.worker_names)

    @property
    def engine(self) -> Engine | None:
        """The engine that its workers run, or None if it is not modelled. An engine with asynchronous
        scheduling takes precedence, as drafts may force some workers to synchronous scheduling.
        """
        engines = [pool.type.engine for pool in self.running_pools if pool.type.engine is not None]
        return max(engines, key=lambda engine: engine.async_scheduling, default=None)

    def with_counts(self, counts: Iterable[int]) -> Fleet:
        """The same fleet with these numbers of workers, one number per pool."""
        sized = (replace(pool, count=count) for pool, count in zip(self.pools, counts, strict=True))
        return replace(self, pools=tuple(sized))

    def with_types(self, change: Callable[[WorkerType], WorkerType]) -> Fleet:
        """The same fleet with `change` applied to the worker type of each pool, even without workers."""
        return replace(self, pools=tuple(replace(pool, type=change(pool.type)) for pool in self.pools))

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode have separate workers."""
        return any(pool.role == "prefill" for pool in self.running_pools)

    @property
    def leaves_choice(self) -> bool:
        """Whether a router can choose between workers, for arriving requests or for hand-offs."""
        # Arriving requests go to mixed or prefill workers, hand-offs to decode workers.
        decode_workers = sum(pool.count for pool in self.running_pools if pool.role == "decode")
        return max(decode_workers, self.workers - decode_workers) > 1

    def without_engine(self) -> Fleet:
        """The same fleet without host time: its step times are those of the fits."""
        return self.with_types(lambda worker: replace(worker, engine=None))

    def with_engines(self, change: Callable[[Engine], Engine]) -> Fleet:
        """The same fleet with `change` applied to the engine of each worker type that has one."""
        return self.with_types(
            lambda worker: worker if worker.engine is None else replace(worker, engine=change(worker.engine))
        )

    def with_step_spread(self, prefill_sigmas: float, decode_sigmas: float) -> Fleet:
        """The same fleet with step times this many standard deviations above the median of their spread."""
        return self.with_types(lambda worker: slowed_by_spread(worker, prefill_sigmas, decode_sigmas))

    @property
    def lora(self) -> Lora | None:
        """How LoRA adapters are served, the same in all pools that serve them; None if no pool does."""
        return next((pool.type.lora.lora for pool in self.pools if pool.type.lora is not None), None)

    @property
    def front_end_s(self) -> float:
        """The time from a request's arrival until the engine that computes its prompt has it [s]; the least
        of all such pools.
        """
        engines = [pool.type.engine for pool in self.running_pools if pool.role != "decode"]
        return min((0.0 if engine is None else engine.front_end_s for engine in engines), default=0.0)

    @property
    def workers(self) -> int:
        """How many workers the fleet has, over all pools."""
        return sum(pool.count for pool in self.pools)

    @property
    def gpus(self) -> int:
        """How many GPUs the workers of all pools occupy."""
        return sum(pool.count * pool.type.gpus for pool in self.pools)

    @property
    def price_usd_per_h(self) -> float:
        """The price of the workers' GPUs per hour, without idle GPUs of their nodes."""
        return sum(pool.count * pool.type.price_usd_per_h for pool in self.pools)

    @property
    def power_w(self) -> float:
        """The power [W] to provision for the GPUs of all workers."""
        return sum(pool.count * pool.type.power_w for pool in self.pools)


# Cached, as a search uses the same few worker types in the same few scenarios over and over.
@lru_cache(maxsize=4096)
def slowed_by_spread(worker: WorkerType, prefill_sigmas: float, decode_sigmas: float) -> WorkerType:
    """The same worker type with step times this many standard deviations above the median of their spread.
    Its front end is slowed as prefills are, its adapters as decodes are.
    """
    if (spread := worker.latency.spread) is None:
        return worker
    return replace(
        worker,
        latency=worker.latency.at_spread(prefill_sigmas, decode_sigmas),
        engine=worker.engine and worker.engine.with_longer_front_end(spread.front_end_factor(prefill_sigmas)),
        lora=worker.lora and worker.lora.with_longer_times(spread.adapters_factor(decode_sigmas) - 1),
    )
