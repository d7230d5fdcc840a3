"""Tensors that leave a device and return in the same step, followed in a few steps only."""

from __future__ import annotations

from typing import Any

from flatout.observe.watch import Watch

# _FROM: step after which tensors are followed; _STEPS: number of steps in which they are followed.
_FROM, _STEPS = 3, 6


class RoundTrips:
    """Record of the host memory that tensors were copied to, to recognize copies of it back.

    Results computed from the copy lie elsewhere, and are not recognized.

    Attributes:
        is_open: whether tensors are followed now.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._step = -1
        # Kept alive until the end of the step, so that no other tensor gets the same address.
        self._held: dict[int, Any] = {}
        self.is_open = False
        watch.at(_FROM, self._open)

    def _open(self) -> None:
        self.is_open = True
        self._watch.at(_FROM + _STEPS, self._close)

    def _close(self) -> None:
        self.is_open = False
        self._held.clear()
        self._watch.calls.spread("round_trip", _STEPS)

    def to_host(self, on_host: Any) -> None:
        """Record a copy `on_host` of a tensor from a device."""
        if self._step != self._watch.lanes.steps:
            self._held.clear()
            self._step = self._watch.lanes.steps
        self._held[on_host.untyped_storage().data_ptr()] = on_host

    def to_device(self, on_host: Any, took_ns: int) -> None:
        """Record a copy of the host tensor `on_host` to a device, if it is a round trip."""
        is_this_step = self._step == self._watch.lanes.steps
        if is_this_step and on_host.untyped_storage().data_ptr() in self._held:
            self._watch.calls.note("round_trip", took_ns, depth=3)
