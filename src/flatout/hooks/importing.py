"""Runs hooks right after a module was imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[Any], None]

_hooks: dict[str, list[Hook]] = {}


def when_imported(name: str, hook: Hook) -> None:
    """Calls `hook(module)` once the module is whole; at once where it is already."""
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _hooks.setdefault(name, []).append(hook)


class _AfterImport(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _hooks:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _wait_for(spec, name)
                return spec
        return None


_FINDER = _AfterImport()


def _wait_for(spec: ModuleSpec, name: str) -> None:
    """Lets the loader run the hooks.

    The loader keeps its class, since others ask it for sources and resources.
    """
    loader: Any = spec.loader
    if loader is None or not hasattr(loader, "exec_module"):
        return
    execute = loader.exec_module

    def execute_then_hooks(module: ModuleType) -> None:
        loader.__dict__.pop("exec_module", None)
        execute(module)
        for hook in _hooks.pop(name, []):
            hook(module)

    loader.exec_module = execute_then_hooks
