"""Facts that must be the same on all nodes of a job, compared before its first rank starts."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path

from flatout import __version__
from flatout.errors import WorldError

RANKS = "--devices"
"""The name of the fact with the number of ranks on each node."""

_OPEN = "auto"


@dataclass(frozen=True)
class Arrival:
    """A node that has come to the rendezvous."""

    node: int
    host: str
    pid: int
    key: str
    facts: dict[str, str]

    @classmethod
    def read(cls, words: str | bytes) -> Arrival:
        return cls(**json.loads(words))

    def words(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"{self.host} (process {self.pid})"


def facts_here(
    script: str, is_module: bool, ranks: int | None, recipe: Mapping[str, object]
) -> dict[str, str]:
    """Return the facts about the command that this node is about to run.

    Args:
        ranks: number of ranks on this node; None if the first node decides.
        recipe: the fields that are asked for by name.
    """
    path = _file_of(script) if is_module else Path(script)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path is not None else "?"
    return {
        RANKS: _OPEN if ranks is None else str(ranks),
        "script": f"{'-m ' if is_module else ''}{Path(script).name}, sha256 {digest}",
        "flatout": __version__,
        "torch": version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{field: str(value) for field, value in recipe.items()},
    }


def _file_of(module: str) -> Path | None:
    path: Sequence[str] | None = ["", *sys.path]
    spec = None
    for name in [*module.split("."), "__main__"]:
        result = PathFinder.find_spec(name, path)
        if result is None:
            break
        spec, path = result, result.submodule_search_locations
        if path is None:
            break
    return None if spec is None or not spec.has_location else Path(str(spec.origin))


def disagreement(came: Sequence[Arrival]) -> WorldError | None:
    """Return the error of the newest node that has come, or None if it agrees."""
    first, newest = came[0], came[-1]
    same = next((item for item in came[:-1] if item.node == newest.node), None)
    if same is not None:
        return WorldError(
            f"two nodes say that they are node {newest.node}: {same} and {newest}",
            do="give each node its own --node-rank, from 0",
        )
    differing = [
        f"{name}: {_value_of(first, name)} on node {first.node} ({first.host}), "
        f"{_value_of(newest, name)} on node {newest.node} ({newest.host})"
        for name in dict.fromkeys([*first.facts, *newest.facts])
        if first.facts.get(name) != newest.facts.get(name)
        and (name, newest.facts.get(name)) != (RANKS, _OPEN)
    ]
    if differing:
        return WorldError(
            f"nodes {first.node} and {newest.node} are not about to run the same",
            where="\n  ".join(differing),
            do="start all nodes with the same options, script, Recipe and versions",
        )
    return None


def _value_of(arrival: Arrival, name: str) -> str:
    return arrival.facts.get(name, "nothing")
