"""Weights from any file or folder that holds some, without executing anything in it."""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import Tensor

from flatout.console import first_line
from flatout.errors import CheckpointError
from flatout.save.best import RunWeights, Which, choose, kept_in
from flatout.save.checkpoint import is_checkpoint, read_weights
from flatout.save.manifest import MANIFEST
from flatout.save.model_file import INDEX, MODEL, is_model_file, open_model
from flatout.save.storage import Folder

# What reading a member of a ZIP archive raises whose bytes are damaged, encrypted or packed in
# another way.
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
_PIECE = 16 << 20
# The attribute by which a member of a ZIP archive is a folder.
_FOLDER = 0x10
TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")

# Where training scripts put the weights among the rest of their state.
_WEIGHT_KEYS = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True)
class Weights:
    """Tensors by name, and what is known of where they come from.

    Attributes:
        tensors: by the names in the file.
        where: the file they were read from.
        own: whether Flatout wrote it, so that the names are the module's own.
        lightning: whether it is a Lightning checkpoint.
        metadata: of a safetensors file.
        left_out: names of entries that are no tensors.
        which: of a run, whether these are its "best" or its "last".
        score: of these, as a figure in words; "" where none is known.
        kept: what the run has: its best and its last, where they differ.
        checkpoint: the folder of the checkpoint that they are of.
    """

    tensors: dict[str, Tensor]
    where: str
    own: bool = False
    lightning: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    which: str | None = None
    score: str = ""
    kept: list[RunWeights] = field(default_factory=list)
    checkpoint: Folder | None = None


def read_weights_of(source: str | os.PathLike[str], which: Which | None = None) -> Weights:
    """Read the weights of a run, a checkpoint, a safetensors file, or a file made by torch.save.

    Args:
        source: a path or an fsspec URL.
        which: of a run, its best weights or those of its last checkpoint; by default the best
            where something shows which they are, else the last.

    Raises:
        CheckpointError: nothing is there, it is damaged, it holds no weights, or it could only be
            read by executing code from it.
    """
    folder = Folder(source)
    if folder.is_folder():
        return _of_folder(folder, which)
    _refuse_choice(which, folder)
    parent, name = folder.parent()
    if not parent.exists(name):
        raise CheckpointError("there is no such file or folder", where=folder.where())
    if is_model_file(name):
        tensors, metadata, own = open_model(source)
        return Weights(tensors, folder.where(), own=own, metadata=metadata)
    if name.endswith(TORCH_FILES):
        with parent.open(name) as file:
            return _of_torch(file, folder.where())
    raise CheckpointError(
        f"expected a run, a checkpoint, .safetensors, {', '.join(TORCH_FILES)}; found {name!r}",
        where=folder.where(),
    )


def _of_folder(folder: Folder, which: Which | None) -> Weights:
    if folder.exists(MANIFEST):
        _refuse_choice(which, folder)
        tensors, where, metadata = read_weights(folder)
        return Weights(tensors, where, own=True, metadata=metadata, checkpoint=folder)
    for place in (folder, folder.child("checkpoints")):
        if any(map(is_checkpoint, place.list())):
            kept = kept_in(place)
            if kept:
                return _of_run(place, kept, choose(kept, which, folder.where()))
    _refuse_choice(which, folder)
    for file in (MODEL, INDEX):
        if folder.exists(file):
            return read_weights_of(folder.where(file))
    raise CheckpointError(
        f"expected a checkpoint, a run with checkpoints, or {MODEL}; found none of them",
        where=folder.where(),
    )


def _of_run(checkpoints: Folder, kept: list[RunWeights], chosen: RunWeights) -> Weights:
    folder = checkpoints.child(chosen.checkpoint)
    tensors, where, metadata = read_weights(folder)
    if chosen.weights is not None:
        tensors = {name: chosen.weights[name] for name in tensors}
    kept = kept if len(kept) > 1 else []
    return Weights(
        tensors,
        where,
        own=True,
        metadata=metadata,
        which=chosen.which,
        score=chosen.score,
        kept=kept,
        checkpoint=folder,
    )


def _refuse_choice(which: Which | None, folder: Folder) -> None:
    if which is not None:
        raise CheckpointError(
            f"expected a run with checkpoints to take the {which} of", where=folder.where()
        )


def check_archive(file: IO[bytes], where: str) -> None:
    """Compare each member of a ZIP archive with its CRC-32; other files are left alone.

    A CRC-32 of 0 is none: torch.save writes it where it was asked for no checksums.

    Raises:
        CheckpointError: a member differs, or the archive is damaged.
    """
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                for member in archive.infolist():
                    _check_member(archive, member)
    except (*BROKEN, OSError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"the file is damaged: {first_line(error)}",
            where=where,
            do="load another checkpoint, or fetch the file again",
        ) from error
    file.seek(0)


def _check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    if member.file_size and member.external_attr & _FOLDER:  # torch would read nothing of it
        raise zipfile.BadZipFile(f"{member.filename} is marked as a folder")
    if member.CRC:
        with archive.open(member) as opened:
            while opened.read(_PIECE):
                pass


def _of_torch(file: IO[bytes], where: str) -> Weights:
    check_archive(file, where)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(file, where, error) from error
    except Exception as error:  # whatever a damaged file makes the reader do
        raise CheckpointError(
            f"not a file that torch.save makes, or damaged: {first_line(error)}", where=where
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"expected a dict of tensors, found a {type(content).__name__}", where=where
        )
    entries = next((content[k] for k in _WEIGHT_KEYS if _has_tensors(content.get(k))), content)
    tensors = {str(k): v for k, v in entries.items() if isinstance(v, Tensor)}
    if not tensors:
        listed = ", ".join(map(repr, list(content)[:10]))
        raise CheckpointError(f"there are no weights in it, only {listed}", where=where)
    return Weights(
        tensors,
        where,
        lightning="state_dict" in content
        and ("pytorch-lightning_version" in content or where.endswith(".ckpt")),
        left_out=[str(key) for key in entries if str(key) not in tensors],
    )


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _refused(file: IO[bytes], where: str, error: Exception) -> CheckpointError:
    """The error for a pickle that is more than tensors and plain data, or for no pickle at all."""
    named = set(re.findall(r"GLOBAL (\S+)", str(error)))
    if not named and "allowlisted" not in str(error):
        return CheckpointError("not a file that torch.save makes, or damaged", where=where)
    with suppress(Exception):  # the listing knows only the newer of the two file formats
        file.seek(0)
        named |= set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    code = (
        f"import torch; c = torch.load({where!r}, map_location='cpu', weights_only=False); "
        "torch.save(dict(c.get('state_dict', c)), 'weights.pt')"
    )
    return CheckpointError(
        "loading it would execute code that the file names"
        + (f": {', '.join(sorted(named)[:5])}" if named else ""),
        where=where,
        do="if you trust it, run in the environment that made it:\n"
        f'    python -c "{code}"\n'
        "  and export weights.pt",
    )
