"""The names of a torch module's weights, buffers and submodules.

They are those of its state dict, without the levels that wrappers (DataParallel,
DistributedDataParallel, torch.compile) put around modules: the same weights have the same names,
wrapped or not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Each module with its own name: a wrapper has that of what it holds, and comes before it."""
    levels = _wrapped(model)
    return [(_strip_levels(path, levels), module) for path, module in model.named_modules()]


def own_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Each name of a parameter, buffer or module of `model`, without the levels of wrappers.

    Where two names would become equal, because a wrapper has its own state, all stay as they
    are.
    """
    levels = _wrapped(model)
    own = {name: _strip_levels(name, levels) for name in names}
    return own if len(set(own.values())) == len(own) else {name: name for name in own}


def _wrapped(model: nn.Module) -> set[str]:
    # Only where something was compiled is torch's compiler imported.
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
