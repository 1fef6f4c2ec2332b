"""All JSON Schemas by the name of their file, for `plan schema` and the folder schemas/."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from planner.documents.catalog import Catalog
from planner.documents.schemas.answer_schemas import ANSWERS, answer_schema
from planner.documents.schemas.fleet_schema import fleet_schema, plan_schema
from planner.documents.schemas.slo_schema import slo_schema
from planner.documents.schemas.values import Schema

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_FILES: Mapping[str, tuple[Callable[[Catalog], Schema], str]] = {
    "slo": (slo_schema, "slo.yaml: the question of plan"),
    "fleet": (fleet_schema, "fleet.yaml: a fleet to simulate"),
    "plan": (plan_schema, "plan.yaml: the fleet of a plan"),
}
_TITLES = {
    "infeasible": "what stands in place of a plan, with --json, where no fleet keeps the SLO",
    "error": "what stands in place of any answer, with --json, where there is an error",
}
_ANSWERS = ("plan", *ANSWERS)
NAMES = (*_FILES, *(f"{name}-answer" for name in _ANSWERS))


def named_schema(name: str, catalog: Catalog) -> dict[str, Any]:
    """The schema of one of NAMES; GPUs and LLMs of the catalog are offered for completion."""
    if name in _FILES:
        make, title = _FILES[name]
        schema = make(catalog)
    else:
        answer = name.removesuffix("-answer")
        schema, title = answer_schema(answer), _TITLES.get(answer, f"the answer of plan {answer} --json")
    return {"$schema": DRAFT, "title": title, **schema}


def schema_text(name: str, catalog: Catalog) -> str:
    """The content of schemas/NAME.schema.json."""
    return json.dumps(named_schema(name, catalog), indent=1, ensure_ascii=False) + "\n"
