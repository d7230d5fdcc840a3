"""The jobs that were sent from here, so that a job's id alone finds it.

A line of JSON for each thing that has become of a job, in a file that is only added to. The key of
a job stands here before it is sent: where no answer came the cluster is asked for it, and one yes
never makes two jobs.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO

from flatout.atomic_file import private
from flatout.errors import SubmitError

SENDING, SENT, REFUSED = "sending", "sent", "refused"


@dataclass(frozen=True)
class Entry:
    """A job as it was sent.

    Attributes:
        key: its own, which the cluster has been told.
        target: which kind of cluster.
        name: of the job.
        folder: of its artifacts, absolute.
        when: it was sent, in UTC (ISO 8601).
        status: "sending" until there is an answer, then "sent" or "refused".
        id: what the cluster calls it; "" before the answer.
        nodes: how many it takes.
        price: of a node and hour, where the user has said it.
        currency: of the price.
    """

    key: str
    target: str
    name: str
    folder: str
    when: str
    status: str = SENDING
    id: str = ""
    nodes: int = 1
    price: float | None = None
    currency: str = ""


def state_folder() -> Path:
    """Where what cannot be computed again is kept for the user: $XDG_STATE_HOME/flatout."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "flatout"


class Ledger:
    """The file. Several processes may use it at once.

    Args:
        path: None for that of the user.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_folder() / "jobs.jsonl"

    def write(self, entry: Entry) -> None:
        """Add what is now known of a job; it lasts through a power cut.

        Raises:
            SubmitError: it cannot be written, so nothing may be sent.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked("a+", fcntl.LOCK_EX) as file:
                # If a full disk has cut off the last line, this entry begins a new one.
                file.write(f"{_missing_newline(file)}{json.dumps(asdict(entry))}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise SubmitError(
                f"the list of sent jobs cannot be written: {error.strerror}; nothing was sent",
                where=str(self.path),
                do="set XDG_STATE_HOME to a folder that can be written",
            ) from error

    def entries(self) -> list[Entry]:
        """All jobs, the oldest first, each as it was last written."""
        entries: dict[str, Entry] = {}
        names = {item.name for item in fields(Entry)}
        try:
            with self._locked("r", fcntl.LOCK_SH) as file:
                lines = file.readlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                data = json.loads(line)
                entry = Entry(**{k: v for k, v in data.items() if k in names})
            except (ValueError, TypeError, AttributeError):  # torn by a full disk
                continue
            entries[entry.key] = entry
        return list(entries.values())

    def find(self, which: str) -> Entry:
        """A job by its id, its name, or the beginning of its key; the newest of several.

        Raises:
            SubmitError: there is none.
        """
        entries = self.entries()
        of_array = which.partition("_")[0]
        for entry in reversed(entries):
            if which in (entry.id, entry.name, entry.key) and which:
                return entry
        for entry in reversed(entries):
            if of_array == entry.id and of_array:
                return replace(entry, id=which)
        known = [entry.id or entry.name for entry in entries[-5:]]
        raise SubmitError(
            f"no job {which!r} was sent from here",
            where=str(self.path),
            do=f"flatout jobs lists them; the last are {', '.join(known)}" if known else None,
        )

    @contextmanager
    def _locked(self, mode: str, how: int) -> Iterator[IO[str]]:
        # Bytes that are no UTF-8 spoil only their own line.
        with open(
            self.path, mode, encoding="utf-8", errors="surrogateescape", opener=private
        ) as file:
            fcntl.flock(file, how)
            yield file


def _missing_newline(file: IO[str]) -> str:
    """Return a newline if the file's last line does not end; else an empty string."""
    size = os.fstat(file.fileno()).st_size
    return "\n" if size and os.pread(file.fileno(), 1, size - 1) != b"\n" else ""
