"""The goodput of a fleet under SLOs of every form, held against simulations at the rates that it names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import fleetplan
from planner.papers import goodput

FLEET = {"llm": "meta-llama/Llama-3.1-8B", "workers": [{"gpu": "a100-80g"}]}
CHAT_AND_CODE = {
    "chat": {"match": {"tenant": "chat"}, "ttft": {"p90": "800 ms"}, "tbt": {"p99": "60 ms"}},
    "code": {"match": {"tenant": "code"}, "e2e": {"p90": "12 s"}},
}


def traffic() -> pd.DataFrame:
    """Two minutes of two tenants; prompts of `code` are ten times as long."""
    rng = np.random.default_rng(0)
    is_code = rng.random(240) < 0.4
    return pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(0.5, 240)),
            "input_tokens": np.where(is_code, 4000, 400),
            "output_tokens": rng.integers(2, 200, 240),
            "tenant": np.where(is_code, "code", "chat"),
        }
    )


@pytest.mark.parametrize(
    "slo",
    [
        {"ttft": {"p90": "1 s"}, "tbt": {"p99": "60 ms"}},
        {"ttft": {"p90": "1 s"}, "tbt": {"p99": "60 ms"}, "every": "1 min"},
        {"classes": CHAT_AND_CODE},
        {"classes": CHAT_AND_CODE, "every": "1 min"},
        {"ttft": {"p90": "2 s"}, "attainment": 0.95},
    ],
    ids=["limits", "windows", "classes", "windows of classes", "attainment"],
)
def test_goodput_says_what_a_simulation_at_its_rate_says(slo: dict[str, Any]) -> None:
    """The rate holds, the next fails, and each limit's value is that of its class, in the worst window."""
    found = fleetplan.goodput(FLEET, traffic(), slo, seeds=1, tolerance_frac=0.2)
    run = fleetplan.simulate(FLEET, traffic(), slo, rate=found.rate_rps)
    verdict = run.outcome.verdict
    assert run.holds and verdict is not None
    assert not fleetplan.simulate(FLEET, traffic(), slo, rate=found.fails_rps).holds
    values = {line.limit.name: line.deciding_s for line in verdict.lines}
    assert {row["limit"]: row["simulated_s"] for row in found.to_dict()["slo"]} == values


def test_what_no_rate_keeps_is_named() -> None:
    """Half the requests keep a limit that the long prompts of the others miss."""
    slo = {"ttft": {"p50": "200 ms"}, "attainment": 0.99}
    with pytest.raises(fleetplan.InfeasibleError, match=r"% of requests keep all limits at once") as error:
        fleetplan.goodput(FLEET, traffic(), slo, seeds=1, tolerance_frac=0.2)
    assert error.value.constraint == "attainment"


def test_a_rate_that_is_kept_above_one_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bisection ended at 2 requests/s: it took for granted that nothing above one that fails is kept."""

    def kept_above(island_rps: float) -> float | None:
        """What is said to be kept, of a fleet that carries less than 2 requests/s, and more than these up to
        a tenth more.
        """
        monkeypatch.setattr(
            goodput.Steady,
            "carries",
            lambda self, fleet, rate: rate < 2 or island_rps < rate < 1.1 * island_rps,
        )
        found = fleetplan.goodput(FLEET, traffic(), {"ttft": {"p90": "1 s"}}, seeds=1, tolerance_frac=0.05)
        assert found.rate_rps < 2 <= found.fails_rps < 2.1
        kept_rps: float | None = found.to_dict()["kept_above_rps"]
        said = any("are kept all the same" in line for line in found.sentences())
        assert said == (kept_rps is not None)
        return kept_rps

    kept_rps = kept_above(3.15)
    assert kept_rps is not None and 3.15 < kept_rps < 3.465
    assert kept_above(9.0) is None
