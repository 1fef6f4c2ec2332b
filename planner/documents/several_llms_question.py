"""The question of several LLMs on one stock: slo.yaml with `llms:`, read into an `LlmQuestion` for each.

    llms:                                  # or a list of such entries, each with a name
      chat:
        llm: meta-llama/Llama-3.1-70B
        slo: {ttft: {p90: 2 s}}            # or preset, and any key of OWN (docs/tables/keys.md)
        safety: {kept_in: 0.95}            # in place of the default below
        trace: chat.csv                    # a file beside this one; or traffic: with a description; or
        model: chat-prod                   # the rows of --trace with this value in the column `model`
      code: {llm: meta-llama/Llama-3.1-8B, preset: vidur, traffic: {rate: 40}}
    fleet: {gpus: {a100-80g: 64, h100-80g: 32}}
    objective: cost
    limits: {power: 80 kW}
    safety: {kept_in: 0.9}                 # default for entries without safety

Keys beside `llms` are shared by all entries. Two entries may serve the same LLM. Without `model` an entry
takes the rows whose `model` is the entry's name; if there are none, those with the name of its LLM.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from planner.documents.catalog import Catalog
from planner.documents.log_columns import log_options_of
from planner.documents.task import BELONGS, PlanQuestion, parse_task, with_config
from planner.errors import InputError, TraceError
from planner.files.checked_files import read_yaml
from planner.files.document_values import check_text, errors_as, list_first, refuse_unknown
from planner.traffic.described import draw_requests
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace
from planner.units import count_text

SHARED = ("fleet", "objective", "limits", "deploy", "day")  # Keys that stand beside `llms`.
OWN = ("llm", "slo", "preset", "traffic", "policies", "engine", "lora", "spare", "robust", "safety")
DEFAULTS = ("safety",)  # Keys of entries that may also stand beside `llms`, for entries without them.
TRACE = ("trace", "model")  # Keys that say which requests an entry has.
# The most values of the column `model` in an error, and in the note on rows that no entry takes.
MOST_NAMED, MOST_NAMED_UNPLANNED = 8, 5

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # Fit for the name of a folder on any system.
# Files of an answer, among which each entry gets a folder of its name.
_ANSWER_FILES = ("plan.yaml", "certificate.json", "report.html", "requests.csv", "manifests")


@dataclass(frozen=True, slots=True, eq=False)
class LlmQuestion:
    """The question for one of the LLMs, and its own requests. The limits of `task` are shared by all LLMs.

    Requests with equal times, from a coarse clock, keep these times here; what simulates them spreads the
    times by a seed.
    """

    name: str
    task: PlanQuestion
    trace: Trace


@dataclass(frozen=True, slots=True, eq=False)
class SeveralLlmsQuestion:
    """The questions of all LLMs in the file's order, and `notes` for the reader on the traces in `files`."""

    entries: tuple[LlmQuestion, ...]
    notes: tuple[str, ...]
    files: tuple[Path, ...]

    def with_tasks(self, change: Callable[[PlanQuestion], PlanQuestion]) -> Self:
        """This question with `change` made to the task of each LLM."""
        return replace(self, entries=tuple(replace(each, task=change(each.task)) for each in self.entries))


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of `llms` before its trace is read; `own` has its keys of OWN, completed by DEFAULTS."""

    name: str
    own: Mapping[str, Any]
    task: PlanQuestion
    trace: Path | None
    model: str | None


def read_question(
    path: Path, common: Path | None, catalog: Catalog, *, seed: int = 0, drop_invalid: bool = False
) -> SeveralLlmsQuestion:
    """Read slo.yaml with `llms`, and the traces, of which `common` is the one of --trace; draw what is
    described. Raises InputError with the file, the entry and the key.
    """
    return question_of(read_yaml(path), path, common, catalog, seed=seed, drop_invalid=drop_invalid)


def question_of(
    document: Mapping[str, Any],
    path: Path,
    common: Path | Trace | None,
    catalog: Catalog,
    *,
    traces: Mapping[str, Trace] | None = None,
    seed: int = 0,
    drop_invalid: bool = False,
) -> SeveralLlmsQuestion:
    """Read the question from a mapping, as if it stood in the file `path`; errors as in `read_question`.

    An entry's traffic is what it describes, drawn by the seed; otherwise its trace in `traces`; otherwise its
    own file; otherwise its rows of `common`, a trace or a file.
    """
    entry_list = parse_entries(document, path, catalog)
    traces = traces or {}
    refuse_unknown(traces, [entry.name for entry in entry_list], "trace")
    sources: dict[str, Path | Trace | None] = {}
    for entry in entry_list:
        described = entry.task.described
        if described is not None and entry.name in traces:
            raise InputError(f"{path}: llms: {entry.name}: traffic: describes its requests; drop its trace")
        given = traces.get(entry.name, entry.trace)
        with errors_as(InputError, f"{path}: llms: {entry.name}: traffic"):
            sources[entry.name] = given if described is None else draw_requests(described, seed=seed)
    return _with_traces(entry_list, sources, path, common, catalog, drop_invalid=drop_invalid)


def parse_entries(document: Mapping[str, Any], path: Path, catalog: Catalog) -> list[Entry]:
    """The entries of `llms`, each checked together with the shared keys; error messages begin with `path`."""
    for key in document:
        if key in (*OWN, *TRACE) and key not in DEFAULTS:
            raise InputError(f"{path}: {key} belongs into each entry of llms; beside it: {', '.join(SHARED)}")
    refuse_unknown(document, ("llms", *SHARED, *DEFAULTS), str(path), BELONGS)
    if document.get("objective") == "throughput":
        raise InputError(
            f"{path}: objective: throughput raises the rate of one LLM; with llms give each its rate"
        )
    shared = {key: document[key] for key in (*SHARED, *DEFAULTS) if key in document}
    if isinstance(fleet := shared.get("fleet"), Mapping) and "per_gpu" in fleet:
        raise InputError(f"{path}: fleet: per_gpu: is for one LLM; leave it out, or plan each LLM by itself")
    # The shared keys are checked first, with an arbitrary LLM, so that errors in them do not name an entry.
    any_llm = {"llm": min(catalog.llms), "slo": {"ttft": {"p90": "1 s"}}}
    parse_task({**any_llm, **shared}, catalog, where=str(path))
    return [
        _parse_entry(name, row, shared, path, catalog)
        for name, row in _named_entries(document.get("llms"), f"{path}: llms")
    ]


def _named_entries(llms: Any, where: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The entries with their names, of a mapping or of a list; each name becomes a folder of the answer."""
    if isinstance(llms, list):
        rows = [(_name_in_list(row), row) for row in llms]
    elif isinstance(llms, Mapping):
        rows = [(str(name), row) for name, row in llms.items()]
    else:
        rows = []
    if not rows:
        raise InputError(f"{where}: expected an entry per LLM such as chat: {{llm: ...}}, found {llms!r}")
    seen: set[str] = set()
    for name, row in rows:
        if not isinstance(row, Mapping):
            raise InputError(f"{where}: {name}: expected keys and values such as llm: ..., found {row!r}")
        if not _NAME.fullmatch(name) or name.lower() in _ANSWER_FILES:
            raise InputError(
                f"{where}: {name!r} names a folder of the answer; take letters, digits, dots and dashes, and "
                f"none of {', '.join(_ANSWER_FILES)}"
            )
        if name.lower() in seen:
            raise InputError(f"{where}: two entries are named {name}; give each a name of its own")
        seen.add(name.lower())
    dropped = {"name"} if isinstance(llms, list) else set()
    return [(name, {key: value for key, value in row.items() if key not in dropped}) for name, row in rows]


def _name_in_list(row: Any) -> str:
    """The name of an entry in a list: its key `name`, or without it the last part of its LLM's name."""
    if not isinstance(row, Mapping):
        return str(row)  # For the error with which `_named_entries` refuses this row.
    name = row.get("name", str(row.get("llm", "")).rstrip("/").rpartition("/")[2])
    return str(name)


def _parse_entry(
    name: str, row: Mapping[str, Any], shared: Mapping[str, Any], path: Path, catalog: Catalog
) -> Entry:
    """The entry of this name from its `row`. Keys of DEFAULTS that the row lacks come from `shared`."""
    where = f"{path}: llms: {name}"
    for key in row:
        if key in SHARED:
            raise InputError(f"{where}: {key} is shared by all LLMs; write it beside llms")
    refuse_unknown(row, (*OWN, *TRACE), where)
    for key in TRACE:
        if key in row:
            check_text(row[key], f"{where}: {key}")
    own = {key: value for key, value in row.items() if key in OWN}
    if "robust" not in own:  # `robust` stands in place of safety.
        own = {key: shared[key] for key in DEFAULTS if key in shared} | own
    beside_llms = {key: value for key, value in shared.items() if key in SHARED}
    # `with_config` finds an LLM that is a config.json in the folder of slo.yaml.
    task = parse_task({**with_config(own, path.parent, catalog), **beside_llms}, catalog, where=where)
    if task.plans_each_target:
        raise InputError(f"{where}: deploy: each is for one LLM; name one target, or plan each LLM by itself")
    trace = path.parent / row["trace"] if "trace" in row else None
    if task.described is not None and (trace is not None or "model" in row):
        raise InputError(
            f"{where}: traffic: describes its requests; drop trace: and model:, or describe none"
        )
    return Entry(name, own, task, trace, row.get("model"))


def _with_traces(
    entry_list: list[Entry],
    sources: Mapping[str, Path | Trace | None],
    path: Path,
    common: Path | Trace | None,
    catalog: Catalog,
    *,
    drop_invalid: bool,
) -> SeveralLlmsQuestion:
    """The question with the requests of each entry.

    They are all requests of its own trace in `sources` (a file, or a trace in memory), or its rows of the
    `common` trace (`_llm_in_trace`). Raises InputError for an entry without either, and for a common trace
    that no entry uses.
    """
    untraced = [name for name, source in sources.items() if source is None]
    if untraced and common is None:
        raise InputError(
            f"{path}: llms: {', '.join(untraced)}: no trace of its own; add trace: FILE there, or give "
            "--trace FILE with a column `model`"
        )
    if common is not None and not untraced:
        named = common.name if isinstance(common, Trace) else common
        raise InputError(f"--trace {named}: every entry of llms has a trace of its own; drop one of the two")
    trace_by_source: dict[Path | Trace, Trace] = {}
    # By file: its first entry, and how that entry says to read it.
    first_readers: dict[Path, tuple[str, object]] = {}
    # (trace, name of an LLM in it, or None for all rows of the trace) -> the entry that has taken these rows.
    taken: dict[tuple[Path | Trace, str | None], str] = {}
    questions = []
    for entry in entry_list:
        is_own = sources[entry.name] is not None
        source = sources[entry.name] if is_own else common
        assert source is not None
        if isinstance(source, Trace):
            trace_by_source[source] = source
        else:
            log_options = log_options_of(entry.own, path)
            first, first_options = first_readers.setdefault(source, (entry.name, log_options))
            if log_options not in (first_options, None):
                raise InputError(
                    f"{path}: llms: {entry.name}: traffic: {source.name} is read once, as {first} says; say "
                    "there how its columns are read, and the same or nothing here"
                )
            if source not in trace_by_source:
                trace_by_source[source] = read_trace(
                    source, seed=None, drop_invalid=drop_invalid, log_options=log_options
                )
        trace, where = trace_by_source[source], f"{path}: llms: {entry.name}"
        llm = _llm_in_trace(entry, trace, catalog, where, is_own=is_own)
        # Two entries may each name the same file, but each row of --trace belongs to one entry.
        if not is_own and (source, llm) in taken:
            same = f"the rows to {llm!r}" if llm is not None else "all rows"
            raise InputError(
                f"{path}: llms: {taken[source, llm]} and {entry.name} both take {same} of {source.name}; "
                "tell them apart with model:, or give each its trace:"
            )
        if not is_own:
            taken[source, llm] = entry.name
        own_trace = trace if llm is None else trace.of_llm(llm)
        questions.append(LlmQuestion(entry.name, entry.task, own_trace))
    files = tuple(source for source in trace_by_source if isinstance(source, Path))
    return SeveralLlmsQuestion(tuple(questions), _note_unplanned(trace_by_source, common, taken), files)


def _llm_in_trace(entry: Entry, trace: Trace, catalog: Catalog, where: str, *, is_own: bool) -> str | None:
    """The value of the column `model` in the rows that belong to an entry; None for all rows. With `is_own`
    the trace is the entry's alone. Without `model` the entry's name comes first, then its LLM's name as
    slo.yaml and as the catalog spell it, then any other name that the catalog has for the LLM.
    """
    if entry.model is None and (is_own or not trace.llms):
        return None
    if not trace.llms:
        raise TraceError(
            f"{where}: model: {trace.name} has no column `model`; drop it, or say which column of a "
            "log tells the LLMs apart: traffic: {map: {arrival: ..., input: ..., output: ..., model: COLUMN}}"
        )
    entry_names = (
        [entry.name, str(entry.own["llm"]), entry.task.llm] if entry.model is None else [entry.model]
    )
    for entry_name in entry_names:
        for name in trace.llms:
            if name.lower() == entry_name.lower():
                return name
    if entry.model is None:
        for name in trace.llms:
            if catalog.has_llm(name) and catalog.llm(name) == catalog.llm(entry.task.llm):
                return name
    raise TraceError(
        f"{where}: {trace.name} has no row for {entry_names[0]!r}: its column `model` holds "
        f"{list_first(list(map(repr, trace.llms)), MOST_NAMED)}; name one of them with model:"
    )


def _note_unplanned(
    trace_by_source: Mapping[Path | Trace, Trace],
    common: Path | Trace | None,
    taken: Mapping[tuple[Path | Trace, str | None], str],
) -> tuple[str, ...]:
    if common is None or (common, None) in taken:
        return ()
    trace = trace_by_source[common]
    unplanned = [name for name in trace.llms if (common, name) not in taken]
    if not unplanned:
        return ()
    rows = sum(int((trace.llm == trace.llms.index(name)).sum()) for name in unplanned)
    names = list_first(list(map(repr, unplanned)), MOST_NAMED_UNPLANNED)
    verb = "is" if rows == 1 else "are"
    requests = count_text(rows, "request")
    return (f"{requests} of {trace.name} to {names} {verb} not planned: no entry of llms takes them",)
