"""`plan import`, `plan fit`, `plan calibrate` and `plan profile`: from measurements to fits. Slow imports are
within functions, so that other commands start fast.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands import shared_options
from planner.commands.command_output import Progress, at_work, refuse_to_overwrite
from planner.commands.printed_tables import print_json, print_mapping, print_rows
from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.units import show_percent

FactLlm = Annotated[str | None, typer.Option("--llm", help="The LLM, where the file does not say it.")]
FactGpu = Annotated[str | None, typer.Option("--gpu", help="The GPU, where the file does not say it.")]
FactTp = Annotated[
    int | None, typer.Option("--tp", min=1, help="Tensor parallelism, where the file does not say it.")
]


def import_measurements(
    format: Annotated[str, typer.Argument(help="auto, or a format of docs/import.md.")],
    out: shared_options.OutOption,
    measured: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", readable=False, help="What was measured; folders of results too."),
    ] = None,
    llm: FactLlm = None,
    gpu: FactGpu = None,
    tp: FactTp = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests kept in flight.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.0, help="Requests/s that arrived.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of a run; a batch's size.")] = None,
    input_tokens: Annotated[float | None, typer.Option(min=1.0, help="Mean prompt length.")] = None,
    output_tokens: Annotated[float | None, typer.Option(min=1.0, help="Mean output length.")] = None,
    length_spread: Annotated[
        float | None, typer.Option(min=0.0, max=0.99, help="0.2: lengths lay within 20 % of their mean.")
    ] = None,
    duration: Annotated[str | None, typer.Option(help="Time between two scrapes, '10 min'.")] = None,
    catalog: shared_options.CatalogOption = None,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Turn a profile into a step table, or an end-to-end benchmark into a runs.json: see fit, calibrate."""
    from planner import importers
    from planner.files import checked_files
    from planner.units import parse_quantity

    paths = measured or []
    checked_files.check_output_file(out)
    files_in_folders = [file for path in paths if path.is_dir() for file in path.rglob("*.json*")]
    refuse_to_overwrite([out], *paths, *files_in_folders)
    duration_s = None if duration is None else parse_quantity(duration, "s", where="--duration")
    stated = importers.StatedSetup(
        llm,
        gpu,
        tp,
        concurrency,
        rate or None,  # A rate of 0 says nothing about the load.
        requests,
        input_tokens,
        output_tokens,
        duration_s,
        length_spread,
    )
    imported = importers.read(format, paths, stated, read_catalog(catalog))
    checked_files.write_file(
        out, imported.to_json() if isinstance(imported, importers.MeasuredRuns) else imported.to_csv()
    )
    summary = {"file": str(out)} | importers.summarise_import(imported)
    if json_output:
        print_json(summary)
    else:
        print_mapping({key: value for key, value in summary.items() if value}, "")


def fit_steps(
    table: Annotated[Path, typer.Argument(readable=False, help="A step table, from import or profile.")],
    out: shared_options.OutOption,
    llm: FactLlm = None,
    gpu: FactGpu = None,
    tp: FactTp = None,
    host_overhead: Annotated[
        str | None,
        typer.Option(help="The engine's own part of each step, '2 ms'; default: what the table measured."),
    ] = None,
    choose: Annotated[
        bool, typer.Option("--choose", help="Try every family of models; take the best on held-out steps.")
    ] = False,
    catalog: shared_options.CatalogOption = None,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Fit step times to a step table; the file goes into a catalog's latency/, or beside a fleet.yaml."""
    from planner.calibrate.fitting import fit_table, fit_yaml
    from planner.files import checked_files
    from planner.importers import StatedSetup
    from planner.models.step_tables import read_step_table
    from planner.units import parse_quantity

    checked_files.check_output_file(out)
    refuse_to_overwrite([out], table)
    overhead_s = (
        None if host_overhead is None else parse_quantity(host_overhead, "s", where="--host-overhead")
    )
    with Progress():
        fitted = fit_table(
            read_step_table(table),
            StatedSetup(llm, gpu, tp),
            read_catalog(catalog),
            where=str(table),
            host_overhead_s=overhead_s,
            choose_family=choose,
        )
        options = {"-o": out, "--llm": llm, "--gpu": gpu, "--tp": tp, "--host-overhead": host_overhead}
        command = _command_line("fit", [table], {**options, "--choose": choose, "--catalog": catalog})
        checked_files.write_file(out, fit_yaml(fitted, command=command))
    if json_output:
        print_json({"file": str(out)} | fitted.as_dict())
    else:
        print_rows(
            [
                {
                    "steps": step_kind,
                    "count": error.steps,
                    "mean error": show_percent(error.mape_frac, ".2f"),
                    "9 in 10 below": show_percent(error.p90_frac, ".2f"),
                }
                for step_kind, error in fitted.errors.items()
            ],
            f"{fitted.llm} on {fitted.tp} x {fitted.gpu}: held-out errors",
        )
        if fitted.families:
            print_rows(
                [
                    {"family": name}
                    | {step_kind: show_percent(error.mape_frac, ".2f") for step_kind, error in errors.items()}
                    for name, errors in fitted.families.items()
                ],
                "every family, mean error on held-out steps",
            )
        print_mapping({"written to": str(out), **({"notes": fitted.notes} if fitted.notes else {})}, "")


def calibrate_fit(
    measured: Annotated[
        list[Path], typer.Argument(readable=False, help="Step tables and runs.json of one engine.")
    ],
    out: shared_options.OutOption,
    base: Annotated[
        Path | None, typer.Option("--fit", readable=False, help="The fit to correct; default: the catalog's.")
    ] = None,
    llm: FactLlm = None,
    gpu: FactGpu = None,
    tp: FactTp = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Of the measured engine.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Of the measured engine.")] = 256,
    kv_tokens: Annotated[int | None, typer.Option(min=16, help="Its KV cache, from its log.")] = None,
    catalog: shared_options.CatalogOption = None,
    executor: shared_options.ExecutorOption = None,
    address: shared_options.AddressOption = None,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Correct a fit by a few measured steps or end-to-end runs, and say how sure the result is."""
    from planner.calibrate.fitting import calibrate_files, fit_yaml
    from planner.files import checked_files
    from planner.importers import StatedSetup

    checked_files.check_output_file(out)
    refuse_to_overwrite([out], *measured, base)
    with Progress() as progress, at_work(executor, address):
        progress("calibrating")
        fitted, result = calibrate_files(
            measured,
            StatedSetup(llm, gpu, tp),
            read_catalog(catalog),
            base=base,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            kv_tokens=kv_tokens,
        )
        options = {"-o": out, "--fit": base, "--llm": llm, "--gpu": gpu, "--tp": tp, "--catalog": catalog}
        options |= {"--max-num-batched-tokens": max_num_batched_tokens, "--max-num-seqs": max_num_seqs}
        command = _command_line("calibrate", measured, {**options, "--kv-tokens": kv_tokens})
        checked_files.write_file(out, fit_yaml(fitted, command=command))
    if json_output:
        print_json({"file": str(out)} | fitted.as_dict() | {"calibration": result.as_dict()})
    else:
        summary = result.as_dict()
        errors = [
            {"measured": name, "after": show_percent(error_frac, "+.1f")}
            for name, error_frac in summary.pop("errors").items()
        ]
        if errors:
            print_rows(errors, "prediction against measurement, corrected")
        print_mapping({"written to": str(out), **summary, "notes": fitted.notes}, "")


def _command_line(verb: str, files: Sequence[Path], options: Mapping[str, object]) -> str:
    """The command that makes this fit, with all given options; it is written into the fit's file."""
    words = ["plan", verb, *map(str, files)]
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words += [name, str(value)]
    return shlex.join(words)


def profile_steps(
    config: Annotated[
        Path, typer.Argument(readable=False, help="A Hugging Face config.json, or its folder.")
    ],
    out: Annotated[Path, shared_options.out_file("The step table; a run goes on in it.")],
    engine: Annotated[str, typer.Option("--engine", help="vllm, torch (operators alone) or auto.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", min=1, help="Measure one rank's share, on one GPU.")] = 1,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights and KV cache.")] = "bfloat16",
    gpu: Annotated[str | None, typer.Option("--gpu", help="The catalog's name of this GPU.")] = None,
    budget: Annotated[float, typer.Option("--budget", min=1, help="Seconds to measure for, in all.")] = 600.0,
    max_num_batched_tokens: Annotated[int, typer.Option("--max-num-batched-tokens", min=2)] = 8192,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=2)] = 256,
    max_model_len: Annotated[int, typer.Option("--max-model-len", min=128)] = 32768,
    eager: Annotated[bool, typer.Option("--eager", help="Without compilation and CUDA graphs.")] = False,
    steps_only: Annotated[
        bool,
        typer.Option("--steps-only", help="Leave out what host and front end of vLLM add: engines.yaml."),
    ] = False,
    engines: Annotated[
        int | None,
        typer.Option(
            "--engines", min=1, help="Engines that will share this machine; default 1, on a CPU one per core."
        ),
    ] = None,
    catalog: shared_options.CatalogOption = None,
    seed: shared_options.SeedOption = 0,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Measure step times here: a vLLM engine's with dummy weights, or those of its operators in torch.

    With vLLM also what its host and front end add, into engines.yaml beside the table.
    """
    from planner.runtime.profiled import profile_engine
    from profiling.measure import Subject, profile, profile_summary
    from profiling.vllm_install import is_installed

    if out.suffix == ".gz":
        raise InputError(f"{out}: a run goes on in its table, which cannot be packed; drop the .gz ending")
    refuse_to_overwrite([out], config)
    subject = Subject(engine, tp, dtype, gpu, max_num_batched_tokens, max_num_seqs, max_model_len, eager)
    command = " ".join(["plan", *sys.argv[1:]])
    catalog_rows = read_catalog(catalog)
    with Progress() as progress:
        profile_options: dict[str, Any] = {
            "budget_s": budget,
            "seed": seed,
            "command": command,
            "progress": progress,
            "catalog": catalog_rows,
        }
        # The time of host and front end is measured on vLLM's own server, so only where vLLM is installed.
        if steps_only or engine == "torch" or not is_installed():
            values = {"file": str(out)} | profile_summary(profile(config, out, subject, **profile_options))
        else:
            profiled = profile_engine(config, out, subject, engine_count=engines, **profile_options)
            values = {"file": str(out)} | profile_summary(profiled.steps) | profiled.as_dict()
    if json_output:
        print_json(values)
    else:
        print_mapping(values, "profile")
