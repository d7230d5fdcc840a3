"""Whether bf16 that `auto` chose still is rounding, once gradients have become small.

Beside the gradients of the first steps, 8 bits are enough. Where a loss has little noise of its
own, as of a smooth function that is fitted closely, gradients shrink until they are mostly
rounding, and training gets no further. So those of a part of a batch are compared again now and
then; where they differ by more than rounding, the run goes on in fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter as clock

from flatout.data import Batch, Features
from flatout.models import has_compiled, uncompiled
from flatout.recipe import SETTINGS, Choice, Parity
from flatout.train.auto_budget import Budget
from flatout.train.auto_check import FirstCheck
from flatout.train.loop_state import LoopState
from flatout.train.loss_value import Compute
from flatout.train.micro_batch import forget_frames
from flatout.train.part import Done, Part, Step
from flatout.train.settings import Settings
from flatout.train.turn import Turn

# It looks before these steps: the first, each twice as far, and from then on so many apart.
_FIRST, _APART = 64, 1024
# At this part of a batch, and at no fewer samples, whose statistics would be mostly rounding.
_PART, _FEWEST = 4, 16
# Gradients are mostly rounding where they differ by more than this share of their norm; one batch
# may be an odd one.
_MOSTLY, _LOOKS = 0.7, 2
# What steps no longer run under then, where it was not asked for: a graph was compiled in bf16.
_LEFT = ("compute.precision", "compute.fp32_operators", "compute.capture")


class RoundingWatch(Part):
    """Compares gradients in bf16 with those in fp32 before some of a Loop's steps.

    Attributes:
        next_step: the number of the step before which it looks next.
    """

    def __init__(self, loop: LoopState) -> None:
        self._loop, self._looks = loop, 0
        is_open = loop.requested.compute.precision == "auto"
        # What is compiled would be compiled for a part of a batch, too.
        is_own = loop.stepper.switch.now.compile == "off" and has_compiled(loop.model)
        may_look = is_open and not is_own and not loop.has_servers
        self.next_step = _behind(loop.step_count) if may_look else sys.maxsize

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step; before some steps gradients are compared, on all ranks."""
        if step.number >= self.next_step:
            self._compare(step)
        return run(step)

    def _compare(self, step: Step) -> None:
        loop, number, batches = self._loop, step.number, step.batches
        self.next_step = _behind(number)
        if loop.is_tuning() or not self._applies():
            return
        began = clock()
        # Rows of features may be kept on some of the ranks alone.
        is_kept = isinstance(batches[0].inputs, Features)
        own = 0.0 if is_kept else self._share(step.compute, batches[0], step.turn)
        share = max(loop.world.gather(own))
        if loop.tuner is not None:
            loop.tuner.search.budget.lost_s += clock() - began
        self._looks = self._looks + 1 if share > _MOSTLY else 0
        if self._looks >= _LOOKS:
            self._looks = 0
            self._leave(share, number)
        elif self._looks:
            self.next_step = number + 1

    def _applies(self) -> bool:
        stepper = self._loop.stepper
        now, strategy = stepper.switch.now, stepper.strategy
        meets = strategy.steps_apart or strategy.takes_whole_batches or strategy.meets_in_compute
        return now.precision == "bf16" and not (
            now.cuda_graph == "on" or meets or stepper.switch.shards
        )

    def _share(self, compute: Compute, batch: Batch, turn: Turn) -> float:
        loop, stepper = self._loop, self._loop.stepper
        stepper.turn = turn
        now = stepper.switch.now
        check = FirstCheck(stepper, compute, batch, now.but(precision="fp32"), Budget(None))
        samples = max(1, batch.size // (_PART * stepper.pieces))
        parts = [batch.first(max(min(_FEWEST, batch.size), samples))]
        if stepper.pieces == 1:
            parts.append(batch)  # a model may take batches of one size only
        for part in parts:
            try:
                with loop.uncounted(), uncompiled(loop.model):
                    return check.rounding(part, now)
            except Exception as error:
                forget_frames(error)
        return 0.0

    def _leave(self, share: float, number: int) -> None:
        loop, stepper = self._loop, self._loop.stepper
        assert loop.resolved is not None
        why = f"from step {number:,} on bf16 changes gradients by {share:.0%}: more than rounding"
        now, asked = stepper.switch.now, loop.requested
        on = now.other_than(Settings())
        plain = {f: SETTINGS[f].plain for f in _LEFT if f in on and asked.get(f) == "auto"}
        settings = now.but(**{f.partition(".")[2]: value for f, value in plain.items()})
        if loop.tuner is not None:
            loop.tuner.leave(plain, why, number - 1)
        stepper.use(settings)
        choices = {
            field: Choice(value=value, reason=why, parity=Parity.EXACT)
            for field, value in plain.items()
        }
        loop.resolved = loop.requested.resolve(
            {**loop.resolved.choices, **choices}, loop.resolved.machine, loop.facts
        )
        loop.note(f"auto: steps run in fp32: {why}")


def _behind(step: int) -> int:
    number = _FIRST
    while number <= step:
        number += min(number, _APART)
    return number
