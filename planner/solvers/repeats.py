"""How often a fleet keeps its SLO where chance has a hand, and how many runs it takes to say so.

Wald's sequential probability ratio test (Annals of Mathematical Statistics 16, 1945, 117-186), on the share p
of runs that keep the SLO. It decides between  p <= p0 = 90 %  and  p >= p1 = 99 %:  after k of n runs kept

    L = (p1 / p0)^k ((1 - p1) / (1 - p0))^(n - k)

p <= p0 is rejected at L >= 1 / 0.05, p >= p1 at L <= 0.05. Each is rejected wrongly in 5 % of cases at most,
however often one looks (Ville's inequality). 32 kept runs in a row decide, one missed run makes it 57, two of
the first 32 decide against. A figure's interval is Student's, 95 %, for its mean over the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:  # A document of runs is read without the simulator, which takes two seconds to import.
    from planner.simulator.slo_verdict import Verdict

CONFIDENCE_FRAC = 0.95

FEW_FRAC, MOST_FRAC = 0.90, 0.99  # p0, p1

Decision = Literal["holds", "fails", "open"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure over runs: mean, half its interval's width, extremes; NaN unless all are finite."""

    mean: float
    half: float
    least: float
    most: float


def interval(values: Sequence[float | None]) -> Interval:
    """mean +- t s / sqrt(n), s the sample's deviation, t Student's with n - 1 degrees of freedom."""
    seen = np.array([math.nan if value is None else value for value in values], dtype=float)
    n = len(seen)
    from scipy.special import stdtrit  # here: a fifth of a second, for every command

    t = float(stdtrit(n - 1, 0.5 + CONFIDENCE_FRAC / 2)) if n > 1 else math.nan
    with np.errstate(invalid="ignore"):  # infinite where no percentile exists
        deviation = float(seen.std(ddof=1)) if n > 1 else math.nan
    return Interval(float(seen.mean()), t * deviation / math.sqrt(n), float(seen.min()), float(seen.max()))


def decision(kept: int, runs: int, few_frac: float = FEW_FRAC, most_frac: float = MOST_FRAC) -> Decision:
    """What `kept` of `runs` decide between p0 = `few_frac` and p1 = `most_frac`: "holds" rejects p <= p0,
    "fails" rejects p >= p1.
    """
    likelihood = kept * math.log(most_frac / few_frac)
    likelihood += (runs - kept) * math.log((1 - most_frac) / (1 - few_frac))
    sure = math.log(1 / (1 - CONFIDENCE_FRAC))
    return "holds" if likelihood >= sure else "fails" if likelihood <= -sure else "open"


@dataclass(frozen=True, slots=True)
class Repeats:
    """Runs of one fleet, each with its own luck, until they decided or there were enough of them.

    `limits` are the SLO's percentiles [s] over the runs, by the limit's name. `after_losses`: in a run the
    SLO is kept with all workers and after the losses to survive; the figures are with all workers.
    """

    what: str  # what is drawn anew: "other-draws" of the traffic, "histories" of interruptions
    runs: int
    kept: int
    decision: Decision
    limits: dict[str, Interval]
    attainment_frac: Interval
    after_losses: bool = False


def until_sure(
    what: str,
    run: Callable[[int], tuple[bool, Verdict]],
    most: int,
    goes_on: Callable[[], bool] = lambda: True,
) -> Repeats:
    """Runs 0, 1, ... until they decide, `most` of them, one at least and others while it `goes_on`.

    `run` says whether the SLO is kept, and how. The test may be stopped at any time.
    """
    kept: list[bool] = []
    verdicts: list[Verdict] = []
    while len(kept) < most and decision(sum(kept), len(kept)) == "open" and (not kept or goes_on()):
        holds, verdict = run(len(kept))
        kept.append(holds)
        verdicts.append(verdict)
    return Repeats(
        what,
        len(kept),
        sum(kept),
        decision(sum(kept), len(kept)),
        {
            line.limit.name: interval([verdict.lines[i].value_s for verdict in verdicts])
            for i, line in enumerate(verdicts[0].lines)
        },
        interval([verdict.attainment_frac for verdict in verdicts]),
    )
