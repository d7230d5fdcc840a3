"""The results of checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["danger", "slow", "note"]

_DOCS = "https://flatout.readthedocs.io"


def docs_page(check: str) -> str:
    """Return the address of the documentation of a check."""
    return f"{_DOCS}/checks/{check}/"


@dataclass(frozen=True)
class Edit:
    """A change of one place in the user's code.

    Attributes:
        file: path as Python names it.
        line: number of the first line, from 1.
        before: the whole lines before the change, without the end of the last line.
        after: the whole lines after the change; empty if the lines are removed.
    """

    file: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Finding:
    """One problem that slows a job down or endangers it.

    Attributes:
        kind: "danger" if a job may fail or learn something wrong, "slow" if the problem costs
            time, "note" for information.
        what: the problem, with its numbers.
        do: what the user should do.
        name: name of the check, the same in every run, such as "threads". A check of a script
            gets its name where it is registered.
        where: file:line of the user's code.
        cost_ms: maximum milliseconds per step that the cure can save; None if unknown.
        is_estimate: `cost_ms` is an estimate, not a bound: a cure can save more.
        takes: resources other than time that the problem takes, such as "12 GB/h" of a disk. A
            problem with such resources is reported however little time it takes; "" for none.
        parity: parity of the cure's results with the plain results, as a value of Parity; "" if the
            cure changes no result.
        recipe: the cure as changes of a Recipe, by dotted name; empty if code must change.
        edits: the cure as changes of the user's code; empty if none can be written automatically.
        proven: measured ratio of step times without and with the cure, and its interval, as [low,
            mid, high]; None before a trial.
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
        """Return plain data."""
        return asdict(self)
