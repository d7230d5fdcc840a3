"""Checks the first step of each set of optimizers, and that the model trains in training mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flatout.train.freezing_checks import gradients_watched
from flatout.train.loop_state import LoopState
from flatout.train.losses.broadcast import watched
from flatout.train.objective_checks import without_backward
from flatout.train.part import Done, Part, Step


class FirstStepChecks(Part):
    """Refuses a loss that broadcasts or calls backward, and names layers without gradients.

    Args:
        loop: the Loop whose steps are checked.
        checks_loss: whether the loss is the user's own function. The Trainer checks its losses
            itself, where outputs and targets are known.
    """

    def __init__(self, loop: LoopState, *, checks_loss: bool) -> None:
        self._loop, self._checks_loss = loop, checks_loss

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step, with checks if it is the first step of its optimizers."""
        if step.turn.has_stepped:
            return run(step)
        if self._checks_loss:
            checked = without_backward(watched(step.compute), step.turn.update.parameters)
            step = replace(step, compute=checked)
        with gradients_watched(self._loop.model, self._loop.note):
            return run(step)


class TrainingMode(Part):
    """Reports that the user's code left the model in evaluation mode."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop
        self._trains = False  # whether the latest step was made in training mode

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step; report a change to evaluation mode."""
        trains = self._loop.model.training
        if self._trains and not trains:
            self._loop.note(
                f"the model is in evaluation mode from step {step.number:,} on: a function called "
                "model.eval(), and no model.train() followed"
            )
        self._trains = trains
        return run(step)
