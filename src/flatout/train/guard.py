"""Search for the cause of a NaN or infinity, which is stopped before it reaches the weights.

The check itself is in optim/update.py, on the device. Here the flag of that check is read: after
each step on a CPU, where reading costs nothing, and every `EVERY` steps elsewhere. Then the bad
step is run again, on the weights from before the step, to find the origin of the first bad value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from flatout.data import Batch, Source, differs_by_rank, named_tensors, samples_of_items
from flatout.errors import NumbersError
from flatout.models import adapter_of, own_names, own_part, uncompiled
from flatout.train.losses.losses import Value
from flatout.train.snapshot import random_state, set_random_state, untouched
from flatout.train.tables.table_reads import TableReads
from flatout.world import ONE, LostRank, World

EVERY = 50
_SHOWN = 5
# Smallest weight that is reported as huge: no model that learns has such a weight.
_HUGE = 1e6
# Degrees of evidence that a rank's own part of a batch is the cause, in ascending order.
_NOTHING_FOUND, _BAD_GRADIENT, _BAD_FORWARD, _BAD_SAMPLES, _BAD_WEIGHTS = range(5)


class _Cause(NamedTuple):
    lines: list[str]
    suspicion: int


def check_state(model: nn.Module, before: str) -> None:
    """Raise if a weight or buffer is not finite.

    BatchNorm's running statistics can be NaN while the training loss is fine. Infinities are
    allowed in other buffers: attention masks are made of them.
    """
    bad = [
        f"{'weight' if is_weight else 'buffer'} {name}"
        for name, is_weight in _bad_state(model).items()
    ]
    if bad:
        raise NumbersError(
            f"NaN or infinity in {_shown(bad)}",
            where=f"found before {before}",
            do="look for a batch of one sample or a constant input under BatchNorm, a too high "
            "learning rate, or a division by zero; go back to the last checkpoint",
        )


def check_updates(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    step: int,
    by_rows: Iterable[nn.Parameter] = (),
) -> None:
    """Raise if the updates up to `step` have made a weight NaN or infinite."""
    names = _bad_weights(model, {id(table) for table in by_rows})
    if names:
        raise _explain_bad_updates(model, optimizers, names, step)


def _bad_weights(model: nn.Module, left_out: Collection[int] = ()) -> list[str]:
    weights = _checkable(
        (name, weight) for name, weight in model.named_parameters() if id(weight) not in left_out
    )
    return [name for name, value in _suspects(weights).items() if not math.isfinite(value)]


def _bad_state(model: nn.Module) -> dict[str, bool]:
    """Return the names of bad weights and buffers, with True for a weight."""
    weights = _checkable(model.named_parameters())
    statistics = _checkable(
        (f"{name}.{own}".lstrip("."), buffer)
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        for own, buffer in module.named_buffers(recurse=False)
    )
    buffers = _checkable(model.named_buffers())
    largest = _suspects({**weights, **buffers})
    strict = weights.keys() | statistics.keys()
    own = own_names(model, largest)
    return {
        own[name]: name in weights
        for name, value in largest.items()
        if math.isnan(value) or (math.isinf(value) and name in strict)
    }


def _explain_bad_updates(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    names: Sequence[str],
    step: int,
) -> NumbersError:
    own = own_names(model, names)
    bad = _shown([f"weight {own[name]}" for name in names])
    if not step:
        return NumbersError(
            f"NaN or infinity in {bad}",
            where="before the first step",
            do="check how the model was made, or the file from which its weights were loaded",
        )
    parameters = dict(model.named_parameters())
    causes = _causes({id(parameters[name]): own[name] for name in names}, optimizers)
    words, cures = zip(*causes, strict=True)
    return NumbersError(
        f"the optimizer's update made NaN or infinity from finite gradients, in {bad}",
        where="\n  ".join([f"step {step} or earlier", *words, "the weights are damaged"]),
        do=f"{'; '.join(cures)}; go back to the last checkpoint, or make the model again",
    )


def _causes(
    bad: Mapping[int, str], optimizers: Iterable[torch.optim.Optimizer]
) -> list[tuple[str, str]]:
    """Return the causes of bad weights in the optimizers, each with its cure."""
    result: dict[tuple[str, str], None] = {}
    rates: dict[str, None] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in bad:
                    continue
                rates[f"{float(group['lr']):g}"] = None
                state = optimizer.state.get(parameter, {})
                for cause in _causes_of(parameter, bad[id(parameter)], state, group.get("eps")):
                    result[cause] = None
    if result:
        return list(result)[:_SHOWN]
    cure = "take a lower learning rate"
    return [(f"learning rate {', '.join(rates)}", cure)]


def _causes_of(
    parameter: torch.Tensor, name: str, state: Mapping[str, Any], eps: float | None
) -> Iterator[tuple[str, str]]:
    for key, value in state.items():
        tensors = _checkable([(key, value)]) if torch.is_tensor(value) else {}
        if any(math.isnan(largest) for largest in _suspects(tensors).values()):
            words = f"the optimizer's state {key} of weight {name} holds NaN"
            yield words, "make the optimizer again, or load a state that is finite"
    if eps == 0:
        yield "eps=0 divides by zero where all gradients were 0", "take eps=1e-8"
    elif eps is not None and not torch.tensor(eps, dtype=parameter.dtype):
        kind = str(parameter.dtype).removeprefix("torch.")
        words = f"eps={eps:g} rounds to 0 in {kind}, the dtype of the weights: it divides by zero"
        yield words, "train weights in fp32: model.float(); steps may compute in bf16 or fp16"


def _checkable(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach()
        for name, tensor in ((name, own_part(tensor)) for name, tensor in named)
        if tensor.is_floating_point() and tensor.numel() and tensor.layout is torch.strided
        if not tensor.is_meta  # the tensor is on another rank
    }


def _suspects(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest absolute value (or NaN) of each tensor whose sum is not finite.

    A sum is 20 times as fast to compute as the largest value, and is not finite if any value is
    not.
    """
    sums = _numbers(tensors, lambda own: [tensor.sum() for tensor in own])
    return _largest({n: tensors[n] for n, total in sums.items() if not math.isfinite(total)})


def _largest(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest absolute value of each tensor; NaN if the tensor contains a NaN."""
    return _numbers(tensors, lambda own: torch._foreach_norm(own, float("inf")))


def _numbers(
    tensors: dict[str, torch.Tensor],
    make: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
) -> dict[str, float]:
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(name)
    result: dict[str, float] = {}
    for names in by_device.values():
        made = make([tensors[name] for name in names])
        result.update(zip(names, torch.stack([n.double() for n in made]).tolist(), strict=True))
    return result


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def explain_bad_step(
    model: nn.Module,
    compute: Callable[[Batch], Value],
    batch: Batch | None,
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    is_first: bool = False,
    step: int,
    learning_rate: float,
    held_back: bool,
    pieces: int = 1,
    world: World = ONE,
    together: World = ONE,
) -> NumbersError:
    """Return the error for a step whose gradients were not finite, with the cause if found."""
    on_rank = f"rank {world.rank} of {world.size}, " if world.size > 1 else ""
    lines = [f"{on_rank}step {step}, learning rate {learning_rate:g}"]
    suspicion = _NOTHING_FOUND
    bad = [] if batch is None else _bad_samples(batch)
    # If the update was held back, the weights are the same as before the step.
    weights = _bad_weights(model) if held_back else []
    is_known = any(together.gather(bool(bad or weights or batch is None), "bad samples in a step"))
    if weights:
        _raise_on_its_rank(world, _BAD_WEIGHTS, step)
        return _explain_bad_updates(model, optimizers, weights, 0 if is_first else step - 1)
    lines += _huge_weights(model)
    if batch is not None:
        lines += bad or _samples_in(batch)
        if bad:
            suspicion = _BAD_SAMPLES
        elif held_back and not is_known:
            result = _first_bad_value(model, compute, batch.split(pieces), together)
            lines += result.lines
            suspicion = result.suspicion
    _raise_on_its_rank(world, suspicion, step)
    kept = "the weights are those before this step" if held_back else "the weights are damaged"
    lines.append(kept)
    return NumbersError(
        "the loss or a gradient is NaN or infinite",
        where="\n  ".join(lines),
        do="look at the named samples and module; a lower learning rate or clip_norm=1.0 helps "
        "where values grew too large",
    )


def _huge_weights(model: nn.Module) -> list[str]:
    largest = _largest(_checkable(model.named_parameters()))
    name = max(largest, key=lambda name: largest[name], default="")
    if not name or largest[name] < _HUGE:
        return []
    return [f"weight {own_names(model, largest)[name]} has values as large as {largest[name]:.1g}"]


def _raise_on_its_rank(world: World, suspicion: int, step: int) -> None:
    result = world.gather(suspicion, "search for who made a step's gradients bad")
    culprit = result.index(max(result))
    if culprit != world.rank:
        raise LostRank(f"step {step} is not finite by the part of rank {culprit}")


def _bad_samples(batch: Batch) -> list[str]:
    words = []
    for part in ("inputs", "targets", "weight"):
        for name, tensor in named_tensors(part, getattr(batch, part)):
            rows = _bad_rows(tensor)
            if rows:
                where = _samples_at(batch, tensor, rows) or f"place {rows[0]}"
                words.append(f"{name}: NaN or infinity in {where}")
    return words


def not_finite(figures: Mapping[str, Any]) -> list[str]:
    """Return the names of figures that are NaN or infinite."""
    return [n for n, v in figures.items() if isinstance(v, float) and not math.isfinite(v)]


def not_finite_words(names: Sequence[str], when: str, evaluated: Source | None) -> str:
    """Return a line about figures that are not finite."""
    words = f"{', '.join(names)} of {when} {'is' if len(names) == 1 else 'are'} not finite"
    if evaluated is not None and evaluated.seekable:
        before = random_state()
        try:
            each = (_bad_samples(batch) for batch in evaluated.batches(0))
            bad = next((found for found in each if found), None)
        finally:
            set_random_state(before)
        if bad:
            return f"{words}: in the data that were evaluated, {'; '.join(bad)}"
        if not differs_by_rank(evaluated):
            words += ", though all data that were evaluated are finite"
    return f"{words}: one batch for which the model or the metric gives NaN is enough"


def _samples_in(batch: Batch) -> list[str]:
    if batch.indices is None:
        return ["inputs are finite"]
    return [f"inputs are finite; {_samples(batch, list(range(batch.size)))}"]


def _bad_rows(tensor: torch.Tensor) -> list[int]:
    if not tensor.is_floating_point() or not tensor.dim() or not tensor.numel():
        return []
    fine = torch.isfinite(tensor).reshape(len(tensor), -1).all(1)
    rows: list[int] = (~fine).nonzero().flatten().tolist()
    return rows


def _samples_at(batch: Batch, tensor: torch.Tensor, rows: list[int]) -> str:
    if len(tensor) == batch.size:
        return _samples(batch, rows)
    of_items = samples_of_items(batch.inputs, len(tensor), batch.size) if batch.is_jagged else None
    if of_items is None:
        return ""
    return _samples(batch, sorted(set(of_items[rows].tolist())))


def _samples(batch: Batch, rows: list[int]) -> str:
    known = batch.indices is not None
    numbers = [int(batch.indices[row]) for row in rows] if batch.indices is not None else rows
    words = ", ".join(map(str, numbers[:_SHOWN]))
    more = f", ... ({len(numbers)} in all)" if len(numbers) > _SHOWN else ""
    kind = "sample" if known else "row"
    return (
        f"{kind}{'s' if len(numbers) > 1 else ''} {words}{more}{'' if known else ' of the batch'}"
    )


def _first_bad_value(
    model: nn.Module,
    compute: Callable[[Batch], Value],
    pieces: Sequence[Batch],
    together: World,
) -> _Cause:
    """Run the step's forward and backward again, and describe the first bad value.

    Ranks that compute together stop at the first rank that has found a bad value.
    """
    model.zero_grad()  # drops gradients of other losses
    try:
        with uncompiled(model), untouched(model, compute):
            for piece in pieces:
                bad_value, loss, reads = _in_forward(model, compute, piece)
                if any(together.gather(bad_value is not None, "bad values in a forward")):
                    break
                loss.backward()  # type: ignore[no-untyped-call]
                bad = _in_backward(model, piece, reads)
                if any(together.gather(bad is not None, "bad gradients")):
                    suspicion = _BAD_GRADIENT if bad else _NOTHING_FOUND
                    return _Cause([bad or "forward is finite"], suspicion)
            if bad_value is not None:
                return _Cause([bad_value], _BAD_FORWARD)
    except Exception as error:
        return _Cause([f"running the step again failed: {error}"], _NOTHING_FOUND)
    finally:
        model.zero_grad()
    words = "running the step again gave finite gradients: random draws may decide"
    return _Cause([words], _NOTHING_FOUND)


def _in_forward(
    model: nn.Module, compute: Callable[[Batch], Value], batch: Batch
) -> tuple[str | None, torch.Tensor, TableReads]:
    first: list[str] = []

    def look(name: str, kind: str, inputs: tuple[Any, ...], output: Any) -> None:
        for value, words in ((inputs, "input"), (output, "output")):
            samples = None if first else _bad_among(value, batch)
            if samples is not None:
                by = ", made by the code around it" if words == "input" else ""
                first.append(f"{words} of module {name} ({kind}){by}{samples}")

    reads = TableReads()
    with ExitStack() as watches:
        adapter_of(model).watch(look, watches)
        watches.enter_context(reads)
        value = compute(batch)
    loss = value[0] if isinstance(value, tuple) else value
    if not first and not torch.isfinite(loss).all():
        first.append("the loss itself, from finite model outputs")
    return (f"first bad value: {first[0]}" if first else None), loss, reads


def _in_backward(model: nn.Module, batch: Batch, reads: TableReads) -> str | None:
    named = dict(model.named_parameters())
    gradients = {n: own_part(p.grad) for n, p in named.items() if p.grad is not None}
    names = [name for name, gradient in gradients.items() if _is_bad(gradient)]
    # Gradients flow from the last layer to the first, so the last name has the first bad gradient.
    if not names:
        return None
    last = own_names(model, names)[names[-1]].rpartition("_torch_params.")[2]  # Keras' own path
    tables = {id(p) for _, module, _ in adapter_of(model).tables() for p in module.parameters()}
    weight = named[names[-1]]
    rows = _rows_words(weight, gradients[names[-1]], batch, reads) if id(weight) in tables else ""
    return f"forward is finite; first bad gradient: weight {last}{rows}"


def _is_bad(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(_bad_rows(values.reshape(1, -1)))


def _rows_words(
    weight: torch.Tensor, gradient: torch.Tensor, batch: Batch, reads: TableReads
) -> str:
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows = gradient.indices()[0][_bad_rows(gradient.values())].tolist()
    else:
        rows = _bad_rows(gradient)
    readers = reads.samples(weight, rows, batch)
    shown = ", ".join(map(str, rows[:_SHOWN])) + (", ..." if len(rows) > _SHOWN else "")
    words = f", row{'s' if len(rows) > 1 else ''} {shown}"
    return f"{words}, read by {_samples(batch, readers)}" if readers else words


def _bad_among(value: object, batch: Batch) -> str | None:
    tensors = value if isinstance(value, (tuple, list)) else [value]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            rows = _bad_rows(tensor if tensor.dim() else tensor.reshape(1))
            if rows:
                if 1 < batch.size == len(rows):
                    return ", all samples"
                words = _samples_at(batch, tensor, rows) if tensor.dim() else ""
                return f", {words}" if words else ""
    return None
