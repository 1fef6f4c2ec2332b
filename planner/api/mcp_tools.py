"""The tools that clients may call over MCP (Model Context Protocol): functions of `fleetplan` that take files
or objects and return plain values.

Clients read the docstrings of the public functions. Every tool returns the object that its command prints
with --json, and the answer in sentences; `plan` leaves out long lists (DETAILS). If no fleet keeps the SLO,
the tool returns that as its answer. Bad input raises InputError, with one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.api import planning, simulating, studying
from planner.api.catalog_frames import catalog as catalog_frames
from planner.api.results import Result
from planner.errors import InfeasibleError, InputError
from planner.files.document_values import did_you_mean
from planner.reports.screen import why_nothing_cheaper

Document = dict[str, Any]
# Keys of a plan's answer, and keys of the certificate in it, that are left out unless `details` is set.
DETAILS = ("facts", "alternatives", "placement", "network")
DETAILS_OF_CERTIFICATE = (
    "refuted",
    "neighbours",
    "robustness",
    "repeats",
    "shadow_prices",
    "universe",
    "scenarios_drawn",
)
MOST_ROWS = 200  # A table of the catalog has at most this many rows: more would fill a client's context.


def plan(
    slo: Document | str,
    trace: str | None = None,
    out: str | None = None,
    time_limit_s: float = 120.0,
    seed: int = 0,
    details: bool = False,
) -> Document:
    """Find the cheapest fleet that keeps an SLO, and how far it can be trusted.

    slo: slo.yaml as an object ({"llm": "llama-3.1-70b", "slo": {"ttft": {"p90": "2 s"}}, "traffic": {"rate":
    30, "task": "chat"}, "fleet": {"gpus": {"h100-80g": 16}}}), or the path of such a file. Quantities carry
    units. trace: a file of requests, unless traffic describes them. out: a folder for the plan, its report
    and deployments. Pass the warnings on. Takes up to time_limit_s seconds.
    """
    try:
        result = planning.plan(slo, trace, seed=seed, time_limit_s=time_limit_s)
    except InfeasibleError as error:
        return error.to_dict()
    saved = {} if out is None else {"directory": out, "files": list(result.save(out))}
    return _in_words(result) | _answer_of(result.to_dict(), details=details) | saved


def simulate(
    fleet: Document | str,
    trace: str | None = None,
    slo: Document | str | None = None,
    rate: float | None = None,
    seed: int = 0,
) -> Document:
    """Simulate every request of the traffic on a fleet: latencies, whether the SLO is kept, how busy it is.

    fleet: fleet.yaml as an object ({"llm": "llama-3.1-8b", "workers": [{"gpu": "h100-80g", "count": 2}]}), a
    file, or the folder of a plan. slo: limits ({"ttft": {"p90": "2 s"}}), or a question or its file, whose
    traffic counts where there is no trace. rate: requests/s to which the trace is scaled.
    """
    rate_key: simulating.TrafficKeys = {} if rate is None else {"rate": rate}
    result = simulating.simulate(fleet, trace, slo, seed=seed, **rate_key)
    return _in_words(result) | result.to_dict()


def goodput(
    fleet: Document | str, slo: Document | str | None = None, trace: str | None = None, seeds: int = 3
) -> Document:
    """Find the highest rate at which a fleet keeps an SLO: how much do these GPUs carry?

    fleet and slo as for simulate; slo is a question or limits. With the folder of a plan, slo and trace may
    be left out: the plan's own count.
    """
    try:
        result = simulating.goodput(fleet, trace, slo, seeds=seeds)
    except InfeasibleError as error:
        return error.to_dict()
    return _in_words(result) | result.to_dict()


def what_if(
    slo: Document | str, changes: Document, trace: str | None = None, time_limit_s: float = 120.0
) -> Document:
    """Plan before and after a change of the question, and say whether the previous fleet still holds.

    changes: dotted paths of slo.yaml with their values, {"slo.ttft.p90": "1 s", "traffic.rate": 40}; null
    takes a key out.
    """
    try:
        result = studying.what_if(slo, trace, changes, time_limit_s=time_limit_s)
    except InfeasibleError as error:
        return error.to_dict()
    return _in_words(result) | result.to_dict()


def explain(plan: str) -> Document:
    """Explain a plan that was written: why this fleet, why not cheaper, what it assumes, what breaks first.

    plan: the folder that the tool plan wrote as out.
    """
    result = planning.read_plan(plan)
    document = result.to_dict()
    certificate = document["certificate"]
    return _in_words(result) | {
        "why_not_cheaper": why_nothing_cheaper(result.plan),
        "binding_on_paper": certificate["binding"],
        "lower_bound": certificate["bound"],
        "assumes": [*certificate["assumptions"], *certificate["assumed"]],
        "answers": certificate["answers"],
        "other_ways": [
            {"what": row["label"], "objective": row["objective"], "note": row["note"]}
            for row in document["alternatives"]
        ],
        "warnings": document["warnings"],
    }


def catalog(table: str = "gpus", like: str = "") -> list[Document]:
    """List what the planner knows: table is gpus, llms, slos, tasks or engines; like filters names."""
    frames = catalog_frames()
    tables = {name: getattr(frames, name) for name in ("gpus", "llms", "slos", "tasks", "engines")}
    if table not in tables:
        raise InputError(f"table: expected one of {', '.join(tables)}, found {table[:60]!r}")
    frame = tables[table].reset_index()
    names = frame["engine" if table == "engines" else "name"].astype(str)
    chosen = frame[names.str.contains(like, case=False, regex=False)].head(MOST_ROWS)
    if chosen.empty:
        meant = did_you_mean(like, names)
        raise InputError(f"like: no name of {table} has {like[:60]!r} in it; {meant}leave it out for all")
    # JSON has no NaN, so an empty cell becomes null.
    rows: list[Document] = chosen.astype(object).where(chosen.notna(), None).to_dict("records")
    return rows


TOOLS: tuple[Callable[..., Any], ...] = (plan, simulate, goodput, what_if, explain, catalog)


def _in_words(result: Result) -> Document:
    """The answer in words: its first line, and its sentences."""
    return {"answer": result.headline(), "sentences": result.sentences()}


def _answer_of(document: Document, *, details: bool) -> Document:
    """The answer of `plan`; unless `details` is set, without DETAILS and DETAILS_OF_CERTIFICATE."""
    if details:
        return document
    short = {key: value for key, value in document.items() if key not in DETAILS}
    if isinstance(certificate := short.get("certificate"), dict):
        short["certificate"] = {
            key: value for key, value in certificate.items() if key not in DETAILS_OF_CERTIFICATE
        }
    return short
