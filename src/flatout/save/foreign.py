"""Reads weights from files and folders of many kinds, without executing code in them."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import struct
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
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

# Errors of reading a member of a ZIP archive that is damaged, encrypted, or compressed by an
# unknown method.
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
_PIECE = 16 << 20
# The attribute that marks a member of a ZIP archive as a folder.
_FOLDER = 0x10
TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")

# Keys under which training scripts usually store the weights.
_WEIGHT_KEYS = ("state_dict", "model_state_dict", "model", "module")
# _DEEPEST: maximum number of nested keys that lead to weights. _LISTED: maximum number of sets of
# weights that an error lists.
_DEEPEST, _LISTED = 4, 10
_WHOLE = "(the file itself)"
# Maximum number of unknown classes in a file; a file with more classes is refused.
_MOST_NAMES = 100
# Script for the user: rewrites a file as plain data. It executes code that the file names.
_CONVERT = (
    "import sys, torch; c = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
    "c = c if isinstance(c, dict) else {'model': c}; "
    "c = {k: v.state_dict() if hasattr(v, 'state_dict') else v for k, v in c.items()}; "
    "torch.save({k: {n: t for n, t in v.items() if torch.is_tensor(t)} if isinstance(v, dict) "
    "else v for k, v in c.items() if isinstance(v, dict) or torch.is_tensor(v)}, sys.argv[2])"
)


@dataclass(frozen=True)
class Weights:
    """Weights, and facts about their source.

    Attributes:
        tensors: tensors by their names in the file.
        where: path or URL of the file.
        own: whether Flatout wrote the file, so that names are those of the module's `state_dict`.
        lightning: whether the file is a Lightning checkpoint.
        metadata: metadata texts of a safetensors file, by name.
        left_out: names of entries that are no tensors.
        which: for a run, "best" or "last": the weights that were read.
        score: monitored metric of these weights, such as "val_loss 0.3124"; "" if unknown.
        kept: for a run, its best and its last weights, if they differ.
        checkpoint: folder of the checkpoint that the weights were read from.
        key: for a file made by torch.save, the dotted keys that lead to the weights; "" if the file
            is one dict of tensors.
        other_keys: for a file made by torch.save, keys of sets of weights that were not read.
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
    key: str = ""
    other_keys: list[str] = field(default_factory=list)

    def describe(self) -> str:
        if not self.other_keys:
            return ""
        others = ", ".join(name or _WHOLE for name in self.other_keys[:_LISTED])
        return (
            f"the file holds {len(self.other_keys) + 1:,} sets of weights: "
            f"{self.key or _WHOLE} is taken, not {others}"
        )


def read_weights_of(
    source: str | os.PathLike[str], which: Which | None = None, key: str | None = None
) -> Weights:
    """Read the weights of a run, a checkpoint, a safetensors file, or a file made by torch.save.

    Args:
        source: path or fsspec URL of the run, checkpoint or file.
        which: "best" or "last" weights of a run. None means the best weights if the run has scores
            or EarlyStopping's weights, else the last.
        key: for a file made by torch.save, the key of a set of weights; a dot joins nested keys.
            None means "state_dict", "model_state_dict", "model" or "module" if the file has one of
            these keys, or else the only set in the file.

    Raises:
        CheckpointError: the source is missing, is damaged, or holds no weights; or it holds several
            sets and `key` is not given; or to read the source would execute code from it.
    """
    folder = Folder(source)
    if key is not None and (folder.is_folder() or not folder.url.endswith(TORCH_FILES)):
        raise CheckpointError(
            f"expected a {', '.join(TORCH_FILES)} file, to take the set {key!r} from",
            where=folder.where(),
            do="leave --key out",
        )
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
            return _of_torch(file, folder.where(), key)
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
    """Compare each member of a ZIP archive with its CRC-32; accept every file of another kind.

    A CRC-32 of 0 is not compared: torch.save writes 0 if its checksums are switched off.
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
    if member.file_size and member.external_attr & _FOLDER:  # torch would read it as empty
        raise zipfile.BadZipFile(f"{member.filename} is marked as a folder")
    if member.CRC:
        with archive.open(member) as opened:
            while opened.read(_PIECE):
                pass


def _of_torch(file: IO[bytes], where: str, key: str | None) -> Weights:
    check_archive(file, where)
    content, unread = _content_of(file, where)
    found = _sets_in(content)
    if not found and unread:
        raise _refused(where, unread)
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"expected a dict of tensors, found a {type(content).__name__}", where=where
        )
    if not found:
        listed = ", ".join(map(repr, list(content)[:10]))
        raise CheckpointError(f"there are no weights in it, only {listed}", where=where)
    taken = _choose_set(found, key, where)
    entries = found[taken]
    tensors = {str(k): v for k, v in entries.items() if isinstance(v, Tensor)}
    return Weights(
        tensors,
        where,
        lightning="state_dict" in content
        and ("pytorch-lightning_version" in content or where.endswith(".ckpt")),
        left_out=[str(name) for name in entries if str(name) not in tensors],
        key=taken,
        other_keys=[other for other in _sets_of_weights(found) if other != taken],
    )


class Unread:
    """Replaces an object in a file that is no tensor or plain data. Its class is not imported."""

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _without_default(*_: object) -> dict[Any, Any]:
    return {}


# Harmless replacements of classes in a file; all other unknown classes become `Unread`.
_STANDS_IN = {"collections.defaultdict": _without_default}


def _content_of(file: IO[bytes], where: str) -> tuple[Any, set[str]]:
    """Return the content of a file, and the names of the classes that were replaced in it."""
    unread: set[str] = set()
    while True:
        file.seek(0)
        try:
            stands_in: list[Any] = [(_STANDS_IN.get(name, Unread), name) for name in unread]
            with torch.serialization.safe_globals(stands_in):
                return torch.load(file, map_location="cpu", weights_only=True), unread
        except pickle.UnpicklingError as error:
            named = _globals_in(file, error)
            if not named and "allowlisted" not in str(error) and not unread:
                raise CheckpointError(
                    "not a file that torch.save makes, or damaged", where=where
                ) from error
            if named <= unread or len(unread) > _MOST_NAMES:
                raise _refused(where, named | unread) from error
            unread |= named
        except Exception as error:  # the reader may raise any error for a damaged file
            if unread:
                raise _refused(where, unread) from error
            raise CheckpointError(
                f"not a file that torch.save makes, or damaged: {first_line(error)}", where=where
            ) from error


def _globals_in(file: IO[bytes], error: pickle.UnpicklingError) -> set[str]:
    named = {
        name if "." in name else f"builtins.{name}"
        for name in re.findall(r"GLOBAL (\S+)", str(error))
    }
    with suppress(Exception):  # torch lists names only for its newer file format, a ZIP archive
        file.seek(0)
        named |= set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return named


def _sets_in(content: Any) -> dict[str, Mapping[Any, Any]]:
    """Return each dict of tensors in a file, by its dotted keys; "" means the file's own dict.

    The states of optimizers are left out.
    """
    found: dict[str, Mapping[Any, Any]] = {}
    if not isinstance(content, Mapping):
        return found
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), content)]
    for keys, value in waiting:  # the loop appends to `waiting`
        is_dict = isinstance(value, Mapping)
        if id(value) in seen or (is_dict and {"state", "param_groups"} <= value.keys()):
            continue
        seen.add(id(value))
        entries = list(value.items() if is_dict else enumerate(value))
        if is_dict and any(isinstance(entry, Tensor) for _, entry in entries):
            found.setdefault(".".join(keys), value)
        if len(keys) < _DEEPEST:
            waiting += [
                ((*keys, str(key)), entry)
                for key, entry in entries
                if isinstance(entry, (Mapping, list, tuple))
                and not str(key).endswith("_extra_state")
            ]
    return found


def _sets_of_weights(found: Mapping[str, Mapping[Any, Any]]) -> list[str]:
    known = [key for key in _WEIGHT_KEYS if key in found]
    others = [key for key, entries in found.items() if key not in known and _are_weights(entries)]
    if known:
        return known + [key for key in others if key]
    return others or list(found)


def _are_weights(entries: Mapping[Any, Any]) -> bool:
    tensors = [entry for entry in entries.values() if isinstance(entry, Tensor)]
    return any(tensor.ndim and tensor.dtype != torch.uint8 for tensor in tensors)


def _choose_set(found: Mapping[str, Mapping[Any, Any]], key: str | None, where: str) -> str:
    sets = _sets_of_weights(found)
    if key is not None and key in found:
        return key
    if key is None and (len(sets) == 1 or sets[0] in _WEIGHT_KEYS):
        return sets[0]
    what = (
        f"the file holds {len(sets):,} sets of weights, and no name shows the model's"
        if key is None
        else f"the file holds no set of weights {key!r}; it holds"
    )
    listed = ", ".join(name or _WHOLE for name in sets[:_LISTED])
    more = f", … {len(sets) - _LISTED:,} more" if len(sets) > _LISTED else ""
    raise CheckpointError(
        f"{what}: {listed}{more}",
        where=where,
        do=f"take one of them: flatout export {shlex.quote(where)} plain.safetensors "
        f"--key {shlex.quote(sets[-1])}",
    )


def _refused(where: str, named: set[str]) -> CheckpointError:
    plain = f"{PurePath(where).stem}-plain.pt"
    return CheckpointError(
        "loading it would execute code that the file names"
        + (f": {', '.join(sorted(named)[:5])}" if named else ""),
        where=where,
        do="if you trust it, run in the environment that made it:\n"
        f'    python -c "{_CONVERT}" {shlex.quote(where)} {shlex.quote(plain)}\n'
        f"  and then: flatout export {shlex.quote(plain)}",
    )
