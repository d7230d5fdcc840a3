"""The dataset of the script's latest batch."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple
from weakref import ref

from flatout.hooks import wrap


class Dataset(NamedTuple):
    """A dataset from which batches are made.

    Attributes:
        identity: number that identifies the dataset.
        name: name of its class.
        samples: number of samples; None if unknown.
        passes: number of passes over it that have begun.
        is_guessed: True if no DataLoader gives its batches. Then a counted pass may be only a part
            of a real pass.
    """

    identity: int
    name: str
    samples: int | None
    passes: int
    is_guessed: bool = False


class _Known(NamedTuple):
    """A dataset that a loader has used."""

    made: ref[Any]
    kind: type
    samples: int | None
    identity: int


class DatasetNow:
    """Tracks from which dataset the DataLoaders' latest batch is.

    Attributes:
        dataset: the dataset of the latest batch; None before the first batch.
    """

    def __init__(self) -> None:
        self.dataset: Dataset | None = None
        self._passes: Counter[int] = Counter()
        self._known: dict[int, _Known] = {}
        self._trains: bool | None = None

    def watch(self) -> None:
        """Hook into the iterators of DataLoaders."""
        owner = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
        wrap(owner, "__next__", "cures", self._around)

    def _around(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            begins = not getattr(iterator, "_num_yielded", 1)
            batch = original(iterator)
            dataset = iterator._dataset
            identity, samples = self._identity_of(dataset)
            self._passes[identity] += begins
            name, passes = type(dataset).__name__, self._passes[identity]
            self.dataset = Dataset(identity, name, samples, passes)
            return batch

        return __next__

    def _identity_of(self, dataset: Any) -> tuple[int, int | None]:
        known = self._known.get(id(dataset))
        if known is not None and known.made() is dataset:
            return known.identity, known.samples
        try:
            made = ref(dataset)
        except TypeError:  # a type without weak references, such as a list
            return id(dataset), _samples_of(dataset)
        kind, samples = type(dataset), _samples_of(dataset)
        gone = [
            at
            for at, value in self._known.items()
            if value.made() is None and (value.kind, value.samples) == (kind, samples)
        ]
        identity = self._known.pop(gone[0]).identity if gone else id(dataset)
        self._known[id(dataset)] = _Known(made, kind, samples, identity)
        return identity, samples

    def called(self, trains: bool) -> None:
        """Record that a model is called with a batch.

        Without a DataLoader, a pass over the training samples begins when the script switches from
        evaluation to training. A pass over the evaluation samples begins when it switches back.
        """
        if self.dataset is not None and not self.dataset.is_guessed:
            return
        identity, name = (-1, "the script") if trains else (-2, "the script's evaluation")
        self._passes[identity] += trains is not self._trains
        self._trains = trains
        self.dataset = Dataset(identity, name, None, self._passes[identity], is_guessed=True)


def _samples_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # a stream has no length
        return None
