"""The memory and page faults of this process, and the memory it may still use.

A call takes less than a millisecond.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import FlatoutError
from flatout.measure.cgroup import cgroup_memory_available

if TYPE_CHECKING:
    import torch


def page_faults() -> int:
    """Return the minor page faults of this process so far, of all threads.

    Newly mapped memory costs one for every page touched, again in every step if the allocator
    returns its memory to the system.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def require_proc() -> None:
    """Raise an error if /proc, the kernel's view of processes, is not mounted.

    Raises:
        FlatoutError: there is no /proc, from which psutil reads processes and memory.
    """
    if not os.path.exists("/proc/self/stat"):
        raise FlatoutError(
            "Flatout reads processes and memory from /proc, which is not mounted here",
            do="mount it, as containers do by default: mount -t proc proc /proc",
        )


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated before the machine swaps or the cgroup kills.

    That is the smaller of the machine's available memory and the bytes that the cgroups still
    allow.
    """
    import psutil

    require_proc()
    machine = int(psutil.virtual_memory().available)
    allowed = cgroup_memory_available(root)
    return machine if allowed is None else min(machine, allowed)


def available_on_gpu(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that this process may still take.

    That is the smaller of the free bytes and the part that
    `torch.cuda.set_per_process_memory_fraction` leaves to this process. Memory that torch's
    allocator has reserved counts as taken.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))


def finish_device() -> None:
    """Wait for queued work of this process on a device, so that a block's time includes it.

    Neither imports torch nor begins to use a device.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
