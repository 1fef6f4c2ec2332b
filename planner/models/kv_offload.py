"""CPU memory that extends the KV cache of an engine: how many KV tokens it holds, and how fast they return to
GPUs.

vLLM (0.32, OffloadingConnector) keeps the KV blocks of every rank of a worker in CPU memory, and copies them
over the rank's own link:

    tokens of a worker = bytes of CPU memory for each GPU / bytes of a KV token on one GPU
    seconds per token  = bytes of a KV token on one GPU / bandwidth of a GPU's link

With latent attention all GPUs of a TP group have the same keys and values. One copy of them is kept, but
every GPU still loads all of it.

A disk of the same node may be behind the CPU memory: KV blocks go there when they leave CPU memory, and come
back over the disk's link and then the GPU's, at the rate of the slower link.

A shared store (Mooncake's, on machines of its own) serves all workers. Its tokens are its bytes divided by
the bytes of a KV token on all GPUs of a worker. One link carries the loads of all workers one after the
other; a load has the bytes that one GPU needs, times the TP degree. `is_common` says whether workers of
different TP degrees share blocks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.models.kv_layout import kv_layout
from planner.models.llm import LatentAttention, Llm


@dataclass(frozen=True, slots=True)
class KvOffload:
    """A GPU's share of the host's memory for KV blocks, and the bandwidth of its link to that memory.

    With `is_shared` these are the figures of the one store that all workers share. `disk_bytes` and the
    disk's bandwidth are a GPU's share of a disk behind the memory; the size is 0 without one.
    """

    size_bytes: float
    bandwidth_bytes_per_s: float
    is_shared: bool = False
    disk_bytes: float = 0.0
    disk_bandwidth_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise InputError(f"kv_offload: size is {self.size_bytes:g} bytes, must be at least 0")
        if not self.bandwidth_bytes_per_s > 0:
            raise InputError(f"kv_offload: bandwidth is {self.bandwidth_bytes_per_s:g} B/s, must be > 0")
        if self.disk_bytes < 0 or not self.disk_bandwidth_bytes_per_s > 0:
            raise InputError(
                f"kv_offload: disk: size is {self.disk_bytes:g} bytes, bandwidth "
                f"{self.disk_bandwidth_bytes_per_s:g} B/s; must be at least 0 and > 0"
            )
        if self.is_shared and self.disk_bytes:
            raise InputError("kv_offload: disk: is a worker's own, and goes not with shared: true; drop one")

    def kv_tokens(self, llm: Llm, tp: int) -> int:
        """KV tokens beside those on GPUs: in the memory and disk of one worker, or in the shared store."""
        return self._tokens(llm, tp, self.size_bytes + self.disk_bytes)

    def memory_tokens(self, llm: Llm, tp: int) -> int:
        """KV tokens that fit into CPU memory, which has those used last; a disk has the others."""
        return self._tokens(llm, tp, self.size_bytes)

    def _tokens(self, llm: Llm, tp: int, size_bytes: float) -> int:
        """KV tokens of this LLM on workers of this TP that fit into `size_bytes`."""
        # A token takes `token_parts` times the bytes that it has on one GPU: with latent attention in all
        # layers one copy serves all GPUs of a worker, else each GPU has a part of its own.
        is_latent = all(isinstance(group.attention, LatentAttention) for group in llm.layer_groups)
        token_parts = 1 if is_latent else tp
        # `size_bytes` is all of a shared store, or what each of a worker's GPUs has.
        shares = 1 if self.is_shared else tp
        return int(shares / token_parts * size_bytes / _token_bytes(llm, tp))

    def token_s(self, llm: Llm, tp: int) -> float:
        """Seconds in which one KV token comes back to all GPUs of a worker.

        The GPUs load at the same time over their own links, or one after the other from a shared store.
        """
        gpus = tp if self.is_shared else 1
        return gpus * _token_bytes(llm, tp) / self.bandwidth_bytes_per_s

    def disk_token_s(self, llm: Llm, tp: int) -> float:
        """Seconds in which one KV token comes from the disks of a worker to its CPU memory."""
        return _token_bytes(llm, tp) / self.disk_bandwidth_bytes_per_s

    def worker_bytes(self, tp: int) -> float:
        """Bytes of the host's memory for all GPUs of a worker; 0 with a shared store."""
        return 0.0 if self.is_shared else tp * self.size_bytes


def is_common(llm: Llm, degrees: Iterable[int]) -> bool:
    """Whether workers of these TP degrees find each other's blocks in a shared store.

    KV heads must split over the least common multiple of the degrees (vLLM's `enable_store_tp_lcm`). Blocks
    of latent keys are never shared across degrees.
    """
    several = set(degrees)
    if len(several) < 2:
        return True
    attention = [group.attention for group in llm.layer_groups]
    is_latent = any(isinstance(each, LatentAttention) for each in attention)
    return not is_latent and llm.kv_heads % math.lcm(*several) == 0


def _token_bytes(llm: Llm, tp: int) -> float:
    return kv_layout(llm, tp).block_bytes / KV_BLOCK_TOKENS
