"""From plans and tables to schedule.yaml, and the command that gives the same schedule."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from planner.documents.task import Task
from planner.domain import Gpu, market_of, row_of
from planner.units import quantity
from ui.store import Document

HOURS, WEEK_DAYS = 24, 7
BUSY_WORKERS = 3
TROUGH = 0.3  # of the peak, in the demand one starts from
# the inputs of a GPU and of a worker, by what schedule.yaml calls them
PRICES = {"on_demand": "On demand [USD/h]", "reserved": "Reserved [USD/h]", "spot": "Spot [USD/h]"}
INTERRUPTIONS = "Interruptions of a spot worker [per h]"
QUANTITIES = {
    "rate": ("Sustains [requests/s]", "rps", "req/s"),
    "power": ("Power [W]", "w", "W"),
    "start": ("Start [min]", "s", "min"),
}
MADE_UP: Document = {
    "gpus": {"h100-80g": {"on_demand": "2.99 usd/h"}},
    "capacity": [
        {
            "llm": "llama-3.1-70b",
            "worker": "4 × h100-80g",
            "gpu": "h100-80g",
            "gpus": 4,
            "rate": "10 req/s",
            "power": "2800 W",
        }
    ],
}


def kinds(plan: Document) -> list[str]:
    """The GPUs of a plan; those on spot count as the others."""
    return sorted({row_of(pool["gpu"]) for pool in plan["workers"]})


def offered(plan: Document, gpu: Gpu, task: Task) -> Document:
    """The line of `gpus` for a GPU of a plan: its price, and how many its question may use.

    The price is what the plan pays, or what the catalog says where it has the GPU on spot or other ones too.
    """
    names = {pool["gpu"] for pool in plan["workers"]}
    usd_per_h = gpu.price_usd_per_h
    if len(kinds(plan)) == 1 and not any(map(market_of, names)):
        usd_per_h = plan.get("bill", {}).get("by_gpu_usd_per_h", plan["cost_usd_per_h"]) / plan["gpus"]
    reserved = gpu.name in task.reserved or gpu.base in task.reserved
    found: Document = {"reserved" if reserved else "on_demand": f"{usd_per_h:.6g} usd/h"}
    known = [count for count in (task.stock.get(gpu.name), task.gpu_limit) if count is not None]
    return found | ({"stock": min(known)} if known else {})


def limits(task: Task) -> Document:
    """What the question of a plan allows in all, as schedule.yaml has it."""
    found = {"power": (task.power_limit_w, "W"), "cost": (task.cost_limit_usd_per_h, "usd/h")}
    return {key: f"{amount:.12g} {unit}" for key, (amount, unit) in found.items() if amount is not None}


def unit(plan: Document, gpus: Mapping[str, Gpu]) -> Document:
    """The smallest whole part of a plan's fleet, with its part of the rate; `gpus` are its kinds.

    Of one mixed pool that is a worker; of 6 prefill and 2 decode workers it is 3 and 1, whatever their GPUs.
    """
    pools = plan["workers"]
    units = math.gcd(*(pool["count"] for pool in pools))
    each = [
        (pool["count"] // units, pool["role"], pool["tp"] * pool.get("pp", 1), row_of(pool["gpu"]))
        for pool in pools
    ]
    on: dict[str, int] = Counter()
    for count, _, size, gpu in each:
        on[gpu] += count * size
    if len(each) == 1:
        ((_, _, size, gpu),) = each
        name = f"{size} × {gpu}"
    elif len(on) == 1:
        parts = " + ".join(f"{count} {role} of {size}" for count, role, size, _ in each)
        name = f"{parts} × {each[0][3]}"
    else:
        name = " + ".join(f"{count} {role} of {size} × {gpu}" for count, role, size, gpu in each)
    one = {"gpu": each[0][3], "gpus": on[each[0][3]]}
    return {
        "llm": plan["llm"],
        "worker": name,
        **(one if len(on) == 1 else {"gpu": dict(on)}),
        "rate": f"{plan['rate_rps'] / units:.4g} req/s",
        "power": f"{sum(count * gpus[gpu].power_w for gpu, count in on.items()):g} W",
    }


def on_text(row: Mapping[str, Any]) -> str:
    """The GPUs of a worker: '8 × h100-80g + 4 × a100-80g'."""
    gpu = row.get("gpu", "")
    on = gpu if isinstance(gpu, Mapping) else {gpu: row.get("gpus", 1)}
    return " + ".join(f"{count} × {name}" for name, count in on.items())


def on_of(text: str) -> Document:
    """The same back, as schedule.yaml has it; what is no such text is left to whoever reads schedule.yaml."""
    on: dict[str, int] = Counter()
    for part in text.split("+"):
        count, times, name = part.strip().partition(" × ")
        if not (times and count.strip().isdigit()):
            return {"gpu": text.strip()}
        on[name.strip()] += int(count)
    if len(on) > 1:
        return {"gpu": dict(on)}
    ((name, gpus),) = on.items()
    return {"gpu": name, "gpus": gpus}


def gpus_of(row: Mapping[str, Any]) -> dict[str, int]:
    """GPUs of each kind of a worker, of a row of `capacity` that may be half written."""
    gpu = row.get("gpu", "?")
    return dict(gpu) if isinstance(gpu, Mapping) else {str(gpu): int(row.get("gpus", 1))}


def number(value: Any, unit: str) -> float | None:
    """A quantity without the digits that only a change of unit made."""
    return None if value is None else float(f"{quantity(value, unit, where='schedule.yaml'):.12g}")


def llms(capacity: Sequence[Document]) -> list[str]:
    return list(dict.fromkeys(str(row.get("llm", "?")) for row in capacity))


def made_up(asked: Document) -> list[Document]:
    """A day of every LLM, at most three of its workers busy, or as many as the stock has for all."""
    return shaped(usual_peaks(asked), days=1, night_frac=TROUGH, weekend_frac=1.0)


def usual_peaks(asked: Document) -> dict[str, float]:
    """Requests/s of every LLM at the busiest hour."""
    capacity = asked["capacity"]
    rates = {str(row.get("llm", "?")): number(row.get("rate", 1.0), "rps") or 1.0 for row in capacity}
    gpus: Counter[str] = Counter()
    for row in capacity:
        gpus.update(gpus_of(row))
    stock = {gpu: offer["stock"] for gpu, offer in asked["gpus"].items() if "stock" in offer}
    busy = min([BUSY_WORKERS, *(int(stock[gpu]) // count for gpu, count in gpus.items() if gpu in stock)])
    return {llm: max(busy, 1) * rate for llm, rate in rates.items()}


def shaped(
    peaks_rps: Mapping[str, float], *, days: int, night_frac: float, weekend_frac: float
) -> list[Document]:
    """Hours of days, Monday first: nights (0 to 8) and weekends by their share of the busiest hours (8 to
    18), evenings half way between day and night.
    """
    rows = []
    for hour in range(HOURS * days):
        day, of_day = divmod(hour, HOURS)
        factor = night_frac if of_day < 8 else 1.0 if of_day < 18 else (1 + night_frac) / 2
        factor *= weekend_frac if day % WEEK_DAYS >= 5 else 1.0
        rows.append({"window": hour} | {llm: round(peak * factor, 2) for llm, peak in peaks_rps.items()})
    return rows


def table(rows: Sequence[Document]) -> str:
    """Rows of `shaped` as demand.csv has them."""
    head = list(rows[0]) if rows else ["window"]
    return "".join(f"{','.join(map(str, line))}\n" for line in (head, *(row.values() for row in rows)))


def command(demand: Document, window: str, options: Document) -> str:
    """What gives the same schedule on a command line, beside schedule.yaml and the demand."""
    words = ["plan", "schedule", "schedule.yaml", "--window", window]
    for llm, path in demand.get("traces", {}).items():
        words += ["--trace", f"{llm}={path.rpartition('/')[2]}"]
    words += ["--demand", "demand.csv"] if "demand" in demand else []
    words += ["--gap", f"{options['gap_frac']:g}", "--time-limit", f"{options['time_limit_s']:g}"]
    words += ["--seed", str(options["seed"])] if options["seed"] else []
    return shlex.join([*words, "-o", "out/"])
