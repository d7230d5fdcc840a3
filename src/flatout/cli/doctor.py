"""`flatout doctor` and `devices`: what this machine has, what is wrong, what slows a script."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from flatout.cli.common import AsJson, console, grid, print_json

# Maximum number of files in a script's folder that are searched for the names of its options.
_FILES = 100


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
    is_module: Annotated[
        bool, Option("-m", help="The script is a module or package, as in python -m.")
    ] = False,
    seconds: Annotated[
        float, Option(min=1.0, help="How long its steps are watched, from the first one.")
    ] = 20.0,
    steps: Annotated[int | None, Option(min=1, help="How many steps are watched at most.")] = None,
    in_place: Annotated[
        bool,
        Option("--in-place", help="Watch it where it is: what it writes and sends then is real."),
    ] = False,
    yes: Annotated[
        bool, Option("--yes", "-y", help="Prove cures in trials without asking.")
    ] = False,
    no_trials: Annotated[bool, Option("--no-trials", help="Watch only.")] = False,
    search: Annotated[
        bool,
        Option(
            "--search", help="Look for the best Recipe: try settings, too, that no check found."
        ),
    ] = False,
    verify_full: Annotated[
        bool,
        Option(
            "--verify-full",
            help="Then run the script to its end, as it is and with what was proven, and compare "
            "the final losses.",
        ),
    ] = False,
    seeds: Annotated[int, Option(min=2, max=10, help="How many times --verify-full does so.")] = 3,
    target_loss: Annotated[
        float | None,
        Option(
            help="With --verify-full: a loss; says how long each takes to it. [default: "
            "the lowest that both reach]"
        ),
    ] = None,
    budget: Annotated[
        str | None,
        Option(
            metavar="TIME", help="For all trials, such as 90s or 2m. [default: 2m; 10m to search]"
        ),
    ] = None,
    allow: Annotated[
        str | None,
        Option(
            metavar="exact|tolerant|redrawn",
            help="What a cure may do to the result: keep its bits, round otherwise, draw random "
            "numbers again. [default: tolerant; exact for --fix]",
        ),
    ] = None,
    diff: Annotated[
        bool, Option("--diff", help="Show cures as changes of your code, for patch -p1.")
    ] = False,
    fix: Annotated[
        bool, Option("--fix", help="Make those in your code that --allow allows.")
    ] = False,
    recipe: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Where to write the Recipe of what was proven. [default: flatout.toml]",
        ),
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Write it also over a file of your own.")
    ] = False,
    verbose: Annotated[
        bool,
        Option(
            "--verbose",
            help="Show the script's output, on standard error, and all that was found in full.",
        ),
    ] = False,
    as_json: AsJson = False,
    page: Annotated[
        Path | None, Option("--page", help="Write what was found as one HTML file.")
    ] = None,
    trace: Annotated[
        Path | None, Option("--trace", help="Write the steps for ui.perfetto.dev.")
    ] = None,
    ci: Annotated[
        Path | None,
        Option("--ci", help="Compare with this baseline: 3 for a new danger, or slower."),
    ] = None,
    write_baseline: Annotated[
        Path | None,
        Option("--write-baseline", help="Keep what was found, for --ci to compare with."),
    ] = None,
) -> None:
    """Check this machine and environment; or watch a script: what holds it back, what endangers it.

    The script runs as python would run it, for some seconds, with its standard input closed and in
    a scratch copy of your files. Then, if you agree, each cure is tried against it, in short
    reruns. Exit code: 0 nothing dangerous, 1 the script failed, 2 wrong usage, 3 a danger was
    found.
    """
    if script is None:
        if is_module:
            raise typer.BadParameter("-m needs the name of a module")
        _check_machine(as_json)
        return
    if not is_module:
        _check_script(script)
    if yes and no_trials:
        raise typer.BadParameter("--yes asks for trials, --no-trials for none: give one of them")
    if target_loss is not None and not (verify_full and math.isfinite(target_loss)):
        raise typer.BadParameter("--target-loss needs --verify-full and a number to reach")
    if allow not in (None, "exact", "tolerant", "redrawn"):
        raise typer.BadParameter(f"--allow: expected exact, tolerant or redrawn; found {allow!r}")
    if as_json and (diff or fix):
        raise typer.BadParameter("--json has the changes in it already: leave --diff or --fix away")
    budget_s = _seconds(budget or ("10m" if search else "2m"))
    from flatout.recipe import Parity
    from flatout.report import Asked, Baseline, Files, diagnose, recipe_file

    what = [*(["-m"] if is_module else []), script, *(args or [])]
    _set_keras_backend(what)
    _tell_misplaced(context, what, args or [])
    asked = Asked(
        what=what,
        recipe=recipe_file.place(recipe, force=force),
        seconds=seconds,
        steps=steps,
        verbose=verbose,
        in_place=in_place,
        proves=True if yes else False if no_trials else None,
        budget_s=budget_s,
        allow=Parity.from_name(allow or "tolerant"),
        searches=search,
        seeds=seeds if verify_full else 0,
        target=target_loss,
        as_json=as_json,
        files=Files(page, trace, None if ci is None else Baseline.read(ci), write_baseline),
        diff=diff,
        fix=Parity.from_name(allow or "exact") if fix else None,
    )
    raise typer.Exit(diagnose(asked))


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


def _tell_misplaced(context: typer.Context, what: list[str], args: list[str]) -> None:
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
