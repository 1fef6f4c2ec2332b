"""Requests that wait for others, on engines: when they are sent, and what they are compared with."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime_fakes import LATENCY, MODEL, engines, fleet_of, routed

from planner.domain import Slo
from planner.fleet import Policies
from planner.runtime.analysis import ValidationSetup
from planner.runtime.live_replay import (
    Journal,
    JournalFile,
    ReplayPart,
    RequestOutcome,
    _Agenda,
    replay_trace,
)
from planner.runtime.measured_against_simulated import Measurement, compare_with_simulation
from planner.runtime.prediction_errors import Tolerances, session_times_s
from planner.runtime.router import RouterSettings
from planner.runtime.validate import slice_plan, validate
from planner.simulator import simulate
from planner.traffic.sessions import session_numbers
from planner.traffic.trace import Trace

NO_SLO = Slo(())


def made_of(arrival_s: list[float], after: list[tuple[int, int]], think_s: list[float]) -> Trace:
    """Requests of 10 tokens in and 3 out; `after` are rows (request, parent), by parent."""
    n = len(arrival_s)
    edges = np.array(after, dtype=np.int64).reshape(-1, 2)
    return Trace(
        "by hand", np.array(arrival_s), np.full(n, 10), np.full(n, 3), after=edges, think_s=np.array(think_s)
    )


def answered(request: int, end_s: float, *, status: str = "finished") -> RequestOutcome:
    return RequestOutcome(request, 0, 0.0, 0.0, end_s, status, "", ("w-0",), (end_s,))  # type: ignore[arg-type]


def test_a_request_is_due_when_the_last_it_waits_for_was_answered_and_it_has_thought() -> None:
    """2 waits for 0 and 1, which end at 5 and 4 s: due at 5 + 2 = 7 s, told so by the second answer. 3 waits
    for 1 alone without thinking, but not before its own 20 s, which are 10 s after the first."""
    trace = made_of([10.0, 11.0, 11.0, 20.0], [(2, 0), (2, 1), (3, 1)], [0.0, 0.0, 2.0, 0.0])
    agenda = _Agenda(trace, range(4), {}, 10.0)
    assert agenda.due == [(0.0, 0), (1.0, 1)]
    assert agenda.note_end(answered(0, 5.0)) == [] and len(agenda.due) == 2
    assert agenda.note_end(answered(1, 4.0)) == []
    assert sorted(agenda.due)[2:] == [(7.0, 2), (10.0, 3)]


def test_all_that_waits_for_a_request_that_did_not_finish_is_given_up_once() -> None:
    """0 fails, 1 finishes: 2 waits for both, 3 for 2; 4 for 1 alone. 2 and 3 are given up, 4 is due."""
    trace = made_of([0.0, 0.0, 0.0, 0.0, 0.0], [(2, 0), (2, 1), (4, 1), (3, 2)], [0.0] * 5)
    agenda = _Agenda(trace, range(5), {}, 0.0)
    assert agenda.note_end(answered(0, 1.0, status="failed")) == [
        (2, "not sent: a request it waits for failed"),
        (3, "not sent: a request it waits for was not sent"),
    ]
    assert agenda.note_end(answered(1, 2.0)) == []
    assert sorted(request for _, request in agenda.due) == [0, 1, 4]


def test_a_run_that_goes_on_knows_what_was_answered_before() -> None:
    """Of 0 <- 1 <- 2 and 3 <- 4 and 5 <- 6 the requests 0, 3 and 5 have ended, 5 in vain. 1 counts from the
    start of the new part, 2 waits for it, 6 is given up; 4 keeps its own 9 s, 4 s after the first that is
    missing."""
    trace = made_of(
        [0.0, 5.0, 5.0, 6.0, 9.0, 9.0, 9.0], [(1, 0), (2, 1), (4, 3), (6, 5)], [0.0, 3, 0, 0, 1, 0, 0]
    )
    before = {0: answered(0, 5.0), 3: answered(3, 7.0), 5: answered(5, 9.0, status="rejected")}
    agenda = _Agenda(trace, [1, 2, 4, 6], before, 5.0)
    assert agenda.due == [(3.0, 1), (4.0, 4)]
    assert agenda.unsendable == [(6, "not sent: a request it waits for was rejected")]
    agenda.note_end(answered(1, 3.5))
    assert (3.5, 2) in agenda.due


def test_a_run_that_goes_on_gives_up_all_that_waits_for_a_request_that_failed_before() -> None:
    """0 <- 1 <- 2, interrupted when 0 had failed: 1 alone was given up, and 2 never had an outcome."""
    trace = made_of([0.0, 1.0, 2.0], [(1, 0), (2, 1)], [0.0] * 3)
    agenda = _Agenda(trace, [1, 2], {0: answered(0, 5.0, status="failed")}, 1.0)
    assert [request for request, _ in agenda.unsendable] == [1, 2] and not agenda.due


def test_a_session_lasts_from_its_first_arrival_to_its_last_end() -> None:
    """[0, 2], [1, 3] and [5, 6] are 6 s in all, of which a request was there in 4; another one of [2, 9] with
    [3, 4] in it has 7 and 7."""
    total_s, served_s = session_times_s(
        np.array([0, 1, 0, 0, 1]), np.array([1.0, 2.0, 5.0, 0.0, 3.0]), np.array([3.0, 9.0, 6.0, 2.0, 4.0])
    )
    assert total_s.tolist() == [6.0, 7.0] and served_s.tolist() == [4.0, 7.0]


def test_predicted_turns_follow_the_predicted_answers() -> None:
    """Three sessions of two turns, alone on an engine that answers first turns one second late and second
    ones as simulated. Predicted arrivals of second turns are the simulation's: a second before the measured.
    So their own errors are 0, and a session of E2E e1 + 0.5 s + e2 was measured to last a second longer."""
    fleet = fleet_of(("w", "mixed", 1))
    trace = made_of(
        [0.0, 0.0, 10.0, 10.0, 20.0, 20.0], [(1, 0), (3, 2), (5, 4)], [0.0, 0.5, 0.0, 0.5, 0.0, 0.5]
    )
    alone = simulate(fleet, trace.select([0]))
    ttft_s, e2e_s = float(alone.ttft_s[0]), float(alone.e2e_s[0])
    tokens = np.array([ttft_s, (ttft_s + e2e_s) / 2, e2e_s])
    sent = {}
    for first in (0, 2, 4):
        start_s = float(trace.arrival_s[first])
        late = tokens + start_s + 1.0
        again_s = float(late[-1]) + 0.5
        for request, at_s, times in ((first, start_s, late), (first + 1, again_s, tokens + again_s)):
            sent[request] = RequestOutcome(
                request, 0, at_s, at_s, float(times[-1]), "finished", "", ("w-0",), tuple(times.tolist())
            )
    run = Measurement(fleet, trace, Journal((ReplayPart(0, 100.0, tuple(range(6))),), sent), {})
    found = compare_with_simulation(run, fleet, NO_SLO, Tolerances())
    predicted, measured = found.predicted.requests, found.measured.requests
    order = np.argsort(measured.arrival_s)
    assert measured.arrival_s[order][1] - predicted.arrival_s[order][1] == pytest.approx(1.0)
    assert predicted.e2e_s == pytest.approx(e2e_s)
    rows = {(row.metric, row.percentile_frac): row for row in found.rows}
    one = rows["session", 0.5]
    assert one.predicted_s == pytest.approx(2 * e2e_s + 0.5)
    assert one.measured_s == pytest.approx(2 * e2e_s + 1.5)
    assert rows["session-served", 0.5].predicted_s == pytest.approx(2 * e2e_s)
    assert not one.holds and not found.agrees


def test_a_session_of_which_a_part_is_missing_has_no_total() -> None:
    """Two sessions of two turns; the second turn of one failed: only the other has a time."""
    fleet = fleet_of(("w", "mixed", 1))
    trace = made_of([0.0, 0.0, 10.0, 10.0, 20.0], [(1, 0), (3, 2)], [0.0, 1.0, 0.0, 1.0, 0.0])
    sent = {
        i: RequestOutcome(
            i, 0, at_s, at_s, at_s + 0.2, "finished", "", ("w-0",), (at_s + 0.1, at_s + 0.15, at_s + 0.2)
        )
        for i, at_s in enumerate([0.0, 1.2, 10.0, 11.2, 20.0])
    }
    run = Measurement(fleet, trace, Journal((ReplayPart(0, 0.0, tuple(range(5))),), sent), {})
    found = compare_with_simulation(run, fleet, NO_SLO, Tolerances())
    assert len(found.measured.sessions_s(found.chosen)["session"]) == 1  # the first is in the warm-up
    sent[3] = replace(sent[3], status="failed", token_s=())
    found = compare_with_simulation(run, fleet, NO_SLO, Tolerances())
    assert not len(found.measured.sessions_s(found.chosen)["session"])


def test_one_that_was_given_up_before_all_it_waits_for_were_sent_is_compared_too() -> None:
    """2 waits for 0, which fails at once, and for 1, sent 5 s later: given up before that. 3 waits for 2."""
    fleet = fleet_of(("w", "mixed", 1))
    trace = made_of([0.0, 5.0, 5.0, 5.0], [(2, 0), (2, 1), (3, 2)], [0.0] * 4)
    sent = {
        0: answered(0, 0.1, status="failed"),
        2: answered(2, 0.1, status="unsent"),
        3: answered(3, 0.1, status="unsent"),
        1: RequestOutcome(1, 0, 5.0, 5.0, 5.3, "finished", "", ("w-0",), (5.1, 5.2, 5.3)),
    }
    run = Measurement(fleet, trace, Journal((ReplayPart(0, 0.0, (0, 2, 3, 1)),), sent), {})
    found = compare_with_simulation(run, fleet, NO_SLO, Tolerances())
    assert found.measured.requests.status.tolist() == [2, 0, 1, 1]
    assert found.predicted.requests.status.tolist() == [0] * 4 and found.chosen.tolist() == [
        False,
        True,
        False,
        False,
    ]


def turns(count: int, length: int, *, think_s: float, every_s: float) -> Trace:
    """So many sessions of so many turns, one beginning every so often; nominal arrivals."""
    rng = np.random.default_rng(1)
    start_s = np.repeat(np.arange(count) * every_s, length)
    turn = np.tile(np.arange(length), count)
    order = np.argsort(start_s + turn * think_s, kind="stable")
    place = np.argsort(order)
    pairs = [(place[i], place[i - 1]) for i in range(count * length) if turn[i]]
    return Trace(
        "turns",
        (start_s + turn * think_s)[order],
        rng.integers(50, 200, count * length),
        rng.integers(2, 10, count * length),
        after=np.array(sorted(pairs, key=lambda pair: pair[1])),
        think_s=np.where(turn > 0, think_s, 0.0)[order],
    )


def test_a_slice_has_whole_sessions() -> None:
    """Forty sessions of three turns over four workers by round robin, which gives the first of them 30
    requests: whole sessions with as many tokens, to half a session, each with a turn that goes there."""
    fleet = fleet_of(("w", "mixed", 4), policies=Policies(routing="round-robin"))
    trace = turns(40, 3, think_s=0.25, every_s=0.5)
    one, part, note = slice_plan(fleet, trace)
    is_first = simulate(fleet, trace).prefill_worker == 0
    tokens = int((trace.input_tokens + trace.output_tokens)[is_first].sum())
    assert one.workers == 1 and is_first.sum() == 30
    assert set(np.bincount(session_numbers(part)).tolist()) == {3}
    assert abs(int((part.input_tokens + part.output_tokens).sum()) - tokens) < 3 * 210 / 2
    assert f"{len(part) // 3} sessions, all of them whole" in note
    times_s = trace.arrival_s[is_first]
    assert set(part.arrival_s) & set(times_s.tolist()) and part.arrival_s[-1] > times_s[-1] / 2


@pytest.mark.long
def test_turns_are_sent_as_answers_come_and_agree_with_the_simulation(tmp_path: Path) -> None:
    """15 sessions of three turns, 50 ms apart, on two rehearsal engines: every turn was sent 50 ms or more
    after the answer to the one before, all finish, and the sessions' P50 is the simulation's within 25 %.
    Compared again, nothing is measured and the same is said."""
    fleet = fleet_of(("w", "mixed", 2), latency=LATENCY.with_longer_steps(5.0))
    trace = turns(15, 3, think_s=0.05, every_s=0.2)
    setup = ValidationSetup(fleet, trace, NO_SLO, 512, engine="rehearsal")
    found = validate(setup, tmp_path / "out")
    sent = found.measurement.journal.outcomes
    assert {one.status for one in sent.values()} == {"finished"} and len(sent) == 45
    late_s = [
        sent[child].sent_s - sent[parent].end_s - float(trace.think_s[child]) for child, parent in trace.after
    ]
    assert min(late_s) > -1e-5
    rows = {(row.metric, row.percentile_frac): row for row in found.comparison.rows}
    assert abs(rows["session", 0.5].error_frac) < 0.25
    told = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert {"session", "session-served"} < {row["metric"] for row in told["errors"]}
    assert "session-served" in (tmp_path / "out" / "report.html").read_text()
    assert validate(setup, tmp_path / "out").comparison.rows == found.comparison.rows


def test_what_waits_for_a_rejected_request_is_reported_as_unsent(tmp_path: Path) -> None:
    """The first of four is longer than the engine's KV cache: refused. 1 waits for it, 2 for 1; 3 is alone.
    The simulator rejects the same three, and none is lost."""
    trace = replace(
        made_of([0.0, 0.0, 0.0, 0.1], [(1, 0), (2, 1)], [0.0, 0.1, 0.1, 0.0]),
        input_tokens=np.array([17_000, 10, 10, 10]),
    )
    fleet = fleet_of(("mixed", "mixed", 1))
    journal = JournalFile(tmp_path / "journal.jsonl", {})

    async def run() -> None:
        async with (
            engines(["mixed"]) as backends,
            routed(backends, settings=RouterSettings(longest_tokens=20_000)) as (_, url),
        ):
            await replay_trace(trace, range(4), url, MODEL, journal)

    asyncio.run(run())
    found = journal.read()
    assert [found.outcomes[i].status for i in range(4)] == ["rejected", "unsent", "unsent", "finished"]
    assert not found.missing(trace) and sorted(found.parts[0].requests) == [0, 1, 2, 3]
    told = compare_with_simulation(Measurement(fleet, trace, found, {}), fleet, NO_SLO, Tolerances())
    assert sorted(told.measured.requests.status.tolist()) == [0, 1, 1, 1]
    assert sorted(told.predicted.requests.status.tolist()) == [0, 1, 1, 1]
