"""Recording rules of Prometheus: labels, series, and the defaults of the controllers that they follow."""

from __future__ import annotations

from planner.day.autoscaling import prometheus_queries
from planner.day.autoscaling.autoscaler import Autoscaler, Document
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers.aladdin_controller import AladdinSettings
from planner.day.controllers.forecast import ForecastSettings
from planner.day.controllers.planned import FleetplanSettings
from planner.day.controllers.settings import ControllerSettings

LLM = "fleetplan_llm"
# A rule has a term for each of its edges, and Prometheus reads the whole expression each time.
MOST_STEPS = 200
# A caller may make an Autoscaler without some parameters; plans give all. Defaults are those of the settings.
_USUAL: dict[str, ControllerSettings] = {
    "fleetplan": FleetplanSettings(),
    "forecast": ForecastSettings(),
    "aladdin": AladdinSettings(),
}
# Aladdin has no forecast and keeps no size, but its records have buckets, too.
_WITHOUT_FORECAST = {"bucket_s": 300.0, "hold_s": 0.0}


def usual_value(autoscaler: Autoscaler, name: str) -> float:
    """The default of a parameter of one of our controllers, by the field's name."""
    settings = _USUAL[autoscaler.controller]
    return float(getattr(settings, name) if hasattr(settings, name) else _WITHOUT_FORECAST[name])


def recording_rule(name: str, expr: str, labels: dict[str, str]) -> Document:
    """One Prometheus recording rule: its name, its expression and its labels."""
    return {"record": name, "expr": expr, "labels": labels}


def llm_series(name: str, app: str) -> str:
    """An instant vector of what was recorded of the whole LLM."""
    return f'{name}{{{LLM}="{app}"}}'


def pool_series(name: str, app: str, target: ScaleTarget) -> str:
    """An instant vector of what was recorded of a pool."""
    return f'{name}{{{LLM}="{app}",{prometheus_queries.POOL}="{target.name}"}}'
