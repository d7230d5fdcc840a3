"""Makes Observations from plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from flatout.observe import Observation


def observed(ranks: Iterable[Observation | Mapping[str, Any]] | None) -> list[Observation]:
    """Return each rank's Observation; an empty list for None."""
    return _adapter().validate_python(list(ranks or ()))


@cache
def _adapter() -> TypeAdapter[list[Observation]]:
    # Making an adapter takes longer than reading all ranks with it.
    return TypeAdapter(list[Observation])
