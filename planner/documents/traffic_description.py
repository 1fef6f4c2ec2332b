"""Reads `traffic:` of slo.yaml if it describes requests instead of a trace, and rows of catalogs/tasks.yaml.

    traffic:
      rate: 30                       # or {curve: [10, 30, 20], every: 1 h}, {weekly: [168 numbers], mean: 30}
      duration: 1 h                  # of the drawn traffic; of a longer curve, its busiest part is drawn
      growth: {per_month: 5 %, months: 6}
      task: chat                     # its row has the keys that are missing below
      input: 1500                    # or {mean: 1500, p50: 900, p95: 5000, max: 32000}, {fixed: 1500},
      output: 300                    # {lognormal: {mean: 1500, cv: 1}}, {histogram: {edges: .., counts: ..}}
      drift: {input: [0.1, 0, -0.1], output: [0, 0.2, -0.2]}      # of lengths, by intervals of the curve
      joint: -0.2                    # rank correlation of input and output, or {table: [[..], ..]}
      burstiness: {cv: 2, fano: {10 s: 3, 60 s: 8}}
      clients: {count: 100, skew: 1.2, cv: 2, lengths: 10 %}
      sessions: {turns: 4, think_time: 30 s, most_tokens: 32000}
      prefixes: {shared: 800, count: 20, skew: 1}
      tenants: 3                     # or {chat: {rate: 4, task: chat}, batch: {rate: 1, input: 6000, ...}}
      agents: 500                    # at once, in place of rate; or {count: 500, turns: 9, tool: {mean: 5 s}}

planner/traffic/described.py and planner/traffic/agents.py draw the requests, and define what each key means.
`p95: 5000` is a percentile of lengths. A row of catalogs/tasks.yaml has the keys from `input` on.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner.documents.agents_traffic import (
    agent_rate_rps,
    agents_document,
    duration_text,
    is_of_agents,
    parse_agents,
)
from planner.documents.log_columns import KEYS as LOG_KEYS
from planner.errors import InputError
from planner.files.checked_files import read_yaml
from planner.files.document_values import (
    Section,
    check_mapping,
    check_number,
    check_rows,
    did_you_mean,
    errors_as,
    is_number,
    read_positive,
    refused_value,
)
from planner.traffic.described import (
    USUAL_MOST_S,
    USUAL_REQUESTS,
    Clients,
    Description,
    Prefixes,
    Sessions,
    check_description,
    usual_duration_s,
)
from planner.traffic.lengths import Fixed, LengthHistogram, Lengths, Lognormal, Percentiles
from planner.traffic.trace import MAX_TOKENS
from planner.units import HOUR_S, read_tokens

# Keys that say what requests are like; a row of catalogs/tasks.yaml may have them too.
SHAPE_KEYS = (
    *("input", "output", "joint", "burstiness", "clients", "sessions", "prefixes", "tenants", "agents"),
)
# A section `traffic` with any of these keys describes requests; none of them goes with a trace.
KEYS = ("task", "duration", "growth", "drift", *SHAPE_KEYS)
# Under these keys stand numbers of tokens, which may be written 1.5k.
TOKEN_KEYS = ("input", "output", "agents", "sessions", "prefixes")
TASK_KEYS = ("of", *SHAPE_KEYS)  # The keys of a row of catalogs/tasks.yaml, beside its source.
# The coefficient of variation of lengths if only their mean is given; in public traces it is 0.7 to 1.3.
USUAL_CV = 1.0
# Without `duration`, agents work long enough for this many tasks each.
USUAL_TASKS = 3.0
WEEK_H = 168  # Hours.
DRAWN_RPS = 5.0  # With objective throughput, traffic is drawn at this rate and then scaled to others.
# Values above the next eight are most likely typing errors: no trace has such values.
MOST_INTERVALS = 100_000  # Intervals of a curve of rates; ten weeks have about this many minutes.
MOST_COUNT = 100_000  # Clients, prefixes or tenants.
MOST_CV = 100.0  # The coefficient of variation of gaps.
MOST_SKEW = 10.0  # The exponent of clients: requests of the k-th are in proportion to k^-skew.
MOST_DRIFT = 5.0  # In standard deviations.
MOST_SPREAD_FRAC = 0.99  # The share of the variance of lengths that is between clients.
MOST_GROWTH_FRAC = 10.0  # The growth in a month: 10.0 is eleven times the rate.
MOST_GROWTH_MONTHS = 120
# The keys of one tenant, if tenants differ in kind.
TENANT_KEYS = ("rate", "task", "input", "output", "joint", "burstiness", "clients")
# Without `duration`, at least this many requests of each such tenant are drawn, if USUAL_MOST_S has so many.
USUAL_TENANT_REQUESTS = 500
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A row of catalogs/tasks.yaml: values of SHAPE_KEYS for one kind of request.

    They come from a trace or a paper (`source`); `measured_on` says in words what was measured.
    """

    name: str
    measured_on: str
    values: Mapping[str, Any]
    source: str


def parse_task_row(name: str, row: Section) -> TaskRow:
    """Read a row of tasks.yaml. Raises InputError for a value that `traffic` would refuse too."""
    task_row = parse_shipped_task_row(name, row)
    example_of(task_row.values, row.where)
    return task_row


def parse_shipped_task_row(name: str, row: Section) -> TaskRow:
    """Read a row of the shipped tasks.yaml. Tests have looked for values that `traffic` would refuse, which
    takes every process an eighth of a CPU second, as it imports scipy.special.
    """
    values = {key: value for key, value in row.values.items() if key in SHAPE_KEYS}
    return TaskRow(name, row.plain_text("of"), values, row.plain_text("source"))


def example_of(values: Mapping[str, Any], where: str) -> Description:
    """Traffic of the kind that these keys describe: of 10 requests/s or 10 agents, as they name no load."""
    load = {"agents": {"count": 10, **values["agents"]}} if "agents" in values else {"rate": 10}
    description = parse_description(Section({**values, **load}, where), {})
    if description is None:
        raise InputError(f"{where}: describes no requests; give input and output in tokens")
    return description


def is_description(traffic: Section) -> bool:
    """Whether `traffic` describes requests. Otherwise it is about a trace, which is scaled to its `rate`."""
    return any(key in traffic for key in KEYS) or isinstance(traffic.get("rate"), Mapping)


def describes_traffic(path: Path) -> bool:
    """Whether this slo.yaml describes its traffic; False for a pipe, as it can be read only once."""
    # Path.is_file would raise OSError for a name that is too long; the module that reads the question
    # refuses such a name with a message.
    if not os.path.isfile(path):  # noqa: PTH113
        return False
    traffic = read_yaml(path).get("traffic")
    return isinstance(traffic, Mapping) and is_description(Section.from_document(traffic, path))


def parse_description(
    traffic: Section, tasks: Mapping[str, TaskRow], *, is_rate_sought: bool = False
) -> Description | None:
    """The traffic that the section `traffic` describes; None if the section is about a trace.

    `tasks` are the rows of catalogs/tasks.yaml by name. With `is_rate_sought` (objective throughput) the rate
    may be left out, because the search scales the traffic. Raises InputError, naming the key, for values that
    are impossible alone or together.
    """
    if not is_description(traffic):
        return None
    for key in ("scale", *LOG_KEYS):
        if key in traffic:
            raise traffic.error(key, f"is for a trace, and this traffic is described; drop {key}")
    traffic = _with_plain_tokens(traffic)
    if isinstance(traffic.get("tenants"), Mapping):
        return _parse_tenants(traffic, tasks)
    task = _named_task(traffic, tasks)
    task_values: Mapping[str, Any] = {} if task is None else task.values
    # `traffic` has the keys of slo.yaml alone, `section` also those of the named task.
    section = Section({**task_values, **traffic.values}, traffic.where)
    has_agents = is_of_agents(traffic.values, task_values)
    is_rate_assumed = "rate" not in traffic and not has_agents
    if is_rate_assumed:
        section = _with_drawn_rate(section, is_rate_sought=is_rate_sought)
    lengths = []
    # Sentences on what was assumed; `_parse_lengths` adds some.
    basis = [] if task is None else [f"task {task.name}: {task.measured_on}"]
    fitting_tasks = [row.name for row in tasks.values() if not has_agents or "agents" in row.values]
    for key in ("input", "output"):
        if key not in section:
            raise traffic.error(
                key,
                "is missing; give a task, or tokens such as input: 300, output: 150; tasks: "
                f"{', '.join(fitting_tasks) or 'a row of catalogs/tasks.yaml'}",
            )
        # A mean in slo.yaml scales the lengths of the task. Where slo.yaml has no lengths, `section` has
        # those of the task, and nothing is scaled.
        task_lengths = task_values.get(key) if key in traffic else None
        lengths.append(_parse_lengths(section.get(key), section.path_of(key), task_lengths, basis))
    input_lengths, output_lengths = lengths
    agents, agent_task_s = None, None
    if has_agents:
        agents = parse_agents(traffic, task_values.get("agents", {}), _read_lengths)
        agent_task_s = agents.task_s(output_lengths)
        rate_rps: tuple[float, ...] = (agent_rate_rps(agents, output_lengths),)
        every_s = HOUR_S
    else:
        rate_rps, every_s = _parse_rate(section)
    joint, table = _parse_joint(section)
    gap_cv, fano = _parse_burstiness(section)
    tenants = section.whole_number("tenants", 1, most=MOST_COUNT)
    description = Description(
        rate_rps=rate_rps,
        duration_s=_duration_s(section, rate_rps, every_s, agent_task_s),
        is_rate_assumed=is_rate_assumed,
        has_usual_duration=is_rate_sought and not (has_agents or rate_rps[1:] or "duration" in section),
        input=input_lengths,
        output=output_lengths,
        every_s=every_s,
        growth=_parse_growth(section),
        joint=joint,
        joint_table=table,
        drift=_parse_drift(section, len(rate_rps)),
        gap_cv=gap_cv,
        fano=fano,
        clients=_parse_clients(section, tenants),
        sessions=_parse_sessions(section),
        prefixes=_parse_prefixes(section),
        agents=agents,
        tenants=tenants,
        basis=tuple(basis),
    )
    with errors_as(InputError, traffic.where):
        check_description(description)
    return description


def _with_drawn_rate(section: Section, *, is_rate_sought: bool) -> Section:
    """The section with the rate DRAWN_RPS; InputError unless the rate is sought."""
    if not is_rate_sought:
        raise section.error("rate", "is missing; say how many requests/s, such as rate: 30")
    return Section({**section.values, "rate": DRAWN_RPS}, section.where)


def _with_plain_tokens(traffic: Section) -> Section:
    """The section with 1500 for "1.5k" under TOKEN_KEYS."""
    tokens = {key: read_tokens(traffic.get(key)) for key in TOKEN_KEYS if key in traffic}
    return Section({**traffic.values, **tokens}, traffic.where)


def _parse_tenants(traffic: Section, tasks: Mapping[str, TaskRow]) -> Description:
    """Tenants whose requests differ in kind: `tenants: {chat: {rate: 4, task: chat}, batch: {...}}`.

    Each is parsed as traffic of its own; all have the same duration.
    """
    for key in ("rate", "task", "drift", *SHAPE_KEYS):
        if key in traffic and key != "tenants":
            raise traffic.error(
                key,
                "stands beside tenants that are described one by one; write it with "
                f"each tenant, or drop it (each may have {', '.join(TENANT_KEYS)})",
            )
    where = traffic.path_of("tenants")
    by_name = check_mapping(traffic.get("tenants"), where, "{chat: {rate: 4, task: chat}}")
    sections = {
        str(name): Section.from_document(value, f"{where}: {name}", TENANT_KEYS)
        for name, value in by_name.items()
    }
    if len(sections) < 2:
        raise InputError(f"{where}: expected two tenants or more, found {list(sections)}; describe one alone")
    rates_rps = [each.positive("rate", "rps") for each in sections.values()]
    total_rps = sum(rates_rps)
    if "duration" in traffic:
        duration_s = traffic.positive("duration", "s")
    else:
        rarest_s = math.ceil(min(USUAL_TENANT_REQUESTS / min(rates_rps), USUAL_MOST_S))
        duration_s = max(usual_duration_s(total_rps), rarest_s)
    by_tenant = []
    for name, section in sections.items():
        with_duration = Section({**section.values, "duration": f"{duration_s} s"}, section.where)
        description = parse_description(with_duration, tasks)
        assert description is not None, "a duration describes traffic"
        by_tenant.append((name, description))
    busiest = by_tenant[rates_rps.index(max(rates_rps))][1]
    return Description(
        rate_rps=(total_rps,),
        duration_s=duration_s,
        # A description must have lengths. Nothing is drawn from these: each tenant has its own.
        input=busiest.input,
        output=busiest.output,
        growth=_parse_growth(traffic),
        by_tenant=tuple(by_tenant),
        basis=tuple(f"{name}: {line}" for name, each in by_tenant for line in each.basis),
    )


def _named_task(traffic: Section, tasks: Mapping[str, TaskRow]) -> TaskRow | None:
    """The row of the catalog that `task` names; None without the key."""
    if "task" not in traffic:
        return None
    name = traffic.plain_text("task")
    if name not in tasks:
        # Agents need what only tasks of agents say, so no other is suggested.
        fitting = [task for task, row in tasks.items() if "agents" not in traffic or "agents" in row.values]
        raise traffic.error(
            "task",
            f"{name[:100]!r} is no row of catalogs/tasks.yaml; "
            f"{did_you_mean(name, fitting)}There {'is' if len(fitting) == 1 else 'are'} {', '.join(fitting)}"
            + (" for agents" if "agents" in traffic else ""),
        )
    return tasks[name]


def _parse_rate(traffic: Section) -> tuple[tuple[float, ...], float]:
    """Requests/s in each interval, and the length of an interval [s]; one interval for a constant rate."""
    value, where = traffic.get("rate"), traffic.path_of("rate")
    if not isinstance(value, Mapping):
        return (read_positive(value, "rps", where),), HOUR_S
    if "weekly" in value:
        section = Section.from_document(value, where, ("weekly", "mean", "peak"))
        curve, every_s = _parse_week(section.get("weekly"), section.path_of("weekly")), HOUR_S
        if "mean" in section and "peak" in section:
            raise InputError(f"{where}: found mean and peak; give one of the two")
        for key, curve_rps in (("mean", sum(curve) / len(curve)), ("peak", max(curve))):
            if key in section and curve_rps > 0:  # A week without requests is refused below.
                factor = section.positive(key, "rps") / curve_rps
                curve = [rate * factor for rate in curve]
    else:
        section = Section.from_document(value, where, ("curve", "every"))
        every_s = section.positive("every", "s")
        curve = section.read("curve", _parse_rates)
    if not any(curve):
        raise InputError(f"{where}: all rates are 0; expected one above 0")
    return tuple(curve), every_s


def _parse_rates(value: object, where: str) -> list[float]:
    """Check the requests/s in each interval of a curve, and return them as a list."""
    listed = check_rows(value, where, "requests/s, one for each interval", least=1)
    if len(listed) > MOST_INTERVALS:
        raise InputError(f"{where}: holds {len(listed)} numbers, expected at most {MOST_INTERVALS}")
    return [check_number(rate, f"{where}[{i}]", least=0.0) for i, rate in enumerate(listed)]


def _parse_week(value: object, where: str) -> list[float]:
    """Requests/s of the 168 hours from Monday 0:00 on, which may be written as seven lists of 24."""
    hours = check_rows(value, where, f"{WEEK_H} numbers, or 7 days of 24", least=1)
    if len(hours) == 7 and all(isinstance(day, list) and len(day) == 24 for day in hours):
        hours = [rate for day in hours for rate in day]
    if len(hours) != WEEK_H:
        raise InputError(
            f"{where}: expected {WEEK_H} numbers of requests/s, one for each hour, or 7 lists of 24; found "
            f"{len(hours)}"
        )
    return _parse_rates(hours, where)


def _parse_growth(traffic: Section) -> float:
    """`growth: {per_month: 5 %, months: 6}` as a factor on the rate."""
    if "growth" not in traffic:
        return 1.0
    section = traffic.subsection("growth", ("per_month", "months"))
    per_month_frac = section.share("per_month", most=MOST_GROWTH_FRAC)
    months = section.number("months", least=0.0)
    if months > MOST_GROWTH_MONTHS:
        raise section.refused("months", f"expected at most {MOST_GROWTH_MONTHS}", months)
    return float((1 + per_month_frac) ** months)


def _duration_s(
    traffic: Section, rate_rps: tuple[float, ...], every_s: float, agent_task_s: float | None
) -> float:
    """How long the drawn traffic is [s]: `duration`, if given. Otherwise a curve is drawn as a whole, but of
    a week at most one hour; other traffic lasts until its rate, or the tasks of its agents, give enough
    requests.

    `agent_task_s` is the mean time of a task and of the pause before it [s]; None for traffic without agents.
    """
    if "duration" in traffic:
        return traffic.positive("duration", "s")
    if agent_task_s is not None:
        return math.ceil(max(USUAL_REQUESTS / rate_rps[0], USUAL_TASKS * agent_task_s))
    is_curve = len(rate_rps) > 1
    if is_curve and "weekly" not in traffic.get("rate", {}):
        return len(rate_rps) * every_s
    usual_s = usual_duration_s(max(rate_rps))
    return min(usual_s, math.ceil(every_s)) if is_curve else usual_s  # An interval of a week is an hour.


def _parse_lengths(value: object, where: str, task_lengths: object, basis: list[str]) -> Lengths:
    """A distribution of lengths in tokens.

    A number is a mean, as `{mean: 1500}` is: it scales the distribution of the task, if there is one;
    otherwise a lognormal one is assumed. `basis` collects sentences on assumptions.
    """
    if isinstance(value, Mapping) and list(value) == ["mean"]:
        mean = check_number(value["mean"], f"{where}: mean", least=1.0)
        return _parse_lengths(mean, where, task_lengths, basis)
    if is_number(value):
        mean = check_number(value, where, least=1.0)
        if task_lengths is not None:
            shape = _parse_lengths(task_lengths, where, None, [])
            return shape.scaled(mean / shape.mean_tokens)
        key = where.rpartition(": ")[2]  # "input" or "output", the end of the path in slo.yaml.
        basis.append(f"{key}: a mean of {mean:g} tokens; lognormal with CV {USUAL_CV:g} taken for granted")
        return Lognormal(mean, USUAL_CV)
    if not isinstance(value, Mapping):
        raise refused_value(
            where, "expected tokens, such as 1500 or {mean: 1500, p50: 900, p95: 5000}", value
        )
    fields = check_mapping(value, where, "{mean: 1500, p50: 900, p95: 5000}")
    for key, parse in (
        ("fixed", lambda section: Fixed(section.whole_number("fixed", most=MAX_TOKENS))),
        ("lognormal", _parse_lognormal),
        ("histogram", _parse_histogram),
    ):
        if key in fields:
            return parse(Section.from_document(fields, where, (key,)))
    return _parse_percentiles(fields, where)


def _read_lengths(value: object, where: str) -> Lengths:
    """Lengths for `parse_agents`, which has no task and reports no assumptions."""
    return _parse_lengths(value, where, None, [])


def _parse_lognormal(section: Section) -> Lognormal:
    """Reads `{lognormal: {mean: 1500, cv: 1}}`, where the mean is in tokens."""
    section = section.subsection("lognormal", ("mean", "cv"))
    return Lognormal(section.number("mean", least=1.0), section.number("cv", USUAL_CV, least=0.0))


def _parse_histogram(section: Section) -> LengthHistogram:
    """`{histogram: {edges: [0, 100, 4000], counts: [7, 3]}}`: requests by length, edges in tokens."""
    section = section.subsection("histogram", ("edges", "counts"))
    edges, counts = section.numbers("edges"), section.numbers("counts")
    if len(edges) != len(counts) + 1 or not counts:
        raise InputError(
            f"{section.where}: {len(edges)} edges and {len(counts)} counts; expected one edge more than "
            "counts"
        )
    if any(high <= low for low, high in pairwise(edges)) or edges[0] < 0:
        raise section.refused("edges", "expected tokens >= 0 that rise", list(edges))
    if edges[-1] < 1 or edges[-1] > MAX_TOKENS:
        raise section.error("edges", f"expected the last to be 1 to {MAX_TOKENS}, found {edges[-1]:g}")
    if min(counts) < 0 or not sum(counts) > 0:
        raise section.refused("counts", "expected numbers >= 0, one of them above 0", list(counts))
    return LengthHistogram(edges, counts)


def _parse_percentiles(given: Mapping[str, Any], where: str) -> Lengths:
    """`{mean: 1500, p50: 900, p95: 5000, max: 32000}`: two percentiles, or one and a mean."""
    tokens_by_frac: dict[float, float] = {}
    for key in given:
        match = _PERCENTILE.fullmatch(str(key))
        if match and 0 < float(match[1]) < 100:
            tokens_by_frac[float(match[1]) / 100] = check_number(given[key], f"{where}: {key}", least=1.0)
        elif key not in ("mean", "max"):
            raise InputError(
                f"{where}: unknown key {str(key)[:60]!r}; expected mean, max and percentiles such as p50 and "
                "p95, or one of fixed, lognormal, histogram"
            )
    section = Section.from_document(given, where)
    mean = section.number("mean", 0.0, least=1.0)  # 0: not given.
    most = section.number("max", 0.0, least=1.0)  # 0: not given.
    fracs = tuple(sorted(tokens_by_frac))
    tokens = tuple(tokens_by_frac[frac] for frac in fracs)
    if any(high < low for low, high in pairwise(tokens)):
        written = ", ".join(f"p{100 * frac:g}: {tokens_by_frac[frac]:g}" for frac in fracs)
        raise InputError(f"{where}: percentiles must rise, found {written}")
    if most and tokens and most < tokens[-1]:
        raise InputError(f"{where}: max: {most:g} is below p{100 * fracs[-1]:g}: {tokens[-1]:g}; raise it")
    if not fracs:
        alone = f"{', '.join(sorted(given))} alone says too little; " if given else ""
        raise InputError(f"{where}: {alone}add a percentile such as p95")
    if len(fracs) == 1 and not mean:
        raise InputError(f"{where}: one percentile alone says too little; add mean, or another percentile")
    lengths = Percentiles(fracs, tokens, mean, most)
    with errors_as(InputError, where):
        lengths.check()
    return lengths


def _parse_joint(traffic: Section) -> tuple[float, tuple[tuple[float, ...], ...]]:
    """The rank correlation of input and output, or 0 and a table of counts where one is given."""
    value, where = traffic.get("joint", 0.0), traffic.path_of("joint")
    if not isinstance(value, Mapping):
        correlation = check_number(value, where)
        if not -1 < correlation < 1:
            raise refused_value(
                where, "expected a rank correlation between -1 and 1, or {table: [[..], ..]}", value
            )
        return correlation, ()
    section = Section.from_document(value, where, ("table",))
    where = section.path_of("table")
    table = []
    for i, row in enumerate(check_rows(section.get_required("table"), where, "rows of counts", least=2)):
        counts = enumerate(check_rows(row, f"{where}[{i}]"))
        table.append([check_number(count, f"{where}[{i}][{k}]", least=0.0) for k, count in counts])
    if len({len(row) for row in table}) > 1 or len(table[0]) < 2:
        raise InputError(f"{where}: expected rows of one length, 2 or more")
    columns = zip(*table, strict=True)
    if not all(map(sum, table)) or not all(map(sum, columns)):
        raise InputError(f"{where}: a row or a column holds no request; cut lengths into fewer parts")
    return 0.0, tuple(map(tuple, table))


def _parse_drift(traffic: Section, intervals: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The drift of input and output lengths, in standard deviations, one for each interval of the curve."""
    section = traffic.subsection("drift", ("input", "output"))
    drifts = []
    for key in ("input", "output"):
        values = section.numbers(key, ())
        if values and len(values) != intervals:
            raise section.error(
                key, f"holds {len(values)} numbers, expected {intervals}, one for each interval of the rate"
            )
        if any(abs(value) > MOST_DRIFT for value in values):
            expected = f"expected numbers of standard deviations, -{MOST_DRIFT:g} to {MOST_DRIFT:g}"
            raise section.refused(key, expected, list(values))
        drifts.append(values)
    return drifts[0], drifts[1]


def _parse_burstiness(traffic: Section) -> tuple[float | None, tuple[tuple[float, float], ...]]:
    """The coefficient of variation of gaps, if given, and pairs (window [s], Fano factor of its counts)."""
    if "burstiness" not in traffic:
        return None, ()
    section = traffic.subsection("burstiness", ("cv", "fano"))
    cv = section.number("cv", None, least=0.0)
    if cv is not None and cv > MOST_CV:
        raise section.refused("cv", f"expected a coefficient of variation of 0 to {MOST_CV:g}", cv)
    where = section.path_of("fano")
    fano = {}
    for window, value in check_mapping(section.get("fano", {}), where, "{10 s: 3, 60 s: 8}").items():
        window_s = read_positive(window, "s", where)
        fano[window_s] = check_number(value, f"{where}: {window}", above=0.0)
    if cv is None and not fano:
        raise InputError(
            f"{section.where}: expected cv, fano or both; leave it out for clients that are usual"
        )
    return cv, tuple(sorted(fano.items()))


def _parse_clients(traffic: Section, tenants: int) -> Clients:
    """The clients whose requests add up to the traffic; every tenant has one client or more."""
    default = Clients()
    section = traffic.subsection("clients", ("count", "skew", "cv", "lengths"))
    count = section.whole_number("count", max(default.count, tenants), most=MOST_COUNT)
    if count < tenants:
        raise section.error("count", f"{count} clients cannot belong to {tenants} tenants; raise it")
    skew = section.number("skew", default.skew, least=0.0)
    cv = section.number("cv", default.gap_cv, least=0.0)
    if skew > MOST_SKEW or cv > MOST_CV:
        raise InputError(
            f"{section.where}: expected skew <= {MOST_SKEW:g} and cv <= {MOST_CV:g}, found {skew:g} and "
            f"{cv:g}"
        )
    return Clients(count, skew, cv, section.share("lengths", default.lengths_frac, most=MOST_SPREAD_FRAC))


def _parse_sessions(traffic: Section) -> Sessions | None:
    """How requests follow one another in conversations; None without the key: each request stands alone."""
    if "sessions" not in traffic:
        return None
    section = traffic.subsection("sessions", ("turns", "think_time", "most_tokens"))
    turns = section.number("turns", least=1.0)
    think_s = section.at_least("think_time", "s")
    default = Sessions(turns, think_s)
    most_tokens = section.whole_number("most_tokens", default.most_tokens, most=MAX_TOKENS)
    return replace(default, most_tokens=most_tokens)


def _parse_prefixes(traffic: Section) -> Prefixes | None:
    """The prefixes that prompts begin with, such as system prompts; None: prompts share nothing."""
    if "prefixes" not in traffic:
        return None
    section = traffic.subsection("prefixes", ("shared", "count", "skew"))
    shared = section.whole_number("shared", most=MAX_TOKENS)
    count = section.whole_number("count", 1, most=MOST_COUNT)
    return Prefixes(shared, count, section.number("skew", 0.0, least=0.0))


# -- the description as a document --------------------------------------------------------------------------


def description_document(description: Description) -> dict[str, Any]:
    """What `parse_description` reads as this description: rates include growth, defaults are left out."""
    if description.by_tenant:
        factor, tenants = description.growth, {}
        for name, each in description.by_tenant:
            tenant = description_document(each.at_rate(each.mean_rps * factor))
            tenants[name] = {key: value for key, value in tenant.items() if key in TENANT_KEYS}
        return {"duration": duration_text(description.duration_s), "tenants": tenants}
    curve = [_plain_number(rate * description.growth) for rate in description.rate_rps]
    rate: Any = {"curve": curve, "every": duration_text(description.every_s)} if len(curve) > 1 else curve[0]
    load: dict[str, Any] = {"rate": rate}
    if description.agents is not None:
        # `or 1` is for mypy: `agent_count` is a number where there are agents.
        agents = replace(description.agents, count=description.agent_count or 1)
        load = {"agents": agents_document(agents, _lengths_document)}
    document: dict[str, Any] = {
        **load,
        "duration": duration_text(description.duration_s),
        "input": _lengths_document(description.input),
        "output": _lengths_document(description.output),
    }
    if description.joint_table:
        document["joint"] = {
            "table": [[_plain_number(count) for count in row] for row in description.joint_table]
        }
    elif description.joint:
        document["joint"] = _plain_number(description.joint)
    drift = dict(zip(("input", "output"), map(list, description.drift), strict=True))
    if any(drift.values()):
        document["drift"] = {key: values for key, values in drift.items() if values}
    if description.gap_cv is not None or description.fano:
        cv = {} if description.gap_cv is None else {"cv": _plain_number(description.gap_cv)}
        fano = {duration_text(window_s): _plain_number(value) for window_s, value in description.fano}
        document["burstiness"] = cv | ({"fano": fano} if fano else {})
    clients = description.clients
    if clients != Clients():
        document["clients"] = {
            "count": clients.count,
            "skew": _plain_number(clients.skew),
            "cv": _plain_number(clients.gap_cv),
            "lengths": _plain_number(clients.lengths_frac),
        }
    if (sessions := description.sessions) is not None:
        document["sessions"] = {
            "turns": _plain_number(sessions.turns),
            "think_time": duration_text(sessions.think_s),
            "most_tokens": sessions.most_tokens,
        }
    if (prefixes := description.prefixes) is not None:
        document["prefixes"] = {
            "shared": prefixes.tokens,
            "count": prefixes.count,
            "skew": _plain_number(prefixes.skew),
        }
    return document | ({"tenants": description.tenants} if description.tenants > 1 else {})


def _lengths_document(lengths: Lengths) -> dict[str, Any]:
    """The value of `input` or `output` that `_parse_lengths` reads as this distribution."""
    if isinstance(lengths, Fixed):
        return {"fixed": lengths.tokens}
    if isinstance(lengths, Lognormal):
        return {"lognormal": {"mean": _plain_number(lengths.mean_tokens), "cv": _plain_number(lengths.cv)}}
    if isinstance(lengths, LengthHistogram):
        return {
            "histogram": {
                "edges": [_plain_number(edge) for edge in lengths.edges_tokens],
                "counts": [_plain_number(count) for count in lengths.counts],
            }
        }
    mean = {"mean": _plain_number(lengths.given_mean_tokens)} if lengths.given_mean_tokens else {}
    most = {"max": _plain_number(lengths.most_tokens)} if lengths.most_tokens else {}
    pairs = zip(lengths.fracs, lengths.tokens, strict=True)
    return mean | {f"p{100 * frac:.10g}": _plain_number(tokens) for frac, tokens in pairs} | most


def _plain_number(value: float) -> int | float:
    """The number, as an int where it is whole: 30 and not 30.0 is what a user would write."""
    return int(value) if float(value).is_integer() else float(value)
