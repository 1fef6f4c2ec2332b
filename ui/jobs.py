"""Long work outside the app's scripts: a process (ui/worker.py) per job, killed if the job is cancelled or
the app ends.

A spare process stands by with the planner loaded, so that a job starts at once. A process that has answered
becomes the next spare one. A result is kept under a hash of all that it depends on, so that the same job is
not done twice.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from planner.files.checked_files import repository_dir
from ui.store import Store

FILE_KEYS = ("trace", "catalog")  # Keys of a request that name files, whose content a result depends on.
WITH_SPARE = True  # Tests go without the spare process.
Message = dict[str, Any]
# Messages of ui/worker.py: the last one of a job that succeeded, and the keys of those that come before.
DONE: Message = {"done": True}
PROGRESS_KEYS = {"phase", "search", "first"}
State = Literal["running", "done", "failed", "cancelled"]


@dataclass(slots=True)
class Job:
    """A job and how far it is. `key` names its result in the store. `search_progress` has the fields of
    plan_problem.SearchProgress, costs in `unit`; `first` is the fleet on paper, before that of production is
    found; `limit_s` is how long the job may take, if known. `guess` is the likely column map if the columns
    of a trace are not clear (UnsureError). `began_s` and `ended_s` are monotonic times.
    """

    kind: str
    key: str
    state: State = "running"
    phase: str = "starting"
    search_progress: dict[str, Any] | None = None
    first: dict[str, Any] | None = None
    error: str = ""
    limit_s: float | None = None
    unit: str = ""
    guess: str = ""
    is_our_bug: bool = False
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    process: subprocess.Popen[str] | None = None
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the job began, until its end if it has ended."""
        return (self.ended_s or time.monotonic()) - self.began_s

    def end(self, state: State, error: str = "", *, is_our_bug: bool = False) -> None:
        """End the job. Only the first call counts: a process may die later because it was cancelled."""
        if self.over.is_set():
            return
        self.state, self.error, self.is_our_bug = state, error, is_our_bug
        self.ended_s = time.monotonic()
        self.over.set()


class Jobs:
    """The jobs of all sessions. A place is a page or a part of one. In each session a place has one job at
    most: a new one cancels the one before.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._jobs: dict[tuple[str, str], Job] = {}
        self._spare: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        atexit.register(self.close)
        if WITH_SPARE:
            self._spare = _start_worker()

    def start(
        self,
        session: str,
        place: str,
        kind: str,
        request: dict[str, Any],
        when_kept: Callable[[Job], None] = lambda _: None,
    ) -> Job:
        """Start a job, or find its result. `when_kept` is called once the result is in the store, perhaps in
        another thread.
        """
        job = Job(kind, result_key(kind, request))
        self.cancel(session, place)
        self._jobs[session, place] = job
        document = self.store.document(job.key)
        # A result "best found" is computed again: the time limit ended its search, which may find more on a
        # less busy machine.
        if document is not None and document.get("status") != "best found":
            when_kept(job)
            job.end("done")
            return job
        with self._lock:
            spare, self._spare = self._spare, None
            is_ready = spare is not None and spare.poll() is None
            job.process = spare if is_ready else _start_worker()
        threading.Thread(target=self._run, args=(job, request, when_kept), daemon=True).start()
        return job

    def find(self, session: str, place: str) -> Job | None:
        """The latest job of a place, running or over."""
        return self._jobs.get((session, place))

    def forget(self, session: str, place: str) -> None:
        """Cancel the job of a place, so that the place has none."""
        self.cancel(session, place)
        self._jobs.pop((session, place), None)

    def cancel(self, session: str, place: str) -> None:
        """End a job's process, if it runs; returns when nothing of it is left."""
        job = self._jobs.get((session, place))
        if job is not None and not job.over.is_set():
            job.end("cancelled")
            with self._lock:  # A process that has answered no longer belongs to the job.
                if job.process is not None:
                    _kill(job.process)

    def close(self) -> None:
        """End all worker processes; jobs that still run are lost."""
        for session, place in list(self._jobs):
            self.cancel(session, place)
        with self._lock:
            self._is_closed = True
            if self._spare is not None:
                _kill(self._spare)
                _close(self._spare)
                self._spare = None

    def _run(self, job: Job, request: dict[str, Any], when_kept: Callable[[Job], None]) -> None:
        """Send the request to the job's process and read its messages; in a thread of its own."""
        process = job.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        answer: Message | None = None
        try:
            with TemporaryDirectory(
                prefix=".job-", dir=self.store.folder, ignore_cleanup_errors=True
            ) as folder:
                with suppress(BrokenPipeError):  # The process is gone, and then there is no answer either.
                    process.stdin.write(
                        json.dumps({"kind": job.kind, "request": request, "folder": folder}) + "\n"
                    )
                    process.stdin.flush()
                for line in process.stdout:
                    message: Message = json.loads(line)
                    if not message.keys() & PROGRESS_KEYS:
                        answer = message
                        break
                    job.phase = message.get("phase", job.phase)
                    job.search_progress = message.get("search", job.search_progress)
                    job.first = message.get("first", job.first)
                if answer == DONE and not job.over.is_set():
                    document = json.loads((Path(folder) / "document.json").read_text())
                    self.store.keep_result(job.key, document, (Path(folder) / "files.zip").read_bytes())
                    when_kept(job)
        except Exception as error:  # Without an answer the page would wait for ever.
            answer = {"crash": f"{type(error).__name__}: {error}"}
        finally:
            self._release(job, process, is_well=answer is not None and "crash" not in answer)
        if answer is None:
            code = process.poll()
            job.end("failed", f"the worker ended without an answer (exit code {code}); is the memory enough?")
        elif "crash" in answer:
            job.end("failed", answer["crash"], is_our_bug=True)
        elif "error" in answer:
            job.guess = answer.get("guess", "")
            job.end("failed", answer["error"])
        else:
            job.end("done")

    def _release(self, job: Job, process: subprocess.Popen[str], *, is_well: bool) -> None:
        """Keep a process that has answered as the spare one, or end it and start another."""
        with self._lock:
            job.process = None
            wants_spare = WITH_SPARE and self._spare is None and not self._is_closed
            if wants_spare and is_well and process.poll() is None:
                self._spare = process
                return
            _kill(process)
            _close(process)
            if wants_spare:
                self._spare = _start_worker()


def result_key(kind: str, request: dict[str, Any]) -> str:
    """Hash of a request, of the content of the files it names, and of our own code and catalog."""
    question = request.get("question", {})
    entries = [question, *(question.get("llms") or {}).values()]  # Each may name a config.json as its LLM.
    paths = [request.get(key) for key in FILE_KEYS] + [entry.get("llm") for entry in entries]
    content = {path: _content_digest(Path(path)) for path in paths if path}
    text = json.dumps([kind, request, content, _program_digest()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _content_digest(path: Path) -> str:
    """The hash of the content of a file, or of the catalogs or the LLM's config.json in a folder."""
    files = sorted([*path.rglob("*.yaml"), *path.glob("config.json")]) if path.is_dir() else [path]
    digests = [_file_digest(file, *_stamp(file)) for file in files if file.is_file()]
    return hashlib.sha256(repr(digests).encode()).hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    """The time of the last change [ns] and the size [bytes], by which a changed file is known."""
    return path.stat().st_mtime_ns, path.stat().st_size


@functools.lru_cache(maxsize=256)  # A file of another time or size is read again.
def _file_digest(path: Path, _changed_ns: int, _size: int) -> str:
    """A file's SHA-256; its time of change and size are only part of the cache's key."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@functools.cache
def _program_digest() -> str:
    """The hash of the paths, times and sizes of our code and catalog as they were at the first job."""
    package = Path(__file__).resolve().parent.parent
    # The pages, which are the rest of ui/, only draw what the worker has computed.
    code = [*(package / "planner").rglob("*.py"), package / "ui" / "worker.py"]
    catalogs = list(repository_dir("catalogs").rglob("*.yaml"))
    stamps = [(str(path), *_stamp(path)) for path in sorted(code + catalogs)]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()


def _start_worker() -> subprocess.Popen[str]:
    """Start a process for jobs. It leads a process group, so that its own processes can be killed too."""
    return subprocess.Popen(
        [sys.executable, "-m", "ui.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a worker and the processes that it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _close(process: subprocess.Popen[str]) -> None:
    """Close the pipes of a process that is over. Only the thread that reads from the process may do so."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # The pipe may be broken: its process has ended.
                pipe.close()
