"""Inputs of Keras' `fit` as a Source: Flatout reads arrays, Keras' adapters read other inputs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader

from flatout.data import (
    Arrays,
    EpochReader,
    IterableSource,
    Pipeline,
    Source,
    Workers,
    are_arrays,
    array_source,
    as_source,
    as_tensor,
    map_tensors,
    name_digest,
    named_faults,
)
from flatout.errors import DataError

# Key in a batch's targets for sample weights that have another shape than (samples,).
WEIGHTS = "flatout:sample_weight"


def as_keras_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    class_weight: dict[int, float] | None = None,
    steps: int | None = None,
    workers: Workers | Literal["auto"] = 0,
    restarts: bool = False,
) -> Source:
    """Return a Source of any input that `keras.Model.fit` takes.

    Args:
        x: inputs, or an iterable that yields (x, y) or (x, y, sample_weight) in batches.
        y: targets, for arrays.
        sample_weight: a weight for each sample, or weights in the structure of `y`.
        batch_size: samples per batch of arrays; 32 by default.
        shuffle: whether the samples of arrays have a new random order in each epoch.
        seed: seed of the random orders of arrays.
        class_weight: weight of each class number; not applied to a Pipeline or Arrays.
        steps: number of batches in an epoch, if the data do not define it.
        restarts: whether each pass of `steps` begins with the first batch, as an evaluation in
            Keras does. Otherwise it continues after the last pass, as training in Keras does.
        workers: "thread" reads a PyDataset, generator or loader ahead; "auto" does so if it is
            measured faster.

    Raises:
        DataError: `x` is of no known kind, or its parts do not fit together.
    """
    if x is None:
        raise DataError("x is None: expected inputs", do="pass arrays, or an iterable of batches")
    if isinstance(x, (Arrays, Pipeline)):
        if y is not None or sample_weight is not None:
            raise DataError(
                f"y or sample_weight is given beside {type(x).__name__}, which holds its own",
                do="put them into it: flatout.data.arrays(x, y, weight)",
            )
        if steps is not None:
            raise DataError(
                f"steps are given for {type(x).__name__}, which defines itself where a pass ends",
                do="leave the steps out, and pass a part of the source: first, rest = "
                "source.split(0.2, by='order')",
            )
        return as_source(x, batch_size=batch_size, shuffle=shuffle, seed=seed, clip_batch=True)
    if steps is not None or not are_arrays(x):
        restarts = restarts and steps is not None
        return _by_keras(
            x, y, sample_weight, batch_size, shuffle, class_weight, steps, workers, restarts
        )
    parts = {"inputs": x, "targets": y, "weight": sample_weight}
    x, y, sample_weight = (_in_floatx(name, part) for name, part in parts.items())
    if class_weight is not None:
        sample_weight = _class_weights(y, sample_weight, class_weight)
    if sample_weight is not None and not _is_one_a_sample(sample_weight):
        y, sample_weight = {"targets": y, WEIGHTS: sample_weight}, None
    return array_source(
        x, y, sample_weight, batch_size=batch_size, shuffle=shuffle, seed=seed, clip_batch=True
    )


def _class_weights(y: Any, sample_weight: Any, class_weight: dict[int, float]) -> Any:
    from keras.src.trainers.data_adapters import data_adapter_utils

    if sample_weight is not None:
        raise DataError(
            "class_weight and sample_weight are given at the same time",
            do="multiply them into one sample_weight",
        )
    weights = data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
    return _in_floatx("weight", weights)


# -- arrays ----------------------------------------------------------------------------------------


def _in_floatx(name: str, value: Any) -> Any:
    """Return arrays as tensors, floating-point arrays in the precision of Keras' adapters."""
    import keras

    wanted = getattr(torch, keras.config.floatx())

    def convert(array: Any) -> torch.Tensor:
        tensor = as_tensor(name, array if torch.is_tensor(array) else np.asarray(array))
        return tensor.to(wanted) if tensor.is_floating_point() else tensor

    return map_tensors(convert, value)


def _is_one_a_sample(weight: Any) -> bool:
    return torch.is_tensor(weight) and weight.dim() == 1


# -- other kinds
# ------------------------------------------------------------------------------------


def _by_keras(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    shuffle: bool,
    class_weight: dict[int, float] | None,
    steps: int | None,
    workers: Workers | Literal["auto"],
    restarts: bool,
) -> Source:
    from keras.src.backend.torch.trainer import TorchEpochIterator
    from keras.src.trainers.epoch_iterator import EpochIterator
    from keras.utils import PyDataset

    # A torch DataLoader over a PyDataset makes no batch faster, and draws random numbers from
    # torch's generator.
    kind = EpochIterator if isinstance(x, PyDataset) else TorchEpochIterator
    try:
        iterator = kind(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=shuffle,
            class_weight=class_weight,
        )
    except (ValueError, TypeError) as error:
        raise DataError(f"Keras does not take this as data: {error}") from error
    if isinstance(x, DataLoader):
        iterator.data_adapter._dataloader = _Watched(x)
    draws_order = shuffle and not isinstance(x, Iterator)
    batches = _KerasBatches(iterator, draws_order=draws_order, restarts=restarts)
    return IterableSource(
        batches.begin,
        name=f"batches of a {type(x).__name__}, read by Keras",
        digest=lambda: name_digest(x, None, class_weight),
        steps=iterator.num_batches,
        peek=batches.peek,
        reader=None if _has_readers(x) else EpochReader(workers, x),
        reopens=not isinstance(x, Iterator),
        own_parts=[None, getattr(x, "sampler", None)],
    )


def _has_readers(x: Any) -> bool:
    by_torch = getattr(x, "num_workers", 0)
    return (
        bool(by_torch or getattr(x, "use_multiprocessing", False)) or getattr(x, "workers", 1) > 1
    )


class _Watched:
    """A DataLoader whose errors name its workers if they fail or yield nothing."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return named_faults(self._loader)


class _KerasBatches:
    """Epochs of Keras' own iterator, from which the next batch can be read in advance."""

    def __init__(self, iterator: Any, *, draws_order: bool, restarts: bool) -> None:
        self._iterator = iterator
        self._draws_order, self._restarts = draws_order, restarts
        self._running: Generator[Any, None, None] | None = None
        self._held: list[Any] = []

    def peek(self, count: int) -> list[Any]:
        if self._running is None:
            self._running = self._epoch()
        while len(self._held) < count:
            batch = next(self._running, None)
            if batch is None:
                break
            self._held.append(batch)
        return self._held[:count]

    def begin(self, epoch: int) -> Iterator[Any]:
        if self._restarts or (self._draws_order and self._running is not None):
            if self._running is not None:
                self._running.close()
            self._iterator.reset()
            self._running, self._held = None, []
        running = self._epoch() if self._running is None else self._running
        held, self._running, self._held = self._held, None, []
        yield from held
        yield from running

    def _epoch(self) -> Generator[Any, None, None]:
        from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

        for _, _, data in self._iterator:
            x, y, weight = unpack_x_y_sample_weight(data[0])
            parts = {"inputs": x, "targets": y, "weight": weight}
            x, y, weight = (_in_floatx(name, part) for name, part in parts.items())
            if weight is not None and not _is_one_a_sample(weight):
                y, weight = {"targets": y, WEIGHTS: weight}, None
            yield (x, y, weight)
