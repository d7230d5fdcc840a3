"""What a check says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["danger", "slow", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that holds jobs back, or endangers them.

    Attributes:
        name: short, the same in every run, such as "threads".
        kind: "danger" where a job may fail or learn something wrong, "slow" where it costs time,
            "note" for what is only good to know.
        what: what was found, with its numbers.
        do: what to do about it.
    """

    name: str
    kind: Kind
    what: str
    do: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
