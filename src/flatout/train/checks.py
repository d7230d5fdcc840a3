"""Checks that data fit the model and the loss, on the first batch and after a failed step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from flatout.console import first_line
from flatout.data import Batch, Pipeline, Source, Tensors, holds_bytes, named_tensors, tensors_in
from flatout.errors import DataError, DeviceError, FlatoutError, ModelError
from flatout.models import adapter_of
from flatout.train.losses.broadcast import ONE_SHAPE, no_broadcast_within
from flatout.train.losses.loss_value import Compute
from flatout.train.losses.losses import Loss, Value
from flatout.train.micro_batch import is_out_of_memory
from flatout.train.objective_checks import NO_GRAPH, no_backward_within
from flatout.train.snapshot import untouched
from flatout.train.tables.tables import ids_checked

# Errors that torch raises for tensors that do not fit. Other errors are mistakes in the user's
# code, which its own traceback shows best.
MISFITS = (RuntimeError, ValueError, TypeError, IndexError)
_SHAPES = "compare the shapes with what the model's first layer and the loss expect"
# The error of oneDNN on a CPU that lacks the instructions.
_NO_KERNEL = "could not create a primitive"


def check_first_batch(
    model: nn.Module,
    compute: Compute,
    pieces: list[Batch],
    source: Source | None = None,
    *,
    is_own: bool = False,
    parameters: Sequence[torch.Tensor] = (),
) -> bool:
    """Run the forward and loss of one batch, undo all effects, and explain errors.

    Returns whether forward or loss take gradients themselves, as a gradient penalty does, so that
    they need enabled gradients.
    """
    takes_gradients = False
    with untouched(model, compute):
        for piece in pieces:
            watched = no_broadcast_within(piece) if is_own else nullcontext()
            with explained(model, piece), ids_checked(model, piece, source), watched:
                try:
                    with torch.set_grad_enabled(takes_gradients):
                        value = compute(piece)
                except (RuntimeError, DataError) as error:
                    if takes_gradients or NO_GRAPH not in str(error):
                        raise
                    takes_gradients = True
                    with torch.enable_grad(), no_backward_within(parameters):
                        value = compute(piece)
            _check_value(value)
    return takes_gradients


@contextmanager
def explained(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Explain an error of the model or the loss in this context by the shapes of both."""
    try:
        yield
    except FlatoutError:
        raise
    except MISFITS as error:
        if is_out_of_memory(error):
            raise
        if torch.is_autocast_enabled("cpu"):
            explain_kernel(error, str(torch.get_autocast_dtype("cpu")).removeprefix("torch."))
        raise _misfit(error, model, batch) from error


def explain_kernel(error: Exception, precision: str) -> None:
    """Explain oneDNN's error for a half precision without a kernel for this CPU."""
    if precision != "fp32" and _NO_KERNEL in str(error):
        raise DeviceError(
            f"this CPU has no {precision} kernel for an operator of the model: {first_line(error)}",
            do="train in fp32: Recipe(compute={'precision': 'fp32'})",
        ) from error


def check_targets(loss: Loss, output: object, batch: Batch) -> None:
    """Raise for targets that the loss cannot compare with this output.

    On a GPU such a label would end the whole process without naming the label. As a probability, a
    label 2 would be trained on silently.
    """
    target = batch.targets
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return
    if loss.ignore_index is not None and not target.is_floating_point() and output.dim() > 1:
        check_labels(target, output.shape[1], batch.indices, loss.ignore_index)
    elif loss.name == "binary_cross_entropy" and len(target) == batch.size:
        result = _first((target < 0) | (target > 1), target, batch.indices)
        if result is not None:
            raise DataError(
                f"target {result[0]:g} is not in 0..1",
                where=result[1],
                do="binary_cross_entropy compares with 0, 1 or a probability; for several "
                "classes use cross_entropy",
            )


def check_all_labels(loss: Loss, output: object, source: Source | None) -> None:
    """Raise for any label of arrays in memory that the loss cannot compare with this output."""
    result = None if source is None or isinstance(source, Pipeline) else source.labels_range()
    if result is None or source is None or not isinstance(output, torch.Tensor):
        return
    if loss.ignore_index is not None and output.dim() > 1:
        most = output.shape[1] - 1
    elif loss.name == "binary_cross_entropy":
        most = 1
    else:
        return
    if any(not 0 <= label <= most and label != loss.ignore_index for label in result):
        for batch in source.batches(0):
            check_targets(loss, output, batch)


def check_labels(
    labels: torch.Tensor, classes: int, indices: torch.Tensor | None, ignore_index: int = -100
) -> None:
    """Raise for class labels outside of 0..classes-1 that the loss does not ignore."""
    bad = ((labels < 0) | (labels >= classes)) & (labels != ignore_index)
    result = _first(bad, labels, indices)
    if result is not None:
        raise DataError(
            f"label {result[0]:g} is not in 0..{classes - 1}",
            where=result[1],
            do=f"the model's output has {classes} classes: give it more, or correct the labels",
        )


def loss_misfit(error: Exception, loss: Loss, output: object, batch: Batch) -> DataError:
    """Return the error to raise where the loss failed with `error` on this output and batch."""
    if "device-side assert" in str(error):
        # After this error, the process can no longer read from the GPU.
        return DataError(
            "the GPU stopped in the loss, most likely at a label that the model has no class for",
            where=f"batch: {describe(batch)}",
            do="run once with Recipe(world=World(device='cpu')): the error then names the sample",
        )
    try:
        check_targets(loss, output, batch)
    except DataError as misfit:
        return misfit
    outputs = ", ".join(_words(t) for t in tensors_in(output)) or type(output).__name__
    return DataError(
        f"the loss {loss.name} does not take this batch: {first_line(error)}",
        where=f"output {outputs}; batch: {describe(batch)}",
        do=_target_advice(loss, output, batch.targets),
    )


def describe(batch: Batch) -> str:
    """Describe the shapes and dtypes of a batch."""
    inputs = ", ".join(_words(t) for t in tensors_in(batch.inputs))
    targets = ", ".join(_words(t) for t in tensors_in(batch.targets))
    return f"inputs {inputs or 'none'}, targets {targets or 'none'}"


def _first(
    bad: torch.Tensor, values: torch.Tensor, indices: torch.Tensor | None
) -> tuple[float, str] | None:
    if not bool(bad.any()):
        return None
    bad, values = bad.reshape(len(bad), -1), values.reshape(len(bad), -1)
    row = int(bad.any(1).nonzero()[0])
    where = f"row {row} of the batch" if indices is None else f"sample {int(indices[row])}"
    return values[row][bad[row]][0].item(), where


def _check_value(value: Value) -> None:
    total = value[0] if isinstance(value, tuple) and len(value) == 2 else value
    if not torch.is_tensor(total) or total.numel() != 1 or not total.is_floating_point():
        result = _words(total) if torch.is_tensor(total) else type(total).__name__
        raise ModelError(
            f"compute(batch) must return a loss, one number or (sum, weight), found {result}",
            do="return loss.mean(), or (losses.sum(), how_many)",
        )


def _misfit(error: Exception, model: nn.Module, batch: Batch) -> DataError:
    return DataError(
        f"the model and loss do not take this batch: {first_line(error)}",
        where=f"batch: {describe(batch)}; model: {adapter_of(model).first_layer()}",
        do=_advice(error, model, batch),
    )


def _advice(error: Exception, model: nn.Module, batch: Batch) -> str:
    words = str(error)
    if "required positional argument" in words and "forward()" not in words:
        return "a Loop calls its compute function with the batch only: def compute(batch)"
    if isinstance(batch.inputs, Mapping) and "keyword argument" in words:
        return (
            "a dict of inputs is passed to forward by name: let forward take "
            f"{', '.join(batch.inputs)}; give targets next to the dict, as (inputs, targets)"
        )
    return _SHAPES if _is_of_shapes(error) else _input_advice(model, batch.inputs)


def _is_of_shapes(error: Exception) -> bool:
    words = str(error).lower()
    return "type" not in words and any(word in words for word in ("shape", "size"))


def _input_advice(model: nn.Module, inputs: Tensors) -> str:
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    embeds = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in model.modules())
    for name, tensor in named_tensors("inputs", inputs):
        wanted = tensor.is_floating_point() or not embeds
        if weight is not None and wanted and holds_bytes(tensor):
            return (
                f"{name} are uint8: for images, normalize scales them to 0..1, such as "
                "flatout.data.arrays(x, y).normalize(); else convert them to "
                f"{_short(weight.dtype)}"
            )
        if weight is not None and wanted and tensor.dtype != weight.dtype:
            return f"convert {name} to {_short(weight.dtype)}, found {_short(tensor.dtype)}"
    return _SHAPES


def _target_advice(loss: Loss, output: object, target: Tensors | None) -> str:
    if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor):
        takes_labels = loss.ignore_index is not None and target.dim() < output.dim()
        if takes_labels and target.is_floating_point():
            return f"convert the targets to int64 class numbers, found {_short(target.dtype)}"
        if output.dim() and target.dim() and len(output) != len(target):
            return f"the model returns {len(output)} rows for {len(target)} samples"
        if output.shape != target.shape and output.numel() == target.numel():
            return ONE_SHAPE
    return "compare the shapes and dtypes of output and targets with what the loss expects"


def _words(tensor: torch.Tensor) -> str:
    return f"{_short(tensor.dtype)} {tuple(tensor.shape)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
