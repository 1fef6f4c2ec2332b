"""What an engine's host adds to its steps, from a profile of its steps and a watch of it behind its server.

With g the seconds of a step on the device (a step of the profile less its host), S the sequences in it, P the
prompts among them, and p = p0 + p1 S the host's seconds in the profile's steps:

    synchronous    t = c (g + p) + e + a P        h = c p + e
    asynchronous   t = max(g, p) + r + a P        h = p

e = e0 + e1 S, or r = r0 + r1 S, is what the watched steps take besides, a what it takes to admit a request,
which the profile does not time. c is 1 but where device and host are the same cores (a CPU): how much slower
an engine computes beside its like. There t are the seconds in which the engine's thread did not wait for a
core, and if no core is left for API servers, router and clients, their CPU seconds per step and per token are
added to h.

Watched steps are averaged over those alike (of a level and of similar g), since queues grow with means; then
the mean size of the relative errors is least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.documents.engine_file import EngineRow
from planner.errors import InputError
from planner.models.engine import HostTime
from planner.models.latency import Array
from planner.models.step_fit import PiecewiseLinearStepLatency, least_absolute
from planner.models.step_tables import NOT_INCLUDED, StepTable

GROUPS = 8  # of watched steps of a level, by g
MOST_SLOWDOWN = 2.0
LEAST_DEVICE_FRAC = 0.05  # of a step, whatever its host is said to take


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Constants of one engine on one machine. `slowdown` is c, `admission_s` a; `shares_cores`: what others
    take of the engine's cores is in them; `error_frac` is the mean size of the errors on levels left out in
    turn.
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
        """A row of engines.yaml."""
        minor = ".".join(self.version.split(".")[:2])
        return {
            "engine": "vllm",
            "from": minor,
            "to": minor,
            "async_scheduling": self.async_scheduling,
            "host": _document(self.host),
            "rest": _document(self.rest),
            "front_end": _written(self.front_end_s),
            "error": f"steps {100 * self.error_frac:.1f} % with numbers of sequences left out in turn",
            "source": source,
            "date": date,
        }


def _document(host: HostTime) -> dict[str, str]:
    return {key: _written(getattr(host, f"{key}_s")) for key in ("step", "sequence", "log2_tp")}


def _written(seconds: float) -> str:
    """Three digits are more than is known."""
    return f"{1e3 * seconds:.3g} ms"


def without_host(profile: StepTable, *, slowdown: float = 1.0, admission_s: float = 0.0) -> StepTable:
    """The profile with the device's seconds alone, `slowdown` times as many, and those of admitting."""
    device_s = np.maximum(profile.y - profile.steps.host_s.to_numpy(float), LEAST_DEVICE_FRAC * profile.y)
    t_s = slowdown * device_s + admission_s * profile.X[:, 4]
    return StepTable(profile.steps.assign(t_s=t_s), {**profile.about, "host_overhead": NOT_INCLUDED})


@dataclass(frozen=True, slots=True)
class _Cells:
    """Means over watched steps that are alike: g and t [s], S, P, p [s]; and their level."""

    g_s: Array
    t_s: Array
    sequences: Array
    prompts: Array
    own_s: Array
    level: Array

    def subset(self, chosen: Array) -> _Cells:
        return _Cells(*(getattr(self, name)[chosen] for name in self.__slots__))

    def fitted(self, *, is_async: bool, most_slowdown: float) -> Array:
        """c, e0, e1, a; or 1, r0, r1, a."""
        ones = np.ones(len(self.t_s))
        more = np.column_stack([ones, self.sequences, self.prompts])
        if is_async:
            beyond_s = self.t_s - np.maximum(self.g_s, self.own_s)
            return np.concatenate(([1.0], least_absolute(more, beyond_s, scale=self.t_s)))
        columns = np.column_stack([self.g_s + self.own_s, more])
        bounds = [(1.0, most_slowdown), (0.0, None), (0.0, None), (0.0, None)]
        return least_absolute(columns, self.t_s, bounds=bounds)

    def errors(self, constants: Array, *, is_async: bool) -> Array:
        base_s = np.maximum(self.g_s, self.own_s) if is_async else constants[0] * (self.g_s + self.own_s)
        predicted_s = base_s + constants[1] + constants[2] * self.sequences + constants[3] * self.prompts
        return np.asarray(np.abs(predicted_s / self.t_s - 1))


def fit_engine(profile: StepTable, watched: StepTable, rows: Sequence[EngineRow] = ()) -> EngineFit:
    """Fit the constants. One GPU tells nothing of log2 TP, which is that of the nearest of `rows`."""
    if "host_s" not in profile.steps.columns or not (profile.steps.host_s > 0).all():
        raise InputError("engine: the profile has no host_s, so device and host cannot be told apart")
    about = watched.about
    is_async = about["async_scheduling"] == "true"
    on_cpu = bool(watched.steps.own_s.notna().all())
    most_slowdown = MOST_SLOWDOWN if on_cpu else 1.0
    shares_cores = on_cpu and float(about["spare_cores"]) < 1
    own = _own_host(profile)
    cells = _cells(profile, watched, own)
    errors = []
    for one in np.unique(cells.level):
        if (others := cells.level != one).any():
            constants = cells.subset(others).fitted(is_async=is_async, most_slowdown=most_slowdown)
            errors.append(cells.subset(~others).errors(constants, is_async=is_async))
    slowdown, step_s, sequence_s, admission_s = cells.fitted(
        is_async=is_async, most_slowdown=most_slowdown
    ).tolist()
    nearest = min(rows, key=lambda row: row.version_distance(about["version"]), default=None)
    host, rest = (HostTime(), HostTime()) if nearest is None else (nearest.host, nearest.rest)
    if is_async:
        host = replace(host, step_s=own[0], sequence_s=own[1])
        rest = replace(rest, step_s=step_s, sequence_s=sequence_s)
    else:
        if shares_cores:
            step_s += float(about["servers_step_s"])
            sequence_s += float(about["servers_token_s"])
        host = replace(host, step_s=slowdown * own[0] + step_s, sequence_s=slowdown * own[1] + sequence_s)
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
        error_frac=float(np.concatenate(errors).mean()) if errors else 0.0,
    )


def _own_host(profile: StepTable) -> tuple[float, float]:
    """p0 and p1 of the profile."""
    host_s = profile.steps.host_s.to_numpy(float)
    sequences = profile.X[:, 2] + profile.X[:, 4]
    step_s, sequence_s = least_absolute(np.column_stack([np.ones(len(host_s)), sequences]), host_s).tolist()
    return step_s, sequence_s


def _cells(profile: StepTable, watched: StepTable, own: tuple[float, float]) -> _Cells:
    """On the engine's own clock where it keeps one, else on the wall."""
    device = PiecewiseLinearStepLatency(beyond="extrapolate").fit(profile.X, without_host(profile).y).latency_
    X, level = watched.X, watched.steps.level.to_numpy(float)
    g_s, sequences, own_s = device.step_s(*X.T), X[:, 2] + X[:, 4], watched.steps.own_s.to_numpy(float)
    t_s = own_s if np.isfinite(own_s).all() else watched.y
    columns = np.column_stack([g_s, t_s, sequences, X[:, 4], own[0] + own[1] * sequences, level])
    rows = []
    for one in np.unique(level):
        steps = np.flatnonzero(level == one)
        alike = np.array_split(steps[np.argsort(g_s[steps], kind="stable")], GROUPS)
        rows += [columns[each].mean(axis=0) for each in alike if len(each)]
    return _Cells(*np.array(rows).T)


def about_engine(fit: EngineFit, watched: Mapping[str, str]) -> str:
    """What the constants were measured on, in a line."""
    engines = watched["engines"]
    return f"plan profile: {engines} engine{'s' if engines != '1' else ''} behind a router, {watched['date']}"
