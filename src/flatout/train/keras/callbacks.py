"""Calls Keras' callbacks from Flatout's fit as Keras would call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from flatout.data import Batch
from flatout.errors import ModelError, WorldError
from flatout.models import (
    callback_states,
    first_epoch,
    keeps_best_weights,
    load_callback_states,
    saves_model,
    watches_batches,
)
from flatout.strategies import check_replicas
from flatout.train.callbacks import Callback, Figures
from flatout.train.state import FitState
from flatout.world import ONE, World


class LazyLogs(dict[str, Any]):
    """A batch's logs, computed when a callback reads them, because that waits for the device."""

    def __init__(self, compute: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._compute: Callable[[], dict[str, Any]] | None = compute

    def _fill(self) -> None:
        if self._compute is not None:
            compute, self._compute = self._compute, None
            self.update(compute())


def _filled(read: Callable[..., Any]) -> Callable[..., Any]:
    def read_when_filled(logs: LazyLogs, *given: Any) -> Any:
        logs._fill()
        return read(logs, *given)

    return read_when_filled


for _name in (
    "__getitem__", "__contains__", "__iter__", "__len__", "get", "items", "keys", "values", "copy",
):  # fmt: skip
    setattr(LazyLogs, _name, _filled(getattr(dict, _name)))


class KerasCallbacks(Callback):
    """Calls a Keras `CallbackList` at the moments at which Keras would.

    Changes that a callback makes to the model take effect here too: `stop_training`, an initial
    epoch restored from a backup, restored weights, a new learning rate. On several ranks, all ranks
    stop if one of them asks for it.
    """

    def __init__(
        self,
        callbacks: Any,
        model: Any,
        initial_epoch: int,
        read: Callable[[], dict[str, Any]],
        *,
        world: World = ONE,
        reads_batches: bool = False,
    ) -> None:
        self._callbacks = callbacks
        self._model = model
        self._initial_epoch = initial_epoch
        self._read = read
        self._world = world
        self._saved: dict[str, dict[str, Any]] = {}
        self._reads_batches = world.size > 1 and reads_batches
        self._watching = [c for c in callbacks.callbacks if watches_batches(c)]
        if not self._watching and not self._reads_batches:
            self.every = 2**62

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and weights that each Keras callback keeps."""
        return callback_states(self._callbacks.callbacks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until `on_fit_start`, which gives it to the Keras callbacks."""
        self._saved = state

    @property
    def adds_figures(self) -> bool:
        """Whether a callback may add to the logs."""
        return any(
            not type(c).__module__.startswith("keras.") or type(c).__name__ in _ADD_RATE
            for c in self._callbacks.callbacks
        )

    def check(self, state: FitState, figures: Figures) -> None:
        """Report callbacks that watch a missing figure, once; Keras does so each epoch."""
        if state.trainer.loop.asked_strategy == "fsdp":
            # Callbacks that write are on the first rank only.
            own = [type(c).__name__ for c in self._callbacks.callbacks if saves_model(c)]
            each = self._world.gather(own, "callbacks that save the model")
            _check_saves_nothing([name for names in each for name in names])
        names = [name for name in figures.names if name != "seconds"]
        for callback in self._callbacks.callbacks:
            monitor = getattr(callback, "monitor", None)
            if not getattr(callback, "save_best_only", True):
                continue  # it saves every epoch
            if figures.complete and isinstance(monitor, str) and monitor not in names:
                state.trainer.loop.say(
                    f"{type(callback).__name__} watches {monitor!r}, which no epoch will have; "
                    f"there is: {', '.join(names)}"
                )

    def on_fit_start(self, state: FitState) -> None:
        """Start at the epoch that the callbacks or the user set."""
        self._model.stop_training = False
        self._callbacks.on_train_begin()
        load_callback_states(
            self._callbacks.callbacks, self._saved
        )  # on_train_begin has reset them
        begin = first_epoch(self._model) or self._initial_epoch
        if begin > state.trainer.loop.epoch:
            state.epoch = state.trainer.loop.progress.epoch = begin
        begins = self._world.gather(state.trainer.loop.epoch)
        if len(set(begins)) > 1:
            raise WorldError(
                "after the callbacks' on_train_begin, the ranks would begin at different "
                f"epochs: {begins}",
                do="write the files of BackupAndRestore to a path that all nodes share",
            )
        check_replicas(self._model, self._world, "after the callbacks' on_train_begin")

    def watched_batches(self, state: FitState, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Call `on_train_batch_begin` only once a step has a batch, as the data may end before."""
        return self._begun(state, batches) if self._watching else batches

    def _begun(self, state: FitState, batches: Iterator[Batch]) -> Iterator[Batch]:
        stepper = state.trainer.loop.stepper
        for batch in batches:
            if not stepper.joint.gathered:
                for callback in self._watching:
                    callback.on_train_batch_begin(state.step_in_epoch, logs={})
            yield batch
            del batch  # release the batch while the next batch is made

    def on_epoch_start(self, state: FitState) -> None:
        """Call `on_epoch_begin`."""
        if not state.step_in_epoch:
            self._model.reset_metrics()
        self._callbacks.on_epoch_begin(state.epoch)

    def on_step(self, state: FitState) -> None:
        """Call `on_train_batch_end`."""
        number = state.step_in_epoch - 1
        logs = LazyLogs(self._read)
        if self._reads_batches:
            len(logs)  # computes the logs
        for callback in self._watching:
            callback.on_train_batch_end(number, logs=logs)
        if self._wants_to_stop(self._reads_batches):
            state.stop(_STOPPED)

    def on_epoch_end(self, state: FitState) -> None:
        """Call `on_epoch_end`; figures that callbacks add to the logs are kept."""
        logs = _in_keras_order(state.logs)
        # One by one with the same logs, since each may add figures that the next one reads.
        with self._whole_weights(state):
            for callback in self._callbacks.callbacks:
                callback.on_epoch_end(state.epoch, logs)
        seconds = state.logs["seconds"]
        state.logs.clear()
        state.logs.update(logs, seconds=seconds)
        if self._wants_to_stop(ask_others=True):
            state.stop(_STOPPED)

    def _wants_to_stop(self, ask_others: bool) -> bool:
        stops = bool(self._model.stop_training)
        if ask_others:
            stops = self._model.stop_training = any(self._world.gather(stops))
        return stops

    def on_fit_end(self, state: FitState) -> None:
        """Call `on_train_end`."""
        self._finalize()
        with self._whole_weights(state):
            self._callbacks.on_train_end(_in_keras_order(state.logs))
        self._world.wait()  # after this, all ranks find the files that the first rank has written

    def _whole_weights(self, state: FitState) -> AbstractContextManager[None]:
        if not any(map(keeps_best_weights, self._callbacks.callbacks)):
            return nullcontext()
        return state.trainer.loop.stepper.strategy.whole_weights()

    def _finalize(self) -> None:
        optimizer = self._model.optimizer
        if hasattr(optimizer, "finalize_variable_values"):
            optimizer.finalize_variable_values(self._model.trainable_weights)


def watched(
    callbacks: Any,
    kind: Literal["test", "predict"],
    world: World,
    batches: Iterator[Batch],
    read: Callable[[], dict[str, Any]],
) -> Iterator[Batch]:
    """Yield the batches of an evaluation or prediction, and call Keras' callbacks around each.

    A batch ends when the next batch is requested. A callback may end the pass.
    """
    watching = [c for c in callbacks.callbacks if watches_batches(c, kind)]
    model, stop = callbacks.model, {"test": "stop_evaluating", "predict": "stop_predicting"}[kind]
    setattr(model, stop, False)
    if not any(world.gather(bool(watching), "whether callbacks watch batches")):
        yield from batches
        return
    for number, batch in enumerate(batches):
        for callback in watching:
            getattr(callback, f"on_{kind}_batch_begin")(number, logs={})
        yield batch
        logs = LazyLogs(read)
        if world.size > 1:
            len(logs)  # computes the logs
        for callback in watching:
            getattr(callback, f"on_{kind}_batch_end")(number, logs=logs)
        if any(world.gather(bool(getattr(model, stop)), "whether a rank wants to stop")):
            return


def _in_keras_order(logs: dict[str, Any]) -> dict[str, Any]:
    names = sorted(logs, key=lambda name: (name.startswith("val_"), name))
    return {name: logs[name] for name in names if name != "seconds"}


def _check_saves_nothing(savers: Sequence[str]) -> None:
    if savers:
        raise ModelError(
            f"{savers[0]} reads or changes the whole model while it trains, and under "
            "world.strategy=fsdp each rank has a part of it",
            do="leave it out, and let Flatout write checkpoints: Trainer(..., run=...); or train "
            "with world.strategy=ddp",
        )


# Callbacks that add the learning rate to the logs.
_ADD_RATE = ("LearningRateScheduler", "ReduceLROnPlateau")
_STOPPED = "a Keras callback set model.stop_training"
