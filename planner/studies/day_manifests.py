"""The manifests that run the controller that a day chose, for every target that can."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from planner.controllers.cron import Cron
from planner.controllers.deployment import DAY_S
from planner.controllers.settings import Settings
from planner.controllers.table import Chosen
from planner.errors import InputError
from planner.manifests import autoscaling
from planner.manifests.autoscaling import Autoscaler, ScaledPool
from planner.solvers.worker_rule import fit_worker_rule
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
    """What the plan knows that a controller follows: the table of capacity, the rule made of it, the SLO."""
    found: dict[str, object] = {}
    name, table, slo = answer.winner.name, answer.capacity, answer.question.slo
    if table is not None and name in ("fleetplan", "forecast"):
        found = {"rates_rps": table.rates_rps.tolist(), "sizes": table.sizes.tolist()}
    elif table is not None and name == "aladdin":
        rules = [fit_worker_rule(table.rates_rps, column, covers=True) for column in table.sizes.T.tolist()]
        found = {
            "slope": [rule.slope_workers_per_rps for rule in rules],
            "offset": [rule.offset_workers for rule in rules],
        }
    elif name == "dynamo-sla":
        for key, metrics in (("ttft_s", ("ttft", "e2e")), ("tpot_s", ("tpot", "tbt"))):
            limits_s = [limit.limit_s for limit in slo.limits if limit.metric in metrics]
            found |= {key: min(limits_s)} if limits_s else {}
    return found


def _timetable(answer: DayAnswer, p: int) -> tuple[tuple[int, int], ...]:
    """Of a pool under cron: the second of the day, and workers from then on, the most of all days."""
    controller = answer.winner.controller
    if not isinstance(controller, Cron):
        return ()
    windows = controller.windows
    bounds = sorted({int(edge_s % DAY_S) for each in windows for edge_s in (each.begin_s, each.end_s)})
    pool, found = answer.question.pools[p], list[tuple[int, int]]()
    for begin in bounds or [0]:
        sizes = [
            each.workers_of(p) for each in windows if any(each.holds(day * DAY_S + begin) for day in range(7))
        ]
        size = min(max([pool.least, *sizes]), pool.most)
        if not found or found[-1][1] != size:
            found.append((begin, size))
    return tuple(found)
