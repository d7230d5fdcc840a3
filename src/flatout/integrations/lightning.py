"""The lanes of a Lightning Trainer's steps.

Lightning reports to its profiler what it begins and ends. This is finer than the callbacks' hooks,
and includes fetching a batch and moving it to the device. The user's profiler gets the same reports
as before. Backward and the optimizer's step are measured by hooks, because manual optimization does
not report them to the profiler.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from flatout.errors import FlatoutError
from flatout.integrations.step_lanes import StepLanes, Watches, hidden_sync

# Suffixes of the actions' names, with the lane of each; among nested actions, the innermost counts.
_ACTIONS = {
    "run_training_epoch": "host",
    "train_dataloader_next": "input",
    "batch_to_device": "copy",
    "training_step": "forward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "save_checkpoint": "saving",
}
_BETWEEN = ("evaluation", "saving")


def _lightning() -> Any:
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in ("lightning", "pytorch_lightning"):
                raise
    raise FlatoutError(
        "LightningTimeline needs Lightning, which is not installed",
        do="pip install 'lightning>=2.5,!=2.6.2,!=2.6.3'",
    )


class LightningTimeline(Watches, _lightning().Callback):  # type: ignore[misc]
    """Shows the time of each part of the steps of `trainer.fit`.

        timeline = flatout.integrations.LightningTimeline()
        lightning.Trainer(callbacks=[timeline]).fit(module, data)

    At the end the first rank prints two lines. A step ends with the batch after which an optimizer
    has stepped: with accumulation, several batches are one step.

    With several ranks, `sync` cannot be measured; `backward` includes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step_lanes = StepLanes()
        self._stack: list[tuple[str, str]] = []
        self._lanes: dict[str, str | None] = {}
        self._profiler: Any = None
        self._handles: list[Any] = []
        self._steps = 0

    def _hidden(self) -> dict[str, str]:
        lanes = [name for name in ("backward", "optimizer") if name not in self._step_lanes.lanes]
        return (dict.fromkeys(lanes, "forward") if self.timeline.steps else {}) | hidden_sync()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step
        self._stack.clear()
        self._profiler = profiler = trainer.profiler
        start, stop = profiler.start, profiler.stop

        def started(action_name: str) -> None:
            lane = self._lane_of(action_name)
            if lane is not None:
                self._enter(action_name, lane)
            start(action_name)

        def stopped(action_name: str) -> None:
            stop(action_name)
            if self._lane_of(action_name) is not None:
                self._leave(action_name)

        profiler.start, profiler.stop = started, stopped
        self._handles = [o.register_step_post_hook(self._on_stepped) for o in trainer.optimizers]
        self._step_lanes.start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()
        if trainer.is_global_zero:
            self._step_lanes.say(self._hidden())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        self._step_lanes.stop()
        while self._handles:
            self._handles.pop().remove()
        if self._profiler is not None:
            for name in ("start", "stop"):
                vars(self._profiler).pop(name, None)
            self._profiler = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_profiler": None, "_handles": []}

    def _lane_of(self, action: str) -> str | None:
        self._step_lanes.looks += 1
        if action not in self._lanes:
            self._lanes[action] = _ACTIONS.get(action.rpartition(".")[2])
        return self._lanes[action]

    def _enter(self, action: str, lane: str) -> None:
        self._step_lanes.was(self._lane)
        inside = self._lane in _BETWEEN
        self._stack.append((action, self._lane if inside else lane))

    def _leave(self, action: str) -> None:
        names = [name for name, _ in self._stack]
        if action in names:
            self._step_lanes.was(self._lane)
            # Nested actions have ended without a report, such as a step that was skipped.
            del self._stack[len(names) - 1 - names[::-1].index(action) :]

    @property
    def _lane(self) -> str:
        return self._stack[-1][1] if self._stack else "idle"

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._enter("backward", "backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._leave("backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._enter("step", "optimizer")

    def _on_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._leave("step")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step_lanes.was(self._lane)
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._step_lanes.end_step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._enter("evaluation", "evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave("evaluation")
