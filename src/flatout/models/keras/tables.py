"""Keras' embeddings: their weights, and how many rows they have."""

from __future__ import annotations

from typing import Any

import torch


def weight_of(layer: Any) -> torch.Tensor:
    """The parameter that holds the rows of an embedding.

    Raises:
        AttributeError: the layer is not built.
    """
    value: torch.Tensor = layer._embeddings._value
    return value


def set_rows(layer: Any, rows: int) -> None:
    """Let an embedding know that its parameter has so many rows by now."""
    layer.input_dim = rows
    set_shape(layer._embeddings)


def set_shape(variable: Any) -> None:
    """Let a variable know which shape its value has by now."""
    variable._shape = tuple(variable._value.shape)
