"""The same few requests as every kind of log would have them; what tests read back and mutate."""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple

EPOCH_NS = 1_767_607_200 * 10**9  # 2026-01-05T10:00:00Z


class Asked(NamedTuple):
    """A request: when, how long it and its answer are, and how long that took [s]."""

    at_s: float
    input_tokens: int
    output_tokens: int
    took_s: float


REQUESTS = tuple(
    Asked(0.5 * k + 0.2 * (k % 3), 100 + 13 * k, 5 + k % 7, 0.125 * (1 + k % 4)) for k in range(24)
)
OTHERS = ("embeddings", "failed", "other")  # one more row of each, where a format has them


def ns(at_s: float) -> int:
    return EPOCH_NS + round(at_s * 1e9)


def date(at_s: float, ending: str = "Z") -> str:
    at = datetime.datetime.fromtimestamp(EPOCH_NS / 1e9 + at_s, datetime.UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.%f") + ending


def gateway_csv() -> bytes:
    rows: list[list[Any]] = [
        ["created_at", "model", "prompt_tokens", "completion_tokens", "latency_ms", "status_code"]
    ]
    rows += [[date(r.at_s), "m", r.input_tokens, r.output_tokens, int(1e3 * r.took_s), 200] for r in REQUESTS]
    rows.append([date(20.0), "m", 5, "", 3, 500])
    return _csv(rows)


def ended_csv() -> bytes:
    """Only the end and the duration are there."""
    rows: list[list[Any]] = [["finished_at", "input_tokens", "output_tokens", "duration_ms"]]
    rows += [
        [(ns(r.at_s + r.took_s)) // 10**6, r.input_tokens, r.output_tokens, int(1e3 * r.took_s)]
        for r in sorted(REQUESTS, key=lambda r: r.at_s + r.took_s)
    ]
    return _csv(rows)


def gateway_jsonl() -> bytes:
    return b"".join(
        _line(
            {
                "ts": ns(r.at_s) / 1e9,
                "usage": {"prompt_tokens": r.input_tokens, "completion_tokens": r.output_tokens},
                "prompt": "do not keep",
            }
        )
        for r in REQUESTS
    )


def gateway_list() -> bytes:
    rows = [
        {"startedAt": date(r.at_s), "inputTokens": r.input_tokens, "outputTokens": r.output_tokens}
        for r in REQUESTS
    ]
    return json.dumps(rows, indent=1).encode()


def litellm_csv() -> bytes:
    names = [
        "request_id",
        "call_type",
        "startTime",
        "endTime",
        "prompt_tokens",
        "completion_tokens",
        "status",
        "cache_hit",
        "messages",
    ]
    rows: list[list[Any]] = [names]
    for k, r in enumerate(REQUESTS):
        start, end = date(r.at_s, "").replace("T", " "), date(r.at_s + r.took_s, "").replace("T", " ")
        rows.append(
            [
                f"c{k}",
                "acompletion",
                start,
                end,
                r.input_tokens,
                r.output_tokens,
                "success",
                "False",
                '[{"a": 1}]',
            ]
        )
    late = date(30.0, "").replace("T", " ")
    rows.append(["e", "aembedding", late, late, 40, 0, "success", "False", "{}"])
    rows.append(["f", "acompletion", late, late, 0, 0, "failure", "", "{}"])
    rows.append(["h", "acompletion", late, late, 40, 7, "success", "True", "{}"])
    return _csv(rows)


def langfuse_json() -> bytes:
    rows: list[dict[str, Any]] = [
        {
            "id": f"o{k}",
            "traceId": f"t{k}",
            "type": "GENERATION",
            "startTime": date(r.at_s),
            "endTime": date(r.at_s + r.took_s),
            "level": "DEFAULT",
            "usageDetails": {
                "input": r.input_tokens - 16,
                "input_cached_tokens": 16,
                "output": r.output_tokens,
                "total": 1,
            },
            "input": "do not keep",
        }
        for k, r in enumerate(REQUESTS)
    ]
    rows.append({"id": "s", "traceId": "t", "type": "SPAN", "startTime": date(3.0), "level": "DEFAULT"})
    rows.append({"id": "f", "traceId": "t", "type": "GENERATION", "startTime": date(3.0), "level": "ERROR"})
    return json.dumps({"data": rows, "meta": {"page": 1}}).encode()


def langfuse_csv() -> bytes:
    rows: list[list[Any]] = [["id", "trace_id", "type", "start_time", "level", "usage_details"]]
    for k, r in enumerate(REQUESTS):
        usage = json.dumps({"input": r.input_tokens, "output": r.output_tokens})
        rows.append([f"o{k}", "t", "GENERATION", date(r.at_s, "").replace("T", " "), "DEFAULT", usage])
    rows.append(["s", "t", "SPAN", date(9.0, "").replace("T", " "), "DEFAULT", "{}"])
    return _csv(rows)


def envoy_jsonl() -> bytes:
    rows = [
        {
            "start_time": date(r.at_s),
            "method": "POST",
            "x-envoy-origin-path": "/v1/chat/completions",
            "response_code": 200,
            "duration": int(1e3 * r.took_s),
            "gen_ai.request.model": "m",
            "gen_ai.usage.input_tokens": r.input_tokens,
            "gen_ai.usage.output_tokens": r.output_tokens,
        }
        for r in REQUESTS
    ]
    rows.append({**rows[0], "x-envoy-origin-path": "/v1/embeddings", "gen_ai.usage.output_tokens": None})
    rows.append({**rows[0], "response_code": 429, "gen_ai.usage.input_tokens": None})
    return b"".join(map(_line, rows))


def nginx_text() -> bytes:
    """The time is that of the end, in whole seconds; rt says how long it took."""
    lines = []
    for r in sorted(REQUESTS, key=lambda r: r.at_s + r.took_s):
        at = datetime.datetime.fromtimestamp(int(EPOCH_NS / 1e9 + r.at_s + r.took_s), datetime.UTC)
        lines.append(
            f'10.0.0.1 - - [{at:%d/%b/%Y:%H:%M:%S +0000}] "POST /v1/chat/completions HTTP/1.1" 200 512 "-" '
            f'"curl/8" rt={r.took_s:.3f} in={r.input_tokens} out={r.output_tokens}\n'
        )
    lines.append(lines[0].replace("/v1/chat/completions", "/health").replace("in=100 out=5", "in=- out=-"))
    return "".join(lines).encode()


def otlp_jsonl() -> bytes:
    spans = [
        {
            "traceId": f"{k:032x}",
            "spanId": f"{k:016x}",
            "name": "chat m",
            "startTimeUnixNano": str(ns(r.at_s)),
            "endTimeUnixNano": str(ns(r.at_s + r.took_s)),
            "attributes": [
                {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
                {"key": "gen_ai.request.model", "value": {"stringValue": "m"}},
                {"key": "gen_ai.usage.input_tokens", "value": {"intValue": str(r.input_tokens)}},
                {"key": "gen_ai.usage.output_tokens", "value": {"intValue": r.output_tokens}},
                {"key": "gen_ai.input.messages", "value": {"stringValue": "do not keep"}},
            ],
            "status": {},
        }
        for k, r in enumerate(REQUESTS, start=1)
    ]
    other = {"traceId": "00", "spanId": "aa", "name": "GET", "startTimeUnixNano": "1", "attributes": []}
    embedding = {
        **spans[0],
        "spanId": "bb",
        "attributes": [
            {"key": "gen_ai.operation.name", "value": {"stringValue": "embeddings"}},
            {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "9"}},
        ],
    }
    half = len(spans) // 2
    return b"".join(
        _line({"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": part}]}]})
        for part in ([other, *spans[:half]], [*spans[half:], embedding])
    )


def vllm_text() -> bytes:
    """At level DEBUG, chats with their answers; times in whole seconds."""
    lines = ["(APIServer pid=1) INFO 01-05 09:59:00 [v1/engine/async_llm.py:578] Started.\n"]
    for k, r in enumerate(REQUESTS):
        at = datetime.datetime.fromtimestamp(EPOCH_NS / 1e9 + r.at_s, datetime.UTC).strftime("%m-%d %H:%M:%S")
        start = f"(APIServer pid=1) DEBUG {at} [entrypoints/.../utils/request_logger.py:55]"
        info = start.replace("DEBUG", "INFO")
        ids, answer = list(range(3, 3 + r.input_tokens)), list(range(r.output_tokens))
        lines += [
            f"{start} Request chatcmpl-{k} details: prompt: 'do not, [1, 2] keep', prompt_token_ids: {ids}, "
            "prompt_embeds shape: None.\n",
            f"{info} Received request chatcmpl-{k}: params: SamplingParams(n=1, temperature=1.0, "
            "ignore_eos=False, "
            "max_tokens=900, min_tokens=0), lora_request: None.\n",
            f"{start} Generated response chatcmpl-{k} details: output_token_ids: {answer}\n",
            f"{info} Generated response chatcmpl-{k}: output: 'x', finish_reason: stop\n",
        ]
    return "".join(lines).encode()


SAMPLES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "gateway CSV": ("gateway.csv", gateway_csv),
    "end and duration": ("ended.csv", ended_csv),
    "gateway JSONL": ("gateway.jsonl", gateway_jsonl),
    "JSON list": ("list.json", gateway_list),
    "LiteLLM CSV": ("litellm.csv", litellm_csv),
    "Langfuse JSON": ("langfuse.json", langfuse_json),
    "Langfuse CSV": ("langfuse.csv", langfuse_csv),
    "Envoy JSON": ("envoy.jsonl", envoy_jsonl),
    "nginx text": ("access.log", nginx_text),
    "OTLP": ("spans.jsonl", otlp_jsonl),
    "vLLM": ("vllm.log", vllm_text),
}
WHOLE_SECONDS = ("nginx text", "vLLM")


def _csv(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
