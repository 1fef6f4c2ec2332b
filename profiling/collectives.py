"""Times all-reduces over the ranks of one machine: NCCL where it has as many GPUs, gloo on a CPU.

    collectives = all_reduces(ranks=2, hidden=4096, dtype="bfloat16", most_tokens=8192)
    collectives.once_s(512)      seconds of one all-reduce of 512 tokens

Every rank is a process of its own (`python -m profiling.collectives`), as in an engine. The activations of N
tokens, N x hidden numbers, are summed over the ranks `REPEATS` times after a warm-up. A repeat ends when the
last rank has the sum, and the median of the repeats counts. `Collectives.to_csv` is Vidur's all_reduce.csv,
which `plan import vidur` reads. torch is imported inside functions: only the ranks and the choice between
NCCL and gloo need it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import InputError
from planner.models.latency import Array

# All-reduces of each size: those of the warm-up open connections, the median of the repeats counts.
WARM_UP, REPEATS = 3, 9
TIMEOUT_S = 300.0  # The limit on all sizes of all ranks together.
LOOK_AGAIN_S = 0.05  # The time between two looks at the ranks, which take seconds to start.
PER_LAYER = 2  # All-reduces of a layer: one after attention and one after the feed-forward block.


@dataclass(frozen=True)
class Collectives:
    """Seconds (n,) of one all-reduce over `ranks` ranks, for each of the increasing sizes `tokens` (n,)."""

    backend: str
    ranks: int
    bytes_per_token: int
    tokens: Array
    seconds: Array

    def once_s(self, tokens: float) -> float:
        """Seconds of one: on straight lines between the timed sizes, in proportion beyond the largest."""
        beyond = max(tokens / float(self.tokens[-1]), 1.0)
        return float(np.interp(tokens, self.tokens, self.seconds)) * beyond

    def step_s(self, layers: int, tokens: float) -> float:
        """Seconds of all all-reduces in a step."""
        return PER_LAYER * layers * self.once_s(tokens)

    def to_csv(self) -> str:
        """The measured all-reduces in the columns of Vidur's tables: bytes and milliseconds."""
        rows = ["size,num_workers,devices_per_node,time_stats.all_reduce.median"]
        for tokens, seconds in zip(self.tokens, self.seconds, strict=True):
            size = int(tokens) * self.bytes_per_token
            rows.append(f"{size},{self.ranks},{self.ranks},{1e3 * seconds:.6g}")
        return "\n".join(rows) + "\n"


def all_reduces(*, ranks: int, hidden: int, dtype: str, most_tokens: int) -> Collectives | None:
    """Time all-reduces of 1, 2, 4 ... `most_tokens` tokens, each of `hidden` numbers of the torch type
    `dtype`. None where there is a GPU but not one for each rank. Raises InputError where a rank fails.
    """
    import torch

    is_cuda = torch.cuda.is_available()
    if is_cuda and torch.cuda.device_count() < ranks:
        return None
    tokens = sorted({2**power for power in range(most_tokens.bit_length())} | {most_tokens})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "profiling.collectives", "--folder", folder, "--ranks", str(ranks)]
        command += ["--hidden", str(hidden), "--dtype", dtype, "--backend", "nccl" if is_cuda else "gloo"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), *map(str, tokens)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        _wait_for_ranks(processes)
        seconds = json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))
    # Fewer tokens never take longer than more. Where they did, the time was disturbed, and the shortest time
    # of more tokens stands for it.
    undisturbed = np.minimum.accumulate(np.array(seconds)[::-1])[::-1]
    item_bytes = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    backend = "nccl" if is_cuda else "gloo"
    return Collectives(backend, ranks, hidden * item_bytes, np.array(tokens, float), undisturbed)


def _wait_for_ranks(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until all ranks have ended, or one has failed, for which the others would wait in vain. Raises
    InputError with a failed rank's last line, or after TIMEOUT_S; no rank is left running.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        # A code is None while a rank runs; every rank is looked at each time.
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > deadline_s:
                raise InputError(f"all-reduces between {len(processes)} ranks took over {TIMEOUT_S:g} s")
            time.sleep(LOOK_AGAIN_S)
        for process in processes:
            if process.returncode:
                _, error_text = process.communicate()
                last_line = (error_text.strip().splitlines() or ["nothing was said"])[-1]
                raise InputError(f"all-reduces between {len(processes)} ranks cannot be timed: {last_line}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stderr is not None:
                process.stderr.close()


def _run_rank(args: argparse.Namespace) -> None:
    """Time all sizes as one rank of several; rank 0 writes the medians into the folder, for the caller."""
    import torch
    import torch.distributed as distributed

    is_cuda = args.backend == "nccl"
    device: Any = torch.device("cuda", args.rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = (Path(args.folder) / "ranks").as_uri()
    distributed.init_process_group(args.backend, init_method=store, rank=args.rank, world_size=args.ranks)
    dtype, medians_s = getattr(torch, args.dtype), []
    for tokens in args.tokens:
        payload = torch.ones(tokens, args.hidden, device=device, dtype=dtype)
        times_s = []
        for repeat in range(WARM_UP + REPEATS):
            distributed.barrier()
            start_s = time.perf_counter()
            distributed.all_reduce(payload)
            if is_cuda:
                torch.cuda.synchronize()
            took_s = torch.tensor([time.perf_counter() - start_s], device=device, dtype=torch.float64)
            distributed.all_reduce(took_s, op=distributed.ReduceOp.MAX)
            if repeat >= WARM_UP:
                times_s.append(float(took_s))
            payload.fill_(1.0)  # The sum has replaced the payload.
        medians_s.append(float(np.median(times_s)))
    if args.rank == 0:
        (Path(args.folder) / "seconds.json").write_text(json.dumps(medians_s), encoding="utf-8")
    distributed.destroy_process_group()


def main() -> None:
    """Read the command line of one rank's process, and run the rank."""
    parser = argparse.ArgumentParser(description="One rank of profiling.collectives.all_reduces.")
    for name, kind in (("folder", str), ("ranks", int), ("rank", int), ("hidden", int), ("dtype", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument("tokens", type=int, nargs="+")
    _run_rank(parser.parse_args())


if __name__ == "__main__":
    main()
