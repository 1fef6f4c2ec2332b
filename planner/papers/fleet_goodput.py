"""The goodput of one fleet on one trace: the highest rate that it serves in steady state within the SLO, and
a run at that rate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.domain import Limit, Slo
from planner.errors import InfeasibleError
from planner.fleet import Fleet
from planner.papers.goodput import (
    LOWEST_RPS,
    TOLERANCE_FRAC,
    Goodput,
    Steady,
    Traffic,
    bisect_highest,
    count_residences,
    poisson_traffic,
)
from planner.papers.vidur_search import most_rps
from planner.search.problem.bill import bill_fleet
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import Verdict, judge_slo
from planner.traffic.scaling import RateRequest
from planner.traffic.trace import Trace, spread_stamps
from planner.units import count_text, finite_or_none, show_beside, show_share

LEAST_REQUESTS = 100  # A trace is not thinned below this many requests: percentiles of fewer say little.
# The bisection begins at this share of `most_rps`, the rate that work alone allows: queues and the SLO lower
# it. Set by hand: a wrong guess costs a few more rates.
FIRST_RATE_FRAC = 0.25
# After the bisection rates this many times as high as the one that fails are simulated too, the highest
# first: the SLO may be kept there. Set by hand; a run at a rate that fails is short.
FURTHER_RATES = (1.6, 1.3, 1.1)

Watch = Callable[[float, bool | None], None]
"""Called twice with each rate: with None before its simulations, then with whether the SLO was kept."""


@dataclass(frozen=True, slots=True, eq=False)
class FleetGoodput:
    """The goodput of a fleet by `rule`, with one run at the highest rate, which is long enough to be steady
    unless the trace is short. `kept_above_rps` is a rate above `goodput.fails_rps` that is kept all the same,
    0 if none was found.

    `is_poisson` says whether arrivals are Poisson; otherwise they are those of the trace, rescaled.
    """

    fleet: Fleet
    goodput: Goodput
    rule: Steady
    is_poisson: bool
    run: Simulation
    kept_above_rps: float = 0.0

    @property
    def residences(self) -> float:
        """The duration of the run, counted in the mean time that a request stays in the fleet."""
        return count_residences(self.run)

    @property
    def is_short(self) -> bool:
        """Whether the run ends before a backlog of requests would show in their latencies."""
        return self.residences < self.rule.residences

    @property
    def usd_per_1000_requests(self) -> float:
        """The bill of the fleet, whole nodes included, for the time in which it serves 1000 requests."""
        usd_per_ks = bill_fleet(self.fleet).usd_per_h / 3.6  # An hour has 3.6 ks.
        return usd_per_ks / self.goodput.rate_rps

    @property
    def values_s(self) -> dict[Limit, float]:
        """Each limit of the SLO with the value [s] that its percentile has in `run`, over the requests of its
        class; with `slo: {every: ...}` in the worst window.
        """
        return {line.limit: line.deciding_s for line in judge_slo(self.run, self.rule.slo).lines}


def fleet_goodput(
    fleet: Fleet,
    requests: Trace,
    slo: Slo,
    traffic_request: RateRequest | None = None,
    *,
    seeds: int = 3,
    tolerance_frac: float = TOLERANCE_FRAC,
    watch: Watch = lambda *_: None,
) -> FleetGoodput:
    """The highest rate at which a fleet keeps the SLO, and a run at that rate.

    Its traffic is the trace `requests`, rescaled and cut as `traffic_request` says, or, if that is None,
    Poisson arrivals with the lengths of the trace. Requests with the same stamp of a coarse clock are spread
    over its step. `watch` sees each rate that is tried. Raises InfeasibleError if no rate keeps the SLO.
    """
    traffic: Traffic
    if traffic_request is None:
        traffic, lowest_rps = poisson_traffic(spread_stamps(requests, seed=0)), LOWEST_RPS
    else:
        traffic = _replayed(requests, traffic_request)
        lowest_rps = LEAST_REQUESTS / requests.duration_s if requests.duration_s else 0.0
        lowest_rps = max(lowest_rps, LOWEST_RPS)
    rule = Steady(slo, traffic, seeds)

    def carries(rate_rps: float) -> bool:
        """Whether the fleet carries this rate; calls `watch` before and after the simulations."""
        watch(rate_rps, None)
        holds = rule.carries(fleet, rate_rps)
        watch(rate_rps, holds)
        return holds

    goodput = bisect_highest(
        carries,
        guess_rps=FIRST_RATE_FRAC * most_rps(fleet, requests),
        tolerance_frac=tolerance_frac,
        lowest_rps=lowest_rps,
    )
    is_kept = goodput.rate_rps > 0
    # If no rate keeps the SLO, the run is of the first seed that missed it at the lowest rate.
    missed_seed = None if is_kept else rule.first_missed(fleet, goodput.fails_rps)
    run = rule.run(fleet, goodput.rate_rps if is_kept else goodput.fails_rps, missed_seed or 0)
    further = [factor * goodput.fails_rps for factor in FURTHER_RATES] if is_kept else []
    kept_above_rps = next(filter(carries, further), 0.0)
    answer = FleetGoodput(fleet, goodput, rule, traffic_request is None, run, kept_above_rps)
    if not is_kept:
        raise _no_rate_error(answer)
    return answer


def goodput_document(goodput: FleetGoodput) -> dict[str, Any]:
    """What `plan goodput --json` prints."""
    rate_rps, gpus = goodput.goodput.rate_rps, goodput.fleet.gpus
    return {
        "rate_rps": rate_rps,
        "fails_rps": finite_or_none(goodput.goodput.fails_rps),
        "kept_above_rps": goodput.kept_above_rps or None,
        "rates_tried": goodput.goodput.rates,
        "seeds": goodput.rule.seeds,
        "arrivals": "poisson" if goodput.is_poisson else "trace",
        "gpus": gpus,
        "gpu_rate_rps": rate_rps / gpus,
        "usd_per_1000_requests": goodput.usd_per_1000_requests,
        "requests": len(goodput.run.arrival_s),
        "residences": goodput.residences,
        "slo": [
            {"limit": limit.name, "limit_s": limit.limit_s, "simulated_s": finite_or_none(value)}
            for limit, value in goodput.values_s.items()
        ],
    }


def _replayed(requests: Trace, traffic_request: RateRequest) -> Traffic:
    """Traffic of the trace's own requests, rescaled to a rate. The least number of requests of `Traffic` is
    ignored, because a trace cannot be made longer.
    """

    def replayed(rate_rps: float, _least_requests: int, seed: int) -> Trace:
        return RateRequest(rate_rps, traffic_request.scale, traffic_request.window).apply_to(
            spread_stamps(requests, seed=seed), seed=seed
        )

    return replayed


def _no_rate_error(goodput: FleetGoodput) -> InfeasibleError:
    """The error that the fleet keeps the SLO at no rate, with what the lowest rate misses: of several limits
    the one that it misses by most.
    """
    reason, constraint, relaxation = _missed_most(judge_slo(goodput.run, goodput.rule.slo), goodput.rule.slo)
    fewest = (
        "" if goodput.is_poisson else f" Lower rates keep fewer than {LEAST_REQUESTS} requests of the trace."
    )
    return InfeasibleError(
        f"the fleet keeps the SLO at no rate down to {goodput.goodput.fails_rps:.3g} requests/s: {reason}; "
        f"relax the SLO, or take other workers.{fewest}",
        kind="latency",
        constraint=constraint,
        relaxation=relaxation,
    )


def _missed_most(verdict: Verdict, slo: Slo) -> tuple[str, str, str]:
    """What a verdict misses, in words; the name of that constraint; and a relaxation that the run keeps."""
    if verdict.missed:
        worst = max(verdict.missed, key=lambda line: line.deciding_s / line.limit.limit_s)
        name, (value, limit) = worst.limit.name, show_beside(worst.deciding_s, worst.limit.limit_s)
        return f"{worst.limit.label} is {value} there, limit {limit}", name, f"{name} of {value}"
    if verdict.rejected:
        return (
            f"{count_text(verdict.rejected, 'request')} fit no worker",
            "memory",
            "workers with more KV cache",
        )
    if not verdict.attainment_holds:
        needed, shares = slo.attainment_frac or 0.0, [verdict.attainment_frac]
        shares += [verdict.attainment_worst.kept_frac] if verdict.attainment_worst is not None else []
        kept = show_share(min(shares))
        reason = f"{kept} of requests keep all limits at once there, {show_share(needed)} must"
        return reason, "attainment", f"attainment of {kept}"
    for line in verdict.guarantees:
        if not line.holds:
            kept = show_share(line.least.share_frac)
            name, needed = line.guarantee.name, line.guarantee.share_frac
            reason = f"{name} is {kept} in a window there, {show_share(needed)} is guaranteed"
            return reason, name, f"{name} of {kept}"
    return "requests pile up there", "backlog", "other workers"
