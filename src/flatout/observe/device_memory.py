"""Memory of the GPU on which the model computes: the amount held between steps, and the peak."""

from __future__ import annotations

from typing import Any

from flatout.observe.observation import Observation
from flatout.observe.watch import Watch

# Steps after which memory is read, from 2 on, since optimizers make their state in step 1.
_STEPS = (2, 10, 50)


class DeviceMemory:
    """Values of the counters of torch's allocator, which are read without a wait for a kernel."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._held: list[int] = []
        for step in _STEPS:
            watch.at(step, self._look)
        watch.on_renewal.append(self._held.clear)

    def _look(self) -> None:
        if self._torch.cuda.is_initialized():
            self._held.append(self._torch.cuda.memory_allocated())

    def fill(self, observation: Observation) -> None:
        """Add the memory to an Observation."""
        cuda = self._torch.cuda
        if not (observation.device.startswith("cuda") and cuda.is_initialized()):
            return
        if self._held:
            observation.device_held_mb = min(self._held) / 2**20
        observation.device_peak_mb = cuda.max_memory_allocated(observation.device) / 2**20
        observation.device_total_mb = (
            cuda.get_device_properties(observation.device).total_memory / 2**20
        )
        observation.device_failures = int(cuda.memory_stats(observation.device).get("num_ooms", 0))
