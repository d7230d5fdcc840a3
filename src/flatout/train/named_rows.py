"""Rows of samples without an index, such as samples of a DataLoader: identified by their bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatout.data import NamedStore, Numbered, Pipeline, Source, numbered

# Expected number of repeated samples from which, if no sample repeats, samples count as random. By
# chance no sample repeats in only one of e^20 cases.
_DUE = 20


@dataclass(frozen=True)
class NamedSamples:
    """Samples without numbers.

    Attributes:
        slots: number of samples in an epoch.
        variants: number of augmented versions per sample; always 1, since each version counts as a
            sample of its own.
    """

    slots: int
    variants: int = 1


def samples_of(source: Source) -> Numbered | NamedSamples | str:
    """Return a source's samples by index or else by bytes; or the reason against keeping them."""
    result = numbered(source)
    if not isinstance(result, str) or isinstance(source, Pipeline):
        return result
    if not source.samples:
        return "it is not known how many samples there are"
    return NamedSamples(source.samples)


class NamedRows:
    """A store's rows of samples without numbers.

    Attributes:
        samples, store: the samples, and the store that holds their rows.
        parts: number of tensors in a row.
        is_random: whether the samples of an epoch did not occur again in the next epoch.
    """

    def __init__(self, samples: NamedSamples, store: NamedStore, parts: int) -> None:
        self.samples, self.store, self.parts = samples, store, parts
        self.is_random = False
        self._found = store.kept  # rows of earlier runs, or of other data
        self._first: int | None = None  # the epoch in which rows were kept first
        self._kept = self._new = 0

    def count(self, there: npt.NDArray[np.bool_], epoch: int) -> None:
        """Count the samples of a batch that had a row."""
        new, self._first = int((~there).sum()), epoch if self._first is None else self._first
        if there.any():
            self._kept, self._new = 0, 0  # samples repeat, so counting ends
            self._first = -1
        elif epoch == self._first:
            self._kept += new
        elif self._first >= 0:
            self._new += new
            share = min(1.0, self._kept / self.samples.slots)
            self.is_random = self._new * share >= _DUE

    def drop(self) -> None:
        """Release the rows; delete them if no other run can use them."""
        if self._found:
            self.store.close()
        else:
            self.store.discard()
