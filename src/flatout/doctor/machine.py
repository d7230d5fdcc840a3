"""Checks of the machine and the environment, which affect every job here.

Each check takes Facts and returns a Finding, or None if it finds nothing or lacks a fact.
No check imports torch or creates a device context.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from flatout import keras_import
from flatout.cache_folder import hindrance, wanted_folder
from flatout.devices import Inventory, inventory
from flatout.doctor.finding import Finding
from flatout.kernels import INSTALL, available
from flatout.words import counted, memory_words

# Minimum free disk space in bytes, for caches, checkpoints and logs of a job.
_SMALL_DISK = 2 * 2**30
# Minimum share of free memory. With less, the kernel may kill a job or swap.
_SMALL_MEMORY = 0.1
# Oldest version of torch that Flatout supports.
_OLDEST_TORCH = (2, 11)
# Variables that libraries set for their own use, and users do not set for speed.
_NOT_MEANT = ("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK")

# Advice about KMP_ variables, which the checks of scripts give too.
KMP_DO = "use OMP_PROC_BIND and OMP_PLACES, or preload libiomp5"
SHM_DO = "start the container with --shm-size=4g or --ipc=host, or use num_workers=0"


def of_intel(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that a user has set for Intel's OpenMP."""
    return sorted(n for n in environ if n.startswith("KMP_") and n not in _NOT_MEANT)


def kmp_words(names: Sequence[str]) -> str:
    """Return the sentence that only Intel's OpenMP reads these variables."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} read by Intel's OpenMP alone"


def shm_words(free: float) -> str:
    """Return the sentence about the free bytes of /dev/shm and their use."""
    return f"/dev/shm has {memory_words(free)} free, through which loader workers hand over batches"


@dataclass(frozen=True)
class Facts:
    """Input of the checks.

    Attributes:
        machine: inventory of the machine.
        environ: environment variables that a job would inherit.
        root: the folder that contains `proc` and `sys`.
        cache: Flatout's cache folder.
    """

    machine: Inventory
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    cache: Path = field(default_factory=wanted_folder)


_Look: TypeAlias = Callable[[Facts], Finding | None]
MACHINE_CHECKS: dict[str, _Look] = {}


def _check(name: str) -> Callable[[_Look], _Look]:
    return lambda look: MACHINE_CHECKS.setdefault(name, look)


def check_machine(facts: Facts | None = None) -> list[Finding]:
    """Return all findings of this machine, dangers first."""
    known = Facts(inventory()) if facts is None else facts
    looked = ((name, look(known)) for name, look in MACHINE_CHECKS.items())
    result = [replace(each, name=each.name or name) for name, each in looked if each is not None]
    return sorted(result, key=lambda finding: ("danger", "slow", "note").index(finding.kind))


@_check("torch")
def _torch(facts: Facts) -> Finding | None:
    version = facts.machine.torch.version
    if version is None:
        return Finding("danger", "torch is not installed", "pip install torch, as pytorch.org says")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers >= _OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, _OLDEST_TORCH))
    return Finding(
        "danger",
        f"torch is {version}, Flatout needs {oldest} or newer",
        f"pip install 'torch>={oldest}'",
    )


@_check("driver")
def _driver(facts: Facts) -> Finding | None:
    if facts.machine.driver_fits_torch is not False:
        return None
    nvml, build = facts.machine.nvml, facts.machine.torch
    assert nvml.cuda is not None
    offered = ".".join(map(str, nvml.cuda))
    return Finding(
        "danger",
        f"the driver {nvml.driver} offers CUDA {offered}, torch was built for {build.cuda}: torch "
        "will see no GPU",
        "update the driver, or install torch for an older CUDA",
    )


@_check("gpu unused")
def _gpu_without_cuda(facts: Facts) -> Finding | None:
    gpus, build = facts.machine.nvml.gpus, facts.machine.torch
    if not gpus or build.version is None or build.cuda is not None:
        return None
    return Finding(
        "slow",
        f"there is {counted(len(gpus), 'GPU')} ({gpus[0].name}), but torch {build.version} "
        "was built without CUDA: jobs run on the CPU",
        "install a build of torch with CUDA, as pytorch.org says",
    )


@_check("gpu hidden")
def _hidden_gpus(facts: Facts) -> Finding | None:
    gpus, devices = facts.machine.nvml.gpus, facts.machine.cuda
    if not gpus or devices or "CUDA_VISIBLE_DEVICES" not in facts.environ:
        return None
    value = facts.environ["CUDA_VISIBLE_DEVICES"]
    return Finding(
        "slow",
        f"CUDA_VISIBLE_DEVICES={value!r} hides {counted(len(gpus), 'GPU')}",
        "unset it, unless the job is to run on the CPU",
    )


@_check("gpu busy")
def _busy_gpus(facts: Facts) -> Finding | None:
    visible = {device.uuid for device in facts.machine.cuda}
    busy = [gpu for gpu in facts.machine.nvml.gpus if gpu.uuid in visible and gpu.processes]
    if not busy:
        return None
    gpu = busy[0]
    used = memory_words(gpu.memory_used or 0)
    who = ", ".join(str(process.pid) for process in gpu.processes)
    return Finding(
        "note",
        f"GPU {gpu.nvml_index} ({gpu.name}) is in use: {used} by process {who}",
        "measurements made while other jobs run are rough",
    )


@_check("threads")
def _threads(facts: Facts) -> Finding | None:
    cpus = facts.machine.cpus
    threads, usable = cpus.torch_threads, cpus.usable
    names = [n for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if facts.environ.get(n)]
    why = ", ".join(f"{name}={facts.environ[name]}" for name in names)
    if threads > usable:
        limit = f"the cgroup's quota is {cpus.quota:g} CPUs" if cpus.quota else "fewer CPUs"
        cause = f"{why} asks for them" if why else limit
        return Finding(
            "slow",
            f"torch would start {threads} threads for each operator on {usable} usable CPUs "
            f"({cause}): they wait for each other",
            f"set OMP_NUM_THREADS={usable}, or flatout run --set process.threads={usable}",
        )
    if why and threads < usable // 2:
        return Finding(
            "slow",
            f"{why} lets torch use {threads} of {usable} usable CPUs",
            "unset it; torchrun sets it to 1 by itself, flatout run --devices does not",
        )
    return None


@_check("KMP")
def _inert_kmp(facts: Facts) -> Finding | None:
    names = of_intel(facts.environ)
    preloaded = facts.environ.get("LD_PRELOAD", "")
    if not names or "libiomp5" in preloaded or facts.machine.torch.version is None:
        return None
    return Finding(
        "note",
        f"{kmp_words(names)}; torch's wheels bring GNU's OpenMP, so they have no effect",
        KMP_DO,
    )


@_check("shm")
def _shm(facts: Facts) -> Finding | None:
    shm = facts.machine.shm
    if shm is None or not shm.too_small_for_workers:
        return None
    return Finding(
        "danger", f"{shm_words(shm.free)}: they die with a bus error when it is full", SHM_DO
    )


@_check("memory")
def _memory(facts: Facts) -> Finding | None:
    memory = facts.machine.memory
    total = min(memory.total, memory.limit or memory.total)
    if memory.available >= _SMALL_MEMORY * total:
        return None
    return Finding(
        "danger",
        f"{memory_words(memory.available)} of {memory_words(total)} of memory are free",
        "end what takes it, or expect jobs to be killed",
    )


@_check("clock")
def _governor(facts: Facts) -> Finding | None:
    path = facts.root / "sys/devices/system/cpu/cpu0/cpufreq"
    try:
        governor = (path / "scaling_governor").read_text().strip()
        driver = (path / "scaling_driver").read_text().strip()
    except OSError:
        return None
    # With the drivers intel_pstate and amd_pstate, "powersave" still raises the clock under load.
    if governor != "powersave" or "pstate" in driver:
        return None
    return Finding(
        "slow",
        f"the CPU's frequency governor is powersave ({driver}): it stays at its lowest clock",
        "cpupower frequency-set -g performance",
    )


@_check("busy")
def _busy_machine(facts: Facts) -> Finding | None:
    try:
        load = float((facts.root / "proc/loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    present = facts.machine.cpus.present
    if load < 0.5 * present:
        return None
    return Finding(
        "note",
        f"other work keeps {load:.1f} of {present} CPUs busy",
        "measurements made while other jobs run are rough",
    )


@_check("kernels")
def _kernels(facts: Facts) -> Finding | None:
    if available():
        return None
    return Finding(
        "slow",
        "Flatout's C extensions are not built, which data formats and `flatout doctor FILE` need",
        INSTALL,
    )


@_check("keras")
def _keras(facts: Facts) -> Finding | None:
    if find_spec("keras") is None:
        return None
    problem = keras_import.problem()
    if problem is None or problem.do is None:
        return None
    return Finding("note", f"{problem.what} ({problem.where})", problem.do)


@_check("disk")
def _disk(facts: Facts) -> Finding | None:
    if why := hindrance(facts.cache):
        return Finding(
            "slow",
            f"the cache folder {facts.cache} is not used: {why}",
            "set FLATOUT_CACHE to a folder of your own that no other user can write",
            name="cache",
        )
    folder = next(parent for parent in (facts.cache, *facts.cache.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if free >= _SMALL_DISK:
        return None
    return Finding(
        "danger",
        f"{memory_words(free)} are free on the disk of {facts.cache}",
        "make room, or set FLATOUT_CACHE to another disk",
    )
