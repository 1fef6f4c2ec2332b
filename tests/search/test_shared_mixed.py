"""Several LLMs whose fleets fit together only where one has workers of several types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import fleetplan

NAME = "meta-llama/Llama-3.1-8B"


@pytest.mark.long
@pytest.mark.parametrize("safety", ["none", {"kept_in": 0.9}], ids=["on paper", "production"])
def test_an_llm_takes_the_worker_that_the_other_leaves(safety: Any) -> None:
    """Nine prompts of 2,000 tokens a second are too many for one A100; two carry them, or one and an L40S. Of
    three A100 and one L40S each LLM gets two workers: all four GPUs, 3 x 2 and 1 USD/h. A link of 1 MB/s
    rules out hand-offs.
    """
    traffic = pd.DataFrame({"arrival_s": np.arange(120) / 9, "input_tokens": 2000, "output_tokens": 40})
    entry = {"llm": NAME, "slo": {"ttft": {"p90": "1 s"}}, "trace": traffic}
    found = fleetplan.plan(
        {
            "llms": {"chat": entry, "code": entry},
            "fleet": {
                "gpus": {"a100-80g": 3, "l40s-48g": 1},
                "prices": {"a100-80g": "2 usd/h", "l40s-48g": "1 usd/h"},
                "sold_as": {"a100-80g": "gpu", "l40s-48g": "gpu"},
                "max_num_batched_tokens": [2048],
                "network": {"bandwidth": "0.001 GB/s"},
            },
            "safety": safety,
        }
    )
    assert found.cost_usd_per_h == pytest.approx(7.0)
    assert sorted(pool.type.gpu.name for fleet in found.fleets.values() for pool in fleet.pools) == [
        "a100-80g",
        "a100-80g",
        "l40s-48g",
    ]
