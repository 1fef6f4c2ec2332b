"""The first screen of an answer as HTML, with which the report begins and which the app's pages show."""

from collections.abc import Sequence
from html import escape

from planner.reports import screen, screen_charts, words
from planner.reports.fact_sentences import capitalise_first
from planner.reports.page import chart_html, figures_html, unbroken_html
from planner.search.evidence.plan import Plan

# The parts of `FleetRobustness` in words, for the note on those that were not simulated.
PARTS_TEXT = {
    "workers": "SLO attainment by number of workers",
    "traffic": "more traffic in scenarios",
    "prompts": "longer prompts",
    "losses": "the loss of a worker",
    "headroom": "headroom: how much more traffic and how much longer steps it stands",
}


def first_screen_html(plan: Plan) -> str:
    """The first screen: verdict, figures, the answers as cards, charts. Its styles are in reports/parts.css.

    Texts are escaped here or by `unbroken_html` and `figures_html`.
    """
    slo_note = f"<p class=note>{escape(words.slo_sentence(plan))}</p>"
    parts = [
        verdict_heading(screen.verdict_text(plan)),
        slo_note,
        key_figures_html(screen.key_figures(plan)),
        cards_html(screen.answer_cards(plan)),
        charts_section(plan),
    ]
    return "\n".join(parts)


def verdict_heading(text: str, tag: str = "h1") -> str:
    """The verdict as an HTML heading."""
    return f"<{tag} class=verdict>{unbroken_html(text)}</{tag}>"


def key_figures_html(values: Sequence[screen.KeyFigure]) -> str:
    """The key figures of the first screen as HTML."""
    return figures_html([(each.name, each.value, each.note) for each in values])


def cards_html(values: Sequence[screen.Card]) -> str:
    """The cards of the first screen, one for each answer, as HTML."""
    return f"<ul class=cards>{''.join(map(_card, values))}</ul>"


def _card(card: screen.Card) -> str:
    """A card as HTML: its name and price, then a paragraph for each of its other texts."""
    lines = [card.fleet, card.kept, card.holds, card.breaks]
    text = "".join(f"<p>{unbroken_html(capitalise_first(line))}.</p>" for line in lines if line)
    month = f" <span>{escape(card.month)}</span>" if card.month else ""
    difference = f" <span>{unbroken_html(card.difference)}</span>" if card.difference else ""
    return (
        f"<li{' class=chosen' if card.is_plan else ''}><h2>{escape(card.name)}{difference}</h2>"
        f"<p class=price>{unbroken_html(card.price)}{month}</p>{text}</li>"
    )


def charts_section(plan: Plan) -> str:
    """The charts of the first screen, and a note on what was not simulated."""
    drawn = "".join(chart_html(figure) for figure in screen_charts.screen_figures(plan))
    robustness = plan.certificate.robustness
    if robustness is None:
        # Robustness is not simulated for a plan that is not for production. A plan of an older version lacks
        # it too; then planning again helps.
        remedy = "" if screen.not_for_production(plan) else ": plan again"
        text = f"What fewer workers and more traffic would do was not simulated with this plan{remedy}."
    elif robustness.left_out:
        missing = ", ".join(PARTS_TEXT[part] for part in robustness.left_out)
        why, remedy = (
            ("the time was over", "give a longer --time-limit")
            if robustness.is_out_of_time
            else ("it takes too many requests", "plan a part of the traffic (traffic: window)")
        )
        text = f"Not simulated, as {why}: {missing}. To have it, {remedy}."
    else:
        text = ""
    note = f"<p class=note>{escape(text)}</p>" if text else ""
    return f"<div class=charts>{drawn}</div>{note}"
