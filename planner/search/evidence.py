"""What a plan says for itself: neighbours that fail, alternatives, what binds, what is assumed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.documents.catalog import Catalog
from planner.documents.task import Robust, Task
from planner.domain import SPOT, Gpu, Slo
from planner.errors import InfeasibleError, PlannerError
from planner.fleet import Disturbance, Fleet
from planner.plan import Alternative, Neighbour
from planner.reports.words import queue_text
from planner.search.asked import rates_frac
from planner.search.best_fleet import Found, best_of, policies_label, search_policies
from planner.search.fleets import Counts, counts_of, objective
from planner.search.options import OBJECTIVE_UNITS
from planner.search.oracle import SPOT_RISK_FRAC, stripped
from planner.search.pose import pose
from planner.search.problem import Conditions, Problem, on_all_draws, with_policies
from planner.simulator.metrics import Verdict, measured
from planner.simulator.replay import Simulation
from planner.solvers.master import Limits
from planner.solvers.placement import Placement, place
from planner.traffic.trace import Trace
from planner.units import show_s

FEW_RESIDENCES = 20  # a measured window of fewer mean residence times is called short

FEW_KEEP = 0.5  # of the lowest percentile: of p90, 45 % of the requests keep all limits at once

LATE_FRAC = 0.2  # of requests that arrive after the last nominal arrival: more, and the load dies away

_NEAR = 3.0  # a limit that would have to grow by more than this is not what binds: capacity is

PLACEMENT_S = 10.0


@dataclass(slots=True)
class Clock:
    """Whether there is time for one more simulation, and what there was none for.

    The last one may begin at `deadline`, on time.monotonic's clock.
    """

    deadline: float = math.inf
    missed: list[str] = field(default_factory=list)

    def allows(self, what: str) -> bool:
        if time.monotonic() <= self.deadline:
            return True
        if what not in self.missed:
            self.missed.append(what)
        return False

    def warnings(self) -> tuple[str, ...]:
        if not self.missed:
            return ()
        return (f"not simulated, out of time: {'; '.join(self.missed)}; raise --time-limit",)


def other_policies(answers: Sequence[tuple[Problem, Found]], clock: Clock) -> tuple[Alternative, ...]:
    """What the policies that were not chosen cost. Where first come first served was asked for alone, what
    shortest first would save.
    """
    chosen, found = best_of(answers)
    choices = chosen.task.policies()
    rows = tuple(
        Alternative(
            policies_label(problem.oracle.policies, choices),
            problem.oracle.fleet(other.best),
            other.value,
            costs_more(other.value, found.value)
            + (
                f", longest TTFT {_longest_ttft(problem, other.best)}"
                if clock.allows("the longest TTFT of other policies")
                else ""
            ),
        )
        for problem, other in answers
        if problem is not chosen
    )
    if chosen.task.queues == ("fcfs",):
        return (*rows, *_shortest_first(chosen, found, clock))
    return rows


def prefix_savings(answers: Sequence[tuple[Problem, Found]]) -> tuple[str, ...]:
    """What prefix caches save at the same SLO, both fleets certified by simulation."""
    problem, found = best_of(answers)
    if problem.hits is None:
        return ()
    policies, unit = problem.oracle.policies, OBJECTIVE_UNITS[problem.task.objective]
    plain = [(other, each) for other, each in answers if not other.oracle.policies.prefix_cache]
    if not policies.prefix_cache:
        return ("prefix caches save nothing here: the plan counts on no hit",)
    now = f"with prefix caching and {policies.routing} routing {found.value:.4g} {unit}"
    if not plain:
        return (f"{now}; without, no fleet within the limits keeps the SLO",)
    other, each = best_of(plain)
    gpus = [one.oracle.fleet(best.best).gpus for one, best in ((problem, found), (other, each))]
    return (f"{now} instead of {each.value:.4g}, {gpus[0]} GPUs instead of {gpus[1]}",)


def one_more(problem: Problem, best: Counts, clock: Clock) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """With prefix caches one worker more may spread prefixes too thin: is the SLO kept then? And warnings."""
    if not problem.oracle.policies.prefix_cache:
        return (), ()
    sentences, warnings = [], []
    for i, (option, count) in enumerate(best):
        more = (*best[:i], (option, count + 1), *best[i + 1 :])
        if not clock.allows("fleets with one worker more"):
            break
        verdict = _on_every_draw(problem, problem.oracle.fleet(more))
        pool = problem.oracle.fleet(best).pools[i].name
        sentences.append(f"with one worker more in the {pool} pool: {_why(verdict, problem.slo)}")
        warnings += [] if verdict.holds else [f"{sentences[-1]}; do not scale it up without a new plan"]
    return tuple(sentences), tuple(warnings)


def _shortest_first(problem: Problem, found: Found, clock: Clock) -> tuple[Alternative, ...]:
    """What shortest prompts first would save with the plan's own worker types, and whom it would cost."""
    has_queue = any(limit.metric in ("ttft", "e2e") for limit in problem.slo.limits)
    if not has_queue or sum(count for _, count in found.best) < 2:
        return ()
    if not clock.allows("what shortest prompts first would save"):
        return ()
    other = with_policies(problem, replace(problem.oracle.policies, queue="sjf"))
    fewer = stripped(found.best, other.oracle) if other.oracle.holds([found.best])[0] else found.best
    value = objective(fewer)
    if value >= found.value:
        return ()
    note = (
        f"{costs_more(value, found.value)}; longest TTFT {_longest_ttft(other, fewer)} instead of "
        f"{_longest_ttft(problem, found.best)}; ask for it with policies: {{queue: [fcfs, sjf]}}"
    )
    return (Alternative("queue sjf, same worker types", other.oracle.fleet(fewer), value, note),)


def _longest_ttft(problem: Problem, counts: Counts) -> str:
    simulation, _ = problem.oracle.verdict(problem.oracle.fleet(counts), record=False)
    return show_s(float(np.nanmax(simulation.ttft_s)))


def neighbours(problem: Problem, best: Counts, clock: Clock) -> tuple[tuple[Neighbour, ...], tuple[str, ...]]:
    """Every fleet with one worker fewer, simulated to the end; and what relaxing its failing limit saves."""
    neighbours, sentences = [], []
    for i, (option, count) in enumerate(best):
        pool = problem.oracle.fleet(best).pools[i].name
        fewer = (*best[:i], (option, count - 1), *best[i + 1 :])
        if not clock.allows("fleets with one worker fewer"):
            break
        failing_loss = problem.oracle.failing_loss(fewer)
        holds, (oracle, lost) = failing_loss is None, failing_loss or (problem.oracle, fewer)
        after = "" if oracle is problem.oracle else "on another draw or rate of the traffic, "
        if sum(n for _, n in lost) < sum(n for _, n in fewer):
            after += "after the losses it must survive, "
        roles = {o.role for o, n in lost if n > 0}
        if not roles or ("prefill" in roles) != ("decode" in roles):
            reason = f"{after}no worker of this role is left"
            neighbours.append(Neighbour(pool, option.type.name, False, reason))
            continue
        _, verdict = oracle.verdict(oracle.fleet(lost), record=True)
        why = after + _why(verdict, problem.slo)
        neighbours.append(Neighbour(pool, option.type.name, holds, why))
        failing = [line for line in verdict.lines if not line.holds]
        if (
            len(failing) == 1
            and verdict.is_steady
            and verdict.attainment_holds
            and not problem.oracle.has_losses
            and not problem.draws
        ):
            line = failing[0]
            if line.value_s <= _NEAR * line.limit.limit_s:
                sentences.append(
                    f"{line.limit.name} binds the {pool} pool: at {show_s(line.value_s)} instead of "
                    f"{show_s(line.limit.limit_s)} one worker of {option.type.name} fewer would do, which "
                    f"saves {option.objective:.4g} {OBJECTIVE_UNITS[problem.task.objective]}"
                )
                continue
        if not holds:
            sentences.append(f"capacity binds the {pool} pool: with one worker fewer, {why}")
    return tuple(neighbours), tuple(sentences)


def if_steps_take_longer(problem: Problem, fleet: Fleet, clock: Clock) -> tuple[str, bool]:
    """What happens if the fits err to the bad side, all steps longer by their error at once; is it kept?"""
    latencies = [pool.type.latency for pool in fleet.pools]
    shares = [max(fit.uncertainty_frac or 0.0, fit.mape_frac or 0.0) for fit in latencies]
    if not any(shares) or not clock.allows("the plan with longer steps"):
        return "", True
    pools = tuple(
        replace(pool, type=replace(pool.type, latency=pool.type.latency.longer(share)))
        for pool, share in zip(fleet.pools, shares, strict=True)
    )
    verdict = _on_every_draw(problem, replace(fleet, pools=pools))
    share = f"{100 * max(shares):.2g} %"
    sentence = f"if every step took {share} longer, the error of the fits: {_why(verdict, problem.slo)}"
    return sentence, verdict.holds


def insurance(
    problem: Problem, found: Found, trace: Trace, catalog: Catalog, seed: int, clock: Clock
) -> tuple[tuple[Alternative, ...], tuple[str, ...], tuple[str, ...]]:
    """What a robust plan costs more than one for what is expected, and how it does then; and warnings.

    Both searches leave the exact world beyond level 0, so the fleet of the stricter question, where it holds,
    is offered to the weaker one: what is expected never costs more than what is robust.
    """
    task = problem.task
    if task.robust == Robust() or not clock.allows("the plan for what is expected, to price the insurance"):
        return (), (), ()
    problem.progress("the plan for what is expected, to price the insurance")
    robust, unit = problem.oracle.fleet(found.best), OBJECTIVE_UNITS[task.objective]
    planned = (
        f"planned for steps {100 * task.robust.step_times_frac:g} % longer and all traffic up to "
        f"{100 * task.robust.traffic_frac:g} % more than expected"
    )
    if task.robust.traffic_frac != task.robust.traffic_from_frac:
        planned += f", sampled at {len(rates_frac(task, problem.trace))} rates"
    try:
        asked = pose(
            replace(task, robust=Robust()),
            trace,
            catalog,
            seed=seed,
            conditions=Conditions(clock.deadline, problem.progress),
        )
        expected, plain = best_of(search_policies(asked, (robust,)))
    except InfeasibleError as error:
        missed = f"{planned}, but for what is expected no fleet was found: {error}"
        return (), (missed,), (missed,)
    except PlannerError:
        return (), (f"{planned}; what that costs was not found in time",), ()
    cheapest, value = expected.oracle.fleet(plain.best), plain.value
    same_way = on_all_draws(with_policies(asked, robust.policies))
    counts = counts_of(robust, plain.level0.options)
    held = counts is not None and same_way.oracle.holds([counts])[0]
    if counts is not None and held and found.value < value:
        cheapest, value = same_way.oracle.fleet(counts), found.value
    row = Alternative(
        "not insured: step times and traffic as expected", cheapest, value, costs_more(value, found.value)
    )
    if counts is None or not held:
        verdict = None if counts is None else _on_every_draw(same_way, same_way.oracle.fleet(counts))
        missed = f"{planned}, but if all comes as expected it misses the SLO"
        missed += "" if verdict is None else f": {_why(verdict, problem.slo)}"
        return (row,), (missed,), (missed,)
    verdict = same_way.oracle.verdict(same_way.oracle.fleet(counts), record=True)[1]
    values = ", ".join(f"{line.limit.name} is {show_s(line.value_s)}" for line in verdict.lines)
    costs = f"this insurance costs {found.value - value:.4g} {unit} ({costs_more(found.value, value)})"
    return (row,), (f"{planned}; {costs}", f"if all comes as expected, {values}"), ()


def placement(fleet: Fleet, time_limit_s: float = PLACEMENT_S) -> Placement | None:
    """Workers on the fewest nodes, spot workers on nodes of their own; None where there are too many ways."""
    pools = tuple(
        replace(pool, type=replace(pool.type, gpu=replace(pool.type.gpu, base=pool.type.gpu.base + SPOT)))
        if pool.type.gpu.name.endswith(SPOT)
        else pool
        for pool in fleet.pools
    )
    try:
        return place(replace(fleet, pools=pools), time_limit_s=time_limit_s)
    except PlannerError:
        return None


def on_spot(problem: Problem, found: Found, clock: Clock) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the plan takes for granted of its spot workers, and a run in which they are taken away at once."""
    fleet, oracle = problem.oracle.fleet(found.best), problem.oracle
    first = 0
    sentences: list[str] = []
    events: list[Disturbance] = []
    middle_s = (float(problem.trace.arrival_s[0]) + float(problem.trace.arrival_s[-1])) / 2
    for pool, (option, count) in zip(fleet.pools, found.best, strict=True):
        if terms := oracle.spot.get(option.type.gpu.name):
            down = oracle.spot_down(option, count)
            sentences.append(
                f"{pool.name}: of {count} spot workers {down} may be down at once, more are so in "
                f"{100 * SPOT_RISK_FRAC:g} % of the time at most ({terms.interruptions_per_h:g} "
                f"interruptions per worker and hour, back after {show_s(terms.restart_s)}, each on its own); "
                "the SLO holds without them"
            )
            for worker in range(first, first + down):
                events += [
                    Disturbance(middle_s, "down", worker),
                    Disturbance(middle_s + terms.restart_s, "up", worker),
                ]
        first += pool.count
    if not sentences:
        return (), ()
    warnings = ["spot workers need nodes of your cloud's spot market: no manifest asks for them"]
    if events and clock.allows("spot workers that go all at once"):
        verdict = _on_every_draw(problem, replace(fleet, disturbances=tuple(events)))
        sentence = (
            f"if they go at once in the middle of the trace, their requests begin anew: "
            f"{_why(verdict, problem.slo)}"
        )
        sentences.append(sentence)
        if not verdict.holds:
            warnings.append(sentence)
    return tuple(sentences), tuple(warnings)


def _on_every_draw(problem: Problem, fleet: Fleet) -> Verdict:
    """Of the traffic that must be served; where that holds, of the first other draw or rate that does not."""
    _, first = problem.oracle.verdict(fleet, record=True)
    if not first.holds:
        return first
    for draw in problem.draws:
        _, verdict = replace(problem.oracle, trace=draw, draws=()).verdict(fleet, record=True)
        if not verdict.holds:
            return verdict
    return first


def _why(verdict: Verdict, slo: Slo) -> str:
    """Why a fleet fails, in words."""
    reasons = [
        f"{line.limit.name} is {show_s(line.value_s)}, {100 * line.kept_frac:.2f} % within "
        f"{show_s(line.limit.limit_s)} ({100 * line.limit.percentile_frac:g} % needed)"
        for line in verdict.lines
        if not line.holds
    ]
    if not verdict.attainment_holds:
        reasons.append(
            f"{100 * verdict.attainment_frac:.2f} % of requests keep all limits "
            f"({100 * (slo.attainment_frac or 1):g} % needed)"
        )
    if not verdict.is_steady:
        reasons.append(queue_text(verdict.patient_frac, verdict.patience_s))
    return "; ".join(reasons) or "keeps the SLO"


def used_up(limits: Limits, best: Counts) -> tuple[str, ...]:
    """Limits of which nothing (or less than one worker) is left."""
    sentences = []
    for name, amount in limits.rows():
        used = sum(limits.use(name, option.type) * count for option, count in best)
        smallest = min(
            (limits.use(name, option.type) for option, _ in best if limits.use(name, option.type)), default=0
        )
        if smallest and amount - used < smallest:
            sentences.append(f"{name} is used up: {used:g} of {amount:g}")
    return tuple(sentences)


def duals(prices: Mapping[str, float], wanted: str) -> tuple[str, ...]:
    """What `bounds.shadow_prices` say, largest first. Nothing for limits that cost the bound nothing."""
    unit = OBJECTIVE_UNITS[wanted]
    steps = {
        "power": (1e3, "one more kW"),
        "cost": (1.0, "one more USD/h allowed"),
        "GPUs": (1.0, "one more GPU"),
    }
    sentences = []
    for name, price in sorted(prices.items(), key=lambda item: -item[1]):
        size, step = steps.get(name, (1.0, f"one more {name.removeprefix('stock of ')}"))
        if price * size > 1e-6:
            sentences.append(
                f"{step} lowers the policy-free bound, workers not being whole, by {price * size:.3g} {unit} "
                "(a dual: of the bound, not of the plan)"
            )
    return tuple(sentences)


def costs_more(cost: float, value: float) -> str:
    if not math.isfinite(cost) or value <= 0:
        return "not found"
    return "the same" if abs(cost / value - 1) < 1e-9 else f"{100 * (cost / value - 1):+.1f} %"


def residences(simulation: Simulation) -> tuple[float, float]:
    """Seconds of the measured window, and how many mean residence times of a request they are."""
    window_s = simulation.window_s[1] - simulation.window_s[0]
    return window_s, window_s / float(np.nanmean(simulation.e2e_s))


def few_keep_all(slo: Slo, verdict: Verdict, simulation: Simulation) -> tuple[str, ...]:
    """A warning where every line holds, but FEW_KEEP times the lowest percentile is more than keep them all.

    Each percentile lets other requests go, and one of all gaps lets go who waits long for a single token.
    """
    share = verdict.attainment_frac
    least_frac = min(limit.percentile_frac for limit in slo.limits)
    if not share < FEW_KEEP * least_frac:
        return ()
    counted = measured(simulation)
    first_s, gap_s = (
        float(np.nanmax(each[counted], initial=0.0)) for each in (simulation.ttft_s, simulation.tbt_max_s)
    )
    return (
        f"only {100 * share:.1f} % of the requests keep all limits at once, though every line holds: "
        f"one waits {show_s(first_s)} for its first token, one {show_s(gap_s)} between two tokens; if more "
        "must, ask for it with slo: {attainment: 0.9}",
    )


def warnings(fleet: Fleet, simulation: Simulation, slo: Slo, verdict: Verdict) -> tuple[str, ...]:
    """What the reader must know first: few requests are served as promised, too short a trace, step times
    that nobody measured.
    """
    window_s, times = residences(simulation)
    sentences = [*few_keep_all(slo, verdict, simulation)]
    if times < FEW_RESIDENCES:
        sentences.append(
            f"the trace is short: {show_s(window_s)} measured, {times:.1f} times a request's mean "
            f"residence where {FEW_RESIDENCES} make a steady state; plan on a longer trace"
        )
    for pool in fleet.pools:
        if not pool.type.latency.basis.startswith(("silicon", "measured")):
            sentences.append(
                f"step times of {pool.type.gpu.name} tp{pool.type.tp}: {pool.type.latency.basis}"
            )
    return tuple(dict.fromkeys(sentences))


def shared_copies(problem: Problem) -> tuple[str, ...]:
    """A warning where users were made up who ask what others asked."""
    is_superposed = any("copies share their prefixes" in note for note in problem.trace.notes)
    if not (is_superposed and problem.oracle.policies.prefix_cache):
        return ()
    return (
        "superposed copies of the trace share their prefixes, sessions included, which overstates hits; "
        "thin or compress, or plan on a trace of that rate",
    )


def dying_away(problem: Problem, simulation: Simulation) -> tuple[str, ...]:
    """A warning where sessions run on for long while no new one begins."""
    if not problem.trace.after.size:
        return ()
    late_frac = float((simulation.arrival_s > problem.trace.arrival_s[-1]).mean())
    if late_frac <= LATE_FRAC:
        return ()
    return (
        f"{100 * late_frac:.0f} % of the requests arrive later than any would if answers took no time: "
        "sessions run on while none begins, so the fleet is judged on a load that dies away; plan on a "
        "longer trace",
    )


def prices_note(task: Task, catalog: Catalog, gpus: Sequence[Gpu]) -> str:
    prices = []
    for gpu in gpus:
        provenance = catalog.provenance.get(gpu.name)
        is_own = gpu.name in task.prices_usd_per_h or gpu.base in task.prices_usd_per_h
        origin = (
            "from slo.yaml"
            if is_own
            else f"{provenance.price_source}, {provenance.price_date}"
            if provenance
            else ""
        )
        prices.append(f"{gpu.name} {gpu.price_usd_per_h:g} USD/h ({origin})")
    return "; ".join(prices)
