"""Gathers the evidence for a plan, as facts: neighbours that fail, other fleets, limits that bind, and
warnings.

certify.py calls these functions. They return facts (documents/facts.py), which hold values;
reports/fact_sentences.py makes sentences of them.
"""

import datetime
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.documents import facts
from planner.documents.catalog import Catalog
from planner.documents.certificate import Alternative
from planner.documents.offers import OLD_DAYS, age_days
from planner.documents.policy_choices import name_policies
from planner.documents.task import PlanQuestion, Robust
from planner.domain import OWNED, ROUNDING, SPOT, FleetLimit, Gpu, Slo, payment_suffix, row_of
from planner.errors import InfeasibleError, PlannerError
from planner.fleet import Disturbance, Fleet, Policies, WorkerType
from planner.models.spread import INTERVAL_SIGMAS, StepTimeSpread
from planner.policies import QUEUE
from planner.search.evidence.robustness import least_in_proportion
from planner.search.mixed.best_fleet import FleetSearch, PolicySearch, best_of
from planner.search.mixed.policy_search import search_policies
from planner.search.mixed.polished_pins import polish_placements
from planner.search.oracle.fleet_counts import Counts, counts_of, has_whole_pairs, objective_of, workers_of
from planner.search.oracle.fleet_oracle import SPOT_RISK_FRAC, without_needless_workers
from planner.search.oracle.traffic_request import rates_frac
from planner.search.oracle.work_clock import is_over, is_time_limit_reached
from planner.search.prefixes.prefix_placing import PoolPrefixes
from planner.search.problem.bill import Bill, bill_fleet, bought_pools
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.search.problem.owned_first import objective_paid
from planner.search.problem.plan_problem import Conditions, Problem, on_all_draws, with_policies
from planner.simulator.measured_values import measured_mask, request_values_s
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import LineVerdict, Verdict, windows_s, worst_window
from planner.solvers.master import FleetLimits
from planner.solvers.placement import NodePlacement, place_fleet, placement_of_topology
from planner.traffic.described import Description
from planner.traffic.kinds import quarters_apart
from planner.traffic.prefixes import alike_tokens_frac
from planner.traffic.trace import Trace
from planner.units import HOUR_S

# Numbers for which no reason is given are set by hand.

# A measured window shorter than this many mean E2E times is called short: the fleet may not have reached its
# steady state.
FEW_RESIDENCES = 20

# A warning is given if the share of requests that keep all limits is below this part of the SLO's lowest
# percentile: if that is p90, below 45 %.
FEW_KEEP = 0.5

SHORT_TRACE_S = HOUR_S  # A trace that is shorter is called short.
# The worst hour of a measured window is reported if the window is at least this long. In a shorter one it
# says little more than the whole.
LONG_S = 2 * HOUR_S

# If more than this share of requests arrive after the last nominal arrival, the load is said to die away.
LATE_FRAC = 0.2

# Where a smaller fleet exceeds a limit by more than this factor, nobody would relax the limit so far: the
# fleet's capacity is reported as binding, not the limit.
MOST_LIMIT_RISE = 3.0

# Placing workers on nodes may take this long, four times what it takes on an idle machine.
PLACEMENT_S = 40.0

# Where prompts share less than this part of their tokens, no warning says that prefixes are not counted.
ALIKE_FRAC = 0.01

# A limit's price in the bound is reported if one GPU, one USD/h or one kW more lowers the bound by more than
# this, in the objective's unit. Less is the solver's rounding.
LEAST_BOUND_PRICE = 1e-6
# Requests of the router that take less than this share of a worker's time are not warned of: step times are
# less exact than that.
KEEP_ALIVE_FRAC = 0.01


@dataclass(slots=True)
class EvidenceClock:
    """Decides whether there is time for one more simulation, and records what there was no time for.

    The last simulation may begin at `deadline`, on the search's clock.
    """

    deadline: float = math.inf
    left_out: list[facts.LeftOut] = field(default_factory=list)

    def allows(self, what: facts.LeftOut) -> bool:
        """Whether there is time for one more simulation of this kind; else the kind is noted as left out."""
        if not is_over(self.deadline):
            return True
        if what not in self.left_out:
            self.left_out.append(what)
        return False

    def list_warnings(self) -> tuple[facts.Warned, ...]:
        """A warning that names what was left out, if anything was."""
        return (facts.NotSimulated(tuple(self.left_out)),) if self.left_out else ()


def clock_warnings() -> tuple[facts.Warned, ...]:
    """A warning where the time limit has ended a search, so that its answer depends on the machine."""
    return (facts.EndedByClock(),) if is_time_limit_reached() else ()


def price_other_policies(searched: Sequence[PolicySearch], clock: EvidenceClock) -> tuple[Alternative, ...]:
    """The best fleet of each policy that was searched and not chosen, with its cost. If the only queue that
    was searched is first come first served, also what serving the shortest prompts first would save.
    """
    chosen, chosen_search = best_of(searched)
    choices = chosen.task.policy_choices()
    rows = []
    for problem, search in searched:
        if problem is chosen:
            continue
        name, fleet = name_policies(problem.oracle.policies, choices), problem.oracle.fleet(search.best)
        value = objective_paid(problem, search.best)
        notes: tuple[facts.LongestTtft, ...] = ()
        if clock.allows("longest-ttft"):
            notes = (facts.LongestTtft(_longest_ttft_s(problem, search.best)),)
        rows.append(Alternative(name, fleet, value, notes))
    if chosen.task.policies.axes["queue"] == (Policies().queue,):
        rows += _price_shortest_first(chosen, chosen_search, clock)
    return tuple(rows)


def price_prefix_caches(searched: Sequence[PolicySearch]) -> tuple[facts.Binding, ...]:
    """What prefix caches save at the same SLO: the difference of two fleets that hold in simulation."""
    problem, search = best_of(searched)
    if problem.hits is None:  # The traffic has no prefixes, or the question no caches.
        return ()
    policies, unit = problem.oracle.policies, OBJECTIVE_UNITS[problem.task.objective]
    without_caches = [row for row in searched if not row.problem.oracle.policies.prefix_cache]
    if not policies.prefix_cache:
        return (facts.Finding("caches-unused"),)
    gpus, value = problem.oracle.fleet(search.best).gpus, objective_paid(problem, search.best)
    if not without_caches:
        if not problem.task.policies.compares_without_caches:
            return ()  # Such fleets were not searched, so the saving is not known.
        # No fleet without caches keeps the SLO.
        return (facts.CachesSave(policies.routing, value, gpus, None, None, unit),)
    uncached_problem, uncached_search = best_of(without_caches)
    gpus_without = uncached_problem.oracle.fleet(uncached_search.best).gpus
    value_without = objective_paid(uncached_problem, uncached_search.best)
    return (facts.CachesSave(policies.routing, value, gpus, value_without, gpus_without, unit),)


def price_pinned_replicas(
    searched: Sequence[PolicySearch], clock: EvidenceClock
) -> tuple[facts.Binding, ...]:
    """What pinned prefixes save against LRU caches, as the difference of two simulated fleets."""
    pinned = [row for row in searched if row.problem.oracle.pinning is not None]
    unpinned = [row for row in searched if row.problem.oracle.pinning is None]
    lru = [row for row in unpinned if row.problem.oracle.policies.prefix_cache]
    if not pinned or not lru or not clock.allows("pinned-replicas"):
        return ()
    (problem, search), (lru_problem, lru_search) = best_of(pinned), best_of(lru)
    fleet, lru_fleet = problem.oracle.fleet(search.best), lru_problem.oracle.fleet(lru_search.best)
    pinning = problem.oracle.pinning
    assert pinning is not None
    return (
        facts.PinnedReplicas(
            is_chosen=best_of(searched).problem is problem,
            value=objective_paid(problem, search.best),
            gpus=fleet.gpus,
            pinned_hit_frac=pinning.hit_frac(fleet),
            hit_frac=_hit_frac(problem, fleet),
            routing=lru_problem.oracle.policies.routing,
            value_lru=objective_paid(lru_problem, lru_search.best),
            gpus_lru=lru_fleet.gpus,
            hit_frac_lru=_hit_frac(lru_problem, lru_fleet),
            unit=OBJECTIVE_UNITS[problem.task.objective],
        ),
    )


def _hit_frac(problem: Problem, fleet: Fleet) -> float:
    """The share of prompt tokens that the prefix caches of `fleet` hit in its simulation."""
    simulation, _ = problem.oracle.simulate_and_judge(fleet, record=False)
    return simulation.token_hit_frac or 0.0


def bound_pins(
    searched: Sequence[PolicySearch], best: Counts, clock: EvidenceClock
) -> tuple[facts.Binding, ...]:
    """How far the placement of pinned prefixes (prefixes/pinning.py) is from the best possible, by pool.

    `best` are the workers of the plan. If the plan does not pin prefixes, the best fleet on paper that pins
    them is taken in its place.
    """
    problem = best_of(searched).problem
    is_plan = problem.oracle.pinning is not None
    if not is_plan:
        pinned = [row for row in searched if row.problem.oracle.pinning is not None]
        if not pinned:
            return ()
        problem, pinned_search = best_of(pinned)
        best = pinned_search.best
    if not clock.allows("pinned-replicas"):
        return ()
    pinning, pools = problem.oracle.pinning, problem.oracle.fleet(best).pools
    assert pinning is not None
    workers = sum(pool.count for pool in pools if pool.role != "decode")
    placements = polish_placements(problem, pools)
    rows: list[facts.Binding] = []
    for pool in pools:
        if pool.name in placements:
            placement, used = placements[pool.name], pinning.placed(pool, workers).replication
            rows.append(
                facts.PinsPlaced(
                    is_chosen=is_plan,
                    pool=pool.name,
                    workers=pool.count,
                    load=used.largest_load,
                    quick_load=placement.quick.replication.largest_load,
                    best_load=placement.best.replication.largest_load,
                    bound=used.bound,
                    gap_frac=used.gap_frac,
                )
            )
    return tuple(rows)


def simulate_one_more(
    problem: Problem, best: Counts, clock: EvidenceClock
) -> tuple[tuple[facts.Binding, ...], tuple[facts.Warned, ...]]:
    """Whether the SLO is kept with one more worker in each pool, and a warning where it is not.

    With prefix caches one more worker may spread prefixes too thin, so more workers can hurt.
    """
    if not problem.oracle.policies.prefix_cache:
        return (), ()
    bindings: list[facts.Binding] = []
    warnings: list[facts.Warned] = []
    for i, (option, count) in enumerate(best):
        more = (*best[:i], (option, count + 1), *best[i + 1 :])
        if not clock.allows("one-more"):
            break
        outcome = outcome_of(_verdict_on_every_draw(problem, problem.oracle.fleet(more)), problem.slo)
        pool = problem.oracle.fleet(best).pools[i].name
        bindings.append(facts.WorkerMore(pool, outcome))
        warnings += [] if outcome.holds else [facts.WorkerMoreFails(pool, outcome)]
    return tuple(bindings), tuple(warnings)


def _price_shortest_first(
    problem: Problem, search: FleetSearch, clock: EvidenceClock
) -> tuple[Alternative, ...]:
    """What serving the shortest prompts first would save with the plan's own worker types, and how much
    longer the longest TTFT would be.
    """
    has_queue = any(limit.metric_row.has_queue for limit in problem.slo.limits)
    # The order of a queue changes only metrics that count the wait, and a single worker cannot be saved.
    if not has_queue or sum(count for _, count in search.best) < 2:
        return ()
    if not clock.allows("shortest-first"):
        return ()
    with_sjf = with_policies(problem, replace(problem.oracle.policies, queue="sjf"))
    fewer = search.best
    if with_sjf.oracle.holds(fewer):
        fewer = without_needless_workers(fewer, with_sjf.oracle)
    value = objective_paid(problem, fewer)
    if objective_of(fewer) >= search.value:
        return ()
    longest = facts.LongestTtft(_longest_ttft_s(with_sjf, fewer), _longest_ttft_s(problem, search.best))
    return (Alternative("queue sjf, same worker types", with_sjf.oracle.fleet(fewer), value, (longest,)),)


def _longest_ttft_s(problem: Problem, counts: Counts) -> float:
    """The longest TTFT of the requests that have a first token."""
    simulation, _ = problem.oracle.simulate_and_judge(problem.oracle.fleet(counts), record=False)
    return float(np.nanmax(simulation.ttft_s))


def simulate_neighbours(
    problem: Problem, best: Counts, clock: EvidenceClock
) -> tuple[tuple[facts.Neighbour, ...], tuple[facts.Binding, ...]]:
    """Every fleet with one worker fewer (a neighbour), simulated, and what relaxing the limit that it misses
    would save.

    A limit binds if it is all that a neighbour misses, and the neighbour costs less than the plan. If a
    neighbour misses the SLO otherwise, capacity binds. A neighbour that keeps the SLO binds nothing.
    """
    neighbours: list[facts.Neighbour] = []
    binding: list[facts.Binding] = []
    for i, (option, count) in enumerate(best):
        pool = problem.oracle.fleet(best).pools[i].name
        fewer = (*best[:i], (option, count - 1), *best[i + 1 :])
        if not clock.allows("neighbours"):
            break
        failing_loss = problem.oracle.failing_loss(fewer)
        holds = failing_loss is None
        # A fleet that fails is simulated on the traffic on which it fails, with the workers that remain after
        # the loss. A fleet that holds is simulated on the traffic as written with all its workers.
        oracle, remaining = (problem.oracle, fewer) if failing_loss is None else failing_loss
        is_other_draw = oracle is not problem.oracle
        after_losses = sum(count for _, count in remaining) < sum(count for _, count in fewer)
        verdict = None  # Without workers of some role nothing can be simulated.
        if has_whole_pairs(option for option, count in remaining if count > 0):
            _, verdict = oracle.simulate_and_judge(oracle.fleet(remaining), record=True)
        outcome = None if verdict is None else outcome_of(verdict, problem.slo)
        neighbours.append(
            facts.Neighbour(pool, option.type.name, holds, outcome, is_other_draw, after_losses)
        )
        if verdict is None:
            continue
        line = _only_missed_line(problem, verdict)
        saves = objective_paid(problem, best) - objective_paid(problem, fewer)
        if line is not None and saves > 0:
            unit = OBJECTIVE_UNITS[problem.task.objective]
            binding.append(facts.LimitBinds(line.limit, pool, option.type.name, line.deciding_s, saves, unit))
        elif not holds:
            binding.append(facts.CapacityBinds(neighbours[-1]))
    return tuple(neighbours), tuple(binding)


def _only_missed_line(problem: Problem, verdict: Verdict) -> LineVerdict | None:
    """The line of the SLO that is all a fleet misses, by no more than MOST_LIMIT_RISE; None if there is none.
    With losses or several draws None too: simulations that are not judged here may miss other lines.
    """
    if len(verdict.missed) != 1 or problem.oracle.has_losses or problem.draws:
        return None
    (line,) = verdict.missed
    misses_nothing_else = verdict.is_steady and verdict.attainment_holds and verdict.guarantees_hold
    is_near = line.deciding_s <= MOST_LIMIT_RISE * line.limit.limit_s
    return line if misses_nothing_else and is_near else None


def simulate_longer_steps(
    problem: Problem, fleet: Fleet, clock: EvidenceClock
) -> facts.UpperEnds | facts.LongerSteps | None:
    """Whether the SLO is kept with step times at the upper ends of their spread. If the step times of some
    pool have no spread, the steps of every pool are made longer by the error of their fit instead. None if no
    fit has an error, or if no time is left.
    """
    latencies = [pool.type.latency for pool in fleet.pools]
    spreads = [fit.spread for fit in latencies if fit.spread is not None]
    if len(spreads) == len(latencies):
        return _simulate_upper_ends(problem, fleet, spreads, clock)
    error_fracs = [max(fit.uncertainty_frac or 0.0, fit.mape_frac or 0.0) for fit in latencies]
    if not any(error_fracs) or not clock.allows("longer-steps"):
        return None
    pools = tuple(
        replace(pool, type=pool.type.with_longer_steps(error_frac))
        for pool, error_frac in zip(fleet.pools, error_fracs, strict=True)
    )
    verdict = _verdict_on_every_draw(problem, replace(fleet, pools=pools))
    return facts.LongerSteps(max(error_fracs), outcome_of(verdict, problem.slo))


def _simulate_upper_ends(
    problem: Problem, fleet: Fleet, spreads: Sequence[StepTimeSpread], clock: EvidenceClock
) -> facts.UpperEnds | None:
    """Whether the SLO is kept with step times at the upper ends of their spread; None if no time is left."""
    if not clock.allows("longer-steps"):
        return None
    verdict = _verdict_on_every_draw(problem, fleet.with_step_spread(INTERVAL_SIGMAS, INTERVAL_SIGMAS))
    # The largest of all pools.
    prefill = max(spread.prefill.high for spread in spreads)
    decode = max(spread.decode.high for spread in spreads)
    return facts.UpperEnds(prefill, decode, outcome_of(verdict, problem.slo))


def price_insurance(
    problem: Problem, search: FleetSearch, inputs: SearchInputs, clock: EvidenceClock
) -> tuple[tuple[Alternative, ...], tuple[facts.Binding, ...], tuple[facts.Warned, ...]]:
    """The cost of `robust:` in the question, as an insurance: how much dearer the plan is than a plan for the
    expected traffic and step times, whether its fleet keeps the SLO if all is as expected, and warnings.

    Searches are not exact for mixed fleets, so the search for the expected traffic may end at a fleet that is
    dearer than the robust one. Then the robust fleet is its answer, if it keeps the SLO on that traffic.
    """
    task = problem.task
    if task.robust == Robust() or not clock.allows("expected"):
        return (), (), ()
    problem.progress("the plan for what is expected, to price the insurance")
    robust, unit = problem.oracle.fleet(search.best), OBJECTIVE_UNITS[task.objective]
    is_range = task.robust.traffic_frac != task.robust.traffic_from_frac
    rates = len(rates_frac(task, problem.trace)) if is_range else None
    planned = facts.Robustness(
        task.robust.step_times_frac, task.robust.traffic_frac, rates, task.robust.spread
    )
    try:
        conditions = Conditions(clock.deadline, problem.progress)
        expected_problem = SearchInputs(
            replace(task, robust=Robust()), inputs.trace, inputs.catalog, inputs.seed, conditions
        ).problem()
        expected, expected_best = best_of(search_policies(expected_problem, (robust,)))
    except InfeasibleError as error:
        no_fleet = facts.NoneForExpected(planned, str(error))
        return (), (no_fleet,), (no_fleet,)
    except PlannerError:  # For instance no time is left. Then the price of the insurance is unknown (None).
        return (), (facts.InsuranceCosts(planned, objective_paid(problem, search.best), None, unit),), ()
    cheapest = expected.oracle.fleet(expected_best.best)
    value = objective_paid(expected, expected_best.best)
    robust_value = objective_paid(problem, search.best)
    # The robust fleet is simulated on the expected traffic, with the robust plan's policies.
    as_expected = on_all_draws(with_policies(expected_problem, problem.oracle.policies))
    # None if an option of the robust fleet is not among those of the search for what is expected.
    counts = counts_of(robust, expected_best.level0.options)
    robust_holds = counts is not None and as_expected.oracle.holds(counts)
    if counts is not None and robust_holds and robust_value < value:
        cheapest, value = as_expected.oracle.fleet(counts), robust_value
    row = Alternative("not insured: step times and traffic as expected", cheapest, value)
    if counts is None:
        missed = facts.ExpectedMissed(planned, None)
        return (row,), (missed,), (missed,)
    if not robust_holds:
        verdict = _verdict_on_every_draw(as_expected, as_expected.oracle.fleet(counts))
        missed = facts.ExpectedMissed(planned, outcome_of(verdict, problem.slo))
        return (row,), (missed,), (missed,)
    verdict = as_expected.oracle.simulate_and_judge(as_expected.oracle.fleet(counts), record=True).verdict
    values = tuple(map(limit_fact, verdict.lines))
    return (row,), (facts.InsuranceCosts(planned, robust_value, value, unit), facts.AsExpected(values)), ()


def place_workers(fleet: Fleet, time_limit_s: float = PLACEMENT_S) -> NodePlacement | None:
    """The workers on the fewest nodes. None if they do not fit nodes, if there are too many patterns to fill
    nodes, or if the time ends first. Owned and spot workers are on nodes of their own.
    """
    pools = []
    for pool in fleet.pools:
        gpu = pool.type.gpu
        # GPUs share a node if they have the same base, so each market gets a base of its own.
        gpu = replace(gpu, base=gpu.base + payment_suffix(gpu.name))
        pools.append(replace(pool, type=replace(pool.type, gpu=gpu)))
    try:
        if fleet.network.topology is not None:
            return placement_of_topology(replace(fleet, pools=tuple(pools)))
        return place_fleet(replace(fleet, pools=tuple(pools)), time_limit_s=time_limit_s)
    except PlannerError:
        return None


def simulate_spot_loss(
    problem: Problem, best: Counts, clock: EvidenceClock
) -> tuple[tuple[facts.Binding, ...], tuple[facts.Warned, ...]]:
    """How many spot workers the plan expects to lose at once, and whether it then keeps the SLO.

    In the simulation they all stop in the middle of the trace, and return after the time of a restart.
    """
    fleet, oracle = problem.oracle.fleet(best), problem.oracle
    first_worker = 0  # The pool's first; workers are numbered in the order of the pools.
    bindings: list[facts.Binding] = []
    events: list[Disturbance] = []
    middle_s = (float(problem.trace.arrival_s[0]) + float(problem.trace.arrival_s[-1])) / 2
    for pool, (option, count) in zip(fleet.pools, best, strict=True):
        if terms := oracle.spot.get(option.type.gpu.name):
            down = oracle.spot_down(option, count)
            bindings.append(
                facts.SpotSpare(
                    pool.name,
                    workers=count,
                    down=down,
                    risk_frac=SPOT_RISK_FRAC,
                    interruptions_per_h=terms.interruptions_per_h,
                    restart_s=terms.restart_s,
                )
            )
            for worker in range(first_worker, first_worker + down):
                events += [
                    Disturbance(middle_s, "down", worker),
                    Disturbance(middle_s + terms.restart_s, "up", worker),
                ]
        first_worker += pool.count
    if not bindings:
        return (), ()
    warnings: list[facts.Warned] = [facts.Cautioned("spot-nodes")]
    if events and clock.allows("spot-gone"):
        verdict = _verdict_on_every_draw(problem, replace(fleet, disturbances=tuple(events)))
        spot_gone = facts.SpotGone(outcome_of(verdict, problem.slo))
        bindings.append(spot_gone)
        if not verdict.holds:
            warnings.append(spot_gone)
    return tuple(bindings), tuple(warnings)


def _verdict_on_every_draw(problem: Problem, fleet: Fleet) -> Verdict:
    """The first verdict that misses the SLO, on the traffic as written or on another draw or rate; if there
    is none, the verdict on the traffic as written.
    """
    _, as_written = problem.oracle.simulate_and_judge(fleet, record=True)
    if not as_written.holds:
        return as_written
    for draw in problem.draws:
        _, verdict = replace(problem.oracle, trace=draw, draws=()).simulate_and_judge(fleet, record=True)
        if not verdict.holds:
            return verdict
    return as_written


def outcome_of(verdict: Verdict, slo: Slo) -> facts.Outcome:
    """What a fleet misses: its limits, the attainment, the backlog, and guarantees to tenants."""
    worst, attainment = verdict.attainment_worst, None
    if not verdict.attainment_holds:
        frac = verdict.attainment_frac if worst is None else worst.kept_frac
        # Attainment always holds where the SLO does not limit it, so `slo.attainment_frac` is set here.
        attainment = facts.Attainment(frac, slo.attainment_frac or 1.0, worst.span_s if worst else None)
    return facts.Outcome(
        tuple(map(limit_fact, verdict.missed)),
        attainment,
        None if verdict.is_steady else facts.Backlog(verdict.patient_frac, verdict.patience_s),
        tuple(
            facts.ShareMissed(
                line.least.tenant, line.least.share_frac, line.guarantee.share_frac, line.least.window_s
            )
            for line in verdict.guarantees
            if not line.holds
        ),
    )


def limit_fact(line: LineVerdict) -> facts.At:
    """The value and kept share of a limit, in its worst window where the SLO is judged in windows."""
    worst = line.worst
    return facts.At(line.limit, line.deciding_s, line.deciding_frac, worst.span_s if worst else None)


def worst_hour(simulation: Simulation, slo: Slo) -> facts.WorstHour | None:
    """Each limit in its worst hour. None if the measured window is shorter than LONG_S, if the SLO is judged
    in windows of its own, or if gaps were counted over the whole window alone.
    """
    start_s, end_s = simulation.window_s
    if slo.every_s is not None or end_s - start_s < LONG_S or simulation.gaps is not None:
        return None
    edges_s = windows_s(simulation, HOUR_S)
    if len(edges_s) < 3:  # Two edges bound a single window, which is the whole trace.
        return None
    worst = [worst_window(simulation, k, edges_s) for k in range(len(slo.limits))]
    return facts.WorstHour(
        tuple(
            facts.At(limit, window.value_s, window.kept_frac, window.span_s)
            for limit, window in zip(slo.limits, worst, strict=True)
        )
    )


def price_holding_hours(
    problem: Problem, best: Counts, hour: facts.WorstHour, clock: EvidenceClock
) -> facts.WorstHour:
    """The worst hour, with the price of a fleet that keeps the SLO in every hour of the traffic as it is
    written: the plan's pools in the plan's proportion, with as many workers as that takes.
    """
    if not clock.allows("hours"):
        return hour
    alone = problem.oracle.as_written()
    oracle = replace(alone, slo=replace(problem.slo, every_s=HOUR_S))
    planned = tuple(count for _, count in best)

    def with_counts(counts: tuple[int, ...]) -> Counts:
        return tuple((option, count) for (option, _), count in zip(best, counts, strict=True))

    def holds(counts: tuple[int, ...]) -> bool:
        return problem.allows(with_counts(counts)) and oracle.holds(with_counts(counts))

    needed = least_in_proportion(planned, holds)
    paid_usd_per_h = bill_fleet(oracle.fleet(best)).usd_per_h
    if needed is None:
        return replace(hour, planned_usd_per_h=paid_usd_per_h)
    fleet = oracle.fleet(with_counts(needed))
    return replace(
        hour,
        holding=bought_pools(fleet),
        holding_usd_per_h=bill_fleet(fleet).usd_per_h,
        planned_usd_per_h=paid_usd_per_h,
    )


def kept_hours(simulation: Simulation, slo: Slo) -> tuple[facts.WorstHour, ...]:
    """The worst hour of a long trace, as a fact to report, if all limits are kept in it; else ()."""
    hour = worst_hour(simulation, slo)
    return () if hour is None or hour.missed else (hour,)


def used_up_limits(limits: FleetLimits, best: Counts) -> tuple[facts.UsedUp, ...]:
    """The limits that are used up: each pool that uses the limit would exceed it with one worker more."""
    bindings, workers = [], workers_of(best)
    for limit, amount in limits.rows():
        users = [option.type for option, _ in best if limits.use_per_worker(limit, option.type)]
        used_with_one_more = [limits.used(limit, [*workers, (user, 1)]) for user in users]
        if users and min(used_with_one_more) > amount * (1 + ROUNDING):
            bindings.append(facts.UsedUp(limit, limits.used(limit, workers), amount))
    return tuple(bindings)


def bound_price_facts(prices: Mapping[FleetLimit, float], objective_name: str) -> tuple[facts.Binding, ...]:
    """The shadow prices of `bounds.shadow_prices` as facts, largest first, without zeros."""
    unit = OBJECTIVE_UNITS[objective_name]
    # One Watt changes next to nothing, so power is priced by the kW.
    steps = {limit: 1e3 if limit.of == "power" else 1.0 for limit in prices}
    return tuple(
        facts.BoundPrice(limit, steps[limit], price * steps[limit], unit)
        for limit, price in sorted(prices.items(), key=lambda item: -item[1])
        if price * steps[limit] > LEAST_BOUND_PRICE
    )


def window_of(simulation: Simulation) -> facts.MeasuredWindow:
    """The measured window in seconds, and in mean residence times of a request."""
    window_s = simulation.window_s[1] - simulation.window_s[0]
    return facts.MeasuredWindow(window_s, window_s / float(np.nanmean(simulation.e2e_s)))


def few_keep_all_warnings(slo: Slo, verdict: Verdict, simulation: Simulation) -> tuple[facts.Warned, ...]:
    """A warning if the share of requests that keep all limits is below FEW_KEEP times the SLO's lowest
    percentile, though every limit may be kept.

    Each percentile lets other requests miss, and a percentile over all gaps says little of a request that
    waits long for a single token.
    """
    share = verdict.attainment_frac
    least_frac = min(limit.percentile_frac for limit in slo.limits)
    # Written with `not`, so that a share that was not computed (NaN) gives no warning.
    if not share < FEW_KEEP * least_frac:
        return ()
    measured_requests = int(measured_mask(simulation).sum())
    late = []
    for limit in slo.limits:
        values_s = request_values_s(simulation, limit.metric, limit)
        late_s = values_s[values_s > limit.limit_s]
        if len(late_s):
            late.append(facts.LateRequests(limit, len(late_s) / measured_requests, float(late_s.max())))
    late.sort(key=lambda requests: -requests.late_frac)
    return (facts.FewKeepAll(share, tuple(late)),)


def list_warnings(
    fleet: Fleet, simulation: Simulation, slo: Slo, verdict: Verdict
) -> tuple[facts.Warned, ...]:
    """What a reader must know before they trust a fleet's simulation: a short trace, step times that were not
    measured, an engine version that was not checked.
    """
    window = window_of(simulation)
    warned: list[facts.Warned] = [*few_keep_all_warnings(slo, verdict, simulation)]
    if (hour := worst_hour(simulation, slo)) is not None and hour.missed:
        warned.append(hour)
    if window.residences < FEW_RESIDENCES:
        warned.append(facts.ShortTrace(window, FEW_RESIDENCES))
    for pool in fleet.pools:
        if not pool.type.latency.is_measured:
            warned.append(facts.GuessedSteps(pool.type.gpu.name, pool.type.tp, pool.type.latency.basis))
    if (engine := fleet.engine) is not None and engine.is_nearest:
        warned.append(facts.NearestEngine(engine.title, engine.basis))
    if engine is not None and not engine.is_checked:
        warned.append(facts.UncheckedEngine(engine.title))
    if (
        engine is not None
        and not engine.mixed_steps
        and any(limit.metric_row.is_of_gaps for limit in slo.limits)
    ):
        warned.append(facts.Cautioned("prompts-first"))
    if QUEUE[fleet.policies.queue].has_rank:
        warned.append(facts.Cautioned("requests-bring-priority"))
    if fleet.policies.prefix_cache and any(pool.type.keeps_ends_alone for pool in fleet.pools):
        has_pages = any(pool.type.extra_kv.passing_blocks for pool in fleet.pools)
        warned.append(facts.Cautioned("compressed-ends-kept" if has_pages else "only-ends-kept"))
    return tuple(dict.fromkeys(warned))


def roofline_warnings(problem: Problem, fleet: Fleet) -> tuple[facts.Warned, ...]:
    """A warning if a pool's step times are a roofline while other workers of the question were measured. A
    roofline is mostly too fast, so the fleet may have been chosen for that alone. GPUs that were measured in
    groups of another size are named with their size: "h100-80g tp1" won over "h100-80g tp2".
    """
    guessed = [pool.type for pool in fleet.running_pools if pool.type.latency.kind == "roofline"]
    measured = [worker for worker in problem.types if worker.latency.is_measured]
    if not guessed or not measured:
        return ()
    # GPUs that are measured in some group sizes and guessed in others.
    both = {row_of(worker.gpu.name) for worker in guessed} & {row_of(worker.gpu.name) for worker in measured}

    def names(types: Iterable[WorkerType]) -> tuple[str, ...]:
        """Each GPU once, with the size of its group where it is in `both`."""
        rows = ((row_of(worker.gpu.name), worker.tp) for worker in types)
        return tuple(dict.fromkeys(f"{gpu} tp{tp}" if gpu in both else gpu for gpu, tp in rows))

    return (facts.RooflineWon(names(guessed), names(measured)),)


def keep_alive_warnings(prefixes: Iterable[PoolPrefixes]) -> tuple[facts.Warned, ...]:
    """A warning if the requests that keep pinned prefixes cached take much of some worker's time, because no
    simulation has them.
    """
    keep_alives = [pool.keep_alive for pool in prefixes if pool.keep_alive is not None]
    is_much = any(keep_alive.busy_frac > KEEP_ALIVE_FRAC for keep_alive in keep_alives)
    return (facts.Cautioned("keep-alives-uncounted"),) if is_much else ()


def one_trace_warnings(problem: Problem) -> tuple[facts.Warned, ...]:
    """A warning if scenarios are redrawn from a trace that says little of other traffic: it is short, or the
    lengths in its quarters lie far apart.
    """
    if problem.search_scenarios is None or problem.task.described is not None:
        return ()
    growth_frac = 0.0 if problem.task.safety is None else problem.task.safety.growth_frac
    trace = problem.search_scenarios.trace
    is_short, (prompts_frac, outputs_frac) = trace.duration_s < SHORT_TRACE_S, quarters_apart(trace)
    if not (is_short or prompts_frac or outputs_frac):
        return ()
    return (facts.OneTraceRedrawn(trace.duration_s, is_short, prompts_frac, outputs_frac, growth_frac),)


def image_warnings(fleet: Fleet, trace: Trace) -> tuple[facts.Warned, ...]:
    """A warning where the LLM has an encoder: the trace has no images, or the encoder's time is left out.

    The least time of an encoder is 2 FLOPs per weight and image token on one GPU at its peak: each GPU has
    the whole encoder, and a token is made of one patch or more.
    """
    parameters, tokens = fleet.llm.encoder_parameters, trace.image_tokens
    if not parameters:
        return ()
    if tokens is None:
        return (facts.Cautioned("prompts-are-text"),)
    if not tokens.any():
        return ()
    gpu = max((pool.type.gpu for pool in fleet.pools), key=lambda gpu: gpu.dense_flops_per_s)
    mean = float(tokens[tokens > 0].mean())
    image_frac = float(tokens.sum() / trace.input_tokens.sum())
    least_s = 2 * parameters * mean / gpu.dense_flops_per_s
    return (facts.EncoderUntimed(image_frac, mean, least_s, gpu.name),)


def uncounted_prefix_warnings(policies: Policies, trace: Trace) -> tuple[facts.Warned, ...]:
    """A warning where the trace has block ids and prefix caches are not counted."""
    if (
        policies.prefix_cache
        or not trace.has_prefixes
        or (alike_frac := alike_tokens_frac(trace)) < ALIKE_FRAC
    ):
        return ()
    return (facts.PrefixesUncounted(alike_frac),)


def stock_warnings(problem: Problem, fleet: Fleet, bill: Bill) -> tuple[facts.Warned, ...]:
    """Warnings where the fleet's nodes are more than the stock has, and where owned GPUs are not used. Empty
    for one of several LLMs, which share the nodes and the owned GPUs.
    """
    if problem.limits.by_gpu:
        return ()
    return (*_nodes_beyond_stock(problem, bill), *_unused_owned(problem, fleet, bill))


def _nodes_beyond_stock(problem: Problem, bill: Bill) -> list[facts.Warned]:
    """A warning for each GPU whose nodes are more than the stock has, under all of its power caps. The search
    counts the fewest nodes that hold the workers; a placement by the network's topology may take more.
    """
    stock, warnings = problem.limits.stock, list[facts.Warned]()
    for base in dict.fromkeys(row_of(node.gpu) for node in bill.nodes):
        nodes = [node for node in bill.nodes if row_of(node.gpu) == base]
        counts = [stock.get(name) for name in {row_of(g.name) for g in problem.gpus if g.base == base}]
        stock_gpus = math.inf if None in counts else sum(count or 0 for count in counts)
        if (node_count := sum(node.count for node in nodes)) * nodes[0].gpus_per_node > stock_gpus:
            warnings.append(facts.NodesBeyondStock(base, node_count, nodes[0].gpus_per_node, int(stock_gpus)))
    return warnings


def _unused_owned(problem: Problem, fleet: Fleet, bill: Bill) -> list[facts.Warned]:
    """A warning for each GPU of which the question owns more than the fleet uses, while it rents others."""
    if not bill.rented_gpus:
        return []
    used = Counter[str]()
    for pool in fleet.running_pools:
        if payment_suffix(pool.type.gpu.name) == OWNED:
            used[row_of(pool.type.gpu.name)] += pool.count * pool.type.gpus
    owned = problem.task.owned.items()
    return [facts.OwnedUnused(gpu, count - used[gpu], count) for gpu, count in owned if count > used[gpu]]


def tenant_queue_warnings(problem: Problem) -> tuple[facts.Warned, ...]:
    """A warning if the SLO has guarantees to tenants, because no deployment target has a queue by tenant."""
    if problem.task.deploy is None or not problem.slo.guarantees:
        return ()
    return (facts.Cautioned("no-queue-by-tenants"),)


def shared_copies_warnings(problem: Problem) -> tuple[facts.Warned, ...]:
    """A warning where the traffic has copies of users who share their prefixes with the originals."""
    if not (problem.trace.copies_share_prefixes and problem.oracle.policies.prefix_cache):
        return ()
    return (facts.Cautioned("copies-share-prefixes"),)


def dying_away_warnings(problem: Problem, simulation: Simulation) -> tuple[facts.Warned, ...]:
    """A warning if sessions run on for long after the last new one began, as the load is lower then. Agents
    of a description all work until its end, so their load does not die away.
    """
    described = problem.trace.drawn_from
    if not problem.trace.after.size or (isinstance(described, Description) and described.agents is not None):
        return ()
    late_frac = float((simulation.arrival_s > problem.trace.arrival_s[-1]).mean())
    return (facts.DyingAway(late_frac),) if late_frac > LATE_FRAC else ()


def old_price_warnings(prices: Sequence[facts.Price], today: datetime.date) -> tuple[facts.Warned, ...]:
    """A warning where prices with a date were listed more than OLD_DAYS before `today`."""
    ages = [(age_days(price.date, today), price) for price in prices]
    old_ages = {price: age for age, price in ages if age is not None and age > OLD_DAYS}
    if not old_ages:
        return ()
    oldest = max(old_ages, key=old_ages.__getitem__)
    return (facts.OldPrices(tuple(price.gpu for price in old_ages), oldest.date, old_ages[oldest], OLD_DAYS),)


def list_prices(task: PlanQuestion, catalog: Catalog, gpus: Sequence[Gpu]) -> tuple[facts.Price, ...]:
    """The price of each GPU, with its source and date."""
    rows = []
    for gpu in gpus:
        if gpu.name.endswith(OWNED):
            rows.append(
                facts.Price(
                    gpu.name,
                    gpu.price_usd_per_h,
                    "owned: no new money" + (" but its electricity" if gpu.energy_usd_per_kwh else ""),
                    "",
                )
            )
            continue
        # An offer is for GPUs on demand or by commitment; spot GPUs have prices of their own.
        if (offer := task.offers.get(row_of(gpu.name))) and not gpu.name.endswith(SPOT):
            source = f"{offer.provider}, {offer.term}: {offer.source}"
            rows.append(facts.Price(gpu.name, gpu.price_usd_per_h, source, offer.date))
            continue
        is_listed = not gpu.name.endswith(SPOT) and bool({gpu.name, gpu.base} & catalog.provenance.keys())
        source, date = "", ""
        if gpu.name in task.prices_usd_per_h or gpu.base in task.prices_usd_per_h:
            source = "slo.yaml"
        elif is_listed:  # A capped GPU without a row has the price of its uncapped one.
            source, date = catalog.provenance[gpu.name].price_source, catalog.provenance[gpu.name].price_date
        rows.append(facts.Price(gpu.name, gpu.price_usd_per_h, source, date))
    return tuple(rows)
