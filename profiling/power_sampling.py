"""Watts of a GPU through NVML, where a driver and `pip install nvidia-ml-py` are. It reads and never sets.

PyNVML is optional, so it is imported on use.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

SAMPLE_S = 0.02  # The time between two samples, the shortest in which drivers renew their counters.
LEAST_WINDOW_S = 0.2  # The driver renews its counters every 20 to 100 ms, so a shorter mean says little.


@dataclass(frozen=True, slots=True)
class GpuPower:
    """One GPU's counters. `nvml` is the module pynvml, `handle` its reference to this GPU."""

    nvml: Any
    handle: Any

    @property
    def name(self) -> str:
        """The GPU's name, as its driver gives it."""
        return _text(self.nvml.nvmlDeviceGetName(self.handle))

    @property
    def driver(self) -> str:
        """The version of NVIDIA's driver."""
        return _text(self.nvml.nvmlSystemGetDriverVersion())

    @property
    def limit_w(self) -> float:
        """The power limit that is enforced now [W]."""
        return float(self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.handle)) / 1e3

    def clocks(self) -> str:
        """The clocks at this moment, against their maxima: "SM 1755 of 1980 MHz, memory 3201 of 3201 MHz"."""
        kinds = {"SM": self.nvml.NVML_CLOCK_SM, "memory": self.nvml.NVML_CLOCK_MEM}
        try:
            return ", ".join(
                f"{name} {self.nvml.nvmlDeviceGetClockInfo(self.handle, kind)} of "
                f"{self.nvml.nvmlDeviceGetMaxClockInfo(self.handle, kind)} MHz"
                for name, kind in kinds.items()
            )
        except self.nvml.NVMLError:  # Virtual GPUs do not tell their clocks.
            return "unknown"

    def power_w(self) -> float:
        """The power that the GPU draws now [W]."""
        return float(self.nvml.nvmlDeviceGetPowerUsage(self.handle)) / 1e3

    def energy_j(self) -> float | None:
        """Energy since the driver was loaded; None on GPUs older than Volta."""
        try:
            return float(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)) / 1e3
        except self.nvml.NVMLError:
            return None

    def idle_w(self, seconds: float = 1.0) -> float:
        """The lowest sample of power within `seconds`; call it before an engine holds the GPU."""
        with PowerSampler(self) as power:
            time.sleep(seconds)
        return min(power.samples_w) if power.samples_w else self.power_w()


def open_gpu() -> GpuPower | None:
    """The first visible GPU, or None where there is no NVML, no driver or no GPU, or where CUDA's order of
    several GPUs was chosen to be another than NVML's. Call it before CUDA begins, whose order it sets.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # An older pynvml package warns that it is deprecated.
            import pynvml
    except ImportError:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    # NVML numbers GPUs by their place on the PCI bus, and CUDA the fastest first where it is not told.
    order = os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    try:
        pynvml.nvmlInit()
        if visible.isdigit():
            if order != "PCI_BUS_ID" and pynvml.nvmlDeviceGetCount() > 1:
                return None
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(visible)
        gpu = GpuPower(pynvml, handle)
        gpu.power_w()  # Raises where the power of this GPU cannot be read.
    except pynvml.NVMLError:
        return None
    return gpu


@dataclass
class PowerSampler:
    """Samples a GPU's power while the `with` block runs.

    `mean_w` comes from the energy counter where the GPU has one, else from the samples. `mean_w` and `peak_w`
    stay None without a GPU and for a block shorter than LEAST_WINDOW_S.
    """

    gpu: GpuPower | None
    samples_w: list[float] = field(default_factory=list)
    mean_w: float | None = None
    peak_w: float | None = None

    def __enter__(self) -> Self:
        if self.gpu is not None:
            self._stop = threading.Event()
            self._energy_j, self._start_s = self.gpu.energy_j(), time.monotonic()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.gpu is None:
            return
        self._stop.set()
        self._thread.join()
        seconds = time.monotonic() - self._start_s
        energy_j = self.gpu.energy_j()
        if seconds < LEAST_WINDOW_S:
            return
        if energy_j is not None and self._energy_j is not None:
            self.mean_w = (energy_j - self._energy_j) / seconds
        elif self.samples_w:
            self.mean_w = sum(self.samples_w) / len(self.samples_w)
        self.peak_w = max(self.samples_w, default=None)

    def _sample(self) -> None:
        """Read the power every SAMPLE_S seconds until `_stop` is set."""
        assert self.gpu is not None
        while not self._stop.wait(SAMPLE_S):
            self.samples_w.append(self.gpu.power_w())


def _text(value: Any) -> str:
    """A value of NVML as text: older versions return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
