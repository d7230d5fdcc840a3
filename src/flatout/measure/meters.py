"""What this process has used and what it may still use. A call costs under a millisecond."""

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
    """Returns the minor page faults of this process so far, all threads together.

    Freshly mapped memory costs one for every page touched, again in every step when the allocator
    gives its memory back.
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
    """Returns the bytes of this process that are in memory now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that can be allocated before the machine swaps or the cgroup kills.

    That is the smaller of the machine's available memory and what the cgroups still allow.
    """
    import psutil

    require_proc()
    machine = int(psutil.virtual_memory().available)
    allowed = cgroup_memory_available(root)
    return machine if allowed is None else min(machine, allowed)


def available_on_gpu(device: torch.device) -> int:
    """Returns the bytes of a GPU's memory that this process may still take.

    That is the smaller of what is free and what `torch.cuda.set_per_process_memory_fraction` leaves
    to this process. What torch's allocator has reserved is taken.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))


def finish_device() -> None:
    """Waits for what this process has only queued on a device: a block's time is the device's too.

    Does not import torch, nor begin to use a device.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
