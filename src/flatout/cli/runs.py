"""`flatout runs`: the history of all runs below a folder."""

from __future__ import annotations

from typing import Annotated

import typer

from flatout.cli.common import console, print_json


def runs(
    folder: Annotated[str, typer.Argument(help="Where to look, at any depth.")] = "runs",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all of them as one JSON object.")
    ] = False,
) -> None:
    """List when jobs ran in the run folders below a folder, and how they ended, the newest last."""
    from flatout.report import RunHistory

    history = RunHistory.below(folder)
    if as_json:
        print_json(history.as_dict())
        return
    console().print(history)
