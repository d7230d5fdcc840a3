"""balance: use each class the same number of times in an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from flatout.data.execution.batch_sampler import Order, whole_number
from flatout.data.execution.labels import labels_of
from flatout.data.ids.classes import classes_of
from flatout.data.randomness import order as drawn
from flatout.data.reading.block import Numbers
from flatout.data.stages.shard import Shard
from flatout.data.stages.stage import P, Plan, Stage, Writable
from flatout.errors import DataError
from flatout.words import counted, rounded

# First number of the draws of classes, above the epochs for which a shuffle of the same seed draws.
_CLASSES = 1 << 63
# Maximum number of classes that a note names one by one.
_TOLD = 8


@dataclass(frozen=True)
class Balance(Stage):
    """Each class is used the same number of times in an epoch.

    Attributes:
        how: "over": as often as the most frequent class; "under": as often as the rarest; a number:
            this number of rows of each class.
        seed: seed that decides which rows are left out or repeated.
    """

    how: Literal["over", "under"] | int
    seed: int = 0

    once: ClassVar[bool] = True
    by_number: ClassVar[bool] = True
    reorders = True
    repeats = True

    def check(self, before: Sequence[Stage], behind: Sequence[Stage]) -> None:
        """Refuse stages that choose rows later, or for each rank: classes would not be balanced."""
        late = next((stage for stage in behind if stage.chooses), None)
        if late is not None and not isinstance(late, Shard):
            raise DataError(
                f"balance comes before {late.name}, after which classes are out of balance",
                do=f"put balance after {late.name}; of a split, on the part that is trained on",
            )
        if any(isinstance(stage, Shard) and stage.has_own_rows for stage in (*before, *behind)):
            raise DataError(
                "balance counts the rows of all ranks, and shard gives each rank its own",
                do="leave shard out: a Trainer gives each rank its share of every batch",
            )

    def check_mixed(self) -> None:
        raise DataError("balance comes after mix", do="balance each source before mix")

    def choose(self, plan: Plan) -> None:
        plan.numbers, plan.labels = labels_of(plan.samples, plan.numbers, "balance")

    def balanced(self, plan: Plan) -> Order:
        """Return an order of rows in which classes take turns, made from (seed, epoch)."""
        assert plan.labels is not None
        labels, own, counts = np.unique(plan.labels, return_inverse=True, return_counts=True)
        by_class = plan.numbers[np.argsort(own, kind="stable")]
        groups = np.split(by_class, np.cumsum(counts)[:-1])
        most = {"over": int(counts.max()), "under": int(counts.min())}
        each = self.how if isinstance(self.how, int) else most[self.how]
        plan.runs.append(self.name)
        plan.notes.append(_words(classes_of(plan.origin), labels, counts, each))
        return balanced(groups, each, self.seed)


def balance(self: Writable[P], how: Literal["over", "under"] | int = "over", *, seed: int = 0) -> P:
    """Use each class the same number of times in an epoch, for training data with rare classes.

    With a cache, a repeated row is decoded and kept only once; its random numbers are drawn again
    each time. An order depends on (seed, epoch) alone. Classes take turns; `shuffle` mixes them.
    Validation data do not change, as they are another pipeline: split before this stage.
    """
    if how not in ("over", "under"):
        if isinstance(how, str):
            raise DataError(f"balance: expected 'over', 'under' or a number of rows, found {how!r}")
        how = whole_number("balance: rows of each class", how, 1)
    return self._with(Balance(how, seed))


def balanced(groups: Sequence[Numbers], each: int, seed: int) -> Order:
    """Return an order with `each` rows of every group in an epoch, in which groups take turns.

    All rows of a group come equally often. Rows for a remainder are taken in a random order, from
    where the epoch before has stopped. So the uses of two rows never differ by more than one.
    """
    turns = [group[drawn(len(group), seed, _CLASSES + at)] for at, group in enumerate(groups)]

    def order(epoch: int) -> Numbers:
        rows = np.empty((each, len(groups)), np.int64)
        for at, (group, turn) in enumerate(zip(groups, turns, strict=True)):
            times, rest = divmod(each, len(group))
            rows[: each - rest, at] = np.tile(group, times)
            rows[each - rest :, at] = turn[(epoch * rest + np.arange(rest)) % len(group)]
        return rows.reshape(-1)

    return order


def _words(
    names: Sequence[str] | None, labels: npt.NDArray[np.int64], counts: Numbers, each: int
) -> str:
    words = [
        f"{_name(names, label)} {count:,} x {rounded(each / count)}"
        for label, count in zip(labels[:_TOLD].tolist(), counts[:_TOLD].tolist(), strict=True)
    ]
    more = f" and {len(labels) - _TOLD:,} more" if len(labels) > _TOLD else ""
    kinds = counted(len(labels), "class", "classes")
    return f"balance: {kinds} x {each:,} rows an epoch: {', '.join(words)}{more}"


def _name(names: Sequence[str] | None, label: Any) -> str:
    if names is not None and isinstance(label, int) and 0 <= label < len(names):
        return names[label]
    return f"class {label:g}"
