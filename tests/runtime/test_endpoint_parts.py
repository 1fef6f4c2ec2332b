"""The parts of `plan validate --url`, each by hand arithmetic."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from fake_gateway import KEY, serving
from runtime_fakes import fleet_of, random_trace

from planner.domain import Slo
from planner.errors import InputError
from planner.runtime.analysis import ValidationSetup
from planner.runtime.as_served import as_served, measure_lengths
from planner.runtime.budget import SendingBudget, is_spent
from planner.runtime.dialect import CHAT, Dialect
from planner.runtime.endpoint import Endpoint, EndpointAnswer, EndpointError, checked_url, post_request
from planner.runtime.engine_scraper import EngineScraper, engine_times, sum_samples
from planner.runtime.live_replay import Journal, JournalFile, ReplayPart, RequestOutcome
from planner.runtime.remote_validation import Failures, warm_up_times
from planner.traffic.trace import Trace

URL = "http://127.0.0.1:9/v1"


def test_an_address_ends_before_the_path_of_a_request() -> None:
    for given in ("https://x", "https://x/", "https://x/v1/", "https://x/v1/chat/completions"):
        assert checked_url(given, "--url") == "https://x/v1"
    assert checked_url("https://x/api/openai", "--url") == "https://x/api/openai"
    assert checked_url("http://x:9090", "--prometheus") == "http://x:9090"


def test_a_text_of_a_server_is_one_short_line_without_the_key() -> None:
    """As it is, quoted for an address, escaped for JSON, and as base64."""
    endpoint = Endpoint(URL, 'sk-"a/b+c"')
    said = endpoint.clean(
        f'you\nsent {endpoint.key}, sk-%22a/b%2Bc%22, sk-\\"a/b+c\\", c2stImEvYitjIg==\x1b[31m!'
    )
    assert said == "you sent [key], [key], [key], [key]== [31m!"
    assert len(endpoint.clean("x" * 1000)) == 200
    assert KEY not in repr(Endpoint(URL, KEY))


def test_a_key_that_no_header_can_carry_is_refused_without_being_shown() -> None:
    for key in ("a b", "a\nb", "ä"):
        with pytest.raises(InputError, match=r"\$NAME holds spaces") as refused:
            Endpoint(URL, key, "NAME")
        assert key not in str(refused.value)


def answered(*events: object, most: int = 100, end: bytes = b"data: [DONE]\n\n") -> EndpointAnswer:
    """What is read of a stream of these events, each at a second of its own."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": hello\n\n")
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(end)
        return response

    async def ask(url: str) -> EndpointAnswer:
        seconds = iter(range(1, 1000))
        endpoint = Endpoint(url)
        async with endpoint.client() as client:
            return await post_request(
                client, endpoint, "/completions", b"{}", most, now_s=lambda: next(seconds)
            )

    app = web.Application()
    app.add_routes([web.post("/v1/completions", stream)])
    with serving(app) as url:
        return asyncio.run(ask(url))


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content}], **more}


def test_tokens_are_counted_as_the_server_counts_them() -> None:
    """Chunks of 1 and 2 tokens, by usage with each: arrivals at 1, 2 and 2 s. A chunk without text counts
    where usage says so, and not where there is none."""
    each = answered(
        text("a", usage={"prompt_tokens": 7, "completion_tokens": 1}),
        text("", usage={"prompt_tokens": 7, "completion_tokens": 3}),
    )
    assert (each.token_s, each.input_tokens, each.output_tokens, each.is_exact) == ((1, 2, 2), 7, 3, True)
    none = answered(text(""), text("a"), text("b"))
    assert (none.token_s, none.output_tokens, none.is_exact) == ((1, 2), 0, True)


def test_tokens_of_chunks_are_spread_over_them() -> None:
    """Five tokens in three chunks at 1, 2 and 3 s: at 0, 0.5, 1, 1.5 and 2 chunks after the first, each in
    the chunk that had come by then. Two tokens in three chunks: the first and the last."""
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
    five = answered(text("a b"), text("c d"), text("e"), usage)
    assert list(five.token_s) == [1, 1, 2, 2, 3]
    assert not five.is_exact
    usage["usage"] = {"prompt_tokens": 7, "completion_tokens": 2}
    assert answered(text("a"), text("b"), text("c"), usage).token_s == (1, 3)


def test_a_chat_brings_thoughts_and_words_and_calls() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "yes"},
        {"tool_calls": [{}]},
    ]
    chat = answered(*({"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas))
    assert list(chat.token_s) == [1, 2, 3]
    assert chat.is_good


@pytest.mark.parametrize(
    ("events", "most", "end", "trouble"),
    [
        ([text("a")], 9, b"", "broke off after 1 tokens"),
        ([text("")], 9, b"data: [DONE]\n\n", "no token came"),
        ([[]], 9, b"", "no JSON object"),
        ([text("a")] * 75, 10, b"", "more tokens came than the 10 requested"),
        ([{"error": {"message": "out of\nmemory"}}], 9, b"", "error in the stream: out of memory"),
        ([], 9, b"data: " + b"x" * 2**21, "LineTooLong|ValueError"),
    ],
)
def test_a_stream_that_is_none_says_why(events: list[object], most: int, end: bytes, trouble: str) -> None:

    assert re.search(trouble, answered(*events, most=most, end=end).trouble)


def test_the_rate_of_the_warm_up_doubles_each_second_up_to_the_traffics() -> None:
    """1 in the first second, 2 in the second, 4 in the third; at most 3 a second for traffic of 3/s."""
    assert warm_up_times(100.0, 7) == pytest.approx([0, 1, 1.5, 2, 2.25, 2.5, 2.75])
    assert warm_up_times(3.0, 7) == pytest.approx([0, 1, 1.5, 2, 2 + 1 / 3, 2 + 2 / 3, 3])
    assert warm_up_times(0.1, 3) == [0, 1, 2]


def test_text_has_the_words_that_its_tokens_need() -> None:
    """1.5 tokens a word and 9 added: 60 tokens are 34 words; never fewer than one. Shared blocks of 30 tokens
    are 20 words, the same wherever they stand."""
    dialect = Dialect(CHAT, by_ids=False, tokens_per_word=1.5, added_tokens=9.0)
    assert [dialect.words_for(tokens) for tokens in (60, 9, 1)] == [34, 1, 1]
    trace = Trace(
        "shared",
        np.array([0.0, 1.0, 2.0]),
        np.array([60, 75, 60]),
        np.array([1, 1, 1]),
        np.array([0, 1, 2, 2]),
        np.array([5, 5]),
        30,
    )
    found = [dialect.prompt_of(trace, k, 0, shares_prefixes=True) for k in range(3)]
    words = [str(one).split() for one in found]
    assert [len(one) for one in words] == [34, 44, 34]
    assert words[0][:20] == words[1][:20] != words[2][:20] and words[0][20:] != words[1][20:34]
    body = json.loads(dialect.body("m", "hello", 5))
    assert body["messages"] == [{"role": "user", "content": "hello"}] and body["max_tokens"] == 5


def test_a_journal_that_begins_with_another_line_is_refused(tmp_path: Path) -> None:
    """The line was skipped in silence. A line that an interrupt cut off later on is no fault."""
    journal = JournalFile(tmp_path / "journal.jsonl", {})
    journal.write({"part": 0, "start_s": 1.0, "first_s": 0.0})
    written = journal.path.read_text()
    journal.path.write_text(f'{written}\n{{"part": 0, "se\n3')
    assert len(journal.read().parts) == 1
    journal.path.write_bytes(b"\xffgarbage\n" + written.encode())
    with pytest.raises(InputError, match=r"journal\.jsonl: line 1 is '.garbage', .* remove the line"):
        journal.read()


def test_a_budget_counts_before_it_sends_and_remembers(tmp_path: Path) -> None:
    """At 2 and 10 USD per million: 1000 and 100 tokens cost 0.003 USD at most; with 40 in the answer 0.0024.
    Two such are within 0.006 USD, three after the first has come back cheaper are not within 0.008."""
    endpoint = Endpoint(URL, max_usd=0.008, usd_per_million=(2.0, 10.0), max_requests=9)
    journal = JournalFile(tmp_path / "journal.jsonl", {})
    budget = SendingBudget(endpoint, journal)
    charged = budget.charge(1000, 100)
    assert charged == pytest.approx(0.003)
    budget.settle(0.003, EndpointAnswer(200, "", (1.0,), 1000, 40))
    assert budget.charge(1000, 100) is not None and budget.charge(1000, 100) is None
    budget.settle(0.003, EndpointAnswer(500, "HTTP 500", (), 1000, 40))  # it may be billed
    again = SendingBudget(endpoint, journal)
    assert again.requests == 2 and again.usd == pytest.approx(0.0054)
    assert again.charge(1, 1, share_frac=0.2) is None
    journal.write({"budget_ended": [9, 0.008]})
    assert is_spent(journal, endpoint)
    assert not is_spent(journal, Endpoint(URL, max_usd=0.009, usd_per_million=(2.0, 10.0), max_requests=9))
    assert not is_spent(journal, Endpoint(URL, max_requests=9))
    journal.write({"budget_ended": [9, None]})
    assert is_spent(journal, Endpoint(URL, max_usd=100.0, usd_per_million=(2.0, 10.0), max_requests=9))


def failures(*codes: int, limit: float = 0.1) -> int:
    """After how many answers the run ended; -1 if it did not."""
    watching = Failures(Endpoint(URL, max_failed_frac=limit), 10.0)
    for number, code in enumerate(codes):
        try:
            watching.note_answer(EndpointAnswer(code, "" if code == 200 else f"HTTP {code}"))
        except EndpointError:
            return number + 1
    return -1


def test_a_run_ends_where_more_than_a_share_of_the_last_fifty_fails() -> None:
    """A tenth of 50 are five: the sixth failure ends it, and five in any 50 do not. Ten in a row end it where
    half may fail; nothing does where all may, but for a key that is refused."""
    assert failures(*[500] * 6) == 6
    assert failures(*([200] * 9 + [500]) * 20) == -1
    assert failures(*([200] * 4 + [500]) * 20) == 30
    assert failures(*[200, 503] * 5, *[500] * 9, limit=0.5) == 19
    assert failures(*[500] * 100, limit=1.0) == -1
    assert failures(200, 500, limit=0.0) == 2
    assert failures(*[200] * 3, 401, limit=1.0) == 4


def sent_of(request: int, tokens: int, input_tokens: int, status: Any = "finished") -> RequestOutcome:
    times = tuple(1.0 + request + 0.1 * k for k in range(tokens))
    return RequestOutcome(
        request, 0, float(request), float(request), 5.0, status, "", (), times, input_tokens
    )


def test_what_is_compared_is_what_was_sent_as_long_as_it_was() -> None:
    """Of four requests the last was not sent and the third failed: it keeps the trace's lengths. Prompts of
    10 and 20 tokens came out as 12 and 20: off by 20 and 0 %, in the middle 10 %."""
    trace = Trace("four", np.arange(4.0), np.array([10, 20, 30, 40]), np.array([5, 5, 5, 5]))
    sent = {0: sent_of(0, 3, 12), 1: sent_of(1, 5, 20), 2: sent_of(2, 1, 30, "failed")}
    journal = Journal((ReplayPart(0, 0.0, (0, 1, 2)),), sent)
    served, moved = as_served(trace, journal)
    assert served.input_tokens.tolist() == [12, 20, 30] and served.output_tokens.tolist() == [3, 5, 5]
    assert moved.parts[0].requests == (0, 1, 2) and set(moved.outcomes) == {0, 1, 2}
    found = measure_lengths(trace, journal)
    assert (found.requested_output_tokens, found.output_tokens) == (10, 8)
    assert found.prompt_error_frac == pytest.approx((0.1, 0.2)) and found.clumped_frac == 0


def test_another_endpoint_is_another_run_and_its_key_is_no_part_of_it() -> None:
    fleet, trace = fleet_of(("w", "mixed", 1)), random_trace(3, 1.0)

    def identity(url: str, key: str) -> dict[str, Any]:
        endpoint = Endpoint(url, key)
        return ValidationSetup(fleet, trace, Slo(()), 512, engine="endpoint", endpoint=endpoint).identity()

    assert identity(URL, "a") == identity(URL, "b") != identity("http://127.0.0.1:8/v1", "a")


def metrics(requests: int, engine: str = "0", llm: str = "m") -> str:
    """vLLM's text after so many requests, each with a TTFT of 0.3 s: in the bucket up to 0.5."""
    labels = f'engine="{engine}",model_name="{llm}"'
    name = "vllm:time_to_first_token_seconds"
    return "".join(
        f"{line}\n"
        for line in (
            f'{name}_bucket{{{labels},le="0.1"}} 0',
            f'{name}_bucket{{{labels},le="0.5"}} {requests}',
            f'{name}_bucket{{{labels},le="+Inf"}} {requests}',
            f"{name}_count{{{labels}}} {requests}",
            f"{name}_sum{{{labels}}} {0.3 * requests}",
            f"vllm:e2e_request_latency_seconds_count{{{labels}}} {requests}",
            f"vllm:num_preemptions_total{{{labels}}} {requests // 10}",
        )
    )


@pytest.mark.parametrize("is_server", [False, True])
def test_the_engines_clock_is_what_they_counted_between_two_scrapes(is_server: bool) -> None:
    """100 requests, then 130 on two engines: 60 in between, with a TTFT of 0.3 s and 6 preemptions. The same
    from a Prometheus server, which is waited for until it has scraped once more."""
    state = {"requests": 100, "scraped_s": 50.0, "now_s": 60.0, "asked": 0.0}

    def both() -> str:
        return metrics(int(state["requests"])) + metrics(int(state["requests"]), "1")

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(text=both())

    async def query(request: web.Request) -> web.Response:
        asked = request.query["query"]
        if asked == "time()":
            result: Any = [state["now_s"], str(state["now_s"])]
            return web.json_response(
                {"status": "success", "data": {"resultType": "scalar", "result": result}}
            )
        if asked.startswith("min(timestamp"):
            state["asked"] += 1
            state["scraped_s"] += 20.0
            result = [{"metric": {}, "value": [0, str(state["scraped_s"] - 20.0)]}]
        else:
            from planner.importers.prometheus_scrape import samples_of

            rows = samples_of(both(), "")
            result = [
                {"metric": {"__name__": name, **labels}, "value": [0, str(value)]}
                for name, labels, value in rows
            ]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})

    async def watch(url: str) -> Any:
        async with EngineScraper([url if is_server else f"{url}/metrics"]) as scraper:
            await scraper.check()
            await scraper.start("m", lambda _: None)
            state["requests"], state["now_s"] = 130, state["now_s"] + 20
            return await scraper.end(lambda _: None)

    app = web.Application()
    app.add_routes([web.get("/metrics", scrape), web.get("/api/v1/query", query)])
    with serving(app) as url:
        record = asyncio.run(watch(url))
    found = engine_times([record, None])
    assert found is not None
    assert (found.requests, found.preemptions, found.hit_frac) == (60, 6, None)
    assert found.times_s["ttft"]["mean"] == pytest.approx(0.3)
    assert found.times_s["ttft"]["p90_at_most"] == 0.5
    assert not is_server or state["asked"] >= 3


def test_metrics_that_cannot_be_read_says_so() -> None:
    """Before the traffic an error; after it a note, since the traffic is measured."""
    with pytest.raises(EndpointError, match=r"--prometheus http://127.0.0.1:9/metrics: Client"):
        asyncio.run(_checked("http://127.0.0.1:9/metrics"))
    app = web.Application()
    with serving(app) as url:
        with pytest.raises(EndpointError, match="HTTP 404"):
            asyncio.run(_checked(url))
    with pytest.raises(EndpointError, match="has m, n, and none of them is 'x'"):
        rows = [("vllm:a_total", {"model_name": name}, 1.0) for name in "mn"]
        sum_samples(rows, "x", "here")
    assert engine_times([{"trouble": "gone"}]) is None


async def _checked(url: str) -> None:
    async with EngineScraper([url]) as scraper:
        await scraper.check()


def test_a_price_that_is_no_number_is_refused() -> None:
    """With it no budget was ever spent."""
    with pytest.raises(InputError, match="--usd-per-million: must be at least 0, found nan"):
        Endpoint(URL, max_usd=5.0, usd_per_million=(0.15, math.nan))
