"""Measures the speed of simulations: requests per CPU second, and how the cost grows.

    python benchmarks/simulator.py [path/to/AzureLLMInferenceTrace_conv.csv] [--vidur DIR] [--chart FILE.svg]

Without a path it takes the Azure conversation trace from ../shared/data/traces (19 366 requests in an hour,
CC-BY 4.0), or, where that is missing, as many drawn requests with similar lengths. Llama-3.1-70B on H100 with
TP 4; CPU seconds of one thread, the best of three, without compilation unless stated:

- the trace on one worker, and superposed to 200 requests/s on 66 workers; with limits counted during the
  simulation, as in the search, and with every run of steps recorded;
- a million requests on 1,000 workers, with peak memory, in a process of its own;
- cost against requests, workers, and output tokens per request (`--chart` draws it);
- compilation of the three engines into an empty cache, in a process of its own;
- with `--vidur`, a folder of Vidur's cases: its requests under its policies and step times, against its own
  CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.documents.catalog import read_catalog
from planner.domain import Limit
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.memory import worker_memory
from planner.reports.drawing import BLUE, GREEN, VERMILLION, chart_spec, svg_of
from planner.simulator.replay import simulate
from planner.traffic.scaling import rescale_trace
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

AZURE = Path(__file__).parents[2] / "shared" / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"
LIMITS = (Limit("ttft", 0.9, 2.0), Limit("tbt", 0.99, 0.2))
TP = 4
RATE_RPS = 3.0  # Of one worker.


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


def drawn(trace: Trace, requests: int, workers: int) -> Trace:
    """So many requests with lengths drawn from a trace, Poisson arrivals at 3 requests/s and worker."""
    rng = np.random.default_rng(0)
    row = rng.integers(len(trace), size=requests)
    arrival_s = np.cumsum(rng.exponential(1 / (RATE_RPS * workers), requests))
    return Trace("drawn", arrival_s, trace.input_tokens[row], trace.output_tokens[row])


def fleet_of(workers: int) -> Fleet:
    catalog = read_catalog()
    llm, gpu = catalog.llm("meta-llama/Llama-3.1-70B"), catalog.gpu("h100-80g")
    latency = catalog.step_latency(llm, gpu, TP)
    worker_type = WorkerType(gpu, TP, latency, worker_memory(llm, gpu, TP).kv_tokens, 2048, 256)
    return Fleet(llm, (Pool("h100", "mixed", worker_type, workers),))


def cpu_s(run: Callable[[], Any], times: int = 3) -> float:
    """CPU seconds of `run`, the least of so many calls."""
    seconds = []
    for _ in range(times):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def throughput(trace: Trace) -> None:
    busy = rescale_trace(trace, 200.0, rng=np.random.default_rng(0))
    for workers, traffic in ((1, trace), (66, busy)):
        fleet = fleet_of(workers)
        for record in (False, True):
            seconds = cpu_s(lambda: simulate(fleet, traffic, limits=LIMITS, record=record))  # noqa: B023
            print(
                f"{workers:3} workers, {traffic.rate_rps:6.1f} requests/s, {len(traffic):7} requests"
                f"{', recorded' if record else '':10}: {seconds:7.3f} CPU s, "
                f"{len(traffic) / seconds:10,.0f} requests per CPU s"
            )


def million(trace: Trace) -> dict[str, float]:
    """CPU seconds and peak bytes of this process for a million requests on 1,000 workers."""
    traffic, fleet = drawn(trace, 1_000_000, 1_000), fleet_of(1_000)
    start = time.process_time()
    result = simulate(fleet, traffic, limits=LIMITS)
    seconds = time.process_time() - start
    assert (result.status == 0).all()
    return {"cpu_s": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}


def compilation() -> dict[str, float]:
    """CPU seconds of the first, tiny simulation with each engine, less those of a second one."""
    trace = Trace("tiny", np.arange(3.0), np.full(3, 10), np.full(3, 5))
    seconds = {}
    for batching in ("vllm-v1", "distserve", "splitwise"):
        fleet = replace(fleet_of(2), policies=Policies(batching=batching))
        first, second = (cpu_s(lambda: simulate(fleet, trace), times=1) for _ in range(2))  # noqa: B023
        seconds[batching] = first - second
    return seconds


def apart(name: str, path: Path | None) -> dict[str, float]:
    """The result of a function of this file in a process of its own, with an empty cache of compiled code."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "NUMBA_CACHE_DIR": cache}
        given = [] if path is None else [str(path)]
        command = [sys.executable, __file__, *given, "--apart", name]
        if name == "million":  # A first process compiles, so that the second only simulates.
            subprocess.run([*command[:-1], "compilation"], env=env, check=True, capture_output=True)
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    numbers: dict[str, float] = json.loads(done.stdout)
    return numbers


@dataclass(frozen=True)
class Series:
    """CPU seconds of simulations that differ in one thing."""

    title: str
    x: tuple[int, ...]
    cpu_s: tuple[float, ...]


def growth(trace: Trace) -> tuple[Series, ...]:
    def cost(workers: int, traffic: Trace) -> float:
        fleet = fleet_of(workers)
        return cpu_s(lambda: simulate(fleet, traffic, limits=LIMITS))

    def equal(tokens: int) -> Trace:
        n = 10_000
        return Trace("equal", np.arange(n, dtype=np.float64) * 2, np.full(n, 100), np.full(n, tokens))

    requests, workers, outputs = (10**3, 10**4, 10**5, 10**6), (1, 10, 100, 1000), (16, 64, 256, 1024, 4096)
    return (
        Series("requests, 66 workers", requests, tuple(cost(66, drawn(trace, n, 66)) for n in requests)),
        Series("workers, 100,000 requests", workers, tuple(cost(w, drawn(trace, 10**5, w)) for w in workers)),
        Series("output tokens of 10,000 requests", outputs, tuple(cost(60, equal(n)) for n in outputs)),
    )


def chart(series: Sequence[Series]) -> Any:
    """One panel per series, both axes logarithmic."""
    import altair as alt

    y = alt.Y(
        "y:Q", title="CPU seconds", scale=alt.Scale(type="log", domain=[1e-3, 10]), axis=alt.Axis(format="~g")
    )
    panels = []
    for one, colour in zip(series, (BLUE, VERMILLION, GREEN), strict=True):
        rows = [{"x": x, "y": y} for x, y in zip(one.x, one.cpu_s, strict=True)]
        ticks = alt.Axis(values=list(one.x), format="~s")
        x = alt.X("x:Q", title=one.title, scale=alt.Scale(type="log"), axis=ticks)
        line = alt.Chart(alt.InlineData(rows)).mark_line(color=colour, point={"color": colour})
        panels.append(line.encode(x=x, y=y).properties(width=250, height=190))
    return alt.hconcat(*panels)


def against_vidur(directory: Path) -> None:
    """Vidur's requests under its policies and step times, without reading and checking them."""
    from benchmarks.peers import vidur

    for path in sorted(directory.glob("*_2k.json")):
        case = vidur.before_restarts(vidur.read_case(path), directory)
        steps = vidur.exact_steps(case, vidur.find(directory, case.setup)[0])
        fleet, trace = vidur.fleet_and_trace(case, steps)
        simulate(fleet, trace)
        seconds = cpu_s(lambda: simulate(fleet, trace), times=20)  # noqa: B023
        print(
            f"{case.name}: {len(trace)} requests, {seconds:.4f} CPU s, {len(trace) / seconds:9,.0f} per CPU "
            f"second, {case.peer_cpu_s / seconds:6,.0f} x Vidur ({len(trace) / case.peer_cpu_s:.0f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--vidur", type=Path)
    parser.add_argument("--chart", type=Path)
    parser.add_argument("--apart", choices=("million", "compilation"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.apart == "compilation":
        print(json.dumps(compilation()))
        return
    path = asked.trace or AZURE
    trace = read_trace(path) if path.exists() else made_up(np.random.default_rng(0))
    if asked.apart == "million":
        print(json.dumps(million(trace)))
        return
    simulate(fleet_of(1), trace.select(np.arange(10)), limits=LIMITS)  # compiles
    print(f"{trace.name}: {len(trace)} requests, {int(trace.output_tokens.sum())} output tokens")
    throughput(trace)
    numbers = apart("million", asked.trace)
    peak_mb = numbers["peak_bytes"] / 1e6
    print(f"1,000,000 requests, 1,000 workers: {numbers['cpu_s']:.1f} CPU s, {peak_mb:.0f} MB at most")
    series = growth(trace)
    for one in series:
        points = ", ".join(f"{x:,}: {y:.4g}" for x, y in zip(one.x, one.cpu_s, strict=True))
        print(f"CPU s against {one.title}: {points}")
    seconds = apart("compilation", asked.trace)
    each = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    print(f"compilation into an empty cache: {sum(seconds.values()):.1f} CPU s ({each})")
    if asked.vidur:
        against_vidur(asked.vidur)
    if asked.chart:
        asked.chart.write_text(svg_of(chart_spec(chart(series))))


if __name__ == "__main__":
    main()
