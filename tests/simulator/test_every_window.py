"""The SLO in every window: against windows cut out by hand and by the plain simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from shares import some
from simulations import one_bad_hour, random_case
from simulator_reference import Reference

from planner.domain import Limit, Slo, allowed_above
from planner.simulator.measured_values import percentile_s
from planner.simulator.replay import RequestRecords, simulate, simulate_if_kept
from planner.simulator.slo_verdict import in_windows, judge_slo, windows_s
from planner.traffic import trace as traces
from planner.traffic.trace import Trace, measured_window


def test_a_bad_hour_that_the_whole_hides() -> None:
    """1800 requests, 12 of them warm-up, all but 360 answered in 1 s. In the bad hour a fifth each takes 1 to
    5 s: 288 late by a limit of 1.5 s, which is 16 % of the whole, kept at p80; 80 % late in that hour. The
    windows begin at 120 s, so that the bad hour, from 7200 s on, lies in the second and the third."""
    fleet, trace = one_bad_hour()
    limit = Limit("ttft", 0.8, 1.5)
    simulation = simulate(fleet, trace, limits=(limit,), record=True)
    whole = judge_slo(simulation, Slo((limit,)))
    assert whole.holds and whole.windows == 0 and whole.lines[0].worst is None
    assert whole.lines[0].kept_frac == pytest.approx(1 - 288 / 1788)
    every = judge_slo(simulation, Slo((limit,), every_s=3600.0))
    line = every.lines[0]
    assert not every.holds and not line.holds and every.windows == 5
    assert line.value_s == whole.lines[0].value_s == 1.0
    worst = line.worst
    assert worst is not None and (worst.start_s, worst.end_s) == (7320.0, 10920.0)
    arrival_s, late = trace.arrival_s, simulation.ttft_s > 1.5
    inside = (arrival_s >= 7320) & (arrival_s < 10920)
    assert worst.kept_frac == pytest.approx(1 - late[inside].sum() / inside.sum())
    assert worst.value_s == percentile_s(simulation.ttft_s[inside], 0.8) == 4.0
    assert (line.deciding_s, line.deciding_frac) == (4.0, worst.kept_frac)


def test_an_attainment_must_hold_in_every_window_too() -> None:
    """The same: 84 % keep the limit, in the worst window 23 %; the percentile alone (p20) holds."""
    fleet, trace = one_bad_hour()
    limits = (Limit("ttft", 0.2, 1.5),)
    simulation = simulate(fleet, trace, limits=limits, record=True)
    assert judge_slo(simulation, Slo(limits, 0.8)).holds
    every = judge_slo(simulation, Slo(limits, 0.8, 3600.0))
    assert every.lines[0].holds and not every.attainment_holds and not every.holds
    assert every.attainment_worst is not None
    assert every.attainment_worst.kept_frac == pytest.approx(every.lines[0].worst.kept_frac)  # type: ignore[union-attr]


def test_one_window_is_the_whole() -> None:
    fleet, trace = one_bad_hour()
    limit = Limit("ttft", 0.8, 1.5)
    simulation = simulate(fleet, trace, limits=(limit,), record=True)
    verdict = judge_slo(simulation, Slo((limit,), 0.5, 86400.0))
    assert verdict.holds and verdict.windows == 1
    worst = verdict.lines[0].worst
    assert worst is not None
    assert (worst.value_s, worst.kept_frac) == (verdict.lines[0].value_s, verdict.lines[0].kept_frac)


def values_in(slow: Reference, trace: Trace, edges_s: list[float], metric: str) -> list[list[float]]:
    """Values of each window [edge, next), the last one closed, out of the plain simulator's requests."""
    end_s = measured_window(trace)[1]

    def window(time_s: float) -> int | None:
        if not edges_s[0] <= time_s <= end_s:
            return None
        return max(v for v in range(len(edges_s) - 1) if edges_s[v] <= time_s)

    found: list[list[float]] = [[] for _ in edges_s[1:]]
    for request in slow.requests:
        pairs = (
            [(request.arrival_s, float(getattr(request, f"{metric}_s")))] if metric != "tbt" else request.gaps
        )
        if metric == "tpot" and request.output < 2:
            continue
        for at_s, value_s in pairs:
            if (v := window(at_s)) is not None:
                found[v].append(math.inf if math.isnan(value_s) else value_s)
    return found


@pytest.mark.parametrize("seed", some(range(40), 14))
def test_each_window_is_counted_as_if_it_were_cut_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random cases, windows of three requests or more: what the kernel counts while it searches, what
    recorded runs say, and the percentile of the worst window, against the plain simulator's values."""
    monkeypatch.setattr(traces, "WINDOW_REQUESTS", 3)
    fleet, trace, limits, _ = random_case(seed, dyadic=False)
    every_s = max(float(trace.arrival_s[-1]) / 6, 1e-3)
    endless = tuple(replace(limit, percentile_frac=0.0) for limit in limits)  # nothing stops early
    counted = simulate_if_kept(fleet, trace, endless, RequestRecords(trace), every_s)
    assert counted is not None
    recorded = simulate(fleet, trace, limits=limits, record=True)
    slow = Reference(fleet, trace).run()
    edges_s = windows_s(recorded, every_s)
    assert np.array_equal(edges_s, counted.edges_s)
    verdict = judge_slo(recorded, Slo(limits, every_s=every_s))
    for k, limit in enumerate(limits):
        parts = values_in(slow, trace, edges_s.tolist(), limit.metric)
        late = [sum(value > limit.limit_s for value in part) for part in parts]
        assert counted.counted_in[k].tolist() == [len(part) for part in parts]
        assert counted.violations_in[k].tolist() == late
        assert int(counted.violations_in[k].sum()) == int(counted.violations[k])
        holds = [
            n <= allowed_above(limit.percentile_frac, len(part)) for n, part in zip(late, parts, strict=True)
        ]
        assert [each.holds for each in in_windows(recorded, k, edges_s)] == holds
        assert verdict.lines[k].holds == all(holds)
        values_s = [percentile_s(np.array(part), limit.percentile_frac) for part in parts if part]
        if values_s:
            assert verdict.lines[k].worst.value_s == pytest.approx(max(values_s), rel=1e-9)  # type: ignore[union-attr]
            assert verdict.lines[k].holds == (verdict.lines[k].worst.value_s <= limit.limit_s)  # type: ignore[union-attr]


@pytest.mark.long
def test_stopping_early_in_a_window_never_changes_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `keeps` says of random cases is what the whole run says; some hold, some miss, and many of those
    that miss in a window alone are stopped before the end."""
    monkeypatch.setattr(traces, "WINDOW_REQUESTS", 3)
    verdicts, stopped, alone = [], 0, 0
    for seed in range(400):
        fleet, trace, limits, _ = random_case(seed, dyadic=False)
        rng = np.random.default_rng(seed)
        factor, many = float(rng.choice([1, 10, 100])), int(rng.integers(1, 5))
        limits = tuple(replace(limit, limit_s=limit.limit_s * factor) for limit in limits[:many])
        attainment_frac = float(rng.choice([0.1, 0.9]))
        slo = Slo(limits, attainment_frac, max(float(trace.arrival_s[-1]) / 5, 1e-3))
        whole = simulate(fleet, trace, limits=limits, record=True)
        found = simulate_if_kept(fleet, trace, limits, RequestRecords(trace), slo.every_s)
        holds = judge_slo(whole, slo).holds
        assert holds == (found is not None and judge_slo(found, slo, with_percentiles=False).holds)
        over_all = judge_slo(whole, replace(slo, every_s=None)).holds
        assert over_all or not holds  # in every window, so over the whole
        verdicts.append(holds)
        alone += over_all and not holds
        stopped += over_all and not holds and found is None
    assert 20 < sum(verdicts) < 380
    assert alone > 10 and stopped > 5


def test_gaps_of_windows_need_recorded_runs() -> None:
    fleet, trace, limits, _ = random_case(3, dyadic=False)
    gaps = tuple(limit for limit in limits if limit.metric == "tbt")
    simulation = simulate(fleet, replace(trace, output_tokens=trace.output_tokens + 3), limits=gaps)
    with pytest.raises(ValueError, match="record=True"):
        judge_slo(simulation, Slo(gaps, every_s=1.0))
