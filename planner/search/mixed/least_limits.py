"""Finds the least limits of an SLO [s] that some fleet within the limits on stock, money and power keeps.

A limit that some fleet keeps comes from the largest fleet of a few fast worker types (`_attained_s`), or from
a search with much looser limits (`_relaxed_s`). It may be far looser than needed, because other worker types
and smaller fleets were not simulated. So it is lowered by bisection between the largest limit that no fleet
keeps and the smallest that some fleet keeps: level 0 is searched at each value in between, until the two are
within PRECISION or LIMITS_WORK_S is spent. The floor of a limit is the least value [s] that its percentile
can have: that with every request on an idle worker.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.domain import ROUNDING
from planner.errors import Change
from planner.fleet import WorkerType
from planner.search.level0.level0_search import search_level0
from planner.search.mixed.router_fit import fit_router
from planner.search.oracle.fleet_counts import is_within
from planner.search.oracle.work_clock import in_time, now_s
from planner.search.problem.idle_limits import Floor, floor_s
from planner.search.problem.options import mixed_options, split_of
from planner.search.problem.plan_problem import Problem, on_all_draws, with_policies
from planner.slo_metrics import metric_label
from planner.solvers.required_work import compute_slo_work
from planner.units import LEAST_MINUTES_S, show_s

# Numbers for which no measurement is named are set by hand.
MOST_RELAXED = 5.0  # Limits are searched up to this multiple. Only the largest fleets may attain looser ones.
PRECISION = 1.02  # A limit is lowered until no fleet was found at the limit divided by this.
LIMITS_WORK_S = 20.0  # What all searches for limits that are kept may take, on the search's clock.
MOST_PROBED = 4  # The largest fleets of this many worker types are simulated to see which limits they keep.
# A probed fleet has at most this many workers: more would be idle on traffic that is short enough to probe.
MOST_WORKERS = 256
LIFTED_S = 1e7  # Every request keeps this limit. It is finite because verdicts compute with it.


@dataclass(frozen=True, slots=True)
class _KeptLimits:
    """Limits [s] by name that some fleet keeps under some choice of policies. `missed_s` has for each name
    the largest limit at which no fleet was found, or the floor.
    """

    limits_s: dict[str, float]
    missed_s: dict[str, float]


def find_least_limits(
    problem: Problem, floors: Sequence[Floor], *, together: bool = True
) -> list[list[Change]]:
    """Changes of the limits of `floors` with which level 0 has a fleet. Each entry is one solution, which
    needs all of its changes. Empty if none was found in time.

    If idle workers keep all limits, the limits are relaxed one at a time, each in an entry of its own. If no
    single one is enough, or if idle workers miss some limit, then with `together` the limits of `floors` are
    relaxed together, and if that is not enough all limits of the SLO.
    """
    problem = replace(problem, deadline=min(problem.deadline, now_s() + LIMITS_WORK_S))
    are_idle_enough = all(floor.least_s <= floor.limit.limit_s for floor in floors)
    alone = [(floor,) for floor in floors] if are_idle_enough else []
    ways = list(filter(None, (_least_way(problem, single) for single in alone)))
    if ways or not together:
        return ways
    for joint in dict.fromkeys((tuple(floors), tuple(all_floors(problem)))):
        if joint not in alone and (way := _least_way(problem, joint)):
            return [way]
    return []


def find_attained_limits(problem: Problem) -> list[list[Change]]:
    """Like `find_least_limits`, after a search that has used up its time: the limits that the largest fleets
    of a few worker types attain, not lowered any further.
    """
    floors = floors_to_relax(problem)
    attained_s = in_time(lambda: _attained_s(problem, floors), {})
    way = _changes(problem, _KeptLimits(attained_s, {floor.limit.name: floor.missed_s for floor in floors}))
    return [way] if way else []


def _least_way(problem: Problem, floors: Sequence[Floor]) -> list[Change]:
    """Changes of these limits that are enough if all are made. The limits are lowered one after another."""
    limits_s = in_time(lambda: _attained_s(problem, floors), {}) or _relaxed_s(problem, floors)
    kept = _KeptLimits(limits_s, {floor.limit.name: floor.missed_s for floor in floors})
    for name in limits_s:
        kept = _narrowed(problem, kept, name)
    return _changes(problem, kept)


def _changes(problem: Problem, kept_limits: _KeptLimits) -> list[Change]:
    """A change of each limit of the question that is tighter than the limit that is kept."""
    return [
        Change(limit.name, limit.limit_s, enough_s, "s", kept_limits.missed_s[limit.name])
        for limit in problem.slo.limits
        if (enough_s := kept_limits.limits_s.get(limit.name, 0.0)) > limit.limit_s
    ]


def _narrowed(problem: Problem, kept_limits: _KeptLimits, name: str) -> _KeptLimits:
    """The limits with that of `name` lowered by bisection as far as fleets of level 0 keep all limits. The
    bisection is on a logarithmic scale, because PRECISION is a ratio.
    """
    enough_s, missed_s = kept_limits.limits_s[name], kept_limits.missed_s[name]
    while enough_s > missed_s * PRECISION and not problem.out_of_time():
        problem.progress(
            f"no fleet within the limits; {name} of {show_s(enough_s)} is kept, looking for less"
        )
        between_s = rounded_up(math.sqrt(enough_s * missed_s))
        if not missed_s < between_s < enough_s:
            break
        looser = with_limits(problem, {**kept_limits.limits_s, name: between_s})
        if _is_kept_at_level0(looser):
            enough_s = between_s
        elif problem.out_of_time():  # The search was cut short, so this limit may be kept after all.
            break
        else:
            missed_s = between_s
    return _KeptLimits({**kept_limits.limits_s, name: enough_s}, {**kept_limits.missed_s, name: missed_s})


def _is_kept_at_level0(problem: Problem) -> bool:
    """Whether level 0 has a fleet that holds, with any choice of policies."""
    choices = problem.task.policy_choices()
    problems = (with_policies(problem, policies) for policies in choices)
    searches = (search_level0(policy_problem, any_will_do=True).search for policy_problem in problems)
    return any(search.best is not None for search in searches)


def ways_of_limits_text(ways: Sequence[Sequence[Change]]) -> str:
    """For instance "TTFT p95 to 1.20 s (below 1.18 s no fleet was found), or TPOT p95 to 60 ms (...)"."""
    return ", or ".join(" and ".join(map(_limit_text, way)) for way in ways)


def _limit_text(change: Change) -> str:
    """The limit that is enough, never rounded down, and the largest at which no fleet was found."""
    return (
        f"{metric_label(change.limit)} to {_seconds_text(change.enough)} "
        f"(below {_seconds_text(change.none_below)} no fleet was found)"
    )


def _seconds_text(seconds: float) -> str:
    """The time in seconds: minutes as `show_s` rounds them may be fewer than a fleet needs."""
    return show_s(seconds) if seconds < LEAST_MINUTES_S else f"{seconds:.6g} s"


def floors_to_relax(problem: Problem) -> list[Floor]:
    """The floors that exceed their limits; all floors if none does."""
    floors = all_floors(problem)
    return [floor for floor in floors if floor.least_s > floor.limit.limit_s] or floors


def all_floors(problem: Problem) -> list[Floor]:
    """Each limit with its floor and the name of the worker type that reaches the floor."""
    floors: list[Floor] = []
    for limit in problem.slo.limits:
        # `problem.lengths` are of all requests, so no floor is known for a class; 0 is true of any.
        if limit.selector is not None:
            floors.append(Floor(limit, 0.0, problem.types[0].name))
            continue
        of_types = [(floor_s(limit, worker, problem.lengths), worker.name) for worker in problem.types]
        floors.append(Floor(limit, *min(of_types)))
    return floors


def _types_to_probe(types: Sequence[WorkerType], floors: Sequence[Floor]) -> list[WorkerType]:
    """The fastest worker type of each limit, and the first of these on other numbers of GPUs: with fewer GPUs
    per worker, more workers are within the limits.
    """
    names = dict.fromkeys(floor.worker_type for floor in floors)
    fastest = [worker for name in names for worker in types if worker.name == name]
    first = fastest[0]
    alike = [
        worker
        for worker in types
        if (worker.gpu, worker.max_num_batched_tokens) == (first.gpu, first.max_num_batched_tokens)
    ]
    # One worker type stands for each split of the LLM; types of one split differ in seats and drafts alone.
    one_per_split = {split_of(worker): worker for worker in sorted(alike, key=lambda worker: worker.gpus)}
    largest_first = sorted(one_per_split.values(), key=lambda worker: -worker.gpus)
    return list(dict.fromkeys((*fastest, *largest_first)))[:MOST_PROBED]


def _attained_s(problem: Problem, floors: Sequence[Floor]) -> dict[str, float]:
    """Limits [s] by name with which the largest fleet of one of a few fast worker types holds in simulation.
    If there are several such types, the limits with the smallest product are returned; empty if there is
    none.

    Each type takes two simulations: one with the limits of `floors` lifted, whose percentiles become the new
    limits, and one with these limits, on all draws of the traffic on which fleets are judged. A search takes
    far longer: for 10,000 turns of 24 agents one had no answer after 70 CPU seconds.
    """
    relaxations: list[dict[str, float]] = []
    problem.progress("out of reach; looking for what is not")
    for option in mixed_options(_types_to_probe(problem.types, floors), problem.task.objective):
        count = int(min(problem.limits.most_workers(option.type), MOST_WORKERS))
        fleet = ((option, count),)
        if count < 1 or not is_within(problem.limits, fleet):
            continue
        lifted = with_limits(problem, {floor.limit.name: LIFTED_S for floor in floors})
        choices = tuple(
            policies
            for policies in problem.task.policy_choices()
            if with_policies(problem, policies).can_simulate([option])
        )
        # What `count` workers attain depends on the settings of a router that follows prefixes, so fitted
        # settings are simulated too.
        cached = [policies for policies in choices if policies.prefix_cache]
        fitted = (fit_router(with_policies(problem, policies).oracle, fleet) for policies in cached)
        choices = (*choices, *fitted)
        for policies in choices:
            oracle = with_policies(lifted, policies).oracle
            _, verdict = oracle.simulate_and_judge(
                oracle.fleet(fleet), record=any(floor.limit.metric_row.is_of_gaps for floor in floors)
            )
            if not verdict.holds:
                continue
            attained_s = {line.limit.name: line.deciding_s for line in verdict.lines}
            relaxed_s = {
                floor.limit.name: rounded_up(max(attained_s[floor.limit.name], floor.missed_s))
                for floor in floors
                if math.isfinite(attained_s[floor.limit.name])
            }
            looser = with_policies(with_limits(problem, relaxed_s), policies)
            if len(relaxed_s) == len(floors) and looser.oracle.holds(fleet):
                relaxations.append(relaxed_s)
    return min(relaxations, key=lambda limits_s: sum(map(math.log, limits_s.values())), default={})


def with_limits(problem: Problem, limits_s: Mapping[str, float]) -> Problem:
    """The problem with other limits [s], by name. Its fleets must keep them on all draws of the traffic."""
    slo = replace(
        problem.slo,
        limits=tuple(
            replace(limit, limit_s=limits_s.get(limit.name, limit.limit_s)) for limit in problem.slo.limits
        ),
    )
    oracle = replace(problem.oracle, slo=slo)
    return on_all_draws(
        replace(problem, slo=slo, oracle=oracle, slo_work=compute_slo_work(slo, problem.trace))
    )


def _relaxed_s(problem: Problem, floors: Sequence[Floor]) -> dict[str, float]:
    """Limits [s] by name at which level 0 has a fleet: MOST_RELAXED times each floor, or times the limit
    itself if that is larger. Empty if there is none.
    """
    relaxed_s = {floor.limit.name: rounded_up(MOST_RELAXED * floor.missed_s) for floor in floors}
    return relaxed_s if _is_kept_at_level0(with_limits(problem, relaxed_s)) else {}


def rounded_up(seconds: float) -> float:
    """The time rounded up to three digits, so that it is short in slo.yaml."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    return float(f"{math.ceil(seconds / unit - ROUNDING) * unit:.6g}")
