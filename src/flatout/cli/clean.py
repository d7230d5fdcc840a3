"""`flatout clean`: what Flatout keeps for the next time, and removing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from flatout.cli.common import agrees, console, print_json
from flatout.console import printable
from flatout.words import size_words

_HOW = "flatout clean --yes removes what is not in use"

if TYPE_CHECKING:
    from flatout.doctor import KeptFile


def clean(
    yes: Annotated[bool, Option("--yes", "-y", help="Remove it without asking.")] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object; removes only with --yes.")
    ] = False,
) -> None:
    """List what lies in Flatout's cache folder, and remove it when you agree.

    All of it can be made again, but for the way back from `flatout doctor --fix`. What a living
    process uses stays.
    """
    from flatout.cache_folder import cache_folder
    from flatout.doctor import remove
    from flatout.doctor.kept import kept

    entries = kept()
    free = [entry for entry in entries if not entry.is_used]
    if not as_json:
        _print(entries, str(cache_folder()))
    is_agreed = bool(free) and (yes or (not as_json and agrees("Remove what is not in use?", _HOW)))
    removed = remove(free) if is_agreed else []
    if as_json:
        paths = [str(entry.path) for entry in removed]
        answer = {"kept": [entry.as_dict() for entry in entries], "removed": paths}
        print_json({"folder": str(cache_folder()), **answer})
    elif is_agreed:
        typer.echo(printable(f"removed {size_words(sum(entry.bytes for entry in removed))}"))
    if is_agreed and len(removed) < len(free):
        left = [str(entry.path) for entry in free if entry not in removed]
        typer.echo(printable(f"could not be removed: {', '.join(left)}"), err=True)
        raise typer.Exit(1)


def _print(entries: list[KeptFile], folder: str) -> None:
    from rich.table import Table

    from flatout.doctor import KINDS, not_marked

    for path in not_marked():
        typer.echo(printable(f"{path} was not made by Flatout, and stays"), err=True)
    if not entries:
        typer.echo(printable(f"{folder}: nothing is kept"))
        return
    out = console()
    out.print(folder, soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    for kind, words in KINDS.items():
        for is_used in (False, True):
            some = [entry for entry in entries if entry.kind == kind and entry.is_used == is_used]
            if some:
                used = "; in use, stays" if is_used else ""
                size = size_words(sum(entry.bytes for entry in some))
                table.add_row(kind, size, f"{len(some)} · {words}{used}")
    out.print(table)
