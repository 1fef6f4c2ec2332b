"""The table of metrics: a row is all it takes, from slo.yaml to the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plans import CATALOG
from questions import question, traffic

import fleetplan
from planner import slo_metrics
from planner.api.results import PlanResult
from planner.domain import Limit, Slo
from planner.reports import output
from planner.search.problem.build_problem import OutOfReachError, build_problem
from planner.simulator.counted_limits import COUNTED_WHILE_RUNNING
from planner.simulator.measured_values import measured_mask
from planner.slo_metrics import METRICS, SloMetric, metric_label
from planner.solvers.required_work import compute_slo_work
from planner.studies.fleet_comparison import comparison_lines

NORMALIZED = SloMetric(
    key="normalized_latency",
    abbreviation="normalized latency",
    name="latency per token of output",
    sentence="of requests take per token of output at most",
    values_s=lambda times: times.e2e_s / times.output_tokens,
)
"""The metric of Orca and of vLLM's paper: end-to-end time over the tokens of output."""
SMALL: dict[str, Any] = {"llm": "llama-3.1-70b", "fleet": {"gpus": ["h100-80g"]}, "safety": "none"}


@pytest.fixture
def metric(monkeypatch: pytest.MonkeyPatch) -> SloMetric:
    monkeypatch.setitem(slo_metrics._ROWS, NORMALIZED.key, NORMALIZED)
    return NORMALIZED


def test_each_metric_has_a_row_under_its_key_and_words_of_its_own() -> None:
    assert all(row.key == key for key, row in METRICS.items())
    for words in ("abbreviation", "name", "sentence"):
        assert len({getattr(row, words) for row in METRICS.values()}) == len(METRICS)


def test_the_kernel_counts_known_metrics_alone() -> None:
    assert set(COUNTED_WHILE_RUNNING) <= set(METRICS)


def test_a_metric_added_by_its_row_is_planned_simulated_and_reported(metric: SloMetric) -> None:
    """The verdict's percentile is the one of E2E over tokens, by nearest rank."""
    trace = traffic()
    found = fleetplan.plan({"ttft": {"p90": "2 s"}, metric.key: {"p90": "60 ms"}}, trace, **SMALL)
    assert isinstance(found, PlanResult)
    plan = found.plan
    line = plan.verdict.lines[1]
    counts = measured_mask(plan.simulation)
    per_token_s = np.sort((plan.simulation.e2e_s / plan.simulation.output_tokens)[counts])
    assert line.holds and line.value_s == per_token_s[int(np.ceil(0.9 * len(per_token_s))) - 1] <= 0.060
    document, files = found.to_dict(), output.render(plan)
    assert document["slo"][metric.key] == {"p90": "0.06 s"}
    assert document["simulation"][f"{metric.key}_s"]["p90"] == pytest.approx(line.value_s)
    assert metric.sentence in files["report.html"] and "Latency per token of output" in files["report.html"]


def test_a_limit_that_no_idle_worker_keeps_is_out_of_reach(metric: SloMetric) -> None:
    """A token a millisecond is below one decode step."""
    asked = question(slo={metric.key: {"p90": "1 ms"}})
    with pytest.raises(OutOfReachError, match="latency: normalized latency p90 <= 1 ms is below") as error:
        build_problem(asked, traffic(requests=60), CATALOG)
    assert error.value.floors[0][1] > 0.001


def test_a_metric_without_known_work_obliges_a_fleet_to_none(metric: SloMetric) -> None:
    trace = traffic(requests=50)
    with_it = Slo((Limit("ttft", 0.9, 1.0), Limit(metric.key, 0.9, 0.01)))
    without_it = replace(with_it, limits=with_it.limits[:1])
    assert compute_slo_work(with_it, trace) == compute_slo_work(without_it, trace)


def test_a_metric_added_by_its_row_is_compared_and_printed_of_runs(metric: SloMetric) -> None:
    """Sixty requests: the comparison and the table of percentiles have its line."""
    found = fleetplan.plan({"ttft": {"p90": "5 s"}}, traffic(requests=60, rate_rps=2.0), **SMALL)
    assert isinstance(found, PlanResult)
    slo = {metric.key: {"p90": "100 ms"}}
    run = fleetplan.simulate(found.fleet, traffic(requests=60, rate_rps=2.0), slo)
    assert f"{metric.key}_s" in set(run.to_frame()["metric"])
    compared = fleetplan.compare([found.fleet], traffic(requests=60, rate_rps=2.0), slo)
    labels = [label for label, _ in comparison_lines(compared.comparison)]
    assert f"{metric.abbreviation} p90" in labels


def test_tables_name_metrics_and_limits_as_the_glossary_does() -> None:
    """A class may have the name of a metric; other names stay."""
    names = {"ttft": "TTFT", "tbt p99": "TBT p99", "ttft e2e p50": "ttft E2E p50", "queue": "queue"}
    assert {name: metric_label(name) for name in names} == names
