"""Reads and writes an SLO of slo.yaml or a catalog: limits in seconds, or relative to an idle worker.

A line of an SLO is a metric, a percentile and a limit: `ttft: {p90: 2 s}`; planner/slo_metrics.py has the
metrics.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.domain import SERVICE_WINDOW_S, Limit, Metric, Selector, ServiceGuarantee, Slo, selectors_of
from planner.errors import InputError
from planner.files.document_values import (
    Section,
    check_mapping,
    is_number,
    read_positive,
    read_share,
    refuse_unknown,
    refused_value,
)
from planner.slo_metrics import METRICS
from planner.units import percentile_name, read_tokens, shortest_digits

# The keys of an SLO, and of a class, that are no metrics.
OTHER_KEYS = ("attainment", "every", "classes", "tenants")
CLASS_KEYS = ("match", "deadline")
GUARANTEE_KEYS = ("share_frac", "window")
EACH = "each"  # Under `tenants`: every tenant that has no guarantee of its own.
# Names that other programs have for our metrics.
OTHER_NAMES = {
    "itl": "tbt",
    "inter_token_latency": "tbt",
    "latency": "e2e",
    "time_to_first_token": "ttft",
    "throughput": "objective: throughput, the most traffic that keeps the SLO",
    "deadline": "e2e: {p99: 1 h}; a deadline is of one of its classes",
}
OF_REQUESTS = ("ttft", "tbt", "tpot", "e2e")  # The metrics that lines of a class may have.
MATCH_KEYS = ("tenant", "adapter", "model", "input_tokens")
DEADLINE_FRAC = 0.99  # A deadline of a class is a limit on E2E at this percentile.
MOST_CLASSES = 32  # Every step of an engine is counted for each class with a limit on gaps.
LEAST_PERCENTILE = 50  # A lower percentile would let most requests be late.
CLASS_NAME = r"^[A-Za-z0-9_-]{1,40}$"
_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One line of a relative SLO: at this percentile, at most `factor` times a request served alone."""

    metric: Metric
    percentile_frac: float
    factor: float


@dataclass(frozen=True, slots=True)
class SlowdownLimits:
    """An SLO relative to a request alone on one worker of `gpu` x `tp` (Splitwise Table VI)."""

    limits: tuple[Slowdown, ...]
    gpu: str
    tp: int


@dataclass(frozen=True, slots=True)
class SloPreset:
    """One row of catalogs/slos.yaml: limits in seconds, or relative ones, never both."""

    name: str
    slo: Slo  # Without limits if the preset is relative.
    slowdowns: SlowdownLimits | None
    served: str  # What the paper served; it is not enforced.
    source: str


def parse_slo(document: Any, *, where: str) -> Slo:
    """An SLO from a mapping such as {ttft: {p90: 2 s}} or {ttft_p90: 2 s}, which may also have OTHER_KEYS.

    Raises InputError for unknown keys, impossible values, and an SLO without limits.
    """
    lines = check_mapping(document, where)
    attainment_frac = lines.get("attainment")
    if attainment_frac is not None:
        attainment_frac = _read_share_above_0(attainment_frac, f"{where}: attainment")
    class_limits = parse_classes(lines["classes"], f"{where}: classes") if "classes" in lines else ()
    has_own_lines = any(key not in OTHER_KEYS for key in lines)
    # Without lines of its own and without classes an SLO is empty, which `_parse_limits` refuses.
    own_limits = tuple(_parse_limits(lines, where)) if has_own_lines or not class_limits else ()
    every = lines.get("every")
    return Slo(
        own_limits + class_limits,
        attainment_frac,
        None if every is None else read_positive(every, "s", f"{where}: every"),
        _parse_guarantees(lines["tenants"], f"{where}: tenants") if "tenants" in lines else (),
    )


def _read_share_above_0(value: object, where: str) -> float:
    """A share that must be kept, written 0.9 or "90 %"; 0 is refused, as it would demand nothing."""
    share = read_share(value, where, example="0.9")
    if not share:
        raise refused_value(where, "expected a share above 0 such as 0.9", value)
    return share


def _parse_guarantees(document: Any, where: str) -> tuple[ServiceGuarantee, ...]:
    """Shares of service by tenant: {each: {share_frac: 0.9}, gold: {share_frac: 1, window: 2 min}}."""
    guarantees = []
    for name, guarantee in check_mapping(document, where).items():
        place = f"{where}: {name}"
        section = Section.from_document(check_mapping(guarantee, place), place, GUARANTEE_KEYS)
        share = _read_share_above_0(section.get("share_frac"), f"{place}: share_frac")
        window = section.get("window")
        window_s = SERVICE_WINDOW_S if window is None else read_positive(window, "s", f"{place}: window")
        tenant = None if name == EACH else str(name)
        guarantees.append(ServiceGuarantee(tenant, share, window_s))
    if not guarantees:
        raise InputError(f"{where}: is empty; expected such as each: {{share_frac: 0.9}}")
    return tuple(guarantees)


def _parse_limits(lines: Mapping[str, Any], where: str, selector: Selector | None = None) -> Iterator[Limit]:
    """The lines of the SLO, or of the class that `selector` selects."""
    other_keys, metrics = (OTHER_KEYS, METRICS) if selector is None else (CLASS_KEYS, OF_REQUESTS)
    rows = _percentile_lines(lines, where, other_keys=other_keys, metrics=metrics)
    for metric, percentile_frac, name, value in rows:
        limit_s = read_positive(value, "s", f"{where}: {metric} {name}")
        yield Limit(metric, percentile_frac, limit_s, selector)


def parse_classes(document: Any, where: str) -> tuple[Limit, ...]:
    """The lines of all classes: {chat: {match: {tenant: chat}, ttft: {p90: 0.5 s}}, batch: ...}."""
    limits: list[Limit] = []
    for name, class_lines in check_mapping(document, where).items():
        place = f"{where}: {name}"
        if not re.fullmatch(CLASS_NAME, str(name)):
            raise refused_value(where, "expected a name of letters, digits, - and _ for a class", name)
        lines = check_mapping(class_lines, place)
        if "match" not in lines:
            raise InputError(
                f"{place}: match is missing; say which requests are {name}, as {{tenant: {name}}}"
            )
        selector = parse_selector(str(name), lines["match"], f"{place}: match")
        if stray := [key for key in lines if _split_key(str(key))[0] in METRICS.keys() - set(OF_REQUESTS)]:
            raise InputError(
                f"{place}: {stray[0]}: is of tasks, and a class is of requests; expected "
                f"{', '.join(OF_REQUESTS)} or deadline"
            )
        # Without any line and without a deadline a class is empty, which `_parse_limits` refuses.
        if any(key not in CLASS_KEYS for key in lines) or "deadline" not in lines:
            limits += _parse_limits(lines, place, selector)
        if "deadline" in lines:
            if any(limit.metric == "e2e" and limit.selector == selector for limit in limits):
                raise InputError(f"{place}: deadline: is a limit on e2e, which is given too; keep one")
            limits += _parse_deadline(lines["deadline"], f"{place}: deadline", selector)
    if not limits:
        raise InputError(f"{where}: no class found, expected such as chat: {{match: {{tenant: chat}}, ...}}")
    if (count := len(selectors_of(limits))) > MOST_CLASSES:
        raise InputError(f"{where}: found {count} classes, must be at most {MOST_CLASSES}")
    return tuple(limits)


def _parse_deadline(value: Any, where: str, selector: Selector) -> Iterator[Limit]:
    """The lines on E2E that a deadline makes: "1 h" for DEADLINE_FRAC of the requests, or {p95: 1 h}."""
    if isinstance(value, Mapping):
        for _, percentile_frac, name, limit in _percentile_lines({"e2e": value}, where):
            yield Limit("e2e", percentile_frac, read_positive(limit, "s", f"{where}: {name}"), selector)
    else:
        yield Limit("e2e", DEADLINE_FRAC, read_positive(value, "s", where), selector)


def parse_selector(name: str, document: Any, where: str) -> Selector:
    """The key `match` of a class, which selects its requests.

    For instance {tenant: chat}, {adapter: [a, b]} or {input_tokens: {to: 2000}}.
    """
    match = Section.from_document(check_mapping(document, where), where, MATCH_KEYS)
    if not any(key in match for key in MATCH_KEYS):
        raise InputError(f"{where}: is empty; expected one of {', '.join(MATCH_KEYS)}")
    tokens = match.subsection("input_tokens", ("from", "to"))
    tokens = replace(tokens, values={key: read_tokens(value) for key, value in tokens.values.items()})
    least, most = tokens.whole_number("from", 0, least=0), tokens.whole_number("to", None, least=0)
    if "input_tokens" in match and not ("from" in tokens or "to" in tokens):
        raise match.error("input_tokens", "expected from, to or both, such as {to: 2000}")
    if most is not None and most < least:
        raise match.error("input_tokens", f"to is {most}, must be at least from, {least}")
    tenants, adapters, llms = (_parse_names(match, key) for key in ("tenant", "adapter", "model"))
    return Selector(name, tenants, adapters, llms, least, most)


def _parse_names(match: Section, key: str) -> tuple[str, ...]:
    if key not in match:
        return ()
    value = match.get(key)
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str | int) and not isinstance(name, bool) for name in names):
        raise match.refused(key, "expected a name or a list of names", value)
    texts = tuple(map(str, names))
    if len(set(texts)) < len(texts):
        raise match.error(key, f"found one twice in {value!r}; name each once")
    return texts


def selector_document(selector: Selector) -> dict[str, Any]:
    """`match` as slo.yaml writes it."""
    document: dict[str, Any] = {}
    named = (("tenant", selector.tenants), ("adapter", selector.adapters), ("model", selector.llms))
    for key, names in named:
        if names:
            document[key] = names[0] if len(names) == 1 else list(names)
    tokens = {"from": selector.least_tokens} if selector.least_tokens else {}
    if selector.most_tokens is not None:
        tokens["to"] = selector.most_tokens
    if tokens:
        document["input_tokens"] = tokens
    return document or {"input_tokens": {"from": 0}}  # A selector of all requests must still match something.


def slo_document(slo: Slo) -> dict[str, Any]:
    """The SLO as slo.yaml writes it."""
    document: dict[str, Any] = {}
    for limit in slo.limits:
        section = document
        if (selector := limit.selector) is not None:
            classes = document.setdefault("classes", {})
            section = classes.setdefault(selector.name, {"match": selector_document(selector)})
        lines = section.setdefault(limit.metric, {})
        lines[percentile_name(limit.percentile_frac)] = f"{shortest_digits(limit.limit_s)} s"
    if slo.attainment_frac is not None:
        document["attainment"] = slo.attainment_frac
    if slo.every_s is not None:
        document["every"] = f"{shortest_digits(slo.every_s)} s"
    for guarantee in slo.guarantees:
        promised: dict[str, Any] = {"share_frac": guarantee.share_frac}
        if guarantee.window_s != SERVICE_WINDOW_S:
            promised["window"] = f"{shortest_digits(guarantee.window_s)} s"
        document.setdefault("tenants", {})[guarantee.tenant or EACH] = promised
    return document


def parse_slowdowns(document: Any, reference: Any, *, where: str) -> SlowdownLimits:
    """The `slowdown:` mapping of a preset ({ttft: {p50: 2}}) and its `reference: {gpu: ..., tp: ...}`.
    Metrics of tasks are refused, as nothing says how long a task takes on an idle worker.
    """
    place = f"{where}: reference"
    reference_row = Section.from_document(check_mapping(reference, place), place, ("gpu", "tp"))
    gpu = reference_row.get("gpu")
    if not isinstance(gpu, str):
        raise reference_row.refused("gpu", "expected the name of a GPU", gpu)
    limits = []
    for metric, percentile_frac, name, value in _percentile_lines(
        check_mapping(document, where), where, metrics=OF_REQUESTS
    ):
        if not is_number(value) or not 1 <= value < float("inf"):
            raise refused_value(f"{where}: {metric} {name}", "expected a factor of at least 1", value)
        limits.append(Slowdown(metric, percentile_frac, float(value)))
    return SlowdownLimits(tuple(limits), gpu, reference_row.whole_number("tp"))


def _percentile_lines(
    lines: Mapping[str, Any],
    where: str,
    *,
    other_keys: tuple[str, ...] = (),
    metrics: Collection[str] = METRICS,
) -> list[tuple[Metric, float, str, Any]]:
    """(metric, percentile as a share, percentile as written, value) of every line, in the order given.

    Keys in `other_keys` are left out; any other key must be one of `metrics`.
    """
    lines_by_percentile: dict[tuple[Metric, float], tuple[Metric, float, str, Any]] = {}
    for key, value in lines.items():
        if key in other_keys:
            continue
        metric, percentile = _split_key(str(key))
        if metric not in metrics:
            refuse_unknown({key: value}, (*metrics, *other_keys), where, OTHER_NAMES)
        if not percentile and (not isinstance(value, Mapping) or not value):
            raise refused_value(f"{where}: {key}", "expected percentiles such as {p90: 2 s}", value)
        limits = {percentile: value} if percentile else value
        for written, limit in limits.items():
            frac = _percentile_frac(written, f"{where}: {metric}")
            if (metric, frac) in lines_by_percentile:
                raise InputError(f"{where}: {metric} {written} is given twice; keep one")
            lines_by_percentile[metric, frac] = (metric, frac, str(written), limit)
    if not lines_by_percentile:
        raise InputError(f"{where}: no limit found, expected at least one such as ttft: {{p90: 2 s}}")
    return list(lines_by_percentile.values())


def _split_key(key: str) -> tuple[str, str]:
    """("ttft", "p90") of "ttft_p90"; ("ttft", "") of "ttft"."""
    metric, _, percentile = key.rpartition("_")
    return (key, "") if key in METRICS or metric not in METRICS else (metric, percentile)


def _percentile_frac(written: object, where: str) -> float:
    """The share of "p90" or "p99.9", rounded so that p99.9 is 0.999 and not 0.9990000000000001."""
    if str(written).lower() in ("mean", "avg", "average"):
        raise InputError(
            f"{where}: {written!r} is refused: a mean hides the slow requests that an SLO is about; "
            "state a percentile, such as p50 or p90"
        )
    match = _PERCENTILE.fullmatch(str(written))
    percent = float(match[1]) if match else 0.0
    if LEAST_PERCENTILE <= 100 * percent < 100:  # A share, such as 0.9, in place of a percentage.
        raise InputError(
            f"{where}: {str(written)!r} is kept where {percent:g} % of the requests keep it; write "
            f"p{100 * percent:.10g} for {100 * percent:.10g} %"
        )
    if not 0 < percent <= 100:
        raise refused_value(where, "expected a percentile from p50 to p100 such as p90", str(written))
    if percent < LEAST_PERCENTILE:
        likely = "p90" if str(written).startswith("p9") else "p50"  # In p9 a digit is missing.
        raise InputError(
            f"{where}: {str(written)!r} lets {100 - percent:g} % of the requests be late; expected "
            f"p50 or more, such as {likely}"
        )
    return float(f"{percent / 100:.12g}")
