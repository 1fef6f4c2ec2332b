"""Small questions for the tests of planning, each planned in a fraction of a second."""

from __future__ import annotations

import numpy as np
from plans import CATALOG

from benchmarks.generated_traffic import lognormal, synthesise
from planner.documents.task import PlanQuestion, parse_task
from planner.traffic.trace import Trace

LLM = "meta-llama/Llama-3.1-70B"
DOCUMENT: dict[str, object] = {
    "llm": LLM,
    "slo": {"ttft": {"p90": "1 s"}, "tbt": {"p99": "80 ms"}},
    "fleet": {"gpus": ["a100-80g", "h100-80g"]},
    "safety": "none",
}


def traffic(seed: int = 0, *, requests: int = 500, rate_rps: float = 15.0) -> Trace:
    return synthesise(
        requests,
        rate_rps,
        input_tokens=lognormal(1200, 1.0),
        output_tokens=lognormal(120, 1.0),
        gap_cv=1.5,
        rng=np.random.default_rng(seed),
    )


def question(**changes: object) -> PlanQuestion:
    return parse_task(DOCUMENT | changes, CATALOG)
