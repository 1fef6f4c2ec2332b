"""Prices of GPUs from OpenCost's answer to /assets: the nodes of a cluster and the cost of each.

    curl 'http://opencost:9003/assets?window=7d' > assets.json
    {"code": 200, "data": {"...": {"type": "Node", "nodeType": "p5.48xlarge", "GPUHours": 1344,
      "preemptible": 0, "totalCost": 9246.7, "labels": {"nvidia_com_gpu_product": "NVIDIA-H100-80GB-HBM3"}}}}

The price of a GPU is the cost of its nodes, with cores and memory, divided by their GPU hours. A label of
NVIDIA's GPU feature discovery tells which GPU a node has; without the label, the type of the instance does.
OpenCost names no currency, so figures count as USD. It does not mark reserved nodes, so they count as on
demand, at the price that was paid.

Sources: github.com/opencost/opencost, core/pkg/opencost/asset_json.go at 5f65333 (fields of a Node);
opencost.io/docs/integrations/api.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.documents.catalog import Catalog
from planner.documents.offers import Term
from planner.errors import InputError
from planner.files.checked_files import read_json
from planner.importers.focus_billing import BilledPrices, PaidHours, find_instance, make_offers
from planner.units import count_text

MOST_CHARACTERS = 80  # A message quotes at most this much of a text from the file.


def is_assets_answer(path: Path) -> bool:
    """Whether the file is OpenCost's, the only format of prices in JSON."""
    return path.name.removesuffix(".gz").endswith(".json")


def read_asset_prices(
    path: Path, catalog: Catalog, *, provider: str | None, date: str, region: str | None = None
) -> BilledPrices:
    """The price of each GPU on demand and on spot; with `region` only nodes with that region's label count.

    Raises InputError for another JSON file, for nodes of several providers, or if no known GPU has hours.
    """
    data = read_json(path).get("data")
    # `node_selector` is a label's value, or label=value where the label is not NVIDIA's (catalogs/gpus.yaml).
    gpu_by_label = {
        gpu.node_selector.rpartition("=")[2]: name
        for name, gpu in catalog.gpus.items()
        if gpu.node_selector and gpu.base == name  # A capped GPU has the label of its base.
    }
    paid_hours: dict[tuple[str, Term], PaidHours] = {}
    skipped = Counter[str]()  # Why nodes are left out -> how many.
    providers: set[str] = set()
    for where, node in _nodes(data, f"{path}: data"):
        labels = node.get("labels")
        labels = labels if isinstance(labels, Mapping) else {}
        # Kubernetes and OpenCost write the label with different prefixes.
        regions = [value for label, value in labels.items() if str(label).endswith("region")]
        if region is not None and region not in regions:
            continue
        hours = _read_number(node, "GPUHours", where)
        if hours <= 0:  # A node without GPUs.
            continue
        instance_type = str(node.get("nodeType", ""))[:MOST_CHARACTERS]
        gpu = next((gpu_by_label[value] for value in labels.values() if value in gpu_by_label), None)
        if gpu is None and (instance := find_instance(instance_type)) is not None:
            gpu, _ = instance
        if gpu is None or gpu not in catalog.gpus:
            skipped[
                f"has GPUs that no label and no type of instance names ({instance_type or 'no type'})"
            ] += 1
            continue
        properties = node.get("properties")
        provider_name = properties.get("provider", "") if isinstance(properties, Mapping) else ""
        providers.add(str(provider_name).strip().lower())
        term: Term = "spot" if _read_number(node, "preemptible", where) > 0 else "on-demand"
        total = paid_hours.setdefault((gpu, term), PaidHours())
        total.usd += _read_number(node, "totalCost", where)
        total.gpu_hours += hours
    if len(providers) > 1 and provider is None:
        raise InputError(
            f"{path}: has nodes of {', '.join(sorted(providers))}: name all of them with --provider"
        )
    left_out = tuple(f"{count_text(count, 'node')}: {why}" for why, count in skipped.items())
    offered_by = provider or next(iter(providers), "") or "cluster"
    return make_offers(
        paid_hours, left_out, path=path, format_name="OpenCost", provider=offered_by, date=date
    )


def _nodes(data: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The nodes of an answer, or of a list of answers for several spans, with their places in the file."""
    answers = data if isinstance(data, list) else [data]
    if not all(isinstance(each, Mapping) for each in answers):
        raise InputError(f"{where}: expected assets by name, as OpenCost answers /assets?window=7d")
    for assets in answers:
        for name, asset in assets.items():
            if isinstance(asset, Mapping) and asset.get("type") == "Node":
                yield f"{where}: {str(name)[:MOST_CHARACTERS]}", asset


def _read_number(node: Mapping[str, Any], key: str, where: str) -> float:
    """A number of a node, 0 where it is missing."""
    value = node.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{where}: {key}: expected a number, found {str(value)[:MOST_CHARACTERS]!r}")
    return float(value)
