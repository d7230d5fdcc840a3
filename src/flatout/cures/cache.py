"""script.cache=memory: keeps samples in memory after they were first made.

Samples of a map-style dataset are kept by index, samples of an iterable dataset by position
(stream.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import compress
from multiprocessing.context import get_spawning_popen
from operator import not_
from time import monotonic
from typing import Any
from weakref import ref

import numpy as np

from flatout.cures.record import is_on, leave, took
from flatout.cures.sample_store import Form, Store, are_same, form_of
from flatout.cures.steps import ScriptSteps
from flatout.cures.stream import Stream
from flatout.data import Attributes
from flatout.hooks import wrap
from flatout.measure import available_bytes
from flatout.observe import generators_of
from flatout.world import place

FIELD = "script.cache"
# Before any sample is kept, some samples are made twice and compared. _TRIED: number of these
# samples; _TRIED_LEAST: minimum number if _TRIED_S seconds have passed.
_TRIED, _TRIED_LEAST, _TRIED_S = 16, 4, 2.0
# Share of free memory that the ranks of a machine may use together.
_SHARE = 0.5


class Cached:
    """A dataset whose samples are kept in memory that loader workers share.

    All other accesses are passed on to the dataset. Loaders use it instead of the dataset, while
    the script's `loader.dataset` stays the same.
    """

    def __init__(self, dataset: Any, store: Store) -> None:
        self.__dict__["_flatout"] = (dataset, store)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        dataset, store = self.__dict__["_flatout"]
        numbers = [_number(index) for index in indices]
        are_kept = store.has(numbers)
        if all(are_kept):
            return list(store.get(numbers))
        lacking = list(compress(indices, map(not_, are_kept)))
        if len(indices) > 1 and hasattr(dataset, "__getitems__"):
            made = iter(dataset.__getitems__(lacking))
        else:
            made = (dataset[index] for index in lacking)
        result = []
        for number, is_kept in zip(numbers, are_kept, strict=True):
            result.append(store.get([number])[0] if is_kept else next(made))
            if not is_kept:
                store.keep(number, result[-1])
        return result

    def __len__(self) -> int:
        return len(self.__dict__["_flatout"][0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_flatout"][0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_flatout"][0], name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        dataset, store = self.__dict__["_flatout"]
        if get_spawning_popen() is None:  # the script pickles or copies the dataset
            return dataset.__reduce_ex__(protocol)
        return Cached, (dataset, store)


def _number(index: Any) -> int:
    return int(index) if isinstance(index, (int, np.integer)) else -1


def keep_samples(torch: Any, steps: ScriptSteps) -> None:
    """Hook into the iterators of DataLoaders, which pass their dataset to their workers."""
    owner = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
    known: dict[int, _Known] = {}

    def begin(iterator: Any, loader: Any) -> None:
        if not is_on():
            return
        dataset = loader.dataset
        for number in [number for number, value in known.items() if value.dataset() is None]:
            del known[number]
        if id(dataset) not in known:
            known[id(dataset)] = _Known(torch, dataset)
        if isinstance(dataset, torch.utils.data.IterableDataset):
            _keep_stream(known[id(dataset)].stream, iterator, dataset)
            return
        store = known[id(dataset)].store_for_epoch(dataset)
        if store is not None:
            iterator._dataset = Cached(dataset, store)
            took(FIELD, f"samples of {type(dataset).__name__} in memory")

    def around(original: Any) -> Any:
        def init(iterator: Any, loader: Any) -> None:
            original(iterator, loader)
            begin(iterator, loader)

        return init

    wrap(owner, "__init__", "cures", around)


def _keep_stream(stream: Stream | None, iterator: Any, dataset: Any) -> None:
    if stream is None:
        return
    if iterator._num_workers:
        leave(FIELD, f"workers make the samples of {type(dataset).__name__}, again in each epoch")
        return
    iterator._dataset = _Epoch(stream, dataset)
    if stream.is_kept:
        took(FIELD, f"samples of {type(dataset).__name__} in memory, once two epochs were alike")


class _Epoch:
    """Iterable that a loader uses instead of an iterable dataset."""

    def __init__(self, stream: Stream, dataset: Any) -> None:
        self._stream, self._dataset = stream, dataset

    def __iter__(self) -> Iterator[Any]:
        return self._stream.epoch(self._dataset, iter(self._dataset))


class _Known:
    """A dataset of a loader, and its samples."""

    def __init__(self, torch: Any, dataset: Any) -> None:
        try:
            self.dataset: Any = ref(dataset)
        except TypeError:  # no weak reference to this dataset is possible
            self.dataset = lambda: dataset
        is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
        self.stream = _stream_of(torch, dataset) if is_stream else None
        self._store = None if is_stream else _try_out(torch, dataset)
        self._before = None if self._store is None else Attributes(dataset)

    def store_for_epoch(self, dataset: Any) -> Store | None:
        changed = "" if self._before is None else self._before.changed(dataset)
        if changed:
            leave(FIELD, f"{changed} is different in each epoch")
            self._store = self._before = None
        return self._store


def _room() -> int:
    return int(available_bytes() * _SHARE / max(1, place().local_world_size))


def _stream_of(torch: Any, dataset: Any) -> Stream | None:
    if isinstance(dataset, torch.utils.data.IterDataPipe):  # DataLoader handles DataPipes specially
        leave(FIELD, f"{type(dataset).__name__} is a DataPipe")
        return None
    if _draws(dataset):
        return None
    return Stream(FIELD, dataset, _room())


def _try_out(torch: Any, dataset: Any) -> Store | None:
    name = type(dataset).__name__
    data = torch.utils.data
    if not hasattr(dataset, "__getitem__"):
        leave(FIELD, f"{name} has no samples by number")
        return None
    if isinstance(dataset, (data.TensorDataset, list, tuple)):
        leave(FIELD, f"{name} is in memory already")
        return None
    if _draws(dataset):
        return None
    try:
        count = len(dataset)
        form, reason = _made_twice(torch, dataset, count)
    except Exception as error:
        leave(FIELD, f"samples of {name} cannot be made in advance: {error}")
        return None
    if form is None:
        leave(FIELD, reason)
        return None
    kept = min(count, _room() // form.bytes)
    if kept < count:
        leave(FIELD, f"memory has room for {kept:,} of {count:,} samples")
    return Store(form, kept) if kept else None


def _made_twice(torch: Any, dataset: Any, count: int) -> tuple[Form | None, str]:
    from flatout.data import random_state, same_state, set_random_state

    name = type(dataset).__name__
    if not count:
        return None, f"{name} is empty"
    wanted = sorted({at * (count - 1) // max(1, _TRIED - 1) for at in range(_TRIED)})
    before = random_state()
    try:
        first, began = [], monotonic()
        for index in wanted:
            first.append(dataset[index])
            if monotonic() - began > _TRIED_S / 2 and len(first) >= _TRIED_LEAST:
                break
        attributes = Attributes(dataset)
        again = [dataset[index] for index in wanted[: len(first)]]
        draws = not same_state(before, random_state())
    finally:
        set_random_state(before)
    if draws:
        return None, f"{name} draws random numbers"
    changed = attributes.changed(dataset)
    if changed:
        return None, f"{changed} changes while samples are made"
    form = form_of(first[0])
    if form is None:
        return None, f"samples of {name} are not made of tensors, arrays and numbers alone"
    for item, other in zip(first, again, strict=True):
        a, b = form.columns(item), form.columns(other)
        if a is None or b is None:
            return None, f"samples of {name} differ in shape"
        if not are_same(a, b):
            return None, f"samples of {name} are not the same each time"
    return form, ""


def _draws(dataset: Any) -> bool:
    for name, _ in generators_of(dataset):
        owner = name.replace("dataset.", f"{type(dataset).__name__}.", 1)
        leave(FIELD, f"{owner} draws random numbers")
        return True
    return False
