"""A model's map from ids to rows of its tables, learned from its data and stored with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatout.data import Column, Growth, IdMap, Pipeline, Source, digest_of, tensors_in
from flatout.errors import CheckpointError, DataError, FlatoutError
from flatout.kernels import Items
from flatout.models import adapter_of, table_weight
from flatout.save import ids_beside, load_ids, save_ids
from flatout.train.compute import call
from flatout.train.evaluate import evaluating
from flatout.train.grow_tables import (
    GrownRows,
    as_built,
    check_memory,
    read_together,
    readers_of,
    resize,
    set_rows,
    tables_of,
)
from flatout.train.loop import Loop
from flatout.train.losses.broadcast import uncompiled
from flatout.train.snapshot import untouched
from flatout.words import counted

# Number of ids reserved for each column in a test batch, which shows the tables that read a column.
_APART = 1 << 22


@dataclass(frozen=True, eq=False)
class ModelIds:
    """The map from ids to table rows of a model.

    Attributes:
        maps: the map from ids to table rows, by column.
        tables: name of the column that indexes a table, by the table's name.
        sizes: number of rows of these tables, by the table's name.
        built: elements of newly built tables, to initialize new rows.
    """

    maps: Mapping[str, IdMap]
    tables: Mapping[str, str]
    sizes: Mapping[str, int]
    built: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def digest(self) -> str:
        """Digest of all maps, in 16 hex digits."""
        return digest_of(*(f"{name}={value.digest}" for name, value in sorted(self.maps.items())))

    # -- conversion to data ----------------------------------------------------------------------

    def as_state(self) -> dict[str, Any]:
        """Return the map as data for a checkpoint."""
        header, tensors = self._as_data()
        return {"header": header, "tensors": tensors}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], where: str) -> ModelIds:
        """Read the map from a checkpoint."""
        return cls._of_data(state["header"], state["tensors"], where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map next to a model file."""
        save_ids(path, *self._as_data())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelIds | None:
        """Read the map next to a model file; None where there is none."""
        ids = load_ids(path)
        return None if ids is None else cls._of_data(*ids, ids_beside(path))

    def _as_data(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tables, sizes = dict(self.tables), dict(self.sizes)
        header: dict[str, Any] = {"tables": tables, "sizes": sizes, "columns": {}}
        tensors: dict[str, Tensor] = {}
        for name, value in self.maps.items():
            header["columns"][name], arrays = value.as_data()
            for part, array in arrays.items():
                tensors[f"{name}.{part}"] = torch.from_numpy(np.ascontiguousarray(array))
        return header, tensors

    @classmethod
    def _of_data(
        cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
    ) -> ModelIds:
        maps: dict[str, IdMap] = {}
        try:
            for name, facts in header["columns"].items():
                own = {key: t.numpy() for key, t in tensors.items() if key.startswith(f"{name}.")}
                arrays = {key.removeprefix(f"{name}."): array for key, array in own.items()}
                maps[name] = IdMap.of_data(name, facts, arrays)
            sizes = {str(name): int(size) for name, size in header["sizes"].items()}
            return cls(maps, {name: str(header["tables"][name]) for name in sizes}, sizes)
        except DataError as error:
            raise CheckpointError(error.what, where=where, do=error.do) from error
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the map of ids cannot be read: {error}", where=where) from error


def make_room(model: nn.Module, ids: ModelIds, where: str, optimizer: Any = None) -> ModelIds:
    """Resize the model's tables to the rows of the weights that are loaded next."""
    tables = tables_of(model)
    missing = [name for name in ids.tables if name not in tables]
    if missing:
        raise CheckpointError(
            f"the map of ids is of another model: it has rows of the table {missing[0]!r}, and "
            f"the tables of this model are {', '.join(map(repr, tables)) or 'none'}",
            where=where,
            do="build the model as it was, or begin without warm_start",
        )
    built = as_built({name: tables[name] for name in ids.tables})
    for name, size in ids.sizes.items():
        resize(tables[name], size, optimizer)
    return replace(ids, built=built)


def learn_ids(
    source: Source, known: ModelIds | None, model: nn.Module, optimizer: Any, loop: Loop
) -> ModelIds | None:
    """Learn the ids of training data, and give the model's tables a row for each new id."""
    maps = _columns(source, known)
    if not maps:
        return known
    assert isinstance(source, Pipeline)
    tables = tables_of(model)
    if source.seekable:
        readers = _readers(source, tables, model, maps, loop)
    else:  # reading a batch would consume rows
        readers = {} if known is None else {name: [own] for name, own in known.tables.items()}
    groups = read_together(tables, readers)
    unread = [name for name in maps if not any(name in group for group in groups)]
    groups += [[name] for name in unread]
    _check_shared_rows(source, tables, readers, optimizer)
    digest = source.digest
    if any(value.learned_from != digest for value in maps.values()):
        grown = _grown(source, maps, groups, digest, loop)
    else:  # the same data once more
        grown = {name: (value, None) for name, value in maps.items()}
    built = {**as_built({name: tables[name] for name in readers}), **(known.built if known else {})}
    rows: dict[str, GrownRows] = {}
    new: dict[str, str] = {}
    for name, (column, *_) in readers.items():
        after, growth = grown[column]
        goes_on = known is not None and name in known.tables
        key = f"{loop.asked.seed} {after.trainings}"
        rows[name] = GrownRows(after.size, growth if goes_on else None, key)
        new[name] = "" if growth is None else counted(growth.new, "new id")
    check_memory(tables, rows, optimizer, new)
    set_rows(tables, rows, optimizer, built)
    for group in groups:
        after, growth = grown[group[0]]
        if growth is not None:
            loop.say(f"{', '.join(group)}: {_words(after, growth)}")
        if group[0] in unread:
            loop.say(
                f"no table of the model reads column {group[0]!r} as it is, so none was enlarged: "
                f"it has to have {after.size:,} rows"
            )
    sizes = {name: len(table_weight(tables[name])) for name in readers}
    columns = {name: own[0] for name, own in readers.items()}
    return ModelIds({c: after for c, (after, _) in grown.items()}, columns, sizes, built)


def with_ids(source: Source, ids: ModelIds | None) -> Source:
    """Return the same data, with rows in place of ids."""
    if isinstance(source, Pipeline):
        if ids is None and source.id_columns:
            raise DataError(
                f"the schema states ids of column {source.id_columns[0].name!r}, and the model has "
                "learned none yet",
                do="train it, or load it with its file of ids in the same folder",
            )
        return source if ids is None else source.with_ids(ids.maps)
    if ids is not None:
        names = ", ".join(map(repr, ids.maps))
        raise DataError(
            f"the model's ids are those of column {names}, and these data have no columns",
            do="read them by flatout.data with the schema of the training data; "
            "flatout.data.table takes frames and dicts",
        )
    return source


def _columns(source: Source, known: ModelIds | None) -> dict[str, IdMap]:
    if not isinstance(source, Pipeline):
        with_ids(source, known)
        return {}
    maps = {} if known is None else dict(known.maps)
    source.with_ids(maps)  # raises for a missing column
    for column in source.id_columns:
        maps.setdefault(column.name, IdMap.empty(column))
    return maps


def _grown(
    source: Pipeline,
    maps: Mapping[str, IdMap],
    groups: Sequence[Sequence[str]],
    digest: str,
    loop: Loop,
) -> dict[str, tuple[IdMap, Growth | None]]:
    stated = {column.name: column for column in source.id_columns}
    columns = {name: stated.get(name) or value.as_column() for name, value in maps.items()}
    world = loop.world
    counts = source.count_ids(list(columns.values()), world.rank, world.size)
    if counts is None:  # a stream
        return {name: (value, None) for name, value in maps.items()}
    parts = world.gather({n: list(value.items()) for n, value in counts.items()}, "ids of the data")
    for other in (part for rank, part in enumerate(parts) if rank != world.rank):
        for name, value in other.items():
            counts[name].merge(Items(*value))
    result: dict[str, tuple[IdMap, Growth | None]] = {}
    for group in groups:
        first, *others = sorted(group, key=lambda name: -maps[name].trainings)
        for name in others:
            _check_alike(columns[first], columns[name])
            counts[first].merge(counts[name].items())
        after, growth = maps[first].grown(columns[first], counts[first].items(), digest)
        result |= {name: (after.of(columns[name]), growth) for name in group}
    return result


def _check_alike(one: Column, other: Column) -> None:
    by_place = any(item.by_place or item.places for item in one.ids)
    if by_place or one.ids != other.ids:
        raise DataError(
            f"one table of the model is read by columns {one.name!r} and {other.name!r}, so that "
            "both need the same ids, but the schema states different ids",
            do="state the same ids for both, without places and by_place, or give each a table",
        )


def _check_shared_rows(
    source: Pipeline,
    tables: Mapping[str, Any],
    readers: Mapping[str, Sequence[str]],
    optimizer: Any,
) -> None:
    """Refuse numbers of hash buckets whose rows exceed the memory, before ids are counted."""
    shared = {column.name: IdMap.empty(column).size for column in source.id_columns}
    read = {name: own[0] for name, own in readers.items() if own[0] in shared}
    rows = {name: GrownRows(shared[column], None, "") for name, column in read.items()}
    check_memory(tables, rows, optimizer, dict.fromkeys(rows, "that ids share"))


class _Apart:
    """A replacement of IdMap that gives each id of a batch a distinct number."""

    def __init__(self, column: str, number: int) -> None:
        self.column, self.numbers = column, range((number + 1) * _APART, (number + 2) * _APART)
        self.digest = "apart"

    def rows_of(self, ids: Any, out: Any) -> int:
        out.reshape(-1)[:] = self.numbers.start + np.arange(out.size) % _APART
        return -1

    def among(self, inputs: Any) -> range:
        own = range(self.numbers.start, self.numbers.start)
        for tensor in tensors_in(inputs):
            mine = tensor[(tensor >= self.numbers.start) & (tensor < self.numbers.stop)]
            if len(mine):
                own = range(own.start, max(own.stop, int(mine.max()) + 1))
        return own


def _readers(
    source: Pipeline,
    tables: Mapping[str, Any],
    model: nn.Module,
    maps: Mapping[str, IdMap],
    loop: Loop,
) -> dict[str, list[str]]:
    apart = {name: _Apart(name, number) for number, name in enumerate(maps)}
    batch = source.with_ids(apart).peek(1)[0].rows(0, 2)
    inputs = loop.feed.inputs(batch.to(next(model.parameters()).device)).inputs

    def run() -> None:
        with untouched(model), evaluating(model), uncompiled():
            try:
                call(adapter_of(model).called(training=False), inputs)
            except FlatoutError:
                raise
            except Exception:  # the model may not take such ids; training will report errors
                pass

    numbers = [(name, value.among(inputs)) for name, value in apart.items()]
    return readers_of(tables, numbers, run)


def _words(after: IdMap, growth: Growth) -> str:
    parts = [f"{counted(growth.new, 'new id')} -> new rows"]
    if growth.gone:
        parts.append(f"{growth.gone:,} gone")
    if growth.waiting:
        parts.append(f"{growth.waiting:,} without a row yet")
    if growth.hashed:
        parts.append(f"{growth.hashed:,} hashed, {growth.collide:,} of them collide")
    return f"{', '.join(parts)}; {after.size:,} rows"
