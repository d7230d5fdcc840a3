"""Stores the outputs of frozen leading layers for each sample, also for later runs.

Once settings are decided, the model's cuts are measured and the best cut is chosen
(`choice.py`). From then on each training batch becomes `Features`. Rows that the store has
are read; the frozen layers compute the missing rows, which are then stored. The rest of the model
takes the features in place of its inputs.

    rows.py                 stores, and batches that are made of their rows.
    named_rows.py           rows of samples that have no index.
    costs.py                the seconds to make, read and write a row.
    evaluated.py            evaluations outside of a fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import nn

from flatout.data import (
    NO_ROWS,
    Batch,
    FeatureRows,
    Numbered,
    Pipeline,
    Source,
    sample_names,
    samples_of_all,
    stays_with_rank,
    tensors_in,
)
from flatout.kernels import INSTALL, available
from flatout.measure import usable_cpus
from flatout.models import Cut, Cuts, adapter_of, find_cuts
from flatout.recipe import Choice as RecipeChoice
from flatout.recipe import Parity
from flatout.train.compute import call as call_model
from flatout.train.loop_state import LoopState
from flatout.train.named_rows import NamedRows, NamedSamples, samples_of
from flatout.train.parts.features.choice import Choice, FeatureOption, agreed_cuts, choose
from flatout.train.parts.features.costs import (
    Costs,
    is_made_beside,
    making_s,
    read_rate,
    room,
    timed,
)
from flatout.train.parts.features.evaluated import EvaluatedFeatures
from flatout.train.parts.features.rows import ModelRows
from flatout.train.snapshot import untouched

Rows: TypeAlias = FeatureRows | NamedRows

# Number of tuning steps after which tuning ends, if features wait for the settings.
_TUNED = 60
# Number of samples in a measurement on a CPU.
_MEASURED = 4
# Number of batches in which a batch with several samples is searched.
_PEEKED = 4


class FrozenFeatures:
    """Features of a model, for its training and its evaluations.

    Attributes:
        line: the decision in words; "" before it, and where no layer is frozen.
        facts: the decision as plain data; None before it, and where no layer is frozen.
        rows: stores of the features.
    """

    def __init__(self, loop: LoopState, model: nn.Module) -> None:
        self.line = ""
        self.facts: dict[str, Any] | None = None
        self.rows = ModelRows(loop, model)
        self._loop, self._model = loop, model
        self._source: Source | None = None  # training data
        self._part: Source | None = None  # this rank's part of the training data
        self._cut: Cut | None = None
        self._undo: Callable[[], None] | None = None
        self._opened: dict[str, Rows] = {}  # rows by cut, while cuts are being compared
        self._of_source: dict[int, tuple[Source, Rows | None]] = {}
        self._decided_in = -1  # the epoch of the latest decision
        self._has_dropped = self._restarts = self._trains = False
        self._say = loop.say  # before the first epoch no progress line would show notes
        self._pixels: Pipeline | None = None
        self._hindrance = ""  # the reason why no more layers can be replaced by features
        self._is_new_epoch = False
        self._waits: bool | None = None  # whether features wait for the settings
        self._evaluated = EvaluatedFeatures(self, loop, model)

    # -- training ----------------------------------------------------------------------------

    def rows_of(self, source: Source) -> Rows | None:
        """Return the stored rows for a source, or None."""
        if self._cut is None:
            return None
        if id(source) not in self._of_source:
            self._of_source[id(source)] = source, self.rows.open(source, self._cut)
        return self._of_source[id(source)][1]

    def settle(self, batch: Batch) -> None:
        """End the tuning, if features wait for its end, once all options together were measured."""
        tuner, loop = self._loop.tuner, self._loop
        if tuner is None or not tuner.is_searching or not self._is_open or self._cut is not None:
            return
        search = tuner.search
        judged = search.together is not None or "together" in search.dropped
        enough = judged or len(search.options) < 2 or loop.step_count - tuner.since >= _TUNED
        if not enough or loop.stepper.joint.gathered:
            return
        if self._waits is None:
            assert self._source is not None
            looked = self.look(self._source, loop.ready(batch))[0] if self.may_keep else Cuts()
            self._waits = bool(looked.cuts)
        if self._waits:
            tuner.stop("features of frozen layers wait for the settings", suffices=judged)

    @property
    def may_keep(self) -> bool:
        """Whether features may be kept at all."""
        return self.rows.where != "off" and adapter_of(self._model).is_partly_frozen()

    def begin(self, source: Source, part: Source, epoch: int) -> bool:
        """Start an epoch, decide on features if planned, and return whether they may be used."""
        self._source, self._trains, self._restarts = source, True, False
        self._part = part
        self._is_new_epoch = True
        for _, rows in self._of_source.values():
            if rows is not None:
                rows.store.wait()
        if self._cut is None and not self.may_keep:
            return False
        can_look = isinstance(samples_of(source), Numbered) or isinstance(source, Pipeline)
        if self._is_hopeless(source):
            self._decide(source, None, epoch)
        elif can_look and self._is_due(epoch):
            first = part.peek(1) if source.seekable else []
            self._decide(source, self._loop.ready(first[0]) if first else None, epoch)
        self._restarts = False
        self._say = self._loop.note
        return True

    def read_from(self, part: Source) -> Source:
        """Return the source of batches: a cached pipeline where decoded pixels are kept."""
        return self._pixels if self._pixels is not None and part is self._source else part

    def must_restart(self) -> bool:
        """Return whether the batches that are being made have become unusable.

        This is so when the frozen part has changed, so that its features are dropped. It is also so
        when features of an earlier run have just come into use.
        """
        rows = None if self._source is None else self.rows_of(self._source)
        if self._cut is not None and not (self._cut.is_current() and self._is_same(self._cut)):
            self._loop.note(
                "features: the frozen layers have changed: the kept features are dropped"
            )
            self._drop()
            self._restarts = self._has_dropped = True
        elif isinstance(rows, NamedRows) and rows.is_random:
            self._loop.note(
                "features: samples change at random, so that no sample repeats and no features "
                "are kept"
            )
            rows.drop()
            # Other ranks notice the change at other steps.
            self._drop(wakes=self._loop.world.size == 1)
        restarts, self._restarts = self._restarts, False
        return restarts and not isinstance(rows, NamedRows)  # named samples are always made

    def _is_same(self, cut: Cut) -> bool:
        if self._is_new_epoch:
            self._is_new_epoch = False
            return cut.contents.are_same()
        return self._loop.world.size > 1 or cut.contents.seem_same()

    def rows_to_make(self, source: Source) -> FeatureRows | None:
        """Return the rows whose samples need not be made; None if all samples must be made."""
        rows = self.rows_of(source)
        return rows if isinstance(rows, FeatureRows) else None

    def batch(self, batch: Batch, epoch: int) -> Batch:
        """Return a training batch as the model takes it: with features or with inputs."""
        assert self._source is not None
        if self._is_due(epoch):
            self._decide(self._source, batch, epoch)
        if self._cut is None:
            return batch
        return self.rows.complete(batch, self.rows_of(self._source), self._cut, epoch)

    def _is_due(self, epoch: int) -> bool:
        loop, tuner = self._loop, self._loop.tuner
        is_due = self._is_open and epoch > self._decided_in
        is_settled = not loop.progress.is_other_job and (tuner is None or not tuner.is_searching)
        return is_due and is_settled and self.may_keep

    def _is_hopeless(self, source: Source) -> bool:
        if self._decided_in >= 0 or isinstance(source, Pipeline):
            return False
        return isinstance(samples_of(source), str)

    @property
    def _is_open(self) -> bool:
        return self._decided_in < 0 or self._has_dropped

    def taken(self) -> int:
        """Return the nanoseconds spent computing features since the last call."""
        return self.rows.taken()

    @contextmanager
    def evaluated(self, source: Source, part: Source) -> Iterator[Iterator[Batch]]:
        """Yield an evaluation's batches; batches with features are on the device already."""
        if not self._trains:
            with self._evaluated.batches(source, part) as batches:
                yield batches
            return
        rows, cut = self.rows_of(source), self._cut
        if rows is None or cut is None or not (cut.is_current() and cut.contents.are_same()):
            yield part.batches(0, 0)
        else:
            yield self.rows.completed(part, rows, cut)

    def close(self) -> None:
        """Restore the model; keep the features for evaluations and later runs."""
        for _, rows in self._of_source.values():
            if rows is not None:
                self.rows.hold(rows)
        self._drop()
        self._trains = False

    def _drop(self, *, wakes: bool = True) -> None:
        """Restore the model, so that it takes inputs again."""
        if self._undo is None:
            return
        self._undo()
        self._waits = None
        # Threads that make batches may still read; a store closes when its last rows are released.
        self._of_source.clear()
        self.rows.contents.clear()
        self._cut = self._undo = None
        if wakes and self._loop.tuner is not None:
            self._loop.tuner.wake(self._loop.step_count)

    # -- the decision ------------------------------------------------------------------------

    def _decide(self, source: Source, batch: Batch | None, epoch: int) -> None:
        loop = self._loop
        batch = self._of_several(source, batch)
        self._decided_in, self._has_dropped = epoch, False
        looked, result = self.look(source, batch)
        with loop.autocast():
            cuts, result = agreed_cuts(looked, result, loop.world, self.rows.known())
        del looked  # frees the outputs of all layers
        if result and not (batch is not None and self._keep_pixels(source, batch, epoch, result)):
            self._tell(Choice(None, f"nothing kept: {result}"))
        if result or not cuts or batch is None:
            return
        left = (
            None if loop.progress.planned_epochs is None else loop.progress.planned_epochs - epoch
        )
        # Backward takes about twice as long as forward.
        choice = self.choose(source, cuts, batch, left, 3)
        name = loop.world.from_first("" if choice.kept is None else choice.kept.name)
        if name:
            self._use(source, next(cut for cut in cuts if cut.name == name), choice)
        elif not self._keep_pixels(source, batch, epoch, choice.why):
            self._tell(choice)
        self._opened.clear()

    def look(self, source: Source, batch: Batch | None) -> tuple[Cuts, str]:
        """Return the model's possible cuts, and the reason if features cannot be kept.

        The reason is "" where no layer is frozen.
        """
        why = self._why_not(source, batch)
        if why or batch is None:
            return Cuts(), why
        samples, where = samples_of(source), self.rows.where
        assert not isinstance(samples, str)
        kinds = ("memory", "disk") if where == "auto" else (where,)
        most = max(map(room, kinds)) / max(1, samples.slots)
        with untouched(self._model), self._loop.autocast():
            result = find_cuts(self._model, batch.inputs, most)
        self._hindrance = result.hindrance
        return result, "" if result.cuts else result.hindrance

    def _why_not(self, source: Source, batch: Batch | None) -> str:
        loop, samples = self._loop, samples_of(source)
        if isinstance(samples, str):
            return samples
        if not available():
            return f"Flatout's C extensions are not built: {INSTALL}"
        if loop.meets_in_compute:
            strategy = loop.asked.recipe.world.strategy
            return f"world.strategy={strategy} leaves each rank a part of the model"
        if batch is None or (batch.indices is None and isinstance(samples, Numbered)):
            return "the source does not number its samples"
        if batch.is_jagged:
            return NO_ROWS
        if loop.asked.allow < Parity.TOLERANT:
            return 'allow="exact": features of other batches may differ by rounding'
        if loop.settings_of(self._model).compile != "off":
            return "the model is compiled"
        if batch.size < 2:
            return "a batch of one sample does not tell whether samples depend on each other"
        return ""

    def _of_several(self, source: Source, batch: Batch | None) -> Batch | None:
        part, samples = self._part, samples_of(source)
        if batch is None or batch.size > 1 or part is None or not isinstance(samples, Numbered):
            return batch
        more = (self._loop.ready(one) for one in part.peek(_PEEKED) if one.size > 1)
        return next(more, batch)

    def choose(
        self, source: Source, cuts: Sequence[Cut], batch: Batch, left: int | None, passes: int
    ) -> Choice:
        """Measure the cuts, and decide on the features to keep for a source."""
        loop, samples = self._loop, samples_of(source)
        assert not isinstance(samples, str)
        hosts, stays = loop.world.place.nodes, stays_with_rank(source)
        options, step_s, made_s, named_s = [], 0.0, 0.0, 0.0
        beside = is_made_beside(source, loop.device)
        if isinstance(samples, NamedSamples):  # these samples are made in any case
            named_s, names = timed(partial(sample_names, *tensors_in(batch.inputs)), loop.device)
            named_s /= len(names)
        elif beside or loop.device.type == "cpu":
            made_s = making_s(source)
        with untouched(self._model), torch.no_grad(), loop.autocast():
            looked = [self._looked_at(source, cut, batch) for cut in cuts]
        # The layers that train come after every cut; frozen layers after a cut have no backward.
        trains_s = (passes - 1) * min(rest_s for _, _, rest_s in looked)
        computed_s = median(prefix_s + rest_s for _, prefix_s, rest_s in looked)
        for cut, (rows, _, rest_s) in zip(cuts, looked, strict=True):
            size, store = cut.bytes_per_sample, rows.store
            read_s = named_s + size / read_rate(store.where, samples.slots * size, loop.device)
            # Front and rest of every cut have the same sum. Two separate timings of nearly the
            # same long front would differ by noise.
            prefix_s = max(0.0, computed_s - rest_s)
            costs = Costs(made_s, prefix_s, rest_s + trains_s, read_s, beside)
            step_s = max(step_s, costs.plain_s)
            option = FeatureOption(
                cut.name,
                saved_s=costs.saved_s,
                bytes=size,
                variants=samples.variants,
                read_s=costs.read_s,
                room=room(store.where),
                filled=min(1.0, store.kept / samples.slots * (hosts if stays else 1)),
                hosts=hosts,
                stays=stays,
            )
            options.append(option)
        count = samples_of_all(source) or samples.slots // samples.variants
        return choose(options, count, left, step_s)

    def _looked_at(self, source: Source, cut: Cut, batch: Batch) -> tuple[Rows, float, float]:
        device = self._loop.device
        # On a GPU the batch size at which the cuts were found, so that this call is not the first.
        measured = batch.rows(0, _MEASURED) if device.type == "cpu" else batch
        prefix_s, features = timed(partial(cut.prefix, measured.inputs), device)
        self.rows.look_at(cut, measured.inputs, features)
        rows = self.rows.open(source, cut)
        assert rows is not None
        self._opened[cut.name] = rows
        cut.rest(features)
        rest_s, _ = timed(partial(cut.rest, features), device)
        return rows, prefix_s / measured.size, rest_s / measured.size

    def opened(self, name: str) -> Rows:
        """Return the rows at a cut that `choose` has opened, and release all other rows."""
        rows = self._opened.pop(name)
        self._opened.clear()
        return rows

    def _keep_pixels(self, source: Source, batch: Batch, epoch: int, why: str) -> bool:
        """Keep decoded pixels in place of features if that saves time; return whether it does."""
        loop = self._loop
        can_keep = isinstance(source, Pipeline) and loop.world.size == 1 and available()
        cached = source.cached() if isinstance(source, Pipeline) and can_keep else None
        if cached is None or not source.samples:
            return False
        pixels, decoding_s = cached
        (raw,) = source.peek(1)
        decoding_s /= usable_cpus()
        few = batch.rows(0, _MEASURED) if loop.device.type == "cpu" else batch
        with untouched(self._model), torch.no_grad(), loop.autocast():
            call = adapter_of(self._model).called(training=True)
            forward_s, _ = timed(partial(call_model, call, few.inputs), loop.device)
        size = sum(tensor.nbytes for tensor in tensors_in(raw.inputs)) // raw.size
        where = "memory" if size * source.samples <= room("memory") else "disk"
        rate = read_rate(where, size * source.samples)
        beside = is_made_beside(source, loop.device)
        costs = Costs(decoding_s, 0, 3 * forward_s / few.size, size / rate, beside)
        saved_s, read_s = costs.saved_s, costs.read_s
        option = FeatureOption("decoded pixels", saved_s, size, 1, read_s, room(where))
        left = (
            None if loop.progress.planned_epochs is None else loop.progress.planned_epochs - epoch
        )
        choice = choose([option], source.samples, left, costs.plain_s)
        if choice.kept is None or choice.share < 1:
            return False
        self._pixels, self._restarts = pixels, True
        self._tell(choice, where, "bytes", f"no features: {why}")
        return True

    def _use(self, source: Source, cut: Cut, choice: Choice) -> None:
        rows = self.opened(cut.name)
        self._of_source[id(source)] = source, rows
        self._cut, self._undo = cut, cut.apply()
        self._restarts = rows.store.kept > 0
        self.rows.remember(cut)
        if self._loop.tuner is not None:
            self._loop.tuner.rest()
        self._tell(choice, rows.store.where, self.rows.precision(cut))

    def _tell(self, choice: Choice, where: str = "", precision: str = "", beside: str = "") -> None:
        self.line = f"features: {choice.words(where, precision)}"
        if where and self._hindrance:
            beside = f"more could be kept: {self._hindrance}"
        self.line += f" · {beside}" if beside else ""
        self.facts = {**choice.as_dict(), "where": where, "line": self.line}
        loop = self._loop
        self._say(self.line)
        assert loop.resolved is not None
        if where and self._cut is not None and loop.asked.recipe.input.features == "auto":
            result = RecipeChoice(value=where, reason=self.line, parity=Parity.TOLERANT)
            choices = {**loop.resolved.choices, "input.features": result}
            loop.resolved = loop.asked.recipe.resolve(choices, loop.resolved.machine)
