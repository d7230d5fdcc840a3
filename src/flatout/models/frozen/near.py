"""How far apart results of the same sample may lie in batches that differ in place or size."""

from __future__ import annotations

import torch

# Of the largest number. A CPU's kernels for other batches sum up in another order; those of a GPU
# may round what they multiply to TF32 besides, or use transforms as Winograd's.
_SHARES = {torch.float64: 1e-8, torch.float32: 1e-4}
_ON_DEVICES, _IN_HALF = 5e-3, 2e-2


def is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results differ by no more than rounding; integers must be the same.

    Args:
        a, b: of the same shape, dtype and device.
    """
    if a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    share = _SHARES.get(a.dtype, _IN_HALF)
    if a.dtype == torch.float32 and a.device.type != "cpu":
        share = _ON_DEVICES
    if a.dtype not in _SHARES:
        a, b = a.float(), b.float()
    apart = float(torch.linalg.vector_norm(a - b, torch.inf))
    return apart <= share * float(torch.linalg.vector_norm(a, torch.inf))
