"""Reads the files that `plan -o DIR` wrote; plan.yaml, certificate.json and the traffic must agree.

The simulation itself is not in these files: planner/search/evidence/written_plan.py repeats it, and
`WrittenPlan.check_percentile` compares the result with the written one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from planner.documents.catalog import Catalog
from planner.documents.certificate import (
    Alternative,
    Certificate,
    Status,
    Throughput,
    dataclass_of,
    read_alternative,
    read_certificate,
    read_warnings,
    value_of,
)
from planner.documents.facts import Price, SpotSpare, Warned
from planner.documents.fleet_file import fleet_of, read_fleet
from planner.documents.robustness_facts import PlanOrigin
from planner.documents.slo import parse_slo
from planner.domain import Limit, Slo
from planner.errors import InputError
from planner.files.checked_files import read_json
from planner.fleet import Fleet
from planner.traffic.described import WrittenDescription
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

Document = Mapping[str, Any]
Content = TypeVar("Content")

# Keys of certificate.json with the types of their values, in its part "traffic" and at the top level.
TRAFFIC = {"trace": str, "note": str, "requests": int, "dropped": Mapping[str, int], "notes": tuple[str, ...]}
TOP_LEVEL = {"status": Status, "prices": str, "command": str, "max_model_len": int}
# Figures are written with ten digits. A simulated figure counts as the written one if it differs by less.
NEAR_FRAC = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class WrittenPlan:
    """The content of a plan's files.

    `simulated_s` are the written percentiles of the SLO's lines, None where not finite. `throughput` is None
    unless it is the objective, `made` in older files, `requested_rps` for a question without a rate.
    """

    folder: Path
    status: Status
    command: str
    fleet: Fleet
    slo: Slo
    trace: Trace
    traffic_note: str
    certificate: Certificate
    alternatives: tuple[Alternative, ...]
    warnings: tuple[Warned, ...]
    throughput: Throughput | None
    simulated_s: tuple[float | None, ...]
    max_model_len: int
    prices: tuple[Price, ...]
    made: PlanOrigin | None = None
    requested_rps: float | None = None

    @property
    def spot_spares(self) -> tuple[SpotSpare, ...]:
        """How many spot workers of each pool may be down at once in this plan. Empty without spot workers, in
        files of versions that did not write it, and for fleets with pinned prefixes.
        """
        if self.fleet.pinned:
            return ()
        return tuple(fact for fact in self.certificate.binding if isinstance(fact, SpotSpare))

    @property
    def fleet_after_spot_losses(self) -> Fleet:
        """The fleet without the spot workers that may be down at once."""
        down = {spare.pool: spare.down for spare in self.spot_spares}
        return self.fleet.with_counts(pool.count - down.get(pool.name, 0) for pool in self.fleet.pools)

    def check_percentile(self, limit: Limit, line_index: int, value_s: float) -> None:
        """Raise InputError if `value_s`, the percentile of `limit` in a new simulation, differs from the
        written one. `line_index` is the position of the limit in the SLO.
        """
        written_s = self.simulated_s[line_index] if line_index < len(self.simulated_s) else None
        if not _is_near(value_s, written_s):
            raise InputError(_mismatch(self.folder, f"{limit.name} at {value_s:.10g} s", f"{written_s} s"))


def read_written(path: Path, catalog: Catalog) -> WrittenPlan:
    """Read a plan from its folder, or from the path of its plan.yaml.

    Raises InputError if a file is missing, or is of another plan than the others.
    """
    plan_path = path / "plan.yaml" if path.is_dir() else path
    folder = plan_path.parent
    fleet = read_fleet(plan_path, catalog)
    written = read_json(folder / "certificate.json")
    return _translate_errors(folder, lambda: _read_plan(plan_path, fleet, written, catalog))


def _read_plan(path: Path, fleet: Fleet, written: Document, catalog: Catalog) -> WrittenPlan:
    """The plan of `fleet` (read from plan.yaml at `path`), of `written` (certificate.json) and of the traffic
    beside them. Raises InputError if the files contradict each other, and the errors that `_translate_errors`
    translates if `written` has another form.
    """
    folder = path.parent
    traffic = {
        key: value_of(kind, written["traffic"][key], f"traffic: {key}") for key, kind in TRAFFIC.items()
    }
    top_level = {key: value_of(kind, written[key], key) for key, kind in TOP_LEVEL.items()}
    slo = parse_slo(written["slo"], where=f"{path}: slo")
    described = written["traffic"].get("described")
    trace = replace(
        _read_traffic(folder),
        name=traffic["trace"],
        dropped=traffic["dropped"],
        notes=traffic["notes"],
        drawn_from=(
            None if described is None else dataclass_of(WrittenDescription, described, "traffic: described")
        ),
    )
    if len(trace) != traffic["requests"]:
        raise InputError(_mismatch(folder, f"{len(trace)} requests", f"{traffic['requests']}"))
    certificate = read_certificate(written["certificate"], written["facts"])
    # NumPy would refuse a negative seed only when the simulation is repeated, and would not name the file.
    if certificate.seed < 0:
        raise ValueError(f"certificate: seed is {certificate.seed}")
    lines, alternatives = written["simulated"]["lines"], written["alternatives"]
    if len(lines) != len(slo.limits):
        raise ValueError(f"simulated: {len(lines)} lines of {len(slo.limits)} limits")
    return WrittenPlan(
        folder=folder,
        status=top_level["status"],
        command=top_level["command"],
        fleet=fleet,
        slo=slo,
        trace=trace,
        traffic_note=traffic["note"],
        certificate=certificate,
        alternatives=tuple(_read_alternative(row, fleet.llm.name, path, catalog) for row in alternatives),
        warnings=read_warnings(written["warnings"], written["facts"]["warnings"]),
        throughput=(
            dataclass_of(Throughput, written["throughput"], "throughput") if "throughput" in written else None
        ),
        simulated_s=tuple(value_of(float | None, line["simulated_s"], "simulated: lines") for line in lines),
        max_model_len=top_level["max_model_len"],
        prices=value_of(tuple[Price, ...], written["facts"]["prices"], "facts: prices"),
        made=dataclass_of(PlanOrigin, written["made"], "made") if written.get("made") else None,
        requested_rps=value_of(
            float | None, written["traffic"].get("requested_rps"), "traffic: requested_rps"
        ),
    )


def _translate_errors(folder: Path, read: Callable[[], Content]) -> Content:
    """The result of `read`. Its errors for a certificate.json of another form (a missing key, a value of
    another type) become an InputError that names the file.
    """
    try:
        return read()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"{folder / 'certificate.json'}: is not as this version of the planner writes it "
            f"({type(error).__name__}: {error}); plan again"
        ) from None


def _mismatch(folder: Path, simulated: str, written: str) -> str:
    """The error for files of two plans: `simulated` by plan.yaml, `written` in certificate.json."""
    return (
        f"{folder}: plan.yaml on the traffic beside it has {simulated}, certificate.json says {written}: "
        "they are not of one plan, or of another version of the planner; plan again"
    )


def _read_traffic(folder: Path) -> Trace:
    """The trace that the plan was made with."""
    # requests.csv has no columns for prefixes and sessions. Traffic with them is in traffic.jsonl too.
    with_prefixes = folder / "traffic.jsonl"
    # No seed: with one, equal arrival times would be spread anew, but they must stay as they were simulated.
    return read_trace(with_prefixes if with_prefixes.exists() else folder / "requests.csv", seed=None)


def _read_alternative(row: Document, llm: str, path: Path, catalog: Catalog) -> Alternative:
    """The alternative in `row`. Its fleet, if any, is written without the LLM, which is the plan's `llm`."""
    fleet = row["fleet"]
    return read_alternative(row, None if fleet is None else fleet_of({"llm": llm, **fleet}, path, catalog))


def _is_near(value: float, written: float | None) -> bool:
    """Whether a simulated figure is the written one; None stands for a figure that is not finite."""
    if written is None:
        return not np.isfinite(value)
    return math.isclose(value, written, rel_tol=NEAR_FRAC)
