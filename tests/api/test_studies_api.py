"""what_if, sensitivity, pareto, replan, manifests, catalog from Python: the commands' figures, as frames."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

import fleetplan
import fleetplan.errors
from planner import cli, errors
from planner.api.progress import shown_progress
from planner.api.results import PlanResult
from planner.commands.what_if_command import moved_rows
from planner.files.checked_files import repository_dir, to_yaml
from planner.search.problem.plan_problem import report_nothing
from planner.studies.pareto_frontier import _axis_walk
from planner.studies.replanning import ReplanTerms
from planner.studies.what_if import Study

NOTEBOOK = repository_dir("examples") / "planning.ipynb"
QUESTION: dict[str, Any] = {
    "llm": "meta-llama/Llama-3.1-8B",
    "slo": {"ttft": {"p90": "1 s"}, "tbt": {"p99": "100 ms"}},
    "traffic": {"rate": 6, "input": 600, "output": 100, "duration": "60 s"},
    "fleet": {"gpus": {"h100-80g": 4, "a100-80g": 4}},
    "safety": "none",
}


@pytest.fixture(scope="module")
def slo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("question") / "slo.yaml"
    path.write_text(to_yaml(QUESTION))
    return path


@pytest.fixture(scope="module")
def plan(slo: Path) -> PlanResult:
    found = fleetplan.plan(slo)
    assert isinstance(found, PlanResult)
    return found


def printed(*arguments: object) -> dict[str, Any]:
    """What the command prints with --json."""
    done = CliRunner().invoke(cli.app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return {key: value for key, value in document.items() if key != "warnings"}


def test_what_if_is_the_command(slo: Path) -> None:
    found = fleetplan.what_if(slo, changes={"traffic.rate": 40})
    command = printed("what-if", "--slo", slo, "--change", "traffic.rate=40")
    assert found.to_dict() == command
    assert list(found.to_frame()[""]) == ["before", "after"]
    assert found.to_frame()["cost_usd_per_h"][1] == command["after"]["cost_usd_per_h"]
    assert found.headline().startswith("traffic.rate=40: ") and found.fleet is not None


def test_what_if_takes_the_keys_that_plan_takes(slo: Path) -> None:
    """docs/python.md says so of each function; what_if ended in a TypeError."""
    section, keys = QUESTION["slo"], {key: value for key, value in QUESTION.items() if key != "slo"}
    changes = {"slo.ttft.p90": "2 s"}
    found = fleetplan.what_if(section, changes=changes, **keys)
    assert found.to_dict() == fleetplan.what_if(slo, changes=changes).to_dict()
    with pytest.raises(errors.InputError, match="changes: expected paths with values"):
        fleetplan.what_if(slo, changes=["slo.ttft.p90=2 s"])  # type: ignore[arg-type]


@pytest.mark.long
def test_what_if_of_what_nothing_keeps_has_no_fleet(slo: Path) -> None:
    found = fleetplan.what_if(slo, changes={"slo.ttft.p90": "1 ms"})
    assert (found.holds, found.fleet) == (False, None)
    assert "no fleet is left" in found.sentences()[0]
    with pytest.raises(errors.InputError, match="changes: missing"):
        fleetplan.what_if(slo)


@pytest.mark.long
@pytest.mark.parametrize(("limit", "after"), [("9 s", True), ("2 ms", False)])
def test_what_if_answers_the_changed_question_where_nothing_keeps_the_one_before(
    limit: str, after: bool
) -> None:
    """It ended with exit code 3 and sent the reader to `plan`."""
    question, change = QUESTION | {"slo": {"ttft": {"p90": "1 ms"}}}, {"slo.ttft.p90": limit}
    result = fleetplan.what_if(question, changes=change)
    answer = result.to_dict()
    assert (result.before, answer["before"], result.holds, answer["difference"]) == (None, None, None, None)
    assert "before the change there is no fleet: latency: TTFT p90" in result.sentences()[0]
    assert (result.fleet is not None) == after and list(result.to_frame()[""]) == ["before", "after"]
    rows = moved_rows(result.before, result.moved, list(result.bounds))
    if after:
        alone = fleetplan.plan(fleetplan.replace(question, change))
        assert isinstance(alone, PlanResult) and result.fleet == alone.fleet
        assert list(rows[0]) == ["", "after"] and "; after it one is found" in result.sentences()[0]
    else:
        assert not rows and answer["why"].count("latency: TTFT p90") == 2


@pytest.mark.slow
def test_sensitivity_is_the_command(slo: Path) -> None:
    found = fleetplan.sensitivity(slo, by="20 %")
    assert found.to_dict() == printed("sensitivity", "--slo", slo, "--by", "20 %")
    assert len(found.to_frame()) == len(found.moves) and found.to_frame()["holds"].notna().any()
    with pytest.raises(errors.InputError, match="by: expected a share between 0 and 1"):
        fleetplan.sensitivity(slo, by="0 %")


def test_a_limit_is_named_with_a_blank_or_a_point() -> None:
    """`over` is "ttft p90" by default, which was refused: "expected one of ..., or a limit as ttft.p90"."""
    task = fleetplan.read_task(QUESTION).task()
    walks = [_axis_walk(cast(Study, None), task, over) for over in ("ttft p90", "ttft.p90")]
    assert [walk.question_limit for walk in walks] == [walks[0].question_limit] * 2


def test_numbers_that_no_search_can_use_are_refused(slo: Path) -> None:
    """Without seeds every rate held, and the search for the highest never ended."""
    fleet = {"llm": "llama-3.1-8b", "workers": [{"gpu": "h100-80g", "count": 1}]}
    limits = {"ttft": {"p90": "2 s"}}
    with pytest.raises(errors.InputError, match="seeds: must be >= 1, found 0"):
        fleetplan.goodput(fleet, slo=limits, seeds=0)
    with pytest.raises(errors.InputError, match="tolerance_frac: must be > 0 and at most 1, found 0"):
        fleetplan.goodput(fleet, slo=limits, tolerance_frac=0.0)
    with pytest.raises(errors.InputError, match="closed_loop: must be >= 0, found -1"):
        fleetplan.simulate(fleet, closed_loop=-1)
    with pytest.raises(errors.InputError, match="max_model_len: must be >= 1, found -5"):
        fleetplan.manifests(fleet, max_model_len=-5)
    with pytest.raises(errors.InputError, match="what a start and a stop cost >= 0"):
        ReplanTerms(24.0, math.nan)
    with pytest.raises(errors.InputError, match="limits: expected the loosest and the tightest"):
        fleetplan.pareto(slo, limits=("2 s",))  # type: ignore[arg-type]


@pytest.mark.long
def test_pareto_is_the_command(slo: Path, tmp_path: Path) -> None:
    found = fleetplan.pareto(slo, over="rate", limits=("4 rps", "20 rps"), points=3)
    command = printed(
        "pareto", "--slo", slo, "--over", "rate", "--from", "4 rps", "--to", "20 rps", "--points", 3
    )
    assert found.to_dict() == command
    assert found.to_frame()["value"].tolist() == [step["value"] for step in command["steps"]]
    assert "pareto.csv" in found.save(tmp_path / "made")
    with pytest.raises(errors.InputError, match="limits: expected the loosest and the tightest"):
        fleetplan.pareto(slo, over="rate", limits={"cost": "9 usd/h"})  # type: ignore[arg-type]


@pytest.mark.long
def test_replan_is_the_command(slo: Path, plan: PlanResult, tmp_path: Path) -> None:
    plan.save(tmp_path / "running")
    busier = tmp_path / "busier.yaml"
    busier.write_text(to_yaml(QUESTION | {"traffic": QUESTION["traffic"] | {"rate": 60}}))
    found = fleetplan.replan(tmp_path / "running", busier)
    assert found.to_dict() == printed("replan", "--current", tmp_path / "running", "--slo", busier)
    assert not found.keeps and found.fleet.gpus > plan.gpus
    assert any("drift: requests/s" in line for line in found.sentences())
    assert found.save(tmp_path / "fleet.yaml") == ()
    assert found.save(tmp_path / "next") == ("fleet.yaml", "replan.json")
    for file in (tmp_path / "fleet.yaml", tmp_path / "next" / "fleet.yaml"):
        assert fleetplan.read_fleet(file).gpus == found.fleet.gpus
    assert json.loads((tmp_path / "next" / "replan.json").read_text()) == found.to_dict()


def test_a_plan_is_simulated_on_the_traffic_and_for_the_slo_it_was_made_for(
    plan: PlanResult, slo: Path, tmp_path: Path
) -> None:
    """`simulate(found)` of described traffic asked for a trace, which nobody has."""
    plan.save(tmp_path / "out")
    for each in (plan, tmp_path / "out"):
        again = fleetplan.simulate(each)
        assert again.to_dict()["slo"] == fleetplan.simulate(plan, slo=slo).to_dict()["slo"]
        assert len(again.requests) == len(plan.plan.trace) and again.slo == plan.plan.slo
    faster = fleetplan.simulate(plan, rate=12)
    assert faster.requests.rate_rps == pytest.approx(12, rel=0.01)
    with pytest.raises(errors.InputError, match="trace"):
        fleetplan.simulate(plan.fleet)


def test_a_rate_beside_the_trace_is_that_of_traffic(plan: PlanResult) -> None:
    trace = repository_dir("examples") / "traces" / "azure-conversation-sample.csv"
    short = fleetplan.simulate(plan, trace, rate=2, window="busiest 1 min")
    same = fleetplan.simulate(plan, trace, traffic={"rate": 2, "window": "busiest 1 min"})
    assert short.to_dict() == same.to_dict()
    with pytest.raises(errors.InputError, match="rate: found in traffic and beside it"):
        fleetplan.simulate(plan, trace, traffic={"rate": 3}, rate=2)


def test_manifests_are_those_that_the_plan_writes(plan: PlanResult, tmp_path: Path) -> None:
    found = fleetplan.manifests(plan, "kubernetes")
    written = plan.files(pages=False)
    assert found.files["kubernetes.yaml"] == written["manifests/kubernetes.yaml"]
    plan.save(tmp_path / "out")
    assert fleetplan.manifests(tmp_path / "out", "kubernetes").files == found.files
    assert set(found.save(tmp_path / "made")) == set(found.to_frame()["file"])
    document = yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())
    assert document["routers"]
    assert fleetplan.manifests(document, "kubernetes").files == found.files
    with pytest.raises(errors.InputError, match=r"target: no deployment target .* there are all, vllm"):
        fleetplan.manifests(plan, "nowhere")


def test_manifests_of_a_changed_plan_say_nothing_of_its_routers(plan: PlanResult, tmp_path: Path) -> None:
    """A worker more than was planned: what the routers do was simulated without it."""
    plan.save(tmp_path / "out")
    file = tmp_path / "out" / "plan.yaml"
    document = yaml.safe_load(file.read_text())
    router = document["routers"][0]["router"]
    assert router in fleetplan.manifests(file, "kubernetes").files["README.md"]
    document["workers"][0]["count"] += 1
    file.write_text(to_yaml(document))
    for given in (file, document):
        found = fleetplan.manifests(given, "kubernetes")
        assert "they were changed since" in found.sentences()[0]
        assert router not in found.files["README.md"]


def test_the_catalog_is_in_frames() -> None:
    known = fleetplan.catalog()
    gpus = known.gpus
    assert gpus.loc["h100-80g", "memory_bytes"] == known.read.gpu("h100-80g").memory_bytes
    assert {"price_usd_per_h", "bandwidth_bytes_per_s", "price_source"} <= set(gpus.columns)
    assert known.llms.loc["meta-llama/Llama-3.1-70B", "layers"] == 80
    assert (known.tasks["output_tokens"] > 0).all() and len(known.slos) and len(known.engines)
    assert all(isinstance(frame, pd.DataFrame) for frame in (known.llms, known.slos))
    assert "GPUs (.gpus)" in repr(known) and "<table" in known._repr_html_()


def test_errors_have_a_module_of_their_own() -> None:
    assert fleetplan.errors.InputError is errors.InputError is fleetplan.InputError
    assert all(
        issubclass(getattr(fleetplan.errors, name), errors.PlannerError) for name in fleetplan.errors.__all__
    )


def test_a_program_hears_nothing_and_whoever_listens_hears_the_stages(slo: Path) -> None:
    stages: list[str] = []
    fleetplan.plan(slo, progress=stages.append)
    assert len(stages) > 2
    assert shown_progress(None) is report_nothing


@pytest.mark.long
def test_the_notebook_runs_and_shows_progress() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    shown = [
        [output.get("data", {}).get("text/plain", "") for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert any(" s: " in text for text in shown[1]), "a plan shows its stages while it is made"
    assert any("USD per hour" in text for text in shown[1])
    assert all(cell for cell in shown[1:])
