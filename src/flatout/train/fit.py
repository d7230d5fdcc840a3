"""Fit: epochs of steps, with validation, callbacks and checkpoints around them.

prepare                     settings decided by measuring; resume
for epoch in epochs:
    for batch in source:
        one step            step.py; scheduler; callbacks with every=n; checkpoint every n
    validation              evaluate.py
    callbacks, checkpoint
"""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.data.source import Source
from flatout.errors import CheckpointError, NumbersError
from flatout.recipe import dump
from flatout.train.callbacks import Callback, JsonLines, Progress
from flatout.train.compute import build_compute
from flatout.train.evaluate import evaluate
from flatout.train.history import History
from flatout.train.metrics import as_metrics
from flatout.train.signals import Interrupted, StopSignals, is_interactive
from flatout.train.state import FitState

if TYPE_CHECKING:
    from flatout.train.trainer import Trainer


class Fit:
    """One call of `Trainer.fit`."""

    def __init__(
        self,
        trainer: Trainer,
        source: Source,
        validation: Source | None,
        epochs: int,
        callbacks: list[Callback],
        progress: bool | None,
    ) -> None:
        self.trainer = trainer
        self.loop = trainer.loop
        self.source = source
        self.validation = validation
        self.metrics = as_metrics(trainer.metrics)
        labels = source.labels_range()
        self.compute = build_compute(
            trainer.model,
            trainer.loss,
            self.metrics.values(),
            unweighted=labels is not None and labels[0] >= 0,
        )
        steps = None if source.steps is None else -(-source.steps // self.loop.accumulate)
        batch_size = (source.batch_size or 1) * self.loop.accumulate
        history = History(batch_size=batch_size, timeline=self.loop.timeline)
        self.state = FitState(trainer, history, epochs, steps, batch_size)
        self.state._read_loss = self.loop.mean_loss
        self.callbacks = callbacks if progress is False else [*callbacks, Progress()]
        self.signals = StopSignals()

    def run(self) -> History:
        """Train, and leave the model, optimiser and process as a script expects them."""
        with self.signals:
            self._prepare()
            try:
                self._call("on_fit_start")
                self._train()
                self._call("on_fit_end")
            except BaseException as error:
                for callback in self.callbacks:
                    callback.on_fit_error(self.state, error)
                raise
            finally:
                self.loop.close()
        return self.state.history

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the Loop's own state."""
        return {
            "history": self.state.history.epochs,
            "logs": self.state.logs,
            "metrics": {name: metric.state_dict() for name, metric in self.metrics.items()},
            "callbacks": [c.state_dict() for c in self._stateful()],
        }

    # -- before ------------------------------------------------------------------------------

    def _prepare(self) -> None:
        state, loop, trainer = self.state, self.loop, self.trainer
        if not trainer.model.training:
            trainer.model.train()
        planned = None
        if state.steps_per_epoch is not None:
            planned = state.steps_per_epoch * state.epochs
        loop.prepare(
            trainer.model,
            trainer.optimizer,
            trainer.scheduler,
            compute=self.compute,
            data=self.source,
            steps=planned,
        )
        for metric in self.metrics.values():
            metric.reset()  # measuring has fed them
        trainer.resolved = state.history.recipe = loop.resolved
        if loop.restored_extra is not None:
            self._load_state_dict(loop.restored_extra)
        self._open_run()
        loop.timeline.reset()
        loop.timeline.start()

    def _load_state_dict(self, saved: dict[str, Any]) -> None:
        state, loop = self.state, self.loop
        state.epoch, state.step, state.step_in_epoch = (
            loop.epoch,
            loop.step_count,
            loop.step_in_epoch,
        )
        state.history.epochs.extend(saved["history"])
        state.logs = saved["logs"]
        for name, metric in self.metrics.items():
            if name in saved["metrics"]:
                metric.load_state_dict(saved["metrics"][name])
        callbacks = self._stateful()
        if len(callbacks) != len(saved["callbacks"]):
            raise CheckpointError(
                f"the checkpoint was made with {len(saved['callbacks'])} callback(s), "
                f"found {len(callbacks)}",
                do="resume with the same callbacks in the same order",
            )
        for callback, its in zip(callbacks, saved["callbacks"], strict=True):
            callback.load_state_dict(its)

    def _stateful(self) -> list[Callback]:
        """The user's callbacks: what Flatout adds for showing and logging needs no state."""
        return [c for c in self.callbacks if not isinstance(c, (Progress, JsonLines))]

    def _open_run(self) -> None:
        """Fail now rather than at the first checkpoint, and write down what runs."""
        if self.loop.run is None:
            return
        self.loop.checkpoints.check_writable()
        if "://" not in self.loop.run:
            folder = Path(self.loop.run)
            assert self.loop.resolved is not None
            dump(self.loop.resolved, folder / "recipe.toml")
            self.callbacks.append(JsonLines(folder / "log.jsonl"))

    # -- epochs ------------------------------------------------------------------------------

    def _train(self) -> None:
        state, loop = self.state, self.loop
        while loop.epoch < state.epochs and state.stop_reason is None:
            state.epoch = loop.epoch
            began = time.perf_counter()
            self._call("on_epoch_start")
            self._steps()
            if state.stop_reason is not None and state.step_in_epoch != state.steps_per_epoch:
                break  # in the middle of an epoch: its figures would be of a part only
            self._end_epoch(began)
        state.history.stop_reason = state.stop_reason

    def _steps(self) -> None:
        state, loop, compute, signals = self.state, self.loop, self.compute, self.signals
        watching = [c for c in self.callbacks if type(c).on_step is not Callback.on_step]
        save_every = loop.requested.save.every if loop.run is not None else None
        schedule = self._per_step_scheduler()
        for batch in loop.batches(self.source):
            if not loop.step(compute, batch):
                continue
            if schedule is not None:
                schedule.step()
            state.step = loop.step_count
            state.step_in_epoch = loop.step_in_epoch
            for callback in watching:
                if not state.step % callback.every:
                    callback.on_step(state)
            if save_every and not state.step % save_every:
                self._checkpoint()
            if signals.received is not None:
                self._interrupt(signals.received)
            if state.stop_reason is not None:
                return
        if loop.flush(compute):
            if schedule is not None:
                schedule.step()
            state.step, state.step_in_epoch = loop.step_count, loop.step_in_epoch

    def _end_epoch(self, began: float) -> None:
        state, loop = self.state, self.loop
        loop.check_numbers(self.compute)
        loss = loop.mean_loss()
        if not math.isfinite(loss) and loop.step_in_epoch:
            raise NumbersError(
                f"the mean loss of epoch {state.epoch + 1} is {loss}, though gradients were finite",
                do="look at the loss function for values that carry no gradient",
            )
        logs = {"loss": loss, **{name: m.compute() for name, m in self.metrics.items()}}
        state.logs = logs
        if self.validation is not None:
            start = time.perf_counter_ns()
            found = evaluate(self.trainer, self.validation)
            loop.timeline.add("evaluation", time.perf_counter_ns() - start)
            logs.update({f"val_{name}": value for name, value in found.items()})
            self._call("on_evaluate_end")
        self._schedule_epoch(logs)
        logs["seconds"] = time.perf_counter() - began
        state.history.epochs.append(logs)
        state.history.notes.extend(loop.notes())
        self._call("on_epoch_end")
        loop.finish_epoch()
        state.step_in_epoch = 0
        for metric in self.metrics.values():
            metric.reset()
        if loop.run is not None and not loop.requested.save.every:
            self._checkpoint()
        if self.signals.received is not None:
            self._interrupt(self.signals.received)

    def _per_step_scheduler(self) -> Any:
        scheduler = self.trainer.scheduler
        if self.trainer.schedule_every != "step" or _is_plateau(scheduler):
            return None
        return scheduler

    def _schedule_epoch(self, logs: dict[str, float]) -> None:
        scheduler = self.trainer.scheduler
        if _is_plateau(scheduler):
            scheduler.step(logs.get("val_loss", logs["loss"]))
        elif scheduler is not None and self.trainer.schedule_every == "epoch":
            scheduler.step()

    # -- checkpoints and stopping --------------------------------------------------------------

    def _checkpoint(self) -> str:
        start = time.perf_counter_ns()
        self.loop.check_numbers(self.compute)
        path = self.loop.save(self.state_dict())
        self.loop.timeline.add("saving", time.perf_counter_ns() - start)
        for callback in self.callbacks:
            callback.on_checkpoint(self.state, path)
        return path

    def _interrupt(self, signum: int) -> None:
        """Write a checkpoint, say where it lies, and leave."""
        if self.loop.run is None:
            self.loop.run = f"runs/{time.strftime('%Y-%m-%d-%H%M%S')}"
        path = self._checkpoint()
        self.loop.checkpoints.wait()
        name = "^C" if signum == signal.SIGINT else signal.Signals(signum).name
        self.trainer._say(
            f"{name} step {self.state.step:,} -> checkpoint {path}, exit {128 + signum}; "
            f"go on with Trainer(..., run={self.loop.run!r}).fit(..., resume=True)"
        )
        if signum == signal.SIGINT and is_interactive():
            raise KeyboardInterrupt
        raise Interrupted(signum, path)

    def _call(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.state)


def _is_plateau(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
