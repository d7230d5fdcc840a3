"""What one side of a trial shows beside its times: losses of its steps, and of what batches."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any

from flatout.doctor.trials.baton import at_step
from flatout.observe.lanes import EVALUATION, SAVING, Lanes
from flatout.observe.watch import Watch

# Of a script's first steps and batches; what comes later is not compared.
_MOST = 2000
# Of a batch so many indices are looked at: they tell one order from another.
_INDICES = 256


class Stepping(Watch):
    """A Watch that passes the baton after each step, and records.

    Attributes:
        between: nanoseconds of evaluation and saving so far.
        record: of losses and batches.
        more: gives what else the trial hears, as plain data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.between = 0
        self.record = Record(self.lanes)
        self.more: Callable[[], dict[str, Any]] = dict
        self._done = 0
        self._first_s = 0.0
        self.lanes.due = 0

    def attend(self) -> None:
        """A step has ended; returns when the next may begin."""
        super().attend()
        lanes = self.lanes
        lanes.due = 0  # each step is
        self.between = lanes.spent[EVALUATION] + lanes.spent[SAVING]
        if lanes.steps == self._done:  # a part of the step before
            return
        self._done = lanes.steps
        if lanes.steps == 1:
            self._first_s = lanes.step_ms()[0] / 1e3
        self.record.end_step()
        at_step()

    def told(self) -> dict[str, Any]:
        """What has come since this was asked last, as plain data."""
        return {"first_s": self._first_s, **self.more(), **self.record.taken()}


class Record:
    """Losses of steps, and numbers for the indices of batches."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._steps = 0
        self._loss: Any = None
        self._losses: list[Any] = []
        self._batches: dict[int, list[int]] = {}
        self._counts: dict[int, int] = {}

    def end_step(self) -> None:
        """The loss that was met first is the step's."""
        if self._steps < _MOST:
            self._losses.append(self._loss)
            self._loss = None
            self._steps += 1

    def taken(self) -> dict[str, Any]:
        """Reads the values from the device: to be called where a block has ended."""
        losses = [float("nan") if loss is None else float(loss) for loss in self._losses]
        taken = {"losses": losses, "batches": self._batches}
        self._losses, self._batches = [], {}
        return taken

    def watch_losses(self, torch: Any) -> None:
        """Hooks into torch.autograd.backward, which Tensor.backward calls."""
        lanes, is_compiling = self._lanes, torch.compiler.is_compiling
        original, kind = torch.autograd.backward, torch.Tensor

        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            is_first = self._loss is None and self._steps < _MOST
            if is_first and not is_compiling() and get_ident() == lanes.thread:
                loss = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
                if isinstance(loss, kind) and loss.numel() == 1:
                    self._loss = loss.detach()
            original(tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def watch_indices(self, module: Any) -> None:
        """Hooks into torch.utils.data.dataloader, behind observe's own hooks."""
        owner = module._BaseDataLoaderIter
        original = owner._next_index

        @wraps(original)
        def next_index(iterator: Any) -> Any:
            index = original(iterator)
            seen = getattr(iterator, "_flatout_seen", None)
            if seen is not None and get_ident() == self._lanes.thread:
                self._batch(seen.number, index)
            return index

        owner._next_index = next_index

    def _batch(self, loader: int, index: Any) -> None:
        count = self._counts[loader] = self._counts.get(loader, 0) + 1
        if count > _MOST or not isinstance(index, (list, tuple)) or not index or index[0] is None:
            return
        try:
            shown = array("q", index[:_INDICES]).tobytes()
        except (TypeError, OverflowError):  # a sampler of other keys than numbers
            shown = repr(index[:_INDICES]).encode()
        self._batches.setdefault(loader, []).append(zlib.crc32(shown))
