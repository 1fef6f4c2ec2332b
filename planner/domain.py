"""The nouns every stage shares: GPU, limit, SLO. Frozen, units in the names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from planner.errors import CatalogError, InputError
from planner.units import percentile_name

Metric = Literal["ttft", "tbt", "tpot", "e2e"]
KV_BLOCK_TOKENS = 16
SPOT = "@spot"  # ends the name of a GPU that is rented on the spot market,
OWNED = "@owned"  # of one that is owned: it takes no new money
# backlog test: this share of the last requests waits no longer than the limit on TTFT, or so long
STEADY_FRAC, BACKLOG_LIMIT_S = 0.5, 60.0


def row_of(gpu: str) -> str:
    """The name of a GPU's row, "h100-80g" for "h100-80g@spot" and "h100-80g@owned"."""
    return gpu.removesuffix(SPOT).removesuffix(OWNED)


def market_of(gpu: str) -> str:
    """How a GPU of this name is come by: "@spot", "@owned", or nothing where it is rented."""
    return gpu[len(row_of(gpu)) :]


@dataclass(frozen=True, slots=True)
class AllReduce:
    """What adding up over `gpus` GPUs of a node takes: `latency_s` and so many bytes of the sum a second."""

    gpus: int
    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.gpus < 2 or not self.latency_s >= 0 or not self.bytes_per_s > 0:
            raise CatalogError(
                f"all_reduce of {self.gpus} GPUs: expected two or more, a latency and a bandwidth above 0"
            )


@dataclass(frozen=True, slots=True)
class Gpu:
    """An accelerator we can rent: one row of catalogs/gpus.yaml.

    `dense_flops_per_s` is 16-bit dense, `fp8_flops_per_s` of 8 bits, `fp4_flops_per_s` of 4 (None: no such
    units, or nothing is known of them); `link_bytes_per_s` is what one GPU sends to its neighbours in the
    node, one direction. A power-capped variant is a row of its own ("h100-80g@350W"): `power_w` is the cap,
    `board_w` what the board may draw without it, and the slowdowns (>= 1) multiply the compute-bound and the
    memory-bound part of a step. `unchecked` says why nobody can tell how far its step times are from the
    truth; a plan takes such a GPU only where that is asked for.
    """

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    dense_flops_per_s: float
    link: str
    link_bytes_per_s: float
    power_w: float
    gpus_per_node: int
    price_usd_per_h: float
    node_selector: str
    base: str  # the uncapped row this one derives from; its own name if it is uncapped
    prefill_slowdown: float = 1.0
    decode_slowdown: float = 1.0
    uncapped_w: float | None = None  # power_w of the base, for a capped row
    fp8_flops_per_s: float | None = None
    all_reduce: tuple[AllReduce, ...] = ()  # measured; for other TPs the link's bandwidth counts
    mixed_kv_bytes_per_s: float | None = None  # of decodes' KV beside prefills, read once per query head
    fp4_flops_per_s: float | None = None
    unchecked: str = ""
    is_sold_whole: bool = False  # by the node of `gpus_per_node`, not by the GPU
    energy_usd_per_kwh: float = 0.0  # of what it draws, with the site's share; 0 where its price has that

    def __post_init__(self) -> None:
        for quantity in (
            "memory_bytes",
            "bandwidth_bytes_per_s",
            "dense_flops_per_s",
            "link_bytes_per_s",
            "power_w",
            "gpus_per_node",
        ):
            if not getattr(self, quantity) > 0:
                raise CatalogError(f"GPU {self.name}: {quantity} is {getattr(self, quantity)}, must be > 0")
        if not self.price_usd_per_h >= 0:
            raise CatalogError(f"GPU {self.name}: price_usd_per_h is {self.price_usd_per_h}, must be >= 0")
        if not self.energy_usd_per_kwh >= 0:
            raise CatalogError(
                f"GPU {self.name}: energy_usd_per_kwh is {self.energy_usd_per_kwh}, must be >= 0"
            )
        if min(self.prefill_slowdown, self.decode_slowdown) < 1:
            raise CatalogError(f"GPU {self.name}: a slowdown is below 1")
        for quantity in ("fp8_flops_per_s", "fp4_flops_per_s", "mixed_kv_bytes_per_s"):
            if (rate := getattr(self, quantity)) is not None and not rate > 0:
                raise CatalogError(f"GPU {self.name}: {quantity} is {rate}, must be > 0")

    @property
    def electricity_usd_per_h(self) -> float:
        """At provisioned power, all the time."""
        return self.power_w / 1e3 * self.energy_usd_per_kwh

    @property
    def usd_per_h(self) -> float:
        """Its price and its electricity."""
        return self.price_usd_per_h + self.electricity_usd_per_h

    @property
    def board_w(self) -> float:
        """What the vendor lets it draw, capped here or not (TDP)."""
        return self.power_w if self.uncapped_w is None else self.uncapped_w


@dataclass(frozen=True, slots=True)
class Limit:
    """One line of an SLO: this percentile of this metric stays at or below `limit_s`."""

    metric: Metric
    percentile_frac: float
    limit_s: float

    @property
    def name(self) -> str:
        """For instance 'ttft p90'."""
        return f"{self.metric} {percentile_name(self.percentile_frac)}"


@dataclass(frozen=True, slots=True)
class Slo:
    """What is promised. Every limit must hold; `attainment_frac` of requests keep all of them at once.

    With `every_s` both must be so in every window of that length (traffic.trace.slo_windows_s), and so over
    the whole: n - ceil(p n) late requests may be no fewer than the sum of what its parts may have.
    """

    limits: tuple[Limit, ...]
    attainment_frac: float | None = None
    every_s: float | None = None

    @property
    def patience_s(self) -> float:
        """How long the last requests may wait in the backlog test: the loosest limit on TTFT."""
        return max(
            (limit.limit_s for limit in self.limits if limit.metric == "ttft"), default=BACKLOG_LIMIT_S
        )


def unknown_metric(limit: Limit, who: str) -> InputError:
    """The error to raise where a part of the planner has no case for a metric, before it answers for it."""
    return InputError(f"slo: {limit.metric}: {who} does not know this metric; take it out of the SLO")


def allowed_above(percentile_frac: float, values: int) -> int:
    """How many of `values` may lie above their percentile (nearest rank)."""
    return values - math.ceil(percentile_frac * values - 1e-9)


def nearest_rank(percentile_frac: float, values: int) -> int:
    """Which of so many values is their percentile, the smallest one being 1."""
    return max(values - allowed_above(percentile_frac, values), 1)


@dataclass(frozen=True, slots=True)
class FleetLimit:
    """What all workers of a fleet may take together; `gpu` is of a stock alone."""

    of: Literal["stock", "power", "cost", "gpus"]
    gpu: str = ""

    @property
    def name(self) -> str:
        """In files and messages, for instance 'stock of h100-80g'."""
        return f"stock of {self.gpu}" if self.of == "stock" else "GPUs" if self.of == "gpus" else self.of

    @property
    def unit(self) -> str:
        return {"power": "W", "cost": "USD/h"}.get(self.of, "GPUs")


POWER, COST, GPUS = FleetLimit("power"), FleetLimit("cost"), FleetLimit("gpus")
