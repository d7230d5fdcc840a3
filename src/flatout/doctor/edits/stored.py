"""Storage of edits in a JSON file, for the processes of a trial."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from flatout.doctor.finding import Edit
from flatout.errors import FlatoutError


def dump(path: Path, edits: Iterable[Edit]) -> None:
    """Write edits as JSON."""
    path.write_text(json.dumps([asdict(edit) for edit in edits], indent=1), encoding="utf-8")


def load(path: Path) -> tuple[Edit, ...]:
    """Read a file that `dump` wrote.

    Raises:
        FlatoutError: the file cannot be read, or `dump` did not write it.
    """
    try:
        edits = tuple(Edit(**item) for item in json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise FlatoutError(f"the edits cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, TypeError) as error:
        raise FlatoutError(f"this is no file of edits: {error}", where=str(path)) from None
    return edits
