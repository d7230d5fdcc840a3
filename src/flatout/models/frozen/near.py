"""Comparison of results for the same sample in batches of other sizes or at another index."""

from __future__ import annotations

import torch

# Maximum difference that counts as rounding, as a fraction of the largest absolute value. _SHARES:
# by dtype on a CPU, whose kernels sum in another order for other batch sizes. _ON_DEVICES: for
# float32 on a GPU, whose kernels may also round factors to TF32, or use transforms such as
# Winograd's. _IN_HALF: for half precision.
_SHARES = {torch.float64: 1e-8, torch.float32: 1e-4}
_ON_DEVICES, _IN_HALF = 5e-3, 2e-2


def is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two results differ by no more than rounding. Integers must be equal.

    Args:
        a, b: tensors of the same shape, dtype and device.
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
