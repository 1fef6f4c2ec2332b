"""Plans ten questions on an idle machine and beside busy loops: the files must be equal, except for timings.

    python benchmarks/busy.py [--traces DIR] [--loops 8] [--only NAME ...]

Each question is planned by the command, first alone, then while --loops processes count as fast as they can.
plan.yaml, certificate.json, requests.csv and the manifests are compared byte for byte. Prints a Markdown
table with the seconds of both runs. DIR holds AzureLLMInferenceTrace_{conv,code}.csv of AzurePublicDataset;
default: ../shared/data/traces beside the clone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

CLONE = Path(__file__).resolve().parents[1]
DEFAULT_TRACES = CLONE.parent / "shared" / "data" / "traces"
SAMPLES = CLONE / "examples" / "traces"
LLAMA = {
    "llm": "llama-3.1-70b",
    "slo": {"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}},
    "fleet": {"gpus": ["a100-80g", "h100-80g"]},
}
CONV, CODE = "AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv"

QUESTIONS: dict[str, tuple[dict[str, Any] | Path, str | None]] = {
    "the sample": (CLONE / "examples" / "slo.yaml", "azure-conversation-sample.csv"),
    "code sample": (CLONE / "examples" / "slo-code.yaml", "azure-code-sample.csv"),
    "prefixes": (CLONE / "examples" / "slo-prefixes.yaml", "shared-prefixes-sample.jsonl"),
    "conv own": (LLAMA, CONV),
    "code own": (LLAMA, CODE),
    "conv 20, on paper": (LLAMA | {"traffic": {"rate": 20}, "safety": "none"}, CONV),
    "described": (LLAMA | {"traffic": {"rate": 30, "input": 1500, "output": 300}}, None),
    "with a budget": (LLAMA | {"traffic": {"rate": 5}, "limits": {"cost": "100 usd/h"}}, CONV),
    "throughput": (LLAMA | {"fleet": {"gpus": {"h100-80g": 8}}, "objective": "throughput"}, CODE),
    "DeepSeek-V3, ranks": (
        {
            "llm": "deepseek-v3",
            "slo": {"ttft": {"p90": "2 s"}, "tpot": {"p90": "50 ms"}},
            "traffic": {"rate": 10},
            "fleet": {"gpus": {"h200-141g": 256}, "dp": [1, 8]},
        },
        CONV,
    ),
}


def planned(question: dict[str, Any] | Path, trace: Path | None, out: Path) -> tuple[dict[str, bytes], float]:
    """The files of a plan, and the seconds that it took."""
    slo = question if isinstance(question, Path) else out.with_suffix(".yaml")
    if not isinstance(question, Path):
        slo.write_text(yaml.safe_dump(question))
    command = [sys.executable, "-m", "planner.cli", "--slo", str(slo), "-o", str(out), "--quiet"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *([] if trace is None else ["--trace", str(trace)])], capture_output=True, text=True
    )
    taken_s = time.monotonic() - began
    if done.returncode not in (0, 4):
        raise SystemExit(f"{slo}: exit {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    files = (path for path in sorted(out.rglob("*")) if path.is_file() and path.suffix != ".html")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}, taken_s


def count_for_ever() -> None:
    """Keep one CPU busy; the process is killed from outside."""
    while True:
        pass


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that take what processors there are."""
    loops = [multiprocessing.Process(target=count_for_ever, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=list(QUESTIONS))
    arguments = parser.parse_args()
    print("| question | alone, s | beside loops, s | status | the same |\n|---|---|---|---|---|", flush=True)
    for name in arguments.only:
        question, of = QUESTIONS[name]
        trace = None if of is None else SAMPLES / of if (SAMPLES / of).exists() else arguments.traces / of
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            alone, alone_s = planned(question, trace, out)
            out.rename(Path(folder) / "alone")
            with busy_loops(arguments.loops):
                beside, beside_s = planned(question, trace, out)
        status = yaml.safe_load(alone["plan.yaml"])["status"]
        other = sorted(each for each in alone.keys() | beside.keys() if alone.get(each) != beside.get(each))
        same = "yes" if not other else f"NO: {', '.join(other)}"
        print(f"| {name} | {alone_s:.1f} | {beside_s:.1f} | {status} | {same} |", flush=True)


if __name__ == "__main__":
    main()
