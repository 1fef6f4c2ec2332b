"""How often a fleet keeps its SLO when runs are random, and how many runs decide that.

Wald's sequential probability ratio test (Annals of Mathematical Statistics 16, 1945, 117-186), on the share p
of runs that keep the SLO. It decides between  p <= p0 = 90 %  and  p >= p1 = 99 %.  If k of n runs kept the
SLO, the likelihood ratio is

    L = (p1 / p0)^k ((1 - p1) / (1 - p0))^(n - k)

p <= p0 is rejected at L >= 1 / 0.05, p >= p1 at L <= 0.05. Each is rejected wrongly in at most 5 % of cases,
even if L is examined after every run (Ville's inequality). 32 kept runs in a row decide that the SLO holds;
with one missed run it takes 57 runs. Two misses among the first 18 runs decide that it fails.

Each simulated value, a percentile for instance, is given as its mean over the runs, with Student's interval
of 95 % confidence for that mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:  # A document of runs is read without the simulator, which takes two seconds to import.
    from planner.simulator.slo_verdict import Verdict

CONFIDENCE_FRAC = 0.95  # The confidence of the intervals and of the test.
FAILS_FRAC = 0.90  # p0: a fleet that keeps the SLO in at most this share of runs fails.
HOLDS_FRAC = 0.99  # p1: a fleet that keeps the SLO in at least this share of runs holds.

Decision = Literal["holds", "fails", "open"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A simulated value over runs, in its own unit: the mean with its confidence interval, and the extremes.

    The mean and its interval are NaN or infinite unless the value is finite in every run.
    """

    mean: float
    half_width: float  # Of the mean's interval.
    least: float
    most: float


def confidence_interval(values: Sequence[float | None]) -> Interval:
    """The interval mean +- t s / sqrt(n) of n values. s is the sample's standard deviation, and t Student's
    quantile for n - 1 degrees of freedom. A missing value (None) counts as NaN.
    """
    sample = np.array([math.nan if value is None else value for value in values], dtype=float)
    n = len(sample)
    from scipy.special import stdtrit  # Importing it takes 0.2 s, which most commands need not spend.

    t = float(stdtrit(n - 1, 0.5 + CONFIDENCE_FRAC / 2)) if n > 1 else math.nan
    with np.errstate(invalid="ignore"):  # A percentile that no request reaches is infinite: inf - inf is NaN.
        deviation = float(sample.std(ddof=1)) if n > 1 else math.nan
    half_width = t * deviation / math.sqrt(n)
    return Interval(float(sample.mean()), half_width, float(sample.min()), float(sample.max()))


def decide_sequentially(
    kept: int, runs: int, p0_frac: float = FAILS_FRAC, p1_frac: float = HOLDS_FRAC
) -> Decision:
    """What the test decides after `kept` of `runs` kept the SLO: "holds" rejects p <= p0, "fails" rejects
    p >= p1, "open" neither.
    """
    log_ratio = kept * math.log(p1_frac / p0_frac)  # The logarithm of L.
    log_ratio += (runs - kept) * math.log((1 - p1_frac) / (1 - p0_frac))
    threshold = math.log(1 / (1 - CONFIDENCE_FRAC))  # L >= 1 / 0.05 or L <= 0.05 decides.
    if abs(log_ratio) < threshold:
        return "open"
    return "holds" if log_ratio > 0 else "fails"


@dataclass(frozen=True, slots=True)
class Repeats:
    """The result of several runs of one fleet with random traffic or interruptions.

    `limits` are the SLO's percentiles [s] over the runs, by the limit's name. With `after_losses` a run
    counts as kept if the SLO holds with all workers and also after the losses to survive; the percentiles are
    those with all workers.
    """

    what: str  # What differs between runs: "other-draws" of the traffic, or "histories" of interruptions.
    runs: int
    kept: int
    decision: Decision
    limits: dict[str, Interval]
    attainment_frac: Interval
    after_losses: bool = False


def run_until_decided(
    what: str,
    run: Callable[[int], tuple[bool, Verdict]],
    most_runs: int,
    goes_on: Callable[[], bool] = lambda: True,
) -> Repeats:
    """Call `run` with 0, 1, ... until the test decides, `most_runs` are made, or `goes_on` returns False. At
    least one run is made. The test is valid whenever it is stopped.

    `run` returns whether the SLO is kept, and the verdict from which the figures are taken. `what` names what
    differs between the runs.
    """
    kept = 0
    verdicts: list[Verdict] = []
    while (
        len(verdicts) < most_runs
        and decide_sequentially(kept, len(verdicts)) == "open"
        and (not verdicts or goes_on())
    ):
        is_kept, verdict = run(len(verdicts))
        kept += is_kept
        verdicts.append(verdict)
    return Repeats(
        what,
        len(verdicts),
        kept,
        decide_sequentially(kept, len(verdicts)),
        {
            line.limit.name: confidence_interval([verdict.lines[i].value_s for verdict in verdicts])
            for i, line in enumerate(verdicts[0].lines)
        },
        confidence_interval([verdict.attainment_frac for verdict in verdicts]),
    )
