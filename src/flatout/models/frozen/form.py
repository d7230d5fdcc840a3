"""The form of a batch's tensor for any number of samples, and its rows by sample."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Form:
    """Sizes and strides of a value for any number of samples.

    Attributes:
        fixed, per_sample: each size is `fixed + samples * per_sample`.
        strides: the strides in the batch that the form was derived from.
        samples: the number of samples in that batch.
        dtype, device: those of the value.
        axis: the only dimension that grows with the number of samples, by `per_sample` for each;
            None if the value has no rows by sample.
    """

    fixed: tuple[int, ...]
    per_sample: tuple[int, ...]
    strides: tuple[int, ...]
    samples: int
    dtype: torch.dtype
    device: torch.device
    axis: int | None

    @classmethod
    def of(cls, value: torch.Tensor, samples: int, other: torch.Tensor, others: int) -> Form | None:
        """Derive the form from the value in two batches; return None if its sizes fit no rule."""
        if value.dim() != other.dim() or value.dtype != other.dtype:
            return None
        apart = [(a - b, samples - others) for a, b in zip(value.shape, other.shape, strict=True)]
        if any(a % b for a, b in apart):
            return None
        per = tuple(a // b for a, b in apart)
        fixed = tuple(a - samples * p for a, p in zip(value.shape, per, strict=True))
        grows = [axis for axis, p in enumerate(per) if p]
        axis = grows[0] if len(grows) == 1 and not fixed[grows[0]] and per[grows[0]] > 0 else None
        return cls(fixed, per, value.stride(), samples, value.dtype, value.device, axis)

    def shape(self, samples: int) -> tuple[int, ...]:
        return tuple(f + samples * p for f, p in zip(self.fixed, self.per_sample, strict=True))

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of a sample, for a value with rows."""
        return prod(self.shape(1)) * self.dtype.itemsize

    def _order(self) -> list[int]:
        others = [d for d in range(len(self.fixed)) if d != self.axis]
        return sorted(others, key=lambda d: -self.strides[d])

    def _is_outermost(self) -> bool:
        assert self.axis is not None
        size = self.shape(self.samples)
        expected = 1
        for d in reversed(self._order()):
            if size[d] > 1 and self.strides[d] != expected:
                return False
            expected *= size[d]
        return size[self.axis] == 1 or self.strides[self.axis] == expected

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        """Return a row for each sample, contiguous, in the memory order of the value.

        Returns a view if the value's rows are adjacent in memory.
        """
        assert self.axis is not None
        count = self.per_sample[self.axis]
        sizes = value.shape[: self.axis], value.shape[self.axis + 1 :]
        parts = value.reshape(*sizes[0], -1, count, *sizes[1])
        behind = [d + (d > self.axis) for d in self._order()]
        ordered = parts.permute([self.axis, self.axis + 1, *behind])
        return (ordered if count > 1 else ordered.squeeze(1)).contiguous()

    def value(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the value of these rows, with its original strides."""
        assert self.axis is not None
        rows, size = rows.contiguous(), self.shape(len(rows))
        if self._is_outermost():
            return rows.as_strided(size, self.strides)
        count = self.per_sample[self.axis]
        order = self._order()
        flat = rows.flatten(0, 1) if count > 1 else rows
        back = [0] * len(size)
        for place, d in enumerate([self.axis, *order]):
            back[d] = place
        outer = sorted(range(len(size)), key=lambda d: -self.strides[d])
        laid_out = torch.empty_permuted(size, outer, dtype=rows.dtype, device=rows.device)
        return laid_out.copy_(flat.permute(back))
