"""DistServe's L_m: by hand, and against the paper's own number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import read_fleet
from planner.files.checked_files import to_yaml
from planner.models.foreign_forms import DistServeSteps
from planner.models.latency import StepLatency
from planner.models.saturation import saturating_tokens

CATALOG = read_catalog()


def test_a_constant_and_a_slope_are_saturated_where_the_constant_is_a_twentieth() -> None:
    """19 ms + 1 ms per token: n / (19 + n), at most 65536 / 65555. 0.95 of that is reached at 359:
    359 / 378 = 0.94974 >= 0.95 x 0.99971 = 0.94972; 358 / 377 = 0.94960 is not."""
    latency = StepLatency((0.0, 1e5), (0.019, 100.019), 0.0, 0.0, 0.0, 0.0, 0.0, "by hand")
    assert saturating_tokens(latency) == 359


def test_attention_makes_longer_prompts_slower_so_that_fewer_tokens_saturate() -> None:
    n = np.arange(1.0, 65537)
    rates = n / (0.01 + 1e-4 * n + 1e-7 * n * (n + 1) / 2)
    latency = StepLatency((0.0, 1e5), (0.01, 10.01), 1e-7, 0.0, 0.0, 0.0, 0.0, "by hand")
    found = saturating_tokens(latency)
    assert rates[found - 1] >= 0.95 * rates.max() > rates[found - 2]
    assert found < saturating_tokens(StepLatency((0.0, 1e5), (0.01, 10.01), 0, 0, 0, 0, 0, "by hand"))


def test_distserves_form_has_its_own() -> None:
    """b and c as its fit of OPT-13B on an A100, whatever the formula beside it says."""
    form = DistServeSteps((18.1e-3, 0.1019e-3, 7.12e-9), (0.02, 0, 0), (0.02, 0, 0), 95, 0.0, 0.0, 0.0)
    none = StepLatency((1.0, 2.0), (1.0, 1.0), 0, 0, 0, 0, 0, "not used")
    rate = 1 / (18.1e-3 / 1300 + 0.1019e-3 + 7.12e-9 * 1300)
    found = saturating_tokens(none, form)
    assert found / (18.1e-3 + 0.1019e-3 * found + 7.12e-9 * found**2) >= 0.95 * rate
    assert 600 < found < 1300


def test_a_13b_llm_saturates_an_a100_with_about_512_tokens() -> None:
    """ "processing a single sequence of 512 tokens can fully engage an A100" (section 3.1)."""
    latency = CATALOG.step_latency(CATALOG.llm("opt-13b"), CATALOG.gpu("a100-80g"), 1)
    assert saturating_tokens(latency) == pytest.approx(512, rel=0.15)


@pytest.mark.parametrize(
    ("policies", "worker", "expected"),
    [
        ({"batching": "distserve"}, {}, "L_m"),
        ({"batching": "distserve", "max_num_batched_tokens": 900}, {}, 900),
        ({"batching": "distserve"}, {"max_num_batched_tokens": 700}, 700),
        ({}, {}, 2048),
    ],
)
def test_prefill_batches_of_distserve_are_as_large_as_saturates_unless_said(
    tmp_path: Path, policies: dict[str, object], worker: dict[str, object], expected: object
) -> None:
    document = {
        "llm": "opt-13b",
        "workers": [
            {"name": "pre", "role": "prefill", "gpu": "a100-80g", **worker},
            {"name": "dec", "role": "decode", "gpu": "a100-80g"},
        ],
        "policies": policies,
    }
    (tmp_path / "fleet.yaml").write_text(to_yaml(document))
    prefill, decode = read_fleet(tmp_path / "fleet.yaml", CATALOG).pools
    if expected == "L_m":
        expected = saturating_tokens(prefill.type.latency)
    assert prefill.type.max_num_batched_tokens == expected
    assert decode.type.max_num_batched_tokens == policies.get("max_num_batched_tokens", 2048)
