"""The command lines of real engines: the manifests' settings, and what this machine adds to them."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import MutableMapping
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from runtime_fakes import fleet_of, worker_type

from planner.errors import InputError
from planner.fleet import Fleet, Pool
from planner.manifests import engine_command
from planner.runtime.launch import IDENTITY, WithIdentity
from planner.runtime.workers import (
    CPU_BLOCK_TOKENS,
    Commands,
    model_folder,
    place_workers,
    visible_gpus,
    vllm_commands,
)


def commands(
    fleet: Fleet, *, is_cpu: bool = False, is_dummy: bool = True, devices: list[str] | None = None
) -> Commands:
    return vllm_commands(
        fleet, 4096, model="/m", is_dummy=is_dummy, is_cpu=is_cpu, devices=devices or ["0", "1", "2", "3"]
    )


def options(argv: list[str]) -> dict[str, str]:
    """--name value pairs; flags without a value are empty."""
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    return {a[2:]: "" if b.startswith("--") else b for a, b in pairs if a.startswith("--")}


def test_every_setting_of_the_manifests_is_on_the_command_line(tmp_path: Path) -> None:
    """And, here: loopback, the port, dummy weights without a tokenizer, our name in answers; nothing else."""
    fleet = fleet_of(("w", "mixed", 1))
    place = place_workers(fleet, tmp_path, 1)[0]
    command = commands(fleet)(place, 8123)
    told = engine_command.engine_flags(fleet.pools[0], fleet, 4096)
    assert list(command.argv)[1:5] == ["-m", "planner.runtime.launch", "serve", "/m"]
    assert list(command.argv)[5 : 5 + len(engine_command.to_args(told))] == engine_command.to_args(told)
    here = options(list(command.argv)[5 + len(engine_command.to_args(told)) :])
    alone = ("disable-uvicorn-access-log", "skip-tokenizer-init")
    given = {
        "host": "127.0.0.1",
        "port": "8123",
        "load-format": "dummy",
        "middleware": "planner.runtime.launch.WithIdentity",
    }
    assert here == given | dict.fromkeys(alone, "")
    assert command.environment["HF_HUB_OFFLINE"] == "1"


def test_every_answer_bears_the_name_of_the_engines_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IDENTITY, "a1b2")
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def receive() -> MutableMapping[str, Any]:
        return {}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(WithIdentity(app)({"type": "http"}, receive, send))
    assert sent[0]["headers"] == [(b"a", b"b"), (b"x-fleetplan-engine", b"a1b2")]
    assert sent[1] == {"type": "http.response.body", "body": b"x"}


def test_real_weights_may_be_downloaded_and_bring_their_tokenizer(tmp_path: Path) -> None:
    fleet = fleet_of(("w", "mixed", 1))
    command = commands(fleet, is_dummy=False)(place_workers(fleet, tmp_path, 1)[0], 1)
    assert not {"load-format", "skip-tokenizer-init"} & set(options(list(command.argv)))
    assert "HF_HUB_OFFLINE" not in command.environment


def test_workers_have_gpus_of_their_own_among_those_we_may_use(tmp_path: Path) -> None:
    """One of TP 2 and two of TP 1 on the GPUs 4, 5, 6 and 7 of a shared machine."""
    kind = worker_type()
    pools = (Pool("wide", "mixed", replace(kind, tp=2), 1), Pool("small", "mixed", kind, 2))
    fleet = replace(fleet_of(("w", "mixed", 1)), pools=pools)
    start = commands(fleet, devices=["4", "5", "6", "7"])
    seen = [
        start(place, 1).environment["CUDA_VISIBLE_DEVICES"] for place in place_workers(fleet, tmp_path, 4)
    ]
    assert seen == ["4,5", "6", "7"]


def test_on_a_cpu_kv_is_what_the_plan_says_and_each_worker_has_its_core(tmp_path: Path) -> None:
    """16000 tokens are 125 blocks of 128, and one more that vLLM keeps; no GPU is named."""
    fleet = fleet_of(("w", "mixed", 3))
    start = commands(fleet, is_cpu=True, devices=["2", "3"])
    made = [start(place, 1) for place in place_workers(fleet, tmp_path, None)]
    assert [one.environment["VLLM_CPU_OMP_THREADS_BIND"] for one in made] == ["2", "3", "2"]
    told = options(list(made[0].argv))
    assert (told["block-size"], told["num-gpu-blocks-override"]) == (str(CPU_BLOCK_TOKENS), "126")
    assert "enforce-eager" in told and "CUDA_VISIBLE_DEVICES" not in made[0].environment


def test_pairs_get_a_connector_and_ports_of_their_own(tmp_path: Path) -> None:
    """NIXL on both sides, through the CPU's memory where there is no GPU."""
    fleet = fleet_of(("p", "prefill", 1), ("d", "decode", 1))
    made = [commands(fleet, is_cpu=True)(place, 1) for place in place_workers(fleet, tmp_path, None)]
    told = [json.loads(options(list(one.argv))["kv-transfer-config"]) for one in made]
    assert [one["kv_role"] for one in told] == ["kv_producer", "kv_consumer"]
    assert {(one["kv_connector"], one["kv_buffer_device"]) for one in told} == {("NixlConnector", "cpu")}
    assert len({one.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for one in made}) == 2


@pytest.mark.parametrize("name", ["../../tmp/x", "a/b", "a\nb", "a,b", "a.0", "*", "$(reboot)", "", "x" * 65])
def test_a_pool_whose_name_is_no_name_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="letters, digits"):
        place_workers(fleet_of((name, "mixed", 1)), tmp_path, None)


def test_dummy_weights_need_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for given in (tmp_path, tmp_path / "config.json"):
        folder = Path(model_folder(given, tmp_path / "out"))
        assert [path.name for path in folder.iterdir()] == ["config.json"]
    with pytest.raises(InputError, match=r"no such file; expected a Hugging Face config.json"):
        model_folder(tmp_path / "nothing", tmp_path / "out")


def test_the_gpus_we_may_use_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_modules_of_the_runtime_import_each_other_one_way() -> None:
    """Imports inside functions count too: an order in which each comes after all that it imports exists."""
    imports: dict[str, set[str]] = {}
    for path in (Path(__file__).parents[2] / "planner" / "runtime").glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        imports[f"planner.runtime.{path.stem}"] = {n for n in names if n.startswith("planner.runtime.")}
    order = list(TopologicalSorter(imports).static_order())
    assert (
        order.index("planner.runtime.analysis")
        < order.index("planner.runtime.validation_files")
        < order.index("planner.runtime.validate")
    )
