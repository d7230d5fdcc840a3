"""Tables whose rows are the batches of a loop without a DataLoader.

A table is a tensor or an array in a variable of the script that contains the rows of the model's
input. It is searched where the model is called.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from math import prod
from types import FrameType, ModuleType
from typing import Any
from weakref import ref

from flatout.observe.observation import Observation, Table
from flatout.observe.samples import Samples, as_array, is_in_memory, samples_in
from flatout.observe.series import place_in
from flatout.observe.sites import here, is_users
from flatout.observe.watch import Watch

# Maximum number of training calls of models for which tables are searched, and maximum number of
# evaluation calls.
_CALLS = 4
# _NAMES: maximum number of names of a frame that are searched; _FRAMES: maximum number of the
# user's frames that are searched.
_NAMES, _FRAMES = 300, 8
# _NUMBERS: maximum number of values of a searched table; _COLUMNS: maximum number of a row's
# columns that are compared; _TOGETHER: maximum number of remaining rows whose columns are compared
# all at once.
_NUMBERS, _COLUMNS, _TOGETHER = 2**26, 64, 16
# Maximum number of values of a series.
_SERIES = 2**24
# _FEWEST: minimum number of different numbers that identify a row; _FEW: maximum number of entries
# of a searched list.
_FEWEST, _FEW = 3, 16


class _HeldTable:
    """A table that was found in a variable."""

    def __init__(self, value: Any, facts: Table, model: Any) -> None:
        self._ref = ref(value)
        self.facts = facts
        self.model = model
        self.samples: Samples = samples_in(value)

    def has(self, wanted: Any) -> bool:
        value = self._ref()
        return value is not None and _has(value, wanted)

    def is_within(self, value: Any) -> bool:
        own = self._ref()
        return own is not None and own is not value and _has(value, _rows(own))


class Tables:
    """Search for the tables of the first calls of models."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._tables: list[_HeldTable] = []
        self._calls = {True: 0, False: 0}
        watch.on_batch.append(self._look)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._tables.clear()
        self._calls = {True: 0, False: 0}

    def _look(self, model: Any, batch: Any, is_trained: bool) -> None:
        if is_trained:
            self._watch.rows = None
        if self._is_of_loader(is_trained):
            return
        if not self._torch.is_tensor(batch) or batch.dim() < 2 or not len(batch):
            return
        wanted = _rows(batch)
        if wanted is None:
            return
        known = next((item for item in self._tables if item.has(wanted)), None)
        if known is None and self._calls[is_trained] < _CALLS:
            self._calls[is_trained] += 1
            known = self._search(model, wanted, len(batch), is_trained)
        if known is not None and is_trained:
            known.facts.in_training = True
            self._watch.rows = id(known), wanted.tobytes()

    def _search(self, model: Any, wanted: Any, rows: int, is_trained: bool) -> _HeldTable | None:
        result = sorted(
            self._having(wanted, rows, sys._getframe()), key=lambda value: len(value[1])
        )
        trained = [item for item in self._tables if item.facts.in_training]
        # A table from which both training and validation data were split is neither of the two.
        larger = [
            (name, value)
            for name, value in result
            if len(value) > rows and (is_trained or not any(t.is_within(value) for t in trained))
        ]
        chosen = next(iter(larger or result), None)
        if chosen is None or (len(chosen[1]) > rows and chosen not in larger):
            return None
        name, value = chosen
        facts = Table(name, here(), len(value), rows, in_training=is_trained)
        self._tables.append(_HeldTable(value, facts, model))
        return self._tables[-1]

    def _is_of_loader(self, is_trained: bool) -> bool:
        loader = self._watch.lanes.loader
        return loader is not None and (is_trained or not loader.in_training)

    def _having(self, wanted: Any, rows: int, frame: FrameType | None) -> Iterator[tuple[str, Any]]:
        known: set[int] = set()
        for name, value in _named_in(frame):
            if id(value) in known or not _is_table(self._torch, value):
                continue
            known.add(id(value))
            if len(value) >= rows and _has(value, wanted):
                yield name, value

    def results(self) -> list[_HeldTable]:
        """Return the tables that a model trains on, or is evaluated on."""
        steps = self._watch.lanes.steps
        return [
            item
            for item in self._tables
            if item.facts.in_training or item.model.is_evaluated(steps)
        ]

    def fill(self, observation: Observation) -> None:
        """Add the tables to an Observation."""
        observation.tables = [result.facts for result in self.results()]


def _is_table(torch: Any, value: Any) -> bool:
    if torch.is_tensor(value):
        is_here = value.device.type == "cpu" and value.layout == torch.strided
        is_data = is_here and not value.requires_grad
        is_data = is_data and not value.is_complex() and value.dtype != torch.bool
    else:
        is_data = type(value).__module__ == "numpy" and hasattr(value, "dtype")
        is_data = is_data and value.dtype.kind in "iuf"
    return is_data and value.ndim > 1 and len(value) > 1 and prod(value.shape) <= _NUMBERS


def _rows(batch: Any) -> Any:
    if batch.dtype.itemsize == 2 or "complex" in str(batch.dtype):
        return None  # 16-bit numbers are rounded, and complex numbers are no samples
    last = len(batch) - 1
    # Autograd would save the index of a tensor with a gradient: checkpointing runs forward again.
    plain = batch.detach() if hasattr(batch, "detach") else batch
    chosen = plain[sorted({0, last // 3, 2 * last // 3, last})]
    chosen = chosen.cpu().numpy() if hasattr(chosen, "cpu") else chosen
    rows = chosen.reshape(len(chosen), -1).astype("float64")
    return rows if len({*rows[0, _columns(rows.shape[1])].tolist()}) >= _FEWEST else None


def _columns(width: int) -> list[int]:
    return [*range(0, width - 1, max(1, width // _COLUMNS)), width - 1]


def _has(table: Any, wanted: Any) -> bool:
    if wanted is None or prod(table.shape[1:]) != wanted.shape[1]:
        return False
    return all(_has_row(table, row) for row in wanted)


def _has_row(table: Any, wanted: Any) -> bool:
    columns = _columns(len(wanted))
    # Every row may have the same background, as in images: columns with rare values exclude the
    # most rows.
    often = Counter(wanted[columns].tolist())
    columns.sort(key=lambda column: often[wanted[column]])
    rows: Any = None
    while columns and (rows is None or len(rows) > _TOGETHER):
        column = columns.pop(0)
        numbers = _numbers(table, slice(None) if rows is None else rows, column)
        equal = _is_equal(numbers, wanted[column]).nonzero()[0]
        rows = equal if rows is None else rows[equal]
    if not columns or not len(rows):
        return len(rows) > 0
    numbers = _numbers(table, rows[:, None], columns)
    return bool(_is_equal(numbers, wanted[columns]).all(1).any())


def _numbers(table: Any, rows: Any, columns: Any) -> Any:
    from numpy import unravel_index

    return as_array(table[(rows, *unravel_index(columns, table.shape[1:]))])


def _is_equal(numbers: Any, wanted: Any) -> Any:
    return abs(numbers - wanted) <= 1e-6 * abs(wanted)


def _named_in(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    left = _FRAMES
    while frame is not None and left:
        if is_users(frame.f_code.co_filename):
            left -= 1
            for names in (frame.f_locals, frame.f_globals):
                for name, value in list(names.items())[:_NAMES]:
                    yield name, value
                    yield from _within(name, value)
        frame = frame.f_back


def named_here() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the user's frames above the caller, and entries of these variables."""
    return _named_in(sys._getframe(1))


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)) and len(value) <= _FEW:
        yield from ((f"{name}[{at}]", item) for at, item in enumerate(value))
    elif isinstance(value, dict) and len(value) <= _FEW:
        yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items()))
    elif not isinstance(value, (type, ModuleType)) and _is_of_users_class(value):
        yield from ((f"{name}.{key}", item) for key, item in list(vars(value).items())[:_NAMES])


def _is_of_users_class(value: Any) -> bool:
    module = sys.modules.get(type(value).__module__)
    return hasattr(value, "__dict__") and is_users(getattr(module, "__file__", None) or "<>")


def longer_series(series: Any) -> Any:
    """Return the longest float array in the script's variables that contains this series.

    None without such an array.
    """
    longest = None
    for _, value in _named_in(sys._getframe()):
        if hasattr(value, "select_dtypes") and hasattr(value, "to_numpy"):  # a DataFrame
            value = value.to_numpy()
        is_array = is_in_memory(value) and value.ndim in (1, 2) and len(value) > len(series)
        if not is_array or prod(value.shape) > _SERIES:
            continue
        rows = as_array(value)
        rows = rows.reshape(len(rows), -1)
        if rows.dtype.kind != "f" or (longest is not None and len(rows) <= len(longest)):
            continue
        if place_in(series, rows) is not None:
            longest = rows
    return longest
