"""From the inputs of the page Day to the section `day` of slo.yaml and the command, and back.

A form has an entry for every input of the page (ui/views/day.py, where labels say what each is). Spans are
in seconds; `train_percent` is a share of the traffic, `missed_percent` the share of the SLO's windows that
may be missed; None is an empty input. The entry `parameters` has the parameters of controllers, which have no
input, so that nothing is lost. If `start_s` is given, `storage` and `image` do not count.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.day.controllers.table import CONTROLLERS
from planner.day.day_settings import ALL_FLEETS, BILLED_S, USUAL_IMAGE, USUAL_STORAGE, DaySection, parse_day
from planner.search.oracle.work_clock import USUAL_LIMIT_S
from ui.question import Form, converted
from ui.store import Document

SPANS = {"every": "every_s", "start": "start_s", "warm_start": "warm_start_s", "drain": "drain_s"}
"""Key of the section -> entry of the form, for those that are spans."""
# Entries of forms that an earlier version stored -> their names in this version.
OLD_ENTRIES = {"train": "train_percent", "missed": "missed_percent"}
NO_IMAGE = "none"  # The nodes have the image already.
STATIC = "static"
OFFERED = tuple(name for name in CONTROLLERS if name != STATIC)  # The static fleet always runs.
WORDS = tuple((name, CONTROLLERS[name].words) for name in OFFERED)


def form_of_section(given: object) -> Form:
    """The form's entries for a section `day`, the defaults for None. Raises what `parse_day` raises."""
    section: DaySection = parse_day(given, "slo.yaml: day")
    controllers = given.get("controllers") if isinstance(given, Mapping) else None
    parameters: dict[str, Any] = {}
    if isinstance(controllers, Mapping):  # A list has names alone, with default parameters.
        parameters = {name: dict(value) for name, value in controllers.items() if value}
    billing = next(name for name, unit_s in BILLED_S.items() if unit_s == section.billed_s)
    return {
        "controllers": [each.row.name for each in section.controllers if each.row.name != STATIC],
        "parameters": parameters,
        "every_s": section.every_s,
        "train_percent": converted(section.train_frac, 100) or None,  # No training is an empty input.
        "start_s": section.start_s,
        "storage": section.storage,
        "image": NO_IMAGE if section.image is None else section.image,
        "warm": section.warm,
        "warm_start_s": section.warm_start_s,
        "drain_s": None if math.isinf(section.drain_limit_s) else section.drain_limit_s,
        "billing": billing,
        "least": section.least if section.is_least_given else None,
        "most": section.most,
        "missed_usd": section.missed_usd,
        "missed_percent": converted(section.missed_frac, 100),
        "optimum": section.optimum,
        "fleets": section.fleets,
        "types": section.types,
    }


def restore_form(stored: Mapping[str, Any]) -> Form:
    """A stored form, perhaps of an earlier version, with the entries of this version."""
    return form_of_section(None) | {OLD_ENTRIES.get(name, name): value for name, value in stored.items()}


def section(form: Mapping[str, Any]) -> Document:
    """The section `day` of slo.yaml; empty inputs are left out."""
    names, parameters = form["controllers"] or [STATIC], form["parameters"]
    with_parameters = {name: parameters.get(name, {}) for name in names}
    settings: Document = {"controllers": with_parameters if any(with_parameters.values()) else names}
    spans = {key: form[name] for key, name in SPANS.items()}
    settings |= {key: f"{value:.12g} s" for key, value in spans.items() if value is not None}
    if form["train_percent"]:
        settings["train"] = f"{form['train_percent']:.12g} %"
    settings |= {key: form[key] for key in ("billing", "least", "most") if form[key] is not None}
    settings |= {"warm": form["warm"]} if form["warm"] else {}
    if form["missed_usd"] is not None:
        settings["missed_window"] = form["missed_usd"]
    if form["missed_percent"] is not None:
        settings["missed"] = f"{form['missed_percent']:.12g} %"
    settings |= {} if form["optimum"] else {"optimum": False}
    settings |= {} if form["fleets"] == ALL_FLEETS else {"fleets": form["fleets"]}
    settings |= {} if form["types"] is None else {"types": form["types"]}
    if "start" not in settings:  # Storage and image only serve to compute the start-up time.
        defaults = {"storage": USUAL_STORAGE, "image": USUAL_IMAGE}
        settings |= {key: form[key] for key, default in defaults.items() if form[key] != default}
    return settings


def document(question: Mapping[str, Any], form: Mapping[str, Any], *, is_described: bool = False) -> Document:
    """A whole slo.yaml: a question with the rate and the section `day` of the inputs. Traffic that
    `is_described` keeps its own rate, or rates, where the input is empty.
    """
    whole = {key: value for key, value in question.items() if key != "day"}
    traffic = dict(whole.get("traffic") or {})
    if form["rate"] is not None:
        traffic["rate"] = form["rate"]
    elif not is_described:
        traffic.pop("rate", None)
    return whole | ({"traffic": traffic} if traffic else {}) | {"day": section(form)}


def command(
    form: Mapping[str, Any], catalog_folder: Path | None = None, *, stands: bool, is_described: bool = False
) -> str:
    """The command line that gives the same answer from slo.yaml, the trace (unless slo.yaml describes the
    traffic) and plan.yaml (if its fleet `stands` all day).
    """
    words = ["plan", "day", "--slo", "slo.yaml"]
    # The store calls a trace FOLDER/FILE.
    words += [] if is_described else ["--trace", form["trace"].partition("/")[2]]
    words += ["--fleet", "plan.yaml"] if stands else []
    words += ["--seed", str(form["seed"])] if form["seed"] else []
    words += ["--time-limit", str(form["time_limit"])] if form["time_limit"] != USUAL_LIMIT_S else []
    words += ["--catalog", str(catalog_folder)] if catalog_folder else []
    return shlex.join([*words, "-o", "out/"])
