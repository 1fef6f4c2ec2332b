"""Broken traces, questions, fleets, catalogs and command lines, through the real command.

Each one ends with the right exit code, one line on stderr that names the place and what to change, no
traceback, and nothing written.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from shares import some

from planner import cli
from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.files import checked_files

HEADER = "timestamp,input_tokens,output_tokens\n"
ROWS = "".join(f"{i / 2},{200 + 10 * (i % 7)},{20 + i % 5}\n" for i in range(60))
TRACE = HEADER + ROWS
SLO = "llm: llama-3.1-8b\nslo: {ttft: {p90: 2 s}, tbt: {p99: 200 ms}}\nfleet: {gpus: {h100-80g: 4}}\n"
FLEET = "llm: llama-3.1-8b\nworkers:\n  - {name: w, gpu: h100-80g, count: 1}\n"
GPU = """a-gpu:
  memory_vendor: 80 GB
  memory: 80 GB
  bandwidth: 3350 GB/s
  dense_tflops: 989
  link: nvlink
  link_bandwidth: 450 GB/s
  power: 700 W
  gpus_per_node: 8
  unchecked: false
  price: 2.99 usd/h
  price_source: a price list
  price_date: 2025-07
  node_selector: A
  source: a data sheet
  date: 2025-07
"""
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
FIT: dict[str, Any] = {
    "knots_tokens": [1, 100],
    "f_s": [0.01, 0.02],
    "a_s": 1e-9,
    "b_s": 0,
    "d_s": 1e-8,
    "e_s": 0,
    "h_s": 0.001,
    "basis": "made up",
}
PROGRESS = re.compile(r"\[ *\d+\.\d s\] .*")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The last line on stderr; stages of work that takes long may stand before it."""
        *before, last = self.err.splitlines()
        assert all(PROGRESS.fullmatch(line) for line in before), self.err
        return last


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, with what it said and its exit code."""
    for name in ("COLUMNS", "FORCE_COLOR"):  # CI asks for colours in a pipe
        monkeypatch.delenv(name, raising=False)

    def run_command(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        code = end.value.code or 0
        assert isinstance(code, int)
        return Outcome(code, said.out, said.err)

    return run_command


@dataclass(frozen=True)
class Case:
    """`given` replaces good files (or adds others) in the folder the command is run in."""

    name: str
    says: str  # a pattern that must occur in the one line
    given: dict[str, str | bytes] = field(default_factory=dict)
    command: str = "plan"
    more: tuple[str, ...] = ()
    code: int = 1


def trace(name: str, content: str | bytes, says: str, file: str = "trace.csv") -> Case:
    return Case(f"trace: {name}", says, {file: content}, more=("--trace", file))


def question(name: str, old: str, new: str, says: str, code: int = 1, **given: str | bytes) -> Case:
    """slo.yaml with one thing said otherwise; `given` are other files by name, _ for the dot."""
    assert SLO.count(old) == 1, old
    others = {file.replace("_", "."): content for file, content in given.items()}
    return Case(f"slo: {name}", says, {"slo.yaml": SLO.replace(old, new), **others}, code=code)


def a_fleet(name: str, old: str, new: str, says: str, **given: str) -> Case:
    assert FLEET.count(old) == 1, old
    others = {file.replace("_", "."): content for file, content in given.items()}
    return Case(f"fleet: {name}", says, {"fleet.yaml": FLEET.replace(old, new), **others}, command="simulate")


def a_catalog(name: str, file: str, content: str | bytes, says: str) -> Case:
    return Case(f"catalog: {name}", says, {f"own/{file}": content}, more=("--catalog", "own"))


def without(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in keys}


def bomb(levels: int = 9) -> str:
    """Ten to the power of `levels` values in a few lines."""
    lines = ["x0: &x0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines) + f"\nslo: *x{levels - 1}\n"


LIMITS = "tbt: {p99: 200 ms}}\n"
TRACES = [
    trace("empty file", "", r"trace.csv: is empty; expected .*headers"),
    trace("blank lines only", "\n\n\n", r"trace.csv: is empty"),
    trace("header only", HEADER, r"no request is left.*no row below the header"),
    trace("all rows dropped", HEADER + "0,5,0\n1,5,0\n", r"no request is left.*2 rows with no output tokens"),
    trace("no header", ROWS, r"line 1: holds figures, expected the names of columns"),
    trace(
        "missing column",
        "timestamp,input_tokens\n0,5\n",
        r"line 1: no column could be read as output; found.*--map arrival=timestamp",
    ),
    trace("column twice", "timestamp,input_tokens,input_tokens,output_tokens\n0,5,5,1\n", r"given twice"),
    trace("negative tokens", TRACE + "30,-5,3\n", r"line 62, column input_tokens: .*whole number.*'?-5"),
    trace("NaN tokens", TRACE + "30,NaN,3\n", r"line 62, column input_tokens: .*whole number"),
    trace("missing tokens", TRACE + "30,5,\n", r"line 62, column output_tokens: .*nothing or NaN"),
    trace("infinite tokens", TRACE + "30,5,inf\n", r"line 62, column output_tokens: .*whole number"),
    trace("fractional tokens", TRACE + "30,5.5,3\n", r"line 62, column input_tokens: .*whole number.*5\.5"),
    trace("tokens in words", TRACE + "30,five,3\n", r"line 62, column input_tokens: .*'five'"),
    trace("absurd tokens", TRACE + "30,5,1e30\n", r"line 62, column output_tokens: .*0 to 100000000"),
    trace("tokens of 400 digits", TRACE + f"30,{'9' * 400},1\n", r"line 62, column input_tokens"),
    trace("a field of 200 kB", TRACE + f"30,{'5' * 200_000},1\n", r"line 62, column input_tokens: .*whole"),
    trace(
        "unsorted times", HEADER + "5,9,9\n4,9,9\n3,9,9\n", r"column timestamp: 2 of 3 rows.*sort the file"
    ),
    trace("negative times", HEADER + "-5,9,9\n4,9,9\n", r"line 2, column timestamp: expected a number >= 0"),
    trace("garbled times", TRACE + "half past nine,5,3\n", r"line 62, column timestamp: .*half past nine"),
    trace("garbled dates", HEADER + "2023-99-99,5,3\n", r"line 2, column timestamp: expected a date"),
    trace("dates after numbers", TRACE + "2023-11-16 18:17:03,5,3\n", r"line 62, column timestamp"),
    trace(
        "times in nanoseconds", HEADER + "0,5,3\n1e19,5,3\n", r"more than 100 years; give times in seconds"
    ),
    trace(
        "half a list",
        'request_id,arrival_s,input_tokens,output_tokens,after\n0,0,9,9,\n1,1,9,9,"[0"\n',
        r"line 3, column after: expected a list of whole numbers",
    ),
    trace("too many fields", TRACE + "30,5,3,4\n", r"line 62: has more than the 3 fields"),
    trace("thousands separators", TRACE + "30,1,024,3\n", r"line 62: .*without thousands separators"),
    trace(
        "one request", HEADER + "0,50,5\n", r"1 request\(s\) at one instant; a plan needs traffic over time"
    ),
    trace(
        "all at once",
        HEADER + "3,50,5\n" * 9,
        r"9 request\(s\) at one instant.*traffic: \{rate: 1, input: 50, output: 5\}",
    ),
    trace(
        "longer than the context",
        TRACE + "30,131000,200\n",
        r"trace.csv: .*131200 tokens \(prompt \+ output\).* 131072; drop such requests or choose an LLM",
    ),
    trace("JSON list", '[{"timestamp": 0}]', r"object 1: no column could be read as input"),
    trace("broken JSON", '{"timestamp": 0,\n', r"t.jsonl, line 1: is not JSON", "t.jsonl"),
    trace(
        "broken JSON later",
        '{"timestamp": 0, "input_tokens": 3, "output_tokens": 3}\n{"timestamp": \n',
        r"t.jsonl, line 2: is not JSON",
        "t.jsonl",
    ),
    trace("NUL bytes", TRACE.encode() + b"30,5,\x003\n", r"line 62: holds a NUL byte"),
    trace("binary", bytes(range(256)) * 40, r"trace.csv, line \d+: .*expected text"),
    trace("UTF-16", TRACE.encode("utf-16"), r"trace.csv: is UTF-16; save it as UTF-8"),
    trace("a ZIP archive", b"PK\x03\x04\x14\0\0\0", r"trace.csv: is a ZIP archive or a workbook; unpack it"),
    trace(
        "Latin-1",
        (TRACE + "30,5,3,").encode() + b"\xe9\n",
        r"line 62: is not UTF-8 \(byte 0xE9\); .*iconv -f cp1252 -t utf-8 \S+ > utf8\.csv",
    ),
    trace(
        "truncated gzip", gzip.compress(TRACE.encode())[:-12], r"t.csv.gz: is not a whole gzip", "t.csv.gz"
    ),
    trace("gz in name only", TRACE, r"t.csv.gz: is not a whole gzip file.*drop the .gz", "t.csv.gz"),
    trace("gz in content only", gzip.compress(TRACE.encode()), r"line 1: .*pack it as .gz|is not UTF-8"),
    Case("trace: missing file", r"nowhere.csv: no such file", more=("--trace", "nowhere.csv")),
    Case("trace: below a file", r"slo.yaml/t.csv: no such file", more=("--trace", "slo.yaml/t.csv")),
    Case("trace: directory", r"folder: is a directory", {"folder/x": ""}, more=("--trace", "folder")),
    Case("trace: name too long", r"cannot be read", more=("--trace", "x" * 300)),
    Case("describe: broken", r"line 1: holds figures", {"trace.csv": ROWS}, command="trace"),
]
QUESTIONS = [
    Case("slo: missing file", r"nowhere.yaml: no such file", more=("--slo", "nowhere.yaml")),
    Case("slo: directory", r"folder: is a directory", {"folder/x": ""}, more=("--slo", "folder")),
    Case("slo: empty", r"slo.yaml: the top level is empty, expected a mapping", {"slo.yaml": ""}),
    Case("slo: list at top", r"slo.yaml: the top level is a list", {"slo.yaml": "- llm: x\n"}),
    Case("slo: syntax", r"slo.yaml, line 2: is not valid YAML", {"slo.yaml": "llm: x\nslo: {ttft: [}\n"}),
    Case("slo: two documents", r"slo.yaml, line 2: is several YAML", {"slo.yaml": "llm: x\n---\nllm: y\n"}),
    Case("slo: tab", r"slo.yaml, line 2: is not valid YAML", {"slo.yaml": "slo:\n\tttft: 1\n"}),
    Case("slo: duplicate key", r"slo.yaml, line 4: .*'llm' is given twice", {"slo.yaml": SLO + "llm: x\n"}),
    Case("slo: bomb", r"slo.yaml, line \d+: .*more than 200000 values", {"slo.yaml": bomb()}),
    Case(
        "slo: part of itself", r"slo.yaml, line 4: .*part of", {"slo.yaml": SLO + "limits: &x {cost: *x}\n"}
    ),
    Case("slo: 100 000 deep", r"slo.yaml, line 1: .*nested deeper", {"slo.yaml": "slo: " + "[" * 100_000}),
    Case("slo: code", r"slo.yaml, line 1: is not valid YAML", {"slo.yaml": "llm: !!python/name:os.system\n"}),
    Case("slo: two documents", r"slo.yaml, line 4: .*document", {"slo.yaml": SLO + "---\nllm: x\n"}),
    Case("slo: binary", r"slo.yaml: is not", {"slo.yaml": bytes(range(128, 256))}),
    Case("slo: NUL", r"slo.yaml: is not valid YAML", {"slo.yaml": SLO + "\0"}),
    Case("slo: UTF-16", r"slo.yaml: is not", {"slo.yaml": SLO.encode("utf-16")}),
    question("5000 digits", LIMITS, LIMITS + f"spare: {'9' * 5000}\n", r"slo.yaml, line 3: .*no int"),
    question("no such day", "llama-3.1-8b", "2023-13-45", r"slo.yaml, line 1: .*'2023-13-45'"),
    question("date for an LLM", "llama-3.1-8b", "2023-11-16", r"slo.yaml: llm: expected the name of an LLM"),
    question(
        "no llm", "llm: llama-3.1-8b\n", "", r"slo.yaml: llm: expected .*found nothing.*plan catalog llms"
    ),
    question("unknown LLM", "llama-3.1-8b", "lama-3-8b", r"slo.yaml: LLM 'lama-3-8b' .*nearest: .*Llama"),
    question("unknown GPU", "h100-80g", "h1000", r"slo.yaml: .*GPU 'h1000' .*nearest: .*h100-80g"),
    question("unknown key", "fleet:", "fleets:", r"slo.yaml: unknown key 'fleets'; did you mean 'fleet'"),
    question(
        "unknown key inside", "gpus:", "gpu:", r"slo.yaml: fleet: unknown key 'gpu'; did you mean 'gpus'"
    ),
    question(
        "stock by its name", "gpus:", "stock:", r"unknown key 'stock'; did you mean 'gpus: \{GPU: NUMBER"
    ),
    question("unknown metric", "ttft:", "tfft:", r"slo.yaml: slo: unknown key 'tfft'; did you mean 'ttft'"),
    question("mean", "p90", "mean", r"slo.yaml: slo: ttft: 'mean' is refused"),
    question("percentile 101", "p90", "p101", r"slo.yaml: slo: ttft: expected a percentile from p50 to p100"),
    question("percentile in words", "p90", "most", r"slo.yaml: slo: ttft: expected a percentile"),
    question(
        "percentile twice", "{p90: 2 s}", "{p90: 2 s, p90.0: 1 s}", r"slo.yaml: slo: ttft p90.0 is given"
    ),
    question(
        "unknown unit", "2 s}", "2 parsecs}", r"slo.yaml: slo: ttft p90: unknown unit 'parsecs'.*use one"
    ),
    question("limit 0", "2 s}", "0 s}", r"slo.yaml: slo: ttft p90: must be > 0"),
    question("limit NaN", "2 s}", ".nan}", r"slo.yaml: slo: ttft p90: expected a quantity"),
    question("limit 1e999", "2 s}", "1e999}", r"slo.yaml: slo: ttft p90"),
    question("no limit", SLO.splitlines()[1], "slo: {}", r"slo.yaml: slo: no limit found, expected at least"),
    question("attainment 2", "{ttft:", "{attainment: 2, ttft:", r"slo.yaml: slo: attainment: .*from 0 to 1"),
    question("neither slo nor preset", SLO.splitlines()[1], "", r"slo.yaml: found neither of slo and preset"),
    question("both", LIMITS, LIMITS + "preset: vidur\n", r"slo.yaml: found both of slo and preset"),
    question(
        "unknown preset", SLO.splitlines()[1], "preset: vidor", r"slo.yaml: preset: 'vidor' .*nearest: vidur"
    ),
    question(
        "unknown objective", LIMITS, LIMITS + "objective: joy\n", r"slo.yaml: objective: expected one of"
    ),
    question(
        "endless throughput",
        "{h100-80g: 4}}\n",
        "[h100-80g]}\nobjective: throughput\n",
        r"slo.yaml: .*without a limit",
    ),
    question(
        "half a robust", LIMITS, LIMITS + "robust: {traffic: half}\n", r"slo.yaml: robust: traffic: .*'half'"
    ),
    question("spare racks", LIMITS, LIMITS + "spare: 2 racks\n", r"slo.yaml: spare: .*workers or nodes"),
    question(
        "unknown window", LIMITS, LIMITS + "traffic: {window: noon}\n", r"window: expected .*found 'noon'"
    ),
    Case(
        "unknown window, checked",
        r"slo.yaml: traffic: window: expected 'whole'.*found '0-60 s'",
        {"slo.yaml": SLO + "traffic: {window: 0-60 s}\n"},
        command="check slo.yaml",
    ),
    question("window of a number", LIMITS, LIMITS + "traffic: {window: 5}\n", r"slo.yaml: traffic: window"),
    question(
        "window 0", LIMITS, LIMITS + "traffic: {window: busiest 0 s}\n", r"window: expected a length > 0"
    ),
    question(
        "window in feet", LIMITS, LIMITS + "traffic: {window: first 3 ft}\n", r"window: unknown unit 'ft'"
    ),
    question(
        "unknown scale", LIMITS, LIMITS + "traffic: {scale: up}\n", r"slo.yaml: traffic: scale: .*one of"
    ),
    question("rate 0", LIMITS, LIMITS + "traffic: {rate: 0}\n", r"slo.yaml: traffic: rate: must be > 0"),
    question(
        "rate negative", LIMITS, LIMITS + "traffic: {rate: -3}\n", r"slo.yaml: traffic: rate: must be > 0"
    ),
    question("rate NaN", LIMITS, LIMITS + "traffic: {rate: .nan}\n", r"slo.yaml: traffic: rate: expected"),
    question("rate absurd", LIMITS, LIMITS + "traffic: {rate: 1e12}\n", r"rate: .*ask for another rate"),
    question("rate of nothing", LIMITS, LIMITS + "traffic: {rate: 1e-9}\n", r"rate: .*ask for another rate"),
    question("zero stock", "h100-80g: 4", "h100-80g: 0", r"slo.yaml: fleet: gpus: stock of every GPU is 0"),
    question("negative stock", "h100-80g: 4", "h100-80g: -1", r"slo.yaml: fleet: gpus: h100-80g: .*>= 0"),
    question(
        "half a GPU", "h100-80g: 4", "h100-80g: 0.5", r"slo.yaml: fleet: gpus: h100-80g: .*whole number"
    ),
    question("GPU twice", "h100-80g: 4", "h100-80g: 4, h100: 4", r"slo.yaml: fleet: gpus: h100 is h100-80g"),
    question("power 0", LIMITS, LIMITS + "limits: {power: 0}\n", r"slo.yaml: limits: power: must be > 0"),
    question(
        "negative spare", LIMITS, LIMITS + "spare: -1\n", r"slo.yaml: spare: expected a number of workers"
    ),
    question(
        "price of next to nothing", "4}", "4}, prices: {h100: 1e-9}", r"h100: expected 0, or 1e-06 USD/h"
    ),
    question(
        "spot workers that are hardly there",
        "4}",
        "4}, prices: {h100: {spot: 1, spot_interruptions_per_h: 60, spot_restart: 10 h}}",
        r"prices: h100: spot: .* is down for 99.8 % of the time, expected at most 50 %",
    ),
    question(
        "price negative", "4}", "4}, prices: {h100: -1}", r"slo.yaml: fleet: prices: h100: must be >= 0"
    ),
    question(
        "a decimal comma", "4}", "4}, prices: {h100: 2,99 usd/h}", r"slo.yaml.*the comma in '2,99 usd/h' ends"
    ),
    question("owned of no GPU", "4}", "4}, owned: {h101: }", r"slo.yaml: GPU 'h101' is not in"),
    question(
        "network 0", "4}", "4}, network: {bandwidth: 0}", r"slo.yaml: fleet: network: bandwidth: must be"
    ),
    question("no config.json", "llama-3.1-8b", "./no/config.json", r"slo.yaml: LLM .*no such file or folder"),
    question(
        "config.json broken", "llama-3.1-8b", "config.json", r"config.json: is not JSON", config_json="{"
    ),
    question(
        "config.json a list", "llama-3.1-8b", "config.json", r"config.json: .*found a list", config_json="[]"
    ),
    question(
        "config.json without layers",
        "llama-3.1-8b",
        "config.json",
        r"config.json: num_hidden_layers is missing",
        config_json=json.dumps(without(CONFIG, "num_hidden_layers")),
    ),
    question(
        "config.json with half a head",
        "llama-3.1-8b",
        "config.json",
        r"config.json: num_attention_heads: expected a whole number",
        config_json=json.dumps(CONFIG | {"num_attention_heads": 0.5}),
    ),
    question(
        "config.json of 3 bits",
        "llama-3.1-8b",
        "config.json",
        r"config.json: quantization_config: bits: 3 is not modelled; name a checkpoint in 16 bits, fp8,",
        config_json=json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq", "bits": 3}}),
    ),
]
INFEASIBLE = [
    question("below the floor", "2 s}", "1 ms}", r"latency: TTFT p90 <= 1 ms .*relax TTFT p90 to \d", code=3),
    question(
        "gaps below the floor",
        "200 ms",
        "0.1 ms",
        r"latency: TBT p99 .*relax TBT p99 to \d",
        code=3,
        trace_csv=TRACE + "".join(f"{30 + i / 2},300,25\n" for i in range(200)),
    ),
    Case(
        "slo: fits on no GPU",
        r"bloom .*fits on no worker in stock.*Add a GPU with more memory",
        {
            "slo.yaml": "llm: bloom\nslo: {ttft: {p90: 9 s}}\nfleet: {gpus: [l4-24g], pp: [1, 2]}\n",
            "trace.csv": HEADER + "0,9,9\n1,9,9\n",
        },
        code=3,
    ),
    question(
        "too little stock",
        "4}}\n",
        "1}}\nspare: 1 worker\n",
        r"capacity: .*stock.*h100-80g.* from 1 to 2",
        code=3,
    ),
    question(
        "too little power",
        LIMITS,
        LIMITS + "limits: {power: 300 W}\n",
        r"capacity: .*power.* from 300 to 700 W",
        code=3,
    ),
    question(
        "too little money",
        LIMITS,
        LIMITS + "limits: {cost: 1 usd/h}\n",
        r"capacity: .*cost.* from 1 to 2.99 USD/h",
        code=3,
    ),
    question(
        "too few GPUs",
        LIMITS,
        LIMITS + "limits: {gpus: 1}\nspare: 1\n",
        r"capacity: .*Raise GPUs from 1 to 2",
        code=3,
    ),
]
W = "gpu: h100-80g, count: 1"
FLEETS = [
    Case(
        "fleet: missing file",
        r"nowhere.yaml: no such file",
        command="simulate",
        more=("--fleet", "nowhere.yaml"),
    ),
    Case(
        "fleet: directory",
        r"folder/plan.yaml: no such file",
        {"folder/x": ""},
        "simulate",
        ("--fleet", "folder"),
    ),
    Case("fleet: empty", r"fleet.yaml: the top level is empty", {"fleet.yaml": ""}, "simulate"),
    a_fleet("unknown GPU", "h100-80g", "h101", r"fleet.yaml: workers\[0\] \(w\): gpu: .*'h101'.*nearest"),
    a_fleet("unknown LLM", "llama-3.1-8b", "llama-9", r"fleet.yaml: llm: LLM 'llama-9' .*nearest"),
    a_fleet("unknown key", W, W + ", gpus: 3", r"fleet.yaml: workers\[0\]: unknown key 'gpus'; did you mean"),
    a_fleet(
        "no workers",
        FLEET[FLEET.index("workers") :],
        "workers: []\n",
        r"fleet.yaml: workers: expected a list",
    ),
    a_fleet(
        "count 0", "count: 1", "count: 0", r"fleet.yaml: workers\[0\] \(w\): count: .*at least 1, found 0"
    ),
    a_fleet(
        "count of a million", "count: 1", "count: 1000000", r"fleet.yaml: workers: 1000000 in all, .*10000"
    ),
    a_fleet(
        "half a worker", "count: 1", "count: 1.5", r"fleet.yaml: workers\[0\] \(w\): count: .*whole number"
    ),
    a_fleet("tp 3", W, W + ", tp: 3", r"fleet.yaml: workers\[0\] \(w\): tp: must divide the 32 heads of"),
    a_fleet("tp 16", W, W + ", tp: 16", r"fleet.yaml: workers\[0\] \(w\): tp: a node has 8"),
    a_fleet("prefill, no decode", "name: w", "name: w, role: prefill", r"fleet.yaml: workers: .*decode"),
    a_fleet("decode, no prefill", "name: w", "name: w, role: decode", r"fleet.yaml: workers: .*prefill"),
    a_fleet(
        "unknown role", "name: w", "name: w, role: cook", r"fleet.yaml: workers\[0\] \(w\): role: must be one"
    ),
    a_fleet(
        "name twice",
        W + "}",
        W + "}\n  - {name: w, gpu: h100-80g}",
        r"workers\[1\]: name: 'w' is given twice",
    ),
    a_fleet(
        "does not fit", "3.1-8b", "3.1-70b", r"fleet.yaml: workers\[0\] \(w\): .*does not fit .*raise tp"
    ),
    a_fleet(
        "no latency file",
        W,
        W + ", latency: fit.yaml",
        r"workers\[0\] \(w\): latency: .*fit.yaml: no such file",
    ),
    a_fleet(
        "latency of another LLM",
        W,
        W + ", latency: fit.yaml",
        r"fit.yaml is a fit of Qwen/Qwen3-32B, the fleet serves",
        fit_yaml=yaml.safe_dump(FIT | {"llm": "Qwen/Qwen3-32B"}),
    ),
    a_fleet(
        "latency without a number",
        W,
        W + ", latency: fit.yaml",
        r"fleet.yaml: .*latency: .*fit.yaml: d_s: expected numbers",
        fit_yaml=yaml.safe_dump(without(FIT, "d_s")),
    ),
    a_fleet(
        "latency that falls",
        W,
        W + ", latency: fit.yaml",
        r"fleet.yaml: workers\[0\] \(w\): latency",
        fit_yaml=yaml.safe_dump(FIT | {"f_s": [0.02, -0.01]}),
    ),
    a_fleet(
        "KV cache of 3 tokens",
        W,
        W + ", kv_tokens: 3",
        r"kv_tokens: must hold one block of 16 tokens, found 3",
    ),
    a_fleet(
        "unknown routing",
        "workers:",
        "policies: {routing: luck}\nworkers:",
        r"policies: routing: must be one of jsq",
    ),
    a_fleet("network 0", "workers:", "network: {bandwidth: 0}\nworkers:", r"network: bandwidth: must be > 0"),
]
CATALOGS = [
    Case("catalog: no such folder", r"nowhere: no such catalog directory", more=("--catalog", "nowhere")),
    Case("catalog: a file", r"slo.yaml: no such catalog directory", more=("--catalog", "slo.yaml")),
    Case("catalog: empty folder", r"own: holds none of gpus.yaml", {"own/x": ""}, more=("--catalog", "own")),
    a_catalog("directory for a file", "gpus.yaml/x", "", r"own/gpus.yaml: is a directory"),
    a_catalog("syntax", "gpus.yaml", "a-gpu: {", r"own/gpus.yaml, line \d: is not valid YAML"),
    a_catalog(
        "row of a number", "gpus.yaml", "a-gpu: 3", r"own/gpus.yaml: a-gpu: expected a name and a mapping"
    ),
    a_catalog(
        "missing field",
        "gpus.yaml",
        GPU.replace("  power: 700 W\n", ""),
        r"gpus.yaml: a-gpu: power is missing",
    ),
    a_catalog(
        "unknown field", "gpus.yaml", GPU + "  colour: red\n", r"gpus.yaml: a-gpu: unknown key 'colour'"
    ),
    a_catalog(
        "unit", "gpus.yaml", GPU.replace("700 W", "700 hp"), r"gpus.yaml: a-gpu: power: unknown unit 'hp'"
    ),
    a_catalog(
        "bandwidth of next to nothing",
        "gpus.yaml",
        GPU.replace("3350 GB/s", "1e-300 GB/s"),
        r"gpus.yaml: a-gpu: bandwidth: '1e-300 GB/s' is too small to be true",
    ),
    a_catalog(
        "negative price", "gpus.yaml", GPU.replace("2.99", "-2.99"), r"gpus.yaml: a-gpu: .*price.*-2.99"
    ),
    a_catalog(
        "no memory", "gpus.yaml", GPU.replace("memory: 80 GB", "memory: 0 GB"), r"gpus.yaml: a-gpu: .*memory"
    ),
    a_catalog(
        "cap of nothing", "gpus.yaml", GPU + "b-gpu: {cap_of: c-gpu}\n", r"gpus.yaml: b-gpu: cap_of: expected"
    ),
    a_catalog(
        "LLM without layers", "llms.yaml", "my-llm: {hidden: 4096}\n", r"llms.yaml: my-llm: layers is missing"
    ),
    a_catalog(
        "preset of a mean", "slos.yaml", "mine: {slo: {ttft: {mean: 1 s}}}\n", r"slos.yaml: mine: .*refused"
    ),
    a_catalog(
        "fit without its LLM", "latency/fit.yaml", "gpu: h100-80g\nfits: []\n", r"fit.yaml: llm is missing"
    ),
    a_catalog(
        "fit of nothing",
        "latency/fit.yaml",
        "llm: llama-3.1-8b\ngpu: h100-80g\nfits: 3\n",
        r"fit.yaml: fits: expected a list",
    ),
    Case("catalog: unknown table", r"catalog: 'gpu' is not one of gpus, llms", command="catalog gpu"),
]
COMMANDS = [
    Case("--rate 0", r"rate: expected a number of requests/s > 0", command="simulate", more=("--rate", "0")),
    Case("--rate negative", r"rate: expected .* > 0, found -1", command="simulate", more=("--rate", "-1")),
    Case("--rate NaN", r"rate: expected .* > 0, found nan", command="simulate", more=("--rate", "nan")),
    Case("--scale", r"--scale: expected superpose, .*'up'", command="simulate", more=("--scale", "up")),
    Case(
        "--window", r"window: expected 'whole'.*found 'noon'", command="simulate", more=("--window", "noon")
    ),
    Case("-o a file", r"slo.yaml: exists and is not a directory", more=("-o", "slo.yaml")),
    Case("-o below a file", r"slo.yaml/out: slo.yaml is not a directory", more=("-o", "slo.yaml/out")),
    Case("-o name too long", r"name another", more=("-o", "x" * 300)),
    Case(
        "-o over the trace",
        r"would be written over",
        {"requests.csv": TRACE},
        more=("--trace", "requests.csv", "-o", "."),
    ),
    Case("simulate -o a folder", r"folder: is a directory", {"folder/x": ""}, "simulate", ("-o", "folder")),
    Case(
        "simulate -o below a file", r"slo.yaml: exists and is not", {}, "simulate", ("-o", "slo.yaml/r.csv")
    ),
    Case(
        "simulate -o over the trace", r"trace.csv: would be written over", {}, "simulate", ("-o", "trace.csv")
    ),
    Case(
        "simulate a relative SLO",
        r"slo.yaml: `simulate` needs limits in seconds",
        {"slo.yaml": SLO.replace(SLO.splitlines()[1], "preset: splitwise")},
        "simulate",
        ("--slo", "slo.yaml"),
    ),
    *(
        Case(f"{command}: name too long", r"x{300}: File name too long; name another", command=command)
        for command in (
            f"manifests {'x' * 300} -o m",
            f"check {'x' * 300}",
            f"init -o {'x' * 300}",
            f"compare --fleet {'x' * 300} --trace trace.csv",
        )
    ),
    Case(
        "search --rate 0",
        r"--rate: expected a number of requests/s > 0, found 0",
        command="search vidur --slo slo.yaml --trace trace.csv --rate 0",
    ),
    Case(
        "Poisson arrivals of a part",
        r"--window: is for --arrivals trace; drop it",
        command="goodput --fleet fleet.yaml --slo slo.yaml --trace trace.csv --arrivals poisson",
        more=("--window", "busiest 10 s"),
    ),
    Case(
        "schedule: an LLM twice",
        r"--trace: chat is given twice, trace.csv and b.csv",
        command="schedule slo.yaml --trace chat=trace.csv --trace chat=b.csv",
    ),
    Case(
        "prices: a header with old Mac's line ends",
        r"vms.csv, line 1: cannot be read",
        {"vms.csv": "InstanceType,Region\rfoo,bar\r"},
        command="catalog prices vms.csv",
    ),
]
GIVEN = {"plan": ("slo", "trace", "out"), "simulate": ("fleet", "trace"), "trace": ("TRACE",)}
DEFAULTS = {
    "slo": "slo.yaml",
    "trace": "trace.csv",
    "out": "out",
    "fleet": "fleet.yaml",
    "TRACE": "trace.csv",
}


def command_line(case: Case) -> list[str]:
    """The command on good files, where the case does not name others."""
    verb, *rest = case.command.split()
    line = ([] if verb == "plan" else [verb]) + rest
    for name in GIVEN.get(verb, ()):
        if name == "TRACE":
            line.append(DEFAULTS[name])
        elif f"--{name}" not in case.more and not (name == "out" and "-o" in case.more):
            line += [f"--{name}", DEFAULTS[name]]
    return [*line, *case.more]


def prepare(folder: Path, given: dict[str, str | bytes]) -> None:
    for name, content in ({"trace.csv": TRACE, "slo.yaml": SLO, "fleet.yaml": FLEET} | given).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


CASES = [*TRACES, *QUESTIONS, *INFEASIBLE, *FLEETS, *CATALOGS, *COMMANDS]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with good files to replace."""
    prepare(tmp_path, {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


# so few requests that a fleet may end before any gap is counted: thousands of fleets are simulated
OF_FEW = question(
    "gaps of few below the floor", "200 ms", "0.1 ms", r"latency: .*relax TBT p99 to \d", code=3
)


@pytest.mark.parametrize(
    "case", [*CASES, pytest.param(OF_FEW, marks=pytest.mark.slow)], ids=lambda case: case.name
)
def test_a_mistake_is_one_line_and_leaves_nothing(run: Run, here: Path, case: Case) -> None:
    prepare(here, case.given)
    before = snapshot(here)
    outcome = run(*command_line(case))
    assert outcome.code == case.code, outcome
    assert outcome.complaint.startswith("plan: ")
    assert re.search(case.says, outcome.complaint), outcome.complaint
    assert len(outcome.complaint) < 1200
    assert outcome.out == ""
    assert snapshot(here) == before


@pytest.mark.parametrize(
    "line",
    [
        ("--slo", "slo.yaml", "-o", "out"),
        ("--trace", "trace.csv", "-o", "out"),
        ("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out", "--seed", "-1"),
        ("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out", "--seed", "one"),
        ("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", "--seed", "18446744073709551616"),
        ("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out", "--time-limit", "0"),
        ("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out", "--time-limit", "nan"),
        ("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out", "--speed", "5"),
        ("--slo",),
        ("simulate", "--fleet", "fleet.yaml"),
        ("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", "--closed-loop", "-1"),
        ("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", "--closed-loop", "0.5"),
        ("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", "--rate", "fast"),
        ("trace",),
        ("trace", ""),
        ("--slo", "slo.yaml", "--trace", "trace.csv", "-o", ""),
        ("simulate", "--fleet", "fleet.yaml", "--trace="),
        ("guess",),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_a_usage_error(run: Run, here: Path, line: tuple[str, ...]) -> None:
    before = snapshot(here)
    outcome = run(*line)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err and "Traceback" not in outcome.err
    assert snapshot(here) == before


@pytest.mark.long
@pytest.mark.parametrize("case", INFEASIBLE, ids=lambda case: case.name)
def test_json_says_what_binds_and_what_would_help(run: Run, here: Path, case: Case) -> None:
    prepare(here, case.given)
    outcome = run(*command_line(case), "--json")
    document = json.loads(outcome.out)
    assert outcome.code == 3
    keys = {"status", "kind", "constraint", "relaxation", "message", "ways", "most_kept"}
    assert set(document) == keys and document["most_kept"] is None
    assert document["status"] == "infeasible"
    assert document["kind"] == ("latency" if "floor" in case.name else "capacity")
    assert document["constraint"] and document["relaxation"]
    assert f"plan: {document['message']}" == outcome.complaint


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    some(
        (
            "trace: missing column",
            "slo: below the floor",
            "slo: 100 000 deep",
            "fleet: count 0",
            "catalog: unit",
            "-o a file",
        ),
        2,
    ),
)
def test_the_installed_command_does_the_same(here: Path, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    prepare(here, case.given)
    before = snapshot(here)
    command = [str(Path(sys.executable).with_name("plan")), *command_line(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (case.code, "")
    # what takes a second, as on a machine under load, says what it is doing
    said = re.fullmatch(r"(?:\[ *[\d.]+ s\] .*\n)*(plan: .*\n)", done.stderr)
    assert said and re.search(case.says, said[1]), done.stderr
    assert snapshot(here) == before


# ---------------------------------------------------------------- a line of 2 GB


def packed(start: bytes, filler: bytes) -> bytes:
    """A gzip file of `start` and 2 GB of `filler`, in 2 MB: one member of 16 MiB, many times."""
    return gzip.compress(start) + gzip.compress(filler * 2**24) * 128


HUGE = [
    Case("CSV", r"huge.csv.gz, line 2: is longer than 4 MiB", more=("--trace", "huge.csv.gz")),
    Case("JSONL", r"huge.jsonl.gz, line 1: is longer than 4 MiB", more=("--trace", "huge.jsonl.gz")),
    Case("sparse CSV", r"huge.csv, line 2: holds a NUL byte", more=("--trace", "huge.csv")),
    Case("sparse YAML", r"huge.yaml: is larger than 16 MiB", more=("--slo", "huge.yaml")),
    Case("config.json", r"huge.json: is not JSON", {"slo.yaml": SLO.replace("llama-3.1-8b", "huge.json")}),
    Case("GPUs", r"own/gpus.yaml: is larger than 16 MiB", more=("--catalog", "own")),
]


@pytest.mark.parametrize("case", HUGE, ids=[case.name for case in HUGE])
def test_two_gigabytes_in_one_line_cost_neither_time_nor_memory(run: Run, here: Path, case: Case) -> None:
    prepare(here, case.given)
    (here / "huge.csv.gz").write_bytes(packed(HEADER.encode(), b"1"))
    (here / "huge.jsonl.gz").write_bytes(packed(b'{"timestamp": ', b"1"))
    (here / "own").mkdir()
    for name, start in {
        "huge.csv": HEADER,
        "huge.yaml": "llm: ",
        "huge.json": "{",
        "own/gpus.yaml": "",
    }.items():
        (here / name).write_text(start)
        os.truncate(here / name, 2 * 10**9)
    peak_kb, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    outcome = run(*command_line(case))
    assert time.process_time() - start_s < 3.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb < 128 * 1024
    assert outcome.code == 1 and re.fullmatch(f"plan: .*{case.says}.*", outcome.complaint), outcome
    assert not (here / "out").exists()


# ---------------------------------------------------------------- what is odd, but no mistake


def without_progress(said: str) -> str:
    """Lines of progress are said after a second, on a busy machine."""
    return re.sub(r"\[ +[\d.]+ s\] .*\n", "", said)


def test_requests_larger_than_the_kv_cache_are_reported(run: Run, here: Path) -> None:
    """160 tokens hold none of the requests, whose prompts have 200 tokens and more; 240 hold some."""
    for kv_tokens, refused in ((160, range(60, 61)), (240, range(1, 60))):
        (here / "fleet.yaml").write_text(FLEET.replace("count: 1", f"count: 1, kv_tokens: {kv_tokens}"))
        line = ("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", "--slo", "slo.yaml")
        outcome = run(*line, "--json", "-o", "requests.csv")
        summary = json.loads(outcome.out)
        assert (outcome.code, without_progress(outcome.err)) == (5, "")
        assert summary["rejected"] in refused
        assert summary["finished"] == 60 - summary["rejected"]
        assert not summary["slo"]["holds"]
        table = (here / "requests.csv").read_text()
        assert table.count(",rejected\n") == summary["rejected"]
        said = run(*line)
        assert "MISSED" in said.out and re.search(rf"rejected\D+{summary['rejected']}\b", said.out)


@pytest.mark.parametrize(
    "rows", ["0,50,5\n", "3,50,5\n" * 9, "0,50,1\n1,50,1\n"], ids=["one", "at once", "gapless"]
)
def test_traces_without_a_rate_or_gaps_can_be_simulated_and_described(
    run: Run, here: Path, rows: str
) -> None:
    (here / "trace.csv").write_text(HEADER + rows)
    for more in ((), ("--closed-loop", "2"), ("--slo", "slo.yaml", "--window", "whole")):
        for output in ((), ("--json",)):
            outcome = run("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", *more, *output)
            assert outcome.code == 0
            told = without_progress(outcome.err).splitlines()
            known = ("one late one misses it", "the traffic has none of its gaps", "gaps are judged while")
            assert all(any(words in line for words in known) for line in told), told
    assert run("trace", "trace.csv").code == 0
    json.loads(run("trace", "trace.csv", "--json").out)


@pytest.mark.parametrize("lines", [bomb, lambda: "a: " + "[" * 100_000], ids=["bomb", "deep"])
def test_yaml_is_refused_before_it_grows(here: Path, lines: Callable[[], str]) -> None:
    (here / "x.yaml").write_text(lines())
    start_s = time.process_time()
    with pytest.raises(InputError, match=r"x.yaml, line \d+: is not valid YAML"):
        checked_files.read_yaml(here / "x.yaml")
    assert time.process_time() - start_s < 1.0


def test_yaml_anchors_and_merge_keys_are_welcome(here: Path) -> None:
    (here / "x.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n")
    assert checked_files.read_yaml(here / "x.yaml") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }


# ---------------------------------------------------------------- writing: all or nothing

OLD = {"plan.yaml": "old", "requests.csv": "old", "manifests/compose/node-1.yaml": "old", "notes.txt": "mine"}
NEW: dict[str, str | bytes] = {
    "plan.yaml": "new",
    "report.html": "new",
    "requests.csv": b"new",
    "manifests/compose/compose.yaml": "new",
}
OUTDATED = ("manifests/compose/*.yaml",)


def fail_at(monkeypatch: pytest.MonkeyPatch, method: str, nth: int, error: BaseException) -> None:
    """The `nth` call of Path.`method` raises, once."""
    calls = 0
    original = getattr(Path, method)

    def failing(self: Path, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise error
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, method, failing)


# (into a folder with an earlier plan, where files can have two names, method, call of it): renames are one
# per new file, and one per outdated one; without second names, one per old file
FAILURES = [
    *((is_again, True, "write_bytes", nth) for is_again in (False, True) for nth in (1, 3)),
    *((False, True, "replace", nth) for nth in range(1, 5)),
    *((True, True, "replace", nth) for nth in range(1, 6)),
    *((True, False, "replace", nth) for nth in range(1, 8)),
]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "^C"]
)
@pytest.mark.parametrize(
    ("is_again", "has_links", "method", "nth"),
    FAILURES,
    ids=[f"{'again' * is_again} {'links' * links} {m} {nth}" for is_again, links, m, nth in FAILURES],
)
def test_an_interrupted_write_leaves_what_was_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_again: bool,
    has_links: bool,
    method: str,
    nth: int,
    error: BaseException,
) -> None:
    out = tmp_path / "below" / "out"
    if is_again:
        checked_files.write_files(out, OLD)
    before = snapshot(tmp_path)
    with monkeypatch.context() as patch:
        fail_at(patch, method, nth, error)
        if not has_links:
            patch.setattr(checked_files, "_link_file", lambda path, other: False)
        with pytest.raises((InputError, KeyboardInterrupt)) as caught:
            checked_files.write_files(out, NEW, outdated=OUTDATED)
    if isinstance(error, OSError):
        assert str(caught.value) == f"{out}: cannot be written (No space left on device)"
    assert snapshot(tmp_path) == before


def test_a_new_plan_replaces_the_old_one_and_its_outdated_files_only(tmp_path: Path) -> None:
    checked_files.write_files(tmp_path / "out", OLD)
    checked_files.write_files(tmp_path / "out", NEW, outdated=OUTDATED)
    found = {name: raw for name, raw in snapshot(tmp_path / "out").items() if raw is not None}
    assert found == {
        "plan.yaml": b"new",
        "report.html": b"new",
        "requests.csv": b"new",
        "notes.txt": b"mine",
        "manifests/compose/compose.yaml": b"new",
    }


def test_a_folder_in_the_way_of_a_file_stops_it_all(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match=r"cannot be written \(report.html is a directory there\)"):
        checked_files.write_files(tmp_path, NEW)
    assert snapshot(tmp_path) == before


def test_a_missing_trace_is_said_before_a_missing_folder(run: Run, here: Path) -> None:
    outcome = run("--slo", "slo.yaml", "--trace", "nowhere.csv")
    assert (outcome.code, outcome.complaint) == (1, "plan: nowhere.csv: no such file")


def test_a_place_without_permission_is_refused_beforehand(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root every folder is writable, so the answer of the system is made up."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path())
    outcome = run("--slo", "nowhere.yaml", "--trace", "nowhere.csv", "-o", "out")
    assert (outcome.code, outcome.complaint) == (
        1,
        "plan: out: no permission to write in .; name another one with -o",
    )


@pytest.mark.parametrize(
    "name", ["trace.csv", "slo.yaml", "own", "own/gpus.yaml", "locked/trace.csv", "locked/own"]
)
def test_what_may_not_be_read_is_one_line(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Root may read anything, so root becomes nobody for a moment.

    Nobody may not enter a checkout in a folder of mode 700: modules are imported before, and the shipped
    catalog is read from a copy in the working directory, which needs no permission on the folders above.
    """
    prepare(here, {"own/gpus.yaml": GPU, "locked/trace.csv": TRACE, "locked/own/gpus.yaml": GPU})
    option = "--catalog" if "own" in name else "--slo" if "slo" in name else "--trace"
    asked = {"--slo": "slo.yaml", "--trace": "trace.csv", "-o": "out"} | {
        option: name.removesuffix("/gpus.yaml")
    }
    line = [word for pair in asked.items() for word in pair]
    assert run("--slo", "nowhere", "--trace", "nowhere", "-o", "out").code == 1
    read_catalog()  # remembers where the shipped fits are
    shutil.copytree(checked_files.repository_dir("catalogs"), here / "catalogs")
    monkeypatch.setattr("planner.documents.catalog.repository_dir", Path)
    here.chmod(0o777)
    for path in here.rglob("*"):
        path.chmod(0o755)  # whatever the umask
    closed = here / (name if "locked" not in name else "locked")
    closed.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        outcome = run(*line)
    finally:
        os.seteuid(user)
        closed.chmod(0o755)
    assert outcome.code == 1, outcome
    assert re.fullmatch(f"plan: {name}: no (permission to read it|such catalog directory)", outcome.complaint)
    assert not (here / "out").exists()


def test_a_place_that_lets_nothing_in_is_refused_beforehand(run: Run, here: Path) -> None:
    """/proc says that root may write there."""
    outcome = run("--slo", "nowhere.yaml", "--trace", "nowhere.csv", "-o", "/proc/out")
    assert outcome.code == 1
    assert re.fullmatch(
        r"plan: /proc/out: (no permission|nothing can be).*another one with -o", outcome.complaint
    )


ONE_FILE = {
    "simulate": ("--fleet", "nowhere", "--trace", "nowhere"),
    "search": ("vidur", "--slo", "nowhere", "--trace", "nowhere"),
    "import": ("auto", "nowhere"),
    "fit": ("nowhere",),
    "calibrate": ("nowhere",),
    "profile": ("nowhere",),
}
ONE_FOLDER = {
    "validate": ("nowhere",),
    "manifests": ("nowhere",),
    "compare": ("--fleet", "nowhere", "--trace", "nowhere"),
    "pareto": ("--slo", "nowhere", "--trace", "nowhere", "--over", "ttft"),
    "schedule": ("nowhere", "--demand", "nowhere"),
    "prefixes": ("nowhere",),
    "report": ("nowhere",),
}


@pytest.mark.parametrize("command", ONE_FILE)
@pytest.mark.parametrize("out", ["x/", "x/.", "own/", "own", "own/..", ".", "trace.csv/", "trace.csv/x"])
def test_a_folder_where_a_file_is_written_is_refused_before_all_else(
    run: Run, here: Path, command: str, out: str
) -> None:
    """`x/` became a file named x."""
    (here / "own").mkdir()
    before = snapshot(here)
    outcome = run(command, *ONE_FILE[command], "-o", out)
    assert (outcome.code, outcome.out) == (1, "")
    assert re.fullmatch("plan: .*(folder|directory).*", outcome.complaint)
    assert snapshot(here) == before


@pytest.mark.parametrize("command", ONE_FOLDER)
@pytest.mark.parametrize("out", ["slo.yaml", "slo.yaml/", "slo.yaml/x"])
def test_a_file_where_a_folder_is_written_is_refused_before_all_else(
    run: Run, here: Path, command: str, out: str
) -> None:
    before = snapshot(here)
    outcome = run(command, *ONE_FOLDER[command], "-o", out)
    assert (outcome.code, outcome.out) == (1, "")
    assert re.fullmatch("plan: .*(folder|directory).*", outcome.complaint)
    assert snapshot(here) == before


@pytest.mark.parametrize("out", ["trace.csv", "trace.csv/x", "own.yaml", "own.json"])
def test_a_new_plan_goes_to_a_folder_or_to_a_file_by_its_name(run: Run, here: Path, out: str) -> None:
    """`plan replan -o` takes both: a file stands where a folder is asked for, and folders where a file is."""
    (here / "own.yaml").mkdir()
    (here / "own.json").mkdir()
    before = snapshot(here)
    outcome = run("replan", "--current", "nowhere", "--slo", "nowhere", "--trace", "nowhere", "-o", out)
    assert (outcome.code, outcome.out) == (1, "")
    assert re.fullmatch("plan: .*(folder|directory).*", outcome.complaint)
    assert snapshot(here) == before


def test_a_folder_in_the_way_of_a_plan_is_seen_beforehand(run: Run, here: Path) -> None:
    (here / "out" / "report.html").mkdir(parents=True)
    outcome = run("--slo", "nowhere.yaml", "--trace", "nowhere.csv", "-o", "out")
    assert (outcome.code, outcome.complaint) == (
        1,
        "plan: out/report.html: is a directory, and a file of that name is written; name another place "
        "with -o",
    )


def test_want_of_memory_is_one_line(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan search vidur --gpus 100000000` asks for 34 GiB at once."""

    def too_much(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 34.3 GiB")

    monkeypatch.setattr("planner.traffic.trace_reading.read_files", too_much)
    outcome = run("trace", "trace.csv")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "plan: the memory of this machine does not suffice (Unable to allocate 34.3 GiB); ask for less\n"
    )


@pytest.mark.parametrize("plan", ["nowhere.yaml", "empty"])
def test_a_validation_names_the_plan_that_is_not_there(run: Run, here: Path, plan: str) -> None:
    """Not the trace that would have been beside it."""
    (here / "empty").mkdir()
    outcome = run("validate", plan, "-o", "out")
    file = plan if plan.endswith("yaml") else f"{plan}/plan.yaml"
    assert (outcome.code, outcome.complaint) == (1, f"plan: {file}: no such file")


def test_a_link_to_nothing_is_refused_beforehand(run: Run, here: Path) -> None:
    (here / "out").symlink_to("nowhere")
    outcome = run("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out")
    assert (outcome.code, outcome.complaint) == (
        1,
        "plan: out: out is a link to nothing; name another one with -o",
    )


def test_a_name_that_ends_in_gz_gets_a_packed_file(tmp_path: Path) -> None:
    """Plain text under such a name could not be read again."""
    checked_files.write_file(tmp_path / "new" / "x.csv.gz", "a,b\n")
    with checked_files.open_text(tmp_path / "new" / "x.csv.gz") as stream:
        assert stream.read() == b"a,b\n"
    checked_files.write_file(tmp_path / "upload.gz", gzip.compress(b"packed already"))
    assert gzip.decompress((tmp_path / "upload.gz").read_bytes()) == b"packed already"


def test_a_device_is_written_to_as_it_is(here: Path) -> None:
    checked_files.write_file(Path("/dev/null"), "x")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(InputError, match=r"/dev/full: cannot be written \(No space left"):
        checked_files.write_file(Path("/dev/full"), "x" * 10**6)
