"""Global switches of torch that a script turns on, often for debugging, with their lines."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from flatout.hooks import wrap
from flatout.observe.watch import Watch


class Switches:
    """Record of calls of switches, and of their state at the first backward pass.

    Attributes:
        on: names of the switches that were on; None before that pass.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._renew()
        anomaly = torch.autograd.anomaly_mode
        for owner, name, switch in (
            (anomaly.set_detect_anomaly, "__init__", "detect_anomaly"),
            (anomaly.detect_anomaly, "__init__", "detect_anomaly"),
            (torch, "use_deterministic_algorithms", "deterministic_algorithms"),
            (torch, "set_default_dtype", "float64"),
        ):
            wrap(owner, name, "observe", self._noted, switch)
        watch.before_backward.append(self._look)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self.on: list[str] | None = None

    def _noted(self, original: Any, switch: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if get_ident() == self._watch.lanes.thread:
                self._watch.calls.note("switch", 0, detail={"name": switch})
            return value

        return call

    def _look(self, tensors: Any) -> None:
        if self.on is not None:
            return
        torch = self._torch
        states = {
            "detect_anomaly": torch.is_anomaly_enabled(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "float64": torch.get_default_dtype() == torch.float64,
        }
        self.on = [name for name, is_on in states.items() if is_on]
