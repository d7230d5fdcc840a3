"""Which settings have ended the process of an earlier run of the same job.

A setting may end the process that tries it, by a fault in a kernel or for want of memory. So a mark
lies in the cache folder while a run tries a setting for the first time: while a few samples run
under it, while the model is switched to it, and in the first of the job's own steps under it. That
over, by an error or Ctrl-C too, the mark goes. One whose process is gone tells what ended it.

Someone else may have ended that process just then, so one mark alone drops nothing:

- On a CPU and one rank, what a mark names is tried in a child of the process first (contained.py).
  It is tried no more where the child ends, too, and is like any other where it does not.
- Elsewhere, and where code is compiled, it is tried once more: it is tried no more once two runs
  have left their marks.

What comes to its end takes back the marks that earlier runs have left at the same. They are of one
job, by the key of its kept settings, and `flatout clean` removes them. Of several ranks the first
one writes them and reads them for all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flatout.cache_folder import (
    cache_folder,
    kept_text,
    kind_folder,
    private,
    remove,
    with_checksum,
)
from flatout.console import first_line
from flatout.train.contained import MEMORY, TIME, Child
from flatout.train.rank_trial import is_trial
from flatout.unfinished import is_abandoned, new_name
from flatout.world import World

_KIND = "looks"
# So many runs that ended at a setting are enough.
_ENOUGH = 2
# A process of another host cannot be seen. Nothing is tried for the first time for so long.
_LONGEST_S = 3600.0
# A child that takes longer tells nothing.
_PATIENCE_S = 120.0
_FORGET = "so it is not tried; `flatout clean` forgets that"

At = Literal["look", "switch", "step"]
"""What a run is at: a few samples, the switch of the model, or the first step of the job."""


class Left(NamedTuple):
    """A mark that an earlier run has left.

    Attributes:
        name: of its file.
        fields: of the Recipe, in which the settings that were tried were not plain.
        at: what the run was at.
        ended: how the child has ended that tried it again; "" where none was there.
    """

    name: str
    fields: tuple[str, ...]
    at: str
    ended: str = ""


class EndsProcess(Exception):
    """Settings are not tried, for the reason in its text."""


def failure(error: Exception) -> str:
    """Why settings under which an error was raised are not tried."""
    if isinstance(error, EndsProcess):
        return str(error)
    return f"fails here: {first_line(error)}"


class Marks:
    """Those of a job, and those that earlier runs of it have left."""

    def __init__(
        self,
        key: str = "",
        left: Collection[Left] = (),
        *,
        writes: bool = True,
        may_fork: bool = False,
    ) -> None:
        self._key, self._left = key, list(left)
        self._writes = writes and bool(key)
        self._may_fork = may_fork and bool(key)
        self._folder: Path | None = None

    @classmethod
    def of(cls, key: str, world: World, *, may_fork: bool) -> Marks:
        """Those of a job. All ranks call it."""
        own = [tuple(one) for one in _left(key)] if world.is_first and key else []
        found = world.from_first(own, "settings that ended earlier runs")
        left = [Left(name, tuple(fields), at, ended) for name, fields, at, ended in found]
        # A command that tries numbers of ranks ends them when it has seen enough.
        writes = world.is_first and not is_trial()
        return cls(key, left, writes=writes, may_fork=may_fork and world.size == 1)

    def objection(self, fields: Collection[str]) -> str:
        """Why settings are not to be tried that are not plain in these fields; "" where nothing is
        known of them."""
        for own in {one.fields for one in self._left}:
            if not own or not set(own) <= set(fields):
                continue
            marks = [one for one in self._left if one.fields == own]
            ended = next((one.ended for one in marks if one.ended), "")
            if ended:
                return (
                    f"ended an earlier run of this job, and a child process that tried it again "
                    f"({ended}), {_FORGET}"
                )
            if len(marks) >= _ENOUGH:
                return (
                    f"ended {len(marks)} earlier runs of this job when it was first tried "
                    f"(signal unknown), {_FORGET}"
                )
        return ""

    def is_suspect(self, fields: Collection[str]) -> bool:
        """Whether an earlier run may have been ended by any of these fields."""
        return any(not set(fields).isdisjoint(one.fields) for one in self._left)

    def check(self, fields: Collection[str], at: At, run: Callable[[], Any] | None) -> None:
        """See that something may be tried, where that is needed by a child that tries it first."""
        is_first = self._may_fork and self.is_suspect(fields) and not self.objection(fields)
        if run is not None and is_first:
            self._try_in_child(fields, at, run)
        if why := self.objection(fields):
            raise EndsProcess(why)

    def _try_in_child(self, fields: Collection[str], at: At, run: Callable[[], Any]) -> None:
        def alone() -> None:
            run()

        answer = Child(alone).result(_PATIENCE_S)
        # An error comes again, and is dealt with there. What is late may wait for other work.
        if answer.is_told or answer.why == TIME:
            return
        is_memory = answer.why == MEMORY
        ended = "memory ran out" if is_memory else answer.why.removeprefix("ended by ")
        self._left.append(Left("", _sorted(fields), at, ended))
        self._write(fields, at, ended)

    @contextmanager
    def on(self, fields: Collection[str], at: At) -> Iterator[None]:
        """Within, settings are tried for the first time in this run."""
        path = self._write(fields, at) if fields else None
        try:
            yield
        finally:
            if path is not None:
                with suppress(OSError):
                    os.unlink(path)
        self._take_back(_sorted(fields), at)

    def _take_back(self, fields: tuple[str, ...], at: At) -> None:
        if self._writes:
            for one in self._left:
                if one.name and (one.fields, one.at) == (fields, at):
                    remove(cache_folder() / _KIND / one.name)

    def _write(self, fields: Collection[str], at: At, ended: str = "") -> str | None:
        if not self._writes:
            return None
        path = None
        with suppress(OSError):
            if self._folder is None:
                self._folder = kind_folder(_KIND)
            wanted = os.path.join(self._folder, self._key + new_name())
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            handle = private(wanted, flags)
            path = wanted
            try:
                os.write(handle, with_checksum(json.dumps([_sorted(fields), at, ended])).encode())
            finally:
                os.close(handle)
        return path


def _sorted(fields: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(fields))


def _left(key: str) -> list[Left]:
    folder = cache_folder() / _KIND
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(key))
    except OSError:
        return []
    found = []
    for name in names:
        with suppress(OSError, ValueError, TypeError):
            fields, at, ended = json.loads(kept_text(_KIND, name) or "")
            if ended or _is_gone(folder / name, name.removeprefix(key)):
                found.append(Left(name, tuple(map(str, fields)), str(at), str(ended)))
    return found


def _is_gone(path: Path, writer: str) -> bool:
    return is_abandoned(writer) or time.time() - path.stat().st_mtime > _LONGEST_S
