"""Traces that could be meant otherwise: refused in one line, or read with a warning that says how."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from planner.errors import InputError
from planner.traffic.frames import trace_of
from planner.traffic.logs.log_columns_map import parse_columns
from planner.traffic.logs.log_reading import LogOptions
from planner.traffic.logs.times import UnsureError
from planner.traffic.prefixes import alike_tokens_frac
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

HEADER = "timestamp,input_tokens,output_tokens\n"
TIMES = [i / 2 for i in range(24)]


def table(times: list[object], inputs: dict[int, str] | None = None) -> str:
    given = inputs or {}
    return HEADER + "".join(f"{at},{given.get(i, '200')},3\n" for i, at in enumerate(times))


def read(folder: Path, text: str, name: str = "t.csv") -> Trace:
    (folder / name).write_text(text)
    return read_trace(folder / name)


def with_one(value: object, times: list[float] = TIMES) -> list[object]:
    return [*times[:6], value, *times[7:]]


def test_milliseconds_from_zero_are_not_seconds_in_silence(tmp_path: Path) -> None:
    """Two requests a second, counted in ms: read as seconds these are 0.002 requests/s."""
    (said,) = read(tmp_path, table([round(1000 * at) for at in TIMES])).warnings
    assert "read as seconds" in said and "0.00209 requests/s" in said and "arrival=timestamp:ms" in said


def test_microseconds_from_zero_are_offered_as_such(tmp_path: Path) -> None:
    """Two requests a second: as milliseconds they would be 0.002. At 100 a second it may be either."""
    (said,) = read(tmp_path, table([round(1e6 * at) for at in TIMES])).warnings
    assert "if it counts microseconds these are 2.09 requests/s" in said and "timestamp:us" in said
    assert "milliseconds" not in said
    (said,) = read(tmp_path, table([round(1e4 * i) for i in range(24)])).warnings
    assert "counts milliseconds these are 0.104 requests/s, if microseconds these are 104 requests" in said
    rows = [{"timestamp": round(1e6 * at), "input_length": 200, "output_length": 3} for at in TIMES]
    (said,) = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "t.jsonl").warnings
    assert "read as milliseconds" in said and "if it counts microseconds these are 2.09 requests/s" in said


@pytest.mark.parametrize("kind", ["csv", "jsonl", "frame"])
def test_a_second_column_of_prompt_tokens_is_not_passed_over(tmp_path: Path, kind: str) -> None:
    """What differs is said, wherever it begins; what says the same, or counts something else, is not."""
    rows = [
        {"timestamp": at, "input_tokens": 200, "output_tokens": 3, "prompt_tokens": 200, "total_tokens": 203}
        for at in TIMES
    ]

    def warnings_of() -> tuple[str, ...]:
        frame = pd.DataFrame(rows)
        if kind == "frame":
            return trace_of(frame).warnings
        text = frame.to_csv(index=False) if kind == "csv" else frame.to_json(orient="records", lines=True)
        return read(tmp_path, text, f"t.{kind}").warnings

    assert warnings_of() == ()
    rows[-1]["prompt_tokens"] = 900
    (said,) = warnings_of()
    assert "column prompt_tokens differs from input_tokens, which is read for its name" in said


def test_a_plain_clock_is_not_doubted(tmp_path: Path) -> None:
    assert read(tmp_path, table([*TIMES])).warnings == ()
    assert read(tmp_path, table([*range(24)])).warnings == ()


def test_seconds_in_a_column_of_mooncakes_are_doubted(tmp_path: Path) -> None:
    """Its clock counts ms, so 0.5 is half of one: 2,000 requests/s."""
    rows = [{"timestamp": at, "input_length": 200, "output_length": 3} for at in TIMES]
    (said,) = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "t.jsonl").warnings
    assert "read as milliseconds" in said and "arrival=timestamp:s" in said


@pytest.mark.parametrize("value", ["1000000", "1e3"])
def test_one_wild_time_among_twelve_is_refused(tmp_path: Path, value: str) -> None:
    """It is not a clock that starts again: the next one goes on where the one before stopped."""
    with pytest.raises(InputError, match=r"time of request 7 of 12 is .*, between 2.5 and 3.5"):
        read(tmp_path, table(with_one(value, TIMES[:12])))


def test_a_wild_last_time_is_a_gap_that_is_said(tmp_path: Path) -> None:
    (said,) = read(tmp_path, table([*TIMES[:11], 1_000_000])).warnings
    assert "nothing arrives for 277.8 h of 277.8 h, after 11 of 12 requests" in said


def test_a_clock_that_starts_again_is_said_first(tmp_path: Path) -> None:
    (said,) = read(tmp_path, table([*TIMES, *TIMES])).warnings
    assert "taken as two logs" in said


def test_an_exponent_in_one_row_is_said(tmp_path: Path) -> None:
    (said,) = read(tmp_path, table([*TIMES], {12: "1e3"})).warnings
    assert "line 14, column input_tokens: '1e3' is read as 1000" in said
    assert read(tmp_path, table([*TIMES], dict.fromkeys(range(24), "2e2"))).warnings == ()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (table(with_one("1_000")), "line 8, column timestamp: expected a number"),
        (table([*TIMES], {6: "1_000"}), "line 8, column input_tokens: expected a whole number"),
        (table([*TIMES], {6: "\u0661\u0662"}), "line 8, column input_tokens: expected a whole number"),
        (table([f"2026-01-01T00:00:{i:02}{'Z' * (i % 2)}" for i in range(24)]), "line 3.*without a zone"),
        (table([f"2026-01-01T00:00:{i:02}Z"[: 20 - (i == 9)] for i in range(24)]), "line 11.*with a zone"),
    ],
)
def test_what_people_and_programs_read_differently_is_refused(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(InputError, match=found) as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value)


def test_dates_of_several_zones_are_one_clock(tmp_path: Path) -> None:
    times: list[object] = ["2026-01-01T00:00:00Z", "2026-01-01T01:00:01+01:00", "2026-01-01T00:00:02Z"]
    assert read(tmp_path, table(times)).arrival_s.tolist() == [0, 1, 2]


def test_half_a_character_in_a_name_is_refused(tmp_path: Path) -> None:
    row = '{"timestamp": 0, "input_length": 9, "output_length": 3, "tenant": "\\ud800"}\n'
    with pytest.raises(InputError, match=r"line 1: is not JSON .*half a character"):
        read(tmp_path, row, "t.jsonl")


def test_what_one_endless_cache_would_find(tmp_path: Path) -> None:
    """Of 3 prompts of 3 blocks the first two are everybody's: 4 of 9 blocks were there before."""
    rows = [
        {"timestamp": i, "input_length": 1536, "output_length": 2, "hash_ids": [0, 1, 5 + i]}
        for i in range(3)
    ]
    trace = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "t.jsonl")
    assert alike_tokens_frac(trace) == pytest.approx(4 / 9)


def test_semicolons_and_tabs_separate_as_commas_do(tmp_path: Path) -> None:
    """With semicolons a comma is a decimal point."""
    expected = read(tmp_path, "ts,prompt_tokens,completion_tokens\n0.5,100,10\n1.75,200,20\n")
    for text in (
        "ts;prompt_tokens;completion_tokens\n0,5;100;10\n1,75;200;20\n",
        "ts\tprompt_tokens\tcompletion_tokens\n0.5\t100\t10\n1.75\t200\t20\n",
        "timestamp;input_tokens;output_tokens\n0,5;100;10\n1,75;200;20\n",
        "ts|prompt_tokens|completion_tokens\n0.5|100|10\n1.75|200|20\n",
        '"ts"\t"prompt_tokens"\t"completion_tokens"\n"0.5"\t100\t10\n1.75\t"200"\t20\n',
        '"ts, s";"# prompt; tokens";"completion_tokens"\n0,5;100;10\n1,75;200;20\n',
    ):
        trace = read(tmp_path, text)
        assert trace.arrival_s.tolist() == expected.arrival_s.tolist() == [0, 1.25]
        assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([100, 200], [10, 20])


def test_a_map_without_the_status_of_a_log_is_doubted(tmp_path: Path) -> None:
    """A map of one's own left out the column that is recognised without it: failed requests were counted."""
    log = "at,in,out,HTTP\n" + "".join(f"{at},100,10,{503 if at == 2 else 200}\n" for at in range(4))
    (tmp_path / "log.csv").write_text(log)
    columns = {"arrival": "at:s", "input": "in", "output": "out"}
    counted = read_trace(tmp_path / "log.csv", log_options=LogOptions(columns=parse_columns(columns)))
    (said,) = counted.warnings
    assert len(counted) == 4 and "'HTTP' says that some requests failed" in said and "as status" in said
    mapped = columns | {"status": "HTTP"}
    left = read_trace(
        tmp_path / "log.csv", log_options=LogOptions(columns=parse_columns(mapped)), drop_invalid=True
    )
    assert len(left) == 3 and not any("HTTP" in text for text in left.warnings)


SEMICOLONS = "timestamp;input_tokens;output_tokens\n"


@pytest.mark.parametrize("written", ["5.000", "5,000", "1.000"])
def test_a_point_between_thousands_is_not_read_as_a_decimal_point(tmp_path: Path, written: str) -> None:
    """Beside 900 it separates thousands. Beside 1500, which has none, it may be either."""
    meant = int(written[0]) * 1000
    for table in (SEMICOLONS, "time_sent;prompt_tokens;completion_tokens\n"):
        trace = read(tmp_path, table + f"0,5;900;10\n1,75;{written};20\n")
        assert trace.input_tokens.tolist() == [900, meant]
        assert f"is read as {meant}, with a separator of thousands" in trace.warnings[0]
        with pytest.raises(InputError, match=r"'\d.000' stands beside '1500'.*\? Write \d000, or \d"):
            read(tmp_path, table + f"0,5;1500;10\n1,75;{written};20\n")


def test_a_doubt_in_one_column_does_not_hide_an_error_in_another(tmp_path: Path) -> None:
    """5.000 output tokens beside 1500 may be 5 or 5000, whatever was written about the input tokens."""
    with pytest.raises(InputError, match=r"column output_tokens: '5.000' stands beside '1500'"):
        read(tmp_path, SEMICOLONS + "0,5;900;1500\n1,75;5.000;5.000\n")


def test_where_every_length_ends_in_three_noughts_it_is_told_how_it_is_read(tmp_path: Path) -> None:
    trace = read(tmp_path, SEMICOLONS + "0.500;2.000;10\n1.750;3.000;20\n")
    (told,) = trace.warnings
    assert trace.input_tokens.tolist() == [2, 3]
    assert "'2.000' is read as 2, with a decimal point; if it separates thousands write 2000" in told
    assert read(tmp_path, SEMICOLONS + "0.500;2.0;10\n1.750;3.0;20\n").warnings == ()


def test_days_of_a_spreadsheet_are_not_seconds_in_silence(tmp_path: Path) -> None:
    """A second is 1 / 86,400 day: 40 requests, half a second apart, seem to come within a quarter of a ms."""
    (said,) = read(tmp_path, table([f"{46109.5 + at / 86_400:.10f}" for at in TIMES])).warnings
    assert "if it counts days, as spreadsheets do, these are 2.09 requests/s" in said


def local_times(start: str, name: str = "timestamp") -> str:
    """A request a minute for four hours from this time in UTC, as clocks in Berlin show it."""
    times = pd.date_range(start, periods=240, freq="min", tz="UTC").tz_convert("Europe/Berlin")
    head = f"{name},input_tokens,output_tokens\n"
    return head + "".join(f"{at:%Y-%m-%d %H:%M:%S},200,3\n" for at in times)


FORWARD, BACK = "2026-03-28 23:00", "2026-10-24 23:00"


@pytest.mark.parametrize("name", ["timestamp", "created_at"])
def test_local_times_over_a_change_of_clocks_are_doubted_and_read_with_a_zone(
    tmp_path: Path, name: str
) -> None:
    """Without a zone an hour is missing in spring, and two lie on each other in autumn."""
    columns = parse_columns({"arrival": name, "input": "input_tokens", "output": "output_tokens"}, "map")
    for start, change in ((FORWARD, "skip an hour, from 2026-03-29 01:59:00 to"), (BACK, "step back, from")):
        try:
            said = list(read(tmp_path, local_times(start, name)).warnings)
        except InputError as error:
            said = [str(error)]
        assert any(f"column {name} names no zone, and its times {change}" in each for each in said), said
        for named in (LogOptions(columns, zone="Europe/Berlin"), LogOptions(zone="Europe/Berlin")):
            mended = read_trace(tmp_path / "t.csv", seed=None, log_options=named)
            assert mended.duration_s == 239 * 60 and not mended.warnings
    left_out = table(["2026-03-29 01:59:00", "2026-03-29 02:30:00"]).replace("timestamp", name)
    (tmp_path / "gap.csv").write_text(left_out)
    with pytest.raises(
        InputError, match=f"column {name}: .* there is in Europe/Berlin, found '2026-03-29 02"
    ):
        read_trace(tmp_path / "gap.csv", log_options=LogOptions(zone="Europe/Berlin"))


def test_no_change_of_clocks_is_seen_in_a_gap_at_another_time_or_in_dates_with_a_zone(tmp_path: Path) -> None:
    """An hour and five minutes of nothing from 01:29 on is no clock hour that is missing."""
    minutes = [*range(90), *range(154, 240)]
    dates = [f"2026-03-29 {k // 60:02d}:{k % 60:02d}:00" for k in minutes]
    assert not read(tmp_path, table([*dates])).warnings
    zoned = local_times(FORWARD).replace(":00,200", ":00+01:00,200")
    assert not any("names no zone" in each for each in read(tmp_path, zoned).warnings)


def test_dates_with_the_day_or_month_first_name_the_map_that_reads_them(tmp_path: Path) -> None:
    text = table([f"10/15/2026 9:{k:02d}:07 AM" for k in range(10, 40)])
    with pytest.raises(UnsureError, match=r"holds dates such as .*: plan trace FILE .*--map") as caught:
        read(tmp_path, text)
    role_of = dict(each.split("=") for each in caught.value.guess.split(","))
    trace = read_trace(tmp_path / "t.csv", log_options=LogOptions(parse_columns(role_of, "map")))
    assert trace.duration_s == 29 * 60


@pytest.mark.parametrize("name", ["timestamp", "created_at"])
def test_lines_that_end_with_cr_alone_are_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"its lines end with CR alone; write LF instead: tr"):
        read(tmp_path, local_times(FORWARD, name).replace("\n", "\r"))


@pytest.mark.parametrize("form", ["{}\n{}", "[{}, {}]"])
def test_a_number_of_5000_digits_is_refused_in_our_words(tmp_path: Path, form: str) -> None:
    rows = [
        '{"timestamp": 0, "input_tokens": 9, "output_tokens": 3}',
        '{"timestamp": 1, "input_tokens": ' + "9" * 5000 + ', "output_tokens": 3}',
    ]
    with pytest.raises(InputError, match=r"is not JSON \(the number 9{20}\.\.\. has 5000 digits\)"):
        read(tmp_path, form.replace("{}", "%s") % tuple(rows), "t.jsonl")
