"""Rows of samples that have no numbers, such as those of a DataLoader: known by their bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatout.data import NamedStore, Numbered, Pipeline, Source, numbered

# Where so many samples would have to come again, and none does, they are changed at random: by
# chance that happens once in e^20 times.
_DUE = 20


@dataclass(frozen=True)
class NamedSamples:
    """Samples without numbers.

    Attributes:
        slots: how many an epoch has.
        variants: 1: each that differs counts as another sample.
    """

    slots: int
    variants: int = 1


def samples_of(source: Source) -> Numbered | NamedSamples | str:
    """Its samples by number, or else by their bytes; a text where they cannot be kept: why."""
    result = numbered(source)
    if not isinstance(result, str) or isinstance(source, Pipeline):
        return result
    if not source.samples:
        return "it is not known how many samples there are"
    return NamedSamples(source.samples)


class NamedRows:
    """A store's rows of such samples.

    Attributes:
        samples, store, parts: as above.
        is_random: whether samples of an epoch did not come again in the next one.
    """

    def __init__(self, samples: NamedSamples, store: NamedStore, parts: int) -> None:
        self.samples, self.store, self.parts = samples, store, parts
        self.is_random = False
        self._found = store.kept  # by earlier runs, or of other data
        self._first: int | None = None  # the epoch in which rows were kept first
        self._kept = self._new = 0

    def count(self, there: npt.NDArray[np.bool_], epoch: int) -> None:
        """Take note of which samples of a batch had a row."""
        new, self._first = int((~there).sum()), epoch if self._first is None else self._first
        if there.any():
            self._kept, self._new = 0, 0  # they come again: asked no more
            self._first = -1
        elif epoch == self._first:
            self._kept += new
        elif self._first >= 0:
            self._new += new
            share = min(1.0, self._kept / self.samples.slots)
            self.is_random = self._new * share >= _DUE

    def drop(self) -> None:
        """Let go of the rows; remove them where no one can ask for them again."""
        if self._found:
            self.store.close()
        else:
            self.store.discard()
