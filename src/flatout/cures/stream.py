"""script.cache=memory for an IterableDataset: samples that are equal in two epochs are kept.

Such samples have no indices, but positions in an epoch. Samples of the first epoch are kept;
samples of the second epoch are made again and compared. From the third epoch on, equal samples come
from memory, and the dataset is iterated only for later samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flatout.cures import record
from flatout.cures.record import leave
from flatout.cures.sample_store import Columns, Form, are_same, form_of, is_memory_short
from flatout.data import Attributes, random_state, same_state

# Bytes of the interpreter's memory for a stored sample, in addition to its data.
_OF_A_ROW = 200
_FILLED = 3  # number of the epoch that begins with a full cache
_END = object()


class Stream:
    """Samples of an epoch of an iterable dataset, as far as the samples are known.

    Attributes:
        is_kept: True if samples may be kept; False once keeping has been given up.
    """

    def __init__(self, field: str, dataset: Any, room: int) -> None:
        self.is_kept = True
        self._field = field
        self._name = type(dataset).__name__
        self._room = room
        self._before = Attributes(dataset)
        self._epochs = 0
        self._rows: list[tuple[Form, Columns]] = []
        self._alike = 0  # number of first samples that were equal in two epochs
        self._length: int | None = None
        self._ends = 0  # number of epochs that ended at `_length`

    def epoch(self, dataset: Any, made: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over an epoch, with kept samples where possible."""
        changed = self._before.changed(dataset)
        if self.is_kept and changed:
            self._give_up(f"{changed} is different in each epoch")
        self._epochs += 1
        record.fill(is_full=not self.is_kept or self._epochs >= _FILLED)
        return self._given(made) if self.is_kept else made

    def _given(self, made: Iterator[Any]) -> Iterator[Any]:
        at = behind = 0
        while True:
            if at < self._alike:
                form, kept = self._rows[at]
                (sample,) = form.samples(_copy(kept))
                behind += 1
            elif at == self._length and self._ends > 1:
                return
            else:
                while behind:  # first skip the samples that came from memory
                    next(made, _END)
                    behind -= 1
                sample = self._made(at, made)
                if sample is _END:
                    return
            at += 1
            yield sample

    def _made(self, at: int, made: Iterator[Any]) -> Any:
        if not self.is_kept:
            return next(made, _END)
        before = random_state()
        sample = next(made, _END)
        if not same_state(before, random_state()):
            self._give_up(f"{self._name} draws random numbers")
        elif sample is _END:
            self._ended(at)
        elif at == self._length:
            self._give_up(f"{self._name} gives more samples than in the epoch before")
        elif at == len(self._rows):
            self._keep(sample)
        else:
            self._compare(at, sample)
        return sample

    def _keep(self, sample: Any) -> None:
        form = self._rows[-1][0] if self._rows else None
        columns = form.columns(sample) if form else None
        if columns is None:
            form = form_of(sample)
            columns = form.columns(sample) if form else None
        if form is None or columns is None:
            why = "are not made of tensors, arrays and numbers alone"
            self._give_up(f"samples of {self._name} {why}")
            return
        self._rows.append((form, _copy(columns)))
        self._room -= form.bytes + _OF_A_ROW
        if self._room < 0 or is_memory_short(len(self._rows)):
            self._give_up(f"memory has no room for the samples of {self._name}")

    def _compare(self, at: int, sample: Any) -> None:
        form, kept = self._rows[at]
        now = form.columns(sample)
        if now is None or not are_same(now, kept):
            self._give_up(f"samples of {self._name} are not the same in each epoch")
        elif at == self._alike:
            self._alike += 1

    def _ended(self, at: int) -> None:
        if at < len(self._rows):
            self._give_up(f"{self._name} gives fewer samples than in the epoch before")
        else:
            self._length = at
            self._ends += 1

    def _give_up(self, why: str) -> None:
        leave(self._field, why)
        record.fill(is_full=True)
        self.is_kept = False
        self._rows, self._alike, self._length = [], 0, None


def _copy(columns: Columns) -> Columns:
    return {part: values.copy() for part, values in columns.items()}
