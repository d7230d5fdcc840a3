"""The inventory in words, with a row for each device."""

from __future__ import annotations

from flatout.devices.cpus import Cpus
from flatout.devices.gpus import Gpu, GpuProcess
from flatout.devices.inventory import Inventory
from flatout.devices.memory import Memory, Shm
from flatout.words import memory_words

# CPU units with which bf16 is worth trying.
_BF16_UNITS = {"amx_bf16": "AMX-bf16", "avx512_bf16": "AVX512-bf16", "bf16": "Arm bf16"}


def rows(inventory: Inventory) -> list[tuple[str, str]]:
    """Return rows of (device, words): the CPUs, the memory, each GPU, and torch."""
    numbers = {device.uuid: index for index, device in enumerate(inventory.cuda)}
    gpus: list[tuple[str, str]] = []
    for gpu in inventory.nvml.gpus:
        gpus.append((_gpu_name(gpu, numbers), _gpu_words(gpu, numbers)))
    if inventory.nvml.problem:
        gpus.append(("GPU", f"none: {inventory.nvml.problem}"))
    elif not gpus:
        gpus.append(("GPU", "none"))
    elif not inventory.cuda_order_certain:
        note = "CUDA may number these otherwise: set CUDA_DEVICE_ORDER=PCI_BUS_ID to fix the order"
        gpus.append(("", note))
    return [
        ("CPU", _cpu_words(inventory.cpus)),
        ("RAM", f"{_ram_words(inventory.memory)} · {_shm_words(inventory.shm)}"),
        *gpus,
        ("torch", _torch_words(inventory)),
    ]


def _cpu_words(cpus: Cpus) -> str:
    why = []
    if cpus.allowed < cpus.present:
        why.append(f"affinity {cpus.allowed}")
    if cpus.quota is not None:
        why.append(f"cgroup quota {cpus.quota:.1f}")
    if cpus.torch_threads != cpus.usable:
        why.append(f"torch defaults to {cpus.torch_threads} threads")
    units = [words for flag, words in _BF16_UNITS.items() if flag in cpus.instructions]
    return (
        f"{cpus.usable} of {cpus.present} usable"
        + (f" ({'; '.join(why)})" if why else "")
        + f" · {', '.join(units) or 'no bf16 units'}"
        + (f" · {cpus.model}" if cpus.model else "")
    )


def _ram_words(memory: Memory) -> str:
    limited = memory.limit is not None and memory.limit < memory.total
    total = memory.limit if limited and memory.limit else memory.total
    return f"{_gib(memory.available)} free / {_gib(total)} GiB{' limit' if limited else ''}"


def _shm_words(shm: Shm | None) -> str:
    if shm is None:
        return "no /dev/shm: loader workers cannot hand over batches"
    size = memory_words(shm.total)
    if not shm.too_small_for_workers:
        return f"/dev/shm {size}"
    return f"/dev/shm {size}, {memory_words(shm.free)} free: too small for workers"


def _gpu_name(gpu: Gpu, numbers: dict[str, int]) -> str:
    return f"GPU {numbers.get(gpu.uuid, '-')}"


def _gpu_words(gpu: Gpu, numbers: dict[str, int]) -> str:
    words = f"{gpu.name}, {_memory_of(gpu)}"
    if gpu.uuid not in numbers:
        return f"{words}, hidden by CUDA_VISIBLE_DEVICES"
    return words


def _memory_of(gpu: Gpu) -> str:
    if gpu.memory_total is None or gpu.memory_used is None:
        return f"memory unknown{_users(gpu.processes)}"
    used, total = _gib(gpu.memory_used), _gib(gpu.memory_total)
    return f"{used} of {total} GiB used{_users(gpu.processes)}"


def _users(processes: tuple[GpuProcess, ...]) -> str:
    if not processes:
        return ""
    return f" by pid {', '.join(str(process.pid) for process in processes)}"


def _torch_words(inventory: Inventory) -> str:
    if inventory.torch.version is None:
        return "not installed"
    if inventory.torch.cuda is None:
        built = (
            f"built for ROCm {inventory.torch.hip}" if inventory.torch.hip else "built without CUDA"
        )
        return f"{inventory.torch.version}, {built}"
    if inventory.nvml.cuda is None:
        return f"{inventory.torch.version}, CUDA {inventory.torch.cuda}"
    fits = "fits" if inventory.driver_fits_torch else "is too old for"
    offered = ".".join(map(str, inventory.nvml.cuda))
    return (
        f"{inventory.torch.version} · driver {inventory.nvml.driver} (CUDA {offered})"
        f" {fits} torch's CUDA {inventory.torch.cuda}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
