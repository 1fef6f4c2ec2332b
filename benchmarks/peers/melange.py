"""Compares our allocation with answers of Mélange's ILP and of two variants, on a folder of instances.

    python benchmarks/peers/melange.py DIR [--slices SECONDS]

Each *.json holds `input` (Mélange's configuration, and `availability` per GPU type), `melange_cbc` (its own
ILP under CBC), `highs_equivalent_int` (identical slices merged) and `highs_continuous_split` (any split), all
with a `cost`. Ours splits freely and must not cost more than the continuous split. With --slices it keeps to
the instance's slice factor, at most that many seconds each, and must not cost more than the better of the
other two. Every answer's constraints are recomputed here. Exit code 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.documents.allocation_file import parse_instance
from planner.solvers.allocation import Allocation, AllocationInstance, allocate

TOLERANCE = 1e-6  # Constraints and costs may be off by so much, as solvers round.


def broken(asked: AllocationInstance, found: Allocation) -> str | None:
    """The first constraint that an answer does not keep."""
    busy, counts = asked.rate_rps > 0, np.array(found.counts)
    share, k = found.share[busy], asked.sustained_rps[busy]
    if (share < 0).any() or np.abs(share.sum(axis=1) - 1).max() > TOLERANCE:
        return "served"
    if (share[k == 0] > 0).any():
        return "cannot serve"
    load = np.divide(asked.rate_rps[busy, None] * share, k, out=np.zeros_like(k), where=k > 0).sum(axis=0)
    if (load > counts + TOLERANCE).any():
        return "capacity"
    if any(s is not None and n > s for n, s in zip(found.counts, asked.stock, strict=True)):
        return "stock"
    if (
        asked.slice_factor
        and np.abs(np.rint(share * asked.slice_factor) / asked.slice_factor - share).max() > 0
    ):
        return "slices"
    if abs(counts @ asked.price_usd_per_h - found.cost_usd_per_h) > TOLERANCE:
        return "cost"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--slices", type=float, metavar="SECONDS", help="keep to whole slices, so long each")
    options = parser.parse_args()
    cases = sorted(options.dir.glob("*.json"))
    if not cases:
        parser.error(f"{options.dir}: holds no *.json")
    print(f"{'case':36} {'CBC':>9} {'merged':>9} {'split':>9} {'ours':>9} {'bound':>9} {'CPU s':>7}")
    total_s, failures, proven = 0.0, 0, 0
    for path in cases:
        case = json.loads(path.read_text())
        costs = [
            case[key]["cost"] for key in ("melange_cbc", "highs_equivalent_int", "highs_continuous_split")
        ]
        start_s = time.process_time()
        asked = parse_instance(case["input"])
        if not options.slices:
            asked = replace(asked, slice_factor=None)
        found = allocate(asked, time_limit_s=options.slices or 60.0)
        cpu_s = time.process_time() - start_s
        total_s, proven = total_s + cpu_s, proven + found.is_optimal
        allowed = min(costs[:2]) if options.slices else costs[2]
        problem = broken(asked, found)
        if problem is None and found.cost_usd_per_h > allowed * (1 + 1e-9):
            problem = "costs more"
        failures += problem is not None
        numbers = " ".join(f"{cost:9.4f}" for cost in (*costs, found.cost_usd_per_h, found.bound_usd_per_h))
        print(f"{path.stem:36} {numbers} {cpu_s:7.3f} {problem or ''}")
    print(f"{len(cases)} cases, {proven} proven cheapest, {failures} failed, {total_s:.2f} CPU-s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
