"""Fits GPU power to Splitwise's measurements; prints its errors by phase, and the figures of
catalogs/power.yaml.

    python benchmarks/power.py perf_model.csv [ml_energy.jsonl]

`perf_model.csv` is data/perf_model.csv of github.com/Mutinifni/splitwise-sim (MIT).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.power_fit import (
    MEASURED_EXPONENT,
    fit_power,
    fit_rows,
    fit_runs,
    held_out,
    held_out_campaigns,
    ml_energy_rows,
    phases,
    splitwise_cells,
)
from planner.documents.catalog import read_catalog


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("perf_model", type=Path)
    parser.add_argument("ml_energy", type=Path, nargs="?")
    asked = parser.parse_args()
    by_phase_of(asked.perf_model)
    if asked.ml_energy is not None:
        measured(asked.ml_energy)


def by_phase_of(path: Path) -> None:
    runs = splitwise_cells(path, read_catalog())
    rows = phases(runs)
    used = fit_rows(rows)
    fitted = fit_power(rows[used])
    floor, compute, memory, top = fitted.coef_
    print(f"floor_frac: {floor:.4f}\nmemory_frac: {memory:.4f}")
    print(f"compute_frac: {compute:.4f}\ntop_frac: {top:.4f}")
    seen = fitted.predict(rows[["compute", "memory"]].to_numpy())
    unseen = held_out(rows)
    flat = rows[used].groupby("phase").frac.mean()
    print("\nmean (largest) relative error in %: rows | seen | unseen (LLM, TP) | one constant per phase")
    for name, chosen in {
        "decode": (rows.phase == "decode").to_numpy(),
        "prefill to 2048 tokens": ((rows.phase == "prefill") & used).to_numpy(),
        "prefill beyond": ((rows.phase == "prefill") & ~used).to_numpy(),
    }.items():
        truth = rows.frac.to_numpy()[chosen]
        constant = rows.phase.map(flat).to_numpy()[chosen]
        errors = [np.abs(p / truth - 1) * 100 for p in (seen[chosen], unseen[chosen], constant)]
        print(
            f"{name:24s} {chosen.sum():3d} " + "  ".join(f"{e.mean():5.1f} ({e.max():3.0f})" for e in errors)
        )
    print("\nby (LLM, TP), unseen: decode, prefill to 2048 tokens")
    error = np.abs(unseen / rows.frac.to_numpy() - 1) * 100
    for group in rows.group.unique():
        inside = (rows.group == group).to_numpy() & used
        by_phase = [
            error[inside & (rows.phase == phase).to_numpy()].mean() for phase in ("decode", "prefill")
        ]
        print(f"{group:18s} {by_phase[0]:5.1f} {by_phase[1]:5.1f}")
    told = fitted.predict(runs[["compute_p", "memory_p"]].to_numpy()) * runs.prefill_share
    told += fitted.predict(runs[["compute_d", "memory_d"]].to_numpy()) * (1 - runs.prefill_share)
    error = (told / runs.mean_frac - 1) * 100
    print("\nmean power of whole runs (prefill and 127 decodes), relative error in %, by share of prefill")
    for low, high in ((0.0, 0.03), (0.03, 0.1), (0.1, 0.25), (0.25, 1.0)):
        chosen = error[(runs.prefill_share > low) & (runs.prefill_share <= high)]
        found = f"mean {chosen.mean():+.1f}, absolute {chosen.abs().mean():.1f}"
        print(f"{low:.0%} to {high:.0%}: {len(chosen)} cells, {found}")


def measured(path: Path) -> None:
    """`measured` of catalogs/power.yaml: one fit per GPU of ML.ENERGY's runs."""
    rows = ml_energy_rows(path, read_catalog())
    print("\nmean relative error in %, seen and with campaigns left out")
    for gpu, runs in rows.groupby("gpu"):
        fitted = fit_runs(runs)
        floor, compute, memory, top = fitted.coef_
        seen, unseen = (
            100 * np.abs(predicted / runs.frac.to_numpy() - 1).mean()
            for predicted in (
                fitted.predict(runs[["compute", "memory"]].to_numpy()),
                held_out_campaigns(runs),
            )
        )
        print(
            f"{gpu}: {{floor_frac: {floor:.4f}, memory_frac: {memory:.4f}, compute_frac: {compute:.4f}, "
            f"compute_exponent: {MEASURED_EXPONENT}, top_frac: {top:.1f}}}  {len(runs)} runs, {seen:.1f}, "
            f"{unseen:.1f}"
        )


if __name__ == "__main__":
    main()
