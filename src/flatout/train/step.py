"""One optimiser step.

    forward      compute(batch) under autocast, a mean or (sum, weight)
    backward     of the loss; of each micro-batch where the batch is split
    update       clip, check, optimiser, gradients to None        (optim/update.py)

A batch that does not fit in memory is taken again in smaller pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns as clock
from typing import NamedTuple

import torch

from flatout.data.batch import Batch, split
from flatout.optim import Update
from flatout.train.losses import Value
from flatout.train.micro_batch import is_out_of_memory, pieces_for, smaller
from flatout.train.settings import Settings, Switch
from flatout.train.snapshot import random_state, set_random_state

Compute = Callable[[Batch], Value]


class Done(NamedTuple):
    """What one optimiser step leaves: mean loss, the weight of that mean, and times in ns."""

    loss: torch.Tensor
    weight: torch.Tensor | float
    forward: int
    backward: int
    optimiser: int


class Stepper:
    """Runs optimiser steps on a model under the Settings of a Switch.

    Args:
        switch: holds model, optimiser and device.
        clip_norm: largest total gradient norm, or None.
        clip_value: largest absolute gradient element, or None.
        micro_batch: "auto" (split only when memory runs out), "whole", or samples per micro-batch.
    """

    def __init__(
        self,
        switch: Switch,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        micro_batch: str | int = "whole",
    ) -> None:
        self.switch = switch
        self.update = Update(switch.optimizer, clip_norm=clip_norm, clip_value=clip_value)
        self.micro_batch = micro_batch
        self.pieces = 1
        self.notes: list[str] = []
        self._scaler: torch.amp.GradScaler | None = None
        self._use_autocast = False
        self._applying = False

    def use(self, settings: Settings) -> None:
        """Switch to other settings before the next step."""
        self.switch.use(settings)
        self.update.refresh()
        self._use_autocast = settings.precision != "fp32"
        if settings.precision == "fp16" and self._scaler is None:
            self._scaler = torch.amp.GradScaler(self.switch.device.type)
        elif settings.precision != "fp16":
            self._scaler = None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler where fp16 needs one."""
        return self._scaler

    def __call__(self, compute: Compute, batches: Sequence[Batch], step: int) -> Done:
        """One optimiser step on `batches` (more than one when gradients are accumulated).

        Args:
            compute: forward and loss of one (micro-)batch.
            batches: on the device already.
            step: number of the step, for messages.

        Raises:
            OutOfMemory: where the batch cannot be split further, or only by changing learning.
        """
        if len(batches) == 1 and self.pieces == 1 and not isinstance(self.micro_batch, int):
            if self.micro_batch == "whole":
                return self._whole(compute, batches[0])
            try:
                return self._whole(compute, batches[0])
            except (RuntimeError, MemoryError) as error:
                self._shrink(error, batches, step)
        return self._in_pieces_that_fit(compute, batches, step)

    def _whole(self, compute: Compute, batch: Batch) -> Done:
        """The common case: one batch, one piece."""
        start = clock()
        if self._use_autocast:
            with self.switch.autocast():
                value = compute(batch)
        else:
            value = compute(batch)
        loss, weight = _mean(value, batch.size)
        forward = clock()
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        backward = clock()
        self._apply()
        end = clock()
        return Done(loss.detach(), weight, forward - start, backward - forward, end - backward)

    def _in_pieces_that_fit(self, compute: Compute, batches: Sequence[Batch], step: int) -> Done:
        buffers = self._kept_buffers()
        before = random_state() if self.micro_batch == "auto" else None
        while True:
            try:
                return self._in_pieces(compute, batches)
            except (RuntimeError, MemoryError) as error:
                if before is None:
                    raise
                self._shrink(error, batches, step)
                set_random_state(before)
                for buffer, value in buffers:
                    buffer.data.copy_(value)

    def _in_pieces(self, compute: Compute, batches: Sequence[Batch]) -> Done:
        """Sums of the pieces' losses and gradients, divided once at the end by the whole weight."""
        samples = float(sum(batch.size for batch in batches))
        total: torch.Tensor | float = 0.0
        weight: torch.Tensor | float = 0.0
        forward = backward = 0
        for batch in batches:
            pieces = pieces_for(batch.size, self.micro_batch) * self.pieces
            for piece in split(batch, min(pieces, batch.size)):
                start = clock()
                with self.switch.autocast():
                    part, part_weight = _sum(compute(piece), piece.size)
                middle = clock()
                # Divided by the sample count already, so that fp16's loss scale keeps its range.
                scaled = part / samples
                if self._scaler is not None:
                    scaled = self._scaler.scale(scaled)
                scaled.backward()  # type: ignore[no-untyped-call]
                total = total + part.detach()
                weight = weight + part_weight
                forward += middle - start
                backward += clock() - middle
        start = clock()
        self._divide(samples, weight)
        self._apply()
        assert torch.is_tensor(total)
        loss = total / (weight.clamp_min(1e-12) if torch.is_tensor(weight) else weight)
        return Done(loss, weight, forward, backward, clock() - start)

    def _divide(self, samples: float, weight: torch.Tensor | float) -> None:
        """Gradients were divided by the sample count; make that the loss's own weight."""
        if not torch.is_tensor(weight) and weight == samples:
            return
        factor = samples / (weight.clamp_min(1e-12) if torch.is_tensor(weight) else weight)
        gradients = [p.grad for p in self.update.parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _apply(self) -> None:
        # From here on weights change: an error is no longer a reason to take the step again.
        self._applying = True
        if self._scaler is None:
            self.update()
        else:
            self._apply_scaled(self._scaler)
        self._applying = False

    def _apply_scaled(self, scaler: torch.amp.GradScaler) -> None:
        optimizer = self.switch.optimizer
        if self.update.clip_norm is not None or self.update.clip_value is not None:
            scaler.unscale_(optimizer)
            self.update.clip()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def _shrink(self, error: Exception, batches: Sequence[Batch], step: int) -> None:
        """After running out of memory: forget the attempt and split finer."""
        if self._applying or not is_out_of_memory(error):
            raise error
        # The traceback keeps the failed step's tensors alive.
        error.__traceback__ = None
        self.switch.optimizer.zero_grad(set_to_none=True)
        if self.switch.device.type == "cuda":
            torch.cuda.empty_cache()
        largest = max(batch.size for batch in batches)
        self.pieces = smaller(self.switch.model, self.pieces, largest, step)
        self.notes.append(
            f"step {step}: memory ran out; the batch now runs in {self.pieces} micro-batches"
        )

    def _kept_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self.micro_batch != "auto":
            return []
        return [(b, b.detach().clone()) for b in self.switch.model.buffers()]


def _mean(value: Value, size: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """A loss as (mean, weight)."""
    if not isinstance(value, tuple):
        return value, size
    total, weight = value
    if torch.is_tensor(weight):
        # Nothing counted means no loss and no gradient, not 0/0.
        return total / weight.detach().clamp_min(1e-12), weight.detach()
    return total / max(weight, 1e-12), weight


def _sum(value: Value, size: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """A loss as (sum, weight)."""
    if isinstance(value, tuple):
        total, weight = value
        return total, weight.detach() if torch.is_tensor(weight) else weight
    return value * size, size
