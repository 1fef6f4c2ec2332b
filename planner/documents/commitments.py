"""What the same GPUs cost on demand and under a commitment of one or three years.

`fleet: prices` may hold `reserved_1y` and `reserved_3y` beside `on_demand`; else the offers of a row in
catalogs/gpus.yaml and of prices.yaml count. A plan is priced by none of them: its bill by each stands beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.documents.catalog import Catalog
from planner.documents.offers import ProviderOffer, Term, offer_of
from planner.files.document_values import Section

KEYS: Mapping[str, Term] = {"reserved_1y": "reserved-1y", "reserved_3y": "reserved-3y"}
OWN = "slo.yaml"


def parse_commitments(
    fleet: Section, gpus: Iterable[str], catalog: Catalog
) -> dict[str, dict[Term, ProviderOffer]]:
    """The offers for GPUs with a commitment: the offer of every term, on demand among them, by the name of
    the GPU's row in the catalog.

    A GPU with prices in slo.yaml has its own terms alone. Other GPUs have the terms of the provider under
    `price_of`; without a provider there, the cheapest offer of each commitment among those below the row's
    price. Raises InputError.
    """
    own = {
        catalog.gpu(str(written_name)).name: (written_name, given)
        for written_name, given in fleet.subsection("prices").values.items()
    }
    provider = fleet.subsection("price_of").get("provider") if "price_of" in fleet else None
    offers_by_gpu: dict[str, dict[Term, ProviderOffer]] = {}
    for name in gpus:
        row = name if name in own else catalog.gpus[name].base
        if row in own:
            terms = _own_terms(fleet.subsection("prices"), *own[row])
        else:
            terms = _offered_terms(
                catalog.provenance[name].offers, provider, catalog.gpus[name].price_usd_per_h
            )
        if not terms.keys() & set(KEYS.values()):
            continue
        if "on-demand" not in terms:
            listed, where = catalog.gpus[name].price_usd_per_h, catalog.provenance[name]
            terms["on-demand"] = ProviderOffer(
                "list", "on-demand", listed, where.price_date, where.price_source
            )
        offers_by_gpu[name] = terms
    return offers_by_gpu


def _own_terms(prices: Section, written_name: str, given: object) -> dict[Term, ProviderOffer]:
    if not isinstance(given, Mapping):
        return {}
    part = Section.from_document(given, prices.path_of(written_name))
    keys: dict[str, Term] = {"on_demand": "on-demand", **KEYS}
    return {
        term: ProviderOffer(OWN, term, part.at_least(key, "usd_per_h"), "", "")
        for key, term in keys.items()
        if key in part
    }


def _offered_terms(
    offers: Iterable[ProviderOffer], provider: str | None, listed_usd_per_h: float
) -> dict[Term, ProviderOffer]:
    """The terms that one provider offers. Without a `provider`, the cheapest offer of each commitment that
    costs less than the row's own price: a commitment that costs more than another provider's hour is of no
    use.
    """
    known = tuple(offers)
    if provider is not None:
        terms: tuple[Term, ...] = ("on-demand", *KEYS.values())
        return {term: offer for term in terms if (offer := offer_of(known, provider, term)) is not None}
    return {
        term: min(of_term, key=lambda offer: (offer.usd_per_h, offer.provider))
        for term in KEYS.values()
        if (
            of_term := [offer for offer in known if offer.term == term and offer.usd_per_h < listed_usd_per_h]
        )
    }
