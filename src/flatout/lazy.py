"""Names of a package that load at first access, as its stub lists them."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

_IMPORT = re.compile(r"^from (\S+) import (\w+)", re.MULTILINE)


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its name.
        file: its `__init__.py`. The `__init__.pyi` in the same folder has a line for each name:
            `from MODULE import NAME as NAME`.
    """
    with open(f"{file.removesuffix('c')}i", encoding="utf-8") as stub:
        homes = {name: module for module, name in _IMPORT.findall(stub.read())}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return _imported(f"{package}.{name}")
        return getattr(_imported(homes[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, names, sorted(homes)


def _imported(name: str) -> ModuleType:
    if name in sys.modules:
        return import_module(name)
    state = random.getstate()
    try:
        return import_module(name)
    finally:
        random.setstate(state)
