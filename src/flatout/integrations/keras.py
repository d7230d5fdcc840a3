"""The lanes of a Keras model's steps, on Keras' torch backend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import keras
from keras.callbacks import Callback

from flatout.errors import FlatoutError
from flatout.integrations.step_lanes import StepLanes, Watches, hidden_sync


class KerasTimeline(Watches, Callback):  # type: ignore[misc]
    """Shows the time of each part of the steps of `model.fit`.

        timeline = flatout.integrations.KerasTimeline()
        model.fit(..., callbacks=[timeline])

    At the end the first rank prints two lines. If the optimizer accumulates gradients, a step has
    several batches.

    `copy` cannot be measured; `forward` includes it. With `jit_compile=True`, or a custom
    `train_step` that calls neither `compute_loss` nor `optimizer.apply`, `forward` includes
    backward and optimizer too. With several ranks, `backward` includes `sync`. Keras runs callbacks
    in the loop's own thread if one of them, such as this one, has batch methods.

    Raises:
        FlatoutError: at the start of a fit on another backend than torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step_lanes = StepLanes()
        self._watched: list[tuple[Any, str]] = []
        self._batches = 0
        self._last: _Last | None = None
        self._lane = "host"

    def _hidden(self) -> dict[str, str]:
        lanes = self._step_lanes.lanes
        holder = "forward" if "forward" in lanes or "backward" not in lanes else "backward"
        steps = ("copy", "forward", "backward", "optimizer")
        hidden = {n: holder for n in steps if n not in lanes and n != holder}
        if self._last is None:
            hidden["host"] = "input"
        return hidden | hidden_sync(hidden.get("backward", "backward"))

    def on_train_begin(self, logs: Any = None) -> None:
        if keras.backend.backend() != "torch":
            raise FlatoutError(
                f"KerasTimeline needs Keras' torch backend, found {keras.backend.backend()}",
                do="set KERAS_BACKEND=torch before keras is imported",
            )
        self._end()
        # A callback at the very end of Keras' list measures the callbacks after this one.
        callers = sys._getframe(1).f_locals.get("self")
        if isinstance(callers, keras.callbacks.CallbackList):
            self._last = _Last(self._step_lanes)
            callers.callbacks.append(self._last)
        if not self.model.jit_compile:
            self._watch(self.model, "compute_loss", lambda: "forward", "forward")
            self._watch(self.model.optimizer, "apply", lambda: "backward", "optimizer")
        for name in ("save", "save_weights"):
            self._watch(self.model, name, lambda: self._lane, "saving")
        self._batches = int(self._optimizer._iterations) % self._accumulates
        self._lane = "idle"
        self._step_lanes.start()

    @property
    def _optimizer(self) -> Any:
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    @property
    def _accumulates(self) -> int:
        return self._optimizer.gradient_accumulation_steps or 1

    def _watch(self, it: Any, name: str, before: Callable[[], str], during: str) -> None:
        if name in vars(it):
            return
        lanes = self._step_lanes

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            lanes.was(before())
            try:
                return getattr(type(self), name)(self, *args, **kwargs)
            finally:
                lanes.was(during)

        # Bypasses Keras' own __setattr__, which would search for layers and variables in it.
        object.__setattr__(it, name, MethodType(watched, it))
        self._watched.append((it, name))

    def _end(self) -> None:
        self._step_lanes.stop()
        for it, name in self._watched:
            object.__delattr__(it, name)
        self._watched = []

    def on_train_end(self, logs: Any = None) -> None:
        self._end()
        if not self._is_one_of_many():
            self._step_lanes.say(self._hidden())

    def _is_one_of_many(self) -> bool:
        import torch.distributed as dist

        return dist.is_available() and dist.is_initialized() and dist.get_rank() > 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._step_lanes.was("idle")
        self._lane = "host"

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step_lanes.was("input")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step_lanes.was("host" if self._is_watched else "forward")
        self._batches += 1
        if self._batches % self._accumulates == 0:
            self._step_lanes.end_step()

    @property
    def _is_watched(self) -> bool:
        return "optimizer" in self._step_lanes.lanes

    def on_test_begin(self, logs: Any = None) -> None:
        self._step_lanes.was("idle")
        self._step_lanes.within = "evaluation"

    def on_test_end(self, logs: Any = None) -> None:
        self._step_lanes.was("evaluation")
        self._step_lanes.within = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._step_lanes.was("idle")
        self._lane = "idle"


class _Last(Callback):  # type: ignore[misc]
    """The last of Keras' callbacks, at which all others have run after a batch."""

    def __init__(self, lanes: StepLanes) -> None:
        super().__init__()
        self._step_lanes = lanes

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step_lanes.was("host")
