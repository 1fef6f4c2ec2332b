"""The classes of an SLO: which requests belong to each, and whether the classes fit a trace.

A `Selector` (planner/domain.py) describes a class.
"""

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
    # The names that each column may hold, and (n,) the index of each request's name among them.
    columns = {
        "tenant": (trace.tenants, trace.tenant),
        "adapter": (trace.adapters, trace.adapter),
        "llm": (trace.llms, trace.llm),
    }

    def is_one_of(column: str, class_names: Collection[str]) -> npt.NDArray[np.bool_]:
        names, name_of_request = columns[column]
        of_class = [index for index, name in enumerate(names) if name in class_names]
        return np.isin(name_of_request, of_class)

    return _matches(selector, trace.input_tokens, is_one_of)


def takes_request(
    selector: Selector, input_tokens: int, *, tenant: str = "", adapter: str = "", llm: str = ""
) -> bool:
    """Whether one request is of this class. An empty name stands for a request that names none."""
    names = {"tenant": tenant, "adapter": adapter, "llm": llm}
    return bool(_matches(selector, input_tokens, lambda column, class_names: names[column] in class_names))


def _matches(
    selector: Selector,
    input_tokens: npt.ArrayLike,
    is_one_of: Callable[[str, Collection[str]], npt.ArrayLike],
) -> npt.NDArray[np.bool_]:
    """Which requests with prompts of these lengths are of a class: those for which every key of its `match`
    in slo.yaml holds.

    `is_one_of(column, names)` says which requests have one of the names in this column. For one request the
    lengths and its answers are scalars, for a trace arrays (n,). Planning and the router of a running fleet
    both use this function, so they agree on every request's class.
    """
    matches = np.greater_equal(input_tokens, selector.least_tokens)
    if selector.most_tokens is not None:
        matches = matches & np.less_equal(input_tokens, selector.most_tokens)
    for column, class_names in (
        ("tenant", selector.tenants),
        ("adapter", selector.adapters),
        ("llm", selector.llms),
    ):
        if class_names:  # A class that names no tenants, for example, takes requests of all tenants.
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
                f"{_nearest_miss_text(selector, trace)}"
            )
        if (in_two := mask & (class_of >= 0)).any():
            earlier_class = selectors[int(class_of[in_two][0])].name
            raise InputError(
                f"{key}: takes {count_text(int(in_two.sum()), 'request')} of {trace.name} that class "
                f"{earlier_class} takes too; a request is of one class, so narrow one of the two matches "
                "(both ends of from and to count: {to: 2000} and {from: 2001})"
            )
        class_of[mask] = number
    # A line without a class applies to all requests; only without such a line can a request have none.
    if all(limit.selector is not None for limit in slo.limits) and (unclassed := class_of < 0).any():
        raise InputError(
            f"slo: classes: no class takes {int(unclassed.sum()):,} of the {len(trace):,} requests of "
            f"{trace.name}{_first_text(trace, int(np.argmax(unclassed)))}; add a class for them, or beside "
            "classes a line for all requests such as ttft: {p90: 10 s}"
        )


def check_judged_classes(slo: Slo, trace: Trace) -> None:
    """Like `check_classes`; in addition each class must have requests after the warm-up of a simulation, and
    no window of a guarantee to tenants may be longer than what is judged.
    """
    check_classes(slo, trace)
    judged_from_s, judged_until_s = measured_window(trace)
    for guarantee in slo.guarantees:
        if guarantee.window_s > judged_until_s - judged_from_s:
            raise InputError(
                f"slo: tenants: {guarantee.tenant or 'each'}: a window of {show_s(guarantee.window_s)} is "
                f"longer than the {show_s(judged_until_s - judged_from_s)} of {trace.name} that are judged, "
                "so no share would be; write a shorter window, or give a longer trace"
            )
    warm_up = show_s(judged_from_s - float(trace.arrival_s[0]))
    for selector in slo.selectors:
        mask = select_requests(selector, trace)
        # A request that waits for others may arrive after the warm-up, whatever its own time is.
        if not trace.after.size and not (mask & (trace.arrival_s >= judged_from_s)).any():
            raise InputError(
                f"slo: classes: {selector.name}: its {count_text(int(mask.sum()), 'request')} of "
                f"{trace.name} arrive in the first {warm_up}, the warm-up, which is not judged; give a "
                "longer trace or drop the class"
            )


def _check_tenants(slo: Slo, trace: Trace) -> None:
    """Raise InputError if there are guarantees, but fewer than two tenants, or a named tenant is missing."""
    if slo.guarantees and len(trace.tenants) < 2:
        named = "one tenant alone" if trace.tenants else "no tenants"
        raise InputError(
            f"slo: tenants: {trace.name} names {named}, "
            "which share nothing; give it a column tenant, or drop tenants"
        )
    for guarantee in slo.guarantees:
        # A guarantee without a tenant is to all tenants that no other guarantee names.
        if guarantee.tenant is not None and guarantee.tenant not in trace.tenants:
            raise InputError(
                f"slo: tenants: {show_value(guarantee.tenant)} has no request in {trace.name}, whose tenants "
                f"are {list_first(list(map(show_value, trace.tenants)), MOST_LISTED)}; write one of them, or "
                "each"
            )


def _nearest_miss_text(selector: Selector, trace: Trace) -> str:
    """The trace's own names or prompt lengths, for the error on a class without requests.

    The names are of the first kind (tenants, adapters, models) of which the trace has none that the class
    names. If there is no such kind, the text is about prompt lengths.
    """
    for class_names, names, kind in (
        (selector.tenants, trace.tenants, "tenants"),
        (selector.adapters, trace.adapters, "adapters"),
        (selector.llms, trace.llms, "models"),
    ):
        if class_names and not set(class_names) & set(names):
            listed = list_first(list(map(show_value, names)), MOST_LISTED)
            return f", whose {kind} are {listed}" if names else f", which names no {kind}"
    tokens = trace.input_tokens
    return f", whose prompts have {int(tokens.min()):,} to {int(tokens.max()):,} tokens; widen its match"


def _first_text(trace: Trace, index: int) -> str:
    """The prompt length and tenant of the request at `index`, as an example in an error."""
    tenant = f", of tenant {show_value(trace.tenants[int(trace.tenant[index])])}" if trace.tenants else ""
    return f" (the first: {int(trace.input_tokens[index]):,} tokens{tenant})"
