"""`flatout explain`: why a run ran as it did, and how far it is from its machine's limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, or a file of History.save.")
    ],
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the roofline too: .png, .svg or .pdf.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what was tried on which steps, what was chosen and why, and what limits a step."""
    from flatout.report import read_run

    result = read_run(run)
    if plot is not None:
        from flatout.train import explanation_picture

        explanation_picture.draw(result, plot)
    if as_json:
        import json

        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    from flatout.terminal import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    bars = ("#", ".") if console.options.ascii_only else ("█", "░")
    for line in result.lines(*bars):
        console.print(line)
