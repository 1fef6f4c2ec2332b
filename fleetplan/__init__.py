"""Capacity planner for LLM serving, from Python.

    import fleetplan

    found = fleetplan.plan("slo.yaml", "trace.csv")
    found.cost_usd_per_h, found.workers
    found.save("out/")

A name is loaded when it is first used, so importing this package costs next to nothing: `plan` starts here.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from planner import __version__ as __version__
    from planner.errors import CatalogError as CatalogError
    from planner.errors import ExtrapolationError as ExtrapolationError
    from planner.errors import InfeasibleError as InfeasibleError
    from planner.errors import InputError as InputError
    from planner.errors import OutOfTimeError as OutOfTimeError
    from planner.errors import PlannerError as PlannerError
    from planner.errors import TraceError as TraceError
    from planner.face.days import day as day
    from planner.face.inputs import read_catalog as read_catalog
    from planner.face.inputs import read_fleet as read_fleet
    from planner.face.inputs import read_trace as read_trace
    from planner.face.planning import plan as plan
    from planner.face.planning import read_plan as read_plan
    from planner.face.questions import read_task as read_task
    from planner.face.questions import replace as replace
    from planner.face.scheduling import schedule as schedule
    from planner.face.simulating import compare as compare
    from planner.face.simulating import goodput as goodput
    from planner.face.simulating import simulate as simulate
    from planner.face.validating import validate as validate
    from planner.face.watching import watch as watch
    from planner.face.working import working_on as working_on

_HOME = {
    "CatalogError": "planner.errors",
    "ExtrapolationError": "planner.errors",
    "InfeasibleError": "planner.errors",
    "InputError": "planner.errors",
    "OutOfTimeError": "planner.errors",
    "PlannerError": "planner.errors",
    "TraceError": "planner.errors",
    "__version__": "planner",
    "compare": "planner.face.simulating",
    "day": "planner.face.days",
    "goodput": "planner.face.simulating",
    "plan": "planner.face.planning",
    "read_catalog": "planner.face.inputs",
    "read_fleet": "planner.face.inputs",
    "read_plan": "planner.face.planning",
    "read_task": "planner.face.questions",
    "read_trace": "planner.face.inputs",
    "replace": "planner.face.questions",
    "schedule": "planner.face.scheduling",
    "simulate": "planner.face.simulating",
    "validate": "planner.face.validating",
    "watch": "planner.face.watching",
    "working_on": "planner.face.working",
}
__all__ = list(_HOME)


def check_planner() -> None:
    """Raises ImportError where another project's `planner` was installed over ours, or comes before it."""
    try:
        import planner
    except ImportError:
        found = "none is installed"
    else:
        if getattr(planner, "DISTRIBUTION", None) == "fleetplan":
            return
        found = f"{planner.__file__ or planner.__path__} is another project's"
    raise ImportError(
        f"fleetplan needs its own package `planner`, but {found}. Install fleetplan in an environment of its "
        "own: pipx install fleetplan, or uv tool install fleetplan"
    )


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_planner()
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
