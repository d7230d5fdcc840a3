"""The names of a torch module's weights, buffers and submodules.

They are the names in its state dict, without the levels that wrappers (DataParallel,
DistributedDataParallel, torch.compile) add. The same weights have the same names with or without a
wrapper.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return each module with its own name. A wrapper comes before its module, with that name."""
    levels = _wrapped(model)
    return [(_strip_levels(path, levels), module) for path, module in model.named_modules()]


def own_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return each name of a parameter, buffer or module of `model` without the levels of wrappers.

    If two names would become equal, because a wrapper has its own state, all names stay unchanged.
    """
    levels = _wrapped(model)
    own = {name: _strip_levels(name, levels) for name in names}
    return own if len(set(own.values())) == len(own) else {name: name for name in own}


def _wrapped(model: nn.Module) -> set[str]:
    # torch's compiler is imported only if something was compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    compiled = (dynamo.OptimizedModule,) if dynamo is not None else ()
    parameters: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            parameters.add(f"{path}.module".lstrip("."))
        elif isinstance(module, compiled):
            parameters.add(f"{path}._orig_mod".lstrip("."))
    return parameters


def _strip_levels(name: str, levels: set[str]) -> str:
    parts = name.split(".")
    paths = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return ".".join(part for part, path in zip(parts, paths, strict=True) if path not in levels)
