"""`flatout devices`: what this machine has, without touching a device context."""

from __future__ import annotations

from typing import Annotated

import typer


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what this machine has for training."""
    from flatout.devices import inventory, rows

    result = inventory()
    if as_json:
        import json

        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    from rich.table import Table

    from flatout.terminal import Console

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for name, words in rows(result):
        table.add_row(name, words)
    Console(highlight=False, markup=False).print(table)
