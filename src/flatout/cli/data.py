"""`flatout data`: data sets in other formats."""

from __future__ import annotations

from typing import Annotated

import typer

data = typer.Typer(help="Data sets: convert them.", no_args_is_help=True, rich_markup_mode=None)


@data.callback()
def _data() -> None:
    """Data sets: convert them."""


@data.command()
def convert(
    paths: Annotated[
        list[str], typer.Argument(help="Files, patterns or folders, and at last the target.")
    ],
    to: Annotated[
        str | None,
        typer.Option(help="rows, tfrecord or parquet. Default: what the target's name says."),
    ] = None,
    schema: Annotated[
        str | None, typer.Option(help="The schema of the source, a TOML file.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="The format of the source, where its name does not tell.")
    ] = None,
    shuffle: Annotated[
        int | None, typer.Option(help="Shuffle by this seed. Default: keep the order.")
    ] = None,
    shards: Annotated[int | None, typer.Option(help="How many files to write.")] = None,
    balance: Annotated[
        str | None, typer.Option(help="class: spread each class evenly over all files.")
    ] = None,
    on_error: Annotated[str, typer.Option(help="fail, or skip rows that are bad.")] = "fail",
    max_errors: Annotated[int, typer.Option(help="The most rows to skip.")] = 100,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the target.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write data in another format: TFRecord, Parquet, or rows that are mapped into memory.

    A run that was stopped goes on where it was. flatout data convert logs/*.svm day.rows
    """
    if len(paths) < 2:
        raise typer.BadParameter("expected at least one source and a target")
    import json
    from dataclasses import asdict

    from flatout.data.convert import convert as write

    done = write(
        paths[:-1],
        paths[-1],
        to=to,  # type: ignore[arg-type]
        schema=schema,
        format=format,
        shuffle=shuffle,
        shards=shards,
        balance=balance,  # type: ignore[arg-type]
        on_error=on_error,  # type: ignore[arg-type]
        max_errors=max_errors,
        overwrite=overwrite,
    )
    typer.echo(json.dumps(asdict(done), indent=2) if as_json else str(done))
