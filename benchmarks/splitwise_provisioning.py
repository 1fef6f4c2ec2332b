"""Repeats Splitwise's provisioning: how many machines each of its designs needs, and how much each carries.

    python benchmarks/splitwise_provisioning.py PROFILES TRACES [--honest] [--workload code] [--rate 70]

PROFILES holds perf_knots.csv (step times as Splitwise-sim looks them up) and perf_model.csv (what was
measured), TRACES the two Azure 2023 CSVs. BLOOM-176B, TP 8, all nine limits of the paper's table VI. Requests
are drawn as in Splitwise-sim (Poisson, prompts and outputs independently), for 2 `--minutes`; the trace's
name seeds NumPy's old generator, and further `--seeds` are further names. Prints, with CPU seconds:

1. iso-throughput: the fewest machines, the least cost and the least power of each design at `--rate`, and of
   pairs of machines that the paper does not consider
2. iso-power and iso-cost: the highest rate of each design with the power, or the cost, of 40 DGX-H100

With --honest decode steps take c + b * sequences + k * context, fitted to the measurements. Splitwise-sim
looks decode times up by sequences in a table by prompt tokens, so that 64 sequences cost what one does.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.peers import splitwise as peer
from benchmarks.peers.compare import BARE_GPU, NO_STEPS, bare_llm
from planner.documents.catalog import read_catalog
from planner.domain import Metric
from planner.files.checked_files import open_input
from planner.fleet import Network, WorkerType
from planner.models.foreign_forms import interpolate_linearly
from planner.papers.splitwise_search import (
    MachineDesign,
    Provisioning,
    TimesAlone,
    find_cheapest_splits,
    keeps_slowdowns,
    splits_within,
)
from planner.traffic.trace import Trace

MODEL = "bloom-176b"
# Of machines with A100, H100 and power-capped H100: price, from Splitwise-sim's notebooks, and power in their
# unit.
USD_PER_H = {"A": 8 * 2.21, "H": 8 * 4.76, "Hcap": 8 * 4.76}
POWER = {"A": 24.8, "H": 44.0, "Hcap": 0.7 * 44.0}
HARDWARE = {"A": "a100-80gb", "H": "h100-80gb", "Hcap": "h100-80gb-pcap"}
DESIGNS = {
    "Baseline-A100": ("A", None),
    "Baseline-H100": ("H", None),
    "AA": ("A", "A"),
    "HH": ("H", "H"),
    "HA": ("H", "A"),
    "HHcap": ("H", "Hcap"),
}
OTHERS = {
    "AH": ("A", "H"),
    "AHcap": ("A", "Hcap"),
    "HcapA": ("Hcap", "A"),
    "HcapHcap": ("Hcap", "Hcap"),
    "HcapH": ("Hcap", "H"),
}
FILES = {"code": "AzureLLMInferenceTrace_code.csv", "conv": "AzureLLMInferenceTrace_conv.csv"}
NETWORK = Network(200 * 2**30, transfer="serialised", is_shared=False)

MOST = 160  # Machines of a pool.
MOST_RPS = 400.0  # The highest rate that is tried.
STEP = 5  # Prompt machines from one of the paper's splits to the next.


def most_throughput(
    splits: Sequence[tuple[int, int]], rates_rps: Sequence[float], holds: Callable[[int, int, float], bool]
) -> Provisioning:
    """The highest of the ascending rates that any split carries, and all splits that carry it."""
    best, simulations = -1, 0
    counts: list[tuple[int, int]] = []
    for p, t in splits:
        climbed = False
        while best + 1 < len(rates_rps):
            simulations += 1
            if not holds(p, t, rates_rps[best + 1]):
                break
            best, climbed = best + 1, True
        if climbed:
            counts = [(p, t)]
        elif best >= 0:
            simulations += 1
            if holds(p, t, rates_rps[best]):
                counts.append((p, t))
    return Provisioning(rates_rps[best] if best >= 0 else 0.0, tuple(reversed(counts)), simulations)


@cache
def column(path: Path, name: str) -> npt.NDArray[np.int64]:
    with open_input(path) as stream:
        return pd.read_csv(stream)[name].to_numpy(np.int64)


def made_up(traces: Path, workload: str, rate_rps: float, seed: int, minutes: float = 2) -> Trace:
    """The trace that Splitwise-sim draws for this name."""
    name = f"rr_{workload}_{rate_rps:g}_{minutes:g}min" + (f"_{seed}" if seed else "")
    drawn = int(1.5 * rate_rps * 60 * minutes) + 1000
    rng = np.random.RandomState(zlib.crc32(name.encode()))
    arrival_s = np.cumsum(rng.standard_exponential(drawn) / rate_rps)
    path = traces / FILES[workload]
    inputs, outputs = (
        values[rng.randint(0, len(values), drawn)]
        for values in (column(path, "ContextTokens"), column(path, "GeneratedTokens"))
    )
    inside = arrival_s < 60 * minutes
    return Trace(name, arrival_s[inside], inputs[inside], outputs[inside])


def machine(profiles: Path, kind: str, *, honest: bool) -> WorkerType:
    steps_of = peer.honest_steps if honest else peer.lookup_steps
    weights_bytes, kv_bytes = peer.MODELS[MODEL]
    kv_tokens = (peer.GPUS * peer.GPU_BYTES - weights_bytes) // kv_bytes
    form = steps_of(profiles, MODEL, HARDWARE[kind], peer.GPUS)
    return WorkerType(BARE_GPU, 1, NO_STEPS, kv_tokens, peer.MAX_TOKENS, peer.MAX_TASKS, form=form)


def on_a100(profiles: Path) -> TimesAlone:
    """Splitwise-sim's reference for slowdowns: times on an idle machine with A100, both by the prompt's
    tokens.
    """
    steps = peer.lookup_steps(profiles, MODEL, HARDWARE["A"], peer.GPUS)

    def alone(trace: Trace) -> Mapping[Metric, npt.NDArray[np.float64]]:
        prompt_s, token_s = (
            interpolate_linearly(trace.input_tokens.astype(np.float64), steps.knots_tokens, times)
            for times in (steps.prompt_s, steps.token_s)
        )
        return {"ttft": prompt_s, "tbt": token_s, "e2e": prompt_s + token_s * (trace.output_tokens - 1)}

    return alone


def show(counts: tuple[int, int]) -> str:
    return f"{counts[0]}P" + (f"+{counts[1]}T" if counts[1] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Splitwise's provisioning, designs side by side.")
    parser.add_argument("profiles", type=Path)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--honest", action="store_true")
    parser.add_argument("--workload", choices=tuple(FILES), default="code")
    parser.add_argument("--rate", type=float, default=70.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--grid", type=float, default=10.0, help="of rates within a budget, requests/s")
    arguments = parser.parse_args()

    preset = read_catalog().slos["splitwise"].slowdowns
    assert preset is not None
    alone = on_a100(arguments.profiles)
    llm = bare_llm(peer.MODELS[MODEL][1])

    @cache
    def requests(rate_rps: float, seed: int) -> tuple[Trace, Mapping[Metric, npt.NDArray[np.float64]]]:
        trace = made_up(arguments.traces, arguments.workload, rate_rps, seed, arguments.minutes)
        return trace, alone(trace)

    @cache
    def design(name: str) -> MachineDesign:
        prompt, token = (DESIGNS | OTHERS)[name]
        types = [
            machine(arguments.profiles, kind, honest=arguments.honest) for kind in (prompt, token) if kind
        ]
        return MachineDesign(name, types[0], types[1] if token else None)

    @cache
    def holds(name: str, rate_rps: float, seed: int, p: int, t: int) -> bool:
        fleet = design(name).fleet(llm, NETWORK, p, t)
        trace, alone_s = requests(rate_rps, seed)
        return keeps_slowdowns(fleet, trace, preset.limits, alone_s)

    def price(name: str, table: Mapping[str, float]) -> tuple[float, float]:
        prompt, token = (DESIGNS | OTHERS)[name]
        return table[prompt], table[token] if token else 0.0

    holds("HH", 1.0, 0, 2, 1)  # compile
    print(f"{arguments.workload}, {'honest' if arguments.honest else 'looked up'} decode times")
    print(f"iso-throughput, {arguments.rate:g} requests/s: fewest machines | least cost | least power; CPU-s")
    for seed in range(arguments.seeds):
        for name in DESIGNS | OTHERS if seed == 0 else DESIGNS:
            start = time.process_time()
            is_split = (DESIGNS | OTHERS)[name][1] is not None
            found = [
                find_cheapest_splits(
                    partial(holds, name, arguments.rate, seed), *weights, most=MOST, splits=is_split
                )
                for weights in ((1.0, 1.0), price(name, USD_PER_H), price(name, POWER))
            ]
            texts = [f"{one.value:.6g} {' '.join(map(show, one.counts[:7]))}" for one in found]
            print(f"  seed {seed} {name}: {' | '.join(texts)}; {time.process_time() - start:.2f}")
    rates_rps = [arguments.grid * k for k in range(1, int(MOST_RPS / arguments.grid) + 1)]
    for what, table in (("iso-power", POWER), ("iso-cost", USD_PER_H)):
        budget = 40 * table["H"]
        print(f"{what}, {budget:.6g}: highest rate, its splits (prompt machines by {STEP}); CPU-s")
        for name in DESIGNS:
            start = time.process_time()
            weights = price(name, table)

            def holds_split(p: int, t: int, rate_rps: float, name: str = name) -> bool:
                return holds(name, rate_rps, 0, p, t)

            if weights[1]:
                splits = splits_within(budget, *weights, step=STEP)
            else:
                splits = [(int(budget / weights[0] + 1e-9), 0)]
            best = most_throughput(splits, rates_rps, holds_split)
            print(
                f"  {name}: {best.value:g} requests/s, {' '.join(map(show, best.counts))}; "
                f"{best.simulations} simulations, {time.process_time() - start:.2f}"
            )


if __name__ == "__main__":
    main()
