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
TROUGH = 0.3  # of the peak, in the table one starts from
# columns of the tables, by what schedule.yaml calls them
PRICES = {"on demand": "on_demand", "reserved": "reserved", "spot": "spot"}
OFFERED = ("GPU", *PRICES, "interruptions/h", "stock")
WORKER = {
    "llm": "llm",
    "worker": "worker",
    "gpu": "gpu",
    "gpus": "gpus",
    "requests/s": "rate",
    "W": "power",
    "start [min]": "start",
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


def firm_price(plan: Document, gpu: Gpu) -> str:
    """What a plan of one kind of GPU pays for it, or what the catalog says where it has it on spot."""
    is_firm = not any(market_of(pool["gpu"]) for pool in plan["workers"])
    by_gpu_usd_per_h = plan.get("bill", {}).get("by_gpu_usd_per_h", plan["cost_usd_per_h"])
    usd = by_gpu_usd_per_h / plan["gpus"] if is_firm else gpu.price_usd_per_h
    return f"{usd:.6g} usd/h"


def offered(plan: Document, gpu: Gpu, task: Task) -> Document:
    """The line of `gpus` for a plan of one kind of GPU: its price and how many its question may use."""
    reserved = gpu.name in task.reserved or gpu.base in task.reserved
    found: Document = {"reserved" if reserved else "on_demand": firm_price(plan, gpu)}
    known = [count for count in (task.stock.get(gpu.name), task.gpu_limit) if count is not None]
    return found | ({"stock": min(known)} if known else {})


def limits(task: Task) -> Document:
    """What the question of a plan allows in all, as schedule.yaml has it."""
    found = {"power": (task.power_limit_w, "W"), "cost": (task.cost_limit_usd_per_h, "usd/h")}
    return {key: f"{amount:.12g} {unit}" for key, (amount, unit) in found.items() if amount is not None}


def refused(plan: Document) -> str:
    """Why a plan is no kind of worker of a schedule; empty where it is one."""
    if len(names := kinds(plan)) == 1:
        return ""
    return (
        f"it has {' and '.join(names)}, and a worker of a schedule has one kind of GPU; plan with one kind, "
        "or write down what one worker of each kind sustains"
    )


def unit(plan: Document, gpu: Gpu) -> Document:
    """The smallest whole part of a fleet of one kind of GPU, with its part of the rate.

    Of one mixed pool that is a worker; of 6 prefill and 2 decode workers it is 3 and 1.
    """
    pools = plan["workers"]
    units = math.gcd(*(pool["count"] for pool in pools))
    each = [(pool["count"] // units, pool["role"], pool["tp"] * pool.get("pp", 1)) for pool in pools]
    gpus = sum(count * size for count, _, size in each)
    parts = " + ".join(f"{count} {role} of {size}" for count, role, size in each)
    return {
        "llm": plan["llm"],
        "worker": f"{gpus if len(each) == 1 else parts} × {gpu.name}",
        "gpu": gpu.name,
        "gpus": gpus,
        "rate": f"{plan['rate_rps'] / units:.4g} req/s",
        "power": f"{gpus * gpu.power_w:g} W",
    }


def offer_rows(gpus: Mapping[str, Document]) -> list[Document]:
    """The table of GPUs."""
    return [
        {"GPU": gpu, "interruptions/h": row.get("interruptions"), "stock": row.get("stock")}
        | {column: number(row.get(key), "usd_per_h") for column, key in PRICES.items()}
        for gpu, row in gpus.items()
    ]


def worker_rows(capacity: Sequence[Document]) -> list[Document]:
    """The table of workers."""
    units = {"rate": ("rps", 1), "power": ("w", 1), "start": ("s", 60)}
    rows = []
    for row in capacity:
        found = {column: row.get(key) for column, key in WORKER.items()}
        for column, key in WORKER.items():
            if key in units and key in row:
                unit, factor = units[key]
                found[column] = (number(row[key], unit) or 0.0) / factor
        rows.append(found)
    return rows


def offer(row: Mapping[str, Any]) -> Document:
    """A line of the table of GPUs, without its empty cells, as schedule.yaml has it."""
    found: Document = {key: f"{row[column]:.12g} usd/h" for column, key in PRICES.items() if column in row}
    if row.get("interruptions/h"):
        found["interruptions"] = row["interruptions/h"]
    return found | ({"stock": int(row["stock"])} if "stock" in row else {})


def worker(row: Mapping[str, Any]) -> Document:
    """A line of the table of workers, without its empty cells, as schedule.yaml has it."""
    found = {key: row[column] for column, key in WORKER.items() if column in row}
    units = {"rate": "req/s", "power": "W", "start": "min"}
    return found | {key: f"{found[key]:.12g} {unit}" for key, unit in units.items() if key in found}


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
        gpus[row.get("gpu", "?")] += int(row.get("gpus", 1))
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


def command(demand: Document, window: str, options: Document) -> str:
    """What gives the same schedule on a command line, beside schedule.yaml and the demand."""
    words = ["plan", "schedule", "schedule.yaml", "--window", window]
    for llm, path in demand.get("traces", {}).items():
        words += ["--trace", f"{llm}={path.rpartition('/')[2]}"]
    words += ["--demand", "demand.csv"] if "demand" in demand else []
    words += ["--gap", f"{options['gap_frac']:g}", "--time-limit", f"{options['time_limit_s']:g}"]
    words += ["--seed", str(options["seed"])] if options["seed"] else []
    return shlex.join([*words, "-o", "out/"])
