"""`plan validate`: starts the plan's engines, sends them traffic, and compares prediction and measurement.

While it runs, the output folder gets journal.jsonl (what was sent and what came back) and engines/ (logs and
step logs). At the end it gets validation.json, requests.csv and report.html; and, if the engines logged
their steps, corrected.yaml and catalog/, with step times corrected by the logs. An interrupted run is
continued with the missing requests; a complete run is compared again without starting an engine.

`plan run` starts the same engines and router, and leaves the traffic to others (`serve`). The module
profiling is imported inside a function, because it may import torch.
"""

import asyncio
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from planner.documents.warm_up import WarmPrompt
from planner.errors import InputError, PlannerError
from planner.files import checked_files
from planner.fleet import Fleet, Policies
from planner.policies import QUEUE
from planner.reports.output import chart_pictures
from planner.runtime import remote_validation
from planner.runtime.analysis import Validation, ValidationSetup, analyse_run
from planner.runtime.budget import is_spent
from planner.runtime.connection_limits import listening
from planner.runtime.live_replay import JournalFile, Sending, block_prompt, replay_trace, unique_prompt
from planner.runtime.prediction_errors import Tolerances
from planner.runtime.router import LiveRouter, RouterSettings
from planner.runtime.service import serve_until_drained
from planner.runtime.validation_files import all_figures, render_files
from planner.runtime.workers import (
    Commands,
    LiveWorker,
    LiveWorkers,
    model_folder,
    place_workers,
    rehearsal_commands,
    run_engines,
    visible_gpus,
    vllm_commands,
)
from planner.simulator import simulate
from planner.traffic.sessions import session_numbers
from planner.traffic.trace import Trace
from planner.units import count_text

# Requests per worker before the traffic, set by hand: the first make the engine compile and fill pools.
WARM_UPS = 4
WARM_UP_TOKENS = 8  # Output tokens of such a request: some decodes after the prompt.
MOST_ERROR_TEXT = 300  # Characters of an engine's answer that an error message repeats.
LOG_BYTES = 64 * 2**20  # The limit of a served engine's log, and of its step log. Set by hand.
METRICS_TIMEOUT_S = 10.0  # An engine that does not answer in this time has no counters.
# Our router and engines follow these policies of a plan, and the defaults of all others.
FOLLOWED = ("routing", "decode_routing", "queue", "prefix_cache")
# A row of an engine's /metrics: the name without "vllm:", the labels, and the value.
_METRIC = re.compile(r"^vllm:(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_COPIED = (  # Metrics of vLLM that go into the journal under their own names, but for "_total" at the end.
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
)


class InterruptedRunError(PlannerError):
    """The run was stopped before every request had ended."""


def slice_plan(fleet: Fleet, trace: Trace) -> tuple[Fleet, Trace, str]:
    """A slice of a plan that fewer GPUs can validate: one worker of each pool, with its traffic.

    Returns the fleet, the requests that the simulator sends to these workers, and a sentence on what is left
    out. The prefill and the decode worker serve the same requests: those of the worker that has fewer in the
    simulation, so the other one carries less than in the plan. All requests of a session are taken, or none
    (`_whole_sessions`).
    """
    pools = fleet.running_pools
    simulation = simulate(fleet, trace)
    # Workers are numbered over all pools: a pool's first one comes after all workers of the pools before.
    first_worker = np.cumsum([0, *(pool.count for pool in pools)])[:-1]
    is_served = {"mixed": np.zeros(len(trace), dtype=bool)}
    for pool, worker in zip(pools, first_worker, strict=True):
        serving = simulation.decode_worker if pool.role == "decode" else simulation.prefill_worker
        is_served[pool.role] = is_served.get(pool.role, False) | (serving == worker)
    note, chosen = "", is_served["mixed"]
    if "prefill" in is_served:
        prefilled, decoded = is_served["prefill"], is_served["decode"]
        fewer = prefilled if prefilled.sum() <= decoded.sum() else decoded
        chosen = chosen | fewer
        note = (
            f"; a pair carries {int(fewer.sum())} requests, where the plan gives its prefill worker "
            f"{int(prefilled.sum())} and its decode worker {int(decoded.sum())}"
        )
    if trace.after.size:  # Some requests wait for the answer to an earlier one.
        chosen = _whole_sessions(trace, chosen)
        note += f"; {len(np.unique(session_numbers(trace)[chosen]))} sessions, all of them whole"
    if not chosen.any():
        raise InputError("the slice would serve no request; give a longer trace")
    single = Fleet(fleet.llm, tuple(replace(pool, count=1) for pool in pools), fleet.policies, fleet.network)
    workers = count_text(fleet.workers, "worker")
    sentence = f"slice: {single.workers} of {workers}, {int(chosen.sum())} of {len(trace)} requests{note}"
    return single, trace.select(chosen), sentence


def _whole_sessions(trace: Trace, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """A mask (n,) of the requests of whole sessions, which together have as nearly as possible the tokens of
    the requests that `chosen` (n,) marks. Sessions with the largest share of chosen tokens are taken first.
    """
    session, tokens = session_numbers(trace), trace.input_tokens + trace.output_tokens
    session_tokens = np.bincount(session, tokens)
    chosen_tokens = np.bincount(session, tokens * chosen)
    # Sessions with equal shares are taken in random order, so that the sample is not of the earliest ones.
    random_order = np.random.default_rng(0).permutation(len(session_tokens))
    order = np.lexsort((random_order, -chosen_tokens / session_tokens))
    session_count = int(np.abs(np.cumsum(session_tokens[order]) - chosen_tokens.sum()).argmin()) + 1
    return np.isin(session, order[:session_count])


def validate(
    setup: ValidationSetup,
    out: Path,
    *,
    tolerances: Tolerances | None = None,
    progress: Callable[[str], None] = lambda _: None,
    png: bool = False,
) -> Validation:
    """Measure the requests that the journal in the folder `out` lacks, compare, and write all files.

    With `png` every chart is written as a picture too. Raises InterruptedRunError if Ctrl-C or SIGTERM ended
    the replay before all requests had ended.
    """
    with checked_files.reserve_folder(out):
        return _validate(setup, out, tolerances or Tolerances(), progress, png=png)


def _validate(
    setup: ValidationSetup, out: Path, tolerances: Tolerances, progress: Callable[[str], None], *, png: bool
) -> Validation:
    """Do the work of `validate`, once the folder is reserved for this process."""
    if setup.fleet.disturbances:
        raise InputError(
            "disturbances: a validation does not make them happen on the engines, so no prediction with them "
            "could be compared; leave them out of the fleet"
        )
    _check_adapters(setup.fleet)  # Also for an endpoint, which needs no `engine_commands`.
    # The journal of a run with another identity is refused.
    journal = JournalFile(out / "journal.jsonl", setup.identity())
    if not _is_complete(setup, journal):
        missing = journal.read().missing(setup.trace)
        if setup.endpoint is None:
            measuring = _measure_engines(setup, out, journal, missing, progress)
        else:
            measuring = remote_validation.measure_endpoint(setup, journal, missing, progress)
        with suppress(asyncio.CancelledError):  # By a signal. What is missing is read below.
            asyncio.run(until_signalled(measuring))
        unfinished = len(journal.read().missing(setup.trace))
        if unfinished and not _is_complete(setup, journal):
            raise InterruptedRunError(
                f"interrupted: {unfinished} of {len(setup.trace)} requests have not ended; the same command "
                f"goes on with them ({journal.path})"
            )
    progress("comparing")
    validation = analyse_run(setup, out, tolerances)
    checked_files.write_files(
        out, {**render_files(validation), **(chart_pictures(all_figures(validation)) if png else {})}
    )
    return validation


def _is_complete(setup: ValidationSetup, journal: JournalFile) -> bool:
    """Whether nothing is left to send: every request has ended, or the budget of an endpoint is spent."""
    content = journal.read()
    if not content.missing(setup.trace):
        return True
    # Before the first part (one start of the replay) nothing can have spent the budget.
    has_begun = bool(content.parts)
    return setup.endpoint is not None and has_begun and is_spent(journal, setup.endpoint)


def _check_adapters(fleet: Fleet) -> None:
    """Raise InputError for a fleet with LoRA adapters."""
    if fleet.lora is not None:
        raise InputError("lora: our replays name no adapters; validate the plan without lora")


async def until_signalled(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; SIGINT, SIGTERM and SIGHUP cancel it, so that its engines are stopped before this ends."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signal_number, task.cancel)
    await task


async def _measure_engines(
    setup: ValidationSetup,
    out: Path,
    journal: JournalFile,
    missing: list[int],
    progress: Callable[[str], None],
) -> None:
    """Start the engines, and send the missing requests; the journal gets a record of this part of the run."""
    from profiling.machine import describe_machine  # profiling may import torch, which only this step needs.

    commands, gpu_count = engine_commands(setup, out)
    places = place_workers(setup.fleet, out / "engines", gpu_count)
    part = len(journal.read().parts)
    progress(f"starting {len(places)} engines; their logs are in {out / 'engines'}")
    async with run_engines(places, commands) as group:
        router = LiveRouter(
            group.workers,
            setup.fleet,
            # The simulated router has no limit on requests in flight, so this one has none either.
            RouterSettings(max_in_flight=10**9, longest_tokens=setup.max_model_len),
            # What policies know of lengths beforehand is as in the simulation (`LiveFleet`, live_routing.py).
            lengths=(float(setup.trace.input_tokens.mean()), float(setup.trace.output_tokens.mean())),
            history=(setup.trace.input_tokens, setup.trace.output_tokens),
            warm_up=_pinned_prompts(setup),
        )
        async with listening(router.app, "127.0.0.1", 0) as url, aiohttp.ClientSession() as client:
            progress("warming up")
            await _warm_up(setup, client, url, len(places))
            await router.warm_up()  # Computes the pinned prompts.
            if router.warm_prompts and None in router.warmed_identities:
                raise InputError("warm-up: a worker did not compute what it is to keep; its log says why")
            counters_before = await scrape_counters(client, group)
            load_before = os.getloadavg()[0]
            ranks = sum(len(place.devices) for place in places)
            try:
                await replay_trace(
                    setup.trace,
                    missing,
                    url,
                    setup.fleet.llm.name,
                    journal,
                    Sending(part, seed=setup.seed, shares_prefixes=setup.shares_prefixes),
                    progress=progress,
                )
            finally:
                record = {
                    "part": part,
                    "events": list(group.events),
                    "router": {**router.outcomes, "retries": router.retries},
                    "load_average": [load_before, os.getloadavg()[0]],
                    "date": time.strftime("%Y-%m-%d"),
                    "machine": describe_machine(),
                    # Without GPUs each rank of an engine computes on a core of its own.
                    "spare_cores": None if gpu_count else len(os.sched_getaffinity(0)) - ranks,
                    "engines": [],
                }
                # The first signal ended the replay. A second one only takes the counters from the record.
                with suppress(asyncio.CancelledError):
                    record["engines"] = traffic_counters(
                        counters_before, await scrape_counters(client, group)
                    )
                journal.write({"record": record})


def engine_commands(setup: ValidationSetup, out: Path) -> tuple[Commands, int | None]:
    """The commands that start the engines, and the number of visible GPUs; None for engines without GPUs.

    Raises InputError for a fleet that our engines do not run as the plan simulates it.
    """
    from profiling.vllm_install import INSTALL, is_cpu_build, is_installed

    for pool in setup.fleet.running_pools:
        if pool.type.dp > 1:
            raise InputError(
                f"{pool.name}: data-parallel ranks (dp {pool.type.dp}) are not validated: what is measured "
                "would be of several schedulers in one engine; validate a plan with dp 1"
            )
    _check_adapters(setup.fleet)
    policies = setup.fleet.policies
    if policies.kv_offload is not None:
        raise InputError(
            "policies.kv_offload: what engines find in CPU memory is not compared; validate without it"
        )
    for name, default in asdict(Policies()).items():
        value = getattr(policies, name)
        # A policy is a text or yes/no. Numbers are parameters of policies, and need no check of their own.
        if name not in FOLLOWED and isinstance(value, str | bool) and value != default:
            raise InputError(f"policies.{name} is {value!r}: our engines do {default!r}; plan with that")
    if setup.engine == "rehearsal":  # fake_engine.py, which takes as long as the fits say.
        return rehearsal_commands(
            prefix_cache=policies.prefix_cache, by_priority=QUEUE[policies.queue].is_by_priority
        ), None
    if not is_installed():
        raise InputError(f"validation needs vLLM: {INSTALL}; or rehearse without it: --engine rehearsal")
    model = setup.fleet.llm.name
    if setup.config is not None:  # A config.json given in place of the LLM's own.
        model = model_folder(setup.config, out / "engines")
    elif not setup.real_weights and Path(model).exists():
        # vLLM makes dummy weights, and gets a folder with config and tokenizer alone.
        model = model_folder(Path(model), out / "engines")
    is_cpu = is_cpu_build()
    devices = [str(core) for core in sorted(os.sched_getaffinity(0))] if is_cpu else visible_gpus()
    commands = vllm_commands(
        setup.fleet,
        setup.max_model_len,
        model=model,
        is_dummy=not setup.real_weights,
        is_cpu=is_cpu,
        devices=devices,
    )
    return commands, None if is_cpu else len(devices)


async def _warm_up(setup: ValidationSetup, client: aiohttp.ClientSession, url: str, workers: int) -> None:
    """Send WARM_UPS requests per worker, with prompts of the trace's median length.

    They are sent all at once, so that the router spreads them over the workers.
    """
    trace = setup.trace
    tokens = int(np.median(trace.input_tokens))
    body = {"model": setup.fleet.llm.name, "max_tokens": WARM_UP_TOKENS, "ignore_eos": True, "temperature": 0}

    async def send(number: int) -> None:
        # Another seed than the traffic's, so that no request finds its prompt in a cache.
        request_json = {**body, "prompt": unique_prompt(tokens, number, setup.seed + 1)}
        async with client.post(f"{url}/v1/completions", json=request_json) as answer:
            if answer.status != 200:
                text = await answer.text()
                raise InputError(f"warm-up: HTTP {answer.status}: {text[:MOST_ERROR_TEXT]}")

    await asyncio.gather(*(send(number) for number in range(WARM_UPS * workers)))


def _pinned_prompts(setup: ValidationSetup) -> tuple[WarmPrompt, ...]:
    """The prompts of pinned prefixes, which workers compute before the traffic and keep.

    Their token ids are those that the replay makes of the trace's blocks.
    """
    if not setup.shares_prefixes:
        return ()
    return tuple(
        WarmPrompt(w, tuple(block_prompt(pin.block_ids, pin.block_tokens, setup.seed)))
        for pin in setup.fleet.pinned
        for w in pin.workers
    )


async def scrape_counters(client: aiohttp.ClientSession, group: LiveWorkers) -> dict[str, dict[str, float]]:
    """The counters of each engine that answers, by worker."""
    return {
        worker.place.name: await _engine_counters(client, worker) for worker in group.workers if worker.is_up
    }


async def _engine_counters(client: aiohttp.ClientSession, worker: LiveWorker) -> dict[str, float]:
    """The counters of one engine; empty if it does not answer."""
    counters: dict[str, float] = {}
    try:
        timeout = aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
        async with client.get(f"{worker.url}/metrics", timeout=timeout) as answer:
            text = await answer.text()
    except (aiohttp.ClientError, TimeoutError):
        return counters
    for name, labels, value in _METRIC.findall(text):
        if name == "cache_config_info":
            sizes = {key: int(n) for key, n in re.findall(r'(block_size|num_gpu_blocks)="(\d+)"', labels)}
            if len(sizes) == 2:
                # vLLM keeps one block empty, as a placeholder that no request can use.
                counters["kv_tokens"] = sizes["block_size"] * (sizes["num_gpu_blocks"] - 1)
        # Prompt tokens whose KV came from another worker.
        elif name == "prompt_tokens_by_source_total" and "external_kv_transfer" in labels:
            counters["transferred_tokens"] = float(value)
        elif name in _COPIED:
            counters[name.removesuffix("_total")] = float(value)
        elif name == "nixl_bytes_transferred_sum":  # NIXL carries KV from worker to worker.
            counters["transferred_bytes"] = float(value)
    return counters


def traffic_counters(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """A row per engine: the increase of its counters during the traffic, the last values of its gauges."""
    gauges = ("kv_tokens", "kv_cache_usage_perc")
    rows: list[dict[str, Any]] = []
    for worker, values in after.items():
        row: dict[str, Any] = {"worker": worker}
        for name, value in values.items():
            row[name] = value if name in gauges else value - before.get(worker, {}).get(name, 0.0)
        rows.append(row)
    return rows


async def serve(
    setup: ValidationSetup,
    out: Path,
    settings: RouterSettings,
    sockets: Sequence[socket.socket],
    *,
    drain_s: float,
    say: Callable[[str], None],
    warm_up: Sequence[WarmPrompt] = (),
) -> None:
    """Run the plan's engines behind its router until the router has drained, or until cancelled.

    After SIGTERM the requests in flight have `drain_s` to end.
    """
    commands, gpu_count = engine_commands(setup, out)
    places = place_workers(setup.fleet, out / "engines", gpu_count, log_bytes=LOG_BYTES)
    say(f"starting {len(places)} engines; their logs are in {out / 'engines'}")
    async with run_engines(places, commands) as group:
        router = LiveRouter(group.workers, setup.fleet, settings, warm_up=warm_up)
        await serve_until_drained(router, sockets, f"{len(places)} workers", drain_s=drain_s, say=say)
