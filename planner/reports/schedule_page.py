"""Renders a schedule: schedule.html with charts, schedule.csv, schedule.json, and the parts of the app's
page.

Workers on reserved or on-demand GPUs are called firm; those on spot GPUs may be interrupted.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from planner.files.checked_files import csv_text
from planner.reports import charts
from planner.reports.drawing import CaptionedChart
from planner.reports.page import charts_html, figures_html, list_html, page_html, section_html, table_html
from planner.reports.words import Rows, list_text, usd_text
from planner.search.schedules.scheduled import SimulatedSchedule
from planner.solvers.reserved_schedule import Demand, Market, Schedule, cost_by_window
from planner.units import HOUR_S, HOURS_PER_MONTH, count_text, show_digits, show_percent

NAMES = ("schedule.html", "schedule.csv", "schedule.json")
# The schedules with which a schedule is compared: their names and descriptions.
OTHERS = {
    "peak": "a fleet for the peak, kept all the time",
    "linear rule": "a linear rule per window (Aladdin)",
}
SHOWN_GAP_FRAC = 1e-4  # Sentences round a gap to 0.01 %.
SPOT_SUFFIX = ", spot"  # The end of a spot worker's name.
SPOT_NOTE = "A spot worker may be interrupted at any time; the others are not."


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleAnswer:
    """A schedule with its question, and the schedules to compare it with.

    `others` has the names of OTHERS as keys, and None for a schedule that exceeds a limit. The search stops
    at a gap of `required_gap_frac`. `simulated` is the schedule's simulation on the demand's requests; if it
    is None, `not_simulated` says why.
    """

    market: Market
    demand: Demand
    schedule: Schedule
    others: Mapping[str, Schedule | None]
    required_gap_frac: float
    simulated: SimulatedSchedule | None = None
    not_simulated: str = "it was not requested"

    @property
    def to_run(self) -> Schedule:
        """The schedule with the workers that a simulation added where windows missed the SLO."""
        return self.schedule if self.simulated is None else self.simulated.schedule

    @property
    def is_optimal(self) -> bool:
        """Whether the gap is at most `required_gap_frac`, up to the rounding of sentences."""
        return self.schedule.gap_frac <= self.required_gap_frac + SHOWN_GAP_FRAC


def render(answer: ScheduleAnswer) -> dict[str, str]:
    """Everything `plan schedule -o DIR` writes: path relative to DIR -> content."""
    numbers = json.dumps(to_json(answer), indent=2, allow_nan=False) + "\n"
    return dict(zip(NAMES, (_html(answer), to_csv(answer), numbers), strict=True))


def to_json(answer: ScheduleAnswer) -> dict[str, Any]:
    """The output of `plan schedule --json`; its status "optimal" means that the gap is small enough."""
    market, schedule = answer.market, answer.schedule
    gpus = [offer.gpu for offer in market.offers]
    return {
        "status": "optimal" if answer.is_optimal else "best found",
        "cost_usd_per_h": schedule.cost_usd_per_h,
        "bound_usd_per_h": schedule.bound_usd_per_h,
        "gap_frac": schedule.gap_frac,
        "windows": answer.demand.rate_rps.shape[1],
        "window_s": answer.demand.window_s,
        "demand_note": answer.demand.note,
        "market_note": market.note,
        "reserved_gpus": dict(zip(gpus, schedule.reserved_gpus.tolist(), strict=True)),
        "on_demand_gpus": dict(zip(gpus, schedule.on_demand_gpus.tolist(), strict=True)),
        "workers": [
            {
                "llm": worker_type.llm,
                "worker": worker_type.name,
                "firm": schedule.workers[c].tolist(),
                "spot": schedule.spot_workers[c].tolist(),
            }
            for c, worker_type in enumerate(market.worker_types)
        ],
        "compared": {name: other and other.cost_usd_per_h for name, other in answer.others.items()},
        "simulated": None if answer.simulated is None else _simulated_json(answer, answer.simulated),
        "not_simulated": answer.not_simulated,
    }


def _simulated_json(answer: ScheduleAnswer, simulated: SimulatedSchedule) -> dict[str, Any]:
    """The results of the simulation: prices, windows kept, and the schedule as repaired."""
    market, repaired_workers = answer.market, simulated.schedule.workers
    gpus = [offer.gpu for offer in market.offers]
    return {
        "cost_usd_per_h": simulated.cost_usd_per_h,
        "reserved_usd_per_h": simulated.reserved_usd_per_h,
        "on_demand_usd_per_h": simulated.on_demand_usd_per_h,
        "spot_usd_per_h": simulated.spot_usd_per_h,
        "cost_before_repair_usd_per_h": simulated.cost_before_usd_per_h,
        "reserved_gpus": dict(zip(gpus, simulated.reserved_gpus.tolist(), strict=True)),
        "held_gpus": dict(zip(gpus, simulated.held_gpus.tolist(), strict=True)),
        "added_worker_windows": simulated.added_worker_windows,
        "spot_workers_taken": simulated.spot_workers_taken,
        "slo": [
            {
                "llm": each.llm,
                "windows": each.windows,
                "missed_before_repair": each.missed_before,
                "missed": len(each.missed_begin_s),
                "missed_at_s": list(each.missed_begin_s),
                "unfinished": each.unfinished,
            }
            for each in simulated.slo_windows
        ],
        "why_missed": simulated.why_missed,
        "workers": [
            {"llm": worker_type.llm, "worker": worker_type.name, "firm": repaired_workers[c].tolist()}
            for c, worker_type in enumerate(market.worker_types)
        ],
    }


def types_in_use(answer: ScheduleAnswer) -> list[int]:
    """The indices of the worker types that are in use in any window."""
    to_run = answer.to_run
    return [c for c in range(len(to_run.workers)) if to_run.workers[c].any() or to_run.spot_workers[c].any()]


def to_csv(answer: ScheduleAnswer) -> str:
    """The file schedule.csv: a row for each window and worker type in use in it, with repairs."""
    to_run = answer.to_run
    rows = [
        (t, worker_type.llm, worker_type.name, to_run.workers[c, t], to_run.spot_workers[c, t])
        for t in range(to_run.workers.shape[1])
        for c, worker_type in enumerate(answer.market.worker_types)
    ]
    return csv_text(("window", "llm", "worker", "firm", "spot"), (row for row in rows if any(row[3:])))


def schedule_figures(answer: ScheduleAnswer) -> list[CaptionedChart]:
    """The charts: demand, GPUs of each type by how they are bought, workers, cost by window, mean costs."""
    market, demand, to_run = answer.market, answer.demand, answer.to_run
    window_s = demand.window_s
    rates = dict(zip(demand.llms, demand.rate_rps, strict=True))
    demand_chart = charts.windows_chart(rates, window_s, "requests/s")
    all_figures = [CaptionedChart("demand", demand_chart, "Demand of each LLM.")]
    for g, offer in enumerate(market.offers):
        spot = sum(
            worker_type.gpu_counts.get(offer.gpu, 0) * to_run.spot_workers[c]
            for c, worker_type in enumerate(market.worker_types)
        )
        # Broadcast to all windows; `spot` is the number 0 if no worker type has the GPU.
        in_every_window = np.ones(to_run.workers.shape[1], np.int64)
        counts_by_purchase = {
            "reserved": to_run.reserved_gpus[g] * in_every_window,
            "on demand": to_run.on_demand_gpus[g],
            "spot": spot * in_every_window,
        }
        if used_counts := {
            purchase: counts for purchase, counts in counts_by_purchase.items() if counts.any()
        }:
            chart = charts.stacked_chart(
                used_counts, window_s, f"{offer.gpu} [GPUs]", tuple(counts_by_purchase)
            )
            all_figures.append(
                CaptionedChart(
                    f"gpus-{g}", chart, f"{offer.gpu}: GPUs {list_text(list(used_counts))}, stacked."
                )
            )
    for m, llm in enumerate(demand.llms):
        workers = {
            f"{worker_type.name}{suffix}": counts[c]
            for suffix, counts in (("", to_run.workers), (SPOT_SUFFIX, to_run.spot_workers))
            for c, worker_type in enumerate(market.worker_types)
            if worker_type.llm == llm and counts[c].any()
        }
        if workers:
            chart = charts.stacked_chart(
                workers, window_s, f"{llm} [workers]", _names_by_colour(list(workers))
            )
            all_figures.append(
                CaptionedChart(f"workers-{m}", chart, f"{llm}: workers of each type, stacked.")
            )
    schedules = {
        "schedule": to_run,
        **{name: other for name, other in answer.others.items() if other is not None},
    }
    # The schedule of the fleet for the peak has a single window, whose cost is that of every window.
    by_window = {
        name: np.broadcast_to(cost_by_window(market, demand, schedule), to_run.workers.shape[1:])
        for name, schedule in schedules.items()
    }
    caption = "What each window costs, with the starts of workers in it; beside " + " and ".join(
        OTHERS[name] for name in schedules if name in OTHERS
    )
    all_figures.append(
        CaptionedChart("cost", charts.windows_chart(by_window, window_s, "cost [USD/h]"), f"{caption}.")
    )
    bars = [
        charts.Bar("this schedule", answer.schedule.cost_usd_per_h, is_plan=True),
        charts.Bar("no schedule costs less", answer.schedule.bound_usd_per_h, at_least=True),
    ]
    bars += [
        charts.Bar(OTHERS[name], schedule.cost_usd_per_h)
        for name, schedule in schedules.items()
        if name in OTHERS
    ]
    if answer.simulated is not None:
        bars.append(charts.Bar("simulated, as repaired", answer.simulated.cost_usd_per_h))
    all_figures.append(
        CaptionedChart("costs", charts.bars_chart(bars, "mean cost [USD/h]"), "Mean cost over all windows.")
    )
    return all_figures


def _names_by_colour(workers: Sequence[str]) -> tuple[str, ...]:
    """Names in the order in which colours are given out, so that a spot worker gets the third colour.

    Spot GPUs have the third colour in their charts. So every third name is of a spot worker, and the names
    between are of firm workers. If one kind has too few workers, names of no worker fill its places.
    """
    firm = [name for name in workers if not name.endswith(SPOT_SUFFIX)]
    spot = [name for name in workers if name.endswith(SPOT_SUFFIX)]
    rows = itertools.zip_longest(firm[::2], firm[1::2], spot, fillvalue="")
    names = itertools.chain.from_iterable(rows)
    return tuple(name or f"none {k}" for k, name in enumerate(names))


def cost_sentence(answer: ScheduleAnswer) -> str:
    """The cost of the schedule per hour and per month in one sentence: the simulated cost, with repairs, or
    the solver's cost, by rates alone, if the schedule was not simulated.
    """
    simulated = answer.simulated
    usd_per_h = answer.schedule.cost_usd_per_h if simulated is None else simulated.cost_usd_per_h
    missed = "" if simulated is None or not simulated.missed_windows else ", with windows that miss the SLO"
    return (
        f"{usd_text(usd_per_h)} per hour on average, about {usd_per_h * HOURS_PER_MONTH:,.0f} USD per month"
        f"{missed}."
    )


def proof_line(answer: ScheduleAnswer) -> str:
    """The gap between the schedule's cost and the bound, and whether it is as small as required."""
    proved = "Proved" if answer.is_optimal else "Not finished in time"
    proved += "" if answer.simulated is None else " by rates alone"
    return f"{proved}: within {100 * answer.schedule.gap_frac:.2f} % of the least possible."


def compared_lines(answer: ScheduleAnswer) -> list[str]:
    """The costs of the other schedules, and how much less this one costs."""
    lines, usd_per_h = [], answer.schedule.cost_usd_per_h
    for name, other in answer.others.items():
        if other is None:
            lines.append(f"{OTHERS[name]}, exceeds a limit")
        else:
            saved_frac = 1 - usd_per_h / other.cost_usd_per_h if other.cost_usd_per_h else 0.0
            price = f"{usd_text(other.cost_usd_per_h)}/h"
            lines.append(f"{OTHERS[name]}: {price}; the schedule saves {show_percent(saved_frac)}")
    return lines


def simulated_lines(answer: ScheduleAnswer) -> list[str]:
    """The results of the simulation: windows kept, workers that the repair added, price. Without one, why."""
    simulated, by_rates_usd_per_h = answer.simulated, answer.schedule.cost_usd_per_h
    lines = [f"Mind: {line}." for line in (answer.market.note, answer.demand.note) if line]
    if simulated is None:
        why = f"Not simulated: {answer.not_simulated}. Ramps, bursts, starts and drains are not seen."
        return [*lines, why]
    for each in simulated.slo_windows:
        missed, windows = len(each.missed_begin_s), each.windows
        line = f"Simulated: {each.llm} keeps its SLO in {windows - missed} of {count_text(windows, 'window')}"
        if each.missed_before > missed:
            line += f", {windows - each.missed_before} before the repair"
        lines.append(
            line + (f"; {count_text(each.unfinished, 'request')} never served" if each.unfinished else "")
        )
    if simulated.added_worker_windows:
        before = usd_text(simulated.cost_before_usd_per_h)
        lines.append(
            f"The repair adds {simulated.added_worker_windows} workers x windows; without it {before}/h are "
            "paid."
        )
    if simulated.missed_windows:
        lines.append(f"Windows that are missed still: {simulated.why_missed}.")
    prices = {
        "reserved": simulated.reserved_usd_per_h,
        "on demand": simulated.on_demand_usd_per_h,
        "spot": simulated.spot_usd_per_h,
    }
    text = ", ".join(f"{usd_text(price)} {name}" for name, price in prices.items() if price)
    lines.append(
        f"Paid on the simulated hours: {usd_text(simulated.cost_usd_per_h)}/h ({text}); by rates alone "
        f"{usd_text(by_rates_usd_per_h)}/h."
    )
    limit = answer.market.cost_usd_per_h
    if limit is not None and simulated.cost_usd_per_h > limit:
        lines.append(f"That is more than limits: cost, {usd_text(limit)}/h.")
    return lines


def gpu_rows(answer: ScheduleAnswer) -> Rows:
    """A row per GPU: how many are reserved, and how many on demand and on spot, on average and at most."""
    to_run, worker_types = answer.to_run, answer.market.worker_types
    rows = []
    for g, offer in enumerate(answer.market.offers):
        gpus_of_worker = np.array([each.gpu_counts.get(offer.gpu, 0) for each in worker_types])
        on_spot = gpus_of_worker @ to_run.spot_workers
        changing = [
            f"{figure:g}"
            for gpus in (to_run.on_demand_gpus[g], on_spot)
            for figure in (round(gpus.mean(), 1), gpus.max())
        ]
        rows.append((offer.gpu, f"{to_run.reserved_gpus[g]}", *changing))
    return ("GPU", "reserved", "on demand, mean", "on demand, most", "on spot, mean", "on spot, most"), rows


def worker_rows(answer: ScheduleAnswer) -> Rows:
    """A row per worker type in use: how many run on reserved or on-demand GPUs, and how many on spot GPUs.
    Both numbers are ranges over the windows: "2 to 5".
    """
    to_run = answer.to_run

    def least_and_most(counts: Any) -> str:
        least, most = counts.min(), counts.max()
        return f"{least}" if least == most else f"{least} to {most}"

    rows: list[tuple[str, ...]] = []
    for c, worker_type in enumerate(answer.market.worker_types):
        firm, spot = to_run.workers[c], to_run.spot_workers[c]
        if firm.any() or spot.any():
            rows.append((worker_type.llm, worker_type.name, least_and_most(firm), least_and_most(spot)))
    return ("LLM", "worker", "reserved or on demand", "on spot"), rows


def _html(answer: ScheduleAnswer) -> str:
    schedule, windows = answer.schedule, answer.demand.rate_rps.shape[1]
    hours = windows * answer.demand.window_s / HOUR_S
    cells = [
        ("Cost", usd_text(schedule.cost_usd_per_h) + "/h", "on average over all windows"),
        ("At least", usd_text(schedule.bound_usd_per_h) + "/h", "no schedule of this question costs less"),
        *(
            (name.capitalize(), usd_text(other.cost_usd_per_h) + "/h", OTHERS[name])
            for name, other in answer.others.items()
            if other
        ),
        ("Time", f"{show_digits(hours, 4)} h", f"{windows} windows, which repeat"),
    ]
    body = "\n".join(
        [
            f"<header><p class=eyebrow>Schedule of {escape(', '.join(answer.demand.llms))}</p>",
            f"<h1>{escape(cost_sentence(answer))}</h1>"
            f"<p class=lead>{escape(proof_line(answer))}</p></header>",
            figures_html(cells),
            section_html("Simulated", list_html(simulated_lines(answer))),
            section_html("Against others", list_html(compared_lines(answer))),
            section_html("Over time", charts_html(schedule_figures(answer))),
            section_html("GPUs", table_html(*gpu_rows(answer), caption="GPUs", numeric=(1, 2, 3, 4, 5))),
            section_html(
                "Workers",
                table_html(*worker_rows(answer), caption="Workers", numeric=(2, 3))
                + f"<p class=note>{SPOT_NOTE}</p>",
            ),
        ]
    )
    return page_html(
        "Schedule of workers", body, "Written by fleetplan. schedule.csv and schedule.json hold the same."
    )
