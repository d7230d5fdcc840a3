"""Exact text of a file of the user's code, and the same text with edits."""

from __future__ import annotations

import io
import os
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

from flatout.doctor.finding import Edit
from flatout.errors import FlatoutError


@dataclass(frozen=True)
class Source:
    """A file that was read.

    Attributes:
        file: path as Python names it.
        text: decoded as Python would, with its original line ends.
        encoding: encoding of the file, from its byte order mark or its first two lines.
    """

    file: str
    text: str
    encoding: str

    @classmethod
    def read(cls, file: str) -> Source:
        """Read a file.

        Raises:
            FlatoutError: the file is gone, cannot be read, or does not match its own encoding.
        """
        try:
            data = Path(file).read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            return cls(file, data.decode(encoding), encoding)
        except OSError as error:
            raise FlatoutError(f"the file cannot be read: {error.strerror}", where=file) from None
        except (SyntaxError, ValueError) as error:
            raise FlatoutError(f"the file is no text that Python reads: {error}", where=file) from (
                None
            )

    @property
    def lines(self) -> list[str]:
        """Lines with their ends. As for Python, only newlines and carriage returns end a line."""
        return list(io.StringIO(self.text, newline=""))

    def with_edits(self, edits: Iterable[Edit]) -> Source:
        """Return the file with these edits made.

        Raises:
            FlatoutError: a line differs from what the edit expects, two edits change the same
                words, or the result is no valid Python.
        """
        parts: list[str] = []
        position = 0
        for begin, end, words in self._changes(edits):
            parts += [self.text[position:begin], words]
            position = end
        changed = Source(self.file, "".join(parts) + self.text[position:], self.encoding)
        changed._compile()
        return changed

    def encode(self) -> bytes:
        """Return the text as bytes in the file's encoding.

        Raises:
            FlatoutError: an edit has characters that the encoding lacks.
        """
        try:
            return self.text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise FlatoutError(f"an edit cannot be written: {error}", where=self.file) from None

    def _compile(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python reports them when it runs the code
                compile(self.encode(), self.file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise FlatoutError(
                f"the edits together give code that Python refuses: {error}",
                where=self.file,
                do="apply them one at a time",
            ) from None

    def _changes(self, edits: Iterable[Edit]) -> list[tuple[int, int, str]]:
        lines = self.lines
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        result = sorted({_narrowed(self._change(edit, lines, starts)) for edit in edits})
        for before, after in pairwise(result):
            if after[0] < before[1] or _compete(before, after):
                raise FlatoutError(
                    "two edits change the same words",
                    where=f"{self.file}:{bisect_right(starts, after[0])}",
                    do="apply them one at a time",
                )
        return result

    def _change(
        self, edit: Edit, lines: Sequence[str], starts: Sequence[int]
    ) -> tuple[int, int, str, str]:
        first, last = edit.line - 1, edit.line - 1 + _line_ends(edit.before)
        result = "".join(lines[first : last + 1]) if 0 <= first <= last < len(lines) else ""
        end = lines[last][len(lines[last].rstrip("\r\n")) :] if result else ""
        if not result or result.removesuffix(end) != edit.before:
            raise FlatoutError(
                f"the file has changed: expected {edit.before.strip()!r}, found {result.strip()!r}",
                where=f"{self.file}:{edit.line}",
                do="run flatout doctor again",
            )
        after = edit.after + end if edit.after else ""
        return starts[first], starts[last + 1], result, after


def _line_ends(text: str) -> int:
    return len(list(io.StringIO(text + ".", newline=""))) - 1


def _narrowed(change: tuple[int, int, str, str]) -> tuple[int, int, str]:
    begin, end, result, after = change
    head = _in_common(result, after)
    tail = _in_common(result[head:][::-1], after[head:][::-1])
    return begin + head, end - tail, after[head : len(after) - tail]


def _in_common(value: str, other: str) -> int:
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(value, other, strict=False))
    )


def _compete(value: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    is_same_place = value[0] == value[1] == other[0] == other[1]
    return is_same_place and ("\n" in value[2] or "\n" in other[2])


def by_file(edits: Iterable[Edit]) -> dict[str, list[Edit]]:
    """Return the edits of each file, in order; several paths of one file count as one."""
    names: dict[str, str] = {}
    result: dict[str, list[Edit]] = {}
    for edit in edits:
        file = names.setdefault(os.path.realpath(edit.file), edit.file)
        result.setdefault(file, []).append(edit)
    return result
