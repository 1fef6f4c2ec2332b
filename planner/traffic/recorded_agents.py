"""Makes the traffic of agents that work at the same time, each on one recorded session after another.

A corpus of recorded sessions says what agents do, but not how many work at once, because each session has a
clock of its own. Here every agent takes sessions of the corpus at random, enough for the duration at
NOMINAL_TOKEN_S (agents.py) per output token. Its first session begins with a random request, so that at time
0 agents are at different points of their work. Each further session begins when the agent's previous session
has ended. A pause longer than `longest_pause_s` is cut to that, because an agent whose user is away does not
count as working.

A session that is taken twice is another conversation each time: its blocks get other ids. Only blocks that
several sessions of the corpus share, such as those of a system prompt, keep their ids.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from planner.errors import InputError
from planner.traffic.agents import AGENT_STREAM, NOMINAL_TOKEN_S
from planner.traffic.scaling import with_own_blocks
from planner.traffic.sessions import session_numbers
from planner.traffic.trace import Trace, no_edges, sort_waits

# More requests are refused, as a typing error; agents.py does the same for described agents.
MOST_REQUESTS = 5_000_000


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedSession:
    """A recorded session: its requests, as rows of the corpus in order of arrival; and for each request its
    parents (the requests that it waits for), as indices into `rows`.
    """

    rows: list[int]
    parents: list[list[int]]


@dataclass(slots=True)
class _ReplayedRequests:
    """The requests of all agents, in lists with an entry per request: the row of the corpus that it copies,
    the number of its session among all that were taken (`instance`), its arrival if answers took no time, and
    its pause. `edges` has a pair (request, request that it waits for) for each wait, as indices into the
    lists.
    """

    row: list[int] = field(default_factory=list)
    instance: list[int] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    think_s: list[float] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _SessionReplay:
    """How an agent replays a session, the `instance`-th of all that are taken. The first `skipped` requests
    are left out. The session begins at `since_s`, when the agent's `last` request (None: it has sent none)
    has ended. No request begins at `until_s` or later.
    """

    instance: int
    skipped: int
    since_s: float
    until_s: float
    last: int | None


def agents_at_once(
    corpus: Trace, agents: int, *, duration_s: float, longest_pause_s: float, seed: int = 0
) -> Trace:
    """The requests of `agents` agents, each at work for `duration_s`. With the same seed, more agents include
    these with the same requests. Raises InputError for a trace without sessions, and for more than
    MOST_REQUESTS.
    """
    if not corpus.after.size:
        raise InputError(
            f"--agents: {corpus.name} has no sessions, so nobody knows what an agent does; give recorded "
            "sessions (docs/tables/importers.md), or drop --agents"
        )
    sessions, replayed, instances = _sessions_of(corpus), _ReplayedRequests(), 0
    # A turn is a pause and the answer after it. Agents begin at random times within the mean turn.
    mean_turn_s = float(np.minimum(corpus.think_s, longest_pause_s).mean())
    mean_turn_s += float(corpus.output_tokens.mean()) * NOMINAL_TOKEN_S
    for agent in range(agents):
        rng = np.random.default_rng([seed, AGENT_STREAM, agent])
        time_s = float(rng.uniform(0.0, mean_turn_s))
        until_s = time_s + duration_s
        last: int | None = None  # The agent's last request.
        while time_s < until_s:
            session = sessions[int(rng.integers(len(sessions)))]
            skipped = 0 if last is not None else int(rng.integers(len(session.rows)))
            replay = _SessionReplay(instances, skipped, time_s, until_s, last)
            last, time_s = _replay_session(corpus, session, replayed, replay, longest_pause_s)
            instances += 1
            if len(replayed.row) > MOST_REQUESTS:
                raise InputError(
                    f"--agents: {agents} agents send more than {MOST_REQUESTS:,} requests in "
                    f"{duration_s:g} s; ask for fewer, or a shorter --duration"
                )
    return _to_trace(corpus, replayed, agents)


def _sessions_of(corpus: Trace) -> list[_RecordedSession]:
    """The sessions of the corpus, in the order of their numbers (`session_numbers`)."""
    numbers = session_numbers(corpus)
    place = np.zeros(len(corpus), np.int64)  # The index of each request in its session.
    sessions = [_RecordedSession([], []) for _ in range(int(numbers.max()) + 1)]
    for row, number in enumerate(numbers.tolist()):
        place[row] = len(sessions[number].rows)
        sessions[number].rows.append(row)
        sessions[number].parents.append([])
    for child, parent in corpus.after.tolist():
        sessions[numbers[child]].parents[place[child]].append(int(place[parent]))
    return sessions


def _replay_session(
    corpus: Trace,
    session: _RecordedSession,
    replayed: _ReplayedRequests,
    replay: _SessionReplay,
    longest_pause_s: float,
) -> tuple[int, float]:
    """Add the requests of a session to `replayed`. Returns the index there of the request that ends last, and
    when the agent may take another session: at the end of this request, or at `until_s` if the session is cut
    there.
    """
    # For each request that is added, by its index in the session: its index in `replayed`, and its end if an
    # output token takes NOMINAL_TOKEN_S.
    index_of: dict[int, int] = {}
    ends_s: dict[int, float] = {}
    is_cut = False
    for place in range(replay.skipped, len(session.rows)):
        row, index = session.rows[place], len(replayed.row)
        parents = [parent for parent in session.parents[place] if parent >= replay.skipped]
        think_s = min(float(corpus.think_s[row]), longest_pause_s) if parents else 0.0
        if not all(parent in index_of for parent in parents):
            continue  # A request is left out with its parent, which would begin at `until_s` or later.
        # A request whose parents are all skipped begins with the session.
        begin_s = max((ends_s[parent] for parent in parents), default=replay.since_s) + think_s
        if begin_s >= replay.until_s:
            is_cut = True
            continue
        # `begin_s` counts the time of answers, at NOMINAL_TOKEN_S. `arrival_s` does not: the simulator adds
        # the time that the answers take in the fleet.
        waits_for = [index_of[parent] for parent in parents] or ([] if replay.last is None else [replay.last])
        arrival_s = max((replayed.arrival_s[each] for each in waits_for), default=replay.since_s) + think_s
        index_of[place] = index
        ends_s[place] = begin_s + float(corpus.output_tokens[row]) * NOMINAL_TOKEN_S
        replayed.row.append(row)
        replayed.instance.append(replay.instance)
        replayed.arrival_s.append(arrival_s)
        replayed.think_s.append(think_s)
        replayed.edges += [(index, each) for each in waits_for]
    # `ends_s` has an entry: the first request after the skipped ones waits for none, and begins in time.
    latest = max(ends_s, key=lambda place: ends_s[place])
    return index_of[latest], replay.until_s if is_cut else ends_s[latest]


def _to_trace(corpus: Trace, replayed: _ReplayedRequests, agents: int) -> Trace:
    """The trace of these requests, in order of arrival, from time 0 on."""
    arrival_s = np.array(replayed.arrival_s)
    order = np.argsort(arrival_s, kind="stable")
    place = np.argsort(order)  # Each request's row in the trace.
    rows, instance = np.array(replayed.row)[order], np.array(replayed.instance)[order]
    alone = replace(corpus, after=no_edges()).select(rows, arrival_s=arrival_s[order] - arrival_s[order[0]])
    trace = replace(
        alone,
        name=f"{agents} agents of {corpus.name}",
        after=sort_waits(place[np.array(replayed.edges, np.int64).reshape(-1, 2)]),
        think_s=np.array(replayed.think_s)[order],
        notes=(f"{agents} agents at once, {len(rows)} requests of recorded sessions", *corpus.notes),
    )
    if corpus.task.size:  # Tasks get numbers of their own in each session that is taken.
        trace = replace(trace, task=trace.task + instance * (int(corpus.task.max()) + 1))
    return with_own_blocks(trace, corpus, rows, instance) if corpus.has_prefixes else trace
