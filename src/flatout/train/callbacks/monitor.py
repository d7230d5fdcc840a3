"""Comparison of a figure with its best value so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Literal, get_args

from flatout.errors import ModelError
from flatout.train.callbacks.callback import Figures

Mode = Literal["auto", "min", "max"]

_SMALLER = (
    "loss",
    "error",
    "err",
    "mae",
    "mse",
    "rmse",
    "mape",
    "perplexity",
    "entropy",
    "seconds",
)
_LARGER = (
    *("acc", "accuracy", "auc", "auroc", "precision", "recall", "f1", "fbeta", "score", "dice"),
    *("iou", "jaccard", "index", "r2", "psnr", "ssim", "bleu", "kappa", "map", "specificity"),
)
# Figures of Trainer and `metrics=`, whose names show whether smaller or larger is better.
_OWN = ("loss", "accuracy", "auc", "mse", "mae")
_BETTER = {"min": "smaller", "max": "larger"}


def check_mode(name: str, mode: str, what: str) -> None:
    """Refuse a mode that prefers the worse value of a figure."""
    fits = _by_name(name)
    if fits not in ("auto", mode):
        raise ModelError(
            f"a {_BETTER[fits]} {name} is better, but with mode={mode!r} {what}",
            do=f'set mode="{fits}", or name another figure with monitor=',
        )


class Monitor:
    """One figure of the logs, and its best value so far.

    Args:
        name: the figure's name in the logs, such as `val_loss`.
        mode: whether smaller (`min`) or larger (`max`) is better; `auto` decides by the name.
        min_delta: smallest improvement over the best value that counts.

    Raises:
        ModelError: the mode is unknown, or prefers the worse value of one of Flatout's own figures.
    """

    def __init__(self, name: str, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        self.name = name
        self.mode = _by_name(name) if mode == "auto" else mode
        if self.mode not in get_args(Mode):
            raise ModelError(f"mode cannot be {mode!r}; allowed: auto, min, max")
        if name.lower().rpartition("_")[2] in _OWN:
            check_mode(name, self.mode, f"a {_BETTER[self.mode]} one counts as better")
        self.min_delta = abs(min_delta)
        self.best: float | None = None

    @property
    def words(self) -> str:
        """Description of the figure, for messages."""
        return f"{self.name} ({self.mode}, min_delta={self.min_delta:g})"

    def read(self, logs: Mapping[str, float]) -> float:
        """Return the figure.

        Raises:
            ModelError: the logs have no figure of this name.
        """
        if self.name not in logs:
            near = get_close_matches(self.name, logs, 1)
            do = f"did you mean {near[0]!r}?" if near else "watch one of these"
            if self.name.startswith("val_") and not any(name.startswith("val_") for name in logs):
                do = "give validation_data to fit"
            raise ModelError(
                f"no figure is called {self.name!r}; there is: {', '.join(logs) or 'none'}", do=do
            )
        return float(logs[self.name])

    def check(self, figures: Figures) -> None:
        """Refuse a name that no logs will have, and a name that `auto` cannot decide on.

        Raises:
            ModelError: names the figures that exist, or asks for a mode.
        """
        if figures.complete:
            self.read(dict.fromkeys(figures.names, 0.0))
        if self.mode == "auto":
            raise ModelError(
                f"cannot tell whether a smaller or a larger {self.name} is better",
                do='say mode="min" or mode="max"',
            )

    def improves(self, value: float) -> bool:
        """Return whether a figure beats the best so far, and keep it if so; NaN never does."""
        if math.isnan(value):
            return False
        if self.best is not None:
            gain = self.best - value if self.mode == "min" else value - self.best
            # Equal values are no improvement, nor is NaN (infinity minus infinity).
            if not gain > self.min_delta:
                return False
        self.best = value
        return True


def _by_name(name: str) -> Mode:
    words = name.lower().split("_")
    if any(word.endswith(_SMALLER) for word in words):
        return "min"
    if any(word.endswith(_LARGER) for word in words):
        return "max"
    return "auto"
