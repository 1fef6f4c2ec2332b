"""Turns a controller that was simulated into the autoscaler that is deployed."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from planner.day.autoscaling.autoscaler import Autoscaler, ScaledPool, timetable_of
from planner.day.autoscaling.by_load import pool_rule
from planner.day.autoscaling.node_filling import RentedNode
from planner.day.controllers.cron import Cron
from planner.day.controllers.keda import KedaSettings
from planner.day.controllers.knowledge import Knowledge
from planner.day.controllers.planned import FleetplanSettings
from planner.day.controllers.settings import ControllerSettings
from planner.day.controllers.static import Static, StaticSettings
from planner.day.controllers.table import ChosenController
from planner.day.controllers.windows import Window
from planner.errors import InputError
from planner.fleet import Role

USUAL_DRAIN_S = 3600.0  # Manifests need a limit on draining; this one if the simulation had none.


def autoscaler_of(
    chosen: ChosenController, knowledge: Knowledge, names: Sequence[str], sizes: Sequence[int]
) -> Autoscaler:
    """The autoscaler that does what a chosen controller does.

    `names` (P,) are those of the fleet's pools, `sizes` (P,) their sizes at the beginning.

    Raises InputError where the controller lacks what it needs, or has windows for some days of a week alone.
    """
    if not len(names) == len(sizes) == len(knowledge.pools):
        raise InputError(
            f"{chosen.row.name}: {len(names)} names and {len(sizes)} sizes of {len(knowledge.pools)} pools"
        )
    if isinstance(chosen.settings, StaticSettings):
        # A static controller asks for its sizes at once, so its autoscaler begins with them.
        controller = chosen(knowledge)  # A ChosenController makes a controller when it is called.
        assert isinstance(controller, Static)
        controller.start(sizes)
        sizes = controller.wanted
    windows = [_timetable_windows(chosen, knowledge, role) for role in knowledge.roles]
    pools = tuple(
        ScaledPool(
            name=names[i],
            role=knowledge.roles[i],
            least=pool.least,
            most=pool.most,
            size=int(sizes[i]),
            timetable=timetable_of(windows[i], i, least=pool.least, most=pool.most) if windows[i] else (),
            start_s=pool.start_s,
            drain_s=pool.drain_limit_s if math.isfinite(pool.drain_limit_s) else USUAL_DRAIN_S,
        )
        for i, pool in enumerate(knowledge.pools)
    )
    parameter_values: dict[str, Any] = _parameter_values(chosen.settings)
    # Settings that apply to the pools of one role only stand under the name of the role.
    parameter_values |= {role: _parameter_values(settings) for role, settings in chosen.by_role.items()}
    if knowledge.capacity is not None:
        parameter_values |= {
            "rates_rps": knowledge.capacity.rates_rps.tolist(),
            "sizes": knowledge.capacity.sizes.tolist(),
        }
    if isinstance(chosen.settings, FleetplanSettings):
        parameter_values |= _fleetplan_values(chosen.settings, knowledge)
    limits_s = {"ttft_s": knowledge.ttft_s, "tpot_s": knowledge.tpot_s}
    parameter_values |= {name: limit_s for name, limit_s in limits_s.items() if limit_s is not None}
    return Autoscaler(chosen.row.name, parameter_values, pools)


def _parameter_values(settings: ControllerSettings) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def _fleetplan_values(settings: FleetplanSettings, knowledge: Knowledge) -> dict[str, Any]:
    """The rules by load and the nodes that are sold whole, where they are known."""
    parameter_values: dict[str, Any] = {}
    if knowledge.rules and knowledge.engines:
        rules = (rule.with_floor(settings.floor_frac) for rule in knowledge.rules)
        parameter_values["rules"] = tuple(map(pool_rule, rules, knowledge.engines, knowledge.roles))
    if knowledge.nodes:
        parameter_values["nodes"] = tuple(
            None if node is None else RentedNode(kind=node[0], gpus=node[1], worker_gpus=gpus)
            for node, gpus in zip(knowledge.nodes, knowledge.gpus, strict=True)
        )
    return parameter_values


def _timetable_windows(chosen: ChosenController, knowledge: Knowledge, role: Role) -> tuple[Window, ...]:
    """The windows of the timetable that the controller has for pools of a role; empty if it has none. `cron`
    makes windows of earlier days if none were given.
    """
    settings = chosen.by_role.get(role, chosen.settings)
    if isinstance(settings, KedaSettings):
        return settings.cron
    controller = chosen(knowledge)
    return controller.windows if isinstance(controller, Cron) else ()
