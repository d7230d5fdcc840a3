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
        self._channels = 2  # of frames; 1 where convolutions take them first

    def look(self, batch: Any) -> None:
        """Counts the padding of a batch of sequences; of anything else nothing."""
        is_words = batch.dim() == 2 and not batch.is_floating_point() and batch.dtype.itemsize > 1
        is_frames = batch.dim() == 3 and batch.is_floating_point()
        if not (is_words or is_frames) or batch.is_meta or batch.is_sparse:
            return
        if batch.shape[0] < _LEAST_ROWS or max(batch.shape[1:]) < _LEAST_PLACES:
            return
        batch = batch[:_ROWS].detach().cpu()
        # By numpy: torch's threads would wake up for so few numbers.
        rows = (batch.float() if batch.dtype.itemsize == 2 else batch).numpy()
        if is_frames:
            found = []
            for channels in (self._channels, 3 - self._channels):
                blank = ~rows.any(channels)
                padded = max(at_the_end(blank), at_the_end(blank[:, ::-1]))
                found.append((padded / max(1, blank.size), channels, padded, blank))
            _, self._channels, padded, blank = max(found, key=lambda item: item[0])
            self._count(padded, blank)
            return
        from_left = rows == most_common(rows[:, 0])
        from_right = rows == most_common(rows[:, -1])
        self._count(max(at_the_end(from_right), at_the_end(from_left[:, ::-1])), from_left)

    def _count(self, padded: int, places: Any) -> None:
        if places.shape[1] >= _LEAST_PLACES:
            self.lengths.add(places.shape[1])
            self._places += places.size
            self._padded += padded

    @property
    def share(self) -> float | None:
        """Of the places that were looked at; None where no batch of sequences was."""
        return self._padded / self._places if self._places else None


def most_common(values: Any) -> Any:
    """Of the numbers of an array; the smallest of several."""
    import numpy as np

    numbers, counts = np.unique(values, return_counts=True)
    return numbers[counts.argmax()]


def at_the_end(is_value: Any) -> int:
    """How many places at the ends of the rows of an array hold the value; none where it is found
    elsewhere."""
    import numpy as np

    others = ~is_value[:, ::-1]
    runs = np.where(others.any(1), others.argmax(1), is_value.shape[1])
    padded = int(runs.sum())
    elsewhere = int(is_value.sum()) - padded
    if elsewhere > _ELSEWHERE * (is_value.size - padded) or int(runs.min()) == int(runs.max()):
        return 0
    return padded
