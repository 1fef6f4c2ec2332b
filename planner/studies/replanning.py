"""Finds the smallest change from a running fleet that pays: starting and stopping workers costs money, which
the new fleet must save.

Sets   j  option: a worker type in a role, of the running fleet and of the best fleets of a plan from scratch
Data   c_j price of a worker, e_k of an idle GPU on a node sold whole [USD/h]   n0_j running workers
       H horizon [h]   p, q USD per worker started, stopped      a_yj use of limit y by one worker; A_y its
       amount
Vars   n_j integer >= 0 workers;   i_k GPUs of nodes of kind k without a worker (solvers/whole_nodes.py)

  min   H (sum_j c_j n_j + sum_k e_k i_k) + p sum_j max(n_j - n0_j, 0) + q sum_j max(n0_j - n_j, 0)
  s.t.  limit_y   sum_j a_yj n_j <= A_y          stock, power, cost (as is paid), GPUs (master.FleetLimits)
        holds     the simulation of n keeps the SLO, with `safety` in enough scenarios of the search

A count vector is the n of one fleet. All count vectors that cost less than the best known fleet are listed,
and the vector expected to carry most is simulated. If its fleet fails, the vector and all smaller ones are
dropped. If it holds, needless workers are removed from it, and it becomes the best known fleet. This repeats
until no vector is left. A fleet is assumed to fail if a larger one fails. That is not always true of prefill
and decode pools, because more prefill workers hand over in bursts. So the answer is exact over these options
only if no vector was dropped by the assumption.

Where starts are dear, few large workers may cost less than any counts of these options. So vectors with other
options of the question, one for each role and hardware, are simulated in the end, those that are expected to
carry LEAST_SHARE of the traffic. If one fails, only smaller ones of the same options are dropped: without its
slowest workers a fleet may hold. Of the vectors that no simulation reached nothing is known.

Running workers of a GPU that is no longer in stock are stopped. Policies are those of the plan from scratch,
because a change of policy moves no worker.

`compare_traffic` compares the traffic that the running fleet was planned on with today's. The D of Kolmogorov
and Smirnov is the largest difference between two cumulative distributions, a share of requests. With
thousands of requests any D is significant, so its size is judged as well.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.documents.facts import KeptIn
from planner.documents.task import PlanQuestion
from planner.domain import OWNED, ROUNDING, SPOT, payment_suffix, row_of
from planner.errors import InfeasibleError, InputError
from planner.fleet import Fleet, Pool
from planner.policies import ONE_KIND, ONE_POOL, ONLY_PAIRS
from planner.reports.words import describe_fleet
from planner.search.mixed.mixed_fleets import best_settings, expected_share
from planner.search.oracle.fleet_counts import Counts, workers_of
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.work_clock import is_over, now_s
from planner.search.problem.options import option_of
from planner.search.problem.owned_first import owned_first
from planner.search.problem.plan_problem import Problem, on_all_draws, with_search_scenarios
from planner.search.production.scenario_test import ScenarioTest, is_test_passed, untimed_test
from planner.simulator.slo_verdict import Verdict
from planner.solvers.master import FleetLimits, Option
from planner.solvers.whole_nodes import idle_usd_per_h, node_of
from planner.studies.what_if import Study, StudyAnswer, answer_document
from planner.traffic.kinds import BY_CHANCE, OTHER_FRAC
from planner.traffic.trace import Trace
from planner.units import finite_or_none, in_unit, show_amount

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MOST_COUNTS = 12_000_000  # Counts of all listed count vectors together: 100 MB.
LEAST_SHARE = 0.5  # Vectors with other options that are expected to carry less are not simulated.
# The requests that all simulations of cheaper vectors may have together, which bounds the time of a replan.
MOST_REQUESTS = 8_000_000
# However short or long the trace is, FEWEST_TRIES to MOST_TRIES vectors are simulated, if as many are cheaper
# and the time suffices. Set by hand, as is MOST_REQUESTS.
FEWEST_TRIES = 24
MOST_TRIES = 400
# The costs of starting and of stopping a worker if the user gives none, set by hand. A start is not free, so
# the running fleet stays if another is hardly cheaper.
USUAL_START_USD = 1.0
USUAL_STOP_USD = 0.0


@dataclass(frozen=True, slots=True)
class ReplanTerms:
    """The horizon of the new fleet, and the costs of starting and of stopping a worker."""

    horizon_h: float
    start_usd: float = USUAL_START_USD
    stop_usd: float = USUAL_STOP_USD

    def __post_init__(self) -> None:
        # A cost that is NaN is not >= 0 either.
        if not (self.horizon_h > 0 and self.start_usd >= 0 and self.stop_usd >= 0):
            raise InputError("--horizon must be > 0, and what a start and a stop cost >= 0")


@dataclass(frozen=True, slots=True)
class Move:
    """The number of workers of one kind before and after the change."""

    worker: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Way:
    """One possible change: a fleet, its hourly bill, and its cost over the horizon with starts and stops.

    `kept_in` is the result of the test in scenarios, the same scenarios for all ways; None with
    `safety: none`. `is_kept_as_written` says whether the fleet keeps the SLO on today's traffic alone. A
    fleet that holds is within the question's limits; `beyond` names the limits that a fleet exceeds.
    """

    label: str
    fleet: Fleet
    cost_usd_per_h: float
    migration_usd: float
    total_usd: float
    holds: bool
    kept_in: KeptIn | None = None
    is_kept_as_written: bool = True
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Replan:
    """The cheapest change in `best`, and other ways to compare it with.

    `keeps_running` says that the running fleet holds and stays. `is_exhausted` says that no cheaper count
    vector of these `options` is left to simulate. `assumed` of the cheaper vectors were dropped because a
    larger fleet fails; the others were simulated and fail. Of the vectors with `other_options` only some were
    simulated. `scratch` is the answer of a plan that ignores the
    running fleet.
    """

    best: Way
    keeps_running: bool
    moves: tuple[Move, ...]
    ways: tuple[Way, ...]
    verdict: Verdict
    running_verdict: Verdict | None  # None if some of the running fleet's GPUs are no longer in stock.
    options: tuple[str, ...]
    other_options: tuple[str, ...]
    is_exhausted: bool
    assumed: int
    simulations: int
    scratch: StudyAnswer
    terms: ReplanTerms
    gone: tuple[str, ...] = ()  # The GPUs of the running fleet that the question has no more.

    @property
    def is_exact(self) -> bool:
        """Whether no other counts of these options are cheaper, without any assumption."""
        return self.is_exhausted and not self.assumed


def replan(study: Study, task: PlanQuestion, current: Fleet, terms: ReplanTerms) -> Replan:
    """Solve the model of the module's docstring, with `current` as the running fleet.

    Raises InfeasibleError if no fleet within the limits keeps the SLO.
    """
    if task.objective != "cost":
        raise InputError(f"objective: a replan is about cost, found {task.objective}")
    scratch = _plan_from_scratch(study, task, current)
    running, gone_pools = _running_options(scratch.problem, current)
    gone_workers = sum(pool.count for pool in gone_pools)
    model = _build_model(study, scratch, running, gone_workers, terms)
    names = [option.name for option in model.universe]
    n0 = model.n0
    scratch_count = {option.name: count for option, count in scratch.search_result.best}
    n_scratch = np.array([scratch_count.get(name, 0) for name in names])  # The plan from scratch.
    # The test of that plan's fleet; None with `safety: none`.
    in_production = (answer for answer in scratch.answers if answer.name == "production")
    scratch_kept_in = next((answer.kept_in for answer in in_production), None)
    # One test is enough: the running fleet was not picked because it passes (`_ReplanModel.holds`).
    running_holds = (
        gone_workers == 0 and bool(model.is_within_limits(n0)) and model.holds(n0, is_picked=False)
    )
    # The best known fleet, from which the search for cheaper ones starts.
    known, known_holds = n_scratch, scratch.is_passed
    is_running_cheaper = float(model.horizon_usd(n0)) <= float(model.horizon_usd(known))
    if running_holds and (is_running_cheaper or not scratch.is_passed):
        known, known_holds = n0, True
    best, assumed, is_exhausted = _find_cheaper(study, model, known)
    best = _find_cheaper_of_any(study, model, best)
    best_holds = known_holds or bool((best != known).any())
    oracle = model.oracle
    running_verdict = (
        oracle.simulate_and_judge(oracle.fleet(model.fleet_counts(n0)), record=True).verdict
        if gone_workers == 0
        else None
    )
    ways = [
        model.way_of("plan from scratch", n_scratch, is_holding=scratch.is_passed, kept_in=scratch_kept_in)
    ]
    if running_verdict is not None:
        runs_on = model.tested_way("keep what runs", n0, is_holding=running_holds)
        beyond = _limits_exceeded(scratch.problem.limits, model.fleet_counts(n0))
        ways.insert(0, replace(runs_on, is_kept_as_written=running_verdict.holds, beyond=beyond))
    lost_moves = [Move(f"{pool.role} {pool.type.name}", pool.count, 0) for pool in gone_pools]
    return Replan(
        best=model.tested_way("the smallest change that pays", best, is_holding=best_holds),
        keeps_running=bool((best == n0).all()) and gone_workers == 0,
        moves=(
            *(
                Move(name, int(before), int(after))
                for name, before, after in zip(names, n0, best, strict=True)
                if before or after
            ),
            *lost_moves,
        ),
        ways=tuple(ways),
        verdict=oracle.simulate_and_judge(oracle.fleet(model.fleet_counts(best)), record=True).verdict,
        running_verdict=running_verdict,
        options=tuple(names[: model.main_options]),
        other_options=tuple(names[model.main_options :]),
        is_exhausted=is_exhausted,
        assumed=assumed,
        simulations=oracle.simulations,
        scratch=scratch,
        terms=terms,
        gone=tuple(dict.fromkeys(pool.type.gpu.name for pool in gone_pools)),
    )


def _limits_exceeded(limits: FleetLimits, counts: Counts) -> tuple[str, ...]:
    """The limits of the question that a fleet exceeds, for instance "stock of l40s-48g: 2 of 1 GPUs"."""
    uses = [(limit, amount, limits.used(limit, workers_of(counts))) for limit, amount in limits.rows()]
    return tuple(
        f"{limit.name}: {show_amount(used, limit.unit)} of {in_unit(amount, limit.unit)}"
        for limit, amount, used in uses
        if used > amount * (1 + ROUNDING)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _ReplanModel:
    """The model of the module's docstring, as arrays over the options of `universe` (J,). The first
    `main_options` of them are those of the running fleet and of the best fleets from scratch.

    `share` is the share of the traffic that one worker is expected to carry. The search for cheaper fleets
    ends at the `deadline` on the search's clock. `n0` are the running workers, without the `gone_workers`
    whose GPUs are no longer in stock. `uses` (limits, J) is what one worker takes of each limit, `amounts`
    (limits,) what there is. Methods for costs and limits take one count vector (J,) or many (V, J), all other
    methods one.
    """

    universe: Sequence[Option]
    oracle: Oracle
    terms: ReplanTerms
    n0: Ints
    gone_workers: int
    price: Floats
    uses: Floats
    amounts: Floats
    limits: FleetLimits
    test: ScenarioTest | None
    main_options: int
    share: Floats
    deadline: float
    deploy: str | None

    def fleet_counts(self, n: Ints) -> Counts:
        """The counts `n` as pairs of option and workers, without the options that have none."""
        return tuple((option, k) for option, k in zip(self.universe, n.tolist(), strict=True) if k)

    def migration_usd(self, n: Ints) -> Floats:
        """The cost of starting and stopping workers, once; `gone_workers` are stopped in any case."""
        started, stopped = np.maximum(n - self.n0, 0).sum(-1), np.maximum(self.n0 - n, 0).sum(-1)
        return np.asarray(
            self.terms.start_usd * started + self.terms.stop_usd * (stopped + self.gone_workers)
        )

    def horizon_usd(self, n: Ints) -> Floats:
        """The objective of the model: the bill over the horizon, with starts and stops."""
        return np.asarray(self.terms.horizon_h * self.paid_usd_per_h(n) + self.migration_usd(n))

    def paid_usd_per_h(self, n: Ints) -> Floats:
        """The hourly bill of the counts `n`, with whole nodes where GPUs are sold by the node."""
        pools = [
            (node_of(option.type.gpu), option.type.gpus, n[..., j].astype(float))
            for j, option in enumerate(self.universe)
        ]
        return np.asarray(n @ self.price + idle_usd_per_h(pools))

    def holds(self, n: Ints, *, is_picked: bool = True) -> bool:
        """Whether the fleet keeps the SLO in simulation.

        If the question asks for safety, it must keep the SLO in enough scenarios of the search, and pass the
        test in scenarios that the search has not seen. A fleet that is picked (`is_picked`) because it passes
        may have passed by luck, so it is tested a second time, in other scenarios.
        """
        counts = self.fleet_counts(n)
        holds = self.oracle.holds(counts)
        if self.test is None or not holds:
            return holds
        # `decide_picked` returns both tests, of which the second decides.
        kept_in = self.test.decide_picked(counts)[1] if is_picked else self.test.decide(counts)
        return is_test_passed(kept_in, self.test.safety)

    def is_within_limits(self, n: Ints) -> npt.NDArray[np.bool_]:
        """Whether the counts keep every limit, money included."""
        counts = [(option.type, n[..., j].astype(float)) for j, option in enumerate(self.universe)]
        return np.asarray((n @ self.uses.T <= self.amounts).all(-1) & self.limits.fit_on_nodes(counts))

    def tested_way(self, label: str, n: Ints, *, is_holding: bool) -> Way:
        """The way to the counts `n` with the result of the test of production."""
        kept_in = None if self.test is None else self.test.decide(self.fleet_counts(n))
        return self.way_of(label, n, is_holding=is_holding, kept_in=kept_in)

    def way_of(self, label: str, n: Ints, *, is_holding: bool, kept_in: KeptIn | None) -> Way:
        """The way to the counts `n`, with its bill, the cost of moving, and the cost over the horizon."""
        costs = float(self.paid_usd_per_h(n)), float(self.migration_usd(n)), float(self.horizon_usd(n))
        return Way(label, self.oracle.fleet(self.fleet_counts(n)), *costs, is_holding, kept_in)


def _plan_from_scratch(study: Study, task: PlanQuestion, current: Fleet) -> StudyAnswer:
    """The answer of `plan`, which does not know the running fleet.

    Only if this search finds no fleet, a second search starts from the running fleet. It is not the first
    choice, because such a start may lead the search of mixed fleets to a dearer fleet.
    """
    try:
        return study.answer(task)
    except InfeasibleError:
        return study.answer(task, (current,))


def _build_model(
    study: Study,
    scratch: StudyAnswer,
    running: Sequence[tuple[Option, int]],
    gone_workers: int,
    terms: ReplanTerms,
) -> _ReplanModel:
    """The model over the options of the running fleet and of the plan from scratch, and over others."""
    main_options, limits = _candidate_options(running, scratch), scratch.problem.limits
    universe = [*main_options, *_other_options(main_options, scratch, terms)]
    rows, running_count = limits.rows(), Counter[str]()
    for option, count in running:  # Several pools that run may be of one option.
        running_count[option.name] += count
    uses = np.array([[limits.use_per_worker(limit, option.type) for option in universe] for limit, _ in rows])
    problem = scratch.problem
    return _ReplanModel(
        universe,
        with_search_scenarios(on_all_draws(problem)).oracle,
        terms,
        n0=np.array([running_count[option.name] for option in universe]),
        gone_workers=gone_workers,
        price=np.array([option.type.price_usd_per_h for option in universe]),
        uses=uses.reshape(len(rows), len(universe)),  # Without limits `uses` is an array of shape (0,).
        amounts=np.array([amount for _, amount in rows]) * (1 + ROUNDING),
        limits=limits,
        test=untimed_test(problem),  # All ways are compared in the same scenarios.
        main_options=len(main_options),
        share=np.array([_share_per_worker(option, scratch) for option in universe]),
        deadline=now_s() + study.work_limit_s,
        deploy=problem.task.deploy,
    )


def _find_cheaper(study: Study, model: _ReplanModel, best: Ints) -> tuple[Ints, int, bool]:
    """The cheapest count vector found of the main options, how many vectors were dropped as smaller than one
    that fails, and whether no cheaper vector is left.
    """
    vectors, lacks_options = _cheaper_counts(model, float(model.horizon_usd(best)), model.main_options)
    best, assumed, is_exhausted = _simulate_cheaper(study, model, best, vectors)
    return best, assumed, is_exhausted and not lacks_options


def _find_cheaper_of_any(study: Study, model: _ReplanModel, best: Ints) -> Ints:
    """The cheapest count vector found of any options."""
    vectors, _ = _cheaper_counts(model, float(model.horizon_usd(best)), len(model.universe))
    vectors = vectors[_capacity_shares(model, vectors) >= LEAST_SHARE]
    return _simulate_cheaper(study, model, best, vectors, drops_fewer_options=False)[0]


def _simulate_cheaper(
    study: Study, model: _ReplanModel, best: Ints, vectors: Ints, *, drops_fewer_options: bool = True
) -> tuple[Ints, int, bool]:
    """Simulate those of the `vectors` that cost less than `best`, the ones expected to carry most traffic
    first. Returns the same as `_find_cheaper`.

    If a vector fails, the smaller ones are dropped; without `drops_fewer_options` only those that have
    workers of the same options.
    """
    best_usd, assumed = float(model.horizon_usd(best)), 0
    vectors = vectors[model.horizon_usd(vectors) < best_usd * (1 - ROUNDING)]
    vectors = vectors[model.is_within_limits(vectors) & _can_deploy(model, vectors)]
    capacity = _capacity_shares(model, vectors)
    # A vector without capacity lacks prefill or decode workers, so it cannot serve at all.
    vectors, capacity = vectors[capacity > 0], capacity[capacity > 0]
    traces = 1 + len(model.oracle.scenarios)  # Each vector is simulated on the trace and in the scenarios.
    requests_per_try = traces * len(model.oracle.trace)
    tries = int(np.clip(MOST_REQUESTS / requests_per_try, FEWEST_TRIES, MOST_TRIES))
    while len(vectors) and tries > 0 and not is_over(model.deadline):
        tries -= 1
        # The vector with the largest expected capacity; of equal ones that with the most workers.
        candidate = vectors[np.lexsort((vectors.sum(axis=1), capacity))[-1]]
        study.progress(f"a smaller change: {len(vectors)} left, best {best_usd:.6g} USD")
        if model.holds(candidate):
            best = _remove_needless_workers(candidate, model)
            best_usd = float(model.horizon_usd(best))
            is_left = model.horizon_usd(vectors) < best_usd * (1 - ROUNDING)
        else:
            is_left = ~(vectors <= candidate).all(axis=1)
            if not drops_fewer_options:
                is_left |= ((vectors > 0) != (candidate > 0)).any(axis=1)
            assumed += int((~is_left).sum()) - 1  # Only the candidate was simulated.
        vectors, capacity = vectors[is_left], capacity[is_left]
    return best, assumed, not len(vectors)


def _can_deploy(model: _ReplanModel, vectors: Ints) -> npt.NDArray[np.bool_]:
    """Whether the question's target can run the fleets of the vectors (V, J)."""
    is_mixed = np.array([option.role == "mixed" for option in model.universe])
    has_mixed, has_pairs = (vectors[:, part].any(axis=1) for part in (is_mixed, ~is_mixed))
    can = np.ones(len(vectors), bool)
    if model.deploy in ONE_KIND:
        can &= ~(has_mixed & has_pairs)
    if model.deploy in ONLY_PAIRS:
        can &= ~has_mixed
    if model.deploy in ONE_POOL:
        kinds = np.array([option.name.replace(OWNED, "") for option in model.universe])
        used = [vectors[:, kinds == kind].any(axis=1) for kind in np.unique(kinds)]
        can &= ~has_pairs & (np.sum(used, axis=0) == 1)
    return can


def _gpu_names(gpu: str) -> tuple[str, ...]:
    """The names that a running GPU may have in the question, which names owned and rented GPUs apart.

    A spot GPU stays a spot GPU.
    """
    row = row_of(gpu)
    return (gpu,) if payment_suffix(gpu) == SPOT else (gpu, row, row + OWNED)


def _running_options(problem: Problem, current: Fleet) -> tuple[list[tuple[Option, int]], list[Pool]]:
    """The running workers as options at today's prices and step times, on owned GPUs first.

    Returns the options with their counts, and the pools whose GPU is no longer in stock.
    """
    types = {worker.name: worker for worker in problem.types}
    gpus = {gpu.name: gpu for gpu in problem.gpus}
    running: list[tuple[Option, int]] = []
    gone_pools: list[Pool] = []
    for pool in current.running_pools:
        name = pool.type.gpu.name
        if (gpu := next((gpus[known] for known in _gpu_names(name) if known in gpus), None)) is None:
            gone_pools.append(pool)
        else:
            moved = replace(pool.type, gpu=gpu)
            # If the type of a running worker is not among those of the search, the worker keeps its type.
            worker = types.get(moved.name) or moved
            running.append((option_of(pool.role, worker, problem.option_objective), pool.count))
    return list(owned_first(problem, tuple(running))), gone_pools


def _candidate_options(running: Sequence[tuple[Option, int]], scratch: StudyAnswer) -> list[Option]:
    """The options for the new fleet: the running ones first, then those of the best fleets from scratch,
    including the best fleets of only mixed workers and of only one type of GPU.
    """
    level0 = scratch.search_result.level0
    options = [option for option, _ in running]
    for counts in (scratch.search_result.best, level0.search.best, level0.mixed, level0.one_gpu):
        options += [option for option, _ in counts or ()]
    unique: dict[str, Option] = {}
    for option in options:
        unique.setdefault(option.name, option)
    return list(unique.values())


def _other_options(main_options: Sequence[Option], scratch: StudyAnswer, terms: ReplanTerms) -> list[Option]:
    """The further options of the question, one for each role and hardware, those first that cost least with
    their start for the share that they are expected to carry.
    """
    options = best_settings(scratch.problem, scratch.search_result.level0, beyond_stock={})

    def usd_per_share(option: Option) -> float:
        usd = terms.horizon_h * option.type.price_usd_per_h + terms.start_usd
        return usd / _share_per_worker(option, scratch)

    names = {option.name for option in main_options}
    return sorted((option for option in options if option.name not in names), key=usd_per_share)


def _share_per_worker(option: Option, scratch: StudyAnswer) -> float:
    """The expected share of the traffic that one worker of an option carries.

    For an option that level 0 did not search, it is the worker's share of the price of the plan from scratch,
    or of the plan's GPUs if these are free.
    """
    level0 = scratch.search_result.level0
    if option.name in level0.bounded:
        return expected_share(option, level0, beyond_stock={})
    if not scratch.fleet.price_usd_per_h:
        return option.type.gpus / scratch.fleet.gpus
    return option.type.price_usd_per_h / scratch.fleet.price_usd_per_h


def _cheaper_counts(model: _ReplanModel, best_usd: float, options: int) -> tuple[Ints, bool]:
    """The count vectors (V, J) of the first `options` that may be cheaper than `best_usd`, and whether some
    of these options are left out: the last ones are (their count is 0), where more than MOST_COUNTS would be
    listed. Idle GPUs of whole nodes are not counted, so that some of the vectors are dearer.
    """
    terms, n0 = model.terms, model.n0
    # Rounding must not leave out a vector: those that are not cheaper are dropped later.
    budget_usd = best_usd * (1 + ROUNDING) - terms.stop_usd * model.gone_workers
    hour_usd = terms.horizon_h * model.price
    # What an option costs at least: with no worker, or with those that run.
    least_usd = np.minimum(terms.stop_usd * n0, hour_usd * n0)
    vectors, costs = np.zeros((1, len(n0)), dtype=np.int64), np.zeros(1)
    for j in range(options):
        by_limit = [amount / use for amount, use in zip(model.amounts, model.uses[:, j], strict=True) if use]
        most = int(min([MOST_COUNTS, *by_limit]))
        if hour_usd[j] + terms.start_usd > 0:
            most = min(most, int(n0[j] + budget_usd / (hour_usd[j] + terms.start_usd)))
        n = np.arange(most + 1)
        usd = hour_usd[j] * n + terms.start_usd * np.maximum(n - n0[j], 0)
        usd += terms.stop_usd * np.maximum(n0[j] - n, 0)
        room_usd = budget_usd - costs - least_usd[j + 1 :].sum()
        # Costs fall, if at all, up to the count that runs, and rise beyond it.
        least = int(np.argmin(usd))
        fewest = least + 1 - np.searchsorted(usd[least::-1], room_usd, side="right")
        counts = np.maximum(np.searchsorted(usd[least:], room_usd, side="right") + least - fewest, 0)
        if counts.sum() * len(n0) > MOST_COUNTS:
            return vectors, True
        rows = np.repeat(np.arange(len(vectors)), counts)
        chosen = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + fewest[rows]
        vectors, costs = vectors[rows], costs[rows] + usd[chosen]
        vectors[:, j] = chosen
    return vectors, False


def _capacity_shares(model: _ReplanModel, vectors: Ints) -> Floats:
    """The expected share of the traffic that each vector (V, J) carries: (V,).

    It is 0 for vectors with prefill workers and no decode workers, or the reverse.
    """
    carried = {
        role: vectors @ (model.share * np.array([option.role == role for option in model.universe]))
        for role in ("mixed", "prefill", "decode")
    }
    by_pairs = np.minimum(carried["prefill"], carried["decode"])
    is_half_pair = (carried["prefill"] > 0) != (carried["decode"] > 0)
    return np.asarray(np.where(is_half_pair, 0.0, carried["mixed"] + by_pairs))


def _remove_needless_workers(n: Ints, model: _ReplanModel) -> Ints:
    """Remove workers, the most expensive first, while this saves money and the fleet keeps the SLO."""
    n = n.copy()
    for j in np.argsort(-model.price, kind="stable"):
        while n[j] > 0:
            fewer = n.copy()
            fewer[j] -= 1
            if model.horizon_usd(fewer) >= model.horizon_usd(n) or not model.holds(fewer):
                break
            n = fewer
    return n


@dataclass(frozen=True, slots=True)
class TrafficDrift:
    """How far one figure of the traffic has moved.

    `d` and `p` are the statistic and the p-value of the Kolmogorov-Smirnov test; None for the rate.
    """

    what: str
    before: float  # The rate [requests/s], or a median length or gap.
    after: float
    d: float | None
    p: float | None
    is_drift: bool


def compare_traffic(before: Trace, after: Trace) -> tuple[TrafficDrift, ...]:
    """Compare rate, lengths and burstiness of two traces.

    A drift is a rate that moved by OTHER_FRAC or more, or a D of OTHER_FRAC or more with a chance below
    BY_CHANCE of arising from equal traffic. Gaps between arrivals are compared in units of their mean, so
    that they show burstiness and not the rate.
    """
    from scipy.stats import ks_2samp  # Importing it takes 0.9 s, which other commands save.

    change_frac = after.rate_rps / before.rate_rps - 1
    is_other_rate = abs(change_frac) >= OTHER_FRAC
    rows = [
        TrafficDrift("requests/s", before.rate_rps, after.rate_rps, d=None, p=None, is_drift=is_other_rate)
    ]

    def relative_gaps(trace: Trace) -> Floats:
        """Gaps between arrivals over their mean."""
        gap_s = np.diff(trace.arrival_s)
        return np.asarray(gap_s / gap_s.mean())

    for quantity, old, new in (
        ("prompt tokens", before.input_tokens, after.input_tokens),
        ("output tokens", before.output_tokens, after.output_tokens),
        ("gap between arrivals / mean", relative_gaps(before), relative_gaps(after)),
    ):
        test = ks_2samp(old, new)
        d, p = float(test.statistic), float(test.pvalue)
        is_drift = d >= OTHER_FRAC and p < BY_CHANCE
        rows.append(TrafficDrift(quantity, float(np.median(old)), float(np.median(new)), d, p, is_drift))
    return tuple(rows)


def replan_document(answer: Replan, drift: tuple[TrafficDrift, ...] | None) -> dict[str, Any]:
    """What `plan replan --json` prints; `drift` is null if the running fleet's traffic is not known."""
    return {
        "keeps": answer.keeps_running,
        "horizon_h": answer.terms.horizon_h,
        "fleet": describe_fleet(answer.best.fleet),
        "moves": [
            {"worker": move.worker, "before": move.before, "after": move.after} for move in answer.moves
        ],
        "gone": list(answer.gone),
        "ways": [
            {
                "way": way.label,
                "fleet": describe_fleet(way.fleet),
                "cost_usd_per_h": way.cost_usd_per_h,
                "migration_usd": way.migration_usd,
                "total_usd": way.total_usd,
                "holds": way.holds,
                "is_kept_as_written": way.is_kept_as_written,
                "beyond": list(way.beyond),
                "kept": None if way.kept_in is None else way.kept_in.kept,
                "scenario_count": None if way.kept_in is None else way.kept_in.scenario_count,
            }
            for way in (answer.best, *answer.ways)
        ],
        "slo": [
            {
                "limit": line.limit.name,
                "limit_s": line.limit.limit_s,
                "simulated_s": finite_or_none(line.value_s),
                "judged": line.judged,
                "running_s": None
                if answer.running_verdict is None
                else finite_or_none(answer.running_verdict.lines[k].value_s),
            }
            for k, line in enumerate(answer.verdict.lines)
        ],
        "answers": [answer_document(scratch_answer) for scratch_answer in answer.scratch.answers],
        "searched_over": list(answer.options),
        "also_tried": list(answer.other_options),
        "is_exhausted": answer.is_exhausted,
        "left_out_by_a_larger_one": answer.assumed,
        "is_exact": answer.is_exact,
        "simulations": answer.simulations,
        "drift": None if drift is None else [asdict(row) for row in drift],
    }
