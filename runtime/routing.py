"""Which worker takes a request: one small function per policy, over what the router knows of each worker.

The loads are the simulator's: prompt tokens assigned and not yet prefilled, requests, and prompt tokens of
those requests. PREFIX_POLICIES look at who was sent the prompt's beginning, too (runtime/prefixes.py). What
no worker can ever hold (prompt and output beyond its KV cache) is sent nowhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.domain import KV_BLOCK_TOKENS, Policies, Role, WorkerType
from planner.simulator.replay import routing_weights
from runtime.prefixes import Blocks, Sent


@dataclass(slots=True)
class Load:
    """One worker as the router sees it. `token_s`, `sequence_s`, `context_s`: seconds that a pending prompt
    token, a request and a prompt token of a running request put in the way of one more request."""

    name: str
    role: Role
    kv_tokens: int
    token_s: float
    sequence_s: float
    context_s: float
    is_up: bool = True
    pending_tokens: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    sent: Sent = field(default_factory=lambda: Sent(0))

    @property
    def wait_s(self) -> float:
        """The queue's length in seconds, which makes workers of different GPUs comparable."""
        return (
            self.token_s * self.pending_tokens
            + self.sequence_s * self.requests
            + self.context_s * self.prompt_tokens
        )

    def takes(self, input_tokens: int, cached_tokens: int = 0) -> None:
        if self.role != "decode":
            self.pending_tokens += input_tokens - cached_tokens
        self.requests += 1
        self.prompt_tokens += input_tokens

    def has_prefilled(self, input_tokens: int, cached_tokens: int = 0) -> None:
        if self.role != "decode":
            self.pending_tokens -= input_tokens - cached_tokens

    def is_rid_of(self, input_tokens: int) -> None:
        self.requests -= 1
        self.prompt_tokens -= input_tokens


def load_of(name: str, role: Role, engine: WorkerType) -> Load:
    """An idle worker, its seconds those of the simulator's "jsq"."""
    token_s, sequence_s, context_s, _ = routing_weights(engine, "jsq", decode=role == "decode")
    return Load(name, role, engine.kv_tokens, token_s, sequence_s, context_s, sent=Sent(engine.kv_tokens))


@dataclass(slots=True)
class Dice:
    """What the policies remember or draw: whose turn it is, and a seeded generator."""

    turn: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))


Policy = Callable[[Sequence[Load], int, Dice], Load]


def round_robin(loads: Sequence[Load], tokens: int, dice: Dice) -> Load:
    for _ in loads:
        load = loads[dice.turn % len(loads)]
        dice.turn += 1
        if fits(load, tokens):
            return load
    raise ValueError("no worker fits")


def least_outstanding(loads: Sequence[Load], tokens: int, dice: Dice) -> Load:
    return min((load for load in loads if fits(load, tokens)), key=lambda load: load.requests)


def join_shortest_queue(loads: Sequence[Load], tokens: int, dice: Dice) -> Load:
    return min((load for load in loads if fits(load, tokens)), key=lambda load: load.wait_s)


def power_of_two(loads: Sequence[Load], tokens: int, dice: Dice) -> Load:
    """The shorter queue of two drawn at random (TetriInfer section 3.3.4)."""
    fitting = [load for load in loads if fits(load, tokens)]
    return min(dice.rng.sample(fitting, min(2, len(fitting))), key=lambda load: load.wait_s)


def best_fit(loads: Sequence[Load], tokens: int, dice: Dice) -> Load:
    """The fullest worker whose KV cache still has room for the request now, else the emptiest (after
    Aladdin's best fit, by KV tokens alone)."""
    fitting = [load for load in loads if fits(load, tokens)]
    roomy = [load for load in fitting if load.prompt_tokens + tokens <= load.kv_tokens]
    if roomy:
        return min(roomy, key=lambda load: load.kv_tokens - load.prompt_tokens)
    return max(fitting, key=lambda load: load.kv_tokens - load.prompt_tokens)


POLICIES: dict[str, Policy] = {
    "round-robin": round_robin,
    "least-outstanding": least_outstanding,
    "jsq": join_shortest_queue,
    "power-of-two": power_of_two,
    "best-fit": best_fit,
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a policy that looks at prefixes sees of a request: its tokens, its prompt's, and its blocks."""

    tokens: int
    input_tokens: int
    blocks: Blocks


PrefixPolicy = Callable[[Sequence[Load], Prompt, Policies], Load]


def prefix_affinity(loads: Sequence[Load], prompt: Prompt, policies: Policies) -> Load:
    """The longest match, among equals the shortest queue."""
    fitting = [load for load in loads if fits(load, prompt.tokens)]
    return min(fitting, key=lambda load: (-load.sent.tokens(prompt.blocks), load.wait_s))


def min_ttft(loads: Sequence[Load], prompt: Prompt, policies: Policies) -> Load:
    """The least seconds of what is pending and what is missed of the prompt (Mooncake, Dynamo)."""

    def seconds(load: Load) -> float:
        return load.wait_s + load.token_s * (prompt.input_tokens - load.sent.tokens(prompt.blocks))

    return min((load for load in loads if fits(load, prompt.tokens)), key=seconds)


def cache_aware(loads: Sequence[Load], prompt: Prompt, policies: Policies) -> Load:
    """The longest match if it is more than a share of the prompt, else the smallest cache; the fewest
    requests while workers differ by more than a number and a ratio (SGLang)."""
    requests = [load.requests for load in loads]
    most, fewest = max(requests), min(requests)
    fitting = [load for load in loads if fits(load, prompt.tokens)]
    if most - fewest > policies.balance_requests and most > policies.balance_ratio * fewest:
        return min(fitting, key=lambda load: load.requests)
    nearest = max(fitting, key=lambda load: load.sent.tokens(prompt.blocks))
    if nearest.sent.tokens(prompt.blocks) > policies.cache_threshold_frac * prompt.input_tokens:
        return nearest
    return min(fitting, key=lambda load: len(load.sent))


PREFIX_POLICIES: dict[str, PrefixPolicy] = {
    "prefix-affinity": prefix_affinity,
    "min-ttft": min_ttft,
    "cache-aware": cache_aware,
}


def fits(load: Load, tokens: int) -> bool:
    """Whether an otherwise empty worker could hold the request's prompt and output, in whole blocks."""
    return -(-tokens // KV_BLOCK_TOKENS) <= load.kv_tokens // KV_BLOCK_TOKENS


def priority(policies: Policies, inputs: int, outputs: int, arrival_s: float, longest_tokens: int) -> int:
    """A request's place in the queue of a vLLM that schedules by priority: the smallest comes first.

    The simulator's order (slots.enqueue), with the longest request the engines take for the longest prompt:
    only that one may be overtaken for all of `queue_window_s`.
    """
    tokens = {"sjf": inputs, "ljf": longest_tokens - inputs, "srpt": inputs + outputs}[policies.queue]
    if policies.queue_window_s == math.inf:
        return tokens
    return round(1000 * (arrival_s + policies.queue_window_s * tokens / longest_tokens))
