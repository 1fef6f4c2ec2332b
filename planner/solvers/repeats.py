"""How often a fleet keeps its SLO when runs are random, and how many runs it takes to say so.

Wald's sequential probability ratio test (Annals of Mathematical Statistics 16, 1945, 117-186), on the share p
of runs that keep the SLO. It decides between  p <= p0 = 90 %  and  p >= p1 = 99 %:  after k of n runs kept

    L = (p1 / p0)^k ((1 - p1) / (1 - p0))^(n - k)

p <= p0 is rejected at L >= 1 / 0.05, p >= p1 at L <= 0.05. Each is rejected wrongly in at most 5 % of cases,
often, even if L is looked at after every run (Ville's inequality). 32 kept runs in a row decide that the SLO
holds; with one missed run it takes 57. Two misses among the first 32 decide against. The interval of a figure
is Student's, of 95 % confidence, for its mean over the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:  # A document of runs is read without the simulator, which takes two seconds to import.
    from planner.simulator.slo_verdict import Verdict

CONFIDENCE_FRAC = 0.95  # Of the intervals, and of the test: an error in at most 5 % of cases.
FEW_FRAC = 0.90  # p0 of the test.
MOST_FRAC = 0.99  # p1 of the test.

Decision = Literal["holds", "fails", "open"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure over runs: its mean, half the width of the mean's interval, its extremes. All are NaN unless
    the figure is finite in every run.
    """

    mean: float
    half: float  # Half the width of the mean's interval.
    least: float
    most: float


def interval(values: Sequence[float | None]) -> Interval:
    """mean +- t s / sqrt(n), with s the sample's deviation and t Student's for n - 1 degrees of freedom."""
    figures = np.array([math.nan if value is None else value for value in values], dtype=float)
    n = len(figures)
    from scipy.special import stdtrit  # Importing it takes 0.2 s, which most commands need not spend.

    t = float(stdtrit(n - 1, 0.5 + CONFIDENCE_FRAC / 2)) if n > 1 else math.nan
    with np.errstate(invalid="ignore"):  # A percentile that does not exist is infinite: inf - inf is NaN.
        deviation = float(figures.std(ddof=1)) if n > 1 else math.nan
    half = t * deviation / math.sqrt(n)
    return Interval(float(figures.mean()), half, float(figures.min()), float(figures.max()))


def decision(kept: int, runs: int, few_frac: float = FEW_FRAC, most_frac: float = MOST_FRAC) -> Decision:
    """What `kept` of `runs` decide between p0 = `few_frac` and p1 = `most_frac`: "holds" rejects p <= p0,
    "fails" rejects p >= p1.
    """
    log_likelihood = kept * math.log(most_frac / few_frac)
    log_likelihood += (runs - kept) * math.log((1 - most_frac) / (1 - few_frac))
    threshold = math.log(1 / (1 - CONFIDENCE_FRAC))
    if abs(log_likelihood) < threshold:
        return "open"
    return "holds" if log_likelihood > 0 else "fails"


@dataclass(frozen=True, slots=True)
class Repeats:
    """Runs of one fleet with random traffic or interruptions, until they decided or a limit on their number.

    `limits` are the SLO's percentiles [s] over the runs, by the limit's name. With `after_losses` a run
    counts as kept if the SLO holds with all workers and also after the losses to survive; the percentiles are
    those with all workers.
    """

    what: str  # "other-draws" of the traffic, or "histories" of interruptions: what differs between runs.
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
    """Call `run` with 0, 1, ... until the runs decide, there are `most_runs`, or `goes_on` is false. At least
    one run is made; the test stays valid wherever it is stopped.

    `run` returns whether the SLO is kept, and the verdict from which the figures are taken.
    """
    is_kept: list[bool] = []
    verdicts: list[Verdict] = []
    while (
        len(is_kept) < most_runs
        and decision(sum(is_kept), len(is_kept)) == "open"
        and (not is_kept or goes_on())
    ):
        holds, verdict = run(len(is_kept))
        is_kept.append(holds)
        verdicts.append(verdict)
    return Repeats(
        what,
        len(is_kept),
        sum(is_kept),
        decision(sum(is_kept), len(is_kept)),
        {
            line.limit.name: interval([verdict.lines[i].value_s for verdict in verdicts])
            for i, line in enumerate(verdicts[0].lines)
        },
        interval([verdict.attainment_frac for verdict in verdicts]),
    )
