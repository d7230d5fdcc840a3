"""DataLoaders: their settings, and how long the script waits for their batches."""

from __future__ import annotations

import os
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median
from threading import get_ident
from time import perf_counter_ns
from types import FrameType, FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

from flatout.hooks import wrap
from flatout.kernels import Loaded
from flatout.observe.held_items import held_by, length_of
from flatout.observe.lanes import HOST
from flatout.observe.observation import Loader, Site
from flatout.observe.replicas import has_peers
from flatout.observe.samples import (
    Samples,
    behind_subsets,
    label_runs,
    labels_of,
    number_of_bytes,
    numbers_at,
    numbers_in,
    samples_of,
)
from flatout.observe.series import series_of
from flatout.observe.shards import ENOUGH, block_of, parts_of_indices, parts_of_rows
from flatout.observe.sites import here, is_users, site_of, site_of_code
from flatout.observe.tables import longer_series
from flatout.observe.watch import Watch
from flatout.observe.within_loader import LOADER, Looker, Probe, first_tensor, size_of, watch_fetch

# _WAITS: number of the latest waits for a batch that are kept for each loader; _EPOCHS: number of
# epochs whose first batch is recorded.
_WAITS, _EPOCHS = 20_000, 1000
# Maximum number of samples of the first epoch that are compared with those of other ranks.
_TAKEN = 512
# _FIRSTS: number of epochs whose first samples are recorded; _COMPARED: number of batches of an
# epoch after which the loader's samples are recorded for the comparison with other ranks and
# workers.
_FIRSTS, _COMPARED = 8, 16
# Number of batches between two counts of the dataset's entries; old waits are dropped then, too.
_LOOK_EVERY = 16
# Maximum number of values of a batch that are hashed to compare it with another batch.
_NUMBERS = 4096
# Functions of torch, numpy and random that draw an order.
_DRAWS = frozenset(
    ("choice", "choices", "multinomial", "permutation", "randint", "randperm", "sample", "shuffle")
)
# Maximum number of datapipes of a chain that are named.
_STAGES = 64
# Settings that identify a loader that is made again in each epoch.
_SET_UP = ("kind", "dataset", "length", "batch_size", "num_workers", "shuffles", "drop_last")


class SeenLoader(Loaded):
    """An observed DataLoader."""

    def __init__(self, loader: Any, site: Site | None, number: int) -> None:
        super().__init__()
        self.number = number
        self.ref = ref(loader)
        self.facts = facts_of(loader, site)
        self.samples: Samples | None = None
        self.label_sizes: Counter[int] = Counter()  # samples of each class
        self.count()

    def count(self) -> None:
        """Begin to count."""
        self.in_training = False
        self.waits = array("q")
        self.keep = self.waits.append
        self.batches = self.due = 0
        self.wants_samples = self.wants_within = True
        self.began: int | None = None
        self.is_hashed = True
        self.has_peers = self.is_taking_down = has_peers()
        self.indices: list[int] = []
        self.compared_at = 0  # number of batches at which the samples were compared
        self.firsts: list[list[int]] = []  # first indices of each of the first epochs
        self.rows: list[list[int]] = []  # hashes of the samples of each worker
        self.looker: Looker | None = None
        self._kept_at_first: int | None = None

    def is_like(self, loader: Any) -> bool:
        """Return whether a loader has the same settings."""
        facts = facts_of(loader, self.facts.site)
        return all(getattr(facts, name) == getattr(self.facts, name) for name in _SET_UP)

    def renew(self) -> None:
        """Begin to count again, but keep the measurements within its batches."""
        looker = self.looker
        self.count()
        self.looker = looker
        self.facts = replace(self.facts, epochs=0, first_ms=[], hashes=None)

    def look_at_samples(self, loader: Any) -> None:
        """Record the samples and labels that its dataset holds in memory."""
        self.samples = samples_of(loader.dataset)
        series = series_of(loader.dataset)
        if series is not None:
            known = self.samples or Samples(None, None)
            self.samples = replace(known, series=series, whole=longer_series(series))
        labels = labels_of(loader.dataset)
        self.facts.label_runs = label_runs(labels)
        self.label_sizes = Counter(labels or ())

    def begin_epoch(self, began: int) -> None:
        """Begin an iteration over the loader."""
        self.facts.epochs += 1
        self.began, self.due = began, self.batches + 1
        self.compared_at = self._numbered if self.facts.is_iterable else _COMPARED

    def hash(self, index: Any) -> None:
        """Record the sample indices of the first batch of an epoch."""
        self.is_hashed = True
        if self.has_peers and len(self.firsts) < _FIRSTS:
            self.firsts.append([])
            self.is_taking_down = True
            self.take_down(index)
        if isinstance(index, (list, tuple)) and index and index[0] is not None:
            result = self.facts.hashes = self.facts.hashes or []
            if len(result) < _EPOCHS:
                result.append(zlib.crc32(repr(list(index)).encode()))

    def take_down(self, index: Any) -> None:
        """Record the sample indices of a batch, unless enough indices are recorded."""
        if not isinstance(index, (list, tuple)) or not all(isinstance(i, int) for i in index):
            self.is_taking_down = False
            return
        if not self.firsts:  # the iteration began before the observation
            self.firsts.append([])
        if len(self.firsts) == 1 and len(self.indices) < _TAKEN:
            self.indices += index
        if len(self.firsts[-1]) < ENOUGH:
            self.firsts[-1] += index
        has_all = len(self.firsts) > 1 or len(self.indices) >= _TAKEN
        self.is_taking_down = not has_all or len(self.firsts[-1]) < ENOUGH

    def compare_with_others(self) -> None:
        """Record the first samples, and the part of the dataset, to compare ranks and workers.

        The record is made early, since the dataset may be gone when the script ends, and again at
        the end if the dataset still exists.
        """
        loader, facts = self.ref(), self.facts
        if loader is None or not (self.has_peers or any(self.rows)):
            return
        if self.indices and not _draws_again(loader.sampler):
            facts.taken = numbers_at(loader.dataset, self.indices[:_TAKEN])
            facts.parts = parts_of_indices(loader.dataset, self.firsts)
            facts.parts_of = length_of(behind_subsets(loader.dataset)[0])
            facts.block = block_of(loader.dataset)
        elif any(self.rows):
            facts.parts_of, facts.parts = parts_of_rows(loader.dataset, self.rows) or (None, None)

    def probe(self) -> tuple[Probe, Looker] | None:
        """Return this process's Probe and its sampler thread; None once the probe is complete."""
        if self.looker is None:
            self.looker = Looker(Probe())
            self.looker.start()
        self.wants_within = not self.looker.probe.is_done
        return (self.looker.probe, self.looker) if self.wants_within else None

    def took(self, batch: Any, waited_ns: int) -> None:
        """Record a batch that was handed to the script."""
        self.batches += 1
        if self.began is None:
            self.waits.append(waited_ns)
        else:
            self._took_first(batch, self.began)
        if not self.batches % _LOOK_EVERY:
            self._look()
        if self.facts.is_iterable and self.batches <= self._numbered:
            self._number(batch)
        self.due = self._next_due()

    def _next_due(self) -> int:
        if self.facts.is_iterable and self.batches < self._numbered:
            return self.batches + 1
        regular = (self.batches // _LOOK_EVERY + 1) * _LOOK_EVERY
        return min(regular, self.compared_at) if self.compared_at > self.batches else regular

    def _took_first(self, batch: Any, began: int) -> None:
        if len(self.facts.first_ms) < _EPOCHS:
            self.facts.first_ms.append((perf_counter_ns() - began) / 1e6)
        self.began = None
        if self.facts.batch_bytes is None:
            self.facts.batch_bytes = size_of(batch)

    @property
    def _numbered(self) -> int:
        each = -(-ENOUGH // (self.facts.batch_size or ENOUGH))
        return max(2, each + 1) * max(1, self.facts.num_workers or 0)

    def _number(self, batch: Any) -> None:
        tensor, workers = first_tensor(batch), max(1, self.facts.num_workers or 0)
        if tensor is None:
            return
        values = tensor.detach().cpu()
        if self.batches <= workers + 1:
            numbers = values.reshape(-1)[:_NUMBERS].contiguous()
            self.facts.worker_batches.append(number_of_bytes(numbers.numpy().tobytes()))
        if values.ndim > 1 and (self.has_peers or workers > 1):
            self.rows = self.rows or [[] for _ in range(workers)]
            self.rows[(self.batches - 1) % workers] += numbers_in(values)

    def _look(self) -> None:
        self._count_kept()
        if len(self.waits) > 2 * _WAITS:
            del self.waits[:_WAITS]

    def _count_kept(self) -> None:
        loader, facts = self.ref(), self.facts
        if loader is None or facts.num_workers or not facts.batch_size:
            return
        kept = _entries(loader.dataset)
        if self._kept_at_first is None:
            self._kept_at_first = kept
            return
        read = (self.batches - _LOOK_EVERY) * facts.batch_size
        facts.kept_per_sample = (kept - self._kept_at_first) / read

    def result(self) -> Loader:
        """Return the facts about the loader."""
        facts = self.facts
        facts.batches = self.batches
        facts.in_training = self.in_training
        waits = self.waits[:]
        facts.wait_ms = median(waits) / 1e6 if waits else None
        return facts


def facts_of(loader: Any, site: Site | None) -> Loader:
    """Return the settings of a DataLoader."""
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler
    from torch.utils.data.distributed import DistributedSampler

    dataset = loader.dataset
    sampler = loader.sampler
    if type(loader.batch_sampler) is BatchSampler:  # given by the script: torch then adds a sampler
        sampler = loader.batch_sampler.sampler
    keras_workers = _keras_workers(dataset)
    facts = Loader(
        f"{type(loader).__module__}.{type(loader).__qualname__}",
        site,
        dataset=f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        dataset_site=_site_of_dataset(dataset),
        length=None if isinstance(dataset, IterableDataset) else length_of(dataset),
        batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        num_workers=loader.num_workers or keras_workers or 0,
        persistent_workers=None if keras_workers else loader.persistent_workers,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        prefetch_factor=loader.prefetch_factor,
        is_iterable=isinstance(dataset, IterableDataset),
        stages=stages_of(dataset),
        gives_batches=loader.batch_sampler is None or _gives_batches(dataset),
    )
    if isinstance(dataset, IterableDataset):
        return facts
    facts.is_distributed = isinstance(sampler, DistributedSampler)
    facts.draws_order = any(map(_draws_order, (sampler, loader.batch_sampler)))
    facts.is_in_order = type(sampler) is SequentialSampler and _is_plain(loader.batch_sampler)
    if isinstance(sampler, RandomSampler):
        facts.shuffles = True
    elif isinstance(sampler, SequentialSampler):
        facts.shuffles = False
    elif isinstance(sampler, DistributedSampler):
        facts.shuffles = bool(sampler.shuffle)
    return facts


def _draws_order(sampler: Any) -> bool:
    methods = [value for value in vars(type(sampler)).values() if isinstance(value, FunctionType)]
    return any(
        is_users(method.__code__.co_filename) and _DRAWS & set(method.__code__.co_names)
        for method in methods
    )


def _draws_again(sampler: Any) -> bool:
    from torch.utils.data import WeightedRandomSampler

    return isinstance(sampler, WeightedRandomSampler) or bool(
        getattr(sampler, "replacement", False)
    )


def _is_plain(batch_sampler: Any) -> bool:
    from torch.utils.data import BatchSampler

    return batch_sampler is None or type(batch_sampler) is BatchSampler


def _site_of_dataset(dataset: Any) -> Site | None:
    for item in _chain_of(dataset):
        for name in ("__getitem__", "__getitems__", "__iter__"):
            code = getattr(getattr(type(item), name, None), "__code__", None)
            result = site_of_code(code)
            if result is not None:
                return result
    return None


def _chain_of(dataset: Any) -> Iterator[Any]:
    for _ in range(8):
        if dataset is None:
            return
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def _entries(dataset: Any) -> int:
    values = (value for part in _chain_of(dataset) for value in held_by(part))
    return sum(len(item) for item in values if isinstance(item, (list, dict, set)))


def stages_of(dataset: Any) -> list[str] | None:
    """Return the names of torch's datapipes, from the source up to a datapipe that joins several.

    None where the dataset is no datapipe.
    """
    from torch.utils.data import IterDataPipe

    result: list[str] = []
    while isinstance(dataset, IterDataPipe) and len(result) < _STAGES:
        inside = vars(dataset).get("_datapipe")
        if inside is None:  # otherwise this is the loader's own wrapper around all datapipes
            result.append(type(dataset).__name__.removesuffix("IterDataPipe"))
            inside = vars(dataset).get("datapipe", vars(dataset).get("source_datapipe"))
        dataset = inside
    return result[::-1] or None


def _keras_workers(dataset: Any) -> int:
    # Keras passes a generator to torch. The generator's adapter has the number of workers.
    frame = getattr(getattr(dataset, "iterable", None), "gi_frame", None)
    adapter = None if frame is None else frame.f_locals.get("self")
    return int(getattr(getattr(adapter, "enqueuer", None), "workers", 0))


def _gives_batches(dataset: Any) -> bool:
    for item in _chain_of(dataset):
        if not callable(getattr(item, "__getitems__", None)):
            return False
        if not type(item).__module__.startswith("torch.utils.data"):
            return True
    return False


def watch_loaders(module: Any, watch: Watch, *, looks_within: bool = True) -> None:
    """Hook into torch.utils.data.dataloader.

    Args:
        looks_within: whether to measure also the lines that the first batches spend their time on.
    """
    known: dict[int, SeenLoader] = {}

    def renew() -> None:
        for loader in watch.loaders:
            loader.renew()

    watch.on_renewal.append(renew)

    def seen_of(loader: Any, site: Site | None) -> SeenLoader:
        known_loader = known.get(id(loader))
        if known_loader is None or known_loader.ref() is not loader:
            known_loader = known[id(loader)] = _remade(loader, site) or _met(loader, site)
        known_loader.facts.site = known_loader.facts.site or site
        return known_loader

    def _met(loader: Any, site: Site | None) -> SeenLoader:
        known_loader = SeenLoader(loader, site, len(watch.loaders))
        known_loader.facts.made_at = made.of(loader)
        watch.loaders.append(known_loader)
        return known_loader

    def _remade(loader: Any, site: Site | None) -> SeenLoader | None:
        for item in watch.loaders if site is not None else ():
            # Compared as text, since recording the site's line of code changes a Site.
            if item.ref() is None and str(item.facts.site) == str(site) and item.is_like(loader):
                item.ref = ref(loader)
                return cast(SeenLoader, item)
        return None

    made = MadeAt()
    wrap(module.DataLoader, "__init__", "observe", _noted, made)
    wrap(module.DataLoader, "__iter__", "observe", _timed_iteration, watch, seen_of)
    watch_batches(module._BaseDataLoaderIter, watch, seen_of)
    if not looks_within:
        return

    def probe_of(fetcher: Any) -> tuple[Probe, Looker] | None:
        lanes = watch.lanes
        if lanes.loader is None or get_ident() != lanes.thread:
            return None
        loader: SeenLoader = lanes.loader
        return loader.probe()

    watch.quick.hooks += watch_fetch(module._utils.fetch, probe_of, watch.quick.fetch)


class MadeAt:
    """User's lines that have made DataLoaders."""

    def __init__(self) -> None:
        self._of_loaders: WeakKeyDictionary[Any, Site] = WeakKeyDictionary()
        self._of_datasets: dict[int, tuple[ref[Any], Site]] = {}

    def note(self, loader: Any, frame: FrameType) -> None:
        """Record that the code of this frame has made a loader.

        A loader that a library makes again, as Accelerate does for ranks, keeps the line where the
        user made a loader of the same dataset.
        """
        site, dataset = site_of(frame), loader.dataset
        known, first = self._of_datasets.get(id(dataset), (None, None))
        if not is_users(frame.f_code.co_filename) and known is not None and known() is dataset:
            site = first
        if site is None:
            return
        self._of_loaders[loader] = site
        with suppress(TypeError):  # a list has no weak references
            self._of_datasets[id(dataset)] = ref(dataset), site

    def of(self, loader: Any) -> Site | None:
        """Return the user's line that has made this loader."""
        return self._of_loaders.get(loader)


def _noted(original: Any, made: MadeAt) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.note(self, sys._getframe(1))

    return init


def _timed_iteration(original: Any, watch: Watch, seen_of: Any) -> Any:
    lanes = watch.lanes

    def iterate(self: Any) -> Any:
        began = perf_counter_ns()
        if not lanes.begin_batch():
            return original(self)
        result = seen_of(self, here(1))
        if not result.facts.epochs:
            watch.aside(partial(result.look_at_samples, self))
            began = perf_counter_ns()
        result.is_hashed, result.wants_samples = False, True
        if result.facts.num_workers:
            os.environ[LOADER] = str(result.number)  # read by the workers
        try:
            iterator = original(self)
        finally:
            lanes.switch(HOST)
        iterator._flatout_seen = result
        result.begin_epoch(began)
        return iterator

    return iterate


def watch_batches(owner: Any, watch: Watch, seen_of: Any) -> None:
    """Time every batch that an iterator of this class hands over."""
    owner._flatout_seen = None  # default for iterators that began before the observation
    wrap(owner, "__init__", "observe", _met, seen_of)
    watch.quick.hooks += [
        wrap(owner, "_next_index", "observe", _hashed, watch.quick.samples),
        wrap(owner, "__next__", "observe", _timed, watch),
    ]


def _met(original: Any, seen_of: Any) -> Any:
    def init(self: Any, loader: Any) -> None:
        original(self, loader)
        self._flatout_seen = seen_of(loader, None)  # subclasses may have their own __iter__

    return init


def _timed(original: Any, watch: Watch) -> Any:
    lanes, ask, hand_over = watch.lanes, watch.lanes.ask, watch.lanes.take

    def take(self: Any) -> Any:
        result = self._flatout_seen
        if result is None or (asked := ask()) < 0:
            return original(self)
        if asked:
            lanes.decide()
        lanes.loader = result
        try:
            batch = original(self)
        except BaseException:
            lanes.switch(HOST)
            raise
        result.took(batch, hand_over())
        if result.batches == result.compared_at:
            watch.aside(result.compare_with_others)
        return batch

    return watch.quick.batch(original, take)


def _hashed(original: Any, quick: Callable[[Any, Any], Any]) -> Any:
    def next_index(self: Any) -> Any:
        index = original(self)
        result = self._flatout_seen
        if result is None:
            return index
        if not result.is_hashed:
            result.hash(index)
        elif result.is_taking_down:
            result.take_down(index)
        result.wants_samples = not result.is_hashed or result.is_taking_down
        return index

    return quick(original, next_index)
