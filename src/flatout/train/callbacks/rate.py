"""Samples per second since the last measurement."""

from __future__ import annotations

from time import perf_counter


class Rate:
    """Measures throughput between two calls; `restart` leaves out the time between epochs."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, samples: int) -> None:
        """Start a measurement at this number of samples."""
        self._samples, self._at = samples, perf_counter()

    def samples_per_s(self, samples: int) -> float:
        """Return samples per second since the last call, and restart; 0 without a new step."""
        now = perf_counter()
        elapsed = max(now - self._at, 1e-9)
        rate = (samples - self._samples) / elapsed
        self._samples, self._at = samples, now
        return rate
