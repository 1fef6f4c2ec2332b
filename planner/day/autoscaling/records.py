"""Names of what recording rules of Prometheus record, by the LLM and the pool that they are of."""

from __future__ import annotations

from planner.day.autoscaling import prometheus_queries
from planner.day.autoscaling.autoscaler import Document
from planner.day.autoscaling.scale_targets import ScaleTarget

LLM = "fleetplan_llm"
ROUNDING = 1e-9  # of a product, before it is rounded up
MOST_STEPS = 200  # of one rule


def recording_rule(name: str, expr: str, labels: dict[str, str]) -> Document:
    """One Prometheus recording rule: its name, its expression and its labels."""
    return {"record": name, "expr": expr, "labels": labels}


def of_llm(name: str, app: str) -> str:
    """What was recorded of the whole LLM, an instant vector."""
    return f'{name}{{{LLM}="{app}"}}'


def of_pool(name: str, app: str, place: ScaleTarget) -> str:
    """What was recorded of a pool, an instant vector."""
    return f'{name}{{{LLM}="{app}",{prometheus_queries.POOL}="{place.name}"}}'
