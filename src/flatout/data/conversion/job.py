"""Rows of a conversion: which rows of a pipeline are written, in which order, form and pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from flatout.data.batches.form import Form, Leaf
from flatout.data.execution.labels import labels_of
from flatout.data.execution.samples import Costs, Samples
from flatout.data.mixture import Mixture
from flatout.data.pipeline import Pipeline
from flatout.data.planner import build_rows
from flatout.data.randomness import batch_seed, seeded
from flatout.data.reading.block import Block, Numbers, Ragged, Values, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.origins import is_rows
from flatout.data.reading.schema import Column, Schema
from flatout.data.stages import Cache, Options, Shuffle, only
from flatout.data.stores.row_store import row_bytes
from flatout.data.workers.parallel import Ahead, Tuner
from flatout.errors import DataError
from flatout.measure import usable_cpus

T = TypeVar("T")

# Maximum number of rows of a piece.
_MOST_ROWS = 1 << 16


class Piece(NamedTuple):
    """Rows that are made at once.

    Attributes:
        part: index of the output part, such as a shard, that the rows belong to.
        start: position of the first row in the order of all rows.
        stop: position after the last row.
    """

    part: int
    start: int
    stop: int


def pieces_of(sizes: Sequence[int], probe: Block, piece_bytes: int) -> list[Piece]:
    """Split parts of these numbers of rows into pieces of about the same size in each part."""
    most = int(min(max(piece_bytes / row_bytes(probe), 1), _MOST_ROWS))
    pieces, start = [], 0
    for part, size in enumerate(sizes):
        count = -(-size // most)
        cuts = [start + size * i // count for i in range(count + 1)]
        pieces += [Piece(part, a, b) for a, b in pairwise(cuts)]
        start += size
    return pieces


# Number of rows that are made to find dtypes, shapes and sizes.
_PROBE = 256
# Options of a source that state the meaning of numbers; all other options are about its files.
_MEANINGS = ("classes", "categories", "unknown", "base", "buckets", "stack")


@dataclass(frozen=True)
class Conversion:
    """Rows to be converted.

    Attributes:
        samples: samples of the pipeline, from which rows are written.
        numbers: indices of the rows, in the order in which they are written.
        schema: schema of the written rows; its format has no meaning.
        names: name of the block's column, by the name of the written column.
        probe: some rows, as they are written.
        settings: settings that decide the written bytes.
        origin: source of the pipeline.
        describe: description of the pipeline, for the user.
        alone: whether one thread makes all rows, since a function draws from global generators.
        told: lines for the user about balanced classes.
    """

    samples: Samples
    numbers: Numbers
    schema: Schema
    names: dict[str, str]
    probe: Block
    settings: dict[str, Any]
    origin: Any
    describe: str
    alone: bool
    told: Sequence[str] = ()

    def notes(self) -> list[str]:
        return [*self.told, *getattr(self.origin, "notes", list)()]

    def make(self, pieces: Sequence[Piece], use: Callable[[Block], T]) -> Generator[T, None, None]:
        """Yield the result of `use` for the rows of each piece, in the order of the pieces."""
        buffers = Buffers()

        def one(at: int) -> T:
            numbers = self.numbers[pieces[at].start : pieces[at].stop]
            block = self.samples.make(numbers, buffers, 0, Costs())
            return use(_fitted(block, self.schema, self.names, self.samples.where))

        if self.alone:
            for at, piece in enumerate(pieces):
                with seeded(batch_seed(0, 0, piece.start)):
                    result = one(at)
                yield result
            return
        threads = usable_cpus()
        tuner = Tuner(threads, threads=threads, depth=threads + 2)
        with closing(iter(Ahead(one, 0, len(pieces), tuner))) as ahead:
            yield from ahead


def job_of(
    pipeline: Pipeline,
    shuffle: int | None,
    balance: str | None,
    sampling: Literal["over", "under"] = "over",
) -> Conversion:
    """Return the rows of a pipeline, shuffled and balanced if asked for.

    Raises:
        DataError: a stage makes no sense in a conversion, or rows have no classes to balance.
    """
    for stage in pipeline.stages:
        stage.check_convert()
    if shuffle is not None:
        if only(pipeline.stages, Shuffle) is not None:
            raise DataError("the pipeline shuffles already; found shuffle as well")
        pipeline = pipeline.shuffle(seed=shuffle)
    if balance == "class":
        pipeline = pipeline.balance(sampling, seed=shuffle or 0)
    cached = only(pipeline.stages, Cache) is not None
    if balance is not None and not cached and not getattr(pipeline.origin, "random", True):
        pipeline = pipeline.cache()
    built = build_rows(pipeline.origin, pipeline.stages, Options(), lambda line: None)
    samples, numbers = built.plan.samples, np.asarray(built.cut.order(0), np.int64)
    if balance is not None:
        numbers = numbers[balanced(_labels(pipeline, samples, numbers))]
    probe = _probe(samples, numbers)
    names = _names(probe, samples.form, pipeline.origin)
    schema = _schema(probe, names, samples.form, pipeline.origin)
    settings = {
        "source": samples.content() or samples.digest,
        "rows": len(numbers),
        "shuffle": shuffle,
        "balance": balance,
        **({"sampling": sampling} if balance == "class" else {}),
        "order": hashlib.sha256(numbers.tobytes()).hexdigest()[:16],
    }
    return Conversion(
        samples=samples,
        numbers=numbers,
        schema=schema,
        names=names,
        probe=_fitted(probe, schema, names, samples.where),
        settings=settings,
        origin=pipeline.origin,
        describe=pipeline.describe(),
        alone=getattr(built.program, "in_this_thread", False),
        told=built.plan.notes,
    )


def balanced(labels: npt.NDArray[Any]) -> Numbers:
    """Return an order in which any range of rows has about the class fractions of all rows.

    Row r of a class of n rows comes after the fraction (r + 0.5) / n of all rows. Rows of a class
    keep their order.
    """
    _, own, counts = np.unique(labels, return_inverse=True, return_counts=True)
    by_class = np.argsort(own, kind="stable")
    rank = np.empty(len(labels), np.int64)
    rank[by_class] = np.arange(len(labels)) - np.repeat(offsets_of(counts)[:-1], counts)
    return np.argsort((rank + 0.5) / counts[own], kind="stable").astype(np.int64)


def _labels(pipeline: Pipeline, samples: Samples, numbers: Numbers) -> npt.NDArray[Any]:
    known = pipeline.origin.targets() if is_rows(pipeline.origin) else None
    if known is not None and not hasattr(samples, "inner"):
        return known[numbers]
    target = samples.form.targets
    if not isinstance(target, Leaf):
        raise DataError(
            "balancing classes wants one target a row, found "
            + ("none" if target is None else "several"),
            do="give a schema in which one column has the role target",
        )
    values = samples.make(numbers[:1], Buffers(), 0, Costs()).columns[target.column]
    if isinstance(values, Ragged) or values.size != 1 or values.dtype.kind not in "biu":
        raise DataError(
            f"balancing classes wants whole numbers as targets, found {target.column!r} of dtype "
            f"{values.values.dtype if isinstance(values, Ragged) else values.dtype}",
            do='give the target the dtype "int64" in the schema',
        )
    return labels_of(samples, numbers, "balance")[1]


def _probe(samples: Samples, numbers: Numbers) -> Block:
    count = min(_PROBE, len(numbers))
    places = np.linspace(0, len(numbers) - 1, count).astype(np.int64)
    chosen = numbers[np.unique(places)] if samples.random else numbers[:count]
    probe = samples.make(chosen, Buffers(), 0, Costs())
    if not len(probe):
        raise DataError(f"none of {len(chosen):,} rows could be read")
    return probe


def _names(probe: Block, form: Form, origin: Any) -> dict[str, str]:
    schema = getattr(origin, "schema", None)
    written = [] if schema is None else [column.name for column in schema.columns]
    ordered = dict.fromkeys([*(name for name in written if name in probe.columns), *probe.columns])
    keys = {
        leaf.column: key or leaf.column
        for tree in form
        for key, leaf in _leaves("", tree)
        if not leaf.is_lengths
    }
    named = {column: keys.get(column, column) for column in ordered}
    new = list(named.values())
    if len(set(new)) < len(new):  # inputs and targets have a key in common
        named = {column: column for column in ordered}
    return {name: column for column, name in named.items()}


def _schema(probe: Block, names: dict[str, str], form: Form, origin: Any) -> Schema:
    facts: dict[str, dict[str, Any]] = {}
    for role, tree in zip(("input", "target", "weight"), form, strict=True):
        for key, leaf in _leaves("", tree):
            own = facts.setdefault(leaf.column, {"role": role})
            own.update({"lengths": key} if leaf.is_lengths else {"pad": leaf.pad})
    columns = []
    for name, column in names.items():
        values, known = probe.columns[column], facts.get(column, {"role": "unused"})
        if isinstance(values, Ragged):
            columns.append(_column(name, values.values.dtype, (), True, known))
        else:
            known = {"role": known["role"]}
            columns.append(_column(name, values.dtype, values.shape[1:], False, known))
        columns[-1] = _with_ids(columns[-1], column, origin)
    return Schema(format="converted", columns=tuple(columns), options=_meanings(origin))


def _with_ids(made: Column, source: str, origin: Any) -> Column:
    if isinstance(origin, Mixture):
        return _with_ids(made, source, origin.parts[0].origin)
    schema = getattr(origin, "schema", None)
    own = next((c for c in getattr(schema, "columns", ()) if c.name == source), None)
    if own is None or (own.dtype, own.shape, own.ragged) != (made.dtype, made.shape, made.ragged):
        return made
    return made.model_copy(update={"ids": own.ids})


def _meanings(origin: Any) -> dict[str, Any]:
    if isinstance(origin, Mixture):
        result: dict[str, Any] = {}
        for part in reversed(origin.parts):
            result.update(_meanings(part.origin))
        return result
    schema = getattr(origin, "schema", None)
    options = {} if schema is None else schema.options
    return {name: options[name] for name in _MEANINGS if name in options}


def _column(
    name: str, dtype: np.dtype[Any], shape: tuple[int, ...], ragged: bool, known: dict[str, Any]
) -> Column:
    try:
        return Column(name=name, dtype=str(dtype), shape=shape, ragged=ragged, **known)  # type: ignore[arg-type]
    except ValueError as error:
        raise DataError(
            f"column {name!r} cannot be written: {dtype} of shape {shape}",
            do="make it numbers of a usual dtype, such as float32 or int64",
        ) from error


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Leaf]]:
    if isinstance(tree, Leaf):
        yield name, tree
    elif isinstance(tree, dict):
        for key, part in tree.items():
            yield from _leaves(str(key), part)
    elif tree is not None:
        for part in tree:
            yield from _leaves("", part)


def _fitted(
    block: Block, schema: Schema, names: dict[str, str], where: Callable[[int], str]
) -> Block:
    columns: dict[str, Values] = {}
    for column in schema.columns:
        values = block.columns[names[column.name]]
        if column.ragged and not isinstance(values, Ragged) and values.ndim == 2:
            lengths = np.full(len(values), values.shape[1])
            values = Ragged(values.reshape(-1), offsets_of(lengths))
        if isinstance(values, Ragged):
            result: Any = (values.values.dtype, (), True)
        else:
            result = (values.dtype, values.shape[1:], False)
        if result != (column.numpy_dtype, column.shape, column.ragged):
            raise DataError(
                f"expected {column.words}, found {result[0]} of shape {result[1]}"
                f"{', of different lengths' if result[2] else ''}",
                where=where(int(block.numbers[0])) if len(block) else None,
                do="let the function make samples of one dtype and shape; vectors may differ in "
                "length, if they do so among the rows that are looked at first",
            )
        columns[column.name] = values
    return Block(columns, block.numbers)
