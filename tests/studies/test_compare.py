"""plan compare: every variant as `plan simulate` has it, its costs by hand, and what is written."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import CATALOG, LLM, a_plan, mixed, pairs
from typer.testing import CliRunner

from planner.cli import app
from planner.documents.fleet_file import read_fleet
from planner.domain import Limit, Selector, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.parallel.executors import Executor
from planner.reports import charts
from planner.reports.curves import Curve
from planner.reports.fact_sentences import backlog_text
from planner.reports.simulated_run import simulate_recorded
from planner.reports.words import measured_line
from planner.simulator import judge_slo, simulate
from planner.simulator.measured_values import measured_mask
from planner.studies.fleet_comparison import (
    MOST_CURVES,
    NAMES,
    FleetComparison,
    Variant,
    compare_fleets,
    comparison_lines,
    comparison_summary,
    draw_latencies,
    render_comparison,
    to_json,
)
from planner.traffic.scaling import with_times_the_traffic
from planner.traffic.trace import Trace
from planner.units import show_s

FLEET = "llm: meta-llama/Llama-3.1-70B\nworkers:\n  - {name: mixed, gpu: h100-80g, tp: 4, count: 2}\n"
SLO = "llm: meta-llama/Llama-3.1-70B\nslo: {ttft: {p90: 1 s}, tbt: {p99: 200 ms}}\ntraffic: {rate: 4}\n"
PROMISE = Slo((Limit("ttft", 0.9, 1.0), Limit("tbt", 0.99, 0.2)))


def a_trace(requests: int = 60) -> Trace:
    """Eight at once every two seconds, prompts of 200 to 3800 tokens."""
    i = np.arange(requests)
    return Trace("bursts.csv", 2.0 * np.floor(i / 8), 200 + 600 * (i % 7), 5 + i % 23)


def small(count: int, *, kv_tokens: int = 160_000) -> Fleet:
    gpu = CATALOG.gpu("h100-80g")
    worker = WorkerType(gpu, 4, CATALOG.step_latency(LLM, gpu, 4), kv_tokens, 2048, 256)
    return Fleet(LLM, (Pool("mixed", "mixed", worker, count),))


def shown(comparison: FleetComparison) -> dict[str, list[str]]:
    return dict(comparison_lines(comparison))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    trace = a_trace()
    rows = zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True)
    text = ["arrival_s,input_tokens,output_tokens", *(f"{a},{i},{o}" for a, i, o in rows)]
    (tmp_path / "trace.csv").write_text("\n".join(text) + "\n")
    (tmp_path / "slo.yaml").write_text(SLO)
    (tmp_path / "two.yaml").write_text(FLEET)
    (tmp_path / "one.yaml").write_text(FLEET.replace("count: 2", "count: 1"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def plan(*line: str) -> Any:
    return CliRunner().invoke(app, [*line, "--trace", "trace.csv"])


def test_each_variant_is_simulated_as_simulate_does(here: Path) -> None:
    more = ("--slo", "slo.yaml", "--seed", "5", "--json")
    found = json.loads(plan("compare", "--fleet", "one.yaml", "--fleet", "two.yaml", *more).stdout)
    assert [row["variant"] for row in found["variants"]] == ["one", "two"]
    for row in found["variants"]:
        alone = json.loads(plan("simulate", "--fleet", f"{row['variant']}.yaml", *more).stdout)
        assert row["simulation"] == alone
        assert row["ttft_p90_s"] == alone["ttft_s"]["p90"] and row["tbt_p99_s"] == alone["tbt_s"]["p99"]
        assert row["verdict"] == ("kept" if alone["slo"]["holds"] else "missed")


def test_dollars_per_million_tokens_by_hand() -> None:
    """What is paid from the first arrival to the last token, a node of 8 for a worker of 4, over all output
    tokens (none is lost).
    """
    trace, fleet = a_trace(), small(1)
    (row,) = compare_fleets([Variant("one", fleet)], trace).rows
    simulation = simulate_recorded(fleet, trace).simulation
    hours = float((simulation.arrival_s + simulation.e2e_s).max()) / 3600
    million_tokens = float(trace.output_tokens.sum()) / 1e6
    expected = 8 * fleet.pools[0].type.gpu.price_usd_per_h * hours / million_tokens
    assert row.usd_per_million_output_tokens == pytest.approx(expected, rel=1e-9)


def test_prices_gpus_and_watts_are_the_fleets() -> None:
    """4 x 2 H100 and 3 x 4 capped H100 are 20 GPUs, on three nodes; two workers of 4 fill one."""
    found = shown(compare_fleets([Variant("pairs", pairs()), Variant("mixed", mixed())], a_trace()))
    assert found["GPUs"] == ["20", "8"]
    price = pairs().pools[0].type.gpu.price_usd_per_h
    assert found["USD/h"] == [f"{gpus * price:,.2f}" for gpus in (24, 8)]
    assert found["USD/h by the GPU"] == [f"{gpus * price:,.2f}" for gpus in (20, 8)]
    assert found["provisioned power, kW"] == [f"{fleet.power_w / 1e3:,.2f}" for fleet in (pairs(), mixed())]
    assert "SLO" not in found and "requests that keep all limits" not in found


def test_the_verdict_names_the_cheapest_that_keeps_the_promise() -> None:
    trace, slo = a_trace(200), Slo((Limit("ttft", 0.9, 0.75),))
    by_count = {count: simulate_recorded(small(count), trace, slo).verdict for count in (1, 2, 3)}
    least = min(count for count, found in by_count.items() if found is not None and found.holds)
    assert least > 1, "one worker must fail for the test to tell"
    comparison = compare_fleets([Variant(f"n{count}", small(count)) for count in (3, 1, 2)], trace, slo)
    kept = sum(found is not None and found.holds for found in by_count.values())
    assert comparison_summary(comparison).startswith(f"{kept} of 3 keep the SLO; the cheapest is n{least}, ")
    assert shown(comparison)["SLO"] == ["kept" if count >= least else "MISSED" for count in (3, 1, 2)]


def test_how_far_each_fleet_holds_is_found_by_simulating_it_there() -> None:
    """With the traffic to which it holds a fleet keeps the SLO, with a step more it does not."""
    trace, slo = with_times_the_traffic(a_trace(200), 3.0), Slo((Limit("ttft", 0.9, 0.75),))
    found = compare_fleets([Variant(f"n{count}", small(count)) for count in (1, 2)], trace, slo)
    missed, held = (row.cells() for row in found.rows)
    assert missed["holds_to_traffic_frac"] is None and missed["kept"] is held["scenario_count"] is None
    frac = held["holds_to_traffic_frac"]
    assert 0.005 < frac < 1.0 and held["breaks_first"] == "ttft p90"
    kept = [
        simulate_recorded(small(2), with_times_the_traffic(trace, 1 + more), slo).verdict
        for more in (frac, frac + 1 / 256)
    ]
    assert [each is not None and each.holds for each in kept] == [True, False]
    assert shown(found)["holds to more traffic"][0] == "-"


def test_idle_gpus_of_a_node_come_with_what_to_write() -> None:
    """One H100 of a node of eight: 23.92 USD/h are paid, and 2.99 where it is rented singly."""
    notes = compare_fleets([Variant("one", mixed("h100-80g", 1, 1))], a_trace(50)).notes
    (idle,) = [note for note in notes if "whole nodes" in note]
    assert idle == (
        "one: 7 GPUs of whole nodes paid and idle; where single GPUs are rented, "
        "write sold_as: {h100-80g: gpu} into the fleet's file"
    )


def test_spot_workers_that_may_be_down_are_said_to_be_up() -> None:
    """A plan counts on fewer of its spot workers, so its headroom is another figure than a comparison's."""
    (pool,) = mixed("h100-80g", 1, 2).pools
    on_spot = replace(pool, type=replace(pool.type, gpu=replace(pool.type.gpu, name="h100-80g@spot")))
    fleets = [Variant("rented", Fleet(LLM, (pool,))), Variant("spot", Fleet(LLM, (on_spot,)))]
    notes = [note for note in compare_fleets(fleets, a_trace(50)).notes if note.startswith("spot")]
    assert notes == [
        "spot: spot workers are all up here; a plan keeps its SLO without those that may be down",
        "spot: 6 GPUs of whole nodes paid and idle; where single GPUs are rented, "
        "write sold_as: {h100-80g: gpu} into the fleet's file",
    ]


def test_the_command_counts_the_scenarios_that_each_fleet_keeps(here: Path) -> None:
    """One worker misses, two keep them, until the test of production decides; none with `safety: none`."""
    line = ("compare", "--fleet", "one.yaml", "--fleet", "two.yaml", "--slo", "slo.yaml", "--json")
    one, two = json.loads(plan(*line).stdout)["variants"]
    assert one["kept"] < 0.9 * one["scenario_count"] and two["kept"] > 0.9 * two["scenario_count"] > 0.9 * 26
    assert "In enough scenarios: 1" in plan(*line[:-1]).stdout
    (here / "slo.yaml").write_text(SLO + "safety: none\n")
    assert json.loads(plan(*line).stdout)["variants"][0]["scenario_count"] is None


def test_a_queue_is_told_in_the_same_words_as_in_a_plan() -> None:
    """1 request/s served, 1.25 arriving: with a limit of 100 s the plan's report said "as promptly as the
    first" or "grows", compare "grows". Now all say what the backlog test saw: how many waited how long."""
    steps = StepLatency((1.0, 2.0), (1.0, 1.0), 0.0, 0.0, 0.0, 0.0, 0.0, basis="by hand")
    worker = WorkerType(CATALOG.gpu("h100-80g"), 1, steps, 10**6, 8, 1)
    fleet = Fleet(LLM, (Pool("mixed", "mixed", worker, 1),))
    requests = Trace("t", np.arange(0.0, 800.0, 0.8), np.ones(1000, int), np.ones(1000, int))
    for limit_s, patient in ((100.0, "0 %"), (190.0, "5"), (250.0, "100 %")):
        slo = Slo((Limit("ttft", 0.1, limit_s),))
        found = compare_fleets([Variant("one", fleet)], requests, slo)
        verdict_on = judge_slo(simulate(fleet, requests, limits=slo.limits), slo)
        said = backlog_text(verdict_on.patient_frac, verdict_on.patience_s)
        assert f"{patient}" in said and f"waited no longer than {show_s(limit_s)}, 50 % must" in said
        told = replace(a_plan(), verdict=verdict_on)
        assert said[1:] in measured_line(told) and "promptly" not in measured_line(told)
        notes = [note for note in found.notes if "whole nodes" not in note]  # One GPU of a node is in use.
        assert notes == ([] if verdict_on.is_steady else [f"one: {said}"])
        assert said.startswith("the backlog grows") is not verdict_on.is_steady


def test_rejected_requests_are_seen_everywhere() -> None:
    """2000 KV tokens do not hold the prompts of 2000 tokens and more: 4 of every 7 requests."""
    trace = a_trace(70)
    lost = int((trace.input_tokens + trace.output_tokens > 2000).sum())
    assert lost == 40
    comparison = compare_fleets(
        [Variant("full", small(2)), Variant("tiny", small(2, kv_tokens=2000))], trace, PROMISE
    )
    assert shown(comparison)["requests rejected"] == ["0", "40"]
    assert shown(comparison)["TTFT p90"][1] == "never"
    assert any(note.startswith("tiny: 40 rejected of 70 requests") for note in comparison.notes)
    files = render_comparison(comparison)
    assert "tiny: 40 rejected of 70 requests" in files["compare.html"]
    assert [row["rejected"] for row in csv.DictReader(files["compare.csv"].splitlines())] == ["0", "40"]
    assert json.loads(files["compare.json"])["variants"][1]["ttft_p90_s"] is None


def test_csv_and_json_hold_the_same_figures() -> None:
    comparison = compare_fleets([Variant("a, b", small(1)), Variant("c", pairs())], a_trace(), PROMISE)
    rows = list(csv.DictReader(render_comparison(comparison)["compare.csv"].splitlines()))
    for row, variant in zip(rows, to_json(comparison)["variants"], strict=True):
        assert row == {key: "" if variant[key] is None else str(variant[key]) for key in row}
        assert all(
            re.search(r"_(s|w|frac|tokens|per_h)$", key) for key in row if "." in row[key] and key != "llm"
        )


def test_more_variants_than_can_be_told_apart_are_told_but_not_drawn() -> None:
    variants = [Variant(f"variant-{k}", small(2)) for k in range(MOST_CURVES + 1)]
    comparison = compare_fleets(variants, a_trace(), PROMISE)
    page = render_comparison(comparison)["compare.html"]
    for k in range(MOST_CURVES + 1):  # both legends, and the head of the table
        assert page.count(f">variant-{k}<") == (3 if k < MOST_CURVES else 1)
    shown = f"the first {MOST_CURVES} of {MOST_CURVES + 1} variants"
    assert comparison.notes == [f"the picture shows {shown}, the table all"]


def test_limits_of_a_class_are_drawn_against_the_curve_of_that_class() -> None:
    """Chats have prompts of 200 tokens, and the limit of batches is twenty times as long. On the curve of all
    requests "passes above the circle" was wrong for both.
    """
    trace, of_class = a_trace(), {name: Selector(name, tenants=(name,)) for name in ("chat", "batch")}
    is_chat = trace.input_tokens == 200
    trace = replace(trace, tenant=np.where(is_chat, 0, 1), tenants=("chat", "batch"))
    limits = tuple(
        Limit(metric, 0.9, limit_s, of_class[name])
        for name, metric, limit_s in (("chat", "ttft", 1.0), ("batch", "ttft", 20.0), ("batch", "tbt", 0.2))
    )
    comparison = compare_fleets([Variant("one", small(1))], trace, Slo(limits))
    drawn = {each.name: each for each in draw_latencies(comparison)}
    assert list(drawn) == ["ttft-class-1", "ttft-class-2", "tbt-class-2"]
    assert "time to first token of chat" in drawn["ttft-class-1"].caption
    (row,) = comparison.rows
    alone = simulate(row.variant.fleet, trace, limits=limits, record=True)
    for name, chosen in (("ttft-class-1", is_chat), ("ttft-class-2", ~is_chat)):
        assert set(row.curves[name].value_s) == set(alone.ttft_s[chosen & measured_mask(alone)])
    verdict = judge_slo(alone, Slo(limits))
    for name, line in zip(drawn, verdict.lines, strict=True):
        curve, at_s = row.curves[name], line.limit.limit_s
        assert curve.share[curve.value_s <= at_s].max() == pytest.approx(line.kept_frac)


def test_each_of_twelve_curves_has_a_look_of_its_own() -> None:
    curve = Curve(np.array([0.1, 0.2]), np.array([0.5, 1.0]))
    names = [f"n{k}" for k in range(12)]
    chart = charts.comparison_chart(dict.fromkeys(names, curve), "ttft", PROMISE.limits[:1]).to_dict()
    encoding = chart["layer"][0]["encoding"]
    colours, dashes = (encoding[channel]["scale"]["range"] for channel in ("color", "strokeDash"))
    assert len({(colour, tuple(dash)) for colour, dash in zip(colours, dashes, strict=True)}) == 12
    assert encoding["x"]["axis"]["title"] == "time to first token [s]"
    assert encoding["y"]["axis"]["title"] == "share of requests"


def test_the_page_needs_nothing_but_itself_and_comes_out_the_same_twice() -> None:
    variants = [Variant("<one> & two", small(1)), Variant("pairs", pairs())]
    files = render_comparison(compare_fleets(variants, a_trace(), PROMISE))
    page = files["compare.html"]
    assert "&lt;one&gt; &amp; two" in page and "<one>" not in page
    assert page.count("<div class=still") == 2
    assert not re.search(r"<script [^>]*src|<link|<img|(?:src|href)=[\"']?http|@import|url\(http", page)
    assert files == render_comparison(compare_fleets(variants, a_trace(), PROMISE))


@pytest.mark.slow
def test_processes_give_what_this_process_gives() -> None:
    variants = [Variant("one", small(1)), Variant("two", small(2))]
    expected = render_comparison(compare_fleets(variants, a_trace(), PROMISE))
    assert (
        render_comparison(compare_fleets(variants, a_trace(), PROMISE, executor=Executor("processes:2")))
        == expected
    )


def test_policies_are_those_of_a_fleet_file_that_names_them(here: Path) -> None:
    """Prompts of 200 and 3800 tokens in turn: round robin gives one of two workers all the long ones."""
    rows = "".join(f"{i / 8},{200 + 3600 * (i % 2)},20\n" for i in range(80))
    (here / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    (here / "robin.yaml").write_text(FLEET + "policies: {routing: round-robin}\n")
    outcome = plan(
        "compare", "--fleet", "two.yaml", "--policies", "own", "--policies", "routing=round-robin", "--json"
    )
    own, robin = json.loads(outcome.stdout)["variants"]
    assert (own["variant"], robin["variant"]) == ("two, own", "two, routing=round-robin")
    asked = json.loads(plan("simulate", "--fleet", "robin.yaml", "--json").stdout)
    assert robin["simulation"] == asked
    assert own["ttft_p90_s"] < robin["ttft_p90_s"]


def test_a_token_budget_is_a_policy_of_workers_without_their_own(here: Path) -> None:
    fleet = read_fleet(here / "two.yaml", CATALOG, policies={"max_num_batched_tokens": 512})
    assert fleet.pools[0].type.max_num_batched_tokens == 512
    (here / "two.yaml").write_text(FLEET.replace("count: 2", "count: 2, max_num_batched_tokens: 1024"))
    with pytest.raises(InputError, match="this worker states its own"):
        read_fleet(here / "two.yaml", CATALOG, policies={"max_num_batched_tokens": 512})


def test_the_command_writes_three_files_or_none(here: Path) -> None:
    line = ("compare", "--fleet", "one.yaml", "--fleet", "more=two.yaml", "-o", "out")
    outcome = plan(*line, "--slo", "slo.yaml")
    assert outcome.exit_code == 0, outcome.output
    assert sorted(path.name for path in (here / "out").iterdir()) == sorted(NAMES)
    for said in ("TTFT p90", "USD per million output tokens", "one", "more", "keep the SLO"):
        assert said in outcome.stdout
    assert plan(*line, "--png").exit_code == 0
    assert {path.name for path in (here / "out" / "charts").iterdir()} == {"ttft.png", "tbt.png"}
    assert plan(*line).exit_code == 0
    assert not any((here / "out" / "charts").iterdir())
    (here / "trace.csv").write_text("nothing\n")
    assert isinstance(plan(*line[:-1], "other").exception, InputError)
    assert not (here / "other").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--fleet", "one.yaml"), "two variants are named 'one'; name a fleet with --fleet NAME=FILE"),
        (("--fleet", "=one.yaml"), "expected FILE or NAME=FILE"),
        (("--fleet", "none.yaml"), "none.yaml: no such file"),
        (("--policies", "routing=lottery"), "--policies 'routing=lottery': .*routing: must be one of"),
        (
            ("--policies", "routing"),
            "expected KEY=VALUE such as routing=round-robin, each KEY once, or 'own'",
        ),
        (("--policies", " "), "expected KEY=VALUE"),
        (("--policies", "routing=jsq routing=jsq"), "expected KEY=VALUE"),
        (("--policies", "colour=red"), "unknown key 'colour'"),
        (("--policies", "routing=[x"), r"routing: '\[x' is no value"),
        (("--scale", "up"), "--scale: expected superpose"),
        (("--executor", "dask"), "needs the cluster's --address"),
    ],
)
def test_what_cannot_be_compared_is_said(here: Path, more: tuple[str, ...], says: str) -> None:
    error = plan("compare", "--fleet", "one.yaml", *more).exception
    assert isinstance(error, InputError) and re.search(says, str(error)), error


def test_a_trace_or_fleet_is_not_written_over(here: Path) -> None:
    (here / "compare.csv").write_bytes((here / "trace.csv").read_bytes())
    line = ["compare", "--trace", "compare.csv", "--fleet", "one.yaml", "-o", "."]
    error = CliRunner().invoke(app, line).exception
    assert isinstance(error, InputError) and "would be written over" in str(error)
