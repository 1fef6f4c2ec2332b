"""The page Several LLMs: from its inputs to slo.yaml with `llms:`, to the command, and back.

A form is what the page stores of its inputs. It has two parts, both made of the inputs of a question on one
LLM (ui/question.py). "llms" has the inputs of each LLM, its `name`, and in `rows` the value of the trace's
column `model` that marks its requests. "shared" has the inputs of all LLMs: those that SHARED names, and
under `more` the keys that slo.yaml has beside `llms`.
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

# The inputs of a question that all LLMs have in common.
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
FILE = Path("slo.yaml")  # Errors and the command line name the question like this.


def example_form(catalog: Catalog, traces: Sequence[str]) -> Form:
    """The form of examples/slo-two-llms.yaml. `traces` are references of the store."""
    written = read_yaml(repository_dir("examples") / "slo-two-llms.yaml")
    return form_of_document(written, {"shared": question.sample_form(catalog)}, catalog, traces)


def restore_form(stored: Mapping[str, Any], catalog: Catalog) -> Form:
    """A form that an earlier version may have stored, with the inputs of this version; see
    `question.restore_form`.
    """
    return {
        "llms": [
            question.restore_form(llm_form, catalog) | {"name": llm_form["name"], "rows": llm_form["rows"]}
            for llm_form in stored["llms"]
        ],
        "shared": question.restore_form(stored["shared"], catalog),
    }


def document(form: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """The slo.yaml of a form, with traces by their file names. Its values are not checked here;
    `parse_entries` does that.

    Raises InputError where two LLMs have one name, or two traces one file name, and whatever
    `question.document` raises.
    """
    shared = form["shared"]
    trace_by_file: dict[str, str] = {}
    question_document: dict[str, Any] = {"llms": {}}
    for llm_form in form["llms"]:
        name, file = llm_form["name"], file_of(llm_form["trace"])
        if name in question_document["llms"]:
            raise InputError(f"two LLMs are named {name}; give each a name of its own")
        is_described = llm_form["source"] == question.DESCRIBED
        if not is_described and trace_by_file.setdefault(file, llm_form["trace"]) != llm_form["trace"]:
            raise InputError(f"two traces are named {file}; upload one of them under another name")
        llm_document = question.document(
            llm_form
            | {key: shared[key] for key in SHARED}
            | {"more": question.merged(llm_form["more"], shared["more"])},
            catalog,
        )
        own_keys = {
            key: value for key, value in llm_document.items() if key not in several_llms_question.SHARED
        }
        trace_keys = {"trace": file} | ({"model": llm_form["rows"]} if llm_form["rows"] else {})
        question_document["llms"][name] = own_keys | ({} if is_described else trace_keys)
        question_document |= {
            key: llm_document[key] for key in several_llms_question.SHARED if key in llm_document
        }
    return question_document


def form_of_document(
    written: Mapping[str, Any], form: Mapping[str, Any], catalog: Catalog, traces: Sequence[str]
) -> Form:
    """The form of a slo.yaml; its seed and time limit stay those of `form`.

    `traces` are references of the store. Raises InputError for a slo.yaml that `parse_entries` refuses, and
    for a trace that is not in the store.
    """
    # Of traces with equal file names the one that the form uses counts: later entries replace earlier ones.
    used_traces = [llm_form["trace"] for llm_form in form.get("llms", ())]
    trace_by_file = {file_of(reference): reference for reference in (*traces, *used_traces)}
    shared_keys = {key: written[key] for key in several_llms_question.SHARED if key in written}
    llm_forms = []
    for entry in parse_entries(written, FILE, catalog):
        where = f"{FILE}: llms: {entry.name}"
        if entry.trace is None and entry.task.described is None:
            raise InputError(
                f"{where}: no trace of its own; here each LLM names one, for instance trace: "
                f"{min(trace_by_file)}, or describes its traffic: {{rate: 5, task: chat}}"
            )
        if entry.trace is not None and entry.trace.name not in trace_by_file:
            raise InputError(f"{where}: trace: {entry.trace.name} is not here; upload it, then apply again")
        llm_document = {**entry.own, **shared_keys}
        llm_form = question.form_of_document(llm_document, question.sample_form(catalog), catalog)
        llm_form |= {"name": entry.name, "rows": entry.model}
        llm_forms.append(
            llm_form if entry.trace is None else llm_form | {"trace": trace_by_file[entry.trace.name]}
        )
    # All LLMs have the same values of the inputs in SHARED, so the form of the first LLM gives them.
    kept_inputs = {key: form["shared"][key] for key in ("seed", "time_limit")}
    shared = llm_forms[0] | kept_inputs | {"more": _keys_of(llm_forms[0]["more"], is_shared=True)}
    return {
        "llms": [
            form_of_llm | {"more": _keys_of(form_of_llm["more"], is_shared=False)}
            for form_of_llm in llm_forms
        ],
        "shared": {key: value for key, value in shared.items() if key not in ("name", "rows")},
    }


def add_llm(form: Mapping[str, Any]) -> Form:
    """The form with one more LLM, a copy of the last one under an unused name."""
    names = {llm_form["name"] for llm_form in form["llms"]}
    name = next(name for k in count(len(names) + 1) if (name := f"llm-{k}") not in names)
    return {**form, "llms": [*form["llms"], form["llms"][-1] | {"name": name}]}


def remove_llm(form: Mapping[str, Any], k: int) -> Form:
    """The form without the k-th LLM, counted from 0."""
    return {**form, "llms": [llm_form for i, llm_form in enumerate(form["llms"]) if i != k]}


def plan_command(form: Mapping[str, Any], catalog_folder: Path | None) -> str:
    """The command line that makes the same plans from slo.yaml and the traces."""
    shared = form["shared"]
    return command_line(
        FILE, None, catalog_folder, seed=shared["seed"], time_limit_s=float(shared["time_limit"])
    )


def file_of(reference: str) -> str:
    """The file name in a trace's reference of the store, `ID/NAME`."""
    return reference.partition("/")[2]


def _keys_of(more: Mapping[str, Any], *, is_shared: bool) -> dict[str, Any]:
    """The keys of `more` that all LLMs share, or those that are one LLM's own."""
    return {key: value for key, value in more.items() if (key in several_llms_question.SHARED) is is_shared}
