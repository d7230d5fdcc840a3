"""PowerSGD: each gradient as the product of two thin matrices, with the error added to later steps.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019. A gradient M of n x m numbers becomes P Q^T of r (n + m):

    M = gradient + error           the error of earlier steps
    P = M Q, summed                Q of the last step: one turn of a power iteration
    P = an orthonormal basis of P  on the first rank, for the same bits on all
    Q = M^T P, summed
    gradient = P Q^T
    error = M - P (M^T P)^T        of this rank only

The errors of all ranks and the applied gradient add up to the true gradient, so that nothing is
lost (error feedback; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", 2019). Vectors and small matrices are sent as they are.

Gradients are sums here, divided later by the weight of the step. So an error is scaled by the ratio
of the steps' weights before it is added to another step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Group

Shapes = Sequence[tuple[int, int]]

# Smallest ratio of bytes before and after compression that is worth its error.
_SAVES = 2


class PowerSgd(Reduction):
    """Sends matrices of low rank."""

    carries = True

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank
        self._kept: dict[int, _Kept] = {}
        self._saved: dict[str, Any] = {}

    def add_up(self, flat: Flat) -> None:
        kept = self._kept_of(flat)
        # If nothing counts in this step, errors wait for the next.
        if self.weight == 0 or not kept.factors:
            dist.all_reduce(flat.values, group=self.group.channel)
            return
        kept.error *= self.weight / kept.weight
        kept.weight = self.weight
        wide = flat.values.to(kept.error.dtype)  # the same memory, unless it is of 16 bits
        wide += kept.error
        matrices, others = _parts(wide, flat.shapes, self.rank)
        errors, _ = _parts(kept.error, flat.shapes, self.rank)
        bases = self._bases(matrices, others, kept.factors)
        own = [m.t() @ basis for m, basis in zip(matrices, bases, strict=True)]
        sums = _together(own)
        dist.all_reduce(sums, group=self.group.channel)
        summed = _apart(sums, own)
        for number, (matrix, basis) in enumerate(zip(matrices, bases, strict=True)):
            if torch.isfinite(basis).all():
                torch.addmm(matrix, basis, own[number].t(), alpha=-1, out=errors[number])
                kept.factors[number] = summed[number].clone()
            # A gradient that is not finite makes its basis not finite, and so reaches all ranks.
            torch.mm(basis, summed[number].t(), out=matrix)
        if wide is not flat.values:
            flat.values.copy_(wide)

    def _bases(
        self,
        matrices: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        factors: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        first, channel = self.group.ranks[0], self.group.channel
        products = [m @ torch.linalg.qr(q).Q for m, q in zip(matrices, factors, strict=True)]
        message = _together([*products, *others])
        dist.reduce(message, first, group=channel)
        parts = _apart(message, [*products, *others])
        if self.group.own == 0:
            for product in parts[: len(products)]:
                if torch.isfinite(product).all():
                    product.copy_(torch.linalg.qr(product).Q)
                else:
                    product.fill_(torch.nan)
        dist.broadcast(message, first, group=channel)
        for other, total in zip(others, parts[len(products) :], strict=True):
            other.copy_(total)
        return parts[: len(products)]

    def _kept_of(self, flat: Flat) -> _Kept:
        if flat.number not in self._kept:
            self._kept[flat.number] = kept = _Kept(flat, self.rank, self.weight)
            saved = self._saved.pop(str(flat.number), None)
            if saved is not None:
                kept.take(saved)
        return self._kept[flat.number]

    def state_dict(self) -> dict[str, Any]:
        """Return errors and factors by bucket, including loaded ones that are not used yet."""
        return self._saved | {str(number): kept.saved() for number, kept in self._kept.items()}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Give each rank its own errors. With other ranks, no error is lost or doubled."""
        own, size = self.group.own, len(self.group.ranks)
        self._kept.clear()
        self._saved = {}
        for number, first in (states[0] if states else {}).items():
            mine = [state[number] for state in states[own::size]]
            error = sum((item["error"] for item in mine), torch.zeros_like(first["error"]))
            self._saved[number] = {**first, "error": error}


class _Kept:
    """The error and factors of a bucket, from step to step."""

    def __init__(self, flat: Flat, rank: int, weight: float) -> None:
        values, self.layout, self.weight = flat.values, flat.layout, weight or 1.0
        self.error = torch.zeros_like(
            values, dtype=torch.promote_types(values.dtype, torch.float32)
        )
        # The same start on all ranks, without draws from the generator that the user has seeded.
        draws = torch.Generator().manual_seed(flat.number)
        self.factors = [
            torch.randn(matrix.shape[1], rank, generator=draws, dtype=self.error.dtype).to(
                values.device
            )
            for matrix in _parts(self.error, flat.shapes, rank)[0]
        ]

    def saved(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "weight": self.weight,
            "error": self.error,
            "factors": self.factors,
        }

    def take(self, saved: dict[str, Any]) -> None:
        shapes = [factor.shape for factor in self.factors]
        then = [factor.shape for factor in saved["factors"]]
        if (saved["layout"], then) == (self.layout, shapes):
            self.factors = [factor.to(self.error) for factor in saved["factors"]]
            self.error.copy_(saved["error"])
            self.weight = saved["weight"]


def _parts(
    values: torch.Tensor, shapes: Shapes, rank: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    matrices, others = [], []
    for part, (rows, columns) in zip(
        torch.split(values, [rows * columns for rows, columns in shapes]), shapes, strict=True
    ):
        if (rows + columns) * rank * _SAVES < rows * columns:
            matrices.append(part.view(rows, columns))
        else:
            others.append(part)
    return matrices, others


def _together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _apart(message: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(message, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
