"""Fits the constants of catalogs/engines.yaml to published runs.

    python benchmarks/engines.py DIR     (DIR as for benchmarks/reality.py)

    host       h0 + h1 D + h2 log2 TP   synchronous vLLM: the median gap between tokens minus the prediction
    of
                                        the step times alone, over ML.ENERGY's runs with D requests in flight
    rest       r0 + r1 D + r2 log2 TP   asynchronous vLLM: the time per token minus the prediction of host and
                                        step times, over inference-perf's stages and LLMServingSim's runs
    front_end  f                        inference-perf's stages: TTFT minus the prediction with all of these

Each fit has the least mean absolute relative error, with coefficients >= 0 and equal weight of campaigns. For
dense LLMs step times are the catalog's sums of kernels, for LLMServingSim's runs the kernels that it measured
on that GPU, and for f all that the catalog has; so errors of other step times do not end up in the constants.
Runs whose GPUs wait for their host, and overloaded stages, are left out by rules that do not depend on our
error. In an open loop D follows from Little's law. Prints the errors on the fitted runs, and the errors on
each campaign (for rest and front end: each LLM) with constants fitted to the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import numpy as np

from benchmarks.reality import Engines, LeftOut, Row, found
from planner.documents.catalog import Catalog, read_catalog
from planner.errors import InputError, PlannerError
from planner.models.engine import HostTime
from planner.models.latency import Array
from planner.models.step_fit import least_absolute


@dataclass(frozen=True, slots=True)
class Points:
    """Measurements and predictions without the constants, one per run [s] (n,), the columns of the formula
    (n, k), and the `group` (n,) of runs that are left out together.
    """

    measured_s: Array
    predicted_s: Array
    columns: Array
    group: Array

    def of(self, chosen: Array) -> Points:
        return Points(*(getattr(self, name)[chosen] for name in self.__slots__))

    def fitted(self) -> Array:
        """The fitted constants (k,). Groups have equal weight, however many runs they have."""
        _, group, runs = np.unique(self.group, return_inverse=True, return_counts=True)
        scale = self.measured_s * runs[group]
        return least_absolute(self.columns, self.measured_s - self.predicted_s, scale=scale)

    def errors(self, constants: Array) -> Array:
        return np.asarray((self.predicted_s + self.columns @ constants) / self.measured_s - 1)

    def unseen_errors(self) -> Array:
        """The errors of each group with constants fitted to the other groups."""
        errors = np.zeros(len(self.group))
        for one in np.unique(self.group):
            errors[self.group == one] = self.of(self.group == one).errors(self.of(self.group != one).fitted())
        return errors


def host_points(folder: Path, catalog: Catalog) -> Points:
    """ML.ENERGY's runs of dense LLMs."""
    in_flight: dict[tuple[str, str], float] = {}
    for path in sorted(folder.rglob("*ml_energy*.jsonl")):
        for line in path.read_text().splitlines():
            run = json.loads(line)
            campaign = f"{run['llm']} {run['task']} {run['num_gpus']} x {run['gpu_model']}"
            in_flight.setdefault((campaign, f"{run['max_num_seqs']} in flight"), run["avg_batch_size"])
    rows = [
        row
        for row in rows_of("ml-energy", folder, Engines(catalog, False), "itl", "p50")
        if (row.run.campaign, row.run.case) in in_flight and not row.run.regime
    ]
    return _points(rows, [in_flight[row.run.campaign, row.run.case] for row in rows], "campaign")


def rest_points(folder: Path, catalog: Catalog) -> Points:
    """inference-perf's stages of dense LLMs, and LLMServingSim's runs; the catalog's engine has no rest."""
    engines = Engines(catalog)
    rows = rows_of("inference-perf", folder, engines, "tpot", "mean")
    e2e_s = {
        row.run: row.measured for row in found(folder, engines, "inference-perf") if _is(row, "e2e", "mean")
    }
    sequences = [float(row.run.case.removesuffix("/s")) * e2e_s[row.run] for row in rows]
    for row in found(folder, engines, "llmservingsim"):
        if _is(row, "tpot", "mean") and row.basis == "import":
            rows.append(row)
            sequences.append(_in_flight(next(folder.rglob(f"{row.run.campaign}.requests.jsonl"))))
    return _points(rows, sequences, "llm")


def _in_flight(log: Path) -> float:
    """The mean number of requests on the engine."""
    requests = [json.loads(line) for line in log.read_text().splitlines()]
    queued_s, last_s = (np.array([one[key] for one in requests]) for key in ("queued_ts", "last_token_ts"))
    return float((last_s - queued_s).sum() / (last_s.max() - queued_s.min()))


def front_end_points(folder: Path, catalog: Catalog) -> Points:
    """inference-perf's stages; the catalog's engine has no front end."""
    rows = rows_of("inference-perf", folder, Engines(catalog), "ttft", "mean", every=True)
    points = _points(rows, np.zeros(len(rows)), "llm")
    return replace(points, columns=points.columns[:, :1])


def rows_of(
    source: str, folder: Path, engines: Engines, quantity: str, statistic: str, *, every: bool = False
) -> list[Row]:
    """The rows of a source with this figure; unless `every`, only those of dense LLMs whose step times are
    sums of kernels.
    """
    rows = [row for row in found(folder, engines, source) if _is(row, quantity, statistic)]
    if not every:
        rows = [row for row in rows if row.basis == "fit" and _is_dense(row, engines)]
    if len({row.run.campaign for row in rows}) < 2:
        raise InputError(f"{folder}: fewer than two campaigns of {source} that could be fitted")
    return rows


def _is(row: Row | LeftOut, quantity: str, statistic: str) -> TypeGuard[Row]:
    return isinstance(row, Row) and (row.quantity, row.statistic) == (quantity, statistic)


def _is_dense(row: Row, engines: Engines) -> bool:
    weights = "" if row.run.load is None else row.run.load.weights
    return engines.fleet(row.run, {}, weights=weights).llm.experts == 1


def _points(rows: Sequence[Row], sequences: Sequence[float] | Array, group: str) -> Points:
    tp = np.array([row.run.tp for row in rows], dtype=float)
    return Points(
        np.array([row.measured for row in rows]),
        np.array([row.predicted for row in rows]),
        np.column_stack([np.ones(len(rows)), np.asarray(sequences, dtype=float), np.log2(tp)]),
        np.array([getattr(row.run, group) for row in rows]),
    )


def with_engine(catalog: Catalog, host: HostTime, rest: HostTime, front_end_s: float) -> Catalog:
    """The catalog with these constants for every version that schedules asynchronously."""
    engines = {
        name: replace(row, host=host, rest=rest, front_end_s=front_end_s) if row.async_scheduling else row
        for name, row in catalog.engines.items()
    }
    return replace(catalog, engines=engines)


def said(name: str, constants: Sequence[str], points: Points) -> str:
    """The constants of one quantity, and their errors."""
    seen, unseen = points.errors(points.fitted()), points.unseen_errors()
    groups = len(np.unique(points.group))
    lines = [
        f"{name}: {', '.join(constants)}",
        f"  {len(points.group)} runs, {groups} groups: error {_error(seen)}, unseen {_error(unseen)}",
    ]
    for one in np.unique(points.group):
        lines.append(f"    {one}: unseen {_error(unseen[points.group == one])}")
    return "\n".join(lines) + "\n"


def _error(errors: Array) -> str:
    return f"{100 * np.abs(errors).mean():.1f} % (bias {100 * errors.mean():+.1f} %)"


def _written(host: HostTime) -> list[str]:
    return [
        f"step {1e3 * host.step_s:.2f} ms",
        f"sequence {1e6 * host.sequence_s:.1f} us",
        f"log2_tp {1e3 * host.log2_tp_s:.2f} ms",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fit the constants of catalogs/engines.yaml.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    args = parser.parse_args(arguments)
    try:
        catalog = read_catalog()
        points = host_points(args.folder, catalog)
        host = HostTime(*points.fitted().tolist())
        sys.stdout.write(said("host", _written(host), points))
        catalog = with_engine(catalog, host, HostTime(), 0.0)
        points = rest_points(args.folder, catalog)
        rest = HostTime(*points.fitted().tolist())
        sys.stdout.write(said("rest", _written(rest), points))
        points = front_end_points(args.folder, with_engine(catalog, host, rest, 0.0))
        front_end_s = float(points.fitted()[0])
        sys.stdout.write(said("front_end", [f"{1e3 * front_end_s:.1f} ms"], points))
    except PlannerError as error:
        sys.stderr.write(f"benchmarks/engines.py: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
