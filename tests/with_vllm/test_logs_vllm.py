"""The lines and names that planner/traffic/logs reads, as the installed vLLM writes them."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from planner.traffic.logs import otlp
from planner.traffic.trace_reading import read_trace

pytest.importorskip("vllm")


def test_lines_of_its_request_logger_are_read(tmp_path: Path) -> None:
    """Three chats of 4, 5 and 6 tokens with answers of 2, one of them streamed a token at a time."""
    from vllm import logger as loggers
    from vllm.entrypoints.serve.utils import request_logger
    from vllm.logging_utils import NewLineFormatter
    from vllm.sampling_params import SamplingParams

    written = io.StringIO()
    handler = logging.StreamHandler(written)
    form = loggers._FORMAT.replace("%(vllm_process_name)s", "APIServer").replace(
        "%(fileinfo)s", "%(filename)s"
    )
    handler.setFormatter(NewLineFormatter(form, datefmt=loggers._DATE_FORMAT))
    target = request_logger.logger
    before = target.level
    target.addHandler(handler)
    target.setLevel(logging.DEBUG)
    try:
        log = request_logger.RequestLogger(max_log_len=None)
        for k in range(3):
            name, ids = f"chatcmpl-{k}", list(range(4 + k))
            log.log_inputs(name, "a [1, 2] b", ids, None, SamplingParams(max_tokens=9), None)
            if k < 2:
                log.log_outputs(name, "x y", [7, 8], "stop")
                continue
            for token in (7, 8):
                log.log_outputs(name, "x", [token], None, is_streaming=True, delta=True)
            log.log_outputs(name, "x y", None, "streaming_complete", is_streaming=True)
    finally:
        target.removeHandler(handler)
        target.setLevel(before)
    (tmp_path / "vllm.log").write_text(written.getvalue())
    trace = read_trace(tmp_path / "vllm.log", seed=None)
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([4, 5, 6], [2, 2, 2])


def test_attributes_of_its_spans_are_known() -> None:
    from vllm.tracing import SpanAttributes

    known = {key for keys in otlp._ATTRIBUTES_BY_COLUMN.values() for key in keys}
    assert SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS in known
    assert SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS in known
    assert SpanAttributes.GEN_AI_RESPONSE_MODEL in known
    assert SpanAttributes.GEN_AI_REQUEST_ID == "gen_ai.request.id"
