"""What a check says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["danger", "slow", "note"]

_DOCS = "https://flatout.readthedocs.io"


def docs_page(check: str) -> str:
    """Where the documentation describes what this check of a script finds."""
    return f"{_DOCS}/checks/{check}/"


@dataclass(frozen=True)
class Edit:
    """A change of one place in the user's code.

    Attributes:
        file: as Python names it.
        line: of its first line, from 1.
        before: the whole lines as they are, without the last line's end.
        after: what stands there instead; empty where they go.
    """

    file: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Finding:
    """One thing that holds jobs back, or endangers them.

    Attributes:
        kind: "danger" where a job may fail or learn something wrong, "slow" where it costs time,
            "note" for what is only good to know.
        what: what was found, with its numbers.
        do: what to do about it.
        name: of the check, the same in every run, such as "threads"; the check of a script gets it
            where it registers.
        where: file:line of the user's code.
        cost_ms: the most per step that the cure can give back; None where that is not known.
        is_estimate: `cost_ms` is no bound: a cure can give back more.
        takes: what it takes beside time, such as "12 GB/h" of a disk, and is told for whatever its
            time is; "" for nothing.
        parity: of the cure, in the four words; "" where it changes no result.
        recipe: the cure as changes of a Recipe, by dotted name; empty where code must change.
        edits: the cure as changes of the user's code; empty where none can be written down.
        proven: the measured ratio of time with its interval, [low, mid, high]; None before a trial.
    """

    kind: Kind
    what: str
    do: str
    name: str = ""
    where: str = ""
    cost_ms: float | None = None
    is_estimate: bool = False
    takes: str = ""
    parity: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    proven: tuple[float, float, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
