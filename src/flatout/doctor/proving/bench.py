"""All trials of one script within one budget: their cost, and the terms of each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from flatout.doctor.judge import Verdict
from flatout.doctor.proving.cure import COMPILE, NOTHING, Cure, together
from flatout.doctor.proving.jobs import job
from flatout.doctor.proving.whole_run import epoch_steps, evaluated_every, steps_at_all
from flatout.doctor.trials.arm import Showed
from flatout.doctor.trials.pair import Against, Pair
from flatout.doctor.trials.schedule import Schedule
from flatout.doctor.trials.scratch import temporary_of

# Two processes of the same script differ permanently by up to this ratio, however small the noise
# of their blocks. No win below this ratio is believed.
_LEAST_FLOOR = 0.02
# Minimum cost of a trial after the start: _BLOCKS blocks of _SHORTEST_S seconds, for the warm-up
# and twice the blocks A B B A. _SLOWER_START: factor by which a later start of the script may take
# longer than the first start.
_BLOCKS, _SHORTEST_S = 10, 0.3
_SLOWER_START = 1.3
# A cure is given up if its first steps take this factor longer than the plain script's, unless the
# cure may gain later.
_HOPELESS = 4.0
LEFT = "it stays as written"


class Bench:
    """Measures one script against itself with cures.

    Attributes:
        floor: largest distance from 1 that the ratio of the script to itself may have.
        epoch_steps: number of steps of an epoch; None if unknown.
        start_s: seconds of a start of the script, as far as known.
        longer: factor by which blocks are longer than the `block_s` of `measure`.
        held: how the processes are contained: "overlay", "landlock" or "python".
        refused: actions that the processes were not allowed to do.
    """

    def __init__(
        self, verdict: Verdict, what: Sequence[str], folder: Path, budget_s: float
    ) -> None:
        self.floor = _LEAST_FLOOR
        self.longer = 1.0
        self.epoch_steps = epoch_steps(verdict.observations[0])
        # A loop without a loader still has a known number of steps between evaluations.
        self._round = self.epoch_steps or evaluated_every(verdict.observations[0])
        self.start_s = 0.0
        self._block_s = _SHORTEST_S
        self.held = ""
        self.refused: list[dict[str, str]] = []
        self._most_steps = steps_at_all(verdict)
        self._beside = NOTHING
        self._what = what
        self._folder = folder
        self._until = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds left of the budget."""
        return self._until - time.monotonic()

    @property
    def needed_s(self) -> float:
        """Minimum seconds of one trial."""
        starts = 1 if self._most_steps is None else 3  # short scripts are restarted several times
        return starts * _SLOWER_START * self.start_s + _BLOCKS * self._block_s

    def against(self, cure: Cure) -> closing[Against]:
        """Return the side to measure against, for use in `with`."""
        against = Against(
            self._job(cure), self._folder, self._until, most_steps=self._most_steps, is_renewed=True
        )
        return closing(against)

    @contextmanager
    def beside(self, cure: Cure) -> Iterator[Against]:
        """Add a cure to both sides of trials in this context; yield the side to measure against."""
        self._beside = cure
        try:
            with self.against(NOTHING) as against:
                yield against
        finally:
            self._beside = NOTHING

    def measure(
        self,
        against: Against,
        cure: Cure,
        budget_s: float,
        *,
        min_pairs: int = 2,
        max_pairs: int = 4,
        block_s: float = 0.5,
        precision: float = math.inf,
        pace_s: float = 0.0,
        fresh: bool = False,
        lives: int = 1,
    ) -> Pair:
        """Measure the script with a cure, until the result is clear."""
        fills = any(setting.fills for setting in cure.settings)
        terms = Schedule(
            max_pairs=max_pairs,
            min_pairs=min_pairs,
            block_s=block_s * self.longer,
            floor=self.floor,
            precision=precision,
            pace_s=pace_s,
            epoch_steps=self._round,
            in_epochs=any(setting.in_epochs for setting in cure.settings)
            and self._round is not None,
            settles=fills and self.epoch_steps is None,
            counts_between=counts_between(cure),
            lives=lives,
            hopeless=math.inf if fills or COMPILE in cure.recipe else _HOPELESS,
        )
        pair = against.measure(
            self._job(cure),
            terms,
            budget_s=budget_s,
            warm=(self.epoch_steps or 0) if fills else 0,
            is_vain=lambda b: why_left(cure, b),
            fresh=fresh,
        )
        self.start_s = max(self.start_s, pair.a.started_s)
        if pair.blocks:
            block = pair.blocks[0]
            block_s = block.whole_step_s * (block.steps + pair.dropped)
            self._block_s = block_s if self._block_s == _SHORTEST_S else min(block_s, self._block_s)
        self.held = pair.held
        self.refused += [item for item in pair.refused if item not in self.refused]
        return pair

    def _job(self, cure: Cure) -> Any:
        return job(self._what, together([self._beside, cure]), temporary_of(self._folder))


def why_left(cure: Cure, b: Showed) -> str:
    """Return why the cure was not applied; "" if it was applied, or may still be applied later."""
    # The number of threads is part of another cure: a change of it alone does not count.
    names = [name for name in cure.recipe if name != "process.threads"] or list(cure.recipe)
    if not names or cure.own_edits or any(name not in b.left for name in names):
        return ""
    return f"{LEFT}: {b.left[names[0]]}"


def counts_between(cure: Cure) -> bool:
    """Return True if the cure saves time between steps, so that this time has to be measured."""
    return any(setting.between_steps for setting in cure.settings)
