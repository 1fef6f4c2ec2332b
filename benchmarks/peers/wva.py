"""Compares the queueing model of our controller `wva` with that of llm-d's autoscaler (WVA), and with a
simulated engine of the same step times.

    python benchmarks/peers/wva.py FILE [--requests 20000]

FILE holds a list of cases, each with `params` (below), `rate_range`, the figures of WVA's model at some rates
(`analyze`: per rate [requests/s] the figures [ms]) and the rates up to which an `slo` is kept (`size`). Our
model (planner/day/controllers/wva_queue.py) must give each figure within 1e-6 of its value, and rates within
1e-4, the accuracy of WVA's bisection. The exit code is 1 if one is off.

Data   N  most requests in service      Q  most that wait        tin, tout  tokens of a request
       alpha + beta n     [ms]  a decode step of n requests
       gamma + delta tin n  [ms]  their prefill, all at once

  mu_n = min(n, N) / (prefill(n) + (tout - 1) decode(n))    n = 1 ... N + Q, at most N of them in service
  p_n  = p_0 lambda^n / (mu_1 ... mu_n)                     birth and death
  X = lambda (1 - p_{N+Q}),   L = sum n p_n,   S = sum min(n, N) p_n
  wait = (L - S) / X,   serv = S / X,   n* such that prefill(n*) + (tout - 1) decode(n*) = serv
  TTFT = wait + prefill(n*),   ITL = decode(n*)

For comparison our simulator runs an engine with these step times and Poisson arrivals. A step either prefills
all prompts that wait and fit among the N, which go first, or makes the next token of all requests. Other than
in the model, a prompt does not wait for the prefill of the whole batch, but each prefill delays the decodes
and has a gamma of its own. If gamma is large, the engine carries less than the model says, and its queue
grows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.peers.compare import BARE_GPU, NO_STEPS, bare_llm
from planner.day.controllers.wva_queue import QueueModel, QueueTimes
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.foreign_forms import DistServeSteps
from planner.simulator import simulate
from planner.traffic.trace import Trace

Params = Mapping[str, float]
FIGURE_FRAC, RATE_FRAC = 1e-6, 1e-4


def model_of(p: Params) -> QueueModel:
    """The queue model of a case of theirs, with the parameters under our names."""
    own = (float(p[name]) for name in ("alpha", "beta", "gamma", "delta", "tin", "tout"))
    return QueueModel(QueueTimes(int(p["N"]), int(p["Q"]), *own))


def analyze(p: Params, rate_rps: float) -> dict[str, float]:
    """The model's figures at a rate, under the names of the cases; times in ms."""
    found = model_of(p).queue_state_at(rate_rps)
    return {
        "tput": found.throughput_rps,
        "wait": found.wait_ms,
        "serv": found.serve_ms,
        "resp": found.wait_ms + found.serve_ms,
        "in_serv": found.in_service,
        "eff_conc": found.batch,
        "ttft": found.ttft_ms,
        "itl": found.itl_ms,
        "rho": found.in_service / p["N"],
    }


def size(p: Params, slo: Mapping[str, float]) -> dict[str, float]:
    """The highest rates [requests/s] at which mean TTFT, and mean ITL, are within `slo` [ms]."""
    model = model_of(p)
    return {
        "ttft": model.largest_rate_rps(lambda state: state.ttft_ms, slo["ttft"]),
        "itl": model.largest_rate_rps(lambda state: state.itl_ms, slo["itl"]),
        "tps": model.most_rps,
    }


def simulated(p: Params, rate_rps: float, requests: int) -> tuple[float, float]:
    """Mean TTFT and TPOT [ms] of an engine of the same steps, Poisson arrivals, warm-up left out."""
    s = 1e-3
    form = DistServeSteps(
        (p["gamma"] * s, p["delta"] * s, 0.0),
        (p["alpha"] * s, 0.0, p["beta"] * s),
        (p["alpha"] * s, 0.0, p["beta"] * s),
        1,
        0.0,
        0.0,
        0.0,
    )
    seats, tin, tout = int(p["N"]), int(p["tin"]), int(p["tout"])
    room = seats * (tin + tout + 16)
    worker = WorkerType(BARE_GPU, 1, NO_STEPS, 2 * (room - room % 16), seats * tin, seats, form=form)
    fleet = Fleet(bare_llm(2.0), (Pool("engine", "mixed", worker, 1),), Policies(batching="vllm-v0"))
    arrival_s = np.cumsum(np.random.default_rng(0).exponential(1 / rate_rps, requests))
    lengths = np.full(requests, tin), np.full(requests, tout)
    found = simulate(fleet, Trace("poisson", arrival_s - arrival_s[0], *lengths))
    late = slice(requests // 10, None)
    return float(1e3 * found.ttft_s[late].mean()), float(1e3 * found.tpot_s[late].mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=20_000, help="of each simulation")
    options = parser.parse_args()
    worst_figure, worst_rate = 0.0, 0.0
    columns = ("TTFT: WVA", "simulated", "ITL: WVA", "simulated")
    print(f"case     req/s {' '.join(f'{column:>10}' for column in columns)}   [ms]")
    cases = json.loads(options.file.read_text())
    for number, case in enumerate(cases):
        p = case["params"]
        rates, at_rates = case["size"]
        sized = size(p, case["slo"])
        ends_rps = model_of(p).least_rps, model_of(p).most_rps
        pairs = [*zip(ends_rps, case["rate_range"], strict=True), *((sized[k], rates[k]) for k in rates)]
        worst_rate = max([worst_rate, *(abs(ours / theirs - 1) for ours, theirs in pairs)])
        asked = {float(rate): told for rate, told in case["analyze"].items()} | {
            min(rates.values()): at_rates
        }
        for rate_rps, told in asked.items():
            ours = analyze(p, rate_rps)
            errors = [abs(ours[name] - told[name]) / max(abs(told[name]), 1e-3) for name in told]
            worst_figure = max([worst_figure, *errors])
            ttft_ms, tpot_ms = simulated(p, rate_rps, options.requests)
            figures = (ours["ttft"], ttft_ms, ours["itl"], tpot_ms)
            print(f"{number:4} {rate_rps:9.4g} {' '.join(f'{figure:10.4g}' for figure in figures)}")
    is_same = worst_figure <= FIGURE_FRAC and worst_rate <= RATE_FRAC
    print(
        f"{len(cases)} cases: figures within {worst_figure:.1e}, rates within {worst_rate:.1e} of the file's"
        f"{'' if is_same else ': NOT the same'}"
    )
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
