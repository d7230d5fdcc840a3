import mmap
from pathlib import Path

import psutil

from flatout.measure.cgroup import cgroup_memory_limit
from flatout.measure.meters import available_bytes, page_faults, resident_bytes

PAGES = 4096


def fresh_memory():
    memory = mmap.mmap(-1, PAGES * mmap.PAGESIZE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def test_touching_fresh_memory_faults_once_a_page():
    memory = fresh_memory()
    before = page_faults()
    for page in range(PAGES):
        memory[page * mmap.PAGESIZE] = 1
    first = page_faults() - before
    for page in range(PAGES):
        memory[page * mmap.PAGESIZE] = 2
    second = page_faults() - before - first
    memory.close()
    assert first >= PAGES
    assert second < PAGES / 4


def test_touched_memory_is_resident():
    before = resident_bytes()
    memory = fresh_memory()
    memory.write(b"\1" * len(memory))
    held = resident_bytes() - before
    size = len(memory)
    memory.close()
    assert held > 0.9 * size


def test_available_is_within_the_machine_and_its_limits(tmp_path):
    available = available_bytes()
    assert 0 < available < psutil.virtual_memory().total
    limit = cgroup_memory_limit(Path("/"))
    assert limit is None or available <= limit
    without_cgroups = available_bytes(tmp_path)
    assert abs(without_cgroups - psutil.virtual_memory().available) < 1 << 30
