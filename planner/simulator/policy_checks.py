"""Checks that the policies of a fleet go together, as their rows in planner/policies.py say.

initial_state.py calls `check_policies` before a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.errors import InputError
from planner.fleet import Fleet, Policies, WorkerType
from planner.models.kv_offload import is_common
from planner.models.parallelism import MAX_PP
from planner.policies import (
    BATCHING,
    BY_FIELD,
    MIXED_POOL,
    OF_DISTSERVE,
    POOLS,
    QUEUE,
    REPURPOSE,
    ROUTING,
    SPLITWISE,
    STATIC,
    STEPWISE,
    VLLM_V1,
    Batching,
    routes_to_ranks,
)


def check_policies(fleet: Fleet) -> None:
    """Raise InputError for policies that are unknown, do not go together, or do not go with the fleet."""
    policies = fleet.policies
    for name, rows in BY_FIELD.items():  # `rows` are those that this field of Policies may name.
        if (chosen := getattr(policies, name)) not in rows:
            raise InputError(f"policies.{name} is {chosen!r}, must be one of {', '.join(rows)}")
    batching = BATCHING[policies.batching]
    if batching.needs_reserve and not policies.reserve_tokens:
        raise InputError(f"policies.reserve_tokens is 0, must be > 0 for {batching.name}, which needs it")
    _check_caches(policies)
    if fleet.pinned and not ROUTING[policies.routing].pins:
        raise InputError(
            f"pinned: routing {policies.routing!r} does not go by what is pinned; take routing: "
            "pinned-prefix, or leave pinned out"
        )
    most_stages = max(pool.type.pp for pool in fleet.pools)
    if most_stages > MAX_PP:
        raise InputError(f"pp is {most_stages}, must be at most {MAX_PP}")
    for name in (policies.routing, policies.decode_routing):
        # `form` is set where the step times follow another formula than the planner's own.
        if ROUTING[name].by_formula and any(pool.type.form for pool in fleet.pools):
            raise InputError(
                f"policies.routing is {name!r}, which needs step times of the planner's own form"
            )
    _check_engine_has(policies, batching)
    _check_repurpose_after(policies)
    _check_topology(fleet, batching)
    if fleet.engine is not None and batching.code != VLLM_V1:
        raise InputError(
            f"engine: vllm forms its steps as vllm-v1 does, policies.batching is {batching.name!r}; drop one "
            "of the two"
        )
    _check_drafts(fleet, batching)
    _check_ranks(fleet, batching)
    _check_lora(fleet, batching)
    _check_offload(fleet, batching)
    for pool in fleet.running_pools:
        if pool.type.engine is not None and pool.type.engine.poll_steps > 1:
            _require_one_rank(f"{pool.name}: engine: poll_steps {pool.type.engine.poll_steps}", pool.type)
    if policies.long_prefill_token_threshold and batching.code != VLLM_V1:
        raise InputError(
            f"policies.long_prefill_token_threshold is vLLM's, must be 0 with batching {batching.name!r}"
        )
    if batching.simulator == OF_DISTSERVE and fleet.disturbances:
        raise InputError(f"disturbances: batching {batching.name!r} knows none; leave them out")
    if batching.is_one_stage and most_stages > 1:
        raise InputError(f"pp is {most_stages}, must be 1 with batching {batching.name!r}")
    if batching.is_whole_life and any(pool.role != "mixed" for pool in fleet.pools):
        raise InputError(
            f"policies.batching is {batching.name!r}, which keeps a request on one worker to its end; "
            "give all workers the role mixed"
        )


def _require_vllm(where: str, batching: Batching) -> None:
    """Raise InputError where steps are not formed as vLLM forms them."""
    if batching.code != VLLM_V1:
        raise InputError(f"{where}: needs batching vllm-v1, found {batching.name!r}")


def _require_default(where: str, policies: Policies, *names: str) -> None:
    """Raise InputError where one of these policies is not the default."""
    for name in names:
        if (value := getattr(policies, name)) != (default := getattr(Policies(), name)):
            raise InputError(f"{where}: needs {name} {default}, found {value!r}")


def _require_one_rank(where: str, worker_type: WorkerType) -> None:
    """Raise InputError for a worker with pipeline stages or data-parallel ranks."""
    if worker_type.pp > 1:
        raise InputError(f"{where}: is not simulated in pipelines, must be pp 1, found {worker_type.pp}")
    if worker_type.dp > 1:
        raise InputError(
            f"{where}: is not simulated with data-parallel ranks, must be dp 1, found {worker_type.dp}"
        )


def _check_topology(fleet: Fleet, batching: Batching) -> None:
    """Raise InputError for policies that are not simulated with a `network.topology`."""
    topology, policies = fleet.network.topology, fleet.policies
    if topology is None:
        return
    if batching.code == SPLITWISE:
        raise InputError(
            "network.topology: machines of batching 'splitwise' have links of their own; drop it"
        )
    if POOLS[policies.pools].code != STATIC:
        raise InputError(
            "network.topology: workers that change their role are not simulated on nodes; drop it"
        )


def _check_drafts(fleet: Fleet, batching: Batching) -> None:
    """Raise InputError for settings that are not simulated with speculative decoding."""
    # A drafter's key is its method and model; None for a pool without one. Mixed workers hand nothing over.
    drafters = {
        None if pool.type.speculation is None else pool.type.speculation.drafter_key
        for pool in fleet.running_pools
        if pool.role != "mixed"
    }
    if len(drafters) > 1:
        raise InputError(
            "speculative: a drafter's keys and values are handed over with the others, so prefill and decode "
            "workers need the same drafter"
        )
    for pool in fleet.running_pools:
        worker_type = pool.type
        if worker_type.speculation is None:
            continue
        where = f"{pool.name}: speculative"
        _require_vllm(where, batching)
        _require_default(where, fleet.policies, "admission")
        # Data-parallel ranks are refused by WorkerType itself (fleet.py).
        if worker_type.pp > 1:
            raise InputError(f"{where}: is not simulated in pipelines, must be pp 1, found {worker_type.pp}")
        if worker_type.form is not None:
            raise InputError(
                f"{where}: is simulated on the five numbers of a fit, and this worker's step times have "
                "another form"
            )
        if worker_type.max_num_batched_tokens < worker_type.max_num_seqs * worker_type.step_tokens:
            raise InputError(
                f"{where}: {worker_type.max_num_seqs} sequences of {worker_type.step_tokens} tokens each "
                f"need as many max_num_batched_tokens, found {worker_type.max_num_batched_tokens}"
            )


def _check_ranks(fleet: Fleet, batching: Batching) -> None:
    """Raise InputError for settings that are not simulated with data-parallel ranks."""
    policies = fleet.policies
    for pool in fleet.running_pools:
        if pool.type.dp == 1:
            continue
        where = f"{pool.name}: dp {pool.type.dp}"
        _require_vllm(where, batching)
        _require_default(where, policies, "admission", "pools")
        if not routes_to_ranks(policies, pool.role):
            name = "decode_routing" if pool.role == "decode" else "routing"
            value = getattr(policies, name)
            known = ", ".join(row.name for row in ROUTING.values() if row.is_of_whole_workers)
            raise InputError(
                f"{where}: {name} {value!r} looks into workers, and not into their ranks; take one of {known}"
            )


def _check_lora(fleet: Fleet, batching: Batching) -> None:
    """Raise InputError for settings that are not simulated with LoRA."""
    adapter_sets = {
        None if pool.type.lora is None else pool.type.lora.lora.adapters for pool in fleet.running_pools
    }
    if adapter_sets == {None}:  # No worker serves adapters.
        return
    if len(adapter_sets) > 1:
        raise InputError("lora: is of the whole fleet, found workers with other adapters, or none")
    _require_vllm("lora", batching)
    policies = fleet.policies
    _require_default("lora", policies, "admission")
    if QUEUE[policies.queue].reads_cache_state:
        raise InputError(f"lora: is not simulated with queue {policies.queue!r}; take fcfs, sjf, ljf or srpt")
    for pool in fleet.running_pools:
        _require_one_rank(f"{pool.name}: lora", pool.type)
        if pool.type.speculation is not None:
            raise InputError(f"{pool.name}: lora: is not simulated with speculative; drop one of the two")


def _check_offload(fleet: Fleet, batching: Batching) -> None:
    """Raise InputError for settings that are not simulated with KV offload."""
    policies, where = fleet.policies, "policies.kv_offload"
    if policies.kv_offload is None:
        return
    if not policies.prefix_cache:
        raise InputError(f"{where}: keeps what leaves prefix caches, which needs prefix_cache: true")
    _require_vllm(where, batching)
    _require_default(where, policies, "admission")
    if QUEUE[policies.queue].reads_cache_state:
        raise InputError(
            f"{where}: is not simulated with queue {policies.queue!r}; take fcfs, sjf, ljf or srpt"
        )
    # Decode workers load no blocks, so their tp does not matter.
    degrees = sorted({pool.type.tp for pool in fleet.running_pools if pool.role != "decode"})
    if policies.kv_offload.is_shared and not is_common(fleet.llm, degrees):
        raise InputError(
            f"{where}: shared: blocks of {fleet.llm.name} ({fleet.llm.kv_heads} KV heads) of workers with tp "
            f"{degrees[0]} are no use to those with tp {degrees[-1]}; give all one tp"
        )
    for pool in fleet.running_pools:
        worker_type = pool.type
        _require_one_rank(f"{pool.name}: {where}", worker_type)
        for name, setting in (("lora", worker_type.lora), ("speculative", worker_type.speculation)):
            if setting is not None:
                raise InputError(f"{pool.name}: {where}: is not simulated with {name}; drop one of the two")
        if worker_type.extra_kv.is_any:
            raise InputError(
                f"{pool.name}: {where}: {fleet.llm.name} has layers with windows or states, which is not "
                "simulated; leave kv_offload out"
            )


def _check_engine_has(policies: Policies, batching: Batching) -> None:
    """Raise InputError for policies that the batching's engine does not have, and for settings of the
    predicted output length or of the heartbeat that it cannot use.
    """
    for name, known in BY_FIELD.items():
        row = known[getattr(policies, name)]
        if batching.simulator in row.simulators:
            continue
        # If the engines that batch step by step, as vLLM, do not have it, it is of another batching's engine.
        if STEPWISE not in row.simulators:
            batchings = [other.name for other in BATCHING.values() if other.simulator in row.simulators]
            needed = " or ".join(map(repr, batchings))
            raise InputError(f"policies.{name} is {row.name!r}, which needs batching {needed}")
        possible = ", ".join(other.name for other in known.values() if batching.simulator in other.simulators)
        raise InputError(
            f"policies.{name} is {row.name!r}, must be one of {possible} with batching {batching.name!r}"
        )
    if policies.prediction_accuracy_frac is not None and policies.prediction_buckets:
        raise InputError(
            "policies: prediction_accuracy and prediction_buckets are two predictors; drop one of the two"
        )
    if not policies.heartbeat_s > 0:  # `not >`, because `<=` would let NaN pass.
        raise InputError(f"policies.heartbeat_s is {policies.heartbeat_s:g}, must be > 0")
    if policies.prediction_buckets < 0:
        raise InputError(f"policies.prediction_buckets is {policies.prediction_buckets}, must be >= 0")
    if policies.prediction_buckets and not batching.takes_predictions:
        raise InputError(
            f"policies.prediction_buckets is {policies.prediction_buckets}, must be 0 with batching "
            f"{batching.name!r}"
        )
    if policies.prediction_accuracy_frac is not None and not batching.takes_predictions:
        raise InputError(
            f"policies.prediction_accuracy_frac is {policies.prediction_accuracy_frac!r}, must be None with "
            f"batching {batching.name!r}"
        )


def _check_repurpose_after(policies: Policies) -> None:
    """Raise InputError where `repurpose_after` is given although the policy of pools does not use it, is
    missing although it needs it, or is negative.
    """
    pools, is_given = POOLS[policies.pools], policies.repurpose_after_s < math.inf
    if pools.code not in (MIXED_POOL, REPURPOSE) and is_given:
        raise InputError(
            f"policies.repurpose_after is of pools splitwise and repurpose, and policies.pools is "
            f"{policies.pools!r}; drop one of the two"
        )
    if pools.code == REPURPOSE and not is_given:
        raise InputError("policies.repurpose_after: pools 'repurpose' needs it, such as 2 min")
    if not policies.repurpose_after_s >= 0:
        raise InputError(f"policies.repurpose_after_s is {policies.repurpose_after_s:g}, must be >= 0")


def _check_caches(policies: Policies) -> None:
    """Raise InputError for policies that need prefix caches although the fleet has none, and for policies
    that are not simulated beside such caches or beside a policy that counts tenants. Raise it also for
    impossible weights of tenants and numbers of priority groups.
    """
    decode_row = ROUTING[policies.decode_routing]
    if decode_row.reads_cache_state:
        looked_at = (
            "prefixes: decode workers keep none"
            if decode_row.needs_caches
            else "tenants: routers know those of prompts alone"
        )
        raise InputError(
            f"policies.decode_routing is {policies.decode_routing!r}, must not look at {looked_at}"
        )
    for name, weight in policies.tenant_weights:
        if not 0 < weight < math.inf:
            raise InputError(f"policies.tenant_weights: {name} weighs {weight}, must be > 0")
    if QUEUE[policies.queue].reads_cache_state and (
        policies.queue_batch or policies.queue_window_s < math.inf
    ):
        raise InputError(
            f"policies.queue is {policies.queue!r}, which knows no longest_wait and no queue_batch"
        )
    rows = {name: known[getattr(policies, name)] for name, known in BY_FIELD.items()}
    if not policies.prefix_cache:
        for name, row in rows.items():
            if row.needs_caches:
                raise InputError(f"policies.{name} is {row.name!r}, which needs prefix_cache: true")
    counts_tenants = next((f"{name} {row.name}" for name, row in rows.items() if row.counts_tenants), None)
    if not policies.prefix_cache and counts_tenants is None:
        return
    # What may stand beside caches may also stand beside the counts of tenants, and nothing else may.
    possible: dict[str, Sequence[object]] = {
        name: [row.name for row in known.values() if row.with_caches] for name, known in BY_FIELD.items()
    }
    possible["vidur_restarts"] = [False]  # A setting, not a row of a table.
    for name, values in possible.items():
        if (value := getattr(policies, name)) not in values:
            raise InputError(
                f"policies.{name} is {value!r}, must be {' or '.join(map(str, values))} with "
                f"{'prefix_cache' if policies.prefix_cache else counts_tenants}"
            )
    if policies.priority_groups < 1:
        raise InputError(f"policies.priority_groups is {policies.priority_groups}, must be at least 1")
