"""How requests to an endpoint are written: the path, prompts as token ids or text, and the parameters.

Prompts of token ids have exactly the asked length. Prompts of text are random short words, and their length
in tokens is estimated: planner/runtime/probe.py sends two prompts, reads how many tokens the endpoint
counted, and computes `Dialect.tokens_per_word` from these counts. It computes `Dialect.added_tokens` too, the
tokens that the endpoint adds to every prompt, such as those of a chat template or a begin-of-text token.
"""

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
_REMEMBERED_TEXTS = 10_000  # `_random_words` keeps this many texts in memory.


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to write requests to an endpoint.

    `by_ids`: prompts are token ids, not text. `fixes_length`: requests have vLLM's parameters that make an
    answer exactly as long as requested, and that make each chunk of the stream report the number of tokens so
    far. `has_usage`: requests ask for the token counts in the last chunk of the stream. `limit`: the name of
    the parameter that bounds the answer's length. `is_greedy`: requests have temperature 0. The module's
    docstring says what `tokens_per_word` and `added_tokens` are.
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
        if self.fixes_length:  # Its stream_options replace those of `has_usage`.
            document |= {"ignore_eos": True, "min_tokens": output_tokens}
            document["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if user:
            document["user"] = user
        return json.dumps(document).encode()

    def words_for(self, tokens: float) -> int:
        """How many words make a prompt of `tokens` tokens as the endpoint counts them; at least 1.

        `tokens` includes the tokens that the endpoint adds.
        """
        return max(1, round((tokens - self.added_tokens) / self.tokens_per_word))

    def prompt(self, tokens: int, number: int, seed: int) -> list[int] | str:
        """A random prompt of `tokens` tokens, the tokens that the endpoint adds included.

        `number` and `seed` determine it. Prompts with different numbers hardly share a beginning, so that
        prefix caches do not help.
        """
        if self.by_ids:
            return unique_prompt(max(1, round(tokens - self.added_tokens)), number, seed)
        return _random_words(self.words_for(tokens), (seed, number))

    def prompt_of(self, trace: Trace, request: int, seed: int, *, shares_prefixes: bool) -> list[int] | str:
        """The prompt of request number `request` of the trace.

        With `shares_prefixes`, prompts whose prefix blocks have equal ids in the trace begin with equal text
        or token ids. Without it, prompts hardly share a beginning.
        """
        tokens = int(trace.input_tokens[request])
        if not shares_prefixes:
            return self.prompt(tokens, request, seed)
        if self.by_ids:
            ids = trace_prompt(trace, request, seed)
            return ids[: max(1, round(tokens - self.added_tokens))]  # The endpoint adds the other tokens.
        first, end = trace.prefix_offsets[request : request + 2]
        word_count = self.words_for(tokens)
        block_words = max(1, round(trace.prefix_block_tokens / self.tokens_per_word))
        # `seed` and `block_words` are the same for all prompts of a run, so equal ids give equal words. An id
        # may be negative, which a seed of numpy must not be: hence the remainder of 2**64.
        block_texts = [
            _random_words(block_words, (seed, block_id % 2**64, block_words))
            for block_id in trace.prefix_ids[first:end].tolist()
        ]
        words = " ".join(block_texts).split()[:word_count]  # The last block may reach beyond the prompt.
        if (own_word_count := word_count - len(words)) > 0:
            # This one item of the list is a text of many words.
            words.append(_random_words(own_word_count, (seed, request)))
        return " ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """How requests were made, for the journal and the report. Journals on disk have these keys."""
        return {
            "path": self.path,
            "prompts": "token ids" if self.by_ids else "text",
            "fixes_length": self.fixes_length,
            "says_usage": self.has_usage,
            "tokens_per_word": None if self.by_ids else self.tokens_per_word,
            "added_tokens": self.added_tokens,
        }


@lru_cache(maxsize=_REMEMBERED_TEXTS)
def _random_words(word_count: int, seed: tuple[int, ...]) -> str:
    """A text of `word_count` random words; remembered, because the same blocks occur in many prompts."""
    return " ".join(
        WORDS[k] for k in np.random.default_rng(seed).integers(len(WORDS), size=word_count).tolist()
    )


WITHOUT_VLLM_PARAMETERS = Dialect(fixes_length=False)
# The probe (planner/runtime/probe.py) takes the first dialect of a list that the endpoint accepts. So the one
# with the best token counts comes first, and the one with the fewest parameters last. There is no dialect
# with token ids and without usage, because servers that take ids also count tokens.
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
