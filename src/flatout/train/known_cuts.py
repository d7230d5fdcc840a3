"""Where earlier runs have kept features of a model: places, written down in the cache folder.

Known before the model is looked at, so that an evaluation need not look for nothing.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from flatout.cache_folder import kind_folder, private


def places_of(name: str) -> list[list[int]]:
    """What was written down under a name."""
    with suppress(OSError, ValueError):
        return [json.loads(line) for line in _path(name).read_text().splitlines()]
    return []


def add_place(name: str, place: list[int]) -> None:
    """Write a place down, if the cache folder can be written."""
    with suppress(OSError), open(_path(name), "a", opener=private) as file:
        file.write(f"{json.dumps(place)}\n")


def _path(name: str) -> Path:
    return kind_folder("features") / f"{name}.cuts"
