"""One plan by several executors: wall and CPU seconds, whether the files are the same, what limits it.

    python benchmarks/executors.py [--trace FILE] [--rate 200] [--window "first 3 min"]
                                   [--executors serial threads:2 processes:1 processes:2 ...] [--repeats 2]
    python benchmarks/executors.py --clusters          # Dask and Ray, each with two workers started here
    python benchmarks/executors.py --parts             # one run in this process: what cannot go side by side

A production question: Llama-3.1-70B on four GPU types, TTFT p90 2 s, TBT p99 200 ms. Each run is a process
of its own, after one that compiles. CPU seconds are those of the process and of all that it starts and waits
for, so not those of a cluster. `--parts` runs one question after the other and takes, of what is asked side
by side, the longest: that is left with as many workers as one likes (a wave has 32 tasks at most). Each line
is a stage of the search. FILE: AzureLLMInferenceTrace_conv.csv; default: ../shared/data/traces beside the
clone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from planner.documents.catalog import read_catalog
from planner.face import planning
from planner.face.questions import read_task
from planner.io.executors import SERIAL, working_on
from planner.search import waves
from planner.studies.whatif import Study
from planner.traffic.reading import read_trace

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TRACE = ROOT.parent / "shared" / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"
GPUS = ["a100-80g", "h100-80g", "h200-141g", "l40s-48g"]
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
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        yield ["--executor", "dask", "--address", cluster.scheduler_address]


@contextmanager
def ray() -> Iterator[list[str]]:
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


class Span:
    """Seconds as if all tasks of a wave ran at once: what a serial run spares so, beside what it takes."""

    def __init__(self) -> None:
        self.spared_s = 0.0

    def run(self, tasks: Any, at_once: int) -> None:
        before_s, start_s, longest_s = self.spared_s, time.process_time(), 0.0
        for context, todo in tasks:
            began_s, self.spared_s = time.process_time(), 0.0
            context.run(todo)
            longest_s = max(longest_s, time.process_time() - began_s - self.spared_s)
        self.spared_s = before_s + (time.process_time() - start_s) - longest_s


def parts(asked: argparse.Namespace, folder: Path) -> None:
    catalog, span = read_catalog(), Span()
    waves._run = span.run
    rows: list[tuple[str, float, float]] = []

    def timed(name: str, do: Callable[[], Any]) -> Any:
        start_s, spared_s = time.process_time(), span.spared_s
        answer = do()
        took_s = time.process_time() - start_s
        rows.append((name, took_s, took_s - (span.spared_s - spared_s)))
        return answer

    stages: list[tuple[str, float, float]] = []

    def heard(message: str) -> None:
        stages.append((str(message).split(":")[0], time.process_time(), span.spared_s))

    with working_on(SERIAL):
        trace = timed("reading", lambda: read_trace(asked.trace))
        planning.answered(read_task(small_document(asked), catalog), Study(trace, catalog, 0, 3600.0, heard))
        stages.clear()
        heard("posing the question, bound")
        study = Study(trace, catalog, 0, 3600.0, heard)
        found = planning.answered(read_task(question(asked), catalog), study)
        heard("report")
        found.save(folder / "out")
        heard("end")
    for (name, from_s, spared_s), (_, to_s, then_s) in pairwise(stages):
        rows.append((name, to_s - from_s, to_s - from_s - (then_s - spared_s)))
    print("| stage | CPU, s | left with any number of workers, s |\n|---|---|---|")
    names = dict.fromkeys(name for name, _, _ in rows)
    table = [(name, *(sum(row[k] for row in rows if row[0] == name) for k in (1, 2))) for name in names]
    for name, took_s, left_s in table:
        print(f"| {name} | {took_s:.1f} | {left_s:.1f} |")
    took_s, left_s = (sum(row[k] for row in table) for k in (1, 2))
    print(f"| all | {took_s:.1f} | {left_s:.1f} |\n\nspeed-up at most {took_s / left_s:.1f}")


def small_document(asked: argparse.Namespace) -> dict[str, Any]:
    """Compiles what the large one needs."""
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
        (parts if asked.parts else compared)(asked, Path(folder))


if __name__ == "__main__":
    main()
