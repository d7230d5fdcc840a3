import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from devices_fakes import GIB, FakeGpu, FakeNvml

from flatout.devices.cpus import Cpus
from flatout.devices.inventory import inventory
from flatout.devices.memory import Memory, Shm
from flatout.devices.torch_build import TorchBuild
from flatout.devices.words import rows
from flatout.measure.fingerprint import fingerprint

LOOK = """
import json, sys
from flatout.devices import inventory
found = inventory().as_dict()
heavy = [name for name in ("torch", "numpy", "pydantic", "rich") if name in sys.modules]
print(json.dumps([found, heavy]))
"""


@pytest.fixture
def gpus(monkeypatch):
    """Puts GPUs in place of this machine's."""
    fingerprint()  # is taken once per process: of the real machine

    def put(*fakes, visible=None, **nvml):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*fakes, **nvml))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return inventory()

    return put


def test_looking_loads_no_torch_and_gives_plain_data() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, check=True)
    found, heavy = json.loads(done.stdout)
    assert heavy == []
    assert set(found) == {
        "cpus",
        "memory",
        "shm",
        "gpus",
        "cuda_order_certain",
        "driver",
        "torch",
    }
    assert 1 <= found["cpus"]["usable"] <= found["cpus"]["present"] == os.cpu_count()


def test_each_gpu_is_told_with_the_number_that_cuda_gives_it(gpus) -> None:
    found = gpus(FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b"), visible="1").as_dict()
    assert [gpu["cuda_index"] for gpu in found["gpus"]] == [None, 0]
    json.dumps(found)


def test_the_rows_of_a_gpu_machine(gpus) -> None:
    found = gpus(
        FakeGpu(uuid="GPU-a", computing={4242: 11 * GIB}),
        FakeGpu(uuid="GPU-b", used=0),
        visible="0",
    )
    words = dict(rows(found))
    assert words["GPU 0"] == "NVIDIA L4, 11.0 of 24.0 GiB used by pid 4242"
    assert words["GPU -"] == "NVIDIA L4, 0.0 of 24.0 GiB used, hidden by CUDA_VISIBLE_DEVICES"


def test_an_order_that_only_cuda_knows_is_said_to_be_uncertain(gpus) -> None:
    words = [text for _, text in rows(gpus(FakeGpu(name="A"), FakeGpu(name="B", uuid="GPU-b")))]
    assert any("CUDA_DEVICE_ORDER=PCI_BUS_ID" in text for text in words)


@pytest.mark.parametrize(("cuda", "fits"), [(13000, "fits"), (12040, "is too old for")])
def test_the_driver_is_held_against_torchs_cuda(gpus, cuda, fits) -> None:
    build = TorchBuild("2.13.0+cu130", "13.0", None)
    found = replace(gpus(FakeGpu(), cuda=cuda), torch=build)
    assert fits in dict(rows(found))["torch"]
    assert found.as_dict()["driver"]["fits_torch"] is (fits == "fits")


def test_rows_of_a_container() -> None:
    found = replace(
        inventory(),
        cpus=Cpus("Xeon", 64, 64, 2.0, 2, 32, ("amx_bf16",)),
        memory=Memory(6 * GIB, 64 * GIB, 8 * GIB),
        shm=Shm(64 * 2**20, 60 * 2**20, True),
    )
    words = dict(rows(found))
    assert words["CPU"] == (
        "2 of 64 usable (cgroup quota 2.0; torch defaults to 32 threads) · AMX-bf16 · Xeon"
    )
    assert words["RAM"] == (
        "6.0 free / 8.0 GiB limit · /dev/shm 64 MiB, 60 MiB free: too small for workers"
    )


@pytest.mark.gpu
def test_looking_makes_no_context() -> None:
    look = """
import os, sys, pynvml
from flatout.devices import inventory
found = inventory()
assert found.nvml.gpus, found.nvml.problem
assert "torch" not in sys.modules
# CUDA keeps this device open; NVML, which may map CUDA's library, closes it again.
for file in os.listdir("/proc/self/fd"):
    path = f"/proc/self/fd/{file}"
    assert "nvidia-uvm" not in (os.readlink(path) if os.path.lexists(path) else "")
pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    users = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert os.getpid() not in [user.pid for user in users]
"""
    subprocess.run([sys.executable, "-c", look], check=True)


@pytest.mark.gpu
def test_cuda_agrees_on_the_numbers() -> None:
    import torch

    found = inventory()
    assert len(found.cuda) == torch.cuda.device_count()
    if found.cuda_order_certain:
        for index, device in enumerate(found.cuda):
            assert torch.cuda.get_device_properties(index).name == device.name
