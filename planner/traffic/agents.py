"""Draws the requests of agents: a number of them work at the same time, each on one task after another.

    an agent    has sessions, one after another
    a session   consists of tasks that share one growing context
    a task      is what a user waits for: turns, each of which waits for the one before and for its tools
    a turn      is a request; its prompt is the whole session so far and what the tools, or the user, add
    sub-agents  are started by some turns, several at once, each with its own context and turns; the next turn
                of the task waits for all of them

The load is the number of agents: an agent's next request comes when its last is answered and its tools are
done, so a slow fleet gets fewer requests and not a longer queue. Except for an agent's first request, each
waits for an earlier request of the agent. Every prompt begins with the system prompt that all share; that of
an agent, but not of a sub-agent, continues with one of several repositories.

Each agent gets tasks for the whole duration, at NOMINAL_TOKEN_S per output token. Each agent has its own
stream of random numbers, so the agents that exist already stay the same if more are added. At time 0 each
agent is at a random position in its first session, and all begin within the time of one turn.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.traffic.lengths import Lengths
from planner.traffic.trace import MOST_MEAN_IDS, FloatArray, IntArray, Trace, index_ranges, sort_waits

# Seconds per output token of a usual fleet, by which the number of an agent's tasks is chosen.
NOMINAL_TOKEN_S = 0.02
# Blocks are made larger until all prompts together have at most this many ids, and the mean prompt at most
# MOST_MEAN_IDS (trace.py).
MOST_AGENT_IDS = 8_000_000
MOST_AGENTS = 1_000_000  # A guard against typing errors: each agent takes memory and time to draw.
# A second seed, by which these random numbers differ from others that are drawn with the user's seed.
AGENT_STREAM = 40


@dataclass(frozen=True, slots=True)
class Pause:
    """A random time, lognormal, given by its mean [s] and its coefficient of variation."""

    mean_s: float
    cv: float = 1.0

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        """(count,): pauses [s]; all are the mean if it or the coefficient of variation is 0."""
        if not self.mean_s or not self.cv:
            return np.full(count, self.mean_s)
        log_variance = math.log1p(self.cv**2)
        return rng.lognormal(math.log(self.mean_s) - log_variance / 2, math.sqrt(log_variance), count)


@dataclass(frozen=True, slots=True)
class SubAgents:
    """The sub-agents of a task: on average `per_task` of them. A turn that starts sub-agents starts `at_once`
    of them, or a multiple; each has `turns` turns on average (geometric). The last turn of a task starts
    none, so `Agents.turns` must be above 1.
    """

    per_task: float
    at_once: int = 1
    turns: float = 1.0


@dataclass(frozen=True, slots=True)
class Agents:
    """`count` agents that work at the same time. A task has `turns` turns on average, and a session `tasks`
    tasks (both geometric). `tool` is the time of the tools before each turn after a task's first, `idle` the
    pause before a task.

    A session begins with `system_tokens` that all sessions share, `repository_tokens` of one of the
    `repositories` (the k-th in proportion to k^-skew) and `start` tokens of its own. Before a turn that would
    not fit into `most_tokens` the context is compacted: a new session begins, which shares only the system
    prompt and the repository with the old one.
    """

    count: int
    turns: float = 1.0
    tasks: float = 1.0
    tool: Pause = Pause(0.0)
    idle: Pause = Pause(0.0)
    system_tokens: int = 0
    repository_tokens: int = 0
    repositories: int = 1
    skew: float = 0.0
    start: Lengths | None = None
    sub_agents: SubAgents | None = None
    most_tokens: int = 131_072

    def task_s(self, output: Lengths) -> float:
        """About the mean seconds of a task and of the pause before it, if a token takes NOMINAL_TOKEN_S."""
        turn_s = output.mean_tokens * NOMINAL_TOKEN_S
        sub_agents_s = 0.0
        if (sub := self.sub_agents) is not None:
            # Sub-agents that a turn starts together run at the same time, so their times count once.
            groups = sub.per_task / sub.at_once
            sub_agents_s = groups * sub.turns * (turn_s + self.tool.mean_s)
        tools_s = (self.turns - 1) * self.tool.mean_s
        return self.turns * turn_s + tools_s + sub_agents_s + self.idle.mean_s

    def task_requests(self) -> float:
        """The mean number of requests of a task, with those of its sub-agents."""
        sub = self.sub_agents
        return self.turns + (0.0 if sub is None else sub.per_task * sub.turns)


class _Owner(NamedTuple):
    """To which session, repository and task a request belongs, by number; -1 is no repository."""

    session: int
    repository: int
    task: int


class _DrawnRequest(NamedTuple):
    """A request, which arrives `think_s` after its parents have been answered."""

    input_tokens: int
    output_tokens: int
    session: int
    repository: int
    task: int
    think_s: float


@dataclass(slots=True)
class _DrawnRequests:
    """Requests as they are drawn, agent by agent. A request arrives some time after all of its `parents`,
    which are before it in the lists, have been answered. A request without parents is the first of an agent;
    `first_s` has its index and arrival [s].
    """

    rows: list[_DrawnRequest] = field(default_factory=list)
    parents: list[tuple[int, ...]] = field(default_factory=list)
    first_s: list[tuple[int, float]] = field(default_factory=list)

    def add(self, request: _DrawnRequest, parents: tuple[int, ...]) -> int:
        """Add a request; returns its index."""
        self.rows.append(request)
        self.parents.append(parents)
        return len(self.parents) - 1


class _Agent:
    """One agent that draws its requests into `drawn`, with its own random numbers."""

    def __init__(
        self,
        agents: Agents,
        lengths: tuple[Lengths, Lengths],
        drawn: _DrawnRequests,
        rng: np.random.Generator,
    ) -> None:
        self.agents, self.drawn, self.rng = agents, drawn, rng
        self.input, self.output = lengths
        shares = np.arange(1.0, agents.repositories + 1) ** -agents.skew
        self.share_ends = np.cumsum(shares / shares.sum())
        self.shared_tokens = agents.system_tokens + agents.repository_tokens
        self.session = -1  # The number of the agent's present session; its sub-agents have others.
        self.context_tokens = 0  # Tokens of prompts and answers in the session so far.

    def draw_tasks(self, duration_s: float, sessions: int, tasks: int) -> tuple[int, int]:
        """Draw tasks until `duration_s` is over. `sessions` and `tasks` are the first unused numbers of
        sessions and tasks; returns the first unused numbers afterwards.
        """
        rng, agents = self.rng, self.agents
        # The first session had this many tasks before time 0.
        past_tasks = int(rng.integers(0, max(round(agents.tasks), 1)))
        last_request = -1  # The agent has sent none.
        time_s, tasks_left, repository = 0.0, 0, 0
        while time_s < duration_s:
            if tasks_left == 0:  # A new session begins.
                self.session, sessions = sessions, sessions + 1
                tasks_left = int(rng.geometric(1 / agents.tasks))
                self.context_tokens = self._first_context() + self._past_tokens(past_tasks)
                past_tasks = 0
                repository = int(np.searchsorted(self.share_ends, rng.uniform()))
            pause_s = float(agents.idle.draw(rng, 1)[0])
            owner = _Owner(self.session, repository, tasks)
            task_s, last_request, sessions = self._draw_task(owner, pause_s, last_request, sessions)
            # Not `+=`, which rounds otherwise: equal seeds draw equal traffic.
            time_s = time_s + pause_s + task_s
            tasks_left -= 1
            tasks += 1
        return sessions, tasks

    def _first_context(self) -> int:
        """Tokens with which a session begins, without what its first turn adds."""
        own_tokens = 0 if self.agents.start is None else int(self._draw_lengths(self.agents.start, 1)[0])
        return self.shared_tokens + own_tokens

    def _past_tokens(self, tasks: int) -> int:
        """Tokens that a session has from `tasks` tasks before time 0: at most a random part of half of what
        the context can hold beside its shared tokens, so that the first turns fit.
        """
        if not tasks:
            return 0
        turns = int(self.rng.geometric(1 / self.agents.turns, tasks).sum())
        inputs, outputs = self._draw_lengths(self.input, turns), self._draw_lengths(self.output, turns)
        tokens = int(inputs.sum() + outputs.sum())
        room_tokens = (self.agents.most_tokens - self.shared_tokens) // 2
        return min(tokens, int(self.rng.uniform(0, max(room_tokens, 1))))

    def _draw_lengths(self, lengths: Lengths, count: int) -> IntArray:
        """(count,): lengths [tokens] drawn from this distribution."""
        return lengths.of_scores(self.rng.standard_normal(count))

    def _draw_task(self, owner: _Owner, pause_s: float, last: int, sessions: int) -> tuple[float, int, int]:
        """Draw the requests of a task after the request `last`. Returns the nominal seconds of the task, its
        last request and the next unused session number.
        """
        rng, agents = self.rng, self.agents
        turns = int(rng.geometric(1 / agents.turns))
        inputs = self._draw_lengths(self.input, turns).tolist()
        outputs = self._draw_lengths(self.output, turns).tolist()
        tools_s = agents.tool.draw(rng, turns).tolist()
        groups_of_turn = self._groups_of_turn(turns)
        # A task's first request waits for the last one of the task before.
        parents: tuple[int, ...] = () if last < 0 else (last,)
        took_s, think_s = 0.0, pause_s
        for turn in range(turns):
            # A context without room for this turn is compacted: the agent goes on in a new session.
            if self.context_tokens + inputs[turn] + outputs[turn] > agents.most_tokens:
                self.context_tokens = self._first_context()
                self.session, sessions = sessions, sessions + 1
                owner = owner._replace(session=self.session)
            last = self._add_turn(inputs[turn], outputs[turn], owner, think_s, parents)
            parents, think_s = (last,), tools_s[turn]
            took_s += outputs[turn] * NOMINAL_TOKEN_S + (think_s if turn + 1 < turns else 0.0)
            if turn in groups_of_turn:
                parents, longest_s = self._draw_sub_agents(owner, last, sessions, groups_of_turn[turn])
                sessions += len(parents)  # Each sub-agent has a session of its own.
                took_s += longest_s
        return took_s, last, sessions

    def _add_turn(
        self, input_tokens: int, output_tokens: int, owner: _Owner, think_s: float, parents: tuple[int, ...]
    ) -> int:
        """Add a request on the present context, which grows by it up to `most_tokens`. Returns its index.

        Compaction makes room for most turns. Those too long for a fresh context are cut, and so are those of
        sub-agents, which are not compacted; at least one token of the answer stays.
        """
        most = self.agents.most_tokens
        prompt_tokens = min(self.context_tokens + input_tokens, most - 1)
        output_tokens = min(output_tokens, most - prompt_tokens)
        self.context_tokens = prompt_tokens + output_tokens
        return self.drawn.add(_DrawnRequest(prompt_tokens, output_tokens, *owner, think_s), parents)

    def _groups_of_turn(self, turns: int) -> Counter[int]:
        """The turns of a task that start sub-agents -> how many groups of `at_once` the turn starts."""
        sub = self.agents.sub_agents
        # The last turn, or the only one, starts none, since no turn would wait for its sub-agents.
        if sub is None or turns < 2:
            return Counter()
        # Only tasks of two turns or more start groups, so these start more than the mean of all tasks.
        long_tasks_frac = 1 - 1 / self.agents.turns
        groups = int(self.rng.poisson(sub.per_task / sub.at_once / long_tasks_frac))
        return Counter(self.rng.integers(0, turns - 1, groups).tolist()) if groups else Counter()

    def _draw_sub_agents(
        self, owner: _Owner, starter: int, sessions: int, groups: int
    ) -> tuple[tuple[int, ...], float]:
        """Draw the sub-agents that the request `starter` starts, `groups` times `at_once` of them. Returns
        the last request of each, and the nominal seconds of the longest.
        """
        sub, rng = self.agents.sub_agents, self.rng
        assert sub is not None
        task_context_tokens = self.context_tokens  # Restored below, as each sub-agent has its own context.
        ends, longest_s = [], 0.0
        for k in range(groups * sub.at_once):
            turns = int(rng.geometric(1 / sub.turns))
            inputs, outputs = self._draw_lengths(self.input, turns), self._draw_lengths(self.output, turns)
            tools_s = self.agents.tool.draw(rng, turns)
            tools_s[0] = 0.0  # A sub-agent begins at once.
            self.context_tokens, last = self.agents.system_tokens, starter
            for input_tokens, output_tokens, think_s in zip(
                inputs.tolist(), outputs.tolist(), tools_s.tolist(), strict=True
            ):
                sub_owner = _Owner(sessions + k, -1, owner.task)  # A sub-agent has no repository.
                last = self._add_turn(input_tokens, output_tokens, sub_owner, think_s, (last,))
            ends.append(last)
            longest_s = max(longest_s, float(outputs.sum()) * NOMINAL_TOKEN_S + float(tools_s.sum()))
        # The context does not grow by the sub-agents' answers here: they are part of the next turn's input.
        self.context_tokens = task_context_tokens
        return tuple(ends), longest_s


def draw_agents(
    agents: Agents, lengths: tuple[Lengths, Lengths], duration_s: float, *, seed: int, name: str
) -> Trace:
    """The requests of all agents; `lengths` are of the tokens that a turn adds, and of its answer.

    Raises InputError if the system prompt and the repository do not fit into `most_tokens`.
    """
    if agents.system_tokens + agents.repository_tokens >= agents.most_tokens:
        raise InputError(
            f"agents: the system prompt and the repository take {agents.system_tokens} + "
            f"{agents.repository_tokens} tokens, and a context holds {agents.most_tokens} (most_tokens, no "
            "more than the LLM accepts); name an LLM with a longer context, or describe shorter ones, such "
            f"as traffic: {{agents: {{count: {agents.count}, system: {agents.most_tokens // 4}, repository: "
            f"{{tokens: {agents.most_tokens // 8}, count: {agents.repositories}}}}}}}"
        )
    drawn, sessions, tasks = _DrawnRequests(), 0, 0
    # All agents begin within the time of one turn.
    first_turn_s = lengths[1].mean_tokens * NOMINAL_TOKEN_S + agents.tool.mean_s
    for number in range(agents.count):
        rng = np.random.default_rng([seed, AGENT_STREAM, number])
        drawn.first_s.append((len(drawn.rows), float(rng.uniform(0.0, first_turn_s))))
        sessions, tasks = _Agent(agents, lengths, drawn, rng).draw_tasks(duration_s, sessions, tasks)
    return _to_trace(drawn, agents, name)


def _to_trace(drawn: _DrawnRequests, agents: Agents, name: str) -> Trace:
    """The requests, with the blocks of their prompts, in the order in which they would arrive if answers took
    no time.
    """
    n = len(drawn.rows)
    columns = dict(zip(_DrawnRequest._fields, map(np.array, zip(*drawn.rows, strict=True)), strict=True))
    first, start_s = map(list, zip(*drawn.first_s, strict=True))
    think_s = columns["think_s"]
    think_s[first] = 0.0  # No pause before an agent's first request.
    arrivals_s = np.zeros(n)
    arrivals_s[first] = start_s
    arrival_s = np.array(_after_parents(arrivals_s.tolist(), think_s.tolist(), drawn.parents))
    # Requests at the same time keep the order in which they were drawn: parents before those that wait.
    order = np.lexsort((np.arange(n), arrival_s))
    row_of = np.empty(n, np.int64)  # The number in the trace of each drawn request.
    row_of[order] = np.arange(n)
    waiting = np.repeat(row_of, [len(parents) for parents in drawn.parents])
    waits = np.column_stack((waiting, row_of[list(itertools.chain.from_iterable(drawn.parents))]))
    columns = {name: column[order] for name, column in columns.items()}
    inputs = columns["input_tokens"]
    offsets, ids, block_tokens = _prompt_blocks(inputs, columns["session"], columns["repository"], agents)
    return Trace(
        name=name,
        arrival_s=arrival_s[order] - arrival_s[order[0]],
        input_tokens=inputs,
        output_tokens=columns["output_tokens"],
        prefix_offsets=offsets,
        prefix_ids=ids,
        prefix_block_tokens=block_tokens,
        after=sort_waits(waits),
        think_s=columns["think_s"],
        task=columns["task"],
    )


def _after_parents(
    arrivals_s: list[float], think_s: list[float], parents_of: list[tuple[int, ...]]
) -> list[float]:
    """`arrivals_s` with the arrivals of all requests that have parents filled in, in place."""
    for i, parents in enumerate(parents_of):
        if len(parents) == 1:  # By far the most common case; `max` would take several times as long.
            arrivals_s[i] = arrivals_s[parents[0]] + think_s[i]
        elif parents:
            arrivals_s[i] = max(arrivals_s[parent] for parent in parents) + think_s[i]
    return arrivals_s


def _prompt_blocks(
    inputs: IntArray, session: IntArray, repository: IntArray, agents: Agents
) -> tuple[IntArray, IntArray, int]:
    """Offsets, ids and size [tokens] of the prompts' blocks, whole ones only (`Trace`).

    A block belongs to the system prompt, a repository or a session; its id is
    owner * ids_per_owner + its number within the prompt.
    """
    block_tokens = KV_BLOCK_TOKENS
    while int((inputs // block_tokens).sum()) > min(MOST_AGENT_IDS, MOST_MEAN_IDS * len(inputs)):
        block_tokens *= 2
    blocks = inputs // block_tokens  # The whole blocks of each prompt.
    ids_per_owner = int(blocks.max(initial=0)) + 1
    system_blocks = np.minimum(blocks, agents.system_tokens // block_tokens)
    shared_tokens = agents.system_tokens + agents.repository_tokens
    shared_blocks = np.minimum(blocks, shared_tokens // block_tokens)
    # With repository -1 (none), all blocks after those of the system prompt are the session's.
    shared_blocks = np.where(repository >= 0, shared_blocks, system_blocks)
    # Owner 0 is the system prompt, 1 to `repositories` are repositories, larger numbers are sessions. Columns
    # are the three parts of a prompt: its blocks of the system prompt, of a repository, and of its session.
    owner = np.column_stack((np.zeros_like(session), 1 + repository, 1 + agents.repositories + session))
    part_begin = np.column_stack((np.zeros_like(blocks), system_blocks, shared_blocks))
    part_blocks = np.diff(part_begin, append=blocks[:, None])
    ids = index_ranges((owner * ids_per_owner + part_begin).ravel(), part_blocks.ravel())
    return np.concatenate(([0], np.cumsum(blocks))), ids, block_tokens
