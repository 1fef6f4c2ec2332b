"""Simulates a production day and two weeks under controllers: cost and missed windows of each, and CPU
seconds.

    python benchmarks/day.py DAY.csv.gz [--rates RATES.csv] [--fleet plan.yaml] [--train "70 %"]

DAY is ServeGen's m-large day (one request in 20), RATES its curve of two weeks. For each ten minutes of the
two weeks requests are drawn: one in 20 of the curve's number, gamma gaps with its coefficient of variation,
and lengths from the same time in DAY. Without --fleet a fleet for the whole day is planned first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from planner.api.inputs import read_trace
from planner.day.controllers.knowledge import Knowledge
from planner.day.controllers.table import parse_controller
from planner.day.day_api import day
from planner.day.day_study import DayAnswer
from planner.simulator.elastic import ElasticFleet, simulate_together
from planner.traffic.trace import Trace

SLO = {
    "llm": "meta-llama/Llama-3.1-70B",
    "slo": {"ttft": {"p95": "2 s"}, "tbt": {"p99": "200 ms"}, "every": "10 min"},
    "fleet": {"gpus": {"a100-80g": 256, "h100-80g": 256}},
}
STEP_S = 600.0
LEAST_GAP = 1e-9  # The least gap as a share of the mean, as gaps that are all zero give no times.
MOST_CV = 10.0  # With a larger coefficient of variation all gamma gaps but one are zero.
SAMPLED = 20  # One in so many requests of the curve is drawn.


def drawn(
    day_seen: Trace,
    rates: Path,
    *,
    first: int = 0,
    steps: int | None = None,
    seed: int = 0,
    one_in: float = SAMPLED,
) -> Trace:
    """Traffic of the curve from its `first` ten minutes on, lengths from the same time of the day at hand."""
    rng = np.random.default_rng(seed)
    table = np.genfromtxt(rates, delimiter=",", names=True)[first : None if steps is None else first + steps]
    of_day = (day_seen.arrival_s % 86400 // STEP_S).astype(int)
    places = {step: np.flatnonzero(of_day == step) for step in np.unique(of_day)}
    arrivals, rows = [], []
    for k, row in enumerate(table):
        count = round(float(row["requests_per_s"]) * STEP_S / one_in)
        cv = min(max(float(np.nan_to_num(row["cv"], nan=1.0)), 0.1), MOST_CV)
        gaps = rng.gamma(1 / cv**2, size=count + 1) + LEAST_GAP
        arrivals.append(k * STEP_S + STEP_S * np.cumsum(gaps)[:-1] / gaps.sum())
        step = int(row["seconds"] % 86400 // STEP_S)
        rows.append(rng.choice(places.get(step, np.arange(len(day_seen))), count))
    index = np.concatenate(rows)
    return Trace(
        f"drawn from {rates.name}",
        np.concatenate(arrivals),
        day_seen.input_tokens[index],
        day_seen.output_tokens[index],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("day", type=Path)
    parser.add_argument("--rates", type=Path)
    parser.add_argument("--fleet", type=Path)
    parser.add_argument("--train")
    parser.add_argument("--time-limit", type=float, default=900.0)
    asked = parser.parse_args()
    seen = read_trace(asked.day)
    began = time.process_time()
    found = day(
        SLO,
        seen,
        standing=asked.fleet,
        terms={} if asked.train is None else {"train": asked.train},
        time_limit_s=asked.time_limit,
    )
    print(found.headline())
    print(*found.sentences(), sep="\n")
    print(found.to_frame().to_string(index=False))
    print(f"{time.process_time() - began:.1f} CPU s in all")
    if asked.rates is None:
        return
    assert isinstance(found.answer, DayAnswer)  # of one LLM
    question = found.answer.question
    weeks = drawn(seen, asked.rates)
    knowledge = Knowledge(question.pools, tuple(pool.role for pool in question.fleet.pools))
    for name, trace in (("the day", seen), ("two weeks", weeks)):
        controller = parse_controller("hpa", {"metric": "kv"})(knowledge)
        began = time.process_time()
        fleet = ElasticFleet(question.fleet, trace, question.pools, controller, question.slo.limits)
        (run,) = simulate_together([fleet])
        taken_s = time.process_time() - began
        decisions = len(run.requested_sizes)
        print(f"{name}: {len(trace)} requests, {decisions} decisions of an HPA, {taken_s:.2f} CPU s")


if __name__ == "__main__":
    main()
