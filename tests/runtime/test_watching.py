"""`plan watch` beside servers: a Prometheus that answers over HTTP, the exporter, and the real program."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from live_metrics import answer
from plans import CATALOG, LLM, mixed
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.generated_traffic import synthesise, uniform
from planner.api.watch_api import MetricsSource, look_once
from planner.documents.certificate import Certificate
from planner.documents.plan_folder import WrittenPlan
from planner.domain import Limit, Slo
from planner.errors import InputError
from planner.importers.vllm_metrics import NAMES
from planner.runtime.prometheus_server import PrometheusError, query_range
from planner.runtime.watch_exporter import Exporter, parse_address
from planner.studies.plan_watch import PlanExpectations, read_expectations
from planner.traffic.trace import Trace

OK = "vllm:request_success_total"


@contextmanager
def server(body: bytes, code: int = 200) -> Iterator[tuple[str, list[dict[str, list[str]]]]]:
    """Answers every question with `body`, and keeps what was asked."""
    asked: list[dict[str, list[str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            asked.append(urllib.parse.parse_qs(self.rfile.read(length).decode()))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", asked
    finally:
        running.shutdown()
        running.server_close()


def test_a_server_is_asked_for_each_metric_in_parts() -> None:
    body = json.dumps(answer(np.array([0.0, 60.0]), [(OK, {}, np.array([0.0, 1.0]))])).encode()
    with server(body) as (url, asked):
        found = query_range(url, [OK], start_s=0, end_s=20_000, step_s=1.0, match='pod="a"')
    assert [question["query"] for question in asked] == [[f'{OK}{{pod="a"}}']] * 3
    assert [float(question["start"][0]) for question in asked] == [0, 10_000, 20_000]
    assert {row.name for row in found} == {OK}


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"<html>", 200, "is not JSON"),
        (b'{"status": "error", "error": "invalid parameter"}', 400, "HTTP 400: invalid parameter"),
        (b"", 503, "HTTP 503"),
        (b"[]", 200, "expected an answer of /api/v1/query_range"),
    ],
)
def test_a_server_that_is_none_ends_in_one_line(body: bytes, code: int, said: str) -> None:
    with server(body, code) as (url, _), pytest.raises(InputError) as caught:
        query_range(url, [OK], start_s=0, end_s=60, step_s=60)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nobody_there_may_be_there_later() -> None:
    with pytest.raises(PrometheusError, match="no answer"):
        query_range(f"http://127.0.0.1:{free_port()}", [OK], start_s=0, end_s=60, step_s=60)


def test_gauges_are_for_this_machine_unless_an_address_says_otherwise() -> None:
    assert parse_address(":9109") == parse_address("9109") == ("127.0.0.1", 9109)
    assert parse_address("0.0.0.0:9109") == ("0.0.0.0", 9109)
    assert parse_address("127.0.0.1:0") == ("127.0.0.1", 0)
    for wrong in ("9109x", "host", ":99999", ""):
        with pytest.raises(InputError, match="--export"):
            parse_address(wrong)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def a_plan(trace: Trace) -> PlanExpectations:
    """What `planned` needs of a written plan."""
    fleet = mixed("h100-80g", 4, 1)
    slo = Slo((Limit("ttft", 0.9, 2.0),))
    certificate = Certificate("cost", "USD/h", 1.0, 1.0, 1.0, True, True, (), (), (), (), (), 1, 0, 0)
    return read_expectations(
        WrittenPlan(
            Path("plan"), "certified", "", fleet, slo, trace, "", certificate, (), (), None, (None,), 4096, ()
        )
    )


def test_what_is_exported_is_what_was_found() -> None:
    rng = np.random.default_rng(0)
    trace = synthesise(2400, 2.0, input_tokens=uniform(100, 300), output_tokens=uniform(4, 8), rng=rng)
    plan = a_plan(trace)
    times = np.arange(0.0, 3660.0, 60.0)
    rows = [
        (OK, {"instance": "a"}, 2.0 * times),
        ("vllm:request_prompt_tokens_sum", {"instance": "a"}, 2.0 * 300 * times),
        ("vllm:request_generation_tokens_sum", {"instance": "a"}, 2.0 * 6 * times),
    ]
    with server(json.dumps(answer(times, rows)).encode()) as (url, asked):
        found = look_once(plan, MetricsSource((url,))).watched
    assert len(asked) == len(NAMES)
    exporter = Exporter("127.0.0.1:0")
    try:
        exporter.show(found)
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as reply:
            text = reply.read().decode()
    finally:
        exporter.close()
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["fleetplan_plan_holds",] == float(found.plan_holds)
    assert values["fleetplan_headroom_traffic_frac",] == pytest.approx(found.headroom.headroom_frac)
    assert values["fleetplan_live_rps",] == pytest.approx(found.headroom.now_rps)
    assert values["fleetplan_drifted", "prompt"] == 1
    assert values["fleetplan_drift_frac", "prompt"] == pytest.approx(0.5, abs=0.02)
    assert values["fleetplan_drifted", "output"] == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_a_real_prometheus_shows_a_shift_of_lengths(tmp_path: Path) -> None:
    """Two engines that keep time, scraped every second; prompts get half longer after 25 s."""
    rng = np.random.default_rng(1)
    lengths = uniform(200, 400), uniform(3, 5)
    trace = synthesise(2400, 20.0, input_tokens=lengths[0], output_tokens=lengths[1], rng=rng)
    plan = a_plan(trace)
    ports = [free_port() for _ in range(3)]
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\nscrape_configs:\n- job_name: vllm\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{ports[0]}', '127.0.0.1:{ports[1]}']}}]\n"
    )
    latency = asdict(replace(CATALOG.step_latency(LLM, CATALOG.gpu("h100-80g"), 4)))
    told = {
        "latency": latency,
        "kv_tokens": 100_000,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "prefix_cache": False,
    }
    commands = [
        [sys.executable, "-m", "planner.runtime.fake_engine", "--port", str(port), json.dumps(told)]
        for port in ports[:2]
    ]
    commands.append(
        [
            *(
                "prometheus",
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
            ),
            f"--web.listen-address=127.0.0.1:{ports[2]}",
        ]
    )
    started = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        for port, path in zip(ports, ("health", "health", "-/ready"), strict=True):
            wait_for(f"http://127.0.0.1:{port}/{path}")
        asyncio.run(send(ports[:2], trace, until_s=25.0, factor=1.0))
        shifted_s = time.time()
        url = f"http://127.0.0.1:{ports[2]}"
        source = MetricsSource((url,), look_back_s=24.0, window_s=2.0)
        before = look_once(plan, source).watched
        asyncio.run(send(ports[:2], trace, until_s=20.0, factor=1.5))
        after = look_once(plan, replace(source, look_back_s=48.0)).watched
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(10)
    assert before.status == "inside" and before.live.instances == 2
    drifts = {drift.what: drift for drift in after.drifts}
    assert not drifts["output"].is_drift
    prompt = drifts["prompt"]
    assert prompt.is_drift and prompt.is_harder
    assert prompt.low_frac < 0.5 < prompt.high_frac + 0.1
    assert prompt.since_s == pytest.approx(shifted_s, abs=8)
    assert after.latencies[0].is_kept and after.latencies[0].requests > 400


def wait_for(url: str) -> None:
    for _ in range(200):
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


async def send(ports: list[int], trace: Trace, *, until_s: float, factor: float) -> None:
    """The first `until_s` of a trace, to the engines in turn."""
    async with aiohttp.ClientSession() as client:

        async def one(k: int) -> None:
            await asyncio.sleep(float(trace.arrival_s[k]))
            body = {
                "prompt": [1] * int(factor * trace.input_tokens[k]),
                "max_tokens": int(trace.output_tokens[k]),
            }
            async with client.post(f"http://127.0.0.1:{ports[k % 2]}/v1/completions", json=body) as reply:
                assert reply.status == 200
                await reply.read()

        await asyncio.gather(*(one(k) for k in range(int(np.searchsorted(trace.arrival_s, until_s)))))
