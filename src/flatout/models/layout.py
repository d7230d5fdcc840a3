"""The memory format of a model's images."""

from __future__ import annotations

import torch
from torch import nn

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
"""The names of torch's memory formats in a Recipe."""


def format_of(model: nn.Module) -> str:
    """Return the memory format of the model's images, as its convolutions' weights show it."""
    images = [p for p in model.parameters() if p.dim() == 4 and not p.is_contiguous()]
    last = any(p.is_contiguous(memory_format=torch.channels_last) for p in images)
    return "channels_last" if last else "contiguous"


def lay_out(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Set the memory format of 4-D weights; `model.to` refuses models with 3-D convolutions."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dim() == 4:
            tensor.data = _laid_out(tensor.data, memory_format)
            if tensor.grad is not None:
                tensor.grad.data = _laid_out(tensor.grad.data, memory_format)


def _laid_out(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=memory_format).copy_(tensor)
