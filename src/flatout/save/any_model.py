"""Saves and loads model files of any framework; the file name's suffix decides the format."""

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
    """Write the model, or its weights under its own keys. The file is complete or absent.

    Args:
        path: path or fsspec URL with a suffix that the model's framework uses.
        metadata: texts to store in the file, by names that start with "flatout.".
        weights: the model's full weights, by name, where they are joined from several ranks. None
            means the weights in `model`.

    Raises:
        CheckpointError: the framework does not use this suffix, or the file cannot be written.
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
    """Load weights into the model, in place. No code of the file is executed.

    Args:
        path: path or fsspec URL with a suffix that the model's framework uses.
        prepare: is called with the file's texts, before the weights are compared with the model.
        say: is called with a line for the user if the file holds several sets of weights.

    Returns:
        texts that were stored in the file, by name.

    Raises:
        CheckpointError: the file is missing or damaged, or its weights do not fit the model.
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
