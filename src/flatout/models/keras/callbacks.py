"""Selection of the Keras callbacks that run on each rank.

Callbacks that decide (EarlyStopping, ReduceLROnPlateau, schedules, the user's own) run on every
rank. They get the same logs, so they decide the same. Callbacks that write files run only on the
first rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from flatout.world import World


def on_rank(given: list[Any], world: World) -> list[Any]:
    """Return the callbacks of this rank, from all callbacks that the user gave."""
    if world.is_first:
        return given
    from keras.callbacks import BackupAndRestore

    own = []
    for callback in given:
        if isinstance(callback, BackupAndRestore):
            own.append(_beginning_of(callback))
        elif not _writes(callback):
            own.append(callback)
        if type(callback).__module__.startswith("keras.") and hasattr(callback, "verbose"):
            callback.verbose = 0  # only the first rank prints
    return own


def reads_batches(callback: Any) -> bool:
    """Return whether a callback may read a batch's logs on some ranks only, which would hang."""
    from keras import callbacks

    if not watches_batches(callback):
        return False
    kind = type(callback)
    if not kind.__module__.startswith("keras.") or kind is callbacks.LambdaCallback:
        return True
    rates = (getattr(callback, "save_freq", "epoch"), getattr(callback, "update_freq", "epoch"))
    return _writes(callback) and rates != ("epoch", "epoch")


def _writes(callback: Any) -> bool:
    from keras import callbacks

    names = ("CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "RemoteMonitor", "TensorBoard")
    kinds = [getattr(callbacks, name) for name in names if hasattr(callbacks, name)]
    return isinstance(callback, (*kinds, callbacks.BackupAndRestore))


def _beginning_of(backup: Any) -> Any:
    from keras.callbacks import LambdaCallback

    # The list of callbacks sets its model.
    restoring = LambdaCallback()

    def begin(logs: Any = None) -> None:
        backup.set_model(restoring.model)
        backup.on_train_begin(logs)

    restoring.on_train_begin = begin
    return restoring


def watches_batches(callback: Any, kind: str = "train") -> bool:
    """Return whether a callback overrides a batch method, which is empty in Keras' base class.

    Args:
        callback: a Keras callback.
        kind: "train", "test" or "predict".
    """
    from keras.src.utils import is_default

    names = [f"on_{kind}_batch_begin", f"on_{kind}_batch_end"]
    if kind == "train":
        names += ["on_batch_begin", "on_batch_end"]
    return not all(is_default(getattr(callback, name)) for name in names)


def first_epoch(model: Any) -> int | None:
    """Return the epoch from which a backup lets a model continue, or None."""
    return model._initial_epoch  # type: ignore[no-any-return]


def keeps_best_weights(callback: Any) -> bool:
    """Return whether a callback keeps the best weights, and restores them at the end."""
    return bool(getattr(callback, "restore_best_weights", False))


def saves_model(callback: Any) -> bool:
    """Return whether a Keras callback reads or changes weights and optimizer state."""
    from keras import callbacks

    names = ("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint", "SwapEMAWeights")
    kinds = [getattr(callbacks, name) for name in names if hasattr(callbacks, name)]
    return isinstance(callback, tuple(kinds))


def callback_states(callbacks: list[Any]) -> dict[str, dict[str, Any]]:
    """Return the state of each callback, by class and by index among callbacks of that class.

    A callback that has `state_dict` and `load_state_dict` returns its own state. The state of other
    callbacks is the counters and weights of Keras' own callbacks; weights become tensors.
    """
    states = {}
    for name, callback in _numbered(callbacks):
        if has_state(callback):
            states[name] = callback.state_dict()
        else:
            found = {key: vars(callback)[key] for key in _COUNTED if key in vars(callback)}
            states[name] = {key: _as_plain(value) for key, value in found.items()}
    return states


def load_callback_states(callbacks: list[Any], states: dict[str, dict[str, Any]]) -> None:
    """Restore the states that `callback_states` returned."""
    for name, callback in _numbered(callbacks):
        if has_state(callback) and name in states:
            callback.load_state_dict(states[name])
        elif name in states:
            for key, value in states[name].items():
                is_weights = key == _WEIGHTS and value is not None
                vars(callback)[key] = [w.numpy() for w in value] if is_weights else value


def has_state(callback: Any) -> bool:
    return all(hasattr(callback, name) for name in ("state_dict", "load_state_dict"))


def _numbered(callbacks: list[Any]) -> Iterator[tuple[str, Any]]:
    seen: Counter[str] = Counter()
    for callback in callbacks:
        kind = type(callback).__qualname__
        yield f"{kind} {seen[kind]}", callback
        seen[kind] += 1


def _as_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [torch.as_tensor(weight) for weight in value]
    return value if isinstance(value, (bool, int, str, type(None))) else float(value)


# _WEIGHTS: name of EarlyStopping's attribute with weights. _COUNTED: names of the attributes of
# EarlyStopping, ReduceLROnPlateau and ModelCheckpoint that hold counters.
_WEIGHTS = "best_weights"
_COUNTED = (
    _WEIGHTS, "_batches_seen_since_last_saving", "best", "best_epoch", "cooldown_counter",
    "stopped_epoch", "wait",
)  # fmt: skip
