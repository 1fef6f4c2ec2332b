"""Keeps the simulated verdicts of a search in a file, so that a run that was killed can be resumed.

A search simulates whether fleets keep an SLO on some traffic. The file keeps each verdict under a digest of
all that it depends on, with the number of requests that were simulated, because they advance the search's
clock (work_clock.py). A resumed run starts from the beginning, but takes these verdicts from the file;
therefore it ends with the same plan, byte for byte.

A run writes the file after FIRST_WRITE_S, and again every WRITE_EVERY_S, each time under a temporary name,
which is then changed to the file's name. A run that completes removes the file. The file belongs to one
question and one version of the code.
"""

import contextlib
import hashlib
import json
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from planner import __version__
from planner.domain import Slo
from planner.errors import InputError, PlannerError
from planner.files.checked_files import write_file
from planner.search.oracle.scenarios import Scenario, Scenarios
from planner.simulator.numba_compile import SOURCES
from planner.traffic.trace import Trace

FILE_NAME = "resume.json"
FIRST_WRITE_S = 300.0  # The file is first written after this time; a shorter run is repeated instead.
WRITE_EVERY_S = 60.0  # After that the file is written this often: what a killed run can lose.

TrafficKey = str | tuple[Scenarios, int]
"""The traffic of a simulation: the digest of a trace, or a scenario by its number."""

StoredVerdict = tuple[bool, int]
"""Whether the SLO is kept, and how many requests were simulated to decide that."""

VerdictKey = tuple[tuple[object, ...], Slo, TrafficKey]
"""What a verdict depends on: the setup (LLM, network, policies, step times and fleet), the SLO, and the
traffic.
"""

_digests: weakref.WeakKeyDictionary[Trace, str] = weakref.WeakKeyDictionary()


class VerdictFile:
    """A file with the simulated verdicts of one question, in the folder of its plan; safe for threads.

    In the file a verdict has a name, which is a digest of its key. Computing the digest takes longer than a
    short simulation, so `add` keeps verdicts without names until the file is written, and most runs end
    before the first writing. `look_up` computes names only if a file was loaded.
    """

    def __init__(self, folder: Path, question: str) -> None:
        """`question` is the digest of the question (`question_digest`)."""
        self.path, self.question = folder / FILE_NAME, question
        self.used_count = 0  # How often `look_up` found a verdict.
        self._known: dict[str, StoredVerdict] = {}
        self._unnamed: list[tuple[VerdictKey, StoredVerdict]] = []
        self._is_loaded = False
        # A writing is due WRITE_EVERY_S after the last one. With this time the first is due FIRST_WRITE_S
        # from now.
        self._written_s = time.monotonic() + FIRST_WRITE_S - WRITE_EVERY_S
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def load(self) -> None:
        """Read the file of an earlier run. Raises InputError if there is none, if it is damaged, or if it
        belongs to another question or version.
        """
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            question, rows = document["question"], document["known"]
            verdicts = {str(name): (bool(holds), int(seen)) for name, (holds, seen) in rows.items()}
        except OSError:
            raise InputError(
                f"--resume: there is no {self.path}; a run keeps it from {FIRST_WRITE_S / 60:g} minutes on, "
                "to its end, so run without --resume"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"--resume: {self.path} is damaged; run without --resume") from None
        if question != self.question:
            raise InputError(
                f"--resume: {self.path} is of another question, trace, seed or version of fleetplan; run "
                "without --resume, or name another folder with -o"
            )
        self._known, self._is_loaded = verdicts, True

    def look_up(self, setup: tuple[object, ...], traffic: Trace | Scenario, slo: Slo) -> StoredVerdict | None:
        """The verdict of the earlier run; None if no file was loaded, or if it lacks the verdict."""
        if not self._is_loaded or (name := verdict_name(setup, traffic, slo)) is None:
            return None
        with self._lock:
            verdict = self._known.get(name)
            self.used_count += verdict is not None
        return verdict

    def add(
        self, setup: tuple[object, ...], traffic: Trace | Scenario, slo: Slo, *, holds: bool, seen: int
    ) -> None:
        """Keep one more verdict, `seen` being the number of simulated requests, and write the file if that is
        due. If the file cannot be written, the next writing tries again.
        """
        with self._lock:
            self._unnamed.append(((setup, slo, _traffic_key(traffic)), (holds, seen)))
            if time.monotonic() < self._written_s + WRITE_EVERY_S:
                return
            self._written_s = time.monotonic()
        with self._writing:  # Threads write one after another: an older text must not replace a newer one.
            with self._lock:
                unnamed, self._unnamed = self._unnamed, []
            named = {_name_of(*key): verdict for key, verdict in unnamed}
            with self._lock:
                self._known |= {name: verdict for name, verdict in named.items() if name is not None}
                text = json.dumps({"question": self.question, "known": self._known})
            self._write(text)

    def _write(self, text: str) -> None:
        """Write the file; if that fails, the next writing is due WRITE_EVERY_S from now."""
        try:
            write_file(self.path, text)
        except PlannerError:
            self._written_s = time.monotonic()

    def remove(self) -> None:
        """Remove the file of a run that is complete. A file that cannot be removed does no harm."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def question_digest(document: Mapping[str, Any], trace: Trace, seed: int, *settings: object) -> str:
    """A digest of a question (its document and settings), its traffic, and this version of the code."""
    text = json.dumps(document, sort_keys=True, default=str)
    return _digest(__version__, SOURCES, text, trace_digest(trace), seed, settings)


def verdict_name(setup: tuple[object, ...], traffic: Trace | Scenario, slo: Slo) -> str | None:
    """The digest under which a verdict is kept; None if the `repr` of the setup does not tell it from others
    (`_is_incomplete`).
    """
    return _name_of(setup, slo, _traffic_key(traffic))


def _traffic_key(traffic: Trace | Scenario) -> TrafficKey:
    """What names a simulation's traffic without holding its requests in memory."""
    return (traffic.source, traffic.number) if isinstance(traffic, Scenario) else trace_digest(traffic)


def _name_of(setup: tuple[object, ...], slo: Slo, traffic: TrafficKey) -> str | None:
    """The name of a verdict as in `verdict_name`, where the traffic is given by its key."""
    text = repr((setup, slo))
    if _is_incomplete(text):
        return None
    return _digest(text, traffic if isinstance(traffic, str) else _scenario_digest(*traffic))


def _is_incomplete(text: str) -> bool:
    """Whether a `repr` shows an object only by its address, or abbreviates a NumPy array."""
    return " at 0x" in text or "..." in text


def _scenario_digest(scenarios: Scenarios, number: int) -> str:
    """A digest of what a scenario is drawn from, so that its requests need not be drawn. If `repr` does not
    show all of that, the digest is of the drawn requests.
    """
    if _is_incomplete(text := scenarios.text_for_digest()):
        return trace_digest(scenarios[number].trace)
    # No simulation reads `coarse_s`, so `trace_digest` leaves it out, but draws spread arrival times by it.
    return _digest(text, number, trace_digest(scenarios.trace), scenarios.trace.coarse_s)


def trace_digest(trace: Trace) -> str:
    """A digest of all columns of a trace that a simulation reads, computed once for each trace."""
    if (known_digest := _digests.get(trace)) is not None:
        return known_digest
    digest = hashlib.sha256(repr((trace.prefix_block_tokens, trace.tenants, trace.adapters)).encode())
    columns = (
        *(trace.arrival_s, trace.input_tokens, trace.output_tokens, trace.prefix_offsets, trace.prefix_ids),
        *(trace.tenant, trace.adapter, trace.after, trace.think_s, trace.image_tokens),
    )
    for column in columns:
        if column is None:
            digest.update(b"-")  # Marks the place of a missing column.
        elif column.strides == (0,):  # One value, broadcast to all requests.
            digest.update(repr((len(column), column[:1])).encode())
        else:
            digest.update(np.ascontiguousarray(column).data)
    _digests[trace] = digest.hexdigest()
    return _digests[trace]


def _digest(*parts: object) -> str:
    """A digest of the `repr` of some values: 128 bits, 32 hexadecimal digits."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
