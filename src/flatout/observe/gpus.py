"""GPUs on which a process has contexts, and torch's peak memory on each."""

from __future__ import annotations

from typing import Any


def memory_mb(torch: Any) -> dict[str, float] | None:
    """Return the peak MiB of torch's memory by GPU uuid; None without CUDA.

    A context without memory counts as 0. CUDA is queried only if it is initialized, so that this
    call makes no context.
    """
    cuda = torch.cuda
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if not torch.backends.cuda.is_built() or has_context is None:
        return None
    if not cuda.is_initialized():
        return {}
    return {
        str(cuda.get_device_properties(at).uuid): cuda.max_memory_allocated(at) / 2**20
        for at in range(cuda.device_count())
        if has_context(at)
    }
