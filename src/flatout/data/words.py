"""Numbers, for people."""

from __future__ import annotations

from flatout.console import rounded


def size_words(size: float) -> str:
    """Bytes, such as "312 bytes", "12.4 kB", "0.9 MB" or "18.4 GB"."""
    for unit, bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9 * bytes:
            return f"{size / bytes:,.1f} {unit}"
    return f"{size:,.0f} bytes"


def count_words(count: float) -> str:
    """A count in at most five places, such as "312", "12.4k" or "41.2M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 10 * size or (count >= size and unit != "k"):
            return f"{rounded(count / size)}{unit}"
    return f"{count:,.0f}"
