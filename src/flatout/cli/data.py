"""`flatout data`: look at files, measure reading them, and write them in another format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from flatout.cli.common import Texts, console, print_json
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
Format = Annotated[
    str | None,
    Option(
        help="libsvm, tfrecord, criteo, csv, parquet, arrow, images, rows, idx, npy, npz or hdf5. "
        "Default: by the names, or else the first bytes."
    ),
]
# Options of tables, which are arguments of flatout.data.csv, parquet and arrow.
_OF_TABLES: dict[str, Any] = {
    "target": Annotated[Texts, Option("--target", metavar="COLUMN", help="Column to predict.")],
    "unused": Annotated[Texts, Option("--unused", metavar="COLUMN", help="Leave it out.")],
    "categories": Annotated[
        Texts, Option("--category", metavar="COLUMN", help="Number its texts, whatever they are.")
    ],
    "dates": Annotated[
        Texts, Option("--date", metavar="COLUMN[=FORMAT]", help="Dates, such as day=%d.%m.%Y.")
    ],
    "default": Annotated[
        Texts, Option("--default", metavar="[COLUMN=]NUMBER", help="What a missing value becomes.")
    ],
    "missing": Annotated[
        Texts, Option("--missing", metavar="TEXT", help="Stands for a missing value in CSV.")
    ],
    "delimiter": Annotated[str | None, Option(help="Of CSV, between fields.")],
    "decimal": Annotated[str | None, Option(help="Of CSV, such as ','.")],
    "encoding": Annotated[str | None, Option(help="Of CSV, such as cp1252.")],
    "header": Annotated[
        str | None,
        Option(
            metavar="yes|no|NAMES", help="Of CSV: names come first, or are these: age,city,price."
        ),
    ],
    "stack": Annotated[
        bool | None, Option("--stack", help="Put a table's numbers into one input.")
    ],
}


def _of_tables(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def with_options(**given: Any) -> None:
        options = {name: given.pop(name) for name in _OF_TABLES}
        command(**given, options=_options(**options))

    own = signature(command, eval_str=True).parameters
    of_tables = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
        for name, annotation in _OF_TABLES.items()
    ]
    parameters = [
        each for p in own.values() for each in (of_tables if p.name == "options" else [p])
    ]
    with_options.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    del with_options.__wrapped__
    return with_options


def _options(**given: Any) -> dict[str, Any]:
    headers = {"yes": True, "no": False}
    target, header = given["target"], given["header"]
    given |= {
        "target": target[0] if target and len(target) == 1 else target,
        "dates": dict(_pair(text, "ISO 8601") for text in given["dates"] or ()),
        "default": _defaults(given["default"] or ()),
        "delimiter": "\t" if given["delimiter"] == "\\t" else given["delimiter"],
        "header": None if header is None else headers.get(header, header.split(",")),
    }
    return {name: value for name, value in given.items() if value not in (None, [], {}, False)
            or (name, value) == ("header", False)}  # fmt: skip


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
@_of_tables
def inspect(
    paths: Paths,
    format: Format = None,
    schema: Annotated[
        Path | None, Option(metavar="FILE", help="Write the schema to this TOML file.")
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace a schema file that was edited.")
    ] = False,
    against: Annotated[
        list[str] | None,
        Option(
            metavar="FILE",
            help="Another day: which ids of PATHS it does not have. Several times for more files.",
        ),
    ] = None,
    options: Any = None,
    as_json: AsJson = False,
) -> None:
    """Say what is in files: rows, classes, ids, bad rows and a schema."""
    from flatout.data import inspect as look
    from flatout.errors import DataError

    report = look(paths, format, against=against or None, **options)
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


_OF_FIELDS = ("field", "ids", "once", "most frequent", "half in", "unknown", "in the schema")


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
    if report.fields:
        out.print(_table(_OF_FIELDS, report.field_table(), is_narrow=True))
        if note := report.field_note():
            out.print(note, soft_wrap=whole)


@data.command()
@_of_tables
def convert(
    source: Annotated[
        list[str],
        Argument(
            metavar="SOURCE... TARGET",
            help="Files, quoted patterns, folders or URLs; and at last what to write: "
            "out/train.tfrecord, out/train.parquet or out/train.rows.",
        ),
    ],
    to: Annotated[Target | None, Option(help="Default: by the target's name.")] = None,
    format: Format = None,
    schema: Annotated[
        Path | None, Option(metavar="FILE", help="Of the source, as inspect writes it.")
    ] = None,
    shuffle: Annotated[
        int | None, Option(metavar="SEED", help="Write the rows in a drawn order.")
    ] = None,
    shards: Annotated[
        int | None, Option(min=1, help="How many files. Default: of about 128 MiB.")
    ] = None,
    rows_per_shard: Annotated[int | None, Option(min=1, help="The most rows in a file.")] = None,
    shard_bytes: Annotated[int | None, Option(min=1, help="About how large files become.")] = None,
    balance: Annotated[
        Balance | None,
        Option(help="class: equally many rows of each class; spread: all rows, each class evenly."),
    ] = None,
    sampling: Annotated[
        Sampling, Option(help="Of --balance class: repeat rare rows, or leave others out.")
    ] = Sampling.over,
    on_error: Annotated[OnError, Option(help="What becomes of bad rows.")] = OnError.fail,
    max_errors: Annotated[int, Option(min=0, help="With --on-error skip, the most to skip.")] = 100,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace what other settings or data have made.")
    ] = False,
    options: Any = None,
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
        to=None if to is None else to.value,
        format=format,
        schema=schema,
        shuffle=shuffle,
        shards=shards,
        rows_per_shard=rows_per_shard,
        shard_bytes=shard_bytes,
        balance=None if balance is None else balance.value,
        sampling=sampling.value,
        on_error=on_error.value,
        max_errors=max_errors,
        overwrite=overwrite,
        options=options,
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


def _table(
    headers: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, is_narrow: bool = False
) -> Table:
    from rich import box
    from rich.table import Table

    padding = (0, 1, 0, 0) if is_narrow else (0, 1)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding)
    used = [at for at in range(len(headers)) if any(row[at] for row in rows)]
    for at in used:
        table.add_column(headers[at], overflow="fold", no_wrap=is_narrow and at == 0)
    for row in rows:
        table.add_row(*(row[at] for at in used))
    return table
