"""Does the data fit the model? Asked once, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flatout.data.batch import Batch
from flatout.errors import DataError, FlatoutError
from flatout.train.micro_batch import is_out_of_memory
from flatout.train.snapshot import untouched
from flatout.train.step import Compute


def check_first_batch(model: nn.Module, compute: Compute, batch: Batch) -> None:
    """Run the forward and loss of one batch without a trace, and explain what does not fit.

    Args:
        model: its buffers and the random states are put back.
        compute: forward and loss.
        batch: on the model's device.

    Raises:
        DataError: naming shapes, dtypes and, for labels, the sample.
    """
    try:
        with untouched(model), torch.no_grad():
            compute(batch)
    except FlatoutError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return  # the step itself knows how to split the batch
        raise _explained(error, model, batch) from error


def check_labels(labels: torch.Tensor, classes: int, indices: torch.Tensor | None) -> None:
    """Raise for class labels outside of 0..classes-1 (and -100, which a loss may ignore).

    On a GPU such a label would end the whole process without saying which it was.

    Raises:
        DataError: naming the first such label and its sample.
    """
    bad = ((labels < 0) & (labels != -100)) | (labels >= classes)
    if not bool(bad.any()):
        return
    row = int(bad.reshape(len(labels), -1).any(1).nonzero()[0])
    label = int(labels.reshape(len(labels), -1)[row][bad.reshape(len(labels), -1)[row]][0])
    sample = f"sample {int(indices[row])}" if indices is not None else f"row {row} of the batch"
    raise DataError(
        f"label {label} is not in 0..{classes - 1}",
        where=sample,
        do=f"the model's output has {classes} classes: give it more, or correct the labels",
    )


def _explained(error: Exception, model: nn.Module, batch: Batch) -> DataError:
    where = f"batch: {describe(batch)}; model: {_first_layer(model)}"
    return DataError(
        f"the model and loss do not take this batch: {str(error).strip().splitlines()[0]}",
        where=where,
        do=_advice(model, batch),
    )


def _advice(model: nn.Module, batch: Batch) -> str:
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    for tensor in _tensors(batch.inputs):
        if weight is not None and tensor.is_floating_point() and tensor.dtype != weight.dtype:
            return f"convert the input to {_short(weight.dtype)}, found {_short(tensor.dtype)}"
        if weight is not None and not tensor.is_floating_point() and not _embeds(model):
            return f"convert the input to {_short(weight.dtype)}, found {_short(tensor.dtype)}"
    return "compare the shapes and dtypes with what the model's first layer and the loss expect"


def _embeds(model: nn.Module) -> bool:
    return any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in model.modules())


def describe(batch: Batch) -> str:
    """Shapes and dtypes of a batch in words."""
    inputs = ", ".join(_words(t) for t in _tensors(batch.inputs))
    targets = ", ".join(_words(t) for t in _tensors(batch.targets))
    return f"inputs {inputs or 'none'}, targets {targets or 'none'}"


def _words(tensor: torch.Tensor) -> str:
    return f"{_short(tensor.dtype)} {tuple(tensor.shape)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(value: Any) -> list[torch.Tensor]:
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _tensors(v)]
    return []


def _first_layer(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            return f"first layer {name or 'itself'} is {module}"
    return f"{type(model).__name__} without parameters"
