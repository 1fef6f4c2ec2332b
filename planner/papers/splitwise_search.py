"""Splitwise's provisioning (Patel et al. 2024, arXiv:2311.18677, section IV-D): the counts of machines (our
workers) of each pool.

Sets   d      designs: a prompt machine and a token machine (AA, HH, HA, HHcap), or one machine for both
Data   c_p, c_t   what a prompt and a token machine cost (USD/h, Watts or one)
       C      the limit on Watts or USD/h
       s_qm   factor at percentile q of metric m over the same request alone on a reference machine (table VI)
Vars   p, t   machines of each pool; r  requests/s
       holds(p, t, r)   every one of the nine percentiles is below its factor in a simulation of r

  cheapest          iso-throughput:  min c_p p + c_t t   s.t.  holds(p, t, r)
  highest rate      iso-power or iso-cost:  max r   s.t.  holds(p, t, r),  c_p p + c_t t <= C

The paper simulates a grid. `holds` is monotone in p and t, apart from noise of routing, so
`find_cheapest_splits` bisects the least p for each t, and only up to the cost of the best split so far.
benchmarks/splitwise_provisioning.py has the search for the highest rate.

TBT is computed as the paper's program does: (E2E - TTFT) over all output tokens, the first included.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.slo import Slowdown
from planner.domain import ROUNDING, Metric
from planner.errors import InputError
from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.models.llm import Llm
from planner.simulator.layout import FINISHED
from planner.simulator.replay import simulate
from planner.simulator.simulation import Floats, Simulation
from planner.traffic.trace import Trace

TimesAlone = Callable[[Trace], Mapping[Metric, Floats]]
"""Seconds of each request of a trace, alone on the reference machine, by metric: ttft, tbt, e2e."""

ONE_POOL_POLICIES = Policies(batching="splitwise", routing="token-jsq", decode_routing="token-jsq")
SPLIT_POLICIES = replace(ONE_POOL_POLICIES, pools="splitwise")


@dataclass(frozen=True, slots=True)
class MachineDesign:
    """Which machine computes prompts and which later tokens; `token` is None if each machine does both."""

    name: str
    prompt: WorkerType
    token: WorkerType | None

    def fleet(self, llm: Llm, network: Network, prompts: int, tokens: int) -> Fleet:
        """A fleet of `prompts` prompt machines and `tokens` token machines; `tokens` is ignored if every
        machine does both.
        """
        if self.token is None:
            return Fleet(llm, (Pool("machine", "mixed", self.prompt, prompts),), ONE_POOL_POLICIES, network)
        pools = (Pool("prompt", "prefill", self.prompt, prompts), Pool("token", "decode", self.token, tokens))
        return Fleet(llm, pools, SPLIT_POLICIES, network)


@dataclass(frozen=True, slots=True)
class Provisioning:
    """The best value of a search, and all counts of (prompt, token) machines that reach it, those with most
    prompt machines first.

    `value` is a cost if the result is from `find_cheapest_splits`, infinite without counts; the search for
    the highest rate in benchmarks/splitwise_provisioning.py stores a rate [requests/s].
    """

    value: float
    counts: tuple[tuple[int, int], ...]
    simulations: int


def alone_on(machine: WorkerType, trace: Trace) -> Mapping[Metric, Floats]:
    """The times (n,) [s] that each of a trace's n requests takes alone on a machine, its prompt in one step,
    by metric: the reference of the slowdowns.
    """
    latency = machine.latency
    inputs, outputs = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    # Each prompt token attends to itself and to all before it.
    prompt_s = latency.step_s(inputs, pairs=inputs * (inputs + 1) / 2, prefills=1)
    # The mean decode step reads the KV cache of the prompt and of half of the output.
    decode_s = latency.step_s(1, decodes=1) + latency.d_s * (inputs + outputs / 2)
    decodes_s = (outputs - 1) * decode_s  # The prompt's step computes the first token.
    return {"ttft": prompt_s, "tbt": decodes_s / outputs, "e2e": prompt_s + decodes_s}


def slowdowns(simulation: Simulation, alone_s: Mapping[Metric, Floats]) -> dict[Metric, Floats]:
    """The factor (n,) of each request's time over its time alone on the reference machine, by metric; NaN if
    the request never finished.
    """
    values: dict[Metric, Floats] = {
        "ttft": simulation.ttft_s,
        "tbt": (simulation.e2e_s - simulation.ttft_s) / simulation.output_tokens,
        "e2e": simulation.e2e_s,
    }
    return {metric: value / alone_s[metric] for metric, value in values.items()}


def keeps_slowdowns(
    fleet: Fleet, trace: Trace, limits: Sequence[Slowdown], alone_s: Mapping[Metric, Floats]
) -> bool:
    """Whether a fleet serves all requests, and every percentile of the slowdowns is below its limit.
    Percentiles are interpolated, as in the paper's program.
    """
    if unknown := [limit.metric for limit in limits if limit.metric not in alone_s]:
        raise InputError(f"slowdown: the reference has {', '.join(alone_s)}, but not {unknown[0]}")
    simulation = simulate(fleet, trace)
    factors = slowdowns(simulation, alone_s)
    return bool((simulation.status == FINISHED).all()) and all(
        np.quantile(factors[limit.metric], limit.percentile_frac) < limit.factor for limit in limits
    )


def find_cheapest_splits(
    holds: Callable[[int, int], bool],
    prompt_cost: float,
    token_cost: float,
    *,
    most: int,
    splits: bool = True,
) -> Provisioning:
    """All cheapest counts (p, t) of prompt and token machines for which `holds(p, t)`, both from 1 to `most`;
    without `splits` t is 0.
    """
    known_verdicts: dict[tuple[int, int], bool] = {}

    def is_enough(p: int, t: int) -> bool:
        if (p, t) not in known_verdicts:
            known_verdicts[p, t] = holds(p, t)
        return known_verdicts[p, t]

    def least_p(t: int, fewest: int, enough: int) -> int | None:
        """The least p from `fewest` to `enough` that holds beside t; None if even `enough` does not hold."""
        if enough < fewest or not is_enough(enough, t):
            return None
        while fewest < enough:
            middle = (fewest + enough) // 2
            if is_enough(middle, t):
                enough = middle
            else:
                fewest = middle + 1
        return enough

    least_cost = math.inf
    counts: list[tuple[int, int]] = []
    if not splits:
        if (p := least_p(0, 1, most)) is not None:
            least_cost, counts = p * prompt_cost, [(p, 0)]
        return Provisioning(least_cost, tuple(counts), len(known_verdicts))
    # Beside the most token machines the fewest prompt machines are needed: with fewer than these no t holds.
    fewest_p = least_p(most, 1, most)
    if fewest_p is None:
        return Provisioning(least_cost, (), len(known_verdicts))
    most_p = most
    for t in range(1, most + 1):
        if fewest_p * prompt_cost + t * token_cost > least_cost * (1 + ROUNDING):
            break
        if least_cost < math.inf:
            affordable = math.floor((least_cost * (1 + ROUNDING) - t * token_cost) / prompt_cost)
            most_p = min(most_p, affordable)
        p = least_p(t, fewest_p, most_p)
        if p is None:  # Beside t, no p that is cheap enough holds.
            continue
        most_p = p  # More token machines never need more prompt machines.
        cost = p * prompt_cost + t * token_cost
        if cost < least_cost * (1 - ROUNDING):
            least_cost, counts = cost, []
        counts.append((p, t))
    return Provisioning(least_cost, tuple(counts), len(known_verdicts))


def splits_within(
    budget: float, prompt_cost: float, token_cost: float, *, step: int = 1
) -> list[tuple[int, int]]:
    """Counts (p, t) of machines that use up a budget: every `step`-th p, each with the token machines t that
    the remaining budget buys. Both counts are at least 1.
    """
    most_p = math.floor((budget - token_cost) / prompt_cost + ROUNDING)
    return [
        (p, math.floor((budget - p * prompt_cost) / token_cost + ROUNDING))
        for p in range(step, most_p + 1, step)
    ]


def even_splits(budget: float, costs: Sequence[float], *, most: int) -> list[tuple[int, int]]:
    """Up to `most` splits of a budget, evenly spread over those of `splits_within`. With one cost there is
    one split, (machines, 0): machines that do both phases.
    """
    if len(costs) == 1:
        machines = math.floor(budget / costs[0] + ROUNDING)
        return [(machines, 0)] if machines else []
    every = splits_within(budget, costs[0], costs[1])
    chosen = np.unique(np.linspace(0, len(every) - 1, most).round().astype(int)) if every else ()
    return [every[i] for i in chosen]
