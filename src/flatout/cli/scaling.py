"""`flatout scaling`: what more ranks gave, and what they lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.cli.common import AsJson, console, print_json


def scaling(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUNS...", help="Run folders, or files of History.save.")
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it too: .png, .svg or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs of one job on 1 to N ranks: throughput, efficiency, what time was lost to."""
    from flatout.report import Scaling

    result = Scaling.from_runs(runs)
    if plot is not None:
        result.plot(plot)
    if as_json:
        print_json(result.as_dict())
        return
    console().print(result)
