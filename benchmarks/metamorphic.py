"""Plans pairs of questions in which the answer to one determines the answer to the other, for random
questions.

    python benchmarks/metamorphic.py [--count 1000] [--first 0] [--relation budget] [--cpu-s 900]
    python benchmarks/metamorphic.py --only 1042

tests/support/random_questions.py draws a question from each seed, and tests/support/metamorphic_pairs.py
makes the other one and says which relation must hold: rows permuted, GPUs renamed or listed twice, another
seed, a dearer price, a budget that the answer keeps. Seeds take the relations in turn unless one is given.
Prints a row for each relation, and the seed and the difference of every pair that breaks its relation; exits
with 1 if there is one. --cpu-s ends it sooner.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from metamorphic_pairs import RELATIONS, FleetAnswer, broken
from random_questions import question


@dataclass(frozen=True, slots=True)
class PairOfQuestions:
    """A pair that was planned. `difference` is "" if the relation holds, None if it does not apply."""

    seed: int
    kind: str
    relation: str
    first: FleetAnswer
    difference: str | None
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="how many pairs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="this seed alone, under every relation unless one is given")
    parser.add_argument("--relation", choices=tuple(RELATIONS), help="this relation alone")
    parser.add_argument("--requests", type=int, nargs=2, default=(20, 100), metavar=("FROM", "TO"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--cpu-s", type=float, default=float("inf"), help="no pair begins after so many in all"
    )
    arguments = parser.parse_args()
    asked = arguments.requests[0], arguments.requests[1]
    names = [arguments.relation] if arguments.relation else list(RELATIONS)
    if arguments.only is not None:
        pairs = [compare((arguments.only, name), asked) for name in names]
    else:
        seeds = range(arguments.first, arguments.first + arguments.count)
        work = [(seed, names[seed % len(names)]) for seed in seeds]
        pairs = list(_until(each(work, asked, arguments.processes), arguments.cpu_s))
    print_pairs(pairs)
    sys.exit(1 if any(pair.difference for pair in pairs) else 0)


def each(work: list[tuple[int, str]], asked: tuple[int, int], processes: int) -> Iterator[PairOfQuestions]:
    if processes == 1:
        yield from (compare(item, asked) for item in work)
        return
    with ProcessPoolExecutor(processes) as pool:
        try:
            yield from pool.map(partial(compare, requests=asked), work)
        finally:
            pool.shutdown(cancel_futures=True)


def compare(item: tuple[int, str], requests: tuple[int, int]) -> PairOfQuestions:
    seed, name = item
    start_s = time.process_time()
    drawn = question(seed, None, requests)
    first, difference = broken(drawn, name)
    return PairOfQuestions(seed, drawn.kind, name, first, difference, time.process_time() - start_s)


def _until(pairs: Iterator[PairOfQuestions], cpu_s: float) -> Iterator[PairOfQuestions]:
    """The pairs of the first `cpu_s` CPU seconds; those that break their relation are printed as they
    come.
    """
    spent_s = 0.0
    for pair in pairs:
        if pair.difference:
            print(f"seed {pair.seed} ({pair.kind}), {pair.relation}: {pair.difference}", flush=True)
        yield pair
        spent_s += pair.cpu_s
        if spent_s > cpu_s:
            return


def print_pairs(pairs: list[PairOfQuestions]) -> None:
    counts = Counter((pair.relation, pair.difference if not pair.difference else "wrong") for pair in pairs)
    print("relation     hold  wrong  not meant  exact")
    for name in RELATIONS:
        exact = sum(pair.first.is_exact for pair in pairs if pair.relation == name)
        row = counts[name, ""], counts[name, "wrong"], counts[name, None], exact
        print(f"{name:11} {row[0]:5} {row[1]:6} {row[2]:10} {exact:6}")
    for pair in pairs:
        if pair.difference:
            print(f"seed {pair.seed} ({pair.kind}), {pair.relation}: {pair.difference}")
    cpu_s = sum(pair.cpu_s for pair in pairs)
    print(f"{len(pairs)} pairs, {sum(bool(pair.difference) for pair in pairs)} wrong, {cpu_s:.0f} CPU s")


if __name__ == "__main__":
    main()
