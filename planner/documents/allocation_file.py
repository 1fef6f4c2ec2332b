"""The input and the answer of `plan allocate`: buckets of requests, types of workers, and the rates that one
worker of a type sustains in each bucket (solvers/allocation.py has the formulation).

    {"buckets": [{"name": "short", "rate_rps": 12.0}, {"name": "long", "rate_rps": 0.5}],
     "types": [{"name": "a100", "cost_usd_per_h": 3.67, "stock": null, "rate_rps": [6.0, 0.4]}],
     "slice_factor": null}

Mélange's own configuration is read too (Griggs et al. 2024, arXiv:2404.14527).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from planner.errors import InputError
from planner.files.document_values import Section, check_number, refused_value
from planner.solvers.allocation import Allocation, AllocationInstance

MELANGE_KEYS = (
    *("gpu_info", "workload_distribution", "total_request_rate", "slice_factor", "availability"),
    *("bucket_index", "bucket_upper_bounds"),
)
# A rate so small that its bucket would need more workers than this is refused: whoever writes it means 0.
MOST_WORKERS = 1e6
SHARE_ROUNDING = 1e-3  # Mélange writes its shares rounded, so that their sum may be off by this.
# Mélange divides by rates, so its files have this rate, or less, for a type that cannot serve a bucket.
MELANGE_NONE_RPS = 1e-3


def parse_instance(document: Mapping[str, Any], *, where: str = "instance") -> AllocationInstance:
    """The input in a mapping, ours or Mélange's. Raises InputError, whose message begins with `where`."""
    if "gpu_info" in document:
        document = _convert_melange(document, where)
    file = Section.from_document(document, where, ("buckets", "types", "slice_factor"))
    buckets = _parse_entries(file, "buckets", ("name", "rate_rps"))
    types = _parse_entries(file, "types", ("name", "cost_usd_per_h", "stock", "rate_rps"))
    type_bucket_rps = np.array([_parse_rates(row, len(buckets)) for row in types])  # (types, buckets)
    instance = AllocationInstance(
        _parse_names(buckets),
        _parse_names(types),
        np.array([bucket.number("rate_rps", least=0.0) for bucket in buckets]),
        type_bucket_rps.T,
        np.array([row.number("cost_usd_per_h", least=0.0) for row in types]),
        tuple(row.whole_number("stock", None, least=0) for row in types),
        file.whole_number("slice_factor", None),
    )
    is_tiny = (instance.sustained_rps > 0) & (
        instance.rate_rps[:, None] > MOST_WORKERS * instance.sustained_rps
    )
    for bucket, worker_type in np.argwhere(is_tiny).tolist():  # The error names the first such pair.
        raise InputError(
            f"{where}: type {instance.types[worker_type]!r} sustains "
            f"{instance.sustained_rps[bucket, worker_type]:g} requests/s of {instance.buckets[bucket]!r}, "
            f"which would take more than {MOST_WORKERS:g} workers; write 0 if it cannot serve them"
        )
    return instance


def allocation_document(instance: AllocationInstance, allocation: Allocation) -> dict[str, Any]:
    """The answer for JSON: `counts` of the types in use, and for each bucket the `shares` of each type."""
    shares = {
        bucket: {
            name: float(share) for name, share in zip(instance.types, type_shares, strict=True) if share > 0
        }
        for bucket, type_shares in zip(instance.buckets, allocation.share, strict=True)
    }
    return {
        "status": "optimal" if allocation.is_optimal else "best found",
        "cost_usd_per_h": allocation.cost_usd_per_h,
        "bound_usd_per_h": allocation.bound_usd_per_h,
        "counts": {
            name: count for name, count in zip(instance.types, allocation.counts, strict=True) if count
        },
        "shares": {bucket: type_shares for bucket, type_shares in shares.items() if type_shares},
    }


def _parse_entries(file: Section, key: str, keys: tuple[str, ...]) -> list[Section]:
    """The entries of the list of mappings under `key`. Raises InputError for a key in them beside `keys`."""
    rows = file.get(key)
    if not isinstance(rows, list) or not rows:
        raise file.refused(key, "expected a list with at least one entry", rows)
    entries = []
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise refused_value(f"{file.path_of(key)}[{i}]", "expected an object", row)
        entries.append(Section.from_document(row, f"{file.path_of(key)}[{i}]", keys))
    return entries


def _parse_names(entries: list[Section]) -> tuple[str, ...]:
    """The names of all entries; raises InputError for a name that two of them have."""
    names: list[str] = []
    for row in entries:
        name = row.text("name")
        if name in names:
            raise row.error("name", f"{name!r} is given twice")
        names.append(name)
    return tuple(names)


def _parse_rates(row: Section, buckets: int) -> list[float]:
    """The rates of one type of worker, one for each of the `buckets`. Raises InputError."""
    rates = row.get("rate_rps")
    if not isinstance(rates, list) or len(rates) != buckets:
        raise row.refused(
            "rate_rps",
            f"expected a list of {buckets} rates, one per bucket and 0 where it cannot serve",
            rates,
        )
    return [check_number(rate, f"{row.path_of('rate_rps')}[{i}]", least=0.0) for i, rate in enumerate(rates)]


def _convert_melange(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Mélange's configuration as ours. The cells of its grid become buckets, named "0, 3" by row and column.
    Raises InputError. Keys of MELANGE_KEYS that are not used here are allowed.
    """
    config = Section.from_document(document, where, MELANGE_KEYS)
    total_rps = config.number("total_request_rate", least=0.0)
    shares = _parse_grid(config.get("workload_distribution"), config.path_of("workload_distribution"))
    share_sum = sum(shares.values())
    if abs(share_sum - 1) > SHARE_ROUNDING:
        raise config.error(
            "workload_distribution",
            f"shares of total_request_rate must sum to 1, found a sum of {share_sum:.6g}",
        )
    gpus, stock = config.get("gpu_info"), config.get("availability", {})
    if not isinstance(gpus, dict) or not isinstance(stock, dict) or set(stock) - set(gpus):
        raise InputError(
            f"{where}: gpu_info, availability: expected an object per GPU, and for some of them a count"
        )
    types = []
    for name, values in gpus.items():
        place = f"{config.path_of('gpu_info')}: {name}"
        if not isinstance(values, dict):
            raise refused_value(place, "expected an object", values)
        row = Section.from_document(values, place, ("cost", "tputs"))
        rates = _parse_grid(row.get("tputs"), row.path_of("tputs")).values()
        types.append(
            {
                "name": name,
                "cost_usd_per_h": row.get("cost"),
                "stock": stock.get(name),
                "rate_rps": [rate if rate > MELANGE_NONE_RPS else 0 for rate in rates],
            }
        )
    return {
        "buckets": [{"name": name, "rate_rps": share * total_rps} for name, share in shares.items()],
        "types": types,
        "slice_factor": config.get("slice_factor"),
    }


def _parse_grid(rows: object, where: str) -> dict[str, float]:
    """The numbers of a list of lists, by "row, column". Raises InputError for anything but numbers >= 0."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise refused_value(where, "expected a list of lists of numbers", rows)
    return {
        f"{i}, {j}": check_number(value, f"{where}[{i}][{j}]", least=0.0)
        for i, row in enumerate(rows)
        for j, value in enumerate(row)
    }
