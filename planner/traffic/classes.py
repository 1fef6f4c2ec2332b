"""The classes of an SLO: which requests belong to each, and whether the classes fit a trace.

A `Selector` (planner/domain.py) describes a class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from planner.domain import Selector, Slo
from planner.errors import InputError
from planner.files.document_values import list_first, show_value
from planner.traffic.trace import IntArray, Trace, measured_window
from planner.units import count_text, show_s

MOST_LISTED = 5  # An error names at most this many tenants, adapters or models.


def select_requests(selector: Selector, trace: Trace) -> npt.NDArray[np.bool_]:
    """(n,): the requests of a trace that are of this class."""
    columns = {
        "tenant": (trace.tenants, trace.tenant),
        "adapter": (trace.adapters, trace.adapter),
        "llm": (trace.llms, trace.llm),
    }

    def is_one_of(column: str, wanted: Collection[str]) -> npt.NDArray[np.bool_]:
        names, numbers = columns[column]
        return np.isin(numbers, [number for number, name in enumerate(names) if name in wanted])

    return _matches(selector, trace.input_tokens, is_one_of)


def takes_request(
    selector: Selector, input_tokens: int, *, tenant: str = "", adapter: str = "", llm: str = ""
) -> bool:
    """Whether one request is of this class. An empty name stands for a request that names none."""
    names = {"tenant": tenant, "adapter": adapter, "llm": llm}
    return bool(_matches(selector, input_tokens, lambda column, wanted: names[column] in wanted))


def _matches(
    selector: Selector,
    input_tokens: npt.ArrayLike,
    is_one_of: Callable[[str, Collection[str]], npt.ArrayLike],
) -> npt.NDArray[np.bool_]:
    """Which requests with these prompts are of a class: those for which every key of its `match` holds.

    `is_one_of(column, names)` says which requests have one of the names in this column. Planning and the
    router of a running fleet both use this function, so they agree on every request's class.
    """
    matches = np.greater_equal(input_tokens, selector.least_tokens)
    if selector.most_tokens is not None:
        matches = matches & np.less_equal(input_tokens, selector.most_tokens)
    for column, class_names in (
        ("tenant", selector.tenants),
        ("adapter", selector.adapters),
        ("llm", selector.llms),
    ):
        if class_names:  # A class that names no tenants, for example, takes those of all.
            matches = matches & is_one_of(column, class_names)
    return np.asarray(matches)


def class_numbers(selectors: Sequence[Selector], trace: Trace) -> IntArray:
    """(n,): the index of the first class that takes each request, as the router chooses; -1 for none."""
    numbers = np.full(len(trace), -1, dtype=np.int64)
    # The first class is written last, so that it wins.
    for number in reversed(range(len(selectors))):
        numbers[select_requests(selectors[number], trace)] = number
    return numbers


def check_classes(slo: Slo, trace: Trace) -> None:
    """Raise InputError if the classes of an SLO do not fit a trace.

    They do not fit if a class has no request, a request is of two classes, no line of the SLO applies to a
    request, or a guarantee is to a tenant that the trace does not name.
    """
    _check_tenants(slo, trace)
    if not (selectors := slo.selectors):
        return
    class_of = np.full(len(trace), -1, dtype=np.int64)
    for number, selector in enumerate(selectors):
        mask = select_requests(selector, trace)
        key = f"slo: classes: {selector.name}"
        if not mask.any():
            raise InputError(
                f"{key}: matches none of the {len(trace):,} requests of {trace.name}"
                f"{_what_is_there(selector, trace)}"
            )
        if (in_two := mask & (class_of >= 0)).any():
            other = selectors[int(class_of[in_two][0])].name
            raise InputError(
                f"{key}: {int(in_two.sum()):,} requests of {trace.name} are of class {other} too; a "
                "request is of one class, so narrow one of the two matches (both ends of from and to count: "
                "{to: 2000} and {from: 2001})"
            )
        class_of[mask] = number
    # A line without a class applies to all requests; only without such a line can a request have none.
    if all(limit.selector is not None for limit in slo.limits) and (missed := class_of < 0).any():
        raise InputError(
            f"slo: classes: {int(missed.sum()):,} of the {len(trace):,} requests of {trace.name} are of no "
            f"class{_first_missed(trace, int(np.argmax(missed)))}; add a class for them, or beside classes a "
            "line for all requests such as ttft: {p90: 10 s}"
        )


def check_judged_classes(slo: Slo, trace: Trace) -> None:
    """As `check_classes`; in addition each class must have requests after the warm-up of a simulation."""
    check_classes(slo, trace)
    judged_from_s, _ = measured_window(trace)
    warm_up = show_s(judged_from_s - float(trace.arrival_s[0]))
    for selector in slo.selectors:
        mask = select_requests(selector, trace)
        # A request that waits for others may arrive after the warm-up, whatever its own time is.
        if not trace.after.size and not (mask & (trace.arrival_s >= judged_from_s)).any():
            raise InputError(
                f"slo: classes: {selector.name}: its {count_text(int(mask.sum()), 'request')} of "
                f"{trace.name} "
                f"arrive in the first {warm_up}, the warm-up, which is not judged; give a longer trace or "
                "drop the class"
            )


def _check_tenants(slo: Slo, trace: Trace) -> None:
    """Raise InputError for guarantees to tenants that the trace does not name."""
    if slo.guarantees and len(trace.tenants) < 2:
        raise InputError(
            f"slo: tenants: {trace.name} names {'no tenants' if not trace.tenants else 'one tenant alone'}, "
            "which share nothing; give it a column tenant, or drop tenants"
        )
    for each in slo.guarantees:
        if each.tenant is not None and each.tenant not in trace.tenants:
            raise InputError(
                f"slo: tenants: {show_value(each.tenant)} has no request in {trace.name}, whose tenants are "
                f"{list_first(list(map(show_value, trace.tenants)), MOST_LISTED)}; write one of them, or each"
            )


def _what_is_there(selector: Selector, trace: Trace) -> str:
    """The trace's own names or prompt lengths, for the error on a class without requests.

    Names are listed of the first kind (tenants, adapters, models) of which the class has only unknown ones;
    if there is no such kind, its prompt lengths must be wrong.
    """
    for wanted, names, kind in (
        (selector.tenants, trace.tenants, "tenants"),
        (selector.adapters, trace.adapters, "adapters"),
        (selector.llms, trace.llms, "models"),
    ):
        if wanted and not set(wanted) & set(names):
            listed = list_first(list(map(show_value, names)), MOST_LISTED)
            return f", whose {kind} are {listed}" if names else f", which names no {kind}"
    tokens = trace.input_tokens
    return f", whose prompts have {int(tokens.min()):,} to {int(tokens.max()):,} tokens; widen its match"


def _first_missed(trace: Trace, index: int) -> str:
    """The request at `index`, for an error on several requests of which it is the first."""
    tenant = f", of tenant {show_value(trace.tenants[int(trace.tenant[index])])}" if trace.tenants else ""
    return f" (the first: {int(trace.input_tokens[index]):,} tokens{tenant})"
