"""Runs hooks right before or after a module is imported, without importing it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_before: dict[str, Callable[[], None]] = {}
_after: dict[str, list[Callable[[Any], None]]] = {}


def before_import(name: str, hook: Callable[[], None]) -> None:
    """Call `hook()` before the module's code runs; the import raises its errors."""
    _before[name] = hook
    _begin()


def when_imported(name: str, hook: Callable[[Any], None]) -> None:
    """Call `hook(module)` once the module is loaded, or at once if it is already."""
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
        return
    _after.setdefault(name, []).append(hook)
    _begin()


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _before and name not in _after:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _wait_for(spec, name)
                return spec
        return None


_FINDER = _Finder()


def _begin() -> None:
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _wait_for(spec: ModuleSpec, name: str) -> None:
    loader: Any = spec.loader
    if loader is None or not hasattr(loader, "exec_module"):
        return
    execute = loader.exec_module

    def execute_between_hooks(module: ModuleType) -> None:
        loader.__dict__.pop("exec_module", None)
        if name in _before:
            _before[name]()
        execute(module)
        for hook in _after.pop(name, []):
            hook(module)

    loader.exec_module = execute_between_hooks
