"""How GPUs are come by: `fleet: {owned: {a100-80g: 24}, sold_as: {h100-80g: gpu}}`.

What is owned takes no new money; what is needed beyond it is rented at its price, as far as the stock goes.
The stock of `fleet: gpus` counts both. Without `gpus` any number may be rented beside the owned ones; a GPU
that `gpus` does not name is not rented at all. `sold_as` says whether a GPU is sold by whole nodes, and
overrides the catalog's column of that name.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.documents.catalog import SOLD_AS, Catalog
from planner.errors import InputError
from planner.files.document_values import Section, check_one_of, check_whole_number

MOST_OWNED = 2**20


def parse_owned(fleet: Section, catalog: Catalog) -> dict[str, int]:
    """How many of each are owned, by the row's name; raises InputError in one line."""
    owned: dict[str, int] = {}
    section = fleet.subsection("owned")
    for written_name, given in section.values.items():
        name = catalog.gpu_of_question(str(written_name), section.path_of(written_name)).name
        if name in owned:
            raise InputError(f"{section.path_of(written_name)} is {name}, which is given twice; keep one")
        owned[name] = check_whole_number(given, section.path_of(written_name), least=0)
        if owned[name] > MOST_OWNED:
            raise InputError(
                f"{section.path_of(written_name)}: found {given}, at most {MOST_OWNED} are possible here"
            )
    return {name: count for name, count in owned.items() if count}


def parse_sold_as(fleet: Section, catalog: Catalog) -> dict[str, bool]:
    """Whether whole nodes are sold, by the name of the GPU's row, for the GPUs of which slo.yaml says it.
    Raises InputError.
    """
    section = fleet.subsection("sold_as")
    sold_whole: dict[str, bool] = {}
    for written_name, given in section.values.items():
        name = catalog.gpu_of_question(str(written_name), section.path_of(written_name)).name
        if name in sold_whole:
            raise InputError(f"{section.path_of(written_name)} is {name}, which is given twice; keep one")
        sold_whole[name] = check_one_of(given, SOLD_AS, section.path_of(written_name)) == "node"
    return sold_whole


def with_owned(
    stock: Mapping[str, int | None], owned: Mapping[str, int], fleet: Section
) -> dict[str, int | None]:
    """The stock with the owned GPUs. In `stock` None means any number, and a GPU that is absent is not
    rented. Raises InputError where the stock of a GPU is less than is owned of it.
    """
    for name, count in owned.items():
        stocked = stock.get(name, count)
        if stocked is not None and stocked < count:
            raise InputError(
                f"{fleet.path_of('gpus')}: {name}: found {stocked}, and {count} are owned; gpus counts these "
                f"too: expected {count} or more, or drop {name} there to rent none"
            )
    return {**stock, **{name: stock.get(name, count) for name, count in owned.items()}}


def rentable_stock(stock: Mapping[str, int | None], owned: Mapping[str, int]) -> dict[str, int | None]:
    """GPUs of which the stock is more than is owned, so that some can be rented; the counts stay those of the
    whole stock.
    """
    return {name: count for name, count in stock.items() if count is None or count > owned.get(name, 0)}
