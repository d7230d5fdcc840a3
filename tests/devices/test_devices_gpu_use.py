import pynvml
from devices_fakes import GIB, FakeGpu, FakeNvml

from flatout.devices.gpu_use import GpuMeter, gpu_use


class Busy(FakeNvml):
    def nvmlDeviceGetUtilizationRates(self, handle):
        return type("Rates", (), {"gpu": 87, "memory": 12})


def test_a_gpu_tells_how_busy_it_is_and_for_whom() -> None:
    nvml = Busy(FakeGpu(computing={4242: 10 * GIB}, used=11 * GIB))
    (gpu,) = gpu_use(nvml)
    assert (gpu.index, gpu.name, gpu.busy_percent) == (0, "NVIDIA L4", 87)
    assert (gpu.memory_used, gpu.memory_total) == (11 * GIB, 24 * GIB)
    assert gpu.pids == (4242,)
    assert nvml.open == 0


def test_what_a_gpu_does_not_tell_is_none() -> None:
    class Old(Busy):
        def nvmlDeviceGetUtilizationRates(self, handle):
            raise pynvml.NVMLError_NotSupported

    (gpu,) = gpu_use(Old(FakeGpu(), refuses=["nvmlDeviceGetMemoryInfo"]))
    assert gpu.busy_percent is None
    assert gpu.memory_used is None


def test_without_a_driver_there_are_no_gpus() -> None:
    class Absent(FakeNvml):
        def nvmlInit(self):
            raise pynvml.NVMLError_LibraryNotFound

    assert gpu_use(Absent()) == []


def test_a_meter_reads_one_gpu_again_and_again() -> None:
    class ByName(Busy):
        def nvmlDeviceGetHandleByUUID(self, uuid):
            if uuid != "GPU-1":
                raise pynvml.NVMLError_NotFound
            return self.nvmlDeviceGetHandleByIndex(0)

    nvml = ByName(FakeGpu(used=11 * GIB))
    meter = GpuMeter("GPU-1", nvml)
    assert meter.read() == meter.read() == (0.87, 11 * GIB)
    assert GpuMeter("GPU-2", nvml).read() == (None, None)
