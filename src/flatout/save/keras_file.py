"""Keras models in files: `.keras` and `.weights.h5` by Keras itself, `.safetensors` by name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from flatout.errors import CheckpointError
from flatout.models import load_weights, weights_of
from flatout.save.fits import check_fits
from flatout.save.model_file import load_model, save_model
from flatout.save.storage import Folder

_KERAS = (".keras", ".weights.h5")


def save_keras(model: Any, path: str | Path) -> Path:
    """Write the model (`.keras`) or its weights, whole or not at all.

    Args:
        model: a built `keras.Model` on the torch backend.
        path: a path or fsspec URL that ends in .keras, .weights.h5 or .safetensors.

    Raises:
        CheckpointError: the ending is another, or the file cannot be written.
    """
    name = os.fspath(path)
    if name.endswith(".safetensors"):
        save_model(name, weights_of(model))
        return Path(path)
    suffix = _suffix(name)
    folder, file = Folder(name).parent()
    with tempfile.TemporaryDirectory(prefix="flatout-") as beside:
        local = Path(beside, f"model{suffix}")
        model.save(local) if suffix == ".keras" else model.save_weights(local)
        folder.write_whole(file, [local.read_bytes()])
    return Path(path)


def load_keras(model: Any, path: str | Path) -> None:
    """Load weights into the model, in place; nothing of the file is executed.

    Raises:
        CheckpointError: the file is missing, damaged or of another model.
    """
    name = os.fspath(path)
    if name.endswith(".safetensors"):
        saved = load_model(name)
        check_fits(weights_of(model), saved)
        load_weights(model, saved)
        return
    suffix = _suffix(name)
    folder, file = Folder(name).parent()
    data = folder.read(file)
    before = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    with tempfile.TemporaryDirectory(prefix="flatout-") as beside:
        local = Path(beside, f"model{suffix}")
        local.write_bytes(data)
        try:
            model.load_weights(local)
        except Exception as error:
            load_weights(model, before)  # Keras may have loaded a part of them
            raise CheckpointError(
                f"the weights cannot be loaded: {str(error).splitlines()[0]}",
                where=name,
                do="check that the file is whole and of the same model",
            ) from error


def _suffix(name: str) -> str:
    for suffix in _KERAS:
        if name.endswith(suffix):
            return suffix
    raise CheckpointError(
        "a Keras model is saved as .keras (all of it), .weights.h5 or .safetensors (weights)",
        where=name,
        do="choose one of these endings",
    )
