"""Records which cures were applied in this process, and which were not and why."""

from __future__ import annotations

import os
import sys
from typing import Any

from flatout.console import say
from flatout.recipe import SETTINGS
from flatout.world.place import place

_asked: dict[str, Any] = {}
_applied: dict[str, str] = {}
_left: dict[tuple[str, str], None] = {}
_process = 0
_stood_down = ""
_is_full = True
_is_hooked = False


def begin(asked: dict[str, Any]) -> None:
    """Start the record with the cures that were asked for: value by dotted name."""
    global _process, _stood_down, _is_full, _is_hooked
    _asked.clear()
    _asked.update(asked)
    _applied.clear()
    _left.clear()
    _process = os.getpid()
    _stood_down = ""
    _is_full = True
    _is_hooked = False


def hooked() -> None:
    """Record that the hooks are set, which never happens in a script without torch."""
    global _is_hooked
    _is_hooked = True


def applied() -> list[tuple[str, str]]:
    """Return the applied cures: each field of the Recipe with a description."""
    return list(_applied.items())


def left() -> list[tuple[str, str]]:
    """Return the fields of the Recipe that were not applied, each with a reason.

    A field may occur with several reasons.
    """
    return list(_left)


def took(field: str, words: str) -> None:
    """Record that a cure was applied; further calls for the same field change nothing."""
    _applied.setdefault(field, words)


def leave(field: str, why: str) -> None:
    """Record that a cure was not applied, here or everywhere; print the reason the first time."""
    if (field, why) not in _left:
        _left[field, why] = None
        if is_first_rank():
            say(f"left as written: {words_of(field, _asked.get(field))} ({why})")


def fill(*, is_full: bool) -> None:
    """Record whether a cache for later epochs is still being filled."""
    global _is_full
    _is_full = is_full


def is_full() -> bool:
    """Return True if all caches for later epochs are full, so that steps get no faster."""
    return _is_full


def stand_down(why: str) -> None:
    """Apply no cure from now on; print the reason the first time."""
    global _stood_down
    if not _stood_down:
        _stood_down = why
        if is_first_rank():
            say(why)


def is_on() -> bool:
    """Return True unless cures have stood down."""
    return not _stood_down


def is_first_rank() -> bool:
    """Return True in the first rank, which prints for all ranks, but not in its forked workers."""
    return os.getpid() == _process and place().rank == 0


def words_of(field: str, value: Any) -> str:
    """Return a field and its value as users see it: `workers=2`, `bf16`, `persistent_workers`."""
    name = field.rpartition(".")[2]
    if SETTINGS[field].words == "{}":
        return str(value)
    if value == "on":
        return name
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"{name}={value}"


def tell_unmet() -> None:
    """Report at the script's end the cures that found nothing to apply to."""
    if hasattr(sys, "last_value"):  # the script failed before it could use the cures
        return
    met = {*_applied, *(field for field, _ in _left)}
    why = "nothing in the script uses it" if _is_hooked else "the script imports no torch"
    for field in _asked:
        was_set = not _is_hooked and field.startswith(("memory.", "process."))  # set at the start
        if field not in met and not was_set and is_on():
            leave(field, why)
