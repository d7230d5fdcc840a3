"""Gradients that are sent as 16-bit numbers and summed in 32 bits.

Each rank owns a piece. It gets that piece from all ranks in 16 bits, sums in fp32, and sends the
sum to all ranks in 16 bits. This takes half the bytes of a ring, with one rounding before the sum
and one after it, on any number of ranks. An all-reduce in 16 bits would round at each addition.

The rounding error is not carried into the next step. It is at most 1/256 (bf16) or 1/2048 (fp16) of
each gradient, to either side, as in all mixed precision (Micikevicius et al., "Mixed Precision
Training", 2018). Error feedback is for coarser compression (Seide et al., "1-Bit Stochastic
Gradient Descent", 2014).

fp16 has little range, so each piece is multiplied by the power of two that brings its largest
number near the largest of fp16.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from flatout.strategies.reductions.collectives import exchange
from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Group

# Exponent of the scaled largest number, 2**14 to 2**15, below fp16's largest number 65,504.
_FP16_EXPONENT = 15
# Largest exponent of the factor. A larger power of two would leave fp32's own range.
_FARTHEST = 120


class Halves(Reduction):
    """Sends fp16 or bf16."""

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        # By bucket and length, because new memory costs more than filling it.
        self._messages: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def add_up(self, flat: Flat) -> None:
        if not len(flat.values):
            return
        ranks, own, channel = self.group
        # If the gradients have 32 bits already, this is their own memory.
        wide = flat.values.to(torch.promote_types(flat.values.dtype, torch.float32))
        pieces = wide.tensor_split(len(ranks))
        out, come = self._messages_of(flat, len(ranks), len(pieces[0]))
        for row, piece in zip(out, pieces, strict=True):
            self._pack(piece, row)
        others = [number for number in range(len(ranks)) if number != own]
        # As bytes, which every library sends.
        exchange(
            [(_bytes(come[number]), ranks[number]) for number in others],
            [(_bytes(out[number]), ranks[number]) for number in others],
            channel,
        )
        come[own].copy_(out[own])
        self._unpack(come[0], pieces[own])
        for row in come[1:]:
            pieces[own].add_(self._numbers(row, pieces[own]), alpha=self._scale(row))
        self._pack(pieces[own], out[own])
        dist.all_gather([_bytes(row) for row in come], _bytes(out[own]), group=channel)
        for row, piece in zip(come, pieces, strict=True):
            self._unpack(row, piece)
        if wide is not flat.values:
            flat.values.copy_(wide)

    def _messages_of(self, flat: Flat, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = flat.number, length
        if key not in self._messages:
            out = torch.zeros(size, 1 + length, dtype=torch.int16, device=flat.values.device)
            self._messages[key] = out, torch.zeros_like(out)
        return self._messages[key]

    def _pack(self, piece: torch.Tensor, row: torch.Tensor) -> None:
        if self.dtype == torch.float16 and len(piece):
            low, high = torch.aminmax(piece)
            largest = torch.maximum(-low, high).float()
            shift = (_FP16_EXPONENT - torch.frexp(largest).exponent).clamp(-_FARTHEST, _FARTHEST)
            # Infinity and NaN must stay as they are.
            row[0] = shift.where(torch.isfinite(largest), 0)
            piece *= 1 / self._scale(row)
        self._numbers(row, piece).copy_(piece)

    def _unpack(self, row: torch.Tensor, piece: torch.Tensor) -> None:
        piece.copy_(self._numbers(row, piece))
        if self.dtype == torch.float16:
            piece *= self._scale(row)

    def _numbers(self, row: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        return row[1 : 1 + len(piece)].view(self.dtype)

    def _scale(self, row: torch.Tensor) -> float:
        return 2.0 ** -int(row[0]) if self.dtype == torch.float16 else 1.0


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint8)
