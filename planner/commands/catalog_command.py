"""`plan catalog`: print what the planner knows of GPUs, LLMs and prices, or add to it.

A first word that is no command of this module names a table: `plan catalog gpus`.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from planner.commands.catalog_tables import show_catalog
from planner.commands.command_output import (
    CatalogOption,
    JsonOption,
    Progress,
    print_json,
    print_mapping,
    print_rows,
    say_first,
    stdout_console,
)
from planner.documents.catalog import Catalog, read_catalog
from planner.domain import KV_BLOCK_TOKENS, Gpu
from planner.errors import InputError
from planner.models.all2all import MOST_LOW_LATENCY_TOKENS
from planner.models.llm import Llm
from planner.models.spread import WITHIN_FRAC
from planner.studies import support


class CatalogCommands(TyperGroup):
    """`plan catalog gpus` is `plan catalog show gpus`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


commands = typer.Typer(cls=CatalogCommands, help="Print what the planner knows, or add to it.")
commands.command("show")(show_catalog)


@commands.command("fit")
def fit_kernels(
    llm: Annotated[str, typer.Argument(help="Name or alias, or the folder of its config.json.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="A catalog directory; made if need be.")
    ],
    gpu: Annotated[list[str] | None, typer.Option("--gpu", help="Of these GPUs; else of all.")] = None,
    tp: Annotated[
        list[int] | None, typer.Option("--tp", min=1, help="Of these TPs; else 1, 2, 4, 8.")
    ] = None,
    catalog: CatalogOption = None,
    json_output: JsonOption = False,
) -> None:
    """Make fits of step times from AIConfigurator's kernel tables: DIR is then given as --catalog."""
    from planner.files.checked_files import check_output_directory, is_path, to_yaml, write_files
    from planner.importers.silicon_fits import TPS, file_name, silicon_fits

    known = read_catalog(catalog)
    check_output_directory(out)
    served, gpus = known.llm(llm), _gpus(known, gpu)
    # A name of the catalog wins over a file of that name; AIConfigurator reads the folder of a config.json.
    given = Path(llm) if not known.has_llm(llm) and is_path(llm) else None
    folder = given.parent if given is not None and given.is_file() else given
    command = f"plan catalog fit {served.name if folder is None else llm}"
    documents: dict[str, dict[str, Any]] = {}
    left_out: list[str] = []
    with Progress() as progress:
        for each in gpus:
            progress(f"{served.name} on {each.name}")
            date = datetime.date.today().isoformat()
            fitted = silicon_fits(served, each, tp or TPS, date=date, command=command, folder=folder)
            left_out += fitted.left_out
            if fitted.document is not None:
                documents[f"latency/{file_name(served, each)}"] = fitted.document
    if not documents:
        # A lack of memory is the least telling reason: it is named only where there is no other.
        raise InputError(min(left_out, key=lambda why: why.endswith("does not fit into memory")))
    write_files(out, {name: to_yaml(document) for name, document in documents.items()})
    rows = [
        {
            "gpu": document["gpu"],
            "tp": fit["tp"],
            "ep": fit.get("ep", False),
            "dp": fit.get("dp", 1),
            "mape_frac": fit["mape_frac"],
            "file": str(out / name),
        }
        for name, document in documents.items()
        for fit in document["fits"]
    ]
    if json_output:
        print_json({"llm": served.name, "fits": rows, "left_out": left_out})
    else:
        say_first(left_out)
        print_rows([_shown(row) for row in rows], served.name)


@commands.command("llm")
def show_row(
    config: Annotated[
        Path, typer.Argument(readable=False, help="A config.json, or the folder that holds it.")
    ],
    json_output: JsonOption = False,
) -> None:
    """Print the row of llms.yaml that a Hugging Face config.json makes, to be corrected or to be shared."""
    from planner.documents.llm_config import llm_from_config
    from planner.documents.llm_row import llm_row
    from planner.files.checked_files import to_yaml

    llm = llm_from_config(config)
    date = datetime.date.today().isoformat()
    document = {Path(llm.name).name: {**llm_row(llm), "source": f"config.json of {llm.name}", "date": date}}
    if json_output:
        print_json(document)
    else:
        typer.echo(to_yaml(document), nl=False)


@commands.command("support")
def show_support(
    llm: Annotated[str, typer.Argument(help="Name or alias, or the path of its config.json.")],
    gpu: Annotated[list[str] | None, typer.Option("--gpu", help="On these GPUs; else on all.")] = None,
    catalog: CatalogOption = None,
    json_output: JsonOption = False,
) -> None:
    """What is known of an LLM on each GPU and TP: memory, step times and what they rest on, their spread."""
    known = read_catalog(catalog)
    served = known.llm(llm)
    # Of a GPU with several power caps, the row without a cap stands for all of them.
    gpus = [known.gpu(name) for name in gpu] if gpu else [g for g in known.gpus.values() if g.name == g.base]
    rows = [row for each in gpus for row in support.support_rows(known, served, each)]
    if not rows:
        weights_text = f"{served.weight_bytes / 1e9:.0f} GB of weights"
        raise InputError(
            f"{served.name}: {weights_text} fit on no node of {', '.join(each.name for each in gpus)}"
        )
    about = {
        "parameters_b": round(served.parameters / 1e9, 2),
        "active_b": round(served.active_parameters / 1e9, 2),
        "weights": served.weights,
        "weight_gb": round(served.weight_bytes / 1e9, 1),
        "kv_bytes_per_token": served.kv_bytes_per_token,
        "state_bytes_per_sequence": served.state_bytes,
    }
    if json_output:
        print_json({"llm": served.name, **about, "on": rows})
        return
    print_mapping(_in_words(served), served.name)
    word, _, why = support.support_badge(rows)
    has_beside = any(row["blocks_beside"] for row in rows)
    has_ranks = any(row["dp"] > 1 for row in rows)
    print_rows(
        [_support_shown(row, has_beside, has_ranks) for row in rows], "one worker, with vLLM's usual settings"
    )
    console = stdout_console(soft_wrap=True)
    console.print(f"{word}: {why[0].lower()}{why[1:]}", markup=False, highlight=False)
    fitting = {row["gpu"] for row in rows}
    for line in _legend(rows, [each.name for each in gpus if each.name not in fitting]):
        console.print(line, markup=False, highlight=False)


def _in_words(llm: Llm) -> dict[str, str]:
    """What `support` says of the LLM itself."""
    active = f", {llm.active_parameters / 1e9:.3g} billion of them for a token" if llm.is_mixture else ""
    about = {
        "parameters": f"{llm.parameters / 1e9:,.4g} billion{active}",
        "weights": f"{llm.weight_bytes / 1e9:,.4g} GB, most of them in {llm.weights}",
        "KV cache": f"{llm.kv_bytes_per_token:,.0f} bytes per token, up to {llm.context_tokens:,} tokens",
    }
    if llm.state_bytes:
        about["states"] = f"{llm.state_bytes / 1e6:,.3g} MB per sequence, however long it is"
    if llm.encoder_bytes:
        about["encoder"] = f"{llm.encoder_bytes / 1e9:.2g} GB of the weights, whole on every GPU"
    return about


def _legend(rows: list[dict[str, Any]], too_small: list[str]) -> list[str]:
    """What the columns that are shown mean, and which GPUs are missing because they are too small."""
    lines = ["tp: GPUs of a worker; EP: each has whole experts, else a slice of all. USD/h: of the worker."]
    lines.append("KV tokens: of all sequences of a worker together.")
    if any(row["dp"] > 1 for row in rows):
        lines.append(
            "dp: data-parallel ranks of a worker, tp GPUs and so many KV tokens each; plans choose from "
            "fleet: {dp: [1, 2]}."
        )
    if any(row["all2all"] for row in rows):
        lines.append(
            "low latency, high throughput: ranks on several nodes, with DeepEP's kernels of that name; the "
            f"former in steps of up to {MOST_LOW_LATENCY_TOKENS} tokens, the latter in prefill pools."
        )
    if any(row["blocks_beside"] for row in rows):
        lines.append(
            "beside: KV tokens that windows and states of one sequence of full context take beside its own."
        )
    kinds = {row["step_times"] for row in rows}
    lines += [
        f"step times, {kind}: {support.STEP_TIMES[kind]}." for kind in support.STEP_TIMES if kind in kinds
    ]
    if any(row["unchecked"] for row in rows):
        lines.append(
            "unchecked: no kernels of such GPUs were measured; plans take them only where slo.yaml names "
            "them, or says fleet: {unchecked: true}."
        )
    # Spreads are two-sided: between them lie WITHIN_FRAC of all measurements, half of the rest above.
    lines.append(
        f"at most: prefills / decodes take this many times as long in {100 * (1 + WITHIN_FRAC) / 2:.0f} % of "
        "what was measured; robust: {spread: true} plans for it."
    )
    if too_small:
        lines.append(f"Holds no worker on one node: {', '.join(too_small)}.")
    return lines


def _support_shown(row: dict[str, Any], has_beside: bool, has_ranks: bool) -> dict[str, Any]:
    error, spread = row["error_frac"], None if row["unchecked"] else row["spread"]
    beside = {"beside": f"{KV_BLOCK_TOKENS * row['blocks_beside']:,}"} if has_beside else {}
    return {
        "gpu": row["gpu"],
        "tp": f"{row['tp']} EP" if row["ep"] else f"{row['tp']}",
        "USD/h": row["usd_per_h"],
        **({"dp": _ranks_shown(row)} if has_ranks else {}),
        "weights GB/GPU": row["weight_gb"],
        "KV tokens": f"{row['kv_tokens']:,}",
        **beside,
        "step times": row["step_times"] + (" (unchecked)" if row["unchecked"] else ""),
        "off": "-" if error is None else f"{100 * error:.1f} %",
        "at most": "unknown" if spread is None else f"x{spread[0]:.2f} / x{spread[1]:.2f}",
    }


def _ranks_shown(row: dict[str, Any]) -> str:
    return f"{row['dp']} {row['all2all'].removeprefix('deepep_').replace('_', ' ')}".strip()


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "gpu": row["gpu"],
        "tp": row["tp"],
        "experts": "whole" if row["ep"] else "-",
        "dp": row["dp"],
        "held-out error": f"{100 * row['mape_frac']:.1f} %",
        "file": row["file"],
    }


def _gpus(known: Catalog, names: list[str] | None) -> list[Gpu]:
    """The GPUs of these names; without names every GPU that AIConfigurator has kernel tables of."""
    from planner.importers.silicon import SYSTEMS

    if names:
        return [known.gpu(name) for name in names]
    return [gpu for name, gpu in known.gpus.items() if name in SYSTEMS]


@commands.command("prices")
def import_prices(
    file: Annotated[
        Path,
        typer.Argument(readable=False, help="SkyPilot's catalog of a cloud (vms.csv), or a bill in FOCUS."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="A catalog directory; made if need be.")
    ] = None,
    provider: Annotated[
        str | None, typer.Option("--provider", help="Who asks these prices; default: the file's folder.")
    ] = None,
    date: Annotated[
        str | None, typer.Option("--date", help="When they were listed, 2026-11-21; default: today.")
    ] = None,
    region: Annotated[
        str | None, typer.Option("--region", help="Of this region; default: the cheapest.")
    ] = None,
    catalog: CatalogOption = None,
    json_output: JsonOption = False,
) -> None:
    """Read prices from SkyPilot's catalog of a cloud, or from your bill (a FOCUS export); with -o DIR into
    DIR/prices.yaml, for --catalog DIR.
    """
    from planner.documents.catalog import PRICES
    from planner.documents.offers import first_day, offers_document
    from planner.files.checked_files import check_output_directory, to_yaml, write_files
    from planner.importers.focus_billing import is_billing_export, read_billed_prices
    from planner.importers.skypilot import read_prices

    day = date or datetime.date.today().isoformat()
    if first_day(day) is None:
        raise InputError(f"--date {day!r}: expected a date such as 2026-11-21, 2026-11 or 2026")
    if out is not None:
        check_output_directory(out)
    known = read_catalog(catalog)
    if is_billing_export(file):
        billed = read_billed_prices(file, known, provider=provider, date=day, region=region)
        offers, notes = billed.offers, list(billed.left_out)
    else:
        who = provider or file.resolve().parent.name
        listed = read_prices(file, known, provider=who, date=day, region=region)
        offers, notes = listed.offers, list(listed.unnamed)
        if listed.without_price:
            notes.append(f"{listed.without_price} rows of GPUs have no price on demand")
    document = offers_document(offers)
    who = next(iter(offers.values()))[0].provider
    if out is not None:
        write_files(out, {PRICES: to_yaml(document)})
    if json_output:
        print_json({"prices": document, "left_out": notes} | ({"directory": str(out)} if out else {}))
        return
    say_first(notes)
    print_rows([{"gpu": gpu} | offer for gpu, each in document.items() for offer in each], f"prices of {who}")
    on_demand = {gpu: o.usd_per_h for gpu, each in offers.items() for o in each if o.term == "on-demand"}
    prices = ", ".join(f"{gpu}: {usd_per_h:.6g} usd/h" for gpu, usd_per_h in on_demand.items())
    console = stdout_console(soft_wrap=True)
    console.print(f"for slo.yaml:  fleet: {{prices: {{{prices}}}}}", markup=False)
    if out is not None:
        console.print(
            f"written to {out / PRICES}; or, with --catalog {out}:  fleet: {{price_of: {{provider: {who}}}}}",
            markup=False,
        )
