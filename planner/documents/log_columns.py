"""The keys of `traffic` in slo.yaml that say how a log is read (`LogOptions`); `plan trace` prints them.

traffic: {map: {arrival: created_at, input: prompt_tokens, output: completion_tokens},
          timezone: Europe/Berlin, format: columns}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.files.checked_files import read_yaml
from planner.files.document_values import Section, check_mapping

if TYPE_CHECKING:
    from planner.traffic.logs.log_reading import LogOptions

KEYS = ("map", "timezone", "format")


def parse_log_options(section: Section) -> LogOptions | None:
    """How a log is to be read, from the section `traffic`; None where the section does not say."""
    if not any(key in section for key in KEYS):
        return None
    from planner.traffic.logs.log_columns_map import parse_columns  # That module loads pandas.
    from planner.traffic.logs.log_reading import NAMES, LogOptions
    from planner.traffic.logs.times import zone_of

    columns = None
    if "map" in section:
        such_as = "{arrival: created_at, input: prompt_tokens, output: completion_tokens}"
        columns = parse_columns(
            check_mapping(section.get("map"), section.path_of("map"), such_as), section.path_of("map")
        )
    if (zone := section.text("timezone", None)) is not None:
        zone_of(zone, section.path_of("timezone"))  # Raises InputError for an unknown zone.
    return LogOptions(columns, section.one_of("format", NAMES, None), zone)


def log_options_of(document: Mapping[str, Any], where: object = "slo.yaml") -> LogOptions | None:
    """How a log is to be read, from an slo.yaml as a mapping; only its section `traffic` is looked at."""
    traffic = document.get("traffic")
    if not isinstance(traffic, Mapping):
        return None
    return parse_log_options(Section.from_document(traffic, f"{where}: traffic"))


def read_log_options(slo: Path | None) -> LogOptions | None:
    """How a log is to be read, from the section `traffic` of an slo.yaml. None without a file, and for a
    pipe, which can be read only once: the question is read from it later.
    """
    # Path.is_file raises for a name that no file can have. The reader of the question refuses such a name.
    if slo is None or not os.path.isfile(slo):  # noqa: PTH113
        return None
    return log_options_of(read_yaml(slo), slo)
