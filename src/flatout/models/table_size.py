"""The weights of embedding tables, of torch or Keras, whose number of rows may change."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatout.errors import ModelError
from flatout.models.keras import tables as keras_tables

_KINDS = (nn.Embedding, nn.EmbeddingBag)


def table_weight(table: Any) -> torch.Tensor:
    """Return the weights of a table, of shape (rows, width).

    Args:
        table: a module from `TorchModel.tables`.

    Raises:
        ModelError: the table is not built yet, or its weights are not a parameter of the table
            itself.
    """
    try:
        result = table.weight if isinstance(table, _KINDS) else keras_tables.weight_of(table)
    except AttributeError as error:
        raise ModelError(
            f"the table {type(table).__name__} has no weights yet",
            do="build the model first, as by keras.Input or model.build(shape)",
        ) from error
    if not isinstance(result, nn.Parameter) or result.dim() != 2:
        raise ModelError(f"the weights of the table {type(table).__name__} are no parameter")
    return result


def set_table_rows(table: Any) -> None:
    """Update a module's number of rows to that of its weights."""
    rows = len(table_weight(table))
    if isinstance(table, _KINDS):
        table.num_embeddings = rows
    else:
        keras_tables.set_rows(table, rows)
