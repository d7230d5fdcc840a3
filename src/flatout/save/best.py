"""Finds a run's last weights (of its newest checkpoint) and its best weights.

The best weights are in the checkpoint with the best score; BestCheckpoint sets scores. If no
checkpoint has a score, the best weights may be in the state of EarlyStopping, which is stored in
the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from flatout.errors import CheckpointError
from flatout.save.checkpoint import Checkpoints, read_state
from flatout.save.storage import Folder

Which = Literal["best", "last"]


@dataclass(frozen=True)
class RunWeights:
    """Best or last weights of a run.

    Attributes:
        which: "best" or "last".
        checkpoint: name of the checkpoint that holds these weights.
        score: monitored metric with its value, such as "val_loss 0.3124"; "" if unknown.
        weights: tensors by name, if EarlyStopping holds these weights; None if they are the
            checkpoint's model weights.
    """

    which: Which
    checkpoint: str
    score: str
    weights: dict[str, Tensor] | None = field(default=None, repr=False)

    def describe(self) -> str:
        source = " (held by EarlyStopping)" if self.weights is not None else ""
        return f"{self.which}  {self.checkpoint}{source}  {self.score or 'no score'}"


def kept_in(folder: Folder) -> list[RunWeights]:
    checkpoints = Checkpoints(folder.url)
    newest = checkpoints.latest()
    if newest is None:
        return []
    state = _mapping(read_state(folder.child(newest)))
    extra = _mapping(state.get("extra"))
    callbacks = [_mapping(its) for its in extra.get("callbacks") or ()]
    scored = checkpoints.best()
    if scored is not None:
        watcher = next((its for its in callbacks if _name(its.get("path")) == scored), {})
        score = _figure(watcher, watcher.get("best")) or f"score {checkpoints.score(scored):.6g}"
        best = RunWeights("best", scored, score)
    else:
        watcher = next((its for its in callbacks if its.get("weights")), {})
        if not watcher:
            return [RunWeights("last", newest, "")]
        is_newest = (watcher["best_epoch"], 0) == (state.get("epoch"), state.get("step_in_epoch"))
        weights = None if is_newest else dict(watcher["weights"])
        best = RunWeights("best", newest, _figure(watcher, watcher["best"]), weights)
    if best.checkpoint == newest and best.weights is None:
        return [best]
    logs = _mapping(extra.get("logs"))
    return [
        best,
        RunWeights("last", newest, _figure(watcher, logs.get(watcher.get("monitor", "")))),
    ]


def choose(kept: list[RunWeights], which: Which | None, where: str) -> RunWeights:
    if which == "last":
        return replace(kept[-1], which="last")
    if which == "best" and kept[0].which != "best":
        raise CheckpointError(
            "nothing tells which checkpoint is the best: none has a score",
            where=where,
            do='take the last (--last), or train with BestCheckpoint("val_loss")',
        )
    return kept[0]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _name(path: Any) -> str:
    return str(path).rpartition("/")[2] if path else ""


def _figure(watcher: Mapping[str, Any], value: Any) -> str:
    monitor = watcher.get("monitor")
    return f"{monitor} {value:.6g}" if monitor and isinstance(value, (int, float)) else ""
