"""`flatout data`: look at files, measure reading them, and write them in another format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from flatout.cli.common import Texts, console, option, print_json, with_options
from flatout.console import printable

if TYPE_CHECKING:
    from rich.table import Table

    from flatout.data import Report

data = typer.Typer(
    help="Look at input files, measure reading them, and write them in another format.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Target(StrEnum):
    """Output formats of `convert`."""

    tfrecord = "tfrecord"
    parquet = "parquet"
    rows = "rows"


class Balance(StrEnum):
    """Balancing of classes by `convert`."""

    class_ = "class"
    spread = "spread"


class Sampling(StrEnum):
    """Sampling by which `convert` makes classes equally frequent."""

    over = "over"
    under = "under"


class OnError(StrEnum):
    """Handling of bad rows."""

    fail = "fail"
    skip = "skip"


Paths = Annotated[
    list[str], Argument(metavar="PATHS...", help="Files, quoted patterns, folders or URLs.")
]
_FORMATS = (
    "libsvm, tfrecord, criteo, csv, parquet, arrow, images, rows, idx, npy, npz or hdf5. "
    "Default: by the names, or else the first bytes."
)
Format = Annotated[str | None, Option(help=_FORMATS)]


@dataclass(frozen=True)
class TableOptions:
    """Options of tables, which are arguments of flatout.data.csv, parquet and arrow."""

    target: Texts = option(None, "Column to predict.", metavar="COLUMN")
    unused: Texts = option(None, "Leave it out.", metavar="COLUMN")
    categories: Texts = option(
        None, "Number its texts, whatever they are.", "--category", metavar="COLUMN"
    )
    dates: Texts = option(None, "Dates, such as day=%d.%m.%Y.", "--date", metavar="COLUMN[=FORMAT]")
    default: Texts = option(None, "What a missing value becomes.", metavar="[COLUMN=]NUMBER")
    missing: Texts = option(None, "Stands for a missing value in CSV.", metavar="TEXT")
    delimiter: str | None = option(None, "Of CSV, between fields.")
    decimal: str | None = option(None, "Of CSV, such as ','.")
    encoding: str | None = option(None, "Of CSV, such as cp1252.")
    header: str | None = option(
        None, "Of CSV: names come first, or are these: age,city,price.", metavar="yes|no|NAMES"
    )
    stack: bool | None = option(None, "Put a table's numbers into one input.")

    def given(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults."""
        given, headers = dict(vars(self)), {"yes": True, "no": False}
        given |= {
            "target": self.target[0] if self.target and len(self.target) == 1 else self.target,
            "dates": dict(_pair(text, "ISO 8601") for text in self.dates or ()),
            "default": _defaults(self.default or ()),
            "delimiter": "\t" if self.delimiter == "\\t" else self.delimiter,
        }
        if self.header is not None:
            given["header"] = headers.get(self.header, self.header.split(","))
        return {
            name: value
            for name, value in given.items()
            if value not in (None, [], {}, False) or (name, value) == ("header", False)
        }


def _pair(text: str, otherwise: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    return name, value if sign else otherwise


def _defaults(given: Sequence[str]) -> float | dict[str, float] | None:
    named: dict[str, float] = {}
    for text in given:
        name, _, value = text.rpartition("=")
        try:
            number = int(value) if value.lstrip("-").isdecimal() else float(value)
        except ValueError:
            raise typer.BadParameter(f"--default: expected a number, found {value!r}") from None
        if not name and len(given) == 1:
            return number
        named[name] = number
    if "" in named:
        raise typer.BadParameter("--default: expected one number, or COLUMN=NUMBER each time")
    return named or None


AsJson = Annotated[bool, Option("--json", help="Print one JSON object, progress to stderr.")]


@data.command()
@with_options
def inspect(
    paths: Paths,
    format: Format = None,
    schema: Annotated[
        Path | None, Option(metavar="FILE", help="Write the schema to this TOML file.")
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace a schema file that was edited.")
    ] = False,
    *,
    tables: TableOptions,
    as_json: AsJson = False,
) -> None:
    """Say what is in files: rows, classes, bad rows and a schema."""
    from flatout.data import inspect as look
    from flatout.errors import DataError

    report = look(paths, format, **tables.given())
    refused: DataError | None = None
    if schema is not None:
        try:
            report.write_schema(schema, overwrite=overwrite)
        # the results are printed nevertheless, because reading took its time
        except DataError as error:
            refused = error
    _show(report, None if refused else schema, as_json)
    if refused is not None:
        raise refused


def _show(report: Report, schema: Path | None, as_json: bool) -> None:
    if as_json:
        print_json(report.as_dict())
        return
    out = console()
    written = "" if schema is None else f"   → {schema}"
    # A terminal breaks lines between words; in a file a line stays one.
    whole = not out.is_terminal
    out.print(report.headline() + ("" if report.bad_rows else written), soft_wrap=whole)
    if report.bad_rows:
        out.print(report.bad_line() + written, soft_wrap=whole)
    for note in report.notes:
        out.print(note)
    if report.columns:
        out.print(_table(("column", "values", "role", "range", "lengths"), report.table()))


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `flatout data convert`."""

    to: Target | None = option(None, "Default: by the target's name.")
    format: str | None = option(None, _FORMATS)
    schema: Path | None = option(None, "Of the source, as inspect writes it.", metavar="FILE")
    shuffle: int | None = option(None, "Write the rows in a drawn order.", metavar="SEED")
    shards: int | None = option(None, "How many files. Default: of about 128 MiB.", min=1)
    rows_per_shard: int | None = option(None, "The most rows in a file.", min=1)
    shard_bytes: int | None = option(None, "About how large files become.", min=1)
    balance: Balance | None = option(
        None, "class: equally many rows of each class; spread: all rows, each class evenly."
    )
    sampling: Sampling = option(
        Sampling.over, "Of --balance class: repeat rare rows, or leave others out."
    )
    on_error: OnError = option(OnError.fail, "What becomes of bad rows.")
    max_errors: int = option(100, "With --on-error skip, the most to skip.", min=0)
    overwrite: bool = option(False, "Replace what other settings or data have made.")


@data.command()
@with_options
def convert(
    source: Annotated[
        list[str],
        Argument(
            metavar="SOURCE... TARGET",
            help="Files, quoted patterns, folders or URLs; and at last what to write: "
            "out/train.tfrecord, out/train.parquet or out/train.rows.",
        ),
    ],
    *,
    options: ConvertOptions,
    tables: TableOptions,
    as_json: AsJson = False,
) -> None:
    """Write files in another format. A run that was stopped goes on where it was.

    flatout data convert 'logs/2026-11-*.svm' november.rows
    """
    if len(source) < 2:
        raise typer.BadParameter("expected at least one source and a target")
    from flatout.data import convert as write

    done = write(
        source[:-1],
        source[-1],
        to=None if options.to is None else options.to.value,
        format=options.format,
        schema=options.schema,
        shuffle=options.shuffle,
        shards=options.shards,
        rows_per_shard=options.rows_per_shard,
        shard_bytes=options.shard_bytes,
        balance=None if options.balance is None else options.balance.value,
        sampling=options.sampling.value,
        on_error=options.on_error.value,
        max_errors=options.max_errors,
        overwrite=options.overwrite,
        options=tables.given(),
    )
    if as_json:
        print_json(done.as_dict())
    else:
        typer.echo(printable(str(done)))


@data.command()
def bench(
    paths: Paths,
    format: Format = None,
    schema: Annotated[Path | None, Option(metavar="FILE", help="As inspect writes it.")] = None,
    batch_size: Annotated[
        int | None, Option(min=1, help="Default: 4096, or less for small data.")
    ] = None,
    seconds: Annotated[float, Option(min=0.05, help="For each number of threads.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Measure the pipeline on files, with one thread and with all."""
    from flatout.data import bench as measure

    result = measure(paths, format, schema=schema, batch_size=batch_size, seconds=seconds)
    if as_json:
        print_json(result.as_dict())
        return
    out = console()
    out.print(result.headline())
    for note in result.notes:
        out.print(note)
    out.print(_table(("threads", "rows/s", "speed", "ms/batch of a thread"), result.table()))


def _table(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    used = [at for at in range(len(headers)) if any(row[at] for row in rows)]
    for at in used:
        table.add_column(headers[at], overflow="fold")
    for row in rows:
        table.add_row(*(row[at] for at in used))
    return table
