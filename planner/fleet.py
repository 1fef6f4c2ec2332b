"""What serves: worker type, pool, network, policies, fleet. Frozen, units in the names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from planner.domain import KV_BLOCK_TOKENS, Gpu
from planner.errors import InputError
from planner.models.all2all import HIGH_THROUGHPUT, MOST_LOW_LATENCY_TOKENS, All2All, all2all_of
from planner.models.engine import Engine, HostTime
from planner.models.forms import StepForm
from planner.models.kv_layout import BESIDE_NOTHING, KvBeside, kv_layout
from planner.models.kv_offload import KvOffload
from planner.models.latency import StepLatency, StepsOfRanks
from planner.models.llm import Llm
from planner.models.lora import Lora, LoraSlots
from planner.models.speculation import Speculation, SpeculativeSteps

Role = Literal["mixed", "prefill", "decode"]
MAX_PP = 16  # pipeline stages of a worker
MAX_NUM_SEQS = 256  # sequences in a step of an engine, unless something else is said


@dataclass(frozen=True, slots=True)
class WorkerType:
    """An engine we can start: GPU, tensor parallelism, engine settings, and the fits that describe it.

    One worker occupies `tp * pp * dp` GPUs. It has `dp` data-parallel ranks, which have a scheduler, a queue
    and a KV cache each, step together and share the experts (vLLM's --data-parallel-size); what the other
    fields say is of one rank. `kv_tokens` is its KV cache, a multiple of the block; `kv_beside` is what a
    sequence takes of it beside its tokens, nothing until `serving` says which LLM. `form` are the step times
    of another program, which the simulator takes instead of `latency`. `engine` adds what its host takes to
    the step times; None: they are taken as they are. With `speculation` its decodes draft tokens and check
    them. With `ep` every GPU has whole experts, else each has a slice of all. `lora` are its slots for
    adapters, whose bytes `kv_tokens` is without.
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

    def __post_init__(self) -> None:
        if self.dp > 1:
            self._check_ranks()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"{self.name}: max_num_batched_tokens is {self.max_num_batched_tokens}, "
                f"must be at least max_num_seqs ({self.max_num_seqs}), as vLLM demands"
            )

    def serving(self, llm: Llm) -> WorkerType:
        """The same engine with this LLM in it, whose windows and states take some of the KV cache."""
        return replace(self, kv_beside=kv_layout(llm, self.tp).beside)

    def _check_ranks(self) -> None:
        """Whether what is simulated of data-parallel ranks is all that this type needs."""
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
        """For instance 'h100-80g tp4 2048': GPU, TP, DP, EP and PP if there is any, token budget per step;
        then the sequences per step where they are not the usual ones: 'h100-80g tp4 2048 seqs64'; then the
        drafts: 'h100-80g tp4 2048 spec2'.
        """
        stages = f" pp{self.pp}" if self.pp > 1 else ""
        seats = "" if self.max_num_seqs == MAX_NUM_SEQS else f" seqs{self.max_num_seqs}"
        drafts = "" if self.speculation is None else f" spec{self.speculation.tokens}"
        experts = " ep" if self.ep else ""
        split = f"tp{self.tp}" + (f" dp{self.dp}" if self.dp > 1 else "")
        return f"{self.gpu.name} {split}{experts}{stages} {self.max_num_batched_tokens}{seats}{drafts}"

    @property
    def step_tokens(self) -> int:
        """Tokens that a decode has in a step, and the most that leave: 1, or 1 and its drafts."""
        return 1 if self.speculation is None else self.speculation.most_tokens

    @property
    def step_times(self) -> StepForm:
        """What the simulator takes for the seconds of a step."""
        if self.speculation is not None:
            return SpeculativeSteps(self.latency, self.speculation)
        if self.dp > 1:
            return StepsOfRanks(self.latency, self.dp)
        return self.form or self.latency

    def longer(self, share: float) -> WorkerType:
        """The same, its steps longer by this share, with adapters or without."""
        return replace(self, latency=self.latency.longer(share), lora=self.lora and self.lora.longer(share))

    def holds(self, tokens: int) -> bool:
        """Whether a request of so many tokens has room."""
        return tokens + KV_BLOCK_TOKENS * self.kv_beside.blocks(tokens) <= self.kv_tokens

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def all2all(self) -> All2All:
        """The kernels by which tokens reach experts on other nodes (vLLM's --all2all-backend); "" where
        ranks are alone or on one node.
        """
        if self.dp == 1:
            return ""
        return all2all_of(self.gpus, int(self.gpu.gpus_per_node), self.max_num_batched_tokens)

    @property
    def as_one(self) -> WorkerType:
        """For bounds: one rank with the room and the seats of all, whose steps take no longer than theirs."""
        if self.dp == 1:
            return self
        return replace(
            self,
            latency=self.latency.of_all(self.dp),
            kv_tokens=self.dp * self.kv_tokens,
            max_num_batched_tokens=self.dp * self.max_num_batched_tokens,
            max_num_seqs=self.dp * self.max_num_seqs,
            dp=1,
        )

    @property
    def price_usd_per_h(self) -> float:
        """Of its GPUs, with their electricity where that is paid beside them."""
        return self.gpus * self.gpu.usd_per_h

    @property
    def host(self) -> tuple[HostTime, HostTime]:
        """What the engine's host adds to a step, and what of it no asynchronous step hides.

        The latter was fitted beside sums of kernels. Rooflines are longer than these by more, so they go
        without.
        """
        if self.engine is None or self.latency.has_host:
            return HostTime(), HostTime()
        is_roofline = self.form is None and self.latency.kind == "roofline"
        return self.engine.host, HostTime() if is_roofline else self.engine.rest

    @property
    def power_w(self) -> float:
        """Provisioned for the GPUs of one worker: the board's limit, or its cap."""
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
        """Names of its workers in files and results: pool, dash, number."""
        return tuple(f"{self.name}-{number}" for number in range(self.count))


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes and racks: the link of a pair is where its workers lie (planner/simulator/places.py).

    On one node it is NVLink, `within_bytes_per_s`, or, if that is None, the GPU row's link_bandwidth. Between
    two it is the NIC of the node that sends, with the bandwidth of `Network`; between two racks of
    `nodes_per_rack` (0: there is one) at most the uplink of a rack, `rack_bytes_per_s`.
    """

    within_bytes_per_s: float | None = None
    nodes_per_rack: int = 0
    rack_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Network:
    """The link over which KV blocks move from prefill to decode workers.

    `transfer` is "serialised" (starts when prefill ends) or "layerwise" (overlaps the last prefill step; at
    least one layer's share remains after it), which prompts shorter than `layerwise_tokens` are not worth
    (Splitwise section IV-C). The link is one, and carries one transfer after the other, unless it is not
    `is_shared`: then transfers do not slow each other down. The decode worker pulls: a transfer begins once
    it has room (DistServe section 4.3). With a `topology` every node has such a link of its own.
    """

    bandwidth_bytes_per_s: float = 50e9
    latency_s: float = 0.0
    transfer: Literal["serialised", "layerwise"] = "layerwise"
    layerwise_tokens: int = 0
    is_shared: bool = True
    topology: Topology | None = None  # None: one link between all workers


@dataclass(frozen=True, slots=True)
class Policies:
    """Who decides what in a fleet; every name is a choice of planner/simulator/replay.py.

    `queue` orders the prompts that wait: no prompt is overtaken by one that arrives more than
    `queue_window_s` later (ageing), and with `queue_batch` > 0 only prompts of one scheduling batch of so
    many overtake each other (TetriInfer). `admission` lets a sequence join the decodes by the KV cache it is
    predicted to need. heavy-light takes outputs of more than `heavy_tokens` for heavy; it hears of loads
    when it needs them, but not more often than once in `load_period_s`. Predictions of output lengths are
    right for `prediction_accuracy_frac` of the requests, to a bucket of 200 tokens; None: lengths are
    known. With `prediction_buckets` > 0 they are means of the trace's outputs, by so many buckets of
    prompts, and once outlived means of the longer ones. To predict makes the steps of prefill workers
    longer by `predictor_slowdown_frac`. `pools`
    "flip" lets a worker that was idle for `flip_after_s` change its role, for which it is away for
    `flip_restart_s`; meanwhile no other one does. With `pools` "splitwise" a machine that has been mixed for
    `repurpose_after_s` belongs to the other pool from then on.

    For best-fit, rebalanced or not: outputs weigh `context_weight` of a prompt token, `headroom_frac` of what
    a worker can hold is used, and no worker is packed beyond `ttft_s` and `tbt_s`; errors of predictions are
    counted over `heartbeat_s`. `reserve_tokens` of KV are set aside per request by faster-transformer, and by
    orca unless it is 0. A batch of distserve's decodes
    holds `decode_batch_tokens` of context, or, if that is 0, what the KV cache does. `patience_steps` is
    lightllm's. With `vidur_restarts` a prompt preempted in part loses the rest of it, as in Vidur. vLLM
    computes at most `long_prefill_token_threshold` tokens of a prompt in a step, unless the request is alone;
    0: as many as fit.

    With `prefix_cache` workers that prefill keep the blocks of prompts, of traces that name them. The router
    hears of an eviction `eviction_notice_s` later. Tenants weigh 1 unless `tenant_weights` says otherwise;
    their service is `extend_weight` per token computed of a prompt and `output_weight` per token of output.
    dlpm gives a tenant `quantum_tokens` of service at a time, d2lpm `worker_quantum_tokens` on every worker;
    0: twice what a request of the trace costs on average. preble has `priority_groups`. e2 looks back
    `share_window_s` and sends new prompts to a worker that spent more than `explore_decode_frac` of that on
    decodes (1: never); it replicates a prefix whose mean wait grew `replicate_ratio`-fold in the window. An
    output token counts as its part of a step of `decode_batch` decodes (0: of every seat; Preble: 1). e2
    and cache-aware balance workers that are more than `balance_ratio` apart, the latter only beyond
    `balance_requests`, and it follows a match of more than `cache_threshold_frac`. With `kv_offload` what
    leaves the caches stays in CPU memory for a while.
    """

    batching: str = "vllm-v1"
    routing: str = "jsq"
    decode_routing: str = "jsq"
    queue: str = "fcfs"
    queue_window_s: float = math.inf
    queue_batch: int = 0
    admission: str = "greedy"
    prediction_accuracy_frac: float | None = None
    predictor_slowdown_frac: float = 0.0
    heavy_tokens: int = 128
    load_period_s: float = 0.0
    prediction_buckets: int = 0
    pools: str = "static"
    flip_after_s: float = 60.0
    flip_restart_s: float = 0.0
    repurpose_after_s: float = math.inf
    context_weight: float = 0.5
    headroom_frac: float = 1.0
    ttft_s: float = math.inf
    tbt_s: float = math.inf
    heartbeat_s: float = 1.0
    reserve_tokens: int = 0
    patience_steps: int = 10
    decode_batch_tokens: int = 0
    watermark_frac: float = 0.01
    long_prefill_token_threshold: int = 0
    vidur_restarts: bool = False
    prefix_cache: bool = False
    eviction_notice_s: float = 0.0
    tenant_weights: tuple[tuple[str, float], ...] = ()
    extend_weight: float = 1.0
    output_weight: float = 2.0
    quantum_tokens: int = 0
    worker_quantum_tokens: int = 0
    priority_groups: int = 10
    share_window_s: float = 180.0
    explore_decode_frac: float = 1.0
    balance_ratio: float = 1.5
    replicate_ratio: float = 2.0
    decode_batch: int = 0
    balance_requests: int = 64
    cache_threshold_frac: float = 0.3
    kv_offload: KvOffload | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Something that happens to a fleet at `time_s`: worker `worker` (counted over all pools) goes "down" or
    comes "up", its steps take `factor` times as long from now on ("slow"), or transfers do ("link").
    """

    time_s: float
    kind: Literal["down", "up", "slow", "link"]
    worker: int = 0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The beginning of prompts that some workers, counted over all running pools, hold from the start on.

    `block_ids` are those of a trace with blocks of `block_tokens`. What is pinned is never evicted; a worker
    that was down has lost it.
    """

    block_ids: tuple[int, ...]
    block_tokens: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """What `plan simulate` runs and what a plan proposes; `disturbances` are what a simulation does to it."""

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
    def running(self) -> tuple[Pool, ...]:
        """The pools that have workers."""
        return tuple(pool for pool in self.pools if pool.count)

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Names of its workers, in the simulator's order."""
        return tuple(name for pool in self.pools for name in pool.worker_names)

    @property
    def engine(self) -> Engine | None:
        """What its workers run, as far as that is modelled; where some schedule synchronously because of
        what they draft, as the others do.
        """
        engines = [pool.type.engine for pool in self.running if pool.type.engine is not None]
        return next((each for each in engines if each.async_scheduling), engines[0] if engines else None)

    def with_types(self, change: Callable[[WorkerType], WorkerType]) -> Fleet:
        """The same fleet with other worker types."""
        return replace(self, pools=tuple(replace(pool, type=change(pool.type)) for pool in self.pools))

    @property
    def is_disaggregated(self) -> bool:
        """Whether some of its workers prefill alone, and hand over to others."""
        return any(pool.role == "prefill" for pool in self.running)

    @property
    def leaves_choice(self) -> bool:
        """Whether a router has two workers or more to choose from, so that routers may differ."""
        back = sum(pool.count for pool in self.running if pool.role == "decode")
        return max(back, self.workers - back) > 1

    def without_engine(self) -> Fleet:
        """The same fleet, its steps as long as the fits say."""
        return self.with_types(lambda worker: replace(worker, engine=None))

    def with_engines(self, change: Callable[[Engine], Engine]) -> Fleet:
        """The same fleet with other engines, where it has some."""
        return self.with_types(
            lambda worker: worker if worker.engine is None else replace(worker, engine=change(worker.engine))
        )

    def within(self, z_prefill: float, z_decode: float) -> Fleet:
        """The same fleet, step times so many standard deviations of their spread above the medians."""
        return self.with_types(lambda worker: slowed_by_spread(worker, z_prefill, z_decode))

    @property
    def lora(self) -> Lora | None:
        """How adapters are served, which is the same everywhere in the fleet."""
        return next((pool.type.lora.lora for pool in self.pools if pool.type.lora is not None), None)

    @property
    def front_end_s(self) -> float:
        """Until a request that arrives has reached the engine that computes its prompt."""
        engines = [pool.type.engine for pool in self.running if pool.role != "decode"]
        return min((0.0 if engine is None else engine.front_end_s for engine in engines), default=0.0)

    @property
    def workers(self) -> int:
        return sum(pool.count for pool in self.pools)

    @property
    def gpus(self) -> int:
        return sum(pool.count * pool.type.gpus for pool in self.pools)

    @property
    def price_usd_per_h(self) -> float:
        return sum(pool.count * pool.type.price_usd_per_h for pool in self.pools)

    @property
    def power_w(self) -> float:
        return sum(pool.count * pool.type.power_w for pool in self.pools)


@lru_cache(maxsize=4096)  # a search asks about the same few types in the same few futures
def slowed_by_spread(worker: WorkerType, z_prefill: float, z_decode: float) -> WorkerType:
    """The same worker, its step times so many standard deviations of their spread above the medians."""
    return replace(worker, latency=worker.latency.within(z_prefill, z_decode))
