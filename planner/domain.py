"""Values that all stages share: GPU, limit, SLO. They are frozen, and the names of fields end in units."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from planner.errors import CatalogError, InputError
from planner.slo_metrics import METRICS, SloMetric, metric_label
from planner.units import percentile_name

Metric = str  # A key of slo_metrics.METRICS.
KV_BLOCK_TOKENS = 16  # vLLM's default.
MOST_SEED = 2**32 - 1  # The largest seed that a question takes.
SPOT = "@spot"  # The suffix in the name of a GPU that is rented on the spot market.
OWNED = "@owned"  # The suffix in the name of an owned GPU, which costs no new money.
# Sums of floats have rounding errors. So prices, amounts and rates that differ by at most this share count as
# equal, and numbers above a whole number by at most this count as that number.
ROUNDING = 1e-9
# The backlog test (solvers/required_work.py): this share of the last requests must wait no longer than the
# limit on TTFT, or than BACKLOG_LIMIT_S if the SLO has no such limit.
STEADY_FRAC, BACKLOG_LIMIT_S = 0.5, 60.0
# Tenants' service is compared over windows of this length, as in the figures of VTC (arXiv:2401.00588).
SERVICE_WINDOW_S = 60.0


def row_of(gpu: str) -> str:
    """The name of a GPU's row in the catalog: "h100-80g" for "h100-80g@spot" and "h100-80g@owned"."""
    return gpu.removesuffix(SPOT).removesuffix(OWNED)


def stock_name(gpu: str) -> str:
    """The name of the stock that a GPU is taken from: "h100-80g@owned" has its own, and "h100-80g" is that of
    the rented ones, "h100-80g@spot" among them.
    """
    return gpu.removesuffix(SPOT)


def payment_suffix(gpu: str) -> str:
    """The suffix of a GPU's name: "@spot", "@owned", or "" for one that is rented on demand."""
    return gpu[len(row_of(gpu)) :]


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Measured time of an all-reduce over `gpus` GPUs of a node: `latency_s` plus bytes / `bytes_per_s`."""

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

    `dense_flops_per_s` is for dense matrices of 16 bits, `fp8_flops_per_s` of 8 and `fp4_flops_per_s` of 4
    (None: the GPU has no such units, or their speed is unknown); `link_bytes_per_s` is the bandwidth from one
    GPU to the others of its node, in one direction. A power-capped variant is a row of its own
    ("h100-80g@350W"): `power_w` is the cap, `board_w` the board's limit without the cap. `prefill_slowdown`
    and `decode_slowdown` (>= 1) multiply the compute-bound and the memory-bound part of a step. `unchecked`
    says why the accuracy of the GPU's step times is unknown; a plan considers such a GPU only if the question
    names it.
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
    base: str  # The name of the row without a power cap; the row's own name if it has none.
    prefill_slowdown: float = 1.0
    decode_slowdown: float = 1.0
    uncapped_w: float | None = None  # In a capped row, the `power_w` of its base.
    fp8_flops_per_s: float | None = None
    all_reduce: tuple[AllReduce, ...] = ()  # For other numbers of GPUs the link's bandwidth is used.
    # How fast a step reads the KV of its decodes if it also has prefills; None: at the full bandwidth.
    mixed_kv_bytes_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    unchecked: str = ""
    is_sold_whole: bool = False  # Only whole nodes of `gpus_per_node` are rented, not single GPUs.
    # The price of electricity, with the site's overhead; 0 if `price_usd_per_h` includes electricity.
    energy_usd_per_kwh: float = 0.0

    def __post_init__(self) -> None:
        for quantity in (
            "memory_bytes",
            "bandwidth_bytes_per_s",
            "dense_flops_per_s",
            "link_bytes_per_s",
            "power_w",
            "gpus_per_node",
            "fp8_flops_per_s",
            "fp4_flops_per_s",
            "mixed_kv_bytes_per_s",
        ):
            if (value := getattr(self, quantity)) is not None and not value > 0:
                raise CatalogError(f"GPU {self.name}: {quantity} is {value}, must be > 0")
        for quantity in ("price_usd_per_h", "energy_usd_per_kwh"):
            if not (value := getattr(self, quantity)) >= 0:
                raise CatalogError(f"GPU {self.name}: {quantity} is {value}, must be >= 0")
        if min(self.prefill_slowdown, self.decode_slowdown) < 1:
            raise CatalogError(f"GPU {self.name}: a slowdown is below 1")

    @property
    def electricity_usd_per_h(self) -> float:
        """Cost of electricity at constant `power_w`."""
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
    """Selects the requests of one class: those whose tenant, adapter and LLM are in these fields, and whose
    prompt has `least_tokens` to `most_tokens` tokens. An empty field selects all.
    """

    name: str
    tenants: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    llms: tuple[str, ...] = ()
    least_tokens: int = 0
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """One line of an SLO: a percentile of a metric must be at most `limit_s`, over the requests that
    `selector` selects, or over all.
    """

    metric: Metric
    percentile_frac: float
    limit_s: float
    selector: Selector | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise InputError(f"slo: {self.metric}: is no metric; must be one of {', '.join(METRICS)}")

    @property
    def metric_row(self) -> SloMetric:
        """The row of its metric in planner/slo_metrics.py."""
        return METRICS[self.metric]

    @property
    def name(self) -> str:
        """For instance 'ttft p90', or 'chat ttft p90' for a class called chat."""
        of_class = "" if self.selector is None else f"{self.selector.name} "
        return f"{of_class}{self.metric} {percentile_name(self.percentile_frac)}"

    @property
    def label(self) -> str:
        """The name in sentences and tables: 'chat TTFT p90'."""
        return metric_label(self.name)


@dataclass(frozen=True, slots=True)
class ServiceGuarantee:
    """In every window of `window_s` in which work of a tenant waits, it gets at least `share_frac` of its
    fair share of service (simulator/service_shares.py). `tenant` None: all tenants that no other guarantee
    names.
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
    """The SLO: every limit must hold, `attainment_frac` of requests must keep all limits at once, and tenants
    must get their `guarantees`.

    With `every_s`, limits and attainment must hold in every window of that length
    (traffic.trace.slo_windows_s) and over the whole trace. That allows fewer misses than the whole trace
    alone, as `allowed_above` rounds down in each window.
    """

    limits: tuple[Limit, ...]
    attainment_frac: float | None = None
    every_s: float | None = None
    guarantees: tuple[ServiceGuarantee, ...] = ()

    def guarantee_of(self, tenant: str) -> ServiceGuarantee | None:
        """The guarantee that names the tenant, else the one for all other tenants, if any."""
        guarantees = {each.tenant: each for each in self.guarantees}
        return guarantees.get(tenant, guarantees.get(None))

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The classes of the SLO's limits, each once, in their order."""
        return selectors_of(self.limits)

    def patience_s(self, span_s: float) -> float:
        """How long requests of the most patient class may wait in the backlog test of `span_s` seconds."""
        classes: tuple[Selector | None, ...] = self.selectors
        if not classes or any(each.selector is None for each in self.limits):
            classes = (*classes, None)  # There are limits for all requests, or no limits.
        return max(self.patience_of(each, span_s) for each in classes)

    def patience_of(self, selector: Selector | None, span_s: float) -> float:
        """How long requests of a class (None: of no class) may wait in the backlog test: up to the largest
        limit on TTFT.

        Requests of a class with limits on E2E alone have a deadline. They may wait until then, but no longer
        than a tenth of the span, or BACKLOG_LIMIT_S if that is longer: in continuing traffic a longer wait
        means that the backlog grows.
        """
        own_limits = [limit for limit in self.limits if limit.selector == selector]
        ttft_s = [limit.limit_s for limit in own_limits if limit.metric == "ttft"]
        deadlines_s = [limit.limit_s for limit in own_limits if limit.metric == "e2e"]
        if ttft_s or selector is None or not deadlines_s:
            return max(ttft_s, default=BACKLOG_LIMIT_S)
        return min(max(deadlines_s), max(span_s / 10, BACKLOG_LIMIT_S))

    def due_s(self, selector: Selector) -> float:
        """The time from the arrival of a request of this class until it is due, for the queue `edf`: the
        tightest limit on TTFT, else that on E2E, else BACKLOG_LIMIT_S.
        """
        own_limits = [limit for limit in self.limits if limit.selector == selector]
        for metric in ("ttft", "e2e"):
            if limits_s := [limit.limit_s for limit in own_limits if limit.metric == metric]:
                return min(limits_s)
        return BACKLOG_LIMIT_S


def selectors_of(limits: Iterable[Limit]) -> tuple[Selector, ...]:
    """The classes of these limits, each once, in their order."""
    return tuple(dict.fromkeys(limit.selector for limit in limits if limit.selector is not None))


def allowed_above(percentile_frac: float, count: int) -> int:
    """How many of `count` values may lie above their percentile, by the nearest-rank definition."""
    return count - math.ceil(percentile_frac * count - ROUNDING)  # 0.07 * 100 is a little more than 7.


def nearest_rank(percentile_frac: float, count: int) -> int:
    """The rank of the percentile among `count` values; the smallest value has rank 1."""
    return max(count - allowed_above(percentile_frac, count), 1)


@dataclass(frozen=True, slots=True)
class FleetLimit:
    """A limit on all workers of a fleet together; `gpu` is set for a stock only."""

    of: Literal["stock", "power", "cost", "gpus"]
    gpu: str = ""

    @property
    def name(self) -> str:
        """The name in files and messages, for instance 'stock of h100-80g'."""
        if self.of == "stock":
            return f"stock of {self.gpu}"
        return "GPUs" if self.of == "gpus" else self.of

    @property
    def unit(self) -> str:
        """The unit of its amount."""
        return {"power": "W", "cost": "USD/h"}.get(self.of, "GPUs")


POWER, COST, GPUS = FleetLimit("power"), FleetLimit("cost"), FleetLimit("gpus")
