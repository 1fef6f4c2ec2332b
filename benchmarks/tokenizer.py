"""Estimates how much of the TTFT of silicon-sample is the tokeniser's; docs/evidence/accuracy.md has the
table.

    python benchmarks/tokenizer.py [--token-us 5] [--clients 16] [--only REGEX]

Needs the extra `silicon`. Simulates InferenceX's points of vLLM with at most --clients clients, as reality.py
does, and adds --token-us microseconds per token of the prompt to every predicted TTFT: the time of a
tokeniser on one thread before the engine gets a request. Waiting for the tokeniser is not counted. Prints the
mean absolute error and the mean error of each LLM, GPU and format, without and with this time.
"""

from __future__ import annotations

import argparse
import csv
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.reality import Engines, Row, _wheel, silicon_sample
from planner.documents.catalog import read_catalog

SOURCE = "InferenceX"
SENT_FRAC = 0.9  # Mean length as a share of the nominal one; lengths are drawn from 0.8 to 1 of it.


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--token-us", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if (wheel := _wheel()) is None:
        raise SystemExit("needs pip install 'fleetplan[silicon]'")
    lines = (wheel / "systems" / "silicon_sample.csv").read_text().splitlines()
    points = {
        point["id"]: point
        for line, point in zip(lines[1:], csv.DictReader(lines), strict=True)
        if float(point["batch_size"] or 0) <= args.clients and re.search(args.only, line)
    }
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        chosen = Path(folder, "sample.csv")
        with chosen.open("w") as file:
            writer = csv.DictWriter(file, lines[0].split(","))
            writer.writeheader()
            writer.writerows(points.values())
        for row in silicon_sample(chosen, Engines(read_catalog())):
            if not isinstance(row, Row) or row.quantity != "ttft" or SOURCE not in row.run.campaign:
                continue
            tokens = SENT_FRAC * float(points[row.run.case]["isl"])
            later_s = row.predicted + 1e-6 * args.token_us * tokens
            errors[row.run.campaign].append((row.error_frac, later_s / row.measured - 1))
    for campaign, found in sorted(errors.items()):
        told = [f"{np.abs(each).mean():.0%} ({each.mean():+.0%})" for each in np.array(found).T]
        print(f"{campaign.removeprefix(f'{SOURCE}, ')}: {len(found)} points, {told[0]} -> {told[1]}")
    without, with_it = np.mean([np.abs(found).mean(axis=0) for found in errors.values()], axis=0)
    print(f"mean of campaigns: {without:.1%} -> {with_it:.1%}")


if __name__ == "__main__":
    main()
