"""Some of the ranks of a job, among themselves."""

from __future__ import annotations

from typing import Any, NamedTuple


class Group(NamedTuple):
    """Ranks with their own channel: what they do there is in order among them alone.

    Attributes:
        ranks: of the World.
        own: where this rank stands among them, from 0.
        channel: torch's process group.
    """

    ranks: tuple[int, ...]
    own: int
    channel: Any
