"""Telling the user something, beside what the script prints."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from textwrap import wrap
from typing import IO

# What a terminal would obey instead of showing it: control characters but for tab and newline, and
# marks that turn the direction of text. Each has a picture of the width of one letter.
_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
}
# What sets a terminal's colors.
_COLORS = re.compile(r"\x1b\[[0-9;]*m")

_said: set[str] = set()


def printable(text: str) -> str:
    """Text as a terminal may get it: names of files, classes and processes can hold anything.

    An escape becomes ␛, which is shown and does nothing. The length stays.
    """
    return text if text.isprintable() else text.translate(_PICTURES)


def colorless(text: str) -> str:
    """What another program has printed, without the colors that it had for its terminal."""
    return _COLORS.sub("", text)


def say(*lines: str) -> None:
    """Print lines on stderr, each of them marked as Flatout's."""
    say_as_is(*(f"flatout: {line}" for line in lines))


def say_once(line: str) -> None:
    """As `say`, unless this process has said it before."""
    if line not in _said:
        _said.add(line)
        say(line)


def say_as_is(*lines: str) -> None:
    """Print lines on stderr, at once and in one piece, as other processes may print too.

    On a terminal they are broken between words.

    Where stderr was closed no one is told, and nothing fails for that: what lay in its buffer would
    be tried again when Python ends, and turn an exit code of 0 into 120.
    """
    stream = sys.stderr
    if stream is None:  # as Python leaves it where it begins without one
        return
    text = folded(printable("\n".join(lines)), stream)
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    with suppress(OSError, ValueError):
        if raw is None:  # a notebook's, or one of the user's own
            print(text, file=stream, flush=True)
        else:
            stream.flush()
            raw.write(f"{text}\n".encode(stream.encoding, "backslashreplace"))


def folded(text: str, stream: IO[str] | None = None) -> str:
    """Lines that are longer than a terminal is wide, broken between words.

    Args:
        text: what follows in a line is set in further than its beginning.
        stream: where it goes, stdout if none is given; what is no terminal gets the text as it is.
    """
    try:
        width = os.get_terminal_size((stream or sys.stdout).fileno()).columns
    except (OSError, ValueError, AttributeError):
        return text
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width))


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width or width < 20:
        return [line]
    own = line[: len(line) - len(line.lstrip(" "))]
    return wrap(
        line,
        width,
        subsequent_indent=f"{own}  ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )


def first_line(error: BaseException) -> str:
    """Of what an error says; the name of its type where it says nothing."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
