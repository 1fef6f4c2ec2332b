"""One step, timed: what a meter is asked, what one run of a step was, and what its repeats come to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from planner.errors import PlannerError
from planner.models.step_tables import ALL_REDUCE, StepShape, operator_column
from profiling.design import Limits
from profiling.power import LEAST_WINDOW_S, GpuPower, PowerSampler

SETTLED_FRAC = 0.03


class StepNotRunError(PlannerError):
    """The engine never ran a step as it was asked to."""


@dataclass(frozen=True, slots=True)
class TimedRun:
    """What one call of the step function ran. `model_s`: from the forward pass to tokens on the host."""

    # (Tokens scheduled, tokens computed before) of each request, sorted.
    requests: tuple[tuple[int, int], ...]
    t_s: float
    model_s: float


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One step, timed: medians over `repeats`, `spread_frac` their interquartile range over the median.

    `context_tokens` is the mean of the repeats', `discarded` counts runs that were not the step.
    `reference_s` is what the smallest step took right after it. `operators_s` are the operators' own seconds,
    timed apart, where the meter can.
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
        prompts, new, cached, decodes, context = self.step
        return {
            "n_prefill": prompts,
            "prefill_tokens": prompts * new,
            "cached_tokens": prompts * cached,
            "prefill_pairs": prompts * new * (cached + (new + 1) / 2),
            "n_decode": decodes,
            "kv_tokens": decodes * self.context_tokens,
            "t_s": digits(self.t_s + all_reduce_s),
            "context_tokens": context,
            "host_s": digits(self.host_s),
            "repeats": self.repeats,
            "spread_frac": round(self.spread_frac, 4),
            "reference_s": digits(self.reference_s),
            "spent_s": round(self.spent_s, 4),
            "all_reduce_s": digits(all_reduce_s),
            "power_w": "" if self.power_w is None else round(self.power_w, 1),
            "peak_power_w": "" if self.peak_power_w is None else round(self.peak_power_w, 1),
            **self._operators(all_reduce_s),
        }

    def _operators(self, all_reduce_s: float) -> dict[str, float]:
        """Columns of the operators, the collective among them; none where the step was timed whole."""
        if not self.operators_s:
            return {}
        seconds = {**self.operators_s, ALL_REDUCE: all_reduce_s}
        return {operator_column(name): digits(t_s) for name, t_s in seconds.items()}


class StepMeter(Protocol):
    """What times steps: a vLLM engine, or torch operators."""

    limits: Limits
    host_is: str
    operators: tuple[str, ...]  # Operators that it times alone too.

    def measure(self, step: StepShape, *, quick: bool = False) -> StepMeasurement: ...

    def close(self) -> None: ...


@dataclass
class StepRepeats:
    """The runs of one step: how many are enough, which were not the step, and their median.

    `quick` is for the reference: three to five runs. With a `gpu` there are more, for its power counters.
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
            self.gpu, self.most = None, 5
        elif self.gpu is not None:
            self.most = 25
        self.power = PowerSampler(self.gpu)

    def more(self) -> bool:
        if len(self.runs) >= self.most or self.discarded > 5:
            return False
        if len(self.runs) < self.least:
            return time.monotonic() - self.start_s < 3 * self.seconds or not self.runs
        if time.monotonic() - self.start_s > self.seconds:
            return False
        timed_s = sum(run.t_s for run in self.runs)
        return self.spread_frac() > SETTLED_FRAC or (self.gpu is not None and timed_s < 1.2 * LEAST_WINDOW_S)

    def add(self, ran: TimedRun, wanted: list[tuple[int, int]], context: float) -> None:
        """Keep the run if it was the step, request by request."""
        if list(ran.requests) == sorted(wanted):
            self.runs.append(ran)
            self.contexts.append(context)
        else:
            self.discarded += 1

    def spread_frac(self) -> float:
        t_s = np.array([run.t_s for run in self.runs])
        low, middle, high = np.quantile(t_s, [0.25, 0.5, 0.75])
        return float((high - low) / middle)

    def result(self) -> StepMeasurement:
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


def digits(number: float) -> float:
    return float(f"{number:.6g}")
