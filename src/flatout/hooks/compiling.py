"""Measures that let torch.compile compile the same code as without Flatout."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

# Packages whose code runs in hooks, within the script's steps.
_OURS = (
    "flatout.cures",
    "flatout.doctor.trials",
    "flatout.hooks",
    "flatout.observe",
)


def skip_our_frames(eval_frame: Any) -> None:
    """Mark the code that hooks run, for a hook on torch._dynamo.eval_frame.

    Otherwise a hook that runs between two compiled frames would be compiled as its own frame.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS):
            # A warning in compiled code quotes its line; without this, reading the file would be
            # compiled too.
            linecache.getlines(str(module.__file__))
            for code in _codes_of(vars(module), name):
                eval_frame.skip_code(code)


def is_anything_compiled() -> bool:
    """Return whether the script compiles; then replacing a torch function recompiles all."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters)


def _codes_of(names: dict[str, Any], module: str) -> Iterator[CodeType]:
    for value in list(names.values()):
        inner = getattr(value, "fget", value)
        if isinstance(inner, FunctionType) and inner.__module__ == module:
            yield from _nested(inner.__code__)
        elif isinstance(value, type) and value.__module__ == module:
            yield from _codes_of(dict(vars(value)), module)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
