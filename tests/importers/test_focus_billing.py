"""Prices from a bill in FOCUS, by hand arithmetic: what was paid over the hours of the GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli import app
from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.importers.focus_billing import BilledPrices, is_billing_export, read_billed_prices

HEAD = (
    "EffectiveCost,BillingCurrency,ChargeCategory,PricingCategory,ConsumedQuantity,ConsumedUnit,ProviderName,"
    "RegionId,ChargeDescription,SkuPriceDetails\n"
)
ON_DEMAND = '1320.96,USD,Usage,Standard,24,Hours,AWS,us-east-1,"$55.04 per On Demand p5.48xlarge Hour",\n'
RESERVED = '700,USD,Usage,Committed,24,Hours,AWS,us-east-1,"p5.48xlarge, 3 Year Savings Plan",\n'
SPOT = '12,USD,Usage,Dynamic,10,Hrs,AWS,us-west-2,Spot,"{""InstanceType"": ""g6e.12xlarge""}"\n'
OTHER = "3,USD,Usage,Standard,10,GB-Mo,AWS,us-east-1,EBS gp3,\n9,USD,Tax,,,,AWS,,tax on p5.48xlarge,\n"
AZURE = "98.32,USD,Usage,Standard,1,1 Hour,Microsoft,eastus,{},\n"


def billed(
    tmp_path: Path, *rows: str, provider: str | None = None, region: str | None = None
) -> BilledPrices:
    path = tmp_path / "bill.csv"
    path.write_text(HEAD + "".join(rows))
    assert is_billing_export(path)
    return read_billed_prices(path, read_catalog(), provider=provider, date="2026-11", region=region)


def prices(read: BilledPrices) -> dict[tuple[str, str], float]:
    return {(gpu, offer.term): offer.usd_per_h for gpu, each in read.offers.items() for offer in each}


def test_a_gpu_costs_what_was_paid_over_its_hours(tmp_path: Path) -> None:
    read = billed(tmp_path, ON_DEMAND, RESERVED, SPOT, OTHER)
    assert prices(read) == pytest.approx(
        {
            ("h100-80g", "on-demand"): 1320.96 / 24 / 8,
            ("h100-80g", "reserved-3y"): 700 / 24 / 8,
            ("l40s-48g", "spot"): 12 / 10 / 4,
        }
    )
    assert {offer.provider for each in read.offers.values() for offer in each} == {"aws"}
    assert prices(billed(tmp_path, ON_DEMAND, SPOT, region="us-west-2")) == {("l40s-48g", "spot"): 0.3}


@pytest.mark.parametrize("name", ["ND96isr H100 v5", "Standard_ND96isr_H100_v5 Linux", "nd96isr h100 v5/x"])
def test_azures_names_are_known_in_all_spellings(tmp_path: Path, name: str) -> None:
    assert prices(billed(tmp_path, AZURE.format(name))) == {("h100-80g", "on-demand"): pytest.approx(12.29)}


def test_a_correction_lowers_the_price(tmp_path: Path) -> None:
    credit = '-192,USD,Usage,Standard,0,Hours,AWS,us-east-1,"p5.48xlarge, corrected",\n'
    assert prices(billed(tmp_path, ON_DEMAND, credit))["h100-80g", "on-demand"] == pytest.approx(5.88)


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    google = "8,USD,Usage,Standard,24,Hours,Google,us,Nvidia H100 80GB GPU running in Americas,\n"
    unknown = "8,USD,Usage,Committed,24,Hours,AWS,us,p5.48xlarge reserved,\n"
    read = billed(tmp_path, ON_DEMAND, google, google, unknown)
    assert read.left_out == (
        "2 rows: names a GPU but no known type of instance",
        "1 row: is of a commitment whose years no column says",
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([OTHER], "no paid hours of a known GPU's instances"),
        ([ON_DEMAND.replace("USD", "EUR")], "line 2: BillingCurrency: expected USD, found 'EUR'"),
        ([ON_DEMAND.replace("1320.96", "x")], "line 2: EffectiveCost: expected a number, found 'x'"),
        ([ON_DEMAND, AZURE.format("ND96isr H100 v5")], "is a bill of aws, microsoft: export one"),
    ],
)
def test_a_bill_without_an_answer_is_refused_in_one_line(
    tmp_path: Path, rows: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        billed(tmp_path, *rows)


def test_a_bill_becomes_prices_of_a_catalog(tmp_path: Path) -> None:
    (tmp_path / "bill.csv").write_text(HEAD + ON_DEMAND)
    asked = ["catalog", "prices", str(tmp_path / "bill.csv"), "-o", str(tmp_path / "mine")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0 and "price_of: {provider: aws}" in done.output
    offers = read_catalog(tmp_path / "mine").provenance["h100-80g"].offers
    assert next(offer.usd_per_h for offer in offers if offer.provider == "aws") == pytest.approx(6.88)


def test_a_bill_without_a_date_given_is_as_old_as_its_hours(tmp_path: Path) -> None:
    """Prices of a bill of March 2025 were dated today, so no plan warned that they are old."""
    row = "98.32,USD,Usage,Standard,1,Hours,AWS,us-east-1,p5.48xlarge,,{}\n"
    header = HEAD.replace("SkuPriceDetails", "SkuPriceDetails,ChargePeriodStart")
    days = ("2025-03-01T00:00:00Z", "2025-03-31T23:00:00Z")
    (tmp_path / "bill.csv").write_text(header + "".join(map(row.format, days)))
    line = ["catalog", "prices", str(tmp_path / "bill.csv"), "--json"]
    found = json.loads(CliRunner().invoke(app, line).stdout)
    assert found["prices"]["h100-80g"][0]["date"] == "2025-03-31"
    found = json.loads(CliRunner().invoke(app, [*line, "--date", "2025-04"]).stdout)
    assert found["prices"]["h100-80g"][0]["date"] == "2025-04"
