"""Compares the search with simulations of every fleet of any mix of types, on random questions of two or
three GPU types.

    python benchmarks/mixes.py [--count 43] [--first 0] [--fleets 1001 6000] [--processes 2]

tests/support/random_questions.py draws the questions by seed. A question is used if the number of fleets of
any mix that cost less than the answer of level 0 is within --fleets: too many for the search, which tries all
only if there are at most 1000, but few enough for this script, which simulates them all, the cheapest first,
until one holds. Only the first of the policies to choose from is used. Prints the answers of level 0 and of
the search beyond it, and the optimum.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from random_questions import question

from planner.errors import PlannerError
from planner.search.level0.level0_search import search_level0
from planner.search.level0.walk import every_mix
from planner.search.mixed.mixed_fleets import search_mixed_fleets
from planner.search.oracle.deterministic_parallel import effort_spent
from planner.search.oracle.fleet_counts import objective_of
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.problem.build_problem import build_problem
from planner.search.problem.plan_problem import Problem, with_policies

WAVE = 16  # seeds that are looked at side by side; some of them make a question


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found. Values are in the objective's unit; `effort` is in simulated requests."""

    seed: int
    kind: str
    fleets: int
    level0: float
    found: float
    optimum: float
    level0_effort: int
    effort: int
    found_as: str
    optimum_as: str

    @property
    def dearer_frac(self) -> float:
        return self.found / self.optimum - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=43, help="how many questions")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fleets", type=int, nargs=2, default=(1001, 6000), metavar=("FROM", "TO"))
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    start_s = time.perf_counter()
    answers = list(_answers(arguments))
    for answer in sorted(answers, key=lambda answer: -answer.dearer_frac):
        if answer.dearer_frac > 1e-6:
            print(
                f"seed {answer.seed} ({answer.kind}): level 0 {answer.level0:.6g}, found {answer.found:.6g}, "
                f"optimum {answer.optimum:.6g} ({answer.dearer_frac:+.1%})\n"
                f"    {answer.found_as}\n    {answer.optimum_as}"
            )
    above = np.array([answer.dearer_frac for answer in answers])
    level0 = np.array([answer.level0 / answer.optimum - 1 for answer in answers])
    print("\n| questions | | above the optimum: mean | worst | at the optimum | simulated requests, median |")
    print("|---|---|---|---|---|---|")
    for name, fracs, efforts in (
        ("level 0", level0, [answer.level0_effort for answer in answers]),
        ("any mix", above, [answer.effort for answer in answers]),
    ):
        print(
            f"| {len(answers)} | {name} | {fracs.mean():.2%} | {fracs.max():.1%} | {np.sum(fracs < 1e-6)} | "
            f"{np.median(efforts):.0f} |"
        )
    last = max(answer.seed for answer in answers)
    print(f"\nseeds {arguments.first} to {last}, {time.perf_counter() - start_s:.0f} s")


def _answers(arguments: argparse.Namespace) -> Iterator[Answer]:
    """The answers, in the order of their seeds, until there are --count."""
    seed, left = arguments.first, arguments.count
    with ProcessPoolExecutor(arguments.processes) as pool:
        while left > 0:
            ask = partial(answer_of, fewest=arguments.fleets[0], most=arguments.fleets[1])
            for answer in pool.map(ask, range(seed, seed + WAVE)):
                if answer is not None and left > 0:
                    left -= 1
                    yield answer
            seed += WAVE


def answer_of(seed: int, *, fewest: int, most: int) -> Answer | None:
    """The answer for a seed; None if its question has too few or too many fleets."""
    asked = question(seed)
    task = asked.task
    if len(asked.document["fleet"]["gpus"]) not in (2, 3) or asked.kind == "prefix":
        return None
    try:
        problem = build_problem(task, asked.trace, asked.catalog)
    except PlannerError:
        return None
    problem = with_policies(problem, task.policy_choices()[0])
    level0 = search_level0(problem)
    if level0.search.best is None:
        return None
    fleets = every_mix(level0.options, problem.limits, level0.search.value, most=most)
    if fleets is None or len(fleets) < fewest:
        return None
    level0_effort = effort_spent()
    beyond = search_mixed_fleets(problem, level0)
    effort = effort_spent() - level0_effort
    assert beyond.best is not None
    again = _afresh(problem)
    optimum = beyond.best
    for counts in sorted(fleets, key=objective_of):
        if objective_of(counts) >= beyond.value * (1 - 1e-9):
            break
        if again.oracle.holds(counts):
            optimum = counts
            break
    return Answer(
        seed,
        asked.kind,
        len(fleets),
        level0.search.value,
        beyond.value,
        objective_of(optimum),
        level0_effort,
        effort,
        _shown(beyond.best),
        _shown(optimum),
    )


def _afresh(problem: Problem) -> Problem:
    """The same problem without remembered simulations."""
    return replace(problem, oracle=replace(problem.oracle, cache=VerdictCache()), deadline=math.inf)


def _shown(counts: tuple[tuple[object, int], ...]) -> str:
    return " + ".join(f"{count} {option.name}" for option, count in counts)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
