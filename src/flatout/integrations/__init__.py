"""Callbacks for other trainers: a line of code, and their steps are seen as lanes too.

    lightning.Trainer(callbacks=[flatout.integrations.LightningTimeline()])
    transformers.Trainer(..., callbacks=[flatout.integrations.HFTimeline()])
    keras_model.fit(..., callbacks=[flatout.integrations.KerasTimeline()])

A name loads its framework when it is asked for, and no other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.integrations.hugging_face import HFTimeline
    from flatout.integrations.keras import KerasTimeline
    from flatout.integrations.lightning import LightningTimeline

_HOMES = {
    "HFTimeline": "flatout.integrations.hugging_face",
    "KerasTimeline": "flatout.integrations.keras",
    "LightningTimeline": "flatout.integrations.lightning",
}

__all__ = ["HFTimeline", "KerasTimeline", "LightningTimeline"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flatout.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
