"""Renders a plan for several LLMs: plan.yaml, certificate.json and report.html of all LLMs together, and a
folder per LLM with the files of a plan for one LLM, so that every command can read it.
"""

import dataclasses
from html import escape

from planner.documents.certificate import facts_document, plain_values
from planner.domain import OWNED, payment_suffix, row_of
from planner.files.checked_files import to_yaml
from planner.reports import answer_sentences, figures, output, screen, shared_screen
from planner.reports.fact_sentences import SAME_FRAC, fact_sentences_of, relative_cost_text
from planner.reports.output import Document
from planner.reports.page import list_html, page_html, section_html, table_html
from planner.reports.words import Rows, describe_fleet, list_text, price_text, slo_sentence
from planner.search.evidence.plan import Plan
from planner.search.several.shared_plan import SharedPlan
from planner.units import count_text, in_unit, show_amount, show_share

NAMES = ("plan.yaml", "certificate.json", "report.html")
# The note below the table of the three answers.
OF_EACH_SLO = (
    "Each LLM keeps its own SLO in the share of its scenarios that it asks for. They are drawn for each by "
    "itself, so all together are not tested. With a loss: each LLM in turn, beside the others' fleets."
)


def render(
    plan: SharedPlan, *, command: str = "", png: bool = False, pages: bool = True
) -> dict[str, str | bytes]:
    """The files that `plan -o DIR` writes: path relative to DIR -> content. `command` is the command line
    that made the plan. Without `pages` there are no reports and no pictures.
    """
    # The files of each LLM's folder.
    folders: dict[str, dict[str, str | bytes]] = {
        name: {
            **output.render(llm_plan, command=command, pages=pages),
            **(output.chart_pictures(figures.all_figures(llm_plan)) if png and pages else {}),
        }
        for name, llm_plan in plan.plans.items()
    }
    return {
        "plan.yaml": _header(plan) + to_yaml(plan_document(plan)),
        "certificate.json": output.as_json(_certificate(plan)),
        **({"report.html": render_report(plan)} if pages else {}),
        **{f"{name}/{path}": content for name, files in folders.items() for path, content in files.items()},
    }


def outdated(plan: SharedPlan) -> list[str]:
    """Patterns of the files that an earlier run may have left in the folder, for one LLM or for several."""
    folders = ("", *(f"{name}/" for name in plan.plans))
    patterns = [folder + glob for folder in folders for glob in output.OUTDATED]
    return [*patterns, "requests.csv", "manifests/README.md"]


def plan_document(plan: SharedPlan) -> Document:
    """The content of plan.yaml, which `plan --json` prints."""
    document: Document = {
        "status": plan.status,
        "llms": {
            name: {
                "plan": f"{name}/plan.yaml",
                "llm": llm_plan.fleet.llm.name,
                "fleet": describe_fleet(llm_plan.fleet),
                "cost_usd_per_h": llm_plan.fleet.price_usd_per_h,
                "power_w": llm_plan.fleet.power_w,
                "gpus": llm_plan.fleet.gpus,
                "status": llm_plan.status,
                "value": llm_plan.value,
                "value_on_paper": plan.paper[name],
                "value_alone": plan.alone[name],
                "kept_in": _kept_in(llm_plan),
                "keeps_slo": llm_plan.verdict.holds,
            }
            for name, llm_plan in plan.plans.items()
        },
        **_totals(plan),
        "bill": output.bill_document(plan.bill),
        "objective": {
            "name": plan.objective,
            "unit": plan.unit,
            "value": plan.value,
            "on_paper": plan.value_on_paper,
            "bound": plan.bound,
            "level0": plan.level0,
            "level0_bound": plan.level0_bound,
        },
        "answers": _answers(plan),
        "limits": _limits_document(plan),
        "binding": fact_sentences_of(plan.binding),
        "in_production": fact_sentences_of(plan.in_production),
        "warnings": fact_sentences_of(plan.warnings),
        "placement": output.placement_document(plan.placement),
    }
    plain_document: Document = output.plain_value(document)
    return plain_document


def _kept_in(plan: Plan) -> Document | None:
    return None if plan.kept_in is None else plain_values(plan.kept_in)


def _answers(plan: SharedPlan) -> list[Document]:
    """The three answers for all LLMs together, with the value of each LLM's fleet."""
    rows = []
    for total in plan.answers:
        values = {}
        for name, llm_plan in plan.plans.items():
            answer = llm_plan.certificate.find_answer(total.name)
            values[name] = None if answer is None else answer.value
        rows.append(dataclasses.asdict(total) | {"llms": values})
    return rows


def _limits_document(plan: SharedPlan) -> Document:
    """The amount of each shared limit, and how much of it the plan uses."""
    return {each.limit.name: {"amount": each.amount, "used": each.used} for each in plan.limits}


def _totals(plan: SharedPlan) -> Document:
    fleets = plan.fleets
    return {
        "cost_usd_per_h": plan.bill.usd_per_h,
        "power_w": sum(fleet.power_w for fleet in fleets),
        "gpus": sum(fleet.gpus for fleet in fleets),
    }


def _header(plan: SharedPlan) -> str:
    """The comments with which plan.yaml begins."""
    total = _totals(plan)
    name = next(iter(plan.plans))
    return (
        f"# {plan.status}: {count_text(len(plan.plans), 'LLM')}, {total['gpus']} GPUs, "
        f"{plan.bill.usd_per_h:.2f} USD/h.\n"
        "# Each has a plan of its own, which every command takes:\n"
        f"#   plan manifests {name}/plan.yaml --target kubernetes -o deploy/\n"
    )


def _certificate(plan: SharedPlan) -> Document:
    """The shared plan's certificate.json."""
    return {
        "status": plan.status,
        "objective": plan.objective,
        "unit": plan.unit,
        "value": plan.value_on_paper,
        "bound": plan.bound,
        "gap_frac": plan.gap_frac,
        "level0": plan.level0,
        "level0_bound": plan.level0_bound,
        "level0_exact": plan.is_exact,
        "level0_exhausted": plan.is_exhausted,
        "llms": {
            name: {
                "value": llm_plan.value,
                "on_paper": plan.paper[name],
                "alone": plan.alone[name],
                "kept_in": _kept_in(llm_plan),
            }
            for name, llm_plan in plan.plans.items()
        },
        "answers": _answers(plan),
        "limits": _limits_document(plan),
        "binding": fact_sentences_of(plan.binding),
        "in_production": fact_sentences_of(plan.in_production),
        "assumptions": fact_sentences_of(plan.assumptions),
        "warnings": fact_sentences_of(plan.warnings),
        "facts": facts_document(
            binding=plan.binding,
            in_production=plan.in_production,
            assumptions=plan.assumptions,
            warnings=plan.warnings,
        ),
        "rounds": plan.rounds,
        "simulations": plan.simulations,
        "seed": plan.seed,
        "placement": output.placement_document(plan.placement),
    }


def proof_lines(plan: SharedPlan) -> list[str]:
    """Sentences on the value of the fleets, on what is proved about it, and on the lower bound."""
    value, level0_bound, bound = (
        in_unit(each, plan.unit) for each in (plan.value_on_paper, plan.level0_bound, plan.bound)
    )
    if (
        plan.level0 is None
    ):  # Level 0 was left out, because the plan has pools of several types and a lower value.
        level0 = f"no fleets have less than {level0_bound}; those of the plan, of several types, do"
    else:
        level0 = f"{'exactly the best is' if plan.is_exact else 'the best found is'} "
        level0 += in_unit(plan.level0, plan.unit)
        if not plan.is_exhausted:
            level0 += f", none has less than {level0_bound}; the search was stopped"
        elif not plan.is_exact:
            level0 += ", by a search that rests on the assumptions of the LLMs' certificates"
    return [
        f"Status: {plan.status}. {'On paper' if plan.in_production else 'Plan'}: {value}.",
        f"With one worker type per pool for every LLM, {level0}.",
        f"Lower bound over all fleets of these worker types, under any policies: {bound}, a gap "
        f"of {show_share(plan.gap_frac)} to the plan; the assumptions say what it takes for granted.",
        f"{count_text(plan.simulations, 'simulation')}, {count_text(plan.rounds, 'round')} of the master, "
        f"seed {plan.seed}.",
    ]


def answer_sentence(plan: SharedPlan) -> str:
    """The GPUs and the price of the fleets of all LLMs in one sentence."""
    gpus = count_text(_totals(plan)["gpus"], "GPU")
    return f"{list_text(list(plan.plans))} on {gpus}: {price_text(plan.bill)}."


def fleet_rows(plan: SharedPlan) -> Rows:
    """A row per LLM: its fleet, its GPUs, the value of the fleet, the value if the limits were for this LLM
    alone, and the verdict. With safety also the value on paper, and in how many scenarios the SLO is kept.
    """
    has_scenarios = bool(plan.in_production)
    head: tuple[str, ...] = ("LLM", "Fleet", "GPUs", plan.unit, f"Alone, {plan.unit}")
    head += (f"On paper, {plan.unit}", "Kept in") if has_scenarios else ()
    rows = []
    for name, llm_plan in plan.plans.items():
        kept_in_text = "" if llm_plan.kept_in is None else answer_sentences.kept_text(llm_plan.kept_in)
        rows.append(
            (
                f"{name} ({llm_plan.fleet.llm.name})",
                describe_fleet(llm_plan.fleet),
                str(llm_plan.fleet.gpus),
                show_amount(llm_plan.value, plan.unit),
                show_amount(plan.alone[name], plan.unit),
                *((show_amount(plan.paper[name], plan.unit), kept_in_text) if has_scenarios else ()),
                "kept" if llm_plan.verdict.holds else "missed",
            )
        )
    return (*head, "SLO"), rows


def answer_rows(plan: SharedPlan) -> Rows:
    """The three answers of every LLM, then those of all LLMs together; empty if no LLM asks for safety."""
    with_answers = {name: llm_plan for name, llm_plan in plan.plans.items() if llm_plan.certificate.answers}
    if not with_answers:
        return ("LLM",), []
    # The price of whole nodes has a column of its own if it differs from that of the GPUs in use.
    is_by_node = any(map(answer_sentences.pays_idle_gpus, with_answers.values())) or any(
        total.value is not None
        and total.paid_usd_per_h is not None
        and plan.unit == "USD/h"
        and total.paid_usd_per_h > total.value * (1 + SAME_FRAC)
        for total in plan.answers
    )
    head: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = []
    for name, llm_plan in with_answers.items():
        head, values = answer_sentences.answer_rows(
            llm_plan, is_by_node=is_by_node, is_by_gpu=len(plan.plans) > 1
        )
        rows += [(name, *row) for row in values]
    paper_value = next((total.value for total in plan.answers if total.name == "on-paper"), None)
    totals = plan.answers if len(plan.plans) > 1 else ()  # With one LLM they would repeat its answers.
    for total in totals:
        lacks = f"{shared_screen.no_fleet_text(plan, total)} within the limits" if total.lacks else ""
        money = ["-" if total.value is None else show_amount(total.value, plan.unit)]
        if is_by_node:
            money.append("-" if total.paid_usd_per_h is None else show_amount(total.paid_usd_per_h, "USD/h"))
        against_paper = ""
        if total.value is not None and paper_value is not None and total.name != "on-paper":
            against_paper = relative_cost_text(total.value, paper_value)
        # The last columns, on scenarios and headroom, are empty: only single LLMs have these.
        label = answer_sentences.LABELS[total.name]
        rows.append(("all", label, lacks, *money, against_paper, "", "", ""))
    return ("LLM", *head), rows


def limit_rows(plan: SharedPlan) -> Rows:
    """A row per shared limit: its name, how much of it is used, and the amount, both with the unit."""
    owned = {row_of(each.limit.gpu) for each in plan.limits if payment_suffix(each.limit.gpu) == OWNED}
    return ("Limit", "Used", "Of"), [
        (
            f"{each.limit.name} to rent" if each.limit.gpu in owned else each.limit.name,
            *(f"{show_amount(value, '')} {each.limit.unit}" for value in (each.used, each.amount)),
        )
        for each in plan.limits
    ]


def binding_lines(plan: SharedPlan) -> list[str]:
    """Which shared limits bind, and which LLM pays more for them. These facts are about fleets on paper, and
    each line says so if fleets for production were asked for.
    """
    asks_production = bool(plan.in_production) or any(map(screen.not_for_production, plan.plans.values()))
    where = "on paper: " if asks_production else ""
    return [f"{where}{text}" for text in fact_sentences_of(plan.binding)]


def node_rows(plan: SharedPlan) -> Rows:
    """A row per node: its GPUs in use, and its workers; no rows if the plan places no workers."""
    nodes = plan.placement.rows() if plan.placement else []
    return ("Node", "GPUs used", "Workers"), [
        (str(row["node"]), str(row["GPUs used"]), str(row["workers"])) for row in nodes
    ]


def render_report(plan: SharedPlan) -> str:
    """The page report.html, with links to the reports of the LLMs."""
    links = "".join(
        f'<li><a href="{name}/report.html">{name}</a>: {escape(slo_sentence(llm_plan))}</li>'
        for name, llm_plan in plan.plans.items()
    )
    nodes = node_rows(plan)
    answers = []
    if plan.in_production:
        answer_table = table_html(*answer_rows(plan), caption="The three answers", numeric=(3,))
        notes = f"{list_html(fact_sentences_of(plan.in_production))}<p class=note>{escape(OF_EACH_SLO)}</p>"
        answers = [section_html("On paper, in production, with a loss", answer_table + notes)]
    body = [
        f"<header><p class=eyebrow>Fleet plan · {count_text(len(plan.plans), 'LLM')} on one stock"
        f" · seed {plan.seed}</p>",
        shared_screen.first_screen_html(plan),
        "</header>",
        *([section_html("Mind", list_html(fact_sentences_of(plan.warnings)))] if plan.warnings else []),
        section_html(
            "Fleets", table_html(*fleet_rows(plan), caption="Fleet of every LLM", numeric=(2, 3, 4))
        ),
        *answers,
        section_html("The SLO of each, with its report", f"<ul>{links}</ul>"),
        section_html(
            "Shared limits",
            table_html(*limit_rows(plan), caption="Shared limits", numeric=(1, 2))
            + f"<div class=below>{list_html(binding_lines(plan))}</div>",
        ),
        section_html(
            "What was found, and what bounds it",
            list_html(proof_lines(plan))
            + "<h3>Assuming</h3>"
            + list_html(fact_sentences_of(plan.assumptions)),
        ),
        *([section_html("Nodes", table_html(*nodes, caption="Nodes", numeric=(1,)))] if nodes[1] else []),
    ]
    return page_html(
        "Fleet plan for several LLMs",
        "\n".join(body),
        f"Written by fleetplan, seed {plan.seed}. Each LLM's folder has its plan.yaml, certificate.json, "
        "requests.csv, report.html and manifests/.",
    )
