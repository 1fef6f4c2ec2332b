"""Analyses a validation run: `ValidationSetup` says what was measured, and `analyse_run` makes a `Validation`
of the files that the run left.

The parts of the analysis are in measured_against_simulated, own_clock, step_fits and replanned;
validation_document and validation_files write its result.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from planner.calibrate.fitting import FittedSteps
from planner.documents.fleet_file import fleet_document
from planner.domain import Slo, row_of
from planner.fleet import Fleet
from planner.models.engine import Engine
from planner.runtime import step_fits
from planner.runtime.as_served import ServedLengths, as_served, client_clock_notes, measure_lengths
from planner.runtime.endpoint import Endpoint
from planner.runtime.engine_log import EngineLog, read_step_logs
from planner.runtime.engine_scraper import EngineTimes, engine_times
from planner.runtime.live_replay import JournalFile
from planner.runtime.measured_against_simulated import Measurement, compare_with_simulation
from planner.runtime.own_clock import compare_undisturbed
from planner.runtime.prediction_errors import MeasuredComparison, Tolerances
from planner.runtime.replanned import Replanned, replan
from planner.traffic.trace import Trace

EngineKind = Literal["vllm", "rehearsal", "endpoint"]


class WholePlan(NamedTuple):
    """The whole fleet and the whole traffic of a plan of which only a slice is validated."""

    fleet: Fleet
    trace: Trace


@dataclass(frozen=True, slots=True)
class ValidationSetup:
    """What to validate: a fleet, its traffic and SLO, and how its engines are started.

    `config` is a config.json, or its folder, with which engines run; None for the LLM's own.
    With a `config`, or without `real_weights`, engines have dummy weights. If `fleet` and `trace` are a slice
    of a plan, `plan` is the whole; else it is None. `endpoint` is a deployment that others run, which is
    measured instead of our own engines. `notes` go to the report.
    """

    fleet: Fleet
    trace: Trace
    slo: Slo
    max_model_len: int
    engine: EngineKind = "vllm"
    config: Path | None = None
    real_weights: bool = False
    seed: int = 0
    notes: tuple[str, ...] = ()
    plan: WholePlan | None = None
    endpoint: Endpoint | None = None

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts share prefixes as the trace's do. They do so only if the plan has prefix caches."""
        return self.fleet.policies.prefix_cache

    def identity(self) -> dict[str, Any]:
        """The values that a run must share with an earlier one to continue it."""
        digest = hashlib.sha256(json.dumps(fleet_document(self.fleet), sort_keys=True).encode())
        trace = self.trace
        columns = [trace.arrival_s, trace.input_tokens, trace.output_tokens, trace.after, trace.think_s]
        if self.shares_prefixes:
            columns += [trace.prefix_offsets, trace.prefix_ids]
        for column in columns:
            digest.update(np.ascontiguousarray(column).tobytes())
        if self.config is not None:
            file = self.config / "config.json" if self.config.is_dir() else self.config
            # A missing file is refused before vLLM starts (workers.model_folder).
            digest.update(file.read_bytes() if file.exists() else b"")
        endpoint = self.endpoint
        address = {} if endpoint is None else {"url": endpoint.url, "model": endpoint.model}
        return {
            **address,
            "sha256": digest.hexdigest(),
            "engine": self.engine,
            "config": str(self.config or ""),
            "real_weights": self.real_weights,
            "seed": self.seed,
            "max_model_len": self.max_model_len,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Validation:
    """The results of a run; `engine_times` are the engines' own metrics (engine_scraper.py). `steps` compares
    the measured steps of each pool with its fit, and `corrections` are the fits corrected by them.

    Engines on a CPU have a clock of their own, which stands still while other processes have their core. The
    comparison `undisturbed` is by this clock; the fleet `as_run` has step times by the wall clock instead.
    Both are None for engines without such a clock. `by_client` compares by the client's clock, and is None if
    `comparison` does so. `after` is the comparison with corrected step times, by the engines' own clocks if
    they have them. `fits` are the corrected step times for a catalog, by file name.
    """

    setup: ValidationSetup
    measurement: Measurement
    comparison: MeasuredComparison
    steps: tuple[step_fits.Steps, ...]
    corrections: tuple[step_fits.FitCorrection, ...]
    as_run: Fleet | None
    after: MeasuredComparison | None
    undisturbed: MeasuredComparison | None
    by_client: MeasuredComparison | None
    replanned: Replanned | None
    fits: Mapping[str, FittedSteps]
    # The journal's record of each part of the run: events, engines, load of the machine.
    records: tuple[Mapping[str, Any], ...]
    # The token counts that an endpoint was asked for and served; None for our own engines.
    lengths: ServedLengths | None = None
    engine_times: EngineTimes | None = None

    @property
    def machine(self) -> Mapping[str, str]:
        """The machine that measured the last part of the run; empty if the journal does not say."""
        machine: Mapping[str, str] = self.records[-1].get("machine", {}) if self.records else {}
        return machine

    @property
    def plan_fleet(self) -> Fleet:
        """The whole fleet of the plan, of which perhaps only a slice was validated."""
        return self.setup.plan.fleet if self.setup.plan else self.setup.fleet

    @property
    def plan_trace(self) -> Trace:
        """The requests for the whole fleet of the plan, of which perhaps only a part was sent."""
        return self.setup.plan.trace if self.setup.plan else self.setup.trace

    @property
    def slo_holds(self) -> bool:
        """Whether the measured run keeps the SLO. A failed request misses every limit."""
        return self.comparison.measured_verdict.holds


def analyse_run(setup: ValidationSetup, out: Path, tolerances: Tolerances) -> Validation:
    """Analyse the journal and the step logs in the folder `out`."""
    journal_file = JournalFile(out / "journal.jsonl", setup.identity())
    logs = {}
    for pool in setup.fleet.running_pools:
        for name in pool.worker_names:
            log = read_step_logs((out / "engines").glob(f"{name}.*.steps.jsonl"))
            if len(log.steps):
                logs[name] = log
    setup = as_deployed(setup, logs)
    records, trace, journal = tuple(journal_file.records()), setup.trace, journal_file.read()
    served = None
    if setup.endpoint is not None:
        served = measure_lengths(trace, journal)
        trace, journal = as_served(trace, journal)
        notes = client_clock_notes(served, records, planned_requests=len(setup.trace), sent=len(trace))
        setup = replace(setup, notes=(*setup.notes, *notes))
    measurement = Measurement(setup.fleet, trace, journal, logs)
    comparison = compare_with_simulation(measurement, setup.fleet, setup.slo, tolerances)
    measured_steps = step_fits.compare_steps(measurement, setup.fleet)
    fit_corrections = step_fits.correct_fits(measured_steps, setup.fleet)
    after, replanned = None, None
    if fit_corrections:
        corrected = step_fits.with_corrections(setup.fleet, fit_corrections)
        after = compare_undisturbed(measurement, corrected, setup.slo, tolerances)
        if after is None:  # The engines have no clocks of their own.
            after = compare_with_simulation(measurement, corrected, setup.slo, tolerances)
        plan_fleet, plan_trace = setup.plan or (setup.fleet, setup.trace)
        replanned = replan(
            plan_fleet, step_fits.with_corrections(plan_fleet, fit_corrections), plan_trace, setup.slo
        )
    by_client = None
    if measurement.is_timed_by_engines:
        without_logs = replace(measurement, logs={})  # Without logs the times are the client's.
        by_client = compare_with_simulation(without_logs, setup.fleet, setup.slo, tolerances)
    return Validation(
        setup=setup,
        measurement=measurement,
        comparison=comparison,
        steps=tuple(measured_steps),
        corrections=tuple(fit_corrections),
        as_run=step_fits.fleet_as_run(measurement, setup.fleet),
        after=after,
        undisturbed=compare_undisturbed(measurement, setup.fleet, setup.slo, tolerances),
        by_client=by_client,
        replanned=replanned,
        fits=_catalog_fits(measured_steps, setup.fleet, records[-1]["date"] if records else None),
        records=records,
        lengths=served,
        engine_times=engine_times(record.get("engine_clock") for record in records),
    )


def as_deployed(setup: ValidationSetup, logs: Mapping[str, EngineLog]) -> ValidationSetup:
    """The setup whose fleet has the engine version and scheduling that the first step log with an engine
    names, so that the prediction is for the engine that ran. Other values of the engine stay the plan's.
    """
    logged_engine = next((log.engine for log in logs.values() if log.engine), None)
    planned = setup.fleet.engine
    if logged_engine is None or planned is None:
        return setup

    def as_logged(engine: Engine) -> Engine:
        return replace(
            engine, version=logged_engine["version"], async_scheduling=logged_engine["async_scheduling"]
        )

    deployed = as_logged(planned)
    if deployed.title == planned.title:
        return setup
    note = f"The plan was made for {planned.title}; deployed here, and predicted, is {deployed.title}."
    plan = setup.plan and setup.plan._replace(fleet=setup.plan.fleet.with_engines(as_logged))
    fleet = setup.fleet.with_engines(as_logged)
    return replace(setup, fleet=fleet, plan=plan, notes=(*setup.notes, note))


def _catalog_fits(measured: list[step_fits.Steps], fleet: Fleet, date: str | None) -> dict[str, FittedSteps]:
    """Corrected step times for a catalog, a file for each GPU and TP, from all pools with these."""
    source = "plan validate: the plan's fit, calibrated"
    fits = {}
    for (gpu, tp), latency in step_fits.fits_by_gpu_and_tp(measured, fleet).items():
        name = row_of(gpu)  # The catalog's name of the GPU, without its market.
        fits[f"{name}-tp{tp}.yaml"] = FittedSteps(fleet.llm.name, name, tp, source, latency, {}, date=date)
    return fits
