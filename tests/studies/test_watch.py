"""A deployment against its plan: its own traffic is inside, shifts are found; words and exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from live_metrics import EPOCH_S, exported
from questions import DOCUMENT, question
from typer.testing import CliRunner

import fleetplan
from benchmarks.generated_traffic import lognormal, synthesise
from planner.api import watch_api
from planner.api.planning import plan as make_plan
from planner.cli import app
from planner.documents.catalog import read_catalog
from planner.documents.facts import SpotSpare
from planner.documents.fleet_file import read_fleet
from planner.documents.plan_folder import read_written
from planner.documents.task import PlanQuestion
from planner.documents.traffic_description import parse_description
from planner.domain import Limit, Selector
from planner.errors import InputError
from planner.files.document_values import Section
from planner.importers.prometheus_range import Floats, SampledHistogram
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import judge_slo
from planner.studies import plan_watch, watch_words
from planner.studies.plan_watch import (
    LatencyLine,
    LiveDrift,
    LiveHeadroom,
    PlanExpectations,
    Reference,
    WatchedPlan,
    busiest_rps,
    drift_of,
    fit_reference,
    latency_lines,
    most_carried_traffic,
    plan_references,
    read_expectations,
    stretch_lengths,
)
from planner.studies.what_if import Study
from planner.traffic.described import draw_requests
from planner.traffic.scaling import rescale_trace, same_requests
from planner.traffic.trace import Trace

RATE_RPS = 6.0
QUESTION = DOCUMENT | {
    "fleet": {"gpus": ["h100-80g"]},
    "slo": {"ttft": {"p90": "1 s"}, "tpot": {"p90": "80 ms"}},
}


def traffic(seed: int, *, seconds: float = 1200.0, rate_rps: float = RATE_RPS, cv: float = 1.0) -> Trace:
    return synthesise(
        int(seconds * rate_rps),
        rate_rps,
        input_tokens=lognormal(800, cv),
        output_tokens=lognormal(60, cv),
        gap_cv=1.2,
        rng=np.random.default_rng(seed),
    )


def edges(windows: int) -> Floats:
    return np.arange(0.0, 60.0 * windows + 30.0, 60.0, dtype=np.float64)


def joined(*parts: Trace) -> Trace:
    starts = np.append(0.0, np.cumsum([part.arrival_s[-1] + 0.1 for part in parts[:-1]]))
    return Trace(
        "live",
        np.concatenate([part.arrival_s + start for part, start in zip(parts, starts, strict=True)]),
        np.concatenate([part.input_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plan")
    made = make_plan(QUESTION, traffic(0, seconds=1200.0))
    made.save(place / "out")
    return place / "out"


@pytest.fixture(scope="module")
def known(folder: Path) -> PlanExpectations:
    return read_expectations(read_written(folder, read_catalog()))


def metrics(known: PlanExpectations, trace: Trace, path: Path) -> str:
    path.write_text(json.dumps(exported(simulate(known.written.fleet, trace))))
    return str(path)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["watch", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def test_levels_of_one_kind_of_traffic_are_one() -> None:
    """Windows of 100 requests on average, Poisson: phi = 1, one level, known to 2 / sqrt(all)."""
    rng = np.random.default_rng(0)
    found = fit_reference("rate", rng.poisson(100, 600).astype(float), np.full(600, 60.0), None)
    assert found.levels == 1
    assert found.mean == pytest.approx(100 / 60, rel=0.02)
    assert 1.0 <= found.dispersion < 1.3
    assert found.high / found.mean - 1 == pytest.approx(2 / np.sqrt(60_000), rel=0.2)


def test_the_course_of_a_day_is_within_the_plan() -> None:
    """A rate that swings between 60 and 140 requests a minute: its levels are the plan's."""
    rng = np.random.default_rng(1)
    mean = 100 + 40 * np.sin(np.linspace(0, 2 * np.pi, 1440))
    found = fit_reference("rate", rng.poisson(mean).astype(float), np.full(1440, 60.0), None)
    assert found.levels == 144
    assert found.low * 60 == pytest.approx(60, rel=0.1)
    assert found.high * 60 == pytest.approx(140, rel=0.1)
    again = rng.poisson(np.roll(mean, 300)).astype(float)
    drift = drift_of(found, again, np.full(1440, 60.0), edges(1440), 6)
    assert not drift.is_drift and not drift.past


def test_bursts_are_overdispersion() -> None:
    """Arrivals in tens: the variance of counts is ten times Poisson's."""
    rng = np.random.default_rng(2)
    counts = (10 * rng.poisson(10, 600)).astype(float)
    assert fit_reference("rate", counts, np.full(600, 60.0), None).dispersion == pytest.approx(10, rel=0.3)


@pytest.mark.parametrize("shift", [0.85, 1.15])
def test_a_shift_of_15_percent_is_found_within_20_minutes(shift: float) -> None:
    """6 requests/s, lengths with CV 1: after an hour as planned, prompts change."""
    ref = plan_references(traffic(3, seconds=7200.0), None)["prompt"]
    trace = joined(traffic(4, seconds=3600.0), stretch_lengths(traffic(5, seconds=1800.0), shift, 1.0))
    windows = int(trace.arrival_s[-1] // 60)
    number = (trace.arrival_s // 60).astype(int)
    tokens = np.bincount(number, weights=trace.input_tokens, minlength=windows)[:windows].astype(float)
    requests = np.bincount(number, minlength=windows)[:windows].astype(float)
    drift = drift_of(ref, tokens, requests, edges(windows), 6)
    assert drift.is_drift and drift.is_up == (shift > 1)
    assert drift.since_s is not None and drift.noticed_s is not None
    assert 3000 <= drift.since_s <= 4200
    assert drift.noticed_s <= 3600 + 1200
    assert drift.low_frac < shift - 1 < drift.high_frac


def test_percentiles_lie_in_buckets() -> None:
    """90 of 100 at most 0.5 s, 97 at most 1 s: p90 is in the first bucket, p95 between 0.5 and 1."""
    counts = np.array([[90.0, 7.0, 3.0]])
    whole = SampledHistogram(np.array([0.5, 1.0, np.inf]), counts, np.array([100.0]), np.array([40.0]))
    limits = [
        Limit("ttft", 0.9, 0.5),
        Limit("ttft", 0.95, 0.7),
        Limit("ttft", 0.99, 1.0),
        Limit("tbt", 0.5, 1),
    ]
    kept = latency_lines(limits, [0.4, None, None, None], {"ttft": whole}, 60)
    assert [(line.low_s, line.high_s, line.is_kept) for line in kept[:3]] == [
        (0.0, 0.5, True),
        (0.5, 1.0, None),
        (1.0, np.inf, False),
    ]
    assert kept[3].is_kept is None and "no histogram" in kept[3].unknown_because


def test_a_limit_of_one_class_is_not_judged_by_all_requests() -> None:
    """All 100 requests take more than 1 s; how many of them are of the class nobody counted."""
    counts = np.array([[0.0, 0.0, 100.0]])
    whole = SampledHistogram(np.array([0.5, 1.0, np.inf]), counts, np.array([100.0]), np.array([400.0]))
    limit = Limit("ttft", 0.9, 1.0, Selector("chat", tenants=("chat",)))
    (line,) = latency_lines([limit], [0.4], {"ttft": whole}, 60)
    assert line.is_kept is None and "all classes together" in line.unknown_because


def test_now_begins_where_the_last_drift_ended() -> None:
    """An hour of twice the traffic, then 15 minutes as planned: those say how it is now."""
    ref = fit_reference("rate", np.full(600, 360.0), np.full(600, 60.0), None)
    live = np.concatenate([np.full(30, 360.0), np.full(60, 720.0), np.full(15, 360.0)])
    drift = drift_of(ref, live, np.full(105, 60.0), edges(105), 6)
    assert not drift.is_drift and len(drift.past) == 1
    assert drift.now == pytest.approx(6.0)
    assert "drifted 1 time and came back" in watch_words._inside_text(drift)


@pytest.mark.parametrize(
    ("interval_frac", "is_drift", "status", "is_exceeded", "words"),
    [
        (0.02, True, "outgrown", True, "no longer holds"),
        (0.3, True, "drifted", None, "more than it carries, but not for certain"),
        (0.02, False, "inside", None, "more than it carries, but not for certain"),
    ],
)
def test_more_than_a_plan_carries_is_certain_or_not(
    known: PlanExpectations,
    interval_frac: float,
    is_drift: bool,
    status: str,
    is_exceeded: bool | None,
    words: str,
) -> None:
    """10 requests/s now, the plan holds until 9; the interval, or a drift not yet found, leaves it open."""
    low_frac, high_frac = 10 / 6 * (1 - interval_frac) - 1, 10 / 6 * (1 + interval_frac) - 1
    since_s = 0.0 if is_drift else None
    drift = LiveDrift("rate", 6.0, 5.9, 6.1, 10.0, low_frac, high_frac, 1.0, since_s, since_s, True)
    holds = LiveHeadroom(9.0, 10.0, 6.0 * (1 + low_frac), False, 0.0, 0.0)
    watched = WatchedPlan(SimpleNamespace(), (drift,), (), holds, (None, None))  # type: ignore[arg-type]
    assert (watched.status, watched.is_exceeded) == (status, is_exceeded)
    assert words in watch_words._headline(watched)


def test_a_missed_slo_beside_a_plan_that_should_hold_is_no_contradiction() -> None:
    """Said: "the SLO is missed; the plan holds until 12 requests/s (now 10)", as if both were measured."""
    drift = LiveDrift("rate", 10.0, 9.9, 10.1, 10.0, 0.0, 0.0, 1.0)
    holds = LiveHeadroom(12.0, 10.0, 10.0, False, 0.0, 0.0)
    missed = LatencyLine(Limit("ttft", 0.9, 1.0), 1000.0, 1.0, 2.5, 0.4, is_kept=False)
    watched = WatchedPlan(SimpleNamespace(), (drift,), (missed,), holds, (None, None))  # type: ignore[arg-type]
    assert watch_words._headline(watched) == (
        "the SLO is missed (TTFT p90); by the simulation the plan holds until 12 requests/s (now 10), so "
        "engines are slower than planned, or some are down"
    )


def test_traffic_that_waits_for_answers_is_compared_as_it_arrives(
    known: PlanExpectations, tmp_path: Path
) -> None:
    """Agents' nominal arrivals are more than twice as frequent as those that their answers let happen."""
    document = {"agents": {"count": 12, "turns": 6, "tool": "2 s"}, "input": 400, "output": 150}

    def agents(seed: int) -> Trace:
        section = Section(document | {"duration": "20 min"}, "traffic")
        described = parse_description(section, read_catalog().tasks)
        assert described is not None
        return draw_requests(described, seed=seed)

    plan = read_expectations(replace(known.written, trace=agents(0)))
    simulated = simulate(known.written.fleet, agents(1))
    assert plan.references["rate"].mean < agents(0).rate_rps / 2
    source = watch_api.MetricsSource((metrics(plan, agents(1), tmp_path / "live.json"),))
    watched = watch_api.look_once(plan, source).watched
    rate = watched.drifts[0]
    assert not rate.is_harder, watched.drifts
    assert rate.now == pytest.approx(len(simulated.arrival_s) / np.nanmax(simulated.arrival_s), rel=0.2)


def test_how_far_a_plan_holds_is_simulated(known: PlanExpectations) -> None:
    """At the factor found it holds, and a hundredth above it does not."""
    written = known.written
    tight = replace(written, slo=replace(written.slo, limits=(Limit("ttft", 0.9, 0.25),)))
    factor = most_carried_traffic(tight.fleet, tight, tight.trace)

    def holds(at: float) -> bool:
        asked = rescale_trace(
            tight.trace, tight.trace.rate_rps * at, scale="compress", rng=np.random.default_rng(0)
        )
        return judge_slo(simulate(tight.fleet, asked, limits=tight.slo.limits, record=True), tight.slo).holds

    assert 0 < factor < 2
    assert holds(factor) and not holds(factor + 0.01)


def test_spot_workers_that_may_be_down_are_not_counted_in_how_far_a_plan_holds(
    known: PlanExpectations, tmp_path: Path
) -> None:
    """Of 3 workers the plan counts on 2, as its own headroom does: `watch` had all 3 up."""
    written, pool = known.written, known.written.fleet.pools[0]
    spare = SpotSpare(pool.name, 3, 1, 0.001, 0.05, 600.0)
    plan = replace(
        written,
        fleet=written.fleet.with_counts([3]),
        slo=replace(written.slo, limits=(Limit("ttft", 0.9, 0.25),)),
        simulated_s=(None,),
        certificate=replace(written.certificate, binding=(spare,)),
    )
    factor = most_carried_traffic(plan.fleet.with_counts([2]), plan, plan.trace)
    assert factor < most_carried_traffic(plan.fleet, plan, plan.trace)
    expected = replace(known, written=plan, carried={})
    source = watch_api.MetricsSource((metrics(known, traffic(1), tmp_path / "live.json"),))
    found = watch_api.look_once(expected, source)
    rate = known.references["rate"]
    assert found.watched.headroom.until_rps == pytest.approx(factor * busiest_rps(rate))
    assert "without the spot workers that may be down at once" in found.sentences()[-1]
    assert f"{pool.name}: 1 of 3" in found.sentences()[-1]


def test_described_traffic_is_replanned_as_it_is_now(
    known: PlanExpectations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests were drawn from the description again, at its rate: a replan knew nothing of the drift. Draws
    of a question were refused, as the live traffic is replayed as it is.
    """
    described = {"rate": 6.0, "input": 800, "output": 60, "duration": "2 min", "draws": 2}
    live, asked = traffic(1, seconds=60.0, rate_rps=12.0), list[PlanQuestion]()
    monkeypatch.setattr(plan_watch, "replan", lambda study, task, fleet, terms: asked.append(task))
    study = Study(live, read_catalog())
    plan_watch.replan_now(study, question(traffic=described), known, horizon_h=24.0)
    request = study.traffic_request(asked[0])
    assert same_requests(request.requests, live) and not request.further


def test_longer_prompts_keep_their_shared_part() -> None:
    trace = replace(
        traffic(0, seconds=1.0),
        arrival_s=np.array([0.0, 1.0]),
        input_tokens=np.array([100, 64]),
        output_tokens=np.array([10, 1]),
        prefix_offsets=np.array([0, 0, 4]),
        prefix_ids=np.arange(4),
        prefix_block_tokens=16,
        tenant=np.zeros(2, np.int64),
        llm=np.zeros(2, np.int64),
        adapter=np.full(2, -1),
        think_s=np.zeros(2),
    )
    found = stretch_lengths(trace, 0.5, 1.5)
    assert found.input_tokens.tolist() == [50, 64]
    assert found.output_tokens.tolist() == [15, 2]


def test_the_plans_own_kind_of_traffic_is_inside(
    folder: Path, known: PlanExpectations, tmp_path: Path
) -> None:
    file = metrics(known, traffic(7, seconds=2400.0), tmp_path / "live.json")
    code, text = run(str(folder), "--prometheus", file, "--once")
    assert code == 0
    assert text.startswith("still inside the plan; the plan holds until")
    assert "TTFT p90 <= 1.00 s" in text
    looked = fleetplan.watch(folder, file)
    assert looked.status == "inside"
    assert [looked.headline(), *looked.sentences()] == text.splitlines()
    assert len(looked.to_frame()) == len(looked.to_dict()["drift"]) > 0


def test_longer_prompts_are_told_with_what_replanning_would_do(
    folder: Path, known: PlanExpectations, tmp_path: Path
) -> None:
    trace = joined(traffic(8), stretch_lengths(traffic(9), 1.4, 1.0))
    file = metrics(known, trace, tmp_path / "live.json")
    slo = tmp_path / "slo.yaml"
    slo.write_text(yaml.safe_dump(QUESTION))
    code, text = run(
        *(str(folder), "--prometheus", file, "--slo", str(slo), "--json", "-o", str(tmp_path / "files"))
    )
    told = json.loads(text)
    assert code == {"drifted": 6, "outgrown": 5, "missed": 5}[told["status"]]
    (prompt,) = (row for row in told["drift"] if row["what"] == "prompt")
    assert prompt["is_drift"] and prompt["is_harder"]
    assert prompt["interval_95_frac"][0] < 0.4 < prompt["interval_95_frac"][1]
    assert prompt["since_s"] - EPOCH_S == pytest.approx(1200, abs=300)
    assert not any(row["is_drift"] for row in told["drift"] if row["what"] == "output")
    assert told["replan"]["ways"]
    assert json.loads((tmp_path / "files" / "watch.json").read_text()) == told
    assert (tmp_path / "files" / "fleetplan-rules.yaml").exists()
    assert (tmp_path / "files" / "replanned-fleet.yaml").exists() == (not told["replan"]["keeps"])


def test_a_drift_triggers_a_search_and_the_next_one_only_where_it_moved_on(
    known: PlanExpectations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts 40 % longer, the same again, then 60 % longer: two searches, the second on what is then."""
    asked: list[WatchedPlan] = []
    answers = iter(["first", "second"])

    def search(plan: PlanExpectations, found: WatchedPlan, slo: object, **_: object) -> Any:
        asked.append(found)
        return next(answers)

    monkeypatch.setattr(watch_api, "replan", search)
    looked = None
    for factor, answer in ((1.4, "first"), (1.4, "first"), (1.6, "second")):
        trace = joined(traffic(8), stretch_lengths(traffic(9), factor, 1.0))
        source = watch_api.MetricsSource((metrics(known, trace, tmp_path / "live.json"),))
        looked = watch_api.look_once(known, source, QUESTION, before=looked)
        assert str(looked.replan) == answer
    assert [round(each.drifts[1].change_frac, 1) for each in asked] == [0.4, 0.6]
    trace = traffic(7, seconds=2400.0)
    source = watch_api.MetricsSource((metrics(known, trace, tmp_path / "live.json"),))
    assert watch_api.look_once(known, source, QUESTION, before=looked).replan is None


def test_the_fleet_of_a_new_search_is_written_beside_the_alerts(
    folder: Path, known: PlanExpectations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet that changes what runs is a file; one that keeps it is none, and the old file goes."""
    files, slo = tmp_path / "files", tmp_path / "slo.yaml"
    slo.write_text(yaml.safe_dump(QUESTION))
    file = metrics(known, joined(traffic(8), stretch_lengths(traffic(9), 1.4, 1.0)), tmp_path / "live.json")
    search = watch_api.replan
    running = known.written.fleet
    more = replace(running, pools=tuple(replace(pool, count=pool.count + 1) for pool in running.pools))
    for keeps in (False, True):

        def changed(*words: Any, keeps: bool = keeps, **named: Any) -> Any:
            found = search(*words, **named)
            return replace(found, keeps_running=keeps, best=replace(found.best, fleet=more))

        monkeypatch.setattr(watch_api, "replan", changed)
        run(str(folder), "--prometheus", file, "--slo", str(slo), "--once", "-o", str(files))
        assert (files / "replanned-fleet.yaml").exists() != keeps
        if not keeps:
            assert read_fleet(files / "replanned-fleet.yaml", read_catalog()).workers == more.workers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prometheus", "none.json"], "none.json"),
        (["--prometheus", "ftp://x"], "ftp"),
        (["--prometheus", "http://127.0.0.1:1"], "no answer"),
        (["--prometheus", "http://a b:1"], "no answer"),
        (["--prometheus", "http://[", "--once"], "address"),
        (["--prometheus", "x.json", "--window", "90 s"], "fewer than two windows"),
        (["--prometheus", "x.json", "--every", "0.1 s"], "--every"),
        (["--prometheus", "x.json", "--step", "soon"], "--step"),
        (["--prometheus", "x.json", "--step", "0 s"], "--step: expected at least 1 s"),
        (["--prometheus", "x.json", "--match", 'a="b"'], "--match"),
        (["--prometheus", "x.json", "--export", ":9109"], "--export"),
    ],
)
def test_bad_input_is_one_line(folder: Path, words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["watch", str(folder), "--once", *words])
    assert isinstance(done.exception, InputError)
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)


def test_an_interval_without_width_is_one_figure() -> None:
    """The end of traffic read "-75 to -75 %"."""
    drift = LiveDrift("rate", 20.0, 19.6, 20.4, 5.0, -0.752, -0.748, 1.0, 0.0, 0.0, True)
    assert "levels 19.6 to 20.4: -75 %; noticed" in watch_words._drift_line(drift)
    assert ": -75 to -74 %;" in watch_words._drift_line(replace(drift, high_frac=-0.742))


def test_how_busy_engines_are_is_said_where_the_metrics_say_it() -> None:
    """A dump of counters alone has no gauges: it read "- requests running, - waiting"."""
    missing = np.full(3, np.nan)
    live: Any = SimpleNamespace(
        instances=1, every_s=60.0, running=missing, waiting=missing, kv_use_frac=np.array([0.1, 0.2, 0.3])
    )
    watched: Any = SimpleNamespace(live=live)
    assert watch_words._load_line(watched) == "1 engine, last hour: 20 % of the KV cache in use"
    live.kv_use_frac = missing
    assert watch_words._load_line(watched) == "1 engine, last hour: the metrics do not say how busy"


def test_a_reference_without_requests_is_refused_by_name() -> None:
    alone = Trace("all.csv", np.zeros(3), np.ones(3, np.int64), np.ones(3, np.int64))
    with pytest.raises(InputError, match="all requests arrive at once"):
        plan_references(alone, None)
    assert isinstance(plan_references(traffic(0), 0.25)["missed"], Reference)


@pytest.mark.parametrize(("now_rps", "is_as_before"), [(0.0, True), (1.0, False)])
def test_traffic_that_has_stopped_is_replanned_once(now_rps: float, is_as_before: bool) -> None:
    """The rate was 0 at the last look too, or requests come again."""

    def at(rate_rps: float) -> Any:
        drift = SimpleNamespace(what="rate", now=rate_rps, is_drift=True)
        return SimpleNamespace(drifts=(drift,), missed_lines=())

    assert watch_api._as_before(at(now_rps), at(0.0)) == is_as_before
