"""The metrics that autoscalers ask for, and the flag by which workers drain, in the installed vLLM."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from planner.day.autoscaling import prometheus_queries

pytest.importorskip("vllm")


def test_vllm_exports_what_is_asked_for() -> None:
    """By their names in its source; prometheus_client puts _total behind those of counters."""
    from vllm.v1.metrics import loggers

    source = inspect.getsource(loggers)
    for metric in prometheus_queries.METRICS.values():
        for series in metric.series:
            assert f'name="{series}"' in source
    for counter in (
        prometheus_queries.ENDED,
        prometheus_queries.PROMPT_TOKENS,
        prometheus_queries.OUTPUT_TOKENS,
    ):
        assert f'name="{counter.removesuffix("_total")}"' in source
    assert f'name="{prometheus_queries.FIRST_TOKENS.removesuffix("_count")}"' in source


def test_vllm_drains_by_the_flag() -> None:
    from vllm.engine.arg_utils import EngineArgs

    assert "shutdown_timeout" in {field.name for field in dataclasses.fields(EngineArgs)}
