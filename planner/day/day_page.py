"""Writes the answer of `plan day` (planner/day/day_study.py) as files, and as text for the terminal.

The files are day.html with its charts, day.csv, windows.csv, events.csv and day.json.
"""

import json
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np

from planner.day import changing_types_page, day_causes
from planner.day.controllers.windows import format_clock
from planner.day.day_study import CRON, STATIC, ControllerDay, DayAnswer, Optimum, workers_over_time
from planner.day.search.capacity import slo_text
from planner.day.search.causal_bound import BLOCKS_S
from planner.domain import row_of
from planner.files.checked_files import csv_text
from planner.reports import charts
from planner.reports.drawing import CaptionedChart
from planner.reports.fact_sentences import SAME_USD
from planner.reports.page import charts_html as drawn
from planner.reports.page import figures_html, inline_html, list_html, page_html, section_html, table_html
from planner.reports.words import Rows, describe_fleet, sold_singly_text, usd_text
from planner.simulator.simulation import STATUS
from planner.solvers.master import paid_usd_per_h
from planner.solvers.whole_nodes import node_of
from planner.units import DAY_S, HOUR_S, count_text, show_clock, show_s, show_span

NAMES = ("day.html", "day.csv", "windows.csv", "events.csv", "day.json")
HEAD = (  # The columns of `day_table`.
    *("Controller", "USD", "USD/h", "GPU hours", "Windows kept", "Worst window", "Hurt by changes"),
    "Above the optimum",
)
# The share of missed windows in the bound for controllers that know only the past: hardly any keeps all.
FEW_MISSED_FRAC = 0.01
# At most this many missed windows, and changes of a timetable, are listed; further ones are counted.
MOST_LISTED = 12


def render_day(answer: DayAnswer) -> dict[str, str]:
    """The files that `plan day -o DIR` writes, without manifests: path relative to DIR -> content."""
    answer_json = json.dumps(to_json(answer), indent=2, allow_nan=False) + "\n"
    contents = _html_page(answer), to_csv(answer), windows_csv(answer), events_csv(answer), answer_json
    return dict(zip(NAMES, contents, strict=True))


def recommendation_sentence(answer: DayAnswer) -> str:
    """A sentence on which controller to take, what it costs, and how far that is above the optimum."""
    best = answer.winner
    hours = best.paid_hours
    span = f"{hours:,.4g} h" if hours >= 2 else show_s(HOUR_S * hours)
    windows = "keeps every window" if best.keeps else f"misses {_missed_text(best)}"
    above = above_text(answer.regret_usd(best), _best_usd(answer))
    return (
        f"{best.name} {windows} and costs {usd_text(best.usd)} in "
        f"{span}{above}.{_cheapest_that_keeps(answer)}"
    )


def _cheapest_that_keeps(answer: DayAnswer) -> str:
    """A sentence on the cheapest row that keeps every window, where the winner misses some."""
    keeping = [row for row in answer.rows if row.keeps]
    if answer.winner.keeps or not keeping:
        return ""
    cheapest = min(keeping, key=lambda row: row.usd)
    return f" The cheapest that keeps every window is {cheapest.name}, for {usd_text(cheapest.usd)}."


def above_text(regret_usd: float | None, best_usd: float | None) -> str:
    """How far a cost is above the optimum, for the end of a sentence; empty where no optimum is known."""
    if regret_usd is None:
        return ""
    if abs(regret_usd) < SAME_USD:
        return ", the same as the optimum"
    if regret_usd < 0:
        return f", {usd_text(-regret_usd)} below the optimum, which keeps every window"
    return f", {usd_text(regret_usd)} ({signed_percent_text(regret_usd, best_usd)}) above the optimum"


def proof_lines(answer: DayAnswer) -> list[str]:
    """Sentences on whether a cheaper day than the optimum may exist, and on the bounds on its cost."""
    optimum = answer.optimum
    types_lines = changing_types_page.types_lines(answer.types)
    if optimum is None:
        return [f"No optimum: {answer.no_optimum}.", *types_lines]
    return [
        f"Optimum, the cheapest that keeps every window, for who knows the traffic before: "
        f"{usd_text(optimum.usd)}; {optimum.status}.",
        f"Proved: nothing that keeps every window costs less than {usd_text(optimum.proved_usd)}"
        f"{_any_moment_text(optimum)}.",
        *types_lines,
        *_causal_lines(answer),
        *_whole_nodes_lines(answer),
    ]


def _whole_nodes_lines(answer: DayAnswer) -> list[str]:
    """A sentence that smaller sizes save nothing where GPUs are paid by whole nodes, and what would make them
    save. Empty where no node is paid as a whole, or the optimum costs less than the static fleet.
    """
    nodes = {node_of(pool.type.gpu): row_of(pool.type.gpu.name) for pool in answer.question.fleet.pools}
    node, gpu = next(((node, gpu) for node, gpu in nodes.items() if node is not None), (None, ""))
    static_usd = next((row.usd for row in answer.rows if row.name == STATIC), None)
    best_usd = _best_usd(answer)
    if node is None or static_usd is None or best_usd is None or best_usd < static_usd - SAME_USD:
        return []
    return [
        f"{node.kind} is paid by whole nodes of {node.gpus} GPUs, so smaller sizes save nothing here; "
        f"{sold_singly_text([gpu])}."
    ]


def _any_moment_text(optimum: Optimum) -> str:
    """The bound that assumes that more workers never hurt, if it is above the proved bound."""
    bound_usd = optimum.any_moment_usd
    if bound_usd is None or bound_usd <= optimum.proved_usd:
        return ""
    share = f"{100 * bound_usd / optimum.usd:.0f} % of the optimum"
    return f"; if more workers never hurt, than {usd_text(bound_usd)}, {share}"


def standing_line(answer: DayAnswer) -> str:
    """A sentence on the static fleet: workers, price per hour, bill, missed windows, and its origin."""
    question = answer.question
    rate = f"{usd_text(standing_usd_per_h(answer))} per hour"
    if question.unit_s:
        rate += ", billed by started hours here, which makes short traffic dearer per hour"
    note = f"; {question.fleet_note}" if question.fleet_note else ""
    static = answer.static
    windows = "keeps every window" if static.keeps else f"misses {_missed_text(static)}"
    cost = f"{rate}; {usd_text(static.usd)}, {windows}"
    return f"All workers all day (static): {describe_fleet(question.fleet)}, {cost}{note}."


def timetable_lines(answer: DayAnswer) -> list[str]:
    """The sizes of the day under `cron`, with the times of the clock; empty for other winners."""
    best = answer.winner
    if best.name != CRON:
        return []
    clock_s = 0.0 if best.knowledge is None else best.knowledge.clock_s
    names = [pool.name for pool in answer.question.fleet.pools]
    changes, before = list[str](), None
    for at_s, sizes in zip(best.run.requested_s, best.run.requested_sizes.tolist(), strict=True):
        if sizes != before:
            before = sizes
            workers = ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
            changes.append(f"{format_clock((clock_s + at_s) % DAY_S)} {workers}")
    more = [f"and {len(changes) - MOST_LISTED} more changes"] if len(changes) > MOST_LISTED else []
    return [
        f"Timetable of cron (0:00 is the beginning of the traffic), workers requested from: "
        f"{'; '.join(changes[:MOST_LISTED] + more)}."
    ]


def standing_usd_per_h(answer: DayAnswer) -> float:
    """The price of the static fleet, idle GPUs of whole nodes included."""
    return paid_usd_per_h((pool.type, pool.count) for pool in answer.question.fleet.pools)


def least_gpu_hours(answer: DayAnswer) -> list[str]:
    """The GPU hours of the optimum, which knows all traffic, and those of each controller."""
    if answer.optimum is None:
        return []
    least_h = answer.optimum.day.gpu_hours
    others = ", ".join(
        f"{row.name} {row.gpu_hours:,.1f} ({signed_percent_text(row.gpu_hours - least_h, least_h)}, "
        f"{row.missed_windows} missed)"
        for row in sorted(answer.rows, key=lambda row: (row.missed_windows, row.gpu_hours))
    )
    return [f"The cheapest sizes that keep every window pay {least_h:,.1f} GPU hours; {others}."]


def _causal_lines(answer: DayAnswer) -> list[str]:
    """A sentence on the bound for controllers that do not know the future and miss few windows, and two
    variants: for controllers that know less, and that see a window's traffic as it begins.

    Empty without these bounds (planner/day/search/causal_bound.py), and where they are no higher than the
    proved bound.
    """
    optimum = answer.optimum
    if optimum is None or optimum.causal is None:
        return []
    few = FEW_MISSED_FRAC * len(answer.static.windows)
    hour_usd = optimum.causal.least_usd(few, HOUR_S)
    unknown_usd = optimum.causal.least_usd_of_unknown_blocks(few, HOUR_S)
    reacting_usd = 0.0 if optimum.reacting is None else optimum.reacting.least_usd(few, HOUR_S)
    if max(hour_usd, unknown_usd or 0.0) <= optimum.proved_usd:
        return []

    def with_regret(cost_usd: float) -> str:
        return f"{usd_text(cost_usd)} ({signed_percent_text(cost_usd - optimum.usd, optimum.usd)})"

    unknown_words = reacting_words = ""
    if unknown_usd is not None:
        unknown_words = f", {with_regret(unknown_usd)} where it does not know the hour of the half day either"
    if reacting_usd > optimum.proved_usd:
        reacting_words = (
            f", {with_regret(reacting_usd)} even where it sees a window's traffic as it begins and changes "
            "sizes a start-up later too"
        )
    return [
        f"Without seeing ahead: who misses {100 * FEW_MISSED_FRAC:g} % of windows pays at least "
        f"{with_regret(hour_usd)} on average over days whose windows come in another order within each "
        f"hour{unknown_words}{reacting_words}; for sizes that change between windows, if more workers never "
        "hurt."
    ]


def day_table(answer: DayAnswer) -> Rows:
    """A row for the optimum, then one for every controller, by missed windows and then by cost."""
    table_rows = [
        _table_row(answer, row) for row in sorted(answer.rows, key=lambda row: (row.missed_windows, row.usd))
    ]
    if answer.optimum is not None:
        table_rows.insert(0, _table_row(answer, answer.optimum.day))
    return HEAD, table_rows


# The columns of `fleet_rows`.
FLEETS_HEAD = ("", "Fleet", "Standing: USD", "Best controller", "USD", "Windows missed", "Optimum: USD")


def fleet_rows(answer: DayAnswer) -> list[tuple[str, ...]]:
    """A row for every fleet that was compared, the one of this page first."""

    def usd_cell(cost_usd: float | None) -> str:
        return "-" if cost_usd is None else f"{cost_usd:,.2f}"

    return [
        (
            each.label + (", taken" if each.is_chosen else ""),
            each.fleet,
            usd_cell(each.standing_usd),
            each.controller or f"not run: {each.why}",
            usd_cell(each.usd),
            "-" if each.usd is None else str(each.missed),
            usd_cell(each.optimum_usd),
        )
        for each in sorted(answer.fleets, key=lambda each: not each.is_chosen)
    ]


def _table_row(answer: DayAnswer, row: ControllerDay) -> tuple[str, ...]:
    """The cells of a day, in the order of HEAD."""
    worst, regret = row.worst, answer.regret_usd(row)
    rerouted, late = (sum(getattr(each, name) for each in row.effects) for name in ("rerouted", "late"))
    effects = f"{late:,} late, {rerouted:,} redone" if row.effects else "-"
    worst_time = f"{show_clock(worst.start_s)} to {show_clock(worst.end_s)}"
    worst_text = f"{worst_time}: {worst.kept_text}"
    return (
        row.name,
        f"{row.usd:,.2f}",
        f"{row.usd / row.paid_hours:,.2f}",
        f"{row.gpu_hours:,.1f}",
        f"{len(row.windows) - row.missed_windows} of {len(row.windows)}",
        worst_text,
        effects,
        "-"
        if regret is None
        else f"{day_causes.change_text(regret)} USD ({signed_percent_text(regret, _best_usd(answer))})",
    )


def _best_usd(answer: DayAnswer) -> float | None:
    """What the optimum costs; None without an optimum."""
    return None if answer.optimum is None else answer.optimum.usd


def signed_percent_text(part: float, whole: float | None) -> str:
    """`part` as a signed percentage of `whole`; "-" where `whole` is None or 0."""
    return f"{100 * part / whole:+.1f} %" if whole else "-"


def _missed_text(row: ControllerDay) -> str:
    """How many windows a controller misses, such as "2 windows of 144"."""
    return f"{count_text(row.missed_windows, 'window')} of {len(row.windows)}"


def missed_lines(row: ControllerDay) -> list[str]:
    """The missed windows of a controller, the worst first."""
    missed = sorted((each for each in row.windows if not each.holds), key=lambda each: each.kept_frac)
    lines = [
        f"{show_clock(each.start_s)} to {show_clock(each.end_s)}: {each.kept_text}"
        for each in missed[:MOST_LISTED]
    ]
    return lines + ([f"and {len(missed) - MOST_LISTED} more"] if len(missed) > MOST_LISTED else [])


def to_json(answer: DayAnswer) -> dict[str, Any]:
    """What `plan day --json` prints."""
    question, optimum = answer.question, answer.optimum
    return {
        "fleet": describe_fleet(question.fleet),
        "slo": [f"{limit.name} <= {show_s(limit.limit_s)}" for limit in question.slo.limits],
        "every_s": question.window_s,
        "step_s": question.step_s,
        "train_frac": question.train_frac,
        "requests": len(answer.judged),
        "hours": answer.judged.duration_s / HOUR_S,
        "standing_usd_per_h": standing_usd_per_h(answer),
        "winner": answer.winner.name,
        "pools": [
            {
                "name": pool.name,
                "role": pool.role,
                "worker": pool.type.name,
                "static": pool.count,
                "least": elastic.least,
                "most": elastic.most,
                "start_s": elastic.start_s,
                "warm": elastic.warm,
                "warm_start_s": elastic.warm_start_s,
            }
            for pool, elastic in zip(question.fleet.pools, question.pools, strict=True)
        ],
        "controllers": [_controller_json(answer, row) for row in answer.rows],
        "optimum": None if optimum is None else _optimum_json(answer, optimum),
        "capacity": None
        if answer.capacity is None
        else {
            "rates_rps": answer.capacity.rates_rps.tolist(),
            "sizes": answer.capacity.sizes.tolist(),
            "made": answer.capacity.how_made,
        },
        "fleets": [asdict(each) for each in answer.fleets],
        "types": changing_types_page.types_json(answer.types),
        "left_out": [{"controller": name, "why": why} for name, why in answer.left_out],
        "warnings": list(answer.warnings),
    }


def _optimum_json(answer: DayAnswer, optimum: Optimum) -> dict[str, Any]:
    """The optimum and the bounds on the cost of others, in day.json."""
    return {
        **_controller_json(answer, optimum.day),
        "status": optimum.status,
        "bound_if_more_never_hurt_usd": optimum.bound_usd,
        "proved_usd": optimum.proved_usd,
        "bound_at_any_moment_if_more_never_hurt_usd": optimum.any_moment_usd,
        "causal_bound": _causal_bound_json(answer, optimum),
        "sizes": {"edges_s": optimum.edges_s.tolist(), "sizes": optimum.sizes.tolist()},
    }


def _causal_bound_json(answer: DayAnswer, optimum: Optimum) -> dict[str, Any] | None:
    """The bounds for controllers that do not know the future and miss few windows; None if not computed."""
    if optimum.causal is None:
        return None
    few = FEW_MISSED_FRAC * len(answer.static.windows)
    reacting = optimum.reacting
    return {
        "missed_windows": few,
        "usd_by_block_s": {f"{block_s:g}": optimum.causal.least_usd(few, block_s) for block_s in BLOCKS_S},
        "usd_of_unknown_hours": optimum.causal.least_usd_of_unknown_blocks(few, HOUR_S),
        "usd_of_known_windows": None if reacting is None else reacting.least_usd(few, HOUR_S),
    }


def _controller_json(answer: DayAnswer, row: ControllerDay) -> dict[str, Any]:
    """The figures of one controller, or of the optimum, in day.json."""
    regret, status = answer.regret_usd(row), row.run.simulation.status
    causes = day_causes.find_causes(answer, row)
    causes_row = None
    if causes is not None:  # JSON has lists for tuples.
        causes_row = {
            name: list(each) if isinstance(each, tuple) else each for name, each in asdict(causes).items()
        }
    return {
        "name": row.name,
        "parameters": {name: str(value) for name, value in row.parameters.items()},
        "settings_tried": row.settings_count,
        "usd": row.usd,
        "gpu_hours": row.gpu_hours,
        "paid_hours": row.paid_hours,
        "windows": len(row.windows),
        "missed": row.missed_windows,
        "worst_window": {
            "start_s": row.worst.start_s,
            "limit": row.worst.short_limit,
            "kept_frac": row.worst.kept_frac,
        },
        **{name: int((status == code).sum()) for code, name in enumerate(STATUS)},
        "changes": len(row.effects),
        "late_while_starting": sum(each.late for each in row.effects),
        "rerouted": sum(each.rerouted for each in row.effects),
        "regret_usd": regret,
        "regret_windows": row.missed_windows,
        "causes": causes_row,
    }


def to_csv(answer: DayAnswer) -> str:
    """A row per controller and one for the optimum: the figures of day.json, without nested ones."""
    controllers = [_controller_json(answer, row) for row in _rows_and_optimum(answer)]
    flat = [{k: v for k, v in each.items() if not isinstance(v, dict)} for each in controllers]
    return csv_text(list(flat[0]), (list(each.values()) for each in flat))


def windows_csv(answer: DayAnswer) -> str:
    """A row per controller and window: requests/s, workers paid and ready on average, whether it holds."""
    pools = answer.question.fleet.pools
    head = ["controller", "start_s", "end_s", "requests_per_s"]
    head += [f"{what}_{pool.name}" for what in ("paid", "ready") for pool in pools]
    head += ["holds", "short_limit", "kept_frac"]
    lines = []
    for row in _rows_and_optimum(answer):
        edges_s = row.edges_s
        rate = rates_rps(answer, edges_s)
        paid, ready = workers_over_time(row.run, len(pools), edges_s)
        for v, each in enumerate(row.windows):
            sizes = [f"{value:.3f}" for value in (*paid[:, v], *ready[:, v])]
            begin = (row.name, f"{each.start_s:.12g}", f"{each.end_s:.12g}", f"{rate[v]:.4f}")
            lines.append([*begin, *sizes, int(each.holds), each.short_limit, f"{each.kept_frac:.6f}"])
    return csv_text(head, lines)


def events_csv(answer: DayAnswer) -> str:
    """A row per controller and change of a pool's size."""
    pools = answer.question.fleet.pools
    head = ["controller", "time_s", "pool", "before", "after", "late_while_starting", "rerouted"]
    return csv_text(
        head,
        (
            [
                row.name,
                f"{each.time_s:.12g}",
                pools[each.pool].name,
                each.before,
                each.after,
                each.late,
                each.rerouted,
            ]
            for row in _rows_and_optimum(answer)
            for each in row.effects
        ),
    )


def _rows_and_optimum(answer: DayAnswer) -> list[ControllerDay]:
    """The day of every controller, and that of the optimum, if there is one, at the end."""
    return [*answer.rows, *([] if answer.optimum is None else [answer.optimum.day])]


def rates_rps(answer: DayAnswer, edges_s: Any) -> Any:
    """Requests/s that arrive in each window (V,), for windows with these edges (V + 1,)."""
    return np.histogram(answer.judged.arrival_s, edges_s)[0] / np.diff(edges_s)


def draw_day(answer: DayAnswer) -> list[CaptionedChart]:
    """The charts: demand, ready workers of each pool, the worst limit in each window, and costs. Their lines
    are the static fleet, the winner and the optimum.
    """
    shown = [answer.static, *([answer.winner] if answer.winner is not answer.static else [])]
    shown += [] if answer.optimum is None else [answer.optimum.day]
    edges_s = answer.static.edges_s
    window_s = float(edges_s[-1] - edges_s[0]) / (len(edges_s) - 1)
    pools = answer.question.fleet.pools
    pictures = [
        CaptionedChart(
            "demand",
            charts.windows_chart({"demand": rates_rps(answer, edges_s)}, window_s, "requests/s"),
            "Demand in each window.",
        )
    ]
    ready = {row.name: workers_over_time(row.run, len(pools), edges_s).ready for row in shown}
    for p, pool in enumerate(pools):
        series = {name: counts[p] for name, counts in ready.items()}
        chart = charts.windows_chart(series, window_s, f"{pool.name}: workers ready", are_counts=True)
        pictures.append(CaptionedChart(f"workers-{p}", chart, f"{pool.name}: workers that take requests."))
    kept_frac_by_name = {row.name: [each.kept_frac for each in row.windows] for row in shown}
    chart = charts.windows_chart(kept_frac_by_name, window_s, "share within the limit")
    pictures.append(
        CaptionedChart("kept", chart, "The share within the limit that is kept worst, in each window.")
    )
    bars = [charts.Bar(row.name, row.usd, is_plan=row is answer.winner) for row in answer.rows]
    if answer.optimum is not None:
        bars.insert(0, charts.Bar("optimum", answer.optimum.usd))
        bars.insert(0, charts.Bar("proved bound", answer.optimum.proved_usd, at_least=True))
    pictures.append(
        CaptionedChart("costs", charts.bars_chart(bars, "USD"), "What the traffic costs under each.")
    )
    return pictures


def _html_page(answer: DayAnswer) -> str:
    """The page day.html: the recommendation, tables of controllers and fleets, charts and settings."""
    best, static, question = answer.winner, answer.static, answer.question
    saved = static.usd - best.usd
    cells = [
        (
            best.name,
            usd_text(best.usd),
            f"{best.usd / best.paid_hours:,.2f} USD/h; {_missed_text(best)} missed",
        ),
        ("Standing all day", usd_text(static.usd), describe_fleet(question.fleet)),
        ("Saved", usd_text(saved), f"{signed_percent_text(saved, static.usd)} of what stands all day"),
    ]
    if answer.optimum is not None:
        cells.append(("Optimum", usd_text(answer.optimum.usd), "knowing the traffic: no controller can"))
    head, table_rows = day_table(answer)
    missed = missed_lines(best)
    parts = [
        f"<header><p class=eyebrow>A day of {escape(question.fleet.llm.name)}</p>",
        f"<h1>{inline_html(recommendation_sentence(answer))}</h1>",
        f"<p class=lead>{inline_html(' '.join(proof_lines(answer)))}</p></header>",
        list_html(answer.warnings) if answer.warnings else "",
        figures_html(cells),
        section_html("Controllers", table_html(head, table_rows, caption="Controllers", numeric=(1, 2, 3))),
        section_html(
            "Fleets that could stand",
            table_html(FLEETS_HEAD, fleet_rows(answer), caption="Fleets", numeric=(2, 4, 5, 6)),
        )
        if answer.fleets
        else "",
        _types_section(answer),
        _causes_section(answer),
        section_html("Over the day", drawn(draw_day(answer))),
        section_html(f"Windows that {best.name} misses", list_html(missed, "None.")),
        section_html("Settings", list_html(settings_lines(answer))),
        section_html("What this rests on", list_html(basis_lines(answer))),
    ]
    return page_html(
        "A day under controllers", "\n".join(parts), "Written by fleetplan. day.json holds the same."
    )


def _types_section(answer: DayAnswer) -> str:
    """The section on the optimum whose worker types change, empty where it saves nothing or is unknown."""
    types = answer.types
    if types is None or types.saved_usd < SAME_USD:
        return ""
    rows = changing_types_page.pool_rows(types)
    drawn_table = table_html(
        changing_types_page.POOLS_HEAD, rows, caption="Pools of the optimum", numeric=(2, 3, 4, 5)
    )
    edges_s = answer.static.edges_s
    if ready := changing_types_page.ready_by_pool(types, edges_s):
        window_s = float(edges_s[-1] - edges_s[0]) / (len(edges_s) - 1)
        chart = charts.windows_chart(ready, window_s, "workers ready", are_counts=True)
        drawn_table += drawn([CaptionedChart("types", chart, "Ready workers if worker types change.")])
    return section_html("Types that change", drawn_table)


def _causes_section(answer: DayAnswer) -> str:
    """The section on what each controller costs above the optimum, and misses, by cause; empty if unknown."""
    rows = day_causes.cause_rows(answer, answer.rows)
    caption = "USD above the optimum by cause, and missed windows by cause"
    drawn_table = table_html(
        day_causes.CAUSE_COLUMNS, rows, caption=caption, numeric=range(1, len(day_causes.CAUSE_COLUMNS))
    )
    return section_html("Causes", drawn_table) if rows else ""


def settings_lines(answer: DayAnswer) -> list[str]:
    """The settings of each controller, and the number of settings that were simulated."""
    lines = []
    for row in answer.rows:
        if row.name == STATIC:
            continue
        parameters = ", ".join(f"{name} {value}" for name, value in row.parameters.items()) or "defaults"
        tuning_text = (
            f"; best of {row.settings_count} settings on the part that trains"
            if row.settings_count > 1
            else ""
        )
        lines.append(f"{row.name}: {parameters}{tuning_text}{_oscillation_text(answer, row)}")
    return lines + [f"{name} did not run: {why}" for name, why in answer.left_out]


def _oscillation_text(answer: DayAnswer, row: ControllerDay) -> str:
    """How often each pool oscillated under the controller (`ControllerDay.oscillations`), and when first."""
    pools = answer.question.fleet.pools
    return "".join(
        f"; oscillates: {pools[each.pool].name} grew and shrank again before a worker could be ready, "
        f"{count_text(each.times, 'time')}, first at {show_clock(each.first_s)}"
        for each in row.oscillations
    )


def basis_lines(answer: DayAnswer) -> list[str]:
    """Start-up, billing, windows, and where the table of capacity comes from."""
    question = answer.question
    lines = [
        f"{pool.name}: {pool.type.name}, {elastic.least} to {elastic.most} workers, ready "
        f"{elastic.start_s:.0f} s after they are requested and paid from then on"
        + (f"; {elastic.warm} at a time after {elastic.warm_start_s:.0f} s" if elastic.warm else "")
        for pool, elastic in zip(question.fleet.pools, question.pools, strict=True)
    ]
    # Keys of `stock` are GPUs, or GPUs with their market: "h100-80g@spot".
    gpu_names = {pool.type.gpu.name for pool in question.fleet.pools}
    gpu_names |= set(map(row_of, gpu_names))
    lines += [
        f"no more than {count} GPUs of {gpu} at any moment, those that start or drain among them"
        for gpu, count in question.stock.items()
        if gpu in gpu_names
    ]
    nodes = dict.fromkeys(node_of(pool.type.gpu) for pool in question.fleet.pools)
    lines += [
        f"{node.kind} is rented by whole nodes of {node.gpus} GPUs; those without a worker are paid too"
        + (", in started hours of a node" if question.unit_s else "")
        + ", and are not among the GPU hours"
        for node in nodes
        if node is not None
    ]
    lines += question.start_notes
    lines.append(f"SLO in every {show_span(question.window_s)}: {slo_text(question.slo)}")
    if question.train_frac:
        lines.append(
            f"settings were chosen on the first {100 * question.train_frac:.0f} % of the traffic; the rest "
            "judges"
        )
    lines.append(standing_line(answer).removesuffix("."))
    lines.append("simulated on this traffic with median step times: no scenarios, no margin for them")
    if answer.capacity is not None:
        lines.append(f"capacity: {answer.capacity.how_made}")
    return lines
