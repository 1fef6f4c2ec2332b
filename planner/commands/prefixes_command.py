"""`plan prefixes`: the prefixes that prompts of a trace share, and which workers should cache them. Imports
within functions keep other commands fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands import shared_options
from planner.commands.command_output import Progress, print_warnings, read_requests, refuse_to_overwrite
from planner.commands.printed_tables import print_json, print_mapping, print_rows, stdout_console
from planner.errors import InputError
from planner.units import count_text, show_digits, show_percent

if TYPE_CHECKING:
    from planner.search.prefixes.prefix_placing import PoolPrefixes
    from planner.studies.prefix_study import PlacedPrefixes
    from planner.traffic.prefixes import PrefixSummary
    from planner.traffic.trace import Trace

MOST_ROWS = 20  # At most this many placed prefixes are printed, the most requested first; chosen by hand.


def plan_prefixes(
    trace: Annotated[Path | None, typer.Argument(readable=False, help=shared_options.TRACE_HELP)] = None,
    slo: Annotated[
        Path | None,
        typer.Option("--slo", readable=False, help="Instead of a trace: slo.yaml that describes prefixes."),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(
            "--fleet", readable=False, help="fleet.yaml or plan.yaml: place prefixes on its workers."
        ),
    ] = None,
    pool: Annotated[str | None, typer.Option("--pool", help="Which pool, if several prefill.")] = None,
    tree: Annotated[
        Path | None,
        typer.Option(
            "--tree", readable=False, help="Instead of a trace: prefixes with known rates (docs/prefixes.md)."
        ),
    ] = None,
    out: Annotated[
        Path | None, shared_options.out_folder("Folder for the plan, hit curve and warm-up lists.")
    ] = None,
    catalog: shared_options.CatalogOption = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.1, help="Seconds to place prefixes in, in all.")
    ] = 120.0,
    seed: shared_options.SeedOption = 0,
    drop_invalid: shared_options.DropOption = False,
    json_output: shared_options.JsonOption = False,
) -> None:
    """What the prompts of a trace share; with a fleet, which worker should keep which prefix.

    Needs block ids (hash_ids or prefix_ids), as in the traces of Mooncake, Qwen-Bailian and RAGPulse; or,
    instead of a trace, slo.yaml with traffic: prefixes, or a tree of prefixes whose rates are known.
    """
    from planner.api.inputs import fleet_file_warnings, read_fleet
    from planner.documents.catalog import read_catalog
    from planner.files.checked_files import check_output_directory, write_files
    from planner.search.prefixes.prefix_placing import prefill_pool
    from planner.studies.prefix_study import NAMES, prefix_document, render_prefixes, study_prefixes
    from planner.traffic.trace import spread_stamps

    if tree is not None and {trace, slo, fleet, pool, out} == {None}:  # --tree excludes these options.
        _print_tree_placement(tree, time_limit_s=time_limit, seed=seed, json_output=json_output)
        return
    _check_one_source(trace, slo, tree)
    if out is not None:
        check_output_directory(out)
        refuse_to_overwrite([out / name for name in NAMES], trace, slo, fleet)
    with Progress() as progress:
        placed_fleet = read_fleet(fleet, read_catalog(catalog)) if fleet else None
        warnings: tuple[str, ...] = ()
        if fleet is not None and placed_fleet is not None:
            warnings = print_warnings(fleet_file_warnings(fleet, placed_fleet))
            prefill_pool(placed_fleet, pool)  # Refuses a wrong pool before a long trace is read.
        requests = read_requests(trace, slo, catalog, seed=seed, drop_invalid=drop_invalid)
        _check_described(slo, requests)
        requests = spread_stamps(requests, seed=seed)  # `read_requests` does not spread equal time stamps.
        study = study_prefixes(
            requests, placed_fleet, pool=pool, seed=seed, time_limit_s=time_limit, progress=progress
        )
        contents = render_prefixes(study) if out is not None else {}
    if out is not None:
        write_files(out, contents, outdated=NAMES)
    if json_output:
        print_json(prefix_document(study), warnings + requests.warnings)
        return
    _print_summary(study.summary)
    if study.placed is not None:
        _print_plan(study.placed)
        for pool_prefixes in study.placed.simulated:
            _print_simulated(pool_prefixes)
    if out is not None:
        stdout_console().print(f"written to {out}: {', '.join(contents)}", markup=False)


def _check_one_source(trace: Path | None, slo: Path | None, tree: Path | None) -> None:
    """Raise InputError unless there is either a trace or slo.yaml, and no tree."""
    if tree is not None or (trace is None) == (slo is None):
        raise InputError(
            "plan prefixes: give a trace, or --slo FILE that describes prefixes, or --tree FILE without "
            "--fleet, --pool and --out"
        )
    if trace is not None and trace.suffix in (".yaml", ".yml"):
        raise InputError(f"{trace}: is no trace; did you mean: plan prefixes --slo {trace}")


def _check_described(slo: Path | None, requests: Trace) -> None:
    """Raise InputError if the requests come from a slo.yaml that describes no prefixes."""
    if slo is not None and not requests.has_prefixes:
        raise InputError(
            f"{slo}: traffic: describes no prefixes; write, for instance, "
            "prefixes: {shared: 800, count: 20}"
        )


def _print_tree_placement(tree: Path, *, time_limit_s: float, seed: int, json_output: bool) -> None:
    """Place a tree's prefixes (docs/prefixes.md) on replicas, and print one JSON object or two tables."""
    import numpy as np

    from planner.documents.prefix_tree import place_tree, read_tree, tree_document

    prefix_tree = read_tree(tree)
    with Progress() as progress:
        progress(f"placing {len(prefix_tree.names)} prefixes")
        placement = place_tree(prefix_tree, time_limit_s=time_limit_s, rng=np.random.default_rng(seed))
    document = tree_document(prefix_tree, placement)
    if json_output:
        print_json(document)
        return
    rows = [
        {
            "prefix": row["name"],
            "requests/s": row["rate_rps"],
            "on replicas": ", ".join(map(str, row["replicas"])) or "none",
            "routed there, requests/s": ", ".join(f"{rate:.4g}" for rate in row["routed_rps"]),
            "hits": "-" if row["hit_frac"] is None else show_percent(row["hit_frac"]),
        }
        for row in document["nodes"]
    ]
    print_rows(rows, f"prefixes on {document['replicas']} replicas, {document['status']}")
    print_mapping(
        {
            "work per second of each": ", ".join(f"{load:.4g} s" for load in document["load"]),
            "of the busiest": f"{document['largest_load']:.4g} s; no less than {document['bound']:.4g} s in "
            f"any way, {document['relaxed_bound']:.4g} s by memory alone",
            "without caches": f"{document['load_without_caches']:.4g} s",
        },
        "load",
    )


def _print_summary(summary: PrefixSummary) -> None:
    """Print what the prompts share, and what caches of several sizes save. Measures of a paper have the
    paper's names, with the paper in brackets.
    """
    sharing = summary.sharing

    def mean_text(field: str, factor: float = 1.0) -> str:
        """The mean and the standard deviation of a field of the summary, times `factor`."""
        measured = getattr(summary, field)
        if measured.mean is None:
            return "-"
        return f"{measured.mean * factor:.4g} (sd {measured.sd * factor:.4g})"

    print_mapping(
        {
            "requests": summary.requests,
            "blocks": f"{sharing.blocks} of {sharing.block_tokens} tokens, "
            f"{sharing.distinct_blocks} distinct ({summary.distinct_tokens / 1e6:.4g} M tokens)",
            "tokens an endless cache saves": show_percent(sharing.token_hit_frac),
            "blocks that hit (Mooncake)": show_percent(sharing.block_hit_frac),
            "mean hit of a request": show_percent(sharing.request_hit_frac),
            "tokens another request has too (Preble)": f"{show_percent(sharing.shared_token_frac)}; "
            f"per prompt {mean_text('shared_frac', 100)} %",
            "key portion of a prompt (Preble)": f"{mean_text('key_frac', 100)} %",
            "requests of a shared key portion": mean_text("key_requests"),
            "tree": f"{summary.nodes} nodes, {summary.roots} roots, {summary.largest_depth} deep, at most "
            f"{summary.largest_branching} children; {summary.shared_nodes} shared ones hold "
            f"{summary.shared_node_tokens / 1e6:.4g} M tokens",
            "hottest prefix": f"{summary.hottest_node_requests} requests",
            "seconds until a block is used again": {f"p{p}": gap for p, gap in summary.reuse_gap_s.items()},
            f"distinct tokens in {summary.window_s:g} s": f"{mean_text('working_set_tokens')}, at most "
            f"{show_digits(summary.largest_working_set_tokens, 4)}",
        },
        summary.name,
    )
    rows = [
        {"cache tokens": f"{tokens:,}", "tokens that hit": show_percent(frac)}
        for tokens, frac in summary.hit_frac.items()
    ]
    rows.append({"cache tokens": "endless", "tokens that hit": show_percent(summary.infinite_hit_frac)})
    rows += [
        {
            "cache tokens": f"endless, round robin over {workers} workers",
            "tokens that hit": show_percent(frac),
        }
        for workers, frac in summary.round_robin_hit_frac.items()
    ]
    print_rows(rows, "one LRU cache for all requests")


def _print_plan(placed: PlacedPrefixes) -> None:
    """Print which prefixes the workers of a pool should keep, and the estimated savings."""
    from planner.reports.prefix_values import placed_rows
    from planner.studies.prefix_study import ESTIMATE

    placement, prompts, needed = placed.plan, placed.prompts, placed.workers_needed
    pool, replication = placement.pool, placement.replication
    prompt_tokens = sum(prompt.tokens for prompt in prompts)
    rows = [
        {
            "prefix": row["prefix"],
            "after": row["after"],
            "tokens": row["tokens"],
            "requests/s": row["requests_per_s"],
            "replicas": row["replicas"],
            "its requests that hit": show_percent(row["hit_frac"]),
        }
        for row in placed_rows(placement)
    ]
    if rows:
        shown = f", the hottest {MOST_ROWS} of {len(rows)}" if len(rows) > MOST_ROWS else ""
        print_rows(rows[:MOST_ROWS], f"stable prefixes on {pool.count} workers of {pool.name}{shown}")
    stable_percent, session_percent = 100 * placement.stable_hit_frac, 100 * placement.session_hit_frac
    print_mapping(
        {
            "tokens for prefixes per worker": f"{placement.memory_tokens:,}, of which sessions keep "
            f"{replication.session_tokens.min():,.0f} or more",
            "expected hit ratio": f"{stable_percent + session_percent:.1f} % of input tokens: "
            f"{stable_percent:.1f} % stable, {session_percent:.1f} % in sessions",
            "prefill work saved": show_percent(placement.prefill_saved_frac),
            "work per second of the busiest worker": f"{replication.largest_load:.4g} s; "
            f"{placement.uncached_load:.4g} s without caches, no less than {replication.bound:.4g} s in any "
            f"way (gap {show_percent(replication.gap_frac)})",
            "workers for the same load": f"{needed} instead of {pool.count}, "
            f"{count_text((pool.count - needed) * pool.type.gpus, 'GPU')} fewer",
            "warm-up": f"{count_text(len(prompts), 'prompt')} of {prompt_tokens:,} tokens in all",
        },
        ESTIMATE,
    )


def _print_simulated(pool_prefixes: PoolPrefixes) -> None:
    """Print simulated hits and loads, from cold caches, beside the planned ones."""
    planned, load = pool_prefixes.plan.replication.load, pool_prefixes.simulated_load
    print_mapping(
        {
            "hit ratio": f"{show_percent(pool_prefixes.simulated_hit_frac)} of input tokens; planned, once "
            f"warm, {show_percent(pool_prefixes.plan.hit_frac)}; possible from cold "
            f"{show_percent(pool_prefixes.possible_hit_frac)}",
            "work per second of the busiest worker": f"{max(load):.4g} s; planned {planned.max():.4g} s",
            "of the idlest": f"{min(load):.4g} s; planned {planned.min():.4g} s",
        },
        f"simulated, caches cold at the start: {pool_prefixes.plan.pool.name}",
    )
