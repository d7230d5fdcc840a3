"""The base class of every callback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from flatout.errors import ModelError

if TYPE_CHECKING:
    from flatout.data import Batch
    from flatout.train.state import FitState


@dataclass(frozen=True)
class Figures:
    """The figures that the logs of an epoch will have, as far as known before training.

    Attributes:
        names: names of figures, such as `loss`, `accuracy`, `val_loss`.
        complete: whether `names` has all figures.
    """

    names: tuple[str, ...]
    complete: bool


class Callback:
    """Base class of objects that act during a `fit`: override the methods that you need.

        for epoch in epochs:              on_fit_start before, on_fit_end after
            on_epoch_start
            for batch in source:
                one optimizer step
                on_step                   once in `every` steps
            evaluate, if asked for:       on_evaluate_end
            on_epoch_end

    `on_checkpoint` is called whenever a checkpoint was requested. An error that ends the fit calls
    `on_fit_error`, in place of `on_fit_end`.

    Attributes:
        every: steps between two calls of `on_step`; it may change while the fit runs.
    """

    every: int = 1

    @property
    def adds_figures(self) -> bool:
        """Whether the callback may add figures to the logs; Flatout's own callbacks do not."""
        return not type(self).__module__.startswith("flatout.")

    def prepare(self, state: FitState) -> None:
        """Act before settings are decided, and before a checkpoint is loaded."""

    def check(self, state: FitState, figures: Figures) -> None:
        """Act before the first epoch: raise errors here that an epoch's end would show."""

    def watched_batches(self, state: FitState, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of an epoch, for a callback that acts before each batch is used."""
        return batches

    def on_fit_start(self, state: FitState) -> None:
        """Act before the first epoch."""

    def on_epoch_start(self, state: FitState) -> None:
        """Act before the first step of each epoch."""

    def on_step(self, state: FitState) -> None:
        """Act after an optimizer step, once in `every` steps."""

    def on_evaluate_end(self, state: FitState) -> None:
        """Act after an evaluation; `state.logs` holds its `val_` figures."""

    def on_epoch_end(self, state: FitState) -> None:
        """Act after each epoch; `state.logs` holds all of its figures."""

    def on_checkpoint(self, state: FitState, path: str) -> None:
        """Act on the path of a checkpoint, which may still be incomplete."""

    def on_fit_end(self, state: FitState) -> None:
        """Act at the end of training, also after an early stop."""

    def on_fit_error(self, state: FitState, error: BaseException) -> None:
        """Act on the error that ends the fit; the error is raised to the user afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for an exact resume: tensors and plain data, nested as you like."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


# Names of events in other trainers, with the name of the same event in Flatout.
_ELSEWHERE = {
    "on_train_begin": "on_fit_start",
    "on_train_start": "on_fit_start",
    "on_train_end": "on_fit_end",
    "on_epoch_begin": "on_epoch_start",
    "on_train_epoch_start": "on_epoch_start",
    "on_train_epoch_end": "on_epoch_end",
    "on_batch_end": "on_step",
    "on_step_end": "on_step",
    "on_step_start": "on_step",
    "on_train_batch_end": "on_step",
    "on_test_end": "on_evaluate_end",
    "on_validation_end": "on_evaluate_end",
    "on_validation_epoch_end": "on_evaluate_end",
    "on_save_checkpoint": "on_checkpoint",
    "on_exception": "on_fit_error",
}


def check_events(callback: Any) -> None:
    """Refuse a callback with a method that would never be called."""
    kind = type(callback)
    if not isinstance(callback, Callback):
        raise ModelError(
            f"a callback must be a flatout.Callback, found {kind.__name__}",
            do=f"write class {kind.__name__}(flatout.Callback), with methods such as on_epoch_end",
        )
    events = [name for name in vars(Callback) if name.startswith("on_")]
    names = [name for name in dir(callback) if name.startswith("on_") and name not in events]
    for name in names:
        # Another base, such as Keras' Callback, has its own events.
        owner = next((base for base in kind.__mro__ if name in vars(base)), kind)
        if not issubclass(owner, Callback) or not callable(getattr(callback, name)):
            continue
        near = [_ELSEWHERE[name]] if name in _ELSEWHERE else get_close_matches(name, events, 1)
        raise ModelError(
            f"{kind.__name__}.{name} would never be called: no event has this name",
            do=f"rename it to {near[0]}, or to a name that does not begin with on_"
            if near
            else f"rename it to one of {', '.join(events)}, or to a name without on_",
        )
