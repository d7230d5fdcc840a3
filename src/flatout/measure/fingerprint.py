"""The facts of a machine that decide a job's speed, so that no measurement is trusted elsewhere.

No code here imports torch or creates a device context: versions come from package metadata, GPU
names from NVML. The kernel's release is left out: it changes with every update, and a measurement
would be discarded without need.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from flatout.measure.cgroup import cgroup_memory_limit, usable_cpus

# Flag in /proc/cpuinfo -> common name, in the order of importance for training.
_INSTRUCTIONS = {
    "amx_bf16": "AMX-bf16",
    "amx_fp16": "AMX-fp16",
    "amx_int8": "AMX-int8",
    "avx512_bf16": "AVX512-bf16",
    "avx512_fp16": "AVX512-fp16",
    "avx512_vnni": "AVX512-VNNI",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "bf16": "NEON-bf16",
    "i8mm": "NEON-int8",
    "sve2": "SVE2",
    "sve": "SVE",
    "asimd": "NEON",
    "neon": "NEON",
}


@dataclass(frozen=True)
class Fingerprint:
    """One machine as a training job finds it. An empty text is an unknown fact.

    Args:
        os: the system and its architecture, such as "Linux x86_64".
        cpu: the processor's model name.
        cpus: the CPUs that this process may keep busy (affinity and cgroup quota).
        cpus_total: the logical CPUs of the machine.
        instructions: the instruction sets that matter to training, in the kernel's spelling.
        memory_gib: the memory that this process may use, in GiB, rounded.
        gpus: the names of the GPUs in NVML's order, including those hidden by CUDA_VISIBLE_DEVICES.
        torch: torch's version with its build, such as "2.13.0+cu130".
        python: Python's version without the patch level.
        libc: the C library and its version; its allocator affects a CPU job's speed.
    """

    os: str
    cpu: str
    cpus: int
    cpus_total: int
    instructions: tuple[str, ...]
    memory_gib: int
    gpus: tuple[str, ...]
    torch: str
    python: str
    libc: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON or TOML: texts, integers and lists of texts."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits (of a SHA-256) that change when any field does."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def words(self) -> str:
        """Description in one line, such as `torch 2.13 · 2 of 64 CPUs · AMX-bf16 · 23 GiB`."""
        parts = [f"torch {'.'.join(self.torch.split('.')[:2])}" if self.torch else "no torch"]
        for name in dict.fromkeys(self.gpus):
            count = self.gpus.count(name)
            parts.append(name if count == 1 else f"{count}x {name}")
        total = f" of {self.cpus_total}" if self.cpus < self.cpus_total else ""
        parts.append(f"{self.cpus}{total} CPU{'s' if self.cpus_total > 1 else ''}")
        if self.instructions:
            parts.append(_INSTRUCTIONS[self.instructions[0]])
        parts.append(f"{self.memory_gib} GiB")
        return " · ".join(parts)

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Return a line for each fact that differs from another machine's `as_dict()`.

        A fact that only one of the two knows is a difference.
        """
        here = self.as_dict()
        return [
            f"{name}: {value_words(here.get(name))} here, {value_words(other.get(name))} there"
            for name in dict.fromkeys([*here, *other])
            if here.get(name) != plain(other.get(name))
        ]


@cache
def fingerprint(root: Path = Path("/")) -> Fingerprint:
    """Return this machine's fingerprint, taken once per process and folder.

    The first call decides: threads that are pinned later do not change it.

    Args:
        root: the folder that holds `proc` and `sys`; only tests use another one than "/".
    """
    cpu, instructions = _processor(root)
    return Fingerprint(
        os=f"{platform.system()} {platform.machine()}",
        cpu=cpu,
        cpus=usable_cpus(root),
        cpus_total=os.cpu_count() or 1,
        instructions=instructions,
        memory_gib=_memory_gib(root),
        gpus=_gpu_names(),
        torch=_torch_version(),
        python=".".join(platform.python_version_tuple()[:2]),
        libc=_libc(),
    )


def _processor(root: Path) -> tuple[str, tuple[str, ...]]:
    facts: dict[str, str] = {}
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return platform.processor(), ()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    model = facts.get("model name", "")
    if not model and "CPU part" in facts:
        model = f"Arm implementer {facts.get('CPU implementer')} part {facts['CPU part']}"
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return model, tuple(name for name in _INSTRUCTIONS if name in flags)


def _memory_gib(root: Path) -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = cgroup_memory_limit(root)
    return max(1, round((total if limit is None else min(total, limit)) / 2**30))


def _gpu_names() -> tuple[str, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        # There is no driver library, or it is not loaded, so there is no GPU to compute on.
        return ()
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def _torch_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _libc() -> str:
    # confstr asks the library itself; platform.libc_ver() would search the executable's bytes.
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def plain(value: Any) -> Any:
    """Return a value as JSON and TOML would return it."""
    return list(value) if isinstance(value, tuple) else value


def value_words(value: Any) -> str:
    """Return the description of a value."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "unknown" if value in (None, "") else str(value)
