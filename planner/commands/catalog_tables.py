"""`plan catalog show` and `plan catalog gpus`: a table of one kind of facts, with units in the headings.
Imports within functions keep other commands fast.
"""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from planner.commands import shared_options
from planner.commands.printed_tables import print_json, print_rows, stdout_console
from planner.documents.catalog import Catalog, read_catalog
from planner.errors import InputError
from planner.models.saturation import saturating_tokens
from planner.units import percentile_name, show_percent, show_s

# The columns that a terminal shows of tables that are too wide for it.
ON_SCREEN = {
    "llms": ("llm", "parameters B", "context", "experts", "KV bytes/token"),
    "engines": ("engine", "versions", "scheduling", "host ms", "front end ms", "hand-off ms", "first token"),
}


def show_catalog(
    what: Annotated[str, typer.Argument(help="gpus, llms, slos, latency, engines or tasks.")] = "gpus",
    catalog: shared_options.CatalogOption = None,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Print what the planner knows: GPUs with prices, LLM shapes, SLO presets, step-time fits, engines."""
    catalog_rows = read_catalog(catalog)
    tables = {
        "gpus": _gpu_rows,
        "llms": _llm_rows,
        "slos": _slo_rows,
        "latency": _latency_rows,
        "engines": _engine_rows,
        "tasks": _task_rows,
    }
    if what not in tables:
        raise InputError(f"catalog: {what!r} is not one of {', '.join(tables)}")
    rows = tables[what](catalog_rows)
    if json_output:
        # Latency, engines and tasks have a column with their source. Rows of other tables get their source by
        # their name, which is in the first column.
        if what not in ("latency", "engines", "tasks"):
            rows = [row | _provenance_fields(catalog_rows, next(iter(row.values()))) for row in rows]
        print_json({what: rows})
    else:
        shown = ON_SCREEN.get(what)
        print_rows([row if shown is None else {name: row[name] for name in shown} for row in rows], what)
        if shown is not None:
            stdout_console().print("All columns, with sources: --json", markup=False)


def _provenance_fields(catalog: Catalog, name: str) -> dict[str, Any]:
    """Source, date and other provenance of the catalog's row of this name, without empty fields."""
    return {key: value for key, value in asdict(catalog.provenance[name]).items() if value}


def _gpu_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """A row for each GPU, also with a power cap."""
    return [
        {
            "gpu": gpu.name,
            "USD/h": gpu.price_usd_per_h,
            "memory GB": round(gpu.memory_bytes / 1e9, 1),
            "GB/s": gpu.bandwidth_bytes_per_s / 1e9,
            "dense TFLOP/s": gpu.dense_flops_per_s / 1e12,
            "link GB/s": gpu.link_bytes_per_s / 1e9,
            "W": gpu.power_w,
            "per node": gpu.gpus_per_node,
            "steps": "roofline only" if gpu.unchecked else "measured kind",
            "priced": catalog.provenance[gpu.name].price_date,
        }
        for gpu in catalog.gpus.values()
    ]


def _llm_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """A row for each LLM with the figures of its structure."""
    return [
        {
            "llm": llm.name,
            "parameters B": round(llm.parameters / 1e9, 2),
            "layers": llm.layers,
            "hidden": llm.hidden,
            "heads": llm.heads,
            "KV heads": llm.kv_heads,
            "ffn": llm.ffn,
            "vocab": llm.vocab,
            "context": llm.context_tokens,
            "experts": llm.experts,
            "KV bytes/token": round(llm.kv_bytes_per_token),
        }
        for llm in catalog.llms.values()
    ]


def _slo_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """A row for each preset; limits are in seconds, or multiples of the times on an idle GPU (slowdowns)."""
    rows = []
    for preset in catalog.slos.values():
        limits = [f"{limit.label} <= {show_s(limit.limit_s)}" for limit in preset.slo.limits]
        if preset.slowdowns is not None:
            reference = f"{preset.slowdowns.gpu} tp{preset.slowdowns.tp}"
            limits += [
                f"{line.metric} {percentile_name(line.percentile_frac)} <= {line.factor:g} x {reference}"
                for line in preset.slowdowns.limits
            ]
        rows.append(
            {
                "preset": preset.name,
                "limits": "; ".join(limits),
                "served": preset.served,
                "source": preset.source,
            }
        )
    return rows


def _latency_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """The fits of step times, without rooflines. GPUs with a power cap share the fits of the uncapped one."""
    rows = []
    for llm in catalog.llms.values():
        for gpu in catalog.gpus.values():
            for tp in filter(llm.splits_over, range(1, gpu.gpus_per_node + 1)):
                latency = catalog.step_latency(llm, gpu, tp)
                if gpu.name != gpu.base or latency.kind == "roofline":
                    continue
                error = "-" if latency.mape_frac is None else show_percent(latency.mape_frac)
                rows.append(
                    {
                        "llm": llm.name,
                        "gpu": gpu.name,
                        "tp": tp,
                        "held-out error": error,
                        "saturated by": saturating_tokens(latency),
                        "basis": latency.basis,
                    }
                )
    return rows


def _engine_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """A row for each range of engine versions."""
    return [
        {
            "engine": row.engine,
            "versions": f"{row.first} to {row.last}",
            "scheduling": "asynchronous" if row.async_scheduling else "synchronous",
            "host ms": 1e3 * row.host.step_s,
            "us per sequence": round(1e6 * row.host.sequence_s, 3),
            "ms per log2 TP": 1e3 * row.host.log2_tp_s,
            "front end ms": 1e3 * row.front_end_s,
            "us per prompt token": round(1e6 * row.prompt_token_s, 3),
            "hand-off ms": round(1e3 * row.hand_off_s, 3),
            "first hand-off s": round(row.first_hand_off_s, 3),
            "first token": row.first_token,
            "source": row.source,
        }
        for row in catalog.engines.values()
    ]


def _task_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """A row for each task, with the mean tokens of its prompts and answers."""
    from planner.documents.traffic_description import example_of

    rows = []
    for row in catalog.tasks.values():
        description = example_of(row.values, row.name)
        inputs, outputs = description.input.mean_tokens, description.output.mean_tokens
        rows.append(
            {
                "task": row.name,
                "of": row.measured_on,
                "input": round(inputs),
                "output": round(outputs),
                "source": row.source,
            }
        )
    return rows
