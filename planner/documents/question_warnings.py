"""Finds values of a valid question that are probably mistakes, as sentences. They are shown before any answer
and among the warnings of a plan.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from planner.documents.catalog import Catalog
from planner.domain import BACKLOG_LIMIT_S, ROUNDING, Limit, Slo, allowed_above
from planner.models.lora import Lora
from planner.traffic.agents import NOMINAL_TOKEN_S
from planner.traffic.classes import select_requests
from planner.traffic.described import Description
from planner.traffic.trace import Trace, several_llms
from planner.units import show_s

# A price of one GPU above this share of a node's price may have been meant for the node. The dearest price of
# a GPU on demand in the catalog is about half of that.
NODE_PRICE_FRAC = 0.75


def slo_warnings(slo: Slo) -> Iterator[str]:
    """Limits that a tighter limit makes useless, and limits on the slowest of all requests."""
    for limit in slo.limits:
        if limit.percentile_frac >= 1:
            yield (
                f"slo: {limit.label} is the slowest of all requests, however many: a single late one "
                "misses it; p99.9 lets one in 1,000 be late"
            )
        tighter = _tighter_above(limit, slo)
        if tighter is not None:
            yield (
                f"slo: {limit.label} <= {show_s(limit.limit_s)} says nothing beside {tighter.label} <= "
                f"{show_s(tighter.limit_s)}, which is tighter and of more requests: are the two exchanged?"
            )


def slo_and_traffic_warnings(slo: Slo, trace: Trace) -> tuple[str, ...]:
    """What is doubtful in an SLO, by itself and together with this traffic."""
    return (*slo_warnings(slo), *traffic_warnings(slo, trace), *llm_warnings(slo, trace))


def traffic_warnings(slo: Slo, trace: Trace) -> Iterator[str]:
    """What is doubtful in an SLO on the requests that are simulated."""
    yield from percentile_warnings(slo, trace)
    yield from deadline_warnings(slo, trace)
    yield from gap_warnings(slo, trace)


def llm_warnings(slo: Slo, trace: Trace) -> Iterator[str]:
    """A trace with requests to several LLMs, all planned for one; nothing if the SLO has classes by LLM."""
    if len(trace.llms) > 1 and not any(selector.llms for selector in slo.selectors):
        yield (
            f"{trace.name}: {several_llms(trace.llm, trace.llms)}; to plan each for its own, give each an "
            f"entry under llms: in slo.yaml, with its name as model, such as model: {trace.llms[0]}"
        )


def deadline_warnings(slo: Slo, trace: Trace) -> Iterator[str]:
    """Classes whose deadline is longer than the backlog test lets their requests wait.

    Requests may wait for a tenth of the traffic, or BACKLOG_LIMIT_S if that is longer (`Slo.patience_of`), so
    in traffic of ten times the deadline they may wait until then.
    """
    for selector in slo.selectors:
        limits = [limit for limit in slo.limits if limit.selector == selector]
        if {limit.metric for limit in limits} != {"e2e"}:  # A class has a deadline if all its limits are E2E.
            continue
        longest = max(limits, key=lambda limit: limit.limit_s)
        patience_s = slo.patience_of(selector, trace.duration_s)
        if patience_s < longest.limit_s:
            yield (
                f"slo: {longest.label} <= {show_s(longest.limit_s)}: the last requests may wait about "
                f"{show_s(patience_s)} of it, the longer of a tenth of the traffic and {BACKLOG_LIMIT_S:g} "
                f"s, or a backlog could go unseen; a trace of {show_s(10 * longest.limit_s)} uses it in full"
            )


def gap_warnings(slo: Slo, trace: Trace) -> Iterator[str]:
    """Limits on gaps between tokens, if most gaps come after the last arrival, when none is judged."""
    limits = [limit for limit in slo.limits if limit.metric_row.is_of_gaps]
    # Where requests wait for answers to others, arrivals go on until the answers have come.
    if not limits or trace.after.size:
        return
    gaps = trace.output_tokens - 1
    # How many gaps of each request end before the last arrival, if each gap takes NOMINAL_TOKEN_S.
    until_last_arrival_s = trace.arrival_s[-1] - trace.arrival_s
    gaps_while_arriving = np.minimum(until_last_arrival_s / NOMINAL_TOKEN_S, gaps)
    for limit in limits:
        requests = _requests_of(limit, trace)
        if gaps_while_arriving[requests].sum() * 2 >= gaps[requests].sum():
            continue
        yield (
            f"slo: {limit.label}: gaps are judged while requests arrive, for {show_s(trace.duration_s)}, and "
            "most gaps of these answers come later; longer traffic has them judged"
        )


def percentile_warnings(slo: Slo, trace: Trace) -> Iterator[str]:
    """Limits, and an attainment, over so few values that a single late value misses them."""
    for limit in slo.limits:
        counted = limit.metric_row.counted
        values = _count_values(limit, trace)
        if values == 0:
            yield f"slo: {limit.label}: the traffic has none of its {counted}, so any fleet keeps it"
        elif values and _lets_none_be_late(limit.percentile_frac, values):
            yield _too_few(limit.label, limit.percentile_frac, values, counted)
    if slo.attainment_frac is not None and _lets_none_be_late(slo.attainment_frac, len(trace)):
        yield _too_few("attainment", slo.attainment_frac, len(trace), "requests")


def _count_values(limit: Limit, trace: Trace) -> int | None:
    """How many values of the limit's metric the traffic has; None if only a simulation can count them."""
    metric = limit.metric_row
    if metric.is_of_tasks:
        return None
    outputs = trace.output_tokens[_requests_of(limit, trace)]
    if metric.is_of_gaps:  # A request has one gap fewer than it has output tokens.
        return int((outputs - 1).sum())
    return int((outputs > 1).sum()) if metric.is_of_decodes else len(outputs)


def _requests_of(limit: Limit, trace: Trace) -> npt.NDArray[np.bool_]:
    """(n,): the requests that the limit is for."""
    return np.ones(len(trace), bool) if limit.selector is None else select_requests(limit.selector, trace)


def _lets_none_be_late(percentile_frac: float, values: int) -> bool:
    """Whether one late value misses the line, although a percentile below 100 % seems to allow some."""
    return percentile_frac < 1 and not allowed_above(percentile_frac, values)


def _too_few(line: str, percentile_frac: float, values: int, counted: str) -> str:
    """The doubt about a `line` of the SLO over so few `values`; `counted` names them: requests, gaps."""
    # The fewest values of which one may be late (`allowed_above`).
    needed = math.ceil((1 - ROUNDING) / (1 - percentile_frac))
    return (
        f"slo: {line} of {values:,} {counted} is the slowest of them: one late one misses it, and the next "
        f"{values:,} may have another; it takes {needed:,} {counted} to tell"
    )


def _tighter_above(limit: Limit, slo: Slo) -> Limit | None:
    """A tighter limit of the same metric and class, on a higher percentile; None if the SLO has none."""
    return next(
        (
            other
            for other in slo.limits
            if (other.metric, other.selector) == (limit.metric, limit.selector)
            and other.percentile_frac > limit.percentile_frac
            and other.limit_s < limit.limit_s
        ),
        None,
    )


def sought_rate_warnings(described: Description | None) -> Iterator[str]:
    """A described rate beside an objective that looks for the rate."""
    if described is None or described.is_rate_assumed:
        return
    if described.agents is None and len(described.rate_rps) == 1:
        yield (
            "traffic: rate: objective throughput looks for the most requests/s, so the plan does not keep to "
            f"{described.rate_rps[0]:g}; for the cheapest fleet at this rate write objective: cost"
        )


def lora_warnings(lora: Lora | None) -> Iterator[str]:
    """Adapters that wait for each other, because a step takes fewer (max_loras) than there are."""
    if lora is not None and lora.max_loras < lora.adapter_count:
        more = min(lora.adapter_count, 2 * lora.max_loras)
        yield (
            f"lora: a step has {lora.max_loras} of {lora.adapter_count} adapters at most, and requests of "
            f"others wait until one of these has none left; max_loras: {more} may cost less, as `plan "
            f"what-if --change lora.max_loras={more}` says"
        )


def fleet_warnings(
    named: Mapping[str, int | None] | None,
    owned: Mapping[str, int],
    prices_usd_per_h: Mapping[str, float],
    spot_usd_per_h: Mapping[str, float],
    sold_whole: Mapping[str, bool],
    catalog: Catalog,
) -> Iterator[str]:
    """Prices, owned GPUs and whole nodes of `fleet:` that do not fit the GPUs named there.

    `named` is the stock under `gpus` by GPU, where None is unlimited; without that key `named` is None, and
    every GPU may be used. `owned` counts the user's own GPUs, `prices_usd_per_h` are those of slo.yaml and
    `spot_usd_per_h` those on the spot market, `sold_whole` the GPUs that are rented by the node.
    """
    for name, price_usd_per_h in (*spot_usd_per_h.items(), *prices_usd_per_h.items()):
        if price_usd_per_h == 0:
            yield (
                f"fleet: prices: {name} costs 0 USD/h, so any number of them is free; what you own belongs "
                "under fleet: owned"
            )
        yield from _node_price_warnings(name, price_usd_per_h, catalog)
    for name, price_usd_per_h in {**spot_usd_per_h, **prices_usd_per_h}.items():
        # The price of a GPU also counts for its power-capped rows (h100-80g@350W), whose base it is.
        is_used = any(name in (other, catalog.gpus[other].base) for other in named or ())
        if named is not None and not is_used and name not in owned:
            yield f"fleet: prices: {name} is not among gpus ({', '.join(named)}): its price changes nothing"
        # A power-capped row may share whole nodes with its base, and then the higher price counts for both.
        base = catalog.gpus[catalog.gpus[name].base]
        base_usd_per_h = prices_usd_per_h.get(base.name, base.price_usd_per_h)
        is_by_node = sold_whole.get(name, sold_whole.get(base.name, base.is_sold_whole))
        is_on_demand = name in prices_usd_per_h  # Prices on the spot market are not compared.
        if is_on_demand and name != base.name and is_by_node and price_usd_per_h != base_usd_per_h:
            yield (
                f"fleet: prices: {name} costs {price_usd_per_h:g} USD/h and {base.name} {base_usd_per_h:g}: "
                "workers of both may share nodes, and a fleet with both pays the higher price for all their "
                f"nodes; sold_as: {{{base.name}: gpu}} pays each its own"
            )
    for name, count in owned.items():
        if named is not None and name not in named:
            yield (
                f"fleet: owned: {name} is not among gpus ({', '.join(named)}): the {count} that you own may "
                "be used, and none is rented beside them"
            )
    for name, stock in (named or {}).items():
        node_gpus = catalog.gpus[name].gpus_per_node
        # Where the stock is unlimited, any number of whole nodes can be rented: nothing is doubtful.
        rented = 0 if stock is None else stock - owned.get(name, 0)
        if sold_whole.get(name) and rented > 0 and rented % node_gpus:
            yield (
                f"fleet: gpus: {stock} {name} are no whole number of nodes of {node_gpus}, and sold_as says "
                f"node: {rented - rented % node_gpus or 'none'} of those {rented} can be rented"
            )


def _node_price_warnings(name: str, usd_per_h: float, catalog: Catalog) -> Iterator[str]:
    """A price of one GPU that is about what a node of them costs in the catalog."""
    gpu = catalog.gpus[name]
    node_gpus = gpu.gpus_per_node
    if node_gpus > 1 and usd_per_h >= NODE_PRICE_FRAC * node_gpus * gpu.price_usd_per_h > 0:
        yield (
            f"fleet: prices: {name} costs {usd_per_h:g} USD/h, and {gpu.price_usd_per_h:g} in the catalog: "
            f"prices are of one GPU; if a node of {node_gpus} costs that, write "
            f"{usd_per_h / node_gpus:.6g} usd/h"
        )
