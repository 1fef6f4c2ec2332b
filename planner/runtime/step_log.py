"""Writes the step log of an engine: every step with its load and times, every request with its token times.

A client that shares its cores with the engine measures the time between two tokens badly, so the engine core
writes the log itself, one JSON object per line:

    {"engine": {"version": "0.32.0", "async_scheduling": false}}
    {"step": [start_s, end_s, n_prefill, prefill_tokens, cached_tokens, prefill_pairs, n_decode, kv_tokens],
     "own": [0.52, 0.53], "used_s": 0.51, "waited": 1}
    {"request": "r7", "queued_s": 1.2, "scheduled_s": 1.3, "token_s": [1.4, 1.41], "preemptions": 0,
     "cached_tokens": 0}

The first line has vLLM's version, and whether it schedules asynchronously. Times are CLOCK_MONOTONIC, which
all processes of a machine share. A step ends when its tokens are on the host. It starts at the end of the
step before, because users also wait for the engine's work between two steps. There are two exceptions: if
the engine had no work before the step, or the line has `own`, the step starts when it was scheduled, but not
before the end of the step before.

In a step, a prefill is a request whose prompt is computed, a decode one that gets its next token. The
`cached_tokens` of a step are the tokens of its prefills that were computed before it, in this engine or found
in a cache. `prefill_pairs` are the pairs of a new token and a token to which it attends. `kv_tokens` are the
tokens to which the decodes attend.

A request is written when it has finished. Its `cached_tokens` are the prompt tokens that it found in the
cache when it was first scheduled.

On a CPU, where the engine's own thread computes the steps, three values are added. `own` has two times of
this thread's own clock: when the step was scheduled, and when it ended. That clock stands still while the
thread waits for a core, so its difference to the wall clock is what other processes took. `used_s` are the
thread's CPU seconds so far. `waited` is 1 if the engine had no work before the step.

Lines that cannot be written are dropped, so that an engine never stops for its log. With `most_bytes`
the file gets the ending .1 once it has half of these bytes, and a new file is begun: together the two have
about `most_bytes`.

This module runs inside the engine, so it imports little; planner/runtime/engine_log.py reads the logs. vLLM
is imported inside `hook_vllm`, because the fake engine logs without it.
"""

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

BUFFER_BYTES = 8192  # Lines are collected up to this size, so that not every step writes to the file.
LOWEST_PRIORITY = 19  # The lowest priority of a process on Linux.
SCHEDSTAT_BYTES = 80  # More than the three numbers of /proc/thread-self/schedstat have.


@dataclass(slots=True)
class _LoggedRequest:
    """A request that has not ended; `scheduled_s` is -1 before it is scheduled."""

    prompt_tokens: int
    queued_s: float
    scheduled_s: float = -1.0
    preemptions: int = 0
    cached_tokens: int = 0
    token_s: list[float] = field(default_factory=list)


class StepLog:
    """The log of one engine. The engine calls a method for each event; see `hook_vllm` and fake_engine.py."""

    def __init__(self, path: Path, most_bytes: int = 0) -> None:
        self.path, self.most_bytes = path, most_bytes
        self.lines = bytearray()  # Lines that are not written yet.
        self.head = b""  # The first line, which each new file begins with.
        self.written_bytes = 0
        self.file: IO[bytes] | None = None
        self.requests: dict[str, _LoggedRequest] = {}
        self.last_end_s = 0.0
        self.has_waited = True  # Whether the engine has had no work since the last step.
        atexit.register(self.close)

    def begin(self, version: str, *, async_scheduling: bool) -> None:
        """Note the first line, which describes the engine."""
        self.head = _log_line({"engine": {"version": version, "async_scheduling": async_scheduling}})
        self.lines += self.head

    def queued(self, name: str, prompt_tokens: int, now_s: float) -> None:
        """Note that a request has come."""
        self.requests[name] = _LoggedRequest(prompt_tokens, now_s)

    def scheduled(self, name: str, now_s: float, cached_tokens: int = 0) -> None:
        """Note that a request was scheduled; only the first time counts."""
        if (request := self.requests.get(name)) and request.scheduled_s < 0:
            request.scheduled_s, request.cached_tokens = now_s, cached_tokens

    def preempted(self, name: str) -> None:
        """Note that a request lost its place, and will be computed again."""
        if request := self.requests.get(name):
            request.preemptions += 1

    def step(
        self,
        scheduled_s: float,
        end_s: float,
        chunks: Iterable[tuple[str, int, int]],
        own_s: tuple[float, float] | None = None,
    ) -> None:
        """Write the line of a step.

        `chunks` has (request, new tokens, tokens computed before) of each request in the step. `own_s` is the
        engine's own clock when the step was scheduled and when it ended.
        """
        prefills = prefill_tokens = cached_tokens = pairs = decodes = kv_tokens = 0
        for name, new, computed in chunks:
            request = self.requests.get(name)
            # The last token of a prompt, computed by itself, is as much work as a decode.
            is_past_prompt = request is not None and computed >= request.prompt_tokens - 1
            # A prompt of one token is past its end at once, but nothing of it is computed: a prefill.
            if new == 1 and computed > 0 and is_past_prompt:
                decodes += 1
                kv_tokens += computed + 1  # A new token attends to itself too.
            else:
                prefills += 1
                prefill_tokens += new
                cached_tokens += computed
                # Each new token attends to the computed ones, to the new ones before it and to itself.
                pairs += new * (2 * computed + new + 1) // 2
        follows = own_s is None and not self.has_waited
        start_s = self.last_end_s if follows else max(scheduled_s, self.last_end_s)
        self.last_end_s = end_s
        load = [prefills, prefill_tokens, cached_tokens, pairs, decodes, kv_tokens]
        row = [round(start_s, 6), round(end_s, 6), *load]
        own: dict[str, Any] = {}
        if own_s is not None:
            own = {"own": [round(s, 6) for s in own_s], "used_s": round(time.thread_time(), 6)}
            own["waited"] = int(self.has_waited)
        self.has_waited = False
        self._write({"step": row} | own)

    def token(self, name: str, tokens: int, now_s: float) -> None:
        """Note that a request got this many tokens."""
        if request := self.requests.get(name):
            request.token_s += [round(now_s, 6)] * tokens

    def finished(self, name: str) -> None:
        """Write the line of a request that has finished."""
        if (request := self.requests.pop(name, None)) is None:
            return
        self.has_waited = self.has_waited or not self.requests
        self._write(
            {
                "request": name,
                "queued_s": round(request.queued_s, 6),
                "scheduled_s": round(request.scheduled_s, 6),
                "token_s": request.token_s,
                "preemptions": request.preemptions,
                "cached_tokens": request.cached_tokens,
            }
        )
        self.flush()

    def forget(self, name: str) -> None:
        """Drop a request that was aborted."""
        self.requests.pop(name, None)
        self.has_waited = self.has_waited or not self.requests

    def _write(self, line: Mapping[str, Any]) -> None:
        """Collect a line, and write what was collected once it fills the buffer."""
        self.lines += _log_line(line)
        if len(self.lines) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the collected lines. Lines that cannot be written are lost."""
        try:
            if self.file is None:
                self.file = self.path.open("ab", buffering=0)
            written = self.file.write(self.lines)
            del self.lines[:written]
            self.written_bytes += written
            # A file must end with a whole line, so it is not closed after a write in part.
            if self.most_bytes and not self.lines and self.written_bytes >= self.most_bytes // 2:
                self.file.close()
                self.file, self.written_bytes = None, 0
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self.lines[:] = self.head
        except OSError:
            self.lines[:] = b"\n"  # The newline ends a line that was written in part.

    def close(self) -> None:
        """Write the remaining lines and close the file; also called when the process ends."""
        atexit.unregister(self.close)
        self.flush()
        if self.file is not None:
            self.file.close()
            self.file = None


def _log_line(document: Mapping[str, Any]) -> bytes:
    """A line of the log: compact JSON and a newline."""
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def hook_vllm(path: Path, *, with_cpu: bool, most_bytes: int = 0) -> None:
    """Make every engine core of this process write a step log to `path` (vLLM 0.26 to 0.33, engine v1).

    `with_cpu` says that the engine's own thread computes the steps.
    """
    from vllm import __version__
    from vllm.v1.engine.core import EngineCore

    original_init = EngineCore.__init__

    def init_with_log(core: Any, *args: Any, **kwargs: Any) -> None:
        original_init(core, *args, **kwargs)
        if with_cpu and core.vllm_config.kv_transfer_config is not None:
            _lower_priority_of_foreign_threads()
        log = StepLog(path, most_bytes)
        log.begin(__version__, async_scheduling=bool(core.vllm_config.scheduler_config.async_scheduling))
        hook_core(core, log, with_cpu=with_cpu)

    EngineCore.__init__ = init_with_log


def _lower_priority_of_foreign_threads() -> None:
    """Lower the priority of threads that Python did not start.

    NIXL's threads poll without a pause on the same core as the engine's thread, and took half of its time.
    """
    ours = {thread.native_id for thread in threading.enumerate()}
    for task in Path("/proc/self/task").glob("*"):  # The directory exists on Linux alone.
        if int(task.name) not in ours:
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), LOWEST_PRIORITY)


def _own_clock() -> Callable[[], float]:
    """A clock of the calling thread that stands still while the thread waits for a core.

    Systems other than Linux do not count this wait; there the clock shows the thread's CPU seconds.
    """
    file = Path("/proc/thread-self/schedstat")
    descriptors: dict[int, int] = {}

    def clock() -> float:
        """Seconds of time.monotonic without those in which this thread waited for a core."""
        thread = threading.get_ident()
        if thread not in descriptors:
            descriptors[thread] = os.open(file, os.O_RDONLY)
        # The file has three numbers: nanoseconds on a core, nanoseconds of waiting for a core, time slices.
        waited_ns = int(os.pread(descriptors[thread], SCHEDSTAT_BYTES, 0).split()[1])
        return time.monotonic() - waited_ns / 1e9

    return clock if file.exists() else time.thread_time


def hook_core(core: Any, log: StepLog, *, with_cpu: bool) -> None:
    """Make one engine core write to `log`.

    A request counts as queued when the core's process receives it. The scheduler gets the request only after
    the present step, and this wait is part of the request's time.
    """
    scheduler, receive = core.scheduler, core.preprocess_add_request
    add, schedule, update = scheduler.add_request, scheduler.schedule, scheduler.update_from_output
    finish = scheduler.finish_requests
    # By the id of the scheduler's output: when the step was scheduled, by both clocks, and its chunks.
    planned: dict[int, tuple[float, float, list[tuple[str, int, int]]]] = {}
    received_s: dict[str, float] = {}  # By request, until the scheduler gets it.
    own_clock = _own_clock()

    def log_received(request: Any, *args: Any, **kwargs: Any) -> Any:
        received_s[request.request_id] = time.monotonic()
        return receive(request, *args, **kwargs)

    def log_queued(request: Any, *args: Any, **kwargs: Any) -> Any:
        queued_s = received_s.pop(request.request_id, time.monotonic())
        log.queued(request.request_id, request.num_prompt_tokens, queued_s)
        return add(request, *args, **kwargs)

    def log_scheduled(*args: Any, **kwargs: Any) -> Any:
        now_s, own_s = time.monotonic(), own_clock()
        output = schedule(*args, **kwargs)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for name, tokens in computed.items():
            log.scheduled(name, now_s, tokens)
        # vLLM calls the requests that it has scheduled before "cached"; the KV cache is not meant.
        continued = output.scheduled_cached_reqs
        computed |= dict(zip(continued.req_ids, continued.num_computed_tokens, strict=True))
        # The field is absent in some versions, and may be None.
        for name in getattr(output, "preempted_req_ids", None) or ():
            log.preempted(name)
        if output.total_num_scheduled_tokens:
            chunks = [(name, n, computed[name]) for name, n in output.num_scheduled_tokens.items()]
            planned[id(output)] = now_s, own_s, chunks
        else:  # All requests wait for KV from other workers.
            log.has_waited = True
        return output

    def log_step(output: Any, *args: Any, **kwargs: Any) -> Any:
        now_s, own_s = time.monotonic(), own_clock()
        results = update(output, *args, **kwargs)
        if step_plan := planned.pop(id(output), None):
            scheduled_s, scheduled_own_s, chunks = step_plan
            log.step(scheduled_s, now_s, chunks, (scheduled_own_s, own_s) if with_cpu else None)
        for result in results.values():
            for request_output in result.outputs:
                log.token(request_output.request_id, len(request_output.new_token_ids), now_s)
                if request_output.finish_reason is not None:
                    log.finished(request_output.request_id)
        return results

    def log_aborted(names: Any, *args: Any, **kwargs: Any) -> Any:
        # vLLM calls this for requests that end early; the others have ended in `log_step`.
        for name in [names] if isinstance(names, str) else names or ():
            log.forget(name)
        return finish(names, *args, **kwargs)

    core.preprocess_add_request = log_received
    scheduler.add_request, scheduler.schedule = log_queued, log_scheduled
    scheduler.update_from_output, scheduler.finish_requests = log_step, log_aborted
