"""Flatout trains models as fast as the hardware allows.

Names load lazily, because threads, the allocator and device settings must land before torch loads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatout import keras_import

if TYPE_CHECKING:
    from flatout import data, integrations, optim
    from flatout.optim import LrRule
    from flatout.recipe import Recipe
    from flatout.train.callbacks import Callback, EarlyStopping
    from flatout.train.history import History
    from flatout.train.loop import Loop
    from flatout.train.trainer import Trainer

__version__ = "0.1.0"

keras_import.explain()

_HOMES = {
    "Callback": "flatout.train.callbacks",
    "EarlyStopping": "flatout.train.callbacks",
    "History": "flatout.train.history",
    "Loop": "flatout.train.loop",
    "LrRule": "flatout.optim",
    "Recipe": "flatout.recipe",
    "Trainer": "flatout.train.trainer",
    # What %load_ext and %unload_ext call.
    "load_ipython_extension": "flatout.report.notebook",
    "unload_ipython_extension": "flatout.report.notebook",
}

_ROOMS = ("integrations", "data", "optim")

__all__ = [
    "Callback",
    "EarlyStopping",
    "History",
    "Loop",
    "LrRule",
    "Recipe",
    "Trainer",
    "data",
    "integrations",
    "optim",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"flatout.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flatout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
