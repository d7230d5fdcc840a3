"""The file of ids next to a model file: it maps each id to a row of the model's tables.

The file is plain safetensors with int64 tensors. Its metadata have an entry `ids` with JSON text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flatout.errors import CheckpointError
from flatout.save.model_file import open_model, save_model
from flatout.save.storage import Folder

# _KEY: metadata entry of the header. _ENDING: suffix of a file of ids. _MODELS: suffixes of model
# files, which _ENDING replaces.
_KEY = "ids"
_ENDING = ".ids.safetensors"
_MODELS = (".weights.h5", ".safetensors", ".keras", ".pth", ".pt")


def ids_beside(path: str | os.PathLike[str]) -> str:
    """Return the path of the file of ids that belongs to a model file."""
    name = os.fspath(path)
    ending = next((ending for ending in _MODELS if name.endswith(ending)), "")
    return name.removesuffix(ending) + _ENDING


def save_ids(
    path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> str:
    """Write the ids of a model, and return the path of the file of ids.

    Args:
        header: JSON values that describe the ids, by name.

    Raises:
        CheckpointError: the file cannot be written.
    """
    name = ids_beside(path)
    save_model(name, tensors, {_KEY: json.dumps(header, ensure_ascii=False)})
    return name


def load_ids(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return the header and tensors that `save_ids` wrote for a model file, or None without ids.

    Raises:
        CheckpointError: the file is damaged, or is no file of ids.
    """
    name = ids_beside(path)
    folder, file = Folder(name).parent()
    if not folder.exists(file):
        return None
    tensors, metadata, _ = open_model(name)
    try:
        return dict(json.loads(metadata[_KEY])), tensors
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError("this is no map of ids", where=name) from error
