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

# The columns of a step in the log: its times and its load, which is n_prefill, prefill_tokens, cached_tokens,
# prefill_pairs, n_decode, kv_tokens. The last of COLUMNS, `t_s`, follows from the times.
STEP_COLUMNS = ("start_s", "end_s", *COLUMNS[:-1])
# Logged on a CPU, where the engine's own thread computes the steps (step_log.py):
#   own_start_s, own_end_s   the thread's clock at the begin and end of the step; it stands still while the
#                            thread waits for a core
#   used_s                   the thread's CPU seconds so far (for served.py)
#   waited                   1 if the engine had no work before the step
OWN_COLUMNS = ("own_start_s", "own_end_s", "used_s", "waited")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as its engine saw it; times are CLOCK_MONOTONIC."""

    queued_s: float
    scheduled_s: float
    token_s: npt.NDArray[np.float64]
    preemptions: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineLog:
    """All that one worker wrote.

    `steps` has STEP_COLUMNS, OWN_COLUMNS (NaN if the engine's thread does not compute) and `t_s`, in order of
    time. `engine` has its version and whether it schedules asynchronously; empty if the log lacks them.
    """

    steps: pd.DataFrame
    requests: Mapping[str, EngineRequest]
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_own_clock(self) -> bool:
        """Whether every step has its time on the clock that runs only while the engine has a core."""
        return bool(self.steps.own_end_s.notna().all())

    def on_its_own_clock(self, from_s: float) -> tuple[EngineLog, float]:
        """This log from `from_s` on, on a clock that stops while other processes have the engine's core; and
        what this clock shows at `from_s`, 0.

        While the engine has no work, the clock runs as the wall clock does; otherwise it runs while the
        engine's thread has a core. The log gives its time at the begin and end of steps, between which it
        runs evenly.
        """
        steps = self.steps[self.steps.start_s >= from_s]
        wall_s = np.column_stack([steps.start_s, steps.end_s]).ravel()
        between_s = steps.own_start_s - steps.own_end_s.shift(fill_value=np.nan)
        idle_s = steps.start_s - steps.end_s.shift(fill_value=from_s)
        # The time of a restart counts as idle, because the new engine's thread has a clock of its own: its
        # first step has waited = 1, and where the clock is CPU seconds (not on Linux) the gap is negative.
        before_s = np.where((steps.waited == 1) | between_s.isna() | (between_s < 0), idle_s, between_s)
        own_s = np.cumsum(np.column_stack([before_s, steps.own_end_s - steps.own_start_s]).ravel())
        # Now both have the times of `from_s` and of the begin and end of each step, one after the other.
        wall_s, own_s = np.r_[from_s, wall_s], np.r_[0.0, own_s]

        def to_own(times_s: npt.ArrayLike) -> npt.NDArray[np.float64]:
            """Times on the wall clock as times on the clock that stops while others have the core."""
            at_s = np.asarray(times_s, dtype=float)
            # Before `from_s`, where interp gives 0, the clock runs as the wall clock does. It stops at the
            # end of the last step.
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
    """OWN_COLUMNS of a step's line; NaN if the line lacks them."""
    if "own" not in row:
        return (np.nan,) * len(OWN_COLUMNS)
    return (*row["own"], row["used_s"], row["waited"])


def read_step_logs(paths: Iterable[Path]) -> EngineLog:
    """The logs of one worker, one for each start. Lines that are not JSON, such as one that a kill cut off,
    are left out.
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
