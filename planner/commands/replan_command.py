"""`plan replan`: from a running fleet to a fleet that keeps today's SLO, at the least cost of change and
rent. Imports within functions keep other commands fast.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands import shared_options
from planner.commands.command_output import print_warnings, refuse_to_overwrite
from planner.commands.printed_tables import print_json, print_lines, print_rows, simulated_text
from planner.commands.study_options import StudyOptions, with_study_options
from planner.domain import OWNED
from planner.errors import InputError
from planner.files.checked_files import YAML_SUFFIXES
from planner.slo_metrics import metric_label
from planner.units import HOUR_S, count_text, parse_quantity, show_beside, show_digits, show_s

OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        parser=shared_options.folder_or_file(*YAML_SUFFIXES),
        metavar="DIR|FILE.yaml",
        help="Folder for fleet.yaml, the new fleet, and replan.json; or FILE.yaml (.json), the fleet alone.",
    ),
]
MOST_USD = 1e9  # Starting or stopping a worker costs less; more is a mistake in the unit.


@with_study_options()
def replan(
    options: StudyOptions,
    current: Annotated[
        Path,
        typer.Option("--current", readable=False, help="plan.yaml, its folder, or the fleet.yaml that runs."),
    ],
    horizon: Annotated[str, typer.Option("--horizon", help="How long the new fleet is to run.")] = "24 h",
    start_cost: Annotated[
        float, typer.Option("--start-cost", min=0.0, help="USD per worker started: loading, warming up.")
    ] = 1.0,  # This is replanning.USUAL_START_USD, whose import would slow every command down.
    stop_cost: Annotated[float, typer.Option("--stop-cost", min=0.0, help="USD per worker stopped.")] = 0.0,
    out: OutOption = None,
) -> None:
    """Keep what runs while it holds; else the smallest change that pays over the horizon.

    Says how far the traffic has drifted from what the running fleet was planned on (requests.csv beside it).
    """
    from planner.api.inputs import fleet_file_warnings, plan_file, read_fleet
    from planner.api.questions import read_task
    from planner.api.studying import REPLAN_NAMES, replan_in
    from planner.files import checked_files
    from planner.studies.replanning import ReplanTerms

    for name, usd in (("--start-cost", start_cost), ("--stop-cost", stop_cost)):
        if not 0 <= usd < MOST_USD:
            raise InputError(f"{name}: expected USD per worker, 0 to {MOST_USD:g}, found {usd:g}")
    horizon_h = parse_quantity(horizon, "s", where="--horizon") / HOUR_S
    file = plan_file(current)
    if out is not None:
        is_file = out.suffix in YAML_SUFFIXES
        (checked_files.check_output_file if is_file else checked_files.check_output_directory)(out)
        outputs = [out] if is_file else [out / name for name in REPLAN_NAMES]
        refuse_to_overwrite(outputs, file, options.slo, options.trace)
    with options.at_work() as (progress, catalog):
        task = read_task(options.slo, catalog)
        running = read_fleet(file, catalog, slo=task)
        # Warnings on the fleet's file: a plan that was changed by hand, for instance.
        warnings = print_warnings(fleet_file_warnings(file, running))
        study = options.study(catalog, progress)
        planned_on = file.parent / "requests.csv"
        result = replan_in(study, task, running, planned_on, ReplanTerms(horizon_h, start_cost, stop_cost))
        if out is not None:
            written = result.save(out)
    answer_document = result.to_dict()
    if options.json_output:
        print_json(answer_document, warnings + study.trace.warnings)
    else:
        _print_answer(answer_document, str(planned_on))
        if out is not None:
            print_lines(f"written to {out}: {', '.join(written) or 'the fleet to run'}")


def _print_answer(document: dict[str, Any], planned_on: str) -> None:
    """Print how today's traffic differs from the planned traffic, the change of workers, the SLO before and
    after it, and the cost of every candidate fleet (a `way` in `document`).

    `d` and `p` are of a Kolmogorov-Smirnov test (`replanning.TrafficDrift`).
    """
    if document["drift"] is None:
        print_lines(f"there is no {planned_on}: what the fleet was planned on is not known")
    else:
        drifts = [
            {
                "traffic": row["what"],
                "planned on": show_digits(row["before"], 4),
                "today": show_digits(row["after"], 4),
                "D": "-" if row["d"] is None else f"{row['d']:.3f}",
                "p": "-" if row["p"] is None else f"{row['p']:.2g}",
                "drift": "yes" if row["is_drift"] else "no",
            }
            for row in document["drift"]
        ]
        print_rows(drifts, "drift (medians; D is the share of requests by which the distributions differ)")
    head = "keep what runs" if document["keeps"] else f"change to {document['fleet']}"
    print_lines(head, style="bold")
    moves = document["moves"]
    print_rows([dict(move) for move in moves], "workers")
    # `worker` is a text: role, GPU, settings.
    if any(move["worker"].split()[1].endswith(OWNED) and move["after"] < move["before"] for move in moves):
        print_lines("owned workers that stop are switched off, not sold: their electricity is saved")
    limits = [
        {
            "metric": metric_label(line["limit"]),
            "limit": show_s(line["limit_s"]),
            "what runs": show_beside(line["running_s"], line["limit_s"]).value,
            "then": simulated_text(line),
        }
        for line in document["slo"]
    ]
    print_rows(limits, "SLO on today's traffic")
    ways = [
        {
            "way": way["way"],
            "USD/h": f"{way['cost_usd_per_h']:.2f}",
            "starts and stops, USD": f"{way['migration_usd']:.2f}",
            f"USD in {document['horizon_h']:g} h": f"{way['total_usd']:.2f}",
            "SLO": slo_text(way),
            **(
                {}
                if way["scenario_count"] is None
                else {"kept in scenarios": f"{way['kept']} of {way['scenario_count']}"}
            ),
        }
        for way in document["ways"]
    ]
    print_rows(ways, "ways to go on")
    if document["gone"]:
        print_lines(f"what runs cannot stay: the question has no {' and no '.join(document['gone'])}")
    answers = answer_rows(document["answers"])
    if answers:
        print_rows(answers, "the plan from scratch")
    options = ", ".join(document["searched_over"])
    if document["is_exact"]:
        proof = "exact"
    elif document["is_exhausted"]:
        assumed = document["left_out_by_a_larger_one"]
        proof = (
            f"found by search ({count_text(assumed, 'fleet')} left out because a larger one fails, which "
            "is an assumption)"
        )
    else:
        proof = "NOT exhausted"
    others = count_text(len(document["also_tried"]), "other worker type")
    also = f"; some fleets with {others} were simulated too" if document["also_tried"] else ""
    simulations = count_text(document["simulations"], "simulation")
    print_lines(f"{proof} over all counts of {options}{also}; {simulations}")


def slo_text(way: dict[str, Any]) -> str:
    """Whether a candidate fleet keeps the SLO, in enough scenarios or only as written, within the limits."""
    if way["holds"]:
        return "kept"
    if way["beyond"]:
        kept = "kept as written" if way["is_kept_as_written"] else "MISSED"
        return f"{kept}, beyond the limits ({', '.join(way['beyond'])})"
    return "kept as written, in too few scenarios" if way["is_kept_as_written"] else "MISSED"


def answer_rows(answers: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for each answer (fleet on paper, production, with a loss): its cost and scenarios kept."""
    return [
        {
            "answer": each["name"].replace("-", " "),
            "USD/h": "none found" if each["cost_usd_per_h"] is None else f"{each['cost_usd_per_h']:.2f}",
            "kept in scenarios": "-"
            if each["kept"] is None
            else f"{each['kept']} of {each['scenario_count']}",
        }
        for each in answers
    ]
