"""The time of sparse attention of prompts (DeepSeek-V3.2, GLM-5), from AIConfigurator's tables.

In sparse attention an index chooses the tokens that a token looks at. A layer was measured with its
projections and its index, for B prompts of L tokens: decodes in CUDA graphs, prompts without. In the tables
prompts of up to some 2000 tokens take 1.2 to 2.4 ms, with one head as with 128, and 2.3 to 4.3 ms on the same
GPU with a Grace CPU. This is the time in which kernels are launched, not that of the kernels. The kernels of
a layer are taken to need

    t = o + B (w(c + n) - w(c))     B prompts of n new tokens after c cached ones
    o                               the decode of one token: weights are read once
    w(L) = (T(B, L) - o) / B        a prompt of L tokens. T is the measured time. B is the number of prompts
                                    that make about MOST_TOKENS, because so long a step hides its launches

Between LENGTHS w is interpolated. The tables have no more than 128 cached tokens. Behind more cached tokens,
n new ones take w(c + n) - w(c), because a prompt of c + n tokens is its first c and the n after them. Beyond
the longest measured prompt, MOST_TOKENS, w is the parabola through PARABOLA_LENGTHS. A parabola suffices
because for each token the index looks at its whole context, and attention at no more than 2048 tokens.

A token of a longer prompt takes at least as long as one of a shorter prompt. If tables have less, by more
than noise, they mix the times of two kernels, and are refused. (Those for KV in 8 bits and 32 or 64 heads, on
B300 and GB200, have 0.46 us a token at some lengths and 0.66 us at others.)
"""

from collections.abc import Callable

import numpy as np

from planner.models.llm import LatentAttention, Llm

MOST_TOKENS = 32768  # Most tokens of a step, and of the longest prompt that was measured.
# Lengths of prompts [tokens], set by hand: at LENGTHS the tables are read, to PARABOLA_LENGTHS the parabola
# is fitted.
LENGTHS = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384, 32768)
PARABOLA_LENGTHS = (8192, 16384, 32768)
NOISE_FRAC = 0.1  # A token of a longer prompt may take this share less before tables count as mixed.


def is_sparse(llm: Llm) -> bool:
    """Whether an index chooses the tokens that latent attention looks at."""
    return any(
        isinstance(group.attention, LatentAttention) and group.attention.index_tokens > 0
        for group in llm.layer_groups
    )


def shares_index(llm: Llm) -> bool:
    """Whether some layers attend to the tokens that another layer's index chose (GLM-5.2)."""
    return any(
        isinstance(group.attention, LatentAttention)
        and group.attention.index_tokens > 0
        and not group.attention.index_heads
        for group in llm.layer_groups
    )


class SparsePrompts:
    """Milliseconds of prompts in a layer of sparse attention, by the formulas above.

    `measured_ms(prompts, tokens)` is T, AIConfigurator's time of prompts without cached tokens;
    `one_decode_ms` is o. Raises ValueError if the measured times mix those of several kernels.
    """

    def __init__(self, measured_ms: Callable[[int, int], float], one_decode_ms: float) -> None:
        self._one_decode_ms = one_decode_ms
        whole_ms, token_ms = [0.0], 0.0  # w of each length, and the time per token at the length before.
        for length in LENGTHS:
            # The most prompts within MOST_TOKENS, rounded down to a power of two as in the tables.
            prompts = 2 ** int(np.log2(MOST_TOKENS // length))
            whole_ms.append((measured_ms(prompts, length) - one_decode_ms) / prompts)
            if whole_ms[-1] / length < (1 - NOISE_FRAC) * token_ms:
                raise ValueError(
                    f"a token of prompts of {length} takes less than one of shorter ones: two kernels in turn"
                )
            token_ms = whole_ms[-1] / length
        self._lengths, self._whole_ms = np.array([0, *LENGTHS], dtype=float), np.array(whole_ms)
        parabola_ms = [whole_ms[LENGTHS.index(length) + 1] for length in PARABOLA_LENGTHS]
        self._parabola = np.polyfit(PARABOLA_LENGTHS, parabola_ms, 2)

    def step_ms(self, prompts: int, new: int, cached: int) -> float:
        """t: milliseconds of this many prompts, which have `new` tokens after `cached` ones each."""
        return self._one_decode_ms + prompts * (self._prompt_ms(cached + new) - self._prompt_ms(cached))

    def _prompt_ms(self, length: int) -> float:
        """w(length): milliseconds of a whole prompt, without the time o that a step needs once."""
        if length > MOST_TOKENS:
            return float(np.polyval(self._parabola, length))
        return float(np.interp(length, self._lengths, self._whole_ms))
