"""Makes one plan with several executors: wall and CPU seconds, whether the files are equal, and how many
workers help.

    python benchmarks/executors.py [--trace FILE] [--rate 200] [--window "first 3 min"]
                                   [--executors serial threads:2 processes:1 processes:2 ...] [--repeats 2]
    python benchmarks/executors.py --clusters          # Dask and Ray, each with two workers started here
    python benchmarks/executors.py --parts             # seconds with 1 to 64 workers, from one run

The question asks for a fleet for production: Llama-3.1-70B on four GPU types, TTFT p90 2 s, TBT p99 200 ms.
Each run is a process of its own; a first one compiles and is not counted. CPU seconds are those of the
process and of the processes that it starts and waits for, so they leave out a cluster.

`--parts` records a serial run: its steps in CPU seconds, and which of them may run at the same time. It then
computes how long they would take with more workers, each on a core of its own, without any time for
communication, which cannot be measured on a busy machine. FILE is AzureLLMInferenceTrace_conv.csv; default:
../shared/data/traces beside the clone.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from planner.api import planning
from planner.api.questions import read_task
from planner.documents.catalog import read_catalog
from planner.parallel.executors import SERIAL, working_on
from planner.search.oracle import deterministic_parallel, simulation_queries
from planner.studies.what_if import Study
from planner.traffic.trace_reading import read_trace

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TRACE = ROOT.parent / "shared" / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"
GPUS = ["a100-80g", "h100-80g", "h200-141g", "l40s-48g"]
# A program that starts a Ray cluster, prints its address, and ends it when its stdin is closed.
RAY_HEAD = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def question(asked: argparse.Namespace) -> dict[str, Any]:
    return {
        "llm": "llama-3.1-70b",
        "slo": {"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}},
        "traffic": {"rate": asked.rate, "window": asked.window},
        "fleet": {"gpus": GPUS, "network": {"bandwidth": "50 GB/s"}},
        **({"safety": "none"} if asked.paper else {}),
    }


def planned(folder: Path, trace: Path, how: list[str]) -> tuple[float, float, str]:
    """Wall and CPU seconds of one run, and the digest of its files."""
    command = [sys.executable, "-m", "fleetplan", "--slo", "slo.yaml", "--trace", str(trace), "-o", "out"]
    command += ["--time-limit", "3600", "--quiet", *how]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    start_s = time.monotonic()
    child = subprocess.Popen(command, cwd=folder, env=here, stdout=subprocess.DEVNULL)
    _, code, used = os.wait4(child.pid, 0)
    wall_s = time.monotonic() - start_s
    if code:
        raise SystemExit(f"{' '.join(how)}: ended with {code}")
    digest = hashlib.sha256()
    for path in sorted((folder / "out").rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return wall_s, used.ru_utime + used.ru_stime, digest.hexdigest()[:8]


@contextmanager
def dask() -> Iterator[list[str]]:
    """A Dask cluster on this machine, as the options of `plan` that use it."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=logging.CRITICAL
    ) as cluster:
        yield ["--executor", "dask", "--address", cluster.scheduler_address]


@contextmanager
def ray() -> Iterator[list[str]]:
    """A Ray cluster on this machine, as the options of `plan` that use it."""
    here = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    head = subprocess.Popen(
        [sys.executable, "-c", RAY_HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=here,
    )
    assert head.stdout is not None
    try:
        yield ["--executor", "ray", "--address", head.stdout.readline().strip()]
    finally:
        head.communicate(timeout=60)


def compared(asked: argparse.Namespace, folder: Path) -> None:
    """Prints the table of executors."""
    (folder / "slo.yaml").write_text(yaml.safe_dump(question(asked)))
    planned(folder, asked.trace, ["--executor", "serial"])
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    print("| executor | wall, s | CPU, s | files | load |\n|---|---|---|---|---|")
    for _ in range(asked.repeats):
        for name in asked.executors:
            tell(name, folder, asked.trace, ["--executor", name])
    for name, started in (("dask, 2 workers", dask), ("ray, 2 workers", ray)) if asked.clusters else ():
        with started() as how:
            for _ in range(asked.repeats):
                tell(name, folder, asked.trace, how)


def tell(name: str, folder: Path, trace: Path, how: list[str]) -> None:
    wall_s, cpu_s, digest = planned(folder, trace, how)
    print(f"| {name} | {wall_s:.1f} | {cpu_s:.1f} | {digest} | {os.getloadavg()[0]:.1f} |", flush=True)


# The steps of a run in order: ("here", seconds) for the process that plans, ("worker", seconds) for a
# simulation that a worker could do, ("wave", [Sequence, ...]) for sequences that may run at the same time.
Sequence = list[tuple[str, Any]]


class Recorder:
    """Records the steps of a serial run in `now`, a Sequence, with their CPU seconds."""

    def __init__(self) -> None:
        self.now: Sequence = []
        self.since_s = time.process_time()

    def mark(self, kind: str) -> None:
        """Ends a step of this kind, which began at the last mark."""
        now_s = time.process_time()
        self.now.append((kind, now_s - self.since_s))
        self.since_s = now_s

    def run(self, tasks: Any, at_once: int) -> None:
        """In place of `deterministic_parallel._run_in_threads`: runs the tasks in turn and records a wave."""
        self.mark("here")
        outer, each = self.now, []
        for context, todo in tasks:
            self.now = []
            context.run(todo)
            self.mark("here")
            each.append(self.now)
        self.now = outer
        self.now.append(("wave", each))

    def asked(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is recorded as a worker's."""

        def timed(*what: Any) -> Any:
            self.mark("here")
            found = answer(*what)
            self.mark("worker")
            return found

        return timed


def duration_s(run: Sequence, workers: int) -> float:
    """How long the same steps take with so many workers, first come first served, beside the one process that
    plans.

    Each sequence is a generator (`follow`), which is resumed when its step has ended (`go_on`). It yields
    "wait" while a wave of its own is not over.
    """
    free, waiting = {"here": 1, "worker": workers}, {"here": deque[Any](), "worker": deque[Any]()}
    events: list[tuple[float, int, str, Any]] = []
    number, now_s = count(), 0.0

    def follow(run: Sequence, then: Callable[[], None]) -> Iterator[tuple[str, float]]:
        for kind, what in run:
            if kind != "wave":
                yield kind, what
                continue
            left = [len(what)]
            for task in what:
                started = follow(task, lambda left=left: left.__setitem__(0, left[0] - 1))  # type: ignore[misc]
                go_on(started)
            while left[0]:
                yield "wait", 0.0
        then()

    blocked: list[Any] = []

    def go_on(thread: Iterator[tuple[str, float]]) -> None:
        for kind, seconds in thread:
            if kind == "wait":
                blocked.append(thread)
            elif free[kind]:
                free[kind] -= 1
                heapq.heappush(events, (now_s + seconds, next(number), kind, thread))
            else:
                waiting[kind].append((seconds, thread))
            return

    go_on(follow(run, lambda: None))
    while events:
        now_s, _, kind, thread = heapq.heappop(events)
        if waiting[kind]:
            seconds, other = waiting[kind].popleft()
            heapq.heappush(events, (now_s + seconds, next(number), kind, other))
        else:
            free[kind] += 1
        go_on(thread)
        blocked, again = [], blocked
        for thread in again:
            go_on(thread)
    return now_s


def parts(asked: argparse.Namespace, folder: Path) -> None:
    """Prints the seconds of each stage with 1 to 64 workers, computed from one recorded run."""
    catalog, recorder = read_catalog(), Recorder()
    trace = read_trace(asked.trace)
    stages: list[str] = []
    runs: list[Sequence] = []

    def heard(message: str) -> None:
        recorder.mark("here")
        if recorder.now is not (runs[-1] if runs else None):
            return  # A task of a wave reports progress; stages are those of the whole run.
        recorder.now = []
        runs.append(recorder.now)
        stages.append(str(message).split(":")[0])

    with working_on(SERIAL):
        planning.answer_question(read_task(small_document(asked), catalog), Study(trace, catalog, 0, 3600.0))
        deterministic_parallel._run_in_threads = recorder.run
        runner = simulation_queries.QueryRunner
        runner.answer = recorder.asked(runner.answer)  # type: ignore[method-assign]
        runner.judge_whole = recorder.asked(runner.judge_whole)  # type: ignore[method-assign]
        runs.append(recorder.now)
        stages.append("")
        heard("posing the question")
        found = planning.answer_question(
            read_task(question(asked), catalog), Study(trace, catalog, 0, 3600.0, heard)
        )
        heard("report")
        found.save(folder / "out")
        heard("")
    numbers = (1, 2, 4, 16, 64)
    table = {
        name: [
            sum(duration_s(run, n) for run, of in zip(runs, stages, strict=True) if of == name)
            for n in numbers
        ]
        for name in dict.fromkeys(stages)
        if name
    }
    table["all"] = [sum(row[k] for row in table.values()) for k in range(len(numbers))]
    table["speed-up"] = [table["all"][0] / all_s for all_s in table["all"]]
    print("| stage | " + " | ".join(f"{n} worker{'s' * (n > 1)}" for n in numbers) + " |")
    print("|---" * (len(numbers) + 1) + "|")
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in row) + " |")


def small_document(asked: argparse.Namespace) -> dict[str, Any]:
    """A question that compiles all that the large one needs."""
    return question(asked) | {"traffic": {"rate": 5, "window": "first 1 min"}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--window", default="first 3 min")
    parser.add_argument("--executors", nargs="*", default=["serial", "threads:2", "processes:2"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--paper", action="store_true", help="safety: none")
    parser.add_argument("--clusters", action="store_true")
    parser.add_argument("--parts", action="store_true")
    asked = parser.parse_args()
    asked.trace = asked.trace.resolve()
    with tempfile.TemporaryDirectory() as folder:
        (parts if asked.entries else compared)(asked, Path(folder))


if __name__ == "__main__":
    main()
