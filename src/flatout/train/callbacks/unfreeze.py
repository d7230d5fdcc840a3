"""A callback that lets frozen layers train from a later epoch on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from flatout.errors import ModelError
from flatout.models import frozen_parameters, moving_within, unfreeze
from flatout.optim import optimizer_adapter
from flatout.train.callbacks.callback import Callback, Figures
from flatout.train.freezing_checks import listed
from flatout.words import count_words

if TYPE_CHECKING:
    from flatout.train.state import FitState


class Unfreeze(Callback):
    """Lets frozen layers train from the start of a given epoch on.

        flatout.freeze(model, until="features.23")
        unfreeze = flatout.Unfreeze(epoch=4, layers="features.1*", lr=1e-5)
        trainer.fit(train, epochs=10, callbacks=[unfreeze])

    The optimizer stays the same object with the same state. From the start of the fit it holds the
    layers' parameters, and does not step them while they are frozen. A resume is therefore exact
    before and after that epoch. A compiled Keras optimizer is built again at that epoch, over all
    weights that then train; its state of the other weights is kept.

    Args:
        epoch: first epoch in which the layers train, counted from 1.
        layers: names of the layers, as in `flatout.freeze`; None for all frozen layers.
        lr: learning rate of these layers, in their own parameter group; None for the optimizer's
            rate. A scheduler treats this rate as if the group had been there from the start. Under
            OneCycleLR and CyclicLR it is the highest rate, and the ratios of the other rates to the
            highest rate are those of the first group. For a compiled Keras model, schedules and
            callbacks scale it by the same factor as the optimizer's compiled rate.
        batch_norm: whether BatchNorm layers train and update their statistics again, too. If not,
            BatchNorm layers stay as they are. A layer that only `requires_grad = False` has frozen
            then goes on to update its statistics in training, which a line reports.

    Raises:
        ModelError: before the first step: the model has no layer of such a name, the scheduler
            cannot take a new parameter group, or `lr` is given with a Keras rate that begins at 0.
    """

    def __init__(
        self,
        epoch: int,
        layers: str | Iterable[str] | None = None,
        *,
        lr: float | None = None,
        batch_norm: bool = False,
    ) -> None:
        if epoch < 1:
            raise ModelError(f"Unfreeze(epoch={epoch})", do="count epochs from 1")
        self.epoch = epoch
        self.layers = layers if layers is None or isinstance(layers, str) else tuple(layers)
        self.lr = lr
        self.batch_norm = batch_norm
        self._waiting: list[torch.Tensor] = []

    def prepare(self, state: FitState) -> None:
        """Hand the parameters to the optimizer before anything is decided."""
        trainer = state.trainer
        self._waiting = frozen_parameters(trainer.model, self.layers, batch_norm=self.batch_norm)
        optimizer = optimizer_adapter(trainer.optimizer)
        optimizer.hold(self._waiting, trainer.model, self.lr, trainer.scheduler)

    def check(self, state: FitState, figures: Figures) -> None:
        """Unfreeze at once if a resume continues after the layers' epoch."""
        if self.epoch > state.epochs:
            state.trainer.loop.say(
                f"Unfreeze(epoch={self.epoch}) never takes effect: the last epoch is {state.epochs}"
            )
        self._begin_if_due(state)

    def on_epoch_start(self, state: FitState) -> None:
        """Unfreeze the layers at their epoch."""
        self._begin_if_due(state)

    def _begin_if_due(self, state: FitState) -> None:
        if state.epoch + 1 < self.epoch or not self._waiting:
            return
        model, loop = state.trainer.model, state.trainer.loop
        unfreeze(model, self.layers, batch_norm=self.batch_norm)
        optimizer_adapter(state.trainer.optimizer).begin()
        count = sum(parameter.numel() for parameter in self._waiting if parameter.requires_grad)
        self._waiting = []
        rate = "" if self.lr is None else f" at lr {self.lr:g}"
        loop.note(f"epoch {state.epoch + 1}: {count_words(count)} more parameters train{rate}")
        if norms := [] if self.batch_norm else moving_within(model, self.layers):
            loop.note(
                f"epoch {state.epoch + 1}: BatchNorm {listed(norms)} of these layers stays frozen "
                "but still updates its running statistics, as before: Unfreeze(..., "
                "batch_norm=True) lets it train, flatout.freeze(model, layers=...) keeps it in "
                "evaluation mode"
            )
