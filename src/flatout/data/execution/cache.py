"""Samples that are made once and stored, in memory or in a folder of rows on disk."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from time import perf_counter_ns as clock
from typing import Literal

import numpy as np
import numpy.typing as npt

from flatout import unfinished
from flatout.cache_folder import cache_folder, kind_folder
from flatout.data.batches.form import Form
from flatout.data.digests.digests import digest_of
from flatout.data.execution.samples import Costs, IsWanted, LentRows, Samples, first_good
from flatout.data.execution.turns import Turns
from flatout.data.reading.block import Block, Numbers, Ragged, Values, as_ragged, join, take
from flatout.data.reading.buffers import Buffers
from flatout.data.stores.row_folder import Filling, RowFolder
from flatout.data.stores.row_store import MemoryArena, RowStore, layout_of, row_bytes
from flatout.errors import DataError
from flatout.measure import available_bytes
from flatout.words import size_words

Where = Literal["auto", "memory", "disk"]

# Fraction of the free memory that a cache may use, if the user sets no budget.
_SHARE = 0.5
# Number of rows that are made to measure the size of a row.
_PROBE = 64


class Cached:
    """Samples that are stored after they were first made. The order is not stored."""

    def __init__(
        self,
        inner: Samples,
        numbers: Numbers,
        where: Where,
        *,
        budget: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self.inner = inner
        self.rows = inner.rows
        self.random = True
        self.name = "cache"
        self.draws = False
        self.probe = inner.probe
        self._numbers = numbers
        self._whole = len(numbers) == inner.rows
        self._lock = Lock()
        self._filling: Filling | None = None
        self._filled = np.zeros(len(numbers), bool)
        self._missing = len(numbers)
        self._store: RowStore | None = None
        self._name: str | None = None
        self.reason = ""
        probe = self._made(numbers[: min(_PROBE, len(numbers))], Buffers(), Costs())
        if not len(probe):
            probe = first_good(inner, Buffers(), 0, Costs())
        self.bytes = int(row_bytes(probe) * len(numbers))
        self.where_kept, reason = self._choose(where, budget, folder)
        self.reason = reason + self.reason
        self._open(probe, folder)

    def _choose(self, where: Where, budget: int | None, folder: Path | None) -> tuple[Where, str]:
        room = int(available_bytes() * _SHARE) if budget is None else budget
        size = f"{len(self._numbers):,} decoded samples take {size_words(self.bytes)}"
        if where == "memory" and budget is None:
            room = available_bytes()
        if where != "disk" and self.bytes <= room:
            return "memory", f"{size}, memory has {size_words(room)} for them"
        base = folder or cache_folder() / "rows"
        with _disk_errors_explained(base):
            base.mkdir(parents=True, exist_ok=True) if folder else kind_folder("rows")
        free = shutil.disk_usage(base).free
        if where != "memory" and self._on_disk(folder).exists():
            return "disk", f"{size}, on the disk already"
        if where != "memory" and self.bytes <= free:
            return (
                "disk",
                f"{size} on disk ({size_words(free)} free); memory has {size_words(room)} for them",
            )
        places = {
            "memory": f"memory has {size_words(room)}",
            "disk": f"{base} has {size_words(free)} free",
        }
        place = " and ".join(places.values()) if where == "auto" else places[where]
        raise DataError(
            f"the cache does not fit: {size}, but {place}",
            do="cache before a stage that makes samples larger, make room, or drop cache()",
        )

    def _on_disk(self, folder: Path | None) -> Path:
        base = cache_folder() / "rows" if folder is None else folder
        if self._name is None:
            self._name = self.inner.content()
            if self._name is None:
                self._name = unfinished.new_name()
                atexit.register(shutil.rmtree, base / self._name, ignore_errors=True)
                atexit.register(shutil.rmtree, base / f"{self._name}.part", ignore_errors=True)
                self.reason += "; other jobs cannot find it: nothing names these samples exactly"
            elif not self._whole:
                self._name = digest_of(self._name, self._numbers.tobytes().hex())
        return base / self._name

    def _open(self, probe: Block, folder: Path | None) -> None:
        layout = layout_of(probe.columns)
        if self.where_kept == "memory":
            arenas = [MemoryArena(field.dtype) for field in layout.fields if field.ragged]
            rows = np.empty((len(self._numbers), layout.stride), np.uint8)
            self._store = RowStore(layout, rows, arenas)
            return
        target = self._on_disk(folder)
        if target.exists():
            self._store = RowFolder(target).store
            self._filled[:] = True
            self._missing = 0
            return
        try:
            with _disk_errors_explained(target):
                self._filling = Filling(
                    target, layout, len(self._numbers), self.inner.digest, private=True
                )
        except BlockingIOError:
            # Another process fills the folder; this process makes its samples as if there were no
            # cache.
            self.reason += "; another process is filling it, so this one does without"
            return
        self._store = self._filling.store
        self._filled = self._filling.filled

    @property
    def form(self) -> Form:
        return self.inner.form

    @property
    def digest(self) -> str:
        return self.inner.digest

    def content(self) -> str | None:
        return self.inner.content()

    @property
    def filled(self) -> float:
        return 1 - self._missing / max(1, len(self._numbers))

    def make(self, numbers: Numbers, buffers: Buffers, epoch: Turns, costs: Costs) -> Block:
        if self._store is None:
            return self._made(numbers, buffers, costs)
        slots = numbers if self._whole else np.searchsorted(self._numbers, numbers)
        if not self._whole and not self._are_mine(slots, numbers):
            return self._made(numbers, buffers, costs)
        if self._missing:
            there = self._filled[slots]
            if not there.all():
                return self._fill(numbers, slots, there, buffers, costs)
        start = clock()
        columns = self._store.get(slots, buffers)
        costs.add(self.name, clock() - start)
        return Block(columns, numbers)

    def lend(
        self, numbers: Numbers, buffers: Buffers, costs: Costs, wanted: IsWanted
    ) -> LentRows | None:
        store = self._store
        if store is None or self._missing:
            return None
        slots = numbers if self._whole else np.searchsorted(self._numbers, numbers)
        if not self._whole and not self._are_mine(slots, numbers):
            return None
        start = clock()
        whole: dict[str, Values] = {n: v for n, v in store.in_place().items() if wanted(n, v)}
        columns = store.get(slots, buffers, without=whole)
        costs.add(self.name, clock() - start)
        return LentRows(Block(columns, numbers), whole, slots)

    def _are_mine(self, slots: Numbers, numbers: Numbers) -> bool:
        within = np.minimum(slots, len(self._numbers) - 1)
        return bool((self._numbers[within] == numbers).all())

    def _made(self, numbers: Numbers, buffers: Buffers, costs: Costs) -> Block:
        return self.inner.make(numbers, buffers, 0, costs)

    def _fill(
        self,
        numbers: Numbers,
        slots: Numbers,
        there: npt.NDArray[np.bool_],
        buffers: Buffers,
        costs: Costs,
    ) -> Block:
        assert self._store is not None
        made = self._made(numbers[~there], buffers, costs)
        if not len(made) and not there.any():
            return made
        made = self._laid_out(made)
        start = clock()
        own = made.numbers if self._whole else np.searchsorted(self._numbers, made.numbers)
        with self._lock:
            # A sample that occurs twice, in a batch or in two threads, is stored once.
            new, first = np.unique(own, return_index=True)
            fresh = ~self._filled[new]
            if fresh.any():
                self._keep(new[fresh], take(made, first[fresh]))
        kept = np.flatnonzero(there)
        # some rows were skipped, and are left out of the batch
        if len(made) < len(numbers) - len(kept):
            back = np.isin(numbers, made.numbers)
            back[kept] = True
            numbers, slots, there = numbers[back], slots[back], there[back]
            kept = np.flatnonzero(there)
        if len(kept):
            columns = self._store.get(slots[kept], buffers)
            places = np.concatenate([np.flatnonzero(~there), kept])
            both = join([made, Block(columns, numbers[kept])])
            made = take(both, np.argsort(places, kind="stable"))
        costs.add(self.name, clock() - start)
        return made

    def _laid_out(self, block: Block) -> Block:
        assert self._store is not None
        columns = dict(block.columns)
        for field in self._store.layout.fields:
            values = columns.get(field.name)
            if values is None:
                continue
            if field.ragged:
                columns[field.name] = as_ragged(values)
            elif isinstance(values, Ragged):
                raise DataError(
                    f"{field.name}: the samples to cache differ in length, and the first "
                    f"{_PROBE} did not: each had {field.shape[0]:,} values",
                    where=self.where(int(block.numbers[0])),
                    do="cache before the function that makes them, or make all of one length",
                )
        return Block(columns, block.numbers)

    def _keep(self, slots: Numbers, block: Block) -> None:
        if self._filling is not None:
            with _disk_errors_explained(self._filling.part):
                self._filling.put(slots, dict(block.columns))
        else:
            assert self._store is not None
            self._store.put(slots, block.columns)
            self._filled[slots] = True
        self._missing -= len(slots)
        if self._missing == 0 and self._filling is not None:
            self._finish()

    def _finish(self) -> None:
        assert self._filling is not None
        with _disk_errors_explained(self._filling.part):
            target = self._filling.finish(self.inner.form, {})
        self._filling.close()
        self._filling = None
        self._store = RowFolder(target).store

    def where(self, number: int) -> str:
        return self.inner.where(number)


@contextmanager
def _disk_errors_explained(place: Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise DataError(
            f"the cache cannot be written: {error.strerror or error}",
            where=str(place),
            do='make room, set FLATOUT_CACHE to another folder, or cache("memory")',
        ) from error
