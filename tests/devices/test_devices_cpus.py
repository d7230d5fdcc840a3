import json
import os
import subprocess
import sys

import pytest

from flatout.devices.cpus import default_torch_threads, read_cpus


def machine(folder, quota="max 100000", cores=None):
    """A `proc` and `sys` of a container on a machine of this size."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text("0::/\n")
    group = folder / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (folder / "proc/self/mountinfo").write_text(
        "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    )
    (group / "cpu.max").write_text(quota)
    (folder / "proc/cpuinfo").write_text("model name\t: Test CPU\nflags\t\t: avx2 amx_bf16\n")
    for cpu, core in (cores or {}).items():
        topology = folder / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{core}\n")
    return folder


@pytest.fixture
def eight_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_the_quota_limits_what_is_usable_but_not_what_torch_starts(tmp_path, eight_cpus) -> None:
    found = read_cpus(machine(tmp_path, "250000 100000"))
    assert (found.usable, found.allowed, found.present) == (2, 8, 64)
    assert found.quota == 2.5
    assert found.torch_threads == 8
    assert found.model == "Test CPU"
    assert found.instructions == ("amx_bf16", "avx2")


def test_without_a_quota_the_affinity_is_usable(tmp_path, eight_cpus) -> None:
    found = read_cpus(machine(tmp_path))
    assert (found.usable, found.quota) == (8, None)


@pytest.mark.parametrize(("processor", "threads"), [("x86_64", 4), ("aarch64", 8)])
def test_two_threads_of_a_core_count_once_for_mkl(
    tmp_path, eight_cpus, monkeypatch, processor, threads
) -> None:
    monkeypatch.setattr("platform.machine", lambda: processor)
    siblings = {cpu: cpu % 4 for cpu in range(8)}
    assert default_torch_threads(machine(tmp_path, cores=siblings)) == threads


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "9"}, 9),
        ({"OMP_NUM_THREADS": "99"}, 64),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"OMP_NUM_THREADS": "2x"}, 8),
        ({"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "3"}, 1),
    ],
)
def test_the_environment_decides_first(
    tmp_path, eight_cpus, monkeypatch, variables, threads
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_torch_threads(tmp_path) == threads


ASK_BOTH = """
import json, os, sys
os.sched_setaffinity(0, json.loads(sys.argv[1]))
from flatout.devices.cpus import default_torch_threads
guessed = default_torch_threads()
assert "torch" not in sys.modules
import torch
print(json.dumps([guessed, torch.get_num_threads()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("one_cpu", [False, True])
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OMP_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "7"},
        {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"},
        {"MKL_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"},
    ],
)
def test_torch_starts_the_threads_that_were_foretold(variables, one_cpu) -> None:
    cpus = sorted(os.sched_getaffinity(0))[: 1 if one_cpu else None]
    clean = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", ASK_BOTH, json.dumps(cpus)],
        env=clean | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    guessed, real = json.loads(done.stdout)
    assert guessed == real
