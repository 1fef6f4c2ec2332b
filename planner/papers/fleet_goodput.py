"""The goodput of one fleet on one trace: the highest rate it keeps up in steady state, and a run there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.domain import Limit, Slo
from planner.errors import InfeasibleError
from planner.fleet import Fleet
from planner.papers.goodput import TOLERANCE_FRAC, Goodput, Steady, Traffic, highest, poisson, residences
from planner.papers.vidur import most_rps
from planner.simulator.metrics import value_s
from planner.simulator.replay import Simulation
from planner.traffic.scaling import Asked
from planner.traffic.trace import Trace, spread
from planner.units import finite, show_s

LEAST_REQUESTS = 100  # The lowest rate keeps at least so many requests of a trace.
LOWEST_RPS = 1e-4

Watch = Callable[[float, bool | None], None]
"""Hears a rate before it is tried (None), and then whether it held."""


@dataclass(frozen=True, slots=True, eq=False)
class FleetGoodput:
    """`run` is one run at the highest rate, long enough to be steady unless the trace is short."""

    fleet: Fleet
    goodput: Goodput
    rule: Steady
    is_poisson: bool
    run: Simulation

    @property
    def residences(self) -> float:
        """Mean residences of a request that the run lasts."""
        return residences(self.run)

    @property
    def is_short(self) -> bool:
        """Whether the trace ends before a backlog would have shown."""
        return self.residences < self.rule.residences

    @property
    def usd_per_1000_requests(self) -> float:
        return self.fleet.price_usd_per_h / 3.6 / self.goodput.rate_rps

    @property
    def values_s(self) -> dict[Limit, float]:
        """What each limit is promised for comes to in that run."""
        return {
            limit: value_s(self.run, limit.metric, limit.percentile_frac) for limit in self.rule.slo.limits
        }


def fleet_goodput(
    fleet: Fleet,
    requests: Trace,
    slo: Slo,
    asked: Asked | None = None,
    *,
    seeds: int = 3,
    tolerance_frac: float = TOLERANCE_FRAC,
    watch: Watch = lambda *_: None,
) -> FleetGoodput:
    """Search the rate; traffic is the trace, rescaled and cut as `asked` says, else Poisson of its lengths.

    `requests` with coarse stamps not yet spread. Raises InfeasibleError where no rate is kept.
    """
    traffic: Traffic
    if asked is None:
        traffic, lowest_rps = poisson(spread(requests, seed=0)), LOWEST_RPS
    else:
        traffic = _replayed(requests, asked)
        lowest_rps = LEAST_REQUESTS / requests.duration_s if requests.duration_s else 0.0
        lowest_rps = max(lowest_rps, LOWEST_RPS)
    rule = Steady(slo, traffic, seeds)

    def carries(rate_rps: float) -> bool:
        watch(rate_rps, None)
        holds = rule.carries(fleet, rate_rps)
        watch(rate_rps, holds)
        return holds

    found = highest(
        carries, guess_rps=most_rps(fleet, requests) / 4, tolerance_frac=tolerance_frac, lowest_rps=lowest_rps
    )
    run = rule.run(fleet, found.rate_rps or lowest_rps)
    answer = FleetGoodput(fleet, found, rule, asked is None, run)
    if not found.rate_rps:
        raise _none_kept(answer)
    return answer


def document(found: FleetGoodput) -> dict[str, Any]:
    """What `plan goodput --json` prints."""
    rate_rps, gpus = found.goodput.rate_rps, found.fleet.gpus
    return {
        "rate_rps": rate_rps,
        "fails_rps": finite(found.goodput.fails_rps),
        "rates_tried": found.goodput.rates,
        "seeds": found.rule.seeds,
        "arrivals": "poisson" if found.is_poisson else "trace",
        "gpus": gpus,
        "gpu_rate_rps": rate_rps / gpus,
        "usd_per_1000_requests": found.usd_per_1000_requests,
        "requests": len(found.run.arrival_s),
        "residences": found.residences,
        "slo": [
            {"limit": limit.name, "limit_s": limit.limit_s, "simulated_s": finite(value)}
            for limit, value in found.values_s.items()
        ],
    }


def _replayed(requests: Trace, asked: Asked) -> Traffic:
    def replayed(rate_rps: float, least: int, seed: int) -> Trace:
        return Asked(rate_rps, asked.how, asked.part).of(spread(requests, seed=seed), seed=seed)

    return replayed


def _none_kept(found: FleetGoodput) -> InfeasibleError:
    values = found.values_s
    worst = max(values, key=lambda limit: (finite(values[limit]) or 0.0) / limit.limit_s)
    return InfeasibleError(
        f"the fleet keeps the SLO at no rate down to {found.goodput.fails_rps:.3g} requests/s: {worst.name} "
        f"is {show_s(values[worst])} there, promised {show_s(worst.limit_s)}; relax the SLO, or take other "
        "workers",
        kind="latency",
        constraint=worst.name,
        relaxation=f"{worst.name} of {show_s(values[worst])}",
    )
