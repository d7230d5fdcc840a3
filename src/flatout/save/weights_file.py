"""Saves and loads the weights of a torch model; the file name's suffix decides the format."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.models import TorchModel
from flatout.save.foreign import BROKEN, TORCH_FILES, read_weights_of
from flatout.save.model_file import is_model_file, open_model, save_model
from flatout.save.storage import Folder
from flatout.values import refusal

# Suffixes of files that torch.save writes.
_PICKLES = (".pt", ".pth")
# MEMBER: name of the member of a ZIP archive that holds texts as JSON. _LARGEST: maximum bytes of
# this member.
MEMBER = "flatout.json"
_LARGEST = 64 << 20


def check_ending(path: str | os.PathLike[str], kind: TorchModel | type[TorchModel]) -> None:
    """Check that the suffix of a file name is one that models of this kind use."""
    name = os.fspath(path)
    if not name.endswith(kind.endings):
        raise CheckpointError(kind.saved_as, where=name, do="choose one of these endings")


def save_weights(
    path: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    check_ending(path, TorchModel)
    if not os.fspath(path).endswith(_PICKLES):
        save_model(path, weights, metadata)
        return
    folder, name = Folder(path).parent()
    for key, tensor in weights.items():
        if reason := refusal(tensor):
            raise CheckpointError(f"cannot store {key!r}: {reason}", where=folder.where(name))
    file = io.BytesIO()
    torch.save({key: _plain(tensor) for key, tensor in weights.items()}, file)
    if metadata:
        _add(file, metadata)
    folder.remove_abandoned()
    folder.write_whole(name, [file.getbuffer()])


def load_weights_file(
    path: str | os.PathLike[str], say: Callable[[str], object] = bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights in a file, by name and on the CPU, and the texts stored with them.

    No code in the file is executed.

    Args:
        path: path or URL of a file that `save_weights` or torch.save (.bin, .ckpt) wrote, or of an
            index of several safetensors files.
        say: is called with a line for the user if the file holds several sets of weights.

    Raises:
        CheckpointError: the file is missing or damaged, holds no weights, or has another suffix.
    """
    if os.fspath(path).endswith(TORCH_FILES):
        weights = read_weights_of(path)
        if weights.other_keys:
            say(f"{weights.where}: {weights.describe()}; `flatout export --key` takes another")
        return weights.tensors, _text_in(path)
    if not is_model_file(path):
        check_ending(path, TorchModel)
    tensors, metadata, _ = open_model(path)
    return tensors, metadata


def _add(file: io.BytesIO, metadata: Mapping[str, str]) -> None:
    with zipfile.ZipFile(file, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/{MEMBER}", json.dumps(dict(metadata), ensure_ascii=False))


def _text_in(path: str | os.PathLike[str]) -> dict[str, str]:
    folder, name = Folder(path).parent()
    with folder.open(name) as file:
        if not zipfile.is_zipfile(file):
            return {}
        with zipfile.ZipFile(file) as archive:  # read_weights_of has checked the archive
            return text_in(archive, folder.where(name))


def text_in(archive: zipfile.ZipFile, where: str) -> dict[str, str]:
    members = (m for m in archive.infolist() if m.filename.rpartition("/")[2] == MEMBER)
    member = next(members, None)
    if member is None or member.file_size > _LARGEST:
        return {}
    try:
        content = archive.read(member)
    except BROKEN as error:
        raise CheckpointError(f"damaged: {member.filename}: {error}", where=where) from error
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    pairs = data.items() if isinstance(data, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, str)}


def _plain(tensor: Tensor) -> Tensor:
    here = tensor.detach().cpu()
    is_part = here.untyped_storage().nbytes() > here.numel() * here.element_size()
    return here.clone() if is_part else here
