import pynvml
import pytest
from devices_fakes import GIB, FakeGpu, FakeNvml

from flatout.devices.gpus import GpuProcess, read_nvml


def test_a_gpu_is_told_with_its_memory_users_and_capability() -> None:
    nvml = FakeNvml(FakeGpu(uuid="GPU-a", computing={4242: 10 * GIB}, drawing={77: GIB}))
    found = read_nvml(nvml)
    (gpu,) = found.gpus
    assert (gpu.nvml_index, gpu.name, gpu.uuid) == (0, "NVIDIA L4", "GPU-a")
    assert (gpu.memory_used, gpu.memory_total) == (11 * GIB, 24 * GIB)
    assert gpu.capability == (8, 9)
    assert gpu.processes == (GpuProcess(77, GIB), GpuProcess(4242, 10 * GIB))
    assert (found.driver, found.cuda, found.problem) == ("580.65.06", (13, 0), None)
    assert nvml.open == 0


def test_a_process_that_computes_and_draws_is_listed_once() -> None:
    nvml = FakeNvml(FakeGpu(computing={5: 100}, drawing={5: 100}))
    assert read_nvml(nvml).gpus[0].processes == (GpuProcess(5, 100),)


@pytest.mark.parametrize(
    ("question", "field", "value"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory_total", None),
        ("nvmlDeviceGetCudaComputeCapability", "capability", None),
        ("nvmlDeviceGetNumGpuCores", "speed", 0),
        ("nvmlDeviceGetComputeRunningProcesses", "processes", ()),
    ],
)
def test_what_a_gpu_does_not_tell_is_left_open(question, field, value) -> None:
    (gpu,) = read_nvml(FakeNvml(FakeGpu(), refuses=[question])).gpus
    assert getattr(gpu, field) == value
    assert gpu.name == "NVIDIA L4"


def test_a_lost_gpu_is_a_problem_in_words_and_nvml_is_closed() -> None:
    class Lost(FakeNvml):
        def nvmlDeviceGetHandleByIndex(self, index):
            raise pynvml.NVMLError_GpuIsLost

    nvml = Lost(FakeGpu())
    found = read_nvml(nvml)
    assert found.gpus == ()
    assert "stopped answering" in found.problem
    assert "lost" in found.problem
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pynvml.NVMLError_LibraryNotFound, "no NVIDIA driver found"),
        (pynvml.NVMLError_LibRmVersionMismatch, "does not answer"),
    ],
)
def test_a_machine_without_a_working_driver_has_no_gpus_and_says_why(error, words) -> None:
    class Absent(FakeNvml):
        def nvmlInit(self):
            raise error

    found = read_nvml(Absent())
    assert found.gpus == ()
    assert words in found.problem
