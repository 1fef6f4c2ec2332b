"""The kernel, step by step, against vLLM's own scheduler: who is in every step, what is cached, who is
preempted, and when it begins and ends. No model runs: steps take made-up seconds.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from vllm_cases import (
    adapter_case,
    difference,
    is_late,
    kind_of,
    offload_case,
    priority_case,
    random_case,
    simulated,
    vllm_transcripts,
)

from profiling.vllm_install import is_installed

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

CASES = int(os.environ.get("PLANNER_INSTANCES", "25"))  # 200 were run


def test_every_step_of_random_cases() -> None:
    """With and without asynchronous scheduling, prefix caching, preemptions and chunks that are limited."""
    cases = [random_case(seed) for seed in range(CASES)]
    transcripts = vllm_transcripts(cases)
    found = [difference(case, steps) for case, steps in zip(cases, transcripts, strict=True)]
    assert not any(found), "\n".join(filter(None, found[:5]))
    assert min(Counter(map(kind_of, cases)).values()) >= CASES // 20
    assert sum(any(step[4] for step in steps) for steps in transcripts) >= CASES // 4


def test_every_step_of_random_cases_with_adapters() -> None:
    """Whose adapter finds no slot is passed over; blocks are found by requests of the same adapter alone."""
    cases = [adapter_case(seed) for seed in range(CASES)]
    found = [difference(case, steps) for case, steps in zip(cases, vllm_transcripts(cases), strict=True)]
    assert not any(found), "\n".join(filter(None, found[:5]))
    assert sum(map(is_late, cases)) >= CASES // 3


def test_every_step_of_random_cases_by_priority() -> None:
    """Who is preempted, what is left out of a step, and who comes back when."""
    cases = [priority_case(seed) for seed in range(CASES)]
    transcripts = vllm_transcripts(cases)
    found = [difference(case, steps) for case, steps in zip(cases, transcripts, strict=True)]
    assert not any(found), "\n".join(filter(None, found[:5]))
    assert sum(any(step[4] for step in steps) for steps in transcripts) >= CASES // 4


def test_every_step_of_random_cases_with_cpu_memory() -> None:
    """vLLM's OffloadingConnector decides what is kept, found, loaded and passed over. One case in a hundred
    may differ: to vLLM a block that another request stores in the same step is not there yet, nor used.
    """
    cases = [offload_case(seed) for seed in range(CASES)]
    found = [difference(case, steps) for case, steps in zip(cases, vllm_transcripts(cases), strict=True)]
    assert sum(map(bool, found)) <= -(-CASES // 100), "\n".join(filter(None, found))
    reloaded = [simulated(case).reloaded_tokens for case in cases]
    assert sum(one is not None and one.any() for one in reloaded) >= CASES // 3
