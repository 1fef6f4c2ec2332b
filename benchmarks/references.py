"""Compares the simulator with plain simulators that share no code with it, on random fleets, by seed.

    python benchmarks/references.py --cases 1000 --prefixes 2000 --combined 2500 --fleets 20000 --tiers 100

--cases: so many random cases (tests/support/engine_cases.py: engines, orders of prompts, routings, mixed or
prefill and decode workers, small KV caches), in which every result must equal the plain simulator's to 1e-9.
--prefixes: so many random cases with prefix caches (tests/support/prefix_cases.py: engines, orders, routings,
late notices of evictions, mixed or prefill and decode workers), likewise.
--combined: so many random cases of tests/support/combined_cases.py: the fleets of the two above with orders
by deadline, LoRA adapters, or memory behind the caches.
--fleets: so many random fleets of prefill and decode workers, in which every request must end and the
conditions of tests/support/conservation.py must hold at the end.
--tiers: so many random cases (tests/support/offload_cases.py), in which the hits on the GPU, in CPU memory or
a shared store and on a disk, and percentiles of TTFT and of tasks, are compared with the plain simulator's.
The exit code is 1 if something differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from combined_cases import compare_combined_case
from conservation import check_conservation
from engine_cases import compare_engine_case, random_policies, with_engines
from offload_cases import compare_tiers
from prefix_cases import compare_prefix_case
from simulations import LLM, make_latency, make_pool, make_trace

from planner.fleet import Fleet, Network, Policies, Role
from planner.simulator import read_results, replay
from planner.simulator.layout import State
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace


def random_pair(seed: int) -> tuple[Fleet, Trace]:
    """One or two prefill and one or two decode workers, most with room for one to three requests; up to
    eight requests, often two at once with long pauses between. One in four engines is synchronous.
    """
    rng = np.random.default_rng([seed, 7])
    pools = []
    roles: tuple[Role, Role] = ("prefill", "decode")
    for role in roles:
        count = int(rng.integers(1, 3))
        latency = make_latency((0.05, 0.2), b=float(rng.uniform(0, 0.01)), h=float(rng.uniform(0, 0.01)))
        kv_tokens, seats = 16 * int(rng.choice([4, 5, 6, 8, 12, 40])), int(rng.choice([1, 2, 8]))
        budget = int(rng.choice([16, 64]))
        pools.append(
            make_pool(
                latency, role=role, count=count, kv_tokens=kv_tokens, seats=seats, budget=budget, name=role
            )
        )
    bandwidth = float(10 ** rng.uniform(2, 6))
    fleet = random_policies(Fleet(LLM, tuple(pools), Policies(), Network(bandwidth, 0.01)), rng)
    fleet = with_engines(fleet, seed, async_scheduling=seed % 4 > 0, front_end_s=float(rng.uniform(0, 0.1)))
    n = int(rng.integers(2, 9))
    gaps_s = rng.choice([0.0, 0.05, 1.0, 20.0], n)
    return fleet, make_trace(np.cumsum(gaps_s), rng.integers(1, 40, n), rng.integers(1, 24, n))


def end_of_pair(seed: int) -> None:
    """Raise if a request does not end, or if memory is not freed at the end."""
    fleet, trace = random_pair(seed)
    simulation = replay.simulate(fleet, trace)
    assert (simulation.status < 2).all(), "unfinished"


def check_all(title: str, seeds: range, check: Callable[[int], None]) -> int:
    """Prints every seed that fails; returns their number."""
    began_s, failures, kinds = time.process_time(), 0, Counter[str]()
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            failures += 1
            kinds[type(error).__name__] += 1
            first = (str(error).strip().splitlines() or ["differs"])[0]
            print(f"{title} {seed}: {type(error).__name__}: {first}", flush=True)
    seconds = time.process_time() - began_s
    print(f"{title}: {failures} of {len(seeds)} wrong {dict(kinds) or ''}, {seconds:.1f} CPU s", flush=True)
    return failures


def check_tiers(seeds: range) -> int:
    """How many cases differ by more than 2 points in the hits of a tier, or at all in a percentile."""
    began_s, failures, compared, tasks = time.process_time(), 0, 0, 0
    points, hits, worst = np.zeros(3), np.zeros(3), 0.0
    for seed in seeds:
        found = compare_tiers(seed)
        if found is None:
            continue
        compared, tasks = compared + 1, tasks + found.tasks
        points = np.maximum(points, found.points)
        hits += found.hit_frac
        worst = max(worst, found.percentile_frac)
        failures += max(found.points) > 2.0 or found.percentile_frac > 1e-9
    shares = ", ".join(f"{100 * hit / max(compared, 1):.0f}" for hit in hits)
    print(
        f"tiers: {failures} of {compared} wrong; GPU, memory and disk have {shares} % of the "
        f"prompts in the mean and differ by {', '.join(f'{each:.3f}' for each in points)} points at most; "
        f"percentiles of TTFT and of {tasks} tasks by {worst:.1e}; {time.process_time() - began_s:.1f} CPU s"
    )
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="against the plain simulators (1000)")
    parser.add_argument("--prefixes", type=int, default=2000, help="with prefix caches (2000)")
    parser.add_argument("--combined", type=int, default=2500, help="with several at once (2500)")
    parser.add_argument("--fleets", type=int, default=20_000, help="of prefill and decode workers (20000)")
    parser.add_argument("--tiers", type=int, default=120, help="of KV tiers (120)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    asked = parser.parse_args()
    read_simulation = read_results.read_simulation

    def checked_simulation(state: State, fleet: Fleet, trace: Trace, *rest: Any) -> Simulation:
        check_conservation(state, fleet, len(trace))
        return read_simulation(state, fleet, trace, *rest)

    vars(replay)["read_simulation"] = checked_simulation
    failures = check_all("case", range(asked.first, asked.first + asked.cases), compare_engine_case)
    prefixes = range(asked.first, asked.first + asked.prefixes)
    failures += check_all("prefixes", prefixes, compare_prefix_case)
    combined = range(asked.first, asked.first + asked.combined)
    failures += check_all("combined", combined, compare_combined_case)
    failures += check_all("fleet", range(asked.first, asked.first + asked.fleets), end_of_pair)
    failures += check_tiers(range(asked.first, asked.first + asked.tiers))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
