"""Random questions whose every fleet can be simulated: catalog, slo.yaml and trace, drawn from a seed.

The limits of the SLO are taken from what a fleet drawn at random does with the trace, times a factor near 1:
so they lie where fleets begin to hold. The same seed gives the same question; `KINDS` says what it is about.
Questions of `CLASSES` of requests are asked for by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from planner.documents.catalog import Catalog, Provenance, read_catalog
from planner.documents.fits import Split
from planner.documents.slo import parse_selector, parse_slo
from planner.documents.task import PlanQuestion, parse_task
from planner.domain import Gpu, Limit, Metric
from planner.fleet import Fleet, Pool, Role, WorkerType
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.models.memory import worker_memory
from planner.policies import PLANNED_QUEUES, PLANNED_ROUTINGS, PLANNED_WITH_CACHES
from planner.search.oracle.fleet_counts import Counts, may_hand_over
from planner.search.problem.bill import paid_whole_usd_per_h
from planner.search.problem.options import (
    EngineChoices,
    decode_options,
    mixed_options,
    prefill_options,
    worker_types,
)
from planner.simulator.measured_values import metric_percentile_s
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import judge_slo
from planner.solvers.master import Option
from planner.traffic.trace import Trace
from planner.traffic.trace_writing import to_jsonl

KINDS = (
    "hand-off",
    "bursts",
    "tight",
    "mixed",
    "order",
    "routing",
    "warm-up",
    "stock",
    "limits",
    "spare",
    "percentile",
    "hand-off",
    "bursts",
    "small",
    "prefix",
    "sessions",
    "shipped",
)
CLASSES = "classes"  # Asked by name: a kind more in KINDS would give every seed another question.
REQUESTS = (20, 400)
PERCENTILES = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)
HUGE_GPU = Gpu("huge", 1e13, 2e12, 3e14, "nvlink", 3e11, 400, 8, 1.0, "huge", "huge")
# None: left to the plan, which searches edf and races fcfs.
QUEUES_OF_CLASSES: tuple[tuple[str, ...], ...] = (
    (),
    (),
    ("fcfs", "edf"),
    ("edf",),
    ("sjf", "edf"),
    ("fcfs",),
)
LLM = Llm("drawn-llm", 8, 256, 8, 8, 512, 512, 1024, 200_000)
SHIPPED_LLM = "llama-3.1-8b"


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What `plan` is asked: files in memory. `seed` and `kind` give it again.

    `drawn` is the fleet near which the limits lie; whether it keeps them is open.
    """

    seed: int
    kind: str
    document: Mapping[str, Any]
    catalog: Catalog
    trace: Trace
    drawn: Counts

    @property
    def task(self) -> PlanQuestion:
        return parse_task(self.document, self.catalog)


def question(
    seed: int,
    kind: str | None = None,
    requests: tuple[int, int] = REQUESTS,
    *,
    engine: str | Mapping[str, Any] = "none",
) -> Question:
    """The question of a seed; its kind goes round `KINDS` unless it is given. `requests`: from, to."""
    rng = np.random.default_rng([14, seed])
    kind = KINDS[seed % len(KINDS)] if kind is None else kind
    catalog = _shipped_catalog() if kind == "shipped" else _drawn_catalog(rng, small=kind == "small")
    if engine != "none" and kind != "shipped":
        catalog = _with_engines(catalog)
    most = min(len(catalog.gpus), int(rng.integers(2 if kind == "stock" else 1, 5)))
    gpus = [str(name) for name in rng.choice(list(catalog.gpus), most, replace=False)]
    fleet: dict[str, Any] = {
        "gpus": {gpu: None for gpu in gpus},
        "max_num_batched_tokens": _some(rng, (256, 512, 1024, 2048, 4096), 3),
        "max_num_seqs": _some(rng, (8, 32, 128, 256), 2),
        "network": {"bandwidth": f"{rng.choice([2, 10, 50, 100])} GB/s"},
    }
    if rng.random() < 0.3:
        fleet["network"]["transfer"] = "serialised"
    if kind == CLASSES:  # Few types of workers, so that all fleets are simulated in seconds.
        gpus = gpus[:2]
        fleet |= {"gpus": {gpu: None for gpu in gpus}, "max_num_seqs": fleet["max_num_seqs"][-1:]}
        fleet["max_num_batched_tokens"] = fleet["max_num_batched_tokens"][-2:]
    policies = _policies(rng, kind)
    document: dict[str, Any] = {
        "llm": SHIPPED_LLM if kind == "shipped" else LLM.name,
        "slo": {"ttft": {"p90": "1 s"}},
        "fleet": fleet,
        "engine": engine,
        "safety": "none",
    }
    if policies:
        document["policies"] = policies
    counts = _drawn_fleet(rng, kind, types_of(document, catalog, longest_tokens=1))
    trace = _trace(rng, kind, counts, requests)
    if kind == CLASSES:
        trace = _with_tenants(rng, trace)
        document["slo"] = {"classes": _classes(rng, document, catalog, trace, counts)}
        if queues := QUEUES_OF_CLASSES[int(rng.integers(len(QUEUES_OF_CLASSES)))]:
            document["policies"] = policies | {"queue": list(queues)}
    else:
        document["slo"] = _slo(rng, kind, *_reached(rng, kind, document, catalog, trace, counts))
    _bound(rng, kind, document, counts)
    return Question(seed, kind, document, catalog, trace, counts)


def drafting_engine(seed: int) -> dict[str, Any]:
    """`engine:` of a question whose workers may draft, by a drafter of their own or by looking up."""
    rng = np.random.default_rng([seed, 5])
    tokens = sorted({0 if rng.random() < 0.6 else 1, int(rng.integers(1, 6))})
    acceptance = [round(float(share), 3) for share in rng.uniform(0.2, 1.0, max(tokens))]
    draft = round(float(rng.uniform(0, 0.1)), 3)
    method = {"method": "eagle3", "model": "drawn/drafter"} if rng.random() < 0.5 else {"method": "ngram"}
    return {
        "name": "vllm",
        "speculative": {**method, "tokens": tokens, "acceptance": acceptance, "draft": draft},
    }


def files(question: Question) -> dict[str, str]:
    """The same question for `plan --slo slo.yaml --trace trace.jsonl --catalog catalog -o out`."""
    catalog = question.catalog
    written = {
        "slo.yaml": yaml.safe_dump(dict(question.document), sort_keys=False),
        "trace.jsonl": to_jsonl(question.trace),
    }
    if question.kind == "shipped":
        return written
    facts = {"source": "drawn", "date": "2026-11-20"}
    gpus = {
        gpu.name: facts
        | {
            "memory_vendor": "80 GB",
            "memory": f"{gpu.memory_bytes!r} B",
            "bandwidth": "2 TB/s",
            "dense_tflops": 300,
            "link": gpu.link,
            "link_bandwidth": "300 GB/s",
            "power": f"{gpu.power_w} W",
            "gpus_per_node": gpu.gpus_per_node,
            "price": f"{gpu.price_usd_per_h} usd/h",
            "price_source": "drawn",
            "price_date": "2026-11-20",
            "node_selector": gpu.node_selector,
        }
        for gpu in catalog.gpus.values()
    }
    llm = {name: getattr(LLM, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    llm |= {"head_dim": LLM.head_dim, "context": LLM.context_tokens}
    written["catalog/gpus.yaml"] = yaml.safe_dump(gpus)
    written["catalog/llms.yaml"] = yaml.safe_dump({LLM.name: llm | facts})
    for (of_llm, of_gpu), fits in catalog._fits.items():
        rows = [
            {
                "tp": tp,
                "basis": fit.basis,
                "kind": fit.kind,
                "knots_tokens": list(fit.knots_tokens),
                "f_s": list(fit.f_s),
            }
            | {name: getattr(fit, name) for name in ("a_s", "b_s", "d_s", "e_s", "h_s")}
            for (tp, _, _, _), fit in fits.items()
        ]
        document = {"llm": of_llm, "gpu": of_gpu, "command": "drawn", "fits": rows} | facts
        written[f"catalog/latency/{of_gpu}.yaml"] = yaml.safe_dump(document, sort_keys=False)
    return written


def types_of(document: Mapping[str, Any], catalog: Catalog, *, longest_tokens: int) -> tuple[WorkerType, ...]:
    """Every worker type the question may use."""
    task = parse_task(document, catalog)
    types, _ = worker_types(
        catalog.llm(task.llm),
        task.priced_gpus(catalog),
        catalog,
        longest_tokens,
        replace(EngineChoices.of(task), stages=(1,), longer_frac=0.0),
    )
    return types


def _some(rng: np.random.Generator, of: tuple[int, ...], most: int) -> list[int]:
    return sorted(int(x) for x in rng.choice(of, int(rng.integers(1, most + 1)), replace=False))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _shipped_catalog() -> Catalog:
    catalog = read_catalog()
    return replace(catalog, gpus={name: catalog.gpus[name] for name in ("a100-80g", "h100-80g", "l4-24g")})


def _drawn_catalog(rng: np.random.Generator, *, small: bool) -> Catalog:
    """4 GPUs with step times, memory, power and prices of their own; the faster they are the dearer."""
    gpus: dict[str, Gpu] = {}
    fits: dict[tuple[str, str], dict[Split, StepLatency]] = {}
    floor_s, token_s = _log_uniform(rng, 0.005, 0.03), _log_uniform(rng, 2e-5, 2e-4)
    for i in range(4):
        name = f"gpu{i}"
        kv_tokens = _log_uniform(rng, 1_000, 60_000) if small else _log_uniform(rng, 5_000, 60_000)
        use = worker_memory(LLM, HUGE_GPU, 8, max_num_batched_tokens=4096)
        used = use.activation_bytes + use.reserve_bytes + LLM.weight_bytes
        decode, prefill = _log_uniform(rng, 0.5, 2.0), _log_uniform(rng, 0.5, 2.0)  # times as fast
        price_usd_per_h = (
            2 * (decode * prefill) ** float(rng.uniform(0.3, 0.6)) * float(rng.uniform(0.8, 1.25))
        )
        gpus[name] = Gpu(
            name,
            (used + kv_tokens * LLM.kv_bytes_per_token) / 0.9,
            2e12,
            3e14,
            "nvlink",
            3e11,
            round(float(rng.uniform(200, 700))),
            int(rng.choice([1, 2, 2, 4])),
            round(price_usd_per_h, 2),
            "drawn",
            name,
            is_sold_whole=bool(rng.spawn(1)[0].random() < 0.5),
        )
        fits[LLM.name, name] = {
            Split(tp, False): fit for tp, fit in _latencies(rng, floor_s / decode, token_s / prefill).items()
        }
    provenance = {
        name: Provenance("drawn", "2026-11-20", "drawn", "2026-11-20") for name in (*gpus, LLM.name)
    }
    catalog = Catalog(
        gpus, {LLM.name: LLM}, {}, provenance, {name: name for name in gpus}, {LLM.name: LLM.name}
    )
    catalog._fits.update(fits)
    return catalog


def _with_engines(catalog: Catalog) -> Catalog:
    """The same GPUs, their step times those of kernels, to which an engine adds its host."""
    known = replace(catalog, engines=_shipped_catalog().engines)
    for key, fits in catalog._fits.items():
        known._fits[key] = {tp: replace(fit, h_s=0.0, kind="kernels") for tp, fit in fits.items()}
    return known


def _latencies(rng: np.random.Generator, floor_s: float, token_s: float) -> dict[int, StepLatency]:
    """Step times of one GPU by TP, each degree faster than the last by less than its price."""
    knee = float(rng.integers(16, 300))
    a_s, b_s, d_s = float(rng.uniform(0, 3e-8)), float(rng.uniform(0, 1e-4)), float(rng.uniform(0, 2e-7))
    e_s, h_s = float(rng.uniform(0, 1e-3)), float(rng.uniform(0, 2e-3))
    gain = float(rng.uniform(0.6, 1.0))
    return {
        tp: StepLatency(
            (1.0, knee, knee + 1000),
            (floor_s / tp**gain, floor_s / tp**gain, (floor_s + 1000 * token_s) / tp**gain),
            a_s=a_s / tp**gain,
            b_s=b_s / tp**gain,
            d_s=d_s / tp**gain,
            e_s=e_s,
            h_s=h_s,
            basis="drawn",
        )
        for tp in (1, 2, 4)
    }


def _one_or_two(rng: np.random.Generator, names: tuple[str, ...]) -> list[str]:
    return [str(name) for name in rng.choice(names, int(rng.integers(1, 3)), replace=False)]


def _policies(rng: np.random.Generator, kind: str) -> dict[str, Any]:
    policies: dict[str, Any] = {}
    if kind != CLASSES and (kind == "order" or rng.random() < 0.25):
        policies["queue"] = _one_or_two(rng, PLANNED_QUEUES)
        if policies["queue"] != ["fcfs"] and rng.random() < 0.4:
            policies["longest_wait"] = f"{_log_uniform(rng, 0.5, 30):.3g} s"
    if kind == "prefix":
        policies["prefix_cache"] = True
        policies["routing"] = [str(rng.choice(PLANNED_WITH_CACHES[:-1]))]
    elif kind == "routing" or rng.random() < 0.25:
        policies["routing"] = _one_or_two(rng, PLANNED_ROUTINGS)
    return policies


def _drawn_fleet(rng: np.random.Generator, kind: str, types: tuple[WorkerType, ...]) -> Counts:
    """A mixed pool, or two of them, or prefill and decode; up to 9 workers in a pool."""
    likely = {"mixed": 0.0, "stock": 0.0, "hand-off": 0.9, "bursts": 0.9}
    if rng.random() < likely.get(kind, 0.6):
        front, back = prefill_options(types, "cost"), decode_options(types, "cost")
        first = (front[int(rng.integers(len(front)))], int(_log_uniform(rng, 1, 10)))
        back = [option for option in back if may_hand_over((first[0].type, option.type))]
        return (first, (back[int(rng.integers(len(back)))], int(_log_uniform(rng, 1, 7))))
    mixed = mixed_options(types, "cost")
    pools = min(2 if kind == "stock" or rng.random() < 0.2 else 1, len(mixed))
    most = 10 if pools == 1 else 5
    picked = rng.choice(len(mixed), pools, replace=False)
    return tuple((mixed[int(i)], int(_log_uniform(rng, 1, most))) for i in picked)


def _work_s(option: Option, input_tokens: float, output_tokens: float) -> float:
    """About what a request costs a worker that has many."""
    worker = option.type
    batch = min(worker.max_num_seqs, 16)
    prefill_s = float(worker.latency.prefill_s(input_tokens, worker.max_num_batched_tokens))
    step_s = float(worker.latency.step_s(batch, decodes=batch, kv_tokens=batch * input_tokens))
    decode_s = output_tokens * step_s / batch
    each_s: dict[Role, float] = {"prefill": prefill_s, "decode": decode_s, "mixed": prefill_s + decode_s}
    return each_s[option.role]


def _trace(rng: np.random.Generator, kind: str, counts: Counts, requests: tuple[int, int]) -> Trace:
    """Requests that keep the drawn fleet busy: by a clock, at random, in bursts, or on and off."""
    n = int(_log_uniform(rng, *requests))
    longest = int(min(option.type.kv_tokens for option, _ in counts) * (1.0 if kind == "small" else 0.5))
    mean_input, mean_output = _log_uniform(rng, 30, 2000), _log_uniform(rng, 2, 200)
    mean_input, mean_output = min(mean_input, longest / 2), min(mean_output, longest / 6)
    inputs, outputs = _lengths(rng, n, mean_input), _lengths(rng, n, mean_output)
    if rng.random() < 0.3:  # the longer the prompt the shorter the answer: SJF and SRPT part
        outputs[np.argsort(inputs, kind="stable")] = np.sort(outputs)[::-1]
    busy = [_work_s(option, mean_input, mean_output) / count for option, count in counts]
    each_s = max(busy) if counts[0][0].role == "prefill" else 1 / sum(1 / s for s in busy)
    rate_rps = float(rng.uniform(0.3, 1.2)) / each_s
    shape = rng.choice(["bursts"] if kind == "bursts" else ["gamma", "bursts", "on-off"])
    if shape == "gamma":
        cv = float(rng.choice([0.0, 0.5, 1.0, 2.0, 4.0]))
        gaps_s = rng.gamma(cv**-2, cv**2 / rate_rps, n) if cv else np.full(n, 1 / rate_rps)
        arrival_s = np.cumsum(gaps_s)
    elif shape == "bursts":
        k = int(_log_uniform(rng, 2, 40))
        spread_s = float(rng.choice([0.0, 0.001, 0.02]))
        arrival_s = (np.arange(n) // k) * (k / rate_rps) + rng.uniform(0, spread_s, n) * (spread_s > 0)
    else:
        on_frac, period_s = float(rng.uniform(0.1, 0.6)), _log_uniform(rng, 5, 60) / rate_rps
        busy_s = np.cumsum(rng.exponential(on_frac / rate_rps, n))
        on_s = on_frac * period_s
        arrival_s = (busy_s // on_s) * period_s + busy_s % on_s
    arrival_s = np.sort(arrival_s)
    arrival_s -= arrival_s[0]
    if arrival_s[-1] <= 0:
        arrival_s = np.linspace(0, n / rate_rps, n)
    if kind == "warm-up":
        first = arrival_s < arrival_s[-1] / 20 - 1e-9
        inputs = np.where(first, inputs * int(rng.integers(5, 60)), inputs)
    trace = Trace(
        "drawn",
        arrival_s,
        np.clip(inputs, 1, max(longest * 3 // 4, 1)),
        np.clip(outputs, 1, max(longest // 4, 1)),
    )
    if kind == "prefix":
        trace = _with_prefixes(rng, trace)
    if kind == "sessions":
        trace = _with_sessions(rng, trace)
    return trace


def _lengths(rng: np.random.Generator, n: int, mean: float) -> npt.NDArray[np.int64]:
    how = rng.choice(["fixed", "lognormal", "two"])
    if how == "fixed":
        return np.full(n, max(round(mean), 1))
    if how == "two":
        long = rng.random(n) < rng.uniform(0.02, 0.4)
        return np.where(long, max(round(3 * mean), 1), max(round(mean / 4), 1)).astype(np.int64)
    sigma = float(rng.uniform(0.3, 1.3))
    return np.maximum(np.round(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, n)), 1).astype(np.int64)


def _with_prefixes(rng: np.random.Generator, trace: Trace) -> Trace:
    """Each prompt opens with one of a few documents, then with blocks of its own."""
    block, documents = 16, int(rng.integers(2, 12))
    sizes = rng.integers(1, 40, documents)
    ids: list[int] = []
    offsets, unique = [0], 10_000
    for i in range(len(trace)):
        blocks = int(trace.input_tokens[i]) // block
        document = int(rng.integers(documents))
        shared = min(int(sizes[document]), blocks)
        ids += [document * 100 + k for k in range(shared)]
        ids += [unique + k for k in range(blocks - shared)]
        unique += blocks
        offsets.append(len(ids))
    return replace(
        trace,
        prefix_ids=np.array(ids, np.int64),
        prefix_offsets=np.array(offsets, np.int64),
        prefix_block_tokens=block,
    )


def _with_sessions(rng: np.random.Generator, trace: Trace) -> Trace:
    """Some requests wait for an earlier one, and arrive a while after its answer."""
    n, edges = len(trace), []
    think_s, arrival_s = np.zeros(n), trace.arrival_s.copy()
    for i in range(1, n):
        parent = int(rng.integers(max(i - 8, 0), i))
        if rng.random() < 0.5:
            edges.append((i, parent))
            think_s[i] = arrival_s[i] - arrival_s[parent]
    after = np.array(sorted(edges, key=lambda edge: (edge[1], edge[0])), np.int64).reshape(-1, 2)
    return replace(trace, after=after, think_s=think_s)


def _with_tenants(rng: np.random.Generator, trace: Trace) -> Trace:
    """2 or 3 tenants whose requests differ: each has its own part of the requests and its own lengths."""
    names = ("chat", "code", "batch")[: int(rng.integers(2, 4))]
    shares = rng.dirichlet(np.full(len(names), 2.0))
    tenant = rng.choice(len(names), len(trace), p=shares)
    tenant[rng.choice(len(trace), len(names), replace=False)] = np.arange(len(names))
    by = np.exp(rng.uniform(-1.0, 1.0, (2, len(names))))
    columns = [
        np.clip(np.round(tokens * factor[tenant]), 1, tokens.max()).astype(np.int64)
        for tokens, factor in zip((trace.input_tokens, trace.output_tokens), by, strict=True)
    ]
    return replace(
        trace,
        input_tokens=columns[0],
        output_tokens=columns[1],
        tenant=tenant.astype(np.int64),
        tenants=names,
    )


def _classes(
    rng: np.random.Generator, document: Mapping[str, Any], catalog: Catalog, trace: Trace, counts: Counts
) -> dict[str, Any]:
    """`classes:`, one of each tenant, or one of short prompts and one of long.

    Lines lie near what the drawn fleet does first come, first served: those of the class in a hurry about
    there or below, others up to 4 times above.
    """
    median = int(np.median(trace.input_tokens))
    matches: dict[str, Any] = {name: {"tenant": name} for name in trace.tenants}
    if len(trace.tenants) == 2 and trace.input_tokens.min() <= median < trace.input_tokens.max():
        if rng.random() < 0.3:
            matches = {
                "short": {"input_tokens": {"to": median}},
                "long": {"input_tokens": {"from": median + 1}},
            }
    metrics: tuple[tuple[Metric, ...], ...] = (("ttft", "tbt"), ("ttft",), ("ttft", "tpot"), ("e2e",))
    lines = []
    for name, match in matches.items():
        selector = parse_selector(name, match, "match")
        for metric in metrics[int(rng.choice(4, p=[0.4, 0.25, 0.1, 0.25]))]:
            percentile = float(rng.choice(PERCENTILES[:5])) if metric != "ttft" or rng.random() < 0.3 else 0.9
            lines.append(Limit(metric, percentile, 1e9, selector))
    task = parse_task(document, catalog)
    pools = tuple(
        Pool(f"{option.role}-{i}", option.role, option.type, count)
        for i, (option, count) in enumerate(counts)
    )
    fleet = Fleet(catalog.llm(task.llm), pools, task.policy_choices()[-1], task.network)
    simulation = simulate(fleet, trace, limits=tuple(lines), record=True)
    hurried = int(rng.integers(len(matches)))
    classes: dict[str, Any] = {name: {"match": match} for name, match in matches.items()}
    for line in lines:
        assert line.selector is not None
        value = metric_percentile_s(simulation, line.metric, line.percentile_frac, line)
        value = value if math.isfinite(value) and value > 0 else 1.0
        first = list(matches)[hurried] == line.selector.name
        value *= float(rng.uniform(0.5, 1.1) if first and line.metric != "tbt" else rng.uniform(0.95, 4.0))
        key = "deadline" if line.metric == "e2e" else line.metric
        classes[line.selector.name][key] = {f"p{100 * line.percentile_frac:.6g}": f"{value:.6g} s"}
    return classes


def _reached(
    rng: np.random.Generator,
    kind: str,
    document: Mapping[str, Any],
    catalog: Catalog,
    trace: Trace,
    counts: Counts,
) -> tuple[dict[tuple[Metric, float], float], list[Metric], float]:
    """What the drawn fleet does: percentiles of metrics, which are asked, attainment."""
    task = parse_task(document, catalog)
    kinds: tuple[list[Metric], ...] = (
        ["ttft", "tbt"],
        ["ttft", "tbt"],
        ["ttft", "tpot"],
        ["e2e"],
        ["ttft"],
        ["ttft", "tbt", "e2e"],
        ["tbt"],
        ["ttft", "tpot", "tbt"],
    )
    asked = kinds[0] if kind in ("hand-off", "bursts") else kinds[int(rng.integers(len(kinds)))]
    pools = tuple(
        Pool(f"{option.role}-{i}", option.role, option.type, count)
        for i, (option, count) in enumerate(counts)
    )
    policies = task.policy_choices()[-1]
    llm = catalog.llm(task.llm)
    percentiles: dict[Metric, float] = {}
    for metric in asked:
        usual = 0.9 if metric == "ttft" and kind != "percentile" and rng.random() < 0.6 else None
        percentiles[metric] = usual or float(rng.choice(PERCENTILES))
    simulation = simulate(Fleet(llm, pools, policies, task.network), trace, record=True)
    values: dict[tuple[Metric, float], float] = {}
    for metric, percentile_frac in percentiles.items():
        value = metric_percentile_s(simulation, metric, percentile_frac)
        values[metric, percentile_frac] = value if math.isfinite(value) and value > 0 else 1.0
    limits = tuple(Limit(metric, share, 1.02 * value) for (metric, share), value in values.items())
    slo = replace(parse_slo({"ttft": {"p90": "1 s"}}, where=""), limits=limits)
    again = simulate(Fleet(llm, pools, policies, task.network), trace, limits=limits)
    return values, asked, judge_slo(again, slo).attainment_frac


def _slo(
    rng: np.random.Generator,
    kind: str,
    values: Mapping[tuple[Metric, float], float],
    asked: list[Metric],
    attainment: float,
) -> dict[str, Any]:
    slo: dict[str, Any] = {}
    loose: Metric | None = asked[int(rng.integers(len(asked)))] if len(asked) > 1 else None
    if kind in ("hand-off", "bursts"):
        loose = "ttft"
    for (metric, share), value in values.items():
        factor = float(rng.uniform(1.2, 6.0)) if metric == loose else float(rng.uniform(0.93, 1.15))
        slo[metric] = {f"p{100 * share:.6g}": f"{value * factor:.6g} s"}
    if rng.random() < 0.2 and 0.02 < attainment <= 1:
        slo["attainment"] = round(max(attainment * float(rng.uniform(0.9, 1.0)), 0.01), 3)
    return slo


def _bound(rng: np.random.Generator, kind: str, document: dict[str, Any], counts: Counts) -> None:
    """Stock, limits and spare workers: about what the drawn fleet takes."""
    stock = document["fleet"]["gpus"]
    used = {gpu: 0 for gpu in stock}
    for option, count in counts:
        used[option.type.gpu.name] = used.get(option.type.gpu.name, 0) + count * option.type.gpus
    if kind == "stock":
        for gpu in stock:
            stock[gpu] = used[gpu] + int(rng.integers(0, 2))
        if not any(stock.values()):
            stock[next(iter(stock))] = 1
    elif rng.random() < 0.7:
        for gpu in stock:
            stock[gpu] = max(used[gpu] + int(rng.integers(-1, 4)), 1)
    else:
        for gpu in stock:
            stock[gpu] = None
    if kind == "limits" or rng.random() < 0.1:
        price = paid_whole_usd_per_h(counts)
        power = sum(option.type.power_w * count for option, count in counts)
        gpus = sum(option.type.gpus * count for option, count in counts)
        factor = float(rng.uniform(0.8, 1.4))
        which = rng.choice(["cost", "power", "gpus"])
        document["limits"] = {
            "cost": {"cost": f"{price * factor:.2f} usd/h"},
            "power": {"power": f"{power * factor:.0f} W"},
            "gpus": {"gpus": max(round(gpus * factor), 1)},
        }[str(which)]
    if kind == "limits" and rng.random() < 0.5:
        document["objective"] = str(rng.choice(["power", "gpus", "cost"]))
    if kind == "spare":
        document["spare"] = str(rng.choice(["1 worker", "1 worker", "1 node", "2 workers"]))
