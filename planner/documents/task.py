"""Reads slo.yaml, the question of `plan` for one LLM, into a `PlanQuestion`.

    llm: meta-llama/Llama-3.1-70B
    slo: {ttft: {p90: 2 s}, tbt: {p99: 200 ms}, attainment: 0.9}      # or  preset: vidur
    traffic: {rate: 20, scale: superpose, window: busiest 10 min, draws: 1}  # or a description
    fleet: {gpus: {a100-80g: 64}, owned: {a100-80g: 24}, prices: {a100-80g: 1.50 usd/h},
            network: {bandwidth: 50 GB/s}, host_overhead: 2 ms}     # or, for all GPUs: {unchecked: true}
    policies: {queue: [fcfs, sjf], longest_wait: 60 s, prefix_cache: true}        # policy_choices.py
    objective: cost
    limits: {power: 80 kW, cost: 500 usd/h, gpus: 64}
    engine: {name: vllm, version: 0.15.1, async_scheduling: true}        # engine_file.py, speculative.py
    lora: {max_loras: 8, max_rank: 16, adapters: 100}                    # lora_settings.py
    deploy: {target: kserve}               # route as its router does; each: also plan for every target
    spare: 1 worker                        # or 1 node
    robust: {step_times: 10 %, traffic: 10 %}
    safety: {kept_in: 0.9, growth: 10 %}   # or none
    day: {controllers: [hpa, keda], train: 70 %}     # of `plan day` alone: day/day_settings.py

Only `llm` and one of `slo` and `preset` are required. An unknown key is refused: a misspelt limit that is
quietly dropped would certify the wrong fleet. planner/documents/several_llms_question.py reads a question
for several LLMs on one stock, with the functions of this module for each LLM.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, get_args

from planner.documents.catalog import Catalog
from planner.documents.commitments import KEYS as COMMITMENT_KEYS
from planner.documents.commitments import parse_commitments
from planner.documents.engine_file import default_engine, parse_engine
from planner.documents.gpu_payment import (
    Electricity,
    parse_electricity,
    parse_owned,
    parse_sold_as,
    rentable_stock,
    values_by_gpu,
    with_owned,
)
from planner.documents.kv_offload_settings import check_can_offload, parse_kv_offload
from planner.documents.log_columns import KEYS as LOG_KEYS
from planner.documents.log_columns import parse_log_options
from planner.documents.lora_settings import parse_lora
from planner.documents.network import PLAN_KEYS as NETWORK_KEYS
from planner.documents.network import parse_network
from planner.documents.offers import ProviderOffer, Term, offer_of
from planner.documents.policy_choices import (
    CHUNK_LIMIT,
    PolicyChange,
    PolicyChoices,
    parse_policy_choices,
    with_classes,
    without_pins,
)
from planner.documents.policy_choices import KEYS as POLICY_KEYS
from planner.documents.question_warnings import (
    fleet_warnings,
    lora_warnings,
    slo_warnings,
    sought_rate_warnings,
)
from planner.documents.safety import Safety, parse_safety
from planner.documents.slo import SloPreset, SlowdownLimits, parse_slo
from planner.documents.speculative import (
    check_scheduling,
    find_drafter,
    parse_speculative,
    speculative_of_engine,
)
from planner.documents.traffic_description import KEYS as DESCRIBED_KEYS
from planner.documents.traffic_description import parse_description
from planner.domain import OWNED, SPOT, Gpu, Slo, row_of
from planner.errors import CatalogError, InputError
from planner.files.checked_files import is_path, read_yaml
from planner.files.document_values import (
    Section,
    check_mapping,
    check_one_of,
    check_whole_number,
    errors_as,
    nearest_names,
    read_at_least,
    refuse_unknown,
    refused_value,
    with_place,
)
from planner.fleet import MAX_NUM_SEQS, Network, Policies
from planner.models.engine import Engine
from planner.models.kv_offload import KvOffload, is_common
from planner.models.llm import Llm
from planner.models.lora import Lora
from planner.models.parallelism import MAX_PP
from planner.models.speculation import Speculation
from planner.policies import (
    BATCHING,
    HUB_TARGETS,
    ROUTERS_OF,
    ROUTING,
    TARGETS_OF_ENGINE,
    VLLM_V1,
    advise_target,
    find_deployed_routing,
)
from planner.slo_metrics import METRICS
from planner.solvers.whole_nodes import node_of, whole_stock
from planner.traffic.described import Description, fit_context
from planner.traffic.scaling import Scaling, check_window
from planner.units import HOUR_S

Objective = Literal["cost", "power", "gpus", "throughput"]
LEAST_PRICE_USD_PER_H = 1e-6  # Solvers cannot tell a smaller price from 0.
MOST_DOWN_FRAC = 0.5  # A spot worker that is away for more than this share of the time is refused.
MOST_INTERRUPTIONS_PER_H = 60.0  # More than one a minute is a typing error.
SPOT_RESTART_S = 600.0  # Time until an interrupted worker has a new machine and its weights.
# Another name of the objective cost: the traffic is given, so the cheapest fleet has the cheapest tokens.
SAME_AS_COST = "cost_per_million_tokens"
# The module that checks the section `day:`. It imports this module, so it is imported only when needed.
_DAY_SETTINGS = "planner.day.day_settings"
_SPARE = re.compile(r"(\d{1,4})\s*(workers?|nodes?)?")
# `deploy: {target: each}`: no target, and a further plan for every target whose router misses the SLO.
EACH_TARGET = "each"
# Values of max_num_batched_tokens that are searched by default: 2048 and 8192 are defaults of vLLM.
TOKEN_BUDGETS = (512, 1024, 2048, 4096, 8192)
# Values above these two are taken for typing errors.
MOST_TOKENS = 2**20  # Most tokens, or sequences, of one step.
MAX_DP = 64  # Most data-parallel ranks.
KEYS = (
    *("llm", "slo", "preset", "traffic", "fleet", "policies", "engine", "lora", "objective", "limits"),
    *("spare", "robust", "safety", "deploy", "day"),
)
FLEET_KEYS = (
    *("gpus", "owned", "sold_as", "electricity", "unchecked", "per_gpu", "pp", "dp"),
    *("max_num_batched_tokens", "max_num_seqs", "network", "prices", "price_of", "least_off_spot"),
    "host_overhead",
)
TRAFFIC_KEYS = ("rate", "scale", "window", "draws", *LOG_KEYS, *DESCRIBED_KEYS)
LIMIT_KEYS = ("power", "cost", "gpus")
ROBUST_KEYS = ("step_times", "traffic", "spread")
# The doubt about an `llm` that is a folder: deployed engines need the weights too, and config.json has none.
FOLDER_SERVED = (
    "llm: manifests serve {name}, the folder of its config.json: mount the weights under that path, or write "
    "the model's id on the Hugging Face hub instead"
)
# Names of other programs for keys of `traffic` and `limits` -> our names.
TRAFFIC_NAMES = {
    **dict.fromkeys(("rps", "qps", "request_rate", "requests_per_second"), "rate"),
    **dict.fromkeys(("prompt", "prompt_tokens", "input_tokens"), "input"),
    **dict.fromkeys(("answer", "completion_tokens", "output_tokens"), "output"),
}
TRAFFIC_NAMES |= {
    "concurrency": "agents: NUMBER, each waiting for its answers",
    "users": "rate: requests/s of all of them, or agents: NUMBER, who ask anew with each answer",
}
TRAFFIC_NAMES |= dict.fromkeys(
    ("adapters", "lora", "loras"), "lora: {max_loras: ..., max_rank: ..., adapters: ...}"
)
LIMIT_NAMES = {"budget": "cost", "price": "cost"}
# Keys that are wrong under `fleet` -> where they belong.
FLEET_BELONGS = {
    **dict.fromkeys(
        ("spot", "reserved", "on_demand"), "prices: {GPU: {on_demand: ..., reserved: ..., spot: ...}}"
    ),
    **dict.fromkeys(("stock", "count", "number", "max"), "gpus: {GPU: NUMBER}"),
    **dict.fromkeys(
        ("tp", "tensor_parallel", "tensor_parallel_size"),
        "tp of a worker in fleet.yaml, which plan simulate takes: a plan chooses its own",
    ),
    "price": "prices",
    "power": "limits: power",
    "budget": "limits: cost",
    "target": "deploy: target",
    **dict.fromkeys(("region", "provider", "cloud"), "price_of: {provider: ...}"),
}
# Keys that are wrong at the top of slo.yaml -> the section in which they belong, or our name for them.
BELONGS = {
    **{key: f"fleet: {key}" for key in FLEET_KEYS},
    **{key: f"traffic: {key}" for key in TRAFFIC_KEYS},
    **{key: f"limits: {key}" for key in ("power", "cost")},
    # `task` is a key of described traffic and a metric of the SLO; at the top, traffic is likelier meant.
    **{metric: f"slo: {metric}" for metric in METRICS if metric not in DESCRIBED_KEYS},
    **dict.fromkeys(
        ("quantization", "quantize", "dtype", "weights", "precision"),
        "llm: a checkpoint in it, such as llama-3.1-70b-fp8",
    ),
    "model": "llm",
    "sla": "slo",
    "budget": "limits: cost",
    "target": "deploy: target",
    "qps": "traffic: rate",
    "kept_in": "safety: kept_in",
    "growth": "safety: growth",
    "router": "policies: routing",
    **dict.fromkeys(
        ("controllers", "autoscaling", "autoscaler", "autoscale"), "day: controllers, for plan day"
    ),
}
PRICE_OF_KEYS = ("provider", "term", "spot_interruptions_per_h", "spot_restart")
# Terms by which a provider does not take a GPU back.
_UNINTERRUPTED_TERMS: tuple[Term, ...] = ("on-demand", "reserved-1y", "reserved-3y")
PRICE_KEYS = ("on_demand", "reserved", *COMMITMENT_KEYS, "spot", "spot_interruptions_per_h", "spot_restart")
ANY = "any"  # `gpus: any` is every GPU of the catalog, like a question without `gpus`.
ANY_ALONE = "any stands alone, without a number: it is every GPU of the catalog; name those with a number"


@dataclass(frozen=True, slots=True)
class Spot:
    """A GPU on the spot market: how often a worker is interrupted, and how long it is away each time."""

    price_usd_per_h: float
    interruptions_per_h: float
    restart_s: float = SPOT_RESTART_S

    @property
    def down_frac(self) -> float:
        """Share of the time that a worker is down: restart / (mean time up + restart)."""
        restart_over_uptime = self.interruptions_per_h * self.restart_s / HOUR_S
        return restart_over_uptime / (1 + restart_over_uptime)


@dataclass(frozen=True, slots=True)
class Robust:
    """The plan must keep the SLO with longer steps and more traffic than expected.

    Every step takes `step_times_frac` longer than predicted; with `spread`, longer than the upper end of its
    spread. Traffic may be anywhere between `traffic_from_frac` and `traffic_frac` more than given.
    """

    step_times_frac: float = 0.0
    traffic_frac: float = 0.0
    # 0 in every slo.yaml; planner/studies/what_if.py sets it to shift the expected traffic.
    traffic_from_frac: float = 0.0
    spread: bool = False


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What a plan is made for: one LLM, its SLO, its traffic and the machines that may be used.

    Names are the catalog's own (aliases resolved). `stock` has every GPU that may be used, None for as many
    as needed; `owned` says how many of these are owned. `unchecked_left_out` are GPUs that the question does
    not name and `gpus_left_out_by_default` leaves out. With `slowdowns`, search/problem/build_problem.py
    derives the limits of `slo` from a reference worker. A plan runs around the clock, so `prices_usd_per_h`
    has the lower of a GPU's on-demand and reserved prices.
    """

    llm: str
    slo: Slo
    stock: Mapping[str, int | None]
    owned: Mapping[str, int] = field(default_factory=dict)
    # By GPU: whether only whole nodes are sold, in place of what the catalog says.
    sold_whole: Mapping[str, bool] = field(default_factory=dict)
    electricity: Electricity | None = None  # Paid beside the prices of GPUs; None: not counted.
    unchecked_left_out: tuple[str, ...] = ()
    # Whether to plan on each GPU type alone too; None: only if that takes little time.
    per_gpu: bool | None = None
    slowdowns: SlowdownLimits | None = None
    preset: str | None = None
    rate_rps: float | None = None  # None: the trace's own rate, or the described one.
    described: Description | None = None  # The description that stands in place of a trace.
    scale: Scaling = "superpose"  # How the trace is brought to `rate_rps`.
    window: str | None = None  # The part of the trace that is planned for; None: the question names none.
    draws: int = 1  # The number of draws of the traffic on which the SLO must be kept.
    # By GPU: prices in place of the catalog's.
    prices_usd_per_h: Mapping[str, float] = field(default_factory=dict)
    reserved: frozenset[str] = frozenset()  # GPUs for which the price is the reserved one.
    # By GPU of `reserved`: its price on demand, if there is one. Only schedules read it.
    on_demand_usd_per_h: Mapping[str, float] = field(default_factory=dict)
    # By GPU: what it costs on demand and under each commitment, for the bill of a finished plan.
    offers_by_term: Mapping[str, Mapping[Term, ProviderOffer]] = field(default_factory=dict)
    # By GPU: the offer behind its price, where the price comes from the provider of `price_of`.
    offers: Mapping[str, ProviderOffer] = field(default_factory=dict)
    gpus_not_offered: tuple[str, ...] = ()  # GPUs that the provider of `price_of` has no offer for.
    spot: Mapping[str, Spot] = field(default_factory=dict)  # By GPU.
    least_off_spot: int = 0  # The fewest workers of each role that are not on the spot market.
    network: Network = field(default_factory=Network)
    is_network_stated: bool = False
    host_overhead_s: float = 0.0  # Added to every engine step, because kernel times alone leave it out.
    # What the engine's host adds, and how it schedules; None: no host time, and synchronous scheduling.
    engine: Engine | None = None
    # Methods of speculative decoding that may be chosen; None: no drafts.
    speculations: tuple[Speculation | None, ...] = (None,)
    lora: Lora | None = None  # Adapters that are served; None: the LLM alone.
    objective: Objective = "cost"
    power_limit_w: float | None = None
    cost_limit_usd_per_h: float | None = None
    gpu_limit: int | None = None
    # The SLO must hold after the loss of this many workers, or of this many nodes; at most one is above 0.
    spare_workers: int = 0
    spare_nodes: int = 0
    stages: tuple[int, ...] = (1,)  # Numbers of pipeline stages that a worker may have.
    ranks: tuple[int, ...] = (1,)  # Numbers of data-parallel ranks that a worker may have.
    max_num_batched_tokens: tuple[int, ...] = TOKEN_BUDGETS  # Values that may be chosen.
    max_num_seqs: tuple[int, ...] = (MAX_NUM_SEQS,)  # Values that may be chosen.
    policies: PolicyChoices = field(default_factory=PolicyChoices)  # Policies that may be chosen.
    robust: Robust = Robust()
    safety: Safety | None = None  # None: the traffic and the step times as they are written.
    deploy: str | None = None  # The deployment target whose router is simulated; None: as the policies say.
    plans_each_target: bool = False  # Plan anew for every target whose router misses the SLO with this plan.
    considers_all_gpus: bool = False  # No GPU was named, so all but `unchecked_left_out` are considered.
    warnings: tuple[str, ...] = ()  # Possible misreadings of the question; every answer warns of them.
    # The price of memory behind KV caches, added to that of every GPU; planner/studies/tier_study.py sets it.
    kv_usd_per_gpu_h: float = 0.0

    def priced_gpus(self, catalog: Catalog) -> tuple[Gpu, ...]:
        """The GPUs in stock, at this question's prices; a capped GPU without one has the uncapped one's.

        A GPU with a spot price is listed a second time as "h100-80g@spot", and a GPU of which some are owned
        as "h100-80g@owned"; all of these share one stock.
        """
        owned = [catalog.gpu(name + OWNED) for name in self.stock if self.owned.get(name)]
        rentable = [  # A count of None means as many as needed.
            catalog.gpu(name) for name, count in rentable_stock(self.stock, self.owned).items() if count != 0
        ]
        prices = self.prices_usd_per_h
        rented = [
            replace(gpu, price_usd_per_h=prices.get(gpu.name, prices.get(gpu.base, gpu.price_usd_per_h)))
            for gpu in rentable
        ]
        on_spot = [
            replace(gpu, name=gpu.name + SPOT, price_usd_per_h=spot.price_usd_per_h)
            for gpu in rentable
            if (spot := self.spot_terms(gpu)) is not None
        ]
        return tuple(self._as_paid(gpu) for gpu in (*owned, *rented, *on_spot))

    def _as_paid(self, gpu: Gpu) -> Gpu:
        """The GPU with the costs beside its price, and whether it is sold by the node."""
        row = row_of(gpu.name)  # The name without "@spot" or "@owned".
        stock, owned = self.stock.get(row), self.owned.get(row, 0)
        node_gpus = gpu.gpus_per_node
        # If neither stock nor rented part is a whole number of nodes, single GPUs must be for sale.
        is_sold_singly = stock is not None and stock % node_gpus > 0 and (stock - owned) % node_gpus > 0
        is_sold_whole = gpu.is_sold_whole and not is_sold_singly
        usd_per_kwh = 0.0
        if self.electricity is not None and (self.electricity.of == "all" or gpu.name.endswith(OWNED)):
            usd_per_kwh = self.electricity.gpu_usd_per_kwh
        return replace(
            gpu,
            price_usd_per_h=gpu.price_usd_per_h + self.kv_usd_per_gpu_h,
            is_sold_whole=self.sold_whole.get(row, self.sold_whole.get(gpu.base, is_sold_whole)),
            energy_usd_per_kwh=usd_per_kwh,
        )

    def stock_of(self, gpu: Gpu, worker_gpus: Collection[int] = ()) -> int | None:
        """How many of a GPU there are, in whole nodes if it is sold by the node; None: as many as needed. If
        all workers have the same number of GPUs (`worker_gpus`), the GPUs that remain on a rented node beside
        whole workers do not count.
        """
        stock, node = self.stock.get(gpu.name), node_of(self._as_paid(gpu))
        if stock is None or node is None:
            return stock
        owned = self.owned.get(gpu.name, 0)
        stock = whole_stock(stock, owned, node.gpus)
        free = node.gpus % next(iter(worker_gpus)) if len(set(worker_gpus)) == 1 else 0
        # For a worker with more GPUs than a node, `free` is the whole node, and nothing is left out.
        return stock - (max(stock - owned, 0) // node.gpus * free if free < node.gpus else 0)

    @property
    def stock_and_owned(self) -> dict[str, int | None]:
        """How many GPUs of each row may be rented, and how many are owned, under "h100-80g@owned"."""
        rented = {
            name: None if count is None else count - self.owned.get(name, 0)
            for name, count in rentable_stock(self.stock, self.owned).items()
        }
        return rented | {name + OWNED: count for name, count in self.owned.items() if name in self.stock}

    def policy_choices(self) -> tuple[Policies, ...]:
        """Every combination of policies that is searched; those without prefix caches come first."""
        return self.policies.combinations(self.slo, self.deploy)

    def changed_policies(self, policies: Policies, change: PolicyChange) -> Policies | None:
        """These policies with another value on one axis; None if target, SLO or other policies exclude it."""
        return self.policies.with_change(policies, change, self.slo, self.deploy)

    @property
    def is_of_agents(self) -> bool:
        """Whether agents send the requests: only then no fleet without prefix caches is compared."""
        return not self.policies.compares_without_caches

    def policies_of_pairs(self, policies: Policies) -> Policies | None:
        """These policies for a prefill and a decode pool; None if they are the same as for mixed workers."""
        if self.deploy is None:
            return None
        of_pairs = find_deployed_routing(policies, self.deploy, is_pair=True).policies
        return None if of_pairs == policies else of_pairs

    def spot_terms(self, gpu: Gpu) -> Spot | None:
        """The spot price and interruptions of this GPU or its uncapped row; None without a spot market."""
        return self.spot.get(row_of(gpu.name), self.spot.get(gpu.base))


def read_task(path: Path, catalog: Catalog) -> PlanQuestion:
    """Read slo.yaml. Raises InputError with the file, the key, its value and what is valid."""
    return parse_task(with_config(read_yaml(path), path.parent, catalog), catalog, where=str(path))


def has_several_llms(path: Path) -> bool:
    """Whether this slo.yaml asks for several LLMs; False for a pipe, which can be read only once."""
    # Path.is_file raises OSError for a name that is too long. os.path.isfile says False, and `read_task` then
    # gives an error of one line.
    return os.path.isfile(path) and "llms" in read_yaml(path)  # noqa: PTH113


def check_keys(path: Path) -> None:
    """Refuse unknown keys in a slo.yaml of one LLM before anything else is checked."""
    if not os.path.exists(path):  # noqa: PTH110 - as in has_several_llms
        raise InputError(f"{path}: no such file")
    if os.path.isfile(path):  # noqa: PTH113 - as above
        document = read_yaml(path)
        if "llms" not in document:
            refuse_unknown(document, KEYS, str(path), BELONGS)


def with_config(document: Mapping[str, Any], folder: Path, catalog: Catalog) -> dict[str, Any]:
    """The document of a slo.yaml in `folder`; an `llm` that is a config.json there gets its whole path."""
    llm = document.get("llm")
    if isinstance(llm, str) and llm:
        return {**document, "llm": catalog.name_in_folder(llm, folder)}
    return dict(document)


def _parse_window(traffic: Section) -> str | None:
    """The part of the trace that is planned for; the reader of the trace refuses one that is too short."""
    window = traffic.get("window")
    if window is None:
        return None
    if not isinstance(window, str):
        raise traffic.refused("window", "expected text such as 'busiest 10 min'", window)
    check_window(window, traffic.path_of("window"))
    return window


def parse_task(document: Mapping[str, Any], catalog: Catalog, *, where: str = "slo.yaml") -> PlanQuestion:
    """A question from a mapping with the keys of slo.yaml; `where` opens every error message."""
    _check_one_llm(document, catalog, where)
    preset = _find_preset(document["preset"], catalog, where) if "preset" in document else None
    question = Section.from_document(document, where)
    traffic = question.subsection("traffic", TRAFFIC_KEYS, elsewhere=TRAFFIC_NAMES)
    parse_log_options(traffic)  # Only to refuse wrong values here: the reader of the trace parses them again.
    is_rate_sought = document.get("objective") == "throughput"
    described = parse_description(traffic, catalog.tasks, is_rate_sought=is_rate_sought)
    fleet = _without_any(question.subsection("fleet", FLEET_KEYS, elsewhere=FLEET_BELONGS))
    limits = question.subsection("limits", LIMIT_KEYS, elsewhere=LIMIT_NAMES)
    target, plans_each_target = _parse_target(question)
    try:
        llm = catalog.served_llm(document["llm"])
        owned, sold_whole = parse_owned(fleet, catalog), parse_sold_as(fleet, catalog)
        stock, unchecked_left_out = _parse_stock(fleet, owned, llm, catalog)
        prices, reserved, on_demand, spot = _parse_prices(fleet, catalog)
        offers_by_term = parse_commitments(fleet, rentable_stock(stock, owned), catalog)
        offers, gpus_not_offered, spot = _find_offers(
            fleet, rentable_stock(stock, owned), prices, spot, catalog
        )
    except CatalogError as error:
        raise CatalogError(with_place(error, where)) from None
    slo = preset.slo if preset else parse_slo(document["slo"], where=question.path_of("slo"))
    spare_workers, spare_nodes = _parse_spare(document.get("spare"), question.path_of("spare"))
    has_losses = bool(spare_workers or spare_nodes or spot)
    ranks = _parse_ranks(fleet, llm)
    engine = _engine_of_question(question, fleet, catalog)
    choices = _policies_of(question, fleet, llm, engine, target, slo, described, ranks, has_losses=has_losses)
    task = PlanQuestion(
        llm=llm.name,
        slo=slo,
        stock=_offered_stock(stock, owned, gpus_not_offered),
        owned=owned,
        sold_whole=sold_whole,
        electricity=parse_electricity(fleet),
        unchecked_left_out=unchecked_left_out,
        per_gpu=fleet.flag("per_gpu", None),
        slowdowns=preset.slowdowns if preset else None,
        preset=preset.name if preset else None,
        rate_rps=None if described else traffic.positive("rate", "rps", None),
        described=None if described is None else fit_context(described, llm.context_tokens),
        scale=cast(Scaling, traffic.one_of("scale", get_args(Scaling), "superpose")),
        window=_parse_window(traffic),
        draws=traffic.whole_number("draws", 1),
        prices_usd_per_h={name: offer.usd_per_h for name, offer in offers.items()} | prices,
        reserved=reserved | {name for name, offer in offers.items() if offer.term != "on-demand"},
        on_demand_usd_per_h=_on_demand_offers(offers, catalog) | on_demand,
        offers_by_term=offers_by_term,
        offers=offers,
        gpus_not_offered=gpus_not_offered,
        spot=spot,
        least_off_spot=_parse_least_off_spot(fleet, spot),
        network=parse_network(fleet.subsection("network", NETWORK_KEYS)),
        is_network_stated="network" in fleet,
        host_overhead_s=fleet.at_least("host_overhead", "s", 0.0),
        engine=engine,
        speculations=_parse_speculations(question, fleet, llm, catalog),
        lora=_parse_simulated_lora(question, fleet),
        policies=choices,
        objective=_parse_objective(document.get("objective", "cost"), question.path_of("objective")),
        power_limit_w=limits.positive("power", "w", None),
        cost_limit_usd_per_h=limits.positive("cost", "usd_per_h", None),
        gpu_limit=limits.whole_number("gpus", None),
        spare_workers=spare_workers,
        spare_nodes=spare_nodes,
        stages=_parse_numbers(fleet, "pp", 1, most=MAX_PP),
        ranks=ranks,
        max_num_batched_tokens=_parse_numbers(fleet, "max_num_batched_tokens", list(TOKEN_BUDGETS)),
        max_num_seqs=_parse_numbers(fleet, "max_num_seqs", MAX_NUM_SEQS),
        robust=_parse_robust(question.subsection("robust", ROBUST_KEYS)),
        safety=_parse_safety_or_default(question),
        deploy=target,
        plans_each_target=plans_each_target,
    )
    _check_throughput(task, where)
    _check_day(question)
    _check_target(task, question, catalog)
    return replace(task, considers_all_gpus="gpus" not in fleet, warnings=_warnings_of(task, fleet, catalog))


def _offered_stock(
    stock: Mapping[str, int | None], owned: Mapping[str, int], gpus_not_offered: Collection[str]
) -> dict[str, int | None]:
    """The stock without GPUs that the provider does not offer, except owned ones."""
    return {
        name: owned.get(name) if name in gpus_not_offered else count
        for name, count in stock.items()
        if name not in gpus_not_offered or name in owned
    }


def _warnings_of(task: PlanQuestion, fleet: Section, catalog: Catalog) -> tuple[str, ...]:
    """Parts of the question that may be meant differently, as sentences. Stock and prices are parsed again,
    because those of `task` also have entries that the file does not: all GPUs, and a provider's offers.
    """
    named = None
    if "gpus" in fleet:
        named = _named_stock(fleet.get("gpus"), catalog, fleet.path_of("gpus"), may_be_empty=True)
    prices, _, _, spot = _parse_prices(fleet, catalog)
    spot_prices = {name: terms.price_usd_per_h for name, terms in spot.items()}
    of_fleet = fleet_warnings(named, task.owned, prices, spot_prices, task.sold_whole, catalog)
    of_llm = (FOLDER_SERVED.format(name=task.llm),) if _is_folder(task.llm, catalog) else ()
    of_rate = sought_rate_warnings(task.described) if task.objective == "throughput" else ()
    return (*slo_warnings(task.slo), *of_fleet, *of_llm, *lora_warnings(task.lora), *of_rate)


def _is_folder(llm: str, catalog: Catalog) -> bool:
    """Whether an LLM is the folder of its config.json, and no row of the catalog."""
    return not catalog.has_llm(llm) and is_path(llm)


def _check_day(question: Section) -> None:
    """Check `day:`, whose values `plan day` reads again. Its module is imported only if there is such a
    section, because controllers load the compiled simulator.
    """
    if "day" in question:
        parse = import_module(_DAY_SETTINGS).parse_day
        parse(question.get("day"), question.path_of("day"))


def _check_one_llm(document: Mapping[str, Any], catalog: Catalog, where: str) -> None:
    """Raise InputError unless there is one LLM, known keys, and either an SLO or a preset of one."""
    if "llms" in document:
        raise InputError(
            f"{where}: holds several LLMs (llms:), which `plan --slo FILE -o DIR`, `plan day` and the page "
            "Several LLMs of `plan ui` plan together; for anything else write one of them into a file of its "
            "own, with the fleet it may use"
        )
    refuse_unknown(document, KEYS, where, BELONGS)
    if not isinstance(document.get("llm"), str):
        present = repr(document["llm"]) if "llm" in document else "nothing"
        raise InputError(
            f"{where}: llm: expected the name of an LLM, found {present}; see `plan catalog llms`"
        )
    if ("slo" in document) == ("preset" in document):
        present = "both" if "slo" in document else "neither"
        raise InputError(
            f"{where}: found {present} of slo and preset, expected one; e.g. slo: {{ttft: {{p90: 2 s}}}}, or "
            f"preset: one of {', '.join(catalog.slos)}"
        )


def _engine_of_question(question: Section, fleet: Section, catalog: Catalog) -> Engine | None:
    """The engine of the question: by default the deployed one, or None if `host_overhead` is given, or a
    batching with which no engine is simulated (policy_checks.py).
    """
    rows = catalog.engines.values()
    policies = question.subsection("policies", POLICY_KEYS, "queue: any")
    batchings = policies.get("batching", ())
    names = batchings if isinstance(batchings, list) else [batchings]
    others = [name for name in BATCHING if name in names and BATCHING[name].code != VLLM_V1]
    if "engine" not in question:
        return None if "host_overhead" in fleet or others else default_engine(rows)
    if "host_overhead" in fleet:
        where = fleet.path_of("host_overhead")
        raise InputError(f"{where}: engine says what the host takes; drop one of the two")
    engine = parse_engine(question.get("engine"), rows, question.path_of("engine"))
    if engine is not None and others:
        raise policies.error(
            "batching",
            f"{others[0]} is not simulated with engine {engine.name}; write engine: none, or drop it",
        )
    return engine


def _parse_speculations(
    question: Section, fleet: Section, llm: Llm, catalog: Catalog
) -> tuple[Speculation | None, ...]:
    """The drafts that engines may use. Raises InputError for drafts in pipelines, which are not simulated."""
    engine, where = question.get("engine"), question.path_of("engine")
    choices = parse_speculative(speculative_of_engine(engine), llm, catalog, f"{where}: speculative")
    check_scheduling(engine, choices, where)
    with errors_as(CatalogError, f"{where}: speculative: model"):
        for drafts in choices:  # A plan counts the memory of a drafter, so it must be known.
            find_drafter(drafts, llm, catalog)
    if None not in choices and _has_pipelines(fleet):
        raise InputError(
            f"{where}: speculative: is not simulated in pipelines (fleet: pp); allow tokens: 0, or drop pp"
        )
    return choices


def _parse_simulated_lora(question: Section, fleet: Section) -> Lora | None:
    """The adapters served, None for none; refused with pipelines, data-parallel ranks or drafts."""
    lora = parse_lora(question.get("lora"), question.path_of("lora"))
    if lora is None:
        return None
    _check_combination(question, fleet, question.path_of("lora"))
    return lora


def _parse_simulated_kv_offload(
    question: Section, fleet: Section, policies: Section, llm: Llm
) -> KvOffload | None:
    """The KV offload of the policies, None without the key. Raises InputError if the question also has
    pipelines, ranks, drafts or adapters, with which KV offload is not simulated.
    """
    offload = parse_kv_offload(policies)
    if offload is None:
        return None
    where = policies.path_of("kv_offload")
    check_can_offload(llm, where)
    # TP 1 and 2 are the smallest degrees that a plan may mix: if they share no blocks, no two degrees do.
    if offload.is_shared and not is_common(llm, (1, 2)):
        raise InputError(
            f"{where}: shared: workers of {llm.name} find in a store only blocks of their own tp, and a plan "
            "may mix degrees; leave shared out, or `plan simulate` a fleet.yaml"
        )
    _check_combination(question, fleet, where)
    if parse_lora(question.get("lora"), question.path_of("lora")) is not None:
        raise _not_both(where, "with lora")
    return offload


def _has_pipelines(fleet: Section) -> bool:
    """Whether workers with several pipeline stages may be chosen."""
    return any(stages > 1 for stages in _parse_numbers(fleet, "pp", 1, most=MAX_PP))


def _check_combination(question: Section, fleet: Section, where: str) -> None:
    """Raise InputError if the question has a setting that is not simulated together with the key `where`."""
    if _has_pipelines(fleet):
        raise _not_both(where, "in pipelines (fleet: pp)")
    if any(ranks > 1 for ranks in _parse_numbers(fleet, "dp", 1, most=MAX_DP)):
        raise _not_both(where, "with data-parallel ranks (fleet: dp)")
    if speculative_of_engine(question.get("engine")) is not None:
        raise _not_both(where, "with engine: speculative")


def _not_both(where: str, beside: str) -> InputError:
    """The error for two settings that are not simulated together."""
    return InputError(f"{where}: is not simulated {beside}; drop one of the two")


def _find_preset(name: object, catalog: Catalog, where: str) -> SloPreset:
    """The SLO of the catalog with this name; the error for an unknown one lists the nearest names, or all."""
    if not isinstance(name, str) or name not in catalog.slos:
        nearest = nearest_names(name, catalog.slos) or list(catalog.slos)
        raise InputError(
            f"{where}: preset: {name!r} is not in catalogs/slos.yaml; nearest: {', '.join(nearest)}"
        )
    return catalog.slos[name]


def _without_any(fleet: Section) -> Section:
    """The section without `gpus: any`. Raises InputError if `any` has a number or is beside other GPUs."""
    gpus = fleet.get("gpus")
    names = list(gpus) if isinstance(gpus, list | Mapping) else [gpus]
    if not any(is_any(name) for name in names):
        return fleet
    if len(names) > 1 or isinstance(gpus, Mapping):
        raise fleet.error("gpus", f"{ANY_ALONE}, or limits: {{gpus: 4}} for four in all")
    return replace(fleet, values={key: value for key, value in fleet.values.items() if key != "gpus"})


def is_any(name: object) -> bool:
    """Whether an entry of `gpus` means every GPU of the catalog."""
    return isinstance(name, str) and name.strip().lower() == ANY


def _parse_stock(
    fleet: Section, owned: Mapping[str, int], llm: Llm, catalog: Catalog
) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """The GPUs that may be used, and those left out by default. GPUs that the question names are not."""
    document, where = fleet.get("gpus"), fleet.path_of("gpus")
    if document is None:
        left_out: tuple[str, ...] = ()
        if not fleet.flag("unchecked", False):
            priced, offered = _gpus_with_given_price(fleet, catalog), _gpus_of_provider(fleet, catalog)
            left_out = gpus_left_out_by_default(llm, catalog, priced, offered)
        if len(left_out) == len(catalog.gpus):
            raise InputError(
                f"{where}: nobody checked step times of any GPU of this catalog ({', '.join(left_out)}); "
                "name those that may be used, or add fleet: {unchecked: true}"
            )
        stock: dict[str, int | None] = {name: None for name in catalog.gpus if name not in left_out}
        return with_owned(stock, owned, fleet), tuple(name for name in left_out if name not in owned)
    stock = with_owned(_named_stock(document, catalog, where, may_be_empty=bool(owned)), owned, fleet)
    unchecked = [name for name in stock if not catalog.is_checked(llm, catalog.gpus[name])]
    # Naming an unchecked GPU is enough to allow it; only a written `unchecked: false` contradicts.
    if unchecked and not fleet.flag("unchecked", True):
        raise fleet.error("unchecked", f"is false, and gpus names {', '.join(unchecked)}; drop one")
    return stock, ()


def gpus_left_out_by_default(
    llm: Llm, catalog: Catalog, priced: Collection[str], offered: Collection[str] | None = None
) -> tuple[str, ...]:
    """The GPUs that are left out if the question names no GPU: those with unchecked step times, those with
    estimated step times whose price has no source, and where kernels of this LLM were measured on a GPU, all
    with estimated step times. So an estimate wins over a measurement only if the question asks for it: it
    names the GPU, or its price (`priced`).

    `offered`: the GPUs that the provider of the question offers; None if it names no provider. Their prices
    have a source.
    """
    sourced = set(priced) | set(offered or ())
    guessed = {
        name for name in catalog.find_guessed_gpus(llm) if not {name, catalog.gpus[name].base} & sourced
    }
    left_out = guessed | set(catalog.find_unchecked_gpus(llm))
    measured = {name for name, gpu in catalog.gpus.items() if catalog.has_fit(llm, gpu)}
    if measured & (set(catalog.gpus) if offered is None else set(offered)):
        left_out |= set(catalog.gpus) - measured - set(priced)
    return tuple(name for name in catalog.gpus if name in left_out)


def _gpus_with_given_price(fleet: Section, catalog: Catalog) -> set[str]:
    """The GPUs with a price in slo.yaml."""
    prices = fleet.subsection("prices")
    return {catalog.gpu_of_question(str(name), prices.path_of(name)).name for name in prices.values}


def _gpus_of_provider(fleet: Section, catalog: Catalog) -> set[str] | None:
    """The GPUs that the provider of the question offers; None if it names no provider."""
    provider = fleet.subsection("price_of", PRICE_OF_KEYS).get("provider")
    if provider is None:
        return None
    # Only an offer on demand counts, so that the GPUs considered do not change with the term.
    return {
        name
        for name in catalog.gpus
        if offer_of(catalog.provenance[name].offers, str(provider), "on-demand") is not None
    }


def _named_stock(document: Any, catalog: Catalog, where: str, *, may_be_empty: bool) -> dict[str, int | None]:
    """The stock of the GPUs that `fleet: gpus` names, a list or a mapping; None for as many as needed."""
    if isinstance(document, list):
        document = dict.fromkeys(str(name) for name in document)
    stock: dict[str, int | None] = {}
    for written_name, count in check_mapping(document, where, "{h100-80g: 8}, or a list of GPUs").items():
        name = catalog.gpu_of_question(str(written_name), where).name
        if name in stock:
            raise InputError(f"{where}: {written_name} is {name}, which is given twice; keep one")
        if isinstance(count, Mapping):
            raise InputError(
                f"{where}: {written_name}: expected a number, or null for no limit, found {dict(count)}; "
                f"GPUs that you own stand under fleet: owned: {{{written_name}: 8}}, "
                f"a price under fleet: prices: {{{written_name}: 2 usd/h}}"
            )
        is_unlimited = count is None or count == "unlimited"
        stock[name] = None if is_unlimited else check_whole_number(count, f"{where}: {written_name}", least=0)
    if not may_be_empty and not any(count is None or count > 0 for count in stock.values()):
        raise InputError(
            f"{where}: stock of every GPU is 0; allow at least one, or drop fleet: gpus to use all"
        )
    return stock


def _parse_prices(
    fleet: Section, catalog: Catalog
) -> tuple[dict[str, float], frozenset[str], dict[str, float], dict[str, Spot]]:
    """Prices by GPU without those on spot; the GPUs whose price is the reserved one; the prices on demand of
    these, as far as given; and the spot markets by GPU.
    """
    prices: dict[str, float] = {}
    reserved: set[str] = set()
    on_demand: dict[str, float] = {}
    spot: dict[str, Spot] = {}
    for name, value, where in values_by_gpu(fleet, "prices", catalog):
        if not isinstance(value, Mapping):
            prices[name] = _parse_price(value, where)
            continue
        price_section = Section.from_document(value, where, PRICE_KEYS)
        # Prices for which the provider does not take the GPU back.
        uninterrupted = {
            key: _parse_price(price_section.get(key), price_section.path_of(key))
            for key in ("on_demand", "reserved")
            if key in price_section
        }
        if uninterrupted:
            # A plan runs around the clock, so it uses all that it reserves: the cheaper counts.
            cheaper_key = min(uninterrupted, key=lambda key: uninterrupted[key])
            prices[name] = uninterrupted[cheaper_key]
            if cheaper_key == "reserved":
                reserved.add(name)
                on_demand |= {name: uninterrupted["on_demand"]} if "on_demand" in uninterrupted else {}
        if "spot" in price_section:
            spot[name] = _parse_spot(price_section)
        elif any(key.startswith("spot_") for key in price_section.values):
            raise InputError(f"{where}: found terms of spot workers and no price; add spot: 1.0 usd/h")
    return prices, frozenset(reserved), on_demand, spot


def _on_demand_offers(offers: Mapping[str, ProviderOffer], catalog: Catalog) -> dict[str, float]:
    """The prices on demand, at the same provider, of GPUs whose offer in `offers` is a commitment."""
    prices = {}
    for name, offer in offers.items():
        if offer.term == "on-demand":
            continue
        on_demand = offer_of(catalog.provenance[name].offers, offer.provider, "on-demand")
        if on_demand is not None:
            prices[name] = on_demand.usd_per_h
    return prices


def _parse_least_off_spot(fleet: Section, spot: Mapping[str, Spot]) -> int:
    """Read `least_off_spot: 2`. Raises InputError if no GPU has a spot price: the key then bounds nothing."""
    if "least_off_spot" not in fleet:
        return 0
    if not spot:
        raise fleet.error(
            "least_off_spot",
            "bounds workers beside those on spot, and no GPU has a spot "
            "price; add one under fleet: prices, or leave the key out",
        )
    return fleet.whole_number("least_off_spot", 0, least=0)


def _find_offers(
    fleet: Section,
    stock: Mapping[str, int | None],
    prices: Mapping[str, float],
    spot: Mapping[str, Spot],
    catalog: Catalog,
) -> tuple[dict[str, ProviderOffer], tuple[str, ...], dict[str, Spot]]:
    """Read `price_of: {provider: verda, term: on-demand}`. Returns the provider's offers for the GPUs in
    stock that have no price in slo.yaml; the GPUs without such an offer; and the spot markets of slo.yaml and
    the provider.

    Raises InputError if a GPU that the question names has no such offer.
    """
    if "price_of" not in fleet:
        return {}, (), dict(spot)
    section = fleet.subsection("price_of", PRICE_OF_KEYS)
    provider = section.plain_text("provider")
    term = section.one_of("term", _UNINTERRUPTED_TERMS, "on-demand")
    wants_spot = "spot_interruptions_per_h" in section
    priced: dict[str, ProviderOffer] = {}
    missing: list[str] = []
    on_spot = dict(spot)
    for name in (name for name, count in stock.items() if count != 0):  # None: as many as needed.
        offers = catalog.provenance[name].offers
        has_own_price = bool({name, catalog.gpus[name].base} & prices.keys())
        if not has_own_price:
            offer = offer_of(offers, provider, term)
            if offer is not None:
                priced[name] = offer
            else:
                missing.append(name)
        spot_offer = offer_of(offers, provider, "spot") if wants_spot else None
        if spot_offer is not None:
            # The offer becomes a section as in slo.yaml, so that `_parse_spot` checks it too.
            like_prices = dict(section.values) | {"spot": f"{spot_offer.usd_per_h!r} usd/h"}
            on_spot.setdefault(name, _parse_spot(Section.from_document(like_prices, section.where)))
    if wants_spot and len(on_spot) == len(spot):
        raise section.error("spot_interruptions_per_h", f"{provider} has no spot price of these GPUs")
    # If the question names no GPUs, those without an offer are left out, as long as any has one.
    if missing and ("gpus" in fleet or len(missing) == len(stock)):
        offer_names = {
            f"{offer.provider} {offer.term}" for name in missing for offer in catalog.provenance[name].offers
        }
        raise InputError(
            f"{section.where}: catalogs/gpus.yaml has no price of {provider} {term} for "
            f"{', '.join(missing)}, but of {', '.join(sorted(offer_names)) or 'nobody'}; name one of these, "
            "or give fleet: prices"
        )
    return priced, tuple(missing), on_spot


def _parse_spot(section: Section) -> Spot:
    """The spot market of one GPU, from a section with PRICE_KEYS or PRICE_OF_KEYS. Raises InputError if the
    interruptions are missing, or leave a worker down for too much of the time.
    """
    if "spot_interruptions_per_h" not in section:
        raise section.error("spot", "needs spot_interruptions_per_h too, such as 0.05")
    most_per_h = MOST_INTERRUPTIONS_PER_H
    spot = Spot(
        price_usd_per_h=_parse_price(section.get("spot"), section.path_of("spot")),
        # A provider may state the rate as "5 %" an hour, which `share` reads as 0.05.
        interruptions_per_h=section.share("spot_interruptions_per_h", most=most_per_h, bare=most_per_h),
        restart_s=section.positive("spot_restart", "s", SPOT_RESTART_S),
    )
    if spot.down_frac > MOST_DOWN_FRAC:
        raise section.error(
            "spot",
            "a worker interrupted so often and away so long is down for "
            f"{100 * spot.down_frac:.3g} % of the time, expected at most {100 * MOST_DOWN_FRAC:g} %",
        )
    return spot


def _parse_price(value: Any, where: str) -> float:
    """A price in USD/h that is 0, or large enough for a solver to tell it from 0."""
    price_usd_per_h = read_at_least(value, "usd_per_h", where)
    if 0 < price_usd_per_h < LEAST_PRICE_USD_PER_H:
        raise refused_value(where, f"expected 0, or {LEAST_PRICE_USD_PER_H:g} USD/h or more", value)
    return price_usd_per_h


def _parse_numbers(
    section: Section, key: str, default: object, *, most: int = MOST_TOKENS
) -> tuple[int, ...]:
    """One number or a list of them, as in `pp: [1, 2]`; sorted."""
    value = section.get(key, default)
    # An empty list is read as one value, so that `check_whole_number` refuses it and names its path.
    listed = value if isinstance(value, list) and value else [value]
    numbers = tuple(sorted({check_whole_number(number, section.path_of(key)) for number in listed}))
    if numbers[-1] > most:
        raise section.error(key, f"found {numbers[-1]}, at most {most} is possible here")
    return numbers


def _parse_ranks(fleet: Section, llm: Llm) -> tuple[int, ...]:
    """`dp: [1, 2, 4]`: data-parallel ranks, which share experts, that a worker of a mixture may have."""
    ranks = _parse_numbers(fleet, "dp", 1, most=MAX_DP)
    if ranks[-1] > 1 and not llm.is_mixture:
        raise fleet.error(
            "dp",
            f"ranks share experts, and {llm.name} has none: they would be workers, of "
            "which a plan has as many as it takes; leave dp out",
        )
    return ranks


def _parse_target(question: Section) -> tuple[str | None, bool]:
    """The target of `deploy: {target: kserve}` and False; (None, True) for EACH_TARGET."""
    if "deploy" not in question:
        return None, False
    section = question.subsection("deploy", ("target",), "{target: kubernetes}")
    name = section.plain_text("target")
    if name == EACH_TARGET:
        return None, True
    if name not in ROUTERS_OF:
        advice = advise_target(name, ROUTERS_OF)
        raise section.error(
            "target",
            f"no deployment target {name[:100]!r}; {advice} {', '.join(ROUTERS_OF)}; or {EACH_TARGET}",
        )
    return name, False


def _check_target(task: PlanQuestion, question: Section, catalog: Catalog) -> None:
    """Raise InputError for a target that cannot load the LLM or start the engine."""
    if task.deploy in HUB_TARGETS and _is_folder(task.llm, catalog):
        raise question.error(
            "deploy",
            f"target: {task.deploy} loads the LLM from the Hugging Face hub, "
            f"and llm: is the folder {task.llm}; write its id on the hub, or take another target",
        )
    if task.engine is None or task.deploy is None:
        return
    targets = TARGETS_OF_ENGINE.get(task.engine.name)  # None: every target starts this engine.
    if targets and task.deploy not in targets:
        raise question.error(
            "deploy",
            f"target: {task.deploy} starts vLLM, and engine: name is "
            f"{task.engine.name}; take {' or '.join(targets)}, or drop engine: name",
        )


def _parse_robust(section: Section) -> Robust:
    """By which shares longer steps and more traffic a plan must stand; 0 if the section is missing."""
    return Robust(
        section.share("step_times", 0.0), section.share("traffic", 0.0), spread=section.flag("spread", False)
    )


def _parse_safety_or_default(question: Section) -> Safety | None:
    """The safety of a plan: as written, or the default unless `robust` says what to withstand."""
    if "safety" in question and "robust" in question and question.get("safety") != "none":
        raise question.error("safety", "and robust: both say what a plan must stand; drop one of the two")
    if "safety" in question:
        return parse_safety(question.get("safety"), question.path_of("safety"))
    return None if "robust" in question else Safety()


def _policies_of(
    question: Section,
    fleet: Section,
    llm: Llm,
    engine: Engine | None,
    target: str | None,
    slo: Slo,
    described: Description | None,
    ranks: tuple[int, ...],
    *,
    has_losses: bool,
) -> PolicyChoices:
    """The policies that are searched: with the queue that suits the classes of the SLO, and without pinned
    prefixes if the fleet must stand losses. Raises InputError if all workers have data-parallel ranks, and
    no routing is simulated with these.
    """
    policies = question.subsection("policies", POLICY_KEYS, "queue: any")
    kv_offload = _parse_simulated_kv_offload(question, fleet, policies, llm)
    has_agents = described is not None and described.agents is not None
    choices = parse_policy_choices(
        policies, target, kv_offload, has_agents=has_agents, has_ranks=ranks[-1] > 1
    )
    if ranks[0] > 1 and not any(ROUTING[name].is_of_whole_workers for name in choices.routings):
        raise policies.error(
            "routing",
            f"{choices.routings[0]} looks into workers and is not simulated "
            f"with their data-parallel ranks; add 1 to fleet: dp, or {Policies().routing} to routing",
        )
    if has_losses:
        choices = without_pins(choices, policies)
    names_queue, is_vllm = "queue" in policies, engine is None or engine.name == "vllm"
    may_limit_chunks = is_vllm and not names_queue and CHUNK_LIMIT not in policies
    return with_classes(choices, slo, target, names_queue=names_queue, may_limit_chunks=may_limit_chunks)


def _check_throughput(task: PlanQuestion, where: str) -> None:
    """Check a question with objective throughput, whose search chooses the rate: it must not name a rate, it
    must be able to raise the trace's, and one of its limits must bound the fleet. Raises InputError.
    """
    if task.objective != "throughput":
        return
    if task.rate_rps is not None:
        raise InputError(
            f"{where}: objective throughput looks for the rate, found traffic: rate: {task.rate_rps:g}; "
            "drop one of the two"
        )
    if task.scale == "thin":
        raise InputError(
            f"{where}: objective throughput raises the rate, and traffic: scale: thin can only lower it; "
            "take superpose or compress"
        )
    # The set is {None} if no limit is given.
    has_limit = {task.power_limit_w, task.cost_limit_usd_per_h, task.gpu_limit} != {None}
    if not has_limit and None in task.stock.values():
        if task.owned:
            owned = ", ".join(f"{gpu}: {count}" for gpu, count in task.owned.items())
            raise InputError(
                f"{where}: objective throughput has no end where GPUs may be rented beside owned ones; to "
                f"rent none, write fleet: {{gpus: {{{owned}}}}} too, else set limits: {{cost: 500 usd/h}}"
            )
        raise InputError(
            f"{where}: objective throughput has no end without a limit; set limits: {{cost: 500 usd/h}}, or "
            "a stock of every GPU"
        )


def _parse_objective(value: object, where: str) -> Objective:
    """The objective of this name, or of its other name SAME_AS_COST."""
    if value == SAME_AS_COST:
        return "cost"
    return cast(Objective, check_one_of(value, get_args(Objective), where))


def _parse_spare(value: object, where: str) -> tuple[int, int]:
    """Spare workers and spare nodes, one of them 0, from "1 worker", "2 nodes" or a number of workers."""
    match = _SPARE.fullmatch("0" if value is None else str(value).strip())
    if match is None:
        raise refused_value(
            where, "expected a number of workers or nodes such as '1 worker' or '1 node'", value
        )
    count, unit = int(match[1]), match[2] or "worker"
    return (0, count) if unit.startswith("node") else (count, 0)
