"""`flatout jobs`, `flatout logs` and `flatout cancel`: jobs that were sent from here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from flatout.cli.common import AsJson, print_json
from flatout.console import colorless, folded, printable

_HEADS = ("job", "target", "state", "ran", "name and nodes")
Which = Annotated[str, Argument(metavar="JOB", help="Its id, or its name.")]


def jobs(
    which: Annotated[
        str | None, Argument(metavar="[JOB]", help="One of them: its id or name.")
    ] = None,
    all: Annotated[
        bool, Option("--all", help="Also those that ended more than a week ago.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the jobs that were sent from here, and what has become of them."""
    from flatout.submit import look, recent

    statuses = recent(everything=all) if which is None else [look(which)]
    if as_json:
        print_json({"jobs": [status.as_dict() for status in statuses]})
        return
    if not statuses:
        typer.echo("no job was sent from here")
        return
    for line in _table([status.row() for status in statuses]):
        typer.echo(folded(printable(line)))
    if which is not None:
        for line in statuses[0].last_words():
            typer.echo(printable(colorless(line)))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    *heads, _ = _HEADS
    widths = [
        max(map(len, column)) for column in zip(heads, *(row[:-1] for row in rows), strict=True)
    ]
    whole = [("  ".join(map(str.ljust, cells, widths)), rest) for *cells, rest in (_HEADS, *rows)]
    is_wide = all(folded(line := f"{cells}  {rest}") == line for cells, rest in whole)
    if is_wide:
        return [f"{cells}  {rest}".rstrip() for cells, rest in whole]
    return [line.rstrip() for cells, rest in whole for line in (cells, f"  {rest}")]


def logs(
    which: Which,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
) -> None:
    """Print what a job has printed. With -f the exit code is the job's."""
    from flatout.submit import exit_code, logs_of

    try:
        for piece in logs_of(which, follow=follow):
            sys.stdout.write(printable(colorless(piece)))
            sys.stdout.flush()
    except KeyboardInterrupt:  # the job continues
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # Otherwise Python would report the error again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    if follow:
        raise typer.Exit(exit_code(which))


def cancel(
    which: Annotated[list[str], Argument(metavar="JOB...", help="Their ids, or names.")],
) -> None:
    """Stop jobs. Where they can they write a last checkpoint; they do not start again."""
    from flatout.submit import Ledger, target_of

    for entry in [Ledger().find(name) for name in which]:
        target_of(entry.target).cancel(entry.id, Path(entry.folder))
        typer.echo(printable(f"canceled {entry.id or entry.name}"))
