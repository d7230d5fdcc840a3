"""Batches that a user's code makes: read forward, and resumed by replaying."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, count, islice
from typing import Any, Literal

import torch

from flatout.console import first_line
from flatout.data.batches.batch import Batch
from flatout.data.batches.tensors import as_batch, is_array
from flatout.data.digests.code import code_digest
from flatout.data.digests.digests import digest_of
from flatout.data.execution.batch_sampler import check_start, check_steps
from flatout.data.randomness import random_state, set_random_state
from flatout.data.workers.read_ahead import EpochReader, read_ahead
from flatout.data.workers.waiting import WaitStopped
from flatout.data.workers.worker_tuner import Workers
from flatout.errors import DataError

# Marks the end of an iterator.
_END = object()
_NOT_READ = object()


class IterableSource:
    """Batches from an iterator that is opened again every epoch.

    A resume in the middle of an epoch reads the batches before it and drops them. `state_dict`
    holds the random states at the epoch's start, so that shuffles and augmentations are repeated.
    These are the states of the global generators of torch, Python and numpy, and of the generators
    that a DataLoader and its sampler own. They are set for the replay. After the replay the global
    generators have their earlier states again.

    Args:
        begin: returns the iterator of an epoch.
        name: name of the iterator, for messages.
        digest: returns a text that identifies the iterator, for comparison; called only when
            needed.
        steps: number of batches per epoch, if known.
        samples: number of samples per epoch, if known.
        batch_size: number of samples per batch, if known.
        generators: torch generators that the iterator draws from.
        seekable: True if the batches do not depend on earlier reads.
        peek: reads the first raw batches and leaves them in the epoch. None if opening does so.
        reader: chooses whether a thread or processes make the batches; None: neither does.
        reopens: True if an epoch can be opened again.
        begin_apart: returns the iterator of an epoch whose batches are made by a given number of
            processes.
        own_parts: the user's objects that the iterator calls. Reading the first batches leaves them
            unchanged. The list is empty if a new epoch goes on from there.
    """

    def __init__(
        self,
        begin: Callable[[int], Iterator[Any]],
        *,
        name: str,
        digest: Callable[[], str],
        steps: int | None = None,
        samples: int | None = None,
        batch_size: int | None = None,
        generators: Sequence[torch.Generator] = (),
        seekable: bool = False,
        peek: Callable[[int], list[Any]] | None = None,
        reader: EpochReader | None = None,
        reopens: bool = True,
        own_parts: Sequence[Any] = (),
        begin_apart: Callable[[int, int], Iterator[Any]] | None = None,
    ) -> None:
        self.own_parts = own_parts
        self.seekable = seekable
        self.reader = reader
        self._reopens = reopens
        self.counted = steps is not None
        self.samples = samples
        self.steps = steps
        self.batch_size = batch_size
        self._digest = digest
        self._begin, self._begin_apart = begin, begin_apart
        self._name = name
        self._generators = generators
        self._peek = peek
        self._start: dict[str, Any] | None = None
        # whether earlier batches were jagged; None before the first batch
        self._is_jagged: bool | None = None

    @cached_property
    def digest(self) -> str:
        """16 hex digits that differ for other data, as far as code and length differ."""
        return self._digest()

    def describe(self) -> str:
        """Return one line for the user."""
        steps = "an unknown number of" if self.steps is None else f"{self.steps:,}"
        return f"{steps} {self._name}"

    def labels_range(self) -> tuple[int, int] | None:
        """Return None: the targets are not in memory."""
        return None

    def peek(self, count: int) -> list[Batch]:
        """Return the first batches of epoch 0, which epoch 0 then still contains."""
        here, owned = random_state(), self._generator_states()
        if self._peek is not None:
            raw = self._peek(count)
        else:
            raw = list(islice(self._begin(0), count))
        set_random_state(here)
        self._set_generators(owned)
        return [self._batch(value, 0, i) for i, value in enumerate(raw)]

    def state_dict(self) -> dict[str, Any]:
        """Return random states, which a resume needs in addition to (epoch, step)."""
        if self.seekable:
            return {}
        return {"start": self._start, "generators": self._generator_states()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`; the next `batches` replays from there."""
        if not self.seekable:
            self._start = state["start"]
            self._set_generators(state["generators"])

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from `start_step` on.

        Raises:
            DataError: the epoch has no such step or no batch at all; a batch holds values that are
                no arrays; a one-shot iterator has been read before.
        """
        check_start(start_step, self.steps)
        if self.reader is None:
            return self._read(epoch, start_step)
        return self._tuned(self.reader, epoch, start_step)

    def expect_epochs(self, total: int | None) -> None:
        """Set the number of epochs of the run: the last epoch is read like the epoch before."""
        if self.reader is not None:
            self.reader.epochs = total

    @property
    def report(self) -> EpochReader | None:
        """The trials of how to read the batches, and their outcomes; None without trials."""
        return self.reader

    def _tuned(self, reader: EpochReader, epoch: int, start_step: int) -> Iterator[Batch]:
        step, workers = start_step, reader.starts()
        if start_step and (workers == "thread" or not reader.is_asked):
            workers = 0  # batches that a resume reads again are not measured
        made = self._read(epoch, start_step, workers if isinstance(workers, int) else 0)
        if workers == "thread":
            made = read_ahead(made)
        try:
            while True:
                start = reader.clock()
                try:
                    batch = reader.take(made)
                except Exception as error:
                    if workers == 0 or not self._reopens or isinstance(error, WaitStopped):
                        raise
                    # The thread may have caused the error; any other error is raised again later.
                    reader.refuse(first_line(error))
                    if step == 0:
                        self._begin_again()
                    workers, made = 0, self._read(epoch, step)
                    continue
                if batch is None:
                    break
                waited = reader.clock() - start
                step += 1
                yield batch
                reader.used(waited)
        finally:
            made.close()
        if not start_step:
            reader.ended(epoch)

    def _read(self, epoch: int, start_step: int, workers: int = 0) -> Generator[Batch, None, None]:
        iterator = self._open(epoch, start_step, workers)
        value = next(iterator, _END)
        if value is _END and start_step == 0:
            raise DataError(f"no batches: epoch {epoch} is empty, expected at least 1 batch")
        for step in count(start_step):
            if value is _END:
                return
            following: Any = _NOT_READ
            if step + 1 == self.steps:
                # Read to the end before the last batch is yielded: samplers draw once more there,
                # and a state after the last step must include that draw.
                following = next(iterator, _END)
            yield self._batch(value, epoch, step)
            value = next(iterator, _END) if following is _NOT_READ else following

    def _batch(self, value: Any, epoch: int, step: int) -> Batch:
        batch = as_batch(value, f"epoch {epoch}, batch {step}", is_jagged=self._is_jagged)
        self._is_jagged = self._is_jagged or batch.is_jagged
        return batch

    def _open(self, epoch: int, start_step: int, workers: int) -> Iterator[Any]:
        here = random_state()
        if start_step and self._start is not None and self._start["epoch"] == epoch:
            self._begin_again()
        else:
            generators = self._generator_states()
            self._start = {"epoch": epoch, "random": here, "generators": generators}
        if workers and self._begin_apart is not None:
            iterator = self._begin_apart(epoch, workers)
        else:
            iterator = self._begin(epoch)
        for step in range(start_step):
            if next(iterator, _END) is _END:
                raise DataError(
                    f"epoch {epoch} ended after {step:,} batches, but the run to resume had "
                    f"taken {start_step:,}: the data has changed"
                )
        if start_step:
            set_random_state(here)
        return iterator

    def _begin_again(self) -> None:
        assert self._start is not None
        set_random_state(self._start["random"])
        self._set_generators(self._start["generators"])

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _OneShot:
    """An iterator that can only be read forward, such as a running generator.

    With `steps`, an epoch has that number of batches, and the next epoch continues there.
    """

    def __init__(self, iterator: Iterator[Any], steps: int | None) -> None:
        self._iterator = iterator
        self._steps = steps
        self._taken = 0

    def peek(self, count: int) -> list[Any]:
        ahead = list(islice(self._iterator, count))
        self._iterator = chain(ahead, self._iterator)
        return ahead

    def begin(self, epoch: int) -> Iterator[Any]:
        first = 0 if self._steps is None else epoch * self._steps
        if self._taken > first:
            raise DataError(
                f"epoch {epoch} finds no batches: {self._taken:,} have been taken from an iterator "
                "that gives each of them once",
                do="pass a function that returns a fresh iterator, a list, or a DataLoader",
            )
        forward = self._forward()
        for _ in range(first - self._taken):
            next(forward, None)
        return islice(forward, self._steps)

    def _forward(self) -> Iterator[Any]:
        for value in self._iterator:
            self._taken += 1
            yield value


def iterable(
    batches: Any, *, steps: int | None = None, workers: Workers | Literal["auto"] = "auto"
) -> IterableSource:
    """Return a source of finished batches: x, (x, y) or (x, y, weight), of tensors or arrays.

    Args:
        batches: an iterable of batches such as a list; a function without parameters that returns a
            fresh iterator for every epoch; or an iterator, which serves one epoch (with `steps`,
            epoch after epoch until it ends).
        steps: number of batches per epoch. Needed if the iterator never ends.
        workers: "thread" reads batches ahead in a thread, unless they depend on the model; 0 reads
            them when they are needed; "auto" keeps the faster way from the second epoch on.

    Raises:
        DataError: `batches` has another type, holds no batches, or is a list of arrays.
    """
    if steps is not None:
        check_steps(steps)
    if isinstance(batches, Iterator):
        once = _OneShot(batches, steps)
        name = f"batches from a {type(batches).__name__}, which can be read once"
        return IterableSource(
            once.begin,
            name=name,
            digest=lambda: name_digest(batches),
            steps=steps,
            peek=once.peek,
            reader=EpochReader(workers, batches),
            reopens=False,
        )
    if isinstance(batches, Iterable):
        _refuse_bare_arrays(batches)
        length = length_of(batches)
        if length == 0:
            raise DataError(f"the {type(batches).__name__} holds no batches: expected at least 1")
        return IterableSource(
            lambda epoch: islice(iter(batches), steps),
            name=f"batches of a {type(batches).__name__}, in its own order",
            digest=lambda: name_digest(batches, length),
            steps=min((n for n in (length, steps) if n is not None), default=None),
            seekable=isinstance(batches, list),
            reader=None if isinstance(batches, list) else EpochReader(workers, batches),
            own_parts=[] if isinstance(batches, list) else [batches],
        )
    _refuse_parameters(batches)
    return IterableSource(
        lambda epoch: islice(_opened(batches), steps),
        name=f"batches from {_name_of(batches)}()",
        digest=lambda: name_digest(batches),
        steps=steps,
        reader=EpochReader(workers, batches),
        own_parts=[batches],
    )


def name_digest(thing: Any, length: int | None = None, *code: Any) -> str:
    """Return 16 hex digits over the name, length and code of `thing`.

    Args:
        thing: a Dataset, an iterable or a function; its items are not read.
        length: number of its items, if it is known.
        code: further functions and objects that make its batches.
    """
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    words = f"{getattr(named, '__module__', '')}.{named.__qualname__} {length}"
    return digest_of(words, *map(code_digest, (thing, *code)))


def length_of(thing: Any) -> int | None:
    """Return `len(thing)`, or None if it has no length."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _opened(make: Callable[[], Any]) -> Iterator[Any]:
    made = make()
    if not isinstance(made, Iterable):
        raise DataError(
            f"{_name_of(make)}() returned {type(made).__name__}: expected an iterator of batches"
        )
    return iter(made)


def _refuse_parameters(make: Any) -> None:
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise DataError(
            f"{_name_of(make)}: expected a function without parameters that returns an iterator of "
            f"batches, found {error}"
        ) from error


def _refuse_bare_arrays(batches: Any) -> None:
    if isinstance(batches, list) and batches and all(map(is_array, batches)):
        raise DataError(
            f"a list of {len(batches)} arrays can mean batches, several inputs, or x and y",
            do="pass (x, y) for inputs and targets, ((a, b), y) for several inputs, "
            "or iter(...) for batches without targets",
        )


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
