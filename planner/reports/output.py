"""A plan as files: plan.yaml, certificate.json, requests.csv, report.html and manifests/.

Equal plans that were made on one day and by one version (`Plan.made`) give equal bytes: no file has the time
that planning took. Numbers are rounded to ten significant digits, in requests.csv to nine. The fleet in
plan.yaml and the column `arrival_s` have all digits, because they are simulated again.
"""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from planner import domain, manifests
from planner.documents.certificate import certificate_document, fact_document, facts_document
from planner.documents.engine_file import engine_document
from planner.documents.fits import latency_document
from planner.documents.fleet_file import fleet_document
from planner.documents.gpu_payment import KEYS as PAID_KEYS
from planner.documents.slo import slo_document
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.files.column_files import release_memory
from planner.fleet import Fleet
from planner.manifests.engine_command import engine_image, engine_version, why_undeployable
from planner.reports import figures
from planner.reports.curves import counted_mean_and_percentiles, mean_and_percentiles, statistics_of
from planner.reports.drawing import CaptionedChart, chart_png
from planner.reports.fact_sentences import fact_sentence, fact_sentences_of, prices_text
from planner.reports.prefix_values import pool_document, warm_up_json
from planner.reports.report import render_report, simulate_command, traffic_name
from planner.reports.rows import simulated_routers
from planner.reports.screen import growth_frac_of, targets_text
from planner.reports.words import alternative_note
from planner.search.evidence.plan import Plan
from planner.search.problem.bill import Bill
from planner.simulator.energy import ExpectedPower
from planner.simulator.layout import FINISHED
from planner.simulator.measured_values import measured_mask, values_where
from planner.simulator.recorded_gaps import gaps_s
from planner.simulator.service_shares import tenant_shares
from planner.simulator.simulation import STATUS, Simulation
from planner.simulator.slo_verdict import Verdict, WindowResult
from planner.simulator.tenant_service import tenant_service
from planner.slo_metrics import METRICS
from planner.solvers.placement import NodePlacement
from planner.traffic.described import Description, WrittenDescription
from planner.traffic.trace_writing import to_jsonl
from planner.units import count_text

Document = dict[str, Any]

CSV_COLUMNS = (
    "request_id",
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "prefill_worker",
    "decode_worker",
    "queue_s",
    "ttft_s",
    "tpot_s",
    "tbt_max_s",
    "e2e_s",
    "preemptions",
    "status",
)
BEST_SO_FAR = "best-so-far.yaml"  # The best plan of a search that was interrupted.
NAMES = ("plan.yaml", "certificate.json", "requests.csv", "report.html")  # Files that every plan has.
# Files of an earlier plan in the same folder, which are removed unless the new plan writes them.
OUTDATED = (
    BEST_SO_FAR,
    "report.html",  # An interrupted search does not write it.
    "warm-up.json",
    "traffic.jsonl",
    *(f"charts/{name}.png" for name in figures.NAMES),
    *(f"manifests/{name}" for names in manifests.OUTDATED.values() for name in names),
)
# `%r` writes all digits of the arrival time.
_CSV_ROW = "%d,%r,%d,%d,%d,%s,%s,%.9g,%.9g,%.9g,%.9g,%.9g,%d,%s"
_CSV_CHUNK = 50_000  # Rows made at once, which bounds the memory of a long trace.


def render(plan: Plan, *, command: str = "", pages: bool = True) -> dict[str, str]:
    """Everything `plan -o DIR` writes: path relative to DIR -> content. `command` is the command line that
    made the plan. Without `pages` report.html is left out.
    """
    deployments = _render_manifests(plan).files
    prompts = [prompt for pool in plan.prefixes for prompt in pool.warm_up]
    requests = {}
    if traffic_name(plan) == "traffic.jsonl":
        with_llm = any(each.llms for each in plan.slo.selectors)
        # The simulation drew the adapters of a trace that names none.
        trace = dataclasses.replace(
            plan.trace, adapter=plan.simulation.adapter, adapters=plan.simulation.adapters
        )
        requests["traffic.jsonl"] = to_jsonl(trace, with_llm=with_llm)
    return {
        "plan.yaml": plan_yaml(plan),
        "certificate.json": certificate_json(plan, command=command),
        "requests.csv": requests_csv(plan.simulation),
        **({"report.html": render_report(plan, command=command)} if pages else {}),
        **({"warm-up.json": warm_up_json(prompts)} if prompts else {}),
        **requests,
        **{f"manifests/{path}": text for path, text in deployments.items()},
    }


def _render_manifests(plan: Plan) -> manifests.Rendered:
    """The manifests of the planned target; of all targets if there is none, or if it cannot express the fleet
    (a warning of the plan then says so).
    """
    routers = simulated_routers(plan)
    render_for = partial(manifests.render, plan.fleet, plan.max_model_len, router_rows=routers)
    try:
        return render_for(target=plan.certificate.deploy or "all")
    except InputError:
        return render_for(target="all")


def chart_pictures(charts: Iterable[CaptionedChart]) -> dict[str, bytes]:
    """Every chart as a PNG with its caption: path -> content."""
    return {f"charts/{chart.name}.png": chart_png(chart) for chart in charts}


def plan_yaml(plan: Plan) -> str:
    """plan.yaml, for people and for `plan simulate --fleet plan.yaml`, which reads its fleet."""
    fleet = plan.fleet
    targets = targets_text(plan)
    header = (
        f"# {plan.status}: {count_text(fleet.workers, 'worker')}, {count_text(fleet.gpus, 'GPU')}, "
        f"{plan.bill.usd_per_h:.2f} USD/h.\n"
        + (f"# {targets}\n" if targets else "")
        + f"# Check it:  {simulate_command(plan)} --slo SLO.YAML\n"
    )
    guarantees = guarantee_rows(plan.verdict)
    document: Document = {
        **_totals_document(plan),
        "objective": _objective_document(plan),
        **_production_document(plan),
        "slo": slo_document(plan.slo),
        "simulated": _slo_lines(plan.verdict),
        **_attainment(plan),
        **({"simulated_tenants": guarantees} if guarantees else {}),
        "traffic": _traffic_summary(plan),
        "max_model_len": plan.max_model_len,
        "engine": _engine_document(fleet),
        "latency": [
            {"worker": pool.name, "basis": pool.type.latency.basis, "mape_frac": pool.type.latency.mape_frac}
            for pool in fleet.running_pools
        ],
        "prices_note": prices_text(plan.prices),
        "placement": placement_document(plan.placement),
        **_prefixes_document(plan),
        **_routers_document(plan),
    }
    # `fleet_document` also has an `engine`, without images, and without a version if the fleet has no engine.
    # The last operand restores the `engine` of `document`, at the same place among the keys.
    return header + to_yaml(
        plain_value(document) | fleet_document(fleet) | {"engine": plain_value(_engine_document(fleet))}
    )


def _objective_document(plan: Plan) -> Document:
    """The objective, its values for the deployed fleet and the fleet on paper, and its bound. There is no
    bound on the most traffic.
    """
    certificate, most = plan.certificate, plan.throughput
    if most is not None:  # The certificate is about the cost of the fleet at this rate.
        name, unit, value, bound = "throughput", "requests/s", most.rate_rps, None
        on_paper = most.rate_rps if most.on_paper_rps is None else most.on_paper_rps
    else:
        name, unit, value, bound = certificate.objective, certificate.unit, plan.value, certificate.bound
        on_paper = certificate.value
    return {"name": name, "unit": unit, "value": value, "on_paper": on_paper, "bound": bound}


def _traffic_summary(plan: Plan) -> Document:
    """The `traffic` that plan.yaml and certificate.json share."""
    trace = plan.trace
    return {
        "trace": trace.name,
        "note": plan.traffic_note,
        "requests": len(trace),
        "duration_s": trace.duration_s,
        "rate_rps": trace.rate_rps,
        **({} if plan.requested_rps is None else {"requested_rps": plan.requested_rps}),
    }


def _described_document(plan: Plan) -> Document:
    """The keys of described traffic that a later report needs; empty for a trace."""
    described = plan.trace.drawn_from
    if not isinstance(described, Description | WrittenDescription):
        return {}
    return {"described": {"agent_count": described.agent_count}}


def bill_document(bill: Bill) -> Document:
    """The bill as keys and values: `usd_per_h` is for whole nodes, `by_gpu_usd_per_h` only for the GPUs in
    use. Both include `electricity_usd_per_h`, at provisioned power.
    """
    return {
        "usd_per_h": bill.usd_per_h,
        "by_gpu_usd_per_h": bill.by_gpu_usd_per_h,
        "owned_gpus": bill.owned_gpus,
        "rented_gpus": bill.rented_gpus,
        "idle_gpus": bill.idle_gpus,
        "electricity_usd_per_h": bill.electricity_usd_per_h,
        "expected_electricity_usd_per_h": bill.expected_electricity_usd_per_h,
        "whole_nodes": [dataclasses.asdict(each) for each in bill.nodes],
    }


def _per_million_document(plan: Plan) -> Document:
    """USD per million tokens of the plan's traffic: prompts and answers, and answers alone."""
    return {"tokens": plan.usd_per_million_tokens, "output_tokens": plan.usd_per_million_output_tokens}


def _production_document(plan: Plan) -> Document:
    """The number of scenarios in which the fleet keeps the SLO, and the scenarios' growth of traffic. Empty
    for a plan on paper.
    """
    if (kept_in := plan.kept_in) is None:
        return {}
    growth_frac = growth_frac_of(plan)
    return {
        "production": {"kept": kept_in.kept, "scenarios": kept_in.scenario_count, "growth_frac": growth_frac}
    }


def _agents_document(plan: Plan) -> Document:
    """Agents that the fleet carries, tasks per hour, USD per task; empty for traffic without tasks."""
    agents = plan.agent_figures
    return {} if agents is None else {"agents": dataclasses.asdict(agents)}


def _throughput_document(plan: Plan) -> Document:
    """The most traffic, for the objective throughput; empty for other objectives."""
    return {} if plan.throughput is None else {"throughput": dataclasses.asdict(plan.throughput)}


def _totals_document(plan: Plan) -> Document:
    """The fleet's totals, with which plan.yaml and `--json` begin."""
    return {
        "status": plan.status,
        "llm": plan.fleet.llm.name,
        "cost_usd_per_h": plan.bill.usd_per_h,
        "bill": bill_document(plan.bill),
        "power_w": plan.fleet.power_w,
        "power": power_document(plan.power),
        "gpus": plan.fleet.gpus,
        "usd_per_million": _per_million_document(plan),
        **_agents_document(plan),
        **_throughput_document(plan),
    }


def _prefixes_document(plan: Plan) -> Document:
    """The prefixes of each pool; empty without prefix caches."""
    return {"prefixes": [pool_document(prefixes) for prefixes in plan.prefixes]} if plan.prefixes else {}


def _routers_document(plan: Plan) -> Document:
    """The router of each target, and whether the SLO is kept under it; `plan manifests` reads these rows."""
    rows = [row._asdict() for row in simulated_routers(plan)]
    target = plan.certificate.deploy
    for_targets = [
        {"targets": list(each.targets), "status": each.status, "usd_per_h": each.usd_per_h}
        for each in plan.certificate.for_targets
    ]
    return {
        **({} if target is None else {"deploy": {"target": target}}),
        **({"routers": rows} if rows else {}),
        **({"for_targets": for_targets} if for_targets else {}),
    }


def placement_document(placement: NodePlacement | None) -> Document | None:
    """Which workers share nodes, and a lower bound on the nodes of any placement (`fewest_nodes`)."""
    if placement is None:
        return None
    return {
        "nodes": {node.name: [str(part) for part in node.parts] for node in placement.nodes},
        "fewest_nodes": placement.bound,
        "is_optimal": placement.is_optimal,
        "cross_node_kv_frac": placement.cross_frac,
    }


def power_document(power: ExpectedPower | None) -> Document | None:
    """Watts of the fleet's GPUs, and Joules per request and per 1000 output tokens, in the measured window;
    None if no steps were recorded.
    """
    if power is None:
        return None
    return _plain_document(
        {
            "provisioned_w": power.provisioned_w,
            "expected_w": power.mean_w,
            "expected_idle_w": power.idle_w,
            "request_j": power.request_j,
            "thousand_output_tokens_j": power.thousand_tokens_j,
            "basis": power.basis,
        }
    )


def _engine_document(fleet: Fleet) -> Document:
    """The deployed engine, with the constants of its simulation, if any."""
    engine: Document = {} if fleet.engine is None else engine_document(fleet.engine)
    if why_undeployable(fleet):  # Without manifests there are no version and no images to name.
        return engine or {"name": "vllm"}
    images = sorted({engine_image(pool.type) for pool in fleet.running_pools})
    return {"name": "vllm", "version": engine_version(fleet), **engine, "images": images}


def certificate_json(plan: Plan, *, command: str = "") -> str:
    """certificate.json: results, proofs, the fleets that were searched, and assumptions."""
    trace, simulation = plan.trace, plan.simulation
    document = {
        "status": plan.status,
        "certificate": certificate_document(plan.certificate, fact_sentence),
        "facts": _facts(plan),
        "fleet": _fleet_summary(plan.fleet),
        "power": power_document(plan.power),
        "usd_per_million": _per_million_document(plan),
        **_agents_document(plan),
        **_throughput_document(plan),
        "placement": placement_document(plan.placement),
        **_prefixes_document(plan),
        "slo": slo_document(plan.slo),
        "simulated": verdict_document(plan.verdict),
        "alternatives": _alternatives(plan),
        "traffic": {
            **_traffic_summary(plan),
            **_described_document(plan),
            "dropped": trace.dropped,
            "notes": trace.notes,
            "measured_window_s": simulation.window_s,
        },
        "latency": {pool.name: latency_document(pool.type.latency) for pool in plan.fleet.running_pools},
        "prices": prices_text(plan.prices),
        "warnings": fact_sentences_of(plan.warnings),
        "engine": {
            key: value for key, value in _engine_document(plan.fleet).items() if key in ("name", "version")
        },
        "max_model_len": plan.max_model_len,
        "command": command,
        "made": None if plan.made is None else dataclasses.asdict(plan.made),
    }
    return as_json(document)


def to_json(plan: Plan) -> Document:
    """The output of `plan --json`: one object of plain values."""
    return _plain_document(
        {
            **_totals_document(plan),
            "placement": placement_document(plan.placement),
            **_prefixes_document(plan),
            **_fleet_summary(plan.fleet),
            "slo": slo_document(plan.slo),
            "certificate": certificate_document(plan.certificate, fact_sentence),
            "facts": _facts(plan),
            "alternatives": _alternatives(plan),
            "traffic": plan.traffic_note,
            "prices": prices_text(plan.prices),
            "warnings": fact_sentences_of(plan.warnings),
            "max_model_len": plan.max_model_len,
            "simulation": simulation_summary(plan.simulation, plan.verdict),
        }
    )


def simulation_summary(simulation: Simulation, verdict: Verdict | None = None) -> Document:
    """The output of `plan simulate --json`.

    Percentiles are over the requests of the measured window. A request that never got its first (or last)
    token counts in percentiles as infinite (written as null), and is left out of the mean. `tbt_s` is null
    unless the simulation recorded its steps (`record=True` of replay.simulate) or counted its gaps.
    """
    inside = measured_mask(simulation)
    finished = simulation.status == FINISHED
    # From the first arrival to the end of the run.
    span_s = simulation.end_s - float(simulation.arrival_s[0])
    output_tokens = float(simulation.output_tokens.sum(where=finished))
    input_tokens = float(simulation.input_tokens.sum(where=finished))
    # Columns of a long trace are mapped from a file; this frees the pages that the sums above have read.
    for column in (simulation.output_tokens, simulation.input_tokens):
        release_memory(column)

    def per_second(amount: float) -> float | None:
        """An amount of the whole run per second; None for a run without duration."""
        return amount / span_s if span_s > 0 else None

    document: Document = {
        "requests": len(simulation.arrival_s),
        "measured_requests": int(inside.sum()),
        "window_s": simulation.window_s,
        "end_s": simulation.end_s,
        "complete": simulation.complete,
        # How many requests ended in each status.
        **{name: int((simulation.status == number).sum()) for number, name in enumerate(STATUS)},
        "preemptions": int(simulation.preemptions.sum()),
        "queue_s": mean_and_percentiles(values_where(simulation.queue_s, inside)),
        **{
            f"{key}_s": _gap_spread(simulation) if row.is_of_gaps else statistics_of(row, simulation, inside)
            for key, row in METRICS.items()
        },
        "requests_per_s": per_second(int(finished.sum())),
        "input_tokens_per_s": per_second(input_tokens),
        "output_tokens_per_s": per_second(output_tokens),
        "token_hit_frac": simulation.token_hit_frac,
        "token_reload_frac": simulation.token_reload_frac,
        "token_disk_frac": simulation.token_disk_frac,
        "reload_s": float(simulation.reload_s.sum()) if len(simulation.reload_s) else None,
        "tenants": _tenants(simulation) if len(simulation.tenants) > 1 else None,
        "slo": verdict_document(verdict) if verdict is not None else None,
        "workers": [
            {
                "name": name,
                "busy_frac": per_second(simulation.worker_busy_s[w]),
                "steps": simulation.worker_steps[w],
                "tokens": simulation.worker_tokens[w],
            }
            for w, name in enumerate(simulation.worker_names)
        ],
    }
    return _plain_document(document)


def _gap_spread(simulation: Simulation) -> dict[str, float] | None:
    """Mean and percentiles of the gaps between tokens; None if the simulation recorded no steps."""
    if simulation.gaps is not None:  # A long simulation counts its gaps instead of recording all steps.
        return counted_mean_and_percentiles(simulation.gaps)
    return mean_and_percentiles(*gaps_s(simulation)) if len(simulation.runs) else None


def _tenants(simulation: Simulation) -> Document:
    """The service of each tenant, and how equal it is."""
    service = tenant_service(simulation)
    shares = tenant_shares(simulation, domain.SERVICE_WINDOW_S)
    inside = measured_mask(simulation)
    return {
        "service_window_s": service.window_s,
        "jain_index": service.jain_index,
        "each": [
            {
                "tenant": name,
                "weight": simulation.tenant_weights[tenant],
                "requests": int((simulation.tenant == tenant).sum()),
                "service_tokens_per_s": service.tokens_per_s[tenant],
                "least_share_frac": shares[tenant].share_frac,
                "ttft_s": mean_and_percentiles(simulation.ttft_s[inside & (simulation.tenant == tenant)]),
                "e2e_s": mean_and_percentiles(simulation.e2e_s[inside & (simulation.tenant == tenant)]),
            }
            for tenant, name in enumerate(simulation.tenants)
        ],
    }


def requests_csv(simulation: Simulation) -> str:
    """One row per request, by arrival; a time is empty if the request did not get so far. `arrival_s` has all
    digits, so that the file can be simulated again. Tokens of images, tenants and adapters have columns if
    the trace has them.
    """

    def csv_names(names: Iterable[str]) -> list[str]:
        """The names as CSV needs them, and at the end, for the index -1, none."""
        return [*map(_csv_field, names), ""]

    names = csv_names(simulation.worker_names)
    cached = (
        np.zeros_like(simulation.status) if simulation.cached_tokens is None else simulation.cached_tokens
    )
    order = np.argsort(simulation.arrival_s, kind="stable")
    images = simulation.image_tokens
    text_tokens = simulation.input_tokens if images is None else simulation.input_tokens - images
    further = {} if images is None else {"image_tokens": images}
    named = {
        column: (index, csv_names(names))
        for column, index, names in (
            ("tenant", simulation.tenant, simulation.tenants),
            ("adapter", simulation.adapter, simulation.adapters),
        )
        if names
    }
    row_format = _CSV_ROW + ",%s" * (len(further) + len(named)) + "\n"
    parts = [",".join((*CSV_COLUMNS, *further, *named)) + "\n"]
    for start in range(0, len(order), _CSV_CHUNK):
        rows = order[start : start + _CSV_CHUNK]
        columns = (
            simulation.arrival_s[rows].tolist(),
            text_tokens[rows].tolist(),
            simulation.output_tokens[rows].tolist(),
            cached[rows].tolist(),
            [names[w] for w in simulation.prefill_worker[rows].tolist()],
            [names[w] for w in simulation.decode_worker[rows].tolist()],
            *(
                values_s[rows].tolist()
                for values_s in (
                    simulation.queue_s,
                    simulation.ttft_s,
                    simulation.tpot_s,
                    simulation.tbt_max_s,
                    simulation.e2e_s,
                )
            ),
            simulation.preemptions[rows].tolist(),
            [STATUS[status] for status in simulation.status[rows].tolist()],
            *(values[rows].tolist() for values in further.values()),
            *([of[k] for k in index[rows].tolist()] for index, of in named.values()),
        )
        ids = range(start, start + len(columns[0]))
        text = "".join([row_format % row for row in zip(ids, *columns, strict=True)])
        # Adjacent "nan" share a comma, so the first pass misses every second of them.
        parts.append(text.replace(",nan,", ",,").replace(",nan,", ",,"))
    return "".join(parts)


def _csv_field(text: str) -> str:
    """The text with quotes where CSV needs them."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([text])
    return line.getvalue()


def _facts(plan: Plan) -> Document:
    """The facts behind all sentences, as values."""
    certificate = plan.certificate
    return facts_document(
        binding=certificate.binding,
        assumptions=certificate.assumptions,  # Assumptions of the model.
        assumed=certificate.assumed,  # Assumptions of the search: its pruning rules.
        warnings=plan.warnings,
        prices=plan.prices,
    )


def _alternatives(plan: Plan) -> list[Document]:
    """The other fleets of a plan, with a sentence and facts on each."""
    return [
        {
            "label": alternative.label,
            "fleet": _fleet_summary(alternative.fleet) if alternative.fleet is not None else None,
            # With `at_least` the objective is a lower bound for such fleets, not a price (`Alternative`).
            "objective": alternative.objective if alternative.is_priced else None,
            "at_least": alternative.at_least,
            "bound": alternative.objective if alternative.at_least else None,
            "note": alternative_note(alternative, plan),
            "notes": [fact_document(note) for note in alternative.notes],
        }
        for alternative in plan.alternatives
    ]


def _fleet_summary(fleet: Fleet) -> Document:
    """The fleet without its step times."""
    document = fleet_document(fleet)
    workers = [{key: value for key, value in row.items() if key != "latency"} for row in document["workers"]]
    keys = ("policies", "network", *PAID_KEYS)
    return {"workers": workers, **{name: document[name] for name in keys if name in document}}


def _slo_lines(verdict: Verdict) -> list[Document]:
    return [
        {
            "limit": line.limit.name,
            "limit_s": line.limit.limit_s,
            "simulated_s": line.value_s,
            "kept_frac": line.kept_frac,
            "holds": line.holds,
            "judged": line.judged,
            **({} if line.worst is None else {"worst_window": _in_window(line.worst)}),
        }
        for line in verdict.lines
    ]


def _in_window(worst: WindowResult) -> Document:
    """A line of the SLO in one window; for an attainment, whose value is NaN, without a value."""
    value = {} if math.isnan(worst.value_s) else {"simulated_s": worst.value_s}
    return {"start_s": worst.start_s, "end_s": worst.end_s, **value, "kept_frac": worst.kept_frac}


def _attainment(plan: Plan) -> Document:
    """The simulated share of requests that keep all limits at once, where the SLO has an attainment."""
    if plan.slo.attainment_frac is None:
        return {}
    return {"simulated_attainment_frac": plan.verdict.attainment_frac}


def guarantee_rows(verdict: Verdict) -> list[Document]:
    """Guarantees to tenants, and the least share of service that one of them got."""
    return [
        {
            "guarantee": line.guarantee.name,
            "needed_frac": line.guarantee.share_frac,
            "tenant": line.least.tenant,
            "share_frac": line.least.share_frac,
            "window_s": line.least.window_s,
            "windows": line.windows,
            "holds": line.holds,
        }
        for line in verdict.guarantees
    ]


def verdict_document(verdict: Verdict) -> Document:
    """The verdict on a simulation; limits on gaps have NaN seconds if no gaps were recorded. `is_steady`,
    `patient_frac` and `patience_s` are of the backlog test (slo_verdict.Verdict).
    """
    worst = verdict.attainment_worst
    return {
        "holds": verdict.holds,
        "is_judged": verdict.is_judged,
        "lines": _slo_lines(verdict),
        "attainment_frac": verdict.attainment_frac,
        "attainment_holds": verdict.attainment_holds,
        **({"windows": verdict.windows} if verdict.windows else {}),
        **({} if worst is None else {"attainment_worst_window": _in_window(worst)}),
        **({"tenants": guarantee_rows(verdict)} if verdict.guarantees else {}),
        "is_steady": verdict.is_steady,
        "patient_frac": verdict.patient_frac,
        "patience_s": verdict.patience_s,
        "rejected": verdict.rejected,
    }


def as_json(document: Document) -> str:
    """The document's `plain_value` as JSON text: equal bytes for equal documents."""
    return json.dumps(plain_value(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain_document(document: Document) -> Document:
    """The document with plain values, which JSON and YAML can express."""
    return {key: plain_value(value) for key, value in document.items()}


def plain_value(value: Any) -> Any:
    """The value in plain Python types: floats with ten significant digits, None for infinity and NaN, lists
    for tuples.
    """
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, np.generic):
        return plain_value(value.item())
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    return value
