"""Which GPUs are owned, and which are sold by whole nodes: `owned` and `sold_as` in slo.yaml's `fleet`.

    fleet: {owned: {a100-80g: 24}, sold_as: {h100-80g: gpu}}

Owned GPUs cost nothing; more GPUs are rented at their price, as far as the stock goes. The stock of `fleet:
gpus` counts owned and rented GPUs. Without `gpus` any number may be rented beside the owned ones; a GPU that
`gpus` does not name is not rented at all. `sold_as` overrides the catalog's column of that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.documents.catalog import SOLD_AS, Catalog
from planner.errors import InputError
from planner.files.document_values import Section, check_one_of, check_whole_number

MOST_OWNED = 2**20  # A larger number is a typing error.


def values_by_gpu(section: Section, catalog: Catalog) -> Iterator[tuple[str, object, str]]:
    """For each key of the section: the name of the GPU's row, the value, and its path in slo.yaml.

    Raises InputError for a GPU that is given twice, by a name and an alias, and CatalogError for an unknown
    one.
    """
    names: set[str] = set()
    for written_name, value in section.values.items():
        where = section.path_of(written_name)
        name = catalog.gpu_of_question(str(written_name), where).name
        if name in names:
            raise InputError(f"{where} is {name}, which is given twice; keep one")
        names.add(name)
        yield name, value, where


def parse_owned(fleet: Section, catalog: Catalog) -> dict[str, int]:
    """How many of each GPU are owned, by the row's name; GPUs of which none is owned are left out."""
    owned: dict[str, int] = {}
    for name, value, where in values_by_gpu(fleet.subsection("owned"), catalog):
        owned[name] = check_whole_number(value, where, least=0)
        if owned[name] > MOST_OWNED:
            raise InputError(f"{where}: found {value}, at most {MOST_OWNED} are possible here")
    return {name: count for name, count in owned.items() if count}


def parse_sold_as(fleet: Section, catalog: Catalog) -> dict[str, bool]:
    """Whether a GPU is sold by whole nodes, by the row's name, for the GPUs in `sold_as`."""
    return {
        name: check_one_of(value, SOLD_AS, where) == "node"
        for name, value, where in values_by_gpu(fleet.subsection("sold_as"), catalog)
    }


def with_owned(
    stock: Mapping[str, int | None], owned: Mapping[str, int], fleet: Section
) -> dict[str, int | None]:
    """The stock with the owned GPUs. In `stock` None means any number, and an absent GPU is not rented.

    Raises InputError if more of a GPU is owned than its stock has.
    """
    stock_of_owned = {name: stock.get(name, count) for name, count in owned.items()}
    for name, stocked in stock_of_owned.items():
        if stocked is not None and stocked < owned[name]:
            raise InputError(
                f"{fleet.path_of('gpus')}: {name}: found {stocked}, and {owned[name]} are owned; gpus counts "
                f"these too: expected {owned[name]} or more, or drop {name} there to rent none"
            )
    return {**stock, **stock_of_owned}


def rentable_stock(stock: Mapping[str, int | None], owned: Mapping[str, int]) -> dict[str, int | None]:
    """The GPUs of which the stock has more than are owned, so that some can be rented, with whole counts."""
    return {name: count for name, count in stock.items() if count is None or count > owned.get(name, 0)}
