"""What is doubtful in a question that can be read: said before any answer, and among a plan's warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.documents.catalog import Catalog
from planner.domain import Limit, Slo
from planner.units import show_s


def of_slo(slo: Slo) -> Iterator[str]:
    """Limits that say nothing, or more than is usually meant."""
    for limit in slo.limits:
        if limit.percentile_frac >= 1:
            yield (
                f"slo: {limit.name} is the slowest of all requests: one late one misses it, of however "
                "many; p99.9 lets one in 1,000 be late"
            )
        if (tighter := _tighter_above(limit, slo)) is not None:
            yield (
                f"slo: {limit.name} <= {show_s(limit.limit_s)} says nothing beside {tighter.name} <= "
                f"{show_s(tighter.limit_s)}, which is tighter and of more requests: are the two exchanged?"
            )


def _tighter_above(limit: Limit, slo: Slo) -> Limit | None:
    """A limit of the same metric on a higher percentile that is lower."""
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


def of_fleet(
    named: Mapping[str, int | None] | None,
    owned: Mapping[str, int],
    prices_usd_per_h: Mapping[str, float],
    sold_whole: Mapping[str, bool],
    catalog: Catalog,
) -> Iterator[str]:
    """`named` is the stock under `gpus`, None where every GPU may be used; prices are the user's own."""
    for name, price_usd_per_h in prices_usd_per_h.items():
        if price_usd_per_h == 0:
            yield (
                f"fleet: prices: {name} costs 0 USD/h, so any number of them is free; what you own belongs "
                "under fleet: owned"
            )
        uses = {other for other in (named or {}) if name in (other, catalog.gpus[other].base)}
        if named is not None and not uses and name not in owned:
            yield f"fleet: prices: {name} is not among gpus ({', '.join(named)}): its price changes nothing"
    for name, count in owned.items():
        if named is not None and name not in named:
            yield (
                f"fleet: owned: {name} is not among gpus ({', '.join(named)}): the {count} that you own may "
                "be used, and none is rented beside them"
            )
    for name, stock in (named or {}).items():
        node = int(catalog.gpus[name].gpus_per_node)
        rented = (stock or 0) - owned.get(name, 0)
        if sold_whole.get(name) and rented > 0 and rented % node:
            yield (
                f"fleet: gpus: {stock} {name} are no whole number of nodes of {node}, and sold_as says node: "
                f"{-(-rented // node) * node} are paid for those {rented}"
            )
