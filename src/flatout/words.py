"""Numbers, sizes and times in words."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, such as "1 rank" or "2,000 steps"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def rounded(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits as people write it: "0.0123" or "1,190".

    No digit before the point is rounded away. Only numbers below a ten-thousandth have an exponent,
    such as a learning rate of "1e-05".
    """
    text = f"{value:.{digits}g}"
    if "e-" in text:
        return text
    decimals = 0 if "e+" in text else len(text.partition(".")[2])
    return f"{value:,.{decimals}f}"


def count_words(count: float) -> str:
    """Return a count in at most five characters, such as "312", "12.4k" or "41.2M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 10 * size or (count >= size and unit != "k"):
            return f"{rounded(count / size)}{unit}"
    return f"{count:,.0f}"


def size_words(size: float) -> str:
    """Return bytes in words, such as "312 bytes", "12.4 kB", "0.9 MB" or "18.4 GB"."""
    for unit, bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9 * bytes:
            return f"{size / bytes:,.1f} {unit}"
    return f"{size:,.0f} bytes"


def memory_words(size: float) -> str:
    """Return bytes of memory in its usual units, such as "64 MiB" or "22.0 GiB"."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def is_currency(text: str) -> bool:
    """Return whether a text is a code of ISO 4217, such as USD: three capital letters."""
    return len(text) == 3 and text.isascii() and text.isalpha() and text.isupper()


def duration(seconds: float) -> str:
    """Return seconds in words, such as "365us", "6.72ms", "0.25s", "13m23s" or "5h02m"."""
    if 0 < seconds < 0.001:
        return f"{rounded(seconds * 1e6)}us"
    if 0 < seconds < 0.1:
        return f"{rounded(seconds * 1e3)}ms"
    if seconds < 59.95:
        return f"{rounded(seconds)}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}h{minutes:02d}m"


def clock(seconds: float) -> str:
    """Return seconds as a clock shows them: "2:31" or "1:02:31"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
