"""`plan validate` and `plan serve`: a plan on real vLLM engines."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from planner.commands.common import (
    TRACE_HELP,
    CatalogOption,
    DropOption,
    JsonOption,
    PngOption,
    Progress,
    RateOption,
    ScaleOption,
    SeedOption,
    SloOption,
    WindowOption,
    asked_of,
    print_json,
    print_mapping,
    print_rows,
    read_requests,
    stdout_console,
)
from planner.documents.catalog import Catalog, read_catalog
from planner.domain import Slo
from planner.errors import InputError

SLO_MISSED, OFF = 5, 6
KEYS_VARIABLE = "FLEETPLAN_API_KEYS"

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", readable=False, help="plan.yaml, its folder, or a fleet.yaml.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        readable=False,
        help="A config.json to serve in place of the plan's LLM, with dummy weights.",
    ),
]
WeightsOption = Annotated[str, typer.Option("--weights", help="dummy, or real: loaded as vLLM finds them.")]
EngineOption = Annotated[
    str, typer.Option("--engine", help="vllm, or rehearsal: processes that only keep time, as the fit says.")
]


def validate(
    plan: PlanArgument,
    out: Annotated[
        Path, typer.Option("--out", "-o", readable=False, help="Folder; an interrupted run goes on in it.")
    ],
    trace: Annotated[
        Path | None,
        typer.Option("--trace", readable=False, help=TRACE_HELP + " Default: the plan's own, beside it."),
    ] = None,
    slo: SloOption = None,
    slice_: Annotated[
        bool, typer.Option("--slice", help="One worker of each type, with its share of the traffic.")
    ] = False,
    config: ConfigOption = None,
    weights: WeightsOption = "dummy",
    engine: EngineOption = "vllm",
    rate: RateOption = None,
    scale: ScaleOption = "superpose",
    window: WindowOption = None,
    tolerance_p50: Annotated[
        float | None, typer.Option(min=0.0, help="Allowed relative error at P50; 0.05, on a CPU 0.2.")
    ] = None,
    tolerance_p90: Annotated[
        float | None, typer.Option(min=0.0, help="Likewise at P90; 0.09, on a CPU 0.3.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 6 where the prediction does not agree.")
    ] = False,
    catalog: CatalogOption = None,
    seed: SeedOption = 0,
    png: PngOption = False,
    drop_invalid: DropOption = False,
    json_output: JsonOption = False,
) -> None:
    """Start a plan on vLLM engines here, replay the traffic, and say how far the prediction was off.

    Exit code 5 when the engines did not keep the SLO (the plan's own, or --slo), else 6 with --strict when
    the prediction was off by more than is allowed.
    """
    _need_aiohttp()
    import numpy as np

    from planner.io.files import check_output_directory
    from planner.runtime.document import STATUSES, document, rows
    from planner.runtime.validate import slice_of
    from planner.runtime.validate import validate as run

    check_output_directory(out)
    with Progress() as progress:
        known = read_catalog(catalog)
        file = _plan_file(plan)
        fleet, longest = _fleet(file, known)
        promise, asked = asked_of(
            slo, known, rate=rate, scale=scale, window=window or "whole", command="validate"
        )
        read = read_requests(trace or _beside(file), seed=seed, drop_invalid=drop_invalid)
        requests = asked.of(read, seed=seed)
        longest = longest or int(np.max(requests.input_tokens + requests.output_tokens))
        notes: tuple[str, ...] = ()
        whole = None
        if slice_:
            whole = fleet, requests
            fleet, requests, note = slice_of(fleet, requests)
            notes = (f"Validated was a {note}.",)
        wanted = _wanted(
            fleet=fleet,
            trace=requests,
            slo=promise or _own_slo(file),
            max_model_len=longest,
            seed=seed,
            engine=engine,
            config=config,
            weights=weights,
            notes=notes,
            plan=whole,
        )
        found = run(
            wanted,
            out,
            tolerances=_tolerances(engine, tolerance_p50, tolerance_p90),
            progress=progress,
            png=png,
        )
        told = document(found)
    if json_output:
        print_json(told, read.warnings)
    else:
        stdout_console(soft_wrap=True).print(told["verdict"], style="bold", markup=False)
        print_rows(rows(found), f"{told['compared']} of {told['requests']} requests, {told['times']}")
        counts = {key: told[key] for key in STATUSES if told[key]}
        print_mapping(counts | {"written to": f"{out}: report.html, validation.json, requests.csv"}, "")
    if wanted.slo.limits and not found.slo_holds:
        raise typer.Exit(SLO_MISSED)
    if strict and not found.comparison.agrees:
        raise typer.Exit(OFF)


def serve(
    plan: PlanArgument,
    host: Annotated[str, typer.Option("--host", help="Beyond loopback, API keys are needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8000,
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", readable=False, help=f"File with one key per line; or ${KEYS_VARIABLE}."),
    ] = None,
    logs: Annotated[Path, typer.Option("--logs", readable=False, help="Folder of the engines' logs.")] = Path(
        "engines"
    ),
    max_model_len: Annotated[
        int | None, typer.Option(min=16, help="Longest request; default: the plan's.")
    ] = None,
    config: ConfigOption = None,
    weights: WeightsOption = "real",
    engine: EngineOption = "vllm",
    workers: Annotated[
        list[str] | None,
        typer.Option("--workers", metavar="POOL=URL,...", help="Start no engine: these run already."),
    ] = None,
    catalog: CatalogOption = None,
    seed: SeedOption = 0,
) -> None:
    """Serve a plan behind one address with OpenAI's API: engines of this machine, or --workers elsewhere."""
    _need_aiohttp()
    import numpy as np

    from planner.io.files import check_output_directory
    from planner.runtime.remote import parse_workers
    from planner.runtime.remote import serve as serve_remotes
    from planner.runtime.router import Settings
    from planner.runtime.validate import serve as run
    from planner.runtime.validate import until_signalled
    from planner.traffic.trace import Trace

    console = stdout_console(soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False)

    file = _plan_file(plan)
    fleet, longest = _fleet(file, read_catalog(catalog))
    longest, keys = max_model_len or longest or fleet.llm.context_tokens, _keys(api_keys)
    if workers:
        settings = Settings(keys=keys, longest_tokens=longest)
        work = serve_remotes(fleet, parse_workers(workers), settings, host=host, port=port, say=say)
    else:
        check_output_directory(logs)
        nothing = Trace("none", np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
        wanted = _wanted(
            fleet=fleet,
            trace=nothing,
            slo=Slo(()),
            max_model_len=longest,
            seed=seed,
            engine=engine,
            config=config,
            weights=weights,
            notes=(),
        )
        work = run(wanted, logs, host=host, port=port, keys=keys, say=say)
    try:
        asyncio.run(until_signalled(work))
    except asyncio.CancelledError:
        say("stopped")


def _need_aiohttp() -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise InputError("real engines need aiohttp: pip install 'fleetplan[runtime]'")


def _plan_file(plan: Path) -> Path:
    return plan / "plan.yaml" if plan.is_dir() else plan


def _beside(file: Path) -> Path:
    """The plan's own traffic; requests.csv says neither who waits for whom nor what prompts share."""
    files = [file.parent / name for name in ("traffic.jsonl", "requests.csv")]
    if (found := next((path for path in files if path.exists()), None)) is None:
        raise InputError(f"--trace: none was given, and there is no {files[1]}; give the traffic to replay")
    return found


def _fleet(file: Path, known: Catalog) -> tuple[Any, int | None]:
    from planner.documents.fleet import read_fleet, read_max_model_len

    return read_fleet(file, known), read_max_model_len(file)


def _own_slo(file: Path) -> Slo:
    """The plan's own promise; none in a fleet.yaml."""
    from planner.documents.slo import parse_slo
    from planner.io.files import read_yaml

    own = read_yaml(file).get("slo")
    return Slo(()) if own is None else parse_slo(own, where=f"{file}: slo")


def _wanted(*, engine: str, weights: str, config: Path | None, **values: Any) -> Any:
    from planner.runtime.analysis import EngineKind, Wanted

    if engine not in ("vllm", "rehearsal"):
        raise InputError(f"--engine: expected vllm or rehearsal, found {engine!r}")
    if weights not in ("dummy", "real"):
        raise InputError(f"--weights: expected dummy or real, found {weights!r}")
    if config is not None and weights == "real":
        raise InputError("--config serves dummy weights; leave out --weights real")
    return Wanted(engine=cast(EngineKind, engine), real_weights=weights == "real", config=config, **values)


def _tolerances(engine: str, p50: float | None, p90: float | None) -> Any:
    """Wider on a CPU, which engines, router and client share."""
    from planner.runtime.compare import CPU_TOLERANCES, Tolerances
    from profiling.vllm_install import is_cpu_build

    usual = CPU_TOLERANCES if engine == "rehearsal" or is_cpu_build() else Tolerances()
    return Tolerances(
        usual.p50_frac if p50 is None else p50, usual.p90_frac if p90 is None else p90, usual.attainment_frac
    )


def _keys(file: Path | None) -> tuple[str, ...]:
    """From a file or the environment: a command line can be read by everybody on the machine."""
    from planner.io.files import open_text

    if file is None:
        lines = os.environ.get(KEYS_VARIABLE, "").split(",")
    else:
        with open_text(file) as stream:
            lines = stream.read().decode().splitlines()
    return tuple(line.strip() for line in lines if line.strip())
