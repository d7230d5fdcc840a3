"""Stored outputs of frozen layers, by sample: a sample is identified by its bytes.

The origin and the order of batches do not matter. If no sample occurs twice, the samples are
changed at random, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.cures.dataset_now import DatasetNow
from flatout.cures.record import fill, leave
from flatout.data import NAMES_VERSION, NamedStore, RowPart, feature_key

FIELD = "script.features"
# A dataset changes its samples at random if new samples exceed its length by this factor.
_TOO_MANY = 1.25
# Share of a device's free memory for stored outputs. The share is small, since a script that runs
# out of memory ends.
_DEVICE_SHARE = 0.2
# Number of changes of the weights, without a repeated sample in between, after which nothing is
# kept.
_CHANGES = 3
# Maximum number of samples whose names are remembered although the samples are not kept.
_NAMES = 1 << 19


@dataclass(frozen=True)
class Keeping:
    """Storage place of kept samples, the dataset in use, and limits.

    Attributes:
        where: "memory" or "disk".
        now: tracks the dataset of the latest batch.
        checked: number of batches that are computed, as a check, although all samples are kept.
        ahead: number of samples that a loader prefetches, which may be counted for another dataset.
        unproven: share of the free room that is filled before a sample occurs again, if the number
            of samples is unknown.
    """

    where: Any
    now: DatasetNow
    checked: int = 4
    ahead: int = 64
    unproven: float = 0.25


@dataclass
class ModeStore:
    """A store for outputs of layers in one mode.

    Attributes:
        store: the stored outputs, by the name of the sample.
        parts: tensors that are stored for each sample.
        found: number of samples in the store when it was opened.
        has_come_again: True if a sample has occurred whose outputs were in the store already.
    """

    store: NamedStore
    parts: list[RowPart]
    found: int = 0
    has_come_again: bool = False

    def end(self) -> None:
        """Close the store; remove what this run has kept if no sample occurred again."""
        if self.has_come_again or self.found:
            self.store.close()
        else:
            self.store.discard()


@dataclass
class _Given:
    """Counts of samples of one dataset.

    Attributes:
        new: number of new samples.
        again: number of samples that were kept already.
        first: number of samples in the first pass.
    """

    new: int = 0
    again: int = 0
    first: int = 0


class KeptSamples:
    """Outputs of some layers, by sample."""

    def __init__(self, name: str, keeping: Keeping) -> None:
        self._name = name
        self._keeping = keeping
        self._given: dict[int, _Given] = {}  # counts by `identity` of the dataset
        self._is_over = False
        self._kept: dict[Any, ModeStore] = {}  # stores by mode of the layers
        # Names of samples that are not kept until a sample occurs again; None if samples are kept.
        self._doubted: set[bytes] | None = None
        self._is_proven = False  # True once samples have occurred again
        self._changes = 0
        self._unchecked = self._keeping.checked

    def _forget(self) -> None:
        for kept in self._kept.values():
            kept.store.close()
        self._kept = {}
        self._given = {}
        self._unchecked = self._keeping.checked

    def _changed(self) -> None:
        has_come_again = any(kept.has_come_again for kept in self._kept.values())
        self._changes = 0 if has_come_again else self._changes + 1
        self._forget()
        if self._changes == _CHANGES:
            self._end(f"the weights of {self._name} change while it trains")

    def _begin(
        self, mode: Any, parts: list[RowPart], tensors: Any, facts: Any, device: Any
    ) -> ModeStore:
        """Open the store of a mode."""
        facts = {**facts, "mode": repr(mode), "names": NAMES_VERSION}
        store = NamedStore.open(feature_key(tensors, facts), parts, self._keeping.where)
        if device.type == "cuda":
            dataset = self._keeping.now.dataset
            expected = 0 if dataset is None else dataset.samples or 0
            store.lie_on(device, len(parts), expected, share=_DEVICE_SHARE)
        store.say = lambda line: leave(FIELD, line.removeprefix("features: "))
        self._kept[mode] = kept = ModeStore(store, parts, store.kept)
        fill(is_full=False)
        return kept

    def _look(self, kept: ModeStore, names: list[bytes]) -> Any:
        places = kept.store.places(names)
        kept.has_come_again |= bool((places >= 0).any())
        if (places >= 0).all():
            fill(is_full=True)
        return places

    def _keep(self, kept: ModeStore, names: list[bytes], given: Sequence[Any], again: int) -> None:
        """Keep rows of samples, unless samples seem to change each time."""
        forms = [(tuple(item.shape[1:]), item.dtype) for item in given]
        if forms != [(part.shape, part.dtype) for part in kept.parts]:
            return  # the outputs have another form than the first outputs
        if self._is_random(kept, len(names), again):
            return
        store = kept.store
        store.put(names, given)
        if kept.has_come_again:
            return
        why = f"none of {store.kept:,} samples repeated in {self._name}"
        dataset = self._keeping.now.dataset
        known = 0 if dataset is None else dataset.samples or 0
        is_known = known > 0 and store.kept - kept.found <= _TOO_MANY * known + self._keeping.ahead
        room = self._keeping.unproven * store.free
        if store.is_full:
            kept.end()
            self._end(why)
        elif not is_known and not self._is_proven and store.bytes > room:
            self._doubt(why)

    def _is_random(self, kept: ModeStore, new: int, again: int) -> bool:
        dataset = self._keeping.now.dataset
        if dataset is None:
            return False
        # An item of a dataset may be several samples, so that the first pass has more samples than
        # items.
        is_later = dataset.passes > 1
        result = self._given.setdefault(dataset.identity, _Given())
        result.new, result.again = result.new + new, result.again + again
        if not is_later:
            result.first += new + again
        count = result.first if dataset.samples is None else dataset.samples
        most = _TOO_MANY * (count or 0) + self._keeping.ahead
        if result.again or not is_later or not count or result.new <= most:
            return False
        why = (
            f"{dataset.name} changes its {count:,} samples at random: none repeated in {self._name}"
        )
        # Another dataset exists, such as that of a validation, or this may be a part of an epoch.
        if len(self._given) > 1 or dataset.is_guessed:
            leave(FIELD, why)
            return True
        kept.end()
        self._end(why)
        return True

    def _doubt(self, why: str) -> None:
        leave(FIELD, f"{why}: samples are kept once some repeat")
        for kept in self._kept.values():
            kept.end()
        self._kept, self._given, self._doubted = {}, {}, set()
        fill(is_full=True)

    def _is_doubted(self, names: list[bytes]) -> bool:
        if self._doubted is None:
            return False
        if not self._doubted.isdisjoint(names):
            self._doubted, self._is_proven = None, True
            return False
        if len(self._doubted) < _NAMES:
            self._doubted.update(names)
        return True

    def _check(self, given: Sequence[Any], kept: Sequence[Any]) -> None:
        """Compare computed features of a batch with the kept features."""
        from flatout.models import is_near

        self._unchecked = max(0, self._unchecked - 1)
        if not all(map(is_near, given, kept)):
            self._end(f"what {self._name} gives for a sample depends on the rest of its batch")

    def _end(self, why: str) -> None:
        leave(FIELD, why)
        self._is_over = True
        self._forget()
        fill(is_full=True)
