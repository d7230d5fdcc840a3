"""The forms of tensors that cross between stages, computed on tensors without memory.

So each rank knows what it will receive, and torch.distributed.pipelining need not send the forms as
pickle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from flatout.errors import ModelError

_KNOWN = (RuntimeError, TypeError, ValueError, NotImplementedError)


class Shape(NamedTuple):
    """The form of a tensor that crosses between stages."""

    size: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def like(self, device: str) -> torch.Tensor:
        made = torch.empty(self.size, dtype=self.dtype, device=device)
        return made.requires_grad_(self.requires_grad)


def shape_of(tensor: torch.Tensor) -> Shape:
    return Shape(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def shapes(stages: Sequence[fx.GraphModule], inputs: Sequence[Shape]) -> list[list[Shape]]:
    """Return the outputs of each stage for inputs, with gradients where they are on."""
    result: list[list[Shape]] = []
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        given = [item.like("cpu") for item in inputs]
        for stage in stages:
            try:
                with _unwatched(stage):
                    given = list(functional_call(stage, _weights(stage), tuple(given)))
            except _KNOWN as error:
                if str(error).startswith("Expected more than 1 value per channel"):
                    raise  # torch's message about BatchNorm and one sample is clear
                raise ModelError(
                    "what passes from stage to stage has no form that is known before: "
                    f"{type(error).__name__}: {str(error).splitlines()[0]}",
                    do="see that the model runs on torch's meta device, or train with "
                    "world.strategy=ddp or fsdp",
                ) from error
            result.append([shape_of(tensor) for tensor in given])
            given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given]
    return result


def unlike_form(found: Shape, expected: Shape) -> ModelError:
    """Return the error for a stage whose output has an unexpected shape or dtype."""
    return ModelError(
        f"a stage of the model gives {_words(found)}; expected {_words(expected)}, as in the trial "
        "run on tensors without values",
        do="write layers so that the dtype and shape of outputs do not depend on values, or train "
        "with world.strategy=ddp or fsdp",
    )


def _words(shape: Shape) -> str:
    return f"{str(shape.dtype).removeprefix('torch.')} {shape.size}"


@contextmanager
def no_fast_attention() -> Iterator[None]:
    """Within the block, compute attention by plain operators, also in an evaluation.

    The fast kernel reads values, which tensors without memory do not have. It also returns another
    dtype under autocast, so that a rank would wait for more or fewer bytes than another rank sends.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _unwatched(stage: nn.Module) -> Iterator[None]:
    names = ("_forward_hooks", "_forward_pre_hooks")
    kept = [(module, {name: vars(module)[name] for name in names}) for module in stage.modules()]
    for module, _ in kept:
        vars(module).update({name: OrderedDict() for name in names})
    try:
        with torch._C.DisableTorchFunction(), no_fast_attention():
            yield
    finally:
        for module, hooks in kept:
            vars(module).update(hooks)


def _weights(stage: nn.Module) -> dict[str, torch.Tensor]:
    named = (*stage.named_parameters(), *stage.named_buffers())
    return {name: shape_of(tensor).like("cpu") for name, tensor in named}
