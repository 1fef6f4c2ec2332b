"""Reserved, on-demand and spot workers per window for demand that changes over the week.

Sets   m LLM     c worker type of an LLM (`Capacity`)     g GPU     t window; after the last comes the first
Data   r_mt   arrival rate                                                          [requests/s]
       k_c    rate one worker sustains within the SLO;  a_c  what interruptions leave of it on spot GPUs
       n_c, w_c  GPUs and Watts of a worker
       p_g, o_g, s_g  price of a GPU reserved for all windows, on demand, on spot       [USD/h]
       b_c    cost of starting a worker: its GPUs while it loads, at their highest price        [USD]
       i_g    interruptions of a spot worker                                        [1/h]
       G_g, Q, B  stock of GPUs, Watts, USD/h on average;   phi  share spot may carry;   H  hours of a window
Vars   x_ct, y_ct firm and spot workers;   u_ct, v_ct of them started in t
       R_g, O_gt GPUs reserved and on demand                                  (all integer >= 0)

  min   sum_g p_g R_g + mean_t [ sum_g o_g O_gt + sum_c (s_g n_c + i_g b_c) y_ct + b_c (u_ct + v_ct) / H ]
  s.t.  served_mt     sum_{c of m} k_c (x_ct + a_c y_ct) >= r_mt
        firm_mt       sum_{c of m} k_c x_ct >= (1 - phi) r_mt
        held_gt       sum_{c on g} n_c x_ct <= R_g + O_gt
        stock_gt      R_g + O_gt + sum_{c on g} n_c y_ct <= G_g
        started_ct    x_ct - x_c,t-1 <= u_ct,   y_ct - y_c,t-1 <= v_ct
        power_t       sum_c w_c (x_ct + y_ct) <= Q
        budget        the objective <= B

Several LLMs share stock, power and budget; a reserved GPU may serve another LLM in the next window, for the
price of a start. Compared with `at_peak`, the cheapest fleet that carries every LLM's peak all the time, and
`by_rule`, Aladdin's N = ceil(k5 r + c5) with each LLM's cheapest type and no thought for starts. CP-SAT: on a
week of hours it is far ahead of HiGHS. Rates are kept to one in a million; prices are rounded down to a
tenth of a cent, so that the bound holds, and up in the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from planner.errors import InfeasibleError, InputError, PlannerError
from planner.solvers.worker_rule import fit_worker_rule

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

GOOD_ENOUGH_FRAC = 0.005  # gap at which the search stops: demand is not known better
RATE_UNITS = 10**9  # the highest rate of an LLM, in the integers of CP-SAT
RATE_TOLERANCE = 5e-7  # so that what fits exactly still does once rounded
USD_UNITS = 1_000  # a dollar
MOST_CELLS = 200_000  # windows x worker types


@dataclass(frozen=True, slots=True)
class Offer:
    """What a GPU costs, None where it is not sold that way, and how many there are (None: any number)."""

    gpu: str
    on_demand_usd_per_h: float | None
    reserved_usd_per_h: float | None = None
    spot_usd_per_h: float | None = None
    interruptions_per_h: float = 0.0
    stock: int | None = None

    @property
    def highest_usd_per_h(self) -> float:
        prices = (self.on_demand_usd_per_h, self.reserved_usd_per_h, self.spot_usd_per_h)
        return max(price for price in prices if price is not None)


@dataclass(frozen=True, slots=True)
class Capacity:
    """A worker type for one LLM: the rate one worker sustains, its GPUs, and how long it takes to start."""

    llm: str
    name: str
    gpu: str
    gpus: int
    rate_rps: float
    power_w: float = 0.0
    start_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Market:
    """Everything but the demand."""

    offers: tuple[Offer, ...]
    capacities: tuple[Capacity, ...]
    most_spot_frac: float = 0.0
    power_w: float | None = None
    cost_usd_per_h: float | None = None

    def offer(self, capacity: Capacity) -> Offer:
        return next(offer for offer in self.offers if offer.gpu == capacity.gpu)

    def limits(self) -> dict[str, float]:
        """Every limit that is set, by name."""
        limits = {f"stock of {o.gpu}": float(o.stock) for o in self.offers if o.stock is not None}
        limits |= {"power": self.power_w} if self.power_w is not None else {}
        limits |= {"cost": self.cost_usd_per_h} if self.cost_usd_per_h is not None else {}
        return limits

    def spot_worker_usd_per_h(self, capacity: Capacity) -> float:
        """A spot worker's GPUs and, for every interruption, a start."""
        offer = self.offer(capacity)
        return (offer.spot_usd_per_h or 0.0) * capacity.gpus + offer.interruptions_per_h * self.start_usd(
            capacity
        )

    def start_usd(self, capacity: Capacity) -> float:
        """b_c."""
        return capacity.start_s / 3600 * capacity.gpus * self.offer(capacity).highest_usd_per_h

    def spot_share(self, capacity: Capacity) -> float:
        """a_c: an interrupted worker is away for the time of a start."""
        return max(1 - self.offer(capacity).interruptions_per_h * capacity.start_s / 3600, 0.0)


@dataclass(frozen=True, slots=True)
class Demand:
    """`rate_rps` (M, T) of every LLM in windows of `window_s`."""

    llms: tuple[str, ...]
    rate_rps: Floats
    window_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """`workers` and `spot_workers` (C, T), `reserved_gpus` (G,), `on_demand_gpus` (G, T); USD/h on average.

    No schedule costs less than `bound_usd_per_h`.
    """

    workers: Counts
    spot_workers: Counts
    reserved_gpus: Counts
    on_demand_gpus: Counts
    cost_usd_per_h: float
    bound_usd_per_h: float

    @property
    def gap_frac(self) -> float:
        return 1 - self.bound_usd_per_h / self.cost_usd_per_h if self.cost_usd_per_h > 0 else 0.0


def schedule(
    market: Market,
    demand: Demand,
    *,
    gap_frac: float = GOOD_ENOUGH_FRAC,
    time_limit_s: float = 60.0,
    threads: int = 2,
) -> Schedule:
    """Solve the model above to `gap_frac`, or as far as the time allows. On one thread it is repeatable.

    Raises InfeasibleError: "latency" for an LLM that no type serves, "capacity" for too tight a limit.
    """
    from ortools.sat.python import cp_model

    _check(market, demand)
    model = _Model(market, demand)
    model.cp.minimize(model.cost(math.floor))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = threads
    solver.parameters.linearization_level = 2
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.relative_gap_limit = gap_frac
    status = solver.solve(model.cp)
    if status == cp_model.INFEASIBLE:
        raise _too_tight(market, demand, time_limit_s)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise PlannerError(f"no schedule was found in {time_limit_s:g} s; allow more with --time-limit")
    found = bought(market, demand, model.values(solver, model.x), model.values(solver, model.y))
    bound = solver.best_objective_bound / USD_UNITS / demand.rate_rps.shape[1]
    return replace(found, bound_usd_per_h=min(max(bound, 0.0), found.cost_usd_per_h))


def at_peak(market: Market, demand: Demand, *, time_limit_s: float = 20.0) -> Schedule | None:
    """The cheapest fleet for every LLM's highest rate, kept through all windows; None beyond a limit."""
    highest = replace(demand, rate_rps=demand.rate_rps.max(axis=1, keepdims=True))
    try:
        return schedule(market, highest, time_limit_s=time_limit_s, threads=1)
    except InfeasibleError:  # peaks at different hours need not fit together
        return None


def by_rule(market: Market, demand: Demand) -> Schedule | None:
    """Aladdin's rule: ceil(k5 r + c5) firm workers per window, of each LLM's type with the cheapest rate.

    The rule covers every window it was fitted on. Reserved GPUs are then bought as cheaply as can be. None if
    that exceeds a limit, which the rule does not know.
    """
    _check(market, demand)
    workers = np.zeros((len(market.capacities), demand.rate_rps.shape[1]), np.int64)
    for m, llm in enumerate(demand.llms):
        own = [c for c, capacity in enumerate(market.capacities) if capacity.llm == llm]
        prices = {
            c: market.capacities[c].gpus * market.offer(market.capacities[c]).highest_usd_per_h for c in own
        }
        cheapest = min(own, key=lambda c: prices[c] / market.capacities[c].rate_rps)
        rate = demand.rate_rps[m]
        needed = np.ceil(rate / market.capacities[cheapest].rate_rps - 1e-9)
        if len(np.unique(rate)) > 1:
            needed = fit_worker_rule(rate, needed, covers=True).workers(rate)
        workers[cheapest] = needed
    found = bought(market, demand, workers, np.zeros_like(workers))
    return None if broken(market, demand, found) else found


def bought(market: Market, demand: Demand, workers: Counts, spot_workers: Counts) -> Schedule:
    """The schedule with these workers and the cheapest mix of reserved and on-demand GPUs for them."""
    windows = workers.shape[1]
    reserved = np.zeros(len(market.offers), np.int64)
    on_demand = np.zeros((len(market.offers), windows), np.int64)
    cost = 0.0
    for g, offer in enumerate(market.offers):
        own = [c for c, capacity in enumerate(market.capacities) if capacity.gpu == offer.gpu]
        gpus = sum((market.capacities[c].gpus * workers[c] for c in own), np.zeros(windows, np.int64))
        levels = [0, *np.unique(gpus).tolist()] if offer.reserved_usd_per_h is not None else [0]
        if offer.on_demand_usd_per_h is None:
            levels = [int(gpus.max())]
        bills = [
            (offer.reserved_usd_per_h or 0.0) * level
            + (offer.on_demand_usd_per_h or 0.0) * float(np.maximum(gpus - level, 0).mean())
            for level in levels
        ]
        reserved[g] = levels[int(np.argmin(bills))]
        on_demand[g] = np.maximum(gpus - reserved[g], 0)
        cost += min(bills)
    for c, capacity in enumerate(market.capacities):
        start = market.start_usd(capacity)
        cost += market.spot_worker_usd_per_h(capacity) * float(spot_workers[c].mean())
        for counts in (workers[c], spot_workers[c]):
            starts = np.maximum(counts - np.roll(counts, 1), 0).mean()
            cost += start * float(starts) / (demand.window_s / 3600)
    return Schedule(workers, spot_workers, reserved, on_demand, cost, 0.0)


def broken(market: Market, demand: Demand, found: Schedule) -> str | None:
    """The first constraint of the model that a schedule does not keep, by name."""
    rate = np.array([capacity.rate_rps for capacity in market.capacities])[:, None]
    share = np.array([market.spot_share(capacity) for capacity in market.capacities])[:, None]
    for m, llm in enumerate(demand.llms):
        own = [c for c, capacity in enumerate(market.capacities) if capacity.llm == llm]
        firm = (rate * found.workers)[own].sum(axis=0)
        carried = firm + (rate * share * found.spot_workers)[own].sum(axis=0)
        if (carried < demand.rate_rps[m] * (1 - 1e-6) - 1e-9).any():
            return f"served {llm}"
        if (firm < (1 - market.most_spot_frac) * demand.rate_rps[m] * (1 - 1e-6) - 1e-9).any():
            return f"firm {llm}"
    gpus = np.array([capacity.gpus for capacity in market.capacities])[:, None]
    for g, offer in enumerate(market.offers):
        own = [c for c, capacity in enumerate(market.capacities) if capacity.gpu == offer.gpu]
        there = found.reserved_gpus[g] + found.on_demand_gpus[g]
        if ((gpus * found.workers)[own].sum(axis=0) > there).any():
            return f"held {offer.gpu}"
        spot = (gpus * found.spot_workers)[own].sum(axis=0)
        if offer.stock is not None and (there + spot > offer.stock).any():
            return f"stock {offer.gpu}"
    watts = np.array([capacity.power_w for capacity in market.capacities])[:, None]
    most_w = (watts * (found.workers + found.spot_workers)).sum(axis=0).max()
    if market.power_w is not None and most_w > market.power_w * (1 + 1e-9):
        return "power"
    if market.cost_usd_per_h is not None and found.cost_usd_per_h > market.cost_usd_per_h * (1 + 1e-6):
        return "budget"
    return None


class _Model:
    """The model in CP-SAT; with `gives_way` every limit may be exceeded by an integer variable of its own."""

    def __init__(self, market: Market, demand: Demand, *, gives_way: bool = False) -> None:
        from ortools.sat.python import cp_model

        self.market, self.demand, self.cp = market, demand, cp_model.CpModel()
        capacities, offers = market.capacities, market.offers
        self.windows = range(demand.rate_rps.shape[1])
        highest = demand.rate_rps.max(axis=1)
        most = [
            math.ceil(highest[demand.llms.index(c.llm)] / c.rate_rps / (market.spot_share(c) or 1.0)) + 1
            if c.llm in demand.llms
            else 0
            for c in capacities
        ]
        is_spot = [
            market.offer(c).spot_usd_per_h is not None
            and market.most_spot_frac > 0
            and market.spot_share(c) > 0
            for c in capacities
        ]
        spot = [count if may else 0 for count, may in zip(most, is_spot, strict=True)]
        gpus = [
            sum(n * c.gpus for n, c in zip(most, capacities, strict=True) if c.gpu == o.gpu) for o in offers
        ]
        self.x, self.u = self._grid("x", most), self._grid("u", most)
        self.y, self.v = self._grid("y", spot), self._grid("v", spot)
        self.reserved = [
            self.cp.new_int_var(0, n if offer.reserved_usd_per_h is not None else 0, f"R_{offer.gpu}")
            for n, offer in zip(gpus, offers, strict=True)
        ]
        self.on_demand = self._grid(
            "O", [n if o.on_demand_usd_per_h is not None else 0 for n, o in zip(gpus, offers, strict=True)]
        )
        self.excess: dict[str, cp_model.IntVar] = {}
        if gives_way:
            self.excess = {name: self.cp.new_int_var(0, 2**40, name) for name in market.limits()}
        self._serve()
        self._stay_within()

    def _grid(self, name: str, most: Sequence[int]) -> list[list[cp_model.IntVar]]:
        return [
            [self.cp.new_int_var(0, count, f"{name}_{i}_{t}") for t in self.windows]
            for i, count in enumerate(most)
        ]

    def _serve(self) -> None:
        """served, firm, started."""
        market, capacities = self.market, self.market.capacities
        for m, llm in enumerate(self.demand.llms):
            own = [c for c, capacity in enumerate(capacities) if capacity.llm == llm]
            unit = RATE_UNITS / max(float(self.demand.rate_rps[m].max()), 1e-9)
            firm = {c: round(capacities[c].rate_rps * unit) for c in own}
            spot = {c: round(capacities[c].rate_rps * market.spot_share(capacities[c]) * unit) for c in own}
            for t in self.windows:
                rate = float(self.demand.rate_rps[m, t]) * unit * (1 - RATE_TOLERANCE)
                carried = sum(firm[c] * self.x[c][t] for c in own)
                self.cp.add(carried + sum(spot[c] * self.y[c][t] for c in own) >= math.floor(rate))
                self.cp.add(carried >= math.floor((1 - market.most_spot_frac) * rate))
        for c in range(len(capacities)):
            for t in self.windows:
                self.cp.add(self.x[c][t] - self.x[c][t - 1] <= self.u[c][t])
                self.cp.add(self.y[c][t] - self.y[c][t - 1] <= self.v[c][t])

    def _stay_within(self) -> None:
        """held, stock, power, budget."""
        market, capacities = self.market, self.market.capacities
        for g, offer in enumerate(market.offers):
            own = [c for c, capacity in enumerate(capacities) if capacity.gpu == offer.gpu]
            for t in self.windows:
                there = self.reserved[g] + self.on_demand[g][t]
                self.cp.add(sum(capacities[c].gpus * self.x[c][t] for c in own) <= there)
                if offer.stock is not None:
                    spot = sum(capacities[c].gpus * self.y[c][t] for c in own)
                    self.cp.add(there + spot <= offer.stock + self.excess.get(f"stock of {offer.gpu}", 0))
        if market.power_w is not None:
            for t in self.windows:
                watts = sum(
                    math.ceil(capacity.power_w) * (self.x[c][t] + self.y[c][t])
                    for c, capacity in enumerate(capacities)
                )
                self.cp.add(watts <= math.floor(market.power_w) + self.excess.get("power", 0))
        if market.cost_usd_per_h is not None:
            budget = math.floor(market.cost_usd_per_h * USD_UNITS) + self.excess.get("cost", 0)
            self.cp.add(self.cost(math.ceil) <= len(self.windows) * budget)

    def cost(self, rounding: Callable[[float], int]) -> cp_model.LinearExprT:
        """The objective over all windows, in units of money."""
        market, window_h = self.market, self.demand.window_s / 3600
        terms: list[cp_model.LinearExprT] = []
        for g, offer in enumerate(market.offers):
            reserved = rounding((offer.reserved_usd_per_h or 0.0) * USD_UNITS)
            terms.append(len(self.windows) * reserved * self.reserved[g])
            on_demand = rounding((offer.on_demand_usd_per_h or 0.0) * USD_UNITS)
            terms += [on_demand * gpus for gpus in self.on_demand[g]]
        for c, capacity in enumerate(market.capacities):
            start = rounding(market.start_usd(capacity) / window_h * USD_UNITS)
            spot = rounding(market.spot_worker_usd_per_h(capacity) * USD_UNITS)
            terms += [spot * workers for workers in self.y[c]]
            terms += [start * workers for started in (self.u[c], self.v[c]) for workers in started]
        return sum(terms)

    def values(self, solver: cp_model.CpSolver, grid: Sequence[Sequence[cp_model.IntVar]]) -> Counts:
        return np.array([[solver.value(variable) for variable in row] for row in grid], np.int64)


def _check(market: Market, demand: Demand) -> None:
    for m, llm in enumerate(demand.llms):
        if demand.rate_rps[m].max() > 0 and all(capacity.llm != llm for capacity in market.capacities):
            raise InfeasibleError(
                f"no worker type serves {llm}: add one that sustains a rate within its SLO, or relax the SLO",
                kind="latency",
                constraint=llm,
                relaxation="a worker type that serves it",
            )
    if market.capacities and len(market.capacities) * demand.rate_rps.shape[1] > MOST_CELLS:
        raise InputError(f"schedule: more than {MOST_CELLS} windows x worker types; take longer windows")


def _too_tight(market: Market, demand: Demand, time_limit_s: float) -> PlannerError:
    """Which limits have to give way, and by how much at least, each weighed as a share of what it is."""
    from ortools.sat.python import cp_model

    model = _Model(market, demand, gives_way=True)
    limits = market.limits()
    units = {name: USD_UNITS if name == "cost" else 1 for name in limits}
    weights = {name: max(round(1e6 / max(limit * units[name], 1)), 1) for name, limit in limits.items()}
    model.cp.minimize(sum(weights[name] * excess for name, excess in model.excess.items()))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model.cp)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return PlannerError("the limits are too tight, and the time did not suffice to say which by how much")
    more = {name: solver.value(excess) / units[name] for name, excess in model.excess.items()}
    more = {name: amount for name, amount in more.items() if amount}
    said = {"power": "W of power", "cost": "USD/h of cost"}
    says = [
        f"{amount:g} more {said.get(name, name.replace('stock of ', 'GPUs of '))}"
        for name, amount in more.items()
    ]
    fewest = "" if status == cp_model.OPTIMAL else " (or less)"
    return InfeasibleError(
        f"the demand does not fit {', '.join(f'{name} ({limits[name]:g})' for name in more)}; "
        f"with {' and '.join(says)} it would{fewest}",
        kind="capacity",
        constraint=", ".join(more),
        relaxation=" and ".join(says),
    )
