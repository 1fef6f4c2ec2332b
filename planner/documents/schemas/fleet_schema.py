"""The JSON Schemas of fleet.yaml, and of plan.yaml, which is a fleet with the results of its plan."""

from typing import get_args

from planner.documents import fits, fleet_file
from planner.documents.catalog import SOLD_AS, Catalog
from planner.documents.certificate import Status
from planner.documents.policy_settings import LARGEST_SETTING, MOST_STEP_TOKENS, POLICY_KEYS
from planner.documents.schemas import slo_schema
from planner.documents.schemas.values import (
    COUNT,
    COUNT_OR_0,
    FLAG,
    NUMBER,
    NUMBER_ABOVE_0,
    NUMBER_FROM_0,
    NUMBERS,
    PRICE,
    SECONDS,
    SECONDS_OR_0,
    TEXT,
    Schema,
    any_of,
    by_name,
    one_of,
    quantity_schema,
    section_schema,
    text_with_suggestions,
    whole_number_schema,
    with_help,
)
from planner.domain import KV_BLOCK_TOKENS
from planner.fleet import Role
from planner.policies import BY_FIELD


def fleet_schema(catalog: Catalog) -> Schema:
    """fleet.yaml: what `plan simulate`, `goodput` and `compare` take."""
    return section_schema(_fleet_keys(catalog), fleet_file.FLEET_KEYS, required=("llm", "workers"))


def plan_schema(catalog: Catalog) -> Schema:
    """plan.yaml: the fleet, what it costs, what it was planned for and what was simulated."""
    amount = NUMBER_FROM_0
    plan_keys: dict[str, Schema] = {
        "status": with_help(text_with_suggestions(get_args(Status)), "What was proved of the plan."),
        "cost_usd_per_h": with_help(amount, "What is paid, whole nodes where these are sold."),
        "power_w": with_help(amount, "What the fleet may draw at most."),
        "gpus": with_help(COUNT_OR_0, "GPUs of all workers."),
        "slo": with_help(slo_schema.slo_section(), "The SLO that the plan keeps."),
        "max_model_len": COUNT,
    }
    document = section_schema(
        _fleet_keys(catalog) | plan_keys, (*fleet_file.FLEET_KEYS, *fleet_file.PLAN_KEYS)
    )
    return document | {"required": ["status", "llm", "workers"]}


def _fleet_keys(catalog: Catalog) -> dict[str, Schema]:
    gpus = tuple(catalog.gpus)
    return {
        "llm": with_help(
            text_with_suggestions(catalog.llms), "The LLM: a row of catalogs/llms.yaml, or a config.json."
        ),
        "workers": with_help(
            {"type": "array", "items": worker_schema(catalog), "minItems": 1}, "The pools of the fleet."
        ),
        "policies": with_help(policies_schema(), "How requests are queued, batched, routed and admitted."),
        "engine": with_help(
            slo_schema.engine_section(), "The engine whose host time and scheduler are simulated."
        ),
        "lora": with_help(slo_schema.lora_section(), "LoRA adapters that are served."),
        "network": with_help(slo_schema.network_section(), "What carries KV blocks between workers."),
        "host_overhead": with_help(SECONDS_OR_0, "Added to every step, in place of the section engine."),
        "events": with_help(
            {"type": "array", "items": event_schema()}, "Workers that fail, return or slow down."
        ),
        "pinned": with_help({"type": "array", "items": _pinned_schema()}, "Prefixes that workers hold."),
        "prices": with_help(by_name(PRICE, gpus), "In place of the catalog's."),
        "sold_as": with_help(by_name(one_of(SOLD_AS), gpus), "Whether whole nodes are sold, or single GPUs."),
        "electricity": with_help(
            by_name(quantity_schema("usd_per_kwh", positive=False), gpus), "Beside the prices."
        ),
        "max_model_len": with_help(COUNT, "Tokens of the longest request."),
    }


def worker_schema(catalog: Catalog) -> Schema:
    """One pool: this many workers of one type in one role."""
    schemas: dict[str, Schema] = {
        "name": with_help(TEXT, "The pool's name; its workers are name-0, name-1, ..."),
        "role": with_help(one_of(get_args(Role)), "What its workers do; default: mixed."),
        "gpu": with_help(
            text_with_suggestions(catalog.gpus), "A row of catalogs/gpus.yaml; h100-80g@350W is capped."
        ),
        "tp": with_help(COUNT, "GPUs that share every layer."),
        "pp": with_help(COUNT, "Pipeline stages."),
        "ep": with_help(FLAG, "Whether every GPU has whole experts."),
        "dp": with_help(COUNT, "Data-parallel ranks."),
        "count": with_help(COUNT, "Workers of this pool."),
        "latency": with_help(
            latency_schema(), "Step times: a fit's file or the fit; default: the catalog's."
        ),
        "kv_tokens": with_help(
            whole_number_schema(KV_BLOCK_TOKENS, LARGEST_SETTING),
            "Tokens that its KV cache holds; default: what memory leaves.",
        ),
        "max_num_seqs": with_help(
            whole_number_schema(most=fleet_file.MOST_SEQS), "Requests of one step at most."
        ),
        "max_num_batched_tokens": with_help(
            whole_number_schema(most=MOST_STEP_TOKENS), "Tokens of one step at most."
        ),
        "speculative": with_help(slo_schema.speculative_section(), "Drafted tokens."),
    }
    return section_schema(schemas, fleet_file.WORKER_KEYS, required=("gpu",))


def latency_schema() -> Schema:
    """The name of a file, a fit, or the form of another program's step times."""
    forms = [
        section_schema(
            {"form": {"const": name}}
            | dict.fromkeys(list_keys, NUMBERS)
            | dict.fromkeys(number_keys, NUMBER),
            required=("form",),
        )
        for name, (_, list_keys, number_keys) in fits.FORMS.items()
    ]
    list_keys = ("knots_tokens", "f_s", "joint_s")
    number_keys = (*fits.NUMBERS, *fits.OPTIONAL, "m_s")
    schemas: dict[str, Schema] = {
        "tp": COUNT,
        "ep": FLAG,
        "dp": COUNT,
        "all2all": {"type": "string"},
        "basis": TEXT,
        "kind": TEXT,
        "errors": {"type": "object"},
        "simulated": {"type": "object", "required": ["form"]},
        "spread": {"type": "object"},
        **dict.fromkeys(list_keys, NUMBERS),
        **dict.fromkeys(number_keys, NUMBER),
    }
    return any_of(TEXT, section_schema(schemas, fits.FIT_KEYS, required=("knots_tokens", "f_s")), *forms)


def policies_schema() -> Schema:
    """Every row of planner/policies.py by its field, and the settings beside them."""
    schemas: dict[str, Schema] = {
        **{field: one_of(rows) for field, rows in BY_FIELD.items()},
        **slo_schema.policy_settings(),
        "max_num_batched_tokens": whole_number_schema(most=MOST_STEP_TOKENS),
        "prefix_cache": FLAG,
        "kv_offload": slo_schema.kv_offload_section(),
        "vidur_restarts": FLAG,
        "due": with_help(
            by_name(
                section_schema(
                    {"match": slo_schema.match_section(), "within": SECONDS}, required=("match", "within")
                )
            ),
            "For the queue edf: how long after its arrival a request of each class is due.",
        ),
    }
    return section_schema(schemas, POLICY_KEYS)


def event_schema() -> Schema:
    """Something that happens to a worker, or to the link, at a time."""
    schemas = {"at": SECONDS_OR_0, "down": TEXT, "up": TEXT, "slow": TEXT, "factor": NUMBER_ABOVE_0}
    one_kind = {"oneOf": [{"required": [kind]} for kind in ("down", "up", "slow")]}
    return section_schema(schemas, fleet_file.EVENT_KEYS, required=("at",)) | one_kind


def _pinned_schema() -> Schema:
    """A prefix that some workers hold from the start on, by the ids of its blocks in a trace."""
    schemas = {
        "workers": {"type": "array", "items": TEXT, "minItems": 1},
        "block_tokens": whole_number_schema(most=MOST_STEP_TOKENS),
        "block_ids": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
    }
    return section_schema(schemas, fleet_file.PINNED_KEYS, required=("workers", "block_ids"))
