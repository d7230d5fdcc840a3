"""`flatout top`: what running jobs do right now."""

from __future__ import annotations

from typing import Annotated

import typer

from flatout.cli.common import console, print_json


def top(
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A job: its run folder, its script's name, the pid of one of its ranks, or the "
            "id or name of one that flatout submit has sent.",
        ),
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Any process, with all that it has started: CPU, memory, threads, bytes read.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Look once, and print one JSON object.")
    ] = False,
) -> None:
    """Show the lanes of running jobs, rank by rank, until Ctrl-C."""
    from flatout.report import Top, watch

    looking = Top(which, pid)
    if which is not None and pid is None and not looking.sample().jobs:
        from flatout.submit import top_of

        looking = top_of(which) or looking
    if as_json:
        print_json(looking.sample().as_dict())
        return
    out = console()
    if out.is_terminal and not once:
        watch(looking, out)
        return
    sample = looking.sample()
    looking.check(sample)
    out.print(sample)
