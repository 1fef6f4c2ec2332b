"""Compares answers of `plan` with simulations of every fleet, on random questions; or counts how often the
assumptions of a search are false.

    python benchmarks/brute_force.py [--count 2000] [--first 0] [--kind bursts] [--processes 2] [--save DIR]
    python benchmarks/brute_force.py --only 50 --save DIR
    python benchmarks/brute_force.py --rates [--count 1000] [--requests 1000 6000]
    python benchmarks/brute_force.py --kind classes --count 39 --requests 20 100 --fleets 600 --samples 30
    python benchmarks/brute_force.py --kept [--count 500]

tests/support/random_questions.py draws the questions by seed; tests/support/against_all_fleets.py finds what
is wrong with an answer. Prints the seeds of wrong answers and exits with 1 if there are any; --save writes
each of these questions into a folder, for

    plan --slo slo.yaml --trace trace.jsonl --catalog catalog -o out

With --kept the fleet of production is compared with every fleet of level 0 in the same scenarios, on smaller
questions (tests/support/kept_fleets.py). With --rates nothing is planned: tests/support/assumptions.py counts
how often the assumptions of a search of level 0 are false on such traffic.
"""

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

import assumptions
from against_all_fleets import MOST, Report, check
from assumptions import Tally
from kept_fleets import KeptReport, check_kept
from random_questions import CLASSES, KINDS, REQUESTS, files, question

from planner.errors import InfeasibleError

Answer = TypeVar("Answer")
Rates = tuple[list[str], dict[str, Tally] | None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="how many questions")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="this seed alone")
    parser.add_argument(
        "--kind", choices=(*dict.fromkeys(KINDS), CLASSES), help="questions of this kind alone"
    )
    parser.add_argument("--requests", type=int, nargs=2, default=REQUESTS, metavar=("FROM", "TO"))
    parser.add_argument(
        "--fleets", type=int, default=20_000, help="of level 0, at most so many of a question"
    )
    parser.add_argument("--samples", type=int, default=400, help="fleets of several types")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--save", type=Path, help="folder for the questions answered wrongly")
    parser.add_argument("--rates", action="store_true", help="count what assumptions fail, plan nothing")
    parser.add_argument("--kept", action="store_true", help="production in the same scenarios")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.count)
    if arguments.only is not None:
        seeds = range(arguments.only, arguments.only + 1)
    asked = {"kind": arguments.kind, "requests": tuple(arguments.requests)}
    start_s = time.perf_counter()
    if arguments.kept:
        sys.exit(print_kept(each(check_kept, seeds, arguments.processes)))
    if arguments.rates:
        print_rates(each(partial(rates_of, **asked), seeds, arguments.processes))
    else:
        effort = {"most_fleets": arguments.fleets, "samples": arguments.samples}
        reports = list(each(partial(report_of, effort=effort, **asked), seeds, arguments.processes))
        print_reports(reports)
    print(f"\nseeds {seeds.start} to {seeds.stop - 1}, {time.perf_counter() - start_s:.0f} s")
    if arguments.rates:
        return
    wrong = [report for report in reports if report.wrong]
    for report in wrong if arguments.save else []:
        save(arguments.save / str(report.seed), report, **asked)
    sys.exit(1 if wrong else 0)


def print_kept(reports: list[KeptReport | None]) -> int:
    """Prints the figures; returns 1 if an answer that is called exact is beaten by a cheaper fleet."""
    rows = [report for report in reports if report is not None]
    wrong = [report.seed for report in rows if report.is_wrong]
    others = [report.dearer_frac for report in rows if not report.is_exact and np.isfinite(report.value)]
    lost = sum(np.isinf(report.value) and np.isfinite(report.true_value) for report in rows)
    exact = sum(report.is_exact for report in rows)
    print(f"{len(reports)} questions, {len(rows)} with a fleet on paper")
    print(f"{exact} exact, of these {len(wrong)} beaten {wrong or ''}")
    mean, most = np.mean(others or [0]), max(others, default=0)
    print(f"{len(others)} not exact, dearer by {mean:.2%} at the mean and {most:.2%} at most")
    print(f"{lost} without a fleet where there is one")
    return 1 if wrong else 0


def each(ask: Callable[[int], Answer], seeds: range, processes: int) -> list[Answer]:
    if processes == 1 or len(seeds) == 1:
        return [ask(seed) for seed in seeds]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(ask, seeds, chunksize=4))


def report_of(seed: int, *, kind: str | None, requests: tuple[int, int], effort: dict[str, int]) -> Report:
    return check(question(seed, kind, requests), **effort)


def save(folder: Path, report: Report, *, kind: str | None, requests: tuple[int, int]) -> None:
    """Writes the question, and what is wrong with the answer, as files."""
    for name, text in files(question(report.seed, kind, requests)).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "wrong.txt").write_text("\n".join(report.wrong) + "\n")


def print_reports(reports: list[Report]) -> None:
    heads = (
        "kind",
        "questions",
        "plans",
        "no fleet",
        "exact",
        "exact, beaten",
        "not exact, beaten",
        "no fleet, one holds",
        "bound too high",
        "plan fails",
        "plan above best: mean",
        "worst",
        "simulated",
    )
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for kind in (*dict.fromkeys(KINDS), CLASSES, "all"):
        rows = [report for report in reports if kind in ("all", report.kind)]
        if not rows:
            continue
        plans = [report for report in rows if report.said == "plan"]
        open_ones = [report for report in plans if not report.is_exact]
        beaten = [report.level0_dearer_frac for report in open_ones if report.level0_dearer_frac > 1e-6]
        above = [report.dearer_frac for report in plans]
        cells = (
            kind,
            len(rows),
            len(plans),
            sum(report.said == "infeasible" for report in rows),
            sum(report.is_exact for report in plans),
            count(rows, "(a)"),
            f"{len(beaten)} of {len(open_ones)}" + (f", up to {max(beaten):.0%}" if beaten else ""),
            count(rows, "(b)"),
            count(rows, "(c)"),
            count(rows, "(d)"),
            f"{np.mean(above or [0.0]):.2%}",
            f"{max(above, default=0.0):.0%}",
            sum(report.simulations for report in rows),
        )
        print("| " + " | ".join(map(str, cells)) + " |")
    for report in reports:
        for wrong in report.wrong:
            print(f"seed {report.seed} ({report.kind}): {wrong}")


def count(reports: list[Report], what: str) -> int:
    return sum(any(line.startswith(what) for line in report.wrong) for report in reports)


def rates_of(seed: int, *, kind: str | None, requests: tuple[int, int]) -> Rates:
    """The groups that a question belongs to, and its tallies; None where no worker keeps the limits."""
    asked = question(seed, kind, requests)
    policies, groups = asked.task.policy_choices()[-1], ["all", asked.kind]
    if not policies.prefix_cache and asked.kind != "sessions":
        is_jsq, is_fcfs = policies.routing == "jsq", policies.queue == "fcfs"
        groups += ["no caches, no sessions", "jsq" if is_jsq else "other routings"]
        groups += ["fcfs" if is_fcfs else "other queues"]
        if is_jsq and is_fcfs:
            size = next((n for n in (100, 400, 2000) if len(asked.trace) < n), None)
            groups += ["jsq and fcfs", "jsq and fcfs, " + (f"under {size}" if size else "more") + " requests"]
    try:
        return groups, assumptions.measure(asked, MOST, np.random.default_rng(seed))
    except InfeasibleError:
        return groups, None


def print_rates(found: list[Rates]) -> None:
    tables: dict[str, dict[str, Tally]] = {}
    for groups, tallies in found:
        if tallies is None:
            continue
        for group in groups:
            for name, tally in tallies.items():
                tables.setdefault(group, {}).setdefault(name, Tally()).add(tally)
    print(assumptions.__doc__)
    print(
        "| traffic | assumption | false of neighbours | changes the optimum of | then dearer: mean | worst |"
    )
    print("|---|---|---|---|---|---|")
    for group, table in sorted(tables.items(), key=lambda item: (item[0] in KINDS, item[0])):
        for name, tally in table.items():
            finite = [frac for frac in tally.dearer_frac if np.isfinite(frac)]
            lost = len(tally.dearer_frac) - len(finite)
            share = tally.failed / max(tally.tested, 1)
            print(
                f"| {group} | {name} | {tally.failed} of {tally.tested} ({share:.3%}) | {tally.changed} of "
                f"{tally.questions}{f', {lost} lost' if lost else ''} | {np.mean(finite or [0.0]):.0%} | "
                f"{max(finite, default=0.0):.0%} |"
            )


if __name__ == "__main__":
    main()
