"""The section `policies`: how fleet.yaml and slo.yaml write names and settings of planner/policies.py."""

from collections.abc import Iterable, Iterator
from typing import Any

from planner.documents.kv_offload_settings import kv_offload_document, parse_kv_offload
from planner.documents.slo import parse_selector, selector_document
from planner.domain import Selector
from planner.files.document_values import Section
from planner.fleet import Policies
from planner.policies import BY_FIELD, QUEUE
from planner.units import show_exactly

MOST_STEP_TOKENS = 2**20  # The simulator has a table of step times up to this many tokens.
LARGEST_SETTING = 10**9  # A larger count of anything else (tokens, GPUs, workers) is a typing error.
# Keys of the section -> fields of `Policies`, in one table for each kind of value.
_TIMES = (
    *("heartbeat", "flip_after", "flip_restart", "repurpose_after", "ttft", "tbt", "eviction_notice"),
    *("share_window", "load_period"),
)
POLICY_SECONDS = {"longest_wait": "queue_window_s", **{key: f"{key}_s" for key in _TIMES}}
_COUNTS = (
    *("prediction_buckets", "decode_batch_tokens", "decode_batch", "heavy_tokens"),
    *("long_prefill_token_threshold", "seed", "quantum_tokens", "worker_quantum_tokens"),
    *("priority_groups", "balance_requests"),
)
POLICY_COUNTS = {key: key for key in ("queue_batch", "reserve_tokens")} | {"patience": "patience_steps"}
POLICY_COUNTS |= {key: key for key in _COUNTS}
POLICY_SHARES = {
    "prediction_accuracy": "prediction_accuracy_frac",
    "predictor_slowdown": "predictor_slowdown_frac",
    "watermark": "watermark_frac",
    "headroom": "headroom_frac",
    "context_weight": "context_weight",
    "explore_decode": "explore_decode_frac",
    "cache_threshold": "cache_threshold_frac",
}
POLICY_NUMBERS = {key: key for key in ("extend_weight", "output_weight", "balance_ratio", "replicate_ratio")}
POLICY_KEYS = (
    *BY_FIELD,
    *POLICY_SECONDS,
    *POLICY_COUNTS,
    *POLICY_SHARES,
    *POLICY_NUMBERS,
    *("max_num_batched_tokens", "prefix_cache", "kv_offload", "tenant_weights", "vidur_restarts"),
    "due",
)


def parse_policies(section: Section) -> tuple[Policies, int | None]:
    """The policies of fleet.yaml, and `max_num_batched_tokens` of workers that state none of their own."""
    chosen: dict[str, Any] = {
        name: section.one_of(name, tuple(rows)) for name, rows in BY_FIELD.items() if name in section
    }
    chosen |= parse_settings(section)
    for name in ("vidur_restarts", "prefix_cache"):
        chosen[name] = section.flag(name, False)
    chosen["kv_offload"] = parse_kv_offload(section)
    chosen["due"] = tuple(_parse_due(section))
    policies = Policies(**chosen)
    if QUEUE[policies.queue].by_deadline and not policies.due:
        raise section.error(
            "queue",
            "edf goes by the times of classes; add due: {chat: {match: {tenant: chat}, within: 0.5 s}}",
        )
    return policies, section.whole_number("max_num_batched_tokens", None, most=MOST_STEP_TOKENS)


def _parse_due(section: Section) -> Iterator[tuple[Selector, float]]:
    """The classes of `due: {chat: {match: {tenant: chat}, within: 0.5 s}}`, with the time of each [s]."""
    due = section.subsection("due")
    for name in due.values:
        due_class = due.subsection(name, ("match", "within"))
        where = due_class.path_of("match")
        yield parse_selector(str(name), due_class.get("match"), where), due_class.positive("within", "s")


def parse_settings(section: Section) -> dict[str, Any]:
    """The fields of `Policies` that the section sets, other than names of policies."""
    chosen: dict[str, Any] = {}
    for name in section.values:
        if name in POLICY_SECONDS:
            chosen[POLICY_SECONDS[name]] = section.positive(name, "s")
        elif name in POLICY_COUNTS:
            chosen[POLICY_COUNTS[name]] = section.whole_number(name, least=0, most=LARGEST_SETTING)
        elif name in POLICY_SHARES:
            chosen[POLICY_SHARES[name]] = section.share(name)
        elif name in POLICY_NUMBERS:
            chosen[POLICY_NUMBERS[name]] = section.number(name, above=0.0)
    if section.get("headroom") == 0:
        raise section.error("headroom", "of 0 no request would ever be packed; must be > 0")
    weights = section.subsection("tenant_weights")
    chosen["tenant_weights"] = tuple((str(name), weights.number(name, above=0.0)) for name in weights.values)
    return chosen


def due_document(due: Iterable[tuple[Selector, float]]) -> dict[str, Any]:
    """`due:` of fleet.yaml: the classes, each with the seconds [s] in which its requests are due."""
    return {
        selector.name: {"match": selector_document(selector), "within": show_exactly(due_s, "s")}
        for selector, due_s in due
    }


def policies_document(policies: Policies) -> dict[str, Any]:
    """The section that `parse_policies` reads as these policies. `batching`, the two routings, `pools` and
    `prefix_cache` are always written, other fields where they differ from the default.
    """
    default = Policies()
    document: dict[str, Any] = {
        name: getattr(policies, name) for name in ("batching", "routing", "decode_routing")
    }
    for name in ("queue", "admission"):
        if getattr(policies, name) != getattr(default, name):
            document[name] = getattr(policies, name)
    for name, field in (POLICY_SECONDS | POLICY_COUNTS | POLICY_SHARES | POLICY_NUMBERS).items():
        value = getattr(policies, field)
        if value != getattr(default, field):
            document[name] = show_exactly(value, "s") if name in POLICY_SECONDS else value
    if policies.vidur_restarts:
        document["vidur_restarts"] = True
    if policies.tenant_weights:
        document["tenant_weights"] = dict(policies.tenant_weights)
    if policies.due:
        document["due"] = due_document(policies.due)
    if policies.kv_offload is not None:
        document["kv_offload"] = kv_offload_document(policies.kv_offload)
    return document | {"pools": policies.pools, "prefix_cache": policies.prefix_cache}
