"""Reads the files of `plan schedule`: schedule.yaml into a `Market`, and a CSV or traces into a `Demand`.

    gpus:
      h100-80g: {on_demand: 6.98 usd/h, reserved: 4.4 usd/h, spot: 2.8 usd/h, interruptions: 0.05, stock: 64}
    capacity:
      - {llm: chat, worker: h100 tp4, gpu: h100-80g, gpus: 4, rate: 5.2 req/s, power: 2800 W, start: 5 min}
    spot: 0.25                                       # optional: most of an LLM's rate that spot may carry
    limits: {power: 80 kW, cost: 500 usd/h}          # optional
    slo: {chat: {ttft: {p95: 2 s}, every: 10 min}}   # optional, to simulate the schedule

A worker may consist of several engines. If these have different kinds of GPUs, `gpu` says how many of each,
and there is no `gpus`: `gpu: {h100-80g: 8, a100-80g: 4}`. `rate` is what one worker sustains within the SLO,
for instance a plan's traffic divided by its workers. `interruptions` is how often one spot worker is
interrupted per hour. With `owned: 8`, at most 8 GPUs may be had at the price `reserved` (0 if it is left
out). To be simulated, a schedule needs `slo`, `fleet: plan.yaml` in each row of `capacity`, and a trace per
LLM.

The demand is a CSV in requests/s with a column per LLM and a row per window, and optionally a column `window`
for labels; or a trace per LLM, counted in windows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.documents.slo import parse_slo
from planner.errors import InputError
from planner.files.checked_files import read_yaml
from planner.files.document_values import (
    Section,
    Wording,
    check_mapping,
    check_rows,
    errors_as,
    read_share,
    refuse_unknown,
)
from planner.files.text_tables import read_csv, read_number_column
from planner.solvers.reserved_schedule import Demand, GpuOffer, LlmWorkerType, Market
from planner.traffic.trace import Trace
from planner.units import count_text, show_s

DEFAULT_START_S = 300.0  # How long a worker takes to start if its row does not say.
PRICES = ("on_demand", "reserved", "spot")
# Columns of a demand that name its windows; all other columns are rates of LLMs.
WINDOW_COLUMNS = {"window", "hour", "time", "timestamp", "date", "datetime", "day", "interval", "start"}
CAPACITY_KEYS = ("llm", "worker", "gpu", "gpus", "rate", "power", "start", "fleet")
LEAST_RATE_RPS = 1e-6  # A worker that sustains less is refused: no number of such workers would be enough.
# The next three are about the part of a trace after its last full window; set by hand.
LEAST_PART_FRAC = 0.1  # A part shorter than this share of a window is left out: its rate is mostly chance.
LEAST_PART_S = 1.0  # A shorter part is taken to last this long: a trace of one request has length 0.
FULL_FRAC = 0.95  # A part longer than this share of a window needs no note.
# Values above these three are taken for typing errors.
MOST_INTERRUPTIONS_PER_H = 1e4
MOST_STOCK = 10**7
MOST_GPUS = 10**5  # GPUs of one worker.
WORDING = Wording(least="expected at least {:g}")  # For errors about small numbers.


def read_market(path: Path) -> Market:
    """The market of a schedule.yaml, or of a folder with a plan.yaml. Raises InputError."""
    file = path / "plan.yaml" if (path / "plan.yaml").is_file() else path
    document = read_yaml(file)
    if "workers" in document and "capacity" not in document:
        raise InputError(
            f"{file}: is a fleet, which does not say what it carries; expected the plan.yaml of a plan for "
            "one LLM, or a schedule.yaml: gpus with prices and stock, and under capacity the rate of every "
            "kind of worker, as `plan goodput` measures it"
        )
    with errors_as(InputError, path):
        return parse_market(document, file.parent)


def read_demand(path: Path, *, window_s: float) -> Demand:
    """The demand of a CSV, whose rows are windows of `window_s`; all columns but WINDOW_COLUMNS are LLMs."""
    return demand_of_table(read_csv(path), path, window_s=window_s)


def demand_of_table(table: pd.DataFrame, path: Path, *, window_s: float) -> Demand:
    """Read the demand from a table in memory; see `read_demand`. Errors name `path`."""
    llms = tuple(str(name) for name in table.columns if str(name).strip().lower() not in WINDOW_COLUMNS)
    if not llms:
        raise InputError(f"{path}: has no column of rates; expected one per LLM beside `window`")
    return Demand(llms, np.array([read_number_column(table, llm, path) for llm in llms]), window_s)


def demand_of(traces: Mapping[str, Trace], *, window_s: float) -> Demand:
    """The mean rates per window of one trace per LLM; all traces begin at the same time.

    The part of the longest trace beyond its last full window counts as a window, with the rate of that part
    alone, if it is at least LEAST_PART_FRAC of a window. Otherwise the part is left out, and the demand's
    note says so. A trace shorter than one window is one window.
    """
    end_s = max(float(trace.arrival_s[-1]) for trace in traces.values())
    full_windows, part_s = divmod(end_s, window_s)
    is_part_counted = part_s >= LEAST_PART_FRAC * window_s or full_windows == 0
    windows = int(full_windows) + (1 if is_part_counted else 0)
    edges_s = np.arange(windows + 1) * window_s
    # Shape (LLMs, windows).
    counts = np.array([np.histogram(trace.arrival_s, edges_s)[0] for trace in traces.values()])
    left_out = sum(len(trace) for trace in traces.values()) - int(counts.sum())
    note = ""
    if left_out:
        note = (
            f"{count_text(left_out, 'request')} of the {show_s(part_s)} after the last full window are left "
            "out; a shorter --window has them"
        )
    elif is_part_counted and part_s < FULL_FRAC * window_s:
        note = (
            f"the traffic ends {show_s(part_s)} after the beginning of the last window, which has the "
            "rate of this part"
        )
    filled_s = np.clip(end_s - edges_s[:-1], LEAST_PART_S, window_s)
    return Demand(tuple(traces), counts / filled_s, window_s, note)


def parse_market(document: Mapping[str, Any], folder: Path = Path()) -> Market:
    """Read a market from a mapping; see `read_market`. Files that it names lie in `folder`."""
    schedule = Section.from_document(
        document, "schedule", ("gpus", "capacity", "spot", "limits", "slo"), wording=WORDING
    )
    gpus = schedule.get("gpus")
    if not isinstance(gpus, dict) or not gpus:
        raise InputError("gpus: expected at least one GPU with its prices")
    capacity_rows = check_rows(
        schedule.get("capacity"), "capacity", "worker types with the rate of each", least=1
    )
    limits = Section.from_document(schedule.get("limits"), "limits", ("power", "cost"), wording=WORDING)
    offers = tuple(_parse_offer(str(name), row) for name, row in gpus.items())
    priced_gpus = {offer.gpu for offer in offers}
    worker_types = tuple(
        _parse_capacity(row, f"capacity[{i}]", priced_gpus, folder) for i, row in enumerate(capacity_rows)
    )
    slos = check_mapping(schedule.get("slo", {}), "slo", "chat: {ttft: {p95: 2 s}}")
    refuse_unknown(slos, [worker_type.llm for worker_type in worker_types], "slo")
    return Market(
        offers=offers,
        worker_types=worker_types,
        most_spot_frac=read_share(schedule.get("spot", 0.0), "spot"),
        power_w=limits.at_least("power", "w", None),
        cost_usd_per_h=limits.at_least("cost", "usd_per_h", None),
        slos={llm: parse_slo(slo, where=f"slo: {llm}") for llm, slo in slos.items()},
    )


def _parse_offer(gpu: str, row: object) -> GpuOffer:
    """A row of `gpus`: prices, interruptions, and how many GPUs there are."""
    where = f"gpus: {gpu}"
    section = Section.from_document(
        check_mapping(row, where, "on_demand: 2 usd/h"),
        where,
        (*PRICES, "interruptions", "stock", "owned"),
        wording=WORDING,
    )
    prices = {name: section.at_least(name, "usd_per_h", None) for name in PRICES}
    stock = section.whole_number("stock", None, least=0, most=MOST_STOCK)
    owned = section.whole_number("owned", None, least=0, most=MOST_STOCK if stock is None else stock)
    if owned is not None:
        # For the solver owned GPUs are reserved ones, which cost nothing unless a price is written.
        prices["reserved"] = prices["reserved"] or 0.0
        if prices["on_demand"] is None:  # None can be rented, so there are no more than the owned ones.
            stock = owned
    if prices["on_demand"] is None and prices["reserved"] is None:
        raise InputError(f"{where}: needs a price on_demand or reserved; spot alone keeps no SLO")
    return GpuOffer(
        gpu=gpu,
        on_demand_usd_per_h=prices["on_demand"],
        reserved_usd_per_h=prices["reserved"],
        spot_usd_per_h=prices["spot"],
        # `share` also reads "5 %" per hour, as providers write it. A bare number is interruptions per hour.
        interruptions_per_h=section.share(
            "interruptions", 0.0, most=MOST_INTERRUPTIONS_PER_H, bare=MOST_INTERRUPTIONS_PER_H
        ),
        stock=stock,
        most_reserved=owned,
    )


def _parse_capacity(row: object, where: str, priced_gpus: set[str], folder: Path) -> LlmWorkerType:
    """A row of `capacity`: a kind of worker of an LLM, on GPUs with prices, and what it sustains."""
    section = Section.from_document(
        check_mapping(row, where, "llm: chat"), where, CAPACITY_KEYS, wording=WORDING
    )
    llm, worker = (section.text(name) for name in ("llm", "worker"))
    gpus_of_worker = _gpus_of_worker(section)
    for gpu in gpus_of_worker:
        if gpu not in priced_gpus:
            known = ", ".join(sorted(priced_gpus))
            raise section.error("gpu", f"{gpu!r} has no price under gpus; known: {known}")
    (gpu, count), *other_gpus = gpus_of_worker.items()
    return LlmWorkerType(
        llm=llm,
        name=worker,
        gpu=gpu,
        gpus=count,
        rate_rps=section.at_least("rate", "rps", least=LEAST_RATE_RPS),
        # A worker whose power is not given does not count against the power limit.
        power_w=section.at_least("power", "w", 0.0),
        start_s=section.at_least("start", "s", DEFAULT_START_S),
        fleet=folder / section.text("fleet") if "fleet" in section else None,
        other_gpus=tuple(other_gpus),
    )


def _gpus_of_worker(section: Section) -> dict[str, int]:
    """How many GPUs of each kind a worker has: from `gpu: NAME` and `gpus`, or from `gpu: {NAME: COUNT}`."""
    if not isinstance(section.get("gpu"), Mapping):
        return {section.text("gpu"): section.whole_number("gpus", 1, most=MOST_GPUS)}
    if "gpus" in section:
        raise section.error("gpus", "gpu says how many there are of each; leave gpus out")
    by_gpu = Section(section.get("gpu"), section.path_of("gpu"), wording=WORDING)
    counts = {str(name): by_gpu.whole_number(name, most=MOST_GPUS) for name in section.get("gpu")}
    if not counts:
        raise section.error("gpu", "expected a GPU, or GPUs with their numbers")
    return counts
