"""Our simulator against DistServe's, request by request.

    python benchmarks/peers/distserve.py DIR

DIR holds one JSON file per case: placement, coefficients, limits, the requests and what DistServe's simulator
made of each of them. Everything about a case is read from its file. A line per case; exit code 1 if a
request deviates by more than 1e-6 s in any result, or a case cannot be read. TPOT is theirs: from the end of
prefill to the end, over all output tokens.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.extend([str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests")])

from reference_distserve import Coefficients, DistServe, Placement, Request

from benchmarks.peers.compare import Array, Bounds, Columns, each_case, judge, lookup
from planner.errors import InputError
from planner.files import read_json

BOUNDS = Bounds(request_s=1e-6, percentile_frac=None)
METRICS = ("ttft", "tpot", "e2e")
RESULTS = {  # our name, and theirs, in ms
    "prefill_start": "prefill_start_ms",
    "ttft": "ttft_ms",
    "decode_start": "first_decode_start_ms",
    "decode": "decode_latency_ms",
    "tpot": "tpot_ms",
    "finish": "finish_ms",
    "e2e": "total_ms",
}
INPUTS = ("arrival_ms", "prompt_len", "output_len")
SEARCHES = {"simdistserve_searches", "bit_exact_fast_searches", "horizon_study"}  # keys of that file


@dataclass(frozen=True)
class Case:
    """One run of theirs. `arrival_ms`, `input_tokens`, `output_tokens`: (R,)."""

    name: str
    placement: Placement
    coefficients: Coefficients
    arrival_ms: Array
    input_tokens: Array
    output_tokens: Array
    peer: Columns  # their results, in s
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
            *(columns[name] for name in INPUTS),
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


def read_coefficients(path: Path, document: Mapping[str, Any]) -> Coefficients:
    """The numbers, and from the formulas in words what is added per rank and by the engine."""
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
    added = float(per_rank[1]), float(overhead[1]), float(overhead[2])
    return Coefficients((a, b, c), added[0], (a1, b1, c1), (a2, b2, c2), threshold, *added[1:])


def simulate_case(case: Case) -> Columns:
    """Our results, in s, named as in RESULTS."""
    columns = (case.arrival_ms, case.input_tokens, case.output_tokens)
    requests = [Request(arrival, int(i), int(o)) for arrival, i, o in zip(*columns, strict=True)]
    DistServe(case.placement, case.coefficients, requests).run()
    start, first, decode_start, finish = (
        np.array([getattr(request, name) for request in requests]) / 1000
        for name in ("prefill_start_ms", "prefill_end_ms", "decode_start_ms", "finish_ms")
    )
    arrival = case.arrival_ms / 1000
    return {
        "prefill_start": start,
        "ttft": first - arrival,
        "decode_start": decode_start,
        "decode": finish - first,
        "tpot": (finish - first) / case.output_tokens,
        "finish": finish,
        "e2e": finish - arrival,
    }


def run(path: Path) -> bool | None:
    document = read_json(path)
    if document.keys() == SEARCHES:
        print(f"     {path.stem}: results of searches, no case")
        return None
    case = read_case(path, document)
    start = time.process_time()
    ours = simulate_case(case)
    cpu_s = time.process_time() - start
    return judge(case.name, ours, case.peer, METRICS, BOUNDS, (cpu_s, case.peer_cpu_s))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/peers/distserve.py DIR")
    sys.exit(each_case(Path(sys.argv[1]), run))
