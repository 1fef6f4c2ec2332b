"""Measures the CPU seconds and memory that it takes to read a gateway's log as a trace.

    python benchmarks/logs.py [--rows 10000000] [--kind csv|quoted|epoch|jsonl] [--folder DIR]

Each kind is written to a file first, then read in a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

ROWS_AT_ONCE = 500_000
READ = """
import resource, sys, time
from planner.traffic.trace_reading import read_trace
began = time.process_time()
trace = read_trace(sys.argv[1], seed=None)
used = resource.getrusage(resource.RUSAGE_SELF)
print(f"{len(trace)} requests, {used.ru_utime + used.ru_stime:.1f} CPU s in all, "
      f"{time.process_time() - began:.1f} of reading, {used.ru_maxrss / 1024:.0f} MiB at most")
print(trace.notes[0])
"""


def write_log(path: Path, rows: int, kind: str) -> None:
    """Poisson arrivals of 100/s, some seconds late, with the columns that a gateway writes."""
    rng = np.random.default_rng(0)
    start_ns = 1_760_000_000 * 10**9
    with path.open("w") as stream:
        for first in range(0, rows, ROWS_AT_ONCE):
            n = min(ROWS_AT_ONCE, rows - first)
            ns = start_ns + np.cumsum(rng.exponential(1e7, n)).astype(np.int64)
            start_ns = int(ns[-1])
            at = pd.Series(ns.view("M8[ns]")).dt.tz_localize("UTC")
            text = at.dt.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            table = pd.DataFrame(
                {
                    "created_at": ns // 10**6 if kind == "epoch" else text,
                    "model": rng.choice(["llama-70b", "qwen-32b"], n),
                    "tenant": rng.choice([f"team-{k}" for k in range(50)], n),
                    "prompt_tokens": rng.integers(1, 4000, n),
                    "completion_tokens": rng.integers(1, 800, n),
                    "latency_ms": rng.integers(100, 30_000, n),
                    "status_code": rng.choice([200, 200, 200, 200, 200, 200, 200, 200, 200, 500], n),
                }
            )
            if kind == "quoted":
                table["model"] = '"' + table["model"] + '"'
            if kind == "jsonl":
                stream.write(table.to_json(orient="records", lines=True))
            else:
                quoting: Literal[0, 3] = 3 if kind == "quoted" else 0
                stream.write(
                    table.to_csv(
                        index=False,
                        header=first == 0,
                        lineterminator="\n",
                        quoting=quoting,
                        escapechar="\\" if quoting else None,
                    )
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--kind", choices=("csv", "quoted", "epoch", "jsonl"), default="csv")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    path = given.folder / f"gateway-{given.kind}-{given.rows}.{'jsonl' if given.kind == 'jsonl' else 'csv'}"
    began = time.process_time()
    if not path.exists():
        write_log(path, given.rows, given.kind)
    print(
        f"{path.name}: {path.stat().st_size / 2**20:.0f} MiB, written in {time.process_time() - began:.0f} "
        "CPU s"
    )
    subprocess.run([sys.executable, "-c", READ, str(path)], check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{given.kind}: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
