"""`plan validate` and `plan serve`: a plan on real vLLM engines. Imports within functions keep other commands
fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands import shared_options
from planner.commands.command_output import (
    SLO_MISSED,
    Progress,
    print_warnings,
    read_requests,
    traffic_option,
)
from planner.commands.printed_tables import print_json, print_lines, print_mapping, print_rows
from planner.domain import Slo
from planner.errors import InputError
from planner.runtime.launch import API_KEYS

if TYPE_CHECKING:
    from planner.api.validating import ValidationKeys, ValidationResult
    from planner.documents.catalog import Catalog
    from planner.documents.warm_up import WarmPrompt
    from planner.fleet import Fleet
    from planner.runtime.analysis import ValidationSetup

PREDICTION_OFF = 6  # An exit code.
LEAST_KEY_CHARACTERS = 16  # In base 64 these are 96 random bits, which nobody can guess over a network.

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
WorkersOption = Annotated[
    list[str] | None,
    typer.Option("--workers", metavar="POOL=URL,...", help="Start no engine: these run already."),
]
DrainOption = Annotated[
    float, typer.Option("--drain", min=0.0, help="Seconds that requests have to end after SIGTERM.")
]
ConnectionsOption = Annotated[
    int, typer.Option("--connections", min=1, help="Most open connections of clients.")
]
PerClientOption = Annotated[
    int, typer.Option("--per-client", min=1, help="Most of one address, loopback excepted.")
]
FirstByteOption = Annotated[
    float, typer.Option("--first-byte", min=0.1, help="Seconds in which a worker must begin a stream.")
]
WholeOption = Annotated[
    float, typer.Option("--whole-answer", min=0.1, help="Seconds for an answer that is no stream.")
]
AnswerBytesOption = Annotated[
    int, typer.Option("--answer-bytes", min=1024, help="Largest answer of a worker.")
]
WarmUpOption = Annotated[
    Path | None,
    typer.Option("--warm-up", readable=False, help="Prompts that workers keep: warm-up.json with them."),
]
EngineOption = Annotated[
    str, typer.Option("--engine", help="vllm, or rehearsal: processes that only keep time, as the fit says.")
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", help="Measure this OpenAI-compatible endpoint; https://host/v1. Nothing is started."
    ),
]
KeyOption = Annotated[
    str | None, typer.Option("--api-key-env", metavar="NAME", help="Environment variable with its key.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="As the endpoint calls it; default: the plan's LLM.")
]
MostUsdOption = Annotated[
    float | None, typer.Option("--max-usd", help="Most that all requests may cost, at --usd-per-million.")
]
PricesOption = Annotated[
    str | None,
    typer.Option(
        "--usd-per-million", metavar="INPUT,OUTPUT", help="Prices of a million prompt and output tokens."
    ),
]
MostRequestsOption = Annotated[
    int | None, typer.Option("--max-requests", help="Most to send, probes and warm-up included.")
]
MostFailedOption = Annotated[
    float, typer.Option("--max-failed", help="Share of the last 50 that may fail before the run ends.")
]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds for one request to the endpoint.")]
PrometheusOption = Annotated[
    list[str] | None,
    typer.Option("--prometheus", metavar="URL", help="An engine's /metrics, or a Prometheus server."),
]
SliceOption = Annotated[
    bool, typer.Option("--slice", help="One worker of each type, with its share of the traffic.")
]
P50Option = Annotated[
    float | None, typer.Option(min=0.0, help="Allowed relative error at P50; 0.05, on a CPU 0.2.")
]
P90Option = Annotated[float | None, typer.Option(min=0.0, help="Likewise at P90; 0.09, on a CPU 0.3.")]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit code 6 where the prediction does not agree.")
]


def validate(
    plan: PlanArgument,
    out: Annotated[Path, shared_options.out_folder("Folder; an interrupted run goes on in it.")],
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", readable=False, help=shared_options.TRACE_HELP + " Default: the plan's own, beside it."
        ),
    ] = None,
    slo: shared_options.SloOption = None,
    slice_: SliceOption = False,
    config: ConfigOption = None,
    weights: WeightsOption = "dummy",
    engine: EngineOption = "vllm",
    rate: shared_options.RateOption = None,
    scale: shared_options.ScaleOption = "superpose",
    window: shared_options.WindowOption = None,
    tolerance_p50: P50Option = None,
    tolerance_p90: P90Option = None,
    strict: StrictOption = False,
    url: UrlOption = None,
    api_key_env: KeyOption = None,
    model: ModelOption = None,
    max_usd: MostUsdOption = None,
    usd_per_million: PricesOption = None,
    max_requests: MostRequestsOption = None,
    max_failed: MostFailedOption = 0.1,
    timeout: TimeoutOption = 600.0,
    prometheus: PrometheusOption = None,
    catalog: shared_options.CatalogOption = None,
    seed: shared_options.SeedOption = 0,
    png: shared_options.PngOption = False,
    drop_invalid: shared_options.DropOption = False,
    json_output: shared_options.JsonOption = False,
    quiet: shared_options.QuietOption = False,
) -> None:
    """Start a plan on vLLM engines here, replay the traffic, and say how far the prediction was off.

    With --url no engine is started: the traffic goes to a deployment that others run, over OpenAI's API,
    within --max-requests and --max-usd.

    Exit code 5 when the engines did not keep the SLO (the plan's own, or --slo), else 6 with --strict when
    the prediction was off by more than is allowed.
    """
    from planner.api.inputs import plan_file
    from planner.api.validating import need_aiohttp, traffic_beside_plan, validate
    from planner.documents.catalog import read_catalog
    from planner.files.checked_files import check_output_directory

    need_aiohttp()
    check_output_directory(out)
    keys: ValidationKeys = {
        "engine": engine,
        "weights": weights,
        "config": config,
        "is_slice": slice_,
        "tolerance_p50_frac": tolerance_p50,
        "tolerance_p90_frac": tolerance_p90,
        "png": png,
        "url": url,
        "api_key_env": api_key_env,
        "model": model,
        "max_usd": max_usd,
        "usd_per_million": _parse_prices(usd_per_million),
        "max_requests": max_requests,
        "prometheus": prometheus or (),
    }
    if url is not None:  # Without an endpoint these keys are refused, and both options have defaults.
        keys |= {"max_failed_frac": max_failed, "timeout_s": timeout}
    with Progress(quiet=quiet) as keys["progress"]:
        rows, file, traffic = read_catalog(catalog), plan_file(plan), traffic_option(rate, scale, window)
        warnings = print_warnings(_fleet_warnings(file, slo, rows))
        requests = read_requests(trace or traffic_beside_plan(file), drop_invalid=drop_invalid)
        result = validate(file, out, requests, slo, traffic=traffic, catalog=rows, seed=seed, **keys)
    _print_result(result, out, warnings + requests.warnings, json_output=json_output)
    if result.slo_holds is False:
        raise typer.Exit(SLO_MISSED)
    if strict and not result.agrees:
        raise typer.Exit(PREDICTION_OFF)


def _fleet_warnings(file: Path, slo: Path | None, catalog: Catalog) -> list[str]:
    """What is doubtful in a fleet file. An invalid file is refused here, before a long trace is read."""
    from planner.api.inputs import fleet_file_warnings, read_fleet

    return fleet_file_warnings(file, read_fleet(file, catalog, slo=slo), slo=slo, catalog=catalog)


def _parse_prices(text: str | None) -> tuple[float, float] | None:
    """--usd-per-million: the prices of a million prompt and of a million output tokens [USD]."""
    if text is None:
        return None
    try:
        per_input, per_output = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--usd-per-million: expected INPUT,OUTPUT such as 0.15,0.6, found {text[:60]!r}"
        ) from None
    return per_input, per_output


def _print_result(result: ValidationResult, out: Path, warnings: Iterable[str], *, json_output: bool) -> None:
    """Print measured and predicted figures; as one JSON object with `json_output`."""
    from planner.runtime.validation_document import STATUSES, error_rows

    document = result.to_dict()
    if json_output:
        print_json(document, warnings)
        return
    print_lines(result.headline(), style="bold")
    print_rows(error_rows(result.validation), *result.sentences())
    counts = {key: document[key] for key in STATUSES if document[key]}
    if document["endpoint"] is not None:
        for note in document["notes"]:
            print_lines(note)
    print_mapping(counts | {"written to": f"{out}: report.html, validation.json, requests.csv"}, "")


def serve(
    plan: PlanArgument,
    host: Annotated[str, typer.Option("--host", help="Beyond loopback, API keys are needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8000,
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", readable=False, help=f"File with one key per line; or ${API_KEYS}."),
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
    workers: WorkersOption = None,
    drain: DrainOption = 30.0,
    connections: ConnectionsOption = 10_000,
    per_client: PerClientOption = 1_000,
    first_byte: FirstByteOption = 600.0,
    whole_answer: WholeOption = 3600.0,
    answer_bytes: AnswerBytesOption = 256 * 2**20,
    warm_up: WarmUpOption = None,
    catalog: shared_options.CatalogOption = None,
    seed: shared_options.SeedOption = 0,
) -> None:
    """Serve a plan behind one address with OpenAI's API: engines of this machine, or --workers elsewhere."""
    from planner.api.inputs import fleet_file_warnings, plan_file, read_fleet
    from planner.api.validating import need_aiohttp
    from planner.documents.fleet_file import max_model_len_of

    need_aiohttp()
    import asyncio  # Imported here, because the import takes 0.05 s.

    from planner.files.checked_files import check_output_directory, read_yaml
    from planner.manifests.engine_command import why_not_started
    from planner.runtime.connection_limits import ConnectionLimits, bind_sockets
    from planner.runtime.remote_workers import parse_workers
    from planner.runtime.remote_workers import serve as serve_remotes
    from planner.runtime.router import RouterSettings
    from planner.runtime.service import log_to_stderr
    from planner.runtime.validate import serve as serve_here
    from planner.runtime.validate import until_signalled

    file = plan_file(plan)
    fleet = read_fleet(file, catalog)
    print_warnings(fleet_file_warnings(file, fleet))
    warm_prompts, client_keys = _warm_prompts(warm_up, fleet, file), _read_keys(api_keys)
    longest_planned_tokens = max_model_len_of(read_yaml(file), file)
    settings = RouterSettings(
        keys=client_keys,
        longest_tokens=max_model_len or longest_planned_tokens or fleet.llm.context_tokens,
        first_byte_s=first_byte,
        whole_s=whole_answer,
        answer_bytes=answer_bytes,
        limits=ConnectionLimits(connections=connections, connections_per_client=per_client),
    )
    if not workers and engine != "rehearsal" and (why := why_not_started(fleet)):
        raise InputError(f"{file}: {why}; or give --workers, or --engine rehearsal")
    log_to_stderr()
    with ExitStack() as stack:
        bound_sockets = bind_sockets(host, port, has_keys=bool(client_keys))
        sockets = [stack.enter_context(socket) for socket in bound_sockets]
        if workers:
            urls = parse_workers(workers)
            work = serve_remotes(
                fleet, urls, settings, sockets, drain_s=drain, say=print_lines, warm_up=warm_prompts
            )
        else:
            check_output_directory(logs)
            options: ValidationKeys = {"engine": engine, "weights": weights, "config": config}
            engines = _engines_to_start(options, fleet, settings.longest_tokens, seed)
            work = serve_here(
                engines, logs, settings, sockets, drain_s=drain, say=print_lines, warm_up=warm_prompts
            )
        with suppress(asyncio.CancelledError):  # Signals such as Ctrl-C cancel the work.
            asyncio.run(until_signalled(work))
    print_lines("stopped")


def _warm_prompts(warm_up: Path | None, fleet: Fleet, file: Path) -> tuple[WarmPrompt, ...]:
    """The prompts of warm-up.json, which workers compute at the start and cache; empty without the file.
    Raises InputError if the fleet has pinned prefixes and the file is missing.
    """
    from planner.documents.warm_up import read_warm_up

    if warm_up is not None:
        return read_warm_up(warm_up, fleet)
    if fleet.pinned:
        raise InputError(
            f"{file}: workers keep pinned prefixes, whose words a plan does not know; give --warm-up "
            "with the plan's warm-up.json and a prompt in each row"
        )
    return ()


def _engines_to_start(
    options: ValidationKeys, fleet: Fleet, longest_tokens: int, seed: int
) -> ValidationSetup:
    """The setup that starts the fleet's engines, for requests of up to `longest_tokens` tokens."""
    import numpy as np

    from planner.api.validating import validation_setup
    from planner.traffic.trace import Trace

    # A setup needs a trace: here one request of one token, which is never sent, because nothing is replayed.
    unused = Trace("none", np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    return validation_setup(
        options, fleet=fleet, trace=unused, slo=Slo(()), max_model_len=longest_tokens, seed=seed
    )


def _read_keys(file: Path | None) -> tuple[str, ...]:
    """The API keys in a file, else in the environment. No option takes keys, because everybody on the machine
    can read command lines. Raises InputError for a key that is short or not in plain ASCII.
    """
    from planner.files.checked_files import open_text

    if file is None:
        # `pop`, because the engines inherit the environment.
        where, lines = f"${API_KEYS}", os.environ.pop(API_KEYS, "").split(",")
    else:
        where = str(file)
        with open_text(file) as stream:
            lines = stream.read().decode().splitlines()
    keys = tuple(line.strip() for line in lines if line.strip())
    if file is not None and not keys:
        raise InputError(f"{where}: holds no key; write one on each line")
    for number, key in enumerate(keys, start=1):
        if not all("!" <= letter <= "~" for letter in key):
            raise InputError(f"{where}: key {number} holds a space or another letter than ASCII's")
    for number, key in enumerate(keys, start=1):
        if len(key) < LEAST_KEY_CHARACTERS:
            raise InputError(
                f"{where}: key {number} has {len(key)} characters, expected at least {LEAST_KEY_CHARACTERS}; "
                "`openssl rand -hex 16` makes one"
            )
    return keys
