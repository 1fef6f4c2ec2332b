"""`plan goodput` and `plan search`: their answers hold when asked again, and bad input is one line."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner import cli

TRACE = Path(__file__).parents[2] / "examples" / "traces" / "azure-conversation-sample.csv"
CODE = Path(__file__).parents[3] / "shared/data/traces/AzureLLMInferenceTrace_code.csv"
SLO = "llm: llama-3.1-8b\nslo: {ttft: {p90: 1 s}, tbt: {p99: 100 ms}}\nfleet: {gpus: [a100-80g]}\n"
SLOWDOWNS = "llm: llama-2-70b\npreset: splitwise\nfleet: {gpus: [h100-80g, a100-80g]}\n"
FLEET = "llm: llama-3.1-8b\nworkers: [{gpu: a100-80g, count: 2}]\n"
Plan = Callable[..., tuple[int, str]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Plan:
    """The command in a folder with slo.yaml, relative.yaml and fleet.yaml: exit code; stdout or stderr."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("slo.yaml", SLO), ("relative.yaml", SLOWDOWNS), ("fleet.yaml", FLEET)):
        Path(name).write_text(text)

    def run(*arguments: object, trace: Path | str = TRACE) -> tuple[int, str]:
        words = ["plan", *map(str, arguments), "--trace", str(trace)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        code = int(end.value.code or 0)
        return code, said.out if code in (0, 5) else said.err.splitlines()[-1]

    return run


def answer(plan: Plan, *arguments: object, trace: Path | str = TRACE) -> dict[str, Any]:
    code, out = plan(*arguments, "--json", trace=trace)
    assert code in (0, 5), out  # 5: a simulation in which the SLO is missed.
    return dict(json.loads(out))


def test_the_goodput_is_where_simulate_changes_its_mind(plan: Plan) -> None:
    """One seed: the rate holds in `plan simulate`, the next one up does not."""
    found = answer(plan, "goodput", "--fleet", "fleet.yaml", "--slo", "slo.yaml", "--seeds", 1)
    assert found["rate_rps"] < found["fails_rps"] <= 1.02 * found["rate_rps"]
    kept = {}
    for name in ("rate_rps", "fails_rps"):
        simulated = answer(
            plan, "simulate", "--fleet", "fleet.yaml", "--slo", "slo.yaml", "--rate", repr(found[name])
        )
        kept[name] = simulated["slo"]["holds"] and simulated["slo"]["is_steady"]
    assert kept == {"rate_rps": True, "fails_rps": False}
    assert [line["limit"] for line in found["slo"]] == ["ttft p90", "tbt p99"]
    assert all(line["simulated_s"] <= line["limit_s"] for line in found["slo"])


def test_scale_counts_without_a_window_and_is_named(plan: Plan) -> None:
    """It was ignored: both runs had superposed copies. A compressed trace keeps its 3,000 requests."""
    asked = ("goodput", "--fleet", "fleet.yaml", "--slo", "slo.yaml", "--seeds", 1)
    requests = len(Path(TRACE).read_text().splitlines()) - 1
    assert answer(plan, *asked, "--scale", "compress")["requests"] == requests
    assert answer(plan, *asked)["requests"] != requests
    _, said = plan(*asked, "--scale", "compress")
    assert "compress: the same requests in less time" in said
    Path("compress.yaml").write_text(f"{SLO}\ntraffic: {{scale: compress}}\n")
    of_question = ("goodput", "--fleet", "fleet.yaml", "--slo", "compress.yaml", "--seeds", 1)
    assert answer(plan, *of_question)["requests"] == requests
    assert plan(*asked, "--scale", "faster")[1].startswith(
        "plan: --scale: expected superpose, compress or thin"
    )


def test_the_table_says_the_same(plan: Plan) -> None:
    words = ("goodput", "--fleet", "fleet.yaml", "--slo", "slo.yaml", "--seeds", 1, "--arrivals", "poisson")
    _, text = plan(*words)
    assert f"{answer(plan, *words)['rate_rps']:.4g} requests/s on 2 GPUs" in text


def test_a_thousand_requests_cost_whole_nodes_where_these_are_paid(plan: Plan) -> None:
    """Two workers of one GPU on a node of eight: four times the price of two GPUs, as `plan compare` says."""
    words = ("goodput", "--fleet", "fleet.yaml", "--slo", "slo.yaml", "--seeds", 1, "--tolerance", 0.5)
    costs = []
    for sold_as in ("gpu", "node"):
        Path("fleet.yaml").write_text(FLEET + f"sold_as: {{a100-80g: {sold_as}}}\n")
        costs.append(answer(plan, *words)["usd_per_1000_requests"])
    assert costs[1] == pytest.approx(4 * costs[0])


def test_a_promise_that_no_rate_keeps_is_infeasible(plan: Plan) -> None:
    Path("slo.yaml").write_text(SLO.replace("1 s", "1 ms"))
    code, line = plan("goodput", "--fleet", "fleet.yaml", "--slo", "slo.yaml", "--seeds", 1)
    assert code == 3
    assert "the fleet keeps the SLO at no rate" in line and "TTFT p90" in line and "limit 1 ms" in line


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("goodput", "--fleet", "fleet.yaml", "--slo", "slo.yaml", "--seeds", 1000),
        ("search", "vidur", "--slo", "slo.yaml", "--seeds", 1000),
        ("search", "distserve", "--slo", "slo.yaml", "--seeds", 1000, "--rate", 500),
        ("search", "splitwise", "--slo", "relative.yaml", "--seeds", 1000, "--rate", 500),
    ],
)
def test_a_search_ends_with_its_time(plan: Plan, words: tuple[object, ...]) -> None:
    """None of them had a clock: a thousand seeds took hours."""
    begin_s = time.process_time()
    code, line = plan(*words, "--time-limit", 1)
    assert (code, time.process_time() - begin_s < 60) == (4, True)
    assert re.fullmatch(
        r"plan: no answer within 1 s( \((.* requests/s hold)?(, )?(.* do not)?\))?; raise --time-limit", line
    )


@pytest.mark.long
def test_distserves_search_writes_a_fleet_that_carries_the_rate(plan: Plan) -> None:
    found = answer(plan, "search", "distserve", "--slo", "slo.yaml", "--rate", 25, "-o", "best.yaml")
    by_name = {row["search"]: row for row in found["placements"]}
    free = by_name["free counts"]
    assert free["carries_rps"] >= 25
    assert free["gpus"] <= min(row["gpus"] for row in found["placements"] if row["carries_rps"] >= 25)
    assert found["neighbours"] and not any(row["carries"] for row in found["neighbours"])
    assert {row["gpus"] for row in found["neighbours"]} <= set(range(1, free["gpus"]))
    simulated = answer(plan, "simulate", "--fleet", "best.yaml", "--slo", "slo.yaml")
    assert simulated["slo"]["holds"]


def test_vidurs_search_ranks_by_requests_per_dollar(plan: Plan) -> None:
    rows = answer(plan, "search", "vidur", "--slo", "slo.yaml", "--gpus", 1)["configurations"]
    per_usd = [row["requests_per_usd"] for row in rows]
    assert per_usd == sorted(per_usd, reverse=True) and per_usd[0] > 0
    assert rows[0]["on_ttft_frontier"] and rows[0]["on_tbt_frontier"]


def test_the_shortest_makespan_is_what_simulate_says(plan: Plan) -> None:
    """All requests in flight from the beginning, as in a closed loop of so many."""
    words = ("search", "vidur", "--slo", "slo.yaml", "--gpus", 1, "--offline")
    found = answer(plan, *words, "-o", "best.yaml")
    best = found["configurations"][0]
    simulated = answer(plan, "simulate", "--fleet", "best.yaml", "--closed-loop", found["requests"])
    assert simulated["end_s"] == pytest.approx(best["makespan_s"], rel=1e-3)
    assert best["on_frontier"] and best["makespan_s"] == min(
        row["makespan_s"] for row in found["configurations"] if row["makespan_s"] is not None
    )
    for refused, other in (
        ((*words, "--rate", 3), "--rate"),
        (("search", "distserve", *words[2:]), "distserve"),
    ):
        code, line = plan(*refused)
        assert code == 1 and f"found {other}; drop one" in line


@pytest.mark.slow
def test_splitwises_search_counts_machines(plan: Plan) -> None:
    """At a tenth of a request per second one machine does, or one of each pool."""
    rows = answer(plan, "search", "splitwise", "--slo", "relative.yaml", "--rate", 0.1)["designs"]
    counts = {row["design"]: (row["prompt"], row["token"]) for row in rows}
    assert counts["h100-80g"] == (1, 0) and counts["h100-80g + h100-80g"] == (1, 1)
    assert rows[0]["USD/h"] == min(row["USD/h"] for row in rows)


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ("", "latency: 0 ms, transfer: layerwise"),
        (", network: {latency: 2 ms, transfer: serialised}", "latency: 2 ms, transfer: serialised"),
    ],
)
def test_splitwises_search_moves_kv_as_the_slo_file_says(plan: Plan, asked: str, written: str) -> None:
    """It always serialised. Every machine still has a link of its own, which slo.yaml has no word for."""
    Path("relative.yaml").write_text(SLOWDOWNS.replace("]}", f"]{asked}}}"))
    answer(plan, "search", "splitwise", "--slo", "relative.yaml", "--rate", 0.1, "-o", "best.yaml")
    network = yaml.safe_load(Path("best.yaml").read_text())["network"]
    assert network == {"bandwidth": "50 GB/s", "shared": False} | yaml.safe_load(f"{{{written}}}")


@pytest.mark.shared
@pytest.mark.skipif(not CODE.exists(), reason="no reference data beside the checkout")
def test_bloom_on_code_needs_a_third_of_the_machines_layer_by_layer(plan: Plan) -> None:
    """70 requests/s: 23 + 83, 2535 USD/h, if transfers began only after prefill; 30 + 2 as they overlap."""
    Path("relative.yaml").write_text("llm: bloom-176b\npreset: splitwise\nfleet: {gpus: [h100-80g]}\n")
    words = ("search", "splitwise", "--slo", "relative.yaml", "--rate", 70)
    rows = {row["design"]: row for row in answer(plan, *words, trace=CODE)["designs"]}
    pair = rows["h100-80g + h100-80g"]
    assert (pair["prompt"], pair["token"]) == (30, 2) and pair["USD/h"] == 765.44


MOST = SLOWDOWNS + "objective: throughput\nlimits: "


@pytest.mark.parametrize(
    ("limits", "column", "budget"), [("{power: 22400 W}", "kW", 22.4), ("{cost: 100 usd/h}", "USD/h", 100)]
)
def test_splitwises_search_finds_the_most_traffic_within_a_limit(
    plan: Plan, limits: str, column: str, budget: float
) -> None:
    """Iso-power and iso-cost: every design within the limit, and no whole machine more would be."""
    Path("relative.yaml").write_text(MOST + limits)
    found = answer(plan, "search", "splitwise", "--slo", "relative.yaml", "-o", "best.yaml")
    rates = [row["requests/s"] for row in found["designs"]]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0
    for row in found["designs"]:
        machines = row["prompt"] + row["token"]
        assert row[column] <= budget and row[column] * (machines + 1) / machines > 0.9 * budget
    best = yaml.safe_load(Path("best.yaml").read_text())["workers"]
    assert sum(pool["count"] for pool in best) == found["designs"][0]["prompt"] + found["designs"][0]["token"]


@pytest.mark.parametrize(
    ("limits", "words", "said"),
    [
        ("{power: 20 kW, cost: 100 usd/h}", (), "within one of power, cost and gpus, found power, cost"),
        ("{power: 20 kW}", ("--rate", 3), "--rate: objective throughput looks for the rate, found 3"),
        ("{power: 900 W}", (), "no design keeps the slowdowns at any rate within 900 W"),
    ],
)
def test_the_most_traffic_needs_one_limit(
    plan: Plan, limits: str, words: tuple[object, ...], said: str
) -> None:
    Path("relative.yaml").write_text(MOST + limits)
    code, line = plan("search", "splitwise", "--slo", "relative.yaml", *words)
    assert code in (1, 3) and said in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("search", "distserve", "--slo", "relative.yaml"), "found the relative preset 'splitwise'"),
        (
            ("search", "vidur", "--slo", "slo.yaml", "--gpus", "1000000000"),
            "--gpus: at most 1024 are searched",
        ),
        (("search", "vidur", "--slo", "relative.yaml"), "found the relative preset 'splitwise'"),
        (("search", "splitwise", "--slo", "slo.yaml"), "splitwise needs limits relative to a machine alone"),
        (("search", "distserve", "--slo", "slo.yaml", "--rate", "-1"), "--rate: expected a number"),
        (("search", "vidur", "--slo", "slo.yaml", "-o", "slo.yaml"), "would be written over"),
        (("goodput", "--fleet", "fleet.yaml", "--slo", "relative.yaml"), "`goodput` needs limits in seconds"),
    ],
)
def test_bad_questions_are_one_line(plan: Plan, words: tuple[object, ...], said: str) -> None:
    code, line = plan(*words)
    assert code == 1 and said in line


def test_requests_of_one_token_have_no_gaps(plan: Plan) -> None:
    """The limit on gaps is kept, its value is null; Splitwise has nothing to judge."""
    Path("ones.csv").write_text("arrival_s,input_tokens,output_tokens\n0,10,1\n1,10,1\n2,90,1\n")
    found = answer(plan, "goodput", "--fleet", "fleet.yaml", "--slo", "slo.yaml", trace="ones.csv")
    assert found["rate_rps"] > 1 and found["slo"][1]["simulated_s"] is None
    code, line = plan("search", "splitwise", "--slo", "relative.yaml", "--rate", 1, trace="ones.csv")
    assert code == 1 and "ones.csv: every request has one token" in line


def test_distserve_places_one_kind_of_gpu(plan: Plan) -> None:
    Path("slo.yaml").write_text(SLO.replace("[a100-80g]", "[a100-80g, h100-80g]"))
    code, line = plan("search", "distserve", "--slo", "slo.yaml")
    assert code == 1 and "places one kind of GPU, found a100-80g, h100-80g" in line
