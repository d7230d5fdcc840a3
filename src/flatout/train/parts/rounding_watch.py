"""Check whether bf16, chosen by `auto`, still changes gradients by rounding only.

In the first steps gradients are large, and 8 bits are enough. If a loss has little noise, as when a
smooth function is fitted closely, gradients shrink until they are mostly rounding. Training then
stops improving. So now and then the gradients of some samples in bf16 and in fp32 are compared. If
they differ by more than rounding, the run continues in fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter as clock

from flatout.data import Batch, Features
from flatout.models import has_compiled, uncompiled
from flatout.recipe import SETTINGS, Choice, Parity
from flatout.train.loop_state import LoopState
from flatout.train.losses.loss_value import Compute
from flatout.train.micro_batch import forget_frames
from flatout.train.part import Done, Part, Step
from flatout.train.settings import Settings
from flatout.train.tuning.budget import Budget
from flatout.train.tuning.first_check import FirstCheck
from flatout.train.turn import Turn

# Step numbers of comparisons. _FIRST: the first number; each next number is twice as large until
# the distance reaches _APART steps.
_FIRST, _APART = 64, 1024
# _PART: a comparison uses one _PART-th of a batch. _FEWEST: minimum number of samples in a
# comparison, since the gradients of fewer samples may be mostly rounding.
_PART, _FEWEST = 4, 16
# _MOSTLY: difference of gradients, as a fraction of their norm, above which gradients are mostly
# rounding. _LOOKS: number of successive comparisons above _MOSTLY after which bf16 is given up,
# since a single batch may be unusual.
_MOSTLY, _LOOKS = 0.7, 2
# Recipe fields that return to their plain values, unless they were requested. Capture is among them
# because the graph was compiled in bf16.
_LEFT = ("compute.precision", "compute.fp32_operators", "compute.capture")


class RoundingWatch(Part):
    """Compares gradients in bf16 with those in fp32 before some of a Loop's steps.

    Attributes:
        next_step: number of the step before which the next comparison is made.
    """

    def __init__(self, loop: LoopState) -> None:
        self._loop, self._looks = loop, 0
        is_open = loop.asked.recipe.compute.precision == "auto"
        # A compiled model would be compiled again for a part of a batch.
        is_own = loop.stepper.switch.now.compile == "off" and has_compiled(loop.model)
        may_look = is_open and not is_own and not loop.has_servers
        self.next_step = _behind(loop.step_count) if may_look else sys.maxsize

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step; compare gradients before some steps, on all ranks."""
        if step.number >= self.next_step:
            self._compare(step)
        return run(step)

    def _compare(self, step: Step) -> None:
        loop, number, batches = self._loop, step.number, step.batches
        self.next_step = _behind(number)
        if loop.is_tuning() or not self._applies():
            return
        began = clock()
        # Only some of the ranks may have kept features.
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
                with loop.trainer.uncounted(), uncompiled(loop.model):
                    return check.rounding(part, now)
            except Exception as error:
                forget_frames(error)
        return 0.0

    def _leave(self, share: float, number: int) -> None:
        loop, stepper = self._loop, self._loop.stepper
        assert loop.resolved is not None
        why = f"from step {number:,} on bf16 changes gradients by {share:.0%}: more than rounding"
        now, asked = stepper.switch.now, loop.asked.recipe
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
        loop.resolved = loop.asked.recipe.resolve(
            {**loop.resolved.choices, **choices}, loop.resolved.machine, loop.identity.model
        )
        loop.note(f"auto: steps run in fp32: {why}")


def _behind(step: int) -> int:
    number = _FIRST
    while number <= step:
        number += min(number, _APART)
    return number
