"""The time of the parts of a step on an asynchronous device, such as a GPU.

With such a device the host only queues computations, so that its clock measures the time of
queueing. So an event is also queued at the end of each lane, and the device notes the time when it
reaches the event. Events are read some steps later, when they have passed, and rows of the Timeline
are written then. This adds no waiting for the device.

    lanes.begin()               a batch is there: the step's computations are queued from here on
    lanes.mark("forward")       the forward pass is queued
    ...
    lanes.record(...)           the host's times of the step, as for Timeline.record

A step's lanes are the times between its events. In the time between two steps' events the device
waited. It is assigned to the host's lanes of that time (input, copy, host), in proportion, up to
their length. So a device that is always busy has no input lane, however long the host takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from flatout.measure.timeline import Timeline

Event: TypeAlias = Any  # a `torch.cuda.Event`

_MARKED = ("forward", "backward", "sync", "optimizer")


@dataclass(slots=True)
class _Step:
    """A step that is queued.

    Attributes:
        first: the event at its begin.
        ends: its lanes, each with the event at its end.
        start: begin of the step on the host's clock; all times are in ns.
        input, copy, others, frozen: times of the host before it queued the step.
        queueing: time of queueing.
        host: time of the host after that.
        samples: number of samples of the step.
    """

    first: Event
    ends: list[tuple[str, Event]]
    start: int
    input: int
    copy: int
    others: int
    frozen: int
    queueing: int
    host: int
    samples: int

    @property
    def last(self) -> Event:
        return self.ends[-1][1]

    @property
    def before(self) -> int:
        return self.input + self.copy + self.others + self.frozen


class DeviceLanes:
    """Writes the rows of a Timeline by the device's times. For one thread.

    Args:
        new_event: creates an event that is timed.
    """

    def __init__(
        self, timeline: Timeline, new_event: Callable[[], Event], stream: Callable[[], Any]
    ) -> None:
        self._timeline = timeline
        self._new_event, self._current = new_event, stream
        self._spare: list[Event] = []
        self._marks: list[tuple[str, Event]] = []
        self._stream: Any = None
        self.forget()
        timeline.device = self

    @property
    def steps(self) -> int:
        """Number of steps that have no row yet."""
        return len(self._queued) + (self._row is not None)

    @property
    def samples(self) -> int:
        """Number of samples of the steps that have no row yet."""
        waiting = 0 if self._row is None else self._row[8]
        return waiting + sum(step.samples for step in self._queued)

    def forget(self) -> None:
        """Drop the steps whose rows are not written."""
        self._queued: deque[_Step] = deque()
        # _row: the row of the latest step that has passed, kept until the following time is known.
        # _before: that step's last event, the time when it passed, and the time when the host had
        # queued it.
        self._row: list[int] | None = None
        self._before: tuple[Event, int, int] | None = None

    def begin(self) -> None:
        """Note that the step's computations are queued from here on."""
        self._stream = self._current()
        self._spare += [event for _, event in self._marks]
        self._marks = []
        self.mark("")

    def mark(self, lane: str) -> None:
        """Assign work that was queued since the last mark to a lane, which may occur repeatedly."""
        if self._stream is not None:
            event = self._spare.pop() if self._spare else self._new_event()
            event.record(self._stream)
            self._marks.append((lane, event))

    def record(
        self,
        start: int,
        input: int,
        copy: int,
        others: int,
        frozen: int,
        queueing: int,
        host: int,
        samples: int,
    ) -> None:
        """Record the times of a queued step, in ns by the host's clock."""
        if not self._marks:
            self.begin()
        if len(self._marks) == 1:
            self.mark("forward")  # the step was computed in one piece
        (_, first), *ends = self._marks
        self._marks, self._stream = [], None
        self._queued.append(
            _Step(first, ends, start, input, copy, others, frozen, queueing, host, samples)
        )
        self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Write the rows of steps that have passed; with `wait`, those of all steps."""
        try:
            while self._queued and (wait or self._queued[0].last.query()):
                if wait:
                    self._queued[0].last.synchronize()
                self._pass(self._queued.popleft())
        except RuntimeError:  # the device has failed, which is reported elsewhere
            self.forget()
        if wait:
            self._write(1.0)

    def _pass(self, step: _Step) -> None:
        began = step.start + step.before
        if self._before is None:
            at, share = began, 1.0
        else:
            last, at, queued = self._before
            gap = _ns(last, step.first)
            share = min(1.0, max(0.0, gap / (began - queued))) if began > queued else 0.0
            at += gap
            self._spare.append(last)
        self._write(share)
        lane_ns, event = dict.fromkeys(_MARKED, 0), step.first
        for lane, after in step.ends:
            lane_ns[lane] += _ns(event, after)
            self._spare.append(event)
            event = after
        input, copy, others, frozen = (
            int(share * ns) for ns in (step.input, step.copy, step.others, step.frozen)
        )
        lane_ns["forward"] += frozen
        lane_ns["sync"] += others
        lanes = [input, copy, *lane_ns.values()]
        end = at - input - copy - others - frozen + sum(lanes)
        self._row = [end - sum(lanes), *lanes, step.host, step.samples]
        self._before = (step.last, end, began + step.queueing)

    def _write(self, share: float) -> None:
        row, self._row = self._row, None
        if row is not None:
            row[7] = int(share * row[7])
            self._timeline.record(*row)


def _ns(begin: Event, end: Event) -> int:
    ms: float = begin.elapsed_time(end)
    return max(0, round(ms * 1e6))


def cuda_lanes(timeline: Timeline, device: Any) -> DeviceLanes:
    """Return the lanes of a CUDA device."""
    import torch

    return DeviceLanes(
        timeline,
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        lambda: torch.cuda.current_stream(device),
    )
