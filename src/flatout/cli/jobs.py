"""`flatout jobs`, `flatout logs` and `flatout cancel`: jobs that were sent from here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.console import printable

if TYPE_CHECKING:
    from flatout.submit import Seen

Which = Annotated[str, typer.Argument(metavar="JOB", help="Its id, or its name.")]


def jobs(
    which: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="One of them: its id or name.")
    ] = None,
    all: Annotated[
        bool, typer.Option("--all", help="Also those that ended more than a week ago.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the jobs that were sent from here, and what has become of them."""
    from flatout.submit import look, recent

    found = recent(everything=all) if which is None else [look(which)]
    if as_json:
        import json

        typer.echo(json.dumps({"jobs": [one.as_dict() for one in found]}, indent=2))
        return
    if not found:
        typer.echo("no job was sent from here")
        return
    from flatout.terminal import Console

    console = Console(highlight=False, markup=False)
    console.print(_table(found), soft_wrap=not console.is_terminal)
    if which is not None:
        for line in found[0].last_words():
            console.print(line, soft_wrap=True)


def _table(found: list[Seen]) -> Any:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name in ("job", "target", "state", "ran", "nodes", "name", ""):
        table.add_column(name, overflow="fold")
    table.show_header = True
    for one in found:
        table.add_row(*one.row())
    return table


def logs(
    which: Which,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
) -> None:
    """Print what a job has printed. With -f the exit code is the job's."""
    from flatout.submit import exit_code, logs_of

    try:
        for piece in logs_of(which, follow=follow):
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:  # the job goes on
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # Python would say so again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    if follow:
        raise typer.Exit(exit_code(which))


def cancel(
    which: Annotated[list[str], typer.Argument(metavar="JOB...", help="Their ids, or names.")],
) -> None:
    """Stop jobs. Where they can they write a last checkpoint; they do not start again."""
    from flatout.submit import Ledger, target_of

    for entry in [Ledger().find(one) for one in which]:
        target_of(entry.target).cancel(entry.id, Path(entry.folder))
        typer.echo(printable(f"canceled {entry.id or entry.name}"))
