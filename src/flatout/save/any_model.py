"""A model in a file, whatever framework made it: the name's ending decides the format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.models import adapter_of, load_weights, weights_of
from flatout.save.fits import check_fits
from flatout.save.keras_file import load_keras, save_keras
from flatout.save.weights_file import check_ending, load_weights_file, save_weights


def save_model_file(
    path: str | Path,
    model: Any,
    metadata: Mapping[str, str] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model, or its weights under its own keys, whole or not at all.

    Args:
        path: a path or fsspec URL with one of the endings of the model's framework.
        model: of that framework.
        metadata: text that goes with it, by names that begin with "flatout.".
        weights: the model's, where they were put together of what several ranks hold.

    Raises:
        CheckpointError: the ending is another, or the file cannot be written.
    """
    check_ending(path, adapter_of(model))
    if os.fspath(path).endswith(adapter_of(model).own_files):
        save_keras(model, path, metadata)
    else:
        save_weights(path, weights or weights_of(model), metadata)


def load_model_file(
    path: str | Path,
    model: Any,
    prepare: Callable[[dict[str, str]], object] = bool,
    say: Callable[[str], object] = bool,
) -> dict[str, str]:
    """Load weights into the model, in place; nothing of the file is executed.

    Args:
        path: a path or fsspec URL with one of the endings of the model's framework.
        model: of that framework.
        prepare: gets the text that goes with the weights, before they are compared with the model.
        say: takes a line if the file holds several sets of weights.

    Returns:
        the text that goes with it.

    Raises:
        CheckpointError: the file is missing, damaged or of another model.
    """
    own_files = adapter_of(model).own_files
    if os.fspath(path).endswith(own_files):
        return load_keras(model, path, prepare)
    if own_files:
        check_ending(path, adapter_of(model))
    weights, metadata = load_weights_file(path, say)
    prepare(metadata)
    check_fits(weights_of(model), weights, where=os.fspath(path))
    load_weights(model, weights)
    return metadata
