"""Reading back what `plan -o DIR` wrote: the plan whose files these are, simulated again."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from planner.documents.catalog import Catalog
from planner.documents.fleet import fleet_of, read_fleet
from planner.documents.slo import parse_slo
from planner.errors import InputError
from planner.io.files import read_json
from planner.plan import Alternative, Certificate, Plan, Throughput
from planner.search.certify import PREFIXES_S
from planner.search.evidence import placement
from planner.search.prefix_placing import pool_prefixes
from planner.simulator.metrics import judge
from planner.simulator.repeats import Interval
from planner.simulator.replay import simulate
from planner.traffic.reading import read_trace
from planner.traffic.trace import Trace

Section = Mapping[str, Any]

Written = TypeVar("Written")
TRAFFIC = {"trace": str, "note": str, "requests": int, "dropped": Mapping[str, int], "notes": tuple[str, ...]}
REST = {"status": str, "prices": str, "command": str, "max_model_len": int, "warnings": tuple[str, ...]}
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
        traffic = {
            key: _value(kind, written["traffic"][key], f"traffic: {key}") for key, kind in TRAFFIC.items()
        }
        rest = {key: _value(kind, written[key], key) for key, kind in REST.items()}
        slo = parse_slo(written["slo"], where=f"{path}: slo")
        trace = replace(
            _traffic(folder), name=traffic["trace"], dropped=traffic["dropped"], notes=traffic["notes"]
        )
        if len(trace) != traffic["requests"]:
            raise InputError(_of_two(folder, f"{len(trace)} requests", f"{traffic['requests']}"))
        simulation = simulate(fleet, trace, limits=slo.limits, record=True)
        verdict = judge(simulation, slo)
        for line, said in zip(verdict.lines, written["simulated"]["lines"], strict=True):
            if not _is_near(line.value_s, said["simulated_s"]):
                here = f"{line.limit.name} at {line.value_s:.10g} s"
                raise InputError(_of_two(folder, here, f"{said['simulated_s']} s"))
        proof = written["certificate"]
        if proof["level0"] is None:  # what is not finite is null in JSON
            proof = {**proof, "level0": math.inf}
        certificate = _of(Certificate, proof, "certificate")
        found = Plan(
            status=rest["status"],
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
            max_model_len=rest["max_model_len"],
            prices_note=rest["prices"],
            warnings=rest["warnings"],
            throughput=(
                _of(Throughput, written["throughput"], "throughput") if "throughput" in written else None
            ),
            placement=placement(fleet),
            prefixes=pool_prefixes(
                fleet, simulation, trace, time_limit_s=PREFIXES_S, rng=np.random.default_rng(certificate.seed)
            ),
        )
        return found, rest["command"]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
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


def _of(kind: type[Written], row: Any, where: str, **given: Any) -> Written:
    """A dataclass out of its fields as they are written down; `given` are those that are not read here."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.name not in given]  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], row[name], f"{where}: {name}") for name in names}, **given)


def _value(hint: Any, value: Any, where: str) -> Any:
    """A value of the type that a field has; raises ValueError for another."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is types.UnionType and types.NoneType in inner:
        return None if value is None else _value(inner[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (Mapping, dict) and isinstance(value, dict):
        return {key: _value(inner[1], item, f"{where}: {key}") for key, item in value.items()}
    if is_dataclass(hint) and isinstance(value, dict):
        if hint is Interval:  # what is not finite is null in JSON
            value = {name: math.nan if number is None else number for name, number in value.items()}
        return _of(hint, value, where)  # type: ignore[arg-type]
    kinds = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}
    if origin is Literal and value in inner:
        return value
    if isinstance(value, kinds.get(hint, ())) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{where} is {value!r:.80}")


def _alternative(row: Section, llm: str, path: Path, catalog: Catalog) -> Alternative:
    of_fleet = row["fleet"]
    fleet = None if of_fleet is None else fleet_of({"llm": llm, **of_fleet}, path, catalog)
    value = row["bound"] if row["at_least"] else row["objective"]
    given = {**row, "objective": math.inf if value is None else value}
    return _of(Alternative, given, "alternatives", fleet=fleet)


def _is_near(value: float, written: float | None) -> bool:
    if written is None:
        return not np.isfinite(value)
    return math.isclose(value, written, rel_tol=NEAR_FRAC)
