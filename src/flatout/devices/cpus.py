"""The CPUs: the number for this process, and the threads that torch would start on them."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from flatout.measure import cgroup_cpu_quota, fingerprint, usable_cpus


@dataclass(frozen=True)
class Cpus:
    model: str
    present: int
    allowed: int
    quota: float | None
    usable: int
    torch_threads: int
    instructions: tuple[str, ...]


def read_cpus(root: Path = Path("/")) -> Cpus:
    facts = fingerprint(root)
    return Cpus(
        model=facts.cpu,
        present=os.cpu_count() or 1,
        allowed=len(_affinity()),
        quota=cgroup_cpu_quota(root),
        usable=usable_cpus(root),
        torch_threads=default_torch_threads(root),
        instructions=facts.instructions,
    )


def default_torch_threads(root: Path = Path("/")) -> int:
    """Return the number of threads that torch starts for one operator by default.

    x86 wheels ask MKL, which counts the physical cores of the affinity; from the environment it
    takes any number up to the machine's physical cores. Other wheels ask OpenMP, which counts the
    logical CPUs of the affinity. Neither reads a cgroup's quota: a container with 2 of 64 CPUs gets
    32 threads.
    """
    cpus = _affinity()
    if platform.machine() not in ("x86_64", "AMD64"):
        return _from_environment("OMP_NUM_THREADS") or len(cpus)
    asked = _from_environment("MKL_NUM_THREADS") or _from_environment("OMP_NUM_THREADS")
    cores = [_core(cpu, root) for cpu in range(os.cpu_count() or 1)]
    return min(asked, len(set(cores))) if asked else len({_core(cpu, root) for cpu in cpus})


def _from_environment(name: str) -> int | None:
    number = re.match(r"\s*\+?(\d+)\s*(,|$)", os.environ.get(name, ""))
    return int(number[1]) or None if number else None


def _core(cpu: int, root: Path) -> tuple[str, str]:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        socket = (topology / "physical_package_id").read_text().strip()
        return socket, (topology / "core_id").read_text().strip()
    except OSError:
        return "", str(cpu)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
