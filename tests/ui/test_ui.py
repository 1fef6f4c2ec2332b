"""The app's pages, driven by Streamlit's AppTest; tests/browser/ takes the same path in a browser."""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from browsing import served
from live_metrics import exported
from typer.testing import CliRunner

import fleetplan

pytest.importorskip("streamlit", reason="needs the extra 'ui'")

from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from planner.cli import app as cli
from planner.commands import ui_command
from planner.day.day_settings import parse_day
from planner.documents import planned_market
from planner.documents.catalog import read_catalog
from planner.documents.facts import OverTheWhole
from planner.documents.markets import parse_market
from planner.documents.plan_folder import read_written
from planner.documents.several_llms_question import parse_entries
from planner.documents.task import parse_task, read_task
from planner.errors import InputError, PlannerError
from planner.files.checked_files import package_text, repository_dir
from planner.reports import drawing
from planner.search.evidence import long_traces
from planner.search.oracle.work_clock import USUAL_LIMIT_S
from planner.search.production import kept_policies
from planner.simulator.replay import simulate
from planner.studies.watch_words import WHAT
from planner.traffic.trace_reading import read_trace
from ui import days, draw, jobs, market, question, session, together, worker
from ui.jobs import Job, Jobs, result_key
from ui.store import SAMPLES, Store, column_names, error_line, zip_files

APP = Path(worker.__file__).parent / "app.py"
EXAMPLES = repository_dir("examples")
CATALOG = read_catalog()
PATIENCE_S = 240.0  # a busy machine is slow, not wrong
BROKEN = b"timestamp,input_tokens,output_tokens\n0,10,5\n1,ten,5\n"
ANNA, BERT = "a" * 32, "b" * 32


def started_here(
    self: Jobs,
    owner: str,
    place: str,
    kind: str,
    request: dict[str, Any],
    then: Callable[[Job], None] = lambda _: None,
) -> Job:
    """Jobs.start without a process of its own: the same work, at once."""
    job = Job(kind, result_key(kind, request))
    self._jobs[owner, place] = job
    try:
        if self.store.document(job.key) is None:
            document, files = worker.run(kind, request)
            self.store.keep_result(
                job.key, json.loads(json.dumps(document, default=worker._plain_values)), zip_files(files)
            )
        then(job)
        job.end("done")
    except PlannerError as error:
        job.end("failed", error_line(error))
    return job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(jobs, "WITH_SPARE", False)
    # Streamlit looks through every installed package for components: at each start, which AppTest makes often
    monkeypatch.setattr(manifest_scanner, "scan_component_manifests", list)
    monkeypatch.setenv(session.FOLDER_VARIABLE, str(folder))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jobs, "start", started_here)


H100_ALONE = {"    a100-80g: 64\n": "", "    h100-80g@350W: 32\n": ""}
ONE_BY_ONE = {"  network:\n": "  sold_as: {a100-80g: gpu, h100-80g: gpu}\n  network:\n"}


def opened(page: str = "plan", owner: str = ANNA) -> AppTest:
    """A browser of this session, freshly loaded, on a page."""
    at = AppTest.from_file(str(APP), default_timeout=PATIENCE_S)
    at.query_params["session"] = owner
    at.run()
    if page != "plan":
        at.switch_page(f"views/{page}.py").run()
    assert not at.exception, at.exception[0].value
    return at


def on_paper(
    owner: str, ttft: str = "2000 ms", changes: Mapping[str, str] | None = None, rate_rps: float | None = None
) -> None:
    """A plan of the sample without safety, with `changes` of slo.yaml's text."""
    at = opened(owner=owner)
    if rate_rps is not None:
        at.number_input(key="ask_rate").set_value(rate_rps).run()
    text = typed(at, "slo.yaml")
    assert "p90: 2000 ms" in text.value
    changed = text.value.replace("p90: 2000 ms", f"p90: {ttft}")
    for old, new in (changes or {}).items():
        assert old in changed
        changed = changed.replace(old, new)
    text.set_value(changed + "safety: none\n")
    at.button(key="apply_yaml").click().run()
    at.button(key="make_plan").click().run()
    assert not at.exception and not at.error


RATE_RPS = 4.0  # the sample has 20, which takes twice as long


def planned(owner: str = ANNA) -> AppTest:
    """The sample's plan for production, at a lower rate."""
    at = opened(owner=owner)
    at.number_input(key="ask_rate").set_value(RATE_RPS)
    at.button(key="make_plan").click().run()
    assert not at.exception and not at.error
    return at


def shown(elements: Any) -> list[str]:
    """What is read on the screen: Markdown's backslashes are not, and a space is a space."""
    return [str(element.value).replace("\\", "").replace("\u00a0", " ") for element in elements]


def text_of(at: AppTest) -> str:
    return "\n".join(shown((*at.markdown, *at.subheader, *at.caption, *at.info, *at.warning)))


def first_screen(at: AppTest) -> str:
    """The report's, as it stands in the page."""
    (found,) = (str(part.value) for part in at.html if "class=verdict" in part.value)
    return found


class Tables(HTMLParser):
    """The cells of every table of a page."""

    def __init__(self, at: AppTest) -> None:
        super().__init__()
        self.cells: list[list[list[str]]] = []
        for part in at.html:
            self.feed(part.value)

    def handle_starttag(self, tag: str, _: Any) -> None:
        if tag == "table":
            self.cells.append([])
        elif tag == "tr":
            self.cells[-1].append([])
        elif tag in ("th", "td"):
            self.cells[-1][-1].append("")

    def handle_data(self, data: str) -> None:
        if self.cells and self.cells[-1] and self.cells[-1][-1]:
            self.cells[-1][-1][-1] += data.strip()


def tables(at: AppTest) -> list[list[list[str]]]:
    """The cells of every table, row by row, below its head."""
    return [rows for _, *rows in Tables(at).cells]


def typed(at: AppTest, label: str) -> Any:
    """The text of this name; its key follows what it says."""
    return next(area for area in at.text_area if area.label == label)


def test_the_inputs_one_starts_with_ask_what_examples_slo_yaml_asks() -> None:
    asked = question.document(question.sample_form(CATALOG), CATALOG)
    assert parse_task(asked, CATALOG) == read_task(EXAMPLES / "slo.yaml", CATALOG)


@pytest.mark.parametrize("name", CATALOG.slos)
def test_a_preset_chosen_in_the_page_is_the_catalogs(name: str) -> None:
    preset = CATALOG.slos[name]
    asked = question.sample_form(CATALOG) | {"preset": name} | (question.form_of_preset(preset) or {})
    task = parse_task(question.document(asked, CATALOG), CATALOG)
    assert (set(task.slo.limits), task.slo.attainment_frac) == (
        set(preset.slo.limits),
        preset.slo.attainment_frac,
    )
    assert task.slowdowns == preset.slowdowns


def test_an_edited_price_holds_and_its_capped_rows_keep_what_the_table_shows() -> None:
    """h100-80g at 2 USD/h; its 350 W row still shows the catalog's price, so that is what it costs."""
    asked = question.sample_form(CATALOG)
    asked["gpus"] = [row | ({"USD/h": 2.0} if row["GPU"] == "h100-80g" else {}) for row in asked["gpus"]]
    gpus = {
        gpu.name: gpu for gpu in parse_task(question.document(asked, CATALOG), CATALOG).priced_gpus(CATALOG)
    }
    shown = {row["GPU"]: row["USD/h"] for row in asked["gpus"] if row["use"]}
    assert {name: gpu.price_usd_per_h for name, gpu in gpus.items()} == shown


def test_empty_inputs_are_no_limits() -> None:
    asked = question.sample_form(CATALOG) | {"rate": None, "power_kw": None, "cost": None, "attainment": 95.0}
    asked["gpus"] = [row | {"stock": None} for row in asked["gpus"]]
    task = parse_task(question.document(asked, CATALOG), CATALOG)
    assert (task.rate_rps, task.power_limit_w, task.cost_limit_usd_per_h) == (None, None, None)
    assert task.slo.attainment_frac == 0.95 and set(task.stock.values()) == {None}


WHOLE = """
llm: meta-llama/Llama-3.1-70B
slo: {ttft: {p90: 2 s, p99: 10 s}, tbt_p99: 200 ms, attainment: 0.9, every: 10 min}
traffic: {rate: 20, scale: compress, window: busiest 10 min}
fleet:
  gpus: {a100-80g: 64, h100-80g: null, h100-80g@350W: 8}
  prices:
    h100-80g: {on_demand: 2.99 usd/h, reserved: 2.20 usd/h, spot: 1.50 usd/h,
               spot_interruptions_per_h: 5 %, spot_restart: 5 min}
    a100: 1 usd/h
  pp: [1, 2]
  network: {bandwidth: 25 GB/s, latency: 1 ms, transfer: serialised}
  host_overhead: 2 ms
policies: {queue: [sjf, fcfs], longest_wait: 60 s}
objective: power
limits: {power: 80 kW, cost: 500 usd/h, gpus: 12}
spare: 2 nodes
robust: {step_times: 10 %, traffic: 0.05}
"""


@pytest.mark.parametrize(
    "text",
    [
        WHOLE,
        "{llm: llama-3.1-8b, preset: vidur, spare: 1 worker}",
        "{llm: llama-3.1-8b, preset: vidur, engine: {name: vllm, version: 0.15.1, async_scheduling: true}}",
        "{llm: llama-3.1-8b, preset: splitwise, objective: throughput, limits: {cost: 100}}",
        "{llm: llama-3.1-8b, slo: {e2e: {p97.5: 1 min}}, fleet: {prices: {h100-80g: {reserved: 2}}}}",
        "{llm: llama-3.1-8b, slo: {ttft: {p90: 1 s}}, fleet: {gpus: [h100-80g], prices: {a100-80g: 9}}}",
        "{llm: llama-3.1-8b, preset: vidur, fleet: {gpus: {h100-80g@350W: 8}, prices: {h100-80g: 2}}}",
        "{llm: llama-3.1-8b, slo: {ttft: {p90: 1 s}}, policies: {routing: round-robin, prefix_cache: true}}",
        "{llm: llama-3.1-8b, slo: {e2e: {p99: 1 min}, classes: {a: {match: {tenant: a}, ttft: {p90: 1 s}}}}}",
        "{llm: llama-3.1-8b, slo: {classes: {a: {match: {tenant: a}, ttft: {p90: 1 s}}}}, policies: {queue: "
        "fcfs}, traffic: {tenants: {a: {rate: 1, input: 6, output: 8}, b: {rate: 2, input: 9, output: 8}}}}",
        "{llm: llama-3.1-8b, slo: {ttft: {p90: 1 s}, tenants: {each: {share_frac: 0.9}}}}",
        "{llm: llama-3.1-8b, slo: {ttft: {p90: 1 s}}, policies: {queue: any, longest_wait: 60 s, "
        "research: true}}",
        "{llm: llama-3.1-8b, slo: {ttft: {p90: 1 s}}, fleet: {unchecked: true}}",
        "{llm: llama-3.1-8b, slo: {ttft: {p90: 1 s}}, fleet: {price_of: {provider: verda}}}",
        "{llm: llama-3.1-8b, slo: {ttft: {p90: 1 s}}, fleet: {gpus: [h100-80g, h100-80g@350W], prices: "
        "{h100-80g: 2, h100-80g@350W: {spot: 1 usd/h, spot_interruptions_per_h: 0.05}}}}",
    ],
)
def test_a_question_passes_through_the_inputs_without_loss(text: str) -> None:
    """And through JSON, as sessions keep it. A capped GPU may get as its own price what it costs anyway."""
    given = yaml.safe_load(text)
    asked = json.loads(json.dumps(question.form_of_document(given, question.sample_form(CATALOG), CATALOG)))
    found, wanted = (parse_task(each, CATALOG) for each in (question.document(asked, CATALOG), given))
    assert found.priced_gpus(CATALOG) == wanted.priced_gpus(CATALOG)
    # a price of a GPU that is not used is dropped, and its doubt with it
    found, wanted = (replace(each, prices_usd_per_h={}, warnings=()) for each in (found, wanted))
    assert found == wanted


@pytest.mark.parametrize("provider", ["aws", "verda", "lambda", "nebius"])
def test_a_question_that_names_no_gpu_names_none_after_the_inputs(provider: str) -> None:
    """The stock by default of a provider is the command's: the inputs named GPUs that the file did not."""
    for llm in ("llama-3.1-70b", "qwen3-32b"):
        given = {"llm": llm, "slo": {"ttft": {"p90": "1 s"}}, "fleet": {"price_of": {"provider": provider}}}
        asked = question.form_of_document(given, question.sample_form(CATALOG), CATALOG)
        assert "gpus" not in question.document(asked, CATALOG)["fleet"]


def test_only_what_has_no_input_is_asked_beside_the_inputs() -> None:
    asked = question.form_of_document(yaml.safe_load(WHOLE), question.sample_form(CATALOG), CATALOG)
    assert set(question.leaf_texts(asked["more"])) == {
        "slo.ttft.p99: 10000 ms",
        "slo.every: 600 s",
        "fleet.network.latency: 1 ms",
        "fleet.network.transfer: serialised",
        "fleet.prices.h100-80g.spot_restart: 5 min",
    }


def test_an_input_that_contradicts_what_was_typed_is_refused() -> None:
    asked = question.form_of_document(yaml.safe_load(WHOLE), question.sample_form(CATALOG), CATALOG)
    with pytest.raises(InputError, match="ttft: p99: an input says '3000 ms'"):
        question.document(asked | {"ttft_percentile": "p99", "ttft_ms": 3000.0}, CATALOG)


def test_the_most_traffic_is_looked_for_without_a_rate() -> None:
    asked = question.sample_form(CATALOG) | {"objective": "throughput"}
    assert parse_task(question.document(asked, CATALOG), CATALOG).rate_rps is None


def test_inputs_kept_beside_another_catalog_or_by_an_earlier_version_are_mended() -> None:
    sample = question.sample_form(CATALOG)
    row = {"use": True, "GPU": "h100-80g", "USD/h": 1.0, "stock": 2}
    empty = {"GPU": "l40s-48g", "stock": float("nan"), "owned": float("nan")}
    old = {"preset": "gone", "gpus": [row, row | {"GPU": "gone"}, empty], "rate": 3.0, "gone": 1}
    found = question.restore_form(old, CATALOG)
    assert found.keys() == sample.keys() and (found["preset"], found["rate"]) == (question.OWN_LIMITS, 3.0)
    assert [row["GPU"] for row in found["gpus"]] == list(CATALOG.gpus)
    assert [one["GPU"] for one in found["gpus"] if one["use"]] == ["h100-80g"]
    assert session.widget_values(found, "ask")["ask_gpu_stock_l40s-48g"] is None
    parse_task(question.document(found, CATALOG), CATALOG)


def test_what_is_kept_is_there_again_and_belongs_to_its_session(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    store.keep_form(ANNA, {"rate": 3.5})
    store.keep_result("key", {"n": 1}, zip_files({"plan.yaml": "a: 1\n"}))
    plan = store.add_plan(ANNA, "mine", {"rate": 3.5}, "key")
    again = Store(tmp_path / "new" / "folder")
    assert again.stored_form(ANNA) == {"rate": 3.5} and again.stored_form(BERT) is None
    current = again.current_plan(ANNA)
    assert current is not None and current.id == plan
    assert again.current_plan(BERT) is None and again.plans(BERT) == [] and len(again.plans()) == 1
    assert again.files("key") == {"plan.yaml": b"a: 1\n"}


def test_a_result_is_forgotten_with_the_last_plan_that_has_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.keep_result("key", {}, zip_files({}))
    first, second = (store.add_plan(owner, "x", {}, "key") for owner in (ANNA, BERT))
    store.delete_plan(first)
    assert store.document("key") == {} and store.current_plan(ANNA) is None
    store.delete_plan(second)
    assert store.document("key") is None


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/abs.csv",
        "..",
        "",
        "a\0b.csv",
        "x" * 300 + ".csv",
        "数" * 100 + ".csv",
        ".hidden",
    ],
)
def test_an_upload_stays_in_the_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    path = store.trace_path(store.add_trace(ANNA, name, b"content"))
    assert path.resolve().is_relative_to((tmp_path / "traces").resolve()) and path.read_bytes() == b"content"


@pytest.mark.parametrize(
    "reference", ["../fleetplan.sqlite", f"{'0' * 64}/../../x", "samples/../slo.yaml", "", "x"]
)
def test_a_reference_to_anything_else_is_refused(tmp_path: Path, reference: str) -> None:
    with pytest.raises(InputError):
        Store(tmp_path).trace_path(reference)


def test_the_columns_of_a_file_that_is_no_parquet_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(InputError, match="is no Parquet file that can be read"):
        column_names(path)


def test_a_result_is_known_by_its_question_and_the_content_of_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("one")
    keys = {result_key("trace", {"trace": str(path), "seed": seed}) for seed in (0, 1, 0)}
    path.write_text("another")
    assert len(keys) == 2 and result_key("trace", {"trace": str(path), "seed": 0}) not in keys


def test_a_result_depends_on_the_config_of_every_llm(tmp_path: Path) -> None:
    """The config.json of one of several LLMs could change, and the old result was shown."""
    path = tmp_path / "config.json"
    for document in ({"llm": str(path)}, {"llms": {"chat": {"llm": str(path)}}}):
        keys = set()
        for content in ("{}", '{"num_hidden_layers": 32}'):
            path.write_text(content)
            keys.add(result_key("together", {"question": document}))
        assert len(keys) == 2


def waited(job: Job) -> Job:
    assert job.over.wait(PATIENCE_S)
    return job


def request_of(path: Path) -> dict[str, Any]:
    return {"trace": str(path), "seed": 0, "catalog": None}


@pytest.mark.slow
def test_a_job_in_a_process_of_its_own_answers_as_the_planner_does(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n0,10,5\n1,20,5\n2,30,9\n")
    running = Jobs(store := Store(tmp_path / "plans"))
    job = waited(running.start(ANNA, "trace", "trace", request_of(path)))
    document, _ = worker.run("trace", request_of(path))
    assert (job.state, store.document(job.key)) == (
        "done",
        json.loads(json.dumps(document, default=worker._plain_values)),
    )
    path.write_bytes(BROKEN)
    failed = waited(running.start(ANNA, "trace", "trace", request_of(path)))
    assert (
        failed.state == "failed"
        and failed.error.startswith("short.csv, line 3, column input_tokens: ")
        and not failed.is_our_bug
    )
    assert not list((tmp_path / "plans").glob(".job-*"))


def is_alive(process: subprocess.Popen[str] | None) -> bool:
    return process is not None and process.poll() is None


@pytest.mark.long
def test_cancel_ends_the_process_of_that_session_and_place_alone(tmp_path: Path) -> None:
    running = Jobs(Store(tmp_path))
    path = EXAMPLES / "traces" / "azure-code-sample.csv"
    mine = running.start(ANNA, "trace", "trace", request_of(path))
    other = running.start(BERT, "trace", "trace", request_of(path) | {"seed": 1})
    process, another = mine.process, other.process
    running.cancel(ANNA, "trace")
    assert mine.state == "cancelled" and not is_alive(process) and is_alive(another)
    assert waited(other).state == "done" and not is_alive(another)


@pytest.mark.long
def test_a_process_that_answered_does_the_next_job_and_ends_with_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "WITH_SPARE", True)
    running = Jobs(Store(tmp_path))
    spare = running._spare
    path = tmp_path / "short.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n0,10,5\n1,20,5\n2,30,9\n")
    for seed in range(2):
        job = running.start(ANNA, "trace", "trace", request_of(path) | {"seed": seed})
        assert job.process is spare and waited(job).state == "done"
    running.close()
    assert not is_alive(spare)


def sample_request(**changed: Any) -> dict[str, Any]:
    asked = question.sample_form(CATALOG) | changed
    path = EXAMPLES / "traces" / "azure-conversation-sample.csv"
    return request_of(path) | {"question": question.document(asked, CATALOG), "time_limit_s": USUAL_LIMIT_S}


@pytest.mark.slow
def test_a_plan_is_the_same_whatever_its_process_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 5 requests/s. Less money changes no simulation of a fleet, so none is run; a shorter TTFT does."""

    def answer(kind: str = "plan", **changed: Any) -> tuple[str, int]:
        found = worker.run(kind, sample_request(rate=5.0, **changed))
        known = next(iter(worker._REMEMBERED.values())).cache.known
        return json.dumps(found, default=str), sum(map(len, known.values()))

    monkeypatch.setattr(worker, "_REMEMBERED", {})
    fresh, simulated = answer()
    assert simulated > 0 and answer() == (fresh, simulated)
    assert answer("what_if", cost=400.0)[1] == simulated
    assert answer("what_if", ttft_ms=1000.0)[1] > simulated and answer()[0] == fresh


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{"rate": 8.0}, pytest.param({"ttft_ms": 300.0}, marks=pytest.mark.slow), {"objective": "gpus"}],
)
def test_a_what_if_finds_the_fleet_of_a_plan(changed: dict[str, Any]) -> None:
    request = sample_request(**({"rate": 5.0} | changed))
    quick, whole = (worker.run(kind, request)[0] for kind in ("what_if", "plan"))
    for key in ("fleet_text", "cost_usd_per_h", "gpus", "power_w", "rate_rps", "limits"):
        assert quick[key] == whole[key], key
    assert str(whole["answer"]).startswith(str(quick["answer"]).partition(":")[0])


def test_a_fleet_is_shown_without_the_rate_that_it_carries() -> None:
    """The answer of the most traffic begins with its rate, by which equal fleets looked different."""
    answer = "24 requests/s on 2 workers of 4 × h100-80g: 33.52 USD per hour"
    fleet = "2 workers of 4 × h100-80g"
    assert draw.fleet_text({"fleet_text": fleet, "answer": answer}) == fleet
    assert draw.fleet_text({"answer": f"{fleet}: 33.52 USD per hour"}) == fleet


def test_a_worker_that_dies_is_told_and_not_waited_for(tmp_path: Path) -> None:
    running = Jobs(Store(tmp_path))
    job = running.start(ANNA, "trace", "trace", request_of(EXAMPLES / "slo.yaml"))
    process = job.process
    assert process is not None
    process.kill()
    assert waited(job).state == "failed" and "exit code -9" in job.error


@pytest.mark.long
def test_a_worker_ends_when_the_app_is_gone() -> None:
    """Its stdin closes, whether it waits for a job or works on one."""
    process = jobs._start_worker()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0
    jobs._close(process)


@pytest.mark.long
def test_charts_are_drawn_with_their_data() -> None:
    """Streamlit adds data from the top of a chart once it is drawn; Vega then warns of axes without end."""
    charts = opened().get("vega_lite_chart")
    assert charts and not any(chart.proto.HasField("data") or chart.proto.datasets for chart in charts)
    assert all('"values"' in chart.proto.spec for chart in charts)


@pytest.mark.usefixtures("at_once")
def test_a_plan_of_the_sample_is_shown_with_every_tab_and_file() -> None:
    at = planned()
    assert "Buy " in first_screen(at) and "USD per month" in first_screen(at)
    assert [tab.label for tab in at.tabs] == [
        "Fleet",
        "SLO",
        "How it runs",
        "What binds",
        "Alternatives",
        "Proof",
        "Downloads",
    ]
    assert {button.label for button in at.download_button} == {
        f"Download {name}"
        for name in (
            "plan.yaml",
            "report.html",
            "slo.yaml",
            "certificate.json",
            "requests.csv",
            "plan.sh",
            "manifests.zip",
            "everything.zip",
        )
    }


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_the_command_shown_gives_the_same_files(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = planned()
    store = Store(folder)
    current = store.current_plan(ANNA)
    assert current is not None
    files = store.files(current.result)
    monkeypatch.chdir(tmp_path)
    Path("slo.yaml").write_bytes(files["slo.yaml"])
    trace = store.trace_path(current.form["trace"])
    Path(trace.name).write_bytes(trace.read_bytes())
    program, *words = at.code[-1].value.split()
    found = CliRunner().invoke(cli, words)
    assert (program, found.exit_code) == ("plan", 0), found.output
    written = {
        str(path.relative_to("out")): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()
    }
    assert written | {"slo.yaml": files["slo.yaml"]} == files


@pytest.mark.long
def test_a_trace_of_whole_seconds_is_drawn_as_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stamps are spread anew in every scenario, so the scenarios in which the plan was tested tell."""
    monkeypatch.chdir(tmp_path)
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = [f"{k // 2},ChatGPT,{200 + k % 700},{20 + k % 90},0,Conversation log" for k in range(300)]
    Path("whole.csv").write_text("\n".join([head, *rows]) + "\n")
    request = sample_request(rate=None) | {"trace": str(tmp_path / "whole.csv")}
    _, files = worker.run("plan", request)
    Path("slo.yaml").write_text(str(files["slo.yaml"]))
    found = CliRunner().invoke(cli, ["--slo", "slo.yaml", "--trace", "whole.csv", "-o", "out"])
    assert found.exit_code == 0, found.output
    certificate = json.loads(files["certificate.json"])
    assert certificate["certificate"]["scenarios_drawn"]["traffic"] == "blocks"
    assert json.loads(Path("out/certificate.json").read_text()) == certificate


@pytest.mark.long
@pytest.mark.usefixtures("at_once")
def test_a_reload_loses_nothing_and_another_browser_sees_nothing() -> None:
    at = planned()
    at.number_input(key="ask_ttft_ms").set_value(2500.0).run()
    again, other = opened(), opened(owner=BERT)
    assert again.number_input(key="ask_ttft_ms").value == 2500.0
    assert first_screen(again) == first_screen(at)
    assert other.number_input(key="ask_ttft_ms").value == 2000.0
    assert not other.tabs and "None yet" in text_of(other)
    at.number_input(key="ask_ttft_ms").set_value(2000.0).run()


@pytest.mark.usefixtures("at_once")
def test_inputs_survive_a_visit_to_another_page() -> None:
    at = opened(owner=BERT)
    at.number_input(key="ask_rate").set_value(7.0).run()
    at.switch_page("views/saved.py").run()
    at.switch_page("views/plan.py").run()
    assert at.number_input(key="ask_rate").value == 7.0


@pytest.mark.usefixtures("at_once")
def test_a_preset_fills_the_limits_and_an_edit_makes_them_ones_own() -> None:
    at = opened(owner="c" * 32)
    at.selectbox(key="ask_preset").select("distserve-chatbot-opt-13b").run()
    assert [at.number_input(key=f"ask_{metric}_ms").value for metric in question.INPUT_METRICS] == [
        200.0,
        None,
        100.0,
        None,
    ]
    at.number_input(key="ask_ttft_ms").set_value(300.0).run()
    assert at.selectbox(key="ask_preset").value == question.OWN_LIMITS


@pytest.mark.usefixtures("at_once")
def test_a_broken_upload_shows_the_line_of_the_command_in_place(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_bytes(BROKEN)
    with pytest.raises(PlannerError) as said:
        read_trace(path)
    at = opened(owner="d" * 32)
    at.segmented_control(key="ask_source").set_value(question.UPLOAD).run()
    at.file_uploader(key="ask_upload").upload("broken.csv", BROKEN).run()
    assert shown(at.error) == [str(said.value).replace(f"{tmp_path}/", "")]
    at.segmented_control(key="ask_source").set_value(question.SAMPLE).run()
    at.selectbox(key="ask_trace").select(f"{SAMPLES}/azure-code-sample.csv").run()
    assert not at.error and "azure-code-sample" in text_of(at)


@pytest.mark.usefixtures("at_once")
def test_a_look_at_another_source_keeps_the_sample() -> None:
    """A click on Upload and back planned azure-code, the first of the list, not azure-conversation."""
    at = opened(owner="b1" * 16)
    was = question.sample_form(CATALOG)["trace"]
    for source in (question.UPLOAD, question.SAMPLE, question.DESCRIBED, question.SAMPLE):
        at.segmented_control(key="ask_source").set_value(source).run()
        assert not at.exception and at.session_state["ask_trace"] == was
    assert at.selectbox(key="ask_trace").value == was


@pytest.mark.long
@pytest.mark.usefixtures("at_once")
def test_what_cannot_be_promised_is_told_as_the_command_tells_it() -> None:
    at = opened(owner="e" * 32)
    at.number_input(key="ask_ttft_ms").set_value(0.5)
    at.button(key="make_plan").click().run()
    assert len(at.error) == 1 and shown(at.error)[0].startswith("latency: TTFT p90 <= 0.5 ms is below")
    at.number_input(key="ask_ttft_ms").set_value(None)
    at.number_input(key="ask_tbt_ms").set_value(None)
    at.button(key="make_plan").click().run()
    assert "no limit found" in shown(at.error)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_what_if_puts_the_new_plan_beside_the_old_and_keeps_it_when_asked(folder: Path) -> None:
    """At half the rate no more is needed than before."""
    planned("f" * 32)
    at = opened("what_if", "f" * 32)
    at.select_slider(key="what_factor").set_value(0.5).run()
    assert not at.exception and not at.error
    name, before, after, _ = tables(at)[0][0]
    assert name == "USD/h" and float(after) <= float(before)
    rows = {row[0]: row[1:] for row in tables(at)[0]}
    for name in ("fleet", "tokens per step"):  # Two plans may differ in the latter alone.
        before, after, change = rows[name]
        assert change == ("the same" if before == after else "another")
    at.button(key="keep_what_if").click().run()
    kept = Store(folder).current_plan("f" * 32)
    assert kept is not None and kept.form["rate"] == RATE_RPS / 2 and "2 instead of 4" in kept.name


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_what_if_takes_any_key_of_slo_yaml_and_refuses_what_is_none() -> None:
    planned()
    at = opened("what_if")
    at.selectbox(key="what_moves").select("other").run()
    at.text_input(key="what_key").set_value("fleet.network.latncy=5 ms").run()
    assert "did you mean 'latency'" in shown(at.error)[0]
    at.text_input(key="what_key").set_value("fleet.network.latency=5 ms").run()
    assert not at.exception and not at.error
    assert "With fleet.network.latency=5 ms: " in shown(at.subheader)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_around_a_plan_dearer_gpus_keep_it_and_longer_steps_do_not() -> None:
    """Planned on paper the sample's plan fails with steps 8.2 % longer; a price cannot break a promise."""
    on_paper("6" * 32)
    at = opened("what_if", "6" * 32)
    at.button(key="sensitivity_start").click().run()
    assert not at.exception and not at.error
    rows = {changed: kept for changed, kept, *_ in tables(at)[0]}
    assert rows["steps take 10 % longer"] == "✗ fails" and rows["h100-80g 10 % dearer"] == "✓ holds"


@pytest.mark.usefixtures("at_once")
def test_slo_yaml_as_text_leads_the_inputs_and_follows_them() -> None:
    at = opened(owner="2" * 32)
    text = typed(at, "slo.yaml")
    assert parse_task(yaml.safe_load(text.value or ""), CATALOG) == read_task(EXAMPLES / "slo.yaml", CATALOG)
    text.set_value(WHOLE)
    at.button(key="apply_yaml").click().run()
    assert not at.exception and not at.error
    assert at.number_input(key="ask_ttft_ms").value == 2000.0 and at.number_input(key="ask_spare").value == 2
    assert at.multiselect(key="ask_queues").value == ["sjf", "fcfs"]
    assert "fleet.network.latency: 1 ms" in text_of(at)
    again = opened(owner="2" * 32)
    asked = yaml.safe_load(typed(again, "slo.yaml").value or "")
    assert parse_task(asked, CATALOG) == parse_task(yaml.safe_load(WHOLE), CATALOG)
    again.button(key="ask_forget_more").click().run()
    assert "Also asked" not in text_of(again)
    text = typed(again, "slo.yaml")
    text.set_value((text.value or "").replace("llm:", "lm:"))
    again.button(key="apply_yaml").click().run()
    assert "unknown key 'lm'; did you mean 'llm'?" in shown(again.error)[0]


@pytest.mark.usefixtures("at_once")
def test_an_llm_that_is_in_no_catalog_is_uploaded_as_its_config() -> None:
    config = (EXAMPLES / "tiny-llm" / "config.json").read_bytes()
    at = opened(owner="3" * 32)
    at.file_uploader(key="ask_upload_llm").upload("config.json", config).run()
    assert not at.exception and str(at.selectbox(key="ask_llm").value).endswith("/config.json")
    asked = yaml.safe_load(typed(at, "slo.yaml").value or "")
    llm = CATALOG.llm(str(EXAMPLES / "tiny-llm" / "config.json"))
    assert replace(CATALOG.llm(parse_task(asked, CATALOG).llm), name=llm.name) == llm


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_the_curve_of_a_limit_never_rises_as_it_is_loosened() -> None:
    on_paper("0" * 32, "500 ms", ONE_BY_ONE)
    at = opened("what_if", "0" * 32)
    at.selectbox(key="curve_over").select("ttft").run()
    at.button(key="curve_start").click().run()
    assert not at.exception and not at.error
    steps = sorted((float(limit), float(value.replace(",", ""))) for limit, value, _ in tables(at)[-1])
    values = [value for _, value in steps]
    assert values == sorted(values, reverse=True) and len(values) > 1


@pytest.mark.long
@pytest.mark.usefixtures("at_once")
def test_saved_plans_are_compared_renamed_and_deleted(folder: Path) -> None:
    owner = "1" * 32
    planned(owner)
    on_paper(owner, changes=H100_ALONE, rate_rps=RATE_RPS)
    at = opened("saved", owner)
    assert len(at.multiselect(key="saved_chosen").value) == 2
    at.button(key="compare_start").click().run()
    assert not at.exception and not at.error
    assert any("keep the SLO" in line.value for line in at.subheader)
    at.text_input[0].set_value("the small one").run()
    assert Store(folder).plans(owner)[0].name == "the small one"
    at.button(key="saved_delete").click().run()
    assert len(Store(folder).plans(owner)) == 1


@pytest.mark.usefixtures("at_once")
def test_a_trace_of_sessions_is_shown_with_its_turns_and_pauses() -> None:
    at = opened(owner="7" * 32)
    at.selectbox(key="ask_trace").select(f"{SAMPLES}/chat-sessions-sample.csv").run()
    assert not at.exception and not at.error
    assert "requests arrive only after an earlier one is answered" in text_of(at)


TWO = yaml.safe_load((EXAMPLES / "slo-two-llms.yaml").read_text())
SAMPLE_TRACES = [f"{SAMPLES}/azure-{name}-sample.csv" for name in ("code", "conversation")]


@pytest.mark.parametrize(
    "text",
    [
        "{llms: {a: {llm: llama-3.1-8b, preset: vidur, trace: azure-code-sample.csv, "
        "model: x, spare: 1 node}}}",
        "{llms: {a: {llm: llama-3.1-8b, slo: {ttft: {p90: 1 s, p99: 2 s}}, safety: {kept_in: 0.8}, "
        "trace: azure-code-sample.csv}, c: {llm: llama-3.1-8b, preset: vidur, "
        "trace: azure-code-sample.csv}, "
        "b: {llm: qwen3-32b, slo: {e2e: {p90: 9 s}}, traffic: {rate: 3, window: first 1 h}, "
        "robust: {traffic: 10 %}, trace: azure-conversation-sample.csv, policies: {queue: sjf}}}, "
        "limits: {power: 9 kW}, objective: power, safety: none, "
        "fleet: {gpus: {h100-80g: 4}, network: {latency: 1 ms}, pp: [1, 2]}}",
        # Described traffic was refused: "here each LLM names" a trace, beside which a description is refused.
        "{llms: {a: {llm: llama-3.1-8b, preset: vidur, traffic: {rate: 6, task: chat}}, "
        "b: {llm: qwen3-32b, slo: {e2e: {p90: 9 s}}, traffic: {rate: 2, input: 900, output: 50}}, "
        "c: {llm: llama-3.1-70b, preset: vidur, traffic: {agents: 30, task: coding-agent}}}, "
        "fleet: {gpus: {h100-80g: 16}}}",
    ],
)
def test_a_question_of_several_llms_passes_through_the_inputs_without_loss(text: str) -> None:
    given = yaml.safe_load(text)
    base = {"shared": question.sample_form(CATALOG)}
    asked = together.form_of_document(given, base, CATALOG, SAMPLE_TRACES)
    asked = together.restore_form(json.loads(json.dumps(asked)), CATALOG)
    found = together.document(asked, CATALOG)
    wanted, shown = (parse_entries(document, Path("slo.yaml"), CATALOG) for document in (given, found))
    assert [(one.name, one.task, one.trace, one.model) for one in shown] == [
        (one.name, one.task, one.trace, one.model) for one in wanted
    ]


def test_what_is_wrong_with_several_llms_is_one_line() -> None:
    asked = together.example_form(CATALOG, SAMPLE_TRACES)
    twice = {**asked, "llms": [asked["llms"][0], asked["llms"][0]]}
    with pytest.raises(InputError, match="two LLMs are named chat"):
        together.document(twice, CATALOG)
    no_trace = {"llms": {"a": {"llm": "llama-3.1-8b", "preset": "vidur"}}}
    with pytest.raises(InputError, match="llms: a: no trace of its own; here each LLM names one"):
        together.form_of_document(no_trace, asked, CATALOG, SAMPLE_TRACES)
    with pytest.raises(InputError, match=r"trace: azure-code-sample\.csv is not here"):
        together.form_of_document(TWO, {"shared": asked["shared"]}, CATALOG, SAMPLE_TRACES[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_two_llms_are_planned_in_the_app_as_by_the_command(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example at a fifth of its traffic on one H100 and eight A100: the same files, byte for byte."""
    at = opened("several", "5" * 32)
    for k, rate in enumerate((2.0, 1.0)):
        at.number_input(key=f"llm{k}_rate").set_value(rate).run()
    text = typed(at, "slo.yaml")
    asked = yaml.safe_load(text.value or "") | {"fleet": {"gpus": {"a100-80g": 8, "h100-80g": 1}}}
    asked["safety"] = "none"
    text.set_value(yaml.safe_dump(asked))
    at.button(key="apply_yaml").click().run()
    at.button(key="several_start").click().run()
    assert not at.exception and not at.error
    again = opened("several", "5" * 32)  # a reload
    assert again.number_input(key="llm1_rate").value == 1.0
    verdict = next(str(part.value) for part in again.html if "class=verdict" in str(part.value))
    assert "chat" in verdict and "code" in verdict
    instead = "planned without h100-80g, on 8 a100-80g, as whole nodes are paid: 15.12 instead of 18.11 USD/h"
    assert any(instead in line for line in shown(again.markdown))
    kept = Store(folder).page_document("5" * 32, "several result")
    assert kept is not None
    files = Store(folder).files(kept["result"])
    monkeypatch.chdir(tmp_path)
    Path("slo.yaml").write_bytes(files["slo.yaml"])
    for name in ("code", "conversation"):
        trace = f"azure-{name}-sample.csv"
        Path(trace).write_bytes((EXAMPLES / "traces" / trace).read_bytes())
    command = next(code.value for code in again.code if code.value.startswith("plan --slo"))
    found = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert found.exit_code == 0, found.output
    written = {
        str(path.relative_to("out")): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()
    }
    assert written == {name: content for name, content in files.items() if name != "slo.yaml"}


def test_described_traffic_is_shown_as_it_is_planned_for() -> None:
    """The page showed prompts of up to 199,999 tokens for an LLM that takes 131,072, and other requests."""
    traffic = {"rate": 5, "duration": "1 min", "input": 60_000, "output": 100}
    request = {"trace": None, "seed": 0, "traffic": traffic, "llm": "qwen3-32b"}
    summary, _ = worker.JOBS["trace"](request, lambda _: None)
    assert 30_000 < summary["input_tokens"]["max"] < 40_960


@pytest.mark.long
@pytest.mark.usefixtures("at_once")
def test_llms_with_described_traffic_are_planned_together() -> None:
    """The question of a user's first slo.yaml with `llms:`, whose traffic is described, was refused here."""
    at = opened("several", "d8" * 16)
    text = typed(at, "slo.yaml")
    traffic = {"rate": 2, "input": 200, "output": 20, "duration": "1 min"}
    entry = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "2 s"}}, "traffic": traffic}
    asked = {"llms": {"a": entry, "b": entry}, "fleet": {"gpus": {"l40s-48g": 4}}, "safety": "none"}
    text.set_value(yaml.safe_dump(asked))
    at.button(key="apply_yaml").click().run()
    assert not at.exception and not at.error and at.number_input(key="llm1_input_mean").value == 200
    at.button(key="several_start").click().run()
    assert not at.exception and not at.error
    assert any("for a and b" in str(part.value) for part in at.html if "class=verdict" in str(part.value))


@pytest.mark.usefixtures("at_once")
def test_a_trace_uploaded_for_one_of_several_llms_is_the_chosen_one() -> None:
    """The page ended with an exception of Streamlit's."""
    at = opened("several", "c7" * 16)
    at.file_uploader(key="llm1_upload").upload("day.csv", a_day()).run()
    assert not at.exception and str(at.selectbox(key="llm1_trace").value).endswith("/day.csv")
    assert not str(at.selectbox(key="llm0_trace").value).endswith("/day.csv")


@pytest.mark.long
@pytest.mark.usefixtures("at_once")
def test_llms_are_added_and_removed() -> None:
    at = opened("several", "6" * 32)
    at.button(key="several_add").click().run()
    assert at.text_input(key="llm2_name").value == "llm-3"
    at.button(key="llm0_remove").click().run()
    assert [at.text_input(key=f"llm{k}_name").value for k in range(2)] == ["code", "llm-3"]
    at.text_input(key="llm1_name").set_value("sums")  # Typed, and a button pressed at once.
    at.button(key="llm0_remove").click().run()
    assert at.text_input(key="llm0_name").value == "sums"
    at.button(key="several_example").click().run()
    assert [at.text_input(key=f"llm{k}_name").value for k in range(2)] == ["chat", "code"]
    assert not at.exception and not at.error


def test_the_demand_of_an_example_is_within_what_the_stock_carries() -> None:
    """Three workers at 19.99983 requests/s carry 59.9995, which was written as 60.0: it takes a fourth."""
    worker = {"llm": "llm", "gpu": "h100-80g", "gpus": 10, "rate": "19.99983335 req/s"}
    document = {"gpus": {"h100-80g": {"stock": 32}}, "capacity": [worker]}
    assert market.example_demand(document)[12] == {"window": 12, "llm": 59.99}
    document["capacity"] = [worker | {"rate": "4.2 req/s"}]
    assert market.example_demand(document)[12] == {"window": 12, "llm": 12.6}


def test_owned_gpus_at_no_price_have_a_change() -> None:
    """0 USD/h before: the page What if ended in an exception."""
    assert [draw.relative_change(0.0, after) for after in (0.0, 2.0)] == ["0.0 %", "-"]
    assert draw.relative_change(4.0, 5.0).replace("\u00a0", " ") == "+25.0 %"


def test_the_busiest_hour_of_a_slow_worker_is_more_than_nothing() -> None:
    """Three workers at 0.003 requests/s; a worker without GPUs, half written, is of any number."""
    worker = {"llm": "llm", "gpu": "h100-80g", "gpus": 0, "rate": "0.003 req/s"}
    document = {"gpus": {"h100-80g": {"stock": 32}}, "capacity": [worker]}
    assert market.usual_peaks(document) == {"llm": 0.009}
    rows = market.example_demand(document)
    assert (rows[0], rows[12]) == ({"window": 0, "llm": 0.0027}, {"window": 12, "llm": 0.009})


@pytest.mark.long
def test_a_schedule_takes_all_that_its_command_takes() -> None:
    """Shares in percent, frequencies as whole numbers, an SLO that no input shows, and a slow worker."""
    text = """
gpus:
  h100-80g: {on_demand: 7 usd/h, spot: 2 usd/h, interruptions: 5 %, stock: 64}
  a100-80g: {on_demand: 2 usd/h, spot: 1 usd/h, interruptions: 1}
capacity:
  - {llm: chat, worker: h100 tp4, gpu: h100-80g, gpus: 4, rate: 0.003 req/s}
  - {llm: code, worker: a100 tp2, gpu: a100-80g, gpus: 2, rate: 1.5 req/s}
spot: 25 %
slo: {chat: {ttft: {p95: 2 s}, every: 10 min}}
"""
    at = opened("schedule", "a9" * 16)
    typed(at, "schedule.yaml").set_value(text)
    at.button(key="apply_schedule").click().run()
    assert not at.exception and not at.error, shown(at.error)
    again = yaml.safe_load(typed(at, "schedule.yaml").value)
    assert parse_market(again) == parse_market(yaml.safe_load(text))


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_schedule_from_the_plan_costs_no_more_than_a_fleet_for_the_peak() -> None:
    on_paper("c5" * 16, changes=H100_ALONE)
    at = opened("schedule", "c5" * 16)
    at.button(key="schedule_start").click().run()
    assert not at.exception and not at.error
    assert "USD per hour on average" in shown(at.subheader)[-1]
    assert "the schedule saves" in text_of(at)


@pytest.mark.usefixtures("at_once")
def test_the_command_shown_gives_the_same_schedule(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two LLMs on two GPUs, sold three ways, within a limit of power; typed as text."""
    text = """
gpus:
  h100-80g: {on_demand: 6.98 usd/h, reserved: 4.40 usd/h, spot: 2.80 usd/h, interruptions: 0.05, stock: 64}
  a100-80g: {on_demand: 2 usd/h}
capacity:
  - {llm: chat, worker: h100 tp4, gpu: h100-80g, gpus: 4, rate: 5.2 req/s, power: 2800 W, start: 10 min}
  - {llm: code, worker: a100 tp2, gpu: a100-80g, gpus: 2, rate: 1.5 req/s}
spot: 0.25
limits: {power: 80 kW}
"""
    at = opened("schedule", "4" * 32)
    typed(at, "schedule.yaml").set_value(text)
    at.button(key="apply_schedule").click().run()
    again = opened("schedule", "4" * 32)  # a reload
    again.button(key="schedule_start").click().run()
    assert not again.exception and not again.error
    assert {"chat", "code"} == {row[0] for row in tables(again)[1]}
    command = next(code.value for code in again.code if code.value.startswith("plan schedule"))
    with sqlite3.connect(folder / "fleetplan.sqlite") as db:
        (key,) = db.execute("select key from results where document like '%code%a100 tp2%'").fetchone()
    files = Store(folder).files(key)
    assert parse_market(yaml.safe_load(files["schedule.yaml"])) == parse_market(yaml.safe_load(text))
    monkeypatch.chdir(tmp_path)
    for name in ("schedule.yaml", "demand.csv"):
        Path(name).write_bytes(files[name])
    found = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert found.exit_code == 0, found.output
    written = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    assert written == {name: files[name] for name in ("schedule.csv", "schedule.html", "schedule.json")}


def test_a_plan_with_two_pools_is_one_kind_of_worker_of_a_schedule() -> None:
    """6 prefill workers of 2 GPUs and 2 decode workers of 4, at 30 requests/s: twice 3 x 2 + 4 GPUs at 15."""
    pools = [
        {"role": "prefill", "count": 6, "tp": 2, "gpu": "h100-80g"},
        {"role": "decode", "count": 2, "tp": 4, "gpu": "h100-80g"},
    ]
    plan = {"llm": "x", "workers": pools, "rate_rps": 30.0}
    found = planned_market.capacity_document(plan, {"h100-80g": CATALOG.gpu("h100-80g")})
    assert (found["gpus"], found["rate"], found["power"]) == (10, "15 req/s", "7000 W")
    assert found["worker"] == "3 prefill of 2 + 1 decode of 4 × h100-80g"


PAIR: dict[str, Any] = {
    "llm": "meta-llama/Llama-3.1-70B",
    "rate_rps": 20.0,
    "cost_usd_per_h": 67.36,
    "gpus": 24,
    "workers": [
        {"role": "prefill", "count": 10, "tp": 2, "gpu": "h100-80g"},
        {"role": "decode", "count": 1, "tp": 4, "gpu": "a100-80g"},
    ],
}


def test_a_plan_of_two_kinds_of_gpu_is_one_kind_of_worker_of_a_schedule() -> None:
    """10 workers of 2 H100 and one of 4 A100, at 700 and 400 W, carry 20 requests/s together. The line of
    GPUs is read as it is written.
    """
    kinds = {name: CATALOG.gpu(name) for name in planned_market.gpus_of_plan(PAIR)}
    found = planned_market.capacity_document(PAIR, kinds)
    assert found["gpu"] == {"h100-80g": 20, "a100-80g": 4} and "gpus" not in found
    assert (found["rate"], found["power"]) == ("20 req/s", "15600 W")
    assert market.gpus_text(found) == "20 × h100-80g + 4 × a100-80g"
    assert market.parse_gpus(market.gpus_text(found)) == {"gpu": found["gpu"]}
    task = parse_task(
        {"safety": "none", "llm": PAIR["llm"], "slo": {"ttft": {"p90": "2 s"}}, "fleet": {"gpus": [*kinds]}},
        CATALOG,
    )
    offers = {name: planned_market.offer_documents(PAIR, gpu, task)[name] for name, gpu in kinds.items()}
    assert parse_market({"gpus": offers, "capacity": [found]}).worker_types[0].gpu_counts == found["gpu"]


@pytest.mark.parametrize("text", ["h100-80g", "4 h100-80g", "", "x × h100-80g"])
def test_gpus_that_are_no_number_of_a_kind_are_left_to_the_reader(text: str) -> None:
    assert market.parse_gpus(text) == {"gpu": text}


@pytest.mark.parametrize(
    ("gpus", "limits", "stock"),
    [({"h100-80g": 32}, {}, 32), (["h100-80g"], {}, None), ({"h100-80g": 32}, {"gpus": 16}, 16)],
)
def test_a_schedule_from_a_plan_has_the_stock_of_its_question(
    gpus: Any, limits: dict[str, Any], stock: int | None
) -> None:
    """It had none: a peak could take more GPUs than there are."""
    plan = PAIR | {"workers": PAIR["workers"][:1], "gpus": 20, "cost_usd_per_h": 59.8}
    task = parse_task(
        {
            "safety": "none",
            "llm": PAIR["llm"],
            "slo": {"ttft": {"p90": "2 s"}},
            "fleet": {"gpus": gpus},
            "limits": limits | {"power": "80 kW", "cost": "500 usd/h"},
        },
        CATALOG,
    )
    offer = planned_market.offer_documents(plan, CATALOG.gpu("h100-80g"), task)["h100-80g"]
    assert offer == {"on_demand": "2.99 usd/h"} | ({} if stock is None else {"stock": stock})
    assert planned_market.limits_document(task) == {"power": "80000 W", "cost": "500 usd/h"}
    found = {
        "gpus": {"h100-80g": offer},
        "capacity": [planned_market.capacity_document(plan, {"h100-80g": CATALOG.gpu("h100-80g")})],
    }
    sold = parse_market(found | {"limits": planned_market.limits_document(task)})
    assert sold.offers[0].stock == stock and sold.power_w == 80_000


@pytest.mark.long
@pytest.mark.usefixtures("at_once")
def test_a_schedule_begins_with_the_plans_stock_and_makes_nothing_up() -> None:
    """The sample's question has 32 H100 in stock and 80 kW."""
    on_paper("d6" * 16, changes=H100_ALONE, rate_rps=RATE_RPS)
    at = opened("schedule", "d6" * 16)
    assert "Made-up figures" not in text_of(at)
    text = typed(at, "schedule.yaml").value
    assert "stock: 32" in text and "power: 80 kW" in text


@pytest.mark.usefixtures("at_once")
def test_a_plan_of_two_kinds_of_gpu_begins_a_schedule_as_it_is(folder: Path) -> None:
    """It was left out. One such worker is the fleet: the schedule takes all of it at a time, for the rate
    that was asked for, of which 19.98 requests/s were drawn.
    """
    planned("8" * 32)
    Store(folder).keep_result("pair", PAIR | {"rate_rps": 19.98, "requested_rps": 20.0}, b"")
    with sqlite3.connect(folder / "fleetplan.sqlite") as db:
        db.execute("update plans set result = 'pair' where session = ?", ("8" * 32,))
    at = opened("schedule", "8" * 32)
    assert not at.error and "Made-up figures" not in text_of(at)
    asked = yaml.safe_load(typed(at, "schedule.yaml").value)
    assert asked["capacity"][0]["gpu"] == {"h100-80g": 20, "a100-80g": 4}
    assert asked["capacity"][0]["rate"] == "20 req/s"
    assert (asked["gpus"]["h100-80g"]["stock"], asked["gpus"]["a100-80g"]["stock"]) == (32, 64)
    at.button(key="schedule_start").click().run()
    assert not at.exception and not at.error
    assert {row[0] for row in tables(at)[0]} == {"h100-80g", "a100-80g"}


OWN_DAY = """
llm: meta-llama/Llama-3.1-70B
slo: {ttft: {p90: 600 ms}, tbt: {p99: 150 ms}, every: 60 s}
fleet: {gpus: {a100-80g: 32}, sold_as: {a100-80g: gpu}}
day: {controllers: {hpa: {metric: kv, target: 60 %}, keda: {}}, start: 20 s, billing: second, train: 40 %}
"""


def a_day() -> bytes:
    """Four minutes: calm at first, then a request a second."""
    rows = [(4.0 * k, 500 + 37 * k % 1500) for k in range(25)]
    rows += [(100.0 + k, 500 + 53 * k % 2500) for k in range(140)]
    told = "".join(f"{at_s},{size},{20 + size % 90}\n" for at_s, size in rows)
    return f"timestamp,input_tokens,output_tokens\n{told}".encode()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{controllers: 'cron,hpa', train: first 70 %, every: 20 min, billing: hour, least: 0, most: 7}",
        "{least: 1}",
        "{controllers: {hpa: {metric: kv, decode: {target: 50 %}}, keda: null}, warm: 2, warm_start: 30 s, "
        "drain: 90 s, start: 4 min}",
        "{controllers: [static], storage: nvme-raid0, image: none, every: 0.7 s, train: 7 %, "
        "missed_window: 5}",
        "{optimum: false, fleets: plan, missed: 2.5 %}",
        "{missed: 0}",
    ],
)
def test_a_day_passes_through_the_inputs_without_loss(text: str) -> None:
    given = yaml.safe_load(text)
    asked = json.loads(json.dumps(days.form_of_section(given)))
    found, wanted = (parse_day(each) for each in (days.section(asked), given))
    assert found == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_the_command_shown_gives_the_same_day(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An uploaded slo.yaml and an uploaded trace; HPA with parameters of its own, and KEDA."""
    owner = "da" * 16
    at = opened("day", owner)
    assert "None yet: press Run" in text_of(at)
    at.radio(key="day_source").set_value("a slo.yaml").run()
    at.button(key="day_start").click().run()
    assert shown(at.error)[-1].startswith("slo.yaml: none yet; upload one")
    at.file_uploader(key="day_upload_slo").upload("slo.yaml", OWN_DAY.encode()).run()
    at.file_uploader(key="day_upload").upload("day.csv", a_day()).run()
    assert at.multiselect(key="day_controllers").value == ["hpa", "keda"]
    assert (at.number_input(key="day_start_s").value, at.number_input(key="day_train_percent").value) == (
        20.0,
        40.0,
    )
    at.number_input(key="day_time_limit").set_value(1000)  # a busy machine is slow, not wrong
    at.button(key="day_start").click().run()
    assert not at.exception and not at.error, shown(at.error)

    again = opened("day", owner)  # a reload
    assert "the same as the optimum" in shown(again.subheader)[0] and "other inputs" not in text_of(again)
    controllers, causes = tables(again)[-2:]
    assert {row[0] for row in controllers} == {"optimum", "static", "hpa", "keda"}
    assert "missed windows by cause" in text_of(again)
    above = {row[0]: row[-1].split(" USD")[0] for row in controllers}
    assert {row[0]: row[1] for row in causes} == {name: above[name] for name in ("static", "hpa", "keda")}
    names = {button.label for button in again.download_button}
    assert names >= {f"Download {name}" for name in ("day.html", "day.csv", "windows.csv", "manifests.zip")}
    kept = Store(folder).page_document(owner, "day result")
    assert kept is not None
    files = Store(folder).files(kept["result"])
    asked = yaml.safe_load(files["slo.yaml"])
    assert parse_task(asked, CATALOG) == parse_task(yaml.safe_load(OWN_DAY), CATALOG)
    monkeypatch.chdir(tmp_path)
    Path("slo.yaml").write_bytes(files.pop("slo.yaml"))
    Path("day.csv").write_bytes(a_day())
    command = next(code.value for code in again.code if code.value.startswith("plan day"))
    found = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert found.exit_code == 0, found.output
    out = Path("out")
    assert files == {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }

    again.multiselect(key="day_controllers").set_value(["hpa"]).run()
    assert "This answer is of other inputs" in text_of(again) and not again.exception


DESCRIBED_DAY = """
llm: meta-llama/Llama-3.1-8B
traffic: {rate: 0.0005, input: 1500, output: 300, duration: 30 h}
slo: {ttft: {p90: 2 s}}
fleet: {gpus: {a100-80g: 32}}
"""


@pytest.mark.long
def test_a_day_of_described_traffic_has_no_trace_and_keeps_its_rate() -> None:
    at = opened("day", "dd" * 16)
    assert any(box.key == "day_trace" for box in at.selectbox)
    at.radio(key="day_source").set_value("a slo.yaml").run()
    at.file_uploader(key="day_upload_slo").upload("slo.yaml", DESCRIBED_DAY.encode()).run()
    assert not at.exception and not at.error, shown(at.error)
    assert not any(box.key == "day_trace" for box in at.selectbox)
    assert yaml.safe_load(typed(at, "slo.yaml").value)["traffic"]["rate"] == 0.0005
    at.number_input(key="day_rate").set_value(0.0002).run()
    assert yaml.safe_load(typed(at, "slo.yaml").value)["traffic"]["rate"] == 0.0002


@pytest.mark.long
def test_a_rate_of_few_requests_a_day_is_no_empty_input() -> None:
    """One in half an hour became empty, and the trace's own rate was planned for: it is refused now, as the
    sample lasts nine minutes.
    """
    at = opened(owner="ab" * 16)
    text = typed(at, "slo.yaml")
    text.set_value(re.sub("rate: [0-9.]+", "rate: 0.0005", text.value))
    at.button(key="apply_yaml").click().run()
    assert at.number_input(key="ask_rate").value == 0.0005
    assert shown(at.error)[0].startswith("rate: 0.0005 requests/s over the 545.5 s")


@pytest.mark.long
@pytest.mark.usefixtures("at_once")
def test_a_day_begins_with_the_plan_whose_fleet_stands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's question, trace and fleet; where the pools may not grow it is refused in one line."""
    owner = "db" * 16
    planned(owner)
    at = opened("day", owner)
    assert at.radio(key="day_source").value == "the plan" and at.checkbox(key="day_stands").value
    assert at.number_input(key="day_rate").value == RATE_RPS
    at.multiselect(key="day_controllers").set_value(["cron"])
    at.number_input(key="day_most").set_value(1)
    at.button(key="day_start").click().run()
    assert "stand all day; widen them" in shown(at.error)[0]
    monkeypatch.setattr("planner.day.day_study.LEAST_OPTIMUM_S", 0.1)
    at.number_input(key="day_most").set_value(None)
    at.number_input(key="day_rate").set_value(None)
    at.number_input(key="day_time_limit").set_value(1)
    at.number_input(key="day_start_s").set_value(60.0)
    at.button(key="day_start").click().run()
    assert not at.exception and not at.error
    store = Store(folder)
    kept, plan = store.page_document(owner, "day result"), store.current_plan(owner)
    assert kept is not None and plan is not None and "--fleet plan.yaml --time-limit 1 " in kept["command"]
    assert store.files(kept["result"], "plan.yaml") == store.files(plan.result, "plan.yaml")
    document = store.document(kept["result"])
    assert document is not None and document["fleet"] in str((store.document(plan.result) or {})["answer"])


@pytest.mark.usefixtures("at_once")
def test_prefixes_of_the_sample_are_shown_and_placed_on_the_plan() -> None:
    planned()
    at = opened("prefixes")
    at.checkbox(key="prefix_place").check()
    at.button(key="prefix_start").click().run()
    assert not at.exception and not at.error
    assert (
        "An endless cache would save" in at.subheader[0].value and "workers of mixed" in at.subheader[1].value
    )


@pytest.mark.long
def test_an_answer_on_paper_comes_first_where_production_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says what is bought, of which fleet, before any scenario is tried; a plan on paper alone has no such
    thing. Telling it changes nothing of the plan.
    """
    asked = question.document(question.sample_form(CATALOG) | {"rate": RATE_RPS}, CATALOG)
    trace = str(EXAMPLES / "traces" / "azure-conversation-sample.csv")
    request = {"question": asked, "trace": trace, "seed": 0, "catalog": None, "time_limit_s": 120.0}
    told: list[dict[str, Any]] = []

    def tried(*_: Any) -> Any:
        raise InputError("production is asked for")

    monkeypatch.setattr(kept_policies, "production_or_paper", tried)
    with pytest.raises(InputError, match="production is asked for"):
        worker._make_plan(request, told.append)
    (first,) = (message["first"] for message in told if "first" in message)
    assert "class=verdict>Buy " in first["html"] and "On paper" in first["html"]
    assert "not yet tested in scenarios" in first["html"] and "Step times estimated" in first["html"]
    assert first["tables"]["fleet"][1] and first["tables"]["slo"][1][0][-1].endswith("kept")
    assert any("search" in message for message in told)
    alone: list[dict[str, Any]] = []
    worker._make_plan({**request, "question": asked | {"safety": "none"}}, alone.append)
    assert not any("first" in message for message in alone)


def test_a_very_long_trace_is_planned_by_its_busiest_part_as_the_command_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_traces, "LONG_REQUESTS", 1000)
    monkeypatch.setattr(long_traces, "PART_REQUESTS", 150)
    request = sample_request()
    asked = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "2 s"}}, "safety": "none"}
    asked |= {"fleet": {"gpus": ["l40s-48g"], "max_num_batched_tokens": [2048]}}
    plan = worker._make_plan(request | {"question": asked}, lambda _: None)
    facts = (*plan.certificate.binding, *plan.warnings)
    assert any(isinstance(each, OverTheWhole) and each.part_requests < each.requests for each in facts)


@pytest.mark.usefixtures("at_once")
def test_live_metrics_are_held_against_the_plan(folder: Path, tmp_path: Path) -> None:
    """Of the plan's own traffic they are inside. Nothing is asked before there is a plan, or metrics."""
    assert "plan first" in text_of(opened("watch", "e1" * 16))
    on_paper("e2" * 16, changes=H100_ALONE, rate_rps=RATE_RPS)
    store = Store(folder)
    plan = store.current_plan("e2" * 16)
    assert plan is not None
    for name, content in store.files(plan.result).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    written = read_written(tmp_path, CATALOG)
    live = json.dumps(exported(simulate(written.fleet, written.trace))).encode()
    at = opened("watch", "e2" * 16)
    at.button(key="watch_start").click().run()
    assert "none yet; upload a file" in shown(at.error)[0]
    at.file_uploader(key="watch_files").upload("live.json", live).run()
    at.button(key="watch_start").click().run()
    assert not at.exception and not at.error
    assert "Still inside the plan" in text_of(at) and "Inside the plan" in text_of(at)
    told = fleetplan.watch(tmp_path, _written(tmp_path / "live.json", live))
    assert all(line.lower() in text_of(at).lower() for line in told.sentences())
    named = {row[0].partition(" [")[0] for row in tables(at)[0]}
    assert named == {WHAT[drift.what][0] for drift in told.watched.drifts}


@pytest.mark.parametrize("extra", [(), ("traffic.jsonl",)])
def test_a_plan_is_watched_with_its_sessions_and_prefixes(
    extra: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand in traffic.jsonl; by requests.csv alone no request waits and no prompt is cached."""
    names = {"plan.yaml", "certificate.json", "requests.csv", *extra}
    (tmp_path / "plan.zip").write_bytes(zip_files(dict.fromkeys([*names, "page.html"], b"")))

    def see_folder(folder: str, *_: Any, **__: Any) -> None:
        assert {path.name for path in Path(folder).iterdir()} == names
        raise InputError("seen")

    monkeypatch.setattr("planner.api.watch_api.watch", see_folder)
    settings = dict.fromkeys(("places", "replans", "window", "step", "model", "match", "question"))
    with pytest.raises(InputError, match="seen"):
        worker.run("watch", {"plan": str(tmp_path / "plan.zip"), **settings})


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.usefixtures("at_once")
def test_a_validation_with_an_error_that_has_no_share_is_shown() -> None:
    """0 s were measured, of tokens that came at once: no error of them is finite, and JSON has null."""
    document = json.loads((Path(__file__).parents[1] / "data" / "validation.json").read_text())
    document["errors"][0] |= {"measured_s": 0.0, "error_frac": None}
    document["steps"] = [{"pool": "mixed", "steps": 10, "bias_frac": 0.0}]
    at = opened("validation")
    at.file_uploader(key="validation").upload("validation.json", json.dumps(document).encode()).run()
    assert not at.exception
    assert tables(at)[-1][0][2].startswith("+0.0 %")  # As in report.html.


def test_a_validation_is_read_and_anything_else_refused() -> None:
    at = opened("validation")
    content = (Path(__file__).parents[1] / "data" / "validation.json").read_bytes()
    at.file_uploader(key="validation").upload("validation.json", content).run()
    assert not at.exception and at.subheader[0].value.startswith("The SLO was kept; the prediction")
    assert {"ttft p50", "tbt p99"} <= {row[0] for row in tables(at)[0]}
    at.file_uploader(key="validation").set_value(("x.json", b'{"a": 1}', "application/json")).run()
    assert "expected the validation.json" in shown(at.error)[0]


def test_a_dark_page_has_the_colours_of_a_dark_report() -> None:
    """The app's page, its charts and its accent, from page.css."""
    css = package_text("reports/page.css").partition("prefers-color-scheme: dark")[2].partition("}")[0]
    dark = dict(re.findall(r"(--\w+): (#\w{6})", css))
    assert {drawing.THEME[light]: shade for light, shade in draw.DARK.items()} == {
        name: shade for name, shade in dark.items() if name in drawing.THEME.values()
    }
    assert (ui_command.LIGHT_BLUE, ui_command.DARK_PAGE, ui_command.DARK_CARD, ui_command.DARK_INK) == tuple(
        dark[name] for name in ("--blue", "--page", "--card", "--ink")
    )


def test_a_command_in_a_text_is_code_and_all_else_is_as_it_stands() -> None:
    assert draw.escape_markdown("*a* `plan day --x` 5 %") == "\\*a\\* `plan day --x` 5\u00a0\\%"
    assert draw.escape_markdown("a ` alone") == "a \\` alone"


def test_a_file_of_the_working_folder_cannot_stand_in_for_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a file ui.py there, Streamlit imported it as the room `ui`."""
    started: dict[str, Any] = {}
    for name in ("PYTHONSAFEPATH", "PYTHONPATH", "FLEETPLAN_UI_FOLDER"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(os, "execv", lambda *_: started.update(os.environ))
    CliRunner().invoke(cli, ["ui", "--folder", str(tmp_path / "plans")])
    assert started["PYTHONSAFEPATH"] == "1"


def test_the_command_refuses_a_folder_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = CliRunner().invoke(cli, ["ui", "--folder", str(tmp_path / "file")])
    assert isinstance(found.exception, InputError) and "not a directory" in str(found.exception)


DESCRIBED = """
llm: meta-llama/Llama-3.1-8B
slo: {ttft: {p90: 1 s}}
traffic:
  {rate: 3, duration: 2 min, input: 700, output: {mean: 100, p95: 300}, burstiness: {cv: 1}, tenants: 2}
fleet: {gpus: {h100-80g: 8}, owned: {h100-80g: 2}}
safety: none
"""


def test_a_described_question_and_what_is_owned_pass_through_the_inputs() -> None:
    given = yaml.safe_load(DESCRIBED)
    asked = question.form_of_document(given, question.sample_form(CATALOG), CATALOG)
    assert (asked["source"], asked["rate"], asked["input_mean"]) == (question.DESCRIBED, 3.0, 700.0)
    assert (asked["output_p95"], asked["burst_cv"]) == (300.0, 1)
    assert list(question.leaf_texts(asked["more"])) == ["traffic.tenants: 2"]
    assert parse_task(question.document(asked, CATALOG), CATALOG) == parse_task(given, CATALOG)
    assert "--trace" not in question.command(asked)
    back = question.form_of_document(yaml.safe_load(WHOLE), asked, CATALOG)
    assert back["source"] == question.SAMPLE and "--trace" in question.command(back)


def test_thousands_of_tokens_are_numbers_in_the_inputs() -> None:
    """`p95: 1k` ended the page with an exception."""
    traffic = {"rate": 3, "input": "2k", "output": {"mean": 300, "p95": "1k"}}
    given = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "1 s"}}, "traffic": traffic}
    asked = question.form_of_document(given, question.sample_form(CATALOG), CATALOG)
    assert (asked["input_mean"], asked["output_mean"], asked["output_p95"]) == (2000.0, 300.0, 1000.0)


@pytest.mark.parametrize(
    "traffic",
    [
        "{rate: {curve: [1, 2], every: 1 h}, task: chat}",
        "{rate: 30, task: chat, input: 900, burstiness: {cv: 1, fano: {10 s: 3}}}",
        "{rate: 4, map: {arrival: when, input: asked_for, output: got}, timezone: Europe/Berlin}",
    ],
)
def test_what_no_input_shows_of_traffic_is_kept(traffic: str) -> None:
    given = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "1 s"}}, "traffic": yaml.safe_load(traffic)}
    asked = question.form_of_document(given, question.sample_form(CATALOG), CATALOG)
    found = question.document(asked, CATALOG)
    assert parse_task(found, CATALOG) == parse_task(given, CATALOG)
    assert found["traffic"].get("map") == given["traffic"].get("map")


@pytest.mark.long
@pytest.mark.usefixtures("at_once")
def test_described_traffic_is_planned_and_an_answer_of_earlier_inputs_is_marked() -> None:
    at = opened(owner="d1" * 16)
    typed(at, "slo.yaml").set_value(DESCRIBED)
    at.button(key="apply_yaml").click().run()
    at.button(key="make_plan").click().run()
    assert not at.exception and not at.error
    assert "The answer is of these inputs." in text_of(at)
    at.number_input(key="ask_rate").set_value(4.0).run()
    assert not at.exception and "traffic.rate: 3.0, now 4.0" in text_of(at)
    at.button(key="inputs_back").click().run()
    assert at.number_input(key="ask_rate").value == 3.0 and "Changed since" not in text_of(at)


@pytest.mark.usefixtures("at_once")
def test_a_log_with_columns_of_its_own_is_read_as_the_page_is_told() -> None:
    at = opened(owner="d2" * 16)
    at.segmented_control(key="ask_source").set_value(question.UPLOAD).run()
    rows = "".join(f"2026-03-01T00:00:{k:02d}Z,{200 + k},{20 + k}\n" for k in range(50))
    at.file_uploader(key="ask_upload").upload("log.csv", f"when,asked_for,got\n{rows}".encode()).run()
    reference = at.selectbox(key="ask_trace").value
    assert any("no column could be read as" in said for said in shown(at.error))
    for role, name in (("arrival", "when"), ("input", "asked_for"), ("output", "got")):
        at.selectbox(key=f"ask_column_{role}_{reference}").select(name).run()
    at.button(key="ask_columns").click().run()
    assert not at.exception and not at.error
    assert "asked_for" in typed(at, "slo.yaml").value and "50 requests in 49 s" in text_of(at)


def test_a_limit_in_seconds_is_the_one_in_milliseconds() -> None:
    at = opened(owner="d3" * 16)
    at.segmented_control(key="ask_unit").set_value("s").run()
    assert at.number_input(key="ask_ttft_s").value == 2.0
    at.number_input(key="ask_ttft_s").set_value(1.5).run()
    assert not at.exception and "p90: 1500 ms" in typed(at, "slo.yaml").value
    at.segmented_control(key="ask_unit").set_value("ms").run()
    assert at.number_input(key="ask_ttft_ms").value == 1500.0


def test_a_safety_profile_sets_its_figures_and_an_edit_makes_it_ones_own() -> None:
    at = opened(owner="d4" * 16)
    assert at.segmented_control(key="ask_profile").value == "production"
    at.segmented_control(key="ask_profile").set_value("high availability").run()
    assert (at.number_input(key="ask_spare").value, at.selectbox(key="ask_spare_of").value) == (1, "nodes")
    at.number_input(key="ask_growth").set_value(5.0).run()
    assert at.segmented_control(key="ask_profile").value == question.OWN_PROFILE


def test_a_session_begins_with_a_copy_and_a_link_with_its_plan(tmp_path: Path) -> None:
    """What the copy does later is its own."""
    store = Store(tmp_path / "plans")
    store.keep_form(ANNA, {"rate": 5.0})
    trace = store.add_trace(ANNA, "mine.csv", b"x")
    plan = store.add_plan(ANNA, "first", {"rate": 5.0}, "key")
    store.copy_session(ANNA, BERT)
    store.keep_form(BERT, {"rate": 6.0})
    assert (store.stored_form(ANNA), store.stored_form(BERT)) == ({"rate": 5.0}, {"rate": 6.0})
    assert store.current_plan(BERT) == store.plan(plan) and trace in store.traces(BERT)


def test_a_week_is_written_in_a_few_figures() -> None:
    """10 req/s by day, 3 at night, 6.5 in the evening; half of it at weekends."""
    rows = market.shape_hours({"llm": 10.0}, days=7, night_frac=0.3, weekend_frac=0.5)
    assert len(rows) == 168 and [row["window"] for row in rows] == list(range(168))
    assert [rows[hour]["llm"] for hour in (0, 8, 18, 5 * 24 + 9, 6 * 24)] == [3.0, 10.0, 6.5, 5.0, 1.5]


@pytest.mark.long
def test_no_other_site_can_frame_the_app(tmp_path: Path) -> None:
    """`plan ui` as a user starts it: the page and the server's own answers say that only itself may."""
    with served(tmp_path / "plans") as address:
        for path in ("/", "/_stcore/health"):
            with urllib.request.urlopen(address + path, timeout=60) as answer:
                headers = answer.headers
            assert headers["X-Frame-Options"] == "SAMEORIGIN"
            assert "frame-ancestors 'self'" in headers["Content-Security-Policy"]
            assert "object-src 'none'" in headers["Content-Security-Policy"]
