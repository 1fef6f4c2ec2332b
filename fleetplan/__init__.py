"""Capacity planner for LLM serving, from Python.

    import fleetplan

    answer = fleetplan.plan("slo.yaml", "trace.csv")
    answer.cost_usd_per_h, answer.workers
    answer.save("out/")

A name is loaded when it is first used, so importing this package costs next to nothing: `plan` starts here.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fleetplan import errors as errors
    from planner import __version__ as __version__
    from planner.api.catalog_frames import catalog as catalog
    from planner.api.inputs import read_fleet as read_fleet
    from planner.api.inputs import read_trace as read_trace
    from planner.api.manifesting import manifests as manifests
    from planner.api.planning import plan as plan
    from planner.api.planning import read_plan as read_plan
    from planner.api.questions import read_task as read_task
    from planner.api.questions import replace as replace
    from planner.api.scheduling import schedule as schedule
    from planner.api.simulating import compare as compare
    from planner.api.simulating import goodput as goodput
    from planner.api.simulating import simulate as simulate
    from planner.api.studying import pareto as pareto
    from planner.api.studying import replan as replan
    from planner.api.studying import sensitivity as sensitivity
    from planner.api.studying import what_if as what_if
    from planner.api.validating import validate as validate
    from planner.api.watch_api import watch as watch
    from planner.api.working import working_on as working_on
    from planner.day.day_api import day as day
    from planner.documents.catalog import read_catalog as read_catalog
    from planner.errors import CatalogError as CatalogError
    from planner.errors import ExtrapolationError as ExtrapolationError
    from planner.errors import InfeasibleError as InfeasibleError
    from planner.errors import InputError as InputError
    from planner.errors import OutOfTimeError as OutOfTimeError
    from planner.errors import PlannerError as PlannerError
    from planner.errors import TraceError as TraceError

_HOME = {
    "CatalogError": "planner.errors",
    "ExtrapolationError": "planner.errors",
    "InfeasibleError": "planner.errors",
    "InputError": "planner.errors",
    "OutOfTimeError": "planner.errors",
    "PlannerError": "planner.errors",
    "TraceError": "planner.errors",
    "__version__": "planner",
    "catalog": "planner.api.catalog_frames",
    "compare": "planner.api.simulating",
    "day": "planner.day.day_api",
    "goodput": "planner.api.simulating",
    "manifests": "planner.api.manifesting",
    "pareto": "planner.api.studying",
    "plan": "planner.api.planning",
    "read_catalog": "planner.documents.catalog",
    "read_fleet": "planner.api.inputs",
    "read_plan": "planner.api.planning",
    "read_task": "planner.api.questions",
    "read_trace": "planner.api.inputs",
    "replace": "planner.api.questions",
    "replan": "planner.api.studying",
    "schedule": "planner.api.scheduling",
    "sensitivity": "planner.api.studying",
    "simulate": "planner.api.simulating",
    "validate": "planner.api.validating",
    "watch": "planner.api.watch_api",
    "what_if": "planner.api.studying",
    "working_on": "planner.api.working",
}
__all__ = list(_HOME)


def check_planner() -> None:
    """Raises ImportError where another project's `planner` was installed over ours, or comes before it."""
    try:
        import planner
    except ImportError:
        installed = "none is installed"
    else:
        if getattr(planner, "DISTRIBUTION", None) == "fleetplan":
            return
        installed = f"{planner.__file__ or planner.__path__} is another project's"
    raise ImportError(
        f"fleetplan needs its own package `planner`, but {installed}. Install fleetplan in an "
        "environment of its "
        "own: pipx install fleetplan, or uv tool install fleetplan"
    )


def __getattr__(name: str) -> object:
    if name not in (*_HOME, "errors"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_planner()
    from importlib import import_module

    if name == "errors":
        return import_module("fleetplan.errors")
    exported = globals()[name] = getattr(import_module(_HOME[name]), name)
    return exported


def __dir__() -> list[str]:
    return __all__
