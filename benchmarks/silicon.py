"""Simulated against measured: closed-loop runs of real vLLM on H100 and H200.

    pip install -e '.[silicon]' && python benchmarks/silicon.py

AIConfigurator's wheel carries measured points (systems/silicon_sample.csv, Apache-2.0): mean TTFT and TPOT
of vLLM at a fixed concurrency. Here are those of Llama-3.1-70B in fp8 (InferenceX, vLLM 0.10.2 with
asynchronous scheduling: lengths uniform in 0.8 ... 1 of the nominal ones) and of Qwen3-32B in bf16 (vLLM
0.12, AIConfigurator's authors: equal lengths, and the token budget its generator gives engines it benchmarks:
one prompt, the batch and 1500 tokens). Each point is simulated with our fit of the kernel times of the same
GPUs and three constants per campaign: host overhead per step, a factor on prefill, and a delay before the
first token (tokenizer, HTTP). They are calibrated on half of the configurations (GPU, TP, lengths); the
errors below are those on the other half. Left out are 24 points of dense LLMs (21 of Llama-3.1-8B fp8 on
H200, 3 of Qwen3-32B fp8 on H100), Blackwell and mixtures of experts. Prints a Markdown table.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from planner.documents.catalog import Catalog, read_catalog
from planner.domain import Gpu, Llm
from planner.fleet import Fleet, Pool, WorkerType
from planner.imports.silicon import silicon_table
from planner.models.latency import StepLatency
from planner.models.memory import kv_cache_tokens
from planner.models.step_fit import PiecewiseLinearStepLatency
from planner.simulator import simulate
from planner.traffic.trace import Trace

Floats = npt.NDArray[np.float64]
SYSTEMS = {"h100_sxm": "h100-80g", "h200_sxm": "h200-141g"}
WAVES = 10  # requests per seat of the closed loop
BUDGET, SEATS = 8192, 256  # as a server on these GPUs starts with


@dataclass(frozen=True)
class Campaign:
    """Measured points that were taken the same way; `shortest` is the least length over the nominal one,
    `margin_tokens` what the token budget has beside one prompt and the batch, None where it is BUDGET.
    """

    llm: str
    quantised: str
    shortest: float
    systems: tuple[str, ...]
    margin_tokens: int | None = None


@dataclass(frozen=True)
class Point:
    gpu: str
    tp: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    ttft_s: float
    tpot_s: float

    @property
    def configuration(self) -> tuple[str, int, int, int]:
        return self.gpu, self.tp, self.input_tokens, self.output_tokens


@dataclass(frozen=True)
class Constants:
    host_s: float
    prefill: float
    first_token_s: float


CAMPAIGNS = (
    Campaign("meta-llama/Llama-3.1-70B", "fp8", 0.8, ("h100_sxm", "h200_sxm")),
    Campaign("Qwen/Qwen3-32B", "", 1.0, ("h100_sxm",), margin_tokens=1500),
)


def points_of(campaign: Campaign) -> list[Point]:
    text = files("aiconfigurator_core").joinpath("systems", "silicon_sample.csv").read_text()
    return [
        Point(
            SYSTEMS[row["system"]],
            int(row["tp_size"]),
            int(row["isl"]),
            int(row["osl"]),
            int(row["batch_size"]),
            float(row["silicon_ttft_ms"]) / 1e3,
            float(row["silicon_tpot_ms"]) / 1e3,
        )
        for row in csv.DictReader(text.splitlines())
        if row["backend"] == "vllm"
        and row["mode"] == "agg"
        and row["model_path"] == campaign.llm
        and row["system"] in campaign.systems
        and row["gemm_quant_mode"] == campaign.quantised
    ]


def kernel_times(campaign: Campaign, llm: Llm, catalog: Catalog, gpu: str, tp: int) -> StepLatency:
    if not campaign.quantised:
        return catalog.latency(llm, catalog.gpu(gpu), tp)
    table = silicon_table(llm, catalog.gpu(gpu), tp, fp8_weights=True)
    return PiecewiseLinearStepLatency(beyond="extrapolate").fit(table.X, table.y).latency_


def worker_type(campaign: Campaign, llm: Llm, gpu: Gpu, point: Point, latency: StepLatency) -> WorkerType:
    """The engine that the point was measured on."""
    budget = BUDGET
    if campaign.margin_tokens is not None:
        budget = point.input_tokens + point.concurrency + campaign.margin_tokens
    kv_tokens = kv_cache_tokens(llm, gpu, point.tp, max_num_batched_tokens=budget, max_num_seqs=SEATS)
    return WorkerType(gpu, point.tp, latency, kv_tokens, budget, SEATS)


def simulated(point: Point, llm: Llm, worker: WorkerType, shortest: float, constants: Constants) -> Floats:
    """Mean TTFT and TPOT [s], shape (2,)."""
    latency = worker.latency
    slower = replace(
        latency,
        h_s=constants.host_s,
        a_s=latency.a_s * constants.prefill,
        f_s=tuple(latency.f_s[0] + (f - latency.f_s[0]) * constants.prefill for f in latency.f_s),
    )
    rng, n = np.random.default_rng(0), WAVES * point.concurrency
    inputs = np.round(point.input_tokens * rng.uniform(shortest, 1, n)).astype(np.int64)
    outputs = np.round(point.output_tokens * rng.uniform(shortest, 1, n)).astype(np.int64)
    trace = Trace("closed loop", np.zeros(n), inputs, outputs)
    fleet = Fleet(llm, (Pool("mixed", "mixed", replace(worker, latency=slower), 1),))
    run = simulate(fleet, trace, closed_loop=point.concurrency)
    return np.array([np.nanmean(run.ttft_s) + constants.first_token_s, np.nanmean(run.tpot_s)])


def main() -> None:
    catalog = read_catalog()
    print("| LLM | GPU | points | TTFT MAPE | TTFT median | TPOT MAPE | TPOT median | constants |")
    print("|---|---|---|---|---|---|---|---|")
    for campaign in CAMPAIGNS:
        row = catalog.llm(campaign.llm)
        # the points that run out of KV cache are met with an fp8 cache only
        llm = replace(row, dtype_bytes=1.0, kv_dtype_bytes=1.0) if campaign.quantised else row
        points = points_of(campaign)
        times = {
            (gpu, tp): kernel_times(campaign, llm, catalog, gpu, tp)
            for gpu, tp in sorted({(point.gpu, point.tp) for point in points})
        }
        workers = {
            point: worker_type(campaign, llm, catalog.gpu(point.gpu), point, times[point.gpu, point.tp])
            for point in points
        }
        configurations = sorted({point.configuration for point in points})
        shuffled = np.random.default_rng(1).permutation(len(configurations))
        known = {configurations[i] for i in shuffled[: len(configurations) // 2]}

        def ratios(
            constants: Constants,
            chosen: list[Point],
            *,
            llm: Llm = llm,
            campaign: Campaign = campaign,
            workers: dict[Point, WorkerType] = workers,
        ) -> Floats:
            """Simulated over measured TTFT and TPOT, shape (points, 2)."""
            return np.array(
                [
                    simulated(p, llm, workers[p], campaign.shortest, constants) / [p.ttft_s, p.tpot_s]
                    for p in chosen
                ]
            )

        calibration = [point for point in points if point.configuration in known]
        rest = [point for point in points if point.configuration not in known]

        def loss(x: Floats, calibration: list[Point] = calibration) -> float:
            errors = np.log(ratios(Constants(abs(x[0]) / 1e3, x[1], x[2] / 1e2), calibration))
            return float(np.abs(errors).mean(axis=0).sum() + 0.2 * abs(np.log(x[1])))

        simplex = [[1.0, 1.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.15, 1.0], [1.0, 1.0, 3.0]]
        start = {"maxiter": 60, "initial_simplex": simplex}
        x = minimize(loss, simplex[0], method="Nelder-Mead", options=start).x
        constants = Constants(abs(x[0]) / 1e3, x[1], x[2] / 1e2)
        said = (
            f"host {constants.host_s * 1e3:.1f} ms, prefill x{constants.prefill:.2f}, "
            f"first token +{constants.first_token_s * 1e3:.0f} ms"
        )
        for gpu in sorted({point.gpu for point in rest}):
            errors = 100 * (ratios(constants, [point for point in rest if point.gpu == gpu]) - 1)
            mape, median = np.abs(errors).mean(axis=0), np.median(errors, axis=0)
            print(
                f"| {campaign.llm} {campaign.quantised} | {gpu} | {len(errors)} | {mape[0]:.1f} % | "
                f"{median[0]:+.1f} % | {mape[1]:.1f} % | {median[1]:+.1f} % | {said} |"
            )


if __name__ == "__main__":
    main()
