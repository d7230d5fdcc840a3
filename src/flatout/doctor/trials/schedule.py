"""Length and number of the blocks of a trial."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatout.doctor.trials.arm import FEWEST_STEPS, WARM_STEPS
from flatout.doctor.trials.process import Ended

_SHORTEST_S = 0.25
# Largest share of a trial's time that is spent on restarts.
_RENEWING = 1 / 3
# Possible numbers of blocks between two restarts of a script with few steps, in order of
# preference.
_BLOCKS_IN_A_LIFE = (4, 2, 1)
_GOOD_STEPS = 8


@dataclass(frozen=True)
class Schedule:
    """Settings of a trial: length, number and handling of its blocks (counted steps of one side).

    Attributes:
        max_pairs: maximum number of times that blocks A B B A run.
        min_pairs: minimum number of times that blocks A B B A run, if time allows.
        block_s: maximum seconds of a block, unless the queue of prefetched batches requires a
            longer block. Blocks are shorter if `max_pairs` would exceed the budget.
        floor: known largest distance from 1 that the ratio of the script to itself may have.
        precision: largest width of the interval of a clear result.
        epoch_steps: number of steps of an epoch, or between evaluations; blocks of at least this
            length are whole epochs. None if unknown.
        in_epochs: True if all blocks are whole epochs, for effects that occur once per epoch.
        pace_s: seconds that a side runs after the other side before its block counts, if time
            allows, since the previous load affects the machine's speed. With such a warm-up each
            side counts equally many seconds instead of steps.
        settles: True if B becomes faster for an unknown time, for example while B fills a cache.
        counts_between: True if the time of evaluation and saving counts too.
        lives: number of times that both sides are started, if time allows. Two processes of the
            same script may differ permanently, for example in the layout of objects in memory.
        hopeless: factor by which B's warm steps must be slower than A's for B to be given up.
    """

    max_pairs: int = 8
    min_pairs: int = 2
    block_s: float = 1.0
    floor: float = 0.0
    precision: float = math.inf
    epoch_steps: int | None = None
    in_epochs: bool = False
    pace_s: float = 0.0
    settles: bool = False
    counts_between: bool = False
    lives: int = 1
    hopeless: float = math.inf

    def steps(self, step_s: float, left_s: float, dropped: int, most: int | None) -> int:
        """Return the number of steps that a block counts.

        Args:
            step_s: seconds per step of the slower side.
            left_s: seconds that are left for the whole trial.
            dropped: number of uncounted steps at the start of a block.
            most: total number of steps of the script; None if unknown.

        Raises:
            Ended: the script does not take enough steps.
        """
        wanted = min(max(left_s / (4 * self.max_pairs), _SHORTEST_S), self.block_s)
        fewest = max(dropped - WARM_STEPS + 1, FEWEST_STEPS)
        steps = max(math.ceil(wanted / step_s) - dropped, fewest)
        epoch = self.epoch_steps or 0
        if epoch and (self.in_epochs or steps >= epoch):
            steps = max(1, round(steps / epoch)) * epoch
            fewest = epoch if self.in_epochs else fewest
        if most is None:
            return steps
        room = most - 1 - dropped - FEWEST_STEPS
        for blocks in _BLOCKS_IN_A_LIFE:
            fits = room // blocks - dropped
            if self.in_epochs:
                fits -= fits % epoch
            if fits >= max(fewest, min(steps, _GOOD_STEPS)):
                return min(steps, fits)
        if fits < fewest:
            raise Ended(f"the script takes {most} steps only, too few to be measured")
        return min(steps, fits)

    def lives_within(
        self, left_s: float, renewal_s: float, quadruple_s: float, most: int | None
    ) -> Lives:
        """Return the number of starts of both sides that fit into the time.

        Args:
            left_s: seconds left of the trial.
            renewal_s: seconds of a restart of both sides.
            quadruple_s: seconds of one quadruple A B B A.
            most: total number of steps of the script; None if unknown.
        """
        # Short scripts are restarted anyway, and a restarted side would have to fill its caches
        # again.
        if most is not None or self.settles:
            return Lives(1, self.max_pairs)
        counts = range(self.lives, 0, -1)
        count = next(n for n in counts if (n - 1) * renewal_s <= _RENEWING * left_s)
        fit = (left_s - (count - 1) * renewal_s) / quadruple_s
        quadruples = max(1, min(int(fit), self.max_pairs))
        return Lives(min(count, quadruples), quadruples)

    def length(
        self, step_s: float, left_s: float, dropped: int, steps: int, most: int | None
    ) -> Length:
        """Return the length of the blocks of each side.

        Args:
            step_s, dropped, most: arguments of `steps` with the same names.
            left_s: seconds left of the trial.
            steps: minimum number of steps that both sides count.
        """
        if most is not None:  # a short script has no steps for warm-up
            return Length(dropped, steps)
        # Warm-up takes at most half of the time of the four blocks A B B A, less a margin.
        pace_s = min(self.pace_s, max(left_s, 0.0) / (10 * self.min_pairs))
        epoch = self.epoch_steps or 1
        unit = 1 if steps % epoch else epoch
        return Length(dropped, steps, pace_s, steps * step_s, unit)


@dataclass(frozen=True)
class Lives:
    """Number of starts of both sides of a trial.

    Attributes:
        count: number of starts of each side.
        quadruples: number of A B B A that fit into the time, divided evenly among the starts.
    """

    count: int
    quadruples: int

    def restart(self, blocks: int) -> bool:
        """Return True if both sides are restarted after this number of blocks."""
        done, rest = divmod(blocks, 4)
        return rest == 0 and done in self._ends

    @property
    def fewest(self) -> int:
        """Minimum number of A B B A with which each start has run one A B B A."""
        return max(self._ends, default=0) + 1

    @property
    def _ends(self) -> list[int]:
        return [math.ceil(life * self.quadruples / self.count) for life in range(1, self.count)]


@dataclass(frozen=True)
class Length:
    """Length of blocks.

    Attributes:
        dropped: minimum number of uncounted steps at the start of a block.
        steps: minimum number of counted steps.
        pace_s: seconds that a side runs after the other side before its steps count. If 0, both
            sides count the same number of steps.
        counts_s: seconds that each side counts if `pace_s` is not 0.
        unit: the number of counted steps is a multiple of this: the steps of an epoch, or 1.
    """

    dropped: int
    steps: int
    pace_s: float = 0.0
    counts_s: float = 0.0
    unit: int = 1

    def of(self, step_s: float, *, is_paced: bool = True) -> tuple[int, int]:
        """Return the numbers of uncounted and of counted steps of a side's block."""
        if not self.pace_s:
            return self.dropped, self.steps
        left_out = int(self.pace_s / (self.unit * step_s)) * self.unit if is_paced else 0
        counted = int(self.counts_s / (self.unit * step_s)) * self.unit
        return max(self.dropped, left_out), max(self.steps, counted)

    def seconds(self, step_s: float) -> float:
        """Return the seconds of a block of the slower side."""
        return max(self.dropped * step_s, self.pace_s) + self.steps * step_s
