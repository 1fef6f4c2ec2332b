"""The JSON Schema of slo.yaml. Its keys come from the tables of keys in planner/documents (`task.KEYS` and
others); this module describes their values. `with_help` adds the text that an editor shows.
"""

from importlib import import_module
from typing import Any, get_args

from planner.documents import (
    agents_traffic,
    kv_offload_settings,
    lora_settings,
    several_llms_question,
    speculative,
    task,
)
from planner.documents.catalog import SOLD_AS, Catalog
from planner.documents.commitments import KEYS as COMMITTED
from planner.documents.engine_file import FIRST_TOKENS, HOST_KEYS, NONE
from planner.documents.engine_file import KEYS as ENGINE_KEYS
from planner.documents.gpu_payment import MOST_OWNED, ElectricityPayer
from planner.documents.network import KEYS as ALL_NETWORK_KEYS
from planner.documents.network import PLAN_KEYS as NETWORK_KEYS
from planner.documents.network import TOPOLOGY_KEYS, TRANSFERS
from planner.documents.policy_choices import ANY as ANY_POLICY
from planner.documents.policy_choices import KEYS as POLICY_CHOICES
from planner.documents.policy_choices import KNOWN, MEAN
from planner.documents.policy_settings import POLICY_COUNTS, POLICY_NUMBERS, POLICY_SECONDS, POLICY_SHARES
from planner.documents.safety import LEAST_KEPT_FRAC, MOST_KEPT_FRAC
from planner.documents.schemas.values import (
    ANYTHING,
    COUNT,
    COUNT_OR_0,
    FLAG,
    NUMBER,
    NUMBER_ABOVE_0,
    NUMBER_FROM_0,
    NUMBER_FROM_1,
    NUMBERS,
    PRICE,
    RATE,
    SECONDS,
    SECONDS_OR_0,
    SHARE,
    SPEED,
    TEXT,
    Schema,
    any_of,
    by_name,
    number_schema,
    one_of,
    one_or_list,
    quantity_schema,
    section_schema,
    share_schema,
    text_with_suggestions,
    tokens,
    whole_number_schema,
    with_help,
)
from planner.documents.slo import CLASS_NAME, MATCH_KEYS, OF_REQUESTS
from planner.documents.traffic_description import (
    MOST_CV,
    MOST_GROWTH_FRAC,
    MOST_SKEW,
    MOST_SPREAD_FRAC,
    TENANT_KEYS,
)
from planner.files.document_values import LARGEST_COUNT
from planner.models.engine import NAMES as ENGINES
from planner.models.lora import MODULES
from planner.models.parallelism import MAX_PP
from planner.models.speculation import METHODS, MOST_DRAFTS
from planner.policies import BY_FIELD, ROUTERS_OF, STEPWISE
from planner.slo_metrics import METRICS
from planner.traffic.agents import MOST_AGENTS
from planner.traffic.scaling import Scaling
from planner.traffic.trace import MAX_TOKENS

# Percentiles of limits, p50 to p100 with decimals: a limit for less than half of the requests is no promise.
PERCENTILE = r"p(100(\.0+)?|[5-9]\d(\.\d+)?)"


def slo_schema(catalog: Catalog) -> Schema:
    """slo.yaml of one LLM, or of several under `llms`."""
    # Each key's schema stands once, under `$defs`: a key may occur at the top and in each entry of `llms`.
    definitions = question_keys(catalog)
    keys: dict[str, Schema] = {key: {"$ref": f"#/$defs/{key}"} for key in definitions}
    of_one_llm = {key: keys[key] for key in several_llms_question.OWN} | {
        "trace": with_help(TEXT, "The trace of this LLM, beside this file."),
        "model": with_help(TEXT, "The rows of the trace whose column `model` says this."),
    }
    # `llms` is a mapping from names to entries, or a list of entries with names.
    entry = section_schema(of_one_llm, required=("llm",)) | _one_slo()
    named_entry = entry | {"properties": {"name": TEXT, **entry["properties"]}}
    llms = any_of(by_name(entry), {"type": "array", "items": named_entry, "minItems": 1})
    # SHARED keys apply to all LLMs together, DEFAULTS to every LLM that has no such key of its own.
    keys_with_llms = ("llms", *several_llms_question.SHARED, *several_llms_question.DEFAULTS)
    document = section_schema(
        keys | {"llms": with_help(llms, "Several LLMs on one stock, each with its SLO.")}
    )
    # `section_schema` lets any key be null; none of these may be.
    document["properties"] |= {key: keys[key] for key in ("llm", "slo", "preset")}
    return document | {
        "if": {"required": ["llms"]},
        "then": {"propertyNames": {"enum": list(keys_with_llms)}},
        "else": {"required": ["llm"], **_one_slo()},
        "$defs": definitions,
    }


def question_keys(catalog: Catalog) -> dict[str, Schema]:
    """The keys of slo.yaml for one LLM."""
    schemas = {
        "llm": with_help(
            text_with_suggestions(catalog.llms), "The LLM: a row of catalogs/llms.yaml, or a config.json."
        ),
        "slo": with_help(slo_section(), "What the fleet must keep: metric, percentile, limit."),
        "preset": with_help(
            text_with_suggestions(catalog.slos), "A row of catalogs/slos.yaml, in place of slo."
        ),
        "traffic": with_help(
            traffic_section(catalog), "Which traffic: a rate and part of the trace, or a description."
        ),
        "fleet": with_help(fleet_section(catalog), "Which GPUs may be used, and what they cost."),
        "policies": with_help(policies_section(), "What the plan may choose of queues, routing and caches."),
        "engine": with_help(engine_section(), "The engine whose host time and scheduler are simulated."),
        "lora": with_help(lora_section(), "LoRA adapters that are served."),
        "objective": with_help(
            one_of((*get_args(task.Objective), task.SAME_AS_COST)),  # The last is a synonym of "cost".
            "What to make least; throughput: the most traffic within the limits.",
        ),
        "limits": with_help(
            section_schema(
                {
                    "power": quantity_schema("w"),
                    "cost": quantity_schema("usd_per_h"),
                    "gpus": whole_number_schema(most=LARGEST_COUNT),
                },
                task.LIMIT_KEYS,
            ),
            "What the fleet may take at most.",
        ),
        "spare": with_help(
            any_of(COUNT_OR_0, {"type": "string", "pattern": r"^\s*\d{1,4}\s*(workers?|nodes?)?\s*$"}),
            "Workers or nodes that may fail: '1 worker', '1 node'.",
        ),
        "robust": with_help(
            section_schema({"step_times": SHARE, "traffic": SHARE, "spread": FLAG}, task.ROBUST_KEYS),
            "In place of safety: how far steps and traffic may be off, all at once.",
        ),
        "safety": with_help(
            any_of(
                {"const": "none"},
                section_schema(
                    {
                        "kept_in": share_schema(least=LEAST_KEPT_FRAC, most=MOST_KEPT_FRAC),
                        "growth": SHARE,
                        "prefix_drift": SHARE,
                    }
                ),
            ),
            "In what share of scenarios the SLO must be kept, with how much growth, and how much of the "
            "popularity of prefixes moves to others; or none.",
        ),
        "deploy": with_help(
            section_schema({"target": one_of((*ROUTERS_OF, task.EACH_TARGET))}, required=("target",)),
            "The deployment target whose router is simulated; each: a price for every target.",
        ),
        "day": with_help(day_section(), "How pools may change during a day; read by `plan day`."),
    }
    # A key without a schema here may have any value: the reader of slo.yaml checks it.
    return {key: schemas.get(key, ANYTHING) for key in task.KEYS}


def _one_slo() -> Schema:
    """The part of a schema that requires one of `slo` and `preset`, and refuses both at once."""
    return {"oneOf": [{"required": ["slo"]}, {"required": ["preset"]}]}


def slo_section() -> Schema:
    """The section `slo`: limits by metric and percentile, as `ttft: {p90: 2 s}` or `ttft_p90: 2 s`, and
    beside them attainment, windows, tenants and classes.
    """
    lines: Schema = {
        "type": "object",
        "patternProperties": {f"^{PERCENTILE}$": SECONDS},
        "additionalProperties": False,
        "minProperties": 1,
    }
    metrics = {
        key: with_help(lines, f"{row.name[0].upper()}{row.name[1:]}: limits by percentile, such as p90: 2 s.")
        for key, row in METRICS.items()
    }
    other_keys = {
        "attainment": with_help(
            share_schema(least=None, above=0), "Share of requests that keep all their limits at once."
        ),
        "every": with_help(SECONDS, "The SLO must hold in every window of this length."),
    }
    of_class = {key: metrics[key] for key in OF_REQUESTS} | {
        "match": match_section(),
        "deadline": with_help(
            any_of(SECONDS, lines), "When requests that may wait must be complete; p99 of them."
        ),
    }
    least_share = with_help(
        share_schema(least=None, above=0), "The least part of a tenant's fair share of service."
    )
    window = with_help(SECONDS, "Judged in windows of this length; 1 min.")
    guarantee = section_schema({"share_frac": least_share, "window": window}, required=("share_frac",))
    tenants = by_name(guarantee) | {"minProperties": 1}
    other_keys["tenants"] = with_help(
        tenants, "What tenants get while their work waits, by name; `each` is all of them."
    )
    flat_keys = {f"^({'|'.join(OF_REQUESTS)})_{PERCENTILE}$": SECONDS}
    # A class has `match` and at least one line, so two keys; there is at least one class.
    one_class = section_schema(of_class, patterns=flat_keys, required=("match",))
    classes = by_name(one_class | {"minProperties": 2})
    classes |= {"propertyNames": {"pattern": CLASS_NAME}, "minProperties": 1}
    of_classes = {
        "classes": with_help(
            classes, "Limits by class of requests. A class names its requests under `match`."
        )
    }
    flat_lines = {f"^({'|'.join(METRICS)})_{PERCENTILE}$": SECONDS}
    limits = section_schema(other_keys | of_classes, patterns=flat_lines)
    # An SLO with none but these keys has no limit, so it is refused.
    no_limit = {"propertyNames": {"enum": list(other_keys)}}
    # `section_schema` lets any key be null; no metric may be.
    return limits | {"properties": metrics | limits["properties"], "not": no_limit}


def match_section() -> Schema:
    """The section `match` of a class: which requests are of the class, by names and by prompt length."""
    named = one_or_list(any_of(TEXT, {"type": "integer"}))
    bound = tokens(COUNT_OR_0)
    bounds = section_schema({"from": bound, "to": bound}) | {"minProperties": 1}
    keys = dict.fromkeys(MATCH_KEYS, named) | {"input_tokens": bounds}
    return with_help(
        section_schema(keys, MATCH_KEYS) | {"minProperties": 1}, "Which requests are of this class."
    )


def traffic_section(catalog: Catalog) -> Schema:
    """The section `traffic`: what is done with a trace, or a description of requests."""
    schemas: dict[str, Schema] = {
        "rate": with_help(any_of(RATE, *rate_curves()), "Requests/s; default: the trace's own."),
        "scale": with_help(one_of(get_args(Scaling)), "How a trace is brought to the rate."),
        "window": with_help(TEXT, "The part of the trace: whole, first 10 min, busiest 10 min."),
        "draws": with_help(COUNT, "The SLO must be kept on each of this many draws of the traffic."),
        "map": with_help({"type": "object"}, "Which column of a log is what: {arrival: created_at, ...}."),
        "timezone": with_help(TEXT, "Of times in a log that have none: Europe/Berlin."),
        "format": with_help(TEXT, "The log's format, where it is not found out."),
        "task": with_help(
            text_with_suggestions(catalog.tasks), "What requests are like: a row of catalogs/tasks.yaml."
        ),
        "duration": with_help(SECONDS, "The length of the traffic that is drawn."),
        "growth": with_help(
            section_schema(
                {"per_month": share_schema(most=MOST_GROWTH_FRAC), "months": NUMBER_FROM_0},
                required=("per_month", "months"),
            ),
            "Growth of the rate until the plan is used.",
        ),
        "drift": with_help(
            section_schema({"input": NUMBERS, "output": NUMBERS}),
            "How many standard deviations lengths lie above their mean, for every interval of the rate.",
        ),
        **_description_schemas(),
        "agents": with_help(
            any_of(whole_number_schema(most=MOST_AGENTS), agents_section()), "How many agents work at once."
        ),
    }
    one_tenant = section_schema(
        {key: schemas[key] for key in TENANT_KEYS} | {"rate": RATE}, required=("rate",)
    )
    schemas["tenants"] = with_help(
        any_of(COUNT, by_name(one_tenant) | {"minProperties": 2}),
        "How many tenants the clients belong to; or what each sends: {chat: {rate: 4, task: chat}, ...}.",
    )
    return section_schema(schemas, task.TRAFFIC_KEYS)


def _description_schemas() -> dict[str, Schema]:
    """The keys that describe requests to draw: lengths, clients, sessions and shared prefixes."""
    return {
        "input": with_help(lengths_schema(), "Prompt tokens: a mean, or mean and percentiles."),
        "output": with_help(lengths_schema(), "Tokens of an answer, likewise."),
        "joint": with_help(
            any_of(
                {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
                section_schema(
                    {"table": {"type": "array", "items": NUMBERS, "minItems": 2}}, required=("table",)
                ),
            ),
            "Rank correlation of prompt and answer.",
        ),
        "burstiness": with_help(
            section_schema({"cv": number_schema(least=0, most=MOST_CV), "fano": by_name(NUMBER_ABOVE_0)}),
            "CV of gaps between requests, Fano factors by window.",
        ),
        "clients": with_help(
            section_schema(
                {
                    "count": COUNT,
                    "skew": number_schema(least=0, most=MOST_SKEW),
                    "cv": number_schema(least=0, most=MOST_CV),
                    "lengths": share_schema(most=MOST_SPREAD_FRAC),
                }
            ),
            "How many clients send the requests, and how unequal they are.",
        ),
        "sessions": with_help(
            section_schema(
                {
                    "turns": NUMBER_FROM_1,
                    "think_time": SECONDS_OR_0,
                    "most_tokens": tokens(whole_number_schema(most=MAX_TOKENS)),
                },
                required=("turns", "think_time"),
            ),
            "Conversations: every turn repeats what came before.",
        ),
        "prefixes": with_help(
            section_schema(
                {
                    "shared": tokens(whole_number_schema(most=MAX_TOKENS)),
                    "count": COUNT,
                    "skew": NUMBER_FROM_0,
                },
                required=("shared",),
            ),
            "Tokens at the beginning that prompts share.",
        ),
    }


def agents_section() -> Schema:
    """The section `agents`; missing keys come from a row of catalogs/tasks.yaml."""
    pause = any_of(
        SECONDS_OR_0, section_schema({"mean": SECONDS_OR_0, "cv": NUMBER_FROM_0}, required=("mean",))
    )
    sub_agents = {
        "per_task": NUMBER_FROM_0,
        "at_once": whole_number_schema(most=agents_traffic.MOST_AT_ONCE),
        "turns": NUMBER_FROM_1,
    }
    repository = {
        "tokens": tokens(NUMBER_FROM_0),
        "count": whole_number_schema(most=agents_traffic.MOST_REPOSITORIES),
        "skew": NUMBER_FROM_0,
    }
    schemas: dict[str, Schema] = {
        "count": whole_number_schema(most=MOST_AGENTS),
        "turns": with_help(NUMBER_FROM_1, "Mean turns of a task, geometric."),
        "tasks": with_help(NUMBER_FROM_1, "Mean tasks of a session, which keeps its context."),
        "tool": with_help(pause, "What a tool takes, before each turn of a task but the first."),
        "idle": with_help(pause, "How long an agent rests before each task."),
        "system": with_help(
            tokens(number_schema(least=0, most=MAX_TOKENS)), "Tokens that all prompts begin with."
        ),
        "repository": section_schema(repository),
        "start": with_help(lengths_schema(), "A session's own tokens before its first turn."),
        "sub_agents": section_schema(sub_agents, required=("per_task",)),
        "most_tokens": tokens(whole_number_schema(most=MAX_TOKENS)),
    }
    return section_schema(schemas, agents_traffic.KEYS, required=("count",))


def rate_curves() -> tuple[Schema, ...]:
    """A rate by interval, or by the hours of a week."""
    rates: Schema = {"type": "array", "items": NUMBER_FROM_0, "minItems": 1}
    # A list of all hours of the week, or a list for each day.
    week = any_of(rates, {"type": "array", "items": rates, "minItems": 7, "maxItems": 7})
    return (
        section_schema({"curve": rates, "every": SECONDS}, required=("curve", "every")),
        section_schema({"weekly": week, "mean": RATE, "peak": RATE}, required=("weekly",)),
    )


def lengths_schema() -> Schema:
    """Tokens of prompts or answers: a mean, a distribution, or a mean and percentiles."""
    length = tokens(NUMBER_FROM_1)
    return any_of(
        length,
        section_schema({"fixed": tokens(whole_number_schema(most=MAX_TOKENS))}, required=("fixed",)),
        section_schema(
            {"lognormal": section_schema({"mean": length, "cv": NUMBER_FROM_0}, required=("mean",))},
            required=("lognormal",),
        ),
        section_schema(
            {
                "histogram": section_schema(
                    {"edges": NUMBERS, "counts": NUMBERS}, required=("edges", "counts")
                )
            },
            required=("histogram",),
        ),
        section_schema({"mean": length, "max": length}, patterns={r"^p\d{1,2}(\.\d+)?$": length})
        | {"minProperties": 1},
    )


def fleet_section(catalog: Catalog) -> Schema:
    """The section `fleet` of slo.yaml: what may be bought, and at which prices."""
    gpus = tuple(catalog.gpus)
    price = PRICE
    spot_terms = {
        "spot_interruptions_per_h": share_schema(most=task.MOST_INTERRUPTIONS_PER_H),
        "spot_restart": SECONDS,
    }
    terms = section_schema(
        {
            "on_demand": price,
            "reserved": price,
            **dict.fromkeys(COMMITTED, price),
            "spot": price,
            **spot_terms,
        },
        task.PRICE_KEYS,
    )
    # A spot price needs its interruptions, and terms of spot need a price.
    terms["dependentRequired"] = {"spot": ["spot_interruptions_per_h"]} | {
        key: ["spot"] for key in spot_terms
    }
    stock = {"type": ["integer", "null"], "minimum": 0, "maximum": LARGEST_COUNT}

    def numbers_schema(most: int = task.MOST_TOKENS) -> Schema:
        return one_or_list(whole_number_schema(most=most))

    schemas: dict[str, Schema] = {
        "gpus": with_help(
            any_of(
                by_name(any_of(stock, {"const": "unlimited"}), gpus),
                {"type": "array", "items": text_with_suggestions(gpus)},
                {"const": task.ANY},
            ),
            "GPUs that may be used, with the stock of each; any, the default: all with measured step times.",
        ),
        "owned": with_help(
            by_name(whole_number_schema(0, MOST_OWNED), gpus), "How many of them are already there."
        ),
        "sold_as": with_help(by_name(one_of(SOLD_AS), gpus), "Whether whole nodes are sold, or single GPUs."),
        "electricity": with_help(
            section_schema(
                {
                    "price": quantity_schema("usd_per_kwh"),
                    "pue": NUMBER_FROM_1,
                    "of": one_of(get_args(ElectricityPayer)),
                },
                required=("price", "pue"),
            ),
            "What electricity costs beside the GPUs' prices.",
        ),
        "unchecked": with_help(FLAG, "Whether GPUs whose step times nobody checked may be used."),
        "per_gpu": with_help(FLAG, "Whether to plan on each GPU type alone too."),
        "pp": with_help(numbers_schema(MAX_PP), "Pipeline stages of a worker that may be chosen."),
        "dp": with_help(numbers_schema(task.MAX_DP), "Data-parallel ranks of a worker that may be chosen."),
        "max_num_batched_tokens": with_help(
            numbers_schema(), "Tokens per step of an engine that may be chosen."
        ),
        "max_num_seqs": with_help(numbers_schema(), "Requests per step of an engine that may be chosen."),
        "network": with_help(network_section(NETWORK_KEYS), "What carries KV blocks between workers."),
        "prices": with_help(by_name(any_of(price, terms), gpus), "Prices in place of the catalog's."),
        "price_of": with_help(
            section_schema(
                {"provider": TEXT, "term": one_of(("on-demand", *COMMITTED.values())), **spot_terms},
                task.PRICE_OF_KEYS,
                required=("provider",),
            ),
            "A provider whose price list counts.",
        ),
        "least_off_spot": with_help(
            COUNT_OR_0, "The fewest workers of each role that are not on the spot market."
        ),
        "host_overhead": with_help(SECONDS_OR_0, "Added to every step, in place of the section engine."),
    }
    return section_schema(schemas, task.FLEET_KEYS)


def network_section(keys: tuple[str, ...] = ALL_NETWORK_KEYS) -> Schema:
    """The section `network` with these `keys`: all of them in fleet.yaml, NETWORK_KEYS in slo.yaml."""
    speed = SPEED
    topology: dict[str, Schema] = {
        "within": with_help(speed, "NVLink of a node."),
        "nodes_per_rack": with_help(COUNT, "Left out: a single rack."),
        "rack_bandwidth": with_help(speed, "The uplink of a rack."),
    }
    schemas: dict[str, Schema] = {
        "bandwidth": with_help(speed, "Of the link between workers; with a topology of that of each node."),
        "latency": with_help(SECONDS_OR_0, "Of each transfer."),
        "transfer": with_help(
            one_of(TRANSFERS), "layerwise: KV is sent during the last prefill step; serialised: after it."
        ),
        "topology": with_help(
            section_schema(topology, TOPOLOGY_KEYS), "Nodes and racks, each with its own link."
        ),
        "layerwise_from": with_help(COUNT_OR_0, "Shorter prompts, in tokens, are sent after the prefill."),
        "shared": with_help(FLAG, "Whether transfers wait for each other; else none slows another down."),
    }
    return section_schema(schemas, keys)


def policies_section() -> Schema:
    """For every field of `Policies` the rows that may be chosen, and the settings of fleet.yaml. A plan is
    simulated by the kernel that batches step by step (STEPWISE), so only rows of that kernel may be chosen.
    """
    rows = {
        field: [row.name for row in table.values() if STEPWISE in row.simulators]
        for field, table in BY_FIELD.items()
    }
    schemas: dict[str, Schema] = {
        field: with_help(
            any_of({"const": ANY_POLICY}, one_or_list(one_of(names), distinct=True)),
            f"What may be chosen as {field.replace('_', ' ')}; any: all that the target has.",
        )
        for field, names in rows.items()
    } | {
        **policy_settings(),
        "prediction": with_help(
            one_or_list(any_of(one_of((ANY_POLICY, KNOWN, MEAN)), SHARE), distinct=True),
            "What schedulers believe of output lengths.",
        ),
        "longest_wait": with_help(SECONDS, "Nobody is overtaken by what arrives this much later."),
        "prefix_cache": with_help(FLAG, "Whether hits in prefix caches may be counted on."),
        "kv_offload": with_help(kv_offload_section(), "CPU memory behind the prefix caches."),
        "research": with_help(FLAG, "Whether `any` includes policies that no target deploys."),
    }
    return section_schema(schemas, POLICY_CHOICES)


def policy_settings() -> dict[str, Schema]:
    """The settings of policies by their key, in fleet.yaml and slo.yaml."""
    return {
        **dict.fromkeys(POLICY_SECONDS, SECONDS),
        **dict.fromkeys(POLICY_COUNTS, COUNT_OR_0),
        **dict.fromkeys(POLICY_SHARES, SHARE),
        **dict.fromkeys(POLICY_NUMBERS, NUMBER_ABOVE_0),
        "headroom": any_of(number_schema(above=0, most=1), TEXT),
        "tenant_weights": by_name(NUMBER_ABOVE_0),
    }


def kv_offload_section() -> Schema:
    """CPU memory behind the prefix caches, alone or with a disk behind it; its size may be 0 with a disk."""
    memory: dict[str, Schema] = {"size": quantity_schema("bytes"), "bandwidth": SPEED}
    memory_alone = section_schema(
        memory | {"shared": FLAG}, ("size", "bandwidth", "shared"), required=tuple(memory)
    )
    with_disk = memory | {
        "size": quantity_schema("bytes", positive=False),
        "shared": FLAG,
        "disk": section_schema(memory, required=tuple(memory)),
    }
    memory_and_disk = section_schema(with_disk, kv_offload_settings.KEYS, required=(*memory, "disk"))
    return any_of({"const": kv_offload_settings.NONE}, memory_alone, memory_and_disk)


def engine_section() -> Schema:
    """The section `engine`; planner/models/engine.py says what its constants are."""
    host = section_schema(dict.fromkeys(HOST_KEYS, SECONDS_OR_0))
    schemas: dict[str, Schema] = {
        "name": one_of(ENGINES),
        "version": any_of({"type": "string", "pattern": r"^v?\d{1,4}(\.\d{1,4}){1,3}$"}, {"type": "number"}),
        "async_scheduling": with_help(FLAG, "Whether the next step is scheduled while one runs."),
        "host": with_help(host, "Host time of a step: of each, of each sequence, by log2 TP."),
        "rest": with_help(host, "With async scheduling: host time that runs beside no step."),
        "front_end": with_help(SECONDS_OR_0, "From a request's arrival to its worker."),
        "prompt_token": with_help(SECONDS_OR_0, "What the tokenizer takes for a prompt token."),
        "hand_off": with_help(SECONDS_OR_0, "From the prefill's end to the decode worker."),
        "first_hand_off": with_help(SECONDS_OR_0, "How much longer two workers' first one takes."),
        "first_token": with_help(one_of(FIRST_TOKENS), "Which worker sends the first token of an answer."),
        "mixed_steps": with_help(FLAG, "Whether a step may hold prompts and decodes."),
        "poll_steps": with_help(COUNT, "SGLang: steps of decodes until it looks for new requests."),
        "latent_launch": with_help(
            SECONDS_OR_0, "Host time per layer of latent attention or states in steps with prompts."
        ),
        "tokens_per_s": with_help(NUMBER_ABOVE_0, "Most tokens/s that an API server passes on."),
        "basis": with_help(TEXT, "Where the constants are from."),
        "nearest": FLAG,
        "checked": FLAG,
        "images": ANYTHING,
        "speculative": speculative_section(),
    }
    return any_of(one_of((*ENGINES, NONE)), section_schema(schemas, ENGINE_KEYS))


def speculative_section() -> Schema:
    """Drafts of an engine or of a worker (documents/speculative.py)."""
    acceptance = any_of(SHARE, TEXT, {"type": "array", "items": SHARE})
    schemas: dict[str, Schema] = {
        "method": one_of(METHODS),
        "tokens": with_help(
            one_or_list(whole_number_schema(0, MOST_DRAFTS)), "Drafts per step; of a list the plan chooses."
        ),
        "acceptance": with_help(
            acceptance,
            "How likely each draft is accepted if those before it are: one number, one for each, or a row of "
            "catalogs/acceptance.yaml.",
        ),
        "model": with_help(TEXT, "The drafter."),
        "draft": with_help(
            share_schema(most=speculative.MOST_DRAFT_FRAC), "A pass of the drafter, of a step of the LLM."
        ),
        "draft_step": with_help(SECONDS_OR_0, "What a pass of the drafter takes on top."),
        "basis": with_help(TEXT, "Where the numbers are from."),
    }
    drafts = section_schema(schemas, speculative.KEYS, required=("method", "tokens", "acceptance"))
    return any_of({"const": speculative.NONE}, drafts)


def lora_section() -> Schema:
    """How adapters are served (documents/lora_settings.py)."""
    schemas: dict[str, Schema] = {
        "max_loras": with_help(COUNT, "vLLM's setting: adapters in GPU memory at once."),
        "max_rank": with_help(COUNT, "vLLM's setting: the largest rank of an adapter."),
        "adapters": with_help(
            any_of(
                whole_number_schema(most=lora_settings.MOST_ADAPTERS),
                {"type": "array", "items": TEXT, "minItems": 1},
            ),
            "All adapters that are served: how many, or their names.",
        ),
        "max_cpu_loras": with_help(COUNT, "vLLM's setting: adapters in the host's memory; default: all."),
        "targets": any_of({"const": "all"}, {"type": "array", "items": one_of(MODULES), "minItems": 1}),
        "link": with_help(SPEED, "From the host's memory to a GPU."),
        "disk": with_help(SPEED, "From disk into the host's memory."),
        "longer": with_help(
            share_schema(most=lora_settings.MOST_LONGER_FRAC), "How much longer LoRA takes than predicted."
        ),
    }
    required = ("max_loras", "max_rank", "adapters")
    return any_of(
        {"const": lora_settings.NONE}, section_schema(schemas, lora_settings.KEYS, required=required)
    )


def day_section() -> Schema:
    """How pools may change during a day (planner/day/day_settings.py)."""
    # `planner.day` is a room above this one and imports it, so it is imported only when a schema is made. The
    # test of the architecture allows it here, as a schema has all keys, also those of rooms above.
    settings: Any = import_module("planner.day.day_settings")
    table: Any = import_module("planner.day.controllers.table")
    controller = any_of({"type": "object"}, {"type": "null"})
    named = by_name(controller, table.CONTROLLERS)
    schemas: dict[str, Schema] = {
        "every": with_help(SECONDS, "The grid from which the optimum starts."),
        "controllers": with_help(
            any_of(TEXT, {"type": "array", "items": TEXT}, named), "Names, or names with their parameters."
        ),
        "train": with_help(
            any_of(NUMBER, TEXT), "The first part of the traffic, on which parameters are chosen: 70 %."
        ),
        "start": with_help(SECONDS_OR_0, "What a worker takes to start."),
        "storage": with_help(
            TEXT, "Where weights come from: a row of catalogs/startup.yaml, in place of start."
        ),
        "image": with_help(TEXT, "Where the image comes from, likewise; none: nodes have it."),
        "warm": with_help(COUNT_OR_0, "How many workers at a time start in `warm_start`."),
        "warm_start": SECONDS_OR_0,
        "drain": with_help(
            SECONDS, "A worker that is given up is stopped after this time, whatever it runs."
        ),
        "billing": with_help(one_of(settings.BILLINGS), "hour: every started hour is paid."),
        "least": with_help(COUNT_OR_0, "Least workers of every pool."),
        "most": with_help(COUNT, "Most workers of every pool."),
        "missed_window": with_help(
            NUMBER_FROM_0, "What a missed window counts [USD] where the best is chosen."
        ),
        "missed": with_help(
            any_of(NUMBER, TEXT), "The best is the cheapest that misses no larger share of the windows: 1 %."
        ),
        "optimum": with_help(FLAG, "Whether the optimum is looked for."),
        "fleets": with_help(
            one_of((settings.ALL_FLEETS, settings.PLAN_ALONE)), "plan: only the cheapest fleet that stands."
        ),
        "types": with_help(
            one_of((settings.CHANGE_TYPES, settings.FIXED_TYPES)),
            "change: also the optimum if worker types and roles change within the day.",
        ),
        "oracle": with_help(
            FLAG, "Public autoscalers, tuned on the first 70 %, with manifests of all of them."
        ),
        "sleep": with_help({"enum": [1, 2]}, "vLLM's sleep level of workers of several LLMs."),
    }
    return section_schema(schemas, settings.KEYS)
