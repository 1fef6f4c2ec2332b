"""Simulates the plan's fleet on other draws of its traffic, and with random interruptions of spot workers.

Traffic depends on the seed if copies of a trace are superposed, if a trace is thinned, or if the time stamps
of a coarse clock are spread. The search saw one draw (or as many as `traffic: {draws: 8}` says); its fleet is
simulated on further ones, with the seeds that follow. In these runs no worker is lost; if the plan must
survive losses, a second simulation tells whether the fleet also holds after them.

Spot workers: between interruptions a worker is up for a time drawn from an exponential distribution, then
down for as long as a restart takes. A history of interruptions begins in the steady state of this renewal
process: a worker is down with probability `Spot.down_frac`, for a time drawn uniformly from 0 to the length
of a restart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from planner.documents.facts import MissedOnDraws
from planner.documents.task import Spot
from planner.fleet import Disturbance, Fleet
from planner.policies import ROUTING
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.problem.plan_problem import Problem, with_policies
from planner.simulator.slo_verdict import Verdict
from planner.solvers.repeats import Repeats, run_until_decided
from planner.traffic.scaling import same_requests
from planner.traffic.trace import Trace
from planner.units import HOUR_S

# All runs of one kind together simulate about RUN_REQUESTS requests, but there are LEAST_RUNS to MOST_RUNS of
# them. Requests are counted, not seconds, so that a plan does not depend on the machine. Set by hand.
RUN_REQUESTS = 1_500_000
LEAST_RUNS = 3
MOST_RUNS = 100

# The names of these simulations: a plan that has no time for one names it as left out (facts.LeftOut).
OTHER_DRAWS: Literal["other-draws"] = "other-draws"
MORE_DRAWS: Literal["more-draws"] = "more-draws"
HISTORIES: Literal["histories"] = "histories"


def simulate_other_draws(
    problem: Problem, best: Counts, trace: Trace, seed: int, goes_on: Callable[[], bool] = lambda: True
) -> Repeats | None:
    """The results of the fleet on draws of the traffic that the search has not seen; None if every draw is
    the same.

    `trace` is the whole trace, as it was read, from which the question's traffic is drawn. `seed` is that of
    the search. `goes_on` says whether there is time for one more run.
    """
    first_seed = seed + problem.task.draws  # The search has seen the draws of the seeds before this one.
    first_draw, _ = requested_traffic(trace, problem.task, seed=first_seed)
    routing = problem.oracle.fleet(best).policies.routing
    if same_requests(first_draw, problem.trace) and not ROUTING[routing].draws:
        return None  # Neither the traffic nor the router depends on the seed.

    def run(number: int) -> tuple[bool, Verdict]:
        run_seed = first_seed + number
        requests = first_draw
        if number > 0:
            requests, _ = requested_traffic(trace, problem.task, seed=run_seed)
        seeded_problem = with_policies(problem, replace(problem.oracle.policies, seed=run_seed))
        # The fleet is judged on these requests alone, not on the search's draws too. No other simulation has
        # this traffic, so a cache of its own keeps the common one small.
        oracle = replace(seeded_problem.oracle, trace=requests, draws=(), cache=VerdictCache())
        verdict = oracle.simulate_and_judge(oracle.fleet(best), record=True).verdict
        is_kept = verdict.holds and (not oracle.has_losses or oracle.holds(best))
        return is_kept, verdict

    repeats = run_until_decided(OTHER_DRAWS, run, _most_runs(problem), goes_on)
    return replace(repeats, after_losses=problem.oracle.has_losses)


def simulate_histories(
    problem: Problem, best: Counts, seed: int, goes_on: Callable[[], bool] = lambda: True
) -> Repeats | None:
    """The results of the fleet with random interruptions of its spot workers; None if it has no spot worker.
    `goes_on` says whether there is time for one more run.
    """
    oracle, fleet = problem.oracle, problem.oracle.fleet(best)
    if not any(option.type.gpu.name in oracle.spot for option, _ in best):
        return None
    end_s = float(problem.trace.arrival_s[-1])

    def run(number: int) -> tuple[bool, Verdict]:
        rng = np.random.default_rng([seed, number])
        disturbed = replace(fleet, disturbances=interruptions(fleet, oracle.spot, end_s, rng))
        verdict = oracle.simulate_and_judge(disturbed, record=True).verdict
        return verdict.holds, verdict

    return run_until_decided(HISTORIES, run, _most_runs(problem), goes_on)


def interruptions(
    fleet: Fleet, spot: Mapping[str, Spot], end_s: float, rng: np.random.Generator
) -> tuple[Disturbance, ...]:
    """One history from 0 to `end_s`: when each spot worker is interrupted, and when it is back. `spot` has
    the terms of a spot GPU by its name. Workers are numbered over all pools, in their order.
    """
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
    """How many runs, each of as many requests as the problem's trace has, may be made by RUN_REQUESTS."""
    return int(np.clip(RUN_REQUESTS // len(problem.trace), LEAST_RUNS, MOST_RUNS))


def missed_warnings(repeats: Sequence[Repeats]) -> tuple[MissedOnDraws, ...]:
    """A warning for each kind of runs in which the SLO was missed at least once, unless the test of
    solvers/repeats.py decided that the fleet holds in such runs.
    """
    return tuple(
        MissedOnDraws(runs) for runs in repeats if runs.decision != "holds" and runs.kept < runs.runs
    )
