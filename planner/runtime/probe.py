"""Probes an endpoint before traffic goes to it: which LLM it serves, its dialect, how it counts tokens."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp
import numpy as np

from planner.files.document_values import nearest_names
from planner.runtime.budget import SendingBudget
from planner.runtime.dialect import CHAT_DIALECTS, COMPLETION_DIALECTS, Dialect
from planner.runtime.endpoint import (
    LIST_TIMEOUT_S,
    MODELS_BYTES,
    PROBE_TIMEOUT_S,
    UNREADABLE,
    Endpoint,
    EndpointAnswer,
    EndpointError,
    connection_error_text,
    error_message,
    post_request,
    read_text,
    redirect_message,
)

PROBE_TOKENS, PROBE_OUTPUT_TOKENS = 24, 16  # The lengths of the short request with which a dialect is tried.
MOST_ADDED_TOKENS = 8  # Special tokens that a server may put before a prompt of token ids.
WORD_COUNTS = (32, 256)  # Words of the two prompts by which tokens per word are measured.
# Tokens per short English word. A server outside these bounds does not count the tokens of the prompt it got.
LEAST_TOKENS_PER_WORD, MOST_TOKENS_PER_WORD = 0.25, 8.0
# A prompt of text is charged to the budget as this many tokens, which is more than it has, until the answer
# says how many it had (`SendingBudget.settle`).
CHARGED_TOKENS_PER_WORD, CHARGED_TOKENS_BESIDE_WORDS = 4, 64
PROBE_SEED = 2**31  # No prompt of the traffic begins like one of these.
ROUND_TRIPS = 5  # The round trip is the median of this many.
MOST_NAMES_SHOWN = 8  # An error message names at most this many of the endpoint's models.
NO_MODEL_LIST_CODES = (404, 405, 501)  # With these HTTP statuses an endpoint says that it has no /models.
# After these the other path is tried: completions or chat. A server that lacks the model answers 404 too.
NO_SUCH_PATH_CODES = (403, 404, 405, 501)
# After these the next dialect is tried, after other refusals none: no dialect would change those.
TRY_OTHER_DIALECT_CODES = (*NO_SUCH_PATH_CODES, 400, 415, 422, 500)
# A server may answer 500 to a parameter it does not know; after more answers of 500 than this it is broken.
MOST_ANSWERS_OF_500 = 2


@dataclass(frozen=True, slots=True)
class ProbedEndpoint:
    """The model and dialect by which the endpoint takes requests.

    `round_trip_s` is the time of a small request over an open connection; None if the endpoint has no list of
    models to ask for. `notes` are for the report.
    """

    model: str
    dialect: Dialect
    round_trip_s: float | None
    notes: tuple[str, ...]


@dataclass(slots=True)
class Probing:
    """Sends the requests that probe an endpoint; each is charged to the budget."""

    client: aiohttp.ClientSession
    endpoint: Endpoint
    budget: SendingBudget
    sent: int = 0

    async def probe_endpoint(
        self, planned: str, longest_tokens: int, progress: Callable[[str], None]
    ) -> ProbedEndpoint:
        """Ask for models, then find the dialect and how tokens are counted.

        `planned` is the plan's LLM, asked for if --model names none; `longest_tokens` is the length of the
        longest request, prompt and answer. Raises EndpointError if the endpoint cannot be measured.
        """
        progress(f"asking {self.endpoint.host} what it serves")
        model, round_trip_s = await self._find_model(planned, longest_tokens)
        notes = []
        if model != planned:
            notes.append(f"The endpoint's {model} was measured; the plan is for {planned}.")
        if self.endpoint.sends_key_openly:
            notes.append(f"The API key went to {self.endpoint.host} without encryption (http).")
        dialect, answer = await self._find_dialect(model)
        if answer.model and answer.model != model:
            notes.append(f"Asked for {model}, it names {self.endpoint.clean(answer.model)} in its answers.")
        if not dialect.by_ids:
            dialect = await self._measure_words(model, dialect)
        if not answer.input_tokens:
            notes.append(
                "The endpoint does not say how many tokens a prompt has: their lengths are not verified, and "
                "the prediction takes the trace's."
            )
        return ProbedEndpoint(model, dialect, round_trip_s, tuple(notes))

    async def _find_model(self, planned: str, longest_tokens: int) -> tuple[str, float | None]:
        """The name of the model to request, and the round trip [s] as in `ProbedEndpoint`."""
        endpoint, named_model = self.endpoint, self.endpoint.model
        rows = await self._list_models()
        if rows is None:  # Without a list, the first request shows whether the model is served.
            return named_model or planned, None
        names = list(rows)
        # An endpoint with one model serves that, perhaps under another name than the plan's.
        only_name = names[0] if len(names) == 1 else None
        model = named_model or only_name or planned
        if model not in names:
            listed = ", ".join(nearest_names(model, names, MOST_NAMES_SHOWN) or names[:MOST_NAMES_SHOWN])
            what = f"--model {model!r}" if named_model else f"the plan's LLM {model!r}"
            raise EndpointError(
                f"{endpoint.host} does not serve {what}; it has {endpoint.clean(listed) or 'none'}"
                f"{' and others' if len(names) > MOST_NAMES_SHOWN else ''}: name one with --model"
            )
        longest = rows[model].get("max_model_len")
        if isinstance(longest, int) and longest < longest_tokens:
            raise EndpointError(
                f"{endpoint.host} takes requests of at most {longest:,} tokens (max_model_len), and the "
                f"traffic has one of {longest_tokens:,}; replay other traffic, or raise its limit"
            )
        times_s = []
        for _ in range(ROUND_TRIPS):
            start_s = time.monotonic()
            await self._list_models()
            times_s.append(time.monotonic() - start_s)
        return model, float(np.median(times_s))

    async def _list_models(self) -> dict[str, dict[str, object]] | None:
        """The rows of /models by name; None where there is no such list."""
        endpoint = self.endpoint
        url = f"{endpoint.url}/models"
        where = f"GET {url}"
        timeout = aiohttp.ClientTimeout(total=min(endpoint.timeout_s, LIST_TIMEOUT_S))
        try:
            async with self.client.get(url, allow_redirects=False, timeout=timeout) as answer:
                text, code = await read_text(answer, MODELS_BYTES), answer.status
                if 300 <= code < 400:
                    raise EndpointError(redirect_message(endpoint, answer))
        except TimeoutError:
            raise EndpointError(f"{where}: no answer within {timeout.total:g} s") from None
        except UNREADABLE as error:
            raise EndpointError(f"{where}: {connection_error_text(endpoint, error)}") from None
        if code in NO_MODEL_LIST_CODES:
            return None
        if code != 200:
            raise EndpointError(
                f"{where}: "
                f"{refusal_message(endpoint, EndpointAnswer(code, endpoint.clean(error_message(text))))}"
            )
        try:
            rows = json.loads(text)["data"]
            return {row["id"]: row for row in rows if isinstance(row["id"], str)}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise EndpointError(
                f"{where}: expected a list of models in JSON, found {endpoint.clean(text)[:60]!r}; is this "
                "the address of an OpenAI-compatible API? It usually ends in /v1"
            ) from None

    async def _find_dialect(self, model: str) -> tuple[Dialect, EndpointAnswer]:
        """The first dialect that the endpoint takes, and its answer to the request that tried it."""
        refusals: list[str] = []
        answers_of_500 = 0
        for dialects in (COMPLETION_DIALECTS, CHAT_DIALECTS):
            for dialect in dialects:
                prompt = dialect.prompt(PROBE_TOKENS, self.sent, seed=PROBE_SEED)
                answer = await self._send(model, dialect, prompt, PROBE_OUTPUT_TOKENS)
                # Only a prompt of token ids has a known length. A server that counts no tokens answers 0.
                counts_ids = dialect.by_ids and bool(answer.input_tokens)
                added_tokens = answer.input_tokens - PROBE_TOKENS if counts_ids else 0
                if answer.is_good and not 0 <= added_tokens <= MOST_ADDED_TOKENS:
                    refusals.append(
                        f"it counts {answer.input_tokens} tokens for a prompt of {PROBE_TOKENS} ids"
                    )
                    continue
                if answer.is_good:
                    return replace(dialect, added_tokens=float(added_tokens)), answer
                refusal = refusal_message(self.endpoint, answer)
                if answer.code == 500:
                    answers_of_500 += 1
                if answer.code not in TRY_OTHER_DIALECT_CODES or answers_of_500 > MOST_ANSWERS_OF_500:
                    raise EndpointError(f"POST {self.endpoint.url}{dialect.path}: {refusal}")
                if refusal not in refusals:
                    refusals.append(refusal)
                if answer.code in NO_SUCH_PATH_CODES:
                    break  # No other dialect of this path can do better.
        # The latest refusal comes first: it answers the plainest request (dialect.py lists it last).
        raise EndpointError(
            f"{self.endpoint.host} takes neither completions nor chat completions for {model!r}: "
            f"{self.endpoint.clean('; '.join(reversed(refusals[-2:])))}"
        )

    async def _measure_words(self, model: str, dialect: Dialect) -> Dialect:
        """The dialect with its tokens per word, and the tokens that are added to each prompt.

        Two prompts of text measure them. The dialect is unchanged if the server counts no tokens.
        """
        counts = []
        for words in WORD_COUNTS:
            text = dialect.prompt(words, self.sent, seed=PROBE_SEED)
            answer = await self._send(model, dialect, text, output_tokens=1)
            if not answer.is_good:
                raise EndpointError(f"a prompt of {words} words: {refusal_message(self.endpoint, answer)}")
            if not answer.input_tokens:
                return dialect
            counts.append(answer.input_tokens)
        tokens_per_word = (counts[1] - counts[0]) / (WORD_COUNTS[1] - WORD_COUNTS[0])
        if not LEAST_TOKENS_PER_WORD <= tokens_per_word <= MOST_TOKENS_PER_WORD:
            raise EndpointError(
                f"{self.endpoint.host} counts {counts[0]} tokens for a prompt of {WORD_COUNTS[0]} words and "
                f"{counts[1]} for one of {WORD_COUNTS[1]}: prompts of the trace's lengths cannot be made"
            )
        added_tokens = counts[0] - tokens_per_word * WORD_COUNTS[0]
        return replace(dialect, tokens_per_word=tokens_per_word, added_tokens=added_tokens)

    async def _send(
        self, model: str, dialect: Dialect, prompt: list[int] | str, output_tokens: int
    ) -> EndpointAnswer:
        """Charge and send one request. Raises EndpointError if the budget does not last for it."""
        if isinstance(prompt, list):
            input_tokens = len(prompt)
        else:
            input_tokens = CHARGED_TOKENS_PER_WORD * len(prompt.split()) + CHARGED_TOKENS_BESIDE_WORDS
        charged_usd = self.budget.charge(input_tokens, output_tokens)
        if charged_usd is None:
            raise EndpointError(
                f"the budget does not last for the requests before the traffic ({self.budget.describe_use()} "
                "used); raise --max-requests or --max-usd"
            )
        self.sent += 1
        body = dialect.body(model, prompt, output_tokens)
        timeout_s = min(self.endpoint.timeout_s, PROBE_TIMEOUT_S)
        answer = await post_request(
            self.client, self.endpoint, dialect.path, body, output_tokens, timeout_s=timeout_s
        )
        self.budget.settle(charged_usd, answer)
        return answer


def refusal_message(endpoint: Endpoint, answer: EndpointAnswer) -> str:
    """A message that says how a request failed, and which setting to change."""
    text = answer.trouble
    # The HTTP status is 0 where no answer came. Where there is one, `trouble` may begin with it already.
    if answer.code not in (0, 200) and not text.startswith("HTTP "):
        text = f"HTTP {answer.code}: {text}"
    if answer.code in (401, 403):
        why = "it was sent no API key, and one is needed"
        if endpoint.key:
            why = f"it refuses the key in ${endpoint.key_name}"
        return f"{text} ({why}; see --api-key-env)"
    if answer.code == 402:
        return f"{text} (the account has no money left)"
    if answer.code == 429:
        wait = f", Retry-After: {answer.retry_after}" if answer.retry_after else ""
        return f"{text} (the gateway limits requests{wait}; raise its limit, or come back later)"
    if answer.trouble.startswith("no stream came"):  # The words of `endpoint.post_request`.
        return f"{text}: without one the times of tokens cannot be measured"
    return text
