"""How a log is read, in slo.yaml beside the other keys of `traffic`: the map that `plan trace` found is kept.

traffic: {map: {arrival: created_at, input: prompt_tokens, output: completion_tokens},
          timezone: Europe/Berlin, format: columns}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.io.files import read_yaml
from planner.io.values import Section, mapping, one_of, text

if TYPE_CHECKING:
    from planner.traffic.logs.reading import Reading

KEYS = ("map", "timezone", "format")


def parse_reading(section: Section) -> Reading | None:
    """Of the section `traffic`; None where it says nothing, and the file tells all."""
    if not any(key in section for key in KEYS):
        return None
    from planner.traffic.logs.columns import parse_columns  # which load pandas
    from planner.traffic.logs.reading import NAMES, Reading
    from planner.traffic.logs.times import zone_of

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


def reading_of(document: Mapping[str, Any], where: object = "slo.yaml") -> Reading | None:
    """What slo.yaml, as a mapping, says of the log; the rest of it is not looked at."""
    traffic = document.get("traffic")
    return parse_reading(Section.of(traffic, f"{where}: traffic")) if isinstance(traffic, Mapping) else None


def read_reading(slo: Path | None) -> Reading | None:
    """The same of a file; nothing of none, or of what can be read but once, such as a pipe."""
    if slo is None or not os.path.isfile(slo):  # noqa: PTH113 - silent about any name
        return None
    return reading_of(read_yaml(slo), slo)
