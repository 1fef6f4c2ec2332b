"""What the same GPUs cost on demand and under a commitment of one or three years.

`fleet: prices` of slo.yaml may hold `reserved_1y` and `reserved_3y` beside `on_demand`; otherwise the offers
of a row in catalogs/gpus.yaml and of prices.yaml count. The search does not use these prices: its plan is
shown with its bill by each of them.
"""

from collections.abc import Iterable, Mapping

from planner.documents.catalog import Catalog
from planner.documents.gpu_payment import values_by_gpu
from planner.documents.offers import ProviderOffer, Term, offer_of
from planner.files.document_values import Section

# The commitments: their keys in slo.yaml, and the terms of offers.
KEYS: Mapping[str, Term] = {"reserved_1y": "reserved-1y", "reserved_3y": "reserved-3y"}
IN_SLO = "slo.yaml"  # In place of a provider, for prices that the user gave.


def parse_commitments(
    fleet: Section, gpus: Iterable[str], catalog: Catalog
) -> dict[str, dict[Term, ProviderOffer]]:
    """The offer of every term, on demand among them, by the name of the GPU's row in the catalog. GPUs for
    which no commitment is offered are left out.

    `fleet` is that section of slo.yaml. A GPU with prices there has the terms of these prices alone. Other
    GPUs have the terms of the provider under `price_of`; without a provider there, the cheapest offer of each
    commitment among those below the row's price. Raises InputError for prices that cannot be read.
    """
    prices_in_slo = {name: (value, where) for name, value, where in values_by_gpu(fleet, "prices", catalog)}
    provider = fleet.subsection("price_of").plain_text("provider") if "price_of" in fleet else None
    offers_by_gpu: dict[str, dict[Term, ProviderOffer]] = {}
    for name in gpus:
        # A GPU with a power cap that slo.yaml does not price is paid as the same GPU without the cap.
        row = name if name in prices_in_slo else catalog.gpus[name].base
        if row in prices_in_slo:
            terms = _terms_in_slo(*prices_in_slo[row])
        else:
            terms = _offered_terms(
                catalog.provenance[name].offers, provider, catalog.gpus[name].price_usd_per_h
            )
        if not terms.keys() & set(KEYS.values()):  # No commitment is offered for this GPU.
            continue
        if "on-demand" not in terms:
            provenance = catalog.provenance[name]
            terms["on-demand"] = ProviderOffer(
                provider="list",
                term="on-demand",
                usd_per_h=catalog.gpus[name].price_usd_per_h,
                date=provenance.price_date,
                source=provenance.price_source,
            )
        offers_by_gpu[name] = terms
    return offers_by_gpu


def _terms_in_slo(prices: object, where: str) -> dict[Term, ProviderOffer]:
    """The terms that slo.yaml prices for one GPU; none where it has a single price."""
    if not isinstance(prices, Mapping):
        return {}
    gpu_prices = Section.from_document(prices, where)
    keys: dict[str, Term] = {"on_demand": "on-demand", **KEYS}
    return {
        term: ProviderOffer(IN_SLO, term, gpu_prices.at_least(key, "usd_per_h"), date="", source="")
        for key, term in keys.items()
        if key in gpu_prices
    }


def _offered_terms(
    offers: Iterable[ProviderOffer], provider: str | None, listed_usd_per_h: float
) -> dict[Term, ProviderOffer]:
    """The terms that one provider offers. Without a `provider`, each commitment's cheapest offer that costs
    less than the row's own price: a commitment that costs more than another provider's hour is of no use.
    """
    all_offers = tuple(offers)
    if provider is not None:
        terms: tuple[Term, ...] = ("on-demand", *KEYS.values())
        return {term: offer for term in terms if (offer := offer_of(all_offers, provider, term)) is not None}
    terms_below_list: dict[Term, ProviderOffer] = {}
    for term in KEYS.values():
        of_term = [offer for offer in all_offers if offer.term == term]
        if below_list := [offer for offer in of_term if offer.usd_per_h < listed_usd_per_h]:
            terms_below_list[term] = min(below_list, key=lambda offer: (offer.usd_per_h, offer.provider))
    return terms_below_list
