"""Stand-ins for tensors while a forward is recorded, or run in part.

A stand-in is a torch.Tensor with shape, dtype and device, but without its own data. Every torch
function that gets a stand-in calls the run that made it, which decides the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from flatout.errors import ModelError

# Attributes and methods that read a tensor's form, not its values.
_ABOUT = frozenset(
    """
    shape dtype device ndim layout is_cuda is_cpu is_mps is_meta is_leaf is_sparse is_nested
    is_quantized is_mkldnn is_xpu names itemsize nbytes requires_grad grad_fn grad grad_dtype
    size dim stride numel nelement ndimension is_contiguous is_floating_point is_complex
    element_size __len__ get_device storage_offset is_same_size is_signed is_inference
    dim_order type __hash__ is_conj is_neg is_coalesced has_names retains_grad output_nr
    """.split()  # noqa: SIM905
)
# Functions that make a new tensor and use only the form of their argument.
_LIKE = frozenset(
    """
    new_zeros new_ones new_full new_tensor new_empty zeros_like ones_like full_like empty_like
    """.split()  # noqa: SIM905
)


class Uncut(ModelError):
    """Raised when a tensor is read that this part of the forward does not compute."""


class Run(Protocol):
    """Interface of a run of a forward: it decides the result of each call that gets a stand-in.

    Attributes:
        as_written: whether modules with a cut inside run their original forward, without Flatout's
            rewrites.
    """

    as_written: bool

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call of a torch function."""

    def module(
        self,
        name: str,
        call: Callable[..., Any],
        written: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the output of a module: `call` runs it whole, `written` runs its forward code."""


class StandIn(torch.Tensor):
    """A stand-in for a tensor.

    Attributes:
        run: the run that each torch function asks.
        number: id of the value that this object stands for.
        value: the tensor, or None if it is not computed.
    """

    run: Run
    number: int
    value: torch.Tensor | None

    @classmethod
    def of(cls, run: Run, number: int, value: torch.Tensor) -> StandIn:
        with torch._C.DisableTorchFunction():
            return cls.blank(run, number, value.shape, value.stride(), value, value)

    @classmethod
    def blank(
        cls,
        run: Run,
        number: int,
        shape: Any,
        strides: Any,
        like: Any,
        value: torch.Tensor | None = None,
    ) -> StandIn:
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=like.dtype, device=like.device
        )
        made.run, made.number, made.value = run, number, value
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = next(stand_ins((args, kwargs)))
        return first.run.function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise Uncut(
            f"{func} reads a tensor past torch's functions",
            do="keep no results of this model's frozen layers",
        )


def stand_ins(value: Any) -> Iterator[StandIn]:
    """Yield the stand-ins in nested lists, tuples and dicts, in order."""
    if isinstance(value, StandIn):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from stand_ins(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from stand_ins(part)
    elif isinstance(value, slice):
        yield from stand_ins((value.start, value.stop, value.step))


def with_values(value: Any) -> Any:
    """Return the structure with each stand-in replaced by its tensor."""
    if isinstance(value, StandIn):
        if value.value is None:
            raise Uncut(
                f"a tensor of shape {tuple(shape_of(value))} is read that was not kept",
                do="keep no results of this model's frozen layers",
            )
        return value.value
    if isinstance(value, (tuple, list)):
        parts = [with_values(part) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        named = {key: with_values(part) for key, part in value.items()}
        if all(named[key] is value[key] for key in named):
            return value
        try:
            return type(value)(named)
        except TypeError:
            return named
    if isinstance(value, slice):
        return slice(*with_values((value.start, value.stop, value.step)))
    return value


def shape_of(value: StandIn) -> torch.Size:
    """Return the shape of a stand-in without asking its run."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.shape


def name_of(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        return owner if name == "__get__" else f"{owner} ="
    return str(name)


def about(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function that reads only its arguments' form, or NotImplemented."""
    if name in _ABOUT:
        known = [stand_in.value is not None for stand_in in stand_ins((args, kwargs))]
        if all(known):
            return function(*with_values(args), **with_values(kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    if name in _LIKE:
        return function(*_empty(args), **_empty(kwargs))
    return NotImplemented


def _empty(value: Any) -> Any:
    if isinstance(value, StandIn):
        if value.value is not None:
            return value.value
        with torch._C.DisableTorchFunctionSubclass():
            form = value.shape, value.stride(), value.dtype, value.device
        return torch.empty_strided(*form[:2], dtype=form[2], device=form[3])
    if isinstance(value, (tuple, list)):
        return type(value)(_empty(part) for part in value)
    if isinstance(value, dict):
        return {key: _empty(part) for key, part in value.items()}
    return value
