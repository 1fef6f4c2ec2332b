"""From plans to schedule.yaml: each plan's fleet as a kind of worker, with its prices, stock and limits.

A kind of worker is the smallest part into which a fleet divides evenly, with its share of the traffic: of 6
prefill and 2 decode workers it is 3 and 1. Such a part was not simulated by itself and may sustain less than
its share, because bursts weigh more on few workers.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from planner.documents.catalog import Catalog
from planner.documents.markets import parse_market
from planner.documents.task import PlanQuestion
from planner.domain import OWNED, ROUNDING, SPOT, Gpu, payment_suffix, row_of
from planner.errors import InputError
from planner.files.checked_files import read_yaml
from planner.solvers.reserved_schedule import Market
from planner.solvers.whole_nodes import node_of
from planner.units import parse_quantity

Document = dict[str, Any]
ON_SPOT = (
    "; its spot workers are scheduled on demand, at {price}: a schedule.yaml with spot: 0.25 and the spot "
    "price puts a part of the rate on spot"
)
WITHOUT_QUESTION = (
    "; a price of plan.yaml counts as one on demand, paid by the hour: with --slo, the question, a reserved "
    "price stays reserved, and its stock and limits count"
)
CAVEAT = (
    "what one worker sustains is the plan's traffic over the equal parts of its fleet, which alone were not "
    "simulated: measure it with `plan goodput`; GPUs in use are counted, not the idle ones of whole nodes"
)


def read_planned(path: Path, catalog: Catalog, task: PlanQuestion | None = None) -> Market | None:
    """The market of a plan.yaml or its folder: the plan's fleet at its prices; None for other files.

    With the planned `task` the market has the task's stock and limits. A plan of several LLMs has no market.
    """
    file = _plan_file(path)
    plan = read_yaml(file)
    if not _is_plan(plan):
        return None
    traffic = plan["traffic"]
    if task is not None and task.llm != plan["llm"]:
        raise InputError(f"{file}: is a plan of {plan['llm']}, its question is of {task.llm}")
    try:
        # The rate that the question asks for, or else that of the trace.
        rate_rps = traffic.get("requested_rps", traffic["rate_rps"])
        return parse_market(schedule_document([(plan | {"rate_rps": rate_rps}, task)], catalog))
    except (KeyError, TypeError, AttributeError, InputError) as error:
        raise InputError(f"{file}: is no plan as `plan -o` writes it ({error})") from None


def schedule_caveat(path: Path, *, has_question: bool = False) -> str:
    """A sentence on what a schedule of a plan's fleet leaves out: idle GPUs, prices of spot workers and,
    without the plan's question, reserved prices. Empty for files that are no plan.
    """
    plan = read_yaml(_plan_file(path))
    if not _is_plan(plan):
        return ""
    bill = plan.get("bill", {})
    caveats = "" if has_question else WITHOUT_QUESTION
    if any(payment_suffix(pool["gpu"]) == SPOT for pool in plan["workers"]):
        # plan.yaml prices only GPUs in use: where these are all on spot, it has no price on demand.
        price = "the question's price" if has_question else "the catalog's price, not the question's"
        caveats = ON_SPOT.format(price=price) + caveats
    idle, by_gpu = bill.get("idle_gpus", 0), bill.get("by_gpu_usd_per_h", 0.0)
    if not idle:  # The bill then counts GPUs in use alone, as a schedule does.
        return CAVEAT + caveats
    more_text = f"for which the plan pays {bill['usd_per_h'] - by_gpu:.2f} USD/h more ({idle} idle GPUs)"
    return f"{CAVEAT}, {more_text}{caveats}"


def counted_singly_caveat(market: Market, catalog: Catalog) -> str:
    """A sentence on the GPUs of a schedule.yaml that the catalog sells by whole nodes, which the workers of a
    kind do not fill. Empty if there are none.
    """
    rented = {offer.gpu for offer in market.offers if offer.on_demand_usd_per_h is not None}
    split: set[str] = set()
    for worker_type in market.worker_types:
        for name, gpus in worker_type.gpu_counts.items():
            node = node_of(catalog.gpus[name]) if name in rented and name in catalog.gpus else None
            if node is not None and gpus % node.gpus:
                split.add(f"{name} by {node.gpus}")
    if not split:
        return ""
    return (
        "GPUs in use are counted, not the idle ones of whole nodes, in which the catalog sells "
        f"{' and '.join(sorted(split))}"
    )


def is_plan_file(path: Path) -> bool:
    """Whether this is a plan for one LLM, or its folder."""
    return _is_plan(read_yaml(_plan_file(path)))


def _plan_file(path: Path) -> Path:
    """The file itself, or plan.yaml in a folder."""
    return path / "plan.yaml" if (path / "plan.yaml").is_file() else path


def _is_plan(document: Document) -> bool:
    """Whether this is a plan for one LLM, and neither a schedule.yaml (`capacity`) nor a bare fleet."""
    is_fleet = "workers" in document and "capacity" not in document
    return is_fleet and isinstance(document.get("traffic"), Mapping)


def schedule_document(
    plans: Sequence[tuple[Mapping[str, Any], PlanQuestion | None]], catalog: Catalog
) -> Document:
    """schedule.yaml for the fleets of plans, each with its task if known.

    The limits of the task are written only for a single plan, as limits of several plans cannot be added up.
    A GPU of several plans has the least of the plans' stocks, so that the schedule takes no more than any of
    the questions allowed. If owned GPUs have a line of their own (`offer_documents`), workers on such a GPU
    have two rows of `capacity`: on rented and on owned GPUs.
    """
    gpus: Document = {}
    capacity: list[Document] = []
    for plan, task in plans:
        plan_gpus = {name: catalog.gpu(name) for name in gpus_of_plan(plan)}
        plan_offers: dict[str, Document] = {}
        for gpu in plan_gpus.values():
            plan_offers |= offer_documents(plan, gpu, task)
        for name, offer in plan_offers.items():
            earlier = gpus.setdefault(name, offer)
            if earlier != offer and "stock" in offer:
                earlier["stock"] = min(offer["stock"], earlier.get("stock", offer["stock"]))
        row = capacity_document(plan, plan_gpus)
        capacity.append(row)
        if any(name.endswith(OWNED) for name in plan_offers):
            capacity.append(_on_owned(row, plan_offers))
    task = plans[0][1] if len(plans) == 1 else None
    bounds = {} if task is None else limits_document(task)
    return {"gpus": gpus, "capacity": capacity} | ({"limits": bounds} if bounds else {})


def gpus_of_plan(plan: Mapping[str, Any]) -> list[str]:
    """The names of a plan's GPUs, without suffixes such as @spot."""
    return sorted({row_of(pool["gpu"]) for pool in plan["workers"]})


def _on_owned(row: Document, offers: Mapping[str, Document]) -> Document:
    """A row of `capacity` on owned GPUs instead, as far as these have a line of their own in `offers`."""

    def owned_name(gpu: str) -> str:
        return gpu + OWNED if gpu + OWNED in offers else gpu

    gpu = row["gpu"]
    owned = {owned_name(name): n for name, n in gpu.items()} if isinstance(gpu, dict) else owned_name(gpu)
    return row | {"worker": f"{row['worker']}, owned", "gpu": owned}


def offer_documents(plan: Mapping[str, Any], gpu: Gpu, task: PlanQuestion | None) -> dict[str, Document]:
    """The lines of `gpus` for a GPU of a plan: its prices, and how many of it the schedule may use.

    If the plan has this GPU alone, none on spot or owned, the price is the plan's average per GPU; otherwise
    that of the task, of plan.yaml or of the catalog, in this order. If the task reserves the GPU, this price
    is the reserved one, and the task's price on demand stands beside it. Owned GPUs, as many as the task or
    else the plan has, are offered as reserved ones at the price of their electricity. If the GPU is also
    reserved for a price, the owned ones have a line of their own.
    """
    rented_offer = _rented_offer(plan, gpu, task)
    owned, stock = _owned_gpus(plan, gpu, task), _usable_gpus(plan, gpu, task)
    stock_line = {} if stock is None else {"stock": stock}
    if not owned:
        return {gpu.name: rented_offer | stock_line}
    owned_usd_per_h = _electricity_usd_per_h(plan, gpu, gpu.name + OWNED)
    owned_offer: Document = {"reserved": f"{owned_usd_per_h:.12g} usd/h", "owned": owned}
    if "reserved" not in rented_offer:
        return {gpu.name: rented_offer | owned_offer | stock_line}
    if stock is None:
        return {gpu.name: rented_offer, gpu.name + OWNED: owned_offer}
    if stock <= owned:  # None is rented.
        return {gpu.name: owned_offer | stock_line}
    return {gpu.name: rented_offer | {"stock": stock - owned}, gpu.name + OWNED: owned_offer}


def _rented_offer(plan: Mapping[str, Any], gpu: Gpu, task: PlanQuestion | None) -> Document:
    """The prices of a rented GPU, with electricity: on demand or, if the task reserves it, reserved."""
    electricity_usd_per_h = _electricity_usd_per_h(plan, gpu, gpu.name)
    usd_per_h = _written_usd_per_h(plan, gpu, task) + electricity_usd_per_h
    if len(gpus_of_plan(plan)) == 1 and not any(payment_suffix(pool["gpu"]) for pool in plan["workers"]):
        # The average of the bill has the electricity too.
        usd_per_h = plan.get("bill", {}).get("by_gpu_usd_per_h", plan["cost_usd_per_h"]) / plan["gpus"]
    if task is None or not (gpu.name in task.reserved or gpu.base in task.reserved):
        return {"on_demand": f"{usd_per_h:.12g} usd/h"}
    offer: Document = {"reserved": f"{usd_per_h:.12g} usd/h"}
    on_demand = task.on_demand_usd_per_h
    on_demand_usd_per_h = on_demand.get(gpu.name, on_demand.get(gpu.base))
    if on_demand_usd_per_h is not None:
        offer["on_demand"] = f"{on_demand_usd_per_h + electricity_usd_per_h:.12g} usd/h"
    return offer


def _electricity_usd_per_h(plan: Mapping[str, Any], gpu: Gpu, name: str) -> float:
    """What the electricity of a GPU costs at the price that the plan has under this name, @owned or not."""
    usd_per_kwh = plan.get("electricity", {}).get(name, "0 usd/kWh")
    return gpu.power_w / 1e3 * parse_quantity(usd_per_kwh, "usd_per_kwh", where="electricity")


def _owned_gpus(plan: Mapping[str, Any], gpu: Gpu, task: PlanQuestion | None) -> int:
    """How many of this GPU are owned: as many as the task has, or else the plan."""
    if task is not None:
        return task.owned.get(gpu.name, 0)
    owned_pools = [pool for pool in plan["workers"] if pool["gpu"] == gpu.name + OWNED]
    return sum(pool["count"] * _gpus_of_worker(pool) for pool in owned_pools)


def _usable_gpus(plan: Mapping[str, Any], gpu: Gpu, task: PlanQuestion | None) -> int | None:
    """How many of this GPU the task's stock and its limit on GPUs allow; None if they say nothing."""
    if task is None:
        return None
    worker_gpus = {_gpus_of_worker(pool) for pool in plan["workers"] if row_of(pool["gpu"]) == gpu.name}
    counts = (task.stock_of(gpu, worker_gpus), _gpus_in_limit(plan, gpu.name, task))
    return min((count for count in counts if count is not None), default=None)


def _gpus_in_limit(plan: Mapping[str, Any], gpu: str, task: PlanQuestion) -> int | None:
    """How many of this GPU are in as many equal parts of the plan's fleet as `limits: {gpus}` allows; of a
    plan with this GPU alone the limit itself.
    """
    _, pools_of_part = _equal_parts(plan)
    of_part = _gpus_of_part(pools_of_part)
    if task.gpu_limit is None or len(of_part) == 1:
        return task.gpu_limit
    return task.gpu_limit // sum(of_part.values()) * of_part[gpu]


def _written_usd_per_h(plan: Mapping[str, Any], gpu: Gpu, task: PlanQuestion | None) -> float:
    """The price of a GPU on demand, without electricity: the task's, that of plan.yaml, or the catalog's. A
    GPU with a power cap that the task does not price costs as much as without the cap.
    """
    written = plan.get("prices")
    if task is not None:
        prices = task.prices_usd_per_h
        return prices.get(gpu.name, prices.get(gpu.base, gpu.price_usd_per_h))
    if isinstance(written, Mapping) and gpu.name in written:
        return parse_quantity(written[gpu.name], "usd_per_h", where=f"prices: {gpu.name}")
    return gpu.price_usd_per_h


def _gpus_of_worker(pool: Mapping[str, Any]) -> int:
    """How many GPUs a worker of this row of plan.yaml has."""
    return int(pool["tp"] * pool.get("pp", 1) * pool.get("dp", 1))


def limits_document(task: PlanQuestion) -> Document:
    """The limits on the whole fleet in the question of a plan, as schedule.yaml writes them."""
    amounts = {"power": (task.power_limit_w, "W"), "cost": (task.cost_limit_usd_per_h, "usd/h")}
    return {key: f"{amount:.12g} {unit}" for key, (amount, unit) in amounts.items() if amount is not None}


def _round_up(rate_rps: float) -> float:
    """The rate with six significant digits, rounded up, so that the plan's workers carry the plan's rate."""
    step = 10.0 ** (math.floor(math.log10(rate_rps)) - 5)
    return math.ceil(rate_rps / step - ROUNDING) * step


class PoolOfPart(NamedTuple):
    """A pool of the smallest part into which a plan's fleet divides evenly."""

    role: str
    gpu: str
    workers: int  # In the part.
    worker_gpus: int


def _equal_parts(plan: Mapping[str, Any]) -> tuple[int, list[PoolOfPart]]:
    """Into how many equal parts a plan's fleet divides at most, and the pools of one part. Pools that differ
    in nothing but how their GPUs are paid (owned, rented, on spot) are one.
    """
    # (role, GPU, all settings as text) -> workers, and GPUs of a worker.
    workers = Counter[tuple[str, str, str]]()
    worker_gpus: dict[tuple[str, str, str], int] = {}
    for pool in plan["workers"]:
        settings = {key: value for key, value in pool.items() if key not in ("name", "count", "gpu")}
        kind = pool["role"], row_of(pool["gpu"]), json.dumps(settings, sort_keys=True, default=str)
        workers[kind] += pool["count"]
        worker_gpus[kind] = _gpus_of_worker(pool)
    parts = math.gcd(*workers.values())
    return parts, [
        PoolOfPart(kind[0], kind[1], count // parts, worker_gpus[kind]) for kind, count in workers.items()
    ]


def _gpus_of_part(pools: Iterable[PoolOfPart]) -> dict[str, int]:
    """The GPUs of these pools by name."""
    part_gpus = Counter[str]()
    for pool in pools:
        part_gpus[pool.gpu] += pool.workers * pool.worker_gpus
    return dict(part_gpus)


def capacity_document(plan: Mapping[str, Any], gpus: Mapping[str, Gpu]) -> Document:
    """A row of `capacity`: the smallest part into which a plan's fleet divides evenly, with its share of the
    rate. For a single mixed pool that is one worker. `gpus` has the plan's GPUs by name.
    """
    parts, pools_of_part = _equal_parts(plan)
    part_gpus = _gpus_of_part(pools_of_part)
    first_gpu, *other_gpus = part_gpus
    if len(pools_of_part) == 1:
        name = f"{part_gpus[first_gpu]} × {first_gpu}"
    elif not other_gpus:
        pools = " + ".join(f"{count} {role} of {size}" for role, _, count, size in pools_of_part)
        name = f"{pools} × {first_gpu}"
    else:
        name = " + ".join(f"{count} {role} of {size} × {gpu}" for role, gpu, count, size in pools_of_part)
    one_gpu = {"gpu": first_gpu, "gpus": part_gpus[first_gpu]}
    return {
        "llm": plan["llm"],
        "worker": name,
        **({"gpu": part_gpus} if other_gpus else one_gpu),
        "rate": f"{_round_up(plan['rate_rps'] / parts):.12g} req/s",
        "power": f"{sum(count * gpus[gpu].power_w for gpu, count in part_gpus.items()):.12g} W",
    }
