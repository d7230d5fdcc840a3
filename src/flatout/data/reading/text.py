"""Rows that are lines of text."""

from __future__ import annotations

import numpy as np

from flatout.data.reading.decoder import Bytes, Split
from flatout.kernels import lines

# Bytes that are searched at a time for the last newline.
_BACK = 1 << 16


def split_lines(
    buffer: Bytes, final: bool, *, comment: bytes | None = None, white: bytes = b""
) -> Split:
    """Return the whole lines of a buffer, except blank lines and those starting with `comment`."""
    whole = len(buffer) if final else _last_newline(buffer) + 1
    starts, ends = lines.index_lines(
        buffer, 0, whole, skip_blank=True, comment=comment, white=white
    )
    return Split(starts, ends, whole)


def _last_newline(buffer: Bytes) -> int:
    stop = len(buffer)
    while stop:
        start = max(0, stop - _BACK)
        newlines = np.flatnonzero(buffer[start:stop] == 10)
        if len(newlines):
            return start + int(newlines[-1])
        stop = start
    return -1
