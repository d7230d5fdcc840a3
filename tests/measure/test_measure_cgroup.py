import os
from pathlib import Path

import pytest

from flatout.measure.cgroup import (
    cgroup_cpu_quota,
    cgroup_memory_available,
    cgroup_memory_limit,
    usable_cpus,
)
from flatout.measure.meters import available_bytes

GIB = 1 << 30
V1_UNLIMITED = "9223372036854771712"


def machine(root, cgroup, mounts, files):
    """Writes a tree as the kernel shows it. mounts: (root, point, type, options)."""
    lines = [
        f"{30 + index} 24 0:{index} {top} {point} rw shared:{index} - {kind} cgroup {options}"
        for index, (top, point, kind, options) in enumerate(mounts)
    ]
    lines.insert(0, "24 1 8:1 / / rw,relatime - ext4 /dev/vda1 rw")
    written = {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": "\n".join(lines) + "\n",
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


V2 = [("/", "/sys/fs/cgroup", "cgroup2", "rw,nsdelegate")]
V1 = [
    ("/", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
    ("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
]


def test_version_2_takes_the_smallest_limit_up_the_hierarchy(tmp_path):
    root = machine(
        tmp_path,
        "0::/kube/pod/box",
        V2,
        {
            "kube/cpu.max": "150000 100000",
            "kube/pod/cpu.max": "max 100000",
            "kube/pod/box/cpu.max": "400000 100000",
            "kube/memory.max": "max",
            "kube/pod/memory.max": str(4 * GIB),
            "kube/pod/box/memory.max": str(8 * GIB),
        },
    )
    assert cgroup_cpu_quota(root) == 1.5
    assert cgroup_memory_limit(root) == 4 * GIB
    assert usable_cpus(root) == 1


def test_version_2_counts_the_throttling_limit(tmp_path):
    files = {"job/memory.max": str(8 * GIB), "job/memory.high": str(6 * GIB)}
    assert cgroup_memory_limit(machine(tmp_path, "0::/job", V2, files)) == 6 * GIB


def test_version_1(tmp_path):
    root = machine(
        tmp_path,
        "5:memory:/slurm/job\n4:cpu,cpuacct:/slurm/job\n1:name=systemd:/",
        V1,
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/slurm/cpu.cfs_quota_us": "250000",
            "cpu,cpuacct/slurm/cpu.cfs_period_us": "50000",
            "cpu,cpuacct/slurm/job/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/slurm/job/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": V1_UNLIMITED,
            "memory/slurm/job/memory.limit_in_bytes": str(3 * GIB),
        },
    )
    assert cgroup_cpu_quota(root) == 5.0
    assert cgroup_memory_limit(root) == 3 * GIB


def test_a_container_sees_its_own_group_at_the_mount(tmp_path):
    """Docker on version 1: the path is the host's, and the mount shows that group as its root."""
    root = machine(
        tmp_path,
        "5:memory:/docker/abc\n0::/system.slice",
        [("/docker/abc", "/sys/fs/cgroup/memory", "cgroup", "rw,memory")],
        {"memory/memory.limit_in_bytes": str(2 * GIB)},
    )
    assert cgroup_memory_limit(root) == 2 * GIB
    inner = machine(
        tmp_path / "inner",
        "5:memory:/docker/abc/step",
        [("/docker/abc", "/sys/fs/cgroup/memory", "cgroup", "rw,memory")],
        {
            "memory/memory.limit_in_bytes": str(2 * GIB),
            "memory/step/memory.limit_in_bytes": str(GIB),
        },
    )
    assert cgroup_memory_limit(inner) == GIB


@pytest.mark.parametrize("path", ["/host/only", "/../sibling"])
def test_a_path_from_another_namespace_falls_back_to_the_mount(tmp_path, path):
    root = machine(tmp_path, f"0::{path}", V2, {"memory.max": str(GIB), "cpu.max": "50000 100000"})
    assert cgroup_memory_limit(root) == GIB
    assert cgroup_cpu_quota(root) == 0.5
    assert usable_cpus(root) == 1


def test_on_a_hybrid_machine_each_controller_is_read_where_it_is(tmp_path):
    root = machine(
        tmp_path,
        "4:memory:/job\n0::/job",
        [
            ("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
            ("/", "/sys/fs/cgroup/unified", "cgroup2", "rw"),
        ],
        {
            "memory/job/memory.limit_in_bytes": str(5 * GIB),
            "unified/job/memory.max": "1",
            "unified/job/cpu.max": "300000 100000",
        },
    )
    assert cgroup_memory_limit(root) == 5 * GIB
    assert cgroup_cpu_quota(root) == 3.0


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files"),
    [
        ("0::/", V2, {"cpu.max": "max 100000", "memory.max": "max"}),
        ("0::/", V2, {"cgroup.procs": ""}),
        ("5:memory:/\n4:cpu,cpuacct:/", V1, {"memory/memory.limit_in_bytes": V1_UNLIMITED}),
        ("0::/", [], {}),
        ("", V2, {"memory.max": "1"}),
    ],
)
def test_no_limit_is_none(tmp_path, cgroup, mounts, files):
    root = machine(tmp_path, cgroup, mounts, files)
    assert cgroup_cpu_quota(root) is None
    assert cgroup_memory_limit(root) is None
    assert cgroup_memory_available(root) is None
    assert usable_cpus(root) == len(os.sched_getaffinity(0))


def test_a_system_without_proc_has_no_limits(tmp_path):
    assert cgroup_cpu_quota(tmp_path) is None
    assert cgroup_memory_limit(tmp_path) is None


def test_a_large_quota_does_not_add_cpus(tmp_path):
    root = machine(tmp_path, "0::/", V2, {"cpu.max": "99900000 100000"})
    assert usable_cpus(root) == len(os.sched_getaffinity(0))


def test_version_2_availability_gives_file_pages_back(tmp_path):
    root = machine(
        tmp_path,
        "0::/pod/box",
        V2,
        {
            "pod/memory.max": "1000",
            "pod/memory.current": "900",
            "pod/memory.stat": "anon 500\nfile 400\ninactive_file 250\nactive_file 50",
            "pod/box/memory.max": "800",
            "pod/box/memory.current": "100",
            "pod/box/memory.stat": "anon 100\ninactive_file 0\nactive_file 0",
        },
    )
    assert cgroup_memory_available(root) == 1000 - (900 - 300)
    assert available_bytes(root) == 400


def test_version_1_availability_counts_the_whole_subtree(tmp_path):
    root = machine(
        tmp_path,
        "5:memory:/job",
        V1,
        {
            "memory/job/memory.limit_in_bytes": "1000",
            "memory/job/memory.usage_in_bytes": "700",
            "memory/job/memory.stat": "active_file 1\ntotal_inactive_file 80\ntotal_active_file 9",
        },
    )
    assert available_bytes(root) == 1000 - (700 - 89)


def test_an_overdrawn_group_has_nothing_left(tmp_path):
    files = {"memory.max": "1000", "memory.current": "1200", "memory.stat": "inactive_file 10"}
    assert available_bytes(machine(tmp_path, "0::/", V2, files)) == 0


def test_the_walk_agrees_with_this_kernel():
    """Version 1 prints the smallest limit up the hierarchy itself."""
    own = [
        line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line
    ]
    stat = Path("/sys/fs/cgroup/memory" + (own[0].split(":", 2)[2] if own else "")) / "memory.stat"
    if not stat.exists():
        pytest.skip("memory is not under cgroup version 1 here, mounted as the process names it")
    facts = dict(line.split() for line in stat.read_text().splitlines())
    kernel = int(facts["hierarchical_memory_limit"])
    assert cgroup_memory_limit() == (None if kernel >= 1 << 60 else kernel)
