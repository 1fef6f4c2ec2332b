"""Chooses reserved, on-demand and spot workers per window for demand that changes over the week.

Sets   m LLM     c worker type of an LLM (`LlmWorkerType`)     g GPU
       t window; after the last comes the first
Data   r_mt   arrival rate                                                          [requests/s]
       k_c    rate one worker sustains within the SLO;  a_c  share of it that interruptions leave on spot
       n_cg, w_c  GPUs of each kind, and Watts, of a worker
       p_g, o_g, s_g  price of a GPU reserved for all windows, on demand, on spot       [USD/h]
       b_c    cost of starting a worker: its GPUs while it loads, at their highest price        [USD]
       i_g    interruptions of a spot worker by GPU g; a worker has the sum over its kinds of GPUs  [1/h]
       G_g, Q, B  stock of GPUs, Watts, USD/h on average;   phi  share spot may carry;   H  hours of a window
Vars   x_ct, y_ct firm and spot workers;   u_ct, v_ct of them started in t
       R_g, O_gt GPUs reserved and on demand                                  (all integer >= 0)

  min   sum_g p_g R_g + mean_t [ sum_g o_g O_gt + sum_c (s_g n_cg + i_g b_c) y_ct + b_c (u_ct + v_ct) / H ]
  s.t.  served_mt     sum_{c of m} k_c (x_ct + a_c y_ct) >= r_mt
        firm_mt       sum_{c of m} k_c x_ct >= (1 - phi) r_mt
        held_gt       sum_{c on g} n_cg x_ct <= R_g + O_gt
        stock_gt      R_g + O_gt + sum_{c on g} n_cg y_ct <= G_g
        started_ct    x_ct - x_c,t-1 <= u_ct,   y_ct - y_c,t-1 <= v_ct
        power_t       sum_c w_c (x_ct + y_ct) <= Q
        budget        the objective <= B

Several LLMs share stock, power and budget; a reserved GPU may serve another LLM in the next window, for the
price of a start. The answer is compared with two others. `schedule_at_peak` is the cheapest fleet that
carries every LLM's peak all the time; `schedule_by_rule` is Aladdin's N = ceil(k5 r + c5) with each LLM's
cheapest type, and ignores what starts cost. schedule_pricing.py solves the model. Rates and the budget may be
missed by one in a million.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from planner.domain import COST, POWER, ROUNDING, FleetLimit, Slo
from planner.errors import Change, InfeasibleError, InputError, PlannerError
from planner.solvers.backend import minimise_program
from planner.solvers.schedule_pricing import Cover, WindowsModel, search_schedule
from planner.solvers.worker_rule import fit_worker_rule
from planner.units import HOUR_S, show_amount

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GOOD_ENOUGH_FRAC = 0.005  # The search stops at this gap, since nobody knows the demand more exactly.
# The search for the fleet of the peak stops at this gap; it is quick all the same, with only one window.
PEAK_GAP_FRAC = 1e-4
MOST_CELLS = 200_000  # More windows times worker types are refused: set by hand, for memory and time.
MOST_EXCESS = 1e7  # No schedule exceeds a limit by this many GPUs or Watts.
RATE_FRAC = 1e-6  # Rates and the budget are kept to within this share, as the solver keeps rows.


@dataclass(frozen=True, slots=True)
class GpuOffer:
    """What a GPU costs on each market (None: it is not sold there), how many there are, and how many of them
    may be reserved (None: any number).
    """

    gpu: str
    on_demand_usd_per_h: float | None
    reserved_usd_per_h: float | None = None
    spot_usd_per_h: float | None = None
    interruptions_per_h: float = 0.0
    stock: int | None = None
    most_reserved: int | None = None

    @property
    def highest_usd_per_h(self) -> float:
        """The highest price at which this GPU is sold on any market."""
        prices = (self.on_demand_usd_per_h, self.reserved_usd_per_h, self.spot_usd_per_h)
        return max(price for price in prices if price is not None)

    def reservable(self, gpus: float) -> float:
        """How many of `gpus` GPUs may be reserved."""
        if self.reserved_usd_per_h is None:
            return 0
        return gpus if self.most_reserved is None else min(gpus, self.most_reserved)


@dataclass(frozen=True, slots=True)
class LlmWorkerType:
    """A worker type for one LLM: the rate one worker sustains, its GPUs, and how long it takes to start.

    A worker here may be several engines together, such as prefill and decode workers. `gpus` counts those of
    the kind `gpu`; `other_gpus` are the other kinds of its GPUs, with their numbers. `fleet` is the file with
    the pools of one such worker; only the simulation of a schedule (search/schedules) reads it.
    """

    llm: str
    name: str
    gpu: str
    gpus: int
    rate_rps: float
    power_w: float = 0.0
    start_s: float = 300.0
    fleet: Path | None = None
    other_gpus: tuple[tuple[str, int], ...] = ()

    @property
    def gpu_counts(self) -> dict[str, int]:
        """How many GPUs of each kind one worker has, by name."""
        return {self.gpu: self.gpus, **dict(self.other_gpus)}


@dataclass(frozen=True, slots=True)
class Market:
    """What may be bought: GPUs, worker types, and the limits on both. Only the simulation of a schedule reads
    `slos`, by LLM. `note` says what a schedule of this market leaves out.
    """

    offers: tuple[GpuOffer, ...]
    worker_types: tuple[LlmWorkerType, ...]
    most_spot_frac: float = 0.0
    power_w: float | None = None
    cost_usd_per_h: float | None = None
    slos: Mapping[str, Slo] = field(default_factory=dict)
    note: str = ""

    def types_of(self, llm: str) -> list[int]:
        """The numbers c of the worker types that serve an LLM."""
        return [c for c, worker_type in enumerate(self.worker_types) if worker_type.llm == llm]

    def gpus_per_worker(self, offer: GpuOffer) -> Ints:
        """n_cg (C,): how many of these GPUs one worker of each type has."""
        return np.array(
            [worker_type.gpu_counts.get(offer.gpu, 0) for worker_type in self.worker_types], np.int64
        )

    def offers_of(self, worker_type: LlmWorkerType) -> list[tuple[GpuOffer, int]]:
        """The offer of each kind of GPU that a worker has, and how many of them it has."""
        gpu_counts = worker_type.gpu_counts
        return [(offer, gpu_counts[offer.gpu]) for offer in self.offers if offer.gpu in gpu_counts]

    def highest_usd_per_h(self, worker_type: LlmWorkerType) -> float:
        """The price of a worker's GPUs, each at its highest price."""
        return sum(offer.highest_usd_per_h * gpus for offer, gpus in self.offers_of(worker_type))

    def interruptions_per_h(self, worker_type: LlmWorkerType) -> float:
        """How often in an hour a spot worker is interrupted: whenever one of its GPUs is taken back."""
        return sum(offer.interruptions_per_h for offer, _ in self.offers_of(worker_type))

    def is_on_spot(self, worker_type: LlmWorkerType) -> bool:
        """Whether all GPUs of a worker are sold on the spot market."""
        return all(offer.spot_usd_per_h is not None for offer, _ in self.offers_of(worker_type))

    def limits(self) -> dict[FleetLimit, float]:
        """Every limit that is set, with its amount."""
        limits = {
            FleetLimit("stock", offer.gpu): float(offer.stock)
            for offer in self.offers
            if offer.stock is not None
        }
        limits |= {POWER: self.power_w} if self.power_w is not None else {}
        limits |= {COST: self.cost_usd_per_h} if self.cost_usd_per_h is not None else {}
        return limits

    def spot_worker_usd_per_h(self, worker_type: LlmWorkerType) -> float:
        """What a spot worker costs: its GPUs, and a start for every interruption."""
        rent = sum((offer.spot_usd_per_h or 0.0) * gpus for offer, gpus in self.offers_of(worker_type))
        return rent + self.interruptions_per_h(worker_type) * self.start_usd(worker_type)

    def start_usd(self, worker_type: LlmWorkerType) -> float:
        """What starting a worker costs (b_c): its GPUs while it loads, at their highest price."""
        return worker_type.start_s / HOUR_S * self.highest_usd_per_h(worker_type)

    def spot_share(self, worker_type: LlmWorkerType) -> float:
        """a_c: the share of time that a spot worker serves; each interruption costs the time of a start."""
        return max(1 - self.interruptions_per_h(worker_type) * worker_type.start_s / HOUR_S, 0.0)


@dataclass(frozen=True, slots=True)
class Demand:
    """`rate_rps` (M, T) of every LLM in windows of `window_s`; `note` says which traffic was left out."""

    llms: tuple[str, ...]
    rate_rps: Floats
    window_s: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`workers` and `spot_workers` (C, T), `reserved_gpus` (G,), `on_demand_gpus` (G, T); costs are means
    over the windows. No schedule costs less than `bound_usd_per_h`.
    """

    workers: Ints
    spot_workers: Ints
    reserved_gpus: Ints
    on_demand_gpus: Ints
    cost_usd_per_h: float
    bound_usd_per_h: float

    @property
    def gap_frac(self) -> float:
        """The share of the cost that is above the bound."""
        return 1 - self.bound_usd_per_h / self.cost_usd_per_h if self.cost_usd_per_h > 0 else 0.0


def schedule(
    market: Market, demand: Demand, *, gap_frac: float = GOOD_ENOUGH_FRAC, time_limit_s: float = 60.0
) -> Schedule:
    """Solve the model above to `gap_frac`, or as far as the time allows. If the search ends in time, the
    answer is the same on every machine.

    Raises InfeasibleError: "latency" for an LLM that no type serves, "capacity" for too tight a limit.
    """
    _refuse_unsolvable(market, demand)
    deadline = time.monotonic() + time_limit_s
    # `search_schedule` has counts (2 C, T) of firm workers, then spot workers, and costs summed over windows.
    windows, type_count = demand.rate_rps.shape[1], len(market.worker_types)
    budget = math.inf if market.cost_usd_per_h is None else market.cost_usd_per_h
    unlimited = replace(market, cost_usd_per_h=None)  # The search itself knows the budget.

    def cost_of(counts: Ints) -> float:
        """The cost of these workers over all windows; infinite if they break a constraint other than the
        budget.
        """
        priced_schedule = buy_gpus(market, demand, counts[:type_count], counts[type_count:])
        if find_broken_constraint(unlimited, demand, priced_schedule) is not None:
            return math.inf
        return float(windows * priced_schedule.cost_usd_per_h)

    bound, best = search_schedule(
        _windows_model(market, demand), cost_of, gap_frac, windows * budget, deadline
    )
    if bound == math.inf:
        raise _limits_error(market, demand, time_limit_s)
    if bound > windows * budget:  # The error says how much money would do: that of the cheapest schedule.
        bound, best = search_schedule(_windows_model(market, demand), cost_of, gap_frac, math.inf, deadline)
    if best is None:
        raise PlannerError(f"no schedule was found in {time_limit_s:g} s; allow more with --time-limit")
    # The search stops at the gap, so its answer may still stop and start workers whose reserved GPUs are paid
    # at all hours anyway. So the schedule that keeps all workers on is compared with it.
    kept_on = np.broadcast_to(best.max(axis=1, keepdims=True), best.shape)
    best = min(best, kept_on, key=cost_of)
    priced_schedule = buy_gpus(market, demand, best[:type_count], best[type_count:])
    if find_broken_constraint(market, demand, priced_schedule) is not None:
        raise _budget_error(priced_schedule.cost_usd_per_h, bound / windows, budget, time_limit_s)
    return replace(
        priced_schedule, bound_usd_per_h=min(max(bound / windows, 0.0), priced_schedule.cost_usd_per_h)
    )


def schedule_at_peak(market: Market, demand: Demand, *, time_limit_s: float = 20.0) -> Schedule | None:
    """The cheapest fleet for every LLM's highest rate, kept through all windows; None if it exceeds a
    limit.
    """
    highest = replace(demand, rate_rps=demand.rate_rps.max(axis=1, keepdims=True))
    try:
        return schedule(market, highest, gap_frac=PEAK_GAP_FRAC, time_limit_s=time_limit_s)
    except InfeasibleError:  # Peaks of different hours may exceed a limit together, though no hour does.
        return None


def schedule_by_rule(market: Market, demand: Demand) -> Schedule | None:
    """Aladdin's rule: ceil(k5 r + c5) firm workers per window, of the type with the lowest price per request
    for each LLM.

    The rule has enough workers in every window, because it is fitted to these windows. The cheapest mix of
    reserved and on-demand GPUs is then bought. The rule knows no limits; returns None if its schedule exceeds
    one.
    """
    _refuse_unsolvable(market, demand)
    workers = np.zeros((len(market.worker_types), demand.rate_rps.shape[1]), np.int64)
    for m, llm in enumerate(demand.llms):
        llm_worker_types = market.types_of(llm)
        prices = {c: market.highest_usd_per_h(market.worker_types[c]) for c in llm_worker_types}
        cheapest = min(llm_worker_types, key=lambda c: prices[c] / market.worker_types[c].rate_rps)
        rate = demand.rate_rps[m]
        needed = np.ceil(rate / market.worker_types[cheapest].rate_rps - ROUNDING)
        if len(np.unique(rate[rate > 0])) > 1:  # The line is fitted to rates above 0, and needs two of them.
            needed = fit_worker_rule(rate, needed).workers(rate)
        workers[cheapest] = needed
    priced_schedule = buy_gpus(market, demand, workers, np.zeros_like(workers))
    return None if find_broken_constraint(market, demand, priced_schedule) else priced_schedule


def buy_gpus(market: Market, demand: Demand, workers: Ints, spot_workers: Ints) -> Schedule:
    """The schedule with these workers and the cheapest mix of reserved and on-demand GPUs for them.

    Reserved GPUs that idle beside spot workers count against the stock too.
    """
    windows = workers.shape[1]
    reserved = np.zeros(len(market.offers), np.int64)
    on_demand = np.zeros((len(market.offers), windows), np.int64)
    cost = 0.0
    for g, offer in enumerate(market.offers):
        per_worker = market.gpus_per_worker(offer)
        gpus, spot_gpus = per_worker @ workers, per_worker @ spot_workers
        levels = reserved_levels(offer, gpus, int(spot_gpus.max()))
        bills = [
            (offer.reserved_usd_per_h or 0.0) * level
            + (offer.on_demand_usd_per_h or 0.0) * float(np.maximum(gpus - level, 0).mean())
            for level in levels
        ]
        reserved[g] = levels[int(np.argmin(bills))]
        on_demand[g] = np.maximum(gpus - reserved[g], 0)
        cost += min(bills)
    for c, worker_type in enumerate(market.worker_types):
        start_usd = market.start_usd(worker_type)
        cost += market.spot_worker_usd_per_h(worker_type) * float(spot_workers[c].mean())
        for counts in (workers[c], spot_workers[c]):
            # The window before the first is the last.
            starts = np.maximum(counts - np.roll(counts, 1), 0).mean()
            cost += start_usd * float(starts) / (demand.window_s / HOUR_S)
    return Schedule(workers, spot_workers, reserved, on_demand, cost, bound_usd_per_h=0.0)


def reserved_levels(offer: GpuOffer, gpus: Ints | Floats, most_spot_gpus: int) -> list[int]:
    """Numbers of GPUs to reserve, one of which gives the lowest bill. `gpus` (T,) are in use in each window
    or at each moment, beside at most `most_spot_gpus` on spot, which count against the stock too.
    """
    if offer.on_demand_usd_per_h is None:
        return [int(gpus.max())]  # If it exceeds the stock, `find_broken_constraint` says so.
    if offer.reserved_usd_per_h is None:
        return [0]
    most = offer.reservable(int(gpus.max()))
    if offer.stock is not None:
        most = min(most, max(offer.stock - most_spot_gpus, 0))
    return [0, *np.unique(np.minimum(gpus, most)).tolist()]


def cost_by_window(market: Market, demand: Demand, priced_schedule: Schedule) -> Floats:
    """(T,) USD/h of every window: GPUs reserved and on demand, spot workers, and the starts in it. The mean
    is the cost of the schedule.
    """
    cost = np.zeros(priced_schedule.workers.shape[1])
    for g, offer in enumerate(market.offers):
        cost += (offer.reserved_usd_per_h or 0.0) * priced_schedule.reserved_gpus[g]
        cost += (offer.on_demand_usd_per_h or 0.0) * priced_schedule.on_demand_gpus[g]
    for c, worker_type in enumerate(market.worker_types):
        cost += market.spot_worker_usd_per_h(worker_type) * priced_schedule.spot_workers[c]
        for counts in (priced_schedule.workers[c], priced_schedule.spot_workers[c]):
            started = np.maximum(counts - np.roll(counts, 1), 0)
            cost += market.start_usd(worker_type) * started / (demand.window_s / HOUR_S)
    return cost


def find_broken_constraint(market: Market, demand: Demand, priced_schedule: Schedule) -> str | None:
    """The first constraint of the model that a schedule does not keep, by name; None if it keeps all. The
    constraint `started` is kept by every schedule, as starts are counted from the workers.
    """
    rate = np.array([worker_type.rate_rps for worker_type in market.worker_types])[:, None]
    share = np.array([market.spot_share(worker_type) for worker_type in market.worker_types])[:, None]
    for m, llm in enumerate(demand.llms):
        llm_worker_types = market.types_of(llm)
        firm = (rate * priced_schedule.workers)[llm_worker_types].sum(axis=0)
        carried = firm + (rate * share * priced_schedule.spot_workers)[llm_worker_types].sum(axis=0)
        least_rps = demand.rate_rps[m] * (1 - RATE_FRAC)
        if (carried < least_rps - ROUNDING).any():
            return f"served {llm}"
        if (firm < (1 - market.most_spot_frac) * least_rps - ROUNDING).any():
            return f"firm {llm}"
    for g, offer in enumerate(market.offers):
        gpus = market.gpus_per_worker(offer)
        bought = priced_schedule.reserved_gpus[g] + priced_schedule.on_demand_gpus[g]
        if (gpus @ priced_schedule.workers > bought).any():
            return f"held {offer.gpu}"
        spot = gpus @ priced_schedule.spot_workers
        if offer.stock is not None and (bought + spot > offer.stock).any():
            return f"stock {offer.gpu}"
    watts = np.array([worker_type.power_w for worker_type in market.worker_types])[:, None]
    most_w = (watts * (priced_schedule.workers + priced_schedule.spot_workers)).sum(axis=0).max()
    if market.power_w is not None and most_w > market.power_w * (1 + ROUNDING):
        return "power"
    budget = math.inf if market.cost_usd_per_h is None else market.cost_usd_per_h * (1 + RATE_FRAC)
    return "budget" if priced_schedule.cost_usd_per_h > budget else None


def _windows_model(market: Market, demand: Demand, excess_prices: Sequence[float] = ()) -> WindowsModel:
    """The model without the budget, in the arrays of schedule_pricing.py. Costs are summed over windows. The
    columns of a window are firm workers (C,), spot workers (C,), GPUs on demand (G,) and reserved GPUs (G,).

    With `excess_prices` every limit of stock and power may be exceeded, at that price per GPU or Watt (in the
    order of `_window_limits`), and nothing else costs anything. The excess over each limit is a further
    column after the reserved GPUs.
    """
    worker_types, offers = market.worker_types, market.offers
    type_count, gpu_count, windows = len(worker_types), len(offers), demand.rate_rps.shape[1]
    watts = np.array([worker_type.power_w for worker_type in worker_types], float)
    rate = np.array([worker_type.rate_rps for worker_type in worker_types], float)
    start_usd = np.array([market.start_usd(worker_type) for worker_type in worker_types], float)
    share = np.array(
        [
            market.spot_share(worker_type)
            if market.most_spot_frac and market.is_on_spot(worker_type)
            else 0.0
            for worker_type in worker_types
        ]
    )
    covers, most = [], np.zeros(2 * type_count)
    for m, llm in enumerate(demand.llms):
        llm_worker_types = np.array(market.types_of(llm), np.intp)
        spot = llm_worker_types[share[llm_worker_types] > 0]
        columns = np.concatenate((llm_worker_types, type_count + spot))
        carried = np.concatenate((rate[llm_worker_types], (share * rate)[spot]))
        most[columns] = np.ceil(demand.rate_rps[m].max() / carried) + 1  # One more for rounding.
        covers.append(Cover(columns, carried, demand.rate_rps[m]))
        if len(spot):
            firm = np.concatenate((rate[llm_worker_types], np.zeros(len(spot))))
            covers.append(Cover(columns, firm, (1 - market.most_spot_frac) * demand.rate_rps[m]))
    gpus_of = np.array([market.gpus_per_worker(offer) for offer in offers], float)
    no_gpus, each_gpu = np.zeros((gpu_count, type_count)), np.eye(gpu_count)
    limited = [g for g, offer in enumerate(offers) if offer.stock is not None]
    # The rows held_gt: firm workers have no more GPUs than are on demand and reserved.
    gpus_on_hand = np.hstack((-gpus_of, no_gpus, each_gpu, each_gpu))
    stock = np.hstack((no_gpus, -gpus_of, -each_gpu, -each_gpu))[limited]
    power = np.concatenate((-watts, -watts, np.zeros(2 * gpu_count)))[None]
    # Each row, times the columns of a window, must be at least `least`.
    rows = np.vstack([gpus_on_hand, stock, *([] if market.power_w is None else [power])])
    least = np.array([0.0] * gpu_count + [-amount for amount in _window_limits(market).values()])
    # The most GPUs of each kind that firm workers may need, and how many of them may be rented and reserved.
    needed = gpus_of @ most[:type_count]
    rented = [needed[g] if offer.on_demand_usd_per_h is not None else 0 for g, offer in enumerate(offers)]
    reservable = [offer.reservable(needed[g]) for g, offer in enumerate(offers)]
    if excess_prices:  # GPUs that are not sold on demand may then be reserved beyond `most_reserved`.
        reservable = [max(most_gpus, needed[g] - rented[g]) for g, most_gpus in enumerate(reservable)]
    spot_usd = [market.spot_worker_usd_per_h(worker_type) for worker_type in worker_types]
    cost = np.array(
        [*np.zeros(type_count), *spot_usd, *(offer.on_demand_usd_per_h or 0.0 for offer in offers)]
    )
    reserved = np.array([windows * (offer.reserved_usd_per_h or 0.0) for offer in offers])
    starts = np.tile(start_usd / (demand.window_s / HOUR_S), 2)
    most = np.concatenate((most, rented, reservable))
    if excess_prices:
        limits = np.array(list(_window_limits(market).values()))
        excess = np.vstack((np.zeros((gpu_count, len(limits))), np.eye(len(limits))))
        rows, most = np.hstack((rows, excess)), np.concatenate((most, np.full(len(limits), MOST_EXCESS)))
        # Nothing but the excess costs anything.
        cost, starts, reserved = 0 * cost, 0 * starts, np.concatenate((0 * reserved, excess_prices))
    return WindowsModel(
        covers,
        rows=rows,
        least=least,
        cost=cost,
        reserved_cost=reserved,
        start_cost=starts,
        most=most,
        windows=windows,
    )


def _window_limits(market: Market) -> dict[FleetLimit, float]:
    """`Market.limits` that hold in every window: stocks in the order of offers, then power."""
    return {limit: amount for limit, amount in market.limits().items() if limit != COST}


def _refuse_unsolvable(market: Market, demand: Demand) -> None:
    """Refuse a demand for an LLM that no worker type serves, and a problem that is too large."""
    for m, llm in enumerate(demand.llms):
        if demand.rate_rps[m].max() > 0 and not market.types_of(llm):
            served = ", ".join(sorted({worker_type.llm for worker_type in market.worker_types})) or "nothing"
            raise InfeasibleError(
                f"no worker type serves {llm}, which the demand names; those there are serve {served}: call "
                "the demand by that name, add a type that sustains a rate within its SLO, or relax the SLO",
                kind="latency",
                constraint=llm,
                relaxation="a worker type that serves it",
            )
    if market.worker_types and len(market.worker_types) * demand.rate_rps.shape[1] > MOST_CELLS:
        raise InputError(f"schedule: more than {MOST_CELLS} windows x worker types; take longer windows")


def _limits_error(market: Market, demand: Demand, time_limit_s: float) -> PlannerError:
    """The error that no schedule is within the limits, with the smallest changes that would help. To compare
    GPUs with Watts, a change counts as a share of its limit.
    """
    limits = _window_limits(market)
    model = _windows_model(market, demand, [1 / max(limit, 1.0) for limit in limits.values()])
    point = minimise_program(
        model.program(range(model.windows), model.true_prices()), time_limit_s=time_limit_s
    )
    if point.x is None:
        return PlannerError("the limits are too tight, and the time did not suffice to say by how much")
    excess = dict(zip(limits, point.x[-len(limits) :].tolist(), strict=True))
    more = {limit: amount for limit, amount in excess.items() if amount}
    changes = " and ".join(
        f"{show_amount(amount, limit.unit)} more {limit.unit} of {limit.gpu or limit.name}"
        for limit, amount in more.items()
    )
    fewest = "" if point.status == "optimal" else " (or less)"
    exceeded = ", ".join(f"{limit.name} ({show_amount(limits[limit], limit.unit)})" for limit in more)
    return InfeasibleError(
        f"the demand does not fit {exceeded}; with {changes} it would{fewest}",
        kind="capacity",
        constraint=[limit.name for limit in more],
        relaxation=changes,
        ways=[
            [
                Change(limit.name, limits[limit], limits[limit] + amount, limit.unit)
                for limit, amount in more.items()
            ]
        ],
    )


def _budget_error(
    cost_usd_per_h: float, bound_usd_per_h: float, budget_usd_per_h: float, time_limit_s: float
) -> PlannerError:
    """The error that the best schedule costs more than the budget. It says whether every schedule costs more,
    and how large a budget is enough.
    """
    if bound_usd_per_h <= budget_usd_per_h:
        return PlannerError(
            f"no schedule within the budget of {budget_usd_per_h:g} USD/h was found in {time_limit_s:g} s: "
            f"the best costs {cost_usd_per_h:.2f}, none less than {bound_usd_per_h:.2f}; allow more with "
            "--time-limit"
        )
    more = f"{cost_usd_per_h - budget_usd_per_h:.6g} more USD/h of cost"
    fewest = "" if bound_usd_per_h >= cost_usd_per_h * (1 - RATE_FRAC) else " (or less)"
    return InfeasibleError(
        f"the demand does not fit cost ({budget_usd_per_h:g}); with {more} it would{fewest}",
        kind="capacity",
        constraint=COST.name,
        relaxation=more,
        ways=[[Change(COST.name, budget_usd_per_h, cost_usd_per_h, COST.unit)]],
    )
