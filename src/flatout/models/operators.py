"""Counts of the operators of a training step: their number, FLOPs and memory traffic.

    with OperatorCount() as count:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    count.lanes()

`flatout.measure.roofline` takes these counts. The step's result does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.data import tensors_in

# Maximum bytes of an operator's tensors for which they are assumed to be in a cache.
CACHED_BYTES = 2**21

_Args = tuple[Any, ...]
_Kinds = dict[str, dict[str, float]]


class OperatorCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts operators by kind and by lane: forward, backward or optimizer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: _Kinds = {}
        self._backward: _Kinds = {}
        # Operators since the last node of a backward pass: another forward pass, or the update.
        self._since: _Kinds = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        with suppress(Exception):  # a failed count must not end a step
            self._count(func, args, out)
        return out

    def _count(self, func: Any, args: _Args, out: Any) -> None:
        kind, flops, is_view = _known(func)
        if not kind or (func is _TO_COPY and _is_cast(args[0], out)):
            return
        moved = 0 if is_view else sum(map(_bytes, tensors_in((*args, out))))
        kinds = self._since
        if torch._C._current_graph_task_id() != -1:
            self._end_forward()
            kinds = self._backward
        result = flops(args, out) if flops else 0
        if kind == "conv":
            kind = _kind_of(args)
        _add(kinds, kind, 1, result, moved, moved if moved <= CACHED_BYTES else 0)

    def _end_forward(self) -> None:
        for kind, of in self._since.items():
            _add(self._before, kind, *of.values())
        self._since.clear()

    def lanes(self) -> dict[str, _Kinds]:
        """Return by lane and kind `calls`, `flops`, `bytes` as if in fp32, and `cached_bytes`.

        Operators after the last backward pass count as the optimizer's.
        """
        if not self._backward:
            self._end_forward()
        result = {"forward": self._before, "backward": self._backward, "optimizer": self._since}
        return {lane: kinds for lane, kinds in result.items() if kinds}


class OperatorTimes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that times matrix products, attention and recurrent layers on a CPU.

    Attributes:
        kernels_s: seconds of these operators, for which compiled code calls the same kernels.
            Excludes convolutions, because a compiler uses another memory order for their images.
    """

    kernels_s: float = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        began = perf_counter()
        out = func(*args, **(kwargs or {}))
        if _is_kernel(func):
            self.kernels_s += perf_counter() - began
        return out


def weights_counted(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, float]:
    """Return the bytes of trained weights and of their optimizer state, and the number of tensors.

    The state exists after the first step.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    states = [state for o in optimizers for state in o.state.values()]
    # This excludes step counts, which have no dimension.
    tensors = [t for state in states for t in tensors_in(state) if t.dim()]
    return {
        "bytes": sum(map(_bytes, trained)),
        "state_bytes": sum(map(_bytes, tensors)),
        "tensors": len(trained),
    }


def _add(kinds: _Kinds, kind: str, calls: float, flops: float, moved: float, cached: float) -> None:
    of = kinds.setdefault(kind, {"calls": 0, "flops": 0, "bytes": 0, "cached_bytes": 0})
    of["calls"] += calls
    of["flops"] += flops
    of["bytes"] += moved
    of["cached_bytes"] += cached


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    is_short = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.numel() * (4 if is_short else tensor.element_size())


def _is_cast(x: torch.Tensor, out: torch.Tensor) -> bool:
    dtypes = {x.dtype, out.dtype}
    return torch.float32 in dtypes and bool(dtypes & {torch.bfloat16, torch.float16})


# -- facts about operators; a multiplication and an addition count one each --------------------

_TO_COPY = torch.ops.aten._to_copy.default
_Flops = Callable[[_Args, Any], float]


@cache
def _known(func: Any) -> tuple[str, _Flops | None, bool]:
    if func.namespace != "aten":
        return "", None, False
    name = func.overloadpacket.__name__
    infos = [item.alias_info for item in func._schema.returns]
    is_view = any(info is not None and not info.is_write for info in infos)
    if name in _FLOPS:
        return *_FLOPS[name], is_view
    for kind, parts in _BY_NAME.items():
        if any(part in name for part in parts):
            return kind, None, is_view
    return "elementwise", None, is_view


@cache
def _is_kernel(func: Any) -> bool:
    return _known(func)[0] in _KERNELS or func.overloadpacket.__name__ in _WHOLE


_KERNELS = ("matmul", "attention", "recurrent")
# Operations that torch runs as a single operator in evaluation.
_WHOLE = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
_BY_NAME = {
    "normalization": ("_norm",),
    "gather": ("embedding", "index", "gather", "scatter"),
}


def _product(place: int) -> tuple[str, _Flops]:
    return "matmul", lambda args, out: 2 * out.numel() * args[place].shape[-1]


def _convolution(args: _Args, out: torch.Tensor) -> float:
    x, weight, transposed = args[0], args[1], args[6]
    return float(2 * (x if transposed else out).numel() * weight[0].numel())


def _convolution_backward(args: _Args, out: Any) -> float:
    gradient, x, weight, transposed, mask = *args[:3], args[7], args[10]
    each = 2 * (x if transposed else gradient).numel() * weight[0].numel()
    return float(each * (mask[0] + mask[1]))


def _kind_of(args: _Args) -> str:
    is_backward = len(args) > 9
    weight, groups = (args[2], args[9]) if is_backward else (args[1], args[8])
    if groups > 1 and weight.shape[1] == 1:
        return "conv_depthwise"
    return "conv_1x1" if weight[0, 0].numel() == 1 else "conv"


def _attention(first: int, factor: float) -> tuple[str, _Flops]:
    return (
        "attention",
        lambda args, out: factor * 4 * args[first].numel() * args[first + 1].shape[-2],
    )


def _recurrent(factor: float) -> tuple[str, _Flops]:
    def flops(args: _Args, out: Any) -> float:
        x, *weights = args[:3]
        rows = x.numel() // x.shape[-1]
        return float(factor * 2 * rows * sum(weight.numel() for weight in weights))

    return "recurrent", flops


_FUSED_ATTENTION = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)

_FLOPS: dict[str, tuple[str, _Flops]] = {
    "mm": _product(0),
    "bmm": _product(0),
    "mv": _product(0),
    "addmm": _product(1),
    "baddbmm": _product(1),
    "addmv": _product(1),
    "convolution": ("conv", _convolution),
    "convolution_backward": ("conv", _convolution_backward),
    **{f"_scaled_dot_product_{name}": _attention(0, 1) for name in _FUSED_ATTENTION},
    # The scores are computed again, then four more products.
    **{f"_scaled_dot_product_{name}_backward": _attention(1, 2.5) for name in _FUSED_ATTENTION},
    "mkldnn_rnn_layer": _recurrent(1),
    "mkldnn_rnn_layer_backward": _recurrent(2),
}
