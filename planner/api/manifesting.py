"""`fleetplan.manifests`: the files that deploy a plan or a fleet, as text by path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from planner import manifests as targets
from planner.api.inputs import FleetLike, KeysAndValues, plan_file, read_fleet
from planner.api.results import PlanResult, Result
from planner.documents.catalog import CatalogLike, read_catalog
from planner.documents.fleet_file import changed_plan_warning, max_model_len_of, routers_of
from planner.errors import InputError
from planner.files.checked_files import check_output_directory, read_yaml, write_files
from planner.fleet import Fleet
from planner.reports.rows import simulated_routers
from planner.reports.words import describe_fleet
from planner.units import count_text


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ManifestsResult(Result):
    """The files that deploy `fleet` on `target`, which is the name of a target, or "all".

    `rendered` has the files, the refused targets with the reasons, and notes for whoever applies the files.
    `plan_warnings` are sentences on what in the plan.yaml may not be true any more.
    """

    fleet: Fleet
    target: str
    rendered: targets.Rendered
    plan_warnings: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, str]:
        """The text of each file by its path."""
        return dict(self.rendered.files)

    def headline(self) -> str:
        return f"{count_text(len(self.files), 'file')} for {describe_fleet(self.fleet)}"

    def sentences(self) -> list[str]:
        notes = dict.fromkeys(note for listed in self.rendered.notes.values() for note in listed)
        refused = [f"not written: {why}" for why in dict.fromkeys(self.rendered.refused.values())]
        return [*self.plan_warnings, *refused, *self.rendered.warnings.values(), *notes]

    def to_dict(self) -> dict[str, Any]:
        """What `plan manifests --json` prints, without the folder."""
        rendered = self.rendered
        return {
            "files": list(rendered.files),
            "refused": rendered.refused,
            "notes": rendered.notes,
            "warnings": rendered.warnings,
            **({"plan_warnings": list(self.plan_warnings)} if self.plan_warnings else {}),
        }

    def to_frame(self) -> pd.DataFrame:
        """A row per file with its number of lines."""
        rows = [{"file": name, "lines": text.count("\n")} for name, text in self.files.items()]
        return pd.DataFrame(rows, columns=["file", "lines"])

    def save(self, folder: str | Path) -> tuple[str, ...]:
        """Write the files into the folder, and remove those of an earlier plan for the same targets. Returns
        the paths of the files in the folder.
        """
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
    """The files that deploy a plan, for one target or for all that can express it.

    `plan` is the result of `fleetplan.plan`, or a fleet, a fleet.yaml, a plan.yaml or its folder. A
    fleet.yaml may lack `max_model_len`, the tokens of the longest request; then give it here. If the workers
    in a plan.yaml were changed, its results for routers are ignored: they were simulated with other workers.

    Raises InputError for an unknown target, for one that cannot express the plan, and if `max_model_len` is
    missing or below 1.
    """
    targets.check_target(target)
    if max_model_len is not None and max_model_len < 1:
        raise InputError(f"max_model_len: must be >= 1, found {max_model_len}")
    if isinstance(plan, PlanResult):
        max_model_len = max_model_len or plan.plan.max_model_len
        rendered = targets.render(plan.fleet, max_model_len, target, simulated_routers(plan.plan))
        return ManifestsResult(plan.fleet, target, rendered)
    fleet = read_fleet(plan, read_catalog(catalog))
    document, file = _document_of(plan)
    max_model_len = max_model_len or max_model_len_of(document, file)
    if max_model_len is None:
        raise InputError(f"{file}: max_model_len: missing; add the tokens of the longest request to serve")
    warning = changed_plan_warning(document, file, fleet)
    routers = [] if warning else routers_of(document, file)
    rendered = targets.render(fleet, max_model_len, target, routers)
    return ManifestsResult(fleet, target, rendered, (warning,) if warning else ())


def _document_of(plan: FleetLike) -> tuple[KeysAndValues, Path]:
    """The document of a plan.yaml or fleet.yaml, and its path for error messages. Without a file the path is
    the word "fleet", and a fleet that is an object has an empty document.
    """
    if isinstance(plan, str | Path):
        file = plan_file(plan)
        return read_yaml(file), file
    return (plan if isinstance(plan, Mapping) else {}), Path("fleet")
