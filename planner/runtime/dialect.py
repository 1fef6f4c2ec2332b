"""How requests to an endpoint are written: the path, prompts as token ids or text, and the parameters.

Token ids give prompts of exact length. Text is made of short words: from the tokens that the endpoint counts
for two prompts, planner/runtime/probe.py computes `Dialect.tokens_per_word` and `added_tokens`, which the
template of a chat or the beginning of a text adds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from planner.runtime.live_replay import trace_prompt, unique_prompt
from planner.traffic.trace import Trace

COMPLETIONS, CHAT = "/completions", "/chat/completions"
# Frequent short nouns, so that the tokens of a prompt grow evenly with its words.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power hour game line end member law car city name team minute idea body"
).split()


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to write requests to an endpoint.

    `by_ids`: prompts are token ids, not text. `fixes_length`: requests have vLLM's parameters that make an
    answer exactly as long as requested, and count its tokens with each chunk. `has_usage`: the last chunk of
    a stream counts tokens. `limit`: the parameter that bounds the answer's length. `is_greedy`: requests have
    temperature 0. The module's docstring says what `tokens_per_word`
    and `added_tokens` are.
    """

    path: str = COMPLETIONS
    by_ids: bool = True
    fixes_length: bool = True
    has_usage: bool = True
    limit: str = "max_tokens"
    is_greedy: bool = True
    tokens_per_word: float = 1.0
    added_tokens: float = 0.0

    def body(self, model: str, prompt: list[int] | str, output_tokens: int, user: str = "") -> bytes:
        """The JSON of one streaming request; `user` is the tenant, empty without tenants."""
        document: dict[str, Any] = {"model": model, "stream": True, self.limit: output_tokens}
        if self.path == CHAT:
            document["messages"] = [{"role": "user", "content": prompt}]
        else:
            document["prompt"] = prompt
        if self.is_greedy:
            document["temperature"] = 0
        if self.has_usage:
            document["stream_options"] = {"include_usage": True}
        if self.fixes_length:
            document |= {"ignore_eos": True, "min_tokens": output_tokens}
            document["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if user:
            document["user"] = user
        return json.dumps(document).encode()

    def words_for(self, tokens: float) -> int:
        """The number of words of a prompt of this many tokens, the tokens that the endpoint adds included."""
        return max(1, round((tokens - self.added_tokens) / self.tokens_per_word))

    def prompt(self, tokens: int, number: int, seed: int) -> list[int] | str:
        """A prompt of so many tokens. Prompts with different numbers hardly share a beginning."""
        if self.by_ids:
            return unique_prompt(max(1, round(tokens - self.added_tokens)), number, seed)
        return _random_words(self.words_for(tokens), (seed, number))

    def prompt_of(self, trace: Trace, request: int, seed: int, *, shares_prefixes: bool) -> list[int] | str:
        """The prompt of a request of the trace. With shared prefixes, equal blocks give equal prompts."""
        tokens = int(trace.input_tokens[request])
        if not shares_prefixes:
            return self.prompt(tokens, request, seed)
        if self.by_ids:
            ids = trace_prompt(trace, request, seed)
            return ids[: max(1, round(tokens - self.added_tokens))]  # The endpoint adds the rest.
        first, last = trace.prefix_offsets[request : request + 2]
        word_count = self.words_for(tokens)
        block_words = max(1, round(trace.prefix_block_tokens / self.tokens_per_word))
        # In one run the words of a block depend on its id alone. A seed must not be negative, an id may be.
        blocks = [
            _random_words(block_words, (seed, block_id % 2**64, block_words))
            for block_id in trace.prefix_ids[first:last].tolist()
        ]
        words = " ".join(blocks).split()[:word_count]
        if (missing := word_count - len(words)) > 0:
            words.append(_random_words(missing, (seed, request)))
        return " ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """How requests were made, for the journal and the report. Its keys are those of earlier journals."""
        return {
            "path": self.path,
            "prompts": "token ids" if self.by_ids else "text",
            "fixes_length": self.fixes_length,
            "says_usage": self.has_usage,
            "tokens_per_word": None if self.by_ids else self.tokens_per_word,
            "added_tokens": self.added_tokens,
        }


@lru_cache(maxsize=10_000)
def _random_words(words: int, seed: tuple[int, ...]) -> str:
    """Text of this many random words, remembered because blocks of a trace come again."""
    return " ".join(WORDS[k] for k in np.random.default_rng(seed).integers(len(WORDS), size=words).tolist())


WITHOUT_VLLM_PARAMETERS = Dialect(fixes_length=False)
# probe.py takes the first dialect that the endpoint accepts. So the one with the best token counts comes
# first, and the plainest last. None has token ids but no usage, because servers that take ids count tokens.
COMPLETION_DIALECTS = (
    Dialect(),
    Dialect(by_ids=False),
    WITHOUT_VLLM_PARAMETERS,
    replace(WITHOUT_VLLM_PARAMETERS, by_ids=False),
    replace(WITHOUT_VLLM_PARAMETERS, by_ids=False, has_usage=False),
)
VLLM_CHAT = Dialect(CHAT, by_ids=False)
CHAT_DIALECTS = (
    VLLM_CHAT,
    replace(VLLM_CHAT, fixes_length=False),
    # OpenAI's reasoning models refuse max_tokens as well as a temperature.
    replace(VLLM_CHAT, fixes_length=False, limit="max_completion_tokens", is_greedy=False),
    replace(VLLM_CHAT, fixes_length=False, has_usage=False),
)
