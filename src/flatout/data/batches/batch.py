"""One batch, operations on a whole batch, and objects that hold tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flatout.errors import DataError


def tensors_of_object(value: Any) -> dict[str, Any] | None:
    """Return the members of an object that hold tensors, by name; None if it has no tensor.

    Such objects are a PackedSequence, a dataclass, and an object with `.to(device)`, as PyTorch
    Geometric's `Data`. The tensors of the latter are found by its `to_dict()` or among its
    attributes. None also for objects of other types.
    """
    if isinstance(value, PackedSequence):
        # torch needs `batch_sizes` on the CPU, wherever the other tensors are.
        return {"data": value.data, "sorted_indices": value.sorted_indices}
    if isinstance(value, (type, Tensor, nn.Module)):
        return None
    if is_dataclass(value):
        held: Any = {field.name: getattr(value, field.name, None) for field in fields(value)}
    elif not callable(getattr(type(value), "to", None)):
        return None
    elif _applies(value) and callable(getattr(value, "to_dict", None)):
        held = value.to_dict()
    else:
        held = vars(value) if hasattr(value, "__dict__") else None
    return dict(held) if isinstance(held, Mapping) and _holds_tensor(held) else None


def mapped_object(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, PackedSequence):
        order, back = (
            None if part is None else function(part)
            for part in (value.sorted_indices, value.unsorted_indices)
        )
        return PackedSequence(function(value.data), value.batch_sizes, order, back)
    made = copy(value)
    if not is_dataclass(value) and _applies(value):
        return made.apply(lambda part: function(part) if isinstance(part, Tensor) else part)
    for name, part in (tensors_of_object(value) or {}).items():
        if _holds_tensor(part):
            object.__setattr__(made, name, function(part))  # a dataclass may be frozen
    return made


def _applies(value: Any) -> bool:
    return callable(getattr(type(value), "apply", None))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


# One tensor, or a tuple or dict of tensors; nesting is allowed. mypy has no recursive type that
# `isinstance` can narrow, hence Any.
Tensors: TypeAlias = Tensor | tuple[Any, ...] | dict[str, Any]
# Types that the inputs of a jagged batch may hold in addition to tensors.
_PLAIN = (bool, int, float, str, bytes)


class Features(tuple[Tensor, ...]):
    """Output of the frozen part of a model for a batch, in place of the batch's inputs.

    Each tensor has one row per sample. A model without its frozen layers takes Features as its only
    argument.
    """

    __slots__ = ()


class KeptFeatures(NamedTuple):
    """Features of the samples of a batch that a store already holds.

    Attributes:
        values: features of these samples.
        rows: positions of these samples in the batch, int64 of shape (samples,), ascending.
    """

    values: Features
    rows: Tensor


class Batch(NamedTuple):
    """The samples of one step. Tensors have one row per sample, except inputs of jagged batches.

    Attributes:
        inputs: input of the model: a tensor, a tuple or dict of tensors, or an object that holds
            tensors.
        targets: the loss's targets: a structure like `inputs`, or None.
        weight: weight of each sample, of shape (size,), or None.
        indices: index of each sample in the data, int64 of shape (size,) on the CPU; None if
            the source does not know it.
        size: number of rows of the batch.
        copies: number of ranks that have this same batch; 1 if each has its own samples.
        is_copy: whether another rank's copy of the batch counts, so that this one does not.
        start: position of the batch's first sample among the samples of all ranks.
        whole: number of samples of all ranks together; 0 if it is not known.
        padding: number of rows at the end that only fill up the batch and are no samples.
        kept: features of samples that a store already holds. `inputs` then has rows only for all
            other samples, in batch order, or is () without such samples. A step adds the features
            (train/parts/features/).
        turns: for samples that may occur several times in an epoch, the turn of each, as
            `execution/turns.py` numbers turns: int64 of shape (size,) on the CPU; else None.
        is_jagged: whether the inputs lack a row for each sample, as flat ids with offsets, packed
            sequences and graphs do. Such a batch is never split.
    """

    inputs: Tensors
    targets: Tensors | None
    weight: Tensor | None
    indices: Tensor | None
    size: int
    copies: int = 1
    is_copy: bool = False
    start: int = 0
    whole: int = 0
    padding: int = 0
    kept: KeptFeatures | None = None
    turns: Tensor | None = None
    is_jagged: bool = False

    @property
    def samples(self) -> int:
        """Number of samples, without padding rows."""
        return self.size - self.padding

    def split(self, n: int) -> list[Batch]:
        """Return `n` micro-batches whose sizes differ by at most one; the larger come first.

        They are views: nothing is copied. A batch of fewer than `n` samples gives one micro-batch
        per sample, so that none is empty.

        Raises:
            DataError: a jagged batch would have to be split.
        """
        if n == 1:
            return [self]
        small, larger = divmod(self.size, min(n, self.size))
        pieces: list[Batch] = []
        start = 0
        while start < self.size:
            stop = start + small + (len(pieces) < larger)
            pieces.append(self.rows(start, stop))
            start = stop
        return pieces

    def rows(self, start: int, stop: int) -> Batch:
        """Return samples `start` to `stop` of the batch, as views.

        Raises:
            DataError: a jagged batch would have to be split.
        """
        if self.is_jagged:
            if start == 0 and stop >= self.size:
                return self
            raise DataError(
                f"a batch of {self.size:,} samples would have to be cut, and its inputs have no "
                "row for each sample (flat ids with offsets, packed sequences, graphs)",
                do="let the loader make smaller batches: such a batch is taken whole",
            )
        inputs, targets, weight, indices = map_tensors(lambda tensor: tensor[start:stop], self[:4])
        stop = min(stop, self.size)
        return self._replace(
            inputs=inputs,
            targets=targets,
            weight=weight,
            indices=indices,
            size=stop - start,
            start=self.start + start,
            whole=self.whole or self.size,
            padding=max(0, stop - max(start, self.samples)),
            turns=None if self.turns is None else self.turns[start:stop],
        )

    def first(self, count: int) -> Batch:
        """Return the first `count` samples, or fewer, as views; a jagged batch stays whole."""
        return self if self.is_jagged else self.rows(0, count)

    def repeated(self, size: int) -> Batch:
        """Return a batch of `size` samples that repeats this batch, to measure time and memory.

        A jagged batch stays as it is.
        """
        if self.is_jagged:
            return self

        def take(tensor: Tensor) -> Tensor:
            return tensor[torch.arange(size, device=tensor.device) % self.size]

        inputs, targets, weight = map_tensors(take, self[:3])
        return Batch(inputs, targets, weight, None, size)

    def without_padding(self) -> Batch:
        """Return the batch without padding rows; the same object if it has no padding rows.

        Weights are removed if all are one, since they were added with the padding rows.
        """
        if not self.padding:
            return self
        own = self.rows(0, self.samples)
        is_even = own.weight is not None and not bool((own.weight != 1).any())
        return own._replace(weight=None) if is_even else own

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch with inputs, targets and weight on `device`.

        Returns the same object if all tensors are on the device already. `indices` stay on the CPU:
        they identify samples and are not used in the computation.
        """
        if all(_is_on(tensor, device) for tensor in self.tensors()):
            return self
        return self.with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the batch: inputs, targets, weight and features."""
        features = None if self.kept is None else self.kept.values
        return (tensor for _, tensor in named_tensors("", (*self[:3], features)))

    def with_tensors(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `function` applied to each tensor of `tensors`."""
        inputs, targets, weight = map_tensors(function, self[:3])
        kept = self.kept
        if kept is not None:
            kept = kept._replace(values=map_tensors(function, kept.values))
        return self._replace(inputs=inputs, targets=targets, weight=weight, kept=kept)

    def to_memory_format(self, memory_format: torch.memory_format) -> Batch:
        """Return the batch with floating inputs of four dimensions laid out in `memory_format`.

        Returns the same object if nothing has to move.
        """

        def lay_out(tensor: Tensor) -> Tensor:
            if tensor.ndim != 4 or not tensor.is_floating_point():
                return tensor
            return tensor.contiguous(memory_format=memory_format)

        inputs = map_tensors(lay_out, self.inputs)
        before = (tensor for _, tensor in named_tensors("", self.inputs))
        after = (tensor for _, tensor in named_tensors("", inputs))
        if all(a is b for a, b in zip(before, after, strict=True)):
            return self
        return self._replace(inputs=inputs)


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same structure, lists as tuples, with `function` applied to each leaf.

    A leaf is a tensor, or any object that is no dict, tuple, list, number, text or None. Objects
    that hold tensors are copied.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, part) for key, part in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        made = (map_tensors(function, part) for part in value)
        return Features(made) if isinstance(value, Features) else tuple(made)
    if value is None or isinstance(value, _PLAIN):
        return value
    if tensors_of_object(value) is None:
        return function(value)
    return mapped_object(value, lambda part: map_tensors(function, part))


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a structure with its name, such as `inputs['image']` or `inputs.x`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (dict, tuple, list)) and not isinstance(value, PackedSequence):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors(f"{name}[{key!r}]", part)
    elif value is not None and not isinstance(value, _PLAIN):
        held = tensors_of_object(value)
        if held is None:
            yield name, value
        else:
            for key, part in held.items():
                yield from named_tensors(f"{name}.{key}", part)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a structure, without all other leaves."""
    return [part for _, part in named_tensors("", value) if isinstance(part, Tensor)]


def rows_of_samples(value: Any, batch: Batch) -> Any:
    """Return a model's output for the batch, without padding rows.

    A tensor without one row for each row of the batch is returned unchanged.
    """
    if not batch.padding:
        return value
    if isinstance(value, Tensor):
        return value[: batch.samples] if value.dim() and len(value) == batch.size else value
    if isinstance(value, dict):
        cut = copy(value)
        cut.update({key: rows_of_samples(part, batch) for key, part in value.items()})
        return cut
    if isinstance(value, (tuple, list)):
        parts = [rows_of_samples(part, batch) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    # "cuda" without a number means the current device.
    if tensor.device == device:
        return True
    return (
        tensor.device.type == device.type
        and device.index is None
        and (
            device.type == "cpu" or tensor.device.index == torch.accelerator.current_device_index()
        )
    )
