"""The corpus of pitfalls: `bench/corpus/index.toml` and the scripts that it names."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flatout.devices import inventory, usable_cpus

CORPUS = Path(__file__).parent / "corpus"
MARK = "# <- here"
PARITIES = ("bit-identical", "rounding", "redrawn", "changes learning")


@dataclass(frozen=True)
class Pitfall:
    """A row of the index, which says what the fields are."""

    name: str
    what: str
    parity: str
    checks: tuple[str, ...]
    ranks: int = 1
    danger: bool = False
    prescribe: bool = True
    name_anyway: bool = False
    needs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        return CORPUS / "pitfall" / f"{self.name}.py"

    def write_clean(self, folder: Path) -> Path:
        """Write the script without the pitfall into a folder, under the same name."""
        patch = CORPUS / "clean" / f"{self.name}.patch"
        clean = folder / self.script.name
        clean.write_text(patched(self.script.read_text(), patch.read_text()))
        return clean

    @cached_property
    def marked(self) -> frozenset[int]:
        """The lines of the script, from 1, of which the doctor must name one."""
        lines = self.script.read_text().splitlines()
        return frozenset(number for number, line in enumerate(lines, 1) if MARK in line)

    @property
    def must_be_named(self) -> bool:
        return self.prescribe or self.danger or self.name_anyway


def read_index() -> list[Pitfall]:
    with (CORPUS / "index.toml").open("rb") as file:
        rows = tomllib.load(file)["pitfall"]
    given = [{"checks": [row["name"]], **row} for row in rows]
    return [Pitfall(**{key: _frozen(value) for key, value in row.items()}) for row in given]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def patched(text: str, patch: str) -> str:
    """Apply a unified diff of one file, with lines of context.

    Raises:
        ValueError: the text is not the one that the diff was made of.
    """
    before, after, at = text.splitlines(), [], 0
    for line in patch.splitlines()[2:]:
        kind, rest = line[:1] or " ", line[1:]
        if kind == "@":
            start = int(line.split()[1].split(",")[0].removeprefix("-")) - 1
            after += before[at:start]
            at = start
        if kind in " -":
            if before[at : at + 1] != [rest]:
                raise ValueError(f"line {at + 1}: the patch expects {rest!r}")
            at += 1
        if kind in " +":
            after.append(rest)
    return "\n".join([*after, *before[at:], ""])


def absence(pitfall: Pitfall) -> str:
    """Why a pitfall cannot be shown here, or an empty text."""
    missing = [need for need in pitfall.needs if not NEEDS[need]()]
    return f"this machine lacks {missing[0]}" if missing else ""


def _has_bf16() -> bool:
    return any("bf16" in unit for unit in inventory().cpus.instructions)


NEEDS: Mapping[str, Callable[[], bool]] = {
    "keras": lambda: find_spec("keras") is not None,
    "sklearn": lambda: find_spec("sklearn") is not None,
    "pandas": lambda: find_spec("pandas") is not None,
    "pillow": lambda: find_spec("PIL") is not None,
    "bf16": _has_bf16,
    "two_cpus": lambda: usable_cpus() >= 2,
}
