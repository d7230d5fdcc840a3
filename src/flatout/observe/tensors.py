"""Hooks on tensors that are read by the host, or copied between devices."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import islice
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any

from flatout.hooks import Hook, can_clear, is_anything_compiled, wrap
from flatout.observe.frequent_calls import FrequentCalls
from flatout.observe.lanes import BACKWARD, COPY, HOST, INPUT, OPTIMIZER
from flatout.observe.round_trips import RoundTrips
from flatout.observe.watch import Watch

# Lanes whose reads are not counted: optimizers and loaders read values of their own.
_OTHERS = (OPTIMIZER, INPUT)
# Number of first steps in which the memory of copied tensors is inspected.
_ASKED = 8
# Methods that give a float.
_NUMBERS = ("item", "__float__")
# Kind of call that each method is counted as.
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
    """Hook into the methods of torch.Tensor that bring a value to the host."""
    trips = RoundTrips(watch)
    watch_syncs(torch, watch, trips)
    # Keras calls `to` seventy times in a step: without an accelerator, `to` need not be hooked.
    if torch.accelerator.current_accelerator(check_available=False) is None:
        return
    for name in ("to", "cuda"):
        wrap(torch.Tensor, name, "observe", copying, watch, trips)


def watch_syncs(torch: Any, watch: Watch, trips: RoundTrips) -> FrequentCalls:
    """Count values that come to the host.

    Such values are counted in all steps or, where counting costs too much of a short step, only in
    some steps.
    """
    syncs = FrequentCalls(watch)
    for name, kind in _SYNCS.items():
        follows = trips if name == "cpu" else None
        syncs.time(torch.Tensor, name, kind, timed, kind, name, watch, follows, syncs.shifted)
    return syncs


def timed(
    original: Any,
    kind: str,
    name: str,
    watch: Watch,
    trips: RoundTrips | None = None,
    shifted: Counter[tuple[str, int]] | None = None,
) -> Any:
    """Return a method that brings a value to the host, with its time and user's line recorded.

    `shifted` collects the ns that were moved from another lane to the host lane, by kind and lane.
    """
    lanes, calls = watch.lanes, watch.calls
    detail = {} if kind == name else {"by": name}
    on_number = watch.on_number if name in _NUMBERS else []

    def to_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = lanes.current
        if current in _OTHERS or get_ident() != lanes.thread:
            return original(self, *args, **kwargs)
        began = perf_counter_ns()
        value = original(self, *args, **kwargs)
        took = perf_counter_ns() - began
        if current != HOST:
            lanes.shift(took, current, HOST)
            if shifted is not None:
                shifted[kind, current] += took
        calls.note(kind, took, detail=detail)
        for look in on_number:
            look(value)
        if trips is not None and trips.is_open and value is not self:
            trips.to_host(value)
        return value

    return to_host


def copying(original: Any, watch: Watch, trips: RoundTrips | None = None) -> Any:
    """Return a method that may copy to another device, with its time recorded."""
    lanes, calls = watch.lanes, watch.calls

    def how(tensor: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if lanes.steps >= _ASKED:  # is_pinned() asks the driver
            return {}
        is_async = kwargs.get("non_blocking", False) is True or True in args[1:]
        return {"pinned": tensor.is_pinned(), "non_blocking": is_async}

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = lanes.current
        if current in _OTHERS or get_ident() != lanes.thread:
            return original(self, *args, **kwargs)
        began = perf_counter_ns()
        value = original(self, *args, **kwargs)
        if value is self or value.device == self.device:
            calls.passed += 1
            return value
        took = perf_counter_ns() - began
        to_host = value.device.type == "cpu"
        lanes.shift(took, current, HOST if to_host else COPY)
        if to_host:
            calls.note("cpu", took, detail={"by": "to"})
        elif self.device.type == "cpu":
            calls.note("to_device", took, detail=how(self, args, kwargs))
        if trips is not None and trips.is_open:
            if to_host:
                trips.to_host(value)
            else:
                trips.to_device(self, took)
        return value

    return to


class IndexWindow:
    """Timer of batches made by advanced indexing, in a few steps only.

    The hook runs for every use of square brackets, in datasets too, so it would cost too much in
    all steps. The measured steps represent all.
    """

    # _FROM: step after which indexing is timed; _STEPS: number of timed steps.
    _FROM, _STEPS = 3, 6

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._hook: Hook | None = None
        self._known: dict[tuple[int, int], list[int | None]] = {}
        self._others: set[tuple[object, ...]] = set()
        self._places: dict[tuple[str, int], list[list[int | None]]] = {}
        watch.at(self._FROM, self._open)
        watch.on_renewal.append(self._known.clear)  # the code objects may be gone by then

    def _open(self) -> None:
        # A hook would make torch.compile compile again, and must not make a tensor a sequence.
        if is_anything_compiled() or not can_clear():
            return
        self._hook = wrap(self._torch.Tensor, "__getitem__", "observe", self._timed)
        self._watch.at(self._FROM + self._STEPS, self._close)

    def _close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._watch.calls.spread("index", self._STEPS)

    def _timed(self, original: Any) -> Any:
        lanes, calls = self._watch.lanes, self._watch.calls
        tensor, rows_of = self._torch.Tensor, self._rows_of

        def __getitem__(self: Any, index: Any) -> Any:
            if lanes.current in _OTHERS or lanes.current == BACKWARD:
                return original(self, index)
            first = index[0] if isinstance(index, tuple) and index else index
            is_advanced = isinstance(first, (tensor, list)) and self.dim() > 0
            if not is_advanced or get_ident() != lanes.thread:
                return original(self, index)
            began = perf_counter_ns()
            value = original(self, index)
            took = perf_counter_ns() - began
            calls.note("index", took, detail={"rows": rows_of(self, index, sys._getframe(1))})
            return value

        return __getitem__

    def _rows_of(self, data: Any, index: Any, frame: FrameType) -> list[list[int | None]]:
        line = frame.f_code.co_filename, frame.f_lineno
        result = self._places.setdefault(line, [])
        instruction = id(frame.f_code), frame.f_lasti
        place = self._known.get(instruction)
        if place is None:
            place = self._known[instruction] = _place(frame)
        key = (*line, *place)
        if not self._picks_rows(data, index):
            self._others.add(key)
        if key in self._others:
            result[:] = [item for item in result if item != place]
        elif place not in result and None not in place:
            result.append(place)
        return result

    def _picks_rows(self, data: Any, index: Any) -> bool:
        torch = self._torch
        is_list = isinstance(index, torch.Tensor) and index.dim() == 1 and index.numel() > 0
        if not is_list or index.dtype not in (torch.int64, torch.int32) or data.requires_grad:
            return False
        # On another device, a read would stall the host. No hooked method is used here, since its
        # call would be counted for the user's line.
        on_host = data.device.type == index.device.type == "cpu"
        return on_host and bool(torch.equal(index, index.abs()))


def _place(frame: FrameType) -> list[int | None]:
    positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, end_line, column, end_column = next(positions)
    return [line, column, end_line, end_column]
