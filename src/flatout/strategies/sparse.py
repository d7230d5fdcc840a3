"""Sums of gradients with few rows of a table: ranks exchange the rows that they have.

A table's full gradient would be as large as the table; `Embedding(sparse=True)` exists to avoid it.
Rows are joined in the order of ranks, so that all ranks get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from flatout.errors import ModelError
from flatout.kernels import table_rows
from flatout.models import TableParameter, modules_of
from flatout.optim import RowShards
from flatout.world import World, to_eight

_ID_BYTES = 8
# Sent in place of the number of a gradient's rows. _NONE: there is no gradient. _AS_ASKED: its rows
# are the requested rows. _WHOLE: it has all rows.
_NONE, _AS_ASKED, _WHOLE = -1, -2, -3


def sparse_weights(model: nn.Module) -> set[torch.Tensor]:
    """Return the model's tables whose gradients have only the rows that a batch has used."""
    weights: set[torch.Tensor] = set()
    for layer in modules_of(model):
        # Keras keeps the weights of a layer in their own module.
        own = [p for p in layer._parameters.values() if p is not None]
        is_sparse = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        weights.update(p for p in own if is_sparse or isinstance(p, TableParameter))
    return weights


def sum_rows(world: World, tables: Sequence[torch.Tensor]) -> int:
    """Set the gradient of each table to the sum over all ranks, or None if no rank has one.

    The number of rows of each rank is exchanged first, then the rows of all tables together. If a
    rank's gradient is dense, because code has read the table whole, it becomes dense on all ranks.
    """
    own = [_rows_of(table) for table in tables]
    # The optimizer also needs to know of a gradient without rows.
    lengths = [_count(rows) for rows in own]
    counts = torch.tensor(lengths, dtype=torch.int64, device=tables[0].device)
    each = torch.stack(world.gather_tensors(counts, "number of rows in sparse gradients"))
    is_whole = (each == _WHOLE).any(0).tolist()
    for table in [table for table, whole in zip(tables, is_whole, strict=True) if whole]:
        _sum_whole(world, table)
    kept = [place for place, whole in enumerate(is_whole) if not whole]
    if not kept:
        return 0
    by_rank = each[:, kept].tolist()
    some = [tables[place] for place in kept]
    _sum_by_rows(world, some, [own[place] for place in kept], by_rank)
    return sum(map(_bytes, some, by_rank[world.rank]))


def _sum_whole(world: World, table: torch.Tensor) -> None:
    gradient = torch.zeros_like(table) if table.grad is None else table.grad.to_dense()
    world.sum(gradient, "gradient of a table that something has read whole")
    table.grad = gradient


def _sum_by_rows(
    world: World,
    tables: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor | None],
    counts: Sequence[Sequence[int]],
) -> None:
    sizes = [sum(map(_bytes, tables, of_rank)) for of_rank in counts]
    message = torch.zeros(max(sizes), dtype=torch.uint8, device=tables[0].device)
    at = 0
    for table, rows in zip(tables, own, strict=True):
        if rows is not None:
            places, values, at = _parts(message, at, table, rows._nnz())
            places.copy_(rows.indices()[0])
            values.copy_(rows.values())
    result = world.gather_tensors(message, "rows of sparse gradients") if max(sizes) else []
    _set_gradients(tables, result, counts)


def sum_own_rows(world: World, tables: Sequence[torch.Tensor], shards: RowShards) -> int:
    """Set the gradients of tables, in the rows that this rank owns, to the sums over all ranks.

    If no rank has a gradient, it becomes None. The rows of all tables are sent together. Row ids
    are not sent for rows that a rank has requested, because their owners know them.
    """
    counts: list[int] = []
    parts: list[list[torch.Tensor]] = [[] for _ in range(world.size)]
    for table in tables:
        for part, (count, own) in zip(parts, _for_owners(table, shards), strict=True):
            counts.append(count)
            part += own
    each, result = world.exchange(counts, parts, "rows of sparse gradients for their owners")
    starts = [0] * world.size
    for place, table in enumerate(tables):
        come = [of_rank[place * world.size + world.rank] for of_rank in each]
        ids, values = [], []
        for rank, count in enumerate(come):
            if count == _AS_ASKED:
                asked = shards.last_asked(table)
                ids.append(torch.split(asked.local, asked.lengths)[rank])
            else:
                one, starts[rank] = _view(result[rank], starts[rank], torch.int64, (count,))
                ids.append(one)
            shape = (len(ids[-1]), table.shape[1])
            one, starts[rank] = _view(result[rank], starts[rank], table.dtype, shape)
            values.append(one)
        _set_own(table, shards, come, ids, values)
    return sum(
        item.nbytes for rank, part in enumerate(parts) if rank != world.rank for item in part
    )


def _for_owners(table: torch.Tensor, shards: RowShards) -> list[tuple[int, list[torch.Tensor]]]:
    rows = _rows_of(table)
    if rows is None:
        return [(_NONE, [])] * shards.world.size
    ids, values = rows.indices()[0], rows.values()
    asked = shards.asked_for(table, ids)
    if asked is not None:
        return [(_AS_ASKED, [own]) for own in torch.split(values, asked.dealt.counts)]
    dealt = shards.dealt(table, table_rows.group(ids, len(table)))
    each = torch.split(dealt.local, dealt.counts)
    values = values[dealt.groups.places]  # each row occurs once
    pairs = zip(each, torch.split(values, dealt.counts), strict=True)
    return [(len(local), [local, own]) for local, own in pairs]


def _set_own(
    table: torch.Tensor,
    shards: RowShards,
    counts: Sequence[int],
    ids: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> None:
    if all(count == _NONE for count in counts):
        table.grad = None
        return
    if all(count == _AS_ASKED for count in counts):
        asked = shards.last_asked(table)
        groups, rows = asked.groups, asked.rows
    else:
        groups = table_rows.group(torch.cat(list(ids)), shards.owned(table))
        rows = shards.in_whole(table, groups.rows)
    shards.is_stepped(table, groups.rows)
    result = table_rows.sum_rows(torch.cat(list(values)), groups)
    table.grad = torch.sparse_coo_tensor(
        rows[None], result, table.shape, check_invariants=False, is_coalesced=True
    )


def _view(
    message: torch.Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    shape = (max(shape[0], 0), *shape[1:])
    size = math.prod(shape) * dtype.itemsize
    return message[at : at + size].view(dtype).view(shape), at + to_eight(size)


def _set_gradients(
    tables: Sequence[torch.Tensor],
    messages: Sequence[torch.Tensor],
    counts: Sequence[Sequence[int]],
) -> None:
    starts = [0] * len(counts)
    for place, table in enumerate(tables):
        parts = []
        for rank, message in enumerate(messages):
            ids, values, starts[rank] = _parts(message, starts[rank], table, counts[rank][place])
            parts.append((ids, values))
        is_there = any(of_rank[place] >= 0 for of_rank in counts)
        table.grad = _put_together(table, parts) if is_there else None


def _bytes(table: torch.Tensor, rows: int) -> int:
    values = math.prod((max(rows, 0), *table.shape[1:])) * table.element_size()
    return max(rows, 0) * _ID_BYTES + to_eight(values)


def _parts(
    message: torch.Tensor, at: int, table: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    rows = max(rows, 0)
    middle = at + rows * _ID_BYTES
    shape = (rows, *table.shape[1:])
    end = middle + math.prod(shape) * table.element_size()
    places = message[at:middle].view(torch.int64)
    values = message[middle:end].view(table.dtype).view(shape)
    return places, values, at + _bytes(table, rows)


def _put_together(
    table: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    places = (
        torch.cat([item for item, _ in parts])
        if parts
        else torch.empty(0, dtype=torch.int64, device=table.device)
    )
    values = (
        torch.cat([item for _, item in parts])
        if parts
        else torch.empty(0, *table.shape[1:], dtype=table.dtype, device=table.device)
    )
    is_ours = values.is_cpu and values.dtype is torch.float32 and values.dim() == 2
    if not is_ours or not table_rows.available():
        result = torch.sparse_coo_tensor(places[None], values, table.shape, check_invariants=False)
        return result.coalesce()
    groups = table_rows.group(places, len(table))
    return torch.sparse_coo_tensor(
        groups.rows[None],
        table_rows.sum_rows(values, groups),
        table.shape,
        check_invariants=False,
        is_coalesced=True,
    )


def _count(rows: torch.Tensor | None) -> int:
    if rows is None:
        return _NONE
    return _WHOLE if rows.layout is torch.strided else rows._nnz()


def _rows_of(table: torch.Tensor) -> torch.Tensor | None:
    gradient = table.grad
    if gradient is None or gradient.layout is torch.strided:
        return gradient
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise ModelError(
            f"ranks add up sparse gradients by rows, found {gradient.layout} with "
            f"{gradient.sparse_dim()} sparse dimensions for a table {tuple(table.shape)}",
            do="use nn.Embedding(sparse=True) or a dense layer, or train on one rank",
        )
    return gradient.coalesce()
