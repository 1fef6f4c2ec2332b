"""vLLM's metrics per window: counts by hand, several LLMs, prefill and decode engines."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import InputError
from planner.importers.prometheus_range import PrometheusSeries
from planner.importers.vllm_metrics import live_traffic

T = np.array([0.0, 60.0, 120.0])


def series(name: str, values: list[float], **labels: str) -> PrometheusSeries:
    named = {"model_name": "m", "instance": "a"} | labels
    return PrometheusSeries(f"vllm:{name}", tuple(sorted(named.items())), T, np.array(values))


def engine(instance: str, done: list[float], output: list[float], **labels: str) -> list[PrometheusSeries]:
    labels = {"instance": instance} | labels
    return [
        series("request_success_total", done, **labels),
        series("request_prompt_tokens_sum", [100 * n for n in done], **labels),
        series("request_generation_tokens_sum", output, **labels),
        series("request_generation_tokens_count", done, **labels),
        series("time_to_first_token_seconds_bucket", done, le="1.0", **labels),
        series("time_to_first_token_seconds_bucket", done, le="+Inf", **labels),
    ]


def test_arrivals_are_ends_and_what_is_in_flight_more() -> None:
    """6 and 4 finished; 3 more in flight at 60 s, of which 2 waited, and none at 120 s: 9 and 1 arrived."""
    rows = [
        *engine("a", [0, 6, 10], [0, 60, 100]),
        series("num_requests_running", [0, 1, 0]),
        series("num_requests_waiting", [0, 2, 0]),
        series("prefix_cache_queries_total", [0, 600, 1000]),
        series("prefix_cache_hits_total", [0, 300, 400]),
    ]
    found = live_traffic(rows)
    assert found.finished.tolist() == [6, 4]
    assert found.arrived.tolist() == [9, 1]
    assert found.input_tokens.tolist() == [600, 400]
    assert (found.hit_tokens / found.queried_tokens).tolist() == [0.5, 0.25]
    assert found.latency["ttft"].counts.tolist() == [[6, 0], [4, 0]]
    assert np.isnan(found.kv_use_frac).all()
    assert (found.model, found.instances, found.windows) == ("m", 1, 2)


def test_cache_use_is_the_mean_over_workers_that_were_there() -> None:
    """Full to 80 % from its start at 30 s: 0.8 in the first window too, where it was there for half."""
    name = "kv_cache_usage_perc"
    late = PrometheusSeries(
        f"vllm:{name}",
        (("instance", "a"), ("model_name", "m")),
        np.array([30.0, 60.0, 120.0]),
        np.full(3, 0.8),
    )
    found = live_traffic([*engine("a", [0, 6, 10], [0, 60, 100]), late])
    assert found.kv_use_frac.tolist() == pytest.approx([0.8, 0.8])


def test_prefill_engines_count_for_the_first_token_alone() -> None:
    rows = [*engine("prefill", [0, 6, 10], [0, 6, 10]), *engine("decode", [0, 5, 9], [0, 50, 90])]
    both, split = live_traffic(rows), live_traffic(rows, is_disaggregated=True)
    assert both.finished.tolist() == [11, 8]
    assert split.finished.tolist() == [5, 4]
    assert split.latency["ttft"].total.tolist() == [6, 4]


def test_one_of_several_llms_is_named() -> None:
    rows = [*engine("a", [0, 6, 10], [0, 60, 100]), *engine("b", [0, 1, 2], [0, 1, 2], model_name="other")]
    assert live_traffic(rows, model="other").finished.tolist() == [1, 1]
    with pytest.raises(InputError, match="name one with --model"):
        live_traffic(rows)
    with pytest.raises(InputError, match="none of them 'third'"):
        live_traffic(rows, model="third")


def test_what_is_missing_is_said() -> None:
    with pytest.raises(InputError, match="request_success_total is missing"):
        live_traffic([series("num_requests_running", [0, 1, 2])])
    with pytest.raises(InputError, match="no whole window of 600 s"):
        live_traffic(engine("a", [0, 6, 10], [0, 60, 100]), every_s=600.0)
