"""benchmarks/gpu without a GPU: a planted profile is fitted, planned, replayed into an engine that keeps the
planted time, and compared."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import acceptance, replay
from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import read_fleet
from planner.models.latency import StepLatency
from planner.models.step_tables import COLUMNS
from planner.runtime.engine_log import read_step_logs
from planner.runtime.fake_engine import FakeEngine, _EngineRequest
from planner.runtime.step_log import StepLog, hook_core
from profiling import design
from profiling.design import StepLimits

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm" / "config.json"
LIMITS = StepLimits(step_tokens=512, sequences=32, context_tokens=2048, kv_tokens=64_000, block_tokens=16)
TRUTH = StepLatency(
    knots_tokens=(1, 64, 512),
    f_s=(0.004, 0.005, 0.03),
    a_s=2e-9,
    b_s=1e-5,
    d_s=4e-8,
    e_s=1e-4,
    h_s=0.0,
    basis="planted",
)
ABOUT = {
    "llm": str(TINY),
    "gpu": "h100-80g",
    "tp": "1",
    "engine": "vllm",
    "device": "H100",
    "driver": "580",
    "limits": "512 tokens and 32 sequences per step, 2048 of context",
    "kv_cache": "64000 tokens in blocks of 16",
}


def prepared(out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    """One run of 3 s at 70 % of the capacity for prompts of 200 to 400 tokens and answers of 5 to 15."""
    steps = design.start_design(LIMITS, 60, 0)
    new, cached, context = (
        np.array([getattr(s, name) for s in steps]) for name in ("new", "cached", "context")
    )
    prompts, decodes = (np.array([getattr(s, name) for s in steps]) for name in ("prompts", "decodes"))
    pairs = prompts * new * (cached + (new + 1) / 2)
    t_s = TRUTH.step_s(prompts * new + decodes, pairs, decodes, decodes * context, prompts)
    rows = np.column_stack(
        [prompts, prompts * new, prompts * cached, pairs, decodes, decodes * context, t_s, 0.1 * t_s]
    )
    out.mkdir()
    lines = [f"# {key}: {value}" for key, value in ABOUT.items()] + [",".join((*COLUMNS, "host_s"))]
    lines += [",".join(f"{value:.9g}" for value in row) for row in rows]
    (out / "table.csv").write_text("\n".join(lines) + "\n")
    rng = np.random.default_rng(0)
    lengths = zip(rng.integers(200, 400, 300), rng.integers(5, 15, 300), strict=True)
    trace = ["arrival_s,input_tokens,output_tokens", *(f"{k},{i},{o}" for k, (i, o) in enumerate(lengths))]
    (out / "lengths.csv").write_text("\n".join(trace) + "\n")
    (out / "asked.yaml").write_text(f"llm: {TINY}\nslo:\n  ttft: {{p90: 500 ms}}\n  tbt: {{p99: 60 ms}}\n")
    monkeypatch.setattr(acceptance, "LOADS", {"conversation": (0.7,)})
    acceptance.main(
        [
            "prepare",
            str(out),
            "--config",
            str(TINY),
            "--slo",
            str(out / "asked.yaml"),
            "--conversation",
            str(out / "lengths.csv"),
            "--seconds",
            "3",
            "--seeds",
            "1",
            *options,
        ]
    )
    found: dict[str, Any] = json.loads((out / "replay.json").read_text())
    return found


async def replayed(out: Path, runs: dict[str, Any]) -> None:
    log = out / "steps.jsonl"
    steps = StepLog(log)
    steps.begin("0.26.0", async_scheduling=False)
    engine = FakeEngine(TRUTH, kv_tokens=64_000, max_num_seqs=32, max_num_batched_tokens=512, log=steps)
    loop = asyncio.ensure_future(engine.run())
    try:
        await replay.replay_all(engine, out, runs, log)
    finally:
        loop.cancel()
        steps.close()


async def generated(engine: FakeEngine, name: str, ids: list[int], tokens: int) -> tuple[list[float], str]:
    request, token_s = _EngineRequest(name, len(ids), tokens, False), []
    engine.add(request)
    while await request.tokens.get() is not None:
        token_s.append(time.monotonic())
    return token_s, ""


@pytest.mark.slow
def test_what_is_prepared_replays_and_compares_with_what_was_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine keeps the time that the fit was made from, so every request ends and the median E2E is the
    predicted one (within 20 %, for machines on which this process waits). A run cut off before its steps were
    kept starts over; one that is complete is left alone.
    """
    out = tmp_path / "out"
    asked = prepared(out, monkeypatch)
    assert "--no-async-scheduling" in asked["flags"] and asked["environment"]["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setattr(replay, "generated", generated)
    asyncio.run(replayed(out, asked["runs"]))
    folder = out / "conversation-70"
    kept = folder / "engines" / "mixed-0.0.steps.jsonl"
    kept.unlink()
    asyncio.run(replayed(out, asked["runs"]))
    assert read_step_logs([kept]).engine == {"version": "0.26.0", "async_scheduling": False}
    journal = (folder / "journal.jsonl").read_text()
    asyncio.run(replayed(out, asked["runs"]))
    assert (folder / "journal.jsonl").read_text() == journal and journal.count('"start_s"') == 1
    for _ in range(2):  # a second time, beside what the first has written
        acceptance.main(["compare", str(out)])
    run = json.loads((out / "result.json").read_text())["runs"]["conversation-70"]
    assert run["finished"] == run["requests"] > 30 and run["cached_tokens"] == 0
    assert run["rate_rps"] == pytest.approx(0.7 * run["capacity_rps"])
    error = {(row["metric"], row["percentile"]): row["error_frac"] for row in run["errors"]}
    assert abs(error["e2e", "p50"]) < 0.2
    assert "| e2e |" in capsys.readouterr().out


@pytest.mark.slow
def test_asynchronous_scheduling_is_planned_without_the_host_s_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of every planted step is the host's: the fit to what is left is 0.9 of the formula."""
    asked = prepared(tmp_path / "out", monkeypatch, "--async-scheduling")
    assert "--async-scheduling" in asked["flags"]
    fleet = read_fleet(tmp_path / "out" / "fleet.yaml", read_catalog())
    latency = fleet.pools[0].type.latency
    step = (300, 300 * 301 / 2, 0, 0, 1)
    assert float(latency.step_s(*step)) == pytest.approx(0.9 * float(TRUTH.step_s(*step)), rel=0.05)


def test_what_an_engine_does_between_two_steps_is_part_of_the_second(tmp_path: Path) -> None:
    """Tokens at 1.0 and 2.0 s, the second step scheduled at 1.3: the request waited 1 s for it, not 0.7. The
    engine then had nothing to do until 5.0 s, which is no part of the third.
    """
    log = StepLog(tmp_path / "steps.jsonl")
    for name, steps_s in (("a", [(0.5, 1.0), (1.3, 2.0)]), ("b", [(5.0, 5.5)])):
        log.queued(name, 4, steps_s[0][0])
        for scheduled_s, end_s in steps_s:
            log.step(scheduled_s, end_s, [(name, 4, 0)])
        log.finished(name)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"][:2] for line in lines if "step" in line] == [[0.5, 1.0], [1.0, 2.0], [5.0, 5.5]]


def test_a_request_that_comes_during_a_step_is_queued_when_it_came(tmp_path: Path) -> None:
    """vLLM's input thread receives it; the scheduler is told 50 ms later, when the step has ended."""
    scheduler = SimpleNamespace(
        add_request=lambda request: None, schedule=None, update_from_output=None, finish_requests=None
    )
    core = SimpleNamespace(scheduler=scheduler, preprocess_add_request=lambda request: request)
    log = StepLog(tmp_path / "steps.jsonl")
    hook_core(core, log, with_cpu=False)
    request = SimpleNamespace(request_id="p0r0", num_prompt_tokens=4)
    before_s = time.monotonic()
    core.preprocess_add_request(request)
    after_s = time.monotonic()
    time.sleep(0.05)
    scheduler.add_request(request)
    log.close()
    assert before_s <= log.requests["p0r0"].queued_s <= after_s
