"""Answers questions by two routes: what-if, pareto, replan, schedule and the first screen must agree with
`plan`.

    python benchmarks/two_routes.py [--check what-if] [--count 50] [--first 0] [--production] [--cpu-s 120]

tests/support/by_two_routes.py draws the questions, by seed, and says what differs. Prints a line for each
that differs, then how many were compared; exits 1 if any differs. No new question begins after --cpu-s of a
check.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from by_two_routes import CHECKS, two_routes

from planner.errors import PlannerError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", choices=tuple(CHECKS), help="this one alone")
    parser.add_argument("--count", type=int, default=50, help="how many questions of each")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--production", action="store_true", help="in production; else on paper")
    parser.add_argument("--cpu-s", type=float, default=120.0, help="CPU seconds of each check")
    arguments = parser.parse_args()
    names = tuple(CHECKS) if arguments.check is None else (arguments.check,)
    differ = sum([count_differing(name, arguments) for name in names])
    sys.exit(1 if differ else 0)


def count_differing(name: str, arguments: argparse.Namespace) -> int:
    """The number of questions with different answers by the two routes."""
    began_s, compared, differ, bare = time.process_time(), 0, 0, 0
    for seed in range(arguments.first, arguments.first + arguments.count):
        if time.process_time() - began_s > arguments.cpu_s:
            break
        try:
            wrong = CHECKS[name](two_routes(seed, is_safe=arguments.production))
        except PlannerError:
            bare += 1
            continue
        compared, differ = compared + 1, differ + bool(wrong)
        for line in wrong:
            print(f"{name}, seed {seed}: {line}", flush=True)
    spent_s = time.process_time() - began_s
    print(f"{name}: {compared} compared, {differ} differ, {bare} without an answer, {spent_s:.0f} CPU s")
    return differ


if __name__ == "__main__":
    main()
