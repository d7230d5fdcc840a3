"""GroupNorm whose input needs no gradient, in channels_last on a CPU.

In torch 2.11 to 2.13 the backward pass (`native_group_norm_backward` with `channels_last`) writes
the gradient of the input even if this gradient has no memory. That error ends the process, so no
trial can detect it. Therefore the input's gradient is requested, computed and dropped. Gradients of
weight and bias are the same, bit for bit. Modules and `F.group_norm` both call `torch.group_norm`,
the function that is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

_plain = torch.group_norm
_lock = threading.Lock()
_within = 0


def has_group_norms(model: nn.Module) -> bool:
    """Return whether a module is a GroupNorm."""
    return any(isinstance(module, nn.GroupNorm) for module in model.modules())


@contextmanager
def guarding_group_norms(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter another context, and within it let inputs of group normalization require a gradient."""
    global _within
    with _lock:
        _within += 1
        torch.group_norm = _guarded
    try:
        with inner:
            yield
    finally:
        with _lock:
            _within -= 1
            if not _within:
                torch.group_norm = _plain


def _guarded(input: Any, num_groups: int, weight: Any = None, *others: Any, **named: Any) -> Any:
    if _is_alone(input) and any(_trains(p) for p in (weight, *others, *named.values())):
        input = input.detach().requires_grad_()
    return _plain(input, num_groups, weight, *others, **named)


def _is_alone(x: Any) -> bool:
    return (
        type(x) is torch.Tensor
        and not x.requires_grad
        and x.is_floating_point()
        and x.device.type == "cpu"
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def _trains(parameter: Any) -> bool:
    return isinstance(parameter, torch.Tensor) and parameter.requires_grad
