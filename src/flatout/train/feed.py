"""Batches of a source on the device, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter_ns as clock
from typing import Any, Protocol

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
    """Interface for replacing inputs by stored features of frozen layers (parts/features/).

    Attributes:
        facts: the decision as plain data; None before it, and where no layer is frozen.
    """

    facts: dict[str, Any] | None

    def close(self) -> None:
        """Give the model its own frozen layers back, and end writing."""

    def begin(self, source: Source, part: Source, epoch: int) -> bool:
        """Start an epoch; return whether its batches must pass through this object."""

    def read_from(self, part: Source) -> Source:
        """Return the source that batches are read from."""

    def rows_to_make(self, source: Source) -> FeatureRows | None:
        """Return the rows whose samples need not be made."""

    def must_restart(self) -> bool:
        """Return whether the batches that are being made have become unusable."""

    def settle(self, batch: Batch) -> None:
        """Act before the next batch is moved to the device."""

    def batch(self, batch: Batch, epoch: int) -> Batch:
        """Return a training batch in the form that the model takes."""

    def taken(self) -> int:
        """Return the nanoseconds spent computing features since the last call."""

    def evaluated(self, source: Source, part: Source) -> AbstractContextManager[Iterator[Batch]]:
        """Yield the batches of an evaluation."""


class Feed:
    """Yields a rank's batches, ready for steps.

    Attributes:
        source: the source that batches are taken from.
        device: the device that batches are moved to.
        channels_last: whether images are in that memory format on the device.
        inputs: conversion of a batch's images on the device; set by a Trainer.
        taken: number of batches of this epoch that were taken.
        device_data: keeps arrays on the device; None where they stay on the host.
        features: replaces inputs by features of frozen layers; None without features.
        claims: assigns the next part of a batch to a rank that is ready; None if each rank has a
            fixed part of each batch.
        lanes: for the present step's batches, the clock at the start, and the times of fetching, of
            copying and of waiting for other ranks, all in ns.
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
        self._told: set[str] = set()  # lines about skipped rows that were returned before

    def set_device(self, device: torch.device) -> None:
        """Move batches to this device from now on."""
        self.device = device
        # The type is stored because reading it from the device takes 3 microseconds in each step.
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
        """Yield the batches of an epoch that were not taken yet."""
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
            # Ranks agree on whether all ranks have a batch. The wait for other ranks in that is no
            # fetch time.
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
            # If a step has several batches, their times are added.
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
            kept = () if rows is None else (rows,)  # a source of arrays takes no rows
            iterator = part.claimed(epoch, self.claims, *kept)  # type: ignore[attr-defined]
        whole = whole_of(part)
        # A thread moves batches to the device ahead of time, unless it would run the user's code.
        comes_ahead = isinstance(whole, Pipeline) and whole.prefetches is None
        if type(part) is ArraySource and features is None and self.claims is None:
            comes_ahead = part.data.device.type == "cpu"
        if comes_ahead and self._copies:
            iterator = prefetch(iterator, self.device)
        return iterator

    @contextmanager
    def evaluated(self, source: Source, part: Source) -> Iterator[Iterator[Batch]]:
        """Yield the batches of an evaluation, with stored features in place of inputs."""
        if self.device_data is not None and part is source:
            part = self.device_data.evaluated(source)
        if self.features is None:
            yield part.batches(0, 0)
            return
        with self.features.evaluated(source, part) as batches:
            yield batches

    def ready(self, batch: Batch) -> Batch:
        """Return the batch on the device, in the chosen memory format."""
        if self._copies:
            batch = batch.to(self.device, True)
        if isinstance(batch.inputs, Features):  # they replaced inputs that were on the device
            return batch
        if not self.channels_last:
            return self.inputs(batch)
        return self.inputs(batch, torch.channels_last).to_memory_format(torch.channels_last)

    def first(self, batch: Batch) -> Batch:
        """Return the batch on the device in its original memory format, for checks."""
        return self.inputs(batch.to(self.device))

    def begin_step(self) -> None:
        """Set `lanes` to the times of the batches of the step that begins."""
        self.lanes, self._lanes = self._lanes or (clock(), 0, 0, 0), None

    def samples_of(self, batches: Sequence[Batch], ranks: int) -> int:
        """Return the number of samples, over all ranks, in a step of these batches of this rank.

        The number is approximate where ranks read their own samples.
        """
        samples = 0
        for batch in batches:
            samples += batch.samples if ranks == 1 else batch.whole or batch.samples * ranks
        if self.claims is not None:
            return samples * self.claims.passed // self.claims.parts
        return samples

    def notes(self) -> list[str]:
        """Return and clear the notes for the user since the last call."""
        notes: list[str] = []
        for item in (report_of(self.source), self.device_data):
            if item is not None:
                notes += [f"input: {note}" for note in item.notes]
                item.notes.clear()
        return notes

    def skipped(self, source: Source | None, world: World) -> list[str]:
        """Return new lines about rows of a source that any rank has skipped."""
        gather = partial(world.gather, what="rows that ranks have skipped")
        lines = source.skipped(gather) if isinstance(source, Pipeline) else []
        new = [words for line in lines if (words := f"input: {line}") not in self._told]
        self._told.update(new)
        return new

    def with_workers(self, requested: Recipe, resolved: ResolvedRecipe) -> ResolvedRecipe:
        """Return the Recipe with the number of workers that was measured during training."""
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
    """Return the batches of an epoch; a pipeline skips samples whose features are stored."""
    whole = whole_of(part)
    if rows is None or rows.samples.comes_whole or not isinstance(whole, Pipeline):
        return part.batches(epoch, start_step)
    return part.batches(epoch, start_step, rows)  # type: ignore[call-arg]
