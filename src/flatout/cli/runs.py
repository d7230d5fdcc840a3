"""Commands about runs: `flatout explain`, `report`, `runs`, `scaling` and `top`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from flatout.cli.common import AsJson, console, print_json


def explain(
    run: Annotated[str, Argument(metavar="RUN", help="A run folder, or a file of History.save.")],
    plot: Annotated[
        Path | None, Option(metavar="FILE", help="Draw the roofline too: .png, .svg or .pdf.")
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


def report(
    runs: Annotated[
        list[str],
        Argument(metavar="RUN...", help="Run folders; the others are judged by the first."),
    ],
    html: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write the page there; that of one run goes to RUN/report.html without.",
        ),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object, and write no page unasked.")
    ] = False,
    fail_if: Annotated[
        str | None,
        Option(
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


def runs(
    folder: Annotated[str, Argument(help="Where to look, at any depth.")] = "runs",
    as_json: Annotated[
        bool, Option("--json", help="Print all of them as one JSON object.")
    ] = False,
) -> None:
    """List when jobs ran in the run folders below a folder, and how they ended, the newest last."""
    from flatout.report import RunHistory

    history = RunHistory.below(folder)
    if as_json:
        print_json(history.as_dict())
        return
    console().print(history)


def scaling(
    runs: Annotated[
        list[str], Argument(metavar="RUNS...", help="Run folders, or files of History.save.")
    ],
    plot: Annotated[
        Path | None, Option(metavar="FILE", help="Draw it too: .png, .svg or .pdf.")
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


def top(
    which: Annotated[
        str | None,
        Argument(
            metavar="[RUN]",
            help="A job: its run folder, its script's name, the pid of one of its ranks, or the "
            "id or name of one that flatout submit has sent.",
        ),
    ] = None,
    pid: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Any process, with all that it has started: CPU, memory, threads, bytes read.",
        ),
    ] = None,
    once: Annotated[bool, Option("--once", help="Look once.")] = False,
    as_json: Annotated[
        bool, Option("--json", help="Look once, and print one JSON object.")
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
