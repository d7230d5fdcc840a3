"""What a job prints, from a file that grows."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flatout.errors import SubmitError

_LOOK_EVERY_S = 0.5
_PIECE = 1 << 16


def follow_file(path: Path, goes_on: Callable[[], bool]) -> Iterator[str]:
    """The text of a file, and what is added to it as long as `goes_on` says so."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    at, more = 0, True
    while more:
        # Asked before reading, so that what was printed last is read.
        more = goes_on()
        try:
            with path.open("rb") as file:
                file.seek(at)
                while piece := file.read(_PIECE):
                    at += len(piece)
                    yield decode(piece)
        except FileNotFoundError:
            if not more:
                raise SubmitError("the job has printed nothing", where=str(path)) from None
        if more:
            time.sleep(_LOOK_EVERY_S)
