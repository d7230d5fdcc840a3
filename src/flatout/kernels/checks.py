"""What interfaces and fallbacks share: memory of arrays, its checks, and faults of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]
Text: TypeAlias = npt.NDArray[np.uint8]

LARGEST = float(np.finfo(np.float32).max)


class Fault(IntEnum):
    """What may be wrong with a row, each with words: what was expected, and what was found."""

    words: str

    def __new__(cls, number: int, words: str) -> Fault:
        """A member, which is its number."""
        made = int.__new__(cls, number)
        made._value_ = number
        made.words = words
        return made


class Wrong(Exception):
    """A row that is not as it should be: a kernel's `Bad`, and the byte where that is seen."""

    def __init__(self, bad: Fault, at: int) -> None:
        self.bad = bad
        self.at = at


def text_of(name: str, buffer: Any) -> Text:
    """The bytes of a buffer."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError(f"{name}: expected C-contiguous memory")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def bytes_of_rows(array: npt.NDArray[Any]) -> Text:
    """The same memory as (rows, bytes of a row): the buffer protocol knows no datetime64."""
    width = math.prod(array.shape[1:]) * array.dtype.itemsize
    if array.nbytes == 0:
        return np.empty((array.shape[0], width), np.uint8)
    return array.reshape(-1).view(np.uint8).reshape(array.shape[0], width)


def check_array(
    name: str,
    array: npt.NDArray[Any],
    dtypes: Sequence[str],
    shape: tuple[int | None, ...] | None,
    is_written: bool = True,
) -> None:
    """Refuse another dtype, shape (None: any, of the whole or of a dimension) or memory layout."""
    fits = shape is None or (
        array.ndim == len(shape)
        and all(own in (None, size) for own, size in zip(shape, array.shape, strict=True))
    )
    if array.dtype not in map(np.dtype, dtypes) or not fits:
        raise ValueError(
            f"{name}: expected {' or '.join(dtypes)}{'' if shape is None else f' of shape {shape}'}"
            f", found {array.dtype} of shape {array.shape}"
        )
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned and (flags.writeable or not is_written)):
        raise ValueError(f"{name}: expected C-contiguous, aligned memory, writable for outputs")


def check_apart(written: Sequence[npt.NDArray[Any]], read: Sequence[npt.NDArray[Any]]) -> None:
    """Refuse an array to write into that shares memory with another one."""
    for number, item in enumerate(written):
        if any(np.may_share_memory(item, other) for other in [*read, *written[:number]]):
            raise ValueError("an array to write into shares memory with another one")


def check_range(index: Numbers, rows: int, there: str = "there are") -> None:
    """Refuse numbers of rows that are not there, in words such as "there are 5 rows"."""
    bad = (index < 0) | (index >= rows)
    if bad.any():
        at = int(bad.argmax())
        raise IndexError(f"index[{at}] is {index[at]}, but {there} {rows} rows")
