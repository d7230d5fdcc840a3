"""Columns of the script's data that the training labels may come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

from flatout.observe.samples import as_array, behind_subsets, is_in_memory

# _LENGTH: maximum number of entries of a column; _LISTED: maximum number of entries of a list;
# _WIDTH: maximum number of columns of a table; _COLUMNS: maximum number of columns that are
# compared.
_LENGTH, _LISTED, _WIDTH, _COLUMNS = 2**20, 2**17, 64, 200
# _ENTRIES: maximum number of entries of a dict or an object; _ASKED: number of values by which
# integers are recognized.
_ENTRIES, _ASKED = 64, 64
# _CLASSES: maximum number of classes of labels; _EACH: minimum number of labels per class on
# average.
_CLASSES, _EACH = 10_000, 2
# Largest share of samples in one class: a larger class may fill the first batches in any order.
_MOST = 0.9


class Lies(NamedTuple):
    """Position of the labels in a column.

    Attributes:
        name: the script's name of the column; "" for a dataset that is a column itself.
        classes: number of classes.
        samples: number of labels in the column.
    """

    name: str
    classes: int
    samples: int


def columns_of_names(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the columns of numbers or strings in these variables.

    These are tensors, arrays and lists, columns of tables, and entries of dicts and of rows. Each
    can be sliced.
    """
    known: set[int] = set()
    for name, value in named:
        if id(value) not in known:
            known.add(id(value))
            yield from _columns_within(name, value)


def columns_of_dataset(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the columns that a dataset holds, or is, restricted to the samples that it picks."""
    inner, picked = behind_subsets(dataset)
    values = [("", inner)]
    if not isinstance(inner, (list, tuple, dict)):
        values = list(getattr(inner, "__dict__", {}).items())[:_ENTRIES]
    for name, value in values:
        parts = [(name, value)]
        if isinstance(value, tuple):  # a TensorDataset holds its tensors in a tuple
            parts = [(f"{name}[{at}]", part) for at, part in enumerate(value[:_ENTRIES])]
        for part_name, part in parts:
            for column_name, column in _columns_within(part_name, part):
                if picked is None:
                    yield column_name, column
                elif max(picked, default=0) < len(column) and len(picked) <= _LISTED:
                    yield column_name, [column[at] for at in picked]


def _columns_within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if is_in_memory(value):
        yield from _of_array(name, value)
    elif type(value).__module__.partition(".")[0] == "pandas":
        yield from _of_pandas(name, value)
    elif isinstance(value, dict):
        for key, item in list(value.items())[:_ENTRIES]:
            if not isinstance(item, dict):
                yield from _columns_within(f"{name}[{key!r}]", item)
    elif isinstance(value, list) and 1 < len(value) <= _LISTED:
        yield from _of_list(name, value)


def _of_pandas(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(value, "iloc") or not 1 < len(value) <= _LENGTH:
        return
    if not hasattr(value, "columns"):
        yield name, value.to_numpy()
        return
    for column in list(value.columns)[:_WIDTH]:
        values = value[column]
        if hasattr(values, "to_numpy") and values.ndim == 1:  # two columns may have the same name
            yield f"{name}[{column!r}]", values.to_numpy()


def _of_array(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not 1 <= value.ndim <= 2 or not 1 < len(value) <= _LENGTH:
        return
    if value.ndim == 1 or value.shape[1] == 1:
        yield name, as_array(value).reshape(-1)
    elif value.shape[1] <= _WIDTH:
        rows = as_array(value)
        for at in range(rows.shape[1]):
            if not (rows[:_ASKED, at] % 1).any():
                yield f"{name}[:, {at}]", rows[:, at]


def _of_list(name: str, rows: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    first = rows[0]
    if _is_label(first):
        yield name, rows
        return
    kind = type(first)
    if kind is dict:
        keys: list[Any] = [key for key, item in first.items() if _is_label(_value(item))]
    elif isinstance(first, (tuple, list)):
        keys = [at for at, item in enumerate(first[:_ENTRIES]) if _is_label(_value(item))]
    else:
        return
    for key in keys:
        try:
            yield f"{name}[i][{key!r}]", [_value(row[key]) for row in rows]
        except (KeyError, IndexError, TypeError):
            continue  # some rows lack this entry


def _value(item: Any) -> Any:
    is_single = hasattr(item, "ndim") and hasattr(item, "item") and item.ndim == 0
    return item.item() if is_single and not getattr(item, "is_meta", False) else item


def _is_label(value: Any) -> bool:
    return isinstance(value, (int, float, str))


def column_of(
    first: Sequence[int], batch_size: int, classes: int, columns: Iterable[tuple[str, Any]]
) -> Lies | None:
    """Return the column that begins with these labels, if it has each class in consecutive rows."""
    found: Lies | None = None
    is_one = len({*first}) == 1
    for name, column in islice(columns, _COLUMNS):
        if len(column) < 2 * batch_size or not _agrees(column, first):
            continue
        labels = column.tolist() if hasattr(column, "tolist") else column
        sizes = _sizes(labels, classes, is_one)
        if sizes is None:
            continue
        is_rare = max(sizes.values()) > _MOST * len(labels)
        runs = 1 + sum(item != other for item, other in pairwise(labels))
        if runs > len(sizes):
            # Other columns may begin with a single class too, but then they prove nothing.
            if is_rare or not is_one:
                return None
        elif not is_rare and sizes.most_common(2)[1][1] >= 2 * batch_size:
            found = found or Lies(name, len(sizes), len(labels))
    return found


def _agrees(column: Any, first: Sequence[int]) -> bool:
    begin = column[: len(first)]
    begin = begin.tolist() if hasattr(begin, "tolist") else begin
    if isinstance(begin[0], str):
        pairs = {*zip(begin, first, strict=False)}
        return len(pairs) == len({*begin}) == len({*first[: len(begin)]})
    try:
        return all(value == label for value, label in zip(begin, first, strict=False))
    except (TypeError, ValueError):  # missing values, or an array
        return False


def _sizes(labels: list[Any], classes: int, is_one: bool) -> Counter[Any] | None:
    try:
        sizes = Counter(labels)
    except TypeError:  # unhashable entries
        return None
    is_like = len(sizes) == classes if is_one else len(sizes) <= classes
    is_like = is_like and 1 < len(sizes) <= min(_CLASSES, len(labels) // _EACH)
    return sizes if is_like else None
