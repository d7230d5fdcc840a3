"""Gradients as 16-bit numbers on the way, added up in 32 bits.

Each rank owns a piece. It gets that piece from all ranks in 16 bits, adds up in fp32, and sends the
sum to all in 16 bits: half the bytes of a ring, at one rounding before the sum and one after it, on
any number of ranks. An all-reduce in 16 bits would round at each addition. What rounding loses is
not carried into the next step: it is at most 1/256 (bf16) or 1/2048 (fp16) of each gradient, to
either side, as wherever precision is mixed (Micikevicius et al., "Mixed Precision Training", 2018);
feedback is for coarser compression (Seide et al., "1-Bit Stochastic Gradient Descent", 2014).

fp16 has little range, so each piece is sent times the power of two that brings its largest number
close to fp16's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Group

# Largest numbers become 2**14 to 2**15, below fp16's end at 65,504.
_FP16_EXPONENT = 15
# Beyond it, a power of two would leave fp32's own range.
_FARTHEST = 120


class Halves(Reduction):
    """Sends fp16 or bf16.

    Args:
        group: the ranks.
        dtype: torch.float16 or torch.bfloat16.
    """

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype

    def add_up(self, flat: Flat) -> None:
        """In two turns."""
        if not len(flat.values):
            return
        values, size, channel = flat.values, len(self.group.ranks), self.group.channel
        wide = torch.promote_types(values.dtype, torch.float32)
        length = -(-len(values) // size)
        # A row for each rank: the exponent, then the numbers. Past the last piece nobody looks.
        out = torch.zeros(size, 1 + length, dtype=torch.int16, device=values.device)
        for row, piece in zip(out, torch.split(values, length), strict=False):
            self._pack(piece, row)
        come = torch.empty_like(out)
        # As bytes, which every library sends.
        dist.all_to_all_single(_bytes(come), _bytes(out), group=channel)
        total = self._unpack(come[0], wide)
        for row in come[1:]:
            total += self._unpack(row, wide)
        own = out[0]
        self._pack(total, own)
        dist.all_gather([_bytes(row) for row in come], _bytes(own), group=channel)
        for row, piece in zip(come, torch.split(values, length), strict=False):
            piece.copy_(self._unpack(row, wide)[: len(piece)])

    def _pack(self, piece: torch.Tensor, row: torch.Tensor) -> None:
        numbers = row[1 : 1 + len(piece)].view(self.dtype)
        if self.dtype != torch.float16:
            numbers.copy_(piece)
            return
        largest = torch.linalg.vector_norm(piece, float("inf")).float()
        shift = (_FP16_EXPONENT - torch.frexp(largest).exponent).clamp(-_FARTHEST, _FARTHEST)
        # Infinity and NaN stay what they are, as they must.
        shift = shift.where(torch.isfinite(largest), 0)
        row[0] = shift
        numbers.copy_(piece * torch.exp2(shift.to(torch.promote_types(piece.dtype, torch.float32))))

    def _unpack(self, row: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        numbers = row[1:].view(self.dtype).to(wide)
        if self.dtype == torch.float16:
            numbers *= torch.exp2(-row[0].to(wide))
        return numbers


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint8)
