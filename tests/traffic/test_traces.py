"""planner/traffic/trace_reading.py: each format by hand, write-then-read, no traceback whatever the file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from planner.errors import InputError, PlannerError, TraceError
from planner.files import checked_files
from planner.traffic import trace_rows
from planner.traffic.trace import Trace, spread_stamps
from planner.traffic.trace_reading import read_trace
from planner.traffic.trace_rows import BLANK, NO_INPUT, NO_OUTPUT, clock_quantum_s
from planner.traffic.trace_writing import to_csv, to_jsonl

SHARED = Path(__file__).parents[3] / "shared" / "data" / "traces"
REQUESTS_HEADER = (
    "request_id,arrival_s,input_tokens,output_tokens,cached_tokens,prefill_worker,decode_worker,queue_s,ttft_s,"
    "tpot_s,tbt_max_s,e2e_s,preemptions,status"
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
Read = Callable[..., Trace]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Writes `content` to a file and reads it as a trace."""
    folder = tmp_path_factory.mktemp("traces")

    def read_content(
        content: str | bytes, name: str = "t.csv", seed: int = 0, *, drop_invalid: bool = False
    ) -> Trace:
        path = folder / name
        raw = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return read_trace(path, seed=seed, drop_invalid=drop_invalid)

    return read_content


def columns(trace: Trace) -> list[list[float]]:
    return [trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist()]


def prefixes(trace: Trace) -> list[list[int]]:
    return [part.tolist() for part in np.split(trace.prefix_ids, trace.prefix_offsets[1:-1])]


# ---------------------------------------------------------------- the formats, by hand


def test_azure_2023_keeps_seven_digits_of_a_second(read: Read) -> None:
    """.0319601 - .9799600 of the second before = 0.0520001 s; CRLF, and no line end after the last row."""
    trace = read(AZURE + "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319601,3180,8")
    assert columns(trace) == [[0.0, 0.0520001], [4808, 3180], [10, 8]]
    assert (trace.name, trace.dropped, trace.notes, trace.has_prefixes) == ("t.csv", {}, (), False)


def test_azure_2024_has_time_zones_and_sometimes_no_fraction(read: Read) -> None:
    """01:00:02 at +01:00 is 00:00:02 UTC, 2 - 0.00993 = 1.99007 s after the first."""
    trace = read(
        AZURE
        + "2024-05-10 00:00:00.009930+00:00,100,5\n"
        + "2024-05-10 00:00:01+00:00,7,5\n"
        + "2024-05-10 01:00:02+01:00,8,6\n"
    )
    assert columns(trace) == [[0.0, 0.99007, 1.99007], [100, 7, 8], [5, 5, 6]]


def test_mooncake_counts_milliseconds_and_blocks_of_512(read: Read) -> None:
    """27 ms is 0.027 s. 600 tokens fill two blocks, 1000 also two."""
    trace = read(
        '{"timestamp": 10, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
        '{"timestamp": 37, "input_length": 1000, "output_length": 6, "hash_ids": [0, 2]}\n',
        name="t.jsonl.gz",
    )
    assert columns(trace) == [[0.0, 0.027], [600, 1000], [5, 6]]
    assert (prefixes(trace), trace.prefix_block_tokens, trace.notes) == ([[0, 1], [0, 2]], 512, ())
    assert trace.name == "t.jsonl"


def test_bailian_counts_seconds_and_blocks_of_16(read: Read) -> None:
    """The same keys as Mooncake's, told apart by chat_id."""
    trace = read(
        '{"chat_id": 1, "timestamp": 61.5, "input_length": 20, "output_length": 5, "hash_ids": [7, 8]}\n'
        '{"chat_id": 2, "timestamp": 62.0, "input_length": 16, "output_length": 5, "hash_ids": [7]}\n'
    )
    assert trace.arrival_s.tolist() == [0.0, 0.5]
    assert (prefixes(trace), trace.prefix_block_tokens) == ([[7, 8], [7]], 16)


def test_burstgpt_is_read_by_column_name_and_drops_failures(read: Read) -> None:
    """Six rows: two failed (0 response tokens, one of them without a request too), one had no input."""
    trace = read(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "100.0,,3.5,ChatGPT,472,18,490,API log\n"
        "103.5,a,0.1,ChatGPT,300,0,300,Conversation log\n"
        "104,b,1.0,GPT-4,0,0,0,API log\n"
        "105,b,1.0,GPT-4,0,9,9,API log\n"
        "107.25,c,9.9,ChatGPT,1087,230,1317,API log\n"
        "110,c,9.9,GPT-4,10,23,33,API log\n",
        drop_invalid=True,
    )
    assert columns(trace) == [[0.0, 7.25, 10.0], [472, 1087, 10], [18, 230, 23]]
    assert trace.dropped == {NO_INPUT: 1, NO_OUTPUT: 2}
    assert trace.notes == ("requests to 2 LLMs taken as one: 'ChatGPT' 66.7 %, 'GPT-4' 33.3 %",)


def test_our_own_requests_csv_is_replayed_to_the_last_bit(read: Read) -> None:
    """0.1 + 0.2 is 0.30000000000000004, and the first arrival is not moved to 0."""
    arrival_s = [0.1 + 0.2, 1 / 3 + 1, 1e3 / 7]
    rows = [f"{i},{at!r},10,2,0,p0,d1,0,0.1,0.02,0.03,1.5,0,ok" for i, at in enumerate(arrival_s)]
    assert columns(read("\n".join([REQUESTS_HEADER, *rows]))) == [arrival_s, [10] * 3, [2] * 3]


def test_generic_traces_may_name_tenants_and_prefixes(read: Read) -> None:
    """A numeric timestamp is in seconds and starts at 0; 12 tokens fill one block of 512."""
    csv = read(
        "timestamp,input_tokens,output_tokens,tenant,hash_ids\n5,12,3,b,[4]\n6.5,600,3,a,4 9\n7,1,1,b,\n"
    )
    jsonl = read(
        '{"timestamp": 5, "input_tokens": 12, "output_tokens": 3, "tenant": "b", "hash_ids": [4]}\n'
        '{"timestamp": 6.5, "input_tokens": 600, "output_tokens": 3, "tenant": "a", "hash_ids": [4, 9]}\n'
        '{"timestamp": 7, "input_tokens": 1, "output_tokens": 1, "tenant": "b"}\n'
    )
    for trace in (csv, jsonl):
        assert columns(trace) == [[0.0, 1.5, 2.0], [12, 600, 1], [3, 3, 1]]
        assert (trace.tenant.tolist(), trace.tenants) == ([0, 1, 0], ("b", "a"))
        assert prefixes(trace) == [[4], [4, 9], []]


def test_a_generic_timestamp_may_be_a_date(read: Read) -> None:
    """12:00:00.269 Z to 14:00:01.269 +02:00 is one second."""
    trace = read(
        "timestamp,input_tokens,output_tokens\n2024-10-15T12:00:00.269Z,1,1\n2024-10-15T14:00:01.269+02:00,1,1"
    )
    assert trace.arrival_s.tolist() == [0.0, 1.0]


def test_hash_ids_beyond_the_input_are_left_out_with_a_note(read: Read) -> None:
    """513 tokens fill two blocks of 512; the third id has no tokens."""
    trace = read(
        '{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 9, "input_length": 513, "output_length": 5, "hash_ids": [1, 4]}\n'
    )
    assert prefixes(trace) == [[1, 2], [1, 4]]
    assert trace.notes[0].startswith("1 request had more hash ids than blocks of 512 tokens")


def test_hashes_longer_than_64_bits_become_small_numbers(read: Read) -> None:
    """Only which ids are equal matters: 2^70, 5 and 2^70 again are 0, 1, 0."""
    trace = read(
        f'{{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [{2**70}, 5]}}\n'
        f'{{"timestamp": 9, "input_length": 513, "output_length": 5, "hash_ids": [{2**70}]}}\n'
    )
    assert prefixes(trace) == [[0, 1], [0]]


def test_one_request_is_a_trace_without_a_rate(read: Read) -> None:
    """Duration 0, so requests / duration is undefined: NaN."""
    trace = read("arrival_s,input_tokens,output_tokens\n3,1,1\n")
    assert (len(trace), trace.duration_s, np.isnan(trace.rate_rps)) == (1, 0.0, True)


def test_byte_order_mark_blank_lines_and_case_do_not_matter(read: Read) -> None:
    """The blank line in the middle is counted, the one before the header is not a row."""
    trace = read("\ufeff\nArrival_S, Input_Tokens ,OUTPUT_TOKENS\n0,1,2\n\n1,3,4\n")
    assert columns(trace) == [[0.0, 1.0], [1, 3], [2, 4]]
    assert trace.dropped == {BLANK: 1}


# ---------------------------------------------------------------- coarse clocks and order


def quantised(step_ms: int, stamps: int, per_stamp: int) -> str:
    """Rows of Mooncake's clock: every `step_ms`, some stamps 1 ms early as in the published trace."""
    at_ms = [i * step_ms - (i % 3 == 2) for i in range(stamps) for _ in range(per_stamp)]
    row = '{{"timestamp": {}, "input_length": {}, "output_length": 1}}\n'
    return "".join(row.format(ms, i + 1) for i, ms in enumerate(at_ms))


def test_three_second_stamps_are_spread_within_three_seconds(read: Read) -> None:
    """Row i has the stamp 3 * (i // 10) s: it arrives there up to 3 s later, and rows keep their order."""
    trace = read(quantised(3000, stamps=40, per_stamp=10))
    stamp_s = 3.0 * (np.arange(400) // 10)
    first_s = 0.3  # the first row is moved to 0 after the jitter, about 3 s / 11 for the smallest of ten
    assert ((trace.arrival_s >= stamp_s - 2 * first_s) & (trace.arrival_s <= stamp_s + 3.0)).all()
    assert trace.input_tokens.tolist() == list(range(1, 401))
    assert len(np.unique(trace.arrival_s)) == 400
    assert trace.notes == (
        "3 s quantised stamps: uniform jitter of 0 to 3 s (seed 0), rows kept in their order",
    )


def test_spread_stamps_begin_where_they_did() -> None:
    """An LLM whose first row of the file is at 100 s. It was moved to 0, beside the others' first rows."""
    late = Trace("t", np.array([100.0, 100, 101]), np.full(3, 9), np.full(3, 9), coarse_s=1.0)
    assert spread_stamps(late, seed=0).arrival_s[0] == 100


def test_jitter_follows_the_seed(read: Read) -> None:
    """Equal seeds, equal arrivals."""
    text = quantised(3000, stamps=20, per_stamp=5)
    assert (read(text, seed=1).arrival_s == read(text, seed=1).arrival_s).all()
    assert (read(text, seed=1).arrival_s != read(text, seed=2).arrival_s).any()


def test_a_fine_clock_is_not_touched(read: Read) -> None:
    """Arrivals at random milliseconds share few stamps: what the file says stays."""
    at_ms = np.sort(np.random.default_rng(0).integers(0, 60_000, 300))
    at_ms[0] = 0
    row = '{{"timestamp": {}, "input_length": 1, "output_length": 1}}\n'
    trace = read("".join(row.format(ms) for ms in at_ms))
    assert trace.arrival_s.tolist() == (at_ms / 1000).tolist()
    assert trace.notes == ()


def test_bursts_at_odd_times_are_not_a_quantised_clock() -> None:
    """Ten requests at once, at times without a common step."""
    stamps_s = np.cumsum(np.random.default_rng(0).exponential(3.0, 50))
    assert clock_quantum_s(np.repeat(stamps_s, 10)) is None
    assert clock_quantum_s(np.repeat(np.arange(50) * 3.0, 10)) == 3.0
    assert clock_quantum_s(np.repeat(np.arange(2000) * 0.33367, 3)) == 0.33367


def dated(seconds: list[int]) -> str:
    stamps = (f"2023-11-16 18:{s // 60:02d}:{s % 60:02d}.0000000,{s + 1},1\r\n" for s in seconds)
    return AZURE + "".join(stamps)


def test_a_few_late_rows_are_sorted_and_said_so(read: Read) -> None:
    """One of 200 rows is late: 0.5 %, below 1 %."""
    seconds = list(range(200))
    seconds[7], seconds[8] = 8, 7
    trace = read(dated(seconds))
    assert trace.arrival_s.tolist() == list(range(200))
    assert trace.input_tokens.tolist() == list(range(1, 201))
    assert trace.notes == ("1 of 200 rows out of order: sorted by arrival",)


def test_many_late_rows_are_refused(read: Read) -> None:
    """Two of 200 rows are late: 1 % is too many."""
    seconds = list(range(200))
    seconds[7], seconds[8], seconds[50], seconds[51] = 8, 7, 51, 50
    with pytest.raises(TraceError, match=r"2 of 200 rows are out of order.*sort the file by TIMESTAMP"):
        read(dated(seconds))


@pytest.mark.parametrize("starts", [0, 30])
def test_a_clock_that_starts_again_once_goes_on(read: Read, starts: int) -> None:
    """Two logs of 5000 s in one file, each from (near) 0 as RAGPulse's two weeks: 10000 s, not one log of
    twice the rate, and the note says where.
    """
    first, second = range(20, 5001, 20), range(starts, 5001, 20)
    trace = read(REQUESTS + "".join(f"{s},8,2\n" for s in (*first, *second)))
    assert trace.duration_s == 5000 - 20 + second[-1] - starts
    assert trace.arrival_s[len(first) - 1] == trace.arrival_s[len(first)]
    note = trace.warnings[0]
    assert f"the clock starts again once, from 5000 to {starts}: the 250 requests before" in note


@pytest.mark.parametrize(
    "rows",
    [
        [*range(50), *range(50), *range(50)],  # twice again
        [*range(50), *range(20, 70)],  # from the middle: another machine's log, perhaps
        [1_700_000_000 + s for s in (*range(50), *range(50))],  # counts from 1970, which comes but once
    ],
)
def test_other_steps_back_are_refused(read: Read, rows: list[int]) -> None:
    with pytest.raises(
        TraceError, match=r"are out of order, .* \(the clock steps back [12] times\); sort the"
    ):
        read(REQUESTS + "".join(f"{s},8,2\n" for s in rows))


# ---------------------------------------------------------------- quotes

PROMPTS = "timestamp,prompt,input_tokens,output_tokens\n"
REQUESTS = "timestamp,input_tokens,output_tokens\n"


def prompts(**texts: str) -> str:
    """Thirty rows, some with a prompt of their own."""
    return PROMPTS + "".join(f"{i},{texts.get(f'p{i}', f'text {i}')},200,20\n" for i in range(30))


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"p3": '"he said', "p20": '"she said'}, "closed in line 22, where its field goes on"),
        ({"p3": '"he said', "p20": 'she said"'}, "closed in line 22, and 18 of these lines read as rows"),
        ({"p3": '"he said', "p4": 'she said"'}, "closed in line 6, and 2 of these lines read as rows"),
        ({"p3": '"he, said', "p4": 'she, said"'}, "closed in line 6, and 2 of these lines read as rows"),
        ({"p3": '"he said', "p9": '"a, ""b"""', "p20": 'c"'}, "closed in line 11, where its field goes on"),
        ({"p3": '"he said'}, "is not closed before the end; take the quote out"),
    ],
)
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_stray_quote_swallows_no_rows(read: Read, texts: dict[str, str], said: str, name: str) -> None:
    """Up to 17 rows of 30 were lost, and nothing said so."""
    with pytest.raises(TraceError, match=rf"line 5: the quote that opens in column 'prompt' .*{said}"):
        read(prompts(**texts), name)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_prompts_of_several_lines_are_read(
    read: Read, where: str, end: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Well quoted, wherever the column stands and wherever a block ends; errors name the file's own lines."""
    monkeypatch.setattr("planner.files.csv_lines._BLOCK_BYTES", block_bytes)
    prompts = [
        "plain",
        '5" pipe',
        '"one\ntwo"',
        '"a, ""b""\n\n3, 4, 5"',
        '""',
        '"x\ny, 7, 8"',
        '"""q"""',
        '"\n"',
    ]
    at = {"first": 0, "middle": 1, "last": 3}[where]

    def table(rows: list[list[str]]) -> str:
        lines = [[*row[1:][:at], row[0], *row[1:][at:]] for row in rows]
        return "".join(",".join(line) + "\n" for line in lines).replace("\n", end)

    rows = [[text, str(i), str(100 + i), "5"] for i, text in enumerate(prompts)]
    content = table([["prompt", "timestamp", "input_tokens", "output_tokens"], *rows])
    trace = read(content)
    assert trace.input_tokens.tolist() == [100 + i for i in range(len(prompts))]
    assert trace.dropped == {}
    bad = content.count("\n") + 1
    with pytest.raises(TraceError, match=rf"line {bad}, column output_tokens: .* found 'many'"):
        read(content + table([['"a\nb"', "9", "9", "many"]]))


def test_a_row_that_lacks_what_we_need_is_no_blank_line(read: Read) -> None:
    """Its prompt is there. A line of commas is blank, as spreadsheets leave it."""
    assert read(prompts() + ",,,\n\n").dropped == {BLANK: 2}
    with pytest.raises(TraceError, match=r"line 32, column input_tokens: .* found nothing"):
        read(prompts() + ",a text,,\n")


# ---------------------------------------------------------------- columns that begin later


def waits(i: int) -> dict[str, object]:
    return (
        {"after": [i - 1], "think_s": 20.0, "tenant": "a", "prefix_block_tokens": 16, "hash_ids": [1, 2]}
        if i % 4
        else {}
    )


@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_columns_of_jsonl_may_begin_in_any_line(
    read: Read, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten sessions of four turns, 20 s apart; what opens a session says nothing of waits, tenants, prefixes.
    All of that counted for nothing where the first line lacks it: 40 requests in 19.5 s instead of 78.
    """
    monkeypatch.setattr("planner.traffic.trace_reading._BLOCK_BYTES", block_bytes)
    rows = [{"request_id": i, "timestamp": i / 2, "input_tokens": 500, "output_tokens": 5} for i in range(40)]
    trace = read("\n".join(json.dumps(row | waits(i)) for i, row in enumerate(rows)), "t.jsonl")
    assert len(trace) == 40 and trace.duration_s == 78
    assert len(trace.after) == 30 and trace.think_s.sum() == 600
    assert trace.tenants == ("", "a") and trace.tenant.sum() == 30
    assert trace.prefix_block_tokens == 16 and len(trace.prefix_ids) == 60


@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_the_format_is_told_by_all_lines(
    read: Read, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`chat_id` makes it Qwen-Bailian, whose clock counts seconds, and not Mooncake with its milliseconds."""
    monkeypatch.setattr("planner.traffic.trace_reading._BLOCK_BYTES", block_bytes)
    row = '{"timestamp": %d, "input_length": 40, "output_length": 5%s}\n'
    trace = read(row % (0, "") + row % (7, ', "chat_id": 3, "hash_ids": [1, 2, 3]'), "t.jsonl")
    assert trace.arrival_s.tolist() == [0, 7]
    assert trace.prefix_block_tokens == 16


def test_the_clock_may_not_begin_later(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = '{"timestamp": 0, "input_tokens": 1, "output_tokens": 1}\n' * 2
    lines += '{"arrival_s": 3, "input_tokens": 1, "output_tokens": 1}\n'
    with pytest.raises(TraceError, match=r"line 1, column arrival_s: .* found nothing"):
        read(lines, "t.jsonl")
    monkeypatch.setattr("planner.traffic.trace_reading._BLOCK_BYTES", 1)
    with pytest.raises(TraceError, match="line 3: column arrival_s begins here; expected it in every line"):
        read(lines, "t.jsonl")


# ---------------------------------------------------------------- rows that are left out


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_rows_left_out_are_said_and_then_refused(read: Read, name: str) -> None:
    """Of 100 requests: one without output is in `dropped`, two are a warning, 21 are refused unless asked."""

    def some(failed: int) -> str:
        rows = [{"timestamp": i, "input_tokens": 8, "output_tokens": 2 * (i >= failed)} for i in range(100)]
        if name == "t.csv":
            return REQUESTS + "".join(",".join(map(str, row.values())) + "\n" for row in rows)
        return "\n".join(map(json.dumps, rows))

    assert read(some(1), name).warnings == ()
    (warning,) = read(some(2), name).warnings
    assert warning == (
        f"{name}: 2 of 100 requests (2.0 %) cannot be served as they stand: 2 rows with {NO_OUTPUT}; they "
        "are left out, what follows is of the other 98 alone"
    )
    assert len(read(some(20), name)) == 80
    with pytest.raises(
        TraceError, match=r"21 of 100 requests \(21.0 %\) cannot .* go on without them with --drop"
    ):
        read(some(21), name)
    assert read(some(21), name, drop_invalid=True).dropped == {NO_OUTPUT: 21}


# ---------------------------------------------------------------- what is refused, and how it is said

GENERIC = "arrival_s,input_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        (GENERIC, "no request is left; found no row below the header"),
        (GENERIC + "0,5,0\n1,0,7\n", f"is left; found 1 row with {NO_INPUT}, 1 row with no output"),
        (GENERIC + "0,1,1\n1,-3,1\n", "line 3, column input_tokens: expected a whole number .* found -3"),
        (GENERIC + "0,1,1\n\n1,1,2.5\n", "line 4, column output_tokens: .* found 2.5"),
        (GENERIC + "0,1,many\n", "line 2, column output_tokens: .* found 'many'"),
        (GENERIC + "0,1,\n", "line 2, column output_tokens: .* found nothing"),
        (GENERIC + "0,1,NaN\n", "line 2, column output_tokens: .* found 'NaN'"),
        (GENERIC + "0,1,100000001\n", "0 to 100000000, found 100000001"),
        (GENERIC + "0,1,99999999999999999999999\n", "line 2, column output_tokens"),
        (GENERIC + "0,True,1\n1,True,1\n", "line 2, column input_tokens: .* found True"),
        (GENERIC + "soon,1,1\n", "line 2, column arrival_s: expected a date .* found 'soon'"),
        (GENERIC + "0,1,1\nsoon,1,1\n", "line 3, column arrival_s: expected a number >= 0, found 'soon'"),
        (GENERIC + "-1,1,1\n", "line 2, column arrival_s: expected a number >= 0, found '-1'"),
        (GENERIC + "nan,1,1\n", "column arrival_s"),
        (GENERIC + "0,1,1\ninf,1,1\n", "line 3, column arrival_s: .* found 'inf'"),
        (GENERIC + "0,1,1\n1e12,1,1\n", "column arrival_s: the last request arrives after 1e.12 s"),
        (GENERIC + "0,1,1\n1,1,155,2\n", "line 3: has more than the 3 fields of the header"),
        (GENERIC + "0,1,1,4,5,6\n", "line 2: has more than the 3 fields|lines 2 to 2: is not a table"),
        (GENERIC + "0,1,1\n1,1,1,4,5,6\n", "line 3: has more than the 3 fields|lines 2 to 3: is not a table"),
        (GENERIC + '0,1,"1\n1,1,1\n', "line 2: the quote that opens in column 'output_tokens' is not cl"),
        (AZURE + "2023-11-16 18:17:61,1,1\n", "line 2, column TIMESTAMP: expected a date .* found '2023"),
        (AZURE + "2023-11-16 18:17:01,1,1\n5,1,1\n", "line 3, column TIMESTAMP: expected a date"),
        (AZURE + "1800-01-01,1,1\n2099-01-01,1,1\n", "line 2, column TIMESTAMP: expected a date"),
        (AZURE + "1901-01-01,1,1\n2099-01-01,1,1\n", "TIMESTAMP: the last request arrives after 6.25e"),
        (AZURE + "1023-11-16 18:17:01,1,1\n", "line 2, column TIMESTAMP: expected a date"),
        (
            "TIMESTAMP,ContextTokens\n1,1\n",
            "line 1: no column could be read as output; .* --map arrival=TIMESTAMP",
        ),
        ("a|b|c\n", "no column could be read as arrival.*found 'a', 'b', 'c'"),
        ("arrival_s,input_tokens,output_tokens,input_tokens\n", "line 1: column 'input_tokens' is given tw"),
        ('{"timestamp": 0, "input_length": 5, "timestamp": 1}', "line 1: column 'timestamp' is given twice"),
        ("timestamp,input_tokens,output_tokens,hash_ids\n0,1,1,x y\n", "line 2, column hash_ids: .* list"),
        ('[{"timestamp": 0}]', "object 1: no column could be read as input"),
        ('{"timestamp": 0, "input_length": 5}\n', "no column could be read as output"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\nnot json\n', "line 2: is not JSON"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n[1]\n', "line 2: expected a JSON object"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{}\n', "column input_length: .* nothing"),
        ('{"timestamp": 0, "input_length": true, "output_length": 5}\n', "column input_length: .* True"),
        ('{"timestamp": 0, "input_length": [5], "output_length": 5}\n', "line 1, column input_length"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5}\n', "line 1, column timestamp"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}\n',
            "line 1, column hash_ids: expected a list of whole numbers",
        ),
        ("{" * 100_000, "line 1: is not JSON"),
        (b"arrival_s,input_tokens,output_tokens\n0,1,\xff\n", "line 2: is not UTF-8"),
        (b"arrival_s,input_tokens,output_tokens\n0,1,\0\n", "line 2: holds a NUL byte"),
        (gzip.compress(b"arrival_s", mtime=0), "expected text .pack it as .gz"),
    ],
)
def test_refusals_name_place_and_finding(read: Read, content: str | bytes, message: str) -> None:
    """One line that begins with the file."""
    with pytest.raises(InputError, match=message) as caught:
        read(content)
    assert "\n" not in str(caught.value)
    assert str(caught.value).split(",")[0].split(":")[0].endswith("t.csv")


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, damage: str) -> None:
    """The end is missing, or bytes in the middle are not what was packed."""
    packed = bytearray(gzip.compress((GENERIC + "0,1,1\n" * 5000).encode()))
    packed = packed[:-20] if damage == "cut" else packed[:60] + b"\xff" * 8 + packed[68:]
    (tmp_path / "t.csv.gz").write_bytes(packed)
    with pytest.raises(InputError, match=r"t\.csv\.gz: is not a whole gzip file"):
        read_trace(tmp_path / "t.csv.gz")


def test_a_directory_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory"):
        read_trace(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize("start", ["", GENERIC + "0,1,", '{"timestamp": 0, "input_length": "'])
def test_an_endless_line_is_refused_before_it_is_read(tmp_path: Path, start: str) -> None:
    """300 MB of one line in a small gzip file: refused after MAX_LINE_BYTES, in little memory."""
    with gzip.open(tmp_path / "t.csv.gz", "wb", compresslevel=1) as stream:
        stream.write(start.encode())
        for _ in range(75):
            stream.write(b"1" * checked_files.MAX_LINE_BYTES)
    with pytest.raises(InputError, match=r"line [12]: is longer than 4 MiB"):
        read_trace(tmp_path / "t.csv.gz")


def test_more_requests_or_ids_than_are_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small gzip file may hold more than memory; reading ends at the limit."""
    with gzip.open(tmp_path / "t.csv.gz", "wt") as stream:
        stream.write(GENERIC + "0,1,1\n" * 300)
    rows = [
        {"timestamp": i, "input_length": 1600, "output_length": 1, "hash_ids": [0, 1, i]} for i in range(50)
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(read_trace(tmp_path / "t.csv.gz")) == 300
    monkeypatch.setattr(trace_rows, "MAX_REQUESTS", 299)
    with pytest.raises(TraceError, match=r"line 301: 300 requests .* at most 299 and .* are read"):
        read_trace(tmp_path / "t.csv.gz")
    monkeypatch.setattr(trace_rows, "MAX_IDS", 149)
    with pytest.raises(TraceError, match="line 50: 50 requests with 150 block ids so far"):
        read_trace(tmp_path / "t.jsonl")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(raw=st.binary(max_size=300))
@example(raw=b",\n,\n")  # Two columns without a name.
def test_random_bytes_raise_nothing_but_planner_errors(read: Read, raw: bytes) -> None:
    for name in ("t.csv", "t.jsonl"):
        try:
            read(raw, name)
        except PlannerError:
            pass


SNIPPETS = st.sampled_from(
    [
        "0",
        "1",
        "7.5",
        "-1",
        "1e3",
        "1e400",
        "nan",
        "inf",
        "True",
        "",
        " ",
        ",",
        ",,",
        "\n",
        "\r\n",
        "\r",
        '"',
        "2023-11-16 18:17:03.9799600",
        "0001-01-01",
        "2262-05-01",
        "9" * 25,
        "[1 2]",
        "#",
        "\x1f",
        "é",
        "None",
        "null",
        "[]",
        "{}",
        "[1]",
        '"1"',
        ":",
        "{",
        "}",
        "'",
    ]
)
HEADS = st.sampled_from(
    [
        AZURE,
        GENERIC,
        "timestamp,input_tokens,output_tokens,tenant,hash_ids\n",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
        '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n',
    ]
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(head=HEADS, body=st.lists(st.one_of(SNIPPETS, st.text(max_size=5)), max_size=25))
def test_garbled_rows_raise_nothing_but_planner_errors(read: Read, head: str, body: list[str]) -> None:
    text = head + "".join(f"{word}," if i % 4 else word for i, word in enumerate(body))
    try:
        trace = read(text.encode("utf-8", "replace"))
    except PlannerError as error:
        assert "\n" not in str(error)
    else:
        assert (trace.input_tokens >= 1).all() and np.isfinite(trace.arrival_s).all()


JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(), max_size=3),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"timestamp": JSON_VALUES, "input_length": JSON_VALUES, "output_length": JSON_VALUES},
            optional={"hash_ids": JSON_VALUES, "tenant": JSON_VALUES, "model": JSON_VALUES},
        ),
        min_size=1,
        max_size=5,
    )
)
def test_garbled_objects_raise_nothing_but_planner_errors(read: Read, rows: list[dict[str, object]]) -> None:
    try:
        read("\n".join(map(json.dumps, rows)))
    except PlannerError as error:
        assert "\n" not in str(error)


# ---------------------------------------------------------------- write, then read

TOKENS = st.integers(1, 100_000_000)
ROWS = st.lists(st.tuples(st.integers(0, 10**12), TOKENS, TOKENS), min_size=1, max_size=20).map(sorted)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.floats(0, 1e9), TOKENS, TOKENS), min_size=1, max_size=20).map(sorted))
def test_generic_round_trip_is_exact(read: Read, rows: list[tuple[float, int, int]]) -> None:
    """CSV and JSONL, every bit of arrival_s."""
    expected = [list(column) for column in zip(*rows, strict=True)]
    keys = ("arrival_s", "input_tokens", "output_tokens")
    csv = GENERIC + "".join(f"{at!r},{i},{o}\n" for at, i, o in rows)
    jsonl = "\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows)
    assert columns(read(csv)) == expected
    assert columns(read(jsonl, "t.jsonl.gz")) == expected


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_azure_round_trip_keeps_100_ns(read: Read, rows: list[tuple[int, int, int]]) -> None:
    """Stamps are whole numbers of 100 ns, up to 10^5 s."""
    epoch = np.datetime64("2023-11-16T18:15:46", "ns")
    stamps = [str(epoch + np.timedelta64(ticks * 100, "ns")).replace("T", " ")[:-2] for ticks, _, _ in rows]
    text = AZURE + "\r\n".join(f"{at},{i},{o}" for at, (_, i, o) in zip(stamps, rows, strict=True))
    trace = read(text)
    assert trace.arrival_s.tolist() == [(ticks - rows[0][0]) / 1e7 for ticks, _, _ in rows]
    assert columns(trace)[1:] == [[i for _, i, _ in rows], [o for _, _, o in rows]]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**9), st.lists(st.integers(0, 2**40), min_size=1, max_size=5), TOKENS),
        min_size=1,
        max_size=20,
        unique_by=lambda row: row[0],
    )
)
def test_mooncake_round_trip_keeps_blocks(read: Read, rows: list[tuple[int, list[int], int]]) -> None:
    """k blocks of 512 for an input of 512 k tokens; stamps differ, so none is jittered."""
    rows.sort()
    text = "\n".join(
        json.dumps({"timestamp": ms, "input_length": 512 * len(ids), "output_length": o, "hash_ids": ids})
        for ms, ids, o in rows
    )
    trace = read(text)
    assert prefixes(trace) == [ids for _, ids, _ in rows]
    assert trace.arrival_s.tolist() == [(ms - rows[0][0]) / 1000 for ms, _, _ in rows]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**7), TOKENS, TOKENS),
        min_size=1,
        max_size=20,
        unique_by=lambda row: row[0],
    )
)
def test_burstgpt_round_trip(read: Read, rows: list[tuple[int, int, int]]) -> None:
    """Whole seconds, all different."""
    rows.sort()
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
        f"{at},ChatGPT,{i},{o},{i + o},API log\n" for at, i, o in rows
    )
    expected = [
        [float(at - rows[0][0]) for at, _, _ in rows],
        [i for _, i, _ in rows],
        [o for _, _, o in rows],
    ]
    assert columns(read(text)) == expected


# ---------------------------------------------------------------- Trace itself


def test_many_blocks_are_read_as_one(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one line: line numbers go on, and the first date counts for all."""
    monkeypatch.setattr("planner.traffic.trace_reading._BLOCK_BYTES", 1)
    monkeypatch.setattr("planner.files.csv_lines._BLOCK_BYTES", 1)
    trace = read(dated(list(range(120))))
    assert trace.arrival_s.tolist() == list(range(120))
    with pytest.raises(TraceError, match="line 122, column ContextTokens"):
        read(dated(list(range(120))) + "2023-11-16 19:00:00,x,1\r\n")
    with pytest.raises(
        TraceError, match="line 122, column TIMESTAMP: expected a date as in the lines before"
    ):
        read(dated(list(range(120))) + "17,1,1\r\n")
    objects = [{"timestamp": i, "input_length": 5, "output_length": 1, "hash_ids": [i]} for i in range(50)]
    assert prefixes(read("\n".join(map(json.dumps, objects)))) == [[i] for i in range(50)]


def ragged() -> Trace:
    return Trace(
        "ragged",
        arrival_s=np.array([0.0, 1.0, 2.0]),
        input_tokens=np.array([10, 20, 30]),
        output_tokens=np.array([1, 2, 3]),
        prefix_offsets=np.array([0, 2, 2, 5]),
        prefix_ids=np.array([7, 8, 7, 8, 9]),
        prefix_block_tokens=16,
        tenant=np.array([0, 1, 0]),
        tenants=("a", "b"),
    )


def test_select_takes_prefixes_and_tenants_along() -> None:
    """Request 2 owns ids 7 8 9, request 1 none."""
    part = ragged().select([1, 2])
    assert (part.arrival_s.tolist(), prefixes(part), part.tenant.tolist()) == (
        [1.0, 2.0],
        [[], [7, 8, 9]],
        [1, 0],
    )
    again = ragged().select([2, 0, 0], arrival_s=np.array([0.0, 5.0, 6.0]))
    assert (again.arrival_s.tolist(), prefixes(again)) == ([0.0, 5.0, 6.0], [[7, 8, 9], [7, 8], [7, 8]])
    assert prefixes(ragged().select(np.array([True, False, True]))) == [[7, 8], [7, 8, 9]]


@pytest.mark.parametrize(
    ("index", "message"),
    [([], "no request is left"), ([2, 0], "arrival_s must be finite, >= 0 and never fall")],
)
def test_a_trace_refuses_nonsense(index: list[int], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        ragged().select(np.array(index, dtype=np.int64))


def test_rate_is_requests_over_duration() -> None:
    """Three requests from 0 to 2 s: 1.5 requests/s."""
    assert (ragged().duration_s, ragged().rate_rps) == (2.0, 1.5)


# ---------------------------------------------------------------- the published traces


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")
@pytest.mark.parametrize(
    ("name", "requests", "duration_s", "mean_input", "mean_output", "blocks"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19366, 3501.721937, 1154.7, 211.1, 0),
        ("AzureLLMInferenceTrace_code.csv", 8819, 3435.948056, 2047.8, 27.9, 0),
        ("mooncake_conversation_trace.jsonl.gz", 12031, 3538.5, 12035.1, 342.6, 288500),
        ("mooncake_synthetic_trace.jsonl.gz", 3993, 1022.025, 15325.5, 149.1, 121877),
    ],
)
def test_published_traces(
    name: str, requests: int, duration_s: float, mean_input: float, mean_output: float, blocks: int
) -> None:
    """Counts and means as published. The conversation's last stamp is 3536.999 s, jittered by up to 3 s."""
    trace = read_trace(SHARED / name)
    is_jittered = "conversation" in name
    assert len(trace) == requests
    assert trace.duration_s == pytest.approx(duration_s, abs=1.6 if is_jittered else 1e-9)
    assert trace.input_tokens.mean() == pytest.approx(mean_input, abs=0.06)
    assert trace.output_tokens.mean() == pytest.approx(mean_output, abs=0.06)
    assert len(trace.prefix_ids) == blocks
    assert bool(trace.notes) == is_jittered


# ---------------------------------------------------------------- images


def test_image_tokens_are_added_to_the_prompt(read: Read) -> None:
    """Empty is none; a prompt may be an image alone, and only without either it is left out."""
    trace = read(
        "arrival_s,input_tokens,output_tokens,image_tokens\n0,10,5,576\n1,10,5,\n2,0,5,64\n3,0,5,0\n",
        drop_invalid=True,
    )
    assert trace.image_tokens is not None
    assert trace.image_tokens.tolist() == [576, 0, 64]
    assert trace.input_tokens.tolist() == [586, 10, 64]
    assert trace.dropped == {NO_INPUT: 1}
    late = read('{"arrival_s":0,"input_tokens":3,"output_tokens":1}\n' * 2, "t.jsonl")
    assert late.image_tokens is None


@pytest.mark.parametrize(
    ("value", "found"), [("-1", "'-1'"), ("1.5", "'1.5'"), ("many", "'many'"), ("100000000", "100000000")]
)
def test_bad_image_tokens_are_refused(read: Read, value: str, found: str) -> None:
    with pytest.raises(TraceError, match=f"line 2, column image_tokens: expected .* found {found}"):
        read(f"arrival_s,input_tokens,output_tokens,image_tokens\n0,10,5,{value}\n")


# ---------------------------------------------------------------- adapters


def test_adapters_are_read_and_share_no_prefix(read: Read) -> None:
    """Both adapters have ids 7 and 8; requests of one agree, those of two do not. Empty is the LLM."""
    rows = ["0,9,5,a,7 8", "1,9,5,b,7 8", "2,9,5,a,7 9", "3,9,5,,7", "4,9,5,,7"]
    trace = read("arrival_s,input_tokens,output_tokens,adapter,hash_ids\n" + "\n".join(rows) + "\n")
    assert trace.adapters == ("a", "b") and trace.adapter.tolist() == [0, 1, 0, -1, -1]
    first = [ids[0] for ids in prefixes(trace)]
    assert first[0] == first[2] != first[1] and first[3] == first[4] not in first[:3]
    assert trace.select([1, 3]).adapter.tolist() == [1, -1]


def test_a_column_that_names_no_adapter_is_refused(read: Read) -> None:
    with pytest.raises(TraceError, match="column adapter: names none"):
        read("arrival_s,input_tokens,output_tokens,adapter\n0,9,5,\n")


def test_adapters_survive_a_file(read: Read) -> None:
    rows = "arrival_s,input_tokens,output_tokens,adapter\n0,9,5,b\n1,9,5,\n2,9,5,a\n"
    again = read(to_jsonl(read(rows)), "t.jsonl")
    assert [again.adapters[i] if i >= 0 else "" for i in again.adapter] == ["b", "", "a"]


def test_tasks_of_agents_survive_a_file(read: Read) -> None:
    """Two tasks of one session: without their numbers both are one task, as long as the session."""
    edges = np.array([[1, 0], [2, 1]])
    trace = read("arrival_s,input_tokens,output_tokens\n0,9,5\n1,9,5\n2,9,5\n")
    trace = replace(trace, after=edges, task=np.array([4, 4, 7]))
    again = read(to_jsonl(trace), "t.jsonl")
    assert again.task[0] == again.task[1] != again.task[2]


def test_a_csv_keeps_the_tasks_of_agents(tmp_path: Path) -> None:
    """Requests 1 and 3 are of one task. Without their column each request would be a task."""
    text = "arrival_s,input_tokens,output_tokens,agent_task\n0,9,1,0\n1,9,1,1\n2,9,1,0\n"
    path = tmp_path / "trace.csv"
    path.write_text(text)
    first = read_trace(path)
    path.write_text("".join(to_csv(first)))
    assert first.task.tolist() == read_trace(path).task.tolist() == [0, 1, 0]
