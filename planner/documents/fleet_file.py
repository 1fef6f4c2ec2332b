"""Reads fleet.yaml, or the plan.yaml of a plan, which holds a fleet, into a `Fleet`, and writes it.

    llm: meta-llama/Llama-3.1-70B
    workers:
      - {name: pre, role: prefill, gpu: h100-80g, tp: 4, count: 7, latency: fit.yaml, kv_tokens: 400000}
      - {name: dec, role: decode, gpu: a100-80g, tp: 8, count: 3, max_num_seqs: 256}
    policies: {batching: vllm-v1, max_num_batched_tokens: 2048, routing: jsq, decode_routing: jsq}
    engine: {name: vllm, version: 0.15.1, async_scheduling: true}
    lora: {max_loras: 8, max_rank: 16, adapters: 100}      # lora_settings.py
    network: {bandwidth: 50 GB/s, latency: 0 ms, transfer: layerwise}
    pinned: [{workers: [pre-0, pre-3], block_tokens: 512, block_ids: [0, 1]}]  # routing: pinned-prefix
    events: [{at: 60 s, down: dec-0}, {at: 120 s, up: dec-0}, {at: 30 s, slow: pre-1, factor: 1.5}]

Only `llm` and each worker's `gpu` are required. `latency` is the file of a fit beside this one, or the fit
itself; by default the catalog's is used. `prices`, `sold_as` and `electricity` (gpu_payment.py) replace the
catalog's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from planner.documents import fits
from planner.documents.catalog import Catalog
from planner.documents.engine_file import NONE, engine_document, engine_of_fleet
from planner.documents.gpu_payment import KEYS as PAID_KEYS
from planner.documents.gpu_payment import Paid, paid_document, parse_paid
from planner.documents.kv_offload_settings import check_can_offload
from planner.documents.lora_settings import lora_document, parse_lora
from planner.documents.network import KEYS as NETWORK_KEYS
from planner.documents.network import network_document, parse_network
from planner.documents.policy_settings import (
    LARGEST_SETTING,
    MOST_STEP_TOKENS,
    POLICY_KEYS,
    parse_policies,
    policies_document,
)
from planner.documents.speculative import (
    check_scheduling,
    engine_with_drafts,
    find_drafter,
    only_choice,
    parse_speculative,
    speculative_document,
    speculative_of_engine,
)
from planner.domain import KV_BLOCK_TOKENS, Gpu
from planner.errors import InputError
from planner.files.checked_files import read_yaml
from planner.files.document_values import (
    Section,
    Wording,
    check_mapping,
    check_rows,
    errors_as,
    list_first,
    refuse_unknown,
    refused_value,
)
from planner.fleet import (
    MAX_NUM_SEQS,
    Disturbance,
    Fleet,
    Network,
    PinnedPrefix,
    Policies,
    Pool,
    Role,
    WorkerType,
)
from planner.models.all2all import DEFAULT_EXCHANGE, Exchange, all2all_of, nodes_of_ranks
from planner.models.engine import Engine
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.models.lora import Lora, LoraSlots, lora_slots
from planner.models.memory import MemorySettings, worker_memory
from planner.models.older_kernels import captured_tokens, correct_for_version
from planner.models.parallelism import add_pipeline
from planner.models.saturation import saturating_tokens
from planner.models.speculation import SAMPLED_ROWS, Drafter, Speculation
from planner.units import show_amount

Document = Mapping[str, Any]

FLEET_KEYS = (  # The keys of fleet.yaml.
    *("llm", "workers", "policies", "engine", "lora", "network", "host_overhead", "events"),
    "pinned",
    *PAID_KEYS,
    "max_model_len",
)
# Keys of a plan.yaml beside those of its fleet.
PLAN_KEYS = (
    *("status", "cost_usd_per_h", "bill", "power_w", "power", "gpus", "slo", "simulated"),
    *("simulated_attainment_frac", "simulated_tenants", "objective", "traffic", "latency"),
    *("prices_note", "usd_per_million", "throughput", "placement", "prefixes", "agents", "deploy"),
    *("routers", "for_targets", "production"),
)
WORKER_KEYS = (
    *("name", "role", "gpu", "tp", "pp", "ep", "dp", "count", "latency", "kv_tokens"),
    *("max_num_seqs", "max_num_batched_tokens", "speculative"),
)
PINNED_KEYS = ("workers", "block_tokens", "block_ids")
EVENT_KEYS = ("at", "down", "up", "slow", "factor")
MAX_NUM_BATCHED_TOKENS = 2048  # The default for a worker whose row and policies name none.
MOST_NAMED = 5  # An error names at most this many workers or plans.
MAX_WORKERS = 10_000  # More workers in a fleet are taken for a typing error.
CHANGED_FRAC = 1e-3  # Watts and prices that differ by less are equal: a plan.yaml rounds them.
MOST_SEQS = 2**14  # Sequences of a worker; the simulator keeps a record for each.
WORDING = Wording(
    one_of="must be one of {}",
    flag="must be true or false",
    whole="must be a whole number of at least {}",
    most="must be at most {}",
    number="expected numbers",
    numbers="expected numbers",
)
FIT_WORDING = replace(WORDING, missing="")  # A missing key of a fit is checked like a value of null.


@dataclass(frozen=True, slots=True)
class _SharedSettings:
    """What reading a row of `workers` needs: settings that all pools share, and defaults for the rows.

    `budget_tokens` is max_num_batched_tokens of the policies, None if they lack it. With `budget_is_given`
    the caller's policies have it, and no row may have its own. Paths in rows are relative to `folder`.
    """

    llm: Llm
    catalog: Catalog
    folder: Path
    paid: Paid
    policies: Policies
    budget_tokens: int | None
    budget_is_given: bool
    speculation: Speculation | None
    lora: Lora | None
    network: Network
    engine: Engine | None
    host_overhead_s: float  # Added to step times that do not include the host's time.


def read_fleet(path: Path, catalog: Catalog, *, policies: Document | None = None) -> Fleet:
    """The fleet in `path`; raises InputError naming the file, the worker and the field.

    `policies` has keys of the section `policies`, which replace those in the file.
    """
    return parse_fleet(read_yaml(path), path, catalog, policies=policies)


def parse_fleet(
    document: Document, path: Path, catalog: Catalog, *, policies: Document | None = None
) -> Fleet:
    """Read a fleet from a mapping, as if it stood in the file `path`; all else is as in `read_fleet`."""
    where = str(path)
    if isinstance(document.get("llms"), dict):
        folders = ", ".join(
            str(path.parent / str(name) / path.name) for name in list(document["llms"])[:MOST_NAMED]
        )
        raise InputError(f"{where}: sums up the plans of several LLMs; name the plan of one: {folders}")
    if policies:
        own = Section.from_document(document.get("policies"), f"{where}: policies")
        document = {**document, "policies": {**own.values, **policies}}
        if policies.get("batching", Policies().batching) != Policies().batching:
            # Another batching stands for another program, whose host times the file does not know.
            document |= {"engine": NONE}
    refuse_unknown(document, (*FLEET_KEYS, *(PLAN_KEYS if "status" in document else ())), where)
    return fleet_of(document, path, catalog, budget_is_given="max_num_batched_tokens" in (policies or {}))


def fleet_of(document: Document, path: Path, catalog: Catalog, *, budget_is_given: bool = False) -> Fleet:
    """The fleet that a document describes; `path` names it in errors, and files are looked for beside it.

    With `budget_is_given` no worker may state its own max_num_batched_tokens.
    """
    file = Section.from_document(document, path, wording=WORDING)
    llm = _find_llm(document, path, catalog)
    policies, budget_tokens = parse_policies(file.subsection("policies", POLICY_KEYS))
    paid = parse_paid(file, catalog)
    if policies.kv_offload is not None:
        check_can_offload(llm, f"{file.path_of('policies')}: kv_offload")
    engine_rows = catalog.engines.values()
    engine = engine_of_fleet(document, engine_rows, file.path_of("engine"), batching=policies.batching)
    host_overhead_s = file.at_least("host_overhead", "s", 0.0)
    if "host_overhead" in document:
        if document.get("engine") not in (None, NONE):
            where = file.path_of("host_overhead")
            raise InputError(f"{where}: engine says what the host takes; drop one of the two")
        engine = None
    speculative = speculative_of_engine(document.get("engine"))
    choices = parse_speculative(speculative, llm, catalog, f"{file.path_of('engine')}: speculative")
    check_scheduling(document.get("engine"), choices, file.path_of("engine"))
    shared = _SharedSettings(
        llm=llm,
        catalog=catalog,
        folder=path.parent,
        paid=paid,
        policies=policies,
        budget_tokens=budget_tokens,
        budget_is_given=budget_is_given,
        speculation=only_choice(choices, f"{file.path_of('engine')}: speculative"),
        lora=parse_lora(file.get("lora"), file.path_of("lora")),
        network=parse_network(file.subsection("network", NETWORK_KEYS)),
        engine=engine,
        host_overhead_s=host_overhead_s,
    )
    worker_rows = check_rows(file.get("workers"), file.path_of("workers"), "workers", least=1)
    pools: list[Pool] = []
    for number, worker in enumerate(worker_rows):
        row = Section.from_document(
            check_mapping(worker, f"{path}: workers[{number}]", "gpu: h100-80g"),
            f"{path}: workers[{number}]",
            WORKER_KEYS,
            wording=WORDING,
        )
        pool = _parse_pool(row, number, shared)
        if any(pool.name == other.name for other in pools):
            raise row.error("name", f"{pool.name!r} is given twice; give each pool its own name")
        pools.append(pool)
    workers = sum(pool.count for pool in pools)
    if workers > MAX_WORKERS:
        raise file.error("workers", f"{workers} in all, must be at most {MAX_WORKERS}")
    with errors_as(InputError, file.path_of("workers")):
        fleet = Fleet(llm, tuple(pools), policies, shared.network)
    return replace(fleet, disturbances=_parse_events(file, pools), pinned=_parse_pinned(file, fleet))


def fleet_document(fleet: Fleet) -> dict[str, Any]:
    """The fleet in fleet.yaml's schema, without events and without pools of no workers. `read_fleet` reads it
    as the same fleet, to the last bit.

    Step times and prices are written out, so that a later catalog does not change the plan.
    """
    pools = fleet.running_pools
    return {
        "llm": fleet.llm.name,
        "workers": [
            {
                "name": pool.name,
                "role": pool.role,
                "gpu": pool.type.gpu.name,
                "tp": pool.type.tp,
                **({"pp": pool.type.pp} if pool.type.pp > 1 else {}),
                **({"ep": True} if pool.type.ep else {}),
                **({"dp": pool.type.dp} if pool.type.dp > 1 else {}),
                "count": pool.count,
                "kv_tokens": pool.type.kv_tokens,
                "max_num_seqs": pool.type.max_num_seqs,
                "max_num_batched_tokens": pool.type.max_num_batched_tokens,
                **({"speculative": speculative_document(speculation)} if speculation else {}),
                "latency": fits.latency_document(pool.type.latency, pool.type.form),
            }
            for pool, speculation in ((pool, pool.type.speculation) for pool in pools)
        ],
        "policies": policies_document(fleet.policies),
        "engine": NONE if fleet.engine is None else engine_document(fleet.engine),
        **({} if fleet.lora is None else {"lora": lora_document(fleet.lora)}),
        "network": network_document(fleet.network),
        **_pinned_document(fleet),
        **paid_document(pool.type.gpu for pool in pools),
    }


def _pinned_document(fleet: Fleet) -> dict[str, Any]:
    """The key `pinned` that `_parse_pinned` reads; no key without pinned prefixes."""
    names = fleet.worker_names
    rows = [
        {
            "workers": [names[w] for w in prefix.workers],
            "block_tokens": prefix.block_tokens,
            "block_ids": list(prefix.block_ids),
        }
        for prefix in fleet.pinned
    ]
    return {"pinned": rows} if rows else {}


def _parse_pinned(file: Section, fleet: Fleet) -> tuple[PinnedPrefix, ...]:
    """The prefixes that workers hold from the start (routing pinned-prefix), by ids of a trace's blocks."""
    number_of = {name: w for w, name in enumerate(fleet.worker_names)}
    prefixes = []
    for i, row in enumerate(check_rows(file.get("pinned", []), file.path_of("pinned"), "prefixes")):
        where = f"{file.path_of('pinned')}[{i}]"
        section = Section.from_document(row, where, PINNED_KEYS, wording=WORDING)
        workers, ids = section.get("workers"), section.get("block_ids")
        if (
            not isinstance(workers, list)
            or not workers
            or any(name not in list(number_of) for name in workers)  # A list, as a name may be unhashable.
        ):
            raise section.refused(
                "workers", f"expected some of {list_first(list(number_of), MOST_NAMED)}", workers
            )
        # By `type`, because True is an instance of int.
        if not isinstance(ids, list) or not ids or any(type(block) is not int for block in ids):
            raise section.refused("block_ids", "expected block ids of a trace", ids)
        tokens = section.whole_number("block_tokens", KV_BLOCK_TOKENS, most=MOST_STEP_TOKENS)
        prefixes.append(PinnedPrefix(tuple(ids), tokens, tuple(number_of[name] for name in workers)))
    return tuple(prefixes)


def max_model_len_of(document: Document, path: Path) -> int | None:
    """Tokens of the longest request that a plan.yaml serves; None if it does not say. Errors name `path`."""
    file = Section.from_document(document, path, wording=WORDING)
    return file.whole_number("max_model_len", None, most=LARGEST_SETTING)


class RouterRow(NamedTuple):
    """The SLO under the router of a deployment target, in words: a row of `routers` in a plan.yaml.

    `simulated` is the routing that was simulated in place of the router. `kept` says whether the plan keeps
    the SLO there; None in a plan of an older version.
    """

    target: str
    router: str
    simulated: str
    slo: str
    kept: bool | None = None


def routers_of(document: Document, path: Path) -> list[RouterRow]:
    """The `routers` of a plan.yaml. Errors name `path`."""
    listed = check_rows(document.get("routers", []), f"{path}: routers")
    rows = [Section.from_document(each, f"{path}: routers", RouterRow._fields) for each in listed]
    return [
        RouterRow(
            row.text("target"),
            row.text("router"),
            row.text("simulated"),
            row.text("slo"),
            row.flag("kept", None),
        )
        for row in rows
    ]


def changed_plan_warning(document: Document, path: Path, fleet: Fleet) -> str:
    """A sentence if the workers of a plan.yaml were changed since it was written; else, and for other files,
    "". A change shows in the GPUs, the Watts or the price, which a plan.yaml states for all its workers.
    """
    bill = document.get("bill")
    if "status" not in document or not isinstance(bill, dict):
        return ""
    rows = [("GPUs", document.get("gpus"), fleet.gpus), ("W", document.get("power_w"), fleet.power_w)]
    # With owned GPUs or electricity the price is no sum over the prices of GPUs.
    if not bill.get("owned_gpus") and not bill.get("electricity_usd_per_h"):
        rows.append(("USD/h by the GPU", bill.get("by_gpu_usd_per_h"), fleet.price_usd_per_h))
    for unit, written, computed in rows:
        if isinstance(written, int | float) and not math.isclose(written, computed, rel_tol=CHANGED_FRAC):
            return (
                f"{path}: its workers are {show_amount(computed, unit)} {unit}, and it was planned with "
                f"{show_amount(written, unit)}: they were changed since. latency and kv_tokens of "
                "workers, production, simulated and routers are of the plan as it was; take latency and "
                "kv_tokens out of a worker on another GPU, or plan again"
            )
    return ""


def _find_llm(document: Document, path: Path, catalog: Catalog) -> Llm:
    """The LLM that the fleet serves: a row of the catalog, or a config.json, perhaps beside fleet.yaml."""
    name = document.get("llm")
    if not isinstance(name, str) or not name:
        raise InputError(f"{path}: llm: expected a name of catalogs/llms.yaml or a path, found {name!r}")
    with errors_as(InputError, f"{path}: llm"):
        return catalog.served_llm(catalog.name_in_folder(name, path.parent))


def _parse_pool(row: Section, number: int, shared: _SharedSettings) -> Pool:
    """The pool in the row of `workers` with this `number`. What the row does not state comes from `shared`
    and the catalog; KV tokens and step times are then computed.
    """
    llm, lora, engine = shared.llm, shared.lora, shared.engine
    default_tokens = _default_budget_tokens(row, shared)
    speculation = _parse_speculation(row, shared)
    name = row.text("name", f"{row.get('role', 'mixed')}-{number}")
    if "name" in row:
        row = replace(row, where=f"{row.where} ({name})")
    role = cast(Role, row.one_of("role", get_args(Role), "mixed"))
    if not isinstance(row.get("gpu"), str):
        raise row.refused("gpu", "expected a name of catalogs/gpus.yaml", row.get("gpu"))
    with errors_as(InputError, row.path_of("gpu")):
        gpu = shared.paid.paid_gpu(shared.catalog.gpu(row.get("gpu")))
    tp = _parse_tp(row, llm, gpu)
    tokens = row.whole_number("max_num_batched_tokens", default_tokens, most=MOST_STEP_TOKENS)
    # By default as many sequences as a step has tokens for, each with all its drafted tokens.
    tokens_per_seq = 1 if speculation is None else speculation.most_tokens
    default_seqs = min(MAX_NUM_SEQS, max(tokens // tokens_per_seq, 1))
    max_num_seqs = row.whole_number("max_num_seqs", default_seqs, most=MOST_SEQS)
    pp = row.whole_number("pp", 1, most=LARGEST_SETTING)
    if pp > llm.layers:
        raise row.error("pp", f"{llm.name} has {llm.layers} layers, found {pp}")
    dp = _parse_dp(row, llm, gpu, tp)
    if dp > 1 and lora is not None:
        raise row.error("dp", "ranks are not simulated with lora; drop one of the two")
    ep = _parse_ep(row, gpu, (tp, dp), shared)
    # The memory of a drafter counts only where KV tokens are computed.
    drafter = find_drafter(speculation, llm, shared.catalog) if "kv_tokens" not in row else Drafter()
    sampled_rows = max_num_seqs if speculation is None else SAMPLED_ROWS * max_num_seqs
    slots = None if lora is None else lora_slots(lora, llm, gpu, tp, ep=ep)
    kv_tokens = _parse_kv_tokens(row, gpu, (tp, pp, dp), tokens, sampled_rows, drafter, slots, shared)
    exchange = Exchange(all2all_of(tp * dp, gpu.gpus_per_node, tokens), shared.network.bandwidth_bytes_per_s)
    with errors_as(InputError, row.path_of("latency")):
        split = fits.Split(tp, ep, dp, exchange.all2all)
        latency, form = _step_times(row.get("latency"), gpu, split, exchange, shared)
        if "latency" not in row:  # A fit that the row names is taken to be of this version and these stages.
            captured = captured_tokens(max_num_seqs, tokens_per_seq)
            latency = add_pipeline(correct_for_version(latency, llm, gpu, engine, captured), llm, gpu, tp, pp)
        if "latency" not in row or not (latency.has_host or form):  # Measured steps have the host's time.
            latency = replace(latency, h_s=latency.h_s + shared.host_overhead_s)
    count = row.whole_number("count", 1, most=LARGEST_SETTING)
    if form is not None:
        _check_shortest_step(row, form, tokens, max_num_seqs, kv_tokens)
    with errors_as(InputError, row.where):
        worker_type = WorkerType(
            gpu,
            tp,
            latency,
            kv_tokens=kv_tokens,
            max_num_batched_tokens=tokens,
            max_num_seqs=max_num_seqs,
            pp=pp,
            form=form,
            speculation=speculation,
            ep=ep,
            dp=dp,
            lora=slots,
            engine=engine_with_drafts(engine, speculation),
        ).with_llm(llm)
        return Pool(name, role, worker_type, count)


def _check_shortest_step(row: Section, form: fits.Form, tokens: int, decodes: int, kv_tokens: int) -> None:
    """Raise InputError if a step of up to `tokens` prompt tokens and `decodes` would take no time."""
    shortest_s, key = form.shortest_s(tokens + decodes, decodes, kv_tokens)
    if not shortest_s > 0:
        raise row.error(
            "latency",
            f"{key}: some step of up to {tokens} tokens and {decodes} decodes "
            f"would take {shortest_s:.3g} s, must be > 0 and never fall with the context",
        )


def _parse_speculation(row: Section, shared: _SharedSettings) -> Speculation | None:
    """How a pool drafts tokens (speculative decoding): as its row says, else as all pools do."""
    if "speculative" not in row:
        return shared.speculation
    where = row.path_of("speculative")
    return only_choice(parse_speculative(row.get("speculative"), shared.llm, shared.catalog, where), where)


def _default_budget_tokens(row: Section, shared: _SharedSettings) -> int:
    """The max_num_batched_tokens of a row that names none: that of the policies; else, for prefill workers of
    DistServe, the tokens that just saturate a step; else the default.
    """
    if shared.budget_is_given and "max_num_batched_tokens" in row:
        raise row.error(
            "max_num_batched_tokens",
            "this worker states its own "
            f"({row.get('max_num_batched_tokens')}), so the policy would change nothing; drop one of the two",
        )
    budget_tokens = shared.budget_tokens
    if budget_tokens is None and shared.policies.batching == "distserve" and row.get("role") == "prefill":
        budget_tokens = _saturating_tokens(row, shared)
    return budget_tokens or MAX_NUM_BATCHED_TOKENS


def _saturating_tokens(row: Section, shared: _SharedSettings) -> int | None:
    """DistServe's L_m, the prompt tokens from which on a step of this pool gets no more efficient; None if
    the row has an error, which `_parse_pool` then reports.
    """
    try:
        gpu = shared.catalog.gpu(str(row.get("gpu")))
        # DistServe has no experts and no ranks.
        split = fits.Split(_parse_tp(row, shared.llm, gpu), ep=False)
        return saturating_tokens(*_step_times(row.get("latency"), gpu, split, DEFAULT_EXCHANGE, shared))
    except InputError:
        return None


def _parse_dp(row: Section, llm: Llm, gpu: Gpu, tp: int) -> int:
    """The number of data-parallel ranks, which share the experts of a mixture."""
    dp = row.whole_number("dp", 1, most=LARGEST_SETTING)
    if dp > 1 and not llm.is_mixture:
        raise row.error(
            "dp", f"ranks share experts, and {llm.name} has none; give count: {dp} for as many workers"
        )
    if dp > 1:
        with errors_as(InputError, row.path_of("dp")):
            nodes_of_ranks(llm, gpu, tp, dp)
    return dp


def _parse_ep(row: Section, gpu: Gpu, degrees: tuple[int, int], shared: _SharedSettings) -> bool:
    """Whether every GPU has whole experts; by default as in the fits. `degrees` are TP and ranks."""
    llm, (tp, dp) = shared.llm, degrees
    if dp > 1:
        if not row.flag("ep", True):
            raise row.error(
                "ep",
                f"slices of experts over data-parallel ranks are not modelled, must be true with dp {dp}",
            )
        return True
    # A row with step times of its own is taken to mean sliced experts, unless it says `ep: true`.
    default_ep = "latency" not in row and shared.catalog.expert_splits(llm, gpu, tp)[0]
    ep = row.flag("ep", default_ep)
    if ep and not (llm.is_mixture and tp > 1):
        obstacle = f"tp {tp}" if llm.is_mixture else f"no experts in {llm.name}"
        raise row.error("ep", f"needs a mixture of experts on several GPUs, found {obstacle}")
    return ep


def _parse_tp(row: Section, llm: Llm, gpu: Gpu) -> int:
    """The number of GPUs that each layer is split over, all in one node."""
    tp = row.whole_number("tp", 1, most=LARGEST_SETTING)
    if tp > gpu.gpus_per_node:
        raise row.error("tp", f"a node has {gpu.gpus_per_node} x {gpu.name}, found {tp}")
    if not llm.splits_over(tp):
        raise row.error(
            "tp",
            f"must divide the {llm.heads} heads of {llm.name}, and its {llm.kv_heads} "
            f"KV heads or be a multiple of them, found {tp}",
        )
    return tp


def _parse_kv_tokens(
    row: Section,
    gpu: Gpu,
    degrees: tuple[int, int, int],
    tokens: int,
    sampled_rows: int,
    drafter: Drafter,
    slots: LoraSlots | None,
    shared: _SharedSettings,
) -> int:
    """KV tokens of the worker, or of each of its data-parallel ranks, in whole blocks: as the row states, or
    computed by planner/models/memory.py. `degrees` are TP, PP and ranks; the largest step has `tokens` tokens
    and samples up to `sampled_rows`.
    """
    llm, (tp, pp, dp) = shared.llm, degrees
    kv_tokens = row.whole_number("kv_tokens", None, most=LARGEST_SETTING)
    if kv_tokens is not None:
        if kv_tokens < KV_BLOCK_TOKENS:
            raise row.error("kv_tokens", f"must hold one block of 16 tokens, found {kv_tokens}")
        return kv_tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    use = worker_memory(
        llm,
        gpu,
        tp,
        pp,
        max_num_batched_tokens=tokens,
        max_num_seqs=sampled_rows,
        dp=dp,
        settings=MemorySettings.of_engine(shared.engine),
    )
    use = drafter.add_to_memory(use, llm, tp)
    use = use if slots is None else slots.add_to_memory(use)
    if use.kv_tokens == 0:
        missing_bytes = KV_BLOCK_TOKENS * use.kv_bytes_per_token + use.step_bytes - use.kv_bytes
        raise InputError(
            f"{row.where}: {llm.name} does not fit {tp * pp * dp} x {gpu.name}: {missing_bytes / 1e9:.1f} GB "
            f"per GPU are missing (weights {use.weight_bytes / 1e9:.1f} of {use.budget_bytes / 1e9:.1f} GB); "
            "raise tp, or take a larger GPU"
        )
    return use.kv_tokens


def _step_times(
    value: object, gpu: Gpu, split: fits.Split, exchange: Exchange, shared: _SharedSettings
) -> tuple[StepLatency, fits.Form | None]:
    """The step times of a worker, and the form that the simulator uses in place of them, if there is one.
    `value` is the key `latency`: None for the catalog's step times, a file beside the fleet, or the mapping
    that a plan writes.
    """
    llm, catalog = shared.llm, shared.catalog
    tp, ep, dp, all2all = split
    engine = "vllm" if shared.engine is None else shared.engine.name
    step_latency = partial(catalog.step_latency, llm, gpu, tp, ep=ep, dp=dp, exchange=exchange, engine=engine)
    if value is None:
        return step_latency(), None
    if isinstance(value, Mapping) and "form" in value:
        form = fits.parse_form(Section.from_document(value, "latency", wording=FIT_WORDING))
        return step_latency(), form
    if isinstance(value, Mapping):
        fit = Section.from_document(value, "fit", fits.FIT_KEYS, wording=FIT_WORDING)
        latency = fits.parse_latency(fit, basis="fit without a basis")
        return catalog.with_spread(latency, llm, gpu, engine), fits.parse_simulated(fit)
    if not isinstance(value, str):
        raise InputError(f"expected a file such as fit.yaml, found {value!r}")
    path = shared.folder / value
    try:
        file, fit = fits.read_fit(path, tp, FIT_WORDING, ep=ep, dp=dp, all2all=all2all)
    except (OSError, ValueError):  # No file can have such a name.
        raise InputError(f"{value[:80]!r} is no name of a file") from None
    # A file that leaves out its LLM or its GPU is taken to be a fit of the worker's LLM or GPU.
    fitted_llm, fitted_gpu = file.get("llm"), file.get("gpu")
    if isinstance(fitted_llm, str) and _without_name(catalog.llm(fitted_llm)) != _without_name(llm):
        raise InputError(f"{path} is a fit of {fitted_llm}, the fleet serves {llm.name}")
    fitted_row = catalog.gpu(fitted_gpu).name if isinstance(fitted_gpu, str) else gpu.name
    if fitted_row not in (gpu.name, gpu.base):
        raise InputError(f"{path} is a fit on {fitted_gpu}, this worker has {gpu.name}")
    latency = catalog.with_spread(fits.parse_latency(fit, basis=f"fit {path}"), llm, gpu, engine)
    simulated = fits.parse_simulated(fit)
    if fitted_row == gpu.name:
        return latency, simulated
    # The fit is of the GPU without the power cap that this worker has.
    slowdowns = gpu.prefill_slowdown, gpu.decode_slowdown
    capped_form = None if simulated is None else simulated.with_power_cap(*slowdowns)
    return latency.with_power_cap(*slowdowns), capped_form


def _without_name(llm: Llm) -> Llm:
    """The LLM without its name and longest context, on which step times do not depend."""
    return replace(llm, name="", context_tokens=1)


def _parse_events(file: Section, pools: Sequence[Pool]) -> tuple[Disturbance, ...]:
    """The `events` during a simulation: {at: 60 s, down: dec-0}, {at: 90 s, up: dec-0}, {at: 10 s, slow:
    pre-1, factor: 1.5}. Workers are named by pool, dash and number, as in the results; `link` is the network,
    which can only be slow.
    """
    where = file.path_of("events")
    names = [name for pool in pools for name in pool.worker_names]
    events = []
    rows = check_rows(file.get("events", []), where, "events such as {at: 60 s, down: dec-0}")
    for number, row in enumerate(rows):
        section = Section.from_document(row, f"{where}[{number}]", EVENT_KEYS, wording=WORDING)
        kinds = [kind for kind in ("down", "up", "slow") if kind in section]
        if len(kinds) != 1 or "at" not in section or ("factor" in section) != (kinds == ["slow"]):
            raise refused_value(section.where, "needs at, and one of down, up, slow (with factor)", row)
        name = section.get(kinds[0])
        time_s, factor = section.at_least("at", "s"), section.number("factor", 1.0, above=0.0)
        if kinds == ["slow"] and name == "link":
            events.append(Disturbance(time_s, "link", factor=factor))
            continue
        if name not in names:
            raise InputError(
                f"{section.where}: no worker is called {name!r}; the workers are "
                f"{list_first(names, MOST_NAMED)}"
            )
        kind = cast(Literal["down", "up", "slow"], kinds[0])
        events.append(Disturbance(time_s, kind, names.index(name), factor))
    return tuple(events)
