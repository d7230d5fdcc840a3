"""Epochs of as many batches as the user says, of any source."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from flatout.data.batch import Batch
from flatout.data.execution.batch_sampler import check_start, check_steps
from flatout.data.source import Source
from flatout.errors import DataError


class Stretches:
    """A source of which an epoch is a stretch of so many batches, and the next one goes on from it.

    Where the source's own epoch ends within a stretch, its next one begins. All else is the
    source's.

    Args:
        source: of batches.
        steps: batches of a stretch.
        restarts: each stretch begins with the source's first batch, as a validation does.

    Raises:
        DataError: `steps` is no whole number above 0.
    """

    def __init__(self, source: Source, steps: int, *, restarts: bool = False) -> None:
        check_steps(steps)
        self.of = source
        self.steps: int | None = steps
        self.counted = True
        self.seekable = source.seekable and source.steps is not None
        self.samples: int | None = None
        self.batch_size = source.batch_size
        self._steps, self._restarts = steps, restarts
        # The present pass over the source, the number of the first batch of it, and of the next.
        self._pass, self._first, self._next = 0, 0, 0
        self._live: Iterator[Batch] | None = None

    @property
    def digest(self) -> str:
        """16 hex digits that differ for other data."""
        return self.of.digest

    @property
    def report(self) -> Any:
        """Who makes the source's batches, where that is found while they are used."""
        return getattr(self.of, "report", None)

    @property
    def own_parts(self) -> Any:
        """What of the user's own the source calls."""
        return getattr(self.of, "own_parts", ())

    def labels_range(self) -> tuple[int, int] | None:
        """Smallest and largest target, where that is known."""
        return self.of.labels_range()

    def describe(self) -> str:
        """One line for people."""
        return f"{self._steps:,} batches an epoch, of {self.of.describe()}"

    def peek(self, count: int) -> list[Batch]:
        """Up to `count` first batches of epoch 0, without using them up."""
        return self.of.peek(min(count, self._steps))

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs besides (epoch, step)."""
        if self.seekable:
            return {}
        return {"pass": self._pass, "first": self._first, "of": self.of.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        if not self.seekable:
            self._live = None
            self._pass, self._first = state["pass"], state["first"]
            self.of.load_state_dict(state["of"])

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of a stretch from `start_step` on.

        Raises:
            DataError: the source gives no more, or cannot give these again.
        """
        check_start(start_step, self._steps)
        number = start_step if self._restarts else epoch * self._steps + start_step
        whole = self.of.steps if self.seekable else None
        if whole is not None:
            self._pass, behind = divmod(number, whole)
            self._begin(self._pass, number - behind, behind)
        elif self._live is None and number >= self._first:
            self._begin(self._pass, self._first, number - self._first)
        elif number != self._next or self._restarts:
            self._begin(0, 0, 0)
            for _ in islice(self._forward(), number):
                pass
        return islice(self._forward(), self._steps - start_step)

    def _begin(self, number: int, first: int, start: int) -> None:
        """Open a pass at one of its batches."""
        self._pass, self._first, self._next = number, first, first + start
        self._live = self.of.batches(number, start)

    def _forward(self) -> Iterator[Batch]:
        while True:
            assert self._live is not None
            before = self._next
            for batch in self._live:
                self._next += 1
                yield batch
            if before == self._next == self._first:
                raise DataError("the source gives no batches", where=self.of.describe())
            self._begin(self._pass + 1, self._next, 0)
