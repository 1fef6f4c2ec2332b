"""What a plan takes for granted, in sentences."""

from __future__ import annotations

import math

from planner.fleet import Policies
from planner.policies import QUEUE, ROUTING
from planner.search.evidence import residences
from planner.search.one_pool import Search
from planner.search.problem import Problem
from planner.simulator.replay import Simulation
from planner.units import show_s


def _of_sessions(problem: Problem) -> list[str]:
    """What is assumed where requests wait for others."""
    if not problem.trace.after.size:
        return []
    sentences = [
        "requests that wait for others arrive when this fleet has answered those; rate and window are of "
        "arrivals as if answers took no time; what arrives after the warm-up counts, to the end of the run",
        "bound: with every request that a percentile lets go, all of its session is given up; of the others "
        "each begins as late as the limits let the ones before it end",
    ]
    return sentences


def _of_bound(problem: Problem) -> list[str]:
    """What the lower bound counts, and over which fleets."""
    work, trace = problem.obliged, problem.trace
    if work.whole_frac > 0:
        counts = (
            f"all work of {100 * work.whole_frac:.3g} % of the requests, by "
            f"{work.whole_s - trace.duration_s:.4g} s after the trace"
        )
    elif work.prefill_frac > 0:
        counts = f"the prefill of {100 * work.prefill_frac:.3g} % of the requests"
    else:
        counts = "no request"
    if not trace.after.size:
        counts += ", and of half of the last tenth all work, by the backlog test"
    sentences = [
        f"bound: the SLO obliges {counts}; a percentile of gaps obliges nothing, as few gaps may be long; "
        "work at its cheapest rate per token, by engines that batch as vLLM V1, under any routing, order and "
        "admission"
    ]
    if small := [worker for item in problem.left for worker in item.workers]:
        names = sorted({f"{worker.gpu.name} tp{worker.tp}" for worker in small})
        sentences.append(
            f"the bound is over fleets with {', '.join(names)} too, whose KV cache is too small for the "
            f"longest request ({problem.longest_tokens} tokens) with some or all settings, as a fleet may "
            "turn away what a percentile lets go; the search is over workers that hold it: a plan turns no "
            "request away"
        )
    return sentences


def assumptions(problem: Problem, simulation: Simulation, search: Search) -> tuple[str, ...]:
    task = problem.task
    window_s, times = residences(simulation)
    length = f"the measured window lasts {show_s(window_s)}, {times:.0f} times a request's mean residence"
    bases = sorted({worker.latency.basis for worker in problem.types})
    policies = problem.oracle.policies
    seats = " or ".join(map(str, task.max_num_seqs))
    sentences = [
        "more workers never hurt (monotonicity), so one failure refutes every smaller fleet",
        "step times: " + "; ".join(bases),
        "host overhead per step: "
        + ", ".join(sorted({f"{worker.latency.h_s * 1e3:g} ms" for worker in problem.types})),
        f"at most {seats} sequences per worker, 16-token KV blocks, "
        f"{'prefix caches' if policies.prefix_cache else 'no prefix cache'}, {_queue_order(policies)}, "
        f"routing {policies.routing} ({ROUTING[policies.routing].words})",
        "TTFT ends with prefill; the KV transfer of a disaggregated request falls into its first gap",
        f"KV blocks move over one shared link of {task.network.bandwidth_bytes_per_s / 1e9:g} GB/s, "
        f"{task.network.transfer}",
        "steady state: warm-up cut (a twentieth of the trace, at most two minutes), backlog test at the end",
        length,
        *_of_bound(problem),
        "beyond level 0 every GPU and TP degree takes part with one token budget per role",
        "power: the boards' limits, GPUs only",
    ]
    if problem.hits is not None:
        sentences.append(
            "the bound counts of every block of a prompt its first use in the trace alone, which no cache "
            "spares, and of memory the blocks that one request has alone"
        )
    if policies.prefix_cache:
        sentences.append(
            "caches are cold at the start of the trace; with them monotonicity is no more than likely, since "
            "more workers may hit less: neighbours and binding have what was simulated with one worker fewer "
            "and one more"
        )
    sentences += _of_sessions(problem)
    return tuple(sentences + ([problem.slo_note] if problem.slo_note else []))


def _queue_order(policies: Policies) -> str:
    order = QUEUE[policies.queue].words
    if policies.queue_window_s < math.inf:
        order += f" (nobody overtaken by what arrives {show_s(policies.queue_window_s)} later)"
    return order
