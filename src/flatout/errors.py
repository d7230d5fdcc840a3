"""Errors for people: the expected and found values, the place, and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flatout.console import printable


class FlatoutError(Exception):
    """Base of every error that Flatout raises on purpose.

    Args:
        what: the expected and the found value, in one sentence.
        where: the file, line, byte, field, step or rank, if there is one.
        do: the remedy for the reader, if any.
    """

    def __init__(self, what: str, *, where: str | None = None, do: str | None = None) -> None:
        what = printable(what)
        where, do = (None if text is None else printable(text) for text in (where, do))
        self.what = what
        self.where = where
        self.do = do
        lines = [what]
        if where:
            lines.append(f"  {where}")
        if do:
            lines.append(f"  do: {do}")
        super().__init__("\n".join(lines))


class RecipeError(FlatoutError, ValueError):
    """A Recipe names an unknown field or a value that the field does not take."""


class DeviceError(FlatoutError, RuntimeError):
    """A requested device is missing or cannot be used."""


class DataError(FlatoutError, ValueError):
    """The input is empty, corrupt, or does not fit the model."""


@contextmanager
def as_data_error(what: str, where: str | None = None, do: str | None = None) -> Iterator[None]:
    """Turn an error of the system into a DataError: "cannot be read: Permission denied"."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{what}: {error.strerror or error}", where=where, do=do) from error


class ModelError(FlatoutError, ValueError):
    """The model, loss, optimizer or metric cannot be used as given."""


class CheckpointError(FlatoutError, RuntimeError):
    """A checkpoint or model file is damaged, foreign, or cannot be written."""


class NumbersError(FlatoutError, ArithmeticError):
    """A loss, gradient, weight or buffer is not finite."""


class OutOfMemory(FlatoutError, MemoryError):
    """A step does not fit in memory even at the smallest micro-batch allowed."""


class WorldError(FlatoutError, RuntimeError):
    """The ranks of a job cannot find each other, disagree, or one of them is gone."""


class SubmitError(FlatoutError, RuntimeError):
    """A job cannot be written for a cluster, or the cluster does not accept it."""
