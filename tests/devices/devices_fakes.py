"""A module that answers like pynvml, from data: GPUs cannot be had where these tests run."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml

GIB = 2**30


@dataclass
class FakeGpu:
    name: str = "NVIDIA L4"
    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    total: int = 24 * GIB
    used: int = 11 * GIB
    capability: tuple[int, int] = (8, 9)
    cores: int = 7424
    clock: int = 2040
    computing: dict[int, int | None] = field(default_factory=dict)
    drawing: dict[int, int | None] = field(default_factory=dict)


class FakeNvml:
    """pynvml, with its own errors and constants, on GPUs that are data."""

    def __init__(self, *gpus, driver="580.65.06", cuda=13000, refuses=()):
        self.gpus, self.driver, self.cuda, self.refuses = gpus, driver, cuda, refuses
        self.open = 0

    def __getattr__(self, name):
        return getattr(pynvml, name)

    def __getattribute__(self, name):
        if name in object.__getattribute__(self, "__dict__").get("refuses", ()):
            return self._refuse
        return object.__getattribute__(self, name)

    def _refuse(self, *details):
        raise pynvml.NVMLError_NotSupported

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda

    def nvmlDeviceGetUUID(self, gpu):
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu):
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return list(gpu.capability)

    def nvmlDeviceGetNumGpuCores(self, gpu):
        return gpu.cores

    def nvmlDeviceGetMaxClockInfo(self, gpu, kind):
        assert kind == pynvml.NVML_CLOCK_SM
        return gpu.clock

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in gpu.computing.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in gpu.drawing.items()]
