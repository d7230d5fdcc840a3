import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from flatout.devices.memory import read_memory, read_shm

GIB = 2**30


def test_this_machines_memory() -> None:
    found = read_memory()
    assert 0 < found.available <= found.total == psutil.virtual_memory().total


def test_the_cgroups_limit_is_told(tmp_path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cg").mkdir()
    (tmp_path / "cg/memory.max").write_text(f"{GIB // 4}\n")
    (tmp_path / "cg/memory.current").write_text(f"{GIB // 8}\n")
    found = read_memory(tmp_path)
    assert (found.limit, found.available) == (GIB // 4, GIB // 8)


def test_shared_memory_is_measured(tmp_path) -> None:
    real, found = os.statvfs(tmp_path), read_shm(tmp_path)
    assert found.total == real.f_blocks * real.f_frsize
    assert 0 <= found.free <= found.total


@pytest.mark.parametrize(("mib", "small"), [(64, True), (1023, True), (1024, False)])
def test_a_containers_shared_memory_is_too_small_for_workers(monkeypatch, mib, small) -> None:
    blocks = mib * 2**20 // 4096
    answer = SimpleNamespace(f_blocks=blocks, f_bavail=blocks, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: answer)
    assert read_shm().too_small_for_workers is small


def test_there_may_be_no_shared_memory() -> None:
    assert read_shm(Path("/no/such/folder")) is None
