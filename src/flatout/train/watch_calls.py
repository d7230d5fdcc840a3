"""Which module a loop of one's own calls with a batch's inputs: seen in its first steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from flatout.data import Batch
from flatout.models import is_called_with

# In so many steps: those of several losses may take turns.
_STEPS = 2


class Calls:
    """Watches the calls of a model and its parts.

    Attributes:
        root: the outermost module that was called with all of a batch's inputs, and nothing else;
            None before that.
    """

    def __init__(self, model: nn.Module) -> None:
        self.root: nn.Module | None = None
        self._model, self._left = model, _STEPS

    @property
    def is_over(self) -> bool:
        """Whether enough was seen."""
        return self._left <= 0

    @contextmanager
    def watched(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Within, a step of these batches is made."""
        modules = [m for m in self._model.modules() if "_call_impl" not in vars(m)]
        for module in modules:
            vars(module)["_call_impl"] = MethodType(_call_impl, module)
        _watching.append((self, batches))
        try:
            yield
        finally:
            _watching.pop()
            for module in modules:
                vars(module).pop("_call_impl", None)
            self._left -= 1


_watching: list[tuple[Calls, Sequence[Batch]]] = []


# Bound and named so that a copy of the model that is made meanwhile calls what its class calls.
def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _watching and not torch.compiler.is_compiling():
        calls, batches = _watching[-1]
        if calls.root is None and any(is_called_with(b.inputs, args, kwargs) for b in batches):
            calls.root = self
    return type(self)._call_impl(self, *args, **kwargs)  # type: ignore[no-untyped-call]
