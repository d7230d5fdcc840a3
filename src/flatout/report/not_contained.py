"""What a script can do beyond its trial where the kernel does not contain that, in words."""

from __future__ import annotations

from collections.abc import Sequence

_WORDS = {
    "files": "native code and programs that it starts can write to your files",
    "signals": "it can signal your other processes",
    "orphans": "a program that it starts can outlive a trial that is killed",
    "network": "native code and programs that it starts can reach other machines",
    "ranks": "native code and programs that it starts can reach other machines, as its ranks do",
}


def not_contained(lacks: Sequence[str]) -> str:
    """A line without its full stop."""
    return f"Not contained here: {'; '.join(_WORDS[lack] for lack in lacks)}"
