"""How often `plan watch` raises a false alarm, and how soon it finds a shift.

    python benchmarks/watch.py [--traces FOLDER] [--runs 100]

1. Stationary traffic, 1,000 windows of 1 min, compared with a plan's traffic of 2 h from the same generator:
   the share of runs with an alarm in any quantity, in either direction. At most 1 % is promised.
2. The same with redraws of recorded traces (planner/traffic/redraw.py), each compared with its trace.
3. A shift of 15 % after two hours as planned: the minutes until an alarm, and the share of runs with an alarm
   within 20 min.
4. ServeGen's recorded day as metrics (simulated, exported, and read like Prometheus' answers), compared with
a
   redraw of it.

FOLDER has AzureLLMInferenceTrace_{conv,code}.csv, mooncake_conversation_trace.jsonl.gz and
servegen/m-large-day9-1in20.csv.gz; parts 2 and 4 are left out without it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from live_metrics import exported
from plans import mixed

from benchmarks.generated_traffic import lognormal
from planner.importers.prometheus_range import parse_answer
from planner.importers.vllm_metrics import live_traffic
from planner.simulator.replay import simulate
from planner.studies.plan_watch import (
    LiveDrift,
    Reference,
    drift_of,
    drifts_of,
    plan_references,
    stretch_lengths,
)
from planner.traffic.redraw import redraw_trace
from planner.traffic.trace import Trace, spread_stamps
from planner.traffic.trace_reading import read_trace

WINDOW_S, WINDOWS = 60.0, 1000
SHIFT = 1.15
KINDS = ((3, 1), (5, 1), (10, 1), (3, 2), (10, 2), (30, 2), (30, 4))  # requests/s, CV of gaps
RECORDED = (
    "AzureLLMInferenceTrace_conv.csv",
    "AzureLLMInferenceTrace_code.csv",
    "mooncake_conversation_trace.jsonl.gz",
    "servegen/m-large-day9-1in20.csv.gz",
)


def drawn(rng: np.random.Generator, hours: float, rate_rps: float, gap_cv: float) -> Trace:
    """Requests with gamma gaps, and lengths with a coefficient of variation of 1."""
    n = int(hours * 3600 * rate_rps * (1 + 0.05 * gap_cv)) + 1000
    at_s = np.cumsum(rng.gamma(gap_cv**-2, gap_cv**2 / rate_rps, n))
    at_s = at_s[at_s < hours * 3600]
    return Trace("drawn", at_s, lognormal(1000, 1.0)(rng, len(at_s)), lognormal(250, 1.0)(rng, len(at_s)))


def head(*columns: str) -> None:
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def joined(*parts: Trace, starts_s: list[float]) -> Trace:
    return Trace(
        "joined",
        np.concatenate([part.arrival_s + start for part, start in zip(parts, starts_s, strict=True)]),
        np.concatenate([part.input_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
    )


def found(refs: dict[str, Reference], trace: Trace) -> dict[str, LiveDrift]:
    """The drift of each quantity over the windows of a trace, compared with the plan's traffic (`refs`)."""
    number = ((trace.arrival_s - trace.arrival_s[0]) // WINDOW_S).astype(int)
    windows = int(number[-1])

    def per_window(tokens: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
        return np.bincount(number, weights=tokens, minlength=windows)[:windows].astype(float)

    requests, edges_s = per_window(), np.arange(windows + 1, dtype=np.float64) * WINDOW_S
    rows = {
        "rate": (requests, np.full(windows, WINDOW_S)),
        "prompt": (per_window(trace.input_tokens), requests),
        "output": (per_window(trace.output_tokens), requests),
    }
    return {what: drift_of(refs[what], *row, edges_s, 6) for what, row in rows.items()}


def is_false(drifts: dict[str, LiveDrift]) -> bool:
    return any(drift.is_drift or drift.past for drift in drifts.values())


def false_alarms(runs: int) -> None:
    head("requests/s", "CV of gaps", f"runs of {WINDOWS} windows", "with a false alarm", "phi of the rate")
    for rate_rps, gap_cv in KINDS:
        false, phi = 0, []
        for seed in range(runs):
            rng = np.random.default_rng(seed)
            refs = plan_references(drawn(rng, 2.0, rate_rps, gap_cv), None)
            drifts = found(refs, drawn(rng, WINDOWS / 60, rate_rps, gap_cv))
            false += is_false(drifts)
            phi.append(drifts["rate"].dispersion)
        print(f"| {rate_rps} | {gap_cv} | {runs} | {false} | {np.median(phi):.1f} |", flush=True)


def recorded(folder: Path, name: str) -> Trace:
    trace = spread_stamps(read_trace(folder / name), seed=0)
    return Trace(name, trace.arrival_s - trace.arrival_s[0], trace.input_tokens, trace.output_tokens)


def false_alarms_on_recorded(folder: Path, runs: int) -> None:
    head(
        "trace, redrawn",
        f"runs of {WINDOWS} windows or more",
        "with a false alarm",
        "levels of rate, prompt, output",
    )
    for name in RECORDED:
        trace = recorded(folder, name)
        refs, false = plan_references(trace, None), 0
        for seed in range(runs):
            rng = np.random.default_rng(seed)
            copies = max(round(WINDOWS * WINDOW_S / trace.duration_s), 1)
            parts = [redraw_trace(trace, rng) for _ in range(copies)]
            starts_s = [trace.duration_s * k for k in range(copies)]
            false += is_false(found(refs, joined(*parts, starts_s=starts_s)))
        levels = "; ".join(
            f"{refs[what].low:.3g} to {refs[what].high:.3g}" for what in ("rate", "prompt", "output")
        )
        print(f"| {name} | {runs} | {false} | {levels} |", flush=True)


def shifts(runs: int) -> None:
    head("requests/s", "CV of gaps", "shifted", "found within 20 min", "median, min", "9 in 10, min")
    for rate_rps, gap_cv in KINDS:
        for what in ("rate", "prompt"):
            minutes = []
            for seed in range(runs):
                rng = np.random.default_rng(seed)
                refs = plan_references(drawn(rng, 2.0, rate_rps, gap_cv), None)
                before = drawn(rng, 2.0, rate_rps, gap_cv)
                after = drawn(rng, 2.0, rate_rps * (SHIFT if what == "rate" else 1.0), gap_cv)
                after = stretch_lengths(after, SHIFT if what == "prompt" else 1.0, 1.0)
                drift = found(refs, joined(before, after, starts_s=[0.0, 7200.0]))[what]
                minutes.append((drift.noticed_s - 7200) / 60 if drift.noticed_s else np.inf)
            soon = np.mean(np.array(minutes) <= 20)
            middle, most = np.percentile(minutes, (50, 90), method="higher")
            print(
                f"| {rate_rps} | {gap_cv} | {what} | {100 * soon:.0f} % | {middle:.0f} | {most:.0f} |",
                flush=True,
            )


def recorded_day(folder: Path, runs: int) -> None:
    trace = recorded(folder, RECORDED[-1])
    simulation = simulate(mixed("h100-80g", 4, 6), trace)
    began_s = time.process_time()
    seen = live_traffic(parse_answer(exported(simulation), "day"))
    took_s = time.process_time() - began_s
    false = 0
    for seed in range(runs):
        refs = plan_references(redraw_trace(trace, np.random.default_rng(seed)), None)
        false += is_false({drift.what: drift for drift in drifts_of(refs, seen)})
    print(
        f"\nrecorded day, {len(trace)} requests, {seen.windows} windows, {seen.instances} engines, against "
        f"{runs} redraws: {false} with a false alarm; written and read in {took_s:.1f} CPU s"
    )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--traces", type=Path)
    options.add_argument("--runs", type=int, default=100)
    asked = options.parse_args()
    false_alarms(asked.runs)
    shifts(max(asked.runs // 2, 1))
    if asked.traces is not None:
        recorded_day(asked.traces, max(asked.runs // 10, 1))
        false_alarms_on_recorded(asked.traces, max(asked.runs // 4, 1))


if __name__ == "__main__":
    main()
