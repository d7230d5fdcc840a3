"""`flatout doctor`: what is wrong with this machine, or what holds a script back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flatout.doctor.first_look import FirstLook
    from flatout.doctor.judge import Verdict
    from flatout.report.baseline import Compared

FAILED, DANGER = 1, 3
"""Exit codes, beside 0 for nothing dangerous and 2 for wrong usage."""


def doctor(
    script: Annotated[
        str | None,
        typer.Argument(
            help="A Python file, a module after -m, or torchrun with its arguments. Without one, "
            "the machine is checked.",
            show_default=False,
        ),
    ] = None,
    args: Annotated[
        list[str] | None, typer.Argument(help="The script's own, passed on as they are.")
    ] = None,
    is_module: Annotated[
        bool, typer.Option("-m", help="The script is a module or package, as in python -m.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="How long its steps are watched, from the first one.")
    ] = 20.0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="How many steps are watched at most.", show_default=False),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the script's output, on standard error.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    page: Annotated[
        Path | None, typer.Option("--page", help="Write what was found as one HTML file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the steps for ui.perfetto.dev.")
    ] = None,
    ci: Annotated[
        Path | None,
        typer.Option("--ci", help="Compare with this baseline: 3 for a new danger, or slower."),
    ] = None,
    write_baseline: Annotated[
        Path | None,
        typer.Option("--write-baseline", help="Keep what was found, for --ci to compare with."),
    ] = None,
) -> None:
    """Check this machine and environment; or watch a script: what holds it back, what endangers it.

    The script runs as python would run it, for some seconds and with its standard input closed.
    What it writes in that time, it writes. Exit code: 0 nothing dangerous, 1 the script failed, 2
    wrong usage, 3 a danger was found.
    """
    if script is None:
        if is_module:
            raise typer.BadParameter("-m needs the name of a module")
        _check_machine(as_json)
        return
    if not is_module and script != "torchrun" and not Path(script).is_file():
        raise typer.BadParameter(f"{script}: no such script (-m runs a module)")
    from flatout.devices.inventory import inventory
    from flatout.doctor.first_look import first_look
    from flatout.doctor.judge import judge
    from flatout.report.baseline import Baseline
    from flatout.report.files import Files

    wanted = Files(page, trace, None if ci is None else Baseline.read(ci), write_baseline)
    what = [*(["-m"] if is_module else []), script, *(args or [])]
    if sys.stderr.isatty():
        typer.echo(
            f"watching {script} for {seconds:g} s from its first step; Ctrl-C ends it", err=True
        )
    look = first_look(what, seconds=seconds, steps=steps, verbose=verbose)
    machine = inventory()
    verdict = judge(look.observations, machine) if look.observations else None
    compared = wanted.write(verdict) if verdict is not None else None
    if as_json:
        _print_json(look, verdict, what, compared)
    else:
        from rich.console import Console

        from flatout.report.first_look import FirstLookReport

        console = Console(highlight=False, markup=False, soft_wrap=False)
        if verdict is not None:
            console.print(FirstLookReport(verdict, machine, look.seconds, what))
        for line in [*told(look, verdict), *(compared.words() if compared else [])]:
            console.print(line)
    raise typer.Exit(_code(look, verdict, compared))


def told(look: FirstLook, verdict: Verdict | None) -> list[str]:
    """Returns how the script ended, where that needs words; an error with its last lines."""
    if look.interrupted_by is not None:
        until = "what was seen until then is above" if verdict else "before anything was seen"
        return [f"stopped by a signal ({_name(look.interrupted_by)}), {until}; nothing runs on"]
    if look.failed:
        return [f"error: {_failure(look, verdict)}", *_last(look, verdict)]
    if verdict is None or not verdict.steps:
        when = f"in {look.seconds:.0f} s" if look.exit_code is None else "before it ended"
        return [
            f"the script took no optimiser step {when}",
            "  do: if it trains later, give it less to do before; if it is no training script, "
            "there is nothing to find",
            *[f"  {line}" for line in look.output[-3:]],
        ]
    return []


def _failure(look: FirstLook, verdict: Verdict | None) -> str:
    error = verdict.error if verdict else "\n".join(look.output)
    if "EOFError" in error:
        return "the script asked for input, which it cannot have here: give it arguments instead"
    if look.exit_code is not None and look.exit_code < 0:
        hint = "; out of memory?" if look.exit_code == -9 else ""
        return f"the script was ended by a signal ({_name(-look.exit_code)}{hint})"
    return f"the script failed (exit code {look.exit_code})"


def _last(look: FirstLook, verdict: Verdict | None) -> list[str]:
    """The end of the error as Python tells it, or of the output where no error is known."""
    error = verdict.error.strip().splitlines() if verdict else []
    return [f"  {line}" for line in (error[-8:] or look.output)]


def _name(number: int) -> str:
    import signal

    return signal.Signals(number).name


def _code(look: FirstLook, verdict: Verdict | None, compared: Compared | None) -> int:
    if look.interrupted_by is not None:
        return 128 + look.interrupted_by
    if look.failed:
        return FAILED
    if compared is not None:
        return compared.exit_code
    return DANGER if verdict and verdict.dangers else 0


def _print_json(
    look: FirstLook, verdict: Verdict | None, what: list[str], compared: Compared | None
) -> None:
    import json

    nothing = {"command": what, "ended": "failed" if look.failed else "no steps", "findings": []}
    seen = verdict.as_dict() if verdict else nothing
    told_of = {
        "exit_code": look.exit_code,
        "interrupted_by": look.interrupted_by,
        "output": look.output,
        "seconds": round(look.seconds, 1),
        "compared": compared.as_dict() if compared else None,
    }
    typer.echo(json.dumps(seen | told_of, indent=2))


def _check_machine(as_json: bool) -> None:
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
