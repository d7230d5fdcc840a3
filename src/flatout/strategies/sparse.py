"""Sums of gradients that have few of a table's rows: ranks tell each other the rows they have.

A table's gradient in full would be as large as the table, which is what `Embedding(sparse=True)`
is there to avoid. Rows are put together in the order of ranks, so that all have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flatout.errors import ModelError
from flatout.models import TableParameter, modules_of
from flatout.world import World


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

    Raises:
        ModelError: a gradient is sparse in another way than by rows.
    """
    own = [_rows_of(table) for table in tables]
    counts = torch.zeros(world.size, len(tables), 2, dtype=torch.int64, device=tables[0].device)
    for place, rows in enumerate(own):
        if rows is not None:
            # Of a gradient that is there but has no rows, the optimizer still takes note.
            counts[world.rank, place] = counts.new_tensor([rows._nnz(), 1])
    world.sum(counts, "number of rows in sparse gradients")
    for place, (table, rows) in enumerate(zip(tables, own, strict=True)):
        lengths = counts[:, place, 0].tolist()
        table.grad = None
        if counts[:, place, 1].any():
            table.grad = _put_together(world, table, rows, lengths)


def _put_together(
    world: World, table: torch.Tensor, own: torch.Tensor | None, lengths: list[int]
) -> torch.Tensor:
    """The rows of all ranks, each row once."""
    start, length = sum(lengths[: world.rank]), lengths[world.rank]
    # Each rank fills its own part, and zeros add nothing to the others'.
    places = torch.zeros(1, sum(lengths), dtype=torch.int64, device=table.device)
    values = torch.zeros(sum(lengths), *table.shape[1:], dtype=table.dtype, device=table.device)
    if own is not None:
        places[:, start : start + length] = own.indices()
        values[start : start + length] = own.values()
    world.sum(places, "places of rows in sparse gradients")
    world.sum(values, "rows of sparse gradients")
    return torch.sparse_coo_tensor(places, values, table.shape, check_invariants=False).coalesce()


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
