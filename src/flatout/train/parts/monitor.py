"""Outputs of a Loop: its Timeline, the file that `flatout top` reads, and the Profile of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter_ns as clock
from typing import Any

from flatout.measure import Live, RanksOnHost, StepTimes
from flatout.train.loop_state import LoopState
from flatout.train.part import Done, Lanes, Part, Step
from flatout.train.recording import RunRecording


class Monitor(Part):
    """Records each step in the Timeline, and writes the measurements now and then.

    Args:
        loop: the Loop whose steps are recorded in its `timeline`.

    Attributes:
        recording: writes the Profile of a run folder; None without a run folder.
    """

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop
        self._live: Live | None = None
        self.recording: RunRecording | None = None
        # Time at which the live file or the recording is next due, on the clock of steps.
        self._due = sys.maxsize
        self._stepped = 0  # clock at the end of the latest step, in ns

    def begin(self, facts: tuple[dict[str, Any], float | None] | None) -> None:
        """Start after `prepare`: from now on `flatout top` shows the steps.

        Args:
            facts: `model_facts` and `bytes_per_sample`, for a Profile; None for no Profile.
        """
        loop, world, here = self._loop, self._loop.world, self._loop.world.place
        self._live = Live(
            loop.timeline,
            rank=world.rank,
            world_size=world.size,
            job=None if world.size == 1 else f"{here.address}:{here.port}",
            run=loop.run,
        )
        self.recording = None if facts is None else RunRecording(loop, *facts)
        self._due = 0

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step, and record when it has ended."""
        done = run(step)
        self._stepped = clock()
        return done

    def after_step(self, step: Step, done: Done) -> None:
        """Record the times of the step and the samples of all ranks."""
        loop = self._loop
        start, fetch, copy, others = loop.feed.lanes
        # Frozen layers may have been computed before the step.
        features = loop.feed.features
        frozen = 0 if features is None else features.taken()
        samples = loop.feed.samples_of(step.batches, loop.world.size)
        now, stepped = clock(), self._stepped
        device = loop.stepper.lanes
        if device is None:
            loop.timeline.record(
                start,
                fetch,
                copy,
                done.forward + frozen,
                done.backward,
                done.sync + others,
                done.optimizer,
                now - stepped,
                samples,
            )
        else:
            queueing = done.forward + done.backward + done.sync + done.optimizer
            device.record(start, fetch, copy, others, frozen, queueing, now - stepped, samples)
        if now >= self._due:
            self._look(now)

    def captured_step(self, lanes: Lanes, took: int, stepped: int, samples: int) -> None:
        """Record a step that a compiled graph has made.

        Args:
            lanes: times of the step's batches, as in `Feed.lanes`.
            took: time of the step, in ns.
            stepped: clock when the step had ended, in ns.
            samples: number of samples, over all ranks.
        """
        start, fetch, copy, others = lanes
        now = clock()
        self._loop.timeline.record(start, fetch, copy, took, 0, others, 0, now - stepped, samples)
        if now >= self._due:
            self._look(now)

    def _look(self, now: int) -> None:
        """Write the live file and measure the resources in use, if enough time has passed."""
        assert self._live is not None
        if now >= self._live.due:
            self._live.write()
        self._due = self._live.due
        if self.recording is not None:
            if now >= self.recording.due:
                self.recording.look()
            self._due = min(self._due, self.recording.due)

    def keep_notes(self, notes: list[str]) -> None:
        """Keep lines that the user got, for the Profile."""
        if self.recording is not None:
            self.recording.notes += notes

    def keep_step_times(self, times: list[StepTimes], beside: list[RanksOnHost]) -> None:
        """Keep measured step times for the Profile."""
        if self.recording is not None:
            self.recording.step_times = times
            self.recording.ranks_on_host = beside

    def meet(self) -> None:
        """Gather the records of all ranks for the Profile; all ranks call it."""
        if self.recording is not None:
            self.recording.meet()

    def end(self, error: BaseException | None) -> None:
        """Write how the run ended, with an error or without."""
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.close(error)

    def close(self, error: BaseException | None) -> None:
        """Remove the live file."""
        if self._live is not None:
            self._live.close()
            self._live = None
            self._due = sys.maxsize
