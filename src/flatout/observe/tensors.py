"""Tensors that come to the host, and those that are copied between devices."""

from __future__ import annotations

from functools import wraps
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from flatout.observe.lanes import COPY, HOST, INPUT, OPTIMISER
from flatout.observe.watch import Watch

# Optimisers and loaders read numbers of their own.
_OTHERS = (OPTIMISER, INPUT)
# What each method is told as.
_SYNCS = {
    "item": "item",
    "__float__": "item",
    "__int__": "item",
    "__bool__": "item",
    "tolist": "tolist",
    "cpu": "cpu",
    "numpy": "numpy",
}


def watch_tensors(torch: Any, watch: Watch) -> None:
    """Hooks into the methods of torch.Tensor by which a value comes to the host."""
    for name, kind in _SYNCS.items():
        setattr(torch.Tensor, name, timed(getattr(torch.Tensor, name), kind, name, watch))
    for name in ("to", "cuda"):
        setattr(torch.Tensor, name, _copying(getattr(torch.Tensor, name), watch))


def timed(original: Any, kind: str, name: str, watch: Watch) -> Any:
    """A method that brings a value to the host, with its time and the user's line."""
    lanes, calls = watch.lanes, watch.calls
    detail = {} if kind == name else {"by": name}

    @wraps(original)
    def to_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = lanes.current
        if current in _OTHERS or get_ident() != lanes.thread:
            return original(self, *args, **kwargs)
        began = perf_counter_ns()
        value = original(self, *args, **kwargs)
        took = perf_counter_ns() - began
        spent = lanes.spent
        spent[HOST] += took
        spent[current] -= took
        calls.note(kind, took, detail=detail)
        return value

    return to_host


def _copying(original: Any, watch: Watch) -> Any:
    lanes, calls = watch.lanes, watch.calls

    @wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = lanes.current
        if current in _OTHERS or get_ident() != lanes.thread:
            return original(self, *args, **kwargs)
        began = perf_counter_ns()
        value = original(self, *args, **kwargs)
        if value is self or value.device == self.device:
            return value
        took = perf_counter_ns() - began
        to_host = value.device.type == "cpu"
        spent = lanes.spent
        spent[HOST if to_host else COPY] += took
        spent[current] -= took
        if to_host:
            calls.note("cpu", took, detail={"by": "to"})
        return value

    return to
