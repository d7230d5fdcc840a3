"""Detection of ids and labels out of range in a captured step, without using them as an index.

An eager step raises an error for them. Compiled code would end in a C++ error after it has changed
some of the weights, or on several threads end the process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_LOSSES = (F.cross_entropy, F.nll_loss)
_ALONG = (torch.gather, torch.Tensor.gather, torch.index_select, torch.Tensor.index_select)


class Bounded(TorchFunctionMode):
    """Context in which ids out of range are replaced by 0.

    Attributes:
        strays: for each call of a function that takes ids, a bool tensor that is True if an id was
            out of range.
    """

    def __init__(self) -> None:
        super().__init__()
        self.strays: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.embedding:
            given |= dict(zip(("input", "weight"), args, strict=False))
            ids = self._within(given.pop("input"), len(given["weight"]))
            args = (ids, given.pop("weight"), *args[2:])
        elif func in _LOSSES and len(args) > 1 and not args[1].is_floating_point():
            classes = args[0].shape[1 if args[0].dim() > 1 else 0]
            ignored = given.get("ignore_index", args[4] if len(args) > 4 else -100)
            labels = self._within(args[1], classes, ignored=ignored)
            args = (args[0], labels, *args[2:])
        elif func in _ALONG and len(args) == 3:
            args = (*args[:2], self._within(args[2], args[0].shape[args[1]]))
        elif func is torch.Tensor.__getitem__ and _is_ids(args[1]):
            args = (args[0], self._within(args[1], len(args[0]), lowest=-len(args[0])))
        return func(*args, **given)

    def _within(
        self, ids: torch.Tensor, size: int, *, lowest: int = 0, ignored: int | None = None
    ) -> torch.Tensor:
        known = (ids >= lowest) & (ids < size)
        if ignored is not None:
            known = known | (ids == ignored)
        self.strays.append(~known.all())
        return torch.where(known, ids, 0)


def _is_ids(index: Any) -> bool:
    return torch.is_tensor(index) and index.dtype in (torch.int32, torch.int64)
