"""planner/importers/metered_traffic.py: metrics and usage as curves and lengths, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from shares import some

from planner.documents.traffic_description import parse_description
from planner.errors import InputError
from planner.files.document_values import Section
from planner.importers.metered_traffic import MeteredTraffic, read_metered_traffic
from planner.traffic.described import draw_requests

START_S = 1_767_607_200  # a whole hour
EDGES = ("10", "100", "1000", "+Inf")
Values = list[list[float | str]]


def counter(rps: float, times_s: list[int], *, reset_at_s: int | None = None) -> Values:
    """A counter that rises by `rps`, and begins anew at zero once."""
    values: Values = []
    for at_s in times_s:
        since_s = at_s if reset_at_s is None or at_s < reset_at_s else at_s - reset_at_s
        values.append([START_S + at_s, str(rps * since_s)])
    return values


def series(name: str, values: Values, **labels: str) -> dict[str, Any]:
    return {"metric": {"__name__": name, "model_name": "m", **labels}, "values": values}


def metrics(
    times_s: list[int], *, instance: str = "a", rps: float = 2.0, reset_at_s: int | None = None
) -> list[Any]:
    """An engine: 1/4 of the prompts up to 10 tokens, 1/2 up to 100, 1/4 up to 1000; answers all 10 to 100."""
    name, found = {"instance": instance}, []
    for side, below in (("prompt", (0.25, 0.75, 1, 1)), ("generation", (0, 1, 1, 1))):
        for le, share in zip(EDGES, below, strict=True):
            own = counter(rps * share, times_s, reset_at_s=reset_at_s)
            found.append(series(f"vllm:request_{side}_tokens_bucket", own, le=le, **name))
        for part, per in (("count", 1.0), ("sum", 166.25 if side == "prompt" else 55.0)):
            own = counter(rps * per, times_s, reset_at_s=reset_at_s)
            found.append(series(f"vllm:request_{side}_tokens_{part}", own, **name))
    for reason, share in (("stop", 0.75), ("length", 0.25)):
        own = counter(rps * share, times_s, reset_at_s=reset_at_s)
        found.append(series("vllm:request_success_total", own, finished_reason=reason, **name))
    return found


def described(tmp_path: Path, rows: list[Any], every: str = "300 s") -> MeteredTraffic:
    path = tmp_path / "range.json"
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}}))
    found = read_metered_traffic([path], every=every)
    assert found is not None
    return found


TIMES_S = list(range(0, 3601, 60))


def test_a_range_of_metrics_becomes_rates_and_histograms(tmp_path: Path) -> None:
    """2 requests/s for an hour: 12 intervals of 300 s; 7200 requests, 1800 below 10 tokens, 3600 to 100."""
    found = described(tmp_path, metrics(TIMES_S))
    assert found.rate_rps == pytest.approx([2.0] * 12)
    assert found.to_document() == yaml.safe_load(found.to_yaml("range.json"))["traffic"]
    assert found.to_document() == {
        "rate": {"curve": [2] * 12, "every": "300 s"},
        "input": {"histogram": {"edges": [0, 10, 100, 1000], "counts": [1800, 3600, 1800]}},
        "output": {"histogram": {"edges": [10, 100], "counts": [7200]}},
    }
    assert found.mean_tokens == {"input": 166.25, "output": 55.0}
    assert (found.warnings, found.notes) == ((), ())


def test_what_is_written_is_what_a_question_reads_and_draws(tmp_path: Path) -> None:
    """The curve and the means of the counters come back; a bucket holds no more than its edges."""
    found = described(tmp_path, metrics(TIMES_S))
    description = parse_description(Section(found.to_document(), "traffic"), {})
    assert description is not None
    requests = draw_requests(description, seed=0)
    assert len(requests) == pytest.approx(7200, rel=0.1)
    assert requests.duration_s == pytest.approx(3600, rel=0.01)
    shares = np.histogram(requests.input_tokens, (0, 11, 101, 1001))[0] / len(requests)
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.05)
    assert 10 <= requests.output_tokens.min() <= requests.output_tokens.max() <= 100


def test_what_is_written_has_the_mean_that_was_counted(tmp_path: Path) -> None:
    """Answers are all in the bucket 10 to 100, middle 55; their sum says 40, so 5/6 are in its lower half."""
    rows = metrics(TIMES_S)
    for row in rows:
        if row["metric"]["__name__"] == "vllm:request_generation_tokens_sum":
            row["values"] = counter(2 * 40.0, TIMES_S)
    found = described(tmp_path, rows)
    expected = {"edges": [10, 55, 100], "counts": pytest.approx([6000, 1200])}
    assert found.to_document()["output"] == {"histogram": expected}
    assert any(note.endswith("what is written has 40") for note in found.notes)


def test_instances_add_up_and_a_restart_is_no_fall(tmp_path: Path) -> None:
    """2 and 1 requests/s; the second engine begins anew half way."""
    rows = metrics(TIMES_S) + metrics(TIMES_S, instance="b", rps=1.0, reset_at_s=1800)
    found = described(tmp_path, rows)
    assert found.rate_rps == pytest.approx([3.0] * 12, rel=0.08)  # what was counted between scrapes is lost
    assert found.rate_rps[:5] == pytest.approx([3.0] * 5)


def test_requests_of_prefill_workers_count_once(tmp_path: Path) -> None:
    """A prefill worker counts each request as an answer of one token, its decode worker once more: the rate
    was 4 requests/s for 2, and the mean output 28 tokens for 55."""
    prefill = metrics(TIMES_S, instance="prefill")
    for row in prefill:
        name = row["metric"]["__name__"]
        if name.startswith("vllm:request_generation_tokens_"):  # one token: in every bucket
            row["values"] = counter(2.0, TIMES_S)
    found = described(tmp_path, [*prefill, *metrics(TIMES_S, instance="decode")])
    assert found.rate_rps == pytest.approx([2.0] * 12)
    assert found.mean_tokens == {"input": 166.25, "output": 55.0}
    assert "1 engine with answers of one token" in found.warnings[0]
    alone = described(tmp_path, prefill)  # Answers of one token alone are what the LLM is used for.
    assert alone.rate_rps == pytest.approx([2.0] * 12) and not alone.warnings


def test_missing_scrapes_are_filled_and_said(tmp_path: Path) -> None:
    """Nothing from minute 20 to 40, longer than Prometheus holds a sample."""
    found = described(tmp_path, metrics([at for at in TIMES_S if not 1200 < at < 2400]))
    assert found.rate_rps == pytest.approx([2.0] * 12)
    assert "intervals have no samples" in found.warnings[0]


def test_most_of_it_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"intervals are unknown.*shorter step"):
        described(tmp_path, metrics([0, 60, 120, 300, 3300, 3600]))


def test_queues_and_caches_are_said(tmp_path: Path) -> None:
    """Five requests wait all the time, caches are 80 % full, and give 30 % of the prompts' tokens."""
    gauges = [
        series("vllm:num_requests_waiting", [[START_S + at, "5"] for at in TIMES_S]),
        series("vllm:kv_cache_usage_perc", [[START_S + at, "0.8"] for at in TIMES_S]),
        series("vllm:prefix_cache_queries_total", counter(400.0, TIMES_S)),
        series("vllm:prefix_cache_hits_total", counter(120.0, TIMES_S)),
    ]
    found = described(tmp_path, metrics(TIMES_S) + gauges)
    assert found.facts["most_waiting"] == pytest.approx(5)
    assert found.facts["most_kv_cache_frac"] == pytest.approx(0.8)
    assert found.facts["prefix_hit_frac"] == pytest.approx(0.3)
    assert "requests waited in 100% of the intervals" in found.warnings[0]
    assert "30% of the prompts' tokens came from prefix caches" in found.warnings[1]


def test_samples_as_far_apart_as_the_intervals_say_the_same(tmp_path: Path) -> None:
    """A sample every ten minutes, in intervals of ten: caches and aborted requests were dropped, and waiting
    requests counted for half of the time.
    """
    times_s = list(range(0, 7201, 600))
    more = [
        series("vllm:num_requests_waiting", [[START_S + at, "5"] for at in times_s]),
        series("vllm:prefix_cache_queries_total", counter(400.0, times_s)),
        series("vllm:prefix_cache_hits_total", counter(120.0, times_s)),
        series("vllm:request_success_total", counter(0.5, times_s), finished_reason="abort", instance="a"),
    ]
    found = described(tmp_path, metrics(times_s) + more, every="600 s")
    assert found.facts["most_waiting"] == pytest.approx(5)
    assert found.facts["prefix_hit_frac"] == pytest.approx(0.3)
    assert found.facts["aborted_requests"] == pytest.approx(3600)


def test_dumps_of_promtool_say_the_same(tmp_path: Path) -> None:
    """`tsdb dump` has milliseconds, `dump-openmetrics` seconds."""
    found = described(tmp_path, metrics(TIMES_S))
    dump, metrics_text = [], []
    for row in metrics(TIMES_S):
        labels = ", ".join(f'{key}="{value}"' for key, value in row["metric"].items())
        plain = ",".join(f'{key}="{v}"' for key, v in row["metric"].items() if key != "__name__")
        for at, value in row["values"]:
            dump.append(f"{{{labels}}} {value} {at * 1000}")
            metrics_text.append(f"{row['metric']['__name__']}{{{plain}}} {value} {at}")
    for name, lines in (("dump.txt", dump), ("metrics.txt", ["# TYPE x counter", *metrics_text, "# EOF"])):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        again = read_metered_traffic([tmp_path / name])
        assert again is not None
        assert again.to_document() == found.to_document()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: [{**rows[0], "metric": {**rows[0]["metric"], "model_name": "n"}}, *rows[1:]],
            "of 2 LLMs",
        ),
        (
            lambda rows: [r for r in rows if "generation" not in r["metric"]["__name__"]],
            "holds no vllm:request_gen",
        ),
        (lambda rows: [{**r, "values": r["values"][:2]} for r in rows], "less than one interval"),
        (
            lambda rows: [{**r, "values": [[at, "0"] for at, _ in r["values"]]} for r in rows],
            "no request finished",
        ),
    ],
)
def test_metrics_that_cannot_be_read_say_why(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        described(tmp_path, change(metrics(TIMES_S)))


# ---------------------------------------------------------------- OpenAI's usage


def usage(width_s: int = 3600) -> dict[str, Any]:
    """Two hours: 3600 requests of 1000 and 100 tokens, none, 7200 of the same; embeddings beside them."""
    buckets = []
    for k, requests in enumerate((3600, 0, 7200)):
        results = [
            {
                "object": "organization.usage.completions.result",
                "input_tokens": 1000 * requests,
                "output_tokens": 100 * requests,
                "num_model_requests": requests,
            },
            {"object": "organization.usage.embeddings.result", "input_tokens": 7, "num_model_requests": 7},
        ]
        start_s = START_S + width_s * k
        buckets.append(
            {
                "object": "bucket",
                "start_time": start_s,
                "end_time": start_s + width_s,
                "results": results if requests else [],
            }
        )
    return {"object": "page", "data": buckets, "has_more": False}


def test_usage_of_openai_becomes_a_curve_with_mean_lengths(tmp_path: Path) -> None:
    """3600 requests in an hour are 1/s."""
    path = tmp_path / "usage.json"
    path.write_text(json.dumps(usage()))
    found = read_metered_traffic([path])
    assert found is not None
    assert found.to_document() == {
        "rate": {"curve": [1, 0, 2], "every": "3600 s"},
        "input": {"mean": 1000},
        "output": {"mean": 100},
    }
    assert "mean length alone" in found.notes[0]


def test_usage_of_several_models_is_said_to_be_a_sum(tmp_path: Path) -> None:
    page = usage()
    (first, *_), path = page["data"], tmp_path / "usage.json"
    first["results"] = [{**first["results"][0], "model": name} for name in ("gpt-5", "gpt-5-nano")]
    path.write_text(json.dumps(page))
    found = read_metered_traffic([path])
    assert found is not None and "usage of 2 models ('gpt-5', 'gpt-5-nano')" in found.warnings[0]


def test_usage_as_csv_says_the_same_and_days_are_warned_of(tmp_path: Path) -> None:
    lines = ["start_time,end_time,start_time_iso,num_model_requests,input_tokens,output_tokens"]
    for bucket in usage(86400)["data"]:
        figures = bucket["results"][0] if bucket["results"] else {}
        row = [figures.get(name, "") for name in ("num_model_requests", "input_tokens", "output_tokens")]
        lines.append(",".join(map(str, [bucket["start_time"], bucket["end_time"], "x", *row])))
    (tmp_path / "usage.csv").write_text("\n".join(lines) + "\n")
    found = read_metered_traffic([tmp_path / "usage.csv"])
    assert found is not None
    assert found.rate_rps == pytest.approx([3600 / 86400, 0, 7200 / 86400])
    assert "hide the busiest hour" in found.warnings[0]


def test_a_log_is_not_described(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("created_at,prompt_tokens,completion_tokens\n")
    assert read_metered_traffic([tmp_path / "log.csv"]) is None


@pytest.mark.parametrize("seed", some(range(40), 14))
def test_mutated_metrics_and_usage_end_in_traffic_or_one_line(tmp_path: Path, seed: int) -> None:
    """Bytes changed, taken out, doubled: never a traceback."""
    rng = np.random.default_rng(seed)
    texts = (
        json.dumps({"status": "success", "data": {"resultType": "matrix", "result": metrics(TIMES_S[:15])}}),
        json.dumps(usage()),
        "\n".join(f'vllm:request_success_total{{le="1"}} {k} {START_S + 60 * k}' for k in range(20)),
    )
    for number, text in enumerate(texts):
        raw = bytearray(text.encode())
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(20, len(raw)))
            edit = int(rng.integers(0, 3))
            if edit == 0:
                raw[at] = int(rng.integers(32, 127))
            elif edit == 1:
                del raw[at : at + int(rng.integers(1, 30))]
            else:
                raw[at:at] = raw[at : at + int(rng.integers(1, 60))]
        path = tmp_path / f"{number}.json"
        path.write_bytes(bytes(raw))
        try:
            found = read_metered_traffic([path])
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert found is None or np.isfinite(found.rate_rps).all()
