"""What `plan schedule` reads: schedule.yaml (prices, stock, what a worker sustains) and the demand.

    gpus:
      h100-80g: {on_demand: 6.98 usd/h, reserved: 4.4 usd/h, spot: 2.8 usd/h, interruptions: 0.05, stock: 64}
    capacity:
      - {llm: chat, worker: h100 tp4, gpu: h100-80g, gpus: 4, rate: 5.2 req/s, power: 2800 W, start: 5 min}
    spot: 0.25                                       # optional: most of an LLM's rate that spot may carry
    limits: {power: 80 kW, cost: 500 usd/h}          # optional

`rate` is what one worker sustains within the SLO, for instance a plan's traffic over its workers; those
`interruptions` come per hour of one spot worker. Demand is a CSV with a column per LLM, one row per window,
in requests/s, and a column named `window` for labels if you like; or a trace per LLM, counted in windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.errors import InputError
from planner.imports.fields import column, read_csv
from planner.io.files import read_yaml
from planner.io.values import refuse_unknown
from planner.solvers.schedule import Capacity, Demand, Market, Offer
from planner.traffic.trace import Trace
from planner.units import quantity

DEFAULT_START_S = 300.0
PRICES = ("on_demand", "reserved", "spot")


def read_market(path: Path) -> Market:
    """schedule.yaml; raises InputError naming file and field."""
    file = path / "plan.yaml" if (path / "plan.yaml").is_file() else path
    document = read_yaml(file)
    if "workers" in document and "capacity" not in document:
        raise InputError(
            f"{file}: is a plan or a fleet, which does not say what one worker sustains alone; expected a "
            "schedule.yaml: gpus with prices and stock, and under capacity the rate of every kind of worker, "
            "as `plan goodput` measures it"
        )
    try:
        return parse_market(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_demand(path: Path, *, window_s: float) -> Demand:
    """The CSV; its columns but `window` are LLMs."""
    return demand_of_table(read_csv(path), path, window_s=window_s)


def demand_of_table(table: pd.DataFrame, path: Path, *, window_s: float) -> Demand:
    """The same of a table; `path` names it in errors."""
    llms = tuple(str(name) for name in table.columns if name != "window")
    if not llms:
        raise InputError(f"{path}: has no column of rates; expected one per LLM beside `window`")
    return Demand(llms, np.array([column(table, llm, path) for llm in llms]), window_s)


def demand_of(traces: Mapping[str, Trace], *, window_s: float) -> Demand:
    """Mean rate per window of one trace per LLM, beginning together; a last window cut short is left out."""
    ends_s = [float(trace.arrival_s[-1]) for trace in traces.values()]
    windows = max(int(max(ends_s) // window_s), 1)
    edges_s = np.arange(windows + 1) * window_s
    counts = [np.histogram(trace.arrival_s, edges_s)[0] for trace in traces.values()]
    return Demand(tuple(traces), np.array(counts) / window_s, window_s)


def parse_market(document: Mapping[str, Any]) -> Market:
    """The same from a mapping."""
    refuse_unknown(document, ("gpus", "capacity", "spot", "limits"), "schedule")
    gpus, rows, limits = document.get("gpus"), document.get("capacity"), document.get("limits")
    if not isinstance(gpus, dict) or not gpus:
        raise InputError("gpus: expected at least one GPU with its prices")
    if not isinstance(rows, list) or not rows:
        raise InputError(
            "capacity: expected a list of worker types, each with the rate that one worker sustains"
        )
    if limits is None:
        limits = {}
    if not isinstance(limits, dict):
        raise InputError(f"limits: expected power and cost, found {limits!r}")
    refuse_unknown(limits, ("power", "cost"), "limits")
    offers = tuple(_offer(str(name), row) for name, row in gpus.items())
    capacities = tuple(_capacity(row, i, {offer.gpu for offer in offers}) for i, row in enumerate(rows))
    spot = document.get("spot", 0.0)
    if isinstance(spot, bool) or not isinstance(spot, int | float) or not 0 <= spot <= 1:
        raise InputError(f"spot: expected a share between 0 and 1, found {spot!r}")
    return Market(
        offers,
        capacities,
        float(spot),
        _positive(limits["power"], "w", "limits: power", least=0.0) if "power" in limits else None,
        _positive(limits["cost"], "usd_per_h", "limits: cost", least=0.0) if "cost" in limits else None,
    )


def _offer(gpu: str, row: object) -> Offer:
    where = f"gpus: {gpu}"
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected prices such as {{on_demand: 2 usd/h}}, found {row!r}")
    refuse_unknown(row, (*PRICES, "interruptions", "stock"), where)
    price = {
        name: _positive(row[name], "usd_per_h", f"{where}: {name}", least=0.0) if name in row else None
        for name in PRICES
    }
    if price["on_demand"] is None and price["reserved"] is None:
        raise InputError(f"{where}: needs a price on_demand or reserved; spot alone holds no promise")
    stock = row.get("stock")
    if stock is not None and (
        isinstance(stock, bool) or not isinstance(stock, int) or not 0 <= stock < 10**7
    ):
        raise InputError(f"{where}: stock: expected a whole number >= 0, found {stock!r}")
    interruptions = row.get("interruptions", 0.0)
    if (
        isinstance(interruptions, bool)
        or not isinstance(interruptions, int | float)
        or not 0 <= interruptions < 1e4
    ):
        raise InputError(f"{where}: interruptions: expected a number per hour, found {interruptions!r}")
    return Offer(gpu, price["on_demand"], price["reserved"], price["spot"], float(interruptions), stock)


def _capacity(row: object, i: int, gpus: set[str]) -> Capacity:
    where = f"capacity[{i}]"
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a worker type, found {row!r}")
    refuse_unknown(row, ("llm", "worker", "gpu", "gpus", "rate", "power", "start"), where)
    for name in ("llm", "worker", "gpu"):
        if not isinstance(row.get(name), str):
            raise InputError(f"{where}: {name}: expected a name, found {row.get(name)!r}")
    if row["gpu"] not in gpus:
        raise InputError(
            f"{where}: gpu: {row['gpu']!r} has no price under gpus; known: {', '.join(sorted(gpus))}"
        )
    count = row.get("gpus", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < 10**5:
        raise InputError(f"{where}: gpus: expected a whole number >= 1, found {count!r}")
    return Capacity(
        row["llm"],
        row["worker"],
        row["gpu"],
        count,
        _positive(row.get("rate"), "rps", f"{where}: rate", least=1e-6),
        _positive(row.get("power", 0), "w", f"{where}: power", least=0.0),
        _positive(row["start"], "s", f"{where}: start", least=0.0) if "start" in row else DEFAULT_START_S,
    )


def _positive(value: object, unit: str, where: str, *, least: float) -> float:
    number = quantity(value, unit, where=where)
    if number < least:
        raise InputError(f"{where}: expected at least {least:g}, found {value!r}")
    return number
