"""A guard against changes that callbacks make to the model and to torch, and do not undo.

After each call of a callback, the guard restores the mode of the whole model, the switches of
gradients and autocast, the default dtype and the deterministic flags. A callback may put single
layers into evaluation mode and draw random numbers: the guard leaves such changes as they are.
The user gets one line about each kind of change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from flatout.models import is_held
from flatout.train.callbacks import Callback

_Put = Callable[[Any], object]
# Maximum number of layers that a message names.
_SHOWN = 3


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_cudnn(value: tuple[bool, bool]) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = value


def _set_autocast(value: tuple[int, Any]) -> None:
    depth, kinds = value
    for kind, enabled, dtype in kinds:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    while (now := _autocast_depth()) != depth:
        (torch.autocast_decrement_nesting if now > depth else torch.autocast_increment_nesting)()


def _autocast() -> tuple[int, Any]:
    kinds = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return _autocast_depth(), kinds


def _autocast_depth() -> int:
    """Return the number of open contexts. Only the end of the outermost one empties the cache."""
    torch.autocast_increment_nesting()
    depth: int = torch.autocast_decrement_nesting()
    return depth


# By the name of a flag: a function that reads the flag, and a function that sets it.
_FLAGS: dict[str, tuple[Callable[[], Any], _Put]] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (_autocast, _set_autocast),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    "cuDNN's flags": (
        lambda: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        _set_cudnn,
    ),
}
_GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": torch.get_rng_state,
    "Python": random.getstate,
    "numpy": lambda: str(np.random.get_state(legacy=False)),
}


class CallbackGuard:
    """A caller of callbacks' methods, which restores the model's mode and torch's flags."""

    def __init__(self, model: nn.Module, note: Callable[[str], None]) -> None:
        self._model, self._note = model, note
        self._noted: set[str] = set()
        self._called: set[tuple[int, str]] = set()

    def __call__(self, callback: Callback, event: str, *arguments: Any) -> None:
        """Call the method `event` of a callback, and undo or report its changes.

        No step follows `on_fit_end`, so its changes stay. Flatout's own callbacks are not checked.
        """
        method = getattr(callback, event)
        if event == "on_fit_end" or not callback.adds_figures:
            method(*arguments)
            return
        # A check of all layers after every step would take longer than most callbacks.
        key = id(callback), event
        is_whole = event != "on_step" or key not in self._called
        self._called.add(key)
        name = f"{type(callback).__name__}.{event}"
        with self._layers(name) if is_whole else self._mode(name), self._flags(name):
            method(*arguments)

    @contextmanager
    def _flags(self, name: str) -> Iterator[None]:
        before = {flag: now() for flag, (now, _) in _FLAGS.items()}
        yield
        for flag, (now, put) in _FLAGS.items():
            if now() != before[flag]:
                put(before[flag])
                self._note_once(f"{name} changed {flag}: put back for the next step")

    @contextmanager
    def _mode(self, name: str) -> Iterator[None]:
        before = self._model.training
        yield
        if self._model.training != before:
            self._model.train(before)
            self._note_once(_mode_words(name, before))

    @contextmanager
    def _layers(self, name: str) -> Iterator[None]:
        before = {layer: layer.training for layer in self._model.modules()}
        drawn = {kind: state() for kind, state in _GENERATORS.items()}
        yield
        is_training = before[self._model]
        if self._model.training != is_training:
            for layer, mode in before.items():
                layer.training = mode and not is_held(layer)
            self._note_once(_mode_words(name, is_training))
        changed = [
            path
            for path, layer in self._model.named_modules()
            if layer.training != before.get(layer, layer.training) and not _is_frozen(layer)
        ]
        if changed:
            shown = ", ".join(changed[:_SHOWN])
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            self._note_once(
                f"{name} changed the mode of {shown}{more}: training goes on with the new mode"
            )
        kinds = [kind for kind, state in _GENERATORS.items() if not _equal(state(), drawn[kind])]
        if kinds:
            self._note_once(
                f"{name} draws from the random generator of {' and '.join(kinds)}: training draws "
                "other numbers than without this callback"
            )

    def _note_once(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self._note(line)


def _equal(state: Any, before: Any) -> bool:
    return torch.equal(state, before) if torch.is_tensor(state) else bool(state == before)


def _mode_words(name: str, is_training: bool) -> str:
    left, back = ("evaluation", "training") if is_training else ("training", "evaluation")
    return f"{name} left the model in {left} mode: put back into {back} mode for the next step"


def _is_frozen(layer: nn.Module) -> bool:
    """Return whether a layer is in evaluation mode because it does not train."""
    own = list(layer.parameters())
    return is_held(layer) or (bool(own) and not any(p.requires_grad for p in own))
