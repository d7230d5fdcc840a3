"""Output of a script while it trains: prints, logs, saves; and its garbage collections."""

from __future__ import annotations

import builtins
import gc
import logging
import os
from functools import partial
from threading import get_ident
from typing import Any

from flatout.hooks import when_imported, wrap
from flatout.observe.frequent_calls import FrequentCalls
from flatout.observe.lanes import GC, HOST, SAVING
from flatout.observe.model_facts import local
from flatout.observe.openmp import OPENMP
from flatout.observe.replicas import has_peers, number_of
from flatout.observe.timed_calls import timed
from flatout.observe.watch import Watch

# Maximum number of saves that are recorded.
_SAVED = 24
# Number of first saves whose tensors are hashed, to compare them between ranks.
_NUMBERED = 8
# Detail of the calls of a logging package; such calls can be left out.
_LOGGED = {"logged": True}


def watch_outputs(watch: Watch) -> None:
    """Hook into print and logging."""
    told = Told(watch)
    told.time(builtins, "print", "print")
    told.time(logging.Logger, "_log", "log", _LOGGED)
    wrap(os, "putenv", "observe", _noting_openmp, watch)
    # fsync is called for log lines that must survive a crash.
    told.time(os, "fsync", "log", {"fsync": True})
    when_imported("torch.utils.tensorboard.writer", lambda module: _watch_writer(module, told))


class Told:
    """Timer of calls that print or log.

    The calls are timed in all steps or, where timing costs too much, only in some steps that
    represent all.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.calls = FrequentCalls(watch)

    def time(self, owner: Any, name: str, kind: str, detail: dict[str, Any] | None = None) -> None:
        """Time the calls of a function, and count them as calls of this kind."""
        shifted = self.calls.shifted
        around = partial(
            timed, kind=kind, lane=HOST, watch=self._watch, detail=detail, shifted=shifted
        )
        self.calls.time(owner, name, kind, around)


def _noting_openmp(original: Any, watch: Watch) -> Any:
    def putenv(name: Any, value: Any) -> None:
        original(name, value)
        if os.fsdecode(name).startswith(OPENMP) and get_ident() == watch.lanes.thread:
            watch.calls.note("setenv", 0, depth=2, detail={"name": os.fsdecode(name)})

    return putenv


def watch_torch(torch: Any, watch: Watch) -> None:
    """Hook into torch.save and torch.cuda.empty_cache."""
    saved = partial(timed, kind="save", lane=SAVING, watch=watch, depth=3)
    wrap(torch, "save", "observe", saved)
    wrap(torch, "save", "observe", _saving, watch)
    emptied = partial(timed, kind="empty_cache", lane=HOST, watch=watch)
    wrap(torch.cuda, "empty_cache", "observe", emptied)


def _watch_writer(module: Any, told: Told) -> None:
    owner = module.SummaryWriter
    for name in [name for name in vars(owner) if name.startswith("add_")]:
        told.time(owner, name, "log", _LOGGED)


def _saving(original: Any, watch: Watch) -> Any:
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if get_ident() == watch.lanes.thread and watch.lanes.steps:
            watch.aside(*watch.before_saving)
        original(obj, f, *args, **kwargs)
        if get_ident() == watch.lanes.thread and len(watch.saved) < _SAVED:
            path = os.path.abspath(os.fsdecode(f)) if isinstance(f, (str, os.PathLike)) else ""
            saved = {"path": path, "step": watch.lanes.steps, "keys": keys_of(obj)}
            saved["bytes"] = _size(path)
            watch.saved.append(saved)
            if path and len(watch.saved) <= _NUMBERED and has_peers():
                watch.aside(lambda: saved.update(contents=contents_of(obj)))

    return save


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size if path else None
    except OSError:
        return None


def contents_of(obj: Any) -> int | None:
    """Return a hash of the tensors in nested dicts and lists; None where no tensor holds floats."""
    tensors = [local(tensor) for tensor in _tensors_in(obj)]
    if not any(tensor.is_floating_point() for tensor in tensors):
        return None
    return number_of(tensors)


def _tensors_in(obj: Any, depth: int = 0) -> list[Any]:
    if hasattr(obj, "dtype") and hasattr(obj, "is_floating_point"):
        return [obj]
    parts = obj.values() if isinstance(obj, dict) else obj
    if depth > 5 or not isinstance(obj, (dict, list, tuple)):
        return []
    return [tensor for part in parts for tensor in _tensors_in(part, depth + 1)]


def keys_of(obj: Any, depth: int = 0) -> list[str]:
    """Return the first names of the tensors in nested dicts, such as `model.0.weight`."""
    result: list[str] = []
    if isinstance(obj, dict) and depth < 3:
        for name, value in obj.items():
            if isinstance(value, dict):
                result += [f"{name}.{inner}" for inner in keys_of(value, depth + 1)]
            elif hasattr(value, "dtype"):
                result.append(str(name))
            if len(result) >= 50:
                break
    elif hasattr(obj, "state_dict"):
        result = [type(obj).__name__]
    return result[:50]


def watch_garbage(watch: Watch) -> None:
    """Time garbage collections that interrupt the stepping thread."""
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
