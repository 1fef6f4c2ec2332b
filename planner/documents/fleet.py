"""Reading fleet.yaml, or the plan.yaml of a plan, which holds a fleet.

    llm: meta-llama/Llama-3.1-70B
    workers:
      - {name: pre, role: prefill, gpu: h100-80g, tp: 4, count: 7, latency: fit.yaml, kv_tokens: 400000}
      - {name: dec, role: decode, gpu: a100-80g, tp: 8, count: 3, max_num_seqs: 256}
    policies: {batching: vllm-v1, max_num_batched_tokens: 2048, routing: jsq, decode_routing: jsq}
    network: {bandwidth: 50 GB/s, latency: 0 ms, transfer: layerwise}
    events: [{at: 60 s, down: dec-0}, {at: 120 s, up: dec-0}, {at: 30 s, slow: pre-1, factor: 1.5}]

Only `llm` and, of every worker, `gpu` are needed. `latency` is a fit's file beside this one, or the fit
itself; without it the catalog's is used. `prices` (per GPU and hour) replace the catalog's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from planner.documents.catalog import Catalog
from planner.domain import KV_BLOCK_TOKENS, Gpu, Llm
from planner.errors import InputError
from planner.fleet import MAX_NUM_SEQS, Disturbance, Fleet, Network, Policies, Pool, Role, WorkerType
from planner.io.files import read_yaml
from planner.io.values import at_least_0, positive, refuse_unknown
from planner.models.correction import CorrectedFormula
from planner.models.forms import DistServeSteps, SplitwiseLookup
from planner.models.latency import StepLatency
from planner.models.memory import memory
from planner.models.parallel import pipelined
from planner.simulator.replay import ADMISSION, BATCHING, POOLS, QUEUE, ROUTING
from planner.units import LARGEST, quantity

Section = Mapping[str, Any]

FLEET_KEYS = ("llm", "workers", "policies", "network", "events", "prices", "max_model_len")
PLAN_KEYS = (
    "status",
    "cost_usd_per_h",
    "power_w",
    "power",
    "gpus",
    "slo",
    "simulated",
    "simulated_attainment_frac",
    "objective",
    "traffic",
    "engine",
    "latency",
    "prices_note",
    "usd_per_million",
    "throughput",
    "placement",
    "prefixes",
)
WORKER_KEYS = (
    "name",
    "role",
    "gpu",
    "tp",
    "pp",
    "count",
    "latency",
    "kv_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
)
POLICY_NAMES: Mapping[str, Collection[str]] = {
    "batching": BATCHING,
    "routing": ROUTING,
    "decode_routing": ROUTING,
    "queue": QUEUE,
    "admission": ADMISSION,
    "pools": POOLS,
}
POLICY_SECONDS = {
    "longest_wait": "queue_window_s",
    "flip_after": "flip_after_s",
    "ttft": "ttft_s",
    "tbt": "tbt_s",
    "eviction_notice": "eviction_notice_s",
    "share_window": "share_window_s",
}
POLICY_COUNTS = {
    "queue_batch": "queue_batch",
    "reserve_tokens": "reserve_tokens",
    "patience": "patience_steps",
    "decode_batch_tokens": "decode_batch_tokens",
    "seed": "seed",
    "quantum_tokens": "quantum_tokens",
    "worker_quantum_tokens": "worker_quantum_tokens",
    "priority_groups": "priority_groups",
    "balance_requests": "balance_requests",
}
POLICY_SHARES = {
    "prediction_accuracy": "prediction_accuracy_frac",
    "watermark": "watermark_frac",
    "headroom": "headroom_frac",
    "context_weight": "context_weight",
    "explore_decode": "explore_decode_frac",
    "cache_threshold": "cache_threshold_frac",
}
POLICY_NUMBERS = {
    "extend_weight": "extend_weight",
    "output_weight": "output_weight",
    "balance_ratio": "balance_ratio",
    "replicate_ratio": "replicate_ratio",
}
POLICY_KEYS = (
    *POLICY_NAMES,
    *POLICY_SECONDS,
    *POLICY_COUNTS,
    *POLICY_SHARES,
    *POLICY_NUMBERS,
    "max_num_batched_tokens",
    "prefix_cache",
    "tenant_weights",
    "vidur_restarts",
)
NETWORK_KEYS = ("bandwidth", "latency", "transfer", "layerwise_from", "shared")
EVENT_KEYS = ("at", "down", "up", "slow", "factor")
TRANSFERS = ("serialised", "layerwise")
# step times that are not five numbers: their lists of numbers, and their numbers
Form = SplitwiseLookup | DistServeSteps | CorrectedFormula
FORMS: Mapping[str, tuple[type[Form], tuple[str, ...], tuple[str, ...]]] = {
    "splitwise-lookup": (
        SplitwiseLookup,
        ("knots_tokens", "prompt_s", "token_s"),
        ("mixed_factor", "b_s", "d_s"),
    ),
    "distserve": (
        DistServeSteps,
        ("prefill_s", "decode_small_s", "decode_large_s"),
        ("threshold", "per_rank_s", "overhead_s", "overhead_s_per_token"),
    ),
    "corrected": (
        CorrectedFormula,
        ("formula_s", "weights", "tokens", "pairs", "decodes", "kv_tokens", "prefills"),
        ("h_s", "context_step"),
    ),
}
FIT_NUMBERS = ("a_s", "b_s", "d_s", "e_s", "h_s")

MAX_NUM_BATCHED_TOKENS = 2048
MAX_WORKERS = 10_000
MAX = {"max_num_batched_tokens": 2**20, "max_num_seqs": 2**14, "kv_tokens": 10**9}  # memory of the simulator


def read_fleet(path: Path, catalog: Catalog, *, policies: Section | None = None) -> Fleet:
    """The fleet in `path`; raises InputError naming the file, the worker and the field.

    `policies` (keys of the section) take the place of what the file's section says.
    """
    return parse_fleet(read_yaml(path), path, catalog, policies=policies)


def parse_fleet(document: Section, path: Path, catalog: Catalog, *, policies: Section | None = None) -> Fleet:
    """The same of a mapping; `path` names it in errors, and files are looked for beside it."""
    where = str(path)
    if isinstance(document.get("llms"), dict):
        folders = ", ".join(str(path.parent / str(name) / path.name) for name in list(document["llms"])[:5])
        raise InputError(f"{where}: sums up the plans of several LLMs; name the plan of one: {folders}")
    if policies:
        own = _section(document.get("policies"), None, f"{where}: policies")
        document = {**document, "policies": {**own, **policies}}
    refuse_unknown(document, (*FLEET_KEYS, *(PLAN_KEYS if "status" in document else ())), where)
    return fleet_of(document, path, catalog, budget_is_asked="max_num_batched_tokens" in (policies or {}))


def fleet_of(document: Section, path: Path, catalog: Catalog, *, budget_is_asked: bool = False) -> Fleet:
    """The fleet that a document describes; `path` names it in errors, and files are looked for beside it.

    With `budget_is_asked` no worker may state its own max_num_batched_tokens.
    """
    where = str(path)
    llm = _llm(document, path, catalog)
    decided, budget_tokens = _policies(document.get("policies"), f"{where}: policies")
    prices = _prices(document.get("prices"), catalog, f"{where}: prices")
    rows = document.get("workers")
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{where}: workers: expected a list of workers, found {rows!r}")
    pools: list[Pool] = []
    for number, row in enumerate(rows):
        here = f"{where}: workers[{number}]"
        if not isinstance(row, dict):
            raise InputError(f"{here}: expected keys and values such as gpu: h100-80g, found {row!r}")
        if budget_is_asked and "max_num_batched_tokens" in row:
            raise InputError(
                f"{here}: max_num_batched_tokens: this worker states its own "
                f"({row['max_num_batched_tokens']}), so the policy would change nothing; drop one of the two"
            )
        pool = _pool(row, llm, catalog, prices, budget_tokens, path.parent, here, number)
        if any(pool.name == other.name for other in pools):
            raise InputError(f"{here}: name: {pool.name!r} is given twice; give each pool its own name")
        pools.append(pool)
    if (workers := sum(pool.count for pool in pools)) > MAX_WORKERS:
        raise InputError(f"{where}: workers: {workers} in all, must be at most {MAX_WORKERS}")
    network = _network(document.get("network"), f"{where}: network")
    try:
        fleet = Fleet(llm, tuple(pools), decided, network)
    except InputError as error:
        raise InputError(f"{where}: workers: {error}") from None
    return replace(fleet, disturbances=_events(document.get("events"), pools, f"{where}: events"))


def read_max_model_len(path: Path) -> int | None:
    """Tokens of the longest request the plan in `path` serves; None where the file does not say."""
    document = read_yaml(path)
    if document.get("max_model_len") is None:
        return None
    return _count(document, "max_model_len", str(path))


def _llm(document: Section, path: Path, catalog: Catalog) -> Llm:
    name = document.get("llm")
    if not isinstance(name, str) or not name:
        raise InputError(f"{path}: llm: expected a name of catalogs/llms.yaml or a path, found {name!r}")
    beside = path.parent / name
    try:
        is_beside = name.lower() not in catalog.llm_aliases and not Path(name).exists() and beside.exists()
    except OSError:  # a name no file can have
        is_beside = False
    try:
        return catalog.llm(str(beside) if is_beside else name)
    except InputError as error:
        raise InputError(f"{path}: llm: {error}") from None


def _pool(
    row: Section,
    llm: Llm,
    catalog: Catalog,
    prices: Mapping[str, float],
    budget_tokens: int,
    directory: Path,
    here: str,
    number: int,
) -> Pool:
    refuse_unknown(row, WORKER_KEYS, here)
    role = row.get("role", "mixed")
    name = row.get("name", f"{role}-{number}")
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"{here}: name: expected text, found {name!r}")
    where = f"{here} ({name})" if "name" in row else here
    role = cast(Role, _one_of(role, get_args(Role), f"{where}: role"))
    if not isinstance(row.get("gpu"), str):
        raise InputError(f"{where}: gpu: expected a name of catalogs/gpus.yaml, found {row.get('gpu')!r}")
    try:
        gpu = catalog.gpu(row["gpu"])
    except InputError as error:
        raise InputError(f"{where}: gpu: {error}") from None
    gpu = replace(gpu, price_usd_per_h=prices.get(gpu.name, gpu.price_usd_per_h))
    tp = _tp(row, llm, gpu, where)
    tokens = _count(row, "max_num_batched_tokens", where, default=budget_tokens)
    seats = _count(row, "max_num_seqs", where, default=min(MAX_NUM_SEQS, tokens))
    pp = _count(row, "pp", where, default=1)
    if pp > llm.layers:
        raise InputError(f"{where}: pp: {llm.name} has {llm.layers} layers, found {pp}")
    kv_tokens = _kv_tokens(row, llm, gpu, tp, pp, tokens, seats, where)
    written = row.get("latency")
    has_form = isinstance(written, Mapping) and "form" in written
    form = _form(cast(Section, written), f"{where}: latency") if has_form else None
    try:
        latency, fitted = _latency(written if form is None else None, llm, gpu, tp, catalog, directory)
        if written is None:
            latency = pipelined(latency, llm, gpu, tp, pp)
    except InputError as error:
        raise InputError(f"{where}: latency: {error}") from None
    count = _count(row, "count", where, default=1)
    for own in (form, fitted):
        shortest_s, key = (1.0, "") if own is None else own.shortest_s(tokens + seats, seats, kv_tokens)
        if not shortest_s > 0:
            raise InputError(
                f"{where}: latency: {key}: some step of up to {tokens} tokens and {seats} decodes would take "
                f"{shortest_s:.3g} s, must be > 0 and never fall with the context"
            )
    try:
        worker_type = WorkerType(gpu, tp, latency, kv_tokens, tokens, seats, pp, form or fitted)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return Pool(name, role, worker_type, count)


def _tp(row: Section, llm: Llm, gpu: Gpu, where: str) -> int:
    tp = _count(row, "tp", where, default=1)
    if tp & (tp - 1):
        raise InputError(f"{where}: tp: must be a power of two (1, 2, 4, 8), found {tp}")
    if tp > gpu.gpus_per_node:
        raise InputError(f"{where}: tp: a node has {gpu.gpus_per_node} x {gpu.name}, found {tp}")
    if llm.heads % tp:
        raise InputError(f"{where}: tp: must divide the {llm.heads} heads of {llm.name}, found {tp}")
    return tp


def _kv_tokens(
    row: Section, llm: Llm, gpu: Gpu, tp: int, pp: int, tokens: int, seats: int, where: str
) -> int:
    if "kv_tokens" in row:
        kv_tokens = _count(row, "kv_tokens", where)
        if kv_tokens < KV_BLOCK_TOKENS:
            raise InputError(f"{where}: kv_tokens: must hold one block of 16 tokens, found {kv_tokens}")
        return kv_tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    use = memory(llm, gpu, tp, pp, max_num_batched_tokens=tokens, max_num_seqs=seats)
    if use.kv_tokens == 0:
        missing_bytes = KV_BLOCK_TOKENS * use.kv_bytes_per_token - use.kv_bytes
        raise InputError(
            f"{where}: {llm.name} does not fit {tp * pp} x {gpu.name}: {missing_bytes / 1e9:.1f} GB per "
            f"GPU are missing (weights {use.weight_bytes / 1e9:.1f} of {use.budget_bytes / 1e9:.1f} GB); "
            "raise tp, or take a larger GPU"
        )
    return use.kv_tokens


def _latency(
    value: object, llm: Llm, gpu: Gpu, tp: int, catalog: Catalog, directory: Path
) -> tuple[StepLatency, CorrectedFormula | None]:
    """From the catalog (None), a file beside the fleet, or the mapping that a plan carries; and what the fit
    says the simulator is to take instead.
    """
    if value is None:
        return catalog.latency(llm, gpu, tp), None
    if isinstance(value, Mapping):
        return _fit(value, "fit"), _simulated(value, "fit")
    if not isinstance(value, str):
        raise InputError(f"expected a file such as fit.yaml, found {value!r}")
    path = directory / value
    try:
        document: Section = read_yaml(path)
    except (OSError, ValueError):  # a name no file can have
        raise InputError(f"{value[:80]!r} is no name of a file") from None
    served = document.get("llm")
    if isinstance(served, str) and _shape(catalog.llm(served)) != _shape(llm):
        raise InputError(f"{path} is a fit of {served}, the fleet serves {llm.name}")
    fitted = document.get("gpu")
    on = catalog.gpu(fitted).name if isinstance(fitted, str) else gpu.name
    if on not in (gpu.name, gpu.base):
        raise InputError(f"{path} is a fit on {fitted}, this worker has {gpu.name}")
    rows = document.get("fits", [document])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise InputError(f"{path}: fits: expected a list of fits")
    match = [row for row in rows if row.get("tp", tp) == tp]
    if len(match) != 1:
        known = ", ".join(str(row.get("tp")) for row in rows)
        raise InputError(f"{path} has {len(match)} fits for tp {tp}, need one; found tp {known}")
    latency, form = _fit(match[0], str(path)), _simulated(match[0], str(path))
    if on == gpu.name:
        return latency, form
    slowdowns = gpu.prefill_slowdown, gpu.decode_slowdown
    return latency.slowed(*slowdowns), form and form.slowed(*slowdowns)


def _simulated(row: Section, where: str) -> CorrectedFormula | None:
    """What `plan fit --choose` found better than five numbers."""
    section = row.get("simulated")
    if section is None:
        return None
    form = _form(section, f"{where}: simulated") if isinstance(section, Mapping) else None
    if not isinstance(form, CorrectedFormula):
        raise InputError(
            f"{where}: simulated: expected form: corrected and its numbers, found {section!r:.80}"
        )
    return form


def _form(section: Section, where: str) -> Form:
    """Step times that are not five numbers, by the name of their form."""
    try:
        kind, tuples, numbers = FORMS[str(section.get("form"))]
    except KeyError:
        raise InputError(
            f"{where}: form: must be one of {', '.join(FORMS)}, found {section.get('form')!r}"
        ) from None
    refuse_unknown(section, ("form", *tuples, *numbers), where)
    values: dict[str, Any] = {name: _numbers(section.get(name), f"{where}: {name}") for name in tuples}
    for name in numbers:
        if name in section:
            values[name] = _numbers([section[name]], f"{where}: {name}")[0]
    if "threshold" in values:
        values["threshold"] = (
            int(values["threshold"]) if values["threshold"] % 1 == 0 else values["threshold"]
        )
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except TypeError:
        missing = ", ".join(name for name in numbers if name not in section)
        raise InputError(f"{where}: a {section['form']} needs numbers for some of {missing}") from None


def _shape(llm: Llm) -> Llm:
    return replace(llm, name="", context_tokens=1)


def _fit(row: Section, where: str) -> StepLatency:
    knots_tokens, f_s = (_numbers(row.get(key), f"{where}: {key}") for key in ("knots_tokens", "f_s"))
    a_s, b_s, d_s, e_s, h_s = (_numbers([row.get(key)], f"{where}: {key}")[0] for key in FIT_NUMBERS)
    optional = (
        None if row.get(key) is None else _numbers([row[key]], f"{where}: {key}")[0]
        for key in ("mape_frac", "max_context_tokens", "uncertainty_frac")
    )
    basis = str(row.get("basis", f"fit {where}"))
    return StepLatency(knots_tokens, f_s, a_s, b_s, d_s, e_s, h_s, basis, *optional)


def _numbers(values: object, where: str) -> tuple[float, ...]:
    numbers = []
    for value in values if isinstance(values, list) else [None]:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            raise InputError(f"{where}: expected numbers, found {values!r}")
        numbers.append(float(value))
    return tuple(numbers)


def _policies(document: object, where: str) -> tuple[Policies, int]:
    """The policies, and the token budget of workers that name none."""
    section = _section(document, POLICY_KEYS, where)
    default = Policies()
    chosen: dict[str, Any] = {}
    for name, known in POLICY_NAMES.items():
        chosen[name] = _one_of(section.get(name, getattr(default, name)), tuple(known), f"{where}: {name}")
    for name, field in POLICY_SECONDS.items():
        if name in section:
            chosen[field] = quantity(section[name], "s", where=f"{where}: {name}")
            if not chosen[field] > 0:
                raise InputError(f"{where}: {name}: must be > 0, found {section[name]!r}")
    for name, field in POLICY_COUNTS.items():
        if name in section:
            chosen[field] = _count(section, name, where, least=0)
    for name, field in POLICY_SHARES.items():
        if name in section:
            chosen[field] = _share(section, name, where)
    for name, field in POLICY_NUMBERS.items():
        if name in section:
            chosen[field] = _positive(section[name], f"{where}: {name}")
    if section.get("headroom") == 0:
        raise InputError(f"{where}: headroom: of 0 no request would ever be packed; must be > 0")
    for name in ("vidur_restarts", "prefix_cache"):
        chosen[name] = _flag(section, name, where, default=False)
    weights = _section(section.get("tenant_weights"), None, f"{where}: tenant_weights")
    chosen["tenant_weights"] = tuple(
        (str(name), _positive(weight, f"{where}: tenant_weights: {name}")) for name, weight in weights.items()
    )
    policies = Policies(**chosen)
    return policies, _count(section, "max_num_batched_tokens", where, default=MAX_NUM_BATCHED_TOKENS)


def _network(document: object, where: str) -> Network:
    section = _section(document, NETWORK_KEYS, where)
    default = Network()
    bandwidth, latency_s = default.bandwidth_bytes_per_s, default.latency_s
    if "bandwidth" in section:
        bandwidth = positive(section["bandwidth"], "bytes_per_s", f"{where}: bandwidth")
    if "latency" in section:
        latency_s = at_least_0(section["latency"], "s", f"{where}: latency")
    transfer = _one_of(section.get("transfer", default.transfer), TRANSFERS, f"{where}: transfer")
    return Network(
        bandwidth,
        latency_s,
        cast(Literal["serialised", "layerwise"], transfer),
        _count(section, "layerwise_from", where, default=default.layerwise_tokens, least=0),
        _flag(section, "shared", where, default=default.is_shared),
    )


def _events(document: object, pools: Sequence[Pool], where: str) -> tuple[Disturbance, ...]:
    """What happens to the fleet: {at: 60 s, down: dec-0}, {at: 90 s, up: dec-0}, {at: 10 s, slow: pre-1,
    factor: 1.5}; slow: link slows the link. Workers are named as in the results: pool, dash, number.
    """
    if document is None:
        return ()
    if not isinstance(document, list):
        raise InputError(f"{where}: expected a list such as - {{at: 60 s, down: dec-0}}, found {document!r}")
    names = [f"{pool.name}-{i}" for pool in pools for i in range(pool.count)]
    events = []
    for number, row in enumerate(document):
        here = f"{where}[{number}]"
        section = _section(row, EVENT_KEYS, here)
        kinds = [kind for kind in ("down", "up", "slow") if kind in section]
        if len(kinds) != 1 or "at" not in section or ("factor" in section) != (kinds == ["slow"]):
            raise InputError(f"{here}: needs at, and one of down, up, slow (with factor); found {row!r}")
        name = section[kinds[0]]
        time_s = quantity(section["at"], "s", where=f"{here}: at")
        factor = 1.0 if kinds != ["slow"] else _numbers([section["factor"]], f"{here}: factor")[0]
        if time_s < 0 or not factor > 0:
            raise InputError(f"{here}: at must be >= 0 and factor > 0, found {row!r}")
        if kinds == ["slow"] and name == "link":
            events.append(Disturbance(time_s, "link", factor=factor))
            continue
        if name not in names:
            few = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise InputError(f"{here}: no worker is called {name!r}; the workers are {few}")
        kind = cast(Literal["down", "up", "slow"], kinds[0])
        events.append(Disturbance(time_s, kind, names.index(name), factor))
    return tuple(events)


def _prices(document: object, catalog: Catalog, where: str) -> dict[str, float]:
    prices = {}
    for name, price in _section(document, None, where).items():
        try:
            gpu = catalog.gpu(str(name)).name
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        prices[gpu] = quantity(price, "usd_per_h", where=f"{where}: {name}")
        if prices[gpu] < 0:
            raise InputError(f"{where}: {name}: must be >= 0, found {price!r}")
    return prices


def _section(document: object, known: tuple[str, ...] | None, where: str) -> Section:
    """A mapping, empty where it is missing; keys without a value count as missing."""
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise InputError(f"{where}: expected keys and values, found {document!r}")
    if known is not None:
        refuse_unknown(document, known, where)
    return {key: value for key, value in document.items() if value is not None}


def _positive(value: object, where: str) -> float:
    number = _numbers([value], where)[0]
    if not number > 0:
        raise InputError(f"{where}: must be a number > 0, found {value!r}")
    return number


def _share(section: Section, key: str, where: str) -> float:
    value = section[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{where}: {key}: must be a share between 0 and 1, found {value!r}")
    return float(value)


def _flag(section: Section, key: str, where: str, *, default: bool) -> bool:
    value = section.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{where}: {key}: must be true or false, found {value!r}")
    return value


def _count(section: Section, key: str, where: str, *, default: int | None = None, least: int = 1) -> int:
    value = section.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{where}: {key}: must be a whole number of at least {least}, found {value!r}")
    if value > MAX.get(key, 10**9):
        raise InputError(f"{where}: {key}: must be at most {MAX.get(key, 10**9)}, found {value}")
    return value


def _one_of(value: object, known: tuple[str, ...], where: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{where}: must be one of {', '.join(known)}, found {value!r}")
    return value
