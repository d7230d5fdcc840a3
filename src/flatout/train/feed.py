"""Batches of a source on the device, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter_ns as clock
from typing import Protocol

import torch

from flatout.data import (
    ArraySource,
    Batch,
    Claims,
    FeatureRows,
    Features,
    Pipeline,
    Source,
    prefetch,
    report_of,
    whole_of,
)
from flatout.recipe import Choice, Parity, Recipe, ResolvedRecipe
from flatout.train.device_data import DeviceData
from flatout.train.inputs import Inputs
from flatout.train.part import Lanes
from flatout.train.ranks import part_of
from flatout.world import World


class KeepsFeatures(Protocol):
    """Keeps what frozen layers give for samples; features.py says what these are."""

    def begin(self, source: Source, part: Source, epoch: int) -> bool:
        """Before an epoch; whether its batches need be looked at."""

    def read_from(self, part: Source) -> Source:
        """What batches are read from."""

    def rows_to_make(self, source: Source) -> FeatureRows | None:
        """The rows whose samples need not be made."""

    def must_restart(self) -> bool:
        """Whether batches that are being made are not those that are wanted by now."""

    def settle(self, batch: Batch) -> None:
        """Before the next batch is made ready."""

    def batch(self, batch: Batch, epoch: int) -> Batch:
        """A training batch, as the model takes it."""

    def taken(self) -> int:
        """Return the time for which features were computed since the last call, in ns."""

    def evaluated(self, source: Source, part: Source) -> AbstractContextManager[Iterator[Batch]]:
        """Within, the batches of an evaluation."""


class Feed:
    """Gives a rank its batches, as steps take them.

    Attributes:
        source: that batches are taken from.
        device: where they go.
        channels_last: whether images lie so there.
        inputs: what becomes of a batch's images on the device; as a Trainer sets it.
        taken: batches of this epoch that were taken.
        device_data: keeps arrays on the device; None where they stay on the host.
        features: keeps what frozen leading layers give; None where nothing is kept.
        claims: the parts of batches that this rank claims; None where it has its own of each.
        lanes: times of the batches of the present step.
    """

    def __init__(self) -> None:
        self.source: Source | None = None
        self.set_device(torch.device("cpu"))
        self.channels_last = False
        self.inputs = Inputs()
        self.taken = 0
        self.device_data: DeviceData | None = None
        self.features: KeepsFeatures | None = None
        self.claims: Claims | None = None
        self._lanes: Lanes | None = None
        self.lanes: Lanes = (0, 0, 0, 0)
        self._told: set[str] = set()  # of what was skipped

    def set_device(self, device: torch.device) -> None:
        """Where batches go from now on."""
        self.device = device
        # Asking the device for its type takes 3 us in a step.
        self._copies = device.type != "cpu"

    def batches(
        self,
        world: World,
        note: Callable[[str], None],
        epoch: int,
        epochs: int | None,
        *,
        whole: bool = False,
    ) -> Iterator[Batch]:
        """The batches of an epoch that were not taken yet."""
        assert self.source is not None
        source = self.source
        if self.device_data is not None:
            source = self.device_data.trained_on(source)
        part, log = part_of(source, world, note, whole=whole, use="train"), world.collectives
        if hasattr(self.source, "expect_epochs"):
            self.source.expect_epochs(epochs)
        features = self.features
        if features is not None and not features.begin(self.source, part, epoch):
            features = None
        iterator = self._begun(part, epoch)
        while True:
            if features is not None and features.must_restart():
                iterator = self._begun(part, epoch)
            start, before = clock(), log.waited
            batch = next(iterator, None)
            if batch is None:
                break
            # Where ranks agree on whether all have a batch, the slowest keeps the others waiting.
            fetched, others = clock(), log.waited - before
            if self.claims is None:
                self.taken += 1
            else:
                self.taken = max(self.taken, self.claims.take().step + 1)
            if features is not None:
                features.settle(batch)
            batch = self.ready(batch)
            ready = clock()
            first, fetch, copy, waited = self._lanes or (start, 0, 0, 0)
            # Of several batches that make a step together all count.
            fetch += fetched - start - others
            self._lanes = (first, fetch, copy + ready - fetched, waited + others)
            yield batch if features is None else features.batch(batch, epoch)

    def _begun(self, part: Source, epoch: int) -> Iterator[Batch]:
        source, features = self.source, self.features
        assert source is not None
        rows = None
        if features is not None:
            part, rows = features.read_from(part), features.rows_to_make(source)
        if self.claims is None:
            iterator = batches_of(part, epoch, self.taken, rows)
        else:
            kept = () if rows is None else (rows,)  # a source of arrays keeps none
            iterator = part.claimed(epoch, self.claims, *kept)  # type: ignore[attr-defined]
        whole = whole_of(part)
        # A thread brings batches to the device where no code of the user's runs in it.
        comes_ahead = isinstance(whole, Pipeline) and whole.prefetches is None
        if type(part) is ArraySource and features is None and self.claims is None:
            comes_ahead = part.data.device.type == "cpu"
        if comes_ahead and self._copies:
            iterator = prefetch(iterator, self.device)
        return iterator

    @contextmanager
    def evaluated(self, source: Source, part: Source) -> Iterator[Iterator[Batch]]:
        """Within, the batches of an evaluation, of which what is kept is not computed again."""
        if self.device_data is not None and part is source:
            part = self.device_data.evaluated(source)
        if self.features is None:
            yield part.batches(0, 0)
            return
        with self.features.evaluated(source, part) as batches:
            yield batches

    def ready(self, batch: Batch) -> Batch:
        """The batch on the device, in the memory format that was chosen."""
        if self._copies:
            batch = batch.to(self.device, True)
        if isinstance(batch.inputs, Features):  # it was ready before these were put in
            return batch
        if not self.channels_last:
            return self.inputs(batch)
        return self.inputs(batch, torch.channels_last).to_memory_format(torch.channels_last)

    def first(self, batch: Batch) -> Batch:
        """The batch on the device as the model was given, to decide on or to look for a cause."""
        return self.inputs(batch.to(self.device))

    def begin_step(self) -> None:
        """Set `lanes` to the times of the batches of the step that begins."""
        self.lanes, self._lanes = self._lanes or (clock(), 0, 0, 0), None

    def samples_of(self, batches: Sequence[Batch], ranks: int) -> int:
        """Samples of all ranks that go with a step of these batches of this rank.

        About, where ranks have their own samples.
        """
        samples = 0
        for batch in batches:
            samples += batch.samples if ranks == 1 else batch.whole or batch.samples * ranks
        if self.claims is not None:
            return samples * self.claims.passed // self.claims.parts
        return samples

    def notes(self) -> list[str]:
        """What happened since the last call that the user should know."""
        notes: list[str] = []
        for item in (report_of(self.source), self.device_data):
            if item is not None:
                notes += [f"input: {note}" for note in item.notes]
                item.notes.clear()
        return notes

    def skipped(self, source: Source | None, world: World) -> list[str]:
        """Which rows of a source any rank has skipped, in words that were not told yet."""
        gather = partial(world.gather, what="rows that ranks have skipped")
        lines = source.skipped(gather) if isinstance(source, Pipeline) else []
        new = [words for line in lines if (words := f"input: {line}") not in self._told]
        self._told.update(new)
        return new

    def with_workers(self, requested: Recipe, resolved: ResolvedRecipe) -> ResolvedRecipe:
        """The Recipe with who makes the batches, where that was found while training."""
        result = report_of(self.source)
        if result is None or not result.trials or requested.input.workers != "auto":
            return resolved
        choice = Choice(
            value=result.settled,
            reason=f"measured on the job's own steps: {'; '.join(result.trials)}",
            parity=Parity.EXACT,
            ratio=None if result.kept is None else result.kept.ratio,
            floor=None if result.kept is None else result.kept.floor,
        )
        choices = {**resolved.choices, "input.workers": choice}
        return requested.resolve(choices, resolved.machine)


def batches_of(
    part: Source, epoch: int, start_step: int, rows: FeatureRows | None
) -> Iterator[Batch]:
    """The batches of an epoch; of a pipeline, made without the samples whose features are kept."""
    whole = whole_of(part)
    if rows is None or rows.samples.comes_whole or not isinstance(whole, Pipeline):
        return part.batches(epoch, start_step)
    return part.batches(epoch, start_step, rows)  # type: ignore[call-arg]
