"""Activation checkpointing: keep a block's inputs, compute its activations again in backward.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". torch's own `checkpoint` does the
work and replays the random state; what it leaves to us is that buffers, such as BatchNorm's running
statistics, must not be updated a second time by the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_activations(model: nn.Module) -> Callable[[], None]:
    """Checkpoint the blocks of `model` in training; returns what undoes it.

    Blocks are the members of the longest `ModuleList` or `Sequential` that hold parameters (the
    layers of a transformer, the stages of a ConvNet), or else the model's own children. The result
    is bit-identical to the plain step.
    """
    blocks = _blocks(model)
    for block in blocks:
        block.forward = MethodType(_recomputed(type(block)), block)

    def undo() -> None:
        for block in blocks:
            del block.forward

    return undo


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    candidates = [*lists, model]
    longest = max(candidates, key=lambda m: len(_with_parameters(m)))
    # A block whose forward somebody else replaced is left as it is.
    return [m for m in _with_parameters(longest) if "forward" not in m.__dict__]


def _with_parameters(parent: nn.Module) -> list[nn.Module]:
    return [m for m in parent.children() if next(m.parameters(), None) is not None]


def _recomputed(cls: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return cls.forward(self, *args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _buffers_kept(self)

        return checkpoint(
            MethodType(cls.forward, self), *args, use_reentrant=False, context_fn=contexts, **kwargs
        )

    return forward


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    before = [(b, b.detach().clone()) for b in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            # .data: autograd saved these buffers and must not see a new version.
            buffer.data.copy_(value)
