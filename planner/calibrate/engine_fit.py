"""What an engine's host adds to its steps, from a profile of its steps, and from steps measured while the
engine served requests behind its API server ("watched" steps).

A watched step takes t seconds and has S sequences, P of them prompts. The device needs g seconds for it, as
the profile without host time predicts; p = p0 + p1 S are the host's seconds in steps of the profile. We fit

    synchronous    t = c (g + p) + e + a P        h = c p + e
    asynchronous   t = max(g, p) + r + a P        h = p

h is the host time in the engine's row of engines.yaml [s]. e = e0 + e1 S, or r = r0 + r1 S, is further time
of watched steps; a is the time to admit a request, which no profile measures. c is 1 on a GPU. On a CPU,
where device and host share cores, c says how much slower an engine computes while other processes run; t then
counts only the seconds in which the engine's thread had a core. If no core is left for API servers, router
and clients, their CPU seconds per step and per token are added to h of a synchronous engine.

The fit is over means of similar watched steps (of one level, with similar g), since queues depend on the mean
step time; it minimises the mean absolute relative error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.documents.engine_file import EngineRow
from planner.errors import InputError
from planner.models.engine import HostTime
from planner.models.latency import DECODES, PREFILLS, Array
from planner.models.step_fit import PiecewiseLinearStepLatency, least_absolute
from planner.models.step_tables import NOT_INCLUDED, StepTable, without_next_launch

GROUPS_PER_LEVEL = 8  # Watched steps of one level are averaged in this many groups of similar g. Set by hand.
MOST_SLOWDOWN = 2.0  # The largest c that a fit on a CPU may give. Set by hand.
# The least share of a step that counts as device time, so that it stays positive beside a large host time.
LEAST_DEVICE_FRAC = 0.05


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Constants of one engine on one machine: `host` is h, `rest` is r (0 for a synchronous engine),
    `slowdown` is c, `admission_s` is a; `front_end_s` is the time of a request in the API server.

    If `shares_cores`, `host` of a synchronous engine includes the CPU time of servers, router and clients.
    `error_frac` is the mean absolute relative error; each level of load is predicted by a fit to all others.
    """

    version: str
    async_scheduling: bool
    host: HostTime
    rest: HostTime
    front_end_s: float
    admission_s: float
    slowdown: float
    shares_cores: bool
    error_frac: float

    def row(self, *, source: str, date: str) -> dict[str, Any]:
        """The fit as a row of engines.yaml, for all patch releases of the minor version that was measured."""
        minor = ".".join(self.version.split(".")[:2])
        return {
            "engine": "vllm",
            "from": minor,
            "to": minor,
            "async_scheduling": self.async_scheduling,
            "host": _host_document(self.host),
            "rest": _host_document(self.rest),
            "front_end": _milliseconds(self.front_end_s),
            "error": f"steps {100 * self.error_frac:.1f} % with numbers of sequences left out in turn",
            "source": source,
            "date": date,
        }


def _host_document(host: HostTime) -> dict[str, str]:
    """Host time as engines.yaml has it."""
    return {key: _milliseconds(getattr(host, f"{key}_s")) for key in ("step", "sequence", "log2_tp")}


def _milliseconds(seconds: float) -> str:
    """Seconds as text in ms, with three digits; the fit is less precise than that."""
    return f"{1e3 * seconds:.3g} ms"


def without_host(profile: StepTable, *, slowdown: float = 1.0, admission_s: float = 0.0) -> StepTable:
    """The profile's step times without host time: `slowdown` times the device time, plus admissions."""
    device_s = np.maximum(profile.y - profile.steps.host_s.to_numpy(float), LEAST_DEVICE_FRAC * profile.y)
    t_s = slowdown * device_s + admission_s * profile.X[:, PREFILLS]
    return StepTable(profile.steps.assign(t_s=t_s), {**profile.about, "host_overhead": NOT_INCLUDED})


@dataclass(frozen=True, slots=True)
class _StepGroups:
    """Means over groups of similar watched steps: g, t, S, P, p of this module's formulas, and the level."""

    g_s: Array
    t_s: Array
    sequences: Array
    prompts: Array
    profile_host_s: Array
    level: Array

    def subset(self, chosen: Array) -> _StepGroups:
        """The groups at which the boolean array `chosen` is true."""
        return _StepGroups(*(getattr(self, name)[chosen] for name in self.__slots__))

    def fit_constants(self, *, is_async: bool, most_slowdown: float) -> Array:
        """(c <= `most_slowdown`, e0, e1, a) of a synchronous engine; (1, r0, r1, a) of an async one."""
        ones = np.ones(len(self.t_s))
        host_columns = np.column_stack([ones, self.sequences, self.prompts])
        if is_async:
            rest_s = self.t_s - np.maximum(self.g_s, self.profile_host_s)
            return np.concatenate(([1.0], least_absolute(host_columns, rest_s, scale=self.t_s)))
        columns = np.column_stack([self.g_s + self.profile_host_s, host_columns])
        bounds = [(1.0, most_slowdown), (0.0, None), (0.0, None), (0.0, None)]
        return least_absolute(columns, self.t_s, bounds=bounds)

    def errors(self, constants: Array, *, is_async: bool) -> Array:
        """The absolute relative errors of the step times that these constants predict."""
        if is_async:
            base_s = np.maximum(self.g_s, self.profile_host_s)
        else:
            base_s = constants[0] * (self.g_s + self.profile_host_s)
        predicted_s = base_s + constants[1] + constants[2] * self.sequences + constants[3] * self.prompts
        return np.asarray(np.abs(predicted_s / self.t_s - 1))


def fit_engine(profile: StepTable, watched: StepTable, rows: Sequence[EngineRow] = ()) -> EngineFit:
    """Fit the constants to the steps of a profile and to watched steps. Steps of one GPU cannot show how host
    time grows with log2 TP, so that constant is taken from the row of `rows` with the nearest version.
    """
    if "host_s" not in profile.steps.columns or not (profile.steps.host_s > 0).all():
        raise InputError(
            "engine: the profile has no host_s, so the host's time cannot be separated from the GPU's"
        )
    about = watched.about  # Written by planner/runtime/served.py.
    is_async = about["async_scheduling"] == "true"
    # Only on a CPU is the time measured in which the engine's own thread had a core (`own_s`).
    on_cpu = bool(watched.steps.own_s.notna().all())
    most_slowdown = MOST_SLOWDOWN if on_cpu else 1.0
    shares_cores = on_cpu and float(about["spare_cores"]) < 1
    profile_host = _fit_profile_host(profile)
    groups = _group_steps(profile, watched, profile_host, shares_launches=is_async and not on_cpu)
    errors = []  # The error of each level, predicted by a fit to the others.
    for level in np.unique(groups.level):
        if (others := groups.level != level).any():
            constants = groups.subset(others).fit_constants(is_async=is_async, most_slowdown=most_slowdown)
            errors.append(groups.subset(~others).errors(constants, is_async=is_async))
    slowdown, step_s, sequence_s, admission_s = groups.fit_constants(
        is_async=is_async, most_slowdown=most_slowdown
    ).tolist()
    nearest = min(rows, key=lambda row: row.version_distance(about["version"]), default=None)
    host, rest = (HostTime(), HostTime()) if nearest is None else (nearest.host, nearest.rest)
    if is_async:
        host = replace(host, step_s=profile_host[0], sequence_s=profile_host[1])
        rest = replace(rest, step_s=step_s, sequence_s=sequence_s)
    else:
        if shares_cores:
            step_s += float(about["servers_step_s"])
            sequence_s += float(about["servers_token_s"])
        host = replace(
            host,
            step_s=slowdown * profile_host[0] + step_s,
            sequence_s=slowdown * profile_host[1] + sequence_s,
        )
        rest = HostTime()
    return EngineFit(
        version=about["version"],
        async_scheduling=is_async,
        host=host,
        rest=rest,
        front_end_s=float(about["front_end_s"]),
        admission_s=admission_s,
        slowdown=slowdown,
        shares_cores=shares_cores,
        # With steps of one level alone there is nothing to test on, and the error stays 0.
        error_frac=float(np.concatenate(errors).mean()) if errors else 0.0,
    )


def _fit_profile_host(profile: StepTable) -> tuple[float, float]:
    """p0 and p1 [s], fitted to the host time of the profile's steps."""
    host_s = profile.steps.host_s.to_numpy(float)
    sequences = profile.X[:, DECODES] + profile.X[:, PREFILLS]
    step_s, sequence_s = least_absolute(np.column_stack([np.ones(len(host_s)), sequences]), host_s).tolist()
    return step_s, sequence_s


def _group_steps(
    profile: StepTable, watched: StepTable, profile_host: tuple[float, float], *, shares_launches: bool
) -> _StepGroups:
    """Means of similar watched steps; `profile_host` is (p0, p1). t is the time in which the engine's thread
    had a core if each step has it (`own_s`), else wall time. With `shares_launches` t leaves out the launch
    of the next step, so the table must have the steps in order.
    """
    device = PiecewiseLinearStepLatency(beyond="extrapolate").fit(profile.X, without_host(profile).y).latency_
    X, level = watched.X, watched.steps.level.to_numpy(float)
    g_s, sequences = device.steps_s(X), X[:, DECODES] + X[:, PREFILLS]
    host_s = profile_host[0] + profile_host[1] * sequences
    own_s = watched.steps.own_s.to_numpy(float)
    t_s = own_s if np.isfinite(own_s).all() else watched.y
    if shares_launches:
        level_and_server = watched.steps[["level", "server"]]
        # Whether the row before is of the same level and server, so that its step came just before.
        follows = (level_and_server.shift() == level_and_server).all(axis=1).to_numpy()
        launched = follows & (X[:, PREFILLS] > 0)
        t_s = without_next_launch(t_s, np.maximum(g_s, host_s), was_launched_meanwhile=launched)
    columns = np.column_stack([g_s, t_s, sequences, X[:, PREFILLS], host_s, level])
    rows = []
    for level_value in np.unique(level):
        steps = np.flatnonzero(level == level_value)
        similar = np.array_split(steps[np.argsort(g_s[steps], kind="stable")], GROUPS_PER_LEVEL)
        rows += [columns[group].mean(axis=0) for group in similar if len(group)]
    return _StepGroups(*np.array(rows).T)


def about_engine(watched: Mapping[str, str]) -> str:
    """One line that says how and when the constants were measured."""
    engines = watched["engines"]
    return f"plan profile: {engines} engine{'s' if engines != '1' else ''} behind a router, {watched['date']}"
