"""`manifests`: the deployments of a plan or a fleet, as text by file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from planner import manifests as targets
from planner.api.inputs import FleetLike, plan_file, read_fleet
from planner.api.results import PlanResult, Result
from planner.documents.catalog import CatalogLike, read_catalog
from planner.documents.fleet_file import read_max_model_len, read_routers
from planner.errors import InputError
from planner.files.checked_files import check_output_directory, write_files
from planner.fleet import Fleet
from planner.reports.rows import simulated_routers
from planner.reports.words import describe
from planner.units import counted


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ManifestsResult(Result):
    """The files of each target, the targets that were refused with the reasons, and notes for whoever applies
    the files.
    """

    fleet: Fleet
    target: str
    rendered: targets.Rendered

    @property
    def files(self) -> dict[str, str]:
        """The text of each file by its path."""
        return dict(self.rendered.files)

    def headline(self) -> str:
        return f"{counted(len(self.files), 'file')} for {describe(self.fleet)}"

    def sentences(self) -> list[str]:
        notes = dict.fromkeys(note for listed in self.rendered.notes.values() for note in listed)
        refused = [f"not written: {why}" for why in dict.fromkeys(self.rendered.refused.values())]
        return [*refused, *self.rendered.warnings.values(), *notes]

    def to_dict(self) -> dict[str, Any]:
        """What `plan manifests --json` prints, without the folder."""
        rendered = self.rendered
        return {
            "files": list(rendered.files),
            "refused": rendered.refused,
            "notes": rendered.notes,
            "warnings": rendered.warnings,
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per file with its lines."""
        rows = [{"file": name, "lines": text.count("\n")} for name, text in self.files.items()]
        return pd.DataFrame(rows, columns=["file", "lines"])

    def save(self, folder: str | Path) -> tuple[str, ...]:
        """Write the files, and remove those of an earlier plan for the same targets."""
        check_output_directory(Path(folder))
        names = targets.TARGETS if self.target == "all" else [self.target]
        outdated = [pattern for name in names for pattern in targets.OUTDATED[name]]
        written: dict[str, str | bytes] = dict(self.files)
        write_files(Path(folder), written, outdated=outdated)
        return tuple(written)


def manifests(
    plan: PlanResult | FleetLike,
    target: str = "all",
    *,
    max_model_len: int | None = None,
    catalog: CatalogLike = None,
) -> ManifestsResult:
    """The deployment of a plan, its folder or a fleet, for one target or for all that can express it.

    A fleet.yaml may lack `max_model_len`, the tokens of the longest request; then give it here. Raises
    InputError for an unknown target, and for one that cannot express the plan.
    """
    targets.check_target(target)
    if isinstance(plan, PlanResult):
        max_model_len = max_model_len or plan.plan.max_model_len
        return _rendered(plan.fleet, max_model_len, target, simulated_routers(plan.plan))
    fleet = read_fleet(plan, read_catalog(catalog))
    routers: list[targets.RouterRow] = []
    if isinstance(plan, str | Path):
        # A path may be a plan's folder, whose plan.yaml is read, or the file itself.
        in_folder = plan_file(plan)
        file = in_folder if in_folder.is_file() else Path(plan)
        max_model_len = max_model_len or read_max_model_len(file)
        routers = [targets.RouterRow(*row) for row in read_routers(file)]
    if max_model_len is None:
        raise InputError("max_model_len: missing; give the tokens of the longest request to serve")
    return _rendered(fleet, max_model_len, target, routers)


def _rendered(
    fleet: Fleet, max_model_len: int, target: str, routers: list[targets.RouterRow]
) -> ManifestsResult:
    """The files of the fleet for the target; `routers` are what was simulated under each target's router."""
    return ManifestsResult(fleet, target, targets.render(fleet, max_model_len, target, routers))
