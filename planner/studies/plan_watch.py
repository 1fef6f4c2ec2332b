"""Compares a deployment with its plan: what has drifted, since when, and how much traffic the plan carries.

The plan's traffic gives the normal levels of each quantity (rate, lengths, share missed by prefix caches) and
the scatter of windows around them; `solvers/drift.py` decides whether the live windows have left the levels.

A mean over a window with exposure e (seconds for a rate, requests for a length) has the relative variance
phi c^2 / e. Here c^2 is the relative variance of one request (1 / rate for a rate, as Poisson arrivals have),
and phi is the overdispersion: the larger of two estimates, from batches of 1, 2 and 5 windows of the plan's
traffic and from neighbouring live windows. A level is the mean of LEVEL_WINDOWS windows. If the levels differ
by more than chance (chi-square, 1 %), everything from the lowest to the highest level is within the plan, so
that the course of a day is no drift. Otherwise the plan has a single level with an interval.

In this module `amounts` are sums over the requests of each window (requests, tokens), and `exposure` is what
they are divided by (seconds, requests).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from planner.documents.facts import HEADROOM_MOST_FRAC
from planner.documents.plan_folder import WrittenPlan
from planner.documents.task import PlanQuestion
from planner.domain import Limit
from planner.errors import InputError
from planner.fleet import Fleet
from planner.importers.prometheus_range import SampledHistogram
from planner.importers.vllm_metrics import LiveTraffic
from planner.search.oracle.headroom import bisect_share
from planner.simulator.replay import RequestRecords, simulate, simulate_if_kept
from planner.simulator.simulation import Floats, Simulation
from planner.simulator.slo_verdict import judge_slo
from planner.solvers.drift import Alarm, find_alarms
from planner.studies.replanning import Replan, ReplanTerms, replan
from planner.studies.what_if import Study
from planner.traffic.scaling import rescale_trace, with_times_the_traffic
from planner.traffic.sessions import session_numbers
from planner.traffic.trace import Trace, judged_span_s

# Numbers without a reason beside them were chosen by hand.
WINDOW_S = 60.0  # A window of the plan's traffic, as deployments are sampled once a minute.
LEVEL_WINDOWS = 10  # The windows whose mean is one level.
TOLERANCE_FRAC = 0.03  # A mean that lies no further outside the plan's levels is no drift.
# The chance of any false alarm in PER_WINDOWS windows (17 hours of minutes) is FALSE_ALARM_FRAC. It is low,
# because an operator who is called for nothing stops listening.
FALSE_ALARM_FRAC = 0.01
PER_WINDOWS = 1000
STANDARD_ERRORS = 2  # A deviation by more standard errors is taken to be more than scatter (about 95 %).
RECENT_S = 3600.0  # Live figures of what has not drifted are means over the last hour.
_BATCHES = (1, 2, 5)  # Windows per batch. Longer batches show scatter that is correlated over time.
_NOT_ZERO = 1e-12  # Replaces a divisor of 0 in blocks without requests, whose quotient is not used.
_SURE_FRAC = 0.99  # Levels differ if chance alone would make such differences in fewer than 1 % of cases.
_SIGMAS_95 = 1.96  # Half of the 95 % interval that is shown of a live mean, in standard deviations.
# With fewer degrees of freedom an estimate of phi scatters too much, and phi is taken as 1.
_LEAST_FREEDOM = 8
_TESTS_EACH = 2  # Each quantity is tested twice: for a rise and for a fall.
FEWEST_REQUESTS = 100  # Percentiles of fewer requests scatter too much.
NO_CLASSES = "engines count the requests of all classes together"
NO_HISTOGRAM = "the engines' metrics have no histogram of it"
_RANK_ROUNDING = 1e-6  # Rounding errors of a rank are smaller, and two ranks are 1 apart.
_LEAST_VARIANCE = 1e-6  # c^2 is never 0: equal lengths would make every deviation an alarm.


@dataclass(frozen=True, slots=True)
class Reference:
    """A quantity in the plan's traffic: its mean, its lowest and highest level, and how windows scatter.

    `variance` is c^2 and `dispersion` is phi of the module's docstring. `levels` is the number of levels that
    can be told apart from chance; 1 if their differences are chance.
    """

    what: str  # "rate", "prompt", "output" or "missed" (the share of prompt tokens found in no prefix cache).
    mean: float
    low: float
    high: float
    variance: float
    dispersion: float
    levels: int

    def edge(self, is_up: bool) -> float:
        """The value beyond which a live mean has drifted, upwards if `is_up`: TOLERANCE_FRAC outside the
        levels. With a single level, `low` and `high` are the ends of its interval, and the value is outside
        these too.
        """
        high, low = (self.mean, self.mean) if self.levels == 1 else (self.high, self.low)
        if is_up:
            return max(high * (1 + TOLERANCE_FRAC), self.high)
        return min(low * (1 - TOLERANCE_FRAC), self.low)


@dataclass(frozen=True, slots=True)
class LiveDrift:
    """A live quantity beside the plan's: whether it has left the plan's levels, and since when.

    `since_s` and `noticed_s` are Unix times [s], and None while the quantity is within the plan. `now` is its
    mean since `since_s`; without a drift the mean of the last hour, or since the last drift ended. `low_frac`
    and `high_frac` are the 95 % interval of `change_frac`. `is_up` if it is above the plan's levels.
    """

    what: str
    planned: float
    planned_low: float
    planned_high: float
    now: float
    low_frac: float
    high_frac: float
    dispersion: float
    since_s: float | None = None
    noticed_s: float | None = None
    is_up: bool = False
    past: tuple[tuple[float, float], ...] = ()  # The spans [from, to) of drifts that have ended.

    @property
    def change_frac(self) -> float:
        """The live mean relative to the plan's mean, minus 1."""
        return self.now / self.planned - 1

    @property
    def is_drift(self) -> bool:
        """Whether the quantity is outside the plan's levels now."""
        return self.since_s is not None

    @property
    def is_harder(self) -> bool:
        """Whether the drift means more work for the plan, which any rise does."""
        return self.is_drift and self.is_up


@dataclass(frozen=True, slots=True)
class LatencyLine:
    """A limit of the SLO with its live percentile.

    The percentile lies above `low_s` and at or below `high_s`, two edges of a histogram's buckets. `is_kept`
    is None if the limit lies between these, if fewer than FEWEST_REQUESTS were counted, or if the engines
    have no such metric: then `unknown_because` is the reason, and nothing is counted.
    """

    limit: Limit
    requests: float
    low_s: float
    high_s: float
    planned_s: float | None
    is_kept: bool | None
    unknown_because: str = ""


@dataclass(frozen=True, slots=True)
class LiveHeadroom:
    """The headroom with live lengths: the plan keeps its SLO up to `until_rps`; `now_rps` is the live rate,
    and `least_rps` the lower end of its 95 % interval.

    `is_at_least` is True if the plan held at the highest simulated rate, so that it may hold beyond it.
    `input_frac` and `output_frac` say how much longer prompts and outputs are than planned, as shares.
    """

    until_rps: float
    now_rps: float
    least_rps: float
    is_at_least: bool
    input_frac: float
    output_frac: float

    @property
    def headroom_frac(self) -> float:
        """The share of additional traffic that the plan carries; negative if the live rate is too high."""
        return self.until_rps / self.now_rps - 1 if self.now_rps > 0 else math.inf

    @property
    def is_surely_exceeded(self) -> bool:
        """Whether even the lower end of the live rate's interval is more than the plan carries."""
        return self.least_rps > self.until_rps


@dataclass(frozen=True, slots=True, eq=False)
class WatchedPlan:
    """The result of one comparison; `drifts` has a row for each quantity that the engines' metrics report."""

    live: LiveTraffic
    drifts: tuple[LiveDrift, ...]
    latencies: tuple[LatencyLine, ...]
    headroom: LiveHeadroom
    hit_frac: tuple[float | None, float | None]  # The planned and the live share of cached prompt tokens.

    @property
    def missed_lines(self) -> tuple[LatencyLine, ...]:
        """The limits of the SLO that are missed now."""
        return tuple(line for line in self.latencies if line.is_kept is False)

    @property
    def status(self) -> str:
        """The state in one word: "missed", "outgrown", "drifted" or "inside".

        The first that applies, in this order: a limit of the SLO is missed now; the traffic has drifted so
        far that the plan would surely miss a limit; the traffic has drifted to more work; none of these.
        """
        if self.missed_lines:
            return "missed"
        harder = any(drift.is_harder for drift in self.drifts)
        if harder and self.headroom.is_surely_exceeded:
            return "outgrown"
        return "drifted" if harder else "inside"

    @property
    def is_exceeded(self) -> bool | None:
        """Whether the traffic is more than the plan carries; None if it seems to be, but not for certain.

        It is certain only after a drift to more work, because the 95 % interval of a rate alone is wrong once
        in twenty comparisons.
        """
        if self.headroom.is_surely_exceeded and any(drift.is_harder for drift in self.drifts):
            return True
        return None if self.headroom.headroom_frac < 0 else False

    @property
    def plan_holds(self) -> bool:
        """Whether the plan need not be changed."""
        return self.status in ("inside", "drifted")


def fit_reference(what: str, amounts: Floats, exposure: Floats, variance: float | None) -> Reference:
    """The reference of a quantity, from the windows of the plan's traffic.

    `amounts` (n,) were counted over `exposure` (n,). `variance` is c^2, the squared coefficient of variation;
    None for a rate, where c^2 is 1 / mean.
    """
    # A block is LEVEL_WINDOWS windows or a few more, and its mean is one level.
    blocks = max(len(amounts) // LEVEL_WINDOWS, 1)
    width = len(amounts) // blocks
    amounts = amounts[: blocks * width].reshape(blocks, width)
    exposure = exposure[: blocks * width].reshape(blocks, width)
    mean = float(amounts.sum() / exposure.sum())
    c2 = 1 / mean if variance is None else variance
    total = exposure.sum(axis=1)
    level = amounts.sum(axis=1) / np.maximum(total, _NOT_ZERO)
    has_level = (total > 0) & (level > 0)
    c2_of_block = np.full(blocks, c2) if variance is not None else 1 / np.maximum(level, _NOT_ZERO)
    dispersion = _largest_dispersion(
        [
            _dispersion(amounts[has_level], exposure[has_level], c2_of_block[has_level], size)
            for size in _BATCHES
        ]
    )
    # The relative variance that each level would have by chance, if all blocks had the same true mean.
    noise = dispersion * c2 / total[has_level]
    deviation = level[has_level] / mean - 1
    chi_square, freedom = float((deviation**2 / noise).sum()), int(has_level.sum()) - 1
    if freedom < 1 or chi_square <= _chi_square(_SURE_FRAC, freedom):
        # The levels differ by chance, so there is one level, with an interval of about 95 %.
        half_frac = STANDARD_ERRORS * math.sqrt(dispersion * c2 / float(exposure.sum()))
        low, high = mean * max(1 - half_frac, 0.0), mean * (1 + half_frac)
        return Reference(what, mean, low, high, c2, dispersion, levels=1)
    # Chance makes the measured levels scatter more than the true ones, whose relative variance is
    # `true_variance`. So each level is moved towards the mean (shrinkage) until the levels have this
    # variance.
    true_variance = (chi_square / freedom - 1) * float(noise.mean())
    shrunk = mean * (1 + deviation * np.sqrt(true_variance / (true_variance + noise)))
    return Reference(what, mean, float(shrunk.min()), float(shrunk.max()), c2, dispersion, freedom + 1)


def _dispersion(amounts: Floats, exposure: Floats, c2_of_block: Floats, size: int) -> tuple[float, float]:
    """phi from the scatter of batches of `size` windows around the mean of their block.

    Returns phi and its degrees of freedom (0 for an assumed phi of 1). `amounts` and `exposure` are (blocks,
    windows per block).
    """
    batches = amounts.shape[1] // size
    freedom = amounts.shape[0] * (batches - 1)
    if freedom < _LEAST_FREEDOM:
        return 1.0, 0.0
    amount = amounts[:, : batches * size].reshape(-1, batches, size).sum(axis=2)  # (blocks, batches)
    batch_exposure = exposure[:, : batches * size].reshape(-1, batches, size).sum(axis=2)
    block_mean = (amount.sum(axis=1) / np.maximum(batch_exposure.sum(axis=1), _NOT_ZERO))[:, None]
    # The squared deviation of each batch over c^2 / e, the variance that it has if phi is 1.
    with np.errstate(divide="ignore", invalid="ignore"):
        deviation = amount / batch_exposure / block_mean - 1
        z2 = deviation**2 * batch_exposure / c2_of_block[:, None]
    has_value = (batch_exposure > 0) & (block_mean > 0)
    return float(np.where(has_value, z2, 0.0).sum() / freedom), freedom


def _largest_dispersion(estimates: Sequence[tuple[float, float]]) -> float:
    """The phi of the shortest batches, or of longer ones if it is larger by two standard errors; at least 1.

    `estimates` are pairs of phi and its degrees of freedom, in the order of _BATCHES.
    """
    phi = max(estimates[0][0], 1.0)
    for other, freedom in estimates[1:]:
        if not freedom:  # This phi is assumed, not estimated.
            continue
        standard_error_frac = math.sqrt(2 / freedom)  # Of chi-square over its degrees of freedom.
        if other > phi * (1 + STANDARD_ERRORS * standard_error_frac):
            phi = other
    return phi


def _chi_square(frac: float, freedom: int) -> float:
    """The quantile `frac` of chi-square with this many degrees of freedom."""
    from scipy.stats import chi2  # Importing it takes 0.9 s, which other commands save.

    return float(chi2.ppf(frac, freedom))


def plan_references(trace: Trace, hit_frac: float | None) -> dict[str, Reference]:
    """The references of a plan's traffic, by quantity.

    `hit_frac` is the share of prompt tokens found in prefix caches. It is None without caches, and then the
    share of missed tokens has no reference.
    """
    # Windows of a short trace are so short that there are at least two levels.
    window_s = min(WINDOW_S, trace.duration_s / (2 * LEVEL_WINDOWS))
    if not window_s > 0:
        raise InputError(
            f"{trace.name}: all requests arrive at once, so there is no rate to hold others against"
        )
    windows = int(trace.duration_s / window_s)
    window_of = ((trace.arrival_s - trace.arrival_s[0]) / window_s).astype(np.int64)
    inside = window_of < windows

    def per_window(values: npt.NDArray[np.int64] | None) -> Floats:
        weights = None if values is None else values[inside]
        return np.bincount(window_of[inside], weights=weights, minlength=windows).astype(float)

    requests = per_window(None)
    references = {"rate": fit_reference("rate", requests, np.full(windows, window_s), None)}
    for length, tokens in (("prompt", trace.input_tokens), ("output", trace.output_tokens)):
        references[length] = fit_reference(length, per_window(tokens), requests, _variance(tokens))
    if hit_frac is not None and 0 < hit_frac < 1:
        # The simulation gives only the mean. The scatter is estimated as if every prompt were cached as a
        # whole or not at all: the first factor is the relative variance of this choice, and the second allows
        # for prompts of different lengths.
        missed = 1 - hit_frac
        c2 = hit_frac / missed * (1 + references["prompt"].variance)
        references["missed"] = Reference(
            "missed", mean=missed, low=missed, high=missed, variance=c2, dispersion=1.0, levels=1
        )
    return references


def _variance(tokens: npt.NDArray[np.int64]) -> float:
    """c^2 of lengths. It is never 0, so that equal lengths do not make every deviation an alarm."""
    return max(float(tokens.var() / tokens.mean() ** 2), _LEAST_VARIANCE)


def drift_of(
    reference: Reference, amounts: Floats, exposure: Floats, edges_s: Floats, tests: int
) -> LiveDrift:
    """Compare a quantity's live windows with the plan's.

    `edges_s` (n + 1,) are the Unix times at which the windows begin and end. `tests` is how many tests share
    the chance of a false alarm.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where((exposure > 0) & np.isfinite(amounts), amounts / exposure, np.nan)
    is_rate = reference.what == "rate"
    dispersion = max(
        reference.dispersion,
        _largest_dispersion([_live_dispersion(amounts, exposure, reference, size) for size in _BATCHES]),
    )
    # c = n / alpha of solvers/drift.py, where each of the tests gets an equal part of alpha.
    threshold = PER_WINDOWS * tests / FALSE_ALARM_FRAC
    alarms: dict[bool, tuple[Alarm, ...]] = {}  # For rises (True) and for falls (False).
    for is_up in (True, False):
        edge = reference.edge(is_up)
        if edge <= 0:  # No mean is below 0, so it cannot fall below the levels.
            continue
        c2 = 1 / edge if is_rate else reference.variance
        with np.errstate(divide="ignore", invalid="ignore"):
            variance = np.where(exposure > 0, dispersion * c2 / exposure, np.inf)
        beyond = values / edge - 1 if is_up else 1 - values / edge
        alarms[is_up] = find_alarms(beyond, variance, threshold=threshold)
    active = [(alarm, is_up) for is_up, group in alarms.items() for alarm in group if alarm.ended is None]
    past = tuple(
        (float(edges_s[alarm.began]), float(edges_s[alarm.ended]))
        for group in alarms.values()
        for alarm in group
        if alarm.ended is not None
    )
    # A rise and a fall can both be active; the drift that began later is the present state.
    current = max(active, key=lambda pair: pair[0].began, default=None)
    recent_windows = max(int(RECENT_S / (edges_s[1] - edges_s[0])), 1)
    if current is not None:
        first = current[0].began
    else:
        # Windows before the end of a past drift belong to that drift, so they do not count.
        ends = [alarm.ended for group in alarms.values() for alarm in group if alarm.ended is not None]
        first = max(len(values) - recent_windows, 0, *ends)
    now, half_frac = _live_mean(amounts[first:], exposure[first:], dispersion * reference.variance, reference)
    change_frac = now / reference.mean - 1
    return LiveDrift(
        what=reference.what,
        planned=reference.mean,
        planned_low=reference.low,
        planned_high=reference.high,
        now=now,
        low_frac=change_frac - half_frac,
        high_frac=change_frac + half_frac,
        dispersion=dispersion,
        since_s=None if current is None else float(edges_s[current[0].began]),
        noticed_s=None if current is None else float(edges_s[current[0].noticed + 1]),
        is_up=current is not None and current[1],
        past=tuple(sorted(past)),
    )


def _live_mean(
    amounts: Floats, exposure: Floats, variance: float, reference: Reference
) -> tuple[float, float]:
    """The live mean, and half of its 95 % interval as a share of the plan's mean; NaN without samples.

    `variance` is phi c^2 of the plan.
    """
    is_sampled = np.isfinite(amounts) & (exposure > 0)
    total = float(exposure[is_sampled].sum())
    if total <= 0:
        return math.nan, math.nan
    mean = float(amounts[is_sampled].sum()) / total
    scale = mean / reference.mean
    # The standard deviation of a length grows like its mean, that of a Poisson count like the mean's root.
    deviation = math.sqrt(variance / total) * (math.sqrt(scale) if reference.what == "rate" else scale)
    return mean, _SIGMAS_95 * deviation


def _live_dispersion(
    amounts: Floats, exposure: Floats, reference: Reference, size: int
) -> tuple[float, float]:
    """phi from the median of differences between neighbouring batches, and its degrees of freedom.

    Differences are used because a shift of the level, which is no scatter, changes only one of them.
    """
    n = len(amounts) // size
    amount = amounts[: n * size].reshape(n, size).sum(axis=1)
    batch_exposure = exposure[: n * size].reshape(n, size).sum(axis=1)
    is_sampled = np.isfinite(amount) & (batch_exposure > 0) & (amount > 0)
    if is_sampled.sum() <= _LEAST_FREEDOM:
        return 1.0, 0.0
    amount, batch_exposure = amount[is_sampled], batch_exposure[is_sampled]
    value = amount / batch_exposure
    middle = (value[1:] + value[:-1]) / 2
    c2 = 1 / middle if reference.what == "rate" else reference.variance
    # The squared difference of two batches over the sum of their variances, each c^2 / e if phi is 1.
    variance_if_1 = c2 * (1 / batch_exposure[1:] + 1 / batch_exposure[:-1])
    z2 = ((value[1:] - value[:-1]) / middle) ** 2 / variance_if_1
    # With phi = 1 the median of z2 is that of chi-square with one degree of freedom. The median of n squares
    # scatters as much as a variance from n / 3 values.
    return float(np.median(z2)) / _chi_square(0.5, 1), len(z2) / 3


def latency_lines(
    limits: Sequence[Limit],
    planned_s: Sequence[float | None],
    latency: Mapping[str, SampledHistogram],
    recent: int,
) -> tuple[LatencyLine, ...]:
    """Each limit of the SLO against the live histogram of the last `recent` windows.

    `planned_s` are the simulated values of the limits. Engines count the requests of all classes together, so
    a limit for one class cannot be judged; nor can a limit whose metric has no histogram.
    """
    lines = []
    for limit, planned in zip(limits, planned_s, strict=True):
        if limit.selector is not None or limit.metric not in latency:
            why = NO_HISTOGRAM if limit.selector is None else NO_CLASSES
            lines.append(LatencyLine(limit, 0.0, math.nan, math.nan, planned, None, why))
            continue
        live_histogram = latency[limit.metric]
        counts = np.nan_to_num(live_histogram.counts[-recent:]).sum(axis=0)
        low_s, high_s, requests = percentile_between(live_histogram.edges, counts, limit.percentile_frac)
        is_kept = None
        if requests >= FEWEST_REQUESTS and high_s <= limit.limit_s:
            is_kept = True
        elif requests >= FEWEST_REQUESTS and low_s >= limit.limit_s:
            is_kept = False
        lines.append(LatencyLine(limit, requests, low_s, high_s, planned, is_kept))
    return tuple(lines)


def percentile_between(edges: Floats, counts: Floats, percentile_frac: float) -> tuple[float, float, float]:
    """The lower and the upper edge of the bucket that holds a percentile, and how many values were counted.

    The percentile is by nearest rank. `edges` (n,) are upper edges of buckets, and the first begins at 0.
    """
    total = float(counts.sum())
    if total <= 0:
        return math.nan, math.nan, 0.0
    # Counts are differences of floats, so that a rank that is a whole number may come out a little too large.
    bucket = int(np.searchsorted(np.cumsum(counts), percentile_frac * total - _RANK_ROUNDING))
    bucket = min(bucket, len(edges) - 1)
    return (float(edges[bucket - 1]) if bucket else 0.0), float(edges[bucket]), total


def stretch_lengths(trace: Trace, input_factor: float, output_factor: float) -> Trace:
    """The same requests with longer or shorter prompts and outputs; shared prefixes stay as they are."""
    if input_factor == 1 and output_factor == 1:
        return trace
    # A prompt is never shorter than its shared prefix.
    prefix_tokens = np.diff(trace.prefix_offsets) * trace.prefix_block_tokens
    least_tokens = np.maximum(prefix_tokens, 1)
    prompts = np.maximum(np.rint(trace.input_tokens * input_factor).astype(np.int64), least_tokens)
    outputs = np.maximum(np.rint(trace.output_tokens * output_factor).astype(np.int64), 1)
    images = trace.image_tokens
    return replace(
        trace,
        input_tokens=prompts,
        output_tokens=outputs,
        image_tokens=None if images is None else np.minimum(images, prompts),
        notes=(*trace.notes, f"prompts times {input_factor:.4g}, outputs times {output_factor:.4g}"),
    )


def most_carried_traffic(fleet: Fleet, plan: WrittenPlan, trace: Trace) -> float:
    """The largest factor on the traffic of `trace` at which the fleet keeps the plan's SLO, by bisection.

    More traffic is made as for a plan's headroom (`scaling.with_times_the_traffic`), and no factor above
    1 + HEADROOM_MOST_FRAC is simulated. The factor is 0 if the fleet holds at no simulated rate.
    """

    def holds(factor: float) -> bool:
        """Whether the fleet keeps the written SLO with `factor` times the traffic."""
        busier_trace = with_times_the_traffic(trace, factor)
        slo = plan.slo
        simulation = simulate_if_kept(
            fleet,
            busier_trace,
            slo.limits,
            RequestRecords(busier_trace),
            slo.every_s,
            patience_s=slo.patience_s(judged_span_s(busier_trace)),
        )
        return simulation is not None and judge_slo(simulation, slo, with_percentiles=False).holds

    most_factor = 1 + HEADROOM_MOST_FRAC
    if holds(most_factor):
        return most_factor
    kept_factor, failed_factor = (1.0, most_factor) if holds(1.0) else (0.0, 1.0)
    return bisect_share(holds, kept_factor, failed_factor)[0]


@dataclass(frozen=True, slots=True, eq=False)
class PlanExpectations:
    """A plan, and the references of its traffic.

    `carried` remembers the results of `_carried_rate`, by the factors on prompt and output lengths, because
    each takes several simulations.
    """

    written: WrittenPlan
    references: Mapping[str, Reference]
    hit_frac: float | None
    carried: dict[tuple[float, float], tuple[float, float]] = field(default_factory=dict)


def read_expectations(plan: WrittenPlan) -> PlanExpectations:
    """The references of a plan folder.

    Two things are not in the folder, and need another simulation of the plan: the share of cached tokens of a
    plan with prefixes, and the arrival times of requests that wait for answers.
    """
    trace, hit_frac = plan.trace, None
    if trace.has_prefixes or trace.after.size:
        simulation = simulate(plan.fleet, trace)
        hit_frac = simulation.token_hit_frac if trace.has_prefixes else None
        trace = arrived_requests(trace, simulation)
    return PlanExpectations(plan, plan_references(trace, hit_frac), hit_frac)


def arrived_requests(trace: Trace, simulation: Simulation) -> Trace:
    """The requests of a trace as a simulated fleet gets them, while the traffic lasts; the trace itself if no
    request waits for another.

    The warm-up is left out, and so is the end, when the traffic dies away. The end begins when all sessions
    have begun and at least one has ended (an agent has no task left).
    """
    if not trace.after.size:
        return trace
    session, arrival_s = session_numbers(trace), simulation.arrival_s
    sessions = session.max() + 1
    begins_s, ends_s = np.full(sessions, np.inf), np.full(sessions, -np.inf)
    has_arrived = np.isfinite(arrival_s)
    np.minimum.at(begins_s, session[has_arrived], arrival_s[has_arrived])
    np.maximum.at(ends_s, session[has_arrived], arrival_s[has_arrived])
    has_begun = np.isfinite(begins_s)
    until_s = max(begins_s[has_begun].max(), ends_s[has_begun].min())
    inside = np.flatnonzero((arrival_s >= simulation.window_s[0]) & (arrival_s <= until_s))
    in_order = inside[np.argsort(arrival_s[inside], kind="stable")]
    return Trace(trace.name, arrival_s[in_order], trace.input_tokens[in_order], trace.output_tokens[in_order])


def drifts_of(references: Mapping[str, Reference], live: LiveTraffic) -> tuple[LiveDrift, ...]:
    """The drift of each quantity of which the plan has a reference and the deployment has figures."""
    finished = np.nan_to_num(live.finished)  # NaN: a window in which nothing was sampled.
    with np.errstate(divide="ignore", invalid="ignore"):
        missed = np.where(live.queried_tokens > 0, 1 - live.hit_tokens / live.queried_tokens, np.nan)
    amounts_and_exposure = {  # By quantity.
        "rate": (live.arrived, np.where(np.isfinite(live.arrived), np.diff(live.edges_s), 0.0)),
        "prompt": (live.input_tokens, finished),
        "output": (live.output_tokens, finished),
        "missed": (missed * finished, finished),
    }
    sampled = [quantity for quantity in references if np.isfinite(amounts_and_exposure[quantity][0]).any()]
    return tuple(
        drift_of(
            references[quantity], *amounts_and_exposure[quantity], live.edges_s, _TESTS_EACH * len(sampled)
        )
        for quantity in sampled
    )


def watch_windows(plan: PlanExpectations, live: LiveTraffic) -> WatchedPlan:
    """Compare the live windows of a deployment with its plan."""
    drifts = drifts_of(plan.references, live)
    recent = max(int(RECENT_S / live.every_s), 1)
    queried = float(np.nansum(live.queried_tokens[-recent:]))
    return WatchedPlan(
        live,
        drifts,
        latency_lines(plan.written.slo.limits, plan.written.simulated_s, live.latency, recent),
        _live_headroom(plan, {drift.what: drift for drift in drifts}),
        (plan.hit_frac, float(np.nansum(live.hit_tokens[-recent:])) / queried if queried > 0 else None),
    )


def length_factors(drifts: Mapping[str, LiveDrift]) -> tuple[float, float]:
    """The factors by which lengths of prompts and outputs have drifted; 1 without a drift."""
    factors = [
        drifts[length].now / drifts[length].planned if length in drifts and drifts[length].is_drift else 1.0
        for length in ("prompt", "output")
    ]
    return factors[0], factors[1]


def _live_headroom(plan: PlanExpectations, drifts: Mapping[str, LiveDrift]) -> LiveHeadroom:
    """The plan's headroom with the drifted lengths.

    The factors on lengths are rounded to 1 %, so that a small change needs no new simulations
    (`PlanExpectations.carried`).
    """
    prompts, outputs = length_factors(drifts)
    factors = round(prompts, 2), round(outputs, 2)
    if factors not in plan.carried:
        plan.carried[factors] = _carried_rate(plan, stretch_lengths(plan.written.trace, *factors))
    factor, until_rps = plan.carried[factors]
    rate = drifts["rate"]  # Always there: `live_traffic` refuses metrics that do not count requests.
    return LiveHeadroom(
        until_rps=until_rps,
        now_rps=rate.now,
        least_rps=rate.planned * (1 + rate.low_frac),
        is_at_least=factor >= 1 + HEADROOM_MOST_FRAC,
        input_frac=factors[0] - 1,
        output_frac=factors[1] - 1,
    )


def _carried_rate(plan: PlanExpectations, trace: Trace) -> tuple[float, float]:
    """The factor of `most_carried_traffic` on `trace`, and the plan's busiest rate at that factor.

    Spot workers that may be down count as down, as in the plan's own headroom.
    """
    written, rate = plan.written, plan.references["rate"]
    fleet = written.fleet_after_spot_losses
    factor = most_carried_traffic(fleet, written, trace)
    rate_factor = factor
    if trace.after.size and factor > 0:
        # Clients that wait for answers do not send `factor` times as many requests per second, so the rate is
        # taken from the simulation.
        busier_trace = with_times_the_traffic(trace, factor)
        arrived = arrived_requests(busier_trace, simulate(fleet, busier_trace))
        rate_factor = arrived.rate_rps / rate.mean
    return factor, rate_factor * busiest_rps(rate)


def busiest_rps(rate: Reference) -> float:
    """The rate at which the plan's trace is hardest: its highest level, or its mean if it has one level."""
    return rate.high if rate.levels > 1 else rate.mean


def current_trace(plan: PlanExpectations, watched: WatchedPlan) -> Trace:
    """The plan's trace, changed to the lengths and the rate that the live traffic has drifted to."""
    drifts = {drift.what: drift for drift in watched.drifts}
    trace = stretch_lengths(plan.written.trace, *length_factors(drifts))
    if not drifts["rate"].is_drift:
        return trace
    factor = drifts["rate"].now / busiest_rps(plan.references["rate"])
    # A fixed seed: the same drift gives the same replan.
    return rescale_trace(trace, trace.rate_rps * factor, scale="superpose", rng=np.random.default_rng(0))


def replan_now(study: Study, task: PlanQuestion, plan: PlanExpectations, horizon_h: float) -> Replan:
    """Replan the running fleet (studies/replanning.py) on `current_trace`, which must be the study's trace.

    `task` is the question of the plan's slo.yaml. Its rate, window and description are dropped, because the
    plan's trace is already scaled, cut or drawn by them. Its further draws are dropped too, because this
    trace is replayed as it is. Raises what `replanning.replan` raises.
    """
    current_task = replace(task, rate_rps=None, window="whole", described=None, draws=1)
    return replan(study, current_task, plan.written.fleet, ReplanTerms(horizon_h))
