"""Names of what recording rules of Prometheus record, by the LLM and the pool that they are of."""

from __future__ import annotations

from planner.day.autoscaling import prometheus_queries
from planner.day.autoscaling.autoscaler import Document
from planner.day.autoscaling.scale_targets import ScaleTarget

LLM = "fleetplan_llm"
# A rule has a term for each of its edges, and Prometheus reads the whole expression each time.
MOST_STEPS = 200


def recording_rule(name: str, expr: str, labels: dict[str, str]) -> Document:
    """One Prometheus recording rule: its name, its expression and its labels."""
    return {"record": name, "expr": expr, "labels": labels}


def llm_series(name: str, app: str) -> str:
    """An instant vector of what was recorded of the whole LLM."""
    return f'{name}{{{LLM}="{app}"}}'


def pool_series(name: str, app: str, target: ScaleTarget) -> str:
    """An instant vector of what was recorded of a pool."""
    return f'{name}{{{LLM}="{app}",{prometheus_queries.POOL}="{target.name}"}}'
