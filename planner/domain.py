"""The nouns every stage shares: GPU, limit, SLO. Frozen, units in the names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from planner.errors import CatalogError, InputError
from planner.slo_metrics import METRICS, SloMetric
from planner.units import percentile_name

Metric = str  # a key of slo_metrics.METRICS
KV_BLOCK_TOKENS = 16
SPOT = "@spot"  # suffix of a GPU that is rented on the spot market
OWNED = "@owned"  # suffix of an owned GPU, which costs no new money
# Backlog test: this share of the last requests waits no longer than the limit on TTFT, or than this
# if the SLO has none.
STEADY_FRAC, BACKLOG_LIMIT_S = 0.5, 60.0
# Tenants' service is compared over windows of this length, as in the figures of VTC's paper, 2401.00588.
SERVICE_WINDOW_S = 60.0


def row_of(gpu: str) -> str:
    """The name of a GPU's row, "h100-80g" for "h100-80g@spot" and "h100-80g@owned"."""
    return gpu.removesuffix(SPOT).removesuffix(OWNED)


def market_of(gpu: str) -> str:
    """The suffix that says how a GPU is obtained: "@spot", "@owned", or "" for a rented one."""
    return gpu[len(row_of(gpu)) :]


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce over `gpus` GPUs of a node: it takes `latency_s` plus the summed bytes over
    `bytes_per_s`."""

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

    `dense_flops_per_s` is for 16-bit dense matrices, `fp8_flops_per_s` for 8 bits, `fp4_flops_per_s` for 4
    (None: no such units, or unknown); `link_bytes_per_s` is what one GPU sends to the others of its node, in
    one direction. A power-capped variant is a row of its own ("h100-80g@350W"): `power_w` is the cap,
    `board_w` the board's limit without it, and the slowdowns (>= 1) multiply the compute-bound and the
    memory-bound part of a step. `unchecked` says why the accuracy of its step times is unknown; a plan
    considers such a GPU only if the question names it.
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
    all_reduce: tuple[AllReduce, ...] = ()  # measured; other numbers of GPUs use the link's bandwidth
    mixed_kv_bytes_per_s: float | None = None  # for decodes' KV beside prefills
    fp4_flops_per_s: float | None = None
    unchecked: str = ""
    is_sold_whole: bool = False  # by the node of `gpus_per_node`, not by the GPU
    energy_usd_per_kwh: float = 0.0  # of drawn power, site overhead included; 0 if the price has it

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
        """Cost of electricity at provisioned power, around the clock."""
        return self.power_w / 1e3 * self.energy_usd_per_kwh

    @property
    def usd_per_h(self) -> float:
        """Price plus electricity."""
        return self.price_usd_per_h + self.electricity_usd_per_h

    @property
    def board_w(self) -> float:
        """The board's power limit (TDP), whether or not this row is capped."""
        return self.power_w if self.uncapped_w is None else self.uncapped_w


@dataclass(frozen=True, slots=True)
class Selector:
    """The requests of one class: those with one of the names in every field that has any, and with a prompt
    of `least_tokens` to `most_tokens` tokens.
    """

    name: str
    tenants: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    llms: tuple[str, ...] = ()
    least_tokens: int = 0
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """One line of an SLO: this percentile of this metric stays at or below `limit_s`.

    It is of all requests, or of those that `selector` takes.
    """

    metric: Metric
    percentile_frac: float
    limit_s: float
    selector: Selector | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise InputError(f"slo: {self.metric}: is no metric; must be one of {', '.join(METRICS)}")

    @property
    def row(self) -> SloMetric:
        """What there is to know of its metric."""
        return METRICS[self.metric]

    @property
    def name(self) -> str:
        """For instance 'ttft p90', of a class 'chat ttft p90'."""
        of_class = "" if self.selector is None else f"{self.selector.name} "
        return f"{of_class}{self.metric} {percentile_name(self.percentile_frac)}"


@dataclass(frozen=True, slots=True)
class ServiceGuarantee:
    """While a tenant has work waiting it gets at least `share_frac` of its fair share of service, in every
    window of `window_s` (simulator/service_shares.py). `tenant` None: each that is not named.
    """

    tenant: str | None
    share_frac: float
    window_s: float = SERVICE_WINDOW_S

    @property
    def name(self) -> str:
        """For instance 'share of tenant gold'."""
        return "share of each tenant" if self.tenant is None else f"share of tenant {self.tenant}"


@dataclass(frozen=True, slots=True)
class Slo:
    """The SLO: every limit must hold, and `attainment_frac` of requests must keep all limits at once. Tenants
    get their `guarantees`.

    With `every_s` both must hold in every window of that length (traffic.trace.slo_windows_s) and over the
    whole trace. The whole may miss no more requests than its windows together: n - ceil(p n) is rounded down
    for each.
    """

    limits: tuple[Limit, ...]
    attainment_frac: float | None = None
    every_s: float | None = None
    guarantees: tuple[ServiceGuarantee, ...] = ()

    def guarantee_of(self, tenant: str) -> ServiceGuarantee | None:
        """The guarantee to a tenant of this name."""
        promised = {each.tenant: each for each in self.guarantees}
        return promised.get(tenant, promised.get(None))

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The classes of its lines, each once, in their order."""
        return selectors_of(self.limits)

    def patience_s(self, span_s: float) -> float:
        """How long requests of the most patient class may wait in the backlog test of `span_s` seconds."""
        kinds = (*self.selectors, None) if any(each.selector is None for each in self.limits) else None
        return max(self.patience_of(each, span_s) for each in kinds or self.selectors or (None,))

    def patience_of(self, selector: Selector | None, span_s: float) -> float:
        """How long requests of a class may wait in the backlog test, or with None those of a fleet without
        classes: the largest limit on TTFT.

        Work with a deadline may wait as long as that, but never longer than a tenth of the span that is
        judged: traffic goes on, so what has not been served by its end would never be.
        """
        own = [limit for limit in self.limits if limit.selector == selector]
        ttft_s = [limit.limit_s for limit in own if limit.metric == "ttft"]
        whole_s = [limit.limit_s for limit in own if limit.metric == "e2e"]
        if ttft_s or selector is None or not whole_s:
            return max(ttft_s, default=BACKLOG_LIMIT_S)
        return min(max(whole_s), max(span_s / 10, BACKLOG_LIMIT_S))

    def due_s(self, selector: Selector) -> float:
        """How long after its arrival a request of this class must have been served, for the queue `edf`: its
        tightest limit on TTFT, else on E2E.
        """
        own = [limit for limit in self.limits if limit.selector == selector]
        for metric in ("ttft", "e2e"):
            if limits_s := [limit.limit_s for limit in own if limit.metric == metric]:
                return min(limits_s)
        return BACKLOG_LIMIT_S


def selectors_of(limits: Iterable[Limit]) -> tuple[Selector, ...]:
    """The classes of these lines, each once, in their order."""
    return tuple(dict.fromkeys(limit.selector for limit in limits if limit.selector is not None))


def allowed_above(percentile_frac: float, values: int) -> int:
    """How many of `values` may lie above their percentile, by the nearest-rank definition."""
    return values - math.ceil(percentile_frac * values - 1e-9)


def nearest_rank(percentile_frac: float, values: int) -> int:
    """The rank of the percentile among so many values; the smallest value has rank 1."""
    return max(values - allowed_above(percentile_frac, values), 1)


@dataclass(frozen=True, slots=True)
class FleetLimit:
    """A limit on all workers of a fleet together; `gpu` is set for a stock only."""

    of: Literal["stock", "power", "cost", "gpus"]
    gpu: str = ""

    @property
    def name(self) -> str:
        """The name in files and messages, for instance 'stock of h100-80g'."""
        return f"stock of {self.gpu}" if self.of == "stock" else "GPUs" if self.of == "gpus" else self.of

    @property
    def unit(self) -> str:
        return {"power": "W", "cost": "USD/h"}.get(self.of, "GPUs")


POWER, COST, GPUS = FleetLimit("power"), FleetLimit("cost"), FleetLimit("gpus")
