"""Runs commands on inputs with mistakes: does each end in one line, the right exit code and no file left?

    python benchmarks/mutate.py [--each 1000] [--kind slo ...] [--seed 0] [--reading] [--beyond] [--keep DIR]

Takes good inputs of every kind, changes one to three places of each, and runs the real command on them in
this process. A change is a key left out, misspelt or moved, a value of another type, size or unit, a row or
cell of a table, or a few bytes. With `--beyond` it is something that is no plain value: digits of other
scripts and half characters, YAML tags, merges and anchors, dates, other encodings, links, archives that are
cut off or have a wrong name. With `--reading` a command ends once all is read and checked, where the first
simulation or bound would begin: almost all mistakes show before, and a run takes a hundredth of a second.
Faults are:

    traceback    an exception that is not ours to show
    hang         more than 20 CPU s
    exit code    none of 0 to 4; or 1, 2 and 3 without one line that begins with "plan: "
    warning      a warning of Python's or NumPy's on stderr
    files        a new file in the folder after exit code 1, 2 or 3, or a temporary file (.fleetplan-) after
    any

Prints the faults, each with the argument that repeats it (--only KIND:NUMBER), and exits with 1 if there are
any.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pandas as pd
import yaml

from planner import cli

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
HANG_S = 20  # CPU seconds after which a command counts as hanging.
# A line of progress on stderr, "[ 1.2 s] ...", which is no fault.
PROGRESS = re.compile(r"\[ *\d+\.\d s\] .*")
# The good inputs. They are small, so that a command that reads them successfully takes little time.
ROWS = [(i / 2, 200 + 10 * (i % 7), 2 + i % 3) for i in range(24)]
TRACE = "timestamp,input_tokens,output_tokens\n" + "".join(f"{a},{b},{c}\n" for a, b, c in ROWS)
JSONL = "".join(
    json.dumps({"timestamp": 500 * i, "input_length": 600, "output_length": 3, "hash_ids": [0, i]}) + "\n"
    for i in range(20)
)
SLO: dict[str, Any] = {
    "llm": "llama-3.1-8b",
    "slo": {"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}},
    "fleet": {"gpus": {"h100-80g": 2}},
    "policies": {"routing": "jsq"},
    "limits": {"cost": "100 usd/h"},
    "spare": 1,
    "safety": "none",
}
DESCRIBED: dict[str, Any] = {
    "llm": "llama-3.1-8b",
    "slo": {"ttft": {"p90": "2 s"}},
    "fleet": {"gpus": {"h100-80g": 2}},
    "traffic": {"rate": "1 req/s", "input": {"p50": 200, "p95": 800}, "output": 3, "duration": "20 s"},
    "safety": "none",
}
LOG = "created,prompt,completion,who\n" + "".join(f"{1.7e9 + a},{b},{c},app{c}\n" for a, b, c in ROWS)
MAPPED: dict[str, Any] = {
    **SLO,
    "traffic": {"map": {"arrival": "created", "input": "prompt", "output": "completion"}},
}
SEVERAL: dict[str, Any] = {
    "llms": {
        "chat": {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "2 s"}}, "trace": "chat.csv"},
        "code": {"llm": "qwen3-8b", "slo": {"tbt": {"p99": "200 ms"}}, "trace": "code.csv", "spare": 1},
    },
    "fleet": {"gpus": {"h100-80g": 4, "a100-80g": 2}},
    "limits": {"power": "20 kW"},
    "safety": "none",
}
WORKER: dict[str, Any] = {"name": "w", "gpu": "h100-80g", "count": 2, "tp": 1, "max_num_seqs": 64}
FLEET: dict[str, Any] = {
    "llm": "llama-3.1-8b",
    "workers": [WORKER, {"name": "v", "gpu": "a100-80g", "count": 1, "max_num_batched_tokens": 4096}],
    "policies": {"routing": "jsq", "prefix_cache": False},
}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
MARKET: dict[str, Any] = {
    "gpus": {"h100-80g": {"on_demand": "6.98 usd/h", "reserved": "4.40 usd/h", "spot": "2.80 usd/h"}},
    "capacity": [
        {"llm": "chat", "worker": "h100", "gpu": "h100-80g", "gpus": 4, "rate": "5.2 req/s", "start": "5 min"}
    ],
    "spot": 0.25,
    "limits": {"power": "80 kW", "cost": "500 usd/h"},
}
DEMAND = "chat\n" + "".join(f"{3 + hour % 4}\n" for hour in range(6))
INSTANCE: dict[str, Any] = {
    "buckets": [{"name": "short", "rate_rps": 12.0}, {"name": "long", "rate_rps": 0.5}],
    "types": [{"name": "a100", "cost_usd_per_h": 3.67, "stock": None, "rate_rps": [6.0, 0.4]}],
}
TREE: dict[str, Any] = {
    "replicas": 2,
    "memory_tokens": 5000,
    "token_s": "100 us",
    "rest": "40 ms",
    "nodes": [
        {"name": "system", "tokens": 500},
        {"name": "tool-a", "after": "system", "tokens": 2000, "rate": 4},
        {"name": "tool-b", "after": "system", "tokens": 900, "rate": 2},
    ],
}
IMPORTS = (
    "aiperf.json",
    "guidellm.json",
    "inference_perf.json",
    "metrics_after.txt",
    "runs.csv",
    "silicon_sample.csv",
    "splitwise.csv",
    "vidur_steps.csv",
    "vllm_latency.json",
    "vllm_serve.json",
)
FACTS: tuple[str, ...] = ("--llm", "llama-3.1-8b", "--gpu", "h100-80g", "--tp", "1", "--requests", "8")
FACTS += ("--input-tokens", "100", "--output-tokens", "10", "--duration", "60 s")
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    " ",
    "x",
    "x" * 3000,
    "-",
    "none",
    "any",
    "auto",
    "0",
    "nan",
    "1e999",
    "5 parsecs",
    "-3 s",
    "1:30",
    "010",
    "\u202eabc",
    "a\nb",
    "a/b",
    "../x",
    "'; --",
    "{{x}}",
    "2023-13-45",
    0,
    1,
    -1,
    2,
    3,
    7,
    0.5,
    -0.5,
    1e-300,
    1e300,
    10**18,
    10**30,
    float("nan"),
    float("inf"),
    -float("inf"),
    [],
    {},
    [[]],
    [None],
    [1, 2],
    ["a", "a"],
    {"a": 1},
    {"p50": 1},
    {"": 0},
    "1 s",
    "10 GB",
    "1e3 req/s",
    "h100-80g",
    "llama-3.1-8b",
)


@dataclass(frozen=True)
class Kind:
    """A kind of input: good files, those of them that may be `changed`, and the commands that read them.

    `files` has the text of each file; for a packed one (.gz, .parquet) the text before packing.
    """

    files: Mapping[str, str]
    changed: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]


@dataclass
class Found:
    """How many runs of each kind there were, how often each exit code, and the faults."""

    runs: Counter[str] = field(default_factory=Counter)
    codes: Counter[object] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    longest_s: float = 0.0


class HangError(BaseException):
    """A command took too long; nothing that it runs may catch this."""


class ReadError(BaseException):
    """With --reading: all is read and checked. Nothing that a command runs may catch this."""


def kinds(written: Mapping[str, str]) -> dict[str, Kind]:
    """All kinds by name; `written` are the files of a plan, by their paths in its folder."""
    trace, fleet = {"trace.csv": TRACE}, {"fleet.yaml": text_of("fleet.yaml", FLEET)}
    plan = ("--time-limit", "2", "-o", "out")
    simulate = ("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv")
    catalogs = {"own/engines.yaml": (ROOT / "catalogs" / "engines.yaml").read_text()}
    gpus = yaml.load((ROOT / "catalogs" / "gpus.yaml").read_text(), LOADER)
    own_gpus = text_of("gpus.yaml", {name: gpus[name] for name in ("h100-80g", "a100-80g")})
    fit = (ROOT / "catalogs" / "latency" / "llama-3.1-8b--h100-80g.yaml").read_text()
    imports = {name: (DATA / name).read_text() for name in IMPORTS}
    return {
        "slo": Kind(
            {"slo.yaml": text_of("slo.yaml", SLO), **trace},
            ("slo.yaml",),
            (("--slo", "slo.yaml", "--trace", "trace.csv", *plan),),
        ),
        "described": Kind(
            {"slo.yaml": text_of("slo.yaml", DESCRIBED)}, ("slo.yaml",), (("--slo", "slo.yaml", *plan),)
        ),
        "map": Kind(
            {"slo.yaml": text_of("slo.yaml", MAPPED), "log.csv": LOG},
            ("slo.yaml", "log.csv"),
            (("--slo", "slo.yaml", "--trace", "log.csv", *plan),),
        ),
        "several": Kind(
            {"slo.yaml": text_of("slo.yaml", SEVERAL), "chat.csv": TRACE, "code.csv": TRACE},
            ("slo.yaml", "slo.yaml", "chat.csv"),
            (("--slo", "slo.yaml", *plan),),
        ),
        "fleet": Kind({**trace, **fleet}, ("fleet.yaml",), (simulate,)),
        "plan": Kind(
            written,
            tuple(name for name in ("plan.yaml", "certificate.json", "requests.csv") if name in written),
            (
                ("manifests", "plan.yaml", "-o", "made", "--target", "vllm"),
                ("report", ".", "-o", "page.html"),
            ),
        ),
        "schedule": Kind(
            {"market.yaml": text_of("market.yaml", MARKET), "demand.csv": DEMAND},
            ("market.yaml", "demand.csv"),
            (("schedule", "market.yaml", "--demand", "demand.csv", "--time-limit", "2", "--json"),),
        ),
        "trace": Kind(
            {**trace, "trace.jsonl": JSONL, **fleet},
            ("trace.csv", "trace.jsonl"),
            (("trace", "trace.csv"), ("trace", "trace.jsonl", "--json"), simulate),
        ),
        "packed": Kind(
            {"trace.csv.gz": TRACE, "trace.jsonl.gz": JSONL, "trace.parquet": TRACE, **fleet},
            ("trace.csv.gz", "trace.jsonl.gz", "trace.parquet"),
            (("trace", "trace.csv.gz"), ("trace", "trace.jsonl.gz", "--json"), ("trace", "trace.parquet")),
        ),
        "catalog": Kind(
            {**trace, **fleet, "own/gpus.yaml": own_gpus, "own/latency/llama-3.1-8b--h100-80g.yaml": fit},
            ("own/gpus.yaml", "own/latency/llama-3.1-8b--h100-80g.yaml"),
            ((*simulate, "--catalog", "own"),),
        ),
        "engines": Kind(
            {**trace, **fleet, **catalogs}, ("own/engines.yaml",), ((*simulate, "--catalog", "own"),)
        ),
        "config": Kind(
            {
                "config.json": json.dumps(CONFIG),
                "fleet.yaml": text_of("fleet.yaml", {**FLEET, "llm": "./config.json"}),
                **trace,
            },
            ("config.json",),
            (simulate,),
        ),
        "imports": Kind(
            imports, IMPORTS, tuple(("import", "auto", name, "-o", "made.out", *FACTS) for name in IMPORTS)
        ),
        "allocate": Kind(
            {"instance.json": json.dumps(INSTANCE)}, ("instance.json",), (("allocate", "instance.json"),)
        ),
        "tree": Kind(
            {"tree.yaml": text_of("tree.yaml", TREE)},
            ("tree.yaml",),
            (("prefixes", "--tree", "tree.yaml", "--json", "--time-limit", "2"),),
        ),
    }


def text_of(name: str, document: Any) -> str:
    if name.endswith(".json"):
        return json.dumps(document)
    return str(yaml.dump(document, Dumper=DUMPER, sort_keys=False, allow_unicode=True))


def packed(name: str, text: str) -> bytes:
    """The bytes of a good file of this name, packed if the name says so."""
    if name.endswith(".gz"):
        return gzip.compress(text.encode(), mtime=0)
    if name.endswith(".parquet"):
        return in_parquet(text)
    return text.encode()


def in_parquet(text: str) -> bytes:
    """The Parquet file of a CSV text. If changes left no table, it has one column with the lines."""
    try:
        table = pd.read_csv(io.StringIO(text))
    except ValueError:
        table = pd.DataFrame({"text": text.splitlines()})
    stream = io.BytesIO()
    table.to_parquet(stream)
    return stream.getvalue()


def mutated(name: str, text: str, rng: random.Random) -> bytes:
    """A file's content with one to three changes. A packed file is changed before or after it is packed."""
    if name.endswith(".gz"):
        inner = name.removesuffix(".gz")
        if rng.random() < 0.6:
            return gzip.compress(mutated(inner, text, rng), mtime=0)
        return damaged(packed(name, text), rng)
    if name.endswith(".parquet"):
        if rng.random() < 0.6:
            return in_parquet(in_table(text, rng))
        return damaged(packed(name, text), rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change = (
            in_table if name.endswith((".csv", ".txt")) else in_lines if name.endswith(".jsonl") else in_tree
        )
        text = change(text, rng) if name.endswith((".csv", ".txt", ".jsonl")) else in_tree(text, rng, name)
    raw = text.encode("utf-8", "surrogatepass")
    return damaged(raw, rng, text.encode("utf-16")) if rng.random() < 0.06 and raw else raw


# With --beyond: texts that look like values and are none, or are values in other spellings.
ODD_TEXTS = (
    *(
        "\u0661\u0662\u0663",
        "\uff11\uff12",
        "1\u00a0000",
        "1\u2009s",
        "\u200b7",
        "\u2212 3",
        "7\u0301",
        "\U0001d7d9",
    ),
    *(
        "\ud800",
        "x\udfff",
        "\ufeff1",
        "e\u0301",
        "K\u0130",
        "\ufb01t",
        "1_000",
        "1,5",
        "1e3",
        "0x10",
        "0o17",
        "1/2",
    ),
    *("2026-02-30", "2026-11-16T18:17:03Z", "2026-11-16 18:17:03", "2026-11-16T18:17:03+01:00", "16/11/2026"),
    *("2026-W47-1", "20261116", "1700000000", "1700000000000", "00:30", "noon", "9" * 500, "-" + "9" * 500),
)
ODD_YAML = (
    *(
        "!!set {a, b}",
        "!!binary aGVsbG8=",
        "!!omap [a: 1]",
        "!!pairs [a: 1]",
        "!!timestamp 2026-01-01",
        "!!str 3",
    ),
    *(
        "!!int '3'",
        "!!float 3",
        "!!null x",
        "!!bool yes",
        "!!python/name:os.system",
        "!own 3",
        "! 3",
        "=",
        "<<",
    ),
    *('"\\ud800"', '"\\U0001F600"', "&a 1", "*a", "&a [*a]", "&a {<<: *a}", "{<<: 3}", "{<<: [{a: 1}, 2]}"),
    *(
        "{? [1, 2] : 3}",
        "{? {a: 1} : 3}",
        "{1: a, 0x1: b}",
        "{yes: 1, true: 2}",
        "2026-11-16",
        "12:30:45",
        "0b11",
    ),
    *("- 1", "|\n  a", ">-\n  a", "'it''s'", "{a: 1, a: 2}", "1_000", "0o17", "017", ".inf", "-.NaN", "~"),
)


def odd(name: str, text: str, rng: random.Random) -> bytes:
    """With --beyond: a file's content with something in it that is no plain value, or in another encoding."""
    if name.endswith((".gz", ".parquet")):
        raw = odd(name.removesuffix(".gz"), text, rng) if name.endswith(".gz") else packed(name, text)
        other = gzip.compress(raw, mtime=0) if name.endswith(".gz") else raw
        again = gzip.compress(other, mtime=0)
        return rng.choice(
            (other, other, other[: rng.randrange(len(other))], again, other + other[:9], raw, zipped(raw))
        )
    if rng.random() < 0.25:
        return encoded(text, rng)
    if name.endswith((".yaml", ".json")):
        # The places of single values: after a colon, a comma, a bracket or the dash of a list.
        spans = [each.span(1) for each in re.finditer(r"(?m)(?:[:,\[]\s+|- )([^\s,:\[\]{}]+)", text)]
        if not spans:
            return text.encode()
        start, end = rng.choice(spans)
        if name.endswith(".json") or rng.random() < 0.4:
            value = rng.choice(ODD_TEXTS)
            value = rng.choice((value, json.dumps(value), json.dumps(value, ensure_ascii=False)))
        else:
            value = rng.choice(ODD_YAML)
        text = text[:start] + value + text[end:]
        if rng.random() < 0.2:
            text += rng.choice(
                ("\n---\na: 1\n", "\n...\n", "\n<<: {llm: x}\n", "\n%YAML 1.2\n", "\n\t- 1\n", "\n? x\n")
            )
        return text.encode("utf-8", "surrogatepass")
    rows = [line.split(",") for line in text.splitlines()]
    at = rng.randrange(len(rows))
    # Sometimes every row but the header is changed, not one row.
    for row in rows[1:] if rng.random() < 0.15 and rows[1:] else [rows[at]]:
        row[rng.randrange(len(row))] = rng.choice(ODD_TEXTS)
    text = "\n".join(",".join(row) for row in rows)
    if rng.random() < 0.1:
        text = text.replace(",", rng.choice(";\t|"))
    return (text + "\n").encode("utf-8", "surrogatepass")


def encoded(text: str, rng: random.Random) -> bytes:
    """The same text in another encoding, or packed though the name does not say so."""
    how = rng.choice(
        ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "twice", "gzip", "zip")
    )
    if how == "gzip":
        return gzip.compress(text.encode(), mtime=0)
    if how == "zip":
        return zipped(text.encode())
    if how == "twice":
        return b"\xef\xbb\xbf" * 2 + text.encode()
    # ASCII is the same in these two encodings, so one character is made another.
    marked = text.replace("a", "\u00e4", 1) if how in ("latin-1", "cp1252") else text
    return marked.encode(how, "replace")


def zipped(raw: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("inside", raw)
    return stream.getvalue()


def linked(path: Path, rng: random.Random) -> None:
    """Replaces a file by a link: to itself, to nothing, to its folder, to a device, or to the file."""
    kept = path.with_name(f"real-{path.name}")
    path.rename(kept)
    path.symlink_to(rng.choice((path, path.with_name("nothing"), path.parent, Path("/dev/null"), kept, kept)))


def damaged(raw: bytes, rng: random.Random, other: bytes = b"") -> bytes:
    """A file that is cut off, has a changed, added or repeated piece, or has line ends of Windows; or
    `other`.
    """
    at = rng.randrange(len(raw))
    return rng.choice(
        (
            raw[:at],
            raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :],
            raw[:at] + b"\0" + raw[at:],
            raw[:at] + raw[at : at + 40] * 3 + raw[at:],
            raw.replace(b"\n", b"\r\n"),
            other,
        )
    )


@contextlib.contextmanager
def reading_alone() -> Iterator[None]:
    """Commands end where the first simulation, bound, schedule or placing of prefixes would begin."""

    def stop(*_: object, **__: object) -> NoReturn:
        raise ReadError

    places = (
        "planner.simulator.replay._run",
        "planner.search.evidence.certify.lower_bound",
        "planner.search.several.shared_paper.lower_bound",
        "planner.documents.prefix_tree.replicate_prefixes",
        "planner.api.scheduling.solve_schedule",
    )
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(mock.patch(place, stop))
        yield


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in a document, at all depths."""
    for key, value in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from places(value)


def in_tree(text: str, rng: random.Random, name: str = ".json") -> str:
    """A JSON or YAML document with one change."""
    try:
        document = json.loads(text) if name.endswith(".json") else yaml.load(text, LOADER)
        found = list(places(document))
    except (ValueError, yaml.YAMLError, AttributeError, TypeError):
        return text  # An earlier change left no document.
    if not found:
        return text
    holder, key = rng.choice(found)
    value, how = holder[key], rng.randrange(9)
    if how <= 3:
        holder[key] = rng.choice(VALUES)
    elif how == 4:
        del holder[key]
    elif how == 5 and isinstance(holder, dict):
        holder[misspelt(str(key), rng)] = holder.pop(key)
    elif how == 6:  # The value of another place, or None if that place is gone.
        other, place = rng.choice(found)
        holder[key] = copy.deepcopy(other[place]) if place in other or isinstance(other, list) else None
    elif how == 7:
        holder[key] = rng.choice(
            ([value], {"a": value}, [value, value], str(value), {str(value)[:20]: value})
        )
    elif isinstance(value, int | float) and not isinstance(value, bool):
        holder[key] = rng.choice((-value, value * 10 ** rng.randrange(-12, 12), value + 0.5, str(value)))
    elif isinstance(value, str):
        holder[key] = misspelt(value, rng)
    elif isinstance(value, list):
        holder[key] = value * 3 if rng.random() < 0.5 else value[::-1]
    return json.dumps(document) if name.endswith(".json") else text_of(name, document)


def misspelt(word: str, rng: random.Random) -> str:
    """The word with a letter left out, or with a piece added or in place of a letter."""
    at = rng.randrange(len(word) + 1)
    more = rng.choice(("", "x", "0", "-", "_", " ", word[:3]))
    return word[:at] + more + word[at + 1 - bool(more) * rng.randrange(2) :]


def in_lines(text: str, rng: random.Random) -> str:
    """JSON lines with a change in one line, or with a line left out, repeated, emptied or moved."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    if rng.random() < 0.8:
        lines[at] = in_tree(lines[at], rng)
    else:
        lines[at : at + 1] = rng.choice(([], [lines[at]] * 2, [""], [lines[-1], lines[at]]))
    return "\n".join(lines) + "\n"


def in_table(text: str, rng: random.Random) -> str:
    """A CSV table with a change in a cell, a row or a column."""
    rows = [line.split(",") for line in text.splitlines()] or [[""]]
    at, how = rng.randrange(len(rows)), rng.randrange(8)
    cell = rng.randrange(len(rows[at]))
    if how <= 3:
        value = rng.choice(VALUES)
        rows[at][cell] = str(value) if not isinstance(value, str) else value
    elif how == 4:
        rows[at][cell] = misspelt(rows[at][cell], rng)
    elif how == 5:
        rows[at : at + 1] = rng.choice(([], [rows[at]] * 2, [[""]], [rows[-1], rows[at]]))
    elif how == 6:
        rows[at] = rng.choice((rows[at][:-1] or [""], [*rows[at], "1"], rows[at][::-1]))
    else:
        for row in rows:
            if cell < len(row):
                del row[cell]
    return "\n".join(",".join(row) for row in rows) + "\n"


@contextlib.contextmanager
def alarm(cpu_s: float) -> Iterator[None]:
    """Raises HangError after so many CPU seconds, or after six times as many seconds of the clock, for a
    command that waits without computing.
    """

    def ring(*_: object) -> None:
        raise HangError

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, cpu_s), (signal.ITIMER_REAL, signal.SIGALRM, 6 * cpu_s))
    before = [signal.signal(number, ring) for _, number, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def run(arguments: tuple[str, ...], folder: Path, most_s: float = HANG_S) -> tuple[object, str]:
    """Runs the command in `folder`; returns its exit code and stderr. In place of the code it returns "hang",
    or the traceback of an exception that is not ours to raise.
    """
    out, err, before = io.StringIO(), io.StringIO(), (Path.cwd(), sys.argv)
    os.chdir(folder)
    sys.argv = ["plan", *arguments]
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
            alarm(most_s),
        ):
            warnings.simplefilter("always")
            cli.main()
        code: object = 0
    except SystemExit as end:
        code = end.code or 0
    except ReadError:
        code = 0
    except HangError:
        code = "hang"
    except BaseException:
        code = traceback.format_exc()
    finally:
        os.chdir(before[0])
        sys.argv = before[1]
    return code, err.getvalue()


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def fault(code: object, stderr: str, new: set[str]) -> str:
    """What is wrong with the end of a command that left these `new` files; "" if nothing is."""
    lines = [line for line in stderr.splitlines() if not PROGRESS.fullmatch(line)]
    if code == "hang":
        return "hang"
    if isinstance(code, str):
        return f"traceback: {code}"
    if code not in range(5):
        return f"exit code {code}: {stderr[-300:]}"
    if code in (1, 2, 3) and not (lines and lines[-1].startswith("plan: ")):
        return f"exit code {code} without a line: {stderr[-300:]}"
    if noise := [line for line in lines if "Warning: " in line]:
        return f"warning: {noise[0]}"
    left = {name for name in new if ".fleetplan-" in name} or (new if code in (1, 2, 3) else set())
    return f"files: {sorted(left)}" if left else ""


def mutate(
    name: str,
    kind: Kind,
    number: int,
    seed: int,
    found: Found,
    keep: Path | None = None,
    *,
    beyond: bool = False,
) -> None:
    """Runs a command on input `number` of a kind and records its end in `found`.

    The number seeds the changes, so that --only can repeat them. `beyond` is the option --beyond. The files
    are copied to the folder `keep`.
    """
    rng = random.Random(f"{seed} {name} {number}" + (" beyond" if beyond else ""))
    file = rng.choice(kind.changed)
    commands = [line for line in kind.commands if file in line] or list(kind.commands)
    command = rng.choice(commands)
    with tempfile.TemporaryDirectory(prefix="fleetplan-mutate-") as made:
        folder = Path(made)
        for path, text in kind.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(packed(path, text))
        (folder / file).write_bytes((odd if beyond else mutated)(file, kind.files[file], rng))
        if beyond and rng.random() < 0.06:
            linked(folder / file, rng)
        before, began_s = names_in(folder), time.monotonic()
        code, stderr = run(command, folder)
        took_s = time.monotonic() - began_s
        wrong = fault(code, stderr, names_in(folder) - before)
        found.runs[name] += 1
        found.codes[code if isinstance(code, int) else "other"] += 1
        found.longest_s = max(found.longest_s, took_s)
        if wrong:
            found.faults.append(f"{name}:{number} ({file}; plan {' '.join(command)}) {wrong}")
        if keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True)


def written_plan() -> dict[str, str]:
    """The files that the command writes for a good question, by their paths in the folder of the plan."""
    with tempfile.TemporaryDirectory(prefix="fleetplan-mutate-") as made:
        folder = Path(made)
        (folder / "slo.yaml").write_text(text_of("slo.yaml", SLO))
        (folder / "trace.csv").write_text(TRACE)
        code, stderr = run(("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out"), folder, 300)
        if code not in (0, 4):
            raise SystemExit(f"the good question fails: {code} {stderr}")
        paths = [path for path in (folder / "out").rglob("*") if path.is_file()]
        return {str(path.relative_to(folder / "out")): path.read_text() for path in paths}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--each", type=int, default=1000)
    parser.add_argument("--kind", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reading", action="store_true", help="no simulation")
    parser.add_argument("--beyond", action="store_true", help="what is no plain value")
    parser.add_argument("--only", help="KIND:NUMBER, once")
    parser.add_argument("--keep", type=Path, help="with --only: a folder for its files")
    args = parser.parse_args()
    known, found = kinds(written_plan()), Found()
    with reading_alone() if args.reading else contextlib.nullcontext():
        run_all(args, known, found)
    print("exit codes:", dict(sorted(found.codes.items(), key=str)), f"; longest {found.longest_s:.1f} s")
    for wrong in found.faults:
        print(wrong)
    sys.exit(bool(found.faults))


def run_all(args: argparse.Namespace, known: Mapping[str, Kind], found: Found) -> None:
    """Runs the input of --only, or --each inputs of every kind in --kind (`known`: all kinds)."""
    if args.only:
        name, _, number = args.only.partition(":")
        mutate(name, known[name], int(number), args.seed, found, args.keep, beyond=args.beyond)
    else:
        for name in args.kind or known:
            began_s, faults = time.process_time(), len(found.faults)
            for number in range(args.each):
                mutate(name, known[name], number, args.seed, found, beyond=args.beyond)
            took_s = time.process_time() - began_s
            print(
                f"{name}: {args.each} runs, {took_s:.0f} CPU s, {len(found.faults) - faults} faults",
                flush=True,
            )


if __name__ == "__main__":
    main()
