"""The comparison by hand arithmetic, and `plan validate` from end to end with engines that keep time."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from runtime_fakes import CATALOG, LATENCY, LLM, fleet_of, random_trace

from planner import cli
from planner.api.validating import own_slo, traffic_beside_plan
from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import fleet_document, read_fleet
from planner.domain import Limit, Selector, Slo
from planner.errors import InputError
from planner.files.checked_files import read_yaml, reserve_folder, to_yaml
from planner.fleet import Disturbance, Fleet, Policies
from planner.runtime import workers
from planner.runtime.analysis import ValidationSetup, analyse_run
from planner.runtime.engine_log import read_step_logs
from planner.runtime.live_replay import (
    Journal,
    JournalFile,
    ReplayPart,
    RequestOutcome,
    lateness_s,
    trace_prompt,
    unique_prompt,
)
from planner.runtime.measured_against_simulated import (
    Measurement,
    compare_part,
    compare_with_simulation,
    outside_s,
)
from planner.runtime.own_clock import compare_undisturbed, stolen_frac
from planner.runtime.prediction_errors import PercentileRow, Tolerances
from planner.runtime.replanned import find_fewest_workers, replan
from planner.runtime.step_fits import compare_steps, correct_fits, fleet_as_run, with_corrections
from planner.runtime.step_log import StepLog
from planner.runtime.validate import engine_commands, slice_plan, validate
from planner.runtime.validation_document import reader_notes
from planner.simulator import judge_slo, simulate
from planner.traffic.sessions import with_nominal_arrivals
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace
from planner.traffic.trace_writing import to_jsonl
from profiling.vllm_install import is_installed

NO_SLO = Slo(())


def csv_of(trace: Trace) -> str:
    after = {child: parent for child, parent in trace.after.tolist()}
    lines = ["request_id,arrival_s,input_tokens,output_tokens,after,think_s"]
    for k in range(len(trace)):
        lines.append(
            f"{k},{float(trace.arrival_s[k])!r},{trace.input_tokens[k]},{trace.output_tokens[k]},"
            f"{after.get(k, '')},{float(trace.think_s[k])!r}"
        )
    return "\n".join([*lines, ""])


def a_folder(folder: Path, fleet: Fleet, trace: Trace) -> Path:
    (folder / "fleet.yaml").write_text(to_yaml(fleet_document(fleet)))
    (folder / "trace.csv").write_text(csv_of(trace))
    return folder


OPTIONS = ["validate", "fleet.yaml", "--trace", "trace.csv", "-o", "out", "--engine", "rehearsal"]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The command in this process."""

    def run_command(folder: Path, *more: str) -> Outcome:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["plan", *OPTIONS, *more])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return Outcome(int(end.value.code or 0), said.out, said.err)

    return run_command


def sent_of(
    request: int, due_s: float, token_s: tuple[float, ...], *, part: int = 0, worker: str = "w-0"
) -> RequestOutcome:
    return RequestOutcome(request, part, due_s, due_s, token_s[-1], "finished", "", (worker,), token_s)


def test_a_step_log_comes_back_as_a_step_table(tmp_path: Path) -> None:
    """A prompt of 100 in chunks of 60 and 40, then two decodes: pairs 60 * 61 / 2 = 1830 and 40 * 60 +
    40 * 41 / 2 = 3220; contexts 101 and 102. The second step was scheduled while the first ran, the others
    later than the one before ended: with work left, each starts there. A line cut off at the end is left out.
    """
    path = tmp_path / "w-0.1.steps.jsonl"
    log = StepLog(path)
    log.queued("cmpl-p0r7-0", 100, 1.0)
    log.scheduled("cmpl-p0r7-0", 1.5)
    log.step(1.5, 2.0, [("cmpl-p0r7-0", 60, 0)])
    log.step(1.8, 2.5, [("cmpl-p0r7-0", 40, 60)])
    log.token("cmpl-p0r7-0", 1, 2.5)
    for k in range(2):
        log.step(3.0 + k, 3.2 + k, [("cmpl-p0r7-0", 1, 100 + k)])
        log.token("cmpl-p0r7-0", 1, 3.2 + k)
    log.finished("cmpl-p0r7-0")
    log.lines += b'{"step":[9'
    log.close()
    found = read_step_logs([path])
    assert found.steps.t_s.tolist() == pytest.approx([0.5, 0.5, 0.7, 1.0])
    assert found.steps.prefill_pairs.tolist() == [1830, 3220, 0, 0]
    assert found.steps.cached_tokens.tolist() == [0, 60, 0, 0]
    assert found.steps.n_decode.tolist() == [0, 0, 1, 1] and found.steps.kv_tokens.tolist() == [
        0,
        0,
        101,
        102,
    ]
    served = found.requests["cmpl-p0r7-0"]
    assert (served.queued_s, served.scheduled_s) == (1.0, 1.5)
    assert served.token_s.tolist() == [2.5, 3.2, 4.2]


def test_measured_latencies_are_those_of_the_tokens() -> None:
    """Sent at 1 s, tokens at 1.5, 1.7 and 2.1 s: TTFT 0.5, gaps 0.2 and 0.4, TPOT 0.3, E2E 1.1 s. An SLO of
    0.25 s for every gap is missed by one of two gaps, on the engines as in the percentiles."""
    fleet = fleet_of(("w", "mixed", 1))
    trace = Trace("two", np.array([0.0, 1.0]), np.array([10, 10]), np.array([1, 3]))
    sent = {0: sent_of(0, 0.0, (0.1,)), 1: sent_of(1, 1.0, (1.5, 1.7, 2.1))}
    journal = Journal((ReplayPart(0, 100.0, (0, 1)),), sent)
    slo = Slo((Limit("tbt", 0.9, 0.25), Limit("ttft", 0.9, 0.6)))
    found = compare_with_simulation(Measurement(fleet, trace, journal, {}), fleet, slo, Tolerances())
    requests = found.measured.requests
    assert np.isnan(requests.queue_s).all()  # no engine has said when it took them up
    assert requests.ttft_s[1] == pytest.approx(0.5) and requests.e2e_s[1] == pytest.approx(1.1)
    assert requests.tpot_s[1] == pytest.approx(0.3) and requests.tbt_max_s[1] == pytest.approx(0.4)
    assert [line.holds for line in found.measured_verdict.lines] == [True, True]  # gaps end after the window
    inside = Trace("three", np.array([0.0, 1.0, 9.0]), np.array([10] * 3), np.array([1, 3, 1]))
    journal = Journal((ReplayPart(0, 100.0, (0, 1, 2)),), sent | {2: sent_of(2, 9.0, (9.1,))})
    found = compare_with_simulation(Measurement(fleet, inside, journal, {}), fleet, slo, Tolerances())
    assert [line.holds for line in found.measured_verdict.lines] == [False, True]
    assert found.measured_verdict.lines[0].kept_frac == 0.5
    assert found.measured.gap_s.tolist() == pytest.approx([0.2, 0.4])


def test_errors_are_predicted_over_measured_less_one() -> None:
    """Every token measured to come twice as late as simulated: errors of -50 %, refused at a tolerance of
    5 %, accepted at 60 %. A measurement equal to the simulation has none."""
    fleet = fleet_of(("w", "mixed", 1))
    trace = random_trace(50, 1.0)
    simulation = simulate(fleet, trace)

    def measured(factor: float) -> Measurement:
        sent = {}
        for i in range(50):
            first_s = simulation.ttft_s[i] * factor
            gaps = int(trace.output_tokens[i]) - 1
            tpot_s = float(np.nan_to_num(simulation.tpot_s[i])) * factor
            tokens = trace.arrival_s[i] + first_s + tpot_s * np.arange(gaps + 1)
            sent[i] = sent_of(i, float(trace.arrival_s[i]), tuple(tokens.tolist()))
        return Measurement(fleet, trace, Journal((ReplayPart(0, 0.0, tuple(range(50))),), sent), {})

    twice = compare_with_simulation(measured(2.0), fleet, NO_SLO, Tolerances())
    for row in twice.rows:
        if row.metric != "tbt":
            assert row.error_frac == pytest.approx(-0.5)
    assert not twice.agrees
    assert compare_with_simulation(measured(2.0), fleet, NO_SLO, Tolerances(0.6, 0.6, 1.0)).agrees
    assert compare_with_simulation(measured(1.0), fleet, NO_SLO, Tolerances(1e-3, 1e-3, 0.0)).rows[
        0
    ].error_frac == pytest.approx(0)


def test_a_request_that_failed_kept_no_promise() -> None:
    """One of four failed: attainment 3/4, where the simulation has 1."""
    fleet = fleet_of(("w", "mixed", 1))
    trace = Trace("four", np.arange(4.0), np.full(4, 10), np.full(4, 2))
    sent = {i: sent_of(i, float(i), (i + 0.01, i + 0.02)) for i in range(4)}
    sent[3] = replace(sent[3], status="failed", reason="died", token_s=())
    run = Measurement(fleet, trace, Journal((ReplayPart(0, 0.0, (0, 1, 2, 3)),), sent), {})
    slo = Slo((Limit("ttft", 0.5, 1.0),), 0.9)
    found = compare_with_simulation(run, fleet, slo, Tolerances())
    # the first request falls into the warm-up of a twentieth of three seconds
    assert found.measured_verdict.attainment_frac == pytest.approx(2 / 3)
    assert found.predicted_verdict.attainment_frac == 1.0
    assert not found.measured_verdict.holds and found.predicted_verdict.holds


def test_gaps_are_those_of_requests_that_finished_on_both_sides() -> None:
    """Of forty requests one failed, and one was interrupted in the first part and sent again: neither's 199
    gaps of that part were measured, so none are predicted. A class of long prompts is counted alike."""
    fleet = fleet_of(("w", "mixed", 1))
    trace = Trace("gaps", np.arange(40) / 10, np.r_[np.full(30, 10), np.full(10, 90)], np.full(40, 3))
    trace.output_tokens[[20, 22, 35]] = 200
    s = simulate(fleet, trace)
    sent = {
        i: sent_of(
            i, trace.arrival_s[i], tuple(trace.arrival_s[i] + s.ttft_s[i] + s.tpot_s[i] * np.arange(n))
        )
        for i, n in enumerate(trace.output_tokens.tolist())
    }
    sent[20] = replace(sent[20], status="failed", reason="died", token_s=())
    sent[22] = replace(sent[22], part=1)
    parts = (ReplayPart(0, 0.0, tuple(range(40))), ReplayPart(1, 50.0, (22,)))
    slo = Slo((Limit("tbt", 0.9, 1.0), Limit("tbt", 0.9, 1.0, Selector("long", least_tokens=50))))
    run = Measurement(fleet, trace, Journal(parts, sent), {})
    predicted, measured = compare_part(run, parts[0], fleet, slo)
    assert predicted.gap_weight.sum() == pytest.approx(len(measured.gap_s), abs=2)  # At the window's ends.
    assert predicted.requests.counted == pytest.approx(measured.requests.counted, abs=2)
    assert predicted.requests.counted[1] > 9 * 2


def test_a_comparison_of_nothing_does_not_agree() -> None:
    """All requests failed: no percentile has a value, so there is nothing that could agree, SLO or not."""
    fleet = fleet_of(("w", "mixed", 1))
    trace = Trace("two", np.arange(2.0), np.full(2, 10), np.full(2, 2))
    sent = {i: replace(sent_of(i, float(i), (i + 0.1,)), status="failed", token_s=()) for i in range(2)}
    run = Measurement(fleet, trace, Journal((ReplayPart(0, 0.0, (0, 1)),), sent), {})
    found = compare_with_simulation(run, fleet, NO_SLO, Tolerances(1.0, 1.0, 1.0))
    assert not found.judged_rows and not found.agrees


def test_tokens_that_come_at_once_have_no_error_to_divide_by() -> None:
    """A gap measured as 0 s and predicted as 2 ms is infinitely off; 0 predicted as 0 is right."""
    assert PercentileRow("tbt", 0.5, 0.002, 0.0, 0.05).error_frac == np.inf
    assert not PercentileRow("tbt", 0.5, 0.002, 0.0, 0.05).holds
    assert PercentileRow("tbt", 0.5, 0.0, 0.0, 0.05).error_frac == 0


def test_step_logs_of_a_run_before_are_not_taken_for_this_one(tmp_path: Path) -> None:
    """A log left in the folder by a run whose journal is gone has a request of the same name, earlier."""
    for number, queued_s in ((1, 40.0), (2, 101.0)):
        log = StepLog(tmp_path / f"w-0.{number}.steps.jsonl")
        log.queued("p0r0", 10, queued_s)
        log.scheduled("p0r0", queued_s)
        log.step(queued_s, queued_s + 1, [("p0r0", 10, 0)])
        log.token("p0r0", 1, queued_s + 1)
        log.finished("p0r0")
        log.close()
    fleet, trace = fleet_of(("w", "mixed", 1)), Trace("one", np.zeros(1), np.array([10]), np.array([1]))
    old = {"w-0": read_step_logs([tmp_path / "w-0.1.steps.jsonl"])}
    journal = Journal((ReplayPart(0, 100.0, (0,)),), {0: sent_of(0, 1.0, (2.0,))})
    assert not Measurement(fleet, trace, journal, old).is_timed_by_engines
    new = {"w-0": read_step_logs([tmp_path / "w-0.2.steps.jsonl"])}
    assert Measurement(fleet, trace, journal, new).is_timed_by_engines


def test_the_fewest_workers_are_those_of_trying_every_count() -> None:
    """Workers of one pool from 1 to 12, each simulated: the least that keeps the SLO by either fit is what
    `replanned` finds; steps that take twice as long need more."""
    trace = random_trace(400, 400.0)
    slo = Slo((Limit("e2e", 0.9, 0.15),))
    before = fleet_of(("w", "mixed", 3))
    after = fleet_of(("w", "mixed", 3), latency=LATENCY.with_longer_steps(1.0))

    def kept(fleet: Fleet, count: int) -> bool:
        one = replace(fleet, pools=(replace(fleet.pools[0], count=count),))
        return judge_slo(simulate(one, trace, limits=slo.limits), slo).holds

    least = [next(n for n in range(1, 13) if kept(fleet, n)) for fleet in (before, after)]
    found = replan(before, after, trace, slo)
    assert found is not None and found.is_exact and least[0] < least[1]
    assert found.fewest_before is not None and found.fewest_after is not None
    assert [found.fewest_before.workers, found.fewest_after.workers] == least
    assert (found.kept_before, found.kept_after) == (least[0] <= 3, least[1] <= 3)
    assert replan(before, after, trace, NO_SLO) is None


def test_each_pool_shrinks_while_the_rest_holds() -> None:
    """It holds with 3 prefill and 5 decode workers or more. From 2 and 4: 4 and 8 hold, then 3 and 5. From
    one of each with a need beyond 16 times that there is none."""
    fleet = fleet_of(("p", "prefill", 2), ("d", "decode", 4))

    def holds(one: Fleet) -> bool:
        return all(pool.count >= least for pool, least in zip(one.pools, (3, 5), strict=True))

    found = find_fewest_workers(fleet, holds)
    assert found is not None and [pool.count for pool in found.pools] == [3, 5]
    assert find_fewest_workers(fleet_of(("w", "mixed", 1)), lambda one: one.workers > 16) is None


def test_parts_of_an_interrupted_run_are_simulated_each_from_an_idle_fleet() -> None:
    """Two bursts of ten at once: in one run the second waits for the first; as two parts they do not. The
    measurement, whose parts took the simulated times of one burst each, agrees with the second view."""
    fleet = fleet_of(("w", "mixed", 1))
    trace = Trace("bursts", np.r_[np.zeros(10), np.full(10, 1e-3)], np.full(20, 100), np.full(20, 5))
    burst = simulate(fleet, trace.select(np.arange(10)))
    sent = {}
    for i in range(20):
        k = i % 10
        tokens = burst.ttft_s[k] + burst.tpot_s[k] * np.arange(5)
        sent[i] = sent_of(i, 0.0, tuple(tokens.tolist()), part=i // 10)
    parts = (ReplayPart(0, 0.0, tuple(range(10))), ReplayPart(1, 50.0, tuple(range(10, 20))))
    found = compare_with_simulation(
        Measurement(fleet, trace, Journal(parts, sent), {}), fleet, NO_SLO, Tolerances()
    )
    assert found.predicted.requests.ttft_s == pytest.approx(found.measured.requests.ttft_s)
    assert simulate(fleet, trace).ttft_s[10:].max() > 1.5 * burst.ttft_s.max()


def test_a_fit_that_is_off_is_corrected_by_the_steps_that_were_logged(tmp_path: Path) -> None:
    """Steps take twice what the fit says, all parts alike: the correction finds 2 for both, on the second
    half of the run too. Some steps last a second because the machine was busy: medians do not care."""
    fleet = fleet_of(("w", "mixed", 1))
    log, rng, now_s = StepLog(tmp_path / "w-0.1.steps.jsonl"), np.random.default_rng(0), 1.0
    log.queued("a", 10, 0.0)
    for k in range(600):
        prompt_tokens, context = int(rng.integers(1, 400)), 200
        chunks = [("x", prompt_tokens, 0)] if k % 2 else [("a", 1, context)]
        tokens = sum(n for _, n, _ in chunks)
        pairs = tokens * (tokens + 1) / 2 if k % 2 else 0.0
        decodes, kv = (0, 0) if k % 2 else (1, context + 1)
        t_s = 2 * float(LATENCY.step_s(tokens, pairs, decodes, kv, k % 2))
        t_s += 1.0 if k % 20 == 0 else 0.0
        log.step(now_s, now_s + t_s, chunks)
        now_s += t_s
    log.close()
    logs = {"w-0": read_step_logs(tmp_path.glob("*.jsonl"))}
    trace = Trace("one", np.zeros(1), np.array([10]), np.array([1]))
    run = Measurement(fleet, trace, Journal((ReplayPart(0, 0.0, (0,)),), {}), logs)
    found = correct_fits(compare_steps(run, fleet), fleet)
    assert found[0].held_out_before_frac > 0.4 and found[0].held_out_after_frac < 0.05
    fixed = with_corrections(fleet, found).pools[0].type.latency
    assert fixed.step_s(300, 45150.0, prefills=1) == pytest.approx(
        2 * LATENCY.step_s(300, 45150.0, prefills=1), rel=0.05
    )


def test_a_prefill_that_was_launched_meanwhile_is_no_part_of_the_step_before(tmp_path: Path) -> None:
    """An asynchronous engine reads a step's tokens after it has launched the next one. Here each step takes
    1.5 times what the fit says, but the launch of a prefill lasts until 2 ms before its end, and the decode
    before it seems to last as long. Every step has its own time again, and the correction is 1.5.
    """
    fleet = fleet_of(("w", "mixed", 1))
    log, rng, now_s = StepLog(tmp_path / "w-0.1.steps.jsonl"), np.random.default_rng(0), 1.0
    log.begin("0.26.0", async_scheduling=True)
    log.queued("a", 10, 0.0)
    true_s = []
    for _ in range(300):
        prompt_tokens, context = int(rng.integers(100, 400)), 200
        pairs = prompt_tokens * (prompt_tokens + 1) / 2
        decode_s = 1.5 * float(LATENCY.step_s(1, 0.0, 1, context + 1, 0))
        prefill_s = 1.5 * float(LATENCY.step_s(prompt_tokens, pairs, 0, 0, 1))
        true_s += [decode_s, prefill_s]
        end_s = now_s + decode_s + prefill_s
        log.step(now_s, end_s - 0.002, [("a", 1, context)])
        log.step(now_s, end_s, [("x", prompt_tokens, 0)])
        now_s = end_s
    log.close()
    logs = {"w-0": read_step_logs(tmp_path.glob("*.jsonl"))}
    trace = Trace("one", np.zeros(1), np.array([10]), np.array([1]))
    run = Measurement(fleet, trace, Journal((ReplayPart(0, 0.0, (0,)),), {}), logs)
    compared = compare_steps(run, fleet)
    assert compared[0].table.y == pytest.approx(true_s, rel=1e-3)
    corrected = with_corrections(fleet, correct_fits(compared, fleet)).pools[0].type.latency
    assert corrected.step_s(300, 45150.0, prefills=1) == pytest.approx(
        1.5 * LATENCY.step_s(300, 45150.0, prefills=1), rel=0.05
    )


def test_an_engines_own_clock_stands_still_while_others_compute(tmp_path: Path) -> None:
    """From 10 s on. Idle until 11, then a step of 2 s on the wall and 1 on the CPU; 0.5 s until the next is
    scheduled, 0.2 on the CPU; that one takes 2 s and 1. So 11 is 1, 12 is 1.5, 13 is 2, 13.5 is 2.2 and 15.5
    is 3.2 s. The warm-up before 10 s does not count."""
    log = StepLog(tmp_path / "w-0.1.steps.jsonl")
    log.step(5.0, 6.0, [("warm", 10, 0)], (0.0, 0.1))
    log.has_waited = True
    log.queued("p0r0", 10, 12.0)
    log.scheduled("p0r0", 13.5)
    log.step(11.0, 13.0, [("x", 10, 0)], (0.1, 1.1))
    log.step(13.5, 15.5, [("p0r0", 10, 0)], (1.3, 2.3))
    log.token("p0r0", 1, 15.5)
    log.finished("p0r0")
    log.close()
    own, start_s = read_step_logs(tmp_path.glob("*.jsonl")).on_its_own_clock(10.0)
    assert start_s == 0.0 and own.steps.start_s.tolist() == pytest.approx([1.0, 2.2])
    assert own.steps.t_s.tolist() == pytest.approx([1.0, 1.0])
    served = own.requests["p0r0"]
    assert (served.queued_s, served.scheduled_s, served.token_s[0]) == pytest.approx((1.5, 2.2, 3.2))


def a_disturbed_run(tmp_path: Path) -> tuple[Measurement, Fleet, float]:
    """Two workers that batch and compute as simulated, 20 prompts of 50 tokens each, one at a time, while
    every second step waits 50 ms for the machine; and the seconds of a step without."""
    fleet = fleet_of(("w", "mixed", 2), policies=Policies(routing="round-robin"))
    trace = Trace("even", np.linspace(0.0, 1.95, 40), np.full(40, 50), np.full(40, 1))
    step_s = float(LATENCY.step_s(50, 1275, prefills=1))
    sent = {}
    for worker in range(2):
        log, cpu_s = StepLog(tmp_path / f"w-{worker}.1.steps.jsonl"), 0.0
        for i in range(worker, 40, 2):
            begin_s, delay_s = 100 + float(trace.arrival_s[i]), 0.05 * (i % 4 < 2)
            log.queued(f"p0r{i}", 50, begin_s)
            log.scheduled(f"p0r{i}", begin_s)
            end_s = begin_s + step_s + delay_s
            log.step(begin_s, end_s, [(f"p0r{i}", 50, 0)], (cpu_s, cpu_s + step_s))
            log.token(f"p0r{i}", 1, end_s)
            log.finished(f"p0r{i}")
            cpu_s += step_s
            sent[i] = sent_of(i, float(trace.arrival_s[i]), (end_s - 100,), worker=f"w-{worker}")
        log.close()
    logs = {f"w-{k}": read_step_logs(tmp_path.glob(f"w-{k}.*")) for k in range(2)}
    run = Measurement(fleet, trace, Journal((ReplayPart(0, 100.0, tuple(range(40))),), sent), logs)
    return run, fleet, step_s


def test_on_its_own_clock_a_disturbed_engine_agrees(tmp_path: Path) -> None:
    """Far off on the wall, equal on their own clocks; 10 of 20 steps last 50 ms longer than they ran."""
    run, fleet, step_s = a_disturbed_run(tmp_path)
    disturbed = compare_with_simulation(run, fleet, NO_SLO, Tolerances())
    own = compare_undisturbed(run, fleet, NO_SLO, Tolerances(1e-3, 1e-3))
    assert not disturbed.agrees and own is not None and own.agrees
    assert len(own.measured.requests.ttft_s) == 40
    waits = replace(run.trace, after=np.array([(k + 3, k) for k in range(37)]), think_s=np.full(40, 0.01))
    alike = compare_undisturbed(replace(run, trace=waits), fleet, NO_SLO, Tolerances(1e-3, 1e-3))
    assert alike is not None  # another engine may have answered those: they come when they came
    assert alike.predicted.requests.ttft_s.tolist() == own.predicted.requests.ttft_s.tolist()
    assert own.measured.requests.ttft_s == pytest.approx(step_s, abs=2e-6)
    stolen = 10 * 0.05 / (20 * step_s + 10 * 0.05)
    assert stolen_frac(run.logs["w-0"], 100.0) == pytest.approx(stolen, abs=1e-3)


def test_fits_as_run_know_what_the_wall_saw(tmp_path: Path) -> None:
    """Steps of t and of t + 50 ms in turns: the fit that follows the wall lies between, at their geometric
    mean (log errors), the one on own clocks stays at t."""
    run, fleet, step_s = a_disturbed_run(tmp_path)
    found = fleet_as_run(run, fleet)
    assert found is not None
    wall_s = found.pools[0].type.latency.step_s(50, 1275, prefills=1)
    assert wall_s == pytest.approx((step_s * (step_s + 0.05)) ** 0.5, rel=0.2)
    # It would count twice what others took.
    assert compare_undisturbed(run, found, NO_SLO, Tolerances()) is None
    again = with_corrections(found, correct_fits(compare_steps(run, found), found))
    assert compare_undisturbed(run, again, NO_SLO, Tolerances()) is not None
    own = with_corrections(fleet, correct_fits(compare_steps(run, fleet), fleet)).pools[0].type.latency
    assert own.step_s(50, 1275, prefills=1) == pytest.approx(step_s, rel=0.02)
    assert fleet_as_run(replace(run, logs={}), fleet) is None


def test_the_engines_of_a_pair_agree_each_on_its_own_clock(tmp_path: Path) -> None:
    """One prompt per 100 ms, alone in both engines; each prefill and each decode step waits 20 ms for the
    machine. On the wall far off; on their own clocks the TTFT is that of the prefill, the gaps are those of
    the decode engine, whose E2E is three steps: the first token again. How long the KV took is in neither."""
    fleet = fleet_of(("p", "prefill", 1), ("d", "decode", 1))
    trace = Trace("even", np.linspace(0.0, 3.9, 40), np.full(40, 50), np.full(40, 3))
    prefill_s = float(LATENCY.step_s(50, 1275, prefills=1))
    logs = {name: StepLog(tmp_path / f"{name}.1.steps.jsonl") for name in ("p-0", "d-0")}
    cpu_s, sent = {"p-0": 0.0, "d-0": 0.0}, {}

    def step(name: str, request: str, chunk: tuple[int, int], t_s: float, begin_s: float) -> float:
        end_s = begin_s + t_s + 0.02
        logs[name].step(begin_s, end_s, [(request, *chunk)], (cpu_s[name], cpu_s[name] + t_s))
        logs[name].token(request, 1, end_s)
        cpu_s[name] += t_s
        return end_s

    for i, arrival_s in enumerate(trace.arrival_s.tolist()):
        name, now_s = f"p0r{i}", 100 + arrival_s
        logs["p-0"].queued(name, 50, now_s)
        logs["p-0"].scheduled(name, now_s)
        token_s = [now_s := step("p-0", name, (50, 0), prefill_s, now_s)]
        logs["p-0"].finished(name)
        logs["d-0"].queued(name, 50, now_s)
        logs["d-0"].scheduled(name, now_s := now_s + 0.01)  # the KV is there
        for k in range(3):
            decode_s = float(LATENCY.step_s(1, 0, 1, 50 + k))
            token_s.append(now_s := step("d-0", name, (1, 49 + k), decode_s, now_s))
        logs["d-0"].finished(name)
        ends = tuple(at_s - 100 for at_s in token_s)
        sent[i] = replace(sent_of(i, arrival_s, ends[1:]), workers=("p-0", "d-0"))
    for log in logs.values():
        log.close()
    read = {name: read_step_logs(tmp_path.glob(f"{name}.*")) for name in logs}
    run = Measurement(fleet, trace, Journal((ReplayPart(0, 100.0, tuple(range(40))),), sent), read)
    own = compare_undisturbed(run, fleet, NO_SLO, Tolerances(0.01, 0.01))
    assert not compare_with_simulation(run, fleet, NO_SLO, Tolerances()).agrees
    assert own is not None and own.agrees
    found = {(row.metric, row.percentile_frac): row.measured_s for row in own.rows}
    assert found["ttft", 0.5] == pytest.approx(prefill_s, abs=2e-6)
    assert found["tpot", 0.5] == pytest.approx(float(LATENCY.step_s(1, 0, 1, 51)), rel=0.01)
    assert found["e2e", 0.5] == pytest.approx(3 * found["tpot", 0.5], rel=0.01)


def test_prompts_share_no_beginning_and_have_their_length() -> None:
    """2000 prompts: all first pairs of tokens differ; ids 3 to 999; the same again for the same seed."""
    prompts = [unique_prompt(8, request, 0) for request in range(2000)]
    assert len({tuple(ids[:2]) for ids in prompts}) == 2000
    assert {len(ids) for ids in prompts} == {8} and {len(unique_prompt(n, 5, 0)) for n in (1, 2, 3)} == {
        1,
        2,
        3,
    }
    assert min(map(min, prompts)) >= 3 and max(map(max, prompts)) <= 999
    assert unique_prompt(8, 5, 0) == prompts[5] != unique_prompt(8, 5, 1)


def test_prompts_share_the_trace_s_blocks_and_nothing_else() -> None:
    """Blocks of 16, prompts of 40, 40, 20 and 40 tokens: 0 and 1 share both blocks, 0 and 2 the first and a
    piece of the second, 3 has the same blocks the other way round. What follows is each prompt's own."""
    trace = Trace(
        "blocks",
        np.zeros(4),
        np.array([40, 40, 20, 40]),
        np.ones(4, np.int64),
        prefix_offsets=np.array([0, 2, 4, 6, 8]),
        prefix_ids=np.array([7, 8, 7, 8, 7, 8, 8, 7]),
        prefix_block_tokens=16,
    )
    first, second, short, turned = (trace_prompt(trace, request, 0) for request in range(4))
    assert [len(ids) for ids in (first, second, short, turned)] == [40, 40, 20, 40]
    assert first[:32] == second[:32] and first[32:34] != second[32:34]
    assert short == first[:20] and turned[:32] == first[16:32] + first[:16]
    assert trace_prompt(trace, 0, 0) == first and trace_prompt(trace, 0, 1)[:32] != first[:32]


def test_a_slice_has_the_requests_of_its_workers() -> None:
    """Round robin over two and three workers: the first of each pool serves every fifth request."""
    fleet = fleet_of(("a", "mixed", 2), ("b", "mixed", 3), policies=Policies(routing="round-robin"))
    trace = random_trace(100, 20.0)
    one, part, note = slice_plan(fleet, trace)
    assert [pool.count for pool in one.pools] == [1, 1]
    everyone = np.arange(100) % 5
    assert part.arrival_s.tolist() == trace.arrival_s[(everyone == 0) | (everyone == 2)].tolist()
    assert "2 of 5 workers, 40 of 100 requests" in note


def test_a_slice_of_pairs_carries_what_its_narrower_half_does() -> None:
    """One prefill worker serves all 90 requests, the first of three decode workers a third of them."""
    policies = Policies(decode_routing="round-robin")
    fleet = fleet_of(("p", "prefill", 1), ("d", "decode", 3), policies=policies)
    trace = Trace("even", np.arange(90.0), np.full(90, 20), np.full(90, 3))
    one, part, note = slice_plan(fleet, trace)
    assert [pool.count for pool in one.pools] == [1, 1] and len(part) == 30
    assert "prefill worker 90 and its decode worker 30" in note


def test_a_journal_of_another_run_is_refused_and_a_torn_line_ignored(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    mine = JournalFile(path, {"sha256": "a"})
    mine.write({"part": 0, "start_s": 5.0, "first_s": 2.0})
    mine.write({"part": 0, "sends": 0})
    with path.open("a") as stream:
        stream.write('\n{"request": 0, "par')
    mine.write({"part": 0, "sends": 1})
    assert mine.read() == Journal((ReplayPart(0, 5.0, (0, 1), 2.0),), {})
    with pytest.raises(InputError, match="belongs to another run"):
        JournalFile(path, {"sha256": "b"}).read()


def test_what_identifies_a_run_is_its_fleet_traffic_and_options() -> None:
    fleet, trace = fleet_of(("w", "mixed", 1)), random_trace(5, 1.0)
    base = ValidationSetup(fleet, trace, NO_SLO, 512)
    others = [
        replace(base, seed=1),
        replace(base, max_model_len=1024),
        replace(base, engine="rehearsal"),
        replace(base, trace=random_trace(5, 1.0, seed=1)),
        replace(base, fleet=fleet_of(("w", "mixed", 2))),
    ]
    assert base.identity() == replace(base, notes=("x",)).identity()
    assert all(other.identity() != base.identity() for other in others)


@pytest.mark.long
def test_a_rehearsal_agrees_with_the_simulator_and_writes_it_all(
    tmp_path: Path, run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that take as long as the fit says, but batch by a program of their own: medians are those
    of the simulation (within 25 %: on a busy machine requests reach them late), every token is counted by the
    engines, and the SLO decides the exit code. A run that is complete is compared again without engines; one
    of another seed is refused."""
    fleet = fleet_of(("w", "mixed", 2), latency=LATENCY.with_longer_steps(1.0))
    trace = random_trace(100, 40.0)
    folder = a_folder(tmp_path, fleet, trace)
    (folder / "slo.yaml").write_text("llm: meta-llama/Llama-3.1-8B\nslo: {e2e: {p90: 1 ms}}\n")
    done = run(folder, "--slo", "slo.yaml", "--json")
    assert done.code == 5, done.err
    told = json.loads(done.out)
    assert told == json.loads((folder / "out" / "validation.json").read_text())
    assert (told["finished"], told["failed"], told["rejected"]) == (100, 0, 0)
    assert told["verdict"].startswith("A rehearsal: its engines take as long as the fits say")
    # It said "on its whole traffic" of a minute at a lower rate, too.
    assert f"MISSES the SLO on 100 requests at {trace.rate_rps:.3g}/s in the simulation" in told["verdict"]
    assert told["times"] == "engines' step logs" and told["slo_kept"] is False
    for row in told["errors"]:
        if row["percentile"] == "p50":
            assert abs(row["error_frac"]) < 0.25, row
    engines = told["parts"][0]["engines"]
    assert sum(engine["prompt_tokens"] for engine in engines) == trace.input_tokens.sum()
    assert sum(engine["generation_tokens"] for engine in engines) == trace.output_tokens.sum()
    assert {engine["kv_tokens"] for engine in engines} == {16_000}
    assert {engine["kv_cache_usage_perc"] for engine in engines} == {0.0}
    assert all(abs(one["bias_frac"]) < 0.01 for one in told["steps"])
    page = (folder / "out" / "report.html").read_text()
    assert "MISSED" in page and page.count("<div class=still") == 7
    assert not re.search(r"""(src|href)=["']?http|url\(http|@import""", page)
    again = read_fleet(folder / "out" / "corrected.yaml", CATALOG)
    assert again.pools[0].count == 2 and "calibrated" in again.pools[0].type.latency.basis
    own = read_catalog(folder / "out" / "catalog").step_latency(LLM, CATALOG.gpu("h100-80g"), 1)
    for step in ((300, 45150.0, 0, 0, 1), (4, 0, 4, 800, 0)):  # one pool: the catalog's fit is the pool's
        assert own.step_s(*step) == pytest.approx(again.pools[0].type.latency.step_s(*step), rel=1e-5)
    assert told["replanned"] == {
        "kept_by_own_fits": False,
        "kept": False,
        "is_exact": False,
        "plan": {"w": 2},
        "fewest_by_own_fits": None,
        "fewest": None,
    }
    assert told["machine"] and told["machine"] == told["parts"][0]["machine"]
    assert told["slo_kept_by_client"] is False and told["attainment"]["client"] == 0
    requests = (folder / "out" / "requests.csv").read_text().splitlines()
    assert len(requests) == 101 and requests[1].endswith("finished")

    monkeypatch.setattr(workers, "run_engines", None)
    done = run(folder)
    assert done.code == 0 and "The SLO" not in done.out
    assert run(folder, "--strict", "--tolerance-p50", "0").code == 6
    compared = json.loads((folder / "out" / "validation.json").read_text())
    assert [row["error_frac"] for row in compared["errors"]] == [row["error_frac"] for row in told["errors"]]
    assert compared["agrees"] is False and "does NOT agree" in compared["verdict"]
    refused = run(folder, "--seed", "1")
    assert refused.code == 1 and "belongs to another run" in refused.err


@pytest.mark.slow
def test_an_interrupted_run_says_what_is_missing_and_goes_on(
    tmp_path: Path, run: Callable[..., Outcome]
) -> None:
    """SIGTERM after a second of two: exit code 1 and a count; the same command sends the rest, and each
    request has one outcome. Every third request waits for the one six before it, across the gap too: none was
    sent before that had been answered, unless in an earlier part."""
    after = np.array([(child, child - 6) for child in range(6, 60, 3)])
    trace = replace(random_trace(60, 30.0), after=after, think_s=np.full(60, 0.05))
    folder = a_folder(tmp_path, fleet_of(("w", "mixed", 1)), trace)
    command = [sys.executable, "-m", "planner.cli", *OPTIONS]
    journal = folder / "out" / "journal.jsonl"
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as plan:
        deadline_s = time.monotonic() + 60
        while not (journal.exists() and journal.read_text().count('"status"') > 20):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        plan.send_signal(signal.SIGTERM)
        assert plan.stderr is not None
        said = plan.stderr.read()
        assert plan.wait(timeout=30) == 1
    assert "requests have not ended" in said and "Traceback" not in said
    done = run(folder, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["finished"] == 60 and [part["part"] for part in told["parts"]] == [0, 1]
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    assert sorted(row["request"] for row in rows if "status" in row) == list(range(60))
    sent = {row["request"]: row for row in rows if "status" in row}
    assert {row["part"] for row in sent.values()} == {0, 1}
    for child, parent in after.tolist():
        same = sent[child]["part"] == sent[parent]["part"]
        assert sent[child]["sent_s"] > 0.05 + (sent[parent]["end_s"] if same else 0.0) - 1e-5
    assert any(sent[child]["part"] > sent[parent]["part"] for child, parent in after.tolist())


def test_a_rehearsal_leaves_out_what_an_engine_adds(tmp_path: Path, run: Callable[..., Outcome]) -> None:
    """Its engines take as long as the fits say, and so does what they are compared with."""
    folder = a_folder(tmp_path, fleet_of(("w", "mixed", 1)), random_trace(8, 20.0))
    fleet = yaml.safe_load((folder / "fleet.yaml").read_text())
    slow = {"name": "vllm", "version": "0.11", "front_end": "5 s"}
    (folder / "fleet.yaml").write_text(yaml.safe_dump(fleet | {"engine": slow}))
    slo = tmp_path / "every.yaml"
    slo.write_text(f"llm: {fleet['llm']}\nslo: {{ttft: {{p90: 1 min}}, every: 1 s}}\n")
    done = run(folder, "--json", "--slo", str(slo))
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["finished"] == 8
    assert any("Not judged: the SLO in every window" in note for note in told["notes"])
    assert any("Rehearsed without what vLLM 0.11" in note for note in told["notes"])


@pytest.mark.skipif(is_installed(), reason="vLLM is installed")
def test_without_vllm_validation_is_one_clear_line(tmp_path: Path) -> None:
    setup = ValidationSetup(fleet_of(("w", "mixed", 1)), random_trace(3, 1.0), NO_SLO, 512)
    with pytest.raises(InputError, match=r"needs vLLM: pip install vllm.*--engine rehearsal"):
        validate(setup, tmp_path / "out")


def test_two_validations_into_one_folder_are_refused(tmp_path: Path) -> None:
    """The second in one line, before an engine starts; what the first has written stays."""
    setup = ValidationSetup(
        fleet_of(("w", "mixed", 1)), random_trace(3, 1.0), NO_SLO, 512, engine="rehearsal"
    )
    with reserve_folder(tmp_path / "out"):
        (tmp_path / "out" / "journal.jsonl").write_text("the first")
        with pytest.raises(InputError, match="out: another run is writing into it"):
            validate(setup, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["journal.jsonl"]
    assert (tmp_path / "out" / "journal.jsonl").read_text() == "the first"


def test_a_policy_that_vllm_does_not_run_is_refused(tmp_path: Path) -> None:
    fleet = fleet_of(("w", "mixed", 1), policies=Policies(batching="orca"))
    setup = ValidationSetup(fleet, random_trace(3, 1.0), NO_SLO, 512, engine="rehearsal")
    with pytest.raises(InputError, match=r"policies.batching is 'orca': our engines do 'vllm-v1'"):
        engine_commands(setup, tmp_path)


def test_what_engines_cannot_be_made_to_do_is_refused(tmp_path: Path) -> None:
    """A prediction in which a worker goes down could not be compared; Vidur's restarts are no engine's."""
    trace = random_trace(3, 1.0)
    fleet = fleet_of(("w", "mixed", 2))
    down = replace(fleet, disturbances=(Disturbance(1.0, "down", 0),))
    with pytest.raises(InputError, match="disturbances: a validation does not make them happen"):
        validate(ValidationSetup(down, trace, NO_SLO, 512, engine="rehearsal"), tmp_path / "out")
    restarts = replace(fleet, policies=Policies(vidur_restarts=True))
    with pytest.raises(InputError, match=r"policies.vidur_restarts is True: our engines do False"):
        engine_commands(ValidationSetup(restarts, trace, NO_SLO, 512, engine="rehearsal"), tmp_path)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_rehearsal_keeps_prefixes_where_the_plan_does(prefix_cache: bool, tmp_path: Path) -> None:
    fleet = fleet_of(("w", "mixed", 1), policies=Policies(prefix_cache=prefix_cache))
    setup = ValidationSetup(fleet, random_trace(3, 1.0), NO_SLO, 512, engine="rehearsal")
    command = engine_commands(setup, tmp_path)[0](workers.place_workers(fleet, tmp_path, None)[0], 8000)
    assert json.loads(command.argv[-1])["prefix_cache"] is prefix_cache


def test_engines_with_less_room_than_planned_are_named(tmp_path: Path) -> None:
    """A pool was planned with 16,000 KV tokens; vLLM found room for 12,800 on one worker and 16,384 on the
    other: only the first is named."""
    fleet, trace = fleet_of(("w", "mixed", 2)), random_trace(2, 1.0)
    setup = ValidationSetup(fleet, trace, NO_SLO, 512, engine="rehearsal", notes=("a slice",))
    file = JournalFile(tmp_path / "journal.jsonl", setup.identity())
    file.write({"part": 0, "start_s": 0.0, "first_s": 0.0})
    for i in range(2):
        file.write({"part": 0, "sends": i})
        at_s = float(trace.arrival_s[i])
        tokens = tuple(at_s + 0.1 * (k + 1) for k in range(int(trace.output_tokens[i])))
        file.write(asdict(sent_of(i, at_s, tokens)))
    engines = [{"worker": "w-0", "kv_tokens": 12_800}, {"worker": "w-1", "kv_tokens": 16_384}]
    file.write({"record": {"part": 0, "date": "2026-11-20", "engines": engines}})
    said = reader_notes(analyse_run(setup, tmp_path, Tolerances()))
    assert said[0] == "a slice" and len(said) == 2
    assert said[1].startswith("w-0 holds 12,800 KV tokens, where the plan assumes 16,000")


def test_how_late_the_client_was_is_known() -> None:
    sent = [replace(sent_of(0, 1.0, (2.0,)), sent_s=1.25), sent_of(1, 2.0, (3.0,))]
    assert lateness_s(sent) == pytest.approx(0.25)
    fleet, trace = fleet_of(("w", "mixed", 1)), random_trace(2, 1.0)
    run = Measurement(fleet, trace, Journal((ReplayPart(0, 0.0, (0, 1)),), dict(enumerate(sent))), {})
    assert not run.is_timed_by_engines and not len(outside_s(run))


def test_a_plans_own_traffic_keeps_sessions_prefixes_and_tenants(tmp_path: Path) -> None:
    """Written and read again: the same trace; it comes before requests.csv, which has none of the three."""
    trace = replace(
        random_trace(3, 1.0),
        tenant=np.array([0, 1, 0]),
        tenants=("a", "b"),
        after=np.array([[2, 0]]),
        think_s=np.array([0.0, 0.0, 1.5]),
        prefix_offsets=np.array([0, 1, 1, 3]),
        prefix_ids=np.array([7, 7, 9]),
        prefix_block_tokens=2,
    )
    trace = with_nominal_arrivals(replace(trace, arrival_s=np.array([0.0, 0.5, 2.0])))
    (tmp_path / "requests.csv").write_text("")
    assert traffic_beside_plan(tmp_path / "plan.yaml") == tmp_path / "requests.csv"
    (tmp_path / "traffic.jsonl").write_text(to_jsonl(trace))
    again = read_trace(traffic_beside_plan(tmp_path / "plan.yaml"))
    for name in (
        "arrival_s",
        "input_tokens",
        "output_tokens",
        "tenant",
        "after",
        "think_s",
        "prefix_offsets",
        "prefix_block_tokens",
        "prefix_ids",
        "tenants",
    ):
        assert np.array_equal(getattr(again, name), getattr(trace, name)), name


def test_the_plans_own_slo_is_taken(tmp_path: Path) -> None:
    """A plan.yaml carries its promise, a fleet.yaml has none."""
    folder = a_folder(tmp_path, fleet_of(("w", "mixed", 1)), random_trace(10, 50.0))
    assert own_slo(folder / "fleet.yaml") == NO_SLO
    document = read_yaml(folder / "fleet.yaml") | {"slo": {"e2e": {"p50": "2 s"}, "attainment": 0.9}}
    (folder / "fleet.yaml").write_text(to_yaml(document))
    assert own_slo(folder / "fleet.yaml") == Slo((Limit("e2e", 0.5, 2.0),), 0.9)
