"""planner/traffic/logs: every kind of log read back, what is left out of it, and no traceback for any "
"file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from log_samples import EPOCH_NS, REQUESTS, SAMPLES, WHOLE_SECONDS, date, ns

from planner.errors import InputError
from planner.traffic.frames import trace_of
from planner.traffic.logs import gather
from planner.traffic.logs.gather import FAILED, FROM_CACHE, HALVES, NO_TIME
from planner.traffic.logs.log_columns_map import parse_columns
from planner.traffic.logs.log_reading import LogOptions
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_files, read_trace
from planner.traffic.trace_rows import NO_OUTPUT
from planner.traffic.trace_writing import to_csv

Read = Callable[..., Trace]
BY_TIME = sorted(REQUESTS)
AT_S = np.array([one.at_s for one in BY_TIME])


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Writes `content` to a file and reads it."""

    def read_content(
        content: bytes | str, name: str = "log.csv", log_options: LogOptions | None = None, drop: bool = False
    ) -> Trace:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_trace(path, seed=None, log_options=log_options or LogOptions(), drop_invalid=drop)

    return read_content


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return list(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


# ---------------------------------------------------------------- every kind, read back


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_kind_of_log_is_told_and_read_back(read: Read, kind: str) -> None:
    """The 24 requests of the sample: lengths to the token, arrivals to the microsecond, or to the second
    where the log knows no more. Nothing else is in the trace.
    """
    name, make = SAMPLES[kind]
    trace = read(make(), name)
    assert sorted(lengths(trace)) == sorted((one.input_tokens, one.output_tokens) for one in REQUESTS)
    if kind in WHOLE_SECONDS:
        assert np.abs(trace.arrival_s - AT_S).max() <= 1.0
    else:
        assert trace.arrival_s == pytest.approx(AT_S - AT_S[0], abs=1e-6)
        assert lengths(trace) == [(one.input_tokens, one.output_tokens) for one in BY_TIME]


@pytest.mark.parametrize("kind", SAMPLES)
def test_what_was_read_is_written_and_read_again(read: Read, tmp_path: Path, kind: str) -> None:
    """-o trace.csv gives the same arrivals to the last bit, lengths and names."""
    name, make = SAMPLES[kind]
    first = read(make(), name)
    again = read("".join(to_csv(first)), "trace.csv")
    assert (again.arrival_s == first.arrival_s).all()
    assert lengths(again) == lengths(first)
    assert (again.tenants, again.llms, again.adapters) == (first.tenants, first.llms, first.adapters)


def test_a_prompt_may_be_as_long_as_a_line(read: Read) -> None:
    """150,000 characters, of some 37,000 tokens: more than Python's reader of CSV takes by default."""
    rows = "".join(f"{500 * k},{'x' * 150_000},37000,{9 + k}\n" for k in range(4))
    log = read("ts_ms,prompt,prompt_tokens,completion_tokens\n" + rows)
    assert lengths(log) == [(37000, 9 + k) for k in range(4)] and log.arrival_s[-1] == 1.5


@pytest.mark.parametrize("kind", SAMPLES)
def test_prompts_are_in_no_trace(read: Read, kind: str) -> None:
    name, make = SAMPLES[kind]
    assert "do not" not in repr(read(make(), name))


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("gateway CSV", {FAILED: 1}),
        ("LiteLLM CSV", {FAILED: 1, "embeddings": 1, FROM_CACHE: 1}),
        ("Langfuse JSON", {FAILED: 1, "other calls that generate no text": 1}),
        ("Langfuse CSV", {"other calls that generate no text": 1}),
        ("Envoy JSON", {FAILED: 1, "embeddings": 1}),
        ("nginx text", {"other calls that generate no text": 1}),
        ("OTLP", {"embeddings": 1}),
    ],
)
def test_what_is_no_request_for_text_is_counted_apart(
    read: Read, kind: str, left_out: dict[str, int]
) -> None:
    name, make = SAMPLES[kind]
    assert read(make(), name).dropped == left_out


def test_parquet_is_read_as_its_csv(read: Read, tmp_path: Path) -> None:
    """Timestamps of Arrow with a zone, whole numbers."""
    pytest.importorskip("pyarrow")
    table = pd.DataFrame(
        {
            "created_at": pd.to_datetime([ns(one.at_s) for one in REQUESTS], utc=True),
            "prompt_tokens": [one.input_tokens for one in REQUESTS],
            "completion_tokens": [one.output_tokens for one in REQUESTS],
        }
    )
    table.to_parquet(tmp_path / "log.parquet")
    trace = read_trace(tmp_path / "log.parquet", seed=None)
    assert trace.arrival_s == pytest.approx(AT_S - AT_S[0], abs=1e-9)
    assert lengths(trace) == [(one.input_tokens, one.output_tokens) for one in BY_TIME]


@pytest.mark.parametrize("dtype", ["float64", "Int64", "category"])
@pytest.mark.parametrize("clock", ["timestamp", "created_at"])
def test_parquet_with_a_number_missing_is_read_without_that_row(
    dtype: str, clock: str, tmp_path: Path
) -> None:
    """As a frame of pandas holds it: a failed request has no count of output tokens."""
    pytest.importorskip("pyarrow")
    table = pd.DataFrame({clock: [1.7e9 + k for k in range(3)], "input_tokens": [10, 20, 30]})
    table["output_tokens"], table["tenant"] = [1.0, None, 3.0], [7.0, None, 8.0]
    table.astype({"output_tokens": dtype, "tenant": dtype}).to_parquet(tmp_path / "log.parquet")
    trace = read_trace(tmp_path / "log.parquet", drop_invalid=True)
    assert lengths(trace) == [(10, 1), (30, 3)]
    assert trace.tenants == ("7", "8"), "gaps made 7.0 of the number 7"


def test_long_ids_beside_a_gap_stay_apart(tmp_path: Path) -> None:
    """As floats 10^18 + 1 and 10^18 + 2 are equal, and two requests were counted as one."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "created_at": pa.array([1_700_000_000 + k for k in range(3)]),
        "prompt_tokens": [10, 20, 30],
        "completion_tokens": [1, 2, 3],
        "request_id": pa.array([10**18 + 1, 10**18 + 2, None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    assert lengths(read_trace(tmp_path / "log.parquet")) == [(10, 1), (20, 2), (30, 3)]


def test_an_id_is_no_time(tmp_path: Path) -> None:
    """10^18 + k are also ns since 1970: requests 10 s apart arrived within 2 ns."""
    rows = [
        {
            "ts": f"2026-11-02T08:00:{k}0Z",
            "request_id": 10**18 + k,
            "prompt_tokens": 9,
            "completion_tokens": 1,
        }
        for k in range(3)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_trace(tmp_path / "log.jsonl", seed=None).duration_s == 20.0


def test_parquet_with_damaged_notes_of_pandas_is_read(tmp_path: Path) -> None:
    """They stand in the file beside its columns, and say nothing that the columns do not."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"timestamp": [1.7e9, 1.7e9 + 1], "input_tokens": [10, 20], "output_tokens": [1, 2]}
    notes = {b"pandas": b'{"columns": [{"name": "timestamp"}], "index_columns": []}'}
    pq.write_table(pa.table(columns).replace_schema_metadata(notes), tmp_path / "log.parquet")
    assert lengths(read_trace(tmp_path / "log.parquet")) == [(10, 1), (20, 2)]


def test_a_packed_log_and_two_logs_of_one_clock(tmp_path: Path) -> None:
    """The second file begins where the first ends; together they are the sample."""
    header, *rows = SAMPLES["gateway CSV"][1]().splitlines(keepends=True)
    (tmp_path / "a.csv").write_bytes(header + b"".join(rows[:10]))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(header + b"".join(rows[10:])))
    found = read_files([tmp_path / "b.csv.gz", tmp_path / "a.csv"], seed=None)
    assert found.trace.arrival_s == pytest.approx(AT_S - AT_S[0], abs=1e-6)
    assert found.trace.name == "b.csv.gz and 1 more"


# ---------------------------------------------------------------- requests in several rows


def test_halves_of_a_stream_and_retries_are_one_request(read: Read) -> None:
    """a: begun and ended in two rows; b: told twice; c: once. Three requests, two further rows."""
    trace = read(
        "request_id,created_at,prompt_tokens,completion_tokens\n"
        f"a,{date(0)},7,\na,{date(1)},7,5\nb,{date(2)},8,6\nb,{date(3)},8,6\nc,{date(4)},9,7\n"
    )
    assert lengths(trace) == [(7, 5), (8, 6), (9, 7)]
    assert trace.dropped == {HALVES: 2}


def test_the_share_of_failures_is_of_requests_however_many_rows_each_has(read: Read) -> None:
    """a and b: two rows each; c: failed, then served; d: failed three times. One of four requests failed, and
    five rows are further ones of a, b, c and d. By rows it was 4 of 9.
    """
    rows = [("a", 200), ("a", 200), ("b", 200), ("b", 200), ("c", 500), ("c", 200)] + [("d", 500)] * 3
    text = "request_id,created_at,prompt_tokens,completion_tokens,status\n" + "".join(
        f"{name},{date(k)},5,4,{status}\n" for k, (name, status) in enumerate(rows)
    )
    with pytest.raises(InputError, match=r"1 of 4 requests \(25.0 %\) .*: 1 failed requests"):
        read(text)
    trace = read(text, drop=True)
    assert len(trace) == 3 and trace.dropped == {FAILED: 1, HALVES: 5}


@pytest.mark.parametrize("user", ["John Doe", '"John Doe"', "", "a [b] c"])
def test_a_user_of_an_access_log_may_have_spaces(read: Read, user: str) -> None:
    """Fields were counted from the wrong place: the request was read as the status."""
    content = SAMPLES["nginx text"][1]().decode()
    assert content.count("10.0.0.1 - - [") == content.count("\n")
    text = content.replace("10.0.0.1 - - [", f"10.0.0.1 - {user} [", 1).replace(
        "10.0.0.1 - - [", "10.0.0.1 -  [", 1
    )
    plain = read(content, "access.log")
    found = read(text, "access.log")
    assert lengths(found) == lengths(plain) and found.arrival_s.tolist() == plain.arrival_s.tolist()


def test_a_request_without_a_time_is_left_out(read: Read) -> None:
    """One null among thousands of rows refused the whole log, and nothing named a remedy."""
    rows = [f'{{"created_at": "{date(k)}", "prompt_tokens": 5, "completion_tokens": 4}}' for k in range(8)]
    rows[3] = '{"created_at": null, "prompt_tokens": 5, "completion_tokens": 4}'
    trace = read("\n".join(rows), "log.jsonl")
    assert len(trace) == 7 and trace.dropped == {NO_TIME: 1}
    assert "1 of 8 requests (12.5 %) are left out" in trace.warnings[0]


def test_the_id_of_an_answer_tells_rows_that_are_there_twice(read: Read) -> None:
    """A proxy's log whose rows were exported twice had twice the requests. Other ids may be of users."""
    rows = [f"{date(k)},5,4,ID-{k % 3}\n" for k in range(6)]
    log = "created_at,prompt_tokens,completion_tokens,id\n" + "".join(rows)
    assert len(read(log.replace("ID", "chatcmpl"))) == 3 and len(read(log)) == 6


def test_an_answer_that_never_came_is_no_request(read: Read) -> None:
    """One of six has no output: 16.7 %, said first."""
    rows = "".join(f"{date(k)},5,{'' if k == 3 else 4}\n" for k in range(6))
    trace = read("created_at,prompt_tokens,completion_tokens\n" + rows)
    assert trace.dropped == {NO_OUTPUT: 1}
    assert "1 of 6 requests (16.7 %) are left out" in trace.warnings[0]


def test_more_failures_than_a_fifth_are_refused_unless_asked(read: Read) -> None:
    rows = "".join(f"{date(k)},5,4,{500 if k % 2 else 200}\n" for k in range(6))
    text = "created_at,prompt_tokens,completion_tokens,status\n" + rows
    with pytest.raises(InputError, match=r"3 of 6 requests \(50.0 %\) .*--drop-invalid"):
        read(text)
    assert len(read(text, drop=True)) == 3


def test_spans_within_spans_are_one_request(read: Read) -> None:
    """A gateway's span, an HTTP call within it, and the engine's span in that: the engine's counts."""
    tokens = [
        {"key": f"gen_ai.usage.{side}", "value": {"intValue": "5"}}
        for side in ("prompt_tokens", "completion_tokens")
    ]
    spans = [
        {"spanId": "01", "startTimeUnixNano": str(ns(0)), "attributes": tokens},
        {"spanId": "02", "parentSpanId": "01", "startTimeUnixNano": str(ns(1)), "attributes": []},
        {"spanId": "03", "parentSpanId": "02", "startTimeUnixNano": str(ns(2)), "attributes": tokens},
        {"spanId": "04", "startTimeUnixNano": str(ns(5)), "attributes": tokens},
    ]
    document = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    for text in (json.dumps(document), json.dumps(document, indent=2)):
        trace = read(text, "spans.json")
        assert trace.arrival_s.tolist() == [0.0, 3.0]
        assert trace.tenants == trace.llms == (), "spans without a user had one tenant, without a name"


def test_names_in_a_trace_are_hashed_with_a_salt(read: Read) -> None:
    text = "timestamp,input_tokens,output_tokens,tenant\n1,5,4,ann\n2,5,4,bob\n3,5,4,ann\n"
    hashed = read(text, log_options=LogOptions(salt=b"1"))
    assert len({*hashed.tenants, "ann", "bob"}) == 4 and hashed.tenant.tolist() == [0, 1, 0]


def test_ids_are_hashed_with_a_salt(read: Read) -> None:
    """Equal names stay equal, another salt gives other hashes; keys of an API are hashed in any case."""
    text = "created_at,prompt_tokens,completion_tokens,tenant\n" + "".join(
        f"{date(k)},5,4,{'ann' if k % 2 else 'bob'}\n" for k in range(4)
    )
    one, two = (read(text, log_options=LogOptions(salt=salt)) for salt in (b"1", b"2"))
    assert read(text).tenants == ("bob", "ann")
    assert one.tenant.tolist() == [0, 1, 0, 1]
    assert len({*one.tenants, *two.tenants, "ann", "bob"}) == 6
    keys = parse_columns("arrival=created_at,input=prompt_tokens,output=completion_tokens,tenant=api_key")
    assert "ann" not in read(text.replace("tenant", "api_key"), log_options=LogOptions(keys)).tenants


# ---------------------------------------------------------------- vLLM's log


def test_a_log_of_vllm_without_lengths_says_how_to_have_them(read: Read) -> None:
    lines = [line for line in SAMPLES["vLLM"][1]().splitlines(keepends=True) if b"DEBUG" not in line]
    with pytest.raises(
        InputError, match=r"tells when 24 requests came, but not how long .*VLLM_LOGGING_LEVEL=DEBUG"
    ):
        read(b"".join(lines), "vllm.log")


def test_a_log_of_vllm_that_is_cut_is_refused(read: Read) -> None:
    """--max-log-len 16 keeps 16 characters and 16 ids of each prompt."""
    lines = [
        f"DEBUG 01-05 10:00:0{k} [logger.py:1] Request cmpl-{k} details: prompt: '{'a' * 16}', "
        "prompt_token_ids: "
        f"{[5] * 16}, prompt_embeds shape: None.\n"
        for k in range(4)
    ]
    with pytest.raises(InputError, match=r"4 prompts are cut at 16 characters .*--max-log-len"):
        read("".join(lines), "vllm.log")


def test_a_log_of_vllm_over_new_year_goes_on(read: Read) -> None:
    """23:59:59 on the last day of December to 00:00:01: two seconds."""
    line = (
        "INFO {} [logger.py:39] Received request cmpl-{}: prompt: 'x', params: SamplingParams(n=1, "
        "max_tokens=7, "
        "ignore_eos=True), prompt_token_ids: [1, 2, 3], lora_request: None.\n"
    )
    trace = read(line.format("12-31 23:59:59", 1) + line.format("01-01 00:00:01", 2), "vllm.log")
    assert (trace.arrival_s.tolist(), lengths(trace)) == ([0.0, 2.0], [(3, 7), (3, 7)])


@pytest.mark.parametrize(("before", "after"), [("12-31", "01-01"), ("02-28", "03-01"), ("02-29", "03-01")])
def test_lines_of_vllm_in_the_wrong_order_at_midnight_stay_in_their_days(
    read: Read, before: str, after: str
) -> None:
    """23:59:58, 00:00:01, 23:59:59, 00:00:02, as two processes write them: 0, 1, 3 and 4 s."""
    line = (
        "INFO {} [logger.py:39] Received request cmpl-{}: prompt: 'x', params: SamplingParams(n=1, "
        "max_tokens=7, "
        "ignore_eos=True), prompt_token_ids: [1, 2, 3], lora_request: None.\n"
    )
    times = (f"{before} 23:59:58", f"{after} 00:00:01", f"{before} 23:59:59", f"{after} 00:00:02")
    trace = read("".join(line.format(each, number) for number, each in enumerate(times)), "vllm.log")
    assert trace.arrival_s.tolist() == [0.0, 1.0, 3.0, 4.0]


def test_fields_of_an_access_log_without_names_are_mapped_by_number(read: Read) -> None:
    """36 s less 1.25 s to 38 s less 0.25 s: 3 s. Without a map the line says that it is not known."""
    line = '10.0.0.1 - - [10/Oct/2026:13:55:{} +0200] "POST /v1/{} HTTP/1.1" 200 5 "-" "curl" {} {} {}\n'
    text = (
        line.format(36, "chat/completions", 1.25, 100, 20)
        + line.format(38, "completions", 0.25, 110, 21)
        + line.format(39, "embeddings", 0.25, 110, "-")
    )
    how = LogOptions(parse_columns("end=time_local,duration=10:s,input=11,output=12,kind=path"))
    trace = read(text, "access.log", how)
    assert (trace.arrival_s.tolist(), lengths(trace)) == ([0.0, 3.0], [(100, 20), (110, 21)])
    assert trace.dropped == {"embeddings": 1}
    with pytest.raises(InputError, match="time_local is when requests ended"):
        read(text, "access.log")


def test_json_lines_of_vllm_are_read(read: Read) -> None:
    """With milliseconds and a year; a gateway's JSON lines with asctime and message are none of vLLM's."""
    line = {
        "asctime": "2026-01-05 10:00:00,250",
        "levelname": "DEBUG",
        "name": "vllm.entrypoints",
        "message": "",
    }
    said = (
        "Request chatcmpl-1 details: prompt: 'a \"b\"', prompt_token_ids: [1, 2, 3], prompt_embeds shape: "
        "None.",
        "Generated response chatcmpl-1 details: output_token_ids: [7, 8]",
    )
    log = "".join(json.dumps({**line, "message": one}) + "\n" for one in said)
    assert lengths(read(log, "vllm.jsonl")) == [(3, 2)]
    other = {**line, "name": "gateway", "message": "done", "prompt_tokens": 5, "completion_tokens": 4}
    other["created_at"] = "2026-01-05T10:00:00Z"
    assert lengths(read(json.dumps(other) + "\n", "gateway.jsonl")) == [(5, 4)]


def test_a_table_in_memory_is_read_as_its_file() -> None:
    table = pd.DataFrame(
        {
            "created_at": pd.to_datetime([ns(one.at_s) for one in REQUESTS], utc=True),
            "prompt_tokens": [one.input_tokens for one in REQUESTS],
            "completion_tokens": [one.output_tokens for one in REQUESTS],
            "hash_ids": [[1]] * len(REQUESTS),
        }
    )
    trace = trace_of(table)
    assert lengths(trace) == [(one.input_tokens, one.output_tokens) for one in BY_TIME]
    assert trace.notes[1].startswith("not read from a log: hash_ids")


DATA = Path(__file__).parents[1] / "data"
REAL = [(12, 5), (40, 3), (7, 1), (21, 6), (9, 4), (5, 3), (6, 3), (30, 8), (15, 7), (6, 2), (50, 9), (8, 6)]


def test_what_vllm_wrote_is_read() -> None:
    """vLLM 0.32 on a CPU, asked for these lengths (the eighth and the last for two answers of half), one
    request aborted and one refused; its log at level DEBUG, and its spans as a collector's file exporter
    writes them.
    """
    log = read_trace(DATA / "vllm_requests.log", seed=None)
    spans = read_trace(DATA / "vllm_spans.jsonl", seed=None)
    assert lengths(log) == lengths(spans) == REAL
    assert log.dropped == {FAILED: 1}
    assert np.abs(log.arrival_s - spans.arrival_s).max() <= 1.0  # the log has whole seconds
    assert "7 answers are not in the log" in log.notes[0]


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "start_time,end_time,num_model_requests,input_tokens,output_tokens\n1767607200,1767610800,9,900,90\n",
            "rows are sums of many requests",
        ),
        (
            "created_at,tokens\n2026-01-05T10:00:00Z,5\n",
            "no column could be read as input; no column could be read as output",
        ),
        (f"created_at,prompt_tokens,completion_tokens\n{date(0)},5,-3\n", "line 2, column completion_tokens"),
        (
            f"created_at,prompt_tokens,completion_tokens\n{date(0)},5,3\n{date(1, '')},5,3\n",
            "with a zone as before",
        ),
        (f"created_at,prompt_tokens,completion_tokens\n{date(0)},5,3,8\n", "more than the 3 fields"),
        (
            f"created_at,prompt_tokens,completion_tokens,status\n{date(0)},5,3,200\n{date(1)},5,3,9 lives\n",
            "lives",
        ),
        (
            "created_at,prompt_tokens,completion_tokens\n1767607200,5,3\n1767607201000,5,3\n",
            "line 3, column created_at: expected a time in s since 1970",
        ),
        (
            "arrival,prompt_tokens,completion_tokens\n5,5,3\n15,5,3\n",
            "counts from 5, in s, ms, us or ns; say which",
        ),
        (
            "finished_at,prompt_tokens,completion_tokens\n1767607200,5,3\n",
            "finished_at is when requests ended",
        ),
        (
            "finished_at,prompt_tokens,completion_tokens,latency\n1767607200,5,3,900\n",
            "latency has no unit; .*duration=latency:ms",
        ),
        (
            "created_at,prompt_tokens,input_tokens,completion_tokens\n1767607200,5,4,3\n",
            "prompt_tokens and input_tokens may both be input tokens",
        ),
        ("at,prompt_tokens,completion_tokens\n05/06/2026 10:00,5,3\n", "at holds dates; swap %d and %m"),
    ],
)
def test_what_is_not_certain_ends_in_one_line(read: Read, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(text)
    assert "\n" not in str(caught.value)


def test_a_gap_of_years_is_said(read: Read) -> None:
    """One digit of a year is wrong."""
    rows = "".join(f"{date(k) if k < 29 else '2029-01-05T10:00:00Z'},5,4\n" for k in range(30))
    assert "nothing arrives for" in read("created_at,prompt_tokens,completion_tokens\n" + rows).warnings[0]


def test_more_rows_than_are_read_are_refused(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    name, make = SAMPLES["vLLM"]
    monkeypatch.setattr(gather, "MAX_REQUESTS", 5)
    with pytest.raises(InputError, match=r"line \d+: at most 5 requests are read, .* take fewer days of it"):
        read(make(), name)


# ---------------------------------------------------------------- mutations


def mutated(rng: np.random.Generator, content: bytes) -> bytes:
    """One to three random edits: bytes changed, taken out, doubled; digits changed; lines swapped, cut."""
    raw = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, max(len(raw), 1)))
        edit = int(rng.integers(0, 8))
        if edit == 0:
            raw[at : at + 1] = bytes([int(rng.integers(0, 256))])
        elif edit == 1:
            raw[at : at + int(rng.integers(1, 20))] = b""
        elif edit == 2:
            raw[at:at] = bytes(
                rng.choice(list(b'",{}[]:-+.eE0123456789 \nTZ\\'), int(rng.integers(1, 6))).astype(np.uint8)
            )
        elif edit == 3:
            raw[at:at] = raw[at : at + int(rng.integers(1, 200))]
        elif edit == 4:
            del raw[at:]
        elif edit < 7:
            digits = [place for place, byte in enumerate(raw) if 48 <= byte < 58]
            if digits:
                raw[int(rng.choice(digits))] = int(rng.integers(48, 58))
        else:
            lines = bytes(raw).split(b"\n")
            rng.shuffle(lines)
            raw = bytearray(b"\n".join(lines))
    return bytes(raw)


def check_mutations(tmp_path: Path, kind: str, count: int) -> None:
    """Each ends in a trace whose times are within what its dates can mean, or in one line."""
    name, make = SAMPLES[kind]
    content, path = make(), tmp_path / name
    read = 0
    for seed in range(count):
        path.write_bytes(mutated(np.random.default_rng(seed), content))
        try:
            trace = read_trace(path, seed=None, drop_invalid=True)
        except InputError as error:
            assert "\n" not in str(error)
            assert str(error).startswith(str(path)) or name in str(error)
        else:
            read += 1
            # intact rows are within 13 s; a unit misread is a factor of 1000, a wrong date a single row
            middle_s = np.diff(np.percentile(trace.arrival_s, [25, 75]))
            assert len(trace) < 12 or 1.0 < float(middle_s[0]) < 60.0
            assert np.median(trace.input_tokens) <= 400 or len(trace) < 12
    assert read > count / 20  # some edits do no harm


@pytest.mark.long
@pytest.mark.parametrize("kind", SAMPLES)
def test_mutated_logs_end_in_a_trace_or_one_line(tmp_path: Path, kind: str) -> None:
    check_mutations(tmp_path, kind, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLES)
def test_300_mutated_logs_end_in_a_trace_or_one_line(tmp_path: Path, kind: str) -> None:
    check_mutations(tmp_path, kind, 300)


def test_the_sample_begins_when_it_says() -> None:
    """2026-01-05 is 20458 days after 1970, and 10 h."""
    assert EPOCH_NS == (20458 * 24 + 10) * 3600 * 10**9


@pytest.mark.parametrize(
    "rows",
    [
        '2026-03-02T08:00:00Z,"1,096",200\n2026-03-02T08:00:01Z,96,"1,200"\n',
        "2026-03-02T08:00:00Z|1,096|200\n2026-03-02T08:00:01Z|96|1,200\n",
        "2026-03-02T08:00:00Z;1.096;200\n2026-03-02T08:00:01Z;96;1.200\n",
        "2026-03-02T08:00:00Z\t1 096\t200\n2026-03-02T08:00:01Z\t96\t1 200\n",
    ],
)
def test_thousands_separators_that_leave_no_doubt_are_read(tmp_path: Path, rows: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text("time,prompt_tokens,completion_tokens\n".replace(",", rows[20]) + rows)
    trace = read_trace(path, seed=None, log_options=LogOptions())
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([1096, 96], [200, 1200])
    assert "line 2, column prompt_tokens: is read as 1096" in trace.warnings[0]


def test_thousands_separators_in_some_rows_are_refused_with_what_to_write(tmp_path: Path) -> None:
    """1,096 beside 2048: whoever writes the one does not write the other."""
    path = tmp_path / "log.csv"
    rows = '2026-03-02T08:00:00Z,"1,096",200\n2026-03-02T08:00:01Z,2048,200\n' * 2
    path.write_text(f"time,prompt_tokens,completion_tokens\n{rows}")
    with pytest.raises(
        InputError, match=r"prompt_tokens.* may hold thousands separators: write 1096"
    ) as error:
        read_trace(path, seed=None, log_options=LogOptions(), drop_invalid=False)
    assert "--map" not in str(error.value)
