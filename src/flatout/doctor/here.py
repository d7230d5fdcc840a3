"""Facts about this machine that checks need and observations of ranks lack."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flatout.devices import Inventory
from flatout.observe import Observation

_BF16 = {"amx_bf16": "AMX-bf16", "avx512_bf16": "AVX512-bf16", "bf16": "Arm bf16"}
"""CPU flags that mean units for bf16, the fastest first."""

_BF16_GPU = (8, 0)
"""Smallest compute capability of GPUs with units for bf16."""


def on_this_machine(
    observation: Observation, machine: Inventory, available_bytes: int
) -> Observation:
    """Return the Observation with its missing fields filled in from this machine."""
    return replace(
        observation,
        machine_cpus=observation.machine_cpus or machine.cpus.usable,
        gpus=_gpus(machine) if observation.gpus is None else observation.gpus,
        bf16_units=_bf16_units(observation, machine)
        if observation.bf16_units is None
        else observation.bf16_units,
        available_mb=observation.available_mb or available_bytes / 2**20,
        shm_free_mb=_shm_free_mb(machine)
        if observation.shm_free_mb is None
        else observation.shm_free_mb,
        disk_free_mb=_disk_free_mb(observation)
        if observation.disk_free_mb is None
        else observation.disk_free_mb,
    )


def _shm_free_mb(machine: Inventory) -> float | None:
    return None if machine.shm is None else machine.shm.free / 2**20


def _disk_free_mb(observation: Observation) -> float | None:
    folders = [Path(saved["path"]).parent for saved in observation.saved if saved.get("path")]
    for place in [at for folder in folders[-1:] for at in (folder, *folder.parents)]:
        with suppress(OSError):
            return shutil.disk_usage(place).free / 2**20
    return None


def _gpus(machine: Inventory) -> list[str]:
    if not machine.driver_fits_torch:
        return []
    return [gpu.name for gpu in machine.cuda]


def _bf16_units(observation: Observation, machine: Inventory) -> str:
    if not observation.device.startswith("cuda"):
        flags = [flag for flag in _BF16 if flag in machine.cpus.instructions]
        return _BF16[flags[0]] if flags else ""
    number = int(observation.device.partition(":")[2] or 0)
    if number >= len(machine.cuda):
        return ""
    return "GPU" if (machine.cuda[number].capability or (0, 0)) >= _BF16_GPU else ""
