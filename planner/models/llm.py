"""The structure of an LLM: groups of layers that are alike. A layer has an attention and a feed-forward
block, each with weights in a number format.

    parameters     numbers in the matrices of a block; norms, biases and routers are left out
    KV values      what every token leaves in a layer's cache: keys and values, or one latent vector
    state          what a sequence keeps in a layer, however long it is

Sources: the configs and modelling code of Hugging Face's transformers and of vLLM (docs/models.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from planner.errors import CatalogError

# Bytes of one weight by number format, with its part of the scale that small groups of weights share.
WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp8": 1.0,  # A scale per tensor or channel.
    "fp8-block": 1.0,  # A scale per 128 x 128.
    "mxfp8": 8.25 / 8,  # Groups of 32: 8 bits of scale.
    "int8": 1.0,
    "int8-g128": 8.125 / 8,  # Groups of 128: 16 bits of scale; the weights alone have 8 bits (GPTQ).
    "int4": 4.15625 / 8,  # Groups of 128: 16 bits of scale, 4 of zero (AWQ, GPTQ).
    "int4-g32": 4.5 / 8,  # Groups of 32: 16 bits of scale (compressed-tensors).
    "int4-g32z": 4.625 / 8,  # Groups of 32: 16 bits of scale, 4 of zero (AWQ, GPTQ).
    "mxfp4": 4.25 / 8,  # Groups of 32: 8 bits of scale.
    "nvfp4": 4.5 / 8,  # Groups of 16: 8 bits of scale.
}
WEIGHTS = tuple(WEIGHT_BYTES)
FP8_BLOCK = 128  # The side length of a block of fp8-block.
# vLLM keeps a value of a recurrent state in this many bytes; the states of convolutions have 16 bits.
STATE_BYTES = 4.0


def cuts_blocks(weights: str, width: int, tp: int) -> bool:
    """Whether a slice of this width on each of `tp` GPUs would hold a part of an fp8 block."""
    return weights == "fp8-block" and width % (tp * FP8_BLOCK) != 0


# Llama 4's layers attend within chunks of this length. A window so long is hardly ever full, so step times
# count it as full attention (roofline.py, older_kernels.py).
LONG_WINDOW_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Query heads that share key and value heads.

    With a window a layer attends to the last `window_tokens` alone. `gates_output`: a gate as wide as the
    queries (Qwen3-Next). `values_are_keys`: keys and values have one projection; the cache holds both.
    `reuses_kv`: the keys and values are an earlier layer's (Gemma 3n). `index_*`: another small attention,
    the index, chooses the tokens to attend to; its keys are cached in 16 bits (MiniMax-M3). `bf16_parameters`
    counts weights that have 16 bits whatever `weights` says.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window_tokens: int | None = None
    gates_output: bool = False
    values_are_keys: bool = False
    reuses_kv: bool = False
    index_heads: int = 0
    index_dim: int = 0
    index_tokens: int = 0
    weights: str = "bf16"
    bf16_parameters: float = 0.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise CatalogError(f"{self.heads} heads do not share {self.kv_heads} KV heads")

    def parameters(self, hidden: int) -> float:
        """The parameters of one layer's attention; its input has `hidden` numbers per token."""
        # A gate doubles the queries' projection. The index has `index_heads` queries and one key.
        queries = self.heads * self.head_dim * (2 if self.gates_output else 1)
        keys = 0 if self.reuses_kv else self.kv_heads * self.head_dim
        values = 0 if self.reuses_kv or self.values_are_keys else self.kv_heads * self.value_dim
        index = self.index_dim * (self.index_heads + 1) if self.index_heads else 0
        return float(hidden * (queries + keys + values + self.heads * self.value_dim + index))

    @property
    def kv_values(self) -> int:
        """Numbers that a token leaves in a layer's cache: its keys and values."""
        return 0 if self.reuses_kv else self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def index_bytes(self) -> float:
        """Bytes of a token's key in the index."""
        return 2.0 * self.index_dim if self.index_heads else 0.0

    @property
    def kv_shares(self) -> int:
        """The most GPUs of a TP group over which the cache is split. With more GPUs some hold copies of KV
        heads.
        """
        return self.kv_heads

    @property
    def flops_per_pair(self) -> float:
        """FLOPs of a query with one key and value, over all heads."""
        return 2.0 * self.heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Keys and values as one compressed vector per token (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    With `q_rank` 0 queries are not compressed. `index_*`: another small attention, the index, chooses the
    tokens to attend to (DeepSeek-V3.2); its keys are cached in 8 bits with a scale. A layer with
    `index_tokens` and no index attends to the tokens that an earlier layer chose (GLM-5.2). `gates_output`: a
    gate as wide as the output (Kimi-K3). `bf16_parameters` counts weights that have 16 bits whatever
    `weights` says. With a window a layer attends to the last `window_tokens` alone.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int = 0
    index_dim: int = 0
    index_tokens: int = 0
    window_tokens: int | None = None
    gates_output: bool = False
    weights: str = "bf16"
    bf16_parameters: float = 0.0

    def parameters(self, hidden: int) -> float:
        """The parameters of one layer, whose input has `hidden` numbers per token."""
        query_width = self.heads * (self.nope_dim + self.rope_dim)
        queries = hidden * self.q_rank + self.q_rank * query_width if self.q_rank else hidden * query_width
        latent = hidden * (self.kv_rank + self.rope_dim)
        expanded = self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        output = self.heads * self.value_dim * hidden * (2 if self.gates_output else 1)
        return float(queries + latent + expanded + output + self._index_parameters(hidden))

    def whole_parameters(self, hidden: int) -> float:
        """Parameters that every GPU of a TP group has whole: matrices to latent vectors, and the index."""
        to_latent = hidden * (self.q_rank + self.kv_rank + self.rope_dim)
        return float(to_latent + self._index_parameters(hidden))

    def _index_parameters(self, hidden: int) -> int:
        if not self.index_heads:
            return 0
        queries = self.index_heads * self.index_dim * (self.q_rank or hidden)
        # Queries, then the index's keys and a weight per head.
        return queries + hidden * (self.index_dim + self.index_heads)

    @property
    def kv_values(self) -> int:
        """Numbers that a token leaves in a layer's cache: one latent vector and its rotated part."""
        return self.kv_rank + self.rope_dim

    @property
    def index_bytes(self) -> float:
        """Bytes of a token's key in the index: 8 bits per value and a scale of 32 bits per 128 values."""
        return self.index_dim * (1 + 4 / 128) if self.index_heads else 0.0

    @property
    def kv_shares(self) -> int:
        """One, because every GPU of a TP group keeps the whole vector."""
        return 1

    @property
    def flops_per_pair(self) -> float:
        """FLOPs of a query with a key, over all heads.

        With an index these are the index's FLOPs alone, because only the index looks at every key; each GPU
        of a TP group computes them all. The heads' FLOPs are then `chosen_flops`.
        """
        if self.index_tokens:
            return 2.0 * self.index_heads * self.index_dim
        return 2.0 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)

    def chosen_flops(self, heads: float) -> float:
        """FLOPs of a token's attention with `heads` to the chosen vectors: scores, then sums of `kv_rank`."""
        return 2.0 * heads * (2 * self.kv_rank + self.rope_dim) * self.index_tokens


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """One vector that is key and value for all heads (DeepSeek-V4).

    There is one vector for each of the last `window_tokens` tokens, and before the window one for every
    `ratio` tokens together; with `ratio` 0 only the window has vectors. With an index the vectors to attend
    to are chosen among those before the window. `output_rank` and `output_groups`: the output is projected in
    two steps, the first by groups of heads. vLLM keeps the vectors in 8 bits, and rotated dimensions in 16.
    """

    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    output_rank: int
    output_groups: int
    ratio: int
    window_tokens: int
    index_heads: int = 0
    index_dim: int = 0
    index_tokens: int = 0
    weights: str = "bf16"
    bf16_parameters: float = 0.0

    def parameters(self, hidden: int) -> float:
        """The parameters of one layer, whose input has `hidden` numbers per token."""
        queries = (hidden + self.heads * self.head_dim) * self.q_rank
        output = self.output_rank * (self.heads * self.head_dim + self.output_groups * hidden)
        return float(queries + hidden * self.head_dim + output + self._choosing_parameters(hidden))

    def whole_parameters(self, hidden: int) -> float:
        """Parameters that each GPU of a TP group has whole: projections to latents, compressors, index."""
        return float(hidden * (self.q_rank + self.head_dim) + self._choosing_parameters(hidden))

    def _choosing_parameters(self, hidden: int) -> int:
        """Parameters of the compressors, which make a value and a score of each token, and of the index."""
        compressors = 2 * hidden * self.overlap_factor * (self.head_dim + self.index_dim) if self.ratio else 0
        return compressors + self.index_heads * (self.index_dim * self.q_rank + hidden)

    @property
    def overlap_factor(self) -> int:
        """2 with an index, as each vector then also covers the tokens of the one before it; otherwise 1."""
        return 2 if self.index_heads else 1

    @property
    def vector_bytes(self) -> float:
        """Bytes of a vector: 8 bits per value, 16 per rotated value, a scale of 8 bits per 64 values, and one
        byte of padding, so 584 for 512 values of which 64 are rotated.
        """
        plain = self.head_dim - self.rope_dim
        return plain + 2 * self.rope_dim + math.ceil(plain / 64) + 1

    @property
    def index_bytes(self) -> float:
        """Bytes of a key in the index: 8 bits per value and a scale of 32 bits per 128 values."""
        return self.index_dim * (1 + 4 / 128) if self.index_heads else 0.0

    @property
    def token_bytes(self) -> float:
        """Bytes that a token leaves in the cache for good."""
        return (self.vector_bytes + self.index_bytes) / self.ratio if self.ratio else 0.0

    @property
    def waiting_bytes(self) -> float:
        """Bytes of a token that is not compressed yet: key and score in 32 bits, twice if vectors overlap."""
        return self.overlap_factor * 2 * (self.head_dim + self.index_dim) * 4.0

    @property
    def kv_shares(self) -> int:
        """One, because every GPU of a TP group keeps the whole cache."""
        return 1

    @property
    def flops_per_pair(self) -> float:
        """FLOPs of a query with one token, as if all vectors were attended to."""
        return 4.0 * self.heads * self.head_dim / self.ratio if self.ratio else 0.0


@dataclass(frozen=True, slots=True)
class StateAttention:
    """Linear attention and state-space layers: their state does not grow with the sequence.

    `projected` is the width of all input projections together, `output` that of the output projection.
    `conv_width` channels pass a convolution over `conv_tokens`, and `state_values` are carried from token to
    token. `heads` is the number that TP must divide: the heads of the keys, which are the fewest.
    """

    projected: int
    output: int
    conv_width: int
    conv_tokens: int
    state_values: int
    heads: int
    state_value_bytes: float = STATE_BYTES
    weights: str = "bf16"
    bf16_parameters: float = 0.0

    def parameters(self, hidden: int) -> float:
        """The parameters of one layer: its projections and its convolution."""
        return float(hidden * (self.projected + self.output) + self.conv_width * self.conv_tokens)

    @property
    def state_bytes(self) -> float:
        """Bytes of one sequence's state in one layer, over all GPUs of a worker."""
        return self.state_values * self.state_value_bytes + self.conv_width * (self.conv_tokens - 1) * 2.0


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One feed-forward block, or `experts` blocks, of which each token visits `experts_per_token`.

    `shared_width` is the width of all shared experts together, which every token visits. `inner` is the width
    of the routed experts' inputs if it differs from the LLM's hidden width (Nemotron's latent experts).
    """

    width: int
    is_gated: bool = True
    experts: int = 1
    experts_per_token: int = 1
    shared_width: int = 0
    inner: int | None = None
    weights: str = "bf16"
    shared_weights: str = "bf16"

    @property
    def matrices(self) -> int:
        """How many matrices a block has: up and down, and the gate if there is one."""
        return 3 if self.is_gated else 2

    def expert_parameters(self, hidden: int) -> float:
        """The parameters of one expert, or of the only block."""
        return float(self.matrices * (self.inner or hidden) * self.width)

    def shared_parameters(self, hidden: int) -> float:
        """Parameters that every token is multiplied with: shared experts and the projections of `inner`."""
        return float(
            self.matrices * hidden * self.shared_width + (2 * hidden * self.inner if self.inner else 0)
        )


Attention = GroupedAttention | LatentAttention | CompressedAttention | StateAttention


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`count` layers that are alike; `attention` or `feed_forward` is None for layers without it."""

    count: int
    attention: Attention | None
    feed_forward: FeedForward | None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise CatalogError(f"a group of {self.count} layers; expected one or more")


# The kinds of weights that step times tell apart: `dense` are feed-forward blocks that every token visits.
Part = Literal["attention", "experts", "dense"]


@dataclass(frozen=True, slots=True)
class Llm:
    """The shape of an LLM: one row of catalogs/llms.yaml, or a Hugging Face config.json.

    `groups` are its layers. Without groups all layers are alike: grouped-query attention and a feed-forward
    block of the sizes in the other fields. With groups these fields have the largest size in any group:
    `heads` (which TP must divide), `kv_heads`, `head_dim`, `ffn` (the width of an expert, or of the only
    block), `experts`.

    `context_tokens` is the longest prompt + output that the LLM accepts. `weights` is the format of most
    weights. Without groups `dtype_bytes` are the bytes of one weight, and embeddings and output head have 16
    bits; with groups `head_weights` is the format of the output head. A key or value has `kv_dtype_bytes`:
    engines keep them in 16 bits, whatever the weights have, unless configured otherwise (vLLM's
    --kv-cache-dtype auto). `encoder_parameters` turn images or sound into tokens, in 16 bits and whole on
    every GPU. `draft_parameters` belong to layers for speculative decoding in the checkpoint, which engines
    load only with speculative decoding.
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
    gated_ffn: bool = True  # A gated feed-forward block (SwiGLU) has three matrices, a plain one two.
    tied_embeddings: bool = False
    experts: int = 1
    experts_per_token: int = 1
    kv_dtype_bytes: float = 2.0
    weights: str = "bf16"
    groups: tuple[LayerGroup, ...] = ()
    encoder_parameters: float = 0.0
    draft_parameters: float = 0.0
    head_weights: str = "bf16"

    def __post_init__(self) -> None:
        for key, weights in (("weights", self.weights), ("head_weights", self.head_weights)):
            if weights not in WEIGHTS:
                raise CatalogError(
                    f"LLM {self.name}: {key}: expected one of {', '.join(WEIGHTS)}, found {weights!r}"
                )
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
        if not self.groups and self.heads % self.kv_heads:
            raise CatalogError(f"LLM {self.name}: {self.heads} heads do not share {self.kv_heads} KV heads")
        if self.groups and sum(group.count for group in self.groups) != self.layers:
            counts = [group.count for group in self.groups]
            raise CatalogError(f"LLM {self.name}: groups of {counts} layers, must add up to {self.layers}")

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The groups; without groups all layers as one group."""
        if self.groups:
            return self.groups
        attention = GroupedAttention(
            self.heads, self.kv_heads, self.head_dim, self.head_dim, weights=self.weights
        )
        block = FeedForward(
            self.ffn, self.gated_ffn, self.experts, self.experts_per_token, weights=self.weights
        )
        return (LayerGroup(self.layers, attention, block),)

    @property
    def launched_layers(self) -> int:
        """How many layers have latent attention or states: many kernels, which some engines launch singly."""
        kinds = (LatentAttention, StateAttention)
        return sum(group.count for group in self.layer_groups if isinstance(group.attention, kinds))

    def bytes_per_weight(self, weights: str) -> float:
        """Bytes of a weight in this format. Without groups `dtype_bytes` holds for all layers."""
        return WEIGHT_BYTES[weights] if self.groups else self.dtype_bytes

    def parts(self) -> Iterator[tuple[Part, str, float, float]]:
        """The parts of all layers: kind, number format, parameters, how many of these one token visits."""
        for group in self.layer_groups:
            if group.attention is not None:
                in_16_bits = group.count * group.attention.bf16_parameters
                other_parameters = group.count * group.attention.parameters(self.hidden) - in_16_bits
                yield "attention", group.attention.weights, other_parameters, other_parameters
                if in_16_bits:
                    yield "attention", "bf16", in_16_bits, in_16_bits
            if (block := group.feed_forward) is None:
                continue
            per_expert = group.count * block.expert_parameters(self.hidden)
            kind: Part = "dense" if block.experts == 1 else "experts"
            yield kind, block.weights, block.experts * per_expert, block.experts_per_token * per_expert
            if shared := group.count * block.shared_parameters(self.hidden):
                yield "dense", block.shared_weights, shared, shared

    @property
    def layers_parameters(self) -> float:
        """Parameters of all layers, without embeddings, output head and encoders."""
        return sum(parameters for _, _, parameters, _ in self.parts())

    @property
    def active_parameters(self) -> float:
        """How many weights of the layers one token is multiplied with; the output head is left out."""
        return sum(active for _, _, _, active in self.parts())

    @property
    def embedding_parameters(self) -> float:
        """Parameters of the embeddings and the output head, which may be one matrix."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> float:
        """All parameters that are served: layers, embeddings, output head and encoders."""
        return self.layers_parameters + self.embedding_parameters + self.encoder_parameters

    @property
    def head_dtype_bytes(self) -> float:
        """Bytes of a weight of the output head, and of the embeddings where both are one matrix.

        Most quantised LLMs quantise the layers alone.
        """
        return WEIGHT_BYTES[self.head_weights] if self.groups else self.embedding_dtype_bytes

    @property
    def embedding_dtype_bytes(self) -> float:
        """Bytes of a weight of the embeddings: 16 bits, or as many as the layers if these are wider."""
        return 2.0 if self.groups else max(self.dtype_bytes, 2.0)

    @property
    def layers_bytes(self) -> float:
        """Bytes of the weights of all layers, each part in its own format."""
        return sum(parameters * self.bytes_per_weight(weights) for _, weights, parameters, _ in self.parts())

    @property
    def encoder_bytes(self) -> float:
        """Bytes of the encoders for images or sound, in 16 bits."""
        return 2.0 * self.encoder_parameters

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights that an engine loads: layers, embeddings, output head, encoders."""
        embeddings_bytes = 0.0 if self.tied_embeddings else self.embedding_dtype_bytes
        head_bytes = self.vocab * self.hidden * (self.head_dtype_bytes + embeddings_bytes)
        return self.layers_bytes + head_bytes + self.encoder_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that a token leaves in the caches of all layers, if no layer had a window.

        They are those of all GPUs of a worker whose TP does not exceed the KV heads.
        """
        return sum(group.count * self.kv_layer_bytes(group.attention) for group in self.layer_groups)

    def kv_layer_bytes(self, attention: Attention | None) -> float:
        """Bytes that a token leaves in the cache of one layer with this attention."""
        match attention:
            case None | StateAttention():
                return 0.0
            case CompressedAttention():
                return attention.token_bytes
            case _:
                return attention.kv_values * self.kv_dtype_bytes + attention.index_bytes

    @property
    def state_bytes(self) -> float:
        """Bytes that a sequence keeps whatever its length, over all GPUs of a worker."""
        return sum(
            group.count * group.attention.state_bytes
            for group in self.layer_groups
            if isinstance(group.attention, StateAttention)
        )

    def splits_over(self, tp: int) -> bool:
        """Whether the heads of every layer divide evenly by `tp`. KV heads fewer than `tp` are copied."""
        for group in self.layer_groups:
            match group.attention:
                case GroupedAttention(heads=heads, kv_heads=kv_heads):
                    if heads % tp or (kv_heads % tp and tp % kv_heads):
                        return False
                case CompressedAttention(heads=heads, output_groups=output_groups):
                    if heads % tp or output_groups % tp:
                        return False
                case LatentAttention(heads=heads) | StateAttention(heads=heads):
                    if heads % tp:
                        return False
        return True

    def slices_cut_blocks(self, tp: int) -> bool:
        """Whether an expert's slice on each of `tp` GPUs cuts an fp8 block, which vLLM refuses."""
        return any(
            block.experts > 1 and cuts_blocks(block.weights, block.width, tp)
            for group in self.layer_groups
            if (block := group.feed_forward) is not None
        )

    @property
    def has_heads_alone(self) -> bool:
        """Whether the layers keep nothing of a sequence but keys and values of heads."""
        return all(isinstance(group.attention, GroupedAttention | None) for group in self.layer_groups)

    @property
    def is_mixture(self) -> bool:
        """Whether some layers have routed experts."""
        return self.experts > 1
