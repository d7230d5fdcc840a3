"""Rows of what frozen layers give, by sample: a sample is known by its bytes.

Who made a batch, and in which order, is not asked. Where none of the samples comes again they are
changed at random, and nothing of them is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.cures.dataset_now import DatasetNow
from flatout.cures.record import fill, leave
from flatout.data import NAMES_VERSION, NamedStore, RowPart, feature_key

FIELD = "script.features"
# A dataset that has given more new samples than this many times its own changes them at random.
_TOO_MANY = 1.25
# Of a device's free memory, what rows may take: a script that runs out of it ends.
_DEVICE_SHARE = 0.2
# After so many changes of the weights with no sample that came again between them.
_CHANGES = 3
# So many names of samples are remembered that are not kept.
_NAMES = 1 << 19


@dataclass(frozen=True)
class Keeping:
    """The place of kept samples, the dataset that is in use, and limits.

    Attributes:
        where: "memory" or "disk".
        now: has the dataset of the latest batch.
        checked: batches that are computed although all their samples are kept.
        ahead: samples that a loader gives ahead, which may be counted as another dataset's.
        unproven: the share of the free room that is filled before a sample comes again, if the
            number of samples is not known.
    """

    where: Any
    now: DatasetNow
    checked: int = 4
    ahead: int = 64
    unproven: float = 0.25


@dataclass
class ModeStore:
    """A store of what layers give in one mode.

    Attributes:
        store: has rows of some parts.
        parts: what it holds of a sample.
        found: so many rows were there when it was opened.
        has_come_again: whether it had a sample when that came.
    """

    store: NamedStore
    parts: list[RowPart]
    found: int = 0
    has_come_again: bool = False

    def end(self) -> None:
        """Close it, and remove what this run has kept of samples of which none came again."""
        if self.has_come_again or self.found:
            self.store.close()
        else:
            self.store.discard()


@dataclass
class _Given:
    """What came of a dataset: samples that were new, and those that were kept.

    Attributes:
        new: so many were.
        again: likewise.
        first: so many came in its first pass.
    """

    new: int = 0
    again: int = 0
    first: int = 0


class KeptSamples:
    """What some layers have given, by sample."""

    def __init__(self, name: str, keeping: Keeping) -> None:
        self._name = name
        self._keeping = keeping
        self._given: dict[int, _Given] = {}  # by dataset
        self._is_over = False
        self._kept: dict[Any, ModeStore] = {}  # by mode
        # Names of samples that are not kept, while none came again; None where they are.
        self._doubted: set[bytes] | None = None
        self._is_proven = False  # that samples do come again
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
        """Open the rows of a mode."""
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
        """Keep rows of samples, unless they seem to be other ones each time."""
        forms = [(tuple(item.shape[1:]), item.dtype) for item in given]
        if forms != [(part.shape, part.dtype) for part in kept.parts]:
            return  # of another form than the first ones
        if self._is_random(kept, len(names), again):
            return
        store = kept.store
        store.put(names, given)
        if kept.has_come_again:
            return
        why = f"none of {store.kept:,} samples came again in {self._name}"
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
        # An item of a dataset may be several samples, so that the first pass has more of them.
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
            f"{dataset.name} changes its {count:,} samples at random: none came again "
            f"in {self._name}"
        )
        # There is another one, such as that of a validation; or this may be a part of an epoch.
        if len(self._given) > 1 or dataset.is_guessed:
            leave(FIELD, why)
            return True
        kept.end()
        self._end(why)
        return True

    def _doubt(self, why: str) -> None:
        leave(FIELD, f"{why}: they are kept once some do")
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
        """Compare a batch's features as they were computed with those that were kept."""
        from flatout.models import is_near

        self._unchecked = max(0, self._unchecked - 1)
        if not all(map(is_near, given, kept)):
            self._end(f"what {self._name} gives for a sample depends on the rest of its batch")

    def _end(self, why: str) -> None:
        leave(FIELD, why)
        self._is_over = True
        self._forget()
        fill(is_full=True)
