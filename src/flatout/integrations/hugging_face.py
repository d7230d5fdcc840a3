"""The lanes of a Hugging Face Trainer's steps."""

from __future__ import annotations

from typing import Any

from flatout.errors import FlatoutError
from flatout.integrations.step_lanes import StepLanes, Watches, hidden_sync

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise FlatoutError(
        "HFTimeline needs transformers, which is not installed",
        do="pip install transformers accelerate",
    ) from None


class HFTimeline(Watches, TrainerCallback):  # type: ignore[misc]
    """Shows the time of each part of the steps of `trainer.train`.

        timeline = flatout.integrations.HFTimeline()
        transformers.Trainer(..., callbacks=[timeline]).train()

    At the end the first process prints two lines. With accumulation, a step has several batches.

    Backward begins when the model's forward has returned and ends when the optimizer steps, so that
    it includes gradient clipping. `copy` is the time from having a batch to calling the model. If
    `torch.compile` or DataParallel replace the model's call, its forward is not watched, and
    `forward` includes `copy` and `backward`. With several ranks, `backward` includes `sync`.
    """

    def __init__(self) -> None:
        self._step_lanes = StepLanes()
        self._handles: list[Any] = []
        self._called = False
        self._evaluates = False

    def _hidden(self) -> dict[str, str]:
        if self.timeline.steps and "backward" not in self._step_lanes.lanes:
            return {"copy": "forward", "backward": "forward"} | hidden_sync("forward")
        return hidden_sync()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
        model = kwargs["model"]
        if not _is_taken_over(model, args):
            self._handles = [
                model.register_forward_pre_hook(self._before_forward),
                model.register_forward_hook(self._after_forward),
            ]
        self._evaluates = self._called = False
        self._step_lanes.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
        if state.is_world_process_zero:
            self._step_lanes.say(self._hidden())

    def _end(self) -> None:
        self._step_lanes.stop()
        while self._handles:
            self._handles.pop().remove()

    def _before_forward(self, module: Any, args: Any) -> None:
        if module.training:
            self._step_lanes.was("forward" if self._called else "copy")

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if module.training:
            self._called = True
            self._step_lanes.was("forward")

    @property
    def _in_training_step(self) -> str:
        return "backward" if self._handles else "forward"

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_lanes.was("idle")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_lanes.was("input")
        self._called = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_lanes.was(self._in_training_step)
        self._called = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_lanes.was(self._in_training_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_lanes.was("optimizer")
        self._step_lanes.end_step()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_lanes.was("evaluation" if self._evaluates else "host")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluates = True
        self._step_lanes.was("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_lanes.was("evaluation")
        self._evaluates = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_lanes.was("saving")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_lanes.was("idle")


def _is_taken_over(model: Any, args: Any) -> bool:
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None)
    return bool(compiled or args.torch_compile or args.n_gpu > 1)
