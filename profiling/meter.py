"""Timing of one engine step: the interface of a meter (`StepMeter`), one run of a step (`TimedRun`), all runs
of the step (`StepRepeats`) and their medians (`StepMeasurement`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from planner.errors import PlannerError
from planner.models.step_tables import ALL_REDUCE, COLUMNS, StepShape, operator_column
from profiling.design import StepLimits
from profiling.power_sampling import LEAST_WINDOW_S, GpuPower, PowerSampler

SETTLED_FRAC = 0.03  # Times have settled if their interquartile range is at most this share of the median.
MOST_DISCARDED = 5  # After more runs that were another step the step is given up.
QUICK_REPEATS = 5  # The most runs of the reference, few because it is timed after every step (measure.py).
POWER_REPEATS = 25  # The most runs if power is read: short steps need many to fill LEAST_WINDOW_S.


class StepNotRunError(PlannerError):
    """The engine never ran a step as it was asked to."""


@dataclass(frozen=True, slots=True)
class TimedRun:
    """What one call of the engine's step function ran, and its seconds: `t_s` of the call, `model_s` of its
    part from the start of the forward pass to the tokens on the host.
    """

    # (Tokens scheduled, tokens computed before) of each request, sorted.
    requests: tuple[tuple[int, int], ...]
    t_s: float
    model_s: float


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """The times of one step: medians over `repeats` runs of `t_s` and of the host's part `host_s`;
    `spread_frac` is the interquartile range of `t_s` over its median, `spent_s` what measuring took.

    `context_tokens` is the decodes' mean context over the runs. `discarded` counts runs that were another
    step. `reference_s` is the time of the smallest step right after this one. `operators_s` are the
    operators' own seconds, timed apart, where the meter can; else empty.
    """

    step: StepShape
    t_s: float
    host_s: float
    repeats: int
    spread_frac: float
    spent_s: float
    context_tokens: float = 0.0
    discarded: int = 0
    reference_s: float = 0.0
    power_w: float | None = None
    peak_power_w: float | None = None
    operators_s: Mapping[str, float] = field(default_factory=dict)

    def row(self, all_reduce_s: float = 0.0) -> dict[str, float | int | str]:
        """The row of a step table (`planner.models.step_tables`), with all-reduces added to the time."""
        return {
            **dict(zip(COLUMNS, self.step.column_sums, strict=False)),  # All but the last, `t_s`.
            # The context that the engine had, which may differ from the one asked for.
            "kv_tokens": self.step.decodes * self.context_tokens,
            "t_s": six_digits(self.t_s + all_reduce_s),
            "context_tokens": self.step.context,
            "host_s": six_digits(self.host_s),
            "repeats": self.repeats,
            "spread_frac": round(self.spread_frac, 4),
            "reference_s": six_digits(self.reference_s),
            "spent_s": round(self.spent_s, 4),
            "all_reduce_s": six_digits(all_reduce_s),
            "power_w": "" if self.power_w is None else round(self.power_w, 1),
            "peak_power_w": "" if self.peak_power_w is None else round(self.peak_power_w, 1),
            **self._operators(all_reduce_s),
        }

    def _operators(self, all_reduce_s: float) -> dict[str, float]:
        """Columns of the operators and of all-reduces; none where no operator was timed alone."""
        if not self.operators_s:
            return {}
        seconds = {**self.operators_s, ALL_REDUCE: all_reduce_s}
        return {operator_column(name): six_digits(t_s) for name, t_s in seconds.items()}


class StepMeter(Protocol):
    """What times steps: a vLLM engine, or torch operators."""

    limits: StepLimits
    host_s_meaning: str  # How `host_s` was measured, for the header of the table.
    operators: tuple[str, ...]  # Operators that it times alone too.

    def measure(self, step: StepShape, *, quick: bool = False) -> StepMeasurement: ...

    def close(self) -> None: ...


@dataclass
class StepRepeats:
    """The runs of one step: `least` to `most` of them, until their times settle or `seconds` are over. These
    limits were set by hand. `quick` is for the reference: at most QUICK_REPEATS. With a `gpu`, whose power is
    then read: at most POWER_REPEATS.
    """

    step: StepShape
    gpu: GpuPower | None = None
    quick: bool = False
    least: int = 3
    most: int = 9
    seconds: float = 10.0
    runs: list[TimedRun] = field(default_factory=list)
    contexts: list[float] = field(default_factory=list)
    discarded: int = 0

    def __post_init__(self) -> None:
        self.start_s = time.monotonic()
        if self.quick:
            self.gpu, self.most = None, QUICK_REPEATS
        elif self.gpu is not None:
            self.most = POWER_REPEATS
        self.power = PowerSampler(self.gpu)

    def needs_more(self) -> bool:
        """Whether the step should be run once more."""
        if len(self.runs) >= self.most or self.discarded > MOST_DISCARDED:
            return False
        elapsed_s = time.monotonic() - self.start_s
        if len(self.runs) < self.least:
            # A slow step ends after three times `seconds`, but not without a run.
            return elapsed_s < 3 * self.seconds or not self.runs
        if elapsed_s > self.seconds:
            return False
        timed_s = sum(run.t_s for run in self.runs)
        # A fifth more than LEAST_WINDOW_S, as parts of the window lie between the runs.
        needs_power = self.gpu is not None and timed_s < 1.2 * LEAST_WINDOW_S
        return self.spread_frac() > SETTLED_FRAC or needs_power

    def add(self, run: TimedRun, wanted: list[tuple[int, int]], context: float) -> None:
        """Keep the run, whose decodes had a mean `context`, if it was of the `wanted` requests, each given as
        in `TimedRun`; else count it as discarded.
        """
        if list(run.requests) == sorted(wanted):
            self.runs.append(run)
            self.contexts.append(context)
        else:
            self.discarded += 1

    def spread_frac(self) -> float:
        """The interquartile range of the runs' times over their median."""
        t_s = np.array([run.t_s for run in self.runs])
        low, middle, high = np.quantile(t_s, [0.25, 0.5, 0.75])
        return float((high - low) / middle)

    def result(self) -> StepMeasurement:
        """The medians of the runs; raises StepNotRunError if there are none."""
        if not self.runs:
            raise StepNotRunError(f"the engine did not run the step {self.step} in {self.discarded} tries")
        return StepMeasurement(
            step=self.step,
            t_s=float(np.median([run.t_s for run in self.runs])),
            host_s=float(np.median([run.t_s - run.model_s for run in self.runs])),
            repeats=len(self.runs),
            spread_frac=self.spread_frac(),
            spent_s=time.monotonic() - self.start_s,
            context_tokens=float(np.mean(self.contexts)),
            discarded=self.discarded,
            power_w=self.power.mean_w,
            peak_power_w=self.power.peak_w,
        )


def six_digits(number: float) -> float:
    """The number with six significant digits, which is finer than any clock here."""
    return float(f"{number:.6g}")
