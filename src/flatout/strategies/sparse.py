"""Sums of gradients that have few of a table's rows: ranks tell each other the rows they have.

A table's gradient in full would be as large as the table, which is what `Embedding(sparse=True)`
is there to avoid. Rows are put together in the order of ranks, so that all have the same bits.
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
from flatout.world import World

_ID_BYTES = 8


def sparse_weights(model: nn.Module) -> set[torch.Tensor]:
    """Tables of the model whose gradients have only the rows that a batch has used."""
    found: set[torch.Tensor] = set()
    for layer in modules_of(model):
        # Keras keeps the weights of a layer in a module of their own.
        own = [p for p in layer._parameters.values() if p is not None]
        is_sparse = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        found.update(p for p in own if is_sparse or isinstance(p, TableParameter))
    return found


def sum_rows(world: World, tables: Sequence[torch.Tensor]) -> None:
    """Make the gradient of each table that of all ranks; where no rank has one, there is none.

    How many rows each rank has goes first, then the rows of all tables together.

    Raises:
        ModelError: a gradient is sparse in another way than by rows.
    """
    own = [_rows_of(table) for table in tables]
    # Of a gradient that is there but has no rows, the optimizer still takes note.
    lengths = [-1 if rows is None else rows._nnz() for rows in own]
    counts = torch.tensor(lengths, dtype=torch.int64, device=tables[0].device)
    each = torch.stack(world.gather_tensors(counts, "number of rows in sparse gradients")).tolist()
    sizes = [
        sum(_bytes(table, count) for table, count in zip(tables, of_rank, strict=True))
        for of_rank in each
    ]
    message = torch.zeros(max(sizes), dtype=torch.uint8, device=counts.device)
    at = 0
    for table, rows in zip(tables, own, strict=True):
        if rows is not None:
            places, values, at = _parts(message, at, table, rows._nnz())
            places.copy_(rows.indices()[0])
            values.copy_(rows.values())
    found = world.gather_tensors(message, "rows of sparse gradients") if max(sizes) else []
    _set_gradients(tables, found, each)


def sum_own_rows(world: World, tables: Sequence[torch.Tensor], shards: RowShards) -> None:
    """Make the gradient of each table that of all ranks in the rows that this rank owns.

    Where no rank has one, there is none. How many rows each rank has for which goes first, then
    the rows of all tables together.

    Args:
        world: of this rank.
        tables: that are sharded.
        shards: tells who owns which row.
    """
    own: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    counts: list[list[int]] = []
    for table in tables:
        rows = _rows_of(table)
        if rows is None:
            own.append(None)
            counts.append([-1] * world.size)
            continue
        places, lengths = shards.by_owner(table, rows.indices()[0])
        own.append((rows.indices()[0][places], rows.values()[places]))
        counts.append(lengths)
    told = world.gather_tensors(torch.tensor(counts), "number of rows for the owners")
    each = torch.stack(told).tolist()  # by rank, table, owner
    parts, starts = [], [0] * len(tables)
    for owner in range(world.size):
        counts_to = [of_table[owner] for of_table in counts]
        parts.append(_message(tables, own, starts, counts_to))
        starts = [at + max(0, count) for at, count in zip(starts, counts_to, strict=True)]
    come = [[of_table[world.rank] for of_table in of_rank] for of_rank in each]
    sizes = [sum(map(_bytes, tables, counts_from)) for counts_from in come]
    found = world.all_to_all(parts, sizes, "rows of sparse gradients for their owners")
    _set_gradients(tables, found, come)


def _set_gradients(
    tables: Sequence[torch.Tensor],
    messages: Sequence[torch.Tensor],
    counts: Sequence[Sequence[int]],
) -> None:
    """Make the gradient of each table that of its rows in all messages.

    Args:
        tables: that the messages are of, in their order.
        messages: of the ranks; none where no rank has rows.
        counts: by rank and table, how many rows; -1 where a rank has no gradient.
    """
    starts = [0] * len(counts)
    for place, table in enumerate(tables):
        parts = []
        for rank, message in enumerate(messages):
            ids, values, starts[rank] = _parts(message, starts[rank], table, counts[rank][place])
            parts.append((ids, values))
        is_there = any(of_rank[place] >= 0 for of_rank in counts)
        table.grad = _put_together(table, parts) if is_there else None


def _message(
    tables: Sequence[torch.Tensor],
    own: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
    starts: Sequence[int],
    counts: Sequence[int],
) -> torch.Tensor:
    """So many rows of each table from a start on, with their values."""
    message = torch.zeros(sum(map(_bytes, tables, counts)), dtype=torch.uint8)
    at = 0
    for table, held, start, count in zip(tables, own, starts, counts, strict=True):
        if held is not None:
            places, values, at = _parts(message, at, table, count)
            places.copy_(held[0][start : start + count])
            values.copy_(held[1][start : start + count])
    return message


def _bytes(table: torch.Tensor, rows: int) -> int:
    """What so many rows take in a message, each part of it a multiple of 8."""
    values = math.prod((max(rows, 0), *table.shape[1:])) * table.element_size()
    return max(rows, 0) * _ID_BYTES + -(-values // _ID_BYTES) * _ID_BYTES


def _parts(
    message: torch.Tensor, at: int, table: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Where a message has the places and the values of so many rows, and where the next begin."""
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
    """The rows of all ranks, each row once."""
    places = (
        torch.cat([one for one, _ in parts])
        if parts
        else torch.empty(0, dtype=torch.int64, device=table.device)
    )
    values = (
        torch.cat([one for _, one in parts])
        if parts
        else torch.empty(0, *table.shape[1:], dtype=table.dtype, device=table.device)
    )
    is_ours = values.is_cpu and values.dtype is torch.float32 and values.dim() == 2
    if not is_ours or not table_rows.available():
        found = torch.sparse_coo_tensor(places[None], values, table.shape, check_invariants=False)
        return found.coalesce()
    groups = table_rows.group(places, len(table))
    return torch.sparse_coo_tensor(
        groups.rows[None],
        table_rows.sum_rows(values, groups),
        table.shape,
        check_invariants=False,
        is_coalesced=True,
    )


def _rows_of(table: torch.Tensor) -> torch.Tensor | None:
    gradient = table.grad
    if gradient is None:
        return None
    if gradient.layout is torch.strided:  # the table was used in another way as well
        return gradient.to_sparse(1)
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise ModelError(
            f"ranks add up sparse gradients by rows, found {gradient.layout} with "
            f"{gradient.sparse_dim()} sparse dimensions for a table {tuple(table.shape)}",
            do="use nn.Embedding(sparse=True) or a dense layer, or train on one rank",
        )
    return gradient.coalesce()
