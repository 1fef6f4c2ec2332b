"""The first screen of an answer in a terminal: the beginning of the report, in 80 columns. Imports within
functions keep other commands fast.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from planner.commands.printed_tables import stdout_console
from planner.units import HOUR_S

if TYPE_CHECKING:
    from rich.console import Console

    from planner.reports.screen import Card, KeyFigure
    from planner.search.evidence.plan import Plan
    from planner.search.several.shared_plan import SharedPlan
    from planner.traffic.trace import Trace

LABEL, LINE = 20, 80  # Columns of a label, and of a line outside a terminal.
# Lines in a terminal: longer lines are hard to read, shorter lines leave no room beside a label.
LEAST_COLUMNS, MOST_COLUMNS = 40, 110
# `plan day` is recommended for traffic of at least LEAST_HOURS whose busiest hour has more than BUSY_FACTOR
# times the requests of the mean hour: otherwise a fleet for every hour saves little. Set by hand.
LEAST_HOURS, BUSY_FACTOR = 3, 1.3


def print_first_screen(plan: Plan) -> None:
    """Print a plan's verdict and answers, its LLM, SLO and main figures, why nothing is cheaper, which GPUs
    and adapters were considered, and warnings.
    """
    from planner.documents.facts import Adapters, GpusConsidered, GpusTooSmall, RoutersMiss
    from planner.reports import screen, words
    from planner.reports.fact_sentences import fact_sentence, fact_sentences_of

    why = screen.why_nothing_cheaper(plan)
    rows = [
        ("LLM", plan.fleet.llm.name),
        ("SLO", words.slo_sentence(plan)),
        *_figure_rows(screen.key_figures(plan)),
        *([(screen.why_title(plan), "; ".join(why))] if why else []),
        *(
            ("GPUs" if isinstance(each, GpusConsidered) else "", fact_sentence(each))
            for each in plan.certificate.assumptions
            if isinstance(each, GpusConsidered | GpusTooSmall)  # GpusTooSmall continues the row "GPUs".
        ),
        *(
            ("LoRA", fact_sentence(each))
            for each in plan.certificate.assumptions
            if isinstance(each, Adapters)
        ),
    ]
    # The row "Routers" of the key figures already has what this warning says.
    warnings = [each for each in plan.warnings if not isinstance(each, RoutersMiss)]
    losses = screen.losses_text(plan)
    _print_parts(
        screen.verdict_text(plan),
        [screen.answer_cards(plan)],
        rows,
        fact_sentences_of(warnings),
        losses=losses,
    )


def print_shared_screen(plan: SharedPlan) -> None:
    """Like `print_first_screen`, for several LLMs together, with each LLM's fleet, which LLM gives way to
    others, and what more of a limit would save.
    """
    from planner.reports import shared_screen
    from planner.reports.fact_sentences import fact_sentences_of
    from planner.reports.several_llms_report import binding_lines

    rows = _figure_rows(shared_screen.key_figures(plan))
    gives_way = [*fact_sentences_of(plan.in_production), *binding_lines(plan)]
    rows += [("Who gives way" if k == 0 else "", line) for k, line in enumerate(gives_way)]
    groups = [shared_screen.answer_cards(plan), shared_screen.llm_cards(plan)]
    _print_parts(shared_screen.verdict_text(plan), groups, rows, fact_sentences_of(plan.warnings))


def _figure_rows(key_figures: Sequence[KeyFigure]) -> list[tuple[str, str]]:
    """Label and text of each figure: "value: note", or "value" without a note."""
    return [(each.name, f"{each.value}: {each.note}" if each.note else each.value) for each in key_figures]


def _print_parts(
    verdict: str,
    groups: Sequence[Sequence[Card]],
    rows: Sequence[tuple[str, str]],
    warnings: Sequence[str],
    *,
    losses: str = "",
) -> None:
    """Print a verdict, groups of answers (a card each), labelled rows of text, and warnings. `losses` says
    why there is no answer "with a loss", and is printed in its place.
    """
    console = stdout_console(soft_wrap=True)
    columns = max(min(console.width, MOST_COLUMNS), LEAST_COLUMNS) if sys.stdout.isatty() else LINE
    for line in textwrap.wrap(verdict, columns, break_long_words=False, break_on_hyphens=False):
        console.print(Text(line, style="bold"))  # A path longer than a line is not broken.
    for cards in groups:
        console.print()
        for card in cards:
            price = "" if card.price == "none" else card.price  # An answer without a fleet has no price.
            # The plan's fleet is printed once: in the verdict, or else in the plan's card.
            is_printed_elsewhere = card.has_plans_fleet and (not card.is_plan or card.fleet in verdict)
            fleet = "" if is_printed_elsewhere else card.fleet
            texts = (price, card.difference, fleet, card.kept, card.holds)
            text = "; ".join(filter(None, texts))
            _print_labelled(console, card.name, text, columns, style="bold green" if card.is_plan else "")
    if losses:
        _print_labelled(console, "With a loss", losses, columns)
    console.print()
    for label, text in rows:
        _print_labelled(console, label, text, columns)
    for warning in warnings:
        _print_labelled(console, "Warning", warning, columns, style="yellow")


def has_busy_hours(trace: Trace) -> bool:
    """Whether the rate varies so much that a fleet of one size is too large for many hours."""
    since_s = trace.arrival_s - trace.arrival_s[0]
    hours = int(since_s[-1] // HOUR_S)
    if hours < LEAST_HOURS:
        return False
    requests = np.bincount((since_s // HOUR_S).astype(np.int64))[:hours]  # The last hour may be cut.
    return bool(requests.max() > BUSY_FACTOR * requests.mean())


def print_next(trace: Trace, out: Path | None, *, verbose: bool) -> None:
    """Print the next commands to run on a plan for this trace."""
    console = stdout_console(soft_wrap=True)
    if out is None:
        next_step = "add -o DIR to write the plan, its report and manifests"
    else:
        page, plan = (shlex.quote(str(out / name)) for name in ("report.html", "plan.yaml"))
        next_step = f"open {page}; plan validate {plan}"
    if has_busy_hours(trace):
        next_step += "; plan day, as the rate rises and falls: a fleet for the peak is paid at all hours"
    _print_labelled(console, "Next", next_step + ("" if verbose else "; --verbose prints all tables"), LINE)


def _print_labelled(console: Console, label: str, text: str, columns: int, *, style: str = "") -> None:
    """Print a text beside its label, wrapped and aligned."""
    lines = textwrap.wrap(text, columns - LABEL, break_long_words=False, break_on_hyphens=False)
    for k, line in enumerate(lines):
        console.print(Text(f"{label if k == 0 else '':{LABEL}}{line}", style=style))
