"""Checks of arrays, and the faults of rows, shared by the interfaces of several kernels."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]
Text: TypeAlias = npt.NDArray[np.uint8]

LARGEST = float(np.finfo(np.float32).max)


class Fault(IntEnum):
    """The possible faults of a row, each with words for the expected and the found value.

    A parser writes a number for each row to `status`, uint8: 0 for a good row, else one of these.
    Then `at`, int64, gets the place of the fault in the buffer; places of good rows are not
    written. All other outputs of a bad row become 0.
    """

    words: str

    def __new__(cls, number: int, words: str) -> Fault:
        made = int.__new__(cls, number)
        made._value_ = number
        made.words = words
        return made


def text_of(name: str, buffer: Any) -> Text:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError(f"{name}: expected C-contiguous memory")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def bytes_of_rows(array: npt.NDArray[Any]) -> Text:
    """Return the same memory as (rows, bytes of a row): the buffer protocol has no datetime64."""
    width = math.prod(array.shape[1:]) * array.dtype.itemsize
    if array.nbytes == 0:
        return np.empty((array.shape[0], width), np.uint8)
    return array.reshape(-1).view(np.uint8).reshape(array.shape[0], width)
