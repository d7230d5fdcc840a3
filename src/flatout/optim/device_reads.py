"""Reads of tables that lie on a GPU, where nothing may wait for the device before a step does.

On a CPU the rows of a batch's ids are sorted as they are read. Here rows are brought up to date by
the ids themselves, of which several may be the same, and gradients keep them, until the step sorts
those of all tables at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from flatout.kernels import Read, Steps, Table, compacted, known_ids, sum_tables

# An evaluation makes no steps.
_MOST = 512


class SteppedTable(Protocol):
    """A table that is stepped by rows."""

    weight: nn.Parameter

    def pending_steps(self) -> tuple[Steps, Table] | None:
        """Through which steps its rows are to be brought before they are read; None: they are."""
        ...

    def gradient(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Of these rows, each once."""
        ...


class DeviceReads:
    """The ids by which tables on one device were read since the last step."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._bad: torch.Tensor | None = None

    def lookup(self, kept: SteppedTable, ids: torch.Tensor) -> DeviceLookup:
        """Bring the rows of ids up to date.

        An id outside of the table is told by `gather`; where no gradients are made, at once.

        Raises:
            IndexError: of such an id.
        """
        size = len(kept.weight)
        if not torch.is_grad_enabled() and ids.numel():
            least, most = torch.stack(torch.aminmax(ids.detach())).tolist()
            if least < 0 or most >= size:
                raise IndexError(f"ids {least} to {most} for a table of {size} rows")
        if self._bad is None:
            self._bad = torch.zeros(1, dtype=torch.int64, device=kept.weight.device)
        # An array may be filled in once more, which only its next tensor shows.
        storage = ids.untyped_storage()._cdata
        key = (storage, ids.data_ptr(), ids.dtype, ids.shape, ids.stride(), size)
        version = -1 if ids.is_inference() else ids._version
        held = self._known.get(key)
        is_known = held is not None and held[1] == version
        known = held[2] if held is not None and is_known else ids.detach().reshape(-1)
        behind = kept.pending_steps()
        if behind is not None:
            steps, table = behind
            checked = steps.bring_ids(table, known, self._bad)
            known = known if is_known else checked
        elif not is_known:
            known = known_ids(known, size, self._bad)
        if version >= 0 and not is_known:
            if len(self._known) >= _MOST:
                self._known.clear()
            # With the ids themselves: as long as they live no others lie at this address.
            self._known[key] = ids, version, known
        return DeviceLookup(kept, ids.shape, known)

    def gather(self, tables: Sequence[SteppedTable]) -> None:
        """Make the gradients of tables that are there ones with every row once.

        Raises:
            IndexError: an id was read that a table has no row for.
        """
        alike: dict[torch.device, list[SteppedTable]] = {}
        for kept in tables:
            gradient = kept.weight.grad
            if gradient is not None and not gradient.is_coalesced():
                alike.setdefault(gradient.device, []).append(kept)
        for own in alike.values():
            self._gather(own)

    def _gather(self, tables: Sequence[SteppedTable]) -> None:
        assert self._bad is not None
        reads = []
        for kept in tables:
            gradient = kept.weight.grad
            assert gradient is not None
            reads.append(Read(gradient._indices()[0], gradient._values(), len(kept.weight)))
        sums, is_bad = sum_tables(reads, self._bad)
        if is_bad:
            self._bad.zero_()
            raise IndexError("an id of the batch is outside of its embedding table")
        for kept, (rows, values) in zip(tables, sums, strict=True):
            kept.weight.grad = kept.gradient(rows, values)

    def rows_of(self, size: int) -> list[torch.Tensor]:
        """What was read of tables with so many rows."""
        return [known for key, (_, _, known) in self._known.items() if key[-1] == size]

    def forget(self) -> None:
        """After a step."""
        self._known.clear()


class DeviceLookup:
    """Reads the rows of ids, which are up to date.

    Args:
        kept: the table.
        shape: of the ids.
        known: int64, the ids in a row; all are in the table.
    """

    def __init__(self, kept: SteppedTable, shape: torch.Size, known: torch.Tensor) -> None:
        self._kept, self._shape, self._known = kept, shape, known

    def embedding(self, padding_idx: int | None, scale_grad_by_freq: bool) -> torch.Tensor:
        """As torch.nn.functional.embedding."""
        options = (self._known, self._shape, padding_idx, scale_grad_by_freq)
        return _Gathered.apply(self._kept.weight, *options)  # type: ignore[no-any-return,no-untyped-call]

    def embedding_bag(
        self, offsets: torch.Tensor | None, padding_idx: int | None, **options: Any
    ) -> torch.Tensor:
        """What torch's operator gives of the rows of ids, as their own table.

        They rise in it, but for those that fill up and for that of padding, which come last.
        """
        known = self._known
        rows, numbers = compacted(known)
        if padding_idx is not None:
            last = torch.full_like(known[:1], len(rows))
            rows = torch.cat([rows, torch.full_like(known[:1], padding_idx)])
            numbers = torch.where(known == padding_idx, last, numbers)
            padding_idx = len(rows) - 1
        return F.embedding_bag(
            numbers.reshape(self._shape),
            _Compact.apply(self._kept.weight, rows),  # type: ignore[no-untyped-call]
            None if offsets is None else offsets.to(numbers.dtype),
            padding_idx=padding_idx,
            **options,
        )


class _Gathered(torch.autograd.Function):
    """Rows of a table by ids, with a gradient of these ids alone."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        known: torch.Tensor,
        shape: torch.Size,
        padding_idx: int | None,
        scale_grad_by_freq: bool,
    ) -> torch.Tensor:
        ctx.known, ctx.table = known, weight.shape
        ctx.padding_idx, ctx.scale_grad_by_freq = padding_idx, scale_grad_by_freq
        return F.embedding(known.view(shape), weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # it is to be differentiated itself
            options = (ctx.table[0], ctx.padding_idx, ctx.scale_grad_by_freq)
            ids = ctx.known.view(gradient.shape[:-1])
            return whole_gradient(gradient, ids, *options), *[None] * 4
        known, values = ctx.known, gradient.reshape(-1, gradient.shape[-1])
        if ctx.scale_grad_by_freq:
            _, places, counts = known.unique(return_inverse=True, return_counts=True)
            values = values / counts[places][:, None]
        if ctx.padding_idx is not None:  # a gradient of zero is as none
            values = values.masked_fill((known == ctx.padding_idx)[:, None], 0.0)
        return _as_read(known, values, ctx.table), None, None, None, None


def whole_gradient(
    gradient: torch.Tensor,
    ids: torch.Tensor,
    rows: int,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
) -> torch.Tensor:
    """That of a table of so many rows, as torch makes it, which can be differentiated."""
    padding = -1 if padding_idx is None else padding_idx
    result: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        gradient, ids, rows, padding, scale_grad_by_freq
    )
    return result


class _Compact(torch.autograd.Function):
    """The rows that a batch uses, for an operator that reads a table."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.rows, ctx.table = rows, weight.shape
        return weight.index_select(0, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _as_read(ctx.rows, gradient, ctx.table), None


def _as_read(ids: torch.Tensor, values: torch.Tensor, table: torch.Size) -> torch.Tensor:
    """A table's gradient, in which several may be of the same row."""
    return torch.sparse_coo_tensor(
        ids[None], values.contiguous(), table, check_invariants=False, is_coalesced=False
    )
