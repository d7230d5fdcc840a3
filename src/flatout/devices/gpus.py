"""The NVIDIA GPUs as NVML reports them: no CUDA context is created, no GPU memory is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    memory: int | None


@dataclass(frozen=True)
class Gpu:
    nvml_index: int
    uuid: str
    name: str
    memory_total: int | None
    memory_used: int | None
    capability: tuple[int, int] | None
    speed: int
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class Nvml:
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    problem: str | None = None


def read_nvml(module: Any = None) -> Nvml:
    nvml: Any = module or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return Nvml(problem="no NVIDIA driver found")
    except nvml.NVMLError as error:
        return Nvml(problem=f"the NVIDIA driver does not answer: {error}")
    try:
        gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        cuda = _asked(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
        return Nvml(
            gpus=gpus,
            driver=_asked(nvml, nvml.nvmlSystemGetDriverVersion),
            cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        )
    except nvml.NVMLError as error:
        return Nvml(problem=f"the NVIDIA driver stopped answering: {error}")
    finally:
        nvml.nvmlShutdown()


def _asked(nvml: Any, question: Callable[..., Any], *details: Any) -> Any:
    try:
        return question(*details)
    except nvml.NVMLError:
        return None


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    cores = _asked(nvml, nvml.nvmlDeviceGetNumGpuCores, handle)
    clock = _asked(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    capability = _asked(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        nvml_index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_total=None if memory is None else memory.total,
        memory_used=None if memory is None else memory.used,
        capability=None if capability is None else tuple(capability),
        speed=(cores or 0) * (clock or 0),
        processes=_processes(nvml, handle),
    )


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    computing = _asked(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    drawing = _asked(nvml, nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or []
    # A process that does both is listed twice, with the same memory.
    memory = {process.pid: process.usedGpuMemory for process in [*drawing, *computing]}
    return tuple(GpuProcess(pid, memory[pid]) for pid in sorted(memory))
