"""The rows of a source after each stage, still found by their index."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from threading import Lock
from time import perf_counter_ns as clock
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch.utils.data import Subset

from flatout.data.batches.form import Form, Unlike, columns_of, form_of
from flatout.data.digests.digests import NoDigest, digest_of, function_digest, function_name
from flatout.data.execution.turns import Turns, places_left, turns_at, turns_left
from flatout.data.randomness import random_state, same_state, set_random_state
from flatout.data.reading.block import (
    Block,
    Numbers,
    Ragged,
    Values,
    as_ragged,
    join,
    offsets_of,
    rows_between,
    take,
)
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.files import stamps_of
from flatout.data.reading.origins import Rows
from flatout.errors import DataError, FlatoutError

# Maximum number of rows that one call makes during the search for a readable row.
_MOST_AT_ONCE = 64


class Samples(Protocol):
    """Rows by index, as they are after some stages. Several threads may call at once.

    Attributes:
        rows: number of row indices.
        random: whether reading rows in any order costs about as much as in the given order.
        name: name of the stage, for the user.
    """

    rows: int
    random: bool
    name: str

    @property
    def probe(self) -> int:
        """Index of a chosen row, which shows the structure of samples."""
        ...

    @property
    def draws(self) -> bool:
        """Whether a user's code drew from a global generator in a trial.

        Such code may only run in the thread that iterates, with the generators seeded.
        """
        ...

    @property
    def form(self) -> Form:
        """The columns that hold inputs, targets and weights."""
        ...

    @property
    def digest(self) -> str:
        """16 hex digits that differ for other data."""
        ...

    def content(self) -> str | None:
        """Return 16 hex digits that differ for any different sample, or None if not possible.

        It may read all of the data. Caches on disk are found by these digits.
        """
        ...

    def make(self, numbers: Numbers, buffers: Buffers, epoch: Turns, costs: Costs) -> Block:
        """Return these rows, in this order."""
        ...

    def where(self, number: int) -> str:
        """Return the location of a row in the data."""
        ...


# Returns whether a column can be used directly from memory. Arguments: name and values of all rows.
IsWanted: TypeAlias = Callable[[str, npt.NDArray[Any]], bool]


class LentRows(NamedTuple):
    """Some rows, whose columns in memory were partly not copied.

    Attributes:
        block: the columns that were copied, of the rows.
        whole: the columns that were not copied, of all rows.
        places: positions of the rows in `whole`, int64 of shape (rows,).
    """

    block: Block
    whole: dict[str, Values]
    places: Numbers


@runtime_checkable
class Lender(Protocol):
    """Samples that can return columns in memory without a copy."""

    def lend(
        self, numbers: Numbers, buffers: Buffers, costs: Costs, wanted: IsWanted
    ) -> LentRows | None:
        """Return the rows of `make`, without copies of the wanted columns."""
        ...


class Costs:
    """Nanoseconds that each stage has taken, summed over all threads."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}
        self.batches = 0
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"ns": {}, "batches": 0}  # another process counts its own costs

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = Lock()

    def add(self, stage: str, ns: int) -> None:
        with self._lock:
            self.ns[stage] = self.ns.get(stage, 0) + ns

    def ms_per_batch(self) -> dict[str, float]:
        return {name: ns / 1e6 / max(1, self.batches) for name, ns in self.ns.items()}


class Decoded:
    draws = False

    def __init__(self, source: Rows) -> None:
        self.source = source
        self.rows = source.rows
        self.random = source.random
        self.name = "decode"
        self.probe = 0  # the first row that is used
        self.form: Form = form_of(source.schema)

    @property
    def digest(self) -> str:
        return self.source.digest

    def content(self) -> str | None:
        """Return a digest over data, bytes of a table in memory, and times of file changes."""
        files = [file.path for file in getattr(self.source, "files", ())]
        paths = getattr(self.source, "paths", files)
        whole = getattr(self.source, "content", str)
        return digest_of(self.digest, whole(), stamps_of(paths))

    def make(self, numbers: Numbers, buffers: Buffers, epoch: Turns, costs: Costs) -> Block:
        start = clock()
        block = self.source.take(numbers, buffers)
        costs.add(self.name, clock() - start)
        return block

    def targets(self) -> npt.NDArray[Any] | None:
        return self.source.targets()

    def where(self, number: int) -> str:
        return self.source.where(number)


class Made:
    """Samples that a user's code makes, one by one. The base class of Mapped and Fetched."""

    name: str
    rows: int
    probe: int = 0  # the first row that is used

    def __init__(self) -> None:
        self._form: Form | None = None
        self._draws: bool | None = None
        # Columns whose vectors were found to differ in length.
        self._ragged: set[str] = set()
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = Lock()

    @property
    def form(self) -> Form:
        """The structure of the samples, known after the first sample was made."""
        if self._form is None:
            self._look()
        if self._form is None:
            raise DataError(f"{self.name}: none of the rows can be read, and all were skipped")
        return self._form

    @property
    def draws(self) -> bool:
        """Whether the code, or code of an inner stage, drew from a global generator in a trial."""
        if self._draws is None:
            self._look()
        return bool(self._draws)

    def _look(self) -> None:
        before = random_state()
        try:
            first_good(self, Buffers(), 0, Costs())
            self._draws = not same_state(before, random_state())
        finally:
            set_random_state(before)

    def make(self, numbers: Numbers, buffers: Buffers, epoch: Turns, costs: Costs) -> Block:
        raise NotImplementedError

    def where(self, number: int) -> str:
        raise NotImplementedError

    def _block(self, made: list[Any], numbers: Numbers) -> Block:
        if not made:  # all rows were skipped
            return Block({}, numbers)
        try:
            columns, result = columns_of(made, self.name)
        except Unlike as error:
            raise DataError(error.what, where=self.where(int(numbers[error.place]))) from None
        with self._lock:
            if self._form is None:
                self._form = result
            self._ragged |= {name for name, value in columns.items() if isinstance(value, Ragged)}
        for name in self._ragged & columns.keys():
            columns[name] = as_ragged(columns[name])
        if result != self._form:
            raise DataError(
                f"{self.name} makes samples of different structures",
                where=self.where(int(numbers[0])),
            )
        return Block(columns, numbers)


class Fetched(Made):
    random = True

    def __init__(self, dataset: Any, digest: str) -> None:
        super().__init__()
        self.dataset = dataset
        self.rows = len(dataset)
        self.name = f"fetch {type(dataset).__name__}"
        self.digest = digest

    def content(self) -> str | None:
        return None

    def targets(self) -> npt.NDArray[Any] | None:
        return told_targets(self.dataset)

    def make(self, numbers: Numbers, buffers: Buffers, epoch: Turns, costs: Costs) -> Block:
        start = clock()
        block = self._block([self._fetch(int(number)) for number in numbers], numbers)
        costs.add(self.name, clock() - start)
        return block

    def _fetch(self, number: int) -> Any:
        try:
            return self.dataset[number]
        except StopIteration as error:  # StopIteration would end the loop as if nothing were wrong
            what = f"{self.name} raised StopIteration"
            raise DataError(what, where=self.where(number)) from error
        except Exception as error:
            error.add_note(f"in {self.name}, {self.where(number)}")
            raise

    def where(self, number: int) -> str:
        return f"sample {number:,}"


class Mapped(Made):
    """Rows after a user's function of one sample.

    The function gets the sample's parts, as a Dataset would give them: `function(inputs)`,
    `function(inputs, targets)` or also with the weight. If it has a parameter `rng`, it also gets a
    numpy Generator that depends on (seed, epoch, sample) alone.
    """

    def __init__(self, inner: Samples, function: Callable[..., Any], seed: int) -> None:
        super().__init__()
        self.inner = inner
        self.function = function
        self.rows, self.random = inner.rows, inner.random
        self.name = f"map {name_of(function)}"
        self.seed = seed
        self.wants_rng = takes_rng(function)

    def over(self, inner: Samples) -> Mapped:
        return Mapped(inner, self.function, self.seed)

    @property
    def digest(self) -> str:
        return digest_of(self.inner.digest, "map", function_digest(self.function))

    @property
    def probe(self) -> int:  # type: ignore[override]
        return self.inner.probe

    def content(self) -> str | None:
        inner = self.inner.content()
        if inner is None:
            return None
        try:
            own = function_name(self.function)
        except NoDigest:
            return None
        return digest_of(inner, "map", own)

    def make(self, numbers: Numbers, buffers: Buffers, epoch: Turns, costs: Costs) -> Block:
        block = self.inner.make(numbers, buffers, epoch, costs)
        start = clock()
        made = self.apply(block, turns_left(epoch, numbers, block.numbers))
        costs.add(self.name, clock() - start)
        return made

    def apply(self, block: Block, epoch: Turns) -> Block:
        form = self.inner.form
        made = [self._call(form.sample(block, row), block, row, epoch) for row in range(len(block))]
        return self._block(made, block.numbers)

    def _call(self, sample: tuple[Any, ...], block: Block, row: int, epoch: Turns) -> Any:
        number = int(block.numbers[row])
        try:
            if self.wants_rng:
                turn = epoch if isinstance(epoch, int) else int(epoch[row])
                return self.function(*sample, rng=sample_rng(self.seed, turn, number))
            return self.function(*sample)
        except FlatoutError:
            raise
        except Exception as error:
            check_takes(self.function, self.name, len(sample), error)
            error.add_note(f"in {self.name} of sample {number:,}: {self.where(number)}")
            raise

    def where(self, number: int) -> str:
        return self.inner.where(number)


class Joined:
    """The rows of several sources, numbered in sequence.

    Attributes:
        numbers: indices of the chosen rows of all sources, ascending.
    """

    def __init__(self, parts: list[Samples], chosen: list[Numbers]) -> None:
        self.parts = parts
        self.starts = offsets_of([part.rows for part in parts])
        self.rows = int(self.starts[-1])
        self.random = all(part.random for part in parts)
        self.name = "mix"
        self.probe = parts[0].probe
        each = zip(chosen, self.starts, strict=False)
        self.numbers = np.concatenate([own + start for own, start in each])
        first = _kinds(parts[0])
        for part in parts[1:]:
            if part.form != parts[0].form or _kinds(part) != first:
                words = [f"{p.form.describe()}: {', '.join(_kinds(p).values())}" for p in parts]
                raise DataError(
                    f"the sources to mix have different columns: {'; and '.join(words)}",
                    do="give them the same schema, or map both to the same structure first",
                )

    @property
    def draws(self) -> bool:
        return any(part.draws for part in self.parts)

    def content(self) -> str | None:
        contents = [part.content() for part in self.parts]
        return None if None in contents else digest_of("mix", *map(str, contents))

    @property
    def form(self) -> Form:
        return self.parts[0].form

    @property
    def digest(self) -> str:
        return digest_of("mix", *(part.digest for part in self.parts))

    def targets(self) -> npt.NDArray[Any] | None:
        targets = [known_targets(part) for part in self.parts]
        known = [targets for targets in targets if targets is not None]
        return np.concatenate(known) if len(known) == len(targets) else None

    def make(self, numbers: Numbers, buffers: Buffers, epoch: Turns, costs: Costs) -> Block:
        owner = np.searchsorted(self.starts, numbers, side="right") - 1
        blocks, own_places = [], []
        for at, part in enumerate(self.parts):
            own = np.flatnonzero(owner == at)
            if len(own):
                turns = turns_at(epoch, own)
                block = part.make(numbers[own] - self.starts[at], buffers, turns, costs)
                blocks.append(Block(block.columns, block.numbers + self.starts[at]))
                own_places.append(own[places_left(numbers[own], blocks[-1].numbers)])
        if len(blocks) == 1:
            return blocks[0]
        return take(join(blocks), np.argsort(np.concatenate(own_places), kind="stable"))

    def where(self, number: int) -> str:
        at = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.parts[at].where(number - int(self.starts[at]))


def first_good(samples: Samples | Made, buffers: Buffers, epoch: Turns, costs: Costs) -> Block:
    """Return the row of `probe`, or the first row after it that can be read if rows are skipped.

    Args are those of `Samples.make`.
    """
    at, count = samples.probe, 1
    while True:
        numbers = np.arange(at, min(at + count, samples.rows))
        block = samples.make(numbers, buffers, epoch, costs)
        at += count
        if len(block) or at >= samples.rows:
            return rows_between(block, 0, min(1, len(block)))
        count = min(2 * count, _MOST_AT_ONCE)


def _kinds(samples: Samples) -> dict[str, str]:
    block = first_good(samples, Buffers(), 0, Costs())
    kinds = {}
    for name, values in block.columns.items():
        if isinstance(values, Ragged):
            kinds[name] = f"{values.values.dtype} vectors"
        elif values.ndim == 2 and isinstance(samples, Made):
            kinds[name] = f"{values.dtype} vectors"
        else:
            kinds[name] = f"{values.dtype} of shape {values.shape[1:]}"
    return kinds


def known_targets(samples: Samples) -> npt.NDArray[Any] | None:
    """Return the targets of all rows by index, if they are known without making samples.

    A cache and augmentations do not change targets; a user's function may change them.
    """
    result: Any = samples
    while not hasattr(result, "targets"):
        if isinstance(result, Mapped) or not hasattr(result, "inner"):
            return None
        result = result.inner
    known: npt.NDArray[Any] | None = result.targets()
    return known


def told_targets(dataset: Any) -> npt.NDArray[Any] | None:
    """Return the class numbers in a Dataset's `targets`, as torchvision has them, or None.

    For a Subset, these are the targets of its samples. None also where a `target_transform` changes
    the targets.
    """
    if isinstance(dataset, Subset):
        whole = told_targets(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices, np.int64)]
    result = getattr(dataset, "targets", None)
    if result is None or getattr(dataset, "target_transform", None) is not None:
        return None
    try:
        targets = np.asarray(result)
    except (TypeError, ValueError, RuntimeError):
        return None
    return targets if targets.shape == (len(dataset),) and targets.dtype.kind in "iu" else None


def sample_rng(seed: int, epoch: int, number: int) -> np.random.Generator:
    """Return a Philox generator that depends on (seed, epoch, sample) alone."""
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    counter = np.array([0, number % 2**64, 0, 2], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def takes_rng(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `rng`."""
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def check_takes(function: Callable[..., Any], name: str, parts: int, error: Exception) -> None:
    """Raise an error if a function failed because it does not accept the parts of a sample."""
    if not isinstance(error, TypeError):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * parts, **({"rng": None} if "rng" in signature.parameters else {}))
    except TypeError:
        given = ", ".join(("inputs", "targets", "weight")[:parts])
        raise DataError(
            f"the function of {name} takes {signature}, and the samples have {given}",
            do=f"give the function these parameters and as many results: def f({given})",
        ) from error


def name_of(function: Any) -> str:
    """Return the name of a function, with its line if it is a lambda."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if "<lambda>" in name and code is not None:
        return f"lambda, line {code.co_firstlineno}"
    return str(name).rpartition("<locals>.")[2]
