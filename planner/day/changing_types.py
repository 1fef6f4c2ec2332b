"""Finds the optimum of a day on which worker types, and prefill and decode splits, may change too.

The fleets that a day compares have the same pools all day. Here the pools of all these fleets form one fleet,
and each pool may be empty at any time. So a calm night may be served by a small GPU, an hour of long prompts
by prefill and decode workers, and a burst by whatever starts soonest. Pools of the roles that the cheapest
fleet lacks are added, of the same worker types.

The search on the grid is the same as for any fleet (day/search/day_optimum.py), and begins with cuts of each
window by itself (day/search/window_cuts.py). Then workers of one type are exchanged for workers of another,
at any moment (day/search/exchanged_lives.py): once in the timetable that the grid gave, and once in the
optimum of the cheapest single fleet. So the result never costs more than that fleet's optimum. It has that
fleet's policies.

More workers may hurt here, because the router sends requests to slow workers beside fast ones. So only the
proved bound (solvers/paid_work.py) is named, and none that assumes that more workers never hurt (MORE in
day/search/day_optimum.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

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
from planner.simulator.elastic import ElasticPool, Floats, Ints

PoolKey = tuple[Role, WorkerType]
MOST_POOLS = 5  # Set by hand: the search takes longer with each pool.
# Each step of the search ends once this share of the work is used up: the cuts of windows, the sizes on the
# grid, and the exchanges from the grid's timetable and from the cheapest single fleet's. Set by hand.
CUTS_SHARE, GRID_SHARE, EXCHANGE_SHARES = 0.3, 0.5, (0.75, 1.0)
LEAST_GRID_S = 5.0  # A search gets at least this long on its clock, even if less is left.
SPLIT_ROLES: tuple[Role, Role] = ("prefill", "decode")


def changing_types(
    answers: Mapping[str, DayAnswer], *, most_work_s: float, progress: Progress = report_nothing
) -> ChangingTypes:
    """The optimum over the pools of all fleets, compared with the cheapest optimum of one fleet. `answers`
    are the fleets' days by label; `most_work_s` limits the search on its clock (work_clock.py).
    """
    with_optimum = {label: each for label, each in answers.items() if each.optimum is not None}
    with_optimum = dict(sorted(with_optimum.items(), key=lambda item: _optimum_of(item[1]).usd))
    if not with_optimum:
        reasons = "; ".join(f"{label}: {each.no_optimum}" for label, each in answers.items())
        return ChangingTypes(why=f"no fleet alone has one ({reasons})")
    label = next(iter(with_optimum))
    single = _optimum_of(with_optimum[label])
    # The cheapest fleet comes first: its terms hold, and its pools are added before MOST_POOLS is reached.
    question = question_of_all_pools([*with_optimum.values(), *answers.values()])
    if isinstance(question, str):
        return ChangingTypes(single_label=label, single_usd=single.usd, why=question)
    progress("the optimum if worker types may change within the day")
    began, terms = now_s(), terms_of(question)
    runs = DayRuns(question.fleet, question.trace, question.slo, question.optimum_pools, terms)
    days = [_day_of_fleet(question, runs, answer) for answer in with_optimum.values()]  # `single` first.
    try:
        optimum = _cheapest_of_all_pools(question, runs, days, single, began, most_work_s, progress)
    except PlannerError as error:
        # The single fleet's optimum keeps every window, so it is an answer even where the search has none.
        optimum = _single_optimum(runs, days[0], single, f"the day of that fleet: {error}")
    return ChangingTypes(question, optimum, label, single.usd)


def question_of_all_pools(answers: Sequence[DayAnswer]) -> DayQuestion | str:
    """The first answer's question with the pools of all answers, which may be empty; or why there is none."""
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
    """Add a fleet's pools, or none beyond MOST_POOLS. A pool of several fleets has the largest `most`."""
    if len(pools.keys() | added.keys()) > MOST_POOLS:
        return
    for key, (pool, elastic) in added.items():
        first_pool, bounds = pools.get(key, (pool, elastic))
        pools[key] = first_pool, replace(bounds, most=max(bounds.most, elastic.most))


def _other_roles(question: DayQuestion) -> Iterator[dict[PoolKey, tuple[Pool, ElasticPool]]]:
    """For each worker type, pools of the roles that the fleet lacks: prefill and decode, or mixed."""
    for pool, elastic in zip(question.fleet.pools, question.pools, strict=True):
        roles: tuple[Role, ...] = SPLIT_ROLES if pool.role == "mixed" else ("mixed",)
        try:
            yield {(role, pool.type): (replace(pool, role=role), elastic) for role in roles}
        except PlannerError:  # The worker type can only prefill.
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
    """The optimum `single` of one fleet, as sizes of all pools (`day`) and with the bound on their cost."""
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
    best_run, is_of_all, (times_s, sizes) = cheapest.best.run, True, grid
    usd, status = cheapest.best.usd, cheapest.status
    if single.usd < usd:
        best_run, is_of_all, (times_s, sizes) = single.day.run, False, days[0]
        usd, status = single.usd, "the day of that fleet: none was found that costs less"
    for number, start in enumerate((grid, days[0])):
        deadline = began + EXCHANGE_SHARES[number] * most_work_s
        edges_s = np.append(start[0], last_s).tolist()
        cheaper = exchanged_day(runs, edges_s, start[1], usd, max(deadline, now_s() + LEAST_GRID_S))
        if cheaper is not None:
            progress(f"the optimum with types that change: {cheaper.day.usd:.2f} USD")
            best_run, is_of_all, times_s, sizes = cheaper.day.run, True, cheaper.times_s, cheaper.workers
            usd = cheaper.day.usd
            status = "its sizes change at any moment; none are known that cost less"
    # The run of a single fleet has the pools of that fleet alone, so `question` cannot summarize it.
    row = summarize_run(question, OPTIMUM, best_run, {}) if is_of_all else single.day
    proved_usd = cheapest.proved.usd
    bound_usd = usd if cheapest.is_exact else proved_usd
    return Optimum(row, np.append(times_s, last_s), sizes, bound_usd, proved_usd, status)


def _optimum_of(answer: DayAnswer) -> Optimum:
    """The optimum of an answer that is known to have one."""
    assert answer.optimum is not None
    return answer.optimum


def _day_of_fleet(question: DayQuestion, runs: DayRuns, answer: DayAnswer) -> tuple[Floats, Ints]:
    """The optimum of one fleet as sizes of all pools: times (N,), and the sizes (N, P) from each time on.

    Pools that `question` lacks (MOST_POOLS) are left out, and sizes are cut to its bounds.
    """
    optimum, keys = _optimum_of(answer), [(pool.role, pool.type) for pool in question.fleet.pools]
    sizes = np.zeros((len(optimum.sizes), len(keys)), np.int64)
    for column, pool in zip(optimum.sizes.T, answer.question.fleet.pools, strict=True):
        if (pool.role, pool.type) in keys:
            sizes[:, keys.index((pool.role, pool.type))] += column
    return optimum.edges_s[:-1], np.minimum(sizes, runs.terms.most[0])


def _on_grid(runs: DayRuns, times_s: Floats, sizes: Ints) -> Ints:
    """The largest of the `sizes` (N, P) from `times_s` (N,) on within each step of the grid (T, P)."""
    edges_s = runs.terms.edges_s
    first = np.searchsorted(times_s, edges_s[:-1], "right") - 1
    end = np.searchsorted(times_s, edges_s[1:])
    return np.array([sizes[a:b].max(axis=0) for a, b in zip(first, np.maximum(end, first + 1), strict=True)])
