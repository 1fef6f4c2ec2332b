"""How GPUs are paid: the keys `prices`, `sold_as` and `electricity` of fleet.yaml, by GPU, and the keys
`owned`, `sold_as` and `electricity` of slo.yaml's `fleet`.

    prices: {h100-80g: 2.99 usd/h, a100-80g@owned: 0 usd/h}                         # fleet.yaml
    sold_as: {h100-80g: node, a100-80g@owned: node}
    electricity: {a100-80g@owned: 0.156 usd/kWh}       # per kWh that the GPU draws, PUE included

    fleet: {owned: {a100-80g: 24}, sold_as: {h100-80g: gpu},                        # slo.yaml
            electricity: {price: 0.12 usd/kWh, pue: 1.3, of: owned}}

Missing prices and `sold_as` are those of the catalog; missing electricity costs nothing. A capped GPU is paid
as the same GPU without the cap, unless it is named itself.

Owned GPUs cost nothing but electricity; GPUs beyond them are rented at their price, up to the stock. The
stock under `fleet: gpus` counts owned and rented GPUs together. Without `gpus` any number may be rented; with
`gpus` only the GPUs named there are rented.

Electricity is added to the hourly price of a GPU, as if the GPU always drew its power limit, or its cap
(provisioned power). So the plan never counts less electricity than the fleet draws, and the cost of a fleet
stays a sum over its GPUs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast, get_args

from planner.documents.catalog import SOLD_AS, Catalog
from planner.domain import OWNED, Gpu, payment_suffix, row_of
from planner.errors import InputError
from planner.files.document_values import Section, check_mapping, check_one_of, check_whole_number, errors_as
from planner.units import show_exactly

KEYS = ("prices", "sold_as", "electricity")
ElectricityPayer = Literal["owned", "all"]
MOST_PUE = 10.0  # Cooling and losses take a share of what GPUs draw, not many times as much.
MOST_OWNED = 2**20  # A larger number is a typing error.
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Paid:
    """How a fleet.yaml has GPUs paid, by the name of the GPU: the price of an hour, whether they are sold by
    whole nodes, and the price of a kWh that a GPU draws. A GPU that the file does not name has no entry.
    """

    prices_usd_per_h: Mapping[str, float]
    sold_whole: Mapping[str, bool]
    energy_usd_per_kwh: Mapping[str, float]

    def paid_gpu(self, gpu: Gpu) -> Gpu:
        """The GPU with these values in place of the catalog's. A capped GPU is paid as the same GPU without
        the cap, and one on spot as one on demand, unless it is named itself.
        """
        of_payment = (gpu.name, uncapped_name(gpu))
        of_row = (*of_payment, row_of(gpu.name), gpu.base)
        # The price of a row is that of renting it, so an owned GPU does not have it.
        price_names = of_payment if payment_suffix(gpu.name) == OWNED else of_row
        return replace(
            gpu,
            price_usd_per_h=_first_of(self.prices_usd_per_h, price_names, gpu.price_usd_per_h),
            is_sold_whole=_first_of(self.sold_whole, of_row, gpu.is_sold_whole),
            energy_usd_per_kwh=_first_of(self.energy_usd_per_kwh, of_payment, gpu.energy_usd_per_kwh),
        )


def uncapped_name(gpu: Gpu) -> str:
    """The name of the same GPU without a power cap: "h100-80g@owned" of "h100-80g@350W@owned"."""
    return gpu.base + payment_suffix(gpu.name)


def _first_of(values: Mapping[str, Value], names: Iterable[str], default: Value) -> Value:
    return next((values[name] for name in names if name in values), default)


def parse_paid(file: Section, catalog: Catalog) -> Paid:
    """Parse the keys of KEYS in a fleet.yaml; raises InputError naming the file and the key."""
    return Paid(
        _read_by_gpu(file, "prices", catalog, lambda gpus, gpu: gpus.at_least(gpu, "usd_per_h")),
        _read_by_gpu(file, "sold_as", catalog, lambda gpus, gpu: gpus.one_of(gpu, SOLD_AS) == "node"),
        _read_by_gpu(file, "electricity", catalog, lambda gpus, gpu: gpus.at_least(gpu, "usd_per_kwh")),
    )


def paid_document(gpus: Iterable[Gpu]) -> dict[str, Any]:
    """The keys that `parse_paid` reads; electricity only if it is paid beside the price."""
    gpus = tuple(gpus)
    # If a GPU pays, rows that differ from it by their cap alone are written too, even if they pay nothing:
    # without an entry of their own `paid_gpu` would give them its price.
    paying = {uncapped_name(gpu) for gpu in gpus if gpu.energy_usd_per_kwh}
    electricity = {
        gpu.name: show_exactly(gpu.energy_usd_per_kwh, "usd/kWh")
        for gpu in gpus
        if uncapped_name(gpu) in paying
    }
    return {
        "prices": {gpu.name: show_exactly(gpu.price_usd_per_h, "usd/h") for gpu in gpus},
        "sold_as": {gpu.name: "node" if gpu.is_sold_whole else "gpu" for gpu in gpus},
        **({"electricity": electricity} if electricity else {}),
    }


def _read_by_gpu(
    file: Section, key: str, catalog: Catalog, read: Callable[[Section, str], Value]
) -> dict[str, Value]:
    """The value that `read` gives for each GPU under `key`, by the GPU's name in the catalog; a GPU with null
    counts as missing. Raises InputError for an unknown GPU, even with null, and for one given twice, by a
    name and an alias.
    """
    section = file.subsection(key)
    names: set[str] = set()
    values: dict[str, Value] = {}
    for written_name in check_mapping(file.get(key, {}), section.where):
        with errors_as(InputError, section.where):
            name = catalog.gpu(str(written_name)).name
            if name in names:
                raise InputError(f"{written_name} is {name}, which is given twice; keep one")
            names.add(name)
            if written_name in section:
                values[name] = read(section, written_name)
    return values


@dataclass(frozen=True, slots=True)
class Electricity:
    """The price of a kWh, and the PUE (power usage effectiveness): kWh that the site draws per kWh of a GPU.

    `of` says for which GPUs electricity is paid: the owned ones alone (rents then include it), or all.
    """

    usd_per_kwh: float
    pue: float
    of: ElectricityPayer

    @property
    def gpu_usd_per_kwh(self) -> float:
        """The cost of a kWh that a GPU draws, with the site's cooling and losses."""
        return self.usd_per_kwh * self.pue


def parse_electricity(fleet: Section) -> Electricity | None:
    """The section `electricity` of `fleet`; None where there is none. Raises InputError for
    values that make no sense, and for the price of owned GPUs where none are owned.
    """
    if "electricity" not in fleet:
        return None
    section = fleet.subsection("electricity", ("price", "pue", "of"))
    usd_per_kwh = section.positive("price", "usd_per_kwh")
    if "pue" not in section:
        raise section.error(
            "pue",
            "is missing; write pue: 1.3 where cooling and losses take 30 % more, or 1 for the GPUs alone",
        )
    pue = section.number("pue")
    if not 1 <= pue <= MOST_PUE:
        raise section.refused("pue", f"expected 1 (the GPUs alone) to {MOST_PUE:g}", section.get("pue"))
    paid_gpus = cast(ElectricityPayer, section.one_of("of", get_args(ElectricityPayer), "owned"))
    if paid_gpus == "owned" and "owned" not in fleet:
        raise InputError(
            f"{section.where}: is that of owned GPUs, and fleet: owned names none; name them, or add of: all"
        )
    return Electricity(usd_per_kwh, pue, paid_gpus)


def values_by_gpu(fleet: Section, key: str, catalog: Catalog) -> Iterator[tuple[str, object, str]]:
    """For each GPU under `key` of `fleet`: the name of its row, the value, and its path in slo.yaml. A GPU
    with null counts as missing.

    Raises InputError for a GPU that is given twice, by a name and an alias, and CatalogError for an unknown
    one, even with null: in {h100-80g: 2,99 usd/h} the comma makes "99 usd/h" a name with null.
    """
    names: set[str] = set()
    for written_name, value in check_mapping(fleet.get(key, {}), fleet.path_of(key)).items():
        where = f"{fleet.path_of(key)}: {written_name}"
        name = catalog.gpu_of_question(str(written_name), where).name
        if name in names:
            raise InputError(f"{where} is {name}, which is given twice; keep one")
        names.add(name)
        if value is not None:
            yield name, value, where


def parse_owned(fleet: Section, catalog: Catalog) -> dict[str, int]:
    """How many of each GPU are owned, by the row's name; GPUs of which none is owned are left out."""
    owned: dict[str, int] = {}
    for name, value, where in values_by_gpu(fleet, "owned", catalog):
        owned[name] = check_whole_number(value, where, least=0)
        if owned[name] > MOST_OWNED:
            raise InputError(f"{where}: found {value}, at most {MOST_OWNED} are possible here")
    return {name: count for name, count in owned.items() if count}


def parse_sold_as(fleet: Section, catalog: Catalog) -> dict[str, bool]:
    """Whether a GPU is sold by whole nodes, by the row's name, for the GPUs in `sold_as`."""
    return {
        name: check_one_of(value, SOLD_AS, where) == "node"
        for name, value, where in values_by_gpu(fleet, "sold_as", catalog)
    }


def with_owned(
    stock: Mapping[str, int | None], owned: Mapping[str, int], fleet: Section
) -> dict[str, int | None]:
    """The stock with the owned GPUs: an owned GPU that is not in `stock` gets as many as are owned. In
    `stock` None means any number, and an absent GPU is not rented.

    Raises InputError if more of a GPU is owned than its stock has.
    """
    stock_of_owned = {name: stock.get(name, count) for name, count in owned.items()}
    for name, stocked in stock_of_owned.items():
        if stocked is not None and stocked < owned[name]:
            raise fleet.error(
                "gpus",
                f"{name}: found {stocked}, and {owned[name]} are owned; gpus counts "
                f"these too: expected {owned[name]} or more, or drop {name} there to rent none",
            )
    return {**stock, **stock_of_owned}


def rentable_stock(stock: Mapping[str, int | None], owned: Mapping[str, int]) -> dict[str, int | None]:
    """The `stock` of GPUs of which more are there than owned; the counts include the owned ones."""
    return {name: count for name, count in stock.items() if count is None or count > owned.get(name, 0)}
