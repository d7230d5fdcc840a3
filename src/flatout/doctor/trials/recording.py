"""Records losses of steps and hashes of batches in one side of a trial.

A restarted process of the same script records nothing: recording costs a tenth of a step of 0.15
ms, and short scripts are restarted many times.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Callable
from threading import get_ident
from typing import Any

import numpy as np

from flatout.doctor.trials.step_sync import RECORDED, at_step
from flatout.hooks import Hook, wrap
from flatout.observe import EVALUATION, SAVING, Lanes, Watch

# Maximum number of steps, and of each loader's batches, that are recorded.
_MOST = 2000
# Maximum number of indices of a batch that are hashed. They suffice to distinguish orders of
# samples.
_INDICES = 256
# _READ: number of first batches of each loader whose contents are hashed, to detect random
# augmentation. _BYTES: maximum bytes of each tensor that are hashed.
_READ, _BYTES = 8, 2**24


class Stepping(Watch):
    """A Watch that records at ends of steps, and waits for the trial at step boundaries.

    It is called at each step while losses are recorded, and later only at steps at which a block
    begins or ends. In steps of 0.5 ms, a call at each step cost a fifteenth of the time.

    Attributes:
        record: recorded losses and batches.
        more: function that returns further results for the trial, as plain data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = Record(self.lanes)
        self.more: Callable[[], dict[str, Any]] = dict
        self._done = 0
        self._first_s = 0.0

    @property
    def between(self) -> int:
        """Nanoseconds of evaluation and saving so far."""
        spent = self.lanes.spent
        return spent[EVALUATION] + spent[SAVING]

    def attend(self) -> None:
        """Handle the end of a step that is due; return when the next step may begin."""
        super().attend()
        lanes, more = self.lanes, 1
        taken = lanes.steps - self._done
        if taken:  # otherwise this call belongs to the previous step
            self._done = lanes.steps
            if lanes.steps == 1:
                self._first_s = lanes.step_ms()[0] / 1e3
            wants_next = self.record.end_step()
            more = at_step(taken)
            lanes.skip()  # the wait for the other process belongs to no lane
            if wants_next:
                more = 1
            else:
                self.record.stop()
        lanes.due = min(lanes.due, lanes.steps + more)

    def told(self) -> dict[str, Any]:
        """Return the results since the last call, as plain data."""
        return {"first_s": self._first_s, **self.more(), **self.record.taken()}


class Record:
    """Losses of steps, and hashes of the indices and contents of batches."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._most = int(os.environ.get(RECORDED, _MOST))
        self._steps = 0
        self._loss: Any = None
        self._hooks: list[Hook] = []
        self._losses: list[Any] = []
        self._batches: dict[int, list[int]] = {}
        self._contents: dict[int, list[int | None]] = {}
        self._counts: dict[int, int] = {}
        self._read: dict[int, int] = {}

    def end_step(self) -> bool:
        """Take the first loss since the last step; return True if the next step's is needed."""
        if self._steps < self._most:
            self._losses.append(self._loss)
            self._loss = None
            self._steps += 1
        return self._steps < self._most

    def stop(self) -> None:
        """Remove the hooks, since nothing more is recorded."""
        while self._hooks:
            self._hooks.pop().remove()

    def taken(self) -> dict[str, Any]:
        """Read the values from the device; call this at the end of a block."""
        losses = [float("nan") if loss is None else float(loss) for loss in self._losses]
        taken = {"losses": losses, "batches": self._batches, "contents": self._contents}
        self._losses, self._batches, self._contents = [], {}, {}
        return taken

    def watch_losses(self, torch: Any) -> None:
        """Hook into torch.autograd.backward, which Tensor.backward calls."""
        lanes, is_compiling = self._lanes, torch.compiler.is_compiling
        kind = torch.Tensor

        def around(original: Any) -> Any:
            def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
                is_first = self._loss is None and self._steps < self._most
                if is_first and not is_compiling() and get_ident() == lanes.thread:
                    loss = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
                    if isinstance(loss, kind) and loss.numel() == 1:
                        self._loss = loss.detach()
                original(tensors, *args, **kwargs)

            return backward

        self._hooks.append(wrap(torch.autograd, "backward", "recording", around))

    def watch_batches(self, module: Any) -> None:
        """Hook into torch.utils.data.dataloader."""
        owner = module._BaseDataLoaderIter
        self._hooks += [
            wrap(owner, "_next_index", "recording", self._shown, self._batch),
            wrap(owner, "__next__", "recording", self._shown, self._content),
        ]

    def _shown(self, original: Any, to: Callable[[int, Any], None]) -> Any:
        def take(iterator: Any) -> Any:
            value = original(iterator)
            loader = getattr(iterator, "_flatout_seen", None)
            if loader is not None and get_ident() == self._lanes.thread:
                to(loader.number, value)
            return value

        return take

    def _content(self, loader: int, batch: Any) -> None:
        count = self._read[loader] = self._read.get(loader, 0) + 1
        if count <= min(_READ, self._most):
            self._contents.setdefault(loader, []).append(content_of(batch))

    def _batch(self, loader: int, index: Any) -> None:
        count = self._counts[loader] = self._counts.get(loader, 0) + 1
        if (
            count > self._most
            or not isinstance(index, (list, tuple))
            or not index
            or index[0] is None
        ):
            return
        try:
            indices = array("q", index[:_INDICES]).tobytes()
        except (TypeError, OverflowError):  # the sampler's keys are not integers
            indices = repr(index[:_INDICES]).encode()
        self._batches.setdefault(loader, []).append(zlib.crc32(indices))


def content_of(batch: Any, begun: int = 0) -> int | None:
    """Return a hash of nested tensors, arrays and numbers; None if there are other types."""
    if isinstance(batch, dict):
        batch = [part for item in batch.items() for part in item]
    if isinstance(batch, (list, tuple)):
        result: int | None = zlib.crc32(str(len(batch)).encode(), begun)
        for part in batch:
            result = None if result is None else content_of(part, result)
        return result
    if batch is None or isinstance(batch, (bool, int, float, str, bytes)):
        return zlib.crc32(repr(batch).encode(), begun)
    try:
        kind = zlib.crc32(f"{tuple(batch.shape)} {batch.dtype}".encode(), begun)
        numbers = batch if isinstance(batch, np.ndarray) else _bytes_of(batch)
        plain = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)
        return zlib.crc32(plain[:_BYTES].data, kind)
    except (TypeError, ValueError, RuntimeError, AttributeError, BufferError):
        return None


def _bytes_of(tensor: Any) -> np.ndarray[Any, Any]:
    import torch

    if tensor.device.type != "cpu":
        raise TypeError("reading it would hold up the host")
    return np.from_dlpack(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
