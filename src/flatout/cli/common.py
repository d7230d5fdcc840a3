"""Options and output that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer import Option

from flatout.console import printable

if TYPE_CHECKING:
    from rich.table import Table

    from flatout.terminal import Console

AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
Texts = list[str] | None
"""The values of an option that can be given several times."""


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """Return a dataclass's field that `with_options` makes an option of the command line.

    Args:
        default: value of the field if the option is not given.
        help: description for `--help`.
        names: the option's names; by default "--" and the field's name.
        more: further arguments of `typer.Option`.
    """
    return field(default=default, metadata={"names": names, "more": {"help": help, **more}})


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Make options of the fields of dataclasses that a command takes as arguments."""
    types = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _parameters(groups[parameter.name])
        else:
            parameters.append(parameter.replace(annotation=types[parameter.name]))

    @wraps(command)
    def with_groups(*arguments: Any, **given: Any) -> None:
        own = {name: _taken(kind, given) for name, kind in groups.items()}
        command(*arguments, **given, **own)

    del with_groups.__wrapped__
    with_groups.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_groups


def _parameters(group: Any) -> list[Parameter]:
    types, result = get_type_hints(group), []
    for each in fields(group):
        names = each.metadata["names"] or (f"--{each.name.replace('_', '-')}",)
        kind, declared = types[each.name], Option(*names, **each.metadata["more"])
        annotation: Any = Annotated[kind, declared]
        by_name = Parameter.POSITIONAL_OR_KEYWORD
        result.append(Parameter(each.name, by_name, default=each.default, annotation=annotation))
    return result


def _taken(group: Any, given: dict[str, Any]) -> Any:
    return group(**{f.name: given.pop(f.name) for f in fields(group) if f.name in given})


def print_json(data: Any) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(data, indent=2))


def console(**options: Any) -> Console:
    """Return a console that prints texts as they are."""
    from flatout.terminal import Console

    return Console(highlight=False, markup=False, **options)


def grid(rows: Iterable[tuple[str, ...]]) -> Table:
    """Return a table without lines, whose first column holds bold names."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def agrees(question: str, otherwise: str) -> bool:
    """Ask the user; without a terminal print another line instead, and return False."""
    if not sys.stdin.isatty():
        typer.echo(printable(otherwise))
        return False
    return typer.confirm(question)
