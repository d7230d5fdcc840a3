"""Handling of bad rows: an error, or skipped and counted."""

from __future__ import annotations

from threading import Lock
from typing import Any, Literal

from flatout.errors import DataError

OnError = Literal["fail", "skip"]

# _TOLD: maximum number of bad rows that a message names. _KNOWN: maximum number of bad rows that
# are remembered.
_TOLD, _KNOWN = 5, 100


class ErrorPolicy:
    """Raises or skips bad rows. Several threads may call at once."""

    def __init__(self, on_error: OnError = "fail", max_errors: int = 100) -> None:
        if on_error not in ("fail", "skip"):
            raise DataError(f"on_error: expected 'fail' or 'skip', found {on_error!r}")
        if isinstance(max_errors, bool) or not isinstance(max_errors, int) or max_errors < 0:
            raise DataError(f"max_errors: expected an int of at least 0, found {max_errors!r}")
        self.skip = on_error == "skip"
        self.max_errors = max_errors
        self.count = 0
        self._known: list[tuple[str, str]] = []  # location and error of the first bad rows
        self._noted = 0  # number of rows skipped so far
        self._asked = 0  # number of these rows that `new_notes` has reported
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = Lock()

    def bad(self, what: str, where: str, do: str = "fix it") -> None:
        if not self.skip:
            raise DataError(
                what, where=where, do=f'{do}, or on_error="skip", max_errors={self.max_errors}'
            )
        with self._lock:
            self.count += 1
            self._noted += 1
            if len(self._known) < _KNOWN:
                self._known.append((where, what))
            if self.count > self.max_errors:
                first = f"; the first: {' '.join(self._known[0])}" if self.count > 1 else ""
                raise DataError(
                    f"{self.count:,} {'rows are' if self.count > 1 else 'row is'} bad, and "
                    f"max_errors is {self.max_errors:,}{first}; the last: {what}",
                    where=where,
                    do="look at these rows, correct the schema, or raise max_errors",
                )

    def notes(self) -> list[str]:
        return self._words(0)

    def new_notes(self) -> list[str]:
        """Return notes about the rows that were skipped since the last call."""
        with self._lock:
            asked, self._asked = self._asked, self._noted
        return self._words(asked)

    def _words(self, before: int) -> list[str]:
        count = self._noted - before
        if not count:
            return []
        named = self._known[before : before + _TOLD]
        alike: dict[str, list[str]] = {}
        for where, what in named:  # one line for rows that differ only in the found value
            places = alike.setdefault(what.partition(", found ")[0], [])
            places.append(where if places else f"{where} {what}")
        words = [
            first + (f" (and alike {', '.join(rest)})" if rest else "")
            for first, *rest in alike.values()
        ]
        if count > len(named):
            words.append("…")
        bad = f"{count:,} {'more ' if before else ''}bad {'row' if count == 1 else 'rows'} skipped"
        return [f"{bad}: {', '.join(words)}"]
