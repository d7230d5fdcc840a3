"""`flatout report`: what a run did, and what changed between runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.cli.common import console, print_json


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folders; the others are judged by the first."),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the page there; that of one run goes to RUN/report.html without.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and write no page unasked.")
    ] = False,
    fail_if: Annotated[
        str | None,
        typer.Option(
            metavar="slower=5%",
            help="Exit with 3 where a run is so much slower than the first, noise included.",
        ),
    ] = None,
) -> None:
    """Tell of one run, as text and as an HTML page, or of what changed between several."""
    from flatout.report import Report

    result = Report(runs)
    page = None if as_json and html is None else result.write(html)
    failed = [] if fail_if is None else result.fails(fail_if)
    if as_json:
        print_json(result.as_dict() | {"failed": failed})
    else:
        out = console(soft_wrap=True)
        for line in result.lines():
            out.print(line)
        if page is not None:
            out.print(f"page: {page}")
        for line in failed:
            out.print(f"FAILED: {line}")
    if failed:
        raise typer.Exit(3)
