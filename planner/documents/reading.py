"""How a log is read, in slo.yaml beside the other keys of `traffic`: the map that `plan trace` found is kept.

traffic: {map: {arrival: created_at, input: prompt_tokens, output: completion_tokens},
          timezone: Europe/Berlin, format: columns}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.io.files import read_yaml
from planner.io.values import Section, mapping, one_of, text
from planner.traffic.logs.columns import parse_columns
from planner.traffic.logs.reading import ANY, NAMES, Reading
from planner.traffic.logs.times import zone_of

KEYS = ("map", "timezone", "format")


def parse_reading(section: Section) -> Reading:
    """Of the section `traffic`; what it does not say is told by the file."""
    if not any(key in section for key in KEYS):
        return ANY
    columns = zone = name = None
    if "map" in section:
        such_as = "{arrival: created_at, input: prompt_tokens, output: completion_tokens}"
        columns = parse_columns(mapping(section.get("map"), section.at("map"), such_as), section.at("map"))
    if "timezone" in section:
        zone = text(section.get("timezone"), section.at("timezone"))
        zone_of(zone, section.at("timezone"))
    if "format" in section:
        name = one_of(section.get("format"), NAMES, section.at("format"))
    return Reading(columns, name, zone)


def reading_of(document: Mapping[str, Any], where: object = "slo.yaml") -> Reading:
    """What slo.yaml, as a mapping, says of the log; the rest of it is not looked at."""
    traffic = document.get("traffic")
    return parse_reading(Section.of(traffic, f"{where}: traffic")) if isinstance(traffic, Mapping) else ANY


def read_reading(slo: Path | None) -> Reading:
    """The same of a file; nothing of none, or of what can be read but once, such as a pipe."""
    if slo is None or not os.path.isfile(slo):  # noqa: PTH113 - silent about any name
        return ANY
    return reading_of(read_yaml(slo), slo)
