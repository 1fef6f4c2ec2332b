"""The inputs of the page Schedule as schedule.yaml, and the command that gives the same schedule."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.domain import ROUNDING
from planner.units import parse_quantity
from ui.store import Document

DAY_HOURS, WEEK_DAYS = 24, 7
NIGHT_ENDS_H, DAY_ENDS_H = 8, 18  # Hours of a day in `shape_hours`.
WEEKEND_FROM_DAY = 5  # The weekend begins on day 5, Saturday; Monday is day 0.
BUSY_WORKERS = 3  # Workers of each LLM that the busiest hour of the example demand takes.
TROUGH = 0.3  # The example demand falls to this share of its peak.
# The inputs of a GPU and of a worker, by their keys in schedule.yaml.
PRICES = {"on_demand": "On demand [USD/h]", "reserved": "Reserved [USD/h]", "spot": "Spot [USD/h]"}
INTERRUPTIONS = "Interruptions of a spot worker [per h]"
QUANTITIES = {
    "rate": ("Sustains [requests/s]", "rps", "req/s"),
    "power": ("Power [W]", "w", "W"),
    "start": ("Start [min]", "s", "min"),
}
# Where there is no plan, the page begins with these figures; they are made up.
EXAMPLE_MARKET: Document = {
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


def gpus_text(row: Mapping[str, Any]) -> str:
    """The GPUs of a worker: '8 × h100-80g + 4 × a100-80g'."""
    gpu = row.get("gpu", "")
    count_of = gpu if isinstance(gpu, Mapping) else {gpu: row.get("gpus", 1)}
    return " + ".join(f"{count} × {name}" for name, count in count_of.items())


def parse_gpus(text: str) -> Document:
    """The keys of schedule.yaml for a text of `gpus_text`. Any other text becomes the name of a GPU, which
    the reader of schedule.yaml then refuses.
    """
    count_of: dict[str, int] = Counter()
    for part in text.split("+"):
        count, times, name = part.strip().partition(" × ")
        if not (times and count.strip().isdigit()):
            return {"gpu": text.strip()}
        count_of[name.strip()] += int(count)
    if len(count_of) > 1:
        return {"gpu": dict(count_of)}
    ((name, gpus),) = count_of.items()
    return {"gpu": name, "gpus": gpus}


def gpus_of(row: Mapping[str, Any]) -> dict[str, int]:
    """The GPUs of a worker by name, from a row of `capacity` that may be half written."""
    gpu = row.get("gpu", "?")
    return dict(gpu) if isinstance(gpu, Mapping) else {str(gpu): int(row.get("gpus", 1))}


def number(value: Any, unit: str) -> float | None:
    """A quantity in `unit`, to 12 digits, which drops the conversion's rounding error; None for None."""
    return None if value is None else float(f"{parse_quantity(value, unit, where='schedule.yaml'):.12g}")


def llms(capacity: Sequence[Document]) -> list[str]:
    """The LLMs of the rows of `capacity`, each once; "?" for a row that does not name one yet."""
    return list(dict.fromkeys(str(row.get("llm", "?")) for row in capacity))


def example_demand(market: Document) -> list[Document]:
    """A day of every LLM that takes BUSY_WORKERS of its workers, or as many as the stock has for all LLMs."""
    return shape_hours(usual_peaks(market), days=1, night_frac=TROUGH, weekend_frac=1.0)


def usual_peaks(market: Document) -> dict[str, float]:
    """Requests/s of every LLM at the busiest hour of the example demand: what BUSY_WORKERS carry, or fewer if
    the stock does not have as many for all LLMs, and at least one.
    """
    capacity = market["capacity"]
    rates = {str(row.get("llm", "?")): number(row.get("rate", 1.0), "rps") or 1.0 for row in capacity}
    gpus: Counter[str] = Counter()
    for row in capacity:
        gpus.update(gpus_of(row))
    stock = {gpu: offer["stock"] for gpu, offer in market["gpus"].items() if "stock" in offer}
    # A worker that is half written may have 0 GPUs.
    carried = [int(stock[gpu]) // count for gpu, count in gpus.items() if gpu in stock and count]
    workers = max(min([BUSY_WORKERS, *carried]), 1)
    # Rounded down as `shape_hours` rounds: 3 workers at 19.9998 requests/s do not carry 60.00.
    return {llm: _shown_rate(workers * rate, math.floor) for llm, rate in rates.items()}


def _shown_rate(rate_rps: float, to_whole: Callable[[float], float]) -> float:
    """A rate to two decimals, one below 1 to nine, made whole there by `to_whole`."""
    factor = 100 if rate_rps >= 1 else 10**9
    return to_whole(factor * rate_rps + ROUNDING) / factor


def shape_hours(
    peaks_rps: Mapping[str, float], *, days: int, night_frac: float, weekend_frac: float
) -> list[Document]:
    """Hours of days, Monday first: nights (0 to 8) and weekends by their share of the busiest hours (8 to
    18), evenings half way between day and night.
    """
    rows = []
    for hour in range(DAY_HOURS * days):
        day, hour_of_day = divmod(hour, DAY_HOURS)
        if hour_of_day < NIGHT_ENDS_H:
            factor = night_frac
        else:
            factor = 1.0 if hour_of_day < DAY_ENDS_H else (1 + night_frac) / 2
        factor *= weekend_frac if day % WEEK_DAYS >= WEEKEND_FROM_DAY else 1.0
        rows.append(
            {"window": hour} | {llm: _shown_rate(peak * factor, round) for llm, peak in peaks_rps.items()}
        )
    return rows


def demand_csv(rows: Sequence[Document]) -> str:
    """Rows of `shape_hours` as the text of demand.csv."""
    head = list(rows[0]) if rows else ["window"]
    return "".join(f"{','.join(map(str, line))}\n" for line in (head, *(row.values() for row in rows)))


def command(demand: Document, window: str, options: Document) -> str:
    """The command line that gives the same schedule from schedule.yaml and the demand."""
    words = ["plan", "schedule", "schedule.yaml", "--window", window]
    for llm, path in demand.get("traces", {}).items():
        words += ["--trace", f"{llm}={path.rpartition('/')[2]}"]
    words += ["--demand", "demand.csv"] if "demand" in demand else []
    words += ["--gap", f"{options['gap_frac']:g}", "--time-limit", f"{options['time_limit_s']:g}"]
    words += ["--seed", str(options["seed"])] if options["seed"] else []
    return shlex.join([*words, "-o", "out/"])
