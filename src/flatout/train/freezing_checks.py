"""Checks for errors in partly frozen models that torch does not report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from flatout.models import calls_hooks, has_compiled, moving_norms
from flatout.optim import optimizer_adapter

ONLY_LOOKS = "_flatout_only_looks"
"""Attribute of Flatout's own hooks that change nothing, so that a step may be captured."""

_NAMED = 3


def freezing_lines(model: nn.Module, optimizers: Sequence[Any]) -> Iterator[str]:
    """Yield lines about frozen BatchNorms that still update, and about missing parameters."""
    if norms := moving_norms(model):
        yield (
            f"frozen BatchNorm still updates its running statistics in training: {listed(norms)}; "
            "flatout.freeze(model, layers=...) keeps it in evaluation mode"
        )
    if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
        return
    left_out = [optimizer_adapter(optimizer).parameters_left_out(model) for optimizer in optimizers]
    if missing := [name for name in left_out[0] if all(name in names for names in left_out)]:
        yield (
            "parameters require gradients, but the optimizer does not have them: "
            f"{listed(missing)}; they are not trained: give them to the optimizer, or freeze them "
            "with flatout.freeze"
        )


@contextmanager
def gradients_watched(model: nn.Module, say: Callable[[str], None]) -> Iterator[None]:
    """Report modules that the model itself calls without gradients in a step.

    Such modules do not train, though their parameters require gradients. As this may change with
    each step, their outputs are not kept as features. A module that is also called with gradients
    does train. Compiled models are not checked, nor are models whose calls run no hooks, such as
    Keras models.
    """
    if has_compiled(model) or not calls_hooks(model):
        yield
        return
    trained = {part for part in model.modules() if _trains(part)}
    called: dict[bool, set[nn.Module]] = {False: set(), True: set()}

    def note(part: nn.Module, args: Any) -> None:
        if part in trained:
            called[torch.is_grad_enabled()].add(part)

    setattr(note, ONLY_LOOKS, True)
    hook = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()
    off = called[False] - called[True]
    if off and (names := _whole(model, off, trained)):
        say(
            f"called without gradients (torch.no_grad), so not trained: {listed(names)}; freeze "
            f'it with flatout.freeze(model, layers=["{names[0]}"]), and its outputs may be kept'
        )


def _trains(part: nn.Module) -> bool:
    return any(tensor.requires_grad for tensor in part.parameters(recurse=False))


def _whole(
    model: nn.Module, off: Collection[nn.Module], trained: Collection[nn.Module]
) -> list[str]:
    result: list[str] = []
    for name, part in model.named_modules():
        if not name or any(name.startswith(f"{outer}.") for outer in result):
            continue
        own = [child for child in part.modules() if child in trained]
        if own and all(child in off for child in own):
            result.append(name)
    return result


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and the number of further ones."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
