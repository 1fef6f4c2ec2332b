"""Compares our simulator with Vidur's, request by request.

    python benchmarks/peers/vidur.py DIR

DIR holds cases (NAME.json with the settings, NAME.csv.gz with the requests and their TTFT and E2E), Vidur's
step times (tables_CLASS_GPU_LLM_tpN.npz) and steps that it computed (oracle_CLASS_GPU_LLM_tpN.csv).

Prints two lines per case. With Vidur's own step times no TTFT or E2E may be more than 1e-6 s off. With ours,
fitted to the computed steps if there are some, no P50, P90 or P99 of TTFT, TPOT or E2E may be more than 3 %
off. The exit code is 1 if a bound is missed or a case cannot be read.

The fit is the planner's family `corrected` (`planner.models.families.corrected`), whose form includes Vidur's
rounding of tokens to multiples of 8 and of KV to multiples of 64.

If a request is preempted while half of its prompt is computed, Vidur restarts it with this half as its prompt
and decodes the other half token by token. For a comparison we do the same here. A third line, without a
bound, compares with a simulation that prefills the whole prompt again. Vidur's files may have the lengths
after the restart; if another case has the same request without a restart, its lengths are taken.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

sys.path.extend([str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests/support")])

from reference_batching import Settings, VidurTables

from benchmarks import vidur_tables
from benchmarks.latency_models import oracle_table
from benchmarks.peers.compare import Array, Bounds, Columns, each_case, judge, lookup
from planner.documents.catalog import read_catalog
from planner.errors import InputError, PlannerError
from planner.files.checked_files import read_json
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.families.corrected import CorrectedSteps
from planner.models.foreign_forms import StepForm
from planner.simulator.replay import simulate
from planner.traffic.trace import Trace

EXACT = Bounds(request_s=1e-6, percentile_frac=None)
FITTED = Bounds(request_s=None, percentile_frac=0.03)
UNBOUNDED = Bounds(request_s=None, percentile_frac=None)
METRICS = ("ttft", "tpot", "e2e")
POLICIES = {
    "sarathi": "sarathi",
    "vllm": "vllm-v0",
    "orca": "orca",
    "lightllm": "lightllm",
    "faster_transformer": "faster-transformer",
}
BUDGETS = {"sarathi": "chunk_size", "vllm": "max_tokens_in_batch", "lightllm": "max_tokens_in_batch"}
RESERVING = ("orca", "faster_transformer")
DEFAULTS = {
    "batch_size_cap": 128,
    "block_size": 16,
    "watermark_blocks_fraction": 0.01,
    "chunk_size": 512,
    "max_tokens_in_batch": 4096,
    "max_waiting_iters": 10,
}
ORACLE_COLUMNS = (
    "device",
    "model",
    "tp",
    "n_prefill",
    "chunk",
    "prefix",
    "n_decode",
    "ctx",
    "total_ms",
    "linear_ms",
    "allreduce_ms",
    "attn_prefill_ms",
    "attn_decode_ms",
)
UNLIMITED = 1_000_000  # Tokens of a step, for schedulers without a limit.
LONGEST = 4096  # Tokens of the longest request, which Orca and FasterTransformer reserve for each.
KINDS = ("vidur", "vidur_sampled", "aic")  # Classes of step times, those nearest to Vidur's own first.
# Settings that have no influence on batching: on requests and step times, which are read from files, and on
# the files that Vidur writes.
ELSEWHERE = re.compile(
    r"(no-)?(metrics_config_|random_forrest_execution_time_predictor_config_|execution_time_predictor_config_type"
    r"|length_generator_config_|interval_generator_config_|request_generator_config_"
    r"|\w+_request_(length|interval)_generator_config_|synthetic_request_generator_config_"
    r"|replica_config_memory_margin_fraction|replica_config_network_device)"
)


@dataclass(frozen=True)
class Case:
    """R requests in order of arrival, each column (R,), and Vidur's results."""

    name: str
    policy: str
    settings: Settings
    replicas: int
    setup: tuple[str, str, int]  # GPU and LLM by Vidur's names, and TP.
    lengths: str  # The settings by which Vidur drew the lengths.
    arrival_s: Array
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    restarts: NDArray[np.int64]
    peer: Columns
    peer_cpu_s: float


def fleet_and_trace(case: Case, steps: StepForm) -> tuple[Fleet, Trace]:
    """The fleet and the trace of a case. The GPU does not matter, as the step times are `steps`."""
    catalog, settings = read_catalog(), case.settings
    llm, gpu = catalog.llm(case.setup[1]), catalog.gpu("a100-80g")
    budget = settings.token_budget or UNLIMITED
    worker = WorkerType(
        gpu,
        1,
        catalog.step_latency(llm, gpu, 1),
        settings.blocks * settings.block_size,
        max(budget, settings.max_num_seqs),
        settings.max_num_seqs,
        form=steps,
    )
    policies = Policies(
        batching=case.policy,
        routing="round-robin",
        watermark_frac=settings.watermark_frac,
        reserve_tokens=settings.reserve_tokens,
        patience_steps=settings.max_waiting_steps,
        vidur_restarts=settings.vidur_restarts,
    )
    fleet = Fleet(llm, (Pool("vidur", "mixed", worker, case.replicas),), policies)
    return fleet, Trace(case.name, case.arrival_s, case.prompt, case.output)


def simulate_case(case: Case, steps: StepForm) -> tuple[Array, Array]:
    """TTFT and E2E [s] of each request, by us."""
    fleet, trace = fleet_and_trace(case, steps)
    try:
        result = simulate(fleet, trace)
    except InputError as error:
        raise InputError(f"{case.name}: {error}") from None
    if (unserved := int((result.status != 0).sum())) > 0:
        raise InputError(f"{case.name}: {unserved} requests can never be scheduled")
    return result.ttft_s, result.e2e_s


# reading a case


def read_case(path: Path) -> Case:
    try:
        return parse_case(path)
    except (ValueError, TypeError, OSError, EOFError) as error:
        raise InputError(f"{path}: it, or its requests, cannot be read: {error}") from None


def parse_case(path: Path) -> Case:
    document = read_json(path)
    said = dict(lookup(path, document, "settings"))
    of_lengths = sorted((key, str(said[key])) for key in said if "length_generator_config" in key)
    said = {key: value for key, value in said.items() if not ELSEWHERE.match(key)}
    scheduler = said.pop("replica_scheduler_config_type", "sarathi")
    if scheduler not in POLICIES:
        raise InputError(f"{path}: scheduler is {scheduler}; known are {', '.join(POLICIES)}")
    if (router := said.pop("global_scheduler_config_type", "round_robin")) != "round_robin":
        raise InputError(f"{path}: requests are routed by {router}; only round_robin is known")
    if int(said.pop("replica_config_num_pipeline_stages", 1)) != 1:
        raise InputError(f"{path}: has pipeline stages, and no table says how long Vidur sends between them")
    setup = (
        said.pop("replica_config_device", "a100"),
        said.pop("replica_config_model_name", "meta-llama/Llama-2-7b-hf"),
        int(said.pop("replica_config_tensor_parallel_size", 1)),
    )
    replicas = int(said.pop("cluster_config_num_replicas", 1))
    blocks = said.pop(f"{scheduler}_scheduler_config_num_blocks", None)
    batching = {
        key: float(said.pop(f"{scheduler}_scheduler_config_{key}", default))
        for key, default in DEFAULTS.items()
    }
    if said:
        raise InputError(f"{path}: settings.{next(iter(said))}: what it does is not known here")
    settings = Settings(
        blocks=int(lookup(path, document, "num_blocks") if blocks is None else blocks),
        block_size=int(batching["block_size"]),
        max_num_seqs=int(batching["batch_size_cap"]),
        token_budget=int(batching[BUDGETS[scheduler]]) if scheduler in BUDGETS else None,
        watermark_frac=batching["watermark_blocks_fraction"],
        reserve_tokens=LONGEST if scheduler in RESERVING else 0,
        max_waiting_steps=int(batching["max_waiting_iters"]),
        vidur_restarts=True,
    )
    rows = read_requests(path.with_suffix(".csv.gz"))
    arrival_s, ttft_s, e2e_s = rows["arrived_at"], rows["ttft"], rows["e2e"]
    prompt, output, restarts = (
        rows[name].astype(np.int64) for name in ("prefill_tokens", "decode_tokens", "restarts")
    )
    return Case(
        path.stem,
        POLICIES[scheduler],
        settings,
        replicas,
        setup,
        str(of_lengths),
        arrival_s,
        prompt,
        output,
        restarts,
        {"ttft": ttft_s, "e2e": e2e_s},
        float(lookup(path, document, "user_cpu_s", "run")),
    )


def read_requests(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise InputError(f"{path}: no such file; a case needs its requests")
    with gzip.open(path, "rt", newline="") as stream:
        rows = list(csv.DictReader(stream))
    names = ("arrived_at", "prefill_tokens", "decode_tokens", "ttft", "e2e", "restarts")
    if missing := [name for name in names if not rows or name not in rows[0]]:
        raise InputError(f"{path}: holds no requests, or lacks the column(s) {', '.join(missing)}")
    rows.sort(key=lambda row: float(row["arrived_at"]))
    return {name: np.array([float(row[name]) for row in rows]) for name in names}


def before_restarts(case: Case, directory: Path) -> Case:
    """The case with the lengths that its restarted requests have in other cases, if they did not
    restart there.
    """
    prompt, total = case.prompt.copy(), case.prompt + case.output
    is_known = case.restarts == 0
    for path in sorted(directory.glob("*.json")) if case.restarts.any() else ():
        try:
            other = read_case(path)
        except PlannerError:
            continue  # The error is printed when this other case has its turn.
        if other.lengths == case.lengths:
            n = min(len(prompt), len(other.prompt))
            same = (other.restarts[:n] == 0) & (total[:n] == (other.prompt + other.output)[:n])
            take = np.flatnonzero(same & ~is_known[:n])
            prompt[take] = other.prompt[take]
            is_known[take] = True
    if changed := int((prompt != case.prompt).sum()):
        print(f"     {case.name}: {changed} of its restarted requests have their lengths from another case")
    if unknown := int((~is_known).sum()):
        print(
            f"     {case.name}: {unknown} restarted requests have the lengths of its file, in no other case"
        )
    return replace(case, prompt=prompt, output=total - prompt)


# step times


def find(directory: Path, setup: tuple[str, str, int]) -> tuple[Path, Path]:
    """The files with Vidur's step times for a setup and with steps it computed, of the first class of KINDS
    that there is; the second file may be missing.
    """
    gpu, llm, tp = setup
    llm = llm.rsplit("/", 1)[-1].lower().removesuffix("-hf")
    names = [f"{kind}_{gpu}_{llm}_tp{tp}" for kind in KINDS]
    for name in names:
        tables, oracle = directory / f"tables_{name}.npz", directory / f"oracle_{name}.csv"
        if tables.is_file():
            return tables, oracle
    raise InputError(f"{directory}: step times are missing, none of tables_({'|'.join(names)}).npz")


def fitted(path: Path) -> StepForm:
    """Step times fitted to the few hundred steps of an oracle file. In contrast to `plan fit`, which fits
    measured steps, there is hardly any noise, every step is an anchor, and Vidur's KV is in multiples of 64.
    """
    steps = pd.read_csv(path)
    if missing := [name for name in ORACLE_COLUMNS if name not in steps.columns]:
        raise InputError(f"{path}: lacks the column(s) {', '.join(missing)}")
    table = oracle_table(path)
    return (
        CorrectedSteps(most_anchors=len(table.y), noise_frac=0.005, context_step=64)
        .fit(table.X, table.y)
        .form_
    )


# comparing


def with_tpot(case: Case, ttft_s: Array, e2e_s: Array) -> Columns:
    """The columns that are compared; TPOT of requests with more than one token."""
    several = case.output > 1
    return {"ttft": ttft_s, "e2e": e2e_s, "tpot": (e2e_s - ttft_s)[several] / (case.output[several] - 1)}


def compared(case: Case, steps: StepForm, label: str, bounds: Bounds) -> bool:
    simulate_case(case, steps)  # compiles, the first time
    start_s = time.process_time()
    ours = simulate_case(case, steps)
    cpu_s = time.process_time() - start_s
    peer = with_tpot(case, case.peer["ttft"], case.peer["e2e"])
    name = f"{case.name} ({case.policy} x{case.replicas}, {case.restarts.sum()} restarts), {label}"
    return judge(name, with_tpot(case, *ours), peer, METRICS, bounds, (cpu_s, case.peer_cpu_s))


def exact_steps(case: Case, tables: Path) -> vidur_tables.VidurTables:
    """Vidur's own step times, from its tables."""
    read = VidurTables.read(tables, read_catalog().llm(case.setup[1]).layers)
    return vidur_tables.VidurTables(
        np.array(read.linear_ms) * 1e-3,
        np.array(read.prefill_ms) * 1e-3,
        np.array(read.decode_ms) * 1e-3,
        *read.over,
    )


def run(path: Path) -> bool:
    case = before_restarts(read_case(path), path.parent)
    tables, oracle = find(path.parent, case.setup)
    exact = exact_steps(case, tables)
    is_kept = compared(case, exact, "Vidur's step times", EXACT)
    if oracle.is_file():
        is_kept &= compared(case, fitted(oracle), "our fit of its steps", FITTED)
    else:
        print(f"     {case.name}: no {oracle.name} to fit step times to, so with Vidur's own alone")
    if case.restarts.any() and case.policy == "sarathi":
        whole = replace(case, settings=replace(case.settings, vidur_restarts=False))
        compared(whole, exact, "whole prompts prefilled again (no bound)", UNBOUNDED)
    return is_kept


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    directory: Path = parser.parse_args().folder
    alone = [
        path.name
        for path in sorted(directory.glob("*.csv.gz"))
        if not (directory / path.name.replace(".csv.gz", ".json")).is_file()
    ]
    for name in alone:
        print(
            f"error: {directory / name}: the settings of the case, a .json beside it, are missing",
            file=sys.stderr,
        )
    return max(each_case(directory, run), int(bool(alone)))


if __name__ == "__main__":
    sys.exit(main())
