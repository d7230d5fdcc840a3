"""Worker processes of an iterable Dataset that are kept over epochs.

New workers begin an epoch with a copy of the Dataset as it then is, and with seeds of the epoch.
Kept workers get the same copy and the same seeds, through shared memory.
"""

from __future__ import annotations

import dis
import io
import pickle
import random
from collections.abc import Iterator
from inspect import isfunction
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data._utils.worker import _generate_state

# Maximum bytes of a pickled Dataset. A larger one takes longer to unpickle than a process to start.
_MOST_BYTES = 1 << 20
# Bytes by which the pickled Dataset may grow, for example by attributes that are set later.
_SPARE_BYTES = 4096
# Methods by which a class decides what its copies hold; such a copy may differ from a forked one.
_OWN_COPIES = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__")


class KeptWorkers:
    """Reads a Dataset by worker processes that live as long as this object.

    Args:
        fresh: a DataLoader of the Dataset with new workers in each epoch. It is used in epochs in
            which a copy of the Dataset by pickling may differ from a copy by forking.
    """

    def __init__(self, fresh: DataLoader[Any]) -> None:
        self._fresh = fresh
        self._kept: DataLoader[Any] | None = None
        self._state = torch.zeros(0, dtype=torch.uint8)

    def epoch(self, seed: int) -> Iterator[Any]:
        """Return the batches of an epoch.

        Args:
            seed: seed from which the epoch's workers derive their seeds.
        """
        samples = self._fresh.dataset
        data = _pickled(samples)
        assert self._fresh.generator is not None
        self._fresh.generator.manual_seed(seed)
        if data is None:
            self._kept = None
            return iter(self._fresh)
        base_seed = _base_seed(self._fresh.generator)
        state = pickle.dumps((base_seed, data))
        if self._kept is None or len(state) > len(self._state):
            room = torch.zeros(2 * len(state) + _SPARE_BYTES, dtype=torch.uint8)
            self._state = room.share_memory_()  # type: ignore[no-untyped-call]
            self._kept = _kept_loader(self._fresh, _Epoch(samples, self._state))
        self._state.numpy()[: len(state)] = np.frombuffer(state, np.uint8)
        return self._read(iter(self._kept))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        except Exception:
            self._kept = None  # a failed iterator cannot serve another epoch
            raise


class _Epoch(IterableDataset[Any]):
    """Gives the samples of the Dataset that lies pickled in shared memory."""

    def __init__(self, samples: Any, state: torch.Tensor) -> None:
        self._samples, self._state = samples, state

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Any]:
        base_seed, data = pickle.loads(self._state.numpy().tobytes())
        samples, worker = pickle.loads(data), get_worker_info()
        assert worker is not None
        object.__setattr__(worker, "seed", base_seed + worker.id)
        object.__setattr__(worker, "dataset", samples)
        random.seed(worker.seed)
        torch.manual_seed(worker.seed)
        np.random.seed(_generate_state(base_seed, worker.id))  # type: ignore[no-untyped-call]
        yield from samples


def _kept_loader(fresh: DataLoader[Any], samples: _Epoch) -> DataLoader[Any]:
    return DataLoader(
        samples,
        batch_size=fresh.batch_size,
        drop_last=fresh.drop_last,
        num_workers=fresh.num_workers,
        collate_fn=fresh.collate_fn,
        pin_memory=fresh.pin_memory,
        persistent_workers=True,
        generator=torch.Generator(),
    )


def _base_seed(generator: torch.Generator) -> int:
    """Draw the seed as torch's DataLoader does when it starts workers."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _pickled(samples: Any) -> bytes | None:
    own = [kind for kind in type(samples).__mro__ if kind.__module__ != "torch.utils.data.dataset"]
    names = {name for kind in own[:-1] for name in vars(kind)}
    functions = [value for kind in own for value in vars(kind).values() if isfunction(value)]
    is_plain = not names.intersection(_OWN_COPIES) and not any(map(_sets_globals, functions))
    if not is_plain or isinstance(samples, IterDataPipe):
        return None
    data = io.BytesIO()
    try:
        _Pickler(data).dump(samples)
    except Exception:
        return None
    return data.getvalue() if data.tell() <= _MOST_BYTES else None


class _Pickler(pickle.Pickler):
    """Refuses tensors in shared memory, which forked processes share and copies do not."""

    def reducer_override(self, item: Any) -> Any:
        if torch.is_tensor(item) and item.is_shared():  # type: ignore[no-untyped-call]
            raise pickle.PicklingError("a tensor in shared memory")
        return NotImplemented


def _sets_globals(function: FunctionType) -> bool:
    return any(step.opname == "STORE_GLOBAL" for step in dis.get_instructions(function))
