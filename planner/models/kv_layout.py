"""How vLLM puts the caches of unlike layers into one pool of blocks, and how many blocks a sequence takes.

Layers of a kind (the same keys and values, the same window) form groups of equally many layers; a block of
the pool holds one group's layers (vLLM 0.32, `_get_kv_cache_groups_uniform_page_size`):

    g = layers of a group = layers of the rarest kind; or of the commonest, if it has < 1.5 times as many
    groups of a kind      = ceil(layers / g), the last one padded
    bytes of a block      = g * the largest page of a layer

A sequence of L tokens takes, per group: ceil(L / block) blocks if the layers attend to all tokens; at most
the blocks of the window and one more if they have a window; one block if they carry a state, and one more for
each drafted token (`MambaManager`, num_speculative_blocks). Blocks are made longer until a state fits into
one, in steps of 16 tokens, or of 128 beside latent attention.

Our KV block holds 16 tokens of all layers that attend to all tokens. What other layers keep is counted in
such blocks:

    blocks(L) = ceil(L / 16) + constant + ceil(window_ratio * min(ceil(L / 16), window_blocks))

For LLMs whose layers are all alike, or all latent with an index on some, constant = window_ratio = 0.
When a sequence gets its seat, the simulator gives it the mean number of blocks that its windows take from
the prompt to the last token (`growing_blocks`). So what many sequences hold together is right, and none waits
for blocks that its windows need later.

Compressed attention (DeepSeek-V4) has pages of 256 tokens of all layers. Windows, and tokens that wait for
compression, fill pages of their own, of the same bytes: 64 tokens to a page of a window, 4 or 8 of those that
wait. So a token of a prefill takes a hundred times as many bytes during its step as it takes for good
(vllm-project/vllm#54703 has the groups of V4-Flash: pages of 1,002,240 bytes, and 2 + 1 + 1 groups for
windows and tokens that wait).

A prefix is found only while the pages of the window at its end exist. A sequence gives them back to the pool
when its window has moved on. vLLM before 0.23 reused pages in the order in which they were given back; since
then it first reuses those in which no prefix can be found (vllm-project/vllm#43447). So a prefix is lost when
the worker has computed enough tokens to fill the memory that running requests do not use with their pages
(planner/simulator/caches.py). Until 0.26 the same holds for windows beside layers that attend to all tokens
(gpt-oss, Gemma): a token takes window_ratio / 16 blocks for them.

Since 0.27 vLLM keeps windows and states only where a prompt ends and where two prompts began to differ
(--prefix-cache-retention-interval 0, vllm-project/vllm#52216). The plan still counts as before: a shared
beginning is found by its second request, where vLLM finds it from the third on; and windows of compressed
attention keep blocks at the end of each page. A plan with prefix caches for such an LLM says so.

The "GPU KV cache size" in vLLM's log is derived: the number of requests of `max_model_len` tokens that fit,
each with a whole step's tokens in its windows, times that length (benchmarks/kv_capacity.py).
"""

import math
from collections import Counter
from dataclasses import dataclass

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import CatalogError
from planner.models.llm import CompressedAttention, GroupedAttention, LatentAttention, Llm, StateAttention

# vLLM's: a group has the layers of the commonest kind if they are fewer than this many times those of the
# rarest, as little is padded then.
LARGE_GROUP_RATIO = 1.5
LATENT_PAGE_TOKENS = 128  # Beside states the pages of latent attention are a multiple of this many tokens.
# Tokens in a page of compressed attention: of compressed tokens, of those of a window, and, by the ratio of
# compression, of those that wait to be compressed.
COMPRESSED_PAGE_TOKENS = 256
WINDOW_PAGE_TOKENS = 64
WAITING_PAGE_TOKENS = {4: 4, 128: 8}


@dataclass(frozen=True, slots=True)
class ExtraKv:
    """KV blocks that a sequence takes beside those of its tokens.

    Compressed attention gives blocks of windows and of waiting tokens back soon. Each computed token takes
    `passing_blocks` of them for a while; `findable_blocks` of these are at the end of a page, where a prefix
    can be found again. A page of the pool has `state_page_blocks`, 0 for an LLM without states.
    """

    constant_blocks: int = 0
    window_ratio: float = 0.0
    window_blocks: int = 0
    passing_blocks: float = 0.0
    findable_blocks: float = 0.0
    state_page_blocks: float = 0.0

    @property
    def is_any(self) -> bool:
        """Whether a sequence takes any blocks beside those of its tokens."""
        return self.constant_blocks > 0 or self.window_ratio > 0

    def sequence_blocks(self, tokens: int) -> int:
        """The KV blocks of a sequence with this many tokens, beside its ceil(tokens / 16)."""
        return self.growing_blocks(tokens, tokens)

    def growing_blocks(self, first_tokens: int, last_tokens: int) -> int:
        """The mean of `sequence_blocks` while a sequence grows from `first_tokens` to `last_tokens`."""
        first, last = (-(-tokens // KV_BLOCK_TOKENS) for tokens in (first_tokens, last_tokens))
        mean_blocks = float(self.window_blocks)  # If the window is full from the beginning.
        if first < self.window_blocks:
            # The window has as many blocks as the sequence (first, first + 1, ...) until it is full, and then
            # stays full. The mean is over all these numbers.
            grown_to = min(last, self.window_blocks)
            growing_sum = (first + grown_to) * (grown_to - first + 1) / 2
            full_sum = (last - grown_to) * self.window_blocks
            mean_blocks = (growing_sum + full_sum) / (last - first + 1)
        return self.constant_blocks + math.ceil(self.window_ratio * mean_blocks)


NO_EXTRA_KV = ExtraKv()


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Bytes of a KV block on one GPU, and the `extra` blocks of a sequence beside those of its tokens.

    With compressed attention each token of a step takes `step_blocks_per_token` more until the step ends.
    """

    block_bytes: float
    extra: ExtraKv = NO_EXTRA_KV
    step_blocks_per_token: float = 0.0


def kv_layout(llm: Llm, tp: int, *, drafts: int = 0) -> KvLayout:
    """The layout of all layers on one GPU of a TP group, if a step drafts `drafts` tokens of a sequence."""
    if any(isinstance(group.attention, CompressedAttention) for group in llm.layer_groups):
        return _compressed_layout(llm)
    # The number of layers of each kind. Layers that keep no keys and values of their own are in neither.
    states: Counter[StateAttention] = Counter()
    caches: Counter[GroupedAttention | LatentAttention] = Counter()
    for group in llm.layer_groups:
        if isinstance(group.attention, StateAttention):
            states[group.attention] += group.count
        elif isinstance(group.attention, GroupedAttention | LatentAttention) and llm.kv_layer_bytes(
            group.attention
        ):
            caches[_cache_kind(group.attention)] += group.count
    if not caches:
        raise CatalogError(f"LLM {llm.name}: no layer keeps keys and values; such LLMs are not modelled")
    # A cache splits over at most `kv_shares` GPUs; further GPUs of the group keep copies.
    token_bytes = {kind: llm.kv_layer_bytes(kind) / min(kind.kv_shares, tp) for kind in caches}
    # None stands for layers without a window.
    all_windows = {kind.window_tokens for kind in caches}
    window_tokens = max(filter(None, all_windows), default=None)
    # Windows of several lengths, or windows in all layers, are not modelled. To be safe, every layer then
    # counts as one without a window.
    if len(all_windows - {None}) > 1 or None not in all_windows:
        window_tokens = None
    if window_tokens is None and not states:  # All layers are alike: there is nothing to group.
        return KvLayout(KV_BLOCK_TOKENS * sum(count * token_bytes[kind] for kind, count in caches.items()))

    largest_token_bytes = max(token_bytes.values())
    page_tokens = KV_BLOCK_TOKENS
    if states:
        # A convolution keeps the drafted tokens too.
        state_bytes = max((kind.state_bytes + 2.0 * kind.conv_width * drafts) / tp for kind in states)
        if any(isinstance(kind, LatentAttention) for kind in caches):
            page_tokens = LATENT_PAGE_TOKENS
        # Pages are made longer until a state fits into one.
        page_tokens *= math.ceil(state_bytes / (largest_token_bytes * page_tokens))
    # The layers by what they keep (a state, a window, or all tokens), and the tokens in a page of each.
    layers = Counter[str]()
    tokens_in: dict[str, float] = {}
    layers["state"] = states.total()
    for kind, count in caches.items():
        name = "window" if window_tokens is not None and kind.window_tokens else "full"
        layers[name] += count
        # A page has room for more tokens of a kind whose tokens are smaller.
        tokens_in_page = page_tokens * largest_token_bytes / token_bytes[kind]
        tokens_in[name] = min(tokens_in.get(name, math.inf), tokens_in_page)
    counts = [count for count in layers.values() if count]
    least, most = min(counts), max(counts)
    group_layers = most if most < LARGE_GROUP_RATIO * least else least  # g of the module's docstring.
    groups = {name: math.ceil(count / group_layers) for name, count in layers.items()}

    # One page of every "full" group holds this many tokens, which are this many of our KV blocks.
    page_blocks = tokens_in["full"] / KV_BLOCK_TOKENS
    page_bytes = groups["full"] * group_layers * page_tokens * largest_token_bytes
    ratio, window_blocks = 0.0, 0
    if window_tokens is not None:
        # Bytes of a token in all groups with windows, relative to those in all "full" groups.
        ratio = groups["window"] / groups["full"] * tokens_in["full"] / tokens_in["window"]
        # The window may begin within a block, so one block more counts.
        window_blocks = math.ceil((window_tokens - 1) / KV_BLOCK_TOKENS) + 1
    extra = ExtraKv(
        # A sequence takes whole pages: page_blocks - 1 blocks of the last one may be empty.
        constant_blocks=math.ceil(
            page_blocks * groups["state"] * (1 + drafts) / groups["full"] + page_blocks - 1
        ),
        window_ratio=ratio,
        window_blocks=window_blocks,
        state_page_blocks=page_blocks / groups["full"] if states else 0.0,
    )
    return KvLayout(page_bytes / page_blocks, extra)


def _compressed_layout(llm: Llm) -> KvLayout:
    """The layout with compressed attention, where every GPU keeps the whole cache: one vector serves all
    heads.

    A sequence keeps the pages of its window and of its tokens that are not compressed yet, and one more of
    each kind.
    """
    block_bytes = KV_BLOCK_TOKENS * llm.kv_bytes_per_token
    if not block_bytes:
        raise CatalogError(f"LLM {llm.name}: no layer keeps keys and values; such LLMs are not modelled")
    page_bytes = block_bytes * COMPRESSED_PAGE_TOKENS / KV_BLOCK_TOKENS
    # Bytes of a page of windows, or of waiting tokens, in all such layers: by (its tokens, tokens to keep).
    kinds: Counter[tuple[int, int]] = Counter()
    for group in llm.layer_groups:
        if isinstance(attention := group.attention, CompressedAttention):
            window = (WINDOW_PAGE_TOKENS, attention.window_tokens)
            kinds[window] += round(group.count * WINDOW_PAGE_TOKENS * attention.vector_bytes)
            if attention.ratio:
                page_tokens = WAITING_PAGE_TOKENS[attention.ratio]
                waiting = (page_tokens, attention.overlap_factor * attention.ratio)
                kinds[waiting] += round(group.count * page_tokens * attention.waiting_bytes)
    constant_pages, pages_per_token, findable_pages = 0, 0.0, 0
    for (page_tokens, kept_tokens), kind_bytes in kinds.items():
        groups = math.ceil(kind_bytes / page_bytes)  # Groups are padded to pages.
        constant_pages += groups * (math.ceil((kept_tokens - 1) / page_tokens) + 1)
        pages_per_token += groups / page_tokens
        findable_pages += groups * math.ceil(kept_tokens / page_tokens)
    page_blocks = COMPRESSED_PAGE_TOKENS // KV_BLOCK_TOKENS
    passing_blocks = pages_per_token * page_blocks
    extra = ExtraKv(
        constant_blocks=constant_pages * page_blocks,
        passing_blocks=passing_blocks,
        findable_blocks=findable_pages * page_blocks / COMPRESSED_PAGE_TOKENS,
    )
    return KvLayout(block_bytes, extra, passing_blocks)


def _cache_kind(attention: GroupedAttention | LatentAttention) -> GroupedAttention | LatentAttention:
    """The attention reduced to what its cache depends on, so that equal caches compare equal."""
    if isinstance(attention, LatentAttention):
        return attention
    return GroupedAttention(
        attention.kv_heads,
        attention.kv_heads,
        attention.head_dim,
        attention.value_dim,
        attention.window_tokens,
        index_heads=attention.index_heads,
        index_dim=attention.index_dim,
    )
