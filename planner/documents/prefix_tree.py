"""A prefix tree with known traffic, written down by hand, and where its prefixes should live.

replicas: 3                 # or `largest_load: 0.8`: the fewest replicas none of which has more to do
memory_tokens: 5000         # of each replica, for prefixes
token_s: 100 us             # to prefill a token; a node may state its own `prefill` instead
rest: 40 ms                 # of a request, what no cache spares: its own prompt and its decode
nodes:
  - {name: system, tokens: 500}
  - {name: tool-a, after: system, tokens: 2000, rate: 4}      # requests/s whose shared prefix ends here
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import InfeasibleError, InputError
from planner.io.files import read_yaml
from planner.io.values import at_least_0, mapping, refuse_unknown, share, whole
from planner.solvers.prefix_demand import PrefixDemand, SessionReuse
from planner.solvers.prefixes import Replication, hot_bound, replicate
from planner.traffic.trace import MAX_TOKENS

KEYS = ("replicas", "largest_load", "memory_tokens", "token_s", "rest", "nodes")
NODE_KEYS = ("name", "after", "tokens", "prefill", "rate", "rest")
MOST_REPLICAS = 1000
SAME_FRAC = 1e-9


@dataclass(frozen=True, slots=True)
class TreeQuestion:
    """`names` (V,) of the nodes of `demand`; without `largest_load` there are `replicas`."""

    names: tuple[str, ...]
    demand: PrefixDemand
    memory_tokens: int
    replicas: int | None
    largest_load: float | None


def read_tree(path: Path) -> TreeQuestion:
    """The question in a file; raises InputError naming the file, the node and the key."""
    document, where = read_yaml(path), str(path)
    refuse_unknown(document, KEYS, where)
    if ("replicas" in document) == ("largest_load" in document):
        raise InputError(f"{where}: expected one of replicas and largest_load, found both or none")
    rows = document.get("nodes")
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{where}: nodes: expected a list of nodes, found {rows!r}")
    token_s = at_least_0(document.get("token_s", 0.0), "s", f"{where}: token_s", bare=True)
    place: dict[str, int] = {}
    columns: list[tuple[int, int, float, float, float]] = []
    for number, row in enumerate(rows):
        here = f"{where}: nodes[{number}]"
        refuse_unknown(mapping(row, here), NODE_KEYS, here)
        name = str(row.get("name", number))
        after = row.get("after")
        if name in place or (after is not None and str(after) not in place):
            raise InputError(
                f"{here}: {name!r} after {after!r}: each node needs a name of its own, after one that stands "
                "before it"
            )
        above = -1 if after is None else place[str(after)]
        tokens = whole(row.get("tokens"), f"{here}: tokens", least=0)
        if tokens > MAX_TOKENS:
            raise InputError(f"{here}: tokens: must be at most {MAX_TOKENS}, found {tokens}")
        prefill_s = (
            at_least_0(row["prefill"], "s", f"{here}: prefill") if "prefill" in row else token_s * tokens
        )
        rate_rps = at_least_0(row.get("rate", 0.0), "rps", f"{here}: rate")
        rest_s = at_least_0(row.get("rest", document.get("rest", 0.0)), "s", f"{here}: rest")
        place[name] = number
        columns.append((above, tokens, prefill_s, rate_rps, rest_s))
    parent, tokens_of, prefill_of, rate_of, rest_of = map(np.array, zip(*columns, strict=True))
    idle = PrefixDemand(parent, tokens_of, prefill_of, np.zeros(len(parent)), prefill_of)
    demand = replace(idle, rate_rps=rate_of, work_s=idle.path_sum(prefill_of) + rest_of)
    limit = document.get("largest_load")
    return TreeQuestion(
        tuple(place),
        demand,
        whole(document.get("memory_tokens"), f"{where}: memory_tokens", least=0),
        replicas=None if limit is not None else _replicas(document["replicas"], where),
        largest_load=None if limit is None else share(limit, f"{where}: largest_load"),
    )


def _replicas(value: object, where: str) -> int:
    replicas = whole(value, f"{where}: replicas", least=1)
    if replicas > MOST_REPLICAS:
        raise InputError(f"{where}: replicas: must be at most {MOST_REPLICAS}, found {replicas}")
    return replicas


def place_tree(asked: TreeQuestion, *, time_limit_s: float, rng: np.random.Generator) -> Replication:
    """Where the prefixes live, on as many replicas as asked, or on the fewest found within `largest_load`.

    Raises InfeasibleError where MOST_REPLICAS are too few.
    """
    demand, room = asked.demand, asked.memory_tokens

    def on(replicas: int) -> Replication:
        return replicate(demand, replicas, room, time_limit_s=time_limit_s, rng=rng)

    if asked.largest_load is None:
        return on(asked.replicas or 1)
    limit = asked.largest_load * (1 + SAME_FRAC)
    for replicas in range(1, MOST_REPLICAS + 1):
        if hot_bound(demand, replicas, room, SessionReuse()) <= limit:
            found = on(replicas)
            if found.largest_load <= limit:
                return found
    uncached = float(demand.rate_rps @ demand.work_s)
    raise InfeasibleError(
        f"largest_load {asked.largest_load:g}: {MOST_REPLICAS} replicas are too few for {uncached:.4g} s of "
        f"work per second without caches; with {uncached / MOST_REPLICAS:.3g} they are not",
        kind="capacity",
        constraint="largest_load",
        relaxation=f"a largest_load of {uncached / MOST_REPLICAS:.3g}",
    )


def tree_document(asked: TreeQuestion, found: Replication) -> dict[str, Any]:
    """The answer as plain values: loads, bounds, and of every node its replicas and how much of it hits."""
    demand = asked.demand
    through_rps, hits_rps = demand.subtree_sum(demand.rate_rps), found.hits_rps(demand)
    return {
        "status": "optimal" if found.is_optimal else "best found",
        "replicas": len(found.load),
        "load": found.load.tolist(),
        "largest_load": found.largest_load,
        "bound": found.bound,
        "relaxed_bound": hot_bound(demand, len(found.load), asked.memory_tokens, SessionReuse()),
        "load_without_caches": float(demand.rate_rps @ demand.work_s) / len(found.load),
        "nodes": [
            {
                "name": name,
                "replicas": np.flatnonzero(found.placed[v]).tolist(),
                "rate_rps": float(demand.rate_rps[v]),
                "routed_rps": found.routed_rps[v].tolist(),
                "hit_frac": float(hits_rps[v].sum() / through_rps[v]) if through_rps[v] else None,
            }
            for v, name in enumerate(asked.names)
        ],
    }
