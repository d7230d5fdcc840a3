"""The file beside a model's that says which row of its tables each id has: plain safetensors.

Its metadata have an entry `ids`, JSON; its tensors are int64.
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

_KEY = "ids"
_ENDING = ".ids.safetensors"
_MODELS = (".weights.h5", ".safetensors", ".keras", ".pth", ".pt")


def ids_beside(path: str | os.PathLike[str]) -> str:
    """The name of the file of ids that belongs to a model file."""
    name = os.fspath(path)
    ending = next((ending for ending in _MODELS if name.endswith(ending)), "")
    return name.removesuffix(ending) + _ENDING


def save_ids(
    path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> str:
    """Write the ids of the model that `path` is the file of; returns the name of theirs.

    Args:
        path: of the model.
        header: what is to be said of them, as JSON.
        tensors: by name.

    Raises:
        CheckpointError: the file cannot be written.
    """
    name = ids_beside(path)
    save_model(name, tensors, {_KEY: json.dumps(header, ensure_ascii=False)})
    return name


def load_ids(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """What `save_ids` has written beside a model file; None where there is nothing.

    Raises:
        CheckpointError: the file is damaged, or another one.
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
