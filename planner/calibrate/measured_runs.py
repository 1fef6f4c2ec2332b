"""Corrects a fit of step times by a few measurements, and says how sure the result is.

The corrected step time, in the letters of planner/models/latency.py:

    t' = m f(1) + c (f(N) - f(1)) + c a A_p + m b D + m d K + c e P + h_s + h

c scales the compute-bound part of a step, m the bandwidth-bound part (as `StepLatency.scale_times` splits
them), and h is host overhead [s]. Measurements are step times, or latencies of benchmark runs (MeasuredRun,
planner/importers/benchmark_runs.py: the load of one engine, and its statistics by metric). What a run's
latencies would be with t' is predicted by our own simulator. r is the log of predicted over measured, and we
solve

    min  sum r(c, m, h)^2 / sigma^2  +  (log c)^2 / s^2  +  (log m)^2 / s^2  +  h^2 / s_h^2

The last three terms are priors: a factor on which no measurement depends stays at 1 (c, m) or 0 (h). sigma,
the scatter of measurements around the corrected fit, is estimated in turn with the fit, starting at SIGMA.
The covariance is the inverse of the Hessian of the sum; the standard error of a step time follows from it and
from sigma.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from planner.domain import Gpu
from planner.errors import InputError
from planner.fleet import Fleet, Pool, WorkerType
from planner.importers.benchmark_runs import MeasuredRun
from planner.models.engine import Engine
from planner.models.latency import Array, StepLatency
from planner.models.llm import Llm
from planner.models.memory import MemorySettings, worker_memory
from planner.models.step_tables import StepTable
from planner.parallel import executors
from planner.simulator import simulate
from planner.simulator.layout import FINISHED
from planner.traffic.trace import Trace

# The priors were set by hand: wide enough that a dozen measurements outweigh them.
FACTOR_PRIOR = 0.3  # s: the prior standard deviation of log c and of log m.
HOST_PRIOR_S = 5e-3  # s_h: the prior standard deviation of h.
SIGMA = 0.05  # The prior of sigma, a relative error. It counts as SIGMA_POINTS measurements.
SIGMA_POINTS = 2.0
SEEDS = (0, 1, 2)  # Arrivals and lengths that were not recorded are drawn with each of these seeds.
ROUNDS = 3  # The factors are fitted this many times, each time with the sigma of the fit before.
# In one round this many values of the factors are tried; each trial simulates all runs several times.
MOST_TRIALS = 30
# Derivatives with respect to z (`_fit_factors`) are differences over these relative steps. Simulated
# percentiles jump where requests change their order, so runs need a large step; the formula of step times is
# smooth.
RUN_STEP = 0.05
FORMULA_STEP = 1e-4
ABOVE_ONE, BELOW_BOUND = 1e-6, 1e-9  # How far above 1 the search begins, how far below the lower bound is.
FACTOR_RANGE = (0.1, 10.0)  # The range of c and of m.
MOST_HOST_S = 1.0  # The upper limit of h.
# Steps over which the standard error is averaged: four prefills of n tokens alone, then four steps of d
# decodes alone. Columns: N, A_p, D, K, P.
USUAL_STEPS = np.array(
    [[n, n * (n + 1) / 2, 0, 0, 1] for n in (128, 512, 2048, 8192)]
    + [[d, 0, d, d * 1024, 0] for d in (1, 8, 32, 128)],
    dtype=float,
)


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """The engine that was measured, on `tp` GPUs. Without `kv_tokens` the memory model computes them."""

    llm: Llm
    gpu: Gpu
    tp: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    kv_tokens: int | None = None
    version: Engine | None = None  # The engine, with its scheduling and host time.


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A corrected fit, `latency`, and the correction: c is `compute`, m `bandwidth`, h `host_s`.

    `standard_errors` are those of log c, of log m, and of h [s]. `before_frac` and `after_frac` are the root
    mean squares of log(predicted / measured) before and after the correction. `errors` are predicted /
    measured - 1 after the correction, for runs only, by (name of the run, statistic). `points` is the number
    of measurements.
    """

    latency: StepLatency
    compute: float
    bandwidth: float
    host_s: float
    standard_errors: tuple[float, float, float]
    before_frac: float
    after_frac: float
    points: int
    errors: Mapping[tuple[str, str], float]

    @property
    def uncertainty_frac(self) -> float:
        """The relative standard error of a corrected step time; 0 if it is not known."""
        return self.latency.uncertainty_frac or 0.0

    def as_dict(self) -> dict[str, Any]:
        """The numbers of the calibration, as they are written to documents."""
        compute, bandwidth, host_s = self.standard_errors
        return {
            "compute": self.compute,
            "compute_standard_error_frac": compute,
            "bandwidth": self.bandwidth,
            "bandwidth_standard_error_frac": bandwidth,
            "host_s": self.host_s,
            "host_standard_error_s": host_s,
            "before_frac": self.before_frac,
            "after_frac": self.after_frac,
            "uncertainty_frac": self.uncertainty_frac,
            "points": self.points,
            "errors": {f"{run}: {name}": error for (run, name), error in self.errors.items()},
        }


def _host_of(z: Array) -> float:
    """h [s] for the z of `_fit_factors`."""
    return float((z[2] - 1) * HOST_PRIOR_S)


def correct_latency(latency: StepLatency, compute: float, bandwidth: float, host_s: float) -> StepLatency:
    """The step times t' of the formula at the top of this module. The host time is never below 0."""
    return replace(latency.scale_times(compute, bandwidth), h_s=max(latency.h_s + host_s, 0.0))


def calibrate_host(
    latency: StepLatency,
    *,
    steps: Sequence[StepTable] = (),
    runs: Sequence[MeasuredRun] = (),
    engine: MeasuredEngine | None = None,
) -> Calibrated:
    """Fit c, m and h to measured steps, runs, or both; runs need the `engine` that served them.

    The latencies of runs include the engine's host time. So the known part of it (models/engine.py) is added
    to the latency first, and h is what remains to be corrected. If whole steps or runs are given too, tables
    of kernel times are compared without any host time.

    Raises InputError without measurements, without the engine of runs, and for runs that cannot be simulated.
    """
    if not steps and not runs:
        raise InputError("calibration: nothing was measured; give a step table or a runs.json")
    kernels = latency  # Step times of the fit, before the engine's host time is added.
    if runs:
        latency = add_host_time(latency, engine)
    # If whole steps or runs are given too, tables of kernel times have no part in the host time.
    is_whole = bool(runs) or not all(table.is_kernel_time for table in steps)
    is_of_kernels = np.repeat(
        [table.is_kernel_time and is_whole for table in steps], [len(table.y) for table in steps]
    ).astype(bool)
    X = np.vstack([np.empty((0, 5)), *(table.X for table in steps)])
    y = np.concatenate([np.empty(0), *(table.y for table in steps)])
    targets = [target for run in runs for target in _targets(run)]
    weights = np.concatenate([np.ones(len(y)), [target.weight for target in targets]])

    def log_errors(z: Array) -> Array:
        """log(predicted / measured) of the steps, then of the runs' statistics. z is that of
        `_fit_factors`.
        """
        trial = correct_latency(latency, z[0], z[1], _host_of(z))
        steps_s = np.where(
            is_of_kernels, correct_latency(kernels, z[0], z[1], 0.0).steps_s(X), trial.steps_s(X)
        )
        logs = [np.log(steps_s / y)]
        predictions = executors.run_items(_predict_run, runs, shared=(engine, trial))
        for run, predicted in zip(runs, predictions, strict=True):
            logs.append(np.log([predicted[t.key] / t.measured_s for t in targets if t.run is run]))
        return np.concatenate(logs)

    before = log_errors(np.ones(3))
    step = RUN_STEP if runs else FORMULA_STEP
    z, covariance, sigma = _fit_factors(log_errors, weights, latency.h_s, step)
    after = log_errors(z)
    compute, bandwidth = float(z[0]), float(z[1])
    host_s = max(_host_of(z), -latency.h_s)
    corrected = correct_latency(latency, compute, bandwidth, host_s)
    uncertainty_frac = float(np.sqrt(_variance(latency, z, covariance) + sigma**2))
    # Step times of engines and latencies of runs include host time, so the result is of whole steps.
    kind = "steps" if is_whole else latency.kind
    z_errors = np.sqrt(np.diag(covariance))
    return Calibrated(
        latency=replace(
            corrected,
            basis=f"{latency.basis}; calibrated on {_measured_text(len(y), len(runs))}: "
            f"compute x{compute:.3g}, bandwidth x{bandwidth:.3g}, host overhead {host_s * 1e3:+.3g} ms; "
            f"standard error {100 * uncertainty_frac:.1f} %",
            uncertainty_frac=uncertainty_frac,
            kind=kind,
        ),
        compute=compute,
        bandwidth=bandwidth,
        host_s=host_s,
        standard_errors=(
            float(z_errors[0] / z[0]),
            float(z_errors[1] / z[1]),
            float(z_errors[2] * HOST_PRIOR_S),
        ),
        before_frac=_rms(before, weights),
        after_frac=_rms(after, weights),
        points=len(weights),
        errors={
            (target.run.name, " ".join(target.key)): float(np.expm1(log))
            for target, log in zip(targets, after[len(y) :], strict=True)
        },
    )


def _fit_factors(
    log_errors: Callable[[Array], Array], weights: Array, h_s: float, step: float
) -> tuple[Array, Array, float]:
    """Minimise the sum at the top of this module. Returns z, its covariance, and sigma.

    z = (c, m, 1 + h / HOST_PRIOR_S): all near 1, so that one relative `step` suits the numerical derivatives.
    `log_errors(z)` are the r of all measurements, each of which counts with its weight. `h_s` is the host
    time of the latency; h may bring it down to 0, but not below.
    """

    def residuals(z: Array, sigma: float) -> Array:
        prior = [np.log(z[0]) / FACTOR_PRIOR, np.log(z[1]) / FACTOR_PRIOR, z[2] - 1]
        return np.concatenate([log_errors(z) * weights / sigma, prior])

    points = float(np.sum(weights**2))
    # The solver wants z strictly inside its bounds. Without host time the bound of z[2] is 1; so the bound is
    # a little less, and the search begins at a little more.
    lowest = [FACTOR_RANGE[0], FACTOR_RANGE[0], 1 - h_s / HOST_PRIOR_S - BELOW_BOUND]
    highest = [FACTOR_RANGE[1], FACTOR_RANGE[1], 1 + MOST_HOST_S / HOST_PRIOR_S]
    z, sigma, used_sigma = np.ones(3) + ABOVE_ONE, SIGMA, SIGMA
    for _ in range(ROUNDS):  # The fit depends on sigma and sigma on the fit, so they are computed in turn.
        used_sigma = sigma
        solution = least_squares(
            residuals,
            z,
            bounds=(lowest, highest),
            args=(used_sigma,),
            # Each evaluation simulates all runs, so the search ends well above the precision of floats.
            xtol=1e-5,
            ftol=1e-6,
            jac="3-point",
            diff_step=step,
            max_nfev=MOST_TRIALS,
        )
        z = np.asarray(solution.x)
        squares = float(np.sum((log_errors(z) * weights) ** 2))
        sigma = float(np.sqrt((SIGMA_POINTS * SIGMA**2 + squares) / (SIGMA_POINTS + points)))
    # In the solver's Jacobian the rows of measurements were divided by `used_sigma`, which is older than
    # `sigma`; the rows of the three priors depend on neither.
    rescaled = np.append(np.full(len(weights), used_sigma / sigma), [1.0] * 3)
    jacobian = np.asarray(solution.jac) * rescaled[:, None]
    return z, np.linalg.inv(jacobian.T @ jacobian), sigma


def add_host_time(latency: StepLatency, engine: MeasuredEngine | None) -> StepLatency:
    """The latency plus the engine's host time, unless that is included already or no version is known. Raises
    InputError without an engine.
    """
    if engine is None:
        raise InputError("calibration: runs need the engine that served them")
    if engine.version is None or latency.has_host:
        return latency
    step_s, sequence_s = engine.version.unhidden_time.per_step_s(engine.tp)
    return replace(latency, h_s=latency.h_s + step_s, b_s=latency.b_s + sequence_s, kind="steps")


def _predict_run(
    shared: tuple[MeasuredEngine | None, StepLatency], run: MeasuredRun
) -> dict[tuple[str, str], float]:
    """Like `predict_run`, with its arguments in the order of `executors.run_items`: what all items share
    first.
    """
    engine, latency = shared
    assert engine is not None
    return predict_run(run, engine, latency)


def predict_run(
    run: MeasuredRun, engine: MeasuredEngine, latency: StepLatency
) -> dict[tuple[str, str], float]:
    """The statistics of a run [s] as our simulator predicts them, by (metric, statistic); only those that the
    fit compares (`_targets`). A run whose requests must be drawn is simulated with all SEEDS, and the mean is
    taken.

    Raises InputError if the engine's KV cache is too small for the requests, or a statistic cannot be
    simulated.
    """
    budget = run.max_num_batched_tokens or engine.max_num_batched_tokens
    seats = min(run.max_num_seqs or engine.max_num_seqs, budget)
    kv_tokens = run.kv_tokens or engine.kv_tokens or _kv_tokens(engine, budget, seats)
    worker = WorkerType(
        engine.gpu, engine.tp, latency, kv_tokens, budget, seats, engine=engine.version
    ).with_llm(engine.llm)
    fleet = Fleet(engine.llm, (Pool("measured", "mixed", worker, 1),))
    is_drawn = run.length_spread_frac > 0 or not (run.concurrency or run.arrival_s)
    by_seed = []
    for seed in SEEDS if is_drawn else SEEDS[:1]:
        trace = _run_trace(run, seed)
        simulation = simulate(fleet, trace, closed_loop=run.concurrency or 0)
        if rejected := int((simulation.status != FINISHED).sum()):
            raise InputError(
                f"run {run.name}: {rejected} of {run.requests} requests do not "
                f"fit the {kv_tokens} KV tokens of {engine.tp} x {engine.gpu.name}; give --kv-tokens"
            )
        values = {"ttft": simulation.ttft_s, "tpot": simulation.tpot_s, "e2e": simulation.e2e_s}
        gaps = np.maximum(simulation.output_tokens - 1, 0)
        by_seed.append({target.key: _statistic(values, gaps, target.key, run) for target in _targets(run)})
    return {key: float(np.mean([statistics[key] for statistics in by_seed])) for key in by_seed[0]}


@dataclass(frozen=True, slots=True, eq=False)
class _MeasuredStatistic:
    """One measured statistic of a run; `key` is (metric, statistic), such as ("ttft", "p90"). The statistics
    of one metric depend on each other, so their weights make them count as one measurement together.
    """

    run: MeasuredRun
    key: tuple[str, str]
    measured_s: float
    weight: float


def _targets(run: MeasuredRun) -> list[_MeasuredStatistic]:
    """The statistics that the fit compares: of TTFT and TPOT (or the mean TBT), and of E2E only if one of
    these two is missing. Statistics named `..._at_most` are left out: they are shares of requests and no
    times. Raises InputError if none is left.
    """
    usable = {
        metric: {name: value for name, value in values.items() if not name.endswith("_at_most")}
        for metric, values in run.latency_s.items()
    }
    metrics = [metric for metric in ("ttft", "tpot") if usable.get(metric)]
    if "tpot" not in metrics and "mean" in usable.get("tbt", {}):
        metrics.append("tbt")
        usable["tbt"] = {"mean": usable["tbt"]["mean"]}
    if len(metrics) < 2 and usable.get("e2e"):
        metrics.append("e2e")
    if not metrics:
        raise InputError(f"run {run.name}: holds neither TTFT, TPOT nor end-to-end times to compare with")
    return [
        # The fit sums squares, so k statistics with the weight k^-0.5 count as one.
        _MeasuredStatistic(run, (metric, name), value, len(usable[metric]) ** -0.5)
        for metric in metrics
        for name, value in usable[metric].items()
    ]


def _run_trace(run: MeasuredRun, seed: int) -> Trace:
    """The requests of a run. Lengths and arrivals that were not recorded are drawn with the seed. Raises
    InputError if neither arrivals nor a load are known.
    """
    n, rng = run.requests, np.random.default_rng(seed)
    lengths = []
    for values in (run.input_tokens, run.output_tokens):
        spread = run.length_spread_frac if len(values) < n else 0.0
        drawn = np.array(values) * (rng.uniform(1 - spread, 1 + spread, n) if spread else np.ones(n))
        lengths.append(np.maximum(np.rint(drawn), 1).astype(np.int64))
    if run.concurrency is not None:
        # The simulation keeps this many requests in flight, whatever the arrivals.
        arrival_s = np.zeros(n)
    elif run.arrival_s:
        order = np.argsort(run.arrival_s, kind="stable")
        arrival_s, lengths = np.array(run.arrival_s)[order], [values[order] for values in lengths]
    elif run.rate_rps is not None:
        arrival_s = np.cumsum(rng.exponential(1 / run.rate_rps, n))
    else:
        raise InputError(
            f"run {run.name}: its load is not known; import it again with --concurrency, --rate or --duration"
        )
    return Trace(run.name, arrival_s, lengths[0], lengths[1])


def _statistic(values: Mapping[str, Array], gaps: Array, key: tuple[str, str], run: MeasuredRun) -> float:
    """The simulated statistic `key` [s], such as the mean TTFT. `values` (n,) are the seconds of each request
    by metric, `gaps` (n,) the number of its gaps between tokens. Raises InputError if the statistic has no
    value, or is 0 and has no log.
    """
    metric, name = key
    if metric == "tbt":  # Every gap counts once, so a request counts as often as it has gaps.
        value_s = float(np.nansum(values["tpot"] * gaps) / max(gaps.sum(), 1))
    else:
        finite_s = values[metric][np.isfinite(values[metric])]  # The TPOT of a one-token answer is NaN.
        if not finite_s.size:
            raise InputError(f"run {run.name}: {metric} was measured, yet every request has one output token")
        if name == "mean":
            value_s = float(finite_s.mean())
        elif name == "max":
            value_s = float(finite_s.max())
        else:  # A percentile, such as p90.
            value_s = float(np.percentile(finite_s, float(name[1:])))
    if not value_s > 0:
        raise InputError(f"run {run.name}: {metric} {name} was measured, but is zero in simulation")
    return value_s


def _kv_tokens(engine: MeasuredEngine, budget: int, seats: int) -> int:
    """KV tokens of the measured engine by the memory model, with a token budget of `budget` and this many
    seats. Raises InputError if the LLM does not fit.
    """
    kv_tokens = worker_memory(
        engine.llm,
        engine.gpu,
        engine.tp,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        settings=MemorySettings.of_engine(engine.version),
    ).kv_tokens
    if kv_tokens == 0:
        raise InputError(f"{engine.llm.name} does not fit {engine.tp} x {engine.gpu.name}; is --tp right?")
    return kv_tokens


def _variance(latency: StepLatency, z: Array, covariance: Array) -> float:
    """The variance of log step times that follows from the `covariance` of z: the mean over USUAL_STEPS of
    g' covariance g, where g is the gradient of the log step time at z.
    """

    def logs(trial_z: Array) -> Array:
        trial = correct_latency(latency, trial_z[0], trial_z[1], _host_of(trial_z))
        return np.asarray(np.log(trial.steps_s(USUAL_STEPS)))

    gradient = np.column_stack(
        [(logs(z + FORMULA_STEP * unit) - logs(z)) / FORMULA_STEP for unit in np.eye(3)]
    )
    return float(np.mean(np.einsum("ij,jk,ik->i", gradient, covariance, gradient)))


def _rms(log_errors: Array, weights: Array) -> float:
    """The weighted root mean square of log errors."""
    return float(np.sqrt(np.sum((log_errors * weights) ** 2) / np.sum(weights**2)))


def _measured_text(steps: int, runs: int) -> str:
    """How much was measured, for instance "8 steps and 1 run"; without what was not measured."""
    counted = ((steps, "step"), (runs, "run"))
    return " and ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counted if count)
