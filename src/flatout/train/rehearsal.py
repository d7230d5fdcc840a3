"""Tries settings before the first step, for a model that cannot be switched while it trains.

A model that the user has compiled is compiled again under other settings, which would delay the
run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatout.data import Batch
from flatout.train.losses.loss_value import Compute
from flatout.train.part import Part, Step
from flatout.train.snapshot import Snapshot
from flatout.train.step import Stepper
from flatout.train.tuning.tuner import Tuner

# Maximum fraction of the run's time that the trials before the first step may take.
_SHARE = 0.1


def rehearse(tuner: Tuner, stepper: Stepper, compute: Compute, batches: Sequence[Batch]) -> None:
    """Make a tuner's trial steps on the first batches, and undo all changes that the steps make."""
    switch, budget, turn = stepper.switch, tuner.search.budget, stepper.joint
    snapshot = Snapshot(switch.model, switch.optimizers, compute)
    number = 0
    tuner.search.splits = False  # each switch would compile the model again
    try:
        while tuner.is_searching:
            batch = batches[number % len(batches)]
            if switch.now.memory_format == "channels_last":
                batch = batch.to_memory_format(torch.channels_last)
            number += 1
            step = Step(number, (batch,), compute, turn)
            tuner.make(step, stepper.chain.inside(Part), budget.input_s, 0.0)
            budget.rehearsed_s = budget.elapsed_s
            if budget.elapsed_s > min(budget.terms.longest_s, _SHARE * budget.run_s):
                tuner.stop("the time before the first step was up")
    finally:
        snapshot.restore()
        stepper.use(switch.now)
        turn.mean_loss.reset()
    tuner.restart_numbers()
