"""What an answer must not leave out: rejected requests, types that are too small, what was estimated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from plans import a_plan, mixed
from simulations import make_trace

from planner.api.simulating import simulate
from planner.commands.first_screen import print_first_screen
from planner.documents.facts import GpusConsidered, OfTraffic, PrefixesUncounted, Refuted, RequestTooLong
from planner.fleet import Policies
from planner.manifests import services_apart
from planner.reports.fact_sentences import fact_sentence
from planner.reports.words import level0_line
from planner.search.evidence.findings import uncounted_prefix_warnings

FLEET = {"llm": "llama-3.1-8b", "workers": [{"gpu": "h100-80g", "count": 1, "kv_tokens": 1024}]}


def test_a_fleet_that_rejects_requests_never_keeps_the_slo() -> None:
    """One of 40 prompts is longer than the cache: p50 holds by far, and the promise does not."""
    lengths = [2000 if i == 20 else 100 for i in range(40)]
    trace = pd.DataFrame({"arrival_s": np.arange(40) * 1.0, "input_tokens": lengths, "output_tokens": 3})
    found = simulate(FLEET, trace, {"ttft": {"p50": "2 s"}})
    assert found.outcome.verdict is not None and found.outcome.verdict.lines[0].holds
    assert found.holds is False and "MISSES" in found.headline()
    assert found.sentences()[0] == (
        "1 of 40 requests are rejected and miss every limit: the longest has 2,003 tokens, and the KV memory "
        "of the largest worker holds 1,024"
    )


def test_what_is_exact_names_the_types_that_were_too_small() -> None:
    plan = a_plan(mixed("h100-80g", 1, 1))
    small = Refuted("l4-24g tp1 2048", RequestTooLong(9_000, 20_000))
    certificate = replace(
        plan.certificate, refuted=(small,), level0_exact=True, level0=1.0, bound=0.5, cheaper=3
    )
    said = level0_line(certificate)
    assert "exactly: " in said
    assert said.endswith(
        "(without those whose KV cache is too small for the longest request: "
        "l4-24g tp1 with 2048 tokens per step)"
    )
    assert "too small" not in level0_line(replace(certificate, refuted=()))
    # All fleets of the plan's policies were simulated, so "the others" are none of these.
    some = replace(certificate, level0_exact=False, level0_exhausted=True, cheaper_simulated=3)
    assert "all 3 cheaper" in level0_line(some) and "; fleets under other policies were" in level0_line(some)
    assert "; the others were" in level0_line(replace(some, cheaper_simulated=2))


def test_any_gpu_is_said_to_be_measured_or_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    plan = a_plan(mixed("h100-80g", 1, 1))
    considered = GpusConsidered(("h100-80g",), ("h100-pcie-80g",))
    certificate = replace(plan.certificate, assumptions=(considered,))
    warned = replace(plan, certificate=certificate, warnings=(OfTraffic("slo: ttft p100 is the slowest"),))
    print_first_screen(warned)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "step times of measured kernels: h100-80g; of a roofline: h100-pcie-80g" in said
        and "ttft p100 is the slowest" in said
    )


def test_block_ids_that_are_not_counted_are_a_warning() -> None:
    """Three prompts of two blocks, the first of which is everybody's: 2 of 6 were there before."""
    trace = make_trace(np.arange(3.0), np.full(3, 32), np.full(3, 2))
    trace = replace(
        trace,
        prefix_offsets=np.array([0, 2, 4, 6]),
        prefix_ids=np.array([0, 1, 0, 2, 0, 3]),
        prefix_block_tokens=16,
    )
    (warned,) = uncounted_prefix_warnings(Policies(), trace)
    assert isinstance(warned, PrefixesUncounted) and warned.alike_frac == pytest.approx(1 / 3)
    assert "prefix_cache: true" in fact_sentence(warned)
    assert uncounted_prefix_warnings(Policies(prefix_cache=True), trace) == ()


def test_kserve_has_a_service_for_each_kind_of_worker() -> None:
    one, other = mixed("h100-80g", 1, 1), mixed("a100-80g", 1, 1)
    both = replace(one, pools=(*one.pools, *(replace(pool, name="b") for pool in other.pools)))
    assert (services_apart(one, "kserve"), services_apart(both, "kserve")) == (1, 2)
    assert services_apart(both, "kubernetes") == 1
