"""Asks questions that the planner once answered wrongly, and more of their kinds, whose answers are checked
by simulating all cheaper fleets.

    python benchmarks/wrong_answers.py DIR [--traces DIR] [--family rows code20 mi300x bursts] [--questions N]

DIR holds the files of the list of wrong answers (code20.slo.yaml, pace.csv, ...), --traces
AzureLLMInferenceTrace_{conv,code}.csv. `rows` asks the list's own questions with the defaults of `plan`. The
other families compare level 0 with a scan. It simulates the fleets of every worker type and of every pair of
types that cost less than the answer of level 0, the cheapest first, until one holds. It uses no pruning rule.
Prints a table and exits with 1 if an answer is wrong.

    code20   TTFT p90 2 / 5 / 10 s x TBT p99 22 .. 50 ms on the code trace at 20 req/s, a100-80g and h100-80g
    mi300x   13 of those limits with mi300x alone
    bursts   k requests every T seconds, TTFT loose, TBT tight, more than 200 pairs: 40 questions
"""

import argparse
import itertools
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from assumptions import instant

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.fleet_file import parse_fleet, read_fleet
from planner.documents.task import PlanQuestion, parse_task
from planner.domain import Limit, Slo
from planner.errors import InfeasibleError, PlannerError
from planner.files.checked_files import read_yaml
from planner.fleet import Fleet, Pool
from planner.search.evidence.certify import plan
from planner.search.mixed.best_fleet import FleetSearch, best_of
from planner.search.mixed.bounds import lower_bound
from planner.search.mixed.policy_search import search_policies
from planner.search.oracle.fleet_counts import Counts, objective_of
from planner.search.oracle.traffic_request import TrafficRequest, requested_traffic
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import decode_options, mixed_options, prefill_options
from planner.search.problem.plan_problem import Conditions, Problem
from planner.simulator.measured_values import metric_percentile_s
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import judge_slo
from planner.solvers.master import Option
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
SAMPLE = Path(__file__).resolve().parents[1] / "examples" / "traces" / "azure-conversation-sample.csv"
CLOSE = 1e-6  # Prices that differ by no more than this share count as equal.
MOST = 24  # The scan goes up to so many workers in a pool if the planner found no fleet, so no price ends it.
GPUS = ("a100-80g", "h100-80g", "h200-141g", "mi300x-192g")
WAVE = 16  # The scan simulates so many fleets at once, then looks whether one holds.
# Limits on TTFT p90 and on TBT p99 [s] of the families code20 and mi300x.
LIMITS_S = tuple(itertools.product((10.0, 5.0, 2.0), (0.05, 0.04, 0.035, 0.03, 0.028, 0.026, 0.024, 0.022)))
FEW_S = tuple(itertools.product((10.0, 5.0, 2.0), (0.05, 0.04, 0.03, 0.026, 0.022)))[:13]


@dataclass(frozen=True, slots=True)
class Row:
    """One question, what the planner reported and what is true."""

    question: str
    reported: str
    true: str
    is_right: bool
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--questions", type=int, default=1000, help="at most so many of a family")
    arguments = parser.parse_args()
    found: list[Row] = []
    for family in arguments.family:
        print(f"\n| {family} | said | true | right | s |\n|---|---|---|---|---|")
        for row in itertools.islice(FAMILIES[family](arguments), arguments.questions):
            right = "yes" if row.is_right else "**no**"
            print(
                f"| {row.question} | {row.reported} | {row.true} | {right} | {row.seconds:.0f} |", flush=True
            )
            found.append(row)
    wrong = sum(not row.is_right for row in found)
    print(f"\n{len(found)} questions, {wrong} answered wrongly")
    sys.exit(1 if wrong else 0)


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """The list's own questions. The prices are those of fleets that hold, from the list: single GPUs, on
    paper, with engines whose host takes no time, as plans were when it was written.
    """
    directory, catalog = arguments.directory, read_catalog()
    code, conv = (arguments.traces / f"AzureLLMInferenceTrace_{name}.csv" for name in ("code", "conv"))
    for slo, trace, most in (
        ("code20", code, 65.78),
        ("handoff_bursts", None, 23.94),
        ("only_mixed_fits", SAMPLE, math.inf),
        ("pace", None, 23.30),
        ("srpt", None, 8.97),
        ("warmup", None, math.inf),
        ("mixed", conv, 55.90),
    ):
        task = _listed_task(directory / f"{slo}.slo.yaml", catalog)
        yield _planned(slo, task, trace or directory / f"{slo}.csv", catalog, most)
    few = replace(_listed_task(directory / "code20.slo.yaml", catalog), stock={"h100-80g": 64})
    yield _planned("code20 with 64 H100", few, code, catalog, 22 * 2.99)
    yield _bound_of_pace(directory, catalog)
    yield _robust(
        {"rate": 40}, {"traffic": "2.5 %"}, read_yaml(directory / "only_mixed_fits.slo.yaml"), catalog
    )
    for name, wanted in (
        ("quotes.csv", lambda trace: len(trace) == 100),
        ("first_lacks.jsonl", lambda trace: trace.after.size > 0 and trace.has_prefixes and trace.tenants),
    ):
        yield _read(directory / name, wanted)
    yield _fleet_refused(directory / "neg.yaml", catalog)
    yield _drops_said(directory / "drop.csv")


def _listed_task(path: Path, catalog: Catalog) -> PlanQuestion:
    """A question under the conditions of the list's prices."""
    document: dict[str, Any] = dict(read_yaml(path))
    fleet = document["fleet"]
    sold_singly = {"sold_as": dict.fromkeys(fleet["gpus"], "gpu")}
    as_listed = {"engine": "none", "safety": "none", "fleet": fleet | sold_singly}
    return parse_task(document | as_listed, catalog, where=str(path))


def _planned(name: str, task: PlanQuestion, trace: Path, catalog: Catalog, most: float) -> Row:
    """Plans, and checks that the plan holds and costs at most `most` USD/h, and level 0 too if it is
    exact.
    """
    start_s = time.perf_counter()
    try:
        found = plan(task, read_trace(trace), catalog)
    except PlannerError as error:
        return Row(name, f"exit {error.exit_code}: {str(error)[:60]}", _at_most(most), False, _since(start_s))
    certificate = found.certificate
    kind = "exact" if certificate.level0_exact else "not exact"
    reported = (
        f"{certificate.value:.2f} (level 0 {certificate.level0:.2f}, {kind}; bound {certificate.bound:.2f})"
    )
    is_right = found.verdict.holds and certificate.value <= most + 0.005
    is_right &= (
        not certificate.level0_exact or name in ("mixed", "pace") or certificate.level0 <= most + 0.005
    )
    return Row(name, reported, _at_most(most), is_right, _since(start_s))


def _at_most(usd_per_h: float) -> str:
    return f"{usd_per_h:.2f} or less" if math.isfinite(usd_per_h) else "a plan"


def _bound_of_pace(directory: Path, catalog: Catalog) -> Row:
    """Checks that the lower bound of the question `pace` is not above a fleet that holds."""
    start_s = time.perf_counter()
    task, trace = _listed_task(directory / "pace.slo.yaml", catalog), read_trace(directory / "pace.csv")
    path = directory / "pace.fleet.yaml"
    fleet = parse_fleet(read_yaml(path) | {"engine": "none"}, path, catalog)
    problem = build_problem(task, trace, catalog)
    holds = judge_slo(
        simulate(fleet, problem.trace, limits=task.slo.limits), task.slo, with_percentiles=False
    ).holds
    bound = lower_bound(problem) or math.inf
    return Row(
        "pace: the bound",
        f"{bound:.2f}",
        f"{fleet.price_usd_per_h:.2f} {'holds' if holds else 'FAILS'}",
        holds and bound <= fleet.price_usd_per_h * (1 + CLOSE),
        _since(start_s),
    )


def _robust(
    traffic: dict[str, object], robust: dict[str, object], document: dict[str, object], catalog: Catalog
) -> Row:
    """Checks by simulation that a plan for up to 2.5 % more traffic holds at 101 rates of the interval."""
    start_s = time.perf_counter()
    document = document | {"traffic": traffic, "robust": robust, "fleet": {"gpus": ["a100-80g", "h100-80g"]}}
    task, trace = parse_task(document, catalog), read_trace(SAMPLE)
    try:
        fleet = plan(task, trace, catalog).fleet
    except PlannerError as error:
        return Row("sample at 40 to 41 req/s", str(error)[:60], "holds at 101 rates", False, _since(start_s))
    failed = []
    for rate_rps in np.linspace(40, 41, 101):
        plain = replace(task, rate_rps=float(rate_rps), robust=type(task.robust)())
        asked, _ = requested_traffic(trace, plain, seed=0)
        if not judge_slo(
            simulate(fleet, asked, limits=task.slo.limits), task.slo, with_percentiles=False
        ).holds:
            failed.append(f"{rate_rps:.2f}")
    reported = f"{fleet.price_usd_per_h:.2f}, fails at {', '.join(failed) or 'none'}"
    return Row("sample at 40 to 41 req/s", reported, "holds at 101 rates", not failed, _since(start_s))


def _read(path: Path, wanted: Callable[[Trace], object]) -> Row:
    """Checks that a trace is read as `wanted` says, or refused."""
    start_s = time.perf_counter()
    try:
        trace = read_trace(path)
    except PlannerError as error:
        return Row(path.name, str(error)[:60], "all rows, or an error", True, _since(start_s))
    reported = f"{len(trace)} requests, {len(trace.after)} waits, prefixes {trace.has_prefixes}"
    return Row(path.name, reported, "all of it, or an error", bool(wanted(trace)), _since(start_s))


def _fleet_refused(path: Path, catalog: Catalog) -> Row:
    start_s = time.perf_counter()
    try:
        read_fleet(path, catalog)
    except PlannerError as error:
        return Row(path.name, str(error)[:60], "refused", True, _since(start_s))
    return Row(path.name, "read", "refused", False, _since(start_s))


def _drops_said(path: Path) -> Row:
    """Checks that the command names the 60 rows of a trace that it drops, or ends with an error."""
    start_s = time.perf_counter()
    document = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "2 s"}}, "fleet": {"gpus": ["h100-80g"]}}
    with tempfile.TemporaryDirectory() as folder:
        slo = Path(folder) / "slo.yaml"
        slo.write_text(yaml.safe_dump(document))
        command = [sys.executable, "-m", "planner.cli", "--slo", str(slo), "--trace", str(path)]
        command += ["-o", f"{folder}/out"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said_so = re.search(r"\b60 (of|rows|requests)\b", done.stdout + done.stderr)
    is_said = done.returncode == 1 or said_so is not None
    reported = f"exit {done.returncode}, the 60 rows {'named' if is_said else 'not named'}"
    return Row(path.name, reported, "60 of 90 rows named, or an error", is_said, _since(start_s))


def code20(arguments: argparse.Namespace) -> Iterator[Row]:
    yield from _on_code(arguments, ["a100-80g", "h100-80g"], LIMITS_S)


def mi300x(arguments: argparse.Namespace) -> Iterator[Row]:
    yield from _on_code(arguments, ["mi300x-192g"], FEW_S)


def _on_code(
    arguments: argparse.Namespace, gpus: list[str], limits_s: tuple[tuple[float, float], ...]
) -> Iterator[Row]:
    """Questions on the code trace at 20 requests/s. The loosest limits come first: a fleet that misses them
    misses all others, so `VerdictCache`, which remembers simulations, saves most of those that follow.
    """
    catalog, trace = read_catalog(), read_trace(arguments.traces / "AzureLLMInferenceTrace_code.csv")
    cache, asked = VerdictCache(), None
    for ttft_s, tbt_s in limits_s:
        task = parse_task(
            {
                "llm": "meta-llama/Llama-3.1-70B",
                "slo": {"ttft": {"p90": f"{ttft_s:g} s"}, "tbt": {"p99": f"{1e3 * tbt_s:g} ms"}},
                "traffic": {"rate": 20},
                "fleet": {"gpus": gpus},
            },
            catalog,
        )
        asked = asked or TrafficRequest.of(trace, task, seed=0)
        yield _against_scan(
            f"TTFT p90 {ttft_s:g} s, TBT p99 {1e3 * tbt_s:g} ms", task, trace, catalog, cache, asked
        )


def bursts(arguments: argparse.Namespace) -> Iterator[Row]:
    """Questions on bursts of k requests every T s, drawn so that three things hold: some pair of pools keeps
    the limits; its decode pool would not keep them if prefill took no time; and steps with prompts in them
    are too long for a mixed pool.
    """
    catalog = read_catalog()
    for seed in range(40):
        rng = np.random.default_rng([41, seed])
        task, trace = _burst_question(rng, catalog)
        yield _against_scan(f"bursts {seed}: {trace.name}", task, trace, catalog, VerdictCache(), None)


def _burst_question(rng: np.random.Generator, catalog: Catalog) -> tuple[PlanQuestion, Trace]:
    """One such question: fleets are drawn until one fits, and the limits are set to what it keeps."""
    k, period_s = int(np.exp(rng.uniform(np.log(20), np.log(250)))), float(rng.uniform(20, 90))
    count = min(int(rng.integers(10, 30)), max(3000 // k, 4))
    inputs, outputs = int(rng.integers(500, 4000)), int(rng.integers(30, 500))
    arrival_s = (np.arange(count)[:, None] * period_s + np.arange(k) * 0.001).ravel()
    vary = rng.uniform(0.7, 1.3, (2, len(arrival_s))) if rng.random() < 0.5 else np.ones((2, len(arrival_s)))
    name = f"{k} requests of {inputs} + {outputs} tokens every {period_s:.0f} s"
    trace = Trace(
        name,
        arrival_s,
        np.round(inputs * vary[0]).astype(np.int64),
        np.round(outputs * vary[1]).astype(np.int64),
    )
    gpus = rng.choice(GPUS, 2, replace=False) if rng.random() < 0.5 else [rng.choice(GPUS[2:])]
    fleet = {"gpus": [str(gpu) for gpu in gpus], "max_num_seqs": [16, 32, 64, 128, 256]}
    document = {"llm": "meta-llama/Llama-3.1-70B", "slo": {"ttft": {"p90": "30 s"}}, "fleet": fleet}
    task = parse_task(document, catalog)
    problem = build_problem(task, trace, catalog)
    front, back = prefill_options(problem.types, "cost"), decode_options(problem.types, "cost")
    assert len(front) * len(back) > 200
    chunk_s = min(float(option.type.latency.step_s(option.type.max_num_batched_tokens)) for option in front)
    for _ in range(400):
        decode = Pool("dec", "decode", _one(rng, back).type, int(rng.integers(1, 4)))
        prefill = Pool("pre", "prefill", _one(rng, front).type, int(rng.integers(1, 4)))
        simulation = simulate(Fleet(problem.llm, (prefill, decode)), problem.trace, record=True)
        ttft_s, tbt_s = (
            metric_percentile_s(simulation, "ttft", 0.9),
            metric_percentile_s(simulation, "tbt", 0.99),
        )
        at_once = replace(prefill, type=instant(prefill.type, trace), count=1)
        simulation = simulate(Fleet(problem.llm, (at_once, decode)), problem.trace, record=True)
        if (
            ttft_s < 60
            and metric_percentile_s(simulation, "tbt", 0.99) > 1.1 * tbt_s
            and tbt_s < 0.9 * chunk_s
        ):
            break
    else:
        return _burst_question(rng, catalog)
    limits = (
        Limit("ttft", 0.9, round(max(ttft_s * float(rng.uniform(1.0, 2.0)), 1.0), 3)),
        Limit("tbt", 0.99, round(tbt_s * float(rng.uniform(1.0, 1.05)), 5)),
    )
    return replace(task, slo=Slo(limits)), trace


def _one(rng: np.random.Generator, options: list[Option]) -> Option:
    return options[int(rng.integers(len(options)))]


def _against_scan(
    name: str,
    task: PlanQuestion,
    trace: Trace,
    catalog: Catalog,
    cache: VerdictCache,
    asked: TrafficRequest | None,
) -> Row:
    start_s = time.perf_counter()
    problem = build_problem(
        task, trace, catalog, request=asked, conditions=Conditions(time.monotonic() + 120.0)
    )
    try:
        _, found = best_of(search_policies(problem))
        level0, is_exact, value = found.level0.search.value, _is_exact(found), found.value
    except InfeasibleError:
        level0, is_exact, value = math.inf, True, math.inf
    searched_s = _since(start_s)
    true, simulated = scan(replace(problem, oracle=replace(problem.oracle, cache=cache)), level0)
    reported = f"{level0:.2f}{' exact' if is_exact else ''}" if math.isfinite(level0) else "no fleet"
    reported += f", plan {value:.2f} in {searched_s:.0f} s"
    return Row(
        name,
        reported,
        f"{true:.2f} ({simulated} simulated)",
        true >= level0 * (1 - CLOSE) or true == level0,
        _since(start_s),
    )


def _is_exact(found: FleetSearch) -> bool:
    search = found.level0.search
    return bool(getattr(search, "is_exact", search.is_exhausted))


def scan(problem: Problem, below: float) -> tuple[float, int]:
    """The price of the cheapest fleet of level 0 that holds, or `below` if no cheaper one does; and how many
    fleets were simulated.

    If the planner found no fleet (`below` is infinite), these are all fleets within the question's limits
    with up to MOST workers in a pool.
    """
    simulated = 0
    fleets = sorted(_cheaper(problem, below), key=objective_of)
    with ThreadPoolExecutor() as threads:
        for wave in _waves(fleets):
            simulated += len(wave)
            answers = threads.map(lambda counts: problem.oracle.holds(counts), wave)
            for counts, holds in zip(wave, answers, strict=True):
                if holds:
                    return objective_of(counts), simulated
    return below, simulated


def _waves(fleets: list[Counts]) -> Iterator[tuple[Counts, ...]]:
    for first in range(0, len(fleets), WAVE):
        yield tuple(fleets[first : first + WAVE])


def _cheaper(problem: Problem, below: float) -> list[Counts]:
    """All fleets of level 0 within the question's limits that cost less than `below`."""
    types, wanted, limits = problem.types, problem.task.objective, problem.limits
    below *= 1 - CLOSE
    pools: list[tuple[Option, ...]] = [(option,) for option in mixed_options(types, wanted)]
    pools += list(itertools.product(prefill_options(types, wanted), decode_options(types, wanted)))
    fleets: list[Counts] = []
    for options in pools:
        most = [
            int(
                min(
                    limits.most_workers(option.type),
                    below / option.objective if math.isfinite(below) else MOST,
                )
            )
            for option in options
        ]
        for numbers in itertools.product(*(range(1, n + 1) for n in most)):
            counts = tuple(zip(options, numbers, strict=True))
            if (
                objective_of(counts) < below
                and limits.first_exceeded([(o.type, n) for o, n in counts]) is None
            ):
                fleets.append(counts)
    return fleets


def _since(start_s: float) -> float:
    return time.perf_counter() - start_s


FAMILIES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "rows": rows,
    "code20": code20,
    "mi300x": mi300x,
    "bursts": bursts,
}

if __name__ == "__main__":
    main()
