"""Whether torch.compile has compiled a model, and running it as written for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def compiles_here() -> bool:
    """Whether this process has called `torch.compile` with its own backend, which imports this."""
    return "torch._inductor.compiler_bisector" in sys.modules


def has_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it was compiled."""
    return any(map(is_compiled, model.modules()))


def is_compiled(module: nn.Module) -> bool:
    """Whether this module itself was."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Within, calls of a model that `model.compile()` has compiled run it as written."""
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled
