"""Compares our simulator with DistServe's, request by request.

    python benchmarks/peers/distserve.py DIR

DIR holds one JSON file per case: placement, coefficients, limits, the requests, and DistServe's results for
each of them. Everything about a case is read from its file. Prints a line per case; the exit code is 1 if a
result of a request deviates by more than 1e-6 s, or if a case cannot be read. TPOT is DistServe's: from the
end of prefill to the end, over all output tokens.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.peers.compare import (
    BARE_GPU,
    NO_STEPS,
    Array,
    Bounds,
    Columns,
    bare_llm,
    each_case,
    judge,
    lookup,
    timed,
)
from planner.errors import InputError
from planner.files.checked_files import read_json
from planner.fleet import Fleet, Network, Policies, Pool, Role, WorkerType
from planner.models.foreign_forms import DistServeSteps
from planner.simulator.replay import simulate
from planner.traffic.trace import Trace

BOUNDS = Bounds(request_s=1e-6, percentile_frac=None)
METRICS = ("ttft", "tpot", "e2e")
RESULTS = {  # Our name of a result -> theirs, which is in ms.
    "prefill_start": "prefill_start_ms",
    "ttft": "ttft_ms",
    "decode": "decode_latency_ms",
    "tpot": "tpot_ms",
    "finish": "finish_ms",
    "e2e": "total_ms",
}
INPUTS = ("arrival_ms", "prompt_len", "output_len")
ENDLESS = 10**9  # KV tokens of a worker: their program counts no memory.
# The keys of a file in the same folder that is no case.
SEARCHES = {"simdistserve_searches", "bit_exact_fast_searches", "horizon_study"}


@dataclass(frozen=True)
class Placement:
    """Instances and their pipeline depth. No decode instances: prefill and decode share every instance."""

    prefill_instances: int
    prefill_pp: int
    decode_instances: int
    decode_pp: int
    prefill_max_tokens: int  # Of one batch.
    decode_max_tokens: int  # Context tokens of one batch, each request's new token included.


@dataclass(frozen=True)
class Case:
    """One run of theirs with R requests: `arrival_ms`, `input_tokens` and `output_tokens` are (R,). Outputs
    do not count the token that prefill makes.
    """

    name: str
    placement: Placement
    steps: DistServeSteps
    arrival_ms: Array
    input_tokens: Array
    output_tokens: Array
    peer: Columns  # Their results [s].
    peer_cpu_s: float


def read_case(path: Path, document: Mapping[str, Any]) -> Case:
    try:
        rows = lookup(path, document, "requests")
        columns = {
            name: np.array([row[name] for row in rows], float) for name in (*RESULTS.values(), *INPUTS)
        }
        if not rows:
            raise InputError(f"{path}: holds no requests")
        return Case(
            path.stem,
            read_placement(path, document),
            read_coefficients(path, document),
            columns[INPUTS[0]],
            columns[INPUTS[1]],
            columns[INPUTS[2]],
            {ours: columns[theirs] / 1000 for ours, theirs in RESULTS.items()},
            float(lookup(path, document, "sim_cpu_s")),
        )
    except KeyError as error:
        raise InputError(f"{path}: a request has no {error}") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: is not a case of DistServe's simulator ({error})") from None


def read_placement(path: Path, document: Mapping[str, Any]) -> Placement:
    placement, backend = lookup(path, document, "placement"), lookup(path, document, "backend")
    keys = {
        "distserve": ("n_prefill_instances", "pp_prefill", "n_decode_instances", "pp_decode"),
        "vllm": ("n_instances", "pp", None, "pp"),
    }
    if backend not in keys:
        raise InputError(f"{path}: backend is {backend!r}, must be one of {', '.join(keys)}")
    limits = ("prefill_batch_max_tokens", "decode_batch_max_context_tokens")
    tp_keys = ("tp_prefill", "tp_decode") if backend == "distserve" else ("tp", "tp")
    for tp_key, fitted in zip(tp_keys, ("prefill_tp", "decode_tp"), strict=True):
        asked, found = lookup(path, placement, tp_key), lookup(path, document, "coefficients", fitted)
        if asked != found:
            raise InputError(f"{path}: {tp_key} is {asked}, but the coefficients are those of {found}")
    return Placement(
        *(0 if key is None else int(lookup(path, placement, key)) for key in keys[backend]),
        *(int(lookup(path, document, "limits", limit)) for limit in limits),
    )


def read_coefficients(path: Path, document: Mapping[str, Any]) -> DistServeSteps:
    """Step times from the coefficients; the times added per rank and by the engine stand in formulas of the
    file.
    """
    fitted, formulas = lookup(path, document, "coefficients"), lookup(path, document, "latency_model")
    if fitted.get("units") != "ms":
        raise InputError(f"{path}: coefficients are in {fitted.get('units')}, must be in ms")
    number = r"([\d.]+(?:e-?\d+)?)"
    decode = re.search(r"\)/pp(.*?),", lookup(path, formulas, "decode_iter"))
    per_rank = re.search(rf"\)/pp \+ {number}\*pp", lookup(path, formulas, "prefill_iter"))
    overhead = re.search(rf"^{number} \+ {number}\*sum", lookup(path, formulas, "engine_overhead"))
    if per_rank is None or overhead is None or decode is None or decode[1]:
        raise InputError(f"{path}: latency_model is not the one known: {dict(formulas)}")
    (a, b, c), (a1, b1, c1), (a2, b2, c2) = (
        lookup(path, fitted, "prefill"),
        lookup(path, fitted, "decode", "small_bs"),
        lookup(path, fitted, "decode", "large_bs"),
    )
    threshold = int(lookup(path, fitted, "decode", "threshold_bs"))
    added = (float(found) / 1000 for found in (per_rank[1], overhead[1], overhead[2]))
    prefill_s, small_s, large_s = (
        (x / 1000, y / 1000, z / 1000) for x, y, z in ((a, b, c), (a1, b1, c1), (a2, b2, c2))
    )
    return DistServeSteps(prefill_s, small_s, large_s, threshold, *added)


def fleet_of(case: Case) -> Fleet:
    """The fleet of their placement, with endless KV that moves in no time."""
    placement, policies = (
        case.placement,
        Policies(
            batching="distserve",
            routing="least-waiting",
            decode_routing="least-waiting",
            decode_batch_tokens=case.placement.decode_max_tokens,
        ),
    )

    def pool(role: Role, count: int, pp: int) -> Pool:
        seats = len(case.arrival_ms)  # All requests: their program does not limit sequences.
        budget = max(placement.prefill_max_tokens, seats)
        return Pool(
            role, role, WorkerType(BARE_GPU, 1, NO_STEPS, ENDLESS, budget, seats, pp, case.steps), count
        )

    front = placement.prefill_instances, placement.prefill_pp
    pools = [pool("prefill" if placement.decode_instances else "mixed", *front)]
    if placement.decode_instances:
        pools.append(pool("decode", placement.decode_instances, placement.decode_pp))
    return Fleet(
        bare_llm(1.0), tuple(pools), policies, Network(np.inf, transfer="serialised", is_shared=False)
    )


def simulate_case(case: Case) -> Columns:
    """Our results, in s, named as in RESULTS."""
    if too_long := int((case.input_tokens > case.placement.prefill_max_tokens).sum()):
        raise InputError(f"{case.name}: {too_long} inputs fit no prefill batch; that program would not end")
    arrival, input_tokens, output_tokens = (
        case.arrival_ms / 1000,
        case.input_tokens.astype(np.int64),
        case.output_tokens.astype(np.int64),
    )
    result = simulate(fleet_of(case), Trace(case.name, arrival, input_tokens, output_tokens + 1))
    decode_s = result.e2e_s - result.ttft_s
    return {
        "prefill_start": result.queue_s + arrival,
        "ttft": result.ttft_s,
        "decode": decode_s,
        "tpot": decode_s / case.output_tokens,
        "finish": result.e2e_s + arrival,
        "e2e": result.e2e_s,
    }


def run(path: Path) -> bool | None:
    document = read_json(path)
    if document.keys() == SEARCHES:
        print(f"     {path.stem}: results of searches, no case")
        return None
    case = read_case(path, document)
    ours, cpu_s = timed(partial(simulate_case, case))
    return judge(case.name, ours, case.peer, METRICS, BOUNDS, (cpu_s, case.peer_cpu_s))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    return each_case(parser.parse_args().folder, run)


if __name__ == "__main__":
    sys.exit(main())
