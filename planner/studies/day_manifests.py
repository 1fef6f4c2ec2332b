"""The manifests that run the controller that a day chose, for every target that can."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from planner.controllers.cron import Cron
from planner.controllers.settings import Settings
from planner.controllers.table import Chosen
from planner.errors import InputError
from planner.manifests import autoscaling
from planner.manifests.autoscaling import Autoscaler, ScaledPool
from planner.manifests.autoscaling.autoscaler import timetable_of
from planner.studies.day import DayAnswer

DRAIN_S = 90.0  # where nothing limits draining


def manifests(answer: DayAnswer) -> dict[str, str]:
    """manifests/TARGET/... for the winner; where none can be written, a README that says why."""
    asked, max_model_len = autoscaler(answer), int(longest_tokens(answer))
    files: dict[str, str] = {}
    refused: list[str] = []
    for target in autoscaling.PAIRS.get(asked.controller, {}):
        try:
            found = autoscaling.render(answer.question.fleet, max_model_len, target, asked)
        except InputError as error:
            refused.append(f"- {target}: {error}")
            continue
        files |= {f"manifests/{target}/{path}": text for path, text in found.items()}
    if refused or not files:
        told = "\n".join(refused) or f"Nothing here runs {asked.controller}."
        files["manifests/README.md"] = f"# Targets without a manifest of {asked.controller}\n\n{told}\n"
    return files


def longest_tokens(answer: DayAnswer) -> int:
    """Of the longest request of the traffic."""
    trace = answer.question.trace
    return int((trace.input_tokens + trace.output_tokens).max())


def autoscaler(answer: DayAnswer) -> Autoscaler:
    """The winner as manifests take it: its settings by their fields, and what the plan found out."""
    winner, question = answer.winner, answer.question
    assert winner.chosen is not None
    parameters = {**winner_settings(winner.chosen), **_found_out(answer)}
    pools = tuple(
        ScaledPool(
            name=pool.name,
            role=pool.role,
            least=each.least,
            most=each.most,
            size=pool.count,
            timetable=_timetable(answer, p),
            start_s=each.start_s,
            drain_s=min(each.drain_limit_s, DRAIN_S),
        )
        for p, (pool, each) in enumerate(zip(question.fleet.pools, question.pools, strict=True))
    )
    return Autoscaler(winner.name, parameters, pools)


def winner_settings(chosen: Chosen) -> Mapping[str, object]:
    """By the names of the fields, those of prefill and decode workers apart."""

    def fields(settings: Settings) -> dict[str, object]:
        return {each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)}

    return fields(chosen.settings) | {str(role): fields(own) for role, own in chosen.by_role.items()}


def _found_out(answer: DayAnswer) -> dict[str, object]:
    """What the plan knows that a controller follows: the table of capacity, the limits of the SLO."""
    name, table, found = answer.winner.name, answer.capacity, dict[str, object]()
    if table is not None and name in ("fleetplan", "forecast", "aladdin"):
        found |= {"rates_rps": table.rates_rps.tolist(), "sizes": table.sizes.tolist()}
    if name == "dynamo-sla":
        for key, metrics in (("ttft_s", ("ttft", "e2e")), ("tpot_s", ("tpot", "tbt"))):
            limits_s = [limit.limit_s for limit in answer.question.slo.limits if limit.metric in metrics]
            found |= {key: min(limits_s)} if limits_s else {}
    return found


def _timetable(answer: DayAnswer, p: int) -> tuple[tuple[int, int], ...]:
    """Of a pool under cron; none under others."""
    controller, pool = answer.winner.controller, answer.question.pools[p]
    if not isinstance(controller, Cron):
        return ()
    return timetable_of(controller.windows, p, least=pool.least, most=pool.most)
