"""The JSON Schemas of what commands print with --json (planner/documents/answers.py)."""

from __future__ import annotations

from typing import Any

from planner.documents import answers
from planner.documents.certificate import IN_SENTENCES, Certificate
from planner.documents.schemas.typed import fact_schema, schema_of
from planner.documents.schemas.values import Schema

ANSWERS: dict[str, Any] = {
    "simulate": answers.SimulationAnswer,
    "goodput": answers.GoodputAnswer,
    "what-if": answers.WhatIfAnswer,
    "compare": answers.CompareAnswer,
    "infeasible": answers.InfeasibleAnswer,
    "error": answers.ErrorAnswer,
}


def answer_schema(name: str) -> Schema:
    """The schema of the answer of the command `name`, or of "infeasible" or "error"."""
    if name == "plan":
        return _plan_answer()
    return schema_of(ANSWERS[name])


def _plan_answer() -> Schema:
    """The schema of a plan, with those of its certificate and of every fact."""
    schema = schema_of(answers.PlanAnswer)
    certificate, fact = schema_of(Certificate), fact_schema()
    parts = schema["$defs"] | certificate["$defs"] | fact.pop("$defs")
    parts["Fact"] = fact
    _adapt_certificate(parts["Certificate"]["properties"])
    plan = parts["PlanAnswer"]["properties"]
    plan["certificate"] = {"$ref": "#/$defs/Certificate"}
    plan["facts"]["additionalProperties"]["items"] = {"$ref": "#/$defs/Fact"}
    return {"$ref": schema["$ref"], "$defs": dict(sorted(parts.items()))}


def _adapt_certificate(certificate: dict[str, Schema]) -> None:
    """Change the schema where `certificate_document` writes other values than those of the fields: sentences
    in place of facts, shares, and reasons.
    """
    sentences: Schema = {"type": "array", "items": {"type": "string"}}
    certificate |= dict.fromkeys(IN_SENTENCES, sentences)
    certificate["refuted"] = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "reason": {"type": "string"},
                "because": {"$ref": "#/$defs/Fact"},
            },
            "required": ["label", "reason", "because"],
        },
    }
    certificate |= {key: {"type": "number"} for key in ("gap_frac", "level0_gap_frac")}
