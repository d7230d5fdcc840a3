"""Micro-batches: a batch of an optimizer step, split into pieces that fit in memory.

The gradient of a batch is the sum of its pieces' gradients, so splitting changes rounding only. Two
kinds of models are exceptions. With BatchNorm in training, the statistics would be those of a
piece. This changes learning, so such models are never split without a request. With dropout, other
random numbers are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from flatout.data import Batch, named_tensors
from flatout.errors import DataError, OutOfMemory
from flatout.measure import available_bytes
from flatout.models import is_batch_coupled
from flatout.train.losses.broadcast import uncompiled
from flatout.train.snapshot import untouched
from flatout.words import counted

_T = TypeVar("_T")

# Fraction of the free memory that an estimate may use; the rest is for memory that the estimate
# does not include.
_SHARE = 0.7
# Memory for backward, as a multiple of the bytes that autograd saves. Backward also holds the
# gradients of an activation and of its input. Small ConvNets, transformers and MLPs need 2 to 4
# times these bytes.
_BACKWARD = 3
_NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "bad_alloc", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, OutOfMemory):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def forget_frames(error: BaseException | None) -> None:
    """Delete tracebacks, which keep tensors of a failed attempt and of earlier errors alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def smaller(model: nn.Module, pieces: int, size: int, when: str, on_rank: str = "") -> int:
    """Return the number of pieces to try after `pieces` did not fit: twice as many."""
    where = f"{when}, batch of {size} in {counted(pieces, 'micro-batch', 'micro-batches')}"
    if pieces >= size:
        raise OutOfMemory(
            f"memory ran out on a single sample{on_rank}",
            where=where,
            do="use a smaller model or input, or Memory(activation_checkpointing='on')",
        )
    if is_batch_coupled(model):
        raise OutOfMemory(
            f"memory ran out{on_rank}, and BatchNorm forbids splitting unasked: its statistics "
            "would change",
            where=where,
            do=f"set Memory(micro_batch={max(1, size // (2 * pieces))}) to accept that, lower "
            "batch_size, or use Memory(activation_checkpointing='on')",
        )
    return min(size, pieces * 2)


def not_split(micro_batch: str | int, size: int, when: str, on_rank: str) -> OutOfMemory:
    """Return the error for memory that ran out where the user allows no further splitting."""
    return OutOfMemory(
        f"memory ran out{on_rank}",
        where=f"{when}, batch of {size}, micro_batch={micro_batch!r}",
        do="set Memory(micro_batch='auto'), which splits the batch until it fits, or "
        "Memory(activation_checkpointing='on')",
    )


def check_not_jagged(batch: Batch, pieces: int, micro_batch: str | int) -> None:
    """Refuse a requested split of a batch whose inputs have no row for each sample."""
    if batch.is_jagged and pieces > 1:
        raise DataError(
            f"micro_batch={micro_batch!r} requires splitting a batch of {batch.size:,} samples, "
            "but its inputs have no row for each sample (flat ids with offsets, packed "
            "sequences, graphs)",
            do="let the loader make smaller batches, with accumulate=N for the same step, and "
            "leave memory.micro_batch=auto",
        )


def jagged_out_of_memory(size: int, when: str, on_rank: str) -> OutOfMemory:
    """Return the error for memory that ran out on a batch that cannot be split."""
    return OutOfMemory(
        f"memory ran out{on_rank}, and the batch cannot be split: its inputs have no row for each "
        "sample",
        where=f"{when}, batch of {size}",
        do="let the loader make smaller batches, with accumulate=N for the same step, or use "
        "Memory(activation_checkpointing='on')",
    )


def not_split_alone(what: str, size: int, when: str, on_rank: str, *, staged: bool) -> OutOfMemory:
    """Return the error for memory that ran out on a rank that other ranks wait for in a step."""
    return OutOfMemory(
        f"memory ran out{on_rank}; {what} may wait for other ranks within a step, so that a rank "
        "cannot repeat its part of the step",
        where=f"{when}, batch of {size}",
        do="set a larger world.micro_batches, lower batch_size, or take more ranks"
        if staged
        else f"set Memory(micro_batch={max(1, size // 2)}), lower batch_size, or use "
        "Memory(activation_checkpointing='on')",
    )


class InPieces:
    """Evaluates batches whole, or in parts if memory runs out, since samples are independent."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._most: int | None = None

    def __call__(
        self, run: Callable[[Batch], _T], batch: Batch, *, whole: bool = False
    ) -> list[_T]:
        """Return the results of `run` for the batch, or for each of its parts in order."""
        done: list[_T] = []
        start, whole = 0, whole or batch.is_jagged
        while start < batch.size:
            size = batch.size if self._most is None or whole else self._most
            part = batch if size >= batch.size else batch.rows(start, start + size)
            try:
                done.append(run(part))
                start += part.size
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._shrink(error, part, whole)
        return done

    def _shrink(self, error: Exception, part: Batch, whole: bool) -> None:
        if part.size == 1:
            raise OutOfMemory(
                "memory ran out in the evaluation of a single sample",
                do="use a smaller model or input",
            ) from error
        if whole:
            why = "several ranks compute together"
            if part.is_jagged:
                why = "cannot be split: the inputs have no row for each"
            raise OutOfMemory(
                f"memory ran out in the evaluation of {part.size:,} samples, which {why}",
                do="lower the batch size of the evaluation",
            ) from error
        forget_frames(error)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        self._most = -(-part.size // 2)
        self._say(
            f"memory ran out in the evaluation of {part.size:,} samples: it goes on with "
            f"{self._most:,} at a time"
        )


def pieces_for(batch_size: int, micro_batch: str | int) -> int:
    """Return the number of pieces that the Recipe's `memory.micro_batch` asks for."""
    if isinstance(micro_batch, int):
        return -(-batch_size // micro_batch)
    return 1


def estimate_pieces(model: nn.Module, forward: Callable[[Batch], object], batch: Batch) -> int:
    """Return the number of pieces whose activations fit in the free memory of this machine.

    On a CPU, running out of memory is rarely an error that can be caught: the kernel kills the
    process. So the bytes that autograd saves are counted on a few samples and on twice as many, and
    extrapolated to the batch. Model, buffers and random states are left unchanged.
    """
    if batch.size < 4 or batch.is_jagged or is_batch_coupled(model):
        return 1
    few = 1 if batch.size < 8 else 2  # attention may use other kernels for a single sample
    once, twice = (_kept_bytes(model, forward, batch.rows(0, n)) for n in (few, 2 * few))
    if once is None or twice is None:
        return 1
    per_sample, fixed = max(0, (twice - once) // few), max(0, 2 * once - twice)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    free = available_bytes() * _SHARE - fixed - gradients
    pieces = 1
    while _BACKWARD * per_sample * batch.size / pieces > free and pieces < batch.size:
        pieces *= 2
    return min(pieces, batch.size)


def _kept_bytes(model: nn.Module, forward: Callable[[Batch], object], batch: Batch) -> int | None:
    there = [*model.parameters(), *(t for _, t in named_tensors("", batch[:3]))]
    already = {tensor.untyped_storage().data_ptr() for tensor in there}
    result: dict[int, int] = {}
    boxes: list[list[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in already:
            result[storage.data_ptr()] = storage.nbytes()
        boxes.append([tensor])
        return boxes[-1]

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box[0])
    try:
        # Code compiled for few samples would be compiled for any number of samples from then on.
        with untouched(model, forward), uncompiled(), hooks:
            kept = forward(batch)  # noqa: F841 - alive while the bytes are counted
    except Exception:
        return None  # the first real step will report the error
    finally:
        # A graph that saves its own output refers to itself, and would never be freed.
        for box in boxes:
            box.clear()
    return sum(result.values())
