"""Stored rows of a model's features, and the batches that are made of them."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flatout.cache_folder import kind_folder, private
from flatout.data import (
    NAMES_VERSION,
    Batch,
    FeatureRows,
    Features,
    FeatureStore,
    NamedSlots,
    NamedStore,
    Numbered,
    ReplacedFiles,
    RowPart,
    Source,
    WatchedFiles,
    feature_key,
    joined_rows,
    map_tensors,
    named_tensors,
    sample_names,
    tensors_in,
)
from flatout.models import Cut, adapter_of
from flatout.train.feed import batches_of
from flatout.train.loop_state import LoopState
from flatout.train.named_rows import NamedRows, NamedSamples, samples_of
from flatout.train.settings import LIVE

# Number of latest stores that stay open for later evaluations.
_HELD = 4
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class ModelRows:
    """Stored rows of a model's features, for any source and any cut.

    Attributes:
        model: the model that computes the features.
        where: the requested place of the rows, as in the Recipe's `input.features`.
        contents: by source, the text that identifies the source's samples.
    """

    def __init__(self, loop: LoopState, model: nn.Module) -> None:
        self.where: Any = loop.asked.recipe.input.features
        self.contents: WeakKeyDictionary[Source, str] = WeakKeyDictionary()
        self._named: dict[str, NamedSlots | None] = {}  # by content
        self._loop, self.model = loop, model
        # By cut, shape and dtype of the parts of a row, and of the inputs that they come from.
        self._parts: dict[str, list[RowPart]] = {}
        self._inputs: dict[str, list[RowPart]] = {}
        self._known: list[list[int]] = []
        self._held: dict[Any, FeatureStore | NamedStore] = {}
        self._names: WeakKeyDictionary[FeatureStore | NamedStore, Any] = WeakKeyDictionary()
        self._ns = 0
        self._is_full_told = False

    def precision(self, cut: Cut) -> str:
        """Return the precision, such as "bf16", of the features that `look_at` received."""
        return _NAMES.get(self._parts[cut.name][0].dtype, "")

    def remember(self, cut: Cut) -> None:
        """Record that features are stored at a cut, for evaluations of the same model."""
        if cut.place not in self.known():
            self._known.append(cut.place)
            with suppress(OSError), open(self._places_file(), "a", opener=private) as file:
                file.write(f"{json.dumps(cut.place)}\n")

    def known(self) -> list[list[int]]:
        """Return the places of the cuts at which features of this model were stored."""
        written: list[list[int]] = []
        with suppress(OSError, ValueError):
            written = [json.loads(line) for line in self._places_file().read_text().splitlines()]
        result = [*self._known, *written]
        return [place for at, place in enumerate(result) if place not in result[:at]]

    def _places_file(self) -> Path:
        text = json.dumps(self._facts(_frozen_in(self.model)), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return kind_folder("features") / f"{name}.cuts"

    def _facts(self, parts: Sequence[nn.Module]) -> dict[str, Any]:
        now = self._loop.settings_of(self.model)
        return {
            "model": adapter_of(self.model).lines(parts),
            "device": self._loop.device.type,
            **{name: getattr(now, name) for name, live in LIVE.items() if live.in_features},
        }

    def look_at(self, cut: Cut, inputs: Any, features: Features) -> None:
        """Record the shapes and dtypes of a cut's inputs and features."""
        self._inputs[cut.name] = _forms(inputs)
        self._parts[cut.name] = _forms(features)

    def open(
        self, source: Source, cut: Cut, first: Batch | None = None
    ) -> FeatureRows | NamedRows | None:
        """Return a source's rows at a cut; None where its samples cannot be stored."""
        samples = samples_of(source)
        if isinstance(samples, str):
            return None
        if isinstance(samples, NamedSamples):
            return self._open_named(source, samples, cut)
        if first is None:
            first = next((self._loop.ready(batch) for batch in source.peek(1)), None)
        if first is None or first.indices is None or forms_of(first) != self._inputs[cut.name]:
            return None
        where, content = self.where, self.content_of(source, samples)
        if content.startswith("only "):
            where = "memory"
        named = self._named_of(content, samples)
        made_of = content if named is None else named.made
        targets = None if named is None else named.targets
        are_alone = samples.comes_whole or targets is not None
        beside = [] if are_alone else _forms(tuple(_beside(first)))
        key = self._key(source, cut, {"content": made_of, "variants": samples.variants})
        parts = self._parts[cut.name]
        # A store in memory is identified by its samples too.
        name = (key, content if named is None else _digest(named.names), *beside)
        store = self._held.get(name)
        if store is None:
            names = None if named is None else named.names
            store = FeatureStore.open(key, samples.slots, [*parts, *beside], where, names=names)
            self._know(store, name, len(parts), samples.slots)
        assert isinstance(store, FeatureStore)
        if named is not None:
            files: Any = ReplacedFiles(named, samples.variants, store)
        else:
            files = WatchedFiles(samples.files) if samples.files else None
        return FeatureRows(samples, store, len(parts), files, targets)

    def _open_named(self, source: Source, samples: NamedSamples, cut: Cut) -> NamedRows:
        parts = self._parts[cut.name]
        content = f"samples by their bytes, {NAMES_VERSION}"
        name = self._key(source, cut, {"content": content})
        store = self._held.get(name)
        if store is None:
            store = NamedStore.open(name, parts, self.where, expected=samples.slots)
            self._know(store, name, len(parts), samples.slots)
        assert isinstance(store, NamedStore)
        return NamedRows(samples, store, len(parts))

    def _key(self, source: Source, cut: Cut, samples: dict[str, Any]) -> str:
        facts = {
            **self._facts(cut.modules),
            **samples,
            "inputs": repr(self._loop.feed.inputs),
            "normalization": repr(getattr(source, "normalization", None)),
            "cut": [cut.name, cut.calls],
        }
        return feature_key(cut.tensors, facts)

    def _know(self, store: FeatureStore | NamedStore, name: Any, parts: int, expected: int) -> None:
        if self._loop.device.type == "cuda":
            store.lie_on(self._loop.device, parts, expected)
        store.say, store.say_full = self._loop.tell, self._tell_full
        self._names[store] = name

    def _tell_full(self, line: str) -> None:
        if not self._is_full_told:
            self._is_full_told = True
            self._loop.tell(line)

    def hold(self, rows: FeatureRows | NamedRows) -> None:
        """Keep a store for evaluations, until several newer stores have replaced it.

        Its memory on a device is released meanwhile.
        """
        rows.store.wait()
        rows.store.leave_device()
        name = self._names[rows.store]
        self._held.pop(name, None)
        self._held[name] = rows.store
        while len(self._held) > _HELD:
            del self._held[next(iter(self._held))]

    def release(self, rows: NamedRows) -> None:
        """Drop the rows of samples that will not be read again."""
        self._held.pop(self._names[rows.store], None)
        rows.drop()

    def content_of(self, source: Source, samples: Numbered) -> str:
        """Return a source's key; "only ..." if the key is valid in this run alone."""
        if source not in self.contents:
            content = samples.content()
            if content is None:
                content = self._loop.world.from_first(f"only {os.getpid()} {time.time_ns()}")
            self.contents[source] = content
        return self.contents[source]

    def forget(self, source: Source) -> None:
        """Drop a source's recorded content, so that it is computed anew at the next use.

        Sources whose samples are known by their files are kept: files are checked at each use.
        """
        content = self.contents.get(source)
        if content is not None and self._named.get(content) is None:
            del self.contents[source]

    def _named_of(self, content: str, samples: Numbered) -> NamedSlots | None:
        if content not in self._named:
            self._named[content] = samples.named()
            if len(self._named) > _HELD:
                del self._named[next(iter(self._named))]
        return self._named[content]

    def complete(
        self, batch: Batch, rows: FeatureRows | NamedRows | None, cut: Cut, epoch: int
    ) -> Batch:
        """Return the batch with features in place of inputs; store the features computed here."""
        if rows is None or batch.is_jagged:
            return batch
        if isinstance(rows, NamedRows):
            return self._complete_named(batch, rows, cut, epoch)
        if batch.indices is None:
            return batch
        numbers = batch.indices.numpy()
        turns = epoch if batch.turns is None else batch.turns.numpy()
        slots = rows.samples.slots_of(numbers, turns)
        if batch.kept is not None:
            there = np.zeros(batch.size, bool)
            there[batch.kept.rows.numpy()] = True
            kept = batch.kept.values
        else:
            there = rows.has(numbers, turns)
            kept = Features(rows.store.get(slots[there])[: rows.parts])
        kept = map_tensors(lambda tensor: tensor.to(self._loop.device, non_blocking=True), kept)
        if there.all():
            return batch._replace(inputs=kept, kept=None)
        missing = torch.from_numpy(np.flatnonzero(~there))
        inputs = batch.inputs
        if batch.kept is None and there.any():
            at = missing.to(self._loop.device, non_blocking=True)
            inputs = map_tensors(lambda tensor: tensor.index_select(0, at), inputs)
        made = self._computed(cut, inputs, len(missing), alone=batch.size == 1)
        if batch.kept is not None and rows.files is not None:
            rows.files.look(numbers[~there])  # files may have changed since they were checked
        if cut.contents.are_same():
            _keep(batch, rows, slots, missing, made)
        if there.any():
            pairs = zip(kept, made, strict=True)
            made = Features(joined_rows(item, other, there) for item, other in pairs)
        return batch._replace(inputs=made, kept=None)

    def _complete_named(self, batch: Batch, rows: NamedRows, cut: Cut, epoch: int) -> Batch:
        if forms_of(batch) != self._inputs[cut.name]:
            return batch
        names = sample_names(*tensors_in(batch.inputs))
        places = rows.store.places(names)
        there = places >= 0
        rows.count(there, epoch)
        kept = Features(
            item.to(self._loop.device, non_blocking=True) for item in rows.store.get(places[there])
        )
        if there.all():
            return batch._replace(inputs=kept)
        missing = np.flatnonzero(~there)
        inputs = batch.inputs
        if there.any():
            at = torch.from_numpy(missing).to(self._loop.device, non_blocking=True)
            inputs = map_tensors(lambda tensor: tensor.index_select(0, at), inputs)
        made = self._computed(cut, inputs, len(missing), alone=batch.size == 1)
        if cut.contents.are_same():
            own = [names[at] for at in missing.tolist() if at < batch.samples]
            rows.store.put(own, [part[: len(own)] for part in made])
        if there.any():
            pairs = zip(kept, made, strict=True)
            made = Features(joined_rows(item, other, there) for item, other in pairs)
        return batch._replace(inputs=made)

    def completed(self, part: Source, rows: FeatureRows | NamedRows, cut: Cut) -> Iterator[Batch]:
        """Return the batches of an evaluation, with features in place of inputs."""
        made = batches_of(part, 0, 0, None if isinstance(rows, NamedRows) else rows)
        return self.completed_of(made, rows, cut, 0)

    def completed_of(
        self, made: Iterator[Batch], rows: FeatureRows | NamedRows, cut: Cut, epoch: int
    ) -> Iterator[Batch]:
        """Return these batches with features in place of inputs; `epoch` is as in `complete`."""
        return (self.complete(self._loop.ready(batch), rows, cut, epoch) for batch in made)

    def _computed(self, cut: Cut, inputs: Any, samples: int, *, alone: bool) -> Features:
        began = time.perf_counter_ns()
        if samples == 1 and not alone:
            # A single sample often takes other kernels than a batch, with other rounding.
            inputs = map_tensors(lambda tensor: torch.cat([tensor, tensor]), inputs)
        with torch.no_grad(), self._loop.autocast():
            made = cut.prefix(inputs)
        self._ns += time.perf_counter_ns() - began
        return Features(part[:samples] for part in made)

    def taken(self) -> int:
        """Return the ns that the frozen layers took since the last call."""
        taken, self._ns = self._ns, 0
        return taken


def forms_of(batch: Batch) -> list[RowPart]:
    """Return shape and dtype of each part of a sample's inputs."""
    return _forms(batch.inputs)


def _frozen_in(model: nn.Module) -> list[nn.Module]:
    return [
        part
        for part in model.modules()
        if (own := list(part.parameters())) and not any(item.requires_grad for item in own)
    ]


def _digest(names: npt.NDArray[np.uint64]) -> str:
    return hashlib.sha256(names.tobytes()).hexdigest()


def _forms(tensors: Any) -> list[RowPart]:
    return [RowPart(tuple(item.shape[1:]), item.dtype) for item in tensors_in(tensors)]


def _keep(
    batch: Batch, rows: FeatureRows, slots: Any, missing: Tensor, made: Sequence[Tensor]
) -> None:
    own = missing[missing < batch.samples]  # padding has another weight
    others = [] if rows.are_alone else _beside(batch)
    beside = [tensor.cpu().index_select(0, own) for tensor in others]
    rows.store.put(slots[own.numpy()], [*(part[: len(own)] for part in made), *beside])


def _beside(batch: Batch) -> list[Tensor]:
    weight = batch.weight if not batch.padding else batch.without_padding().weight
    given = batch.targets, None if weight is None else batch.weight
    return [tensor for _, tensor in named_tensors("", given)]
