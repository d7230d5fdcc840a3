"""How long the blocks of a trial are, and how many of them there are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatout.doctor.trials.arm import FEWEST_STEPS, WARM_STEPS
from flatout.doctor.trials.process import Ended

_SHORTEST_S = 0.25
# Of a trial's time, for beginning again.
_RENEWING = 1 / 3
# Blocks that a script of few steps should have room for, before it must be started again.
_BLOCKS_IN_A_LIFE = (4, 2, 1)
_GOOD_STEPS = 8


@dataclass(frozen=True)
class Schedule:
    """How long and how often is measured.

    Attributes:
        max_pairs, min_pairs: quadruples A B B A at most, and at least where there is time.
        block_s: seconds that a block lasts at most, unless it must be longer than the queue; less
            where the budget has no room for `max_pairs`.
        floor: how far from 1 a ratio of the script to itself may lie, as known in advance.
        precision: how far apart the ends of the interval of a clear answer may lie.
        epoch_steps: of an epoch, or from one evaluation to the next; blocks that are longer are
            whole epochs. None: no one knows.
        in_epochs: all blocks are whole epochs, for what happens once in each.
        pace_s: seconds that a side runs after the other one before a block counts, where there is
            time; each side counts as many seconds then, not as many steps. What ran before has
            left its traces in the machine.
        settles: B becomes faster for as long as no one knows, as one that fills a cache.
        counts_between: evaluation and saving are a part of what is measured.
        lives: how often both sides are begun, where there is time for it. Two processes of the same
            script may differ for as long as they live, as in where their objects lie in memory.
        hopeless: B is given up where its steps take so many times as long as A's once it is warm.
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
        """Steps that a block counts.

        Args:
            step_s: seconds per step of the slower side.
            left_s: seconds for the whole trial.
            dropped: steps at the start of a block that are not counted.
            most: steps that the script takes in all; None where it is not known.

        Raises:
            Ended: the script does not take so many.
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
        """How often both sides are begun in so many seconds.

        Args:
            left_s: seconds for what is left of the trial.
            renewal_s: what it takes to begin both again.
            quadruple_s: what A B B A takes.
            most: as of `steps`.
        """
        # Short scripts are begun again and again anyway, and what has settled would do so again.
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
        """How long the blocks of each side are.

        Args:
            step_s, dropped, most: as of `steps`.
            left_s: seconds for what is left of the trial.
            steps: that both sides count at least.
        """
        if most is not None:  # a short script has no room for more
            return Length(dropped, steps)
        # Of the time for a quadruple's four blocks not more than half, and some to spare.
        pace_s = min(self.pace_s, max(left_s, 0.0) / (10 * self.min_pairs))
        epoch = self.epoch_steps or 1
        unit = 1 if steps % epoch else epoch
        return Length(dropped, steps, pace_s, steps * step_s, unit)


@dataclass(frozen=True)
class Lives:
    """How often both sides of a trial are begun.

    Attributes:
        count: so often.
        quadruples: for which there is room; they are spread over the lives.
    """

    count: int
    quadruples: int

    def restart(self, blocks: int) -> bool:
        """Whether a life ends after so many blocks."""
        done, rest = divmod(blocks, 4)
        return rest == 0 and done in self._ends

    @property
    def fewest(self) -> int:
        """Quadruples after which each life has had one."""
        return max(self._ends, default=0) + 1

    @property
    def _ends(self) -> list[int]:
        return [math.ceil(life * self.quadruples / self.count) for life in range(1, self.count)]


@dataclass(frozen=True)
class Length:
    """How long blocks are.

    Attributes:
        dropped: steps at the start of a block that are left out at least.
        steps: that are counted at least.
        pace_s: seconds that a side runs after the other one before it counts; 0: both sides count
            the same steps.
        counts_s: seconds that each side counts otherwise.
        unit: steps of which whole ones are taken for these seconds: an epoch, or 1.
    """

    dropped: int
    steps: int
    pace_s: float = 0.0
    counts_s: float = 0.0
    unit: int = 1

    def of(self, step_s: float, *, is_paced: bool = True) -> tuple[int, int]:
        """Steps at the start of a block that a side leaves out, and those that it counts."""
        if not self.pace_s:
            return self.dropped, self.steps
        left_out = int(self.pace_s / (self.unit * step_s)) * self.unit if is_paced else 0
        counted = int(self.counts_s / (self.unit * step_s)) * self.unit
        return max(self.dropped, left_out), max(self.steps, counted)

    def seconds(self, step_s: float) -> float:
        """That a block of the slower side takes."""
        return max(self.dropped * step_s, self.pace_s) + self.steps * step_s
