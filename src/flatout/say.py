"""Telling the user something, beside what the script prints."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(*lines: str) -> None:
    """Print lines on stderr, at once and in one piece, as other processes may print too.

    Where stderr was closed nobody is told, and nothing fails for that.
    """
    with suppress(OSError, ValueError):
        print("\n".join(f"flatout: {line}" for line in lines), file=sys.stderr, flush=True)


def counted(count: int, noun: str) -> str:
    """How many there are, such as "1 rank" or "2,000 steps"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
