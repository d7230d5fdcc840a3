"""The base of every callback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.train.state import FitState


@dataclass(frozen=True)
class Figures:
    """The figures that the logs of an epoch will have, as far as that is known before.

    Attributes:
        names: such as `loss`, `accuracy`, `val_loss`.
        complete: whether there are no others.
    """

    names: tuple[str, ...]
    complete: bool


class Callback:
    """What is called while a `fit` runs: override what you need, the rest does nothing.

        for epoch in epochs:              on_fit_start before, on_fit_end after
            on_epoch_start
            for batch in source:
                one optimizer step
                on_step                   once in `every` steps
            evaluate, if asked for:       on_evaluate_end
            on_epoch_end

    `on_checkpoint` comes whenever a checkpoint has been asked for. An error that ends the fit comes
    to `on_fit_error`, in place of `on_fit_end`.

    Attributes:
        every: steps between two calls of `on_step`; it may change while the fit runs.
    """

    every: int = 1

    @property
    def adds_figures(self) -> bool:
        """Whether it may add to the logs: Flatout's own callbacks do not."""
        return not type(self).__module__.startswith("flatout.")

    def prepare(self, state: FitState) -> None:
        """Called before settings are decided, and before a checkpoint is put back."""

    def check(self, state: FitState, figures: Figures) -> None:
        """Called before the first epoch: raise here what would fail only at the end of one."""

    def on_fit_start(self, state: FitState) -> None:
        """Called before the first epoch."""

    def on_epoch_start(self, state: FitState) -> None:
        """Called before the first step of each epoch."""

    def on_step(self, state: FitState) -> None:
        """Called after an optimizer step, once in `every` steps."""

    def on_evaluate_end(self, state: FitState) -> None:
        """Called after an evaluation; `state.logs` holds its `val_` figures."""

    def on_epoch_end(self, state: FitState) -> None:
        """Called after each epoch; `state.logs` holds all of its figures."""

    def on_checkpoint(self, state: FitState, path: str) -> None:
        """Called with the path of a checkpoint; it may still be being written."""

    def on_fit_end(self, state: FitState) -> None:
        """Called when training ended, also where it was stopped early."""

    def on_fit_error(self, state: FitState, error: BaseException) -> None:
        """Called with the error that ends the fit; it is raised to the user afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """Return what an exact resume needs: tensors and plain data, nested as you like."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
