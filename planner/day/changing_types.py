"""Finds the optimum of a day on which worker types, and prefill and decode splits, may change too.

The fleets that a day compares have one shape each: the same pools all day. Here the pools of all of them are
one fleet, and each pool may be empty at any time, so a calm night may be served by a small GPU, an hour of
long prompts by prefill and decode workers, and a burst by whatever starts soonest. If no fleet has separate
prefill and decode workers, those of the cheapest fleet's worker type are added, and mixed ones if none has.

The optimum of these pools on the grid is searched as that of any fleet (day/search/day_optimum.py), beginning
with cuts of each window by itself (day/search/window_cuts.py). Then in its timetable, and in that of the
cheapest fleet alone, workers of one type are exchanged for those of another, at any moment
(day/search/exchanged_lives.py). So the result never costs more than the cheapest fleet's optimum. It has the
policies of that fleet.

Slower workers beside faster ones may hurt, as the router sends them requests too. So no bound is named that
assumes that more workers never do (MORE in day/search/day_optimum.py), only the proved one
(solvers/paid_work.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.day.day_study import (
    OPTIMUM,
    ChangingTypes,
    DayAnswer,
    DayQuestion,
    Optimum,
    summarize_run,
    terms_of,
)
from planner.day.search.day_optimum import cheapest_day
from planner.day.search.day_runs import DayRuns
from planner.day.search.exchanged_lives import exchanged_day
from planner.day.search.window_cuts import window_cuts
from planner.errors import PlannerError
from planner.fleet import Pool, Role, WorkerType
from planner.search.oracle.work_clock import now_s
from planner.search.problem.plan_problem import Progress, report_nothing
from planner.simulator.elastic import ElasticPool

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
PoolKey = tuple[Role, WorkerType]
# Set by hand: the search takes longer with each pool.
MOST_POOLS = 5
# Each step must end when this share of the work is used up: the cuts of windows, the sizes on the grid, and
# two exchanges of workers for others, from the grid's sizes and from the cheapest fleet's. Set by hand.
CUTS_SHARE, GRID_SHARE, EXCHANGE_SHARES = 0.3, 0.5, (0.75, 1.0)
LEAST_GRID_S = 5.0  # A search gets at least this long on its clock, even if less is left.
SPLIT_ROLES: tuple[Role, Role] = ("prefill", "decode")


def changing_types(
    answers: Mapping[str, DayAnswer], *, most_work_s: float, progress: Progress = report_nothing
) -> ChangingTypes:
    """The optimum over the pools of all fleets in `answers`, by label, compared with each fleet's own; found
    within `most_work_s` of the search's clock (work_clock.py).
    """
    known = {label: each for label, each in answers.items() if each.optimum is not None}
    known = dict(sorted(known.items(), key=lambda item: _optimum_of(item[1]).usd))
    if not known:
        reasons = "; ".join(f"{label}: {each.no_optimum}" for label, each in answers.items())
        return ChangingTypes(why=f"no fleet alone has one ({reasons})")
    label = next(iter(known))
    single = _optimum_of(known[label])
    question = question_of_all_pools([*known.values(), *answers.values()])
    if isinstance(question, str):
        return ChangingTypes(single_label=label, single_usd=single.usd, why=question)
    progress("the optimum if worker types may change within the day")
    began, terms = now_s(), terms_of(question)
    runs = DayRuns(question.fleet, question.trace, question.slo, question.optimum_pools, terms)
    # The first is that of `single`.
    days = [_day_of_fleet(question, runs, answer) for answer in known.values()]
    try:
        optimum = _cheapest_of_all_pools(question, runs, days, single, began, most_work_s, progress)
    except PlannerError as error:
        # The single fleet's optimum keeps every window, so it is an answer even where the search has none.
        optimum = _single_optimum(runs, days[0], single, f"the day of that fleet: {error}")
    return ChangingTypes(question, optimum, label, single.usd)


def question_of_all_pools(answers: Sequence[DayAnswer]) -> DayQuestion | str:
    """The first answer's question with the pools of all, each of which may be empty; or why there is none."""
    first = answers[0]
    least = max(pool.least for pool in first.question.pools)
    if first.question.is_least_given and least:
        return f"least: {least} keeps this many workers in every pool; leave it out, or give 0"
    pools: dict[PoolKey, tuple[Pool, ElasticPool]] = {}
    for answer in answers:
        own = zip(answer.question.fleet.pools, answer.question.pools, strict=True)
        _add_pools(pools, {(pool.role, pool.type): (pool, elastic) for pool, elastic in own})
    for added in _other_roles(first.question):
        _add_pools(pools, added)
    if len(pools) == len(first.question.fleet.pools) == 1:
        return "there is one pool of one worker type"
    names = _names_of(list(pools))
    counts = {(pool.role, pool.type): pool.count for pool in first.question.fleet.pools}
    fleet_pools = [Pool(name, *key, counts.get(key, 0)) for name, key in zip(names, pools, strict=True)]
    return replace(
        first.question,
        fleet=replace(first.question.fleet, pools=tuple(fleet_pools)),
        pools=tuple(replace(elastic, least=0, first=None) for _, elastic in pools.values()),
        trace=first.judged,
        is_least_given=True,
    )


def _add_pools(
    pools: dict[PoolKey, tuple[Pool, ElasticPool]], added: Mapping[PoolKey, tuple[Pool, ElasticPool]]
) -> None:
    """Add the pools of a fleet, all or none, and let a pool that is there grow as far as any of them."""
    if len(pools.keys() | added.keys()) > MOST_POOLS:
        return
    for key, (pool, elastic) in added.items():
        known, before = pools.get(key, (pool, elastic))
        pools[key] = known, replace(before, most=max(before.most, elastic.most))


def _other_roles(question: DayQuestion) -> Iterator[dict[PoolKey, tuple[Pool, ElasticPool]]]:
    """For each worker type, pools of the roles that the fleet lacks: prefill and decode, or mixed."""
    for pool, elastic in zip(question.fleet.pools, question.pools, strict=True):
        roles: tuple[Role, ...] = SPLIT_ROLES if pool.role == "mixed" else ("mixed",)
        try:
            yield {(role, pool.type): (replace(pool, role=role), elastic) for role in roles}
        except PlannerError:  # A worker type that takes prefill alone.
            continue


def _names_of(keys: Sequence[PoolKey]) -> list[str]:
    """A name for each pool: role and GPU, and a number where these are not enough."""
    names: list[str] = []
    for role, worker in keys:
        name = f"{role}-{worker.gpu.name}"
        if worker.gpus > 1:
            name += f"-x{worker.gpus}"
        number = sum(each == name or each.startswith(f"{name}.") for each in names)
        names.append(f"{name}.{number + 1}" if number else name)
    return names


def _single_optimum(runs: DayRuns, day: tuple[Floats, Ints], single: Optimum, status: str) -> Optimum:
    """The optimum of a single fleet, whose sizes of all pools are `day`, bounded as a day of all pools."""
    times_s, sizes = day
    proved_usd = min(runs.least_paid().usd, single.usd)
    edges_s = np.append(times_s, runs.terms.edges_s[-1])
    return Optimum(single.day, edges_s, sizes, proved_usd, proved_usd, status)


def _cheapest_of_all_pools(
    question: DayQuestion,
    runs: DayRuns,
    days: Sequence[tuple[Floats, Ints]],
    single: Optimum,
    began: float,
    most_work_s: float,
    progress: Progress,
) -> Optimum:
    """The cheapest day of all pools that is found; where none costs less than `single`, it is that day.

    `days` are the optima of single fleets as sizes of all pools, that of `single` first.
    """
    last_s = runs.terms.edges_s[-1]
    cheapest = cheapest_day(
        runs,
        cuts=window_cuts(runs, began + CUTS_SHARE * most_work_s),
        known=[_on_grid(runs, *day) for day in days],
        deadline=max(began + GRID_SHARE * most_work_s, now_s() + LEAST_GRID_S),
        progress=progress,
    )
    grid = runs.terms.edges_s[:-1], cheapest.best.workers
    found, is_of_all, (times_s, sizes) = cheapest.best.run, True, grid
    usd, status = cheapest.best.usd, cheapest.status
    if single.usd < usd:
        found, is_of_all, (times_s, sizes) = single.day.run, False, days[0]
        usd, status = single.usd, "the day of that fleet: none was found that costs less"
    for number, start in enumerate((grid, days[0])):
        deadline = began + EXCHANGE_SHARES[number] * most_work_s
        edges_s = np.append(start[0], last_s).tolist()
        cheaper = exchanged_day(runs, edges_s, start[1], usd, max(deadline, now_s() + LEAST_GRID_S))
        if cheaper is not None:
            progress(f"the optimum with types that change: {cheaper.day.usd:.2f} USD")
            found, is_of_all, times_s, sizes = cheaper.day.run, True, cheaper.times_s, cheaper.workers
            usd = cheaper.day.usd
            status = "its sizes change at any moment; none are known that cost less"
    row = summarize_run(question, OPTIMUM, found, {}) if is_of_all else single.day
    proved_usd = cheapest.proved.usd
    bound_usd = usd if cheapest.is_exact else proved_usd
    return Optimum(row, np.append(times_s, last_s), sizes, bound_usd, proved_usd, status)


def _optimum_of(answer: DayAnswer) -> Optimum:
    """The optimum of an answer that is known to have one."""
    assert answer.optimum is not None
    return answer.optimum


def _day_of_fleet(question: DayQuestion, runs: DayRuns, answer: DayAnswer) -> tuple[Floats, Ints]:
    """The optimum of one fleet as sizes of all pools: times (N,) and sizes (N, P) from each on."""
    optimum, keys = _optimum_of(answer), [(pool.role, pool.type) for pool in question.fleet.pools]
    sizes = np.zeros((len(optimum.sizes), len(keys)), np.int64)
    for column, pool in zip(optimum.sizes.T, answer.question.fleet.pools, strict=True):
        if (pool.role, pool.type) in keys:
            sizes[:, keys.index((pool.role, pool.type))] += column
    return optimum.edges_s[:-1], np.minimum(sizes, runs.terms.most[0])


def _on_grid(runs: DayRuns, times_s: Floats, sizes: Ints) -> Ints:
    """The most of these sizes in each step of the grid (T, P)."""
    edges_s = runs.terms.edges_s
    first = np.searchsorted(times_s, edges_s[:-1], "right") - 1
    end = np.searchsorted(times_s, edges_s[1:])
    return np.array([sizes[a:b].max(axis=0) for a, b in zip(first, np.maximum(end, first + 1), strict=True)])
