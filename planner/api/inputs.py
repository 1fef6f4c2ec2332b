"""Reads the arguments of the public functions: paths, the contents of files, or objects read before.

A trace is a file, a pandas DataFrame with the same columns, or a Trace. A fleet is a file, the folder of a
plan, keys and values, or a Fleet. An SLO is a whole question (slo.yaml), its section `slo`, or an Slo.
Imports within functions spare pandas where no table is read, and avoid an import cycle with results.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from planner.api.questions import TaskDocument, is_question, read_task
from planner.documents import fleet_file as fleets
from planner.documents.catalog import Catalog, CatalogLike, read_catalog
from planner.documents.fleet_in_question import complete_fleet
from planner.documents.log_columns import KEYS as LOG_OPTION_KEYS
from planner.documents.log_columns import log_options_of, parse_log_options
from planner.documents.policy_choices import PolicyChoices
from planner.documents.slo import parse_slo
from planner.documents.task import PlanQuestion
from planner.domain import KV_BLOCK_TOKENS, MOST_SEED, Slo
from planner.errors import InputError, PlannerError
from planner.files.checked_files import read_yaml
from planner.files.document_values import refused_value
from planner.fleet import Fleet
from planner.traffic.described import Description, draw_requests
from planner.traffic.scaling import RateRequest, checked_scale
from planner.traffic.trace import Trace
from planner.units import parse_quantity

if TYPE_CHECKING:
    import pandas as pd

    from planner.api.results import PlanResult
    from planner.traffic.logs.log_reading import LogOptions

KeysAndValues: TypeAlias = Mapping[str, Any]
TraceLike: TypeAlias = "Trace | pd.DataFrame | str | Path"
FleetLike: TypeAlias = "Fleet | PlanResult | KeysAndValues | str | Path"
SloLike: TypeAlias = "Slo | TaskDocument | KeysAndValues | str | Path | None"
TrafficLike: TypeAlias = "RateRequest | KeysAndValues | None"
# `plan check` draws described traffic of at most so many requests, in a second or two.
MOST_CHECKED_REQUESTS = 200_000


def read_trace(
    trace: TraceLike, *, drop_invalid: bool = False, log_options: LogOptions | None = None
) -> Trace:
    """The requests of a file or of a table, checked.

    Times in whole seconds stay as they are; callers that have a seed spread them within the second
    (traffic.trace.spread_stamps). `log_options` name the columns of a log (docs/traces.md).

    Requests without tokens are left out. If they are more than 20 % of the trace, that is an error, unless
    `drop_invalid`.
    """
    if isinstance(trace, Trace):
        return trace
    if isinstance(trace, str | Path):
        from planner.traffic import trace_reading

        return trace_reading.read_trace(trace, seed=None, drop_invalid=drop_invalid, log_options=log_options)
    import pandas as pd

    from planner.traffic import frames

    if not isinstance(trace, pd.DataFrame):
        raise InputError(f"trace: expected a file, a DataFrame or a Trace, found {type(trace).__name__}")
    return frames.trace_of(trace, drop_invalid=drop_invalid, log_options=log_options)


def checked_seed(seed: object) -> int:
    """The seed as a plain int; it may be an integer of numpy. Raises InputError for anything else."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) <= MOST_SEED:
        raise refused_value("seed", f"expected a whole number, 0 to {MOST_SEED}", seed)
    return int(seed)


def checked_time_limit(seconds: object) -> float:
    """A time limit in s, which may be infinite. Raises InputError for anything else."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not float(seconds) > 0:
        raise refused_value("time_limit_s", "expected seconds, more than 0", seconds)
    return float(seconds)


def requests_of(
    trace: TraceLike | None,
    described: Description | None,
    *,
    seed: int,
    drop_invalid: bool = False,
    log_options: LogOptions | None = None,
) -> Trace:
    """The requests of a trace, or those that this seed draws from a description.

    Functions that plan get their traffic here. `log_options` are as in `read_trace`.

    If `trace` was itself drawn from a description, requests are drawn from `described` in its place.
    Raises InputError where a recorded trace and a description are given, or neither.
    """
    if described is None:
        if trace is None:
            raise InputError(
                "trace: missing; give the traffic (--trace FILE, a file or a DataFrame), or describe it in "
                "slo.yaml, traffic: {rate: 30, input: 1500, output: 300}"
            )
        return read_trace(trace, drop_invalid=drop_invalid, log_options=log_options)
    if trace is not None and not (isinstance(trace, Trace) and trace.drawn_from is not None):
        name = trace.name if isinstance(trace, Trace) else getattr(trace, "name", None) or "one"
        raise InputError(
            f"trace: found {str(name)[:100]}, and traffic: describes requests (input, output, task, ...); "
            "give one of the two"
        )
    return draw_requests(described, seed=seed)


def requests_and_rate(
    trace: TraceLike | None, rate_request: RateRequest, *, is_rate_given: bool, seed: int
) -> tuple[Trace, RateRequest]:
    """The requests (`requests_of`), and the rate and window to which they are to be brought.

    `is_rate_given`: rate or window were arguments of the call, not keys of the question. Then they apply to
    `trace`, and a recorded trace replaces the traffic that the question describes.
    """
    is_recorded = trace is not None and not (isinstance(trace, Trace) and trace.drawn_from is not None)
    if is_rate_given and is_recorded:
        rate_request = replace(rate_request, described=None)
    requests = requests_of(trace, rate_request.described, seed=seed, log_options=rate_request.log_options)
    return requests, rate_request


def read_fleet(
    fleet: FleetLike,
    catalog: CatalogLike = None,
    *,
    policies: KeysAndValues | None = None,
    slo: SloLike = None,
) -> Fleet:
    """The fleet of fleet.yaml or plan.yaml; `policies` are keys and values of a section `policies`, which
    replace the same keys of the file.

    If `slo` is a whole question of one LLM, prices, engine, LoRA and network that a fleet.yaml leaves out are
    taken from it.
    """
    catalog_rows = read_catalog(catalog)
    file = plan_file(fleet) if isinstance(fleet, str | Path) else Path("fleet")
    if isinstance(fleet, str | Path):
        document = _complete_from_question(read_yaml(file), slo, catalog_rows)
    elif isinstance(fleet, Mapping):
        document = _complete_from_question(fleet, slo, catalog_rows)
    else:
        # The result of a plan has its fleet as an attribute.
        own_fleet = fleet if isinstance(fleet, Fleet) else getattr(fleet, "fleet", None)
        if not isinstance(own_fleet, Fleet):
            raise InputError(
                f"fleet: expected a file, keys and values, or a fleet, found {type(fleet).__name__}"
            )
        if not policies:
            return own_fleet
        document = fleets.fleet_document(own_fleet)
    return fleets.parse_fleet(document, file, catalog_rows, policies=policies)


def fleet_file_warnings(
    fleet: str | Path, parsed: Fleet, *, slo: SloLike = None, catalog: CatalogLike = None
) -> list[str]:
    """Sentences on what is doubtful in a fleet's file, or a plan's folder, from which `parsed` was read: by
    itself, and compared with the question in `slo`, if there is one.
    """
    file = plan_file(fleet)
    warning = fleets.changed_plan_warning(read_yaml(file), file, parsed)
    warnings = [warning] if warning else []
    if slo is None:
        return warnings
    catalog_rows = read_catalog(catalog)
    if (question := question_of_one_llm(slo, catalog_rows)) is not None:
        question_llm = catalog_rows.served_llm(question.task().llm).name
        if question_llm != parsed.llm.name:
            warnings.append(f"{file}: serves {parsed.llm.name}, and the question is of {question_llm}")
    return warnings


def question_of_one_llm(slo: SloLike, catalog: Catalog) -> TaskDocument | None:
    """The question in `slo`; None if there is none, or one of several LLMs."""
    if slo is None or isinstance(slo, Slo) or (isinstance(slo, Mapping) and not is_question(slo)):
        return None
    question = read_task(slo, catalog)
    return None if question.has_several_llms else question


def _complete_from_question(fleet: KeysAndValues, slo: SloLike, catalog: Catalog) -> KeysAndValues:
    """The document of a fleet, completed from `slo` if that is a question of one LLM."""
    question = question_of_one_llm(slo, catalog)
    if question is None:
        return fleet
    return complete_fleet(fleet, question.document, question.task(), catalog)


def check_file(path: str | Path, catalog: CatalogLike = None) -> list[str]:
    """Sentences on what is doubtful in a slo.yaml, fleet.yaml or plan.yaml; with several LLMs each sentence
    names its LLMs. Nothing is planned.

    Raises InputError for what a command would refuse.
    """
    catalog_rows, file = read_catalog(catalog), plan_file(path)
    if "workers" in read_yaml(file):
        return fleet_file_warnings(file, fleets.read_fleet(file, catalog_rows))
    question = read_task(file, catalog_rows)
    if not question.has_several_llms:
        return _question_warnings(question.task(), catalog_rows)
    llms_by_warning: dict[str, list[str]] = {}
    for llm, question_of_llm in question.of_each_llm().items():
        for warning in _question_warnings(question_of_llm.task(), catalog_rows):
            llms_by_warning.setdefault(warning, []).append(llm)
    return [f"{', '.join(llms)}: {warning}" for warning, llms in llms_by_warning.items()]


def _question_warnings(task: PlanQuestion, catalog: Catalog) -> list[str]:
    """What is doubtful in the question of one LLM. Raises InputError if its described traffic is too long for
    the LLM, where so little is described that it is soon drawn.
    """
    from planner.search.problem.build_problem import check_described_lengths  # Slow to import.

    described = task.described
    if described is not None and described.mean_rps * described.duration_s <= MOST_CHECKED_REQUESTS:
        requests = draw_requests(described, seed=0)
        check_described_lengths(described, requests, catalog.served_llm(task.llm))
    if task.policies.axes != PolicyChoices().axes:
        _check_choices(task, catalog)
    return list(task.warnings)


def _check_choices(task: PlanQuestion, catalog: Catalog) -> None:
    """Raise InputError for policies that are not simulated with the rest of the question, for example with
    its adapters.
    """
    from planner.search.mixed.policy_search import simulated_choices  # These are slow to import.
    from planner.search.oracle.traffic_request import TrafficRequest
    from planner.search.problem.build_problem import build_problem

    # It has all that policies may look at.
    a_request = Trace(
        *("a request", np.zeros(1), np.full(1, 100), np.full(1, 10)),
        prefix_offsets=np.array([0, 1]),
        prefix_ids=np.zeros(1, np.int64),
        prefix_block_tokens=KV_BLOCK_TOKENS,
        tenants=("a tenant",),
    )
    try:
        problem = build_problem(task, a_request, catalog, request=TrafficRequest(a_request, ""))
    except PlannerError:  # The question needs its own traffic, or has no fleet: `plan` says which.
        return
    simulated_choices(problem)


def plan_file(path: str | Path) -> Path:
    """plan.yaml where `path` is the folder of a plan, else the path itself."""
    return Path(path) / "plan.yaml" if Path(path).is_dir() else Path(path)


def named_fleets(
    fleets: Mapping[str, FleetLike] | Iterable[FleetLike | tuple[str, FleetLike]],
) -> list[tuple[str, FleetLike]]:
    """Fleets with their names. A file without a name is named by `name_of_file`, another fleet by its place
    in the list.
    """
    if isinstance(fleets, Mapping):
        return list(fleets.items())
    if isinstance(fleets, str | Path):
        fleets = [fleets]
    named: list[tuple[str, FleetLike]] = []
    for number, fleet in enumerate(fleets, start=1):
        if isinstance(fleet, tuple):
            named.append(fleet)
        else:
            name = name_of_file(Path(fleet)) if isinstance(fleet, str | Path) else f"fleet {number}"
            named.append((name, fleet))
    return named


def name_of_file(path: Path) -> str:
    """A fleet's name where none is given: that of its file without the ending.

    A plan.yaml has the name of its folder, as all plans have that file name.
    """
    return path.parent.name if path.name == "plan.yaml" and path.parent.name else path.stem


def limits_and_rate(
    slo: SloLike, catalog: Catalog, *, traffic: TrafficLike = None, command: str
) -> tuple[Slo | None, RateRequest]:
    """The limits, and the rate and window of the traffic: from `traffic`, else from a whole question.

    Raises InputError, which names `command`, if the limits are relative (only a plan can resolve these), or
    if the question looks for the rate and `traffic` gives none.
    """
    rate_request = None if traffic is None else traffic_of(traffic)
    if slo is None or isinstance(slo, Slo):
        return slo, rate_request or RateRequest()
    if isinstance(slo, Mapping) and not is_question(slo):
        return parse_slo(slo, where="slo"), rate_request or RateRequest()
    question = read_task(slo, catalog)
    task = question.task()
    if task.slowdowns is not None:
        raise InputError(
            f"{question.path}: `{command}` needs limits in seconds, found the relative preset "
            f"{task.preset!r}; a plan.yaml made with it has them, under slo:"
        )
    has_no_rate = task.described is not None and task.described.is_rate_assumed
    # The command `goodput` looks for a rate by itself, so it needs none.
    if has_no_rate and rate_request is None and command != "goodput":
        raise InputError(
            f"{question.path}: traffic: has no rate, which objective throughput looks for; give the rate to "
            f"`{command}`: that of the plan, as requested_rps in its plan.yaml, or another"
        )
    rate_request = rate_request or RateRequest(task.rate_rps, task.scale, task.window or "whole")
    log_options = rate_request.log_options or log_options_of(question.document, question.path)
    return task.slo, replace(rate_request, described=task.described, log_options=log_options)


def planned_slo_and_trace(fleet: FleetLike, catalog: Catalog) -> tuple[Slo, Trace] | None:
    """The SLO and the requests of a plan, or of the plan in a folder; None if `fleet` is no plan."""
    from planner.api.results import PlanResult
    from planner.documents.plan_folder import read_written

    if isinstance(fleet, PlanResult):
        return fleet.plan.slo, fleet.plan.trace
    if not isinstance(fleet, str | Path) or not is_plan_folder(Path(fleet)):
        return None
    written = read_written(Path(fleet), catalog)
    return written.slo, written.trace


def is_plan_folder(path: Path) -> bool:
    """Whether a plan lies in this folder, or beside this file. Every plan has a certificate.json, which is
    written together with its SLO and its traffic.
    """
    return ((path if path.is_dir() else path.parent) / "certificate.json").is_file()


def traffic_of(traffic: RateRequest | KeysAndValues) -> RateRequest:
    """The rate and window in keys of the section `traffic`: {"rate": 20, "scale": "thin", "window": "busiest
    10 min"}.

    The section may also say how a log is read (`map`, `timezone`, `format`).
    """
    if isinstance(traffic, RateRequest):
        return traffic
    from planner.documents.traffic_description import is_description
    from planner.files.document_values import Section, refuse_unknown

    if is_description(Section.from_document(traffic, "traffic")):
        raise InputError(
            "traffic: describes requests, and here only the rate and window of a trace are expected; give "
            "the whole question as slo: {'llm': ..., 'slo': ..., 'traffic': ...}"
        )
    refuse_unknown(traffic, ("rate", "scale", "window", *LOG_OPTION_KEYS), "traffic")
    rate = traffic.get("rate")
    rate_rps = None if rate is None else parse_quantity(rate, "rps", where="traffic: rate")
    log_options = parse_log_options(Section.from_document(traffic, "traffic"))
    window = traffic.get("window") or "whole"
    return RateRequest(
        rate_rps, checked_scale(traffic.get("scale", "superpose")), window, log_options=log_options
    )
