"""report.html: self-contained, escaped, light; and the arithmetic behind its curves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from plans import a_plan, a_simulation, a_trace, pairs

from planner import charts, curves, drawing, report

VOID = {"meta", "br", "img", "hr", "input", "link"}
OPTIONAL = {"p", "li", "dt", "dd"}


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page() -> str:
    return report.render(a_plan())


def test_the_page_is_well_formed_and_needs_no_network(page: str) -> None:
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert parser.links == []
    assert "url(http" not in page and "@import" not in page and "<script" not in page


def test_the_page_answers_and_says_why(page: str) -> None:
    for text in (
        "4 prefill workers of 2 × h100-80g and 3 decode workers of 4 × h100-80g@350W: 59.80 USD per hour",
        "✓\u00a0kept", "TTFT p90 binds", "more workers never hurt", "a gap of 20 % to the plan", "runner-up",
        "refuted up to there", "84 % within 2.00 s", "a note on the trace", "Left out: 3 rows, blank line",
        "seed 7", "nvidia-smi -pl 350",
    ):  # fmt: skip
        assert text in page, text


def test_the_page_says_what_is_provisioned_and_what_is_expected() -> None:
    plan = a_plan()
    power = plan.power
    assert power is not None
    page = report.render(plan)
    for text in (
        f"provisioned, GPUs only; {power.mean_w / 1e3:,.1f} kW expected",
        f"{power.request_j:,.0f} J per request",
        "a model fitted to A100 measurements",
    ):
        assert text in page, text
    blind = replace(plan, simulation=replace(plan.simulation, runs=plan.simulation.runs[:0]))
    assert "is the GPUs&#x27; limit, not what they draw." in report.render(blind)


def test_a_missed_limit_is_said_in_words() -> None:
    plan = a_plan()
    line = replace(plan.verdict.lines[0], holds=False)
    page = report.render(replace(plan, verdict=replace(plan.verdict, lines=(line, *plan.verdict.lines[1:]))))
    assert "✗\u00a0missed" in page
    assert "it does NOT keep the promise" in page


def test_what_users_wrote_is_escaped() -> None:
    plan = a_plan(note="<script>alert(1)</script> & more")
    fleet = plan.fleet
    pool = replace(fleet.pools[0], name="<b>pool</b>")
    page = report.render(replace(plan, fleet=replace(fleet, pools=(pool, *fleet.pools[1:]))))
    assert "<script" not in page
    assert "<b>" not in page


def test_a_guess_is_flagged_as_a_guess() -> None:
    plan = a_plan()
    pool = plan.fleet.pools[0]
    guess = replace(pool.type, latency=replace(pool.type.latency, basis="roofline", mape_frac=None))
    fleet = replace(plan.fleet, pools=(replace(pool, type=guess), *plan.fleet.pools[1:]))
    assert "⚠ roofline (from catalog figures, nothing was profiled)" in report.render(
        replace(plan, fleet=fleet)
    )


def test_charts_follow_dark_pages(page: str) -> None:
    for variable in ("--blue", "--vermillion", "--grid", "--muted"):
        assert f'"var({variable},' in page
    assert "prefers-color-scheme:dark" in page


def test_a_large_trace_gives_a_small_page() -> None:
    page = report.render(a_plan(requests=50_000))
    assert len(page.encode()) < 600_000


def test_a_plan_without_recorded_steps_still_has_a_report() -> None:
    plan = a_plan()
    page = report.render(replace(plan, simulation=replace(plan.simulation, runs=plan.simulation.runs[:0])))
    assert "How busy" not in page


def test_a_saturated_fleet_still_has_curves() -> None:
    """Three of four requests never get a token: the curve ends at a quarter."""
    simulation = a_simulation(pairs(), a_trace(4))
    ttft_s = np.array([0.5, np.nan, np.nan, np.nan])
    curve = curves.distribution(replace(simulation, ttft_s=ttft_s), "ttft", [2.0])
    assert (curve.value_s.tolist(), curve.share.tolist()) == ([0.5], [0.25])
    assert curves.distribution(replace(simulation, ttft_s=ttft_s * np.nan), "ttft", [2.0]).share.size == 0


def test_a_curve_keeps_the_share_at_every_limit() -> None:
    """One request in five waits: 80 % at 0.25 s, and the rejected one never gets there."""
    curve = curves.distribution(a_simulation(pairs(), a_trace(1000)), "ttft")
    assert len(curve.value_s) <= curves.POINTS
    assert curve.share[curve.value_s <= 0.25].max() == pytest.approx(0.8)
    assert curve.share.max() == pytest.approx(0.999)


def test_busy_share_counts_each_second_of_a_step_once() -> None:
    """Worker 0 works from 0 to 1 s and from 1.5 s to 2 s: all of the first second, half of the next."""
    simulation = a_plan().simulation
    runs = simulation.runs[:3].copy()
    runs["worker"], runs["growth_s"], runs["prefill_tokens"] = [0, 0, 1], 0.0, 0
    runs["start_s"], runs["first_s"], runs["steps"] = [0.0, 1.5, 0.0], [0.25, 0.5, 2.0], [4, 1, 1]
    share = curves.busy_share(replace(simulation, runs=runs), [0], np.array([0.0, 1.0, 2.0, 3.0]))
    assert share == pytest.approx([1.0, 0.5, 0.0])


def test_requests_in_the_fleet_add_up() -> None:
    """At 1.4 s of one request every third of a second: 5 came, request 4 (at 1.33 s) waits for 1 s."""
    running, queued = curves.in_system(a_plan().simulation, np.array([1.4]))
    simulation = a_plan().simulation
    finished = (simulation.arrival_s + simulation.e2e_s <= 1.4).sum()
    assert queued == [1]
    assert running == [4 - finished]


def test_spread_weighs_and_ranks() -> None:
    """Values 1, 2, 3 seen 8, 1 and 1 times: p50 1, p90 2, p99 3, mean 1.3."""
    found = curves.spread(np.array([3.0, 1.0, 2.0]), np.array([1.0, 8.0, 1.0]))
    assert found == {"mean": pytest.approx(1.3), "p50": 1.0, "p90": 2.0, "p99": 3.0}


def test_importing_the_report_does_not_import_altair() -> None:
    code = "import sys, planner.report; sys.exit('altair' in sys.modules or 'vl_convert' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_chart_becomes_an_image_for_the_readme() -> None:
    png = drawing.chart_png(charts.bars_chart([charts.Bar("this plan", 10.0, is_plan=True)], "USD/h"))
    assert png.startswith(b"\x89PNG")
