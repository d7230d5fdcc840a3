"""Detection of settings that have ended the process of an earlier run of the same job.

A setting may end the process that tries it, by a fault in a kernel or for lack of memory. So a mark
is kept in the cache folder while a run tries a setting for the first time. This covers a check on a
few samples, the switch of the model, and the first of the job's own steps under the setting. The
mark is removed afterwards, also after an error or Ctrl-C. A mark whose process is gone shows the
setting that may have ended it.

The process may have been killed for another reason, so a single mark excludes no setting:

- On a CPU and one rank, a marked setting is first tried in a child process (contained.py). If the
  child ends too, the setting is excluded; else it is treated as any other setting.
- Elsewhere, and where code is compiled, the setting is tried once more. It is excluded once two
  runs have left their marks.

A trial that ends normally removes the marks of earlier runs for the same trial. Marks belong to one
job, by the key of its cached settings, and `flatout clean` removes them. With several ranks, the
first rank writes marks, and reads them for all ranks.
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
# Number of runs that ended during a trial of a setting, after which the setting is excluded.
_ENOUGH = 2
# Seconds after which a mark of another host counts as abandoned, since that host's processes
# cannot be checked.
_LONGEST_S = 3600.0
# Seconds to wait for a child's trial; the trial of a slower child has no effect.
_PATIENCE_S = 120.0
_FORGET = "so it is not tried; `flatout clean` removes this record"

At = Literal["look", "switch", "step"]
"""Stage of a trial: a check on a few samples, the switch of the model, or the first real step."""


class Left(NamedTuple):
    """A mark that an earlier run has left.

    Attributes:
        name: name of the mark's file.
        fields: Recipe fields that were not plain in the trial.
        at: name of the stage at which the trial ended.
        ended: description of the end of a child that repeated the trial; "" without a child.
    """

    name: str
    fields: tuple[str, ...]
    at: str
    ended: str = ""


class EndsProcess(Exception):
    """Raised for settings that are not tried, with the reason as text."""


def failure(error: Exception) -> str:
    """Return the reason against settings under which this error was raised."""
    if isinstance(error, EndsProcess):
        return str(error)
    return f"fails here: {first_line(error)}"


class Marks:
    """Writes the marks of a job, and reads those that its earlier runs have left."""

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
        """Read the marks of a job. All ranks call it."""
        own = [tuple(one) for one in _left(key)] if world.is_first and key else []
        found = world.from_first(own, "settings that ended earlier runs")
        left = [Left(name, tuple(fields), at, ended) for name, fields, at, ended in found]
        # `flatout run --devices auto` ends its trial runs once they have measured enough.
        writes = world.is_first and not is_trial()
        return cls(key, left, writes=writes, may_fork=may_fork and world.size == 1)

    def objection(self, fields: Collection[str]) -> str:
        """Return the reason against settings that are not plain in these fields; "" without one."""
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
        """Return whether any of these fields may have ended an earlier run."""
        return any(not set(fields).isdisjoint(one.fields) for one in self._left)

    def check(self, fields: Collection[str], at: At, run: Callable[[], Any] | None) -> None:
        """Raise if fields must not be tried; try them in a child first where marks require it."""
        is_first = self._may_fork and self.is_suspect(fields) and not self.objection(fields)
        if run is not None and is_first:
            self._try_in_child(fields, at, run)
        if why := self.objection(fields):
            raise EndsProcess(why)

    def _try_in_child(self, fields: Collection[str], at: At, run: Callable[[], Any]) -> None:
        def alone() -> None:
            run()

        answer = Child(alone).result(_PATIENCE_S)
        # An error will occur again in this process, where the caller handles it. A late child may
        # only be slowed by other work.
        if answer.is_told or answer.why == TIME:
            return
        is_memory = answer.why == MEMORY
        ended = "memory ran out" if is_memory else answer.why.removeprefix("ended by ")
        self._left.append(Left("", _sorted(fields), at, ended))
        self._write(fields, at, ended)

    @contextmanager
    def on(self, fields: Collection[str], at: At) -> Iterator[None]:
        """Keep a mark within this context, in which settings are tried for the first time."""
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
