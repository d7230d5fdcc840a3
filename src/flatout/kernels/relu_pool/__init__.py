"""ReLU and 2x2 max-pooling of channels-last images in one pass, forward and backward.

If the C extension is absent, `fits` returns False, and torch's own operators compute the same.
"""

from __future__ import annotations

import torch

from flatout.kernels import missing_extension
from flatout.kernels.openmp import parallel, team

_c = missing_extension.optional("_relu_pool")


_DTYPES = (torch.bfloat16, torch.float32)
# Fewest elements at which the kernel is used. On fewer, torch's operators are faster, because their
# backward does not call Python.
_LEAST = 2**14
# Fewest channels at which the kernel is used. With fewer, the inner loops are too short.
_CHANNELS = 8


def fits(images: torch.Tensor) -> bool:
    """Return whether the kernel takes these images, and is faster than torch's operators."""
    return (
        _c is not None
        and type(images) is torch.Tensor
        and images.device.type == "cpu"
        and images.dtype in _DTYPES
        and images.dim() == 4
        and images.shape[1] >= _CHANNELS
        and images.numel() >= _LEAST
        and min(images.shape[2:]) >= 2
        and images.is_contiguous(memory_format=torch.channels_last)
        and (torch.get_num_threads() == 1 or parallel() != 0)
    )


def forward(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest value of each 2x2 window, at least 0, and codes for backward."""
    count, channels, height, width = images.shape
    small = torch.empty(
        (count, channels, height // 2, width // 2),
        dtype=images.dtype,
        memory_format=torch.channels_last,
    )
    codes = torch.empty((count, height // 2, width // 2, channels), dtype=torch.uint8)
    _run(False, images, small, codes)
    return small, codes


def backward(gradient: torch.Tensor, codes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the gradient of the images: each window's goes to the pixel with the largest value."""
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    images = torch.empty(
        (*gradient.shape[:2], height, width),
        dtype=gradient.dtype,
        memory_format=torch.channels_last,
    )
    _run(True, images, gradient, codes)
    return images


def _run(is_backward: bool, images: torch.Tensor, small: torch.Tensor, codes: torch.Tensor) -> None:
    count, channels, height, width = images.shape
    _c.run(
        is_backward,
        images.data_ptr(),
        small.data_ptr(),
        codes.data_ptr(),
        count,
        height,
        width,
        channels,
        images.element_size(),
        *team(),
    )
