"""Simulates a found fleet on other draws of its traffic, and with random interruptions of its spot workers.

The seed draws the traffic where copies of a trace are laid over each other, where a trace is thinned, and
where the time stamps of a coarse clock are spread. The search saw one draw (or those of `traffic: {draws:
8}`); its fleet is simulated on further ones, with the seeds that follow. The whole fleet runs there; whether
it holds after losses is a second simulation.

Spot workers: between interruptions a worker is up for a time drawn from an exponential distribution, then
down for as long as a restart takes. A history begins in the steady state of this renewal process: a worker is
down with probability `Spot.down_frac`, for a time drawn uniformly from 0 to the length of a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from planner.documents.facts import MissedOnDraws
from planner.documents.task import Spot
from planner.fleet import Disturbance, Fleet
from planner.policies import ROUTING
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Answers
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.problem.plan_problem import Problem, with_policies
from planner.simulator.slo_verdict import Verdict
from planner.solvers.repeats import Repeats, run_until_decided
from planner.traffic.scaling import same_requests
from planner.traffic.trace import Trace
from planner.units import HOUR_S

# Further draws may simulate so many requests in all, within these numbers of runs. Requests are counted, not
# seconds, so that a plan does not depend on the machine.
RUN_REQUESTS = 1_500_000
RUNS_LEAST = 3
RUNS_MOST = 100

# The names of these simulations, by which `goes_on` and the report tell them apart (facts.LeftOut).
OTHER_DRAWS: Literal["other-draws"] = "other-draws"
MORE_DRAWS: Literal["more-draws"] = "more-draws"
HISTORIES: Literal["histories"] = "histories"


def on_other_draws(
    problem: Problem, best: Counts, trace: Trace, seed: int, goes_on: Callable[[], bool] = lambda: True
) -> Repeats | None:
    """The fleet on draws of the traffic that the search has not seen; None where every draw is the same.

    `trace` is the whole one, as it was read. `goes_on` says whether there is time for one more run.
    """
    first = seed + problem.task.draws  # The search has seen the draws of the seeds before.
    drawn = requested_traffic(trace, problem.task, seed=first)[0]
    routing = problem.oracle.fleet(best).policies.routing
    if same_requests(drawn, problem.trace) and not ROUTING[routing].draws:
        return None  # Neither the traffic nor the router depends on the seed.

    def run(number: int) -> tuple[bool, Verdict]:
        requests = requested_traffic(trace, problem.task, seed=first + number)[0] if number else drawn
        other = with_policies(problem, replace(problem.oracle.policies, seed=first + number))
        oracle = replace(other.oracle, trace=requests, draws=(), answers=Answers())
        verdict = oracle.verdict(oracle.fleet(best), record=True)[1]
        return verdict.holds and (not oracle.has_losses or oracle.holds([best])[0]), verdict

    verdicts = run_until_decided(OTHER_DRAWS, run, _most_runs(problem), goes_on)
    return replace(verdicts, after_losses=problem.oracle.has_losses)


def on_histories(
    problem: Problem, best: Counts, seed: int, goes_on: Callable[[], bool] = lambda: True
) -> Repeats | None:
    """The fleet under interruptions of its spot workers drawn at random; None where it has none."""
    oracle, fleet = problem.oracle, problem.oracle.fleet(best)
    if not any(option.type.gpu.name in oracle.spot for option, _ in best):
        return None
    end_s = float(problem.trace.arrival_s[-1])

    def run(number: int) -> tuple[bool, Verdict]:
        rng = np.random.default_rng([seed, number])
        disturbed = replace(fleet, disturbances=interruptions(fleet, oracle.spot, end_s, rng))
        verdict = oracle.verdict(disturbed, record=True)[1]
        return verdict.holds, verdict

    return run_until_decided(HISTORIES, run, _most_runs(problem), goes_on)


def interruptions(
    fleet: Fleet, spot: Mapping[str, Spot], end_s: float, rng: np.random.Generator
) -> tuple[Disturbance, ...]:
    """One history from 0 to `end_s`: when each spot worker goes, and when it is back."""
    events: list[Disturbance] = []
    workers = (pool.type.gpu.name for pool in fleet.pools for _ in range(pool.count))
    for worker, gpu in enumerate(workers):
        terms = spot.get(gpu)
        if terms is None or terms.interruptions_per_h <= 0:
            continue
        mean_up_s, now_s = HOUR_S / terms.interruptions_per_h, 0.0
        if rng.random() < terms.down_frac:
            now_s = rng.uniform(0.0, terms.restart_s)
            events += [Disturbance(0.0, "down", worker), Disturbance(now_s, "up", worker)]
        while (now_s := now_s + rng.exponential(mean_up_s)) < end_s:
            back_s = now_s + terms.restart_s
            events += [Disturbance(now_s, "down", worker), Disturbance(back_s, "up", worker)]
            now_s = back_s
    return tuple(events)


def _most_runs(problem: Problem) -> int:
    return int(np.clip(RUN_REQUESTS // len(problem.trace), RUNS_LEAST, RUNS_MOST))


def warnings(repeats: Sequence[Repeats]) -> tuple[MissedOnDraws, ...]:
    """A warning for each kind of runs that missed the SLO sometimes and were not decided to hold it."""
    return tuple(
        MissedOnDraws(each) for each in repeats if each.decision != "holds" and each.kept < each.runs
    )
