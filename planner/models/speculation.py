"""Step times and memory with speculative decoding: a drafter guesses tokens, and the LLM checks them all in
its next step.

    k                       tokens drafted per sequence and step
    a_i                     the chance that the i-th of them is accepted if all before it are
    P_i = a_1 a_2 ... a_i   the chance that at least i of them are accepted
    1 + P_1 + ... + P_k     the mean tokens that a step yields, which papers call accepted length

The letters of step times are those of planner/models/latency.py: a step has D decodes with K tokens of KV,
and P prompts of n tokens together after C cached ones, with A_p pairs of a query and a key. With R = D + P
sequences it takes

    verify   f(n + (1 + k) D) + a (A_p + k K + D k (k + 1) / 2) + b (1 + k) D + d (K + k D + C) + e P + h
    draft    q [ f(n + (1 + k) D) + a A_p + b D + d (K + k D + C) + e P ]        over all tokens of the step
             + (k - 1) q [ f(R) + b R + d (K + k D) ] + k s                      then a token at a time

The KV of a sequence is read once for its 1 + k queries. Each query after the first adds pairs, which take as
long as those of a prompt. One pass of the drafter takes the share q of a step of the LLM, and s seconds more.
If step times have a term m K, both lines have m (K + k D) in its place. q is estimated as the bytes of
weights that the drafter reads, divided by those that the LLM reads; 0 for drafters without weights (n-grams).

Acceptance follows Leviathan, Kalman, Matias 2023 (arXiv:2211.17192, equation 1 where all a_i are alike).
Steps follow vLLM: every sequence is checked at full width, whatever was accepted before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from planner.errors import InputError
from planner.models.foreign_forms import SPECULATIVE, Compiled
from planner.models.latency import StepLatency
from planner.models.llm import WEIGHT_BYTES, CompressedAttention, Llm
from planner.models.memory import Memory, active_weight_bytes

MOST_DRAFTS = 16  # The most drafted tokens per step. Published curves of acceptance end at half as many.

# When vLLM 0.32 measures its memory, it samples this many rows per sequence: one for a draft token, and one
# for the next token (planner/search/problem/options.py counts their memory).
SAMPLED_ROWS = 2
WEIGHTLESS = ("ngram", "suffix")  # Methods that look tokens up and have no weights.
OWN_LAYERS = ("mtp",)  # Methods whose drafter comes with the LLM's checkpoint.
WITH_WEIGHTS = (*OWN_LAYERS, "eagle", "eagle3", "draft_model")
METHODS = (*WITH_WEIGHTS, *WEIGHTLESS)
# Formats to which a published LLM is quantised by others.
QUANTISED_LATER = ("int4", "int4-g32", "int4-g32z", "nvfp4")


@dataclass(frozen=True, slots=True)
class Speculation:
    """A drafter and how many of its tokens are accepted. `acceptance` are the a_i, one per drafted token.

    `draft_frac` is q, `draft_s` is s. `model` names a drafter with a checkpoint of its own. `basis` says
    where the acceptance comes from: it is a property of the traffic, and no engine can guarantee it.
    """

    method: str
    acceptance: tuple[float, ...]
    draft_frac: float = 0.0
    draft_s: float = 0.0
    model: str | None = None
    basis: str = "acceptance as given"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"method: must be one of {', '.join(METHODS)}, found {self.method!r}")
        if not 1 <= self.tokens <= MOST_DRAFTS:
            raise InputError(f"tokens: 1 to {MOST_DRAFTS} can be drafted in a step, found {self.tokens}")
        if not all(0 <= share <= 1 for share in self.acceptance):
            raise InputError(f"acceptance: must be numbers from 0 to 1, found {list(self.acceptance)}")
        if not 0 <= self.draft_frac < np.inf or not 0 <= self.draft_s < np.inf:
            raise InputError(
                f"draft: a pass takes {self.draft_frac:g} of a step and {self.draft_s:g} s; both must be >= 0"
            )

    @property
    def tokens(self) -> int:
        """The number of drafted tokens, k."""
        return len(self.acceptance)

    @property
    def most_tokens(self) -> int:
        """The most tokens that a step can yield per sequence, 1 + k; a step checks as many."""
        return 1 + self.tokens

    @property
    def accepted_fracs(self) -> tuple[float, ...]:
        """P_1 .. P_k: for each drafted token the chance that it and all before it are accepted."""
        return tuple(np.cumprod(self.acceptance).tolist())

    @property
    def mean_tokens(self) -> float:
        """The mean tokens that a step yields per sequence: the accepted length, with the LLM's own token."""
        return 1.0 + sum(self.accepted_fracs)

    @property
    def has_weights(self) -> bool:
        """Whether the drafter is an LLM, or layers of one, that takes memory and passes."""
        return self.method in WITH_WEIGHTS

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the drafter reads hidden states of the LLM (`use_eagle` of vLLM's SpeculativeConfig). vLLM
        then computes the last KV block that it finds in a prefix cache again.
        """
        return self.method in ("mtp", "eagle", "eagle3")

    @property
    def drafter_key(self) -> tuple[str, str | None] | None:
        """The method and model of a drafter with KV; None for others. The drafter's KV is handed over with
        that of the LLM, so the prefill and the decode worker need the same drafter.
        """
        return (self.method, self.model) if self.has_weights else None

    def with_longer_drafts(self, longer_frac: float) -> Self:
        """The same drafter with s longer by this share; the share q of a step stays one."""
        return replace(self, draft_s=self.draft_s * (1 + longer_frac))

    @property
    def lookahead_tokens(self) -> int:
        """The KV slots that vLLM keeps per sequence beyond those of the checked tokens.

        They are for drafters with weights, which write KV of the tokens that they draft.
        """
        return self.tokens if self.has_weights else 0


@dataclass(frozen=True, slots=True)
class SpeculativeSteps:
    """Step times of an LLM with speculation: the formulas of the module's docstring."""

    latency: StepLatency
    speculation: Speculation

    def step_s(
        self,
        prompt_tokens: float,
        pairs: float,
        decodes: float,
        kv_tokens: float,
        prefills: float,
        cached: float = 0.0,
    ) -> float:
        """Seconds of a step with n, A_p, D, K, P and C."""
        k, q, latency = self.speculation.tokens, self.speculation.draft_frac, self.latency
        step_tokens = prompt_tokens + (1 + k) * decodes  # n + (1 + k) D
        read_tokens = kv_tokens + k * decodes  # K + k D
        draft_pairs = k * kv_tokens + decodes * k * (k + 1) / 2  # Those of each decode's further queries.
        verify_s = float(
            latency.step_s(step_tokens, pairs + draft_pairs, (1 + k) * decodes, read_tokens, prefills, cached)
        )
        # h is counted once per step, so it is subtracted from the drafter's passes.
        first_s = (
            float(latency.step_s(step_tokens, pairs, decodes, read_tokens, prefills, cached)) - latency.h_s
        )
        sequences = decodes + prefills  # R
        again_s = float(latency.step_s(sequences, 0.0, sequences, read_tokens, 0.0)) - latency.h_s
        return verify_s + q * (first_s + (k - 1) * again_s) + k * self.speculation.draft_s

    def compile_for_kernel(self, most_tokens: int, most_decodes: int) -> Compiled:
        """For the kernel: f(N) + h for N up to `most_tokens`, the numbers of `latency`, then h, k, q, s."""
        latency, speculation = self.latency, self.speculation
        plain = latency.compile_for_kernel(most_tokens, most_decodes)
        numbers = (*plain.numbers, latency.h_s, speculation.tokens, speculation.draft_frac)
        return Compiled(SPECULATIVE, (*numbers, speculation.draft_s), plain.tables, plain.widths)


def least_token_times(latency: StepLatency, speculation: Speculation | None) -> StepLatency:
    """Step times that no token of a decode can undercut, for lower bounds on work.

    Every token that a step yields was checked in that step and took f, a and b there. KV is read once for up
    to 1 + k tokens, so each takes at least d / (1 + k). m and the drafter's time only make steps longer, so
    they are left out.
    """
    if speculation is None:
        return latency
    return replace(latency, d_s=latency.d_s / speculation.most_tokens, m_s=0.0)


def conditional_acceptance(lengths: Sequence[float], tokens: int) -> tuple[float, ...]:
    """The a_i of `tokens` drafts, from `lengths`: the mean accepted lengths measured with 1, 2, ... drafts.

    P_i is what the i-th draft added to the length. P_i cannot rise with i, but measurements scatter, so
    rising neighbours are averaged (isotonic regression). If a further draft was measured to shorten the
    length, 1 + P_1 + ... + P_k may then exceed the measured length; the P_i are scaled down to it. Raises
    InputError if there are fewer lengths than `tokens`.
    """
    if tokens > len(lengths):
        raise InputError(f"acceptance is known for up to {len(lengths)} draft tokens, found {tokens}")
    gains: list[tuple[float, int]] = []  # The mean of each group of neighbours, and their number.
    for gain in np.diff([1.0, *lengths[:tokens]]).tolist():
        gains.append((gain, 1))
        while len(gains) > 1 and gains[-1][0] > gains[-2][0]:
            (late, late_count), (early, early_count) = gains.pop(), gains.pop()
            count = late_count + early_count
            gains.append(((late * late_count + early * early_count) / count, count))
    means, counts = zip(*gains, strict=True)
    accepted = np.clip(np.repeat(means, counts), 0.0, 1.0)  # P_1 .. P_k
    total, measured_total = float(accepted.sum()), lengths[tokens - 1] - 1
    if total > measured_total:
        accepted = accepted * (max(measured_total, 0.0) / total)
    before = np.concatenate(([1.0], accepted[:-1]))
    shares = np.divide(accepted, before, out=np.zeros(tokens), where=before > 0)
    return tuple(np.clip(shares, 0.0, 1.0).tolist())


@dataclass(frozen=True, slots=True)
class Drafter:
    """What a drafter costs a worker: weights and KV per token, over all GPUs, and q (`draft_frac`)."""

    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0
    draft_frac: float = 0.0

    def add_to_memory(self, use: Memory, llm: Llm, tp: int) -> Memory:
        """The memory `use` of one GPU, with the drafter added, which is split over the GPUs as the LLM is.

        The drafter keeps the KV of all tokens, also beside layers with windows or states, which do not.
        """
        if not self.weight_bytes:  # A lookup has no weights and no KV.
            return use
        kv_bytes = use.kv_bytes_per_token + self.kv_bytes_per_token / min(llm.kv_heads, tp)
        weight_bytes = use.weight_bytes + self.weight_bytes / tp
        return replace(use, weight_bytes=weight_bytes, kv_bytes_per_token=kv_bytes)


def drafter_of(method: str, llm: Llm, model: Llm | None = None) -> Drafter:
    """The drafter of an LLM by its method; `model` is the small LLM of the method draft_model. q is the bytes
    of weights that a pass of the drafter reads, as a share of those that a pass of the LLM reads.

    EAGLE's drafter is one layer like the LLM's own (Li et al. 2024, arXiv:2401.15077). EAGLE and MTP use the
    LLM's output head: a pass reads it again, but it takes no further memory. Raises InputError if the method
    needs a `model`, or layers that the LLM does not have.
    """
    if method in WEIGHTLESS:
        return Drafter()
    head_bytes = llm.vocab * llm.hidden * llm.head_dtype_bytes
    llm_bytes = llm.layers_bytes + head_bytes
    layer_kv = _layer_kv_bytes(llm)
    if method == "draft_model":
        if model is None:
            raise InputError("method draft_model needs model: the name of the LLM that drafts")
        # A mixture reads only the weights of the experts that a token uses.
        frac = float(active_weight_bytes(model) / active_weight_bytes(llm))
        return Drafter(model.weight_bytes, model.kv_bytes_per_token, frac)
    if method in OWN_LAYERS:
        if not llm.draft_parameters:
            raise InputError(
                f"{llm.name} has no layers for method {method}; take eagle3, draft_model or ngram"
            )
        layers_bytes = llm.draft_parameters * _draft_weight_bytes(llm)
        return Drafter(layers_bytes, layer_kv, (layers_bytes + head_bytes) / llm_bytes)
    # EAGLE and EAGLE-3: one layer.
    layer_bytes = llm.layers_bytes / llm.layers
    return Drafter(layer_bytes, layer_kv, (layer_bytes + head_bytes) / llm_bytes)


def _layer_kv_bytes(llm: Llm) -> float:
    """Bytes that a token leaves in the cache of the drafter's layer: the mean of the layers that keep any."""
    layers = sum(group.count for group in llm.layer_groups if llm.kv_layer_bytes(group.attention))
    return llm.kv_bytes_per_token / max(layers, 1)


def _draft_weight_bytes(llm: Llm) -> float:
    """Bytes of a weight of the layers that draft.

    Where others have quantised a published LLM to 4 bits, these layers are as they were: in 16 bits
    (vllm-project/vllm#38650, #44087, #49187), those of DeepSeek-V4 in 8 (#53906).
    """
    if llm.weights not in QUANTISED_LATER:
        return llm.bytes_per_weight(llm.weights)
    has_compressed = any(isinstance(group.attention, CompressedAttention) for group in llm.layer_groups)
    return WEIGHT_BYTES["fp8-block" if has_compressed else "bf16"]
