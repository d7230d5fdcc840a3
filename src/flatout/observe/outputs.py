"""What a script tells, saves and tidies up while it trains."""

from __future__ import annotations

import builtins
import gc
import logging
import os
from functools import wraps
from threading import get_ident
from typing import Any

from flatout.observe.importing import when_imported
from flatout.observe.lanes import GC, HOST, SAVING
from flatout.observe.watch import Watch

_SAVED = 200


def watch_outputs(watch: Watch) -> None:
    """Hooks into print and logging."""
    builtins.print = _timed(builtins.print, "print", HOST, watch)
    logging.Logger._log = _timed(logging.Logger._log, "log", HOST, watch)  # type: ignore[method-assign]
    os.fsync = _timed(os.fsync, "log", HOST, watch)  # a line that is to survive a crash
    when_imported("torch.utils.tensorboard.writer", lambda module: _watch_writer(module, watch))


def watch_torch(torch: Any, watch: Watch) -> None:
    """Hooks into torch.save and torch.cuda.empty_cache."""
    torch.save = _saving(_timed(torch.save, "save", SAVING, watch, depth=3), watch)
    torch.cuda.empty_cache = _timed(torch.cuda.empty_cache, "empty_cache", HOST, watch)


def _watch_writer(module: Any, watch: Watch) -> None:
    """Hooks into TensorBoard's writer."""
    owner = module.SummaryWriter
    for name in [name for name in vars(owner) if name.startswith("add_")]:
        setattr(owner, name, _timed(getattr(owner, name), "log", HOST, watch))


def _timed(original: Any, kind: str, lane: int, watch: Watch, depth: int = 2) -> Any:
    lanes, calls = watch.lanes, watch.calls

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != lanes.thread or lanes.current == SAVING:
            return original(*args, **kwargs)
        before = lanes.switch(lane)
        began = lanes.last
        try:
            return original(*args, **kwargs)
        finally:
            lanes.switch(before)
            calls.note(kind, lanes.last - began, depth)

    return call


def _saving(original: Any, watch: Watch) -> Any:
    """Notes which keys are saved: wrappers leave their prefixes in them."""

    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if get_ident() == watch.lanes.thread and watch.lanes.steps:
            watch.aside(*watch.before_saving)
        original(obj, f, *args, **kwargs)
        if get_ident() == watch.lanes.thread and len(watch.saved) < _SAVED:
            path = os.fspath(f) if isinstance(f, (str, os.PathLike)) else ""
            watch.saved.append({"path": str(path), "step": watch.lanes.steps, "keys": keys_of(obj)})

    return save


def keys_of(obj: Any, depth: int = 0) -> list[str]:
    """The first names of the tensors in nested dicts, such as `model.0.weight`."""
    found: list[str] = []
    if isinstance(obj, dict) and depth < 3:
        for name, value in obj.items():
            if isinstance(value, dict):
                found += [f"{name}.{inner}" for inner in keys_of(value, depth + 1)]
            elif hasattr(value, "dtype"):
                found.append(str(name))
            if len(found) >= 50:
                break
    elif hasattr(obj, "state_dict"):
        found = [type(obj).__name__]
    return found[:50]


def watch_garbage(watch: Watch) -> None:
    """Times collections that interrupt the thread that steps."""
    lanes, calls = watch.lanes, watch.calls
    before = began = -1

    def collected(phase: str, info: dict[str, Any]) -> None:
        nonlocal before, began
        if get_ident() != lanes.thread:
            return
        if phase == "start":
            before = lanes.switch(GC)
            began = lanes.last
        elif before >= 0:
            lanes.switch(before)
            before = -1
            calls.note("gc", lanes.last - began, depth=2, detail={"generation": info["generation"]})

    gc.callbacks.append(collected)
