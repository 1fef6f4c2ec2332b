"""Reads the step logs that engines wrote (planner/runtime/step_log.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.models.step_tables import COLUMNS

# The numbers in a step's line of the log: its times, and its load (planner/models/step_tables.py says what
# the columns mean). The last of COLUMNS, the step's duration `t_s`, is not logged: it follows from the times.
STEP_COLUMNS = ("start_s", "end_s", *COLUMNS[:-1])
# Logged only on a CPU, where the engine's own thread computes the steps (step_log.py):
#   own_start_s, own_end_s   the thread's own clock at the start and the end of the step; this clock stands
#                            still while the thread waits for a core
#   used_s                   the thread's CPU seconds so far, which planner/runtime/served.py reads
#   waited                   1 if the engine had no work before the step
OWN_COLUMNS = ("own_start_s", "own_end_s", "used_s", "waited")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as its engine saw it, with times of CLOCK_MONOTONIC.

    `token_s` has the time of each output token. `cached_tokens` are the tokens of the prompt that were found
    in the prefix cache.
    """

    queued_s: float
    scheduled_s: float
    token_s: npt.NDArray[np.float64]
    preemptions: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineLog:
    """All that one worker wrote.

    `steps` has a row for each step, in order of time, with STEP_COLUMNS, OWN_COLUMNS (NaN where they were not
    logged) and the duration `t_s`. `requests` are by their id. `engine` has the engine's version and whether
    it schedules asynchronously; it is empty if the log lacks them.
    """

    steps: pd.DataFrame
    requests: Mapping[str, EngineRequest]
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_own_clock(self) -> bool:
        """Whether every step has its times on the thread's own clock (OWN_COLUMNS)."""
        return bool(self.steps.own_end_s.notna().all())

    def on_its_own_clock(self, from_s: float) -> tuple[EngineLog, float]:
        """This log from `from_s` on, with its times converted to a clock that stops while other processes
        have the engine's core. Returns the log and the converted `from_s`, which is 0.

        While the engine has no work, the clock runs as the wall clock does; otherwise it runs while the
        engine's thread has a core. The clock's time is known at the start and the end of every step, and
        interpolated linearly between these.
        """
        steps = self.steps[self.steps.start_s >= from_s]
        wall_s = np.column_stack([steps.start_s, steps.end_s]).ravel()
        # The time from the end of the step before to the start of each step, on both clocks.
        own_gap_s = steps.own_start_s - steps.own_end_s.shift(fill_value=np.nan)
        wall_gap_s = steps.start_s - steps.end_s.shift(fill_value=from_s)
        # The gap of the wall clock is taken where the engine had no work, and for the first step, which has
        # no step before. It is also taken across a restart, because the clock of the new engine's thread has
        # nothing to do with the old one: the first step after it has waited = 1, and where the own clock is
        # CPU seconds (not on Linux) its gap is negative.
        gap_s = np.where((steps.waited == 1) | own_gap_s.isna() | (own_gap_s < 0), wall_gap_s, own_gap_s)
        own_s = np.cumsum(np.column_stack([gap_s, steps.own_end_s - steps.own_start_s]).ravel())
        # `wall_s` and `own_s` become the same moments on both clocks: `from_s`, then each step's ends.
        wall_s, own_s = np.r_[from_s, wall_s], np.r_[0.0, own_s]

        def to_own(times_s: npt.ArrayLike) -> npt.NDArray[np.float64]:
            """Convert times of the wall clock."""
            at_s = np.asarray(times_s, dtype=float)
            # np.interp gives 0 before `from_s`; there the clock is to run as the wall clock does, which the
            # second term adds. After the last step, np.interp keeps the time of that step's end.
            return np.asarray(np.interp(at_s, wall_s, own_s) + np.minimum(at_s - from_s, 0.0))

        requests = {
            name: replace(
                request,
                queued_s=float(to_own(request.queued_s)),
                scheduled_s=float(to_own(request.scheduled_s)),
                token_s=to_own(request.token_s),
            )
            for name, request in self.requests.items()
        }
        table = steps.assign(start_s=to_own(steps.start_s), end_s=to_own(steps.end_s))
        return EngineLog(table.assign(t_s=table.end_s - table.start_s), requests, self.engine), 0.0


def _own_columns(row: Mapping[str, Any]) -> tuple[float, ...]:
    """The values of OWN_COLUMNS in a step's line of the log; NaN if the line lacks them."""
    if "own" not in row:
        return (np.nan,) * len(OWN_COLUMNS)
    return (*row["own"], row["used_s"], row["waited"])


def read_step_logs(paths: Iterable[Path]) -> EngineLog:
    """Read the logs of one worker, which wrote a file each time it was started, as one log.

    Lines that are not JSON, such as one that a kill cut off, are left out. The last line that
    describes the engine is kept.
    """
    steps: list[list[float]] = []
    requests: dict[str, EngineRequest] = {}
    engine: Mapping[str, Any] = {}
    for path in sorted(paths):
        for line in path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if "step" in row:
                steps.append([*row["step"], *_own_columns(row)])
            elif "engine" in row:
                engine = row["engine"]
            else:
                requests[row["request"]] = EngineRequest(
                    queued_s=row["queued_s"],
                    scheduled_s=row["scheduled_s"],
                    token_s=np.array(row["token_s"]),
                    preemptions=row["preemptions"],
                    cached_tokens=row.get("cached_tokens", 0),
                )
    table = pd.DataFrame(steps, columns=[*STEP_COLUMNS, *OWN_COLUMNS]).sort_values(
        "start_s", ignore_index=True
    )
    table["t_s"] = table.end_s - table.start_s
    return EngineLog(table, requests, engine)
