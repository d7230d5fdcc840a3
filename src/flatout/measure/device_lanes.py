"""Where the time of steps goes on a device that runs behind the host, such as a GPU.

There the host only queues what a step computes, so that its clock tells how long queueing took. At
the end of each lane an event goes into the device's stream, too; the device notes when it passes.
Events are read some steps later, when they have passed, and rows of the Timeline follow then:
nothing waits for the device but what waits for it anyway.

    lanes.begin()               a batch is there: what the step computes is queued from here on
    lanes.mark("forward")       the forward pass is queued
    ...
    lanes.record(...)           what the host's clock says of the step, as of Timeline.record

A step's lanes are what lies between its events. What lies between two steps' events is time in
which the device waited: as much of the host's lanes there (input, copy, host) as fits into it, all
by the same share. So a device that is always busy has no input lane, however long the host takes.
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
    """One that is queued.

    Attributes:
        first: the event with which it begins.
        ends: its lanes, each with the event where it ends.
        start: of the step, on the host's clock; all times are in ns.
        input, copy, others, frozen: of the host, before it queued the step.
        queueing: how long that took.
        host: of the host, after that.
        samples: of the step.
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
    """Writes the rows of a Timeline by what passed on the device. One thread uses it.

    Args:
        timeline: of the steps.
        new_event: makes an event that is timed.
        stream: gives the stream in which steps are queued.
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
        """How many have no row yet."""
        return len(self._queued) + (self._row is not None)

    @property
    def samples(self) -> int:
        """On how many these trained."""
        waiting = 0 if self._row is None else self._row[8]
        return waiting + sum(step.samples for step in self._queued)

    def forget(self) -> None:
        """Drop the steps whose rows are not written."""
        self._queued: deque[_Step] = deque()
        # The latest step that has passed: its row, until what follows it is known; its last event,
        # when that passed, and when the host had queued it.
        self._row: list[int] | None = None
        self._before: tuple[Event, int, int] | None = None

    def begin(self) -> None:
        """What a step computes is queued from here on."""
        self._stream = self._current()
        self._spare += [event for _, event in self._marks]
        self._marks = []
        self.mark("")

    def mark(self, lane: str) -> None:
        """What was queued since the mark before is of a lane; one may come several times."""
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
        """A step is queued; in ns, by the host's clock.

        Args:
            start: of the step, on `perf_counter_ns`' clock.
            input: it fetched its batch.
            copy: it brought the batch to the device.
            others: it waited for other ranks meanwhile.
            frozen: layers were computed whose results are kept.
            queueing: from the first mark to the last.
            host: what came after them.
            samples: of all ranks.
        """
        if not self._marks:
            self.begin()
        if len(self._marks) == 1:
            self.mark("forward")  # it was made in one piece
        (_, first), *ends = self._marks
        self._marks, self._stream = [], None
        self._queued.append(
            _Step(first, ends, start, input, copy, others, frozen, queueing, host, samples)
        )
        self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Write the rows of steps that have passed.

        Args:
            wait: for all of them; else for none.
        """
        try:
            while self._queued and (wait or self._queued[0].last.query()):
                if wait:
                    self._queued[0].last.synchronize()
                self._pass(self._queued.popleft())
        except RuntimeError:  # the device has failed: who trains is told elsewhere
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
    """Those of a CUDA device.

    Args:
        timeline: of the steps.
        device: a `torch.device`.
    """
    import torch

    return DeviceLanes(
        timeline,
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        lambda: torch.cuda.current_stream(device),
    )
