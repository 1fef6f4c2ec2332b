"""`traffic:` that describes requests: read, refused, written again."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from plans import CATALOG

from planner.documents.catalog import read_catalog
from planner.documents.schemas.all_schemas import named_schema
from planner.documents.task import parse_task
from planner.documents.traffic_description import description_document, parse_description, parse_task_row
from planner.errors import CatalogError, InputError
from planner.files.checked_files import to_yaml, yaml_value
from planner.files.document_values import Section
from planner.traffic.described import Description, draw_requests, fit_context
from planner.traffic.lengths import LengthHistogram, Lognormal, Percentiles

PLAIN: dict[str, Any] = {"rate": 30, "input": 1500, "output": 300}
FULL: dict[str, Any] = {
    "rate": {"curve": [10, 30, 20], "every": "300 s"},
    "input": {"mean": 1500, "p50": 900, "p95": 5000, "max": 32000},
    "output": {"histogram": {"edges": [0, 10, 100, 1000], "counts": [1, 5, 2]}},
    "joint": {"table": [[3, 1], [1, 3]]},
    "drift": {"input": [0.1, 0, -0.1]},
    "burstiness": {"cv": 1.5, "fano": {"10 s": 8, "1 min": 20}},
    "clients": {"count": 50, "skew": 0.9, "cv": 1, "lengths": 0.2},
    "sessions": {"turns": 3, "think_time": "30 s", "most_tokens": 32000},
    "prefixes": {"shared": 800, "count": 20, "skew": 1},
    "tenants": 3,
}
TENANTS: dict[str, Any] = {
    "duration": "1000 s",
    "tenants": {
        "chat": {"rate": 4, "task": "chat"},
        "batch": {"rate": 1, "input": 6000, "output": {"fixed": 800}},
    },
}


def read(document: dict[str, Any]) -> Description:
    found = parse_description(Section.from_document(document, "slo.yaml: traffic"), CATALOG.tasks)
    assert found is not None
    return found


@pytest.mark.parametrize("document", [PLAIN, FULL, {"rate": 5, "task": "reasoning"}])
def test_a_description_reads_as_it_was_written(document: dict[str, Any]) -> None:
    first = read(document)
    text = to_yaml({"traffic": description_document(first)})
    assert read(yaml_value(text)["traffic"]) == replace(first, basis=())


THOUSANDS: dict[str, Any] = {
    "input": {"mean": "1.5k", "p95": "5K"},
    "output": "1,200",
    "prefixes": {"shared": "1k"},
    "sessions": {"turns": 3, "think_time": "30 s", "most_tokens": "32k"},
}


def test_tokens_may_be_written_in_thousands() -> None:
    """As with `--input 1.5k`; text that is no number is refused."""
    written = {
        "input": {"mean": 1500, "p95": 5000},
        "output": 1200,
        "prefixes": {"shared": 1000},
        "sessions": {"turns": 3, "think_time": "30 s", "most_tokens": 32000},
    }
    assert read({"rate": 30, **THOUSANDS}) == read({"rate": 30, **written})
    document = {"llm": "any", "slo": {"ttft": {"p95": "1 s"}}, "traffic": {"rate": 30, **THOUSANDS}}
    jsonschema.validate(document, named_schema("slo", CATALOG))
    agents = read({"agents": {"count": 30, "system": "8k"}, "task": "coding-agent"}).agents
    assert agents is not None and agents.system_tokens == 8000
    with pytest.raises(InputError, match="found '1kb'"):
        read({"rate": 30, "input": "1kb", "output": 300})


def test_tenants_of_two_kinds_are_drawn_each_by_its_own_description() -> None:
    """4 and 1 requests/s for 1,000 s, three times as many at three times the rate; written and read again
    they draw the same.
    """
    found = read(TENANTS)
    again = read(yaml_value(to_yaml(description_document(found))))
    trace, same = draw_requests(found, seed=1), draw_requests(again, seed=1)
    assert np.array_equal(trace.input_tokens, same.input_tokens) and trace.tenants == ("chat", "batch")
    chat, batch = (trace.tenant == k for k in (0, 1))
    assert (chat.sum(), batch.sum()) == pytest.approx((4000, 1000), rel=0.1)
    assert trace.input_tokens[chat].mean() == pytest.approx(1155, rel=0.1)
    assert trace.input_tokens[batch].mean() == pytest.approx(6000, rel=0.1)
    assert set(trace.output_tokens[batch]) == {800}
    assert len(draw_requests(found.at_rate(15), seed=1)) == pytest.approx(15_000, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"rate": 5}, "rate: stands beside tenants that are described one by one"),
        ({"sessions": {"turns": 3, "think_time": "9 s"}}, "sessions: stands beside tenants"),
        ({"tenants": {"chat": {"rate": 4, "task": "chat"}}}, "expected two tenants or more"),
        (
            {"tenants": {"a": {"rate": 4}, "b": {"rate": 1, "input": 9, "output": 9}}},
            "tenants: a: input: is missing",
        ),
        ({"tenants": {"a": {"task": "chat"}, "b": {"task": "chat"}}}, "tenants: a: rate is missing"),
    ],
)
def test_tenants_that_say_too_much_or_too_little_are_refused(changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(InputError, match=needed):
        read({**TENANTS, **changes})


def test_what_is_longer_than_the_llm_accepts_is_cut_and_said() -> None:
    """Lognormal prompts of 6,000 on average: 0.35 % are longer than 40,960 - 800 tokens, z = 2.70."""
    fitted = fit_context(read({"rate": 20, "duration": "1000 s", "input": 6000, "output": 800}), 40_960)
    trace = draw_requests(fitted, seed=0)
    total = trace.input_tokens + trace.output_tokens
    assert total.max() == 40_960 and 0.002 < (total == 40_960).mean() < 0.006
    assert "are cut to that" in trace.warnings[0]


def test_a_mean_alone_has_a_spread_that_is_said() -> None:
    found = read(PLAIN)
    assert found.input == Lognormal(1500, 1.0)
    assert any("taken for granted" in line for line in found.basis)


def test_a_mean_in_a_mapping_is_the_mean_alone() -> None:
    """It dropped the shape of a task's lengths, and did not say that it took a lognormal one."""
    as_mapping = PLAIN | {"input": {"mean": PLAIN["input"]}}
    assert read(as_mapping) == read(PLAIN)
    task = {"rate": 30, "task": "chat"}
    assert read(task | {"output": {"mean": 400}}) == read(task | {"output": 400})
    with pytest.raises(InputError, match=r"input: mean: expected .*, found 0"):
        read(PLAIN | {"input": {"mean": 0}})


def test_a_task_fills_in_what_is_not_said() -> None:
    found = read({"rate": 30, "task": "chat", "output": 400})
    assert isinstance(found.input, Percentiles) and found.input.mean_tokens == pytest.approx(1155, rel=1e-3)
    assert isinstance(found.output, Percentiles) and found.output.mean_tokens == pytest.approx(400, rel=1e-2)
    assert found.joint == 0.07


@pytest.mark.parametrize("name", CATALOG.tasks)
def test_every_task_of_the_catalog_can_be_drawn(name: str) -> None:
    load = {"agents": 10} if "agents" in CATALOG.tasks[name].values else {"rate": 1}
    found = read({**load, "task": name})
    has_long_outputs = name in ("reasoning", "translating", "translating-4k")
    assert (found.input.mean_tokens < found.output.mean_tokens) == has_long_outputs


def test_a_week_is_drawn_at_its_busiest_hour() -> None:
    """All hours 10 requests/s but one of 40, mean asked 20: factors of 20 / 10.18, so 78.6 at the peak."""
    week = [10] * 100 + [40] + [10] * 67
    found = read({**PLAIN, "rate": {"weekly": week, "mean": 20}})
    assert found.mean_rps == pytest.approx(40 * 20 / (1710 / 168))
    days = [week[24 * day : 24 * day + 24] for day in range(7)]
    assert read({**PLAIN, "rate": {"weekly": days}}).mean_rps == pytest.approx(40)


def test_growth_is_compound() -> None:
    """5 % a month for six months: 1.05^6 = 1.3401."""
    assert read({**PLAIN, "growth": {"per_month": "5 %", "months": 6}}).mean_rps == pytest.approx(
        30 * 1.3401, rel=1e-4
    )


def test_buckets_of_prometheus_are_read() -> None:
    """The shape that metrics are turned into."""
    found = read(
        {
            "rate": {"curve": [1.5, 2.5], "every": "300 s"},
            "input": {"histogram": {"edges": [0, 100, 200], "counts": [1, 2]}},
            "output": {"histogram": {"edges": [0, 10, 20], "counts": [0, 2]}},
        }
    )
    assert found.input == LengthHistogram((0, 100, 200), (1, 2)) and found.duration_s == 600


def test_a_question_takes_it_in_place_of_a_rate() -> None:
    document = {"llm": "llama-3.1-70b", "slo": {"ttft": {"p90": "2 s"}}, "traffic": PLAIN}
    task = parse_task(document, CATALOG)
    assert task.rate_rps is None and task.described == fit_context(read(PLAIN), 131_072)
    assert parse_task({**document, "traffic": {"rate": 20}}, CATALOG).described is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rate": 0}, "rate: must be > 0"),
        ({"rate": -3}, "rate: must be > 0"),
        ({"rate": {"curve": [], "every": "1 h"}}, "rate: curve"),
        ({"rate": {"curve": [0, 0], "every": "1 h"}}, "all rates are 0"),
        ({"rate": {"curve": [1, 2]}}, "every is missing"),
        ({"rate": {"curve": [1, -2], "every": "1 h"}}, "curve\\[1\\]: expected a number >= 0"),
        ({"rate": {"weekly": [1] * 100}}, "expected 168 numbers"),
        ({"input": {"p50": 900, "p95": 500}}, "percentiles must rise, found p50: 900, p95: 500"),
        (
            {"input": {"mean": 500, "max": 4000}},
            "max, mean alone says too little; add a percentile such as p95",
        ),
        ({"input": {"mean": 90_000, "p50": 900, "p95": 5000, "max": 6000}}, "which allow"),
        ({"input": {"mean": 100, "p50": 900}}, "which allows 900 to"),
        ({"input": {"mean": 200, "p50": 900, "p95": 5000}}, "which allow"),
        ({"input": {"p50": 900}}, "one percentile alone"),
        ({"input": {"p500": 900}}, "unknown key 'p500'"),
        ({"input": {"histogram": {"edges": [0, 10], "counts": [1, 2]}}}, "one edge more than counts"),
        ({"input": {"histogram": {"edges": [0, 10, 5], "counts": [1, 2]}}}, "that rise"),
        ({"input": {"histogram": {"edges": [0, 10, 50], "counts": [0, 0]}}}, "one of them above 0"),
        ({"input": {"lognormal": {"cv": 1}}}, "mean is missing"),
        ({"input": 0}, "expected a number >= 1"),
        ({"output": None}, "output: is missing"),
        ({"task": "chatt"}, "did you mean 'chat'"),
        ({"joint": 1.5}, "between -1 and 1"),
        ({"joint": {"table": [[1, 2], [3]]}}, "rows of one length"),
        ({"burstiness": {}}, "expected cv, fano or both"),
        ({"burstiness": {"fano": {"10": 3}}}, "no unit"),
        ({"burstiness": {"cv": 3, "fano": {"10 s": 3}}}, "less than 9"),
        ({"clients": {"count": 2}, "tenants": 3}, "cannot belong to 3 tenants"),
        ({"sessions": {"turns": 0.5, "think_time": "1 s"}}, "turns: expected a number >= 1"),
        ({"sessions": {"turns": 2}}, "think_time is missing"),
        ({"prefixes": {"shared": 0}}, "shared: expected a whole number >= 1"),
        ({"drift": {"input": [1, 2]}}, "holds 2 numbers, expected 1"),
        ({"duration": "1 s", "rate": 2}, "expected 20 to"),
        ({"scale": "thin"}, "scale: is for a trace"),
        ({"growth": {"per_month": "5 %"}}, "months is missing"),
        ({"growth": {"per_month": "5 %", "months": 1e6}}, "months: expected at most 120"),
    ],
)
def test_what_cannot_be_is_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        read({**PLAIN, **changes})
    assert str(raised.value).startswith("slo.yaml: traffic") and "\n" not in str(raised.value)


def test_a_task_that_describes_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="tasks: idle: describes no requests"):
        parse_task_row("idle", Section({"of": "nothing", "source": "here"}, "tasks: idle"))


def test_the_rate_may_be_left_out_where_it_is_sought() -> None:
    question = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p95": "2 s"}}, "traffic": {"task": "chat"}}
    sought = question | {"objective": "throughput", "fleet": {"gpus": {"l40s-48g": 4}}}
    found = parse_task(sought, CATALOG).described
    assert found is not None and found.rate_rps == (5.0,)
    assert not parse_task(sought, CATALOG).warnings
    named = sought | {"traffic": {"task": "chat", "rate": 4}}
    assert any("does not keep to 4;" in warning for warning in parse_task(named, CATALOG).warnings)
    with pytest.raises(InputError, match="rate: is missing"):
        parse_task(question, CATALOG)


@pytest.mark.parametrize(("duration", "expected_s"), [({}, 300.0), ({"duration": "900 s"}, 900.0)])
def test_a_rate_that_was_sought_lasts_as_long_as_one_that_is_given(
    duration: dict[str, str], expected_s: float
) -> None:
    """Traffic of 95 requests/s was 33 minutes long where its rate was sought, and 5 where it was given."""
    traffic = {"task": "chat"} | duration
    question = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p95": "2 s"}}, "traffic": traffic}
    limits = {"objective": "throughput", "fleet": {"gpus": {"l40s-48g": 4}}}
    sought = parse_task(question | limits, CATALOG).described
    given = parse_task(question | {"traffic": traffic | {"rate": 95}}, CATALOG).described
    assert sought is not None and given is not None
    assert sought.at_rate(95.0).duration_s == given.duration_s == expected_s


def test_the_shipped_catalog_is_read_without_scipy() -> None:
    """To describe traffic by each shipped task, as for an own catalog, would import scipy.special."""
    code = "import sys; from planner.documents.catalog import read_catalog; read_catalog()"
    code += "; sys.exit('scipy.special' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_task_of_an_own_catalog_is_checked_when_it_is_read(tmp_path: Path) -> None:
    """Its prompts have 0 tokens."""
    (tmp_path / "tasks.yaml").write_text("chat: {of: prompts, input: 0, output: 100, source: us}\n")
    with pytest.raises(CatalogError, match="input"):
        read_catalog(tmp_path)
