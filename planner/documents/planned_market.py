"""From plans to schedule.yaml: the fleet of each as a kind of worker, with its prices, stock and limits.

A kind of worker is the smallest whole part of a fleet, with its part of the traffic: a part alone was not
simulated, and may sustain less, as bursts weigh more on few workers.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.documents.catalog import Catalog
from planner.documents.markets import parse_market
from planner.documents.task import PlanQuestion
from planner.domain import OWNED, Gpu, market_of, row_of
from planner.errors import InputError
from planner.files.checked_files import read_yaml
from planner.solvers.reserved_schedule import Market
from planner.units import quantity

Document = dict[str, Any]
PART = (
    "what one worker sustains is the plan's traffic over the equal parts of its fleet, which alone were not "
    "simulated: measure it with `plan goodput`; GPUs in use are counted, not the idle ones of whole nodes"
)


def read_planned(path: Path, catalog: Catalog, task: PlanQuestion | None = None) -> Market | None:
    """What can be scheduled of plan.yaml, or of the folder it was written to: its fleet at its prices, within
    the stock and the limits of the task that was planned. None for a file that is no plan for one LLM.
    """
    file, plan = _read_plan_file(path)
    if not _is_plan(plan):
        return None
    traffic = plan["traffic"]
    if task is not None and task.llm != plan["llm"]:
        raise InputError(f"{file}: is a plan of {plan['llm']}, its question is of {task.llm}")
    try:
        rate_rps = traffic.get("asked_rps", traffic["rate_rps"])
        return parse_market(of_plans([(plan | {"rate_rps": rate_rps}, task)], catalog))
    except (KeyError, TypeError, AttributeError, InputError) as error:
        raise InputError(f"{file}: is no plan as `plan -o` writes it ({error})") from None


def schedule_caveat(path: Path) -> str:
    """What a schedule of a plan's fleet does not count, with what the plan pays for idle GPUs; empty for
    what is no plan.
    """
    plan = _read_plan_file(path)[1]
    if not _is_plan(plan):
        return ""
    bill = plan.get("bill", {})
    idle, by_gpu = bill.get("idle_gpus", 0), bill.get("by_gpu_usd_per_h", 0.0)
    if not idle:
        return PART
    return f"{PART}, for which the plan pays {bill['usd_per_h'] - by_gpu:.2f} USD/h more ({idle} idle GPUs)"


def _read_plan_file(path: Path) -> tuple[Path, Document]:
    file = path / "plan.yaml" if (path / "plan.yaml").is_file() else path
    return file, read_yaml(file)


def _is_plan(document: Document) -> bool:
    is_fleet = "workers" in document and "capacity" not in document
    return is_fleet and isinstance(document.get("traffic"), Mapping)


def of_plans(plans: Sequence[tuple[Mapping[str, Any], PlanQuestion | None]], catalog: Catalog) -> Document:
    """schedule.yaml of what plans run and carry, each with its task where that is known; of one plan with
    the limits of its task too. GPUs that several have are one stock, the least said.
    """
    gpus: Document = {}
    capacity: list[Document] = []
    for plan, task in plans:
        here = {name: catalog.gpu(name) for name in gpus_of_plan(plan)}
        for name, gpu in here.items():
            offer = offer_document(plan, gpu, task)
            known = gpus.setdefault(name, offer)
            if known != offer and "stock" in offer:
                known["stock"] = min(offer["stock"], known.get("stock", offer["stock"]))
        capacity.append(capacity_document(plan, here))
    task = plans[0][1] if len(plans) == 1 else None
    bounds = {} if task is None else limits_document(task)
    return {"gpus": gpus, "capacity": capacity} | ({"limits": bounds} if bounds else {})


def gpus_of_plan(plan: Mapping[str, Any]) -> list[str]:
    """The GPUs of a plan; those on spot count as the others."""
    return sorted({row_of(pool["gpu"]) for pool in plan["workers"]})


def offer_document(plan: Mapping[str, Any], gpu: Gpu, task: PlanQuestion | None) -> Document:
    """The line of `gpus` for a GPU of a plan: its price, and how many its question may use.

    The price is what the plan pays on average; where it has the GPU on spot or other ones too, that of its
    task, of the plan as it is written, or of the catalog. Owned GPUs are reserved ones at their price,
    no more than the task, or else the plan, has of them.
    """
    names = {pool["gpu"] for pool in plan["workers"]}
    usd_per_h, written = gpu.price_usd_per_h, plan.get("prices")
    if task is not None:
        usd_per_h = task.prices_usd_per_h.get(gpu.name, usd_per_h)
    elif isinstance(written, Mapping) and gpu.name in written:
        usd_per_h = quantity(written[gpu.name], "usd_per_h", where=f"prices: {gpu.name}")
    if len(gpus_of_plan(plan)) == 1 and not any(map(market_of, names)):
        usd_per_h = plan.get("bill", {}).get("by_gpu_usd_per_h", plan["cost_usd_per_h"]) / plan["gpus"]
    reserved = task is not None and (gpu.name in task.reserved or gpu.base in task.reserved)
    offer: Document = {"reserved" if reserved else "on_demand": f"{usd_per_h:.12g} usd/h"}
    owned = sum(gpus for name, gpus in _gpus_of_pools(plan) if name == gpu.name + OWNED)
    if task is not None:
        owned = task.owned.get(gpu.name, 0)
    if owned:
        usd_per_kwh = plan.get("electricity", {}).get(gpu.name + OWNED, "0 usd/kWh")
        owned_usd_per_h = gpu.power_w / 1e3 * quantity(usd_per_kwh, "usd_per_kwh", where="electricity")
        offer = {
            "on_demand": f"{usd_per_h:.12g} usd/h",
            "reserved": f"{owned_usd_per_h:.12g} usd/h",
            "owned": owned,
        }
    if task is None:
        return offer
    known = [count for count in (task.stock.get(gpu.name), task.gpu_limit) if count is not None]
    return offer | ({"stock": min(known)} if known else {})


def _gpus_of_pools(plan: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The GPU of each pool, by its name, and how many the pool has."""
    return [(pool["gpu"], pool["count"] * _gpus_of_worker(pool)) for pool in plan["workers"]]


def _gpus_of_worker(pool: Mapping[str, Any]) -> int:
    return int(pool["tp"] * pool.get("pp", 1) * pool.get("dp", 1))


def limits_document(task: PlanQuestion) -> Document:
    """What the question of a plan allows in all, as schedule.yaml has it."""
    amounts = {"power": (task.power_limit_w, "W"), "cost": (task.cost_limit_usd_per_h, "usd/h")}
    return {key: f"{amount:.12g} {unit}" for key, (amount, unit) in amounts.items() if amount is not None}


def capacity_document(plan: Mapping[str, Any], gpus: Mapping[str, Gpu]) -> Document:
    """The smallest whole part of a plan's fleet, with its part of the rate; `gpus` are its kinds.

    Of one mixed pool that is a worker; of 6 prefill and 2 decode workers it is 3 and 1, whatever their GPUs.
    """
    counts = Counter[tuple[str, str, str]]()  # Owned, rented and spot workers of one type are alike.
    sizes = dict[tuple[str, str, str], int]()
    for pool in plan["workers"]:
        settings = {key: value for key, value in pool.items() if key not in ("name", "count", "gpu")}
        kind = pool["role"], row_of(pool["gpu"]), json.dumps(settings, sort_keys=True, default=str)
        counts[kind] += pool["count"]
        sizes[kind] = _gpus_of_worker(pool)
    units = math.gcd(*counts.values())
    each = [(count // units, kind[0], sizes[kind], kind[1]) for kind, count in counts.items()]
    on: dict[str, int] = Counter()
    for count, _, size, gpu in each:
        on[gpu] += count * size
    if len(each) == 1:
        ((_, _, size, gpu),) = each
        name = f"{size} × {gpu}"
    elif len(on) == 1:
        parts = " + ".join(f"{count} {role} of {size}" for count, role, size, _ in each)
        name = f"{parts} × {each[0][3]}"
    else:
        name = " + ".join(f"{count} {role} of {size} × {gpu}" for count, role, size, gpu in each)
    one = {"gpu": each[0][3], "gpus": on[each[0][3]]}
    return {
        "llm": plan["llm"],
        "worker": name,
        **(one if len(on) == 1 else {"gpu": dict(on)}),
        "rate": f"{plan['rate_rps'] / units:.12g} req/s",
        "power": f"{sum(count * gpus[gpu].power_w for gpu, count in on.items()):g} W",
    }
