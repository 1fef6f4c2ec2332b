"""A day under controllers: what stands all day, what each costs above the optimum, and what is written."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from simulations import LLM, make_latency, make_pool, make_trace

from planner.day import day_causes, day_manifests, day_page, day_study
from planner.day.controllers.table import parse_controllers
from planner.day.day_settings import parse_day
from planner.day.day_study import (
    DayAnswer,
    DayQuestion,
    MissTerms,
    effects_of_changes,
    gather_knowledge,
    score_day,
    split_training,
    study_day,
    summarize_run,
    window_verdicts,
    workers_over_time,
)
from planner.domain import Limit, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Role
from planner.parallel.executors import Executor, working_on
from planner.simulator import simulate
from planner.simulator.elastic import ElasticFleet, ElasticPool, ElasticRun, Span, simulate_together
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import judge_slo, keeps_all, missed_windows
from planner.simulator.timetable import Timetable
from planner.solvers.pool_sizes import DayTerms, PoolTerms
from planner.traffic.trace import Trace
from planner.units import show_share

EVERY_S = 60.0
SLO = Slo((Limit("ttft", 0.9, 1.0), Limit("tbt", 0.99, 0.5)), every_s=EVERY_S)


def a_day(windows: int = 16, seed: int = 0) -> Trace:
    """A calm and a busy half: 3 and 14 requests/s."""
    rng = np.random.default_rng(seed)
    rates = [3.0] * (windows // 2) + [14.0] * (windows - windows // 2)
    arrival_s = np.concatenate(
        [k * EVERY_S + np.sort(rng.uniform(0, EVERY_S, int(rate * EVERY_S))) for k, rate in enumerate(rates)]
    )
    n = len(arrival_s)
    return make_trace(arrival_s, rng.integers(50, 200, n), rng.integers(2, 20, n))


def question(trace: Trace, *, start_s: float = 20.0, train_frac: float = 0.0) -> DayQuestion:
    latency = make_latency((0.02, 0.12), knots=(1, 256), d=1e-5, b=2e-3)
    pool = make_pool(latency, role="mixed", count=3, budget=256, seats=8, name="mixed")
    pools = (ElasticPool(start_s=start_s, least=1, most=5),)
    return DayQuestion(Fleet(LLM, (pool,)), pools, SLO, trace, 0.0, EVERY_S, train_frac)


@pytest.fixture(scope="module")
def answer() -> DayAnswer:
    return study_day(question(a_day(6)), parse_controllers("hpa,cron,fleetplan"), most_work_s=600)


@pytest.mark.long
def test_what_stands_all_day_is_simulated_as_ever(answer: DayAnswer) -> None:
    """The first row is today's simulation, and its verdict the windows' one."""
    asked, static = answer.question, answer.static
    alone = simulate(asked.fleet, asked.trace, limits=SLO.limits, record=True)
    run = static.run.simulation
    for name in ("ttft_s", "e2e_s", "tbt_max_s", "prefill_worker"):
        assert np.array_equal(getattr(run, name), getattr(alone, name), equal_nan=True)
    assert judge_slo(alone, SLO).holds == static.keeps
    assert static.effects == () and static.usd == pytest.approx(3 * static.run.end_s / 3600)  # 1 USD/h each


def test_nobody_costs_less_than_the_optimum_and_keeps_every_window(answer: DayAnswer) -> None:
    assert answer.optimum is not None
    assert answer.optimum.day.keeps
    assert answer.optimum.proved_usd <= answer.optimum.bound_usd + 1e-9 <= answer.optimum.usd + 1e-9
    for row in answer.rows:
        regret = answer.regret_usd(row)
        assert regret == pytest.approx(row.usd - answer.optimum.usd)
        assert not row.keeps or row.usd >= answer.optimum.usd - 1e-9
    assert answer.optimum.usd < answer.static.usd  # three workers are too many for the calm half


def test_with_a_share_of_windows_to_miss_the_cheapest_that_keeps_it_is_best(answer: DayAnswer) -> None:
    """And where all miss more, that which misses fewest."""
    windows = len(answer.static.windows)
    for allowed in range(windows + 1):
        best = replace(answer, question=replace(answer.question, missed_frac=allowed / windows)).winner
        keeping = [row for row in answer.rows if row.missed_windows <= allowed]
        if keeping:
            assert best.usd == min(row.usd for row in keeping)
        else:
            assert best.missed_windows == min(row.missed_windows for row in answer.rows)


def test_no_share_of_the_windows_is_lost_by_rounding() -> None:
    """29 % of 100 windows are 29, though 0.29 x 100 is 28.999999999999996."""
    for share, allowed in ((0.07, 7), (0.29, 29), (0.009, 0)):
        terms = MissTerms(1.0, share)
        assert terms.score(5.0, allowed, 100)[0] == 0
        assert terms.score(5.0, allowed + 2, 100) == (2, 5.0, allowed + 2)
    assert MissTerms(2.0).score(5.0, 3, 100) == (0, 11.0, 3)
    assert MissTerms(float("inf")).score(5.0, 0, 100) == (0, 5.0, 0)


def test_a_missed_window_counts_what_one_costs_standing(answer: DayAnswer) -> None:
    """Unless something else is said: then the one that misses fewest wins, or the cheapest."""
    assert answer.missed_usd == answer.static.usd / len(answer.static.windows)
    best = answer.winner
    assert all(
        best.usd + answer.missed_usd * best.missed_windows <= row.usd + answer.missed_usd * row.missed_windows
        for row in answer.rows
    )
    strict = replace(answer, question=replace(answer.question, missed_usd=1e9)).winner
    assert strict.missed_windows == min(row.missed_windows for row in answer.rows)
    loose = replace(answer, question=replace(answer.question, missed_usd=0.0)).winner
    assert loose.usd == min(row.usd for row in answer.rows)


def test_workers_over_time_are_what_is_paid(answer: DayAnswer) -> None:
    """GPU seconds of the windows add up to those of the lives of workers inside them."""
    for row in answer.rows:
        edges_s = np.array([0.0, row.run.end_s / 2, row.run.end_s])
        paid, ready = workers_over_time(row.run, 1, edges_s)
        assert (paid @ np.diff(edges_s)).sum() / 3600 == pytest.approx(row.gpu_hours)
        assert (ready <= paid + 1e-9).all()


def test_changes_are_told_with_whom_they_hurt(answer: DayAnswer) -> None:
    row = next(each for each in answer.rows if each.name == "hpa")
    changes = np.abs(np.diff(row.run.requested_sizes[:, 0]))
    assert sum(abs(each.after - each.before) for each in row.effects) == changes.sum() > 0


def test_a_late_request_counts_once_however_many_workers_start(answer: DayAnswer) -> None:
    """Two workers that start one after the other and are ready at the end: 1,051,488 of 989,083 were late."""
    run = max(answer.rows, key=lambda each: each.missed_windows).run
    spans = tuple(Span(k, 0, float(k), run.end_s, run.end_s, run.end_s) for k in range(3))
    sizes = np.array([[1], [2], [3]])
    started = replace(run, spans=spans, requested_s=np.array([0.0, 1.0, 2.0]), requested_sizes=sizes)
    late = ~keeps_all(run.simulation, SLO) & (run.simulation.arrival_s >= 1.0)
    assert sum(each.late for each in effects_of_changes(started, SLO)) == late.sum() > 0


def test_windows_are_those_of_the_slo(answer: DayAnswer) -> None:
    """What the kernel counted in windows, and what recorded gaps say."""
    asked = answer.question
    alone = simulate(asked.fleet, asked.trace, limits=SLO.limits, record=True)
    edges_s = np.array([*(each.start_s for each in answer.static.windows), answer.static.windows[-1].end_s])
    assert window_verdicts(alone, SLO, edges_s) == answer.static.windows


def test_a_window_holds_by_its_attainment_too(answer: DayAnswer) -> None:
    """A day on which some requests miss the TTFT: no window holds in which one does, with 100 % asked for."""
    asked, row = answer.question, max(answer.rows, key=lambda each: each.missed_windows)
    run, windows = row.run.simulation, row.windows
    kept, strict = keeps_all(run, SLO), replace(SLO, attainment_frac=1.0)
    assert any(each.holds for each in windows) and not kept.all()
    edges_s = np.array([*(each.start_s for each in windows), windows[-1].end_s])
    found = window_verdicts(run, strict, edges_s)
    missed = [v for v, each in enumerate(found) if not each.holds]
    assert missed == missed_windows(run, strict, edges_s)
    first, last = (
        np.searchsorted(run.arrival_s, edge) for edge in (edges_s[missed[0]], edges_s[missed[0] + 1])
    )
    assert found[missed[0]].short_limit == "all limits at once"
    assert found[missed[0]].kept_frac == pytest.approx(kept[first:last].mean(), abs=0.01)
    assert len(asked.trace) == len(kept)


def test_a_window_with_a_request_that_is_not_served_is_missed() -> None:
    """All workers leave 2 s before the traffic ends. A limit on gaps counts no request that is never served,
    so each of the 4 windows read "kept", and the cheap day was the best.
    """
    trace, slo = a_day(4), Slo((Limit("tbt", 0.99, 0.5),), every_s=EVERY_S)
    asked = replace(question(trace), slo=slo, pools=(ElasticPool(start_s=0.0, least=0, most=5),))
    rows = []
    for sizes in ([[3], [3]], [[3], [0]]):
        table = Timetable([0.0, 4 * EVERY_S - 2.0], sizes, [0.0])
        (run,) = simulate_together(
            [ElasticFleet(asked.fleet, trace, asked.pools, table, slo.limits, EVERY_S)]
        )
        rows.append(summarize_run(asked, "timetable", run, {}))
    kept, unserved = rows
    assert kept.keeps and not unserved.keeps
    assert unserved.usd < kept.usd
    assert [each.holds for each in unserved.windows] == [True, True, True, False]
    last = unserved.worst
    in_last = trace.arrival_s >= last.start_s
    served = (unserved.run.simulation.status[in_last] == 0).mean()
    assert 0.9 < served < 1 and last.kept_frac == served
    assert last.kept_text == f"{show_share(served)} are served"
    assert min(rows, key=lambda row: score_day(row, MissTerms(1.0))) is kept


def test_settings_are_chosen_on_the_first_part_and_judged_on_the_rest() -> None:
    trace = a_day(windows=24, seed=1)
    found = study_day(
        question(trace, train_frac=0.75), parse_controllers("hpa"), most_work_s=600, optimum=False
    )
    train, judged = split_training(trace, 0.75)
    assert train is not None and len(train) + len(judged) == len(trace)
    assert len(found.judged) == len(judged) and found.judged.arrival_s[0] < EVERY_S
    row = found.rows[-1]
    assert row.settings_count > 1 and len(row.run.simulation.status) == len(judged)
    assert found.optimum is None and day_page.proof_lines(found) == ["No optimum: it was not requested."]


def test_the_clock_runs_on_through_hours_without_traffic() -> None:
    """Two working days, of which the first trains. The clock stood at its last request, 7 h too early, so
    cron had its sizes at the wrong hours.
    """
    hours = np.concatenate([np.linspace(8, 18, 40), np.linspace(32, 42, 40)])
    trace = make_trace(3600 * (hours - 8), [50] * 80, [2] * 80)  # From 0 s on, to 34 h; cut at 17 h.
    train, judged = split_training(trace, 0.5)
    assert train is not None and judged.arrival_s[0] == pytest.approx(7 * 3600)
    knowledge = gather_knowledge(question(trace, train_frac=0.5), train, train)
    assert knowledge.clock_s == 17 * 3600
    assert knowledge.history is not None
    rates_rps = knowledge.history.rates_rps
    assert len(rates_rps) == 17 * 12 and not rates_rps[10 * 12 + 1 :].any() and rates_rps[: 10 * 12].any()


def test_nothing_to_judge_by_is_refused() -> None:
    trace = make_trace([0.0, 0.0, 1.0], [10, 10, 10], [2, 2, 2])
    with pytest.raises(InputError, match="leaves no traffic"):
        split_training(replace(trace, arrival_s=np.zeros(3)), 0.5)


def test_no_workers_suffice_is_told(answer: DayAnswer) -> None:
    """At most one worker in the busy half: no optimum, and why."""
    asked = question(a_day())
    few = replace(
        asked,
        pools=(replace(asked.pools[0], most=1),),
        fleet=replace(asked.fleet, pools=(replace(asked.fleet.pools[0], count=1),)),
    )
    found = study_day(few, parse_controllers("static"), most_work_s=600)
    assert found.optimum is None and "allow more workers" in found.no_optimum
    assert not found.static.keeps and found.winner is found.static


def test_pools_of_one_gpu_share_its_stock() -> None:
    """Four GPUs for both pools, of which each alone may take three: nobody holds more at any moment, the
    optimum neither, and what it may do is less than without the stock."""
    latency = make_latency((0.02, 0.12), knots=(1, 256), d=1e-5, b=2e-3)
    roles: tuple[Role, ...] = ("prefill", "decode")
    fleet = Fleet(
        LLM, tuple(make_pool(latency, role=each, count=2, budget=256, seats=8, name=each) for each in roles)
    )
    pools = (ElasticPool(start_s=20.0, least=1, most=3),) * 2
    trace = a_day(8)
    asked = DayQuestion(fleet, pools, SLO, trace, 0.0, EVERY_S, stock={"paper": 4})
    chosen = parse_controllers({"hpa": {"metric": "concurrency", "target": 1}})
    found = study_day(asked, chosen, most_work_s=600)
    runs = [row.run for row in found.rows] + ([found.optimum.day.run] if found.optimum else [])
    for run in runs:
        for at_s in {span.requested_s for span in run.spans}:
            assert sum(span.requested_s <= at_s < span.gone_s for span in run.spans) <= 4
    free = study_day(replace(asked, stock={}), chosen, most_work_s=600)
    most = max(
        sum(span.requested_s <= at.requested_s < span.gone_s for span in free.rows[1].run.spans)
        for at in free.rows[1].run.spans
    )
    assert most > 4


@pytest.mark.long
def test_a_rented_pool_may_be_empty_beside_an_owned_one() -> None:
    """One owned worker stands the calm half, so the optimum pays for others in the busy half alone: half of
    240 s, a start-up and what they end, where one of them stood all day for 240 s / 3600 = 0.067 USD.
    """
    asked = question(a_day(4))
    (pool,) = asked.fleet.pools
    rented, bounds = pool.type.gpu, asked.pools[0]
    owned = replace(rented, name=f"{rented.name}@owned", price_usd_per_h=0.0)
    pools = (
        replace(pool, name="own", type=replace(pool.type, gpu=owned), count=1),
        replace(pool, name="rent", count=2),
    )
    fleet = replace(asked.fleet, pools=pools)
    asked = replace(asked, fleet=fleet, pools=(replace(bounds, most=1), replace(bounds, most=3)))
    found = study_day(asked, parse_controllers("hpa"), most_work_s=600)
    assert found.optimum is not None
    assert found.optimum.sizes[0].tolist() == [1, 0]
    assert found.optimum.day.keeps
    given = study_day(replace(asked, is_least_given=True), parse_controllers("hpa"), most_work_s=600)
    assert given.optimum is not None
    assert (given.optimum.sizes >= 1).all()
    assert found.optimum.usd < given.optimum.usd - 0.02
    assert all((row.run.requested_sizes >= 1).all() for row in (*found.rows, *given.rows))


def test_files(answer: DayAnswer) -> None:
    files = day_page.render_day(answer)
    assert set(files) == set(day_page.NAMES)
    told = json.loads(files["day.json"])
    assert [each["name"] for each in told["controllers"]] == [row.name for row in answer.rows]
    assert told["winner"] == answer.winner.name
    windows = list(csv.DictReader(io.StringIO(files["windows.csv"])))
    assert len(windows) == (len(answer.rows) + 1) * len(answer.static.windows)
    rates = [float(row["requests_per_s"]) for row in windows if row["controller"] == "static"]
    assert rates[0] == pytest.approx(3.0, rel=0.1) and rates[-1] == pytest.approx(14.0, rel=0.1)
    assert len(list(csv.DictReader(io.StringIO(files["day.csv"])))) == len(answer.rows) + 1
    assert answer.optimum is not None
    events = list(csv.DictReader(io.StringIO(files["events.csv"])))
    assert len(events) == sum(len(row.effects) for row in (*answer.rows, answer.optimum.day))
    page = files["day.html"]
    assert page.startswith("<!doctype html>") and f"<h1>{answer.winner.name} " in page


def test_nothing_is_written_where_a_folder_cannot_be(answer: DayAnswer, tmp_path: Path) -> None:
    from planner.day.day_api import DayResult

    place = tmp_path / "file"
    place.write_text("here")
    with pytest.raises(InputError):
        DayResult(answer).save(place)
    assert place.read_text() == "here"


def test_an_oracle_tunes_public_autoscalers_and_writes_the_manifests_of_each(answer: DayAnswer) -> None:
    section = parse_day({"oracle": True})
    assert [each.row.name for each in section.controllers] == ["hpa", "keda", "wva", "dynamo", "dynamo-sla"]
    assert section.train_frac == 0.7 and parse_day({"oracle": True, "train": "50 %"}).train_frac == 0.5
    written = day_manifests.manifests_of_all(answer)
    assert {path.split("/")[0] for path in written} == {"hpa", "cron", "fleetplan"}
    assert any("kind: HorizontalPodAutoscaler" in text for path, text in written.items() if path[:3] == "hpa")
    assert answer.optimum is not None
    (told,) = day_page.least_gpu_hours(answer)
    assert told.startswith(
        f"The cheapest sizes that keep every window pay {answer.optimum.day.gpu_hours:,.1f} "
    )


@pytest.mark.slow
def test_controllers_run_elsewhere_as_they_do_here(answer: DayAnswer) -> None:
    """Parameters are chosen there too."""
    asked, chosen = question(a_day(), train_frac=0.5), parse_controllers("hpa,cron")
    here = study_day(asked, chosen, optimum=False)
    with working_on(Executor("processes:2")):
        there = study_day(asked, chosen, optimum=False)
    assert day_page.day_table(there) == day_page.day_table(here)
    assert [row.chosen for row in there.rows] == [row.chosen for row in here.rows]
    assert all(
        np.array_equal(a.run.requested_sizes, b.run.requested_sizes)
        for a, b in zip(there.rows, here.rows, strict=True)
    )


def test_causes_add_up_to_what_a_day_costs_above_the_optimum(answer: DayAnswer) -> None:
    """And every missed window has one cause."""
    for row in answer.rows:
        causes = day_causes.find_causes(answer, row)
        assert causes is not None
        assert causes.usd == pytest.approx(answer.regret_usd(row), abs=1e-9)
        missed = [v for v, window in enumerate(row.windows) if not window.holds]
        assert sorted((*causes.too_few, *causes.too_late, *causes.as_many)) == missed
        assert causes.without_usd <= 0 <= min(causes.kept_usd, causes.unneeded_usd)


def test_causes_in_a_terminal_are_those_of_the_page(answer: DayAnswer) -> None:
    """The winner, ours and the fleet that stands, each once, with the cells that the page has."""
    columns = day_causes.cause_columns(answer)
    names = list(columns[0])[1:]
    assert (
        set(names) == {answer.winner.name, "static", "fleetplan"}
        and columns[0]["cause"] == day_causes.CAUSE_COLUMNS[1]
    )
    by_name = {
        row[0]: dict(zip(day_causes.CAUSE_COLUMNS, row, strict=True))
        for row in day_causes.cause_rows(answer, answer.rows)
    }
    for row in columns:
        assert all(row[name] == by_name[name][row["cause"]] for name in names)
    none = replace(answer, optimum=None, no_optimum="it was not requested")
    assert day_causes.cause_columns(none) == []


@pytest.mark.parametrize(
    ("usd", "text"), [(-0.001, "0.00"), (0.0, "0.00"), (-0.83, "-0.83"), (1.674, "+1.67")]
)
def test_a_cause_of_nothing_has_no_sign(usd: float, text: str) -> None:
    """The table had "-0.00" and "+0.00" beside each other."""
    assert day_causes.change_text(usd) == text


def test_causes_by_hand() -> None:
    """Two workers for 2 h at 3600 USD/h each; the optimum has the second for 1000 s.

    It is kept for an hour after that, and unneeded for the 2600 s that are left.
    """
    terms = DayTerms(np.array([0.0, 7200.0]), (PoolTerms(0.0, 1, 2, 3600.0),))
    runs = []
    for until_s in (7200.0, 1000.0):
        spans = [Span(0, 0, 0.0, 0.0, 7200.0, 7200.0), Span(1, 0, 0.0, 0.0, until_s, until_s)]
        runs.append(cast(ElasticRun, SimpleNamespace(spans=tuple(spans))))
    assert day_causes._compare_ready(terms, *runs) == pytest.approx([3600.0, 2600.0, 0.0])
    assert day_causes._compare_ready(terms, *runs[::-1]) == pytest.approx([0.0, 0.0, -6200.0])


def test_a_cost_below_the_optimum_is_not_said_to_be_above_it() -> None:
    assert day_page.above_text(None, 10.0) == ""
    assert day_page.above_text(1.2, 10.0) == ", 1.20 USD (+12.0 %) above the optimum"
    assert day_page.above_text(-1.2, 10.0) == ", 1.20 USD below the optimum, which keeps every window"


def test_where_whole_nodes_are_paid_all_day_the_answer_says_what_would_let_it_save(answer: DayAnswer) -> None:
    """The optimum costs what stands all day costs: a node of 8 is paid whatever runs on it."""
    pool = answer.question.fleet.pools[0]
    node = replace(pool.type.gpu, is_sold_whole=True)
    fleet = replace(answer.question.fleet, pools=(replace(pool, type=replace(pool.type, gpu=node)),))
    optimum = answer.optimum
    assert optimum is not None
    even = replace(answer, question=replace(answer.question, fleet=fleet))
    day = replace(optimum.day, usd=answer.static.usd)
    even = replace(even, optimum=replace(optimum, day=day))
    assert f"fleet: {{sold_as: {{{node.name}: gpu}}}}" in " ".join(day_page.proof_lines(even))
    assert "sold_as" not in " ".join(day_page.proof_lines(answer))


def test_a_winner_that_misses_windows_names_the_cheapest_that_keeps_them_all() -> None:
    """A day of 12 USD with one late window won over 20 and 15 USD without any."""

    def row(name: str, usd: float, *missed: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, usd=usd, keeps=not missed, missed=missed, paid_hours=3.0, windows=range(18)
        )

    rows = (row("static", 20.0), row("fleetplan", 12.0, 4), row("hpa", 15.0))
    regret_usd = {"fleetplan": 2.0, "static": 10.0}.get
    answer = SimpleNamespace(
        rows=rows, winner=rows[1], optimum=None, regret_usd=lambda each: regret_usd(each.name)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(day_page, "_missed_text", lambda each: f"{len(each.missed)} window")
        patch.setattr(day_page, "_best_usd", lambda each: 10.0)
        text = day_page.recommendation_sentence(cast(DayAnswer, answer))
        keeping = day_page.recommendation_sentence(
            cast(DayAnswer, SimpleNamespace(**vars(answer) | {"winner": rows[0]}))
        )
    assert text.endswith("above the optimum. The cheapest that keeps every window is hpa, for 15.00 USD.")
    assert "The cheapest" not in keeping


def test_a_request_counts_once_however_many_workers_stop_under_it() -> None:
    """Two workers stop at 5 s and one at 8 s. Of the preempted requests one lasts over all three, one over
    the last, one ends before any stops, and one never ends.
    """
    run = SimpleNamespace(
        arrival_s=np.array([0.0, 6.0, 0.0, 7.0, 0.0]),
        e2e_s=np.array([9.0, 3.0, 4.0, np.nan, 9.0]),
        preemptions=np.array([1, 1, 2, 1, 0]),
    )
    assert day_study._count_rerouted(cast(Simulation, run), np.array([5.0, 5.0, 8.0])) == 3
    assert day_study._count_rerouted(cast(Simulation, run), np.array([])) == 0


def test_sizes_of_the_static_fleet_are_refused_in_the_study_of_a_day() -> None:
    """They were dropped: the study simulates the fleet as it stands."""
    with pytest.raises(InputError, match="static: workers: a day's static sizes are those of its fleet"):
        parse_day({"controllers": {"static": {"workers": [5]}, "hpa": {}}})
    assert len(parse_day({"controllers": {"static": {}, "hpa": {}}}).controllers) == 2
