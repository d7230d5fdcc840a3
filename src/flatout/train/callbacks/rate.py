"""Samples per second since the last look."""

from __future__ import annotations

from time import perf_counter


class Rate:
    """Measures throughput between two looks; what lies between epochs is left out by `restart`."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, samples: int) -> None:
        """Begin to measure where so many samples were trained on."""
        self._samples, self._at = samples, perf_counter()

    def samples_per_s(self, samples: int) -> float:
        """Return samples per second since the last look, and restart; 0 without a new step."""
        now = perf_counter()
        elapsed = max(now - self._at, 1e-9)
        rate = (samples - self._samples) / elapsed
        self._samples, self._at = samples, now
        return rate
