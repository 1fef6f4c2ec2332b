"""A question as the keys and values of slo.yaml: read, checked, and changed to make another question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed  # `replace` is a function for users below.
from pathlib import Path
from typing import Any, TypedDict, Unpack

from planner.documents.catalog import Catalog, CatalogLike, read_catalog
from planner.documents.dotted import keys_of, spelled_keys, with_value
from planner.documents.several_llms_question import SHARED, parse_entries
from planner.documents.task import PlanQuestion, parse_task, with_config
from planner.errors import InputError
from planner.files.checked_files import read_yaml, to_yaml
from planner.files.document_values import did_you_mean

UNNAMED = Path("slo.yaml")  # Error messages give this name to a question that is in no file.


class KeysWithoutLimits(TypedDict, total=False):
    """The keys of slo.yaml apart from `slo` and `limits`. The argument `limits` of `studying.pareto` is not
    that key.
    """

    llm: str
    llms: Mapping[str, Mapping[str, Any]] | list[Mapping[str, Any]]
    preset: str
    traffic: Mapping[str, Any]
    fleet: Mapping[str, Any]
    policies: Mapping[str, Any]
    objective: str
    spare: str | int
    robust: Mapping[str, Any]
    safety: Mapping[str, Any] | str
    deploy: Mapping[str, Any]
    day: Mapping[str, Any]


class TaskKeys(KeysWithoutLimits, total=False):
    """The keys of slo.yaml apart from `slo` (docs/tables/keys.md)."""

    limits: Mapping[str, Any]


@dataclass(frozen=True, slots=True, repr=False)
class TaskDocument:
    """A question as the keys and values of slo.yaml, checked against a catalog.

    Error messages begin with `path`, and files that the document names are looked for beside it.
    `is_as_read`: `document` is the unchanged content of the file at `path`.
    """

    document: Mapping[str, Any]
    catalog: Catalog = field(compare=False)
    path: Path = UNNAMED
    is_as_read: bool = False

    @property
    def has_several_llms(self) -> bool:
        """Whether the question has a section `llms`: several LLMs are then planned together."""
        return "llms" in self.document

    def task(self) -> PlanQuestion:
        """The question in the form that the search takes, for one LLM."""
        return parse_task(self.document, self.catalog, where=str(self.path))

    def of_each_llm(self) -> dict[str, TaskDocument]:
        """A question for each LLM, under the LLM's name: its own keys and those that all LLMs share.

        Raises InputError where the question is of one LLM.
        """
        if not self.has_several_llms:
            raise InputError(f"{self.path}: llms: missing; this question is of one LLM")
        document = _without_traces_in_memory(self.document)
        shared = {key: document[key] for key in SHARED if key in document}
        return {
            entry.name: changed(self, document={**entry.own, **shared}, is_as_read=False)
            for entry in parse_entries(document, self.path, self.catalog)
        }

    def replace(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> TaskDocument:
        """This question with other values: `replace({"slo.ttft.p90": "3 s"})`, or
        `replace(objective="power")`.

        A key is a dotted path; None takes it out. Raises InputError for a path that slo.yaml does not know,
        naming the nearest, and for a value that it refuses.
        """
        document = dict(self.document)
        for path, value in {**(changes or {}), **more}.items():
            where = f"replace {path!r}"
            if not all(keys_of(path)):  # Some key is empty, as in "slo..p90".
                raise InputError(f"{where}: expected a path such as slo.ttft.p90")
            if value is None:
                _check_key_exists(document, path, where)
            document = with_value(document, path, value, where=where)
        return _checked(changed(self, document=document, is_as_read=False))

    def __repr__(self) -> str:
        return f"# {self.path}\n{to_yaml(dict(self.document))}"


def read_task(
    task: TaskDocument | Mapping[str, Any] | str | Path | None = None,
    catalog: CatalogLike = None,
    **keys: Unpack[TaskKeys],
) -> TaskDocument:
    """The question in a file slo.yaml or in a mapping of its keys; `keys` replace keys of the same name.

    A mapping without `llm` is the section `slo` alone: read_task({"ttft": {"p90": "2 s"}}, llm="...").
    Raises InputError for what slo.yaml does not know or refuses.
    """
    if isinstance(task, TaskDocument):
        question = task if catalog is None else changed(task, catalog=read_catalog(catalog))
    elif task is None or isinstance(task, Mapping):
        catalog_rows = read_catalog(catalog)
        question = TaskDocument(with_config(_with_slo_section(task), Path(), catalog_rows), catalog_rows)
    elif isinstance(task, str | Path):
        catalog_rows, path = read_catalog(catalog), Path(task)
        document = with_config(read_yaml(path), path.parent, catalog_rows)
        question = TaskDocument(document, catalog_rows, path, is_as_read=True)
    else:
        raise InputError(f"slo: expected a file, or keys and values, found {type(task).__name__}")
    if keys:
        document = with_config({**question.document, **keys}, question.path.parent, question.catalog)
        question = changed(question, document=document, is_as_read=False)
    return _checked(question)


def replace(task: Any, changes: Mapping[str, Any] | str, value: Any = None) -> TaskDocument:
    """A question with one value changed, for sweeps: replace(task, "slo.ttft.p90", "3 s").

    `task` is what `read_task` takes, or a plan that `plan` found: the result is then that plan's question,
    changed. Several values at once: replace(task, {"slo.ttft.p90": "3 s", "objective": "power"}).
    """
    # A plan (results.PlanResult) has an attribute `question`, and its `replace` returns a TaskDocument too.
    question = task if hasattr(task, "question") else read_task(task)
    replaced: TaskDocument = question.replace({changes: value} if isinstance(changes, str) else changes)
    return replaced


def is_question(document: Mapping[str, Any]) -> bool:
    """Whether these are the keys of slo.yaml, not those of its section `slo` alone."""
    return not {"llm", "llms", "slo", "preset"}.isdisjoint(document)


def _with_slo_section(document: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The keys of slo.yaml; a `document` that is the section `slo` alone becomes {"slo": document}."""
    if document is None or is_question(document):
        return document or {}
    return {"slo": document}


def _checked(question: TaskDocument) -> TaskDocument:
    """The same question; raises InputError for a value that slo.yaml refuses."""
    if question.has_several_llms:
        parse_entries(_without_traces_in_memory(question.document), question.path, question.catalog)
    else:
        question.task()
    return question


def _without_traces_in_memory(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without traces of its `llms` that are DataFrames: the parser knows only names of files.
    (`planning.questions_of` reads these DataFrames.)
    """
    entries = document["llms"]
    if not isinstance(entries, Mapping):
        return dict(document)  # The parser refuses it with a message.
    llms = {}
    for name, entry in entries.items():
        is_mapping_with_frame = isinstance(entry, Mapping) and not isinstance(entry.get("trace", ""), str)
        llms[name] = {key: entry[key] for key in entry if key != "trace"} if is_mapping_with_frame else entry
    return {**document, "llms": llms}


def _check_key_exists(document: Mapping[str, Any], path: str, where: str) -> None:
    """Raise InputError, which names the nearest key, if the document has no value at a dotted path."""
    section: Any = document
    for key in spelled_keys(document, path):
        if not isinstance(section, Mapping) or key not in section:
            keys = list(section) if isinstance(section, Mapping) else []
            raise InputError(
                f"{where}: there is no {key!r} to take out; {did_you_mean(key, keys)}Found: {', '.join(keys)}"
            )
        section = section[key]
