"""`plan tiers`: how much CPU memory, disk or store behind the KV caches is worth buying. Imports within
functions keep other commands fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.commands.printed_tables import print_json, print_lines, print_rows
from planner.commands.study_options import StudyOptions, with_study_options
from planner.units import count_text, show_percent

if TYPE_CHECKING:
    from planner.studies.tier_study import TierChoice, TierStudy


@with_study_options(time_limit=300.0)
def tiers(options: StudyOptions) -> None:
    """How much memory behind the KV caches is worth buying: CPU memory, local disks, or a store for all.

    Fleets on paper; sizes, speeds and prices from catalogs/kv_tiers.yaml. slo.yaml needs
    policies: {prefix_cache: true}.
    """
    from planner.api.questions import read_task
    from planner.documents.kv_tiers import read_kv_tiers
    from planner.studies.tier_study import choose_tiers

    with options.at_work() as (progress, catalog):
        study = options.study(catalog, progress)
        task = read_task(options.slo, catalog).task()
        tier_study = choose_tiers(study, task, read_kv_tiers(options.catalog))
    if options.json_output:
        print_json(tiers_document(tier_study), study.trace.warnings)
        return
    print_rows([_cells(row, tier_study) for row in tier_study.choices], "KV tiers")
    break_even = [
        {
            "tier": row.tier,
            "worker": row.worker,
            "loads sooner from": "never" if row.prefix_tokens is None else f"{row.prefix_tokens:,} tokens on",
        }
        for row in tier_study.break_even
    ]
    print_rows(break_even, "break-even of a prefix")
    print_lines(best_line(tier_study))


def best_line(tier_study: TierStudy) -> str:
    """A sentence on the best tiers, and what they save against a fleet without tiers; it says how many
    searches were cut short, as these may have missed what is cheaper.
    """
    from planner.studies.tier_study import show_sizes

    best, without = tier_study.best, tier_study.without
    cut_short = sum(not row.is_exhausted for row in tier_study.choices)
    of_searches = f"{cut_short} of {len(tier_study.choices)} searches were cut short"
    unsearched = f"; {of_searches}, raise --time-limit" if cut_short else ""
    if best is without:
        verdict = "no tier was found that" if cut_short else "none of the tiers"
        return f"Best: no tier, {best.usd_per_h:,.2f} USD/h; {verdict} saves more than it costs{unsearched}"
    best_text = f"Best: {show_sizes(best.sizes)}, {best.usd_per_h:,.2f} USD/h"
    if not without.holds:
        verdict = "no fleet keeps" if without.is_exhausted else "no fleet was found that keeps"
        return f"{best_text}; without tiers {verdict} the SLO{unsearched}"
    saved_percent = 100 * (1 - best.usd_per_h / without.usd_per_h)
    return f"{best_text}, {saved_percent:.3g} % less than without tiers{unsearched}"


def _cells(row: TierChoice, tier_study: TierStudy) -> dict[str, Any]:
    """A row of the printed table, by column. `agents` is None for traffic that is not of agents."""
    from planner.reports.words import describe_fleet
    from planner.studies.tier_study import show_sizes

    none_found = "none keeps the SLO" if row.is_exhausted else "none found"
    idle = f", {count_text(row.idle_gpus, 'GPU')} idle" if row.idle_gpus else ""
    cut_short = "" if row.is_exhausted else " (search cut short)"
    return {
        "tiers": show_sizes(row.sizes) + (" (best)" if row is tier_study.best else ""),
        "USD/h": f"{row.usd_per_h:,.2f}" if row.fleet is not None else none_found,
        "of it tiers": f"{row.tiers_usd_per_h:,.2f}" if row.fleet is not None else "",
        "fleet": "" if row.fleet is None else describe_fleet(row.fleet) + idle + cut_short,
        "hits GPU, memory, disk": " / ".join(
            show_percent(share) for share in (row.gpu_hit_frac, row.memory_hit_frac, row.disk_hit_frac)
        ),
        **({} if row.agents is None else {"USD per task": f"{row.agents.usd_per_task:.3g}"}),
    }


def tiers_document(tier_study: TierStudy) -> dict[str, Any]:
    """What `--json` prints: all choices, the best, and the break-even of each tier and worker type."""
    best_usd, without_usd = tier_study.best.usd_per_h, tier_study.without.usd_per_h
    return {
        "choices": [_row_document(row) for row in tier_study.choices],
        "best": _row_document(tier_study.best),
        "saves_frac": 1 - best_usd / without_usd if tier_study.without.holds else None,
        "break_even": [
            {"tier": row.tier, "worker": row.worker, "prefix_tokens": row.prefix_tokens}
            for row in tier_study.break_even
        ],
    }


def _row_document(row: TierChoice) -> dict[str, Any]:
    """A choice of tiers as `--json` prints it."""
    from planner.reports.words import describe_fleet

    return {
        "memory_bytes_per_gpu": row.sizes.memory_bytes,
        "disk_bytes_per_gpu": row.sizes.disk_bytes,
        "store_bytes": row.sizes.store_bytes,
        "usd_per_h": row.usd_per_h if row.holds else None,
        "tiers_usd_per_h": row.tiers_usd_per_h,
        "fleet": None if row.fleet is None else describe_fleet(row.fleet),
        "idle_gpus": row.idle_gpus,
        "gpu_hit_frac": row.gpu_hit_frac,
        "memory_hit_frac": row.memory_hit_frac,
        "disk_hit_frac": row.disk_hit_frac,
        "usd_per_task": None if row.agents is None else row.agents.usd_per_task,
        "is_exhausted": row.is_exhausted,
    }
