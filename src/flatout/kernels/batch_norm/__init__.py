"""BatchNorm in training with the ReLU after it in two passes over memory, forward and backward.

If the C extension is absent, `fits` returns False, and torch's own operators compute the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flatout.kernels import missing_extension
from flatout.kernels.openmp import parallel, team

_c = missing_extension.optional("_batch_norm")


_DTYPES = (torch.bfloat16, torch.float32)
# Fewest elements at which the kernel is used. On fewer, torch's operators are faster, because their
# backward does not call Python.
_LEAST = 2**14
# Fewest elements in a row of one channel at which the kernel is used.
_LEAST_SPATIAL = 512

ACTIVATIONS = {None: 0, "relu": 1, "relu6": 2}
"""Numbers of the activations after BatchNorm, by the names of torch's functions."""


class Saved(NamedTuple):
    """The values that backward needs from forward.

    Attributes:
        moments: mean, variance (of the batch, biased), scale and shift: float32, (4, channels).
        epsilon: the number that was added to the variance.
        activation: the activation after BatchNorm.
    """

    moments: torch.Tensor
    epsilon: float
    activation: str | None


def fits(x: torch.Tensor, *parameters: torch.Tensor | None, skip: torch.Tensor | None) -> bool:
    """Return whether the kernel takes these tensors, and is faster than torch's operators."""
    return (
        _c is not None
        and type(x) is torch.Tensor
        and x.device.type == "cpu"
        and x.dtype in _DTYPES
        and x.dim() in (2, 3, 4, 5)
        and x.numel() >= _LEAST
        and x.numel() > x.shape[1]
        and _suits(x)
        and all(_is_plain(parameter, x.shape[1]) for parameter in parameters)
        and (skip is None or _goes_with(skip, x))
        and (torch.get_num_threads() == 1 or parallel() != 0)
    )


def _is_plain(parameter: torch.Tensor | None, channels: int) -> bool:
    return parameter is None or (
        parameter.dtype is torch.float32
        and parameter.shape == (channels,)
        and parameter.is_contiguous()
        and parameter.device.type == "cpu"
    )


def _goes_with(skip: torch.Tensor, x: torch.Tensor) -> bool:
    return (
        type(skip) is torch.Tensor
        and skip.dtype is x.dtype
        and skip.shape == x.shape
        and skip.stride() == x.stride()
    )


def _suits(x: torch.Tensor) -> bool:
    layout = _format(x)
    is_in_planes = layout is torch.contiguous_format and x.dim() > 2
    return layout is not None and (not is_in_planes or x[0, 0].numel() >= _LEAST_SPATIAL)


def _format(x: torch.Tensor) -> torch.memory_format | None:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is not None and x.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format if x.is_contiguous() else None


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    skip: torch.Tensor | None,
    activation: str | None,
    epsilon: float,
) -> tuple[torch.Tensor, Saved]:
    """Return `activation(batch_norm(x) + skip)`, with the moments of the batch."""
    y = torch.empty_like(x)
    moments = torch.empty((4, x.shape[1]))
    _c.forward(
        _address(x),
        _address(skip),
        _address(y),
        _address(weight),
        _address(bias),
        _address(moments),
        *_numbers(x, activation, epsilon),
    )
    return y, Saved(moments, epsilon, activation)


def backward(
    x: torch.Tensor,
    y: torch.Tensor | None,
    gradient: torch.Tensor,
    saved: Saved,
    wants_skip: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of x, weight, bias and skip."""
    layout = _format(x)
    assert layout is not None
    gradient = gradient.to(x.dtype).contiguous(memory_format=layout)
    out = torch.empty_like(x)
    is_masked = wants_skip and saved.activation is not None
    out_skip = torch.empty_like(x) if is_masked else None
    given = torch.empty((2, x.shape[1]))
    _c.backward(
        _address(x),
        _address(y),
        _address(gradient),
        _address(out),
        _address(out_skip),
        _address(saved.moments),
        _address(given),
        *_numbers(x, saved.activation, saved.epsilon),
    )
    return out, given[0], given[1], out_skip if is_masked else gradient if wants_skip else None


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _numbers(
    x: torch.Tensor, activation: str | None, epsilon: float
) -> tuple[int, int, int, int, int, float, int, int]:
    channels = x.shape[1]
    elements = x.numel() // channels
    is_last = x.dim() == 2 or _format(x) is not torch.contiguous_format
    spatial = 0 if is_last else elements // x.shape[0]
    return (
        elements if is_last else x.shape[0],
        channels,
        spatial,
        x.element_size(),
        ACTIVATIONS[activation],
        epsilon,
        *team(),
    )
