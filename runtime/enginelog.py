"""Reads what engines wrote into their step logs (runtime/steplog.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.models.tables import COLUMNS

STEP_COLUMNS = ("start_s", "end_s", *COLUMNS[:-1])


@dataclass(frozen=True, slots=True)
class Served:
    """One request as its engine saw it; times are CLOCK_MONOTONIC."""

    queued_s: float
    scheduled_s: float
    token_s: npt.NDArray[np.float64]
    preemptions: int


@dataclass(frozen=True, slots=True)
class EngineLog:
    """All that one worker wrote. `steps` has STEP_COLUMNS and `t_s`, in order of time."""

    steps: pd.DataFrame
    requests: Mapping[str, Served]


def read_step_logs(paths: Iterable[Path]) -> EngineLog:
    """The logs of one worker, one per time it was started; a last line cut off by a kill is left out."""
    steps: list[list[float]] = []
    requests: dict[str, Served] = {}
    for path in sorted(paths):
        for line in path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if "step" in row:
                steps.append(row["step"])
            else:
                requests[row["request"]] = Served(
                    row["queued_s"], row["scheduled_s"], np.array(row["token_s"]), row["preemptions"]
                )
    table = pd.DataFrame(steps, columns=list(STEP_COLUMNS)).sort_values("start_s", ignore_index=True)
    table["t_s"] = table.end_s - table.start_s
    return EngineLog(table, requests)
