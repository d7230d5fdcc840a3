"""Samples that a dataset holds in lists, in rows of a data frame, or by file names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flatout.observe.chance import bits_of

# _ITEMS: maximum number of samples that are hashed; _NUMBERS: maximum number of values that are
# hashed of each sample.
_ITEMS, _NUMBERS = 2**16, 128
# Minimum number of different numbers in a sample: samples with fewer may be equal by chance.
_DIFFERENT = 16
# Maximum number of samples whose different numbers are counted.
_ASKED = 64
_ENDING = re.compile(r"\.[A-Za-z0-9]{1,5}$")


def table_of_items(dataset: Any, picked: Sequence[int] | None) -> Any:
    """Return an array with one row per tensor or array in the list that the dataset holds or is.

    None where their shapes differ.
    """
    import numpy as np

    for items in _lists_in(dataset):
        arrays = [_first_array(items[index]) for index in _chosen(items, picked)]
        shapes = {None if array is None else (array.shape, array.dtype) for array in arrays}
        if len(shapes) == 1 and None not in shapes and arrays[0].size > 1:
            return np.stack(arrays)
    return None


def numbers_of_items(dataset: Any, picked: Sequence[int] | None) -> list[int] | None:
    """Return a hash of each tensor or array in the list that the dataset holds or is."""
    for items in _lists_in(dataset):
        arrays = [_first_array(items[index]) for index in _chosen(items, picked)]
        if not arrays or any(array is None for array in arrays):
            continue
        if all(len({*array.tolist()}) >= _DIFFERENT for array in arrays[:_ASKED]):
            return [hash((array.shape, array.tobytes())) for array in arrays]
    return None


def numbers_of_names(dataset: Any, picked: Sequence[int] | None) -> list[int] | None:
    """Return a hash of each sample's file, by its name or by its row of a data frame."""
    folder = tuple(sorted({os.path.realpath(item) for item in _folders_of(dataset)}))
    for items in _lists_in(dataset):
        names = [_name_in(items[index]) for index in _chosen(items, picked)]
        if names and all(name is not None for name in names):
            return [hash(name if os.path.isabs(str(name)) else (folder, name)) for name in names]
    for frame in _frames_in(dataset):
        rows = frame.iloc[list(_chosen(frame, picked)), :_NUMBERS]
        if len(rows) and any(_is_name(value) for value in rows.iloc[0]):
            return [hash((folder, *row)) for row in rows.itertuples(index=False, name=None)]
    return None


def numbers_of_frame(dataset: Any, picked: Sequence[int] | None) -> tuple[list[int] | None, float]:
    """Return a hash of each row of a data frame of all samples, and the bits of a row.

    None without a data frame. The bits are an upper limit of the bits that distinguish rows.
    """
    folder = tuple(sorted({os.path.realpath(item) for item in _folders_of(dataset)}))
    pandas: Any = sys.modules.get("pandas")
    for frame in _frames_in(dataset):
        rows = frame.iloc[list(_chosen(frame, picked)), :_NUMBERS]
        try:
            bits = bits_of(rows.apply(lambda column: pandas.factorize(column)[0]).to_numpy())
            numbers = pandas.util.hash_pandas_object(rows, index=False)
        except TypeError:  # a column of lists, or of other unhashable objects
            continue
        return [hash((folder, number)) for number in numbers.tolist()], bits
    return None, 0.0


def _chosen(items: Any, picked: Sequence[int] | None) -> Sequence[int]:
    chosen = range(len(items)) if picked is None else picked
    return chosen[:: max(1, -(-len(chosen) // _ITEMS))]


def _lists_in(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, (list, tuple)):
        yield dataset
        return
    yield from of_all_samples(dataset, lambda value: isinstance(value, (list, tuple)))


def _frames_in(dataset: Any) -> Iterator[Any]:
    yield from of_all_samples(dataset, _is_frame)


def _is_frame(value: Any) -> bool:
    is_pandas = type(value).__module__.partition(".")[0] == "pandas"
    return is_pandas and hasattr(value, "itertuples") and hasattr(value, "columns")


def held_by(dataset: Any) -> list[Any]:
    """Return the values of a dataset's own attributes."""
    return list(getattr(dataset, "__dict__", {}).values())


def of_all_samples(dataset: Any, is_kind: Callable[[Any], bool]) -> Iterator[Any]:
    """Return the attributes of this kind that have as many entries as the dataset has samples."""
    length = length_of(dataset)
    for value in held_by(dataset) if length else ():
        if is_kind(value) and length_of(value) == length:
            yield value


def length_of(sized: Any) -> int | None:
    """Return `len(sized)`; None where that raises."""
    try:
        return len(sized)
    except Exception:  # a dataset may raise anything, since its loader may never ask for the length
        return None


def _first_array(item: Any) -> Any:
    import numpy as np
    import torch

    while isinstance(item, (tuple, list, dict)) and item:
        if isinstance(item, list) and all(type(number) is int for number in item[:_ASKED]):
            item = np.asarray(item)
            break
        item = next(iter(item.values())) if isinstance(item, dict) else item[0]
    if torch.is_tensor(item) and item.layout == torch.strided and not item.is_meta:
        item = item.detach().cpu()
        item = (item.float() if item.dtype.itemsize == 2 else item).numpy()
    if type(item) is not np.ndarray or not item.ndim or item.dtype.kind not in "iufb":
        return None
    flat = item.reshape(-1)
    return flat[:: max(1, -(-flat.size // _NUMBERS))]


def _name_in(item: Any) -> str | None:
    if isinstance(item, (tuple, list)) and item:
        item = item[0]
    return str(item) if _is_name(item) else None


def _is_name(value: Any) -> bool:
    is_words = isinstance(value, str) and 0 < len(value) < 1024 and " " not in value
    return isinstance(value, os.PathLike) or (
        is_words and (os.sep in value or bool(_ENDING.search(value)))
    )


def _folders_of(dataset: Any) -> Iterator[str]:
    for value in held_by(dataset):
        if isinstance(value, (str, os.PathLike)) and os.path.isdir(value):
            yield os.fspath(value)
