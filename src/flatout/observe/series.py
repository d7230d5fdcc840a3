"""Series whose windows are the samples of a training or validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from flatout.observe.held_items import held_by, length_of
from flatout.observe.observation import Scaling
from flatout.observe.samples import as_array, behind_subsets, is_in_memory

# _FEWEST: minimum number of steps of a window; _NUMBERS: maximum number of values of a series.
_FEWEST, _NUMBERS = 4, 2**24
# Minimum number of successive equal rows that identify a position in a series.
_RUN = 8
# _AT_END: tolerance at the ends of a scaled range; _OFTEN: maximum number of a column's rows at an
# end; _MISSES: smallest distance from an end that counts as missed.
_AT_END, _OFTEN, _MISSES = 1e-6, 3, 5e-3


def series_of(dataset: Any) -> Any:
    """Return the series that a dataset takes windows of, or holds as windows one step apart.

    The array has steps by columns. None for any other dataset.
    """
    inner, picked = behind_subsets(dataset)
    span = _span(picked, length_of(inner) or 0)
    if span is None:
        return None
    result = _of_windows(inner, *span)
    return _held(inner, *span) if result is None else result


def _span(picked: Sequence[int] | None, length: int) -> tuple[int, int] | None:
    if picked is None:
        return (0, length) if length else None
    first, last = min(picked, default=0), max(picked, default=0)
    is_whole = len(picked) > 1 and last - first + 1 == len(picked) == len(set(picked))
    return (first, last + 1) if is_whole else None


def _of_windows(dataset: Any, first: int, end: int) -> Any:
    import numpy as np

    tensors = getattr(dataset, "tensors", None)
    parts = list(tensors) if isinstance(tensors, tuple) else [*_arrays_in(dataset)]
    if not parts or not _is_series(parts[0]) or parts[0].ndim not in (2, 3):
        return None
    windows = as_array(parts[0])
    if windows.ndim == 2:
        windows = windows[:, :, None]
    if windows.shape[1] < _FEWEST or len(windows) < end or not _follow(windows):
        return None
    result = np.concatenate([windows[first], windows[first + 1 : end, -1]])
    if len(parts) > 1 and is_in_memory(parts[1]) and len(parts[1]) == len(windows):
        later = as_array(parts[1]).reshape(len(windows), -1)
        # The first target continues the series where the first window ends.
        if windows.shape[2] == 1 and later[0, 0] == windows[1, -1, 0]:
            result = np.concatenate([result, later[end - 1][:, None].astype(result.dtype)])
    return result


def _follow(windows: Any) -> bool:
    some = {0, len(windows) // 3, len(windows) // 2, len(windows) - 2}
    return len(windows) > _RUN and all(
        bool((windows[step, 1:] == windows[step + 1, :-1]).all()) for step in some
    )


def _held(dataset: Any, first: int, end: int) -> Any:
    length = length_of(dataset) or 0
    candidates = [
        item
        for item in _arrays_in(dataset)
        if _is_series(item) and item.ndim < 3 and length < len(item) <= 2 * length
    ]
    if not candidates:
        return None
    widest = as_array(max(candidates, key=lambda item: prod(item.shape[1:])))
    behind = len(widest) - length
    return widest.reshape(len(widest), -1)[first : end + behind]


def _arrays_in(dataset: Any) -> Iterator[Any]:
    return (item for item in held_by(dataset) if is_in_memory(item) and item.ndim)


def _is_series(value: Any) -> bool:
    array = as_array(value[:1]) if is_in_memory(value) and value.ndim and len(value) else None
    return array is not None and array.dtype.kind == "f" and prod(value.shape) <= _NUMBERS


def place_in(series: Any, whole: Any) -> int | None:
    """Return the step of `whole` at which `series` begins; None where it is no part of it."""
    import numpy as np

    if whole.ndim != 2 or whole.shape[1] != series.shape[1] or len(series) <= _RUN:
        return None
    run = series[:_RUN].astype("float32")
    first = np.flatnonzero((whole.astype("float32") == run[0]).all(1))
    for step in first[:64].tolist():
        other = whole[step : step + _RUN].astype("float32")
        if other.shape == run.shape and bool((other == run).all()):
            return int(step)
    return None


def joined(trained: Any, held_out: Any) -> Any:
    """Return both series as a single series, with their common part once."""
    import numpy as np

    begin = place_in(held_out, trained)
    return np.concatenate([trained, held_out[0 if begin is None else len(trained) - begin :]])


def scaled_to_range(trained: Any, both: Any) -> Scaling | None:
    """Return the scaling of both series together to a range, by their minimum and maximum.

    None unless each column of both series together spans 0 to 1, or -1 to 1, and reaches these ends
    in few rows, while the training series alone does not.
    """
    varied = both.std(0) > 0
    if not varied.any() or both.shape[1] != trained.shape[1]:
        return None
    both, trained = both[:, varied], trained[:, varied]
    low, high = both.min(0), both.max(0)
    is_range = (abs(high - 1) < _AT_END).all() and (
        (abs(low) < _AT_END).all() or (abs(low + 1) < _AT_END).all()
    )
    often = max(int((both == end).sum(0).max()) for end in (low, high))
    misses = max(float((trained.min(0) - low).max()), float((high - trained.max(0)).max()))
    if not is_range or often > _OFTEN or misses < _MISSES:
        return None
    count = len(both)
    return Scaling("minimum and maximum", None, count, count - len(trained), None, None, misses)
