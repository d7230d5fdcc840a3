"""`flatout scaling`: what more ranks gave, and what they lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def scaling(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUNS...", help="Run folders, or files of History.save.")
    ],
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it too: .png, .svg or .pdf.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare runs of one job on 1 to N ranks: throughput, efficiency, what time was lost to."""
    from flatout.report import Scaling

    result = Scaling.from_runs(runs)
    if plot is not None:
        result.plot(plot)
    if as_json:
        import json

        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    from flatout.terminal import Console

    Console(highlight=False, markup=False).print(result)
