"""From the inputs of the page Day to the section `day` of slo.yaml and the command, and back.

Spans are in seconds, `train` is in %; None is an input left empty. What the section says of a controller's
parameters, which no input shows, is in `parameters`, so that nothing is lost. `start_s` takes the place of
`storage` and `image`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.controllers.table import CONTROLLERS
from planner.documents.day import ALL_FLEETS, BILLED_S, USUAL_IMAGE, USUAL_STORAGE, DaySection, parse_day
from ui.question import Asked
from ui.store import Document

USUAL_LIMIT_S = 120  # It is the default of `plan day --time-limit`.
SPANS = {"every": "every_s", "start": "start_s", "warm_start": "warm_start_s", "drain": "drain_s"}
"""The keys of the section that are spans, by their inputs."""
NO_IMAGE = "none"  # The nodes have the image already.
STATIC = "static"
OFFERED = tuple(name for name in CONTROLLERS if name != STATIC)  # The static fleet always runs.
WORDS = tuple((name, CONTROLLERS[name].words) for name in OFFERED)


def of_section(given: object) -> Asked:
    """The inputs that ask what a section asks, or what holds without one; raises what `parse_day` raises."""
    section: DaySection = parse_day(given, "slo.yaml: day")
    whole = given if isinstance(given, Mapping) else {}
    named = whole.get("controllers")
    own = {name: dict(value) for name, value in named.items() if value} if isinstance(named, Mapping) else {}
    billing = next(name for name, unit_s in BILLED_S.items() if unit_s == section.billed_s)
    return {
        "controllers": [each.row.name for each in section.controllers if each.row.name != STATIC],
        "parameters": own,
        "every_s": section.every_s,
        "train": float(f"{100 * section.train_frac:.12g}") or None,
        "start_s": section.start_s,
        "storage": section.storage,
        "image": NO_IMAGE if section.image is None else section.image,
        "warm": section.warm,
        "warm_start_s": section.warm_start_s,
        "drain_s": None if math.isinf(section.drain_limit_s) else section.drain_limit_s,
        "billing": billing,
        "least": section.least,
        "most": section.most,
        "missed_usd": section.missed_usd,
        "optimum": section.optimum,
        "fleets": section.fleets,
    }


def section(asked: Mapping[str, Any]) -> Document:
    """`day` of slo.yaml; what is left empty is left out."""
    chosen, own = asked["controllers"] or [STATIC], asked["parameters"]
    has_own = any(name in own for name in chosen)
    found: Document = {"controllers": {name: own.get(name, {}) for name in chosen} if has_own else chosen}
    spans = {key: asked[name] for key, name in SPANS.items()}
    found |= {key: f"{value:.12g} s" for key, value in spans.items() if value is not None}
    if asked["train"]:
        found["train"] = f"{asked['train']:.12g} %"
    found |= {key: asked[key] for key in ("billing", "least", "most") if asked[key] is not None}
    found |= {"warm": asked["warm"]} if asked["warm"] else {}
    if asked["missed_usd"] is not None:
        found["missed_window"] = asked["missed_usd"]
    found |= {} if asked["optimum"] else {"optimum": False}
    found |= {} if asked["fleets"] == ALL_FLEETS else {"fleets": asked["fleets"]}
    if "start" not in found:
        usual = {"storage": USUAL_STORAGE, "image": USUAL_IMAGE}
        found |= {key: asked[key] for key, value in usual.items() if asked[key] != value}
    return found


def document(question: Mapping[str, Any], asked: Mapping[str, Any]) -> Document:
    """A whole slo.yaml: a question at the rate and with the section of the inputs."""
    whole = {key: value for key, value in question.items() if key != "day"}
    traffic = {key: value for key, value in (whole.get("traffic") or {}).items() if key != "rate"}
    traffic |= {"rate": asked["rate"]} if asked["rate"] is not None else {}
    return whole | ({"traffic": traffic} if traffic else {}) | {"day": section(asked)}


def command(
    asked: Mapping[str, Any], catalog_folder: Path | None = None, *, stands: bool, is_described: bool = False
) -> str:
    """What gives the same answer on a command line, beside slo.yaml, the trace unless slo.yaml describes the
    traffic, and plan.yaml if it stands.
    """
    found = ["plan", "day", "--slo", "slo.yaml"]
    found += [] if is_described else ["--trace", asked["trace"].partition("/")[2]]
    found += ["--fleet", "plan.yaml"] if stands else []
    found += ["--seed", str(asked["seed"])] if asked["seed"] else []
    found += ["--time-limit", str(asked["time_limit"])] if asked["time_limit"] != USUAL_LIMIT_S else []
    found += ["--catalog", str(catalog_folder)] if catalog_folder else []
    return shlex.join([*found, "-o", "out/"])
