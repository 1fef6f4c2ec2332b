"""Measures the step times of vLLM engines as they are deployed: behind API servers and a router, under load.

    python -m planner.runtime.served config.json steps.csv '{"engines": 2, "dtype": "bfloat16", ...}'

The load has levels: each engine runs 1 sequence, then more, up to max_num_seqs. The load stays at its level
because each client sends its next request as soon as its last one is answered. Every step is a row of the
CSV. `t_s` is the time since the end of the step before, which is what users wait for. `own_s` is the part of
`t_s` in which the engine's thread did not wait for a core; it is known only if that thread computes the steps
itself (on a CPU). The `#` lines of the CSV say what the parts around the engine cost:

    front_end_s                     TTFT that the client saw, less the engine's own [s]; the median at the
                                    second level, where engines are neither idle nor full
    servers_step_s, servers_token_s CPU seconds of API servers, router and clients, per step and per token

The profiler starts this module in a process of its own, because vLLM's CPU engine cannot start in a process
that has loaded Numba, which the router needs.
"""

import asyncio
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pandas as pd
from scipy.optimize import nnls

from planner.documents.catalog import read_catalog
from planner.documents.llm_config import llm_from_config
from planner.errors import InputError, PlannerError
from planner.files.checked_files import write_file
from planner.fleet import Fleet, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.models.step_tables import COLUMNS, StepTable
from planner.runtime import workers
from planner.runtime.connection_limits import listening
from planner.runtime.engine_log import EngineLog, read_step_logs
from planner.runtime.live_replay import (
    TIMEOUT_S,
    Journal,
    ReplayPart,
    RequestOutcome,
    request_body,
    send_to_router,
)
from planner.runtime.measured_against_simulated import Measurement, outside_s
from planner.runtime.router import LiveRouter, RouterSettings
from planner.traffic.trace import Trace
from profiling.config import read_config, shard_config
from profiling.vllm_install import is_cpu_build

LEVEL_S = 6.0  # Each level of load is measured for this time, long enough for hundreds of steps.
SETTLE_S = 1.0  # Steps in this time after a level's start are left out, because the batch is still filling.
MOST_PROMPT_TOKENS = 1024  # Longer prompts would leave too few steps in a level.
LEVEL_REQUESTS = 50_000  # This many requests are drawn for a level, more than clients can send in LEVEL_S.
# Answers have from 16 to 63 tokens, so few that many requests begin and end in LEVEL_S.
OUTPUT_TOKENS = (16, 64)
CPU_KV_BYTES = 2 * 2**30  # The most KV cache of an engine on a CPU; most machines have this much memory left.
LEAST_CPU_BLOCKS = 2  # The fewest KV blocks of an engine on a CPU.
STEP_GAP_S = 1e-6  # Steps no further apart count as without a pause: logs round times to about this.
WATCHED_POOL = "served"
UNLIMITED_REQUESTS = 10**9  # More requests than can be in flight at once.
LEAST_LEVEL_CPU_S = 1e-9  # Only avoids a division by zero for a level without CPU seconds.
PLACEHOLDER_LATENCY = StepLatency(
    (1.0, 2.0), (1e-3, 1e-3), a_s=0.0, b_s=0.0, d_s=0.0, e_s=0.0, h_s=0.0, basis="any"
)
"""The router needs step times to build its fleet; how it spreads equal engines does not depend on them."""


@dataclass(frozen=True, slots=True)
class WatchedEngines:
    """How many `engines` to measure, which run at once, and their options.

    With tp > 1 each engine holds one rank's share of the LLM on one GPU, so it stands for one rank of a
    worker. `arguments` are further arguments of `vllm serve`, and the requests are drawn with `seed`. All
    other fields are vLLM's options of the same name.
    """

    engines: int
    tp: int = 1
    dtype: str = "bfloat16"
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 32768
    enforce_eager: bool = False
    arguments: tuple[str, ...] = ()
    seed: int = 0


def sequence_levels(seats: int) -> list[int]:
    """Sequences per engine at each level: 1, an eighth, a third and all of `seats` (max_num_seqs)."""
    return sorted({1, max(seats // 8, 1), max(seats // 3, 1), seats})


def watch_engines(config: Path, watched: WatchedEngines) -> StepTable:
    """Start the engines, load them level by level, and return all their steps.

    `config` is the LLM's config.json, or its folder. The columns `level` (sequences per engine) and `server`
    (the engine's name) say how a step was measured. Raises InputError if a request was not answered, or no
    steps were logged.
    """
    with tempfile.TemporaryDirectory(prefix="fleetplan-served-") as folder_name:
        folder = Path(folder_name)
        (folder / "config.json").write_text(json.dumps(shard_config(read_config(config), watched.tp)))
        fleet = _watched_fleet(folder, watched)
        gpu_count = None if is_cpu_build() else len(workers.visible_gpus())
        places = workers.place_workers(fleet, folder / "engines", gpu_count)
        measured_levels = asyncio.run(_run_levels(fleet, places, watched))
        logs = {
            place.name: read_step_logs((folder / "engines").glob(f"{place.name}.*.steps.jsonl"))
            for place in places
        }
    return _step_table(measured_levels, logs, fleet, watched)


def _watched_fleet(folder: Path, watched: WatchedEngines) -> Fleet:
    """The watched engines as a fleet of mixed workers.

    Their KV caches hold all sequences at full length; on a CPU they have at most CPU_KV_BYTES.
    """
    llm, catalog = llm_from_config(folder), read_catalog()
    longest = min(watched.max_model_len, llm.context_tokens)
    kv_tokens = watched.max_num_seqs * longest
    if is_cpu_build():
        cpu_kv_tokens = min(kv_tokens, int(CPU_KV_BYTES / llm.kv_bytes_per_token))
        blocks = max(cpu_kv_tokens // workers.CPU_BLOCK_TOKENS, LEAST_CPU_BLOCKS)
        kv_tokens = blocks * workers.CPU_BLOCK_TOKENS
    gpu = next(iter(catalog.gpus.values()))  # A worker type needs a GPU, but nothing here reads it.
    engine = WorkerType(
        gpu, 1, PLACEHOLDER_LATENCY, kv_tokens, watched.max_num_batched_tokens, watched.max_num_seqs
    ).with_llm(llm)
    return Fleet(replace(llm, name=str(folder)), (Pool(WATCHED_POOL, "mixed", engine, watched.engines),))


def _watched_commands(fleet: Fleet, watched: WatchedEngines) -> workers.Commands:
    """The commands that start a plan's engines (workers.py), with the options of the watched ones added."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    is_cpu = is_cpu_build()
    base_commands = workers.vllm_commands(
        fleet,
        min(watched.max_model_len, fleet.llm.context_tokens),
        model=fleet.llm.name,
        is_dummy=True,
        is_cpu=is_cpu,
        devices=cores if is_cpu else workers.visible_gpus(),
    )
    options = ["--dtype", watched.dtype, *(["--enforce-eager"] if watched.enforce_eager else [])]

    def command(place: workers.WorkerPlace, port: int) -> workers.EngineCommand:
        """The command of the engine at this place, with the options of the measurement."""
        base_command = base_commands(place, port)
        return workers.EngineCommand(
            [*base_command.argv, *options, *watched.arguments], base_command.environment
        )

    return command


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """One measured level of load, with `sequences` per engine.

    `part` says when its replay started and which requests it sent, and `sent` is what the client saw of
    these. `cpu_s` are the CPU seconds that engines, servers and clients took meanwhile. `end_s` is on the
    monotonic clock.
    """

    sequences: int
    part: ReplayPart
    sent: Sequence[RequestOutcome]
    cpu_s: float
    end_s: float


async def _run_levels(
    fleet: Fleet, places: Sequence[workers.WorkerPlace], watched: WatchedEngines
) -> list[LoadLevel]:
    """Start engines and router, and measure each level of load in turn, after one that only warms up."""
    measured_levels = []
    async with workers.run_engines(places, _watched_commands(fleet, watched)) as group:
        # The router must refuse no request, because the clients fill the engines on purpose.
        router = LiveRouter(group.workers, fleet, RouterSettings(max_in_flight=UNLIMITED_REQUESTS))
        async with listening(router.app, "127.0.0.1", 0) as url:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            # By default aiohttp opens at most 100 connections; 0 lifts this limit.
            async with aiohttp.ClientSession(
                timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
            ) as client:
                warm_up_level = 1  # Sequences. It is measured like the other levels, and dropped below.
                levels = (warm_up_level, *sequence_levels(watched.max_num_seqs))
                for part_number, sequences in enumerate(levels):
                    before_s = _used_cpu_s(group)
                    level_part, sent = await _run_level(client, url, fleet, watched, part_number, sequences)
                    cpu_s = _used_cpu_s(group) - before_s
                    measured_levels.append(LoadLevel(sequences, level_part, sent, cpu_s, time.monotonic()))
    return measured_levels[1:]


def _used_cpu_s(group: workers.LiveWorkers) -> float:
    """CPU seconds so far of this process and of all engine processes.

    Each engine is started in a Unix session of its own, by which its processes are found in /proc (see
    `man proc_pid_stat`). Without /proc only this process is counted.
    """
    sessions = {worker.process.pid for worker in group.workers if worker.process is not None}
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # The process has ended since the directory was listed.
            # The second field is the program's name in parentheses, which may contain spaces. So the fields
            # are counted from its end: these three are the 6th, 14th and 15th of the line.
            fields = path.read_text().rpartition(")")[2].split()
            session, user_ticks, system_ticks = (int(fields[k]) for k in (3, 11, 12))
            if session in sessions:
                ticks += user_ticks + system_ticks
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def _run_level(
    client: aiohttp.ClientSession, url: str, fleet: Fleet, watched: WatchedEngines, part: int, sequences: int
) -> tuple[ReplayPart, list[RequestOutcome]]:
    """Send the requests of one level for LEVEL_S, in a closed loop.

    There are `sequences` clients per engine, and each sends its next request once its last one is answered.
    `part` is the number of the level. Raises InputError for a request that was not served.
    """
    clients = sequences * watched.engines
    trace = _level_trace(fleet, watched, part)
    start_s, sent = time.monotonic(), []
    unsent = iter(range(len(trace)))

    async def ask_until_end() -> None:
        """One client: sends a request whenever its last one is answered, for LEVEL_S."""
        for number in unsent:  # All clients take from this one iterator, so no request is sent twice.
            if time.monotonic() >= start_s + LEVEL_S:
                return
            body = request_body(trace, number, fleet.llm.name, watched.seed + part, shares_prefixes=False)
            at_s = time.monotonic() - start_s
            tokens = int(trace.output_tokens[number])
            sent.append(await send_to_router(client, url, body, number, part, start_s, at_s, tokens))

    await asyncio.gather(*(ask_until_end() for _ in range(clients)))
    if lost := [answer for answer in sent if answer.status != "finished"]:
        raise InputError(
            f"the watched engine did not answer {len(lost)} of {len(sent)} requests: {lost[0].reason}"
        )
    return ReplayPart(part, start_s, tuple(answer.request for answer in sent)), sent


def _level_trace(fleet: Fleet, watched: WatchedEngines, part: int) -> Trace:
    """Requests of a level, the same in each call: prompts of all lengths (log-uniform) and short outputs."""
    rng = np.random.default_rng((watched.seed, part))
    low, high = OUTPUT_TOKENS
    worker = fleet.pools[0].type
    # A prompt must fit into the context and the cache with its output, and be computed in one step.
    room_tokens = min(watched.max_model_len, fleet.llm.context_tokens, worker.kv_tokens) - high
    longest = max(min(MOST_PROMPT_TOKENS, worker.max_num_batched_tokens, room_tokens), 1)
    prompts = np.exp(rng.uniform(0, np.log(longest), LEVEL_REQUESTS)).astype(np.int64).clip(1)
    arrivals_s = np.zeros(LEVEL_REQUESTS)  # The clients decide when a request is sent, not the arrivals.
    return Trace("closed loop", arrivals_s, prompts, rng.integers(low, high, LEVEL_REQUESTS))


def _step_table(
    measured_levels: Sequence[LoadLevel], logs: dict[str, EngineLog], fleet: Fleet, watched: WatchedEngines
) -> StepTable:
    """The steps of the measured levels as a table, with the costs around the engine in its header. Steps at
    the start of a level (SETTLE_S), after its end, or after a pause are left out. An engine on a CPU takes
    one core, so the others are spare.
    """
    frames, front_end_s_by_level = [], []
    for level in measured_levels:
        start_s = level.part.start_s
        for name, log in logs.items():
            steps = _back_to_back_steps(log)
            is_settled = (steps.start_s > start_s + SETTLE_S) & (steps.end_s < start_s + LEVEL_S)
            frames.append(steps[is_settled].assign(level=level.sequences, server=name))
        journal = Journal((level.part,), {answer.request: answer for answer in level.sent})
        lengths = _level_trace(fleet, watched, level.part.part)
        front_end_s_by_level.append(outside_s(Measurement(fleet, lengths, journal, logs)))
    table = pd.concat(frames, ignore_index=True)
    if table.empty:
        raise InputError("the watched engine logged no steps that followed each other")
    engine = next(iter(logs.values())).engine
    second = min(1, len(front_end_s_by_level) - 1)  # With max_num_seqs of 1 there is only one level.
    second_level_s = front_end_s_by_level[second]
    servers_step_s, servers_token_s = _fit_servers_s(measured_levels, logs)
    about = {
        "engine": "vllm",
        "version": engine["version"],
        "async_scheduling": str(engine["async_scheduling"]).lower(),
        "engines": str(watched.engines),
        "spare_cores": str(len(os.sched_getaffinity(0)) - (watched.engines if is_cpu_build() else 0)),
        "front_end_s": f"{np.median(second_level_s):.6g}",
        "front_end_of": f"{len(second_level_s)} requests, P90 {np.quantile(second_level_s, 0.9):.4g} s",
        "servers_step_s": f"{servers_step_s:.6g}",
        "servers_token_s": f"{servers_token_s:.6g}",
        "load_average": f"{os.getloadavg()[0]:.1f}",
        "date": datetime.date.today().isoformat(),
    }
    return StepTable(table[[*COLUMNS, "own_s", "level", "server"]], about)


def _fit_servers_s(measured_levels: Sequence[LoadLevel], logs: dict[str, EngineLog]) -> tuple[float, float]:
    """CPU seconds per step and per token outside the engines' computing threads.

    Fitted over the levels by non-negative least squares of relative errors.
    """
    rows, cpu_s = [], []
    for level in measured_levels:
        steps = [
            log.steps[(log.steps.start_s >= level.part.start_s) & (log.steps.end_s <= level.end_s)]
            for log in logs.values()
        ]
        # CPU seconds of the computing threads: `used_s` of a log counts them since the engine's start.
        threads_s = sum(float(each.used_s.iloc[-1] - each.used_s.iloc[0]) for each in steps if len(each))
        rows.append([sum(map(len, steps)), sum(len(answer.token_s) for answer in level.sent)])
        # Logs of GPU engines have no CPU seconds (NaN); their threads' seconds count as the servers' then.
        cpu_s.append(max(level.cpu_s - (0.0 if np.isnan(threads_s) else threads_s), 0.0))
    # Weights make errors relative, so that a level with few steps counts as much as one with many.
    weight = 1 / np.maximum(cpu_s, LEAST_LEVEL_CPU_S)
    per_step_s, per_token_s = nnls(np.array(rows) * weight[:, None], cpu_s * weight)[0].tolist()
    return per_step_s, per_token_s


def _back_to_back_steps(log: EngineLog) -> pd.DataFrame:
    """The steps that followed another step without a pause. `t_s` is the time from the end of the step before
    to their own end, and `own_s` the part of it in which the engine's thread did not wait for a core.

    A log with the engine's own clock says whether the engine `waited` for requests before a step. In other
    logs a step must start within STEP_GAP_S of the end of the step before.
    """
    steps = log.steps
    last_end_s = steps.end_s.shift()
    follows = (steps.waited == 0) if log.has_own_clock else (steps.start_s <= last_end_s + STEP_GAP_S)
    timed = steps.assign(t_s=steps.end_s - last_end_s, own_s=steps.own_end_s - steps.own_end_s.shift())
    return timed[follows & (steps.end_s > last_end_s)]  # A step with `t_s` of 0 or less is left out.


def main() -> int:
    """Measure the engines that the command line describes, and write their steps to the CSV."""
    config, out, options_json = sys.argv[1:]
    options: dict[str, Any] = json.loads(options_json)
    try:
        options["arguments"] = tuple(options.get("arguments", ()))
        table = watch_engines(Path(config), WatchedEngines(**options))
        write_file(Path(out), table.to_csv())
    except PlannerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
