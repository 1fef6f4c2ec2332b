"""What runs outside the app's own process: `python -m ui.worker` does one job after another.

It loads the planner and plans a small question while it waits, so that the simulator is compiled. It reads
jobs (lines of JSON: the kind of the job, its request and a folder) from stdin, and answers on stdout in lines
of JSON: {"phase": ...} and {"search": ...} while it works, and {"first": ...} for the fleet on paper, found
before that of production. The last line is {"done": true} once document.json and files.zip are in the job's
folder, {"error": ...} for what the user can mend, or {"crash": traceback}. The end of stdin means that the
app has ended, and ends this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from altair.utils.schemapi import debug_mode

from planner.api import simulating, watch_api
from planner.api.inputs import requests_of
from planner.api.planning import answer_question, plan
from planner.api.questions import read_task
from planner.api.results import SharedPlanResult
from planner.api.scheduling import not_simulated, read_market, schedule
from planner.day import day_causes, day_manifests, day_page
from planner.day.day_api import DayResult, day
from planner.day.search.day_optimum import SAME_FRAC
from planner.documents import markets
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.fleet_file import read_fleet
from planner.documents.log_columns import log_options_of
from planner.documents.several_llms_question import read_question
from planner.documents.task import parse_task
from planner.documents.traffic_description import parse_description
from planner.domain import Slo
from planner.errors import InputError, PlannerError
from planner.files import checked_files
from planner.files.document_values import Section
from planner.fleet import Fleet
from planner.reports import (
    answer_sentences,
    charts,
    drawing,
    figures,
    output,
    rows,
    screen,
    screen_charts,
    screen_page,
    several_llms_report,
    shared_screen,
    words,
)
from planner.reports import schedule_page as schedules
from planner.reports.curves import class_text, cumulative_curve, limits_by_chart
from planner.reports.fact_sentences import fact_sentences_of
from planner.search.evidence import certify
from planner.search.evidence.plan import Plan
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.problem.bill import bill_fleet
from planner.search.problem.plan_problem import OnPaper, Problem, Progress, Watch
from planner.search.problem.stages import phase_of
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import judge_slo
from planner.studies import fleet_comparison, pareto_frontier, pareto_page, prefix_study, sliders, what_if
from planner.studies.what_if import Study
from planner.traffic.described import Description, fit_context
from planner.traffic.scaling import RateRequest
from planner.traffic.trace import Trace, spread_stamps
from planner.traffic.trace_reading import read_trace
from planner.traffic.workload import summarise_trace
from planner.units import show_digits
from ui.store import error_line, read_as, zip_files

Request = Mapping[str, Any]  # What a page wants of a job. The requests of the traffic are in a Trace.
Document = dict[str, Any]
Files = dict[str, str | bytes]
Send = Callable[[Document], None]

SLIDERS_S = 20.0  # The time limit of the simulations behind the sliders; a page waits for them.
# The files of a plan that `plan watch` reads; the last one is of traffic with prefixes or sessions only.
WATCHED_FILES = ("plan.yaml", "certificate.json", "requests.csv", "traffic.jsonl")
MOST_TENANTS = 20  # The table of tenants has at most this many rows; chosen by hand.
# The plan with which the process warms up: with 60 requests it takes a second or two. Before that the
# simulator may be compiled, which takes up to minutes: hence the long limit.
WARM_UP_REQUESTS, WARM_UP_LIMIT_S = 60, 600.0
# A study whose traces together have more requests than this is not used again, to limit memory.
MOST_REMEMBERED = 10_000_000
_REMEMBERED: dict[tuple[object, ...], Study] = {}
"""The study of the last traffic of this process, by its file, change time, size, reading and seed. It keeps
the trace and the simulations made with it.
"""


def run(kind: str, request: Request, send: Send = lambda _: None) -> tuple[Document, Files]:
    """Do one job of a kind in JOBS; `send` takes its messages.

    Returns document.json and the files of files.zip by name. Raises PlannerError for what the user can mend.
    """
    return JOBS[kind](request, send)


def _read_catalog(request: Request) -> Catalog:
    """The catalog in the folder that the request names, or the shipped one."""
    return read_catalog(Path(request["catalog"]) if request.get("catalog") else None)


def _summarise_traffic(request: Request, send: Send) -> tuple[Document, Files]:
    """Traffic before anything is planned: a summary of the trace, and charts of the requests to plan for,
    which may be a part of the trace at another rate.
    """
    send({"phase": "reading the traffic"})
    catalog, section = _read_catalog(request), request.get("traffic") or {}
    described = parse_description(Section(section, "slo.yaml: traffic"), catalog.tasks)
    if described is not None:
        described = fit_context(described, catalog.served_llm(request["llm"]).context_tokens)
    trace = spread_stamps(_read_requests(request, described, section), seed=request["seed"])
    send({"phase": f"describing {len(trace):,} requests"})
    traffic_request = RateRequest(None, window=section.get("window") or "whole")
    if described is None and section.get("rate") is not None:
        traffic_request = replace(
            traffic_request, rate_rps=section["rate"], scale=section.get("scale", "superpose")
        )
    planned = traffic_request.apply_to(trace, seed=request["seed"])
    rate_text = f"{show_digits(planned.rate_rps, 3)} requests/s" if planned.rate_rps else "no rate"
    pictures = [
        _picture(charts.rate_chart(planned), f"Requests per second as they are planned for: {rate_text}."),
        _picture(charts.lengths_chart(planned), "Lengths of prompts and of answers."),
    ]
    return summarise_trace(trace).as_dict() | {
        "charts": pictures,
        "tenant_rows": _tenant_rows(trace),
        "planned_rps": planned.rate_rps,
    }, {}


def _read_requests(request: Request, described: Description | None, traffic: Mapping[str, Any]) -> Trace:
    """The requests of the trace, read with the section `traffic`, or drawn from a description."""
    trace = None if described is not None else Path(request["trace"])
    return requests_of(
        trace, described, seed=request["seed"], log_options=log_options_of({"traffic": traffic})
    )


def _tenant_rows(trace: Trace) -> list[Document]:
    """The MOST_TENANTS tenants with the most tokens; empty where the trace names none."""
    if not trace.tenants:
        return []
    counts = np.bincount(trace.tenant, minlength=len(trace.tenants))
    tokens = np.bincount(trace.tenant, trace.input_tokens + trace.output_tokens, len(trace.tenants))
    largest = np.argsort(-tokens, kind="stable")[:MOST_TENANTS]
    return [
        {
            "tenant": trace.tenants[k],
            "requests": int(counts[k]),
            "share of tokens": float(tokens[k] / tokens.sum()),
        }
        for k in largest
    ]


def _plan_one_llm(request: Request, send: Send) -> tuple[Document, Files]:
    """A plan, as `plan --slo --trace -o` makes it. The fleet on paper is sent before that for production is
    found.
    """
    answer = _make_plan(request, send)
    send({"phase": "writing the report"})
    command = words.command_line(
        Path("slo.yaml"),
        Path(request["trace"]) if request["trace"] else None,
        Path(request["catalog"]) if request.get("catalog") else None,
        seed=request["seed"],
        time_limit_s=request["time_limit_s"],
    )
    rendered: Files = {
        **output.render(answer, command=command),
        "slo.yaml": checked_files.to_yaml(request["question"]),
    }
    return plan_document(answer), rendered


def _send_first_answer(send: Send) -> OnPaper:
    """A function for the search, which sends the fleet on paper before the one for production is found."""

    def send_fleet(problem: Problem, fleet: Fleet) -> None:
        slo, is_windowed = problem.slo, problem.slo.every_s is not None
        simulation = simulate(fleet, problem.trace, limits=slo.limits, record=is_windowed)
        paid = bill_fleet(fleet)
        message = f"{screen.buy_text(fleet, paid)}. {screen.basis_text(fleet)}"
        texts = [
            screen_page.verdict_heading(message, "h3"),
            screen_page.cards_html([screen.paper_card(fleet, paid, "not yet tested in scenarios")]),
        ]
        tables = {"fleet": rows.fleet_rows(fleet), "slo": rows.limit_rows(slo, judge_slo(simulation, slo))}
        send({"first": {"html": "\n".join(texts), "tables": tables}})

    return send_fleet


def _watch_search(send: Send) -> Watch:
    """A function for the search, which sends the numbers of its progress; its fleet is too large to send."""
    names = ("best", "bound", "simulations")
    return lambda progress: send({"search": {name: getattr(progress, name) for name in names}})


def _send_phase(send: Send) -> Progress:
    """A function for the progress of a job, which sends what is being done. The best fleet so far is left
    out, because the page shows it from the search's numbers.
    """
    return lambda message: send({"phase": phase_of(message)})


def _answer_what_if(request: Request, send: Send) -> tuple[Document, Files]:
    """The fleet that `plan` would find and its simulation, without the rest of a plan's evidence."""
    study = _study_of(request, send)
    task = parse_task(request["question"], study.catalog)
    if task.objective == "throughput":
        whole_plan = _make_plan(request, send)  # A study does not answer this objective.
        fleet, slo, trace = whole_plan.fleet, whole_plan.slo, whole_plan.trace
        simulation, verdict = whole_plan.simulation, whole_plan.verdict
    else:
        answer = study.answer(task)
        fleet, slo, trace = answer.fleet, answer.problem.slo, answer.problem.trace
        simulation, verdict = answer.problem.oracle.simulate_and_judge(fleet, record=True)
    return {
        "llm": fleet.llm.name,
        "answer": f"{words.describe_fleet(fleet)}: {bill_fleet(fleet).usd_per_h:,.2f} USD per hour",
        "fleet_text": words.describe_fleet(fleet),
        "workers": [
            {"max_num_batched_tokens": pool.type.max_num_batched_tokens} for pool in fleet.running_pools
        ],
        "cost_usd_per_h": bill_fleet(fleet).usd_per_h,
        "gpus": fleet.gpus,
        "power_w": fleet.power_w,
        "rate_rps": trace.rate_rps,
        "simulation": {"slo": {"holds": verdict.holds}},
        "curves": _curves(simulation, slo),
        "limits": [asdict(limit) for limit in slo.limits],
    }, {}


def _curves(simulation: Simulation, slo: Slo) -> Document:
    """The cumulative distribution of each metric that is drawn, of each class ("ttft of chat"), with its
    limits.
    """
    return {
        f"{metric}{class_text(limits)}": asdict(cumulative_curve(simulation, metric, limits))
        | {"metric": metric, "limits": [asdict(limit) for limit in limits]}
        for metric in fleet_comparison.CHARTED_METRICS
        for limits in limits_by_chart(slo.limits, metric).values()
    }


def _make_plan(request: Request, send: Send) -> Plan:
    """The plan for the question of the request; its phases and first answers are sent as they come."""
    study = _study_of(request, send)
    question = read_task(request["question"], study.catalog)
    return answer_question(question, study, watch=_watch_search(send), on_paper=_send_first_answer(send)).plan


def _find_sensitivity(request: Request, send: Send) -> tuple[Document, Files]:
    """Whether a plan holds with other steps, traffic and prices, and what each limit costs."""
    study = _study_of(request, send)
    before = study.answer(parse_task(request["question"], study.catalog))
    return {
        "changes": [
            what_if.change_document(changed, before)
            | {
                "more": what_if.difference_text(changed, before),
                "costs_the_same": what_if.costs_the_same(changed, before),
                "kept_in_search_only": changed.is_previous_cheaper,
                "fleet": "-" if changed.answer is None else what_if.fleet_text(changed.answer, before),
            }
            for changed in what_if.sensitivity(study, before)
        ]
    }, {}


def _study_of(request: Request, send: Send) -> Study:
    """The study of this traffic, with the simulations that earlier questions of this process have made."""
    catalog, path = _read_catalog(request), request["trace"]
    question = request["question"]
    described, log_options = parse_task(question, catalog).described, repr(log_options_of(question))
    file_key = () if path is None else (path, Path(path).stat().st_mtime_ns, Path(path).stat().st_size)
    traffic_key = (*file_key, log_options, repr(described), request["seed"])
    study = _REMEMBERED.get(traffic_key)
    if study is None or study.catalog != catalog or study.cached_requests > MOST_REMEMBERED:
        send({"phase": "reading the traffic"})
        study = Study(
            _read_requests(request, described, question.get("traffic") or {}), catalog, request["seed"]
        )
        _REMEMBERED.clear()  # Only the last traffic is kept, as its simulations take memory.
        _REMEMBERED[traffic_key] = study
    return replace(study, time_limit_s=request["time_limit_s"], progress=_send_phase(send))


def _simulate_sliders(request: Request, send: Send) -> tuple[Document, Files]:
    """A plan's fleet and its neighbours under more and less of everything, for the sliders beside it, with
    the fields of `sliders.Sliders` and the factors of that module.
    """
    study = _study_of(request, send)
    task = parse_task(request["question"], study.catalog)
    fleet = read_as("plan.yaml", request["fleet"].encode(), lambda path: read_fleet(path, study.catalog))
    task = replace(task, rate_rps=request["rate_rps"]) if task.objective == "throughput" else task
    if task.slowdowns is not None:
        raise InputError("limits: are relative to a reference worker; sliders take limits in seconds")
    trace = requested_traffic(study.trace, task, seed=study.seed)[0]
    send({"phase": "simulating the plan under more and less traffic"})
    verdicts = sliders.simulate_neighbours(fleet, trace, task.slo, time_limit_s=SLIDERS_S)
    return {
        "traffic": sliders.TRAFFIC,
        "steps": sliders.STEPS,
        "loosened": sliders.LIMITS,
        "plan": verdicts.plan,
        "rate_rps": verdicts.rate_rps,
        "limits": verdicts.limits,
        "wanted": verdicts.wanted_frac,
        "is_whole": verdicts.is_whole,
        "sizes": [
            {
                "text": each.text,
                "usd_per_h": round(each.usd_per_h, 6),
                "kept": np.round(np.nan_to_num(each.kept_frac, nan=-1.0), 5).tolist(),
                "holds": each.holds.astype(int).tolist(),
            }
            for each in verdicts.sizes
        ],
    }, {}


def _plan_several_llms(request: Request, send: Send) -> tuple[Document, Files]:
    """Plans for several LLMs on one stock, as `plan --slo` with `llms:` makes them."""
    catalog, several, traces = _read_catalog(request), request["question"], request["traces"]
    # The question names traces by their file names; here they get the paths in the store.
    # Described traffic has no trace.
    entries = {
        name: entry | ({"trace": traces[name]} if name in traces else {})
        for name, entry in several["llms"].items()
    }
    send({"phase": "reading the traces"})
    text = checked_files.to_yaml({**several, "llms": entries}).encode()
    question = read_as(
        "slo.yaml", text, lambda path: read_question(path, None, catalog, seed=request["seed"])
    )
    result = plan(
        question,
        catalog=catalog,
        seed=request["seed"],
        time_limit_s=request["time_limit_s"],
        progress=_send_phase(send),
    )
    assert isinstance(result, SharedPlanResult)
    shared = result.shared
    send({"phase": "writing the reports"})
    folder = Path(request["catalog"]) if request.get("catalog") else None
    command = words.command_line(
        Path("slo.yaml"), None, folder, seed=request["seed"], time_limit_s=request["time_limit_s"]
    )
    document = several_llms_report.plan_document(shared) | {
        "answer": several_llms_report.answer_sentence(shared),
        "screen": {
            "html": shared_screen.screen_parts_html(shared, "h3"),
            "charts": _pictures(shared_screen.screen_figures(shared)),
        },
        "proof": several_llms_report.proof_lines(shared),
        "binding_lines": several_llms_report.binding_lines(shared),
        "assumptions": fact_sentences_of(shared.assumptions),
        "tables": {
            "fleets": several_llms_report.fleet_rows(shared),
            "answers": several_llms_report.answer_rows(shared),
            "limits": several_llms_report.limit_rows(shared),
            "nodes": several_llms_report.node_rows(shared),
        },
        "plans": {name: plan_document(llm_plan) for name, llm_plan in shared.plans.items()},
    }
    return document, {
        **several_llms_report.render(shared, command=command),
        "slo.yaml": checked_files.to_yaml(several),
    }


def plan_document(plan: Plan) -> Document:
    """What the pages show of a plan."""
    return output.to_json(plan) | {
        "answer": words.answer_sentence(plan),
        "fleet_text": words.describe_fleet(plan.fleet),
        "screen": _first_screen(plan),
        "workers_line": words.policies_line(plan.fleet),
        "measured_line": words.measured_line(plan),
        "proof": [*answer_sentences.scenario_lines(plan), *words.proof_lines(plan)],
        "tables": {
            "answers": answer_sentences.answer_rows(plan),
            "fleet": rows.fleet_rows(plan.fleet),
            "slo": rows.slo_rows(plan),
            "percentiles": rows.percentile_rows(plan),
            "alternatives": rows.alternative_rows(plan),
            "neighbours": rows.neighbour_rows(plan),
        },
        "binding_lines": words.binding_lines(plan),
        "charts": _pictures(figures.running_figures(plan)),
        "alternatives_charts": _pictures(figures.alternative_figures(plan)),
        "curves": _curves(plan.simulation, plan.slo),
        "limits": [asdict(limit) for limit in plan.slo.limits],
        "rate_rps": plan.trace.rate_rps,
        "requested_rps": plan.requested_rps,
    }


def _first_screen(plan: Plan) -> Document:
    """The first screen of the report, its charts apart: these are drawn as all charts of the pages are."""
    texts = [
        screen_page.verdict_heading(screen.verdict_text(plan, screen.BY_PAGE), "h3"),
        screen_page.key_figures_html(screen.key_figures(plan, screen.BY_PAGE)),
        screen_page.cards_html(screen.answer_cards(plan)),
    ]
    return {"html": "\n".join(texts), "charts": _pictures(screen_charts.screen_figures(plan))}


def _compare(request: Request, send: Send) -> tuple[Document, Files]:
    """Fleets of saved plans on the same requests, as `plan compare` does."""
    catalog = _read_catalog(request)
    task = parse_task(request["question"], catalog)
    trace = _read_requests(request, task.described, request["question"].get("traffic") or {})
    fleets = [
        (name, read_as("plan.yaml", text.encode(), lambda path: read_fleet(path, catalog)))
        for name, text in request["fleets"].items()
    ]
    send({"phase": f"simulating {len(trace):,} requests on {len(fleets)} fleets"})
    slo = None if task.slowdowns is not None else task.slo
    traffic = RateRequest(task.rate_rps, task.scale, task.window or "whole")
    comparison = simulating.compare(
        fleets, trace, slo, traffic=traffic, catalog=catalog, seed=request["seed"]
    ).comparison
    document = {
        "verdict": fleet_comparison.comparison_summary(comparison),
        "notes": comparison.notes,
        "table": (
            ("", *(row.variant.name for row in comparison.rows)),
            [(label, *cells) for label, cells in fleet_comparison.comparison_lines(comparison)],
        ),
        "charts": _pictures(fleet_comparison.draw_latencies(comparison)),
    }
    return document, dict(fleet_comparison.render_comparison(comparison))


def _find_frontier(request: Request, send: Send) -> tuple[Document, Files]:
    """What each tightening of a limit costs, as `plan pareto` says it."""
    study = _study_of(request, send)
    task = parse_task(request["question"], study.catalog)
    frontier = pareto_frontier.find_frontier(study, task, request["over"], points=request["points"])
    document = pareto_frontier.frontier_document(frontier)
    caption = (
        f"{frontier.objective} over {frontier.axis}: a dot where each fleet stops holding; {frontier.ended}."
    )
    return document | {"charts": [_picture(pareto_page.draw_frontier(frontier), caption)]}, {}


def _schedule(request: Request, send: Send) -> tuple[Document, Files]:
    """Workers per window, as `plan schedule` answers it; but nothing is simulated."""
    market, window_s = read_market(request["market"]), request["window_s"]
    input_files: Files = {"schedule.yaml": checked_files.to_yaml(request["market"])}
    paths = request.get("traces") or {}
    traces = {llm: read_trace(path, seed=request["seed"]) for llm, path in paths.items()}
    if traces:
        demand = markets.demand_of(traces, window_s=window_s)
    else:
        text = request["demand"].encode()
        demand = read_as(
            request["demand_name"], text, lambda path: markets.read_demand(path, window_s=window_s)
        )
        input_files["demand.csv"] = text
    send({"phase": f"scheduling {demand.rate_rps.shape[1]} windows"})
    scheduled = schedule(market, demand, gap_frac=request["gap_frac"], time_limit_s=request["time_limit_s"])
    why = not_simulated(scheduled.answer, traces) or "this page does not simulate; `plan schedule` does"
    answer = replace(scheduled.answer, not_simulated=why)
    send({"phase": "drawing the charts"})
    document = schedules.to_json(answer) | {
        "answer": schedules.cost_sentence(answer),
        "proof": schedules.proof_line(answer),
        "compared_lines": [*schedules.compared_lines(answer), *schedules.simulated_lines(answer)],
        "firm": schedules.SPOT_NOTE,
        "tables": {"gpus": schedules.gpu_rows(answer), "workers": schedules.worker_rows(answer)},
        "charts": _pictures(schedules.schedule_figures(answer)),
    }
    return document, {**schedules.render(answer), **input_files}


def _run_day(request: Request, send: Send) -> tuple[Document, Files]:
    """A day of traffic under controllers, as `plan day` answers it."""
    question = request["question"]
    input_files: Files = {"slo.yaml": checked_files.to_yaml(question)}
    standing = None  # The fleet that stands all day.
    if text := request.get("fleet"):
        catalog = _read_catalog(request)
        standing = read_as("plan.yaml", text.encode(), lambda path: read_fleet(path, catalog))
        input_files["plan.yaml"] = text
    send({"phase": "reading the traffic"})
    described = parse_task(question, _read_catalog(request)).described
    trace = _read_requests(request, described, question.get("traffic") or {})
    day_result = day(
        question,
        trace,
        standing=standing,
        catalog=request.get("catalog"),
        seed=request["seed"],
        time_limit_s=request["time_limit_s"],
        progress=_send_phase(send),
    )
    if not isinstance(day_result, DayResult):
        raise InputError("slo.yaml: llms: this page takes one LLM; ask `plan day` for all of them")
    answer = day_result.answer
    send({"phase": "drawing the charts"})
    document = day_page.to_json(answer) | {
        "answer": day_page.recommendation_sentence(answer),
        "proof": day_page.proof_lines(answer),
        "warnings": [*trace.warnings, *answer.warnings],
        "tables": {
            "controllers": day_page.day_table(answer),
            "fleets": (day_page.FLEETS_HEAD, day_page.fleet_rows(answer)),
            "causes": (day_causes.CAUSE_COLUMNS, day_causes.cause_rows(answer, answer.rows)),
        },
        "charts": _pictures(day_page.draw_day(answer)),
        "missed_lines": day_page.missed_lines(answer.winner),
        "settings_lines": day_page.settings_lines(answer),
        "basis_lines": day_page.basis_lines(answer),
    }
    optimum = answer.optimum
    if optimum is not None and optimum.bound_usd < optimum.usd * (1 - SAME_FRAC):
        document["status"] = "best found"  # More time may give a cheaper day, so the job may run again.
    manifests = day_manifests.controller_manifests(answer)
    return document, {**day_page.render_day(answer), **manifests, **input_files}


def _study_prefixes(request: Request, send: Send) -> tuple[Document, Files]:
    """What prompts share and where to keep it, as `plan prefixes` says it; and who sends how much."""
    send({"phase": "reading the prefixes"})
    trace = spread_stamps(_read_requests(request, None, request.get("traffic") or {}), seed=request["seed"])
    fleet = None
    if request.get("fleet"):
        catalog = _read_catalog(request)
        fleet = read_as("plan.yaml", request["fleet"].encode(), lambda path: read_fleet(path, catalog))
    study = prefix_study.study_prefixes(
        trace,
        fleet,
        pool=request["pool"],
        seed=request["seed"],
        time_limit_s=request["time_limit_s"],
        progress=_send_phase(send),
    )
    document = prefix_study.prefix_document(study)
    summary = document["trace"]
    hits = {int(size): frac for size, frac in summary["hit_frac"].items()}
    chart = charts.hits_chart(hits, summary["infinite_hit_frac"])
    return document | {
        "charts": [_picture(chart, "What one LRU cache for all requests spares.")],
        "tenant_rows": _tenant_rows(trace),
    }, prefix_study.render_prefixes(study)


def _watch(request: Request, send: Send) -> tuple[Document, Files]:
    """One look at live metrics, held against the files of a plan, as `plan watch --once` does."""
    send({"phase": "reading the plan"})
    with TemporaryDirectory() as folder, zipfile.ZipFile(request["plan"]) as packed:
        for name in set(WATCHED_FILES).intersection(packed.namelist()):
            packed.extract(name, folder)
        send({"phase": "looking at the metrics"})
        result = watch_api.watch(
            folder,
            request["places"],
            request["question"] if request["replans"] else None,
            window=request["window"],
            step=request["step"],
            model=request["model"],
            match=request["match"],
            catalog=_read_catalog(request),
        )
    return result.to_dict() | {"headline": result.headline(), "sentences": result.sentences()}, {}


JOBS: dict[str, Callable[[Request, Send], tuple[Document, Files]]] = {
    "trace": _summarise_traffic,
    "plan": _plan_one_llm,
    "together": _plan_several_llms,
    "what_if": _answer_what_if,
    "sensitivity": _find_sensitivity,
    "sliders": _simulate_sliders,
    "compare": _compare,
    "pareto": _find_frontier,
    "schedule": _schedule,
    "day": _run_day,
    "prefixes": _study_prefixes,
    "watch": _watch,
}


def _picture(chart: Any, caption: str) -> Document:
    """A chart as the pages draw it."""
    return {"spec": drawing.live_spec(chart), "caption": caption}


def _pictures(drawn: Iterable[drawing.CaptionedChart]) -> list[Document]:
    """Charts with their captions as the pages draw them."""
    return [_picture(figure.chart, figure.caption) for figure in drawn]


def _plain_values(value: Any) -> Any:
    """Values of NumPy as Python's own, for json.dumps; TypeError for any other value."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _warm_up() -> None:
    """Plan some requests of the sample, so that simulator and solver are loaded before the first job."""
    catalog = read_catalog()
    examples = checked_files.repository_dir("examples")
    task = replace(parse_task(checked_files.read_yaml(examples / "slo.yaml"), catalog), rate_rps=None)
    trace = read_trace(examples / "traces" / "azure-conversation-sample.csv")
    few = trace.select(np.arange(WARM_UP_REQUESTS))
    small_plan = certify.plan(task, few, catalog, time_limit_s=WARM_UP_LIMIT_S)
    output.render(small_plan)
    plan_document(small_plan)


def main() -> None:
    """Do the jobs that come over stdin, one after the other, until stdin ends."""
    # Answers go to a copy of stdout. Then stdout itself becomes stderr, so that what libraries print there
    # does not get among the answers.
    answers_to = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with answers_to as answers, debug_mode(False):  # Altair need not check every point of our charts.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        lock = threading.Lock()

        def send(message: Document) -> None:
            with lock:
                answers.write(json.dumps(message, default=_plain_values) + "\n")

        jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
        # A job that is already there does not wait for the warm-up.
        if jobs.empty():
            with contextlib.suppress(Exception):  # A failed warm-up only makes the first job slower.
                _warm_up()
        while True:
            job = json.loads(jobs.get())
            try:
                document, files = run(job["kind"], job["request"], send)
                (Path(job["folder"]) / "files.zip").write_bytes(zip_files(files))
                (Path(job["folder"]) / "document.json").write_text(
                    json.dumps(document, default=_plain_values)
                )
                send({"done": True})
            except PlannerError as error:
                send({"error": error_line(error), "guess": getattr(error, "guess", "")})
            except Exception:
                send({"crash": traceback.format_exc()})


def _listen(jobs: queue.SimpleQueue[str]) -> None:
    """Put every line of stdin into `jobs`; end this process when stdin ends."""
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)  # The app has ended, so no work is left to finish.


if __name__ == "__main__":
    main()
