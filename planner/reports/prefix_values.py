"""A plan of prefixes (search/prefixes/prefix_placing.py) as plain values, for plan.yaml, certificate.json and
`plan prefixes`.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from planner.search.prefixes.prefix_placing import KeepAlive, PoolPrefixes, PrefixPlan, WarmUp
from planner.units import show_s

Document = dict[str, Any]


def placed_rows(plan: PrefixPlan) -> list[Document]:
    """A row per stable prefix (used in most parts of the trace), the most requested first. These prefixes are
    the nodes of a tree: `prefix` is a node's number, `after` that of its parent. The empty root 0 has no row.
    """
    demand, placed = plan.traffic.demand, plan.replication.placed
    # (nodes,): requests/s that begin with each prefix.
    through_rps = demand.subtree_sum(demand.rate_rps)
    # (nodes,): requests/s that begin with a prefix and find it cached; `hits_rps` has them by worker.
    hits_rps = plan.replication.hits_rps(demand).sum(axis=1)
    return [
        {
            "prefix": v,
            "after": int(demand.parent[v]),
            "tokens": int(demand.tokens[v]),
            "requests_per_s": float(through_rps[v]),
            "replicas": int(placed[v].sum()),
            "workers": [f"{plan.pool.name}-{r}" for r in placed[v].nonzero()[0].tolist()],
            "hit_frac": float(hits_rps[v] / through_rps[v]),
        }
        for v in sorted(range(1, len(demand)), key=lambda v: (-through_rps[v], v))
    ]


def plan_document(plan: PrefixPlan, prompts: Iterable[WarmUp]) -> Document:
    """The planned prefixes with their replicas, the expected hits and loads, and the tokens of `prompts` that
    each worker computes at its start.
    """
    replication = plan.replication
    warm_up_tokens: dict[str, int] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.worker):
        warm_up_tokens[prompt.worker] = warm_up_tokens.get(prompt.worker, 0) + prompt.tokens
    return {
        "pool": plan.pool.name,
        "workers": plan.pool.count,
        "prefix_tokens_per_worker": plan.memory_tokens,
        "nodes": placed_rows(plan),
        # Shares of all prompt tokens; `hit_frac` is the sum of the other two.
        "stable_hit_frac": plan.stable_hit_frac,
        "session_hit_frac": plan.session_hit_frac,
        "hit_frac": plan.hit_frac,
        # A share of all prefill work.
        "prefill_saved_frac": plan.prefill_saved_frac,
        # Loads are seconds of work per second of a worker. No placement has a largest load below
        # `load_bound`; `gap_frac` is the share of the largest load that the bound leaves open.
        "load_without_caches": plan.uncached_load,
        "load": replication.load.tolist(),
        "load_bound": replication.bound,
        "gap_frac": replication.gap_frac,
        # The memory of each worker that prefixes leave to sessions.
        "session_tokens": replication.session_tokens.tolist(),
        "warm_up_tokens": warm_up_tokens,
    }


def pool_document(pool: PoolPrefixes) -> Document:
    """The document of a pool's plan, with the simulated hits beside the expected ones."""
    document = plan_document(pool.plan, pool.warm_up) | simulated_hits(pool)
    if (keep := pool.keep_alive) is not None:
        # YAML has no tuples.
        document["keep_alive"] = dataclasses.asdict(keep) | {"every_s": list(keep.every_s)}
    return document


def keep_alive_text(keep: KeepAlive) -> str:
    """How the router keeps pinned prefixes in vLLM's caches (vLLM itself has no pins), and what it costs."""
    # None: no prefix leaves the cache of this worker.
    every_s = [seconds for seconds in keep.every_s if seconds is not None]
    if not every_s:
        return "vLLM keeps no pins; here none of these prefixes would leave its cache"
    low, high = show_s(min(every_s)), show_s(max(every_s))
    after = low if low == high else f"{low} to {high}"
    return (
        f"vLLM keeps no pins: the router repeats a prefix that no request began with for {after}, "
        f"{keep.per_h:,.0f} times an hour, at most {100 * keep.busy_frac:.2f} % of a worker's time, which "
        "the simulated latencies leave out"
    )


def simulated_hits(pool: PoolPrefixes) -> Document:
    """The simulated hits and loads of a pool, and the possible hits: those of one endless cache."""
    return {
        "possible_hit_frac": pool.possible_hit_frac,
        "simulated_hit_frac": pool.simulated_hit_frac,
        "simulated_load": list(pool.simulated_load),
    }


def warm_up_json(prompts: Iterable[WarmUp]) -> str:
    """warm-up.json: the prompts that each worker computes once at its start, as block ids and as the number
    of a request of the trace that begins with them.
    """
    rows = [
        {
            "worker": prompt.worker,
            "tokens": prompt.tokens,
            "request": prompt.request,
            "block_ids": list(prompt.block_ids),
            **({} if prompt.keep_alive_s is None else {"keep_alive_s": round(prompt.keep_alive_s, 3)}),
        }
        for prompt in prompts
    ]
    return json.dumps(rows, indent=1) + "\n"
