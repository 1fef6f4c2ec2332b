"""The nouns every stage shares: GPU, LLM, SLO, worker type, pool, fleet. Frozen, units in the names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from planner.errors import CatalogError, InputError
from planner.models.forms import StepForm
from planner.models.latency import StepLatency
from planner.units import percentile_name

Role = Literal["mixed", "prefill", "decode"]
Metric = Literal["ttft", "tbt", "tpot", "e2e"]
KV_BLOCK_TOKENS = 16
MAX_PP = 16  # pipeline stages of a worker
MAX_NUM_SEQS = 256  # sequences in a step of an engine, unless something else is said
SPOT = "@spot"  # ends the name of a GPU that is rented on the spot market


@dataclass(frozen=True, slots=True)
class Gpu:
    """An accelerator we can rent: one row of catalogs/gpus.yaml.

    `dense_flops_per_s` is 16-bit dense; `link_bytes_per_s` is what one GPU sends to its neighbours in the
    node, one direction. A power-capped variant is a row of its own ("h100-80g@350W"): `power_w` is the cap,
    `board_w` what the board may draw without it, and the slowdowns (>= 1) multiply the compute-bound and the
    memory-bound part of a step.
    """

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    dense_flops_per_s: float
    link: str
    link_bytes_per_s: float
    power_w: float
    gpus_per_node: int
    price_usd_per_h: float
    node_selector: str
    base: str  # the uncapped row this one derives from; its own name if it is uncapped
    prefill_slowdown: float = 1.0
    decode_slowdown: float = 1.0
    uncapped_w: float | None = None  # power_w of the base, for a capped row

    def __post_init__(self) -> None:
        for quantity in (
            "memory_bytes",
            "bandwidth_bytes_per_s",
            "dense_flops_per_s",
            "link_bytes_per_s",
            "power_w",
            "gpus_per_node",
        ):
            if not getattr(self, quantity) > 0:
                raise CatalogError(f"GPU {self.name}: {quantity} is {getattr(self, quantity)}, must be > 0")
        if not self.price_usd_per_h >= 0:
            raise CatalogError(f"GPU {self.name}: price_usd_per_h is {self.price_usd_per_h}, must be >= 0")
        if min(self.prefill_slowdown, self.decode_slowdown) < 1:
            raise CatalogError(f"GPU {self.name}: a slowdown is below 1")

    @property
    def board_w(self) -> float:
        """What the vendor lets it draw, capped here or not (TDP)."""
        return self.power_w if self.uncapped_w is None else self.uncapped_w


@dataclass(frozen=True, slots=True)
class Llm:
    """The shape of an LLM: one row of catalogs/llms.yaml, or a Hugging Face config.json.

    `ffn` is the width of one expert in a mixture of experts, of the only one in a dense LLM;
    `context_tokens` is the longest prompt + output it accepts. `dtype_bytes` is of the layers' weights.
    `kv_dtype_bytes` is of keys and values, which engines keep in 16 bits whatever the weights are, unless
    they are told otherwise (vLLM's --kv-cache-dtype auto).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_tokens: int
    dtype_bytes: float = 2.0
    gated_ffn: bool = True  # three matrices (SwiGLU) or two
    tied_embeddings: bool = False
    experts: int = 1
    experts_per_token: int = 1
    kv_dtype_bytes: float = 2.0

    def __post_init__(self) -> None:
        for count in (
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "ffn",
            "vocab",
            "context_tokens",
            "experts",
            "experts_per_token",
            "dtype_bytes",
            "kv_dtype_bytes",
        ):
            if not getattr(self, count) > 0:
                raise CatalogError(f"LLM {self.name}: {count} is {getattr(self, count)}, must be > 0")
        if self.heads % self.kv_heads:
            raise CatalogError(f"LLM {self.name}: {self.heads} heads do not share {self.kv_heads} KV heads")

    @property
    def attention_parameters(self) -> float:
        """Of one layer: the q, k, v and output projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_parameters(self) -> float:
        """Of one expert (or the only feed-forward block) of one layer."""
        return (3 if self.gated_ffn else 2) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> float:
        """All weights of one layer."""
        return self.attention_parameters + self.experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> float:
        """The embeddings and the output head."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> float:
        """All weights, embeddings included."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    @property
    def head_dtype_bytes(self) -> float:
        """Of embeddings and output head: who quantises, quantises the layers alone."""
        return max(self.dtype_bytes, 2.0)

    @property
    def weight_bytes(self) -> float:
        layers_bytes = self.layers * self.layer_parameters * self.dtype_bytes
        return layers_bytes + self.embedding_parameters * self.head_dtype_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers, over all GPUs of a worker whose TP <= kv_heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_dtype_bytes


@dataclass(frozen=True, slots=True)
class Limit:
    """One line of an SLO: this percentile of this metric stays at or below `limit_s`."""

    metric: Metric
    percentile_frac: float
    limit_s: float

    @property
    def name(self) -> str:
        """For instance 'ttft p90'."""
        return f"{self.metric} {percentile_name(self.percentile_frac)}"


@dataclass(frozen=True, slots=True)
class Slo:
    """What is promised. Every limit must hold; `attainment_frac` of requests keep all of them at once."""

    limits: tuple[Limit, ...]
    attainment_frac: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerType:
    """An engine we can start: GPU, tensor parallelism, engine settings, and the fits that describe it.

    One worker occupies `tp * pp` GPUs of one node. `kv_tokens` is the KV cache of the whole worker, a
    multiple of the block. `form` are the step times of another program, which the simulator takes instead of
    `latency`.
    """

    gpu: Gpu
    tp: int
    latency: StepLatency
    kv_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    pp: int = 1
    form: StepForm | None = None

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"{self.name}: max_num_batched_tokens is {self.max_num_batched_tokens}, "
                f"must be at least max_num_seqs ({self.max_num_seqs}), as vLLM demands"
            )

    @property
    def name(self) -> str:
        """For instance 'h100-80g tp4 2048': GPU, TP, PP if there is any, token budget per step; then the
        sequences per step where they are not the usual ones: 'h100-80g tp4 2048 seqs64'.
        """
        stages = f" pp{self.pp}" if self.pp > 1 else ""
        seats = "" if self.max_num_seqs == MAX_NUM_SEQS else f" seqs{self.max_num_seqs}"
        return f"{self.gpu.name} tp{self.tp}{stages} {self.max_num_batched_tokens}{seats}"

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def price_usd_per_h(self) -> float:
        return self.gpus * self.gpu.price_usd_per_h

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


@dataclass(frozen=True, slots=True)
class Network:
    """The link over which KV blocks move from prefill to decode workers.

    `transfer` is "serialised" (starts when prefill ends) or "layerwise" (overlaps the last prefill step; at
    least one layer's share remains after it), which prompts shorter than `layerwise_tokens` are not worth
    (Splitwise section IV-C). The link is one, and carries one transfer after the other, unless it is not
    `is_shared`: then transfers do not slow each other down. The decode worker pulls: a transfer begins once
    it has room (DistServe section 4.3).
    """

    bandwidth_bytes_per_s: float = 50e9
    latency_s: float = 0.0
    transfer: Literal["serialised", "layerwise"] = "layerwise"
    layerwise_tokens: int = 0
    is_shared: bool = True


@dataclass(frozen=True, slots=True)
class Policies:
    """Who decides what in a fleet; every name is a choice of planner/simulator/replay.py.

    `queue` orders the prompts that wait: no prompt is overtaken by one that arrives more than
    `queue_window_s` later (ageing), and with `queue_batch` > 0 only prompts of one scheduling batch of so
    many overtake each other (TetriInfer). `admission` lets a sequence join the decodes by the KV cache it is
    predicted to need. Predictions of output lengths are right for `prediction_accuracy_frac` of the requests,
    to a bucket of 200 tokens; None: lengths are known. `pools` "flip" lets a worker that was idle for
    `flip_after_s` change its role.

    For best-fit: outputs weigh `context_weight` of a prompt token, `headroom_frac` of what a worker can hold
    is used, and no worker is packed beyond `ttft_s` and `tbt_s`. `reserve_tokens` of KV are set aside per
    request by faster-transformer, and by orca unless it is 0. A batch of distserve's decodes holds
    `decode_batch_tokens` of context, or, if that is 0, what the KV cache does. `patience_steps` is
    lightllm's. With `vidur_restarts` a prompt preempted in part loses the rest of it, as in Vidur.

    With `prefix_cache` workers that prefill keep the blocks of prompts, of traces that name them. The router
    hears of an eviction `eviction_notice_s` later. Tenants weigh 1 unless `tenant_weights` says otherwise;
    their service is `extend_weight` per token computed of a prompt and `output_weight` per token of output.
    dlpm gives a tenant `quantum_tokens` of service at a time, d2lpm `worker_quantum_tokens` on every worker;
    0: twice what a request of the trace costs on average. preble has `priority_groups`. e2 looks back
    `share_window_s` and sends new prompts to a worker that spent more than `explore_decode_frac` of that on
    decodes (1: never); it replicates a prefix whose mean wait grew `replicate_ratio`-fold in the window. e2
    and cache-aware balance workers that are more than `balance_ratio` apart, the latter only beyond
    `balance_requests`, and it follows a match of more than `cache_threshold_frac`.
    """

    batching: str = "vllm-v1"
    routing: str = "jsq"
    decode_routing: str = "jsq"
    queue: str = "fcfs"
    queue_window_s: float = math.inf
    queue_batch: int = 0
    admission: str = "greedy"
    prediction_accuracy_frac: float | None = None
    pools: str = "static"
    flip_after_s: float = 60.0
    context_weight: float = 0.5
    headroom_frac: float = 1.0
    ttft_s: float = math.inf
    tbt_s: float = math.inf
    reserve_tokens: int = 0
    patience_steps: int = 10
    decode_batch_tokens: int = 0
    watermark_frac: float = 0.01
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
    balance_requests: int = 64
    cache_threshold_frac: float = 0.3
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
class Fleet:
    """What `plan simulate` runs and what a plan proposes; `disturbances` are what a simulation does to it."""

    llm: Llm
    pools: tuple[Pool, ...]
    policies: Policies = field(default_factory=Policies)
    network: Network = field(default_factory=Network)
    disturbances: tuple[Disturbance, ...] = ()

    def __post_init__(self) -> None:
        roles = {pool.role for pool in self.pools if pool.count}
        if ("prefill" in roles) != ("decode" in roles):
            missing = "decode" if "prefill" in roles else "prefill"
            raise InputError(f"the fleet has no {missing} worker to pair with the others; add one")
        if not roles:
            raise InputError("the fleet has no workers; add at least one")

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
