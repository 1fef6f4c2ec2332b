"""How many requests a CPU second of the simulator carries.

    python benchmarks/simulator.py [path/to/AzureLLMInferenceTrace_conv.csv]

Without a path it takes the Azure conversation trace from ../shared/data/traces (19 366 requests in an hour,
CC-BY 4.0), or, where that is missing, made-up requests in the same number and of like lengths. Two cases of
Llama-3.1-70B on H100 with TP 4: the whole trace on one worker, and the trace superposed to 200 requests/s on
66 workers. Each with what the planner's search asks for (limits counted), and with every run of steps
recorded. CPU seconds of this process, best of three, compilation not counted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from planner.catalog import read_catalog
from planner.domain import Fleet, Limit, Pool, WorkerType
from planner.models.memory import kv_cache_tokens
from planner.simulator.replay import simulate
from planner.traces import Trace, read_trace
from planner.traffic import rescale

AZURE = Path(__file__).parents[2] / "shared" / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"
LIMITS = (Limit("ttft", 0.9, 2.0), Limit("tbt", 0.99, 0.2))
TP = 4


def made_up(rng: np.random.Generator) -> Trace:
    """Poisson arrivals, log-normal lengths with the means of the Azure conversation trace."""
    n = 19_366
    lengths = [np.ceil(rng.lognormal(mu, 1.0, n)).astype(np.int64) for mu in (6.55, 4.85)]
    return Trace(
        "made up",
        np.sort(rng.uniform(0, 3500, n)),
        np.minimum(lengths[0], 8192),
        np.minimum(lengths[1], 1024),
    )


def fleet_of(workers: int) -> Fleet:
    catalog = read_catalog()
    llm, gpu = catalog.llm("meta-llama/Llama-3.1-70B"), catalog.gpu("h100-80g")
    latency = catalog.latency(llm, gpu, TP)
    worker_type = WorkerType(gpu, TP, latency, kv_cache_tokens(llm, gpu, TP), 2048, 256)
    return Fleet(llm, (Pool("h100", "mixed", worker_type, workers),))


def cpu_s(fleet: Fleet, trace: Trace, *, record: bool) -> float:
    """Best of three."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        simulate(fleet, trace, limits=LIMITS, record=record)
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else AZURE
    trace = read_trace(path) if path.exists() else made_up(np.random.default_rng(0))
    busy = rescale(trace, 200.0, rng=np.random.default_rng(0))
    simulate(fleet_of(1), trace.select(np.arange(10)), limits=LIMITS)  # compiles
    print(f"{trace.name}: {len(trace)} requests, {int(trace.output_tokens.sum())} output tokens")
    for workers, traffic in ((1, trace), (66, busy)):
        for record in (False, True):
            seconds = cpu_s(fleet_of(workers), traffic, record=record)
            print(
                f"{workers:3} workers, {traffic.rate_rps:6.1f} requests/s, {len(traffic):7} requests"
                f"{', recorded' if record else '':10}: {seconds:7.3f} CPU s, "
                f"{len(traffic) / seconds:10,.0f} requests per CPU s"
            )


if __name__ == "__main__":
    main()
