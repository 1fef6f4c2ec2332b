"""Reads a prefix tree with known traffic, written by hand, and places its prefixes on replicas.

replicas: 3                 # or `largest_load: 0.8`: the fewest replicas whose loads are at most 0.8
memory_tokens: 5000         # of each replica, for prefixes
token_s: 100 us             # to prefill a token; a node may state its own `prefill` instead
rest: 40 ms                 # time of a request that no cache spares: its own prompt and its decode
nodes:
  - {name: system, tokens: 500}
  - {name: tool-a, after: system, tokens: 2000, rate: 4}      # requests/s whose shared prefix ends here
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import InfeasibleError, InputError
from planner.files.checked_files import read_yaml
from planner.files.document_values import Section, check_mapping, check_rows
from planner.solvers.prefix_demand import PrefixDemand, SessionReuse
from planner.solvers.prefix_replication import Replication, hot_bound, replicate_prefixes
from planner.traffic.trace import MAX_TOKENS

KEYS = ("replicas", "largest_load", "memory_tokens", "token_s", "rest", "nodes")
NODE_KEYS = ("name", "after", "tokens", "prefill", "rate", "rest")
ROOT = -1  # The parent of a node without `after` (PrefixDemand).
MOST_REPLICAS = 1000  # A placement on more takes too long to find.
SAME_FRAC = 1e-9  # A load that exceeds the limit by rounding still keeps it.
NO_SESSIONS = SessionReuse()  # The trees of this file have no sessions, so sessions save no work.


@dataclass(frozen=True, slots=True)
class TreeQuestion:
    """A tree of prefixes, with the `names` (V,) of its nodes, and the replicas to place them on.

    Either `replicas` or `largest_load` is given, the other is None. A load is the share of the time in which
    a replica works.
    """

    names: tuple[str, ...]
    demand: PrefixDemand
    memory_tokens: int
    replicas: int | None
    largest_load: float | None


def read_tree(path: Path) -> TreeQuestion:
    """The question in a file; raises InputError naming the file, the node and the key."""
    file = Section.from_document(read_yaml(path), path, KEYS)
    if ("replicas" in file) == ("largest_load" in file):
        raise InputError(f"{path}: expected one of replicas and largest_load, found both or none")
    nodes = check_rows(file.get("nodes"), file.path_of("nodes"), "nodes", least=1)
    token_s = file.at_least("token_s", "s", 0.0, bare=True)
    default_rest_s = file.at_least("rest", "s", 0.0)
    number_by_name: dict[str, int] = {}
    rows: list[tuple[int, int, float, float, float]] = []  # A node per row; the columns of PrefixDemand.
    for number, node in enumerate(nodes):
        where = f"{path}: nodes[{number}]"
        row = Section.from_document(check_mapping(node, where), where, NODE_KEYS)
        name = str(row.get("name", number))
        after = row.get("after")
        if name in number_by_name or (after is not None and str(after) not in number_by_name):
            raise InputError(
                f"{where}: {name!r} after {after!r}: each node needs a name of its own, after one that "
                "stands before it"
            )
        parent_number = ROOT if after is None else number_by_name[str(after)]
        tokens = row.whole_number("tokens", least=0, most=MAX_TOKENS)
        prefill_s = row.at_least("prefill", "s", token_s * tokens)
        rate_rps, rest_s = row.at_least("rate", "rps", 0.0), row.at_least("rest", "s", default_rest_s)
        number_by_name[name] = number
        rows.append((parent_number, tokens, prefill_s, rate_rps, rest_s))
    parents, tokens_by_node, prefill_s_by_node, rate_rps_by_node, rest_s_by_node = map(
        np.array, zip(*rows, strict=True)
    )
    # A request's work is the prefill of all nodes from the root to its own, plus its `rest`. `path_sum` adds
    # the prefills up but needs a demand, so `tree` is one without requests, whose work_s is never used.
    tree = PrefixDemand(
        parent=parents,
        tokens=tokens_by_node,
        prefill_s=prefill_s_by_node,
        rate_rps=np.zeros(len(parents)),
        work_s=prefill_s_by_node,
    )
    demand = replace(
        tree, rate_rps=rate_rps_by_node, work_s=tree.path_sum(prefill_s_by_node) + rest_s_by_node
    )
    return TreeQuestion(
        tuple(number_by_name),
        demand,
        file.whole_number("memory_tokens", least=0),
        replicas=file.whole_number("replicas", None, most=MOST_REPLICAS),
        largest_load=file.share("largest_load", None),
    )


def place_tree(question: TreeQuestion, *, time_limit_s: float, rng: np.random.Generator) -> Replication:
    """Place the prefixes on the given number of replicas, or on the fewest found within `largest_load`.

    Raises InfeasibleError if MOST_REPLICAS are too few.
    """
    demand, memory_tokens = question.demand, question.memory_tokens

    def place_on(replicas: int) -> Replication:
        return replicate_prefixes(demand, replicas, memory_tokens, time_limit_s=time_limit_s, rng=rng)

    if question.largest_load is None:
        assert question.replicas is not None  # One of the two is given.
        return place_on(question.replicas)
    limit = question.largest_load * (1 + SAME_FRAC)
    for replicas in range(1, MOST_REPLICAS + 1):
        # No placement has a largest load below hot_bound (solvers/prefix_replication.py).
        if hot_bound(demand, replicas, memory_tokens, NO_SESSIONS) <= limit:
            replication = place_on(replicas)
            if replication.largest_load <= limit:
                return replication
    uncached_load = float(demand.rate_rps @ demand.work_s)  # The load of one replica that does everything.
    # Rounded up to six decimals, so that the suggested limit can be kept.
    load_in_reach = math.ceil(1e6 * uncached_load / MOST_REPLICAS * (1 - SAME_FRAC)) / 1e6
    relaxation = f"a largest_load of {load_in_reach:g}"
    if load_in_reach > 1:  # `largest_load` may be 1 at most.
        relaxation = f"{math.ceil(load_in_reach / question.largest_load)} times fewer requests/s"
    raise InfeasibleError(
        f"largest_load {question.largest_load:g}: {MOST_REPLICAS} replicas are too few for "
        f"{uncached_load:.4g} s of work per second without caches; within reach: {relaxation}",
        kind="capacity",
        constraint="largest_load",
        relaxation=relaxation,
    )


def tree_document(question: TreeQuestion, replication: Replication) -> dict[str, Any]:
    """The answer as plain values. `bound` and `relaxed_bound` are lower bounds of the largest load."""
    demand = question.demand
    through_rps = demand.subtree_sum(demand.rate_rps)  # Requests whose prefix passes through the node.
    hits_rps = replication.hits_rps(demand)
    return {
        "status": "optimal" if replication.is_optimal else "best found",
        "replicas": len(replication.load),
        "load": replication.load.tolist(),
        "largest_load": replication.largest_load,
        "bound": replication.bound,
        "relaxed_bound": hot_bound(demand, len(replication.load), question.memory_tokens, NO_SESSIONS),
        "load_without_caches": float(demand.rate_rps @ demand.work_s) / len(replication.load),
        "nodes": [
            {
                "name": name,
                "replicas": np.flatnonzero(replication.placed[v]).tolist(),
                "rate_rps": float(demand.rate_rps[v]),
                "routed_rps": replication.routed_rps[v].tolist(),
                "hit_frac": float(hits_rps[v].sum() / through_rps[v]) if through_rps[v] else None,
            }
            for v, name in enumerate(question.names)
        ],
    }
