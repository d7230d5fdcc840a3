"""The numbers guard: a NaN is stopped before it reaches the weights, and its cause is named.

The check itself is in optim/update.py, on the device. Here the flag is read: after each step on a
CPU, where reading costs nothing, and every `EVERY` steps elsewhere. Then the bad step is run
again, on the weights from before it, to find where the first bad value comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from flatout.data.batch import Batch
from flatout.errors import NumbersError
from flatout.train.losses import Value

EVERY = 50
_SHOWN = 5


def check_state(model: nn.Module, before: str) -> None:
    """Raise if a weight or buffer is not finite.

    BatchNorm's running statistics can be NaN while the training loss is fine.

    Args:
        model: its floating-point parameters and buffers are checked.
        before: what is about to happen, for the message ("evaluation", "saving").

    Raises:
        NumbersError: naming the tensors.
    """
    tensors = {
        name: t
        for name, t in [*model.named_parameters(), *model.named_buffers()]
        if t.is_floating_point() and t.numel()
    }
    if not tensors:
        return
    # The largest absolute value of each: one small tensor to read, NaN and inf both show.
    with torch.no_grad():
        largest = torch._foreach_norm([t.detach() for t in tensors.values()], float("inf"))
    finite = [math.isfinite(v) for v in torch.stack([x.float().cpu() for x in largest]).tolist()]
    bad = [name for name, fine in zip(tensors, finite, strict=True) if not fine]
    if bad:
        kinds = dict(model.named_buffers())
        words = ", ".join(f"{'buffer' if n in kinds else 'weight'} {n}" for n in bad[:_SHOWN])
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise NumbersError(
            f"NaN or infinity in {words}{more}",
            where=f"found before {before}",
            do="look for a batch of one sample or a constant input under BatchNorm, a too high "
            "learning rate, or a division by zero; go back to the last checkpoint",
        )


def explain_bad_step(
    model: nn.Module,
    compute: Callable[[Batch], Value],
    batch: Batch | None,
    *,
    step: int,
    learning_rate: float,
    held_back: bool,
) -> NumbersError:
    """The error for a step whose gradients were not finite, with the cause where it can be found.

    Args:
        model: with the weights that the step saw (if the step was held back).
        compute: forward and loss, under autocast if the step used it.
        batch: the step's batch; None where the source cannot give it again.
        step: number of the step, from 1.
        learning_rate: at that step.
        held_back: the step did not reach the weights.
    """
    lines = [f"step {step}, learning rate {learning_rate:g}"]
    if batch is not None:
        lines += _inputs(batch)
        if held_back:
            lines += _first_module(model, compute, batch)
    kept = "the weights are those before this step" if held_back else "the weights are damaged"
    lines.append(kept)
    return NumbersError(
        "the loss or a gradient is NaN or infinite",
        where="\n  ".join(lines),
        do="look at the named samples and module; a lower learning rate or clip_norm=1.0 helps "
        "where values grew too large",
    )


def _inputs(batch: Batch) -> list[str]:
    """Samples with bad values in inputs or targets, by their number in the data."""
    fields: Mapping[str, object] = {"input": batch.inputs, "target": batch.targets}
    words = []
    for name, value in fields.items():
        tensors = value.values() if isinstance(value, Mapping) else value
        for tensor in tensors if isinstance(tensors, (tuple, list)) else [tensors]:
            if torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.dim():
                fine = torch.isfinite(tensor.reshape(len(tensor), -1)).all(1)
                rows = (~fine).nonzero().flatten().tolist()
                if rows:
                    words.append(f"{name} of sample {_samples(batch, rows)} is not finite")
    if not words and batch.indices is not None:
        numbers = batch.indices.tolist()
        words.append(f"inputs are finite; samples {_list(numbers)}")
    return words


def _samples(batch: Batch, rows: list[int]) -> str:
    if batch.indices is None:
        return _list(rows) + " of the batch"
    return _list([int(batch.indices[row]) for row in rows])


def _list(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return shown + (f", ... ({len(numbers)} in all)" if len(numbers) > _SHOWN else "")


def _first_module(model: nn.Module, compute: Callable[[Batch], Value], batch: Batch) -> list[str]:
    """Run the step's forward and backward again and name where the first bad value appears."""
    first: list[str] = []

    def watch(name: str, kind: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            bad = any(
                torch.is_tensor(t) and t.is_floating_point() and not torch.isfinite(t).all()
                for t in tensors
            )
            if bad and not first:
                first.append(f"first bad value: output of module {name} ({kind})")

        return hook

    leaves = [(n or "model", m) for n, m in model.named_modules() if not any(m.children())]
    handles = [m.register_forward_hook(watch(n, type(m).__name__)) for n, m in leaves]
    try:
        value = compute(batch)
        loss = value[0] if isinstance(value, tuple) else value
        if not first and not torch.isfinite(loss).all():
            first.append("first bad value: the loss itself, from finite model outputs")
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return [f"running the step again failed: {error}"]
    finally:
        for handle in handles:
            handle.remove()
    if not first:
        names = [
            n
            for n, p in model.named_parameters()
            if p.grad is not None and not torch.isfinite(p.grad).all()
        ]
        # The gradient flows from the last layer to the first: the last bad name comes first.
        first = [f"forward is finite; first bad gradient: {names[-1]}"] if names else []
    for parameter in model.parameters():
        parameter.grad = None
    return first
