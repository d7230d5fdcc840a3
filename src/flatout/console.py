"""Messages for the user, in addition to the script's output."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from textwrap import wrap
from typing import IO

# Characters that a terminal would obey instead of showing: control characters except for tab and
# newline, and marks that turn the direction of text. Each is replaced by a picture of the same
# width.
_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
}
# Escape sequences that set a terminal's colors.
_COLORS = re.compile(r"\x1b\[[0-9;]*m")

_said: set[str] = set()


def printable(text: str) -> str:
    """Return text that is safe for a terminal: names of files and processes can hold anything.

    An escape becomes ␛, which is shown and does nothing. The length stays the same.
    """
    return text if text.isprintable() else text.translate(_PICTURES)


def colorless(text: str) -> str:
    """Return another program's output without its colors."""
    return _COLORS.sub("", text)


def say(*lines: str) -> None:
    """Print lines on stderr, each of them marked as Flatout's."""
    say_as_is(*(f"flatout: {line}" for line in lines))


def say_once(line: str) -> None:
    """Print a line like `say`, unless this process has printed it before."""
    if line not in _said:
        _said.add(line)
        say(line)


def say_as_is(*lines: str) -> None:
    """Print lines on stderr, at once and in one piece, because other processes may print too.

    On a terminal they are broken between words.

    If stderr was closed, nothing is printed and nothing fails. Without this care Python would write
    the rest of the buffer when it ends, fail, and turn an exit code of 0 into 120.
    """
    stream = sys.stderr
    if stream is None:  # Python sets None if it starts without stderr
        return
    text = folded(printable("\n".join(lines)), stream)
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    with suppress(OSError, ValueError):
        if raw is None:  # a notebook's stream, or a custom one
            print(text, file=stream, flush=True)
        else:
            stream.flush()
            raw.write(f"{text}\n".encode(stream.encoding, "backslashreplace"))


def folded(text: str, stream: IO[str] | None = None) -> str:
    """Break lines that are wider than the terminal, between words.

    Args:
        text: the text; continuation lines are indented more than the begin of their line.
        stream: the destination, by default stdout. If it is no terminal, the text stays as it is.
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
    """Return the first line of an error's message, or the name of its type if it has none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
