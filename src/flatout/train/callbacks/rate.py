"""Samples per second since the last look."""

from __future__ import annotations

from time import perf_counter


class Rate:
    """Measures throughput between two looks; what lies between epochs is left out by `restart`."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin to measure at this step."""
        self._step, self._at = step, perf_counter()

    def samples_per_s(self, step: int, batch_size: int) -> float:
        """Return samples per second since the last look, and begin anew; 0 without a new step."""
        now = perf_counter()
        elapsed = max(now - self._at, 1e-9)
        rate = (step - self._step) * batch_size / elapsed
        self._step, self._at = step, now
        return rate
