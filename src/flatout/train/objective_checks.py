"""Checks of a model, the optimizers and the loss function, for training loops of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from flatout.data import Batch
from flatout.errors import ModelError

_T = TypeVar("_T")
# Parts of torch's error messages: for a loss without a graph, and for a graph that backward has
# freed.
NO_GRAPH = "does not require grad"
_FREED = "backward through the graph a second time"


def check_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers of another model, and a model whose parameters are all frozen."""
    own = {id(p): p for p in model.parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stepped = [own[id(p)] for group in groups for p in group["params"] if id(p) in own]
    if not own or not any(group["params"] for group in groups):
        return
    if not stepped:
        raise ModelError(
            "the optimizer has no parameter of this model",
            do="make the optimizer from the parameters of the model that is passed here",
        )
    if not any(p.requires_grad for p in stepped):
        raise ModelError(
            "the model has no parameter that can be trained: none requires gradients",
            do="first unfreeze the layers to train: flatout.unfreeze(model), or "
            "parameter.requires_grad_(True)",
        )


def explain_backward(error: RuntimeError, parameters: Sequence[torch.Tensor]) -> None:
    """Explain why torch refuses the backward pass of a loss."""
    words = str(error)
    if _FREED in words:
        raise _called_twice() from error
    if NO_GRAPH not in words:
        return
    if not any(p.requires_grad for p in parameters):
        raise ModelError(
            "no parameter that the optimizer steps requires gradients",
            do="unfreeze the layers to train: flatout.unfreeze(model)",
        ) from error
    raise ModelError(
        "the loss has no graph that leads to the parameters: nothing would be learned",
        do="compute the loss with this model, and return it without .detach(), .item() or "
        "torch.no_grad()",
    ) from error


@contextmanager
def no_backward_within(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Refuse code within this context that gives gradients to the parameters itself."""
    before = [_gradient_of(parameter) for parameter in parameters]
    yield
    if before != [_gradient_of(parameter) for parameter in parameters]:
        for parameter in parameters:
            parameter.grad = None
        raise _called_twice()


def _gradient_of(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the id of a parameter's gradient and the number of its changes in place."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def without_backward(
    compute: Callable[[Batch], _T], parameters: Sequence[torch.Tensor]
) -> Callable[[Batch], _T]:
    """Return the function with a check that raises a ModelError if it calls `backward`."""

    def within(batch: Batch) -> _T:
        with no_backward_within(parameters):
            return compute(batch)

    within.__wrapped__ = compute  # type: ignore[attr-defined]
    return within


def _called_twice() -> ModelError:
    return ModelError(
        "the function of the loss calls backward itself, and so does the step: gradients would "
        "count twice",
        do="return the loss, and leave loss.backward() and optimizer.step() out",
    )
