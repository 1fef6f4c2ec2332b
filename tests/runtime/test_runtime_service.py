"""The router as a service: what clients may cost it, engines that come back, its end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from runtime_fakes import (
    PATIENCE_S,
    Backend,
    a_body,
    a_server,
    engines,
    fleet_of,
    is_idle,
    post,
    routed,
    until,
)
from typer.testing import CliRunner

from planner.cli import app
from planner.documents.fleet_file import fleet_document
from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Policies
from planner.runtime import connection_limits
from planner.runtime.connection_limits import (
    ConnectionLimits,
    OpenConnections,
    bind_sockets,
    connections_for,
    listening,
)
from planner.runtime.launch import API_KEYS, IDENTITY, IDENTITY_HEADER
from planner.runtime.router import LiveRouter, RouterSettings
from planner.runtime.service import LineLimit, serve_until_drained
from planner.runtime.step_log import StepLog
from planner.runtime.workers import EngineCommand, Patience, place_workers, run_engines

TOKEN = b'data: {"choices":[{"index":0,"text":"","token_ids":[1]}]}\n\n'
IN_TURNS = Policies(routing="round-robin")


@asynccontextmanager
async def behind_a_door(
    backends: list[Backend], settings: RouterSettings
) -> AsyncIterator[tuple[LiveRouter, str]]:
    router = LiveRouter(backends, fleet_of(("mixed", "mixed", len(backends))), settings)
    async with listening(router.app, connections=router.connections) as url:
        yield router, url


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_silent_connections_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hundred connections that say nothing before a router that takes 20: a request is answered at
    once, and a moment later all of them are closed."""
    settings = RouterSettings(limits=ConnectionLimits(connections=20, idle_s=0.4))
    now_s = 0.0
    monkeypatch.setattr(connection_limits, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def run() -> None:
        nonlocal now_s
        async with engines(["mixed"]) as backends, behind_a_door(backends, settings) as (router, url):
            silent = [await asyncio.open_connection("127.0.0.1", port_of(url)) for _ in range(300)]
            assert (await post(url, a_body()))[0] == 200
            assert router.connections.open <= 21 and router.connections.refused["all"] >= 279
            now_s = 0.5
            await asyncio.gather(*(asyncio.wait_for(reader.read(), PATIENCE_S) for reader, _ in silent))
            for _, writer in silent:
                writer.close()
            assert not router.connections.waiting and router.connections.refused["idle"] >= 1

    asyncio.run(run())


@pytest.mark.parametrize("trickles", [False, True])
def test_a_head_that_never_ends_is_not_waited_for(trickles: bool) -> None:
    async def run() -> None:
        limits = RouterSettings(limits=ConnectionLimits(idle_s=0.3))
        async with engines(["mixed"]) as backends, behind_a_door(backends, limits) as (_, url):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
            writer.write(b"GET /health HTTP/1.1\r\n")
            while trickles and not reader.at_eof():
                writer.write(b"X-More: 1\r\n")
                await asyncio.sleep(0.05)
                if writer.transport.is_closing():
                    break
            try:
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            except ConnectionError:
                pass
            writer.close()

    asyncio.run(run())


class Connected(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def test_one_client_has_not_all_connections_and_this_machine_may() -> None:
    """Two for each client: the third of 10.0.0.1 is refused, not that of 10.0.0.2 nor of loopback. What left
    makes room."""
    connections = OpenConnections(ConnectionLimits(connections=100, connections_per_client=2))
    first, *others = (Connected() for _ in range(5))
    assert [connections.admit(each, "10.0.0.1") for each in (first, *others[:2])] == [True, True, False]
    assert all(connections.admit(Connected(), "127.0.0.1") for _ in range(5)) and connections.admit(
        others[2], "10.0.0.2"
    )
    connections.note_closed(others[1], "10.0.0.1")
    connections.note_closed(first, "10.0.0.1")
    assert connections.admit(others[3], "10.0.0.1") and connections.refused == {"client": 1}


def test_connections_stay_below_the_files_that_may_be_open() -> None:
    """Of 1024 files 256 are kept, and a connection may need three."""
    assert connections_for(1024) == 256
    assert connections_for(300) == 16
    assert connections_for(float("inf")) == 10**6


def test_a_body_that_does_not_come_is_refused() -> None:
    async def run() -> None:
        async with (
            engines(["mixed"]) as backends,
            routed(backends, settings=RouterSettings(body_s=0.2)) as (router, url),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{")
            head = await asyncio.wait_for(reader.readline(), PATIENCE_S)
            assert b" 408 " in head and router.outcomes["refused_408"] == 1 and is_idle(router)
            writer.close()

    asyncio.run(run())


def test_a_malformed_header_leaves_no_key_anywhere(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        settings = RouterSettings(keys=("a-right-key",))
        async with engines(["mixed"]) as backends, routed(backends, settings=settings) as (_, url):
            for value in (
                b"Bearer a-right-\x00key",
                b"Bearer a-right-\nkey",
                b"Bearer a-right-key" + b"k" * 50_000,
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: " + value + b"\r\n\r\n")
                assert b" 400 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
                writer.close()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(run())
    assert "malformed request was refused" in caplog.text
    said = capfd.readouterr()
    assert "a-right" not in caplog.text + said.out + said.err


@pytest.mark.parametrize("begins", [False, True])
def test_requests_of_a_frozen_worker_are_retried_or_ended(begins: bool) -> None:
    """A worker that says nothing more, and that /health then finds to be down: before the first byte the
    other worker answers, after it the stream ends with an error."""
    is_frozen = asyncio.Event()

    async def freezes(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if begins:
            await response.prepare(request)
            await response.write(TOKEN)
        is_frozen.set()
        await asyncio.sleep(2 * PATIENCE_S)
        return response

    async def run() -> None:
        async with engines(["mixed"]) as good, a_server(freezes) as frozen:
            async with routed([frozen, *good], IN_TURNS) as (router, url):
                asked = [asyncio.ensure_future(post(url, a_body(stream=True))) for _ in range(2)]
                await is_frozen.wait()
                if begins:  # The router passes the token on.
                    await until(lambda: any(reply.tokens for reply in router.attempts[0].values()))
                frozen.is_up = False
                answers = await asyncio.wait_for(asyncio.gather(*asked), PATIENCE_S)
                assert [status for status, _, _ in answers] == [200, 200] and is_idle(router)
                broken = [text for _, text, _ in answers if "worker_failed" in text]
                assert len(broken) == begins and router.retries == (not begins)
                assert all("odd no longer answers" in text for text in broken)

    asyncio.run(run())


def test_a_stream_that_stops_is_ended() -> None:
    async def stops(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(TOKEN)
        await asyncio.sleep(2 * PATIENCE_S)
        return response

    async def run() -> None:
        async with (
            a_server(stops) as odd,
            routed([odd], settings=RouterSettings(silence_s=0.2)) as (router, url),
        ):
            _, text, _ = await asyncio.wait_for(post(url, a_body(stream=True)), PATIENCE_S)
            assert "worker_failed" in text and router.outcomes == {"broken": 1} and is_idle(router)

    asyncio.run(run())


def test_a_client_that_does_not_read_is_let_go() -> None:
    """A stream of 60 tokens of a megabyte to a client that reads nothing: its connection is ended, the worker
    freed."""
    large = json.dumps({"choices": [{"index": 0, "text": "x" * 10**6}]}).encode()

    async def floods(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(60):
            await response.write(b"data: " + large + b"\n\n")
        return response

    async def run() -> None:
        async with (
            a_server(floods) as odd,
            routed([odd], settings=RouterSettings(client_s=0.2)) as (router, url),
        ):
            body = json.dumps(a_body(stream=True)).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(url), limit=1024)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await until(lambda: bool(router.outcomes))
            assert router.outcomes == {"client_gone": 1} and is_idle(router)
            writer.close()

    asyncio.run(run())


def test_a_request_of_which_two_workers_die_is_not_given_to_a_third() -> None:
    """Each worker breaks the connection of every request with 7 tokens: one of those is seen by two workers
    and refused with its id, by a status that no client tries again; others are answered."""
    seen: list[str] = []

    async def run() -> None:
        async with engines(["mixed"]) as (good,):

            async def dies(request: web.Request) -> web.StreamResponse:
                body = await request.json()
                seen.append(request.headers["X-Request-Id"])
                if len(body["prompt"]) == 7:
                    assert request.transport is not None
                    request.transport.abort()
                async with (
                    aiohttp.ClientSession() as client,
                    client.post(good.url + request.path, json=body) as answer,
                ):
                    return web.json_response(await answer.json())

            async with a_server(dies, "a") as a, a_server(dies, "b") as b, a_server(dies, "c") as c:
                async with routed([a, b, c], IN_TURNS) as (router, url):
                    status, answer, _ = await post(url, a_body(tokens=7), **{"X-Request-Id": "bad-1"})
                    assert status == 422 and "request bad-1" in answer["error"]["message"]
                    assert seen == ["bad-1", "bad-1"] and router.poison == 1
                    assert (await post(url, a_body(tokens=8)))[0] == 200 and is_idle(router)

    asyncio.run(run())


ENGINE = f"""
import http.server, os, pathlib, sys
marks = pathlib.Path(sys.argv[2])
starts = len(list(marks.iterdir()))
(marks / str(starts)).touch()
print("keys:", os.environ.get({API_KEYS!r}, "none"), flush=True)
if starts in (1, 2):
    sys.exit("not this time")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header({IDENTITY_HEADER!r}, os.environ[{IDENTITY!r}])
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_an_engine_that_was_given_up_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is killed, and fails two starts: given up, said so by /health, the metrics and the log; after the
    cool-down it is up again. No engine sees the router's keys."""
    monkeypatch.setenv(API_KEYS, "the-key")
    (marks := tmp_path / "marks").mkdir()
    patience = Patience(
        start_s=30.0, health_every_s=0.1, backoff_s=0.01, failures=3, cool_down_s=1234.0, health_timeout_s=5.0
    )
    is_cool, sleep = asyncio.Event(), asyncio.sleep

    async def sleep_or_cool(delay_s: float) -> None:
        await (is_cool.wait() if delay_s == patience.cool_down_s else sleep(delay_s))

    monkeypatch.setattr(asyncio, "sleep", sleep_or_cool)

    async def told(url: str, path: str) -> str:
        async with aiohttp.ClientSession() as client, client.get(url + path) as answer:
            return await answer.text()

    async def run() -> None:
        fleet = fleet_of(("w", "mixed", 1))

        def command(_: object, port: int) -> EngineCommand:
            return EngineCommand([sys.executable, "-c", ENGINE, str(port), str(marks)], {})

        async with run_engines(
            place_workers(fleet, tmp_path, None, log_bytes=2000), command, patience
        ) as group:
            (worker,) = group.workers
            router = LiveRouter(group.workers, fleet)
            async with listening(router.app) as url:
                assert worker.process is not None
                os.kill(worker.process.pid, signal.SIGKILL)
                await until(lambda: bool(worker.gave_up))
                assert json.loads(await told(url, "/health"))["given_up"] == 1
                assert 'fleetplan_worker_given_up{worker="w-0"} 1' in await told(url, "/metrics")
                is_cool.set()
                await until(lambda: worker.is_up)
                health = json.loads(await told(url, "/health"))
                assert (
                    health == {"status": "ok", "workers": 1, "up": 1, "given_up": 0, "passed_over": 0}
                    and worker.starts == 4
                )

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(run(), 60.0))
    assert "worker w-0: given up for 1234 s: did not start (exit code 1), 3 times in a row" in caplog.text
    log = (tmp_path / "w-0.log").read_text()
    assert log.count("keys: none") == 4 and "the-key" not in log


def test_a_step_log_stays_within_its_size_and_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    """A thousand requests of 130 bytes into 4000: two files with the newest of them, each with the line that
    says what engine it is. On a full disk nothing is written and nothing fails."""

    def write(log: StepLog) -> None:
        log.begin("0.33.0", async_scheduling=False)
        for k in range(1000):
            log.queued(f"r{k}", KV_BLOCK_TOKENS, 1.0)
            log.token(f"r{k}", 1, 2.0)
            log.finished(f"r{k}")
        log.close()

    file = tmp_path / "w-0.1.steps.jsonl"
    write(StepLog(file, most_bytes=4000))
    kept = sorted(tmp_path.iterdir())
    assert [path.name for path in kept] == [file.name, f"{file.name}.1"]
    assert sum(path.stat().st_size for path in kept) <= 4300
    lines = [json.loads(line) for path in reversed(kept) for line in path.read_text().splitlines()]
    requests = [line["request"] for line in lines if "request" in line]
    assert requests == [f"r{k}" for k in range(1000 - len(requests), 1000)] and len(requests) > 10
    assert sum("engine" in line for line in lines) == 2
    for path in (Path("/dev/full"), tmp_path / "no-folder" / "x"):
        write(StepLog(path, most_bytes=4000))


def test_metrics_are_what_prometheus_reads() -> None:
    async def run() -> str:
        async with engines(["mixed"]) as backends, routed(backends) as (_, url):
            backends[0].name = 'a"b\\c'
            assert (await post(url, a_body(stream=True)))[0] == 200
            async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as answer:
                return await answer.text()

    families = {family.name: family for family in text_string_to_metric_families(asyncio.run(run()))}
    assert all(family.documentation for family in families.values())
    (up,) = families["fleetplan_worker_up"].samples
    assert up.labels == {"worker": 'a"b\\c'} and up.value == 1
    counts = [
        sample.value for sample in families["fleetplan_first_byte_seconds"].samples if "le" in sample.labels
    ]
    assert counts == sorted(counts) and counts[-1] == 1


def test_sigterm_lets_requests_end_and_takes_no_new_ones() -> None:
    """A stream of half a second is in flight: it ends whole, a request meanwhile gets 503, then all ends."""
    said: list[str] = []

    async def run() -> None:
        async with engines(["mixed"]) as backends:
            router = LiveRouter(backends, fleet_of(("mixed", "mixed", 1)), RouterSettings())
            sockets = bind_sockets("127.0.0.1", 0, has_keys=False)
            url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
            serving = asyncio.ensure_future(
                serve_until_drained(router, sockets, "1 worker", drain_s=20.0, say=said.append)
            )
            await until(lambda: bool(said))  # It listens.
            stream = asyncio.ensure_future(post(url, a_body(outputs=200, stream=True)))
            await until(lambda: router.in_flight == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: router.is_draining)
            status, _, headers = await post(url, a_body())
            assert status == 503 and "Retry-After" in headers
            status, text, _ = await stream
            assert status == 200 and text.endswith("data: [DONE]\n\n") and text.count("data: {") == 200
            await asyncio.wait_for(serving, PATIENCE_S)

    asyncio.run(run())
    assert "1 requests in flight have 20 s to end" in said[1] and len(said) == 2


def test_address_and_keys_are_checked_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fleet.yaml").write_text(to_yaml(fleet_document(fleet_of(("w", "mixed", 1)))))
    Path("empty.txt").write_text("\n")
    Path("odd.txt").write_text("good\nn\xf6t good\n")
    Path("short.txt").write_text("a-key-that-nobody-guesses\nx\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, expected in (
            (["--port", port], "cannot be listened on"),
            (["--host", "no.such.host.invalid", "--api-keys", "empty.txt"], "empty.txt: holds no key"),
            (["--api-keys", "odd.txt"], "odd.txt: key 2 holds a space"),
            (["--api-keys", "short.txt"], "short.txt: key 2 has 1 characters, expected at least 16"),
            (["--host", "0.0.0.0"], "API keys are needed"),
        ):
            result = CliRunner().invoke(app, ["serve", "fleet.yaml", "--engine", "rehearsal", *options])
            assert isinstance(result.exception, InputError) and expected in str(result.exception)
    assert not Path("engines").exists()


def test_a_log_is_not_flooded() -> None:
    """Five lines a second: of a thousand at once five are kept, and the next one says how many were not."""
    spared = LineLimit(5)
    records = [logging.makeLogRecord({"msg": "x", "created": 10.0}) for _ in range(1000)]
    assert sum(spared.filter(record) for record in records) == 5
    after = logging.makeLogRecord({"msg": "y", "created": 11.0})
    assert spared.filter(after) and after.getMessage() == "y (995 lines left out before)"
