"""`plan catalog`: print what the planner knows of GPUs, LLMs and prices, or add to it.

A first word that is no command of this module names a table: `plan catalog gpus`. Imports within functions
keep other commands fast.
"""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from planner.commands import shared_options
from planner.commands.catalog_tables import show_catalog
from planner.commands.command_output import Progress, print_warnings
from planner.commands.printed_tables import print_json, print_lines, print_mapping, print_rows
from planner.documents.catalog import PRICES, Catalog, read_catalog
from planner.documents.offers import ProviderOffer
from planner.domain import KV_BLOCK_TOKENS, Gpu
from planner.errors import InputError
from planner.models.all2all import MOST_LOW_LATENCY_TOKENS
from planner.models.llm import Llm
from planner.models.spread import WITHIN_FRAC
from planner.studies import support
from planner.units import show_percent


class CatalogCommands(TyperGroup):
    """The commands of `plan catalog`. Where none is named, "show" is put in front: `plan catalog gpus` is
    `plan catalog show gpus`.
    """

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
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", help="Fit these GPUs; default: all with kernel tables.")
    ] = None,
    tp: Annotated[
        list[int] | None, typer.Option("--tp", min=1, help="Fit these TPs; default: 1, 2, 4, 8.")
    ] = None,
    catalog: shared_options.CatalogOption = None,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Make fits of step times from AIConfigurator's kernel tables: DIR is then given as --catalog."""
    from planner.files.checked_files import check_output_directory, is_path, to_yaml, write_files
    from planner.importers.silicon_fits import NO_MEMORY, TPS, file_name, silicon_fits

    catalog_rows = read_catalog(catalog)
    check_output_directory(out)
    llm_read, gpus = catalog_rows.llm(llm), _gpus_to_fit(catalog_rows, gpu)
    # AIConfigurator reads an LLM that the catalog lacks from the folder of its config.json. A name of the
    # catalog wins over a file of that name.
    folder = None
    if is_path(llm) and not catalog_rows.has_llm(llm):
        folder = Path(llm).parent if Path(llm).is_file() else Path(llm)
    # The files that are written name this command as their origin.
    command = f"plan catalog fit {llm_read.name if folder is None else llm}"
    documents: dict[str, dict[str, Any]] = {}
    left_out: list[str] = []
    with Progress() as progress:
        for fitted_gpu in gpus:
            progress(f"{llm_read.name} on {fitted_gpu.name}")
            date = datetime.date.today().isoformat()
            fitted = silicon_fits(llm_read, fitted_gpu, tp or TPS, date=date, command=command, folder=folder)
            left_out += fitted.left_out
            if fitted.document is not None:
                documents[f"latency/{file_name(llm_read, fitted_gpu)}"] = fitted.document
    if not documents:
        # Small GPUs often lack memory for an LLM. Another GPU's reason, if there is one, says more.
        reasons = [why for why in left_out if not why.endswith(NO_MEMORY)] or left_out
        raise InputError(
            reasons[0] if reasons else f"{llm_read.name}: no GPU of the catalog has kernel tables"
        )
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
        print_json({"llm": llm_read.name, "fits": rows, "left_out": left_out})
    else:
        print_warnings(left_out)
        print_rows([_fit_columns(row) for row in rows], llm_read.name)


@commands.command("llm")
def show_row(
    config: Annotated[
        Path, typer.Argument(readable=False, help="A config.json, or the folder that holds it.")
    ],
    json_output: shared_options.JsonOption = False,
) -> None:
    """Print the row of llms.yaml that a Hugging Face config.json makes, to be corrected or to be shared."""
    from planner.documents.llm_config import llm_from_config
    from planner.documents.llm_row import llm_row
    from planner.files.checked_files import to_yaml

    llm = llm_from_config(config)
    date = datetime.date.today().isoformat()
    name = llm.name.rsplit("/", 1)[-1]  # Without the organisation.
    document = {name: {**llm_row(llm), "source": f"config.json of {name}", "date": date}}
    if json_output:
        print_json(document)
    else:
        typer.echo(to_yaml(document), nl=False)


@commands.command("support")
def show_support(
    llm: Annotated[str, typer.Argument(help="Name or alias, or the path of its config.json.")],
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", help="Show these GPUs; default: all of the catalog.")
    ] = None,
    catalog: shared_options.CatalogOption = None,
    json_output: shared_options.JsonOption = False,
) -> None:
    """What is known of an LLM on each GPU and TP: memory, step times and what they rest on, their spread."""
    catalog_rows = read_catalog(catalog)
    llm_read = catalog_rows.llm(llm)
    # The row of a GPU without a power cap stands for its rows with caps.
    uncapped = [gpu_row for gpu_row in catalog_rows.gpus.values() if gpu_row.name == gpu_row.base]
    gpus = [catalog_rows.gpu(name) for name in gpu] if gpu else uncapped
    rows = [row for gpu_row in gpus for row in support.support_rows(catalog_rows, llm_read, gpu_row)]
    if not rows:
        weights_text = f"{llm_read.weight_bytes / 1e9:.0f} GB of weights"
        raise InputError(
            f"{llm_read.name}: {weights_text} fit on no node of {', '.join(row.name for row in gpus)}"
        )
    if json_output:
        properties = {
            "parameters_b": round(llm_read.parameters / 1e9, 2),
            "active_b": round(llm_read.active_parameters / 1e9, 2),
            "weights": llm_read.weights,  # The number format of most weights, such as bf16.
            "weight_gb": round(llm_read.weight_bytes / 1e9, 1),
            "kv_bytes_per_token": llm_read.kv_bytes_per_token,
            "state_bytes_per_sequence": llm_read.state_bytes,
        }
        print_json({"llm": llm_read.name, **properties, "on": rows})
        return
    print_mapping(_llm_in_words(llm_read), llm_read.name)
    # Whether a sequence takes memory in addition to its KV tokens, for its windows and states.
    has_beside = any(row["extra_kv_blocks"] for row in rows)
    has_ranks = any(row["dp"] > 1 for row in rows)
    print_rows(
        [_support_columns(row, has_beside, has_ranks) for row in rows],
        "one worker, with vLLM's usual settings",
    )
    verdict, _colour, reason = support.support_badge(rows)
    print_lines(f"{verdict}: {reason[0].lower()}{reason[1:]}")
    shown_gpus = {row["gpu"] for row in rows}
    too_small = [gpu_row.name for gpu_row in gpus if gpu_row.name not in shown_gpus]
    print_lines(*_legend_lines(rows, too_small))


def _llm_in_words(llm: Llm) -> dict[str, str]:
    """The lines of `plan catalog support` on the LLM itself."""
    active = f", {llm.active_parameters / 1e9:.3g} billion of them for a token" if llm.is_mixture else ""
    words = {
        "parameters": f"{llm.parameters / 1e9:,.4g} billion{active}",
        "weights": f"{llm.weight_bytes / 1e9:,.4g} GB, most of them in {llm.weights}",
        "KV cache": f"{llm.kv_bytes_per_token:,.0f} bytes per token, up to {llm.context_tokens:,} tokens",
    }
    if llm.state_bytes:
        words["states"] = f"{llm.state_bytes / 1e6:,.3g} MB per sequence, however long it is"
    if llm.encoder_bytes:
        words["encoder"] = f"{llm.encoder_bytes / 1e9:.2g} GB of the weights, whole on every GPU"
    return words


def _legend_lines(rows: list[dict[str, Any]], too_small: list[str]) -> list[str]:
    """The meaning of the table's columns, and the GPUs (`too_small`) on which no worker fits."""
    lines = ["tp: GPUs of a worker; EP: each has whole experts, else a slice of all. USD/h: of the worker."]
    lines.append("KV tokens: of all sequences of a worker together.")
    if any(row["dp"] > 1 for row in rows):
        lines.append(
            "dp: data-parallel ranks of a worker; each has tp GPUs and the KV tokens that are shown. Plans "
            "choose from fleet: {dp: [1, 2]}."
        )
    if any(row["all2all"] for row in rows):
        lines.append(
            "low latency, high throughput: ranks on several nodes, with DeepEP's kernels of that name; the "
            f"former in steps of up to {MOST_LOW_LATENCY_TOKENS} tokens, the latter in prefill pools."
        )
    if any(row["extra_kv_blocks"] for row in rows):
        lines.append(
            "beside: KV tokens' worth of memory that a sequence of full context takes for its windows and "
            "states, in addition to its KV tokens."
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
    # WITHIN_FRAC of all measurements lie between the ends of a spread, and half of the others above.
    lines.append(
        f"at most: {100 * (1 + WITHIN_FRAC) / 2:.0f} % of measured prefills / decodes took at most this many "
        "times the predicted time; robust: {spread: true} plans for it."
    )
    if too_small:
        lines.append(f"Holds no worker on one node: {', '.join(too_small)}.")
    return lines


def _support_columns(row: dict[str, Any], has_beside: bool, has_ranks: bool) -> dict[str, Any]:
    """The columns of one row of studies/support.py; `has_...` says whether any row needs the column."""
    error = row["error_frac"]  # The held-out error of a fit; `support.STEP_TIMES` explains it.
    # Without measured kernels the error of step times is unknown.
    upper_ends = None if row["unchecked"] else row["spread"]
    beside = {"beside": f"{KV_BLOCK_TOKENS * row['extra_kv_blocks']:,}"} if has_beside else {}
    return {
        "gpu": row["gpu"],
        "tp": f"{row['tp']} EP" if row["ep"] else f"{row['tp']}",
        "USD/h": row["usd_per_h"],
        **({"dp": _ranks_text(row)} if has_ranks else {}),
        "weights GB/GPU": row["weight_gb"],
        "KV tokens": f"{row['kv_tokens']:,}",
        **beside,
        "step times": row["step_times"] + (" (unchecked)" if row["unchecked"] else ""),
        "off": "-" if error is None else show_percent(error),
        "at most": "unknown" if upper_ends is None else "x{:.2f} / x{:.2f}".format(*upper_ends),
    }


def _ranks_text(row: dict[str, Any]) -> str:
    """The ranks and how they exchange tokens: "16 low latency" for the kernels "deepep_low_latency"."""
    return f"{row['dp']} {row['all2all'].removeprefix('deepep_').replace('_', ' ')}".strip()


def _fit_columns(row: dict[str, Any]) -> dict[str, Any]:
    """The printed columns of a fit of step times."""
    return {
        "gpu": row["gpu"],
        "tp": row["tp"],
        "experts": "whole" if row["ep"] else "-",
        "dp": row["dp"],
        "held-out error": show_percent(row["mape_frac"]),
        "file": row["file"],
    }


def _gpus_to_fit(catalog: Catalog, names: list[str] | None) -> list[Gpu]:
    """The GPUs of these names; without names every GPU with kernel tables in AIConfigurator."""
    from planner.importers.silicon import SYSTEMS

    if names:
        return [catalog.gpu(name) for name in names]
    return [gpu for name, gpu in catalog.gpus.items() if name in SYSTEMS]


def _read_offers(
    file: Path, catalog: Catalog, *, provider: str | None, date: str | None, region: str | None
) -> tuple[Mapping[str, tuple[ProviderOffer, ...]], list[str]]:
    """The offers by GPU of a price list or a bill, and a line for each kind of row that was left out."""
    from planner.documents.offers import first_day
    from planner.importers.focus_billing import is_billing_export, read_billed_prices
    from planner.importers.opencost_assets import is_assets_answer, read_asset_prices
    from planner.importers.skypilot import read_prices

    day = date or datetime.date.today().isoformat()
    if first_day(day) is None:  # It is no date.
        raise InputError(f"--date {day!r}: expected a date such as 2026-11-21, 2026-11 or 2026")
    if is_assets_answer(file):  # OpenCost's /assets.json.
        billed = read_asset_prices(file, catalog, provider=provider, date=day, region=region)
        return billed.offers, list(billed.left_out)
    if is_billing_export(file):
        billed = read_billed_prices(
            file, catalog, provider=provider, date=day, region=region, dated_by_bill=date is None
        )
        return billed.offers, list(billed.left_out)
    folder_name = file.resolve().parent.name  # SkyPilot has a folder for each cloud.
    listed = read_prices(file, catalog, provider=provider or folder_name, date=day, region=region)
    notes = list(listed.unknown_gpus)
    if listed.without_price:
        notes.append(f"{listed.without_price} rows of GPUs have no price on demand")
    return listed.offers, notes


@commands.command("prices")
def import_prices(
    file: Annotated[
        Path,
        typer.Argument(
            readable=False, help="SkyPilot's vms.csv of a cloud, a bill in FOCUS, or OpenCost's /assets.json."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="A catalog directory; made if need be.")
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(
            "--provider", help="The provider; default: the bill's, or SkyPilot's folder of the file."
        ),
    ] = None,
    date: Annotated[
        str | None,
        typer.Option(
            "--date", help="When they were listed, 2026-11-21; default: a bill's last day, else today."
        ),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(
            "--region", help="Prices of this region; default: all of a bill, the cheapest of SkyPilot's."
        ),
    ] = None,
    catalog: shared_options.CatalogOption = None,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Read prices from SkyPilot's catalog of a cloud, or from what you pay (a FOCUS export, OpenCost);
    with -o DIR into DIR/prices.yaml, for --catalog DIR.
    """
    from planner.documents.offers import offers_document, offers_of_others
    from planner.files.checked_files import check_output_directory, read_yaml, to_yaml, write_files

    if out is not None:
        check_output_directory(out)
    catalog_rows = read_catalog(catalog)
    offers, notes = _read_offers(file, catalog_rows, provider=provider, date=date, region=region)
    document = offers_document(offers)
    # Each reader returns offers of one provider, and raises if there are none.
    provider_name = next(iter(offers.values()))[0].provider
    if out is not None:
        path, merged = out / PRICES, dict(offers)
        # Prices of other providers in the file stay.
        earlier = offers_of_others(read_yaml(path), provider_name, str(path)) if path.exists() else {}
        for name, others in earlier.items():
            gpu = catalog_rows.gpu(name).name
            merged[gpu] = (*merged.get(gpu, ()), *others)
        write_files(out, {PRICES: to_yaml(offers_document(merged))})
    if json_output:
        print_json({"prices": document, "left_out": notes} | ({"directory": str(out)} if out else {}))
        return
    print_warnings(notes)
    rows = [{"gpu": gpu} | offer for gpu, offers_of_gpu in document.items() for offer in offers_of_gpu]
    print_rows(rows, f"prices of {provider_name}")
    on_demand = {
        gpu: offer.usd_per_h
        for gpu, offers_of_gpu in offers.items()
        for offer in offers_of_gpu
        if offer.term == "on-demand"
    }
    prices = ", ".join(f"{gpu}: {usd_per_h:.6g} usd/h" for gpu, usd_per_h in on_demand.items())
    print_lines(f"for slo.yaml:  fleet: {{prices: {{{prices}}}}}")
    if out is not None:
        print_lines(
            f"written to {out / PRICES}; or, with --catalog {out}:  fleet: {{price_of: {{provider: "
            f"{provider_name}}}}}"
        )
