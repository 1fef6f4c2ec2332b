"""Ranges of Prometheus' samples: increases by hand, formats against each other, promtool where it is."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.errors import InputError
from planner.importers.prometheus_range import (
    PrometheusSeries,
    SampledHistogram,
    counter_increase,
    find_series,
    interval_edges,
    interval_histogram,
    mean_gauge,
    parse_series,
    read_series,
)
from planner.importers.prometheus_runs import _draw_lengths

NAN = math.nan
OK = "vllm:request_success_total"


def counter(t_s: list[float], values: list[float], **labels: str) -> PrometheusSeries:
    return PrometheusSeries(OK, tuple(sorted(labels.items())), np.array(t_s, float), np.array(values, float))


def row(name: str, values: list[list[object]], **labels: str) -> dict[str, object]:
    return {"metric": {"__name__": name, **labels}, "values": values}


def answer(*rows: dict[str, object]) -> str:
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": list(rows)}})


def test_a_counter_that_falls_began_anew() -> None:
    """0, 10 | 10, 25 | fell to 4: 4 more | 4, 9. In all 10, 15, 4, 5."""
    found = counter_increase(
        [counter([0, 60, 120, 180, 240], [0, 10, 25, 4, 9])], np.arange(0.0, 300.0, 60.0)
    )
    assert found.tolist() == [10, 15, 4, 5]


def test_between_samples_a_counter_rises_evenly() -> None:
    """60 in 60 s, samples at 30, 90, 150: the interval from 60 to 120 holds half of each, 30 + 30."""
    found = counter_increase([counter([30, 90, 150], [0, 60, 120])], np.array([0.0, 60.0, 120.0, 180.0]))
    assert found[1] == 60
    assert np.isnan(found[[0, 2]]).all()  # the beginning and the end are not all covered


def test_instances_are_summed_and_may_come_and_go() -> None:
    """The second instance lives from 60 to 180 s; what it had when it was first seen does not count."""
    edges = np.arange(0.0, 300.0, 60.0)
    a = counter([0, 60, 120, 180, 240], [0, 6, 12, 18, 24], instance="a")
    b = counter([60, 120, 180], [100, 101, 103], instance="b")
    assert counter_increase([a, b], edges).tolist() == [6, 7, 8, 6]


def test_a_gap_leaves_its_intervals_unknown_and_a_stale_end_does_not() -> None:
    edges = np.arange(0.0, 1500.0, 300.0)
    gap = counter([0, 300, 900, 1200], [0, 5, 15, 20])
    found = counter_increase([gap], edges)
    assert found[[0, 3]].tolist() == [5, 5]
    assert np.isnan(found[1:3]).all()
    stopped = counter([0, 300, 330, 900, 1200], [0, 5, NAN, 0, 20])
    alive = counter([0, 300, 600, 900, 1200], [0, 1, 2, 3, 4], instance="b")
    assert counter_increase([stopped, alive], edges).tolist() == [6, 1, 1, 21]


def test_a_gauge_is_its_mean_over_time() -> None:
    """4 for 30 s, then 10: (4 * 30 + 10 * 30) / 60 = 7 in the first minute, 10 in the second."""
    level = PrometheusSeries(
        "vllm:num_requests_running", (), np.array([0.0, 30.0, 90.0, 120.0]), np.array([4, 10, 10, 10.0])
    )
    assert mean_gauge([level], np.array([0.0, 60.0, 120.0])).tolist() == [7, 10]
    ended = PrometheusSeries(level.name, (("instance", "b"),), np.array([0.0, 60.0]), np.array([2.0, NAN]))
    assert mean_gauge([level, ended], np.array([0.0, 60.0, 120.0])).tolist() == [9, 10]
    # A sample holds for 60 s, so the gauge is unknown from 90 s to 210 s, unless a marker ended the series.
    gap = PrometheusSeries(level.name, (), np.array([0, 30, 210, 240.0]), np.array([5.0, 5.0, 5.0, 5.0]))
    edges_s = np.array([0.0, 60.0, 120.0, 180.0, 240.0])
    np.testing.assert_array_equal(mean_gauge([gap], edges_s, gap_s=60.0), [5, NAN, NAN, NAN])
    stopped = replace(gap, values=np.array([5.0, NAN, 5.0, 5.0]))
    np.testing.assert_array_equal(mean_gauge([stopped], edges_s, gap_s=60.0), [2.5, 0, 0, 2.5])


def test_a_histogram_is_counts_per_bucket_and_interval() -> None:
    rows = []
    for le, counts in (("10", [0, 4, 4]), ("20", [0, 7, 9]), ("+Inf", [0, 8, 11])):
        rows.append(row("x_bucket", [[60 * k, str(v)] for k, v in enumerate(counts)], le=le))
    rows.append(row("x_sum", [[0, "0"], [60, "90"], [120, "150"]]))
    found = interval_histogram(parse_series(answer(*rows), "test"), "x", np.array([0.0, 60.0, 120.0]))
    assert found is not None
    assert found.edges.tolist() == [10, 20, math.inf]
    assert found.counts.tolist() == [[4, 3, 1], [0, 2, 1]]
    assert found.total.tolist() == [8, 3]
    assert found.sums.tolist() == [90, 60]


def test_the_formats_say_the_same(tmp_path: Path) -> None:
    texts = {
        "api.json": answer(row(OK, [[1.5, "1"], [2.5, "3"]], instance="a:1", note='a "b", {c}')),
        "promtool.json": json.dumps([row(OK, [[1.5, "1"], [2.5, "3"]], instance="a:1", note='a "b", {c}')]),
        "dump.txt": "\n".join(
            f'{{__name__="{OK}", instance="a:1", note="a \\"b\\", {{c}}"}} {v} {t}'
            for v, t in (("1", 1500), ("3", 2500))
        ),
        "openmetrics.txt": "# TYPE x counter\n"
        + "\n".join(
            f'{OK}{{instance="a:1",note="a \\"b\\", {{c}}"}} {v} {t}' for v, t in (("1.0", 1.5), ("3.0", 2.5))
        )
        + "\n# EOF\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (found,) = read_series([tmp_path / name])
        assert found.labels == (("instance", "a:1"), ("note", 'a "b", {c}')), name
        assert (found.name, found.t_s.tolist(), found.values.tolist()) == (OK, [1.5, 2.5], [1, 3]), name
    (both,) = read_series([tmp_path / name for name in texts])
    assert both.t_s.tolist() == [1.5, 2.5]


def test_names_and_intervals() -> None:
    rows = (counter([65, 400], [0, 1]), counter([10, 300], [0, 1], instance="b"))
    assert interval_edges(rows, 60).tolist() == [60, 120, 180, 240, 300, 360]
    assert find_series(rows, "vllm:none", OK) == rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("{", "is no"),
        ('{"status": "error", "error": "bad\\nquery"}', "answered an error: bad query"),
        ('{"status": "success", "data": {"resultType": "vector", "result": []}}', "expected matrix"),
        (answer({"metric": {}, "values": []}), "has no __name__"),
        (answer({"metric": {"__name__": "x"}, "histograms": []}), "native histogram"),
        (answer(row("x", [[1, "one"]])), "'one' is not a number"),
        (answer(row("x", [[1e13, "1"]])), "expected Unix time in seconds"),
        (answer(row("x", [[1, "1"], [1, "2"]])), "two values at 1.000"),
        (answer(row("x", [[1]])), "expected [time, value]"),
        ('{__name__="x"} 1 1000\nx 1 1\n', "mixes lines"),
        ("created_at,prompt_tokens\n1,2\n", "not a sample with its time"),
        ('vllm:request_success_total{engine="0"} 5.0\n', "has no times: ask Prometheus, /api/v1/query_range"),
        ('{instance="a"} 1 1000', "has no __name__"),
        (answer(), "holds no samples"),
    ],
)
def test_bad_input_ends_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "range.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_series([path])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_instances_with_other_buckets_are_refused() -> None:
    rows = [
        row("x_bucket", [[0, "0"], [60, "1"]], le=le, instance=instance)
        for le, instance in (("10", "a"), ("+Inf", "a"), ("20", "b"), ("+Inf", "b"))
    ]
    with pytest.raises(InputError, match="different buckets"):
        interval_histogram(parse_series(answer(*rows), "test"), "x", np.array([0.0, 60.0]))


def test_mutated_files_end_in_one_line_or_are_read(tmp_path: Path) -> None:
    """300 mutants of each format; nothing but InputError comes out."""
    rng = random.Random(3)
    sources = [
        answer(
            row(OK, [[60 * k, str(k)] for k in range(9)], instance="a"), row("x_bucket", [[0, "1"]], le="5")
        ),
        "".join(f'{{__name__="{OK}", instance="a"}} {k} {k * 60000}\n' for k in range(9)),
        "".join(f'{OK}{{instance="a"}} {k} {k * 60}\n' for k in range(9)) + "# EOF\n",
    ]
    path = tmp_path / "mutant"
    for source in sources:
        for _ in range(300):
            text = list(source)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(text))
                text[at : at + rng.randint(0, 3)] = rng.choices('{}[]",:=\\ \n0-9eNa', k=rng.randint(0, 3))
            path.write_text("".join(text))
            try:
                found = read_series([path])
                counter_increase(found, interval_edges(found, 60.0))
                interval_histogram(found, "x", interval_edges(found, 60.0))
            except InputError as error:
                assert "\n" not in str(error)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_what_promtool_dumps_is_read(tmp_path: Path) -> None:
    """A real database made from OpenMetrics text, and dumped again."""
    t0 = 1_700_000_000
    lines = [f'{OK}{{instance="a"}} {3 * k} {t0 + 15 * k}' for k in range(41)]
    (tmp_path / "in.txt").write_text("# TYPE vllm:request_success counter\n" + "\n".join(lines) + "\n# EOF\n")
    make = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "in.txt", "data"]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "data" / "wal").mkdir()  # dump wants one
    dumped = subprocess.run(
        ["promtool", "tsdb", "dump", "data"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    (tmp_path / "dump.txt").write_text(dumped.stdout)
    (found,) = read_series([tmp_path / "dump.txt"])
    assert found.t_s.tolist() == [t0 + 15 * k for k in range(41)]
    assert counter_increase([found], found.t_s[::20]).tolist() == [60, 60]


@pytest.mark.parametrize(("sum_tokens", "mean"), [(300_000.0, 300.0), (math.nan, 200.0)])
def test_lengths_without_a_sum_have_the_mean_of_their_buckets(sum_tokens: float, mean: float) -> None:
    """Half of 1,000 lengths lie between 100 and 200 tokens, half between 200 and 300: evenly spread their
    mean is 200. A known sum counts instead. Without a sum every length was 1 token.
    """
    histogram = SampledHistogram(
        np.array([100.0, 200.0, 300.0, np.inf]),
        np.array([[0.0, 500.0, 500.0, 0.0]]),
        np.array([1_000.0]),
        np.array([sum_tokens]),
    )
    lengths = _draw_lengths(histogram, slice(None), 1_000, np.random.default_rng(0))
    assert np.mean(lengths) == pytest.approx(mean, rel=0.01)
