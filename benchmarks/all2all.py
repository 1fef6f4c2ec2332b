"""Compares the formulas of planner/models/all2all.py with measurements of DeepEP between nodes.

    python benchmarks/all2all.py

Needs the extra `silicon`: tables of DeepEP on 2, 4 and 8 nodes of 8 H100, DeepSeek-V3's shape. Prints the
mean relative error of the way there and back over all sizes measured, by the kernels and the nodes.
"""

from __future__ import annotations

import argparse

import numpy as np

from planner.documents.catalog import read_catalog
from planner.importers.silicon_nodes import NODES, measured_exchange_ms
from planner.models.all2all import HIGH_THROUGHPUT, LOW_LATENCY, MEASURED_LINK_BYTES_PER_S, all2all_s


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    llm = read_catalog().llm("deepseek-v3")
    for kind in (LOW_LATENCY, HIGH_THROUGHPUT):
        for nodes in NODES:
            measured = measured_exchange_ms("h100_sxm", nodes, kind)
            tokens = np.array(sorted(measured), dtype=float)
            ours_s = all2all_s(llm, kind, nodes, tokens, link_bytes_per_s=MEASURED_LINK_BYTES_PER_S)
            error = np.abs(1e3 * ours_s / np.array([measured[int(n)] for n in tokens]) - 1)
            print(
                f"{kind}, {nodes} nodes, {len(tokens)} sizes to {tokens[-1]:.0f} tokens: "
                f"{100 * error.mean():.0f} %, at most {100 * error.max():.0f} %"
            )


if __name__ == "__main__":
    main()
