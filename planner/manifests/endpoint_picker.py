"""Writes the configuration of llm-d's endpoint picker, the router in front of the workers of llm-d and of
KServe.

A profile says how a worker is chosen. It is a list of plugins: filters, then scorers whose scores add up,
then the plugin that picks the worker with the highest score (at random among equals). The endpoint picker
counts the requests that it sent: `token-load-scorer` prefers workers with the fewest tokens of prompts that
have no first token yet, `active-request-scorer` workers with the fewest unfinished requests. Decode workers
are chosen by `active-request-scorer`, because their load does not depend on tokens of waiting prompts.
`prefix-cache-affinity-filter` selects workers that probably have the prompt's beginning cached, unless their
queue takes longer than the prefill would. To compare these times it has a worker's prefill speed as a
parameter.
"""

from typing import Any

from planner.fleet import Fleet, Policies, Pool
from planner.policies import (
    ENDPOINT_PICKER,
    ENDPOINT_PICKER_DECODE,
    FEWEST_REQUESTS,
    FEWEST_TOKENS,
    LONGEST_MATCH,
    NEAR_MATCH,
    ROUTING,
    find_router_difference,
)

Document = dict[str, Any]
API_VERSION = "llm-d.ai/v1alpha1"
# With these plugins two workers are picked for every request, one for its prefill and one for its decode.
ALWAYS_APART, APART = "always-disagg-pd-decider", "disagg-profile-handler"
# Scorer or filter -> the plugin that collects what it reads.
_PRODUCERS = {
    FEWEST_TOKENS: "inflight-load-producer",
    FEWEST_REQUESTS: "inflight-load-producer",
    LONGEST_MATCH: "approx-prefix-cache-producer",
    NEAR_MATCH: "approx-prefix-cache-producer",
}
_PICKERS = ("random-picker",)  # Plugins that pick without any score.


def profile_plugins(routing: str, router: str = ENDPOINT_PICKER) -> list[str]:
    """The plugins for one of the simulator's routings, or, if this router lacks it, for the routing in its
    place. The last plugin picks.
    """
    plugins = find_router_difference(ROUTING[routing], router).name.split(", ")
    return plugins if plugins[-1] in _PICKERS else [*plugins, "max-score-picker"]


def picker_config(fleet: Fleet, *, is_pair: bool) -> Document:
    """An EndpointPickerConfig for mixed workers, or with `is_pair` for prefill and decode workers."""
    policies, role = fleet.policies, "prefill" if is_pair else "mixed"
    # The pools that requests reach first. The plugin has one speed for all workers, so we take the slowest.
    first_pools = [pool for pool in fleet.running_pools if pool.role == role]
    slowest_tokens_per_s = min(map(_prefill_tokens_per_s, first_pools))
    parameters: Document = {NEAR_MATCH: {"peakPrefillThroughput": round(slowest_tokens_per_s)}}
    profiles = {"default": profile_plugins(policies.routing)}
    names: list[str] = []
    if is_pair:
        names = [ALWAYS_APART, APART]
        parameters[APART] = {"deciders": {"prefill": ALWAYS_APART}}
        profiles = {
            "prefill": ["prefill-filter", *profile_plugins(policies.routing)],
            "decode": ["decode-filter", *_decode_profile(policies)],
        }
    in_profiles = dict.fromkeys(plugin for plugins in profiles.values() for plugin in plugins)
    names += [*dict.fromkeys(_PRODUCERS[name] for name in in_profiles if name in _PRODUCERS), *in_profiles]
    return {
        "apiVersion": API_VERSION,
        "kind": "EndpointPickerConfig",
        "plugins": [
            {"type": name} | ({"parameters": parameters[name]} if name in parameters else {})
            for name in names
        ],
        "schedulingProfiles": [
            {"name": name, "plugins": [{"pluginRef": plugin} for plugin in plugins]}
            for name, plugins in profiles.items()
        ],
    }


def _decode_profile(policies: Policies) -> list[str]:
    """The plugins that choose decode workers."""
    return profile_plugins(policies.decode_routing, ENDPOINT_PICKER_DECODE)


def _prefill_tokens_per_s(pool: Pool) -> float:
    """Prompt tokens that one worker computes in a second, if one prompt fills each step."""
    tokens = pool.type.max_num_batched_tokens
    # `pairs` are query-key pairs: each token attends to itself and to all tokens before it.
    return tokens / float(pool.type.latency.step_s(tokens, pairs=tokens * (tokens + 1) / 2))


def routing_text(policies: Policies, *, is_pair: bool) -> str:
    """A sentence for a README on how the router chooses; "by lot" for a profile with only a picker."""
    first = ", ".join(profile_plugins(policies.routing)[:-1]) or "lot"
    decode = ", ".join(_decode_profile(policies)[:-1]) or "lot"
    if is_pair:
        return f"llm-d's endpoint picker: prefill by {first}, decode by {decode}."
    return f"llm-d's endpoint picker, by {first}."
