"""Compares our simulator with Splitwise-sim, request by request.

    python benchmarks/peers/splitwise.py DIR [--honest]

DIR holds, for each case, the command line and totals of a run of Splitwise-sim (CASE.json) and the results of
each request (CASE.csv.gz). Beside them are perf_knots.csv, the step times as Splitwise-sim looks them up, and
perf_model.csv, the measurements they come from. Machines, pools, scheduler, model and tensor parallelism are
read from the command line.

Prints a line per case. The exit code is 1 if a case cannot be read or misses its bound: 1e-6 s per request if
there is no choice between machines (one machine, or one of each role), otherwise 2 % of P50, P90 and P99 of
TTFT, TBT and E2E. TBT is theirs: (E2E - TTFT) over all output tokens. Their files have nine digits, so times
after 100 s are known to 5e-7 s only.

Splitwise-sim looks decode times up by the number of sequences in a table that is indexed by prompt tokens, so
64 sequences cost what one costs. With --honest every case is simulated a second time with decode steps of
c + b * sequences + k * context tokens, fitted to perf_model.csv. Both are printed side by side, with the nine
limits of the paper (slowdown over an idle A100 machine).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.peers.compare import (
    BARE_GPU,
    NO_STEPS,
    PERCENTILES,
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
from planner.files.checked_files import open_input, read_json
from planner.fleet import Fleet, Network, Policies, Pool, Role, WorkerType
from planner.importers.splitwise_tables import splitwise_table
from planner.models.foreign_forms import SplitwiseLookup, interpolate_linearly
from planner.simulator.replay import simulate
from planner.traffic.trace import Trace

EXACT = Bounds(request_s=1e-6, percentile_frac=0.02)
POOLED = Bounds(request_s=None, percentile_frac=0.02)
METRICS = ("ttft", "tbt", "e2e")
RESULTS = (*METRICS, "queue_time", "prompt_start", "prompt_end", "token_end")
RUNNERS = ("prompt_runner", "token_runner")
INPUTS = ("arrival_timestamp", "prompt_size", "token_size")
GPUS = 8  # Of a server.
GPU_BYTES = 80 * 2**30
LIMITS = {
    "ttft": (2, 3, 6),
    "tbt": (1.25, 1.5, 5),
    "e2e": (1.25, 1.5, 5),
}  # slowdown at PERCENTILES, table VI
BASIS = "a100-80gb"  # Slowdowns are relative to an idle machine with this GPU.

# Names on the command line and their meanings in Splitwise-sim's configuration.
# Model -> bytes of weights, and of KV per token: 2 (K, V) * 2 bytes * hidden size * layers.
MODELS = {
    "bloom-176b": (329_000_000_000, 2 * 2 * 14336 * 70),
    "llama2-70b": (135_000_000_000, 2 * 2 * 8192 * 80),
}
SERVERS = {"dgx-a100": "a100-80gb", "dgx-h100": "h100-80gb", "dgx-h100-pcap": "h100-80gb-pcap"}
CLUSTERS = {"half_half": ("dgx-a100", "dgx-h100"), "hhcap_half_half": ("dgx-h100-pcap", "dgx-h100")}
# The machines for tokens in heterogeneous pools.
TOKEN_SERVER = {"splitwise": "dgx-a100", "splitwise_hhcap": "dgx-h100-pcap"}
MAX_TASKS, MAX_TOKENS = 512, 2048  # Sequences and prompt tokens of a batch.
ROLES: dict[str, Role] = {"": "mixed", "prompt": "prefill", "token": "decode"}
BYTES_PER_S = {"token_jsq": np.inf, "mixed_pool": 200 * 2**30, "kv_token_jsq": 10 * 200 * 2**30}


@dataclass(frozen=True)
class Kind:
    """A kind of machine. `hardware` is its name in the tables, `role` is "prompt", "token" or ""; it has the
    memory of `gpus`.
    """

    hardware: str
    role: str
    tensor_parallel: int
    gpus: int


@dataclass(frozen=True)
class Case:
    """One run of theirs with R requests: `arrival_s`, `input_tokens` and `output_tokens` are (R,)."""

    name: str
    folder: Path
    model: str
    policy: str
    machines: tuple[Kind, ...]
    arrival_s: Array
    input_tokens: Array
    output_tokens: Array
    peer: Columns  # Their results [s]; `*_runner` is the number of the machine.
    peer_cpu_s: float

    @property
    def bounds(self) -> Bounds:
        roles = [machine.role for machine in self.machines]
        return EXACT if len(roles) == len(set(roles)) else POOLED


# --- reading a case


def read_case(path: Path) -> Case:
    document = read_json(path)
    try:
        settings = dict(override.split("=", 1) for override in lookup(path, document, "overrides"))
        cpu_s = float(lookup(path, document, "user_s"))
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is not a case of Splitwise-sim ({error})") from None
    for key in ("trace.filename", "seed"):  # Not needed: the requests are in the table, and nothing is drawn.
        settings.pop(key, None)
    command = Command(path, settings)
    model = command.name("applications.0.model_architecture", MODELS)
    command.name("applications.0.model_size", (f"{model}-fp16",))
    command.name("performance_model", ("db",))
    policy = command.name("applications.0.scheduler", BYTES_PER_S)
    machines = read_machines(command, policy)
    if settings:
        raise InputError(f"{path}: overrides not known: {', '.join(sorted(settings))}")
    arrival, inputs, outputs, peer = read_requests(path.with_suffix(".csv.gz"), machines)
    return Case(path.stem, path.parent, model, policy, machines, arrival, inputs, outputs, peer, cpu_s)


@dataclass(frozen=True)
class Command:
    """The command line of a run. Every read takes its key out of `settings`, so what is left is unknown."""

    path: Path
    settings: dict[str, str]

    def name(self, key: str, known: Collection[str], default: str | None = None) -> str:
        value = self.settings.pop(key, default)
        if value is None or value not in known:
            raise InputError(f"{self.path}: {key} is {value}, must be one of {', '.join(known)}")
        return value

    def number(self, key: str, default: int) -> int:
        value = self.settings.pop(key, str(default))
        if not re.fullmatch(r"\d+", value):
            raise InputError(f"{self.path}: {key} is {value}, must be a whole number")
        return int(value)

    def names(self, key: str, default: str) -> list[str]:
        return re.findall(r"[\w-]+", self.settings.pop(key, default))

    def tensor_parallel(self, key: str) -> int:
        return int(self.name(f"start_state.{key}.tensor_parallelism", ("2", "4", "8"), str(GPUS)))


def read_machines(command: Command, policy: str) -> tuple[Kind, ...]:
    """The machines in Splitwise-sim's order, that of the cluster's servers; in homogeneous pools the first
    are for prompts.
    """
    kinds = CLUSTERS[command.name("cluster", CLUSTERS)]
    counts = [command.number(f"cluster.servers.{i}.count", 1) for i in range(len(kinds))]
    servers = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    state = command.name("start_state", ("baseline", *TOKEN_SERVER))
    if (state == "baseline") != (policy == "token_jsq"):
        raise InputError(f"{command.path}: start_state {state} does not go with scheduler {policy}")
    if state == "baseline":
        tp = command.tensor_parallel("instance")
        machines = [Kind(SERVERS[server], "", tp, GPUS) for server in servers]
    else:
        tp_of = {role: command.tensor_parallel(role) for role in ("prompt", "token")}
        roles = read_roles(command, state, servers)
        if missing := tp_of.keys() - set(roles):
            raise InputError(f"{command.path}: the cluster has no {' and no '.join(missing)} machine")
        machines = [
            Kind(SERVERS[server], role, tp_of[role], tp_of[role])
            for server, role in zip(servers, roles, strict=False)
            for _ in range(GPUS // tp_of[role])
        ]
    if not machines:
        raise InputError(f"{command.path}: the cluster has no machine")
    return tuple(machines)


def read_roles(command: Command, state: str, servers: list[str]) -> list[str]:
    splits = ("homogeneous", "heterogeneous")
    if command.name("start_state.split_type", splits, splits[0]) == "homogeneous":
        prompts = command.number("start_state.prompt.num_instances", 1)
        tokens = command.number("start_state.token.num_instances", 1)
        if prompts + tokens > len(servers):
            raise InputError(f"{command.path}: {prompts} + {tokens} machines asked of {len(servers)} servers")
        return ["prompt"] * prompts + ["token"] * tokens
    role_of = {
        name: role
        for role, default in (("token", TOKEN_SERVER[state]), ("prompt", "dgx-h100"))
        for name in command.names(f"start_state.{role}.instance_names", default)
    }
    if strangers := set(servers) - role_of.keys():
        raise InputError(f"{command.path}: start_state {state} has no role for {', '.join(strangers)}")
    return [role_of[server] for server in servers]


def read_requests(path: Path, machines: Sequence[Kind]) -> tuple[Array, Array, Array, Columns]:
    """Arrivals, inputs, outputs, and Splitwise-sim's results."""
    names = [f"{machine.hardware}_{i}" for i, machine in enumerate(machines)]
    try:
        with open_input(path) as stream:
            table = pd.read_csv(stream)
        arrival, inputs, outputs = (table[name].to_numpy(float) for name in INPUTS)
        peer = {name: table[name].to_numpy(float) for name in RESULTS}
        peer |= {name: table[name].map(names.index).to_numpy(float) for name in RUNNERS}
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: is not a table of Splitwise-sim's results ({error})") from None
    except KeyError as error:
        raise InputError(f"{path}: has no column {error}") from None
    if not len(table):
        raise InputError(f"{path}: holds no requests")
    return arrival, inputs, outputs, peer


# --- step times


@cache
def lookup_steps(folder: Path, model: str, hardware: str, tp: int) -> SplitwiseLookup:
    """Times of prompts and of decodes by tokens, linear between the knots and beyond them."""
    path = folder / "perf_knots.csv"
    try:
        with open_input(path) as stream:
            table = pd.read_csv(stream)
        is_asked = (table.model == model) & (table.hardware == hardware) & (table.tensor_parallel == tp)
        rows = table[is_asked].sort_values("batch_tokens")
        if rows.empty:
            raise InputError(f"{path}: has no {model} on {tp} x {hardware}")
        knots, prompt_s, token_s = (
            tuple(map(float, rows[name])) for name in ("batch_tokens", "prompt_time_s", "token_time_s")
        )
        return SplitwiseLookup(knots, prompt_s, token_s)
    except (AttributeError, KeyError, ValueError) as error:
        raise InputError(f"{path}: is not a table of step times ({error})") from None


@cache
def honest_steps(folder: Path, model: str, hardware: str, tp: int) -> SplitwiseLookup:
    """Decode times fitted by least squares of relative errors; prompt times as Splitwise-sim looks them
    up.
    """
    steps = splitwise_table(folder / "perf_model.csv", model, hardware, tp).steps
    decodes = steps[steps.n_decode > 0]
    X = np.column_stack([np.ones(len(decodes)), decodes.n_decode, decodes.kv_tokens])
    relative = X / decodes.t_s.to_numpy()[:, None]
    (c_s, b_s, k_s), *_ = np.linalg.lstsq(relative, np.ones(len(X)), rcond=None)
    looked_up = lookup_steps(folder, model, hardware, tp)
    return replace(looked_up, token_s=(float(c_s),), b_s=float(b_s), d_s=float(k_s))


# --- running it


def fleet_of(case: Case, *, honest: bool = False) -> Fleet:
    """The fleet of their cluster; neighbouring machines of one kind make a pool."""
    steps_of = honest_steps if honest else lookup_steps
    weights_bytes, kv_bytes = MODELS[case.model]

    def pool(kind: Kind, first: int, count: int) -> Pool:
        steps = steps_of(case.folder, case.model, kind.hardware, kind.tensor_parallel)
        kv_tokens = (kind.gpus * GPU_BYTES - weights_bytes) // kv_bytes
        if kv_tokens <= 0:
            raise InputError(f"{case.folder / case.name}: {case.model} does not fit {kind.gpus} GPUs")
        worker = WorkerType(BARE_GPU, 1, NO_STEPS, kv_tokens, MAX_TOKENS, MAX_TASKS, form=steps)
        return Pool(f"{kind.hardware}-{first}", ROLES[kind.role], worker, count)

    pools, first = [], 0
    for kind, group in groupby(case.machines):
        count = len(list(group))
        pools.append(pool(kind, first, count))
        first += count
    routing = "kv-token-jsq" if case.policy == "kv_token_jsq" else "token-jsq"
    policies = Policies(
        batching="splitwise",
        routing=routing,
        decode_routing=routing,
        pools="splitwise" if case.policy == "mixed_pool" else "static",
    )
    network = Network(BYTES_PER_S[case.policy], transfer="serialised", is_shared=False)
    return Fleet(bare_llm(kv_bytes), tuple(pools), policies, network)


def simulate_case(case: Case, *, honest: bool = False) -> Columns:
    """Our results, in s, named as in the case's table."""
    if short := int((case.output_tokens < 2).sum()):
        raise InputError(
            f"{case.folder / case.name}: {short} requests of one output token, on which it fails"
        )
    lengths = case.input_tokens.astype(np.int64), case.output_tokens.astype(np.int64)
    result = simulate(fleet_of(case, honest=honest), Trace(case.name, case.arrival_s, *lengths))
    return {
        "ttft": result.ttft_s,
        "tbt": (result.e2e_s - result.ttft_s) / case.output_tokens,
        "e2e": result.e2e_s,
        "queue_time": result.queue_s,
        "prompt_start": result.queue_s + case.arrival_s,
        "prompt_end": result.ttft_s + case.arrival_s,
        "token_end": result.e2e_s + case.arrival_s,
        "prompt_runner": result.prefill_worker.astype(float),
        "token_runner": result.decode_worker.astype(float),
    }


def slowdowns(case: Case, results: Columns) -> dict[str, Array]:
    """Slowdowns at PERCENTILES over an idle machine with A100, by Splitwise-sim's step times."""
    steps = lookup_steps(case.folder, case.model, BASIS, GPUS)
    prompt_s, token_s = (  # Splitwise-sim looks both up by the tokens of the prompt.
        interpolate_linearly(case.input_tokens, steps.knots_tokens, times)
        for times in (steps.prompt_s, steps.token_s)
    )
    alone = {"ttft": prompt_s, "tbt": token_s, "e2e": prompt_s + token_s * (case.output_tokens - 1)}
    return {name: np.percentile(results[name] / alone[name], PERCENTILES) for name in METRICS}


# --- the same cases with honest decodes


@dataclass(frozen=True)
class Design:
    """A case's P50, P90 and P99 and its slowdowns, each with the looked up and with the fitted decode
    times.
    """

    case: Case
    percentiles_s: tuple[dict[str, Array], dict[str, Array]]
    slowdowns: tuple[dict[str, Array], dict[str, Array]]

    def keeps_limits(self, honest: bool) -> bool:
        return all((self.slowdowns[honest][name] < LIMITS[name]).all() for name in METRICS)


def design(case: Case, looked_up: Columns) -> Design:
    results = looked_up, simulate_case(case, honest=True)
    by_name = [{name: np.percentile(result[name], PERCENTILES) for name in METRICS} for result in results]
    return Design(case, (by_name[0], by_name[1]), (slowdowns(case, results[0]), slowdowns(case, results[1])))


def print_designs(designs: Sequence[Design]) -> None:
    """Prints designs that serve the same requests below each other."""
    same: dict[tuple[str, bytes], list[Design]] = {}
    for one in designs:
        requests = np.stack([one.case.arrival_s, one.case.input_tokens, one.case.output_tokens])
        same.setdefault((one.case.model, requests.tobytes()), []).append(one)
    for (model, _), group in same.items():
        print(
            f"\n{model}, {len(group[0].case.arrival_s)} requests: lookup | honest; times in s at P50/P90/P99"
        )
        for one in group:
            texts = []
            for name in METRICS:
                sides = ["/".join(f"{value:.4g}" for value in side[name]) for side in one.percentiles_s]
                texts.append(f"{name} {sides[0]} | {sides[1]}")
            kept = " | ".join("kept" if one.keeps_limits(honest) else "missed" for honest in (False, True))
            print(f"  {one.case.name}: {'; '.join(texts)}; the nine limits {kept}")
        for name in METRICS if len(group) > 1 else ():
            orders = [
                [one.case.name for one in sorted(group, key=lambda one: one.percentiles_s[side][name][1])]
                for side in (0, 1)
            ]
            verdict = "the order stays" if orders[0] == orders[1] else f"but honestly {' < '.join(orders[1])}"
            print(f"  {name} P90: {' < '.join(orders[0])}; {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Our simulator against Splitwise-sim, request by request.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--honest", action="store_true", help="then the same cases with honest decode times")
    arguments = parser.parse_args()
    designs: list[Design] = []

    def run(path: Path) -> bool:
        case = read_case(path)
        ours, cpu_s = timed(partial(simulate_case, case))
        if arguments.honest:
            designs.append(design(case, ours))
        return judge(case.name, ours, case.peer, METRICS, case.bounds, (cpu_s, case.peer_cpu_s))

    exit_code = each_case(arguments.directory, run)
    for table in sorted(arguments.directory.glob("*.csv.gz")):
        if not table.with_suffix("").with_suffix(".json").exists():
            print(f"error: {table}: has no command line beside it", file=sys.stderr)
            exit_code = 1
    print_designs(designs)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
