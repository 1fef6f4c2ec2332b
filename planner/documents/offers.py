"""What providers ask for a GPU: `prices` of a row of catalogs/gpus.yaml, and prices.yaml of a catalog.

    h100-80g:
      - {provider: verda, term: on-demand, price: 2.29 usd/h, date: 2025-12, source: ...}
      - {provider: verda, term: spot, price: 0.80 usd/h, date: 2025-12, source: ...}

prices.yaml has these lists by GPU; `plan catalog prices` writes it. An offer in prices.yaml takes the place
of the one in the GPU's row from the same provider and for the same term.
"""

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from planner.errors import InputError
from planner.files.document_values import Section, refused_value
from planner.units import show_exactly

Term = Literal["on-demand", "reserved-1y", "reserved-3y", "spot"]
KEYS = ("provider", "term", "price", "date", "source")
OLD_DAYS = 180  # Reports call a price old if it was listed more days ago than this; set by hand.
# A year, a month or a day, such as "2026", "2026-11" and "2026-11-21".
_DATE = re.compile(r"(\d{4})(?:-(\d\d))?(?:-(\d\d))?")


@dataclass(frozen=True, slots=True)
class ProviderOffer:
    """The price of one GPU at a provider for one term, listed in `date`: a day, a month or a year."""

    provider: str
    term: Term
    usd_per_h: float
    date: str
    source: str


def parse_offers(written: Any, where: str) -> tuple[ProviderOffer, ...]:
    """The offers of a list in prices.yaml or a GPU's row; an offer without a term is on demand. Raises
    InputError, which begins with `where`, for anything else, and for two offers of one provider and term.
    """
    if not isinstance(written, list):
        raise refused_value(where, "expected a list of provider, term, price, date and source", written)
    offers: dict[tuple[str, str], ProviderOffer] = {}
    for index, row in enumerate(written):
        section = Section.from_document(row, f"{where}[{index}]", KEYS)
        offer = ProviderOffer(
            provider=section.plain_text("provider"),
            term=cast(Term, section.one_of("term", get_args(Term), "on-demand")),
            usd_per_h=section.quantity("price", "usd_per_h"),
            date=section.plain_text("date"),
            source=section.plain_text("source"),
        )
        if first_day(offer.date) is None:
            raise section.refused("date", "expected a date such as 2026-11-21, 2026-11 or 2026", offer.date)
        if (key := (offer.provider.lower(), offer.term)) in offers:
            raise InputError(f"{section.where}: {offer.provider} {offer.term} is given twice; keep one")
        offers[key] = offer
    return tuple(offers.values())


def merge_offers(
    overrides: Sequence[ProviderOffer], defaults: Sequence[ProviderOffer]
) -> tuple[ProviderOffer, ...]:
    """`overrides` (of prices.yaml), then the `defaults` (of the GPU's row) of other providers and terms."""
    replaced = {(offer.provider.lower(), offer.term) for offer in overrides}
    return (*overrides, *(each for each in defaults if (each.provider.lower(), each.term) not in replaced))


def offer_of(offers: Iterable[ProviderOffer], provider: str, term: str) -> ProviderOffer | None:
    """The offer of a provider, in capitals or not, for a term; None if there is none."""
    return next(
        (each for each in offers if each.provider.lower() == provider.lower() and each.term == term), None
    )


def offers_document(offers: Mapping[str, Sequence[ProviderOffer]]) -> dict[str, list[dict[str, Any]]]:
    """The content of prices.yaml: by GPU, what `parse_offers` reads."""
    return {
        gpu: [
            {
                "provider": offer.provider,
                "term": offer.term,
                "price": show_exactly(offer.usd_per_h, "usd/h"),
                "date": offer.date,
                "source": offer.source,
            }
            for offer in gpu_offers
        ]
        for gpu, gpu_offers in offers.items()
    }


def offers_of_others(
    written: Mapping[str, Any], provider: str, where: str
) -> dict[str, tuple[ProviderOffer, ...]]:
    """The offers by GPU in the content of a prices.yaml, without those of `provider`. Raises InputError."""
    by_gpu = {gpu: parse_offers(rows, f"{where}: {gpu}") for gpu, rows in written.items()}
    others_by_gpu = {
        gpu: tuple(offer for offer in offers if offer.provider.lower() != provider.lower())
        for gpu, offers in by_gpu.items()
    }
    return {gpu: others for gpu, others in others_by_gpu.items() if others}


def first_day(date: str) -> datetime.date | None:
    """The earliest day that "2026-11-21", "2026-11" or "2026" may mean; None for a text that is no date."""
    match = _DATE.fullmatch(date.strip())
    if match is None:
        return None
    try:
        # A missing month or day is the first.
        return datetime.date(int(match[1]), int(match[2] or 1), int(match[3] or 1))
    except ValueError:  # There is no such day: 2026-02-30.
        return None


def age_days(date: str, today: datetime.date) -> int | None:
    """The most days that may have passed since `date`; None for a text that is no date."""
    day = first_day(date)
    return None if day is None else (today - day).days
