"""Detects when the mean of a series leaves a band, window by window, with a bound on false alarms: an
e-detector. A drift is a time in which the true mean is outside of the band.

Data   x_t  how far the mean of window t lies beyond the band's edge, relative to the edge; its expectation
            is <= 0 while the true mean is within the band
       v_t  long-run variance of x_t, which accounts for correlated neighbours
       k    sizes of drift that are tested, K of them, in standard deviations of a window
       c    threshold of the alarm
       z_t  = x_t / sqrt(v_t), clipped to [-CLIP_SIGMA, CLIP_SIGMA], so that one extreme window raises no
            alarm

  L_t(k)  = exp(k z_t - k^2 / 2)                    its expectation is <= 1 within the band
  M_t(k)  = L_t(k) (M_{t-1}(k) + 1)                 Shiryaev and Roberts' sum over all beginnings of a drift
  M_t     = average of M_t(k) over the sizes k
  alarm     in the first window t in which M_t reaches c

Within the band the expectation of M_t is at most t. So the maximum of M up to window n reaches c with
probability at most n / c (Doob). With c = n / alpha the probability of a false alarm in n windows is at most
alpha. That is exact for uncorrelated windows with tails no heavier than Gauss's. Otherwise it is approximate,
over times longer than the correlation: benchmarks/watch.py counts false alarms on recorded bursts.

Shin, Ramdas and Rinaldo, E-detectors: a nonparametric framework for sequential change detection, New England
Journal of Statistics in Data Science 2 (2024), arXiv:2203.03532, with their sub-Gaussian increments; clipped
after Huber, Robust Statistics (1981).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# The values of k in the formula, and the most by which a window counts as beyond the edge, in standard
# deviations: both our choice. benchmarks/watch.py shows what they give on recorded bursts.
SIZES_SIGMA = (0.2, 0.5, 1.0)
CLIP_SIGMA = 3.0
# A drift is over when its log evidence (the sum of log L_t) has fallen so far below its maximum: odds of 1000
# to 1 against the drift.
OVER_AFTER_FALL = math.log(1000.0)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A drift, by the indices of windows: `began` is the likeliest first one, `noticed` the one in which the
    alarm was raised, and `ended` the one after the last, None while the drift lasts.
    """

    began: int
    noticed: int
    ended: int | None


def find_alarms(beyond_frac: Floats, variance: Floats, *, threshold: float) -> tuple[Alarm, ...]:
    """All drifts, by the model of the module docstring, with x = `beyond_frac` (n,), v = `variance` (n,) and
    c = `threshold`. A window with NaN, or a variance that is infinite or not above 0, is no evidence.

    A drift is over once the log evidence of its likeliest size k has fallen by OVER_AFTER_FALL. The search
    for the next drift begins there.
    """
    evidence = log_evidence(beyond_frac, variance)  # (n, K)
    log_sum_threshold = math.log(threshold) + math.log(evidence.shape[1])  # The sum is K times the average.
    alarms: list[Alarm] = []
    start = 0
    while (first_alarm := _first_alarm(evidence[start:], log_sum_threshold)) is not None:
        size, windows_before = first_alarm
        noticed = start + windows_before
        # The likeliest beginning is where the summed evidence was lowest: from there it rose most.
        summed = np.append(0.0, np.cumsum(evidence[start : noticed + 1, size]))
        began = start + int(np.argmin(summed[:-1]))
        sums = np.cumsum(evidence[began:], axis=0)
        windows_to_alarm = noticed + 1 - began
        # M sums over all beginnings of a drift. For this beginning alone another size may be likelier.
        likeliest_size = int(np.argmax(sums[windows_to_alarm - 1]))
        drift_evidence = sums[:, likeliest_size]
        highest = np.maximum.accumulate(drift_evidence)
        has_fallen = highest - drift_evidence >= OVER_AFTER_FALL
        # Windows after the alarm in which the evidence has fallen far enough; the first ends the drift.
        over = np.flatnonzero(has_fallen & (np.arange(len(highest)) >= windows_to_alarm))
        if not over.size:
            alarms.append(Alarm(began, noticed, None))
            break
        # The drift ended where its evidence was highest.
        ended = began + int(np.argmax(drift_evidence[: over[0]])) + 1
        alarms.append(Alarm(began, noticed, ended))
        start = began + int(over[0]) + 1
    return tuple(alarms)


def _first_alarm(evidence: Floats, log_sum_threshold: float) -> tuple[int, int] | None:
    """The first window in which the sum of M over the sizes reaches the threshold: the index of the size with
    the largest M, and how many windows come before. None if there is no such window.
    """
    log_m = np.full(evidence.shape[1], -np.inf)
    for t, row in enumerate(evidence):
        log_m = row + np.logaddexp(log_m, 0.0)
        if float(np.logaddexp.reduce(log_m)) >= log_sum_threshold:
            return int(np.argmax(log_m)), t
    return None


def log_evidence(beyond_frac: Floats, variance: Floats) -> Floats:
    """log L_t(k) of each window and each size of drift: (n, len(SIZES_SIGMA)). 0 for a window that is no
    evidence (`find_alarms`).
    """
    x, v = np.asarray(beyond_frac, float)[:, None], np.asarray(variance, float)[:, None]
    is_known = np.isfinite(x) & np.isfinite(v) & (v > 0)
    z = np.clip(np.where(is_known, x, 0.0) / np.sqrt(np.where(is_known, v, 1.0)), -CLIP_SIGMA, CLIP_SIGMA)
    size = np.array(SIZES_SIGMA)
    return np.asarray(np.where(is_known, size * z - size * size / 2, 0.0))
