"""LoRA adapters on a worker as vLLM serves them: memory of their slots, and time that they add to steps.

A module of the LLM, a matrix of `in` x `out` values on one GPU, has for every slot a pair A (r x in) and B
(out x r) in 16 bits, where r is the largest rank that is allowed. In the formula A and B are the values of
these matrices per unit of rank. Modules that are several matrices in one (qkv_proj, gate_up_proj) have an A
for each of them. TP splits a module's input or its output. The side that is not split keeps its A or B whole
on every GPU, unless vLLM's --fully-sharded-loras is set.

    slot bytes   2 r sum (A + B)                                  of one GPU, over all modules
    step         kernels + K read + min(n k/E, K) experts + n token    with K adapters; 0 without any

n tokens of the step have an adapter. `kernels` is the time of the kernels alone, `read` the time to read an
adapter's matrices outside of experts, `experts` the time to read the matrices of all its experts, of which a
token visits k of E. `token` is the time of 2 FLOPs per value and token at the rate of GEMMs, with each input
read once and each output twice. All of these are rooflines with the efficiencies of catalogs/roofline.yaml,
not measurements.

After vLLM 0.32, vllm/lora/layers and vllm/config/lora.py (github.com/vllm-project/vllm).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from planner.domain import Gpu
from planner.errors import InputError
from planner.models.llm import GroupedAttention, Llm
from planner.models.memory import Memory
from planner.models.roofline_calibration import calibration_of

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # The values that vLLM accepts as --max-lora-rank.
MODULES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "experts", "gate", "embed_tokens", "lm_head")
RARE = ("embed_tokens", "lm_head")  # Few adapters contain these modules, but their slots take memory.
MOST_VOCAB = 258_048  # vLLM puts LoRA on output heads of at most this many words.
VALUE_BYTES = 2.0  # Adapters have 16 bits.
KERNEL_S = 2.5e-6  # Estimated time of a kernel that does next to nothing; A and B of a module take one each.
LINK_BYTES_PER_S = 20e9  # Estimated rate of small copies from the host's memory to a GPU over PCIe 4.
DISK_BYTES_PER_S = 1e9  # Estimated rate at which vLLM reads an adapter's file into the host's memory.


@dataclass(frozen=True, slots=True)
class LoraCost:
    """What adapters take on one GPU of a worker; the module's docstring explains the first six fields.

    `visited_frac` is k/E. An adapter comes from the host's memory into a slot in `load_s`, and from disk into
    the host's memory in `disk_s`.
    """

    slot_bytes: float
    kernels_s: float
    read_s: float
    experts_s: float
    visited_frac: float
    token_s: float
    load_s: float
    disk_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:  # Refuses NaN too.
                raise InputError(f"lora: {field.name} is {getattr(self, field.name)}, must be >= 0")

    @property
    def one_token_s(self) -> float:
        """Seconds that the only token with an adapter adds to a step, if the adapter is in a slot: the
        formula of the module's docstring with n = K = 1.
        """
        return self.kernels_s + self.read_s + min(self.visited_frac, 1.0) * self.experts_s + self.token_s

    def with_longer_times(self, longer_frac: float) -> LoraCost:
        """The same cost with every step and every load longer by this share."""
        times = {
            field.name: getattr(self, field.name) * (1 + longer_frac)
            for field in fields(self)
            if field.name.endswith("_s")
        }
        return replace(self, **times)


@dataclass(frozen=True, slots=True)
class Lora:
    """How LoRA is served: at most `max_loras` adapters in a step, of rank `max_rank` at most.

    `adapters` are the names or the number of all adapters; at most `max_cpu_loras` of them are kept in the
    host's memory. `targets` are the modules that have slots, None for all.
    """

    max_loras: int
    max_rank: int
    adapters: int | tuple[str, ...]
    max_cpu_loras: int
    targets: tuple[str, ...] | None = None
    link_bytes_per_s: float = LINK_BYTES_PER_S
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    longer_frac: float = 0.0  # All times of LoRA are taken longer by this share.

    def __post_init__(self) -> None:
        if self.max_loras < 1:
            raise InputError(f"max_loras is {self.max_loras}, must be at least 1")
        if self.max_rank not in RANKS:
            ranks = ", ".join(map(str, RANKS))
            raise InputError(f"max_rank is {self.max_rank}, must be one of {ranks}, as vLLM demands")
        if self.adapter_count < 1:
            raise InputError("adapters is 0, must be at least 1; drop lora to serve the LLM alone")
        if self.max_cpu_loras < self.max_loras:
            raise InputError(
                f"max_cpu_loras is {self.max_cpu_loras}, must be at least max_loras "
                f"({self.max_loras}), as vLLM demands"
            )
        if unknown := [name for name in self.targets or () if name not in MODULES]:
            raise InputError(f"targets: {unknown[0]!r} is none of {', '.join(MODULES)}")

    @property
    def adapter_count(self) -> int:
        """How many adapters there are in all."""
        return self.adapters if isinstance(self.adapters, int) else len(self.adapters)

    def has_module(self, module: str) -> bool:
        """Whether this module of the LLM has slots for adapters."""
        return self.targets is None or module in self.targets


@dataclass(frozen=True, slots=True)
class LoraSlots:
    """LoRA on one worker type: the settings, and what they cost there."""

    lora: Lora
    cost: LoraCost

    def with_longer_times(self, longer_frac: float) -> LoraSlots:
        """The same slots with every step and every load longer by this share."""
        # (1 + a) (1 + b) - 1 would round the one share if the other is 0.
        longer = self.lora.longer_frac + longer_frac + self.lora.longer_frac * longer_frac
        return LoraSlots(replace(self.lora, longer_frac=longer), self.cost.with_longer_times(longer_frac))

    def without_cost(self) -> LoraSlots:
        """Slots for all adapters at no cost, for a lower bound on step times."""
        zeros = dict.fromkeys((field.name for field in fields(LoraCost)), 0.0)
        lora = replace(self.lora, max_loras=self.lora.adapter_count, max_cpu_loras=self.lora.adapter_count)
        return LoraSlots(lora, LoraCost(**zeros))

    def add_to_memory(self, use: Memory) -> Memory:
        """The memory use of one GPU with the slots added."""
        return replace(use, weight_bytes=use.weight_bytes + self.lora.max_loras * self.cost.slot_bytes)


@dataclass(frozen=True, slots=True)
class _Module:
    """The `count` matrices (or experts) of one name on one GPU.

    `a_values` and `b_values` are those of one matrix per unit of rank: the module's inputs and its outputs.
    `kernel_pairs` is how often all matrices together start a kernel for A and one for B.
    """

    name: str
    count: float
    a_values: float
    b_values: float
    kernel_pairs: float
    visited_frac: float = 1.0  # The share of the matrices that one token visits.


def lora_slots(lora: Lora, llm: Llm, gpu: Gpu, tp: int, *, ep: bool = False) -> LoraSlots:
    """LoRA on a worker of `tp` GPUs. Raises InputError for LLMs whose layers in vLLM are not modelled."""
    _check_llm(lora, llm)
    rank_bytes = VALUE_BYTES * lora.max_rank
    efficiency = calibration_of(llm, gpu).efficiency
    # A power cap slows memory and compute by a factor each.
    bytes_per_s = gpu.bandwidth_bytes_per_s * efficiency.bandwidth_frac / gpu.decode_slowdown
    flops_per_s = gpu.dense_flops_per_s * efficiency.gemm_frac / gpu.prefill_slowdown
    # Values are per unit of rank, like those of `_Module`. `slot_values` are those that a slot has room for,
    # `loaded_values` those that an ordinary adapter fills, `token_values` a token's inputs and outputs.
    slot_values = read_values = expert_values = loaded_values = token_values = 0.0
    kernel_pairs = token_flops = visited_frac = 0.0
    for module in _modules_of(llm, tp, ep):
        if not lora.has_module(module.name):
            continue
        values = module.count * (module.a_values + module.b_values)
        slot_values += values
        kernel_pairs += module.kernel_pairs
        if module.name == "experts":
            expert_values += values
            visited_frac = module.visited_frac
        elif module.name != "embed_tokens":  # A token reads only its own row of the embeddings.
            read_values += values
        if module.name not in RARE:  # An ordinary adapter has these modules.
            loaded_values += values
            token_flops += 2 * lora.max_rank * values * module.visited_frac
            token_values += module.count * (module.a_values + 2 * module.b_values) * module.visited_frac
    file_values = sum(  # A file has the whole matrices, as on one GPU.
        module.count * (module.a_values + module.b_values)
        for module in _modules_of(llm, 1, False)
        if lora.has_module(module.name) and module.name not in RARE
    )
    cost = LoraCost(
        slot_bytes=rank_bytes * slot_values,
        kernels_s=2 * KERNEL_S * kernel_pairs,
        read_s=rank_bytes * read_values / bytes_per_s,
        experts_s=rank_bytes * expert_values / bytes_per_s,
        visited_frac=visited_frac,
        token_s=token_flops / flops_per_s + VALUE_BYTES * token_values / bytes_per_s,
        load_s=rank_bytes * loaded_values / lora.link_bytes_per_s,
        disk_s=rank_bytes * file_values / lora.disk_bytes_per_s,
    )
    return LoraSlots(lora, cost.with_longer_times(lora.longer_frac))


def _check_llm(lora: Lora, llm: Llm) -> None:
    """Raise InputError for an LLM whose adapters are not counted here."""
    for group in llm.layer_groups:
        attention = group.attention
        if attention is not None and (
            not isinstance(attention, GroupedAttention) or attention.index_heads or attention.reuses_kv
        ):
            raise InputError(
                f"lora: {llm.name} has attention of another kind than grouped queries, whose adapters nobody "
                "counts yet; drop lora, or choose another LLM"
            )
        if (block := group.feed_forward) is not None and block.inner:
            raise InputError(
                f"lora: {llm.name} has experts of a width of their own, whose adapters nobody counts yet"
            )
    if lora.has_module("lm_head") and llm.vocab > MOST_VOCAB:
        raise InputError(
            f"lora: {llm.name} has {llm.vocab} words, and vLLM puts LoRA on an output head of at most "
            f"{MOST_VOCAB}; give targets without lm_head"
        )


def _modules_of(llm: Llm, tp: int, ep: bool) -> Iterator[_Module]:
    """All matrices that may have adapters, as one of `tp` GPUs holds them; `ep`: with expert parallelism."""
    hidden = llm.hidden
    for group in llm.layer_groups:
        if isinstance(attention := group.attention, GroupedAttention):
            # A gate of the output is as wide as the queries, and part of their matrix.
            queries = attention.heads / tp * attention.head_dim * (2 if attention.gates_output else 1)
            # With more GPUs than KV heads each GPU has a copy of one.
            keys_values = max(attention.kv_heads / tp, 1) * (attention.head_dim + attention.value_dim)
            output = attention.heads / tp * attention.value_dim
            # Queries, keys and values have an A each, of `hidden` values per unit of rank.
            yield _Module("qkv_proj", group.count, 3 * hidden, queries + keys_values, group.count)
            yield _Module("o_proj", group.count, output, hidden, group.count)
        if (block := group.feed_forward) is None:
            continue
        up_matrices = 2 if block.is_gated else 1  # The gate has the shape of the up matrix.
        # What every token visits: the only block, or the shared experts.
        width_for_all = block.width if block.experts == 1 else block.shared_width
        if width_for_all:
            width = width_for_all / tp
            yield _Module("gate_up_proj", group.count, up_matrices * hidden, up_matrices * width, group.count)
            yield _Module("down_proj", group.count, width, hidden, group.count)
        if block.experts > 1:
            # A GPU has some whole experts with expert parallelism, otherwise a slice of each.
            experts, width = (block.experts / tp, block.width) if ep else (block.experts, block.width / tp)
            a_values = up_matrices * hidden + width  # In the up matrices, and in the down matrix.
            b_values = up_matrices * width + hidden
            visited_frac = block.experts_per_token / block.experts
            # All experts of a layer share their kernels; up and down have their own.
            yield _Module("experts", group.count * experts, a_values, b_values, 2 * group.count, visited_frac)
            yield _Module("gate", group.count, hidden, block.experts, group.count)
    yield _Module("embed_tokens", 1, llm.vocab, hidden, 1)
    yield _Module("lm_head", 1, hidden, llm.vocab, 1)
