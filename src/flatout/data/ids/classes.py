"""Names of classes by index, and rows whose classes are renumbered as in other data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.digests.digests import digest_of
from flatout.data.reading.block import Block, Numbers
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.origins import Rows, is_rows
from flatout.data.reading.schema import Schema
from flatout.errors import DataError

# Maximum number of names that a message lists.
_TOLD = 8
# Maximum number of characters of a rule in a message.
_SHOWN = 300
COLUMNS, TEXTS = "the columns of the input", "the texts of column"
DATASET = "the classes of the Dataset"
# Options of schemas that decide the meaning of an index or id, with their names in messages.
_RULES = {"base": "the index from which LibSVM counts", "buckets": "the buckets of hashed ids"}
_TABLES = ("csv", "parquet", "arrow", "table")


def classes_of(origin: Any) -> tuple[str, ...] | None:
    """Return names of the classes by index, or None if data have only numbers."""
    schema = getattr(origin, "schema", None)
    if not isinstance(schema, Schema):
        return getattr(origin, "classes", None)
    # The texts of a table's target are also class names, if the class numbers of rows can change.
    names = schema.classes if is_rows(origin) else schema.options.get("classes")
    if not names or not schema.of_role("target"):
        return None
    return None if list(names) == [str(number) for number in range(len(names))] else tuple(names)


def meanings_of(origin: Any) -> dict[str, str]:
    """Return the rules by which a source turns values into numbers; other rules give other numbers.

    A key is the name of a rule for the user; a value is a text or a digest. Names of classes are
    not included: see `classes_of`.
    """
    schema = getattr(origin, "schema", None)
    if not isinstance(schema, Schema):
        return dict(getattr(origin, "meanings", {}))
    options, names = schema.options, {column.name for column in schema.columns}
    result = {key: str(options[name]) for name, key in _RULES.items() if name in options}
    if any(column.ids for column in schema.columns):
        result.pop(_RULES["base"], None)  # LibSVM ids do not change
    if schema.format == "libsvm" and "features" in names:
        result["the number of features"] = str(schema["features"].shape[0])
    known, open_ones = options.get("categories", {}), options.get("unknown", ())
    inputs = [column.name for column in schema.of_role("input")]
    targets = [column.name for column in schema.of_role("target")]
    for name in inputs if is_rows(origin) else (*inputs, *targets):
        if name in known:
            words = digest_of(str(name in open_ones), *map(str, known[name]))
            result[f"{TEXTS} {name!r}"] = words
    kinds = {name: f"{name} (texts)" if name in known else name for name in (*inputs, *targets)}
    if len(inputs) > 1:
        result[COLUMNS] = ", ".join(kinds[name] for name in inputs)
    if "stack" in options:
        result["the stacked columns"] = ", ".join(options["stack"])
    for name in targets:
        if name in known or schema.format in _TABLES:
            result[f"the values of target {name!r}"] = "texts" if name in known else "numbers"
    return result


def dataset_meanings(dataset: Any) -> dict[str, str]:
    """Return the number of each class, for a Dataset of torchvision or Hugging Face."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # torch.utils.data.Subset
        dataset = dataset.dataset
    columns = {"": getattr(dataset, "class_to_idx", None)}
    features = getattr(dataset, "features", None)
    for column, feature in features.items() if isinstance(features, Mapping) else ():
        names = getattr(feature, "names", None)  # a ClassLabel of Hugging Face has names
        columns[f", column {column!r}"] = names and {n: at for at, n in enumerate(names)}
    return {
        DATASET + column: ", ".join(f"{number} {name}" for name, number in numbers.items())
        for column, numbers in columns.items()
        if numbers and isinstance(numbers, Mapping)
    }


def unlike_meaning(wanted: Mapping[str, str], found: Mapping[str, str], where: str) -> str | None:
    """Return in words the first rule in which `found` differs from `wanted`; None if all agree.

    Args:
        wanted: rules of the data that `where` names.
        found: rules of the other data; a rule that is missing counts as equal.
        where: words for the data of `wanted`.
    """
    for key, value in wanted.items():
        own = found.get(key, value)
        if own == value:
            continue
        if key.startswith(TEXTS):
            return f"{key} have other numbers here than in {where}"
        return f"expected {key}: {_short(value)}, as in {where}; found {_short(own)}"
    return None


def _short(words: str) -> str:
    return words if len(words) <= _SHOWN else words[: _SHOWN - 1] + "…"


def listed(names: Sequence[str]) -> str:
    """Return some names as text, such as "'cat', 'dog'"."""
    words = ", ".join(map(repr, names[:_TOLD]))
    return words + (f" and {len(names) - _TOLD:,} more" if len(names) > _TOLD else "")


class Renumbered:
    """Rows whose classes are numbered in the order of other data's names. Follows `Rows`.

    All other members are those of the rows before.
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
        block = self._inner.take(numbers, buffers)
        labels = self._renumbered(block.columns[self._target])
        return Block({**block.columns, self._target: labels}, block.numbers)

    def targets(self) -> npt.NDArray[Any] | None:
        labels = self._inner.targets()
        return None if labels is None else self._renumbered(labels)

    def _renumbered(self, labels: Any) -> npt.NDArray[np.int64]:
        # A number for a missing target, such as -1, is no class and does not change.
        is_class = (labels >= 0) & (labels < len(self._numbers))
        return np.where(is_class, self._numbers[np.where(is_class, labels, 0)], labels)


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
