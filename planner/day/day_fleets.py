"""Chooses among several fleets the one that costs least over a day with its best controller.

The cheapest fleet of constant size need not be the cheapest over a day: another worker type may be
dearer at the peak and come in smaller steps, and prefill and decode pools may shrink separately. So the fleet
on paper is compared with the cheapest fleet of each GPU type alone, and with the alternatives that its own
search found. It is also compared with itself under every other order of the queue that the question allows.
The order matters in a burst, before a new worker is ready: first come, first served makes even short prompts
late; shortest first makes only long ones late.

Each of these fleets keeps its worker types all day. `cheapest_fleet` also computes what changing them would
save (planner/day/changing_types.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from planner.day.day_study import ChangingTypes, DayAnswer, FleetDay, score_day
from planner.documents.policy_choices import PolicyChange
from planner.documents.task import PlanQuestion
from planner.errors import PlannerError
from planner.fleet import Fleet, Policies
from planner.policies import QUEUE
from planner.reports.words import describe_fleet
from planner.search.evidence.alternatives import find_alternatives
from planner.search.oracle.work_clock import ended_by, is_over, now_s
from planner.search.problem.plan_problem import report_nothing
from planner.studies.per_gpu import gpu_types
from planner.studies.what_if import Study, StudyAnswer

MOST_FLEETS = 4  # Set by hand: each fleet's day takes as long as the first one's.
LEAST_TIME_S = 1.0  # A search or a day gets at least this long on the search's clock.
QUEUE_AXIS = "queue"  # The order of the queue among the policies that a question may change.
# Labels of the fleet whose alternatives are compared: planned for this day, or given with --fleet.
ON_PAPER, GIVEN = "the fleet on paper", "the fleet given"

DayWatch = Callable[[Fleet, DayAnswer | None], None]
"""Called with the fleet of the best day so far, and that day; None before the first one is done."""


def candidate_fleets(
    study: Study, task: PlanQuestion, answer: StudyAnswer, deadline: float
) -> dict[str, Fleet]:
    """The fleet on paper and its alternatives by label, each fleet once, at most MOST_FLEETS. `answer` is the
    plan of the question `task`; `deadline` is on the search's clock (work_clock.py).

    Fleets for which there is no time before the deadline are left out.
    """
    fleets = {ON_PAPER: answer.fleet}
    stocks = gpu_types(task, study)
    plan_gpus = {pool.type.gpu.base for pool in answer.fleet.pools}
    for name, stock in stocks.items():
        # A plan that uses this GPU alone is already the cheapest fleet of this GPU.
        if len(stocks) > 1 and plan_gpus != {name} and not is_over(deadline):
            left_s = deadline - now_s()
            limited = replace(study, most_work_s=max(left_s / len(stocks), LEAST_TIME_S))
            try:
                fleets[f"only {name}"] = limited.answer(replace(task, stock=stock)).fleet
            except PlannerError:  # This GPU alone cannot serve the traffic, or no fleet was found in time.
                continue
    if not is_over(deadline):
        for row in find_alternatives(
            answer.problem, answer.search_result.level0, answer.search_result.best, answer.value
        ):
            if row.fleet is not None and row.is_priced:  # Only a simulated fleet has policies and a price.
                fleets.setdefault(row.label, row.fleet)
    by_description: dict[str, tuple[str, Fleet]] = {}
    for label, fleet in fleets.items():
        by_description.setdefault(describe_fleet(fleet), (label, fleet))
    return dict(list(by_description.values())[:MOST_FLEETS])


def other_queues(task: PlanQuestion, fleets: dict[str, Fleet]) -> dict[str, Fleet]:
    """The first of `fleets` with every other queue that the question allows, by label: those that are
    searched (`policies: queue`) and those that are raced (`raced_changes`).
    """
    raced = [change.value for change in task.policies.raced_changes if change.axis == QUEUE_AXIS]
    (label, fleet), others = next(iter(fleets.items())), {}
    for queue in dict.fromkeys([*task.policies.queues, *raced]):
        policies = task.changed_policies(fleet.policies, PolicyChange(QUEUE_AXIS, queue))
        # `policies` is None where the queue is incompatible with the fleet's other policies.
        if policies is not None and policies.queue != fleet.policies.queue:
            others[f"{label}, {queue}"] = replace(fleet, policies=policies)
    return others


def cheapest_fleet(
    fleets: dict[str, Fleet],
    day_of: Callable[[Fleet, float, float | None], DayAnswer],
    deadline: float,
    types_of: Callable[[dict[str, DayAnswer], float], ChangingTypes] | None = None,
    watch: DayWatch = report_nothing,
) -> DayAnswer:
    """The day of the fleet that costs least under its best controller; `fleets` has a row for every fleet.

    `day_of` takes a fleet, its seconds of the search's clock, and the cost of a missed window [USD]: None for
    the first fleet, whose day sets the cost for all others. An error in the day of the first fleet is raised;
    for another fleet it becomes the `why` of its row. `types_of` finds what changing worker types saves, from
    the answers and its seconds of the search's clock; None: this is not searched. `watch` is called with the
    cheapest day so far, after the day of each fleet.
    """
    first_label = next(iter(fleets))
    # The time is shared by the days of the fleets and the search for changing types.
    shares = len(fleets) + (1 if types_of is not None else 0)
    answers: dict[str, DayAnswer] = {}
    rows: dict[str, FleetDay] = {}
    missed_usd: float | None = None
    for k, (label, fleet) in enumerate(fleets.items()):
        left_s = deadline - now_s()
        if label != first_label and is_over(deadline):
            rows[label] = FleetDay(label, describe_with_queue(fleet), why=f"{ended_by()} came first")
            continue
        try:
            answer = day_of(fleet, max(left_s / (shares - k), LEAST_TIME_S), missed_usd)
        except PlannerError as error:
            if label == first_label:
                raise
            rows[label] = FleetDay(label, describe_with_queue(fleet), why=str(error))
            continue
        answers[label] = answer
        missed_usd = answers[first_label].missed_usd
        chosen = _cheapest_label(answers)
        watch(answers[chosen].question.fleet, answers[chosen])
        best, optimum = answer.winner, answer.optimum
        rows[label] = FleetDay(
            label,
            describe_with_queue(fleet),
            standing_usd=answer.static.usd,
            controller=best.name,
            usd=best.usd,
            missed=best.missed_windows,
            optimum_usd=None if optimum is None else optimum.usd,
        )
    chosen = _cheapest_label(answers)
    marked_rows = tuple(replace(row, is_chosen=row.label == chosen) for row in rows.values())
    types = None
    if types_of is not None:
        types = types_of(answers, max(deadline - now_s(), LEAST_TIME_S))
    answer = replace(answers[chosen], fleets=marked_rows if len(marked_rows) > 1 else (), types=types)
    if chosen != first_label:
        note = f"{chosen}: the cheapest day of {len(answers)} fleets"
        answer = replace(answer, question=replace(answer.question, fleet_note=note))
    return answer


def _cheapest_label(answers: Mapping[str, DayAnswer]) -> str:
    """The label of the cheapest day, by what the first fleet's day says a missed window costs."""
    miss_terms = next(iter(answers.values())).miss_terms
    return min(answers, key=lambda label: score_day(answers[label].winner, miss_terms))


def describe_with_queue(fleet: Fleet) -> str:
    """The fleet in a few words, with its queue unless that is the default."""
    queue = fleet.policies.queue
    return describe_fleet(fleet) + ("" if queue == Policies().queue else f", {QUEUE[queue].words}")
