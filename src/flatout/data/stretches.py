"""Epochs with a number of batches that the user sets, from any source."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from flatout.data.batches.batch import Batch
from flatout.data.execution.batch_sampler import check_start, check_steps
from flatout.data.source import Source
from flatout.errors import DataError


class Stretches:
    """A source whose epochs have `steps` batches each. An epoch continues where the last ended.

    When the source's own epoch ends, its next one begins. All other properties are the source's.

    Args:
        source: the source of the batches.
        steps: number of batches in an epoch.
        restarts: begin each epoch with the source's first batch, as a validation does.

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
        # Number of the present pass over the source, of its first batch, and of the next batch.
        self._pass, self._first, self._next = 0, 0, 0
        self._live: Iterator[Batch] | None = None

    @property
    def digest(self) -> str:
        """16 hex digits that differ for other data."""
        return self.of.digest

    @property
    def report(self) -> Any:
        """The maker of the source's batches, if it is chosen while batches are used."""
        return getattr(self.of, "report", None)

    @property
    def own_parts(self) -> Any:
        """The user's own objects that the source calls."""
        return getattr(self.of, "own_parts", ())

    def labels_range(self) -> tuple[int, int] | None:
        """Return the smallest and the largest target, if they are known."""
        return self.of.labels_range()

    def describe(self) -> str:
        """Return one line for the user."""
        return f"{self._steps:,} batches an epoch, of {self.of.describe()}"

    def peek(self, count: int) -> list[Batch]:
        """Return the first `count` batches of epoch 0, which epoch 0 then still contains."""
        return self.of.peek(min(count, self._steps))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs in addition to (epoch, step)."""
        if self.seekable:
            return {}
        return {"pass": self._pass, "first": self._first, "of": self.of.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        if not self.seekable:
            self._live = None
            self._pass, self._first = state["pass"], state["first"]
            self.of.load_state_dict(state["of"])

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from `start_step` on.

        Raises:
            DataError: the source has no batches, or cannot repeat them.
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
