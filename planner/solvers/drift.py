"""Whether a mean has left a band, window by window, with a bound on false alarms: an e-detector.

Data   x_t  how far the mean of window t lies beyond the band's edge, relative to it; <= 0 in expectation
            while the mean is within
       v_t  variance of x_t, long-run: neighbours may be correlated
       k    sizes of a drift that are looked for, in standard deviations of a window
       z_t  = x_t / sqrt(v_t), between -CLIP and CLIP: one freak window is no drift

  L_t(k)  = exp(k z_t - k^2 / 2)                    mean <= 1 within the band
  M_t(k)  = L_t(k) (M_{t-1}(k) + 1)                 Shiryaev and Roberts' sum over all beginnings
  alarm     where the mean of M_t over k reaches c

Within the band the mean of M_t is at most t, and the most of M up to window n reaches c with probability
n / c at most (Doob), so c = n / alpha keeps the chance of a false alarm in n windows below alpha. That is
exact for uncorrelated windows with tails no heavier than Gauss's, and approximate else, over times longer
than their correlation: benchmarks/watch.py counts false alarms on recorded bursts.

Shin, Ramdas and Rinaldo, E-detectors: a nonparametric framework for sequential change detection, New England
Journal of Statistics in Data Science 2 (2024), arXiv:2203.03532, with their sub-Gaussian increments; clipped
after Huber, Robust Statistics (1981).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SIZES_SIGMA = (0.2, 0.5, 1.0)  # The values of k in the formula.
CLIP_SIGMA = 3.0  # No window counts as farther from the edge than this.
# A drift is over when its log evidence has fallen this far below its most: 1000 to 1 against it.
OVER_AFTER_FALL = math.log(1000.0)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A drift, in numbers of windows: the likeliest first one, the one in which it was noticed, and the one
    after its last, None while it lasts.
    """

    began: int
    noticed: int
    ended: int | None


def find_alarms(beyond_frac: Floats, variance: Floats, *, threshold: float) -> tuple[Alarm, ...]:
    """The model above; a window with infinite variance, or with NaN, says nothing.

    `beyond_frac` x and `variance` v are (n,); `threshold` is c. A drift is over once the evidence for the
    size k with the most evidence has fallen by OVER_AFTER_FALL; the next drift is looked for from there on.
    """
    evidence = log_evidence(beyond_frac, variance)  # (n, K)
    sizes = evidence.shape[1]
    alarm_list: list[Alarm] = []
    start = 0
    while (noticed := _noticed(evidence[start:], math.log(threshold) + math.log(sizes))) is not None:
        k, noticed_at = noticed
        # The likeliest beginning is where the summed evidence was lowest: from there it rose most.
        summed = np.append(0.0, np.cumsum(evidence[start : start + noticed_at + 1, k]))
        began = start + int(np.argmin(summed[:-1]))
        sums = np.cumsum(evidence[began:], axis=0)
        upto_notice = start + noticed_at + 1 - began
        evidence_of_size = sums[:, int(np.argmax(sums[upto_notice - 1]))]
        most = np.maximum.accumulate(evidence_of_size)
        has_fallen = most - evidence_of_size >= OVER_AFTER_FALL
        over = np.flatnonzero(has_fallen & (np.arange(len(most)) >= upto_notice))
        if not over.size:
            alarm_list.append(Alarm(began, start + noticed_at, None))
            break
        ended = began + int(np.argmax(evidence_of_size[: over[0]])) + 1
        alarm_list.append(Alarm(began, start + noticed_at, ended))
        start = began + int(over[0]) + 1
    return tuple(alarm_list)


def _noticed(evidence: Floats, log_c: float) -> tuple[int, int] | None:
    """The first window in which the sum of M over the sizes reaches c, after the index of the size with the
    largest M in it; None if there is no such window.
    """
    log_m = np.full(evidence.shape[1], -np.inf)
    for t, row in enumerate(evidence):
        log_m = row + np.logaddexp(log_m, 0.0)
        if float(np.logaddexp.reduce(log_m)) >= log_c:
            return int(np.argmax(log_m)), t
    return None


def log_evidence(beyond_frac: Floats, variance: Floats) -> Floats:
    """log L (n, D) per window and size of drift."""
    x, v = np.asarray(beyond_frac, float)[:, None], np.asarray(variance, float)[:, None]
    is_known = np.isfinite(x) & np.isfinite(v) & (v > 0)
    z = np.clip(np.where(is_known, x, 0.0) / np.sqrt(np.where(is_known, v, 1.0)), -CLIP_SIGMA, CLIP_SIGMA)
    size = np.array(SIZES_SIGMA)
    return np.asarray(np.where(is_known, size * z - size * size / 2, 0.0))
