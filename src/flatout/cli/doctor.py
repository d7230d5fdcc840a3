"""`flatout doctor`: what is wrong with this machine and environment."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine and environment: what holds every job back here, and what to do."""
    from flatout.devices.inventory import inventory
    from flatout.devices.words import rows
    from flatout.doctor.machine import CHECKS, Facts, check_machine

    machine = inventory()
    found = check_machine(Facts(machine))
    if as_json:
        import json

        typer.echo(json.dumps({"findings": [finding.as_dict() for finding in found]}, indent=2))
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    here = Table.grid(padding=(0, 2))
    here.add_column(style="bold", no_wrap=True)
    for name, words in rows(machine):
        here.add_row(name, words)
    console.print(here)
    for finding in found:
        style = {"danger": "bold red", "slow": "bold yellow", "note": "bold"}[finding.kind]
        console.print()
        console.print(Text.assemble((finding.kind.upper(), style), f"  {finding.what}"))
        console.print(Padding(f"do: {finding.do}", (0, 0, 0, 2)))
    console.print()
    passed = len(CHECKS) - len(found)
    console.print(f"{passed} of {len(CHECKS)} checks found nothing")
