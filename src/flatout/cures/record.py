"""Which cures took hold in this process, and which were left out and why."""

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
    """These are the cures that this process was asked for: value by dotted name."""
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
    """What took hold: each field of the Recipe with what was done, in words."""
    return list(_applied.items())


def left() -> list[tuple[str, str]]:
    """What stayed as written: each field of the Recipe with the reason; one may have several."""
    return list(_left)


def took(field: str, words: str) -> None:
    """A cure has taken hold; told again it changes nothing."""
    _applied.setdefault(field, words)


def leave(field: str, why: str) -> None:
    """A cure is left out, here or everywhere: says so the first time."""
    if (field, why) not in _left:
        _left[field, why] = None
        if is_first_rank():
            say(f"left as written: {words_of(field, _asked.get(field))} ({why})")


def fill(*, is_full: bool) -> None:
    """Something is being kept that will be given in later epochs; or nothing more is."""
    global _is_full
    _is_full = is_full


def is_full() -> bool:
    """Whether what is kept for later epochs is all there, so that steps get no faster by it."""
    return _is_full


def stand_down(why: str) -> None:
    """No cure takes hold from now on; says so the first time."""
    global _stood_down
    if not _stood_down:
        _stood_down = why
        if is_first_rank():
            say(why)


def is_on() -> bool:
    """Whether cures may take hold."""
    return not _stood_down


def is_first_rank() -> bool:
    """The first rank speaks for all; a worker that it has forked does not."""
    return os.getpid() == _process and place().rank == 0


def words_of(field: str, value: Any) -> str:
    """A field with its value as users see it: `workers=2`, `bf16`, `persistent_workers`."""
    name = field.rpartition(".")[2]
    if SETTINGS[field].words == "{}":
        return str(value)
    if value == "on":
        return name
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"{name}={value}"


def tell_unmet() -> None:
    """At the script's end: names the cures for which nothing in it was found."""
    if hasattr(sys, "last_value"):  # it ended before it came to them
        return
    met = {*_applied, *(field for field, _ in _left)}
    why = "nothing in the script uses it" if _is_hooked else "the script imports no torch"
    for field in _asked:
        was_set = not _is_hooked and field.startswith(("memory.", "process."))  # set at the start
        if field not in met and not was_set and is_on():
            leave(field, why)
