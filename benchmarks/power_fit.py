"""Fits `Power` (planner/models/power.py) to measured Watts, and predicts each (LLM, TP) or campaign by a fit
without it.

It is a module of its own because scikit-learn takes most of a second to import, and only fitting needs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from planner.documents.catalog import Catalog
from planner.errors import ExtrapolationError, InputError
from planner.files.checked_files import open_input
from planner.models.latency import Array
from planner.models.power import Power, step_utilisations

SPLITWISE_LLMS = {"bloom-176b": "bloom", "llama2-70b": "meta-llama/Llama-2-70b-hf"}
SPLITWISE_GPU = "a100-80g"  # The only GPU in Splitwise's table whose power was measured.
# Longer prefills are not fitted: their time grows faster in Splitwise's engine while the power stays the
# same, so utilisation does not explain it.
LONGEST_PREFILL_TOKENS = 2048
# A run's mean power counts as that of its decodes if prefill took no more than this share of the time.
LARGEST_PREFILL_SHARE = 0.03


# Prompts of ML.ENERGY's tasks, which it does not state: mean tokens, all turns of a chat together.
PROMPT_TOKENS = {"lm-arena-chat": 340, "gpqa": 215, "sourcegraph-fim": 510}
# GPUs that draw less than this share of their limit wait for their host (benchmarks/reality.py).
HOST_BOUND_FRAC = 0.6
# The exponent x of `StepPower` for ML.ENERGY's GPUs. Errors on campaigns left out of the fit, in Watts and in
# Joules per token (simulated, 231 busy runs): 10.0 % and 12.3 % with x = 1, 9.8 % and 11.8 % with 0.5, 9.8 %
# and 11.7 % with 0.35.
MEASURED_EXPONENT = 0.5
ML_ENERGY_GPUS = {"H100": "h100-80g", "B200": "b200-180g"}


class StepPower(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Share of the limit  min(top, floor + c * compute utilisation ^ x + m * memory utilisation),  all >= 0.

    X (n, 2): utilisation of compute and of memory bandwidth.   y (n,): measured share of the limit, > 0.
    Fitted on relative error; monotone by its signs.
    """

    def __init__(
        self, *, beyond: str = "raise", top_frac: float | None = None, compute_exponent: float = 1.0
    ) -> None:
        self.beyond = beyond  # Outside the measured range: "raise" or "extrapolate".
        self.top_frac = top_frac  # The largest share; fitted if None.
        self.compute_exponent = compute_exponent  # x.

    def fit(self, X: Array, y: Array, sample_weight: Array | None = None) -> Self:
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        if X.shape[1] != 2:
            raise InputError(f"power: X has {X.shape[1]} columns, expected compute and memory utilisation")
        if not (y > 0).all():
            raise InputError(f"power: measured share is {y.min():g}, must be > 0")
        weight = np.sqrt(np.ones(len(y)) if sample_weight is None else sample_weight) / y
        columns = np.column_stack([np.ones(len(y)), self._powers(X)])

        def error(p: Array) -> Array:
            top = p[3] if self.top_frac is None else self.top_frac
            return np.asarray((np.minimum(columns @ p[:3], top) - y) * weight)

        start = np.array([y.min() / 2, 1.0, 1.0, y.max()])
        known = 4 if self.top_frac is None else 3
        coefficients = least_squares(error, start[:known], bounds=(np.zeros(known), np.full(known, np.inf))).x
        self.coef_ = coefficients if self.top_frac is None else np.append(coefficients, self.top_frac)
        self.x_max_ = X.max(axis=0)
        return self

    def predict(self, X: Array) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        if self.beyond == "raise" and (X > self.x_max_).any():
            raise ExtrapolationError(
                f"power: asked for utilisations {X.max(axis=0).tolist()} of compute and memory, measured "
                f"up to {self.x_max_.tolist()}; measure further, or fit with beyond='extrapolate'"
            )
        floor, compute, memory, top = self.coef_
        return np.asarray(np.minimum(floor + self._powers(X) @ np.array([compute, memory]), top))

    def _powers(self, X: Array) -> Array:
        return np.asarray(X ** np.array([self.compute_exponent, 1.0]))

    def power(self, idle_frac: dict[str, float], other_idle_frac: float) -> Power:
        check_is_fitted(self)
        floor, compute, memory, top = (float(value) for value in self.coef_)
        exponent = self.compute_exponent
        return Power(
            floor, memory, compute, max(top, floor), idle_frac, other_idle_frac, compute_exponent=exponent
        )


def splitwise_cells(path: Path, catalog: Catalog) -> pd.DataFrame:
    """Measured power of splitwise-sim's perf_model.csv, one row per cell: `group` is the (LLM, TP), `tokens`
    the prompts', `peak_frac` and `mean_frac` shares of the limit over a run of which prefill took
    `prefill_share`; utilisations `compute_p` and `memory_p` of the prefill, `_d` of the decodes.
    """
    with open_input(path) as stream:
        table = pd.read_csv(stream)
    cell = ["model", "tensor_parallel", "prompt_size", "batch_size", "token_size"]
    needed = {*cell, "hardware", "peak_power", "average_power", "prompt_time", "token_time", "e2e_time"}
    if missing := sorted(needed - set(table.columns)):
        raise InputError(f"{path}: lacks the column(s) {', '.join(missing)}; expected splitwise-sim's table")
    table = table[(table.peak_power > 0) & (table.average_power > 0)]
    cells = table.groupby(cell).mean(numeric_only=True).reset_index()
    gpu = catalog.gpu(SPLITWISE_GPU)
    rows = []
    for run in cells.to_dict("records"):
        llm, tp, batch = catalog.llm(SPLITWISE_LLMS[run["model"]]), run["tensor_parallel"], run["batch_size"]
        tokens = run["prompt_size"] * batch
        kv_tokens = batch * (run["prompt_size"] + run["token_size"] / 2)
        prefill = step_utilisations(llm, gpu, tp, run["prompt_time"] / 1e3, tokens)
        decode = step_utilisations(llm, gpu, tp, run["token_time"] / 1e3, batch, kv_tokens)
        rows.append(
            {
                "group": f"{run['model']} tp{tp}",
                "tokens": tokens,
                "peak_frac": run["peak_power"],
                "mean_frac": run["average_power"],
                "prefill_share": run["prompt_time"] / run["e2e_time"],
                "compute_p": float(prefill[0]),
                "memory_p": float(prefill[1]),
                "compute_d": float(decode[0]),
                "memory_d": float(decode[1]),
            }
        )
    return pd.DataFrame(rows)


def phases(cells: pd.DataFrame) -> pd.DataFrame:
    """The power of one phase alone, as far as the cells give it: `frac` is the peak of a prefill, or the mean
    of a run of which prefill took at most LARGEST_PREFILL_SHARE, which is nearly that of its decodes.
    """
    decoding = cells[cells.prefill_share <= LARGEST_PREFILL_SHARE]
    parts = [
        part.rename(columns={f"compute_{p}": "compute", f"memory_{p}": "memory", frac: "frac"}).assign(
            phase=name
        )
        for p, part, frac, name in (
            ("p", cells, "peak_frac", "prefill"),
            ("d", decoding, "mean_frac", "decode"),
        )
    ]
    return pd.concat(parts, ignore_index=True)[["group", "phase", "tokens", "compute", "memory", "frac"]]


def fit_rows(rows: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which rows the shipped fit uses: decodes, and prefills up to LONGEST_PREFILL_TOKENS."""
    return np.asarray((rows.phase == "decode") | (rows.tokens <= LONGEST_PREFILL_TOKENS))


def fit_power(rows: pd.DataFrame) -> StepPower:
    """The fit to these rows; prefills and decodes have half of the weight each."""
    share = rows.groupby("phase").phase.transform("size").to_numpy(float)
    model = StepPower(beyond="extrapolate")
    return model.fit(rows[["compute", "memory"]].to_numpy(), rows.frac.to_numpy(), sample_weight=1 / share)


def held_out(rows: pd.DataFrame) -> Array:
    """Each row predicted by a fit without its (LLM, TP)."""
    predicted = np.empty(len(rows))
    used = fit_rows(rows)
    for group in rows.group.unique():
        inside = (rows.group == group).to_numpy()
        fitted = fit_power(rows[used & ~inside])
        predicted[inside] = fitted.predict(rows.loc[inside, ["compute", "memory"]].to_numpy())
    return predicted


def ml_energy_rows(path: Path, catalog: Catalog) -> pd.DataFrame:
    """Closed-loop runs of ML.ENERGY, one row per run: `gpu`, `campaign` (LLM, GPU, task), utilisations of
    `compute` and of `memory` in its mean step, and `frac`, the share of the limit that its GPUs drew. Runs
    of LLMs that are in no catalog, of workers that share experts, and of GPUs that wait for their host are
    left out.
    """
    rows = []
    for line in path.read_text().splitlines():
        run = json.loads(line)
        known = run["llm"].lower() in catalog.llm_aliases and run["task"] in PROMPT_TOKENS
        if not known or run["parallelization"]["data_parallel"] > 1:
            continue
        llm, gpu = catalog.llm(run["llm"]), catalog.gpu(ML_ENERGY_GPUS[run["gpu_model"]])
        sequences, outputs, gpus = run["avg_batch_size"], run["avg_output_len"], run["num_gpus"]
        prompt = PROMPT_TOKENS[run["task"]]
        step_s = sequences / run["output_throughput_tokens_per_sec"]
        # Per step a sequence has one token, and its prompt spread over the steps of its output.
        tokens = sequences * (1 + prompt / outputs)
        used = step_utilisations(llm, gpu, gpus, step_s, tokens, sequences * (prompt + outputs / 2))
        if run["avg_power_watts"] / gpus < HOST_BOUND_FRAC * gpu.power_w:
            continue
        rows.append(
            {
                "gpu": gpu.name,
                "campaign": f"{run['llm']} {run['task']}",
                "compute": float(used[0]),
                "memory": float(used[1]),
                "frac": run["avg_power_watts"] / gpus / gpu.power_w,
            }
        )
    return pd.DataFrame(rows)


def fit_runs(rows: pd.DataFrame) -> StepPower:
    """The fit to the runs of one GPU; at most it draws its limit."""
    model = StepPower(beyond="extrapolate", top_frac=1.0, compute_exponent=MEASURED_EXPONENT)
    return model.fit(rows[["compute", "memory"]].to_numpy(), rows.frac.to_numpy())


def held_out_campaigns(rows: pd.DataFrame) -> Array:
    """Each run of one GPU predicted by a fit without its campaign."""
    predicted = np.empty(len(rows))
    for campaign in rows.campaign.unique():
        inside = (rows.campaign == campaign).to_numpy()
        predicted[inside] = fit_runs(rows[~inside]).predict(
            rows.loc[inside, ["compute", "memory"]].to_numpy()
        )
    return predicted
