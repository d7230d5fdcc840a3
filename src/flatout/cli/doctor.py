"""`flatout doctor` and `devices`: what this machine has, what is wrong, what slows a script."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from flatout.cli.common import AsJson, console, grid, option, print_json, with_options

# Maximum number of files in a script's folder that are searched for the names of its options.
_FILES = 100


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `flatout doctor`."""

    is_module: bool = option(False, "The script is a module or package, as in python -m.", "-m")
    seconds: float = option(20.0, "How long its steps are watched, from the first one.", min=1.0)
    steps: int | None = option(None, "How many steps are watched at most.", min=1)
    in_place: bool = option(False, "Watch it where it is: what it writes and sends then is real.")
    yes: bool = option(False, "Prove cures in trials without asking.", "--yes", "-y")
    no_trials: bool = option(False, "Watch only.")
    search: bool = option(
        False, "Look for the best Recipe: try settings, too, that no check found."
    )
    verify_full: bool = option(
        False,
        "Then run the script to its end, as it is and with what was proven, and compare "
        "the final losses.",
    )
    seeds: int = option(3, "How many times --verify-full does so.", min=2, max=10)
    target_loss: float | None = option(
        None,
        "With --verify-full: a loss; says how long each takes to it. [default: "
        "the lowest that both reach]",
    )
    budget: str | None = option(
        None, "For all trials, such as 90s or 2m. [default: 2m; 10m to search]", metavar="TIME"
    )
    allow: str | None = option(
        None,
        "What a cure may do to the result: keep its bits, round otherwise, draw random "
        "numbers again. [default: tolerant; exact for --fix]",
        metavar="exact|tolerant|redrawn",
    )
    diff: bool = option(False, "Show cures as changes of your code, for patch -p1.")
    fix: bool = option(False, "Make those in your code that --allow allows.")
    recipe: Path | None = option(
        None,
        "Where to write the Recipe of what was proven. [default: flatout.toml]",
        metavar="FILE",
    )
    force: bool = option(False, "Write it also over a file of your own.")
    verbose: bool = option(
        False, "Show the script's output, on standard error, and all that was found in full."
    )
    as_json: bool = option(False, "Print one JSON object.", "--json")
    page: Path | None = option(None, "Write what was found as one HTML file.")
    trace: Path | None = option(None, "Write the steps for ui.perfetto.dev.")
    ci: Path | None = option(None, "Compare with this baseline: 3 for a new danger, or slower.")
    write_baseline: Path | None = option(None, "Keep what was found, for --ci to compare with.")


@with_options
def doctor(
    context: typer.Context,
    script: Annotated[
        str | None,
        Argument(
            help="A Python file, a module after -m, or torchrun with its arguments. Without one, "
            "the machine is checked."
        ),
    ] = None,
    args: Annotated[
        list[str] | None, Argument(help="The script's own, passed on as they are.")
    ] = None,
    *,
    options: DoctorOptions,
) -> None:
    """Check this machine and environment; or watch a script: what holds it back, what endangers it.

    The script runs as python would run it, for some seconds, with its standard input closed and in
    a scratch copy of your files. Then, if you agree, each cure is tried against it, in short
    reruns. Exit code: 0 nothing dangerous, 1 the script failed, 2 wrong usage, 3 a danger was
    found.
    """
    if script is None:
        if options.is_module:
            raise typer.BadParameter("-m needs the name of a module")
        _check_machine(options.as_json)
        return
    if not options.is_module:
        _check_script(script)
    _check_options(options)
    budget_s = _seconds(options.budget or ("10m" if options.search else "2m"))
    from flatout.recipe import Parity
    from flatout.report import Asked, Baseline, Files, diagnose, recipe_file

    what = [*(["-m"] if options.is_module else []), script, *(args or [])]
    _set_keras_backend(what)
    _report_misplaced(context, what, args or [])
    asked = Asked(
        what=what,
        recipe=recipe_file.place(options.recipe, force=options.force),
        seconds=options.seconds,
        steps=options.steps,
        verbose=options.verbose,
        in_place=options.in_place,
        proves=True if options.yes else False if options.no_trials else None,
        budget_s=budget_s,
        allow=Parity.from_name(options.allow or "tolerant"),
        searches=options.search,
        seeds=options.seeds if options.verify_full else 0,
        target=options.target_loss,
        as_json=options.as_json,
        files=Files(
            options.page,
            options.trace,
            None if options.ci is None else Baseline.read(options.ci),
            options.write_baseline,
        ),
        diff=options.diff,
        fix=Parity.from_name(options.allow or "exact") if options.fix else None,
    )
    raise typer.Exit(diagnose(asked))


def _check_options(options: DoctorOptions) -> None:
    if options.yes and options.no_trials:
        raise typer.BadParameter("--yes asks for trials, --no-trials for none: give one of them")
    if options.target_loss is not None and not (
        options.verify_full and math.isfinite(options.target_loss)
    ):
        raise typer.BadParameter("--target-loss needs --verify-full and a number to reach")
    if options.allow not in (None, "exact", "tolerant", "redrawn"):
        raise typer.BadParameter(
            f"--allow: expected exact, tolerant or redrawn; found {options.allow!r}"
        )
    if options.as_json and (options.diff or options.fix):
        raise typer.BadParameter("--json has the changes in it already: leave --diff or --fix away")


def devices(as_json: AsJson = False) -> None:
    """Show what this machine has for training."""
    from flatout.devices import inventory, rows

    result = inventory()
    if as_json:
        print_json(result.as_dict())
        return
    console().print(grid(rows(result)))


def _check_script(script: str) -> None:
    name = Path(script).name
    if re.fullmatch(r"python[\d.]*", name):
        raise typer.BadParameter(f"{script}: give the script alone, without {name}")
    if script != "torchrun" and not os.path.isfile(script):
        raise typer.BadParameter(f"{script}: no such script (-m runs a module)")
    if name.endswith(".ipynb"):
        raise typer.BadParameter(
            f"{script}: a notebook is no script; %load_ext flatout in it observes its cells"
        )


def _set_keras_backend(what: list[str]) -> None:
    from flatout.doctor.script_file import script_file
    from flatout.script_source import keras_backend

    os.environ.update(keras_backend(script_file(what)))


def _report_misplaced(context: typer.Context, what: list[str], args: list[str]) -> None:
    from flatout.doctor.script_file import script_file

    own = {name for item in context.command.params for name in item.opts}
    names = misplaced(args, own, script_file(what))
    if names:
        typer.echo(
            f"{', '.join(names)}: given to the script, as what stands behind it is; the doctor's "
            "own options come before it",
            err=True,
        )


def misplaced(args: list[str], own: set[str], script: Path | None) -> list[str]:
    """Return those of a script's arguments that are options of the doctor.

    A name that occurs in a Python file of the script's folder is the script's own.
    """
    names = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
    mine = [name for name in dict.fromkeys(names) if name in own]
    if not mine or script is None:
        return []
    files = sorted(script.resolve().parent.glob("*.py"))[:_FILES]
    code = "\n".join(file.read_text("utf-8", errors="replace") for file in files)
    return [
        name for name in mine if not re.search(name[2:].replace("-", "[-_]"), code, re.IGNORECASE)
    ]


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) == 0:
        raise typer.BadParameter(f"--budget: expected a time such as 90s or 2m; found {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _check_machine(as_json: bool) -> None:
    from flatout.devices import inventory, rows
    from flatout.doctor import MACHINE_CHECKS, Facts, check_machine

    machine = inventory()
    result = check_machine(Facts(machine))
    if as_json:
        print_json({"findings": [finding.as_dict() for finding in result]})
        return
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    out.print(grid(rows(machine)))
    for finding in result:
        style = {"danger": "bold red", "slow": "bold yellow", "note": "bold"}[finding.kind]
        out.print()
        out.print(Text.assemble((finding.kind.upper(), style), f"  {finding.what}"))
        out.print(Padding(f"do: {finding.do}", (0, 0, 0, 2)))
    out.print()
    passed = len(MACHINE_CHECKS) - len(result)
    out.print(f"{passed} of {len(MACHINE_CHECKS)} checks found nothing")
