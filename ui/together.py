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

from planner.documents import together
from planner.documents.catalog import Catalog
from planner.documents.together import entries
from planner.errors import InputError
from planner.io.files import read_yaml, repository_dir
from planner.reports.words import command_line
from ui import question
from ui.question import Asked

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


def example(catalog: Catalog, traces: Sequence[str]) -> Asked:
    """The question of examples/slo-two-llms.yaml."""
    given = read_yaml(repository_dir("examples") / "slo-two-llms.yaml")
    return of_document(given, {"shared": question.sample(catalog)}, catalog, traces)


def kept(found: Mapping[str, Any], catalog: Catalog) -> Asked:
    """Inputs that were kept, as they are now; see `question.kept`."""
    return {
        "llms": [
            question.kept(one, catalog) | {"name": one["name"], "rows": one["rows"]} for one in found["llms"]
        ],
        "shared": question.kept(found["shared"], catalog),
    }


def document(asked: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """slo.yaml with traces by their file names; `together.entries` refuses what makes no sense.

    Raises InputError where two LLMs have one name, or two traces one file name, and what `question.document`
    raises.
    """
    shared, files = asked["shared"], dict[str, str]()
    found: dict[str, Any] = {"llms": {}}
    for one in asked["llms"]:
        name, file = one["name"], file_of(one["trace"])
        if name in found["llms"]:
            raise InputError(f"two LLMs are named {name}; give each a name of its own")
        if files.setdefault(file, one["trace"]) != one["trace"]:
            raise InputError(f"two traces are named {file}; upload one of them under another name")
        whole = question.document(
            one
            | {key: shared[key] for key in SHARED}
            | {"more": question.merged(one["more"], shared["more"])},
            catalog,
        )
        own = {key: value for key, value in whole.items() if key not in together.SHARED}
        found["llms"][name] = own | {"trace": file} | ({"model": one["rows"]} if one["rows"] else {})
        found |= {key: whole[key] for key in together.SHARED if key in whole}
    return found


def of_document(
    given: Mapping[str, Any], asked: Mapping[str, Any], catalog: Catalog, traces: Sequence[str]
) -> Asked:
    """The inputs that ask what a slo.yaml asks; seed and time limit stay those of `form`.

    `traces` are references of the store. Raises what `together.entries` raises.
    """
    chosen = [one["trace"] for one in asked.get("llms", ())]  # These win over others of equal names.
    known = {file_of(reference): reference for reference in (*traces, *chosen)}
    beside = {key: given[key] for key in together.SHARED if key in given}
    every = []
    for entry in entries(given, FILE, catalog):
        where = f"{FILE}: llms: {entry.name}"
        if entry.trace is None:
            raise InputError(
                f"{where}: no trace of its own; here each LLM names one, for instance trace: {min(known)}"
            )
        if entry.trace.name not in known:
            raise InputError(f"{where}: trace: {entry.trace.name} is not here; upload it, then apply again")
        found = question.of_document({**entry.own, **beside}, question.sample(catalog), catalog)
        every.append(found | {"name": entry.name, "rows": entry.model, "trace": known[entry.trace.name]})
    kept_of = {key: asked["shared"][key] for key in ("seed", "time_limit")}
    shared = every[0] | kept_of | {"more": _of(every[0]["more"], shared=True)}
    return {
        "llms": [one | {"more": _of(one["more"], shared=False)} for one in every],
        "shared": {key: value for key, value in shared.items() if key not in ("name", "rows")},
    }


def another(asked: Mapping[str, Any]) -> Asked:
    """One LLM more, like the last one, with a name that is free."""
    names = {one["name"] for one in asked["llms"]}
    name = next(name for k in count(len(names) + 1) if (name := f"llm-{k}") not in names)
    return {**asked, "llms": [*asked["llms"], asked["llms"][-1] | {"name": name}]}


def without(asked: Mapping[str, Any], k: int) -> Asked:
    """All LLMs but the k-th."""
    return {**asked, "llms": [one for at, one in enumerate(asked["llms"]) if at != k]}


def command(asked: Mapping[str, Any], catalog_folder: Path | None) -> str:
    """What gives the same plans on a command line, beside slo.yaml and the traces."""
    shared = asked["shared"]
    return command_line(
        FILE, None, catalog_folder, seed=shared["seed"], time_limit_s=float(shared["time_limit"])
    )


def file_of(reference: str) -> str:
    """The name of a trace's file, of its reference in the store."""
    return reference.partition("/")[2]


def _of(more: Mapping[str, Any], *, shared: bool) -> dict[str, Any]:
    return {key: value for key, value in more.items() if (key in together.SHARED) is shared}
