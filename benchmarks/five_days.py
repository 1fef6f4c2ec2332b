"""Simulates days under controllers: the cost of each above the optimum by cause, and lower bounds on the
cost.

    python benchmarks/five_days.py TRACES [--train "70 %"] [--days large,mid,small,azure,bursty] [--queue sjf]
        [--seed 1] [--before 3] [--missed "1 %"] [--controllers fleetplan] [--timetables 500]
        [--billing hour] [--every "5 min"]

TRACES holds servegen/ (a day of m-large and three curves of two weeks) and the Azure conversation trace. Of
each curve the second day is drawn as in benchmarks/day.py, with ten requests/s on average. "azure" repeats
the trace's hour twelve times, thinned by a daily curve. "bursty" has m-large's mean rate and gaps with a
coefficient of variation of 5.

Small days ("chat-1" to "chat-3", "pair") are drawn from the same curves with 1.5 or 3 requests/s for
Llama-3.1-8B on 1 to 10 A100; "pair" has prefill and decode workers. Another --seed draws other days of the
same kind, on which controllers can be judged. With --before, controllers are fitted to so many days of the
curve before a small day, and judged on the whole day.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.day import SLO, STEP_S, drawn
from benchmarks.timetables import attack
from planner.api.inputs import read_trace
from planner.day import day_causes
from planner.day.day_api import DayResult, day
from planner.traffic.trace import Trace
from planner.units import HOUR_S

LARGE = {"llm": SLO["llm"], "workers": [{"name": "h100", "gpu": "h100-80g", "tp": 4, "count": 6}]}
SMALL_SLO = {
    "llm": "meta-llama/Llama-3.1-8B",
    "slo": {"ttft": {"p95": "1 s"}, "tbt": {"p99": "100 ms"}, "every": "10 min"},
    "fleet": {"gpus": {"a100-80g": 16}, "sold_as": {"a100-80g": "gpu"}},
}
SMALL = {
    "llm": SMALL_SLO["llm"],
    "sold_as": {"a100-80g": "gpu"},
    "workers": [{"name": "a100", "gpu": "a100-80g", "tp": 1, "count": 5}],
}
MEAN_RPS = 10.0
BURSTY_CV = 5.0
AZURE_HOURS = 12
KEYS_OF_DAY = ("controllers", "missed", "billing", "every")  # Options that are keys of the section `day`.
STEPS_OF_DAY = 144


PAIR = {
    **SMALL,
    "workers": [
        {"name": role, "role": role, "gpu": "a100-80g", "tp": 1, "count": 3} for role in ("prefill", "decode")
    ],
}


def curve_day(
    traces: Path, name: str, *, day: int = 1, before: int = 0, mean_rps: float = MEAN_RPS, seed: int = 0
) -> Trace:
    """A day of a curve of rates after so many `before` it, lengths from the same time of m-large's day."""
    seen, rates = (
        read_trace(traces / "servegen/m-large-day9-1in20.csv.gz"),
        traces / f"servegen/m-{name}-rates.csv",
    )
    table = np.genfromtxt(rates, delimiter=",", names=True)[day * STEPS_OF_DAY : (day + 1) * STEPS_OF_DAY]
    one_in = float(table["requests_per_s"].mean()) / mean_rps
    first, steps = (day - before) * STEPS_OF_DAY, (before + 1) * STEPS_OF_DAY
    return drawn(seen, rates, first=first, steps=steps, one_in=one_in, seed=seed)


def azure_day(traces: Path) -> Trace:
    """The hour twelve times, thinned to 15 % at the ends and whole in the middle."""
    hour, rng = read_trace(traces / "AzureLLMInferenceTrace_conv.csv"), np.random.default_rng(1)
    at_s, length_s = hour.arrival_s - hour.arrival_s[0], hour.duration_s + 1
    arrivals, rows = [], []
    for k in range(AZURE_HOURS):
        share = 0.15 + 0.85 * np.sin(np.pi * (k + at_s / length_s) / AZURE_HOURS) ** 2
        rows.append(np.flatnonzero(rng.random(len(hour)) < share))
        arrivals.append(at_s[rows[-1]] + k * length_s)
    index = np.concatenate(rows)
    return Trace("azure", np.concatenate(arrivals), hour.input_tokens[index], hour.output_tokens[index])


def bursty_day(traces: Path) -> Trace:
    """m-large's requests in their order, with gamma gaps."""
    seen, rng = read_trace(traces / "servegen/m-large-day9-1in20.csv.gz"), np.random.default_rng(2)
    gaps = rng.gamma(1 / BURSTY_CV**2, size=len(seen))
    arrival_s = STEPS_OF_DAY * STEP_S * np.cumsum(gaps) / gaps.sum()
    return Trace("bursty", arrival_s, seen.input_tokens, seen.output_tokens)


FIVE = ("large", "mid", "small", "azure", "bursty")
# Of each small day: the curve, the day of the curve, and the mean requests/s.
SMALL_DAYS = {
    "chat-1": ("small", 1, 3.0),
    "chat-2": ("large", 3, 3.0),
    "chat-3": ("large", 4, 1.5),
    "pair": ("mid", 4, 3.0),
}


def small_day(traces: Path, name: str, seed: int, before: int = 0) -> Trace:
    """One of SMALL_DAYS after so many days before it, drawn anew for each seed."""
    curve, number, mean_rps = SMALL_DAYS[name]
    return curve_day(traces, curve, day=number, before=before, mean_rps=mean_rps, seed=seed)


DAYS: dict[str, tuple[Callable[[Path], Trace], Any, Any]] = {
    "large": (lambda traces: read_trace(traces / "servegen/m-large-day9-1in20.csv.gz"), SLO, LARGE),
    "mid": (lambda traces: curve_day(traces, "mid"), SLO, LARGE),
    "small": (lambda traces: curve_day(traces, "small"), SLO, LARGE),
    "azure": (azure_day, SMALL_SLO, SMALL),
    "bursty": (bursty_day, SLO, LARGE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--train")
    parser.add_argument("--days", default=",".join(FIVE))
    parser.add_argument("--queue", default="fcfs", help="one order of the queue, or several: fcfs,sjf")
    parser.add_argument("--seed", type=int, default=0, help="of small days")
    parser.add_argument("--before", type=int, default=0, help="days that train, of small days")
    parser.add_argument("--missed", help="the share of windows that may be missed")
    parser.add_argument("--controllers", help="names, with commas; all if left out")
    parser.add_argument("--billing", help="second or hour")
    parser.add_argument("--every", help="the optimum's grid")
    parser.add_argument("--timetables", type=int, default=0, help="how many are held against the optimum")
    options = parser.parse_args()
    for name in options.days.split(","):
        before = min(options.before, SMALL_DAYS[name][1]) if name in SMALL_DAYS else 0
        read, slo, fleet = (
            (
                partial(small_day, name=name, seed=options.seed, before=before),
                SMALL_SLO,
                PAIR if name == "pair" else SMALL,
            )
            if name in SMALL_DAYS
            else DAYS[name]
        )
        began = time.process_time()
        train = f"{100 * before / (before + 1):.6g} %" if before else options.train
        given = {"train": train} | {key: getattr(options, key) for key in KEYS_OF_DAY}
        terms = {name: value for name, value in given.items() if value is not None}
        first, *others = options.queue.split(",")
        question = {**slo, "policies": {"queue": [first, *others]}}
        stands = {**fleet, "policies": {"queue": first}}
        result = day(question, read(options.traces), standing=stands, terms=terms, time_limit_s=900.0)
        assert isinstance(result, DayResult)
        print(f"{name}: {result.headline()}", *result.sentences()[:4], sep="\n")
        for each in result.answer.fleets:
            print(each.fleet, each.controller, each.usd, each.missed, each.optimum_usd, sep=" | ")
        causal = result.answer.optimum and result.answer.optimum.causal
        print(*day_causes.CAUSE_COLUMNS, "Missed", "USD", "Bound: told the hour", "Learning it", sep=" | ")
        for row, cells in zip(
            result.answer.rows, day_causes.cause_rows(result.answer, result.answer.rows), strict=False
        ):
            missed = row.missed_windows
            bounds = (
                (causal.least_usd(missed, HOUR_S), causal.least_usd_of_unknown_blocks(missed, HOUR_S))
                if causal
                else ()
            )
            print(*cells, missed, f"{row.usd:,.2f}", *(f"{usd or np.nan:,.2f}" for usd in bounds), sep=" | ")
        print(f"{time.process_time() - began:.1f} CPU s", flush=True)
        if options.timetables and result.answer.optimum:
            print(attack(result.answer, count=options.timetables, seed=options.seed), flush=True)


if __name__ == "__main__":
    main()
