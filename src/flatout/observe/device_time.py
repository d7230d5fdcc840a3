"""Activity of a GPU per step, measured by torch's profiler in some steps that are not timed.

The host only queues work on a GPU, so its lanes show where it waited, but not for what. The
profiler records when each kernel and copy ran, and when the host queued it. Work on the GPU belongs
to the lane in which it was queued.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import time_ns
from typing import Any, NamedTuple

from flatout.hooks import Hook, unnumbered, wrap
from flatout.observe.ablation import usual_step_s
from flatout.observe.observation import DeviceTime, Observation
from flatout.observe.watch import Watch

# _FEWEST, _MOST: limits of the number of profiled steps; _SECONDS: seconds that the profiled steps
# should take together.
_FEWEST, _MOST, _SECONDS = 2, 20, 0.5
# Number of first profiled steps that are dropped, since the profiler sets itself up in them.
_WARM = 1
# Maximum number of kernels whose names are reported.
_NAMED = 5
_TO_DEVICE, _TO_HOST, _PAGEABLE = "Memcpy HtoD", "Memcpy DtoH", "Pageable"
_COPY = "Memcpy"


class Ran(NamedTuple):
    """A kernel or a copy: name, start and end of its run, and queue time, in ns since the epoch."""

    name: str
    began: int
    ended: int
    queued: int


class DeviceSteps:
    """Profiler of some steps of a script that trains on a GPU.

    To be made when torch is imported: an optimizer's hooks cannot be changed while it steps.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch, self._watch = torch, watch
        self._profiler: Any = None
        self._hook: Hook | None = None
        self._marks: list[tuple[int, str]] = []
        self._steps = 0
        if torch.backends.cuda.is_built():
            module = sys.modules["torch.optim.optimizer"]  # torch.optim has no such attribute
            unnumbered(module.register_optimizer_step_pre_hook(lambda *_: self._mark("optimizer")))
            unnumbered(module.register_optimizer_step_post_hook(lambda *_: self._mark("forward")))

    def begin(self, observation: Observation, then: Callable[[], None]) -> None:
        """Profile the next steps, add the result to `observation`, then call `then`."""
        if not (observation.device.startswith("cuda") and self._torch.cuda.is_initialized()):
            then()
            return
        self._steps = min(max(math.ceil(_SECONDS / usual_step_s(observation)), _FEWEST), _MOST)
        call_at, first = self._watch.at, self._watch.lanes.steps + 1
        call_at(first, lambda: self._try(self._start, observation))
        call_at(first + _WARM, self._mark_begin)
        call_at(first + _WARM + self._steps, lambda: self._try(self._stop, observation))
        call_at(first + _WARM + self._steps, then)

    def _try(self, look: Callable[[Observation], None], observation: Observation) -> None:
        try:
            look(observation)
        except Exception as error:  # raised by the profiler, which needs more than CUDA does
            self.end()
            observation.notes.append(f"device: torch's profiler has failed: {error!r}")

    def _start(self, observation: Observation) -> None:
        self._hook = wrap(self._torch.autograd, "backward", "ablation", self._around)
        profiler = self._torch.profiler
        self._torch.cuda.synchronize()
        self._profiler = profiler.profile(activities=[profiler.ProfilerActivity.CUDA])
        self._profiler.start()

    def _around(self, original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._mark("backward")
            try:
                return original(*args, **kwargs)
            finally:
                self._mark("forward")

        return backward

    def _mark(self, lane: str) -> None:
        if self._hook is not None:
            self._marks.append((time_ns(), lane))

    def _mark_begin(self) -> None:
        self._torch.cuda.synchronize()
        self._marks.clear()
        self._mark("forward")

    def _stop(self, observation: Observation) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._torch.cuda.synchronize()
        ended = time_ns()
        self.end()
        profiler.stop()
        began = self._marks[0][0] if self._marks else 0
        ran = [
            item for item in _ran(profiler.profiler.kineto_results) if began <= item.began < ended
        ]
        if ran:
            observation.device_time = device_time(ran, self._marks, self._steps)
            observation.device_time.step_ms = (ended - began) / 1e6 / self._steps
        else:
            observation.notes.append("device: torch's profiler has seen no kernel of the GPU")

    def end(self) -> None:
        """Stop profiling, even if the script ended within a profiled step."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with suppress(Exception):
                profiler.stop()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _ran(results: Any) -> Iterable[Ran]:
    events = results.events()
    on_gpu = [event for event in events if _is_on_gpu(event)]
    queued = {event.correlation_id(): event.start_ns() for event in events if not _is_on_gpu(event)}
    for event in on_gpu:
        began = event.start_ns()
        queued_at = queued.get(event.correlation_id(), began)
        yield Ran(event.name(), began, began + event.duration_ns(), queued_at)


def _is_on_gpu(event: Any) -> bool:
    return str(event.device_type()).endswith("CUDA") and event.duration_ns() > 0


def device_time(ran: Sequence[Ran], marks: Sequence[tuple[int, str]], steps: int) -> DeviceTime:
    """Return the activity of a GPU per step."""
    kernels: Counter[str] = Counter()
    lanes: Counter[str] = Counter(dict.fromkeys(("forward", "backward", "optimizer"), 0))
    copies: Counter[str] = Counter()
    times = [ns for ns, _ in marks]
    for item in ran:
        ns = item.ended - item.began
        if item.name.startswith((_TO_DEVICE, _TO_HOST)):
            copies[item.name[: len(_TO_DEVICE)]] += ns
        else:
            mark = bisect_right(times, item.queued) - 1
            lanes[marks[mark][1] if mark >= 0 else "forward"] += ns
        if not item.name.startswith(_COPY):
            kernels[item.name] += ns
    per_ms = 1e6 * steps
    to_device = [item for item in ran if item.name.startswith(_TO_DEVICE)]
    return DeviceTime(
        steps=steps,
        busy_ms=_busy_ns(ran) / per_ms,
        lanes_ms={lane: ns / per_ms for lane, ns in lanes.items()},
        to_device_ms=copies[_TO_DEVICE] / per_ms,
        to_host_ms=copies[_TO_HOST] / per_ms,
        is_pageable=any(_PAGEABLE in item.name for item in to_device),
        kernels=[(name, ns / per_ms) for name, ns in kernels.most_common(_NAMED)],
        launches=len(ran) / steps,
    )


def _busy_ns(ran: Iterable[Ran]) -> int:
    busy = until = 0
    for item in sorted(ran, key=lambda value: value.began):
        busy += max(0, item.ended - max(item.began, until))
        until = max(until, item.ended)
    return busy
