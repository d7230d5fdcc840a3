"""cache: read and make samples once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flatout.data.execution.cache import Cached, Where
from flatout.data.execution.varying import Changed, constant_part
from flatout.data.stages.stage import P, Plan, Stage, Writable
from flatout.errors import DataError


@dataclass(frozen=True)
class Cache(Stage):
    """Samples are kept as they are after the stages before.

    Attributes:
        where: "memory", "disk" or "auto".
        folder: folder on disk; None means the cache folder.
    """

    where: Where
    folder: str | None = None

    by_number: ClassVar[bool] = True

    def resume_words(self) -> None:
        """Return None: batches are the same without this stage."""

    def make(self, plan: Plan) -> None:
        """Place the cache before all stages that order rows, and before the first random function.

        Before a shuffle or a batch, the cached samples serve every later epoch, too. After a random
        function, a cache would give every epoch the same draws.
        """
        if not len(plan.numbers):  # this rank has no row to cache
            return
        kept, behind = constant_part(plan.samples, plan.numbers)
        if kept is None:
            plan.moved.append(
                f"cache was left out: {plan.base.name} is random, and a cache would give every "
                "epoch the same samples"
            )
            return
        if getattr(kept, "in_memory", False) or (behind and isinstance(kept, Cached)):
            plan.moved.append(_left_out(behind))
            return
        if behind:
            names = " and ".join(item.name for item in behind)
            plan.moved.append(
                f"cache before {names}: {behind[0].name} is random, and a cache after it would "
                "give every epoch the same samples"
            )
        before = [stage.name for stage in plan.passed if stage.turn(plan.stages)]
        if before:
            plan.moved.append(
                f"cache before {' and '.join(before)}: same batches, because order depends on "
                "(seed, epoch, counter) alone"
            )
        if plan.functions:
            plan.moved.append(
                "cache before the functions of whole batches, which run in every epoch: the "
                "batches of each epoch are others"
            )
        folder = None if self.folder is None else Path(self.folder)
        cached = Cached(kept, plan.numbers, self.where, budget=plan.options.memory, folder=folder)
        plan.samples = cached
        for item in behind:
            plan.samples = item.over(plan.samples)
        plan.caches.append(cached)
        plan.runs.insert(len(plan.runs) - len(behind), "CACHE")


def cache(self: Writable[P], where: Where = "auto", *, folder: str | None = None) -> P:
    """Keep samples as they are after the stages before, so that they are read and made once."""
    if where not in ("auto", "memory", "disk"):
        raise DataError(f"cache: expected 'auto', 'memory' or 'disk', found {where!r}")
    return self._with(Cache(where, folder))


def _left_out(behind: Sequence[Changed]) -> str:
    if not behind:
        return "cache was left out: the samples are in memory already"
    return (
        f"cache was left out: {behind[0].name} is random and runs in every epoch, and the samples "
        "before it are in memory already"
    )
