"""What the comparisons with other simulators share: our results beside those of a peer, for each request."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.domain import Gpu
from planner.errors import InputError, PlannerError
from planner.models.latency import StepLatency
from planner.models.llm import Llm

Array = NDArray[np.float64]
Columns = Mapping[str, Array]  # name of a result -> its value per request
PERCENTILES = (50, 90, 99)

# A fleet must have a GPU and step times, although a simulation with another program's step times uses
# neither.
BARE_GPU = Gpu("bare", 1.0, 1.0, 1.0, "none", 1.0, 1.0, 8, 1.0, "bare", "bare")
NO_STEPS = StepLatency((1.0, 2.0), (1.0, 1.0), 0.0, 0.0, 0.0, 0.0, 0.0, "none: the form of another program")


def bare_llm(kv_bytes_per_token: float) -> Llm:
    """An LLM of which only the bytes of KV per token count."""
    return Llm("bare", 1, 1, 1, 1, 1, 1, 1, 2**62, kv_dtype_bytes=kv_bytes_per_token / 2)


@dataclass(frozen=True)
class Bounds:
    """The largest deviations with which a case agrees; None: printed, but not judged."""

    request_s: float | None  # Of any result of any request.
    percentile_frac: float | None  # Of any percentile, relative.


@dataclass(frozen=True)
class Comparison:
    """Deviations of our results from the peer's: for each column the largest and the 99th percentile over the
    requests [s], and for each metric the relative deviations at PERCENTILES.
    """

    largest: dict[str, float]
    p99: dict[str, float]
    percentiles: dict[str, tuple[float, ...]]

    def keeps(self, bounds: Bounds) -> bool:
        worst_frac = max(abs(frac) for fracs in self.percentiles.values() for frac in fracs)
        return not (
            (bounds.request_s is not None and max(self.largest.values()) > bounds.request_s)
            or (bounds.percentile_frac is not None and worst_frac > bounds.percentile_frac)
        )

    def __str__(self) -> str:
        requests = ", ".join(f"{name} {self.largest[name]:.1e}/{self.p99[name]:.1e}" for name in self.largest)
        percentiles = ", ".join(
            f"{name} {'/'.join(f'{100 * frac:+.4f}' for frac in fracs)}"
            for name, fracs in self.percentiles.items()
        )
        return f"max/P99 deviation in s: {requests}; P50/P90/P99 deviation in %: {percentiles}"


def timed(run: Callable[[], Columns]) -> tuple[Columns, float]:
    """The result of `run`, and its CPU seconds in a second call, when all is compiled."""
    run()
    start = time.process_time()
    return run(), time.process_time() - start


def compare(ours: Columns, theirs: Columns, metrics: Sequence[str]) -> Comparison:
    """Deviations of every column of `theirs`, and of the percentiles of `metrics`.

    A value that only one of the two has counts as an infinite deviation.
    """
    largest, p99 = {}, {}
    for name, values in theirs.items():
        gaps = np.abs(ours[name] - values)
        gaps[np.isnan(ours[name]) & np.isnan(values)] = 0.0
        gaps[np.isnan(gaps)] = np.inf
        largest[name], p99[name] = float(gaps.max()), float(np.percentile(gaps, 99, method="higher"))
    percentiles = {}
    for name in metrics:
        mine, its = np.percentile(ours[name], PERCENTILES), np.percentile(theirs[name], PERCENTILES)
        percentiles[name] = tuple(np.where(np.isnan(mine), np.inf, mine / its - 1.0).tolist())
    return Comparison(largest, p99, percentiles)


def judge(
    name: str,
    ours: Columns,
    theirs: Columns,
    metrics: Sequence[str],
    bounds: Bounds,
    cpu_s: tuple[float, float],
) -> bool:
    """Print the line of a case; True if its bounds are kept. `cpu_s`: ours, the peer's."""
    comparison = compare(ours, theirs, metrics)
    is_kept = comparison.keeps(bounds)
    count = len(next(iter(theirs.values())))
    print(
        f"{'ok  ' if is_kept else 'MISS'} {name}: {count} requests; {comparison}; CPU s {cpu_s[0]:.4f}, ",
        end="",
    )
    print(f"peer {cpu_s[1]:.2f}", flush=True)
    return is_kept


def each_case(directory: Path, run: Callable[[Path], bool | None]) -> int:
    """Run every case of a folder, a JSON file each; the exit code. `run` returns None for what is no case.

    A case that cannot be read, like a folder without one, is an error and never skipped.
    """
    verdicts: list[bool] = []
    if not directory.is_dir():
        print(f"error: {directory}: no such folder", file=sys.stderr)
        return 1
    for path in sorted(directory.glob("*.json")):
        try:
            verdict = run(path)
        except PlannerError as error:
            print(f"error: {error}", file=sys.stderr)
            verdict = False
        if verdict is not None:
            verdicts.append(verdict)
    if not verdicts:
        print(f"error: {directory}: holds no case", file=sys.stderr)
        return 1
    print(f"{sum(verdicts)} of {len(verdicts)} cases agree")
    return 0 if all(verdicts) else 1


def lookup(path: Path, mapping: Any, *keys: str) -> Any:
    """A value deep in a case file; InputError in one line if it is missing."""
    for key in keys:
        if not isinstance(mapping, Mapping) or key not in mapping:
            raise InputError(f"{path}: has no {'.'.join(keys)}")
        mapping = mapping[key]
    return mapping
