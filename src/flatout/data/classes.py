"""Names of classes by number, and rows whose classes get the numbers of other data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.block import Block, Numbers
from flatout.data.buffers import Buffers
from flatout.data.execution.digests import digest_of
from flatout.data.origins import Rows, is_rows
from flatout.data.schema import Schema
from flatout.errors import DataError

# More names than these are not listed in a message.
_TOLD = 8


def classes_of(origin: Any) -> tuple[str, ...] | None:
    """Names of the classes by number; None where numbers are all that the data have of them."""
    schema = getattr(origin, "schema", None)
    if not isinstance(schema, Schema):
        return getattr(origin, "classes", None)
    # Texts of a table's target are names as well, where rows can be renumbered.
    names = schema.classes if is_rows(origin) else schema.options.get("classes")
    if not names or not schema.of_role("target"):
        return None
    return None if list(names) == [str(number) for number in range(len(names))] else tuple(names)


def texts_of(origin: Any) -> dict[str, str]:
    """Of columns of texts, a digest of which number is which; but for those of `classes_of`."""
    schema = getattr(origin, "schema", None)
    if not isinstance(schema, Schema):
        return dict(getattr(origin, "texts", {}))
    known, open_ones = schema.options.get("categories", {}), schema.options.get("unknown", ())
    roles = ("input",) if is_rows(origin) else ("input", "target")
    names = [column.name for column in schema.columns if column.role in roles]
    return {
        name: digest_of(str(name in open_ones), *map(str, known[name]))
        for name in names
        if name in known
    }


def listed(names: Sequence[str]) -> str:
    """Some names in words, such as "'cat', 'dog'"."""
    words = ", ".join(map(repr, names[:_TOLD]))
    return words + (f" and {len(names) - _TOLD:,} more" if len(names) > _TOLD else "")


class Renumbered:
    """Rows whose classes have the numbers that their names have in other data. Follows `Rows`.

    Args:
        inner: rows whose schema names their classes.
        wanted: the names by number; those that `inner` has no rows of may be among them.

    Raises:
        DataError: `inner` has rows of other classes, or its target is not one number a row.
    """

    def __init__(self, inner: Rows, wanted: tuple[str, ...]) -> None:
        names = classes_of(inner)
        assert names is not None
        self._inner = inner
        self._target = _target(inner.schema)
        place = {name: number for number, name in enumerate(wanted)}
        self._numbers = np.array([place.get(name, -1) for name in names], np.int64)
        _check_known(inner, names, self._numbers, wanted)
        self.rows, self.random = inner.rows, inner.random
        self.schema = inner.schema.model_copy(
            update={"options": {**inner.schema.options, "classes": list(wanted)}}
        )
        self.digest = digest_of(inner.digest, "classes", *wanted)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        """These rows, in this order."""
        block = self._inner.take(numbers, buffers)
        labels = self._renumbered(block.columns[self._target])
        return Block({**block.columns, self._target: labels}, block.numbers)

    def targets(self) -> npt.NDArray[Any] | None:
        """The classes' numbers, where they are known without decoding."""
        labels = self._inner.targets()
        return None if labels is None else self._renumbered(labels)

    def _renumbered(self, labels: Any) -> npt.NDArray[np.int64]:
        # What stands for a missing target, such as -1, is no class and stays.
        is_class = (labels >= 0) & (labels < len(self._numbers))
        return np.where(is_class, self._numbers[np.where(is_class, labels, 0)], labels)

    def lengths(self) -> Numbers | None:
        """Those of the rows as they are."""
        return self._inner.lengths()

    def where(self, number: int) -> str:
        """Where a row stands."""
        return self._inner.where(number)

    def describe(self) -> str:
        """One line for people."""
        return self._inner.describe()

    def notes(self) -> list[str]:
        """What the user should know."""
        return self._inner.notes()


def _target(schema: Schema) -> str:
    columns = schema.of_role("target")
    if len(columns) != 1 or columns[0].shape or columns[0].ragged or columns[0].dtype != "int64":
        words = ", ".join(column.words for column in columns)
        raise DataError(f"classes have names where the target is one int64 number, found {words}")
    return columns[0].name


def _check_known(
    inner: Rows, names: Sequence[str], numbers: Numbers, wanted: Sequence[str]
) -> None:
    labels = inner.targets()
    counts = None if labels is None else np.bincount(labels, minlength=len(names))
    unknown = [
        name if counts is None else f"{name} ({counts[own]:,})"
        for own, name in enumerate(names)
        if numbers[own] < 0 and (counts is None or counts[own])
    ]
    if not unknown:
        return
    kinds = "a class" if len(unknown) == 1 else "classes"
    raise DataError(
        f"found {kinds} that the model was not trained on: {', '.join(unknown[:_TOLD])}"
        f"{', …' if len(unknown) > _TOLD else ''}; it knows {listed(wanted)}",
        where=inner.describe(),
        do="leave them out, or train with them; where classes do not matter, as for predict, pass "
        "labels=False",
    )
