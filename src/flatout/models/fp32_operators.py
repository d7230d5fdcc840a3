"""Operators that stay in fp32 under autocast to bf16 on a CPU, where bf16 may be slower for them.

Two such operators are known in torch's kernels for CPUs without AMX. The gradient of attention with
short sequences or small heads takes up to 4 times as long in bf16. The gradient of depthwise
convolutions with a stride takes 15 times as long. Their inputs are cast to fp32 and their results
to bf16, so that other operators see no difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd

_ATTENTION = "scaled_dot_product_attention"


def may_be_slower_in_bf16(model: nn.Module) -> bool:
    """Return whether the model has such operators, as far as its modules and their code show."""
    return any(_is_strided_depthwise(m) or _uses_attention(m) for m in model.modules())


def keep_in_fp32(model: nn.Module) -> list[Callable[[], None]]:
    """Run these operators in fp32 under autocast to bf16, and return functions that undo it.

    Attention is a function, not a module, so until the undo it runs in fp32 for every model of this
    process.
    """
    undo = [_attention_in_fp32()]
    for module in model.modules():
        if _is_strided_depthwise(module) and "forward" not in vars(module):
            module.forward = MethodType(forward, module)
            undo.append(partial(delattr, module, "forward"))
    return undo


def _is_strided_depthwise(module: nn.Module) -> bool:
    if not isinstance(module, _ConvNd) or type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return False
    return module.groups == module.in_channels > 1 and max(module.stride) > 1


def _uses_attention(module: nn.Module) -> bool:
    kinds = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    functions = [f for kind in kinds for f in vars(kind).values() if isinstance(f, FunctionType)]
    return any("Attention" in kind.__name__ for kind in kinds) or any(
        _ATTENTION in function.__code__.co_names for function in functions
    )


# The name `forward` lets a pickled model find the forward of its class again.
def forward(self: nn.Module, input: torch.Tensor) -> torch.Tensor:
    own: Callable[..., torch.Tensor] = type(self).forward
    if not _casts_to_bf16(input):
        return own(self, input)
    with torch.autocast("cpu", enabled=False):
        return own(self, input.float()).to(torch.bfloat16)


def _casts_to_bf16(tensor: torch.Tensor) -> bool:
    return (
        torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
        and tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.bfloat16)
    )


def _attention_in_fp32() -> Callable[[], None]:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides the warning that torch's own kernel is overridden
        library.impl(  # type: ignore[no-untyped-call]
            _ATTENTION, _attention, "AutocastCPU", allow_override=True
        )
    return library._destroy


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    wanted = torch.get_autocast_dtype("cpu")
    dtype = torch.float32 if wanted is torch.bfloat16 else wanted

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if is_cast else tensor

    mask = None if attn_mask is None else cast(attn_mask)
    with torch.autocast("cpu", enabled=False):
        result = F.scaled_dot_product_attention(
            cast(query), cast(key), cast(value), mask, *args, **kwargs
        )
    return result if result.dtype is torch.float64 else result.to(wanted)
