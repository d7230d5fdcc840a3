"""script.zero_grad=set_to_none: drops gradients where the script fills them with zeros."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from threading import get_ident
from typing import Any

from flatout.cures.record import is_on, leave, took
from flatout.cures.steps import ScriptSteps
from flatout.hooks import wrap

FIELD = "script.zero_grad"


def drop_gradients(torch: Any, steps: ScriptSteps) -> None:
    """Hook into zero_grad of optimizers and modules, and into backward passes.

    A dropped gradient that no backward pass fills becomes zero again before the step. Optimizers
    step a parameter with zero gradient, but skip a parameter without a gradient.
    """
    dropped: list[Any] = []

    def fill(optimizer: Any = None) -> None:
        for parameter in dropped:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        dropped.clear()

    def cured(original: Any) -> Any:
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            if set_to_none or get_ident() != steps.thread or not is_on():
                original(self, set_to_none)
                return
            filled = [p for p in _parameters(self) if p.grad is not None]
            if any(p.grad.layout is not torch.strided or p.grad.grad_fn for p in filled):
                leave(FIELD, "gradients are sparse, or have their own graph")
                original(self, set_to_none)
                return
            dropped.extend(filled)
            took(FIELD, "gradients to None")
            original(self, True)

        return zero_grad

    is_compiling = torch.compiler.is_compiling

    def then_fill(original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if dropped and not is_compiling() and get_ident() == steps.thread:
                fill()

        return backward

    for owner in (sys.modules["torch.optim.optimizer"].Optimizer, torch.nn.Module):
        wrap(owner, "zero_grad", "cures", cured)
    wrap(torch.autograd, "backward", "cures", then_fill)
    steps.before.append(fill)


def _parameters(owner: Any) -> Iterable[Any]:
    if hasattr(owner, "param_groups"):
        return [p for group in owner.param_groups for p in group["params"]]
    parameters: Iterable[Any] = owner.parameters()
    return parameters
