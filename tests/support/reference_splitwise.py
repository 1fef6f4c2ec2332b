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
    before: int = 0  # tokens that had left when it last started over: they are part of its prompt
    has_come: bool = False
    is_computed: bool = False  # its prompt
    is_moving: bool = False  # its KV lies on its prompt machine: it is on the way, or asks for room
    is_sent: bool = False  # ... on the way
    version: int = 0  # of the event that ends the transfer, or asks for room
    prompt_machine: int = -1
    token_machine: int = -1
    prompt_start_s: float = math.nan
    first_token_s: float = math.nan
    kv_start_s: float = math.nan
    kv_end_s: float = math.nan
    token_start_s: float = math.nan
    finish_s: float = math.nan

    @property
    def prompt(self) -> int:
        """Tokens to compute before the next one."""
        return self.input + self.before

    @property
    def left(self) -> int:
        """Tokens after the one that the prompt makes."""
        return self.output - self.before - 1

    @property
    def is_over(self) -> bool:
        return not math.isnan(self.finish_s)


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
    is_up: bool = True
    slower: float = 1.0  # every step takes this many times as long
    batch_slower: float = 1.0  # of the batch under way
    mixed_since_s: float = 0.0

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
        return self.batch_slower * steps * self.steps.step_s(prompt_tokens, len(decodes), mean_context)

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
        self,
        machines: Sequence[Machine],
        policy: str,
        bytes_per_s: float,
        requests: Sequence[Request],
        *,
        repurpose_after_s: float = math.inf,
        events: Sequence[tuple[float, str, int, float]] = (),
    ) -> None:
        """`events`: (time, down, up, slow or link, machine, factor)."""
        self.machines, self.policy, self.bytes_per_s, self.requests = machines, policy, bytes_per_s, requests
        self.repurpose_after_s, self.outside, self.link_slower = repurpose_after_s, events, 1.0
        self.kv_bytes = machines[0].limits.kv_bytes_per_token
        self.prompt_pool = [machine for machine in machines if machine.role == "prompt"]
        self.token_pool = [machine for machine in machines if machine.role == "token"]
        self.mixed_pool = [machine for machine in machines if not machine.role]
        self.events: list[tuple[float, float, Callable[[float], None]]] = []
        self.sequence = self.retrying = self.started_over = self.repurposed = 0
        if short := sum(request.output < 2 for request in requests):
            raise ValueError(f"{short} requests of one output token, on which Splitwise's simulator fails")

    def run(self) -> Self:
        for request in self.requests:
            self.at(request.arrival_s, partial(self.come, request))
        for i, (time_s, kind, index, factor) in enumerate(self.outside):
            action: Callable[[float], None] = partial(self.happen, kind, self.machines[index], factor)
            heapq.heappush(self.events, (time_s, 1e18 + i, action))
        while self.events:
            now, _, action = heapq.heappop(self.events)
            action(now)
        return self

    def at(self, time_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time_s, self.sequence, action))
        self.sequence += 1

    # routing

    def come(self, request: Request, now: float) -> None:
        request.has_come = True
        self.admit(request, now)

    def admit(self, request: Request, now: float) -> None:
        kv = self.kv_bytes
        prompt = Task(request, True, request.prompt, 1, (request.prompt + 1) * kv)
        token = self.token_task(request)
        chosen = self.route(prompt, token, now)
        if chosen is None:
            return  # until a machine comes up
        source, target = chosen if request.left else (chosen[0], chosen[0])
        if self.policy != "kv_token_jsq":
            source.pending_tokens += prompt.tokens
            target.pending_tokens += 1
        if source is not target:
            source.reserved_bytes += prompt.bytes
        target.reserved_bytes += prompt.bytes + token.bytes
        request.prompt_machine, request.token_machine = source.index, target.index
        self.arrive(source, prompt, now)
        if source is target and request.left:
            self.arrive(target, token, now)

    def token_task(self, request: Request) -> Task:
        return Task(request, False, 1, request.left, request.left * self.kv_bytes)

    def route(self, prompt: Task, token: Task, now: float) -> tuple[Machine, Machine] | None:
        """Machines for prompt and tokens; None if there is none for one of them."""
        if self.policy == "token_jsq":
            machine = least_pending(self.mixed_pool) if self.mixed_pool else None
            return None if machine is None else (machine, machine)
        if self.policy == "kv_token_jsq":
            if not self.prompt_pool or not self.token_pool:
                return None
            return least_pending(self.prompt_pool), least_pending(self.token_pool)

        self.repurpose(now)
        source, target = self.open_for_prompt(prompt), self.open_for_tokens(prompt.bytes + token.bytes)
        if source is None and self.token_pool:
            source = least_pending(self.token_pool)
            self.mix(self.token_pool, source, now)
        if target is None and self.prompt_pool:
            target = least_reserved(self.prompt_pool)
            self.mix(self.prompt_pool, target, now)
        if source is None or target is None:
            source = target = self.least_pending_of_all()
        return None if source is None or target is None else (source, target)

    def least_pending_of_all(self) -> Machine | None:
        every = self.prompt_pool + self.mixed_pool + self.token_pool
        return least_pending(every) if every else None

    def mix(self, pool: list[Machine], machine: Machine, now: float) -> None:
        pool.remove(machine)
        self.mixed_pool.append(machine)
        machine.mixed_since_s = now

    def repurpose(self, now: float) -> None:
        """Who has been mixed for long changes sides, unless it is the last of its own."""
        for machine in list(self.mixed_pool):
            alike = [other for other in self.machines if other.is_up and other.role == machine.role]
            if now - machine.mixed_since_s >= self.repurpose_after_s and len(alike) > 1:
                machine.role = "token" if machine.role == "prompt" else "prompt"
                self.mixed_pool.remove(machine)
                self.pool_of(machine).append(machine)
                self.repurposed += 1

    def pool_of(self, machine: Machine) -> list[Machine]:
        pools = {"prompt": self.prompt_pool, "token": self.token_pool, "": self.mixed_pool}
        return pools[machine.role]

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
        if machine in self.mixed_pool and machine.role:
            self.mixed_pool.remove(machine)
            self.pool_of(machine).append(machine)

    # failures

    def happen(self, kind: str, machine: Machine, factor: float, now: float) -> None:
        if kind == "down" and machine.is_up:
            self.fail(machine, now)
        elif kind == "up" and not machine.is_up:
            machine.is_up = True
            self.pool_of(machine).append(machine)
            self.place_anew(now)
        elif kind == "slow":
            machine.slower = factor
            if machine.batch:
                self.cut(machine, now)
        elif kind == "link":
            self.link_slower = factor

    def fail(self, machine: Machine, now: float) -> None:
        """All KV on a machine is lost; of a batch of tokens whole steps count."""
        machine.is_up = False
        for pool in (self.prompt_pool, self.token_pool, self.mixed_pool):
            if machine in pool:
                pool.remove(machine)
        if machine.batch and not machine.has_prompt:
            done = bisect_right(range(1, machine.count + 1), now - machine.start_s, key=machine.stretch_s)
            for task in machine.batch:
                task.left -= done
        here = {request: request.here[0] for request in machine.present}
        for task in machine.batch:
            here[task.request] = task
        machine.version += 1
        machine.queue, machine.prompts, machine.evicted, machine.present, machine.batch = [], [], [], [], []
        machine.memory_bytes = machine.reserved_bytes = machine.limits.weights_bytes
        machine.pending_tokens, machine.is_cut = 0, False
        for request in self.requests:
            if not request.has_come or request.is_over or request.prompt_machine < 0:
                continue
            is_at_prompt = not request.is_computed or request.is_moving
            lies = request.prompt_machine if is_at_prompt else request.token_machine
            if lies == machine.index:
                if request.is_moving:
                    request.before += 1
                elif request.is_computed:
                    request.before = request.output - here[request].left
                self.start_over(request, machine, now)
            elif request.token_machine == machine.index:
                self.call_off(request)
                request.token_machine = -1
                if request.is_computed:
                    self.send(request, now)
        self.place_anew(now)

    def start_over(self, request: Request, machine: Machine, now: float) -> None:
        was_sent = request.is_moving and request.is_sent
        held_bytes, other = request.held_bytes, request.token_machine
        whole_bytes = (request.input + request.output) * self.kv_bytes
        self.call_off(request)
        request.here, request.held_bytes, request.is_computed = [], 0, False
        request.prompt_machine = request.token_machine = -1
        self.started_over += 1
        if other not in (-1, machine.index):
            target = self.machines[other]
            target.reserved_bytes -= whole_bytes
            target.pending_tokens -= self.policy != "kv_token_jsq"
            if was_sent:
                target.memory_bytes -= held_bytes
                self.room_again(target, now)

    def call_off(self, request: Request) -> None:
        if request.is_moving:
            request.version += 1
            self.retrying -= not request.is_sent
        request.is_moving = request.is_sent = False

    def place_anew(self, now: float) -> None:
        for request in self.requests:
            if request.has_come and not request.is_over:
                if request.prompt_machine < 0:
                    self.admit(request, now)
                elif request.token_machine < 0:
                    self.place_tokens(request, now)

    def place_tokens(self, request: Request, now: float) -> None:
        """Another machine for the tokens of a request whose prompt has one."""
        source, size_bytes = self.machines[request.prompt_machine], request.input + request.output
        size_bytes *= self.kv_bytes
        if self.policy == "mixed_pool":
            target = self.open_for_tokens(size_bytes)
            if target is None and self.prompt_pool:
                target = least_reserved(self.prompt_pool)
                self.mix(self.prompt_pool, target, now)
            target = target or self.least_pending_of_all()
        else:
            target = least_pending(self.token_pool) if self.token_pool else None
        if target is None:
            return
        self.call_off(request)
        request.token_machine = target.index
        target.reserved_bytes += size_bytes
        target.pending_tokens += self.policy != "kv_token_jsq"
        if target is source:
            source.reserved_bytes -= (request.prompt + 1) * self.kv_bytes
            self.arrive(source, self.token_task(request), now)
        elif request.is_computed:
            self.send(request, now)

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
        machine.is_cut, machine.batch_slower = False, machine.slower
        if not machine.batch:
            if not machine.present:
                self.return_to_pool(machine)
            return
        for task in machine.batch:
            if not task.has_run:
                task.has_run = True
                machine.memory_bytes += task.bytes
                task.request.held_bytes += task.bytes
                if not task.is_prompt:
                    task.request.token_start_s = now
                elif math.isnan(task.request.prompt_start_s):
                    task.request.prompt_start_s = now
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
            request.is_computed = True
            if not request.before:
                request.first_token_s = now
            if not request.left:
                machine.pending_tokens -= 1
                self.complete(machine, request, now)
            elif request.prompt_machine != request.token_machine:
                self.send(request, now)
        else:
            self.complete(machine, request, now)

    def complete(self, machine: Machine, request: Request, now: float) -> None:
        request.finish_s = now
        machine.release(request.held_bytes)

    # from prompt to tokens

    def send(self, request: Request, now: float) -> None:
        """Move the prompt's KV, as soon as there is room; transfers do not slow each other down."""
        target = self.machines[request.token_machine] if request.token_machine >= 0 else None
        request.is_moving, request.is_sent = True, False
        request.version = version = request.version + 1
        if target is None or not target.fits(request.held_bytes):
            self.retrying += 1
            self.at(now + RETRY_S, partial(self.send_again, request, version))
            if len(self.events) == self.retrying:
                raise ValueError(f"{self.retrying} transfers wait for room that nothing will make")
            return
        target.memory_bytes += request.held_bytes
        request.kv_start_s, request.is_sent = now, True
        seconds = self.link_slower * request.prompt * self.kv_bytes / self.bytes_per_s
        self.at(now + seconds, partial(self.receive, request, version))

    def send_again(self, request: Request, version: int, now: float) -> None:
        if request.version == version:
            self.retrying -= 1
            self.send(request, now)

    def receive(self, request: Request, version: int, now: float) -> None:
        if request.version != version:
            return
        source, target = self.machines[request.prompt_machine], self.machines[request.token_machine]
        request.kv_end_s, request.is_moving, request.is_sent = now, False, False
        source.release(request.held_bytes)
        self.arrive(target, self.token_task(request), now)
        self.room_again(source, now)

    def room_again(self, machine: Machine, now: float) -> None:
        """Memory was given back: whoever waits is looked at."""
        if machine.queue and machine.batch:
            if len(machine.batch) < min(machine.limits.max_tasks, machine.limits.max_tokens):
                self.cut(machine, now)
        elif machine.queue and machine.fits(machine.queue[0].bytes):
            self.start(machine, now)


def least_pending(machines: Sequence[Machine]) -> Machine:
    return min(machines, key=lambda machine: machine.pending_tokens)


def least_reserved(machines: Sequence[Machine]) -> Machine:
    return min(machines, key=lambda machine: machine.reserved_bytes)
