"""Reads and writes `traffic: agents` of slo.yaml: how many agents work at once, and their tasks.

planner/traffic/agents.py defines the words.

agents: 500                      # the other keys from the traffic's task, such as task: coding-agent
agents:
  count: 500
  turns: 8.8                     # of a task: the mean of a geometric distribution
  tasks: 9.2                     # of a session, which keeps its context
  tool: {mean: 5 s, cv: 2}       # before each turn but the first of a task
  idle: {mean: 30 s, cv: 2}      # before each task
  system: 32000                  # tokens that all prompts begin with
  repository: {tokens: 10000, count: 100, skew: 0.6}
  start: {mean: 15000, p50: 5000}     # a session's own tokens before its first turn
  sub_agents: {per_task: 0.1, at_once: 4, turns: 6}
  most_tokens: 200000
"""

from collections.abc import Callable, Mapping
from typing import Any

from planner.errors import InputError
from planner.files.document_values import Section, is_number
from planner.traffic.agents import MOST_AGENTS, Agents, Pause, SubAgents
from planner.traffic.lengths import Lengths
from planner.traffic.trace import MAX_TOKENS
from planner.units import parse_quantity, shortest_digits, show_span

KEYS = (
    *("count", "turns", "tasks", "tool", "idle", "system", "repository", "start", "sub_agents"),
    "most_tokens",
)
# Keys of `traffic` that say when requests come or what they share; both follow from the agents.
NOT_WITH_AGENTS = ("rate", "joint", "drift", "burstiness", "clients", "sessions", "prefixes", "tenants")
# Values above these two are taken for typing errors.
MOST_REPOSITORIES = 100_000
MOST_AT_ONCE = 1000  # Sub-agents of one task that work at the same time.


def is_of_agents(traffic_keys: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether traffic is of agents: by the keys of `traffic`, or by those of its task's `row`."""
    return "agents" in traffic_keys or "agents" in row


def agent_rate_rps(agents: Agents, output: Lengths) -> float:
    """Requests/s of all agents, on a fleet where a token takes NOMINAL_TOKEN_S (traffic/agents.py)."""
    return agents.count * agents.task_requests() / agents.task_s(output)


def parse_agents(
    traffic: Section, row: Mapping[str, Any], read_lengths: Callable[[object, str], Lengths]
) -> Agents:
    """The agents of a section `traffic`; `row` has the keys of its task, which those in `traffic` replace.
    The caller passes its function `read_lengths`, because its module imports this one.

    Raises InputError naming the key.
    """
    if "agents" not in traffic:
        raise traffic.error(
            "agents",
            "is missing; this task is of agents: say how many work at once, as in agents: 500, and no rate",
        )
    for key in NOT_WITH_AGENTS:
        if key in traffic:
            raise traffic.error(
                key,
                "agents come when their last answer is there and their tools are "
                f"done; drop {key}, or agents",
            )
    value, where = traffic.get("agents"), traffic.path_of("agents")
    agent_keys = {"count": value} if is_number(value) else value  # agents: 500 is short for {count: 500}.
    if not isinstance(agent_keys, Mapping) or "count" not in agent_keys:
        raise InputError(f"{where}: expected how many work at once, such as agents: 500")
    section = Section.from_document({**row, **agent_keys}, where, KEYS)
    repository = section.subsection("repository", ("tokens", "count", "skew"))
    return Agents(
        count=section.whole_number("count", most=MOST_AGENTS),
        turns=_at_least_one(section, "turns"),
        tasks=_at_least_one(section, "tasks"),
        tool=_parse_pause(section, "tool"),
        idle=_parse_pause(section, "idle"),
        system_tokens=_read_tokens(section, "system"),
        repository_tokens=_read_tokens(repository, "tokens"),
        repositories=repository.whole_number("count", 1, most=MOST_REPOSITORIES),
        skew=repository.number("skew", 0.0, least=0.0),
        start=section.read("start", read_lengths, None),
        sub_agents=_parse_sub_agents(section),
        # `Agents(1)` has the default of most_tokens.
        most_tokens=section.whole_number("most_tokens", Agents(1).most_tokens, most=MAX_TOKENS),
    )


def _at_least_one(section: Section, key: str) -> float:
    """A mean count of 1 or more; 1 without the key."""
    return section.number(key, 1.0, least=1.0)


def _read_tokens(section: Section, key: str) -> int:
    """A number of tokens; 0 without the key. YAML reads 1e4 as a float, which counts as whole."""
    tokens = section.number(key, 0.0, least=0.0)
    if tokens != int(tokens) or tokens > MAX_TOKENS:
        raise section.error(key, f"expected whole tokens up to {MAX_TOKENS}, found {tokens:g}")
    return int(tokens)


def _parse_pause(section: Section, key: str) -> Pause:
    """`tool: 5 s`, or `tool: {mean: 5 s, cv: 2}`; no pause without the key."""
    if key not in section:
        return Pause(0.0)
    if not isinstance(section.get(key), Mapping):
        return Pause(section.at_least(key, "s"))
    pause = section.subsection(key, ("mean", "cv"))
    return Pause(pause.at_least("mean", "s"), pause.number("cv", 1.0, least=0.0))


def _parse_sub_agents(section: Section) -> SubAgents | None:
    """The agents that an agent starts; None if the section has no `sub_agents`."""
    if "sub_agents" not in section:
        return None
    sub_agents = section.subsection("sub_agents", ("per_task", "at_once", "turns"))
    per_task = sub_agents.number("per_task", least=0.0)
    if per_task and _at_least_one(section, "turns") == 1:
        raise sub_agents.error(
            "per_task",
            f"the last turn of a task sends nobody out, so tasks of one turn have no sub-agents; "
            f"give turns above 1 ({section.path_of('turns')}), or per_task: 0",
        )
    return SubAgents(
        per_task=per_task,
        at_once=sub_agents.whole_number("at_once", 1, most=MOST_AT_ONCE),
        turns=_at_least_one(sub_agents, "turns"),
    )


def agents_document(agents: Agents, show_lengths: Callable[[Lengths], dict[str, Any]]) -> dict[str, Any]:
    """The value of `agents` that `parse_agents` reads as these agents."""
    document: dict[str, Any] = {
        "count": agents.count,
        "turns": agents.turns,
        "tasks": agents.tasks,
        "tool": _pause_document(agents.tool),
        "idle": _pause_document(agents.idle),
        "system": agents.system_tokens,
        "repository": {"tokens": agents.repository_tokens, "count": agents.repositories, "skew": agents.skew},
        "most_tokens": agents.most_tokens,
    }
    if agents.start is not None:
        document["start"] = show_lengths(agents.start)
    if (sub := agents.sub_agents) is not None:
        document["sub_agents"] = {"per_task": sub.per_task, "at_once": sub.at_once, "turns": sub.turns}
    return document


def _pause_document(pause: Pause) -> dict[str, Any]:
    """The mapping that `_parse_pause` reads as this pause."""
    return {"mean": duration_text(pause.mean_s), "cv": pause.cv}


def duration_text(seconds: float) -> str:
    """A time as "10 min" if that is exactly this number of seconds, otherwise in seconds."""
    text = show_span(seconds)
    return text if parse_quantity(text, "s", where="") == seconds else f"{shortest_digits(seconds)} s"
