"""`engine:` of slo.yaml and fleet.yaml, and the rows it takes its constants from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.engine_file import engine_document, parse_engine
from planner.documents.fits import parse_latency
from planner.documents.fleet_file import fleet_document, fleet_of, parse_fleet
from planner.documents.task import parse_task
from planner.errors import CatalogError, InputError
from planner.files.document_values import Section
from planner.models.engine import DEPLOYED_VERSION, Engine, HostTime
from planner.models.latency import Kind, StepLatency

WORKERS = {"llm": "meta-llama/Llama-3.1-8B", "workers": [{"gpu": "h100-80g"}]}
ASKED = {"llm": "meta-llama/Llama-3.1-8B", "slo": {"ttft": {"p90": "2 s"}}}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return read_catalog()


def engine_of(asked: object, catalog: Catalog) -> Engine | None:
    return fleet_of({**WORKERS, "engine": asked}, Path("fleet.yaml"), catalog).engine


def test_without_the_key_it_is_what_the_manifests_deploy(catalog: Catalog) -> None:
    """Nobody asked for its version: that no row has it is said among the assumptions, not warned of."""
    deployed = engine_of({"version": DEPLOYED_VERSION}, catalog)
    assert deployed is not None and deployed.is_nearest
    expected = replace(deployed, is_nearest=False)
    assert fleet_of(dict(WORKERS), Path("fleet.yaml"), catalog).engine == expected
    assert parse_task(ASKED, catalog).engine == expected


def test_none_takes_step_times_as_they_are(catalog: Catalog) -> None:
    fleet = fleet_of({**WORKERS, "engine": "none"}, Path("fleet.yaml"), catalog)
    assert fleet.engine is None and fleet_document(fleet)["engine"] == "none"
    assert parse_task({**ASKED, "engine": "none"}, catalog).engine is None


def test_who_says_himself_what_the_host_takes_has_no_engine_added(catalog: Catalog) -> None:
    assert parse_task({**ASKED, "fleet": {"host_overhead": "2 ms"}}, catalog).engine is None


def test_a_fleet_that_batches_as_another_engine_has_none(catalog: Catalog) -> None:
    """Neither by its own word, nor where the policy is asked of a fleet that names an engine."""
    fleet = {**WORKERS, "policies": {"batching": "sarathi"}}
    assert fleet_of(fleet, Path("fleet.yaml"), catalog).engine is None
    asked = {**WORKERS, "engine": "vllm"}
    changed = parse_fleet(asked, Path("fleet.yaml"), catalog, policies={"batching": "sarathi"})
    assert changed.engine is None


@pytest.mark.parametrize("batching", ["sarathi", ["vllm-v1", "sarathi"]])
def test_a_question_of_another_batching_has_no_engine_by_default(batching: object, catalog: Catalog) -> None:
    """The search simulated it with vLLM's asynchronous steps, which lost requests or gave a fleet that
    `plan simulate` refuses; of sarathi alone the plan was refused for an engine that the question does not
    name.
    """
    asked = {**ASKED, "policies": {"batching": batching}}
    assert parse_task(asked, catalog).engine is None
    with pytest.raises(InputError, match="batching: sarathi is not simulated with engine vllm"):
        parse_task({**asked, "engine": "vllm"}, catalog)
    assert parse_task({**asked, "engine": "none"}, catalog).engine is None


def test_a_plan_without_constants_was_made_without_an_engine(catalog: Catalog) -> None:
    plan = {**WORKERS, "status": "found", "engine": {"name": "vllm", "version": "0.33.0", "images": []}}
    assert fleet_of(plan, Path("plan.yaml"), catalog).engine is None


@pytest.mark.parametrize(
    ("version", "is_async", "is_nearest"),
    [
        ("0.11.1", False, False),
        ("v0.13.2", False, False),
        ("0.14", True, False),
        ("0.15.1", True, False),
        (0.15, True, False),
        ("0.7.3", False, True),
        ("0.33", True, True),
        ("1.2.0", True, True),
    ],
)
def test_constants_are_those_of_the_version_or_of_the_nearest(
    catalog: Catalog, version: object, is_async: bool, is_nearest: bool
) -> None:
    engine = engine_of({"name": "vllm", "version": version}, catalog)
    assert engine is not None
    row = catalog.engines["vllm-asynchronous" if is_async else "vllm-synchronous"]
    assert (engine.async_scheduling, engine.is_nearest) == (is_async, is_nearest)
    assert (engine.host, engine.rest, engine.front_end_s) == (row.host, row.rest, row.front_end_s)
    assert engine.basis.endswith(row.source)


def test_a_name_alone_is_what_the_manifests_deploy(catalog: Catalog) -> None:
    engine = engine_of("vllm", catalog)
    assert engine is not None and engine.version == DEPLOYED_VERSION and engine.async_scheduling


def test_scheduling_and_constants_may_be_ones_own(catalog: Catalog) -> None:
    engine = engine_of(
        {"version": "0.15.1", "async_scheduling": False, "host": {"step": "2 ms"}, "front_end": "0 ms"},
        catalog,
    )
    row = catalog.engines["vllm-asynchronous"]
    assert engine == Engine(
        "vllm",
        "0.15.1",
        False,
        HostTime(0.002, row.host.sequence_s, row.host.log2_tp_s),
        row.rest,
        0.0,
        "constants of your own",
        first_token="decode",
    )


@pytest.mark.parametrize("key", ["engine"])
def test_a_fleet_with_an_engine_is_read_back_to_the_last_bit(catalog: Catalog, key: str) -> None:
    asked = {"version": "0.33", "host": {"sequence": "0.0123 ms"}, "rest": {"step": "0.1 ms"}}
    fleet = fleet_of({**WORKERS, key: asked}, Path("fleet.yaml"), catalog)
    assert fleet_of(fleet_document(fleet), Path("fleet.yaml"), catalog) == fleet


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"name": "sgl"}, "engine: name: .*vllm, sglang, trtllm.*found 'sgl'"),
        ({"name": "sglang", "checked": "no"}, "engine: checked: expected true or false"),
        ({"name": "vlm"}, "engine: name: .*vllm.*found 'vlm'"),
        ({"version": 0.1}, "engine: version: 0.1 may mean 0.1 or 0.10"),
        ({"version": "latest"}, "engine: version: expected a version such as 0.15.1, found 'latest'"),
        ({"version": "0.9", "async_scheduling": True}, "async_scheduling: vllm 0.9 has none"),
        ({"host": {"step": "-1 ms"}}, "engine: host: step: must be >= 0, found '-1 ms'"),
        ({"host": {"step": "3 s"}}, "engine: host: step: must be at most 1 s, found '3 s'"),
        ({"rest": {"sequence": "1 s"}}, "engine: rest: sequence: must be at most 0.01 s"),
        ({"front_end": "1 min"}, "engine: front_end: must be at most 10 s"),
        ({"prompt_token": "5 ms"}, "engine: prompt_token: must be at most 0.001 s"),
        ({"host": {"step": 2}}, "engine: host: step: 2 has no unit"),
        ({"async": True}, "engine: .*async"),
        (3, "engine: expected keys and values, found 3"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(catalog: Catalog, asked: Any, said: str) -> None:
    for read in (lambda: engine_of(asked, catalog), lambda: parse_task({**ASKED, "engine": asked}, catalog)):
        with pytest.raises(InputError, match=said) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_the_host_is_not_asked_for_twice(catalog: Catalog) -> None:
    asked = {**ASKED, "engine": "vllm", "fleet": {"host_overhead": "2 ms"}}
    with pytest.raises(InputError, match="host_overhead: engine says what the host takes"):
        parse_task(asked, catalog)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("to: '0.7'", "mine: to: is 0.7, must not be before 0.8"),
        ("host: {step: -1 ms, sequence: 0 s, log2_tp: 0 s}", "mine: host: step: must be >= 0"),
        ("front_end: 20 s", "mine: front_end: must be at most 10 s"),
        ("engine: sgl", "mine: engine: .*vllm, sglang, trtllm"),
        ("checked: perhaps", "mine: checked: expected true or false"),
        ("stop: 1", "mine: .*stop"),
    ],
)
def test_a_row_of_ones_own_is_checked(tmp_path: Path, row: str, said: str) -> None:
    lines = {
        "engine": "vllm",
        "from": "'0.8'",
        "to": "'0.13'",
        "async_scheduling": "false",
        "host": "{step: 1 ms, sequence: 1 us, log2_tp: 0 s}",
        "rest": "{step: 0 s, sequence: 0 s, log2_tp: 0 s}",
        "front_end": "1 ms",
        "error": "none",
        "source": "me",
        "date": "2026-11-20",
    }
    key, _, value = row.partition(": ")
    lines[key] = value
    document = "mine:\n" + "".join(f"  {name}: {text}\n" for name, text in lines.items())
    (tmp_path / "engines.yaml").write_text(document)
    with pytest.raises(CatalogError, match=said):
        read_catalog(tmp_path)


@pytest.mark.parametrize(
    ("kind", "h_s", "has_host"),
    [("kernels", 0.0, False), ("steps", 0.0, True), ("derived", 0.0, True), ("kernels", 1e-3, True)],
)
def test_steps_that_were_measured_hold_their_host(kind: Kind, h_s: float, has_host: bool) -> None:
    latency = StepLatency((1, 2), (1.0, 1.0), 0.0, 0.0, 0.0, 0.0, h_s, "somewhere", kind=kind)
    assert latency.has_host is has_host


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ({"basis": "by hand", "kind": "kernels"}, "kernels"),
        ({"basis": "by hand"}, "given"),
        ({"basis": "silicon: AIConfigurator"}, "kernels"),
        ({"basis": "fitted: steps.csv; host overhead included"}, "steps"),
        ({"basis": "fitted: steps.csv; host overhead not included"}, "kernels"),
        ({"basis": "derived: from another"}, "derived"),
    ],
)
def test_a_fit_says_what_it_rests_on(written: dict[str, str], kind: str) -> None:
    """One written before fits said so is known by the first word of its basis."""
    numbers = {"knots_tokens": [1, 2], "f_s": [1.0, 1.0]} | dict.fromkeys(
        ("a_s", "b_s", "d_s", "e_s", "h_s"), 0.0
    )
    assert parse_latency(Section.from_document(numbers | written, "fit.yaml")).kind == kind


def test_a_target_that_does_not_start_the_engine_is_refused_before_planning(catalog: Catalog) -> None:
    sglang = {**ASKED, "engine": {"name": "sglang"}}
    with pytest.raises(InputError, match=r"deploy: target: skypilot starts vLLM.*take kubernetes"):
        parse_task({**sglang, "deploy": {"target": "skypilot"}}, catalog)
    assert parse_task({**sglang, "deploy": {"target": "kubernetes"}}, catalog).deploy == "kubernetes"


@pytest.mark.parametrize(("name", "title"), [("sglang", "SGLang 0.5"), ("trtllm", "TensorRT-LLM 1.3")])
def test_other_engines_have_the_host_times_of_vllm(catalog: Catalog, name: str, title: str) -> None:
    """They are told by name, not taken for vLLM: the row's newest version, and a fleet keeps all of it."""
    engine, stand_in = engine_of(name, catalog), catalog.engines["vllm-asynchronous"]
    assert engine is not None and not engine.is_nearest
    assert engine.is_checked == (name == "sglang")
    assert (engine.host, engine.rest, engine.front_end_s) == (
        stand_in.host,
        stand_in.rest,
        stand_in.front_end_s,
    )
    assert engine.title == f"{title}, asynchronous scheduling"
    fleet = fleet_of({**WORKERS, "engine": {"name": name}}, Path("fleet.yaml"), catalog)
    assert fleet.engine == engine
    assert fleet_of(fleet_document(fleet), Path("fleet.yaml"), catalog) == fleet
    checked = engine_of("vllm", catalog)
    assert checked is not None and checked.is_checked


def test_sglang_may_look_for_requests_every_few_steps(catalog: Catalog) -> None:
    rows = catalog.engines.values()
    engine = parse_engine({"name": "sglang", "poll_steps": 30}, rows, "engine")
    assert engine is not None and engine.poll_steps == 30
    assert parse_engine(engine_document(engine), rows, "engine") == engine
    usual = parse_engine("sglang", rows, "engine")
    assert usual is not None and usual.poll_steps == 1 and "poll_steps" not in engine_document(usual)
    alone = "engine: poll_steps: must be 1, found 30; more is simulated for sglang alone"
    for section, said in (
        ({"name": "vllm", "poll_steps": 30}, alone),
        ({"name": "sglang", "poll_steps": 30, "async_scheduling": False}, alone),
        ({"name": "sglang", "poll_steps": 0}, "engine: poll_steps: "),
        ({"name": "sglang", "poll_steps": "10 ms"}, "engine: poll_steps: "),
    ):
        with pytest.raises(InputError, match=said):
            parse_engine(section, rows, "engine")


@pytest.mark.parametrize(
    ("llm", "gpu", "layers"),
    [
        ("deepseek-ai/DeepSeek-V3", "h200-141g", 61),
        ("deepseek-ai/DeepSeek-V3", "b200-180g", 0.65 * 61),
        ("Qwen/Qwen3.5-397B-A17B", "b300-288g", 0.65 * 45),
        ("Qwen/Qwen3-32B", "h200-141g", 0),
    ],
)
def test_launches_are_those_of_latent_attention_and_states(
    llm: str, gpu: str, layers: float, catalog: Catalog
) -> None:
    """45 of Qwen3.5's 60 layers have states; on Blackwell a launch takes 0.65 of what it takes on Hopper."""
    document = {"llm": llm, "engine": "sglang", "workers": [{"gpu": gpu, "tp": 8}]}
    worker = fleet_of(document, Path("fleet.yaml"), catalog).pools[0].type
    assert worker.launched_layers == pytest.approx(layers)


def test_a_plan_for_sglang_from_before_its_scheduler_was_simulated_keeps_mixed_steps(
    catalog: Catalog,
) -> None:
    """Such a plan names its basis and deploys with --enable-mixed-chunk."""
    engine = engine_of("sglang", catalog)
    assert engine is not None and not engine.mixed_steps and engine.latent_launch_s == 3e-3
    before = engine_document(engine)
    for key in ("mixed_steps", "latent_launch"):
        before.pop(key)
    old = parse_engine(before, catalog.engines.values(), "engine")
    assert old == replace(engine, mixed_steps=True, latent_launch_s=0.0)
