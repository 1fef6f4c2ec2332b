"""`plan what-if`: the plan before and after a change; `plan sensitivity`: after many small changes. Imports
within functions keep other commands fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands.printed_tables import print_json, print_lines, print_rows, simulated_text
from planner.commands.study_options import StudyOptions, with_study_options
from planner.errors import InfeasibleError, InputError, OutOfTimeError
from planner.slo_metrics import metric_label
from planner.units import in_unit, show_digits, show_percent, show_s

if TYPE_CHECKING:
    from planner.studies.what_if import ChangedQuestion, StudyAnswer


@with_study_options()
def what_if(
    options: StudyOptions,
    changes: Annotated[
        list[str] | None,
        typer.Option("--change", help="KEY=VALUE in slo.yaml, 'slo.ttft.p90=1 s'; KEY= takes it out."),
    ] = None,
) -> None:
    """Plan before and after changes of slo.yaml, and see what moves.

    The previous fleet is asked the changed question too. Exit code 3: after the changes there is no fleet.
    4: none was found in time.
    """
    from planner.api.questions import TaskDocument, read_task
    from planner.api.studying import what_if_in
    from planner.studies.what_if import change_question, verdict_text

    if not changes:
        raise InputError("--change is missing: say what changes, such as --change 'slo.ttft.p90=1 s'")
    with options.at_work() as (progress, catalog):
        question = read_task(options.slo, catalog)
        document = dict(question.document)
        for text in changes:
            document = change_question(document, text, catalog)
        changed = TaskDocument(document, catalog, Path(f"{options.slo} with {', '.join(changes)}"))
        changed.task()  # Raises now if the changed question is not valid.
        study = options.study(catalog, progress)
        result = what_if_in(study, question, changed, ", ".join(changes))
    if options.json_output:
        print_json(result.to_dict(), study.trace.warnings)
    else:
        if rows := moved_rows(result.before, result.moved, list(result.bounds)):
            print_rows(rows, result.moved.label)
        print_lines(verdict_text(result.moved))
    if result.moved.answer is None:
        raise typer.Exit((InfeasibleError if result.moved.is_proved else OutOfTimeError).exit_code)


@with_study_options()
def sensitivity(
    options: StudyOptions,
    by: Annotated[str, typer.Option("--by", help="How far things may be wrong.")] = "10 %",
) -> None:
    """Ask around a plan: does it hold if step times or traffic are off, and what does each limit cost?"""
    from planner.api.questions import read_task
    from planner.api.studying import sensitivity_in, share_of
    from planner.reports.fact_sentences import fact_sentence

    by_frac = share_of(by, "--by")
    with options.at_work() as (progress, catalog):
        study = options.study(catalog, progress)
        result = sensitivity_in(study, read_task(options.slo, catalog), by_frac)
    if options.json_output:
        print_json(result.to_dict(), study.trace.warnings)
    else:
        print_moves(result.before, list(result.moves))
        print_lines(fact_sentence(result.headroom))
        print_lines(robustness_sentence(result.before, list(result.moves), by_frac))


def robustness_sentence(before: StudyAnswer, moves: list[ChangedQuestion], by_frac: float) -> str:
    """Whether the plan holds if step times and traffic are both off, and the cost of a plan that does."""
    from planner.studies.what_if import difference_text, fleet_text

    planned = before.problem.task.robust
    # One of the changes (studies/what_if.py, `sensitivity`) has both longer steps and more traffic.
    worst = next(
        moved
        for moved in moves
        if moved.task.robust.step_times_frac > planned.step_times_frac
        and moved.task.robust.traffic_frac > planned.traffic_frac
    )
    percent = show_percent(by_frac, "g")
    if worst.kept:
        return f"robust: it also holds with steps {percent} longer and up to {percent} more traffic at once"
    robust_cost = difference_text(worst, before)
    if worst.answer is not None:
        robust_cost += f", {fleet_text(worst.answer, before)}"
    return (
        f"not robust to steps {percent} longer and up to {percent} more traffic at once; a plan that is, "
        f"with robust: {{step_times: {percent}, traffic: {percent}}} in slo.yaml: {robust_cost}"
    )


def print_moves(before: StudyAnswer, moves: list[ChangedQuestion]) -> None:
    """Print a table of the changed questions, under the plan's own figures."""
    from planner.studies.what_if import difference_text, fleet_text, study_document

    # `fleet_text` names settings only where they differ from the second argument's.
    planned_text = fleet_text(before, before)

    def changed_text(answer: StudyAnswer) -> str:
        text = fleet_text(answer, before)
        return "the plan's" if text == planned_text else text

    table = [
        {
            "if": moved.label,
            "the plan": _plan_cell(moved),
            "the best then costs": difference_text(moved, before),
            **_safety_cells(None if moved.answer is None else study_document(moved.answer), before),
            "fleet": "-" if moved.answer is None else changed_text(moved.answer),
        }
        for moved in moves
    ]
    answers_text = "".join(
        f"; {name} {text}" for name, text in _answer_figures(study_document(before)["answers"]).items()
    )
    print_rows(table, f"the plan: {study_document(before)['fleet']}, {amount_text(before)}{answers_text}")


def _plan_cell(changed: ChangedQuestion) -> str:
    """Whether the plan's fleet holds under the changed question. It may also keep the SLO as written but in
    too few scenarios, or in enough scenarios of the search but not in its test.
    """
    if changed.kept_as_written:
        return "too few scenarios"
    if changed.is_previous_cheaper:
        return "search's scenarios only"
    return {True: "holds", False: "fails", None: "not offered"}[changed.kept]


def _safety_cells(after: dict[str, Any] | None, before: StudyAnswer) -> dict[str, str]:
    """Cells on the best fleet on paper and the scenarios kept in production; empty without safety."""
    if not before.answers:
        return {}
    answers = {} if after is None else {each["name"]: each for each in after["answers"]}
    cells = {"on paper, USD/h": "-", "kept in scenarios": "-"}
    on_paper, production = answers.get("on-paper"), answers.get("production")
    if on_paper is not None and on_paper["cost_usd_per_h"] is not None:
        cells["on paper, USD/h"] = f"{on_paper['cost_usd_per_h']:.2f}"
    if production is not None and production["scenario_count"]:
        cells["kept in scenarios"] = f"{production['kept']} of {production['scenario_count']}"
    return cells


def amount_text(answer: StudyAnswer) -> str:
    """The value of the plan's objective, with its unit."""
    from planner.search.problem.options import OBJECTIVE_UNITS

    return in_unit(answer.value, OBJECTIVE_UNITS[answer.problem.task.objective])


def moved_rows(
    before: StudyAnswer | None, changed: ChangedQuestion, bounds: list[float]
) -> list[dict[str, str]]:
    """One row per figure of the plan, before and after the change; a star marks figures that differ. If only
    one side has a fleet, the rows have the figures of that side alone.

    `bounds` are the lower bounds on the cost (WhatIfResult.bounds): one for each side that has a fleet.
    """
    from planner.studies.what_if import study_document

    answers = {"before": before, "after": changed.answer}
    present = {when: answer for when, answer in answers.items() if answer is not None}
    figures = {
        when: _plan_figures(study_document(answer), bound)
        for (when, answer), bound in zip(present.items(), bounds, strict=True)
    }
    if len(figures) < 2:
        return [{"": name, when: text} for when, texts in figures.items() for name, text in texts.items()]
    old, new = figures["before"], figures["after"]
    return [
        {
            "": name,
            "before": old.get(name, "-"),
            "after": new.get(name, "-"),
            "moved": "" if old.get(name) == new.get(name) else "*",
        }
        for name in dict.fromkeys([*old, *new])
    ]


def _plan_figures(document: dict[str, Any], bound: float) -> dict[str, str]:
    """The figures of one plan (`what_if.study_document`) as text, by their names."""
    from planner.reports.words import level0_proof

    limits = {f"{metric_label(line['limit'])}, limit": show_s(line["limit_s"]) for line in document["slo"]}
    simulated = {
        f"{metric_label(line['limit'])}, simulated": simulated_text(line) for line in document["slo"]
    }
    return {
        "fleet": document["fleet"],
        "tokens per step": ", ".join(str(row["max_num_batched_tokens"]) for row in document["workers"]),
        "USD/h": f"{document['cost_usd_per_h']:.2f}",
        **_answer_figures(document["answers"]),
        "USD per million tokens": show_digits(document["usd_per_million_tokens"], 3),
        "kW": f"{document['power_w'] / 1e3:.1f}",
        "GPUs": str(document["gpus"]),
        "requests/s": show_digits(document["rate_rps"], 4),
        **limits,
        **simulated,
        "bound": show_digits(bound, 4),
        "on paper, one worker type per pool": level0_proof(
            is_exact=document["level0_exact"], is_exhausted=document["level0_exhausted"]
        ),
    }


def _answer_figures(answers: list[dict[str, Any]]) -> dict[str, str]:
    """The cost of each answer, and in how many scenarios it is kept. The cost of production is the plan's,
    which has its own row.
    """
    text_by_name = {}
    for answer in answers:
        name = answer["name"].replace("-", " ")
        if answer["name"] != "production":
            cost = answer["cost_usd_per_h"]
            text_by_name[f"{name}, USD/h"] = "none found" if cost is None else f"{cost:.2f}"
        if answer["kept"] is not None:
            text_by_name[f"{name}, kept in"] = f"{answer['kept']} of {answer['scenario_count']} scenarios"
    return text_by_name
