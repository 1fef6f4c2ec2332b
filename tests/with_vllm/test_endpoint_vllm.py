"""`plan validate --url` against a vLLM that was started by hand, with its /metrics beside: `make test-vllm`.

What is asserted holds on a busy machine: nothing is lost, tokens are as many as were asked for by the
client's, the engine's and the trace's count, and the engine's clock lies within the client's.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.domain import Slo
from planner.errors import PlannerError
from planner.fleet import Fleet, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.runtime import probe
from planner.runtime.analysis import ValidationSetup
from planner.runtime.endpoint import Endpoint
from planner.runtime.prediction_errors import CPU_TOLERANCES
from planner.runtime.validate import validate
from planner.runtime.validation_document import validation_document
from planner.traffic.trace import Trace
from profiling.vllm_install import is_installed

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
NAME, KEY = "tiny", "sk-by-hand-0123456789"
REQUESTS, RATE_RPS = 100, 6.0
START_S = 300.0
WORDS = 32_000


def tokenizer(folder: Path) -> None:
    """A word is a token, unknown ones too; a chat is its messages, one word each more."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{k}": k for k in range(3, WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`vllm serve` on a free port, as anybody would start it."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text((TINY / "config.json").read_text())
    tokenizer(folder)
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        port = probing.getsockname()[1]
    flags = f"--host 127.0.0.1 --port {port} --served-model-name {NAME} --api-key {KEY} --load-format dummy"
    flags += " --enforce-eager --dtype bfloat16 --max-model-len 2048 --max-num-seqs 32"
    flags += " --max-num-batched-tokens 512"
    log = (folder / "log").open("w")
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))), "DO_NOT_TRACK": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "planner.runtime.launch", "serve", str(folder), *flags.split()],
        env=os.environ | environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()[-3000:]
                assert time.monotonic() < deadline_s
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)
        log.close()


def a_setup(url: str, requests: int, **more: Any) -> ValidationSetup:
    """Short requests to one worker with steps of 8 ms, about what the tiny LLM takes on a free core."""
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(1 / RATE_RPS, requests))
    trace = Trace(
        "short", arrival_s - arrival_s[0], rng.integers(16, 160, requests), rng.integers(2, 24, requests)
    )
    latency = StepLatency((1.0, 512.0), (0.006, 0.03), 0.0, 1e-5, 0.0, 2e-5, 0.0, "by hand")
    catalog = read_catalog()
    llm = catalog.llm(str(TINY))
    worker = WorkerType(catalog.gpu("h100-80g"), 1, latency, 60_000, 512, 32)
    fleet = Fleet(llm, (Pool("w", "mixed", worker, 1),))
    endpoint = Endpoint(url, KEY, "A_KEY", model=NAME, **more)
    return ValidationSetup(fleet, trace, Slo(()), 2048, engine="endpoint", endpoint=endpoint)


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def test_a_hundred_requests_and_nothing_is_lost(url: str, tmp_path: Path, say: Callable[[str], None]) -> None:
    before = metric(url, "generation_tokens_total"), metric(url, "prompt_tokens_total")
    setup = a_setup(url, REQUESTS, prometheus=(f"{url}/metrics",))
    told = validation_document(validate(setup, tmp_path, tolerances=CPU_TOLERANCES))
    assert told["finished"] == told["requests"] == REQUESTS and told["compared"] > 0.9 * REQUESTS
    about = told["endpoint"]
    assert about["prompts"] == "token ids" and about["fixes_length"]
    assert about["lengths"]["prompt_error_frac"] == {"median": 0.0, "largest": 0.0}
    assert about["lengths"]["output_tokens"] == int(setup.trace.output_tokens.sum())
    assert about["answers_without_exact_tokens"] == 0
    assert about["engines"]["requests"] == REQUESTS and about["engines"]["preemptions"] == 0
    times = {row["metric"]: row for row in about["engines"]["times"]}
    for name in ("ttft", "e2e"):
        assert 0 < times[name]["engine_mean_s"] < times[name]["client_mean_s"]
    more = metric(url, "generation_tokens_total") - before[0]
    assert more >= setup.trace.output_tokens.sum()
    for row in told["errors"]:
        if row["percentile"] in ("p50", "p90"):
            figures = f"{1e3 * row['predicted_s']:.1f} and {1e3 * row['measured_s']:.1f} ms"
            say(f"{row['metric']} {row['percentile']}: predicted and by the client's clock {figures}")
    for name, row in times.items():
        engine, client = row["engine_mean_s"], row["client_mean_s"] or float("nan")
        say(f"{name}: engine's mean {1e3 * engine:.1f} ms, client's {1e3 * client:.1f} ms")
    say(f"load average {os.getloadavg()[0]:.1f}; a small answer {1e3 * about['round_trip_s']:.1f} ms")
    assert KEY not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_a_chat_is_measured_by_text(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word is a token here, and the template adds one: prompts are exactly as long as the traffic's."""
    monkeypatch.setattr(probe, "COMPLETION_DIALECTS", ())
    setup = a_setup(url, 30)
    told = validation_document(validate(setup, tmp_path, tolerances=CPU_TOLERANCES))
    about = told["endpoint"]
    assert told["finished"] == 30 and about["path"] == "/chat/completions" and about["prompts"] == "text"
    assert about["tokens_per_word"] == pytest.approx(1.0)
    assert about["lengths"]["prompt_error_frac"] == {"median": 0.0, "largest": 0.0}
    assert about["lengths"]["output_tokens"] == int(setup.trace.output_tokens.sum())


@pytest.mark.parametrize(
    ("change", "said"),
    [({"key": "wrong"}, "HTTP 401"), ({"model": "another"}, "does not serve --model 'another'.*tiny")],
)
def test_a_wrong_key_or_model_is_one_line(
    url: str, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    setup = a_setup(url, 5)
    asked = {"key": KEY, "key_name": "A_KEY", "model": NAME} | change
    with pytest.raises(PlannerError, match=said):
        validate(replace(setup, endpoint=Endpoint(url, **asked)), tmp_path)
