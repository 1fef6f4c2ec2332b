"""Where a limit on the process is too low for the plan or its report: one line, and what was found."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

TRACE = "timestamp,input_tokens,output_tokens\n" + "".join(
    f"{i / 20},{200 + 10 * (i % 70)},{20 + i % 50}\n" for i in range(4000)
)
SLO = """llm: llama-3.1-8b
slo: {ttft: {p90: 2 s}, tbt: {p99: 200 ms}}
fleet: {gpus: {h100-80g: 20, a100-80g: 20, l40s-48g: 20}}
"""
FROM_TRACEBACKS = ("Traceback", "panicked", "Error:", "vl_convert.abi3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "most"),
    [
        (resource.RLIMIT_NOFILE, 16),
        (resource.RLIMIT_AS, 2_000_000 * 1024),
        (resource.RLIMIT_AS, 1_000_000 * 1024),
    ],
    ids=["16 files", "2 GB", "1 GB"],
)
def test_a_limit_of_the_process_ends_in_one_line_with_what_was_found(
    tmp_path: Path, limit: int, most: int
) -> None:
    """The plan without its report, or the best fleet so far: how far it comes is up to the machine."""
    (tmp_path / "slo.yaml").write_text(SLO)
    (tmp_path / "trace.csv").write_text(TRACE)
    line = ["--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "fleetplan", *line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(limit, (most, most)),
    )
    assert done.returncode == 1, done.stderr
    assert not any(each in done.stderr for each in FROM_TRACEBACKS), done.stderr
    last = done.stderr.splitlines()[-1]
    is_plan = "the plan is written, its report is not" in last
    assert is_plan or "does not give enough" in last, done.stderr
    assert (tmp_path / "out" / ("plan.yaml" if is_plan else "best-so-far.yaml")).exists()
