"""What a loop of one's own is given for batches whose features are kept."""

from __future__ import annotations

from functools import partial
from typing import Any

from flatout.data import Batch, Features, Source
from flatout.errors import DataError
from flatout.models import KeptInputs, autocast_now
from flatout.train.loop_state import LoopState


class GivenInputs:
    """Makes the inputs of a training loop.

    Attributes:
        template: the inputs of a sample on the device.
        are_read: whether the loop reads inputs besides the model, so that all are made.
    """

    def __init__(self, loop: LoopState) -> None:
        self.template: Any = None
        self.are_read = False
        self._loop = loop
        self._latest: tuple[KeptInputs, int] | None = None
        self._part: Source | None = None
        self._epoch = 0

    def begin(self, part: Source, epoch: int) -> None:
        """An epoch begins, of which this rank reads a part."""
        self._part, self._epoch, self._latest = part, epoch, None

    def over(self, batch: Batch, done: Batch, step: int) -> Batch:
        """The batch with inputs that a model takes for their features."""
        if not isinstance(done.inputs, Features):
            return done
        loop = self._loop
        with loop.autocast():
            now = autocast_now(loop.device.type)
        made = batch.inputs if batch.kept is None else None
        assert self._part is not None
        make = partial(self._make, self._part, self._epoch, step, batch.size)
        kept = KeptInputs(done.inputs, self.template, made, make, now)
        self._latest = kept, loop.step_count
        return done._replace(inputs=kept.given)

    def _make(self, part: Source, epoch: int, step: int, size: int) -> Any:
        batch = next(part.batches(epoch, step))
        if batch.size != size:
            raise DataError(
                f"{size - batch.size:,} samples whose features were kept cannot be read any more",
                do='look whether files are missing; input.features = "off" reads all of them',
            )
        return self._loop.ready(batch).inputs

    def must_restart(self) -> bool:
        """Whether batches are to be made whole from here on, as they were not yet."""
        if self._latest is None or not self._latest[0].was_read or self.are_read:
            return False
        self.are_read = True
        return True

    def is_refused(self) -> bool:
        """Whether a step was made without the features that were given; of one rank."""
        if self._latest is None or self._loop.world.size > 1:
            return False
        kept, step = self._latest
        return self._loop.step_count > step and not kept.was_served
