"""The command `flatout`. A command's heavy imports are in its function, for a fast `--help`."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import Annotated

import typer
from typer import Option

from flatout import __version__
from flatout.cli.clean import clean
from flatout.cli.data import data
from flatout.cli.demo import demo
from flatout.cli.doctor import devices, doctor
from flatout.cli.export import export
from flatout.cli.forecast import forecast
from flatout.cli.jobs import cancel, jobs, logs
from flatout.cli.run import run
from flatout.cli.runs import explain, report, runs, scaling, top
from flatout.cli.submit import submit
from flatout.console import folded, say_as_is
from flatout.errors import FlatoutError
from flatout.measure import require_proc

app = typer.Typer(
    help="Trains PyTorch models as fast as the hardware allows.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
# Words after the script's name belong to the script, even if they look like options.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command(context_settings={"allow_interspersed_args": False})(doctor)
app.command()(top)
app.command()(explain)
app.command()(report)
app.command()(runs)
app.command()(export)
app.command()(devices)
app.command()(scaling)
app.command()(forecast)
app.add_typer(submit, name="submit")
app.command()(jobs)
app.command()(logs)
app.command()(cancel)
app.command()(clean)
app.add_typer(data, name="data")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"flatout {__version__}")
        raise typer.Exit


@app.callback()
def _flatout(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    require_proc()


def main() -> None:
    """Run the command line. Errors for people exit with 1, wrong usage with 2.

    FLATOUT_DEBUG=1 shows the traceback of an error for people as well. Characters that an output
    cannot encode, such as the odd bytes of a file's name, are shown as "?".
    """
    _open_what_was_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    try:
        app()
    except FlatoutError as error:
        if os.environ.get("FLATOUT_DEBUG") == "1":
            raise
        say_as_is(folded(f"error: {error}", sys.stderr))
        sys.exit(1)


def _open_what_was_closed() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
