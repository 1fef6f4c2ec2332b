"""Replays the runs of OUT/replay.json on one vLLM engine, each request at its time. Runs on the machine with
the GPU.

    python benchmarks/gpu/replay.py OUT

Needs vLLM, and of the planner only its journal and step log, so neither numba nor pandas. The engine is
AsyncLLM, whose core is a process of its own as with `vllm serve`. It is started with the flags that `plan
validate` would give it, and with the scheduling that was profiled. Times are taken in the core
(planner/runtime/step_log.py). A complete run is not replayed again; one that was cut off starts anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import InputError, PlannerError
from planner.runtime.launch import STEP_CPU, STEP_LOG
from planner.runtime.live_replay import (
    LEAD_S,
    JournalFile,
    RequestOutcome,
    Status,
    request_name,
    unique_prompt,
)
from planner.runtime.step_log import hook_vllm
from planner.traffic.trace import Trace
from profiling.machine import describe_machine
from profiling.power_sampling import PowerSampler, open_gpu
from profiling.vllm_install import mend_cpu_wheel

WARM_UPS = 16  # Requests before a run.
WORKER = "mixed-0"
START_S = time.monotonic()


def hook() -> None:
    """Makes vLLM in this process write the step log."""
    mend_cpu_wheel()
    hook_vllm(Path(os.environ[STEP_LOG]), with_cpu=STEP_CPU in os.environ)


if __name__ == "__mp_main__":  # This is vLLM's engine core, which imports this module in its own process.
    hook()


def started(asked: dict[str, Any], folder: Path) -> Any:
    """Starts the engine; `folder` gets the LLM's config.json, which the engine reads."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    folder.mkdir()
    shutil.copyfile(asked["config"], folder / "config.json")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    # Flags of the server, which this parser does not know, are left out.
    flags, _ = parser.parse_known_args(["--model", str(folder), *asked["flags"]])
    return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(flags))


async def replay_all(engine: Any, out: Path, runs: dict[str, Any], log: Path) -> None:
    """Replay every run that is not complete; `log` is the engine's step log, of which each run gets its
    part.
    """
    # Prompts are numbered over all runs, and no two begin alike, so that the engine's prefix cache never
    # helps.
    first = 0
    for name, run in runs.items():
        trace = read_trace(out / name / "trace.csv")
        numbers = range(first, first + len(trace))
        first = numbers.stop
        steps = out / name / "engines" / f"{WORKER}.0.steps.jsonl"
        if steps.exists():
            say(f"{name}: done before")
            continue
        ids = [
            unique_prompt(int(n), number, 0) for n, number in zip(trace.input_tokens, numbers, strict=True)
        ]
        await warm_up(engine, ids[:WARM_UPS])
        before_bytes = log.stat().st_size
        journal = JournalFile(out / name / "journal.jsonl", run["identity"])
        journal.path.unlink(missing_ok=True)
        if failed := await replay(engine, trace, ids, journal):
            raise InputError(f"{name}: {len(failed)} of {len(trace)} requests failed: {failed[0]}")
        steps.parent.mkdir(exist_ok=True)
        logged = log.read_bytes()
        engine_line = logged[: logged.index(b"\n") + 1]  # Version and scheduling, by which it is predicted.
        steps.write_bytes(engine_line + logged[before_bytes:])
        say(f"{name}: {len(trace)} requests")


async def warm_up(engine: Any, prompts: list[list[int]]) -> None:
    """Send these prompts at once, reversed, so that the cache has no prefix of the run's own prompts."""
    names = [f"warm-up-{time.monotonic_ns()}-{k}" for k in range(len(prompts))]
    asked = [generated(engine, name, ids[::-1], 8) for name, ids in zip(names, prompts, strict=True)]
    if failed := [reason for _, reason in await asyncio.gather(*asked) if reason]:
        raise InputError(f"warm-up: {failed[0]}")


async def replay(engine: Any, trace: Trace, prompts: list[list[int]], journal: JournalFile) -> list[str]:
    """Send every request at its time, whether or not earlier ones have ended. Returns why requests failed."""
    load, due_s = os.getloadavg()[0], trace.arrival_s - trace.arrival_s[0]
    start_s = time.monotonic() + LEAD_S
    journal.write({"part": 0, "start_s": start_s, "first_s": float(trace.arrival_s[0])})

    async def one(k: int) -> str:
        await asyncio.sleep(start_s + due_s[k] - time.monotonic())
        sent_s = round(time.monotonic() - start_s, 6)
        journal.write({"part": 0, "sends": k})
        token_s, reason = await generated(engine, request_name(0, k), prompts[k], int(trace.output_tokens[k]))
        status: Status = "failed" if reason else "finished"
        tokens = tuple(round(at_s - start_s, 6) for at_s in token_s)
        end_s = round(time.monotonic() - start_s, 6)
        sent = RequestOutcome(
            k, 0, round(float(due_s[k]), 6), sent_s, end_s, status, reason, (WORKER,), tokens
        )
        journal.write(asdict(sent))
        return reason

    gpu = open_gpu()
    with PowerSampler(gpu) as watts:
        reasons = await asyncio.gather(*(one(k) for k in range(len(trace))))
    record = {
        "part": 0,
        "date": time.strftime("%Y-%m-%d"),
        "load_average": [load, os.getloadavg()[0]],
        "machine": describe_machine(),
        "clocks": gpu and gpu.clocks(),
        "power_w": watts.mean_w,
        "peak_power_w": watts.peak_w,
        "spare_cores": None,
        "events": [],
        "router": {},
        "engines": [],
    }
    journal.write({"record": record})
    return [reason for reason in reasons if reason]


async def generated(engine: Any, name: str, ids: list[int], tokens: int) -> tuple[list[float], str]:
    """Generate so many tokens; returns the time at which each came, and the reason if the request failed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=tokens,
        min_tokens=tokens,
        ignore_eos=True,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    token_s: list[float] = []
    try:
        async for output in engine.generate({"prompt_token_ids": ids}, params, name):
            token_s += [time.monotonic()] * len(output.outputs[0].token_ids)
    except Exception as error:  # Any error ends this request only; the journal names it.
        return token_s, f"{type(error).__name__}: {error}"[:200]
    return token_s, "" if len(token_s) == tokens else f"{len(token_s)} of {tokens} tokens came"


def read_trace(file: Path) -> Trace:
    arrival_s, inputs, outputs = np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2).T
    return Trace(str(file), arrival_s, inputs.astype(np.int64), outputs.astype(np.int64))


def say(text: str) -> None:
    print(f"[{time.monotonic() - START_S:5.0f} s] {text}", flush=True)


async def run(out: Path, asked: dict[str, Any], folder: Path, log: Path) -> None:
    engine = started(asked, folder / "model")
    say("the engine is up")
    try:
        await replay_all(engine, out, asked["runs"], log)
    finally:
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    out = parser.parse_args().out
    asked = json.loads((out / "replay.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        log.touch()
        os.environ.update(asked["environment"] | {STEP_LOG: str(log)})
        hook()
        try:
            asyncio.run(run(out, asked, Path(folder), log))
        except PlannerError as error:
            sys.exit(f"replay: {error}")


if __name__ == "__main__":
    main()
