import dataclasses
import json
import subprocess
import sys
import tomllib

import psutil
import pytest
import tomli_w
import torch

from flatout.measure import Fingerprint, fingerprint

SERVER = Fingerprint(
    os="Linux x86_64",
    cpu="Intel(R) Xeon(R)",
    cpus=2,
    cpus_total=64,
    instructions=("amx_bf16", "avx512f", "avx2"),
    memory_gib=23,
    gpus=(),
    torch="2.13.0+cpu",
    python="3.11",
    libc="glibc 2.36",
)

X86 = """processor\t: 0
model name\t: AMD EPYC 9654
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 fma

processor\t: 1
model name\t: another
flags\t\t: amx_bf16
"""
ARM = """processor\t: 0
Features\t: fp asimd sve bf16 i8mm
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def test_this_machine():
    found = fingerprint()
    assert found is fingerprint()
    assert found.torch.partition("+")[0] == torch.__version__.partition("+")[0]
    assert 1 <= found.cpus <= found.cpus_total
    assert found.cpu
    assert 1 <= found.memory_gib <= psutil.virtual_memory().total / 2**30 + 1
    assert found.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found.words.startswith(f"torch {found.torch.split('.')[0]}.")
    assert found.differences(found.as_dict()) == []


def test_torch_is_not_imported_and_no_driver_is_needed():
    script = (
        "import sys\n"
        "from flatout.measure import fingerprint\n"
        "assert 'numpy' not in sys.modules\n"
        "assert fingerprint().torch\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("cpuinfo", "cpu", "instructions"),
    [
        (X86, "AMD EPYC 9654", ("avx512_bf16", "avx512f", "avx2")),
        (ARM, "Arm implementer 0x41 part 0xd40", ("bf16", "i8mm", "sve", "asimd")),
    ],
)
def test_the_processor_is_read_on_x86_and_arm(tmp_path, cpuinfo, cpu, instructions):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    found = fingerprint(tmp_path)
    assert (found.cpu, found.instructions) == (cpu, instructions)


def test_a_machine_without_proc_still_has_a_fingerprint(tmp_path):
    assert fingerprint(tmp_path).instructions == ()
    assert fingerprint(tmp_path).words


def test_words():
    assert SERVER.words == "torch 2.13 · 2 of 64 CPUs · AMX-bf16 · 23 GiB"
    box = dataclasses.replace(
        SERVER, cpus=16, cpus_total=16, gpus=("NVIDIA L4", "NVIDIA L4", "NVIDIA T4"), torch=""
    )
    assert box.words == "no torch · 2x NVIDIA L4 · NVIDIA T4 · 16 CPUs · AMX-bf16 · 23 GiB"
    tiny = dataclasses.replace(SERVER, cpus=1, cpus_total=1, instructions=(), memory_gib=1)
    assert tiny.words == "torch 2.13 · 1 CPU · 1 GiB"


def test_the_digest_changes_with_every_field():
    other = {
        "os": "Darwin arm64",
        "cpu": "M4",
        "cpus": 3,
        "cpus_total": 65,
        "instructions": (),
        "memory_gib": 24,
        "gpus": ("NVIDIA L4",),
        "torch": "2.14.0",
        "python": "3.12",
        "libc": "glibc 2.39",
    }
    assert set(other) == {field.name for field in dataclasses.fields(Fingerprint)}
    digests = {dataclasses.replace(SERVER, **{name: value}).digest for name, value in other.items()}
    assert len(digests | {SERVER.digest}) == len(other) + 1
    assert dataclasses.replace(SERVER).digest == SERVER.digest
    assert len(SERVER.digest) == 12
    int(SERVER.digest, 16)


def test_plain_data_survives_json_and_toml():
    plain = SERVER.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert tomllib.loads(tomli_w.dumps(plain)) == plain
    assert SERVER.differences(tomllib.loads(tomli_w.dumps(plain))) == []


def test_differences_name_the_facts():
    other = dataclasses.replace(SERVER, cpus=8, gpus=("NVIDIA L4",)).as_dict()
    assert SERVER.differences(other) == [
        "cpus: 2 here, 8 there",
        "gpus: none here, NVIDIA L4 there",
    ]
    del other["libc"]
    other["numa_nodes"] = 2
    assert SERVER.differences(other)[2:] == [
        "libc: glibc 2.36 here, unknown there",
        "numa_nodes: unknown here, 2 there",
    ]
    assert SERVER.differences(dataclasses.asdict(SERVER)) == []


@pytest.mark.gpu
def test_gpus_are_named_as_torch_names_them():
    named = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    assert set(named) <= set(fingerprint().gpus)


@pytest.mark.gpu
def test_naming_gpus_creates_no_context():
    script = (
        "import os, pynvml\n"
        "from flatout.measure import fingerprint\n"
        "assert fingerprint().gpus\n"
        "pynvml.nvmlInit()\n"
        "handle = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "holders = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)\n"
        "assert os.getpid() not in [holder.pid for holder in holders]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
