"""How much of a batch is padding: the value that fills rows to the length of the longest."""

from __future__ import annotations

from typing import Any

# Fewer places in a row, or fewer rows, are no sequences.
_LEAST_PLACES, _LEAST_ROWS = 8, 2
# So many rows of a batch are looked at.
_ROWS = 16
# Share of the other places that may hold the same value: if it means something it is no padding.
_ELSEWHERE = 0.01


class Padding:
    """The batches of one model that were looked at.

    Attributes:
        lengths: how many places their rows had.
    """

    def __init__(self) -> None:
        self.lengths: set[int] = set()
        self._padded = self._places = 0

    def look(self, batch: Any) -> None:
        """Counts the padding of a batch of sequences; of anything else nothing."""
        is_words = batch.dim() == 2 and not batch.is_floating_point() and batch.dtype.itemsize > 1
        is_frames = batch.dim() == 3 and batch.is_floating_point()
        if not (is_words or is_frames) or batch.is_meta or batch.is_sparse:
            return
        if batch.shape[0] < _LEAST_ROWS or batch.shape[1] < _LEAST_PLACES:
            return
        batch = batch[:_ROWS].detach().cpu()
        self.lengths.add(batch.shape[1])
        self._places += batch.shape[0] * batch.shape[1]
        if is_frames:
            blank = (batch == 0).all(2)
            self._padded += max(_at_the_end(blank), _at_the_end(blank.flip(1)))
            return
        from_left = batch == batch[:, 0].mode().values
        from_right = batch == batch[:, -1].mode().values
        self._padded += max(_at_the_end(from_right), _at_the_end(from_left.flip(1)))

    @property
    def share(self) -> float | None:
        """Of the places that were looked at; None where no batch of sequences was."""
        return self._padded / self._places if self._places else None


def _at_the_end(is_value: Any) -> int:
    """How many places at the ends of the rows hold the value; none where it is found elsewhere."""
    runs = is_value.flip(1).int().cumprod(1).sum(1)
    padded = int(runs.sum())
    elsewhere = int(is_value.sum()) - padded
    if elsewhere > _ELSEWHERE * (is_value.numel() - padded) or int(runs.min()) == int(runs.max()):
        return 0
    return padded
