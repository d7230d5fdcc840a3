"""`flatout devices`: the hardware of this machine, without touching a device context."""

from __future__ import annotations

from flatout.cli.common import AsJson, console, grid, print_json


def devices(as_json: AsJson = False) -> None:
    """Show what this machine has for training."""
    from flatout.devices import inventory, rows

    result = inventory()
    if as_json:
        print_json(result.as_dict())
        return
    console().print(grid(rows(result)))
