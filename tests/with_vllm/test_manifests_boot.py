"""What the manifests say to vLLM, said to a real vLLM on the CPU: its parser takes every word, and it starts.

A command line is read out of the rendered manifest and started as it is, but for what this machine forces:

* the LLM's folder: examples/tiny-llm with dummy weights and no tokenizer, for the LLM's name (which stays the
  served name);
* --tensor-parallel-size and --pipeline-parallel-size are 1: there is one CPU;
* --block-size is 32: vLLM's attention on CPUs takes multiples of 32 only;
* --kv-transfer-config gets "kv_buffer_device": "cpu", where there is one;
* --port is a free one, --host the loopback;
* added: --enforce-eager, --load-format dummy, --skip-tokenizer-init, and 1 GiB of KV cache by environment.

Workers with `kv_offload` are not started: on CPUs vLLM 0.32 ends with "CPU Offloading is currently only
supported on CUDA-alike and XPU GPUs". Its parser takes the flags; test_scheduler_vllm.py asks its scheduler.

Everything else, lengths, batch sizes, prefix caching, KV type and memory share, is the manifest's.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile_names import NAMES, named
from manifest_commands import EXAMPLES, Command, commands, drafting, quantised, serving, spanning
from plans import mixed, pairs

from planner import manifests
from planner.files.checked_files import write_files
from planner.models.kv_offload import KvOffload
from planner.models.lora import Lora
from profiling.vllm_install import is_installed, mend_cpu_wheel

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny-llm"
FORCED = ["--host", "127.0.0.1", "--enforce-eager", "--load-format", "dummy", "--skip-tokenizer-init"]
REPLACED = ["--tensor-parallel-size", "1", "--pipeline-parallel-size", "1", "--block-size", "32"]
START_S = 300
FLEETS = {
    **EXAMPLES,
    "one capped": pairs(),
    "rocm": mixed("mi300x-192g", 2, 5),
    "spanning": spanning(),
    "16-bit kv": quantised(2.0),
    "drafting": drafting(),
    "adapters": serving(Lora(4, 16, ("sales", "legal"), 6, ("qkv_proj", "o_proj"))),
    "offloading": replace(
        mixed(),
        policies=replace(mixed().policies, prefix_cache=True, kv_offload=KvOffload(64 * 2.0**30, 50e9)),
    ),
}


@pytest.fixture(scope="module")
def parser() -> Any:
    """vLLM's own, of `vllm serve`."""
    mend_cpu_wheel()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


@pytest.mark.parametrize("name", FLEETS)
def test_vllms_parser_takes_every_command(parser: Any, name: str) -> None:
    """And reads the plan's numbers out of it."""
    fleet = FLEETS[name]
    for target, found in commands(manifests.render(fleet, 5000).files).items():
        for command in found:
            told = parser.parse_args(list(command.args))
            assert told.model_tag == fleet.llm.name and told.served_model_name == [fleet.llm.name], target
            engine = (told.tensor_parallel_size, told.pipeline_parallel_size, told.max_num_batched_tokens)
            pool = next(
                pool
                for pool in fleet.pools
                if engine == (pool.type.tp, pool.type.pp, pool.type.max_num_batched_tokens)
                and (told.speculative_config or {}).get("method")
                == (pool.type.speculation and pool.type.speculation.method)
            )
            assert told.max_num_seqs == pool.type.max_num_seqs
            assert bool(told.enable_lora) is (pool.type.lora is not None)
            if pool.type.lora is not None:
                lora = pool.type.lora.lora
                slots = (told.max_loras, told.max_lora_rank, told.max_cpu_loras)
                assert slots == (lora.max_loras, lora.max_rank, lora.max_cpu_loras)
                assert told.lora_target_modules == list(lora.targets or ())
                assert tuple(each.name for each in told.lora_modules) == lora.adapters
            assert (told.max_model_len, told.block_size) == (5120, 16)
            assert told.gpu_memory_utilization == 0.9 and told.enable_prefix_caching is True
            offload = fleet.policies.kv_offload
            assert told.kv_offloading_size == (offload and 64 * pool.type.tp)
            if pool.role == "mixed":
                assert told.kv_transfer_config is None
            else:
                assert told.kv_transfer_config.kv_connector == "NixlConnector"
                assert told.kv_transfer_config.is_kv_producer == (pool.role == "prefill")
                assert told.kv_transfer_config.is_kv_consumer == (pool.role == "decode")


def test_vllms_parser_reads_hostile_names_to_the_letter(parser: Any) -> None:
    for name in NAMES:
        for found in commands(manifests.render(named(mixed(), name), 5000).files).values():
            for command in found:
                told = parser.parse_args(list(command.args))
                assert told.model_tag == name and told.served_model_name == [name]


def test_the_committed_list_of_flags_is_vllms(parser: Any) -> None:
    listed = yaml.safe_load((ROOT / "tests/data/vllm_flags.yaml").read_text())
    if not importlib.metadata.version("vllm").startswith(listed["version"]):
        pytest.skip(f"the list is of vLLM {listed['version']}")
    for flag, about in listed["flags"].items():
        action = parser._option_string_actions[flag]
        values = 0 if action.nargs == 0 else "+" if action.nargs == "+" else 1
        assert values == about["values"], flag
        assert set(about.get("choices", [])) <= set(action.choices or about.get("choices", [])), flag


def adapted(command: Command, port: int) -> list[str]:
    """The words after `vllm serve`, with what the machine forces in the place of what the manifest says."""
    words = [str(TINY), *command.args[1:]]
    replaced = [*REPLACED, "--port", str(port)]
    for flag, value in zip(replaced[::2], replaced[1::2], strict=True):
        words[words.index(flag) + 1] = value
    if "--kv-transfer-config" in words:
        at = words.index("--kv-transfer-config") + 1
        words[at] = json.dumps(json.loads(words[at]) | {"kv_buffer_device": "cpu"})
    return words + FORCED


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(argv: list[str], port: int, folder: Path) -> Iterator[None]:
    """A server of its own session, awaited until /health answers and ended with all its children."""
    program = folder / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m planner.runtime.launch "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "log"
    with log.open("w") as said:
        server = subprocess.Popen(argv, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert server.poll() is None, log.read_text()[-8000:]
            assert time.monotonic() < deadline, log.read_text()[-8000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def check_serves(port: int, llm: str) -> None:
    """One completion under the plan's name of the LLM; length, blocks and prefix cache as they were told."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
        (served,) = json.load(answer)["data"]
    assert (served["id"], served["max_model_len"]) == (llm, 5120)
    body = {
        "model": llm,
        "prompt": list(range(3, 103)),
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
    }
    answer = post(port, "/v1/completions", body)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (100, 8)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as metrics:
        info = next(
            line for line in metrics.read().decode().split("\n") if line.startswith("vllm:cache_config_info")
        )
    assert 'block_size="32"' in info and 'enable_prefix_caching="True"' in info


@pytest.mark.parametrize(
    ("target", "plan"),
    [
        pytest.param("kubernetes", "two gpu types", marks=pytest.mark.slow),
        pytest.param("compose", "mixed", marks=pytest.mark.slow),
        ("disaggregatedset", "pairs of two gpus"),
    ],
)
def test_the_manifests_own_command_line_boots(tmp_path: Path, target: str, plan: str) -> None:
    """The last pool's; of the pairs that is a decode worker, which prefills what comes without a partner."""
    if target == "disaggregatedset" and find_spec("nixl") is None:
        pytest.skip("nixl is not installed: no KV connector to boot a pair's worker with")
    fleet, port = EXAMPLES[plan], free_port()
    command = commands(manifests.render(fleet, 5000, target).files)[target][-1]
    with started(["vllm", "serve", *adapted(command, port)], port, tmp_path):
        check_serves(port, fleet.llm.name)


def test_the_script_itself_boots(tmp_path: Path) -> None:
    """`bash mixed.sh 0`, with the forced flags behind: vLLM takes the last of a flag given twice."""
    write_files(tmp_path, manifests.render(EXAMPLES["mixed"], 5000, "vllm").files)
    config, port = tmp_path / "vllm/mixed.config.yaml", free_port()
    config.write_text(config.read_text().replace("model: meta-llama/Llama-3.1-70B\n", f"model: {TINY}\n", 1))
    forced = [*REPLACED, "--port", str(port), *FORCED]
    with started(["bash", str(tmp_path / "vllm/mixed.sh"), "0", *forced], port, tmp_path):
        check_serves(port, EXAMPLES["mixed"].llm.name)


@pytest.mark.slow
def test_drafts_that_are_looked_up_boot(tmp_path: Path) -> None:
    """The manifest's command of a pool that drafts by n-grams; a prompt that repeats itself finds some."""
    fleet, port = drafting(), free_port()
    command = next(
        each
        for each in commands(manifests.render(fleet, 5000, "kubernetes").files)["kubernetes"]
        if '"ngram"' in each.value("--speculative-config")
    )
    with started(["vllm", "serve", *adapted(command, port)], port, tmp_path):
        check_serves(port, fleet.llm.name)
        body = {"model": fleet.llm.name, "prompt": [5, 6, 7, 8, 9, 10] * 20, "max_tokens": 60}
        post(port, "/v1/completions", body | {"ignore_eos": True, "temperature": 0})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as metrics:
            said = metrics.read().decode()
    drafted, drafts = (
        float(re.findall(rf"^vllm:spec_decode_num_{what}_total\S* (\S+)", said, re.M)[0])
        for what in ("draft_tokens", "drafts")
    )
    assert 0 < drafts and drafts < drafted <= 2 * drafts
