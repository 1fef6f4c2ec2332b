"""What an SLO obliges, by hand."""

import numpy as np
import pytest

from planner.domain import Limit, Slo
from planner.obliged import obliged
from planner.traces import Trace

# 101 requests in 100 s, 50 tokens out at most; the warm-up is 5 s, so 96 of 101 are measured
TRACE = Trace("t", np.arange(101.0), np.full(101, 10), np.where(np.arange(101) == 7, 50, 5))
MEASURED = 96 / 101


def test_ttft_alone_obliges_prefill() -> None:
    found = obliged(Slo((Limit("ttft", 0.5, 1.0), Limit("ttft", 0.9, 2.0))), TRACE)
    assert found.prefill_frac == pytest.approx(0.9 * MEASURED) and found.prefill_s == 102.0
    assert found.whole_frac == 0.0


def test_ttft_and_tpot_oblige_the_requests_that_keep_both() -> None:
    """At least 0.9 + 0.99 - 1 keep both; the last of them decodes 50 tokens at 0.1 s after 2 s."""
    found = obliged(Slo((Limit("ttft", 0.9, 2.0), Limit("tpot", 0.99, 0.1))), TRACE)
    assert found.whole_frac == pytest.approx(0.89 * MEASURED)
    assert found.whole_s == pytest.approx(100 + 2 + 50 * 0.1)


def test_gaps_oblige_nothing_unless_trusted() -> None:
    slo = Slo((Limit("ttft", 0.9, 2.0), Limit("tbt", 0.99, 0.2)))
    assert obliged(slo, TRACE).whole_frac == 0.0
    assert obliged(slo, TRACE, trust_gaps=True).whole_frac == pytest.approx(0.9 * MEASURED)
    assert obliged(Slo((Limit("tbt", 0.99, 0.2),)), TRACE, trust_gaps=True).prefill_frac == 0.0


def test_attainment_counts_the_longest_gap() -> None:
    slo = Slo((Limit("ttft", 0.5, 2.0), Limit("tbt", 0.5, 0.2)), attainment_frac=0.95)
    assert obliged(slo, TRACE).whole_frac == pytest.approx(0.95 * MEASURED)


def test_e2e_obliges_everything_in_time() -> None:
    found = obliged(Slo((Limit("e2e", 0.99, 30.0),)), TRACE)
    assert found.whole_frac == pytest.approx(0.99 * MEASURED) and found.whole_s == 130.0
    assert found.prefill_frac == pytest.approx(0.99 * MEASURED)
