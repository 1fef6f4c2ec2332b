"""What a plan says for itself: neighbours that fail, alternatives, what binds, what is assumed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from planner.documents.catalog import Catalog
from planner.documents.task import Robust, Task
from planner.domain import SPOT, Gpu, Slo
from planner.errors import InfeasibleError, PlannerError
from planner.fleet import Disturbance, Fleet, Policies
from planner.options import OBJECTIVE_UNITS
from planner.oracle import SPOT_RISK_FRAC, side_by_side
from planner.plan import Alternative, Neighbour
from planner.reports.words import queue_text
from planner.searching import (
    Found,
    Level0,
    Problem,
    best_of,
    counts_of,
    on_all_draws,
    policies_label,
    pose,
    rates_frac,
    search_policies,
    stripped,
    with_policies,
)
from planner.simulator.metrics import Verdict, measured
from planner.simulator.replay import Simulation
from planner.solvers.level0 import Counts, Search, largest_below, least_that_holds, objective
from planner.solvers.master import Limits, Option
from planner.solvers.placement import Placement, place
from planner.traffic.trace import Trace
from planner.units import show_s

FEW_RESIDENCES = 20  # a measured window of fewer mean residence times is called short
FEW_KEEP = 0.5  # of the lowest percentile: of p90, 45 % of the requests keep all limits at once
LATE_FRAC = 0.2  # of requests that arrive after the last nominal arrival: more, and the load dies away
_NEAR = 3.0  # a limit that would have to grow by more than this is not what binds: capacity is
PLACEMENT_S = 10.0
ALONE_TIMES = 4.0  # of the plan's value: dearer fleets of one GPU type are not looked for
ALONE_REQUESTS = 2_000_000  # simulated requests that the GPU types alone may cost together
ALONE_LEAST = 4  # simulations of each at least,
ALONE_FAILED = 0.2  # of which one that fails is such a share: it stops early
_PRICE_STEP = 1.3
_ROUTED = {"jsq": "join the shortest queue", "round-robin": "routed in turn"}


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
            _more(other.value, found.value)
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
        f"{_more(value, found.value)}; longest TTFT {_longest_ttft(other, fewer)} instead of "
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
            deadline=clock.deadline,
            progress=problem.progress,
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
        "not insured: step times and traffic as expected", cheapest, value, _more(value, found.value)
    )
    if counts is None or not held:
        verdict = None if counts is None else _on_every_draw(same_way, same_way.oracle.fleet(counts))
        missed = f"{planned}, but if all comes as expected it misses the SLO"
        missed += "" if verdict is None else f": {_why(verdict, problem.slo)}"
        return (row,), (missed,), (missed,)
    verdict = same_way.oracle.verdict(same_way.oracle.fleet(counts), record=True)[1]
    values = ", ".join(f"{line.limit.name} is {show_s(line.value_s)}" for line in verdict.lines)
    costs = f"this insurance costs {found.value - value:.4g} {unit} ({_more(found.value, value)})"
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
    """What `searching.shadow_prices` say, largest first. Nothing for limits that cost the bound nothing."""
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


def alternatives(problem: Problem, level0: Level0, best: Counts, value: float) -> tuple[Alternative, ...]:
    """The best of simpler kinds, and the cheapest of every GPU type alone in one mixed pool.

    Each is a fleet that holds, with its price, or is said to be not priced. The plan itself is none of them.
    """
    asked, search = on_all_draws(problem), level0.search
    oracle, rows = asked.oracle, []
    alone = _mixed_alone(asked, level0, best, value)
    is_one_gpu = len({option.type.gpu.name for option, _ in best}) == 1
    is_mixed = all(option.role == "mixed" for option, _ in best)
    kinds: list[tuple[str, Counts | None, float]] = []
    if not is_one_gpu:
        of_one = [(found.cost, found.counts) for found in alone.values() if found.counts]
        if (counts := level0.one_gpu[0]) and len({option.type.gpu.name for option, _ in counts}) == 1:
            of_one.append((level0.one_gpu[1], counts))
        cost, cheapest = min(of_one, key=lambda row: row[0], default=(math.inf, None))
        kinds.append(("one GPU type only", cheapest, cost))
    if not is_mixed:
        cost, cheapest = min(
            ((found.cost, found.counts) for found in alone.values()),
            key=lambda row: row[0],
            default=(math.inf, None),
        )
        kinds.append(("mixed pools only", cheapest, cost))
    kinds.append(("one worker type per pool (level 0)", search.best, search.value))
    for label, counts, cost in kinds:
        if counts == best:
            continue
        if counts is None:
            note = "none of one worker type per pool was found; mixes of several were not searched for it"
            rows.append(Alternative(label, None, math.inf, note))
        elif oracle.holds([counts])[0]:
            rows.append(Alternative(label, oracle.fleet(counts), cost, _more(cost, value)))
        else:
            note = "its best fails on another draw or rate of the traffic"
            rows.append(Alternative(label, None, cost, note, at_least=True))
    for gpu, found in alone.items():
        label = f"{gpu}, mixed"
        if found.counts is None:
            rows.append(Alternative(label, None, found.least, found.note, at_least=True))
        elif found.counts != best:
            note = "; ".join(filter(None, (_more(found.cost, value), found.note)))
            rows.append(Alternative(label, oracle.fleet(found.counts), found.cost, note))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class _Alone:
    """The cheapest mixed pool of one GPU type, if one was found; else what none costs less than, and why."""

    counts: Counts | None
    cost: float
    least: float
    note: str


def _mixed_alone(problem: Problem, level0: Level0, best: Counts, value: float) -> dict[str, _Alone]:
    """Of each GPU type, by its name; searched side by side, each with its share of the effort."""
    groups: dict[str, list[Option]] = {}
    for option in level0.options:
        if option.role == "mixed":
            groups.setdefault(option.type.gpu.name, []).append(option)
    found: dict[str, _Alone] = {}
    effort = ALONE_REQUESTS // max(len(groups), 1)

    def look(gpu: str) -> None:
        found[gpu] = _cheapest_mixed(problem, level0, groups[gpu], best, value, effort)

    problem.progress("the other GPU types, each alone")
    side_by_side([lambda gpu=gpu: look(gpu) for gpu in groups])  # type: ignore[misc]
    return {gpu: found[gpu] for gpu in groups}


def _cheapest_mixed(
    problem: Problem, level0: Level0, options: Sequence[Option], best: Counts, value: float, effort: int
) -> _Alone:
    """One mixed pool of one of these options, up to ALONE_TIMES the plan's value and `effort` requests.

    Where none is known, all sizes of worker are tried at one price, which grows until one of them holds; then
    every option is tried below that.
    """
    oracle, search = problem.oracle, level0.search
    left = max(effort / (len(problem.trace) + sum(map(len, problem.draws))), ALONE_LEAST)
    failed = {
        option.name: max(search.beyond.get(option.name, 0), level0.bounded[option.name].least - 1)
        for option in options
    }
    counts: Counts | None = None
    ceiling, note = ALONE_TIMES * value, ""

    def holds(option: Option, count: int) -> bool:
        nonlocal left
        answer = oracle.holds([((option, count),)])[0]
        left -= 1 if answer else ALONE_FAILED
        if not answer:
            failed[option.name] = max(failed[option.name], count)
        return answer

    def most(option: Option, price: float) -> int:
        """Workers of this option for less than `price`, as many as there are; 0 where all of them fail."""
        count = min(level0.bounded[option.name].most, largest_below(option, price))
        return int(count) if failed[option.name] < count < math.inf else 0

    gaps_s = [limit.limit_s for limit in problem.slo.limits if limit.metric == "tbt"]

    def expected(option: Option) -> tuple[bool, float, int]:
        """Whether a full step would break the tightest limit on gaps; then by what is likely to do."""
        budget = option.type.max_num_batched_tokens
        is_late = float(option.type.latency.step_s(budget)) > 0.9 * min(gaps_s, default=math.inf)
        count = search.smallest.get(option.name, level0.bounded[option.name].likely)
        return is_late and option.name not in search.smallest, count * option.objective, -budget

    def has_stopped() -> bool:
        return left <= 0 or problem.out_of_time()

    ordered = sorted(options, key=expected)
    known = [option for option in ordered if option.name in search.smallest]
    if len(best) == 1 and best[0][0] in options:
        counts, ceiling = best, value
    elif known and holds(known[0], count := search.smallest[known[0].name]):
        counts, ceiling = ((known[0], count),), count * known[0].objective
    sizes = {(option.type.tp, option.type.pp): option for option in reversed(ordered)}.values()
    price = max(_least(options, failed), search.value if search.is_exhausted else 0.0) * _PRICE_STEP
    while counts is None and price < _PRICE_STEP * ceiling and not has_stopped():
        for option in sizes if price < ceiling else ordered:
            if (count := most(option, min(price, ceiling))) and holds(option, count):
                counts, ceiling = ((option, count),), count * option.objective
                break
        price *= _PRICE_STEP
    for option in ordered if counts else ():
        if not (count := most(option, ceiling)):
            continue
        if has_stopped():
            note = "perhaps not the cheapest, as not all of its settings were tried"
            break
        found = least_that_holds(
            partial(holds, option), failed[option.name] + 1, count, level0.bounded[option.name]
        )
        if found is not None:
            counts, ceiling = ((option, found),), found * option.objective
    if counts is not None:
        return _Alone(counts, ceiling, 0.0, note)
    least = max(_least(options, failed), search.value if search.is_exhausted else 0.0)
    note = "the effort ended" if has_stopped() else _none_alone(level0, options, failed)
    return _Alone(None, math.inf, least, note)


def _least(options: Sequence[Option], failed: Mapping[str, int]) -> float:
    """What one pool of one of these options costs at least, after these counts failed."""
    return min((failed[option.name] + 1) * option.objective for option in options)


def _none_alone(level0: Level0, options: Sequence[Option], failed: Mapping[str, int]) -> str:
    if all(failed[option.name] >= level0.bounded[option.name].most for option in options):
        return "all that are in stock or within the limits are too few"
    return f"none holds up to {ALONE_TIMES:g} times the plan"


def _more(cost: float, value: float) -> str:
    if not math.isfinite(cost) or value <= 0:
        return "not found"
    return "the same" if abs(cost / value - 1) < 1e-9 else f"{100 * (cost / value - 1):+.1f} %"


def _residences(simulation: Simulation) -> tuple[float, float]:
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
    window_s, residences = _residences(simulation)
    sentences = [*few_keep_all(slo, verdict, simulation)]
    if residences < FEW_RESIDENCES:
        sentences.append(
            f"the trace is short: {show_s(window_s)} measured, {residences:.1f} times a request's mean "
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


def _of_sessions(problem: Problem) -> list[str]:
    """What is assumed where requests wait for others."""
    if not problem.trace.after.size:
        return []
    sentences = [
        "requests that wait for others arrive when this fleet has answered those; rate and window are of "
        "arrivals as if answers took no time; what arrives after the warm-up counts, to the end of the run",
        "bound: with every request that a percentile lets go, all of its session is given up; of the others "
        "each begins as late as the limits let the ones before it end",
    ]
    return sentences


def _of_bound(problem: Problem) -> list[str]:
    """What the lower bound counts, and over which fleets."""
    work, trace = problem.obliged, problem.trace
    if work.whole_frac > 0:
        counts = (
            f"all work of {100 * work.whole_frac:.3g} % of the requests, by "
            f"{work.whole_s - trace.duration_s:.4g} s after the trace"
        )
    elif work.prefill_frac > 0:
        counts = f"the prefill of {100 * work.prefill_frac:.3g} % of the requests"
    else:
        counts = "no request"
    if not trace.after.size:
        counts += ", and of half of the last tenth all work, by the backlog test"
    sentences = [
        f"bound: the SLO obliges {counts}; a percentile of gaps obliges nothing, as few gaps may be long; "
        "work at its cheapest rate per token, by engines that batch as vLLM V1, under any routing, order and "
        "admission"
    ]
    if small := [worker for item in problem.left for worker in item.workers]:
        names = sorted({f"{worker.gpu.name} tp{worker.tp}" for worker in small})
        sentences.append(
            f"the bound is over fleets with {', '.join(names)} too, whose KV cache is too small for the "
            f"longest request ({problem.longest_tokens} tokens) with some or all settings, as a fleet may "
            "turn away what a percentile lets go; the search is over workers that hold it: a plan turns no "
            "request away"
        )
    return sentences


def assumptions(problem: Problem, simulation: Simulation, search: Search) -> tuple[str, ...]:
    task = problem.task
    window_s, residences = _residences(simulation)
    length = (
        f"the measured window lasts {show_s(window_s)}, {residences:.0f} times a request's mean residence"
    )
    bases = sorted({worker.latency.basis for worker in problem.types})
    policies = problem.oracle.policies
    seats = " or ".join(map(str, task.max_num_seqs))
    sentences = [
        "more workers never hurt (monotonicity), so one failure refutes every smaller fleet",
        "step times: " + "; ".join(bases),
        "host overhead per step: "
        + ", ".join(sorted({f"{worker.latency.h_s * 1e3:g} ms" for worker in problem.types})),
        f"at most {seats} sequences per worker, 16-token KV blocks, "
        f"{'prefix caches' if policies.prefix_cache else 'no prefix cache'}, {_queue_order(policies)}, "
        f"{_ROUTED.get(policies.routing, f'routing {policies.routing}')}",
        "TTFT ends with prefill; the KV transfer of a disaggregated request falls into its first gap",
        f"KV blocks move over one shared link of {task.network.bandwidth_bytes_per_s / 1e9:g} GB/s, "
        f"{task.network.transfer}",
        "steady state: warm-up cut (a twentieth of the trace, at most two minutes), backlog test at the end",
        length,
        *_of_bound(problem),
        "beyond level 0 every GPU and TP degree takes part with one token budget per role",
        "power: the boards' limits, GPUs only",
    ]
    if problem.hits is not None:
        sentences.append(
            "the bound counts of every block of a prompt its first use in the trace alone, which no cache "
            "spares, and of memory the blocks that one request has alone"
        )
    if policies.prefix_cache:
        sentences.append(
            "caches are cold at the start of the trace; with them monotonicity is no more than likely, since "
            "more workers may hit less: neighbours and binding have what was simulated with one worker fewer "
            "and one more"
        )
    sentences += _of_sessions(problem)
    return tuple(sentences + ([problem.slo_note] if problem.slo_note else []))


def _queue_order(policies: Policies) -> str:
    order = {
        "fcfs": "first come first served",
        "sjf": "shortest prompts first",
        "ljf": "longest prompts first",
        "srpt": "shortest prompt and output first",
    }[policies.queue]
    if policies.queue_window_s < math.inf:
        order += f" (nobody overtaken by what arrives {show_s(policies.queue_window_s)} later)"
    return order


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
