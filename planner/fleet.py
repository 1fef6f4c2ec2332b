"""The values that describe a fleet: worker type, pool, network, policies, fleet. They are frozen, with units
in the names of fields.
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
from planner.models.kv_layout import BESIDE_NOTHING, KvBeside, kv_layout
from planner.models.kv_offload import KvOffload
from planner.models.latency import StepLatency, StepsOfRanks
from planner.models.llm import Llm
from planner.models.lora import Lora, LoraSlots
from planner.models.speculation import Speculation, SpeculativeSteps

Role = Literal["mixed", "prefill", "decode"]
# Two versions of vLLM, as (major, minor).
# From this version on vLLM first reuses cache blocks that no prompt can find (vllm-project/vllm#43447).
FINDABLE_KEPT_SINCE = (0, 23)
# From this version on vLLM caches the KV of sliding windows and the states of recurrent layers only where a
# prompt ends and where prompts have diverged: the default of --prefix-cache-retention-interval became 0
# (vllm-project/vllm#52216, after 0.26).
ENDS_KEPT_SINCE = (0, 27)
MAX_NUM_SEQS = (
    256  # The default of vLLM's --max-num-seqs, the sequences in one step of an engine. Names leave it out.
)


@dataclass(frozen=True, slots=True)
class WorkerType:
    """An engine we can start: GPU, tensor parallelism, engine settings, and the fits that describe it.

    One worker occupies `tp * pp * dp` GPUs. Its `dp` data-parallel ranks (vLLM's --data-parallel-size) each
    have a scheduler, a queue and a KV cache, make their steps together and share the experts; the other
    fields describe one rank. `kv_tokens` is the size of the KV cache, a multiple of the block. `kv_beside` is
    what a sequence occupies in the cache in addition to its tokens (windows and states), `launched_layers`
    the layers whose launches take long (`engine.py`); both are nothing until `with_llm` names the LLM.
    `form`, if given, replaces `latency` in the simulator by the step times of another program. `engine` adds
    the host's time to each step; None adds nothing. With `speculation` decodes draft tokens and verify them.
    With `ep` every GPU has whole experts, otherwise a slice of each. `lora` are the slots for adapters;
    `kv_tokens` already excludes their bytes.
    """

    gpu: Gpu
    tp: int
    latency: StepLatency
    kv_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    pp: int = 1
    form: StepForm | None = None
    engine: Engine | None = None
    kv_beside: KvBeside = BESIDE_NOTHING
    speculation: Speculation | None = None
    ep: bool = False
    dp: int = 1
    lora: LoraSlots | None = None
    launched_layers: float = 0.0

    def __post_init__(self) -> None:
        if self.dp > 1:
            self._check_ranks()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"{self.name}: max_num_batched_tokens is {self.max_num_batched_tokens}, "
                f"must be at least max_num_seqs ({self.max_num_seqs}), as vLLM demands"
            )

    def with_llm(self, llm: Llm) -> WorkerType:
        """The same worker type with the fields that depend on the LLM: what its windows and states occupy of
        the KV cache, and its layers whose launches take long.
        """
        drafts = 0 if self.speculation is None else self.speculation.tokens
        beside = kv_layout(llm, self.tp, drafts=drafts).beside
        layers = llm.launched_layers * (BLACKWELL_LAUNCH_FRAC if self.gpu.base in BLACKWELL else 1.0)
        return replace(self, kv_beside=beside, launched_layers=layers)

    @property
    def taken_blocks_per_token(self) -> float:
        """How many free KV blocks a computed token takes: its own share of one, and those of sliding windows
        (`KvBeside`).

        Free blocks may still hold cached prompts, which are lost when the blocks are taken. The result is 0,
        not the token's own share, if windows have no influence on what the cache keeps.
        """
        beside = self.kv_beside
        version = self._vllm_version
        own_blocks = 1 / KV_BLOCK_TOKENS
        if beside.window_ratio and version < ENDS_KEPT_SINCE:
            # Every block of a window is kept, as it can be found.
            return own_blocks * (1 + beside.window_ratio)
        if not beside.passing_blocks:
            return 0.0
        return own_blocks + (
            beside.passing_blocks if version < FINDABLE_KEPT_SINCE else beside.findable_blocks
        )

    @property
    def keeps_ends_alone(self) -> bool:
        """Whether the engine caches windows or states only where prompts end or diverge (ENDS_KEPT_SINCE)."""
        return (
            self.kv_beside.is_any or self.kv_beside.passing_blocks > 0
        ) and self._vllm_version >= ENDS_KEPT_SINCE

    @property
    def _vllm_version(self) -> tuple[int, ...]:
        """The first two numbers (major, minor) of the version of vLLM that the engine is, or that is assumed
        where no engine is given.
        """
        return tuple(map(int, re.findall(r"\d+", vllm_version_of(self.engine))[:2]))

    def _check_ranks(self) -> None:
        """Raise InputError if data-parallel ranks have settings for which they are not simulated."""
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
        The most sequences of a step follow if they are not MAX_NUM_SEQS ('h100-80g tp4 2048 seqs64'), then
        the draft tokens of a decode ('... spec2').
        """
        stages = f" pp{self.pp}" if self.pp > 1 else ""
        sequences = "" if self.max_num_seqs == MAX_NUM_SEQS else f" seqs{self.max_num_seqs}"
        drafts = "" if self.speculation is None else f" spec{self.speculation.tokens}"
        experts = " ep" if self.ep else ""
        split = f"tp{self.tp}" + (f" dp{self.dp}" if self.dp > 1 else "")
        return f"{self.gpu.name} {split}{experts}{stages} {self.max_num_batched_tokens}{sequences}{drafts}"

    @property
    def step_tokens(self) -> int:
        """The most tokens that a decode may gain in a step: 1, or 1 plus its drafts."""
        return 1 if self.speculation is None else self.speculation.most_tokens

    @property
    def step_times(self) -> StepForm:
        """The step times that the simulator uses: those of drafts and their checks, of data-parallel ranks,
        of another program, or `latency` itself.
        """
        if self.speculation is not None:
            return SpeculativeSteps(self.latency, self.speculation)
        if self.dp > 1:
            return StepsOfRanks(self.latency, self.dp)
        return self.form or self.latency

    def with_longer_steps(self, longer_frac: float) -> WorkerType:
        """The same worker type with every step longer by this share: the GPUs' time and the host's, and that
        of drafts and adapters.
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
        return tokens + KV_BLOCK_TOKENS * self.kv_beside.sequence_blocks(tokens) <= self.kv_tokens

    @property
    def gpus(self) -> int:
        """How many GPUs one worker occupies."""
        return self.tp * self.pp * self.dp

    @property
    def can_hand_off(self) -> bool:
        """Whether the engine hands KV over to or from such workers: vLLM's NixlConnector knows no pipelines.
        A worker without an engine (`engine: none`) can.
        """
        return self.pp == 1 or self.engine is None or self.engine.name != "vllm"

    @property
    def all2all(self) -> All2All:
        """The kernels by which tokens reach experts on other nodes (vLLM's --all2all-backend); "" where ranks
        are alone or on one node.
        """
        if self.dp == 1:
            return ""
        return all2all_of(self.gpus, int(self.gpu.gpus_per_node), self.max_num_batched_tokens)

    @property
    def as_one(self) -> WorkerType:
        """A worker of one rank with the memory and the sequences of all ranks, whose steps take no longer
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
        """The time that the CPU of the engine (its host) adds to each step, and of that time the part that
        asynchronous scheduling does not hide, called the rest.

        The rest was fitted as what measured steps take beyond the sum of their kernel times. Roofline step
        times exceed this sum by more than the rest, so no rest is added to them.
        """
        if self.engine is None or self.latency.has_host:
            return HostTime(), HostTime()
        is_roofline = self.form is None and self.latency.kind == "roofline"
        return self.engine.host, HostTime() if is_roofline else self.engine.rest

    @property
    def power_w(self) -> float:
        """The power [W] to provision for the GPUs of one worker: the limit of each board, or its cap."""
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
        """Names of its workers in files and results: the pool's name, a dash, and a number from 0 on."""
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
    step, and at least one layer's share remains afterwards); prompts shorter than `layerwise_tokens` are
    always transferred serialised (Splitwise section IV-C). There is one link, which carries one transfer
    after the other, unless `is_shared` is False: then transfers do not slow each other down. The decode
    worker pulls: a transfer begins once it has memory for the request (DistServe section 4.3). With a
    `topology` every node has such a link of its own.
    """

    bandwidth_bytes_per_s: float = 50e9
    latency_s: float = 0.0
    transfer: Literal["serialised", "layerwise"] = "layerwise"
    layerwise_tokens: int = 0
    is_shared: bool = True
    topology: Topology | None = None  # Without a topology there is one link between all workers.


@dataclass(frozen=True, slots=True)
class Policies:
    """Which policies a fleet uses, and their parameters; planner/policies.py describes each name. A parameter
    counts only with the policies named beside it.
    """

    batching: str = "vllm-v1"
    routing: str = "jsq"
    decode_routing: str = "jsq"  # Routes hand-offs to decode workers.

    queue: str = "fcfs"  # The order of the waiting prompts.
    # Ageing: no prompt is overtaken by one that arrives this much later.
    queue_window_s: float = math.inf
    # Prompts overtake each other only within scheduling batches of this size (TetriInfer); 0: everywhere.
    queue_batch: int = 0
    # edf: the seconds from a request's arrival until it is due, by class. A request of no class has those of
    # the most patient class.
    due: tuple[tuple[Selector, float], ...] = ()
    admission: str = "greedy"  # Whether a sequence may join the decodes, by its predicted KV cache.

    # Predicted output lengths are right to a bucket of 200 tokens for this share of the requests; None: the
    # lengths are known.
    prediction_accuracy_frac: float | None = None
    # With this many buckets of prompt lengths, a prediction is the mean output of the trace in the prompt's
    # bucket, and once outlived the mean of the longer ones there. 0: predictions as above.
    prediction_buckets: int = 0
    predictor_slowdown_frac: float = 0.0  # Predicting makes steps of prefill workers this much longer.
    # heavy-light:
    heavy_tokens: int = 128  # A longer output is heavy.
    load_period_s: float = 0.0  # The router reads the workers' loads at most once in this time.

    pools: str = "static"  # Whether workers change their role.
    # flip: a worker that was idle this long changes its role and is away for a restart; only one at a time.
    flip_after_s: float = 60.0
    flip_restart_s: float = 0.0
    # repurpose: a pool that has been short of workers for this time gets one of the other pool. splitwise: a
    # worker that has been mixed for this time belongs to the other pool from then on.
    repurpose_after_s: float = math.inf

    # best-fit, rebalanced or not:
    context_weight: float = 0.5  # An output token weighs as much as this many prompt tokens.
    headroom_frac: float = 1.0  # A worker is filled to this share of its capacity.
    ttft_s: float = math.inf  # No worker is filled beyond these two limits.
    tbt_s: float = math.inf
    heartbeat_s: float = 1.0  # Errors of predictions are counted over this time.

    # Batchings:
    reserve_tokens: int = 0  # faster-transformer, orca: KV set aside for each request; 0, orca alone: none.
    patience_steps: int = 10  # lightllm: after this many steps of decodes, new prompts are tried again.
    # distserve: tokens of context that a batch of decodes holds; 0: as many as the KV cache.
    decode_batch_tokens: int = 0
    watermark_frac: float = 0.01  # Blocks that must stay free when a prompt is admitted (`is_watermarked`).
    # vllm-v1: at most this many tokens of a prompt in a step, unless the request is alone; 0: no such limit.
    long_prefill_token_threshold: int = 0
    # A partly computed prompt that is preempted loses its remainder, as in Vidur.
    vidur_restarts: bool = False

    # Workers that prefill keep the blocks of prompts, for traces that name blocks.
    prefix_cache: bool = False
    eviction_notice_s: float = 0.0  # The router learns of an eviction this much later.
    kv_offload: KvOffload | None = None  # Evicted blocks stay in this memory for a while.

    # Queues and routings by tenant: service is a weighted sum of computed prompt tokens and output tokens.
    tenant_weights: tuple[tuple[str, float], ...] = ()  # A tenant that is not named weighs 1.
    extend_weight: float = 1.0  # The weight of a computed prompt token.
    output_weight: float = 2.0  # The weight of an output token.
    # Service that a tenant gets at a time: with dlpm, and with d2lpm on each worker. 0: twice the cost of the
    # trace's mean request.
    quantum_tokens: int = 0
    worker_quantum_tokens: int = 0
    priority_groups: int = 10  # preble: its groups of prompts, by the cached share of each.

    # e2: it looks back over this time.
    share_window_s: float = 180.0
    # e2: new prompts go to a worker that spent more than this share of the window on decodes; 1: never.
    explore_decode_frac: float = 1.0
    replicate_ratio: float = 2.0  # e2: a prefix whose mean wait grew by this factor in the window is copied.
    # e2: an output token counts as its part of a step of this many decodes. 0: of a full step; Preble has 1.
    decode_batch: int = 0
    # e2, cache-aware: workers whose loads differ by more than this ratio are rebalanced ...
    balance_ratio: float = 1.5
    balance_requests: int = 64  # ... with cache-aware only if they differ by more than this count too.
    cache_threshold_frac: float = 0.3  # cache-aware: it follows a match of more than this share of a prompt.
    # Routings that draw at random:
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Disturbance:
    """An event at `time_s` in a simulation.

    Worker `worker` (its number, counted over all pools) goes "down" or comes "up"; or from `time_s` on its
    steps take `factor` times as long ("slow"), or the transfers of the whole fleet do ("link").
    """

    time_s: float
    kind: Literal["down", "up", "slow", "link"]
    worker: int = 0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The beginning of prompts that some workers hold from the start; workers are numbered over all running
    pools.

    `block_ids` are those of a trace with blocks of `block_tokens`. Pinned blocks are never evicted; a worker
    that was down has lost them.
    """

    block_ids: tuple[int, ...]
    block_tokens: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet that `plan simulate` runs or a plan proposes; `disturbances` happen to it in a simulation."""

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
        """The engine that its workers run, or None if it is not modelled. Drafts force some workers to
        synchronous scheduling; if others schedule asynchronously, the result is the engine of these.
        """
        engines = [pool.type.engine for pool in self.running_pools if pool.type.engine is not None]
        return next((each for each in engines if each.async_scheduling), engines[0] if engines else None)

    def with_counts(self, counts: Iterable[int]) -> Fleet:
        """The same fleet with these numbers of workers, one for each of `pools`."""
        sized = (replace(pool, count=count) for pool, count in zip(self.pools, counts, strict=True))
        return replace(self, pools=tuple(sized))

    def with_types(self, change: Callable[[WorkerType], WorkerType]) -> Fleet:
        """The same fleet with `change` of each pool's worker type, also of pools without workers."""
        return replace(self, pools=tuple(replace(pool, type=change(pool.type)) for pool in self.pools))

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode have workers of their own."""
        return any(pool.role == "prefill" for pool in self.running_pools)

    @property
    def leaves_choice(self) -> bool:
        """Whether a router can choose between workers for arriving requests or for hand-offs."""
        # Arriving requests go to prefill and mixed workers, hand-offs to decode workers.
        decode_workers = sum(pool.count for pool in self.running_pools if pool.role == "decode")
        return max(decode_workers, self.workers - decode_workers) > 1

    def without_engine(self) -> Fleet:
        """The same fleet with step times straight from the fits, without host time."""
        return self.with_types(lambda worker: replace(worker, engine=None))

    def with_engines(self, change: Callable[[Engine], Engine]) -> Fleet:
        """The same fleet with `change` of each worker type's engine; types without one stay as they are."""
        return self.with_types(
            lambda worker: worker if worker.engine is None else replace(worker, engine=change(worker.engine))
        )

    def with_step_spread(self, z_prefill: float, z_decode: float) -> Fleet:
        """The same fleet with step times this many standard deviations above the median of their spread."""
        return self.with_types(lambda worker: slowed_by_spread(worker, z_prefill, z_decode))

    @property
    def lora(self) -> Lora | None:
        """How LoRA adapters are served: as the first pool that serves them says, since all such pools agree.

        None if no pool serves any.
        """
        return next((pool.type.lora.lora for pool in self.pools if pool.type.lora is not None), None)

    @property
    def front_end_s(self) -> float:
        """The time from a request's arrival until the engine that computes its prompt has it [s].

        Where pools differ, the smallest of those that compute prompts.
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
        return sum(pool.count * pool.type.price_usd_per_h for pool in self.pools)

    @property
    def power_w(self) -> float:
        return sum(pool.count * pool.type.power_w for pool in self.pools)


# A search uses the same few worker types in the same few scenarios over and over.
@lru_cache(maxsize=4096)
def slowed_by_spread(worker: WorkerType, z_prefill: float, z_decode: float) -> WorkerType:
    """The same worker type, its step times this many standard deviations above the median of their spread,
    its front end as late as prefills are, and its adapters as slow as decodes.
    """
    if (spread := worker.latency.spread) is None:
        return worker
    return replace(
        worker,
        latency=worker.latency.at_spread(z_prefill, z_decode),
        engine=worker.engine and worker.engine.with_longer_front_end(spread.front_end_factor(z_prefill)),
        lora=worker.lora and worker.lora.with_longer_times(spread.adapters_factor(z_decode) - 1),
    )
