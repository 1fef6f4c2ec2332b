"""Vidur's Table 1 (Agrawal et al. 2024, arXiv:2405.05465): its workloads as drawn from published marginals.

    python benchmarks/papers/vidur.py

Chat-1M, Arxiv-4K and BWB-4K are tasks of the catalog; requests of more than 4,096 tokens in all are left out,
as the paper leaves them out. Mean, median and P90 of the paper beside those of 5,000 requests drawn.
"""

from __future__ import annotations

import time

import numpy as np
from common import CATALOG

from planner.documents.described import parse_description
from planner.documents.reading import Section
from planner.traffic.described import draw
from planner.traffic.trace import Trace

WORKLOADS = {"lmsys-chat-4k": "Chat-1M", "summarising-4k": "Arxiv-4K", "translating-4k": "BWB-4K"}
MOST_TOKENS = 4096


def lengths_of(task: str) -> Trace:
    """About 5,000 requests of a task that fit."""
    section = Section.of({"rate": 10, "duration": "500 s", "task": task, "clients": {"count": 1}}, task)
    description = parse_description(section, CATALOG.tasks)
    assert description is not None
    drawn = draw(description, seed=0)
    return drawn.select(np.flatnonzero(drawn.input_tokens + drawn.output_tokens <= MOST_TOKENS))


def main() -> None:
    start = time.process_time()
    print("tokens of prompts and outputs: mean, median, P90 of the paper; of what is drawn")
    for task, name in WORKLOADS.items():
        drawn, row = lengths_of(task), CATALOG.tasks[task]
        for kind, values in (("input", drawn.input_tokens), ("output", drawn.output_tokens)):
            told = [row.values[kind][key] for key in ("mean", "p50", "p90")]
            ours = [values.mean(), *np.quantile(values, (0.5, 0.9))]
            print(f"{name:9} {kind:6} {told} {[round(float(value)) for value in ours]}")
    print(f"{time.process_time() - start:.1f} CPU-s")


if __name__ == "__main__":
    main()
