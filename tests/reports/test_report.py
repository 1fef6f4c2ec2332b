"""report.html: self-contained, escaped, light; and the arithmetic behind its curves."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vl_convert
from plans import LIMITS, a_plan, a_simulation, a_trace, mixed, pairs
from simulations import LLM, make_latency, make_pool, make_trace

from planner.documents.certificate import Alternative
from planner.documents.facts import Answered, Assumed, CheaperMiss, Remarked, ScenariosDrawn, UsedUp
from planner.domain import FleetLimit, Limit
from planner.files.checked_files import cached_text, package_text
from planner.fleet import Fleet
from planner.reports import charts, curves, drawing, figures, output, report, rows, screen
from planner.reports.page import inline_html
from planner.reports.page import page_html as make_page
from planner.reports.words import (
    alternative_note,
    alternative_notes,
    cheaper_text,
    excluded_text,
    proof_lines,
)
from planner.simulator.layout import FINISHED, run_seconds
from planner.simulator.replay import simulate
from planner.solvers.repeats import Interval, Repeats

VOID = {"meta", "br", "img", "hr", "input", "link"}
PAGE_CSS = package_text("reports/page.css")


class Page(HTMLParser):
    """What a browser would see: tags that balance, with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data

    def attributes(self, name: str) -> list[str]:
        return [value or "" for _, attrs in self.tags for key, value in attrs.items() if key == name]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for found, attrs in self.tags if found == tag]

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [json.loads(unpacked(text)) for text in self.scripts[:-2]]


def unpacked(text: str) -> str:
    """As page.js does it."""
    return gzip.decompress(base64.b64decode(text)).decode()


@pytest.fixture(scope="module")
def page() -> str:
    return report.render_report(a_plan(), command="plan --slo slo.yaml --trace trace.csv -o out/")


def test_the_page_is_well_formed_and_needs_no_network(page: str) -> None:
    parsed = Page(page)
    for name in ("src", "href", "xlink:href", "srcset", "action"):
        assert parsed.attributes(name) == []
    assert "url(http" not in page and "@import" not in page
    assert not any("url" in data for spec in parsed.specs for data in _data(spec))


def _data(spec: Any) -> list[dict[str, Any]]:
    """Every `data` of a specification."""
    parts = list(spec.values()) if isinstance(spec, dict) else spec if isinstance(spec, list) else []
    own = [spec["data"]] if isinstance(spec, dict) and isinstance(spec.get("data"), dict) else []
    return own + [data for part in parts for data in _data(part)]


def test_every_chart_is_there_without_scripts_too_and_the_library_once(page: str) -> None:
    parsed = Page(page)
    figures = parsed.all("figure")
    assert len(figures) == 6  # demand, KV, queue, two distributions; how busy
    assert len([attrs for attrs in parsed.all("svg") if attrs.get("class") == "marks"]) == len(figures)
    assert len(parsed.specs) == len(figures)
    library, drawing = parsed.scripts[-2:]
    assert "window.vegaEmbed=" in unpacked(library) and "vegaEmbed(live" in drawing
    assert parsed.attributes("id").count("vega") == 1


def test_a_command_in_a_sentence_is_code() -> None:
    assert inline_html("`a < b` costs") == "<code>a &lt; b</code> costs"
    assert inline_html("alone: `") == "alone: `"


def test_what_is_proved_of_the_fleet_on_paper_is_not_said_of_the_plan() -> None:
    """A plan for production has other workers than those that bind, and another gap to the bound."""
    plan = a_plan()
    used_up = UsedUp(FleetLimit("gpus"), 8, 8)
    binding = (*plan.certificate.binding, used_up)
    plan = replace(plan, certificate=replace(plan.certificate, binding=binding))
    answers = (Answered("on-paper", (), plan.bill.usd_per_h, None, None),)
    paper = replace(plan, certificate=replace(plan.certificate, answers=answers))
    text = report.render_report(paper)
    for part in (
        "<li>on paper: TTFT p90 binds",
        "<li>on paper: GPUs is used up: 8 of 8",
        "Neighbours of the fleet on paper",
        "to the fleet on paper;",
    ):
        assert part in text and part not in report.render_report(plan)


def test_an_alternative_with_the_workers_of_the_plan_says_what_tells_it_apart() -> None:
    """Tables of fleets do not show tokens per step, so it looked like the plan, "not planned"."""
    plan = a_plan()
    other = plan.fleet.with_types(lambda worker: replace(worker, max_num_batched_tokens=640))
    alternative = Alternative("mixed pools only", other, 1.0, (Remarked("on-paper"),))
    assert alternative_notes(alternative, plan)[0] == "the plan's workers with other settings"
    assert len(alternative_notes(replace(alternative, fleet=plan.fleet), plan)) == 1


def test_an_alternative_is_compared_with_the_answer_of_its_kind() -> None:
    """30 USD/h beside 10 on paper is +200 %, beside 20 in production +50 %; the plan costs 20."""
    plan = a_plan()
    answers = (Answered("production", (), 20.0, None, None),)
    plan = replace(plan, certificate=replace(plan.certificate, value=10.0, answers=answers))
    row = Alternative("only a100-80g", plan.fleet, 30.0, (Remarked("on-paper"),))
    assert alternative_note(row, plan).startswith("+200 % against the fleet on paper, 10.00 USD/h; ")
    assert alternative_note(replace(row, notes=()), plan) == "+50.0 %"
    same = replace(plan, certificate=replace(plan.certificate, value=20.0))
    assert alternative_note(row, same).startswith("+50.0 %; compared on paper")


def test_a_page_without_charts_needs_no_script() -> None:
    assert Page(make_page("title", "<p>text</p>", "footer")).scripts == []


def test_the_page_answers_and_says_why(page: str) -> None:
    for text in (
        "Buy 3 nodes of 8 × h100-80g: 71.76 USD/h (52,385 USD per month).",
        "4 prefill workers of 2 × h100-80g and 3 decode workers of 4 × h100-80g@350W",
        "whole nodes all the time, with 4 GPUs that no worker uses",
        "✓\u00a0kept",
        "TTFT p90 binds",
        "more workers never hurt",
        "a gap of 20 % to the plan",
        "runner-up",
        "no fleet up to 1.05 times the plan",
        "84 % within 2.00 s",
        "a note on the trace",
        "Left out: 3 rows, blank line",
        "seed 7",
        "nvidia-smi -pl 350",
        "38\u00a0% below",
        "Price per million output tokens",
        "plan --slo slo.yaml --trace trace.csv -o out/",
    ):
        assert text.replace("\u00a0", " ") in page.replace("\u00a0", " "), text
    assert "71.76\u00a0USD/h" in page  # a figure is never apart from its unit


def test_the_page_says_what_is_provisioned_and_what_is_expected() -> None:
    plan = a_plan()
    power = plan.power
    assert power is not None
    page = report.render_report(plan)
    for text in (
        f"{plan.fleet.power_w / 1e3:,.1f} kW",
        f"{power.mean_w / 1e3:,.1f} kW",
        f"{power.request_j:,.0f} J",
        "a model fitted to measurements on A100",
    ):
        assert text in page, text
    blind = replace(plan, simulation=replace(plan.simulation, runs=plan.simulation.runs[:0]))
    page = report.render_report(blind)
    assert "Power, provisioned" in page and "Power, expected" not in page


def test_a_missed_limit_is_said_in_words() -> None:
    plan = a_plan()
    line = replace(plan.verdict.lines[0], holds=False)
    page = report.render_report(
        replace(plan, verdict=replace(plan.verdict, lines=(line, *plan.verdict.lines[1:])))
    )
    assert "✗\u00a0missed" in page
    assert "it does NOT keep the SLO" in page


def test_what_users_wrote_is_text_in_the_page_and_in_its_charts() -> None:
    """Names that close a script, a comment or an attribute stay names."""
    evil = "</script><script>alert(1)</script><!-- \"><b onload='x'> & "
    plan = a_plan(note=evil)
    pools = (replace(plan.fleet.pools[0], name=evil + "1"), *plan.fleet.pools[1:])
    others = tuple(replace(other, label=evil + other.label) for other in plan.alternatives)
    fleet = replace(plan.fleet, pools=pools, llm=replace(plan.fleet.llm, name=evil))
    page = report.render_report(replace(plan, fleet=fleet, alternatives=others), command=evil)
    parsed, harmless = Page(page), Page(report.render_report(plan))
    assert len(parsed.scripts) == len(harmless.scripts)
    assert parsed.all("b") == []
    assert parsed.attributes("onload") == []
    assert any(
        evil + "1" in json.dumps(spec, ensure_ascii=False).replace('\\"', '"') for spec in parsed.specs
    )


def test_a_guess_is_flagged_as_a_guess() -> None:
    plan = a_plan()
    pool = plan.fleet.pools[0]
    guess = replace(
        pool.type, latency=replace(pool.type.latency, basis="roofline", mape_frac=None, kind="roofline")
    )
    fleet = replace(plan.fleet, pools=(replace(pool, type=guess), *plan.fleet.pools[1:]))
    assert "⚠ computed from catalog figures, nothing was profiled" in report.render_report(
        replace(plan, fleet=fleet)
    )


def test_charts_follow_dark_pages(page: str) -> None:
    for variable in ("--blue", "--vermillion", "--grid", "--muted"):
        assert f'"var({variable},' in page
    assert "prefers-color-scheme: dark" in page


def _schemes() -> dict[str, dict[str, str]]:
    """Colours of page.css in either scheme."""
    roots = re.findall(r":root \{(.*?)\}", PAGE_CSS, re.DOTALL)
    light, dark = (dict(re.findall(r"(--\w+): (#\w+)", root)) for root in roots)
    return {"light": light, "dark": dark}


def _contrast(one: str, other: str) -> float:
    """WCAG 2.2, relative luminance."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def test_contrast_is_as_wcag_measures_it() -> None:
    """Black on white is 21, and #777 on white 4.48, just too little."""
    assert _contrast("#000", "#ffffff") == pytest.approx(21)
    assert _contrast("#777777", "#fff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_curves_can_be_seen(scheme: str) -> None:
    """AA: 4.5 for text, 3 for what a chart draws."""
    colours = _schemes()[scheme]
    for paper in ("--page", "--card"):
        assert min(_contrast(colours[text], colours[paper]) for text in ("--ink", "--muted")) >= 4.5
    curves = ("--blue", "--vermillion", "--green", "--purple", "--orange")
    assert min(_contrast(colours[curve], colours["--page"]) for curve in curves) >= 3


def test_charts_are_drawn_in_the_colours_of_a_light_page() -> None:
    light = _schemes()["light"]
    assert {variable: colour for colour, variable in drawing.THEME.items()}.items() <= light.items()


def test_the_page_can_be_read_aloud(page: str) -> None:
    """Charts and tables have names, ids are unique, headings go down one by one."""
    parsed = Page(page)
    ids = parsed.attributes("id")
    assert len(ids) == len(set(ids))
    assert parsed.all("html") == [{"lang": "en"}]
    pictures = [attrs for attrs in parsed.all("div") if attrs.get("role") == "img"]
    assert len(pictures) == 2 * len(parsed.all("figure"))
    assert {attrs["aria-labelledby"] for attrs in pictures} == {name for name in ids if "chart-" in name}
    assert len(parsed.all("table")) == len(parsed.all("caption")) >= 8
    assert {attrs.get("scope") for attrs in parsed.all("th")} == {"col", "row"}
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))


def test_a_large_trace_gives_a_small_page() -> None:
    """Under 700 KiB, of which the library is 400."""
    page = report.render_report(a_plan(requests=50_000))
    assert len(page.encode()) < 700 * 1024


def test_a_plan_without_recorded_steps_still_has_a_report() -> None:
    plan = a_plan()
    page = report.render_report(
        replace(plan, simulation=replace(plan.simulation, runs=plan.simulation.runs[:0]))
    )
    assert "were in a step" not in page and "KV use" not in page


def test_of_a_plan_that_costs_nothing_the_others_are_smaller() -> None:
    """Owned GPUs without electricity: no fleet is cheaper than 0.00 USD/h."""
    plan = a_plan()
    free_pools = tuple(
        replace(pool, type=replace(pool.type, gpu=replace(pool.type.gpu, price_usd_per_h=0.0)))
        for pool in plan.fleet.pools
    )
    misses = CheaperMiss(0.01, 67, 6, 20, 20, True)
    certificate = replace(
        plan.certificate,
        value=0.0,
        level0=0.0,
        cheaper=20,
        cheaper_simulated=20,
        scenarios_drawn=ScenariosDrawn("blocks", 60.0, 0.0, True, 67, cheaper=misses),
    )
    free = replace(plan, fleet=replace(plan.fleet, pools=free_pools), certificate=certificate)
    text = "; ".join(screen.why_nothing_cheaper(free))
    assert screen.why_title(free) == "Why not smaller"
    assert "each of the fleets with one worker type per pool that are smaller misses" in text
    assert "all 20 smaller ones" in text and "cheaper" not in text


def test_nothing_is_cheaper_than_a_fleet_at_the_bound() -> None:
    """With one node sold whole, "all 5 cheaper ones" were fleets on fewer GPUs of that node."""
    certificate = replace(a_plan().certificate, level0=23.92, bound=23.92, cheaper=5, cheaper_simulated=5)
    assert cheaper_text(certificate).startswith("all 5 smaller ones")
    assert cheaper_text(replace(certificate, bound=2.99)).startswith("all 5 cheaper ones")


@pytest.mark.parametrize(
    ("cheaper", "simulated", "said"),
    [
        (5195, 99, "of 5,195 cheaper ones that are large enough for the work 99 were simulated and fail"),
        (99, 99, "all 99 cheaper ones that are large enough for the work were simulated and fail"),
        (0, 0, "no cheaper one is large enough for the work"),
        (385, 420, "420 cheaper ones were simulated and fail"),
        (None, 7, "7 cheaper ones were simulated and fail"),
    ],
)
def test_not_every_cheaper_fleet_was_simulated(cheaper: int | None, simulated: int, said: str) -> None:
    """99 of 5195 were, where the report claimed all."""
    assert excluded_text(cheaper, simulated) == said
    found = a_plan()
    searched = replace(
        found.certificate,
        level0_exact=False,
        cheaper=cheaper,
        cheaper_simulated=simulated,
        assumed=(Assumed("leads", 0, 0, ()),),
    )
    exact, by_search = (
        " ".join(proof_lines(replace(found, certificate=certificate)))
        for certificate in (found.certificate, searched)
    )
    assert "exactly" in exact and "exactly" not in by_search
    assert (
        said in by_search
        and "found by search" in by_search
        and "Assumed: a prefill pool that misses TTFT" in by_search
    )


def test_a_saturated_fleet_still_has_curves() -> None:
    """Three of four requests never get a token: the curve ends at a quarter."""
    simulation = a_simulation(pairs(), a_trace(4))
    ttft_s, limits = np.array([0.5, np.nan, np.nan, np.nan]), [Limit("ttft", 0.9, 2.0)]
    curve = curves.cumulative_curve(replace(simulation, ttft_s=ttft_s), "ttft", limits)
    assert (curve.value_s.tolist(), curve.share.tolist()) == ([0.5], [0.25])
    assert (
        curves.cumulative_curve(replace(simulation, ttft_s=ttft_s * np.nan), "ttft", limits).share.size == 0
    )


def test_a_curve_keeps_the_share_at_every_limit() -> None:
    """One request in five waits: 80 % at 0.25 s, and the rejected one never gets there."""
    curve = curves.cumulative_curve(a_simulation(pairs(), a_trace(1000)), "ttft")
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


def test_ranks_of_a_worker_are_busy_at_the_same_time() -> None:
    """Four ranks step together, so a worker is busy as long as its first rank, which the tables count; the
    chart added their runs up. KV in use is that of all runs under way, by brute force."""
    step = replace(make_latency((0.02, 0.06), knots=(1, 1024)), joint_s=(0.0, 0.04))
    pool = make_pool(step, count=2, budget=256, seats=8)
    fleet = Fleet(LLM, (replace(pool, type=replace(pool.type, dp=4)),))
    rng = np.random.default_rng(0)
    trace = make_trace(np.sort(rng.uniform(0, 90, 200)), rng.integers(1, 200, 200), rng.integers(1, 30, 200))
    simulation = simulate(fleet, trace, record=True)
    (share,) = curves.busy_share(simulation, range(2), np.array([0.0, simulation.end_s]), ranks=4)
    assert share == pytest.approx(simulation.worker_busy_s.mean() / simulation.end_s)
    runs = simulation.runs[simulation.runs["prefill_tokens"] >= 0]
    ends_s, at_s = runs["start_s"] + run_seconds(runs), rng.uniform(0, simulation.end_s, 50)
    by_hand = [int(runs["blocks"][(runs["start_s"] <= t) & (ends_s > t)].sum()) for t in at_s]
    assert curves.kv_blocks_at(simulation, range(2), at_s, ranks=4).tolist() == by_hand


def test_requests_in_the_fleet_add_up() -> None:
    """At 1.4 s of one request every third of a second: 5 came, request 4 (at 1.33 s) waits for 1 s."""
    running, queued = curves.running_and_queued(a_plan().simulation, np.array([1.4]))
    simulation = a_plan().simulation
    finished = (simulation.arrival_s + simulation.e2e_s <= 1.4).sum()
    assert queued == [1]
    assert running == [4 - finished]


def test_spread_weighs_and_ranks() -> None:
    """Values 1, 2, 3 seen 8, 1 and 1 times: p50 1, p90 2, p99 3, mean 1.3."""
    found = curves.mean_and_percentiles(np.array([3.0, 1.0, 2.0]), np.array([1.0, 8.0, 1.0]))
    assert found == {"mean": pytest.approx(1.3), "p50": 1.0, "p90": 2.0, "p99": 3.0}


def test_importing_the_report_does_not_import_altair() -> None:
    code = (
        "import sys, planner.reports.report; sys.exit('altair' in sys.modules or 'vl_convert' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_chart_becomes_an_image_with_its_caption() -> None:
    found = figures.all_figures(a_plan())
    written = output.chart_pictures(found)
    assert list(written) == [f"charts/{figure.name}.png" for figure in found]
    assert set(written) <= set(output.OUTDATED)
    for figure in found:
        png = written[f"charts/{figure.name}.png"]
        assert png.startswith(b"\x89PNG")
        width, height = (int.from_bytes(png[k : k + 4], "big") for k in (16, 20))
        plain = drawing.chart_spec(figure.chart)
        assert width > 2 * plain["width"] and height > 2 * plain["height"]


def every_kind() -> dict[str, Any]:
    """A chart of every kind there is."""
    trace = a_trace(200)
    curve = curves.cumulative_curve(a_simulation(pairs(), trace), "ttft")
    return {figure.name: figure.chart for figure in figures.all_figures(a_plan())} | {
        "rate": charts.rate_chart(trace),
        "lengths": charts.lengths_chart(trace),
        "stacked": charts.stacked_chart({"a": [1.0, 2.0], "b": [3.0, 1.0]}, 3600.0, "GPUs"),
        "hits": charts.hits_chart({1000: 0.1, 10_000: 0.4}, 0.6),
        "comparison": charts.comparison_chart({"a": curve, "b": curve}, "ttft", LIMITS[:1]),
        "staircase": charts.staircase_chart(
            [2.0, 1.0], [10.0, 20.0], ["1", "2"], ("x", "y"), starts=[4.0, 2.0]
        ),
        "trade": charts.trade_chart({"a": (1.0, 2.0), "b": (2.0, 1.0), "c": (3.0, 3.0)}, "a"),
    }


def test_every_kind_of_chart_answers_to_the_pointer() -> None:
    """Vega takes the live specification of each, and something in each has a tooltip with the axis's unit."""
    for name, chart in every_kind().items():
        chart.to_dict(validate=True)
        spec = drawing.live_spec(chart)
        vl_convert.vegalite_to_svg(spec | {"width": 400})
        told = json.dumps(_values(spec, "tooltip"))
        assert spec["layer"][0]["encoding"]["x"]["axis"]["title"] in told, name


def _values(spec: Any, key: str) -> list[Any]:
    parts = list(spec.values()) if isinstance(spec, dict) else spec if isinstance(spec, list) else []
    own = [spec[key]] if isinstance(spec, dict) and key in spec else []
    return own + [value for part in parts for value in _values(part, key)]


def test_a_legend_switches_and_the_horizontal_axis_zooms() -> None:
    curve = curves.cumulative_curve(a_simulation(pairs(), a_trace(200)), "ttft")
    spec = drawing.live_spec(charts.comparison_chart({"a": curve, "b": curve}, "ttft", LIMITS[:1]))
    params = {param["name"]: param for found in _values(spec, "params") for param in found}
    assert params["zoom"]["bind"] == "scales" and params["zoom"]["select"]["encodings"] == ["x"]
    assert params["shown0"]["bind"] == "legend"


def test_bars_neither_zoom_nor_move() -> None:
    spec = drawing.live_spec(charts.bars_chart([charts.Bar("a", 1.0)], "USD/h"))
    assert _values(spec, "params") == []


def test_what_costs_and_draws_less_has_a_name() -> None:
    """b is beaten by a in both; a and c beat each other in one."""
    chart = charts.trade_chart({"a": (1.0, 5.0), "b": (2.0, 6.0), "c": (3.0, 1.0)}, "c").to_dict()
    told = [row for data in _data(chart) for row in data["values"]]
    kinds = {row["name"]: row["kind"] for row in told if "kind" in row}
    assert {row["text"] for row in told if "text" in row} == {"a", "c"}
    assert kinds == {"a": "not beaten", "b": "another", "c": "the plan"}


def test_what_a_plan_costs_is_arithmetic() -> None:
    """2 workers of 4 GPUs. A month has 730 hours, a year 8760; tokens are those of finished requests."""
    plan = a_plan(mixed())
    told = {name: value for name, value, _ in rows.cost_rows(plan)[1]}
    price = plan.fleet.price_usd_per_h
    assert told["Price per month of 730\u00a0h"] == f"{730 * price:,.0f} USD"
    assert told["Price per year of 8,760\u00a0h"] == f"{8760 * price:,.0f} USD"
    tokens = plan.trace.output_tokens[plan.simulation.status == FINISHED].sum()
    assert told["Price per million output tokens"] == (
        f"{price / 3600 * plan.trace.duration_s / tokens * 1e6:.3g} USD"
    )


def test_use_of_a_pool_is_over_its_own_workers() -> None:
    """Of 7 workers each is busy for 10 s of the 69.3 s until the end, with 5000 tokens in 200 steps."""
    plan = a_plan()
    _, (prefill, decode) = rows.usage_rows(plan)
    assert prefill[:4] == ("pre", "14.4 %", "14.4 %", "25")
    assert decode[0] == "dec"
    still = replace(plan, simulation=replace(plan.simulation, runs=plan.simulation.runs[:0]))
    assert rows.usage_rows(still)[1][0][4:] == ("–",) * 6


def test_other_draws_are_told_with_what_they_decide() -> None:
    """32 of 32 kept decide for more than 90 %; one run alone has no interval."""
    draws = Repeats(
        "other-draws",
        32,
        32,
        "holds",
        {"ttft p90": Interval(0.431, 0.0093, 0.4, 0.499)},
        Interval(0.97, 0.01, 0.9, 1.0),
    )
    once = replace(
        draws,
        what="histories",
        runs=1,
        kept=0,
        decision="open",
        limits={"ttft p90": Interval(0.5, math.nan, 0.5, 0.5)},
    )
    plan = a_plan()
    plan = replace(plan, certificate=replace(plan.certificate, repeats=(draws, once)))
    assert rows.repeat_rows(plan)[1] == [
        ("other draws of this traffic", "32 of 32", "✓\u00a0more than 90 %", "431 ms ± 9.3 ms (499 ms)"),
        ("histories of interruptions, drawn at random", "0 of 1", "undecided", "500 ms (500 ms)"),
    ]
    assert "431 ms ± 9.3 ms (499 ms)" in report.render_report(plan)


def test_prefixes_are_counted_with_their_copies() -> None:
    """Of three prefixes (the root is none) one lies on both workers, one on the first, one nowhere: 3."""
    placed = np.array([[1, 1], [1, 1], [1, 0], [0, 0]], dtype=bool)
    planned = SimpleNamespace(
        pool=a_plan().fleet.pools[0],
        replication=SimpleNamespace(placed=placed),
        hit_frac=0.8,
        prefill_saved_frac=0.7,
    )
    pool: Any = SimpleNamespace(
        plan=planned, simulated_hit_frac=0.79, possible_hit_frac=0.85, keep_alive=None
    )
    plan = replace(a_plan(), prefixes=(pool,))
    assert rows.prefix_rows(plan)[1] == [("pre", "2", "3", "80.0 %", "79.0 %", "85.0 %", "70.0 %")]
    assert "What prompts share" in report.render_report(plan)
    assert "What prompts share" not in report.render_report(a_plan())


def test_the_margin_is_a_share_of_the_limit() -> None:
    """TTFT p90 of 1.25 s under 2 s leaves 37.5 %; 200 ms per gap against 50 ms leaves 75 %."""
    _, lines = rows.slo_rows(a_plan())
    assert [line[4] for line in lines] == ["38\u00a0% below", "75\u00a0% below", ""]


def test_a_text_is_made_once_and_kept_where_there_is_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make() -> str:
        made.append("×")
        return "×"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert [cached_text("a.js", make), cached_text("a.js", make)] == ["×", "×"]
    assert len(made) == 1
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [cached_text("a.js", make), cached_text("a.js", make)] == ["×", "×"]
    assert len(made) == 3
