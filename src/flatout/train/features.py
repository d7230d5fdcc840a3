"""What frozen leading layers give for a sample is computed once and kept, for later runs as well.

Once settings are decided, the model's cuts are measured and the best is chosen
(`frozen_choice.py`). From then on each training batch becomes `Features`: of the samples that the
store has, what it has; of the others, what the prefix gives now, which is kept. The model takes
them in place of its inputs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flatout.cache_folder import cache_folder, kind_folder
from flatout.data import (
    Batch,
    FeatureRows,
    Features,
    FeatureStore,
    Numbered,
    Pipeline,
    RowPart,
    Source,
    feature_key,
    joined_rows,
    map_tensors,
    named_tensors,
    numbered,
    stays_with_rank,
    tensors_in,
)
from flatout.measure import available_bytes, finish_device, usable_cpus
from flatout.models import Cut, Cuts, adapter_of, find_cuts
from flatout.recipe import Choice as RecipeChoice
from flatout.recipe import Parity
from flatout.train.compute import call as call_model
from flatout.train.frozen_candidates import agreed_cuts, remember
from flatout.train.frozen_choice import Choice, Kept, choose
from flatout.train.snapshot import untouched

if TYPE_CHECKING:
    from flatout.train.loop import Loop

# After so many steps of tuning the best settings known hold, where features wait for them.
_TUNED = 60
# Of the free memory, what a store may take; as the store itself has it.
_SHARE = 0.5
_COPIED = 16 << 20
# Samples that are measured on a CPU; fewer where an earlier run has kept this share of the rows.
_MEASURED, _FEWEST, _MOST_IS_THERE = 8, 2, 0.5
# A row is also compared with its checksum, and gathered: it is read at this share of a copy's rate.
_READ = 0.25
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Settings of a Switch by which features differ.
_DECIDES = ("precision", "fp32_operators", "memory_format", "fused_norms")


class FrozenFeatures:
    """Features of a fit's model, for its training and its validation.

    Args:
        loop: prepared for the fit.
        model: that is trained.
        source: that it is trained on.

    Attributes:
        line: what was decided, for people; "" before that, and where nothing is frozen.
        facts: of the decision, as plain data; None before it, and where nothing is frozen.
    """

    def __init__(self, loop: Loop, model: nn.Module, source: Source) -> None:
        self.line = ""
        self.facts: dict[str, Any] | None = None
        self._loop, self._model, self._source = loop, model, source
        self._cut: Cut | None = None
        self._undo: Any = None
        # Of each cut what a row holds of it, and what was opened while it was looked at.
        self._parts: dict[str, list[RowPart]] = {}
        self._opened: dict[str, FeatureRows] = {}
        self._rows: dict[int, tuple[Source, FeatureRows | None]] = {}
        self._contents: dict[int, str] = {}
        self._where: Any = loop.requested.input.features
        self._decided_in = -1  # the epoch of the latest decision
        self._has_dropped = self._restarts = False
        self._say = loop.say  # before the first epoch no progress line would show it
        self._pixels: Pipeline | None = None
        self._hindrance = ""  # what keeps more of the model from being frozen
        self._waits: bool | None = None  # whether features wait for the settings
        self._ns = 0

    # -- training ----------------------------------------------------------------------------

    def rows_of(self, source: Source) -> FeatureRows | None:
        """The rows that batches of a source are made with."""
        if self._cut is None:
            return None
        if id(source) not in self._rows:
            self._rows[id(source)] = source, self._open(source, self._cut)
        return self._rows[id(source)][1]

    def settle(self, batch: Batch) -> None:
        """End the tuning where features wait for it, once all options together were judged.

        Args:
            batch: the next one.
        """
        tuner, loop = self._loop.tuner, self._loop
        if tuner is None or not tuner.is_searching or not self._is_open or self._cut is not None:
            return
        search = tuner.search
        judged = search.together is not None or "together" in search.dropped
        enough = judged or len(search.options) < 2 or loop.step_count - tuner.since >= _TUNED
        if not enough or loop.stepper.joint.gathered:
            return
        if self._waits is None:
            self._waits = self._may_keep and bool(self._look(loop.ready(batch))[0].cuts)
        if self._waits:
            tuner.stop("features of frozen layers wait for the settings", suffices=judged)

    @property
    def _may_keep(self) -> bool:
        return self._where != "off" and adapter_of(self._model).is_partly_frozen()

    def begin(self, part: Source, epoch: int) -> bool:
        """Before batches of an epoch are made: decide, where that is due and settings are known.

        Args:
            part: what this rank reads of the source.
            epoch: its number.

        Returns:
            Whether the epoch's batches need be looked at.
        """
        self._restarts = False
        if self._cut is None and not self._may_keep:
            return False
        if self._is_due(epoch):
            samples = numbered(self._source)
            can_look = isinstance(samples, Numbered) or isinstance(self._source, Pipeline)
            first = part.peek(1) if can_look and self._source.seekable else []
            self._decide(self._loop.ready(first[0]) if first else None, epoch)
        self._restarts = False
        self._say = self._loop.note
        return True

    def read_from(self, part: Source) -> Source:
        """What batches are read from: where decoded pixels are kept, a pipeline with a cache."""
        return self._pixels if self._pixels is not None and part is self._source else part

    def must_restart(self) -> bool:
        """Whether batches that are being made are not those that are wanted by now.

        The frozen part may be another, so that what was kept of it is not used again; or it was
        decided since to use what an earlier run has kept.
        """
        if self._cut is not None and not self._cut.is_current():
            self._loop.note("features: the frozen layers have changed: what was kept is dropped")
            self.close()
            self._restarts = self._has_dropped = True
        restarts, self._restarts = self._restarts, False
        return restarts

    def batch(self, batch: Batch, epoch: int) -> Batch:
        """A training batch that is ready on the device, as the model takes it."""
        if self._is_due(epoch):
            self._decide(batch, epoch)
        return self._complete(batch, self.rows_of(self._source), epoch)

    def _is_due(self, epoch: int) -> bool:
        """Once settings are decided; and in a later epoch where the frozen layers have changed."""
        loop, tuner = self._loop, self._loop.tuner
        is_due = self._is_open and epoch > self._decided_in
        is_settled = not loop.is_other_job and (tuner is None or not tuner.is_searching)
        return is_due and is_settled and self._may_keep

    @property
    def _is_open(self) -> bool:
        """Whether there is something to decide: at first, and where what was kept was dropped."""
        return self._decided_in < 0 or self._has_dropped

    def taken(self) -> int:
        """Nanoseconds that the frozen layers took since this was asked last."""
        taken, self._ns = self._ns, 0
        return taken

    def evaluated(self, source: Source, part: Source) -> Iterator[Batch]:
        """The batches of an evaluation, on the device where features are kept of them.

        Args:
            source: that is evaluated.
            part: what this rank reads of it.
        """
        rows = self.rows_of(source)
        if rows is None or self._cut is None or not self._cut.is_current():
            return part.batches(0, 0)
        made = batches_of(part, 0, 0, rows)
        return (self._complete(self._loop.ready(batch), rows, 0) for batch in made)

    def close(self) -> None:
        """Let the model be as it was; what is kept stays for later runs."""
        if self._undo is None:
            return
        self._undo()
        self._waits = None
        # Threads that make batches may still read: stores are closed with their last rows.
        self._rows.clear()
        self._cut = self._undo = None
        if self._loop.tuner is not None:
            self._loop.tuner.wake(self._loop.step_count)

    # -- the decision ------------------------------------------------------------------------

    def _decide(self, batch: Batch | None, epoch: int) -> None:
        loop = self._loop
        self._decided_in, self._has_dropped = epoch, False
        looked, found = self._look(batch)
        with loop.autocast():
            cuts, found = agreed_cuts(looked, found, loop.world)
        if found and not (batch is not None and self._keep_pixels(batch, epoch, found)):
            self._tell(Choice(None, f"nothing kept: {found}"))
        if found or not cuts or batch is None:
            return
        choice = self._choose(cuts, batch, epoch)
        name = loop.world.from_first("" if choice.kept is None else choice.kept.name)
        if name:
            self._use(next(cut for cut in cuts if cut.name == name), choice)
            assert self._cut is not None
            remember(looked, self._cut)
        elif not self._keep_pixels(batch, epoch, choice.why):
            self._tell(choice)
        self._opened.clear()

    def _look(self, batch: Batch | None) -> tuple[Cuts, str]:
        """Where the model may be cut; or why nothing can be kept, "" where nothing is frozen."""
        why = self._why_not(batch)
        if why or batch is None:
            return Cuts(), why
        samples = numbered(self._source)
        assert isinstance(samples, Numbered)
        kinds = ("memory", "disk") if self._where == "auto" else (self._where,)
        room = max(map(_room, kinds)) / max(1, samples.slots)
        with self._loop.autocast():
            found = find_cuts(self._model, batch.inputs, room)
        self._hindrance = found.hindrance
        return found, "" if found.cuts else found.hindrance

    def _why_not(self, batch: Batch | None) -> str:
        """Why features cannot be kept, whatever the model is."""
        loop, samples = self._loop, numbered(self._source)
        if isinstance(samples, str):
            return samples
        if batch is None or batch.indices is None:
            return "the source does not number its samples"
        if loop.allow < Parity.TOLERANT:
            return 'allow="exact": other batches may round otherwise'
        if loop.stepper.switch.now.compile != "off":
            return "the model is compiled"
        if batch.size < 2:
            return "a batch of one sample does not tell whether samples depend on each other"
        return ""

    def _choose(self, cuts: Sequence[Cut], batch: Batch, epoch: int) -> Choice:
        loop, source = self._loop, self._source
        samples = numbered(source)
        assert isinstance(samples, Numbered)
        hosts, stays = loop.world.place.nodes, stays_with_rank(source)
        made_s, options, rest_s = self._making_s(), [], 0.0
        with untouched(self._model), torch.no_grad(), loop.autocast():
            for cut in cuts:
                features = cut.prefix(batch.rows(0, _FEWEST).inputs)
                self._parts[cut.name] = _parts_of(features)
                rows = self._open(source, cut)
                assert rows is not None
                self._opened[cut.name] = rows
                filled = rows.store.kept / samples.slots
                measured = batch
                if loop.device.type == "cpu":
                    measured = batch.rows(0, _FEWEST if filled > _MOST_IS_THERE else _MEASURED)
                prefix_s, features = _timed(partial(cut.prefix, measured.inputs))
                cut.rest(features)
                rest_s, _ = _timed(partial(cut.rest, features))
                rest_s /= measured.size
                option = Kept(
                    cut.name,
                    saved_s=prefix_s / measured.size + made_s,
                    bytes=cut.bytes_per_sample,
                    variants=samples.variants,
                    read_s=cut.bytes_per_sample / _rate(rows.store.where, rows.store.whole_bytes),
                    room=_room(rows.store.where),
                    filled=min(1.0, filled * (hosts if stays else 1)),
                    hosts=hosts,
                    stays=stays,
                )
                options.append(option)
        # Backward takes about twice as long as forward.
        step_s = max(option.saved_s for option in options) + 3 * rest_s
        left = None if loop.planned_epochs is None else loop.planned_epochs - epoch
        return choose(options, source.samples or samples.rows, left, step_s)

    def _keep_pixels(self, batch: Batch, epoch: int, why: str) -> bool:
        """Keep what is decoded where that pays and features cannot be kept; says whether it does.

        Args:
            batch: ready on the device.
            epoch: that begins.
            why: there are no features.
        """
        loop, source = self._loop, self._source
        cached = source.cached() if isinstance(source, Pipeline) and loop.world.size == 1 else None
        if cached is None or not source.samples:
            return False
        pixels, decoding_s = cached
        (raw,) = source.peek(1)
        decoding_s /= usable_cpus()
        few = batch.rows(0, _MEASURED)
        with untouched(self._model), torch.no_grad(), loop.autocast():
            call = adapter_of(self._model).called(training=True)
            forward_s, _ = _timed(partial(call_model, call, few.inputs))
        size = sum(tensor.nbytes for tensor in tensors_in(raw.inputs)) // raw.size
        memory = _room("memory")
        where = "memory" if size * source.samples <= memory else "disk"
        rate = _rate(where, size * source.samples)
        option = Kept("decoded pixels", decoding_s, size, 1, size / rate, _room(where))
        left = None if loop.planned_epochs is None else loop.planned_epochs - epoch
        plain_s = decoding_s + 3 * forward_s / few.size
        choice = choose([option], source.samples, left, plain_s)
        if choice.kept is None or choice.share < 1:
            return False
        self._pixels, self._restarts = pixels, True
        self._tell(choice, where, "bytes", f"no features: {why}")
        return True

    def _making_s(self) -> float:
        """Seconds by which making a sample delays its step."""
        began = time.perf_counter()
        first = self._source.peek(1)
        spent = (time.perf_counter() - began) / max(1, first[0].size if first else 1)
        return spent / usable_cpus() if self._loop.device.type == "cpu" else 0.0

    def _use(self, cut: Cut, choice: Choice) -> None:
        rows = self._opened.pop(cut.name)
        self._rows[id(self._source)] = self._source, rows
        self._cut, self._undo = cut, cut.apply()
        self._restarts = rows.store.kept > 0
        if self._loop.tuner is not None:
            self._loop.tuner.rest()
        self._tell(choice, rows.store.where, _NAMES.get(self._parts[cut.name][0].dtype, ""))

    def _tell(self, choice: Choice, where: str = "", precision: str = "", beside: str = "") -> None:
        place = "on disk" if where == "disk" else "in memory"
        self.line = f"features: {choice.words(place, precision)}"
        if where and self._hindrance:
            beside = f"more could be kept: {self._hindrance}"
        self.line += f" · {beside}" if beside else ""
        self.facts = {**choice.as_dict(), "where": where, "line": self.line}
        loop = self._loop
        self._say(self.line)
        assert loop.resolved is not None
        if where and self._cut is not None and loop.requested.input.features == "auto":
            found = RecipeChoice(value=where, reason=self.line, parity=Parity.TOLERANT)
            choices = {**loop.resolved.choices, "input.features": found}
            loop.resolved = loop.requested.resolve(choices, loop.resolved.machine)

    # -- rows --------------------------------------------------------------------------------

    def _open(self, source: Source, cut: Cut) -> FeatureRows | None:
        """A source's rows of a cut; None where its samples cannot be kept."""
        samples = numbered(source)
        first = [] if isinstance(samples, str) else source.peek(1)
        if isinstance(samples, str) or not first or first[0].indices is None:
            return None
        where, content = self._where, self._content_of(source, samples)
        if content.startswith("only "):
            where = "memory"
        now = self._loop.stepper.switch.now
        facts = {
            "content": content,
            "variants": samples.variants,
            "inputs": repr(self._loop.feed.inputs),
            "normalization": repr(getattr(source, "normalization", None)),
            "cut": [cut.name, cut.calls],
            "model": adapter_of(self._model).lines(),
            "device": self._loop.device.type,
            **{name: getattr(now, name) for name in _DECIDES},
        }
        beside = [RowPart(tuple(t.shape[1:]), t.dtype) for t in _beside(first[0])]
        key = feature_key(cut.tensors, facts)
        parts = self._parts[cut.name]
        store = FeatureStore.open(key, samples.slots, [*parts, *beside], where)
        store.say = self._loop.note
        return FeatureRows(samples, store, len(parts))

    def _content_of(self, source: Source, samples: Numbered) -> str:
        """What tells a source's samples from all others; "only ..." where no other run finds it."""
        if id(source) not in self._contents:
            content = samples.content()
            if content is None:
                content = self._loop.world.from_first(f"only {os.getpid()} {time.time_ns()}")
            self._contents[id(source)] = content
        return self._contents[id(source)]

    def _complete(self, batch: Batch, rows: FeatureRows | None, epoch: int) -> Batch:
        """The batch with features in place of its inputs; those that were computed are kept."""
        if rows is None or self._cut is None or batch.indices is None:
            return batch
        numbers = batch.indices.numpy()
        slots = rows.samples.slots_of(numbers, epoch)
        if batch.kept is not None:
            there = np.zeros(batch.size, bool)
            there[batch.kept.rows.numpy()] = True
            kept = batch.kept.values
        else:
            there = rows.store.has(slots)
            kept = Features(rows.store.get(slots[there])[: rows.parts])
        kept = map_tensors(lambda tensor: tensor.to(self._loop.device, non_blocking=True), kept)
        if there.all():
            return batch._replace(inputs=kept, kept=None)
        missing = torch.from_numpy(np.flatnonzero(~there))
        inputs = batch.inputs
        if batch.kept is None and there.any():
            at = missing.to(self._loop.device)
            inputs = map_tensors(lambda tensor: tensor.index_select(0, at), inputs)
        made = self._computed(inputs, len(missing), alone=batch.size == 1)
        self._keep(batch, rows, slots, missing, made)
        if there.any():
            pairs = zip(kept, made, strict=True)
            made = Features(joined_rows(one, other, there) for one, other in pairs)
        return batch._replace(inputs=made, kept=None)

    def _computed(self, inputs: Any, samples: int, *, alone: bool) -> Features:
        """What the frozen layers give, now."""
        assert self._cut is not None
        began = time.perf_counter_ns()
        if samples == 1 and not alone:
            # A single sample often takes other kernels than a batch, which round otherwise.
            inputs = map_tensors(lambda tensor: torch.cat([tensor, tensor]), inputs)
        with torch.no_grad(), self._loop.autocast():
            made = self._cut.prefix(inputs)
        self._ns += time.perf_counter_ns() - began
        return Features(part[:samples] for part in made)

    def _keep(
        self, batch: Batch, rows: FeatureRows, slots: Any, missing: Tensor, made: Sequence[Tensor]
    ) -> None:
        own = missing[missing < batch.samples]  # what fills a batch up has another weight
        beside = [tensor.cpu().index_select(0, own) for tensor in _beside(batch)]
        rows.store.put(slots[own.numpy()], [*(part[: len(own)] for part in made), *beside])


def batches_of(
    part: Source, epoch: int, start_step: int, rows: FeatureRows | None
) -> Iterator[Batch]:
    """The batches of an epoch; of a pipeline, made without the samples whose features are kept."""
    whole = getattr(part, "_whole", part)
    if rows is None or not isinstance(whole, Pipeline):
        return part.batches(epoch, start_step)
    return part.batches(epoch, start_step, rows)  # type: ignore[call-arg]


def _rate(where: str, size: int) -> float:
    """Bytes a second at which rows are read.

    Args:
        where: they are.
        size: bytes of all of them: what the system keeps of files in memory is read from there.
    """
    copied = torch.ones(_COPIED, dtype=torch.uint8)
    copied.clone()
    took, _ = _timed(copied.clone)
    rate = _READ * _COPIED / max(took, 1e-9)
    if where == "disk" and size > available_bytes() * _SHARE:
        rate = min(rate, _disk_rate(bytes(_COPIED)))
    return rate


def _disk_rate(data: bytes) -> float:
    """Bytes a second at which the cache folder's disk is read."""
    with tempfile.TemporaryFile(dir=kind_folder("features"), buffering=0) as file:
        file.write(data)
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        file.read()
        return len(data) / max(time.perf_counter() - began, 1e-9)


def _room(where: str) -> float:
    """Bytes that a store may take."""
    if where == "memory":
        return available_bytes() * _SHARE
    folders = (cache_folder(), *cache_folder().parents)
    return float(shutil.disk_usage(next(one for one in folders if one.exists())).free)


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and what it gave."""
    finish_device()
    began = time.perf_counter()
    given = run()
    finish_device()
    return time.perf_counter() - began, given


def _parts_of(features: Sequence[Tensor]) -> list[RowPart]:
    return [RowPart(tuple(part.shape[1:]), part.dtype) for part in features]


def _beside(batch: Batch) -> list[Tensor]:
    """What a row has beside its features: targets, and a weight that is the sample's own."""
    weight = batch.weight if not batch.padding else batch.without_padding().weight
    given = batch.targets, None if weight is None else batch.weight
    return [tensor for _, tensor in named_tensors("", given)]
