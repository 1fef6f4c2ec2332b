"""`day:` in slo.yaml: how the pools of a fleet may change during a day, and which controllers decide.

day:
  every: 10 min              # the grid from which the optimum starts; the SLO's windows if left out
  controllers: {hpa: {metric: kv, target: 70 %}, keda: {}}     # or names: [hpa, keda]
  train: 70 %                # parameters are chosen on the first 70 % of the traffic, the rest judges
  start: 4 min               # or, by catalogs/startup.yaml,  storage: nvme-raid0  and  image: none
  warm: 1                    # one worker at a time may start from a warm pool, in  warm_start: 30 s
  drain: 10 min              # a removed worker may finish its requests for this long
  billing: second            # or hour: every started hour is paid; or day (`is_paid_all_day`)
  least: 1                   # workers of every pool, see DaySection; most: 16
  missed_window: 5           # USD that a missed window adds to a bill when controllers are compared
  missed: 1 %                # or the best is the cheapest that misses no larger share of the windows
  optimum: true              # or false: no search for the optimum
  oracle: true               # public autoscalers, tuned on the first 70 %; manifests of all of them
  sleep: 1                   # or 2: workers of several LLMs sleep (vLLM's levels) on GPUs paid all day
  fleets: all                # or plan: only the cheapest fleet of constant size, without alternatives
  types: change              # the optimum may also change worker types and roles; or fixed: it may not
"""

import math
from dataclasses import dataclass
from typing import Any

from planner.day.controllers.static import StaticSettings
from planner.day.controllers.table import ChosenController, parse_controllers
from planner.errors import InputError
from planner.files.document_values import Section, read_share, refused_value

KEYS = (
    *("every", "controllers", "train", "start", "storage", "warm", "warm_start", "drain", "billing"),
    *("image", "least", "most", "missed_window", "missed", "optimum", "fleets", "types", "oracle", "sleep"),
)
USUAL_EVERY_S = 600.0  # The windows by which a day is judged if its SLO has none.
# Controllers where `controllers:` is left out.
USUAL = ("cron", "hpa", "keda", "knative", "wva", "dynamo", "dynamo-sla", "aladdin", "forecast", "fleetplan")
# Public autoscalers: `plan day --oracle` tunes them on the first ORACLE_TRAIN, and judges on the rest.
AUTOSCALERS = ("hpa", "keda", "wva", "dynamo", "dynamo-sla")
ORACLE_TRAIN = "70 %"
USUAL_STORAGE, USUAL_IMAGE = "object-store-to-disk", "registry"  # A new node has neither weights nor image.
SLEEP_STORAGE = "nvme-raid0"  # Where an engine of sleep level 2 has its weights: it stays on its node.
NEVER_WITH_SLEEP = ("start", "image", "warm", "warm_start")  # Keys about workers that start, not wake.
ALL_FLEETS, PLAN_ALONE = "all", "plan"  # Values of the key `fleets`.
CHANGE_TYPES, FIXED_TYPES = "change", "fixed"  # Values of the key `types`.
BILLED_S = {"second": 0.0, "hour": 3600.0}
ALL_DAY = "day"
BILLINGS = (*BILLED_S, ALL_DAY)
LEAST_TRAIN_FRAC, MOST_TRAIN_FRAC = 0.05, 0.95  # Both parts of the traffic must have requests enough.


@dataclass(frozen=True, slots=True)
class DaySection:
    """How pools may change, and which controllers decide.

    Where a field is None, `every_s` comes from the SLO's windows, `start_s` from the catalog by `storage` and
    `image`, `most` from the static fleet (about twice its size), and `missed_usd` from what that fleet costs
    in a window. An `image` of None means that nodes have the image already. With a `train_frac` of 0 nothing
    is tuned, and all of the traffic judges. With `is_paid_all_day`, for several LLMs, the peak number of GPUs
    in use is paid for the whole traffic. `is_least_given` matters only to the optimum
    (`DayQuestion.optimum_pools`). With `types` of None the optimum may change worker types if the compared
    fleets have several.
    """

    controllers: tuple[ChosenController, ...]
    every_s: float | None = None
    train_frac: float = 0.0
    start_s: float | None = None
    storage: str = USUAL_STORAGE
    image: str | None = USUAL_IMAGE
    warm: int = 0
    warm_start_s: float | None = None
    drain_limit_s: float = math.inf
    billed_s: float = BILLED_S["second"]
    least: int = 1
    is_least_given: bool = False
    most: int | None = None
    missed_usd: float | None = None
    missed_frac: float | None = None
    optimum: bool = True
    fleets: str = ALL_FLEETS
    types: str | None = None
    is_oracle: bool = False
    sleep_level: int = 0
    is_paid_all_day: bool = False


def _parse_controllers(section: Section, usual: list[str]) -> tuple[ChosenController, ...]:
    """The controllers of the section `day`. Sizes for `static` are refused: they are those of the fleet."""
    where = section.path_of("controllers")
    chosen = parse_controllers(section.get("controllers", usual), where)
    if any(isinstance(each.settings, StaticSettings) and each.settings.workers for each in chosen):
        raise InputError(
            f"{where}: static: workers: a day's static sizes are those of its fleet; give `plan day` a fleet "
            "of these sizes (--fleet), or a cron with one window"
        )
    return chosen


def parse_day(document: Any, where: str = "day") -> DaySection:
    """Read the section `day:`, with defaults for keys that it leaves out; raises InputError."""
    section = Section.from_document(
        document, where, KEYS, such_as="{every: 10 min, controllers: [hpa, keda]}"
    )
    for key in ("storage", "image"):
        if "start" in section and key in section:
            raise section.error("start", f"says what {key} would tell; drop one of the two")
    image = section.text("image", USUAL_IMAGE)
    sleep_level, billing = parse_sleep(section)
    if "missed" in section and "missed_window" in section:
        raise section.error("missed", "says what missed_window would; drop one of the two")
    is_oracle = section.flag("oracle", False)
    train = section.get("train", ORACLE_TRAIN if is_oracle else None)
    usual = list(AUTOSCALERS if is_oracle else USUAL)
    chosen = _parse_controllers(section, usual)
    most = section.whole_number("most", None)
    least = section.whole_number("least", 1, least=0)
    if most is not None and most < least:
        raise section.refused("most", f"must be at least least ({least})", most)
    return DaySection(
        controllers=chosen,
        every_s=section.positive("every", "s", None),
        train_frac=parse_train(train, section.path_of("train")),
        start_s=section.at_least("start", "s", None),
        storage=section.text("storage", SLEEP_STORAGE if sleep_level else USUAL_STORAGE),
        image=None if image == "none" else image,
        warm=section.whole_number("warm", 0, least=0),
        warm_start_s=section.at_least("warm_start", "s", None),
        drain_limit_s=section.positive("drain", "s", math.inf),
        billed_s=BILLED_S.get(billing, 0.0),
        least=least,
        is_least_given="least" in section,
        most=most,
        missed_usd=section.number("missed_window", None, least=0.0),
        missed_frac=section.share("missed", None),
        optimum=section.flag("optimum", True),
        fleets=section.one_of("fleets", (ALL_FLEETS, PLAN_ALONE), ALL_FLEETS),
        types=section.one_of("types", (CHANGE_TYPES, FIXED_TYPES), None),
        is_oracle=is_oracle,
        sleep_level=sleep_level,
        is_paid_all_day=billing == ALL_DAY,
    )


def parse_sleep(section: Section) -> tuple[int, str]:
    """The level of vLLM's sleep mode (0: no sleep), and the billing, which is by the day if workers sleep."""
    sleep_level = section.whole_number("sleep", 0, least=0)
    if "sleep" in section and sleep_level not in (1, 2):
        raise section.refused("sleep", "expected 1 or 2, a level of vLLM's sleep mode", sleep_level)
    billing = section.one_of("billing", BILLINGS, ALL_DAY if sleep_level else "second")
    if sleep_level and billing != ALL_DAY:
        raise section.error("billing", "with sleep GPUs are paid all day; write day, or drop it")
    for key in NEVER_WITH_SLEEP:
        if sleep_level and key in section:
            raise section.error(key, "is for workers that start; with sleep they wake, so drop it")
    return sleep_level, billing


def parse_train(value: object, where: str) -> float:
    """The share of the traffic on which parameters are chosen: "70 %", or "first 70 %"; 0 for None."""
    if value is None:
        return 0.0
    if isinstance(value, str):
        value = value.strip().removeprefix("first ").strip()
    train_frac = read_share(value, where)
    if not LEAST_TRAIN_FRAC <= train_frac <= MOST_TRAIN_FRAC:
        raise refused_value(where, "expected 5 % to 95 %: both parts need traffic", value)
    return train_frac
