"""Each check of the machine finds what it looks for, and nothing on a machine without it."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from flatout.devices.gpus import Gpu, GpuProcess, Nvml
from flatout.devices.inventory import inventory
from flatout.devices.memory import Memory, Shm
from flatout.devices.torch_build import TorchBuild
from flatout.doctor.machine import Facts, check_machine

GIB = 2**30


def gpu(**given):
    facts = {
        "nvml_index": 0, "uuid": "GPU-1", "name": "L4", "memory_total": 24 * GIB, "memory_used": 0,
        "capability": (8, 9), "speed": 1, "processes": (),
    }  # fmt: skip
    return Gpu(**(facts | given))


def nvml(*gpus, cuda=(13, 0)):
    return Nvml(gpus=gpus, driver="580.65", cuda=cuda if gpus else None, problem=None)


@pytest.fixture
def clean(tmp_path):
    """A machine of eight CPUs on which nothing is wrong."""
    found = inventory()
    cpus = dataclasses.replace(
        found.cpus, present=8, allowed=8, quota=None, usable=8, torch_threads=8
    )
    machine = dataclasses.replace(
        found,
        cpus=cpus,
        memory=Memory(available=12 * GIB, total=16 * GIB, limit=None),
        shm=Shm(total=8 * GIB, free=8 * GIB, too_small_for_workers=False),
        nvml=nvml(),
        cuda=(),
        torch=TorchBuild("2.13.0+cpu", None, None),
    )
    return Facts(machine, {}, tmp_path, tmp_path)


@pytest.fixture(autouse=True)
def keras_has_a_backend(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")


def names(facts, **machine):
    changed = dataclasses.replace(facts.machine, **machine)
    return [finding.name for finding in check_machine(dataclasses.replace(facts, machine=changed))]


def cpus(facts, **given):
    return dataclasses.replace(facts.machine.cpus, **given)


def test_nothing_is_found_where_nothing_is_wrong(clean):
    assert check_machine(clean) == []


def test_torch(clean):
    assert names(clean, torch=TorchBuild(None, None, None)) == ["torch"]
    assert names(clean, torch=TorchBuild("2.10.1", None, None)) == ["torch"]
    assert names(clean, torch=TorchBuild("3.0.0", None, None)) == []


def test_gpus_that_torch_cannot_use(clean):
    assert names(clean, nvml=nvml(gpu())) == ["gpu unused"]
    cuda = TorchBuild("2.13.0+cu130", "13.0", None)
    shown = (gpu(),)
    assert names(clean, nvml=nvml(gpu()), torch=cuda, cuda=shown) == []
    assert names(clean, nvml=nvml(gpu(), cuda=(12, 4)), torch=cuda, cuda=shown) == ["driver"]
    hidden = dataclasses.replace(clean, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert names(hidden, nvml=nvml(gpu()), torch=cuda) == ["gpu hidden"]
    busy = gpu(processes=(GpuProcess(4242, GIB),), memory_used=11 * GIB)
    assert names(clean, nvml=nvml(busy), torch=cuda, cuda=shown) == ["gpu busy"]


def test_threads(clean):
    two = cpus(clean, usable=2, quota=2.0)
    assert names(clean, cpus=two) == ["threads"]
    asked = dataclasses.replace(clean, environ={"OMP_NUM_THREADS": "1"})
    assert names(asked, cpus=cpus(clean, torch_threads=1)) == ["threads"]
    # Two logical CPUs of a core are one thread's: no one has asked for fewer.
    assert names(clean, cpus=cpus(clean, torch_threads=4)) == []
    words = check_machine(
        dataclasses.replace(clean, machine=dataclasses.replace(clean.machine, cpus=two))
    )
    assert "8 threads" in words[0].what
    assert "quota is 2 CPUs" in words[0].what


def test_variables_that_do_nothing(clean):
    kmp = dataclasses.replace(clean, environ={"KMP_BLOCKTIME": "0", "KMP_AFFINITY": "compact"})
    assert names(kmp) == ["KMP"]
    loaded = {"KMP_BLOCKTIME": "0", "LD_PRELOAD": "/usr/lib/libiomp5.so"}
    assert names(dataclasses.replace(clean, environ=loaded)) == []


def test_memory(clean):
    assert names(clean, memory=Memory(GIB, 16 * GIB, None)) == ["memory"]
    assert names(clean, memory=Memory(GIB, 64 * GIB, 4 * GIB)) == []  # a quarter of the limit
    assert names(clean, shm=Shm(64 * 2**20, 64 * 2**20, True)) == ["shm"]


def test_clock_and_load(clean, tmp_path):
    folder = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    folder.mkdir(parents=True)
    (folder / "scaling_governor").write_text("powersave\n")
    (folder / "scaling_driver").write_text("acpi-cpufreq\n")
    assert names(clean) == ["clock"]
    (folder / "scaling_driver").write_text("intel_pstate\n")
    assert names(clean) == []
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("5.50 2.00 1.00 3/200 4711\n")
    assert names(clean) == ["busy"]
    (tmp_path / "proc/loadavg").write_text("0.50 2.00 1.00 3/200 4711\n")
    assert names(clean) == []


def test_a_cache_that_cannot_be_written(clean, tmp_path):
    if os.geteuid() == 0:
        cache = "/proc/flatout"  # root may write anywhere else
        found = check_machine(dataclasses.replace(clean, cache=type(tmp_path)(cache)))
        assert [finding.name for finding in found] in (["disk"], ["cache"])
        return
    tmp_path.chmod(0o500)
    assert names(clean) == ["cache"]


def test_keras_without_its_backend(clean, monkeypatch):
    pytest.importorskip("keras")
    monkeypatch.setenv("KERAS_BACKEND", "openvino")
    assert names(clean) == ["keras"]


def test_missing_extensions(clean, monkeypatch):
    monkeypatch.setattr("flatout.doctor.machine.available", lambda: False)
    assert names(clean) == ["kernels"]


def test_dangers_come_first(clean, monkeypatch):
    monkeypatch.setattr("flatout.doctor.machine.available", lambda: False)
    asked = dataclasses.replace(clean, environ={"KMP_BLOCKTIME": "0"})
    assert names(asked, memory=Memory(GIB, 16 * GIB, None)) == ["memory", "kernels", "KMP"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_command(options):
    call = "from flatout.cli.main import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", call, "doctor", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    if options:
        findings = json.loads(found.stdout)["findings"]
        assert "KMP" in [finding["name"] for finding in findings]
        assert all(finding["do"] for finding in findings)
    else:
        assert "KMP_BLOCKTIME is read by Intel's OpenMP alone" in " ".join(found.stdout.split())
        assert "checks found nothing" in found.stdout
