"""Reading back what `plan -o DIR` wrote: the plan whose files these are, simulated again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.catalog import Catalog
from planner.errors import InputError
from planner.evidence import placement
from planner.files import read_json
from planner.fleetfile import fleet_of, read_fleet
from planner.plan import Alternative, Certificate, Neighbour, Plan, Refuted, Throughput
from planner.planning import PREFIXES_S
from planner.prefixes.placing import pool_prefixes
from planner.promise import parse_slo
from planner.repeats import Interval, Repeats
from planner.simulator.metrics import judge
from planner.simulator.replay import simulate
from planner.tracefile import read_trace
from planner.traces import Trace

Section = Mapping[str, Any]

NEAR_FRAC = 1e-9  # figures are written with ten digits


def read_plan(path: Path, catalog: Catalog) -> tuple[Plan, str]:
    """The plan in a folder, or whose plan.yaml `path` is, and the command that made it.

    Its fleet is simulated again on the traffic beside it; what was proved stands in certificate.json, as do
    the alternatives. Raises InputError where a file is missing, or is not of the same plan as the others.
    """
    path = path / "plan.yaml" if path.is_dir() else path
    folder = path.parent
    fleet = read_fleet(path, catalog)
    written = read_json(folder / "certificate.json")
    try:
        traffic, proved = written["traffic"], written["certificate"]
        slo = parse_slo(written["slo"], where=f"{path}: slo")
        trace = replace(
            _traffic(folder),
            name=traffic["trace"],
            dropped=traffic["dropped"],
            notes=tuple(traffic["notes"]),
        )
        if len(trace) != traffic["requests"]:
            raise InputError(_of_two(folder, f"{len(trace)} requests", f"{traffic['requests']}"))
        simulation = simulate(fleet, trace, limits=slo.limits, record=True)
        verdict = judge(simulation, slo)
        for line, said in zip(verdict.lines, written["simulated"]["lines"], strict=True):
            if not _is_near(line.value_s, said["simulated_s"]):
                here = f"{line.limit.name} at {line.value_s:.10g} s"
                raise InputError(_of_two(folder, here, f"{said['simulated_s']} s"))
        certificate = _certificate(proved)
        found = Plan(
            status=written["status"],
            fleet=fleet,
            slo=slo,
            trace=trace,
            traffic_note=traffic["note"],
            simulation=simulation,
            verdict=verdict,
            certificate=certificate,
            alternatives=tuple(
                _alternative(row, fleet.llm.name, path, catalog) for row in written["alternatives"]
            ),
            max_model_len=written["max_model_len"],
            prices_note=written["prices"],
            warnings=tuple(written["warnings"]),
            throughput=Throughput(**written["throughput"]) if "throughput" in written else None,
            placement=placement(fleet),
            prefixes=pool_prefixes(
                fleet, simulation, trace, time_limit_s=PREFIXES_S,
                rng=np.random.default_rng(certificate.seed),
            ),
        )  # fmt: skip
        return found, written["command"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{folder / 'certificate.json'}: is not as this version of the planner writes it "
            f"({type(error).__name__}: {error}); plan again"
        ) from None


def _of_two(folder: Path, simulated: str, written: str) -> str:
    return (
        f"{folder}: plan.yaml on the traffic beside it has {simulated}, certificate.json says {written}: "
        "they are not of one plan, or of another version of the planner; plan again"
    )


def _traffic(folder: Path) -> Trace:
    more = folder / "traffic.jsonl"
    return read_trace(more if more.exists() else folder / "requests.csv", seed=None)


def _certificate(proved: Section) -> Certificate:
    known = {field.name: proved[field.name] for field in fields(Certificate)}
    return Certificate(**known | {
        "universe": tuple(proved["universe"]),
        "binding": tuple(proved["binding"]),
        "assumptions": tuple(proved["assumptions"]),
        "refuted": tuple(Refuted(**row) for row in proved["refuted"]),
        "neighbours": tuple(Neighbour(**row) for row in proved["neighbours"]),
        "repeats": tuple(_repeats(row) for row in proved["repeats"]),
    })  # fmt: skip


def _repeats(row: Section) -> Repeats:
    limits = {name: _interval(value) for name, value in row["limits"].items()}
    return Repeats(**{**row, "limits": limits, "attainment_frac": _interval(row["attainment_frac"])})


def _interval(row: Section) -> Interval:
    return Interval(**{name: math.nan if value is None else value for name, value in row.items()})


def _alternative(row: Section, llm: str, path: Path, catalog: Catalog) -> Alternative:
    fleet = row["fleet"] and fleet_of({"llm": llm, **row["fleet"]}, path, catalog)
    found = {key: value for key, value in row.items() if key != "bound"}
    value = row["bound"] if row["at_least"] else row["objective"]
    return Alternative(**{**found, "fleet": fleet, "objective": math.inf if value is None else value})


def _is_near(value: float, written: float | None) -> bool:
    if written is None:
        return not np.isfinite(value)
    return math.isclose(value, written, rel_tol=NEAR_FRAC)
