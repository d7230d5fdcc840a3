"""The use of NVIDIA GPUs now, as NVML reports it; no GPU memory is taken."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class GpuUse:
    """The recent use of one GPU.

    Attributes:
        index: in the order of the PCI bus, whatever CUDA's number is.
        name: its model.
        busy_percent: share of the last second or less in which any kernel ran, or None if unknown.
        memory_used, memory_total: in bytes, or None if unknown.
        pids: processes that compute on it. Inside a container these numbers may name nothing.
    """

    index: int
    name: str
    busy_percent: int | None
    memory_used: int | None
    memory_total: int | None
    pids: tuple[int, ...]


def gpu_use(module: Any = None) -> list[GpuUse]:
    nvml: Any = module or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [_use(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _use(nvml: Any, index: int) -> GpuUse:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: str) -> Any:
        try:
            return getattr(nvml, question)(handle)
        except nvml.NVMLError:
            return None

    busy, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
    computing = ask("nvmlDeviceGetComputeRunningProcesses") or []
    return GpuUse(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        busy_percent=None if busy is None else busy.gpu,
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        pids=tuple(sorted(process.pid for process in computing)),
    )


class GpuMeter:
    """One NVIDIA GPU that is read repeatedly; each read takes some ten microseconds.

    Args:
        uuid: from CUDA or NVML, such as "GPU-5f3c...".
    """

    def __init__(self, uuid: str, module: Any = None) -> None:
        self._nvml: Any = module or import_module("pynvml")
        self._handle: Any = None
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def read(self) -> tuple[float | None, int | None]:
        """Return the share of the last second or less in which a kernel ran, and the used bytes.

        The share is from 0 to 1. Both are None if the driver does not report them.
        """
        busy: float | None = None
        used: int | None = None
        if self._handle is not None:
            with suppress(self._nvml.NVMLError):
                busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
            with suppress(self._nvml.NVMLError):
                used = self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used
        return busy, used
