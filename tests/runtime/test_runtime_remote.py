"""Our router before workers that it did not start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from runtime_fakes import MODEL, engines, fleet_of, until
from typer.testing import CliRunner

from planner.cli import app
from planner.errors import InputError
from planner.fleet import Policies
from planner.runtime.connection_limits import listening
from planner.runtime.remote_workers import make_remote_workers, parse_workers, watch_health
from planner.runtime.router import LiveRouter, RouterSettings


async def completed(url: str, tokens: int = 20) -> tuple[int, str]:
    body = {"model": MODEL, "prompt": list(range(3, 3 + tokens)), "max_tokens": 3}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status, answer.headers.get("X-Fleetplan-Workers", "")


def test_requests_reach_workers_by_their_addresses_and_in_turns() -> None:
    """Round robin over two: four requests, two on each; the names are those of the plan's workers."""

    async def run() -> list[tuple[int, str]]:
        async with engines(["mixed", "mixed"]) as found:
            fleet = fleet_of(("mixed", "mixed", 2), policies=Policies(routing="round-robin"))
            workers = make_remote_workers(fleet, {"mixed": [backend.url for backend in found]})
            async with (
                watch_health(workers, 0.01),
                listening(LiveRouter(workers, fleet, RouterSettings()).app, "127.0.0.1", 0) as url,
            ):
                return [await completed(url) for _ in range(4)]

    answers = asyncio.run(run())
    assert [status for status, _ in answers] == [200] * 4
    assert sorted(name for _, name in answers) == ["mixed-0", "mixed-0", "mixed-1", "mixed-1"]


def test_a_worker_that_is_not_there_gets_nothing() -> None:
    """One of two addresses answers: every request is served there, and the other never counts as up."""

    async def run() -> tuple[list[tuple[int, str]], list[bool]]:
        async with engines(["mixed"]) as found:
            fleet = fleet_of(("mixed", "mixed", 2))
            workers = make_remote_workers(fleet, {"mixed": ["http://127.0.0.1:9", found[0].url]})
            async with (
                watch_health(workers, 0.01),
                listening(LiveRouter(workers, fleet, RouterSettings()).app, "127.0.0.1", 0) as url,
            ):
                answers = [await completed(url) for _ in range(3)]
                return answers, [worker.is_up for worker in workers]

    answers, up = asyncio.run(run())
    assert answers == [(200, "mixed-1")] * 3
    assert up == [False, True]


def test_a_worker_is_down_after_three_silent_questions_and_up_again_after_an_answer() -> None:
    async def run() -> list[bool]:
        seen = []
        async with engines(["mixed"]) as found:
            port = int(found[0].url.rsplit(":", 1)[1])
            (worker,) = make_remote_workers(fleet_of(("mixed", "mixed", 1)), {"mixed": [found[0].url]})
            async with watch_health([worker], 0.01):
                for url, is_up in (
                    (found[0].url, True),
                    ("http://127.0.0.1:9", False),
                    (f"http://127.0.0.1:{port}", True),
                ):
                    worker.url = url
                    await until(lambda is_up=is_up: worker.is_up == is_up)  # type: ignore[misc]
                    seen.append(worker.is_up)
        return seen

    assert asyncio.run(run()) == [True, False, True]


def test_a_pools_name_may_hold_what_addresses_do_not() -> None:
    assert parse_workers(["a=b,c=http://a:1, http://b:1/"]) == {"a=b,c": ["http://a:1", "http://b:1"]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["mixed"], "expected POOL=URL"),
        (["mixed=http://a:1"], "the plan has 2 workers, found 1 addresses"),
        (["other=http://a:1,http://b:1"], "no pool 'other' in the plan; it has mixed"),
        (["mixed=http://a:1", "mixed=http://a:1/"], "http://a:1 is given twice"),
        (["mixed=http://a:1,ftp://b:1"], "such as http://10.0.0.1:8001, found 'ftp://b:1'"),
        (["mixed=http://a:1,http://b:0"], "such as http://10.0.0.1:8001, found 'http://b:0'"),
        (["mixed=http://a:1,http://b:1/v1"], "found 'http://b:1/v1'"),
        (["mixed=http://a:1,http://u:p@b:1"], "found 'http://u:p@b:1'"),
        (["mixed=http://a:1,http://b:99999"], "found 'http://b:99999'"),
        (["mixed=http://a:1,"], "found ''"),
    ],
)
def test_addresses_that_do_not_fit_the_plan_are_refused_in_one_line(given: list[str], expected: str) -> None:
    with pytest.raises(InputError) as refused:
        make_remote_workers(fleet_of(("mixed", "mixed", 2)), parse_workers(given))
    assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_the_command_refuses_addresses_before_it_listens(tmp_path: Path) -> None:
    plan = tmp_path / "fleet.yaml"
    plan.write_text("llm: meta-llama/Llama-3.1-8B\nworkers: [{name: w, gpu: h100-80g, count: 2}]\n")
    result = CliRunner().invoke(app, ["serve", str(plan), "--workers", "w=http://a:1"])
    assert result.exit_code != 0 and "w: the plan has 2 workers, found 1" in str(result.exception)
