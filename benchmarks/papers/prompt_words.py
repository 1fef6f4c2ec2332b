"""A small classifier in torch that predicts the range of an output's length from the words of its prompt.

TetriInfer (Hu et al. 2024, arXiv:2401.11181, section 3.3.2) fine-tunes OPT-125M on prompts of ShareGPT and
OPT-13B's answers; with ranges of 200 tokens it is right for 74.9 %. Here the features of a prompt are its
words and pairs of words that are frequent enough, hashed. Each feature has an embedding; the mean of these
goes through one hidden layer. The classifier is trained on prompts and output lengths of your own logs.
`made_prompts` draws prompts for which the best possible accuracy is known.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from planner.models.output_length import BUCKET_TOKENS, bucket_of

Ints = npt.NDArray[np.int64]
FEATURES = 1 << 15  # Hashed words and pairs of words.


class PromptWords(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifies prompts by the bucket of their output's length. X: prompts, n texts.   y (n,): output
    tokens.

    There are `buckets` of `bucket_tokens` each; longer outputs count to the last. `fit` trains for `epochs`
    rounds on the features `known_` (FEATURES,): hashed words and pairs that stand in at least `least_frac` of
    the prompts. It leaves the network in `layers_`. Equal seeds give equal classifiers.
    """

    def __init__(
        self,
        *,
        bucket_tokens: int = BUCKET_TOKENS,
        buckets: int = 10,
        width: int = 32,
        epochs: int = 8,
        least_frac: float = 0.01,
        seed: int = 0,
    ) -> None:
        self.bucket_tokens, self.buckets, self.width = bucket_tokens, buckets, width
        self.epochs, self.least_frac, self.seed = epochs, least_frac, seed

    def fit(self, X: Sequence[str], y: npt.ArrayLike) -> PromptWords:
        import torch
        from torch import nn

        torch.manual_seed(self.seed)
        true_buckets = torch.from_numpy(self.true_buckets(y))
        self.layers_ = nn.ModuleDict(
            {
                "words": nn.EmbeddingBag(FEATURES, self.width, mode="mean"),
                "rest": nn.Sequential(nn.ReLU(), nn.Linear(self.width, self.buckets)),
            }
        )
        hashed_prompts = [_hashed(prompt) for prompt in X]
        prompts_with = np.bincount(np.concatenate(hashed_prompts), minlength=FEATURES)
        # A feature of one prompt alone would tell which prompt it is.
        self.known_ = prompts_with >= max(self.least_frac * len(hashed_prompts), 2)
        hashed = [features[self.known_[features]] for features in hashed_prompts]
        optimizer = torch.optim.Adam(self.layers_.parameters(), lr=0.01)
        for _ in range(self.epochs):
            order = torch.randperm(len(hashed))
            for batch in order.split(256):
                optimizer.zero_grad()
                scores = self._scores([hashed[i] for i in batch.tolist()])
                nn.functional.cross_entropy(scores, true_buckets[batch]).backward()
                optimizer.step()
        return self

    def predict(self, X: Sequence[str]) -> Ints:
        """The bucket of the output length that the network finds most likely for each prompt (n,)."""
        import torch

        check_is_fitted(self, "layers_")
        with torch.no_grad():
            hashed_prompts = [_hashed(prompt) for prompt in X]
            scores = self._scores([features[self.known_[features]] for features in hashed_prompts])
        return np.asarray(scores.argmax(dim=1).numpy(), np.int64)

    def score(self, X: Sequence[str], y: npt.ArrayLike, sample_weight: Any = None) -> float:
        """The share of prompts whose bucket is right."""
        return float(np.average(self.predict(X) == self.true_buckets(y), weights=sample_weight))

    def true_buckets(self, y: npt.ArrayLike) -> Ints:
        """The bucket of each output length, at most the last."""
        return np.minimum(bucket_of(y, self.bucket_tokens), self.buckets - 1)

    def _scores(self, hashed: Sequence[Ints]) -> Any:
        """Scores (n, buckets) of prompts given by their known features."""
        import torch

        # An EmbeddingBag takes all features in a row, and where those of each prompt begin.
        begins = np.cumsum([0, *(len(features) for features in hashed)])[:-1]
        words = self.layers_["words"](torch.from_numpy(np.concatenate(hashed)), torch.from_numpy(begins))
        return self.layers_["rest"](words)


def _hashed(prompt: str) -> Ints:
    """The features of a prompt, each once: its words and pairs of neighbouring words, hashed."""
    words = re.findall(r"\w+", prompt.lower())
    pairs = [f"{first} {second}" for first, second in pairwise(words)]
    return np.unique([zlib.crc32(part.encode()) % FEATURES for part in (*words, *pairs)]).astype(np.int64)


# Tasks as users word them, with the median length of answers [tokens] and the spread of its logarithm.
TASKS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("answer yes or no: is {} true", "true or false: {}"), 6, 0.4),
    (("translate {} into French", "how do you say {} in German"), 60, 0.5),
    (("define {} in one sentence", "what does {} mean, briefly"), 45, 0.4),
    (("write a short e-mail about {}", "draft a polite reply on {}"), 150, 0.3),
    (("explain {} to a beginner", "how does {} work"), 300, 0.35),
    (("list the pros and cons of {}", "compare {} with the alternatives"), 430, 0.3),
    (("write python code for {}", "implement {} in C and comment it"), 520, 0.45),
    (("write a detailed essay about {}", "tell a long story about {}"), 1050, 0.25),
)
_SYLLABLES = ("ba", "co", "di", "fu", "ga", "lo", "mi", "no", "pe", "ra", "su", "ti", "vo", "ze")


def made_prompts(n: int, rng: np.random.Generator) -> tuple[list[str], Ints, Ints]:
    """Prompts, the tokens of their outputs (n,), and which of TASKS each is (n,). Topics are words that mean
    nothing and hardly ever come twice; a context of 0 to 60 such words may stand before the task.
    """
    kinds = rng.integers(len(TASKS), size=n)
    prompts = []
    for kind in kinds.tolist():
        wordings = TASKS[kind][0]
        topic = " ".join(_made_words(rng, int(rng.integers(1, 4))))
        context = " ".join(_made_words(rng, int(rng.integers(0, 61))))
        prompts.append(f"{context} {wordings[int(rng.integers(len(wordings)))].format(topic)}".strip())
    medians, spreads = (np.array([task[k] for task in TASKS])[kinds] for k in (1, 2))
    outputs = np.maximum(np.ceil(medians * np.exp(spreads * rng.standard_normal(n))), 1).astype(np.int64)
    return prompts, outputs, kinds


def _made_words(rng: np.random.Generator, n: int) -> list[str]:
    """n words of four random syllables."""
    drawn = rng.integers(len(_SYLLABLES), size=(n, 4))
    return ["".join(word) for word in np.array(_SYLLABLES)[drawn].tolist()]


def best_accuracy(bucket_tokens: int = BUCKET_TOKENS, buckets: int = 10) -> float:
    """The accuracy of a predictor that knows the task of each made prompt, and names the likeliest bucket of
    its answers: no predictor can do better.
    """
    edges = np.append(bucket_tokens * np.arange(buckets, dtype=float), np.inf)
    shares = [np.diff(stats.lognorm.cdf(edges, spread, scale=median)) for _, median, spread in TASKS]
    return float(np.mean([share.max() for share in shares]))
