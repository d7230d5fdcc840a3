"""Features outside of a fit: `evaluate` and `predict` use stored features, and store new ones.

Features of an earlier fit are used if their cut is known: from this Trainer's own fit, or from the
file that `ModelRows.remember` has written. Features of data that are evaluated repeatedly are
stored, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from flatout.data import (
    Batch,
    FeatureRows,
    Numbered,
    RowPart,
    Source,
    sample_names,
    samples_of_all,
    tensors_in,
)
from flatout.models import Cut, Cuts
from flatout.recipe import Parity
from flatout.train.loop_state import LoopState
from flatout.train.named_rows import NamedRows, NamedSamples, samples_of
from flatout.train.parts.features.choice import Choice, agreed_cuts
from flatout.train.parts.features.rows import ModelRows, forms_of
from flatout.train.snapshot import untouched
from flatout.words import counted

# Minimum number of samples for which finding a cut takes less time than computing the samples.
_WORTH = 32


class Chooses(Protocol):
    """Interface of an object that finds a model's cuts and chooses among them; see features.py."""

    rows: ModelRows

    @property
    def may_keep(self) -> bool:
        """Whether features may be kept at all."""

    def look(self, source: Source, batch: Batch | None) -> tuple[Cuts, str]:
        """Return the model's cuts, and the reason if there are none."""

    def choose(
        self, source: Source, cuts: Sequence[Cut], batch: Batch, left: int | None, passes: int
    ) -> Choice:
        """Measure the cuts, and return the best choice."""

    def opened(self, name: str) -> FeatureRows | NamedRows:
        """Return the rows of the chosen cut."""


class EvaluatedFeatures:
    """Features of a model that is evaluated while nothing trains it."""

    def __init__(self, features: Chooses, loop: LoopState, model: nn.Module) -> None:
        self._features, self._loop, self._model = features, loop, model
        self._looked, self._cuts = Cuts(), list[Cut]()
        self._forms: list[RowPart] = []  # forms of the inputs that the cuts are for
        self._times: Counter[str] = Counter()  # number of evaluations, by content key
        self._named: dict[str, NamedRows] = {}  # by content and cut
        self._random: set[str] = set()  # content keys whose samples did not repeat
        self._said: set[str] = set()

    @contextmanager
    def batches(self, source: Source, part: Source) -> Iterator[Iterator[Batch]]:
        """Yield the batches of an evaluation, with features where they are stored."""
        made, result = part.batches(0, 0), None
        if self._may_have(source):
            first = next(made, None)
            made = made if first is None else chain([first], made)
            with in_training(self._model):
                result = self._open_known(source, first)
        if result is None:
            yield made
            return
        cut, rows = result
        undo = cut.apply()
        try:
            if isinstance(rows, NamedRows):
                # This continues the open iterator, because a loader that starts again would draw
                # another order.
                epoch = self._times[content_of(rows.samples)]
                yield self._features.rows.completed_of(made, rows, cut, epoch)
            else:
                yield self._features.rows.completed(part, rows, cut)
        finally:
            undo()
            rows.store.wait()
            if isinstance(rows, NamedRows) and rows.is_random:
                self._random.add(content_of(rows.samples))
                self._features.rows.release(rows)
            elif rows.store.kept:
                self._features.rows.hold(rows)

    def _may_have(self, source: Source) -> bool:
        """Return True if keeping features may save time. All ranks get the same result."""
        if self._loop.asked.allow < Parity.TOLERANT or not self._features.may_keep:
            return False
        samples = samples_of(source)
        is_random = isinstance(samples, NamedSamples) and content_of(samples) in self._random
        if is_random and self._loop.world.size == 1:  # several ranks detect it at different times
            return False
        return not isinstance(samples, str) and (samples_of_all(source) or 0) >= _WORTH

    def _content_of(self, source: Source) -> str:
        samples = samples_of(source)
        assert not isinstance(samples, str)
        if isinstance(samples, Numbered):
            return self._features.rows.content_of(source, samples)
        return content_of(samples)

    def _open_known(
        self, source: Source, first: Batch | None
    ) -> tuple[Cut, FeatureRows | NamedRows] | None:
        rows, world = self._features.rows, self._loop.world
        content = self._content_of(source)
        try:
            self._times[content] += 1
            known = world.from_first(rows.known())
            if content.startswith("only ") or not (known or self._times[content] > 1):
                return None
            batch = None if first is None else self._loop.ready(first)
            # All ranks call this, also a rank without a batch.
            cuts = self._cuts_for(source, batch, known)
            if batch is None or not cuts:
                return None
            name = world.from_first(self._name(source, cuts, batch, known))
            if not name:
                return None
            cut = next((cut for cut in cuts if cut.name == name), None)
            result = None if cut is None else self._open(source, cut, batch)
            return None if cut is None or result is None else (cut, result)
        finally:
            rows.forget(source)

    def _cuts_for(self, source: Source, batch: Batch | None, known: list[list[int]]) -> list[Cut]:
        forms, looked = [] if batch is None else forms_of(batch), self._looked
        is_there = forms == self._forms and all(map(_is_as_it_was, self._cuts))
        if not all(self._loop.world.gather(bool(looked.cuts) and is_there)):
            looked, why = self._features.look(source, batch)
            self._looked, self._forms = looked, forms
            with self._loop.autocast():
                self._cuts, _ = agreed_cuts(looked, why, self._loop.world)
        places = [cut.place for cut in self._cuts]
        if self._cuts and (more := [place for place in known if place not in places]):
            with self._loop.autocast():
                self._cuts += looked.at(more)
        return self._cuts

    def _name(self, source: Source, cuts: list[Cut], batch: Batch, known: list[list[int]]) -> str:
        rows = self._features.rows
        content = self._content_of(source)
        opened = {c.name: self._open(source, c, batch) for c in cuts if c.place in known}
        kept = {name: _kept(value, batch) for name, value in opened.items() if value is not None}
        most = max(kept, key=lambda name: kept[name], default="")
        if kept.get(most):
            self._say(content, f"features: kept {most} of {counted(kept[most], 'sample')}")
            return most
        times = self._times[content]
        if times < 2 or times & (times - 1):  # measure again when `times` has doubled
            return ""
        # The data are expected to be evaluated as many times again.
        choice = self._features.choose(source, cuts, batch, times, passes=1)
        if choice.kept is None:
            return ""
        cut = next(cut for cut in cuts if cut.name == choice.kept.name)
        where = self._features.opened(cut.name).store.where
        rows.remember(cut)
        self._say(content, f"features: {choice.words(where, rows.precision(cut))}")
        return cut.name

    def _open(self, source: Source, cut: Cut, batch: Batch) -> FeatureRows | NamedRows | None:
        rows = self._features.rows
        with untouched(self._model), torch.no_grad(), self._loop.autocast():
            few = batch.rows(0, 2).inputs
            rows.look_at(cut, few, cut.prefix(few))
        result = rows.open(source, cut, batch)
        if isinstance(result, NamedRows):
            name = f"{content_of(result.samples)} {cut.name}"
            before = self._named.get(name, result)
            if before.is_random:
                return None
            result = self._named[name] = before if before.store is result.store else result
        if result is not None and result.store.kept:
            rows.hold(result)
        return result

    def _say(self, content: str, line: str) -> None:
        if content not in self._said:
            self._said.add(content)
            self._loop.say(line)


def _is_as_it_was(cut: Cut) -> bool:
    return cut.is_current() and cut.contents.are_same()


def content_of(samples: NamedSamples) -> str:
    """Return the key under which these samples are counted."""
    return f"{samples.slots} samples by their bytes"


def _kept(rows: FeatureRows | NamedRows, batch: Batch) -> int:
    if isinstance(rows, NamedRows):
        places = rows.store.places(sample_names(*tensors_in(batch.inputs)))
        return rows.store.kept if (places >= 0).any() else 0
    return rows.store.kept


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Set training mode, in which a fit finds cuts; restore each module's mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
