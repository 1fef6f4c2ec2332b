"""Questions without a file: `plan --rate 30 --input 1500 ...`, and `plan init`, which writes slo.yaml.
Imports within functions keep other commands fast.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands import shared_options
from planner.errors import InputError, PlannerError
from planner.files.document_values import show_value
from planner.slo_metrics import METRICS

ANY = "any"  # All GPUs of the catalog.
MOST_DIGITS = 20  # The most of a number of GPUs: Python refuses to read an int of thousands of digits.
# The options that describe traffic in place of a trace, and all options of a question beside its limits.
DESCRIBING = ("input", "output", "task", "duration", "agents")
PARTS = ("llm", "rate", "input", "output", "task", "duration", "gpus", "safety", "agents", "objective")
# A limit as people type it, "ttft p95 2 s" or "ttft-p95: 2 s"; its groups: metric, percentile, limit.
_LIMIT = re.compile(
    rf"\s*({'|'.join(METRICS)})[ ._-]?(p\d{{1,2}}(?:\.\d+)?)\s*(?:[:=<]=?)?\s*(\S.*?)\s*", re.IGNORECASE
)


def question_document(options: Mapping[str, str], *, has_trace: bool) -> dict[str, Any]:
    """The question as slo.yaml would have it, from the options that were given, by their names (PARTS, and
    limits such as "ttft-p95"). Raises InputError for an option that is missing.
    """
    if "llm" not in options:
        raise InputError("--llm: is missing; name an LLM (plan catalog llms), or give --slo FILE")
    limits = {name: value for name, value in options.items() if name not in PARTS}
    if not limits:
        raise InputError(
            "--ttft-p95: no limit of any kind is given; say which, such as --ttft-p95 800ms --tpot-p95 50ms"
        )
    slo: dict[str, dict[str, str]] = {}
    for name, value in limits.items():
        metric, percentile = name.split("-")
        slo.setdefault(metric, {})[percentile] = space_unit(value)
    described = [name for name in DESCRIBING if name in options]
    if has_trace and described:
        raise InputError(f"--{described[0]}: describes traffic that --trace holds; drop one of the two")
    has_rate = not options.keys().isdisjoint(("rate", "agents")) or options.get("objective") == "throughput"
    if not has_trace and not has_rate:
        raise InputError(
            "--rate: is missing; say how many requests/s, or --agents (how many work at once), or give "
            "--trace FILE"
        )
    if not has_trace and options.keys().isdisjoint(("task", "agents")):
        for name in ("input", "output"):
            if name not in options:
                raise InputError(
                    f"--{name}: is missing; give the mean tokens of prompts and answers, such as --input "
                    "1500 --output 300, or what requests are like, such as --task chat (plan catalog "
                    "tasks), or --trace FILE"
                )
    traffic = {}
    for name in ("rate", *DESCRIBING):
        if name in options:
            parse = space_unit if name == "duration" else parse_plain
            traffic[name] = parse(options[name])
    document: dict[str, Any] = {"llm": options["llm"], "slo": slo, "traffic": traffic}
    if "objective" in options:
        document["objective"] = options["objective"]
    if "gpus" in options:
        document |= _parse_gpus(options["gpus"])
    if "safety" in options:
        document["safety"] = parse_safety(options["safety"])
    return document


@contextmanager
def errors_of_options() -> Iterator[None]:
    """A context in which errors name options: "--ttft-p95" in place of "slo.yaml: slo: ttft p95"."""
    try:
        yield
    except InputError as error:
        text = str(error).removeprefix("slo.yaml: ")
        text = re.sub(r"^slo: (\w+) (p\d+): ", r"--\1-\2: ", text)
        text = re.sub(r"^deploy: target: ", "--target: ", text)
        text = re.sub(r"^traffic: (rate|input|output|task|duration|agents): ", r"--\1: ", text)
        text = re.sub(
            "give a task, or tokens such as input: 300, output: 150; ",
            "give --task NAME, or tokens such as --input 300 --output 150; ",
            text,
        )
        error.args = (text, *error.args[1:])
        raise


def parse_plain(text: str) -> Any:
    """Parse a number, or keys and values such as '{p50: 900, p95: 5000}', as YAML does."""
    from planner.files.checked_files import yaml_value

    return yaml_value(text)


def space_unit(text: str) -> str:
    """'800ms' as '800 ms'."""
    return re.sub(r"^(\d*\.?\d+)([A-Za-z]+)$", r"\1 \2", text.strip())


def parse_stock(text: str) -> list[str] | dict[str, int]:
    """The value of `fleet: gpus`: 'h100,l40s' allows two GPUs without a limit, 'h100:16' sixteen of one GPU,
    'any' all GPUs (an empty list).
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"--gpus {text!r}: names no GPU; write --gpus h100,l40s, or leave it out for any")
    for name in names:
        if (meant := _gpu_and_count(name)) is not None:
            raise InputError(f"--gpus {text!r}: write {meant} for {name}")
    if len(names) == 1 and names[0].lower() == ANY:
        return []
    if any(name.partition(":")[0].strip().lower() == ANY for name in names):
        from planner.documents.task import ANY_ALONE

        raise InputError(f"--gpus {text!r}: {ANY_ALONE}, such as --gpus h100:4")
    counts: dict[str, int] = {}
    for name in names:
        gpu, colon, count = name.rpartition(":")
        if colon and count.strip().isdecimal() and len(count) <= MOST_DIGITS:
            if gpu.strip() in counts:
                raise InputError(f"--gpus {text!r}: {gpu.strip()} is given twice; give the sum of its GPUs")
            counts[gpu.strip()] = int(count)
        elif colon:
            raise InputError(
                f"--gpus {show_value(text)}: {show_value(count.strip())} is no number of GPUs; write "
                f"{gpu.strip()}:16"
            )
    if counts and len(counts) != len(names):
        raise InputError(f"--gpus {text!r}: give a number for every GPU, such as h100:16,l40s:8, or for none")
    return counts or names


def _gpu_and_count(name: str) -> str | None:
    """'h100:4' for '4xH100', '4 x h100' and 'h100x4'; None for any other name."""
    for pattern in (
        r"(?P<count>\d{1,3}) ?[x×*] ?(?P<gpu>[a-z][\w-]*)",
        r"(?P<gpu>[a-z][\w-]*) ?[x×*] ?(?P<count>\d{1,3})",
    ):
        if match := re.fullmatch(pattern, name.lower()):
            return f"{match['gpu']}:{match['count']}"
    return None


def parse_safety(text: str) -> Any:
    """Parse 'none' (or off, no, false), or the share of scenarios in which the SLO must be kept."""
    is_none = text.strip().lower() in ("none", "off", "no", "false")
    return "none" if is_none else {"kept_in": parse_plain(text)}


# -- plan init ---------------------------------------------------------------------------------------------


def init(
    out: Annotated[Path, shared_options.out_file("The file to write.")] = Path("slo.yaml"),
    catalog: shared_options.CatalogOption = None,
) -> None:
    """Ask five questions and write slo.yaml: the LLM, its traffic, the SLO, GPUs, safety.

    Answers may be piped in, a line each; an empty one takes what stands in brackets.
    """
    from planner.api.questions import read_task
    from planner.documents.catalog import read_catalog
    from planner.files.checked_files import check_output_file, to_yaml, write_file

    if out.exists() or out.is_symlink():
        raise InputError(
            f"{out}: is there already, and is not written over; name another with -o, or remove it"
        )
    check_output_file(out)
    catalog_rows = read_catalog(catalog)
    document: dict[str, Any] = {}

    def ask(question: str, default: str, parse: Callable[[str], dict[str, Any]]) -> None:
        """Ask until the planner accepts all answers so far with this one, and add it to `document`. If
        answers are piped in, a wrong one ends the command.
        """
        while True:
            answer = _read_answer(question, default)
            try:
                answers = {**document, **parse(answer)}
                # A question needs a limit, so one stands in until the SLO was asked for.
                read_task({"slo": {"ttft": {"p95": "1 s"}}, **answers}, catalog_rows)
            except PlannerError as error:
                if not sys.stdin.isatty():
                    raise
                typer.echo(f"  {error}", err=True)
                continue
            document.update(answers)
            return

    ask(
        "LLM: a name (plan catalog llms), or a path to its config.json",
        "meta-llama/Llama-3.1-70B",
        lambda text: {"llm": text},
    )
    ask(
        f"traffic: requests/s and a task ({', '.join(catalog_rows.tasks)}),\n"
        "or requests/s, input tokens, output tokens",
        "10 chat",
        _parse_traffic,
    )
    ask("SLO: limits, with commas between them", "ttft p95 2 s, tpot p95 100 ms", _parse_slo)
    ask("GPUs that may be rented, with commas between them (plan catalog gpus), or any", "any", _parse_gpus)
    ask(
        "safety: the share of scenarios in which the SLO is kept, or none",
        "0.9",
        lambda text: {"safety": parse_safety(text)},
    )
    command = f"plan --slo {out.name} -o out/"
    write_file(out, f"# {command}\n{to_yaml(document)}")
    typer.echo(f"written to {out}; now: {command}")


def _read_answer(question: str, default: str) -> str:
    """A line of stdin, `default` for an empty one. Raises InputError at the end of the input."""
    typer.echo(f"{question} [{default}]: ", err=True, nl=False)
    line = sys.stdin.readline()
    if not line:
        typer.echo("", err=True)
        raise InputError(f"{question.partition(':')[0]}: no answer, the input has ended; give five lines")
    return line.strip() or default


def _parse_traffic(text: str) -> dict[str, Any]:
    """The section `traffic` from a text such as "10 chat" (rate and task) or "10 1500 300" (rate and
    lengths).
    """
    words = text.replace(",", " ").split()
    words = [word for word in words if word not in ("rps", "req/s", "requests/s", "tokens")]
    if len(words) == 2:
        return {"traffic": {"rate": parse_plain(words[0]), "task": words[1]}}
    if len(words) == 3:
        rate, inputs, outputs = map(parse_plain, words)
        return {"traffic": {"rate": rate, "input": inputs, "output": outputs}}
    raise InputError(f"traffic: expected '10 chat' or '10 1500 300', found {text[:100]!r}")


def _parse_slo(text: str) -> dict[str, Any]:
    """The section `slo` from a text such as "ttft p95 2 s, tbt p99 200 ms"."""
    slo: dict[str, dict[str, str]] = {}
    for limit_text in text.split(","):
        match = _LIMIT.fullmatch(limit_text)
        if match is None:
            raise InputError(
                f"slo: expected limits such as 'ttft p95 2 s', found {limit_text.strip()[:100]!r}"
            )
        slo.setdefault(match[1].lower(), {})[match[2].lower()] = space_unit(match[3])
    return {"slo": slo}


def _parse_gpus(text: str) -> dict[str, Any]:
    """The section `fleet` with these GPUs; empty for "any"."""
    gpus = parse_stock(text)
    return {"fleet": {"gpus": gpus}} if gpus else {}
