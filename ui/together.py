"""From the inputs of several LLMs to slo.yaml with `llms:`, its command, and back.

`asked` has "llms", the inputs of each with its `name` and the `rows` that are its own where a trace has a
column `model`, and "shared", the inputs of all. Both are those of `question`; of the first what is one LLM's
counts, of the second what SHARED names and what slo.yaml says beside `llms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from planner.documents import several_llms_question
from planner.documents.catalog import Catalog
from planner.documents.several_llms_question import parse_entries
from planner.errors import InputError
from planner.files.checked_files import read_yaml, repository_dir
from planner.reports.words import command_line
from ui import question
from ui.question import Form

SHARED = (
    "gpus",
    "stages",
    "bandwidth",
    "host_overhead",
    "objective",
    "cost",
    "power_kw",
    "gpu_limit",
    "seed",
    "time_limit",
)
FILE = Path("slo.yaml")


def example_form(catalog: Catalog, traces: Sequence[str]) -> Form:
    """The question of examples/slo-two-llms.yaml."""
    given = read_yaml(repository_dir("examples") / "slo-two-llms.yaml")
    return of_document(given, {"shared": question.sample_form(catalog)}, catalog, traces)


def restore_form(stored: Mapping[str, Any], catalog: Catalog) -> Form:
    """Inputs that were kept, as they are now; see `question.kept`."""
    return {
        "llms": [
            question.restore_form(one, catalog) | {"name": one["name"], "rows": one["rows"]}
            for one in stored["llms"]
        ],
        "shared": question.restore_form(stored["shared"], catalog),
    }


def document(form: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """slo.yaml with traces by their file names; `together.entries` refuses what makes no sense.

    Raises InputError where two LLMs have one name, or two traces one file name, and what `question.document`
    raises.
    """
    shared, files = form["shared"], dict[str, str]()
    question_document: dict[str, Any] = {"llms": {}}
    for one in form["llms"]:
        name, file = one["name"], file_of(one["trace"])
        if name in question_document["llms"]:
            raise InputError(f"two LLMs are named {name}; give each a name of its own")
        if files.setdefault(file, one["trace"]) != one["trace"]:
            raise InputError(f"two traces are named {file}; upload one of them under another name")
        whole = question.document(
            one
            | {key: shared[key] for key in SHARED}
            | {"more": question.merged(one["more"], shared["more"])},
            catalog,
        )
        own = {key: value for key, value in whole.items() if key not in several_llms_question.SHARED}
        question_document["llms"][name] = (
            own | {"trace": file} | ({"model": one["rows"]} if one["rows"] else {})
        )
        question_document |= {key: whole[key] for key in several_llms_question.SHARED if key in whole}
    return question_document


def of_document(
    given: Mapping[str, Any], form: Mapping[str, Any], catalog: Catalog, traces: Sequence[str]
) -> Form:
    """The inputs that ask what a slo.yaml asks; seed and time limit stay those of `form`.

    `traces` are references of the store. Raises what `together.entries` raises.
    """
    chosen = [one["trace"] for one in form.get("llms", ())]  # These win over others of equal names.
    known = {file_of(reference): reference for reference in (*traces, *chosen)}
    beside = {key: given[key] for key in several_llms_question.SHARED if key in given}
    every = []
    for entry in parse_entries(given, FILE, catalog):
        where = f"{FILE}: llms: {entry.name}"
        if entry.trace is None:
            raise InputError(
                f"{where}: no trace of its own; here each LLM names one, for instance trace: {min(known)}"
            )
        if entry.trace.name not in known:
            raise InputError(f"{where}: trace: {entry.trace.name} is not here; upload it, then apply again")
        llm_form = question.of_document({**entry.own, **beside}, question.sample_form(catalog), catalog)
        every.append(llm_form | {"name": entry.name, "rows": entry.model, "trace": known[entry.trace.name]})
    kept_of = {key: form["shared"][key] for key in ("seed", "time_limit")}
    shared = every[0] | kept_of | {"more": _of(every[0]["more"], shared=True)}
    return {
        "llms": [one | {"more": _of(one["more"], shared=False)} for one in every],
        "shared": {key: value for key, value in shared.items() if key not in ("name", "rows")},
    }


def add_llm(form: Mapping[str, Any]) -> Form:
    """One LLM more, like the last one, with a name that is free."""
    names = {one["name"] for one in form["llms"]}
    name = next(name for k in count(len(names) + 1) if (name := f"llm-{k}") not in names)
    return {**form, "llms": [*form["llms"], form["llms"][-1] | {"name": name}]}


def remove_llm(form: Mapping[str, Any], k: int) -> Form:
    """All LLMs but the k-th."""
    return {**form, "llms": [one for at, one in enumerate(form["llms"]) if at != k]}


def command(form: Mapping[str, Any], catalog_folder: Path | None) -> str:
    """What gives the same plans on a command line, beside slo.yaml and the traces."""
    shared = form["shared"]
    return command_line(
        FILE, None, catalog_folder, seed=shared["seed"], time_limit_s=float(shared["time_limit"])
    )


def file_of(reference: str) -> str:
    """The name of a trace's file, of its reference in the store."""
    return reference.partition("/")[2]


def _of(more: Mapping[str, Any], *, shared: bool) -> dict[str, Any]:
    return {key: value for key, value in more.items() if (key in several_llms_question.SHARED) is shared}
