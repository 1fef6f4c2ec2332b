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

SIZES_SIGMA = (0.2, 0.5, 1.0)
CLIP_SIGMA = 3.0
ROOM = 3.0  # log: how far M may rise above the threshold, so that it falls soon after the drift has ended


@dataclass(frozen=True, slots=True)
class Alarm:
    """A drift: the window it began in by the likeliest account, the one it was noticed in, and the one
    after its last, None while it lasts.
    """

    began: int
    noticed: int
    ended: int | None


def alarms(beyond_frac: Floats, variance: Floats, *, threshold: float) -> tuple[Alarm, ...]:
    """The model above; a window with infinite variance, or with NaN, says nothing.

    `beyond_frac`, `variance` (n,); `threshold` is c. A drift ends where M has fallen below 1 again.
    """
    found: list[Alarm] = []
    evidence = log_evidence(beyond_frac, variance)  # (n, D)
    log_c = math.log(threshold)
    log_m = np.full(evidence.shape[1], -np.inf)
    began, is_on = 0, False
    for t, row in enumerate(evidence):
        log_m = np.minimum(row + np.logaddexp(log_m, 0.0), log_c + ROOM + math.log(len(row)))
        log_mean = float(np.logaddexp.reduce(log_m)) - math.log(len(row))
        if not is_on and log_mean >= log_c:
            is_on = True
            began = _began(evidence[: t + 1, int(np.argmax(log_m))], found[-1].ended if found else 0)
            found.append(Alarm(began, t, None))
        elif is_on and log_mean < 0.0:
            is_on = False
            last = found.pop()
            found.append(
                Alarm(last.began, last.noticed, _ended(evidence[last.noticed : t + 1]) + last.noticed)
            )
    return tuple(found)


def log_evidence(beyond_frac: Floats, variance: Floats) -> Floats:
    """log L (n, D) per window and size of drift."""
    x, v = np.asarray(beyond_frac, float)[:, None], np.asarray(variance, float)[:, None]
    says = np.isfinite(x) & np.isfinite(v) & (v > 0)
    z = np.clip(np.where(says, x, 0.0) / np.sqrt(np.where(says, v, 1.0)), -CLIP_SIGMA, CLIP_SIGMA)
    size = np.array(SIZES_SIGMA)
    return np.asarray(np.where(says, size * z - size * size / 2, 0.0))


def _began(log_l: Floats, since: int | None) -> int:
    """Where the sum of what follows is greatest."""
    sums = np.append(0.0, np.cumsum(log_l[since or 0 :]))
    return int(np.argmin(sums[:-1])) + (since or 0)


def _ended(evidence: Floats) -> int:
    """After the window up to which the sum is greatest, of the size that saw most."""
    sums = np.cumsum(evidence, axis=0)
    best = int(np.argmax(sums.max(axis=0)))
    return int(np.argmax(sums[:, best])) + 1
