"""planner/traffic/logs/times.py and columns.py: units, zones, clocks that are put back, maps."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from planner.errors import InputError, TraceError
from planner.traffic.logs.log_columns_map import guess_columns, parse_columns
from planner.traffic.logs.times import LogClock, UnsureError, spans_ns, unit_of_name

AT_NS = 1_767_607_200_250_000_000  # 2026-01-05T10:00:00.25Z


def read(values: list[object], *, name: str = "at", unit: str = "", zone: str | None = None) -> list[int]:
    clock = LogClock(name, unit, zone)
    return [int(at) for at in clock.times_ns(np.arange(len(values)), pd.Series(values), "row")]


@pytest.mark.parametrize(
    "value",
    [
        1767607200.25,
        "1767607200.25",
        1767607200250,
        1767607200250000,
        1767607200250000000,
        "1767607200250000000",
        "2026-01-05T10:00:00.25Z",
        "2026-01-05T10:00:00.250000000Z",
        "2026-01-05 10:00:00.25+00:00",
        "2026-01-05T11:00:00.25+01:00",
        "2026-01-05 10:00:00.25",
        "2026-01-05 10:00:00,250",
        "2026-01-05T10:00:00.250Z",
        pd.Timestamp("2026-01-05 10:00:00.25"),
        pd.Timestamp("2026-01-05 11:00:00.25", tz="Europe/Berlin"),
    ],
)
def test_every_way_to_write_a_time_is_told(value: object) -> None:
    """To 0.3 us, what a float of seconds has."""
    assert read([value, value]) == pytest.approx([AT_NS, AT_NS], abs=300)


@pytest.mark.parametrize("fraction", [".250", ",250"])
def test_a_comma_before_a_fraction_may_be_a_point_by_now(fraction: str) -> None:
    """The user writes the pattern as it is in the file, whose commas are points if it has semicolons."""
    found = read([f"05.01.2026 10:00:00{fraction}"], unit="%d.%m.%Y %H:%M:%S,%f", zone="UTC")
    assert found == [AT_NS]


def test_the_map_that_is_proposed_keeps_the_role_of_its_column() -> None:
    """The end of a request was proposed as its arrival."""
    clock = LogClock("done", role="end")
    with pytest.raises(UnsureError, match=r"'end=done:%d\.%m\.%Y %H:%M:%S'"):
        clock.times_ns(np.arange(1), pd.Series(["05.01.2026 10:00:00"]), "row")


def test_times_of_access_logs_are_told() -> None:
    assert read(["05/Jan/2026:11:00:00 +0100"]) == [AT_NS - 250_000_000]


def test_zones_may_differ_from_line_to_line() -> None:
    """Clocks that are put forward, written with their offset."""
    found = read(["2026-03-29T01:59:00+01:00", "2026-03-29T03:01:00+02:00"])
    assert found[1] - found[0] == 120 * 10**9


def test_an_hour_that_there_is_twice_is_told_by_the_order() -> None:
    """Berlin, 2025-10-26: 02:59 (summer), then 02:01 and 02:58 again (winter), then 03:01.

    02:59 summer is 00:59 UTC; 02:01 winter 01:01 UTC; 02:58 winter 01:58; 03:01 winter 02:01.
    """
    found = read(
        [f"2025-10-26 {at}" for at in ("02:30:00", "02:59:00", "02:01:00", "02:58:00", "03:01:00")],
        zone="Europe/Berlin",
    )
    minutes = [(ns - found[0]) / 60e9 for ns in found]
    assert minutes == [0, 29, 31, 88, 91]


def test_a_time_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="a time that there is in Europe/Berlin"):
        read(["2026-03-29 02:30:00"], zone="Europe/Berlin")


def test_a_zone_beside_the_clock_wins() -> None:
    """--tz is for dates without a zone."""
    assert read(["2026-01-05T10:00:00.25Z"], zone="Europe/Berlin") == [AT_NS]


@pytest.mark.parametrize(
    ("values", "name", "unit", "message"),
    [
        ([1767607200, 1767607200250], "at", "", "expected a time in s since 1970"),
        ([1767607200], "created_ms", "", "named as if in ms, but its times .* are s since 1970"),
        ([5.0, 6.0], "at", "", "counts from 5, in s, ms, us or ns"),
        ([5.0, -6.0], "at", "s", "a number of s from 0 on"),
        (["2026-01-05", "1e400"], "at", "", "expected a time such as"),
        (["2026-01-05T10:00:00Z", "2026-01-05T10:00:00"], "at", "", "a time with a zone as before"),
        (["0026-01-05T10:00:00Z"], "at", "", "expected a time such as"),
        ([True, 1767607200], "at", "s", "expected a time"),
    ],
)
def test_what_does_not_fit_is_refused(values: list[object], name: str, unit: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(values, name=name, unit=unit)


def test_units_by_name() -> None:
    names = ("latency_ms", "durationMs", "took (s)", "elapsed_seconds", "startTimeUnixNano", "latency", "ms")
    assert [unit_of_name(name) for name in names] == ["ms", "ms", "s", "s", "ns", None, None]


def test_durations_may_carry_their_unit() -> None:
    found = spans_ns(np.arange(4), pd.Series(["350ms", "1.5s", "2 min", None]), "", "row", "took")
    assert found.tolist() == [350_000_000, 1_500_000_000, 120_000_000_000, 0]


# ---------------------------------------------------------------- maps


def test_a_map_is_read_and_written_back() -> None:
    text = "end=done,duration=took:ms,input=in,output=out,tenant=team"
    assert parse_columns(text).map_text() == text
    assert parse_columns(parse_columns(text).document()) == parse_columns(text)
    dated = parse_columns({"arrival": "at:%d/%m/%Y %H:%M", "input": "a:b", "output": "c"})
    assert (dated.arrival, dated.input, dated.units) == ("at", "a:b", {"arrival": "%d/%m/%Y %H:%M"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arival=at,input=a,output=b", "'arival' is no part of a log; did you mean 'arrival'"),
        ("arrival=at,input=a", "--map: output is missing"),
        ("end=at,input=a,output=b", "--map: arrival is missing; say arrival=COLUMN, or both"),
        ("arrival", "expected ROLE=COLUMN"),
        ("arrival=at,arrival=b", "arrival is given twice"),
        ("arrival=,input=a,output=b", "arrival: expected the name of a column"),
    ],
)
def test_maps_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_columns(text)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"timestamp": AT_NS // 10**9, "n_prompt_tokens": 5, "n_generated_tokens": 7},
            "arrival=timestamp,input=n_prompt_tokens,output=n_generated_tokens",
        ),
        (
            {"requestTime": "2026-01-05T10:00:00Z", "promptTokens": 5, "completionTokens": 7},
            "arrival=requestTime,input=promptTokens,output=completionTokens",
        ),
        (
            {
                "start_time": "2026-01-05T10:00:00Z",
                "end_time": "2026-01-05T10:00:09Z",
                "input_tokens": 5,
                "output_tokens": 7,
                "cached_input_tokens": 3,
                "total_tokens": 12,
            },
            "arrival=start_time,input=input_tokens,output=output_tokens",
        ),
        (
            {"time_iso8601": "2026-01-05T10:00:00Z", "request_time": 0.25, "tokens_in": 5, "tokens_out": 7},
            "end=time_iso8601,duration=request_time:s,input=tokens_in,output=tokens_out",
        ),
        (
            {
                "completed_at": "2026-01-05T10:00:00Z",
                "ttft_ms": 9,
                "latency_ms": 250,
                "usage.prompt_tokens": 5,
                "usage.completion_tokens": 7,
            },
            "end=completed_at,duration=latency_ms,input=usage.prompt_tokens,output=usage.completion_tokens",
        ),
    ],
)
def test_columns_are_told_by_name_and_value(columns: dict[str, object], expected: str) -> None:
    sample = pd.DataFrame({name: [value] * 3 for name, value in columns.items()}, dtype=object)
    assert guess_columns(sample, "log").map_text() == expected


def test_two_arrivals_apart_are_not_guessed() -> None:
    sample = pd.DataFrame(
        {
            "created_at": ["2026-01-05T10:00:00Z"] * 3,
            "started_at": ["2026-01-05T10:00:30Z"] * 3,
            "prompt_tokens": [1] * 3,
            "completion_tokens": [1] * 3,
        }
    )
    with pytest.raises(UnsureError, match="created_at and started_at may both be the arrival") as caught:
        guess_columns(sample, "log")
    assert caught.value.guess == "arrival=created_at,input=prompt_tokens,output=completion_tokens"


def test_a_date_with_its_day_first_is_told_with_its_form() -> None:
    """05.10. may be May or October: the form is for the user to say, so the map to type holds it."""
    sample = pd.DataFrame(
        {
            "received_at": ["05.10.2026 09:00:00,036"] * 3,
            "prompt_tokens": [1] * 3,
            "completion_tokens": [1] * 3,
        }
    )
    with pytest.raises(UnsureError, match="swap %d and %m") as caught:
        guess_columns(sample, "log")
    assert "'arrival=received_at:%d.%m.%Y %H:%M:%S.%f,input=prompt_tokens" in str(caught.value)
    with pytest.raises(UnsureError, match=r"arrival=at:%d/%m/%Y %H:%M'"):
        read(["05/10/2026 09:00"])


def test_a_date_of_the_united_states_is_told_with_its_form() -> None:
    """No month is the 14th: the month comes first, and there is nothing to swap."""
    sample = pd.DataFrame(
        {
            "timestamp": ["03/04/2026 09:00:00 AM", "03/14/2026 01:10:00 PM"],
            "prompt_tokens": [1, 1],
            "completion_tokens": [1, 1],
        }
    )
    with pytest.raises(UnsureError, match=r"timestamp holds dates.*; found") as caught:
        guess_columns(sample, "log")
    assert "'arrival=timestamp:%m/%d/%Y %I:%M:%S %p,input=prompt_tokens" in str(caught.value)
    with pytest.raises(UnsureError, match=r"arrival=at:%m/%d/%Y %H:%M'"):
        read(["05/10/2026 09:00", "05/13/2026 09:00"])


def test_a_time_that_is_not_of_the_pattern_is_refused_with_the_pattern() -> None:
    with pytest.raises(TraceError, match=r"written as %m\.%d\.%Y, found '14\.03\.2026'"):
        read(["03.03.2026", "14.03.2026"], unit="%m.%d.%Y")


def test_a_comma_in_a_pattern_does_not_end_it() -> None:
    columns = parse_columns("arrival=at:%d.%m.%Y %H:%M:%S,%f,input=in,output=out")
    assert columns.units == {"arrival": "%d.%m.%Y %H:%M:%S,%f"}
    assert (columns.arrival, columns.input, columns.output) == ("at", "in", "out")


def test_a_map_that_is_proposed_has_the_status_and_the_tenant() -> None:
    """Typed as proposed, a gateway's log counted its failures as traffic, and knew no customers."""
    sample = pd.DataFrame(
        {
            "When": ["13.10.2026 09:00:01"] * 3,
            "Tokens In": [3, 4, 5],
            "Tokens Out": [1, 2, 3],
            "HTTP": [200, 500, 200],
            "Customer": ["a", "b", "a"],
        }
    )
    with pytest.raises(UnsureError, match="output=Tokens Out,tenant=Customer,status=HTTP'"):
        guess_columns(sample, "log")


def test_dates_under_a_name_that_says_nothing_are_proposed_as_the_arrival() -> None:
    sample = pd.DataFrame(
        {"when": ["2026-10-05T09:00:00Z"] * 3, "prompt_tokens": [1] * 3, "completion_tokens": [1] * 3}
    )
    with pytest.raises(UnsureError, match="when holds dates") as caught:
        guess_columns(sample, "log")
    assert "arrival=when,input=prompt_tokens" in str(caught.value)


def test_dates_of_the_end_with_a_duration_are_proposed_as_both() -> None:
    """As the arrival they would be late by what each request took."""
    sample = pd.DataFrame(
        {
            "completed": ["25.10.2026 08:00:06,849", "25.10.2026 08:00:09,100"],
            "took_s": [6.759, 3.195],
            "tok_in": [572, 2168],
            "tok_out": [174, 180],
        }
    )
    with pytest.raises(UnsureError, match="completed holds dates; found") as caught:
        guess_columns(sample, "log")
    assert "'end=completed:%d.%m.%Y %H:%M:%S.%f,duration=took_s,input=tok_in,output=tok_out'" in str(
        caught.value
    )
    alone = sample.drop(columns="took_s")
    with pytest.raises(UnsureError, match="'arrival=completed:"):
        guess_columns(alone, "log")


def test_a_number_beyond_all_times_is_none_in_silence() -> None:
    """1e305 s in nanoseconds overflowed with a warning of NumPy, found by a mutated trace."""
    assert LogClock("arrival_s").fitting_frac(pd.Series([1.5e9, 1.6e9, 1.7e9, 1e305])) == 0.75
