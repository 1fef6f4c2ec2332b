"""`import fleetplan`: its names, what it takes, what it gives, and that the command gives the same."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from plans import CATALOG
from sample_plan import sample_plan

import fleetplan
from planner import cli
from planner.api.results import PlanResult, SharedPlanResult
from planner.documents.facts import OldPrices
from planner.files import checked_files
from planner.solvers.placement import NodePlacement, PlacedNode

EXAMPLES = checked_files.repository_dir("examples")
SLO = EXAMPLES / "slo.yaml"
TRACE = EXAMPLES / "traces" / "azure-conversation-sample.csv"
LLM = "meta-llama/Llama-3.1-8B"
PROMISE = {"ttft": {"p90": "2 s"}}
STOCK: dict[str, Any] = {"gpus": {"a100-80g": 8}}
COLUMNS, LINES = 100, 24  # of a screen

SIGNATURES = {
    "catalog": "folder",
    "compare": "fleets, trace, slo, *, policies, traffic, catalog, seed, executor, **traffic_keys",
    "day": "slo, trace, *, standing, terms, catalog, seed, time_limit_s, progress, **keys",
    "goodput": "fleet, trace, slo, *, traffic, seeds, tolerance_frac, catalog, watch",
    "manifests": "plan, target, *, max_model_len, catalog",
    "pareto": "slo, trace, over, *, limits, points, catalog, seed, progress, **keys",
    "plan": "slo, trace, *, catalog, seed, time_limit_s, explain, prove, progress, **keys",
    "read_catalog": "folder",
    "read_fleet": "fleet, catalog, *, policies, slo",
    "read_plan": "folder, catalog",
    "read_task": "task, catalog, **keys",
    "read_trace": "trace, *, drop_invalid, log_options",
    "replace": "task, changes, value",
    "replan": "current, slo, trace, *, horizon, start_usd, stop_usd, catalog, seed, **keys",
    "schedule": "market, demand, *, window, gap_frac, time_limit_s, catalog, seed, progress",
    "sensitivity": "slo, trace, *, by, catalog, seed, time_limit_s, progress, **keys",
    "simulate": "fleet, trace, slo, *, traffic, catalog, seed, closed_loop, executor, **traffic_keys",
    "validate": "plan, out, trace, slo, *, traffic, catalog, seed, **how",
    "watch": "plan, prometheus, slo, *, window, step, model, match, catalog",
    "what_if": "slo, trace, changes, *, catalog, seed, time_limit_s, progress, **keys",
    "working_on": "executor, address",
}
ERRORS = (
    "CatalogError",
    "ExtrapolationError",
    "InfeasibleError",
    "InputError",
    "OutOfTimeError",
    "PlannerError",
    "TraceError",
)


def table(requests: int = 200, **more: Any) -> pd.DataFrame:
    """Four requests a second."""
    return pd.DataFrame(
        {
            "arrival_s": np.arange(requests) / 4,
            "input_tokens": 200 + 10 * (np.arange(requests) % 7),
            "output_tokens": 20 + np.arange(requests) % 5,
            **more,
        }
    )


def small(**keys: Any) -> PlanResult:
    found = fleetplan.plan(PROMISE, table(), llm=LLM, fleet=STOCK, **keys)
    assert isinstance(found, PlanResult)
    return found


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> PlanResult:
    """As the command wrote it; that `fleetplan.plan` gives the same bytes is a test of its own."""
    return fleetplan.read_plan(sample_plan(tmp_path_factory) / "plan" / "out")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        assert not end.value.code, said.err
        return said.out

    return run


def test_the_names_are_these_and_no_others() -> None:
    assert sorted(dir(fleetplan)) == sorted([*SIGNATURES, *ERRORS, "__version__"])
    assert all(getattr(fleetplan, name).__doc__ for name in (*SIGNATURES, *ERRORS))
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        fleetplan.plann  # noqa: B018


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_are_these(name: str) -> None:
    shown, is_keyword = [], False
    for parameter in inspect.signature(getattr(fleetplan, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            shown.append("*")
            is_keyword = True
        shown.append(("**" if parameter.kind is parameter.VAR_KEYWORD else "") + parameter.name)
    assert ", ".join(shown) == SIGNATURES[name]


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import fleetplan, sys; print(sorted(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "pandas", "numba", "typer", "altair", "typing", "planner"} & set(
        json.loads(done.stdout.replace("'", '"'))
    )


def test_a_foreign_planner_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "__init__.py").write_text("")
    code = "import sys; sys.path.insert(0, '.'); import fleetplan; fleetplan.plan"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert "ImportError: fleetplan needs its own package `planner`" in done.stderr


@pytest.mark.slow
def test_the_command_writes_the_same_bytes(command: Callable[..., str], tmp_path: Path) -> None:
    planned = fleetplan.plan(SLO, TRACE)
    assert isinstance(planned, PlanResult)
    written = planned.save(tmp_path / "face")
    told = json.loads(command("--slo", SLO, "--trace", TRACE, "-o", tmp_path / "command", "--json"))
    assert told == planned.to_dict() | {"directory": str(tmp_path / "command")}
    by_command = {
        str(path.relative_to(tmp_path / "command")): path.read_bytes()
        for path in (tmp_path / "command").rglob("*")
        if path.is_file()
    }
    assert sorted(by_command) == sorted(written)
    assert {name: (tmp_path / "face" / name).read_bytes() for name in written} == by_command


def test_a_table_is_its_file() -> None:
    from_file, from_table = fleetplan.read_trace(TRACE), fleetplan.read_trace(pd.read_csv(TRACE))
    for name in ("arrival_s", "input_tokens", "output_tokens"):
        assert np.array_equal(getattr(from_file, name), getattr(from_table, name)), name
    assert from_table.notes == from_file.notes and from_table.name == "DataFrame"


def test_a_table_may_hold_dates_and_block_ids() -> None:
    frame = table(4, hash_ids=[[1, 2], [1, 2], [1, 3], []]).drop(columns="arrival_s")
    frame["timestamp"] = pd.to_datetime(["2026-01-01 00:00:00"] * 2 + ["2026-01-01 00:00:05"] * 2)
    found = fleetplan.read_trace(frame)
    assert found.arrival_s.tolist() == [0.0, 0.0, 5.0, 5.0]
    assert found.prefix_ids.size


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (table(3, input_tokens=[1, -2, 3]), "row 1, column input_tokens: expected a whole number of tokens"),
        (table(3, input_tokens=[1, None, 3]), "row 1, column input_tokens: expected .* found nothing or NaN"),
        (table(3, arrival_s=[0, "noon", 3]), "row 1, column arrival_s: expected a number >= 0, found 'noon'"),
        (table(3).drop(columns="output_tokens"), "no column could be read as output"),
        (table(3).iloc[:0], "DataFrame: has no row"),
        (table(4, output_tokens=[0, 0, 1, 1]), "cannot be served as they stand"),
    ],
)
def test_a_table_is_checked_as_a_file_is(frame: pd.DataFrame, message: str) -> None:
    with pytest.raises(fleetplan.TraceError, match=message):
        fleetplan.read_trace(frame)


def test_keys_and_values_are_the_file(tmp_path: Path) -> None:
    document = yaml.safe_load(SLO.read_text())
    said = fleetplan.read_task(SLO).task()
    assert fleetplan.read_task(document).task() == said
    rest = {key: value for key, value in document.items() if key != "slo"}
    assert fleetplan.read_task(document["slo"], **rest).task() == said
    assert fleetplan.read_task(SLO, objective="power").task().objective == "power"


@pytest.mark.long
def test_a_plan_of_values_is_that_of_files(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump({"llm": LLM, "slo": PROMISE, "fleet": STOCK}))
    table().to_csv(tmp_path / "t.csv", index=False)
    of_files = fleetplan.plan(tmp_path / "slo.yaml", str(tmp_path / "t.csv"))
    assert isinstance(of_files, PlanResult)
    assert of_files.fleet == small().fleet
    assert of_files.command.startswith("plan --slo slo.yaml --trace t.csv") and small().command == ""


def test_what_a_plan_says_of_itself(planned: PlanResult) -> None:
    assert planned.cost_usd_per_h == pytest.approx(39.04)
    assert (planned.workers, planned.gpus) == (6, 16)
    assert planned.status == "certified"
    lines = repr(planned).splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert "39.04" in lines[0]  # a whole node of each GPU
    assert "<table" in planned._repr_html_() and "39.04" in planned._repr_html_()
    frame = planned.to_frame()
    assert frame["workers"].sum() == 6 and frame["cost_usd_per_h"].sum() == pytest.approx(39.04)
    assert planned.report().startswith("<!doctype html>")


def test_the_cost_is_that_of_the_nodes_on_which_workers_are_placed(planned: PlanResult) -> None:
    """With a topology that takes a node more the result had the price of the fewest."""
    kinds = [each.gpu for each in planned.bill.nodes for _ in range(each.count)]
    nodes = tuple(PlacedNode(f"n{k}", kind, "rack", ()) for k, kind in enumerate([*kinds, kinds[0]]))
    placed = replace(planned, plan=replace(planned.plan, placement=NodePlacement(nodes, None, 1, True)))
    assert placed.cost_usd_per_h == pytest.approx(placed.to_dict()["cost_usd_per_h"])
    assert placed.cost_usd_per_h > planned.cost_usd_per_h + 1


def test_the_best_fleet_on_paper_is_named_so_beside_a_dearer_plan(planned: PlanResult) -> None:
    """Under a plan of 95.68 USD/h stood "of fleets with one worker type per pool the best is 71.76 USD/h"."""
    assert any(line.startswith("on paper, of fleets with one worker type") for line in planned.sentences())


def test_a_saved_plan_is_read_back(tmp_path: Path) -> None:
    planned = small()
    planned.save(tmp_path)
    again = fleetplan.read_plan(tmp_path)
    assert again.fleet == planned.fleet and again.to_dict() == planned.to_dict()
    assert fleetplan.read_fleet(tmp_path) == planned.fleet
    with pytest.raises(fleetplan.InputError, match="does not hold its question"):
        fleetplan.replace(again, "slo.ttft.p90", "1 s")


@pytest.mark.long
def test_explain_says_what_limits_cost() -> None:
    assert len(small(explain=True).plan.certificate.binding) > len(small().plan.certificate.binding)


def test_replace_changes_one_value() -> None:
    task = fleetplan.read_task(SLO)
    changed = fleetplan.replace(task, "slo.ttft.p90", "3 s")
    assert changed.document["slo"]["ttft"]["p90"] == "3 s" and task.document["slo"]["ttft"]["p90"] == "2 s"
    assert task.replace(**{"slo.ttft.p90": "3 s"}).task() == changed.task()
    assert task.replace({"limits": None}).task().power_limit_w is None
    assert "p90: 3 s" in repr(changed)
    assert small().replace({"fleet.gpus": {"a100-80g": 1}}).document["fleet"] == {"gpus": {"a100-80g": 1}}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("slo.tfft.p90", "3 s", "did you mean 'ttft'"),
        ("limit.power", "3 kW", "did you mean 'limits'"),
        ("limits.pover", None, "there is no 'pover' to take out; did you mean 'power'"),
        ("slo.ttft.p90.x", "3 s", "slo.ttft.p90 is '2 s' and has no 'x'"),
        ("slo..p90", "3 s", "expected a path such as"),
        ("slo.ttft.p90", "soon", "ttft"),
    ],
)
def test_replace_refuses_what_slo_yaml_would(path: str, value: Any, message: str) -> None:
    with pytest.raises(fleetplan.InputError, match=message):
        fleetplan.replace(fleetplan.read_task(SLO), path, value)


def test_errors_have_types_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(fleetplan.InfeasibleError) as found:
        fleetplan.plan({"ttft": {"p90": "1 us"}}, table(), llm=LLM, fleet=STOCK)
    assert found.value.kind == "latency" and "on paper; production may take more" in str(found.value)
    with pytest.raises(fleetplan.InputError, match="llm: expected the name of an LLM, found nothing"):
        fleetplan.plan(PROMISE, table())
    with pytest.raises(fleetplan.InputError, match="trace: missing"):
        fleetplan.plan(PROMISE, llm=LLM)
    with pytest.raises(fleetplan.errors.InputError, match="nowhere"):
        fleetplan.plan("nowhere.yaml", table())
    with pytest.raises(fleetplan.InputError, match="expected a file, a DataFrame or a Trace, found int"):
        fleetplan.plan(PROMISE, 3, llm=LLM)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


@pytest.mark.long
def test_several_llms_from_values() -> None:
    """One table with a column `model`, and a table for each: the same fleets."""
    both = pd.concat([table(model="chat"), table(model="code")], ignore_index=True)
    both = both.sort_values("arrival_s", kind="stable")
    llms = {name: {"llm": LLM, "slo": PROMISE, "safety": "none"} for name in ("chat", "code")}
    shared = fleetplan.plan(llms=llms, trace=both, fleet=STOCK)
    each = fleetplan.plan(llms=llms, trace={"chat": table(), "code": table()}, fleet=STOCK)
    inside = {name: {**entry, "trace": table()} for name, entry in llms.items()}
    own = fleetplan.plan(llms=inside, fleet=STOCK)
    assert isinstance(shared, SharedPlanResult) and isinstance(each, SharedPlanResult)
    assert shared.fleets == each.fleets == own.fleets
    assert shared.workers == sum(plan.workers for plan in shared.plans.values())
    assert set(shared.to_frame()["name"]) == {"chat", "code"}
    assert {"plan.yaml", "chat/plan.yaml", "code/report.html"} <= set(shared.files())
    assert len(repr(shared).splitlines()) <= LINES
    with pytest.raises(fleetplan.InputError, match="prove: is for one LLM"):
        fleetplan.plan(llms=llms, trace=both, fleet=STOCK, prove=True)
    with pytest.raises(fleetplan.InputError, match="did you mean 'chat'"):
        fleetplan.plan(llms=llms, trace={"chatt": table()}, fleet=STOCK)


def test_old_prices_are_said_of_several_llms_too() -> None:
    """Only a plan of one LLM warned."""
    row = CATALOG.provenance["h100-80g"]
    old = replace(
        CATALOG, provenance={**CATALOG.provenance, "h100-80g": replace(row, price_date="2020-01-01")}
    )
    llms = {name: {"llm": LLM, "slo": PROMISE, "safety": "none"} for name in ("chat", "code")}
    for question in ({"llm": LLM, "slo": PROMISE, "safety": "none"}, {"llms": llms}):
        traces = {"chat": table(), "code": table()} if "llms" in question else table()
        document = {**question, "fleet": {"gpus": {"h100-80g": 8}}}
        plan = fleetplan.plan(document, traces, catalog=old)
        warned = plan.shared.warnings if isinstance(plan, SharedPlanResult) else plan.plan.warnings
        assert [each.gpus for each in warned if isinstance(each, OldPrices)] == [("h100-80g",)]


@pytest.mark.long
def test_simulate_is_the_command(command: Callable[..., str], tmp_path: Path) -> None:
    small().save(tmp_path)
    table().to_csv(tmp_path / "t.csv", index=False)
    asked = ("simulate", "--fleet", tmp_path / "plan.yaml", "--trace", tmp_path / "t.csv", "--json")
    found = fleetplan.simulate(tmp_path, table(), PROMISE, traffic={"rate": "8 req/s"}, seed=3)
    assert json.loads(command(*asked, "--rate", 8, "--seed", 3)) == found.to_dict() | {"slo": None}
    assert found.holds and len(found.requests_frame()) == len(found.requests)
    many = fleetplan.simulate(small(), table(), seed=range(2), executor="serial")
    assert json.loads(command(*asked, "--seeds", 2, "--executor", "serial")) == many.to_dict()
    for result in (found, many):
        result.save(tmp_path / "out.csv")
        assert len(repr(result).splitlines()) <= LINES
    with pytest.raises(fleetplan.InputError, match="executor: one seed is simulated here"):
        fleetplan.simulate(small(), table(), executor="processes")


def test_a_log_is_read_as_the_question_says(tmp_path: Path) -> None:
    log = tmp_path / "gateway.csv"
    table().rename(columns={"arrival_s": "t", "input_tokens": "asked", "output_tokens": "said"}).to_csv(
        log, index=False
    )
    columns = {"map": {"arrival": "t:s", "input": "asked", "output": "said"}}
    fleet = {"llm": LLM, "workers": [{"gpu": "a100-80g"}]}
    own = fleetplan.simulate(fleet, table(), PROMISE)
    question = {"llm": LLM, "slo": PROMISE, "fleet": STOCK, "traffic": columns}
    for said in ({"slo": question}, {"slo": PROMISE, "traffic": columns}):
        found = fleetplan.simulate(fleet, log, **said)
        assert found.requests_frame().equals(own.requests_frame())
    with pytest.raises(fleetplan.InputError, match="arrival"):
        fleetplan.simulate(fleet, log, PROMISE)


@pytest.mark.long
def test_a_dataframe_is_read_as_the_question_says() -> None:
    """A map and a time zone were read of files alone: 09:00 in Berlin is 08:00 UTC, as in a file."""
    log = pd.DataFrame(
        {"t": [f"14.03.2026 09:00:{k % 60:02}" for k in range(60)], "prompt": [200] * 60, "answer": [20] * 60}
    )
    columns = {"arrival": "t:%d.%m.%Y %H:%M:%S", "input": "prompt", "output": "answer"}
    traffic = {"map": columns, "timezone": "Europe/Berlin"}
    found = fleetplan.simulate(small(), log, PROMISE, traffic=traffic)
    assert len(found.requests) == 60 and "UTC" not in " ".join(found.requests.notes)
    with pytest.raises(fleetplan.InputError, match="has no column 'promt', which the map takes as input"):
        fleetplan.simulate(small(), log, PROMISE, traffic={"map": columns | {"input": "promt"}})
    with pytest.raises(fleetplan.InputError, match=r"the whole question as slo: \{'llm': \.\.\."):
        fleetplan.simulate(small(), slo=PROMISE, traffic={"rate": 2, "input": 1500, "output": 300})


@pytest.mark.slow
def test_compare_is_the_command(command: Callable[..., str], tmp_path: Path) -> None:
    small().save(tmp_path / "a")
    table().to_csv(tmp_path / "t.csv", index=False)
    said = "routing=round-robin"
    told = command(
        *("compare", "--trace", tmp_path / "t.csv", "--fleet", f"a={tmp_path / 'a' / 'plan.yaml'}"),
        *("--policies", "own", "--policies", said, "--json"),
    )
    policies: dict[str, Any] = {"own": None, said: {"routing": "round-robin"}}
    found = fleetplan.compare({"a": tmp_path / "a"}, table(), policies=policies)
    document = found.to_dict()
    assert json.loads(told)["variants"] == document["variants"]
    of_objects = fleetplan.compare([("a", small())], table(), policies=policies)
    assert of_objects.to_frame().equals(found.to_frame())
    assert {"compare.html", "compare.csv", "compare.json"} == set(found.save(tmp_path / "out"))


@pytest.mark.slow
def test_goodput_is_the_command(command: Callable[..., str], tmp_path: Path) -> None:
    small().save(tmp_path)
    table().to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump({"llm": LLM, "slo": PROMISE}))
    asked = ("--trace", tmp_path / "t.csv", "--slo", tmp_path / "slo.yaml", "--seeds", 1, "--tolerance", 0.5)
    told = json.loads(command("goodput", "--fleet", tmp_path / "plan.yaml", *asked, "--json"))
    tried: list[float] = []
    found = fleetplan.goodput(
        small(), table(), PROMISE, seeds=1, tolerance_frac=0.5, watch=lambda rate, _: tried.append(rate)
    )
    assert found.to_dict() == told and found.rate_rps < found.fails_rps
    assert len(set(tried)) == told["rates_tried"]
    with pytest.raises(fleetplan.InfeasibleError, match="keeps the SLO at no rate"):
        fleetplan.goodput(small(), table(), {"ttft": {"p90": "1 us"}}, seeds=1)


def test_schedule_is_the_command(command: Callable[..., str], tmp_path: Path) -> None:
    market = {
        "gpus": {"h100-80g": {"on_demand": "7 usd/h", "reserved": "4 usd/h"}},
        "capacity": [{"llm": "chat", "worker": "tp4", "gpu": "h100-80g", "gpus": 8, "rate": "5 req/s"}],
    }
    (tmp_path / "schedule.yaml").write_text(yaml.safe_dump(market))
    demand = pd.DataFrame({"chat": [3.0, 12.0, 7.0]})
    demand.to_csv(tmp_path / "demand.csv", index=False)
    told = command("schedule", tmp_path / "schedule.yaml", "--demand", tmp_path / "demand.csv", "--json")
    found = fleetplan.schedule(market, demand)
    assert found.to_dict() == json.loads(told) and found.is_optimal
    assert found.to_frame()["firm"].tolist() == [2, 3, 2]  # two are reserved, and run anyway
    assert "schedule.html" in found.save(tmp_path / "out") and found.save(tmp_path / "w.csv") == ("w.csv",)
    by_trace = fleetplan.schedule(market, {"chat": table()}, window="10 s")
    assert len(by_trace.to_frame()) == 5  # 49.75 s: the last window is not full, and counts


def test_validate_refuses_what_cannot_run(tmp_path: Path) -> None:
    small().save(tmp_path / "plan")
    with pytest.raises(fleetplan.InputError, match="expected vllm or rehearsal, found 'sglang'"):
        fleetplan.validate(tmp_path / "plan", tmp_path / "out", engine="sglang")
    with pytest.raises(fleetplan.InputError, match="max_requests: is about an endpoint; name it with url"):
        fleetplan.validate(tmp_path / "plan", tmp_path / "out", max_requests=5)
    with pytest.raises(fleetplan.InputError, match="there is no environment variable 'NOT_THERE'"):
        fleetplan.validate(tmp_path / "plan", tmp_path / "out", url="https://x", api_key_env="NOT_THERE")
    with pytest.raises(fleetplan.InputError, match="max_failed_frac: is about an endpoint"):
        fleetplan.validate(tmp_path / "plan", tmp_path / "out", max_failed_frac=0.0)
    longer = pd.DataFrame({"arrival_s": [0.0], "input_tokens": [40_000], "output_tokens": [5]})
    with pytest.raises(fleetplan.InputError, match=r"40,005 tokens, and the engines of .* start with"):
        fleetplan.validate(tmp_path / "plan", tmp_path / "out", longer)
    longest = pd.DataFrame({"arrival_s": [0.0], "input_tokens": [10**8], "output_tokens": [5]})
    with pytest.raises(fleetplan.InputError, match=r"a request of 100,000,005 tokens, and a worker of this"):
        fleetplan.validate(tmp_path / "plan", tmp_path / "out", longest, engine="rehearsal")


@pytest.mark.parametrize("seed", [-1, 1.5, "x", True, None, 2**70])
def test_a_seed_that_is_none_is_refused_in_one_line(seed: Any) -> None:
    """-1 and "x" ended in NumPy's ValueError, 1.5 in its TypeError, 2**70 in an OverflowError."""
    with pytest.raises(fleetplan.InputError, match=r"seed: expected a whole number, 0 to 4294967295, found"):
        fleetplan.plan(None, seed=seed)


@pytest.mark.parametrize("limit", [math.nan, 0, -1.0, "x", None])
def test_a_time_limit_that_is_none_is_refused_in_one_line(limit: Any) -> None:
    """NaN ended in "cannot convert float NaN to integer"."""
    with pytest.raises(fleetplan.InputError, match=r"time_limit_s: expected seconds, more than 0, found"):
        fleetplan.plan(None, time_limit_s=limit)


@pytest.mark.long
def test_numpys_numbers_are_seeds() -> None:
    """`simulate` took np.int64(3) for a list of seeds: "'numpy.int64' object is not iterable"."""
    seeds: Any = [3, np.int64(3)]
    one, other = (fleetplan.simulate(small(), table(), seed=seed) for seed in seeds)
    assert one.to_dict() == other.to_dict()
    many: Any = np.arange(2)
    assert len(fleetplan.simulate(small(), table(), seed=many, executor="serial").runs) == 2


def test_a_question_of_one_llm_has_no_questions_of_each() -> None:
    """It ended in KeyError: 'llms'."""
    with pytest.raises(fleetplan.InputError, match="llms: missing; this question is of one LLM"):
        fleetplan.read_task(SLO).of_each_llm()
