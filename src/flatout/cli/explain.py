"""`flatout explain`: why a run ran as it did, and how far it is from its machine's limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.cli.common import AsJson, console, print_json


def explain(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, or a file of History.save.")
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the roofline too: .png, .svg or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what was tried on which steps, what was chosen and why, and what limits a step."""
    from flatout.report import read_run

    result = read_run(run)
    if plot is not None:
        from flatout.train import explanation_picture

        explanation_picture.draw(result, plot)
    if as_json:
        print_json(result.as_dict())
        return
    out = console(soft_wrap=True)
    bars = ("#", ".") if out.options.ascii_only else ("█", "░")
    for line in result.lines(*bars):
        out.print(line)
