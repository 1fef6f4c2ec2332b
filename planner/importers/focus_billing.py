"""Prices of GPUs from a cloud's bill: an export in FOCUS, the FinOps Open Cost and Usage Specification.

    ChargeCategory,PricingCategory,ConsumedQuantity,ConsumedUnit,EffectiveCost,BillingCurrency,ProviderName,...
    Usage,Standard,24,Hours,1320.96,USD,AWS,...,"$55.04 per On Demand Linux p5.48xlarge Instance Hour"

A GPU's price is that of an hour of its instances after discounts (EffectiveCost over ConsumedQuantity),
divided by the GPUs of an instance. The instance type is looked for in all columns, because each provider
writes it into another one. Google bills cores, memory and GPUs separately, so no row has the price of an
instance: such rows are left out, and a line of the answer says so.

Sources: focus.finops.org, columns of 1.0 to 1.2; instance types: aws.amazon.com/ec2/instance-types and
learn.microsoft.com/azure/virtual-machines/sizes (2026-11).
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.documents.catalog import Catalog
from planner.documents.offers import ProviderOffer, Term, first_day
from planner.errors import InputError
from planner.files.checked_files import open_input
from planner.files.text_tables import read_text_rows
from planner.units import count_text

# A file with the columns MARKS counts as a FOCUS export. Without the other columns of NEEDED it is refused.
MARKS = ("EffectiveCost", "ChargeCategory")
NEEDED = (*MARKS, "ConsumedQuantity", "ConsumedUnit", "BillingCurrency", "PricingCategory", "ProviderName")
MOST_HEADER_BYTES = 2**16  # MARKS are looked for in this much of the first line; set by hand.
# How bills spell the hour in ConsumedUnit.
HOURS = {"hour", "hours", "hrs", "1 hour", "hour(s)"}
# The term by PricingCategory, except for "committed", whose term depends on the years of the commitment.
TERMS: Mapping[str, Term] = {"standard": "on-demand", "dynamic": "spot"}
_MOST_SHOWN_CHARS = 80  # An error shows this much of a wrong cell.
_COMMITMENT = re.compile(r"\b(?P<years>1|3|one|three)[ -]?(?:yr|year)", re.IGNORECASE)
_TERM_BY_YEARS: Mapping[str, Term] = {
    **dict.fromkeys(("1", "one"), "reserved-1y"),
    **dict.fromkeys(("3", "three"), "reserved-3y"),
}

# GPUs of an instance by its size, for families of AWS whose sizes all have the same card.
_AWS_SIZES = {
    **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1),
    **dict.fromkeys(("12xlarge", "24xlarge"), 4),
    "48xlarge": 8,
}
# The GPU of each instance type, as gpus.yaml names it, and how many an instance has.
_INSTANCES: Mapping[str, tuple[str, int]] = {
    "p4d.24xlarge": ("a100-40g", 8),
    "p4de.24xlarge": ("a100-80g", 8),
    "p5.4xlarge": ("h100-80g", 1),
    "p5.48xlarge": ("h100-80g", 8),
    "p5e.48xlarge": ("h200-141g", 8),
    "p5en.48xlarge": ("h200-141g", 8),
    "p6-b200.48xlarge": ("b200-180g", 8),
    "p6-b300.48xlarge": ("b300-288g", 8),
    "p3dn.24xlarge": ("v100-32g", 8),
    **{
        f"{family}.{size}": (gpu, gpus)
        for family, gpu in (("g5", "a10g-24g"), ("g6", "l4-24g"), ("g6e", "l40s-48g"))
        for size, gpus in _AWS_SIZES.items()
    },
    "nd96asr_v4": ("a100-40g", 8),
    "nd96amsr_a100_v4": ("a100-80g", 8),
    "nd96isr_h100_v5": ("h100-80g", 8),
    "nd96isr_h200_v5": ("h200-141g", 8),
    "nd96isr_mi300x_v5": ("mi300x-192g", 8),
    "nc40ads_h100_v5": ("h100-nvl-94g", 1),
    "nc80adis_h100_v5": ("h100-nvl-94g", 2),
}
# Azure writes "Standard_ND96isr_H100_v5" and "ND96isr H100 v5". A name with other characters next to it is
# part of a longer name: "ml.p5.48xlarge" is SageMaker's, at a price of its own.
_NAMES = "|".join(re.escape(name).replace("_", "[_ ]") for name in _INSTANCES)
_INSTANCE = re.compile(rf"(?<![\w.-])(?:standard[_ ])?({_NAMES})(?![\w-])", re.IGNORECASE)


@dataclass(slots=True)
class PaidHours:
    """What was paid for one GPU on one term, and for how many GPU hours."""

    usd: float = 0.0
    gpu_hours: float = 0.0


@dataclass(frozen=True, slots=True)
class BilledPrices:
    """The prices of a bill: offers by GPU, and a line for each kind of row that was left out."""

    offers: Mapping[str, tuple[ProviderOffer, ...]]
    left_out: tuple[str, ...]


def is_billing_export(path: Path) -> bool:
    """Whether the first line of a file has the columns of FOCUS. catalog_command.py takes any other CSV for
    one of SkyPilot's.
    """
    with open_input(path) as stream:
        header = stream.readline(MOST_HEADER_BYTES)
    return all(mark.encode() in header for mark in MARKS)


def read_billed_prices(
    path: Path,
    catalog: Catalog,
    *,
    provider: str | None,
    date: str,
    region: str | None = None,
    dated_by_bill: bool = False,
) -> BilledPrices:
    """The price that was paid for each GPU on demand, reserved and on spot.

    With `region` (RegionId or RegionName) only that region counts. The offers are named after `provider`, by
    default the bill's provider in lower case, and dated `date`; with `dated_by_bill` they are dated by the
    latest day of the bill (ChargePeriodStart), if it has days.

    Raises InputError for a bill in another currency, of several providers, or without hours of a known GPU.
    """
    paid_hours: dict[tuple[str, Term], PaidHours] = {}
    skipped = Counter[str]()  # Why rows are left out -> how many.
    providers: set[str] = set()
    days: list[str] = []
    for number, row in read_text_rows(path, NEEDED, "a bill in FOCUS 1.0 or later"):
        row_regions = (row.get("RegionId", "").strip(), row.get("RegionName", "").strip())
        if region is not None and region not in row_regions:
            continue
        if row["ChargeCategory"].strip().lower() != "usage":
            continue  # Taxes, credits, and purchases of commitments, whose hours have rows of their own.
        cells_text = _join_cells(row)
        if (instance := find_instance(cells_text)) is None:
            if "gpu" in cells_text.lower():  # All other rows are of other services and need no mention.
                skipped["names a GPU but no known type of instance"] += 1
            continue
        gpu, gpus = instance
        if gpu not in catalog.gpus:
            skipped[f"is of {gpu}, which is no row of gpus.yaml"] += 1
        elif row["ConsumedUnit"].strip().lower() not in HOURS:
            skipped[f"is counted in {row['ConsumedUnit'].strip() or 'no unit'}, not in hours"] += 1
        elif (term := _read_term(row)) is None:
            skipped["is of a commitment whose years no column says"] += 1
        else:
            where = f"{path}, line {number}"
            if (currency := row["BillingCurrency"].strip().upper()) != "USD":
                raise InputError(
                    f"{where}: BillingCurrency: expected USD, found {currency[:_MOST_SHOWN_CHARS]!r}"
                )
            providers.add(row["ProviderName"].strip().lower())
            days.append(row.get("ChargePeriodStart", "").strip()[:10])
            total = paid_hours.setdefault((gpu, term), PaidHours())
            total.usd += _parse_figure(row["EffectiveCost"], f"{where}: EffectiveCost")
            total.gpu_hours += gpus * _parse_figure(row["ConsumedQuantity"], f"{where}: ConsumedQuantity")
    if len(providers) > 1 and provider is None:
        raise InputError(
            f"{path}: is a bill of {', '.join(sorted(providers))}: export one of them, or give a name to all "
            "with --provider"
        )
    left_out = tuple(f"{count_text(count, 'row')}: {why}" for why, count in skipped.items())
    provider = provider or next(iter(providers), "") or "bill"  # The column of providers may be empty.
    billed_days = [day for day in days if first_day(day) is not None] if dated_by_bill else []
    return make_offers(
        paid_hours,
        left_out,
        path=path,
        format_name="FOCUS export",
        provider=provider,
        date=max(billed_days, default=date),
    )


def make_offers(
    paid_hours: Mapping[tuple[str, Term], PaidHours],
    left_out: tuple[str, ...],
    *,
    path: Path,
    format_name: str,
    provider: str,
    date: str,
) -> BilledPrices:
    """Offers at the mean price of the paid hours of each GPU and term; InputError if nothing was paid.

    `format_name` names the source in the offers; opencost_assets.py uses this function too. A GPU and term
    have no offer if corrections in later rows, which are negative, leave no paid hours.
    """
    paid_totals = {key: total for key, total in paid_hours.items() if total.gpu_hours > 0 and total.usd > 0}
    if not paid_totals:
        left_out_text = f" ({'; '.join(left_out)})" if left_out else ""
        raise InputError(f"{path}: holds no paid hours of a known GPU's instances{left_out_text}")
    offers: dict[str, tuple[ProviderOffer, ...]] = {}
    for (gpu, term), total in paid_totals.items():
        source = f"{format_name} {path.name}: {total.gpu_hours:.6g} GPU hours for {total.usd:.6g} USD"
        offer = ProviderOffer(provider, term, total.usd / total.gpu_hours, date, source)
        offers[gpu] = (*offers.get(gpu, ()), offer)
    return BilledPrices(offers, left_out)


def _join_cells(row: Mapping[str, str]) -> str:
    """The text of all cells of a row, in one line."""
    return " ".join(str(value) for value in row.values() if value)


def find_instance(text: str) -> tuple[str, int] | None:
    """The GPU and the number of GPUs of the instance that a text names; None if it names no known type."""
    match = _INSTANCE.search(text)
    return None if match is None else _INSTANCES[match[1].lower().replace(" ", "_")]


def _read_term(row: Mapping[str, str]) -> Term | None:
    """The term on which the hours of a row were bought; None for a commitment of unknown length."""
    category = row["PricingCategory"].strip().lower()
    if category != "committed":
        return TERMS.get(category, "on-demand")  # The category "Other" and empty cells mean no discount.
    commitment = _COMMITMENT.search(_join_cells(row))
    return None if commitment is None else _TERM_BY_YEARS[commitment["years"].lower()]


def _parse_figure(written: str, where: str) -> float:
    """A figure of a row, which may be negative: a later row corrects an earlier one."""
    try:
        value = float(written)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{where}: expected a number, found {written[:_MOST_SHOWN_CHARS]!r}")
    return value
