"""Share of padding in a batch, the value that fills rows to the length of the longest row."""

from __future__ import annotations

from typing import Any

# _LEAST_PLACES: minimum number of tokens or frames in a row of a batch of sequences; _LEAST_ROWS:
# minimum number of rows.
_LEAST_PLACES, _LEAST_ROWS = 8, 2
# Maximum number of rows of a batch that are inspected.
_ROWS = 16
# Largest share of the positions outside of the padding that may hold the padding value; above this
# share, the value has a meaning.
_ELSEWHERE = 0.01


class Padding:
    """Padding in the inspected batches of one model.

    Attributes:
        lengths: different numbers of positions (tokens or frames) in the rows of a batch.
    """

    def __init__(self) -> None:
        self.lengths: set[int] = set()
        self._padded = self._places = 0
        self._channels = 2  # channel dimension of frames; 1 where convolutions take channels first

    def look(self, batch: Any) -> None:
        """Count the padding of a batch of sequences; ignore any other batch."""
        is_words = batch.dim() == 2 and not batch.is_floating_point() and batch.dtype.itemsize > 1
        is_frames = batch.dim() == 3 and batch.is_floating_point()
        if not (is_words or is_frames) or batch.is_meta or batch.is_sparse:
            return
        if batch.shape[0] < _LEAST_ROWS or max(batch.shape[1:]) < _LEAST_PLACES:
            return
        batch = batch[:_ROWS].detach().cpu()
        # numpy, since torch would wake its threads for these few numbers.
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
        """Share of padding in the inspected positions; None without a batch of sequences."""
        return self._padded / self._places if self._places else None


def most_common(values: Any) -> Any:
    """Return the most common value of an array, the smallest of several such values."""
    import numpy as np

    numbers, counts = np.unique(values, return_counts=True)
    return numbers[counts.argmax()]


def at_the_end(is_value: Any) -> int:
    """Return the number of positions at the ends of rows that hold the value.

    0 where the value also occurs elsewhere, or all rows end with equally many.
    """
    import numpy as np

    others = ~is_value[:, ::-1]
    runs = np.where(others.any(1), others.argmax(1), is_value.shape[1])
    padded = int(runs.sum())
    elsewhere = int(is_value.sum()) - padded
    if elsewhere > _ELSEWHERE * (is_value.size - padded) or int(runs.min()) == int(runs.max()):
        return 0
    return padded
