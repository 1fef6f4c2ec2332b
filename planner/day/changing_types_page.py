"""Sentences, table rows and values of day.json on what changing worker types within a day saves
(planner/day/changing_types.py).
"""

from typing import Any

import numpy as np

from planner.day.day_study import ChangingTypes, workers_over_time
from planner.reports.fact_sentences import SAME_USD
from planner.reports.words import list_text, pool_text, usd_text
from planner.units import HOUR_S, show_clock, show_share

# The columns of `pool_rows`. "Ready hours" are those of all workers of the pool together.
POOLS_HEAD = ("Pool", "Worker", "Workers at most", "Ready hours", "First from", "Last until")
ONE_FLEET = "Every controller here, fleetplan too, keeps to the worker types of one fleet."
MOST_CHANGES = 12  # Sentences name at most this many changes of sizes, chosen by hand; day.json has all.


def types_lines(types: ChangingTypes | None) -> list[str]:
    """Sentences on what changing worker types within the day saves; empty where it was not searched."""
    if types is None:
        return []
    if types.optimum is None:
        return [f"Worker types that change within the day: no optimum, {types.why}."]
    optimum, saved_usd = types.optimum, types.saved_usd
    single = f"{types.single_label}, {usd_text(types.single_usd)}"
    if saved_usd < SAME_USD:
        most_usd = max(types.single_usd - optimum.proved_usd, 0.0)
        return [
            f"Changing worker types within the day saves nothing that was found against the cheapest fleet's "
            f"optimum ({single}); proved: no more than {usd_text(most_usd)}."
        ]
    share = show_share(saved_usd / types.single_usd)
    return [
        f"If worker types change within the day, the optimum costs {usd_text(optimum.usd)}: "
        f"{usd_text(saved_usd)} ({share}) less than that of the cheapest single fleet ({single}); proved: "
        f"nothing costs less than {usd_text(optimum.proved_usd)}.",
        f"Its workers, ready from: {changes_text(types)}.",
        ONE_FLEET,
    ]


def changes_text(types: ChangingTypes) -> str:
    """The sizes of the optimum with the times from which they are ready."""
    assert types.optimum is not None and types.question is not None
    pools, edges_s = types.question.fleet.pools, types.optimum.edges_s
    changes: list[str] = []
    before: list[int] = []
    for at_s, sizes in zip(edges_s[:-1].tolist(), types.optimum.sizes.tolist(), strict=True):
        if sizes != before:
            before = sizes
            workers = [
                pool_text(pool.role, size, pool.type.gpus, pool.type.gpu.name)
                for pool, size in zip(pools, sizes, strict=True)
                if size
            ]
            changes.append(f"{show_clock(at_s)} {list_text(workers) if workers else 'none'}")
    unnamed = len(changes) - MOST_CHANGES
    more = [f"and {unnamed} more changes"] if unnamed > 0 else []
    return "; ".join(changes[:MOST_CHANGES] + more)


def pool_rows(types: ChangingTypes) -> list[tuple[str, ...]]:
    """A row for each pool that the optimum uses: worker type, most workers, and when they are ready."""
    if types.optimum is None or types.question is None:
        return []
    edges_s, rows = types.optimum.edges_s, list[tuple[str, ...]]()
    for pool, sizes in zip(types.question.fleet.pools, types.optimum.sizes.T, strict=True):
        # The intervals between `edges_s` in which the pool has workers.
        used_steps = np.flatnonzero(sizes)
        if len(used_steps):
            ready_h = float(sizes @ np.diff(edges_s)) / HOUR_S
            rows.append(
                (
                    pool.name,
                    f"{pool.role}, {pool.type.name}",
                    str(int(sizes.max())),
                    f"{ready_h:,.1f}",
                    show_clock(float(edges_s[used_steps[0]])),
                    show_clock(float(edges_s[used_steps[-1] + 1])),
                )
            )
    return rows


def ready_by_pool(types: ChangingTypes, edges_s: Any) -> dict[str, Any]:
    """The mean number of ready workers in each interval between `edges_s`, by pool. Pools without ready
    workers are left out. Empty if the optimum is a day of a single fleet.
    """
    assert types.optimum is not None and types.question is not None
    pools, run = types.question.fleet.pools, types.optimum.day.run
    if run.requested_sizes.shape[1] != len(pools):  # A single fleet's run has that fleet's pools alone.
        return {}
    ready = workers_over_time(run, len(pools), edges_s).ready
    return {pool.name: row for pool, row in zip(pools, ready, strict=True) if row.any()}


def types_json(types: ChangingTypes | None) -> dict[str, Any] | None:
    """The value of `types` in day.json."""
    if types is None:
        return None
    optimum, question = types.optimum, types.question
    if optimum is None or question is None:
        return {"usd": None, "why": types.why}
    return {
        "usd": optimum.usd,
        "single_fleet": types.single_label,
        "single_fleet_usd": types.single_usd,
        "saved_usd": types.saved_usd,
        "proved_usd": optimum.proved_usd,
        # `usd` if all sequences on the grid that cost less were simulated, else `proved_usd`.
        "bound_on_the_grid_usd": optimum.bound_usd,
        "status": optimum.status,
        "missed": optimum.day.missed_windows,
        "pools": [
            {"name": pool.name, "role": pool.role, "worker": pool.type.name, "most": elastic.most}
            for pool, elastic in zip(question.fleet.pools, question.pools, strict=True)
        ],
        "sizes": {"edges_s": optimum.edges_s.tolist(), "sizes": optimum.sizes.tolist()},
    }
