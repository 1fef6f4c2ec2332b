"""Computes or simulates DistServe's Figures 2 to 5 and 8 to 12 (Zhong et al. 2024, arXiv:2401.09670).

    python benchmarks/papers/distserve.py figure8

Figures 2 to 5 show the trade-offs between prefill and decode: 2 and 3 are computed from the catalog's step
times, 4 and 5 are simulated.

Figures 8 to 12: OPT on nodes of 8 A100-80G, with the limits of the paper's Table 1, of which 90 % of requests
must keep both at once; Poisson arrivals, steady state, one seed. Prompts and outputs are drawn with the means
of its Figure 7, as its data are not shipped. Step times are rooflines. Prefill batches hold as many tokens as
saturate the GPU (L_m, planner/models/saturation.py). vLLM has both phases on the same workers, prompts first,
with tensor parallelism over 1, 4 and 8 GPUs, as in the paper. KV moves by NVLink, as Algorithm 2 keeps both
phases of a request in one node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from benchmarks.papers.common import CATALOG, log_normal, most, poisson
from planner.domain import KV_BLOCK_TOKENS, Gpu, Limit, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.models.llm import Llm
from planner.models.saturation import saturating_tokens
from planner.papers import distserve_search as placement
from planner.papers.goodput import Steady, find_goodput
from planner.papers.goodput import poisson_traffic as of_lengths
from planner.simulator.measured_values import measured_mask
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

GPU = CATALOG.gpu("a100-80g")
WITHIN = Network(GPU.link_bytes_per_s, transfer="serialised", is_shared=False)
POLICIES = Policies(batching="distserve", routing="least-outstanding", decode_routing="least-outstanding")
SEATS, REQUESTS = 256, 4000
SIGMA = 0.9  # The standard deviation of a length's logarithm. OPT takes 2,048 tokens of prompt and output.
NODES = 4
ATTAINMENT_FRAC = 0.9


@dataclass(frozen=True)
class Workload:
    """A row of Table 1: mean tokens of prompts and outputs, the limits, and the GPUs of a vLLM worker."""

    name: str
    llm: str
    tokens: tuple[float, float]
    ttft_s: float
    tpot_s: float
    vllm_tp: int
    most_prompt: int = 1500

    def slo(self, scale: float = 1.0) -> Slo:
        limits = (
            Limit("ttft", ATTAINMENT_FRAC, scale * self.ttft_s),
            Limit("tpot", ATTAINMENT_FRAC, scale * self.tpot_s),
        )
        return Slo(limits, ATTAINMENT_FRAC)

    def lengths(self) -> Trace:
        rng = np.random.default_rng(0)
        inputs, outputs = (
            _about(rng, mean, most)
            for mean, most in zip(self.tokens, (self.most_prompt, 2040 - self.most_prompt), strict=True)
        )
        return poisson(1.0, inputs, outputs)


def _about(rng: np.random.Generator, mean: float, most: int) -> npt.NDArray[np.int64]:
    """Log-normal lengths of at most `most` tokens with this mean: cutting lowers the mean, so lengths are
    stretched and cut until it is met.
    """
    tokens = log_normal(rng, 20_000, mean * np.exp(-(SIGMA**2) / 2), SIGMA, most)
    for _ in range(20):
        tokens = np.clip(np.ceil(tokens * mean / tokens.mean()), 4, most).astype(np.int64)
    return tokens


SHAREGPT, HUMANEVAL, LONGBENCH = (755.0, 200.0), (171.0, 98.0), (1738.0, 91.0)
CHATBOTS = (
    Workload("chatbot", "opt-13b", SHAREGPT, 0.2, 0.1, 1),
    Workload("chatbot", "opt-66b", SHAREGPT, 0.4, 0.1, 4),
    Workload("chatbot", "opt-175b", SHAREGPT, 4.0, 0.2, 8),
)
OTHERS = (
    Workload("code completion", "opt-66b", HUMANEVAL, 0.125, 0.2, 4),
    Workload("summarization", "opt-66b", LONGBENCH, 15.0, 0.15, 4, 1940),
)


def types_of(llm: Llm, gpu: Gpu = GPU, nodes: int = NODES) -> list[WorkerType]:
    """Instances with the catalog's step times: rooflines."""
    return list(placement.instance_types(llm, gpu, CATALOG, nodes=nodes, max_num_seqs=SEATS))


def filling(kind: WorkerType) -> WorkerType:
    """The type with prefill batches as large as saturate the GPU."""
    return replace(kind, max_num_batched_tokens=saturating_tokens(kind.latency, kind.form))


def setting_of(work: Workload) -> placement.ServingSetting:
    return placement.ServingSetting(CATALOG.llm(work.llm), POLICIES, WITHIN, WITHIN)


@cache
def traffic_of(work: Workload) -> Callable[[float, int, int], Trace]:
    return of_lengths(work.lengths())


def rule_of(work: Workload, scale: float = 1.0) -> Steady:
    return Steady(work.slo(scale), traffic_of(work), 1)


def low(work: Workload) -> placement.MeasuredFleet:
    """The best pair by Algorithm 2."""
    types = types_of(CATALOG.llm(work.llm))
    prefills = [filling(kind) for kind in types]
    found = placement.low_affinity(
        setting_of(work), prefills, types, 1.0, placement.measured_by(rule_of(work)), nodes=NODES
    )
    return found.measured[0][0]


def vllm(work: Workload, tp: int, pp: int = 1) -> Fleet:
    kind = next(kind for kind in types_of(CATALOG.llm(work.llm)) if (kind.tp, kind.pp) == (tp, pp))
    return Fleet(CATALOG.llm(work.llm), (Pool("w", "mixed", kind, 1),), POLICIES, WITHIN)


def shape(fleet: Fleet) -> str:
    return " + ".join(f"tp{pool.type.tp} pp{pool.type.pp}" for pool in fleet.pools)


def run(work: Workload, fleet: Fleet, rate_rps: float) -> Simulation:
    return simulate(fleet, traffic_of(work)(rate_rps, REQUESTS, 0))


def attained(work: Workload, fleet: Fleet, rate_rps: float, scale: float = 1.0) -> tuple[float, float, float]:
    """Shares of requests within both limits, within that on TTFT, within that on TPOT."""
    found = run(work, fleet, rate_rps)
    inside = measured_mask(found)
    first = found.ttft_s[inside] <= scale * work.ttft_s
    rest = ~(found.tpot_s[inside] > scale * work.tpot_s)
    return float((first & rest).mean()), float(first.mean()), float(rest.mean())


def strictest(work: Workload, fleet: Fleet, rate_rps: float) -> float:
    """The smallest factor on both limits with which the fleet still keeps them at this rate."""
    held = most(lambda tight: attained(work, fleet, rate_rps, 1 / tight)[0] >= ATTAINMENT_FRAC, 1 / 16, 64.0)
    return 1 / held if held else np.inf


def compare(work: Workload) -> None:
    theirs, ours = vllm(work, work.vllm_tp), low(work)
    base_rps = find_goodput(rule_of(work), theirs, guess_rps=theirs.gpus / 2).rate_rps / theirs.gpus
    gain = ours.gpu_rate_rps / base_rps if base_rps else np.inf
    print(
        f"{work.name}, {work.llm}: DistServe {shape(ours.fleet)} {ours.gpu_rate_rps:.3f}, "
        f"vLLM {shape(theirs)} {base_rps:.3f} requests/s and GPU: {gain:.2f} times"
    )
    scales = [strictest(work, fleet, base_rps * fleet.gpus) for fleet in (ours.fleet, theirs)]
    print(
        f"  at {base_rps:.3f} requests/s and GPU the strictest limits are {scales[0]:.2f} and "
        f"{scales[1]:.2f} of those: {scales[1] / scales[0]:.2f} times"
    )
    for load in (0.5, 1.0, 1.5, 2.0):
        rate_rps = load * (base_rps or ours.gpu_rate_rps)
        rows = [attained(work, fleet, rate_rps * fleet.gpus) for fleet in (ours.fleet, theirs)]
        shown = "; ".join(" ".join(f"{100 * share:5.1f}" for share in row) for row in rows)
        print(f"  {rate_rps:.3f} requests/s and GPU: within both, TTFT, TPOT [%] {shown}", flush=True)


def kind_of(llm: str, tp: int, pp: int = 1) -> WorkerType:
    return next(kind for kind in types_of(CATALOG.llm(llm)) if (kind.tp, kind.pp) == (tp, pp))


def figure2() -> None:
    """13B: a batch of decodes at 256 tokens of context, and the same beside one prompt of 128 or 1,024."""
    latency = kind_of("opt-13b", 1).latency
    for n in (1, 32, 64, 96, 128):
        times = [
            float(latency.step_s(n + m, m * (m + 1) / 2, n, 256.0 * n, float(m > 0))) for m in (0, 128, 1024)
        ]
        print(f"{n:3} decodes: {', '.join(f'{1e3 * t:.1f}' for t in times)} ms with 0, 128, 1024 of a prompt")


def figure3() -> None:
    """13B: tokens/s of prefills by prompts and their length, of decodes by batch."""
    latency = kind_of("opt-13b", 1).latency
    for tokens in (128, 256, 512, 1024):
        rates = [
            n * tokens / float(latency.step_s(n * tokens, n * tokens * (tokens + 1) / 2, prefills=n))
            for n in (1, 2, 4, 8)
        ]
        decodes = [n / float(latency.step_s(n, decodes=n, kv_tokens=n * tokens)) for n in (1, 16, 64, 128)]
        print(
            f"{tokens:4} tokens: 1, 2, 4, 8 prompts {', '.join(f'{rate:,.0f}' for rate in rates)} tokens/s; "
            f"1, 16, 64, 128 decodes {', '.join(f'{rate:,.0f}' for rate in decodes)}"
        )


def figure4() -> None:
    """66B on two A100, prompts of 512 tokens one at a time, Poisson: mean TTFT by rate."""
    names = {"intra-op": (2, 1), "inter-op": (1, 2)}
    kinds = {
        name: replace(kind_of("opt-66b", *two), max_num_batched_tokens=512) for name, two in names.items()
    }
    prompts, one = np.full(REQUESTS, 512), np.ones(REQUESTS, np.int64)
    for rate_rps in (0.5, 1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5):
        means_s = []
        for kind in kinds.values():
            fleet = Fleet(CATALOG.llm("opt-66b"), (Pool("w", "mixed", kind, 1),), POLICIES, WITHIN)
            found = simulate(fleet, poisson(rate_rps, prompts, one))
            means_s.append(float(found.ttft_s[measured_mask(found)].mean()))
        shown = ", ".join(f"{name} {mean_s:.3f}" for name, mean_s in zip(kinds, means_s, strict=True))
        print(f"{rate_rps:3.1f} requests/s: mean TTFT {shown} s")


def figure5() -> None:
    """13B, 128 sequences in a batch (in each stage's of a pipeline), prompts of 256: TPOT and tokens/s."""
    for tp, pp in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8)):
        kind = replace(kind_of("opt-13b", tp, pp), max_num_seqs=128 * pp)
        fleet = Fleet(CATALOG.llm("opt-13b"), (Pool("w", "mixed", kind, 1),), Policies(), WITHIN)
        count = 128 * pp
        trace = Trace("batch", np.zeros(count), np.full(count, 256), np.full(count, 150))
        tpot_s = float(np.nanmedian(simulate(fleet, trace).tpot_s))
        print(f"tp{tp} pp{pp}: TPOT {1e3 * tpot_s:.1f} ms, {count / tpot_s:,.0f} tokens/s")


def figure8() -> None:
    """Chatbots: paper 2.0 to 3.41 times the rate, limits 1.4 to 1.8 times stricter."""
    for work in CHATBOTS:
        compare(work)


def figure9() -> None:
    """Code completion 3.2 times the rate, limits 1.5 times stricter; summarization 4.48 and 10.2."""
    for work in OTHERS:
        compare(work)


def figure10() -> None:
    """What a request's time goes into at the placement's goodput; transfers, of which 95 % take < 30 ms."""
    for work in CHATBOTS:
        best = low(work)
        found = run(work, best.fleet, best.rate_rps)
        inside = measured_mask(found) & (found.status == 0)
        blocks = np.ceil(found.input_tokens[inside] / KV_BLOCK_TOKENS)
        moved_s = blocks * KV_BLOCK_TOKENS * best.fleet.llm.kv_bytes_per_token / WITHIN.bandwidth_bytes_per_s
        e2e_s, ttft_s, queue_s = (row[inside] for row in (found.e2e_s, found.ttft_s, found.queue_s))
        shares = [
            part.sum() / e2e_s.sum()
            for part in (queue_s, ttft_s - queue_s, moved_s, e2e_s - ttft_s - moved_s)
        ]
        print(
            f"{work.llm}, {shape(best.fleet)}: prefill queue {shares[0]:.1%}, prefill {shares[1]:.1%}, "
            f"transfer {shares[2]:.3%}, decode with its queue {shares[3]:.1%}; transfers p95 "
            f"{1e3 * np.quantile(moved_s, 0.95):.1f} ms",
            flush=True,
        )


def figure11() -> None:
    """OPT-13B: vLLM, vLLM++ (its best degrees), Algorithms 2 and 1. Paper: vLLM++ as vLLM, High above Low."""
    work = CHATBOTS[0]
    types = types_of(CATALOG.llm(work.llm))
    prefills = [filling(kind) for kind in types]
    rule = rule_of(work)
    ttft, rest = placement.split_slo(work.slo())
    measures = [
        placement.measured_by(Steady(slo, draw, 1))
        for slo, draw in ((ttft, placement.first_tokens(traffic_of(work))), (rest, traffic_of(work)))
    ]
    colocated = [vllm(work, kind.tp, kind.pp) for kind in types]
    rates = [find_goodput(rule, fleet, guess_rps=fleet.gpus).rate_rps / fleet.gpus for fleet in colocated]
    high = placement.high_affinity(setting_of(work), prefills, types, 300.0, measures[0], measures[1]).fleet
    systems = {
        "vLLM": colocated[0],
        "vLLM++": colocated[int(np.argmax(rates))],
        "DistServe-Low": low(work).fleet,
        "DistServe-High": high,
    }
    for name, fleet in systems.items():
        rps = find_goodput(rule, fleet, guess_rps=fleet.gpus).rate_rps / fleet.gpus
        counts = " + ".join(f"{pool.count} x tp{pool.type.tp} pp{pool.type.pp}" for pool in fleet.pools)
        shares = " ".join(
            f"{100 * attained(work, fleet, load * fleet.gpus)[0]:5.1f}" for load in (0.5, 1, 1.5, 2)
        )
        print(
            f"{name:14} {counts:24} {rps:.2f} requests/s and GPU; at 0.5, 1, 1.5, 2: {shares} %", flush=True
        )


def figure12() -> None:
    """CPU seconds of both algorithms by the GPUs of an instance at most; paper: up to 1.3 min on 96 cores."""
    for work in CHATBOTS:
        llm = CATALOG.llm(work.llm)
        for nodes, gpus in ((1, 2), (1, 4), (1, 8), (2, 8), (4, 8)):
            gpu = replace(GPU, gpus_per_node=gpus)
            try:
                types = placement.instance_types(llm, gpu, CATALOG, nodes=nodes, max_num_seqs=SEATS)
                cpu_s = [_seconds(work, types, nodes, is_high) for is_high in (False, True)]
            except InputError as error:
                print(f"{llm.name}, {nodes} x {gpus}: {error}")
                continue
            print(
                f"{llm.name}, {nodes} x {gpus} GPUs, {len(types)} types: Low {cpu_s[0]:.1f}, High "
                f"{cpu_s[1]:.1f} CPU-s",
                flush=True,
            )


def _seconds(work: Workload, types: tuple[WorkerType, ...], nodes: int, is_high: bool) -> float:
    rules = placement.steady_rules(work.slo(), traffic_of(work), seeds=1)
    prefills, start = [filling(kind) for kind in types], time.process_time()
    if is_high:
        measures = placement.measured_by(rules.prefill), placement.measured_by(rules.decode)
        placement.high_affinity(setting_of(work), prefills, types, 30.0, *measures)
    else:
        placement.low_affinity(
            setting_of(work), prefills, types, 1.0, placement.measured_by(rules.whole), nodes=nodes
        )
    return time.process_time() - start


FIGURES = (figure2, figure3, figure4, figure5, figure8, figure9, figure10, figure11, figure12)
