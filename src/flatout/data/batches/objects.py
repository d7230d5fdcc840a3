"""Objects that hold tensors, such as those of loaders of graphs and of packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def tensors_of_object(value: Any) -> dict[str, Any] | None:
    """Return the members of an object that hold tensors, by name; None if it has no tensor.

    Such objects are a PackedSequence, a dataclass, and an object with `.to(device)`, as PyTorch
    Geometric's `Data`. The tensors of the latter are found by its `to_dict()` or among its
    attributes. None also for objects of other types.
    """
    if isinstance(value, PackedSequence):
        # torch needs `batch_sizes` on the CPU, wherever the other tensors are.
        return {"data": value.data, "sorted_indices": value.sorted_indices}
    if isinstance(value, (type, Tensor, nn.Module)):
        return None
    if is_dataclass(value):
        held: Any = {field.name: getattr(value, field.name, None) for field in fields(value)}
    elif not callable(getattr(type(value), "to", None)):
        return None
    elif _applies(value) and callable(getattr(value, "to_dict", None)):
        held = value.to_dict()
    else:
        held = vars(value) if hasattr(value, "__dict__") else None
    return dict(held) if isinstance(held, Mapping) and _holds_tensor(held) else None


def mapped_object(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, PackedSequence):
        order, back = (
            None if part is None else function(part)
            for part in (value.sorted_indices, value.unsorted_indices)
        )
        return PackedSequence(function(value.data), value.batch_sizes, order, back)
    made = copy(value)
    if not is_dataclass(value) and _applies(value):
        return made.apply(lambda part: function(part) if isinstance(part, Tensor) else part)
    for name, part in (tensors_of_object(value) or {}).items():
        if _holds_tensor(part):
            object.__setattr__(made, name, function(part))  # a dataclass may be frozen
    return made


def _applies(value: Any) -> bool:
    return callable(getattr(type(value), "apply", None))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)
