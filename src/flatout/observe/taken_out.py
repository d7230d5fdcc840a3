"""Lanes that can be taken out of a running script between two of its steps, and put back.

Each class has `take_out()` and `put_back()`. Taking out changes the training result, so it is only
for runs whose results are discarded.
"""

from __future__ import annotations

import builtins
import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from threading import get_ident
from types import CodeType
from typing import Any

from flatout.hooks import Hook, wrap
from flatout.observe.lanes import FORWARD, HOST, INPUT
from flatout.observe.rewriting import Rewriting
from flatout.observe.watch import Watch


class Input:
    """Batches to train on: the loader gives the same batch again, without waiting.

    An epoch keeps its number of batches, since scripts count them. Only a dataset without a length
    gives more batches. Workers may fill their queue meanwhile.
    """

    def __init__(self, watch: Watch) -> None:
        self._lanes = watch.lanes
        self._is_out = False
        self._kept: dict[int, KeptBatch] = {}
        module = sys.modules.get("torch.utils.data.dataloader")
        if module is not None:
            wrap(module._BaseDataLoaderIter, "__next__", "ablation", self._given)

    def take_out(self) -> None:
        self._is_out = True

    def put_back(self) -> None:
        self._is_out = False
        self._kept.clear()

    def _given(self, original: Any) -> Any:
        lanes = self._lanes

        def take(iterator: Any) -> Any:
            loader_now = iterator.__dict__.get("_flatout_seen")
            if get_ident() != lanes.thread or lanes.current == INPUT:
                return original(iterator)
            if loader_now is None or not loader_now.in_training:
                return original(iterator)
            left = _length(iterator) - iterator._num_yielded
            if left <= 0:  # real batches remain, in place of the repeated batches
                lanes.begin_batch()
                lanes.switch(HOST)
                raise StopIteration
            kept = self._kept.get(loader_now.number) if self._is_out else None
            if kept is None:
                batch = original(iterator)
                if self._is_out and left > 1:  # the last batch may be smaller
                    self._kept[loader_now.number] = KeptBatch(batch)
                return batch
            lanes.begin_batch()
            lanes.loader = loader_now
            iterator._num_yielded += 1
            batch = kept.again()
            lanes.switch(FORWARD)
            return batch

        return take


def batches_in(iterator: Any) -> int | None:
    """Return the number of batches of a DataLoader's iterator; None where it is unknown."""
    try:
        return len(iterator._index_sampler) if iterator._dataset_kind == 0 else None
    except (TypeError, NotImplementedError):
        return None


def _length(iterator: Any) -> float:
    known = iterator.__dict__.get("_flatout_length")
    if known is None:
        length = batches_in(iterator)
        known = float("inf") if length is None else length
        iterator._flatout_length = known
    return float(known)


class KeptBatch:
    """A batch that is given several times, each time with its original content."""

    def __init__(self, batch: Any) -> None:
        self._out = batch
        self._versions = _versions(batch)
        self._as_it_was = _deeply(batch)

    def again(self) -> Any:
        """Return the batch, or a copy of the original if a step has changed it in place."""
        if _versions(self._out) != self._versions:
            self._out = _deeply(self._as_it_was)
            self._versions = _versions(self._out)
        return _around(self._out)


def _deeply(batch: Any) -> Any:
    try:
        return deepcopy(batch)
    except Exception:  # an object of the user's class that cannot be copied
        return batch


def _versions(batch: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(batch)]


def _tensors(part: Any, depth: int = 0) -> Iterator[Any]:
    if hasattr(part, "_version"):
        yield part
    elif depth < 5:
        if isinstance(part, Mapping):
            parts: Any = part.values()
        else:
            parts = part if isinstance(part, (list, tuple)) else getattr(part, "__dict__", {})
            parts = parts.values() if isinstance(parts, dict) else parts
        for inner in parts:
            yield from _tensors(inner, depth + 1)


def _around(part: Any) -> Any:
    if type(part) is dict:
        return {key: _around(value) for key, value in part.items()}
    if type(part) in (list, tuple):
        return type(part)(_around(inner) for inner in part)
    return part if hasattr(part, "_version") else copy.copy(part)


class Sync:
    """Sum of gradients over the ranks; taken out, each rank uses only its own gradients."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def take_out(self) -> None:
        self._set(False)

    def put_back(self) -> None:
        self._set(True)

    def _set(self, is_on: bool) -> None:
        for wrapper in summing(self._watch):
            wrapper.require_backward_grad_sync = is_on


def summing(watch: Watch) -> list[Any]:
    """Return the models that sum their gradients over the ranks, and can run without that."""
    torch: Any = sys.modules.get("torch")
    kind = torch.nn.parallel.DistributedDataParallel
    result = [model.ref() for model in watch.models]
    return [item for item in result if isinstance(item, kind) and not item.static_graph]


class OneCall:
    """A user's call with an unused value: taken out, it is not made."""

    def __init__(self, code: Rewriting, number: int) -> None:
        self._makes, self._at = code.makes, 2 * number

    def take_out(self) -> None:
        self._makes[self._at] = False

    def put_back(self) -> None:
        self._makes[self._at] = True


# Logging functions by module.
_TELLING = {"wandb": ("log",), "mlflow": ("log_metric", "log_metrics")}
_SUMMARIES = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


class Log:
    """Output during training: print, logging, and summaries for TensorBoard or other loggers."""

    def __init__(self, watch: Watch) -> None:
        self._lanes = watch.lanes
        self._hooks: list[Hook] = []

    @property
    def has_summaries(self) -> bool:
        """True if loggers other than print and logging are imported, whose time is not measured."""
        return bool(_summaries())

    def take_out(self) -> None:
        if not self._hooks:
            result = [(builtins, "print"), (logging.Logger, "_log"), *_summaries()]
            self._hooks = [wrap(*place, "ablation", self._silent) for place in result]

    def put_back(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _silent(self, original: Any) -> Any:
        lanes = self._lanes

        def silent(*args: Any, **kwargs: Any) -> Any:
            return None if get_ident() == lanes.thread else original(*args, **kwargs)

        return silent


def _summaries() -> list[tuple[Any, str]]:
    places: list[tuple[Any, str]] = []
    for name in _SUMMARIES:
        owner = getattr(sys.modules.get(name), "SummaryWriter", None)
        places += [(owner, adding) for adding in vars(owner or object) if adding[:4] == "add_"]
    for name, functions in _TELLING.items():
        module = sys.modules.get(name)
        places += [(module, function) for function in functions if hasattr(module, function)]
    return places


class Items:
    """Waiting for a device to read a value; taken out, a line gets the value that it read last.

    Args:
        watch: the Watch of the stepping thread.
        device: type of the device.
    """

    def __init__(self, watch: Watch, device: str = "cuda") -> None:
        self._lanes = watch.lanes
        self._device = device
        self._values: dict[tuple[Any, ...], tuple[CodeType, Any]] = {}
        self._hooks: list[Hook] = []

    def take_out(self) -> None:
        tensor: Any = sys.modules["torch"].Tensor
        if not self._hooks:
            names = ("item", "__float__", "tolist", "cpu")
            self._hooks = [wrap(tensor, name, "ablation", self._held) for name in names]

    def put_back(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._values.clear()

    def _held(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        lanes, values, device = self._lanes, self._values, self._device

        def held(tensor: Any) -> Any:
            if tensor.device.type != device or get_ident() != lanes.thread:
                return original(tensor)
            frame = sys._getframe(1)
            # The shape is in the key, since the last batch of an epoch may be smaller.
            key = (id(frame.f_code), frame.f_lasti, tensor.shape)
            if key not in values:
                values[key] = (frame.f_code, original(tensor))
            return values[key][1]

        return held
