"""The command line: the table of all commands (each has a module in planner/commands/), and `plan` itself.

stdout carries the answer (a table, or one JSON object with --json), stderr progress and errors. Exit codes:

    0  done                          1  bad input or failure                2  wrong usage
    3  infeasible
    4  nothing was found, or the plan that is written is not the one asked for: it was not finished in time,
       or it is the cheapest on paper because none for production was found
    5  engines or a simulation missed the SLO, or a watched plan no longer holds
    6  the prediction was off, or the traffic of a watched plan has drifted
    130  interrupted                 143  ended by SIGTERM
"""

import errno
import gc
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from planner import __version__
from planner.commands import measurement_commands, shared_options
from planner.commands import validate_command as validation
from planner.commands.allocate_command import allocate
from planner.commands.catalog_command import commands as catalog_commands
from planner.commands.check_command import check
from planner.commands.compare_command import compare
from planner.commands.day_command import day
from planner.commands.described_command import PARTS, init, question_document
from planner.commands.lengths_command import judge_length_predictors
from planner.commands.manifests_command import write_manifests
from planner.commands.mcp_command import serve_mcp
from planner.commands.pareto_command import pareto
from planner.commands.plan_command import PlanOptions, plan_one, plan_several
from planner.commands.prefixes_command import plan_prefixes
from planner.commands.printed_tables import print_json
from planner.commands.replan_command import replan
from planner.commands.report_command import write_report
from planner.commands.schedule_command import schedule
from planner.commands.schema_command import write_schema
from planner.commands.search_commands import find_goodput, search
from planner.commands.simulate_command import simulate
from planner.commands.tiers_command import tiers
from planner.commands.trace_command import summarise_or_convert_trace
from planner.commands.ui_command import show_ui
from planner.commands.watch_command import watch
from planner.commands.what_if_command import sensitivity, what_if
from planner.documents.task import check_keys, has_several_llms
from planner.documents.traffic_description import describes_traffic
from planner.errors import InputError, PlannerError
from planner.files.scarce_resources import missing_resource
from planner.files.standard_streams import fill_standard_streams, keep_native_prints_off_stdout
from planner.policies import ROUTERS_OF
from planner.search.oracle.work_clock import USUAL_LIMIT_S
from planner.slo_metrics import METRICS

# The middle of a longer message is cut out: it may quote a value that fills a file.
LONGEST_MESSAGE_CHARS = 2000

TimeOption = Annotated[
    float,
    typer.Option(
        "--time-limit",
        min=0.1,
        help="Seconds until the best plan so far is written, a safety net; --explain: of each plan.",
    ),
]
ExplainOption = Annotated[
    bool, typer.Option("--explain", help="Plan again around every limit: what does each one cost?")
]
ProveOption = Annotated[
    bool,
    typer.Option("--prove", help="Simulate every cheaper fleet of one worker type per pool, however many."),
]
PerGpuOption = Annotated[
    bool | None,
    typer.Option(
        "--per-gpu/--no-per-gpu",
        help="Plan on each GPU type alone too: how many of each? Default: where there are 2 to 4 types.",
    ),
]


TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", help=f"Plan for the router of one: {', '.join(ROUTERS_OF)}; each: a price for every one."
    ),
]


class CommandLine(typer.Typer):
    """A Typer that reads the commands from their signatures only once per process, as that takes 40 ms."""

    @cached_property
    def commands(self) -> Callable[..., Any]:
        """The function that parses the arguments and runs a command."""
        return get_command(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.commands(*args, **kwargs)


class FilesOrCommands(TyperGroup):
    """The commands. If a file, or a word of another tool, is in the place of one, the error says what to
    write.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Like Typer's method, for a known command."""
        if args and args[0] not in self.commands:
            option = OPTION_OF_SUFFIX.get(Path(args[0]).suffix.lower())
            if option is not None:
                ctx.fail(f"{args[0]!r} is no command; did you mean: plan {option} {args[0]}")
            if (meant := OTHER_WORDS.get(args[0].lower())) is not None:
                ctx.fail(f"{args[0]!r} is no command; did you mean: plan {meant}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Like Typer's method, but for an option of another tool (--qps) the error names ours. Typer would
        suggest the option with the most similar spelling (--gpus), which is seldom meant. In every command an
        empty value is an error: as a path it would be the current folder.
        """
        for previous, arg in itertools.pairwise(["plan", *args]):
            if not arg or re.fullmatch("--[a-z-]+=", arg):
                where = (arg or previous).rstrip("=")
                ctx.fail(f"the value after {where} is empty; is a variable of the shell not set?")
        names = _option_names(self)
        for arg in args:
            if arg in self.commands:  # The options after it belong to that command.
                break
            name = arg.split("=")[0]
            if name.startswith("--") and name not in names and (meant := OTHER_OPTIONS.get(name[2:].lower())):
                ctx.fail(f"No such option: {name}; did you mean: {meant}")
        _refuse_repeated(ctx, self, itertools.takewhile(lambda arg: arg not in self.commands, args))
        return list(super().parse_args(ctx, args))


class AnyCommand(TyperCommand):
    """A command. For an option of a question, or a file without its option, the error says what to write."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Like Typer's method, unless there is an option of a question or a file without its option."""
        names = _option_names(self)
        for arg in args:
            name = arg.split("=")[0]
            if name in ("-o", "--out") and name not in names and "--json" in names:
                ctx.fail(
                    f"No such option: {name}; plan {ctx.info_name} writes no files: `--json > FILE` keeps "
                    "its answer, `plan --slo slo.yaml -o DIR` the plan of a question"
                )
            if name in QUESTION_OPTIONS and name not in names:
                self._refuse_question_option(ctx, name, has_slo="--slo" in names)
        takes_arguments = any(parameter.param_type_name == "argument" for parameter in self.params)
        if args and not args[0].startswith("-") and not takes_arguments:
            self._refuse_bare_file(ctx, args[0], names)
        _refuse_repeated(ctx, self, args)
        return super().parse_args(ctx, args)

    def _refuse_question_option(self, ctx: Any, name: str, *, has_slo: bool) -> None:
        """End with an error for an option such as --llm, which only `plan` and `plan init` have."""
        if has_slo and (limit := re.fullmatch(r"--(\w+)-(p\d+)", name)):
            ctx.fail(
                f"No such option: {name}; plan {ctx.info_name} takes limits from --slo: write, in "
                f"slo.yaml beside llm, slo: {{{limit[1]}: {{{limit[2]}: 1 s}}}}"
            )
        question = "its question from --slo" if has_slo else "no question in options"
        ctx.fail(
            f"No such option: {name}; plan {ctx.info_name} takes {question}: "
            f"`plan {name} ... -o out/` plans from such options and writes out/slo.yaml too"
        )

    def _refuse_bare_file(self, ctx: Any, arg: str, names: set[str]) -> None:
        """End with an error for a file without its option, if that option is one of `names`."""
        path, written = Path(arg), arg
        option = "--fleet" if _is_fleet(path) else OPTION_OF_SUFFIX.get(path.suffix.lower(), "--fleet")
        if option == "--fleet" and "--current" in names:  # The name of this option in plan replan.
            option = "--current"
        elif option == "--fleet" and option not in names and "--slo" in names:
            # A plan's folder, for a command that takes a question. If the plan was made from options, the
            # folder holds its question; otherwise the user has that elsewhere.
            slo = path / "slo.yaml"
            option, written = "--slo", str(slo) if slo.is_file() else slo.name
        if option in names:
            ctx.fail(f"{arg!r} is no option; did you mean: plan {ctx.info_name} {option} {written}")


def _refuse_repeated(ctx: Any, command: Any, args: Iterable[str]) -> None:
    """End with an error for an option of one value that is given twice. Typer would silently take the last:
    of two traces, the first would be ignored.
    """
    of_one_value = {
        name: option
        for option in command.params
        if option.param_type_name == "option" and not (option.multiple or option.is_flag or option.count)
        for name in option.opts
    }
    seen: set[str] = set()
    for arg in itertools.takewhile(lambda arg: arg != "--", args):
        if (option := of_one_value.get(arg.split("=")[0])) is None:
            continue
        if option.name in seen:
            joined = (
                "; `plan trace FILE FILE -o all.csv` joins files of one log" if option.name == "trace" else ""
            )
            ctx.fail(f"{arg.split('=')[0]} is given twice, and takes one value{joined}")
        seen.add(option.name)


def _option_names(command: Any) -> set[str]:
    """The names of a command's options, "--no-..." among them."""
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


def _is_fleet(path: Path) -> bool:
    """Whether the path is a fleet.yaml or plan.yaml, by its name or by the key `workers` in a file."""
    if path.name in ("plan.yaml", "fleet.yaml"):
        return True
    with suppress(OSError, UnicodeDecodeError):
        return (
            path.suffix in (".yaml", ".yml") and re.search(r"^workers:", path.read_text(), re.M) is not None
        )
    return False


# Options of `plan` and `plan init` that describe a question.
QUESTION_OPTIONS = {
    *("--llm", "--rate", "--input", "--output", "--task", "--duration", "--gpus", "--agents", "--objective"),
    *(f"--{metric}-p{percentile}" for metric in METRICS for percentile in (50, 90, 95, 99)),
}
# Words that newcomers use in place of a command -> what to write.
OTHER_WORDS = {
    **dict.fromkeys(
        ("plan", "run", "optimize", "optimise", "size"), "--slo slo.yaml --trace trace.csv -o out/"
    ),
    **{"explain": "--slo slo.yaml --explain", "cost": "what-if", "deploy": "manifests", "diff": "compare"},
    **{"describe": "trace FILE --describe", "convert": "trace FILE -o trace.csv"},
    **{"autoscale": "day", "headroom": "sensitivity", "capacity": "goodput", "benchmark": "validate"},
    **{"gpus": "catalog gpus", "llms": "catalog llms", "models": "catalog llms", "prices": "catalog prices"},
}
# Options of other tools, and limits without a percentile -> what to write.
OTHER_OPTIONS = {
    **dict.fromkeys(("qps", "rps", "request-rate"), "--rate 5, in requests/s"),
    **dict.fromkeys(
        ("isl", "input-tokens", "input-len", "prompt"), "--input 1500, the mean tokens of prompts"
    ),
    **dict.fromkeys(("osl", "output-tokens", "output-len"), "--output 300, the mean tokens of answers"),
    **dict.fromkeys(("model", "model-id"), "--llm"),
    **dict.fromkeys(("gpu", "hardware", "gpu-type"), "--gpus h100,l40s, or h100:16 for sixteen"),
    **dict.fromkeys(
        ("users", "concurrency"), "--agents for agents at work at once; else --rate in requests/s"
    ),
    **dict.fromkeys(("budget", "max-cost"), "limits: {cost: 20 usd/h} in slo.yaml"),
    **dict.fromkeys(("power", "max-power"), "limits: {power: 60 kW} in slo.yaml"),
    **dict.fromkeys(("slo-file", "config"), "--slo slo.yaml"),
    **{f"ttft{at}": "--ttft-p95 800ms" for at in ("", "-p50", "-ms")},
    **{f"itl{at}": "--tbt-p99 200ms, or --tpot-p95 50ms" for at in ("", "-p95", "-p99")},
    **{f"tpot{at}": "--tpot-p95 50ms" for at in ("", "-p50", "-ms")},
    **{f"{name}{at}": "--e2e-p95 20s" for name in ("latency", "e2e") for at in ("", "-p50")},
}
# The option that takes files with this suffix.
OPTION_OF_SUFFIX = {".yaml": "--slo", ".yml": "--slo", ".csv": "--trace", ".jsonl": "--trace"}

app = CommandLine(
    cls=FilesOrCommands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in (
    ("init", init),
    ("what-if", what_if),
    ("sensitivity", sensitivity),
    ("pareto", pareto),
    ("tiers", tiers),
    ("replan", replan),
    ("simulate", simulate),
    ("goodput", find_goodput),
    ("search", search),
    ("compare", compare),
    ("manifests", write_manifests),
    ("report", write_report),
    ("allocate", allocate),
    ("schedule", schedule),
    ("day", day),
    ("trace", summarise_or_convert_trace),
    ("prefixes", plan_prefixes),
    ("lengths", judge_length_predictors),
    ("import", measurement_commands.import_measurements),
    ("fit", measurement_commands.fit_steps),
    ("calibrate", measurement_commands.calibrate_fit),
    ("profile", measurement_commands.profile_steps),
    ("validate", validation.validate),
    ("serve", validation.serve),
    ("watch", watch),
    ("ui", show_ui),
    ("check", check),
    ("schema", write_schema),
    ("mcp", serve_mcp),
):
    app.command(_name, cls=AnyCommand)(_command)
app.add_typer(catalog_commands, name="catalog")


# For `gc.set_threshold`, once all modules are loaded; set by hand, far above the defaults. While modules
# load, the thresholds in fleetplan/__main__.py hold.
SEARCH_THRESHOLDS = (20_000, 50, 50)
# Errors that Python may raise as it looks at a path that a user gave. Another path helps.
PATH_ERRORS = (errno.ENAMETOOLONG, errno.EACCES)


def main() -> None:
    """Run the command line, and exit.

    A PlannerError becomes one line on stderr and its exit code. So do a path at which no file can be, a
    stdout that cannot be written (full disk, closed pipe), and a lack of memory or other resources. Any other
    exception is our bug and keeps its traceback.
    """
    _fill_closed_streams()
    if "--json" in sys.argv or sys.argv[1:2] == ["mcp"]:
        keep_native_prints_off_stdout()
    # The search makes few reference cycles. At the default thresholds the look for them takes 5 % of its
    # time.
    gc.freeze()  # What is loaded now is needed until the end.
    gc.set_threshold(*SEARCH_THRESHOLDS)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A stream that cannot encode × gets \xd7.
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno in PATH_ERRORS and error.filename is not None:
            _exit_with(InputError(f"{error.filename}: {error.strerror}; name another file or folder"))
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EPIPE):
            raise
        # Python flushes stdout once more when it exits, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_print_error(PlannerError(f"the answer cannot be written to stdout ({error.strerror})")))
    except PlannerError as error:
        _exit_with(error)
    except BaseException as error:
        if (resource := missing_resource(error)) is None:
            raise
        why = f" ({error})" if str(error) else ""
        message = f"the {resource} of this machine does not suffice{why}; ask for less"
        sys.exit(_print_error(PlannerError(message)))


def _fill_closed_streams() -> None:
    """Open the standard streams that were closed when this process was started. Otherwise the next files
    would get their numbers, and print() would fail.
    """
    fill_standard_streams()
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


def _exit_with(error: PlannerError) -> NoReturn:
    """Print the error, with --json also as one JSON object on stdout, and exit with its code."""
    if "--json" in sys.argv:
        print_json(error.to_dict())
    sys.exit(_print_error(error))


def _print_error(error: PlannerError) -> int:
    """Print the error as one line on stderr; returns the exit code."""
    message = error.line
    if len(message) > LONGEST_MESSAGE_CHARS:
        message = f"{message[: LONGEST_MESSAGE_CHARS // 2]} ... {message[-LONGEST_MESSAGE_CHARS // 4 :]}"
    print(f"plan: {message}", file=sys.stderr)  # noqa: T201
    return error.exit_code


GPUS_HELP = (
    "GPUs to choose from: h100,l40s, or h100:16 for sixteen. Default: any, which is every GPU on which "
    "kernels of this LLM were measured, or, where there is none, of any LLM."
)
OBJECTIVE_HELP = "cost, power, gpus; throughput: how much do --gpus h100:16 carry?"


def _option(name: str, help: str) -> Any:
    """An option for a part of the question, in place of slo.yaml."""
    return typer.Option(name, help=help, rich_help_panel="The question, where there is no slo.yaml")


def _limit(name: str) -> Any:
    """An option for a limit of the SLO, such as --ttft-p95."""
    metric, percentile = name.removeprefix("--").split("-")
    row = METRICS[metric]
    what = row.name.partition(",")[0] if row.is_of_agents else row.abbreviation
    text = f"{what} that {percentile[1:]} % of {row.counted} keep, such as 800ms."
    return _option(name, text[0].upper() + text[1:])


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    slo: shared_options.SloOption = None,
    trace: shared_options.TraceOption = None,
    out: Annotated[Path | None, shared_options.out_folder("Folder for the plan and all it needs.")] = None,
    catalog: shared_options.CatalogOption = None,
    seed: shared_options.SeedOption = 0,
    time_limit: TimeOption = USUAL_LIMIT_S,
    explain: ExplainOption = False,
    prove: ProveOption = False,
    per_gpu: PerGpuOption = None,
    target: TargetOption = None,
    drop_invalid: shared_options.DropOption = False,
    png: shared_options.PngOption = False,
    json_output: shared_options.JsonOption = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Print all tables too: answers, pools, limits, alternatives."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a run of over five minutes was ended: same -o.")
    ] = False,
    executor: shared_options.ExecutorOption = None,
    address: shared_options.AddressOption = None,
    llm: Annotated[
        str | None, _option("--llm", "An LLM of the catalog, or a path to its config.json.")
    ] = None,
    rate: Annotated[str | None, _option("--rate", "Requests/s.")] = None,
    input_: Annotated[
        str | None, _option("--input", "Prompts: mean tokens, or '{p50: 900, p95: 5000}'.")
    ] = None,
    output: Annotated[str | None, _option("--output", "Answers: likewise.")] = None,
    task: Annotated[str | None, _option("--task", "What requests are like: plan catalog tasks.")] = None,
    agents: Annotated[str | None, _option("--agents", "Agents at work at once; no --rate.")] = None,
    duration: Annotated[str | None, _option("--duration", "How much traffic is drawn, such as 1h.")] = None,
    gpus: Annotated[str | None, _option("--gpus", GPUS_HELP)] = None,
    objective: Annotated[str | None, _option("--objective", OBJECTIVE_HELP)] = None,
    safety: Annotated[str | None, _option("--safety", "Share of scenarios that are kept, or none.")] = None,
    ttft_p90: Annotated[str | None, _limit("--ttft-p90")] = None,
    ttft_p95: Annotated[str | None, _limit("--ttft-p95")] = None,
    ttft_p99: Annotated[str | None, _limit("--ttft-p99")] = None,
    tpot_p90: Annotated[str | None, _limit("--tpot-p90")] = None,
    tpot_p95: Annotated[str | None, _limit("--tpot-p95")] = None,
    tpot_p99: Annotated[str | None, _limit("--tpot-p99")] = None,
    tbt_p99: Annotated[str | None, _limit("--tbt-p99")] = None,
    e2e_p95: Annotated[str | None, _limit("--e2e-p95")] = None,
    e2e_p99: Annotated[str | None, _limit("--e2e-p99")] = None,
    turn_p90: Annotated[str | None, _limit("--turn-p90")] = None,
    task_p90: Annotated[str | None, _limit("--task-p90")] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Find the cheapest fleet that keeps an SLO on a trace, with a certificate and all it takes to deploy it.

    plan --slo slo.yaml --trace azure.csv -o out/

    plan --rate 30 --input 1500 --output 300 --llm llama-3.1-70b --ttft-p95 800ms --tpot-p95 50ms

    slo.yaml may describe its traffic, or hold several LLMs (llms:), each with its trace, on one stock.
    """
    if version:
        typer.echo(f"fleetplan {__version__}")
        return
    if context.invoked_subcommand is not None:
        return
    given = {name.rstrip("_").replace("_", "-"): text for name, text in context.params.items() if text}
    # Options of limits are a metric and a percentile, such as ttft-p95; the last four characters are cut.
    names = (*PARTS, *(name for name in given if name[:-4] in METRICS))
    question = {name: given[name] for name in names if name in given}
    if slo is None and trace is None and out is None and not question:
        typer.echo(context.get_help())
        return
    plan_options = PlanOptions(
        slo, trace, out, catalog, seed, time_limit, explain, prove, per_gpu, drop_invalid, png, json_output
    )
    plan_options = replace(plan_options, verbose=verbose, quiet=quiet, resume=resume, target=target)
    _run_plan(replace(plan_options, executor=executor, address=address), question)


def _run_plan(plan_options: PlanOptions, question: Mapping[str, str]) -> None:
    """Plan for the question that the options give, or for slo.yaml, which has one LLM or several."""
    slo = plan_options.slo
    if question:
        if slo is not None:
            raise InputError(
                f"--{next(iter(question))}: is in place of slo.yaml; write it into {slo}, ask "
                f"plan what-if --slo {slo} --change KEY=VALUE, or drop --slo"
            )
        flags = tuple(part for name, value in question.items() for part in (f"--{name}", value))
        document = question_document(question, has_trace=plan_options.trace is not None)
        plan_one(replace(plan_options, question_options=document, flags=flags))
        return
    if slo is None:
        raise _missing("--slo FILE")
    has_several = has_several_llms(slo)
    lacks_folder = has_several and plan_options.out is None
    has_traffic = plan_options.trace is not None or has_several or describes_traffic(slo)
    if lacks_folder or not has_traffic:
        # Errors in slo.yaml come first: with a misspelt `trafic:` the traffic would seem to be missing.
        check_keys(slo)
        if (trace := plan_options.trace) is not None and not trace.exists():
            raise InputError(f"{trace}: no such file")
        if lacks_folder:
            raise _usage_error("-o DIR is missing: several LLMs are planned into a folder")
        raise _missing("--trace FILE")
    if has_several:
        plan_several(plan_options)
    else:
        plan_one(plan_options)


def _missing(option: str) -> typer.Exit:
    """Print that a plan lacks this option; returns the exit for wrong usage."""
    return _usage_error(
        f"{option} is missing: a plan needs --slo FILE and --trace FILE, or --slo FILE that describes its "
        "traffic, or --llm, --rate, --input, --output and a limit; see plan --help"
    )


def _usage_error(message: str) -> typer.Exit:
    """Print what is wrong with the options; returns the exit for wrong usage."""
    typer.echo(f"plan: {message}", err=True)
    return typer.Exit(2)


if __name__ == "__main__":
    main()
