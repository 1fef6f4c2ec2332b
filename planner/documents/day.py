"""`day:` in slo.yaml: how the pools of a fleet may change during a day, and who decides.

day:
  every: 10 min              # the grid on which the optimum changes sizes; the SLO's windows if left out
  controllers: {hpa: {metric: kv, target: 70 %}, keda: {}}     # or names: [hpa, keda]
  train: 70 %                # parameters are chosen on the first part of the traffic, the rest judges
  start: 4 min               # or  storage: nvme  for what catalogs/startup.yaml says
  warm: 1                    # so many workers start in  warm_start: 30 s
  drain: 10 min              # who is given up is stopped then, whatever it runs
  billing: second            # or hour: every started hour is paid
  least: 1                   # workers of every pool; most: 16
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.controllers.table import Chosen, parse_controllers
from planner.errors import InputError
from planner.io.values import Section, refused, share

KEYS = (
    *("every", "controllers", "train", "start", "storage", "warm", "warm_start", "drain", "billing"),
    *("least", "most"),
)
USUAL_EVERY_S = 600.0
USUAL = ("cron", "hpa", "keda", "knative", "wva", "dynamo", "dynamo-sla", "aladdin", "forecast", "fleetplan")
BILLED_S = {"second": 0.0, "hour": 3600.0}
LEAST_TRAIN_FRAC, MOST_TRAIN_FRAC = 0.05, 0.95


@dataclass(frozen=True, slots=True)
class DaySection:
    """How pools may change. None: `every_s` the SLO's windows, `start_s` what the catalog says of `storage`,
    `most` about twice what stands all day. `train_frac` 0: nothing is tuned, and all of the traffic judges.
    """

    controllers: tuple[Chosen, ...]
    every_s: float | None = None
    train_frac: float = 0.0
    start_s: float | None = None
    storage: str | None = None
    warm: int = 0
    warm_start_s: float = 0.0
    drain_limit_s: float = math.inf
    billed_s: float = BILLED_S["second"]
    least: int = 1
    most: int | None = None


def parse_day(document: Any, where: str = "day") -> DaySection:
    """The section, or what holds without one; raises InputError in one line."""
    asked = Section.of(document, where, KEYS, such_as="{every: 10 min, controllers: [hpa, keda]}")
    if "start" in asked and "storage" in asked:
        raise InputError(f"{asked.at('start')}: says what storage would tell; drop one of the two")
    chosen = parse_controllers(asked.get("controllers", list(USUAL)), asked.at("controllers"))
    most = asked.whole("most", None)
    least = asked.whole("least", 1, least=0)
    if most is not None and most < least:
        raise refused(asked.at("most"), f"must be at least least ({least})", most)
    return DaySection(
        controllers=chosen,
        every_s=asked.positive("every", "s", None),
        train_frac=parse_train(asked.get("train"), asked.at("train")),
        start_s=asked.at_least("start", "s", None),
        storage=asked.text("storage", None),
        warm=asked.whole("warm", 0, least=0),
        warm_start_s=asked.at_least("warm_start", "s", 0.0),
        drain_limit_s=asked.positive("drain", "s", math.inf),
        billed_s=BILLED_S[asked.one_of("billing", BILLED_S, "second")],
        least=least,
        most=most,
    )


def parse_train(value: object, where: str) -> float:
    """The share of the traffic that tunes: "70 %", or "first 70 %"; 0 where nothing does."""
    if value is None:
        return 0.0
    if isinstance(value, str):
        value = value.strip().removeprefix("first ").strip()
    found = share(value, where)
    if not LEAST_TRAIN_FRAC <= found <= MOST_TRAIN_FRAC:
        raise refused(where, "expected 5 % to 95 %: both parts need traffic", value)
    return found


def day_of(document: Mapping[str, Any], where: str) -> DaySection:
    """That of a whole question."""
    return parse_day(document.get("day"), f"{where}: day")
