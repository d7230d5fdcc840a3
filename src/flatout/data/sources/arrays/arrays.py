"""Samples in memory: batches by one gather per tensor, without Python code per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import count, islice
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.data.batches.batch import Batch, Tensors, map_tensors, named_tensors
from flatout.data.batches.form import Form, Leaf
from flatout.data.batches.tensors import as_tensor, as_tensors, count_rows
from flatout.data.digests.digests import content_digest, digest_of, tensors_name
from flatout.data.execution.batch_sampler import BatchSampler, batches_of
from flatout.data.execution.claims import Claims, cuts_of
from flatout.data.execution.samples import Costs, IsWanted, LentRows
from flatout.data.execution.turns import Turns
from flatout.data.pipeline import Pipeline
from flatout.data.planner import FirstSamples
from flatout.data.reading.block import Block, Numbers, Values
from flatout.data.reading.buffers import Buffers
from flatout.data.stages import Options, Stage, Staged
from flatout.errors import DataError
from flatout.kernels import gather_rows

# torch's index_select does not support these unsigned dtypes; the values are signed dtypes of the
# same width.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_READY_MADE = (
    "give as many of each; data in memory are cut by rows, and inputs that have no row for each "
    "sample (flat ids with offsets, graphs) come in batches, from a DataLoader or as a list"
)
# _TOGETHER: maximum number of bytes that one call gathers for several batches; they stay in the
# CPU's cache until they are used. _MOST_TOGETHER: maximum number of batches that one call gathers.
_TOGETHER, _MOST_TOGETHER = 1 << 18, 32
# Views, one for each batch, that one call makes.
_VIEWS_TOGETHER = 64
# Maximum number of bytes that one call gathers on a GPU. The number of calls decides there: the
# host needs as long for a call as the GPU for a small kernel.
_TOGETHER_ON_DEVICE = 1 << 25


class Arrays(Staged[Pipeline]):
    """Inputs and targets in memory, not yet split into batches. Stages can be applied to them.

    Memory is shared with the given arrays, never copied (exceptions: another byte order,
    negative strides, and uint8 inputs to be scaled that are not contiguous). Dtypes do not change.

    Args:
        inputs: a tensor or numpy array with one row per sample, or a tuple, list or dict of them.
        targets: a structure like `inputs`, or None.
        weight: one number per sample, of shape (samples,), or None.
        scale: makes uint8 inputs float32 as `value * scale + shift`, batch by batch; in memory
            they stay uint8.
        shift: number that is added to `value * scale`.

    Attributes:
        inputs: tensor, or tuple or dict of tensors.
        targets: a structure like `inputs`, or None.
        weight: tensor of one weight per sample, or None.
        samples: number of samples.
        device: device of all tensors.

    Raises:
        DataError: lengths differ, a part holds no numbers or is empty, the tensors are on several
            devices, or there is no uint8 input to scale.
    """

    def __init__(
        self,
        inputs: Any,
        targets: Any = None,
        weight: Any = None,
        *,
        scale: float | None = None,
        shift: float | None = None,
    ) -> None:
        self.inputs = as_tensors("inputs", inputs)
        self.targets = None if targets is None else as_tensors("targets", targets)
        self.weight = None if weight is None else as_tensor("weight", weight)
        self.samples = count_rows(self.inputs, self.targets, self.weight, do=_READY_MADE)
        if self.samples == 0:
            raise DataError("the data is empty: expected at least 1 sample, found 0")
        self.device = _only_device(self._named())
        self.scale, self.shift = scale, shift
        if scale is not None or shift is not None:
            dtypes = {tensor.dtype for _, tensor in named_tensors("inputs", self.inputs)}
            if torch.uint8 not in dtypes:
                names = ", ".join(sorted(map(_dtype_word, dtypes)))
                raise DataError(f"scale and shift are for uint8 inputs, found {names}")
            self.inputs = map_tensors(_contiguous_bytes, self.inputs)

    def __repr__(self) -> str:
        parts = [
            f"{name} {_dtype_word(tensor.dtype)} {tuple(tensor.shape)}"
            for name, tensor in self._named()
        ]
        return f"Arrays({', '.join(parts)})"

    def __len__(self) -> int:
        return self.samples

    def _with(self, stage: Stage) -> Pipeline:
        return Pipeline(self, (stage,))

    def begin(self, options: Options, say: Callable[[str], None]) -> FirstSamples:
        """Return the samples to which the stages are applied."""
        return FirstSamples(ArraySamples(self), direct=partial(ArraySource, self))

    def part(self, start: int, stop: int) -> Arrays:
        """Return samples `start` to `stop`, as views."""
        inputs, targets, weight = map_tensors(
            lambda tensor: tensor[start:stop], (self.inputs, self.targets, self.weight)
        )
        return Arrays(inputs, targets, weight, scale=self.scale, shift=self.shift)

    def on(self, device: torch.device) -> Arrays:
        """Return a copy of all tensors on a device."""
        inputs, targets, weight = map_tensors(
            lambda tensor: tensor.to(device), (self.inputs, self.targets, self.weight)
        )
        return Arrays(inputs, targets, weight, scale=self.scale, shift=self.shift)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self._named())

    @property
    def versions(self) -> list[int]:
        """Number of times that torch has written into each tensor."""
        return [tensor._version for _, tensor in self._named()]

    def describe(self) -> str:
        """Return a line such as "1,437 samples in memory, uint8 1x28x28"."""
        place = "memory" if self.device.type == "cpu" else f"memory of {self.device}"
        shapes = " + ".join(_shape_words(t) for _, t in named_tensors("inputs", self.inputs))
        return f"{self.samples:,} samples in {place}, {shapes}"

    @cached_property
    def digest(self) -> str:
        """16 hex digits over names, dtypes, shapes and bytes; see `content_digest`."""
        parts = [f"{name} {content_digest(tensor)}" for name, tensor in self._named()]
        return digest_of(f"{self.scale} {self.shift}", *parts)

    @cached_property
    def _label_range(self) -> tuple[int, int] | None:
        labels = self.targets
        if not isinstance(labels, Tensor) or labels.numel() == 0:
            return None
        if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
            return None
        # int64, because torch has no minimum of the wider unsigned dtypes.
        low, high = labels.long().aminmax()
        return int(low), int(high)

    def labels_range(self) -> tuple[int, int] | None:
        """Return the smallest and largest target, if the targets are one tensor of integers."""
        return self._label_range

    def label_array(self) -> npt.NDArray[Any] | None:
        """Return the targets, if they are one array."""
        targets = self.targets
        return targets.detach().cpu().numpy() if isinstance(targets, Tensor) else None

    def _named(self) -> list[tuple[str, Tensor]]:
        parts = {"inputs": self.inputs, "targets": self.targets, "weight": self.weight}
        return [pair for name, part in parts.items() for pair in named_tensors(name, part)]


class ArraySource:
    """Batches of `Arrays`.

    Shuffled batches are gathered into new memory, up to 32 small batches at once, so a batch stays
    valid while it is referenced. Batches in the given order are views of the data, unless they are
    scaled or pinned. Data on a GPU is gathered there. The order of an epoch is computed once, when
    the epoch begins.

    Attributes:
        data: inputs and targets in memory.
        plan: batch sampler that splits the data into batches.
    """

    seekable = True
    counted = True
    can_claim = True

    def __init__(
        self, data: Arrays, plan: BatchSampler, *, pin_memory: bool = False, views: bool = True
    ) -> None:
        self.data = data
        self._views = views and not plan.shuffle
        self.plan = plan
        self.batch_size: int | None = plan.batch_size
        self.steps: int | None = plan.steps
        self.samples: int | None = plan.used
        self._pin = pin_memory and data.device.type == "cpu" and torch.accelerator.is_available()
        self._peeked: Tensor | None = None  # the order of epoch 0
        self._scaled = data.scale is not None or data.shift is not None
        self._take = (
            _taker(data.inputs, partial(self._tensor_taker, scaled=self._scaled)),
            _taker(data.targets, self._tensor_taker),
            _taker(data.weight, self._tensor_taker),
        )
        # For a small batch, the call to gather takes longer than copying the bytes.
        row = data.nbytes // data.samples
        most = _TOGETHER if data.device.type == "cpu" else _TOGETHER_ON_DEVICE
        fitting = most // max(1, row * plan.batch_size)
        self._together = 1 if self._pin else max(1, min(_MOST_TOGETHER, fitting))

    def on(self, device: torch.device) -> ArraySource:
        """Return the same batches, gathered on a device from a copy of the data there."""
        # No batch is a view: a write into a batch does not change the data.
        return ArraySource(self.data.on(device), self.plan, views=False)

    @property
    def digest(self) -> str:
        """Digest of the data, without the batches; see `Arrays.digest`."""
        return self.data.digest

    def describe(self) -> str:
        """Return one line for the user."""
        return f"{self.data.describe()}, {self.plan.describe()}"

    def labels_range(self) -> tuple[int, int] | None:
        """Return the smallest and largest target, if the targets are one tensor of integers."""
        return self.data.labels_range()

    def peek(self, count: int) -> list[Batch]:
        """Return the first batches of epoch 0, which epoch 0 then still contains."""
        order = self._order(0)
        self._peeked = order
        batches = list(islice(self.batches(0), count))
        self._peeked = order
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: (epoch, step) is the whole state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from `start_step` on.

        Raises:
            DataError: the epoch has no such step.
        """
        first = self.plan.first(start_step)
        order = self._order(epoch)
        if not self.plan.shuffle:
            # batches contain views of the order, and a user may write into them
            order = order.clone()
        if not self._views or self._scaled or self._pin:
            return self._gathered(order, first)
        return self._viewed(order, first)

    def claimed(self, epoch: int, claims: Claims) -> Iterator[Batch]:
        """Yield the parts of an epoch's batches that a rank claims, from the first unused one.

        Args:
            epoch: index of the epoch, from 0.
            claims: claims of the rank.
        """
        order, cuts = self._order(epoch), cuts_of(self.plan, claims.parts)
        on_device = self._on_device(order)
        take_inputs, take_targets, take_weight = self._take
        for place in count(claims.used):
            claim = claims.at(place)
            if claim is None:
                return
            start, stop = cuts[claim.part].bounds(claim.step)
            at = on_device[start:stop]
            indices = order[start:stop].clone()  # other parts also read the order
            taken = take_inputs(at), take_targets(at), take_weight(at)
            yield Batch(*taken, indices, stop - start)

    def _order(self, epoch: int) -> Tensor:
        order, self._peeked = self._peeked, None
        if order is None or epoch:
            return torch.from_numpy(self.plan.order(epoch))
        return order

    def _on_device(self, order: Tensor) -> Tensor:
        if self.data.device.type == "cuda":
            order = order.pin_memory()
        return order.to(self.data.device, non_blocking=True)

    def _gathered(self, order: Tensor, first: int) -> Iterator[Batch]:
        take_inputs, take_targets, take_weight = self._take
        size, used = self.plan.batch_size, self.plan.used
        on_device = self._on_device(order)
        together = size * self._together
        for begin in range(first, used, together):
            end = min(begin + together, used)
            at = on_device[begin:end]
            indices = at if on_device is order else order[begin:end]
            taken = take_inputs(at), take_targets(at), take_weight(at), indices
            parts = [_cut(part, size, -(-(end - begin) // size)) for part in taken]
            for inputs, targets, weight, own in zip(*parts, strict=True):
                # `len` of a tensor runs Python code
                yield Batch(inputs, targets, weight, own, own.shape[0])

    def _viewed(self, order: Tensor, first: int) -> Iterator[Batch]:
        data, size, used = self.data, self.plan.batch_size, self.plan.used
        together = size * _VIEWS_TOGETHER
        for begin in range(first, used, together):
            end = min(begin + together, used)
            count = -(-(end - begin) // size)
            whole = (data.inputs, data.targets, data.weight, order)
            # `split` makes views that torch tracks, so `versions` counts a write into a view.
            rows = [_rows(part, begin, end) for part in whole]
            parts = [_cut(part, size, count, Tensor.split) for part in rows]
            for inputs, targets, weight, own in zip(*parts, strict=True):
                yield Batch(inputs, targets, weight, own, own.shape[0])

    def _tensor_taker(self, tensor: Tensor, scaled: bool = False) -> Callable[[Tensor], Tensor]:
        if scaled and tensor.dtype == torch.uint8:
            scale = 1.0 if self.data.scale is None else self.data.scale
            shift = 0.0 if self.data.shift is None else self.data.shift
            if tensor.device.type == "cpu":
                return partial(_gather_scaled, tensor, scale, shift, self._pin)
            return partial(_gather_scaled_on_device, tensor, scale, shift)
        if tensor.dtype in _SIGNED:
            take = self._tensor_taker(tensor.view(_SIGNED[tensor.dtype]))
            return lambda indices: take(indices).view(tensor.dtype)
        if self._pin:
            return partial(_gather_pinned, tensor)
        return partial(torch.index_select, tensor, 0)


def _rows(value: Any, start: int, stop: int) -> Any:
    return map_tensors(lambda tensor: tensor[start:stop], value)


def _cut(
    value: Any,
    size: int,
    count: int,
    split: Callable[[Tensor, int], Sequence[Tensor]] = Tensor.unsafe_split,
) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return split(value, size)
    if not value:
        return [value] * count
    if isinstance(value, dict):
        columns = [_cut(part, size, count, split) for part in value.values()]
        return [dict(zip(value, parts, strict=True)) for parts in zip(*columns, strict=True)]
    return list(zip(*(_cut(part, size, count, split) for part in value), strict=True))


class ArraySamples:
    """Rows of `Arrays`. Follows `flatout.data.execution.samples.Samples`."""

    random = True
    name = "gather"
    draws = False
    in_memory = True

    def __init__(self, data: Arrays) -> None:
        self.data = data
        self.probe = 0  # the first row that is used
        self.rows = data.samples
        self._columns: dict[str, Tensor] = {}
        trees = {"inputs": data.inputs, "targets": data.targets, "weight": data.weight}
        for name, tree in trees.items():
            self._columns.update(named_tensors(name, tree))
        # Map the leaves in the order of the names, so that each tensor gets its own name.
        names = iter(list(self._columns))
        self.form = Form(
            *(map_tensors(lambda _: Leaf(next(names)), tree) for tree in trees.values())
        )
        self._peeked: Tensor | None = None  # the order of epoch 0
        self._scaled = data.scale is not None or data.shift is not None

    @property
    def digest(self) -> str:
        return self.data.digest

    def content(self) -> str | None:
        return digest_of(self.digest, tensors_name(self._columns))

    def inputs_content(self) -> str:
        named = [(n, t) for n, t in self._columns.items() if n.startswith("inputs")]
        return digest_of(f"{self.data.scale} {self.data.shift}", tensors_name(dict(named)))

    def targets(self) -> npt.NDArray[Any] | None:
        return self.data.label_array()

    def make(self, numbers: Numbers, buffers: Buffers, epoch: Turns, costs: Costs) -> Block:
        start = clock()
        self._check()
        columns = {n: self._take(n, t, numbers, buffers) for n, t in self._columns.items()}
        costs.add(self.name, clock() - start)
        return Block(columns, numbers)

    def lend(self, numbers: Numbers, buffers: Buffers, costs: Costs, wanted: IsWanted) -> LentRows:
        start = clock()
        self._check()
        columns: dict[str, Values] = {}
        whole: dict[str, Values] = {}
        for name, tensor in self._columns.items():
            array = tensor.detach().numpy()
            if not self._is_scaled(name, tensor) and wanted(name, array):
                whole[name] = array
            else:
                columns[name] = self._take(name, tensor, numbers, buffers)
        costs.add(self.name, clock() - start)
        return LentRows(Block(columns, numbers), whole, numbers)

    def _check(self) -> None:
        if self.data.device.type != "cpu":
            raise DataError(
                f"the data are on {self.data.device}: only shuffle, split and batch work there",
                do="hand over data that are on the CPU",
            )
        for name, tensor in self._columns.items():
            if tensor.dtype == torch.bfloat16:
                raise DataError(
                    f"{name}: numpy has no bfloat16, so only shuffle, split and batch take it",
                    do="hand over float32; the model's own precision is up to the Recipe",
                )

    def _is_scaled(self, name: str, tensor: Tensor) -> bool:
        return self._scaled and tensor.dtype == torch.uint8 and name.startswith("inputs")

    def _take(self, name: str, tensor: Tensor, numbers: Numbers, buffers: Buffers) -> Values:
        array: Any = tensor.detach().numpy()
        if self._is_scaled(name, tensor):
            out = buffers.empty((len(numbers), *array.shape[1:]), np.float32)
            return gather_rows(array, numbers, out, self.data.scale, self.data.shift)
        if not array.flags.c_contiguous:
            # np.take would first copy the whole array.
            return np.ascontiguousarray(array[numbers])
        out = buffers.empty((len(numbers), *array.shape[1:]), array.dtype)
        return gather_rows(array, np.ascontiguousarray(numbers), out)

    def where(self, number: int) -> str:
        return f"sample {number:,}"


def arrays(
    inputs: Any,
    targets: Any = None,
    weight: Any = None,
    *,
    scale: float | None = None,
    shift: float | None = None,
) -> Arrays:
    """Return data in memory, to which stages can be applied: `arrays(x, y).shuffle(1).batch(512)`.

    Args and errors are those of `Arrays`.
    """
    return Arrays(inputs, targets, weight, scale=scale, shift=shift)


def array_source(
    inputs: Any,
    targets: Any = None,
    weight: Any = None,
    *,
    scale: float | None = None,
    shift: float | None = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    pin_memory: bool = False,
    clip_batch: bool = False,
) -> ArraySource:
    """Return batches of data in memory: an `Arrays`, or inputs, targets and more as for `Arrays`.

    The other arguments are those of `as_source`.
    """
    if isinstance(inputs, Arrays):
        if any(value is not None for value in (targets, weight, scale, shift)):
            raise DataError("Arrays have their own targets, weight, scale and shift; found others")
        data = inputs
    else:
        data = Arrays(inputs, targets, weight, scale=scale, shift=shift)
    plan = batches_of(
        data.samples,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        clip_batch=clip_batch,
    )
    return ArraySource(data, plan, pin_memory=pin_memory)


def _taker(
    value: Tensors | None, make: Callable[[Tensor], Callable[[Tensor], Tensor]]
) -> Callable[[Tensor], Any]:
    if value is None:
        return lambda indices: None
    if isinstance(value, dict):
        named = {key: _taker(part, make) for key, part in value.items()}
        return lambda indices: {key: take(indices) for key, take in named.items()}
    if isinstance(value, tuple):
        parts = [_taker(part, make) for part in value]
        return lambda indices: tuple([take(indices) for take in parts])
    return make(value)


def _gather_pinned(tensor: Tensor, indices: Tensor) -> Tensor:
    # Memory of torch's caching host allocator, which reuses a block only after pending copies from
    # it.
    out = torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, indices, out=out)


def _gather_scaled(
    tensor: Tensor, scale: float, shift: float, pin: bool, indices: Tensor
) -> Tensor:
    out = torch.empty((len(indices), *tensor.shape[1:]), dtype=torch.float32, pin_memory=pin)
    gather_rows(tensor.numpy(), indices.numpy(), out.numpy(), scale, shift)
    return out


def _gather_scaled_on_device(tensor: Tensor, scale: float, shift: float, indices: Tensor) -> Tensor:
    # Two kernels round twice, as the CPU does, so the values are equal.
    return torch.index_select(tensor, 0, indices).float().mul_(scale).add_(shift)


def _only_device(named: list[tuple[str, Tensor]]) -> torch.device:
    first, device = named[0][0], named[0][1].device
    for name, tensor in named[1:]:
        if tensor.device != device:
            raise DataError(
                f"{first} is on {device}, but {name} is on {tensor.device}",
                do="put all of the data on one device, or leave it on the CPU",
            )
    return device


def _contiguous_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if tensor.dtype == torch.uint8 else tensor


def _dtype_word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_words(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape[1:]))
    return f"{_dtype_word(tensor.dtype)} {shape or 'numbers'}"
