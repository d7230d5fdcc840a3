"""Options and output that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from flatout.console import printable

if TYPE_CHECKING:
    from rich.table import Table

    from flatout.terminal import Console

AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
Texts = list[str] | None
"""The values of an option that can be given several times."""


def print_json(data: Any) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(data, indent=2))


def console(**options: Any) -> Console:
    """Return a console that prints texts as they are."""
    from flatout.terminal import Console

    return Console(highlight=False, markup=False, **options)


def grid(rows: Iterable[tuple[str, ...]]) -> Table:
    """Return a table without lines, whose first column holds bold names."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def agrees(question: str, otherwise: str) -> bool:
    """Ask the user; without a terminal print another line instead, and return False."""
    if not sys.stdin.isatty():
        typer.echo(printable(otherwise))
        return False
    return typer.confirm(question)
