"""What an SLO obliges, by hand."""

import numpy as np
import pytest

from planner.domain import Limit, Slo
from planner.solvers.required_work import (
    compute_slo_work,
    find_backlog_deadlines,
    find_due_requests,
    guess_slo_work,
)
from planner.traffic.trace import Trace

# 101 requests in 100 s, 50 tokens out at most; the warm-up is 5 s, so 96 of 101 are measured
TRACE = Trace("t", np.arange(101.0), np.full(101, 10), np.where(np.arange(101) == 7, 50, 5))
MEASURED = 96 / 101


def test_ttft_alone_obliges_prefill() -> None:
    found = compute_slo_work(Slo((Limit("ttft", 0.5, 1.0), Limit("ttft", 0.9, 2.0))), TRACE)
    assert found.prefill_frac == pytest.approx(0.9 * MEASURED) and found.prefill_s == 102.0
    assert found.whole_frac == 0.0


def test_ttft_and_tpot_oblige_the_requests_that_keep_both() -> None:
    """At least 0.9 + 0.99 - 1 keep both; the last of them decodes 50 tokens at 0.1 s after 2 s."""
    found = compute_slo_work(Slo((Limit("ttft", 0.9, 2.0), Limit("tpot", 0.99, 0.1))), TRACE)
    assert found.whole_frac == pytest.approx(0.89 * MEASURED)
    assert found.whole_s == pytest.approx(100 + 2 + 50 * 0.1)


def test_gaps_oblige_nothing_and_are_but_a_guess() -> None:
    slo = Slo((Limit("ttft", 0.9, 2.0), Limit("tbt", 0.99, 0.2)))
    assert compute_slo_work(slo, TRACE).whole_frac == 0.0
    assert guess_slo_work(slo, TRACE).whole_frac == pytest.approx(0.9 * MEASURED)
    assert guess_slo_work(Slo((Limit("tbt", 0.99, 0.2),)), TRACE).prefill_frac == 0.0


def test_the_backlog_test_obliges_half_of_the_last_tenth() -> None:
    """The window is 5 to 100 s, its last tenth begins at 90.5 s: 91 to 100 arrive there, five must be steady.

    Each token of theirs within the loosest TTFT of the one before: of 50 the last after 102 s at most.
    """
    found = find_backlog_deadlines(Slo((Limit("ttft", 0.5, 1.0), Limit("ttft", 0.9, 2.0))), TRACE)
    assert found is not None and found.window_s == (90.5, 100.0)
    those = find_due_requests(found, TRACE, whole=True)
    assert those.index.tolist() == list(range(91, 101)) and those.most_late == 5
    assert found.due_s(np.array([50])) == pytest.approx([102.0])
    patient = find_backlog_deadlines(Slo((Limit("tbt", 0.99, 0.2),)), TRACE)
    assert patient is not None and patient.prefill_s == patient.gap_s == 60.0


def test_attainment_counts_the_longest_gap() -> None:
    slo = Slo((Limit("ttft", 0.5, 2.0), Limit("tbt", 0.5, 0.2)), attainment_frac=0.95)
    assert compute_slo_work(slo, TRACE).whole_frac == pytest.approx(0.95 * MEASURED)


def test_e2e_obliges_everything_in_time() -> None:
    found = compute_slo_work(Slo((Limit("e2e", 0.99, 30.0),)), TRACE)
    assert found.whole_frac == pytest.approx(0.99 * MEASURED) and found.whole_s == 130.0
    assert found.prefill_frac == pytest.approx(0.99 * MEASURED)
