"""Keras' embeddings: their weights, numbers of rows, and the check that only rows are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flatout.models.keras.layers import modules_of


def weight_of(layer: Any) -> torch.Tensor:
    value: torch.Tensor = layer._embeddings._value
    return value


def set_rows(layer: Any, rows: int) -> None:
    layer.input_dim = rows
    set_shape(layer._embeddings)


def set_shape(variable: Any) -> None:
    variable._shape = tuple(variable._value.shape)


def look_at_ids(layer: Any) -> Callable[[], None]:
    """Raise IndexError when an embedding gets ids without a row.

    Keras itself counts negative ids from the end, and takes the lower 32 bits of int64 ids.

    Returns:
        a function that ends the check.
    """
    end: Callable[[], None] = layer.register_forward_pre_hook(_look, with_kwargs=True).remove
    return end


def _look(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ids = next(iter((*args, *kwargs.values())), None)
    if torch.is_tensor(ids) and ids.numel():
        lowest, highest = torch.aminmax(ids)
        if lowest < 0 or highest >= layer.input_dim:
            raise IndexError(f"ids of {layer.name} are not in 0..{layer.input_dim - 1}")


def why_whole(layer: Any, model: Any) -> str:
    """Return the reason why the table of an embedding is not read only by rows, or "".

    Args:
        layer: an `Embedding`.
        model: the model of the layer, in which other users of its variable are searched.
    """
    kind: Any = type(layer)
    own: Any = next(item for item in kind.__mro__ if item.__name__ == "Embedding")
    if kind.call is not own.call or kind.embeddings is not own.embeddings or "call" in vars(layer):
        return f"the call of {kind.__name__} is not Keras' own"
    if not layer.built:
        return "it has no weights yet"
    if layer.quantization_mode is not None:
        return f"it is quantized to {layer.quantization_mode}"
    if layer.lora_enabled:
        return "LoRA trains factors beside it"
    variable = layer._embeddings
    if not variable.trainable:
        return "it is frozen"
    if variable.regularizer is not None:
        return "its regularizer reads all of it"
    if variable.constraint is not None:
        return "its constraint changes all of it after each step"
    weight = variable._value
    if not isinstance(weight, nn.Parameter):
        return "its weight is no parameter"
    if weight.is_cuda:
        return "on a GPU a dense step is faster"
    if weight.dtype is not torch.float32 or not (weight.is_cpu and weight.is_contiguous()):
        return "it is not float32 on a CPU"
    others = [
        other.name
        for other in modules_of(model)
        if getattr(other.__class__, "call", None) is not own.call
        and any(item is variable for item in getattr(other, "_trainable_variables", ()))
    ]
    return f"{others[0]} reads all of it" if others else ""
