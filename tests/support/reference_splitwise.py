"""Splitwise's simulator once more, as plainly as we can: machines that batch prompts and tokens, and pools.

A request is a prompt task, which makes the first token, and a token task, which makes the others. Both run on
one machine, or the prompt's KV moves to another in between. A machine runs one batch at a time, by steps. A
batch of tokens alone runs until the first of them is done; an arrival cuts it at the end of the step.
`Machine.select` says who is in the next batch, `Cluster.route` where a request runs, `Cluster.arrive` what is
cut. Memory is reserved when a task first runs: for the prompt and one token, then for all tokens to come.

After Patel et al. 2024, arXiv:2311.18677, and what its public simulator computes, its habits included: a
prompt over the batch's limit evicts every decode; ageing counts batches formed, not steps; kv_token_jsq never
adds the load it subtracts, so that one machine gets everything. At equal times events run in the order in
which they were caused (there: as its heap happens to have them, which shows only where transfers retry).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self

MIXED_FACTOR = 1.1  # a prompt step with decodes in it
PROMPT_QUEUE_TOKENS = 8192  # mixed_pool: no more prompts than that behind one that waits
RETRY_S = 1.0  # until a transfer asks again for room


class Steps(Protocol):
    """Step time of a machine. Affine in `context_tokens` where there is no prompt."""

    def step_s(self, prompt_tokens: int, decodes: int, context_tokens: float) -> float: ...


@dataclass(frozen=True)
class Lookup:
    """The simulator's own: both times by tokens in the step, a decode being one, whatever its context."""

    prompt_s: Callable[[float], float]
    token_s: Callable[[float], float]

    def step_s(self, prompt_tokens: int, decodes: int, context_tokens: float) -> float:
        if not prompt_tokens:
            return self.token_s(decodes)
        return self.prompt_s(prompt_tokens + decodes) * (MIXED_FACTOR if decodes else 1.0)


@dataclass(frozen=True)
class Fit:
    """An honest fit: decodes take c + b * decodes + k * context tokens, beside a prompt without c."""

    prompt_s: Callable[[float], float]
    c_s: float
    b_s: float
    k_s: float

    def step_s(self, prompt_tokens: int, decodes: int, context_tokens: float) -> float:
        decodes_s = self.b_s * decodes + self.k_s * context_tokens
        if not prompt_tokens:
            return self.c_s + decodes_s
        return self.prompt_s(prompt_tokens) * (MIXED_FACTOR if decodes else 1.0) + decodes_s


@dataclass(frozen=True)
class Limits:
    """Of every machine."""

    memory_bytes: int
    weights_bytes: int
    kv_bytes_per_token: int
    max_tasks: int = 512
    max_tokens: int = 2048  # of a batch; its first task may be longer
    max_skips: int = 4  # batches a task is left out of before it comes first


@dataclass(eq=False)
class Request:
    arrival_s: float
    input: int
    output: int
    held_bytes: int = 0
    here: list[Task] = field(default_factory=list)  # tasks on the machine it is on now, in order
    prompt_machine: int = -1
    token_machine: int = -1
    prompt_start_s: float = math.nan
    first_token_s: float = math.nan
    kv_start_s: float = math.nan
    kv_end_s: float = math.nan
    token_start_s: float = math.nan
    finish_s: float = math.nan


@dataclass(eq=False)
class Task:
    request: Request
    is_prompt: bool
    tokens: int  # in a step
    left: int  # steps
    bytes: int  # reserved when it first runs
    skips: int = 0
    has_run: bool = False


@dataclass(eq=False)
class Machine:
    index: int
    steps: Steps
    limits: Limits
    role: str = ""  # the pool it belongs to: prompt, token, or none
    queue: list[Task] = field(
        default_factory=list
    )  # all that wait, by (skips, arrival) when they were put in
    prompts: list[Task] = field(default_factory=list)  # of these, the prompts as they came
    evicted: list[Task] = field(default_factory=list)  # of these, tokens that have run, as they were evicted
    present: list[Request] = field(default_factory=list)  # by arrival
    batch: list[Task] = field(default_factory=list)
    start_s: float = 0.0
    count: int = 0  # steps until the batch is formed anew
    is_cut: bool = False
    version: int = 0  # of the event that ends the batch
    memory_bytes: int = 0
    reserved_bytes: int = 0  # what has been routed here: mixed_pool's load for tokens
    pending_tokens: int = 0  # the load for prompts

    def __post_init__(self) -> None:
        self.memory_bytes = self.reserved_bytes = self.limits.weights_bytes

    def fits(self, size_bytes: int) -> bool:
        return self.memory_bytes + size_bytes <= self.limits.memory_bytes

    def release(self, size_bytes: int) -> None:
        self.memory_bytes -= size_bytes
        self.reserved_bytes -= size_bytes

    @property
    def has_prompt(self) -> bool:
        return any(task.is_prompt for task in self.batch)

    def stretch_s(self, steps: int) -> float:
        """Time of the next `steps` steps of the batch: each decode's context grows by one a step."""
        decodes = [task for task in self.batch if not task.is_prompt]
        prompt_tokens = sum(task.tokens for task in self.batch if task.is_prompt)
        context = sum(task.request.input + task.request.output - task.left for task in decodes)
        mean_context = context + len(decodes) * (steps - 1) / 2
        return steps * self.steps.step_s(prompt_tokens, len(decodes), mean_context)

    def select(self) -> list[Task]:
        """The next batch, in this order: the aged, prompts, evicted tokens, tokens that run, all others.

        Every class ends where the batch is full, or where the next task is too long for it and not the first.
        Prompts, and the others, end at the first that memory cannot hold; the aged pass over it.
        """
        limits, chosen, tokens, memory_bytes = self.limits, dict[Request, Task](), 0, self.memory_bytes

        def is_full(task: Task) -> bool:
            too_long = bool(chosen) and tokens + task.tokens > limits.max_tokens
            return len(chosen) == limits.max_tasks or too_long

        def take(task: Task) -> bool:
            nonlocal tokens, memory_bytes
            need_bytes = 0 if task.has_run else task.bytes
            if memory_bytes + need_bytes > limits.memory_bytes and not task.has_run:
                return False
            chosen[task.request] = task
            tokens, memory_bytes = tokens + task.tokens, memory_bytes + need_bytes
            return True

        for task in self.queue:
            if task.skips < limits.max_skips or is_full(task):
                break
            if task.request not in chosen:
                take(task)
        for waiting in (self.prompts, self.evicted, self.batch):
            for task in waiting:
                if is_full(task) or (task.request not in chosen and not take(task)):
                    break
        for request in self.present:
            if request not in chosen and (is_full(request.here[0]) or not take(request.here[0])):
                break
        return list(chosen.values())

    def form_batch(self) -> None:
        chosen = set(selection := self.select())
        for task in [task for task in self.batch if task not in chosen]:
            self.batch.remove(task)
            self.put(task)
            self.evicted.append(task)
        for task in selection:
            if task not in self.batch:
                self.queue.remove(task)
                if task.is_prompt:
                    self.prompts.remove(task)
                elif task.has_run:
                    self.evicted.remove(task)
                self.batch.append(task)
        for request in self.present:
            request.here[0].skips += request.here[0] not in chosen

    def put(self, task: Task) -> None:
        insort(self.queue, task, key=lambda task: (task.skips, task.request.arrival_s))


class Cluster:
    """Run it with `Cluster(...).run()`, then read `requests`.

    `policy`: token_jsq (machines without a role), kv_token_jsq or mixed_pool (machines of both roles).
    """

    def __init__(
        self, machines: Sequence[Machine], policy: str, bytes_per_s: float, requests: Sequence[Request]
    ) -> None:
        self.machines, self.policy, self.bytes_per_s, self.requests = machines, policy, bytes_per_s, requests
        self.kv_bytes = machines[0].limits.kv_bytes_per_token
        self.prompt_pool = [machine for machine in machines if machine.role == "prompt"]
        self.token_pool = [machine for machine in machines if machine.role == "token"]
        self.mixed_pool: list[Machine] = []
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.sequence = self.retrying = 0
        if short := sum(request.output < 2 for request in requests):
            raise ValueError(f"{short} requests of one output token, on which Splitwise's simulator fails")

    def run(self) -> Self:
        for request in self.requests:
            self.at(request.arrival_s, partial(self.admit, request))
        while self.events:
            now, _, action = heapq.heappop(self.events)
            action(now)
        return self

    def at(self, time_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time_s, self.sequence, action))
        self.sequence += 1

    # routing

    def admit(self, request: Request, now: float) -> None:
        kv = self.kv_bytes
        prompt = Task(request, True, request.input, 1, (request.input + 1) * kv)
        token = Task(request, False, 1, request.output - 1, (request.output - 1) * kv)
        source, target = self.route(prompt, token)
        request.prompt_machine, request.token_machine = source.index, target.index
        self.arrive(source, prompt, now)
        if source is target:
            self.arrive(target, token, now)

    def route(self, prompt: Task, token: Task) -> tuple[Machine, Machine]:
        """Machines for prompt and tokens, and the load they count for it."""
        if self.policy == "token_jsq":
            machine = least_pending(self.machines)
            machine.pending_tokens += prompt.tokens + 1
            return machine, machine
        if self.policy == "kv_token_jsq":
            return least_pending(self.prompt_pool), least_pending(self.token_pool)

        source, target = self.open_for_prompt(prompt), self.open_for_tokens(prompt.bytes + token.bytes)
        if source is None and self.token_pool:
            source = least_pending(self.token_pool)
            self.token_pool.remove(source)
            self.mixed_pool.append(source)
        if target is None and self.prompt_pool:
            target = least_reserved(self.prompt_pool)
            self.prompt_pool.remove(target)
            self.mixed_pool.append(target)
        if source is None or target is None:
            source = target = least_pending(self.prompt_pool + self.mixed_pool + self.token_pool)
        source.pending_tokens += prompt.tokens
        target.pending_tokens += 1
        if source is not target:
            source.reserved_bytes += prompt.bytes
        target.reserved_bytes += prompt.bytes + token.bytes
        return source, target

    def open_for_prompt(self, prompt: Task) -> Machine | None:
        for pool in (self.prompt_pool, self.mixed_pool):
            if pool:
                machine = least_pending(pool)
                if not machine.queue or machine.pending_tokens + prompt.tokens <= PROMPT_QUEUE_TOKENS:
                    return machine
        return None

    def open_for_tokens(self, size_bytes: int) -> Machine | None:
        for pool in (self.token_pool, self.mixed_pool):
            if pool:
                machine = least_reserved(pool)
                if machine.reserved_bytes + size_bytes < machine.limits.memory_bytes:
                    return machine
        return None

    def return_to_pool(self, machine: Machine) -> None:
        """A machine with nothing on it, nor waiting for it, is no longer mixed."""
        if machine in self.mixed_pool:
            self.mixed_pool.remove(machine)
            (self.prompt_pool if machine.role == "prompt" else self.token_pool).append(machine)

    # batches

    def arrive(self, machine: Machine, task: Task, now: float) -> None:
        if not task.request.here:
            insort(machine.present, task.request, key=lambda request: request.arrival_s)
        task.request.here.append(task)
        machine.put(task)
        if task.is_prompt:
            machine.prompts.append(task)
        running, limits = len(machine.batch), machine.limits
        if not running:
            if machine.fits(task.bytes):
                self.start(machine, now)
        elif (running < limits.max_tasks and running + task.tokens <= limits.max_tokens) or (
            task.is_prompt and task.tokens <= limits.max_tokens
        ):
            self.cut(machine, now)

    def start(self, machine: Machine, now: float) -> None:
        machine.form_batch()
        machine.is_cut = False
        if not machine.batch:
            if not machine.present:
                self.return_to_pool(machine)
            return
        for task in machine.batch:
            if not task.has_run:
                task.has_run = True
                machine.memory_bytes += task.bytes
                task.request.held_bytes += task.bytes
                if task.is_prompt:
                    task.request.prompt_start_s = now
                else:
                    task.request.token_start_s = now
        machine.start_s = now
        self.end_after(machine, 1 if machine.has_prompt else min(task.left for task in machine.batch))

    def end_after(self, machine: Machine, steps: int) -> None:
        machine.count = steps
        machine.version = version = machine.version + 1

        def end(now: float) -> None:
            if machine.version == version:
                self.end(machine, now)

        self.at(machine.start_s + machine.stretch_s(steps), end)

    def cut(self, machine: Machine, now: float) -> None:
        """End a batch of tokens alone with the step it is in."""
        if not machine.is_cut and not machine.has_prompt:
            machine.is_cut = True
            steps = range(1, machine.count)
            self.end_after(machine, 1 + bisect_right(steps, now - machine.start_s, key=machine.stretch_s))

    def end(self, machine: Machine, now: float) -> None:
        for task in machine.batch:
            task.left -= machine.count
        for task in [task for task in machine.batch if not task.left]:
            self.finish(machine, task, now)
        self.start(machine, now)

    def finish(self, machine: Machine, task: Task, now: float) -> None:
        request = task.request
        machine.batch.remove(task)
        request.here.remove(task)
        if not request.here:
            machine.present.remove(request)
        machine.pending_tokens -= task.tokens
        if task.is_prompt:
            request.first_token_s = now
            if request.prompt_machine != request.token_machine:
                self.send(request, now)
        else:
            request.finish_s = now
            machine.release(request.held_bytes)

    # from prompt to tokens

    def send(self, request: Request, now: float) -> None:
        """Move the prompt's KV, as soon as there is room; transfers do not slow each other down."""
        target = self.machines[request.token_machine]
        if not target.fits(request.held_bytes):
            self.retrying += 1
            self.at(now + RETRY_S, partial(self.send_again, request))
            if len(self.events) == self.retrying:
                raise ValueError(f"{self.retrying} transfers wait for room that nothing will make")
            return
        target.memory_bytes += request.held_bytes
        request.kv_start_s = now
        seconds = request.input * self.kv_bytes / self.bytes_per_s
        self.at(now + seconds, partial(self.receive, request))

    def send_again(self, request: Request, now: float) -> None:
        self.retrying -= 1
        self.send(request, now)

    def receive(self, request: Request, now: float) -> None:
        source, target = self.machines[request.prompt_machine], self.machines[request.token_machine]
        request.kv_end_s = now
        source.release(request.held_bytes)
        size_bytes = (request.output - 1) * self.kv_bytes
        self.arrive(target, Task(request, False, 1, request.output - 1, size_bytes), now)
        if source.queue and source.batch:
            if len(source.batch) < min(source.limits.max_tasks, source.limits.max_tokens):
                self.cut(source, now)
        elif source.queue and source.fits(source.queue[0].bytes):
            self.start(source, now)


def least_pending(machines: Sequence[Machine]) -> Machine:
    return min(machines, key=lambda machine: machine.pending_tokens)


def least_reserved(machines: Sequence[Machine]) -> Machine:
    return min(machines, key=lambda machine: machine.reserved_bytes)
