"""Our controller's rules by load as Prometheus has them, against the controller that was simulated."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from autoscalers import FLEETS, objects
from manifest_commands import documents
from readings import ENGINE, knowledge, reading

from planner.day import autoscaling
from planner.day.autoscaling import Autoscaler, by_load, prometheus_queries, recording_rules
from planner.day.controllers import table
from planner.day.controllers.knowledge import CapacityTable, Knowledge, LoadRule, peak_load
from planner.day.controllers.planned import Fleetplan, FleetplanSettings
from planner.errors import InputError
from planner.fleet import Role
from planner.solvers.whole_nodes import fewest_nodes

RULE = LoadRule((0.5, 1.0), 2.0, 15.0, 180.0)
ROLES: dict[str, tuple[Role, ...]] = {
    "mixed": ("mixed",),
    "two mixed pools": ("mixed", "mixed"),
    "pairs": ("prefill", "decode"),
}


def exported(name: str, own: Knowledge, **parameters: Any) -> Autoscaler:
    fleet = FLEETS[name]
    chosen = table.parse_controller("fleetplan", parameters)
    return autoscaling.autoscaler_of(chosen, own, fleet.with_counts([1] * len(fleet.pools)))


def on_nodes(roles: tuple[Role, ...]) -> Knowledge:
    """Workers of two GPUs on nodes of eight, alike."""
    return knowledge(
        roles,
        engines=(ENGINE,) * len(roles),
        rules=(RULE,) * len(roles),
        gpus=(2,) * len(roles),
        nodes=(("h100", 8),) * len(roles),
    )


def rules_in(files: dict[str, str]) -> list[tuple[str, str, str]]:
    """Name, pool and expression of each recording rule, in order."""
    (found,) = documents(files[prometheus_queries.RULES_FILE])
    (group,) = found["spec"]["groups"]
    return [(r["record"], r["labels"].get("fleetplan_pool", ""), r["expr"]) for r in group["rules"]]


def written(name: str, own: Knowledge, **parameters: Any) -> list[tuple[str, str, str]]:
    return rules_in(autoscaling.render(FLEETS[name], 5000, "kubernetes", exported(name, own, **parameters)))


def random_rule(rng: np.random.Generator, most: int = 12) -> LoadRule:
    """Some edges alike, some at 0."""
    edges = np.sort(rng.uniform(0, 4, rng.integers(0, most)))
    edges = np.maximum(edges - rng.choice([0, 0.5]), 0.0)
    edges[1::3] = edges[0 : len(edges) - 1 : 3]
    highest = float(edges[-1] if len(edges) else 0.0) + rng.uniform(0.01, 1)
    needs = tuple(sorted(rng.integers(1, most, 20).tolist()))
    return LoadRule(tuple(edges.tolist()), highest, float(rng.choice([15, 60])), 600.0, needs)


def value(expression: str, known: dict[tuple[str, str], float], told: dict[str, float]) -> float:
    """A rule over traffic that stays as it is, as Prometheus computes it: `known` was recorded before, `told`
    are vLLM's counters per second and the prompts that wait.
    """
    python = re.sub(r"sum\(rate\((vllm:\w+)\{[^}]*\}\[\d+s\]\)\)", r'told["\1"]', expression)
    python = re.sub(
        r"sum\(vllm:num_requests_waiting\{[^}]*\}\) - count\(count by \(pod\) \([^)]*\)\)",
        'told["waiting"]',
        python,
    )
    python = re.sub(r'(fleetplan:\w+)\{[^}]*fleetplan_pool="([^"]*)"\}', r'known["\1", "\2"]', python)
    python = re.sub(r"(fleetplan:\w+)\{[^}]*\}", r'known["\1", ""]', python)
    python = re.sub(r"\[\d+s(:\d+s)?\]", "", python).replace("> 0)", "+ 0)").replace("> bool", ">")
    functions = {
        "sum": float,
        "vector": float,
        "max_over_time": float,
        "quantile_over_time": lambda _, x: x,
        "clamp": lambda x, least, most: min(max(x, least), most),
        "clamp_min": max,
        "clamp_max": min,
        "ceil": math.ceil,
        "floor": math.floor,
    }
    return float(eval(python, {"__builtins__": {}, "known": known, "told": told, **functions}))


@pytest.mark.parametrize("seed", range(15))
def test_the_steps_are_those_of_the_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rule = random_rule(rng)
    expression = by_load.worker_steps_expr(
        by_load.pool_rule(rule, ENGINE, "mixed"), "sum(fleetplan:pool_load{})"
    )
    for load in [0.0, *rule.edges, rule.highest, *rng.uniform(0, 3 * rule.highest, 40).tolist()]:
        assert value(expression, {("fleetplan:pool_load", ""): load}, {}) == rule.workers_for_load(load)


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("seed", range(8))
def test_steady_traffic_has_the_workers_that_were_simulated(name: str, seed: int) -> None:
    """The same requests/s, lengths and prompts that wait for the controller and for the rules."""
    rng = np.random.default_rng(seed)
    roles = ROLES[name]
    rented = [(("h100", 8), ("a100", 4), None)[k] for k in rng.integers(0, 3, len(roles))]
    own = knowledge(
        roles,
        most=int(rng.integers(4, 40)),
        engines=(ENGINE,) * len(roles),
        rules=tuple(random_rule(rng) for _ in roles),
        gpus=tuple(int(gpus) for gpus in rng.choice([1, 2, 3, 4], len(roles))),
        nodes=tuple(rented),
    )
    settings = {"headroom": f"{rng.integers(0, 40)} %", "drain": f"{rng.integers(0, 30)} s"}
    settings["floor"] = f"{rng.choice([0, 30, 70])} %"
    controller = table.parse_controller("fleetplan", settings)(own)
    controller.start([1] * len(roles))
    arrived, prompt, output = int(rng.integers(15, 1500)), rng.uniform(20, 2000), rng.uniform(5, 400)
    ready, waiting = rng.integers(1, 9, len(roles)), rng.integers(0, 12, len(roles))
    for k in range(45):
        seen = reading(
            15.0 * (k + 1),
            ready=ready.tolist(),
            waiting=waiting.tolist(),
            arrived=[arrived if i == own.front[0] else 0 for i in range(len(roles))],
            input_tokens=[prompt] * len(roles),
            output_tokens=[output] * len(roles),
        )
        simulated = controller.sizes(seen)
    rate = arrived / 15
    told = {
        prometheus_queries.PROMPT_TOKENS: rate * prompt,
        prometheus_queries.OUTPUT_TOKENS: rate * output,
        prometheus_queries.FIRST_TOKENS: rate,
        "waiting": float(sum(waiting[i] - ready[i] for i in own.front)),
    }
    known: dict[tuple[str, str], float] = {}
    forecast = (
        recording_rules.ARRIVALS,
        recording_rules.BUCKET,
        recording_rules.PRESENT,
        recording_rules.SHARE,
    )
    workers: dict[str, float] = {}
    for record, pool, expression in written(name, own, **settings):
        if record in (*forecast, recording_rules.EXPECTED, by_load.NOW):
            known[record, pool] = rate
            continue
        known[record, pool] = value(expression, known, told)
        if record == by_load.REQUEST_WORK:
            role = roles[len(workers)]
            assert known[record, pool] == pytest.approx(ENGINE.work_s(role, prompt, output))
            workers[pool] = 0
        if record == recording_rules.WORKERS:
            workers[pool] = known[record, pool]
    most = own.pools[0].most  # KEDA holds least and most
    assert [min(max(size, 1), most) for size in workers.values()] == simulated


@pytest.mark.parametrize("seed", range(20))
def test_nodes_are_filled_as_they_were_simulated(seed: int) -> None:
    """Pools that share a kind of node, the front first, and none above its most."""
    rng = np.random.default_rng(seed)
    name = ("pairs", "two mixed pools")[seed % 2]
    own = knowledge(
        ROLES[name],
        most=7,
        engines=(ENGINE,) * 2,
        rules=(RULE, RULE),
        gpus=tuple(int(gpus) for gpus in rng.choice([1, 2, 3, 5, 8], 2)),
        nodes=(("h100", 8), ("h100", 8)),
    )
    told = written(name, own)
    pools = [pool for record, pool, _ in told if record == recording_rules.HELD]
    for _ in range(20):
        sizes = rng.integers(1, 8, 2).tolist()
        known = {(recording_rules.HELD, pool): float(size) for pool, size in zip(pools, sizes, strict=True)}
        for record, pool, expression in told:
            if record == recording_rules.WORKERS:
                known[record, pool] = value(expression, known, {})
        assert [known[recording_rules.WORKERS, pool] for pool in pools] == own.fill_nodes(sizes)


def test_workers_that_leave_gaps_in_nodes_fill_no_node_that_is_not_paid() -> None:
    """Three workers of 3 GPUs take two nodes of 8. Two more were put on the seven GPUs left, for which a
    third node is paid.
    """
    own = knowledge(gpus=(3,), nodes=(("h100", 8),))
    assert [own.fill_nodes([count]) for count in range(5)] == [[0], [2], [2], [4], [4]]
    for gpus in ((3, 2), (5, 1), (6, 3), (4, 2)):
        two = knowledge(("prefill", "decode"), gpus=gpus, nodes=(("h100", 8),) * 2)
        for sizes in ([1, 1], [3, 1], [2, 5], [5, 3]):
            before, after = (
                fewest_nodes(8, list(zip(gpus, counts, strict=True)))
                for counts in (sizes, two.fill_nodes(sizes))
            )
            assert after == before


def test_spans_and_windows_of_the_rules() -> None:
    """Looks every 20 s make a span of 15 s one of 20 s, as in the controller; two scrapes as far apart are in
    35 s. Start-up 120 s and a look: the highest rate from now to 140 s ahead, a season of 10 h before;
    that of now half a bucket of 300 s later than a season ago.
    """
    told = {
        record: expr
        for record, _, expr in written(
            "mixed", knowledge(engines=(ENGINE,), rules=(RULE,)), every="20 s", season="10 h", drain="0 s"
        )
    }
    assert "}[180s:20s]))" in told[by_load.LOAD] and told[by_load.LOAD].startswith("1.1 * ")
    assert "vllm:generation_tokens_total{" in told[by_load.WORK] and told[by_load.WORK].count("[35s]") == 2
    assert f"[140s] offset {36_000 - 140 - 150}s" in told[recording_rules.EXPECTED]
    assert f"offset {36_000 - 150}s" in told[by_load.NOW]
    assert told[by_load.GROWTH].endswith("> 0), 1, 3) or vector(1)")
    assert "waiting" not in told[by_load.LOAD]
    longer = written(
        "mixed", knowledge(engines=(ENGINE,), rules=(RULE,)), every="20 s", season="10 h", memory="30 min"
    )
    assert "}[1800s:20s]))" in {record: expr for record, _, expr in longer}[by_load.LOAD]
    assert recording_rules.RATE not in told and recording_rules.HELD not in told


def test_what_goes_by_rate_stays_so() -> None:
    """By: rate, and a plan without rules; the README of the others says that they go by load."""
    rules: dict[str, Any] = {"engines": (ENGINE,), "rules": (RULE,)}
    capacity_of = table_of_one()
    by_rate = written("mixed", knowledge(capacity=capacity_of, **rules), by="rate")
    assert by_rate == written("mixed", knowledge(capacity=capacity_of))
    assert recording_rules.RATE in {record for record, _, _ in by_rate}
    own = knowledge(**rules, gpus=(2,), nodes=(("h100", 8),))
    readme = autoscaling.render(FLEETS["mixed"], 5000, "kubernetes", exported("mixed", own))["README.md"]
    assert "It goes by load, in spans of 15 s." in readme and by_load.LOAD in readme
    assert "rounded up to what whole nodes hold" in readme
    idle = autoscaling.render(FLEETS["mixed"], 5000, "kubernetes", exported("mixed", own, fill=False))
    assert "rounded up to what whole nodes hold" not in idle["README.md"]


def table_of_one() -> CapacityTable:
    return CapacityTable(np.array([2.0, 4.0]), np.array([[1], [2]]), "by hand")


def bursts(seed: int) -> tuple[Any, Any]:
    """Requests and mean prompts of 160 spans of 15 s: 8 requests/s, thrice that in one span of twelve,
    prompts of 300 to 700 tokens.
    """
    rng = np.random.default_rng(seed)
    requests = np.full(160, 120) + rng.integers(-20, 20, 160)
    requests[5::12] += 240
    return requests, 500 + 200 * np.sin(np.arange(160) / 9)


def computed(text: str, series: dict[str, Any], queries: Sequence[str], folder: Path) -> list[float]:
    """What Prometheus' own promtool makes of the queries at the end of `series`, a value every 15 s.

    There scrapes and rules have the same times: a range shorter by 1 s holds what it holds elsewhere.
    """
    rules = re.sub(r"\[(\d+)s(?=:|\])", lambda found: f"[{int(found[1]) - 1}s", text)
    (found,) = documents(rules)
    (folder / "rules.yaml").write_text(yaml.safe_dump(found["spec"]))
    given = [
        {"series": name, "values": " ".join(f"{each:.9g}" for each in values)}
        for name, values in series.items()
    ]
    last_s = 15 * (max(map(len, series.values())) - 1)
    asked = [
        {"expr": query, "eval_time": f"{last_s}s", "exp_samples": [{"labels": "{}", "value": -1}]}
        for query in queries
    ]
    case = {"interval": "15s", "input_series": given, "promql_expr_test": asked}
    told = {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": [case]}
    (folder / "test.yaml").write_text(yaml.safe_dump(told))
    ran = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    return [float(each) for each in re.findall(r"got:\s*\{\} (\S+)", ran.stdout + ran.stderr)]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
@pytest.mark.parametrize("span_s", [15.0, 600.0])
@pytest.mark.parametrize("name", ["mixed", "pairs"])
def test_prometheus_sees_the_load_that_was_simulated(name: str, span_s: float, tmp_path: Path) -> None:
    """Bursts and prompts that change: the load of prefill workers is the same, that of workers that decode
    within 10 %: the context of a token is the window's mean, in the controller that of its span. A window of
    one span is the last 600 s, also at a time that is no multiple of them.
    """
    roles = ROLES[name]
    rule = LoadRule((0.5,), 3.0, span_s, 600.0)
    own = knowledge(roles, engines=(ENGINE,) * len(roles), rules=(rule,) * len(roles))
    requests, prompts = (each[:150] for each in bursts(1))
    controller = Fleetplan(FleetplanSettings(), own)
    for k, (count, prompt) in enumerate(zip(requests.tolist(), prompts.tolist(), strict=True)):
        lengths = {"input_tokens": [prompt] * len(roles), "output_tokens": [100.0] * len(roles)}
        arrived = [count, 0][: len(roles)]
        controller.sizes(reading(15.0 * (k + 1), ready=[1] * len(roles), arrived=arrived, **lengths))
    works = [np.array([work for _, work in each.spans]) for each in controller.recent_work]
    simulated = [peak_load(work) if span_s < 600 else float(work.mean()) for work in works]
    files = autoscaling.render(FLEETS[name], 5000, "kubernetes", exported(name, own))
    pools = list(dict.fromkeys(pool for _, pool, _ in rules_in(files) if pool))
    of_window = r"quantile_over_time\(.*?\]\)|fleetplan:pool_work\{[^}]*\}"
    spans = [re.search(of_window, e) for r, _, e in rules_in(files) if r == by_load.LOAD]
    series = {
        f'{counter}{{fleetplan_pool="{pool}",pod="0"}}': np.concatenate(([0.0], np.cumsum(values)))
        for counter, pool, values in (
            (prometheus_queries.PROMPT_TOKENS, pools[0], requests * prompts),
            (prometheus_queries.FIRST_TOKENS, pools[0], requests),
            (prometheus_queries.OUTPUT_TOKENS, pools[-1], requests * 100.0),
        )
    }
    queries = [f"sum({found[0].replace('600s', '599s')})" for found in spans if found]
    seen = computed(files[prometheus_queries.RULES_FILE], series, queries, tmp_path)
    for role, there, here in zip(roles, simulated, seen, strict=True):
        assert here == pytest.approx(there, rel=1e-5 if role == "prefill" else 0.1)


@pytest.mark.parametrize("name", FLEETS)
def test_rules_by_load_are_promql(name: str) -> None:
    parser = pytest.importorskip("promql_parser")
    for _, _, expression in written(name, on_nodes(ROLES[name])):
        parser.parse(expression)


@pytest.mark.parametrize("name", FLEETS)
def test_rules_by_load_refer_upwards(name: str) -> None:
    roles = ROLES[name]
    own = on_nodes(roles)
    recorded: set[tuple[str, str]] = set()
    told = written(name, own)
    for record, pool, expression in told:
        named = re.findall(
            r'(fleetplan:\w+)\{fleetplan_llm="[^"]*"(?:,fleetplan_pool="([^"]*)")?\}', expression
        )
        assert set(named) <= recorded, record
        recorded.add((record, pool))
    assert len(recorded) == len(told)
    for target in ("kubernetes", "llm-d", "kserve", "production-stack"):
        files = autoscaling.render(FLEETS[name], 5000, target, exported(name, own))
        queries = [
            d["spec"]["triggers"][0]["metadata"]["query"]
            for _, d in objects(files)
            if "scaleTargetRef" in d.get("spec", {})
        ]
        assert len(queries) == len(roles)
        assert all(query.startswith(recording_rules.WORKERS) for query in queries)


def test_a_rule_without_work_is_refused() -> None:
    idle = replace(ENGINE, prefill_s_per_token=0.0, decode_s_per_sequence=0.0, decode_s_per_token=0.0)
    with pytest.raises(InputError, match="work of tokens must be finite, >= 0 and not all 0"):
        by_load.pool_rule(RULE, idle, "mixed")
