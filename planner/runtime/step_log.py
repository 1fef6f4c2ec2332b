"""What an engine did, told by the engine: every step with its load and time, every request with its tokens.

A client that shares its cores with the engine cannot be trusted with the time between two tokens, so the
engine core itself writes them down, one JSON object per line:

    {"engine": {"version": "0.32.0", "async_scheduling": false}}
    {"step": [start_s, end_s, n_prefill, prefill_tokens, cached_tokens, prefill_pairs, n_decode, kv_tokens],
     "own": [0.52, 0.53], "used_s": 0.51, "waited": 1}
    {"request": "r7", "queued_s": 1.2, "scheduled_s": 1.3, "token_s": [1.4, 1.41], "preemptions": 0,
     "cached_tokens": 0}

The first line says what vLLM it is, and whether it schedules asynchronously. Times are CLOCK_MONOTONIC, which
all processes of a machine share. A step ends when its tokens are on the host. It starts where the one before
it ended, since the next tokens wait for the engine's books too; where the engine had no work before, or notes
its CPU seconds, when it was scheduled. A request is written when it has finished; `cached_tokens` are those
it did not have to compute when it was first scheduled. On a CPU, where the engine's own thread computes,
`own` are the seconds that this thread has not had to wait for a core, when the step was scheduled and when it
ended: what is missing to the wall's, others took. `used_s` are its CPU seconds so far. `waited` is 1 where
the step found the engine without work before.

Lines that cannot be written are left out: an engine does not stop for its log. With `most_bytes` the file is
renamed to end in .1 at half of them, and a new one begun.

This module runs inside the engine, so it imports little; planner/runtime/engine_log.py reads what it writes.
"""

from __future__ import annotations

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

BUFFER_BYTES = 8192


@dataclass(slots=True)
class _Request:
    prompt_tokens: int
    queued_s: float
    scheduled_s: float = -1.0
    preemptions: int = 0
    cached_tokens: int = 0
    token_s: list[float] = field(default_factory=list)


class StepLog:
    """Writes the lines of one engine, which calls it; see `hook_vllm` and planner/runtime/fake_engine.py."""

    def __init__(self, path: Path, most_bytes: int = 0) -> None:
        self.path, self.most_bytes = path, most_bytes
        self.lines = bytearray()  # Lines that are not written yet.
        self.head = b""
        self.written_bytes = 0
        self.file: IO[bytes] | None = None
        self.requests: dict[str, _Request] = {}
        self.last_end_s = 0.0
        self.has_waited = True
        atexit.register(self.close)

    def runs(self, version: str, *, async_scheduling: bool) -> None:
        self.head = _line({"engine": {"version": version, "async_scheduling": async_scheduling}})
        self.lines += self.head

    def queued(self, name: str, prompt_tokens: int, now_s: float) -> None:
        self.requests[name] = _Request(prompt_tokens, now_s)

    def scheduled(self, name: str, now_s: float, cached_tokens: int = 0) -> None:
        if (request := self.requests.get(name)) and request.scheduled_s < 0:
            request.scheduled_s, request.cached_tokens = now_s, cached_tokens

    def preempted(self, name: str) -> None:
        if request := self.requests.get(name):
            request.preemptions += 1

    def step(
        self,
        scheduled_s: float,
        end_s: float,
        chunks: Iterable[tuple[str, int, int]],
        own_s: tuple[float, float] | None = None,
    ) -> None:
        """`chunks`: (request, new tokens, tokens computed before) of all that were in the step; `own_s`:
        the engine's own clock when it was scheduled and when it ended."""
        prefills = new = cached = pairs = decodes = attended = 0
        for name, n, c in chunks:
            request = self.requests.get(name)
            if n == 1 and c > 0 and request is not None and c >= request.prompt_tokens - 1:
                decodes += 1
                attended += c + 1
            else:
                prefills += 1
                new += n
                cached += c
                pairs += n * (2 * c + n + 1) // 2
        follows = own_s is None and not self.has_waited
        start_s = self.last_end_s if follows else max(scheduled_s, self.last_end_s)
        self.last_end_s = end_s
        row = [round(start_s, 6), round(end_s, 6), prefills, new, cached, pairs, decodes, attended]
        own: dict[str, Any] = {}
        if own_s is not None:
            own = {"own": [round(s, 6) for s in own_s], "used_s": round(time.thread_time(), 6)}
            own["waited"] = int(self.has_waited)
        self.has_waited = False
        self._write({"step": row} | own)

    def token(self, name: str, tokens: int, now_s: float) -> None:
        if request := self.requests.get(name):
            request.token_s += [round(now_s, 6)] * tokens

    def finished(self, name: str) -> None:
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
        self.requests.pop(name, None)
        self.has_waited = self.has_waited or not self.requests

    def _write(self, line: Mapping[str, Any]) -> None:
        self.lines += _line(line)
        if len(self.lines) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait. Those that cannot be written are lost."""
        try:
            if self.file is None:
                self.file = self.path.open("ab", buffering=0)
            written = self.file.write(self.lines)
            del self.lines[:written]
            self.written_bytes += written
            if self.most_bytes and not self.lines and self.written_bytes >= self.most_bytes // 2:
                self.file.close()
                self.file, self.written_bytes = None, 0
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self.lines[:] = self.head
        except OSError:
            self.lines[:] = b"\n"

    def close(self) -> None:
        """Write the remaining lines and close the file; also called when the process ends."""
        atexit.unregister(self.close)
        self.flush()
        if self.file is not None:
            self.file.close()
            self.file = None


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def hook_vllm(path: Path, *, with_cpu: bool, most_bytes: int = 0) -> None:
    """Have every engine core of this process write to `path` (vLLM 0.26 to 0.33, engine v1)."""
    from vllm import __version__
    from vllm.v1.engine.core import EngineCore

    start = EngineCore.__init__

    def started(core: Any, *args: Any, **kwargs: Any) -> None:
        start(core, *args, **kwargs)
        if with_cpu and core.vllm_config.kv_transfer_config is not None:
            _let_pollers_wait()
        log = StepLog(path, most_bytes)
        log.runs(__version__, async_scheduling=bool(core.vllm_config.scheduler_config.async_scheduling))
        hook_core(core, log, with_cpu=with_cpu)

    EngineCore.__init__ = started


def _let_pollers_wait() -> None:
    """Give the engine's core to its own thread first. NIXL's threads, which Python does not know, poll on the
    same core without a pause and took half of it.
    """
    ours = {thread.native_id for thread in threading.enumerate()}
    for task in Path("/proc/self/task").glob("*"):  # The directory exists on Linux alone.
        if int(task.name) not in ours:
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), 19)


def _own_clock() -> Callable[[], float]:
    """A clock of the calling thread: seconds in which it did not wait for a core, as Linux counts them; on
    other systems its CPU seconds.
    """
    file = Path("/proc/thread-self/schedstat")
    descriptors: dict[int, int] = {}

    def clock() -> float:
        thread = threading.get_ident()
        if thread not in descriptors:
            descriptors[thread] = os.open(file, os.O_RDONLY)
        return time.monotonic() - int(os.pread(descriptors[thread], 80, 0).split()[1]) / 1e9

    return clock if file.exists() else time.thread_time


def hook_core(core: Any, log: StepLog, *, with_cpu: bool) -> None:
    """Have one engine core write to `log`. A request counts as queued when the core's process receives it.
    Its scheduler learns of it only after the step under way, and that wait is part of the request's time.
    """
    scheduler, receive = core.scheduler, core.preprocess_add_request
    add, schedule, update = scheduler.add_request, scheduler.schedule, scheduler.update_from_output
    finish = scheduler.finish_requests
    planned: dict[int, tuple[float, float, list[tuple[str, int, int]]]] = {}
    received_s: dict[str, float] = {}
    own_clock = _own_clock()

    def received(request: Any, *args: Any, **kwargs: Any) -> Any:
        received_s[request.request_id] = time.monotonic()
        return receive(request, *args, **kwargs)

    def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        queued_s = received_s.pop(request.request_id, time.monotonic())
        log.queued(request.request_id, request.num_prompt_tokens, queued_s)
        return add(request, *args, **kwargs)

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        now_s, own_s = time.monotonic(), own_clock()
        output = schedule(*args, **kwargs)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for name, tokens in computed.items():
            log.scheduled(name, now_s, tokens)
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name in getattr(output, "preempted_req_ids", None) or ():
            log.preempted(name)
        if output.total_num_scheduled_tokens:
            chunks = [(name, n, computed[name]) for name, n in output.num_scheduled_tokens.items()]
            planned[id(output)] = now_s, own_s, chunks
        else:  # All requests wait for KV from other workers.
            log.has_waited = True
        return output

    def updated(output: Any, *args: Any, **kwargs: Any) -> Any:
        now_s, own_s = time.monotonic(), own_clock()
        results = update(output, *args, **kwargs)
        if step_plan := planned.pop(id(output), None):
            log.step(step_plan[0], now_s, step_plan[2], (step_plan[1], own_s) if with_cpu else None)
        for result in results.values():
            for one in result.outputs:
                log.token(one.request_id, len(one.new_token_ids), now_s)
                if one.finish_reason is not None:
                    log.finished(one.request_id)
        return results

    def finished(names: Any, *args: Any, **kwargs: Any) -> Any:
        for name in [names] if isinstance(names, str) else names or ():
            log.forget(name)
        return finish(names, *args, **kwargs)

    core.preprocess_add_request = received
    scheduler.add_request, scheduler.schedule = add_request, scheduled
    scheduler.update_from_output, scheduler.finish_requests = updated, finished
